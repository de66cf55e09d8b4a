"""Graph partitioning by METIS, then a depth-first order.

Karypis and Kumar, "A Fast and High Quality Multilevel Scheme for Partitioning Irregular Graphs",
SIAM Journal on Scientific Computing 20, 1998, through pymetis.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from egx.baselines.execution_case import execution_problem, to_decisions
from egx.errors import MissingExtraError, SearchError
from egx.problems.base import AbstractProblem, Decisions
from egx.problems.execution_plans.fused import with_all_fused
from egx.problems.execution_plans.orders import (
    depth_first_order,
    first_come_order,
    memory_order,
)
from egx.problems.execution_plans.plan import Plan
from egx.simulate.execution_table import Transfers
from egx.simulate.host_case import HostCase

# METIS takes 32-bit weights and adds them up.
LARGEST_SUM = 2**30


def metis() -> Any:
    """pymetis, an optional extra.

    Raises:
        MissingExtraError: without pymetis.
    """
    try:
        import pymetis
    except ImportError as error:
        raise MissingExtraError(
            "graph partitioning needs pymetis: pip install 'egx[partition]'"
        ) from error
    return pymetis


def partition(
    problem: AbstractProblem, *, order: str = "depth_first", fused: bool = False, seed: int = 0
) -> Decisions:
    """Devices with few bytes on the links between them: balanced by op seconds, or for peak
    memory by bytes of weights and outputs. Devices that are faster, or hold more, get more.

    Args:
        order: "depth_first", "memory" (greedy by memory released), or "first_come" (as a
            framework without priorities would start the ops at run time).
        fused: everything that may be is fused first, and clusters are partitioned; the problem
            must decide fusion.
        seed: of METIS.

    Raises:
        SearchError: for another problem than `Execution`, an unknown order, or one that has
            nothing to fuse.
        MissingExtraError: without pymetis.
    """
    checked = execution_problem(problem, "partition")
    if order not in ORDERS:
        raise SearchError(f"order must be {', '.join(map(repr, ORDERS))}, got {order!r}")
    if fused and ("fusion" not in checked.decide or checked.fusion_levels < 2):
        decided = ", ".join(checked.decide)
        raise SearchError(f"partition has nothing to fuse: the problem decides {decided}")
    case = checked.host_case()
    by_bytes = checked.objective == "peak_memory"

    def make(cut: HostCase) -> Plan:
        device = metis_parts(cut, by_bytes=by_bytes, seed=seed)
        return Plan(device, ORDERS[order](cut, device, checked.transfers))

    plan = with_all_fused(case, checked.fusion_levels, make) if fused else make(case)
    return to_decisions(checked, case, plan)


ORDERS: dict[str, Callable[[HostCase, np.ndarray, Transfers], np.ndarray]] = {
    "depth_first": lambda case, device, transfers: depth_first_order(case),
    "memory": lambda case, device, transfers: memory_order(case),
    "first_come": first_come_order,
}


def metis_parts(case: HostCase, *, by_bytes: bool, seed: int = 0) -> np.ndarray:
    """The device [N] of each op.

    Raises:
        MissingExtraError: without pymetis.
    """
    pymetis = metis()
    count = case.num_devices
    if count == 1 or case.num_ops <= 1:
        return np.zeros(case.num_ops, np.int64)
    if by_bytes:
        size = (case.weight_units + case.output_units).astype(np.float64)
        # More than all of it is no reason to get more.
        share = np.minimum(case.capacity_units.astype(np.float64), size.sum())
    else:
        size = case.seconds.mean(1)
        total = case.seconds.sum(0)
        share = np.where(total > 0, 1.0 / np.where(total > 0, total, 1.0), 0.0)
    share = share / share.sum() if share.sum() > 0 else np.full(count, 1.0 / count)
    # A part of no size at all is refused.
    share = np.maximum(share, 1e-3)
    share /= share.sum()
    starts, adjacent, bytes_between = _neighbours(case)
    _, parts = pymetis.part_graph(
        count,
        pymetis.CSRAdjacency(starts.tolist(), adjacent.tolist()),
        vweights=_whole(size).tolist(),
        eweights=np.maximum(_whole(bytes_between), 1).tolist(),
        tpwgts=share.tolist(),
        recursive=count <= 8,
        options=pymetis.Options(seed=seed),
    )
    return np.asarray(parts, np.int64)


def _neighbours(case: HostCase) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The undirected graph of ops as compressed rows: (starts [N + 1], neighbours, units)."""
    pairs = np.unique(np.stack([case.use_consumer, case.use_tensor]), axis=1)
    consumer, source = pairs[0], case.producer[pairs[1]]
    units = case.units[pairs[1]].astype(np.float64)
    ends = np.concatenate([consumer, source]) * case.num_ops + np.concatenate([source, consumer])
    keys, inverse = np.unique(ends, return_inverse=True)
    sums = np.bincount(inverse, np.concatenate([units, units]), minlength=len(keys))
    rows, columns = keys // case.num_ops, keys % case.num_ops
    return np.searchsorted(rows, np.arange(case.num_ops + 1)), columns, sums


def _whole(values: np.ndarray) -> np.ndarray:
    """Whole numbers in proportion to `values`; their sum stays below what METIS can add up."""
    total = float(values.sum())
    if total <= 0:
        return np.ones(len(values), np.int64)
    return np.floor(values / total * LARGEST_SUM).astype(np.int64)
