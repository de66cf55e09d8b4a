"""What becomes an op, what is folded, removed or renamed, and which sizes dimensions get."""

from __future__ import annotations

import gzip
import time

import numpy as np
import pytest

from egx.errors import FormatError
from egx.formats.onnx import OnnxWarning, load_onnx
from egx.graph.graph import real_sizes
from tests.formats.onnx_models import describe, outputs, proto, write


def names(folder, text: str, opset: int = 21, **weights: str) -> list[str]:
    """Tensors that the ops write, node by node."""
    model = load_onnx(write(folder, text, opset, **weights), granularity="op")
    return list(model.tensor_names)


def test_constants_fold_and_their_readers_own_them(tmp_path):
    path = write(
        tmp_path,
        """g (float[4,8] x) => (float[4,8] y, float[4,8] z)
        {
          one = Constant<value = float[1] {1.0}>()
          t = Transpose<perm=[1,0]>(w)
          u = Mul(t, one)
          y = MatMul(x, u)
          z = MatMul(x, u)
        }""",
        w="float 8 8",
    )
    model = load_onnx(path, granularity="op")
    first, second = describe(model)
    assert first.weight_bytes == second.weight_bytes == 256
    assert first.reads == second.reads == ()
    assert model.notes["removed"] == {"constant": 2}
    assert model.notes["parameters"] == 64 + 1  # shared: once


def test_cast_weights_count_as_cast(tmp_path):
    path = write(
        tmp_path,
        "g (float[4,8] x) => (float[4,8] y) { c = Cast<to=1>(w)  y = MatMul(x, c) }",
        w="half 8 8",
    )
    (op,) = describe(load_onnx(path))
    assert op.weight_bytes == 256


def test_settings_are_no_weights(tmp_path):
    path = write(
        tmp_path,
        """g (float[4,8] x) => (float[2,4] y)
        <int64[2] s = {8,4}, int64[1] a = {0}, int64[1] b = {2}, float lo = {0}>
        { r = Reshape(x, s)  c = Clip(r, lo)  y = Slice(c, a, b, a) }""",
    )
    assert [op.weight_bytes for op in describe(load_onnx(path, granularity="op"))] == [0, 0, 0]


@pytest.mark.parametrize(
    ("body", "removed"),
    [
        ("Identity(r)", True),
        ("Dropout(r)", True),
        ("Dropout(r, f, t)", False),
        ("Cast<to=1>(r)", True),
        ("Cast<to=11>(r)", False),
        ("CastLike(r, r)", True),
        ("Reshape(r, same)", True),
        ("Reshape(r, other)", False),
        ("Flatten(r)", True),
        ("Expand(r, same)", True),
        ("Tile(r, ones)", True),
        ("Transpose<perm=[0,1]>(r)", True),
        ("Transpose<perm=[1,0]>(r)", False),
        ("Slice(r, zero, four, zero)", True),
        ("Slice(r, last, before, zero, minus)", False),
        ("Slice(r, zero, four, zero, one)", True),
        ("Pad(r, nopads)", True),
        ("Pad(r, shift)", False),
        ("Concat<axis=0>(r)", True),
        ("Sum(r)", True),
        ("Neg(r)", False),
    ],
)
def test_what_changes_nothing_is_removed(tmp_path, body, removed):
    text = f"""g (float[4,4] x) => (float[4,4] y)
    <int64[2] same = {{4,4}}, int64[2] other = {{2,8}}, int64[2] ones = {{1,1}},
     int64[1] zero = {{0}}, int64[1] four = {{4}}, int64[1] last = {{-1}}, int64[1] one = {{1}},
     int64[1] before = {{-9}}, int64[1] minus = {{-1}}, int64[4] nopads = {{0,0,0,0}},
     int64[4] shift = {{1,0,-1,0}}, float f = {{0.5}}, bool t = {{1}}>
    {{ r = Relu(x)  d = {body}  e = Reshape(d, same)  y = Exp(e) }}"""
    text = (
        text if "other" in body else text.replace("e = Reshape(d, same)  y = Exp(e)", "y = Exp(d)")
    )
    found = names(tmp_path, text)
    assert ("d" not in found) == removed
    assert found[-1] == "y"


