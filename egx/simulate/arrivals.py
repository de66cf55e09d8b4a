"""The ops that wait on each device with the moments at which they arrive.

Every device has a tree of minima over its ops, best op first, so that one descent finds either the
earliest arrival or the best op that has arrived by some moment. Trees have four children a node;
the trees of a candidate lie one behind the other in one array a level.

Shapes: N ops, D devices, P candidates, S slots of a level.
"""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from egx.simulate.execution_table import pick, put, replace, take

FANOUT_BITS = 2
FANOUT = 1 << FANOUT_BITS


class Slots(eqx.Module):
    """Where each op stands in the tree of its device, and each level's first slot per device."""

    local: Int[Array, " _"]
    op: Int[Array, " _"]
    first: tuple[Int[Array, "D P"], ...]


class Waiting(eqx.Module):
    """Minima by level, leaves first, and each device's earliest arrival; inf for none."""

    levels: tuple[Float[Array, " _"], ...]
    earliest: Float[Array, "D P"]


def _depth(ops: int) -> int:
    depth = 1
    while FANOUT**depth < ops:
        depth += 1
    return depth


def slots(order: Int[Array, "N P"], device: Int[Array, "N P"], devices: int) -> Slots:
    """Slots of the ops, best first as `order` lists them."""
    n, population = device.shape
    lane = jnp.arange(population, dtype=jnp.int32)

    def step(counts, op):
        on = take(device.reshape(-1), op * population + lane)
        local = pick(counts, on)
        return replace(counts, on, local + 1), local

    counts, by_rank = jax.lax.scan(step, jnp.zeros((devices, population), jnp.int32), order)
    local = jnp.zeros((n + 1) * population, jnp.int32)
    local = put(local, (order * population + lane).reshape(-1), by_rank.reshape(-1))
    first = []
    for _ in range(_depth(n)):
        # Whole groups of siblings, so that no group belongs to two devices.
        sizes = -(-counts // FANOUT) * FANOUT
        first.append(jnp.cumsum(sizes, 0) - sizes)
        counts = -(-counts // FANOUT)
    base = jnp.take_along_axis(first[0], device, 0)
    at = (base + local.reshape(n + 1, population)[:n]) * population + lane
    ops = jnp.repeat(jnp.arange(n, dtype=jnp.int32), population)
    by_slot = jnp.zeros(_size(n, devices, 0) * population, jnp.int32)
    return Slots(local, put(by_slot, at.reshape(-1), ops), tuple(first))


def _size(ops: int, devices: int, level: int) -> int:
    return ops // FANOUT**level + FANOUT * devices


def waiting(where: Slots, device: Int[Array, "N P"], start: Bool[Array, "N P"]) -> Waiting:
    """The trees when the ops that `start` marks have arrived at 0, and nothing else."""
    n, population = device.shape
    devices = where.first[0].shape[0]
    lane = jnp.arange(population, dtype=jnp.int32)
    local = where.local.reshape(n + 1, population)[:n]
    value = jnp.where(start, 0.0, jnp.inf).astype(jnp.float32)
    levels = []
    for level, first in enumerate(where.first):
        node = jnp.take_along_axis(first, device, 0) + (local >> (FANOUT_BITS * level))
        empty = jnp.full(_size(n, devices, level) * population, jnp.inf, jnp.float32)
        at = (node * population + lane).reshape(-1)
        levels.append(empty.at[at].min(value.reshape(-1), mode="promise_in_bounds"))
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
    lane = jnp.arange(population, dtype=jnp.int32)
    node = take(where.local, op * population + lane)
    levels = []
    for level, (values, first) in enumerate(zip(state.levels, where.first, strict=True)):
        at = (pick(first, device) + (node >> (FANOUT_BITS * level))) * population + lane
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
    population = device.shape[0]
    lane = jnp.arange(population, dtype=jnp.int32)
    node = jnp.zeros(population, jnp.int32)
    path = []
    for values, first in zip(reversed(state.levels), reversed(where.first), strict=True):
        slot = pick(first, device) + node * FANOUT
        at = slot * population + lane
        children = [take(values, at + k * population) for k in range(FANOUT)]
        child = jnp.zeros(population, jnp.int32)
        for k in range(FANOUT - 1, 0, -1):
            child = jnp.where(children[k] <= by, k, child)
        child = jnp.where(children[0] <= by, 0, child)
        path.append((values, at + child * population, children, child))
        slot, node = slot + child, node * FANOUT + child
    op = take(where.op, slot * population + lane)

    least = jnp.full(population, jnp.inf, jnp.float32)
    levels = []
    for values, at, children, child in reversed(path):
        old = children[0]
        for k in range(1, FANOUT):
            old = jnp.where(child == k, children[k], old)
        new = jnp.where(wanted, least, old)
        levels.append(put(values, at, new))
        least = new
        for k in range(FANOUT):
            least = jnp.minimum(least, jnp.where(child == k, jnp.inf, children[k]))
    earliest = jnp.where(wanted, least, pick(state.earliest, device))
    return op, Waiting(tuple(levels), replace(state.earliest, device, earliest))
