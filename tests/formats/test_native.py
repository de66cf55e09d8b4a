"""Models as JSON files: exact both ways, and precise about what is wrong."""

from __future__ import annotations

import dataclasses
import json
import os

import equinox as eqx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import egx.zoo
from egx.errors import FormatError
from egx.formats.native import load_json, save_json
from egx.graph.builder import GraphBuilder
from egx.graph.graph import OP_CLASSES, Model


def small(pad_to=None, notes=None) -> Model:
    builder = GraphBuilder("small")
    a, b = builder.op(
        "first",
        kind="contraction",
        op_type="conv",
        inputs=[],
        output_bytes=[10, 0],
        flops=1 / 3,
        weight_bytes=2**30,
        attributes={"kernel_x": 3, "pad": 0.1},
    )
    (c,) = builder.op(
        "zweite Ebene \u2013 ü",
        kind="opaque",
        op_type="odd",
        inputs=[a, a, b],
        output_bytes=[7],
        flops=0,
    )
    builder.output(c)
    return builder.build_model(pad_to=pad_to, notes=notes or {"options": {"layers": [1, None]}})


def same(a: Model, b: Model) -> bool:
    fields = ("op_names", "op_types", "tensor_names", "source", "digest", "notes")
    return bool(eqx.tree_equal(a.graph, b.graph)) and all(
        getattr(a, key) == getattr(b, key) for key in fields
    )


@pytest.mark.parametrize("pad_to", [None, (2, 3, 3), (8, 16, 32)])
def test_round_trip(tmp_path, pad_to):
    model = small(pad_to)
    save_json(model, tmp_path / "model.json")
    assert same(load_json(tmp_path / "model.json"), model)


@pytest.mark.parametrize("name", ["resnet50", "bert"])
def test_zoo_round_trip(tmp_path, name):
    model = egx.zoo.load(name)
    save_json(model, tmp_path / "model.json")
    assert same(load_json(tmp_path / "model.json"), model)


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_any_graph_round_trips(tmp_path_factory, data):
    builder = GraphBuilder("any")
    tensors = []
    floats = st.floats(0, 2.0**100, allow_subnormal=False)
    for k in range(data.draw(st.integers(1, 6))):
        reads = data.draw(st.lists(st.sampled_from(tensors), max_size=3)) if tensors else []
        made = builder.op(
            data.draw(st.text(max_size=3)) + f"-{k}",
            kind=data.draw(st.sampled_from(OP_CLASSES)),
            op_type=data.draw(st.text(max_size=5)),
            inputs=reads,
            output_bytes=data.draw(st.lists(st.integers(0, 2**40), max_size=3)),
            flops=data.draw(floats),
            weight_bytes=data.draw(st.integers(0, 2**50)),
            attributes={"stride": data.draw(floats)},
        )
        tensors += made
    for tensor in data.draw(st.lists(st.sampled_from(tensors), max_size=3)) if tensors else []:
        builder.output(tensor)
    model = builder.build_model()
    path = tmp_path_factory.mktemp("any") / "model.json"
    save_json(model, path)
    assert same(load_json(path), model)


def document(tmp_path) -> dict:
    save_json(small((4, 4, 4)), tmp_path / "good.json")
    return json.loads((tmp_path / "good.json").read_text())


