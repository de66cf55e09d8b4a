"""EGRL, EA and PG: they solve a toy, their parts do what they say and can be left out."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree
from runs import chain, machine

from egx.errors import SearchError
from egx.graph.padding import pad_graph
from egx.policies.distributions import greedy, probabilities
from egx.policies.graph_unet import GraphUNetPolicy
from egx.problems.execution import Execution
from egx.problems.memory_placement import MemoryPlacement
from egx.search.egrl import EGRL, as_in_code, ea, pg
from egx.search.evolution import Evolution
from egx.search.random import RandomSearch
from tests.search import toys

SMALL = {"width": 8, "depth": 1, "attention_heads": 2, "buffer_capacity": 64}
FEW = Evolution(size=6, elites=1)


def problem():
    return toys.chain(4)


def test_they_spend_what_they_say():
    assert EGRL().batch_size == 22
    assert EGRL().counts == (16, 4)
    assert ea().batch_size == 20
    assert pg().batch_size == 4
    assert pg().counts == (0, 0)
    assert as_in_code().depth == 3
    assert as_in_code().sac.bootstrap


WIDER = {"width": 32, "depth": 1, "attention_heads": 4, "buffer_capacity": 1024}


@pytest.mark.parametrize("search", [EGRL(**WIDER), ea(**WIDER), pg(**WIDER, exploring=5)])
def test_the_whole_and_each_part_alone_leave_random_search_behind(search):
    """Sixteen ops, where few maps fit and most of those are bad."""
    made = toys.chain(16, seed=2)
    found = toys.costs(search, made, budget=660)
    blind = toys.costs(RandomSearch(), made, budget=660)
    assert found.mean() < 0.85 * blind.mean()


@pytest.fixture(scope="module")
def run():
    """The states before and after each of three generations, the candidates and the rewards."""
    search, made = EGRL(evolution=FEW, **SMALL), problem()
    state, proposed = toys.search_for(search, made, generations=3)
    return search, made, state, proposed


def test_all_evaluations_go_to_the_buffer(run):
    search, made, state, proposed = run
    replay = state.inner.replay
    assert search.batch_size == 8
    assert replay.count == 24
    evaluate = jax.jit(jax.vmap(lambda one: made.evaluate(one).reward))
    for index, candidates in enumerate(proposed):
        rows = slice(8 * index, 8 * index + 8)
        np.testing.assert_allclose(replay.rewards[rows], evaluate(candidates), rtol=1e-5)
        for name, value in candidates.items():
            np.testing.assert_array_equal(replay.levels[name][rows], value)


def test_the_learner_takes_the_weakest_slot_before_the_next_proposal(run):
    search, made, state, _ = run
    inner = state.inner
    actor = ravel_pytree(inner.learner.actor)[0]
    logits = inner.learner.actor.logits(inner.context)
    propose = jax.jit(lambda inner, key: search.propose(made, inner, key=key))
    for slot in range(-1, 6):
        before = dataclasses.replace(inner, weakest=jnp.asarray(slot, jnp.int32))
        candidates, after = propose(before, jax.random.key(0))
        took = np.all(np.asarray(after.population.networks) == np.asarray(actor), axis=1)
        np.testing.assert_array_equal(took, np.arange(5) == slot)
        kept = np.asarray(inner.population.networks)[~took]
        np.testing.assert_array_equal(np.asarray(after.population.networks)[~took], kept)
        prior = np.asarray(after.population.chromosomes.prior["weights"])[0]
        if slot == 5:
            np.testing.assert_allclose(prior, probabilities(logits)["weights"], rtol=1e-4)
        else:
            np.testing.assert_array_equal(prior, inner.population.chromosomes.prior["weights"][0])
        # The last rollout is the learner's greedy one; a network that took over does the same.
        for name, value in greedy(logits).items():
            np.testing.assert_array_equal(candidates[name][-1], value)
            if 0 <= slot < 5:
                np.testing.assert_array_equal(candidates[name][slot], value)


def test_the_champion_is_the_best_network_of_the_run(run):
    search, made, state, proposed = run
    evaluate = jax.jit(jax.vmap(lambda one: made.evaluate(one).reward))
    # Networks are the first five candidates, the learner's greedy rollout the last one.
    best = max(float(np.delete(evaluate(c), [5, 6]).max()) for c in proposed)
    np.testing.assert_allclose(state.inner.champion.reward, best, rtol=1e-6)
    policy = search.best_policy(state, made)
    assert isinstance(policy, GraphUNetPolicy)
    np.testing.assert_allclose(made.evaluate(policy.decide(made)).reward, best, rtol=1e-5)
    other = toys.chain(7)
    assert np.isfinite(other.evaluate(policy.decide(other)).cost)
    with pytest.raises(SearchError, match="the best policy decides"):
        search.best_policy(state, toys.chain(4, levels=4))


def test_a_run_is_reproducible_and_keeps_its_types(run):
    search, made, state, _ = run
    again, _ = toys.search_for(search, made, generations=3)
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(a, b)
    other, _ = toys.search_for(search, made, generations=3, seed=1)
    assert not np.array_equal(other.inner.population.networks, state.inner.population.networks)
    start = toys.begin(search, made, jax.random.key(0))
    assert jax.tree.structure(start) == jax.tree.structure(state)
    for a, b in zip(jax.tree.leaves(start), jax.tree.leaves(state), strict=True):
        assert isinstance(a, jax.Array)
        assert (a.shape, a.dtype, a.weak_type) == (b.shape, b.dtype, b.weak_type)


def test_padding_changes_what_is_drawn_but_not_what_networks_say(run):
    search, made, state, _ = run
    padded = MemoryPlacement(pad_graph(made.graph, (7, 8, 9)), made.hardware)
    policy = search.best_policy(state)
    np.testing.assert_array_equal(
        policy.decide(padded)["weights"][:4], policy.decide(made)["weights"]
    )
    wide, _ = toys.search_for(search, padded, generations=2)
    assert all(
        np.isfinite(leaf).all()
        for leaf in jax.tree.leaves(wide)
        if jnp.issubdtype(leaf.dtype, jnp.floating)
    )


@pytest.mark.parametrize(
    "search",
    [
        ea(evolution=FEW, seeding=False, graph_network=False, **SMALL),
        ea(evolution=FEW, boltzmann_share=1.0, **SMALL),
        ea(evolution=FEW, boltzmann_share=0.0, **SMALL),
        EGRL(evolution=FEW, seeding=False, graph_network=False, **SMALL),
        EGRL(evolution=FEW, boltzmann_share=1.0, migration=False, graph_network=False, **SMALL),
        as_in_code(evolution=FEW, **{**SMALL, "graph_network": False}),
    ],
)
def test_parts_can_be_left_out(search):
    state, proposed = toys.search_for(search, problem(), generations=2)
    inner = state.inner
    assert (inner.learner is None) == (not search.policy_gradient)
    assert (inner.replay is None) == (not search.policy_gradient)
    networks, chromosomes = search.counts
    assert (inner.population.networks is None) == (networks == 0)
    assert (inner.population.chromosomes is None) == (chromosomes == 0)
    assert proposed[0]["weights"].shape == (search.batch_size, 4)
    migrates = search.policy_gradient and search.migration
    assert (int(inner.weakest) >= 0) == migrates
    if migrates and not search.seeding:
        assert int(inner.weakest) < networks
    if not networks and not search.policy_gradient:
        with pytest.raises(SearchError, match="chromosomes only"):
            search.best_policy(state)
    # The second generation differs from the first.
    assert not np.array_equal(proposed[0]["weights"], proposed[1]["weights"])


def test_it_starts_from_a_policy():
    made = problem()
    policy = GraphUNetPolicy(
        19,
        (("weights", 3), ("activations", 3)),
        width=4,
        depth=0,
        attention_heads=1,
        key=jax.random.key(5),
    )
    search = EGRL(evolution=FEW, policy=policy, **SMALL)
    search.check(made)
    inner = toys.begin(search, made, jax.random.key(0)).inner
    for a, b in zip(jax.tree.leaves(inner.learner.actor), jax.tree.leaves(policy), strict=True):
        np.testing.assert_array_equal(a, b)
    genomes = np.asarray(inner.population.networks)
    np.testing.assert_array_equal(genomes[0], ravel_pytree(policy)[0])
    assert not np.array_equal(genomes[1], genomes[0])
    with pytest.raises(SearchError, match="starting policy decides"):
        search.check(toys.chain(4, levels=4))


def test_it_decides_devices_and_priorities_but_nothing_per_use():
    made = Execution(chain(5), _two_devices(), decide=("device", "priority"))
    search = EGRL(evolution=FEW, graph_network=False, **SMALL)
    state, proposed = toys.search_for(search, made, generations=2)
    assert proposed[1]["device"].dtype == np.int32
    assert set(np.unique(proposed[1]["device"])) <= {0, 1}
    priorities = proposed[1]["priority"]
    assert priorities.dtype == np.float32
    np.testing.assert_allclose(priorities * 15, np.round(priorities * 15), atol=1e-5)
    assert state.inner.replay.levels["priority"].dtype == jnp.int8
    per_use = Execution(chain(5), _two_devices(), decide=("device", "transfer_priority"))
    with pytest.raises(SearchError, match="'transfer_priority' is made per use"):
        EGRL().check(per_use)


def _two_devices():
    one = machine()
    twice = {
        name: np.repeat(np.asarray(getattr(one, name)), 2, axis=0)
        for name in ("flops_per_s", "level_bytes", "read_bytes_per_s", "write_bytes_per_s")
    }
    return type(one)(
        **twice,
        link_bytes_per_s=np.ones((2, 2)),
        link_latency_s=np.zeros((2, 2)),
        launch_s=np.repeat(np.asarray(one.launch_s), 2),
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"population": False, "policy_gradient": False}, "the population, the policy gradient"),
        ({"boltzmann_share": 1.5}, "boltzmann_share must be 0 to 1, got 1.5"),
        ({"buffer_capacity": 21}, r"hold a generation \(22\), got 21"),
        ({"exploring": -1}, "exploring must be a whole number of 0 or more, got -1"),
        ({"evolution": Evolution(size=3, elites=3)}, "elites must be 1 to 2 in a population of 3"),
    ],
)
def test_impossible_options_are_refused(options, message):
    with pytest.raises(SearchError, match=message):
        EGRL(**options)
