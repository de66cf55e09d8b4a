"""The run-time order against the plain oracle, and the trees of arrivals by themselves."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from egx.simulate import arrivals
from egx.simulate.execution import execute
from egx.simulate.execution_table import execution_table
from tests.simulate import cases
from tests.simulate import execution_cases as several


@functools.partial(jax.jit, static_argnames=("transfers",))
def simulate(graph, hardware, plans, transfers="async"):
    table = execution_table(graph, hardware)
    run = functools.partial(execute, graph, table, runtime=True, transfers=transfers)
    return jax.vmap(run)(plans)


def compare(graph, hardware, plans, transfers="async"):
    got = simulate(graph, hardware, several.arrays(plans), transfers)
    for p in range(len(plans["device"])):
        want = several.oracle(graph, hardware, plans, p).run_runtime(transfers)
        assert got.peak_units[p].tolist() == want.peak_units
        assert float(got.makespan_s[p]) == want.makespan_s


@pytest.mark.parametrize(
    ("names", "count", "transfers"),
    [
        (("device",), 1, "async"),
        (("device",), 3, "async"),
        (("device", "priority"), 2, "async"),
        (("device", "priority"), 3, "async"),
        (("device",), 2, "ports"),
        (("device", "priority"), 3, "ports"),
    ],
)
def test_agrees_with_oracle(names, count, transfers):
    @settings(max_examples=20, deadline=None)
    @given(several.seeds())
    def check(drawn):
        rng, graph, hardware = several.case(drawn, count)
        plans = several.only(several.random_plans(rng, graph, count), *names)
        compare(graph, hardware, plans, transfers)

    check()


@pytest.mark.parametrize("names", [("device",), ("device", "priority")], ids=["fcfs", "priority"])
def test_more_devices_than_ops(names):
    for seed in range(4):
        rng = np.random.default_rng(seed)
        graph = cases.random_graph(rng, 5, most_inputs=3, most_bytes=9, pad_to=(6, 16, 16))
        hardware = several.random_devices(rng, 9)
        compare(graph, hardware, several.only(several.random_plans(rng, graph, 9), *names))


@pytest.mark.parametrize("names", [("device",), ("device", "priority")], ids=["fcfs", "priority"])
def test_wide_graph(names):
    """60 ops that wait at once: trees of three levels."""
    middle = [
        {"inputs": [0], "sizes": [k % 5], "flops": float(k % 4), "weight": 1} for k in range(60)
    ]
    first = {"inputs": [], "sizes": [8, 4], "flops": 1.0, "weight": 0}
    last = {"inputs": [1, *range(2, 62), 5], "sizes": [1], "flops": 2.0, "weight": 3}
    graph = cases.build([first, *middle, last], [3, 62])
    rng = np.random.default_rng(0)
    plans = several.random_plans(rng, graph, 3, 4)
    compare(graph, several.random_devices(rng, 3), several.only(plans, *names))


def test_what_arrives_first_goes_first_though_the_order_says_otherwise():
    """Op 2 of device 1 waits long for op 0; op 3, with the lower priority, runs meanwhile."""
    ops = [
        {"inputs": [], "sizes": [1], "flops": 100.0, "weight": 0},
        {"inputs": [], "sizes": [1], "flops": 1.0, "weight": 0},
        {"inputs": [0], "sizes": [], "flops": 10.0, "weight": 0},
        {"inputs": [1], "sizes": [], "flops": 10.0, "weight": 0},
    ]
    graph, hardware = cases.build(ops, []), several.devices(2)
    plans = {
        "device": np.array([[0, 1, 1, 1]], np.int32),
        "priority": np.array([[0.0, 0.0, 9.0, 1.0]], np.float32),
    }
    got = simulate(graph, hardware, several.arrays(plans))
    assert float(got.makespan_s[0]) == 110.0


@pytest.mark.parametrize(("ops", "devices"), [(1, 1), (7, 2), (50, 3), (300, 9)])
def test_arrivals(ops, devices):
    """Against lists: the best op that has arrived, adding, candidates that take nothing."""
    rng = np.random.default_rng(ops)
    count = 2
    device = rng.integers(0, devices, (ops, count)).astype(np.int32)
    order = np.stack([rng.permutation(ops) for _ in range(count)], 1).astype(np.int32)
    rank = np.argsort(order, 0)
    start = rng.random((ops, count)) < 0.3
    slots = arrivals.slots(jnp.asarray(order), jnp.asarray(device), devices)
    state = arrivals.waiting(slots, jnp.asarray(device), jnp.asarray(start))
    held = [{int(i): 0.0 for i in np.flatnonzero(start[:, p])} for p in range(count)]
    add, take = jax.jit(arrivals.add), jax.jit(arrivals.take_best)
    for _ in range(60):
        op = rng.integers(0, ops, count).astype(np.int32)
        when = rng.integers(0, 6, count).astype(np.float32)
        for p in range(count):
            if int(op[p]) in held[p]:
                when[p] = np.inf
            else:
                held[p][int(op[p])] = float(when[p])
        on = device[op, np.arange(count)]
        state = add(state, slots, jnp.asarray(op), jnp.asarray(on), jnp.asarray(when))
        for p in range(count):
            for d in range(devices):
                mine = [a for i, a in held[p].items() if device[i, p] == d]
                assert float(state.earliest[d, p]) == min(mine, default=np.inf)
        by = np.asarray(rng.integers(0, 6, count), np.float32)
        d = rng.integers(0, devices, count).astype(np.int32)
        best = []
        for p in range(count):
            mine = [i for i, a in held[p].items() if device[i, p] == d[p] and a <= by[p]]
            best.append(min(mine, key=lambda i, p=p: rank[i, p], default=None))
        wanted = np.array([b is not None for b in best])
        got, state = take(state, slots, jnp.asarray(d), jnp.asarray(by), jnp.asarray(wanted))
        for p in np.flatnonzero(wanted):
            assert int(got[p]) == best[p]
            del held[p][best[p]]
