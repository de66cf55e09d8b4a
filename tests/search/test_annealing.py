"""Annealing: it finds what is best, cools as told, and stays where it may be."""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from egx.errors import SearchError
from egx.search.annealing import Annealing
from tests.search import toys


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("options", [{}, {"chains": 4, "repair": True, "start": "random"}])
def test_reaches_the_optimum_of_tiny_problems(prefetch, options):
    search = Annealing(budget=1200, **options)
    for seed in (0, 2):
        problem = toys.chain(4, prefetch=prefetch, seed=seed)
        best = toys.optimum(problem)
        found = toys.costs(search, problem, budget=1200)
        # One chain of three may freeze beside it.
        assert np.median(found) == pytest.approx(best, rel=1e-5)
        assert found.max() < 1.1 * best


def test_moves_are_small_and_the_first_is_the_start():
    problem = toys.chain(4)
    _, proposed = toys.search_for(
        Annealing(rooms=0.0, swaps=0.0, first_temperature=1e-9, last_temperature=1e-9),
        problem,
        generations=30,
    )
    for name, value in problem.reference.items():
        np.testing.assert_array_equal(proposed[0][name][0], value)
    changed = sum(
        (proposed[1][name][0] != np.asarray(value)).sum()
        for name, value in problem.reference.items()
    )
    assert changed == 1


def test_at_zero_temperature_the_chain_never_rises():
    problem = toys.chain(5, seed=3)
    search = Annealing(first_temperature=1e-9, last_temperature=1e-9)
    state = toys.begin(search, problem, jax.random.key(0))
    costs = []
    for index in range(120):
        _, state = toys.generation(search, problem, state, jax.random.key(index))
        costs.append(float(state.inner.cost[0]))
        assert bool(state.inner.feasible[0])
    assert costs == sorted(costs, reverse=True)
    assert costs[-1] < costs[0]


def test_the_temperature_falls_geometrically_over_the_budget():
    problem = toys.chain(4)
    search = Annealing(budget=100.0, first_temperature=2.0, last_temperature=0.02)
    inner = search.initial(problem, key=jax.random.key(0))
    unit = float(problem.reference_cost) / 8  # four ops with two decisions each
    for told, expected in ((0, 2.0), (50, 0.2), (100, 0.02), (150, 0.02)):
        at = eqx.tree_at(lambda c: c.told, inner, jnp.asarray(told, jnp.int32))
        found = float(search.temperature(problem, at))
        assert found == pytest.approx(expected * unit, rel=1e-4)


def test_same_seed_same_run_and_other_seeds_differ():
    problem = toys.chain(4, seed=1)
    runs = [
        toys.search_for(Annealing(), problem, generations=40, seed=seed)[1] for seed in (7, 7, 8)
    ]
    flat = [np.concatenate([batch["weights"] for batch in run]) for run in runs]
    np.testing.assert_array_equal(flat[0], flat[1])
    assert (flat[0] != flat[2]).any()


def test_hyper_parameters_are_traced():
    traces = []

    @eqx.filter_jit
    def temperature(search, problem, inner):
        traces.append(None)
        return search.temperature(problem, inner)

    problem = toys.chain(3)
    for first in (1.0, 2.0, 3.0):
        search = Annealing(first_temperature=first, budget=first)
        temperature(search, problem, search.initial(problem, key=jax.random.key(0)))
    assert len(traces) == 1


def test_refuses_an_unknown_start():
    with pytest.raises(SearchError, match=r"start must be one of reference, .*got 'nowhere'"):
        Annealing(start="nowhere").check(toys.chain(3))
