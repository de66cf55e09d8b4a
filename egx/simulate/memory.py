"""Memory placement on one accelerator: ops run in index order on device 0.

A loop over ops keeps P candidates side by side: each of its steps is a few operations on rows of
P numbers. Callers write `vmap` over single maps; a batching rule brings them into this layout.

Rectification comes first and knows only integers; then the seconds of the settled map. No float
is a product that is then added (see cost.py), and sums run in the order of ops and uses, so that
a map has the same latency to the last bit in any batch, with and without jit.

Shapes: N ops, T tensors, U uses, M levels, P candidates, G graphs, K uses per step, L steps.
"""

from __future__ import annotations

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from egx.graph.graph import Graph
from egx.hardware.spec import Hardware
from egx.simulate.cost import (
    compute_seconds,
    dead_units,
    last_uses,
    read_seconds,
    use_units,
    write_seconds,
)

USES_PER_STEP = 2
# Steps of the loops without stores that one iteration takes: the compiler fuses them.
UNROLL = 4
# Up to so many levels both choices of an op fit one byte.
BYTE_LEVELS = 8


class MemoryTable(eqx.Module):
    """A graph laid out for the loop: an op takes a step, and one more for every K further uses.

    Its weights and outputs are placed on its first step, inputs are dropped as they are read, its
    seconds count on its last step. Only the first `steps` of L steps are used; L depends on the
    padded shape alone.
    """

    steps: Int[Array, ""]
    op: Int[Array, " L"]
    first_step: Int[Array, " N"]
    is_first: Bool[Array, " L"]
    is_last: Bool[Array, " L"]
    producer: Int[Array, "L K"]
    freed_units: Int[Array, "L K"]
    weight_units: Int[Array, " L"]
    output_units: Int[Array, " L"]
    dead_units: Int[Array, " L"]
    read_s: Float[Array, "L K M"]
    write_s: Float[Array, "L M"]
    weight_s: Float[Array, "L M"]
    streams: Bool[Array, " L"]
    compute_s: Float[Array, " L"]
    launch_s: Float[Array, " L"]
    capacity_units: Int[Array, " M"]
    total_units: Int[Array, ""]
    op_mask: Bool[Array, " N"]


class MemoryRun(eqx.Module):
    """What one run of a map gives; `weights` and `activations` are the levels that were run.

    `moved_units` is 0 for exactly the valid maps: the units that rectification moved, or, without
    it, the number of levels that overflow.
    """

    latency_s: Float[Array, ""]
    moved_units: Int[Array, ""]
    weights: Int[Array, " N"]
    activations: Int[Array, " N"]


