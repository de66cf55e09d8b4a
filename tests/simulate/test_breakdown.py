"""Breakdowns against the oracle, the simulator and a toy; lifetimes; the cheap bound."""

from __future__ import annotations

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from egx.problems.memory_placement import MemoryPlacement
from egx.simulate.bound import latency_bound
from egx.simulate.breakdown import breakdown, lifetimes
from tests.oracles import memory_oracle as oracle
from tests.simulate import cases

PREFETCHES = (0, 1, 2, 20)


@pytest.mark.parametrize("seed", range(8))
def test_agrees_with_oracle(seed):
    rng = np.random.default_rng(seed)
    ops, levels = int(rng.integers(1, 16)), int(rng.integers(1, 5))
    padded = (ops + 3, 60, 80) if seed % 2 else None
    graph = cases.random_graph(rng, ops, pad_to=padded)
    hardware = cases.random_machine(rng, levels)
    case = oracle.Case.of(graph, hardware)
    weights, activations = cases.random_maps(rng, graph.num_ops, levels, 6)
    for prefetch, w, a in itertools.product(PREFETCHES, weights, activations):
        found = breakdown(graph, hardware, w, a, prefetch=prefetch)
        levels_of = w[:ops].tolist(), a[:ops].tolist()
        assert found.occupancy_units.tolist() == oracle.occupancy(case, *levels_of)
        assert found.fits.all() == oracle.is_valid(case, *levels_of)
        expected = oracle.latency(case, *levels_of, prefetch)
        np.testing.assert_allclose(found.latency_s, expected, rtol=1e-12)
        np.testing.assert_allclose(found.seconds.sum(), expected, rtol=1e-12)
        traffic = found.read_s + found.write_s + found.weight_s
        np.testing.assert_allclose(found.level_seconds.sum(axis=1), traffic, rtol=1e-12)
        for i in range(ops):
            compute, act, weight = oracle.op_seconds(case, *levels_of, i)
            parts = (found.compute_s[i], found.read_s[i] + found.write_s[i], found.weight_s[i])
            np.testing.assert_allclose(parts, (compute, act, weight), rtol=1e-12)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_of_a_problem_agrees_with_its_latency(prefetch):
    rng = np.random.default_rng(3)
    graph = cases.random_graph(rng, 12, pad_to=(14, 40, 60))
    problem = MemoryPlacement(graph, cases.random_machine(rng, 3), prefetch=prefetch)
    feasible = []
    for w, a in zip(*cases.random_maps(rng, 14, 3, 6), strict=True):
        outcome = problem.evaluate({"weights": w, "activations": a})
        found = problem.breakdown({"weights": w, "activations": a})
        # An invalid map runs rectified: what runs always fits.
        assert found.fits.all()
        np.testing.assert_allclose(found.latency_s, outcome.latency_s, rtol=1e-6)
        assert problem.lower_bound() <= float(outcome.latency_s)
        feasible.append(bool(outcome.feasible))
    assert len(set(feasible)) == 2


def toy():
    """Three ops: one waits for its weights, one computes, one does neither for long."""
    return cases.build(
        [
            {"inputs": [], "sizes": [8], "flops": 1.0, "weight": 30},
            {"inputs": [0], "sizes": [8], "flops": 40.0, "weight": 0},
            {"inputs": [1], "sizes": [0], "flops": 1.0, "weight": 2},
        ],
        [],
    )


