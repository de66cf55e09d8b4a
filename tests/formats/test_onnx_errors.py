"""Files that cannot be read: each a FormatError that names the file and the thing."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, numpy_helper

from egx.errors import FormatError
from egx.formats.onnx import OnnxWarning, load_onnx
from tests.formats.onnx_models import proto, resnet50, write

GOOD = "g (float[4] x) => (float[4] y) { a = Relu(x)  y = Neg(a) }"


def refused(path, *parts: str, **options) -> None:
    with pytest.raises(FormatError) as error:
        load_onnx(path, **options)
    for part in (str(path), *parts):
        assert part in str(error.value)


def test_missing_file(tmp_path):
    refused(tmp_path / "nothing.onnx", "No such file")


def test_folder(tmp_path):
    refused(tmp_path, "cannot be read")


def test_empty_file(tmp_path):
    path = tmp_path / "empty.onnx"
    path.touch()
    refused(path, "empty")


def test_every_truncation_of_a_file(tmp_path):
    """No prefix of a model passes for a model."""
    model = proto(GOOD)
    del model.opset_import[1:]  # without the last ones it would be a complete model
    data = model.SerializeToString()
    path = tmp_path / "cut.onnx"
    for length in range(len(data)):
        path.write_bytes(data[:length])
        refused(path)


def test_truncated_large_file(tmp_path):
    data = resnet50().SerializeToString()
    path = tmp_path / "cut.onnx"
    for part in np.linspace(0, len(data) - 1, 23).astype(int):
        path.write_bytes(data[:part])
        refused(path)


def test_random_bytes(tmp_path):
    rng = np.random.default_rng(0)
    path = tmp_path / "random.onnx"
    for length in (1, 10, 100, 10_000):
        for _ in range(20):
            path.write_bytes(rng.bytes(length))
            refused(path)


@pytest.mark.filterwarnings("ignore::egx.formats.onnx.OnnxWarning")
def test_flipped_bytes_never_crash(tmp_path):
    """Damage inside a file is refused, or leaves a model; nothing else comes out."""
    rng = np.random.default_rng(1)
    data = write(tmp_path, GOOD.replace("Relu(x)", "Add(x, w)"), w="float 4").read_bytes()
    path = tmp_path / "damaged.onnx"
    refusals = 0
    for _ in range(300):
        damaged = bytearray(data)
        for place in rng.integers(len(data), size=2):
            damaged[place] = rng.integers(256)
        path.write_bytes(bytes(damaged))
        try:
            load_onnx(path)
        except FormatError:
            refusals += 1
    assert 100 < refusals < 300


def test_text_instead_of_a_model(tmp_path):
    path = tmp_path / "model.onnx"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n")
    refused(path, "not an ONNX model")


def test_gz_that_is_no_gzip(tmp_path):
    path = tmp_path / "model.onnx.gz"
    path.write_bytes(write(tmp_path, GOOD).read_bytes())
    refused(path, "gzip")


def test_truncated_gz(tmp_path):
    packed = gzip.compress(write(tmp_path, GOOD).read_bytes())
    path = tmp_path / "model.onnx.gz"
    for length in (5, len(packed) // 2, len(packed) - 1):
        path.write_bytes(packed[:length])
        refused(path, "gzip")
    path.write_bytes(packed[:20] + b"\xff\xff" + packed[22:])
    refused(path, "gzip")


def test_graph_without_nodes(tmp_path):
    refused(write(tmp_path, "nobody (float[4] x) => (float[4] x) { }"), "'nobody' is empty")


def test_nothing_left_after_folding(tmp_path):
    text = "g (float[4] x) => (float[4] y, float[4] z) { y = Identity(x)  z = Neg(w) }"
    refused(write(tmp_path, text, w="float 4"), "nothing is computed")


def test_no_outputs(tmp_path):
    model = proto(GOOD)
    del model.graph.output[:]
    path = tmp_path / "mute.onnx"
    path.write_bytes(model.SerializeToString())
    refused(path, "outputs")


def test_cycle(tmp_path):
    text = "g (float[4] x) => (float[4] y) { a = Add(x, c)  b = Neg(a)  c = Exp(b)  y = Neg(c) }"
    refused(write(tmp_path, text), "cycle", "makes 'a'", "makes 'b'", "makes 'c'")


def test_self_loop(tmp_path):
    refused(write(tmp_path, "g (float[4] x) => (float[4] y) { y = Add(x, y) }"), "cycle", "'y'")


def test_undefined_tensor(tmp_path):
    text = "g (float[4] x) => (float[4] y) { y = Add(x, ghost) }"
    refused(write(tmp_path, text), "'ghost'", "Add", "'y'")


def test_undefined_tensor_in_a_body(tmp_path):
    text = """g (bool c, float[4] x) => (float[4] y) { y = If (c) <
        then_branch = yes () => (float[4] a) { a = Neg(ghost) },
        else_branch = no () => (float[4] b) { b = Neg(x) }> }"""
    refused(write(tmp_path, text), "'ghost'", "If")


def test_undefined_output(tmp_path):
    model = proto(GOOD)
    model.graph.output[0].name = "ghost"
    path = tmp_path / "ghost.onnx"
    path.write_bytes(model.SerializeToString())
    refused(path, "'ghost'", "no node")


def test_tensor_made_twice(tmp_path):
    text = "g (float[4] x) => (float[4] y) { y = Neg(x)  y = Exp(x) }"
    refused(write(tmp_path, text), "'y'", "twice", "Exp")


def test_impossible_shapes(tmp_path):
    text = "g (float[4,5] x) => (float[4,7] y) { a = Neg(x)  b = MatMul(a, w)  y = Neg(b) }"
    refused(write(tmp_path, text, w="float 6 7"), "MatMul", "'b'", "impossible shapes")


def test_loop_without_a_body(tmp_path):
    text = """g (int64 n, bool c, float[4] x) => (float[a,4] y) { y = Loop(n, c) }"""
    refused(write(tmp_path, text), "Loop", "'y'", "no body")


def test_impossible_attributes(tmp_path):
    text = 'g (float[2,3] x) => (float[a] y) { r = Relu(x)  y = Einsum<equation="i->i">(r) }'
    refused(write(tmp_path, text), "Einsum", "'y'")


def test_input_without_a_rank(tmp_path):
    model = proto(GOOD)
    model.graph.input[0].type.tensor_type.ClearField("shape")
    path = tmp_path / "rankless.onnx"
    path.write_bytes(model.SerializeToString())
    refused(path, "'x'", "no shape")


def test_negative_initializer(tmp_path):
    model = proto(GOOD, w="float 4")
    model.graph.initializer[0].dims[0] = -4
    path = tmp_path / "negative.onnx"
    path.write_bytes(model.SerializeToString())
    refused(path, "'w'", "-4")


def test_no_opset(tmp_path):
    model = proto(GOOD)
    del model.opset_import[:]
    path = tmp_path / "opset.onnx"
    path.write_bytes(model.SerializeToString())
    refused(path, "opset_import")


@pytest.mark.parametrize("word", ["layers", "", "OP"])
def test_wrong_granularity(tmp_path, word):
    refused(write(tmp_path, GOOD), repr(word), "layer, op", granularity=word)


def external(folder: Path, location: str = "weights.bin") -> Path:
    """A file whose constants all lie in another, the shape of a Reshape among them."""
    model = proto(
        """g (float[8,8] x) => (float[2,3] o)
        { y = MatMul(x, w)  r = Reshape(y, shape)  o = MatMul(r, v) }""",
    )
    arrays = {
        "w": np.ones((8, 4), np.float32),
        "shape": np.array([2, 16], np.int64),
        "v": np.ones((16, 3), np.float32),
    }
    data = b""
    for name, array in arrays.items():
        tensor = numpy_helper.from_array(array, name)
        where = {"location": location, "offset": str(len(data)), "length": str(array.nbytes)}
        data += tensor.raw_data
        tensor.ClearField("raw_data")
        tensor.data_location = TensorProto.EXTERNAL
        for key, value in where.items():
            tensor.external_data.add(key=key, value=value)
        model.graph.initializer.append(tensor)
    (folder / "weights.bin").write_bytes(data)
    path = folder / "external.onnx"
    path.write_bytes(model.SerializeToString())
    return path


def test_external_shapes_are_read_where_they_are(tmp_path):
    path = external(tmp_path)
    model = load_onnx(path)
    assert model.notes["macs"] == 8 * 8 * 4 + 2 * 16 * 3
    assert model.notes["weight_bytes"] == 4 * (8 * 4 + 16 * 3)
    # Without the file there is no way to know, and that is said.
    for spoil in (lambda data: data.write_bytes(b"short"), lambda data: data.unlink()):
        spoil(tmp_path / "weights.bin")
        with pytest.warns(OnnxWarning, match=r"r; .*'shape', which lie in weights.bin and are ab"):
            load_onnx(path)
    open_ended = onnx.load(path, load_external_data=False)
    open_ended.graph.output[0].type.tensor_type.ClearField("shape")
    path.write_bytes(open_ended.SerializeToString())
    refused(path, "makes 'o'", "values of 'shape', which lie in weights.bin and are absent")


def test_weights_need_no_external_data(tmp_path):
    model = proto("g (float[4,4] x) => (float[4,4] y) { y = MatMul(x, w) }", w="float 4 4")
    model.graph.initializer[0].external_data.add(key="location", value="nowhere/weights.bin")
    path = tmp_path / "external.onnx"
    path.write_bytes(model.SerializeToString())
    assert load_onnx(path).notes["weight_bytes"] == 64


@pytest.mark.parametrize("location", ["/etc/passwd", "../outside/weights.bin", ""])
def test_no_file_outside_the_folder_is_read(tmp_path, location):
    (tmp_path / "outside").mkdir()
    (tmp_path / "inside").mkdir()
    external(tmp_path / "outside")
    path = external(tmp_path / "inside", location)
    with pytest.warns(OnnxWarning, match="values of 'shape'"):
        load_onnx(path)


def test_ops_of_a_domain_that_is_not_declared(tmp_path):
    model = proto("g (float[4] x) => (float[4] y) { a = com.acme.Foo(x)  y = Relu(a) }")
    del model.opset_import[1:]
    path = tmp_path / "undeclared.onnx"
    path.write_bytes(model.SerializeToString())
    with pytest.warns(OnnxWarning, match=r"1 ops of unknown types.*com.acme::Foo x1"):
        assert load_onnx(path).op_types == ("foo", "relu")
