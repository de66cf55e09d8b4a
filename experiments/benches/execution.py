"""Evaluations of the several-devices simulators, beside a compiled loop over candidates.

The loop is what one would write without JAX: numba, one core, one candidate after the other, a
binary heap of ready ops, counters for memory. Both count makespan and exact peaks of the static
order and must agree before they are timed.
"""

from __future__ import annotations

import argparse
import functools
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from egx.graph.builder import GraphBuilder
from egx.graph.graph import OP_CLASSES, Graph
from egx.hardware.spec import Hardware
from egx.problems.execution import Execution
from egx.report.tables import Table
from egx.simulate.lanes import Plans
from egx.simulate.one_order import order_of, run_one_order
from egx.simulate.schedule import run_static

from .numba_execution import compiled_loop
from .timing import SCALING_OPS, exponent, in_turns

SCALING_POPULATION = 16
SHARED, SHARED_QUEUED = "one for all", "one for all, by priority"
KNOWN, QUEUED = "one a candidate", "one a candidate, by priority"
# Ops, candidates, devices, order.
CASES = (
    (1000, 256, 2, SHARED),
    (1000, 256, 4, SHARED),
    (1000, 256, 2, SHARED_QUEUED),
    (1000, 256, 2, KNOWN),
    (1000, 256, 4, KNOWN),
    (1000, 256, 2, QUEUED),
    (1000, 256, 4, QUEUED),
    (150, 80, 2, QUEUED),
)


def random_graph(rng: np.random.Generator, ops: int) -> Graph:
    """Each op reads one to three of the fifty tensors before it."""
    builder = GraphBuilder(f"random {ops}")
    tensors: list[Any] = []
    for i in range(ops):
        reads = int(rng.integers(1, 4)) if tensors else 0
        low = max(0, len(tensors) - 50)
        tensors += builder.op(
            f"op{i}",
            kind="contraction",
            op_type="any",
            inputs=[tensors[k] for k in rng.integers(low, len(tensors), reads)],
            output_bytes=[int(rng.integers(1, 1000))],
            flops=float(rng.integers(1, 100)),
        )
    return builder.build()


def machine(devices: int) -> Hardware:
    return Hardware(
        flops_per_s=np.full((devices, len(OP_CLASSES)), 10.0),
        level_bytes=np.full((devices, 1), 1e12),
        read_bytes_per_s=np.full((devices, 1), 1e3),
        write_bytes_per_s=np.full((devices, 1), 1e3),
        link_bytes_per_s=np.full((devices, devices), 1e2),
        link_latency_s=np.full((devices, devices), 0.1),
        launch_s=np.zeros(devices),
    )


@jax.jit
def _queued(problem: Execution, device: Any, priority: Any) -> Any:
    """Both [P, N], or priorities [N] that all share."""
    axes = {"device": 0, "priority": 0 if priority.ndim == 2 else None}
    plans = {"device": device, "priority": priority}
    outcome = jax.vmap(problem.evaluate, in_axes=(axes,))(plans)
    return outcome.makespan_s, outcome.peak_units


@jax.jit
def _shared(problem: Execution, device: Any, order: Any) -> Any:
    makespan, peaks = run_one_order(problem.table, device.T, order)
    return makespan, peaks.T


@jax.jit
def _known(problem: Execution, device: Any, order: Any) -> Any:
    makespan, peaks, _ = run_static(problem.table, Plans(device.T, order=order.T))
    return makespan, peaks.T


@jax.jit
def _orders(problem: Execution, priority: Any) -> Any:
    return jax.lax.map(lambda one: order_of(problem.table, one), priority)


