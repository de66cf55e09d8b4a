"""A graph on two devices whose timeline is known by hand; every number is a short fraction."""

from __future__ import annotations

import functools

import numpy as np

import egx
from egx.graph.builder import GraphBuilder
from egx.graph.graph import Model
from egx.hardware.spec import Hardware


def fork() -> Model:
    """a feeds b and c, which feed d; 4, 2, 3 and 1 bytes."""
    builder = GraphBuilder("fork")
    (a,) = builder.op(
        "net/a",
        kind="contraction",
        op_type="conv",
        inputs=[],
        output_bytes=[4],
        flops=2,
        weight_bytes=8,
    )
    (b,) = builder.op(
        "net/b", kind="elementwise", op_type="add", inputs=[a], output_bytes=[2], flops=3
    )
    (c,) = builder.op(
        "net/c", kind="elementwise", op_type="mul", inputs=[a], output_bytes=[3], flops=4
    )
    (d,) = builder.op(
        "net/d", kind="reduction", op_type="sum", inputs=[b, c], output_bytes=[1], flops=1
    )
    builder.output(d)
    return builder.build_model(source="fork")


def pair(holds: float = 24.0) -> Hardware:
    """Two devices of one FLOP a second; a link moves a byte in half a second."""
    free = np.full((2, 1), np.inf)
    return Hardware(
        flops_per_s=np.ones((2, 5)),
        level_bytes=np.full((2, 1), holds),
        read_bytes_per_s=free,
        write_bytes_per_s=free,
        link_bytes_per_s=np.full((2, 2), 2.0),
        link_latency_s=np.zeros((2, 2)),
        launch_s=np.zeros(2),
        name="pair",
        level_names=["RAM"],
        device_names=["left", "right"],
    )


# a and b on the left, c on the right and back for d: 2 s, then 4 bytes in 2 s, c until 8 s,
# 3 bytes until 9.5 s, d until 10.5 s.
PLAN = {
    "device": np.array([0, 0, 1, 0], np.int32),
    "priority": np.array([3, 2, 1, 0], np.float32),
}
MAKESPAN_S = 10.5


@functools.cache
def fork_problem() -> egx.Execution:
    return egx.Execution(fork(), pair())
