"""IDRS draws other distributions each round; the grid of tuned BRKGA finds what it should."""

from __future__ import annotations

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import pytest

from egx.errors import SearchError
from egx.search.betas import bin_knots
from egx.search.brkga import BRKGA
from egx.search.idrs import IDRS
from egx.search.tuning import Setting, tune
from tests.search import toys

SMALL = BRKGA(population=8, elites=2, mutants=2)


def test_rounds_begin_anew_with_other_distributions():
    problem = toys.chain(4)
    # 24 evaluations in 2 rounds: 12 each, two asks of 6.
    search = IDRS(brkga=SMALL, budget=24, rounds=2)
    assert int(search.asks_per_round) == 2
    knots, elites = [], []
    for generations in (0, 1, 2, 3, 4):
        state, _ = toys.search_for(search, problem, generations=generations)
        knots.append(np.asarray(state.inner.population.knots))
        elites.append(np.isfinite(state.inner.population.cost[:2]).any())
    np.testing.assert_array_equal(knots[0], knots[1])
    np.testing.assert_array_equal(knots[2], knots[3])
    assert (knots[0] != knots[2]).any(1).mean() > 0.8
    assert (knots[2] != knots[4]).any(1).mean() > 0.8
    # A round starts without elites.
    assert elites == [False, True, False, True, False]
    # All distributions are bins, and many different ones.
    bins = np.asarray(eqx.filter_jit(bin_knots)())
    flat = bins.reshape(-1, bins.shape[-1])
    match = np.isclose(knots[0][:, None], flat, rtol=1e-4, atol=1e-4).all(2)
    assert (match.sum(1) == 1).all()
    assert len(np.unique(match.argmax(1))) > 10


def test_the_rounds_share_the_budget():
    for budget, rounds, asks in ((5000, 5, 13), (5000, 1, 63), (40, 5, 1), (10, 100, 1)):
        assert int(IDRS(budget=budget, rounds=rounds).asks_per_round) == asks


def test_refuses():
    with pytest.raises(SearchError, match="rounds must be 1 or more, got 0"):
        IDRS(rounds=0).check(toys.chain(3))
    with pytest.raises(SearchError, match="elites must be 1 to 99"):
        IDRS(brkga=BRKGA(elites=100)).check(toys.chain(3))


def test_tuned_brkga():
    problems = [toys.chain(4, seed=seed) for seed in (0, 1)]
    seen: list[Setting] = []
    settings = tune(
        problems,
        budget=60,
        populations=(10, 20),
        elites=(0.2,),
        mutants=(0.2,),
        rhos=(0.5, 0.7),
        progress=seen.append,
    )
    grid = {(s.population, s.elites, s.mutants, s.rho) for s in settings}
    assert grid == {(p, 0.2, 0.2, r) for p in (10, 20) for r in (0.5, 0.7)}
    assert [s.score for s in settings] == sorted(s.score for s in seen)
    search = settings[0].search()
    assert (search.population, search.elites, search.mutants) == (
        settings[0].population,
        settings[0].population // 5,
        settings[0].population // 5,
    )
    assert float(search.rho) == np.float32(settings[0].rho)
    search.check(problems[0])
    # The score of a setting that stands alone is that of the grid.
    alone = tune(
        problems,
        budget=60,
        populations=(20,),
        elites=(0.2,),
        mutants=(0.2,),
        rhos=(0.5, 0.7),
    )
    assert alone[0] == next(s for s in settings if s.population == 20)


def test_tuning_refuses():
    with pytest.raises(SearchError, match="tune needs problems"):
        tune([])
    free = eqx.tree_at(lambda p: p.reference_cost, toys.chain(3), jnp.zeros(()))
    with pytest.raises(SearchError, match="reference of problem 0 costs 0"):
        tune([free])
