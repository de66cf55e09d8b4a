"""Topological orders of a graph: by the longest path to the end, by memory released, depth first.

Shapes: N real ops.
"""

from __future__ import annotations

import heapq

import numpy as np

from egx.problems.execution_plans.plan import Plan, peak_units
from egx.simulate.execution_table import Transfers, ways_of
from egx.simulate.host_case import HostCase


def upward_ranks(case: HostCase) -> np.ndarray:
    """Seconds [N] of the longest path from each op to the end, op and transfer seconds averaged
    over devices and over pairs of different devices."""
    mean = case.seconds.mean(1).tolist()
    pairs = max(case.num_devices * (case.num_devices - 1), 1)
    latency = float(case.link_latency_s.sum()) / pairs
    per_byte = float(case.link_s_per_byte.sum()) / pairs
    transfer = (latency + case.units * case.unit_bytes * per_byte).tolist()
    producer = case.producer.tolist()
    rank = [0.0] * case.num_ops
    for op in range(case.num_ops - 1, -1, -1):
        mine = rank[op] = rank[op] + mean[op]
        for tensor in case.inputs[op]:
            source = producer[tensor]
            rank[source] = max(rank[source], transfer[tensor] + mine)
    return np.asarray(rank)


def critical_path_order(case: HostCase) -> np.ndarray:
    """Ops by falling upward rank, then by index; topological, since ranks never rise."""
    return np.lexsort((np.arange(case.num_ops), -upward_ranks(case)))


def first_come_order(case: HostCase, device: np.ndarray, transfers: Transfers) -> np.ndarray:
    """Ops in the order in which they start at run time on the devices [N] given, first come, first
    served (semantics 4.3), in double precision: as priorities they bring about the same run."""
    on, producer = device.tolist(), case.producer.tolist()
    seconds = case.seconds[np.arange(case.num_ops), device].tolist()
    unit_bytes = (case.units * case.unit_bytes).tolist()
    latency, per_byte = case.link_latency_s.tolist(), case.link_s_per_byte.tolist()
    missing = [len(tensors) for tensors in case.inputs]
    arrival = [0.0] * case.num_ops
    clock = [0.0] * case.num_devices
    free: dict[tuple[int, int], float] = {}
    # Transfers of a producer start in the order of the uses that name them.
    outgoing: list[list[tuple[int, int]]] = [[] for _ in range(case.num_ops)]
    named = sorted(case.naming_uses(device).items(), key=lambda entry: entry[1])
    for (tensor, target), _ in named:
        outgoing[producer[tensor]].append((tensor, target))
    # Of each device the ops whose inputs were all sent, by arrival, then index.
    waiting: list[list[tuple[float, int]]] = [[] for _ in range(case.num_devices)]
    for op in range(case.num_ops):
        if missing[op] == 0:
            waiting[on[op]].append((0.0, op))
    order = []
    for _ in range(case.num_ops):
        starts = [(max(clock[d], heap[0][0]), d) for d, heap in enumerate(waiting) if heap]
        start, here = min(starts)
        _, op = heapq.heappop(waiting[here])
        order.append(op)
        finish = clock[here] = start + seconds[op]
        arrived = {(tensor, here): finish for tensor in case.outputs[op]}
        for tensor, target in outgoing[op]:
            took = latency[here][target] + unit_bytes[tensor] * per_byte[here][target]
            ways = ways_of(transfers, here, target)
            end = max(finish, *(free.get(way, 0.0) for way in ways)) + took
            free.update(dict.fromkeys(ways, end))
            arrived[tensor, target] = end
        for tensor in case.outputs[op]:
            for consumer in case.consumers[tensor]:
                arrival[consumer] = max(arrival[consumer], arrived[tensor, on[consumer]])
                missing[consumer] -= 1
                if missing[consumer] == 0:
                    heapq.heappush(waiting[on[consumer]], (arrival[consumer], consumer))
    return np.asarray(order, np.int64)


def depth_first_order(case: HostCase) -> np.ndarray:
    """Ops as they become ready, the newest first; what became ready together goes by index."""
    producer = case.producer.tolist()
    missing = [len({producer[t] for t in tensors}) for tensors in case.inputs]
    stack = [op for op in range(case.num_ops - 1, -1, -1) if missing[op] == 0]
    order = []
    while stack:
        op = stack.pop()
        order.append(op)
        following = sorted({c for t in case.outputs[op] for c in case.consumers[t]}, reverse=True)
        for consumer in following:
            missing[consumer] -= 1
            if missing[consumer] == 0:
                stack.append(consumer)
    return np.asarray(order, np.int64)


