"""From an ONNX file to a checked protobuf: functions inlined, nodes sorted, dimensions set."""

from __future__ import annotations

import contextlib
import gzip
import heapq
import itertools
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath

import onnx
import onnx.inliner
from google.protobuf.message import DecodeError

from egx.errors import FormatError
from egx.formats.onnx_types import STANDARD, size_bytes

# Shapes and axes are far smaller; anything above is a weight whose values do not matter.
KEPT_BYTES = 8192


def read_model(path: str | Path) -> onnx.ModelProto:
    """Parses a .onnx or .onnx.gz file and inlines its functions; weights may be absent.

    Of external data only small constants are read, where they are there: shapes may depend on
    their values.

    Raises:
        FormatError: naming the file: missing, no gzip, truncated, or no ONNX model.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise FormatError(f"{path}: cannot be read ({error.strerror or error})") from None
    if str(path).endswith(".gz"):
        try:
            data = gzip.decompress(data)
        except (OSError, EOFError, zlib.error) as error:
            raise FormatError(f"{path}: not a complete gzip file ({error})") from None
    if not data:
        raise FormatError(f"{path}: the file is empty")
    model = onnx.ModelProto()
    try:
        model.ParseFromString(data)
    except DecodeError as error:
        raise FormatError(
            f"{path}: not an ONNX model, or truncated: protobuf says {error}"
        ) from None
    if not model.HasField("graph"):
        raise FormatError(f"{path}: not an ONNX model, or truncated: it has no graph")
    if not model.graph.node:
        raise FormatError(f"{path}: the graph {model.graph.name!r} is empty, it has no nodes")
    if not model.opset_import:
        raise FormatError(f"{path}: no opset_import; the file may be truncated")
    _check_text(model.graph, path)
    if model.functions:
        try:
            model = onnx.inliner.inline_local_functions(model)
        except Exception as error:  # the C++ side raises more than one type
            raise FormatError(f"{path}: its functions cannot be inlined ({error})") from None
    _lift_constants(model.graph, path)
    _read_external(model.graph, Path(path).parent)
    _import_domains(model)
    return model


def _check_text(graph: onnx.GraphProto, path: str | Path) -> None:
    """Refuses names that are no text: protobuf hands out damaged strings as bytes."""
    texts = [value.name for value in (*graph.input, *graph.output, *graph.value_info)]
    texts += [tensor.name for tensor in graph.initializer]
    for node in graph.node:
        texts += [node.op_type, node.domain, node.name, *node.input, *node.output]
        texts += [attribute.name for attribute in node.attribute]
        for body in subgraphs(node):
            _check_text(body, path)
    for value in (*graph.input, *graph.output, *graph.value_info):
        texts += [dim.dim_param for dim in value.type.tensor_type.shape.dim]
    damaged = next((text for text in texts if not isinstance(text, str)), None)
    if damaged is not None:
        raise FormatError(f"{path}: damaged: the name {damaged!r} is not UTF-8 text")


def _lift_constants(graph: onnx.GraphProto, path: str | Path) -> None:
    """Turns Constant nodes into initializers and drops the values of large ones."""
    kept = []
    for node in graph.node:
        if node.op_type == "Constant" and node.domain in ("", "ai.onnx") and len(node.output) == 1:
            _constant_value(graph, node, path)
        else:
            kept.append(node)
    del graph.node[:]
    graph.node.extend(kept)
    for tensor in graph.initializer:
        if min(tensor.dims, default=0) < 0:
            raise FormatError(f"{path}: initializer {tensor.name!r} has shape {list(tensor.dims)}")
        if tensor.ByteSize() > KEPT_BYTES:
            stripped = onnx.TensorProto(
                name=tensor.name, dims=tensor.dims, data_type=tensor.data_type
            )
            tensor.CopyFrom(stripped)


def _constant_value(graph: onnx.GraphProto, node: onnx.NodeProto, path: str | Path) -> None:
    if len(node.attribute) != 1:
        raise FormatError(
            f"{path}: Constant that makes {node.output[0]!r} has {len(node.attribute)} values"
        )
    attribute = node.attribute[0]
    name = node.output[0]
    if attribute.name == "sparse_value":
        sparse = graph.sparse_initializer.add()
        sparse.CopyFrom(attribute.sparse_tensor)
        sparse.values.name = name
        return
    value = onnx.helper.get_attribute_value(attribute)
    if attribute.name == "value":
        tensor = graph.initializer.add()
        tensor.CopyFrom(value)
        tensor.name = name
        return
    types = {
        "value_float": onnx.TensorProto.FLOAT,
        "value_floats": onnx.TensorProto.FLOAT,
        "value_int": onnx.TensorProto.INT64,
        "value_ints": onnx.TensorProto.INT64,
        "value_string": onnx.TensorProto.STRING,
        "value_strings": onnx.TensorProto.STRING,
    }
    if attribute.name not in types:
        raise FormatError(f"{path}: Constant {name!r} has an unknown value {attribute.name!r}")
    many = attribute.name.endswith("s")
    values = list(value) if many else [value]
    tensor = onnx.helper.make_tensor(
        name, types[attribute.name], [len(values)] if many else [], values
    )
    graph.initializer.append(tensor)


def _read_external(graph: onnx.GraphProto, folder: Path) -> None:
    """Fills in the small constants that lie in files beside the model, bodies included."""
    for tensor in graph.initializer:
        size = size_bytes(tensor.dims, tensor.data_type)
        is_small = 0 < size <= KEPT_BYTES and tensor.data_type != onnx.TensorProto.STRING
        if tensor.data_location != onnx.TensorProto.EXTERNAL or not is_small:
            continue
        entries = {entry.key: entry.value for entry in tensor.external_data}
        place = PurePosixPath(entries.get("location", ""))
        if not place.parts or place.is_absolute() or ".." in place.parts:
            continue
        try:
            with (folder / place).open("rb") as file:
                file.seek(int(entries.get("offset") or 0))
                data = file.read(size)
        except (OSError, ValueError):
            continue
        if len(data) == size:
            tensor.raw_data = data
            tensor.ClearField("external_data")
            tensor.data_location = onnx.TensorProto.DEFAULT
    for node in graph.node:
        for body in subgraphs(node):
            _read_external(body, folder)


def _import_domains(model: onnx.ModelProto) -> None:
    """Declares the domains of foreign ops that the file forgot to, lest inference stop there."""

    def used(graph: onnx.GraphProto) -> Iterator[str]:
        for node in graph.node:
            yield node.domain
            for body in subgraphs(node):
                yield from used(body)

    declared = {entry.domain for entry in model.opset_import}
    for domain in sorted(set(used(model.graph)) - declared - set(STANDARD)):
        model.opset_import.append(onnx.helper.make_opsetid(domain, 1))


def subgraphs(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    """The bodies of If, Loop, Scan and the like."""
    for attribute in node.attribute:
        if attribute.type == onnx.AttributeProto.GRAPH:
            yield attribute.g
        elif attribute.type == onnx.AttributeProto.GRAPHS:
            yield from attribute.graphs


def captured(graph: onnx.GraphProto) -> list[str]:
    """What a body reads from outside, in order of first use."""
    own = {v.name for v in graph.input} | {t.name for t in graph.initializer}
    own |= {t.values.name for t in graph.sparse_initializer}
    own |= {name for node in graph.node for name in node.output}
    found: dict[str, None] = {}
    for node in graph.node:
        names = [*node.input, *(n for body in subgraphs(node) for n in captured(body))]
        found.update(dict.fromkeys(n for n in names if n and n not in own))
    found.update(dict.fromkeys(v.name for v in graph.output if v.name and v.name not in own))
    return list(found)


def node_reads(node: onnx.NodeProto) -> list[str]:
    """The inputs of a node, then what its bodies read from outside."""
    reads = [name for name in node.input if name]
    for body in subgraphs(node):
        reads.extend(name for name in captured(body) if name not in reads)
    return reads


def label(node: onnx.NodeProto) -> str:
    """What messages call a node."""
    made = next((name for name in node.output if name), "nothing")
    return f"node {node.name!r} ({node.op_type}, makes {made!r})"


@contextlib.contextmanager
def reading(node: onnx.NodeProto, path: str | Path) -> Iterator[None]:
    """Blames a node for attributes or shapes that its op type cannot have.

    Files may hold anything; what the rules of an op stumble over is an error of the file.
    """
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        if isinstance(error, FormatError):
            raise
        what = f"{type(error).__name__}: {error}"
        raise FormatError(f"{path}: {label(node)} cannot be understood ({what})") from error


def constants(graph: onnx.GraphProto) -> set[str]:
    """Names of all initializers."""
    names = {tensor.name for tensor in graph.initializer}
    return names | {tensor.values.name for tensor in graph.sparse_initializer}


def sort_nodes(model: onnx.ModelProto, path: str | Path) -> None:
    """Puts the nodes into a topological order, the file's own where that is one.

    Raises:
        FormatError: for an undefined tensor, a tensor made twice, or a cycle, naming it.
    """
    graph = model.graph
    given = constants(graph) | {value.name for value in graph.input}
    maker: dict[str, int] = {}
    for index, node in enumerate(graph.node):
        for name in node.output:
            if not name:
                continue
            if name in maker or name in given:
                raise FormatError(f"{path}: tensor {name!r} is made twice, again by {label(node)}")
            maker[name] = index
    for value in graph.output:
        if value.name not in maker and value.name not in given:
            raise FormatError(f"{path}: graph output {value.name!r} is made by no node")
    waiting = [0] * len(graph.node)
    readers: list[list[int]] = [[] for _ in graph.node]
    for index, node in enumerate(graph.node):
        for name in node_reads(node):
            if name in maker:
                waiting[index] += 1
                readers[maker[name]].append(index)
            elif name not in given:
                raise FormatError(f"{path}: {label(node)} reads {name!r}, which nothing defines")
    order = _order(waiting, readers)
    if len(order) < len(graph.node):
        stuck = _on_cycle(graph.node, set(range(len(graph.node))) - set(order), maker)
        raise FormatError(f"{path}: the graph has a cycle through {', '.join(stuck)}")
    if any(a > b for a, b in itertools.pairwise(order)):
        nodes = [graph.node[index] for index in order]
        copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
        del graph.node[:]
        graph.node.extend(copies)


def _order(waiting: Sequence[int], readers: Sequence[Iterable[int]]) -> list[int]:
    waiting = list(waiting)
    ready = [index for index, count in enumerate(waiting) if not count]
    order = []
    while ready:
        index = heapq.heappop(ready)
        order.append(index)
        for reader in readers[index]:
            waiting[reader] -= 1
            if not waiting[reader]:
                heapq.heappush(ready, reader)
    return order


def _on_cycle(
    nodes: Sequence[onnx.NodeProto], left: set[int], maker: Mapping[str, int]
) -> list[str]:
    """Walks back from any node that never became ready until one repeats; names the loop."""
    at = min(left)
    seen: dict[int, int] = {}
    while at not in seen:
        seen[at] = len(seen)
        at = next(maker[n] for n in node_reads(nodes[at]) if maker.get(n) in left)
    return [label(nodes[index]) for index in reversed(list(seen)[seen[at] :])][:8]


def set_dims(model: onnx.ModelProto, dims: Mapping[str, int], path: str | Path) -> set[str]:
    """Gives free dimensions of the inputs their sizes; returns the names that were used.

    A dimension goes by its own name; the k-th of input x also by `x.k`, needed when it has none.

    Raises:
        FormatError: for a size that is no count, or listing the dimensions that stay open.
    """
    for name, size in dims.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 0:
            raise FormatError(f"{path}: dimension {name!r} must be a count, got {size!r}")
    used: set[str] = set()
    fixed = constants(model.graph)
    free: dict[str, list[str]] = {}
    for value in model.graph.input:
        if value.name in fixed or not value.type.HasField("tensor_type"):
            continue
        if not value.type.tensor_type.HasField("shape"):
            raise FormatError(f"{path}: input {value.name!r} has no shape, not even its rank")
        for k, dim in enumerate(value.type.tensor_type.shape.dim):
            if dim.dim_value < 0:  # how some exporters write "free"
                dim.Clear()
            _fill(dim, dims, used, f"{value.name}.{k}")
            if not dim.HasField("dim_value"):
                named = dim.dim_param or f"{value.name}.{k}"
                free.setdefault(named, []).append(f"{value.name}[{k}]")
    for value in (*model.graph.value_info, *model.graph.output):
        for dim in value.type.tensor_type.shape.dim:
            _fill(dim, dims, used, "")
    if free:
        listed = "; ".join(f"{name} (of input {', '.join(at)})" for name, at in free.items())
        hint = " ".join(f"--dim {name}=value" for name in free)
        raise FormatError(f"{path}: free dimensions: {listed}. Give each a size: {hint}")
    return used


def _fill(
    dim: onnx.TensorShapeProto.Dimension, dims: Mapping[str, int], used: set[str], place: str
) -> None:
    if dim.HasField("dim_value"):
        return
    for name in (dim.dim_param, place):
        if name and name in dims:
            used.add(name)
            dim.dim_value = dims[name]
            return
