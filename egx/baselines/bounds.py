"""Cheap lower bounds on the latency of every valid map.

`combinatorial_bound` prices each op at its best, `lp_bound` solves the linear relaxation of
`egx.baselines.milp`. A bound from linear programming is computed from the dual multipliers alone,
after A. Neumaier and O. Shcherbina, "Safe bounds in linear and mixed-integer linear programming",
Mathematical Programming 99, 2004: any multipliers give a valid bound, so that no tolerance of the
solver enters it; what rounding in the bound's own sums may add is subtracted.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from scipy.optimize import linprog

from egx.baselines.instance import Instance, memory_instance
from egx.baselines.milp import SCALED_LATENCY, Program, build_program
from egx.errors import InternalError
from egx.problems.base import AbstractProblem

ROUNDING = 2.0**-50


@dataclasses.dataclass(frozen=True, eq=False)
class LinearBound:
    """A valid lower bound of a program's objective, scaled, and what gave it.

    `reduced` [columns] are reduced costs: a binary at 0 (1) with a positive (negative) one costs
    at least that much more than `value` when it leaves its place. `columns` is the relaxed
    solution, or None when the solver stopped early.
    """

    value: float
    reduced: np.ndarray
    columns: np.ndarray | None


def combinatorial_bound(instance: Instance) -> float:
    """Seconds below every map: all ops compute-bound or on their best levels, no capacity."""
    read, write = instance.read_s.min(), instance.write_s.min()
    traffic = instance.output_units * write
    traffic = traffic + read * np.array([float(sum(r.values())) for r in instance.reads])
    load = instance.weight_units * read
    if instance.prefetch == 0:
        traffic = traffic + load
    bodies = np.maximum(instance.compute_s, traffic) + instance.launch_s
    return float(np.sum(bodies)) * (1.0 - ROUNDING * 8 * len(bodies))


def dual_bound(program: Program, multipliers: np.ndarray) -> tuple[float, np.ndarray]:
    """The bound that row `multipliers` prove, and the reduced costs; valid for any multipliers.

    A positive multiplier prices a row's lower side, a negative one its upper side.
    """
    y = np.where(np.isfinite(multipliers), multipliers, 0.0)
    y = np.where((y > 0) & np.isinf(program.row_lower), 0.0, y)
    y = np.where((y < 0) & np.isinf(program.row_upper), 0.0, y)
    side = np.where(y > 0, program.row_lower, program.row_upper)
    row_part = y * np.where(y == 0, 0.0, np.where(np.isinf(side), 0.0, side))
    reduced = program.objective - program.rows.T @ y
    column_part = np.minimum(reduced * program.lower, reduced * program.upper)
    # |error| of a sum of n products is below n 2^-53 times the sum of their absolute values.
    weight = np.abs(program.objective) + abs(program.rows).T @ np.abs(y)
    size = np.sum(np.abs(row_part)) + np.sum(weight * np.maximum(program.upper, 0.0))
    terms = len(y) + len(reduced)
    value = float(np.sum(row_part) + np.sum(column_part)) - float(size) * terms * 2.0**-52
    return value, reduced


def solve_relaxation(program: Program, *, time_limit_s: float = 60.0) -> LinearBound:
    """Solves the linear relaxation by HiGHS; a run cut short gives a weaker bound, never a wrong
    one.

    Raises:
        InternalError: when the relaxation has no solution, since everything fits on level 0.
    """
    equal = program.row_lower == program.row_upper
    above = ~equal & np.isfinite(program.row_lower)
    below = ~equal & np.isfinite(program.row_upper)
    signed = [(above, -1.0, program.row_lower), (below, 1.0, program.row_upper)]
    parts = [(np.flatnonzero(mask), sign, side) for mask, sign, side in signed]
    order = np.concatenate([index for index, _, _ in parts])
    signs = np.concatenate([np.full(len(index), sign) for index, sign, _ in parts])
    limits = np.concatenate([sign * side[index] for index, sign, side in parts])
    inequality = program.rows[order].multiply(signs[:, None]).tocsr()
    result = linprog(
        program.objective,
        A_ub=inequality if len(order) else None,
        b_ub=limits if len(order) else None,
        A_eq=program.rows[equal] if equal.any() else None,
        b_eq=program.row_lower[equal] if equal.any() else None,
        bounds=np.stack([program.lower, program.upper], axis=1),
        method="highs",
        options={"time_limit": max(time_limit_s, 0.01)},
    )
    if result.status in (2, 3):
        raise InternalError(f"the relaxation of a memory placement failed: {result.message}")
    multipliers = np.zeros(len(program.row_lower))
    if result.x is not None and result.get("ineqlin") is not None:
        # SciPy's marginals are derivatives of the objective by each right-hand side.
        np.add.at(multipliers, order, signs * np.asarray(result.ineqlin.marginals, float))
        multipliers[equal] = np.asarray(result.eqlin.marginals, float)
    value, reduced = dual_bound(program, multipliers)
    return LinearBound(value, reduced, result.x if result.status == 0 else None)


def lp_bound(problem: AbstractProblem, *, time_limit_s: float = 60.0) -> float:
    """Seconds below the latency of every valid map of `problem`, by its linear relaxation."""
    instance = memory_instance(problem)
    cheap = combinatorial_bound(instance)
    if float(problem.reference_cost) <= 0:
        return cheap
    program = build_program(instance, scale_s=float(problem.reference_cost) / SCALED_LATENCY)
    relaxed = solve_relaxation(program, time_limit_s=time_limit_s)
    return max(program.seconds(relaxed.value), cheap)
