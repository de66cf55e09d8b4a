"""The folder of a run on an Execution problem: result, plan, trace, report and pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from egx.files import write_whole
from egx.problems.execution import Execution
from egx.report.curves import Curve, convergence
from egx.report.execution_plan import make_execution_plan
from egx.report.execution_plan_file import write_execution_plan
from egx.report.execution_verdict import FOUND, REFERENCE, ExecutionVerdict, device_table
from egx.report.folder import PLAN, REPORT, RESULT, report_text
from egx.report.gantt import gantt
from egx.report.trace import write_trace
from egx.report.units import byte_unit, second_unit
from egx.training.result import Result

TRACE = "trace.json"

CAPTIONS = {
    "gantt": "What each device does when, over the memory that is live.",
    "convergence": "The best plan so far against the evaluations used.",
}


def write_execution_folder(
    folder: Path,
    result: Result,
    verdict: ExecutionVerdict,
    *,
    title: str,
    source: str | None = None,
    options: Mapping[str, Any] | None = None,
    pictures: str = "png",
) -> list[str]:
    """Writes everything about one run and returns the names of the files.

    Args:
        folder: made if it is missing; files of the same names are replaced.
        result: the run, bound included.
        verdict: what is known after it; its best plan is the one that is written.
        title: of report and pictures.
        source: what was given to `egx.load`, and
        options: the options that it was given with.
        pictures: "png", "svg" or "none".
    """
    folder.mkdir(parents=True, exist_ok=True)
    problem, best = verdict.problem, verdict.best
    result.save(folder / RESULT)
    plan = make_execution_plan(
        problem, best.decisions, name=best.name, result=result, source=source, options=options
    )
    write_execution_plan(plan, folder / PLAN)
    line = problem.timeline(best.decisions)
    write_trace(problem, line, folder / TRACE)
    drawn = {}
    if pictures != "none":
        drawn["gantt"] = f"gantt.{pictures}"
        chart = gantt(problem, best.decisions, timeline=line, title=f"{title}: {best.name}")
        chart.savefig(folder / drawn["gantt"])
        if len(result.history):
            drawn["convergence"] = f"convergence.{pictures}"
            _convergence(result, verdict, title).savefig(folder / drawn["convergence"])
    details = device_table(problem, line)
    text = report_text(title, result, verdict, details, drawn, CAPTIONS)
    write_whole(folder / REPORT, text)
    return [PLAN, RESULT, REPORT, TRACE, *drawn.values()]


def _convergence(result: Result, verdict: ExecutionVerdict, title: str) -> Figure:
    history, fits = result.history, result.history.best_feasible
    curve = (history.evaluations[fits], history.best_cost[fits])
    lines = {plan.name: plan.cost for plan in verdict.plans if plan.fits and plan.name != FOUND}
    curves = {result.algorithm: [curve]}
    known = verdict.bound, verdict.bound_status
    return execution_convergence(verdict.problem, curves, lines, *known, title=title)


def execution_convergence(
    problem: Execution,
    curves: Mapping[str, Sequence[Curve]],
    lines: Mapping[str, float],
    bound: float | None,
    bound_status: str | None,
    *,
    title: str,
) -> Figure:
    """Costs against evaluations beside those of known plans, in the units of the objective."""
    if bound is not None:
        lines = {**lines, "optimum" if bound_status == "proved" else "bound": bound}
    by_time = problem.objective == "makespan"
    return convergence(
        curves,
        lines,
        title=title,
        quantity="makespan" if by_time else "peak memory",
        unit_of=second_unit if by_time else byte_unit,
        reference=REFERENCE,
    )
