"""Populations spread over devices: the same bits on one device and on many."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, PartitionSpec

from egx.errors import SearchError

AXIS = "population"


def make_mesh(devices: int | Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh with one axis, `population`, over the given devices: a number, a list, or all.

    Raises:
        SearchError: if there are not that many devices.
    """
    available = jax.devices()
    if devices is None:
        devices = available
    if isinstance(devices, int):
        if not 1 <= devices <= len(available):
            raise SearchError(f"devices must be 1 to {len(available)}, got {devices}")
        devices = available[:devices]
    devices = list(devices)
    if not devices:
        raise SearchError("devices must not be empty")
    return jax.make_mesh((len(devices),), (AXIS,), axis_types=(AxisType.Auto,), devices=devices)


def population_map(
    function: Callable[[Any, Any], Any], mesh: Mesh | None
) -> Callable[[Any, Any], Any]:
    """`vmap` of `function(shared, member)` over members, spread over the mesh.

    The population is padded to a multiple of the devices with copies of its last member; padding
    is cut off again, so any population size works. `shared` is replicated. Traceable; with no
    mesh, or one device, it is plain `vmap`.
    """
    if mesh is None or mesh.size == 1:
        return jax.vmap(function, in_axes=(None, 0))
    spread = PartitionSpec(AXIS)

    def call(shared: Any, population: Any) -> Any:
        arrays, rest = eqx.partition(shared, eqx.is_array)

        def local(arrays: Any, members: Any) -> Any:
            return jax.vmap(lambda member: function(eqx.combine(arrays, rest), member))(members)

        # The loops inside simulators carry constants, which the check would refuse.
        mapped = jax.shard_map(
            local, mesh=mesh, in_specs=(PartitionSpec(), spread), out_specs=spread, check_vma=False
        )
        size = jax.tree.leaves(population)[0].shape[0]
        padding = -size % mesh.size
        if padding:
            population = jax.tree.map(
                lambda x: jnp.concatenate([x, jnp.repeat(x[-1:], padding, axis=0)]), population
            )
        out = mapped(arrays, population)
        return jax.tree.map(lambda x: x[:size], out) if padding else out

    return call
