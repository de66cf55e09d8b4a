"""Placements by hand: contiguous blocks of layers, one device, devices in turn.

Shapes: N real ops, D devices.
"""

from __future__ import annotations

import numpy as np

from egx.problems.execution_plans.plan import Plan
from egx.simulate.host_case import HostCase


def depths(case: HostCase) -> np.ndarray:
    """Ops [N] on the longest path from any op without inputs."""
    producer = case.producer.tolist()
    depth = [0] * case.num_ops
    for op, tensors in enumerate(case.inputs):
        for tensor in tensors:
            depth[op] = max(depth[op], depth[producer[tensor]] + 1)
    return np.asarray(depth, np.int64)


def layer_blocks(case: HostCase, *, by_bytes: bool = False) -> Plan:
    """Ops by depth, cut into one block a device, such that the largest block is least: by the
    seconds it takes on its own device, or by the bytes of its weights and outputs."""
    order = np.lexsort((np.arange(case.num_ops), depths(case)))
    if by_bytes:
        load = (case.weight_units + case.output_units).astype(np.float64)
        load = np.repeat(load[:, None], case.num_devices, 1)
    else:
        load = case.seconds
    device = np.empty(case.num_ops, np.int64)
    device[order] = contiguous_blocks(load[order])
    return Plan(device, order)


def contiguous_blocks(load: np.ndarray) -> np.ndarray:
    """The block [N] of each entry of `load` [N, D] when entries in their order are cut into D
    blocks whose largest sum, block d by column d, is least (to a relative 1e-6)."""
    count, blocks = load.shape
    sums = np.concatenate([np.zeros((1, blocks)), np.cumsum(load, 0)])

    def cut(limit: float) -> tuple[np.ndarray, bool]:
        at, ends = 0, []
        for d in range(blocks):
            at = int(np.searchsorted(sums[:, d], sums[at, d] + limit, side="right")) - 1
            ends.append(at)
        return np.asarray(ends), at >= count

    low, high = 0.0, float(sums[-1].min())
    for _ in range(40):
        middle = 0.5 * (low + high)
        if high - low <= 1e-6 * high:
            break
        low, high = (low, middle) if cut(middle)[1] else (middle, high)
    ends, _ = cut(high * (1.0 + 1e-9))
    ends[-1] = count
    return np.searchsorted(ends, np.arange(count), side="right")


def one_device(case: HostCase, order: np.ndarray | None = None) -> Plan:
    """Everything on the device that needs the fewest seconds, of those that can hold all weights
    where there are any."""
    total = case.seconds.sum(0)
    fits = case.capacity_units >= case.weight_units.sum()
    among = np.flatnonzero(fits) if fits.any() else np.arange(case.num_devices)
    best = int(among[np.argmin(total[among])])
    order = np.arange(case.num_ops) if order is None else order
    return Plan(np.full(case.num_ops, best, np.int64), order)


def round_robin(case: HostCase) -> Plan:
    """Op i on device i mod D, in index order."""
    every = np.arange(case.num_ops)
    return Plan(every % case.num_devices, every)
