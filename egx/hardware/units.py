"""Quantities written with their units, such as "24 MiB", "680 GB/s", "1 us" or "48 TOPS"."""

from __future__ import annotations

import math
import re

_DECIMAL = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}
_BYTES = {f"{prefix}B": factor for prefix, factor in (_DECIMAL | _BINARY).items()}

UNITS: dict[str, dict[str, float]] = {
    "capacity": _BYTES,
    "bandwidth": {f"{unit}/s": factor for unit, factor in _BYTES.items()},
    "time": {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9},
    # A multiply-add counts two operations, as in a graph's FLOPs.
    "rate": {
        f"{prefix}{unit}": factor * operations
        for prefix, factor in _DECIMAL.items()
        for unit, operations in (
            *(("OPS", 1), ("OP/s", 1), ("FLOPS", 1), ("FLOP/s", 1)),
            *(("MACS", 2), ("MAC/s", 2)),
        )
    },
}

EXAMPLES = {
    "capacity": "24 MiB",
    "bandwidth": "680 GB/s",
    "time": "1 us",
    "rate": "48 TOPS",
}

_QUANTITY = re.compile(r"\s*([+-]?(?:\d+\.?\d*(?:[eE][+-]?\d+)?|\.\d+|inf|nan))\s*(\S+)\s*")


def parse_quantity(text: str, kind: str) -> float:
    """The value in bytes, bytes a second, seconds or operations a second.

    Raises:
        ValueError: for anything but a number with a unit of that kind, and for NaN.
    """
    match = _QUANTITY.fullmatch(text)
    if match is None:
        raise ValueError("not a number with a unit")
    number, unit = match.groups()
    if unit not in UNITS[kind]:
        raise ValueError(f"{unit!r} is not a unit of {kind}")
    value = float(number) * UNITS[kind][unit]
    if math.isnan(value):
        raise ValueError("not a number")
    return value
