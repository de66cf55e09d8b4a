"""A graph laid out for the loops that run it on several devices.

Shapes: N ops, T tensors, U uses, D devices, R rows. A row is a step of a loop: one for each use of
an op's outputs, in use order, and one for an op without uses. What a step reads stands in a flat
array for each thing: CPUs vectorise look-ups of single numbers, but not of whole rows.
"""

from __future__ import annotations

from typing import Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from egx.graph.graph import Graph
from egx.hardware.spec import Hardware

Transfers = Literal["async", "ports", "blocking"]
"""What a transfer holds while it lasts: its directed link; the sender's way out and the receiver's
way in; or both devices."""


def ways_of(transfers: Transfers, source: int, target: int) -> tuple[tuple[int, int], ...]:
    """What a transfer waits for, on the host: its link, or a way out (device, -1) and a way in
    (-1, device)."""
    return ((source, -1), (-1, target)) if transfers == "ports" else ((source, target),)


class Rows(eqx.Module):
    """What each step is about. `consumer` has two flags in its lowest bits: the first row of its
    tensor, the last row of its op. `sent` is where the transfers of its tensor are kept."""

    consumer: Int[Array, " R"]
    sent: Int[Array, " R"]
    bytes: Float[Array, " R"]
    use: Int[Array, " R"]


class ExecutionTable(eqx.Module):
    """What the loops read. Entry N of an op axis and U of a use axis stand for nothing: axes N1
    and U1 are one longer. Rows N + U + 1 + u repeat use u, for transfers that are items."""

    rows: Rows
    first_row: Int[Array, " N1"]
    seconds: Float[Array, "N1 D"]
    compute_s: Float[Array, "N D"]
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
    tensor_mask: Bool[Array, " T"]
    output_units: Int[Array, " N"]
    weight_units: Int[Array, " N"]
    op_mask: Bool[Array, " N"]
    unit_bytes: Float[Array, ""]
    link_bytes_per_s: Float[Array, "D D"]
    link_latency_s: Float[Array, "D D"]
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

    @property
    def op_seconds(self) -> Float[Array, "N D"]:
        return self.seconds[: self.num_ops]

    @property
    def idle_row(self) -> int:
        """The row in which nothing happens."""
        return self.num_ops + self.num_uses


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
    row_use = jnp.full(n + u + 1, u, jnp.int32)
    row_use = row_use.at[row].set(by_producer.astype(jnp.int32), mode="drop")
    row_is_last = jnp.zeros(n + u + 1, bool).at[last].set(True, mode="drop").at[n + u].set(True)
    row_use = jnp.append(row_use, jnp.arange(u + 1, dtype=jnp.int32))
    row_is_last = jnp.append(row_is_last, jnp.zeros(u + 1, bool))

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
    use_consumer = jnp.append(jnp.where(graph.use_mask, graph.use_consumer, n), n)
    use_tensor = jnp.append(tensor, graph.num_tensors)
    use_bytes = jnp.append(jnp.append(tensor_bytes, 0.0)[tensor], 0.0)
    first_use = jax.ops.segment_min(jnp.arange(u), tensor, graph.num_tensors + 1)
    row_is_first = row_use == first_use[use_tensor[row_use]]
    flags = (row_is_first.astype(jnp.int32) << 1) | row_is_last.astype(jnp.int32)
    if forgets_transfers(d):
        outputs = jax.ops.segment_sum(
            graph.tensor_mask.astype(jnp.int32), graph.tensor_producer, n, indices_are_sorted=True
        )
        before = (jnp.cumsum(outputs) - outputs)[graph.tensor_producer]
        sent = jnp.append(jnp.arange(graph.num_tensors) - before, 0)
    else:
        sent = jnp.arange(graph.num_tensors + 1) * elsewhere(d)
    return ExecutionTable(
        rows=Rows(
            consumer=(use_consumer[row_use] << 2) | flags,
            sent=sent.astype(jnp.int32)[use_tensor[row_use]],
            bytes=use_bytes[row_use],
            use=row_use,
        ),
        first_row=jnp.append(first, n + u).astype(jnp.int32),
        seconds=jnp.concatenate([seconds, jnp.zeros((1, d), jnp.float32)]),
        compute_s=compute,
        num_rows=jnp.sum(rows).astype(jnp.int32),
        use_consumer=use_consumer,
        use_tensor=use_tensor,
        use_bytes=use_bytes,
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
        tensor_mask=graph.tensor_mask,
        output_units=graph.output_units(),
        weight_units=graph.weight_units,
        op_mask=graph.op_mask,
        unit_bytes=unit,
        # A device never sends to itself; whatever stands there must not become NaN.
        link_bytes_per_s=jnp.where(off_diagonal, hardware.link_bytes_per_s, 1.0),
        link_latency_s=jnp.where(off_diagonal, hardware.link_latency_s, 0.0),
        read_bytes_per_s=hardware.read_bytes_per_s[:, 0],
        write_bytes_per_s=hardware.write_bytes_per_s[:, 0],
        launch_s=hardware.launch_s,
    )


def split_row(word: Int[Array, " P"]) -> tuple[Array, Array, Array]:
    """(consumer, is the first row of its tensor, is the last row of its op)."""
    return word >> 2, (word & 2) != 0, (word & 1) != 0


def forgets_transfers(devices: int) -> bool:
    """Whether only transfers of the op in work are kept, each in its tensor's place among the
    op's outputs. All uses of a tensor belong to one op, and with two devices its first use is
    where the one transfer that there may be is not known yet."""
    return devices <= 2


def elsewhere(devices: int) -> int:
    """How many devices a tensor can be sent to; at least 1, so that nothing is empty."""
    return max(devices - 1, 1)


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
