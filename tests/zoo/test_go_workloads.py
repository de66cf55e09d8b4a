"""GO's workloads against published figures and closed formulas."""

from __future__ import annotations

import time

import numpy as np
import pytest

import egx
import egx.zoo
from egx.errors import GraphError
from egx.graph.graph import real_sizes
from egx.zoo.common import layer_numbers
from tests.zoo.facts import Facts, check_training_graph

UPDATES = {
    "rnnlm": "sgd",
    "gnmt": "adam",
    "transformer_xl": "adam",
    "inception_v3": "rmsprop",
    "amoebanet": "rmsprop",
    "wavenet": "adam",
}

SMALL = {
    "rnnlm": {"steps": 3, "hidden": 16, "vocabulary": 50},
    "gnmt": {"layers": 4, "steps": 3, "hidden": 16, "vocabulary": 50},
    "transformer_xl": {"sequence": 32, "memory": 16},
    "inception_v3": {"batch": 2, "resolution": 80},
    "amoebanet": {"layers": 3, "filters": 32, "batch": 2, "resolution": 64},
    "wavenet": {"stacks": 2, "layers": 3, "samples": 64},
}


def lstm(fan_in, hidden):
    return (fan_in + hidden) * 4 * hidden + 4 * hidden


@pytest.mark.parametrize("name", SMALL)
def test_is_a_training_graph(name):
    model = egx.load(name, **SMALL[name])
    facts = check_training_graph(model, UPDATES[name])
    inferred = Facts(egx.load(name, training=False, **SMALL[name]))
    extra = set(inferred.names) - set(facts.names)
    assert extra == {n for n in inferred.of_type("softmax") if n not in facts.at}
    assert len(extra) == 1
    # Two more contractions for each, but for the gradients of what comes from outside.
    forward, whole = inferred.contraction_flops(), facts.contraction_flops()
    missing = 0.0
    if name in ("inception_v3", "amoebanet"):
        first = {"inception_v3": "stem/1a.conv", "amoebanet": "stem/conv.conv"}[name]
        missing = facts.flops[facts.at[first]]
    if name == "gnmt":  # the first question is a constant
        missing = facts.flops[facts.at["decoder0/attention/step0/query"]]
    if name == "transformer_xl":  # so are positions
        missing = 2 * facts.flops[facts.at["layer0/attention/position.matmul"]]
    assert whole == 3 * forward - missing
    # Weights are held by ops for inference, or handed out where steps share them.
    inferred_bytes = inferred.weights.sum() + sum(
        inferred.sizes(n)[0] for n in inferred.of_type("parameter")
    )
    assert inferred_bytes == pytest.approx(4 * model.notes["parameters"], rel=1e-3)


@pytest.mark.parametrize("layers", [2, 4, 8])
def test_rnnlm(layers):
    model = egx.zoo.rnnlm(layers=layers, steps=5, training=False)
    hidden, words = 1500, 10_000
    expected = words * hidden + layers * lstm(hidden, hidden) + hidden * words + words
    assert model.notes["parameters"] == expected
    if layers == 2:  # "66 M" in the paper
        assert round(expected / 1e6) == 66
    flops = 2 * 64 * 5 * (layers * 2 * hidden * 4 * hidden + hidden * words)
    assert Facts(model).contraction_flops() == pytest.approx(flops, rel=1e-6)
    assert model.notes["layer_separator"] == "/"
    assert set(layer_numbers(model).tolist()) == set(range(layers))


def test_a_step_of_an_lstm_is_13_ops_and_33_in_training():
    """Of the 20 of the backward pass, four add up gradients: of both states and both weights."""
    for training, expected in ((False, 13), (True, 33)):
        three, four = (
            real_sizes(egx.zoo.rnnlm(layers=2, steps=steps, training=training).graph)[0]
            for steps in (3, 4)
        )
        assert four - three == 2 * expected
    facts = Facts(egx.zoo.rnnlm(steps=3))
    assert facts.inputs("layer0/step1/concat") == ["layer0/embedding/steps:1", "layer0/step0/h"]
    assert facts.inputs("layer1/step0/concat") == ["layer0/step0/h", "layer1/state_h"]
    # All steps read one tensor of weights, forwards and backwards.
    (weights,) = facts.outputs("layer1/weights")
    readers = [facts.names[k] for k in facts.use_consumer[facts.use_tensor == weights]]
    assert readers == [
        *(f"layer1/step{k}/matmul" for k in range(3)),
        *(f"layer1/step{k}/matmul.grad_x" for k in (2, 1, 0)),
        "layer1/weights.update",
    ]
    # The gates are kept for the backward pass, the matmul's output is not.
    gate, product = (facts.outputs(f"layer0/step0/{n}")[0] for n in ("sigmoid_i", "matmul"))
    assert facts.last[gate] == facts.at["layer0/step0/sigmoid_i.grad"]
    assert facts.last[product] == facts.at["layer0/step0/bias"]


