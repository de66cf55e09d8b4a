"""A model as one JSON file: exact, readable, versioned, checked.

    {"format": "egx-model", "version": 1, "source": ..., "digest": ..., "unit_bytes": ...,
     "padded_to": [ops, tensors, uses], "notes": {...},
     "ops": [{"name", "type", "class", "flops", "weight_units", "geometry": {...}}, ...],
     "tensors": [{"name", "producer", "units", "output"}, ...], "uses": [[tensor, consumer], ...]}

Ops in a topological order, tensors by producer, uses by consumer; sizes are counts of
`unit_bytes`; geometry leaves out zeros. FLOPs and geometry are float32 and survive exactly. The
padding of the arrays is kept as its lengths.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from egx.errors import FormatError
from egx.graph.builder import op_type_id
from egx.graph.graph import (
    GEOMETRY,
    MAX_UNITS,
    OP_CLASSES,
    Graph,
    Model,
    graph_digest,
    real_sizes,
)

# A damaged number must not ask for all the memory there is.
MOST_PADDED = 2**24
FORMAT = "egx-model"
VERSION = 1


def save_json(model: Model, path: str | Path) -> None:
    """Writes a model; an earlier file at `path` survives any failure.

    Raises:
        FormatError: for notes that JSON cannot hold, op types or a digest that are not the
            graph's, or a file that cannot be written.
    """
    graph = model.graph
    ops, tensors, uses = real_sizes(graph)
    arrays = {name: np.asarray(value) for name, value in vars(graph).items()}
    if arrays["op_type"][:ops].tolist() != [op_type_id(kind) for kind in model.op_types]:
        raise FormatError(f"{path}: op_type of the graph does not belong to the model's op_types")
    if graph_digest(graph) != model.digest:
        raise FormatError(f"{path}: the model's digest is not that of its graph")
    document = {
        "format": FORMAT,
        "version": VERSION,
        "source": model.source,
        "digest": model.digest,
        "unit_bytes": int(graph.unit_bytes),
        "padded_to": [graph.num_ops, graph.num_tensors, graph.num_uses],
        "notes": model.notes,
        "ops": [_op(model, arrays, index) for index in range(ops)],
        "tensors": [
            {
                "name": model.tensor_names[index],
                "producer": int(arrays["tensor_producer"][index]),
                "units": int(arrays["tensor_units"][index]),
                "output": bool(arrays["tensor_is_output"][index]),
            }
            for index in range(tensors)
        ],
        "uses": np.stack([arrays["use_tensor"], arrays["use_consumer"]], -1)[:uses].tolist(),
    }
    _write(document, Path(path))


def _op(model: Model, arrays: dict[str, np.ndarray], index: int) -> dict[str, Any]:
    row = arrays["geometry"][index].tolist()
    return {
        "name": model.op_names[index],
        "type": model.op_types[index],
        "class": OP_CLASSES[arrays["op_class"][index]],
        "flops": float(arrays["flops"][index]),
        "weight_units": int(arrays["weight_units"][index]),
        "geometry": {key: value for key, value in zip(GEOMETRY, row, strict=True) if value},
    }


def _write(document: dict[str, Any], path: Path) -> None:
    """One op, tensor or use a line, through a temporary file beside the target."""
    lines = []
    for key, value in document.items():
        try:
            if isinstance(value, list) and key in ("ops", "tensors", "uses"):
                rows = ",\n".join("  " + json.dumps(row, allow_nan=False) for row in value)
                text = f"[\n{rows}\n ]" if value else "[]"
            else:
                text = json.dumps(value, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise FormatError(f"{path}: {key} cannot be written as JSON ({error})") from None
        lines.append(f' "{key}": {text}')
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
        os.replace(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise FormatError(f"{path}: cannot be written ({error.strerror or error})") from None


def load_json(path: str | Path) -> Model:
    """Reads what `save_json` wrote.

    Raises:
        FormatError: naming the file and the first field that is missing, foreign or impossible.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise FormatError(f"{path}: cannot be read ({error.strerror or error})") from None
    except UnicodeDecodeError as error:
        raise FormatError(f"{path}: not a JSON text file ({error})") from None
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path}: not JSON, or truncated ({error})") from None
    return _Reader(path, document).model()


