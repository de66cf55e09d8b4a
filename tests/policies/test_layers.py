"""Graph attention, along edges and in a matrix, against the definition."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from egx.graph.builder import GraphBuilder
from egx.policies.context import Edges, neighbour_edges
from egx.policies.layers import Dense, GraphAttention, initialised

OPS, INPUTS, HEADS, EACH = 7, 5, 2, 3


def diamond(pad_to=None):
    """Seven ops; op 1 has two outputs, op 3 reads one tensor twice, op 6 stands alone."""
    builder = GraphBuilder("diamond")

    def op(name, inputs, outputs=1):
        return builder.op(
            name,
            kind="elementwise",
            op_type="any",
            inputs=inputs,
            output_bytes=[1] * outputs,
            flops=1.0,
        )

    (a,) = op("0", [])
    b, c = op("1", [a], 2)
    (d,) = op("2", [a])
    (e,) = op("3", [b, b, c])
    (f,) = op("4", [d, e])
    op("5", [f, a])
    op("6", [])
    return builder.build(pad_to=pad_to)


PAIRS = {(0, 1), (0, 2), (1, 3), (2, 4), (3, 4), (4, 5), (0, 5)}


def adjacency(size=OPS):
    matrix = np.zeros((size, size), bool)
    for i, j in PAIRS:
        matrix[i, j] = matrix[j, i] = True
    matrix[np.arange(OPS), np.arange(OPS)] = True
    return matrix


def layer():
    return initialised(
        lambda draws: GraphAttention(INPUTS, HEADS * EACH, HEADS, draws), jax.random.key(3)
    )


def by_definition(layer, x, matrix):
    """softmax over neighbours of LeakyReLU(s_i + t_j), times the neighbours' values."""
    values = (x @ layer.weight).reshape(-1, HEADS, EACH)
    source = jnp.sum(values * layer.source, -1)
    target = jnp.sum(values * layer.target, -1)
    score = jax.nn.leaky_relu(source[:, None] + target[None], 0.2)
    score = jnp.where(matrix[:, :, None], score, -jnp.inf)
    weight = jax.nn.softmax(score, axis=1)
    return jnp.einsum("ijh,jhd->ihd", weight, values).reshape(x.shape[0], -1) + layer.bias


def test_neighbours_are_counted_once_both_ways_and_with_themselves():
    for graph in (diamond(), diamond(pad_to=(10, 12, 16))):
        edges = neighbour_edges(graph)
        mask = np.asarray(edges.mask)
        receivers, senders = np.asarray(edges.receivers), np.asarray(edges.senders)
        pairs = list(zip(receivers[mask].tolist(), senders[mask].tolist(), strict=True))
        assert len(pairs) == len(set(pairs))
        assert set(pairs) == set(zip(*map(np.ndarray.tolist, np.nonzero(adjacency())), strict=True))
        assert (np.diff(receivers) >= 0).all()


def neighbours(kind):
    return neighbour_edges(diamond()) if kind == "edges" else jnp.asarray(adjacency())


@pytest.mark.parametrize("kind", ["edges", "matrix"])
def test_attention_and_its_gradient_are_those_of_the_definition(kind):
    x = jax.random.normal(jax.random.key(1), (OPS, INPUTS)) * 3
    mask = jnp.ones(OPS, bool)

    def loss(call):
        return lambda layer, x: jnp.sum(jnp.sin(call(layer, x)))

    def fast(layer, x):
        return layer(layer.project(x), neighbours(kind), mask)

    def slow(layer, x):
        return by_definition(layer, x, jnp.asarray(adjacency()))

    np.testing.assert_allclose(fast(layer(), x), slow(layer(), x), atol=2e-6)
    got = jax.grad(loss(fast), (0, 1))(layer(), x)
    want = jax.grad(loss(slow), (0, 1))(layer(), x)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


@pytest.mark.parametrize("kind", ["edges", "matrix"])
def test_padding_changes_nothing(kind):
    size = 11
    x = jax.random.normal(jax.random.key(1), (OPS, INPUTS))
    padded = jnp.concatenate([x, 100.0 * jnp.ones((size - OPS, INPUTS))])
    if kind == "edges":
        around = neighbour_edges(diamond(pad_to=(size, 12, 16)))
    else:
        around = jnp.asarray(adjacency(size))
    one = layer()

    def total(one, x, around, mask):
        out = one(one.project(x), around, mask)[:OPS]
        return jnp.sum(jnp.sin(out)), out

    gradient = jax.grad(total, (0, 1), has_aux=True)
    (layer_got, x_got), got = gradient(one, padded, around, jnp.arange(size) < OPS)
    (layer_want, x_want), want = gradient(one, x, neighbours(kind), jnp.ones(OPS, bool))
    np.testing.assert_allclose(got, want, atol=2e-6)
    np.testing.assert_allclose(x_got[:OPS], x_want, atol=2e-5)
    assert (np.asarray(x_got[OPS:]) == 0).all()
    for a, b in zip(jax.tree.leaves(layer_got), jax.tree.leaves(layer_want), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


@pytest.mark.parametrize("kind", ["edges", "matrix"])
def test_extreme_scores_stay_finite(kind):
    one = jax.tree.map(lambda leaf: 1e3 * leaf, layer())
    x = jax.random.normal(jax.random.key(1), (OPS, INPUTS))

    def total(one, x):
        return jnp.sum(one(one.project(x), neighbours(kind), jnp.ones(OPS, bool)))

    value, gradient = jax.value_and_grad(total, (0, 1))(one, x)
    assert np.isfinite(value)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))


def test_a_batch_of_inputs_on_shared_edges_is_each_on_its_own():
    x = jax.random.normal(jax.random.key(1), (4, OPS, INPUTS))
    one, edges, mask = layer(), neighbour_edges(diamond()), jnp.ones(OPS, bool)
    together = jax.vmap(lambda x: one(one.project(x), edges, mask))(x)
    alone = jnp.stack([one(one.project(row), edges, mask) for row in x])
    np.testing.assert_allclose(together, alone, atol=2e-6)


def test_initial_weights_are_different_and_bounded():
    first, second = initialised(lambda d: (Dense(4, 50, d), Dense(4, 50, d)), jax.random.key(0))
    assert not np.array_equal(first.weight, second.weight)
    assert np.abs(first.weight).max() <= 0.5
    assert np.abs(first.weight).max() > 0.45
    assert np.abs(np.asarray(first.weight).mean()) < 0.1


def test_edges_are_a_pytree_of_arrays():
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(neighbour_edges(diamond())))
    assert isinstance(neighbour_edges(diamond()), Edges)
