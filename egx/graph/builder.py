"""Building graphs op by op on the host."""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from egx.errors import GraphError
from egx.graph.graph import GEOMETRY, MAX_UNITS, OP_CLASSES, Graph, Model, graph_digest

OP_TYPE_BUCKETS = 1024

# What float32 holds, in which graphs keep their numbers.
_LARGEST = float(np.finfo(np.float32).max)

_COLUMN = {key: column for column, key in enumerate(GEOMETRY)}

# Not id(): a new builder may get the address of one that is gone, and would take its handles.
_BUILDER_IDS = itertools.count()


class Tensor(NamedTuple):
    """A handle to a tensor of one builder."""

    builder: int
    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody needs here
    name: str


def op_type_id(op_type: str) -> int:
    """The id of an op type: a hash, so that models from anywhere share one vocabulary."""
    return zlib.crc32(op_type.lower().encode()) % OP_TYPE_BUCKETS


class GraphBuilder:
    """Collects ops in a topological order and builds a `Graph` or a `Model` from them.

    Nothing is pruned, merged or reordered: op index is the order of the `op` calls, tensor index
    follows producer and position in `output_bytes`, use index consumer and position in `inputs`.
    """

    def __init__(self, name: str):
        self.name = name
        self._id = next(_BUILDER_IDS)
        self._names: list[str] = []
        self._seen: set[str] = set()
        self._classes: list[int] = []
        self._types: list[str] = []
        self._flops: list[float] = []
        self._weight_bytes: list[int] = []
        self._geometry: list[list[float]] = []
        self._tensor_producer: list[int] = []
        self._tensor_bytes: list[int] = []
        self._tensor_names: list[str] = []
        self._outputs: set[int] = set()
        self._use_tensor: list[int] = []
        self._use_consumer: list[int] = []

    def __len__(self) -> int:
        return len(self._names)

    def op(
        self,
        name: str,
        *,
        kind: str,
        op_type: str,
        inputs: Sequence[Tensor],
        output_bytes: Sequence[float],
        flops: float,
        weight_bytes: float = 0,
        attributes: Mapping[str, float] | None = None,
        output_names: Sequence[str] | None = None,
    ) -> tuple[Tensor, ...]:
        """Appends an op and returns one handle per entry of `output_bytes`.

        Args:
            name: unique in this graph.
            kind: one of `OP_CLASSES`.
            op_type: any word for what the op does, such as "conv".
            inputs: handles from earlier calls; a tensor read twice is listed twice.
            output_bytes: size of each output, in bytes.
            flops: floating-point (or integer) operations; a multiply-add counts two.
            weight_bytes: bytes of constants that the op reads.
            attributes: entries of `GEOMETRY`; absent ones are 0.
            output_names: what plans call the outputs; by default after the op.

        Raises:
            GraphError: naming the op, the field and the value.
        """
        if not isinstance(name, str) or not name:
            raise GraphError(
                f"graph {self.name!r}: op name must be a non-empty string, got {name!r}"
            )
        if name in self._seen:
            raise GraphError(f"graph {self.name!r}: op {name!r} is already defined")
        if kind not in OP_CLASSES:
            raise GraphError(f"op {name!r}: kind {kind!r} is not one of {', '.join(OP_CLASSES)}")
        if isinstance(output_bytes, (int, float)):
            raise GraphError(
                f"op {name!r}: output_bytes must be a sequence with one size per output, "
                f"got {output_bytes!r}"
            )
        flops = self._number(name, "flops", flops)
        weight = self._bytes(name, "weight_bytes", weight_bytes)
        sizes = [self._bytes(name, f"output_bytes[{k}]", b) for k, b in enumerate(output_bytes)]
        if output_names is not None and len(output_names) != len(sizes):
            raise GraphError(
                f"op {name!r}: {len(output_names)} output_names for {len(sizes)} outputs"
            )
        geometry = self._attributes(name, attributes or {})
        indices = [self._index(name, tensor) for tensor in inputs]

        consumer = len(self._names)
        self._seen.add(name)
        self._names.append(name)
        self._classes.append(OP_CLASSES.index(kind))
        self._types.append(str(op_type))
        self._flops.append(flops)
        self._weight_bytes.append(weight)
        self._geometry.append(geometry)
        self._use_tensor.extend(indices)
        self._use_consumer.extend([consumer] * len(indices))
        handles = []
        for k, size in enumerate(sizes):
            if output_names is not None:
                label = output_names[k]
            else:
                label = name if len(sizes) == 1 else f"{name}:{k}"
            handles.append(Tensor(self._id, len(self._tensor_producer), label))
            self._tensor_producer.append(consumer)
            self._tensor_bytes.append(size)
            self._tensor_names.append(label)
        return tuple(handles)

    def output(self, tensor: Tensor) -> None:
        """Marks a tensor as a graph output: it is held to the end of the run."""
        self._outputs.add(self._index("graph output", tensor))

    def build(
        self,
        *,
        unit_bytes: int | None = None,
        pad_to: tuple[int, int, int] | None = None,
    ) -> Graph:
        """Builds the graph.

        Args:
            unit_bytes: a power of two; by default the smallest that lets all sizes add up in int32.
            pad_to: (ops, tensors, uses) to pad to; by default no padding.
        """
        if not self._names:
            raise GraphError(f"graph {self.name!r} is empty: add at least one op")
        sizes = [*self._weight_bytes, *self._tensor_bytes]
        if unit_bytes is None:
            unit, total = 1, sum(sizes)
            while total > unit * MAX_UNITS:
                unit *= 2
            # Sizes round up.
            while sum(-(-s // unit) for s in sizes) > MAX_UNITS:
                unit *= 2
            if unit > MAX_UNITS:
                raise GraphError(
                    f"graph {self.name!r}: its sizes add up to {sum(sizes):g} bytes; "
                    f"at most {float(MAX_UNITS) * 2**30:g} can be counted"
                )
        else:
            unit = int(unit_bytes)
            if not 1 <= unit <= 2**30 or unit & (unit - 1) or unit != unit_bytes:
                raise GraphError(
                    f"graph {self.name!r}: unit_bytes must be a power of two up to 2^30, "
                    f"got {unit_bytes!r}"
                )
            if sum(-(-s // unit) for s in sizes) > MAX_UNITS:
                raise GraphError(
                    f"graph {self.name!r}: its sizes in units of {unit} bytes add up to more than "
                    f"{MAX_UNITS}; use a larger unit_bytes"
                )
        real = (len(self._names), len(self._tensor_producer), len(self._use_tensor))
        target = real if pad_to is None else tuple(int(n) for n in pad_to)
        for axis, have, want in zip(("ops", "tensors", "uses"), real, target, strict=True):
            if want < have:
                raise GraphError(f"graph {self.name!r}: pad_to {want} {axis}, but it has {have}")
        n, t, u = target

        def pad(values: Any, length: int, dtype: Any, fill: Any = 0) -> np.ndarray:
            array = np.full((length, *np.shape(values)[1:]), fill, dtype)
            if len(values):
                array[: len(values)] = values
            return array

        def units(values: list[int]) -> list[int]:
            return [-(-v // unit) for v in values]

        is_output = np.zeros(t, bool)
        is_output[sorted(self._outputs)] = True
        geometry = np.asarray(self._geometry, np.float32).reshape(real[0], len(GEOMETRY))
        # Unlike jnp.asarray, this compiles no copying program for each new shape.
        put = jax.device_put
        return Graph(
            op_class=put(pad(self._classes, n, np.int32)),
            op_type=put(pad([op_type_id(k) for k in self._types], n, np.int32)),
            flops=put(pad(self._flops, n, np.float32)),
            weight_units=put(pad(units(self._weight_bytes), n, np.int32)),
            geometry=put(pad(geometry, n, np.float32)),
            op_mask=put(np.arange(n) < real[0]),
            tensor_producer=put(pad(self._tensor_producer, t, np.int32, n - 1)),
            tensor_units=put(pad(units(self._tensor_bytes), t, np.int32)),
            tensor_is_output=put(is_output),
            tensor_mask=put(np.arange(t) < real[1]),
            use_tensor=put(pad(self._use_tensor, u, np.int32, max(t - 1, 0))),
            use_consumer=put(pad(self._use_consumer, u, np.int32, n - 1)),
            use_mask=put(np.arange(u) < real[2]),
            unit_bytes=put(np.int32(unit)),
        )

    def build_model(
        self,
        *,
        unit_bytes: int | None = None,
        pad_to: tuple[int, int, int] | None = None,
        source: str | None = None,
        notes: dict[str, Any] | None = None,
    ) -> Model:
        """Builds the graph together with its names."""
        graph = self.build(unit_bytes=unit_bytes, pad_to=pad_to)
        return Model(
            graph=graph,
            op_names=tuple(self._names),
            op_types=tuple(self._types),
            tensor_names=tuple(self._tensor_names),
            source=source or self.name,
            digest=graph_digest(graph),
            notes=notes or {},
        )

    def _number(self, op: str, field: str, value: float) -> float:
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            raise GraphError(f"op {op!r}: {field} must be a number, got {value!r}") from None
        if not 0 <= number <= _LARGEST:
            raise GraphError(
                f"op {op!r}: {field} must be between 0 and {_LARGEST:g}, got {value!r}"
            )
        return number

    def _bytes(self, op: str, field: str, value: float) -> int:
        self._number(op, field, value)
        # int() first: a Python int beyond 2^53 would lose bytes as a float.
        return int(value) if int(value) == value else math.ceil(value)

    def _attributes(self, op: str, attributes: Mapping[str, float]) -> list[float]:
        row = [0.0] * len(GEOMETRY)
        for key, value in attributes.items():
            if key not in _COLUMN:
                unknown = sorted(set(attributes) - set(GEOMETRY))
                raise GraphError(
                    f"op {op!r}: unknown attributes {unknown}; known are {', '.join(GEOMETRY)}"
                )
            # Most are plain floats, and a large graph has a million of them.
            if type(value) is float and 0.0 <= value <= _LARGEST:
                row[_COLUMN[key]] = value
            else:
                row[_COLUMN[key]] = self._number(op, f"attributes[{key!r}]", value)
        return row

    def _index(self, op: str, tensor: Tensor) -> int:
        if not isinstance(tensor, Tensor) or tensor.builder != self._id:
            raise GraphError(
                f"op {op!r}: input {tensor!r} is not a tensor of graph {self.name!r}; "
                "pass the handles that `op` returned"
            )
        return tensor.index
