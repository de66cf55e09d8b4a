"""The tape against training steps that were written out by hand."""

from __future__ import annotations

import numpy as np
import pytest

import egx.zoo
from egx.errors import GraphError
from egx.graph.graph import ELEMENTWISE, OPAQUE, REDUCTION
from egx.zoo.common import layer_numbers
from egx.zoo.layers import Layers
from tests.zoo.facts import Facts, check_training_graph


def tape(**options):
    settings = {"batch": 2, "precision": "fp32", "training": True, "optimizer": "momentum"}
    return Layers("toy", **{**settings, **options})


def perceptron(**options):
    """3 features, 5 hidden units, 4 classes, a batch of 2."""
    net = tape(**options)
    x = net.source("a/x", (1, 1, 3))
    y = net.activate("a/relu", "relu", net.linear("a/first", x, 5))
    net.finish("b", net.linear("b/second", y, 4, bias=False))
    return net.build({})


def test_a_perceptron_op_by_op():
    model = perceptron()
    facts = check_training_graph(model, "momentum")
    expected = [
        # name, inputs, FLOPs, bytes of outputs
        ("a/x", [], 0, [24]),
        ("a/first.weights", [], 0, [60]),
        ("a/first.matmul", ["a/x", "a/first.weights"], 60, [40]),
        ("a/first.shift", [], 0, [20]),
        ("a/first.bias", ["a/first.matmul", "a/first.shift"], 10, [40]),
        ("a/relu", ["a/first.bias"], 10, [40]),
        ("b/second.weights", [], 0, [80]),
        ("b/second.matmul", ["a/relu", "b/second.weights"], 80, [32]),
        ("b/cross_entropy", ["b/second.matmul"], 48, [8, 32]),
        ("b/loss", ["b/cross_entropy:0"], 2, [4]),
        # The loss's gradient is a constant: only the probabilities are read.
        ("b/cross_entropy.grad", ["b/cross_entropy:1"], 16, [32]),
        ("b/second.matmul.grad_x", ["b/cross_entropy.grad", "b/second.weights"], 80, [40]),
        ("b/second.matmul.grad_w", ["b/cross_entropy.grad", "a/relu"], 80, [80]),
        (
            "b/second.weights.update",
            ["b/second.matmul.grad_w", "b/second.weights"],
            4 * 20,
            [80, 80],
        ),
        ("a/relu.grad", ["b/second.matmul.grad_x", "a/relu"], 10, [40]),
        # The bias hands the gradient on as it is, and adds it up for itself.
        ("a/first.bias.grad_b", ["a/relu.grad"], 10, [20]),
        ("a/first.shift.update", ["a/first.bias.grad_b", "a/first.shift"], 4 * 5, [20, 20]),
        # Nobody asks for the gradient of the input.
        ("a/first.matmul.grad_w", ["a/relu.grad", "a/x"], 60, [60]),
        ("a/first.weights.update", ["a/first.matmul.grad_w", "a/first.weights"], 4 * 15, [60, 60]),
    ]
    found = [
        (name, facts.inputs(name), facts.flops[k], facts.sizes(name))
        for k, name in enumerate(facts.names)
    ]
    assert found == expected
    assert model.notes["parameters"] == 15 + 5 + 20
    outputs = {facts.names[facts.producer[t]] for t in np.flatnonzero(facts.is_output)}
    assert outputs == {"b/loss", *(name for name in facts.names if name.endswith(".update"))}
    # State of four bytes an element is resident with its update.
    assert facts.weights[facts.at["a/first.weights.update"]] == 60
    assert facts.weights.sum() == 4 * model.notes["parameters"]
    assert facts.kind[facts.at["a/first.weights"]] == OPAQUE
    assert facts.kind[facts.at["a/first.bias.grad_b"]] == REDUCTION
    assert layer_numbers(model).tolist() == [0] * 6 + [1] * 8 + [0] * 5


def test_what_is_inferred_is_the_forward_pass_with_weights_in_their_ops():
    facts = Facts(perceptron(training=False))
    assert facts.names == (
        *("a/x", "a/first.matmul", "a/first.bias", "a/relu"),
        *("b/second.matmul", "b/softmax"),
    )
    assert facts.weights.tolist() == [0, 60, 20, 0, 80, 0]
    assert np.flatnonzero(facts.is_output).tolist() == facts.outputs("b/softmax")
    # int8 weights beside biases of 32 bits.
    assert Facts(perceptron(training=False, precision="int8")).weights.tolist() == [
        *(0, 15, 20, 0, 20, 0)
    ]


@pytest.mark.parametrize(
    ("optimizer", "precision", "slots", "flops"),
    [
        ("sgd", "fp32", 0, 2),
        ("adam", "fp32", 2, 12),
        # And a copy of the weights in 32 bits.
        ("rmsprop", "bf16", 3, 10),
    ],
)
def test_optimizers_differ_in_state_and_work(optimizer, precision, slots, flops):
    model = perceptron(optimizer=optimizer, precision=precision)
    facts = check_training_graph(model, optimizer)
    updates = [facts.at[name] for name in facts.of_type(optimizer)]
    assert facts.weights[updates].tolist() == [4 * slots * n for n in (20, 5, 15)]
    assert facts.flops[updates].tolist() == [flops * n for n in (20, 5, 15)]
    assert len(facts.outputs("b/second.weights.update")) == 1 + (slots > 0)


