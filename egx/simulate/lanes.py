"""P candidates side by side: what the loops of both orders read and write for each of them.

Flat arrays are indexed by entry * P + candidate. Entry N of an op axis, U of a use axis and T of a
tensor axis stand for nothing: whoever has nothing to do reads and writes there.

A loop costs one small kernel for each look-up and each write, so what is needed together stands
together: a candidate's devices share a word with what else is looked up at an op.

Shapes: N ops, T tensors, U uses, D devices, P candidates.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from egx.simulate.execution_table import (
    ExecutionTable,
    Transfers,
    elsewhere,
    forgets_transfers,
    split_row,
)
from egx.simulate.indexing import pick, put, replace, take, take_few


class Plans(eqx.Module):
    """Candidates, population innermost; what is None is not decided.

    `root` is the cluster of each op, whose device and priority are the root's; `seconds` are a
    cluster's on its device. `order` lists the ops as they are taken, padding last, where that is
    known and need not follow from priorities.
    """

    device: Int[Array, "N P"]
    priority: Float[Array, "N P"] | None = None
    transfer_priority: Float[Array, "U P"] | None = None
    order: Int[Array, "N P"] | None = None
    root: Int[Array, "N P"] | None = None
    seconds: Float[Array, "N P"] | None = None


class Trace(eqx.Module):
    """Places in the order of items, seconds of start and end; transfers stand at the use that
    names them, -1 at the others. Without transfer priorities a transfer has no place of its own."""

    place: Int[Array, "N P"]
    start_s: Float[Array, "N P"]
    finish_s: Float[Array, "N P"]
    transfer_place: Int[Array, "U P"] | None
    transfer_start_s: Float[Array, "U P"]
    transfer_finish_s: Float[Array, "U P"]


Times = dict[str, Array]
"""The flat arrays that a run keeps; absent ones are not written."""


class Row(NamedTuple):
    """What a step is about: a use of the item in work, or nothing (consumer N, use U)."""

    consumer: Int[Array, " P"]
    is_first: Bool[Array, " P"]
    is_last: Bool[Array, " P"]
    sent: Int[Array, " P"]
    bytes: Float[Array, " P"]
    use: Int[Array, " P"]


class Network(NamedTuple):
    """Transfers so far: when each (tensor, device) was sent (-1: not yet), when links and
    devices are free. A device has L links to others; "ports" has its way out at K = device and
    its way in at K = D + device instead."""

    sent: Float[Array, " _"]
    link: Float[Array, "K P"]
    clock: Float[Array, "D P"]


@dataclasses.dataclass(frozen=True)
class Lanes:
    """Views of a table and P plans by flat index; `on` holds the device of each op's cluster."""

    table: ExecutionTable
    population: int
    on: Int[Array, "N P"]
    root: Int[Array, "N1 P"] | None
    flat_root: Int[Array, " _"] | None
    flat_seconds: Float[Array, " _"] | None
    bytes_per_s: Float[Array, " DL"]
    latency_s: Float[Array, " DL"]

    @classmethod
    def of(cls, table: ExecutionTable, plans: Plans) -> Lanes:
        on, root, n = plans.device, plans.root, table.num_ops
        if root is not None:
            on = jnp.take_along_axis(on, root, 0)
            root = padded(root, n)
        return cls(
            table,
            plans.device.shape[1],
            on,
            root,
            None if root is None else root.reshape(-1),
            None if plans.seconds is None else padded(plans.seconds, 0.0).reshape(-1),
            _links(table.link_bytes_per_s),
            _links(table.link_latency_s),
        )

    @property
    def device_bits(self) -> int:
        return max(1, (self.table.num_devices - 1).bit_length())

    def with_device(self, values: Int[Array, "*K P"], on: Int[Array, "*K P"]) -> Int[Array, "*K P"]:
        """Values and devices in one word each."""
        return (values << self.device_bits) | on

    def split(self, word: Int[Array, " P"]) -> tuple[Int[Array, " P"], Int[Array, " P"]]:
        """(value, device) of a word."""
        return word >> self.device_bits, word & ((1 << self.device_bits) - 1)

    def at(self, entry: Array) -> Array:
        """Flat index of `entry` [..., P]."""
        return entry * self.population + jnp.arange(self.population, dtype=jnp.int32)

    def empty(self, entries: int, fill: float, dtype: Any = jnp.float32) -> Array:
        return jnp.full(entries * self.population, fill, dtype)

    def read_row(self, row: Int[Array, " P"]) -> Row:
        rows = self.table.rows
        consumer, is_first, is_last = split_row(take(rows.consumer, row))
        if self.flat_root is not None:
            consumer = take(self.flat_root, self.at(consumer))
        return Row(
            consumer,
            is_first,
            is_last,
            take(rows.sent, row),
            take(rows.bytes, row),
            take(rows.use, row),
        )

    def op_s(self, op: Int[Array, " P"], device: Int[Array, " P"]) -> Float[Array, " P"]:
        """Seconds of an op or cluster on its device."""
        if self.flat_seconds is not None:
            return take(self.flat_seconds, self.at(op))
        return take(self.table.seconds.reshape(-1), op * self.table.num_devices + device)

    def network(self, transfers: Transfers) -> Network:
        table = self.table
        devices, population = table.num_devices, self.population
        links = 2 * devices if transfers == "ports" else devices * elsewhere(devices)
        return Network(
            sent=self.empty((table.num_tensors + 1) * elsewhere(devices), -1.0),
            link=jnp.zeros((links, population), jnp.float32),
            clock=jnp.zeros((devices, population), jnp.float32),
        )

    def sent(self, network: Network, row: Row, source: Array, target: Array) -> tuple[Array, Array]:
        """(flat index, when): a tensor's transfer from `source` to `target`, where they differ."""
        if forgets_transfers(self.table.num_devices):
            key = self.at(row.sent)
            return key, jnp.where(row.is_first, -1.0, take(network.sent, key))
        key = self.at(row.sent + other(source, target))
        return key, take(network.sent, key)

    def send(
        self,
        network: Network,
        num_bytes: Float[Array, " P"],
        source: Int[Array, " P"],
        target: Int[Array, " P"],
        ready_s: Float[Array, " P"],
        where: Bool[Array, " P"],
        *,
        transfers: Transfers,
    ) -> tuple[Array, Array, Network]:
        """(start, end, network): transfers that hold their directed link, or both devices, or the
        one device's way out and the other's way in."""
        others = elsewhere(self.table.num_devices)
        link = source if others == 1 else source * others + other(source, target)
        took = take_few(self.latency_s, link) + num_bytes / take_few(self.bytes_per_s, link)
        if transfers == "blocking":
            first, second = pick(network.clock, source), pick(network.clock, target)
            start = jnp.maximum(ready_s, jnp.maximum(first, second))
            end = start + took
            clock = replace(network.clock, source, jnp.where(where, end, first))
            clock = replace(clock, target, jnp.where(where, end, pick(clock, target)))
            return start, end, network._replace(clock=clock)
        if transfers == "ports":
            entry = self.table.num_devices + target
            out, into = pick(network.link, source), pick(network.link, entry)
            start = jnp.maximum(ready_s, jnp.maximum(out, into))
            end = start + took
            links = replace(network.link, source, jnp.where(where, end, out))
            links = replace(links, entry, jnp.where(where, end, into))
            return start, end, network._replace(link=links)
        free = pick(network.link, link)
        start = jnp.maximum(ready_s, free)
        end = start + took
        links = replace(network.link, link, jnp.where(where, end, free))
        return start, end, network._replace(link=links)

    def send_once(
        self,
        network: Network,
        row: Row,
        source: Int[Array, " P"],
        target: Int[Array, " P"],
        finish: Float[Array, " P"],
        times: Times,
        *,
        transfers: Transfers,
    ) -> tuple[Array, Network, Times]:
        """(arrival, network, times): a use's tensor at `target`, sent there if it was not yet."""
        remote = (target != source) & (row.consumer < self.table.num_ops)
        key, known = self.sent(network, row, source, target)
        names = remote & (known < 0)
        start, end, network = self.send(
            network, row.bytes, source, target, finish, names, transfers=transfers
        )
        known = jnp.where(names, end, known)
        if times:
            entry = self.at(jnp.where(names, row.use, self.table.num_uses))
            times = note(times, "transfer_start_s", entry, start)
            times = note(times, "transfer_finish_s", entry, end)
        network = network._replace(sent=put(network.sent, key, known))
        return jnp.where(remote, known, finish), network, times

    def missing(self) -> Int[Array, "N1 P"]:
        """Uses from other ops or clusters that each must wait for."""
        table, n = self.table, self.table.num_ops
        if self.root is None:
            return jnp.broadcast_to(table.inputs[:, None], (n + 1, self.population))
        consumer = self.root[table.use_consumer]
        # Only a root has uses outside its cluster.
        outside = self.root[table.use_producer] != consumer
        counts = self.empty(n + 1, 0, jnp.int32)
        counts = counts.at[self.at(consumer).reshape(-1)].add(
            outside.astype(jnp.int32).reshape(-1), mode="promise_in_bounds"
        )
        return counts.reshape(n + 1, self.population).at[n].set(table.inputs[n])

    def runs(self) -> Bool[Array, "N P"]:
        """Ops and roots; neither padding nor what runs as a part of its root."""
        real = jnp.broadcast_to(self.table.op_mask[:, None], self.on.shape)
        if self.root is not None:
            n = self.table.num_ops
            real = real & (self.root[:n] == jnp.arange(n, dtype=jnp.int32)[:, None])
        return real

    def startable(self, missing: Int[Array, "N1 P"]) -> Bool[Array, "N P"]:
        """Ops and roots that wait for nothing."""
        return (missing[: self.table.num_ops] == 0) & self.runs()


