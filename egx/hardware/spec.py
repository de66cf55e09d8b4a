"""A machine as arrays: rates, capacities and links, every number a traced leaf."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from egx.errors import HardwareError
from egx.graph.graph import MAX_UNITS, OP_CLASSES
from egx.host import HostOnly

# A link for each pair of more would fill the memory of the machine that plans.
MOST_DEVICES = 4096


class Hardware(eqx.Module):
    """D devices with M memory levels each; level 0 is the largest and slowest.

    `level_bytes` stays a float64 NumPy array while it is concrete, since float32 counts bytes
    exactly only to 16 MiB; all other fields are float32 JAX arrays.
    """

    flops_per_s: Float[Array, "D C"]
    level_bytes: Float[Array | np.ndarray, "D M"]
    read_bytes_per_s: Float[Array, "D M"]
    write_bytes_per_s: Float[Array, "D M"]
    link_bytes_per_s: Float[Array, "D D"]
    link_latency_s: Float[Array, "D D"]
    launch_s: Float[Array, " D"]
    labels: HostOnly[dict[str, Any]] = eqx.field(static=True)

    def __init__(
        self,
        *,
        flops_per_s: Any,
        level_bytes: Any,
        read_bytes_per_s: Any,
        write_bytes_per_s: Any,
        link_bytes_per_s: Any,
        link_latency_s: Any,
        launch_s: Any,
        name: str = "hardware",
        level_names: Sequence[str] | None = None,
        device_names: Sequence[str] | None = None,
    ):
        fields = {
            "flops_per_s": flops_per_s,
            "level_bytes": level_bytes,
            "read_bytes_per_s": read_bytes_per_s,
            "write_bytes_per_s": write_bytes_per_s,
            "link_bytes_per_s": link_bytes_per_s,
            "link_latency_s": link_latency_s,
            "launch_s": launch_s,
        }
        shape = np.shape(level_bytes)
        if len(shape) != 2 or 0 in shape:
            raise HardwareError(f"level_bytes must be [devices, levels], got shape {shape}")
        devices, levels = shape
        expected = {
            "flops_per_s": (devices, len(OP_CLASSES)),
            "level_bytes": (devices, levels),
            "read_bytes_per_s": (devices, levels),
            "write_bytes_per_s": (devices, levels),
            "link_bytes_per_s": (devices, devices),
            "link_latency_s": (devices, devices),
            "launch_s": (devices,),
        }
        for field, value in fields.items():
            if np.shape(value) != expected[field]:
                raise HardwareError(
                    f"{field} must have shape {expected[field]} "
                    f"({devices} devices, {levels} levels), got {np.shape(value)}"
                )
            self._check_values(field, value)
        concrete = not isinstance(level_bytes, jax.core.Tracer)
        self.flops_per_s = jnp.asarray(flops_per_s, jnp.float32)
        self.level_bytes = (
            np.asarray(level_bytes, np.float64) if concrete else jnp.asarray(level_bytes)
        )
        self.read_bytes_per_s = jnp.asarray(read_bytes_per_s, jnp.float32)
        self.write_bytes_per_s = jnp.asarray(write_bytes_per_s, jnp.float32)
        self.link_bytes_per_s = jnp.asarray(link_bytes_per_s, jnp.float32)
        self.link_latency_s = jnp.asarray(link_latency_s, jnp.float32)
        self.launch_s = jnp.asarray(launch_s, jnp.float32)
        self.labels = HostOnly(
            {
                "name": name,
                "levels": tuple(level_names or (f"level {m}" for m in range(levels))),
                "devices": tuple(device_names or (f"device {d}" for d in range(devices))),
            }
        )

    @staticmethod
    def _check_values(field: str, value: Any) -> None:
        if isinstance(value, jax.core.Tracer):
            return
        array = np.asarray(value, np.float64)
        if np.isnan(array).any():
            raise HardwareError(f"{field} holds NaN: {array.tolist()}")
        # The diagonal of the links is never used; a zero there is the usual way to write it.
        if field == "link_bytes_per_s":
            array = array[~np.eye(len(array), dtype=bool)]
        positive = field.endswith("_per_s")
        if (array <= 0).any() if positive else (array < 0).any():
            wanted = "greater than 0" if positive else "0 or more"
            raise HardwareError(f"{field} must be {wanted}, got {np.asarray(value).tolist()}")
        if not field.endswith(("_per_s", "_bytes")) and np.isinf(array).any():
            raise HardwareError(f"{field} must be finite, got {np.asarray(value).tolist()}")

    @property
    def num_devices(self) -> int:
        return self.level_bytes.shape[0]

    @property
    def num_levels(self) -> int:
        return self.level_bytes.shape[1]

    @property
    def name(self) -> str:
        return self.labels.value["name"]

    @property
    def level_names(self) -> tuple[str, ...]:
        return self.labels.value["levels"]

    @property
    def device_names(self) -> tuple[str, ...]:
        return self.labels.value["devices"]

    def capacity_units(self, unit_bytes: Int[Array, ""]) -> Int[Array, "D M"]:
        """min(floor(level_bytes / unit_bytes), 2^31 - 1), exact while both are concrete."""
        traced = (jax.core.Tracer,)
        if isinstance(self.level_bytes, traced) or isinstance(unit_bytes, traced):
            units = jnp.floor(self.level_bytes / unit_bytes.astype(jnp.float32))
            # The largest float32 below 2^31: a larger one would not convert.
            return jnp.where(
                units >= 2.0**31, MAX_UNITS, jnp.minimum(units, 2.0**31 - 128).astype(jnp.int32)
            )
        exact = np.floor(np.asarray(self.level_bytes, np.float64) / float(unit_bytes))
        return jnp.asarray(np.minimum(exact, MAX_UNITS).astype(np.int32))
