"""The zoo against published figures and layers computed by hand."""

from __future__ import annotations

import numpy as np
import pytest

import egx.zoo
from egx.errors import GraphError
from egx.graph.graph import CONTRACTION, GEOMETRY, Model, real_sizes
from egx.zoo.registry import register


def op(model: Model, name: str) -> int:
    return model.op_names.index(name)


def geometry(model: Model, name: str) -> dict[str, float]:
    row = np.asarray(model.graph.geometry)[op(model, name)]
    return {key: float(value) for key, value in zip(GEOMETRY, row, strict=True) if value}


def total(array) -> float:
    return float(np.asarray(array, np.float64).sum())


def inputs(model: Model, name: str) -> list[str]:
    graph = model.graph
    uses = np.flatnonzero(np.asarray(graph.use_consumer) == op(model, name))
    return [model.tensor_names[t] for t in np.asarray(graph.use_tensor)[uses]]


@pytest.fixture(scope="module")
def resnet50() -> Model:
    return egx.zoo.resnet50()


@pytest.fixture(scope="module")
def bert() -> Model:
    return egx.zoo.bert()


@pytest.mark.parametrize(
    ("name", "ops", "convolutions", "parameters", "gmac"),
    [
        # torchvision counts 25,557,032 and 44,549,160 parameters with two for each channel of a
        # batch normalisation, of which folding leaves one; 4.09 and 7.80 GMAC.
        ("resnet50", 57, 53, 25_557_032 - 26_560, 4.09),
        ("resnet101", 108, 104, 44_549_160 - 52_672, 7.80),
    ],
)
def test_resnets_have_their_published_figures(name, ops, convolutions, parameters, gmac):
    model = egx.zoo.load(name)
    assert real_sizes(model.graph)[0] == ops
    assert model.op_types.count("conv") == convolutions
    assert model.notes["parameters"] == parameters
    contraction = np.asarray(model.graph.op_class) == CONTRACTION
    assert total(model.graph.flops[contraction]) / 2e9 == pytest.approx(gmac, abs=0.005)


def test_the_first_convolution_by_hand(resnet50):
    graph, k = resnet50.graph, op(resnet50, "conv1")
    # 7 x 7 windows of 3 channels, 64 filters, 112 x 112 positions.
    assert float(graph.flops[k]) == 2 * 118_013_952
    assert int(graph.weight_units[k]) == 9408 + 64 * 4
    assert int(graph.tensor_units[k]) == 112 * 112 * 64
    found = geometry(resnet50, "conv1")
    names = ("input_x", "input_y", "input_z", "output_x", "output_y", "output_z")
    assert [found.pop(name) for name in names] == [224, 224, 3, 112, 112, 64]
    window = {"kernel_x": 7, "kernel_y": 7, "stride": 2, "pad": 3}
    assert found == {**window, "groups": 1, "dilation": 1, "batch": 1}


def test_images_shrink_as_they_should(resnet50):
    sizes = [geometry(resnet50, f"layer{stage}.0.conv3")["output_x"] for stage in (1, 2, 3, 4)]
    depths = [geometry(resnet50, f"layer{stage}.0.conv3")["output_z"] for stage in (1, 2, 3, 4)]
    assert sizes == [56, 28, 14, 7]
    assert depths == [256, 512, 1024, 2048]
    assert geometry(resnet50, "maxpool")["output_x"] == 56
    assert geometry(resnet50, "avgpool")["output_x"] == 1


def test_the_last_convolution_of_a_block_reads_the_shortcut(resnet50):
    assert inputs(resnet50, "layer1.0.conv3") == ["layer1.0.conv2", "layer1.0.downsample"]
    assert inputs(resnet50, "layer1.1.conv3") == ["layer1.1.conv2", "layer1.0.conv3"]
    assert inputs(resnet50, "conv1") == []


def test_batch_and_precision_scale_what_they_should(resnet50):
    double = egx.zoo.resnet50(batch=2).graph
    assert total(double.flops) == 2 * total(resnet50.graph.flops)
    assert total(double.tensor_units) == 2 * total(resnet50.graph.tensor_units)
    assert total(double.weight_units) == total(resnet50.graph.weight_units)
    wide = egx.zoo.resnet50(precision="fp32")
    assert total(wide.graph.weight_units) == 4 * wide.notes["parameters"]
    assert total(wide.graph.tensor_units) == 4 * total(resnet50.graph.tensor_units)
    assert wide.digest != resnet50.digest


