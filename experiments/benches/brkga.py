"""Seconds of BRKGA with 5,000 evaluations on a graph of 150 ops, beside a compiled loop and pymoo.

The compiled loop is the same algorithm in numba on one core, with the same parameters, counts and
decoder semantics. pymoo's BRKGA (when it is installed) runs on the decoder of that loop, a whole
population at a time, and on the simulator of egx, one candidate at a time. Both decoders must agree
before anything is timed, and both genetic algorithms must find plans of like cost: the mean over
seeds is printed.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numba
import numpy as np

from egx.graph.generators import regal_synthetic
from egx.graph.graph import OP_CLASSES
from egx.hardware.spec import Hardware
from egx.problems.execution import Execution
from egx.report.tables import Table
from egx.search.brkga import BRKGA, evolve
from egx.search.keys import decode_flat, width
from egx.training.loop import run

from .numba_execution import loop, loop_arguments

try:
    from pymoo.algorithms.soo.nonconvex.brkga import BRKGA as PymooBRKGA
    from pymoo.core.problem import Problem
    from pymoo.optimize import minimize
except ImportError:
    PymooBRKGA = None

OPS, DEVICES, BUDGET = 150, 2, 5000
FAMILIES = ("erdos_renyi", "stochastic_block", "watts_strogatz", "barabasi_albert")


@numba.njit
def compiled_brkga(rng, budget, population, elites, mutants, rho, ops, devices, rest):
    """The best makespan; children and mutants are evaluated, elites are not."""
    size, fresh = ops * (devices + 1), population - elites
    keys, other = np.empty((2, population, size), np.float32)
    cost = np.full(population, np.inf, np.float32)
    device, priority = np.empty((fresh, ops), np.int32), np.empty((fresh, ops), np.float32)
    makespan, peaks = np.empty(fresh, np.float32), np.empty((fresh, devices), np.int64)
    for i in range(population):
        for g in range(size):
            keys[i, g] = rng.random()
    best, spent = np.float32(np.inf), 0
    while spent < budget:
        count = min(fresh, budget - spent)
        for i in range(count):
            row = keys[elites + i]
            for v in range(ops):
                chosen = 0
                for d in range(1, devices):
                    if row[d * ops + v] > row[chosen * ops + v]:
                        chosen = d
                device[i, v] = chosen
                priority[i, v] = row[devices * ops + v]
        loop(device[:count], priority[:count], *rest, makespan, peaks)
        for i in range(count):
            cost[elites + i] = makespan[i]
            best = min(best, makespan[i])
        spent += count
        order = np.argsort(cost, kind="mergesort")
        for i in range(population):
            if i < elites:
                other[i] = keys[order[i]]
            elif i < population - mutants:
                mother = keys[order[int(rng.random() * elites)]]
                father = keys[order[elites + int(rng.random() * fresh)]]
                for g in range(size):
                    other[i, g] = mother[g] if rng.random() < rho else father[g]
            else:
                for g in range(size):
                    other[i, g] = rng.random()
        cost[:elites] = cost[order[:elites]]
        keys, other = other, keys
    return best


def machine(devices: int) -> Hardware:
    """Equal devices and free transfers, as in the paper."""
    return Hardware(
        flops_per_s=np.full((devices, len(OP_CLASSES)), 1.0),
        level_bytes=np.full((devices, 1), 1e9),
        read_bytes_per_s=np.full((devices, 1), np.inf),
        write_bytes_per_s=np.full((devices, 1), np.inf),
        link_bytes_per_s=np.full((devices, devices), np.inf),
        link_latency_s=np.zeros((devices, devices)),
        launch_s=np.zeros(devices),
    )


def pymoo_run(problem: Any, budget: int, search: BRKGA) -> Callable[[int], float]:
    algorithm = {
        "n_elites": search.elites,
        "n_offsprings": search.population - search.elites - search.mutants,
        "n_mutants": search.mutants,
        "bias": float(search.rho),
        "eliminate_duplicates": False,
    }

    def once(seed: int) -> float:
        result = minimize(problem, PymooBRKGA(**algorithm), ("n_eval", budget), seed=seed)
        return float(result.F[0])

    return once


def pymoo_runs(problem: Execution, budget: int, search: BRKGA) -> dict[str, Callable[[int], float]]:
    """pymoo's BRKGA on both decoders."""
    ops, devices, size = problem.graph.num_ops, problem.hardware.num_devices, width(problem)
    rest = loop_arguments(problem)

    class Compiled(Problem):  # type: ignore[misc]
        """A population at once, by the numba loop."""

        def _evaluate(self, x: np.ndarray, out: dict, *args: Any, **more: Any) -> None:
            keys = x.reshape(len(x), devices + 1, ops)
            device = keys[:, :devices].argmax(1).astype(np.int32)
            makespan = np.empty(len(x), np.float32)
            peaks = np.empty((len(x), devices), np.int64)
            loop(device, keys[:, devices].astype(np.float32), *rest, makespan, peaks)
            out["F"] = makespan

    one = jax.jit(lambda problem, flat: problem.evaluate(decode_flat(problem, flat)).cost)

    class Simulated(Problem):  # type: ignore[misc]
        """A candidate at a time, by the simulator."""

        def _evaluate(self, x: np.ndarray, out: dict, *args: Any, **more: Any) -> None:
            rows = x.astype(np.float32)
            out["F"] = np.asarray([float(one(problem, jnp.asarray(row))) for row in rows])

    limits = {"n_var": size, "n_obj": 1, "xl": 0.0, "xu": 1.0}
    return {
        "pymoo, numba decoder": pymoo_run(Compiled(**limits), budget, search),
        "pymoo, egx decoder": pymoo_run(Simulated(**limits), budget, search),
    }


