"""Known models have their known figures."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

import egx.zoo
from egx.formats.onnx import load_onnx
from tests.data import data_dir
from tests.formats.onnx_models import describe, outputs, resnet50

LIGHT = Path(onnx.__file__).parent / "backend/test/data/light"

# (parameters, 10^9 multiply-adds) as torchvision publishes them with its weights.
TORCHVISION = {
    "tv_alexnet": (61_100_840, 0.714),
    "tv_squeezenet1_1": (1_235_496, 0.349),
    "tv_googlenet": (6_624_904, 1.498),
    "tv_mnasnet1_0": (4_383_312, 0.314),
    "tv_shufflenet_v2_x1_0": (2_278_604, 0.145),
    "tv_densenet121": (7_978_856, 2.834),
    "tv_efficientnet_b0": (5_288_548, 0.386),
    "tv_convnext_tiny": (28_589_128, 4.456),
    "tv_r2plus1d_18": (31_505_325, 40.519),
    "tv_s3d": (8_320_048, 17.979),
    "tv_swin3d_t": (28_158_070, 43.882),
}


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("resnet") / "resnet50.onnx"
    path.write_bytes(resnet50().SerializeToString())
    return path


def test_resnet50_has_its_57_layers(written):
    model = load_onnx(written)
    ops = describe(model)
    types = [op.type for op in ops]
    assert len(ops) == 57
    assert types.count("conv") == 53
    assert sorted(set(types)) == ["averagepool", "conv", "matmul", "maxpool", "softmax"]
    assert outputs(model) == {"probabilities"}
    # 25,557,032 parameters, and two running statistics for each of 26,560 channels.
    assert model.notes["parameters"] == 25_557_032 + 2 * 26_560
    assert model.notes["macs"] == pytest.approx(4.089e9, rel=1e-3)
    assert model.notes["weight_bytes"] == 4 * model.notes["parameters"]


def test_resnet50_equals_the_zoo_but_for_precision(written):
    """Wiring, geometry and multiply-adds of an independent description."""
    zoo = egx.zoo.resnet50(precision="fp32")
    model = load_onnx(written)
    assert sorted(model.op_types) == sorted(zoo.op_types)

    def table(m):
        """Per op: type, geometry, output elements, and those of its inputs, in any op order."""
        g = m.graph
        size = np.asarray(g.tensor_units)
        producer, consumer = np.asarray(g.tensor_producer), np.asarray(g.use_consumer)
        rows = []
        for k, kind in enumerate(m.op_types):
            reads = size[np.asarray(g.use_tensor)[consumer == k]].tolist()
            row = np.asarray(g.geometry[k]).tolist()
            rows.append((kind, tuple(row), size[producer == k].tolist(), sorted(reads)))
        return sorted(rows)

    for ours, theirs in zip(table(model), table(zoo), strict=True):
        if ours[0] == "averagepool":  # a global pooling: its stride is of no account
            ours = (ours[0], theirs[1], *ours[2:])
        if ours[0] not in ("conv", "maxpool"):
            assert ours[0] == theirs[0]
            assert ours[2:] == theirs[2:]
        else:
            assert ours == theirs


def test_resnet50_of_the_onnx_package():
    path = LIGHT / "light_resnet50.onnx"
    if not path.exists():
        pytest.skip("this release of onnx has no light models")
    model = load_onnx(path)
    assert len(model.op_names) == 57
    assert model.op_types.count("conv") == 53
    assert model.notes["macs"] == pytest.approx(4.1e9, rel=5e-3)
    assert model.notes["parameters"] == pytest.approx(25.557e6, rel=3e-3)
    fine = load_onnx(path, granularity="op")
    assert fine.op_types.count("conv") == 53
    assert fine.op_types.count("batchnorm") == 53
    assert len(fine.op_names) == 53 + 53 + 49 + 16 + 2 + 3  # conv, norm, relu, add, pools, head


def test_vgg19_of_the_onnx_package():
    path = LIGHT / "light_vgg19.onnx"
    if not path.exists():
        pytest.skip("this release of onnx has no light models")
    model = load_onnx(path)
    assert model.notes["parameters"] == 143_667_240
    assert model.notes["macs"] == pytest.approx(19.632e9, rel=1e-3)
    assert len(model.op_names) == 16 + 5 + 3 + 1  # convolutions, pools, connected, softmax


@pytest.mark.parametrize("name", TORCHVISION)
def test_torchvision_figures(name):
    parameters, gmac = TORCHVISION[name]
    model = load_onnx(data_dir("onnx_corpus", "graphs", f"{name}.onnx"))
    assert model.notes["macs"] / 1e9 == pytest.approx(gmac, abs=6e-4)
    # The export folds normalisations into convolutions, or keeps their statistics.
    assert model.notes["parameters"] == pytest.approx(parameters, rel=0.01)


def test_resnet18():
    model = load_onnx(data_dir("zigzag_stream_onnx", "resnet18.onnx"))
    assert model.notes["parameters"] == pytest.approx(11_689_512, rel=2e-3)
    assert model.notes["macs"] == pytest.approx(1.814e9, rel=1e-3)
    assert model.op_types.count("conv") == 20
    assert len(model.op_names) == 20 + 3


def test_transformers():
    """BEiT-B/16 as its card in timm has it (86.5 M, 17.6 GMAC); BERT-base's encoder by hand."""
    beit = load_onnx(data_dir("onnx_corpus", "graphs", "timm_beit_base_patch16_224.onnx"))
    assert beit.notes["parameters"] == pytest.approx(86.5e6, abs=0.05e6)
    assert beit.notes["macs"] == pytest.approx(17.6e9, abs=0.05e9)
    bert = load_onnx(data_dir("onnx_corpus", "graphs", "hf_bert_base.onnx"))
    hidden, rows, layers = 768, 128, 12
    encoder = layers * (12 * rows * hidden * hidden + 2 * rows * rows * hidden)
    assert bert.notes["macs"] == encoder
    # 109,482,240 with the pooler, which this export leaves out.
    left = 109_482_240 - hidden * hidden - hidden
    assert bert.notes["parameters"] == pytest.approx(left, abs=10)  # scalars of the masks
