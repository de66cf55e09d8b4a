"""Random keys: every candidate of every problem as numbers in [0, 1].

J. C. Bean, "Genetic Algorithms and Random Keys for Sequencing and Optimization", ORSA Journal on
Computing 6, 1994. A choice has one key for each of its values and takes the value of the largest;
a real is its key.

Shapes: L entries of a decision (padding included), G keys an entry, W keys of a candidate.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from egx.problems.base import AbstractProblem, Decisions

# Decisions differ in length and number of choices, so that neither has a name to be checked by.
Keys = dict[str, Float[Array, "*B _L _G"]]


def gene_shapes(problem: AbstractProblem) -> dict[str, tuple[int, int]]:
    """(L, G) of each decision: G is the number of choices, 1 for a real."""
    return {
        name: (problem.length(head), 1 if head.choices == "real" else head.choices)
        for name, head in problem.heads.items()
    }


def width(problem: AbstractProblem) -> int:
    """W: keys of a candidate, padding included."""
    return sum(length * count for length, count in gene_shapes(problem).values())


def flatten(problem: AbstractProblem, keys: Mapping[str, Array]) -> Float[Array, " W"]:
    """Keys as one vector: decision by decision, and in each value by value."""
    return jnp.concatenate([keys[name].T.reshape(-1) for name in problem.heads])


def unflatten(problem: AbstractProblem, flat: Float[Array, " W"]) -> Keys:
    """The inverse of `flatten`."""
    keys, start = {}, 0
    for name, (length, count) in gene_shapes(problem).items():
        keys[name] = flat[start : start + length * count].reshape(count, length).T
        start += length * count
    return keys


def decode(problem: AbstractProblem, keys: Mapping[str, Array]) -> Decisions:
    """The decisions that keys stand for; of equal keys the first wins."""
    return decode_flat(problem, flatten(problem, keys))


def decode_flat(problem: AbstractProblem, flat: Float[Array, " W"]) -> Decisions:
    """`decode` of keys in one vector."""
    decisions, start = {}, 0
    shapes = gene_shapes(problem)
    for name, head in problem.heads.items():
        length, count = shapes[name]
        part = flat[start : start + length * count].reshape(count, length)
        decisions[name] = part[0] if head.choices == "real" else first_largest(part)
        start += length * count
    return decisions


def first_largest(keys: Float[Array, "G L"]) -> Array:
    """The index of the largest key of each entry, int32; the lowest of a tie."""
    if keys.shape[0] > 8:
        return jnp.argmax(keys, 0).astype(jnp.int32)
    # A few comparisons of whole rows cost less than a reduction that carries an index.
    best, index = keys[0], jnp.zeros(keys.shape[1], jnp.int32)
    for value in range(1, keys.shape[0]):
        larger = keys[value] > best
        best = jnp.where(larger, keys[value], best)
        index = jnp.where(larger, value, index)
    return index


def encode(
    problem: AbstractProblem,
    decisions: Mapping[str, Array],
    *,
    low: float = 0.25,
    high: float = 0.75,
) -> Keys:
    """Keys of a plan.

    A choice has key `high` for its value and `low` for the others. Reals keep their order and
    ties, over all decisions together, and spread evenly over (0, 1): problems see no more of a
    real than that order.
    """
    ranked = _ranks(problem, decisions)
    keys = {}
    for name, head in problem.heads.items():
        value = jnp.asarray(decisions[name])
        if head.choices == "real":
            keys[name] = ranked[name][:, None]
        else:
            chosen = value[:, None] == jnp.arange(head.choices, dtype=value.dtype)
            keys[name] = jnp.where(chosen, jnp.float32(high), jnp.float32(low))
    return keys


def _ranks(problem: AbstractProblem, decisions: Mapping[str, Array]) -> dict[str, Array]:
    """Each real's mean rank among the real entries of all reals, as a share of their number."""
    reals = [(name, head) for name, head in problem.heads.items() if head.choices == "real"]
    if not reals:
        return {}
    # Adding zero makes one zero of two.
    values = jnp.concatenate([jnp.asarray(decisions[n], jnp.float32) + 0.0 for n, _ in reals])
    exists = jnp.concatenate([problem.mask(head) for _, head in reals])
    count = jnp.maximum(jnp.sum(exists.astype(jnp.int32)), 1).astype(jnp.float32)
    ordered = jnp.sort(jnp.where(exists, values, jnp.inf))
    below = jnp.searchsorted(ordered, values, side="left")
    upto = jnp.searchsorted(ordered, values, side="right")
    share = (below + upto).astype(jnp.float32) / (2.0 * count)
    share = jnp.where(exists, share, 0.5)
    ranked, start = {}, 0
    for name, head in reals:
        ranked[name] = share[start : start + problem.length(head)]
        start += problem.length(head)
    return ranked


def uniform_keys(problem: AbstractProblem, *, key: Array, batch: int) -> Float[Array, "B W"]:
    """`batch` candidates whose keys are uniform in [0, 1)."""
    return jax.random.uniform(key, (batch, width(problem)), jnp.float32)
