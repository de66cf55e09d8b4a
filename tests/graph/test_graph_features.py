"""Features by hand, and what must not change them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import egx.zoo
from egx.graph.builder import GraphBuilder
from egx.graph.features import NODE_FEATURES, node_features
from egx.graph.generators import cnn_like, random_graph
from egx.graph.graph import Graph
from egx.graph.padding import pad_graph, pad_to_bucket, stack_graphs

compiled = jax.jit(node_features)


def column(graph: Graph, name: str) -> list[float]:
    return np.asarray(compiled(graph))[:, NODE_FEATURES.index(name)].tolist()


def three_ops() -> Graph:
    builder = GraphBuilder("three")
    fields = {"kind": "contraction", "op_type": "conv", "flops": 1.0}
    (a,) = builder.op("a", inputs=[], output_bytes=[15], weight_bytes=3, **fields)
    window = {"kernel_x": 7, "stride": 1, "groups": 3, "batch": 15, "input_x": 255}
    (b,) = builder.op("b", inputs=[a, a], output_bytes=[1], attributes=window, **fields)
    builder.op("c", inputs=[b], output_bytes=[7, 8], weight_bytes=9, **fields)
    return builder.build()


def test_there_are_the_nineteen_of_the_paper():
    assert len(NODE_FEATURES) == len(set(NODE_FEATURES)) == 19
    features = compiled(three_ops())
    assert features.shape == (3, 19)
    assert features.dtype == jnp.float32


def test_features_by_hand():
    graph = three_ops()
    assert column(graph, "op_id") == [0, 0.5, 1]
    assert column(graph, "weight_bytes") == pytest.approx([2 / 32, 0, np.log2(10) / 32])
    assert column(graph, "input_bytes") == pytest.approx([0, np.log2(31) / 32, 1 / 32])
    assert column(graph, "output_bytes") == pytest.approx([4 / 32, 1 / 32, 4 / 32])
    assert column(graph, "ops_left") == pytest.approx([np.log2(3) / 16, 1 / 16, 0])
    assert column(graph, "weights_left") == pytest.approx([9 / 12, 9 / 12, 0])
    assert column(graph, "kernel_x") == pytest.approx([0, 3 / 4, 0])
    assert column(graph, "stride") == pytest.approx([0, 1 / 4, 0])
    assert column(graph, "groups") == pytest.approx([0, 2 / 16, 0])
    assert column(graph, "batch") == pytest.approx([0, 4 / 16, 0])
    assert column(graph, "input_x") == pytest.approx([0, 8 / 16, 0])


@pytest.mark.parametrize("name", ["bert", "resnet50", "resnet101"])
def test_features_are_bounded_and_tell_ops_apart(name):
    features = np.asarray(compiled(egx.zoo.load(name).graph))
    assert features.min() >= 0
    assert features.max() <= 1
    assert len(np.unique(features, axis=0)) == len(features)


@pytest.mark.parametrize("seed", range(2))
def test_padding_changes_nothing_and_its_rows_are_zero(seed):
    graph = random_graph(np.random.default_rng(seed), ops=13).graph
    plain = np.asarray(node_features(graph))
    padded = pad_graph(graph, (20, graph.num_tensors + 3, graph.num_uses + 9))
    features = np.asarray(node_features(padded))
    np.testing.assert_array_equal(features[:13], plain)
    assert not features[13:].any()


def test_the_unit_of_sizes_changes_them_little():
    graph = cnn_like(np.random.default_rng(0)).graph
    fine = compiled(graph)
    coarse = Graph(
        **{
            **vars(graph),
            "weight_units": -(-graph.weight_units // 64),
            "tensor_units": -(-graph.tensor_units // 64),
            "unit_bytes": jnp.asarray(64, jnp.int32),
        }
    )
    np.testing.assert_allclose(compiled(coarse), fine, atol=0.06)


def test_features_work_compiled_and_batched():
    graphs = [random_graph(np.random.default_rng(seed), ops=17).graph for seed in range(3)]
    batched = jax.jit(jax.vmap(node_features))(stack_graphs(graphs))
    for graph, features in zip(graphs, batched, strict=True):
        expected = compiled(pad_to_bucket(graph))
        ops = graph.num_ops
        np.testing.assert_allclose(features[:ops], expected[:ops], rtol=1e-6)
        assert not np.asarray(features)[ops:].any()


def test_a_graph_without_weights_uses_or_outputs():
    builder = GraphBuilder("bare")
    builder.op("a", kind="opaque", op_type="x", inputs=[], output_bytes=[], flops=0.0)
    features = np.asarray(compiled(builder.build()))
    assert features.shape == (1, 19)
    assert not features.any()


def test_terabytes_stay_finite():
    builder = GraphBuilder("huge")
    builder.op("a", kind="opaque", op_type="x", inputs=[], output_bytes=[2**50], flops=1e30)
    features = np.asarray(compiled(builder.build()))
    assert np.isfinite(features).all()
    assert features.max() < 2
