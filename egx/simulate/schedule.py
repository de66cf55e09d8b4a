"""Several devices, static order: items are taken by priority, then timed (semantics 4.2).

One loop takes ops and times them with their transfers. Each step of a candidate takes an op if the
last one is done, then handles one use of its outputs. Steps add up to ops plus uses whatever the
order, so candidates with different orders stay in lockstep. Ops that are ready wait in a set from
which the best is taken; where the order is known, nothing has to wait.

Shapes: N ops, T tensors, U uses, D devices, P candidates.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from egx.simulate import ready
from egx.simulate.execution_table import ExecutionTable, Transfers
from egx.simulate.indexing import pick, put, replace, take
from egx.simulate.lanes import (
    Lanes,
    Network,
    Plans,
    Times,
    Trace,
    kept_times,
    note,
    padded,
    trace_of,
)
from egx.simulate.queued import run_queued
from egx.simulate.residency import peak_units


class _State(NamedTuple):
    """The loop's carry: the op in work, then what has become of everything. `row` is the row in
    work and the device that its op runs on, in one word. With a set of ready ops an op's entry of
    `arrived` turns into its place in the order when it is taken; `missing` and `words` are empty
    where the order is known."""

    row: Int[Array, " P"]
    finish: Float[Array, " P"]
    taken: Int[Array, " P"]
    missing: Int[Array, " _"]
    arrived: Float[Array, " _"]
    network: Network
    words: ready.Words
    times: Times


def run_static(
    table: ExecutionTable,
    plans: Plans,
    *,
    transfers: Transfers = "async",
    trace: bool = False,
    bounded: bool = False,
) -> tuple[Float[Array, " P"], Int[Array, "D P"], Trace | None]:
    """(makespan, peak units, trace) of each plan.

    `bounded` takes as many steps as any graph of this shape may need, which keeps the length of
    the loop free of batch axes; else it takes as many as this graph needs.
    """
    queue = plans.transfer_priority
    if queue is not None:
        return run_queued(table, plans, queue, transfers=transfers, trace=trace, bounded=bounded)
    n = table.num_ops
    lanes = Lanes.of(table, plans)
    population, at = lanes.population, lanes.at
    missing = lanes.missing()

    known = plans.order
    if known is None and plans.priority is None:
        # Of equal ops the first ready one is the first one: they stand in a topological order.
        known = jnp.broadcast_to(jnp.arange(n, dtype=jnp.int32)[:, None], lanes.on.shape)
    if known is None:
        assert plans.priority is not None
        order, rank = ready.order_and_rank(plans.priority)
        words = ready.pack(ready.reorder(lanes.startable(missing), order))
        in_order = order
        of_op = lanes.with_device(rank, lanes.on)
    else:
        order, rank, words = known, ready.inverse(known), ()
        of_op = lanes.on
        # Padding, and what runs as a part of its root, has its turn and does nothing.
        if plans.root is None:
            runs = (jnp.arange(n) < jnp.sum(table.op_mask))[:, None]
        else:
            runs = ready.reorder(lanes.runs(), order)
        in_order = jnp.where(runs, order, n)
    in_order = lanes.with_device(in_order, ready.reorder(lanes.on, order))
    in_order = padded(in_order, n << lanes.device_bits).reshape(-1)
    of_op = padded(of_op, 0).reshape(-1)

    def take_op(state: _State, wanted: Bool[Array, " P"]) -> _State:
        """Takes and runs the next op of each candidate that has none in work."""
        words = state.words
        if known is None:
            place, found, words = ready.take_highest(words, wanted)
            place = jnp.where(found, place, n)
        else:
            place = jnp.where(wanted, jnp.minimum(state.taken, n), n)
        op, device = lanes.split(take(in_order, at(place)))
        found = op < n
        entry = at(op)
        clock = state.network.clock
        free = pick(clock, device)
        since = take(state.arrived, entry)
        start = jnp.maximum(free, since)
        finish = start + lanes.op_s(op, device)
        times = note(state.times, "start_s", entry, start)
        times = note(times, "finish_s", entry, finish)
        clock = replace(clock, device, jnp.where(found, finish, free))
        arrived = state.arrived
        if known is None:
            # Writing what depends on what was read is what lets XLA write in place.
            arrived = put(arrived, entry, jnp.where(found, state.taken.astype(jnp.float32), since))
        return state._replace(
            row=jnp.where(wanted, lanes.with_device(take(table.first_row, op), device), state.row),
            finish=jnp.where(wanted, finish, state.finish),
            taken=state.taken + wanted.astype(jnp.int32),
            arrived=arrived,
            network=state.network._replace(clock=clock),
            words=words,
            times=times,
        )

    def step(_: Array, state: _State) -> _State:
        """Delivers one use of the op in work, and takes the next op after its last one."""
        index, source = lanes.split(state.row)
        row = lanes.read_row(index)
        entry = at(row.consumer)
        rank, target = lanes.split(take(of_op, entry))
        arrival, network, times = lanes.send_once(
            state.network, row, source, target, state.finish, state.times, transfers=transfers
        )
        arrival = jnp.maximum(take(state.arrived, entry), arrival)
        state = state._replace(
            row=state.row + (1 << lanes.device_bits),
            arrived=put(state.arrived, entry, arrival),
            network=network,
            times=times,
        )
        if known is None:
            left = take(state.missing, entry) - 1
            state = state._replace(
                missing=put(state.missing, entry, left),
                words=ready.add(state.words, rank, left == 0),
            )
        return take_op(state, row.is_last)

    none = jnp.zeros(population, jnp.int32)
    state = _State(
        row=jnp.full(population, table.idle_row << lanes.device_bits, jnp.int32),
        finish=jnp.zeros(population, jnp.float32),
        taken=none,
        missing=none if known is not None else missing.reshape(-1),
        arrived=lanes.empty(n + 1, 0.0),
        network=lanes.network(transfers),
        words=words,
        times=kept_times(lanes) if trace else {},
    )
    steps = jnp.asarray(table.idle_row, jnp.int32) if bounded else table.num_rows
    state = jax.lax.fori_loop(0, steps + 1, step, state)

    place = rank
    if known is None:
        place = state.arrived.reshape(n + 1, population)[:n].astype(jnp.int32)
    of_cluster = place if plans.root is None else jnp.take_along_axis(place, plans.root, 0)
    peak = peak_units(table, lanes.on, of_cluster, None, plans.root, places=n + 1)
    makespan = jnp.max(state.network.clock, 0)
    return makespan, peak, trace_of(lanes, state.times, place, None) if trace else None
