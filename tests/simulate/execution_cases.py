"""Random graphs, machines and plans for several devices, with times that float32 holds exactly.

Rates are powers of two, sizes and FLOPs small whole numbers: every time is a short binary fraction,
so ties are ties in both simulators and results can be compared bit by bit.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from egx.graph.graph import OP_CLASSES, Graph
from egx.hardware.spec import Hardware
from tests.oracles import execution_oracle
from tests.simulate import cases

RATES = (1.0, 2.0, 8.0, np.inf)
PLANS = 6


def devices(
    count: int,
    *,
    level_bytes: float = np.inf,
    flops: float = 1.0,
    memory: float = np.inf,
    link: float = np.inf,
    latency_s: float = 0.0,
    launch_s: float = 0.0,
) -> Hardware:
    """Equal devices; by default memory and links cost nothing."""
    return Hardware(
        flops_per_s=np.full((count, len(OP_CLASSES)), flops),
        level_bytes=np.full((count, 1), level_bytes),
        read_bytes_per_s=np.full((count, 1), memory),
        write_bytes_per_s=np.full((count, 1), memory),
        link_bytes_per_s=np.full((count, count), link),
        link_latency_s=np.full((count, count), latency_s),
        launch_s=np.full(count, launch_s),
    )


def random_devices(rng: np.random.Generator, count: int, *, free: bool = False) -> Hardware:
    """Unequal devices and links; with `free` nothing takes time."""

    def rates(*shape: int) -> np.ndarray:
        return np.full(shape, np.inf) if free else rng.choice(RATES, shape)

    def seconds(*shape: int) -> np.ndarray:
        return np.zeros(shape) if free else rng.choice([0.0, 0.0, 0.25, 1.5], shape)

    link = rates(count, count)
    np.fill_diagonal(link, 0.0)
    capacity = rng.integers(0, 120, (count, 1)).astype(float)
    capacity[rng.random(count) < 0.3] = np.inf
    return Hardware(
        flops_per_s=rates(count, len(OP_CLASSES)),
        level_bytes=capacity,
        read_bytes_per_s=rates(count, 1),
        write_bytes_per_s=rates(count, 1),
        link_bytes_per_s=link,
        link_latency_s=seconds(count, count),
        launch_s=seconds(count),
    )


def random_plans(
    rng: np.random.Generator, graph: Graph, devices: int, count: int = PLANS
) -> dict[str, np.ndarray]:
    """[count, ...] of every decision; a few priorities for all, so that ties are everywhere."""
    ops, uses = graph.num_ops, graph.num_uses
    few = np.array([-1.0, 0.0, 0.5, 3.0], np.float32)
    return {
        "device": rng.integers(0, devices, (count, ops)).astype(np.int32),
        "priority": rng.choice(few, (count, ops)),
        "transfer_priority": rng.choice(few, (count, uses)),
        "fusion": rng.integers(0, 4, (count, ops)).astype(np.int32),
    }


@st.composite
def seeds(draw: st.DrawFn) -> tuple[tuple[list[dict[str, Any]], list[int]], int]:
    """A graph as `cases.build` takes it, and a seed for the rest."""
    return draw(cases.graphs()), draw(st.integers(0, 2**32 - 1))


def case(drawn: Any, count: int) -> tuple[np.random.Generator, Graph, Hardware]:
    spec, seed = drawn
    rng = np.random.default_rng(seed)
    graph = cases.build(*spec, unit_bytes=1, pad_to=cases.PADDED)
    return rng, graph, random_devices(rng, count, free=bool(rng.random() < 0.15))


def oracle(
    graph: Graph, hardware: Hardware, plans: dict[str, np.ndarray], p: int, **options: Any
) -> execution_oracle.Oracle:
    given = {k: v[p] for k, v in plans.items() if k != "fusion"}
    return execution_oracle.Oracle(graph, hardware, **given, **options)


def arrays(plans: dict[str, np.ndarray]) -> dict[str, Any]:
    return {name: jnp.asarray(value) for name, value in plans.items()}


def only(plans: dict[str, np.ndarray], *names: str) -> dict[str, np.ndarray]:
    return {name: plans[name] for name in names}
