"""Random models: reproducible, of the asked size, and with the traits that were asked for."""

from __future__ import annotations

import numpy as np
import pytest

from egx.errors import GraphError
from egx.graph.generators import (
    cnn_like,
    random_graph,
    regal_synthetic,
    transformer_like,
)
from egx.graph.graph import CONTRACTION, Model, real_sizes
from egx.graph.topologies import (
    TOPOLOGIES,
    barabasi_albert,
    erdos_renyi,
    layered,
    series_parallel,
    stochastic_block,
    watts_strogatz,
)

PLAIN = {"multi_output": 0.0, "repeated_use": 0.0, "dead": 0.0, "zero_size": 0.0, "outputs": 0.0}


def edges(parents: list[list[int]]) -> int:
    return sum(map(len, parents))


def sinks(model: Model) -> set[int]:
    graph = model.graph
    fed = set(np.asarray(graph.use_producer()).tolist())
    return set(range(graph.num_ops)) - fed


@pytest.mark.parametrize("family", sorted(TOPOLOGIES))
@pytest.mark.parametrize("ops", [1, 2, 3, 40])
def test_families_are_acyclic_and_reproducible(family, ops):
    first = TOPOLOGIES[family](np.random.default_rng(5), ops)
    assert first == TOPOLOGIES[family](np.random.default_rng(5), ops)
    assert len(first) == ops
    for i, parents in enumerate(first):
        assert parents == sorted(set(parents))
        assert all(0 <= parent < i for parent in parents)
    one = random_graph(np.random.default_rng(5), family, ops)
    assert one.digest == random_graph(np.random.default_rng(5), family, ops).digest
    assert real_sizes(one.graph)[0] == ops


def test_edge_counts_of_the_families():
    rng = np.random.default_rng(0)
    pairs = 200 * 199 / 2
    assert edges(erdos_renyi(rng, 200, 0.05)) == pytest.approx(0.05 * pairs, rel=0.1)
    inside = 4 * 50 * 49 / 2
    expected = 0.3 * inside + 0.001 * (pairs - inside)
    assert edges(stochastic_block(rng, 200)) == pytest.approx(expected, rel=0.1)
    # Rewiring moves edges and makes none.
    assert edges(watts_strogatz(rng, 200, 4, 0.3)) == 400
    assert edges(barabasi_albert(rng, 200, 2)) == 2 * 198
    assert TOPOLOGIES["chain"](rng, 5) == [[], [0], [1], [2], [3]]


def test_a_ring_without_rewiring_is_regular():
    parents = watts_strogatz(np.random.default_rng(1), 30, 4, 0.0)
    degree = np.array([len(p) for p in parents])
    for sources in parents:
        for parent in sources:
            degree[parent] += 1
    assert (degree == 4).all()


def test_barabasi_albert_has_hubs():
    parents = barabasi_albert(np.random.default_rng(1), 400, 2)
    degree = np.array([len(p) for p in parents])
    for sources in parents:
        for parent in sources:
            degree[parent] += 1
    assert degree.min() >= 1
    # A random graph of mean degree 4 on 400 nodes hardly passes 15.
    assert degree.max() > 20


def test_blocks_keep_to_themselves():
    parents = stochastic_block(np.random.default_rng(1), 80, 4, inside=0.5, between=0.0)
    component = list(range(80))

    def root(node: int) -> int:
        return node if component[node] == node else root(component[node])

    for i, sources in enumerate(parents):
        for parent in sources:
            component[root(i)] = root(parent)
    assert len({root(i) for i in range(80)}) == 4


def test_layers_are_as_wide_as_asked():
    parents = layered(np.random.default_rng(1), 60, width=3, density=1.0)
    assert max(map(len, parents)) <= 3
    assert all(sources for sources in parents[3:])


def test_series_parallel_has_no_forbidden_minor_in_small_cases():
    """Three ops: a chain, a fork, a join, or some apart; never a skip beside the chain."""
    shapes = {
        tuple(map(tuple, series_parallel(np.random.default_rng(seed), 3))) for seed in range(60)
    }
    assert ((), (0,), (1,)) in shapes
    assert ((), (0,), (0,)) in shapes
    assert ((), (), (0, 1)) in shapes
    assert ((), (0,), (0, 1)) not in shapes


