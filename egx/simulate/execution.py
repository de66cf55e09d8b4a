"""One run of a plan on several devices: fusion, then either order (semantics 4.2 to 4.4).

Shapes: N ops, U uses, D devices.
"""

from __future__ import annotations

from collections.abc import Mapping

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from egx.graph.graph import Graph
from egx.simulate.batching import over_population
from egx.simulate.execution_table import ExecutionTable
from egx.simulate.fusion import cluster_roots, cluster_seconds
from egx.simulate.lanes import Plans, Trace
from egx.simulate.runtime import run_runtime
from egx.simulate.schedule import run_static


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
    blocking: bool = False,
    trace: bool = False,
) -> ExecutionRun:
    """Runs one plan; `vmap` over plans runs all of them in one piece.

    Args:
        graph: the graph of `table`.
        decisions: any of device, fusion [N] int32, priority [N] and transfer_priority [U] float32;
            an absent one is not decided.
        runtime: run-time order; else static order.
        blocking: transfers hold both devices (static order).
        trace: also say when everything starts and ends.
    """

    def population(shared, plans):
        graph, table = shared
        by_op = {name: jnp.moveaxis(value, 0, -1) for name, value in plans.items()}
        root = seconds = None
        if "fusion" in by_op:
            root = cluster_roots(graph, by_op["fusion"])
            seconds = cluster_seconds(table, by_op["device"], root)
        inner = Plans(
            device=by_op["device"],
            priority=by_op.get("priority"),
            transfer_priority=by_op.get("transfer_priority"),
            root=root,
            seconds=seconds,
        )
        if runtime:
            makespan, peak, times = run_runtime(table, inner, trace=trace)
        else:
            makespan, peak, times = run_static(table, inner, blocking=blocking, trace=trace)
        out = (makespan, peak, root, times)
        return jax.tree.map(lambda x: jnp.moveaxis(x, -1, 0), out)

    plans = dict(decisions)
    if "device" not in plans:
        plans["device"] = jnp.zeros(graph.num_ops, jnp.int32)
    out = over_population(population)((graph, table), plans)
    return ExecutionRun(*out)
