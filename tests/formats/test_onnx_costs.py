"""Class, FLOPs, bytes and geometry of single ops, computed by hand."""

from __future__ import annotations

import onnx
import pytest

from egx.formats.onnx import OnnxWarning, load_onnx
from egx.formats.onnx_flops import einsum_sizes
from egx.formats.onnx_ops import RULES
from egx.formats.onnx_types import size_bytes
from tests.formats.onnx_models import TYPES, Op, describe, write


def only(folder, text: str, opset: int = 21, **weights: str) -> Op:
    """The op that a one-node graph imports to, the same at both granularities."""
    path = write(folder, text, opset, **weights)
    (op,) = describe(load_onnx(path, granularity="op"))
    (layer,) = describe(load_onnx(path))
    assert op == layer
    return op


def test_grouped_strided_convolution(tmp_path):
    op = only(
        tmp_path,
        """g (float[2,8,10,12] x) => (float[2,6,5,4] y)
        { y = Conv<kernel_shape=[3,5], strides=[2,3], pads=[1,2,1,2], group=2,
                   dilations=[1,1]>(x, w, b) }""",
        w="float 6 4 3 5",
        b="float 6",
    )
    made = 2 * 6 * 5 * 4
    assert (op.kind, op.type) == ("contraction", "conv")
    assert op.flops == 2 * made * 4 * 3 * 5 + made
    assert op.weight_bytes == 4 * (6 * 4 * 15 + 6)
    assert op.writes == {"y": 4 * made}
    assert op.geometry == {
        "input_x": 12,
        "input_y": 10,
        "input_z": 8,
        "output_x": 4,
        "output_y": 5,
        "output_z": 6,
        "groups": 2,
        "kernel_x": 5,
        "kernel_y": 3,
        "stride": 3,
        "pad": 2,
        "dilation": 1,
        "batch": 2,
    }


def test_automatic_pad_and_one_dimension(tmp_path):
    op = only(
        tmp_path,
        """g (float[1,3,20] x) => (float[1,4,20] y)
        { y = Conv<auto_pad="SAME_UPPER", dilations=[2]>(x, w) }""",
        w="float 4 3 5",
    )
    assert op.geometry["pad"] == 4
    assert op.geometry["kernel_x"] == 5
    assert op.geometry["kernel_y"] == 1
    assert (op.geometry["input_x"], op.geometry["input_y"], op.geometry["input_z"]) == (20, 1, 3)


def test_transposed_convolution(tmp_path):
    op = only(
        tmp_path,
        """g (float[1,4,5,5] x) => (float[1,6,10,10] y)
        { y = ConvTranspose<kernel_shape=[2,2], strides=[2,2], group=2>(x, w) }""",
        w="float 4 3 2 2",
    )
    # Each input element meets 3 channels of its group at 4 places.
    assert op.flops == 2 * (4 * 25) * 3 * 4


def test_gemm(tmp_path):
    op = only(
        tmp_path,
        "g (float[5,7] x) => (float[7,3] y) { y = Gemm<transA=1, alpha=0.5>(x, w, b) }",
        w="float 5 3",
        b="float 3",
    )
    assert op.type == "matmul"
    assert op.flops == 2 * 7 * 3 * 5 + 21 + 21


def test_batched_matmul(tmp_path):
    op = only(
        tmp_path,
        """g (float[2,12,16,64] a, float[2,12,64,20] b) => (float[2,12,16,20] y)
        { y = MatMul(a, b) }""",
    )
    assert op.flops == 2 * 2 * 12 * 16 * 20 * 64
    assert op.reads == ()
    # Rows, columns, heads, as in the zoo.
    shape = {"input_x": 16, "input_y": 64, "input_z": 12, "batch": 2}
    assert shape.items() <= op.geometry.items()
    assert (op.geometry["output_x"], op.geometry["output_y"]) == (16, 20)


EINSUMS = [
    ("bij,bjk->bik", "[2,3,4] [2,4,5] [2,3,5]", 2 * 2 * 3 * 4 * 5, "contraction"),
    ("...ij,jk->...ik", "[7,2,3] [3,5] [7,2,5]", 2 * 7 * 2 * 3 * 5, "contraction"),
    ("ij,ij->ij", "[2,3] [2,3] [2,3]", 6, "elementwise"),
    ("ij->i", "[2,3] [2]", 6, "reduction"),
    ("ij->ji", "[2,3] [3,2]", 0, "shape"),
    ("ij,jk,kl", "[2,3] [3,4] [4,5] [2,5]", 2 * (2 * 3 * 4 + 2 * 4 * 5), "contraction"),
]


