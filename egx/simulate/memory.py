"""Memory placement on one accelerator: ops run in index order on device 0.

The loop over ops carries rows of P candidates, population innermost, so that each step is a few
contiguous vector operations; `vmap` over decisions reaches this layout through a batching rule.

Shapes: N ops, T tensors, U uses, M levels, P candidates, K uses per step, L steps of the loop.
"""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from egx.graph.graph import Graph
from egx.hardware.spec import Hardware

USES_PER_STEP = 2


class MemoryTable(eqx.Module):
    """A graph laid out for the loop: L steps, each with up to K uses and, when it is the last
    step of its op, the op itself. Seconds are per level, sizes in units."""

    op: Int[Array, " L"]
    is_last: Bool[Array, " L"]
    producer: Int[Array, "L K"]
    read_units: Int[Array, "L K"]
    freed_units: Int[Array, "L K"]
    weight_units: Int[Array, " L"]
    output_units: Int[Array, " L"]
    dead_units: Int[Array, " L"]
    compute_s: Float[Array, " L"]
    launch_s: Float[Array, " L"]
    read_s_per_unit: Float[Array, " M"]
    write_s_per_unit: Float[Array, " M"]
    capacity_units: Int[Array, " M"]
    total_units: Int[Array, ""]
    op_mask: Bool[Array, " N"]


class MemoryRun(eqx.Module):
    """What a run of a map gives; the arrays of decisions are those that were run. A population,
    if there is one, is the last axis."""

    latency_s: Float[Array, "*P"]
    moved_units: Int[Array, "*P"]
    weights: Int[Array, "N *P"]
    activations: Int[Array, "N *P"]


def last_uses(graph: Graph) -> Bool[Array, " U"]:
    """The use at whose op a tensor can be dropped: its last one, unless it is a graph output."""
    index = jnp.arange(graph.num_uses)
    real = jnp.where(graph.use_mask, index, -1)
    last = jax.ops.segment_max(real, graph.use_tensor, graph.num_tensors)
    held = graph.tensor_is_output[graph.use_tensor]
    return (last[graph.use_tensor] == index) & graph.use_mask & ~held