def test_dropout_with_a_read_mask_stays(tmp_path):
    text = """g (float[4] x) => (float[4] y, bool[4] m)
    { r = Relu(x)  d, m = Dropout(r)  y = Exp(d) }"""
    assert names(tmp_path, text) == ["r", "d", "m", "y"]


def test_dead_nodes_go_and_named_outputs_stay(tmp_path):
    text = """g (float[4,6] x) => (float[4,2] y) <int64[3] s = {2,2,2}>
    { a, b, c = Split<axis=1>(x, s)  y = Neg(a)  n = Exp(b)  m = Exp(n) }"""
    model = load_onnx(write(tmp_path, text), granularity="op")
    assert model.tensor_names == ("a", "b", "c", "y")
    assert model.notes["removed"] == {"dead": 2}
    assert real_sizes(model.graph) == (2, 4, 1)


def test_an_op_that_reads_twice_has_two_uses(tmp_path):
    text = "g (float[4] x) => (float[4] y) { r = Relu(x)  y = Mul(r, r) }"
    for granularity in ("op", "layer"):
        model = load_onnx(write(tmp_path, text), granularity=granularity)
        assert describe(model)[1].reads == ("r", "r")


def test_graph_inputs_have_no_tensor(tmp_path):
    text = "g (float[4] x, float[4] z) => (float[4] y) { r = Add(x, z)  y = Add(r, x) }"
    ops = describe(load_onnx(write(tmp_path, text), granularity="op"))
    assert [op.reads for op in ops] == [(), ("r",)]


def test_initializers_among_the_inputs_are_weights(tmp_path):
    model = proto("g (float[4,8] x, float[8,2] w) => (float[4,2] y) { y = MatMul(x, w) }")
    with_weights = proto("g (float[4,8] x) => (float[4,2] y) { y = MatMul(x, w) }", w="float 8 2")
    model.graph.initializer.extend(with_weights.graph.initializer)
    path = tmp_path / "old.onnx"
    path.write_bytes(model.SerializeToString())
    (op,) = describe(load_onnx(path))
    assert op.weight_bytes == 64


def test_outputs_through_removed_ops(tmp_path):
    text = """g (float[4] x) => (float[4] y, float[4] z, float[2] c)
    <float[2] w = {1, 2}> { r = Relu(x)  y = Identity(r)  z = Exp(y)  c = Neg(w) }"""
    model = load_onnx(write(tmp_path, text))
    assert outputs(model) == {"r", "z"}  # c is known before the run


def test_unsorted_nodes_are_sorted(tmp_path):
    text = "g (float[4] x) => (float[4] y) { y = Exp(b)  b = Neg(a)  a = Relu(x) }"
    assert names(tmp_path, text) == ["a", "b", "y"]


def test_names_are_kept_and_made_unique(tmp_path):
    model = proto(
        "g (float[4] x) => (float[4] y) { a = Relu(x)  b = Relu(a)  c = Neg(b)  y = Neg(c) }"
    )
    for node, name in zip(model.graph.node, ("one", "one", "", "one#2"), strict=True):
        node.name = name
    path = tmp_path / "names.onnx"
    path.write_bytes(model.SerializeToString())
    found = load_onnx(path, granularity="op").op_names
    assert found[0] == "one"
    assert found[2] == "Neg_2"
    assert len(set(found)) == 4


def test_gzip_is_the_same_model(tmp_path):
    path = write(tmp_path, "g (float[4] x) => (float[4] y) { y = Relu(x) }")
    packed = tmp_path / "model.onnx.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert load_onnx(packed).digest == load_onnx(path).digest


def test_local_functions_are_inlined(tmp_path):
    silu = """<domain: "com.acme", opset_import: ["" : 21]>
    Silu (a) => (b) { s = Sigmoid(a)  b = Mul(a, s) }"""
    text = "g (float[4,8] x) => (float[4,8] y) { h = MatMul(x, w)  y = com.acme.Silu(h) }"
    path = write(tmp_path, text, functions=silu, w="float 8 8")
    assert [op.type for op in describe(load_onnx(path, granularity="op"))] == [
        "matmul",
        "sigmoid",
        "mul",
    ]
    assert len(load_onnx(path).op_names) == 1


