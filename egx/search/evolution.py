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
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from egx.policies import boltzmann
from egx.policies.boltzmann import BoltzmannChromosome
from egx.policies.distributions import Logits


class Population(eqx.Module):
    """G networks and K chromosomes, each kind stacked along a leading axis or None."""

    networks: Any
    chromosomes: BoltzmannChromosome | None


class Ranking(NamedTuple):
    """Slots from best to worst: of all P, of networks, of chromosomes (as slots of P)."""

    everyone: Int[Array, " P"]
    networks: Int[Array, " G"]
    chromosomes: Int[Array, " K"]


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

    def evolve(
        self,
        population: Population,
        fitness: Float[Array, " P"],
        probabilities: Logits | None,
        *,
        key: PRNGKeyArray,
    ) -> Population:
        """The next population.

        Args:
            fitness: higher is better; equal members rank by slot.
            probabilities: what the networks put out, [G, N, choices] a head, for seeding
                chromosomes; None to keep networks and chromosomes apart.
        """
        select_key, network_key, chromosome_key = jax.random.split(key, 3)
        ranking = self.rank(population, fitness)
        elite = jnp.zeros(self.size, bool).at[ranking.everyone[: self.elites]].set(True)
        winners = self.winners(ranking.everyone, self.size - self.elites, key=select_key)
        selected = jnp.zeros(self.size, bool).at[winners].set(True)
        count = self.networks_in(population)
        return Population(
            self._next_networks(
                population.networks, ranking, elite[:count], selected[:count], network_key
            )
            if count
            else None,
            self._next_chromosomes(
                population, ranking, elite[count:], selected[count:], probabilities, chromosome_key
            )
            if population.chromosomes is not None
            else None,
        )

    def networks_in(self, population: Population) -> int:
        """G."""
        leaves = jax.tree.leaves(population.networks)
        return leaves[0].shape[0] if leaves else 0

    def rank(self, population: Population, fitness: Float[Array, " P"]) -> Ranking:
        """The slots by fitness, best first."""
        count = self.networks_in(population)

        def order(part: Array) -> Array:
            return jnp.argsort(-part, stable=True).astype(jnp.int32)

        return Ranking(order(fitness), order(fitness[:count]), order(fitness[count:]) + count)

    def winners(
        self, ranking: Int[Array, " R"], count: int, *, key: PRNGKeyArray
    ) -> Int[Array, " count"]:
        """The winners of `count` tournaments among the slots of `ranking`."""
        places = jax.random.randint(key, (count, self.tournament), 0, ranking.shape[0])
        return ranking[jnp.min(places, axis=1)]

    def _next_networks(
        self,
        networks: Any,
        ranking: Ranking,
        elite: Bool[Array, " G"],
        selected: Bool[Array, " G"],
        key: PRNGKeyArray,
    ) -> Any:
        count = elite.shape[0]
        keys = jax.random.split(key, 5)
        # A chromosome cannot become a network: the best network stands in for such an elite.
        parent = ranking.everyone[jax.random.randint(keys[0], (count,), 0, self.elites)]
        parent = jnp.where(parent < count, parent, ranking.networks[0])
        winner = self.winners(ranking.networks, count, key=keys[1])
        swap, crossed, mutated = self._draws(count, keys[2])
        own = jnp.arange(count, dtype=jnp.int32)
        refill = ~selected & ~elite
        first = jnp.where(refill, jnp.where(swap, winner, parent), own)
        second = jnp.where(refill & swap, parent, winner)
        cross = refill | (crossed & ~elite)
        template = jax.tree.map(lambda leaf: leaf[0], networks)
        layout, unravel = Layout(template), ravel_pytree(template)[1]
        genomes = jax.vmap(lambda network: ravel_pytree(network)[0])(networks)

        def child(index: Array) -> Any:
            a, b = genomes[first[index]], genomes[second[index]]
            mixed = cross_genomes(layout, a, b, key=jax.random.fold_in(keys[3], index))
            mixed = jnp.where(cross[index], mixed, a)
            changed = self.mutate_genome(layout, mixed, key=jax.random.fold_in(keys[4], index))
            return jnp.where(mutated[index] & ~elite[index], changed, mixed)

        return jax.vmap(unravel)(jax.vmap(child)(own))

    def _next_chromosomes(
        self,
        population: Population,
        ranking: Ranking,
        elite: Bool[Array, " K"],
        selected: Bool[Array, " K"],
        probabilities: Logits | None,
        key: PRNGKeyArray,
    ) -> BoltzmannChromosome:
        chromosomes, networks = population.chromosomes, self.networks_in(population)
        assert chromosomes is not None
        count = elite.shape[0]
        keys = jax.random.split(key, 5)
        seeding = probabilities is not None
        pool = ranking.everyone if seeding else ranking.chromosomes
        parent = ranking.everyone[jax.random.randint(keys[0], (count,), 0, self.elites)]
        if not seeding:
            parent = jnp.where(parent >= networks, parent, ranking.chromosomes[0])
        winner = self.winners(pool, count, key=keys[1])
        swap, crossed, mutated = self._draws(count, keys[2])
        slot = jnp.arange(networks, networks + count, dtype=jnp.int32)
        refill = ~selected & ~elite
        first = jnp.where(refill, jnp.where(swap, winner, parent), slot)
        second = jnp.where(refill & swap, parent, winner)
        cross = refill | (crossed & ~elite)

        def member(slot: Array, own: BoltzmannChromosome) -> BoltzmannChromosome:
            """The chromosome of a slot; a network seeds the slot's own temperatures."""
            index = jnp.clip(slot - networks, 0, count - 1)
            found = jax.tree.map(lambda leaf: leaf[index], chromosomes)
            if probabilities is None:
                return found
            index = jnp.clip(slot, 0, max(networks - 1, 0))
            prior = jax.tree.map(lambda leaf: leaf[index], probabilities)
            return _choose(slot < networks, boltzmann.seeded(own, prior), found)

        def child(index: Array) -> BoltzmannChromosome:
            own = jax.tree.map(lambda leaf: leaf[index], chromosomes)
            a, b = member(first[index], own), member(second[index], own)
            mixed = boltzmann.crossover(a, b, key=jax.random.fold_in(keys[3], index))
            # Crossing with a network is seeding: its probabilities replace the whole prior.
            mixed = _choose(first[index] < networks, a, mixed)
            mixed = _choose(second[index] < networks, b, mixed)
            mixed = _choose(cross[index], mixed, a)
            changed = boltzmann.mutate(mixed, key=jax.random.fold_in(keys[4], index))
            return _choose(mutated[index] & ~elite[index], changed, mixed)

        return jax.vmap(child)(jnp.arange(count, dtype=jnp.int32))

    def _draws(self, count: int, key: PRNGKeyArray) -> tuple[Array, Array, Array]:
        """Of each child: whether parents swap, whether it is crossed, whether it mutates."""
        uniform = jax.random.uniform(key, (3, count))
        return uniform[0] < 0.5, uniform[1] < self.crossover, uniform[2] < self.mutation

    def mutate_genome(
        self, layout: Layout, genome: Float[Array, " W"], *, key: PRNGKeyArray
    ) -> Float[Array, " W"]:
        """Changes a random share, up to `share`, of the weights of each tensor.

        Positions are drawn with replacement; changes at one position add up.
        """
        draws = np.ceil(self.share * layout.sizes).astype(np.int32)
        tensor = np.repeat(np.arange(len(draws), dtype=np.int32), draws)
        turn = np.arange(len(tensor), dtype=np.int32) - np.repeat(np.cumsum(draws) - draws, draws)
        uniform_key, normal_key = jax.random.split(key)
        uniform = jax.random.uniform(uniform_key, (3, len(tensor)))
        normal = jax.random.normal(normal_key, (len(tensor),))
        # The first draw of each tensor says how many of its changes happen: 0 to all.
        how_many = uniform[2, np.cumsum(draws) - draws] * jnp.asarray(draws + 1, jnp.float32)
        active = jnp.asarray(turn, jnp.float32) + 1.0 <= how_many[jnp.asarray(tensor)]
        within = uniform[0] * jnp.asarray(layout.sizes[tensor], jnp.float32)
        place = jnp.asarray(layout.starts[tensor]) + within.astype(jnp.int32)
        kind = uniform[1]
        old = genome[place]
        scale = jnp.where(kind < self.super_rate, self.super_strength, self.strength)
        change = old * scale * normal
        reset = (kind >= self.super_rate) & (kind < self.super_rate + self.reset_rate)
        change = jnp.where(reset, self.reset_spread * normal - old, change)
        genome = genome.at[place].add(jnp.where(active, change, 0.0))
        return jnp.clip(genome, -self.weight_limit, self.weight_limit)


class Layout:
    """Where the tensors of a network lie in its genome, its weights as one vector of W.

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


def _choose(condition: Bool[Array, ""], yes: Any, no: Any) -> Any:
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), yes, no)


def slots(size: int, share: float) -> tuple[int, int]:
    """(networks, chromosomes) of a population."""
    chromosomes = min(max(math.floor(size * share + 0.5), 0), size)
    return size - chromosomes, chromosomes
