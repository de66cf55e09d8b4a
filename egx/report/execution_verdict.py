"""The plans of an Execution problem that are known after a search, and which of them to use."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Int

from egx.baselines.exact import ExactSolution
from egx.graph.graph import real_sizes
from egx.problems.execution import Execution
from egx.report.tables import Table, bound_name
from egx.report.units import format_bytes, format_percent, format_seconds, format_speedup
from egx.simulate.timeline import Timeline
from egx.training.result import Result

REFERENCE, FOUND, SOLVER = "reference", "found", "solver"
# A found plan this close to the best is the best: float32 rounds.
TIE = 1e-6


@dataclasses.dataclass(frozen=True)
class KnownExecution:
    """A plan by name with what the simulator says of it; `moved` counts its transfers."""

    name: str
    decisions: Mapping[str, Any]
    cost: float
    fits: bool
    makespan_s: float
    peak_bytes: Int[np.ndarray, " D"]
    moved: int


@dataclasses.dataclass(frozen=True)
class ExecutionVerdict:
    """All plans of one run, the best of those that fit (the found one whenever nothing beats it,
    or nothing fits), and the bound on all of them."""

    problem: Execution
    plans: tuple[KnownExecution, ...]
    best: KnownExecution
    bound: float | None
    bound_status: str | None

    def plan(self, name: str) -> KnownExecution:
        """The plan called `name`."""
        return next(plan for plan in self.plans if plan.name == name)

    def remark(self) -> str | None:
        """What the reader must know when the best plan is not the found one."""
        found, best = self.plan(FOUND), self.best
        if not best.fits:
            return "No plan fits the devices' memory; plan.json holds the one that misses least."
        if best.name == FOUND:
            return None
        if not found.fits:
            return f"The search found no plan that fits; plan.json holds that of {best.name}."
        worse = format_percent(found.cost / best.cost - 1) if best.cost > 0 else "far"
        return f"The found plan costs {worse} more than {best.name}; plan.json holds the latter."

    def table(self) -> Table:
        """Every plan with its cost, gain over the reference and distance from the bound."""
        by_time = self.problem.objective == "makespan"
        show = format_seconds if by_time else format_bytes
        known = self.bound is not None and self.bound > 0
        header = (
            "plan",
            "makespan" if by_time else "peak memory",
            "speed-up" if by_time else "smaller",
            *(("above bound",) if known else ()),
            "peak memory" if by_time else "makespan",
            "transfers",
        )
        reference = self.plan(REFERENCE)
        rows = []
        for plan in self.plans:
            peak = format_bytes(int(plan.peak_bytes.max()))
            row = [plan.name, format_seconds(plan.makespan_s) if by_time else peak]
            gain = format_speedup(reference.cost, plan.cost) if reference.fits else ""
            row.append(gain if plan.fits else "does not fit")
            if known:
                assert self.bound is not None
                above = format_percent(max(plan.cost / self.bound - 1, 0.0))
                row.append(above if plan.fits else "")
            row.append(peak if by_time else format_seconds(plan.makespan_s))
            rows.append((*row, f"{plan.moved:,}"))
        strong = self.plans.index(self.best)
        if known:
            assert self.bound is not None
            gain = format_speedup(reference.cost, self.bound) if reference.fits else ""
            rows.append((bound_name(self.bound_status), show(self.bound), gain, "", "", ""))
        return Table(header, tuple(rows), strong=strong)


def judge_execution(
    problem: Execution, result: Result, solution: ExactSolution | None = None
) -> ExecutionVerdict:
    """Gathers what is known: the reference, the problem's heuristics, the result and, where it
    ran and found a better one, the solver's plan."""
    given = {**problem.heuristics(), REFERENCE: problem.reference}
    names = [REFERENCE, *(name for name in given if name != REFERENCE)]
    plans = [_known(problem, name, given[name]) for name in names]
    plans.append(_known(problem, FOUND, result.decisions))
    if solution is not None and solution.decisions is not None:
        plan = _known(problem, SOLVER, solution.decisions)
        if plan.fits and (not plans[-1].fits or plan.cost < plans[-1].cost * (1 - TIE)):
            plans.append(plan)
    fitting = [plan for plan in plans if plan.fits] or plans
    least = min(plan.cost for plan in fitting)
    tied = [plan for plan in fitting if plan.cost <= least * (1 + TIE)]
    best = max(tied, key=lambda plan: plan.name == FOUND)
    return ExecutionVerdict(problem, tuple(plans), best, result.bound, result.bound_status)


def fitting_costs(problem: Execution) -> dict[str, float]:
    """The costs of the reference and the problem's heuristics, of those that fit."""
    known = {REFERENCE: problem.reference, **problem.heuristics()}
    outcomes = {name: problem.evaluate(plan) for name, plan in known.items()}
    return {name: float(one.cost) for name, one in outcomes.items() if bool(one.feasible)}


def _known(problem: Execution, name: str, decisions: Mapping[str, Any]) -> KnownExecution:
    outcome = problem.evaluate(decisions)
    return KnownExecution(
        name=name,
        decisions=decisions,
        cost=float(outcome.cost),
        fits=bool(outcome.feasible),
        makespan_s=float(outcome.makespan_s),
        peak_bytes=outcome.peak_bytes,
        moved=_transfers(problem, decisions),
    )


def _transfers(problem: Execution, decisions: Mapping[str, Any]) -> int:
    """How many (tensor, device) pairs are sent; inside of fused ops nothing is."""
    graph = problem.graph
    ops, _, uses = real_sizes(graph)
    if "device" not in decisions or not uses:
        return 0
    device = np.asarray(decisions["device"])[:ops]
    if "fusion" in decisions:
        return int(problem.timeline(decisions).is_transfer.sum())
    tensor = np.asarray(graph.use_tensor)[:uses]
    source = device[np.asarray(graph.tensor_producer)[tensor]]
    target = device[np.asarray(graph.use_consumer)[:uses]]
    crossing = source != target
    return len(np.unique(np.stack([tensor[crossing], target[crossing]], 1), axis=0))


def device_table(problem: Execution, line: Timeline) -> Table:
    """What each device does in one plan: ops, busy time, memory along items and over time."""
    hardware = problem.hardware
    capacity = np.asarray(hardware.level_bytes, np.float64)[:, 0]
    size = np.asarray(problem.graph.tensor_units, np.int64) * int(problem.graph.unit_bytes)
    seconds = line.finish_s - line.start_s
    rows = []
    for d, name in enumerate(hardware.device_names):
        own = ~line.is_transfer & (line.device == d)
        sent = line.is_transfer & (line.source == d)
        busy = float(seconds[own].sum()) / line.makespan_s if line.makespan_s > 0 else math.nan
        rows.append(
            (
                name,
                f"{int(own.sum()):,}",
                format_percent(busy, 0),
                format_bytes(int(line.weight_bytes[d])),
                format_bytes(int(line.peak_bytes[d])),
                format_bytes(int(line.peak_bytes_over_time[d])),
                format_bytes(float(capacity[d])),
                format_bytes(int(size[line.tensor[sent]].sum())) if sent.any() else "-",
            )
        )
    header = ("device", "ops", "busy", "weights", "peak", "over time", "holds", "sent")
    note = "peaks with weights, along the order of items (what counts) and over time"
    return Table(header, tuple(rows), note=note)
