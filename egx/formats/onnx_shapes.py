"""Shapes, element types and constants of every tensor of an ONNX graph."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto as T
from onnx import numpy_helper, shape_inference
from onnx.reference import ReferenceEvaluator

from egx.errors import FormatError
from egx.formats.onnx_contrib import SAME_SHAPE, contrib_shapes, equivalent, standard_node
from egx.formats.onnx_read import label, reading, sort_nodes, subgraphs
from egx.formats.onnx_types import (
    MICROSOFT,
    STANDARD,
    TensorInfo,
    known_info,
    size_bytes,
    type_proto,
)

EVALUATED_ELEMENTS = 1024
EVALUATED_DEPTH = 100
RANDOM = {"RandomNormal", "RandomUniform", "RandomNormalLike", "RandomUniformLike"}
RANDOM |= {"Bernoulli", "Multinomial"}
GENERATORS = {"ConstantOfShape", "EyeLike", "Range"}
# What moves constants about but leaves them as they are stored.
STORED_AS_INPUT = {"Identity", "Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten"}


class Tensors:
    """What is known of each tensor by name; filled by `infer`."""

    def __init__(self, model: onnx.ModelProto, path: str | Path, dims: Mapping[str, int]):
        self.model = model
        self.path = path
        self.info: dict[str, TensorInfo] = {}
        self.constant: set[str] = set()
        self.assumed: list[str] = []
        self.absent: dict[str, str] = {}
        self.used_dims: set[str] = set()
        self._dims = dims
        self._depth = 0
        self._types: dict[str, onnx.TypeProto] = {}
        self._stored: dict[str, onnx.TensorProto] = {}
        self._values: dict[str, np.ndarray | None] = {}
        self._maker: dict[str, onnx.NodeProto] = {}
        self._opset = {entry.domain: entry.version for entry in model.opset_import}
        self.version = self._opset.get("", self._opset.get("ai.onnx", 1))

    def infer(self) -> None:
        """Fills everything in, in one pass over the sorted nodes.

        Shapes are the onnx library's, of the whole graph, then node by node where values decide
        them that it did not follow. What depends on data or on unknown ops gets an assumed shape
        and its name is kept in `assumed`.
        """
        try:
            inferred = shape_inference.infer_shapes(self.model, data_prop=True)
        except Exception as error:  # InferenceError, ValueError, ...: the C++ side's choice
            raise FormatError(f"{self.path}: shape inference failed ({error})") from None
        self.model = inferred
        graph = inferred.graph
        self._read_constants(graph)
        self._types = {v.name: v.type for v in (*graph.value_info, *graph.output, *graph.input)}
        for value in graph.input:
            if value.name not in self.constant:
                self.info[value.name] = known_info(value.type) or TensorInfo((), T.UNDEFINED, 0)
        for node in graph.node:
            with reading(node, self.path):
                self._visit(node)

    def _visit(self, node: onnx.NodeProto) -> None:
        outputs = [name for name in node.output if name]
        self._maker.update(dict.fromkeys(outputs, node))
        if self._is_constant(node):
            self.constant.update(outputs)
        known = {n: known_info(self._types[n]) for n in outputs if n in self._types}
        if any(known.get(name) is None for name in outputs):
            known = self._repair(node)
        for name in outputs:
            info = known[name]
            assert info is not None
            self.info[name] = self._as_stored(node, name, info)

    def _read_constants(self, graph: onnx.GraphProto) -> None:
        for tensor in graph.initializer:
            self._stored[tensor.name] = tensor
            self.constant.add(tensor.name)
            shape = tuple(tensor.dims)
            self.info[tensor.name] = TensorInfo(
                shape, tensor.data_type, size_bytes(shape, tensor.data_type)
            )
        for sparse in graph.sparse_initializer:
            name, kind = sparse.values.name, sparse.values.data_type
            stored = size_bytes(sparse.values.dims, kind) + size_bytes(sparse.indices.dims, T.INT64)
            self.constant.add(name)
            self.info[name] = TensorInfo(tuple(sparse.dims), kind, stored)

    def _is_constant(self, node: onnx.NodeProto) -> bool:
        """Whether a compiler would know the results: they depend on constants or shapes alone."""
        if node.op_type in ("Shape", "Size") and node.domain in STANDARD:
            return True
        if node.op_type in RANDOM or node.domain not in (*STANDARD, MICROSOFT):
            return False
        return not any(subgraphs(node)) and all(n in self.constant for n in node.input if n)

    def _as_stored(self, node: onnx.NodeProto, name: str, info: TensorInfo) -> TensorInfo:
        """A constant that is only dequantised or moved is kept as the file stores it."""
        if name not in self.constant:
            return info
        if node.op_type == "DequantizeLinear":
            return info._replace(bytes=sum(self.info[n].bytes for n in node.input if n))
        if node.op_type in STORED_AS_INPUT:
            return info._replace(bytes=self.info[node.input[0]].bytes)
        return info

    def parameters(self, weights: Iterable[str]) -> int:
        """Elements of the stored numbers that these constants were folded from, each once.

        Integers of 64 bits and truth values are indices, shapes and masks, and do not count.
        """
        seen: set[str] = set()
        stack = list(weights)
        count = 0
        while stack:
            name = stack.pop()
            if name in seen:
                continue
            seen.add(name)
            node = self._maker.get(name)
            if node is not None and node.op_type not in GENERATORS:
                stack.extend(n for n in node.input if n in self.constant)
            elif self.info[name].dtype not in (T.INT64, T.BOOL, T.STRING):
                count += self.info[name].elements
        return count

    def value(self, name: str) -> np.ndarray | None:
        """The value of a small constant, if it can be known."""
        if name not in self._values:
            self._values[name] = self._evaluate(name)
        return self._values[name]

    def _evaluate(self, name: str) -> np.ndarray | None:
        if name in self._stored:
            tensor = self._stored[name]
            if tensor.data_location == T.EXTERNAL and tensor.data_type in (T.INT32, T.INT64):
                entries = {entry.key: entry.value for entry in tensor.external_data}
                self.absent[name] = entries.get("location", "")
            return _payload(tensor)
        node = self._maker.get(name)
        if node is None or name not in self.constant or node.domain not in STANDARD:
            return None
        if name in self.info and self.info[name].elements > EVALUATED_ELEMENTS:
            return None
        if node.op_type in ("Shape", "Size") and node.input[0] in self.info:
            shape = self.info[node.input[0]].shape
            attributes = {a.name: a.i for a in node.attribute}
            part = shape[attributes.get("start", 0) : attributes.get("end")]
            return np.asarray(part if node.op_type == "Shape" else math.prod(shape), np.int64)
        if self._depth >= EVALUATED_DEPTH:
            return None
        self._depth += 1
        given = {n: self.value(n) for n in node.input if n}
        self._depth -= 1
        if any(v is None for v in given.values()):
            return None
        return self._run(node, given, name)

    def _run(self, node: onnx.NodeProto, given: dict[str, Any], name: str) -> np.ndarray | None:
        graph = onnx.helper.make_graph(
            [node],
            "one",
            [onnx.helper.make_value_info(n, onnx.TypeProto()) for n in given],
            [onnx.helper.make_value_info(name, onnx.TypeProto())],
        )
        model = onnx.helper.make_model(graph, opset_imports=self.model.opset_import)
        try:
            (result, *_) = ReferenceEvaluator(model).run([name], given)
        except Exception:  # the evaluator has its own gaps; an unknown value is an answer
            return None
        return np.asarray(result) if np.size(result) <= EVALUATED_ELEMENTS else None

    def _repair(self, node: onnx.NodeProto) -> dict[str, TensorInfo | None]:
        """Finds the types of a node's outputs one way or another."""
        found = self._infer_node(node)
        result: dict[str, TensorInfo | None] = {}
        for k, name in enumerate(node.output):
            if not name:
                continue
            kinds = [t for t in (self._types.get(name), found.get(name)) if t is not None]
            info = next((i for i in map(known_info, kinds) if i is not None), None)
            kind = kinds[-1] if kinds else None
            if info is None and kind is not None and kind.HasField("sequence_type"):
                # A sequence holds what it was made of: one tensor of all their bytes.
                self._types[name] = kind
                parts = [self.info[n] for n in node.input if n and n not in self.constant]
                shape = parts[0].shape if parts else ()
                result[name] = TensorInfo(shape, T.UNDEFINED, sum(p.bytes for p in parts))
                continue
            value = self.value(name) if info is None else None
            if value is not None:
                dtype = onnx.helper.np_dtype_to_tensor_dtype(value.dtype)
                info = TensorInfo(value.shape, dtype, size_bytes(value.shape, dtype))
            if info is None:
                info = self._assume(node, k, kind)
            self._types[name] = type_proto(info)
            result[name] = info
        return result

    def missing(self) -> str:
        """For messages: constants that shapes may depend on and whose values are not there."""
        if not self.absent:
            return ""
        places = ", ".join(dict.fromkeys(filter(None, self.absent.values()))) or "another file"
        names = ", ".join(map(repr, list(self.absent)[:3])) + (
            ", ..." if len(self.absent) > 3 else ""
        )
        return f"; shapes depend on the values of {names}, which lie in {places} and are absent"

    def _infer_node(self, node: onnx.NodeProto) -> dict[str, onnx.TypeProto]:
        """Types by the schema of the node, or of the standard op that it amounts to."""
        same = equivalent(node)
        rewritten = node if same is None else standard_node(node, same)
        given = {name: self._type(name) for name in rewritten.input if name}
        if same is not None:
            first = given[rewritten.input[0]].tensor_type.elem_type
            result = first if same.result is None else same.result
            for kind in given.values():
                if kind.tensor_type.elem_type != T.BOOL:
                    kind.tensor_type.elem_type = T.FLOAT
        if rewritten.op_type in SAME_SHAPE and rewritten.domain in (*STANDARD, MICROSOFT):
            shape = self.info[rewritten.input[0]].shape
            dtype = _converted(node, self.info)
            kind = onnx.helper.make_tensor_type_proto(dtype, shape)
            # A skip connection also returns its sum, as the fourth.
            return {name: kind for name in (*rewritten.output[:1], *rewritten.output[3:4]) if name}
        shapes = contrib_shapes(node, self.info)
        if shapes:
            dtype = self.info[node.input[0]].dtype
            return {n: onnx.helper.make_tensor_type_proto(dtype, s) for n, s in shapes.items()}
        found = self._by_schema(node, rewritten, given)
        if same is not None:
            for kind in found.values():
                kind.tensor_type.elem_type = result
        return found

    def _by_schema(
        self, node: onnx.NodeProto, rewritten: onnx.NodeProto, given: dict[str, onnx.TypeProto]
    ) -> dict[str, onnx.TypeProto]:
        if rewritten.domain not in (*STANDARD, "ai.onnx.ml"):
            return {}
        domain = "" if rewritten.domain in STANDARD else rewritten.domain
        version = self._opset.get(domain, 1) if domain else self.version
        try:
            schema = onnx.defs.get_schema(rewritten.op_type, version, domain)
        except onnx.defs.SchemaError:
            return {}
        values = {n: self.value(n) for n in given if n in self.constant}
        data = {n: numpy_helper.from_array(v, n) for n, v in values.items() if v is not None}
        opsets = list(self.model.opset_import)
        try:
            return shape_inference.infer_node_outputs(
                schema, rewritten, given, data, opset_imports=opsets
            )
        except shape_inference.InferenceError as error:
            sequences = any(kind.HasField("sequence_type") for kind in given.values())
            if sequences or any(subgraphs(node)):
                return {}
            raise FormatError(
                f"{self.path}: {label(node)} has impossible shapes: {error}{self.missing()}"
            ) from None
        except Exception:  # types without a rule of their own: what is unknown gets assumed
            return {}

    def _type(self, name: str) -> onnx.TypeProto:
        """A copy of the type of a constant, an input or a tensor met before."""
        kind = self._types.get(name)
        if kind is None or (kind.HasField("tensor_type") and known_info(kind) is None):
            return type_proto(self.info[name])
        return onnx.TypeProto.FromString(kind.SerializeToString())

    def _assume(self, node: onnx.NodeProto, k: int, kind: onnx.TypeProto | None) -> TensorInfo:
        """A shape for what cannot be known: the caller's, an upper bound, or an input's."""
        name = node.output[k]
        inputs = [n for n in node.input if n and self.info[n].dtype != T.UNDEFINED]
        inputs.sort(key=lambda n: n in self.constant)
        first = self.info[inputs[0]] if inputs else TensorInfo((), T.FLOAT, 4)
        tensor = kind.tensor_type if kind is not None else onnx.TypeProto.Tensor()
        guess = _bound(node, self, first, k)
        sizes: list[int | None] = list(guess)
        params = [""] * len(guess)
        unknown = set(range(len(guess)))
        if tensor.HasField("shape"):
            params = [dim.dim_param for dim in tensor.shape.dim]
            fits = len(guess) == len(params)
            unknown = {k for k, dim in enumerate(tensor.shape.dim) if not dim.HasField("dim_value")}
            sizes = [
                dim.dim_value if dim.HasField("dim_value") else guess[axis] if fits else 1
                for axis, dim in enumerate(tensor.shape.dim)
            ]
        for axis in sorted(unknown):
            for key in (f"{name}.{axis}", params[axis]):
                if key in self._dims:
                    self.used_dims.add(key)
                    sizes[axis] = self._dims[key]
                    unknown.discard(axis)
                    break
        if unknown or not tensor.HasField("shape"):
            self.assumed.append(name)
        shape = tuple(n or 0 for n in sizes)
        dtype = tensor.elem_type or first.dtype
        return TensorInfo(shape, dtype, size_bytes(shape, dtype))


