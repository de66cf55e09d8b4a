"""Execution on several devices in plain Python, slow and obvious, written from the semantics page.

Where the page leaves room, this is what was chosen:

1. "in use order" (transfers taken with their producer): by the index of the naming use, over all
   outputs of the producer together.
2. Makespan is the last finish of any item; a transfer always ends before an op that needs it.
3. The launch is part of the roofline; a table of op seconds is the whole of an op's seconds.
4. A copy away from home is dropped after its last local use, graph output or not: only the home
   copy of a graph output is kept.
5. A tensor of zero bytes that crosses devices is a transfer like any other: it takes the latency.
6. Run-time order with priorities: equal priorities go to the lower index, not to the earlier
   arrival. Without priorities: the earliest arrival, then the lower index.
7. Run-time order: an op without inputs arrived at 0; an input that is local arrives when its
   producer finishes; "sent" means that the producer was started.
8. Blocking transfers have no link of their own: the devices that they hold are the link.
9. A device's peak is at least its resident weights, which are 0 where no op runs.
10. With fusion, all outputs of an op that is not a root are inner tensors, also dead ones.
11. Infeasible plans: cost and reward follow the page's formula whatever the makespan.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

CAP = 2**31 - 1


@dataclasses.dataclass
class Plain:
    """A graph as lists, padding removed."""

    op_class: list[int]
    flops: list[float]
    weight: list[int]
    producer: list[int]
    size: list[int]
    is_output: list[bool]
    use_tensor: list[int]
    use_consumer: list[int]
    unit: int


def plain(graph: Any) -> Plain:
    ops = int(np.sum(np.asarray(graph.op_mask)))
    tensors = int(np.sum(np.asarray(graph.tensor_mask)))
    uses = int(np.sum(np.asarray(graph.use_mask)))
    return Plain(
        np.asarray(graph.op_class)[:ops].tolist(),
        np.asarray(graph.flops)[:ops].tolist(),
        np.asarray(graph.weight_units)[:ops].tolist(),
        np.asarray(graph.tensor_producer)[:tensors].tolist(),
        np.asarray(graph.tensor_units)[:tensors].tolist(),
        np.asarray(graph.tensor_is_output)[:tensors].tolist(),
        np.asarray(graph.use_tensor)[:uses].tolist(),
        np.asarray(graph.use_consumer)[:uses].tolist(),
        int(graph.unit_bytes),
    )


@dataclasses.dataclass
class Item:
    """An op (`use` is None) or a transfer (of `tensor` to `device`, named by `use`)."""

    op: int
    device: int
    start: float
    finish: float
    use: int | None = None
    tensor: int | None = None


@dataclasses.dataclass
class Run:
    items: list[Item]
    makespan_s: float
    peak_units: list[int]
    live_units: list[list[int]]  # per item, per device, when the peak is read


def rates(hardware: Any) -> dict[str, Any]:
    return {
        "flops": np.asarray(hardware.flops_per_s, np.float64).tolist(),
        "read": np.asarray(hardware.read_bytes_per_s, np.float64)[:, 0].tolist(),
        "write": np.asarray(hardware.write_bytes_per_s, np.float64)[:, 0].tolist(),
        "link": np.asarray(hardware.link_bytes_per_s, np.float64).tolist(),
        "latency": np.asarray(hardware.link_latency_s, np.float64).tolist(),
        "launch": np.asarray(hardware.launch_s, np.float64).tolist(),
        "bytes": np.asarray(hardware.level_bytes, np.float64)[:, 0].tolist(),
    }


def divide(amount: float, rate: float) -> float:
    return 0.0 if math.isinf(rate) else amount / rate


class Oracle:
    """One plan of one graph on one machine."""

    def __init__(
        self,
        graph: Any,
        hardware: Any,
        *,
        device: Any = None,
        priority: Any = None,
        transfer_priority: Any = None,
        root: list[int] | None = None,
        op_seconds: Any = None,
    ):
        g = self.g = plain(graph)
        self.r = rates(hardware)
        self.n = len(g.op_class)
        self.devices = len(self.r["bytes"])
        self.root = list(range(self.n)) if root is None else [int(x) for x in root][: self.n]
        device = [0] * self.n if device is None else [int(x) for x in device]
        self.device = [device[self.root[i]] for i in range(self.n)]
        self.priority = None if priority is None else [float(x) for x in priority]
        self.transfer_priority = (
            None if transfer_priority is None else [float(x) for x in transfer_priority]
        )
        self.op_seconds = None if op_seconds is None else np.asarray(op_seconds, np.float64)
        self.ops = [i for i in range(self.n) if self.root[i] == i]
        self.members = {r: [i for i in range(self.n) if self.root[i] == r] for r in self.ops}
        # Uses between clusters; those inside one vanish.
        self.uses = [
            u
            for u in range(len(g.use_tensor))
            if self.root[g.producer[g.use_tensor[u]]] != self.root[g.use_consumer[u]]
        ]
        self.consumer = {u: self.root[g.use_consumer[u]] for u in self.uses}
        self.tensors = [t for t in range(len(g.size)) if self.root[g.producer[t]] == g.producer[t]]
        # (tensor, device) -> naming use
        self.transfers: dict[tuple[int, int], int] = {}
        for u in self.uses:
            t, d = g.use_tensor[u], self.device[self.consumer[u]]
            if d != self.device[g.producer[t]]:
                self.transfers.setdefault((t, d), u)

    def inputs(self, op: int) -> list[int]:
        return [u for u in self.uses if self.consumer[u] == op]

    def outputs(self, op: int) -> list[int]:
        return [t for t in self.tensors if self.g.producer[t] == op]

    def outgoing(self, op: int) -> list[tuple[int, int]]:
        """The transfers of an op's outputs in use order."""
        mine = [key for key in self.transfers if self.g.producer[key[0]] == op]
        return sorted(mine, key=lambda key: self.transfers[key])

    def seconds(self, op: int, d: int) -> float:
        if self.op_seconds is not None:
            return float(self.op_seconds[op, d])
        g, r = self.g, self.r
        compute = sum(divide(g.flops[i], r["flops"][d][g.op_class[i]]) for i in self.members[op])
        weights = sum(g.weight[i] for i in self.members[op])
        read = weights + sum(g.size[t] for t in {g.use_tensor[u] for u in self.inputs(op)})
        write = sum(g.size[t] for t in self.outputs(op))
        moved = divide(read * g.unit, r["read"][d]) + divide(write * g.unit, r["write"][d])
        return max(compute, moved) + r["launch"][d]

    def transfer_seconds(self, t: int, source: int, target: int) -> float:
        size = self.g.size[t] * self.g.unit
        return self.r["latency"][source][target] + divide(size, self.r["link"][source][target])

    # Memory along the order of items.

    def measure(self, items: list[Item]) -> tuple[list[int], list[list[int]]]:
        g = self.g
        live = [0] * self.devices
        for op in self.ops:
            live[self.device[op]] += sum(g.weight[i] for i in self.members[op])
        peak = list(live)
        curve = []
        uses_left = {}  # (tensor, device) -> uses that have not run
        for u in self.uses:
            key = (g.use_tensor[u], self.device[self.consumer[u]])
            uses_left[key] = uses_left.get(key, 0) + 1
        pending = {}  # tensor -> transfers that have not been taken
        for t, _ in self.transfers:
            pending[t] = pending.get(t, 0) + 1

        def needed(t: int, d: int) -> bool:
            if uses_left.get((t, d), 0):
                return True
            at_home = d == self.device[g.producer[t]]
            return at_home and (pending.get(t, 0) > 0 or g.is_output[t])

        for item in items:
            if item.use is None:
                d = item.device
                live[d] += sum(g.size[t] for t in self.outputs(item.op))
                peak = [max(a, b) for a, b in zip(peak, live, strict=True)]
                curve.append(list(live))
                inputs = [g.use_tensor[u] for u in self.inputs(item.op)]
                for t in inputs:
                    uses_left[t, d] -= 1
                for t in set(inputs):
                    if not needed(t, d):
                        live[d] -= g.size[t]
                for t in self.outputs(item.op):
                    if not needed(t, d):
                        live[d] -= g.size[t]
            else:
                t, home = item.tensor, self.device[g.producer[item.tensor]]
                live[item.device] += g.size[t]
                peak = [max(a, b) for a, b in zip(peak, live, strict=True)]
                curve.append(list(live))
                pending[t] -= 1
                if not needed(t, home):
                    live[home] -= g.size[t]
        return peak, curve

    def finish(self, items: list[Item]) -> Run:
        peak, curve = self.measure(items)
        return Run(items, max(i.finish for i in items), peak, curve)

    # Static order.

    def static_order(self) -> list[tuple[str, Any]]:
        """("op", op) and ("transfer", (tensor, device)) in the order in which they are taken."""
        g = self.g
        priority = self.priority or [0.0] * self.n
        taken: list[tuple[str, Any]] = []
        waiting = [("op", op) for op in self.ops]
        if self.transfer_priority is not None:
            waiting += [("transfer", key) for key in self.transfers]

        def ready(item: tuple[str, Any]) -> bool:
            if item[0] == "transfer":
                return ("op", g.producer[item[1][0]]) in taken
            for u in self.inputs(item[1]):
                t, d = g.use_tensor[u], self.device[item[1]]
                local = self.device[g.producer[t]] == d
                if (("op", g.producer[t]) if local else ("transfer", (t, d))) not in taken:
                    return False
            return True

        def rank(item: tuple[str, Any]) -> tuple[float, int, int]:
            if item[0] == "op":
                return (-priority[item[1]], 0, item[1])
            use = self.transfers[item[1]]
            return (-self.transfer_priority[use], 1, use)

        while waiting:
            item = min((i for i in waiting if ready(i)), key=rank)
            waiting.remove(item)
            taken.append(item)
            if item[0] == "op" and self.transfer_priority is None:
                taken += [("transfer", key) for key in self.outgoing(item[1])]
        return taken

    def run_static(self, transfers: str = "async") -> Run:
        g = self.g
        clock = [0.0] * self.devices
        link: dict[Any, float] = {}
        finish: dict[int, float] = {}
        arrival: dict[tuple[int, int], float] = {}  # (tensor, device)
        items = []
        for kind, what in self.static_order():
            if kind == "op":
                d = self.device[what]
                arrived = [arrival[g.use_tensor[u], d] for u in self.inputs(what)]
                start = max([clock[d], *arrived])
                clock[d] = finish[what] = start + self.seconds(what, d)
                for t in self.outputs(what):
                    arrival[t, d] = finish[what]
                items.append(Item(what, d, start, finish[what]))
            else:
                t, d = what
                op = g.producer[t]
                s = self.device[op]
                took = self.transfer_seconds(t, s, d)
                if transfers == "blocking":
                    start = max(clock[s], clock[d], finish[op])
                    clock[s] = clock[d] = start + took
                elif transfers == "ports":
                    out, into = ("out of", s), ("into", d)
                    start = max(finish[op], link.get(out, 0.0), link.get(into, 0.0))
                    link[out] = link[into] = start + took
                else:
                    start = max(finish[op], link.get((s, d), 0.0))
                    link[s, d] = start + took
                arrival[t, d] = start + took
                items.append(Item(op, d, start, start + took, self.transfers[what], t))
        return self.finish(items)

    # Run-time order.

    def run_runtime(self, transfers: str = "async") -> Run:
        g = self.g
        clock = [0.0] * self.devices
        link: dict[Any, float] = {}
        arrival: dict[tuple[int, int], float] = {}
        items: list[Item] = []
        waiting = list(self.ops)
        while waiting:
            arrived = {}  # op -> when its last input arrives, if all were sent
            for op in waiting:
                needs = [(g.use_tensor[u], self.device[op]) for u in self.inputs(op)]
                if all(key in arrival for key in needs):
                    arrived[op] = max([0.0, *(arrival[key] for key in needs)])
            moments = {}
            for d in range(self.devices):
                mine = [arrived[op] for op in arrived if self.device[op] == d]
                if mine:
                    moments[d] = max(clock[d], min(mine))
            d = min(moments, key=lambda d: (moments[d], d))
            now = moments[d]
            choice = [op for op in arrived if self.device[op] == d and arrived[op] <= now]
            if self.priority is None:
                op = min(choice, key=lambda op: (arrived[op], op))
            else:
                op = min(choice, key=lambda op: (-self.priority[op], op))
            waiting.remove(op)
            clock[d] = now + self.seconds(op, d)
            items.append(Item(op, d, now, clock[d]))
            for t in self.outputs(op):
                arrival[t, d] = clock[d]
            for t, target in self.outgoing(op):
                held = [(d, target)]
                if transfers == "ports":
                    held = [("out of", d), ("into", target)]
                start = max([clock[d], *(link.get(way, 0.0) for way in held)])
                end = start + self.transfer_seconds(t, d, target)
                arrival[t, target] = end
                for way in held:
                    link[way] = end
                items.append(Item(op, target, start, end, self.transfers[t, target], t))
        return self.finish(items)