def num_steps(graph: Graph) -> int:
    """L: exact (rounded up to a bucket) for a concrete graph, else the bound N + U // K."""
    bound = graph.num_ops + graph.num_uses // USES_PER_STEP
    if isinstance(graph.use_consumer, jax.core.Tracer) or graph.use_consumer.ndim > 1:
        return bound
    uses = np.bincount(
        np.asarray(graph.use_consumer)[np.asarray(graph.use_mask)], minlength=graph.num_ops
    )
    exact = int(np.maximum(1, -(-uses // USES_PER_STEP)).sum())
    bucket = max(16, graph.num_ops // 16)
    return min(bound, -(-exact // bucket) * bucket)


def memory_table(
    graph: Graph, hardware: Hardware, capacity_units: Int[Array, " M"], steps: int
) -> MemoryTable:
    """Lays `graph` out for device 0 of `hardware`.

    `capacity_units` comes from `Hardware.capacity_units`, which is exact only outside a trace;
    `steps` is static and comes from `num_steps`.
    """
    length = steps
    n, u, k = graph.num_ops, graph.num_uses, USES_PER_STEP
    ones = graph.use_mask.astype(jnp.int32)
    uses = jax.ops.segment_sum(ones, graph.use_consumer, n, indices_are_sorted=True)
    op_steps = jnp.maximum(1, -(-uses // k))
    last_step = jnp.cumsum(op_steps) - 1
    first_step = last_step - op_steps + 1

    step_op = jnp.zeros(length, jnp.int32).at[last_step].set(jnp.arange(n), mode="drop")
    is_last = jnp.zeros(length, bool).at[last_step].set(graph.op_mask, mode="drop")

    # A use's place: its rank among the uses of its op, K to a step.
    rank = jnp.arange(u) - (jnp.cumsum(uses) - uses)[graph.use_consumer]
    row = jnp.where(graph.use_mask, first_step[graph.use_consumer] + rank // k, length)
    units = jnp.where(graph.use_mask, graph.tensor_units[graph.use_tensor], 0) if u else ones

    def place(values: Int[Array, " U"]) -> Int[Array, "L K"]:
        return jnp.zeros((length, k), jnp.int32).at[row, rank % k].set(values, mode="drop")

    used = jax.ops.segment_sum(ones, graph.use_tensor, graph.num_tensors) > 0
    dead = jnp.where(used | graph.tensor_is_output, 0, graph.tensor_units)
    dead = jax.ops.segment_sum(dead, graph.tensor_producer, n, indices_are_sorted=True)

    unit = graph.unit_bytes.astype(jnp.float32)
    compute = graph.flops / hardware.flops_per_s[0][graph.op_class]

    def at_last(values: Array) -> Array:
        return jnp.where(is_last, values[step_op], jnp.zeros((), values.dtype))

    return MemoryTable(
        op=step_op,
        is_last=is_last,
        producer=place(graph.use_producer()),
        read_units=place(units),
        freed_units=place(jnp.where(last_uses(graph), units, 0) if u else units),
        weight_units=at_last(graph.weight_units),
        output_units=at_last(graph.output_units()),
        dead_units=at_last(dead),
        compute_s=at_last(compute),
        launch_s=jnp.where(is_last, hardware.launch_s[0], 0.0),
        read_s_per_unit=unit / hardware.read_bytes_per_s[0],
        write_s_per_unit=unit / hardware.write_bytes_per_s[0],
        capacity_units=capacity_units,
        total_units=jnp.sum(graph.weight_units) + jnp.sum(graph.tensor_units),
        op_mask=graph.op_mask,
    )


def _pick(level: Int[Array, " P"], values: Float[Array, " M"]) -> Float[Array, " P"]:
    # M is small: a chain of selects vectorises where a gather does not.
    picked = jnp.broadcast_to(values[0], level.shape)
    for m in range(1, values.shape[0]):
        picked = jnp.where(level == m, values[m], picked)
    return picked


def _settle(level: Int[Array, " P"], fits: list[Bool[Array, " P"]]) -> Int[Array, " P"]:
    """Moves each candidate's choice down to the fastest level not above it that fits."""
    for m in range(len(fits), 0, -1):
        level = jnp.where((level == m) & ~fits[m - 1], m - 1, level)
    return level


def run_population(
    table: MemoryTable,
    weights: Int[Array, "N P"],
    activations: Int[Array, "N P"],
    *,
    prefetch: int = 0,
    rectify: bool = True,
) -> MemoryRun:
    """Runs P maps, population innermost; fields of the result end in P.

    With `rectify` each map is rectified while it runs: what does not fit its level moves to the
    next slower one, and `moved_units` is 0 exactly for valid maps. Without it the maps run as
    they are and `moved_units` is 0 exactly for valid maps, else the number of overfull steps.

    Why one pass suffices: when op i's outputs are placed, everything placed before was born
    earlier, so its occupancy never rises after step i; and weights must fit beside the highest
    peak so far.
    """
    n, population = activations.shape
    levels = table.capacity_units.shape[0]
    fast = range(1, levels)
    zeros = jnp.zeros(population, jnp.int32)
    seconds = jnp.zeros(population, jnp.float32)
    capacity = table.capacity_units

    def step(carry, row):
        settled_w, settled_a, held, peak, resident, moved, clock, read, freed, free, starts = carry
        i = row.op
        for k in range(USES_PER_STEP):
            source = jax.lax.dynamic_index_in_dim(settled_a, row.producer[k], 0, keepdims=False)
            units = row.read_units[k].astype(jnp.float32)
            read = read + units * _pick(source, table.read_s_per_unit)
            freed = [
                f + jnp.where(source == m, row.freed_units[k], 0)
                for m, f in zip(fast, freed, strict=True)
            ]
        w = jax.lax.dynamic_index_in_dim(weights, i, 0, keepdims=False)
        a = jax.lax.dynamic_index_in_dim(activations, i, 0, keepdims=False)
        before_w, before_a = w, a
        if rectify:
            w = _settle(
                w,
                [
                    r + p + row.weight_units <= capacity[m]
                    for m, r, p in zip(fast, resident, peak, strict=True)
                ],
            )
        resident = [
            r + jnp.where(w == m, row.weight_units, 0) for m, r in zip(fast, resident, strict=True)
        ]
        if rectify:
            a = _settle(
                a,
                [
                    r + h + row.output_units <= capacity[m]
                    for m, r, h in zip(fast, resident, held, strict=True)
                ],
            )
            moved = moved + jnp.where(w == before_w, 0, row.weight_units)
            moved = moved + jnp.where(a == before_a, 0, row.output_units)
        held = [h + jnp.where(a == m, row.output_units, 0) for m, h in zip(fast, held, strict=True)]
        peak = [jnp.maximum(p, h) for p, h in zip(peak, held, strict=True)]
        dead = [jnp.where(a == m, row.dead_units, 0) for m in fast]
        # Inputs that this op used last are dropped after it; on its earlier steps they only add up.
        held = [
            h - jnp.where(row.is_last, f + d, 0) for h, f, d in zip(held, freed, dead, strict=True)
        ]
        freed = [jnp.where(row.is_last, 0, f) for f in freed]

        write = row.output_units.astype(jnp.float32) * _pick(a, table.write_s_per_unit)
        load = row.weight_units.astype(jnp.float32) * _pick(w, table.read_s_per_unit)
        if prefetch == 0:
            body = jnp.maximum(row.compute_s, read + write + load) + row.launch_s
            clock = clock + jnp.where(row.is_last, body, 0.0)
        else:
            body = jnp.maximum(row.compute_s, read + write) + row.launch_s
            slot = jnp.mod(i, prefetch)
            earliest = jax.lax.dynamic_index_in_dim(starts, slot, 0, keepdims=False)
            streams = row.weight_units > 0
            start = clock
            for m in range(levels):
                ready = jnp.maximum(free[m], earliest) + load
                here = streams & (w == m)
                free = [*free[:m], jnp.where(here, ready, free[m]), *free[m + 1 :]]
                start = jnp.where(here, jnp.maximum(start, ready), start)
            clock = jnp.where(row.is_last, start + body, clock)
            starts = jax.lax.dynamic_update_index_in_dim(
                starts, jnp.where(row.is_last, start, earliest), slot, 0
            )
        read = jnp.where(row.is_last, 0.0, read)
        # Only the last step of an op may write: earlier steps and padding carry op 0.
        put_w = jnp.where(row.is_last, w, before_w)
        put_a = jnp.where(row.is_last, a, before_a)
        target = jnp.where(row.is_last, i, n)
        settled_w = settled_w.at[target].set(put_w, mode="drop")
        settled_a = settled_a.at[target].set(put_a, mode="drop")
        carry = (
            settled_w, settled_a, held, peak, resident, moved, clock, read, freed, free, starts
        )  # fmt: skip
        return carry, None

    rows = [zeros for _ in fast]
    carry = (
        weights,
        activations,
        list(rows),
        list(rows),
        list(rows),
        zeros,
        seconds,
        seconds,
        list(rows),
        [seconds for _ in range(levels)] if prefetch else [],
        jnp.zeros((prefetch, population), jnp.float32),
    )
    carry, _ = jax.lax.scan(step, carry, _rows(table))
    settled_w, settled_a, _, peak, resident, moved, clock, *_ = carry
    if not rectify:
        over = [
            (r + p > capacity[m]).astype(jnp.int32)
            for m, r, p in zip(fast, resident, peak, strict=True)
        ]
        moved = sum(over, zeros)
    return MemoryRun(clock, moved, settled_w, settled_a)


class _Row(eqx.Module):
    op: Array
    is_last: Array
    producer: Array
    read_units: Array
    freed_units: Array
    weight_units: Array
    output_units: Array
    dead_units: Array
    compute_s: Array
    launch_s: Array


def _rows(table: MemoryTable) -> _Row:
    return _Row(
        table.op,
        table.is_last,
        table.producer,
        table.read_units,
        table.freed_units,
        table.weight_units,
        table.output_units,
        table.dead_units,
        table.compute_s,
        table.launch_s,
    )


def run(
    table: MemoryTable,
    weights: Int[Array, " N"],
    activations: Int[Array, " N"],
    *,
    prefetch: int = 0,
    rectify: bool = True,
) -> MemoryRun:
    """Runs one map; `vmap` over maps of one graph reaches `run_population` in one piece."""

    def plain(table, weights, activations):
        out = run_population(
            table, weights[:, None], activations[:, None], prefetch=prefetch, rectify=rectify
        )
        return jax.tree.map(lambda x: x[..., 0], out)

    @jax.custom_batching.custom_vmap
    def one(table, weights, activations):
        return plain(table, weights, activations)

    @one.def_vmap
    def _(size, batched, table, weights, activations):
        table_batched, weights_batched, activations_batched = batched
        if any(jax.tree.leaves(table_batched)):
            axes = jax.tree.map(lambda b: 0 if b else None, batched)
            out = jax.vmap(plain, in_axes=axes)(table, weights, activations)
        else:
            spread = [
                x if is_batched else jnp.broadcast_to(x, (size, *x.shape))
                for x, is_batched in (
                    (weights, weights_batched),
                    (activations, activations_batched),
                )
            ]
            out = many(table, *spread)
        return out, jax.tree.map(lambda _: True, out)

    def many_plain(table, weights, activations):
        out = run_population(table, weights.T, activations.T, prefetch=prefetch, rectify=rectify)
        return jax.tree.map(lambda x: jnp.moveaxis(x, -1, 0), out)

    @jax.custom_batching.custom_vmap
    def many(table, weights, activations):
        return many_plain(table, weights, activations)

    @many.def_vmap
    def _(size, batched, table, weights, activations):
        # A second batch axis (seeds over populations) joins the first.
        table_batched, *rest = batched
        if any(jax.tree.leaves(table_batched)):
            axes = jax.tree.map(lambda b: 0 if b else None, batched)
            out = jax.vmap(many_plain, in_axes=axes)(table, weights, activations)
        else:
            spread = [
                x if is_batched else jnp.broadcast_to(x, (size, *x.shape))
                for x, is_batched in zip((weights, activations), rest, strict=True)
            ]
            population = spread[0].shape[1]
            flat = [x.reshape(size * population, x.shape[2]) for x in spread]
            out = many(table, *flat)
            out = jax.tree.map(lambda x: x.reshape(size, population, *x.shape[1:]), out)
        return out, jax.tree.map(lambda _: True, out)

    return one(table, weights, activations)
