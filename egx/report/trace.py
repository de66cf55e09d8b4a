"""A plan's timeline as a trace that Perfetto and chrome://tracing open.

Trace Event Format (Google, "Trace Event Format"): complete events ("X") for ops and transfers,
counters ("C") for live memory; times are microseconds.
"""

from __future__ import annotations

import json
import os
from typing import Any

import numpy as np

from egx.files import write_whole
from egx.graph.graph import OP_CLASSES
from egx.problems.execution import Execution
from egx.simulate.timeline import Timeline

DEVICES, LINKS, MEMORY = 1, 2, 3
_TRACKS = {DEVICES: "devices", LINKS: "links", MEMORY: "memory"}
_MICROSECONDS = 1e6


def trace(problem: Execution, timeline: Timeline) -> dict[str, Any]:
    """The trace as plain data: a thread per device, one per link in use, a counter per device.

    `timeline` is what `problem.timeline` gave. Each op says how much memory is live on its device
    when it runs, along the order of items; the counters follow time, weights included in both.
    """
    devices = problem.hardware.device_names
    links = sorted(
        {
            (int(timeline.source[k]), int(timeline.device[k]))
            for k in np.flatnonzero(timeline.is_transfer)
        }
    )
    events = [_named("process_name", pid, 0, name) for pid, name in _TRACKS.items()]
    events += [_named("thread_name", DEVICES, d, name) for d, name in enumerate(devices)]
    events += [
        _named("thread_name", LINKS, k, f"{devices[a]} to {devices[b]}")
        for k, (a, b) in enumerate(links)
    ]
    events += _items(problem, timeline, {link: k for k, link in enumerate(links)})
    events += _counters(timeline, devices)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms" if timeline.makespan_s >= 1e-3 else "ns",
        "otherData": {
            "makespan_s": timeline.makespan_s,
            "peak_bytes": _by_name(devices, timeline.peak_bytes),
            "peak_bytes_over_time": _by_name(devices, timeline.peak_bytes_over_time),
            "weight_bytes": _by_name(devices, timeline.weight_bytes),
        },
    }


def write_trace(problem: Execution, timeline: Timeline, path: str | os.PathLike[str]) -> None:
    """Writes `trace` as JSON; the file appears whole or not at all."""
    content = trace(problem, timeline)
    events = ",\n".join(json.dumps(event, allow_nan=False) for event in content["traceEvents"])
    rest = json.dumps({k: v for k, v in content.items() if k != "traceEvents"}, allow_nan=False)
    write_whole(path, f'{{"traceEvents": [\n{events}\n],\n{rest[1:]}\n')


def _named(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": pid, "tid": tid, "name": kind, "args": {"name": name}}


def _by_name(names: tuple[str, ...], values: np.ndarray) -> dict[str, int]:
    return {name: int(value) for name, value in zip(names, values, strict=True)}


def _items(
    problem: Execution, timeline: Timeline, threads: dict[tuple[int, int], int]
) -> list[dict[str, Any]]:
    model, graph = problem.model.value, problem.graph
    classes = np.asarray(graph.op_class)
    size = np.asarray(graph.tensor_units, np.int64) * int(graph.unit_bytes)
    ops = len(timeline.root)
    members = np.bincount(timeline.root, minlength=ops)
    events = []
    for k in range(len(timeline.op)):
        op, use = int(timeline.op[k]), int(timeline.use[k])
        source, device = int(timeline.source[k]), int(timeline.device[k])
        event: dict[str, Any] = {
            "ph": "X",
            "ts": _MICROSECONDS * float(timeline.start_s[k]),
            "dur": _MICROSECONDS * float(timeline.finish_s[k] - timeline.start_s[k]),
        }
        if use < 0:
            event |= {
                "pid": DEVICES,
                "tid": device,
                "cat": OP_CLASSES[int(classes[op])],
                "name": model.op_names[op] if model else f"op {op}",
                "args": {
                    "op": op,
                    "type": model.op_types[op] if model else "op",
                    "place": k,
                    "live_bytes": int(timeline.live_bytes[k, device]),
                },
            }
            if members[op] > 1:
                event["args"]["fused_ops"] = int(members[op])
        else:
            tensor = int(timeline.tensor[k])
            event |= {
                "pid": LINKS,
                "tid": threads[source, device],
                "cat": "transfer",
                "name": model.tensor_names[tensor] if model else f"tensor {tensor}",
                "args": {"tensor": tensor, "bytes": int(size[tensor]), "place": k},
            }
        events.append(event)
    return events


def _counters(timeline: Timeline, devices: tuple[str, ...]) -> list[dict[str, Any]]:
    """Live bytes of each device, first its weights, then whenever they change."""
    before = timeline.weight_bytes
    rows = [(0.0, d, int(before[d])) for d in range(len(devices))]
    for time, live in zip(timeline.event_s, timeline.event_live_bytes, strict=True):
        rows += [(float(time), int(d), int(live[d])) for d in np.flatnonzero(live != before)]
        before = live
    return [
        {
            "ph": "C",
            "pid": MEMORY,
            "tid": 0,
            "ts": _MICROSECONDS * time,
            "name": devices[d],
            "args": {"live bytes": value},
        }
        for time, d, value in rows
    ]
