"""The exact solver against every map of tiny instances, and against its own promises."""

from __future__ import annotations

import itertools
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from egx.baselines import cp_sat
from egx.baselines import exact as exact_module
from egx.baselines import milp as milp_module
from egx.baselines.bounds import combinatorial_bound, lp_bound
from egx.baselines.exact import check_bound, exact, float32_slack
from egx.baselines.instance import fits, latency, maximal_steps, memory_instance, to_levels
from egx.baselines.milp import build_program
from egx.errors import GraphError, InternalError, MissingExtraError, SearchError
from egx.problems.memory_placement import MemoryPlacement
from tests.oracles import memory_oracle as oracle
from tests.simulate import cases

OPS, LEVELS = 5, 3
PADDED = (6, 12, 16)
MAPS = np.asarray(list(itertools.product(range(LEVELS), repeat=2 * OPS)), np.int32)
MAPS = np.pad(MAPS.reshape(-1, 2, OPS), ((0, 0), (0, 0), (0, PADDED[0] - OPS)))


@eqx.filter_jit
def all_outcomes(problem):
    weights, activations = jnp.asarray(MAPS[:, 0]), jnp.asarray(MAPS[:, 1])
    return jax.vmap(problem.evaluate)({"weights": weights, "activations": activations})


def tiny(seed: int, prefetch: int) -> MemoryPlacement:
    """At most 5 ops on 3 levels: multi-output ops, outputs, dead tensors, repeated uses."""
    rng = np.random.default_rng(seed)
    while True:
        ops = int(rng.integers(2, OPS + 1))
        try:
            graph = cases.random_graph(rng, ops, pad_to=PADDED)
            break
        except GraphError:  # more tensors or uses than the padding holds
            continue
    hardware = cases.random_machine(rng, LEVELS, tight=2.5)
    return MemoryPlacement(graph, hardware, prefetch=prefetch)


def best_of_all(problem: MemoryPlacement) -> float:
    outcomes = all_outcomes(problem)
    return float(jnp.min(jnp.where(outcomes.feasible, outcomes.cost, jnp.inf)))


@pytest.mark.parametrize("prefetch", [0, 1, 2, 3])
def test_finds_and_proves_the_best_of_all_maps(prefetch):
    moved_away = 0
    for seed in range(8):
        problem = tiny(100 * prefetch + seed, prefetch)
        best = best_of_all(problem)
        found = exact(problem)
        slack = float32_slack(problem)
        assert found.status == "proved"
        assert found.cost == pytest.approx(best, rel=slack)
        assert found.bound <= found.cost
        assert found.exact_cost - found.bound <= exact_module.PROVED * found.exact_cost
        assert found.bound <= best * (1 + slack)
        outcome = problem.evaluate(found.decisions)
        assert bool(outcome.feasible)
        assert float(outcome.cost) == found.cost
        moved_away += best < float(problem.reference_cost) * (1 - 1e-3)
    assert moved_away >= 3  # the instances are not all trivial


@pytest.mark.parametrize("prefetch", [0, 2])
def test_cp_sat_agrees(prefetch, monkeypatch):
    pytest.importorskip("ortools")
    solved = []

    def counted(*args, **kwargs):
        solved.append(cp_sat.solve_cp_sat(*args, **kwargs))
        return solved[-1]

    monkeypatch.setattr(exact_module, "solve_cp_sat", counted)
    for seed in range(8):
        monkeypatch.setattr(milp_module, "SHARED_RESIDENTS", 0 if seed % 2 else 10**6)
        monkeypatch.setattr(milp_module, "HULL_COMBINATIONS", 1 if seed % 3 else 256)
        problem = tiny(100 * prefetch + seed, prefetch)
        found = exact(problem, solver="cp-sat")
        best = best_of_all(problem)
        assert found.status == "proved"
        assert found.cost == pytest.approx(best, rel=float32_slack(problem))
        assert found.bound <= best * (1 + float32_slack(problem))
    assert len(solved) >= 2  # the relaxation alone proves the others


def test_cp_sat_without_or_tools_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "ortools.sat.python", None)
    with pytest.raises(MissingExtraError, match="egx\\[exact\\]"):
        exact(tiny(1, 0), solver="cp-sat")


