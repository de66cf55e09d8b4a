"""GO's network: its parts against plain NumPy, under padding and relabelling, and rebuilt."""

from __future__ import annotations

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from egx.errors import SearchError
from egx.graph.generators import random_graph
from egx.graph.padding import pad_graph
from egx.hardware.spec import Hardware
from egx.policies.go_inputs import CHOICE_INPUTS, OP_INPUTS, go_context, longest_paths
from egx.policies.go_net import TASKS, GoPolicy, tasks_of
from egx.policies.graph_sage import GraphSage, pool_neighbours
from egx.policies.layers import initialised
from egx.policies.loading import load_policy
from egx.policies.messages import message_context
from egx.policies.segment_attention import SegmentLayer
from egx.problems.execution import Execution
from egx.problems.memory_placement import MemoryPlacement
from egx.problems.padded import pad_problem
from tests.runs import chain
from tests.runs import machine as one_machine

SMALL = {"width": 8, "rounds": 2, "layers": 1, "attention_heads": 2, "segment": 4, "passes": 2}
ALL = ("fusion", "device", "priority")
ROOM = (15, 20, 24)


def machine(devices=3):
    """Unequal devices."""
    speed = np.arange(1, devices + 1, dtype=float)[:, None]
    return Hardware(
        flops_per_s=1e9 * np.broadcast_to(speed, (devices, 5)),
        level_bytes=np.full((devices, 1), 1e9),
        read_bytes_per_s=np.full((devices, 1), 1e9),
        write_bytes_per_s=np.full((devices, 1), 1e9),
        link_bytes_per_s=np.full((devices, devices), 1e8),
        link_latency_s=np.full((devices, devices), 1e-6),
        launch_s=np.zeros(devices),
    )


@functools.cache
def problem(decide=ALL, devices=3):
    return Execution(graph(), machine(devices), decide=decide)


@functools.cache
def graph():
    return random_graph(np.random.default_rng(0), "layered", 10).graph


@functools.cache
def policy(**switches):
    return eqx.filter_jit(lambda key: GoPolicy(**{**SMALL, **switches}, key=key))(jax.random.key(0))


@eqx.filter_jit
def ask(policy, problem):
    return policy(problem)


@functools.cache
def contexts(padded=True):
    """What messages need to know of the padded problem, or of the plain one."""
    return jax.jit(message_context)(pad_problem(problem(), ROOM) if padded else problem())


# The parts.


def neighbours(graph):
    real = np.asarray(graph.use_mask)
    producer, consumer = (
        np.asarray(graph.use_producer())[real],
        np.asarray(graph.use_consumer)[real],
    )
    found = {op: set() for op in range(graph.num_ops)}
    for p, c in zip(producer.tolist(), consumer.tolist(), strict=True):
        found[p].add(c)
        found[c].add(p)
    return found


def test_sage_against_plain_loops():
    padded = pad_graph(graph(), ROOM)
    context = contexts()
    layer = initialised(lambda draws: GraphSage(4, draws), jax.random.key(1))
    x = np.random.default_rng(2).normal(size=(ROOM[0], 4)).astype(np.float32)
    weight, bias = np.asarray(layer.message.weight), np.asarray(layer.message.bias)
    message = 1 / (1 + np.exp(-(x @ weight + bias)))
    pooled = np.zeros_like(x)
    for op, around in neighbours(padded).items():
        if around:
            pooled[op] = message[sorted(around)].max(0)
    # The choice is made to 1 / 8192.
    found = jax.jit(pool_neighbours)(jnp.asarray(message), context)
    np.testing.assert_allclose(found, pooled, atol=2**-13)
    final = np.concatenate([x, pooled], 1) @ layer.update.weight + layer.update.bias
    result = eqx.filter_jit(layer)(jnp.asarray(x), context)
    np.testing.assert_allclose(result, np.maximum(final, 0), atol=1e-3)


