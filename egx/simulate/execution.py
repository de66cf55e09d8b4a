"""One run of a plan on several devices: fusion, then either order (semantics 4.2 to 4.4).

Shapes: N ops, U uses, D devices.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from egx.graph.graph import Graph
from egx.simulate.batching import Arrays, over_population
from egx.simulate.execution_table import ExecutionTable, Transfers, elsewhere
from egx.simulate.fusion import cluster_roots, cluster_seconds
from egx.simulate.lanes import Plans, Trace
from egx.simulate.one_order import MOST_DEVICES, order_of, run_one_order
from egx.simulate.runtime import run_runtime
from egx.simulate.schedule import run_static

_LARGEST_BYTES = 2**19
_LEAST_LANES = 64
_LARGEST_INDEX = 2**31 - 1


class ExecutionRun(eqx.Module):
    """What a plan gives; `root` is the cluster of each op and None without fusion. The arrays of
    a trace have their axis of ops or uses last."""

    makespan_s: Float[Array, ""]
    peak_units: Int[Array, " D"]
    root: Int[Array, " N"] | None
    trace: Trace | None


def execute(
    graph: Graph,
    table: ExecutionTable,
    decisions: Mapping[str, Array],
    *,
    runtime: bool = False,
    transfers: Transfers = "async",
    trace: bool = False,
) -> ExecutionRun:
    """Runs one plan; `vmap` over plans runs all of them in one piece.

    Args:
        graph: the graph of `table`.
        decisions: any of device, fusion [N] int32, priority [N] and transfer_priority [U] float32;
            an absent one is not decided.
        runtime: run-time order; else static order.
        transfers: "async" (each holds its link), "ports" (each holds the sender's way out and the
            receiver's way in), or in static order "blocking" (each holds both devices).
        trace: also say when everything starts and ends.
    """

    def population(shared: tuple[Graph, ExecutionTable], common: Arrays, each: Arrays) -> Any:
        graph, table = shared
        size = jax.tree.leaves(each)[0].shape[0]
        if one_order and set(each) == {"device"}:
            order = order_of(table, common.get("priority"))
            makespan, peak = run_one_order(table, each["device"].T, order)
            return makespan, peak.T, None, None

        columns = {name: jnp.moveaxis(value, 0, -1) for name, value in each.items()}
        for name, value in common.items():
            columns[name] = jnp.broadcast_to(value[:, None], (*value.shape, size))
        root = seconds = None
        if "fusion" in columns:
            root = cluster_roots(graph, columns["fusion"])
            seconds = cluster_seconds(table, columns["device"], root)
        inner = Plans(
            device=columns["device"],
            priority=columns.get("priority"),
            transfer_priority=columns.get("transfer_priority"),
            root=root,
            seconds=seconds,
        )
        if runtime:
            makespan, peak, times = run_runtime(table, inner, transfers=transfers, trace=trace)
        else:
            makespan, peak, times = run_static(table, inner, transfers=transfers, trace=trace)
        out = (makespan, peak, root, times)
        return jax.tree.map(lambda x: jnp.moveaxis(x, -1, 0), out)

    plans = dict(decisions)
    if "device" not in plans:
        plans["device"] = jnp.zeros(graph.num_ops, jnp.int32)
    one_order = transfers == "async" and not (runtime or trace)
    one_order = one_order and set(plans) <= {"device", "priority"}
    one_order = one_order and table.num_devices <= MOST_DEVICES

    def pieces(each: Arrays) -> int:
        if one_order and set(each) == {"device"}:
            return 1
        return _pieces(table, each)

    return ExecutionRun(*over_population(population, pieces=pieces)((graph, table), plans))


def _pieces(table: ExecutionTable, each: Arrays) -> int:
    """Into how many runs a population is cut.

    XLA's CPU compiler splits a look-up among threads when the array it looks into is large, which
    costs more than the look-up. Elsewhere wider is better, as far as indices reach.
    """
    entries = max(table.num_ops + 2, (table.num_tensors + 1) * elsewhere(table.num_devices))
    if "transfer_priority" in each:
        entries = max(entries, table.num_ops + table.num_uses + 1)
    if jax.default_backend() == "cpu":
        lanes = max(_LEAST_LANES, _LARGEST_BYTES // (4 * entries))
    else:
        lanes = max(1, _LARGEST_INDEX // entries)
    return -(-jax.tree.leaves(each)[0].shape[0] // lanes)
