"""Memory placement with probabilities for choices, differentiable.

Times are expectations under independent choices, maxima are smooth: `temperature_s` * log(sum of
exp(x / temperature_s)), which tends to the maximum as it falls and is the maximum at 0. What the
levels hold at each step is an expectation too. At temperature 0 and on maps of zeros and ones the
seconds are those of the simulator.

Shapes: N ops, U uses, M levels, `fast` levels above 0.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from egx.graph.graph import Graph
from egx.hardware.spec import Hardware
from egx.simulate.cost import compute_seconds, read_seconds, use_units, write_seconds


def relaxed_latency(
    graph: Graph,
    hardware: Hardware,
    capacity_units: Int[Array, " M"],
    weights: Float[Array, "N M"],
    activations: Float[Array, "N M"],
    *,
    temperature_s: Float[Array, ""],
    prefetch: int = 0,
) -> tuple[Float[Array, ""], Float[Array, "N fast"]]:
    """Expected seconds, and by how much each level above 0 is overfull at each step.

    The second is (units held - capacity) over the capacity, or over the largest item if no such
    item fits the level: positive where too much is held; -1 on the steps of padding. Takes time
    linear in ops and uses.
    """
    n = graph.num_ops
    overfull = _overfull(graph, capacity_units, weights, activations)
    read = jnp.sum(
        read_seconds(use_units(graph), graph, hardware) * _sources(graph, activations), 1
    )
    read = jax.ops.segment_sum(read, graph.use_consumer, n, indices_are_sorted=True)
    write = jnp.sum(write_seconds(graph.output_units(), graph, hardware) * activations, axis=1)
    load = read_seconds(graph.weight_units, graph, hardware)
    compute = compute_seconds(graph, hardware)
    launch = hardware.launch_s[0]
    if prefetch == 0:
        traffic = read + write + jnp.sum(load * weights, axis=1)
        bodies = smooth_maximum(compute, traffic, temperature_s) + launch
        return jnp.sum(jnp.where(graph.op_mask, bodies, 0.0)), overfull
    bodies = jnp.where(
        graph.op_mask, smooth_maximum(compute, read + write, temperature_s) + launch, 0.0
    )
    # An op without weights streams nothing: as if it chose no channel.
    chosen = jnp.where(graph.weight_units[:, None] > 0, weights, 0.0)
    return _prefetched(bodies, load, chosen, temperature_s, prefetch), overfull


def smooth_maximum(
    a: Float[Array, " *X"], b: Float[Array, " *X"], temperature_s: Float[Array, ""]
) -> Float[Array, " *X"]:
    """t log(exp(a / t) + exp(b / t)); the maximum at t = 0."""
    sharp = temperature_s <= 0
    scale = jnp.where(sharp, 1.0, temperature_s)
    return jnp.where(sharp, jnp.maximum(a, b), a + scale * jax.nn.softplus((b - a) / scale))


def _sources(graph: Graph, activations: Float[Array, "N M"]) -> Float[Array, "U M"]:
    return activations[graph.use_producer()]


def _prefetched(
    bodies: Float[Array, " N"],
    load: Float[Array, "N M"],
    chosen: Float[Array, "N M"],
    temperature_s: Float[Array, ""],
    prefetch: int,
) -> Float[Array, ""]:
    n, levels = load.shape
    # With a window as long as the graph no op waits for the start of another.
    window = prefetch if prefetch < n else 1

    def step(carry, row):
        # Times relative to the finish of the op before keep their digits.
        clock, free, starts = carry
        i, body, load, chosen = row
        slot = jnp.mod(i, window)
        earliest = jnp.where(i < prefetch, -clock, starts[slot])
        ready = smooth_maximum(free, jnp.broadcast_to(earliest, (levels,)), temperature_s) + load
        wait = smooth_maximum(ready, jnp.zeros(levels), temperature_s)
        wait = jnp.sum(chosen * wait)
        free = free + chosen * (ready - free) - (wait + body)
        starts = starts.at[slot].set(wait) - (wait + body)
        return (clock + wait + body, free, starts), None

    zero = jnp.zeros((), jnp.float32)
    carry = (zero, jnp.zeros(levels), jnp.zeros(window))
    rows = (jnp.arange(n), bodies, load, chosen)
    (clock, _, _), _ = jax.lax.scan(step, carry, rows)
    return clock


def _overfull(
    graph: Graph,
    capacity_units: Int[Array, " M"],
    weights: Float[Array, "N M"],
    activations: Float[Array, "N M"],
) -> Float[Array, "N fast"]:
    n, t = graph.num_ops, graph.num_tensors
    outputs = graph.output_units()
    largest = jnp.maximum(jnp.max(graph.weight_units), jnp.max(outputs))
    limit = capacity_units[1:].astype(jnp.float32)
    scale = jnp.maximum(jnp.maximum(limit, largest.astype(jnp.float32)), 1.0)
    held = jnp.cumsum(_in_units(graph.weight_units, scale) * weights[:, 1:], axis=0)[-1]
    change = _in_units(outputs, scale) * activations[:, 1:]
    if t:
        # From the step after its last one a tensor no longer counts.
        dropped = _in_units(graph.tensor_units, scale) * activations[graph.tensor_producer, 1:]
        change = change - jax.ops.segment_sum(dropped, graph.last_step() + 1, n + 1)[:n]
    excess = jnp.cumsum(change, axis=0) + held - limit / scale
    return jnp.where(graph.op_mask[:, None], excess, -1.0)


def _in_units(units: Int[Array, " X"], scale: Float[Array, " fast"]) -> Float[Array, "X fast"]:
    return units.astype(jnp.float32)[:, None] / scale
