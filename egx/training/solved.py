"""Exact solutions as results, and bounds beside the results of searches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from egx.baselines.exact import ExactSolution, exact
from egx.errors import SearchError
from egx.problems.base import AbstractProblem
from egx.training.identity import provenance
from egx.training.result import BoundStatus, History, Result

EXACT = "exact"
OPTIONS = ("solver", "relative_gap", "start")
SECONDS = 60.0


def solve(
    problem: AbstractProblem,
    *,
    budget: int,
    seed: int,
    time_limit_s: float | None,
    options: Mapping[str, Any] | None,
) -> Result:
    """`egx.exact` as one more algorithm; it counts no evaluations."""
    for option in options or {}:
        if option not in OPTIONS:
            raise SearchError(f"exact has no option {option!r} (it takes {', '.join(OPTIONS)})")
    limit = SECONDS if time_limit_s is None else time_limit_s
    solution = exact(problem, time_limit_s=limit, **dict(options or {}))
    return solution_result(problem, solution, budget=budget, seed=seed)


def solution_result(
    problem: AbstractProblem, solution: ExactSolution, *, budget: int = 0, seed: int = 0
) -> Result:
    """An exact solution as a result; without a plan, the reference stands in."""
    decisions = problem.reference if solution.decisions is None else solution.decisions
    outcome = problem.evaluate(decisions)
    return Result(
        decisions={name: np.asarray(value) for name, value in decisions.items()},
        cost=float(outcome.cost),
        feasible=bool(outcome.feasible),
        found_at=0,
        reference={name: np.asarray(value) for name, value in problem.reference.items()},
        reference_cost=float(problem.reference_cost),
        bound=solution.bound,
        bound_status=solution.status,
        algorithm=EXACT,
        config={"algorithm": EXACT, "solver": solution.solver},
        budget=budget,
        evaluations=0,
        failed_measurements=0,
        seed=seed,
        seconds=solution.seconds,
        compile_seconds=0.0,
        history=History(
            evaluations=np.zeros(0, np.int64),
            best_cost=np.zeros(0, np.float32),
            best_feasible=np.zeros(0, bool),
        ),
        interrupted=None,
        provenance=provenance(problem),
    )


def beside_cheap_bound(problem: AbstractProblem, results: Sequence[Result]) -> list[Result]:
    """Results beside a bound that costs nothing, where the problem has one and none is there."""
    bound = problem.lower_bound()
    if bound is None:
        return list(results)

    def status(result: Result) -> BoundStatus:
        return "proved" if result.feasible and result.cost <= bound else "bound only"

    return [r if r.bound is not None else r.with_bound(bound, status(r)) for r in results]
