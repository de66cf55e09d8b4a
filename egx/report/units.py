"""Numbers as people read them: sizes, seconds, ratios and counts with few digits and a unit."""

from __future__ import annotations

import math
from collections.abc import Iterable

# A unit is reached a little below it: 1 us in float32 is 0.99999999 us.
_REACHED = 1 - 1e-6
_BYTES = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B"))
_SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))
TIMES = "\N{MULTIPLICATION SIGN}"
_COUNTS = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))


def significant(value: float, digits: int = 3) -> str:
    """`value` with that many significant digits, no exponent: 0.0123, 1.23, 123, 1235."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    text = f"{value:.{decimals}f}"
    # Rounding may have added a digit: 9.996 reads 10.0, not 10.00.
    if decimals and math.floor(math.log10(abs(float(text)))) > math.floor(math.log10(abs(value))):
        text = f"{value:.{decimals - 1}f}"
    return text


def byte_unit(largest: float) -> tuple[float, str]:
    """(bytes, name) of the unit in which `largest` reads best."""
    return next((unit for unit in _BYTES if largest >= unit[0] * _REACHED), _BYTES[-1])


def second_unit(largest: float) -> tuple[float, str]:
    """(seconds, name) of the unit in which `largest` reads best."""
    return next((unit for unit in _SECONDS if largest >= unit[0] * _REACHED), _SECONDS[-1])


def format_bytes(value: float) -> str:
    """Such as "24 MiB", "1.96 MiB", "512 B", "0 B" or "unbounded"."""
    if math.isinf(value):
        return "unbounded"
    scale, name = byte_unit(abs(value))
    amount = value / scale
    # Whole amounts are exact (capacities mostly are), others show that they are rounded.
    return f"{amount:.0f} {name}" if amount == int(amount) else f"{significant(amount)} {name}"


def format_seconds(value: float, digits: int = 4) -> str:
    """Such as "312.4 µs"; four digits, since searchers differ in the third."""
    if value == 0:
        return "0 s"
    scale, name = second_unit(abs(value))
    return f"{significant(value / scale, digits)} {name}"


def format_count(value: float, unit: str = "") -> str:
    """Such as "8.2 G" of anything, with decimal prefixes."""
    scale, prefix = next((c for c in _COUNTS if abs(value) >= c[0] * _REACHED), _COUNTS[-1])
    amount = value / scale
    whole = round(amount)
    # Rates are float32: 10 GB/s is whole although its last bits are not.
    text = f"{whole}" if math.isclose(amount, whole, rel_tol=1e-6) else significant(amount)
    return f"{text} {prefix}{unit}".rstrip()


def format_duration(seconds: float) -> str:
    """How long something took: "42 ms", "4.2 s", "12 s", "3 min 05 s", "2 h 07 min"."""
    if seconds < 0.9995:
        return f"{1e3 * seconds:.0f} ms"
    if seconds < 59.5:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def format_speedup(reference: float, cost: float) -> str:
    """reference / cost, such as 1.532 with a times sign; "-" unless both are positive."""
    if not (math.isfinite(reference) and math.isfinite(cost)) or reference <= 0 or cost <= 0:
        return "-"
    ratio = reference / cost
    return f"{ratio:.3f}{TIMES}" if ratio < 10 else f"{significant(ratio)}{TIMES}"


def format_percent(fraction: float, digits: int = 2) -> str:
    """A fraction as "1.25 %", and "-" for what is not known."""
    return "-" if math.isnan(fraction) else f"{100 * fraction:.{digits}f} %"


def shorten(text: str, width: int) -> str:
    """`text` cut in the middle to `width` characters: names differ most at their ends."""
    if len(text) <= width:
        return text
    head = (width - 1) // 2
    return f"{text[:head]}…{text[len(text) - (width - 1 - head) :]}"


def finite(values: Iterable[float]) -> list[float]:
    """The values that are numbers."""
    return [float(v) for v in values if math.isfinite(v)]
