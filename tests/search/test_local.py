"""Local search: whole passes, pairs, restarts, and the optimum of tiny problems."""

from __future__ import annotations

import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from egx.errors import SearchError
from egx.search.genome import Genome, encode
from egx.search.local import PAIRS, SINGLES, Local
from egx.search.moves import exchange, kick, make_room, neighbour_counts, shift_one
from tests.search import toys


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("options", [{}, {"batch": 4, "repair": True, "start": "zeros"}])
def test_reaches_the_optimum_of_tiny_problems(prefetch, options):
    search = Local(kick_rate=0.3, **options)
    for seed in (0, 2):
        problem = toys.chain(4, prefetch=prefetch, seed=seed)
        best = toys.optimum(problem)
        found = toys.costs(search, problem, budget=1600)
        assert found.min() == pytest.approx(best, rel=1e-5)
        assert found.max() < 1.05 * best


def test_a_pass_holds_every_single_move_once():
    problem = toys.chain(4)
    # 8 decisions of 3 levels have 16 single moves, which one batch holds.
    search = Local(batch=16)
    place = search.initial(problem, key=jax.random.key(0))
    place = eqx.tree_at(lambda p: p.cost, place, problem.reference_cost)
    candidates, _ = search.propose(problem, place, key=jax.random.key(1))
    rows = np.concatenate([candidates["weights"], candidates["activations"]], axis=1)
    start = np.asarray(encode(problem, problem.reference)).astype(int)
    assert ((rows != start).sum(axis=1) == 1).all()
    assert len({tuple(row) for row in rows.tolist()}) == 16


def run_until(search, problem, generations):
    state = toys.begin(search, problem, jax.random.key(0))
    places = [state.inner]
    for index in range(generations):
        _, state = toys.generation(search, problem, state, jax.random.key(index))
        places.append(state.inner)
    return places


def test_single_moves_then_pairs_then_a_restart():
    places = run_until(Local(batch=16, pairs=2.0, sideways=False), toys.chain(4), 60)
    kinds = [int(p.kind) for p in places]
    restarts = [int(p.restarts) for p in places]
    assert PAIRS in kinds
    assert restarts[-1] >= 2
    for before, after in itertools.pairwise(places):
        if int(after.restarts) > int(before.restarts):
            assert int(before.kind) == PAIRS
            assert int(after.kind) == SINGLES
            assert not np.isfinite(float(after.cost))
        elif int(before.kind) == SINGLES and int(after.kind) == PAIRS:
            assert int(after.fruitless) == 0
            assert float(after.cost) == float(before.cost)
        # The best plan only ever gets better.
        assert float(after.best_cost) <= float(before.best_cost)


def test_never_accepts_a_worse_neighbour():
    places = run_until(Local(batch=4), toys.chain(5, seed=2), 60)
    for before, after in itertools.pairwise(places):
        if int(after.restarts) == int(before.restarts) and np.isfinite(float(before.cost)):
            worse = (not before.feasible, float(before.cost)) < (
                not after.feasible,
                float(after.cost),
            )
            assert not worse


def test_same_seed_same_run():
    problem = toys.chain(4, seed=1)
    first, second = (toys.search_for(Local(), problem, generations=20, seed=5) for _ in range(2))
    for a, b in zip(first[1], second[1], strict=True):
        np.testing.assert_array_equal(a["weights"], b["weights"])


def test_refuses_an_unknown_start():
    with pytest.raises(SearchError, match="got 'nowhere'"):
        Local(start="nowhere").check(toys.chain(3))


def test_moves_do_what_they_say():
    problem = toys.chain(6)
    genome = Genome(problem)
    genes = encode(problem, problem.reference).at[0].set(2.0).at[1].set(0.0)
    active, head = np.asarray(genome.active), np.asarray(genome.head)
    before = np.asarray(genes)
    entered = set()
    for seed in range(30):
        key = jax.random.key(seed)
        one = np.asarray(shift_one(genome, genes, key=key))
        assert (one != before).sum() == 1
        assert set(one) <= {0.0, 1.0, 2.0}
        swapped = np.asarray(exchange(genome, genes, key=key))
        changed = np.flatnonzero(swapped != before)
        assert len(changed) in (0, 2)
        if len(changed):
            assert head[changed[0]] == head[changed[1]]
            np.testing.assert_array_equal(swapped[changed], before[changed][::-1])
        room = np.asarray(make_room(genome, genes, key=key, mean=jnp.asarray(1.0)))
        changed = np.flatnonzero(room != before)
        assert len(changed) >= 1
        assert len(set(head[changed])) == 1
        # All changes are between the same two values, one entry against the rest.
        pairs = [(before[i], room[i]) for i in changed]
        kinds = {frozenset(pair) for pair in pairs}
        assert len(kinds) == 1
        entered.add(len(changed))
    assert entered > {1, 2}
    np.testing.assert_array_equal(kick(genome, genes, key=key, rate=jnp.asarray(0.0)), before)
    assert (np.asarray(kick(genome, genes, key=key, rate=jnp.asarray(1.0))) != before).any()
    assert float(neighbour_counts(genome).sum()) == 2 * active.sum()