BROKEN = {
    "format": (lambda d: d.update(format="other"), "format"),
    "version": (lambda d: d.update(version=2), "version"),
    "no digest": (lambda d: d.pop("digest"), "digest"),
    "digest": (lambda d: d.update(digest="0" * 64), "digest"),
    "notes": (lambda d: d.update(notes=[]), "notes"),
    "unit": (lambda d: d.update(unit_bytes=3), "unit_bytes"),
    "unit true": (lambda d: d.update(unit_bytes=True), "unit_bytes"),
    "no ops": (lambda d: d.update(ops=[]), "ops"),
    "op": (lambda d: d["ops"].__setitem__(1, 5), "ops[1]"),
    "name": (lambda d: d["ops"][1].update(name="first"), "ops[1].name"),
    "class": (lambda d: d["ops"][0].update({"class": "magic"}), "ops[0].class"),
    "flops": (lambda d: d["ops"][0].update(flops=float("nan")), "ops[0].flops"),
    "flops word": (lambda d: d["ops"][0].update(flops="1"), "ops[0].flops"),
    "flops huge": (lambda d: d["ops"][0].update(flops=10**400), "ops[0].flops"),
    "no flops": (lambda d: d["ops"][0].pop("flops"), "ops[0].flops"),
    "weights": (lambda d: d["ops"][0].update(weight_units=-1), "ops[0].weight_units"),
    "geometry": (lambda d: d["ops"][0]["geometry"].update(depth=1), "ops[0].geometry"),
    "geometry value": (lambda d: d["ops"][0]["geometry"].update(pad=-1), "ops[0].geometry.pad"),
    "producer": (lambda d: d["tensors"][0].update(producer=9), "tensors[0].producer"),
    "order": (lambda d: d["tensors"][0].update(producer=1), "tensors[1].producer"),
    "units": (lambda d: d["tensors"][0].update(units=1.5), "tensors[0].units"),
    "sum": (lambda d: d["tensors"][0].update(units=2**31 - 1), "unit_bytes"),
    "output": (lambda d: d["tensors"][0].update(output=1), "tensors[0].output"),
    "use": (lambda d: d["uses"].__setitem__(0, [0]), "uses[0]"),
    "use tensor": (lambda d: d["uses"].__setitem__(0, [9, 1]), "uses[0] tensor"),
    "cycle": (lambda d: d["uses"].__setitem__(0, [2, 1]), "uses[0] consumer"),
    "padding": (lambda d: d.update(padded_to=[1, 1, 1]), "padded_to"),
    "much padding": (lambda d: d.update(padded_to=[2_000_000_000, 9, 9]), "padded_to"),
    "padding length": (lambda d: d.update(padded_to=[9, 9]), "padded_to"),
    "changed": (lambda d: d["ops"][0].update(flops=2.0), "digest"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_fields_are_named(tmp_path, name):
    change, field = BROKEN[name]
    contents = document(tmp_path)
    change(contents)
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(contents))
    with pytest.raises(FormatError) as error:
        load_json(path)
    assert str(error.value).startswith(f"{path}: {field}: expected")


def test_every_truncation(tmp_path):
    document(tmp_path)
    data = (tmp_path / "good.json").read_bytes().rstrip()
    path = tmp_path / "cut.json"
    for length in range(0, len(data), 7):
        path.write_bytes(data[:length])
        with pytest.raises(FormatError, match=r"cut\.json"):
            load_json(path)


@pytest.mark.parametrize("text", ["[]", "3", "null", '"egx-model"', "{}", "[" * 100_000])
def test_foreign_json(tmp_path, text):
    path = tmp_path / "foreign.json"
    path.write_text(text)
    with pytest.raises(FormatError, match=r"foreign\.json: (format|not JSON)"):
        load_json(path)


def test_not_text(tmp_path):
    path = tmp_path / "bytes.json"
    path.write_bytes(bytes(range(256)))
    with pytest.raises(FormatError, match="not a JSON text"):
        load_json(path)


def test_missing(tmp_path):
    with pytest.raises(FormatError, match="cannot be read"):
        load_json(tmp_path / "nothing.json")


def test_failed_saves_leave_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "model.json"
    save_json(small(), path)
    before = path.read_bytes()
    with pytest.raises(FormatError, match="notes cannot be written"):
        save_json(small(notes={"array": np.zeros(2)}), path)
    with pytest.raises(FormatError, match="op_type"):
        save_json(dataclasses.replace(small(), op_types=("conv", "even")), path)
    with pytest.raises(FormatError, match="digest"):
        save_json(dataclasses.replace(small(), digest="0"), path)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(FormatError, match="No space left"):
        save_json(small(), path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["model.json"]
    with pytest.raises(FormatError, match="cannot be written"):
        save_json(small(), tmp_path / "nowhere" / "model.json")
