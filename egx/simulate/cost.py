"""Seconds of single ops: what the simulators of memory have in common.

Every float here is one product or one quotient of inputs, never a product that is then added: a
compiler may fuse those two into one rounding or not, and results would depend on the program.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from egx.graph.graph import Graph
from egx.hardware.spec import Hardware


def compute_seconds(graph: Graph, hardware: Hardware, device: int = 0) -> Float[Array, " N"]:
    """FLOPs over the rate of the op's class; 0 for padding."""
    return graph.flops / hardware.flops_per_s[device][graph.op_class]


def read_seconds(
    units: Int[Array, " *X"], graph: Graph, hardware: Hardware, device: int = 0
) -> Float[Array, "*X M"]:
    """Seconds to read so many units from each level."""
    per_unit = graph.unit_bytes.astype(jnp.float32) / hardware.read_bytes_per_s[device]
    return units.astype(jnp.float32)[..., None] * per_unit


def write_seconds(
    units: Int[Array, " *X"], graph: Graph, hardware: Hardware, device: int = 0
) -> Float[Array, "*X M"]:
    """Seconds to write so many units to each level."""
    per_unit = graph.unit_bytes.astype(jnp.float32) / hardware.write_bytes_per_s[device]
    return units.astype(jnp.float32)[..., None] * per_unit


def use_units(graph: Graph) -> Int[Array, " U"]:
    """Units that each use reads; 0 for padding."""
    if graph.num_uses == 0:
        return jnp.zeros(0, jnp.int32)
    return jnp.where(graph.use_mask, graph.tensor_units[graph.use_tensor], 0)


def last_uses(graph: Graph) -> Bool[Array, " U"]:
    """The use at whose op a tensor can be dropped: its last one, unless it is a graph output."""
    if graph.num_uses == 0:
        return jnp.zeros(0, bool)
    index = jnp.arange(graph.num_uses)
    real = jnp.where(graph.use_mask, index, -1)
    last = jax.ops.segment_max(real, graph.use_tensor, graph.num_tensors)
    held = graph.tensor_is_output[graph.use_tensor]
    return (last[graph.use_tensor] == index) & graph.use_mask & ~held


def dead_units(graph: Graph) -> Int[Array, " N"]:
    """Units of each op's outputs that nothing uses and that are no graph outputs."""
    ones = graph.use_mask.astype(jnp.int32)
    used = jax.ops.segment_sum(ones, graph.use_tensor, graph.num_tensors) > 0
    dead = jnp.where(used | graph.tensor_is_output, 0, graph.tensor_units)
    return jax.ops.segment_sum(dead, graph.tensor_producer, graph.num_ops, indices_are_sorted=True)
