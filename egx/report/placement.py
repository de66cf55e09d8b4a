"""A memory placement on the host: names, bytes and lifetimes, as plans, tables and pictures need.

All arrays are NumPy, without padding, sizes in bytes as int64 (rounded up to units, as in the
simulator). Shapes: N ops, T tensors, M levels.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np
from jaxtyping import Array, Float, Int

from egx.errors import SearchError
from egx.graph.graph import real_sizes
from egx.problems.base import AbstractProblem, Decisions
from egx.problems.memory_placement import MemoryPlacement

# `weights` and `activations` [N, padding included], as problems take and results hold them.
Placement = Mapping[str, Array | np.ndarray]


@dataclasses.dataclass(frozen=True)
class Layout:
    """What of a memory-placement problem does not depend on the decisions."""

    title: str
    op_names: tuple[str, ...]
    op_types: tuple[str, ...]
    tensor_names: tuple[str, ...]
    level_names: tuple[str, ...]
    capacity_bytes: Float[np.ndarray, " M"]
    weight_bytes: Int[np.ndarray, " N"]
    output_bytes: Int[np.ndarray, " N"]
    tensor_bytes: Int[np.ndarray, " T"]
    tensor_producer: Int[np.ndarray, " T"]
    tensor_last: Int[np.ndarray, " T"]

    @property
    def steps(self) -> int:
        """N."""
        return len(self.op_names)

    @property
    def levels(self) -> int:
        """M."""
        return len(self.level_names)

    @property
    def total_bytes(self) -> int:
        """All weights and all tensors."""
        return int(self.weight_bytes.sum() + self.tensor_bytes.sum())


def require_memory_placement(problem: AbstractProblem) -> MemoryPlacement:
    """The problem, or a SearchError that says what these reports are for."""
    if not isinstance(problem, MemoryPlacement):
        raise SearchError(
            f"plans and placement pictures are made of a MemoryPlacement, "
            f"not of {type(problem).__name__}"
        )
    return problem


def layout(problem: AbstractProblem) -> Layout:
    """The layout of a problem; ops and tensors of a bare graph are called by their index."""
    problem = require_memory_placement(problem)
    graph, model, hardware = problem.graph, problem.model.value, problem.hardware
    ops, tensors, _ = real_sizes(graph)
    unit = int(graph.unit_bytes)
    last = np.asarray(graph.last_step())[:tensors] if tensors else np.zeros(0, np.int32)
    name = model.name if model is not None else f"graph of {ops} ops"
    return Layout(
        title=f"{name} on {hardware.name}",
        op_names=model.op_names if model else tuple(f"op {i}" for i in range(ops)),
        op_types=model.op_types if model else ("op",) * ops,
        tensor_names=model.tensor_names if model else tuple(f"tensor {t}" for t in range(tensors)),
        level_names=hardware.level_names,
        capacity_bytes=np.asarray(hardware.level_bytes[0], np.float64),
        weight_bytes=np.asarray(graph.weight_units, np.int64)[:ops] * unit,
        output_bytes=np.asarray(graph.output_units(), np.int64)[:ops] * unit,
        tensor_bytes=np.asarray(graph.tensor_units, np.int64)[:tensors] * unit,
        tensor_producer=np.asarray(graph.tensor_producer, np.int64)[:tensors],
        # In a padded graph the end of the run is the last padded step.
        tensor_last=np.minimum(last.astype(np.int64), ops - 1),
    )


def host_decisions(
    problem: AbstractProblem, decisions: Placement
) -> dict[str, Int[np.ndarray, " N"]]:
    """`weights` and `activations` without their padding."""
    ops = real_sizes(problem.graph)[0]
    return {k: np.asarray(decisions[k], np.int64)[:ops] for k in ("weights", "activations")}


def simulate(problem: MemoryPlacement, decisions: Placement) -> tuple[float, bool]:
    """(latency in seconds, whether the map fits)."""
    outcome = problem.evaluate(dict(decisions))
    return float(outcome.latency_s), bool(outcome.feasible)


def first_fit(problem: MemoryPlacement) -> tuple[Decisions, float]:
    """The first-fit map and its latency in seconds."""
    decisions = problem.first_fit()
    return decisions, simulate(problem, decisions)[0]


def occupancy_bytes(
    level: Int[np.ndarray, " I"],
    size: Int[np.ndarray, " I"],
    first: Int[np.ndarray, " I"],
    last: Int[np.ndarray, " I"],
    *,
    steps: int,
    levels: int,
) -> Int[np.ndarray, "N M"]:
    """Bytes that I items hold on each level at each step, items live from first to last, both in.

    Written apart from the simulator, so that a plan is checked by other code than made it.
    """
    change = np.zeros((steps + 1, levels), np.int64)
    np.add.at(change, (first, level), size)
    np.add.at(change, (last + 1, level), -size)
    return np.cumsum(change, axis=0)[:-1]


@dataclasses.dataclass(frozen=True)
class Occupancy:
    """Bytes on each level: weights for the whole run, activations at each step."""

    weights: Int[np.ndarray, " M"]
    activations: Int[np.ndarray, "N M"]

    @property
    def total(self) -> Int[np.ndarray, "N M"]:
        return self.activations + self.weights

    @property
    def peak(self) -> Int[np.ndarray, " M"]:
        return self.total.max(axis=0)


def occupancy(where: Layout, decisions: Mapping[str, np.ndarray]) -> Occupancy:
    """The occupancy of host decisions (see `host_decisions`)."""
    weights = np.zeros(where.levels, np.int64)
    np.add.at(weights, decisions["weights"], where.weight_bytes)
    activations = occupancy_bytes(
        decisions["activations"][where.tensor_producer],
        where.tensor_bytes,
        where.tensor_producer,
        where.tensor_last,
        steps=where.steps,
        levels=where.levels,
    )
    return Occupancy(weights, activations)


def transition_bytes(
    before: Int[np.ndarray, " N"],
    after: Int[np.ndarray, " N"],
    size: Int[np.ndarray, " N"],
    levels: int,
) -> Int[np.ndarray, "M M"]:
    """Bytes by level before (rows) and after (columns)."""
    moved = np.zeros((levels, levels), np.int64)
    np.add.at(moved, (before, after), size)
    return moved
