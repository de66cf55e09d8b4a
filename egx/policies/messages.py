"""What a message-passing network sees of a problem: ops, uses, and both orders of the uses.

Shapes: N ops, U uses, padding included.
"""

from __future__ import annotations

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from egx.problems.base import AbstractProblem
from egx.problems.execution import Execution

NODE_INPUTS = ("input_bytes", "output_bytes", "internal_bytes", "run_time")
EDGE_INPUTS = ("tensor_bytes",)


class MessageContext(eqx.Module):
    """A node an op, a directed edge a use (producer to consumer); edges are sorted by consumer,
    and `by_producer` lists them sorted by producer. Rows of padding are 0."""

    nodes: Float[Array, "N 4"]
    edges: Float[Array, "U 1"]
    mask: Bool[Array, " N"]
    use_mask: Bool[Array, " U"]
    producer: Int[Array, " U"]
    consumer: Int[Array, " U"]
    by_producer: Int[Array, " U"]


def message_context(problem: AbstractProblem) -> MessageContext:
    """The columns `NODE_INPUTS` and `EDGE_INPUTS`, each relative to its mean in the graph.

    Internal bytes are an op's weights. Run time is the mean over devices where the problem knows
    seconds, and FLOPs elsewhere.
    """
    graph = problem.graph
    nodes = [graph.input_units(), graph.output_units(), graph.weight_units]
    columns = [x.astype(jnp.float32) for x in nodes] + [run_times(problem)]
    producer = graph.use_producer()
    # Edges of padding go to the end, so that the order stays sorted.
    by_producer = jnp.argsort(jnp.where(graph.use_mask, producer, graph.num_ops), stable=True)
    edges = graph.use_units().astype(jnp.float32)
    return MessageContext(
        nodes=jnp.stack([_relative(x, graph.op_mask) for x in columns], 1),
        edges=_relative(edges, graph.use_mask)[:, None],
        mask=graph.op_mask,
        use_mask=graph.use_mask,
        producer=jnp.where(graph.use_mask, producer, graph.num_ops - 1),
        consumer=graph.use_consumer,
        by_producer=by_producer.astype(jnp.int32),
    )


def run_times(problem: AbstractProblem) -> Float[Array, " N"]:
    """Mean seconds of each op over the devices, or its FLOPs."""
    if isinstance(problem, Execution):
        return jnp.mean(problem.table.op_seconds, 1)
    return problem.graph.flops


def _relative(x: Float[Array, " K"], mask: Bool[Array, " K"]) -> Float[Array, " K"]:
    """log(1 + x / mean): sizes differ by orders of magnitude between graphs, and within some."""
    x = jnp.where(mask, x, 0.0)
    mean = jnp.sum(x) / jnp.maximum(jnp.sum(mask), 1).astype(jnp.float32)
    return jnp.log1p(x / jnp.where(mean > 0, mean, 1.0))
