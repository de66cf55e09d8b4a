"""A memory-placement problem as plain NumPy in double precision, for solvers on the host.

Shapes: N real ops, T real tensors, M levels.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np

from egx.errors import SearchError
from egx.graph.graph import real_sizes
from egx.problems.base import AbstractProblem, Decisions
from egx.problems.memory_placement import MemoryPlacement


@dataclasses.dataclass(frozen=True, eq=False)
class Instance:
    """The numbers of one memory-placement problem; sizes are exact integers, seconds float64."""

    prefetch: int
    compute_s: np.ndarray  # [N]
    launch_s: float
    read_s: np.ndarray  # [M], seconds per unit
    write_s: np.ndarray  # [M], seconds per unit
    capacity: np.ndarray  # [M], units; level 0 is unbounded
    weight_units: np.ndarray  # [N]
    output_units: np.ndarray  # [N], all outputs of an op
    tensor_producer: np.ndarray  # [T]
    tensor_units: np.ndarray  # [T]
    tensor_last: np.ndarray  # [T], the last step at which a tensor is held
    reads: tuple[dict[int, int], ...]  # per op: producer -> units read, all uses together

    @property
    def num_ops(self) -> int:
        return len(self.compute_s)

    @property
    def num_levels(self) -> int:
        return len(self.capacity)


def memory_instance(problem: AbstractProblem) -> Instance:
    """The instance behind `problem`, padding dropped.

    Raises:
        SearchError: when `problem` is not a `MemoryPlacement`.
    """
    if not isinstance(problem, MemoryPlacement):
        raise SearchError(
            f"the exact solver knows MemoryPlacement and Execution, got {type(problem).__name__}"
        )
    graph, hardware = problem.graph, problem.hardware
    n, t, u = real_sizes(graph)
    unit = float(graph.unit_bytes)
    producer = np.asarray(graph.tensor_producer)[:t].astype(np.int64)
    units = np.asarray(graph.tensor_units)[:t].astype(np.int64)
    use_tensor = np.asarray(graph.use_tensor)[:u]
    use_consumer = np.asarray(graph.use_consumer)[:u]
    last = producer.copy()
    np.maximum.at(last, use_tensor, use_consumer)
    last[np.asarray(graph.tensor_is_output)[:t]] = n - 1
    reads: list[dict[int, int]] = [{} for _ in range(n)]
    for tensor, consumer in zip(use_tensor.tolist(), use_consumer.tolist(), strict=True):
        if units[tensor]:
            source = int(producer[tensor])
            reads[consumer][source] = reads[consumer].get(source, 0) + int(units[tensor])
    rates = np.asarray(hardware.flops_per_s, np.float64)[0]
    flops = np.asarray(graph.flops, np.float64)[:n]
    return Instance(
        prefetch=problem.prefetch,
        compute_s=flops / rates[np.asarray(graph.op_class)[:n]],
        launch_s=float(hardware.launch_s[0]),
        read_s=unit / np.asarray(hardware.read_bytes_per_s, np.float64)[0],
        write_s=unit / np.asarray(hardware.write_bytes_per_s, np.float64)[0],
        capacity=np.asarray(hardware.capacity_units(graph.unit_bytes))[0].astype(np.int64),
        weight_units=np.asarray(graph.weight_units)[:n].astype(np.int64),
        output_units=np.bincount(producer, weights=units, minlength=n).astype(np.int64),
        tensor_producer=producer,
        tensor_units=units,
        tensor_last=last,
        reads=tuple(reads),
    )


def body_parts(instance: Instance, activations: np.ndarray) -> np.ndarray:
    """Seconds [N] that each op spends on reading inputs and writing outputs."""
    seconds = instance.output_units * instance.write_s[activations]
    for op, sources in enumerate(instance.reads):
        for source, units in sources.items():
            seconds[op] += units * instance.read_s[activations[source]]
    return seconds


def latency(instance: Instance, weights: np.ndarray, activations: np.ndarray) -> float:
    """Latency in seconds of a map, levels [N] each, in double precision (semantics 4.1)."""
    act = body_parts(instance, activations)
    load = instance.weight_units * instance.read_s[weights]
    if instance.prefetch == 0:
        return float(np.sum(np.maximum(instance.compute_s, act + load) + instance.launch_s))
    body = np.maximum(instance.compute_s, act) + instance.launch_s
    free = np.zeros(instance.num_levels)
    start = np.zeros(instance.num_ops)
    clock = 0.0
    for i in range(instance.num_ops):
        start[i] = clock
        if instance.weight_units[i]:
            level = weights[i]
            earliest = start[i - instance.prefetch] if i >= instance.prefetch else 0.0
            free[level] = max(free[level], earliest) + load[i]
            start[i] = max(clock, free[level])
        clock = start[i] + body[i]
    return float(clock)


def fits(instance: Instance, weights: np.ndarray, activations: np.ndarray) -> bool:
    """Whether every level is within its capacity at every step; exact."""
    n = instance.num_ops
    for level in range(1, instance.num_levels):
        change = np.zeros(n + 1, np.int64)
        here = activations[instance.tensor_producer] == level
        np.add.at(change, instance.tensor_producer[here], instance.tensor_units[here])
        np.subtract.at(change, instance.tensor_last[here] + 1, instance.tensor_units[here])
        peak = int(np.max(np.cumsum(change)[:n], initial=0))
        if peak + int(instance.weight_units[weights == level].sum()) > instance.capacity[level]:
            return False
    return True


def maximal_steps(instance: Instance, outputs: np.ndarray) -> np.ndarray:
    """The steps whose sets of live tensors contain every other step's set; never empty.

    `outputs` [N] selects the ops whose outputs count. Live sets are intervals, so a set is
    maximal where the last birth before the next death stands.
    """
    counts = outputs[instance.tensor_producer] & (instance.tensor_units > 0)
    births = np.zeros(instance.num_ops, bool)
    births[instance.tensor_producer[counts]] = True
    deaths = np.zeros(instance.num_ops, bool)
    deaths[instance.tensor_last[counts]] = True
    steps, grown = [], False
    for step in range(instance.num_ops):
        grown |= bool(births[step])
        if grown and deaths[step]:
            steps.append(step)
            grown = False
    return np.asarray(steps or [0], np.int64)


def to_decisions(
    problem: AbstractProblem, weights: np.ndarray, activations: np.ndarray
) -> Decisions:
    """Levels [N] of real ops as decisions of `problem`, padding at level 0."""
    length = problem.graph.num_ops
    padded = {}
    for name, levels in (("weights", weights), ("activations", activations)):
        array = np.zeros(length, np.int32)
        array[: len(levels)] = levels
        padded[name] = jnp.asarray(array)
    return padded


def to_levels(instance: Instance, decisions: Mapping[str, object]) -> tuple[np.ndarray, np.ndarray]:
    """The levels [N] of real ops in `decisions`."""
    n = instance.num_ops
    weights = np.asarray(decisions["weights"])[:n].astype(np.int64)
    activations = np.asarray(decisions["activations"])[:n].astype(np.int64)
    return weights, activations
