"""Machines as TOML files, every number with its unit and its source.

    name = "nnpi"
    [[device]]                      # one table for each kind of device
    name = "card"
    count = 1                       # optional: identical copies, called card0, card1, ... (those
                                    # of a kind that ends in a digit p100-0, p100-1, ...)
    launch = { value = "1 us", source = "..." }
    [[device.level]]                # from the backing memory to the fastest
    name = "DRAM"
    capacity = "32 GiB"
    read = "67.2 GB/s"              # or `bandwidth`, for both directions
    write = "67.2 GB/s"
    source = "..."                  # for all numbers of its table that name no source themselves
    [device.rates]                  # one entry for each op class; `other` covers those not listed
    contraction = { rate = "48 TOPS", efficiency = 0.6, source = "..." }
    other = { rate = "0.7 TOPS", source = "..." }
    [[link]]                        # needed between devices only; later links override earlier
    from = "card"                   # a device, all copies of a kind, or "*"
    to = "card"
    both_ways = true                # the default
    bandwidth = "16 GB/s"           # "inf GB/s" for free transfers
    latency = "2 us"
    source = "..."

A number is a string with its unit, or an inline table with `value` and `source`. In the presets
each number must have a source; in other files sources are welcome but may be missing.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from egx.errors import HardwareError
from egx.graph.graph import OP_CLASSES
from egx.hardware.spec import MOST_DEVICES, Hardware
from egx.hardware.units import EXAMPLES, UNITS, parse_quantity

PRESETS = Path(__file__).parent / "presets"


@dataclasses.dataclass(frozen=True)
class Sourced:
    """A number as it was written, with the source that its file gives, or None."""

    text: str
    source: str | None


class _Table:
    """One table of a file; knows where it stands, and which of its keys were read."""

    def __init__(self, file: _File, where: str, content: Any):
        self.file = file
        self.where = where
        if not isinstance(content, dict):
            raise HardwareError(f"{file.label}: {where} must be a table, got {content!r}")
        self.content = content
        self.source = content.get("source")
        if "source" in content and (not isinstance(self.source, str) or not self.source.strip()):
            raise self.error("source", "a non-empty string")

    def error(self, key: str, expected: str) -> HardwareError:
        """The error for a key with a wrong value, or without one."""
        found = f"{key} = {self.content[key]!r}" if key in self.content else f"{key} is missing"
        return HardwareError(f"{self.file.label}: {self.where}: {found}; expected {expected}")

    def allow(self, *keys: str) -> None:
        """Refuses keys that are not listed."""
        for key in self.content:
            if key not in keys:
                close = difflib.get_close_matches(key, keys, n=1)
                hint = f" (did you mean {close[0]!r}?)" if close else ""
                raise HardwareError(
                    f"{self.file.label}: {self.where}: unknown key {key!r}{hint}; "
                    f"expected {', '.join(keys)}"
                )

    def text(self, key: str) -> str:
        value = self.content.get(key)
        if not isinstance(value, str) or not value:
            raise self.error(key, "a non-empty string")
        return value

    def tables(self, key: str, example: str) -> list[_Table]:
        """An array of at least one table."""
        value = self.content.get(key)
        if not isinstance(value, list) or not value:
            raise self.error(key, f"at least one {example} table")
        where = f"{self.where}, {key}" if self.where != "top level" else key
        return [_Table(self.file, f"{where} {k}", entry) for k, entry in enumerate(value)]

    def quantity(self, key: str, kind: str, *, zero: bool = False, infinite: bool = False) -> float:
        """A number with a unit of that kind."""
        text = self._value(key, f"a {kind} such as {EXAMPLES[kind]!r}")
        expected = f"a {kind} such as {EXAMPLES[kind]!r}"
        if not isinstance(text, str):
            raise self.error(key, f"{expected}, as a string with its unit")
        try:
            value = parse_quantity(text, kind)
        except ValueError as error:
            units = ", ".join(UNITS[kind])
            raise self.error(key, f"{expected} ({error}; units: {units})") from None
        if value < 0 or (value == 0 and not zero):
            raise self.error(key, f"a {kind} {'of 0 or more' if zero else 'greater than 0'}")
        if math.isinf(value) and not infinite:
            raise self.error(key, f"a finite {kind}")
        return value

    def fraction(self, key: str) -> float:
        """A plain number in (0, 1], or 1 if the key is absent."""
        if key not in self.content:
            return 1.0
        value = self._value(key, "a number in (0, 1]")
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 1:
            raise self.error(key, "a number in (0, 1]")
        return float(value)

    def _value(self, key: str, expected: str) -> Any:
        """The number of a key in either form, after its source was noted."""
        value = self.content.get(key)
        source = self.source
        if isinstance(value, dict):
            inner = _Table(self.file, f"{self.where}, {key}", value)
            inner.allow("value", "source")
            if "value" not in value:
                raise inner.error("value", expected)
            value, source = value["value"], inner.source or source
        if value is None:
            raise self.error(key, expected)
        if source is None and self.file.require_sources:
            raise HardwareError(
                f"{self.file.label}: {self.where}: {key} = {value!r} has no source; expected "
                "`source` beside it, or { value = ..., source = ... }"
            )
        self.file.sources[f"{self.where}: {key}"] = Sourced(str(value), source)
        return value


class _File:
    """The state of one reading."""

    def __init__(self, label: str, require_sources: bool):
        self.label = label
        self.require_sources = require_sources
        self.sources: dict[str, Sourced] = {}


@dataclasses.dataclass
class _Device:
    kind: str
    name: str
    levels: list[tuple[str, float, float, float]]
    rates: list[float]
    launch_s: float


def load(name_or_path: str | os.PathLike[str]) -> Hardware:
    """A machine: a preset by its name, or any file by its path (ending in .toml).

    Raises:
        HardwareError: naming the file, the table, the field, its value and what was expected.
    """
    return _load(name_or_path)[0]


def sources(name_or_path: str | os.PathLike[str]) -> dict[str, Sourced]:
    """Every number of a machine's file as it was written, with its source."""
    return _load(name_or_path)[1]