def memory_order(case: HostCase) -> np.ndarray:
    """The peak-memory counterpart of list scheduling: greedy by memory released, forwards and
    backwards, or depth first, whichever needs the lower peak on one device."""
    device = np.zeros(case.num_ops, np.int64)
    orders = [released_backwards(case), released_forwards(case), depth_first_order(case)]
    return min(orders, key=lambda order: int(peak_units(case, Plan(device, order))[0]))


def released_forwards(case: HostCase) -> np.ndarray:
    """Of the ready ops, always the one after which the least more is live (what it makes and
    keeps, less the inputs that it is the last to read); ties go to the op that became ready last.

    An op's key falls when it becomes the last reader of a tensor: at most once a tensor, so that
    a heap with outdated entries stays linear.
    """
    producer, units = case.producer.tolist(), case.units.tolist()
    is_output = case.is_output.tolist()
    readers = [len(c) for c in case.consumers]
    # The sum of the remaining readers: the last one, when one remains.
    remaining = [sum(c) for c in case.consumers]
    missing = [len({producer[t] for t in tensors}) for tensors in case.inputs]
    growth = [
        sum(units[t] for t in case.outputs[op] if readers[t] or is_output[t])
        for op in range(case.num_ops)
    ]
    ready_at = [0] * case.num_ops
    done = [False] * case.num_ops
    heap: list[tuple[int, int, int]] = []

    def is_last_reader(tensor: int) -> None:
        if is_output[tensor]:
            return
        op = remaining[tensor]
        growth[op] -= units[tensor]
        if missing[op] == 0:
            heapq.heappush(heap, (growth[op], -ready_at[op], op))

    for op in range(case.num_ops):
        if missing[op] == 0:
            heapq.heappush(heap, (growth[op], 0, op))
    for tensor in range(case.num_tensors):
        if readers[tensor] == 1:
            is_last_reader(tensor)
    order: list[int] = []
    while heap:
        key, _, op = heapq.heappop(heap)
        if done[op] or key != growth[op]:
            continue
        done[op] = True
        order.append(op)
        for tensor in case.inputs[op]:
            readers[tensor] -= 1
            remaining[tensor] -= op
            if readers[tensor] == 1:
                is_last_reader(tensor)
        for consumer in sorted({c for t in case.outputs[op] for c in case.consumers[t]}):
            missing[consumer] -= 1
            if missing[consumer] == 0:
                ready_at[consumer] = len(order)
                heapq.heappush(heap, (growth[consumer], -ready_at[consumer], consumer))
    return np.asarray(order, np.int64)


def released_backwards(case: HostCase) -> np.ndarray:
    """From the end: of the ops whose consumers all have a place, always the one before which the
    least more is live (the inputs that nobody after it reads, less what it makes); ties go to the
    op whose consumers were complete last.

    Backwards it is known which inputs are live anyway, so that this sees further than the same
    rule forwards. A tensor becomes live once and then eases the keys of all its readers.
    """
    producer, units = case.producer.tolist(), case.units.tolist()
    live = case.is_output.tolist()
    following = [
        len({c for t in case.outputs[op] for c in case.consumers[t]}) for op in range(case.num_ops)
    ]
    growth = [
        sum(units[t] for t in case.inputs[op] if not live[t])
        - sum(units[t] for t in case.outputs[op] if live[t] or case.consumers[t])
        for op in range(case.num_ops)
    ]
    done = [False] * case.num_ops
    complete_at = [0] * case.num_ops
    heap = [(growth[op], 0, -op) for op in range(case.num_ops) if following[op] == 0]
    heapq.heapify(heap)
    order: list[int] = []
    while heap:
        key, _, negative = heapq.heappop(heap)
        op = -negative
        if done[op] or key != growth[op]:
            continue
        done[op] = True
        order.append(op)
        for tensor in case.inputs[op]:
            if live[tensor]:
                continue
            live[tensor] = True
            for reader in case.consumers[tensor]:
                growth[reader] -= units[tensor]
                if following[reader] == 0 and not done[reader]:
                    heapq.heappush(heap, (growth[reader], -complete_at[reader], -reader))
        for source in {producer[t] for t in case.inputs[op]}:
            following[source] -= 1
            if following[source] == 0:
                complete_at[source] = len(order)
                heapq.heappush(heap, (growth[source], -complete_at[source], -source))
    return np.asarray(order[::-1], np.int64)
