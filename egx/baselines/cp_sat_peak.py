"""The least peak memory of an execution problem as a constraint program for CP-SAT.

Memory counts along the order of ops, each followed by its transfers (semantics 4.2), so that the
program knows positions instead of times.

Shapes: N ops, T tensors, D devices; K positions, as many as ops.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from egx.baselines.cp_sat import cp_model
from egx.baselines.cp_sat_programs import CpProgram, Placement, check_size
from egx.problems.execution_plans.plan import Plan
from egx.simulate.execution_table import Transfers
from egx.simulate.host_case import HostCase


def peak_program(
    case: HostCase,
    *,
    decide: Sequence[str],
    transfers: Transfers,
    start: Plan | None,
    known_cost: float | None,
    bound: float,
) -> CpProgram:
    """The least peak, in units; arguments as in `makespan_program`, costs in bytes.

    `taken[op][k]` says that an op stands at position k or before. A tensor is live on a device
    from its producer's position to that of its last reader there, and on its own device at its
    producer's position at least, to the end if it is a graph output.
    """
    sat, n, devices = cp_model(), case.num_ops, range(case.num_devices)
    sized = [t for t in range(case.num_tensors) if case.units[t]]
    check_size("the peak", n * n + len(sized) * n * len(devices))
    model = sat.CpModel()
    placed = Placement(model, case, decide=decide, limited=False)
    taken = _positions(model, case, free="priority" in decide)

    top = int(case.units.sum() * len(devices) + case.weight_units.sum())
    if known_cost is not None:
        top = min(top, round(known_cost / case.unit_bytes))
    peak = model.new_int_var(min(int(bound // case.unit_bytes), top), top, "")
    for d in devices:
        weights = [
            int(w) * placed.here[op][d] for op, w in enumerate(case.weight_units.tolist()) if w
        ]
        live = {tensor: _lives(model, case, placed, taken, tensor, d) for tensor in sized}
        for k in range(n):
            here = [int(case.units[t]) * live[t][k] for t in sized]
            model.add(sum(here + weights) <= peak)
    if start is not None:
        placed.hint(model, start)
        place = np.argsort(start.order)
        for op in range(n):
            for k in range(n):
                if not isinstance(taken[op][k], int):
                    model.add_hint(taken[op][k], int(place[op] <= k))
    model.minimize(peak)

    def to_plan(solver: Any) -> Plan:
        before = [sum(1 - solver.value(x) for x in row) for row in taken]
        return Plan(placed.device(solver), np.argsort(before, kind="stable"))

    return CpProgram(model, lambda value: value * case.unit_bytes, to_plan)


def _positions(model: Any, case: HostCase, *, free: bool) -> list[list[Any]]:
    """`taken` [N][K], a topological order; the order of indices unless it is `free`."""
    n = case.num_ops
    if not free:
        return [[int(op <= k) for k in range(n)] for op in range(n)]
    taken = [[model.new_bool_var("") for _ in range(n)] for _ in range(n)]
    for op in range(n):
        for k in range(n - 1):
            model.add_implication(taken[op][k], taken[op][k + 1])
        for source in {int(case.producer[t]) for t in case.inputs[op]}:
            model.add(taken[op][0] == 0)
            for k in range(1, n):
                model.add_implication(taken[op][k], taken[source][k - 1])
    for k in range(n):
        model.add(sum(taken[op][k] for op in range(n)) == k + 1)
    return taken


def _lives(
    model: Any, case: HostCase, placed: Placement, taken: list[list[Any]], tensor: int, d: int
) -> list[Any]:
    """Whether a tensor is live on device d at each position; minimised, so one side suffices."""
    source = int(case.producer[tensor])
    home = placed.here[source][d]
    live = [model.new_bool_var("") for _ in range(case.num_ops)]
    for k in range(case.num_ops):
        made = taken[source][k]
        made_before = taken[source][k - 1] if k else 0
        if case.is_output[tensor]:
            model.add_bool_or([live[k], _not(made), _not(home)])
        else:
            model.add_bool_or([live[k], _not(made), made_before, _not(home)])
        for consumer in case.consumers[tensor]:
            done = taken[consumer][k - 1] if k else 0
            reads = placed.here[consumer][d]
            model.add_bool_or([live[k], _not(made), done, _not(reads)])
    return live


def _not(literal: Any) -> Any:
    return 1 - literal if isinstance(literal, int) else ~literal
