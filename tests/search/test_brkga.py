"""BRKGA: against a slow generation in NumPy, its counts, ranks, seeds, proposals and bias."""

from __future__ import annotations

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import egx
from egx.errors import DecisionError, SearchError
from egx.graph.generators import regal_synthetic
from egx.problems.execution import Execution
from egx.search.betas import Betas, draw, quantile_knots, uniform_betas
from egx.search.brkga import BRKGA, breed, brkga_seeded, evolve, rank, seed_plans
from egx.search.keys import decode_flat, encode, flatten, gene_shapes, width
from egx.testing import check_search
from egx.training.generation import generation_keys, init_key
from egx.training.loop import run
from tests.search import toys
from tests.simulate import execution_cases

SMALL = {"population": 12, "elites": 3, "mutants": 2}


@functools.cache
def tight():
    """Two devices that hold little, so that many plans are infeasible."""
    model = regal_synthetic(np.random.default_rng(5), "watts_strogatz", 12)
    return Execution(model, execution_cases.devices(2, flops=10.0, level_bytes=260.0))


# The algorithm once more, a member at a time and in Python's own terms.


def slow_rank(cost, feasible):
    return sorted(range(len(cost)), key=lambda i: (not feasible[i], cost[i], i))


def slow_generation(keys, cost, feasible, uniform, *, elites, mutants, rho):
    order = slow_rank(cost, feasible)
    best, rest = order[:elites], order[elites:]
    fresh = []
    for row, numbers in enumerate(uniform):
        if row < len(uniform) - mutants:
            mother = keys[best[int(numbers[-2] * np.float32(len(best)))]]
            father = keys[rest[int(numbers[-1] * np.float32(len(rest)))]]
            fresh.append(
                [m if u < rho else f for m, f, u in zip(mother, father, numbers[:-2], strict=True)]
            )
        else:
            fresh.append(numbers[:-2])
    return np.asarray([keys[i] for i in best]), np.asarray(fresh), order


def test_ranks_put_feasible_first_and_keep_ties():
    rng = np.random.default_rng(0)
    for _ in range(20):
        cost = rng.integers(0, 4, 15).astype(np.float32)
        feasible = rng.random(15) < 0.5
        order = rank(jnp.asarray(cost), jnp.asarray(feasible))
        assert list(order) == slow_rank(cost, feasible)


@pytest.mark.parametrize("mutants", [0, 3, 9])
def test_breeding_agrees_with_a_slow_generation(mutants):
    rng = np.random.default_rng(mutants)
    keys = rng.random((12, 7)).astype(np.float32)
    cost, feasible = rng.integers(0, 5, 12).astype(np.float32), rng.random(12) < 0.7
    uniform = rng.random((9, 9)).astype(np.float32)
    uniform[0, -2:] = np.float32(1.0) - np.float32(2.0**-24)
    _, expected, order = slow_generation(
        keys, cost, feasible, uniform, elites=3, mutants=mutants, rho=0.7
    )
    found = breed(
        *(jnp.asarray(x) for x in (keys, np.asarray(order, np.int32), uniform)),
        elites=3,
        mutants=mutants,
        rho=jnp.float32(0.7),
    )
    np.testing.assert_array_equal(found, expected.astype(np.float32))


@eqx.filter_jit
def ask(search, problem, state, key):
    return search.ask(problem, state, key=key)


@eqx.filter_jit
def tell(search, problem, state, candidates, key):
    outcomes = jax.vmap(problem.evaluate)(candidates)
    return search.tell(problem, state, candidates, outcomes, key=key)[0], outcomes


def test_a_run_is_the_slow_one_with_the_same_numbers():
    problem = tight()
    search = BRKGA(**SMALL)
    key = jax.random.key(3)
    state = toys.begin(search, problem, init_key(key))
    keys = np.asarray(jax.random.uniform(init_key(key), (12, width(problem))))
    np.testing.assert_array_equal(state.inner.keys, keys)
    cost, feasible = np.full(12, np.inf, np.float32), np.zeros(12, bool)
    shares = []
    for generation in range(6):
        ask_key, tell_key = generation_keys(key, jnp.asarray(generation, jnp.int32))
        candidates, asked = ask(search, problem, state, ask_key)
        # Elites are never asked again: nine of twelve members are.
        waiting = jax.vmap(lambda one: decode_flat(problem, one))(jnp.asarray(keys[3:]))
        for name, value in candidates.items():
            np.testing.assert_array_equal(value, waiting[name])
        state, outcomes = tell(search, problem, asked, candidates, tell_key)
        cost[3:], feasible[3:] = outcomes.cost, outcomes.feasible
        shares.append(feasible[3:].mean())
        uniform = np.asarray(jax.random.uniform(tell_key, (9, width(problem) + 2)))
        elites, fresh, order = slow_generation(
            keys, cost, feasible, uniform, elites=3, mutants=2, rho=np.float32(0.7)
        )
        keys = np.concatenate([elites, fresh]).astype(np.float32)
        cost[:3], feasible[:3] = cost[order[:3]], feasible[order[:3]]
        np.testing.assert_array_equal(state.inner.keys, keys)
        np.testing.assert_array_equal(state.inner.cost[:3], cost[:3])
        np.testing.assert_array_equal(state.inner.feasible[:3], feasible[:3])
        assert np.isinf(state.inner.cost[3:]).all()
    assert 0 < np.mean(shares) < 1
    # The best so far leads the elites.
    assert float(state.best.cost) == cost[0]
    assert bool(state.best.feasible) == feasible[0]


