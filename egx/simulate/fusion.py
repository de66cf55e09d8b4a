"""Which ops are fused into one, and what such a cluster costs (semantics 4.4).

Shapes: N ops, U uses, D devices, P candidates (innermost).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from egx.graph.graph import CONTRACTION, OPAQUE, REDUCTION, Graph
from egx.simulate.batching import Arrays, over_population
from egx.simulate.execution_table import ExecutionTable, roofline_s
from egx.simulate.indexing import put, take

LARGEST = 64
# A cluster's size and, far above it, whether it holds a contraction: one number to look up.
_HOLDS_CONTRACTION = 1024


def clusters(graph: Graph, fusion: Int[Array, " N"]) -> Int[Array, " N"]:
    """The root of each op's cluster: its last op, the op itself where nothing is fused.

    Padding keeps to itself.
    """

    def population(graph: Graph, common: Arrays, each: Arrays) -> Array:
        return cluster_roots(graph, each["fusion"].T).T

    return over_population(population)(graph, {"fusion": fusion})


def cluster_roots(graph: Graph, fusion: Int[Array, "N P"]) -> Int[Array, "N P"]:
    """`clusters` of P candidates, population innermost."""
    n, uses = graph.num_ops, graph.num_uses
    population = fusion.shape[1]
    every = jnp.arange(n, dtype=jnp.int32)
    alone = jnp.broadcast_to(every[:, None], (n, population))
    if uses == 0:
        return alone
    lane = jnp.arange(population, dtype=jnp.int32)
    producer = jnp.where(graph.use_mask, graph.use_producer(), n - 1)
    held = jnp.zeros(n, bool).at[graph.tensor_producer].max(graph.tensor_is_output)
    joins = ~held & (graph.op_class != REDUCTION) & (graph.op_class != OPAQUE)
    is_opaque = graph.op_class == OPAQUE
    # Uses by producer, the last producer first; a producer's uses stand together.
    order = jnp.argsort(jnp.where(graph.use_mask, -producer, 1), stable=True)
    producer, consumer = producer[order], graph.use_consumer[order]
    real = graph.use_mask[order]
    differs = jnp.append(producer[1:] != producer[:-1], True)
    is_last = differs | jnp.append(~real[1:], True)
    is_first = jnp.append(True, differs[:-1])
    count = jnp.sum(real, dtype=jnp.int32)

    def visit(level: Array, k: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        root, weight, target, together = carry
        v, c = producer[k], consumer[k]
        here = v * population + lane
        # What v joined earlier may have joined another cluster since; it was visited before v,
        # so one look brings v up to date, and every later op already is.
        own = take(root, take(root, here) * population + lane)
        reads = take(root, c * population + lane)
        together = jnp.where(is_first[k], True, together & (reads == target))
        target = jnp.where(is_first[k], reads, target)

        at = target * population + lane
        theirs = take(weight, at)
        both = take(weight, here) + theirs
        fits = (both < 2 * _HOLDS_CONTRACTION) & (both % _HOLDS_CONTRACTION <= LARGEST)
        asked = take(levels, here) == level
        join = asked & together & fits & joins[v] & is_last[k] & ~take(is_opaque, target)
        weight = put(weight, at, jnp.where(join, both, theirs))
        root = put(root, here, jnp.where(join, target, own))
        return root, weight, target, together

    def one_level(passed: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        nowhere = jnp.zeros(population, jnp.int32)
        start = (*carry, nowhere, jnp.ones(population, bool))
        level = highest - passed
        out = jax.lax.fori_loop(0, count, lambda k, c: visit(level, k, c), start)
        return out[0], out[1]

    levels, highest = fusion.reshape(-1), jnp.max(fusion)
    weight = jnp.where(graph.op_class == CONTRACTION, _HOLDS_CONTRACTION + 1, 1)
    weight = jnp.repeat(weight.astype(jnp.int32), population)
    root, _ = jax.lax.fori_loop(0, highest, one_level, (alone.reshape(-1), weight))
    return root.reshape(n, population)


def cluster_seconds(
    table: ExecutionTable, device: Int[Array, "N P"], root: Int[Array, "N P"]
) -> Float[Array, "N P"]:
    """Seconds of each cluster on its root's device, at the root's entry.

    Compute adds up in the order of ops, whatever the batch: what a search ranks by must not
    depend on it.
    """
    n, population = device.shape
    lane = jnp.arange(population, dtype=jnp.int32)
    on = jnp.take_along_axis(device, root, 0)

    def per_device(values: Float[Array, " D"]) -> Float[Array, "N P"]:
        return values[device]

    def add_op(carry, i):
        compute, weights = carry
        at = root[i] * population + lane
        compute = put(compute, at, take(compute, at) + take(table.compute_s[i], on[i]))
        weights = put(weights, at, take(weights, at) + table.weight_units[i])
        return (compute, weights), None

    zeros = jnp.zeros(n * population, jnp.int32)
    start = (zeros.astype(jnp.float32), zeros)
    (compute, read), _ = jax.lax.scan(add_op, start, jnp.arange(n, dtype=jnp.int32))

    def add_use(carry, use):
        read, seen = carry
        tensor = table.use_tensor[use]
        safe = jnp.minimum(tensor, table.num_tensors - 1)
        consumer = jnp.minimum(table.use_consumer[use], n - 1)
        reader = root[consumer]
        outside = (root[table.tensor_producer[safe]] != reader) & table.use_mask[use]
        at = reader * population + lane
        new = outside & (take(seen, at) != tensor)
        seen = put(seen, at, jnp.where(new, tensor, take(seen, at)))
        return (
            put(read, at, take(read, at) + jnp.where(new, table.tensor_units[safe], 0)),
            seen,
        ), None

    if table.num_uses > 0:
        # A tensor's uses stand together, so one mark a cluster tells whether it was counted.
        (read, _), _ = jax.lax.scan(add_use, (read, zeros - 1), table.by_tensor)
    return roofline_s(
        compute.reshape(n, population),
        read.reshape(n, population),
        table.output_units[:, None],
        table.unit_bytes,
        per_device(table.read_bytes_per_s),
        per_device(table.write_bytes_per_s),
        per_device(table.launch_s),
    )
