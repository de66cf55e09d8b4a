"""The host loop: exact budgets, chunks and seeds that change nothing, stops, and its errors."""

from __future__ import annotations

import os
import signal
import threading
import time

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from runs import Climber, chain, machine, same_search, small_problem

from egx.errors import SearchError
from egx.problems.memory_placement import MemoryPlacement
from egx.search.random import RandomSearch
from egx.training import loop
from egx.training.generation import settle
from egx.training.loop import run


def one(search=None, problem=None, *, budget=50, seed=0, **more):
    return run(
        search or Climber(), problem or small_problem(), budget=budget, seeds=[seed], **more
    )[0]


def test_result_is_what_it_says():
    result = one(budget=40)
    outcome = small_problem().evaluate({k: jnp.asarray(v) for k, v in result.decisions.items()})
    assert float(outcome.cost) == result.cost
    assert bool(outcome.feasible) == result.feasible
    assert result.reference_cost == float(small_problem().reference_cost)
    assert result.history.best_cost[-1] == result.cost
    assert result.algorithm == "Climber"
    assert result.interrupted is None


@pytest.mark.parametrize("budget", [1, 3, 4, 5, 37, 40])
def test_exactly_the_budget_counts(budget):
    result = one(budget=budget)
    assert result.evaluations == budget
    assert result.history.evaluations.tolist() == [*range(4, budget, 4), budget]
    # What the searcher saw: every evaluation of the budget, none beyond it.
    assert result.history.metrics["told"][-1] == budget
    assert 1 <= result.found_at <= budget


def test_candidates_beyond_the_budget_never_win():
    long = one(RandomSearch(batch=64), budget=64)
    assert long.found_at > 1
    short = one(RandomSearch(batch=64), budget=long.found_at - 1)
    assert short.found_at < long.found_at
    assert short.cost >= long.cost or not short.feasible
    same = one(RandomSearch(batch=64), budget=long.found_at)
    assert (same.cost, same.found_at) == (long.cost, long.found_at)


def test_best_cost_never_rises_among_feasible():
    history = one(budget=200).history
    cost = history.best_cost[history.best_feasible]
    assert len(cost) > 10
    assert (np.diff(cost) <= 0).all()
    assert (np.diff(history.best_feasible.astype(int)) >= 0).all()


def test_chunks_change_nothing(monkeypatch):
    straight = one(budget=200)
    monkeypatch.setattr(loop, "CHUNK_SECONDS", 0.0)
    same_search(straight, one(budget=200))


def test_seeds_in_one_program_are_the_seeds_alone():
    together = run(Climber(), small_problem(), budget=60, seeds=[3, 0, 2**32 - 1])
    for seed, result in zip([3, 0, 2**32 - 1], together, strict=True):
        assert result.seed == seed
        same_search(result, one(budget=60, seed=seed))
    assert together[0].history.best_cost.tolist() != together[1].history.best_cost.tolist()


def compilations():
    """A list that grows by one for each program that XLA compiles from here on."""
    events = []

    def listen(name, seconds, **_):
        if name == "/jax/core/compile/backend_compile_duration":
            events.append(seconds)

    jax.monitoring.register_event_duration_secs_listener(listen)
    return events


def test_compiles_once():
    first = MemoryPlacement(chain(7, name="first"), machine())
    second = MemoryPlacement(chain(7, scale=2, name="second"), machine(36.0))
    search = Climber(batch=6)
    events = compilations()
    one(search, first, budget=30)
    assert len(events) > 0
    events.clear()
    # Another budget, seed, chunk length, hyper-parameter, graph of that shape and machine.
    one(search, first, budget=6 * 700 + 1, seed=9)
    one(Climber(batch=6, rate=0.4), second, budget=31, seed=2)
    assert events == []
    one(Climber(batch=5), first, budget=30)
    assert len(events) > 0


def test_time_limit_stops_on_time():
    one(budget=8)
    began = time.perf_counter()
    result = one(budget=2**30, time_limit_s=1.0)
    assert time.perf_counter() - began < 3.0
    assert result.interrupted == "time limit"
    assert 0 < result.evaluations < 2**30
    assert result.evaluations == result.history.evaluations[-1]


def test_time_limit_beyond_the_search_is_no_interruption():
    assert one(budget=8, time_limit_s=1000).interrupted is None


