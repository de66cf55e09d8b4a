"""EGRL+ and its parts: moves on genomes, prices on capacities, islands."""

from __future__ import annotations

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import egx
from egx.graph.builder import GraphBuilder
from egx.hardware.spec import Hardware
from egx.search.egrl_plus import EGRLPlus
from egx.search.genome import (
    Genome,
    change_one,
    decode,
    encode,
    hash_genes,
    set_block,
    swap_two,
    window_crossover,
)
from egx.search.pricing import (
    answers,
    fitting_scale,
    one_hot,
    open_market,
    quotes,
    trade,
    violations,
)
from tests.search import toys


@functools.cache
def knapsack() -> egx.MemoryPlacement:
    """Six ops with weights of unlike worth, and room for some of them on the fast level."""
    builder = GraphBuilder("knapsack")
    tensor = builder.op(
        "start", kind="elementwise", op_type="relu", inputs=[], output_bytes=[4], flops=1.0
    )
    for index, size in enumerate([60, 50, 40, 30, 20, 10]):
        tensor = builder.op(
            f"op{index}",
            kind="contraction",
            op_type="conv",
            inputs=tensor,
            output_bytes=[4],
            flops=30.0 * (index % 3),
            weight_bytes=size,
        )
    builder.output(tensor[0])
    hardware = Hardware(
        flops_per_s=[[1e3] * 5],
        level_bytes=[[1e9, 100.0]],
        read_bytes_per_s=[[1e3, 1e5]],
        write_bytes_per_s=[[1e3, 1e5]],
        link_bytes_per_s=[[0.0]],
        link_latency_s=[[0.0]],
        launch_s=[1e-3],
    )
    return egx.MemoryPlacement(builder.build_model(pad_to=(9, 9, 9)), hardware)


@functools.cache
def brute_force() -> float:
    """The least cost over all valid maps of the knapsack."""
    problem = knapsack()
    n = problem.graph.num_ops
    index = np.arange(2**13)
    bits = (index[:, None] >> np.arange(13)) & 1
    weights = np.zeros((len(index), n), np.int32)
    activations = np.zeros((len(index), n), np.int32)
    weights[:, 1:7] = bits[:, :6]
    activations[:, :7] = bits[:, 6:]
    outcomes = jax.jit(jax.vmap(problem.evaluate))({"weights": weights, "activations": activations})
    costs = np.where(outcomes.feasible, outcomes.cost, np.inf)
    return float(costs.min())


def test_encode_and_decode_are_inverse_and_padding_is_inactive():
    problem = knapsack()
    genome = Genome(problem)
    genes = encode(problem, problem.reference)
    decoded = decode(problem, genes)
    for name, value in problem.reference.items():
        np.testing.assert_array_equal(decoded[name], value)
    # Six ops with weights, seven with outputs.
    assert int(genome.active_count) == 13
    assert set(np.asarray(genome.active_index[:13])) == set(np.flatnonzero(genome.active))


@pytest.mark.parametrize("seed", range(5))
def test_moves_touch_active_entries_only_and_stay_in_range(seed):
    problem = knapsack()
    genome = Genome(problem)
    key = jax.random.key(seed)
    genes = encode(problem, problem.reference)
    mate = jnp.where(genome.active, 1.0 - genes, genes)
    moved = [
        change_one(genome, genes, key=key),
        swap_two(genome, genes, key=key),
        set_block(genome, genes, key=key, mean=jnp.asarray(3.0)),
        window_crossover(genome, genes, mate, key=key, mean=jnp.asarray(3.0)),
    ]
    for new in moved:
        changed = np.asarray(new != genes)
        assert not changed[~np.asarray(genome.active)].any()
        assert set(np.unique(new)) <= {0.0, 1.0}
    swapped = moved[1]
    # An exchange keeps the number of entries on each level.
    assert float(swapped.sum()) == float(genes.sum())


def test_equal_candidates_hash_alike_and_unlike_ones_do_not():
    problem = knapsack()
    genome = Genome(problem)
    genes = encode(problem, problem.reference)
    inactive = int(np.flatnonzero(~np.asarray(genome.active))[0])
    same = genes.at[inactive].set(1.0 - genes[inactive])
    assert int(hash_genes(genome, genes)) == int(hash_genes(genome, same))
    hashes = {
        int(hash_genes(genome, genes.at[i].set(1.0 - genes[i])))
        for i in np.flatnonzero(genome.active)
    }
    assert len(hashes) == 13


