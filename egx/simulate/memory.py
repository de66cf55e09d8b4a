"""Memory placement on one accelerator: ops run in index order on device 0.

`run` simulates one map. Callers write `vmap` over maps; batching rules bring a population into
the layout of the loops (memory_loops.py), candidates side by side in one row.

Shapes: N ops, P candidates, G graphs.
"""

from __future__ import annotations

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from egx.simulate.memory_loops import join, overfull, prefetched, rectified, roofline, split
from egx.simulate.memory_table import MemoryTable, memory_table

__all__ = ["MemoryRun", "MemoryTable", "memory_table", "run"]

# Candidates side by side on a CPU: more would leave the cache, and XLA would split each of the
# many small steps over threads.
BLOCK = 512


class MemoryRun(eqx.Module):
    """What one run of a map gives; `weights` and `activations` are the levels that were run.

    `moved_units` is 0 for exactly the valid maps: the units that rectification moved, or, without
    it, the number of levels that overflow.
    """

    latency_s: Float[Array, ""]
    moved_units: Int[Array, ""]
    weights: Int[Array, " N"]
    activations: Int[Array, " N"]


def run(
    table: MemoryTable,
    weights: Int[Array, " N"],
    activations: Int[Array, " N"],
    *,
    prefetch: int = 0,
    rectify: bool = True,
) -> MemoryRun:
    """Runs one map, rectified first unless `rectify` is False; meant to be vmapped, over maps or
    over tables of one shape or over both."""
    levels = join(weights, activations, count=table.capacity_units.shape[0])
    simulate = _batched(prefetch, rectify)
    seconds, moved, settled = (field[0] for field in simulate(table, levels[None]))
    if rectify:
        settled_weights, settled_activations = (x.astype(jnp.int32) for x in split(settled))
        weights = jnp.where(table.op_mask, settled_weights, weights)
        activations = jnp.where(table.op_mask, settled_activations, activations)
    return MemoryRun(seconds, moved, weights, activations)


@functools.cache
def _batched(prefetch: int, rectify: bool) -> Any:
    """(table, levels [P, N]) -> (seconds [P], moved [P], settled levels [P, N]), with rules for
    further axes of maps (seeds, islands) and of tables."""

    @jax.custom_batching.custom_vmap
    def maps(table: MemoryTable, levels: Array) -> Any:
        if levels.shape[0] <= BLOCK:
            return plain(table, levels)
        return jax.lax.platform_dependent(table, levels, cpu=blocks, default=plain)

    # Compiled once for calls outside jit, which would compile their loops each time.
    @jax.jit
    def simulate(table: MemoryTable, steps: Array, levels: Array) -> Any:
        rows = levels.T
        if rectify:
            rows, moved = rectified(table, steps, rows)
        else:
            moved = overfull(table, steps, rows)
        if prefetch:
            seconds = prefetched(table, steps, rows, prefetch)
        else:
            seconds = roofline(table, steps, rows)
        return seconds, moved, rows.T

    def plain(table: MemoryTable, levels: Array) -> Any:
        return simulate(table, table.steps, levels)

    def blocks(table: MemoryTable, levels: Array) -> Any:
        population, n = levels.shape
        count = -(-population // BLOCK)
        lanes = -(-population // count)
        padded = jnp.pad(levels, ((0, count * lanes - population), (0, 0)))
        out = jax.lax.map(lambda part: plain(table, part), padded.reshape(count, lanes, n))
        return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:population], out)

    @maps.def_vmap
    def _(size: int, batched: Any, table: MemoryTable, levels: Array) -> Any:
        levels = _spread(size, batched[1], levels)
        if any(jax.tree.leaves(batched[0])):
            out = tables(_spread(size, batched[0], table), levels)
        else:
            out = _folded(lambda flat: maps(table, flat), levels)
        return out, (True, True, True)

    @jax.custom_batching.custom_vmap
    def tables(table: MemoryTable, levels: Array) -> Any:
        # All graphs take the steps of the longest: a shared count keeps the loop a plain one.
        steps = jnp.max(table.steps)
        return jax.vmap(simulate, in_axes=(0, None, 0))(table, steps, levels)

    @tables.def_vmap
    def _(size: int, batched: Any, table: MemoryTable, levels: Array) -> Any:
        levels = _spread(size, batched[1], levels)
        if any(jax.tree.leaves(batched[0])):
            table = jax.tree.map(
                lambda x: x.reshape(-1, *x.shape[2:]), _spread(size, batched[0], table)
            )
            out = _folded(lambda flat: tables(table, flat), levels)
        else:
            # [S, G, P, N] -> [G, S, P, N]: a further axis of maps joins the population.
            swapped = jnp.swapaxes(levels, 0, 1)
            one = jax.vmap(lambda table, x: _folded(lambda flat: maps(table, flat), x))
            out = one(table, swapped)
            out = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), out)
        return out, (True, True, True)

    return maps


def _folded(function: Any, levels: Array) -> Any:
    """Applies a function of [B, ...] to [A, B, ...], both axes as one."""
    out = function(levels.reshape(-1, *levels.shape[2:]))
    return jax.tree.map(lambda x: x.reshape(*levels.shape[:2], *x.shape[1:]), out)


def _spread(size: int, batched: Any, values: Any) -> Any:
    """Gives every array that has no batch axis one."""
    flags = jax.tree.leaves(batched)
    leaves, structure = jax.tree.flatten(values)
    spread = [
        x if flag else jnp.broadcast_to(x, (size, *x.shape))
        for flag, x in zip(flags, leaves, strict=True)
    ]
    return jax.tree.unflatten(structure, spread)
