"""Which ops join to layers."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from egx.formats.onnx import load_onnx
from egx.formats.onnx_layers import NORMALISATIONS, ImportedOp, fuse
from tests.formats.onnx_models import describe, outputs, write

X = "float[1,4,8,8] x"


def layers(folder, body: str, made: str = "float[1,4,8,8] y", **more: str):
    """Layers of a body on x; w is a 1x1 convolution, v a vector over channels."""
    weights = {"w": "float 4 4 1 1", "v": "float 4", "k": "float 4 1 1", **more}
    text = f"g ({X}) => ({made}) <float half = {{0.5}}, float one = {{1}}> {{ {body} }}"
    return describe(load_onnx(write(folder, text, **weights)))


ABSORBED = {
    "bias": "y = Add(c, k)",
    "relu": "y = Relu(c)",
    "relu6": "lo = Constant<value_float=0.0>()  y = Clip(c, lo)",
    "hardswish": "y = HardSwish(c)",
    "swish": "s = Sigmoid(c)  y = Mul(c, s)",
    "hard swish in parts": "s = HardSigmoid(c)  y = Mul(s, c)",
    "mish": "p = Softplus(c)  t = Tanh(p)  y = Mul(c, t)",
    "gelu": "y = Gelu(c)",
    "gelu in parts": "d = Div(c, half)  e = Erf(d)  f = Add(e, one)  g = Mul(c, f)"
    "  y = Mul(g, half)",
    "tanh gelu": "p = Mul(c, c)  q = Mul(p, c)  r = Mul(q, half)  s = Add(c, r)  t = Tanh(s)"
    "  u = Add(t, one)  h = Mul(c, half)  y = Mul(h, u)",
    "batch norm": "y = BatchNormalization(c, v, v, v, v)",
    "batch norm, relu": "n = BatchNormalization(c, v, v, v, v)  y = Relu(n)",
    "instance norm": "y = InstanceNormalization(c, v, v)",
    "layer norm": "y = LayerNormalization(c, eight)",
    "residual": "y = Add(c, x)",
    "residual, norm, swish": "a = Add(c, x)  n = BatchNormalization(a, v, v, v, v)  s = Sigmoid(n)"
    "  y = Mul(n, s)",
    "square": "y = Mul(c, c)",
    "cast": "f = Cast<to=10>(c)  y = Cast<to=1>(f)",
    "a view between": "s = Constant<value_ints=[1,256]>()  r = Reshape(c, s)  y = Relu(r)",
    "normalisation in parts": "m = ReduceMean<keepdims=1>(c, ax)  d = Sub(c, m)  q = Mul(d, d)"
    "  u = ReduceMean<keepdims=1>(q, ax)  e = Add(u, one)  r = Sqrt(e)  n = Div(d, r)"
    "  y = Mul(n, k)",
}


@pytest.mark.parametrize("name", ABSORBED)
def test_absorbed(tmp_path, name):
    body = "c = Conv(x, w)  ax = Constant<value_ints=[-1]>()  " + ABSORBED[name]
    found = layers(tmp_path, body, "float[a,b,d,e] y", eight="float 8")
    assert [op.type for op in found] == ["conv"]
    assert list(found[0].writes) == ["y"]


KEPT = {
    "softmax": ("y = Softmax(c)", ["conv", "softmax"]),
    "pooling": ("y = MaxPool<kernel_shape=[2,2]>(c)", ["conv", "maxpool"]),
    "transposition": ("y = Transpose<perm=[0,3,1,2]>(c)", ["conv", "transpose"]),
    "concatenation": ("y = Concat<axis=1>(c, c)", ["conv", "concat"]),
    "broadcast to more": (
        "e = GlobalAveragePool(c)  y = Mul(x, e)",
        ["conv", "averagepool", "mul"],
    ),
    "gate of a pooled branch": (
        "e = GlobalAveragePool(c)  f = Conv(e, w)  s = Sigmoid(f)  y = Mul(c, s)",
        ["conv", "averagepool", "conv", "mul"],
    ),
    "two readers": ("r = Relu(c)  y = Concat<axis=1>(r, c)", ["conv", "relu", "concat"]),
    "reduction that returns nothing": (
        "m = ReduceMean<keepdims=1>(c, ax)  y = Mul(x, m)",
        ["conv", "reduce_mean", "mul"],
    ),
    "activation before": ("r = Relu(x)  y = Conv(r, w)", ["conv", "relu", "conv"]),
}


@pytest.mark.parametrize("name", KEPT)
def test_kept_apart(tmp_path, name):
    body, expected = KEPT[name]
    body = "c = Conv(x, w)  ax = Constant<value_ints=[-1]>()  " + body
    made = "float[a,b,d,e] y"
    if name == "activation before":
        made += ", float[1,4,8,8] c"
    assert sorted(op.type for op in layers(tmp_path, body, made)) == sorted(expected)


def test_a_graph_output_is_written_before_its_activation(tmp_path):
    found = layers(tmp_path, "c = Conv(x, w)  y = Relu(c)", "float[1,4,8,8] c, float[1,4,8,8] y")
    assert [op.type for op in found] == ["conv", "relu"]


def test_an_output_inside_a_fork_stops_it(tmp_path):
    body = "c = Conv(x, w)  s = Sigmoid(c)  y = Mul(c, s)"
    found = layers(tmp_path, body, "float[1,4,8,8] s, float[1,4,8,8] y")
    assert [op.type for op in found] == ["conv", "sigmoid", "mul"]


def test_residual_joins_the_later_branch(tmp_path):
    found = layers(tmp_path, "a = Conv(x, w)  b = Conv(x, w)  s = Add(a, b)  y = Relu(s)")
    assert [(op.name, op.reads) for op in found] == [("Conv_0", ()), ("Conv_1", ("a",))]
    assert found[1].writes == {"y": 1024}


def test_residual_joins_the_earlier_branch_if_the_later_is_read_elsewhere(tmp_path):
    body = "a = Conv(x, w)  b = Conv(x, w)  s = Add(a, b)  t = Neg(b)  y = Concat<axis=1>(s, t)"
    found = layers(tmp_path, body, "float[1,8,8,8] y")
    assert [op.type for op in found] == ["conv", "conv", "neg", "concat"]
    assert found[1].name == "Conv_0"  # it runs when its last op, the add, can
    assert found[1].reads == ("b",)


def test_no_cycle_through_a_branch(tmp_path):
    """The add could join the first convolution, but the second depends on that."""
    body = "a = Conv(x, w)  b = Conv(a, w)  y = Add(a, b)"
    found = layers(tmp_path, body)
    assert [(op.name, op.reads) for op in found] == [("Conv_0", ()), ("Conv_1", ("a",))]


def test_a_tensor_read_by_two_parts_is_one_use(tmp_path):
    (_, second) = layers(tmp_path, "a = Conv(x, w)  b = Conv(a, w)  s = Relu(b)  y = Add(s, a)")
    assert second.reads == ("a",)


def test_costs_add_up(tmp_path):
    body = "c = Conv(x, w, v)  n = BatchNormalization(c, v, v, v, v)  y = Relu(n)"
    text = f"g ({X}) => (float[1,4,8,8] y) {{ {body} }}"
    path = write(tmp_path, text, w="float 4 4 1 1", v="float 4")
    fine, coarse = load_onnx(path, granularity="op"), load_onnx(path)
    assert sum(op.flops for op in describe(fine)) == describe(coarse)[0].flops
    assert sum(op.weight_bytes for op in describe(fine)) == describe(coarse)[0].weight_bytes
    assert coarse.notes["removed"] == {"fused": 2}


def test_normalisation_heads_a_layer_where_no_contraction_stands_before(tmp_path):
    body = "p = MaxPool<kernel_shape=[1,1]>(x)  n = BatchNormalization(p, v, v, v, v)  y = Relu(n)"
    assert [op.type for op in layers(tmp_path, body)] == ["maxpool", "batchnorm"]


RMS = """p = Mul(c, c)  u = ReduceMean<keepdims=1>(p, ax)  e = Add(u, one)  r = Sqrt(e)
 i = Reciprocal(r)  n = Mul(c, i)  h = Mul(n, k)"""


def test_normalisation_in_parts_beside_a_residual(tmp_path):
    body = f"ax = Constant<value_ints=[-1]>()  c = Softmax(x)  {RMS}  f = Conv(h, w)  y = Add(f, c)"
    found = layers(tmp_path, body)
    assert [op.type for op in found] == ["softmax", "rmsnorm", "conv"]
    assert found[1].kind == "reduction"
    assert found[1].reads == ("c",)
    assert found[2].reads == ("h", "c")


def test_views_vanish_into_what_they_show(tmp_path):
    body = """c = Conv(x, w)  s = Constant<value_ints=[1,256,1]>()  r = Reshape(c, s)
    t = Transpose<perm=[0,2,1]>(r)  f = Flatten(t)  y = Softmax(f)  z = Exp(r)"""
    found = layers(tmp_path, body, "float[1,256] y, float[1,256,1] z")
    assert [(op.type, op.reads) for op in found] == [
        ("conv", ()),
        ("softmax", ("c",)),
        ("exp", ("c",)),
    ]


def test_a_view_of_the_input_and_one_as_output(tmp_path):
    body = "s = Constant<value_ints=[4,64]>()  r = Reshape(x, s)  e = Softmax(r)  y = Flatten(e)"
    text = f"g ({X}) => (float[4,64] y, float[4,64] r) {{ {body} }}"
    model = load_onnx(write(tmp_path, text))
    assert [op.type for op in describe(model)] == ["softmax"]
    assert outputs(model) == {"e"}


QDQ = """
 xq = QuantizeLinear(x, s, z)
 xd = DequantizeLinear(xq, s, z)
 wd = DequantizeLinear<axis=0>(wq, ws, wz)
 c = Conv(xd, wd)
 r = Relu(c)
 rq = QuantizeLinear(r, s, z)
 rd = DequantizeLinear(rq, s, z)
 c2 = Conv(rd, wd)
 a = Add(c2, rd)
 aq = QuantizeLinear(a, s, z)
 ad = DequantizeLinear(aq, s, z)
 p = MaxPool<kernel_shape=[1,1]>(ad)
 pq = QuantizeLinear(p, s, z)
 y = DequantizeLinear(pq, s, z)
