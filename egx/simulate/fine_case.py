"""One plan as the finer cost model sees it: clusters, transfers, and who needs what where.

Shapes: N real ops, T real tensors, D devices.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from egx.graph.graph import MAX_UNITS, Graph, real_sizes
from egx.hardware.spec import Hardware


@dataclasses.dataclass(frozen=True, eq=False)
class FineCase:
    """Lists by op stand at the roots of clusters; a fused op is part of its root.

    `inputs` are the distinct tensors from outside, `outputs` the tensors that others may see.
    `sends` lists an op's transfers as (naming use, (tensor, target)) in use order, `readers` who
    reads a tensor on a device, `needs` how many ends a tensor on a device waits for before it is
    dropped (one more than there are where it is a graph output, at home).
    """

    roots: list[int]
    device: list[int]  # [N], the root's
    seconds: list[float]  # [N]
    inputs: list[list[int]]  # [N]
    outputs: list[list[int]]  # [N]
    output_units: list[int]  # [N]
    producer: list[int]  # [T]
    units: list[int]  # [T]
    sends: list[list[tuple[int, tuple[int, int]]]]  # [N]
    readers: dict[tuple[int, int], list[int]]
    needs: dict[tuple[int, int], int]
    weight_units: np.ndarray  # [D]
    capacity_units: np.ndarray  # [D]
    unit_bytes: int
    launch_s: list[float]  # [D]
    link_bytes_per_s: np.ndarray  # [D, D]
    link_latency_s: np.ndarray  # [D, D]

    @property
    def num_ops(self) -> int:
        return len(self.device)

    @property
    def num_devices(self) -> int:
        return len(self.launch_s)

    def home(self, tensor: int) -> int:
        return self.device[self.producer[tensor]]

    def link_of(self, transfer: tuple[int, int]) -> tuple[int, int]:
        return self.home(transfer[0]), transfer[1]


def fine_case(
    graph: Graph,
    hardware: Hardware,
    device: np.ndarray | None = None,
    root: np.ndarray | None = None,
    op_seconds: np.ndarray | None = None,
    *,
    launch_on_device: bool = True,
) -> FineCase:
    """A plan on the host; `device` and `root` may be padded, `op_seconds` [N, D] is not.

    `launch_on_device` counts the launch among an op's seconds; a table of op seconds is the whole
    of an op's seconds whatever it says.
    """
    ops, tensors, uses = real_sizes(graph)
    every = np.arange(ops)
    root = every if root is None else np.asarray(root, np.int64)[:ops]
    on = np.zeros(ops, np.int64) if device is None else np.asarray(device, np.int64)[:ops]
    on = on[root]
    producer = np.asarray(graph.tensor_producer, np.int64)[:tensors]
    units = np.asarray(graph.tensor_units, np.int64)[:tensors]
    is_output = np.asarray(graph.tensor_is_output)[:tensors]
    use_tensor = np.asarray(graph.use_tensor, np.int64)[:uses]
    reader = root[np.asarray(graph.use_consumer, np.int64)[:uses]]
    outside = root[producer[use_tensor]] != reader if uses else np.zeros(0, bool)
    seen = root[producer] == producer  # tensors of roots; the others are inside

    inputs: list[list[int]] = [[] for _ in range(ops)]
    sends: list[list[tuple[int, tuple[int, int]]]] = [[] for _ in range(ops)]
    readers: dict[tuple[int, int], list[int]] = {}
    needs: dict[tuple[int, int], int] = {}
    outputs: list[list[int]] = [[] for _ in range(ops)]
    for tensor in np.flatnonzero(seen).tolist():
        made_by = int(producer[tensor])
        outputs[made_by].append(tensor)
        needs[tensor, int(on[made_by])] = 1 + int(is_output[tensor])
    taken = set()
    for use in np.flatnonzero(outside).tolist():
        tensor, op = int(use_tensor[use]), int(reader[use])
        if (tensor, op) in taken:
            continue
        taken.add((tensor, op))
        inputs[op].append(tensor)
        where = (tensor, int(on[op]))
        readers.setdefault(where, []).append(op)
        home = int(on[producer[tensor]])
        if where[1] != home and where not in needs:
            sends[int(producer[tensor])].append((use, where))
            needs[where] = 0
            needs[tensor, home] += 1
        needs[where] += 1
    for entry in sends:
        entry.sort()

    weight = np.asarray(graph.weight_units, np.int64)[:ops]
    held = np.zeros(hardware.num_devices, np.int64)
    np.add.at(held, on, weight)
    out_units = np.zeros(ops, np.int64)
    np.add.at(out_units, producer[seen], units[seen])
    unit = int(graph.unit_bytes)
    launch = np.asarray(hardware.launch_s, np.float64)
    if op_seconds is not None:
        seconds = np.asarray(op_seconds, np.float64)[every, on]
    else:
        read = np.zeros(ops, np.int64)
        np.add.at(read, root, weight)
        for op, tensors_read in enumerate(inputs):
            read[op] += int(units[tensors_read].sum())
        seconds = _roofline_s(graph, hardware, on, root, read * unit, out_units * unit)
        if launch_on_device:
            seconds = seconds + launch[on]
    capacity = np.floor(np.asarray(hardware.level_bytes, np.float64)[:, 0] / unit)
    return FineCase(
        roots=np.flatnonzero(root == every).tolist(),
        device=on.tolist(),
        seconds=seconds.tolist(),
        inputs=inputs,
        outputs=outputs,
        output_units=out_units.tolist(),
        producer=producer.tolist(),
        units=units.tolist(),
        sends=sends,
        readers=readers,
        needs=needs,
        weight_units=held,
        capacity_units=np.minimum(capacity, MAX_UNITS).astype(np.int64),
        unit_bytes=unit,
        launch_s=launch.tolist(),
        link_bytes_per_s=np.asarray(hardware.link_bytes_per_s, np.float64),
        link_latency_s=np.asarray(hardware.link_latency_s, np.float64),
    )


def _roofline_s(
    graph: Graph,
    hardware: Hardware,
    on: np.ndarray,
    root: np.ndarray,
    read_bytes: np.ndarray,
    write_bytes: np.ndarray,
) -> np.ndarray:
    """Seconds [N] of each cluster, at its root, without the launch."""
    ops = len(on)
    flops = np.asarray(graph.flops, np.float64)[:ops]
    rate = np.asarray(hardware.flops_per_s, np.float64)
    compute = np.zeros(ops)
    np.add.at(compute, root, flops / rate[on, np.asarray(graph.op_class)[:ops]])
    read = np.asarray(hardware.read_bytes_per_s, np.float64)[on, 0]
    write = np.asarray(hardware.write_bytes_per_s, np.float64)[on, 0]
    return np.maximum(compute, read_bytes / read + write_bytes / write)
