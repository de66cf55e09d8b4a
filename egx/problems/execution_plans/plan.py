"""A plan for several devices as it is constructed on the host, and what it is worth.

Semantics of the static order, in double precision: `replay` is what the simulator does to a plan,
written for one plan at a time and for any size.

Shapes: N real ops, T real tensors, U real uses, D devices.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Sequence

import numpy as np

from egx.simulate.execution_table import Transfers, ways_of
from egx.simulate.host_case import HostCase


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """A device for each op, the order in which items are taken, and what is fused.

    Without `queue`, a transfer is taken with its producer. With it, the order of items is that of
    `queue`: an op as (op, -1), a transfer as (tensor, target device). What is computed of a plan
    in this file takes its ops as they are, without fusion.
    """

    device: np.ndarray  # [N]
    order: np.ndarray  # [N], op indices, first to last
    queue: Sequence[tuple[int, int]] | None = None
    fusion: np.ndarray | None = None  # [N], none where no op is fused


def index_plan(case: HostCase) -> Plan:
    """Everything on device 0, in index order."""
    return Plan(np.zeros(case.num_ops, np.int64), np.arange(case.num_ops))


def decisions_of(
    case: HostCase, plan: Plan, names: Sequence[str], ops: int, uses: int
) -> dict[str, np.ndarray]:
    """The decisions `names` of a plan, padded to `ops` and `uses`; reals lie in [0, 1].

    Evaluated, they take the items in the order of the plan: what is ready goes by priority, and
    an order that respects the graph has its first remaining item always ready.
    """
    out: dict[str, np.ndarray] = {}
    if "fusion" in names:
        out["fusion"] = np.zeros(ops, np.int32)
        if plan.fusion is not None:
            out["fusion"][: case.num_ops] = plan.fusion
    if "device" in names:
        out["device"] = np.zeros(ops, np.int32)
        out["device"][: case.num_ops] = plan.device
    op_rank = np.empty(case.num_ops, np.int64)
    op_rank[plan.order] = np.arange(case.num_ops)
    count = case.num_ops
    transfer_priority = np.zeros(uses, np.float32)
    named = case.naming_uses(plan.device) if "transfer_priority" in names else {}
    if named and plan.queue is None:
        # Before every op: each is taken when its producer was, in use order.
        transfer_priority[list(named.values())] = 1.0
    elif named and plan.queue is not None:
        count = len(plan.queue)
        for place, (what, target) in enumerate(plan.queue):
            if target < 0:
                op_rank[what] = place
            else:
                transfer_priority[named[what, target]] = _priority(np.array(place), count)
    if "priority" in names:
        out["priority"] = np.zeros(ops, np.float32)
        out["priority"][: case.num_ops] = _priority(op_rank, count)
    if "transfer_priority" in names:
        out["transfer_priority"] = transfer_priority
    return out


def _priority(place: np.ndarray, count: int) -> np.ndarray:
    """Above 0, below 1 and falling; distinct in float32 up to some four million items."""
    return np.asarray(1.0 - (place + 1.0) / (count + 1.0), np.float32)


def order_taken(case: HostCase, priority: np.ndarray) -> np.ndarray:
    """Ops [N] as they are taken by `priority` [N] when transfers go with their producers."""
    producer = case.producer.tolist()
    needs = [{producer[t] for t in tensors} for tensors in case.inputs]
    return np.asarray(list_order(needs, priority), np.int64)


def list_order(needs: Sequence[set[int]], priority: np.ndarray) -> list[int]:
    """Items in the order in which they are taken: again and again, of those whose `needs` were
    all taken, the one of highest priority; the lower index where two are equal."""
    rank = (-np.asarray(priority, np.float64)).tolist()
    readers: list[list[int]] = [[] for _ in needs]
    for item, wanted in enumerate(needs):
        for other in wanted:
            readers[other].append(item)
    missing = [len(wanted) for wanted in needs]
    ready = [(rank[item], item) for item, count in enumerate(missing) if count == 0]
    heapq.heapify(ready)
    order = []
    while ready:
        _, item = heapq.heappop(ready)
        order.append(item)
        for reader in readers[item]:
            missing[reader] -= 1
            if missing[reader] == 0:
                heapq.heappush(ready, (rank[reader], reader))
    return order


def replay(case: HostCase, plan: Plan, *, transfers: Transfers = "async") -> float:
    """The makespan of a plan in seconds."""
    return max(finish_times(case, plan, transfers=transfers)[1], default=0.0)


def finish_times(
    case: HostCase, plan: Plan, *, transfers: Transfers = "async"
) -> tuple[list[float], list[float]]:
    """(seconds [N] at which each op ends, seconds [D] at which each device does)."""
    device = plan.device.tolist()
    seconds = case.seconds[np.arange(case.num_ops), plan.device].tolist()
    clock = [0.0] * case.num_devices
    link: dict[tuple[int, int], float] = {}
    finish = [0.0] * case.num_ops
    arrived: dict[tuple[int, int], float] = {}
    producer = case.producer.tolist()
    unit_bytes = case.units * case.unit_bytes
    latency, per_byte = case.link_latency_s.tolist(), case.link_s_per_byte.tolist()

    def send(tensor: int, target: int) -> None:
        source, made = device[producer[tensor]], finish[producer[tensor]]
        took = latency[source][target] + float(unit_bytes[tensor]) * per_byte[source][target]
        if transfers == "blocking":
            end = max(made, clock[source], clock[target]) + took
            clock[source] = clock[target] = end
        else:
            ways = ways_of(transfers, source, target)
            end = max(made, *(link.get(way, 0.0) for way in ways)) + took
            link.update(dict.fromkeys(ways, end))
        arrived[tensor, target] = end

    def run(op: int) -> None:
        on = device[op]
        start = clock[on]
        for tensor in case.inputs[op]:
            source = producer[tensor]
            since = finish[source] if device[source] == on else arrived[tensor, on]
            start = max(start, since)
        clock[on] = finish[op] = start + seconds[op]

    if plan.queue is not None:
        for what, target in plan.queue:
            if target < 0:
                run(what)
            else:
                send(what, target)
    else:
        outgoing: list[list[tuple[int, int]]] = [[] for _ in range(case.num_ops)]
        # By use, which is the order in which a producer's transfers are taken.
        named = sorted(case.naming_uses(plan.device).items(), key=lambda entry: entry[1])
        for (tensor, target), _ in named:
            outgoing[producer[tensor]].append((tensor, target))
        for op in plan.order.tolist():
            run(op)
            for tensor, target in outgoing[op]:
                send(tensor, target)
    return finish, clock


def peak_units(case: HostCase, plan: Plan) -> np.ndarray:
    """The peak [D] of each device along the order of ops, transfers taken with their producers."""
    n, devices = case.num_ops, case.num_devices
    place = np.empty(n, np.int64)
    place[plan.order] = np.arange(n)
    home, born = plan.device[case.producer], place[case.producer]
    last = np.full((case.num_tensors, devices), -1, np.int64)
    np.maximum.at(last, (case.use_tensor, plan.device[case.use_consumer]), place[case.use_consumer])
    every = np.arange(case.num_tensors)
    last[every, home] = np.maximum(last[every, home], born)
    last[every[case.is_output], home[case.is_output]] = n - 1
    peaks = np.bincount(plan.device, case.weight_units, devices).astype(np.int64)
    for d in range(devices):
        here = last[:, d] >= 0
        change = np.zeros(n + 1, np.int64)
        np.add.at(change, born[here], case.units[here])
        np.subtract.at(change, last[here, d] + 1, case.units[here])
        peaks[d] += max(int(np.cumsum(change[:n]).max(initial=0)), 0)
    return peaks
