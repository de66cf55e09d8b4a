"""What each ONNX op costs: its class, its name, its operations and its geometry.

Conventions, shared with the zoo: a multiply-add counts two operations; an elementary function
(exp, tanh, erf, a division, a square root) counts one; an op that is a short program counts what
its definition in the ONNX operator document counts for each element. Moving data counts none.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import onnx

from egx.formats.onnx_contrib import Equivalent, equivalent
from egx.formats.onnx_types import MICROSOFT, STANDARD, TensorInfo


class Call(NamedTuple):
    """A node with what is known of its operands; absent optional ones are None."""

    op_type: str
    attributes: Mapping[str, Any]
    inputs: tuple[TensorInfo | None, ...]
    outputs: tuple[TensorInfo | None, ...]

    def shape(self, k: int) -> tuple[int, ...]:
        """Shape of input k, () if it is absent."""
        info = self.inputs[k] if k < len(self.inputs) else None
        return () if info is None else info.shape

    @property
    def read(self) -> int:
        """Elements of the first input."""
        return math.prod(self.shape(0))

    @property
    def made(self) -> int:
        """Elements of the first output."""
        first = next((info for info in self.outputs if info is not None), None)
        return 0 if first is None else first.elements

    def ints(self, name: str, rank: int, default: int) -> list[int]:
        """A list attribute, or `rank` times the default."""
        return list(self.attributes.get(name) or [default] * rank)


def attributes_of(node: onnx.NodeProto) -> dict[str, Any]:
    """A node's plain attributes; tensors and graphs are left out."""
    kinds = onnx.AttributeProto
    plain = (kinds.FLOAT, kinds.INT, kinds.STRING, kinds.FLOATS, kinds.INTS, kinds.STRINGS)
    found = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute if a.type in plain}
    return {k: v.decode(errors="replace") if isinstance(v, bytes) else v for k, v in found.items()}


def call_of(node: onnx.NodeProto, same: Equivalent | None, info: Mapping[str, TensorInfo]) -> Call:
    """A node's operands, seen as those of the standard op that it amounts to."""
    names = list(node.input)
    if same is not None:
        names = [names[k] for k in same.inputs if k < len(names)]
    return Call(
        op_type=node.op_type if same is None else same.op_type,
        attributes=attributes_of(node),
        inputs=tuple(info[name] if name else None for name in names),
        outputs=tuple(info[name] if name else None for name in node.output),
    )


class Rule(NamedTuple):
    """How an op type is imported."""

    kind: str
    name: str
    flops: Callable[[Call], float]
    macs: Callable[[Call], float] = lambda call: 0


def _macs_matmul(call: Call) -> float:
    return call.made * (call.shape(0)[-1] if call.shape(0) else 1)


def _macs_matmul_fused(call: Call) -> float:
    """com.microsoft.FusedMatMul: operands may be transposed."""
    axis = -2 if call.attributes.get("transA") else -1
    return call.made * (call.shape(0)[axis] if len(call.shape(0)) > 1 else call.read)


def _macs_gemm(call: Call) -> float:
    shape = call.shape(0)
    return call.made * (shape[0] if call.attributes.get("transA") else shape[-1])


def _flops_gemm(call: Call) -> float:
    a = call.attributes
    scaled = (a.get("alpha", 1.0) != 1.0) + (a.get("beta", 1.0) != 1.0)
    return call.made * (scaled + bool(call.shape(2) or _given(call, 2)))


def _given(call: Call, k: int) -> bool:
    return k < len(call.inputs) and call.inputs[k] is not None


def _macs_conv(call: Call) -> float:
    return call.made * math.prod(call.shape(1)[1:])


def _macs_conv_transpose(call: Call) -> float:
    return call.read * math.prod(call.shape(1)[1:])


def _bias(k: int) -> Callable[[Call], float]:
    return lambda call: call.made if _given(call, k) else 0