@pytest.mark.parametrize(("equation", "shapes", "flops", "kind"), EINSUMS)
def test_einsum(tmp_path, equation, shapes, flops, kind):
    *inputs, made = shapes.split()
    declared = ", ".join(f"float{shape} x{k}" for k, shape in enumerate(inputs))
    names = ", ".join(f"x{k}" for k in range(len(inputs)))
    body = f'{{ y = Einsum<equation="{equation}">({names}) }}'
    op = only(tmp_path, f"g ({declared}) => (float{made} y) {body}")
    assert (op.flops, op.kind) == (flops, kind)


def test_einsum_implicit_result_is_in_alphabetical_order():
    operands, result, sizes = einsum_sizes("ba,ac", [(2, 3), (3, 4)])
    assert operands == [["b", "a"], ["a", "c"]]
    assert result == ["b", "c"]
    assert sizes == {"b": 2, "a": 3, "c": 4}


def test_lstm(tmp_path):
    path = write(
        tmp_path,
        """g (float[9,2,10] x) => (float[9,2,2,16] y, float[2,2,16] h, float[2,2,16] c)
        { y, h, c = LSTM<hidden_size=16, direction="bidirectional">(x, w, r, b) }""",
        w="float 2 64 10",
        r="float 2 64 16",
        b="float 2 128",
    )
    model = load_onnx(path)
    (op,) = describe(model)
    steps = 9 * 2 * 2
    assert model.notes["macs"] == steps * 64 * (10 + 16)
    assert op.flops == 2 * model.notes["macs"] + steps * (2 * 64 + 9 * 16)
    assert op.weight_bytes == 4 * (2 * 64 * 26 + 2 * 128)
    assert list(op.writes.values()) == [4 * 9 * 2 * 2 * 16, 4 * 64, 4 * 64]


@pytest.mark.parametrize(("kind", "gates"), [("GRU", 3), ("RNN", 1)])
def test_other_recurrent(tmp_path, kind, gates):
    path = write(
        tmp_path,
        f"g (float[9,2,10] x) => (float[9,1,2,16] y) {{ y = {kind}<hidden_size=16>(x, w, r) }}",
        w=f"float 1 {16 * gates} 10",
        r=f"float 1 {16 * gates} 16",
    )
    assert load_onnx(path).notes["macs"] == 9 * 2 * 16 * gates * 26


def test_attention(tmp_path):
    op = only(
        tmp_path,
        """g (float[2,10,64] q, float[2,12,32] k, float[2,12,32] v) => (float[2,10,64] y)
        { y = Attention<q_num_heads=4, kv_num_heads=2>(q, k, v) }""",
        opset=23,
    )
    scores = 2 * 4 * 10 * 12
    assert op.kind == "contraction"
    assert op.flops == 2 * scores * (16 + 16) + 6 * scores


@pytest.mark.parametrize(
    ("body", "flops", "kind", "name"),
    [
        ("MaxPool<kernel_shape=[2,2], strides=[2,2]>(x)", 4 * 3 * 16, "reduction", "maxpool"),
        ("GlobalAveragePool(x)", 3 * 64, "reduction", "averagepool"),
        ("ReduceMean<keepdims=1>(x, hw)", 3 * 64, "reduction", "averagepool"),
        ("ReduceMean<keepdims=1>(x, c)", 3 * 64, "reduction", "reduce_mean"),
        ("Softmax(x)", 5 * 3 * 64, "reduction", "softmax"),
        ("Relu(x)", 3 * 64, "elementwise", "relu"),
        ("Sigmoid(x)", 3 * 64, "elementwise", "sigmoid"),
        ("HardSwish(x)", 5 * 3 * 64, "elementwise", "hard_swish"),
        ("Gelu<approximate=\"tanh\">(x)", 8 * 3 * 64, "elementwise", "gelu"),
        ("Gelu(x)", 5 * 3 * 64, "elementwise", "gelu"),
        ("Clip(x, lo, hi)", 2 * 3 * 64, "elementwise", "clip"),
        ("Max(x, x, x)", 2 * 3 * 64, "elementwise", "max"),
        ("LayerNormalization<axis=-1>(x, g, b)", 7 * 3 * 64, "reduction", "layernorm"),
        ("InstanceNormalization(x, c3, d3)", 7 * 3 * 64, "reduction", "instancenorm"),
        ("BatchNormalization(x, c3, d3, e3, f3)", 2 * 3 * 64, "elementwise", "batchnorm"),
        ("Transpose<perm=[0,2,3,1]>(x)", 0, "shape", "transpose"),
        ("Concat<axis=1>(x, x)", 0, "shape", "concat"),
        ("Pad(x, pads)", 0, "shape", "pad"),
        ("Resize<mode=\"nearest\">(x, , s)", 0, "shape", "resize"),
        ("Resize<mode=\"linear\">(x, , s)", 2 * 4 * 3 * 256, "elementwise", "resize"),
        ("DepthToSpace<blocksize=1>(x)", 0, "shape", "depth_to_space"),
        ("CumSum(x, ax)", 3 * 64, "reduction", "cum_sum"),
        ("LpPool<kernel_shape=[2,2]>(x)", 4 * 3 * 49, "reduction", "lp_pool"),
        ("LRN<size=5>(x)", 14 * 3 * 64, "reduction", "lrn"),
        ("ReduceLogSumExp<keepdims=0>(x)", 2 * 3 * 64, "reduction", "reduce_log_sum_exp"),
        ("Cast<to=10>(x)", 3 * 64, "elementwise", "cast"),
        ("Where(m, x, x)", 3 * 64, "elementwise", "where"),
    ],
)  # fmt: skip
def test_single_ops(tmp_path, body, flops, kind, name):
    text = f"""g (float[1,3,8,8] x, bool[8] m) => (float[a,b,c,d] y)
    <int64[2] hw = {{2, 3}}, int64[1] c = {{1}}, float lo = {{0}}, float hi = {{6}},
     int64[8] pads = {{0,0,1,1,0,0,1,1}}, float[4] s = {{1,1,2,2}}, int64 ax = {{1}}>
    {{ y = {body} }}"""
    used = {k: f"float {n}" for k, n in {"g": 8, "b": 8}.items()}
    used |= {k: "float 3" for k in ("c3", "d3", "e3", "f3")}
    op = only(tmp_path, text, **used)
    assert (op.flops, op.kind, op.type) == (flops, kind, name)