CHAIN = """g (float[batch,5,n] x, float[batch] q) => (float[a,b] y)
<int64[1] m = {-1}, int64 i0 = {0}, int64[1] ax = {0}, int64 two = {2}>
{
  r = Relu(x)
  s = Shape(r)
  d = Gather(s, i0)
  e = Div(d, two)
  u = Unsqueeze(e, ax)
  t = Concat<axis=0>(u, m)
  y = Reshape(r, t)
}"""


def test_dimensions_flow_through_shape_arithmetic(tmp_path):
    path = write(tmp_path, CHAIN)
    model = load_onnx(path, granularity="op", dims={"batch": 4, "n": 6})
    relu, reshape = describe(model)
    assert relu.writes == {"r": 4 * 4 * 5 * 6}
    assert reshape.writes == {"y": 4 * 4 * 5 * 6}
    assert reshape.geometry["output_z"] == 60  # [2, 60]
    assert model.notes["removed"] == {"constant": 5}


def test_open_dimensions_are_listed_with_their_inputs(tmp_path):
    with pytest.raises(FormatError) as error:
        load_onnx(write(tmp_path, CHAIN), dims={"n": 6})
    message = str(error.value)
    assert "model.onnx" in message
    assert "batch (of input x[0], q[0])" in message
    assert "--dim batch=value" in message
    assert "n (of" not in message


def test_unnamed_dimensions_go_by_place(tmp_path):
    model = proto("g (float[2,k] x) => (float[2,k] y) { y = Relu(x) }")
    dim = model.graph.input[0].type.tensor_type.shape.dim[1]
    dim.Clear()
    path = tmp_path / "unnamed.onnx"
    path.write_bytes(model.SerializeToString())
    with pytest.raises(FormatError, match=r"--dim x\.1=value"):
        load_onnx(path)
    (op,) = describe(load_onnx(path, dims={"x.1": 3}))
    assert op.writes == {"y": 24}
    dim.dim_value = -1  # another way in which exporters write it
    path.write_bytes(model.SerializeToString())
    assert describe(load_onnx(path, dims={"x.1": 3})) == [op]


@pytest.mark.parametrize("dims", [{"nope": 3}, {"batch": 4, "n": 6, "nope": 3}])
def test_unknown_dimension(tmp_path, dims):
    dims = {"batch": 4, "n": 6, **dims}
    with pytest.raises(FormatError, match=r"no free dimension is named 'nope'.*x\["):
        load_onnx(write(tmp_path, CHAIN), dims=dims)


@pytest.mark.parametrize("size", [-1, True])
def test_impossible_size(tmp_path, size):
    with pytest.raises(FormatError, match="dimension 'n' must be a count"):
        load_onnx(write(tmp_path, CHAIN), dims={"batch": 1, "n": size})


def test_data_dependent_sizes_are_bounds_or_given(tmp_path):
    text = "g (float[4,5] x) => (int64[k,2] y) { a = NonZero(x)  y = Transpose(a) }"
    path = write(tmp_path, text)
    with pytest.warns(OnnxWarning, match="sizes of 1 tensors depend on data.*: a"):
        model = load_onnx(path)
    assert describe(model)[0].writes == {"a": 8 * 2 * 20}
    model = load_onnx(path, dims={"a.1": 3})
    assert describe(model)[1].writes == {"y": 8 * 2 * 3}


def test_if_counts_the_dearer_branch_once(tmp_path):
    text = """g (bool c, float[4,5] x) => (float[4,6] y)
    {
      t = Relu(x)
      y = If (c) <
        then_branch = yes () => (float[4,6] a) { a = MatMul(t, w) },
        else_branch = no () => (float[4,6] b) { b0 = MatMul(t, w)  b = Relu(b0) }>
    }"""
    model = load_onnx(write(tmp_path, text, w="float 5 6"))
    _, op = describe(model)
    assert (op.kind, op.type, op.reads) == ("opaque", "if", ("t",))
    assert op.flops == 2 * 4 * 5 * 6 + 24
    assert op.weight_bytes == 120
    assert op.writes == {"y": 96}


