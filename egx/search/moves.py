"""Small changes of one candidate, and where a searcher may start.

Shapes: L entries of a candidate (see `egx.search.genome`), of which A are active.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from egx.errors import SearchError
from egx.problems.base import AbstractProblem
from egx.search.base import Scalar
from egx.search.genome import Genes, Genome, encode, random_entry, random_value
from egx.search.random import random_decisions

RANDOM = "random"
ZEROS = "zeros"


def check_start(problem: AbstractProblem, start: str) -> None:
    """Raises SearchError when `start` is neither "random", "zeros" nor one of the problem's
    heuristics."""
    known = (*problem.heuristics(), RANDOM, ZEROS)
    if start not in known:
        raise SearchError(f"start must be one of {', '.join(known)}, got {start!r}")


def start_genes(
    problem: AbstractProblem, start: str, *, key: PRNGKeyArray, batch: int
) -> Float[Array, "B L"]:
    """`batch` starting points; they differ for "random" only."""
    if start == RANDOM:
        drawn = random_decisions(problem, key=key, batch=batch)
        return jax.vmap(lambda one: encode(problem, one))(drawn)
    genes = encode(problem, problem.reference)
    genes = (
        jnp.zeros_like(genes) if start == ZEROS else encode(problem, problem.heuristics()[start])
    )
    return jnp.broadcast_to(genes, (batch, *genes.shape))


def shifted(
    choices: Float[Array, ""], value: Float[Array, ""], uniform: Float[Array, ""]
) -> Float[Array, ""]:
    """Another value for an entry: one of its other choices, or for a real, `uniform` itself."""
    others = choices - 1.0
    shift = 1.0 + jnp.minimum(jnp.floor(uniform * others), others - 1.0)
    return jnp.where(choices == 0, uniform, jnp.mod(value + shift, jnp.maximum(choices, 1.0)))


def shift_one(genome: Genome, genes: Genes, *, key: PRNGKeyArray) -> Genes:
    """Gives one active entry another value."""
    entry_key, value_key = jax.random.split(key)
    entry = random_entry(genome, key=entry_key)
    value = shifted(genome.choices[entry], genes[entry], jax.random.uniform(value_key))
    return genes.at[entry].set(jnp.where(genome.active[entry], value, genes[entry]))


def exchange(genome: Genome, genes: Genes, *, key: PRNGKeyArray, near: float = 0.5) -> Genes:
    """Exchanges the values of two active entries of one head that differ, with probability
    `near` close ones; without such a pair, nothing changes.

    Under a full memory single moves overflow it; an exchange keeps it nearly as full.
    """
    entry_key, partner_key, near_key = jax.random.split(key, 3)
    entry = random_entry(genome, key=entry_key)
    differs = genome.active & (genome.head == genome.head[entry]) & (genes != genes[entry])
    distance = jnp.abs(genome.position - genome.position[entry]).astype(jnp.float32)
    close = jax.random.bernoulli(near_key, near)
    weight = jnp.where(close, 1.0 / (1.0 + distance * distance), 1.0)
    weight = jnp.where(differs, weight, 0.0)
    below = jnp.cumsum(weight)
    ticket = jax.random.uniform(partner_key) * below[-1]
    partner = jnp.minimum(jnp.searchsorted(below, ticket, side="right"), genes.shape[0] - 1)
    valid = differs[partner]
    swapped = genes.at[entry].set(genes[partner]).at[partner].set(genes[entry])
    return jnp.where(valid, swapped, genes)


def make_room(genome: Genome, genes: Genes, *, key: PRNGKeyArray, mean: Scalar) -> Genes:
    """Gives one active entry another value, and its old value to a few of the entries of its head
    that had the new one: `mean` of them on average, beyond the first.

    A large tensor enters a full memory only when several small ones leave it.
    """
    entry_key, value_key, count_key, leave_key = jax.random.split(key, 4)
    entry = random_entry(genome, key=entry_key)
    value = shifted(genome.choices[entry], genes[entry], jax.random.uniform(value_key))
    there = genome.active & (genome.head == genome.head[entry]) & (genes == value)
    present = jnp.maximum(jnp.sum(there.astype(jnp.float32)), 1.0)
    leaving = 1.0 + jnp.floor(jax.random.exponential(count_key) * mean)
    share = jnp.minimum(leaving / present, 1.0)
    leaves = there & jax.random.bernoulli(leave_key, share, genes.shape)
    moved = jnp.where(leaves, genes[entry], genes).at[entry].set(value)
    return jnp.where(genome.active[entry], moved, genes)


def kick(genome: Genome, genes: Genes, *, key: PRNGKeyArray, rate: Scalar) -> Genes:
    """Draws each active entry anew with probability `rate`."""
    choose_key, value_key = jax.random.split(key)
    chosen = jax.random.bernoulli(choose_key, rate, genes.shape) & genome.active
    drawn = random_value(genome.choices, jax.random.uniform(value_key, genes.shape))
    return jnp.where(chosen, drawn, genes)


def neighbour_counts(genome: Genome) -> Float[Array, " L"]:
    """Single moves of each entry: its other choices, one draw for a real, none if inactive."""
    counts = jnp.where(genome.choices == 0, 1.0, genome.choices - 1.0)
    return jnp.where(genome.active, counts, 0.0)


def is_better(
    cost: Float[Array, "*B"],
    feasible: Bool[Array, "*B"],
    than_cost: Float[Array, "*B"],
    than_feasible: Bool[Array, "*B"],
) -> Bool[Array, "*B"]:
    """Feasible before infeasible, then lower cost."""
    return jnp.where(feasible == than_feasible, cost < than_cost, feasible)


def single_move(
    genome: Genome,
    genes: Genes,
    below: Int[Array, " L"],
    order: Int[Array, " L"],
    index: Int[Array, ""],
    uniform: Float[Array, ""],
) -> Genes:
    """The `index`-th single move, entries taken in `order`; `below` is the running sum of their
    `neighbour_counts`. A real entry takes `uniform`."""
    place = jnp.searchsorted(below, index, side="right")
    place = jnp.minimum(place, genes.shape[0] - 1)
    entry = order[place]
    before = jnp.where(place > 0, below[jnp.maximum(place - 1, 0)], 0)
    choices = genome.choices[entry]
    shift = (index - before + 1).astype(jnp.float32)
    value = jnp.where(
        choices == 0, uniform, jnp.mod(genes[entry] + shift, jnp.maximum(choices, 1.0))
    )
    return genes.at[entry].set(jnp.where(genome.active[entry], value, genes[entry]))