def test_toy():
    hardware = cases.machine([1e9, 100.0], launch_s=3.0)
    found = breakdown(toy(), hardware, np.array([0, 0, 1]), np.array([1, 1, 1]))
    np.testing.assert_allclose(found.seconds, [30.8 + 3, 40 + 3, 1 + 3])
    assert found.bound_by.tolist() == ["memory", "compute", "launch"]
    np.testing.assert_allclose(found.start_s, [0, 33.8, 76.8])
    np.testing.assert_allclose(found.level_seconds, [[30, 0.8], [0, 1.6], [0, 1.0]])
    assert found.level_bytes.tolist() == [[30, 8], [0, 16], [0, 10]]
    assert found.occupancy_units.tolist() == [[30, 30, 30], [10, 18, 10]]
    assert found.peak_units.tolist() == [30, 18]
    totals = found.totals()
    assert totals["ops_bound_by"] == {"compute": 1, "memory": 1, "launch": 1}
    assert totals["latency_s"] == pytest.approx(sum(totals["seconds_bound_by"].values()))
    assert totals["level_bytes"] == [30, 34]

    ahead = breakdown(toy(), hardware, np.array([0, 0, 1]), np.array([1, 1, 1]), prefetch=1)
    np.testing.assert_allclose(ahead.stall_s, [30, 0, 0])
    np.testing.assert_allclose(ahead.seconds, [30 + 1 + 3, 40 + 3, 1 + 3])
    assert ahead.bound_by.tolist() == ["memory", "compute", "launch"]


def test_lifetimes():
    graph = cases.build(
        [
            {"inputs": [], "sizes": [1, 1, 1], "flops": 0.0, "weight": 0},
            {"inputs": [1, 1], "sizes": [], "flops": 0.0, "weight": 0},
            {"inputs": [1], "sizes": [1], "flops": 0.0, "weight": 0},
            {"inputs": [], "sizes": [], "flops": 0.0, "weight": 0},
        ],
        [2],
        pad_to=(9, 9, 9),
    )
    first, last = lifetimes(graph)
    assert first.tolist() == [0, 0, 0, 2]
    assert last.tolist() == [0, 2, 3, 2]


@pytest.mark.parametrize("prefetch", PREFETCHES)
def test_bound_is_below_every_map(prefetch):
    for seed in range(12):
        rng = np.random.default_rng(seed)
        graph = cases.random_graph(rng, 3, most_inputs=2)
        hardware = cases.random_machine(rng, 2)
        case = oracle.Case.of(graph, hardware)
        maps = list(itertools.product([0, 1], repeat=3))
        best = min(
            oracle.latency(case, list(w), list(a), prefetch)
            for w, a in itertools.product(maps, maps)
        )
        bound = latency_bound(graph, hardware, prefetch=prefetch)
        assert 0.0 <= bound <= best
        # Level 1 is best for everything when it also reads and writes fastest.
        if case.read_bytes_per_s[0] <= case.read_bytes_per_s[1] and (
            case.write_bytes_per_s[0] <= case.write_bytes_per_s[1] and prefetch == 0
        ):
            assert bound >= best * (1 - 2e-6)


def test_bound_holds_for_float32_costs():
    """The simulator's rounding never takes a cost below the bound."""
    for seed in range(4):
        graph = cases.random_graph(np.random.default_rng(seed), 40, pad_to=(40, 90, 160))
        hardware = cases.machine([1e9, 1e9], read=[1.0, 7.0], write=[3.0, 9.0], launch_s=1e-3)
        problem = MemoryPlacement(graph, hardware)
        fastest = jnp.ones(40, jnp.int32)
        cost = float(problem.evaluate({"weights": fastest, "activations": fastest}).cost)
        assert problem.lower_bound() <= cost <= problem.lower_bound() * (1 + 3e-6)


def test_bound_sees_the_weight_channels():
    """Prefetch overlaps weights with other ops, yet all of them stream over the channels."""
    ops = [{"inputs": [], "sizes": [], "flops": 1.0, "weight": 10} for _ in range(6)]
    graph = cases.build(ops, [])
    one = cases.machine([1e9])
    assert latency_bound(graph, one, prefetch=6) == pytest.approx(60, rel=1e-5)
    # Two ops side by side on two channels at best; k = 1 still waits for the op before.
    two = cases.machine([1e9, 1e9], read=[1.0, 1.0])
    assert latency_bound(graph, two, prefetch=6) == pytest.approx(30, rel=1e-5)
    assert latency_bound(graph, two, prefetch=1) == pytest.approx(61, rel=1e-5)