@pytest.mark.parametrize("prefetch", [0, 2])
def test_cheap_bounds_hold(prefetch):
    tight = []
    for seed in range(6):
        problem = tiny(500 + seed, prefetch)
        best = best_of_all(problem)
        cheap, relaxed = combinatorial_bound(memory_instance(problem)), lp_bound(problem)
        assert cheap <= relaxed <= best * (1 + float32_slack(problem))
        tight.append(relaxed / best if best else 1.0)
    assert np.mean(tight) > 0.9


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_instance_agrees_with_the_oracle(prefetch):
    rng = np.random.default_rng(7)
    verdicts = set()
    for seed in range(8):
        problem = tiny(900 + seed, prefetch)
        case = oracle.Case.of(problem.graph, problem.hardware)
        instance = memory_instance(problem)
        for _ in range(10):
            weights = rng.integers(0, LEVELS, case.ops)
            activations = rng.integers(0, LEVELS, case.ops)
            w, a = weights.tolist(), activations.tolist()
            assert latency(instance, weights, activations) == pytest.approx(
                oracle.latency(case, w, a, prefetch), rel=1e-12
            )
            valid = oracle.is_valid(case, w, a)
            assert fits(instance, weights, activations) == valid
            verdicts.add(valid)
    assert verdicts == {True, False}


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize(("hull", "shared"), [(1, 10**6), (256, 0)])
def test_program_values_every_valid_map_at_its_latency(prefetch, hull, shared, monkeypatch):
    monkeypatch.setattr(milp_module, "SHARED_RESIDENTS", shared)
    rng = np.random.default_rng(3)
    excluded = included = 0
    for seed in range(6):
        instance = memory_instance(tiny(300 + seed, prefetch))
        program = build_program(instance, scale_s=1e-3, hull_combinations=hull)
        for _ in range(20):
            weights = rng.integers(0, LEVELS, instance.num_ops)
            activations = rng.integers(0, LEVELS, instance.num_ops)
            columns = program.lift(weights, activations)
            value = program.seconds(float(program.objective @ columns))
            rows = program.rows @ columns
            excess = np.maximum(program.row_lower - rows, rows - program.row_upper)
            beyond = np.max(columns - program.upper)
            inside = max(np.max(excess), beyond) <= 1e-9 * max(1.0, np.max(columns))
            assert inside == fits(instance, weights, activations)
            if inside:
                expected = latency(instance, weights, activations)
                assert value == pytest.approx(expected, rel=1e-12)
            excluded += not inside
            included += inside
    assert excluded
    assert included


def test_maximal_steps_cover_every_live_set():
    for seed in range(20):
        instance = memory_instance(tiny(700 + seed, 0))
        outputs = np.ones(instance.num_ops, bool)
        live = [
            {
                t
                for t in range(len(instance.tensor_units))
                if instance.tensor_units[t]
                and instance.tensor_producer[t] <= step <= instance.tensor_last[t]
            }
            for step in range(instance.num_ops)
        ]
        kept = maximal_steps(instance, outputs).tolist()
        assert all(any(s <= live[step] for step in kept) for s in live)
        assert len({frozenset(live[step]) for step in kept}) == len(kept)


def test_never_worse_than_the_start_nor_than_the_heuristics():
    problem = tiny(42, 0)
    proved = exact(problem)
    stopped = exact(problem, time_limit_s=0.0, start=proved.decisions)
    assert stopped.exact_cost == proved.exact_cost
    assert stopped.bound <= proved.exact_cost
    cold = exact(problem, time_limit_s=0.0)
    known = min(problem.reference_cost, problem.evaluate(problem.first_fit()).cost)
    assert cold.cost <= float(known) * (1 + float32_slack(problem))
    assert cold.status in ("proved", "feasible")


def test_an_invalid_start_is_rectified():
    problem = tiny(43, 0)
    top = jnp.full(PADDED[0], LEVELS - 1, jnp.int32)
    found = exact(problem, start={"weights": top, "activations": top}, time_limit_s=0.0)
    assert bool(problem.evaluate(found.decisions).feasible)


def test_a_loose_gap_is_not_called_proved_unless_it_is():
    for seed in range(4):
        found = exact(tiny(60 + seed, 0), relative_gap=0.5)
        within = found.exact_cost - found.bound <= exact_module.PROVED * found.exact_cost
        assert (found.status == "proved") == within


def test_everything_free_costs_nothing():
    graph = cases.build([{"inputs": [], "sizes": [8], "flops": 0.0, "weight": 0}], [])
    hardware = cases.machine([64.0, 8.0], read=[np.inf, np.inf])
    found = exact(MemoryPlacement(graph, hardware))
    assert (found.cost, found.bound, found.status, found.gap) == (0.0, 0.0, "proved", 0.0)


def test_a_bound_above_a_plan_is_an_internal_error(monkeypatch):
    problem = tiny(44, 0)
    with pytest.raises(InternalError, match="beats the proven bound"):
        check_bound(problem, 1.0, 1.1)
    check_bound(problem, 1.0, 1.0 + 1e-7)
    monkeypatch.setattr(exact_module, "combinatorial_bound", lambda instance: 1e9)
    with pytest.raises(InternalError, match="beats the proven bound"):
        exact(problem)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({"solver": "cplex"}, "cplex"),
        ({"time_limit_s": -1.0}, "time_limit_s"),
        ({"time_limit_s": float("nan")}, "time_limit_s"),
        ({"relative_gap": 1.0}, "relative_gap"),
    ],
)
def test_refuses_bad_arguments(arguments, word):
    with pytest.raises(SearchError, match=word):
        exact(tiny(1, 0), **arguments)


def test_refuses_other_problems(unchecked):
    with pytest.raises(SearchError, match="NoneType"):
        exact(None)


def test_plan_survives_the_simulator_in_levels():
    problem = tiny(45, 1)
    found = exact(problem)
    instance = memory_instance(problem)
    assert fits(instance, *to_levels(instance, found.decisions))