def test_gradients_that_meet_are_added_up_and_shared_weights_count_once():
    net = tape(optimizer="sgd")
    weights = net.parameter("a/w", 9)
    x = net.source("a/x", (1, 1, 3))
    first = net.dense("a/one", x, weights, 3)
    second = net.dense("b/two", first, weights, 3)
    third = net.multiply("b/mul", first, second)
    net.finish("b", net.concat("b/all", [third, first]))
    facts = check_training_graph(net.build({}), "sgd")
    assert len(facts.of_type("parameter")) == 1
    backward = facts.names[facts.at["b/cross_entropy.grad"] + 1 :]
    assert backward == (
        "b/all.grad",
        "b/mul.grad_a",
        "a/one.grad_sum1",
        "b/mul.grad_b",
        "b/two.grad_x",
        "a/one.grad_sum2",
        "b/two.grad_w",
        "a/one.grad_w",
        "a/w.grad_sum1",
        "a/w.update",
    )
    # The concatenation's gradient is cut apart: first for the product, then for its factor.
    assert facts.sizes("b/all.grad") == [24, 24]
    assert facts.inputs("a/one.grad_sum1") == ["b/all.grad:1", "b/mul.grad_a"]
    assert facts.inputs("a/one.grad_sum2") == ["a/one.grad_sum1", "b/two.grad_x"]
    assert facts.inputs("a/one.grad_w") == ["a/one.grad_sum2", "a/x"]
    assert facts.kind[facts.at["a/w.grad_sum1"]] == ELEMENTWISE
    # For inference too: two ops read the weights, so that neither can own them.
    net.training = False
    inferred = Facts(net.build({}))
    assert inferred.of_type("parameter") == ["a/w"]
    assert inferred.weights.sum() == 0


def test_normalisation_splits_at_its_reduction_and_softmax_keeps_its_output():
    net = tape()
    x = net.linear("a/in", net.source("a/x", (4, 1, 3)), 6, bias=False)
    y = net.softmax("a/softmax", net.layer_norm("a/norm", x))
    net.finish("a", net.batch_norm("a/batch", y))
    facts = check_training_graph(net.build({}), "momentum")
    # Two numbers a position, and two a channel over the whole batch.
    assert facts.sizes("a/norm.statistics") == [2 * 4 * 2 * 4]
    assert facts.sizes("a/batch.statistics") == [2 * 6 * 4]
    assert facts.inputs("a/norm.apply.grad_x") == [
        *("a/softmax.grad", "a/in.matmul", "a/norm.scale", "a/norm.statistics")
    ]
    assert facts.inputs("a/norm.apply.grad_scale") == [
        *("a/softmax.grad", "a/in.matmul", "a/norm.statistics")
    ]
    assert facts.inputs("a/softmax.grad") == ["a/batch.apply.grad_x", "a/softmax"]
    assert facts.sizes("a/norm.scale") == [2 * 6 * 4]


def test_convolutions_and_poolings_by_hand():
    net = tape()
    x = net.conv("a/first", net.source("a/x", (9, 9, 2)), 3, 3, stride=2, pad=1)
    y = net.pool("a/max", "max", x, 3, stride=2)
    y = net.conv("a/wide", y, 4, (1, 3), pad=(0, 1))
    net.finish("a", net.pool("a/mean", "average", y, 2))
    facts = check_training_graph(net.build({}), "momentum")
    # 5 x 5 positions of 3 channels from windows of 18 numbers, a batch of 2, 2 FLOPs.
    assert facts.flops[facts.at["a/first"]] == 2 * 2 * 25 * 3 * 18
    assert facts.sizes("a/max") == [2 * 2 * 2 * 3 * 4]
    assert facts.flops[facts.at["a/max"]] == 2 * 4 * 3 * 9
    assert facts.inputs("a/max.grad") == ["a/wide.grad_x", "a/first", "a/max"]
    assert facts.flops[facts.at["a/wide"]] == 2 * 2 * 4 * 4 * 9
    assert facts.sizes("a/mean") == [2 * 4 * 4]
    assert facts.inputs("a/mean.grad") == ["a/cross_entropy.grad"]
    assert "a/first.grad_x" not in facts.at


def test_a_parameter_without_influence_is_named():
    net = tape()
    x = net.source("a/x", (1, 1, 3))
    net.linear("a/idle", x, 2)
    net.finish("a", net.linear("a/used", x, 2))
    with pytest.raises(GraphError, match="toy: the loss does not depend on parameter 'a/idle"):
        net.build({})


def test_layers_are_named_by_those_who_say_so():
    assert set(layer_numbers(egx.zoo.bert(layers=1)).tolist()) == {-1}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"precision": "int8"}, ("toy", "int8", "cannot be trained")),
        ({"optimizer": "lion"}, ("toy", "lion", "momentum")),
        ({"batch": 0}, ("toy", "batch", "0")),
    ],
)
def test_errors_of_a_tape(options, words):
    with pytest.raises(GraphError) as caught:
        tape(**options)
    for word in words:
        assert word in str(caught.value)
