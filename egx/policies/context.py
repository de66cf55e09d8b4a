"""What graph networks need of a graph, computed once a problem and shared by all evaluations."""

from __future__ import annotations

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from egx.graph.graph import Graph
from egx.problems.base import AbstractProblem


class Edges(eqx.Module):
    """Directed edges sorted by receiver; E counts padding too, which is masked."""

    senders: Int[Array, " E"]
    receivers: Int[Array, " E"]
    mask: Bool[Array, " E"]


class GraphContext(eqx.Module):
    """Features and neighbourhoods of the ops of one graph.

    Two ops are neighbours when one reads what the other makes, however many tensors that are;
    messages run both ways, as an op's placement matters to its producers and consumers alike,
    and every real op is its own neighbour. `two_hops` is the square of that relation.
    """

    features: Float[Array, "N F"]
    mask: Bool[Array, " N"]
    edges: Edges
    two_hops: Bool[Array, "N N"]


def graph_context(problem: AbstractProblem) -> GraphContext:
    """The context of `problem`'s graph."""
    graph = problem.graph
    edges = neighbour_edges(graph)
    count = graph.num_ops
    adjacency = (
        jnp.zeros((count, count), jnp.float32)
        .at[edges.receivers, edges.senders]
        .max(edges.mask.astype(jnp.float32))
    )
    return GraphContext(
        features=problem.features,
        mask=graph.op_mask,
        edges=edges,
        two_hops=adjacency @ adjacency > 0,
    )


def neighbour_edges(graph: Graph) -> Edges:
    """Each neighbour of each op once: E = 2 U + N, duplicates and padding masked."""
    count = graph.num_ops
    own = jnp.arange(count, dtype=jnp.int32)
    producer, consumer = graph.use_producer(), graph.use_consumer
    receivers = jnp.concatenate([consumer, producer, own])
    senders = jnp.concatenate([producer, consumer, own])
    mask = jnp.concatenate([graph.use_mask, graph.use_mask, graph.op_mask])
    # Masked edges sort behind the real ones of the last op, so that receivers stay sorted.
    order = jnp.lexsort((senders, ~mask, jnp.where(mask, receivers, count - 1)))
    receivers, senders, mask = receivers[order], senders[order], mask[order]
    receivers = jnp.where(mask, receivers, count - 1)
    senders = jnp.where(mask, senders, count - 1)
    repeated = (receivers[1:] == receivers[:-1]) & (senders[1:] == senders[:-1])
    first = jnp.concatenate([jnp.ones(1, bool), ~repeated])
    return Edges(senders, receivers, mask & first)