def test_top_k_writes_two_tensors(tmp_path):
    op = only(
        tmp_path,
        """g (float[2,100] x) => (float[2,8] v, int64[2,8] i) <int64[1] k = {8}>
        { v, i = TopK<axis=1>(x, k) }""",
    )
    assert op.writes == {"v": 64, "i": 128}
    assert op.flops == 200 * 3
    assert op.weight_bytes == 0  # k is a setting


def test_embedding_and_gather(tmp_path):
    op = only(
        tmp_path,
        "g (int64[2,5] i) => (float16[2,5,16] y) { y = Gather(table, i) }",
        table="half 1000 16",
    )
    assert (op.type, op.kind, op.weight_bytes) == ("embedding", "shape", 32000)
    assert (op.geometry["input_x"], op.geometry["output_x"], op.geometry["output_z"]) == (5, 5, 16)
    op = only(
        tmp_path,
        "g (float16[1000,16] t, int64[2,5] i) => (float16[2,5,16] y) { y = Gather(t, i) }",
    )
    assert (op.type, op.weight_bytes) == ("gather", 0)


@pytest.mark.parametrize(
    ("kind", "elements", "expected"),
    [
        ("int4", 15, 8),
        ("uint4", 16, 8),
        ("fp8", 15, 15),
        ("bf16", 15, 30),
        ("half", 15, 30),
        ("bool", 15, 15),
        ("double", 15, 120),
        ("string", 15, 120),
        ("int64", 0, 0),
    ],
)
def test_bytes_of_types(kind, elements, expected):
    assert size_bytes((elements,), TYPES[kind]) == expected


def test_every_element_type_of_onnx_has_a_size():
    from egx.formats.onnx_types import BITS

    kinds = dict(onnx.TensorProto.DataType.items())
    assert set(kinds.values()) - {onnx.TensorProto.UNDEFINED} <= set(BITS)
    assert BITS[kinds["INT4"]] == BITS[kinds["UINT4"]] == 4
    for name, bits in (("FLOAT4E2M1", 4), ("UINT2", 2), ("INT2", 2), ("FLOAT8E8M0", 8)):
        if name in kinds:
            assert BITS[kinds[name]] == bits


def test_every_op_of_the_standard_is_known_or_opaque():
    """New releases of onnx may add ops; this list says which are opaque on purpose."""
    names = {s.name for s in onnx.defs.get_all_schemas() if s.domain == "" and not s.deprecated}
    opaque = {
        "If",
        "Loop",
        "Scan",
        "SequenceMap",
        "ImageDecoder",
        "RegexFullMatch",
        "StringNormalizer",
        "StringSplit",
        "TfIdfVectorizer",
    }
    folded = {"Constant"}
    quantised = {"QLinearConv", "QLinearMatMul", "ConvInteger", "MatMulInteger"}
    assert names - set(RULES) - quantised - folded == opaque


