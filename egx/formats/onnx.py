"""ONNX files as models.

    model = load_onnx("model.onnx", granularity="layer", dims={"batch": 1})

Weights may be absent: their shapes say all, and of external data only small constants are read,
on whose values shapes may depend. What depends on initializers, Constant nodes or static shapes
alone is folded away, and its readers read it as weights; shared weights count at each reader;
axes, sizes and limits of an op are no weights. Identity, inference Dropout and whatever else
changes nothing are removed, and what no output needs is dropped. An op per node remains
(`granularity="op"`), or a layer per kernel of a compiler (`"layer"`, see `onnx_layers`). The
graph's inputs are the caller's: they have no producer, hence no tensor and no use here, just as
in the zoo.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx

from egx.errors import FormatError, GraphError
from egx.formats.onnx_contrib import equivalent
from egx.formats.onnx_control import body_cost
from egx.formats.onnx_flops import Call, attributes_of, call_of
from egx.formats.onnx_geometry import geometry
from egx.formats.onnx_layers import ImportedOp, fuse
from egx.formats.onnx_ops import CONTROL_FLOW, Cost, cost, parameters, rule
from egx.formats.onnx_read import captured, node_reads, read_model, reading, set_dims, subgraphs
from egx.formats.onnx_shapes import Tensors, prepare
from egx.formats.onnx_types import STANDARD
from egx.graph.builder import GraphBuilder, Tensor
from egx.graph.graph import Model

GRANULARITIES = ("layer", "op")


class OnnxWarning(UserWarning):
    """Something of an ONNX file was taken on assumption."""


def load_onnx(
    path: str | Path, *, granularity: str = "layer", dims: Mapping[str, int] | None = None
) -> Model:
    """Imports a .onnx or .onnx.gz file.

    Args:
        path: the file; its external weights may be absent.
        granularity: "layer", normalisation, bias, activation and residual add fused into the
            contraction before them; or "op", an op for each node.
        dims: sizes of free dimensions by name; the k-th of input x is also called `x.k`.

    Returns:
        The model. Its `notes` hold exact totals in bytes, `macs`, `parameters`, the number of
        nodes in the file and why some of them are no ops (`removed`).

    Raises:
        FormatError: naming the file and what is wrong in it, or the dimensions that stay open.
    """
    if granularity not in GRANULARITIES:
        raise FormatError(
            f"{path}: granularity {granularity!r} is not one of {', '.join(GRANULARITIES)}"
        )
    dims = dict(dims or {})
    proto = read_model(path)
    used = set_dims(proto, dims, path)
    tensors = prepare(proto, path, dims)
    unknown = [name for name in dims if name not in used | tensors.used_dims]
    if unknown:
        raise FormatError(
            f"{path}: no free dimension is named {', '.join(map(repr, unknown))}; "
            f"inputs are {_inputs(proto)}"
        )
    imported = _Import(tensors)
    ops = imported.ops()
    removed = dict(imported.removed)
    if granularity == "layer":
        before = len(ops)
        ops, outputs = fuse(ops, imported.outputs, imported.elements)
        removed["fused"] = before - len(ops)
    else:
        outputs = imported.outputs
    if not ops:
        raise FormatError(f"{path}: nothing is computed: its outputs are constants or inputs")
    imported.warn()
    return _build(path, ops, outputs, imported, {"granularity": granularity, "removed": removed})


def _inputs(proto: onnx.ModelProto) -> str:
    """The inputs with their shapes, for messages."""
    texts = []
    for value in proto.graph.input:
        sizes = [d.dim_param or d.dim_value for d in value.type.tensor_type.shape.dim]
        texts.append(f"{value.name}[{', '.join(map(str, sizes))}]")
    return ", ".join(texts) or "none"


class _Import:
    """Turns the nodes of an inferred graph into `ImportedOp`s."""

    def __init__(self, tensors: Tensors):
        self.tensors = tensors
        self.graph = tensors.model.graph
        self.removed: Counter[str] = Counter()
        self.outputs: list[str] = []
        self.weights: set[str] = set()
        self._unknown: Counter[str] = Counter()
        self._blank: set[str] = set()  # op types of those
        self._root: dict[str, str] = {}
        self._made: set[str] = set()
        self._live: list[ImportedOp] = []

    def elements(self, name: str) -> int:
        """Number of elements of a tensor."""
        return self.tensors.info[name].elements

    def ops(self) -> list[ImportedOp]:
        """The live ops in the order of the nodes; also fills `outputs`, `weights`, `removed`."""
        read = {name for node in self.graph.node for name in node_reads(node)}
        read |= {v.name for v in self.graph.output}
        kept = []
        for index, node in enumerate(self.graph.node):
            if all(name in self.tensors.constant for name in node.output if name):
                self.removed["constant"] += 1
                continue
            with reading(node, self.tensors.path):
                source = self._alias(node, read)
            if source is not None:
                self.removed["alias"] += 1
                self._root[node.output[0]] = self._resolve(source)
                continue
            kept.append((index, node))
            self._made.update(name for name in node.output if name)
        wanted = [self._resolve(value.name) for value in self.graph.output]
        self.outputs = list(dict.fromkeys(name for name in wanted if name in self._made))
        needed = set(self.outputs)
        alive = []
        for index, node in reversed(kept):
            if needed.isdisjoint(node.output):
                self.removed["dead"] += 1
                continue
            needed.update(self._resolve(name) for name, _ in self._operands(node))
            alive.append((index, node))
        names = _Names()
        self._live = [self._op(index, node, names) for index, node in reversed(alive)]
        return self._live

    def _resolve(self, name: str) -> str:
        return self._root.get(name, name)

    def _operands(self, node: onnx.NodeProto) -> list[tuple[str, bool]]:
        """Every tensor that a node reads, and whether it is data and no setting."""
        settings = parameters(node.op_type) if node.domain in STANDARD else ()
        found = [(name, k not in settings) for k, name in enumerate(node.input) if name]
        for body in subgraphs(node):
            have = {name for name, _ in found}
            found.extend((name, True) for name in captured(body) if name not in have)
        return found

    def _alias(self, node: onnx.NodeProto, read: set[str]) -> str | None:
        """The input that the node's output equals, if it does nothing at inference."""
        if node.domain not in STANDARD or not node.input or not node.output[0]:
            return None
        info, value = self.tensors.info, self.tensors.value
        inputs = [name for name in node.input if name]
        if any(name in read for name in node.output[1:] if name) or not inputs:
            return None
        first = inputs[0]
        if first in self.tensors.constant:
            return None
        kind = node.op_type
        if kind in ("Identity", "OptionalGetElement"):
            return first
        if kind == "Dropout":
            training = value(node.input[2]) if len(node.input) > 2 and node.input[2] else None
            return None if training is not None and training.any() else first
        if kind in ("Concat", "Sum", "Max", "Min", "Mean") and len(inputs) == 1:
            return first
        source, made = info[first], info[node.output[0]]
        if source.shape != made.shape or source.dtype != made.dtype:
            return None
        if kind in ("Cast", "CastLike", "Reshape", "Flatten", "Squeeze", "Unsqueeze"):
            return first
        if kind in ("Expand", "Tile", "Split"):
            return first
        attributes = attributes_of(node)
        if kind == "Transpose":
            perm = attributes.get("perm") or list(range(len(source.shape)))[::-1]
            return first if _same_order(source.shape, perm) else None
        if kind == "Slice" and len(node.input) > 4 and node.input[4]:
            steps = value(node.input[4])
            return first if steps is not None and (steps > 0).all() else None
        if kind == "Slice":
            return first
        if kind == "Pad":
            pads = value(node.input[1]) if len(node.input) > 1 else attributes.get("pads")
            return first if pads is not None and not any(pads) else None
        return None

    def _op(self, index: int, node: onnx.NodeProto, names: _Names) -> ImportedOp:
        with reading(node, self.tensors.path):
            return self._imported(index, node, names)

    def _imported(self, index: int, node: onnx.NodeProto, names: _Names) -> ImportedOp:
        call = self._call(node)
        found = rule(node)
        extra_bytes = 0
        if found is not None:
            price = cost(found, call)
        else:
            price, extra_bytes = self._opaque(node)
        if node.op_type == "Gather" and node.input[0] in self.tensors.constant:
            price = price._replace(name="embedding")
        weight_bytes, reads = extra_bytes, []
        for name, is_data in self._operands(node):
            root = self._resolve(name)
            if root in self._made:
                reads.append(root)
            elif root in self.tensors.constant and is_data:
                weight_bytes += self.tensors.info[root].bytes
                self.weights.add(root)
        return ImportedOp(
            name=names.take(node.name, f"{node.op_type}_{index}"),
            index=index,
            kind=price.kind,
            op_type=price.name,
            flops=price.flops,
            macs=price.macs,
            weight_bytes=weight_bytes,
            reads=reads,
            writes=[name for name in node.output if name],
            geometry=geometry(call, self._main_input(node), price.name),
            view=self._view(node),
            onnx_type=node.op_type,
        )

    def _call(self, node: onnx.NodeProto) -> Call:
        """The node's operands, its axes among the attributes wherever they are known."""
        call = call_of(node, equivalent(node), self.tensors.info)
        if call.op_type.startswith("Reduce") and len(node.input) > 1 and node.input[1]:
            axes = self.tensors.value(node.input[1])
            if axes is not None and "axes" not in call.attributes:
                axes_list = [int(axis) for axis in axes.reshape(-1)]
                return call._replace(attributes={**call.attributes, "axes": axes_list})
        return call

    def _main_input(self, node: onnx.NodeProto) -> int:
        """Position, among the operands of the call, of the first that is no constant; or -1."""
        same = equivalent(node)
        names = list(node.input)
        if same is not None:
            names = [names[k] for k in same.inputs if k < len(names)]
        constant = self.tensors.constant
        return next((k for k, name in enumerate(names) if name and name not in constant), -1)

    def _view(self, node: onnx.NodeProto) -> str | None:
        """What a layer-wise import may see through: "view", "quantize" or "dequantize"."""
        if node.op_type in ("Reshape", "Flatten", "Squeeze", "Unsqueeze", "BitCast"):
            return "view"
        if node.op_type == "Transpose":
            shape = self.tensors.info[node.input[0]].shape
            perm = attributes_of(node).get("perm") or list(range(len(shape)))[::-1]
            return "view" if _same_order(shape, perm) else None
        return {"QuantizeLinear": "quantize", "DequantizeLinear": "dequantize"}.get(node.op_type)

    def _opaque(self, node: onnx.NodeProto) -> tuple[Cost, int]:
        """Cost of an op known by its bodies at most, and the bytes of their constants."""
        name = node.op_type if node.domain in STANDARD else f"{node.domain}::{node.op_type}"
        if node.op_type not in CONTROL_FLOW or node.domain not in STANDARD:
            self._unknown[name] += 1
            self._blank.add(node.op_type)
        body = body_cost(node, self.tensors)
        self._unknown.update(body.unknown)
        return Cost("opaque", node.op_type.lower(), body.flops, body.macs), body.weight_bytes

    def warn(self) -> None:
        """One warning for unknown types and one for assumed sizes, if there are any."""
        path = self.tensors.path
        if self._unknown:
            listed = ", ".join(f"{name} x{count}" for name, count in self._unknown.most_common())
            warnings.warn(
                f"{path}: {self._unknown.total()} ops of unknown types, imported as opaque with "
                "no FLOPs and, where the file gives no shape, outputs of the size of their input: "
                f"{listed}",
                OnnxWarning,
                stacklevel=3,
            )
        written = {n for op in self._live if op.onnx_type not in self._blank for n in op.writes}
        # What views show is not written, but goes on into the shapes of others.
        absent = bool(self.tensors.absent)
        assumed = [name for name in self.tensors.assumed if name in written or absent]
        if assumed:
            more = ", ..." if len(assumed) > 5 else ""
            warnings.warn(
                f"{path}: the sizes of {len(assumed)} tensors depend on data; taken as an upper "
                f"bound or as the input's: {', '.join(assumed[:5])}{more}"
                f"{self.tensors.missing()}. Set one by --dim {assumed[0]}.0=value",
                OnnxWarning,
                stacklevel=3,
            )


