"""The computation graph as padded arrays, and the model that keeps its names on the host."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jraph
import numpy as np
from jaxtyping import Array, Bool, Float, Int

OP_CLASSES = ("elementwise", "shape", "reduction", "contraction", "opaque")
ELEMENTWISE, SHAPE, REDUCTION, CONTRACTION, OPAQUE = range(len(OP_CLASSES))

GEOMETRY = (
    "input_x",
    "input_y",
    "input_z",
    "output_x",
    "output_y",
    "output_z",
    "groups",
    "kernel_x",
    "kernel_y",
    "stride",
    "pad",
    "dilation",
    "batch",
)

MAX_UNITS = 2**31 - 1


class Graph(eqx.Module):
    """A computation graph of N ops, T tensors and U uses, padding included.

    Ops stand in a topological order, tensors by producer, uses by consumer; padding stands at
    the end of each axis with its mask False, its sizes 0 and its indices on the last entry, so
    that sorted index arrays stay sorted. Sizes are int32 counts of `unit_bytes`, a power of two.
    """

    op_class: Int[Array, " N"]
    op_type: Int[Array, " N"]
    flops: Float[Array, " N"]
    weight_units: Int[Array, " N"]
    geometry: Float[Array, "N G"]
    op_mask: Bool[Array, " N"]
    tensor_producer: Int[Array, " T"]
    tensor_units: Int[Array, " T"]
    tensor_is_output: Bool[Array, " T"]
    tensor_mask: Bool[Array, " T"]
    use_tensor: Int[Array, " U"]
    use_consumer: Int[Array, " U"]
    use_mask: Bool[Array, " U"]
    unit_bytes: Int[Array, ""]

    @property
    def num_ops(self) -> int:
        """N, padding included."""
        return self.op_class.shape[-1]

    @property
    def num_tensors(self) -> int:
        """T, padding included."""
        return self.tensor_producer.shape[-1]

    @property
    def num_uses(self) -> int:
        """U, padding included."""
        return self.use_tensor.shape[-1]

    def use_producer(self) -> Int[Array, " U"]:
        """The op that made the tensor of each use."""
        if self.num_tensors == 0:
            return jnp.zeros_like(self.use_tensor)
        return self.tensor_producer[self.use_tensor]

    def output_units(self) -> Int[Array, " N"]:
        """Units written by each op, all its outputs together."""
        return jax.ops.segment_sum(
            self.tensor_units, self.tensor_producer, self.num_ops, indices_are_sorted=True
        )

    def input_units(self) -> Int[Array, " N"]:
        """Units read by each op, once per use."""
        return jax.ops.segment_sum(
            self.use_units(), self.use_consumer, self.num_ops, indices_are_sorted=True
        )

    def use_units(self) -> Int[Array, " U"]:
        """Units that each use reads; 0 for padding."""
        if self.num_tensors == 0:
            return jnp.zeros_like(self.use_tensor)
        return jnp.where(self.use_mask, self.tensor_units[self.use_tensor], 0)

    def last_step(self) -> Int[Array, " T"]:
        """The last step at which each tensor is held: its last consumer's, the graph's last if it
        is an output, its producer's if nothing uses it."""
        consumer = jnp.where(self.use_mask, self.use_consumer, -1)
        last = jax.ops.segment_max(consumer, self.use_tensor, self.num_tensors)
        last = jnp.maximum(last, self.tensor_producer)
        return jnp.where(self.tensor_is_output, self.num_ops - 1, last)

    def to_jraph(self) -> jraph.GraphsTuple:
        """The graph with an edge per use (producer to consumer), masks among the features."""
        return jraph.GraphsTuple(
            nodes={
                "op_class": self.op_class,
                "op_type": self.op_type,
                "flops": self.flops,
                "weight_units": self.weight_units,
                "geometry": self.geometry,
                "mask": self.op_mask,
            },
            edges={
                "tensor": self.use_tensor,
                "units": self.use_units(),
                "mask": self.use_mask,
            },
            senders=self.use_producer(),
            receivers=self.use_consumer,
            n_node=jnp.array([self.num_ops], jnp.int32),
            n_edge=jnp.array([self.num_uses], jnp.int32),
            globals=None,
        )


def real_sizes(graph: Graph) -> tuple[int, int, int]:
    """(ops, tensors, uses) without padding, as Python ints; the graph must be concrete."""
    return (
        int(np.sum(np.asarray(graph.op_mask))),
        int(np.sum(np.asarray(graph.tensor_mask))),
        int(np.sum(np.asarray(graph.use_mask))),
    )


def graph_digest(graph: Graph) -> str:
    """SHA-256 over the real entries of every array: the same whatever the padding."""
    ops, tensors, uses = real_sizes(graph)
    length = {"op": ops, "tensor": tensors, "use": uses}
    digest = hashlib.sha256()
    for field in dataclasses.fields(graph):
        array = np.asarray(getattr(graph, field.name))
        axis = {"flops": "op", "weight_units": "op", "geometry": "op"}.get(
            field.name, field.name.split("_")[0]
        )
        if array.ndim:
            array = array[: length[axis]]
        digest.update(field.name.encode())
        digest.update(str(array.dtype).encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


@dataclasses.dataclass(frozen=True)
class Model:
    """A graph with what people call its parts; lives on the host, never inside a program."""

    graph: Graph
    op_names: tuple[str, ...]
    op_types: tuple[str, ...]
    tensor_names: tuple[str, ...]
    source: str
    digest: str
    notes: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def name(self) -> str:
        """The last part of `source`, for titles."""
        return self.source.rsplit("/", 1)[-1]

    def __repr__(self) -> str:
        ops, tensors, uses = real_sizes(self.graph)
        return f"Model({self.source!r}, {ops} ops, {tensors} tensors, {uses} uses)"
