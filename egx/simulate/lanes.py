"""P candidates side by side: what the loops of both orders read and write for each of them.

Flat arrays are indexed by entry * P + candidate. Entry N of an op axis and U of a use axis stand
for nothing: whoever has nothing to do reads and writes there.

Shapes: N ops, T tensors, U uses, D devices, P candidates.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from egx.simulate.execution_table import ExecutionTable, pick, put, replace, take


class Plans(eqx.Module):
    """Candidates, population innermost; what is None is not decided.

    `root` is the cluster of each op, whose device and priority are the root's; `seconds` are a
    cluster's on its device.
    """

    device: Int[Array, "N P"]
    priority: Float[Array, "N P"] | None = None
    transfer_priority: Float[Array, "U P"] | None = None
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


@dataclasses.dataclass(frozen=True)
class Lanes:
    """Views of a table and P plans by flat index."""

    table: ExecutionTable
    population: int
    on: Int[Array, "N P"]
    flat_on: Int[Array, " _"]
    flat_root: Int[Array, " _"] | None
    flat_seconds: Float[Array, " _"] | None

    @classmethod
    def of(cls, table: ExecutionTable, plans: Plans) -> Lanes:
        population = plans.device.shape[1]
        on = plans.device
        if plans.root is not None:
            on = jnp.take_along_axis(on, plans.root, 0)
        return cls(
            table,
            population,
            on,
            padded(on, 0),
            None if plans.root is None else padded(plans.root, table.num_ops),
            None if plans.seconds is None else padded(plans.seconds, 0.0),
        )

    def at(self, entry: Array) -> Array:
        """Flat index of `entry` [..., P]."""
        return entry * self.population + jnp.arange(self.population, dtype=jnp.int32)

    def empty(self, entries: int, fill: float, dtype: Any = jnp.float32) -> Array:
        return jnp.full(entries * self.population, fill, dtype)

    def consumer(self, use: Int[Array, " P"]) -> Int[Array, " P"]:
        """The op, or the cluster's root, that reads; N for no use."""
        consumer = take(self.table.use_consumer, use)
        return consumer if self.flat_root is None else take(self.flat_root, self.at(consumer))

    def device(self, op: Int[Array, " P"]) -> Int[Array, " P"]:
        return take(self.flat_on, self.at(op))

    def op_s(self, op: Int[Array, " P"], device: Int[Array, " P"]) -> Float[Array, " P"]:
        if self.flat_seconds is not None:
            return take(self.flat_seconds, self.at(op))
        table = self.table
        return take(table.op_seconds.reshape(-1), op * table.num_devices + device)

    def transfer_s(self, use: Int[Array, " P"], link: Int[Array, " P"]) -> Float[Array, " P"]:
        """Seconds over directed link source * D + target."""
        table = self.table
        seconds = take(table.use_bytes, use) / take(table.link_bytes_per_s, link)
        return take(table.link_latency_s, link) + seconds

    def missing(self) -> Int[Array, "N1 P"]:
        """Uses from other ops or clusters that each must wait for."""
        table = self.table
        if self.flat_root is None:
            return jnp.broadcast_to(table.inputs[:, None], (table.num_ops + 1, self.population))
        root = self.flat_root.reshape(-1, self.population)
        consumer = root[table.use_consumer]
        # Only a root has uses outside its cluster.
        outside = root[table.use_producer] != consumer
        counts = jnp.zeros((table.num_ops + 1) * self.population, jnp.int32)
        counts = counts.at[self.at(consumer).reshape(-1)].add(
            outside.astype(jnp.int32).reshape(-1), mode="promise_in_bounds"
        )
        return counts.reshape(-1, self.population).at[table.num_ops].set(table.inputs[-1])

    def startable(self, missing: Int[Array, "N1 P"]) -> Bool[Array, "N1 P"]:
        """Ops and roots that wait for nothing."""
        n = self.table.num_ops
        ready = (missing == 0) & jnp.append(self.table.op_mask, False)[:, None]
        if self.flat_root is not None:
            root = self.flat_root.reshape(-1, self.population)
            ready = ready & (root == jnp.arange(n + 1, dtype=jnp.int32)[:, None])
        return ready


def padded(rows: Array, fill: float) -> Array:
    """`rows` [K, P] flat, with one more entry."""
    return jnp.append(rows, jnp.full((1, rows.shape[1]), fill, rows.dtype), 0).reshape(-1)


def note(times: Times, name: str, index: Array, value: Array) -> Times:
    """`times` with one entry per candidate written, if that array is kept."""
    return {**times, name: put(times[name], index, value)} if name in times else times


def over_link(
    link: Float[Array, "DD P"],
    which: Int[Array, " P"],
    ready_s: Float[Array, " P"],
    took: Float[Array, " P"],
    where: Bool[Array, " P"],
) -> tuple[Array, Array, Array]:
    """(start, end, links) of a transfer that holds its directed link alone."""
    free = pick(link, which)
    start = jnp.maximum(ready_s, free)
    end = start + took
    return start, end, replace(link, which, jnp.where(where, end, free))


def over_devices(
    clock: Float[Array, "D P"],
    source: Int[Array, " P"],
    target: Int[Array, " P"],
    ready_s: Float[Array, " P"],
    took: Float[Array, " P"],
    where: Bool[Array, " P"],
) -> tuple[Array, Array, Array]:
    """(start, end, clocks) of a transfer that holds both devices."""
    first, second = pick(clock, source), pick(clock, target)
    start = jnp.maximum(ready_s, jnp.maximum(first, second))
    end = start + took
    clock = replace(clock, source, jnp.where(where, end, first))
    return start, end, replace(clock, target, jnp.where(where, end, second))


def next_on_device(table: ExecutionTable, lanes: Lanes) -> Int[Array, " _"]:
    """For each use, the next use of its tensor on the same device; U for the last one. Flat."""
    uses, devices = table.num_uses, table.num_devices
    nowhere = jnp.full((devices, lanes.population), uses, jnp.int32)

    def step(carry, k):
        use = table.by_tensor[uses - 1 - k]
        tensor = table.use_tensor[use]
        after, last_tensor = carry
        after = jnp.where(tensor == last_tensor, after, uses)
        everyone = jnp.broadcast_to(use, (lanes.population,))
        target = take(lanes.flat_on, lanes.at(lanes.consumer(everyone)))
        found = pick(after, target)
        return (replace(after, target, everyone), tensor), (use, found)

    start = (nowhere, jnp.int32(-1))
    _, (order, found) = jax.lax.scan(step, start, jnp.arange(uses, dtype=jnp.int32))
    out = jnp.full((uses + 1, lanes.population), uses, jnp.int32)
    return out.at[order].set(found, unique_indices=True).reshape(-1)