def test_gradient_of_pooling_goes_to_the_chosen_sender():
    context = contexts(padded=False)
    around = neighbours(problem().graph)
    message = np.random.default_rng(3).uniform(0.1, 0.9, (10, 2)).astype(np.float32)
    weight = np.random.default_rng(4).normal(size=(10, 2)).astype(np.float32)
    expected = np.zeros_like(message)
    for op, senders in around.items():
        for column in range(2):
            if senders:
                best = max(senders, key=lambda s, column=column: message[s, column])
                expected[best, column] += weight[op, column]
    gradient = jax.jit(jax.grad(lambda m: jnp.sum(pool_neighbours(m, context) * weight)))
    np.testing.assert_allclose(gradient(jnp.asarray(message)), expected, rtol=1e-5, atol=1e-6)


def test_longest_paths_against_plain_loops():
    context = contexts()
    rng = np.random.default_rng(5)
    seconds = rng.uniform(1, 2, ROOM[0]).astype(np.float32)
    sent = rng.uniform(0, 1, ROOM[2]).astype(np.float32)
    before, after = jax.jit(longest_paths)(jnp.asarray(seconds), jnp.asarray(sent), context)
    first, last = np.zeros(ROOM[0]), np.zeros(ROOM[0])
    real = np.asarray(context.use_mask)
    uses = list(zip(np.asarray(context.producer), np.asarray(context.consumer), sent, strict=True))
    uses = [use for use, exists in zip(uses, real, strict=True) if exists]
    for _ in range(10):  # as often as the longest path could need
        for p, c, took in uses:
            first[c] = max(first[c], first[p] + seconds[p] + took)
            last[p] = max(last[p], last[c] + seconds[c] + took)
    np.testing.assert_allclose(before, first, rtol=1e-5)
    np.testing.assert_allclose(after, last, rtol=1e-5)


def test_a_second_segment_that_sees_the_first_is_as_one_segment():
    def build(draws):
        return SegmentLayer(8, 2, draws, attention=True, superposition=True)

    @jax.jit
    def both(key, x):
        layer = initialised(build, key)
        gates, real = layer.gates(jnp.linspace(-1.0, 1.0, 8)), jnp.ones(8, bool)
        whole, _ = layer(x, real, layer.no_past(8, 8), gates)

        def parts(x):
            first, past = layer(x[:4], real[:4], layer.no_past(4, 8), gates)
            return layer(x[4:], real[4:], past, gates)[0], first

        second, first = parts(x)
        return whole, first, second, jax.grad(lambda x: jnp.sum(parts(x)[0]))(x)

    whole, first, second, gradient = both(
        jax.random.key(2), jax.random.normal(jax.random.key(3), (8, 8))
    )
    np.testing.assert_allclose(second, whole[4:], rtol=2e-5, atol=1e-6)
    # The first half does not see the second one, and gets no gradient from it.
    assert np.abs(np.asarray(first - whole[:4])).max() > 1e-3
    assert not np.asarray(gradient)[:4].any()
    assert np.asarray(gradient)[4:].any()


def test_gates_start_near_one_and_depend_on_the_graph():
    layer = policy().shared
    one, other = layer.gates(jnp.zeros(8)), layer.gates(jnp.ones(8))
    assert 0.5 < float(jnp.min(one)) < float(jnp.max(one)) < 1.5
    assert np.abs(np.asarray(one - other)).max() > 0.01
    assert (policy(superposition=False).shared.gates(jnp.ones(8)) == 1).all()


# The network.


def test_padding_changes_nothing():
    plain, padded = ask(policy(), problem()), ask(policy(), pad_problem(problem(), ROOM))
    assert set(plain) == set(ALL)
    for name, value in plain.items():
        np.testing.assert_allclose(padded[name][:10], value, rtol=1e-4, atol=2e-5)
        assert not np.asarray(padded[name])[10:].any()


