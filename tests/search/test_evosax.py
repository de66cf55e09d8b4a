"""evosax's strategies as searchers, on logits and on a policy's weights; BRKGA among them."""

from __future__ import annotations

import importlib
import subprocess
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

from egx.errors import SearchError
from egx.policies.graph_unet import GraphUNetPolicy
from egx.search.brkga_strategy import brkga_strategy
from egx.search.evosax import EvosaxSearch, strategies
from egx.training.generation import evaluate_population
from egx.training.loop import run
from tests.search import toys


def finite(tree):
    return all(
        not np.isnan(leaf).any()
        for leaf in jax.tree.leaves(tree)
        if eqx.is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.inexact)
    )


@pytest.mark.parametrize("strategy", ["SNES", "BRKGA"])
def test_a_strategy_on_logits(strategy):
    problem = toys.chain(4)
    search = EvosaxSearch(strategy=strategy, population=10)
    result = run(search, problem, budget=233, seeds=[0])[0]
    assert result.evaluations == 233
    assert result.feasible
    reward = result.history.metrics["mean_reward"]
    assert reward[-5:].mean() > reward[:3].mean()
    state, proposed = toys.search_for(search, problem, generations=3)
    assert finite(state)
    for candidates in proposed:
        for value in candidates.values():
            assert value.shape == (10, 4)
            assert set(np.unique(value)) <= {0, 1, 2}


@eqx.filter_jit
def generation(search, problem, key):
    """The states before and after a generation."""
    state = search.init(problem, key=key)
    candidates, asked = search.ask(problem, state, key=key)
    outcomes = evaluate_population(problem, candidates)
    return state, search.tell(problem, asked, candidates, outcomes, key=key)[0]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    "names",
    [("LM_MA_ES", "RandomSearch", "SV_CMA_ES"), pytest.param(None, marks=pytest.mark.slow)],
    ids=["peculiar", "every"],
)
def test_strategies_keep_their_state(names):
    """Traced, not compiled: all of them would take minutes."""
    problem = toys.chain(3)
    for name in names or strategies():
        search = EvosaxSearch(strategy=name)
        search.check(problem)
        before, after = eqx.filter_eval_shape(generation, search, problem, jax.random.key(0))
        assert jax.tree.structure(before) == jax.tree.structure(after), name
        for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
            assert (old.shape, old.dtype) == (new.shape, new.dtype), name


def test_a_strategy_of_several_populations():
    problem = toys.chain(4)
    search = EvosaxSearch(strategy="SV_Open_ES", population=8, arguments={"num_populations": 2})
    state, after = generation(search, problem, jax.random.key(0))
    assert state.inner.inner.mean.shape == (2, 4 * 2 * 3)
    assert finite(after)
    assert int(after.evaluations) == 8
    # Each starts elsewhere and goes its own way.
    for means in (state.inner.inner.mean, after.inner.inner.mean):
        assert not np.isclose(means[0], means[1]).any()


def test_a_strategy_on_the_weights_of_a_policy():
    problem = toys.chain(4)
    policy = GraphUNetPolicy(
        problem.features.shape[1],
        (("weights", 3), ("activations", 3)),
        key=jax.random.key(0),
        width=4,
        depth=1,
        attention_heads=1,
    )
    search = EvosaxSearch(strategy="SNES", population=6, on="weights", policy=policy, spread=0.5)
    state, proposed = toys.search_for(search, problem, generations=3)
    assert finite(state)
    assert int(state.evaluations) == 18
    # The numbers are the policy's weights, and all of a generation differ.
    weights = ravel_pytree(eqx.filter(policy, eqx.is_inexact_array))[0]
    assert state.inner.first.shape == (6, weights.shape[0])
    assert len(np.unique(state.inner.first[:, 0])) == 6
    assert all(value.shape == (6, 4) for value in proposed[0].values())
    # Without a spread the first population is the policy itself, deciding greedily.
    still = eqx.tree_at(lambda s: s.spread, search, np.float32(0.0))
    _, (first,) = toys.search_for(still, problem, generations=1)
    expected = policy.decide(problem)
    for name, value in first.items():
        np.testing.assert_array_equal(value, np.tile(expected[name], (6, 1)))


