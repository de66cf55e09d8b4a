"""Reading and writing one entry per candidate, the way that costs least inside a loop.

Indices must exist: nothing is clamped or wrapped. Arrays that every candidate indexes at its own
place are flat; `rows` [K, P] hold a few values per candidate and are picked by comparison, which
vectorises where a gather does not.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

FEW_ROWS = 8

_ONE = jax.lax.GatherDimensionNumbers(
    offset_dims=(), collapsed_slice_dims=(0,), start_index_map=(0,)
)
_WINDOW = jax.lax.GatherDimensionNumbers(
    offset_dims=(1,), collapsed_slice_dims=(), start_index_map=(0,)
)
_PUT = jax.lax.ScatterDimensionNumbers(
    update_window_dims=(), inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0,)
)
_PROMISE = jax.lax.GatherScatterMode.PROMISE_IN_BOUNDS


def take(values: Array, index: Int[Array, " P"]) -> Array:
    """values[index] of a flat array."""
    return jax.lax.gather(values, index[:, None], _ONE, (1,), mode=_PROMISE)


def take_window(values: Array, start: Int[Array, " P"], width: int) -> Array:
    """`width` entries of a flat array from each start on: [P, width]."""
    return jax.lax.gather(values, start[:, None], _WINDOW, (width,), mode=_PROMISE)


def take_few(values: Array, index: Int[Array, " P"]) -> Array:
    """values[index] of a flat array, by comparison where it has a few entries."""
    if values.shape[0] > FEW_ROWS:
        return take(values, index)
    out = jnp.broadcast_to(values[0], index.shape)
    for k in range(1, values.shape[0]):
        out = jnp.where(index == k, values[k], out)
    return out


def put(values: Array, index: Int[Array, " P"], new: Array) -> Array:
    """A flat array with distinct entries replaced."""
    return jax.lax.scatter(
        values, index[:, None], new, _PUT, unique_indices=True, mode=_PROMISE
    )  # fmt: skip


def pick(rows: Array, index: Int[Array, " P"]) -> Array:
    """Row `index[p]` of column p of `rows` [K, P]."""
    count, population = rows.shape
    if count > FEW_ROWS:
        lane = jnp.arange(population, dtype=jnp.int32)
        return take(rows.reshape(-1), index * population + lane)
    out = rows[0]
    for k in range(1, count):
        out = jnp.where(index == k, rows[k], out)
    return out


def replace(rows: Array, index: Int[Array, " P"], new: Array) -> Array:
    """`rows` [K, P] with entry `index[p]` of column p replaced."""
    count, population = rows.shape
    if count > FEW_ROWS:
        lane = jnp.arange(population, dtype=jnp.int32)
        flat = put(rows.reshape(-1), index * population + lane, new)
        return flat.reshape(rows.shape)
    which = jnp.arange(count, dtype=jnp.int32)[:, None]
    return jnp.where(which == index, new, rows)
