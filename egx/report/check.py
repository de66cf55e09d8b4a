"""Checking a plan: is it of this model, does it fit at every step, is it as fast as it claims?"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
from jaxtyping import Int

from egx.graph.graph import Model
from egx.problems.memory_placement import MemoryPlacement
from egx.report.placement import Layout, first_fit, layout, occupancy_bytes, simulate
from egx.report.plan import Placed, Plan
from egx.report.units import format_bytes, format_seconds

# Another machine may round a float32 sum over thousands of ops differently, but not by more.
TOLERANCE = 1e-5
MAX_FAULTS = 20


@dataclasses.dataclass(frozen=True)
class PlanCheck:
    """What is wrong with a plan (nothing, if `faults` is empty), and what was found on the way.

    `latency_s` is the simulator's, and `peak_bytes` the most that each level holds at any step
    [M] by the plan's own records; None where the plan is too far from the model to tell.
    """

    faults: tuple[str, ...]
    latency_s: float | None
    peak_bytes: Int[np.ndarray, " M"] | None

    @property
    def ok(self) -> bool:
        return not self.faults


def check_plan(plan: Plan, model: Model) -> PlanCheck:
    """Compares a plan with its model and simulates it again on the plan's own machine."""
    if plan.model.digest != model.digest:
        fault = (
            f"model: the plan was made for digest {plan.model.digest[:16]}..., "
            f"but {model.source} has {model.digest[:16]}..."
        )
        return PlanCheck((fault,), None, None)
    problem = MemoryPlacement(model, plan.hardware, prefetch=plan.prefetch)
    where = layout(problem)
    faults = _counts(plan, where)
    if faults:
        return PlanCheck(tuple(faults), None, None)
    faults = _records(plan, where)
    peaks, overfull = _capacity(plan)
    if faults:
        return PlanCheck(_first(faults + overfull), None, peaks)
    faults = overfull
    latency_s, fits = simulate(problem, plan.decisions(model.graph))
    if not fits and not faults:
        faults.append("the simulator says that the plan does not fit")
    for field, simulated in (
        ("latency_s", latency_s),
        ("reference_s", float(problem.reference_cost)),
        ("first_fit_s", first_fit(problem)[1]),
    ):
        claimed = getattr(plan, field)
        if not math.isclose(claimed, simulated, rel_tol=TOLERANCE):
            faults.append(
                f"{field}: the plan claims {format_seconds(claimed)}, "
                f"the simulator says {format_seconds(simulated)}"
            )
    if plan.bound_s is not None and plan.bound_s > latency_s * (1 + TOLERANCE):
        faults.append(
            f"bound_s: the plan claims that nothing is faster than {format_seconds(plan.bound_s)}, "
            f"but is itself"
        )
    return PlanCheck(_first(faults), latency_s, peaks)


def _first(faults: list[str]) -> tuple[str, ...]:
    more = len(faults) - MAX_FAULTS
    return tuple(faults[:MAX_FAULTS] + ([f"and {more} more"] if more > 0 else []))


def _capacity(plan: Plan) -> tuple[Int[np.ndarray, " M"], list[str]]:
    """The peak of each level, and a fault for each level that is ever overfull."""
    records = [*plan.weights, *plan.tensors]
    columns = (
        np.array([getattr(r, field) for r in records], np.int64)
        for field in ("level_index", "bytes", "first_step", "last_step")
    )
    levels = plan.hardware.num_levels
    held = occupancy_bytes(*columns, steps=plan.model.ops, levels=levels)
    faults = []
    for m in range(1, levels):
        capacity = float(plan.hardware.level_bytes[0, m])
        over = np.flatnonzero(held[:, m] > capacity)
        if over.size:
            worst = int(np.argmax(held[:, m]))
            faults.append(
                f"capacity: {plan.hardware.level_names[m]} holds {format_bytes(capacity)}, but is "
                f"overfull at {over.size} of {len(held)} steps, first at step {over[0]}, most at "
                f"step {worst} with {format_bytes(int(held[worst, m]))}"
            )
    return held.max(axis=0), faults


def _counts(plan: Plan, where: Layout) -> list[str]:
    """Faults of the plan's size, without which single records cannot be compared."""
    tensors = len(where.tensor_names)
    counts = (
        ("model.ops", plan.model.ops, where.steps),
        ("model.tensors", plan.model.tensors, tensors),
        ("tensors", len(plan.tensors), tensors),
    )
    return [
        f"{field}: the plan has {claimed}, the model {real}"
        for field, claimed, real in counts
        if claimed != real
    ]


def _records(plan: Plan, where: Layout) -> list[str]:
    """Faults of single records: missing, double, or unlike the model."""
    faults = []
    seen: dict[int, Placed] = {}
    for record in plan.weights:
        if record.op_index in seen:
            faults.append(f"weights of {record.op!r} are placed twice")
        seen[record.op_index] = record
        size = int(where.weight_bytes[record.op_index])
        faults += _unlike(record, f"weights of {record.op!r}", where, size, 0, where.steps - 1)
    for missing in np.flatnonzero(where.weight_bytes):
        if int(missing) not in seen:
            faults.append(f"weights of {where.op_names[missing]!r} are missing")
    chosen: dict[int, int] = {}
    for t, record in enumerate(plan.tensors):
        label, op = f"tensor {record.tensor!r}", int(where.tensor_producer[t])
        if record.op_index != op or record.tensor != where.tensor_names[t]:
            faults.append(f"{label}: expected {where.tensor_names[t]!r} of op {op} in this place")
            continue
        size, last = int(where.tensor_bytes[t]), int(where.tensor_last[t])
        faults += _unlike(record, label, where, size, op, last)
        if chosen.setdefault(op, record.level_index) != record.level_index:
            faults.append(f"{label}: all outputs of {record.op!r} must lie on one level")
    return faults


def _unlike(
    record: Placed, label: str, where: Layout, size: int, first: int, last: int
) -> list[str]:
    """Faults of a record that differs from what the model has in its place."""
    op = record.op_index
    expected = {
        "op": where.op_names[op],
        "op_type": where.op_types[op],
        "bytes": size,
        "first_step": first,
        "last_step": last,
    }
    return [
        f"{label}: {field} is {getattr(record, field)!r}, the model has {value!r}"
        for field, value in expected.items()
        if getattr(record, field) != value
    ]
