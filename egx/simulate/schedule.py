"""Several devices, static order: items are taken by priority, then timed (semantics 4.2).

One loop takes ops and times them with their transfers. Each step of a candidate takes an op if the
last one is done, then handles one use of its outputs. Steps add up to ops plus uses whatever the
order, so candidates with different orders stay in lockstep.

Shapes: N ops, T tensors, U uses, D devices, P candidates.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from egx.simulate import ready
from egx.simulate.execution_table import FIRST_ROW, SECONDS, ExecutionTable
from egx.simulate.indexing import pick, put, replace, take, take_row
from egx.simulate.lanes import Lanes, Network, Plans, Times, Trace, kept_times, note, trace_of
from egx.simulate.queued import run_queued
from egx.simulate.residency import peak_units


class _State(NamedTuple):
    """The loop's carry: the op in work, then what has become of everything. An op's entry of
    `arrived` turns into its place in the order when it is taken."""

    done: Bool[Array, " P"]
    row: Int[Array, " P"]
    source: Int[Array, " P"]
    finish: Float[Array, " P"]
    taken: Float[Array, " P"]
    missing: Int[Array, " _"]
    arrived: Float[Array, " _"]
    network: Network
    words: ready.Words
    times: Times


def run_static(
    table: ExecutionTable,
    plans: Plans,
    *,
    blocking: bool = False,
    trace: bool = False,
    bounded: bool = False,
) -> tuple[Float[Array, " P"], Int[Array, "D P"], Trace | None]:
    """(makespan, peak units, trace) of each plan.

    `bounded` takes as many steps as any graph of this shape may need, which keeps the length of
    the loop free of batch axes; else it takes as many as this graph needs.
    """
    queue = plans.transfer_priority
    if queue is not None:
        return run_queued(table, plans, queue, blocking=blocking, trace=trace, bounded=bounded)
    n = table.num_ops
    lanes = Lanes.of(table, plans)
    population, at = lanes.population, lanes.at

    order, rank = ready.order_and_rank(_priority(plans))
    by_rank = lanes.with_device(order, ready.reorder(lanes.on, order)).reshape(-1)
    known = jnp.append(
        lanes.with_device(rank, lanes.on), jnp.zeros((1, population), jnp.int32), 0
    ).reshape(-1)
    missing = lanes.missing()
    words = ready.pack(ready.reorder(lanes.startable(missing), order))

    def take_op(state: _State) -> _State:
        """Takes and runs the best ready op of each candidate that has none in work."""
        wanted = state.done
        best, found, words = ready.take_highest(state.words, wanted)
        op, device = lanes.split(take(by_rank, at(best)))
        op, device = jnp.where(found, op, n), jnp.where(found, device, 0)
        entry = at(op)
        numbers = take_row(table.ops, op)
        clock = state.network.clock
        free = pick(clock, device)
        since = take(state.arrived, entry)
        start = jnp.maximum(free, since)
        finish = start + lanes.op_s(op, numbers[:, SECONDS:], device)
        times = note(state.times, "start_s", entry, start)
        times = note(times, "finish_s", entry, finish)
        clock = replace(clock, device, jnp.where(found, finish, free))
        return state._replace(
            row=jnp.where(wanted, numbers[:, FIRST_ROW], state.row),
            source=jnp.where(wanted, device, state.source),
            finish=jnp.where(wanted, finish, state.finish),
            taken=state.taken + found.astype(jnp.float32),
            # Writing what depends on what was read is what lets XLA write in place.
            arrived=put(state.arrived, entry, jnp.where(found, state.taken, since)),
            network=state.network._replace(clock=clock),
            words=words,
            times=times,
        )

    def handle_use(state: _State) -> _State:
        """Delivers one use of the op in work."""
        row = lanes.read_row(state.row)
        entry = at(row.consumer)
        rank, target = lanes.split(take(known, entry))
        arrival, network, times = lanes.send_once(
            state.network, row, state.source, target, state.finish, state.times, blocking=blocking
        )
        left = take(state.missing, entry) - 1
        arrival = jnp.maximum(take(state.arrived, entry), arrival)
        return state._replace(
            done=row.is_last,
            row=state.row + 1,
            missing=put(state.missing, entry, left),
            arrived=put(state.arrived, entry, arrival),
            network=network,
            words=ready.add(state.words, rank, left == 0),
            times=times,
        )

    none = jnp.zeros(population, jnp.int32)
    state = _State(
        done=jnp.ones(population, bool),
        row=none,
        source=none,
        finish=jnp.zeros(population, jnp.float32),
        taken=jnp.zeros(population, jnp.float32),
        missing=missing.reshape(-1),
        arrived=lanes.empty(n + 1, 0.0),
        network=lanes.network(),
        words=words,
        times=kept_times(lanes) if trace else {},
    )
    steps = jnp.asarray(table.idle_row, jnp.int32) if bounded else table.num_rows
    state = jax.lax.fori_loop(0, steps, lambda _, s: handle_use(take_op(s)), state)

    place = state.arrived.reshape(n + 1, population)[:n].astype(jnp.int32)
    of_cluster = place if plans.root is None else jnp.take_along_axis(place, plans.root, 0)
    peak = peak_units(table, lanes.on, of_cluster, None, plans.root, places=n + 1)
    makespan = jnp.max(state.network.clock, 0)
    return makespan, peak, trace_of(lanes, state.times, place, None) if trace else None


def _priority(plans: Plans) -> Float[Array, "N P"]:
    if plans.priority is None:
        return jnp.zeros(plans.device.shape, jnp.float32)
    return plans.priority