class _Reader:
    """Checks a document field by field while it turns it into arrays."""

    def __init__(self, path: str | Path, document: Any):
        self.path = path
        if not isinstance(document, dict) or document.get("format") != FORMAT:
            found = document.get("format") if isinstance(document, dict) else document
            raise self.error("format", f'"{FORMAT}"', _short(found))
        self.document = document
        if document.get("version") != VERSION:
            raise self.error("version", f"{VERSION}", _short(document.get("version")))

    def error(self, field: str, expected: str, found: str) -> FormatError:
        """The error of a field."""
        return FormatError(f"{self.path}: {field}: expected {expected}, got {found}")

    def get(self, record: Any, field: str, kind: type, expected: str, prefix: str = "") -> Any:
        """An entry of the right type."""
        if not isinstance(record, dict):
            raise self.error(prefix.rstrip("."), "an object", _short(record))
        if field not in record:
            raise self.error(prefix + field, expected, "nothing: it is missing")
        value = record[field]
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise self.error(prefix + field, expected, _short(value))
        return value

    def count(self, record: Any, field: str, prefix: str, limit: int = MAX_UNITS) -> int:
        """An integer in 0..limit."""
        value: int = self.get(record, field, int, "an integer", prefix)
        if not 0 <= value <= limit:
            raise self.error(prefix + field, f"an integer in 0..{limit}", _short(value))
        return value

    def number(self, record: Any, field: str, prefix: str) -> float:
        """A finite float32 of 0 or more."""
        expected = "a finite number of 0 or more"
        value = record.get(field) if isinstance(record, dict) else None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(prefix + field, expected, _short(value))
        if not (0 <= value <= float(np.finfo(np.float32).max)) or not math.isfinite(value):
            raise self.error(prefix + field, expected, _short(value))
        return float(value)

    def model(self) -> Model:
        """The model, its digest verified."""
        top = self.document
        source = self.get(top, "source", str, "a string")
        digest = self.get(top, "digest", str, "a string")
        notes = self.get(top, "notes", dict, "an object")
        unit = self.count(top, "unit_bytes", "")
        if unit < 1 or unit & (unit - 1):
            raise self.error("unit_bytes", "a power of two", _short(unit))
        ops = self.get(top, "ops", list, "a list")
        tensors = self.get(top, "tensors", list, "a list")
        uses = self.get(top, "uses", list, "a list")
        if not ops:
            raise self.error("ops", "at least one op", "none")
        target = self.padding(len(ops), len(tensors), len(uses))
        op_columns = self.ops(ops)
        tensor_columns = self.tensors(tensors, len(ops))
        use_columns = self.uses(uses, tensor_columns["tensor_producer"], len(ops))
        total = sum(op_columns["weight_units"]) + sum(tensor_columns["tensor_units"])
        if total > MAX_UNITS:
            raise self.error("unit_bytes", f"sizes that add up to {MAX_UNITS} units", str(total))
        columns = {**op_columns, **tensor_columns, **use_columns}
        graph = _graph(columns, unit, (len(ops), len(tensors), len(uses)), target)
        if graph_digest(graph) != digest:
            raise self.error("digest", f"{graph_digest(graph)} (of the contents)", digest)
        return Model(
            graph=graph,
            op_names=tuple(op["name"] for op in ops),
            op_types=tuple(op["type"] for op in ops),
            tensor_names=tuple(tensor["name"] for tensor in tensors),
            source=source,
            digest=digest,
            notes=notes,
        )

    def padding(self, *real: int) -> tuple[int, int, int]:
        """Lengths of the padded axes."""
        padded = self.get(self.document, "padded_to", list, "a list of three integers")
        valid = len(padded) == 3 and all(type(n) is int for n in padded)
        if not valid or any(n < m or n > MOST_PADDED for n, m in zip(padded, real, strict=True)):
            expected = f"three integers of {list(real)} or more, and {MOST_PADDED} at most"
            raise self.error("padded_to", expected, _short(padded))
        return padded[0], padded[1], padded[2]

    def ops(self, records: list[Any]) -> dict[str, list[Any]]:
        """Columns of the op axis."""
        columns: dict[str, list[Any]] = {
            key: [] for key in ("op_class", "op_type", "flops", "weight_units", "geometry")
        }
        seen: set[str] = set()
        for index, record in enumerate(records):
            prefix = f"ops[{index}]."
            name = self.get(record, "name", str, "a string", prefix)
            if not name or name in seen:
                raise self.error(f"{prefix}name", "a name of its own", _short(name))
            seen.add(name)
            kind = self.get(record, "class", str, "a string", prefix)
            if kind not in OP_CLASSES:
                raise self.error(f"{prefix}class", f"one of {', '.join(OP_CLASSES)}", _short(kind))
            geometry = self.get(record, "geometry", dict, "an object", prefix)
            for key in geometry:
                if key not in GEOMETRY:
                    raise self.error(f"{prefix}geometry", f"keys of {GEOMETRY}", _short(key))
                self.number(geometry, key, f"{prefix}geometry.")
            columns["op_class"].append(OP_CLASSES.index(kind))
            columns["op_type"].append(op_type_id(self.get(record, "type", str, "a string", prefix)))
            columns["flops"].append(self.number(record, "flops", prefix))
            columns["weight_units"].append(self.count(record, "weight_units", prefix))
            columns["geometry"].append([geometry.get(key, 0.0) for key in GEOMETRY])
        return columns

    def tensors(self, records: list[Any], ops: int) -> dict[str, list[Any]]:
        """Columns of the tensor axis."""
        producers, units, outputs = [], [], []
        last = 0
        for index, record in enumerate(records):
            prefix = f"tensors[{index}]."
            self.get(record, "name", str, "a string", prefix)
            producer = self.count(record, "producer", prefix, ops - 1)
            if producer < last:
                raise self.error(f"{prefix}producer", f"{last} or more (sorted)", _short(producer))
            last = producer
            producers.append(producer)
            units.append(self.count(record, "units", prefix))
            outputs.append(self.get(record, "output", bool, "true or false", prefix))
        return {"tensor_producer": producers, "tensor_units": units, "tensor_is_output": outputs}

    def uses(self, records: list[Any], producers: list[int], ops: int) -> dict[str, list[Any]]:
        """Columns of the use axis."""
        last = 0
        for index, record in enumerate(records):
            pair = isinstance(record, list) and len(record) == 2
            if not pair or not all(type(n) is int for n in record):
                raise self.error(f"uses[{index}]", "[tensor, consumer]", _short(record))
            tensor, consumer = record
            if not 0 <= tensor < len(producers):
                expected = f"an integer in 0..{len(producers) - 1}"
                raise self.error(f"uses[{index}] tensor", expected, _short(tensor))
            if not max(last, producers[tensor] + 1) <= consumer < ops:
                expected = f"an op after op {producers[tensor]}, sorted, below {ops}"
                raise self.error(f"uses[{index}] consumer", expected, _short(consumer))
            last = consumer
        return {"use_tensor": [u[0] for u in records], "use_consumer": [u[1] for u in records]}


def _graph(
    columns: dict[str, list[Any]],
    unit: int,
    real: tuple[int, int, int],
    target: tuple[int, int, int],
) -> Graph:
    """Arrays padded as the builder pads: zeros, and indices on the last entry."""
    n, t, u = target
    length = {"tensor": t, "use": u}
    fill = {"tensor_producer": n - 1, "use_tensor": max(t - 1, 0), "use_consumer": n - 1}
    arrays = {}
    for name, values in columns.items():
        dtype = {"flops": np.float32, "geometry": np.float32, "tensor_is_output": bool}
        rows = length.get(name.split("_")[0], n)
        shape = (rows, len(GEOMETRY)) if name == "geometry" else (rows,)
        array = np.full(shape, fill.get(name, 0), dtype.get(name, np.int32))
        if values:
            array[: len(values)] = values
        arrays[name] = jnp.asarray(array)
    for name, rows, count in zip(("op", "tensor", "use"), target, real, strict=True):
        arrays[f"{name}_mask"] = jnp.asarray(np.arange(rows) < count)
    return Graph(unit_bytes=jnp.asarray(unit, jnp.int32), **arrays)


def _short(value: Any) -> str:
    """A value for a message, cut to a readable length."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
