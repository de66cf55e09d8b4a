"""Several devices, static order: items are taken by priority, then timed (semantics 4.2).

One loop takes items and times them. Each step of a candidate handles one use of the item that it
took last, and takes the next item when that use was the last one. Steps add up to ops plus uses
whatever the order, so candidates with different orders stay in lockstep.

Shapes: N ops, T tensors, U uses, D devices, P candidates. Items: ops 0 to N - 1, N for nothing,
and N + 1 + u for the transfer that use u names.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from egx.simulate import ready
from egx.simulate.execution_table import ExecutionTable, pick, put, replace, take
from egx.simulate.lanes import (
    Lanes,
    Plans,
    Times,
    Trace,
    next_on_device,
    note,
    over_devices,
    over_link,
)
from egx.simulate.residency import peak_units


class _State(NamedTuple):
    """The loop's carry: the item in work, then what has become of everything."""

    row: Int[Array, " P"]
    use: Int[Array, " P"]
    sends: Bool[Array, " P"]
    source: Int[Array, " P"]
    finish: Float[Array, " P"]
    taken: Int[Array, " P"]
    clock: Float[Array, "D P"]
    link: Float[Array, "DD P"]
    missing: Int[Array, " _"]
    arrived: Float[Array, " _"]
    sent: Float[Array, " _"]
    place: Int[Array, " _"]
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
    n, uses, devices = table.num_ops, table.num_uses, table.num_devices
    lanes = Lanes.of(table, plans)
    population, at = lanes.population, lanes.at
    queued = plans.transfer_priority is not None
    items = n + 1 + (uses if queued else 0)

    order = _order(table, plans)
    rank = jnp.zeros(items * population, jnp.int32)
    by_rank = jnp.repeat(jnp.arange(items, dtype=jnp.int32), population)
    rank = put(rank, at(order).reshape(-1), by_rank)
    missing = lanes.missing()
    startable = lanes.startable(missing)
    if queued:
        startable = jnp.append(startable, jnp.zeros((uses, population), bool), 0)
    words = ready.pack(jnp.take_along_axis(startable, order, 0))
    order = order.reshape(-1)
    following = next_on_device(table, lanes) if queued else rank

    def send(state: _State, use, source, target, ready_s, where):
        link = source * devices + target
        took = lanes.transfer_s(use, link)
        if blocking:
            start, end, clock = over_devices(state.clock, source, target, ready_s, took, where)
            state = state._replace(clock=clock)
        else:
            start, end, links = over_link(state.link, link, ready_s, took, where)
            state = state._replace(link=links)
        entry = at(jnp.where(where, use, uses))
        times = note(state.times, "transfer_start_s", entry, start)
        times = note(times, "transfer_finish_s", entry, end)
        return end, state._replace(times=times)

    def handle_use(state: _State) -> tuple[_State, Array]:
        """Handles one use of the item in work; also says whether it was the item's last."""
        use = take(table.row_use, state.row)
        last = take(table.row_is_last, state.row)
        if queued:
            use = jnp.where(state.sends, state.use, use)
            after = take(following, at(use))
            last = jnp.where(state.sends, after == uses, last)
        consumer = lanes.consumer(use)
        target = lanes.device(consumer)
        remote = (target != state.source) & (use < uses)
        key = at(take(table.use_tensor, use) * devices + target)
        known = take(state.sent, key)
        names = remote & (known < 0)
        arrival = state.finish
        freed = consumer
        if queued:
            names = names & ~state.sends
            known = jnp.where(names, 0.0, known)
            # An op serves its local uses, the transfer serves those on its device.
            consumer = jnp.where(remote & ~state.sends, n, consumer)
            freed = jnp.where(names, n + 1 + use, consumer)
        else:
            end, state = send(state, use, state.source, target, state.finish, names)
            known = jnp.where(names, end, known)
            arrival = jnp.where(remote, known, arrival)
        entry = at(consumer)
        left = take(state.missing, entry) - 1
        is_ready = (left == 0) | names if queued else left == 0
        state = state._replace(
            row=state.row + 1,
            use=after if queued else state.use,
            missing=put(state.missing, entry, left),
            arrived=put(state.arrived, entry, jnp.maximum(take(state.arrived, entry), arrival)),
            sent=put(state.sent, key, known),
            words=ready.add(state.words, take(rank, at(freed)), is_ready),
        )
        return state, last

    def take_item(state: _State, wanted: Array) -> _State:
        """Takes and runs the best ready item of each candidate that wants one."""
        best, found, words = ready.take_highest(state.words, wanted)
        item = jnp.where(found, take(order, at(best)), n)
        sends = item > n
        op = item
        if queued:
            use = jnp.where(sends, item - (n + 1), uses)
            op = jnp.where(sends, take(table.use_producer, use), item)
        source = lanes.device(op)
        free = pick(state.clock, source)
        start = jnp.maximum(free, take(state.arrived, at(op)))
        finish = start + lanes.op_s(op, source)
        runs = found & ~sends
        state = state._replace(clock=replace(state.clock, source, jnp.where(runs, finish, free)))
        if queued:
            target = lanes.device(lanes.consumer(use))
            made = take(state.times["finish_s"], at(op))
            end, state = send(state, use, source, target, made, sends)
        entry = at(jnp.where(runs, op, n))
        times = note(state.times, "start_s", entry, start)
        times = note(times, "finish_s", entry, finish)
        if queued:
            finish = jnp.where(sends, end, finish)
        return state._replace(
            row=jnp.where(wanted, take(table.first_row, jnp.minimum(item, n)), state.row),
            use=jnp.where(wanted, use, state.use) if queued else state.use,
            sends=jnp.where(wanted, sends, state.sends),
            source=jnp.where(wanted, source, state.source),
            finish=jnp.where(wanted, finish, state.finish),
            taken=state.taken + found.astype(jnp.int32),
            place=put(state.place, at(item), state.taken),
            words=words,
            times=times,
        )

    def step(_, state: _State) -> _State:
        state, last = handle_use(state)
        return take_item(state, last)

    none = jnp.zeros(population, jnp.int32)
    times: Times = {}
    if trace or queued:
        times |= {"finish_s": lanes.empty(n + 1, 0.0)}
    if trace:
        times |= {"start_s": lanes.empty(n + 1, 0.0)}
        times |= {f"transfer_{x}_s": lanes.empty(uses + 1, -1.0) for x in ("start", "finish")}
    state = _State(
        row=jnp.full_like(none, n + uses),
        use=jnp.full_like(none, uses),
        sends=jnp.zeros(population, bool),
        source=none,
        finish=jnp.zeros(population, jnp.float32),
        taken=none,
        clock=jnp.zeros((devices, population), jnp.float32),
        link=jnp.zeros((devices * devices, population), jnp.float32),
        missing=missing.reshape(-1),
        arrived=lanes.empty(n + 1, 0.0),
        sent=lanes.empty((table.num_tensors + 1) * devices, -1.0),
        place=lanes.empty(items, -1, jnp.int32),
        words=words,
        times=times,
    )
    steps = _steps(table, lanes, queued=queued, bounded=bounded)
    state = jax.lax.fori_loop(0, steps, step, state)

    place = state.place.reshape(items, population)
    transfer_place = place[n + 1 :] if queued else None
    of_cluster = place[:n]
    if plans.root is not None:
        of_cluster = jnp.take_along_axis(of_cluster, plans.root, 0)
    peak = peak_units(table, lanes.on, of_cluster, transfer_place, plans.root, places=items)
    makespan = jnp.max(state.clock, 0)
    if not trace:
        return makespan, peak, None

    def kept(name: str, length: int) -> Array:
        return state.times[name].reshape(-1, population)[:length]

    return (
        makespan,
        peak,
        Trace(
            place=place[:n],
            start_s=kept("start_s", n),
            finish_s=kept("finish_s", n),
            transfer_place=transfer_place,
            transfer_start_s=kept("transfer_start_s", uses),
            transfer_finish_s=kept("transfer_finish_s", uses),
        ),
    )


