"""Wall-clock seconds of what runs on real devices."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax


def timed(run: Callable[[], Any]) -> tuple[float, Any]:
    """(seconds, result) of one run, until everything that it made is there."""
    start = time.perf_counter()
    result = jax.block_until_ready(run())
    return time.perf_counter() - start, result


def median_seconds(run: Callable[[], Any], *, repeats: int, warmup: int = 1) -> float:
    """The median of `repeats` runs after `warmup` runs that do not count (they compile)."""
    for _ in range(warmup):
        timed(run)
    return statistics.median(timed(run)[0] for _ in range(repeats))