def test_small_batches_evaluate_the_whole_first_population():
    problem = toys.chain(3)
    search = BRKGA(population=8, elites=4, mutants=1, batch=2)
    state, proposed = toys.search_for(search, problem, generations=4)
    first = toys.begin(search, problem, jax.random.fold_in(jax.random.key(0), 0)).inner.keys
    decoded = jax.vmap(lambda keys: decode_flat(problem, keys))(first)
    for name, value in decoded.items():
        np.testing.assert_array_equal(np.concatenate([p[name] for p in proposed]), value)
    # Eight members were evaluated; from here on a generation is the other four.
    assert int(state.inner.next) == 4
    assert float(state.inner.cost[0]) == float(state.best.cost)
    assert np.isinf(state.inner.cost[4:]).all()
    for generations, waiting in ((5, 6), (6, 4)):
        state, _ = toys.search_for(search, problem, generations=generations)
        assert int(state.inner.next) == waiting


def test_elites_that_are_most_of_the_population_have_costs_of_their_own():
    problem = toys.chain(3)
    search = BRKGA(population=6, elites=4, mutants=1)
    state, _ = toys.search_for(search, problem, generations=2)
    known = np.isfinite(state.inner.cost)
    assert known.tolist() == [True] * 4 + [False] * 2
    plans = jax.vmap(lambda keys: decode_flat(problem, keys))(state.inner.keys[:4])
    own = jax.vmap(problem.evaluate)(plans).cost
    np.testing.assert_array_equal(state.inner.cost[:4], own)


def test_counts_are_exact():
    for budget in (1, 9, 50):
        result = run(BRKGA(**SMALL), tight(), budget=budget, seeds=[0])[0]
        assert result.evaluations == budget
        assert result.found_at <= budget


def test_conforms_on_several_devices():
    check_search(BRKGA(**SMALL), tight(), eager=False)


def test_names():
    names = {"brkga": (), "brkga_seeded": ("all",)}
    for name, seeds in names.items():
        search = egx.search.registry.make_search(name, {"population": 50, "elites": 5})
        assert (search.seeds, search.population, search.batch_size) == (seeds, 50, 45)
    assert brkga_seeded(seeds="reference").seeds == ("reference",)


def test_seeds_stand_in_the_first_population():
    problem = toys.chain(5)
    plan = {name: jnp.asarray([0, 1, 2, 1, 0], jnp.int32) for name in problem.heads}
    known = problem.heuristics()
    search = BRKGA(**SMALL, seeds=("all", plan))
    state, (first,) = toys.search_for(search, problem, generations=1)
    plans = [*known.values(), plan]
    for row, expected in enumerate(plans):
        for name, value in expected.items():
            np.testing.assert_array_equal(first[name][row], value)
    _, (plain,) = toys.search_for(BRKGA(**SMALL), problem, generations=1)
    for name in plan:
        np.testing.assert_array_equal(first[name][len(plans) :], plain[name][len(plans) :])
    assert float(state.best.cost) <= float(problem.reference_cost)


def test_a_uniform_proposal_changes_nothing():
    problem = toys.chain(5)
    plain, plain_proposed = toys.search_for(BRKGA(**SMALL), problem, generations=4)
    search = BRKGA(**SMALL, proposal=uniform_betas(problem))
    uniform, proposed = toys.search_for(search, problem, generations=4)
    np.testing.assert_array_equal(plain.inner.keys, uniform.inner.keys)
    for a, b in zip(plain_proposed, proposed, strict=True):
        np.testing.assert_array_equal(a["weights"], b["weights"])


