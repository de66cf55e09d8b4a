"""A graph laid out for execution on several devices, and the small pieces that its loops share.

Each loop over items carries P candidates in lockstep. State that is indexed differently by each
candidate is a flat array, population innermost; state with a few rows is picked by comparison.

Shapes: N ops, T tensors, U uses, D devices, P candidates, R rows. A row is a step of an op: one
for each use of its outputs, in use order, and one for an op without uses.
"""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from egx.graph.graph import Graph
from egx.hardware.spec import Hardware

FEW_ROWS = 8


class ExecutionTable(eqx.Module):
    """What the loops read. Entry N of an op axis and U of a use axis stand for nothing: axes N1
    and U1 are one longer. Link `source * D + target` is an entry of the axis DD."""

    op_seconds: Float[Array, "N1 D"]
    compute_s: Float[Array, "N D"]
    first_row: Int[Array, " N1"]
    row_use: Int[Array, " R1"]
    row_is_last: Bool[Array, " R1"]
    num_rows: Int[Array, ""]
    use_consumer: Int[Array, " U1"]
    use_tensor: Int[Array, " U1"]
    use_bytes: Float[Array, " U1"]
    use_producer: Int[Array, " U1"]
    use_mask: Bool[Array, " U"]
    by_tensor: Int[Array, " U"]
    inputs: Int[Array, " N1"]
    tensor_producer: Int[Array, " T"]
    tensor_units: Int[Array, " T"]
    tensor_is_output: Bool[Array, " T"]
    output_units: Int[Array, " N"]
    weight_units: Int[Array, " N"]
    op_mask: Bool[Array, " N"]
    unit_bytes: Float[Array, ""]
    link_bytes_per_s: Float[Array, " DD"]
    link_latency_s: Float[Array, " DD"]
    read_bytes_per_s: Float[Array, " D"]
    write_bytes_per_s: Float[Array, " D"]
    launch_s: Float[Array, " D"]

    @property
    def num_ops(self) -> int:
        return self.op_mask.shape[-1]

    @property
    def num_tensors(self) -> int:
        return self.tensor_units.shape[-1]

    @property
    def num_uses(self) -> int:
        return self.use_mask.shape[-1]

    @property
    def num_devices(self) -> int:
        return self.launch_s.shape[-1]


def execution_table(
    graph: Graph, hardware: Hardware, op_seconds: Float[Array, "N D"] | None = None
) -> ExecutionTable:
    """Lays `graph` out for `hardware`; `op_seconds` replaces the roofline."""
    n, u, d = graph.num_ops, graph.num_uses, hardware.num_devices
    unit = graph.unit_bytes.astype(jnp.float32)
    real = graph.use_mask.astype(jnp.int32)
    producer = jnp.where(graph.use_mask, graph.use_producer(), n - 1)

    # Rows: the uses by producer, then by index; an op without uses has a row of its own.
    out_uses = jax.ops.segment_sum(real, producer, n)
    rows = jnp.where(graph.op_mask, jnp.maximum(out_uses, 1), 0)
    end = jnp.cumsum(rows)
    first = end - rows
    by_producer = jnp.argsort(jnp.where(graph.use_mask, producer, n), stable=True)
    before = jnp.cumsum(out_uses) - out_uses
    sorted_producer = producer[by_producer]
    row = first[sorted_producer] + jnp.arange(u) - before[sorted_producer]
    row = jnp.where(graph.use_mask[by_producer], row, n + u + 1)
    last = jnp.where(graph.op_mask, end - 1, n + u + 1)
    row_use = (
        jnp.full(n + u + 1, u, jnp.int32).at[row].set(by_producer.astype(jnp.int32), mode="drop")
    )
    row_is_last = jnp.zeros(n + u + 1, bool).at[last].set(True, mode="drop").at[n + u].set(True)

    compute = (graph.flops / hardware.flops_per_s[:, graph.op_class]).T
    if op_seconds is None:
        seconds = roofline_s(
            compute.T,
            graph.weight_units + distinct_input_units(graph),
            graph.output_units(),
            unit,
            hardware.read_bytes_per_s[:, 0, None],
            hardware.write_bytes_per_s[:, 0, None],
            hardware.launch_s[:, None],
        ).T
    else:
        seconds = op_seconds
    seconds = jnp.where(graph.op_mask[:, None], seconds, 0.0)
    off_diagonal = ~jnp.eye(d, dtype=bool)
    tensor_bytes = graph.tensor_units.astype(jnp.float32) * unit
    tensor = jnp.where(graph.use_mask, graph.use_tensor, graph.num_tensors)
    return ExecutionTable(
        op_seconds=jnp.concatenate([seconds, jnp.zeros((1, d), jnp.float32)]),
        compute_s=compute,
        first_row=jnp.append(first, n + u).astype(jnp.int32),
        row_use=row_use,
        row_is_last=row_is_last,
        num_rows=jnp.sum(rows).astype(jnp.int32),
        use_consumer=jnp.append(jnp.where(graph.use_mask, graph.use_consumer, n), n),
        use_tensor=jnp.append(tensor, graph.num_tensors),
        use_bytes=jnp.append(jnp.append(tensor_bytes, 0.0)[tensor], 0.0),
        use_producer=jnp.append(jnp.where(graph.use_mask, producer, n), n),
        use_mask=graph.use_mask,
        by_tensor=jnp.argsort(tensor, stable=True).astype(jnp.int32),
        # The last entry never comes down to 0, so nothing is never ready.
        inputs=jnp.append(
            jax.ops.segment_sum(real, graph.use_consumer, n, indices_are_sorted=True),
            jnp.int32(2**30),
        ),
        tensor_producer=graph.tensor_producer,
        tensor_units=graph.tensor_units,
        tensor_is_output=graph.tensor_is_output,
        output_units=graph.output_units(),
        weight_units=graph.weight_units,
        op_mask=graph.op_mask,
        unit_bytes=unit,
        # A device never sends to itself; whatever stands there must not become NaN.
        link_bytes_per_s=jnp.where(off_diagonal, hardware.link_bytes_per_s, 1.0).reshape(-1),
        link_latency_s=jnp.where(off_diagonal, hardware.link_latency_s, 0.0).reshape(-1),
        read_bytes_per_s=hardware.read_bytes_per_s[:, 0],
        write_bytes_per_s=hardware.write_bytes_per_s[:, 0],
        launch_s=hardware.launch_s,
    )