def test_importing_starts_no_device():
    code = "import egx, sys; sys.exit('evosax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_refuses():
    problem = toys.chain(3)
    for options, message in (
        ({"strategy": "None"}, "evosax has no strategy 'None'"),
        ({"on": "weights"}, "needs a policy"),
        ({"parameters": {"speed": 1.0}}, "has no parameter 'speed'"),
        ({"strategy": "BRKGA", "arguments": {"elites": 0}}, "BRKGA cannot be made: elites must be"),
        ({"strategy": "BRKGA", "arguments": {"mutants": 33}}, "mutants must be 0 to"),
        ({"strategy": "SV_CMA_ES", "population": 30}, "4 populations, which must divide .* of 30"),
    ):
        with pytest.raises(SearchError, match=message):
            EvosaxSearch(**options).check(problem)


# BRKGA in evosax's own protocol.


def sphere(solutions):
    return jnp.sum((jax.nn.sigmoid(solutions) - 0.3) ** 2, axis=1)


@pytest.fixture(scope="module")
def strategy():
    return brkga_strategy()(population_size=16, solution=jnp.zeros(5), elites=4, mutants=3)


def test_brkga_is_a_strategy_of_evosax(strategy):
    base = importlib.import_module("evosax.algorithms.population_based.base")
    assert isinstance(strategy, base.PopulationBasedAlgorithm)
    assert strategies()["BRKGA"] is type(strategy)
    default = brkga_strategy()(population_size=80, solution=jnp.zeros(5))
    assert (default.num_elites, default.mutants) == (20, 15)


def test_brkga_keeps_its_elites_and_asks_fresh_ones(strategy):
    with jax.numpy_dtype_promotion("standard"):
        parameters = strategy.default_params
        assert parameters.rho == 0.7
        first = jax.random.normal(jax.random.key(0), (16, 5))
        state = strategy.init(jax.random.key(1), first, sphere(first), parameters)
        told, best, shares = [np.asarray(first)], [], []
        for generation in range(12):
            key = jax.random.key(2 + generation)
            asked, _ = strategy.ask(key, state, parameters)
            again, _ = strategy.ask(key, state, parameters)
            np.testing.assert_array_equal(asked, again)
            everything = np.concatenate(told)
            order = np.argsort(np.asarray(sphere(jnp.asarray(everything))), kind="stable")
            # Children take each number from members, at least some from elites; mutants from none.
            for child in np.asarray(asked[:13]):
                sources = everything == child
                assert sources.any(0).all() or generation == 0
                shares.append(sources[order[:4]].any(0).mean())
            assert not np.isin(np.asarray(asked[13:]), everything).any()
            state, metrics = strategy.tell(key, asked, sphere(asked), state, parameters)
            # What lives on beside the last population is the best of all before it.
            np.testing.assert_array_equal(state.elites, everything[order[:4]])
            told.append(np.asarray(asked))
            best.append(float(metrics["best_fitness"]))
            assert finite(state)
        everything = np.concatenate(told)
        fitness = np.asarray(sphere(jnp.asarray(everything)))
        assert best[-1] == fitness.min()
        np.testing.assert_array_equal(
            strategy.get_best_solution(state), everything[fitness.argmin()]
        )
        assert best[-1] < best[0]
        # 0.7, and what other parents have in common with elites.
        assert 0.65 < np.mean(shares) < 0.95


def test_brkga_outlives_failed_evaluations(strategy):
    with jax.numpy_dtype_promotion("standard"):
        parameters = strategy.default_params
        first = jax.random.normal(jax.random.key(0), (16, 5))
        failed = jnp.full(16, jnp.nan).at[5].set(1.0)
        state = strategy.init(jax.random.key(1), first, failed, parameters)
        asked, state = strategy.ask(jax.random.key(2), state, parameters)
        assert np.isfinite(asked).all()
        state, _ = strategy.tell(jax.random.key(3), asked, jnp.full(16, jnp.nan), state, parameters)
        np.testing.assert_array_equal(state.elites[0], first[5])
        assert float(state.elite_fitness[0]) == 1.0
