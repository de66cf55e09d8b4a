"""Many placements under one order of ops: static order, priorities shared, transfers async (4.2).

With one order every candidate works on the same op at the same step. Each step reads and writes
whole rows of P candidates, nothing is looked up per candidate, and memory is counted backwards: a
copy is met first at its last use, so no counter per copy is needed.

Each step writes what it worked out from rows that the step before it read after its own writes:
XLA repeats a read wherever its value is used, and an array that is read after a write from before
that write is copied whole.

Shapes: N ops, T tensors, U uses, D devices, P candidates, R steps, K uses read per step.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from egx.simulate import ready
from egx.simulate.execution_table import ExecutionTable, split_row
from egx.simulate.indexing import pick, put, take
from egx.simulate.lanes import padded

MOST_DEVICES = 8
READS = 2


def order_of(table: ExecutionTable, priority: Float[Array, " N"] | None) -> Int[Array, " N"]:
    """The order in which ops are taken, padding last."""
    n = table.num_ops
    if priority is None:
        # Of equal ops the first ready one is the first one: ops stand in a topological order.
        return jnp.arange(n, dtype=jnp.int32)
    # The same order twice: of a loop over one, XLA's CPU compiler copies all arrays in each step.
    twice = jnp.stack([priority, priority], 1)
    order, rank = ready.order_and_rank(twice)
    startable = (table.inputs[:n] == 0) & table.op_mask
    words = ready.pack(startable[order])
    order, rank = order.reshape(-1), padded(rank, 0).reshape(-1)
    both = jnp.arange(2, dtype=jnp.int32)
    nothing = jnp.full(2, n, jnp.int32)

    def step(_, state):
        words, row, done, missing, out, count = state
        best, found, words = ready.take_highest(words, done)
        op = jnp.where(found, take(order, best * 2 + both), nothing)
        out = put(out, jnp.where(found, count, nothing) * 2 + both, op)
        row = jnp.where(done, take(table.first_row, op), row)
        consumer, _, last = split_row(take(table.rows.consumer, row))
        entry = consumer * 2 + both
        left = take(missing, entry) - 1
        missing = put(missing, entry, left)
        words = ready.add(words, take(rank, entry), left == 0)
        return words, row + 1, last, missing, out, count + found.astype(jnp.int32)

    start = (
        words,
        jnp.zeros(2, jnp.int32),
        jnp.ones(2, bool),
        jnp.repeat(table.inputs, 2),
        jnp.repeat(jnp.arange(n + 1, dtype=jnp.int32), 2),
        jnp.zeros(2, jnp.int32),
    )
    out = jax.lax.fori_loop(0, table.num_rows, step, start)[4]
    # Padding was never taken: its entries hold their own index, behind all real ones.
    return out[::2][:n]


def run_one_order(
    table: ExecutionTable, device: Int[Array, "N P"], order: Int[Array, " N"]
) -> tuple[Float[Array, " P"], Int[Array, "D P"]]:
    """(makespan, peak units) of placements that share `order`."""
    peak, readers = _peak(table, device, order)
    return _makespan(table, device, order, readers), peak


def _spread(counts: Int[Array, " N"], order: Int[Array, " N"], length: int):
    """Steps of `counts` each, op after op in `order`: (op, index within the op, steps in all).

    Steps beyond the last one stay at the last op of `order`; nobody runs them.
    """
    per_op = counts[order]
    end = jnp.cumsum(per_op)
    place = jnp.repeat(jnp.arange(order.shape[0]), per_op, total_repeat_length=length)
    index = jnp.arange(length) - (end - per_op)[place]
    return order[place], index.astype(jnp.int32), end[-1].astype(jnp.int32)


def _starts(counts: Int[Array, " N"]) -> Int[Array, " N"]:
    return (jnp.cumsum(counts) - counts).astype(jnp.int32)


def _bit(device: Int[Array, " *P"]) -> Int[Array, " *P"]:
    return jnp.int32(1) << device


def _row(rows: Array, index: Int[Array, ""]) -> Array:
    return jax.lax.dynamic_index_in_dim(rows, index, 0, keepdims=False)


def _set_row(rows: Array, index: Int[Array, ""], new: Array) -> Array:
    return jax.lax.dynamic_update_index_in_dim(rows, new, index, 0)


class _TimeSteps(NamedTuple):
    """Steps of time. A step reads K inputs, then may run the op, then may send one tensor: to
    every device that needs it, or, where an op has several tensors to send, to that of one use."""

    op: Int[Array, " R"]
    tensor_in: Int[Array, "R K"]
    runs: Bool[Array, " R"]
    tensor_out: Int[Array, " R"]
    use: Int[Array, " R"]


def _time_steps(
    table: ExecutionTable, order: Int[Array, " N"]
) -> tuple[_TimeSteps, Int[Array, ""]]:
    n, uses, tensors = table.num_ops, table.num_uses, table.num_tensors
    real = table.use_mask.astype(jnp.int32)
    consumer, producer = table.use_consumer[:uses], table.use_producer[:uses]
    reads = jax.ops.segment_sum(real, jnp.minimum(consumer, n - 1), n)
    # An op that sends one tensor only sends it at once.
    first = jnp.full(n, tensors).at[producer].min(table.use_tensor[:uses], mode="drop")
    last = jnp.full(n, -1).at[producer].max(table.use_tensor[:uses], mode="drop")
    single = first >= last
    out_uses = jax.ops.segment_sum(real, jnp.minimum(producer, n - 1), n)
    sends = jnp.where(single, 1, out_uses)
    read_steps = jnp.maximum(1, -(-reads // READS))
    counts = jnp.where(table.op_mask, read_steps - 1 + sends, 0)
    length = n + uses // READS + uses
    op, index, total = _spread(counts, order, length)

    slot = index[:, None] * READS + jnp.arange(READS)
    use_in = jnp.minimum(_starts(reads)[op][:, None] + slot, uses)
    tensor_in = jnp.where(slot < reads[op][:, None], table.use_tensor[use_in], tensors)
    sent = index - (read_steps[op] - 1)
    by_producer = jnp.append(jnp.argsort(producer, stable=True), uses).astype(jnp.int32)
    use = by_producer[jnp.clip(_starts(out_uses)[op] + sent, 0, uses)]
    alone = single[op]
    tensor_out = jnp.where(
        alone, jnp.where(last[op] >= 0, first[op], tensors + 1), table.use_tensor[use]
    )
    steps = _TimeSteps(
        op=op,
        tensor_in=tensor_in.astype(jnp.int32),
        runs=sent == 0,
        tensor_out=jnp.where(sent >= 0, tensor_out, tensors + 1).astype(jnp.int32),
        use=jnp.where(alone | (sent < 0), uses, use),
    )
    return steps, total


def _makespan(
    table: ExecutionTable,
    device: Int[Array, "N P"],
    order: Int[Array, " N"],
    readers: Int[Array, "T2 P"],
) -> Float[Array, " P"]:
    """`readers` has a bit for each device that reads a tensor; rows T and T + 1 are no tensors,
    one to read and one to write."""
    devices, tensors = table.num_devices, table.num_tensors
    population = device.shape[1]
    steps, total = _time_steps(table, order)
    device = jnp.append(device, jnp.zeros((1, population), jnp.int32), 0)
    tensor_bytes = (
        jnp.append(table.tensor_units, jnp.zeros(2, jnp.int32)).astype(jnp.float32)
        * table.unit_bytes
    )
    seconds = table.op_seconds

    each = jnp.arange(devices, dtype=jnp.int32)[:, None]

    def look(arrived, r):
        """When the inputs of step r are on its device, and where its output has been sent."""
        source = _row(device, steps.op[r])
        since = [pick(_row(arrived, steps.tensor_in[r, k]), source) for k in range(READS)]
        return functools.reduce(jnp.maximum, since), _row(arrived, steps.tensor_out[r])

    def step(r, state):
        arrived, since, sent, waits, clock, link, finish = state
        op, tensor, runs = steps.op[r], steps.tensor_out[r], steps.runs[r]
        source = _row(device, op)
        waits = jnp.maximum(waits, since)
        ends = jnp.maximum(pick(clock, source), waits) + _choose(seconds[op], source)
        finish = jnp.where(runs, ends, finish)
        clock = jnp.where((each == source) & runs, finish, clock)
        waits = jnp.where(runs, 0.0, waits)

        reader = _bit(_row(device, table.use_consumer[steps.use[r]]))
        wanted = jnp.where(steps.use[r] < table.num_uses, reader, _row(readers, tensor))
        seconds_over = table.link_latency_s + tensor_bytes[tensor] / table.link_bytes_per_s
        # Every device at once, [D, P]; a stack of rows would not be vectorised.
        free, took = link[0], seconds_over[0][:, None]
        for d in range(1, devices):
            free = jnp.where(source == d, link[d], free)
            took = jnp.where(source == d, seconds_over[d][:, None], took)
        end = jnp.maximum(finish, free) + took
        goes = ((wanted >> each) & 1 == 1) & (each != source) & (sent < 0)
        link = jnp.where((each[:, None] == source) & goes, end, link)
        sent = jnp.where(each == source, finish, jnp.where(goes, end, sent))
        arrived = _set_row(arrived, tensor, sent)
        since, sent = look(arrived, jnp.minimum(r + 1, steps.op.shape[0] - 1))
        return arrived, since, sent, waits, clock, link, finish

    zeros = jnp.zeros(population, jnp.float32)
    arrived = jnp.full((tensors + 2, devices, population), -1.0, jnp.float32)
    clock = jnp.zeros((devices, population), jnp.float32)
    link = jnp.zeros((devices, devices, population), jnp.float32)
    state = (arrived, *look(arrived, jnp.int32(0)), zeros, clock, link, zeros)
    return jnp.max(jax.lax.fori_loop(0, total, step, state)[4], 0)


def _choose(values: Float[Array, " D"], device: Int[Array, " P"]) -> Float[Array, " P"]:
    """values[device], by comparison."""
    out = jnp.broadcast_to(values[0], device.shape)
    for d in range(1, values.shape[0]):
        out = jnp.where(device == d, values[d], out)
    return out


class _MemorySteps(NamedTuple):
    """Steps of memory, backwards. A step meets K inputs and one output; the last one of an op
    reads the peak."""

    op: Int[Array, " R"]
    tensor_in: Int[Array, "R K"]
    tensor_out: Int[Array, " R"]
    is_last: Bool[Array, " R"]


def _memory_steps(
    table: ExecutionTable, order: Int[Array, " N"]
) -> tuple[_MemorySteps, Int[Array, ""]]:
    n, uses, tensors = table.num_ops, table.num_uses, table.num_tensors
    reads = table.inputs[:n]
    real = table.tensor_mask.astype(jnp.int32)
    writes = jax.ops.segment_sum(real, table.tensor_producer, n, indices_are_sorted=True)
    counts = jnp.maximum(jnp.maximum(1, -(-reads // READS)), writes)
    counts = jnp.where(table.op_mask, counts, 0)
    op, index, total = _spread(counts, order[::-1], n + uses // READS + tensors)
    slot = index[:, None] * READS + jnp.arange(READS)
    use_in = jnp.minimum(_starts(reads)[op][:, None] + slot, uses)
    tensor_in = jnp.where(slot < reads[op][:, None], table.use_tensor[use_in], tensors)
    tensor_out = jnp.where(index < writes[op], _starts(writes)[op] + index, tensors + 1)
    steps = _MemorySteps(
        op=op,
        tensor_in=tensor_in.astype(jnp.int32),
        tensor_out=tensor_out.astype(jnp.int32),
        is_last=index == counts[op] - 1,
    )
    return steps, total


def _peak(
    table: ExecutionTable, device: Int[Array, "N P"], order: Int[Array, " N"]
) -> tuple[Int[Array, "D P"], Int[Array, "T2 P"]]:
    """(peak units, a bit for each device that reads a tensor)."""
    devices, population = table.num_devices, device.shape[1]
    steps, total = _memory_steps(table, order)
    units = jnp.append(table.tensor_units, jnp.zeros(2, jnp.int32))
    each = jnp.arange(devices, dtype=jnp.int32)[:, None]

    # From the end: weights, and the graph's outputs at home, where they are as if still read.
    home = device[table.tensor_producer]
    held = table.tensor_is_output[:, None]
    weights = [_sum_on(device, table.weight_units, d) for d in range(devices)]
    resident = jnp.stack(weights)
    outputs = jnp.where(table.tensor_is_output, table.tensor_units, 0)
    live = resident + jnp.stack([_sum_on(home, outputs, d) for d in range(devices)])
    readers = jnp.where(held, _bit(home), 0)
    readers = jnp.append(readers, jnp.zeros((2, population), jnp.int32), 0)

    def look(readers, r):
        """The readers met so far of the tensors of step r: inputs, then output."""
        tensors = [*(steps.tensor_in[r, k] for k in range(READS)), steps.tensor_out[r]]
        return tuple(_row(readers, tensor) for tensor in tensors)

    def step(r, state):
        readers, met, live, peak, dropped, born = state
        on = _row(device, steps.op[r])
        mine = _bit(on)
        for k in range(READS):
            tensor = steps.tensor_in[r, k]
            fresh = met[k] & mine == 0
            for j in range(k):
                fresh = fresh & (steps.tensor_in[r, j] != tensor)
            dropped = dropped + jnp.where(fresh, units[tensor], 0)
            readers = _set_row(readers, tensor, met[k] | mine)
        tensor, bits = steps.tensor_out[r], met[READS]
        dropped = dropped + jnp.where(bits & mine == 0, units[tensor], 0)
        born = born + (((bits | mine) >> each) & 1) * units[tensor]
        last = steps.is_last[r]
        full = live + jnp.where(each == on, dropped, 0)
        peak = jnp.where(last, jnp.maximum(peak, full), peak)
        live = jnp.where(last, full - born, live)
        met = look(readers, jnp.minimum(r + 1, steps.op.shape[0] - 1))
        return readers, met, live, peak, jnp.where(last, 0, dropped), jnp.where(last, 0, born)

    none = jnp.zeros(population, jnp.int32)
    met = look(readers, jnp.int32(0))
    state = (readers, met, live, resident, none, jnp.zeros((devices, population), jnp.int32))
    readers, _, _, peak, _, _ = jax.lax.fori_loop(0, total, step, state)
    return peak, readers


def _sum_on(device: Int[Array, "K P"], units: Int[Array, " K"], d: int) -> Int[Array, " P"]:
    return jnp.sum(jnp.where(device == d, units[:, None], 0), 0, dtype=jnp.int32)
