"""Hardware in the loop: what an evaluator gets, how it may fail, and how it is stopped."""

from __future__ import annotations

import os
import signal
import time

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import pytest
from runs import Climber, chain, machine, same_search, small_problem

from egx.errors import SearchError
from egx.graph.padding import pad_graph
from egx.problems.memory_placement import MemoryPlacement
from egx.training.generation import concrete
from egx.training.loop import run
from egx.training.steppers import sound_cost


def simulator(problem):
    """The simulator as an evaluator: what is not feasible fails."""

    compiled = eqx.filter_jit(concrete(problem).evaluate)

    def evaluate(decisions):
        outcome = compiled({k: jnp.asarray(v) for k, v in decisions.items()})
        if not outcome.feasible:
            raise RuntimeError("does not fit")
        return float(outcome.cost)

    return evaluate


def measured(evaluator, *, budget=30, seed=0, problem=None, **more):
    problem = problem or small_problem()
    return run(Climber(), problem, budget=budget, seeds=[seed], evaluator=evaluator, **more)[0]


def test_measuring_the_simulator_finds_what_simulating_finds():
    simulated = run(Climber(), small_problem(), budget=90, seeds=[0])[0]
    result = measured(simulator(small_problem()), budget=90)
    assert simulated.feasible
    assert result.cost == simulated.cost
    assert result.found_at == simulated.found_at
    np.testing.assert_array_equal(result.history.evaluations, simulated.history.evaluations)
    assert result.reference_cost == simulated.reference_cost
    assert 0 < result.failed_measurements < 90
    assert result.provenance["measured"] is True
    assert "does not fit" in result.provenance["last_failure"]


def test_evaluator_gets_real_entries_of_its_own():
    model = chain(5)
    padded = pad_graph(model.graph, (9, 9, 9))
    problem = MemoryPlacement(padded, machine())
    calls: list[dict[str, np.ndarray]] = []

    def evaluator(decisions):
        calls.append({k: v.copy() for k, v in decisions.items()})
        for value in decisions.values():
            assert value.dtype == np.int32
            value[:] = -7
        return 1.0 + calls[-1]["weights"].sum()

    result = measured(evaluator, budget=6, problem=problem)
    assert len(calls) == 1 + 6
    assert all(set(c) == {"weights", "activations"} for c in calls)
    assert all(value.shape == (5,) for call in calls for value in call.values())
    np.testing.assert_array_equal(calls[0]["weights"], problem.reference["weights"][:5])
    assert result.reference_cost == 1.0 + calls[0]["weights"].sum()
    assert result.cost == min(1.0 + c["weights"].sum() for c in calls[1:])
    assert result.decisions["weights"].shape == (9,)
    assert result.decisions["weights"].min() >= 0


FAILURES = [np.nan, np.inf, -np.inf, -1.0, None, "fast", True, 1j, [1.0], np.ones(2), 1e39]


@pytest.mark.parametrize("wrong", FAILURES, ids=str)
def test_what_is_no_measurement_fails(wrong):
    calls = []

    def evaluator(decisions):
        calls.append(1)
        return 5.0 if len(calls) in (1, 4) else wrong

    result = measured(evaluator, budget=6)
    assert (result.cost, result.feasible, result.found_at) == (5.0, True, 3)
    assert result.failed_measurements == 5
    assert result.evaluations == 6
    assert result.speedup == 1.0


@pytest.mark.parametrize(
    "right", [2, 2.0, np.float32(2), np.float64(2), np.int64(2), np.array(2.0)]
)
def test_numbers_of_any_kind_are_measurements(right):
    assert sound_cost(right) == 2.0
    assert sound_cost(jnp.asarray(right, jnp.float32)) == 2.0
    assert sound_cost(0) == 0.0


def test_an_evaluator_that_always_fails_afterwards_gives_an_infeasible_result():
    calls = []

    def evaluator(decisions):
        calls.append(1)
        if len(calls) > 1:
            raise OSError("board lost")
        return 3.0

    result = measured(evaluator, budget=7)
    assert not result.feasible
    assert result.failed_measurements == result.evaluations == 7
    assert result.speedup == 0.0
    assert np.isfinite(result.cost)
    assert result.provenance["last_failure"] == "OSError: board lost"


def test_reference_is_tried_again_and_then_given_up():
    calls = []

    def flaky(decisions):
        calls.append(1)
        if len(calls) < 3:
            raise RuntimeError("not yet")
        return 4.0

    assert measured(flaky, budget=2).reference_cost == 4.0
    assert len(calls) == 3 + 2

    def dead(decisions):
        raise RuntimeError("no power")

    with pytest.raises(SearchError, match=r"3 times on the reference.*RuntimeError: no power"):
        measured(dead)


def test_the_median_of_repeats_counts():
    values = iter([1.0, 100.0, 3.0, 2.0, None, 8.0, None, None, 7.0, None, None, None])
    result = measured(lambda _: next(values), budget=3, repeats=3)
    assert result.reference_cost == 3.0
    assert result.history.best_cost[-1] == result.cost == 5.0
    assert result.failed_measurements == 1


@pytest.mark.parametrize("stop_at", [1, 2, 5, 6])
def test_ctrl_c_keeps_what_was_measured(stop_at):
    costs = [9.0, 4.0, 6.0, 3.0, 8.0, 7.0, 1.0]

    def evaluator(decisions):
        if len(seen) == stop_at:
            raise KeyboardInterrupt
        seen.append(costs[len(seen)])
        return seen[-1]

    seen: list[float] = []
    result = measured(evaluator, budget=20)
    assert result.interrupted == "ctrl-c"
    assert result.evaluations == stop_at - 1
    assert result.feasible
    if stop_at == 1:
        # Nothing but the reference was measured, and that is what is left.
        np.testing.assert_array_equal(
            result.decisions["weights"], small_problem().reference["weights"]
        )
        assert result.cost == result.reference_cost == 9.0
    else:
        assert result.cost == min(seen[1:])


def test_ctrl_c_does_not_wait_for_the_generation():
    calls = []

    def evaluator(decisions):
        calls.append(1)
        if len(calls) == 3:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(60)  # a long measurement, which the signal ends
        return float(len(calls))

    began = time.perf_counter()
    result = measured(evaluator, budget=20)
    assert time.perf_counter() - began < 50
    assert result.interrupted == "ctrl-c"
    assert (result.evaluations, result.cost, len(calls)) == (1, 2.0, 3)


def test_other_exits_pass():
    def evaluator(decisions):
        raise SystemExit(3)

    with pytest.raises(SystemExit):
        measured(evaluator)


def test_time_limit_stops_between_candidates(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])

    def evaluator(decisions):
        clock[0] += 10.0
        return 1.0

    result = measured(evaluator, budget=50, time_limit_s=65.0)
    assert result.interrupted == "time limit"
    # The reference took 10 of the 65 seconds; the measurement that crosses the limit counts.
    assert result.evaluations == 6


def test_several_seeds_share_the_measured_reference():
    together = run(
        Climber(), small_problem(), budget=8, seeds=[4, 5], evaluator=simulator(small_problem())
    )
    for seed, result in zip([4, 5], together, strict=True):
        same_search(result, measured(simulator(small_problem()), budget=8, seed=seed))
