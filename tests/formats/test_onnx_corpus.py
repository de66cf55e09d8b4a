"""Every file of the collections imports at both granularities and agrees with its manifest."""

from __future__ import annotations

import csv
import warnings
from pathlib import Path

import numpy as np
import pytest

from egx.formats.onnx import load_onnx
from egx.graph.graph import Model, real_sizes
from tests.data import DATA, data_dir

FILES = sorted(
    path.relative_to(DATA)
    for folder in ("onnx_light", "zigzag_stream_onnx", "onnx_corpus/graphs")
    for path in (DATA / folder).glob("*.onnx*")
)
# Every twelfth by default, all of them with `-m slow`.
SOME = FILES[::12]
CASES = [
    pytest.param(name, id=name.stem, marks=[] if name in SOME else [pytest.mark.slow])
    for name in FILES
]


@pytest.fixture(scope="module")
def manifest() -> dict[str, dict[str, str]]:
    with data_dir("onnx_corpus", "manifest.csv").open() as file:
        return {row["file"]: row for row in csv.DictReader(file)}


def total(array) -> int:
    return int(np.asarray(array, np.int64).sum())


def check_graph(model: Model) -> None:
    """Order, names, outputs and totals of an import."""
    graph = model.graph
    ops, tensors, uses = real_sizes(graph)
    assert (graph.num_ops, graph.num_tensors, graph.num_uses) == (ops, tensors, uses)
    producer = np.asarray(graph.use_producer())
    consumer = np.asarray(graph.use_consumer)
    assert (producer < consumer).all()
    assert (np.diff(consumer) >= 0).all()
    assert len(set(model.op_names)) == ops
    assert len(set(model.tensor_names)) == tensors
    # Every op leads to an output.
    needed = np.zeros(ops, bool)
    needed[np.asarray(graph.tensor_producer)[np.asarray(graph.tensor_is_output)]] = True
    for k in range(uses - 1, -1, -1):
        needed[producer[k]] |= needed[consumer[k]]
    assert needed.all()
    assert np.isfinite(np.asarray(graph.geometry)).all()
    unit = int(graph.unit_bytes)
    for units, exact in (
        (graph.weight_units, model.notes["weight_bytes"]),
        (graph.tensor_units, model.notes["activation_bytes"]),
    ):
        assert exact <= total(units) * unit < exact + unit * len(units)


@pytest.mark.parametrize("name", CASES)
def test_imports(name: Path, manifest):
    path = DATA / name
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fine, coarse = load_onnx(path, granularity="op"), load_onnx(path)
    check_graph(fine)
    check_graph(coarse)
    assert len(coarse.op_names) <= len(fine.op_names)
    assert set(coarse.tensor_names) <= set(fine.tensor_names)
    for key in ("macs", "weight_bytes", "parameters", "initializer_bytes", "nodes"):
        assert coarse.notes[key] == fine.notes[key]
    assert coarse.notes["flops"] == pytest.approx(fine.notes["flops"], rel=1e-9)
    assert coarse.notes["activation_bytes"] <= fine.notes["activation_bytes"]
    removed = fine.notes["removed"]
    assert len(fine.op_names) + sum(removed.values()) == fine.notes["nodes"]
    row = manifest.get(name.name)
    if row is not None:
        assert fine.notes["nodes"] == int(row["nodes"])
        assert fine.notes["initializer_bytes"] == int(row["initializer_bytes"])
        assert removed.get("constant", 0) == int(row["constant_nodes"])
        if not removed and float(row["static_fraction"]) == 1.0:
            assert fine.notes["activation_bytes"] == int(row["activation_bytes"])