def test_bert_base_has_its_published_figures(bert):
    assert real_sizes(bert.graph)[0] == 376 == 12 * 31 + 4
    # The reference implementation counts 109,482,240 parameters with the pooler.
    assert bert.notes["parameters"] == 109_482_240
    # 96 MMAC a token in the layers' matrices, and the two products of attention.
    matrices = 12 * (4 * 768**2 + 2 * 768 * 3072) * 128
    attention = 12 * 2 * 128 * 128 * 768
    contraction = np.asarray(bert.graph.op_class) == CONTRACTION
    assert total(bert.graph.flops[contraction]) == 2 * (matrices + attention + 768**2)


def test_a_layer_of_bert_has_31_ops_of_known_sizes(bert):
    layer = [name for name in bert.op_names if name.startswith("layer3.")]
    assert len(layer) == 31
    graph = bert.graph
    assert int(graph.tensor_units[op(bert, "layer3.attention.scores")]) == 12 * 128 * 128
    assert int(graph.tensor_units[op(bert, "layer3.ffn.gelu")]) == 128 * 3072
    # Two numbers of 32 bits a row.
    assert int(graph.tensor_units[op(bert, "layer3.ffn.norm.statistics")]) == 128 * 2 * 4
    assert int(graph.weight_units[op(bert, "layer3.attention.query.matmul")]) == 768 * 768
    assert int(graph.weight_units[op(bert, "layer3.attention.query.bias")]) == 768 * 4
    assert inputs(bert, "layer3.attention.residual") == [
        "layer3.attention.output.bias",
        "layer2.ffn.norm.apply",
    ]
    outputs = np.flatnonzero(np.asarray(graph.tensor_is_output))
    assert [bert.tensor_names[t] for t in outputs] == ["layer11.ffn.norm.apply", "pooler"]


def test_bert_scales():
    large = egx.zoo.bert(layers=24, hidden=1024, heads=16, intermediate=4096, sequence=384)
    assert real_sizes(large.graph)[0] == 24 * 31 + 4
    # BERT-large: 335,141,888 parameters in the reference implementation.
    assert large.notes["parameters"] == 335_141_888
    longer = egx.zoo.bert(layers=1, sequence=1024)
    assert longer.notes["parameters"] - egx.zoo.bert(layers=1).notes["parameters"] == 512 * 768


def test_the_registry():
    assert egx.zoo.names() == tuple(sorted(egx.zoo.names()))
    assert {"resnet50", "resnet101", "bert"} <= set(egx.zoo.names())
    assert egx.zoo.load("bert", layers=1).op_names == egx.zoo.bert(layers=1).op_names
    assert egx.zoo.load("resnet50").digest == egx.zoo.resnet50().digest


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: egx.zoo.load("resnet5o"), ("resnet5o", "did you mean resnet50")),
        (lambda: egx.zoo.load("zzz"), ("zzz", "known: ")),
        (lambda: egx.zoo.load("bert", layer=2), ("bert", "'layer'", "layers")),
        (lambda: egx.zoo.bert(layers=0), ("bert", "layers", "0")),
        (lambda: egx.zoo.bert(heads=7), ("hidden 768", "heads 7")),
        (lambda: egx.zoo.bert(precision="int4"), ("precision", "int4", "bf16")),
        (lambda: egx.zoo.resnet50(batch=1.5), ("resnet50", "batch", "1.5")),
        (lambda: egx.zoo.resnet50(resolution=True), ("resnet50", "resolution", "True")),
        (lambda: egx.zoo.resnet101(precision="fp64"), ("resnet101", "fp64")),
        (lambda: register(egx.zoo.bert), ("'bert'", "already")),
        (lambda: register(lambda size: None), ("size", "default")),
    ],
)
def test_errors_name_what_is_wrong(call, words, unchecked):
    with pytest.raises(GraphError) as caught:
        call()
    for word in words:
        assert word in str(caught.value)