class _Names:
    """Hands out op names, each once."""

    def __init__(self) -> None:
        self._taken: dict[str, int] = {}

    def take(self, name: str, fallback: str) -> str:
        wanted = base = name or fallback
        while wanted in self._taken:
            self._taken[base] += 1
            wanted = f"{base}#{self._taken[base]}"
        self._taken[wanted] = 1
        return wanted


def _same_order(shape: tuple[int, ...], perm: list[int]) -> bool:
    """Whether a transposition moves axes of size 1 only, so that the bytes stay as they are."""
    moved = [axis for axis in perm if shape[axis] != 1]
    return moved == sorted(moved)


def _build(
    path: str | Path,
    ops: list[ImportedOp],
    outputs: list[str],
    imported: _Import,
    notes: dict[str, Any],
) -> Model:
    try:
        return _built(path, ops, outputs, imported, notes)
    except GraphError as error:
        raise FormatError(f"{path}: {error}") from None


def _built(
    path: str | Path,
    ops: list[ImportedOp],
    outputs: list[str],
    imported: _Import,
    notes: dict[str, Any],
) -> Model:
    info = imported.tensors.info
    builder = GraphBuilder(Path(path).name)
    handles: dict[str, Tensor] = {}
    for op in ops:
        made = builder.op(
            op.name,
            kind=op.kind,
            op_type=op.op_type,
            inputs=[handles[name] for name in op.reads],
            output_bytes=[info[name].bytes for name in op.writes],
            flops=op.flops,
            weight_bytes=op.weight_bytes,
            attributes=op.geometry,
            output_names=op.writes,
        )
        handles.update(zip(op.writes, made, strict=True))
    for name in outputs:
        builder.output(handles[name])
    graph = imported.graph
    totals = {
        "nodes": len(graph.node),
        "parameters": imported.tensors.parameters(imported.weights),
        "macs": sum(op.macs for op in ops),
        "flops": sum(op.flops for op in ops),
        "weight_bytes": sum(op.weight_bytes for op in ops),
        "activation_bytes": sum(info[name].bytes for op in ops for name in op.writes),
        "initializer_bytes": sum(info[t.name].bytes for t in graph.initializer),
    }
    return builder.build_model(source=str(path), notes={**notes, **totals})


__all__ = ["GRANULARITIES", "OnnxWarning", "load_onnx"]