def capacities(graph: Any, hardware: Any) -> list[int]:
    unit = plain(graph).unit
    return [CAP if b / unit > CAP else math.floor(b / unit) for b in rates(hardware)["bytes"]]


def upper_bound_s(graph: Any, hardware: Any, op_seconds: Any = None) -> float:
    """U: above every feasible makespan; always of the unfused graph."""
    oracle = Oracle(graph, hardware, op_seconds=op_seconds)
    devices = range(oracle.devices)
    total = sum(max(oracle.seconds(op, d) for d in devices) for op in oracle.ops)
    pairs = [(a, b) for a in devices for b in devices if a != b]
    for t in oracle.g.use_tensor:
        total += max((oracle.transfer_seconds(t, a, b) for a, b in pairs), default=0.0)
    return total


def outcome(
    run: Run,
    graph: Any,
    hardware: Any,
    *,
    objective: str,
    reference_cost: float | None = None,
    op_seconds: Any = None,
) -> dict[str, Any]:
    """Cost, feasibility and reward of a run."""
    if objective == "peak_memory":
        cost, feasible, e = max(run.peak_units) * plain(graph).unit, True, 0.0
    else:
        limits = capacities(graph, hardware)
        pairs = list(zip(run.peak_units, limits, strict=True))
        feasible = all(peak <= limit for peak, limit in pairs)
        e = max(max(peak - limit, 0) / max(limit, 1) for peak, limit in pairs)
        cost = run.makespan_s
        if not feasible:
            cost = (upper_bound_s(graph, hardware, op_seconds) + 1e-9) * (2 + e)
    reward = None
    if reference_cost is not None:
        if not feasible:
            reward = -(1 + e / (1 + e))
        else:
            reward = (reference_cost / cost) ** 2 - 1 if cost > 0 else 0.0
    return {"cost": cost, "feasible": feasible, "reward": reward}
