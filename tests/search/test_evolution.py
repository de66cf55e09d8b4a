"""Evolution of mixed populations: who stays, who is replaced by whom, and what mutation does."""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

from egx.policies.boltzmann import random_chromosome
from egx.policies.graph_unet import GraphUNetPolicy
from egx.search.evolution import (
    Evolution,
    Layout,
    Population,
    cross_genomes,
    slots,
    tournament,
)

CHOICES = (("weights", 3), ("activations", 3))
OPS, NETWORKS, CHROMOSOMES = 5, 7, 3
SIZE = NETWORKS + CHROMOSOMES


def network(seed):
    return GraphUNetPolicy(
        4, CHOICES, width=4, depth=0, attention_heads=2, key=jax.random.key(seed)
    )


def genome(network):
    return ravel_pytree(network)[0]


LAYOUT = Layout(network(0))


def population(networks=NETWORKS, chromosomes=CHROMOSOMES):
    made = [
        random_chromosome(CHOICES, OPS, key=jax.random.key(100 + k)) for k in range(chromosomes)
    ]
    return Population(
        jnp.stack([genome(network(k)) for k in range(networks)]) if networks else None,
        jax.tree.map(lambda *rows: jnp.stack(rows), *made) if made else None,
    )


def chances():
    key = jax.random.key(9)
    return {
        name: jax.nn.softmax(jax.random.normal(jax.random.fold_in(key, k), (NETWORKS, OPS, 3)))
        for k, (name, _) in enumerate(CHOICES)
    }


def genomes(population):
    return np.asarray(population.networks)


def flat_chromosomes(population):
    return np.asarray(jax.vmap(lambda one: ravel_pytree(one)[0])(population.chromosomes))


@eqx.filter_jit
def _evolve(evolution, population, fitness, probabilities, key):
    return evolution.evolve(population, LAYOUT, fitness, probabilities, key=key)


def evolve(evolution, population, fitness, probabilities, seed):
    """Rates as arrays, so that all of them share one compiled program."""
    traced = jax.tree.map(lambda rate: jnp.asarray(rate, jnp.float32), evolution)
    return _evolve(traced, population, fitness, probabilities, jax.random.key(seed))


FITNESS = jnp.asarray([0.1, 0.5, -1.0, 0.3, -2.0, 0.2, -0.5, 0.4, -1.5, 0.0])


def test_elites_stay_bit_for_bit_and_slots_keep_their_kind():
    old = population()
    evolution = Evolution(size=SIZE, mutation=1.0)
    for seed in range(4):
        new = evolve(evolution, old, FITNESS, chances(), seed)
        assert jax.tree.structure(new) == jax.tree.structure(old)
        assert jax.tree.map(jnp.shape, new) == jax.tree.map(jnp.shape, old)
        # The best is network 1, the second chromosome 0 (slot 7).
        same = (genomes(new) == genomes(old)).all(axis=1)
        np.testing.assert_array_equal(same, np.arange(NETWORKS) == 1)
        same = (flat_chromosomes(new) == flat_chromosomes(old)).all(axis=1)
        np.testing.assert_array_equal(same, np.arange(CHROMOSOMES) == 0)
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(new))


def test_without_mutation_all_weights_come_from_parents():
    old = population()
    new = evolve(Evolution(size=SIZE, mutation=0.0), old, FITNESS, chances(), 1)
    before, after = genomes(old), genomes(new)
    found = (after[:, None] == before[None]).any(axis=1)
    assert found.all()
    assert not np.array_equal(before, after)


def test_who_was_not_selected_is_refilled_from_elites_and_winners():
    """With one tournament over everyone, only the best is selected."""
    evolution = Evolution(size=SIZE, mutation=0.0, crossover=0.0, tournament=200, elites=1)
    old = population()
    best = jnp.arange(SIZE, dtype=jnp.float32)[::-1]  # network 0
    new = evolve(evolution, old, best, chances(), 0)
    # Elite and winner are both network 0, so all networks become copies of it.
    np.testing.assert_array_equal(genomes(new), np.tile(genomes(old)[:1], (NETWORKS, 1)))
    for name, p in chances().items():
        got = np.asarray(new.chromosomes.prior[name])
        np.testing.assert_array_equal(got, np.tile(np.asarray(p)[:1], (CHROMOSOMES, 1, 1)))
        np.testing.assert_array_equal(
            new.chromosomes.temperature[name], old.chromosomes.temperature[name]
        )


def test_a_chromosome_on_top_never_becomes_a_network():
    evolution = Evolution(size=SIZE, mutation=0.0, crossover=0.0, tournament=200, elites=1)
    old = population()
    best = jnp.arange(SIZE, dtype=jnp.float32)  # chromosome 2, then the networks from 6 down
    new = evolve(evolution, old, best, chances(), 0)
    np.testing.assert_array_equal(genomes(new), np.tile(genomes(old)[6:], (NETWORKS, 1)))
    want = np.tile(flat_chromosomes(old)[2:], (CHROMOSOMES, 1))
    np.testing.assert_array_equal(flat_chromosomes(new), want)


def test_without_seeding_the_kinds_do_not_mix():
    evolution = Evolution(size=SIZE, mutation=0.0, crossover=1.0)
    old = population()
    for seed in range(3):
        new = evolve(evolution, old, FITNESS, None, seed)
        found = flat_chromosomes(new)[:, None] == flat_chromosomes(old)[None]
        assert found.any(axis=1).all()