def test_plain_options_make_plain_graphs():
    model = random_graph(np.random.default_rng(2), "layered", 80, **PLAIN)
    graph = model.graph
    assert graph.num_tensors == 80
    assert (np.asarray(graph.tensor_units) > 0).all()
    pairs = list(zip(graph.use_tensor.tolist(), graph.use_consumer.tolist(), strict=True))
    assert len(pairs) == len(set(pairs))
    outputs = np.asarray(graph.tensor_producer)[np.asarray(graph.tensor_is_output)]
    assert set(outputs.tolist()) == sinks(model)
    weighted = np.asarray(graph.weight_units) > 0
    np.testing.assert_array_equal(weighted, np.asarray(graph.op_class) == CONTRACTION)


def test_options_bring_their_traits():
    def build(**options):
        return random_graph(np.random.default_rng(2), "layered", 80, **(PLAIN | options))

    assert build(multi_output=1.0).graph.num_tensors >= 160
    twice = build(repeated_use=1.0).graph
    pairs = list(zip(twice.use_tensor.tolist(), twice.use_consumer.tolist(), strict=True))
    assert len(pairs) == 2 * len(set(pairs))
    dead = build(dead=1.0)
    assert not np.asarray(dead.graph.tensor_is_output).any()
    assert sinks(dead)
    empty = build(zero_size=1.0).graph
    assert not np.asarray(empty.tensor_units).any()
    assert not np.asarray(empty.flops).any()
    assert np.asarray(build(outputs=1.0).graph.tensor_is_output).all()


@pytest.mark.parametrize("build", [cnn_like, transformer_like])
@pytest.mark.parametrize("ops", [1, 10, 60, 150])
def test_networks_have_about_the_asked_size(build, ops):
    for seed in range(5):
        model = build(np.random.default_rng(seed), ops)
        assert model.digest == build(np.random.default_rng(seed), ops).digest
        assert ops <= real_sizes(model.graph)[0] <= ops + 9
        assert sinks(model) == {model.graph.num_ops - 1}
        assert np.asarray(model.graph.tensor_is_output).tolist()[-1]


def test_networks_are_of_realistic_size():
    for seed in range(5):
        image = cnn_like(np.random.default_rng(seed), 60).graph
        assert 1e7 < float(image.flops.sum()) < 1e11
        text = transformer_like(np.random.default_rng(seed), 60).graph
        assert 1e9 < float(text.flops.sum()) < 1e13
        assert int(text.unit_bytes) == 1
    # A layer has one op with three outputs.
    producers = np.asarray(text.tensor_producer)
    assert (np.bincount(producers) == 3).sum() == (text.num_ops - 2) // 10


def test_regal_synthetic_follows_its_recipe():
    model = regal_synthetic(np.random.default_rng(3))
    graph = model.graph
    assert 50 <= graph.num_ops <= 200
    assert sinks(model) == {graph.num_ops - 1}
    consumers = set(np.asarray(graph.use_consumer).tolist())
    assert set(range(graph.num_ops)) - consumers == {0}
    units = np.asarray(graph.tensor_units)
    data, order = units[0::2], units[1::2]
    assert not order.any()
    assert data.mean() == pytest.approx(50, abs=5)
    assert data.std() == pytest.approx(10, abs=4)
    share = np.mean(np.asarray(graph.use_tensor) % 2 == 0)
    assert share == pytest.approx(0.8, abs=0.1)
    moved = np.asarray(graph.input_units() + graph.output_units(), np.float64)
    noise = np.asarray(graph.flops) / moved - 1
    assert abs(noise.mean()) < 0.05
    assert noise.std() == pytest.approx(0.1, abs=0.03)


def test_regal_synthetic_mixes_its_families():
    names = {regal_synthetic(np.random.default_rng(seed)).name.split("-")[1] for seed in range(20)}
    assert names == {"erdos_renyi", "stochastic_block", "watts_strogatz", "barabasi_albert"}
    assert real_sizes(regal_synthetic(np.random.default_rng(0), "erdos_renyi", 3).graph)[0] == 3


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda rng: random_graph(rng, "chian"), ("family", "did you mean chain")),
        (lambda rng: random_graph(rng, ops=0), ("ops", "1 or more", "0")),
        (lambda rng: cnn_like(rng, ops=-1), ("ops", "-1")),
        (lambda rng: transformer_like(rng, ops=1.5), ("ops", "1.5")),
        (lambda rng: regal_synthetic(rng, "chain"), ("family", "chain", "erdos_renyi")),
        (lambda rng: regal_synthetic(rng, ops=2), ("ops", "3 or more")),
    ],
)
def test_errors_name_what_is_wrong(call, words, unchecked):
    with pytest.raises(GraphError) as caught:
        call(np.random.default_rng(0))
    for word in words:
        assert word in str(caught.value)
