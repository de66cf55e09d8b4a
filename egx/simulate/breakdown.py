"""Where the time of one memory placement goes and what its levels hold, on the host, for reports.

NumPy in float64 and int64, without padding; written apart from the simulator's loops, which it
must agree with. Shapes: N ops, T tensors, M levels.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

from egx.graph.graph import Graph, real_sizes
from egx.hardware.spec import Hardware

BOUNDS = ("compute", "memory", "launch")


@dataclasses.dataclass(frozen=True, eq=False)
class Breakdown:
    """One run of one map, op by op.

    `seconds` of an op are its stall (waiting for weights, with prefetch only), the greater of
    compute and traffic, and its launch; they add up to the latency. `bound_by` names what takes
    the most of them. Seconds and bytes by level count traffic, whether or not it is hidden.
    """

    weights: Int[np.ndarray, " N"]
    activations: Int[np.ndarray, " N"]
    start_s: Float[np.ndarray, " N"]
    stall_s: Float[np.ndarray, " N"]
    compute_s: Float[np.ndarray, " N"]
    read_s: Float[np.ndarray, " N"]
    write_s: Float[np.ndarray, " N"]
    weight_s: Float[np.ndarray, " N"]
    launch_s: float
    seconds: Float[np.ndarray, " N"]
    bound_by: np.ndarray
    level_seconds: Float[np.ndarray, "N M"]
    level_bytes: Int[np.ndarray, "N M"]
    occupancy_units: Int[np.ndarray, "M N"]
    capacity_units: Int[np.ndarray, " M"]
    unit_bytes: int

    @property
    def latency_s(self) -> float:
        return float(self.start_s[-1] + self.seconds[-1] - self.stall_s[-1])

    @property
    def peak_units(self) -> Int[np.ndarray, " M"]:
        """The most that each level holds at any step."""
        return self.occupancy_units.max(axis=1)

    @property
    def fits(self) -> Bool[np.ndarray, " M"]:
        """Whether each level holds its peak; level 0 is unbounded."""
        fits = self.peak_units <= self.capacity_units
        fits[0] = True
        return fits

    def totals(self) -> dict[str, Any]:
        """Seconds by kind and by level, bytes by level, ops and seconds by what bounds them."""
        bounded = {name: self.bound_by == name for name in BOUNDS}
        return {
            "latency_s": self.latency_s,
            "compute_s": float(self.compute_s.sum()),
            "read_s": float(self.read_s.sum()),
            "write_s": float(self.write_s.sum()),
            "weight_s": float(self.weight_s.sum()),
            "stall_s": float(self.stall_s.sum()),
            "launch_s": self.launch_s * len(self.seconds),
            "level_seconds": self.level_seconds.sum(axis=0).tolist(),
            "level_bytes": self.level_bytes.sum(axis=0).tolist(),
            "peak_bytes": (self.peak_units * self.unit_bytes).tolist(),
            "ops_bound_by": {name: int(mask.sum()) for name, mask in bounded.items()},
            "seconds_bound_by": {
                name: float(self.seconds[mask].sum()) for name, mask in bounded.items()
            },
        }


def lifetimes(graph: Graph) -> tuple[Int[np.ndarray, " T"], Int[np.ndarray, " T"]]:
    """(first step, last step) of each tensor, both included, padding dropped."""
    ops, tensors, uses = real_sizes(graph)
    first = np.asarray(graph.tensor_producer, np.int64)[:tensors]
    last = first.copy()
    use_tensor = np.asarray(graph.use_tensor, np.int64)[:uses]
    np.maximum.at(last, use_tensor, np.asarray(graph.use_consumer, np.int64)[:uses])
    last[np.asarray(graph.tensor_is_output)[:tensors]] = ops - 1
    return first, last


def breakdown(
    graph: Graph,
    hardware: Hardware,
    weights: Int[np.ndarray, " N"],
    activations: Int[np.ndarray, " N"],
    *,
    prefetch: int = 0,
) -> Breakdown:
    """Runs a map as it is, without rectification, on device 0; entries of padding are ignored."""
    ops, tensors, uses = real_sizes(graph)
    levels = hardware.num_levels
    weights = np.asarray(weights, np.int64)[:ops]
    activations = np.asarray(activations, np.int64)[:ops]
    unit = int(graph.unit_bytes)
    read_rate = np.asarray(hardware.read_bytes_per_s, np.float64)[0]
    write_rate = np.asarray(hardware.write_bytes_per_s, np.float64)[0]
    rates = np.asarray(hardware.flops_per_s, np.float64)[0]
    launch = float(np.asarray(hardware.launch_s)[0])

    producer = np.asarray(graph.tensor_producer, np.int64)[:tensors]
    size = np.asarray(graph.tensor_units, np.int64)[:tensors] * unit
    consumer = np.asarray(graph.use_consumer, np.int64)[:uses]
    source = np.asarray(graph.use_tensor, np.int64)[:uses]
    weight_bytes = np.asarray(graph.weight_units, np.int64)[:ops] * unit
    step = np.arange(ops)

    read, written, loaded = (np.zeros((ops, levels), np.int64) for _ in range(3))
    np.add.at(read, (consumer, activations[producer[source]]), size[source])
    np.add.at(written, (producer, activations[producer]), size)
    loaded[step, weights] = weight_bytes

    compute_s = np.asarray(graph.flops, np.float64)[:ops] / rates[np.asarray(graph.op_class)[:ops]]
    read_s = (read / read_rate).sum(axis=1)
    write_s = (written / write_rate).sum(axis=1)
    weight_s = weight_bytes / read_rate[weights]
    if prefetch == 0:
        stall_s = np.zeros(ops)
        traffic_s = read_s + write_s + weight_s
    else:
        traffic_s = read_s + write_s
        body = np.maximum(compute_s, traffic_s) + launch
        stall_s = _stalls(body, weight_s, weight_bytes > 0, weights, levels, prefetch)
    seconds = stall_s + np.maximum(compute_s, traffic_s) + launch
    finish = np.cumsum(seconds)
    parts = np.stack([compute_s, np.maximum(traffic_s, stall_s), np.full(ops, launch)])

    return Breakdown(
        weights=weights,
        activations=activations,
        start_s=finish - seconds + stall_s,
        stall_s=stall_s,
        compute_s=compute_s,
        read_s=read_s,
        write_s=write_s,
        weight_s=weight_s,
        launch_s=launch,
        seconds=seconds,
        bound_by=np.asarray(BOUNDS)[np.argmax(parts, axis=0)],
        level_seconds=(read + loaded) / read_rate + written / write_rate,
        level_bytes=read + loaded + written,
        occupancy_units=_occupancy(graph, weights, activations, levels),
        capacity_units=np.asarray(hardware.capacity_units(graph.unit_bytes)[0], np.int64),
        unit_bytes=unit,
    )


def _stalls(
    body: Float[np.ndarray, " N"],
    weight_s: Float[np.ndarray, " N"],
    streams: Bool[np.ndarray, " N"],
    weights: Int[np.ndarray, " N"],
    levels: int,
    prefetch: int,
) -> Float[np.ndarray, " N"]:
    """Seconds that each op waits for its weights after the op before it has finished."""
    free = [0.0] * levels
    start: list[float] = []
    stalls = np.zeros(len(body))
    finish = 0.0
    for i in range(len(body)):
        begin = finish
        if streams[i]:
            level = int(weights[i])
            behind = start[i - prefetch] if i >= prefetch else 0.0
            free[level] = max(free[level], behind) + weight_s[i]
            begin = max(finish, free[level])
        stalls[i] = begin - finish
        start.append(begin)
        finish = begin + body[i]
    return stalls


def _occupancy(
    graph: Graph, weights: Int[np.ndarray, " N"], activations: Int[np.ndarray, " N"], levels: int
) -> Int[np.ndarray, "M N"]:
    """Units that each level holds at each step."""
    ops = len(weights)
    first, last = lifetimes(graph)
    units = np.asarray(graph.tensor_units, np.int64)[: len(first)]
    change = np.zeros((levels, ops + 1), np.int64)
    np.add.at(change, (activations[first], first), units)
    np.add.at(change, (activations[first], last + 1), -units)
    resident = np.asarray(graph.weight_units, np.int64)[:ops]
    np.add.at(change, (weights, np.zeros(ops, np.int64)), resident)
    return np.cumsum(change, axis=1)[:, :ops]