def test_one_kind_alone_evolves():
    evolution = Evolution(size=4)
    fitness = jnp.asarray([0.0, 3.0, 1.0, 2.0])
    only_networks = evolve(evolution, population(4, 0), fitness, None, 0)
    assert only_networks.chromosomes is None
    np.testing.assert_array_equal(genomes(only_networks)[1], genomes(population(4, 0))[1])
    only_chromosomes = evolve(evolution, population(0, 4), fitness, None, 0)
    assert only_chromosomes.networks is None
    np.testing.assert_array_equal(
        flat_chromosomes(only_chromosomes)[1], flat_chromosomes(population(0, 4))[1]
    )


def test_tournaments_favour_the_better():
    order = jnp.asarray([5, 2, 0, 1, 3, 4, 6, 7, 8, 9])
    winners = np.asarray(tournament(order, SIZE, jax.random.uniform(jax.random.key(0), (30000, 3))))
    share = np.array([(winners == slot).mean() for slot in np.asarray(order)])
    places = np.arange(SIZE)
    want = ((SIZE - places) ** 3 - (SIZE - places - 1) ** 3) / SIZE**3
    np.testing.assert_allclose(share, want, atol=0.01)
    few = tournament(order, 2, jax.random.uniform(jax.random.key(0), (100, 1)))
    assert set(np.asarray(few).tolist()) == {5, 2}


@pytest.mark.parametrize("seeding", [True, False])
def test_parents_are_of_the_kinds_allowed(seeding):
    evolution = Evolution(size=SIZE)
    select = jax.jit(lambda key: evolution.select(NETWORKS, FITNESS, seeding, key=key))
    seen = set()
    for seed in range(40):
        parents = jax.tree.map(np.asarray, select(jax.random.key(seed)))
        network = np.arange(SIZE) < NETWORKS
        for side in (parents.first, parents.second):
            assert ((side < NETWORKS) | ~network).all()
            if not seeding:
                assert ((side >= NETWORKS) | network).all()
            seen |= set(zip(network.tolist(), (side < NETWORKS).tolist(), strict=True))
        elite = np.isin(np.arange(SIZE), [1, 7])
        assert not parents.mutate[elite].any()
        assert not parents.cross[elite].any()
        assert (parents.first[elite] == [1, 7]).all()
    assert ((False, True) in seen) == seeding


def mutate(evolution, layout, genome, seeds):
    keys = jax.vmap(jax.random.key)(jnp.arange(seeds))
    return np.asarray(
        jax.jit(jax.vmap(lambda key: evolution.mutate_genome(layout, genome, key=key)))(keys)
    )


def test_mutation_changes_at_most_its_share_of_each_tensor():
    one = GraphUNetPolicy(19, CHOICES, width=32, depth=0, attention_heads=2, key=jax.random.key(0))
    layout, flat = Layout(one), genome(one)
    shares, ratios = [], []
    for new in mutate(Evolution(super_rate=0.0, reset_rate=0.0), layout, flat, 20):
        changed = new != flat
        counts = np.bincount(layout.tensor, changed, len(layout.sizes))
        assert (counts <= np.ceil(0.05 * layout.sizes)).all()
        shares.append((counts / layout.sizes)[layout.sizes >= 500])
        ratios.append((new / flat)[changed])
    np.testing.assert_allclose(np.concatenate(ratios).std(), 0.1, rtol=0.1)
    # The share itself is uniform between none and all of the 5 %.
    np.testing.assert_allclose(np.mean(shares), 0.025, rtol=0.2)
    assert np.max(shares) > 0.04


def test_large_changes_and_new_weights_are_rare_and_bounded():
    flat = jnp.full_like(genome(network(0)), 5.0)
    reset = mutate(Evolution(super_rate=0.0, reset_rate=1.0), LAYOUT, flat, 5)
    changed = reset[reset != 5.0]
    # Drawn twice at one place, the old weight is subtracted twice, which is rare.
    assert (np.abs(changed) < 0.6).mean() > 0.8
    large = mutate(Evolution(super_rate=1.0, weight_limit=20.0), LAYOUT, flat, 5)
    assert np.abs(large).max() == 20.0


def test_crossover_takes_a_block_of_units_of_each_tensor():
    one = network(0)
    zeros = jnp.zeros_like(genome(one))
    unravel = ravel_pytree(one)[1]
    keys = jax.vmap(jax.random.key)(jnp.arange(20))
    cross = jax.vmap(lambda key: cross_genomes(LAYOUT, zeros, zeros + 1.0, key=key))
    sizes = set()
    for child in jax.jit(cross)(keys):
        for leaf in jax.tree.leaves(unravel(child)):
            rows = np.asarray(leaf).reshape(-1, leaf.shape[-1])
            assert (rows == rows[0]).all()  # whole units
            assert np.sum(rows[0] != np.roll(rows[0], 1)) in (0, 2)  # one block, around the end
            if leaf.shape[-1] == 4:
                sizes.add(int(rows[0].sum()))
    assert sizes == {0, 1, 2, 3, 4}


@pytest.mark.parametrize(
    ("size", "share", "want"),
    [(20, 0.2, (16, 4)), (20, 0.0, (20, 0)), (20, 1.0, (0, 20)), (10, 0.25, (7, 3))],
)
def test_slots(size, share, want):
    assert slots(size, share) == want
