"""Corpora: noise that keeps the topology, and splits that share none."""

from __future__ import annotations

import numpy as np
import pytest

from egx.errors import GraphError
from egx.graph.builder import GraphBuilder
from egx.graph.corpus import perturb, perturb_seconds, split_by_topology, topology_digest
from egx.graph.generators import random_graph, regal_synthetic
from egx.graph.graph import MAX_UNITS, graph_digest


def models(count, variants):
    rng = np.random.default_rng(0)
    plain = [random_graph(rng, "layered", 8 + k % 5) for k in range(count)]
    return [perturb(rng, model) if v else model for v in range(variants) for model in plain]


def test_noise_changes_sizes_and_times_and_nothing_else():
    model = random_graph(np.random.default_rng(1), "layered", 200, pad_to=(220, 600, 900))
    noisy = perturb(np.random.default_rng(2), model, 0.2)
    assert noisy.digest == graph_digest(noisy.graph)
    assert noisy.digest != model.digest
    assert topology_digest(noisy) == topology_digest(model)
    assert noisy.digest == perturb(np.random.default_rng(2), model, 0.2).digest
    changed = ("flops", "weight_units", "tensor_units")
    for field, before in vars(model.graph).items():
        after = np.asarray(getattr(noisy.graph, field))
        before = np.asarray(before)
        if field not in changed:
            np.testing.assert_array_equal(after, before)
            continue
        np.testing.assert_array_equal(after == 0, before == 0)
        large = before > 1000
        factor = np.log(after[large] / before[large])
        assert abs(np.median(factor)) < 0.1
        assert np.std(factor) == pytest.approx(0.2, rel=0.2)
    assert perturb(np.random.default_rng(2), model, 0.0).digest == model.digest
    with pytest.raises(GraphError, match="spread must be 0 or more, got -1"):
        perturb(np.random.default_rng(2), model, -1)


def test_noise_keeps_counts_within_int32():
    builder = GraphBuilder("large")
    builder.op("op", kind="opaque", op_type="op", inputs=[], output_bytes=[MAX_UNITS], flops=0)
    model = builder.build_model()
    for seed in range(8):
        noisy = perturb(np.random.default_rng(seed), model, 1.0)
        size = int(noisy.graph.tensor_units[0]) * int(noisy.graph.unit_bytes)
        expected = MAX_UNITS * np.random.default_rng(seed).lognormal(sigma=1.0, size=3)[2]
        assert size == pytest.approx(expected, rel=1e-6)


def test_noise_of_measured_seconds_is_the_same_on_every_device():
    seconds = np.ones((5, 3))
    noisy = perturb_seconds(np.random.default_rng(0), seconds)
    assert (noisy == noisy[:, :1]).all()
    assert len(np.unique(noisy[:, 0])) == 5


def test_a_split_shares_no_topology_and_keeps_to_its_shares():
    corpus = models(40, 3)
    split = split_by_topology(corpus)
    assert sorted([*split.train, *split.validation, *split.test]) == list(range(120))
    digests = [{topology_digest(corpus[k]) for k in part} for part in split]
    assert not digests[0] & digests[1]
    assert not digests[0] & digests[2]
    assert not digests[1] & digests[2]
    assert [len(part) for part in split] == pytest.approx([72, 24, 24], abs=6)


def test_a_split_depends_on_the_graphs_and_not_on_their_order():
    corpus = models(10, 1)
    order = np.random.default_rng(0).permutation(10)
    split, other = split_by_topology(corpus), split_by_topology([corpus[k] for k in order])
    for mine, theirs in zip(split, other, strict=True):
        assert {corpus[k].digest for k in mine} == {corpus[order[k]].digest for k in theirs}
    assert [len(part) for part in split_by_topology(corpus[:5])] == [3, 1, 1]
    with pytest.raises(GraphError, match="shares must be 0 or more and add up to 1"):
        split_by_topology(corpus, (0.5, 0.2, 0.2))


def test_topologies_differ_by_their_edges_alone():
    a = regal_synthetic(np.random.default_rng(0), "barabasi_albert", 50)
    b = regal_synthetic(np.random.default_rng(1), "barabasi_albert", 50)
    assert topology_digest(a) != topology_digest(b)
