"""Uniform random candidates are uniform, independent and reproducible."""

from __future__ import annotations

import jax
import numpy as np

from egx.search.random import RandomSearch, random_decisions
from tests.search import toys


def test_every_choice_is_as_likely():
    problem = toys.chain(5)
    drawn = random_decisions(problem, key=jax.random.key(0), batch=3000)
    for value in drawn.values():
        assert value.shape == (3000, 5)
        counts = np.stack([np.bincount(column, minlength=3) for column in np.asarray(value).T])
        assert np.abs(counts - 1000).max() < 5 * np.sqrt(3000 * 2 / 9)
    agree = (np.asarray(drawn["weights"]) == np.asarray(drawn["activations"])).mean()
    assert abs(agree - 1 / 3) < 0.03


def test_finds_the_best_of_what_it_drew():
    problem = toys.chain(3)
    state, proposed = toys.search_for(RandomSearch(batch=8), problem, generations=20)
    everything = {name: np.concatenate([batch[name] for batch in proposed]) for name in proposed[0]}
    outcomes = jax.vmap(problem.evaluate)(everything)
    costs = np.where(outcomes.feasible, outcomes.cost, np.inf)
    assert float(state.best.cost) == costs.min()
    assert int(state.best.found_at) == costs.argmin() + 1
    assert int(state.evaluations) == 160


def test_generations_and_seeds_differ():
    problem = toys.chain(4)
    _, first = toys.search_for(RandomSearch(), problem, generations=2, seed=0)
    _, again = toys.search_for(RandomSearch(), problem, generations=2, seed=0)
    _, other = toys.search_for(RandomSearch(), problem, generations=2, seed=1)
    np.testing.assert_array_equal(first[1]["weights"], again[1]["weights"])
    assert (first[0]["weights"] != first[1]["weights"]).any()
    assert (first[0]["weights"] != other[0]["weights"]).any()
