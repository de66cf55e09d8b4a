"""The ops that wait on each device with the moments at which they arrive.

Every device has a tree of minima over its ops, best op first, so that one descent finds either the
earliest arrival or the best op that has arrived by some moment. The nodes of a level stand in
blocks of siblings that are read in one piece; the blocks of a candidate's devices lie one behind
the other.

Shapes: N ops, D devices, P candidates, B siblings.
"""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from egx.simulate.indexing import pick, put, replace, take, take_window

LARGEST_BLOCK_BITS = 5


class Slots(eqx.Module):
    """Where each op stands in the tree of its device (`local` [N1 * P]), which op stands in a leaf
    (`op`, flat), and the first block of each device on each level, leaves first."""

    local: Int[Array, " _"]
    op: Int[Array, " _"]
    first: tuple[Int[Array, "D P"], ...]
    bits: int = eqx.field(static=True)


class Waiting(eqx.Module):
    """Minima by level, leaves first, blocks flat; and each device's earliest arrival. inf: none."""

    levels: tuple[Float[Array, " _"], ...]
    earliest: Float[Array, "D P"]


def block_bits(ops: int) -> int:
    """Blocks just large enough for two levels, if that is not too large."""
    needed = max(1, (max(ops, 1) - 1).bit_length())
    return min(LARGEST_BLOCK_BITS, -(-needed // 2))


def depth(ops: int) -> int:
    needed = max(1, (max(ops, 1) - 1).bit_length())
    return -(-needed // block_bits(ops))


def _blocks(ops: int, devices: int, level: int) -> int:
    """Enough blocks of a level for ops spread over the devices in any way."""
    return (ops >> (block_bits(ops) * (level + 1))) + devices


def slots(order: Int[Array, "N P"], device: Int[Array, "N P"], devices: int) -> Slots:
    """Slots of the ops, best first as `order` lists them."""
    n, population = device.shape
    lane = jnp.arange(population, dtype=jnp.int32)
    bits = block_bits(n)

    def step(counts, op):
        on = take(device.reshape(-1), op * population + lane)
        local = pick(counts, on)
        return replace(counts, on, local + 1), local

    counts, by_rank = jax.lax.scan(step, jnp.zeros((devices, population), jnp.int32), order)
    at = (order * population + lane).reshape(-1)
    local = put(jnp.zeros((n + 1) * population, jnp.int32), at, by_rank.reshape(-1))
    first = []
    for _ in range(depth(n)):
        # Whole blocks: none belongs to two devices.
        counts = (counts + (1 << bits) - 1) >> bits
        first.append(jnp.cumsum(counts, 0, dtype=jnp.int32) - counts)
    leaf = _node(first[0], device, local.reshape(n + 1, population)[:n], bits, 0)
    ops = jnp.broadcast_to(jnp.arange(n, dtype=jnp.int32)[:, None], leaf.shape)
    by_slot = jnp.zeros((_blocks(n, devices, 0) << bits) * population, jnp.int32)
    return Slots(local, put(by_slot, leaf.reshape(-1), ops.reshape(-1)), tuple(first), bits)


def _node(first: Array, device: Array, local: Array, bits: int, level: int) -> Array:
    """Flat index of the node over each op [..., P] on a level."""
    population = local.shape[-1]
    node = local >> (bits * level)
    base = pick(first, device) if local.ndim == 1 else jnp.take_along_axis(first, device, 0)
    block = (base + (node >> bits)) * population + jnp.arange(population, dtype=jnp.int32)
    return (block << bits) | (node & ((1 << bits) - 1))


def waiting(where: Slots, device: Int[Array, "N P"], start: Bool[Array, "N P"]) -> Waiting:
    """The trees when the ops that `start` marks have arrived at 0, and nothing else."""
    n, population = device.shape
    devices = where.first[0].shape[0]
    local = where.local.reshape(n + 1, population)[:n]
    value = jnp.where(start, 0.0, jnp.inf).astype(jnp.float32)
    levels = []
    for level, first in enumerate(where.first):
        size = (_blocks(n, devices, level) << where.bits) * population
        node = _node(first, device, local, where.bits, level)
        empty = jnp.full(size, jnp.inf, jnp.float32)
        levels.append(empty.at[node.reshape(-1)].min(value.reshape(-1), mode="promise_in_bounds"))
    each = jnp.arange(devices, dtype=jnp.int32)
    earliest = jax.lax.map(lambda d: jnp.min(jnp.where(device == d, value, jnp.inf), 0), each)
    return Waiting(tuple(levels), earliest)


def add(
    state: Waiting,
    where: Slots,
    op: Int[Array, " P"],
    device: Int[Array, " P"],
    arrival: Float[Array, " P"],
) -> Waiting:
    """The trees with `op` arriving at `arrival`; inf leaves them as they are."""
    population = op.shape[0]
    local = take(where.local, op * population + jnp.arange(population, dtype=jnp.int32))
    levels = []
    for level, (values, first) in enumerate(zip(state.levels, where.first, strict=True)):
        at = _node(first, device, local, where.bits, level)
        levels.append(put(values, at, jnp.minimum(take(values, at), arrival)))
    earliest = jnp.minimum(pick(state.earliest, device), arrival)
    return Waiting(tuple(levels), replace(state.earliest, device, earliest))


def take_best(
    state: Waiting,
    where: Slots,
    device: Int[Array, " P"],
    by: Float[Array, " P"],
    wanted: Bool[Array, " P"],
) -> tuple[Int[Array, " P"], Waiting]:
    """(op, the trees without it): the best op of `device` that arrives by the moment `by`; one
    must exist wherever `wanted` is set."""
    population, bits = device.shape[0], where.bits
    width = 1 << bits
    lane = jnp.arange(population, dtype=jnp.int32)
    sibling = jnp.arange(width, dtype=jnp.int32)
    node = jnp.zeros(population, jnp.int32)
    path = []
    for values, first in zip(reversed(state.levels), reversed(where.first), strict=True):
        start = ((pick(first, device) + node) * population + lane) << bits
        siblings = take_window(values, start, width)
        # The first that arrived; the last sibling stands in where there is none to be found.
        child = jnp.min(jnp.where(siblings <= by[:, None], sibling, width - 1), 1)
        path.append((values, start | child, siblings, child))
        node = (node << bits) | child
    op = take(where.op, path[-1][1])

    least = jnp.full(population, jnp.inf, jnp.float32)
    levels = []
    for values, at, siblings, child in reversed(path):
        old = take(values, at)
        new = jnp.where(wanted, least, old)
        levels.append(put(values, at, new))
        others = jnp.where(sibling == child[:, None], jnp.inf, siblings)
        least = jnp.minimum(jnp.min(others, 1), new)
    earliest = jnp.where(wanted, least, pick(state.earliest, device))
    return op, Waiting(tuple(levels), replace(state.earliest, device, earliest))
