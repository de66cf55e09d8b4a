"""A small network that says how likely a change of one op's decision is to improve a plan.

It sees the plan at hand: where the op's neighbours run, how full and how busy both devices are,
where the op stands in the order and between its producers and consumers. It knows no number of
devices and no size of a graph, so that one network serves all.

Shapes: N ops, U uses, D devices, C changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from egx.errors import SearchError
from egx.policies.base import AbstractPolicy
from egx.policies.layers import Dense, Draws, initialised
from egx.problems.base import AbstractProblem
from egx.problems.execution import Execution

INPUTS = (
    "changes_device", "changes_priority", "producers_there", "consumers_there", "load_here",
    "load_there", "peak_here", "peak_there", "step", "distance", "run_time", "output_bytes",
    "input_bytes", "rank", "below_producers", "above_consumers", "peak_memory", "devices",
    "transfer_time",
)  # fmt: skip


class MoveContext(eqx.Module):
    """What does not change with the plan; rows of padding are 0."""

    ops: Float[Array, "N 3"]
    seconds: Float[Array, "N D"]
    units: Float[Array, " U"]
    producer: Int[Array, " U"]
    consumer: Int[Array, " U"]
    use_mask: Bool[Array, " U"]
    problem: Float[Array, " 3"]


class PlanView(eqx.Module):
    """A plan as the network sees it: `producers` and `consumers` are the shares of an op's input
    and output bytes on each device, `load` is each device's share of the work times D, and `peak`
    its peak memory over the highest one."""

    device: Int[Array, " N"]
    rank: Float[Array, " N"]
    producers: Float[Array, "N D"]
    consumers: Float[Array, "N D"]
    load: Float[Array, " D"]
    peak: Float[Array, " D"]
    below: Float[Array, " N"]
    above: Float[Array, " N"]


def move_context(problem: Execution) -> MoveContext:
    """The context of `problem`."""
    graph, table = problem.graph, problem.table
    mask = graph.op_mask
    seconds = jnp.where(mask[:, None], table.op_seconds[: graph.num_ops], 0.0)
    units = graph.use_units().astype(jnp.float32)
    columns = [
        jnp.mean(seconds, 1),
        graph.output_units().astype(jnp.float32),
        graph.input_units().astype(jnp.float32),
    ]
    devices = problem.hardware.num_devices
    between = ~jnp.eye(devices, dtype=bool)
    hardware = problem.hardware
    per_byte = jnp.where(between, 1.0 / hardware.link_bytes_per_s, 0.0)
    delay = jnp.where(between, hardware.link_latency_s, 0.0)
    pairs = max(devices * (devices - 1), 1)
    moved = _mean(units, graph.use_mask) * graph.unit_bytes.astype(jnp.float32)
    transfer = (jnp.sum(per_byte) * moved + jnp.sum(delay)) / pairs
    run = _mean(columns[0], mask)
    by_bytes = 1.0 if problem.objective == "peak_memory" else 0.0
    return MoveContext(
        ops=jnp.stack([_relative(x, mask) for x in columns], 1),
        seconds=seconds,
        units=units,
        producer=jnp.where(graph.use_mask, graph.use_producer(), graph.num_ops - 1),
        consumer=jnp.where(graph.use_mask, graph.use_consumer, graph.num_ops - 1),
        use_mask=graph.use_mask,
        problem=jnp.stack([
            jnp.asarray(by_bytes, jnp.float32),
            jnp.log2(jnp.asarray(devices, jnp.float32)) / 2.0,
            jnp.log1p(transfer / jnp.where(run > 0, run, 1.0)),
        ]),
    )  # fmt: skip


def plan_view(
    context: MoveContext,
    device: Int[Array, " N"],
    rank: Float[Array, " N"],
    peak: Float[Array, " D"],
) -> PlanView:
    """What is to be seen of one plan; `rank` is the priority in [0, 1], `peak` in any unit."""
    count, devices = context.seconds.shape
    choices = jnp.arange(devices, dtype=jnp.int32)
    on = (device[:, None] == choices).astype(jnp.float32)

    def shares(of: Array, neighbour: Array) -> Array:
        weight = context.units[:, None] * on[neighbour]
        total = jax.ops.segment_sum(weight, of, count)
        whole = jnp.sum(total, 1, keepdims=True)
        return total / jnp.where(whole > 0, whole, 1.0)

    # Neighbours that no use names leave the op's own rank.
    lowest = jnp.where(context.use_mask, rank[context.producer], jnp.inf)
    highest = jnp.where(context.use_mask, rank[context.consumer], -jnp.inf)
    lowest = jax.ops.segment_min(lowest, context.consumer, count)
    highest = jax.ops.segment_max(highest, context.producer, count)
    work = jnp.sum(on * context.seconds, 0)
    total = jnp.sum(work)
    top = jnp.max(peak)
    return PlanView(
        device=device,
        rank=rank,
        producers=shares(context.consumer, context.producer),
        consumers=shares(context.producer, context.consumer),
        load=work * devices / jnp.where(total > 0, total, 1.0),
        peak=peak / jnp.where(top > 0, top, 1.0),
        below=jnp.where(jnp.isfinite(lowest), lowest - rank, 0.0),
        above=jnp.where(jnp.isfinite(highest), rank - highest, 0.0),
    )


def move_features(
    context: MoveContext,
    view: PlanView,
    op: Int[Array, " C"],
    is_device: Bool[Array, " C"],
    value: Float[Array, " C"],
) -> Float[Array, "C F"]:
    """The columns `INPUTS` of changes: the device, else the priority, of `op` becomes `value`."""
    here = view.device[op]
    there = jnp.where(is_device, value.astype(jnp.int32), here)
    step = jnp.where(is_device, 0.0, value - view.rank[op])
    count = jnp.asarray(context.seconds.shape[0], jnp.float32)
    kind = is_device.astype(jnp.float32)
    columns = [
        kind, 1.0 - kind,
        view.producers[op, there] - view.producers[op, here],
        view.consumers[op, there] - view.consumers[op, here],
        view.load[here] - 1.0, view.load[there] - 1.0,
        view.peak[here], view.peak[there],
        2.0 * step, jnp.log1p(count * jnp.abs(step)) / 3.0,
        *jnp.moveaxis(context.ops[op], -1, 0),
        view.rank[op], view.below[op], view.above[op],
        *jnp.broadcast_to(context.problem[:, None], (3, op.shape[0])),
    ]  # fmt: skip
    return jnp.stack(columns, -1)


class MovePolicy(AbstractPolicy):
    """Two layers from `INPUTS` to the log odds that a change improves a plan."""

    hidden: Dense
    final: Dense
    width: int = eqx.field(static=True)

    def __init__(self, *, width: int = 16, key: PRNGKeyArray):
        if width < 1:
            raise SearchError(f"width must be 1 or more, got {width}")

        def build(draws: Draws) -> tuple[Dense, Dense]:
            return Dense(len(INPUTS), width, draws), Dense(width, 1, draws)

        self.hidden, self.final = initialised(build, key)
        self.width = width

    def odds(self, features: Float[Array, "C F"]) -> Float[Array, " C"]:
        """The log odds of each change."""
        return self.final(jnp.tanh(self.hidden(features)))[..., 0]

    def __call__(self, problem: AbstractProblem) -> Any:
        """The log odds [N, D] of moving each op of the reference to each device."""
        if not scores(problem):
            raise SearchError(
                "this policy judges changes of device and priority of an Execution problem, "
                f"but {type(problem).__name__} decides {', '.join(problem.heads)}"
            )
        assert isinstance(problem, Execution)
        context = move_context(problem)
        devices, count = problem.hardware.num_devices, problem.graph.num_ops
        plan = problem.reference
        view = plan_view(context, plan["device"], plan["priority"], jnp.ones(devices))
        op = jnp.repeat(jnp.arange(count, dtype=jnp.int32), devices)
        value = jnp.tile(jnp.arange(devices, dtype=jnp.float32), count)
        features = move_features(context, view, op, jnp.ones(op.shape, bool), value)
        return self.odds(features).reshape(count, devices)

    def decide(self, problem: AbstractProblem, *, key: PRNGKeyArray | None = None) -> Any:
        raise SearchError("this policy judges changes of plans; give it to regal_plus")

    def config(self) -> dict[str, Any]:
        return {"inputs": list(INPUTS), "width": self.width}

    @classmethod
    def from_config(cls, config: Mapping[str, Any], key: PRNGKeyArray) -> MovePolicy:
        if tuple(config["inputs"]) != INPUTS:
            raise SearchError(f"inputs {config['inputs']}; this egx has {list(INPUTS)}")
        return cls(width=config["width"], key=key)


def scores(problem: AbstractProblem) -> bool:
    """Whether changes of a problem's plans can be judged: device and priority are decided."""
    return isinstance(problem, Execution) and {"device", "priority"} <= set(problem.heads)


def _mean(x: Array, mask: Array) -> Array:
    count = jnp.maximum(jnp.sum(mask), 1).astype(jnp.float32)
    return jnp.sum(jnp.where(mask, x, 0.0)) / count


def _relative(x: Float[Array, " K"], mask: Bool[Array, " K"]) -> Float[Array, " K"]:
    """log(1 + x / mean), as everywhere networks see sizes."""
    mean = _mean(x, mask)
    return jnp.where(mask, jnp.log1p(x / jnp.where(mean > 0, mean, 1.0)), 0.0)
