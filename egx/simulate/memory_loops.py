"""The loops of the memory simulator: rectification, validity and seconds of P maps side by side.

A step is a few operations on rows of P numbers, so that P candidates cost little more than one.
Rectification knows only integers; then come the seconds of the settled maps. No float is a
product that is then added (see cost.py), and sums run in the order of ops and uses, so that a map
has the same latency to the last bit in any batch, with and without jit.

Shapes: N ops, M levels, P candidates.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from egx.simulate.memory_table import USES_PER_STEP, MemoryTable

# Up to so many levels, both choices of an op fit one byte.
BYTE_LEVELS = 8


# Both choices of an op share one small integer: rows are short, and one store keeps both.


def join(weights: Array, activations: Array, *, count: int | None = None) -> Array:
    """The packed choices; `count` levels decide the type, by default that of `weights`."""
    if count is not None:
        dtype = jnp.int8 if count <= BYTE_LEVELS else jnp.int32
        weights, activations = weights.astype(dtype), activations.astype(dtype)
    return weights * _base(weights) + activations


def split(packed: Array) -> tuple[Array, Array]:
    """(weights, activations) of packed choices, in their type."""
    # The base is a power of two: a mask and a shift.
    base = _base(packed)
    shift = jnp.asarray(int(base).bit_length() - 1, packed.dtype)
    return packed >> shift, packed & (base - jnp.asarray(1, packed.dtype))


def _base(packed: Array) -> np.integer:
    return np.int8(16) if packed.dtype == jnp.int8 else np.int32(65536)


def _row(array: Array, index: Array) -> Array:
    return jax.lax.dynamic_index_in_dim(array, index, 0, False, allow_negative_indices=False)


def _store(array: Array, row: Array, index: Array) -> Array:
    return jax.lax.dynamic_update_index_in_dim(array, row, index, 0, allow_negative_indices=False)


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


def _loop(table: MemoryTable, steps: Int[Array, ""], body: Any, carry: Any) -> Any:
    """Runs `body(step, row, carry)` over the steps in use; `row` is the table at that step.

    Not unrolled: the compiler would repeat shared work in each of more outputs.
    """
    fields = {field.name: getattr(table, field.name) for field in dataclasses.fields(_Row)}

    def iteration(i: Array, carry: Any) -> Any:
        return body(i, _Row(**{name: _row(x, i) for name, x in fields.items()}), carry)

    return jax.lax.fori_loop(0, steps, iteration, carry)


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


def overfull(
    table: MemoryTable, steps: Int[Array, ""], levels: Int[Array, "N P"]
) -> Int[Array, " P"]:
    """The number of levels that do not hold what the maps put on them."""
    fast = range(1, table.capacity_units.shape[0])

    def step(_, row, carry):
        used, most = carry
        weight, activation = split(_row(levels, row.op))
        sources = [split(_row(levels, row.producer[k]))[1] for k in range(USES_PER_STEP)]
        used, most = list(used), list(most)
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
    _, most = _loop(table, steps, step, (rows, rows))
    over = [
        (high > table.capacity_units[m]).astype(jnp.int32)
        for m, high in zip(fast, most, strict=True)
    ]
    return sum(over, zeros)


def rectified(
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
        store = _store(store, last, i)
        wanted = _row(levels, row.op)
        weight, activation = split(wanted)
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
        sources = [split(_row(store, _row(born, i)[k] + 1))[1] for k in range(USES_PER_STEP)]
        used, most = list(used), list(most)
        for j, m in enumerate(fast):
            placed = used[j] + stays[j] + _at(activation, m, row.output_units)
            most[j] = jnp.maximum(most[j] + stays[j], placed)
            used[j] = placed - _at(activation, m, row.dead_units)
            for k, source in enumerate(sources):
                used[j] = used[j] - _at(source, m, row.freed_units[k])
        return store, join(weight, activation), used, most, moved

    store = jnp.zeros((table.op.shape[0] + 1, population), levels.dtype)
    zeros = jnp.zeros(population, jnp.int32)
    rows = [zeros for _ in fast]
    carry = (store, store[0], rows, rows, zeros)
    store, last, _, _, moved = _loop(table, steps, step, carry)
    store = _store(store, last, steps)
    return store[table.first_step + 1], moved


def roofline(
    table: MemoryTable, steps: Int[Array, ""], levels: Int[Array, "N P"]
) -> Float[Array, " P"]:
    """Seconds of the maps when each op overlaps its compute with all its traffic."""

    def step(_, row, carry):
        clock, read = carry
        weight, activation = split(_row(levels, row.op))
        read = _read(row, levels, read)
        traffic = read + _pick(activation, row.write_s) + _pick(weight, row.weight_s)
        body = jnp.maximum(row.compute_s, traffic) + row.launch_s
        return _add(clock, jnp.where(row.is_last, body, 0.0)), read

    zeros = jnp.zeros(levels.shape[1], jnp.float32)
    clock, _ = _loop(table, steps, step, ((zeros, zeros), zeros))
    return clock[0]


def prefetched(
    table: MemoryTable, steps: Int[Array, ""], levels: Int[Array, "N P"], prefetch: int
) -> Float[Array, " P"]:
    """Seconds of the maps when weights stream ahead of their op by at most `prefetch` ops.

    Times of the channels are kept relative to the clock: as small numbers they keep their digits.
    """
    count = table.capacity_units.shape[0]
    zeros = jnp.zeros(levels.shape[1], jnp.float32)
    # The start of step i is stored in row i + 1, one step late (see above); row 0 stays zero. An
    # op starts on its last step, the one before the next op's first.
    after = table.op - prefetch + 1
    behind = jnp.where(after > 0, table.first_step[jnp.maximum(after, 0)], 0)

    def step(i, row, carry):
        clock, read, free, starts, start = carry
        starts = tuple(_store(s, x, i) for s, x in zip(starts, start, strict=True))
        high, low = (_row(s, _row(behind, i)) for s in starts)
        earliest = (high - clock[0]) + (low - clock[1])
        weight, activation = split(_row(levels, row.op))
        read = _read(row, levels, read)
        wait, free = zeros, list(free)
        for m in range(count):
            here = row.streams & (weight == m)
            ready = jnp.maximum(free[m], earliest) + row.weight_s[m]
            free[m] = jnp.where(here, ready, free[m])
            wait = jnp.where(here, jnp.maximum(ready, 0.0), wait)
        body = jnp.maximum(row.compute_s, read + _pick(activation, row.write_s)) + row.launch_s
        body = jnp.where(row.is_last, body, 0.0)
        start = _add(clock, wait)
        free = [f - (wait + body) for f in free]
        return _add(start, body), read, free, starts, start

    starts = jnp.zeros((table.op.shape[0] + 1, levels.shape[1]), jnp.float32)
    carry = ((zeros, zeros), zeros, [zeros] * count, (starts, starts), (zeros, zeros))
    clock, *_ = _loop(table, steps, step, carry)
    return clock[0]


def _add(
    clock: tuple[Float[Array, " P"], Float[Array, " P"]], seconds: Float[Array, " P"]
) -> tuple[Float[Array, " P"], Float[Array, " P"]]:
    """Kahan's sum: a clock and what its rounding dropped. A network repeats its layers, so that
    plain float32 sums err in one direction, by 1e-4 after 10,000 ops."""
    high, low = clock
    seconds = seconds + low
    total = high + seconds
    return total, seconds - (total - high)


def _read(row: Any, levels: Int[Array, "N P"], read: Float[Array, " P"]) -> Float[Array, " P"]:
    """Seconds to read the inputs of the op at hand, up to the uses of this step."""
    read = jnp.where(row.is_first, 0.0, read)
    for k in range(USES_PER_STEP):
        read = read + _pick(split(_row(levels, row.producer[k]))[1], row.read_s[k])
    return read