def memory_table(graph: Graph, hardware: Hardware, capacity_units: Int[Array, " M"]) -> MemoryTable:
    """Lays `graph` out for device 0 of `hardware`.

    `capacity_units` comes from `Hardware.capacity_units`, which is exact only outside a trace.
    """
    n, u, k = graph.num_ops, graph.num_uses, USES_PER_STEP
    # A whole number of unrolled iterations.
    length = -(-(n + u // k) // UNROLL) * UNROLL
    ones = graph.use_mask.astype(jnp.int32)
    uses = jax.ops.segment_sum(ones, graph.use_consumer, n, indices_are_sorted=True)
    op_steps = jnp.where(graph.op_mask, jnp.maximum(1, -(-uses // k)), 0)
    end = jnp.cumsum(op_steps)
    first_step = end - op_steps
    ops = jnp.arange(n)

    def mark(steps: Int[Array, " N"]) -> Bool[Array, " L"]:
        steps = jnp.where(graph.op_mask, steps, length)
        return jnp.zeros(length, bool).at[steps].set(True, mode="drop")

    is_first, is_last = mark(first_step), mark(end - 1)
    op = jnp.zeros(length, jnp.int32)
    op = op.at[jnp.where(graph.op_mask, first_step, length)].set(ops, mode="drop")
    op = jax.lax.cummax(op)

    def at(flags: Bool[Array, " L"], values: Array) -> Array:
        rows = jnp.expand_dims(flags, tuple(range(1, values.ndim)))
        return jnp.where(rows, values[op], jnp.zeros((), values.dtype))

    # A use's place: its rank among the uses of its op, K to a step.
    rank = jnp.arange(u) - (jnp.cumsum(uses) - uses)[graph.use_consumer]
    row = jnp.where(graph.use_mask, first_step[graph.use_consumer] + rank // k, length)

    def place(values: Array) -> Array:
        empty = jnp.zeros((length, k, *values.shape[1:]), values.dtype)
        return empty.at[row, rank % k].set(values, mode="drop")

    units = use_units(graph)
    return MemoryTable(
        steps=end[-1],
        op=op,
        first_step=jnp.minimum(first_step, length - 1),
        is_first=is_first,
        is_last=is_last,
        producer=place(graph.use_producer()),
        freed_units=place(jnp.where(last_uses(graph), units, 0)),
        weight_units=at(is_first, graph.weight_units),
        output_units=at(is_first, graph.output_units()),
        dead_units=at(is_first, dead_units(graph)),
        read_s=place(read_seconds(units, graph, hardware)),
        write_s=at(is_last, write_seconds(graph.output_units(), graph, hardware)),
        weight_s=at(is_last, read_seconds(graph.weight_units, graph, hardware)),
        streams=at(is_last, graph.weight_units > 0),
        compute_s=at(is_last, compute_seconds(graph, hardware)),
        launch_s=jnp.where(is_last, hardware.launch_s[0], 0.0),
        capacity_units=capacity_units,
        total_units=jnp.sum(graph.weight_units) + jnp.sum(graph.tensor_units),
        op_mask=graph.op_mask,
    )


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
    fields = _batched(prefetch, rectify)(table, weights[None], activations[None])
    return MemoryRun(*(field[0] for field in fields))


@functools.cache
def _batched(prefetch: int, rectify: bool) -> Any:
    """(table, weights [P, N], activations [P, N]) -> fields of MemoryRun, [P, ...] each, with
    the batching rules."""
    simulate = functools.partial(_population, prefetch=prefetch, rectify=rectify)

    @jax.custom_batching.custom_vmap
    def maps(table, weights, activations):
        return simulate(table, table.steps, weights, activations)

    @maps.def_vmap
    def _(size, batched, table, weights, activations):
        if any(jax.tree.leaves(batched[0])):
            arguments = _spread(size, batched, (table, weights, activations))
            out = tables(*arguments)
        else:
            # A further axis of maps (seeds, islands) joins the first.
            weights, activations = _spread(size, batched[1:], (weights, activations))
            flat = [x.reshape(-1, x.shape[-1]) for x in (weights, activations)]
            out = maps(table, *flat)
            out = jax.tree.map(lambda x: x.reshape(size, -1, *x.shape[1:]), out)
        return out, jax.tree.map(lambda _: True, out)

    @jax.custom_batching.custom_vmap
    def tables(table, weights, activations):
        # All graphs take the steps of the longest: a shared count keeps the loop a plain one.
        steps = jnp.max(table.steps)
        return jax.vmap(simulate, in_axes=(0, None, 0, 0))(table, steps, weights, activations)

    @tables.def_vmap
    def _(size, batched, table, weights, activations):
        if any(jax.tree.leaves(batched[0])):
            arguments = _spread(size, batched, (table, weights, activations))
            flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), arguments)
            out = tables(*flat)
            out = jax.tree.map(lambda x: x.reshape(size, -1, *x.shape[1:]), out)
        else:
            weights, activations = _spread(size, batched[1:], (weights, activations))
            graphs, n = weights.shape[1], weights.shape[-1]
            flat = [jnp.swapaxes(x, 0, 1).reshape(graphs, -1, n) for x in (weights, activations)]
            out = tables(table, *flat)
            out = jax.tree.map(
                lambda x: jnp.swapaxes(x.reshape(graphs, size, -1, *x.shape[2:]), 0, 1), out
            )
        return out, jax.tree.map(lambda _: True, out)

    return maps


def _spread(size: int, batched: Any, values: Any) -> Any:
    """Gives every array that has no batch axis one."""
    leaves, structure = jax.tree.flatten(values)
    flags = jax.tree.leaves(batched)
    spread = [
        x if flag else jnp.broadcast_to(x, (size, *x.shape))
        for flag, x in zip(flags, leaves, strict=True)
    ]
    return jax.tree.unflatten(structure, spread)


def _population(
    table: MemoryTable,
    steps: Int[Array, ""],
    weights: Int[Array, "P N"],
    activations: Int[Array, "P N"],
    *,
    prefetch: int,
    rectify: bool,
) -> tuple[Array, Array, Array, Array]:
    levels = _pack(weights, activations, table.capacity_units.shape[0]).T
    if rectify:
        levels, moved = _rectified(table, steps, levels)
        settled = _split(levels.T)
        weights, activations = (
            jnp.where(table.op_mask, after.astype(jnp.int32), before)
            for after, before in zip(settled, (weights, activations), strict=True)
        )
    else:
        moved = _overfull(table, steps, levels)
    if prefetch:
        seconds = _prefetched(table, steps, levels, prefetch)
    else:
        seconds = _roofline(table, steps, levels)
    return seconds, moved, weights, activations


# Both choices of an op share one small integer: rows are short, and one store keeps both.


def _pack(weights: Array, activations: Array, levels: int) -> Array:
    dtype = jnp.int8 if levels <= BYTE_LEVELS else jnp.int32
    return _join(weights.astype(dtype), activations.astype(dtype))


def _join(weights: Array, activations: Array) -> Array:
    return weights * _base(weights) + activations


def _split(packed: Array) -> tuple[Array, Array]:
    # The base is a power of two: a mask and a shift.
    base = _base(packed)
    shift = jnp.asarray(int(base).bit_length() - 1, packed.dtype)
    return packed >> shift, packed & (base - jnp.asarray(1, packed.dtype))


def _base(packed: Array) -> np.integer:
    return np.int8(16) if packed.dtype == jnp.int8 else np.int32(65536)


def _row(array: Array, index: Array) -> Array:
    return jax.lax.dynamic_index_in_dim(array, index, 0, False, allow_negative_indices=False)


def _pick(level: Int[Array, " P"], values: Float[Array, " M"]) -> Float[Array, " P"]:
    # M is small: a chain of selects vectorises where a gather does not.
    picked = jnp.broadcast_to(values[0], level.shape)
    for m in range(1, values.shape[0]):
        picked = jnp.where(level == m, values[m], picked)
    return picked


def _at(level: Int[Array, " P"], m: int, units: Int[Array, ""]) -> Int[Array, " P"]:
    return jnp.where(level == m, units, 0)


def _settle(level: Int[Array, " P"], fits: list[Bool[Array, " P"]]) -> Int[Array, " P"]:
    """Moves each candidate's choice down to the fastest level not above it that fits."""
    for m in range(len(fits), 0, -1):
        level = jnp.where((level == m) & ~fits[m - 1], jnp.asarray(m - 1, level.dtype), level)
    return level


def _loop(table: MemoryTable, steps: Int[Array, ""], body: Any, carry: Any, unroll: int) -> Any:
    """Runs `body(step, row, carry)` over the steps in use; `row` is the table at that step."""
    fields = {
        name: value
        for name, value in vars(table).items()
        if name not in ("steps", "first_step", "capacity_units", "total_units", "op_mask")
    }

    def iteration(i: Array, carry: Any) -> Any:
        for j in range(unroll):
            step = i * unroll + j
            carry = body(step, _Row(**{name: _row(x, step) for name, x in fields.items()}), carry)
        return carry

    return jax.lax.fori_loop(0, (steps + unroll - 1) // unroll, iteration, carry)


class _Row(eqx.Module):
    """A step of a `MemoryTable`."""

    op: Array
    is_first: Array
    is_last: Array
    producer: Array
    freed_units: Array
    weight_units: Array
    output_units: Array
    dead_units: Array
    read_s: Array
    write_s: Array
    weight_s: Array
    streams: Array
    compute_s: Array
    launch_s: Array


def _overfull(
    table: MemoryTable, steps: Int[Array, ""], levels: Int[Array, "N P"]
) -> Int[Array, " P"]:
    """The number of levels that do not hold what the maps put on them."""
    fast = range(1, table.capacity_units.shape[0])

    def step(_, row, carry):
        used, most = carry
        weight, activation = _split(_row(levels, row.op))
        sources = [_split(_row(levels, row.producer[k]))[1] for k in range(USES_PER_STEP)]
        used, most, placed = list(used), list(most), 0
        for j, m in enumerate(fast):
            stays = _at(weight, m, row.weight_units)
            placed = used[j] + stays + _at(activation, m, row.output_units)
            most[j] = jnp.maximum(most[j] + stays, placed)
            used[j] = placed - _at(activation, m, row.dead_units)
            for k, source in enumerate(sources):
                used[j] = used[j] - _at(source, m, row.freed_units[k])
        return used, most

    zeros = jnp.zeros(levels.shape[1], jnp.int32)
    rows = [zeros for _ in fast]
    _, most = _loop(table, steps, step, (rows, rows), UNROLL)
    over = [
        (high > table.capacity_units[m]).astype(jnp.int32)
        for m, high in zip(fast, most, strict=True)
    ]
    return sum(over, zeros)


def _rectified(
    table: MemoryTable, steps: Int[Array, ""], levels: Int[Array, "N P"]
) -> tuple[Int[Array, "N P"], Int[Array, " P"]]:
    """The rectified maps, and the units that moved.

    One pass suffices: all that was placed before an op's outputs was born earlier, so from its
    step on it only shrinks, and they fit if they fit beside what is held now (`used`). Weights
    stay for the whole run and must fit beside the most that was ever held (`most`, with the
    weights placed so far; before and after the step in hand no more is held than that).
    """
    fast = range(1, table.capacity_units.shape[0])
    capacity = table.capacity_units
    born = table.first_step[table.producer]
    population = levels.shape[1]

    def step(i, row, carry):
        # A store is put off to the next step, before its loads: one that follows loads of the
        # same step would make the compiler copy the whole buffer.
        store, last, used, most, moved = carry
        store = jax.lax.dynamic_update_index_in_dim(store, last, i, 0, allow_negative_indices=False)
        wanted = _row(levels, row.op)
        weight, activation = _split(wanted)
        before = weight, activation
        weight = _settle(
            weight,
            [high + row.weight_units <= capacity[m] for m, high in zip(fast, most, strict=True)],
        )
        stays = [_at(weight, m, row.weight_units) for m in fast]
        activation = _settle(
            activation,
            [
                now + stay + row.output_units <= capacity[m]
                for m, now, stay in zip(fast, used, stays, strict=True)
            ],
        )
        moved = moved + jnp.where(weight == before[0], 0, row.weight_units)
        moved = moved + jnp.where(activation == before[1], 0, row.output_units)
        # Row 0 is never read: step i is stored in row i + 1.
        sources = [_split(_row(store, _row(born, i)[k] + 1))[1] for k in range(USES_PER_STEP)]
        used, most = list(used), list(most)
        for j, m in enumerate(fast):
            placed = used[j] + stays[j] + _at(activation, m, row.output_units)
            most[j] = jnp.maximum(most[j] + stays[j], placed)
            used[j] = placed - _at(activation, m, row.dead_units)
            for k, source in enumerate(sources):
                used[j] = used[j] - _at(source, m, row.freed_units[k])
        return store, _join(weight, activation), used, most, moved

    store = jnp.zeros((table.op.shape[0] + 1, population), levels.dtype)
    zeros = jnp.zeros(population, jnp.int32)
    rows = [zeros for _ in fast]
    carry = (store, store[0], rows, rows, zeros)
    store, last, _, _, moved = _loop(table, steps, step, carry, 1)
    store = jax.lax.dynamic_update_index_in_dim(store, last, steps, 0, allow_negative_indices=False)
    return store[table.first_step + 1], moved


def _roofline(
    table: MemoryTable, steps: Int[Array, ""], levels: Int[Array, "N P"]
) -> Float[Array, " P"]:
    """Seconds of the maps when each op overlaps its compute with all its traffic."""

    def step(_, row, carry):
        clock, read = carry
        weight, activation = _split(_row(levels, row.op))
        read = _read(row, levels, read)
        traffic = read + _pick(activation, row.write_s) + _pick(weight, row.weight_s)
        body = jnp.maximum(row.compute_s, traffic) + row.launch_s
        return clock + jnp.where(row.is_last, body, 0.0), read

    zeros = jnp.zeros(levels.shape[1], jnp.float32)
    clock, _ = _loop(table, steps, step, (zeros, zeros), UNROLL)
    return clock


def _prefetched(
    table: MemoryTable, steps: Int[Array, ""], levels: Int[Array, "N P"], prefetch: int
) -> Float[Array, " P"]:
    """Seconds of the maps when weights stream ahead of their op by at most `prefetch` ops."""
    count = table.capacity_units.shape[0]
    population = levels.shape[1]
    # With a window as long as the graph no op waits for the start of another.
    window = prefetch if prefetch < table.op_mask.shape[0] else 0

    def step(_, row, carry):
        clock, read, free, starts, start, slot = carry
        # Starts of the last ops in a ring; the store is put off to the next step (see above).
        if window:
            starts = jax.lax.dynamic_update_index_in_dim(
                starts, start, slot, 0, allow_negative_indices=False
            )
            slot = jnp.mod(row.op, window)
            earliest = _row(starts, slot)
            slot = jnp.where(row.is_last, slot, window)
        else:
            earliest = jnp.zeros(population, jnp.float32)
        weight, activation = _split(_row(levels, row.op))
        read = _read(row, levels, read)
        start = clock
        free = list(free)
        for m in range(count):
            here = row.streams & (weight == m)
            ready = jnp.maximum(free[m], earliest) + row.weight_s[m]
            free[m] = jnp.where(here, ready, free[m])
            start = jnp.where(here, jnp.maximum(clock, ready), start)
        body = jnp.maximum(row.compute_s, read + _pick(activation, row.write_s)) + row.launch_s
        clock = jnp.where(row.is_last, start + body, clock)
        return clock, read, free, starts, start, slot

    zeros = jnp.zeros(population, jnp.float32)
    starts = jnp.zeros((window + 1, population), jnp.float32)
    slot = jnp.full((), window, jnp.int32)
    free = [zeros for _ in range(count)]
    clock, *_ = _loop(table, steps, step, (zeros, zeros, free, starts, zeros, slot), 1)
    return clock


def _read(row: Any, levels: Int[Array, "N P"], read: Float[Array, " P"]) -> Float[Array, " P"]:
    """Seconds to read the inputs of the op at hand, up to the uses of this step."""
    read = jnp.where(row.is_first, 0.0, read)
    for k in range(USES_PER_STEP):
        read = read + _pick(_split(_row(levels, row.producer[k]))[1], row.read_s[k])
    return read
