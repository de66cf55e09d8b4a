"""The op table: class, name and cost of every ONNX op type that is known here."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import onnx

from egx.formats import onnx_flops as formula
from egx.formats.onnx_contrib import equivalent
from egx.formats.onnx_flops import Call
from egx.formats.onnx_types import MICROSOFT, STANDARD


class Rule(NamedTuple):
    """How an op type is imported."""

    kind: str
    name: str
    flops: Callable[[Call], float]
    macs: Callable[[Call], float] = lambda call: 0


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
            add("elementwise", name, formula.each_made(count))
    for count, names in _REDUCED.items():
        for name in names.split():
            add("reduction", name, formula.each_read(count))
    for name in _MOVED.split():
        add("shape", name, formula.none)
    for name in ("Sum", "Max", "Min", "Mean"):
        add("elementwise", name, formula.many)
    for name in ("ScatterElements", "ScatterND", "Scatter"):
        add("shape", name, formula.scatter)
    for name in ("MaxPool", "AveragePool", "LpPool"):
        add("reduction", name, formula.pool)
    add("elementwise", "Clip", formula.clip)
    add("elementwise", "Gelu", formula.gelu)
    add("elementwise", "Resize", formula.resize)
    add("elementwise", "GridSample", formula.grid_sample)
    add("elementwise", "AffineGrid", formula.each_made(12))
    for name in ("HannWindow", "HammingWindow", "BlackmanWindow", "MelWeightMatrix"):
        add("elementwise", name, formula.each_made(4))
    # A per-channel affine map at inference: nothing is reduced.
    add("elementwise", "BatchNormalization", formula.each_made(2))
    add("reduction", "LayerNormalization", formula.layernorm)
    add("reduction", "LRN", formula.lrn)
    add("reduction", "TopK", formula.sort)
    add("reduction", "Unique", formula.sort)
    add("reduction", "RoiAlign", formula.roi_align)
    add("reduction", "MaxRoiPool", formula.each_read(1))
    add("reduction", "NonMaxSuppression", formula.overlap)
    add("reduction", "DFT", formula.fourier)
    add("reduction", "STFT", formula.fourier)
    add("reduction", "Det", lambda call: call.read * (call.shape(0)[-1] if call.shape(0) else 1))
    add("contraction", "MatMul", formula.none, macs=formula.macs_matmul)
    add("contraction", "FusedMatMul", formula.none, macs=formula.macs_matmul_fused)
    add("contraction", "MatMulNBits", formula.none, macs=formula.macs_matmul)
    add("contraction", "Gemm", formula.flops_gemm, macs=formula.macs_gemm)
    add("contraction", "Conv", formula.bias(2), macs=formula.macs_conv)
    add("contraction", "CausalConvWithState", formula.bias(2), macs=formula.macs_conv)
    add("contraction", "ConvTranspose", formula.bias(2), macs=formula.macs_conv_transpose)
    # Eight more a sample: four taps of the bilinear look-up.
    add("contraction", "DeformConv", formula.each_made(8), macs=formula.macs_conv)
    add("contraction", "LSTM", formula.flops_recurrent(4, 9), macs=formula.macs_recurrent(4))
    add("contraction", "GRU", formula.flops_recurrent(3, 8), macs=formula.macs_recurrent(3))
    add("contraction", "RNN", formula.flops_recurrent(1, 1), macs=formula.macs_recurrent(1))
    add("contraction", "Attention", formula.flops_attention, macs=formula.macs_attention)
    add("contraction", "FlexAttention", formula.flops_attention, macs=formula.macs_attention)
    add("contraction", "LinearAttention", formula.flops_attention, macs=formula.macs_attention)
    for name in ("MultiHeadAttention", "GroupQueryAttention"):
        add("contraction", name, formula.flops_attention, macs=formula.macs_attention)
    packed = formula.macs_packed_attention
    add("contraction", "PackedAttention", formula.flops_packed_attention, macs=packed)
    add("contraction", "Einsum", formula.flops_einsum, macs=formula.macs_einsum)
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
