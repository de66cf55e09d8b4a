"""Checking an execution plan: is it of this model, can it run as it says, does it fit?

What the records say of one another (order of ops, transfers, devices that do one thing at a time)
is checked by code of its own; times and peaks are compared with the simulator's.
"""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
from jaxtyping import Float

from egx.graph.graph import Model, real_sizes
from egx.problems.execution import Execution
from egx.report.check import MAX_FAULTS, TOLERANCE
from egx.report.execution_plan import ExecutionPlan, ScheduledOp, make_execution_plan
from egx.report.units import format_bytes, format_seconds
from egx.simulate.fine import FineOutcome, check_plan


@dataclasses.dataclass(frozen=True)
class ExecutionCheck:
    """What is wrong with a plan (nothing, if `faults` is empty), and the simulator's answer; the
    latter is None where the plan is too far from the model to tell."""

    faults: tuple[str, ...]
    simulated: ExecutionPlan | None

    @property
    def ok(self) -> bool:
        return not self.faults


def check_execution_plan(
    plan: ExecutionPlan, model: Model, op_seconds: Float[np.ndarray, "N D"] | None = None
) -> ExecutionCheck:
    """Compares a plan with its model and simulates it again on the plan's own machine.

    `op_seconds` are the measurements of a plan that has them.
    """
    if plan.model.digest != model.digest:
        fault = (
            f"model: the plan was made for digest {plan.model.digest[:16]}..., "
            f"but {model.source} has {model.digest[:16]}..."
        )
        return ExecutionCheck((fault,), None)
    if plan.measured and op_seconds is None:
        fault = f"measured: the plan rests on measured op seconds, and {model.source} has none"
        return ExecutionCheck((fault,), None)
    faults = _complete(plan, model)
    if faults:
        return ExecutionCheck(_first(faults), None)
    problem = _problem(plan, model, op_seconds)
    again = make_execution_plan(problem, plan.decisions(problem), name=plan.name)
    faults = _precedence(plan, model) + _claims(plan, again)
    return ExecutionCheck(_first(faults), again)


def check_finer(
    plan: ExecutionPlan, model: Model, op_seconds: Float[np.ndarray, "N D"] | None = None
) -> FineOutcome:
    """What the finer cost model says of a plan that passed `check_execution_plan`."""
    problem = _problem(plan, model, op_seconds)
    return check_plan(problem, plan.decisions(problem))


def _problem(
    plan: ExecutionPlan, model: Model, op_seconds: Float[np.ndarray, "N D"] | None
) -> Execution:
    return Execution(
        model,
        plan.hardware,
        decide=plan.decide,
        objective=plan.objective,
        order=plan.order,
        transfers=plan.transfer_mode,
        op_seconds=op_seconds if plan.measured else None,
        fusion_levels=plan.fusion_levels,
    )


def _first(faults: list[str]) -> tuple[str, ...]:
    more = len(faults) - MAX_FAULTS
    return tuple(faults[:MAX_FAULTS] + ([f"and {more} more"] if more > 0 else []))


def _complete(plan: ExecutionPlan, model: Model) -> list[str]:
    """Faults without which single records cannot be compared."""
    ops, tensors, uses = real_sizes(model.graph)
    faults = [
        f"{field}: the plan has {claimed}, the model {real}"
        for field, claimed, real in (
            ("model.ops", plan.model.ops, ops),
            ("model.tensors", plan.model.tensors, tensors),
            ("ops", len(plan.ops), ops),
        )
        if claimed != real
    ]
    if plan.transfer_priority is not None and len(plan.transfer_priority) != uses:
        faults.append(
            f"transfer_priority: the plan has {len(plan.transfer_priority)}, the model {uses} uses"
        )
    for index, record in enumerate(plan.ops):
        expected = (index, *((model.op_names[index], model.op_types[index]) if index < ops else ()))
        if (record.op_index, record.op, record.op_type) != expected:
            faults.append(f"ops[{index}]: {record.op!r} stands where {expected[1:]} should")
    for k, move in enumerate(plan.transfers):
        if move.use_index >= uses or move.tensor != model.tensor_names[move.tensor_index]:
            faults.append(f"transfers[{k}]: {move.tensor!r} is not tensor {move.tensor_index}")
    return faults