def roofline_s(
    compute_s: Array,
    read_units: Array,
    write_units: Array,
    unit_bytes: Array,
    read_bytes_per_s: Array,
    write_bytes_per_s: Array,
    launch_s: Array,
) -> Array:
    """Seconds of an op: the larger of compute and traffic with level 0, and the launch."""
    read = read_units.astype(jnp.float32) * unit_bytes / read_bytes_per_s
    write = write_units.astype(jnp.float32) * unit_bytes / write_bytes_per_s
    return jnp.maximum(compute_s, read + write) + launch_s


def distinct_input_units(graph: Graph) -> Int[Array, " N"]:
    """Units that each op reads when every distinct input tensor counts once."""
    if graph.num_uses == 0:
        return jnp.zeros(graph.num_ops, jnp.int32)
    tensor = jnp.where(graph.use_mask, graph.use_tensor, -1)
    order = jnp.lexsort((tensor, graph.use_consumer))
    t, c = tensor[order], graph.use_consumer[order]
    fresh = jnp.ones(graph.num_uses, bool).at[1:].set((t[1:] != t[:-1]) | (c[1:] != c[:-1]))
    units = jnp.where(fresh & (t >= 0), graph.tensor_units[t], 0)
    return jax.ops.segment_sum(units, c, graph.num_ops, indices_are_sorted=True)


def take(values: Array, index: Int[Array, " P"]) -> Array:
    """Entries of a flat array; the caller promises that they exist."""
    return values.at[index].get(mode="promise_in_bounds")


def put(values: Array, index: Int[Array, " P"], new: Array) -> Array:
    """A flat array with one entry per candidate replaced."""
    return values.at[index].set(new, mode="promise_in_bounds", unique_indices=True)


def pick(rows: Array, index: Int[Array, " P"]) -> Array:
    """Row `index[p]` of column p of `rows` [K, P]: a chain of selects where rows are few."""
    count, population = rows.shape
    if count > FEW_ROWS:
        return take(rows.reshape(-1), index * population + jnp.arange(population))
    out = rows[0]
    for k in range(1, count):
        out = jnp.where(index == k, rows[k], out)
    return out


def replace(rows: Array, index: Int[Array, " P"], new: Array) -> Array:
    """`rows` [K, P] with entry `index[p]` of column p replaced."""
    count, population = rows.shape
    if count > FEW_ROWS:
        flat = put(rows.reshape(-1), index * population + jnp.arange(population), new)
        return flat.reshape(rows.shape)
    which = jnp.arange(count, dtype=jnp.int32)[:, None]
    return jnp.where(which == index, new, rows)
