"""Evolution of a mixed population: graph networks, and Boltzmann chromosomes that they seed.

Khadka et al., ICLR 2021, arXiv 2007.07298. Slots keep their type: the first G hold networks, the
last K chromosomes. Elites stay where they are, bit for bit. Of the others, those that no
tournament picked are refilled with a child of an elite and a winner; those that were picked stay,
and are crossed with another winner now and then; then most of them mutate.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from egx.policies import boltzmann
from egx.policies.boltzmann import BoltzmannChromosome
from egx.search.base import check_numbers, check_whole

Stacked = dict[str, Float[Array, "G N _K"]]


class Population(eqx.Module):
    """G networks as genomes, all their weights as one row each, and K chromosomes, stacked."""

    networks: Float[Array, "G W"] | None
    chromosomes: BoltzmannChromosome | None


class Parents(NamedTuple):
    """For each slot: what its next member is made of, and whether it is crossed and mutates."""

    first: Int[Array, " P"]
    second: Int[Array, " P"]
    cross: Bool[Array, " P"]
    mutate: Bool[Array, " P"]


class Evolution(eqx.Module):
    """Rates are traced, sizes static.

    Args:
        mutation: probability that a member which is no elite mutates.
        crossover: probability that a member which was selected is crossed.
        share: a mutation changes up to this share of the weights of each tensor.
        strength: standard deviation of a change, relative to the weight.
        super_strength, super_rate: of the rare large changes.
        reset_rate, reset_spread: of the rare new weights, N(0, spread).
        weight_limit: bound of weights after mutation, so that growth stays finite.
        size, elites, tournament: members, members kept, members per tournament.
    """

    mutation: Any = 0.9
    crossover: Any = 0.3
    share: float = eqx.field(static=True, default=0.05)
    strength: Any = 0.1
    super_strength: Any = 10.0
    super_rate: Any = 0.05
    reset_rate: Any = 0.02
    reset_spread: Any = 0.1
    weight_limit: Any = 100.0
    size: int = eqx.field(static=True, default=20)
    elites: int = eqx.field(static=True, default=2)
    tournament: int = eqx.field(static=True, default=3)

    def __check_init__(self) -> None:
        check_whole(self, size=2, elites=1, tournament=1)
        check_numbers(
            self,
            mutation="0 to 1",
            crossover="0 to 1",
            share="above 0, 1 at most",
            strength="0 or more",
            super_strength="0 or more",
            super_rate="0 to 1",
            reset_rate="0 to 1",
            reset_spread="0 or more",
            weight_limit="above 0",
        )

    def evolve(
        self,
        population: Population,
        layout: Layout | None,
        fitness: Float[Array, " P"],
        probabilities: Stacked | None,
        *,
        key: PRNGKeyArray,
    ) -> Population:
        """The next population.

        Args:
            layout: of the networks' genomes.
            fitness: higher is better; equal members rank by slot.
            probabilities: what the networks put out, [G, N, choices] a head, for seeding
                chromosomes; None to keep networks and chromosomes apart.
        """
        keys = jax.random.split(key, 3)
        genomes, chromosomes = population.networks, population.chromosomes
        count = 0 if genomes is None else genomes.shape[0]
        parents = self.select(count, fitness, probabilities is not None, key=keys[0])
        if genomes is not None and layout is not None:
            genomes = self._next_genomes(genomes, layout, parents, keys[1])
        if chromosomes is not None:
            chromosomes = self._next_chromosomes(
                chromosomes, count, parents, probabilities, keys[2]
            )
        return Population(genomes, chromosomes)

    def select(
        self, networks: int, fitness: Float[Array, " P"], seeding: bool, *, key: PRNGKeyArray
    ) -> Parents:
        """Who is made of whom; networks only of networks, chromosomes of all or of their kind."""
        slot = jnp.arange(self.size, dtype=jnp.int32)
        network = slot < networks
        best_first = _order(fitness)
        elite = jnp.zeros(self.size, bool).at[best_first[: self.elites]].set(True)
        # One draw for all: each draw compiles for a tenth of a second.
        uniform = jax.random.uniform(key, (self.size, 4 + 2 * self.tournament))
        swap, crossed, mutated, which = uniform[:, :4].T
        everyone, own_kind = jnp.split(uniform[:, 4:], 2, axis=1)
        winners = tournament(best_first, self.size, everyone[: self.size - self.elites])
        selected = jnp.zeros(self.size, bool).at[winners].set(True)

        best_networks = _order(jnp.where(network, fitness, -jnp.inf))
        best_others = best_first if seeding else _order(jnp.where(network, -jnp.inf, fitness))
        others = self.size if seeding else self.size - networks
        pool = jnp.where(network[:, None], best_networks, best_others)
        size = jnp.where(network, networks, others)
        winner = jax.vmap(tournament)(pool, size, own_kind)
        parent = best_first[(which * self.elites).astype(jnp.int32)]
        # A chromosome cannot become a network: the best network stands in for such an elite.
        fits = (parent < networks) == network
        parent = jnp.where(fits | (~network & seeding), parent, pool[:, 0])

        refill = ~selected & ~elite
        swap = swap < 0.5
        return Parents(
            first=jnp.where(refill, jnp.where(swap, winner, parent), slot),
            second=jnp.where(refill & swap, parent, winner),
            cross=refill | ((crossed < self.crossover) & ~elite),
            mutate=(mutated < self.mutation) & ~elite,
        )

    def _next_genomes(
        self, genomes: Float[Array, "G W"], layout: Layout, parents: Parents, key: PRNGKeyArray
    ) -> Float[Array, "G W"]:
        def child(slot: Array) -> Array:
            cross_key, mutate_key = jax.random.split(jax.random.fold_in(key, slot))
            first, second = genomes[parents.first[slot]], genomes[parents.second[slot]]
            mixed = cross_genomes(layout, first, second, key=cross_key)
            mixed = jnp.where(parents.cross[slot], mixed, first)
            changed = self.mutate_genome(layout, mixed, key=mutate_key)
            return jnp.where(parents.mutate[slot], changed, mixed)

        return jax.vmap(child)(jnp.arange(genomes.shape[0], dtype=jnp.int32))

    def _next_chromosomes(
        self,
        chromosomes: BoltzmannChromosome,
        networks: int,
        parents: Parents,
        probabilities: Stacked | None,
        key: PRNGKeyArray,
    ) -> BoltzmannChromosome:
        def member(slot: Array, own: BoltzmannChromosome) -> BoltzmannChromosome:
            """The chromosome of a slot; a network seeds the slot's own temperatures."""
            index = jnp.maximum(slot - networks, 0)
            found = jax.tree.map(lambda leaf: leaf[index], chromosomes)
            if probabilities is None:
                return found
            prior = jax.tree.map(lambda leaf: leaf[jnp.minimum(slot, networks - 1)], probabilities)
            return _choose(slot < networks, boltzmann.seeded(own, prior), found)

        def child(index: Array) -> BoltzmannChromosome:
            slot = index + networks
            cross_key, mutate_key = jax.random.split(jax.random.fold_in(key, slot))
            own = jax.tree.map(lambda leaf: leaf[index], chromosomes)
            first, second = parents.first[slot], parents.second[slot]
            one, two = member(first, own), member(second, own)
            mixed = boltzmann.crossover(one, two, key=cross_key)
            # Crossing with a network is seeding: its probabilities replace the whole prior.
            mixed = _choose(first < networks, one, mixed)
            mixed = _choose(second < networks, two, mixed)
            mixed = _choose(parents.cross[slot], mixed, one)
            changed = boltzmann.mutate(mixed, key=mutate_key)
            return _choose(parents.mutate[slot], changed, mixed)

        count = next(iter(chromosomes.temperature.values())).shape[0]
        return jax.vmap(child)(jnp.arange(count, dtype=jnp.int32))

    def mutate_genome(
        self, layout: Layout, genome: Float[Array, " W"], *, key: PRNGKeyArray
    ) -> Float[Array, " W"]:
        """Changes a random share, up to `share`, of the weights of each tensor.

        Positions are drawn with replacement; changes at one position add up.
        """
        draws = np.ceil(self.share * layout.sizes).astype(np.int32)
        tensor = np.repeat(np.arange(len(draws), dtype=np.int32), draws)
        turn = np.arange(len(tensor), dtype=np.int32) - np.repeat(np.cumsum(draws) - draws, draws)
        spot, kind, share, chance = jax.random.uniform(key, (4, len(tensor)), minval=1e-7)
        normal = jax.scipy.special.ndtri(chance)
        # The first draw of each tensor says how many of its changes happen: 0 to all.
        how_many = share[np.cumsum(draws) - draws] * jnp.asarray(draws + 1, jnp.float32)
        active = jnp.asarray(turn, jnp.float32) + 1.0 <= how_many[jnp.asarray(tensor)]
        within = spot * jnp.asarray(layout.sizes[tensor], jnp.float32)
        place = jnp.asarray(layout.starts[tensor]) + within.astype(jnp.int32)
        old = genome[place]
        scale = jnp.where(kind < self.super_rate, self.super_strength, self.strength)
        change = old * scale * normal
        reset = (kind >= self.super_rate) & (kind < self.super_rate + self.reset_rate)
        change = jnp.where(reset, self.reset_spread * normal - old, change)
        genome = genome.at[place].add(jnp.where(active, change, 0.0))
        return jnp.clip(genome, -self.weight_limit, self.weight_limit)


