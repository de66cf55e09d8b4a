"""Random graphs, machines and maps for comparing simulators, and toys counted by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

from egx.graph.builder import GraphBuilder
from egx.graph.graph import OP_CLASSES, Graph
from egx.hardware.spec import Hardware

PADDED = (10, 16, 24)
MIB = 2**20


def build(
    ops: list[dict[str, Any]],
    outputs: list[int],
    *,
    unit_bytes: int | None = None,
    pad_to: tuple[int, int, int] | None = None,
) -> Graph:
    """A graph from plain entries: `inputs` and `outputs` are tensor indices."""
    builder = GraphBuilder("case")
    handles: list[Any] = []
    for i, op in enumerate(ops):
        handles += builder.op(
            f"op{i}",
            kind=op.get("kind", "contraction"),
            op_type="any",
            inputs=[handles[t] for t in op["inputs"]],
            output_bytes=op["sizes"],
            flops=op["flops"],
            weight_bytes=op["weight"],
        )
    for t in outputs:
        builder.output(handles[t])
    return builder.build(unit_bytes=unit_bytes, pad_to=pad_to)


def machine(
    level_bytes: list[float],
    *,
    read: list[float] | None = None,
    write: list[float] | None = None,
    flops: list[float] | None = None,
    launch_s: float = 0.0,
) -> Hardware:
    """One device; by default each level is ten times as fast as the one below it."""
    levels = len(level_bytes)
    read = read or [10.0**m for m in range(levels)]
    return Hardware(
        flops_per_s=[flops or [1.0] * len(OP_CLASSES)],
        level_bytes=[level_bytes],
        read_bytes_per_s=[read],
        write_bytes_per_s=[write or read],
        link_bytes_per_s=[[1.0]],
        link_latency_s=[[0.0]],
        launch_s=[launch_s],
    )


def random_graph(
    rng: np.random.Generator,
    ops: int,
    *,
    most_inputs: int = 4,
    most_bytes: int = 100,
    unit_bytes: int | None = None,
    pad_to: tuple[int, int, int] | None = None,
) -> Graph:
    """Multi-output ops, repeated uses, dead ops and tensors, zero sizes, far and near uses."""
    entries: list[dict[str, Any]] = []
    made = 0
    for _ in range(ops):
        count = int(rng.integers(0, most_inputs + 1)) if made else 0
        recent = rng.random() < 0.5
        low = max(0, made - 3) if recent else 0
        sizes = rng.integers(0, most_bytes + 1, rng.choice([0, 1, 1, 1, 2, 3]))
        sizes = sizes * (rng.random(sizes.shape) < 0.85)
        entries.append(
            {
                "kind": OP_CLASSES[rng.integers(len(OP_CLASSES))],
                "inputs": rng.integers(low, made, count).tolist() if count else [],
                "sizes": sizes.tolist(),
                "flops": float(rng.integers(0, 200)) * (rng.random() < 0.8),
                "weight": int(rng.integers(0, most_bytes + 1)) * int(rng.random() < 0.6),
            }
        )
        made += len(sizes)
    outputs = rng.integers(0, made, rng.integers(0, 3)).tolist() if made else []
    return build(entries, outputs, unit_bytes=unit_bytes, pad_to=pad_to)


def random_machine(
    rng: np.random.Generator, levels: int, *, most_bytes: int = 100, tight: float = 4.0
) -> Hardware:
    """Capacities about `tight` times a typical size; sometimes zero, sometimes unlimited."""
    capacity = np.floor(rng.random(levels) * tight * most_bytes)
    capacity[rng.random(levels) < 0.1] = 0
    capacity[rng.random(levels) < 0.05] = np.inf
    return machine(
        capacity.tolist(),
        read=(10.0 ** rng.uniform(0, 3, levels)).tolist(),
        write=(10.0 ** rng.uniform(0, 3, levels)).tolist(),
        flops=(10.0 ** rng.uniform(0, 3, len(OP_CLASSES))).tolist(),
        launch_s=float(rng.choice([0.0, 0.1])),
    )


def random_maps(
    rng: np.random.Generator, ops: int, levels: int, count: int
) -> tuple[np.ndarray, np.ndarray]:
    """[count, ops] weights and activations; the first maps lean to the slow level, so that some
    are valid."""
    lean = np.linspace(0.0, 1.0, count)[:, None]

    def draw() -> np.ndarray:
        levels_drawn = rng.integers(0, levels, (count, ops))
        return np.where(rng.random((count, ops)) < lean, levels_drawn, 0).astype(np.int32)

    return draw(), draw()


# Strategies give plain values, built by the test: a run-time type checker draws random numbers,
# which hypothesis refuses inside a strategy.


@st.composite
def graphs(draw: st.DrawFn, *, base: int = 0) -> tuple[list[dict[str, Any]], list[int]]:
    """Arguments of `build` for a graph that fits `PADDED`; sizes are `base` plus a small number,
    or zero."""
    ops, tensors, uses = PADDED
    size = st.one_of(st.just(0), st.integers(0, 12).map(lambda n: base + n))
    entries: list[dict[str, Any]] = []
    made = read = 0
    for _ in range(draw(st.integers(1, ops))):
        limit = min(4, uses - read) if made else 0
        source = st.integers(0, max(made - 1, 0))
        inputs = draw(st.lists(source, max_size=limit))
        sizes = draw(st.lists(size, max_size=min(3, tensors - made)))
        entries.append(
            {
                "kind": draw(st.sampled_from(OP_CLASSES)),
                "inputs": inputs,
                "sizes": sizes,
                "flops": float(draw(st.integers(0, 50))),
                "weight": draw(size),
            }
        )
        made += len(sizes)
        read += len(inputs)
    outputs = draw(st.lists(st.integers(0, made - 1), max_size=2)) if made else []
    return entries, outputs


@st.composite
def machines(draw: st.DrawFn, levels: int, *, base: int = 0) -> dict[str, Any]:
    """Arguments of `machine`: capacities of a few tensors of `base` bytes, give or take a few."""
    rate = st.sampled_from([1.0, 2.0, 3.0, 10.0, 100.0])
    capacity = st.tuples(st.integers(0, 5), st.integers(-2, 25)).map(
        lambda pair: float(max(0, pair[0] * base + pair[1]))
    )

    def rates(count: int) -> list[float]:
        return draw(st.lists(rate, min_size=count, max_size=count))

    return {
        "level_bytes": draw(st.lists(capacity, min_size=levels, max_size=levels)),
        "read": rates(levels),
        "write": rates(levels),
        "flops": rates(len(OP_CLASSES)),
        "launch_s": draw(st.sampled_from([0.0, 0.5])),
    }
