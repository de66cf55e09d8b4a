"""A graph and a machine laid out for the loop of the memory simulator.

Shapes: N ops, U uses, M levels, K uses per step, L steps.
"""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from egx.graph.graph import Graph
from egx.hardware.spec import Hardware
from egx.simulate.cost import (
    compute_seconds,
    dead_units,
    last_uses,
    read_seconds,
    use_units,
    write_seconds,
)

USES_PER_STEP = 2


class MemoryTable(eqx.Module):
    """A graph laid out for the loop: an op takes a step, and one more for every K further uses.

    Its weights and outputs are placed on its first step, inputs are dropped as they are read, its
    seconds count on its last step. Only the first `steps` of L steps are used; L depends on the
    padded shape alone.
    """

    steps: Int[Array, ""]
    op: Int[Array, " L"]
    first_step: Int[Array, " N"]
    is_first: Bool[Array, " L"]
    is_last: Bool[Array, " L"]
    producer: Int[Array, "L K"]
    freed_units: Int[Array, "L K"]
    weight_units: Int[Array, " L"]
    output_units: Int[Array, " L"]
    dead_units: Int[Array, " L"]
    read_s: Float[Array, "L K M"]
    write_s: Float[Array, "L M"]
    weight_s: Float[Array, "L M"]
    streams: Bool[Array, " L"]
    compute_s: Float[Array, " L"]
    launch_s: Float[Array, " L"]
    capacity_units: Int[Array, " M"]
    total_units: Int[Array, ""]
    share_per_unit: Float[Array, ""]
    op_mask: Bool[Array, " N"]


def memory_table(graph: Graph, hardware: Hardware, capacity_units: Int[Array, " M"]) -> MemoryTable:
    """Lays `graph` out for device 0 of `hardware`.

    `capacity_units` comes from `Hardware.capacity_units`, which is exact only outside a trace.
    """
    n, u, k = graph.num_ops, graph.num_uses, USES_PER_STEP
    length = n + u // k
    ones = graph.use_mask.astype(jnp.int32)
    uses = jax.ops.segment_sum(ones, graph.use_consumer, n, indices_are_sorted=True)
    op_steps = jnp.where(graph.op_mask, jnp.maximum(1, -(-uses // k)), 0)
    end = jnp.cumsum(op_steps)
    first_step = end - op_steps
    ops = jnp.arange(n)

    def mark(steps: Int[Array, " N"]) -> Bool[Array, " L"]:
        steps = jnp.where(graph.op_mask, steps, length)
        return jnp.zeros(length, bool).at[steps].set(True, mode="drop")

    is_first, is_last = mark(first_step), mark(end - 1)
    op = jnp.zeros(length, jnp.int32)
    op = op.at[jnp.where(graph.op_mask, first_step, length)].set(ops, mode="drop")
    op = jax.lax.cummax(op)

    def at(flags: Bool[Array, " L"], values: Array) -> Array:
        rows = jnp.expand_dims(flags, tuple(range(1, values.ndim)))
        return jnp.where(rows, values[op], jnp.zeros((), values.dtype))

    # A use's place: its rank among the uses of its op, K to a step.
    rank = jnp.arange(u) - (jnp.cumsum(uses) - uses)[graph.use_consumer]
    row = jnp.where(graph.use_mask, first_step[graph.use_consumer] + rank // k, length)

    def place(values: Array) -> Array:
        empty = jnp.zeros((length, k, *values.shape[1:]), values.dtype)
        return empty.at[row, rank % k].set(values, mode="drop")

    units = use_units(graph)
    total = jnp.sum(graph.weight_units) + jnp.sum(graph.tensor_units)
    return MemoryTable(
        steps=end[-1],
        op=op,
        first_step=jnp.minimum(first_step, length - 1),
        is_first=is_first,
        is_last=is_last,
        producer=place(graph.use_producer()),
        freed_units=place(jnp.where(last_uses(graph), units, 0)),
        weight_units=at(is_first, graph.weight_units),
        output_units=at(is_first, graph.output_units()),
        dead_units=at(is_first, dead_units(graph)),
        read_s=place(read_seconds(units, graph, hardware)),
        write_s=at(is_last, write_seconds(graph.output_units(), graph, hardware)),
        weight_s=at(is_last, read_seconds(graph.weight_units, graph, hardware)),
        streams=at(is_last, graph.weight_units > 0),
        compute_s=at(is_last, compute_seconds(graph, hardware)),
        launch_s=jnp.where(is_last, hardware.launch_s[0], 0.0),
        capacity_units=capacity_units,
        total_units=total,
        share_per_unit=jnp.where(total > 0, 1.0 / jnp.maximum(total, 1).astype(jnp.float32), 0.0),
        op_mask=graph.op_mask,
    )
