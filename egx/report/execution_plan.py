"""A plan for several devices: where and when each op runs, for compilers to read and to check.

It names the model by source and digest, carries the machine's full numbers and the decisions, so
that its claims can be simulated again elsewhere. Seconds are the simulator's; sizes are bytes,
rounded up to `unit_bytes`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from egx.graph.graph import graph_digest, real_sizes
from egx.hardware.spec import Hardware
from egx.problems.base import GivenDecisions
from egx.problems.execution import Execution
from egx.report.plan import ModelId
from egx.training.identity import package_version
from egx.training.result import Result


@dataclasses.dataclass(frozen=True)
class ScheduledOp:
    """An op: `place` is its place in the order of all items, ops and transfers; `fused_into` the
    index of the op that runs it, its own unless it is fused."""

    op: str
    op_index: int
    op_type: str
    device: str
    device_index: int
    priority: float
    fusion: int
    fused_into: int
    place: int
    start_s: float
    finish_s: float


@dataclasses.dataclass(frozen=True)
class ScheduledTransfer:
    """A tensor sent to a device, where the uses that it serves, least index first, name it."""

    tensor: str
    tensor_index: int
    use_index: int
    source: str
    source_index: int
    target: str
    target_index: int
    bytes: int
    place: int
    start_s: float
    finish_s: float


@dataclasses.dataclass(frozen=True)
class ExecutionPlan:
    """A plan with its claims; `measured` says that op seconds come with the model's file.

    `peak_bytes` and `peak_bytes_over_time` have an entry per device. `transfer_priority` has an
    entry per use, or is None.
    """

    name: str
    model: ModelId
    hardware: Hardware
    objective: str
    order: str
    transfer_mode: str
    fusion_levels: int
    measured: bool
    decide: tuple[str, ...]
    cost: float
    fits: bool
    makespan_s: float
    peak_bytes: tuple[int, ...]
    peak_bytes_over_time: tuple[int, ...]
    reference_cost: float
    bound: float | None
    bound_status: str | None
    algorithm: str | None
    seed: int | None
    evaluations: int | None
    given: tuple[str, ...]
    transfer_priority: tuple[float, ...] | None
    ops: tuple[ScheduledOp, ...]
    transfers: tuple[ScheduledTransfer, ...]
    egx: str

    def decisions(self, problem: Execution) -> dict[str, np.ndarray]:
        """The plan as `problem.evaluate` takes it: the decisions that it was made of."""
        graph = problem.graph
        arrays: dict[str, np.ndarray] = {
            "device": np.zeros(graph.num_ops, np.int32),
            "priority": np.zeros(graph.num_ops, np.float32),
            "fusion": np.zeros(graph.num_ops, np.int32),
        }
        for record in self.ops:
            arrays["device"][record.op_index] = record.device_index
            arrays["priority"][record.op_index] = record.priority
            arrays["fusion"][record.op_index] = record.fusion
        sending = np.zeros(graph.num_uses, np.float32)
        if self.transfer_priority is not None:
            sending[: len(self.transfer_priority)] = self.transfer_priority
        arrays["transfer_priority"] = sending
        return {name: arrays[name] for name in self.given}


def make_execution_plan(
    problem: Execution,
    decisions: GivenDecisions,
    *,
    name: str = "found",
    result: Result | None = None,
    source: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> ExecutionPlan:
    """The plan of `decisions`; one that does not fit is written too, and says so.

    Args:
        problem: preferably of a Model, whose names the plan uses.
        decisions: what to run.
        name: what to call it, such as "found" or "heft".
        result: the run that it came from, for bound, algorithm, seed and evaluations.
        source: what to give to `egx.load`, if not the model's own source.
        options: what `egx.load` was called with.
    """
    graph, model, hardware = problem.graph, problem.model.value, problem.hardware
    ops, tensors, uses = real_sizes(graph)
    line, outcome = problem.timeline(decisions), problem.evaluate(decisions)
    given = {key: np.asarray(value) for key, value in decisions.items()}
    priority = given.get("priority", np.zeros(ops, np.float32)).astype(np.float32)
    device = given.get("device", np.zeros(ops, np.int32))
    fusion = given.get("fusion", np.zeros(ops, np.int32))
    place = np.zeros(ops, np.int64)
    items = np.flatnonzero(~line.is_transfer)
    place[line.op[items]] = items
    unit = int(graph.unit_bytes)
    records = tuple(
        ScheduledOp(
            op=model.op_names[op] if model else f"op {op}",
            op_index=op,
            op_type=model.op_types[op] if model else "op",
            device=hardware.device_names[int(device[line.root[op]])],
            device_index=int(device[line.root[op]]),
            priority=_short(priority[op]),
            fusion=int(fusion[op]),
            fused_into=int(line.root[op]),
            place=int(place[line.root[op]]),
            start_s=float(line.start_s[place[line.root[op]]]),
            finish_s=float(line.finish_s[place[line.root[op]]]),
        )
        for op in range(ops)
    )
    moves = tuple(
        ScheduledTransfer(
            tensor=model.tensor_names[t] if model else f"tensor {t}",
            tensor_index=t,
            use_index=int(line.use[k]),
            source=hardware.device_names[int(line.source[k])],
            source_index=int(line.source[k]),
            target=hardware.device_names[int(line.device[k])],
            target_index=int(line.device[k]),
            bytes=int(graph.tensor_units[t]) * unit,
            place=int(k),
            start_s=float(line.start_s[k]),
            finish_s=float(line.finish_s[k]),
        )
        for k in np.flatnonzero(line.is_transfer)
        for t in (int(line.tensor[k]),)
    )
    sending = given.get("transfer_priority")
    return ExecutionPlan(
        name=name,
        model=ModelId(
            source=source or (model.source if model else ""),
            options=dict(options or {}),
            digest=model.digest if model else graph_digest(graph),
            ops=ops,
            tensors=tensors,
            unit_bytes=unit,
        ),
        hardware=hardware,
        objective=problem.objective,
        order=problem.order,
        transfer_mode=problem.transfers,
        fusion_levels=problem.fusion_levels,
        measured=problem.is_measured,
        decide=problem.decide,
        cost=float(outcome.cost),
        fits=bool(outcome.feasible),
        makespan_s=float(outcome.makespan_s),
        peak_bytes=tuple(outcome.peak_bytes.tolist()),
        peak_bytes_over_time=tuple(line.peak_bytes_over_time.tolist()),
        reference_cost=float(problem.reference_cost),
        bound=result.bound if result else None,
        bound_status=result.bound_status if result else None,
        algorithm=result.algorithm if result else None,
        seed=result.seed if result else None,
        evaluations=result.evaluations if result else None,
        given=tuple(given),
        transfer_priority=None if sending is None else tuple(map(_short, sending[:uses])),
        ops=records,
        transfers=moves,
        egx=package_version(),
    )


def _short(value: Any) -> float:
    """A float32 by its shortest form, which reads back to the same bits."""
    return float(str(np.float32(value)))
