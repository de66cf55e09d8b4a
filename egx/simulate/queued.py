"""Static order with transfer priorities: ops and transfers wait in one queue (semantics 4.2).

The loop is that of `schedule`, over items instead of ops: an op delivers its local uses and makes
its transfers ready; a transfer, when it is taken, delivers the uses on its device one after the
other.

Shapes: N ops, T tensors, U uses, D devices, P candidates. Items: ops 0 to N - 1, N for nothing,
and N + 1 + u for the transfer that use u names.
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
    next_on_device,
    note,
    padded,
    trace_of,
)
from egx.simulate.residency import peak_units


class _State(NamedTuple):
    """The loop's carry: the item in work, then what has become of everything. An op's entry of
    `arrived` turns into its finish when it is taken."""

    row: Int[Array, " P"]
    sends: Bool[Array, " P"]
    source: Int[Array, " P"]
    finish: Float[Array, " P"]
    taken: Int[Array, " P"]
    missing: Int[Array, " _"]
    arrived: Float[Array, " _"]
    place: Int[Array, " _"]
    network: Network
    words: ready.Words
    times: Times


def run_queued(
    table: ExecutionTable,
    plans: Plans,
    transfer_priority: Float[Array, "U P"],
    *,
    transfers: Transfers,
    trace: bool,
    bounded: bool,
) -> tuple[Float[Array, " P"], Int[Array, "D P"], Trace | None]:
    """(makespan, peak units, trace) of each plan, as `run_static` says."""
    n, uses = table.num_ops, table.num_uses
    lanes = Lanes.of(table, plans)
    population, at = lanes.population, lanes.at
    items = n + 1 + uses
    # Rows beyond the idle one are the uses by themselves: a transfer walks over those.
    use_rows = table.idle_row + 1

    # The device of an item is where it starts from: an op's, or the producer's.
    priority = plans.priority
    if priority is None:
        priority = jnp.zeros((n, population), jnp.float32)
    priority = jnp.concatenate([padded(priority, 0.0), transfer_priority])
    order, rank = ready.order_and_rank(priority)
    on = padded(lanes.on, 0)
    on_item = jnp.concatenate([on, on[table.use_producer[:uses]]])
    by_rank = lanes.with_device(order, ready.reorder(on_item, order)).reshape(-1)
    target_of = jnp.concatenate([on, _consumer_device(table, lanes, on)])
    known = lanes.with_device(rank, target_of).reshape(-1)
    missing = lanes.missing()
    startable = jnp.zeros((items, population), bool).at[:n].set(lanes.startable(missing))
    words = ready.pack(ready.reorder(startable, order))
    following = next_on_device(table, lanes)

    def take_item(state: _State, wanted: Bool[Array, " P"]) -> _State:
        """Takes and runs the best ready item of each candidate that has none in work."""
        best, found, words = ready.take_highest(state.words, wanted)
        item, source = lanes.split(take(by_rank, at(best)))
        item, source = jnp.where(found, item, n), jnp.where(found, source, 0)
        sends = item > n
        use = jnp.where(sends, item - (n + 1), uses)
        op = jnp.where(sends, take(table.use_producer, use), item)
        entry = at(op)
        clock = state.network.clock
        free = pick(clock, source)
        # An op's inputs have arrived, or, for a transfer, the producer has finished.
        since = take(state.arrived, entry)
        start = jnp.maximum(free, since)
        finish = start + lanes.op_s(op, source)
        runs = found & ~sends
        clock = replace(clock, source, jnp.where(runs, finish, free))
        _, target = lanes.split(take(known, at(item)))
        num_bytes = take(table.use_bytes, use)
        sent_start, sent, network = lanes.send(
            state.network._replace(clock=clock),
            num_bytes,
            source,
            target,
            since,
            sends,
            transfers=transfers,
        )
        times = state.times
        if trace:
            op_entry, use_entry = at(jnp.where(runs, op, n)), at(use)
            times = note(times, "start_s", op_entry, start)
            times = note(times, "finish_s", op_entry, finish)
            times = note(times, "transfer_start_s", use_entry, sent_start)
            times = note(times, "transfer_finish_s", use_entry, sent)
        first = jnp.where(sends, use_rows + use, take(table.first_row, op))
        return state._replace(
            row=jnp.where(wanted, first, state.row),
            sends=jnp.where(wanted, sends, state.sends),
            source=jnp.where(wanted, source, state.source),
            finish=jnp.where(wanted, jnp.where(sends, sent, finish), state.finish),
            taken=state.taken + found.astype(jnp.int32),
            arrived=put(state.arrived, entry, jnp.where(runs, finish, since)),
            place=put(state.place, at(item), state.taken),
            network=network,
            words=words,
            times=times,
        )

    def step(_: Array, state: _State) -> _State:
        """Delivers one use of the item in work, or makes the transfer that brings it ready; takes
        the next item after its last one."""
        row = lanes.read_row(state.row)
        after = take(following, at(row.use))
        last = jnp.where(state.sends, after == uses, row.is_last)
        rank, target = lanes.split(take(known, at(row.consumer)))
        remote = (target != state.source) & (row.consumer < n)
        key, queued = lanes.sent(state.network, row, state.source, target)
        names = remote & ~state.sends & (queued < 0)
        sent = put(state.network.sent, key, jnp.where(names, 0.0, queued))
        # A transfer has served a use when it delivers it; an op serves its local uses.
        entry = at(jnp.where(remote & ~state.sends, n, row.consumer))
        left = take(state.missing, entry) - 1
        since = take(state.arrived, entry)
        transfer_rank, _ = lanes.split(take(known, at(jnp.where(names, n + 1 + row.use, n))))
        freed = jnp.where(names, transfer_rank, rank)
        state = state._replace(
            row=jnp.where(state.sends, use_rows + after, state.row + 1),
            missing=put(state.missing, entry, left),
            arrived=put(state.arrived, entry, jnp.maximum(since, state.finish)),
            network=state.network._replace(sent=sent),
            words=ready.add(state.words, freed, (left == 0) | names),
            times=state.times,
        )
        return take_item(state, last)

    none = jnp.zeros(population, jnp.int32)
    state = _State(
        row=jnp.full(population, table.idle_row, jnp.int32),
        sends=jnp.zeros(population, bool),
        source=none,
        finish=jnp.zeros(population, jnp.float32),
        taken=none,
        missing=missing.reshape(-1),
        arrived=lanes.empty(n + 1, 0.0),
        place=lanes.empty(items, -1, jnp.int32),
        network=lanes.network(transfers),
        words=words,
        times=kept_times(lanes) if trace else {},
    )
    if bounded:
        steps = jnp.asarray(n + 2 * uses, jnp.int32)
    else:
        remote = target_of[n + 1 :] != on_item[n + 1 :]
        remote = remote & table.use_mask[:, None]
        steps = table.num_rows + jnp.max(jnp.sum(remote, 0, dtype=jnp.int32))
    state = jax.lax.fori_loop(0, steps + 1, step, state)

    place = state.place.reshape(items, population)
    transfer_place, place = place[n + 1 :], place[:n]
    of_cluster = place if plans.root is None else jnp.take_along_axis(place, plans.root, 0)
    peak = peak_units(table, lanes.on, of_cluster, transfer_place, plans.root, places=items)
    makespan = jnp.max(state.network.clock, 0)
    return makespan, peak, trace_of(lanes, state.times, place, transfer_place) if trace else None


def _consumer_device(
    table: ExecutionTable, lanes: Lanes, on: Int[Array, "N1 P"]
) -> Int[Array, "U P"]:
    """The device on which each use reads."""
    return on[table.use_consumer[: table.num_uses]]