def test_quotes_say_what_a_choice_costs_to_first_order():
    problem = knapsack()
    market = open_market(problem)
    cost, room = quotes(problem, market.average, jnp.exp(market.log_price), jnp.asarray(0.1))
    # Weights on the fast level never cost more time, and always take room.
    assert np.all(cost["weights"][1:7, 1] <= cost["weights"][1:7, 0])
    assert np.all(room["weights"][1:7, 1] > room["weights"][1:7, 0])
    step = 1e-2
    moved = {**market.average, "weights": market.average["weights"].at[1, 1].add(step)}
    before, _ = problem.relaxed_terms(market.average, jnp.asarray(0.1))
    after, _ = problem.relaxed_terms(moved, jnp.asarray(0.1))
    slope = float((after - before) / problem.reference_cost) / step
    assert slope == pytest.approx(float(cost["weights"][1, 1]), rel=0.05, abs=1e-4)


def test_scaled_prices_make_the_answer_fit():
    problem = knapsack()
    market = open_market(problem)
    cost, room = quotes(problem, market.average, jnp.exp(market.log_price), jnp.asarray(0.1))
    free = answers(cost, room, jnp.zeros(()))
    assert float(violations(problem, free).max()) > 0
    scale = fitting_scale(problem, lambda s: answers(cost, room, s))
    assert float(violations(problem, answers(cost, room, scale)).max()) <= 0


def test_a_few_trades_find_most_of_the_gain():
    problem = knapsack()
    market, costs = open_market(problem), []
    step = eqx.filter_jit(
        lambda market: trade(
            problem,
            market,
            rate=jnp.asarray(0.5),
            memory=jnp.asarray(5.0),
            temperature=jnp.asarray(0.1),
        )
    )
    value, mended = eqx.filter_jit(problem.evaluate), eqx.filter_jit(problem.repair)
    for _ in range(20):
        market, candidate = step(market)
        outcome = value(mended(candidate))
        assert bool(outcome.feasible)
        costs.append(float(outcome.cost))
    zero = {name: jnp.zeros(9, jnp.int32) for name in problem.heads}
    slowest = float(value(zero).cost)
    assert slowest - min(costs) > 0.8 * (slowest - brute_force())
    assert all(float(p.sum()) == pytest.approx(9.0, rel=1e-4) for p in market.average.values())


@pytest.mark.parametrize("options", [{}, {"gradients": False}, {"heuristic_seeds": False}])
def test_finds_the_optimum_of_a_knapsack(options):
    problem = knapsack()
    result = egx.optimize(problem, EGRLPlus(budget=600, **options), budget=600, seed=1)
    assert result.feasible
    assert result.cost == pytest.approx(brute_force(), rel=1e-5)


def test_starts_are_evaluated_as_they_are():
    problem = knapsack()
    search = EGRLPlus(budget=100)
    state = toys.begin(search, problem, jax.random.key(0))
    ask = eqx.filter_jit(lambda search, problem, *rest, key: search.ask(problem, *rest, key=key))
    candidates, _ = ask(search, problem, state, key=jax.random.key(1))
    plans = jax.vmap(lambda c: encode(problem, c))(candidates)
    for plan in problem.heuristics().values():
        genes = encode(problem, plan)
        assert bool(jnp.any(jnp.all(plans == genes, axis=1)))


def test_given_plans_are_among_the_starts_and_the_result_is_never_worse():
    problem = knapsack()
    best = egx.optimize(problem, EGRLPlus(budget=600), budget=600, seed=1)
    plans = {name: jnp.asarray(value)[None] for name, value in best.decisions.items()}
    again = egx.optimize(problem, EGRLPlus(budget=20, plans=plans), budget=20, seed=2)
    assert again.cost <= best.cost


def test_known_plans_leave_room_for_given_ones():
    problem = knapsack()
    odd = jnp.arange(problem.graph.num_ops, dtype=jnp.int32) % 2
    plan = {"weights": odd, "activations": 1 - odd}
    genes = encode(problem, plan)
    known = [encode(problem, one) for one in problem.heuristics().values()]
    assert not any(bool(jnp.all(one == genes)) for one in known)
    search = EGRLPlus(batch=10, elites=len(known), plans={k: v[None] for k, v in plan.items()})
    elites = search.init(problem, key=jax.random.key(0)).inner.elites
    assert bool(jnp.any(jnp.all(elites.genes == genes, axis=-1)))


def test_problems_compare_nothing_but_one_hot_rows():
    problem = knapsack()
    table = one_hot(problem, problem.reference)
    for name, head in problem.heads.items():
        assert table[name].shape == (problem.graph.num_ops, head.choices)
        np.testing.assert_array_equal(table[name].argmax(-1), problem.reference[name])
