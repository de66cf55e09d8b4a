"""Machines: the arrays that simulators read, and the TOML files that people write."""

from egx.hardware.machines import regal_hardware, with_devices
from egx.hardware.spec import Hardware
from egx.hardware.toml import Sourced, load, parse, presets, sources

__all__ = [
    "Hardware",
    "Sourced",
    "load",
    "parse",
    "presets",
    "regal_hardware",
    "sources",
    "with_devices",
]