class Layout:
    """Where the tensors of a network lie in its genome of W weights, as `ravel_pytree` has it.

    Units are the entries of a tensor's last axis: the outputs of a layer.
    """

    def __init__(self, network: Any):
        leaves = jax.tree.leaves(network)
        self.sizes = np.array([leaf.size for leaf in leaves], np.int32)
        self.starts = (np.cumsum(self.sizes) - self.sizes).astype(np.int32)
        self.units = np.array([leaf.shape[-1] for leaf in leaves], np.int32)
        self.tensor = np.repeat(np.arange(len(leaves), dtype=np.int32), self.sizes)
        place = np.arange(int(self.sizes.sum()), dtype=np.int32) - self.starts[self.tensor]
        self.unit = (place % self.units[self.tensor]).astype(np.int32)


def cross_genomes(
    layout: Layout,
    first: Float[Array, " W"],
    second: Float[Array, " W"],
    *,
    key: PRNGKeyArray,
) -> Float[Array, " W"]:
    """`first` with a block of units of each tensor taken from `second`.

    A block runs from a random unit over a random number of them, around the end: from unit 0 or
    to the last it is a single-point crossover.
    """
    begin, length = jax.random.uniform(key, (2, len(layout.units))) * jnp.asarray(
        np.stack([layout.units, layout.units + 1]), jnp.float32
    )
    tensor, unit = jnp.asarray(layout.tensor), jnp.asarray(layout.unit)
    after = unit - begin.astype(jnp.int32)[tensor]
    after = jnp.where(after < 0, after + jnp.asarray(layout.units)[tensor], after)
    return jnp.where(after < length.astype(jnp.int32)[tensor], second, first)


def tournament(
    best_first: Int[Array, " P"], size: Int[Array, ""] | int, uniform: Float[Array, "*T K"]
) -> Int[Array, "*T"]:
    """The best of K slots drawn from the first `size` of a ranking, for each row of `uniform`."""
    places = jnp.min(uniform, axis=-1) * size
    return best_first[places.astype(jnp.int32)]


def _order(fitness: Float[Array, " P"]) -> Int[Array, " P"]:
    """The slots, best first; equal ones by number."""
    return jnp.argsort(-fitness, stable=True).astype(jnp.int32)


def _choose(condition: Bool[Array, ""], yes: Any, no: Any) -> Any:
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), yes, no)


def slots(size: int, share: float) -> tuple[int, int]:
    """(networks, chromosomes) of a population."""
    chromosomes = min(max(math.floor(size * share + 0.5), 0), size)
    return size - chromosomes, chromosomes
