"""Evaluations per second of the memory simulator, beside a compiled loop over candidates.

The loop is what one would write without JAX: numba, one core, one candidate after the other, all
its arrays small enough for the first cache. Both must agree on latencies, validity and moved units
before they are timed.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numba
import numpy as np

import egx
from egx.graph.builder import GraphBuilder
from egx.graph.graph import Graph, Model, real_sizes
from egx.hardware.spec import Hardware
from egx.problems.memory_placement import MemoryPlacement
from egx.report.tables import Table
from egx.simulate.cost import compute_seconds, last_uses
from egx.simulate.memory import run

from .timing import SCALING_OPS, exponent, in_turns

SCALING_POPULATION = 32


class Plain(NamedTuple):
    """A graph and a machine as the loops read them; uses and tensors in runs, one run an op."""

    first_use: np.ndarray
    use_source: np.ndarray
    use_units: np.ndarray
    use_frees: np.ndarray
    output_units: np.ndarray
    dead_units: np.ndarray
    weight_units: np.ndarray
    compute_s: np.ndarray
    launch_s: np.float32
    read_s: np.ndarray
    write_s: np.ndarray
    capacity: np.ndarray


def plain(graph: Graph, hardware: Hardware) -> Plain:
    """Lays a graph without padding out for the loops."""
    ops, tensors, _ = real_sizes(graph)
    units = np.asarray(graph.tensor_units, np.int64)
    producer = np.asarray(graph.tensor_producer)
    uses = np.asarray(graph.use_tensor)
    unit = np.float32(graph.unit_bytes)
    idle = ~np.asarray(graph.tensor_is_output)
    idle[uses] = False
    return Plain(
        first_use=np.searchsorted(np.asarray(graph.use_consumer), np.arange(ops + 1)),
        use_source=producer[uses],
        use_units=units[uses],
        use_frees=np.where(np.asarray(last_uses(graph)), units[uses], 0),
        output_units=np.bincount(producer, units, ops).astype(np.int64),
        dead_units=np.bincount(producer, units * idle[:tensors], ops).astype(np.int64),
        weight_units=np.asarray(graph.weight_units, np.int64),
        compute_s=np.asarray(compute_seconds(graph, hardware)),
        launch_s=np.float32(hardware.launch_s[0]),
        read_s=unit / np.asarray(hardware.read_bytes_per_s)[0],
        write_s=unit / np.asarray(hardware.write_bytes_per_s)[0],
        capacity=np.asarray(hardware.capacity_units(graph.unit_bytes)[0], np.int64),
    )


@numba.njit
def loop_valid(g, weights, activations, latency, valid):  # pragma: no cover - compiled
    """Roofline latency and validity of maps as they are."""
    levels = len(g.capacity)
    used, most = np.zeros(levels, np.int64), np.zeros(levels, np.int64)
    for p in range(len(weights)):
        used[:] = 0
        most[:] = 0
        clock = np.float32(0)
        for i in range(weights.shape[1]):
            w, a = weights[p, i], activations[p, i]
            used[w] += g.weight_units[i]
            most[w] += g.weight_units[i]
            used[a] += g.output_units[i]
            most[a] = max(most[a], used[a])
            traffic = np.float32(g.output_units[i]) * g.write_s[a]
            traffic += np.float32(g.weight_units[i]) * g.read_s[w]
            for u in range(g.first_use[i], g.first_use[i + 1]):
                source = activations[p, g.use_source[u]]
                traffic += np.float32(g.use_units[u]) * g.read_s[source]
                used[source] -= g.use_frees[u]
            used[a] -= g.dead_units[i]
            clock += max(g.compute_s[i], traffic) + g.launch_s
        latency[p] = clock
        valid[p] = True
        for m in range(1, levels):
            valid[p] = valid[p] and most[m] <= g.capacity[m]


@numba.njit
def loop_evaluate(g, weights, activations, prefetch, latency, moved):  # pragma: no cover
    """Rectification, then roofline or prefetched latency, in one pass over the ops."""
    levels, ops = len(g.capacity), weights.shape[1]
    used, most = np.zeros(levels, np.int64), np.zeros(levels, np.int64)
    free, start = np.zeros(levels, np.float32), np.zeros(ops, np.float32)
    settled = np.zeros(ops, np.int64)
    for p in range(len(weights)):
        used[:] = 0
        most[:] = 0
        free[:] = 0
        clock = np.float32(0)
        moved[p] = 0
        for i in range(ops):
            w = weights[p, i]
            while w > 0 and most[w] + g.weight_units[i] > g.capacity[w]:
                w -= 1
            used[w] += g.weight_units[i]
            most[w] += g.weight_units[i]
            a = activations[p, i]
            while a > 0 and used[a] + g.output_units[i] > g.capacity[a]:
                a -= 1
            used[a] += g.output_units[i]
            most[a] = max(most[a], used[a])
            settled[i] = a
            moved[p] += g.weight_units[i] if w != weights[p, i] else 0
            moved[p] += g.output_units[i] if a != activations[p, i] else 0
            act = np.float32(g.output_units[i]) * g.write_s[a]
            for u in range(g.first_use[i], g.first_use[i + 1]):
                source = settled[g.use_source[u]]
                act += np.float32(g.use_units[u]) * g.read_s[source]
                used[source] -= g.use_frees[u]
            used[a] -= g.dead_units[i]
            load = np.float32(g.weight_units[i]) * g.read_s[w]
            if prefetch == 0:
                clock += max(g.compute_s[i], act + load) + g.launch_s
            else:
                begin = clock
                if g.weight_units[i] > 0:
                    behind = start[i - prefetch] if i >= prefetch else np.float32(0)
                    free[w] = max(free[w], behind) + load
                    begin = max(clock, free[w])
                start[i] = begin
                clock = begin + max(g.compute_s[i], act) + g.launch_s
        latency[p] = clock


def bench(name: str, model: Model, hardware: Hardware, population: int, repeats: int) -> list[dict]:
    """Rows for one model and one population: three tasks, each by both contenders."""
    problem = MemoryPlacement(model, hardware)
    graph = plain(model.graph, hardware)
    rng = np.random.default_rng(0)
    shape = (population, model.graph.num_ops)
    # A mix: from all on level 0, which always fits, to uniform levels.
    lean = np.linspace(0, 1, population)[:, None]
    maps = [
        np.where(rng.random(shape) < lean, rng.integers(0, hardware.num_levels, shape), 0).astype(
            np.int32
        )
        for _ in range(2)
    ]
    on_device = [jnp.asarray(x) for x in maps]
    rows = []
    for task, prefetch, rectify in (
        ("validity", 0, False),
        ("evaluate", 0, True),
        ("evaluate", 2, True),
    ):

        @jax.jit
        def ours(table, weights, activations, prefetch=prefetch, rectify=rectify):
            def one(w, a):
                out = run(table, w, a, prefetch=prefetch, rectify=rectify)
                return out.latency_s, out.moved_units

            return jax.vmap(one)(weights, activations)

        began = time.perf_counter()
        compiled = ours.lower(problem.table, *on_device).compile()
        compile_s = time.perf_counter() - began
        latency, count = np.zeros(population, np.float32), np.zeros(population, np.int64)

        def loop(rectify=rectify, prefetch=prefetch, latency=latency, count=count):
            if rectify:
                loop_evaluate(graph, *maps, prefetch, latency, count)
            else:
                loop_valid(graph, *maps, latency, count)

        loop()
        seconds, moved = (np.asarray(x) for x in compiled(problem.table, *on_device))
        np.testing.assert_allclose(seconds, latency, rtol=1e-4)
        np.testing.assert_array_equal(moved if rectify else moved == 0, count)
        call = functools.partial(compiled, problem.table, *on_device)
        timed = in_turns({"numba": loop, "egx": call}, repeats)
        row: dict[str, Any] = {
            "model": name,
            "ops": shape[1],
            "uses": real_sizes(model.graph)[2],
            "population": population,
            "task": task,
            "prefetch": prefetch,
            "valid_share": float(np.mean(count == 0 if rectify else count)),
            "compile_s": compile_s,
        }
        for contender, found in timed.items():
            row |= {f"{contender}_{key}": value for key, value in found.items()}
            row[f"{contender}_per_s"] = population / found["wall_s"]
        for key in ("wall_s", "least_wall_s", "cpu_s", "least_cpu_s"):
            row[f"speed_up_{key.removesuffix('_s')}"] = row[f"numba_{key}"] / row[f"egx_{key}"]
        rows.append(row)
    return rows


def chain(ops: int) -> Graph:
    """A chain in which every fourth op reads one tensor more, from up to 50 ops before."""
    rng = np.random.default_rng(ops)
    builder = GraphBuilder("chain")
    tensors: list[Any] = []
    for i in range(ops):
        inputs = tensors[-1:]
        if i % 4 == 3:
            inputs = [*inputs, tensors[max(0, i - int(rng.integers(2, 50)))]]
        tensors += builder.op(
            f"op{i}",
            kind="contraction",
            op_type="matmul",
            inputs=inputs,
            output_bytes=[int(rng.integers(1, 2**14))],
            flops=float(rng.integers(1, 2**24)),
            weight_bytes=int(rng.integers(1, 2**14)),
        )
    return builder.build()


def scaling(hardware: Hardware, repeats: int) -> dict[str, Any]:
    """Seconds per call from 1,000 to 80,000 ops, and the exponent fitted to CPU seconds."""
    calls: dict[str, Callable[[], Any]] = {}
    rows = []
    for ops in SCALING_OPS:
        problem = MemoryPlacement(chain(ops), hardware)
        rng = np.random.default_rng(0)
        shape = (SCALING_POPULATION, ops)
        maps = [jnp.asarray(rng.integers(0, hardware.num_levels, shape, np.int32)) for _ in "wa"]

        @jax.jit
        def ours(table, weights, activations):
            return jax.vmap(lambda w, a: run(table, w, a).latency_s)(weights, activations)

        call = ours.lower(problem.table, *maps).compile()
        calls[str(ops)] = functools.partial(call, problem.table, *maps)
    timed = in_turns(calls, repeats)
    for ops in SCALING_OPS:
        rows.append({"ops": ops, "population": SCALING_POPULATION, **timed[str(ops)]})
    fitted = exponent(SCALING_OPS, [row["cpu_s"] for row in rows])
    return {"rows": rows, "exponent": fitted}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Rows by model, population and task; and by size."""
    hardware = egx.hardware.load(options.hardware)
    rows = []
    for name in options.models:
        model = egx.load(name)
        for population in options.populations:
            rows += bench(name, model, hardware, population, options.repeats)
    scaled = scaling(hardware, max(3, options.repeats // 3)) if options.scaling else None
    return {
        "hardware": options.hardware,
        "repeats": options.repeats,
        "rows": rows,
        "scaling": scaled,
    }


def tables(result: dict[str, Any]) -> list[Table]:
    """What `measure` found, for people."""
    cells = tuple(
        (
            row["model"],
            row["task"],
            str(row["prefetch"]),
            f"{row['population']:,}",
            f"{row['numba_per_s']:,.0f}",
            f"{row['egx_per_s']:,.0f}",
            f"{row['speed_up_wall']:.2f}",
            f"{row['speed_up_cpu']:.2f}",
            f"{row['compile_s']:.2f}",
        )
        for row in result["rows"]
    )
    header = (
        "model", "task", "k", "population", "numba, a second", "egx, a second", "x wall", "x CPU",
        "compile s",
    )  # fmt: skip
    made = [Table(header, cells, title="Memory placement", left=(0, 1))]
    scaled = result["scaling"]
    if scaled:
        by_size = tuple((f"{r['ops']:,}", f"{1e3 * r['cpu_s']:.1f}") for r in scaled["rows"])
        note = f"They grow as ops^{scaled['exponent']:.2f}."
        header = ("ops", f"CPU ms a call of {SCALING_POPULATION} candidates")
        made.append(Table(header, by_size, title="Memory placement by size", note=note))
    return made
