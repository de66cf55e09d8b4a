"""The graph with everything fused that may be (semantics 4.4), as the host sees it.

Shapes: N real ops, C clusters, T real tensors, D devices.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from egx.problems.execution_plans.plan import Plan
from egx.simulate.fusion import LARGEST
from egx.simulate.host_case import HostCase


@dataclasses.dataclass(frozen=True, eq=False)
class FusedCase:
    """A case with one op for each cluster of another, in the order of the clusters' roots."""

    case: HostCase  # C ops
    members: list[np.ndarray]  # of each cluster, ascending: the root is the last
    tensors: np.ndarray  # which of the T tensors are left

    def expand(self, plan: Plan, fusion: np.ndarray) -> Plan:
        """A plan for the clusters as one for the ops, with the fusion decision [N] that makes
        them: members have the device of their root and come just before it."""
        device = np.empty(len(fusion), np.int64)
        for on, members in zip(plan.device.tolist(), self.members, strict=True):
            device[members] = on
        order = np.concatenate([self.members[k] for k in plan.order.tolist()])
        queue: list[tuple[int, int]] | None = None
        if plan.queue is not None:
            queue = []
            for what, target in plan.queue:
                if target < 0:
                    queue.extend((op, -1) for op in self.members[what].tolist())
                else:
                    queue.append((int(self.tensors[what]), target))
        return Plan(device, order, queue, fusion)


def with_all_fused(case: HostCase, levels: int, make: Callable[[HostCase], Plan]) -> Plan:
    """The plan that `make` has for the case with everything fused that may be, as a plan for its
    ops; with fewer than two `levels` of the fusion decision nothing may."""
    whole = fuse(case, full_clusters(case) if levels > 1 else np.arange(case.num_ops))
    return whole.expand(make(whole.case), np.full(case.num_ops, levels - 1, np.int64))


def full_clusters(case: HostCase) -> np.ndarray:
    """The root [N] of each op's cluster when all ops ask to be fused on one level.

    An op is asked before its producers, so that it is alone when it joins, and what it joins is
    settled.
    """
    root = list(range(case.num_ops))
    size = [1] * case.num_ops
    contracts = case.contraction.tolist()
    held = np.zeros(case.num_ops, bool)
    held[case.producer[case.is_output]] = True
    alone = (held | case.opaque | case.reduction).tolist()
    opaque = case.opaque.tolist()
    for op in range(case.num_ops - 1, -1, -1):
        if alone[op]:
            continue
        readers = {root[c] for tensor in case.outputs[op] for c in case.consumers[tensor]}
        if len(readers) != 1:
            continue
        (target,) = readers
        if opaque[target] or size[target] >= LARGEST or (contracts[target] and contracts[op]):
            continue
        root[op] = target
        size[target] += 1
        contracts[target] |= contracts[op]
    return np.asarray(root, np.int64)


def fuse(case: HostCase, root: np.ndarray) -> FusedCase:
    """The case whose ops are the clusters of `root` [N]."""
    roots, cluster = np.unique(root, return_inverse=True)
    count, devices = len(roots), case.num_devices
    by_cluster = np.argsort(cluster, kind="stable")
    ends = np.searchsorted(cluster[by_cluster], np.arange(count + 1))
    members = [by_cluster[ends[k] : ends[k + 1]] for k in range(count)]

    def total(values: np.ndarray) -> np.ndarray:
        sums = np.zeros((count, *values.shape[1:]), values.dtype)
        np.add.at(sums, cluster, values)
        return sums

    # Only a root's outputs are seen from outside.
    left = root[case.producer] == case.producer
    tensors = np.flatnonzero(left)
    renamed = np.cumsum(left) - 1
    consumer = cluster[case.use_consumer]
    outside = cluster[case.producer[case.use_tensor]] != consumer
    uses = np.flatnonzero(outside)
    uses = uses[np.argsort(consumer[uses], kind="stable")]
    weights, compute = total(case.weight_units), total(case.compute_s)
    fused = dataclasses.replace(
        case,
        producer=cluster[case.producer[tensors]],
        units=case.units[tensors],
        is_output=case.is_output[tensors],
        use_tensor=renamed[case.use_tensor[uses]],
        use_consumer=consumer[uses],
        weight_units=weights,
        opaque=case.opaque[roots],
        reduction=case.reduction[roots],
        contraction=total(case.contraction.astype(np.int64)) > 0,
        layer=case.layer[roots],
        seconds=np.zeros((count, devices)),
        compute_s=compute,
    )
    read = (weights + fused.input_units)[:, None] * case.unit_bytes / case.read_bytes_per_s
    written = fused.output_units[:, None] * case.unit_bytes / case.write_bytes_per_s
    seconds = np.maximum(compute, read + written) + case.launch_s
    return FusedCase(dataclasses.replace(fused, seconds=seconds), members, tensors)
