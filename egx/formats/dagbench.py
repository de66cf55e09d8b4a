"""DAGBench: task graphs with a network of machines (github.com/ANRGUSC/dagbench).

    {"task_graph": {"tasks": [{name, cost}], "dependencies": [{source, target, size}]},
     "network": {"nodes": [{name, speed}], "edges": [{source, target, speed}]}}

The related-machines model: a task takes cost / speed, a dependency size / link speed and nothing
on one machine; the benchmark's units are taken as FLOPs, bytes and seconds. Each dependency is a
tensor of its own. Links here carry one message at a time, there any number, so that a makespan
found here can be reached there.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from egx.errors import FormatError
from egx.formats.workload import Workload, read_object, topological
from egx.graph.builder import GraphBuilder, Tensor
from egx.graph.graph import OP_CLASSES
from egx.hardware.spec import Hardware
from egx.json_fields import Fields

# Sizes that are no whole numbers are counted in parts, as many as int32 can add up.
_MOST_PARTS = 2.0**20
_MOST_TOTAL = 2.0**30


def load_dagbench(path: str | os.PathLike[str]) -> Workload:
    """The workload in a folder, or in its graph.json; ops in a topological order.

    Sizes that are not whole are multiplied by a power of two, `notes["parts"]`, as are the links'
    speeds, so that rounding them to bytes changes no time by more than a millionth or so.

    Raises:
        FormatError: naming the file, and the record and field in it.
    """
    file = Path(path) / "graph.json" if Path(path).is_dir() else Path(path)
    top = read_object(file)
    tasks = list(top.inner("task_graph").records("tasks"))
    if not tasks:
        raise FormatError(f"{file}: task_graph.tasks: expected at least one task, got none")
    index = _indices(tasks)
    costs = [task.number("cost") for task in tasks]
    ends: list[tuple[int, int]] = []
    sizes: list[float] = []
    for entry in top.inner("task_graph").records("dependencies"):
        ends.append((_one_of(entry, "source", index), _one_of(entry, "target", index)))
        sizes.append(entry.number("size"))
    parts = _parts(sizes)
    model_order = _order(file, tasks, ends)
    out: list[list[int]] = [[] for _ in tasks]
    into: list[list[int]] = [[] for _ in tasks]
    for e, (source, target) in enumerate(ends):
        out[source].append(e)
        into[target].append(e)
    name = top.data.get("name")
    builder = GraphBuilder(name if isinstance(name, str) and name else file.parent.name)
    tensors: dict[int, Tensor] = {}
    for k in model_order:
        task = tasks[k].text("name")
        made = builder.op(
            task,
            kind="opaque",
            op_type="task",
            inputs=[tensors[e] for e in into[k]],
            output_bytes=[round(sizes[e] * parts) for e in out[k]],
            flops=costs[k],
            output_names=[f"{task} > {tasks[ends[e][1]].text('name')}" for e in out[k]],
        )
        tensors.update(zip(out[k], made, strict=True))
    model = builder.build_model(source=os.fspath(path), notes={"format": "DAGBench"})
    hardware = _network(top.inner("network"), builder.name, parts)
    seconds = np.array([costs[k] for k in model_order])[:, None]
    speeds = np.asarray(hardware.flops_per_s, np.float64)[:, 0]
    return Workload(model, seconds / speeds, hardware, notes={"parts": parts})


def _indices(records: list[Fields]) -> dict[str, int]:
    index: dict[str, int] = {}
    for k, record in enumerate(records):
        name = record.text("name")
        if not name or name in index:
            raise record.error("name", "a name of its own")
        index[name] = k
    return index


def _one_of(record: Fields, field: str, index: dict[str, int]) -> int:
    name = record.text(field)
    if name not in index:
        raise record.error(field, "the name of a record of this file")
    return index[name]


def _order(file: Path, tasks: list[Fields], ends: list[tuple[int, int]]) -> list[int]:
    def cycle(k: int) -> FormatError:
        name = tasks[k].text("name")
        return FormatError(
            f"{file}: task_graph.dependencies: expected no cycles, but {name!r} waits for itself"
        )

    return topological(len(tasks), ends, cycle)


def _parts(sizes: list[float]) -> float:
    if all(size == int(size) for size in sizes):
        return 1.0
    parts = _MOST_PARTS
    while parts > 1 and sum(sizes) * parts > _MOST_TOTAL:
        parts /= 2
    return parts


def _network(network: Fields, name: str, parts: float) -> Hardware:
    nodes = list(network.records("nodes"))
    if not nodes:
        raise FormatError(f"{network.file}: network.nodes: expected at least one node, got none")
    index, devices = _indices(nodes), len(nodes)
    link = np.zeros((devices, devices))
    for edge in network.records("edges"):
        source, target = _one_of(edge, "source", index), _one_of(edge, "target", index)
        speed = edge.number("speed", positive=True) * parts
        if source == target:
            continue
        link[source, target] = speed
        # An edge serves both ways unless the other way has its own.
        if link[target, source] == 0:
            link[target, source] = speed
    missing = np.argwhere((link == 0) & ~np.eye(devices, dtype=bool))
    if len(missing):
        a, b = (nodes[k].text("name") for k in missing[0])
        raise FormatError(f"{network.file}: network.edges: expected one from {a!r} to {b!r}")
    speeds = np.array([node.number("speed", positive=True) for node in nodes])
    free = np.full((devices, 1), np.inf)
    return Hardware(
        flops_per_s=np.repeat(speeds[:, None], len(OP_CLASSES), 1),
        level_bytes=free,
        read_bytes_per_s=free,
        write_bytes_per_s=free,
        link_bytes_per_s=link,
        link_latency_s=np.zeros((devices, devices)),
        launch_s=np.zeros(devices),
        name=f"network of {name}",
        device_names=list(index),
    )