def _macs_recurrent(gates: int) -> Callable[[Call], float]:
    def macs(call: Call) -> float:
        if len(call.shape(0)) != 3 or len(call.shape(1)) != 3:
            return 0
        steps = call.shape(0)[0] * call.shape(0)[1]  # sequence x batch, in either layout
        directions, rows, width = call.shape(1)
        return steps * directions * rows * (width + rows // gates)

    return macs


def _flops_recurrent(gates: int, per_unit: int) -> Callable[[Call], float]:
    """Two biases and two sums a gate, then the cell's own arithmetic a unit."""

    def flops(call: Call) -> float:
        if len(call.shape(0)) != 3 or len(call.shape(1)) != 3:
            return 0
        steps = call.shape(0)[0] * call.shape(0)[1]
        directions, rows, _ = call.shape(1)
        return steps * directions * (2 * rows + per_unit * (rows // gates))

    return flops


class _Heads(NamedTuple):
    batch: int
    heads: int
    rows: int
    columns: int
    size: int
    value_size: int


def _heads(call: Call) -> _Heads | None:
    """Sizes of an attention whose inputs start with query, key and value."""
    q, k, v = call.shape(0), call.shape(1), call.shape(2)
    count = call.attributes.get("q_num_heads") or call.attributes.get("num_heads") or 1
    if len(q) == 4 and len(k) == 4 and len(v) == 4:
        sizes = _Heads(q[0], q[1], q[2], k[2], q[3], v[3])
    elif len(q) == 3 and len(k) == 3 and len(v) == 3:
        kv = call.attributes.get("kv_num_heads") or call.attributes.get("kv_num_heads", count)
        sizes = _Heads(q[0], count, q[1], k[1], q[2] // count, v[2] // max(kv, 1))
    else:
        return None
    for past in (4, 5) if call.op_type == "Attention" else (6, 3):
        shape = call.shape(past)
        if len(shape) == 4:  # cached keys stand before the new ones
            return sizes._replace(columns=sizes.columns + shape[2])
    return sizes


def _macs_attention(call: Call) -> float:
    h = _heads(call)
    if h is None:
        return 0
    return h.batch * h.heads * h.rows * h.columns * (h.size + h.value_size)


def _flops_attention(call: Call) -> float:
    """Scale, then the softmax's five, a score."""
    h = _heads(call)
    return 0 if h is None else 6 * h.batch * h.heads * h.rows * h.columns


def _macs_packed_attention(call: Call) -> float:
    """com.microsoft.Attention: one projection for query, key and value, then the attention."""
    if len(call.shape(0)) != 3 or len(call.shape(1)) != 2:
        return 0
    batch, rows, width = call.shape(0)
    return batch * rows * (width * call.shape(1)[1] + 2 * rows * (call.shape(1)[1] // 3))


def _flops_packed_attention(call: Call) -> float:
    if len(call.shape(0)) != 3:
        return 0
    return 6 * call.shape(0)[0] * call.attributes.get("num_heads", 1) * call.shape(0)[1] ** 2


def einsum_sizes(
    equation: str, shapes: list[tuple[int, ...]]
) -> tuple[list[list[str]], list[str], dict[str, int]]:
    """Labels of each operand and of the result, and the size of each label."""
    equation = equation.replace(" ", "")
    left, _, right = equation.partition("->")
    terms = left.split(",")
    sizes: dict[str, int] = {}
    operands = []
    for term, shape in zip(terms, shapes, strict=True):
        before, dots, after = term.partition("...")
        inner = len(shape) - len(before) - len(after) if dots else 0
        # Ellipsis axes align at the right, as in broadcasting.
        labels = [*before, *(f"...{k}" for k in range(inner, 0, -1)), *after]
        for mark, size in zip(labels, shape, strict=True):
            sizes[mark] = max(sizes.get(mark, 1), size)
        operands.append(labels)
    dotted = sorted((m for m in sizes if m.startswith("...")), key=lambda m: -int(m[3:]))
    if "->" in equation:
        before, dots, after = right.partition("...")
        return operands, [*before, *(dotted if dots else []), *after], sizes
    letters = re.sub(r"[^a-zA-Z]", "", left)
    once = sorted(c for c in set(letters) if letters.count(c) == 1)
    return operands, [*dotted, *once], sizes


def _einsum(call: Call) -> tuple[float, float]:
    """(multiply-adds, other operations), operands contracted from left to right."""
    equation = call.attributes.get("equation", "")
    shapes = [info.shape for info in call.inputs if info is not None]
    operands, result, sizes = einsum_sizes(equation, shapes)

    def count(labels: set[str]) -> int:
        return math.prod(sizes[mark] for mark in labels)

    if len(operands) == 1:
        whole = set(operands[0])
        return 0, count(whole) if whole != set(result) else 0
    macs, other = 0, 0
    held = set(operands[0])
    for k, labels in enumerate(operands[1:], start=1):
        joint = held | set(labels)
        later = set(result).union(*operands[k + 1 :])
        held = joint & later
        if held == joint:
            other += count(joint)
        else:
            macs += count(joint)
    return macs, other


def _pool(call: Call) -> float:
    return call.made * math.prod(call.ints("kernel_shape", 1, 1))


def _resize(call: Call) -> float:
    mode = call.attributes.get("mode", "nearest")
    out = call.outputs[0].shape if call.outputs[0] is not None else ()
    scaled = sum(a != b for a, b in zip(call.shape(0), out, strict=False))
    taps = {"linear": 2, "bilinear": 2, "cubic": 4}.get(mode, 0)
    return 2 * call.made * taps**scaled if taps else 0


def _grid_sample(call: Call) -> float:
    mode = call.attributes.get("mode", "linear")
    rank = max(len(call.shape(0)) - 2, 1)
    taps = {"nearest": 0, "bicubic": 4, "cubic": 4}.get(mode, 2)
    return 2 * call.made * taps**rank if taps else 0


def _roi_align(call: Call) -> float:
    ratio = max(call.attributes.get("sampling_ratio", 0), 1)
    return call.made * ratio * ratio * 8  # four taps a sample


def _sort(call: Call) -> float:
    """A heap of k: log2 k comparisons an element."""
    axis = call.attributes.get("axis", -1)
    out = call.outputs[0].shape if call.outputs[0] is not None else ()
    return call.read * max(1, math.ceil(math.log2(max(out[axis] if out else 1, 2))))


def _fourier(call: Call) -> float:
    return 5 * call.made * max(1, math.ceil(math.log2(max(call.made, 2))))


def _overlap(call: Call) -> float:
    """Every box against every other of its class, about ten operations a pair."""
    boxes = call.shape(0)[1] if len(call.shape(0)) > 1 else 0
    return 10 * math.prod(call.shape(1)[:2]) * boxes * boxes if call.shape(1) else 0


def _lrn(call: Call) -> float:
    return call.made * (2 * call.attributes.get("size", 1) + 4)


def _batchnorm(call: Call) -> float:
    """At inference: a scale and a shift."""
    return 2 * call.made


def _layernorm(call: Call) -> float:
    return call.made * (7 if _given(call, 2) else 6)


def _gelu(call: Call) -> float:
    return call.made * (8 if call.attributes.get("approximate") == "tanh" else 5)


def _clip(call: Call) -> float:
    a = call.attributes
    low, high = "min" in a or _given(call, 1), "max" in a or _given(call, 2)
    return call.made * max(low + high, 1)


def _many(call: Call) -> float:
    """Sum, Max, Min, Mean of n tensors."""
    return call.made * max(len(call.inputs) - (call.op_type != "Mean"), 1)


def _scatter(call: Call) -> float:
    plain = call.attributes.get("reduction", "none") == "none"
    return 0 if plain else math.prod(call.shape(2))


def _out(count: float) -> Callable[[Call], float]:
    return lambda call: count * call.made


def _in(count: float) -> Callable[[Call], float]:
    return lambda call: count * call.read


def _none(call: Call) -> float:
    return 0


def _snake(name: str) -> str:
    name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name)
    return name.lower()


_ELEMENTWISE: dict[int, str] = {
    1: """Abs Acos Acosh Add And Asin Asinh Atan Atanh BitShift BitwiseAnd BitwiseNot BitwiseOr
        BitwiseXor Cast CastLike Ceil Cos Cosh Div Equal Erf Exp Floor Greater GreaterOrEqual IsInf
        IsNaN Less LessOrEqual Log Mod Mul Neg Not Or Pow Reciprocal Relu Round Sigmoid Sign Sin
        Sinh Sqrt Sub Tan Tanh Where Xor Range Bernoulli Binarizer Trilu StringConcat
        RandomNormal RandomUniform RandomNormalLike RandomUniformLike""",
    2: "LeakyRelu PRelu ThresholdedRelu DequantizeLinear Swish SiLU Shrink Dropout",
    3: "Elu Softplus Softsign Mish QuantizeLinear",
    4: "Selu Celu HardSigmoid SwiGLU",
    5: "HardSwish",
    6: "BiasGelu RotaryEmbedding",
    8: "FastGelu",
}
_REDUCED: dict[int, str] = {
    1: """ArgMax ArgMin ReduceL1 ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum CumSum CumProd
        NonZero Hardmax GlobalAveragePool GlobalMaxPool Multinomial Compress""",
    2: "ReduceL2 ReduceSumSquare ReduceLogSum ReduceLogSumExp GlobalLpPool DynamicQuantizeLinear",
    3: "LpNormalization",
    5: "Softmax LogSoftmax SoftmaxCrossEntropyLoss NegativeLogLikelihoodLoss",
    6: "MeanVarianceNormalization",
    7: "InstanceNormalization GroupNormalization",
    4: "RMSNormalization",
    8: "SkipLayerNormalization",
}
_MOVED = """CenterCropPad Concat ConcatFromSequence ConstantOfShape DepthToSpace Expand EyeLike
    Flatten Gather GatherElements GatherND Identity OneHot Optional OptionalGetElement
    OptionalHasElement Pad Reshape ReverseSequence SequenceAt SequenceConstruct SequenceEmpty
    SequenceErase SequenceInsert SequenceLength Shape Size Slice SpaceToDepth Split
    SplitToSequence Squeeze TensorScatter Tile Transpose Unsqueeze Upsample MaxUnpool BitCast
    Col2Im"""
# Names that the zoo and other importers use for the same work.
_NAMES = {
    "MatMul": "matmul",
    "Gemm": "matmul",
    "FusedMatMul": "matmul",
    "MatMulNBits": "matmul",
    "MaxPool": "maxpool",
    "GlobalMaxPool": "maxpool",
    "AveragePool": "averagepool",
    "GlobalAveragePool": "averagepool",
    "LayerNormalization": "layernorm",
    "SkipLayerNormalization": "layernorm",
    "BatchNormalization": "batchnorm",
    "InstanceNormalization": "instancenorm",
    "GroupNormalization": "groupnorm",
    "RMSNormalization": "rmsnorm",
    "FastGelu": "gelu",
    "BiasGelu": "gelu",
    "GatherElements": "gather_elements",
    "GatherND": "gather_nd",
    "ScatterND": "scatter_nd",
    "LpPool": "lp_pool",
}


def _table() -> dict[str, Rule]:
    rules: dict[str, Rule] = {}

    def add(kind: str, name: str, flops: Callable[[Call], float], **more: Any) -> None:
        rules[name] = Rule(kind, _NAMES.get(name, _snake(name)), flops, **more)

    for count, names in _ELEMENTWISE.items():
        for name in names.split():
            add("elementwise", name, _out(count))
    for count, names in _REDUCED.items():
        for name in names.split():
            add("reduction", name, _in(count))
    for name in _MOVED.split():
        add("shape", name, _none)
    for name in ("Sum", "Max", "Min", "Mean"):
        add("elementwise", name, _many)
    for name in ("ScatterElements", "ScatterND", "Scatter"):
        add("shape", name, _scatter)
    for name in ("MaxPool", "AveragePool", "LpPool"):
        add("reduction", name, _pool)
    add("elementwise", "Clip", _clip)
    add("elementwise", "Gelu", _gelu)
    add("elementwise", "Resize", _resize)
    add("elementwise", "GridSample", _grid_sample)
    add("elementwise", "AffineGrid", _out(12))
    for name in ("HannWindow", "HammingWindow", "BlackmanWindow", "MelWeightMatrix"):
        add("elementwise", name, _out(4))
    # A per-channel affine map at inference: nothing is reduced.
    add("elementwise", "BatchNormalization", _batchnorm)
    add("reduction", "LayerNormalization", _layernorm)
    add("reduction", "LRN", _lrn)
    add("reduction", "TopK", _sort)
    add("reduction", "Unique", _sort)
    add("reduction", "RoiAlign", _roi_align)
    add("reduction", "MaxRoiPool", _in(1))
    add("reduction", "NonMaxSuppression", _overlap)
    add("reduction", "DFT", _fourier)
    add("reduction", "STFT", _fourier)
    add("reduction", "Det", lambda call: call.read * (call.shape(0)[-1] if call.shape(0) else 1))
    add("contraction", "MatMul", _none, macs=_macs_matmul)
    add("contraction", "FusedMatMul", _none, macs=_macs_matmul_fused)
    add("contraction", "MatMulNBits", _none, macs=_macs_matmul)
    add("contraction", "Gemm", _flops_gemm, macs=_macs_gemm)
    add("contraction", "Conv", _bias(2), macs=_macs_conv)
    add("contraction", "CausalConvWithState", _bias(2), macs=_macs_conv)
    add("contraction", "ConvTranspose", _bias(2), macs=_macs_conv_transpose)
    # Eight more a sample: four taps of the bilinear look-up.
    add("contraction", "DeformConv", _out(8), macs=_macs_conv)
    add("contraction", "LSTM", _flops_recurrent(4, 9), macs=_macs_recurrent(4))
    add("contraction", "GRU", _flops_recurrent(3, 8), macs=_macs_recurrent(3))
    add("contraction", "RNN", _flops_recurrent(1, 1), macs=_macs_recurrent(1))
    add("contraction", "Attention", _flops_attention, macs=_macs_attention)
    add("contraction", "FlexAttention", _flops_attention, macs=_macs_attention)
    add("contraction", "LinearAttention", _flops_attention, macs=_macs_attention)
    for name in ("MultiHeadAttention", "GroupQueryAttention"):
        add("contraction", name, _flops_attention, macs=_macs_attention)
    add("contraction", "PackedAttention", _flops_packed_attention, macs=_macs_packed_attention)
    add("contraction", "Einsum", lambda call: _einsum(call)[1], macs=lambda call: _einsum(call)[0])
    return rules


RULES = _table()
CONTROL_FLOW = {"If", "Loop", "Scan", "SequenceMap"}
# Operands that shape the work and are no data: a compiler bakes them in, they are no weights.
_PARAMETERS: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("Reshape", "Expand", "Tile", "Squeeze", "Unsqueeze", "Split", "TopK"), (1,)),
    **dict.fromkeys(("CumSum", "CumProd", "CenterCropPad", "Trilu", "OneHot", "Upsample"), (1,)),
    **dict.fromkeys(("SequenceAt", "SplitToSequence", "SequenceErase"), (1,)),
    **dict.fromkeys(("Clip", "Dropout", "DFT", "Col2Im"), (1, 2)),
    "Slice": (1, 2, 3, 4),
    "Pad": (1, 2, 3),
    "Resize": (1, 2, 3),
    "Range": (0, 1, 2),
    "ConstantOfShape": (0,),
    "AffineGrid": (1,),
    "MaxUnpool": (2,),
    "NonMaxSuppression": (2, 3, 4),
    "STFT": (1, 3),
    "SequenceInsert": (2,),
    "Loop": (0, 1),
    "If": (0,),
}


def parameters(op_type: str) -> tuple[int, ...]:
    """Positions of the inputs that are settings (axes, sizes, limits) and not data."""
    if op_type.startswith("Reduce"):
        return (1,)
    return _PARAMETERS.get(op_type, ())


def rule(node: onnx.NodeProto) -> Rule | None:
    """How a node is imported, or None if its type is not known."""
    same = equivalent(node)
    if same is not None:
        return RULES[same.op_type]
    if node.domain == MICROSOFT and node.op_type == "Attention":
        return RULES["PackedAttention"]
    if node.domain in (*STANDARD, MICROSOFT) or node.op_type == "FlexAttention":
        return RULES.get(node.op_type)
    return None


class Cost(NamedTuple):
    """An imported op's class, name and operations (multiply-adds counted in both)."""

    kind: str
    name: str
    flops: float
    macs: float


def cost(found: Rule, call: Call) -> Cost:
    """Applies a rule, with the cases where the operands decide class or name."""
    macs = found.macs(call)
    flops = 2 * macs + found.flops(call)
    kind, name = found.kind, found.name
    if call.op_type == "Einsum" and not macs:
        kind = "elementwise" if len(call.inputs) > 1 else "reduction" if flops else "shape"
    if call.op_type in ("Resize", "GridSample") and not flops:
        kind = "shape"
    if call.op_type == "ReduceMean" and _spatial_mean(call):
        name = "averagepool"
    return Cost(kind, name, flops, macs)


def _spatial_mean(call: Call) -> bool:
    """Whether a mean runs over all of height and width, as exporters write a global pooling."""
    shape = call.shape(0)
    axes = call.attributes.get("axes")
    return len(shape) == 4 and axes is not None and sorted(a % 4 for a in axes) == [2, 3]
