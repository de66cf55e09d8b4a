"""`egx optimize` and `egx compare`; `egx.cli` has their options."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import threading
from argparse import Namespace
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
from matplotlib.figure import Figure
from rich.console import Console

from egx import api
from egx import hardware as machines
from egx.baselines.exact import ExactSolution, exact
from egx.comparison import Comparison
from egx.errors import FormatError, MissingExtraError, SearchError
from egx.files import write_whole
from egx.loading import load
from egx.lookups import load_options
from egx.policies.loading import load_policy
from egx.problems.base import AbstractProblem
from egx.problems.execution import Execution
from egx.problems.memory_placement import MemoryPlacement
from egx.report.console import best_so_far, console, error_console, print_table, watch
from egx.report.curves import convergence
from egx.report.folder import (
    COMPARISON,
    REPORT,
    Same,
    free_folder,
    reference_lines,
    require_free,
    write_folder,
)
from egx.report.placement import layout
from egx.report.tables import effort_line, level_table
from egx.report.units import format_bytes, format_duration
from egx.report.verdict import NATIVE, Verdict, judge
from egx.search.registry import make_search
from egx.training.identity import problem_identity, search_identity
from egx.training.progress import Progress
from egx.training.result import Result
from egx.training.solved import EXACT

BOUND_SECONDS = 20.0
INTERRUPTED = 130

_Answer = TypeVar("_Answer")


def optimize(options: Namespace) -> int:
    """Searches, bounds, prints the tables and writes the folder."""
    out, log = console(), error_console()
    use_devices(options.spread)
    problem, loaded_with = _problem(options)
    given: dict[str, Any] = {"options": dict(options.option)}
    if options.policy is not None:
        given["policy"] = load_policy(options.policy)
    folder = choose_folder(options, problem, same_run(problem, options, given))
    out.print(headline(problem), style="bold")
    result, solution, stopped = search(problem, options, folder, given, log)
    if solution is not None:
        result = result.with_bound(solution.bound, solution.status)
    verdict = judge(problem, result, solution)
    try:
        # First, for a reader of our output such as `head` may close it and end us.
        files = write_folder(
            folder,
            problem,
            result,
            verdict,
            source=options.source,
            options=loaded_with,
            pictures=options.pictures,
        )
    finally:
        _tell(out, problem, result, verdict, solution)
    out.print(f"wrote {folder}/: {', '.join(files)}")
    return INTERRUPTED if stopped else 0


def search(
    problem: AbstractProblem,
    options: Namespace,
    folder: Path,
    given: Mapping[str, Any],
    log: Console,
    *,
    best: Callable[[Progress], str] = best_so_far,
) -> tuple[Result, ExactSolution | None, bool]:
    """The result, the solver's answer beside it, and whether Ctrl-C stopped either of them.

    `best` words the best so far. A solver that cannot do the problem says why, and is left out.
    """
    run = functools.partial(
        api.optimize,
        problem,
        options.algorithm,
        budget=options.budget,
        seed=options.seed,
        time_limit_s=options.time_limit,
        checkpoint_dir=checkpoint_folder(options, folder),
        resume=options.resume,
        devices=options.spread,
        **given,
    )
    if options.algorithm == EXACT:
        solved = _in_thread(run, "solving", options, log)
        if solved is None:
            raise KeyboardInterrupt
        return solved, None, False
    with watch(log, quiet=options.quiet, best=best) as progress:
        result = run(progress=progress)
    stopped = result.interrupted == "ctrl-c"
    if stopped or options.bound_seconds <= 0 or result.bound_status == "proved":
        return result, None, stopped
    try:
        solution = bound_by_solver(problem, result, options, log)
    except (SearchError, MissingExtraError) as error:
        log.print(f"not bounded by a solver: {error}", markup=False)
        return result, None, False
    return result, solution, solution is None


def same_run(problem: AbstractProblem, options: Namespace, given: Mapping[str, Any]) -> Same:
    """Tells a run of the same problem, searcher, seed and budget (any budget when resumed)."""
    expected = {"algorithm": options.algorithm, "problem": problem_identity(problem)}
    if options.algorithm != EXACT:
        search = make_search(options.algorithm, budget=options.budget, **given)
        expected |= {"config": search_identity(search), "seed": options.seed}
        if not options.resume:
            expected["budget"] = options.budget
    # As it reads back from a file.
    expected = json.loads(json.dumps(expected))

    def same(there: dict[str, Any]) -> bool:
        found = {**there, "problem": there.get("provenance", {}).get("problem")}
        return all(found.get(key) == value for key, value in expected.items())

    return same


def _tell(
    out: Console,
    problem: MemoryPlacement,
    result: Result,
    verdict: Verdict,
    solution: ExactSolution | None,
) -> None:
    """Prints what was found, how hard it was, and what moved."""
    print_table(out, verdict.table())
    remark = verdict.remark()
    if remark:
        out.print(remark, style="bold")
    out.print(effort_line(result) + solver_line(solution) + "\n")
    names = (NATIVE, verdict.shown.name)
    moved = level_table(problem, problem.reference, verdict.shown.decisions, names=names)
    print_table(out, moved)


def compare(options: Namespace) -> int:
    """Runs several algorithms, prints their table, and writes it with a picture."""
    problem, _ = _problem(options)
    title = layout(problem).title

    def draw(comparison: Comparison) -> Figure:
        lines = reference_lines(problem, comparison.bound, comparison.bound_status)
        return convergence(comparison.curves(), lines, title=title)

    return run_comparison(problem, options, headline=headline(problem), title=title, draw=draw)


def run_comparison(
    problem: AbstractProblem,
    options: Namespace,
    *,
    headline: str,
    title: str,
    draw: Callable[[Comparison], Figure],
    best: Callable[[Progress], str] = best_so_far,
) -> int:
    """Compares on any problem; `draw` makes the picture, `best` words the best so far.

    A solver that cannot do the problem says why, and is left out.
    """
    out, log = console(), error_console()
    folder = choose_folder(options, problem, _same_comparison(problem, options), suffix="-compare")
    out.print(headline, style="bold")
    solution = None
    if EXACT not in options.algorithms and options.bound_seconds > 0:
        try:
            solution = bound_by_solver(problem, None, options, log)
            if solution is None:
                raise KeyboardInterrupt
        except (SearchError, MissingExtraError) as error:
            log.print(f"not bounded by a solver: {error}", markup=False)
    with watch(log, quiet=options.quiet, best=best) as progress:
        comparison = api.compare(
            problem,
            options.algorithms,
            budget=options.budget,
            seeds=options.seeds,
            bound=solution,
            directory=folder / "runs" if options.resume else None,
            time_limit_s=options.time_limit,
            progress=progress,
        )
    table = comparison.table()
    comparison.save(folder / COMPARISON)
    files = [COMPARISON, REPORT]
    report = f"# {title}\n\n{table.to_markdown()}"
    if options.pictures != "none":
        picture = f"convergence.{options.pictures}"
        draw(comparison).savefig(folder / picture)
        report += f"\n![convergence]({picture})\n"
        files.append(picture)
    write_whole(folder / REPORT, report)
    print_table(out, table)
    out.print(f"wrote {folder}/: {', '.join(files)}")
    return INTERRUPTED if comparison.interrupted else 0


def _same_comparison(problem: AbstractProblem, options: Namespace) -> Same:
    """Tells a comparison of the same problem, budget and seeds, of no searchers but these."""
    expected = json.loads(json.dumps(problem_identity(problem)))

    def same(there: dict[str, Any]) -> bool:
        groups = there.get("results")
        if not isinstance(groups, dict) or not groups or there.get("budget") != options.budget:
            return False
        runs = [run for group in groups.values() for run in group]
        return (
            set(groups) <= set(options.algorithms)
            and {run["seed"] for run in runs} <= set(range(options.seeds))
            and all(run["provenance"]["problem"] == expected for run in runs)
        )

    return same


def _problem(options: Namespace) -> tuple[MemoryPlacement, dict[str, Any]]:
    """The problem, and the options that its model was loaded with."""
    given = load_options(options)
    machine = machines.load(options.hardware)
    model = load(options.source, **given)
    return MemoryPlacement(model, machine, prefetch=options.prefetch), given


def headline(problem: MemoryPlacement) -> str:
    """The problem in one line."""
    where = layout(problem)
    weights, activations = int(where.weight_bytes.sum()), int(where.tensor_bytes.sum())
    levels = ", ".join(
        f"{name} {format_bytes(capacity)}"
        for name, capacity in zip(where.level_names, where.capacity_bytes, strict=True)
    )
    prefetch = f", prefetch {problem.prefetch}" if problem.prefetch else ""
    return (
        f"{where.title} ({levels}){prefetch}: {where.steps:,} ops, "
        f"{format_bytes(weights)} of weights, {format_bytes(activations)} of activations"
    )


def choose_folder(
    options: Namespace, problem: AbstractProblem, same: Same, suffix: str = ""
) -> Path:
    """Where to write: what the user names, if it is free, or else a name of our own that is.

    Made at once: a long search must not end without a place to write to.
    """
    folder = _folder(options, problem, same, suffix)
    folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK):
        raise FormatError(f"{folder}: cannot be written to")
    return folder


def _folder(options: Namespace, problem: AbstractProblem, same: Same, suffix: str) -> Path:
    if options.out is not None:
        folder = Path(options.out)
        if not options.overwrite:
            require_free(folder, same)
        return folder
    model = problem.model.value
    stem = "graph" if model is None else model.name.split(".")[0]
    machine = cast(MemoryPlacement | Execution, problem).hardware.name
    plain = re.sub(r"[^\w.-]+", "-", f"{stem}-{machine}{suffix}").strip("-.")
    wanted = Path("egx-out") / (plain or "run")
    return wanted if options.overwrite else free_folder(wanted, same)


def checkpoint_folder(options: Namespace, folder: Path) -> Path | None:
    if options.checkpoint:
        return Path(options.checkpoint)
    return folder / "checkpoint" if options.checkpoint == "" or options.resume else None


def bound_by_solver(
    problem: Any, result: Result | None, options: Namespace, log: Console
) -> ExactSolution | None:
    """The solver's answer, begun at the found plan; None if it is not asked for or was stopped."""
    seconds = options.bound_seconds
    if seconds <= 0 or (result is not None and result.interrupted == "ctrl-c"):
        return None
    start = None
    if result is not None and result.feasible:
        start = {name: jnp.asarray(value) for name, value in result.decisions.items()}
    work = functools.partial(exact, problem, time_limit_s=seconds, start=start)
    message = f"bounding the optimum (up to {format_duration(seconds)}; Ctrl-C skips it)"
    return _in_thread(work, message, options, log)


def _in_thread(
    work: Callable[[], _Answer], message: str, options: Namespace, log: Console
) -> _Answer | None:
    """What `work` returns, or None after Ctrl-C, which native code would not notice by itself."""
    answers: list[_Answer | Exception] = []

    def call() -> None:
        try:
            answers.append(work())
        except Exception as error:
            answers.append(error)

    thread = threading.Thread(target=call, daemon=True)
    with contextlib.nullcontext() if options.quiet else log.status(message):
        thread.start()
        try:
            while thread.is_alive():
                thread.join(0.1)
        except KeyboardInterrupt:
            return None
    (answer,) = answers
    if isinstance(answer, Exception):
        raise answer
    return answer


def solver_line(solution: ExactSolution | None) -> str:
    """What the solver adds to the line of effort."""
    if solution is None:
        return ""
    known = "proved" if solution.status == "proved" else "bounded"
    return f"; optimum {known} in {format_duration(solution.seconds)}"


def use_devices(count: int | None) -> None:
    """Lets a CPU show as many devices as are asked for, if JAX has not started yet."""
    if count is not None and count > 1:
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", count)
