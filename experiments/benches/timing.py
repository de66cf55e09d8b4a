"""Jobs timed in turns, so that what else runs on the machine meets all of them alike."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numba
import numpy as np

SCALING_OPS = (1_000, 3_000, 10_000, 30_000, 80_000)

Times = dict[str, float]


def about() -> dict[str, Any]:
    """What figures depend on besides the code."""
    return {
        "machine": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "load_average": os.getloadavg(),
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "numba": numba.__version__,
    }


def in_turns(jobs: dict[str, Callable[[], Any]], repeats: int) -> dict[str, Times]:
    """Wall and CPU seconds of each job, medians and least, all jobs once a round.

    Each must have run before, so that nothing is compiled here.
    """
    wall: dict[str, list[float]] = {name: [] for name in jobs}
    cpu: dict[str, list[float]] = {name: [] for name in jobs}
    for _ in range(repeats):
        for name, job in jobs.items():
            began, spent = time.perf_counter(), time.process_time()
            jax.block_until_ready(job())
            wall[name].append(time.perf_counter() - began)
            cpu[name].append(time.process_time() - spent)
    return {
        name: {
            "wall_s": float(np.median(wall[name])),
            "least_wall_s": min(wall[name]),
            "cpu_s": float(np.median(cpu[name])),
            "least_cpu_s": min(cpu[name]),
        }
        for name in jobs
    }


def exponent(sizes: Sequence[float], seconds: Sequence[float]) -> float:
    """Of the power law through seconds by size."""
    return float(np.polyfit(np.log(sizes), np.log(seconds), 1)[0])
