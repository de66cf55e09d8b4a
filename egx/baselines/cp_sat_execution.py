"""The truth beside a search on several devices: CP-SAT for small graphs.

What is proved. Every run of the simulator, with either order and any transfers, is a solution of
the programs in `egx.baselines.cp_sat_makespan` and `egx.baselines.cp_sat_peak`, and seconds are
rounded down to whole ticks: what CP-SAT proves is a bound on every plan that the problem decides,
in exact arithmetic. The plan that comes with it is valued again by `problem.evaluate`, and counts
as proved only when its own value reaches the bound: with blocking transfers, run-time order, or
several tensors of one op on a busy link, it may not.

With the objective `makespan`, memory enters the program as what is surely too much (weights of a
device, one op's own tensors). A plan that overflows otherwise is not used: what then remains is
the best plan known and the bound.
"""

from __future__ import annotations

import dataclasses
import time

import equinox as eqx
import jax.numpy as jnp
import numpy as np

from egx.baselines.cp_sat import cp_model
from egx.baselines.cp_sat_makespan import makespan_program
from egx.baselines.cp_sat_peak import peak_program
from egx.baselines.execution_case import to_decisions
from egx.baselines.solution import PROVED, ExactSolution
from egx.errors import InternalError, SearchError
from egx.problems.base import AbstractOutcome, Decisions, GivenDecisions, check_decisions
from egx.problems.execution import Execution
from egx.problems.execution_plans.plan import Plan, order_taken, replay
from egx.simulate.host_case import HostCase

CP_SAT = "cp-sat"


@dataclasses.dataclass(frozen=True, eq=False)
class _Known:
    """A feasible plan; `exact` is its cost in double precision, where that is known."""

    decisions: Decisions
    plan: Plan
    cost: float
    exact: float


def exact_execution(
    problem: Execution,
    *,
    time_limit_s: float = 60.0,
    start: GivenDecisions | None = None,
    relative_gap: float = PROVED,
) -> ExactSolution:
    """Solves a small execution problem, or goes as far as the time allows.

    The result is never worse than `start` or the problem's heuristics. Arguments as in
    `egx.baselines.exact.exact`.

    Raises:
        SearchError: for what is not modelled (fusion; transfer priorities with the objective
            `peak_memory`) or too large.
        MissingExtraError: without OR-tools.
        InternalError: when two results contradict each other.
    """
    began = time.perf_counter()
    cp_model()
    if "fusion" in problem.decide:
        raise SearchError("exact does not decide fusion")
    if problem.objective == "peak_memory" and "transfer_priority" in problem.decide:
        raise SearchError("exact does not decide transfer_priority for the objective peak_memory")
    case = problem.host_case()
    given = [dict(plan) for plan in problem.heuristics().values()]
    if start is not None:
        given.append(check_decisions(problem, start))
    known = [plan for plan in (_value(problem, case, d) for d in given) if plan is not None]
    best = min(known, key=lambda plan: plan.exact, default=None)
    bound = problem.lower_bound()

    program = (peak_program if problem.objective == "peak_memory" else makespan_program)(
        case,
        decide=problem.decide,
        transfers=problem.transfers,
        start=None if best is None else best.plan,
        known_cost=None if best is None else best.exact,
        bound=bound,
    )
    left = time_limit_s - (time.perf_counter() - began)
    if left > 0 and not (best is not None and _closed(best.exact, bound, relative_gap)):
        found, proven = program.solve(time_limit_s=left, relative_gap=relative_gap / 2)
        if found is not None:
            value = _value(problem, case, to_decisions(problem, case, found), found)
            if value is not None and (best is None or value.exact < best.exact):
                best = value
        bound = max(bound, proven)
    return _solution(best, bound, began)


def _value(
    problem: Execution, case: HostCase, decisions: Decisions, plan: Plan | None = None
) -> _Known | None:
    """A plan's value by the simulator; None if it is infeasible."""
    outcome = _evaluate(problem, decisions)
    if not bool(outcome.feasible):
        return None
    cost = exact = float(outcome.cost)
    n = case.num_ops
    if plan is None:
        device = np.asarray(decisions.get("device", jnp.zeros(n, jnp.int32)))[:n]
        priority = np.asarray(decisions.get("priority", jnp.zeros(n, jnp.float32)))[:n]
        plan = Plan(device.astype(np.int64), order_taken(case, priority))
    # What a transfer priority does to a given plan is left to the simulator.
    replays = problem.order == "static" and (
        "transfer_priority" not in problem.decide or plan.queue is not None
    )
    if problem.objective == "makespan" and replays:
        exact = replay(case, plan, transfers=problem.transfers)
        slack = (6 * n + 16) * 2.0**-23
        if abs(exact - cost) > slack * exact:
            raise InternalError(f"the simulator says {cost!r} s of a plan that takes {exact!r} s")
    return _Known(decisions, plan, cost, exact)


def _closed(cost: float, bound: float, gap: float) -> bool:
    return cost - bound <= gap * cost


def _solution(best: _Known | None, bound: float, began: float) -> ExactSolution:
    seconds = time.perf_counter() - began
    if best is None:
        none = float("inf")
        return ExactSolution(None, none, bound, "bound only", seconds, none, CP_SAT)
    if bound > best.exact * (1.0 + PROVED):
        raise InternalError(f"a plan of {best.exact!r} beats the proven bound of {bound!r}")
    return ExactSolution(
        decisions=best.decisions,
        cost=best.cost,
        bound=min(bound, best.exact, best.cost),
        status="proved" if _closed(best.exact, bound, PROVED) else "feasible",
        seconds=seconds,
        exact_cost=best.exact,
        solver=CP_SAT,
    )


# Compiled once for a padded shape, like everything that runs on the device.
@eqx.filter_jit
def _evaluate(problem: Execution, decisions: Decisions) -> AbstractOutcome:
    return problem.evaluate(decisions)