def _converted(node: onnx.NodeProto, info: Mapping[str, TensorInfo]) -> int:
    """The element type that an op of `SAME_SHAPE` makes."""
    if node.op_type == "DequantizeLinear":
        return info[node.input[1]].dtype
    if node.op_type == "QuantizeLinear":
        zero = node.input[2] if len(node.input) > 2 else ""
        return info[zero].dtype if zero else T.UINT8
    return info[node.input[0]].dtype


def _payload(tensor: onnx.TensorProto) -> np.ndarray | None:
    if tensor.data_location == T.EXTERNAL or math.prod(tensor.dims) > EVALUATED_ELEMENTS:
        return None
    try:
        return numpy_helper.to_array(tensor)
    except Exception:  # values dropped or damaged: only shapes matter
        return None


def _bound(node: onnx.NodeProto, tensors: Tensors, first: TensorInfo, k: int) -> tuple[int, ...]:
    """The largest shape that a data-dependent output may have, where that is known."""
    attributes = {a.name: a.i for a in node.attribute}
    if node.op_type == "NonZero":
        return (max(len(first.shape), 1), first.elements)
    if node.op_type == "Unique" and (k or "axis" not in attributes):
        return (first.elements,)
    if node.op_type == "Compress" and "axis" not in attributes:
        return (first.elements,)
    if node.op_type == "NonMaxSuppression":
        boxes, scores = (tensors.info[n].shape for n in node.input[:2])
        kept = tensors.value(node.input[2]) if len(node.input) > 2 and node.input[2] else None
        limit = boxes[1] if kept is None else min(int(kept.reshape(-1)[0]), boxes[1])
        return (scores[0] * scores[1] * limit, 3)
    if node.op_type == "Loop":
        state = len(node.input) - 2
        if k < state:
            return tensors.info[node.input[k + 2]].shape
        trips = tensors.value(node.input[0]) if node.input[0] else None
        body = next(subgraphs(node), None)
        if body is None:
            raise LookupError("it has no body")
        inner = body.output[k + 1].type.tensor_type.shape.dim
        count = 1 if trips is None else int(trips.reshape(-1)[0])
        return (count, *(dim.dim_value or 1 for dim in inner))
    return first.shape


def prepare(model: onnx.ModelProto, path: str | Path, dims: Mapping[str, int]) -> Tensors:
    """Sorts the nodes, infers, and returns the table; its `model` is the inferred one."""
    sort_nodes(model, path)
    tensors = Tensors(model, path, dims)
    tensors.infer()
    return tensors
