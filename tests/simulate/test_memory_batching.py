"""A map has the same outcome to the last bit, whatever it is batched with and however."""

from __future__ import annotations

import functools

import chex
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from egx.simulate.memory import BLOCK, memory_table, run
from tests.oracles import memory_oracle as oracle
from tests.simulate import cases

OPS = 24
LEVELS = 3


@functools.cache
def tables(count=2):
    made = []
    for seed in range(count):
        rng = np.random.default_rng(seed)
        graph = cases.random_graph(rng, OPS - 5 * seed, pad_to=(OPS, 60, 100))
        hardware = cases.random_machine(rng, LEVELS)
        capacity = hardware.capacity_units(graph.unit_bytes)[0]
        made.append(memory_table(graph, hardware, capacity))
    return made


@functools.cache
def maps(count):
    rng = np.random.default_rng(7)
    return [jnp.asarray(x) for x in cases.random_maps(rng, OPS, LEVELS, count)]


def population(table, weights, activations, prefetch):
    one = functools.partial(run, prefetch=prefetch)
    return jax.jit(jax.vmap(one, in_axes=(None, 0, 0)))(table, weights, activations)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_bits_do_not_depend_on_the_batch(prefetch):
    (table, _), (weights, activations) = tables(), maps(12)
    expected = population(table, weights, activations, prefetch)
    assert len(np.unique(expected.latency_s)) > 6
    for count in (1, 7):
        part = population(table, weights[:count], activations[:count], prefetch)
        chex.assert_trees_all_equal(part, jax.tree.map(lambda x: x[:count], expected))  # noqa: B023
    times = BLOCK // 6 + 1  # more than two blocks
    blocks = population(table, *(jnp.tile(x, (times, 1)) for x in maps(12)), prefetch)
    repeated = jax.tree.map(lambda x: jnp.concatenate([x] * times), expected)
    chex.assert_trees_all_equal(blocks, repeated)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_single_maps_agree_with_and_without_jit(prefetch):
    (table, _), (weights, activations) = tables(), maps(12)
    expected = population(table, weights, activations, prefetch)
    one = functools.partial(run, table, prefetch=prefetch)
    for p in (0, 5, 11):
        row = jax.tree.map(lambda x: x[p], expected)  # noqa: B023
        chex.assert_trees_all_equal(one(weights[p], activations[p]), row)
        chex.assert_trees_all_equal(jax.jit(one)(weights[p], activations[p]), row)


@pytest.mark.parametrize("prefetch", [2])
def test_nested_axes_agree(prefetch):
    """Seeds over populations, graphs over seeds over populations, and the other way around."""
    (first, second), (weights, activations) = tables(), maps(12)
    one = functools.partial(run, prefetch=prefetch)
    expected = [population(t, weights, activations, prefetch) for t in (first, second)]
    grid = [x.reshape(3, 4, OPS) for x in (weights, activations)]
    over_maps = jax.vmap(one, in_axes=(None, 0, 0))
    seeds = jax.jit(jax.vmap(over_maps, in_axes=(None, 0, 0)))(first, *grid)
    shaped = [jax.tree.map(lambda x: x.reshape(3, 4, *x.shape[1:]), e) for e in expected]
    chex.assert_trees_all_equal(seeds, shaped[0])

    stacked = jax.tree.map(lambda *x: jnp.stack(x), first, second)
    both = jax.tree.map(lambda *x: jnp.stack(x), *shaped)
    over_graphs = jax.vmap(jax.vmap(over_maps, in_axes=(None, 0, 0)), in_axes=(0, None, None))
    chex.assert_trees_all_equal(jax.jit(over_graphs)(stacked, *grid), both)
    inner = jax.vmap(jax.vmap(one, in_axes=(0, None, None)), in_axes=(None, 0, 0))
    swapped = jax.tree.map(lambda *x: jnp.stack(x, axis=1), *expected)
    chex.assert_trees_all_equal(jax.jit(inner)(stacked, weights, activations), swapped)
    # Two axes of tables.
    square = jax.tree.map(lambda x: jnp.stack([x, x]), stacked)
    deep = jax.vmap(jax.vmap(over_maps, in_axes=(0, None, None)), in_axes=(0, None, None))
    got = jax.jit(deep)(square, weights, activations)
    flat = jax.tree.map(lambda *x: jnp.stack(x), *expected)
    chex.assert_trees_all_equal(jax.tree.map(lambda x: x[0], got), flat)
    chex.assert_trees_all_equal(jax.tree.map(lambda x: x[1], got), flat)


def test_one_number_of_the_machine_may_be_swept():
    (table, _), (weights, activations) = tables(), maps(3)
    sweep = jnp.stack([table.capacity_units, table.capacity_units // 2, table.capacity_units * 0])

    def with_capacity(capacity, weights, activations):
        return run(eqx.tree_at(lambda t: t.capacity_units, table, capacity), weights, activations)

    swept = jax.vmap(with_capacity)(sweep, weights, activations)
    for p in range(3):
        alone = with_capacity(sweep[p], weights[p], activations[p])
        chex.assert_trees_all_equal(jax.tree.map(lambda x: x[p], swept), alone)  # noqa: B023


def test_more_than_eight_levels():
    """Nine levels do not fit the byte that holds both choices of an op."""
    rng = np.random.default_rng(3)
    graph = cases.random_graph(rng, 12)
    hardware = cases.random_machine(rng, 9)
    table = memory_table(graph, hardware, hardware.capacity_units(graph.unit_bytes)[0])
    case = oracle.Case.of(graph, hardware)
    weights, activations = cases.random_maps(rng, 12, 9, 6)
    got = population(table, jnp.asarray(weights), jnp.asarray(activations), 0)
    for p in range(6):
        new_w, new_a, moved = oracle.rectify(case, weights[p].tolist(), activations[p].tolist())
        assert got.weights[p].tolist() == new_w
        assert got.activations[p].tolist() == new_a
        assert int(got.moved_units[p]) == moved
        np.testing.assert_allclose(
            got.latency_s[p], oracle.latency(case, new_w, new_a, 0), rtol=2e-6
        )
