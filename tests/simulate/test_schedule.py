"""The static order against the plain oracle, and the set of ready items by itself."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from egx.simulate import ready
from egx.simulate.execution import execute
from egx.simulate.execution_table import execution_table
from egx.simulate.lanes import Plans
from egx.simulate.schedule import run_static
from tests.simulate import cases
from tests.simulate import execution_cases as several

DECISIONS = {
    "inline": ("device", "priority"),
    "queued": ("device", "priority", "transfer_priority"),
    "given": ("device",),
}


@functools.partial(jax.jit, static_argnames=("transfers",))
def simulate(graph, hardware, plans, transfers="async"):
    table = execution_table(graph, hardware)
    return jax.vmap(functools.partial(execute, graph, table, transfers=transfers))(plans)


def compare(graph, hardware, plans, transfers="async"):
    """Returns the outcome and how many transfers the plans had."""
    got = simulate(graph, hardware, several.arrays(plans), transfers=transfers)
    moved = 0
    for p in range(len(plans["device"])):
        want = several.oracle(graph, hardware, plans, p).run_static(transfers)
        assert got.peak_units[p].tolist() == want.peak_units
        assert float(got.makespan_s[p]) == want.makespan_s
        moved += sum(item.use is not None for item in want.items)
    return got, moved


@pytest.mark.parametrize(
    ("kind", "count", "transfers"),
    [
        ("inline", 2, "async"),
        ("inline", 3, "blocking"),
        ("queued", 3, "async"),
        ("queued", 2, "blocking"),
        ("inline", 2, "ports"),
        ("queued", 3, "ports"),
    ],
)
def test_agrees_with_oracle(kind, count, transfers):
    seen = 0

    @settings(max_examples=30, deadline=None)
    @given(several.seeds())
    def check(drawn):
        nonlocal seen
        rng, graph, hardware = several.case(drawn, count)
        plans = several.only(several.random_plans(rng, graph, count), *DECISIONS[kind])
        seen += compare(graph, hardware, plans, transfers)[1]

    check()
    assert seen > 100


@pytest.mark.parametrize("kind", ["inline", "queued"])
def test_more_devices_than_ops(kind):
    # Beyond eight devices rows are no longer picked by comparison.
    for seed in range(4):
        rng = np.random.default_rng(seed)
        graph = cases.random_graph(rng, 5, most_inputs=3, most_bytes=9, pad_to=(6, 16, 16))
        hardware = several.random_devices(rng, 9)
        plans = several.only(several.random_plans(rng, graph, 9), *DECISIONS[kind])
        compare(graph, hardware, plans, ("async", "blocking", "ports")[seed % 3])


@functools.partial(jax.jit, static_argnames=("shared",))
def placements(graph, hardware, device, priority, *, shared):
    """Many placements under one order, told or not told that it is one."""
    table = execution_table(graph, hardware)

    def one(device, priority):
        return execute(graph, table, {"device": device, "priority": priority})

    if shared:
        return jax.vmap(one, in_axes=(0, None))(device, priority)
    return jax.vmap(one)(device, jnp.broadcast_to(priority, device.shape))


@pytest.mark.parametrize("count", [2, 3])
def test_one_order_for_all_placements(count):
    @settings(max_examples=20, deadline=None)
    @given(several.seeds())
    def check(drawn):
        rng, graph, hardware = several.case(drawn, count)
        # Times that are no short binary fractions: the two ways must agree bit by bit.
        odd = jax.tree.map(lambda x: x / 3.0 if x.dtype == np.float32 else x, hardware)
        plans = several.random_plans(rng, graph, count)
        priority = jnp.asarray(plans["priority"][0])
        device = jnp.asarray(plans["device"])
        got = placements(graph, odd, device, priority, shared=True)
        want = placements(graph, odd, device, priority, shared=False)
        np.testing.assert_array_equal(got.makespan_s, want.makespan_s)
        np.testing.assert_array_equal(got.peak_units, want.peak_units)

    check()


@pytest.mark.parametrize("count", [1, 3])
def test_without_priorities(count):
    for seed in range(4):
        rng = np.random.default_rng(seed)
        graph = cases.random_graph(rng, 8, most_inputs=3, most_bytes=9, pad_to=(9, 24, 24))
        hardware = several.random_devices(rng, count)
        plans = several.only(several.random_plans(rng, graph, count), *DECISIONS["given"])
        compare(graph, hardware, plans)


@pytest.mark.parametrize("kind", ["inline", "queued"])
def test_wide_graph(kind):
    """A tensor that 60 ops read and an op that reads 60 tensors: three words of ready ops."""
    middle = [
        {"inputs": [0], "sizes": [k % 5], "flops": float(k % 3), "weight": 1} for k in range(60)
    ]
    first = {"inputs": [], "sizes": [8, 4], "flops": 1.0, "weight": 0}
    last = {"inputs": [1, *range(2, 62), 5], "sizes": [1], "flops": 2.0, "weight": 3}
    graph = cases.build([first, *middle, last], [3, 62])
    rng = np.random.default_rng(0)
    hardware = several.random_devices(rng, 3)
    plans = several.random_plans(rng, graph, 3, 4)
    plans["priority"] = rng.random(plans["priority"].shape).astype(np.float32)
    compare(graph, hardware, several.only(plans, *DECISIONS[kind]))


def test_graph_without_tensors_or_uses():
    graph = cases.build([{"inputs": [], "sizes": [], "flops": 3.0, "weight": 5}] * 3, [])
    plans = several.random_plans(np.random.default_rng(0), graph, 2, 1)
    plans["device"] = np.array([[0, 1, 1]], np.int32)
    for names in (["device"], ["device", "priority"], list(plans)):
        got = simulate(graph, several.devices(2), several.arrays(several.only(plans, *names)))
        assert float(got.makespan_s[0]) == 6.0
        assert got.peak_units[0].tolist() == [5, 10]


def test_by_hand():
    """a (10 s, 10 units) feeds b there and c here; one second and 10 units a second to go over."""
    ops = [
        {"inputs": [], "sizes": [10], "flops": 10.0, "weight": 0},
        {"inputs": [0], "sizes": [20], "flops": 10.0, "weight": 7},
        {"inputs": [0, 1], "sizes": [30], "flops": 10.0, "weight": 0},
    ]
    graph = cases.build(ops, [2])
    hardware = several.devices(2, link=10.0, latency_s=1.0)
    plans = {"device": np.array([[0, 1, 0]], np.int32), "priority": np.zeros((1, 3), np.float32)}
    got = simulate(graph, hardware, several.arrays(plans))
    assert float(got.makespan_s[0]) == 10 + 2 + 10 + 3 + 10
    assert got.peak_units[0].tolist() == [10 + 20 + 30, 7 + 10 + 20]


@pytest.mark.parametrize(
    ("transfers", "makespan_s"), [("async", 10 + 2 + 10), ("ports", 10 + 4 + 10)]
)
def test_a_port_sends_and_receives_one_at_a_time(transfers, makespan_s):
    """a feeds b and c on two other devices, two seconds each; b feeds d on a's device, which
    receives while it may send."""
    ops = [
        {"inputs": [], "sizes": [10], "flops": 10.0, "weight": 0},
        {"inputs": [0], "sizes": [1], "flops": 1.0, "weight": 0},
        {"inputs": [0], "sizes": [1], "flops": 10.0, "weight": 0},
        {"inputs": [1], "sizes": [1], "flops": 1.0, "weight": 0},
    ]
    graph = cases.build(ops, [2, 3])
    hardware = several.devices(3, link=10.0, latency_s=1.0)
    plans = {"device": np.array([[0, 1, 2, 0]], np.int32), "priority": np.zeros((1, 4), np.float32)}
    got, moved = compare(graph, hardware, plans, transfers)
    assert float(got.makespan_s[0]) == makespan_s
    assert moved == 3


def test_population_padding_and_bits_do_not_depend_on_the_batch():
    rng = np.random.default_rng(5)
    graph = cases.random_graph(rng, 12, most_inputs=3)
    wide = cases.random_graph(np.random.default_rng(5), 12, most_inputs=3, pad_to=(20, 40, 60))
    hardware = several.random_devices(rng, 2)
    odd = jax.tree.map(lambda x: x / 3.0 if x.dtype == np.float32 else x, hardware)
    plans = several.only(several.random_plans(rng, graph, 2), "device", "priority")
    whole = simulate(graph, odd, several.arrays(plans))
    for p in range(several.PLANS):
        one = simulate(graph, odd, several.arrays({k: v[p : p + 1] for k, v in plans.items()}))
        assert one.makespan_s[0] == whole.makespan_s[p]
    grown = {k: np.pad(v, ((0, 0), (0, 8))) for k, v in plans.items()}
    padded = simulate(wide, odd, several.arrays(grown))
    np.testing.assert_array_equal(padded.makespan_s, whole.makespan_s)
    np.testing.assert_array_equal(padded.peak_units, whole.peak_units)


@pytest.mark.parametrize("transfers", ["async", "blocking", "ports"])
def test_a_known_order_needs_no_priorities(transfers):
    """Orders that are given, each candidate's own, against priorities that bring them about; and
    that of the ops where there are no priorities at all."""

    @functools.partial(jax.jit, static_argnames="known")
    def run(graph, hardware, device, by, *, known):
        plans = Plans(device, order=by) if known else Plans(device, priority=by)
        return run_static(execution_table(graph, hardware), plans, transfers=transfers)[:2]

    for seed in range(4):
        rng = np.random.default_rng(seed)
        graph = cases.random_graph(rng, 8, most_inputs=3, most_bytes=9, pad_to=(10, 24, 24))
        hardware = several.random_devices(rng, 3)
        plans = several.only(several.random_plans(rng, graph, 3), "device", "priority")
        orders = np.stack([
            [item[1] for item in several.oracle(graph, hardware, plans, p).static_order()
             if item[0] == "op"] + [8, 9]
            for p in range(several.PLANS)
        ], 1).astype(np.int32)  # fmt: skip
        device, priority = jnp.asarray(plans["device"].T), jnp.asarray(plans["priority"].T)
        queued = run(graph, hardware, device, priority, known=False)
        listed = run(graph, hardware, device, jnp.asarray(orders), known=True)
        jax.tree.map(np.testing.assert_array_equal, listed, queued)
        compare(graph, hardware, several.only(plans, "device"), transfers)


@pytest.mark.parametrize("items", [1, 2, 33, 3000, 70_000])
def test_ranked_is_a_stable_sort(items):
    rng = np.random.default_rng(items)
    values = rng.normal(size=(2, items)).astype(np.float32)
    values[1] = rng.choice(np.array([0.0, -0.0, 1.0, -1.0, 1e-40], np.float32), items)
    got = jax.jit(ready.ranked)(jnp.asarray(values))
    for p in range(2):
        np.testing.assert_array_equal(got[p], np.argsort(-values[p], kind="stable"))


@pytest.mark.parametrize("items", [1, 16, 45, ready.MOST_COUNTED, ready.MOST_COUNTED + 1])
def test_places_by_priority(items):
    """Counted or sorted: the same places, ties to the lower index, in a block and across blocks."""
    rng = np.random.default_rng(items)
    values = rng.normal(size=(items, 2)).astype(np.float32)
    few = np.array([0.0, -0.0, 1.0, -1.0, 1e-40, np.finfo(np.float32).min], np.float32)
    values[:, 1] = rng.choice(few, items)
    order, rank = jax.jit(ready.order_and_rank)(jnp.asarray(values))
    for p in range(2):
        want = np.argsort(-values[:, p], kind="stable")
        np.testing.assert_array_equal(order[:, p], want)
        np.testing.assert_array_equal(rank[want, p], np.arange(items))


@pytest.mark.parametrize("items", [5, 32, 33, 1500, 40_000])
def test_ready_set(items):
    """Against sets: taking the least rank, adding, candidates that do not want to take."""
    rng = np.random.default_rng(items)
    start = rng.random((items, 3)) < 0.3
    words = ready.pack(jnp.asarray(start))
    sets = [set(np.flatnonzero(start[:, p]).tolist()) for p in range(3)]
    add, take = jax.jit(ready.add), jax.jit(ready.take_highest)
    for _ in range(60):
        wanted = rng.random(3) < 0.7
        rank, found, words = take(words, jnp.asarray(wanted))
        for p in range(3):
            assert bool(found[p]) == (bool(wanted[p]) and bool(sets[p]))
            if found[p]:
                assert int(rank[p]) == min(sets[p])
                sets[p].remove(int(rank[p]))
        new, where = rng.integers(0, items, 3).astype(np.int32), rng.random(3) < 0.5
        words = add(words, jnp.asarray(new), jnp.asarray(where))
        for p in np.flatnonzero(where):
            sets[p].add(int(new[p]))