def test_any_devices_and_decisions():
    other = problem(("device", "priority"), 2)
    logits = ask(policy(), other)
    assert {n: v.shape for n, v in logits.items()} == {"device": (10, 2), "priority": (10, 16)}
    memory = MemoryPlacement(chain(5), one_machine())
    logits = ask(policy(), memory)
    assert {name: value.shape for name, value in logits.items()} == {
        "weights": (5, 3),
        "activations": (5, 3),
    }
    assert tasks_of(memory) == ("weights", "activations")


def test_equal_devices_can_be_told_apart():
    logits = np.asarray(ask(policy(), problem())["device"])
    assert np.abs(logits - logits[:, :1]).max(0)[1:].min() > 1e-3


@pytest.mark.parametrize(
    "switches",
    [{"attention": False, "passes": 1}, {"superposition": False, "joint": False}],
    ids=lambda switches: next(iter(switches)),
)
def test_variants_are_networks_of_their_own(switches):
    whole, part = ask(policy(), problem()), ask(policy(**switches), problem())
    # The last task differs, by what it is told of or by the weights themselves.
    assert np.abs(np.asarray(whole["priority"] - part["priority"])).max() > 1e-3
    sizes = [sum(x.size for x in jax.tree.leaves(p)) for p in (policy(), policy(**switches))]
    assert sizes[1] < sizes[0]


def test_the_gradient_is_finite_and_reaches_every_weight():
    @eqx.filter_jit
    def gradient(policy, context):
        def loss(policy):
            return sum(jnp.sum(jnp.sin(3.0 * x)) for x in policy.logits(context).values())

        return eqx.filter_grad(loss)(policy)

    context = eqx.filter_jit(go_context)(pad_problem(problem(), ROOM), 16)
    found = gradient(policy(tasks=ALL), context)
    for path, leaf in jax.tree_util.tree_leaves_with_path(found):
        assert np.isfinite(leaf).all(), path
        # Softmax does not change when all scores of a row do.
        if "attention.key.bias" not in jax.tree_util.keystr(path):
            assert np.asarray(leaf).any(), path


def test_inputs_have_the_sizes_that_they_say():
    inputs = eqx.filter_jit(go_context)
    context = inputs(problem(), 16)
    assert context.ops.shape == (10, OP_INPUTS)
    assert context.choices["device"].shape == (3, CHOICE_INPUTS)
    assert np.isfinite(context.ops).all()
    context = inputs(Execution(graph(), free_machine()), 16)
    assert np.isfinite(context.ops).all()
    assert np.isfinite(context.choices["device"]).all()


def free_machine():
    """Nothing takes any time."""
    return Hardware(
        flops_per_s=np.full((2, 5), np.inf),
        level_bytes=np.full((2, 1), np.inf),
        read_bytes_per_s=np.full((2, 1), np.inf),
        write_bytes_per_s=np.full((2, 1), np.inf),
        link_bytes_per_s=np.full((2, 2), np.inf),
        link_latency_s=np.zeros((2, 2)),
        launch_s=np.zeros(2),
    )


def test_saved_and_loaded(tmp_path):
    saved = policy(tasks=("device", "priority"), attention=False)
    saved.save(tmp_path / "go.npz")
    assert eqx.tree_equal(load_policy(tmp_path / "go.npz"), saved)


def test_impossible_arguments_are_named():
    for options, message in (
        ({"width": 9, "attention_heads": 2}, "width must be a multiple of attention_heads"),
        ({"passes": 0}, "passes must be a whole number of 1 or more, got 0"),
        ({"tasks": ("device", "device")}, "tasks must be different names"),
    ):
        with pytest.raises(SearchError, match=message):
            GoPolicy(**{**SMALL, **options}, key=jax.random.key(0))
    with pytest.raises(SearchError, match="decides device, but the problem asks for fusion"):
        policy(tasks=("device",))(problem(("fusion", "device")))
    with pytest.raises(SearchError, match="'transfer_priority' is made per use"):
        policy()(problem(("device", "transfer_priority")))
    assert TASKS[0] == "fusion"
