"""What one would write for several devices without JAX: compiled loops on one core.

One candidate after the other, with a binary heap of ready ops and counters for memory; static
order, async transfers, no fusion.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np

from egx.problems.execution import Execution


@numba.njit(cache=True)
def _push(heap, count, item, priority):
    k = count
    while k > 0:
        parent = (k - 1) // 2
        above = heap[parent]
        if priority[item] < priority[above] or (priority[item] == priority[above] and item > above):
            break
        heap[k] = above
        k = parent
    heap[k] = item


@numba.njit(cache=True)
def _pop(heap, count, priority):
    best, last = heap[0], heap[count - 1]
    count -= 1
    k = 0
    while 2 * k + 1 < count:
        child = 2 * k + 1
        if child + 1 < count:
            a, b = heap[child], heap[child + 1]
            if priority[b] > priority[a] or (priority[b] == priority[a] and b < a):
                child += 1
        below = heap[child]
        if priority[last] > priority[below] or (priority[last] == priority[below] and last < below):
            break
        heap[k] = below
        k = child
    heap[k] = last
    return best


@numba.njit(cache=True)
def loop(
    device, priority, order, first_in, use_tensor, use_consumer, first_out, out_use, first_tensor,
    producer, units, is_output, weight, seconds, latency, rate, unit, makespan, peaks,
):  # fmt: skip
    """Static order, async transfers; with an `order` [1 or P, N] no queue is needed."""
    population, ops = device.shape
    devices, tensors = seconds.shape[1], len(units)
    queue = len(order) == 0
    heap, missing = np.empty(ops, np.int32), np.empty(ops, np.int32)
    ready, sent = np.empty(ops, np.float32), np.empty(tensors * devices, np.float32)
    left = np.empty(tensors * devices, np.int32)
    clock, link = np.empty(devices, np.float32), np.empty(devices * devices, np.float32)
    live, peak = np.empty(devices, np.int64), np.empty(devices, np.int64)
    for p in range(population):
        on, rank = device[p], priority[p]
        clock[:] = 0
        link[:] = 0
        live[:] = 0
        sent[:] = -1
        left[:] = 0
        count = 0
        for i in range(ops):
            missing[i] = first_in[i + 1] - first_in[i]
            ready[i] = 0
            live[on[i]] += weight[i]
            if queue and missing[i] == 0:
                _push(heap, count, i, rank)
                count += 1
        peak[:] = live
        for u in range(len(use_tensor)):
            left[use_tensor[u] * devices + on[use_consumer[u]]] += 1
        for step in range(ops):
            if queue:
                v = _pop(heap, count, rank)
                count -= 1
            else:
                v = order[p if len(order) > 1 else 0, step]
            d = on[v]
            finish = max(clock[d], ready[v]) + seconds[v, d]
            clock[d] = finish
            for t in range(first_tensor[v], first_tensor[v + 1]):
                live[d] += units[t]
            peak[d] = max(peak[d], live[d])
            for u in range(first_in[v], first_in[v + 1]):
                t = use_tensor[u]
                left[t * devices + d] -= 1
                if left[t * devices + d] == 0 and not (on[producer[t]] == d and is_output[t]):
                    live[d] -= units[t]
            for k in range(first_out[v], first_out[v + 1]):
                t, c = use_tensor[out_use[k]], use_consumer[out_use[k]]
                e = on[c]
                arrival = finish
                if e != d:
                    if sent[t * devices + e] < 0:
                        over = d * devices + e
                        took = latency[over] + units[t] * unit / rate[over]
                        link[over] = max(finish, link[over]) + took
                        sent[t * devices + e] = link[over]
                        live[e] += units[t]
                        peak[e] = max(peak[e], live[e])
                    arrival = sent[t * devices + e]
                ready[c] = max(ready[c], arrival)
                missing[c] -= 1
                if queue and missing[c] == 0:
                    _push(heap, count, c, rank)
                    count += 1
            for t in range(first_tensor[v], first_tensor[v + 1]):
                if left[t * devices + d] == 0 and not is_output[t]:
                    live[d] -= units[t]
        makespan[p] = clock.max()
        peaks[p] = peak


def loop_arguments(problem: Execution, order: np.ndarray | None = None) -> tuple[Any, ...]:
    """What `loop` takes between the plans and its results; `order` [1 or P, N] stands for a
    queue."""
    graph, hardware = problem.graph, problem.hardware
    ops = graph.num_ops
    producer, tensor = np.asarray(graph.tensor_producer), np.asarray(graph.use_tensor)
    consumer = np.asarray(graph.use_consumer)

    def first(index: np.ndarray) -> np.ndarray:
        return np.append(0, np.cumsum(np.bincount(index, minlength=ops)))

    return (
        np.zeros((0, 0), np.int32) if order is None else order,
        first(consumer),
        tensor,
        consumer,
        first(producer[tensor]),
        np.argsort(producer[tensor], kind="stable"),
        first(producer),
        producer,
        np.asarray(graph.tensor_units),
        np.asarray(graph.tensor_is_output),
        np.asarray(graph.weight_units),
        np.asarray(problem.table.op_seconds),
        np.asarray(hardware.link_latency_s).reshape(-1),
        np.asarray(hardware.link_bytes_per_s).reshape(-1),
        np.float32(graph.unit_bytes),
    )


def compiled_loop(
    problem: Execution, plans: dict[str, np.ndarray], order: np.ndarray | None
) -> Callable[[], tuple[np.ndarray, np.ndarray]]:
    """A call that values all plans: (makespan [P], peaks [P, D] in units)."""
    arguments = loop_arguments(problem, order)
    makespan = np.empty(len(plans["device"]), np.float32)
    peaks = np.empty((len(makespan), problem.hardware.num_devices), np.int64)

    def run() -> tuple[np.ndarray, np.ndarray]:
        loop(plans["device"], plans["priority"], *arguments, makespan, peaks)
        return makespan, peaks

    return run