@pytest.mark.parametrize("layers", [1, 2, 4, 8])
def test_gnmt(layers):
    hidden, words, steps, batch = 1024, 32_000, 3, 64
    model = egx.zoo.gnmt(layers=layers, steps=steps, training=False)
    read = 2 * hidden if layers == 1 else hidden  # what the encoder hands out
    encoder = 2 * lstm(hidden, hidden)
    encoder += sum(lstm(2 * hidden if k == 1 else hidden, hidden) for k in range(1, layers))
    decoder = layers * lstm(hidden + read, hidden)
    attention = read * hidden + hidden * hidden + hidden
    expected = 2 * words * hidden + encoder + decoder + attention + hidden * words
    assert model.notes["parameters"] == expected
    shifts = 4 * hidden * (layers + 1 + layers)
    matrices = encoder + decoder - shifts + hidden * words
    keys = read * hidden + hidden  # once a word of the encoder, asked by each of the decoder
    macs = steps * (matrices + read * hidden + hidden * hidden + steps * (hidden + read))
    assert keys < attention
    assert Facts(model).contraction_flops() == pytest.approx(2 * batch * macs, rel=1e-6)
    numbers = layer_numbers(model)
    names = [name.split("/")[0] for name in model.op_names]
    assert [names[k] for k in np.unique(numbers, return_index=True)[1]] == [
        *(f"encoder{k}" for k in range(layers)),
        *(f"decoder{k}" for k in range(layers)),
    ]


def test_gnmt_has_residuals_from_the_third_layer_and_asks_by_the_step_before():
    facts = Facts(egx.zoo.gnmt(**SMALL["gnmt"]))
    residuals = [n for n in facts.names if n.endswith("step0/residual")]
    assert residuals == [
        f"{part}{k}/step0/residual" for part in ("encoder", "decoder") for k in (2, 3)
    ]
    assert facts.inputs("encoder3/step1/residual") == [
        "encoder3/step1/h",
        "encoder2/step1/residual",
    ]
    assert facts.inputs("decoder0/attention/step1/query")[0] == "decoder0/step0/h"
    assert facts.inputs("decoder3/step1/concat") == [
        *("decoder2/step1/residual", "decoder0/attention/step1/context", "decoder3/step0/h")
    ]
    # The first layer runs both ways: the backward half begins with the last word.
    assert facts.inputs("encoder0/back/step0/concat")[0] == "encoder0/embedding/steps:2"
    assert facts.inputs("encoder0/both2") == ["encoder0/ahead/step2/h", "encoder0/back/step0/h"]


@pytest.mark.parametrize("layers", [2, 4, 8, 12])
def test_transformer_xl(layers):
    width, inner, words, here, past, batch = 512, 2048, 204, 512, 512, 22
    model = egx.zoo.transformer_xl(layers=layers, training=False)
    attention = 5 * width * width  # query, key, value, position, output
    inside = 2 * width * inner + inner + width
    expected = words * width + words + 2 * width + layers * (attention + inside + 4 * width)
    assert model.notes["parameters"] == expected
    if layers == 12:  # "41 M" in the paper
        assert round(expected / 1e6) == 41
    keys = here + past
    rows = here * (2 * width * width + 2 * width * inner) + keys * 2 * width * width
    macs = layers * (batch * (rows + 3 * here * keys * width) + keys * width * width)
    macs += batch * here * width * words
    assert Facts(model).contraction_flops() == pytest.approx(2 * macs, rel=1e-6)


