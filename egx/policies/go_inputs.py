"""What GO's network sees of a problem: its ops, their neighbours, and what each choice means.

Shapes: N ops, U uses, F columns of an op, C choices of a decision, K columns of a choice.
"""

from __future__ import annotations

from collections.abc import Mapping

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from egx.graph.builder import OP_TYPE_BUCKETS
from egx.graph.features import NODE_FEATURES, node_features
from egx.graph.graph import OP_CLASSES, Graph
from egx.policies.base import head_choices
from egx.policies.messages import NODE_INPUTS, MessageContext, message_context, run_times
from egx.problems.base import AbstractProblem
from egx.problems.execution import Execution
from egx.problems.memory_placement import MemoryPlacement

_TYPE_BITS = (OP_TYPE_BUCKETS - 1).bit_length()
_PATHS = ("before", "after", "sending")
OP_INPUTS = len(NODE_FEATURES) + len(OP_CLASSES) + _TYPE_BITS + len(NODE_INPUTS) + len(_PATHS)

_WAVES = 16
_MACHINE = len(OP_CLASSES) + 5
CHOICE_INPUTS = 2 + _WAVES + _MACHINE


class GoContext(eqx.Module):
    """What is computed once a problem. Rows of padding are 0."""

    ops: Float[Array, "N F"]
    messages: MessageContext
    choices: dict[str, Float[Array, "_C K"]]

    @property
    def mask(self) -> Bool[Array, " N"]:
        return self.messages.mask


def go_context(problem: AbstractProblem, real_levels: int) -> GoContext:
    """The inputs of `problem`.

    An op is described by EGRL's features, its class, the bits of its type's number, its sizes and
    run time relative to the graph's mean, the longest paths before and after it as shares of the
    longest of all, and the time that sending its outputs takes relative to the mean run time.

    Raises:
        SearchError: naming a decision that is not made op by op.
    """
    graph = problem.graph
    messages = message_context(problem)
    classes = jax.nn.one_hot(graph.op_class, len(OP_CLASSES), dtype=jnp.float32)
    bits = (graph.op_type[:, None] >> jnp.arange(_TYPE_BITS, dtype=jnp.int32)) & 1
    columns = [
        node_features(graph),
        classes,
        bits.astype(jnp.float32),
        messages.nodes,
        jnp.stack(_path_columns(problem, messages), 1),
    ]
    ops = jnp.where(graph.op_mask[:, None], jnp.concatenate(columns, 1), 0.0)
    machine = _machine_columns(problem)
    choices = {}
    for name, count in head_choices(problem, real_levels):
        given = machine.get(name, jnp.zeros((count, _MACHINE), jnp.float32))
        choices[name] = jnp.concatenate([_positions(count), given], 1)
    return GoContext(ops, messages, choices)


def _path_columns(problem: AbstractProblem, messages: MessageContext) -> list[Float[Array, " N"]]:
    graph = problem.graph
    seconds = jnp.where(graph.op_mask, run_times(problem), 0.0)
    count = jnp.maximum(jnp.sum(graph.op_mask), 1).astype(jnp.float32)
    mean = jnp.sum(seconds) / count
    if isinstance(problem, Execution) and problem.hardware.num_devices > 1:
        # A transfer over the mean of the links; the diagonal stands for none.
        devices = problem.hardware.num_devices
        off = ~jnp.eye(devices, dtype=bool)
        links = devices * (devices - 1)
        rate = jnp.where(off, 1.0 / problem.hardware.link_bytes_per_s, 0.0)
        latency = jnp.where(off, problem.hardware.link_latency_s, 0.0)
        unit = graph.unit_bytes.astype(jnp.float32) * (jnp.sum(rate) / links)
        latency_s = jnp.sum(latency) / links
        sent = graph.use_units().astype(jnp.float32) * unit + latency_s
        sending = graph.output_units().astype(jnp.float32) * unit + latency_s
    else:
        sent = jnp.zeros(graph.num_uses, jnp.float32)
        sending = jnp.zeros(graph.num_ops, jnp.float32)
    before, after = longest_paths(seconds, sent, messages)
    longest = jnp.max(jnp.where(graph.op_mask, before + seconds + after, 0.0))
    scale = jnp.where(longest > 0, longest, 1.0)
    relative = jnp.log1p(sending / jnp.where(mean > 0, mean, 1.0))
    return [before / scale, after / scale, relative]


