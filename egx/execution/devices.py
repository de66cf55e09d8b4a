"""The devices that plans run on, or that are measured."""

from __future__ import annotations

from typing import Any

import jax

from egx.errors import EgxError


def checked_devices(devices: Any, error: type[EgxError]) -> tuple[jax.Device, ...]:
    """JAX's devices, by default all of this process.

    Raises:
        error: for what is no sequence of them, naming it.
    """
    found = jax.devices() if devices is None else devices
    try:
        found = tuple(found)
    except TypeError:
        raise error(f"devices must be a list of JAX devices, got {devices!r}") from None
    for device in found:
        if not isinstance(device, jax.Device):
            raise error(f"devices must hold JAX devices, as jax.devices() does, got {device!r}")
    if not found:
        raise error("devices is empty; expected one JAX device or more")
    return found
