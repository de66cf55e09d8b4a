"""Memory placement in plain Python, slow and obvious, written from the semantics alone.

Shares no code with egx: sizes are Python integers, seconds float64, and occupancy is counted
tensor by tensor at every step. `Case.of` is the only place that reads egx's arrays.
"""

from __future__ import annotations

import dataclasses
from fractions import Fraction
from typing import Any

import numpy as np


@dataclasses.dataclass
class Case:
    """A graph without its padding and the first device of a machine, as lists."""

    flops: list[float]
    op_class: list[int]
    weight_units: list[int]
    inputs: list[list[int]]  # op -> tensors it reads, repeats kept
    outputs: list[list[int]]  # op -> tensors it makes
    tensor_units: list[int]
    is_output: list[bool]
    unit_bytes: int
    flops_per_s: list[float]
    capacity_units: list[int]
    read_bytes_per_s: list[float]
    write_bytes_per_s: list[float]
    launch_s: float

    @classmethod
    def of(cls, graph: Any, hardware: Any) -> Case:
        """Strips the padding of an egx graph and keeps device 0 of an egx machine."""
        ops = int(np.asarray(graph.op_mask).sum())
        tensors = int(np.asarray(graph.tensor_mask).sum())
        uses = int(np.asarray(graph.use_mask).sum())
        inputs: list[list[int]] = [[] for _ in range(ops)]
        outputs: list[list[int]] = [[] for _ in range(ops)]
        for u in range(uses):
            inputs[int(graph.use_consumer[u])].append(int(graph.use_tensor[u]))
        for t in range(tensors):
            outputs[int(graph.tensor_producer[t])].append(t)
        unit = int(graph.unit_bytes)
        level_bytes = [float(b) for b in np.asarray(hardware.level_bytes)[0]]
        return cls(
            flops=[float(f) for f in np.asarray(graph.flops)[:ops]],
            op_class=[int(c) for c in np.asarray(graph.op_class)[:ops]],
            weight_units=[int(w) for w in np.asarray(graph.weight_units)[:ops]],
            inputs=inputs,
            outputs=outputs,
            tensor_units=[int(t) for t in np.asarray(graph.tensor_units)[:tensors]],
            is_output=[bool(b) for b in np.asarray(graph.tensor_is_output)[:tensors]],
            unit_bytes=unit,
            flops_per_s=[float(f) for f in np.asarray(hardware.flops_per_s)[0]],
            capacity_units=[
                2**31 - 1 if b == float("inf") else min(Fraction(b) // unit, 2**31 - 1)
                for b in level_bytes
            ],
            read_bytes_per_s=[float(b) for b in np.asarray(hardware.read_bytes_per_s)[0]],
            write_bytes_per_s=[float(b) for b in np.asarray(hardware.write_bytes_per_s)[0]],
            launch_s=float(np.asarray(hardware.launch_s)[0]),
        )

    @property
    def ops(self) -> int:
        return len(self.flops)

    @property
    def levels(self) -> int:
        return len(self.capacity_units)


def producers(case: Case) -> list[int]:
    """The op that makes each tensor."""
    made = [-1] * len(case.tensor_units)
    for op, tensors in enumerate(case.outputs):
        for t in tensors:
            made[t] = op
    return made


def lifetime(case: Case, tensor: int) -> range:
    """The steps at which a tensor occupies its level."""
    born = producers(case)[tensor]
    if case.is_output[tensor]:
        return range(born, case.ops)
    consumers = [op for op in range(case.ops) if tensor in case.inputs[op]]
    if not consumers:
        return range(born, born + 1)
    return range(born, max(consumers) + 1)


def occupancy(case: Case, weights: list[int], activations: list[int]) -> list[list[int]]:
    """[level][step] units held."""
    table = [[0] * case.ops for _ in range(case.levels)]
    for op in range(case.ops):
        for step in range(case.ops):
            table[weights[op]][step] += case.weight_units[op]
        for t in case.outputs[op]:
            for step in lifetime(case, t):
                table[activations[op]][step] += case.tensor_units[t]
    return table


def is_valid(case: Case, weights: list[int], activations: list[int]) -> bool:
    table = occupancy(case, weights, activations)
    return all(
        held <= case.capacity_units[level]
        for level in range(1, case.levels)
        for held in table[level]
    )


def rectify(
    case: Case, weights: list[int], activations: list[int]
) -> tuple[list[int], list[int], int]:
    """The rectified map, and the units that had to move."""
    table = [[0] * case.ops for _ in range(case.levels)]
    moved = 0

    def place(level: int, demand: list[int]) -> int:
        while level > 0 and any(
            table[level][step] + need > case.capacity_units[level]
            for step, need in enumerate(demand)
        ):
            level -= 1
        for step, need in enumerate(demand):
            table[level][step] += need
        return level

    new_weights, new_activations = [], []
    for op in range(case.ops):
        level = place(weights[op], [case.weight_units[op]] * case.ops)
        moved += case.weight_units[op] if level != weights[op] else 0
        new_weights.append(level)

        demand = [0] * case.ops
        for t in case.outputs[op]:
            for step in lifetime(case, t):
                demand[step] += case.tensor_units[t]
        level = place(activations[op], demand)
        if level != activations[op]:
            moved += sum(case.tensor_units[t] for t in case.outputs[op])
        new_activations.append(level)
    return new_weights, new_activations, moved


def op_seconds(
    case: Case, weights: list[int], activations: list[int], op: int
) -> tuple[float, float, float]:
    """(compute_s, act_s, weight_s) of one op."""
    made = producers(case)
    compute = case.flops[op] / case.flops_per_s[case.op_class[op]]
    act = 0.0
    for t in case.inputs[op]:
        level = activations[made[t]]
        act += case.tensor_units[t] * case.unit_bytes / case.read_bytes_per_s[level]
    for t in case.outputs[op]:
        level = activations[op]
        act += case.tensor_units[t] * case.unit_bytes / case.write_bytes_per_s[level]
    weight = case.weight_units[op] * case.unit_bytes / case.read_bytes_per_s[weights[op]]
    return compute, act, weight


def latency(case: Case, weights: list[int], activations: list[int], prefetch: int) -> float:
    """Seconds of one run of the map as it is, valid or not."""
    if prefetch == 0:
        total = 0.0
        for op in range(case.ops):
            compute, act, weight = op_seconds(case, weights, activations, op)
            total += max(compute, act + weight) + case.launch_s
        return total
    free = [0.0] * case.levels
    start: list[float] = []
    finish: list[float] = []
    for op in range(case.ops):
        compute, act, weight = op_seconds(case, weights, activations, op)
        before = finish[op - 1] if op else 0.0
        if case.weight_units[op] > 0:
            level = weights[op]
            behind = start[op - prefetch] if op >= prefetch else 0.0
            free[level] = max(free[level], behind) + weight
            begin = max(before, free[level])
        else:
            begin = before
        start.append(begin)
        finish.append(begin + max(compute, act) + case.launch_s)
    return finish[-1]


@dataclasses.dataclass
class Value:
    cost: float
    feasible: bool
    reward: float
    moved_fraction: float
    weights: list[int]
    activations: list[int]


def evaluate(
    case: Case,
    weights: list[int],
    activations: list[int],
    *,
    prefetch: int = 0,
    reference_cost: float,
) -> Value:
    """The outcome of a map; `weights` and `activations` of the result are rectified."""
    valid = is_valid(case, weights, activations)
    new_weights, new_activations, moved = rectify(case, weights, activations)
    everything = sum(case.weight_units) + sum(case.tensor_units)
    fraction = moved / everything if everything else 0.0
    if valid:
        cost = latency(case, weights, activations, prefetch)
        reward = (reference_cost / cost) ** 2 - 1 if cost > 0 else 0.0
    else:
        cost = latency(case, new_weights, new_activations, prefetch)
        reward = -(1 + fraction)
    return Value(cost, valid, reward, fraction, new_weights, new_activations)


def native(case: Case) -> tuple[list[int], list[int]]:
    """Outputs on the fastest level, weights on the second fastest, rectified."""
    fastest = case.levels - 1
    weights, activations, _ = rectify(case, [max(fastest - 1, 0)] * case.ops, [fastest] * case.ops)
    return weights, activations


def first_fit(case: Case) -> tuple[list[int], list[int]]:
    """Everything on the fastest level, rectified."""
    fastest = case.levels - 1
    weights, activations, _ = rectify(case, [fastest] * case.ops, [fastest] * case.ops)
    return weights, activations
