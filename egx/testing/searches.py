"""The conformance check of searchers."""

from __future__ import annotations

import tempfile
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from egx.problems.base import AbstractProblem, Decisions
from egx.search.base import AbstractSearch, State
from egx.testing.common import Nonconforming, doing, equal, require
from egx.testing.problems import check_plan
from egx.training.generation import (
    concrete,
    evaluate_population,
    generation_keys,
    init_key,
    settle,
)
from egx.training.loop import run
from egx.training.result import Result

Told = tuple[list[Decisions], list[float], list[bool]]


def check_search(
    search: AbstractSearch,
    problem: AbstractProblem,
    *,
    seed: int = 0,
    generations: int = 4,
    eager: bool = True,
    seeds_together: bool = True,
) -> None:
    """Checks that the driver can run `search` on `problem`, and what a `Result` promises.

    Args:
        search: the searcher.
        problem: a small one; it should pass `check_problem`.
        seed: of the runs.
        generations: how many to run; the last one is cut by the budget.
        eager: check that a proposal is the same without jit. Switch it off for searchers with
            networks, where it takes minutes and the last bits may differ.
        seeds_together: check all that with a second seed in one program, which must not change a
            bit. Switch it off for searchers whose own sums depend on the batch.

    Raises:
        Nonconforming: naming the promise that is broken.
    """
    with doing("check(problem)"):
        search.check(problem)
    batch = search.batch_size
    require(isinstance(batch, int) and batch >= 1, f"batch_size must be 1 or more, got {batch!r}")
    budget = max(generations * batch - batch // 2, 1)
    told = _run_by_hand(search, problem, seed, generations, budget, eager)
    # One program for all runs: compiling is most of what a check costs.
    seeds = [seed + 1, seed] if seeds_together else [seed]
    result = _drive(search, problem, seeds, budget)
    require(
        result.evaluations == budget, f"{result.evaluations} evaluations of a budget of {budget}"
    )
    try:
        _check_incumbent(result, told, batch)
    except Nonconforming as error:
        if seeds_together:
            _check_incumbent(_drive(search, problem, [seed], budget), told, batch)
            raise Nonconforming(
                f"a seed gives another result beside a second one: {error}"
            ) from error
        raise
    again = _drive(search, problem, seeds, budget)
    require(_same(result, again), "the same seed gives another result the second time")
    with tempfile.TemporaryDirectory() as folder:
        whole = max(generations // 2, 1) * batch
        _drive(search, problem, seeds, min(whole, budget), checkpoint_dir=folder)
        if whole <= budget:
            resumed = _drive(search, problem, seeds, budget, checkpoint_dir=folder, resume=True)
            require(_same(result, resumed), "a resumed run is not that of a straight run")


def _drive(
    search: AbstractSearch, problem: AbstractProblem, seeds: list[int], budget: int, **more: Any
) -> Result:
    """The result of the last seed."""
    with doing("a run"):
        return run(search, problem, budget=budget, seeds=seeds, **more)[-1]


def _same(a: Result, b: Result) -> bool:
    parts = [
        (r.decisions, r.cost, r.feasible, r.found_at, r.history.best_cost, r.history.best_feasible)
        for r in (a, b)
    ]
    return equal(*parts)


def _run_by_hand(
    search: AbstractSearch,
    problem: AbstractProblem,
    seed: int,
    generations: int,
    budget: int,
    eager: bool,
) -> Told:
    """Every candidate that counts, with its cost and feasibility, in order."""
    search, problem = concrete(search), concrete(problem)
    ask = eqx.filter_jit(lambda s, p, state, key: s.ask(p, state, key=key))
    tell = eqx.filter_jit(lambda s, p, state, c, o, key: s.tell(p, state, c, o, key=key))
    init = eqx.filter_jit(lambda s, p, key: s.init(p, key=key))
    run_key = jax.random.key(seed)
    with doing("init"):
        state = init(search, problem, init_key(run_key))
    told: Told = ([], [], [])
    batch = search.batch_size
    for generation in range(generations):
        ask_key, tell_key = generation_keys(run_key, jnp.asarray(generation, jnp.int32))
        with doing("ask"):
            candidates, asked = ask(search, problem, state, ask_key)
        _check_candidates(problem, candidates, batch)
        if generation == 0 and eager:
            with doing("ask without jit"):
                plain, _ = search.ask(problem, state, key=ask_key)
            require(equal(plain, candidates), "ask proposes something else without jit")
        outcomes = eqx.filter_jit(evaluate_population)(problem, candidates)
        counted = generation * batch + jnp.arange(batch) < budget
        with doing("tell"):
            after, metrics = tell(
                search, problem, asked, candidates, settle(outcomes, counted), tell_key
            )
        _check_state(state, after)
        _check_metrics(metrics)
        for index in np.flatnonzero(counted):
            told[0].append({name: value[index] for name, value in candidates.items()})
            told[1].append(float(outcomes.cost[index]))
            told[2].append(bool(outcomes.feasible[index]))
        state = after
    # Nothing feasible, as when a board is switched off: the searcher must live on.
    none = settle(outcomes, jnp.zeros(batch, bool))
    with doing("tell, when every measurement failed"):
        state, _ = tell(search, problem, state, candidates, none, tell_key)
        candidates, _ = ask(search, problem, state, ask_key)
    _check_candidates(problem, candidates, batch)
    return told


def _check_candidates(problem: AbstractProblem, candidates: Decisions, batch: int) -> None:
    require(isinstance(candidates, dict), f"ask must give a dict, got {type(candidates).__name__}")
    for name, value in candidates.items():
        require(
            value.ndim == 2 and len(value) == batch,
            f"ask gives {name} of shape {list(value.shape)}, expected [{batch}, length]",
        )
    for index in range(batch):
        one = {name: value[index] for name, value in candidates.items()}
        check_plan(problem, f"candidate {index} of ask", one)


def _check_state(before: State, after: State) -> None:
    require(
        bool(str(jax.tree.structure(before)) == str(jax.tree.structure(after))),
        "the state's structure must stay as init made it",
    )
    pairs = zip(jax.tree_util.tree_leaves_with_path(before), jax.tree.leaves(after), strict=True)
    for (path, old), new in pairs:
        where = jax.tree_util.keystr(path)
        if not eqx.is_array(old):
            require(old == new, f"state{where} is no array and changes; make it an array")
            continue
        require(
            old.shape == new.shape and old.dtype == new.dtype,
            f"state{where} changes from {old.dtype}{list(old.shape)} to "
            f"{new.dtype}{list(new.shape)}",
        )
        if jnp.issubdtype(new.dtype, jnp.floating):
            require(not np.isnan(new).any(), f"state{where} holds NaN")


def _check_metrics(metrics: Any) -> None:
    require(isinstance(metrics, dict), "tell must give metrics as a dict")
    for name, value in metrics.items():
        require(
            jnp.shape(value) == () and jnp.result_type(value) == jnp.float32,
            f"metric {name!r} must be a float32 scalar",
        )


def _best(costs: list[float], feasible: list[bool]) -> int:
    """The index of the first best of what was told."""
    eligible = [i for i, fits in enumerate(feasible) if fits] or range(len(costs))
    return min(eligible, key=lambda i: costs[i])


def _check_incumbent(result: Result, told: Told, batch: int) -> None:
    candidates, costs, feasible = told
    best = _best(costs, feasible)
    require(
        (result.cost, result.feasible) == (costs[best], feasible[best]),
        f"the result costs {result.cost} (feasible: {result.feasible}), but the best of what "
        f"was told costs {costs[best]} (feasible: {feasible[best]})",
    )
    require(result.found_at == best + 1, f"found_at is {result.found_at}, expected {best + 1}")
    require(
        equal(result.decisions, candidates[best]),
        "the result's decisions are not those of the best candidate",
    )
    history = result.history
    for generation, so_far in enumerate(history.evaluations):
        require(
            so_far == min((generation + 1) * batch, len(costs)),
            f"{so_far} evaluations after generation {generation}",
        )
        best = _best(costs[:so_far], feasible[:so_far])
        row = (float(history.best_cost[generation]), bool(history.best_feasible[generation]))
        require(
            row == (costs[best], feasible[best]),
            f"the history says {row} after generation {generation}, but the best of what was told "
            f"until then is {(costs[best], feasible[best])}",
        )
