"""Placements by hand: layers to devices in turn or in blocks, one device, devices in turn.

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
    device = np.empty(case.num_ops, np.int64)
    device[order] = contiguous_blocks(_load(case, by_bytes)[order])
    return Plan(device, order)


def layers_in_turn(case: HostCase) -> np.ndarray | None:
    """The device [N] of each op when layers go to the devices in turn, in the order in which they
    first appear; None where there are no named layers, or not enough to go round."""
    if not _has_layers(case):
        return None
    return np.asarray(case.layer % case.num_devices, np.int64)


def layers_in_blocks(case: HostCase, *, by_bytes: bool = False) -> np.ndarray | None:
    """The device [N] of each op when whole layers, in the order in which they first appear, are
    cut into one block a device whose largest is least, by seconds or by bytes of weights and
    outputs; None as in `layers_in_turn`."""
    if not _has_layers(case):
        return None
    load = np.zeros((int(case.layer.max()) + 1, case.num_devices))
    np.add.at(load, case.layer, _load(case, by_bytes))
    return np.asarray(contiguous_blocks(load)[case.layer], np.int64)


def _has_layers(case: HostCase) -> bool:
    if case.num_ops == 0 or case.layer.min() < 0:
        return False
    return int(case.layer.max()) + 1 >= case.num_devices


def _load(case: HostCase, by_bytes: bool) -> np.ndarray:
    """Load [N, D] of each op on each device: its seconds, or its bytes."""
    if not by_bytes:
        return case.seconds
    load = (case.weight_units + case.output_units).astype(np.float64)
    return np.repeat(load[:, None], case.num_devices, 1)


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
