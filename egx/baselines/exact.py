"""The truth beside a search: an exact solver with a bound it can answer for.

Execution goes to `egx.baselines.cp_sat_execution`. What follows is about memory placement. The
program of `egx.baselines.milp` goes to HiGHS (through SciPy) or to CP-SAT. What comes back is
valued again: plans by the simulator, bounds against every plan known.

How the bound is kept safe. The relaxation's bound is computed from dual multipliers alone
(`egx.baselines.bounds`), and CP-SAT solves a program whose times are rounded so that no plan gets
dearer, in exact integers. HiGHS branches in floating point with tolerances of 1e-7 and 1e-6 on
rows and columns of order one, against latencies scaled to 1000: its bound is lowered by
`SOLVER_MARGIN`. A claimed bound above the latency of a plan at hand is an `InternalError`.
"""

from __future__ import annotations

import dataclasses
import time

import equinox as eqx
import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp

from egx.baselines.bounds import LinearBound, combinatorial_bound, solve_relaxation
from egx.baselines.cp_sat import cp_model, solve_cp_sat
from egx.baselines.cp_sat_execution import CP_SAT, exact_execution
from egx.baselines.instance import (
    Instance,
    fits,
    latency,
    memory_instance,
    to_decisions,
    to_levels,
)
from egx.baselines.milp import SCALED_LATENCY, Program, build_program
from egx.baselines.solution import PROVED, ExactSolution
from egx.errors import InternalError, SearchError
from egx.problems.base import (
    AbstractOutcome,
    AbstractProblem,
    Decisions,
    GivenDecisions,
    check_decisions,
)
from egx.problems.execution import Execution
from egx.problems.memory_placement import MemoryPlacement

SOLVER_MARGIN = 2.5e-7
"""What a bound from HiGHS's branch and bound is lowered by, relative to the latency."""

RESCALE = 0.75

SOLVERS = ("highs", CP_SAT)

Levels = tuple[np.ndarray, np.ndarray]


def float32_slack(problem: AbstractProblem) -> float:
    """Relative error that the simulator's float32 sums may have: a few ulps an op."""
    return (problem.graph.num_ops + 8) * 2.0**-23


def check_bound(problem: AbstractProblem, cost: float, bound: float) -> None:
    """Raises InternalError when a feasible plan's simulated cost contradicts a proven bound."""
    if cost < bound * (1.0 - float32_slack(problem)):
        raise InternalError(
            f"a plan of {cost!r} s beats the proven bound of {bound!r} s: one of them is wrong"
        )


def exact(
    problem: AbstractProblem,
    *,
    time_limit_s: float = 60.0,
    solver: str | None = None,
    start: GivenDecisions | None = None,
    relative_gap: float = PROVED,
) -> ExactSolution:
    """Solves a problem to proven optimality, or as far as the time allows.

    Args:
        problem: a concrete `MemoryPlacement` (of any prefetch depth) or `Execution` (small graphs;
            see `egx.baselines.cp_sat_execution` for what is proved), padded or not.
        time_limit_s: seconds, setting up included; HiGHS cannot be interrupted before.
        solver: "highs" (memory placement's default), or "cp-sat" (OR-tools;
            `pip install 'egx[exact]'`; the only one for execution).
        start: decisions to begin from, rectified when they are not valid. The result is never
            worse than these or the problem's heuristics.
        relative_gap: the solver stops at this relative gap; at most `PROVED` counts as proved.

    Raises:
        SearchError: for another problem, one that is too large, an unknown solver, or a limit or
            gap out of range.
        MissingExtraError: for "cp-sat" without OR-tools.
        InternalError: when two results contradict each other.
    """
    began = time.perf_counter()
    if solver is None:
        solver = CP_SAT if isinstance(problem, Execution) else SOLVERS[0]
    if solver not in SOLVERS:
        raise SearchError(f"unknown solver {solver!r}; known are {', '.join(SOLVERS)}")
    if not time_limit_s >= 0:
        raise SearchError(f"time_limit_s must be 0 or more, got {time_limit_s!r}")
    if not 0 <= relative_gap < 1:
        raise SearchError(f"relative_gap must be in [0, 1), got {relative_gap!r}")
    if isinstance(problem, Execution):
        if solver != CP_SAT:
            raise SearchError(f"Execution is solved by {CP_SAT!r} only, not by {solver!r}")
        return exact_execution(
            problem, time_limit_s=time_limit_s, start=start, relative_gap=relative_gap
        )
    if solver == CP_SAT:
        cp_model()
    instance = memory_instance(problem)
    assert isinstance(problem, MemoryPlacement)

    def left() -> float:
        return time_limit_s - (time.perf_counter() - began)

    plans = [dict(problem.reference), _first_fit(problem)]
    if start is not None:
        plans.append(_rectify(problem, check_decisions(problem, start)))
    best = min((to_levels(instance, plan) for plan in plans), key=lambda p: latency(instance, *p))
    bound = combinatorial_bound(instance)
    stop = max(relative_gap, PROVED)
    while left() > 0 and not _closed(instance, best, bound, stop):
        known = latency(instance, *best)
        program = build_program(instance, scale_s=known / SCALED_LATENCY)
        _check_program(program, best)
        best, proven = _solve(problem, program, best, bound, solver, stop, left)
        bound = max(bound, proven)
        # The solver's tolerances were relative to the plan known before: after a large step they
        # are too coarse to prove the new one.
        if latency(instance, *best) > RESCALE * known:
            break
    return _solution(problem, instance, best, bound, solver, began)


