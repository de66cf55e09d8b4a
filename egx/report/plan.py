"""A plan: where each weight and each tensor lies, for compilers to read and anyone to check.

It names the model by source and digest and carries the machine's full numbers, so that its claims
can be simulated again elsewhere. Sizes are bytes as the simulator counts them: rounded up to
`unit_bytes`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from egx.errors import FormatError
from egx.graph.graph import Graph, graph_digest
from egx.hardware.spec import Hardware
from egx.problems.base import AbstractProblem
from egx.report.placement import (
    Placement,
    first_fit,
    host_decisions,
    layout,
    require_memory_placement,
    simulate,
)
from egx.training.identity import package_version
from egx.training.result import Result


@dataclasses.dataclass(frozen=True)
class Placed:
    """One thing in memory, from its first to its last step, both included.

    `tensor` is None for an op's weights; `op_index` is also the step at which the op runs.
    """

    op: str
    op_index: int
    op_type: str
    tensor: str | None
    level: str
    level_index: int
    bytes: int
    first_step: int
    last_step: int


@dataclasses.dataclass(frozen=True)
class ModelId:
    """How to find the model again: `source` and `options` as `egx.load` takes them."""

    source: str
    options: dict[str, Any]
    digest: str
    ops: int
    tensors: int
    unit_bytes: int


@dataclasses.dataclass(frozen=True)
class Plan:
    """A memory placement with its claims. Seconds are for one inference."""

    name: str
    model: ModelId
    hardware: Hardware
    prefetch: int
    latency_s: float
    reference_s: float
    first_fit_s: float
    bound_s: float | None
    bound_status: str | None
    algorithm: str | None
    seed: int | None
    evaluations: int | None
    weights: tuple[Placed, ...]
    tensors: tuple[Placed, ...]
    egx: str

    def decisions(self, graph: Graph) -> dict[str, Array]:
        """The plan as `problem.evaluate` takes it; what has no bytes lies on level 0."""
        levels = {"weights": self.weights, "activations": self.tensors}
        arrays = {}
        for head, records in levels.items():
            array = np.zeros(graph.num_ops, np.int32)
            for record in records:
                array[record.op_index] = record.level_index
            arrays[head] = jnp.asarray(array)
        return arrays


def make_plan(
    problem: AbstractProblem,
    decisions: Placement,
    *,
    name: str = "found",
    result: Result | None = None,
    source: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Plan:
    """The plan of `decisions`, which must be a valid map.

    Args:
        problem: a MemoryPlacement, preferably of a Model, whose names the plan uses.
        decisions: a valid map.
        name: what to call it, such as "found" or "native".
        result: the run that it came from, for bound, algorithm, seed and evaluations.
        source: what to give to `egx.load`, if not the model's own source.
        options: what `egx.load` was called with.

    Raises:
        FormatError: when the map is not valid: there is nothing to write then.
    """
    problem = require_memory_placement(problem)
    latency_s, fits = simulate(problem, decisions)
    if not fits:
        raise FormatError("a plan is only written for a valid map, and this one does not fit")
    where, host, model = layout(problem), host_decisions(problem, decisions), problem.model.value
    graph = problem.graph

    def placed(op: int, tensor: str | None, level: int, size: int, first: int, last: int) -> Placed:
        return Placed(
            op=where.op_names[op],
            op_index=op,
            op_type=where.op_types[op],
            tensor=tensor,
            level=where.level_names[level],
            level_index=level,
            bytes=size,
            first_step=first,
            last_step=last,
        )

    weights = tuple(
        placed(op, None, int(host["weights"][op]), int(size), 0, where.steps - 1)
        for op, size in enumerate(where.weight_bytes)
        if size
    )
    tensors = tuple(
        placed(
            int(op),
            where.tensor_names[t],
            int(host["activations"][op]),
            int(where.tensor_bytes[t]),
            int(op),
            int(where.tensor_last[t]),
        )
        for t, op in enumerate(where.tensor_producer)
    )
    return Plan(
        name=name,
        model=ModelId(
            source=source or (model.source if model else ""),
            options=dict(options or {}),
            digest=model.digest if model else graph_digest(graph),
            ops=where.steps,
            tensors=len(where.tensor_names),
            unit_bytes=int(graph.unit_bytes),
        ),
        hardware=problem.hardware,
        prefetch=problem.prefetch,
        latency_s=latency_s,
        reference_s=float(problem.reference_cost),
        first_fit_s=first_fit(problem)[1],
        bound_s=result.bound if result else None,
        bound_status=result.bound_status if result else None,
        algorithm=result.algorithm if result else None,
        seed=result.seed if result else None,
        evaluations=result.evaluations if result else None,
        weights=weights,
        tensors=tensors,
        egx=package_version(),
    )
