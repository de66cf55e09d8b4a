"""The folder of a run: result.json, plan.json, report.md and pictures."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from egx.errors import FormatError
from egx.files import write_whole
from egx.problems.memory_placement import MemoryPlacement
from egx.report.curves import convergence
from egx.report.latency_plot import latency_by_op, latency_parts
from egx.report.placement import first_fit, layout
from egx.report.plan import make_plan
from egx.report.plan_file import write_plan
from egx.report.plots import level_strips, occupancy_over_steps, transition
from egx.report.tables import Table, effort_line, level_table
from egx.report.verdict import FIRST_FIT, NATIVE, Verdict
from egx.training.result import Result

# Tells from the JSON of the run in a folder whether it is the same as another run.
Same = Callable[[dict[str, Any]], bool]

RESULT, COMPARISON, PLAN, REPORT = "result.json", "comparison.json", "plan.json", "report.md"

CAPTIONS = {
    "convergence": "The best plan so far against the evaluations used.",
    "levels": "The level of each op's weights and outputs, under their sizes.",
    "transition": "Bytes by their level in both plans.",
    "occupancy": "How full each level is at each step.",
    "latency": "What the time is spent on, in all and op by op.",
}


def write_folder(
    folder: Path,
    problem: MemoryPlacement,
    result: Result,
    verdict: Verdict,
    *,
    source: str | None = None,
    options: Mapping[str, Any] | None = None,
    pictures: str = "png",
) -> list[str]:
    """Writes everything about one run and returns the names of the files.

    Args:
        folder: made if it is missing; files of the same names are replaced.
        problem: a MemoryPlacement.
        result: the run, bound included.
        verdict: what is known after it; its best plan is the one that is written.
        source: what was given to `egx.load`, and
        options: the options that it was given with.
        pictures: "png", "svg" or "none".
    """
    folder.mkdir(parents=True, exist_ok=True)
    result.save(folder / RESULT)
    best = verdict.best
    plan = make_plan(
        problem, best.decisions, name=best.name, result=result, source=source, options=options
    )
    write_plan(plan, folder / PLAN)
    drawn = {}
    if pictures != "none":
        for name, draw in _drawings(problem, result, verdict).items():
            drawn[name] = f"{name}.{pictures}"
            draw().savefig(folder / drawn[name])
    names = (NATIVE, verdict.shown.name)
    moved = level_table(problem, problem.reference, verdict.shown.decisions, names=names)
    text = report_text(layout(problem).title, result, verdict, moved, drawn, CAPTIONS)
    write_whole(folder / REPORT, text)
    return [PLAN, RESULT, REPORT, *drawn.values()]


def _drawings(
    problem: MemoryPlacement, result: Result, verdict: Verdict
) -> dict[str, Callable[[], Figure]]:
    native, shown = verdict.plan(NATIVE), verdict.shown
    maps: tuple[Any, Any] = (native.decisions, shown.decisions)
    names = (NATIVE, shown.name)
    title = layout(problem).title
    lines = reference_lines(problem, verdict.bound_s, verdict.bound_status)
    history = result.history
    fits = history.best_feasible
    curve = (history.evaluations[fits], history.best_cost[fits])
    drawings: dict[str, Callable[[], Figure]] = {
        "convergence": lambda: convergence({result.algorithm: [curve]}, lines, title=title),
        "levels": lambda: level_strips(problem, *maps, names=names),
        "transition": lambda: transition(problem, *maps, names=names),
        "occupancy": lambda: occupancy_over_steps(problem, *maps, names=names),
        "latency": lambda: latency_by_op(
            *(latency_parts(problem, d) for d in maps), title=title, names=names
        ),
    }
    if not len(history):
        # A solver has none.
        del drawings["convergence"]
    return drawings


def reference_lines(
    problem: MemoryPlacement, bound_s: float | None, bound_status: str | None
) -> dict[str, float]:
    """What a convergence picture compares with."""
    lines = {NATIVE: float(problem.reference_cost), FIRST_FIT: first_fit(problem)[1]}
    if bound_s is not None:
        lines["optimum" if bound_status == "proved" else "bound"] = bound_s
    return lines


def report_text(
    title: str,
    result: Result,
    verdict: Any,
    details: Table,
    drawn: Mapping[str, str],
    captions: Mapping[str, str],
) -> str:
    """The report of a run: the verdict's table and remark, the effort, details and pictures.

    `drawn` names the file of each picture.
    """
    parts = [f"# {title}\n", verdict.table().to_markdown()]
    remark = verdict.remark()
    if remark:
        parts.append(remark + "\n")
    parts += [effort_line(result) + ".\n", details.to_markdown()]
    parts += [f"{captions[name]}\n\n![{name}]({file})\n" for name, file in drawn.items()]
    return "\n".join(parts)


def what_lies_in(folder: Path) -> dict[str, Any] | None:
    """What tells the run in a folder from other runs; None if there is no run in it."""
    for name in (RESULT, COMPARISON):
        path = folder / name
        if not path.exists():
            continue
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            return data if isinstance(data, dict) else {}
        except (OSError, ValueError):
            return {}
    if (folder / PLAN).exists():
        return {}
    return None


def require_free(folder: Path, same: Same) -> None:
    """Refuses a folder that holds another run.

    Raises:
        FormatError: naming the folder.
    """
    if folder.exists() and not folder.is_dir():
        raise FormatError(f"{folder}: is a file; expected a folder to write to")
    there = what_lies_in(folder)
    if there is not None and not same(there):
        raise FormatError(f"{folder}: holds another run; choose another --out, or add --overwrite")


def free_folder(wanted: Path, same: Same) -> Path:
    """`wanted`, or the first of wanted-2, wanted-3, ... that holds no other run."""
    candidate, count = wanted, 1
    while True:
        there = what_lies_in(candidate)
        if not (candidate.exists() and not candidate.is_dir()) and (there is None or same(there)):
            return candidate
        count += 1
        candidate = wanted.with_name(f"{wanted.name}-{count}")
