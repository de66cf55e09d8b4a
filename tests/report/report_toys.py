"""A machine and a model small enough to count on fingers, for the tests of reports."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np

from egx.graph.builder import GraphBuilder
from egx.graph.graph import Model
from egx.hardware.spec import Hardware
from egx.problems.memory_placement import MemoryPlacement

KIB = 1024


@functools.cache
def toy_model(pad_to=None) -> Model:
    """Three layers and a pool: weights 4, 0, 2, 3 KiB, outputs 2, 1, 1, 1 KiB; op 0 is read twice.

    Lives: a 0-2, b 1-2, c 2-3, d 3 (an output).
    """
    builder = GraphBuilder("toy")
    (a,) = builder.op(
        "a", kind="contraction", op_type="conv", inputs=[], output_bytes=[2 * KIB], flops=1e6,
        weight_bytes=4 * KIB,
    )  # fmt: skip
    (b,) = builder.op(
        "b", kind="reduction", op_type="pool", inputs=[a], output_bytes=[KIB], flops=1e4
    )
    (c,) = builder.op(
        "c[1]", kind="contraction", op_type="conv", inputs=[a, b], output_bytes=[KIB], flops=1e6,
        weight_bytes=2 * KIB,
    )  # fmt: skip
    (d,) = builder.op(
        "d", kind="contraction", op_type="matmul", inputs=[c], output_bytes=[KIB], flops=1e6,
        weight_bytes=3 * KIB,
    )  # fmt: skip
    builder.output(d)
    return builder.build_model(pad_to=pad_to)


def toy_hardware() -> Hardware:
    """Level 0 unbounded, 8 KiB in the middle, 4 KiB at the top."""
    return Hardware(
        flops_per_s=np.full((1, 5), 1e12),
        level_bytes=[[np.inf, 8 * KIB, 4 * KIB]],
        read_bytes_per_s=[[1e9, 1e10, 1e11]],
        write_bytes_per_s=[[1e9, 1e10, 1e11]],
        link_bytes_per_s=[[0.0]],
        link_latency_s=[[0.0]],
        launch_s=[1e-6],
        name="toy machine",
        level_names=["DRAM", "LLC", "SRAM"],
    )


@functools.cache
def toy_problem(prefetch: int = 0, pad_to=None) -> MemoryPlacement:
    return MemoryPlacement(toy_model(pad_to), toy_hardware(), prefetch=prefetch)


def maps(problem: MemoryPlacement) -> dict:
    """A valid map: the weights of a on LLC, the rest on DRAM; all activations on SRAM."""
    n = problem.graph.num_ops
    return {
        "weights": jnp.zeros(n, jnp.int32).at[0].set(1),
        "activations": jnp.full(n, 2, jnp.int32),
    }