def other(source: Int[Array, " P"], target: Int[Array, " P"]) -> Int[Array, " P"]:
    """`target` among the devices that are not `source`; some other device where they are one."""
    return jnp.maximum(target - (target >= source).astype(jnp.int32), 0)


def _links(values: Float[Array, "D D"]) -> Float[Array, " DL"]:
    """The entries of links between different devices; one device has one that nobody uses."""
    devices = values.shape[0]
    if devices == 1:
        return values.reshape(-1)
    source, target = np.nonzero(~np.eye(devices, dtype=bool))
    return values[source, target]


def padded(rows: Array, fill: float) -> Array:
    """`rows` [K, P] with one more entry."""
    return jnp.append(rows, jnp.full((1, rows.shape[1]), fill, rows.dtype), 0)


def note(times: Times, name: str, index: Array, value: Array) -> Times:
    """`times` with one entry per candidate written, if that array is kept."""
    return {**times, name: put(times[name], index, value)} if name in times else times


def kept_times(lanes: Lanes) -> Times:
    """Empty arrays for a trace."""
    n, uses = lanes.table.num_ops, lanes.table.num_uses
    times = {name: lanes.empty(n + 1, 0.0) for name in ("start_s", "finish_s")}
    return times | {f"transfer_{x}_s": lanes.empty(uses + 1, -1.0) for x in ("start", "finish")}


