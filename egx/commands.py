"""What the commands of the command line do; `egx.cli` has their options."""

from __future__ import annotations

import contextlib
import inspect
import json
import re
import threading
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from egx import api, zoo
from egx import hardware as machines
from egx.baselines.exact import ExactSolution, exact
from egx.errors import EgxError, SearchError
from egx.problems.memory_placement import MemoryPlacement
from egx.report.check import check_plan
from egx.report.console import watch
from egx.report.folder import (
    Same,
    free_folder,
    require_free,
    write_folder,
)
from egx.report.placement import layout
from egx.report.plan_file import read_plan
from egx.report.tables import Table, effort_line, hardware_table, level_table, model_table
from egx.report.units import format_bytes, format_duration, format_seconds
from egx.report.verdict import NATIVE, judge
from egx.search.registry import SEARCHES, make_search, searches
from egx.training.identity import problem_identity, search_identity

BOUND_SECONDS = 20.0
INTERRUPTED = 130
PREFERRED = ("egrl_plus", "local", "annealing", "random")


def default_algorithm() -> str:
    """The one that serves a user best among those there are."""
    return next(name for name in PREFERRED if name in searches())


def default_comparison() -> list[str]:
    """A few algorithms that are quick to run."""
    wanted = ("egrl_plus", "local", "annealing", "greedy_dp", "random")
    return [name for name in wanted if name in searches()]


def optimize(options: Namespace) -> int:
    """Searches, bounds, prints the tables and writes the folder."""
    out, log = Console(highlight=False, soft_wrap=True), Console(stderr=True, highlight=False)
    _use_devices(options.devices)
    problem, load_options = _problem(options)
    search = make_search(options.algorithm, dict(options.option))
    identity = _plain(
        {
            "problem": problem_identity(problem),
            "algorithm": options.algorithm,
            "config": search_identity(search),
            "seed": options.seed,
        }
    )

    def same(there: dict[str, Any]) -> bool:
        """Whether the run in a folder is this one, perhaps with another budget when resumed."""
        found = {k: there.get(k) for k in ("algorithm", "config", "seed")}
        found["problem"] = there.get("provenance", {}).get("problem")
        return found == identity and (options.resume or there.get("budget") == options.budget)

    folder = _folder(options, problem, same)
    checkpoints = _checkpoint_folder(options, folder)
    out.print(_headline(problem), style="bold")
    with watch(log, quiet=options.quiet) as progress:
        result = api.optimize(
            problem,
            options.algorithm,
            budget=options.budget,
            seed=options.seed,
            options=dict(options.option),
            time_limit_s=options.time_limit,
            progress=progress,
            checkpoint_dir=checkpoints,
            resume=options.resume,
            **_given(devices=options.devices),
        )
    stopped = result.interrupted == "ctrl-c"
    solution = None
    if not stopped:
        start = result.decisions if result.feasible else None
        speaks = None if options.quiet else log
        solution, stopped = _bound(problem, start, options.bound_seconds, speaks)
    if solution is not None:
        result = result.with_bound(solution.bound, solution.status)
    verdict = judge(problem, result, solution)
    _print(out, verdict.table())
    remark = verdict.remark()
    if remark:
        out.print(remark, style="bold")
    out.print(effort_line(result) + _solver_line(solution) + "\n")
    shown = verdict.shown
    names = (NATIVE, shown.name)
    _print(out, level_table(problem, problem.reference, shown.decisions, names=names))
    files = write_folder(
        folder,
        problem,
        result,
        verdict,
        source=options.source,
        options=load_options,
        pictures=options.pictures,
    )
    out.print(f"wrote {folder}/: {', '.join(files)}")
    return INTERRUPTED if stopped else 0


def check(options: Namespace) -> int:
    """Checks a plan; prints what is wrong."""
    out = Console(highlight=False, soft_wrap=True)
    plan = read_plan(options.plan)
    given = {**plan.model.options, **_load_options(options)}
    if options.source is None and not plan.model.source:
        raise SearchError(f"{options.plan}: names no model; say which with --source")
    source = options.source or _beside(Path(options.plan), plan.model.source)
    try:
        model = api.load(source, **given)
    except EgxError as error:
        if options.source is not None:
            raise
        raise type(error)(f"{error} (if the model lies elsewhere, add --source)") from error
    outcome = check_plan(plan, model)
    if outcome.ok:
        assert outcome.latency_s is not None
        assert outcome.peak_bytes is not None
        speedup = plan.reference_s / outcome.latency_s if outcome.latency_s > 0 else 1.0
        out.print(
            f"{options.plan}: valid, {format_seconds(outcome.latency_s)}, "
            f"{speedup:.3f} times as fast as native"
        )
        for m, name in reversed(list(enumerate(plan.hardware.level_names))):
            holds = format_bytes(float(plan.hardware.level_bytes[0, m]))
            out.print(f"  {name}: at most {format_bytes(int(outcome.peak_bytes[m]))} of {holds}")
        return 0
    for fault in outcome.faults:
        out.print(f"{options.plan}: {fault}", markup=False)
    return 1


def show(options: Namespace) -> int:
    """Describes a model."""
    out = Console(highlight=False, soft_wrap=True)
    _print(out, model_table(api.load(options.source, **_load_options(options))))
    return 0


