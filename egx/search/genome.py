"""Decisions of every kind as one flat vector, for searchers that work by moves.

Shapes: L entries (all decisions one after another, padding included), A of them active.
"""

from __future__ import annotations

from collections.abc import Mapping

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, UInt

from egx.problems.base import AbstractProblem, Decisions

Genes = Float[Array, " L"]


class Genome(eqx.Module):
    """The layout of a problem's decisions in one vector, and which entries matter.

    `head`, `position` and `choices` describe each entry (choices is 0 for a real in [0, 1]);
    `active_index` lists the active entries first, of which there are `active_count`.
    """

    head: Int[Array, " L"]
    position: Int[Array, " L"]
    choices: Float[Array, " L"]
    active: Bool[Array, " L"]
    active_index: Int[Array, " L"]
    active_count: Int[Array, ""]

    def __init__(self, problem: AbstractProblem):
        parts, active = [], problem.active()
        for index, (name, head) in enumerate(problem.heads.items()):
            length = problem.length(head)
            choices = 0 if head.choices == "real" else head.choices
            parts.append(
                (
                    jnp.full(length, index, jnp.int32),
                    jnp.arange(length, dtype=jnp.int32),
                    jnp.full(length, choices, jnp.float32),
                    active[name],
                )
            )
        self.head, self.position, self.choices, self.active = (
            jnp.concatenate(column) for column in zip(*parts, strict=True)
        )
        self.active_index = jnp.argsort(~self.active, stable=True).astype(jnp.int32)
        self.active_count = jnp.sum(self.active.astype(jnp.int32))


def encode(problem: AbstractProblem, decisions: Mapping[str, Array]) -> Genes:
    """Decisions as one vector."""
    return jnp.concatenate([decisions[name].astype(jnp.float32) for name in problem.heads])


def decode(problem: AbstractProblem, genes: Genes) -> Decisions:
    """The decisions that a vector stands for."""
    decisions, start = {}, 0
    for name, head in problem.heads.items():
        part = genes[start : start + problem.length(head)]
        decisions[name] = part if head.choices == "real" else part.astype(jnp.int32)
        start += problem.length(head)
    return decisions


def random_value(choices: Float[Array, "..."], uniform: Float[Array, "..."]) -> Array:
    """A uniform draw of each entry: one of its choices, or the real itself."""
    whole = jnp.minimum(jnp.floor(uniform * choices), choices - 1)
    return jnp.where(choices == 0, uniform, whole)


def random_entry(genome: Genome, *, key: PRNGKeyArray) -> Int[Array, ""]:
    """An active entry, uniformly."""
    index = jax.random.randint(key, (), 0, jnp.maximum(genome.active_count, 1), jnp.int32)
    return genome.active_index[index]


def change_one(genome: Genome, genes: Genes, *, key: PRNGKeyArray) -> Genes:
    """Draws one active entry anew."""
    entry_key, value_key = jax.random.split(key)
    entry = random_entry(genome, key=entry_key)
    value = random_value(genome.choices[entry], jax.random.uniform(value_key))
    return genes.at[entry].set(value)


def swap_two(genome: Genome, genes: Genes, *, key: PRNGKeyArray) -> Genes:
    """Exchanges an active entry with one of the same head that differs, half the time a near one.

    Under a full memory a single change is rejected or displaced; an exchange keeps it full.
    """
    entry_key, partner_key, near_key = jax.random.split(key, 3)
    entry = random_entry(genome, key=entry_key)
    differs = genome.active & (genome.head == genome.head[entry]) & (genes != genes[entry])
    distance = jnp.abs(genome.position - genome.position[entry]).astype(jnp.float32)
    near = jax.random.bernoulli(near_key)
    score = jax.random.gumbel(partner_key, genes.shape)
    score = score - jnp.where(near, 2.0 * jnp.log1p(distance), 0.0)
    partner = jnp.argmax(jnp.where(differs, score, -jnp.inf))
    swapped = genes.at[entry].set(genes[partner]).at[partner].set(genes[entry])
    return jnp.where(jnp.any(differs), swapped, genes)


def set_block(genome: Genome, genes: Genes, *, key: PRNGKeyArray, mean: Float[Array, ""]) -> Genes:
    """Sets a run of neighbouring entries of one head to one value; its length is geometric."""
    entry_key, value_key, length_key = jax.random.split(key, 3)
    entry = random_entry(genome, key=entry_key)
    value = random_value(genome.choices[entry], jax.random.uniform(value_key))
    length = 1.0 + jnp.floor(jax.random.exponential(length_key) * mean)
    offset = (genome.position - genome.position[entry]).astype(jnp.float32)
    inside = genome.active & (genome.head == genome.head[entry])
    return jnp.where(inside & (offset >= 0) & (offset < length), value, genes)


def window_crossover(
    genome: Genome, genes: Genes, mate: Genes, *, key: PRNGKeyArray, mean: Float[Array, ""]
) -> Genes:
    """Takes all decisions of a run of neighbouring positions from the mate."""
    entry_key, length_key = jax.random.split(key)
    start = genome.position[random_entry(genome, key=entry_key)]
    length = 1.0 + jnp.floor(jax.random.exponential(length_key) * mean)
    offset = (genome.position - start).astype(jnp.float32)
    return jnp.where((offset >= 0) & (offset < length), mate, genes)


def hash_genes(genome: Genome, genes: Genes) -> UInt[Array, ""]:
    """A 32-bit hash of the active entries, to recognise equal candidates."""
    bits = jax.lax.bitcast_convert_type(genes + 0.0, jnp.int32)
    index = jnp.arange(genes.shape[0], dtype=jnp.uint32)
    odd = (index * jnp.uint32(2654435761) + jnp.uint32(40503)) | jnp.uint32(1)
    mixed = (bits.astype(jnp.uint32) ^ (bits.astype(jnp.uint32) >> 15)) * odd
    mixed = (mixed ^ (mixed >> 13)) * jnp.uint32(0x85EBCA6B)
    return jnp.sum(jnp.where(genome.active, mixed, jnp.uint32(0)), dtype=jnp.uint32)