def _solve(problem, program, best, bound, solver, stop, left) -> tuple[Levels, float]:
    """The best plan and bound after the relaxation and the solver."""
    instance = program.instance
    relaxed = solve_relaxation(program, time_limit_s=left())
    bound = max(bound, program.seconds(relaxed.value))
    if relaxed.columns is not None:
        best = _better(problem, instance, best, program.decode(relaxed.columns))
    if _closed(instance, best, bound, stop) or left() <= 0:
        return best, bound
    # Plans that are not better than the best by more than this are cut off.
    cutoff_s = latency(instance, *best) * (1.0 - stop / 4)
    reduced = restrict(program, relaxed, cutoff_s)
    if solver == CP_SAT:
        found, proven_s = solve_cp_sat(reduced, best, time_limit_s=left(), relative_gap=stop / 4)
    else:
        found, proven_s = _solve_highs(reduced, time_limit_s=left(), relative_gap=stop / 4)
    if found is not None:
        best = _better(problem, instance, best, found)
    return best, max(bound, min(cutoff_s, proven_s))


def restrict(program: Program, relaxed: LinearBound, cutoff_s: float) -> Program:
    """The program without choices that no plan better than `cutoff_s` makes.

    A binary whose reduced cost exceeds the distance from the relaxation's bound to the cutoff
    stays where it is. (A row or a bound that states the cutoff itself made HiGHS slower.)
    """
    cutoff = program.scaled(cutoff_s)
    slack = 1e-9 * (1.0 + abs(cutoff))
    dear = program.integral & (relaxed.value + np.abs(relaxed.reduced) > cutoff + slack)
    lower, upper = program.lower.copy(), program.upper.copy()
    out = dear & (relaxed.reduced > 0)
    upper[out] = lower[out]
    into = dear & (relaxed.reduced < 0)
    lower[into] = upper[into]
    return dataclasses.replace(program, lower=lower, upper=upper)


def _solve_highs(
    program: Program, *, time_limit_s: float, relative_gap: float
) -> tuple[Levels | None, float]:
    """A plan, if one was found, and a bound in seconds on all plans of `program`."""
    result = milp(
        program.objective,
        integrality=program.integral.astype(int),
        bounds=Bounds(program.lower, program.upper),
        constraints=LinearConstraint(program.rows, program.row_lower, program.row_upper),
        options={"time_limit": max(time_limit_s, 0.01), "mip_rel_gap": relative_gap},
    )
    if result.status == 2:  # infeasible: nothing below the cutoff
        return None, np.inf
    found = None if result.x is None else program.decode(result.x)
    proven = result.mip_dual_bound
    if proven is None or not np.isfinite(proven):
        return found, -np.inf
    seconds = program.seconds(float(proven))
    return found, seconds - SOLVER_MARGIN * max(abs(seconds), SCALED_LATENCY * program.scale_s)


def _check_program(program: Program, plan: Levels) -> None:
    """Raises InternalError unless the program holds the plan, at its latency."""
    columns = program.lift(*plan)
    rows = program.rows @ columns
    excess = np.maximum(program.row_lower - rows, rows - program.row_upper)
    beyond = np.maximum(program.lower - columns, columns - program.upper)
    value = program.seconds(float(program.objective @ columns))
    expected = latency(program.instance, *plan)
    size = max(SCALED_LATENCY, float(np.max(np.abs(columns), initial=0.0)))
    if np.max([excess.max(initial=0.0), beyond.max(initial=0.0)]) > 1e-9 * size:
        raise InternalError("the mixed-integer program excludes a valid plan")
    if abs(value - expected) > 1e-9 * expected:
        raise InternalError(
            f"the mixed-integer program values a plan at {value!r} s, semantics at {expected!r} s"
        )


def _better(problem: MemoryPlacement, instance: Instance, best: Levels, found: Levels) -> Levels:
    """The better of two plans; a found one that a tolerance let overflow is rectified first."""
    if not fits(instance, *found):
        found = to_levels(instance, _rectify(problem, to_decisions(problem, *found)))
    return found if latency(instance, *found) < latency(instance, *best) else best


def _closed(instance: Instance, plan: Levels, bound: float, gap: float) -> bool:
    cost = latency(instance, *plan)
    return cost - bound <= gap * cost


def _solution(
    problem: MemoryPlacement,
    instance: Instance,
    plan: Levels,
    bound: float,
    solver: str,
    began: float,
) -> ExactSolution:
    decisions = to_decisions(problem, *plan)
    outcome = _evaluate(problem, decisions)
    exact_s, cost = latency(instance, *plan), float(outcome.cost)
    if not bool(outcome.feasible) or abs(cost - exact_s) > float32_slack(problem) * exact_s:
        raise InternalError(
            f"the simulator says {cost!r} s (feasible: {bool(outcome.feasible)}) of a plan that "
            f"takes {exact_s!r} s"
        )
    if bound > exact_s * (1.0 + 1e-9):
        raise InternalError(f"a plan of {exact_s!r} s beats the proven bound of {bound!r} s")
    return ExactSolution(
        decisions=decisions,
        cost=cost,
        bound=min(bound, exact_s, cost),
        status="proved" if _closed(instance, plan, bound, PROVED) else "feasible",
        seconds=time.perf_counter() - began,
        exact_cost=exact_s,
        solver=solver,
    )


# Compiled once for a padded shape, like everything that runs on the device.
@eqx.filter_jit
def _evaluate(problem: MemoryPlacement, decisions: Decisions) -> AbstractOutcome:
    return problem.evaluate(decisions)


@eqx.filter_jit
def _rectify(problem: MemoryPlacement, decisions: Decisions) -> Decisions:
    return problem.rectify(decisions)


@eqx.filter_jit
def _first_fit(problem: MemoryPlacement) -> Decisions:
    return problem.first_fit()
