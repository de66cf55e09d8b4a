"""Evaluations of the several-devices simulators, beside a compiled loop over candidates.

    python experiments/bench_execution.py                # a few minutes; prints a table
    taskset -c 0 python experiments/bench_execution.py   # both on one core
    python experiments/bench_execution.py --out FILE     # the table as JSON too

The loop is what one would write without JAX: numba, one core, one candidate after the other, a
binary heap of ready ops, counters for memory. Both count makespan and exact peaks of the static
order and must agree before they are timed, in turns, in one process. CPU seconds of the process
are a fair measure on a machine that others use too; numbers are the least of several runs.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numba_execution import compiled_loop

from egx.graph.builder import GraphBuilder
from egx.graph.graph import OP_CLASSES, Graph
from egx.hardware.spec import Hardware
from egx.problems.execution import Execution
from egx.simulate.one_order import order_of

SCALING_OPS = (1_000, 3_000, 10_000, 30_000, 80_000)
SCALING_POPULATION = 16


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


def least_seconds(jobs: dict[str, Callable[[], Any]], repeats: int) -> dict[str, dict[str, float]]:
    """CPU and wall seconds of each job, the least of `repeats` runs in turns."""
    best = {name: {"cpu_s": np.inf, "wall_s": np.inf} for name in jobs}
    for _ in range(repeats):
        for name, job in jobs.items():
            cpu, wall = time.process_time(), time.perf_counter()
            job()
            taken = {"cpu_s": time.process_time() - cpu, "wall_s": time.perf_counter() - wall}
            best[name] = {k: min(v, taken[k]) for k, v in best[name].items()}
    return best


def compare(ops: int, population: int, devices: int, repeats: int, *, shared: bool) -> dict:
    """Times both on one case, after they agreed."""
    rng = np.random.default_rng(0)
    problem = Execution(random_graph(rng, ops), machine(devices))
    plans = {
        "device": rng.integers(0, devices, (population, ops)).astype(np.int32),
        "priority": rng.random((population, ops)).astype(np.float32),
    }
    order = np.zeros(0, np.int32)
    axes = {"device": 0, "priority": None if shared else 0}
    given = {k: jnp.asarray(v[0] if axes[k] is None else v) for k, v in plans.items()}
    if shared:
        plans["priority"][:] = plans["priority"][0]
        order = np.asarray(jax.jit(order_of)(problem.table, given["priority"]))

    @jax.jit
    def evaluate(problem: Execution, plans: dict[str, Any]) -> Any:
        return jax.vmap(problem.evaluate, in_axes=(axes,))(plans)

    simulated = functools.partial(evaluate, problem, given)
    compiled = compiled_loop(problem, plans, order)
    start = time.perf_counter()
    outcome = jax.block_until_ready(simulated())
    compile_s = time.perf_counter() - start
    makespan, peaks = compiled()
    np.testing.assert_allclose(outcome.makespan_s, makespan, rtol=1e-5)
    np.testing.assert_array_equal(outcome.peak_units, peaks)
    best = least_seconds(
        {"simulator": lambda: jax.block_until_ready(simulated()), "loop": compiled}, repeats
    )
    per = 1e9 / (ops * population)
    return {
        "ops": ops,
        "population": population,
        "devices": devices,
        "order": "one for all" if shared else "one a candidate",
        "simulator_ns": best["simulator"]["cpu_s"] * per,
        "loop_ns": best["loop"]["cpu_s"] * per,
        "ratio": best["loop"]["cpu_s"] / best["simulator"]["cpu_s"],
        "wall_ratio": best["loop"]["wall_s"] / best["simulator"]["wall_s"],
        "compile_s": compile_s,
    }


def scaling(sizes: tuple[int, ...], order: str) -> dict:
    """Seconds an evaluation by size, and the exponent of a power law through them."""
    rng = np.random.default_rng(0)
    seconds = []
    for ops in sizes:
        problem = Execution(random_graph(rng, ops), machine(2), order=order)
        plans = {
            "device": jnp.asarray(rng.integers(0, 2, (SCALING_POPULATION, ops)), jnp.int32),
            "priority": jnp.asarray(rng.random((SCALING_POPULATION, ops)), jnp.float32),
        }
        evaluate = jax.jit(lambda problem, plans: jax.vmap(problem.evaluate)(plans))
        jax.block_until_ready(evaluate(problem, plans))
        job = functools.partial(evaluate, problem, plans)
        best = least_seconds({"run": lambda job=job: jax.block_until_ready(job())}, 3)
        seconds.append(best["run"]["cpu_s"] / SCALING_POPULATION)
    exponent = np.polyfit(np.log(sizes), np.log(seconds), 1)[0]
    return {
        "order": order,
        "seconds": dict(zip(map(str, sizes), seconds, strict=True)),
        "exponent": float(exponent),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--no-scaling", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = []
    for ops, population, devices, shared in (
        (1000, 256, 2, False),
        (1000, 256, 2, True),
        (1000, 256, 4, False),
        (1000, 256, 4, True),
        (150, 80, 2, False),
    ):
        row = compare(ops, population, devices, options.repeats, shared=shared)
        rows.append(row)
        print(
            f"{ops} ops, {population} candidates, {devices} devices, order {row['order']}: "
            f"{row['simulator_ns']:.0f} ns an op and candidate, loop {row['loop_ns']:.0f}, "
            f"ratio {row['ratio']:.2f} (wall {row['wall_ratio']:.2f}), "
            f"compiled in {row['compile_s']:.1f} s",
            flush=True,
        )
    curves = []
    if not options.no_scaling:
        for order in ("static", "runtime"):
            curves.append(scaling(SCALING_OPS, order))
            took = ", ".join(f"{n}: {s:.4f} s" for n, s in curves[-1]["seconds"].items())
            print(f"{order}: {took}; exponent {curves[-1]['exponent']:.2f}", flush=True)
    if options.out:
        about = {"cores": os.cpu_count(), "machine": platform.machine(), "jax": jax.__version__}
        result = {"about": about, "comparison": rows, "scaling": curves}
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
