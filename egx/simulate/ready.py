"""The set of ready items: ranks by priority, and a bitset over ranks with a word tree on top.

The highest ready item is found by counting leading zeros from the top word down, so taking and
adding cost one word per level: two levels to 1,024 items, three to 32,768.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from egx.simulate.indexing import put, take

Words = tuple[UInt32[Array, " _"], ...]

# Up to so many items it costs less to compare each with each than to sort (CPUs; a sort is linear).
MOST_COUNTED = 2048
BLOCK = 16


def ranked(priority: Float[Array, "P R"]) -> Int[Array, "P R"]:
    """Items by priority, highest first, ties to the lower index.

    A radix sort whose digits travel with their positions in one word: several times faster on
    CPUs than a sort of (key, index) pairs.
    """
    population, items = priority.shape
    index_bits = max(1, (items - 1).bit_length())
    digit_bits = 32 - index_bits
    bits = jax.lax.bitcast_convert_type(priority, jnp.uint32)
    # 0.0 and -0.0 are one priority. Compared as integers: a float comparison may flush subnormals.
    bits = jnp.where(bits << 1 == 0, jnp.uint32(0), bits)
    negative = bits >> 31 == 1
    key = jnp.where(negative, bits, bits ^ jnp.uint32(0x7FFFFFFF))
    position = jnp.arange(items, dtype=jnp.uint32)
    order = jnp.broadcast_to(jnp.arange(items, dtype=jnp.int32), (population, items))
    for shift in range(0, 32, digit_bits):
        digit = (_columns(key, order) >> shift) & jnp.uint32(2**digit_bits - 1)
        packed = (digit << index_bits) | position
        packed = jax.lax.sort(packed, dimension=1, is_stable=False)
        came_from = (packed & jnp.uint32(2**index_bits - 1)).astype(jnp.int32)
        order = _columns(order, came_from)
    return order


def counted(priority: Float[Array, "R P"]) -> Int[Array, "R P"]:
    """Each item's place by priority, highest first, ties to the lower index: how many stand before.

    Every item is compared with every other, a block of them at once, all candidates side by side:
    many more steps than a sort takes, but ones that a processor does eight or sixteen at a time.
    With smaller blocks XLA's CPU compiler does not vectorise them.
    """
    items, population = priority.shape
    bits = jax.lax.bitcast_convert_type(priority, jnp.int32)
    bits = jnp.where(bits << 1 == 0, 0, bits)
    key = jnp.where(bits < 0, bits ^ jnp.int32(0x7FFFFFFF), bits)
    nothing = jnp.full((-items % BLOCK, population), jnp.iinfo(jnp.int32).min, jnp.int32)
    rows = jnp.concatenate([key, nothing])
    index = jnp.arange(rows.shape[0], dtype=jnp.int32)[:, None]

    def step(block: Array, count: Array) -> Array:
        others = jax.lax.dynamic_slice_in_dim(rows, block * BLOCK, BLOCK)
        # Equal ones count where the whole block stands before the item.
        above = jnp.where((block + 1) * BLOCK <= index, rows - 1, rows)
        for k in range(BLOCK):
            count = count + (others[k] > above).astype(jnp.int32)
        return count

    count = jax.lax.fori_loop(0, rows.shape[0] // BLOCK, step, jnp.zeros_like(rows))
    # And equal ones before the item in its own block.
    block = rows.reshape(-1, BLOCK, population)
    within = index[:BLOCK]
    for k in range(BLOCK - 1):
        same = (block[:, k : k + 1] == block) & (within > k)
        count = count + same.astype(jnp.int32).reshape(count.shape)
    return count[:items]


def order_and_rank(priority: Float[Array, "R P"]) -> tuple[Int[Array, "R P"], Int[Array, "R P"]]:
    """Items by priority, highest first, ties to the lower index; and each item's place there."""
    if priority.shape[0] <= MOST_COUNTED:
        rank = counted(priority)
        return inverse(rank), rank
    order = ranked(priority.T).T
    return order, inverse(order)


def inverse(places: Int[Array, "R P"]) -> Int[Array, "R P"]:
    """Who stands at each place, from everybody's place, or the other way round."""
    items, population = places.shape
    lane = jnp.arange(population, dtype=jnp.int32)
    everybody = jnp.broadcast_to(jnp.arange(items, dtype=jnp.int32)[:, None], places.shape)
    at = (places * population + lane).reshape(-1)
    return put(jnp.zeros_like(at), at, everybody.reshape(-1)).reshape(places.shape)


def reorder(rows: Array, order: Int[Array, "R P"]) -> Array:
    """Column p of `rows` [R, P] in the order of column p of `order`."""
    population = order.shape[1]
    at = order * population + jnp.arange(population, dtype=jnp.int32)
    return take(rows.reshape(-1), at.reshape(-1)).reshape(order.shape)


def pack(ready: Bool[Array, "R P"]) -> Words:
    """The words of a set, lowest level first; each level flat, population innermost."""
    levels = []
    while True:
        count, population = ready.shape
        words = -(-count // 32)
        padded = jnp.zeros((words * 32, population), bool).at[:count].set(ready)
        weight = jnp.uint32(1) << (31 - jnp.arange(32, dtype=jnp.uint32))
        bits = jnp.where(padded.reshape(words, 32, population), weight[None, :, None], 0)
        level = jnp.sum(bits, 1, dtype=jnp.uint32)
        levels.append(level.reshape(-1))
        if words == 1:
            return tuple(levels)
        ready = level != 0


def add(words: Words, rank: Int[Array, " P"], where: Bool[Array, " P"]) -> Words:
    """The set with `rank` in it, for the candidates that `where` marks."""
    lane = jnp.arange(rank.shape[0], dtype=jnp.int32)
    out = []
    for word in words:
        bit = jnp.where(where, _bit(rank & 31), 0)
        rank = rank >> 5
        if word.shape == rank.shape:
            out.append(word | bit)
        else:
            index = rank * rank.shape[0] + lane
            out.append(put(word, index, take(word, index) | bit))
    return tuple(out)


def take_highest(
    words: Words, wanted: Bool[Array, " P"]
) -> tuple[Int[Array, " P"], Bool[Array, " P"], Words]:
    """(rank, found, the set without it), for the candidates that `wanted` marks."""
    population = wanted.shape[0]
    lane = jnp.arange(population, dtype=jnp.int32)
    top = words[-1]
    found = wanted & (top != 0)
    index = jnp.zeros(population, jnp.int32)
    path = []
    for word in reversed(words):
        flat = index * population + lane
        value = word if word.shape == index.shape else take(word, flat)
        bit = jnp.where(found, jax.lax.clz(value).astype(jnp.int32), 0)
        path.append((flat, value, bit))
        index = index * 32 + bit
    rank = index
    out = []
    clear = found
    for word, (flat, value, bit) in zip(words, reversed(path), strict=True):
        value = jnp.where(clear, value & ~_bit(bit), value)
        out.append(value if word.shape == value.shape else put(word, flat, value))
        clear = clear & (value == 0)
    return rank, found, tuple(out)


def _columns(rows: Array, index: Int[Array, "P R"]) -> Array:
    """Row p of `rows` [P, R] at the columns `index[p]`."""
    items = rows.shape[1]
    at = index + items * jnp.arange(rows.shape[0], dtype=jnp.int32)[:, None]
    return take(rows.reshape(-1), at.reshape(-1)).reshape(index.shape)


def _bit(position: Int[Array, " P"]) -> UInt32[Array, " P"]:
    return jnp.uint32(0x80000000) >> position.astype(jnp.uint32)