def check_decoders(problem: Execution) -> None:
    keys = np.random.default_rng(0).random((64, width(problem))).astype(np.float32)
    plans = jax.jit(jax.vmap(lambda row: decode_flat(problem, row)))(jnp.asarray(keys))
    outcome = jax.jit(jax.vmap(problem.evaluate))(plans)
    makespan, peaks = np.empty(64, np.float32), np.empty(outcome.peak_units.shape, np.int64)
    given = np.asarray(plans["device"]), np.asarray(plans["priority"])
    loop(*given, *loop_arguments(problem), makespan, peaks)
    np.testing.assert_allclose(outcome.makespan_s, makespan, rtol=1e-5)
    np.testing.assert_array_equal(outcome.peak_units, peaks)


def compare(family: str, seeds: int, slow_seeds: int) -> dict[str, Any]:
    """Least CPU seconds of each, and the mean of what they find."""
    model = regal_synthetic(np.random.default_rng(0), family, OPS)
    problem, search = Execution(model, machine(DEVICES)), BRKGA()
    check_decoders(problem)
    budget = jnp.asarray(BUDGET, jnp.int32)
    pure = eqx.filter_jit(
        lambda problem, budget, key: evolve(search, problem, budget=budget, key=key).cost
    )
    rest = loop_arguments(problem)
    sizes = (BUDGET, search.population, search.elites, search.mutants, float(search.rho))
    jobs: dict[str, Callable[[int], float]] = {
        "egx": lambda seed: float(pure(problem, budget, jax.random.key(seed))),
        "egx, through the driver": lambda seed: (
            run(search, problem, budget=BUDGET, seeds=[seed])[0].cost
        ),
        "numba": lambda seed: float(
            compiled_brkga(np.random.default_rng(seed), *sizes, model.graph.num_ops, DEVICES, rest)
        ),
    }
    if PymooBRKGA is not None:
        jobs |= pymoo_runs(problem, BUDGET, search)
    start = time.perf_counter()
    jobs["egx"](0)
    compile_s = time.perf_counter() - start
    for name in ("numba", "egx, through the driver"):
        jobs[name](0)
    cpu: dict[str, list[float]] = {name: [] for name in jobs}
    found: dict[str, list[float]] = {name: [] for name in jobs}
    for seed in range(seeds):
        for name, job in jobs.items():
            if seed >= slow_seeds and name.startswith("pymoo"):
                continue
            before = time.process_time()
            found[name].append(job(seed))
            cpu[name].append(time.process_time() - before)
    return {
        "family": family,
        "ops": model.graph.num_ops,
        "uses": model.graph.num_uses,
        "devices": DEVICES,
        "budget": BUDGET,
        "compile_s": compile_s,
        "cpu_s": {name: min(seconds) for name, seconds in cpu.items()},
        "mean_cost": {name: float(np.mean(costs)) for name, costs in found.items()},
        "lower_bound": problem.lower_bound(),
    }


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Rows by family of graphs."""
    rows = [compare(family, options.seeds, options.slow_seeds) for family in options.families]
    return {"seeds": options.seeds, "slow_seeds": options.slow_seeds, "rows": rows}


def tables(result: dict[str, Any]) -> list[Table]:
    """What `measure` found, for people."""
    cells = tuple(
        (
            row["family"].replace("_", " "),
            str(row["uses"]),
            name,
            f"{seconds:.3f}",
            f"{seconds / row['cpu_s']['egx']:.2f}",
            f"{row['mean_cost'][name]:,.0f}",
        )
        for row in result["rows"]
        for name, seconds in row["cpu_s"].items()
    )
    header = ("family", "uses", "who", "CPU s", "of egx", "mean cost")
    title = f"BRKGA, {BUDGET:,} evaluations, {OPS} ops, {DEVICES} devices"
    return [Table(header, cells, title=title, left=(0, 2))]