def presets() -> tuple[str, ...]:
    """The names of the machines that come with egx."""
    return tuple(sorted(path.stem for path in PRESETS.glob("*.toml")))


def _load(name_or_path: str | os.PathLike[str]) -> tuple[Hardware, dict[str, Sourced]]:
    if isinstance(name_or_path, str) and name_or_path in presets():
        path, preset = PRESETS / f"{name_or_path}.toml", True
    else:
        path, preset = Path(name_or_path), False
        if path.suffix != ".toml":
            close = difflib.get_close_matches(str(name_or_path).lower(), presets(), n=3, cutoff=0.4)
            hint = f"; did you mean {' or '.join(close)}?" if close else ""
            raise HardwareError(
                f"no machine is named {str(name_or_path)!r}{hint} "
                f"(presets: {', '.join(presets())}; or the path of a .toml file)"
            )
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise HardwareError(f"{path}: cannot be read: {error}") from None
    return parse(text, label=path.name if preset else str(path), require_sources=preset)


def parse(
    text: str, *, label: str = "<text>", require_sources: bool = False
) -> tuple[Hardware, dict[str, Sourced]]:
    """A machine, and its numbers with their sources, from the text of a file called `label`.

    Raises:
        HardwareError: as `load`.
    """
    file = _File(label, require_sources)
    try:
        content = tomllib.loads(text)
    # Numbers of too many digits are a ValueError, as what is no TOML at all.
    except (ValueError, RecursionError) as error:
        raise HardwareError(f"{label}: not valid TOML: {error}") from None
    top = _Table(file, "top level", content)
    top.allow("name", "description", "device", "link")
    name = top.text("name")
    if "description" in top.content:
        top.text("description")
    devices = [d for table in top.tables("device", "[[device]]") for d in _read_devices(table)]
    if len(devices) > MOST_DEVICES:
        raise HardwareError(f"{label}: expected {MOST_DEVICES} devices at most, got {len(devices)}")
    _check_devices(file, devices)
    bandwidth, latency = _read_links(top, devices)
    hardware = Hardware(
        flops_per_s=[d.rates for d in devices],
        level_bytes=[[level[1] for level in d.levels] for d in devices],
        read_bytes_per_s=[[level[2] for level in d.levels] for d in devices],
        write_bytes_per_s=[[level[3] for level in d.levels] for d in devices],
        link_bytes_per_s=bandwidth,
        link_latency_s=latency,
        launch_s=[d.launch_s for d in devices],
        name=name,
        level_names=[level[0] for level in devices[0].levels],
        device_names=[d.name for d in devices],
    )
    return hardware, file.sources


def _read_devices(table: _Table) -> list[_Device]:
    """The copies of one [[device]] table."""
    table.allow("name", "count", "launch", "level", "rates", "source")
    kind = table.text("name")
    table.where += f" ({kind})"
    count = table.content.get("count", 1)
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= MOST_DEVICES:
        raise table.error("count", f"an integer of 1 to {MOST_DEVICES}")
    launch = table.quantity("launch", "time", zero=True)
    levels = _read_levels(table)
    rates = _read_rates(table)
    stem = f"{kind}-" if kind[-1].isdigit() else kind
    names = [kind] if "count" not in table.content else [f"{stem}{k}" for k in range(count)]
    return [_Device(kind, name, levels, rates, launch) for name in names]


