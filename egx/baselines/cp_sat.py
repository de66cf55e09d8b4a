"""CP-SAT (Google OR-tools) as an alternative solver for the programs of `egx.baselines.milp`."""

from __future__ import annotations

import math

import numpy as np

from egx.baselines.milp import SCALED_LATENCY, Program
from egx.errors import InternalError, MissingExtraError

try:
    from ortools.sat.python import cp_model
except ImportError:  # an optional extra
    cp_model = None

LATENCY_TICKS = 2**40


def solve_cp_sat(
    program: Program,
    plan: tuple[np.ndarray, np.ndarray],
    *,
    time_limit_s: float,
    relative_gap: float,
) -> tuple[tuple[np.ndarray, np.ndarray] | None, float]:
    """A plan, if one was found, and a bound in seconds on all plans of `program`.

    Times become whole ticks, `LATENCY_TICKS` to the scaled latency, each rounded so that no plan
    gets dearer; sizes are exact. What CP-SAT proves in integers therefore holds for the program.
    `plan` is a hint and need not be a solution of `program`.
    """
    if cp_model is None:
        raise MissingExtraError("CP-SAT needs OR-tools: pip install 'egx[exact]'")
    ticks = LATENCY_TICKS / SCALED_LATENCY
    model = cp_model.CpModel()
    timed = np.zeros(len(program.objective), bool)
    timed[program.start] = True
    timed[program.free] = True
    timed[[s.excess for s in program.steps if s.excess >= 0]] = True
    columns = []
    for index, (low, high) in enumerate(zip(program.lower, program.upper, strict=True)):
        if timed[index]:
            columns.append(model.new_int_var(0, math.ceil(high * ticks), ""))
        else:
            columns.append(model.new_int_var(round(low), round(high), ""))

    rows = program.rows.tocsr()
    for r, kind in enumerate(program.row_kind):
        span = slice(rows.indptr[r], rows.indptr[r + 1])
        indices, values = rows.indices[span].tolist(), rows.data[span]
        lower, upper = program.row_lower[r], program.row_upper[r]
        if kind > 0:  # a capacity: back to units
            weights = [round(v * kind) for v in values]
            model.add(_linear(columns, indices, weights) <= int(kind))
        elif kind == 0:  # logic among binaries
            weights = [round(v) for v in values]
            model.add(_linear(columns, indices, weights) == round(lower))
        else:  # time, always a lower side
            if np.isfinite(upper):
                raise InternalError("a row of times has an upper side")
            weights = [
                round(v) if timed[c] else math.ceil(v * ticks)
                for c, v in zip(indices, values, strict=True)
            ]
            model.add(_linear(columns, indices, weights) >= math.floor(lower * ticks))

    indices = np.flatnonzero(program.objective).tolist()
    weights = [
        round(program.objective[c]) if timed[c] else math.floor(program.objective[c] * ticks)
        for c in indices
    ]
    model.minimize(_linear(columns, indices, weights))
    lifted = program.lift(*plan)
    for index, variable in enumerate(columns):
        scale = ticks if timed[index] else 1.0
        model.add_hint(variable, round(lifted[index] * scale))

    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = max(time_limit_s, 0.01)
    solver.parameters.relative_gap_limit = relative_gap
    status = solver.solve(model)
    if status == cp_model.INFEASIBLE:
        return None, np.inf
    if status == cp_model.MODEL_INVALID:
        raise InternalError(f"CP-SAT refuses the program: {model.validate()}")
    found = None
    if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        chosen = np.zeros(len(columns))
        for indices_ in program.choice.values():
            for c in indices_.tolist():
                chosen[c] = solver.value(columns[c])
        found = program.decode(chosen)
    bound = solver.best_objective_bound
    # The objective may be empty, and its bound is a whole number of ticks or slightly off it.
    seconds = program.seconds(math.floor(bound) / ticks) if np.isfinite(bound) else -np.inf
    return found, seconds


def _linear(columns, indices, weights):
    return cp_model.LinearExpr.weighted_sum([columns[c] for c in indices], weights)
