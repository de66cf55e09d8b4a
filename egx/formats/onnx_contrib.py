"""Quantised and vendor ops seen as the standard op whose arithmetic and shapes they share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import onnx
from onnx import TensorProto as T

from egx.formats.onnx_types import MICROSOFT, STANDARD, TensorInfo


class Equivalent(NamedTuple):
    """A standard op, and which inputs of the original are its own, in order."""

    op_type: str
    inputs: tuple[int, ...]
    result: int | None = None  # element type; None: as the first input's


_FLOAT = T.FLOAT
EQUIVALENTS: dict[tuple[str, str], Equivalent] = {
    ("", "QLinearConv"): Equivalent("Conv", (0, 3, 8)),
    ("", "QLinearMatMul"): Equivalent("MatMul", (0, 3)),
    ("", "ConvInteger"): Equivalent("Conv", (0, 1), T.INT32),
    ("", "MatMulInteger"): Equivalent("MatMul", (0, 1), T.INT32),
    ("", "SimplifiedLayerNormalization"): Equivalent("LayerNormalization", (0, 1)),
}
# The ONNX Runtime's own ops (domain com.microsoft), as its operator document defines them.
_CONTRIB = {
    "QLinearAdd": Equivalent("Add", (0, 3)),
    "QLinearMul": Equivalent("Mul", (0, 3)),
    "QLinearSigmoid": Equivalent("Sigmoid", (0,)),
    "QLinearLeakyRelu": Equivalent("LeakyRelu", (0,)),
    "QLinearSoftmax": Equivalent("Softmax", (0,)),
    "QLinearAveragePool": Equivalent("AveragePool", (0,)),
    "QLinearGlobalAveragePool": Equivalent("GlobalAveragePool", (0,)),
    "QLinearReduceMean": Equivalent("ReduceMean", (0,)),
    "QLinearWhere": Equivalent("Where", (0, 1, 4)),
    "QLinearConv": Equivalent("Conv", (0, 3, 8)),
    "QGemm": Equivalent("Gemm", (0, 3, 6)),
    "MatMulIntegerToFloat": Equivalent("MatMul", (0, 1), _FLOAT),
    "DynamicQuantizeMatMul": Equivalent("MatMul", (0, 1), _FLOAT),
    "FusedConv": Equivalent("Conv", (0, 1, 2)),
    "FusedGemm": Equivalent("Gemm", (0, 1, 2)),
    "Gelu": Equivalent("Gelu", (0,)),
    "FastGelu": Equivalent("FastGelu", (0,)),
    "BiasGelu": Equivalent("BiasGelu", (0,)),
    "QuickGelu": Equivalent("Swish", (0,)),
    "SkipLayerNormalization": Equivalent("SkipLayerNormalization", (0, 2, 3)),
    "SimplifiedLayerNormalization": Equivalent("LayerNormalization", (0, 1)),
    "SkipSimplifiedLayerNormalization": Equivalent("SkipLayerNormalization", (0, 2)),
    "RotaryEmbedding": Equivalent("RotaryEmbedding", (0,)),
}
EQUIVALENTS.update({("com.microsoft", name): value for name, value in _CONTRIB.items()})
# Known to the cost table though not to the onnx library; their outputs have the first's shape.
SAME_SHAPE = {"FastGelu", "BiasGelu", "SkipLayerNormalization", "RotaryEmbedding", "Swish", "Gelu"}
SAME_SHAPE |= {"QuantizeLinear", "DequantizeLinear"}


def contrib_shapes(
    node: onnx.NodeProto, info: Mapping[str, TensorInfo]
) -> dict[str, tuple[int, ...]]:
    """Shapes of outputs by name, for vendor ops that are no standard op in disguise."""
    if node.domain != MICROSOFT:
        return {}
    shapes = [info[name].shape if name else () for name in node.input]
    attributes = {a.name: a.i for a in node.attribute}
    first = shapes[0] if shapes else ()
    made: tuple[int, ...] | None = None
    if node.op_type == "MatMulNBits":
        made = (*first[:-1], attributes["N"])
    elif node.op_type == "FusedMatMul":
        rows = first[-1] if attributes.get("transA") else first[-2]
        columns = shapes[1][-2] if attributes.get("transB") else shapes[1][-1]
        made = (*max(first[:-2], shapes[1][:-2], key=len), rows, columns)
    elif node.op_type == "Attention" and len(shapes) > 1:
        made = (*first[:-1], shapes[1][-1] // 3)
    elif node.op_type in ("MultiHeadAttention", "GroupQueryAttention"):
        made = first
    return {} if made is None else {node.output[0]: made}


def equivalent(node: onnx.NodeProto) -> Equivalent | None:
    """The standard op that `node` amounts to, or None."""
    domain = "" if node.domain in STANDARD else node.domain
    if domain == MICROSOFT and node.op_type == "QLinearConcat":
        return Equivalent("Concat", tuple(range(2, len(node.input), 3)))
    if domain == MICROSOFT and node.op_type == "FusedMatMul":
        plain = not any(a.name.startswith("trans") and a.i for a in node.attribute)
        return Equivalent("MatMul", (0, 1)) if plain else None
    return EQUIVALENTS.get((domain, node.op_type))


def standard_node(node: onnx.NodeProto, what: Equivalent) -> onnx.NodeProto:
    """`node` rewritten as that op, for shape inference."""
    inputs = [node.input[k] for k in what.inputs if k < len(node.input)]
    while inputs and not inputs[-1]:
        inputs.pop()
    made = onnx.NodeProto(op_type=what.op_type, name=node.name, input=inputs, output=node.output)
    schema = onnx.defs.get_schema(what.op_type) if onnx.defs.has(what.op_type) else None
    for attribute in node.attribute:
        if schema is not None and attribute.name in schema.attributes:
            made.attribute.append(attribute)
    return made
