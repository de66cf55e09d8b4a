"""Several devices, run-time order: what has arrived and matters most goes next (semantics 4.3).

The loop is that of `schedule`, with a step per use and per op without uses; what waits is held in
trees of arrivals instead of a set of ready items.

Shapes: N ops, T tensors, U uses, D devices, P candidates.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from egx.simulate import arrivals, ready
from egx.simulate.execution_table import ExecutionTable, pick, put, replace, take
from egx.simulate.lanes import Lanes, Plans, Times, Trace, note, over_link
from egx.simulate.residency import peak_units


class _State(NamedTuple):
    """The loop's carry: the op in work, then what has become of everything."""

    row: Int[Array, " P"]
    source: Int[Array, " P"]
    finish: Float[Array, " P"]
    taken: Int[Array, " P"]
    clock: Float[Array, "D P"]
    link: Float[Array, "DD P"]
    missing: Int[Array, " _"]
    arrived: Float[Array, " _"]
    sent: Float[Array, " _"]
    place: Int[Array, " _"]
    waiting: arrivals.Waiting
    times: Times


def run_runtime(
    table: ExecutionTable, plans: Plans, *, trace: bool = False, bounded: bool = False
) -> tuple[Float[Array, " P"], Int[Array, "D P"], Trace | None]:
    """(makespan, peak units, trace) of each plan; without priorities first come, first served.

    `bounded` takes as many steps as any graph of this shape may need, which keeps the length of
    the loop free of batch axes; else it takes as many as this graph needs.
    """
    n, uses, devices = table.num_ops, table.num_uses, table.num_devices
    lanes = Lanes.of(table, plans)
    population, at = lanes.population, lanes.at
    if plans.priority is None:
        every = jnp.arange(n, dtype=jnp.int32)[:, None]
        order = jnp.broadcast_to(every, (n, population))
    else:
        order = ready.ranked(plans.priority.T).T
    slots = arrivals.slots(order, lanes.on, devices)
    missing = lanes.missing()

    def handle_use(state: _State) -> tuple[_State, Array]:
        """Sends one use of the op in work; also says whether it was the op's last."""
        use = take(table.row_use, state.row)
        consumer = lanes.consumer(use)
        target = lanes.device(consumer)
        remote = (target != state.source) & (use < uses)
        key = at(take(table.use_tensor, use) * devices + target)
        known = take(state.sent, key)
        names = remote & (known < 0)
        link = state.source * devices + target
        took = lanes.transfer_s(use, link)
        start, end, links = over_link(state.link, link, state.finish, took, names)
        known = jnp.where(names, end, known)
        entry = at(jnp.where(names, use, uses))
        times = note(state.times, "transfer_start_s", entry, start)
        times = note(times, "transfer_finish_s", entry, end)
        entry = at(consumer)
        left = take(state.missing, entry) - 1
        arrival = jnp.where(remote, known, state.finish)
        arrival = jnp.maximum(take(state.arrived, entry), arrival)
        all_sent = jnp.where(left == 0, arrival, jnp.inf)
        last = take(table.row_is_last, state.row)
        state = state._replace(
            row=state.row + 1,
            link=links,
            missing=put(state.missing, entry, left),
            arrived=put(state.arrived, entry, arrival),
            sent=put(state.sent, key, known),
            waiting=arrivals.add(state.waiting, slots, consumer, target, all_sent),
            times=times,
        )
        return state, last

    def take_op(state: _State, wanted: Array) -> _State:
        """Starts the next op of each candidate that wants one."""
        earliest = state.waiting.earliest
        moments = jnp.maximum(state.clock, earliest)
        now, device = moments[0], jnp.zeros(population, jnp.int32)
        for d in range(1, devices):
            device = jnp.where(moments[d] < now, d, device)
            now = jnp.minimum(now, moments[d])
        found = wanted & (now < jnp.inf)
        by = now if plans.priority is not None else pick(earliest, device)
        op, waiting = arrivals.take_best(state.waiting, slots, device, by, found)
        op = jnp.where(found, op, n)
        finish = now + lanes.op_s(op, device)
        free = pick(state.clock, device)
        entry = at(op)
        times = note(state.times, "start_s", entry, now)
        times = note(times, "finish_s", entry, finish)
        return state._replace(
            row=jnp.where(wanted, take(table.first_row, op), state.row),
            source=jnp.where(wanted, device, state.source),
            finish=jnp.where(wanted, finish, state.finish),
            taken=state.taken + found.astype(jnp.int32),
            clock=replace(state.clock, device, jnp.where(found, finish, free)),
            place=put(state.place, entry, state.taken),
            waiting=waiting,
            times=times,
        )

    def step(_, state: _State) -> _State:
        state, last = handle_use(state)
        return take_op(state, last)

    none = jnp.zeros(population, jnp.int32)
    times: Times = {}
    if trace:
        times = {x: lanes.empty(n + 1, 0.0) for x in ("start_s", "finish_s")}
        times |= {f"transfer_{x}_s": lanes.empty(uses + 1, -1.0) for x in ("start", "finish")}
    state = _State(
        row=jnp.full_like(none, n + uses),
        source=none,
        finish=jnp.zeros(population, jnp.float32),
        taken=none,
        clock=jnp.zeros((devices, population), jnp.float32),
        link=jnp.zeros((devices * devices, population), jnp.float32),
        missing=missing.reshape(-1),
        arrived=lanes.empty(n + 1, 0.0),
        sent=lanes.empty((table.num_tensors + 1) * devices, -1.0),
        place=lanes.empty(n + 1, -1, jnp.int32),
        waiting=arrivals.waiting(slots, lanes.on, lanes.startable(missing)[:n]),
        times=times,
    )
    steps = jnp.asarray(n + uses + 1, jnp.int32) if bounded else table.num_rows + 1
    state = jax.lax.fori_loop(0, steps, step, state)

    place = state.place.reshape(n + 1, population)[:n]
    of_cluster = place if plans.root is None else jnp.take_along_axis(place, plans.root, 0)
    peak = peak_units(table, lanes.on, of_cluster, None, plans.root, places=n + 1)
    makespan = jnp.max(state.clock, 0)
    if not trace:
        return makespan, peak, None

    def kept(name: str, length: int) -> Array:
        return state.times[name].reshape(-1, population)[:length]

    return (
        makespan,
        peak,
        Trace(
            place=place,
            start_s=kept("start_s", n),
            finish_s=kept("finish_s", n),
            transfer_place=None,
            transfer_start_s=kept("transfer_start_s", uses),
            transfer_finish_s=kept("transfer_finish_s", uses),
        ),
    )
