"""Profiled workloads of Tarnawski et al. for accelerators and CPUs.

"Efficient Algorithms for Device Placement of DNN Graph Operators", NeurIPS 2020 (arXiv
2006.16423), github.com/msr-fiddle/dnn-partitioning. A JSON file has `maxFPGAs`, `maxCPUs`,
`maxSizePerFPGA` (bytes); nodes: id, name, fpgaLatency, cpuLatency (ms), size (bytes on an
accelerator); edges: sourceId, destId, cost (ms to move the source's output between an accelerator
and the host's memory).

As an Execution problem: accelerators first, then CPUs, which share the host's memory (free links,
no limit). A node's output has the bytes that its edges' cost stands for at the file's bandwidth;
what its `size` has beyond them are weights. Between two accelerators an output moves twice. Their
objectives are others (see `device_loads`), so that published values do not bound a makespan; those
that lie in a `reference_results.json` above the file are in `notes["published"]`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from egx.errors import FormatError
from egx.formats.workload import Workload, read_object, topological
from egx.graph.builder import GraphBuilder, Tensor
from egx.graph.graph import OP_CLASSES, real_sizes
from egx.hardware.spec import MOST_DEVICES, Hardware
from egx.json_fields import Fields

MILLISECOND = 1e-3
RESULTS = "reference_results.json"


def load_dnn_partitioning(
    path: str | os.PathLike[str], *, accelerators: int | None = None, cpus: int | None = None
) -> Workload:
    """The workload in a file; by default with as many accelerators and CPUs as it allows.

    Ops stand in a topological order; `notes["color_class"]` has each op's class of those that the
    authors keep on one device (None for a class of its own), `notes["backward"]` whether it is of
    the backward pass, `notes["bytes_per_s"]` the bandwidth to the host.

    Raises:
        FormatError: naming the file, and the record and field in it.
    """
    top = read_object(path)
    counts = (
        top.whole("maxFPGAs") if accelerators is None else accelerators,
        top.whole("maxCPUs") if cpus is None else cpus,
    )
    if min(counts) < 0 or not 1 <= sum(counts) <= MOST_DEVICES:
        raise FormatError(
            f"{path}: expected 1 to {MOST_DEVICES} devices, got {counts[0]} accelerators, "
            f"{counts[1]} CPUs"
        )
    nodes = list(top.records("nodes"))
    if not nodes:
        raise FormatError(f"{path}: nodes: expected at least one node, got none")
    index: dict[int, int] = {}
    for k, node in enumerate(nodes):
        if node.whole("id") in index:
            raise node.error("id", "an id of its own")
        index[node.whole("id")] = k
    edges = list(top.records("edges"))
    ends = [(_end(edge, "sourceId", index), _end(edge, "destId", index)) for edge in edges]
    cost_ms = _costs(edges, ends, len(nodes))
    rate = _bandwidth(edges)
    order = _order(top, nodes, ends)
    model = _model(path, nodes, ends, order, np.round(cost_ms * rate))
    _check_support(nodes, counts[0])
    seconds = [nodes[k].number("fpgaLatency") * MILLISECOND for k in order]
    on_cpu = [nodes[k].number("cpuLatency") * MILLISECOND for k in order]
    columns = [seconds] * counts[0] + [on_cpu] * counts[1]
    hardware = _machine(counts, top.number("maxSizePerFPGA"), rate / MILLISECOND)
    return Workload(
        model,
        np.array(columns).T,
        hardware,
        notes={
            "color_class": [nodes[k].data.get("colorClass") for k in order],
            "backward": [bool(nodes[k].data.get("isBackwardNode", False)) for k in order],
            "bytes_per_s": rate / MILLISECOND,
            "published": _published(Path(path)),
        },
    )


def _check_support(nodes: list[Fields], accelerators: int) -> None:
    """Every device of a problem can run every op: a node that no accelerator can is refused where
    there are any."""
    for node in nodes:
        supported = node.data.get("supportedOnFpga", 1)
        if supported not in (0, 1):
            raise node.error("supportedOnFpga", "0 or 1")
        if accelerators and not supported:
            raise node.error("supportedOnFpga", "1, or a load with accelerators=0")


def device_loads(workload: Workload, device: Int[np.ndarray, " N"]) -> Float[np.ndarray, " D"]:
    """Seconds of work per device, whose largest the authors' throughput objective minimises.

    An accelerator's load is its ops, each distinct tensor that it reads from elsewhere, and each
    own tensor that is read elsewhere, once; a CPU's load is its ops.
    """
    graph, hardware = workload.model.graph, workload.hardware
    assert hardware is not None
    ops, _, uses = real_sizes(graph)
    tensor = np.asarray(graph.use_tensor)[:uses]
    producer = np.asarray(graph.tensor_producer)[tensor]
    unit = int(graph.unit_bytes)
    moved_s = np.asarray(graph.tensor_units, np.float64) * unit / workload.notes["bytes_per_s"]
    source, target = device[producer], device[np.asarray(graph.use_consumer)[:uses]]
    loads = np.zeros(hardware.num_devices)
    np.add.at(loads, device, workload.op_seconds[np.arange(ops), device])
    crossing = source != target
    # Each tensor once in per reader's device, once out of its home.
    into = {(t, d) for t, d in zip(tensor[crossing], target[crossing], strict=True)}
    out = {(t, d) for t, d in zip(tensor[crossing], source[crossing], strict=True)}
    is_cpu = np.array([name.startswith("CPU") for name in hardware.device_names])
    for t, d in [*into, *out]:
        if not is_cpu[d]:
            loads[d] += moved_s[t]
    return loads


def _end(edge: Fields, field: str, index: dict[int, int]) -> int:
    value = edge.whole(field)
    if value not in index:
        raise edge.error(field, "the id of a node")
    return index[value]


def _costs(edges: list[Fields], ends: list[tuple[int, int]], nodes: int) -> Float[np.ndarray, " N"]:
    """Milliseconds to move each node's output."""
    cost = np.full(nodes, np.nan)
    for edge, (source, _) in zip(edges, ends, strict=True):
        value = edge.number("cost")
        if not np.isnan(cost[source]) and cost[source] != value:
            raise edge.error("cost", f"{cost[source]:g}, as on the source's other edges")
        cost[source] = value
    return np.nan_to_num(cost)


