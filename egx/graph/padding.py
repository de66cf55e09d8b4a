"""Padding graphs to a few sizes, so that a corpus compiles a handful of times."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np

from egx.errors import GraphError
from egx.graph.graph import Graph, real_sizes

SMALLEST_BUCKET = 16


def bucket(size: int) -> int:
    """The smallest of 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, ... that is at least `size`.

    Four sizes an octave: above 16, less than a quarter of `size` is added.
    """
    if size <= SMALLEST_BUCKET:
        return SMALLEST_BUCKET
    step = 1 << max((size - 1).bit_length() - 3, 0)
    return -(-size // step) * step


def pad_graph(graph: Graph, sizes: tuple[int, int, int]) -> Graph:
    """The same graph padded to (ops, tensors, uses), whatever its padding was before.

    Entries of padding are masked, have size 0, and point at the last entry of the padded axis,
    so that sorted indices stay sorted. The graph must be concrete.

    Raises:
        GraphError: if an axis has more real entries than `sizes` allows.
    """
    real = real_sizes(graph)
    for axis, have, want in zip(("ops", "tensors", "uses"), real, sizes, strict=True):
        if want < have:
            raise GraphError(f"a graph of {have} {axis} cannot be padded to {want}")
    (ops, tensors, uses), (real_ops, real_tensors, real_uses) = sizes, real

    def pad(array: jax.Array, have: int, want: int, fill: int = 0) -> jax.Array:
        source = np.asarray(array)[:have]
        padded = np.full((want, *source.shape[1:]), fill, source.dtype)
        padded[:have] = source
        return jax.device_put(padded)

    last_tensor = max(tensors - 1, 0)
    return Graph(
        op_class=pad(graph.op_class, real_ops, ops),
        op_type=pad(graph.op_type, real_ops, ops),
        flops=pad(graph.flops, real_ops, ops),
        weight_units=pad(graph.weight_units, real_ops, ops),
        geometry=pad(graph.geometry, real_ops, ops),
        op_mask=pad(graph.op_mask, real_ops, ops),
        tensor_producer=pad(graph.tensor_producer, real_tensors, tensors, ops - 1),
        tensor_units=pad(graph.tensor_units, real_tensors, tensors),
        tensor_is_output=pad(graph.tensor_is_output, real_tensors, tensors),
        tensor_mask=pad(graph.tensor_mask, real_tensors, tensors),
        use_tensor=pad(graph.use_tensor, real_uses, uses, last_tensor),
        use_consumer=pad(graph.use_consumer, real_uses, uses, ops - 1),
        use_mask=pad(graph.use_mask, real_uses, uses),
        unit_bytes=graph.unit_bytes,
    )


def bucket_sizes(*graphs: Graph) -> tuple[int, int, int]:
    """The smallest buckets (ops, tensors, uses) that hold each of the graphs."""
    ops, tensors, uses = (max(axis) for axis in zip(*map(real_sizes, graphs), strict=True))
    return bucket(ops), bucket(tensors), bucket(uses)


def pad_to_bucket(graph: Graph) -> Graph:
    """The graph padded to the bucket of each of its axes."""
    return pad_graph(graph, bucket_sizes(graph))


def stack_graphs(graphs: Sequence[Graph]) -> Graph:
    """One graph with a leading batch axis, for `vmap`: all are padded to their common buckets.

    Raises:
        GraphError: if there are no graphs.
    """
    if not graphs:
        raise GraphError("stack_graphs needs at least one graph, got none")
    sizes = bucket_sizes(*graphs)
    padded = [pad_graph(graph, sizes) for graph in graphs]
    return jax.tree.map(lambda *leaves: jax.device_put(np.stack(leaves)), *padded)