def test_ctrl_c_keeps_the_incumbent():
    def press(progress):
        if progress.evaluations > 100:
            os.kill(os.getpid(), signal.SIGINT)

    result = one(budget=2**30, progress=press)
    assert result.interrupted == "ctrl-c"
    assert 100 < result.evaluations < 2**30
    assert result.history.best_cost[-1] == result.cost
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    same_search(result, one(budget=result.evaluations))


def test_interrupt_from_a_callback_keeps_the_incumbent():
    def press(progress):
        raise KeyboardInterrupt

    result = one(budget=100, progress=press)
    assert result.interrupted == "ctrl-c"
    assert result.evaluations == 4


def test_runs_outside_the_main_thread():
    results = []
    thread = threading.Thread(target=lambda: results.append(one(budget=20)))
    thread.start()
    thread.join()
    same_search(results[0], one(budget=20))


def test_progress_reports_every_chunk():
    seen = []
    result = one(budget=4000, progress=seen.append)
    assert [p.evaluations for p in seen] == sorted({p.evaluations for p in seen})
    assert seen[-1].evaluations == seen[-1].budget == 4000
    assert seen[-1].best_cost == result.cost
    assert all(p.reference_cost == result.reference_cost for p in seen)


def test_bar_shows_best_and_reference(capsys):
    result = one(budget=40, progress=True)
    shown = capsys.readouterr().err
    assert "Climber" in shown
    assert f"{result.cost:.3g}"[:3] in shown


@pytest.mark.parametrize("budget", [0, -1, 2**31])
def test_impossible_budgets_are_refused(budget):
    with pytest.raises(SearchError, match=f"budget must be 1 to .* got {budget}"):
        one(budget=budget)


@pytest.mark.parametrize(
    ("seeds", "message"),
    [([], "at least one"), ([1, 2, 1], "got 1 more than once"), ([-1], "seed"), ([2**32], "seed")],
)
def test_impossible_seeds_are_refused(seeds, message):
    with pytest.raises(SearchError, match=message):
        run(Climber(), small_problem(), budget=4, seeds=seeds)


@pytest.mark.parametrize("value", [True, 1.5, "4", None])
def test_numbers_must_be_whole(value):
    with pytest.raises(SearchError, match="budget must be a whole number"):
        loop.whole_number("budget", value, 1, 10)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"time_limit_s": 0.0}, "greater than 0"),
        ({"time_limit_s": float("nan")}, "greater than 0"),
        ({"repeats": 2}, "needs an evaluator"),
        ({"evaluator": lambda _: 1.0, "devices": 2}, "spread the simulator"),
        ({"devices": 99}, "1 to 4"),
    ],
)
def test_impossible_arguments_are_refused(more, message):
    with pytest.raises(SearchError, match=message):
        one(budget=4, **more)


class Picky(Climber):
    def check(self, problem):
        raise SearchError("Picky runs on nothing")


def test_searcher_is_asked_whether_it_can_run():
    with pytest.raises(SearchError, match="runs on nothing"):
        one(Picky(), budget=4)


def test_costs_that_are_not_finite_cannot_win():
    problem = small_problem()
    outcomes = jax.vmap(lambda _: problem.failed())(jnp.arange(4))
    costs = jnp.array([jnp.nan, -jnp.inf, 3.0, 2.0])
    outcomes = eqx.tree_at(lambda o: (o.cost, o.feasible), outcomes, (costs, jnp.ones(4, bool)))
    settled = settle(outcomes, jnp.array([True, True, True, False]))
    assert settled.feasible.tolist() == [False, False, True, False]
    assert settled.cost[2] == 3.0
    assert np.isfinite(np.asarray(settled.cost)).all()


def test_devices_change_nothing():
    alone = one(RandomSearch(batch=10), budget=95)
    for devices in (1, 3, 4):
        same_search(alone, one(RandomSearch(batch=10), budget=95, devices=devices))
    pair = run(Climber(), small_problem(), budget=60, seeds=[0, 1], devices=4)
    same_search(pair[1], one(budget=60, seed=1))


def test_devices_compile_once():
    problem = MemoryPlacement(chain(8), machine())
    events = compilations()
    one(problem=problem, budget=20, devices=4)
    assert len(events) > 0
    events.clear()
    one(problem=problem, budget=4000, seed=3, devices=4)
    assert events == []