"""


def test_quantised_in_pairs(tmp_path):
    text = f"g ({X}) => (float[1,4,8,8] y) <float s = {{0.1}}, uint8 z = {{0}}> {{ {QDQ} }}"
    path = write(tmp_path, text, wq="int8 4 4 1 1", ws="float 4", wz="int8 4")
    fine = load_onnx(path, granularity="op")
    first, second, pool, last = describe(load_onnx(path))
    assert [first.type, second.type, pool.type] == ["conv", "conv", "maxpool"]
    assert last.type == "dequantize_linear"  # the caller gets floats
    # Activations of one byte an element; weights as stored: 16 int8, scales, zero points.
    assert first.writes == {"rq": 256}
    assert second.writes == {"aq": 256}
    assert second.reads == ("rq",)
    assert pool.writes == {"pq": 256}
    assert first.weight_bytes - 3 * (4 + 1) == 16 + 16 + 4
    assert sum(op.flops for op in describe(fine)) == sum(
        op.flops for op in (first, second, pool, last)
    )


def chain(draw_ops: list[tuple[str, list[int]]]) -> list[ImportedOp]:
    """Ops by kind and by the indices of the ops they read."""
    found = []
    for index, (kind, reads) in enumerate(draw_ops):
        view = kind == "shape" and len(reads) == 1 and index % 2 == 1
        found.append(
            ImportedOp(
                name=f"op{index}",
                index=index,
                kind=kind,
                op_type=kind,
                flops=0.0 if view else float(2**index),
                macs=0.0,
                weight_bytes=0 if view else 3**index % 1000,
                reads=[f"t{k}" for k in reads],
                writes=[f"t{index}"],
                geometry={},
                view="view" if view else None,
                onnx_type="LayerNormalization" if kind == "normal" else kind,
            )
        )
    return found


@st.composite
def graphs(draw):
    count = draw(st.integers(1, 14))
    kinds = ["contraction", "elementwise", "elementwise", "reduction", "shape", "normal"]
    ops = []
    for index in range(count):
        reads = draw(st.lists(st.integers(0, index - 1), max_size=3)) if index else []
        ops.append((draw(st.sampled_from(kinds)), reads))
    read = {k for _, reads in ops for k in reads}
    outputs = set(range(count)) - read | draw(st.sets(st.integers(0, count - 1), max_size=2))
    sizes = draw(st.lists(st.sampled_from([8, 8, 8, 4]), min_size=count, max_size=count))
    return ops, sorted(outputs), sizes


@settings(max_examples=400, deadline=None)
@given(graphs())
def test_layers_of_random_graphs(graph):
    """Order, nothing lost, only last ops are read from outside, and nothing left to take in."""
    described, wanted, sizes = graph
    ops = chain(described)
    size = {f"t{k}": n for k, n in enumerate(sizes)}
    layers, outs = fuse(ops, [f"t{k}" for k in wanted], size.__getitem__)
    made: set[str] = set()
    readers: dict[str, list[ImportedOp]] = {}
    for layer in layers:
        assert set(layer.reads) <= made  # a topological order, and all that is read exists
        made |= set(layer.writes)
        for name in layer.reads:
            readers.setdefault(name, []).append(layer)
    assert set(outs) <= made
    root: dict[str, str] = {}
    for op in ops:
        name = op.writes[0]
        root[name] = root[op.reads[0]] if op.view else name
    owners: set[int] = set()
    for layer in layers:
        # FLOPs are powers of two: their bits say which ops are inside.
        members = [k for k in range(len(ops)) if int(layer.flops) >> k & 1]
        assert owners.isdisjoint(members)
        owners.update(members)
        inside = {f"t{k}" for k in members}
        reads = {root[name] for k in members for name in ops[k].reads}
        assert set(layer.reads) == reads - inside
        assert set(layer.writes) == {f"t{members[-1]}"}
    assert owners == {op.index for op in ops if not op.view}
    assert sum(layer.flops for layer in layers) == sum(op.flops for op in ops)
    assert sum(layer.weight_bytes for layer in layers) == sum(op.weight_bytes for op in ops)
    single = {op.name: op for op in ops}
    for layer in layers:
        if layer.kind != "contraction" or len(layer.writes) != 1:
            continue
        (name,) = layer.writes
        after = readers.get(name, [])
        if name in outs or len(after) != 1 or set(after[0].reads).isdisjoint([name]):
            continue
        follower = after[0]
        alone = follower.flops == single[follower.name].flops
        element = follower.kind == "elementwise" or follower.onnx_type in NORMALISATIONS
        assert not (alone and element and size[follower.writes[0]] == size[name])


def test_a_large_fan_is_left_alone():
    """A tensor with hundreds of readers is no reason to look at them again and again."""
    count = 800
    described = [("contraction", [])] + [("elementwise", [0]) for _ in range(count)]
    ops = chain(described)
    layers, _ = fuse(ops, [f"t{k}" for k in range(1, count + 1)], lambda name: 8)
    assert len(layers) == count + 1
    assert all(layer.reads == ["t0"] for layer in layers[1:])
