"""TensorFlow's CostGraphDef as text protobuf: graphs with bytes and microseconds per op.

Message of tensorflow/core/framework/cost_graph.proto; the format of the synthetic graphs of
Paliwal et al., ICLR 2020 (arXiv 1905.02494). What becomes of a node:

- An output of `size` bytes is a tensor; `size: -1` (unknown) counts as 0.
- What carries no bytes only orders: `control_input`, and reading an output of 0 bytes or an alias,
  are uses of an empty tensor, which stands last among the outputs of its op.
- An output with `alias_input_port` >= 0 is that input under another name: who reads it reads the
  aliased tensor too. An absent number is 0, also here, as in any file of TensorFlow, which writes
  -1 for "no alias"; only in a file that never mentions the field nothing is an alias.
- `persistent_memory_size` counts as weights, `temporary_memory_size` as an output without use;
  `is_final` makes a node's outputs graph outputs.
- `compute_cost` is microseconds: `op_seconds`, and in `flops` one a microsecond.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import numpy as np

from egx.errors import FormatError
from egx.files import write_whole
from egx.formats.textproto import Field, Word, read_fields
from egx.formats.workload import MICROSECOND, Workload, topological
from egx.graph.builder import GraphBuilder, Tensor
from egx.graph.graph import Model, real_sizes
from egx.json_fields import short

_MOST = 2**63 - 1
# Fields of a GraphDef's node: the other kind of .pbtxt, which has neither sizes nor times.
_GRAPHDEF = ("op", "input", "attr")
# Of a node, and of no use here.
_UNUSED = (
    "name",
    "device",
    "id",
    "host_temp_memory_size",
    "device_temp_memory_size",
    "device_persistent_memory_size",
    "compute_time",
    "memory_time",
    "inaccurate",
)


@dataclasses.dataclass
class _Node:
    """A node as the file has it; `outputs` are (bytes, aliased port or None if not said)."""

    line: int
    name: str = ""
    id: int = 0
    inputs: list[tuple[int, int, int]] = dataclasses.field(default_factory=list)
    outputs: list[tuple[int, int | None]] = dataclasses.field(default_factory=list)
    control: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    compute_cost: int = 0
    temporary: int = 0
    persistent: int = 0
    is_final: bool = False

    @property
    def label(self) -> str:
        return f"node {self.name!r} (id {self.id})" if self.name else f"node with id {self.id}"


def load_costgraph(path: str | os.PathLike[str]) -> Workload:
    """The workload in a CostGraphDef text file; `op_seconds` has one column, for any device.

    Raises:
        FormatError: naming the file, the line, the node and the field.
    """
    label = os.fspath(path)
    try:
        with Path(path).open(encoding="utf-8") as file:
            nodes = list(_nodes(file, label))
    except OSError as error:
        raise FormatError(f"{label}: cannot be read ({error.strerror or error})") from None
    except UnicodeDecodeError as error:
        raise FormatError(f"{label}: not a text file ({error})") from None
    return _workload(nodes, label)


def _nodes(file: IO[str], label: str) -> Iterator[_Node]:
    for field in read_fields(file, label):
        if field.name == "node":
            yield _Reader(label, field).node()


class _Reader:
    """Reads one node; its errors say where."""

    def __init__(self, label: str, field: Field):
        self.file = label
        self.result = _Node(field.line)
        self.fields = self.message(field)
        # First, for errors in other fields name the node by these.
        for entry in self.fields:
            if entry.name == "name":
                self.result.name = self.text(entry)
            elif entry.name == "id":
                self.result.id = self.whole(entry, -(2**31))

    def error(self, field: Field, expected: str, where: str = "") -> FormatError:
        value = "a message" if isinstance(field.value, list) else short(field.value)
        label = f"{self.result.label}: " if field.name != "node" else ""
        return FormatError(
            f"{self.file}:{field.line}: {label}{where}{field.name}: expected {expected}, "
            f"got {value}"
        )

    def message(self, field: Field, where: str = "") -> list[Field]:
        if not isinstance(field.value, list):
            raise self.error(field, "a message in braces", where)
        return field.value

    def text(self, field: Field) -> str:
        if not isinstance(field.value, str) or isinstance(field.value, Word):
            raise self.error(field, "a string in quotes")
        return field.value

    def whole(self, field: Field, low: int = 0, where: str = "") -> int:
        value = field.value
        if not isinstance(value, int) or not low <= value <= _MOST:
            raise self.error(field, f"a whole number of {low} or more", where)
        return value

    def node(self) -> _Node:
        result = self.result
        for field in self.fields:
            match field.name:
                case "input_info":
                    result.inputs.append(self.input_info(field))
                case "output_info":
                    result.outputs.append(self.output_info(field))
                case "control_input":
                    result.control.append((field.line, self.whole(field, -(2**31))))
                case "compute_cost":
                    result.compute_cost = self.whole(field)
                case "temporary_memory_size":
                    result.temporary = self.whole(field)
                case "persistent_memory_size":
                    result.persistent = self.whole(field)
                case "is_final":
                    result.is_final = self.flag(field)
                case name if name in _GRAPHDEF:
                    raise FormatError(
                        f"{self.file}:{field.line}: {result.label}: {name}: this looks like a "
                        "GraphDef, which holds neither sizes nor times; expected a CostGraphDef"
                    )
                case name if name not in _UNUSED:
                    raise FormatError(
                        f"{self.file}:{field.line}: {result.label}: {name}: no field of a node of "
                        "a CostGraphDef"
                    )
        return result

    def flag(self, field: Field) -> bool:
        values = {"true": True, "t": True, "True": True, "1": True}
        values |= {"false": False, "f": False, "False": False, "0": False}
        key = str(field.value)
        if isinstance(field.value, list) or key not in values:
            raise self.error(field, "true or false")
        return values[key]

    def input_info(self, field: Field) -> tuple[int, int, int]:
        """(line, id of the node, its port)."""
        node = port = 0
        for entry in self.message(field):
            if entry.name == "preceding_node":
                node = self.whole(entry, -(2**31), "input_info.")
            elif entry.name == "preceding_port":
                port = self.whole(entry, 0, "input_info.")
        return field.line, node, port

    def output_info(self, field: Field) -> tuple[int, int | None]:
        size, alias = 0, None
        for entry in self.message(field):
            if entry.name == "size":
                size = max(self.whole(entry, -1, "output_info."), 0)
            elif entry.name == "alias_input_port":
                alias = self.whole(entry, -1, "output_info.")
        return size, alias


class _Graph:
    """The nodes of a file, linked by their ids."""

    def __init__(self, nodes: list[_Node], label: str):
        self.file, self.nodes = label, nodes
        if not nodes:
            raise FormatError(f"{label}: holds no node; expected a CostGraphDef")
        self.index: dict[int, int] = {}
        for k, node in enumerate(nodes):
            if node.id in self.index:
                other = nodes[self.index[node.id]]
                raise FormatError(
                    f"{label}:{node.line}: {node.label}: id: expected one of its own, but "
                    f"{other.label} at line {other.line} has it too"
                )
            self.index[node.id] = k
        # A file that never mentions aliases has none; elsewhere an absent number is 0.
        said = any(alias is not None for node in nodes for _, alias in node.outputs)
        self.unsaid = 0 if said else -1
        self.inputs = [[self.port(node, *source) for source in node.inputs] for node in nodes]
        self.before = [
            [self.find(node, "control_input", *source) for source in node.control] for node in nodes
        ]

    def find(self, node: _Node, field: str, line: int, id: int) -> int:
        if id not in self.index:
            raise FormatError(
                f"{self.file}:{line}: {node.label}: {field}: expected the id of a node, got {id}"
            )
        return self.index[id]

    def port(self, node: _Node, line: int, id: int, port: int) -> tuple[int, int]:
        source = self.find(node, "input_info.preceding_node", line, id)
        count = len(self.nodes[source].outputs)
        if port >= count:
            raise FormatError(
                f"{self.file}:{line}: {node.label}: input_info.preceding_port: expected a port "
                f"of {self.nodes[source].label}, which has {count} outputs, got {port}"
            )
        return source, port

    def alias(self, k: int, port: int) -> int | None:
        """Which input an output is, or None if it is a tensor of its own."""
        node = self.nodes[k]
        alias = node.outputs[port][1]
        if alias is None:
            # The absent 0 of a node without inputs can only mean nothing.
            alias = self.unsaid if node.inputs else -1
        if alias >= len(node.inputs):
            raise FormatError(
                f"{self.file}:{node.line}: {node.label}: output_info.alias_input_port: expected "
                f"one of its {len(node.inputs)} inputs, or -1, got {alias}"
            )
        return alias if alias >= 0 else None

    def order(self) -> list[int]:
        """A topological order that keeps to that of the file where it can."""
        edges = (
            (source, k)
            for k in range(len(self.nodes))
            for source in [*(s for s, _ in self.inputs[k]), *self.before[k]]
        )
        return topological(len(self.nodes), edges, self.cycle)

    def cycle(self, k: int) -> FormatError:
        node = self.nodes[k]
        return FormatError(
            f"{self.file}:{node.line}: {node.label}: input_info: expected a graph without "
            "cycles, but this node waits for itself"
        )


def _workload(nodes: list[_Node], label: str) -> Workload:
    graph = _Graph(nodes, label)
    order = graph.order()
    builder = GraphBuilder(Path(label).name)
    names = _names(nodes)
    # Per (node, port) the tensor that holds its bytes, and whether reading it needs an order too.
    bytes_of: dict[tuple[int, int], Tensor | None] = {}
    only_order = {
        (k, p)
        for k, node in enumerate(nodes)
        for p, (size, _) in enumerate(node.outputs)
        if size == 0 or graph.alias(k, p) is not None
    }
    orders = {source for before in graph.before for source in before}
    orders |= {pair[0] for pairs in graph.inputs for pair in pairs if pair in only_order}
    order_of: dict[int, Tensor] = {}
    for k in order:
        node = nodes[k]
        data, first = [], []
        for pair in graph.inputs[k]:
            held = bytes_of[pair]
            if held is not None:
                data.append(held)
            if pair in only_order:
                first.append(order_of[pair[0]])
        first += [order_of[source] for source in graph.before[k]]
        sized = [p for p, (size, _) in enumerate(node.outputs) if (k, p) not in only_order]
        sizes = [node.outputs[p][0] for p in sized]
        labels = [names[k] if p == 0 else f"{names[k]}:{p}" for p in sized]
        if node.temporary:
            sizes, labels = [*sizes, node.temporary], [*labels, f"{names[k]}:temporary"]
        if k in orders:
            sizes, labels = [*sizes, 0], [*labels, f"^{names[k]}"]
        made = builder.op(
            names[k],
            kind="opaque",
            op_type="op",
            inputs=[*data, *first],
            output_bytes=sizes,
            flops=float(node.compute_cost),
            weight_bytes=node.persistent,
            output_names=labels,
        )
        if k in orders:
            order_of[k] = made[-1]
        for p, tensor in zip(sized, made[: len(sized)], strict=True):
            bytes_of[k, p] = tensor
        for p in range(len(node.outputs)):
            if (k, p) in only_order:
                alias = graph.alias(k, p)
                bytes_of[k, p] = None if alias is None else bytes_of[graph.inputs[k][alias]]
            final = bytes_of[k, p]
            if node.is_final and final is not None:
                builder.output(final)
    model = builder.build_model(source=label, notes={"format": "CostGraphDef"})
    seconds = np.array([[nodes[k].compute_cost * MICROSECOND] for k in order])
    return Workload(model, seconds)


def _names(nodes: list[_Node]) -> list[str]:
    """Names that are unique: those of the file, with the id added where they are not."""
    taken: dict[str, int] = {}
    for node in nodes:
        taken[node.name] = taken.get(node.name, 0) + 1
    names: list[str] = []
    used = {name for name, count in taken.items() if count == 1}
    for node in nodes:
        name = node.name
        if not name or taken[name] > 1:
            name = f"{name}#{node.id}"
            while name in used:
                name += "#"
            used.add(name)
        names.append(name)
    return names


def save_costgraph(
    workload: Workload | Model, path: str | os.PathLike[str], *, device: int = 0
) -> None:
    """Writes a graph as CostGraphDef text, with the seconds of one device.

    Times are whole microseconds there (a Model's are its FLOPs, one a microsecond), kinds and
    types of ops have no place, and `is_final` is said of all outputs of an op or of none.
    Tensors without bytes become `control_input`. What `load_costgraph` reads it gives back.
    """
    write_whole(path, "".join(_lines(workload, device)))


def _lines(workload: Workload | Model, device: int) -> Iterator[str]:
    model = workload if isinstance(workload, Model) else workload.model
    graph = model.graph
    ops, tensors, uses = real_sizes(graph)
    unit = int(graph.unit_bytes)
    if isinstance(workload, Model):
        cost = np.asarray(graph.flops, np.float64)[:ops]
    else:
        cost = workload.op_seconds[:, min(device, workload.op_seconds.shape[1] - 1)] / MICROSECOND
    producer = np.asarray(graph.tensor_producer)[:tensors].tolist()
    size = (np.asarray(graph.tensor_units, np.int64)[:tensors] * unit).tolist()
    weights = (np.asarray(graph.weight_units, np.int64)[:ops] * unit).tolist()
    final = set(np.asarray(graph.tensor_producer)[np.asarray(graph.tensor_is_output)].tolist())
    needed = set(np.asarray(graph.use_tensor)[:uses].tolist())
    needed |= set(np.flatnonzero(np.asarray(graph.tensor_is_output)[:tensors]).tolist())
    outputs: list[list[int]] = [[] for _ in range(ops)]
    port: dict[int, int] = {}
    temporary: dict[int, int] = {}
    # An op's last tensor, if nobody needs it, is what the op works in.
    last = {op: t for t, op in enumerate(producer) if size[t]}
    for t, bytes in enumerate(size):
        if bytes and t not in needed and last[producer[t]] == t:
            temporary[producer[t]] = bytes
        elif bytes:
            port[t] = len(outputs[producer[t]])
            outputs[producer[t]].append(bytes)
    reads: list[list[int]] = [[] for _ in range(ops)]
    pairs = zip(
        np.asarray(graph.use_tensor)[:uses].tolist(),
        np.asarray(graph.use_consumer)[:uses].tolist(),
        strict=True,
    )
    for tensor, consumer in pairs:
        reads[consumer].append(tensor)
    for k, name in enumerate(model.op_names):
        yield f"node {{\n  name: {_quoted(name)}\n" + _said("id", k)
        for t in reads[k]:
            if t in port:
                inner = _said("  preceding_node", producer[t]) + _said("  preceding_port", port[t])
                yield f"  input_info {{\n{inner}  }}\n"
        for bytes in outputs[k]:
            yield f"  output_info {{\n    size: {bytes}\n    alias_input_port: -1\n  }}\n"
        for t in reads[k]:
            if t not in port:
                yield f"  control_input: {producer[t]}\n"
        yield "  is_final: true\n" if k in final else ""
        yield _said("temporary_memory_size", temporary.get(k, 0))
        yield _said("persistent_memory_size", weights[k])
        yield _said("compute_cost", round(float(cost[k]))) + "}\n"


def _said(field: str, value: int) -> str:
    """A line for a number, or nothing: an absent number is 0."""
    return f"  {field}: {value}\n" if value else ""


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + escaped.replace("\n", "\\n").replace("\r", "\\r").replace("\t", "\\t") + '"'