def _bandwidth(edges: list[Fields]) -> float:
    """Bytes a millisecond: what most edges that have both a size and a cost agree on."""
    rates = [
        edge.number("size") / edge.number("cost")
        for edge in edges
        if "size" in edge.data and edge.number("cost") > 0 and edge.number("size") > 0
    ]
    # Without sizes a byte stands for a microsecond.
    return float(np.median(rates)) if rates else 1e3


def _order(top: Fields, nodes: list[Fields], ends: list[tuple[int, int]]) -> list[int]:
    def cycle(k: int) -> FormatError:
        return FormatError(
            f"{top.file}: edges: expected no cycles, but node {nodes[k].whole('id')} waits for "
            "itself"
        )

    return topological(len(nodes), ends, cycle)


def _model(
    path: str | os.PathLike[str],
    nodes: list[Fields],
    ends: list[tuple[int, int]],
    order: list[int],
    output_bytes: Float[np.ndarray, " N"],
) -> Any:
    feeds = {source for source, _ in ends}
    into: list[list[int]] = [[] for _ in nodes]
    for source, target in ends:
        into[target].append(source)
    builder = GraphBuilder(Path(path).stem)
    made: dict[int, Tensor] = {}
    taken: set[str] = set()
    for k in order:
        node = nodes[k]
        label = node.data.get("name") or f"node{node.whole('id')}"
        name = str(label) if label not in taken else f"{label}#{node.whole('id')}"
        taken.add(name)
        size = float(output_bytes[k]) if k in feeds else 0.0
        tensors = builder.op(
            name,
            kind="opaque",
            op_type="op",
            inputs=[made[source] for source in into[k]],
            output_bytes=[size] if k in feeds else [],
            flops=node.number("fpgaLatency") / MILLISECOND,
            weight_bytes=max(node.number("size") - size, 0.0),
        )
        if tensors:
            made[k] = tensors[0]
    return builder.build_model(source=os.fspath(path), notes={"format": "dnn-partitioning"})


def _machine(counts: tuple[int, int], limit: float, to_host: float) -> Hardware:
    accelerators, cpus = counts
    devices = accelerators + cpus
    is_cpu = np.arange(devices) >= accelerators
    # Out to the host and in again: half as fast as one of them.
    link = np.where(is_cpu[:, None] | is_cpu[None, :], to_host, to_host / 2)
    link = np.where(is_cpu[:, None] & is_cpu[None, :], np.inf, link)
    free = np.full((devices, 1), np.inf)
    return Hardware(
        flops_per_s=np.full((devices, len(OP_CLASSES)), 1e6),
        level_bytes=np.where(is_cpu, np.inf, limit)[:, None],
        read_bytes_per_s=free,
        write_bytes_per_s=free,
        link_bytes_per_s=link,
        link_latency_s=np.zeros((devices, devices)),
        launch_s=np.zeros(devices),
        name=f"{accelerators} accelerators, {cpus} CPUs",
        device_names=[
            *(f"accelerator {k}" for k in range(accelerators)),
            *(f"CPU {k}" for k in range(cpus)),
        ],
    )


def _published(path: Path) -> dict[str, Any]:
    """What is known of a file: an entry of the results that lie above it."""
    whole = path.absolute()
    for folder in list(whole.parents)[:4]:
        if (folder / RESULTS).is_file():
            case = whole.relative_to(folder).with_suffix("").as_posix()
            objective, _, name = case.partition("/")
            table = read_object(folder / RESULTS).data.get(objective, {})
            return dict(table.get(name, {})) if isinstance(table, dict) else {}
    return {}