def _read_levels(device: _Table) -> list[tuple[str, float, float, float]]:
    """(name, capacity, read, write) of each level, checked against the levels before it."""
    levels: list[tuple[str, float, float, float]] = []
    for table in device.tables("level", "[[device.level]]"):
        table.allow("name", "capacity", "bandwidth", "read", "write", "source")
        name = table.text("name")
        table.where += f" ({name})"
        if name in [level[0] for level in levels]:
            raise table.error("name", "a name that no other level of the device has")
        capacity = table.quantity("capacity", "capacity")
        if "bandwidth" in table.content:
            for key in ("read", "write"):
                if key in table.content:
                    raise table.error(key, "either `bandwidth`, or `read` and `write`")
            read = write = table.quantity("bandwidth", "bandwidth")
        else:
            read = table.quantity("read", "bandwidth")
            write = table.quantity("write", "bandwidth")
        read_key = "bandwidth" if "bandwidth" in table.content else "read"
        write_key = "bandwidth" if "bandwidth" in table.content else "write"
        if levels:
            slower, _, slower_read, slower_write = levels[-1]
            if read <= slower_read:
                raise table.error(
                    read_key, f"more than the {slower_read:g} B/s of {slower!r}, the level before"
                )
            if write < slower_write:
                raise table.error(
                    write_key,
                    f"at least the {slower_write:g} B/s of {slower!r}, the level before",
                )
            if capacity > levels[0][1]:
                raise table.error(
                    "capacity", f"at most the {levels[0][1]:g} B of {levels[0][0]!r}, level 0"
                )
        levels.append((name, capacity, read, write))
    return levels


def _read_rates(device: _Table) -> list[float]:
    """Operations a second for each op class, efficiency included."""
    if "rates" not in device.content:
        raise device.error("rates", "a [device.rates] table")
    rates = _Table(device.file, f"{device.where}, rates", device.content["rates"])
    rates.allow(*OP_CLASSES, "other", "source")
    found: dict[str, float] = {}
    for key in rates.content:
        if key == "source":
            continue
        entry = _Table(device.file, f"{rates.where}, {key}", rates.content[key])
        entry.allow("rate", "efficiency", "source")
        entry.source = entry.source or rates.source
        found[key] = entry.quantity("rate", "rate") * entry.fraction("efficiency")
    for key in OP_CLASSES:
        if key not in found and "other" not in found:
            raise rates.error(key, f"a rate such as {{ rate = {EXAMPLES['rate']!r} }}, or `other`")
    return [found.get(key, found.get("other", math.nan)) for key in OP_CLASSES]


def _check_devices(file: _File, devices: Sequence[_Device]) -> None:
    names = [d.name for d in devices]
    for name in names:
        if names.count(name) > 1:
            raise HardwareError(f"{file.label}: two devices are named {name!r}")
    first = devices[0]
    for device in devices:
        if len(device.levels) != len(first.levels):
            raise HardwareError(
                f"{file.label}: device {device.name!r} has {len(device.levels)} levels and "
                f"{first.name!r} has {len(first.levels)}; expected the same number for all"
            )


def _read_links(top: _Table, devices: Sequence[_Device]) -> tuple[np.ndarray, np.ndarray]:
    """(bandwidth, latency), both [D, D]; the diagonals are never used and hold 0."""
    count = len(devices)
    bandwidth, latency = np.zeros((count, count)), np.zeros((count, count))
    if "link" in top.content:
        for table in top.tables("link", "[[link]]"):
            table.allow("from", "to", "both_ways", "bandwidth", "latency", "source")
            table.where += f" ({table.text('from')} to {table.text('to')})"
            sender, receiver = _match(table, "from", devices), _match(table, "to", devices)
            both_ways = table.content.get("both_ways", True)
            if not isinstance(both_ways, bool):
                raise table.error("both_ways", "true or false")
            speed = table.quantity("bandwidth", "bandwidth", infinite=True)
            delay = table.quantity("latency", "time", zero=True)
            pairs = np.outer(sender, receiver)
            pairs = pairs | pairs.T if both_ways else pairs
            pairs &= ~np.eye(count, dtype=bool)
            if not pairs.any():
                raise table.error("to", "a device other than the sender")
            bandwidth[pairs], latency[pairs] = speed, delay
    missing = np.argwhere((bandwidth == 0) & ~np.eye(count, dtype=bool))
    if len(missing):
        sender_name, receiver_name = (devices[k].name for k in missing[0])
        raise HardwareError(
            f"{top.file.label}: no [[link]] leads from {sender_name!r} to {receiver_name!r}; "
            "expected one between every two devices"
        )
    return bandwidth, latency


def _match(table: _Table, key: str, devices: Sequence[_Device]) -> np.ndarray:
    """Which devices the end of a link means, [D]."""
    wanted = table.text(key)
    match = np.array([wanted in ("*", d.kind, d.name) for d in devices])
    if not match.any():
        known = dict.fromkeys(name for d in devices for name in (d.kind, d.name))
        raise table.error(key, f"'*' or one of {', '.join(known)}")
    return match
