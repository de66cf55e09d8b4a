"""Buckets and padding: little waste, the same graph."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import egx.zoo
from egx.errors import GraphError
from egx.graph.builder import GraphBuilder
from egx.graph.generators import random_graph
from egx.graph.graph import Graph, graph_digest, real_sizes
from egx.graph.padding import (
    SMALLEST_BUCKET,
    bucket,
    bucket_sizes,
    pad_graph,
    pad_to_bucket,
    stack_graphs,
)


def assert_equal(one: Graph, two: Graph) -> None:
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


def test_buckets_are_few_and_waste_little():
    sizes = [bucket(n) for n in range(20_000)]
    assert all(have >= n for n, have in enumerate(sizes))
    assert sizes == sorted(sizes)
    assert all((have - n) / n < 0.25 for n, have in enumerate(sizes) if n > SMALLEST_BUCKET)
    assert sorted(set(sizes))[:12] == [16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 112]
    assert len(set(sizes)) <= 43
    # A bucket is its own bucket, so padding twice is padding once.
    assert all(bucket(size) == size for size in set(sizes))


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    ops=st.integers(1, 25),
    slack=st.lists(st.tuples(*[st.integers(0, 6)] * 3), min_size=1, max_size=3),
)
def test_padding_again_and_again_equals_building_padded(seed, ops, slack):
    plain = random_graph(np.random.default_rng(seed), "erdos_renyi", ops, probability=0.2)
    real = real_sizes(plain.graph)
    graph = plain.graph
    for extra in slack:
        sizes = tuple(n + e for n, e in zip(real, extra, strict=True))
        graph = pad_graph(graph, sizes)
        rng = np.random.default_rng(seed)
        expected = random_graph(rng, "erdos_renyi", ops, probability=0.2, pad_to=sizes)
        assert_equal(graph, expected.graph)
        assert graph_digest(graph) == plain.digest == expected.digest
    assert_equal(pad_graph(graph, real), plain.graph)


@pytest.mark.parametrize(("ops", "extra"), [(1, 4), (6, 0), (12, 1), (20, 7)])
def test_lifetimes_and_sums_do_not_see_padding(ops, extra):
    graph = random_graph(np.random.default_rng(ops), ops=ops).graph
    n, t, u = real_sizes(graph)
    padded = pad_graph(graph, (n + extra, t + 2 * extra, u + extra))
    np.testing.assert_array_equal(padded.input_units()[:n], graph.input_units())
    np.testing.assert_array_equal(padded.output_units()[:n], graph.output_units())
    assert not np.asarray(padded.input_units())[n:].any()
    assert not np.asarray(padded.output_units())[n:].any()
    # A graph output is held to the end, which padding puts off.
    last = np.minimum(np.asarray(padded.last_step())[:t], n - 1)
    np.testing.assert_array_equal(last, graph.last_step())
    np.testing.assert_array_equal(padded.use_producer()[:u], graph.use_producer())


def test_digests_differ_when_graphs_do():
    digests = {random_graph(np.random.default_rng(seed), ops=9).digest for seed in range(20)}
    assert len(digests) == 20
    model = egx.zoo.resnet50()
    changed = Graph(**{**vars(model.graph), "flops": model.graph.flops.at[3].add(1e6)})
    assert graph_digest(changed) != model.digest


def test_buckets_of_the_zoo():
    for name in egx.zoo.names():
        graph = egx.zoo.load(name).graph
        padded = pad_to_bucket(graph)
        assert (padded.num_ops, padded.num_tensors, padded.num_uses) == bucket_sizes(graph)
        assert padded.num_ops < 1.25 * graph.num_ops
        assert graph_digest(padded) == graph_digest(graph)


def test_a_graph_without_tensors_can_be_padded():
    builder = GraphBuilder("bare")
    builder.op("a", kind="opaque", op_type="x", inputs=[], output_bytes=[], flops=1.0)
    padded = pad_to_bucket(builder.build())
    assert real_sizes(padded) == (1, 0, 0)
    assert padded.input_units().tolist() == [0] * SMALLEST_BUCKET
    assert padded.tensor_producer.tolist() == [SMALLEST_BUCKET - 1] * SMALLEST_BUCKET


def test_too_small_sizes_are_refused():
    graph = random_graph(np.random.default_rng(0), ops=9).graph
    with pytest.raises(GraphError, match="9 ops cannot be padded to 8"):
        pad_graph(graph, (8, 100, 100))


def test_graphs_of_different_sizes_stack():
    models = [random_graph(np.random.default_rng(k), ops=n) for k, n in enumerate((3, 18, 30))]
    stacked = stack_graphs([model.graph for model in models])
    assert stacked.op_mask.shape == (3, 32)
    assert stacked.unit_bytes.shape == (3,)
    assert stacked.op_mask.sum(axis=1).tolist() == [3, 18, 30]
    outputs = jax.vmap(lambda graph: graph.output_units())(stacked)
    for k, model in enumerate(models):
        one = jax.tree.map(lambda leaf, k=k: leaf[k], stacked)
        assert graph_digest(one) == model.digest
        np.testing.assert_array_equal(outputs[k, : model.graph.num_ops], model.graph.output_units())
    assert jnp.issubdtype(stacked.tensor_units.dtype, jnp.int32)
    with pytest.raises(GraphError, match="at least one graph"):
        stack_graphs([])