def test_if_of_a_known_condition_counts_the_branch_taken(tmp_path):
    text = """g (float[4,5] x) => (float[4,5] y) <bool c = {1}>
    {
      t = Relu(x)
      y = If (c) <
        then_branch = yes () => (float[4,5] a) { a = Neg(t) },
        else_branch = no () => (float[4,5] b) { b0 = Exp(t)  b = Relu(b0) }>
    }"""
    assert describe(load_onnx(write(tmp_path, text)))[1].flops == 20


def test_loop_counts_static_trips(tmp_path):
    text = """g (float[4,5] x) => (float[4,5] y, float[k,4,5] ys) <int64 n = {7}, bool c = {1}>
    {
      t = Relu(x)
      y, ys = Loop (n, c, t) <body = b (int64 i, bool go, float[4,5] h)
          => (bool on, float[4,5] next, float[4,5] seen)
        { on = Identity(go)  m = MatMul(h, w)  next = Add(m, t)  seen = Relu(next) }>
    }"""
    path = write(tmp_path, text, w="float 5 5")
    with pytest.warns(OnnxWarning, match="ys"):
        model = load_onnx(path)
    _, op = describe(model)
    assert op.flops == 7 * (2 * 4 * 5 * 5 + 20 + 20)
    assert op.reads == ("t",)
    assert op.weight_bytes == 100
    assert op.writes == {"y": 80, "ys": 7 * 80}


def test_scan_runs_along_its_axis(tmp_path):
    text = """g (float[9,4] x, float[4] h0) => (float[4] last, float[9,4] ys)
    {
      t = Relu(x)
      last, ys = Scan<num_scan_inputs=1, body = b (float[4] h, float[4] xi)
          => (float[4] ho, float[4] yo) { ho = Add(h, xi)  yo = Tanh(ho) }>(h0, t)
    }"""
    _, op = describe(load_onnx(write(tmp_path, text)))
    assert (op.type, op.flops, op.reads) == ("scan", 9 * 8, ("t",))


def test_sequences_hold_what_they_were_made_of(tmp_path):
    text = """g (float[4,6] x) => (float[4,2] y) <int64 i = {1}, int64 two = {2}>
    { r = Relu(x)  s = SplitToSequence<axis=1>(r, two)  e = SequenceAt(s, i)  y = Neg(e) }"""
    ops = describe(load_onnx(write(tmp_path, text), granularity="op"))
    assert [list(op.writes.values()) for op in ops] == [[96], [96], [32], [32]]


def test_sizes_beyond_a_unit_of_one_byte(tmp_path):
    text = "g (float[70000,70000] x) => (float[70000,70000] y) { r = Relu(x)  y = Neg(r) }"
    model = load_onnx(write(tmp_path, text))
    unit = int(model.graph.unit_bytes)
    size = 4 * 70000 * 70000
    assert unit > 1
    assert np.asarray(model.graph.tensor_units).tolist() == [-(-size // unit)] * 2
    assert model.notes["activation_bytes"] == 2 * size


def import_seconds(folder, blocks: int) -> float:
    """CPU seconds to import a ladder of residual blocks with swish, four nodes each."""
    lines = ["t0 = Conv(x, w)"]
    for k in range(blocks):
        lines += [f"a{k} = Conv(t{k}, w)", f"s{k} = Sigmoid(a{k})", f"m{k} = Mul(a{k}, s{k})"]
        lines += [f"t{k + 1} = Add(m{k}, t{k})"]
    body = "\n".join(lines)
    text = f"g (float[1,4,8,8] x) => (float[1,4,8,8] y) {{ {body} y = Relu(t{blocks}) }}"
    path = write(folder, text, w="float 4 4 1 1")
    start = time.process_time()
    model = load_onnx(path)
    assert len(model.op_names) == blocks + 1
    return time.process_time() - start


def test_time_grows_with_the_nodes(tmp_path):
    import_seconds(tmp_path, 10)
    small, large = import_seconds(tmp_path, 100), import_seconds(tmp_path, 600)
    assert large < 6 * 2.5 * small + 0.5


@pytest.mark.slow
def test_ten_thousand_nodes(tmp_path):
    assert import_seconds(tmp_path, 2500) < 40  # type checks included; without them about two
