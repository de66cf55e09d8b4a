"""What an exact solver answers, whatever the problem and the solver."""

from __future__ import annotations

import dataclasses
from typing import Literal

from egx.problems.base import Decisions

PROVED = 1e-6
"""Relative distance of cost and bound within which a plan counts as proved optimal."""

Status = Literal["proved", "feasible", "bound only"]


@dataclasses.dataclass(frozen=True, eq=False)
class ExactSolution:
    """A plan, its cost and a bound that no plan of the problem undercuts, in the cost's unit.

    `status` is "proved" when the two are within `PROVED` of each other, "feasible" when there is
    a plan that may not be the best, "bound only" when there is no plan. `cost` is the
    simulator's, in float32 arithmetic; `exact_cost` is the same in float64, which is what `bound`
    is about. `bound` is never above `cost`.
    """

    decisions: Decisions | None
    cost: float
    bound: float
    status: Status
    seconds: float
    exact_cost: float
    solver: str

    @property
    def gap(self) -> float:
        """How far the plan may be above the optimum, relative to the bound; inf without one."""
        if self.bound <= 0:
            return 0.0 if self.cost <= 0 else float("inf")
        return max(0.0, self.exact_cost / self.bound - 1.0)
