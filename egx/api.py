"""The functions that people call to search: optimize a problem, and compare searchers on it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from egx.baselines.exact import ExactSolution
from egx.comparison import Comparison, ComparisonFolder
from egx.errors import SearchError
from egx.loading import load
from egx.policies.base import AbstractPolicy
from egx.policies.loading import load_policy
from egx.problems.base import AbstractProblem, expect_problem
from egx.search.base import AbstractSearch
from egx.search.registry import find_search
from egx.training.identity import package_version, problem_identity, search_identity
from egx.training.loop import check_seeds, run, whole_number
from egx.training.progress import ProgressCallback
from egx.training.records import SinkLike
from egx.training.result import Result
from egx.training.solved import EXACT, beside_cheap_bound, solve
from egx.training.steppers import Evaluator
from egx.training.trainer import train

__all__ = ["compare", "load", "load_policy", "optimize", "optimize_seeds", "train"]


def optimize(
    problem: AbstractProblem,
    algorithm: str | AbstractSearch = "egrl_plus",
    *,
    budget: int = 4000,
    seed: int = 0,
    options: Mapping[str, Any] | None = None,
    policy: AbstractPolicy | None = None,
    evaluator: Evaluator | None = None,
    repeats: int = 1,
    time_limit_s: float | None = None,
    progress: bool | ProgressCallback = False,
    records: SinkLike | Sequence[SinkLike] = (),
    checkpoint_dir: str | os.PathLike[str] | None = None,
    checkpoint_every_s: float = 30.0,
    resume: bool = False,
    devices: int | Sequence[jax.Device] | None = None,
) -> Result:
    """Searches for the decisions of least cost.

    Args:
        problem: what to decide.
        algorithm: a name among `egx.searches()`, or a searcher.
        budget: evaluations to spend, exactly. "exact" needs none and accepts any.
        seed: 0 to 2^32 - 1; equal seeds give equal results.
        options: fields of the searcher by name, such as {"batch": 64}.
        policy: a trained policy to start from, for searchers that have one.
        evaluator: measures one candidate on real hardware and returns its cost (seconds).
            It gets a dict of NumPy arrays, an entry per real op or use, without padding. A
            candidate fails, and counts as infeasible, when the evaluator raises or returns
            anything but a finite number of 0 or more. The reference is measured too, first and
            uncounted, so that speed-ups are against what was measured.
        repeats: measurements per candidate, of which the median counts.
        time_limit_s: wall-clock seconds for everything, compilation included; at least one
            generation runs on the simulator.
        progress: True for a bar on stderr, or a callable that takes a `Progress`.
        records: a path for JSON lines, one a generation, or sinks from `egx.training.records`.
        checkpoint_dir: a folder for checkpoints.
        checkpoint_every_s: seconds between two checkpoints.
        resume: go on from the checkpoint in that folder, if there is one; the result is the same
            as that of a run that was never stopped.
        devices: spread each generation over that many devices, or over these.

    Returns:
        The best found. Ctrl-C stops the search and returns the best so far, flagged.

    Raises:
        SearchError: for an impossible argument, or a searcher that cannot run on the problem.
        CheckpointError: for a checkpoint that cannot be written, or is of another run.
    """
    if algorithm == EXACT:
        given = {"evaluator": evaluator, "checkpoint_dir": checkpoint_dir, "policy": policy}
        refused = [name for name, value in given.items() if value is not None]
        if refused:
            raise SearchError(f"exact takes no {refused[0]}")
        return solve(problem, budget=budget, seed=seed, time_limit_s=time_limit_s, options=options)
    search, name = find_search(algorithm, options, budget=budget, policy=policy)
    results = run(
        search,
        problem,
        budget=budget,
        seeds=[seed],
        name=name,
        evaluator=evaluator,
        repeats=repeats,
        time_limit_s=time_limit_s,
        progress=progress,
        records=records,
        checkpoint_dir=checkpoint_dir,
        checkpoint_every_s=checkpoint_every_s,
        resume=resume,
        devices=devices,
    )
    return _finish(problem, results, evaluator)[0]


def optimize_seeds(
    problem: AbstractProblem,
    algorithm: str | AbstractSearch = "egrl_plus",
    *,
    seeds: Sequence[int],
    budget: int = 4000,
    options: Mapping[str, Any] | None = None,
    policy: AbstractPolicy | None = None,
    **more: Any,
) -> list[Result]:
    """`optimize` for several seeds as one program: a result per seed, in their order.

    `more` are arguments of `optimize`. A seed's result is that of the seed alone as far as the
    searcher's own sums do not depend on how many run beside it, and `seconds` is of all together.
    """
    if algorithm == EXACT:
        raise SearchError("exact has no seeds: it gives the same answer again")
    search, name = find_search(algorithm, options, budget=budget, policy=policy)
    results = run(search, problem, budget=budget, seeds=seeds, name=name, **more)
    return _finish(problem, results, more.get("evaluator"))


def _finish(
    problem: AbstractProblem, results: Sequence[Result], evaluator: Evaluator | None
) -> list[Result]:
    # The bound is on simulated costs; what hardware measures may undercut it.
    return beside_cheap_bound(problem, results) if evaluator is None else list(results)


def compare(
    problem: AbstractProblem,
    algorithms: Sequence[str | AbstractSearch] | Mapping[str, str | AbstractSearch],
    *,
    budget: int = 4000,
    seeds: int | Sequence[int] = 5,
    options: Mapping[str, Mapping[str, Any]] | None = None,
    bound: ExactSolution | None = None,
    seeds_together: bool = True,
    directory: str | os.PathLike[str] | None = None,
    evaluator: Evaluator | None = None,
    time_limit_s: float | None = None,
    progress: bool | ProgressCallback = False,
) -> Comparison:
    """Runs searchers on one problem under the same budget and seeds.

    Args:
        problem: what to decide.
        algorithms: names or searchers; as a dict, searchers by the names to show.
        budget: evaluations per run.
        seeds: how many (0, 1, ...), or which.
        options: by the shown name of a searcher, as in `optimize`.
        bound: what `egx.exact` proved; otherwise the bound of "exact", if it is among the
            algorithms, or else the cheap one.
        seeds_together: run all seeds of a searcher as one program: faster on an accelerator, more
            memory.
        directory: keep each finished run there; a later call with the same arguments goes on from
            them.
        evaluator, time_limit_s, progress: as in `optimize`; the limit is per program.

    Returns:
        The comparison. After Ctrl-C it holds the runs that finished, and says so.

    Raises:
        SearchError: for an unknown or unsuitable searcher, before anything runs.
        CheckpointError: for results in `directory` that are of another comparison.
    """
    chosen = _named(algorithms)
    listed = range(whole_number("seeds", seeds, 1, 10_000)) if isinstance(seeds, int) else seeds
    checked = check_seeds(listed)
    given = dict(options or {})
    unknown = [name for name in given if name not in chosen]
    if unknown:
        raise SearchError(f"options for {unknown[0]!r}, which is not compared: {list(chosen)}")
    expect_problem(problem)
    runs = {}
    for name, algorithm in chosen.items():
        if algorithm != EXACT:
            search, _ = find_search(algorithm, given.get(name), budget=budget)
            search.check(problem)
            runs[name] = search
    folder, results = ComparisonFolder(directory), {}
    interrupted = False
    for name in chosen:
        if name not in runs:
            limit = time_limit_s
            solved = solve(
                problem, budget=budget, seed=0, time_limit_s=limit, options=given.get(name)
            )
            results[name] = [solved]
            continue
        expected = {
            "budget": budget,
            "egx": package_version(),
            **{f"config, {k}": v for k, v in search_identity(runs[name]).items()},
            **{f"problem, {k}": v for k, v in problem_identity(problem).items()},
        }
        kept = {seed: folder.load(name, seed, expected) for seed in checked}
        missing = [seed for seed in checked if kept[seed] is None]
        for group in [missing] if seeds_together and missing else [[seed] for seed in missing]:
            finished = run(
                runs[name],
                problem,
                budget=budget,
                seeds=group,
                name=name,
                evaluator=evaluator,
                time_limit_s=time_limit_s,
                progress=progress,
            )
            interrupted = finished[0].interrupted == "ctrl-c"
            if interrupted:
                break
            for result in finished:
                kept[result.seed] = result
                folder.save(name, result)
        done = [kept[seed] for seed in checked]
        if any(result is not None for result in done):
            results[name] = _finish(problem, [r for r in done if r is not None], evaluator)
        if interrupted:
            break
    if not results:
        raise KeyboardInterrupt("stopped before the first run had finished")
    return _beside_best_bound(Comparison(results, budget, interrupted=interrupted), bound)


def _named(
    algorithms: Sequence[str | AbstractSearch] | Mapping[str, str | AbstractSearch],
) -> dict[str, str | AbstractSearch]:
    if isinstance(algorithms, str | AbstractSearch):
        raise SearchError(f"algorithms must be a list or a dict, got {algorithms!r}")
    if isinstance(algorithms, Mapping):
        named = dict(algorithms)
    else:
        names = [a if isinstance(a, str) else type(a).__name__ for a in algorithms]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise SearchError(f"{twice[0]!r} is compared twice; a dict gives each its own name")
        named = dict(zip(names, algorithms, strict=True))
    if not named:
        raise SearchError("algorithms must name at least one searcher")
    return named


def _beside_best_bound(comparison: Comparison, bound: ExactSolution | None) -> Comparison:
    if bound is not None:
        return comparison.with_bound(bound.bound, bound.status)
    known = [
        (result.bound, result.bound_status)
        for results in comparison.results.values()
        for result in results
        if result.bound is not None
    ]
    if not known:
        return comparison
    # What was proved to be the optimum goes before a bound that rounding put a little higher.
    value, status = max(known, key=lambda entry: (entry[1] == "proved", entry[0] or 0.0))
    assert value is not None
    assert status is not None
    return comparison.with_bound(value, status)