def compare(ops: int, population: int, devices: int, order: str, repeats: int) -> dict[str, Any]:
    """Times both on one case, after they agreed."""
    rng = np.random.default_rng(0)
    problem = Execution(random_graph(rng, ops), machine(devices))
    device = rng.integers(0, devices, (population, ops)).astype(np.int32)
    priority = rng.random((population, ops)).astype(np.float32)
    shared = order in (SHARED, SHARED_QUEUED)
    if shared:
        priority[:] = priority[0]
    known = None
    if order != QUEUED:
        # A loop needs a queue once where all share it: it is given what comes out.
        count = 1 if shared else population
        known = np.asarray(_orders(problem, jnp.asarray(priority[:count])))
    compiled = compiled_loop(problem, {"device": device, "priority": priority}, known)
    simulate, given = {
        SHARED: (_shared, None if known is None else known[0]),
        KNOWN: (_known, known),
        SHARED_QUEUED: (_queued, priority[0]),
        QUEUED: (_queued, priority),
    }[order]
    simulated = functools.partial(simulate, problem, jnp.asarray(device), jnp.asarray(given))
    start = time.perf_counter()
    outcome = jax.block_until_ready(simulated())
    compile_s = time.perf_counter() - start
    makespan, peaks = compiled()
    np.testing.assert_allclose(outcome[0], makespan, rtol=1e-5)
    np.testing.assert_array_equal(outcome[1], peaks)
    timed = in_turns({"egx": simulated, "numba": compiled}, repeats)
    egx, numba = timed["egx"], timed["numba"]
    per = 1e9 / (ops * population)
    return {
        "ops": ops,
        "population": population,
        "devices": devices,
        "order": order,
        "egx_ns": egx["least_cpu_s"] * per,
        "numba_ns": numba["least_cpu_s"] * per,
        "ratio": numba["least_cpu_s"] / egx["least_cpu_s"],
        "median_ratio": numba["cpu_s"] / egx["cpu_s"],
        "wall_ratio": numba["least_wall_s"] / egx["least_wall_s"],
        "compile_s": compile_s,
    }


def scaling(order: str, kind: str) -> dict[str, Any]:
    """CPU seconds an evaluation by size, and the exponent of a power law through them."""
    rng = np.random.default_rng(0)
    seconds = []
    for ops in SCALING_OPS:
        problem = Execution(random_graph(rng, ops), machine(2), order=order)
        device = jnp.asarray(rng.integers(0, 2, (SCALING_POPULATION, ops)), jnp.int32)
        priority = jnp.asarray(rng.random((SCALING_POPULATION, ops)), jnp.float32)
        job = functools.partial(
            _queued, problem, device, priority[0] if kind == SHARED_QUEUED else priority
        )
        jax.block_until_ready(job())
        timed = in_turns({"run": job}, 3)["run"]
        seconds.append(timed["least_cpu_s"] / SCALING_POPULATION)
    by_size = dict(zip(map(str, SCALING_OPS), seconds, strict=True))
    return {
        "order": order,
        "kind": kind,
        "seconds": by_size,
        "exponent": exponent(SCALING_OPS, seconds),
    }


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Rows by case; and by size."""
    rows = [compare(*case, options.repeats) for case in CASES]
    kinds = (("static", SHARED_QUEUED), ("static", QUEUED), ("runtime", QUEUED))
    scaled = [scaling(*kind) for kind in kinds] if options.scaling else []
    return {"repeats": options.repeats, "rows": rows, "scaling": scaled}


def tables(result: dict[str, Any]) -> list[Table]:
    """What `measure` found, for people."""
    cells = tuple(
        (
            row["order"],
            f"{row['ops']:,}",
            str(row["population"]),
            str(row["devices"]),
            f"{row['numba_ns']:.0f}",
            f"{row['egx_ns']:.0f}",
            f"{row['ratio']:.2f}",
            f"{row['median_ratio']:.2f}",
            f"{row['compile_s']:.1f}",
        )
        for row in result["rows"]
    )
    header = (
        "order", "ops", "candidates", "devices", "numba, ns an op", "egx, ns an op", "x CPU",
        "x CPU, medians", "compile s",
    )  # fmt: skip
    made = [Table(header, cells, title="Several devices, static order")]
    if result["scaling"]:
        by_size = tuple(
            (
                f"{row['order']}, {row['kind']}",
                *(f"{1e3 * row['seconds'][str(ops)]:.2f}" for ops in SCALING_OPS),
                f"{row['exponent']:.2f}",
            )
            for row in result["scaling"]
        )
        made.append(
            Table(
                ("order", *(f"{ops:,} ops" for ops in SCALING_OPS), "exponent"),
                by_size,
                title=f"Several devices by size: CPU ms an evaluation of {SCALING_POPULATION}",
            )
        )
    return made
