"""A graph on a machine as plain NumPy, for algorithms that build or check plans on the host.

Shapes: N real ops, T real tensors, U real uses, D devices.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Array, Int

from egx.graph.graph import CONTRACTION, OPAQUE, REDUCTION, Graph
from egx.simulate.execution_table import ExecutionTable


@dataclasses.dataclass(frozen=True, eq=False)
class HostCase:
    """The numbers of one several-devices problem, padding dropped; sizes are exact integers."""

    producer: np.ndarray  # [T]
    units: np.ndarray  # [T] int64
    is_output: np.ndarray  # [T]
    use_tensor: np.ndarray  # [U]
    use_consumer: np.ndarray  # [U], ascending
    weight_units: np.ndarray  # [N] int64
    opaque: np.ndarray  # [N] bool: never fused
    reduction: np.ndarray  # [N] bool: never fused into its consumers
    contraction: np.ndarray  # [N] bool: never two in a cluster
    layer: np.ndarray  # [N] int64: which of the model's named layers, -1 where it has none
    seconds: np.ndarray  # [N, D] float64, one launch included
    compute_s: np.ndarray  # [N, D] float64, no launch and no memory
    launch_s: np.ndarray  # [D]
    read_bytes_per_s: np.ndarray  # [D], of level 0
    write_bytes_per_s: np.ndarray  # [D], of level 0
    link_s_per_byte: np.ndarray  # [D, D]
    link_latency_s: np.ndarray  # [D, D]
    capacity_units: np.ndarray  # [D] int64
    unit_bytes: float

    @property
    def num_ops(self) -> int:
        return len(self.weight_units)

    @property
    def num_tensors(self) -> int:
        return len(self.units)

    @property
    def num_devices(self) -> int:
        return self.seconds.shape[1]

    @functools.cached_property
    def inputs(self) -> list[list[int]]:
        """The distinct tensors that each op reads, in use order."""
        every: list[dict[int, None]] = [{} for _ in range(self.num_ops)]
        for tensor, consumer in zip(
            self.use_tensor.tolist(), self.use_consumer.tolist(), strict=True
        ):
            every[consumer][tensor] = None
        return [list(tensors) for tensors in every]

    @functools.cached_property
    def outputs(self) -> list[range]:
        """The tensors that each op makes."""
        ends = np.searchsorted(self.producer, np.arange(self.num_ops + 1)).tolist()
        return [range(ends[i], ends[i + 1]) for i in range(self.num_ops)]

    @functools.cached_property
    def consumers(self) -> list[list[int]]:
        """The distinct ops that read each tensor, ascending."""
        every: list[list[int]] = [[] for _ in range(self.num_tensors)]
        for op, tensors in enumerate(self.inputs):
            for tensor in tensors:
                every[tensor].append(op)
        return every

    @functools.cached_property
    def input_units(self) -> np.ndarray:
        """Units [N] of the distinct tensors that each op reads."""
        pairs = np.unique(np.stack([self.use_consumer, self.use_tensor]), axis=1)
        sums = np.zeros(self.num_ops, np.int64)
        np.add.at(sums, pairs[0], self.units[pairs[1]])
        return sums

    @functools.cached_property
    def output_units(self) -> np.ndarray:
        """Units [N] that each op writes."""
        sums = np.zeros(self.num_ops, np.int64)
        np.add.at(sums, self.producer, self.units)
        return sums

    @property
    def is_free_of_transfers(self) -> bool:
        """Whether no transfer takes any time."""
        off = ~np.eye(self.num_devices, dtype=bool)
        sent = bool(self.units[self.use_tensor].any())
        slow = bool(self.link_s_per_byte[off].any()) and sent
        return not slow and not self.link_latency_s[off].any()

    def transfer_s(self, tensor: int) -> np.ndarray:
        """Seconds [D, D] to send a tensor; the diagonal is 0."""
        return self.link_latency_s + self.units[tensor] * self.unit_bytes * self.link_s_per_byte

    def naming_uses(self, device: np.ndarray) -> dict[tuple[int, int], int]:
        """The transfers of a placement [N]: (tensor, target) and the use that names each."""
        named: dict[tuple[int, int], int] = {}
        target = device[self.use_consumer]
        away = np.flatnonzero(target != device[self.producer[self.use_tensor]])
        for use in away.tolist():
            named.setdefault((int(self.use_tensor[use]), int(target[use])), use)
        return named


def case_arrays(
    graph: Graph,
    table: ExecutionTable,
    capacity_units: Int[Array, " D"],
    layer: Int[Array, " N"],
) -> dict[str, Any]:
    """What `host_case` needs, padded, as arrays that may be traced; `layer` is the number of the
    layer of each op, or -1."""
    return {
        "op_mask": graph.op_mask,
        "op_class": graph.op_class,
        "layer": layer,
        "weight_units": graph.weight_units,
        "tensor_mask": graph.tensor_mask,
        "tensor_producer": graph.tensor_producer,
        "tensor_units": graph.tensor_units,
        "tensor_is_output": graph.tensor_is_output,
        "use_mask": graph.use_mask,
        "use_tensor": graph.use_tensor,
        "use_consumer": graph.use_consumer,
        "unit_bytes": graph.unit_bytes,
        "seconds": table.op_seconds,
        "compute_s": table.compute_s,
        "launch_s": table.launch_s,
        "read_bytes_per_s": table.read_bytes_per_s,
        "write_bytes_per_s": table.write_bytes_per_s,
        "link_bytes_per_s": table.link_bytes_per_s,
        "link_latency_s": table.link_latency_s,
        "capacity_units": capacity_units,
    }


def host_case(arrays: Mapping[str, Any]) -> HostCase:
    """The case behind `case_arrays`, which must be concrete."""
    host = {name: np.asarray(value) for name, value in arrays.items()}
    n, t, u = (int(host[f"{axis}_mask"].sum()) for axis in ("op", "tensor", "use"))
    per_byte = 1.0 / host["link_bytes_per_s"].astype(np.float64)
    latency = host["link_latency_s"].astype(np.float64)
    np.fill_diagonal(per_byte, 0.0)
    np.fill_diagonal(latency, 0.0)
    op_class = host["op_class"][:n]
    return HostCase(
        producer=host["tensor_producer"][:t].astype(np.int64),
        units=host["tensor_units"][:t].astype(np.int64),
        is_output=host["tensor_is_output"][:t].astype(bool),
        use_tensor=host["use_tensor"][:u].astype(np.int64),
        use_consumer=host["use_consumer"][:u].astype(np.int64),
        weight_units=host["weight_units"][:n].astype(np.int64),
        opaque=op_class == OPAQUE,
        reduction=op_class == REDUCTION,
        contraction=op_class == CONTRACTION,
        layer=host["layer"][:n].astype(np.int64),
        seconds=host["seconds"][:n].astype(np.float64),
        compute_s=host["compute_s"][:n].astype(np.float64),
        launch_s=host["launch_s"].astype(np.float64),
        read_bytes_per_s=host["read_bytes_per_s"].astype(np.float64),
        write_bytes_per_s=host["write_bytes_per_s"].astype(np.float64),
        link_s_per_byte=per_byte,
        link_latency_s=latency,
        capacity_units=host["capacity_units"].astype(np.int64),
        unit_bytes=float(host["unit_bytes"]),
    )
