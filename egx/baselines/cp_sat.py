"""CP-SAT (Google OR-tools) as an alternative solver for the programs of `egx.baselines.milp`."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from egx.baselines.milp import LOGIC, SCALED_LATENCY, TIME, Program
from egx.errors import InternalError, MissingExtraError

LATENCY_TICKS = 2**40
_TICKS = LATENCY_TICKS / SCALED_LATENCY


def cp_model() -> Any:
    """OR-tools' module, an optional extra that takes a second to import.

    Raises:
        MissingExtraError: without OR-tools.
    """
    try:
        from ortools.sat.python import cp_model
    except ImportError as error:
        raise MissingExtraError("CP-SAT needs OR-tools: pip install 'egx[exact]'") from error
    return cp_model


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
    sat = cp_model()
    grain = _grains(program)
    model = sat.CpModel()
    columns = [
        model.new_int_var(math.floor(low * g), math.ceil(high * g), "")
        for low, high, g in zip(program.lower, program.upper, grain, strict=True)
    ]
    _add_rows(model, program, columns, grain)
    used = np.flatnonzero(program.objective).tolist()
    prices = [
        round(program.objective[c])
        if grain[c] == _TICKS
        else math.floor(program.objective[c] * _TICKS)
        for c in used
    ]
    model.minimize(_sum(columns, used, prices))
    for variable, value in zip(columns, program.lift(*plan) * grain, strict=True):
        model.add_hint(variable, round(value))

    solver = sat.CpSolver()
    solver.parameters.max_time_in_seconds = max(time_limit_s, 0.01)
    solver.parameters.relative_gap_limit = relative_gap
    status = solver.solve(model)
    if status == sat.INFEASIBLE:
        return None, np.inf
    if status == sat.MODEL_INVALID:
        raise InternalError(f"CP-SAT refuses the program: {model.validate()}")
    found = None
    if status in (sat.OPTIMAL, sat.FEASIBLE):
        chosen = np.zeros(len(columns))
        for choice in program.choice.values():
            for c in choice.tolist():
                chosen[c] = solver.value(columns[c])
        found = program.decode(chosen)
    bound = solver.best_objective_bound
    return found, program.seconds(math.floor(bound) / _TICKS) if np.isfinite(bound) else -np.inf


def _grains(program: Program) -> np.ndarray:
    """Integers per unit of each column: ticks for times, units for shares of a level, else 1."""
    grain = np.ones(len(program.objective))
    grain[program.start] = _TICKS
    grain[program.free] = _TICKS
    grain[[step.excess for step in program.steps if step.excess >= 0]] = _TICKS
    for level, column in program.residents.items():
        grain[column] = float(program.instance.capacity[level])
    return grain


def _add_rows(model: Any, program: Program, columns: list[Any], grain: np.ndarray) -> None:
    for r, kind in enumerate(program.row_kind.tolist()):
        span = slice(program.rows.indptr[r], program.rows.indptr[r + 1])
        indices, values = program.rows.indices[span].tolist(), program.rows.data[span].tolist()
        lower, upper = float(program.row_lower[r]), float(program.row_upper[r])
        if kind == LOGIC:
            weights = [round(v) for v in values]
            model.add(_sum(columns, indices, weights) == round(lower))
        elif kind == TIME:
            # A lower side; dearer terms stand on its left with a minus.
            weights = [
                round(v) if grain[c] == _TICKS else math.ceil(v * _TICKS)
                for c, v in zip(indices, values, strict=True)
            ]
            model.add(_sum(columns, indices, weights) >= math.floor(lower * _TICKS))
        else:  # a capacity, whose row was divided by it
            weights = [round(v * kind / grain[c]) for c, v in zip(indices, values, strict=True)]
            model.add(_sum(columns, indices, weights) <= round(upper * kind))


def _sum(columns: list[Any], indices: list[int], weights: list[int]) -> Any:
    return cp_model().LinearExpr.weighted_sum([columns[c] for c in indices], weights)