def test_a_proposal_shapes_the_first_population_and_the_mutants():
    problem = toys.chain(4)
    plan = {
        "weights": jnp.asarray([0, 1, 2, 1], jnp.int32),
        "activations": jnp.asarray([2, 2, 0, 1], jnp.int32),
    }
    # Sharp distributions around a plan.
    wanted = encode(problem, plan)
    betas = Betas(
        {name: 40.0 * value for name, value in wanted.items()},
        {name: 40.0 * (1.0 - value) for name, value in wanted.items()},
    )
    search = BRKGA(population=30, elites=5, mutants=5, proposal=betas)
    state, proposed = toys.search_for(search, problem, generations=2)
    for name, value in plan.items():
        np.testing.assert_array_equal(proposed[0][name], np.tile(value, (25, 1)))
        np.testing.assert_array_equal(proposed[1][name][-5:], np.tile(value, (5, 1)))
    # Distributions, or their quantile functions: the same run.
    knots = eqx.filter_jit(quantile_knots)(problem, betas)
    key = jax.random.fold_in(jax.random.key(0), 0)
    begun = eqx.filter_jit(search.begin)(problem, key=key, proposal=knots)
    np.testing.assert_allclose(begun.knots, state.inner.knots, rtol=1e-5)
    np.testing.assert_allclose(
        begun.keys, draw(knots, jax.random.uniform(key, begun.keys.shape)), rtol=1e-5
    )


def test_every_key_has_its_own_bias():
    problem = toys.chain(3)
    shapes = gene_shapes(problem)
    # Weights always from the elite parent, activations never.
    rho = {
        name: jnp.full(shape, float(name == "weights"), jnp.float32)
        for name, shape in shapes.items()
    }
    state, _ = toys.search_for(BRKGA(**SMALL, rho=rho), problem, generations=1)
    start = toys.begin(BRKGA(**SMALL), problem, jax.random.fold_in(jax.random.key(0), 0)).inner
    elite = np.asarray(state.inner.keys[:3])
    children = np.asarray(state.inner.keys[3:10])
    weights = np.asarray(flatten(problem, rho)) == 1
    others = [row for row in np.asarray(start.keys) if not (row == elite).all(1).any()]
    for child in children:
        assert (child[weights] == elite[:, weights]).all(1).any()
        assert (child[~weights] == np.asarray(others)[:, ~weights]).all(1).any()


def test_evolve_is_pure_and_finds_the_optimum_of_a_tiny_problem():
    problem = toys.chain(4)
    search = BRKGA(population=40, elites=8, mutants=12)

    @eqx.filter_jit
    def best(search, problem, budget, keys):
        return jax.vmap(lambda key: evolve(search, problem, budget=budget, key=key))(keys)

    keys = jax.random.split(jax.random.key(0), 3)
    some = best(search, problem, jnp.asarray(40, jnp.int32), keys)
    more = best(search, problem, jnp.asarray(4000, jnp.int32), keys)
    assert (some.found_at <= 40).all()
    assert (more.cost <= some.cost).all()
    assert (more.cost < some.cost).any()
    assert float(more.cost.min()) == pytest.approx(toys.optimum(problem), rel=1e-5)
    again = best(search, problem, jnp.asarray(4000, jnp.int32), keys)
    np.testing.assert_array_equal(more.cost, again.cost)
    value = problem.evaluate(jax.tree.map(lambda x: x[0], more.decisions))
    assert float(value.cost) == pytest.approx(float(more.cost[0]), rel=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"elites": 0}, "elites must be 1 to 99"),
        ({"elites": 100}, r"elites must be 1 to 99 \(population - 1\), got 100"),
        ({"mutants": 81}, "mutants must be 0 to 80"),
        ({"mutants": 0.1}, "mutants must be a whole number, got 0.1"),
        ({"batch": 30}, "batch must divide the 80"),
        ({"rho": 1.5}, "rho must be 0 to 1, got 1.5"),
        ({"seeds": "best"}, "seeds must be among .*reference.*, got 'best'"),
        ({"seeds": ({"weights": np.zeros(3, np.int32)},)}, "decision '.*' is missing"),
        ({**SMALL, "seeds": ("all",) * 9}, "seeds, but only 9 of"),
        ({"rho": {"weights": np.zeros((3, 3))}}, "rho must have keys of shapes"),
        ({"proposal": Betas({}, {})}, "proposal.alpha must have keys of shapes"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_refuses(options, message):
    with pytest.raises((SearchError, DecisionError), match=message):
        BRKGA(**options).check(toys.chain(3))


def test_no_seeds_need_no_heuristics():
    assert seed_plans(toys.chain(3), ()) == []