def hardware(options: Namespace) -> int:
    """Lists the machines, or describes one with the source of each number."""
    out = Console(highlight=False, soft_wrap=True)
    if options.name is None:
        rows = []
        for name in machines.presets():
            machine = machines.load(name)
            levels = ", ".join(
                f"{level} {format_bytes(float(size))}"
                for level, size in zip(machine.level_names, machine.level_bytes[0], strict=True)
            )
            rows.append((name, levels))
        _print(out, Table(("machine", "memory levels"), tuple(rows), left=(0, 1)))
        return 0
    machine = machines.load(options.name)
    for device in range(machine.num_devices):
        _print(out, hardware_table(machine, device))
    numbers = tuple(
        (where, number.text, number.source or "")
        for where, number in machines.sources(options.name).items()
    )
    _print(out, Table(("number", "value", "source"), numbers, left=(0, 1, 2)))
    return 0


def models(options: Namespace) -> int:
    """Lists the zoo."""
    rows = []
    for name in zoo.names():
        builder = getattr(zoo, name)
        arguments = ", ".join(
            f"{p.name}={p.default}" for p in inspect.signature(builder).parameters.values()
        )
        rows.append((name, _first_line(builder), arguments))
    out = Console(highlight=False, soft_wrap=True)
    _print(out, Table(("model", "", "arguments for --set"), tuple(rows), left=(0, 1, 2)))
    return 0


def algorithms(options: Namespace) -> int:
    """Lists the searchers."""
    rows = []
    for name in searches():
        mark = " (default)" if name == default_algorithm() else ""
        rows.append((name, _first_line(SEARCHES[name]) + mark))
    out = Console(highlight=False, soft_wrap=True)
    _print(out, Table(("algorithm", ""), tuple(rows), left=(0, 1)))
    return 0


def _problem(options: Namespace) -> tuple[MemoryPlacement, dict[str, Any]]:
    """The problem, and the options that its model was loaded with."""
    load_options = _load_options(options)
    machine = machines.load(options.hardware)
    model = api.load(options.source, **load_options)
    return MemoryPlacement(model, machine, prefetch=options.prefetch), load_options


def _load_options(options: Namespace) -> dict[str, Any]:
    """What was said about the model, as keywords of `egx.load`."""
    given = dict(options.set)
    if options.granularity is not None:
        given["granularity"] = options.granularity
    if options.dim:
        given["dims"] = dict(options.dim)
    return given


def _headline(problem: MemoryPlacement) -> str:
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


def _folder(options: Namespace, problem: MemoryPlacement, same: Same, suffix: str = "") -> Path:
    """Where to write: what the user names, if it is free, or else a name of our own that is."""
    if options.out is not None:
        folder = Path(options.out)
        if not options.overwrite:
            require_free(folder, same)
        return folder
    model = problem.model.value
    stem = "graph" if model is None else model.name.split(".")[0]
    plain = re.sub(r"[^\w.-]+", "-", f"{stem}-{problem.hardware.name}{suffix}").strip("-.")
    wanted = Path("egx-out") / (plain or "run")
    return wanted if options.overwrite else free_folder(wanted, same)


def _checkpoint_folder(options: Namespace, folder: Path) -> Path | None:
    if options.checkpoint:
        return Path(options.checkpoint)
    return folder / "checkpoint" if options.checkpoint == "" or options.resume else None


def _bound(
    problem: MemoryPlacement, start: Mapping[str, Any] | None, seconds: float, log: Console | None
) -> tuple[ExactSolution | None, bool]:
    """The solver's answer, and whether Ctrl-C stopped it.

    It runs in a thread of its own because native code does not notice Ctrl-C.
    """
    if seconds <= 0:
        return None, False
    answers: list[ExactSolution | Exception] = []

    def work() -> None:
        try:
            answers.append(exact(problem, time_limit_s=seconds, start=start))
        except Exception as error:
            answers.append(error)

    thread = threading.Thread(target=work, daemon=True)
    message = f"bounding the optimum (up to {format_duration(seconds)}; Ctrl-C skips it)"
    with log.status(message) if log is not None else contextlib.nullcontext():
        thread.start()
        try:
            while thread.is_alive():
                thread.join(0.1)
        except KeyboardInterrupt:
            return None, True
    (answer,) = answers
    if isinstance(answer, Exception):
        raise answer
    return answer, False


def _solver_line(solution: ExactSolution | None) -> str:
    if solution is None:
        return ""
    known = "proved" if solution.status == "proved" else "bounded"
    return f"; optimum {known} in {format_duration(solution.seconds)}"


def _use_devices(count: int | None) -> None:
    """Lets a CPU show as many devices as are asked for, if JAX has not started yet."""
    if count is not None and count > 1:
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", count)


def _beside(plan: Path, source: str) -> str:
    """A model's path as the plan has it, or from the plan's own folder."""
    near = plan.parent / source
    return str(near) if not Path(source).exists() and near.is_file() else source


def _plain(value: Any) -> Any:
    """As it reads back from JSON."""
    return json.loads(json.dumps(value))


def _given(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _print(console: Console, table: Table) -> None:
    console.print(table.to_rich())


def _first_line(thing: Any) -> str:
    return (inspect.getdoc(thing) or "").split("\n\n")[0].replace("\n", " ")
