"""The plans that are known after a search, and which of them to use."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from egx.baselines.exact import ExactSolution
from egx.problems.memory_placement import MemoryPlacement
from egx.report.placement import first_fit
from egx.report.tables import Table, latency_table
from egx.report.units import format_percent
from egx.training.result import Result

NATIVE, FIRST_FIT, FOUND, SOLVER = "native", "first fit", "found", "solver"

OWNER = {
    NATIVE: "the native plan",
    FIRST_FIT: "the first-fit plan",
    SOLVER: "the solver's plan",
}

# A found plan this close to the best is the best: the solver proves no finer, and float32 rounds.
TIE = 1e-6


@dataclasses.dataclass(frozen=True)
class KnownPlan:
    """A plan by name; `latency_s` is the simulator's (of the rectified map if it does not fit)."""

    name: str
    decisions: Mapping[str, Any]
    latency_s: float
    fits: bool


@dataclasses.dataclass(frozen=True)
class Verdict:
    """All plans of one run, the best that fits, and the bound on all of them.

    `best` is the found one whenever nothing beats it; native and first fit are plans too, and so
    is what an exact solver finds on the way to its bound.
    """

    plans: tuple[KnownPlan, ...]
    best: KnownPlan
    bound_s: float | None
    bound_status: str | None

    def plan(self, name: str) -> KnownPlan:
        """The plan called `name`."""
        return next(plan for plan in self.plans if plan.name == name)

    @property
    def shown(self) -> KnownPlan:
        """What pictures set against native: the best, or, if that is native, what was found."""
        found = self.plan(FOUND)
        return found if self.best.name == NATIVE and found.fits else self.best

    def remark(self) -> str | None:
        """What the reader must know when the best plan is not the found one."""
        found, best = self.plan(FOUND), self.best
        if best.name == FOUND:
            return None
        written = f"plan.json holds {OWNER[best.name]}."
        if not found.fits:
            return f"The search found no plan that fits; {written}"
        text = f"The found plan is {format_percent(found.latency_s / best.latency_s - 1)} slower"
        text += f" than {OWNER[best.name]}"
        if best.name != NATIVE and found.latency_s > self.plan(NATIVE).latency_s:
            text += ", and slower than the native plan"
        return f"{text}; {written}"

    def table(self, *, title: str = "", note: str = "") -> Table:
        """Latency, speed-up and distance from the bound of every plan."""
        return latency_table(
            [(plan.name, plan.latency_s, plan.fits) for plan in self.plans],
            reference_s=self.plan(NATIVE).latency_s,
            bound_s=self.bound_s,
            bound_status=self.bound_status,
            best=self.best.name,
            title=title,
            note=note,
        )


def judge(
    problem: MemoryPlacement, result: Result, solution: ExactSolution | None = None
) -> Verdict:
    """Gathers what is known: native, first fit, the result and, where it ran, the solver's plan.

    A bound is the solver's; without one, the result's own.
    """
    plans = [
        KnownPlan(NATIVE, problem.reference, float(problem.reference_cost), True),
        KnownPlan(FIRST_FIT, *first_fit(problem), True),
        KnownPlan(FOUND, result.decisions, result.cost, result.feasible),
    ]
    bound, status = result.bound, result.bound_status
    if solution is not None:
        bound, status = solution.bound, solution.status
        # A solver's plan is of interest only where it is better.
        beaten = not result.feasible or solution.cost < result.cost * (1 - TIE)
        if solution.decisions is not None and beaten:
            plans.append(KnownPlan(SOLVER, solution.decisions, solution.cost, True))
    fitting = [plan for plan in plans if plan.fits]
    least = min(plan.latency_s for plan in fitting) * (1 + TIE)
    order = (FOUND, FIRST_FIT, NATIVE, SOLVER)
    tied = [plan for plan in fitting if plan.latency_s <= least]
    best = min(tied, key=lambda plan: order.index(plan.name))
    return Verdict(tuple(plans), best, bound, status)