def test_transformer_xl_hands_its_memory_on():
    facts = Facts(egx.zoo.transformer_xl(**SMALL["transformer_xl"]))
    held = {facts.names[facts.producer[t]] for t in np.flatnonzero(facts.is_output)}
    assert {"layer0/embedding/scale", "layer0/ffn/norm.apply"} <= held
    assert "layer1/ffn/norm.apply" not in held
    assert facts.inputs("layer1/attention/concat") == [
        *("layer1/attention/memory", "layer0/ffn/norm.apply")
    ]
    # The memory has no gradient: the concatenation's has one part.
    assert len(facts.outputs("layer1/attention/concat.grad")) == 1
    assert facts.sizes("layer0/attention/softmax") == [22 * 32 * 48 * 8 * 4]
    # Every layer projects the same positions, which have no batch.
    assert facts.sizes("layer0/positions") == [48 * 512 * 4]
    assert facts.inputs("layer1/attention/place") == [
        *("layer1/attention/position_bias", "layer1/attention/position.matmul")
    ]


def test_inception_v3_has_its_published_figures():
    model = egx.zoo.inception_v3(batch=1, training=False)
    facts = Facts(model)
    # torchvision's 27,161,264 without the auxiliary classifier's 3,326,696: 23.8 M.
    assert model.notes["parameters"] == 27_161_264 - 3_326_696
    assert facts.contraction_flops() / 2e9 == pytest.approx(5.71, abs=0.005)
    assert model.op_types.count("conv") == 94
    sides = {name: facts.sizes(name)[0] // 4 for name in facts.names if name.endswith("concat")}
    assert sides["mixed5d/concat"] == 35 * 35 * 288
    assert sides["mixed6e/concat"] == 17 * 17 * 768
    assert sides["mixed7c/concat"] == 8 * 8 * 2048
    wide = Facts(egx.zoo.inception_v3(batch=64, training=False))
    assert wide.contraction_flops() == 64 * facts.contraction_flops()


def test_amoebanet_has_the_parameters_of_gpipe():
    # Huang et al., Table 1: 82 M for (18, 208).
    model = egx.zoo.amoebanet(batch=1, training=False)
    assert round(model.notes["parameters"] / 1e6) == 82
    facts = Facts(model)
    # Stem, two reductions, six cells, ... down to 7 x 7; a normal cell hands out four states.
    assert facts.sizes("cell2.5/concat") == [7 * 7 * 4 * 832 * 4]
    assert facts.sizes("reduction1/concat") == [7 * 7 * 3 * 832 * 4]


@pytest.mark.parametrize(("stacks", "layers"), [(2, 18), (4, 36)])
def test_wavenet(stacks, layers):
    r, s, samples, batch = 128, 256, 8192, 4
    model = egx.zoo.wavenet(stacks=stacks, layers=layers, training=False)
    count = stacks * layers
    matrices = count * (2 * r * 2 * r + r * s + r * r) - r * r + s * s + s * 256
    shifts = count * (2 * r + s + r) - r + s + 256
    assert model.notes["parameters"] == 256 * r + matrices + shifts
    facts = Facts(model)
    assert facts.contraction_flops() == pytest.approx(2 * batch * samples * matrices, rel=1e-6)
    assert set(layer_numbers(model).tolist()) == set(range(stacks))
    dilation = np.asarray(model.graph.geometry)[facts.at["stack1/layer13/dilated"]]
    assert 2**3 in dilation


def test_time_to_build_grows_with_the_ops():
    """Four times the ops take about four times as long, not 16 times."""
    seconds, ops = [], []
    for steps in (5, 20):
        before = time.process_time()
        model = egx.zoo.rnnlm(steps=steps)
        seconds.append(time.process_time() - before)
        ops.append(real_sizes(model.graph)[0])
    assert ops[1] > 3 * ops[0]
    assert seconds[1] < 9 * seconds[0]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: egx.zoo.rnnlm(steps=0), ("rnnlm", "steps", "0")),
        (lambda: egx.zoo.gnmt(layers=-1), ("gnmt", "layers", "-1")),
        (lambda: egx.zoo.transformer_xl(heads=7), ("hidden 512", "heads 7")),
        (lambda: egx.zoo.inception_v3(resolution=32), ("inception_v3", "resolution", "75")),
        (lambda: egx.zoo.amoebanet(layers=4), ("amoebanet", "layers", "3", "4")),
        (lambda: egx.zoo.wavenet(batch=1.5), ("wavenet", "batch", "1.5")),
    ],
)
def test_errors_name_what_is_wrong(call, words, unchecked):
    with pytest.raises(GraphError) as caught:
        call()
    for word in words:
        assert word in str(caught.value)
