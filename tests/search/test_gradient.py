"""The gradient searcher: tiny optima, honest counts, refusals."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from egx.errors import SearchError
from egx.search.gradient import GradientSearch
from tests.search import toys


@pytest.mark.parametrize("prefetch", [0, 2])
def test_comes_close_to_the_optimum_of_tiny_problems(prefetch):
    search = GradientSearch(budget=800)
    for seed in (0, 2):
        problem = toys.chain(4, prefetch=prefetch, seed=seed)
        best = toys.optimum(problem)
        found = toys.costs(search, problem, budget=800)
        # Rounding a relaxed plan promises no optimum: what is left is a sliver of the gain.
        assert best <= found.min() <= best + 0.05 * (float(problem.reference_cost) - best)
        assert found.max() < 1.1 * best


def test_every_candidate_is_valid_and_one_step_ahead():
    problem = toys.chain(5)
    search = GradientSearch(budget=80, batch=4)
    inner = search.initial(problem, key=jax.random.key(0))
    candidates, after = search.propose(problem, inner, key=jax.random.key(1))
    assert bool(jnp.all(jax.vmap(problem.evaluate)(candidates).feasible))
    count = after.relaxations.moments[0].count
    np.testing.assert_array_equal(count, np.ones(4))
    moved = jax.tree.map(
        lambda a, b: float(jnp.max(jnp.abs(a - b))),
        after.relaxations.logits,
        inner.relaxations.logits,
    )
    assert all(0 < distance < 1 for distance in moved.values())


def test_descents_differ_in_start_and_penalty():
    problem = toys.chain(5)
    search = GradientSearch(batch=3, penalty_spread=100.0)
    penalties = np.asarray(search._penalties())
    np.testing.assert_allclose(
        penalties, float(search.descent.penalty) * np.array([0.01, 1.0, 100.0]), rtol=1e-5
    )
    logits = search.initial(problem, key=jax.random.key(0)).relaxations.logits["weights"]
    assert (logits[0] != logits[1]).any()


def test_same_seed_same_run():
    problem = toys.chain(4, seed=1)
    search = GradientSearch(budget=80)
    first, second = (toys.search_for(search, problem, generations=10, seed=5) for _ in range(2))
    for a, b in zip(first[1], second[1], strict=True):
        np.testing.assert_array_equal(a["activations"], b["activations"])


def test_refuses_what_has_no_relaxation(monkeypatch):
    problem = toys.chain(3)
    monkeypatch.setattr(type(problem), "has_relaxation", property(lambda self: False))
    with pytest.raises(SearchError, match="MemoryPlacement has none"):
        GradientSearch().check(problem)