def longest_paths(
    seconds: Float[Array, " N"], sent: Float[Array, " U"], messages: MessageContext
) -> tuple[Float[Array, " N"], Float[Array, " N"]]:
    """The longest path that ends before each op and the longest that starts after it, where an op
    and a use take that long. One step a use: a round a level would take longer on deep graphs."""

    def forward(
        before: Float[Array, " N"], use: tuple[Array, ...]
    ) -> tuple[Float[Array, " N"], None]:
        producer, consumer, took, real = use
        length = before[producer] + seconds[producer] + took
        return before.at[consumer].max(jnp.where(real, length, 0.0)), None

    def backward(
        after: Float[Array, " N"], use: tuple[Array, ...]
    ) -> tuple[Float[Array, " N"], None]:
        producer, consumer, took, real = use
        length = after[consumer] + seconds[consumer] + took
        return after.at[producer].max(jnp.where(real, length, 0.0)), None

    zeros = jnp.zeros_like(seconds)
    uses = (messages.producer, messages.consumer, sent, messages.use_mask)
    before, _ = jax.lax.scan(forward, zeros, uses)
    by_producer = jax.tree.map(lambda x: x[messages.by_producer], uses)
    after, _ = jax.lax.scan(backward, zeros, by_producer, reverse=True)
    return before, after


def _positions(count: int) -> Float[Array, "C K"]:
    """Where a choice stands among the others: its share of the way, waves of it, and whether it is
    the first. Equal devices are told apart by it, in whatever number they come."""
    index = jnp.arange(count, dtype=jnp.float32)
    share = index / max(count - 1, 1)
    waves = jnp.cos(jnp.pi * share[:, None] * jnp.arange(1, _WAVES + 1, dtype=jnp.float32))
    first = (index == 0).astype(jnp.float32)
    return jnp.concatenate([share[:, None], first[:, None], waves], 1)


def _machine_columns(problem: AbstractProblem) -> Mapping[str, Float[Array, "_C K"]]:
    """Speeds and sizes of the devices or memory levels that a decision is among."""
    if isinstance(problem, Execution):
        hardware = problem.hardware
        times = [_relative(1.0 / hardware.flops_per_s)]
        times += [
            _relative(x)[:, None]
            for x in (
                1.0 / hardware.read_bytes_per_s[:, 0],
                1.0 / hardware.write_bytes_per_s[:, 0],
                hardware.launch_s,
            )
        ]
        devices = hardware.num_devices
        off = ~jnp.eye(devices, dtype=bool)
        link = jnp.sum(jnp.where(off, 1.0 / hardware.link_bytes_per_s, 0.0), 1)
        room = _room(problem.capacity_units, problem.graph)
        return {"device": jnp.concatenate([*times, _relative(link)[:, None], room[:, None]], 1)}
    if isinstance(problem, MemoryPlacement):
        hardware = problem.hardware
        times = [_relative(1.0 / hardware.read_bytes_per_s[0])[:, None]]
        times.append(_relative(1.0 / hardware.write_bytes_per_s[0])[:, None])
        room = _room(hardware.capacity_units(problem.graph.unit_bytes)[0], problem.graph)
        unused = jnp.zeros((hardware.num_levels, _MACHINE - 3), jnp.float32)
        levels = jnp.concatenate([*times, unused, room[:, None]], 1)
        return {"weights": levels, "activations": levels}
    return {}


def _relative(time: Float[Array, "C *rest"]) -> Float[Array, "C *rest"]:
    """log(1 + x / mean over choices); all 0 where nothing takes any time."""
    mean = jnp.mean(time, 0, keepdims=True)
    return jnp.log1p(time / jnp.where(mean > 0, mean, 1.0))


def _room(capacity_units: Array, graph: Graph) -> Float[Array, " C"]:
    """What fits beside all bytes of the graph: 0 nothing, 1/2 as much as there is, 1 anything."""
    total = jnp.sum(graph.weight_units) + jnp.sum(graph.tensor_units)
    capacity = capacity_units.astype(jnp.float32)
    return capacity / jnp.maximum(capacity + total.astype(jnp.float32), 1.0)