def test_quantised_ops_keep_their_narrow_sizes(tmp_path):
    path = write(
        tmp_path,
        """g (uint8[1,3,8,8] x) => (uint8[1,4,1,1] y) <float s = {0.1}, uint8 z = {0}>
        {
          c = QLinearConv<kernel_shape=[3,3], pads=[1,1,1,1]>(x, s, z, w, ws, wz, s, z, b)
          a = com.microsoft.QLinearAdd(c, s, z, c, s, z, s, z)
          y = com.microsoft.QLinearGlobalAveragePool(a, s, z, s, z)
        }""",
        w="int8 4 3 3 3",
        ws="float 4",
        wz="int8 4",
        b="int32 4",
    )
    conv, add, pool = describe(load_onnx(path, granularity="op"))
    assert (conv.type, add.type, pool.type) == ("conv", "add", "averagepool")
    assert conv.writes == {"c": 256}
    assert conv.flops == 2 * 256 * 27 + 256
    assert conv.weight_bytes == 108 + 16 + 4 + 16 + 2 * 5
    assert add.reads == ("c", "c")
    assert pool.writes == {"y": 4}
    assert conv.geometry["kernel_x"] == pool.geometry["kernel_x"] - 5 == 3


def test_integer_products_widen(tmp_path):
    op = only(
        tmp_path,
        "g (uint8[4,16] x) => (int32[4,8] y) { y = MatMulInteger(x, w) }",
        w="int8 16 8",
    )
    assert (op.type, op.flops, op.weight_bytes) == ("matmul", 2 * 4 * 8 * 16, 128)
    assert op.writes == {"y": 128}


def test_packed_int4_weights(tmp_path):
    path = write(
        tmp_path,
        """g (float[4,16] x) => (float[4,8] y)
        { w = DequantizeLinear<axis=0, block_size=8>(q, s)
          y = MatMul(x, w) }""",
        q="int4 16 8",
        s="float 2 8",
    )
    (op,) = describe(load_onnx(path, granularity="op"))
    assert op.weight_bytes == 16 * 8 // 2 + 4 * 16
    model = load_onnx(path)
    assert model.notes["parameters"] == 16 * 8 + 16


def test_contrib_ops_without_schemas(tmp_path):
    path = write(
        tmp_path,
        """g (float[1,6,32] x) => (float[1,6,32] y)
        {
          f = com.microsoft.FusedMatMul<transA=0, transB=0>(x, w)
          a = com.microsoft.FastGelu(f)
          y = com.microsoft.SkipLayerNormalization(a, x, g, b)
        }""",
        w="float 32 32",
        g="float 32",
        b="float 32",
    )
    ops = describe(load_onnx(path, granularity="op"))
    assert [op.type for op in ops] == ["matmul", "gelu", "layernorm"]
    assert ops[0].flops == 2 * 6 * 32 * 32
    assert all(list(op.writes.values()) == [4 * 6 * 32] for op in ops)


def test_contrib_shapes(tmp_path):
    text = """g (float[2,6,32] x) => (float[a,b,c] h, float[d,e,f] k)
    {
      m = com.microsoft.MatMulNBits<K=32, N=48, bits=4, block_size=32>(x, q, s)
      t = com.microsoft.FusedMatMul<transA=1, transB=1>(m, w)
      k = Neg(t)
      z = com.microsoft.Attention<num_heads=4>(x, p, b)
      n, , , sum = com.microsoft.SkipLayerNormalization(z, x, g)
      h = com.microsoft.MultiHeadAttention<num_heads=4>(n, sum, sum)
    }"""
    path = write(
        tmp_path,
        text,
        q="uint8 48 1 16",
        s="float 48",
        w="float 2 10 6",
        p="float 32 96",
        b="float 96",
        g="float 32",
    )
    made = {}
    for op in describe(load_onnx(path, granularity="op")):
        made |= op.writes
    sizes = {"m": 2 * 6 * 48, "t": 2 * 48 * 10, "z": 2 * 6 * 32, "n": 2 * 6 * 32, "h": 2 * 6 * 32}
    assert {name: made[name] for name in sizes} == {k: 4 * n for k, n in sizes.items()}
    assert made["sum"] == made["n"]


def test_unknown_ops_are_opaque_with_one_warning(tmp_path):
    path = write(
        tmp_path,
        """g (float[4,5] x) => (float[4,5] y)
        { a = com.acme.Foo(x, w)
          b = com.acme.Foo(a, w)
          c = com.acme.Bar(b)
          y = Relu(c) }""",
        w="float 5 5",
    )
    with pytest.warns(
        OnnxWarning, match=r"3 ops of unknown types.*com.acme::Foo x2.*Bar x1"
    ) as seen:
        model = load_onnx(path)
    assert len(seen) == 1
    foo, again, bar, relu = describe(model)
    assert (foo.kind, foo.flops, foo.weight_bytes) == ("opaque", 0, 100)
    assert again.reads == ("a",)
    assert bar.writes == {"c": 80}
    assert relu.flops == 20
