"""Small ONNX files for tests, written as text, and a readable view of what was imported."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnx
import onnx.parser

from egx.graph.graph import GEOMETRY, OP_CLASSES, Model, real_sizes

HEADER = '<ir_version: 10, opset_import: ["" : {opset}, "com.microsoft": 1, "com.acme": 1]>\n'
TYPES = {
    "float": onnx.TensorProto.FLOAT,
    "half": onnx.TensorProto.FLOAT16,
    "bf16": onnx.TensorProto.BFLOAT16,
    "int8": onnx.TensorProto.INT8,
    "uint8": onnx.TensorProto.UINT8,
    "int4": onnx.TensorProto.INT4,
    "uint4": onnx.TensorProto.UINT4,
    "fp8": onnx.TensorProto.FLOAT8E4M3FN,
    "int32": onnx.TensorProto.INT32,
    "int64": onnx.TensorProto.INT64,
    "bool": onnx.TensorProto.BOOL,
    "double": onnx.TensorProto.DOUBLE,
    "string": onnx.TensorProto.STRING,
}


def proto(text: str, opset: int = 21, functions: str = "", **weights: str) -> onnx.ModelProto:
    """A model from ONNX's text syntax; weights as name="float 4 3", values absent."""
    model = onnx.parser.parse_model(HEADER.format(opset=opset) + text + "\n" + functions)
    for name, described in weights.items():
        kind, *sizes = described.split()
        model.graph.initializer.append(
            onnx.TensorProto(
                name=name,
                data_type=TYPES[kind],
                dims=[int(n) for n in sizes],
                data_location=onnx.TensorProto.EXTERNAL,
            )
        )
    return model


def write(folder: Path, text: str, opset: int = 21, functions: str = "", **weights: str) -> Path:
    """The same, as a file."""
    path = folder / "model.onnx"
    path.write_bytes(proto(text, opset, functions, **weights).SerializeToString())
    return path


class Op(NamedTuple):
    """One imported op."""

    name: str
    type: str
    kind: str
    reads: tuple[str, ...]
    writes: dict[str, int]
    flops: float
    weight_bytes: int
    geometry: dict[str, int]


def describe(model: Model) -> list[Op]:
    """Every op of a model whose unit is a byte."""
    graph = model.graph
    assert int(graph.unit_bytes) == 1
    use = list(zip(np.asarray(graph.use_tensor), np.asarray(graph.use_consumer), strict=True))
    producer = np.asarray(graph.tensor_producer)
    found = []
    for k in range(real_sizes(graph)[0]):
        row = np.asarray(graph.geometry[k])
        found.append(
            Op(
                name=model.op_names[k],
                type=model.op_types[k],
                kind=OP_CLASSES[int(graph.op_class[k])],
                reads=tuple(model.tensor_names[t] for t, consumer in use if consumer == k),
                writes={
                    model.tensor_names[t]: int(graph.tensor_units[t])
                    for t in np.flatnonzero(producer == k)
                },
                flops=float(graph.flops[k]),
                weight_bytes=int(graph.weight_units[k]),
                geometry={
                    key: int(value) for key, value in zip(GEOMETRY, row, strict=True) if value
                },
            )
        )
    return found


def outputs(model: Model) -> set[str]:
    """Names of the tensors that are outputs of the graph."""
    marked = np.flatnonzero(np.asarray(model.graph.tensor_is_output))
    return {model.tensor_names[t] for t in marked}


def resnet50() -> onnx.ModelProto:
    """ResNet-50 v1.5 with separate normalisations and a softmax, written from its paper's table."""
    nodes: list[onnx.NodeProto] = []
    weights: list[onnx.TensorProto] = []

    def weight(name: str, *dims: int) -> str:
        weights.append(onnx.TensorProto(name=name, data_type=1, dims=dims, data_location=1))
        return name

    def node(kind: str, inputs: list[str], name: str, **attributes) -> str:
        nodes.append(onnx.helper.make_node(kind, inputs, [name], name=name, **attributes))
        return name

    def conv(x: str, name: str, source: int, target: int, kernel: int, stride: int = 1) -> str:
        w = weight(f"{name}.w", target, source, kernel, kernel)
        pad = [kernel // 2] * 4
        y = node("Conv", [x, w], name, kernel_shape=[kernel] * 2, strides=[stride] * 2, pads=pad)
        parts = [weight(f"{name}.{part}", target) for part in ("scale", "bias", "mean", "var")]
        return node("BatchNormalization", [y, *parts], f"{name}.norm")

    x = conv("image", "conv1", 3, 64, 7, 2)
    x = node("Relu", [x], "relu1")
    x = node("MaxPool", [x], "pool1", kernel_shape=[3, 3], strides=[2, 2], pads=[1] * 4)
    source = 64
    for stage, (blocks, width) in enumerate(((3, 64), (4, 128), (6, 256), (3, 512))):
        for block in range(blocks):
            name = f"s{stage}.{block}"
            stride = 2 if stage and not block else 1
            y = node("Relu", [conv(x, f"{name}.a", source, width, 1)], f"{name}.ra")
            y = node("Relu", [conv(y, f"{name}.b", width, width, 3, stride)], f"{name}.rb")
            if not block:
                x = conv(x, f"{name}.down", source, 4 * width, 1, stride)
            y = conv(y, f"{name}.c", width, 4 * width, 1)
            x = node("Relu", [node("Add", [y, x], f"{name}.add")], f"{name}.rc")
            source = 4 * width
    x = node("GlobalAveragePool", [x], "pool")
    x = node("Flatten", [x], "flat")
    x = node("Gemm", [x, weight("fc.w", 1000, 2048), weight("fc.b", 1000)], "fc", transB=1)
    node("Softmax", [x], "probabilities")
    graph = onnx.helper.make_graph(
        nodes,
        "resnet50",
        [onnx.helper.make_tensor_value_info("image", 1, [1, 3, 224, 224])],
        [onnx.helper.make_tensor_value_info("probabilities", 1, [1, 1000])],
        weights,
    )
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)])