def trace_of(
    lanes: Lanes, times: Times, place: Int[Array, "N P"], transfer_place: Int[Array, "U P"] | None
) -> Trace:
    n, uses = lanes.table.num_ops, lanes.table.num_uses

    def rows(name: str, length: int) -> Array:
        return times[name].reshape(-1, lanes.population)[:length]

    return Trace(
        place=place,
        start_s=rows("start_s", n),
        finish_s=rows("finish_s", n),
        transfer_place=transfer_place,
        transfer_start_s=rows("transfer_start_s", uses),
        transfer_finish_s=rows("transfer_finish_s", uses),
    )


def next_on_device(table: ExecutionTable, lanes: Lanes) -> Int[Array, " _"]:
    """For each use, the next use of its tensor on the same device; U for the last one. Flat."""
    uses, devices = table.num_uses, table.num_devices
    if uses == 0:
        return jnp.zeros(lanes.population, jnp.int32)
    on = padded(lanes.on, 0)
    nowhere = jnp.full((devices, lanes.population), uses, jnp.int32)

    def step(carry, k):
        after, last_tensor = carry
        use = table.by_tensor[uses - 1 - k]
        tensor, consumer = table.use_tensor[use], table.use_consumer[use]
        target = on[consumer]
        after = jnp.where(tensor == last_tensor, after, uses)
        found = pick(after, target)
        every = jnp.broadcast_to(use, (lanes.population,))
        return (replace(after, target, every), tensor), (use, found)

    start = (nowhere, jnp.int32(-1))
    _, (order, found) = jax.lax.scan(step, start, jnp.arange(uses, dtype=jnp.int32))
    out = jnp.full((uses + 1, lanes.population), uses, jnp.int32)
    return out.at[order].set(found, unique_indices=True).reshape(-1)
