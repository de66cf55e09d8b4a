"""Peak memory of each device along the order of items (semantics 4.2).

Nothing here is sequential but a running sum: a copy of a tensor is born at one place of the order
and dropped at another, both known once every item has its place.

Shapes: N ops, T tensors, U uses, D devices, P candidates; places are 0..L-1.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from egx.simulate.execution_table import ExecutionTable


def peak_units(
    table: ExecutionTable,
    device: Int[Array, "N P"],
    place: Int[Array, "N P"],
    transfer_place: Int[Array, "U P"] | None,
    root: Int[Array, "N P"] | None,
    *,
    places: int,
) -> Int[Array, "D P"]:
    """The peak of each device, resident weights included.

    `device` and `place` are those of each op's cluster. Without `transfer_place` a transfer has
    the place of its producer; with it, only naming uses have one, the others -1.
    """
    n, population = device.shape
    tensors, devices = table.num_tensors, table.num_devices
    lane = jnp.arange(population, dtype=jnp.int32)
    resident = jnp.stack(
        [
            jnp.sum(jnp.where(device == d, table.weight_units[:, None], 0), 0, dtype=jnp.int32)
            for d in range(devices)
        ]
    )
    if tensors == 0:
        return resident

    home = device[table.tensor_producer]
    born = place[table.tensor_producer]
    units = jnp.broadcast_to(table.tensor_units[:, None], (tensors, population))
    if root is not None:
        # The tensors inside a cluster vanish.
        visible = root[table.tensor_producer] == table.tensor_producer[:, None]
        units = jnp.where(visible, units, 0)

    by_tensor = table.by_tensor
    segment = jnp.minimum(table.use_tensor[by_tensor], tensors)
    real = table.use_mask[by_tensor][:, None]
    consumer = jnp.minimum(table.use_consumer[by_tensor], n - 1)
    used_at, used_on = place[consumer], device[consumer]

    def latest(values: Int[Array, "U P"]) -> Int[Array, "T P"]:
        found = jax.ops.segment_max(
            jnp.where(real, values, -1), segment, tensors + 1, indices_are_sorted=True
        )
        return jnp.maximum(found[:tensors], -1)

    sent_at = None if transfer_place is None else transfer_place[by_tensor]
    kept = born if sent_at is None else jnp.maximum(born, latest(sent_at))

    def one_device(d: Int[Array, ""], weights: Int[Array, " P"]) -> Int[Array, " P"]:
        here = used_on == d
        last_use = latest(jnp.where(here, used_at, -1))
        at_home = home == d
        arrived = born if sent_at is None else latest(jnp.where(here, sent_at, -1))
        held = table.tensor_is_output[:, None] & at_home
        exists = at_home | (last_use >= 0)
        start = jnp.where(at_home, born, arrived)
        stop = jnp.where(at_home, jnp.maximum(kept, last_use), last_use)
        size = jnp.where(exists, units, 0)

        # A copy is dropped before whatever is taken next, and so counts where it ends.
        live = jnp.zeros((places + 1) * population, jnp.int32)
        for at, change in ((start, size), (stop + 1, jnp.where(held, 0, -size))):
            flat = jnp.where(size > 0, at, 0) * population + lane
            live = live.at[flat.reshape(-1)].add(change.reshape(-1), mode="promise_in_bounds")

        def step(carry, change):
            live, peak = carry
            live = live + change
            return (live, jnp.maximum(peak, live)), None

        (_, peak), _ = jax.lax.scan(step, (weights, weights), live.reshape(-1, population))
        return peak

    if devices <= 4:
        return jnp.stack([one_device(jnp.int32(d), resident[d]) for d in range(devices)])
    each = jnp.arange(devices, dtype=jnp.int32)
    return jax.lax.map(lambda x: one_device(*x), (each, resident))