def _order(table: ExecutionTable, plans: Plans) -> Int[Array, "K P"]:
    """Items by priority, highest first: ops before transfers, then lower index."""
    n, population = plans.device.shape
    priority = plans.priority
    if priority is None:
        priority = jnp.zeros((n, population), jnp.float32)
    parts = [priority, jnp.zeros((1, population), jnp.float32)]
    if plans.transfer_priority is not None:
        parts.append(plans.transfer_priority)
    return ready.ranked(jnp.concatenate(parts).T).T


def _steps(table: ExecutionTable, lanes: Lanes, *, queued: bool, bounded: bool) -> Int[Array, ""]:
    """One to take the first item, one a row, and with queued transfers one a remote use."""
    if bounded:
        longest = table.num_ops + (2 if queued else 1) * table.num_uses + 1
        return jnp.asarray(longest, jnp.int32)
    steps = table.num_rows + 1
    if queued:
        on = lanes.flat_on.reshape(-1, lanes.population)
        if lanes.flat_root is not None:
            root = lanes.flat_root.reshape(-1, lanes.population)
            consumer = jnp.take_along_axis(on, root[table.use_consumer], 0)
        else:
            consumer = on[table.use_consumer]
        remote = (consumer != on[table.use_producer]) & (table.use_consumer < table.num_ops)[
            :, None
        ]
        steps = steps + jnp.max(jnp.sum(remote, 0, dtype=jnp.int32))
    return steps
