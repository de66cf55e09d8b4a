"""Several devices, run-time order: what has arrived and matters most goes next (semantics 4.3).

The loop is that of `schedule`, with a step per use and per op without uses; what waits is held in
trees of arrivals instead of a set of ready items.

Shapes: N ops, T tensors, U uses, D devices, P candidates.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from egx.simulate import arrivals, ready
from egx.simulate.execution_table import ExecutionTable, Transfers
from egx.simulate.indexing import pick, put, replace, take
from egx.simulate.lanes import Lanes, Network, Plans, Times, Trace, kept_times, note, trace_of
from egx.simulate.residency import peak_units


class _State(NamedTuple):
    """The loop's carry: the op in work, then what has become of everything. An op's entry of
    `arrived` turns into its place in the order when it is started."""

    row: Int[Array, " P"]
    source: Int[Array, " P"]
    finish: Float[Array, " P"]
    taken: Float[Array, " P"]
    missing: Int[Array, " _"]
    arrived: Float[Array, " _"]
    network: Network
    waiting: arrivals.Waiting
    times: Times


def run_runtime(
    table: ExecutionTable,
    plans: Plans,
    *,
    transfers: Transfers = "async",
    trace: bool = False,
    bounded: bool = False,
) -> tuple[Float[Array, " P"], Int[Array, "D P"], Trace | None]:
    """(makespan, peak units, trace) of each plan; without priorities first come, first served.

    `bounded` takes as many steps as any graph of this shape may need, which keeps the length of
    the loop free of batch axes; else it takes as many as this graph needs.
    """
    n, devices = table.num_ops, table.num_devices
    lanes = Lanes.of(table, plans)
    population, at = lanes.population, lanes.at
    if plans.priority is None:
        every = jnp.arange(n, dtype=jnp.int32)[:, None]
        order = jnp.broadcast_to(every, (n, population))
    else:
        order, _ = ready.order_and_rank(plans.priority)
    slots = arrivals.slots(order, lanes.on, devices)
    on = jnp.append(lanes.on, jnp.zeros((1, population), jnp.int32), 0).reshape(-1)
    missing = lanes.missing()

    def take_op(state: _State, wanted: Bool[Array, " P"]) -> _State:
        """Starts the next op of each candidate that has none in work."""
        clock, earliest = state.network.clock, state.waiting.earliest
        moments = jnp.maximum(clock, earliest)
        now, device = moments[0], jnp.zeros(population, jnp.int32)
        for d in range(1, devices):
            device = jnp.where(moments[d] < now, d, device)
            now = jnp.minimum(now, moments[d])
        found = wanted & (now < jnp.inf)
        by = now if plans.priority is not None else pick(earliest, device)
        op, waiting = arrivals.take_best(state.waiting, slots, device, by, found)
        op = jnp.where(found, op, n)
        entry = at(op)
        finish = now + lanes.op_s(op, device)
        times = note(state.times, "start_s", entry, now)
        times = note(times, "finish_s", entry, finish)
        clock = replace(clock, device, jnp.where(found, finish, pick(clock, device)))
        # Writing what depends on what was read is what lets XLA write in place.
        since = take(state.arrived, entry)
        return state._replace(
            row=jnp.where(wanted, take(table.first_row, op), state.row),
            source=jnp.where(wanted, device, state.source),
            finish=jnp.where(wanted, finish, state.finish),
            taken=state.taken + found.astype(jnp.float32),
            arrived=put(state.arrived, entry, jnp.where(found, state.taken, since)),
            network=state.network._replace(clock=clock),
            waiting=waiting,
            times=times,
        )

    def step(_: Array, state: _State) -> _State:
        """Sends one use of the op in work, and starts the next op after its last one."""
        row = lanes.read_row(state.row)
        entry = at(row.consumer)
        target = take(on, entry)
        arrival, network, times = lanes.send_once(
            state.network, row, state.source, target, state.finish, state.times, transfers=transfers
        )
        left = take(state.missing, entry) - 1
        arrival = jnp.maximum(take(state.arrived, entry), arrival)
        all_sent = jnp.where(left == 0, arrival, jnp.inf)
        state = state._replace(
            row=state.row + 1,
            missing=put(state.missing, entry, left),
            arrived=put(state.arrived, entry, arrival),
            network=network,
            waiting=arrivals.add(state.waiting, slots, row.consumer, target, all_sent),
            times=times,
        )
        return take_op(state, row.is_last)

    state = _State(
        row=jnp.full(population, table.idle_row, jnp.int32),
        source=jnp.zeros(population, jnp.int32),
        finish=jnp.zeros(population, jnp.float32),
        taken=jnp.zeros(population, jnp.float32),
        missing=missing.reshape(-1),
        arrived=lanes.empty(n + 1, 0.0),
        network=lanes.network(transfers),
        waiting=arrivals.waiting(slots, lanes.on, lanes.startable(missing)),
        times=kept_times(lanes) if trace else {},
    )
    steps = jnp.asarray(table.idle_row, jnp.int32) if bounded else table.num_rows
    state = jax.lax.fori_loop(0, steps + 1, step, state)

    place = state.arrived.reshape(n + 1, population)[:n].astype(jnp.int32)
    of_cluster = place if plans.root is None else jnp.take_along_axis(place, plans.root, 0)
    peak = peak_units(table, lanes.on, of_cluster, None, plans.root, places=n + 1)
    makespan = jnp.max(state.network.clock, 0)
    return makespan, peak, trace_of(lanes, state.times, place, None) if trace else None
