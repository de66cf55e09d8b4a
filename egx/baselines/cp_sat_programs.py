"""What the constraint programs of execution problems share: placement, size limit, solving.

Shapes: N ops, D devices.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from egx.baselines.cp_sat import cp_model
from egx.errors import InternalError, SearchError
from egx.problems.execution_plans.plan import Plan
from egx.simulate.host_case import HostCase

MOST_LITERALS = 60_000


@dataclasses.dataclass(frozen=True, eq=False)
class CpProgram:
    """A model, what turns its objective into a bound on the cost, and its solution into a plan."""

    model: Any
    to_cost: Callable[[int], float]
    to_plan: Callable[[Any], Plan]

    def solve(self, *, time_limit_s: float, relative_gap: float) -> tuple[Plan | None, float]:
        """(a plan, if one was found; a cost that no plan of the program undercuts)."""
        sat = cp_model()
        solver = sat.CpSolver()
        solver.parameters.max_time_in_seconds = max(time_limit_s, 0.01)
        solver.parameters.relative_gap_limit = relative_gap
        status = solver.solve(self.model)
        if status == sat.MODEL_INVALID:
            raise InternalError(f"CP-SAT refuses the program: {self.model.validate()}")
        if status == sat.INFEASIBLE:
            return None, -math.inf
        found = self.to_plan(solver) if status in (sat.OPTIMAL, sat.FEASIBLE) else None
        bound = solver.best_objective_bound
        return found, self.to_cost(math.floor(bound)) if math.isfinite(bound) else -math.inf


class Placement:
    """Literals `here[op][d]`, with what is surely too much left out."""

    def __init__(self, model: Any, case: HostCase, *, decide: Sequence[str], limited: bool):
        devices = range(case.num_devices)
        self.here: list[list[Any]] = []
        needs = case.weight_units + case.input_units + case.output_units
        for op in range(case.num_ops):
            allowed = set(devices) if "device" in decide else {0}
            if limited:
                allowed = {d for d in allowed if needs[op] <= case.capacity_units[d]}
            if "device" in decide and is_symmetric(case):
                # Equal devices are named in the order in which ops need them.
                allowed = {d for d in allowed if d <= op}
            self.here.append([model.new_bool_var("") if d in allowed else 0 for d in devices])
            model.add_exactly_one(self.here[op])
        if limited:
            for d in devices:
                if case.weight_units.sum() > case.capacity_units[d]:
                    weights = [
                        int(w) * self.here[op][d] for op, w in enumerate(case.weight_units) if w
                    ]
                    model.add(sum(weights) <= int(case.capacity_units[d]))

    def device(self, solver: Any) -> np.ndarray:
        return np.asarray(
            [max(range(len(row)), key=lambda d: solver.value(row[d])) for row in self.here]
        )

    def hint(self, model: Any, plan: Plan) -> None:
        for op, row in enumerate(self.here):
            for d, literal in enumerate(row):
                if not isinstance(literal, int):
                    model.add_hint(literal, int(plan.device[op] == d))


def is_symmetric(case: HostCase) -> bool:
    """Whether devices differ in their names only."""
    off = ~np.eye(case.num_devices, dtype=bool)
    same = bool((case.seconds == case.seconds[:, :1]).all())
    same &= len(set(case.capacity_units.tolist())) == 1
    for links in (case.link_s_per_byte[off], case.link_latency_s[off]):
        same &= len(set(links.tolist())) <= 1
    return same


def check_size(what: str, literals: int) -> None:
    if literals > MOST_LITERALS:
        raise SearchError(
            f"the graph is too large for exact: {what} takes {literals} literals, "
            f"at most {MOST_LITERALS} are tried; lower_bound() has no such limit"
        )