def _precedence(plan: ExecutionPlan, model: Model) -> list[str]:
    """Whether each op finds its inputs, and each device and link, or way of a device, does one
    thing at a time."""
    graph = model.graph
    _, _, uses = real_sizes(graph)
    producer = np.asarray(graph.tensor_producer)
    slack = TOLERANCE * max(plan.makespan_s, 1e-30)
    arrival = {(m.tensor_index, m.target_index): m.finish_s for m in plan.transfers}
    faults = []
    for tensor, consumer in zip(
        np.asarray(graph.use_tensor)[:uses].tolist(),
        np.asarray(graph.use_consumer)[:uses].tolist(),
        strict=True,
    ):
        reader, maker = plan.ops[consumer], plan.ops[int(producer[tensor])]
        if reader.fused_into == maker.fused_into:
            continue
        there: float | None = maker.finish_s
        if reader.device_index != maker.device_index:
            there = arrival.get((tensor, reader.device_index))
        if there is None:
            faults.append(
                f"{reader.op}: reads {model.tensor_names[tensor]!r} on {reader.device}, where it "
                "is never sent"
            )
        elif reader.start_s < there - slack:
            faults.append(
                f"{reader.op}: starts at {format_seconds(reader.start_s)}, before its input "
                f"{model.tensor_names[tensor]!r} is there at {format_seconds(there)}"
            )
    for move in plan.transfers:
        maker = plan.ops[int(producer[move.tensor_index])]
        if move.start_s < maker.finish_s - slack:
            faults.append(f"transfer of {move.tensor!r}: starts before {maker.op!r} is done")
    rows: dict[object, list[tuple[float, float, str]]] = {}
    for op in plan.ops:
        if op.fused_into == op.op_index:
            rows.setdefault(op.device, []).append((op.start_s, op.finish_s, op.op))
    for move in plan.transfers:
        ways = [f"{move.source} to {move.target}"]
        if plan.transfer_mode == "ports":
            ways = [f"the way out of {move.source}", f"the way into {move.target}"]
        for way in ways:
            rows.setdefault(way, []).append((move.start_s, move.finish_s, move.tensor))
    for where, spans in rows.items():
        spans.sort()
        for (_, end, one), (start, _, other) in itertools.pairwise(spans):
            if start < end - slack:
                faults.append(f"{where}: {other!r} starts before {one!r} is done")
    return faults


def _claims(plan: ExecutionPlan, again: ExecutionPlan) -> list[str]:
    """Differences from what the simulator says."""
    faults = []
    by_time = plan.objective == "makespan"
    show = format_seconds if by_time else format_bytes
    for field in ("cost", "makespan_s", "reference_cost"):
        claimed, simulated = getattr(plan, field), getattr(again, field)
        if not math.isclose(claimed, simulated, rel_tol=TOLERANCE, abs_tol=1e-30):
            text = format_seconds if field == "makespan_s" else show
            faults.append(
                f"{field}: the plan claims {text(claimed)}, the simulator says {text(simulated)}"
            )
    for field in ("fits", "peak_bytes", "peak_bytes_over_time"):
        claimed, simulated = getattr(plan, field), getattr(again, field)
        if claimed != simulated:
            faults.append(f"{field}: the plan claims {claimed}, the simulator says {simulated}")
    if plan.bound is not None and plan.fits and plan.bound > again.cost * (1 + TOLERANCE):
        faults.append(
            f"bound: the plan claims that nothing is below {show(plan.bound)}, but is itself"
        )
    slack = TOLERANCE * max(again.makespan_s, 1e-30)
    for mine, theirs in zip(plan.ops, again.ops, strict=True):
        faults += _op_faults(mine, theirs, slack)
    moves = {(m.tensor_index, m.target_index): m for m in again.transfers}
    for move in plan.transfers:
        other = moves.pop((move.tensor_index, move.target_index), None)
        where = f"transfer of {move.tensor!r} to {move.target}"
        if other is None:
            faults.append(f"{where}: the simulator makes no such transfer")
        elif (move.bytes, move.use_index, move.place) != (
            other.bytes,
            other.use_index,
            other.place,
        ):
            faults.append(f"{where}: bytes, use or place differ from the simulator's")
        elif max(abs(move.start_s - other.start_s), abs(move.finish_s - other.finish_s)) > slack:
            faults.append(f"{where}: times differ from the simulator's")
    faults += [f"transfer of {m.tensor!r} to {m.target}: is missing" for m in moves.values()]
    return faults


def _op_faults(mine: ScheduledOp, theirs: ScheduledOp, slack: float) -> list[str]:
    faults = []
    for field in ("device", "fused_into", "place"):
        claimed, simulated = getattr(mine, field), getattr(theirs, field)
        if claimed != simulated:
            faults.append(f"{mine.op}: {field} is {claimed!r}, the simulator says {simulated!r}")
    for field in ("start_s", "finish_s"):
        claimed, simulated = getattr(mine, field), getattr(theirs, field)
        if abs(claimed - simulated) > slack:
            faults.append(
                f"{mine.op}: {field} is {format_seconds(claimed)}, the simulator says "
                f"{format_seconds(simulated)}"
            )
    return faults
