"""Which device runs each op, in which order, and which ops are fused.

Semantics after Paliwal et al., "Reinforced Genetic Algorithm Learning for Optimizing Computation
Graphs", ICLR 2020 (arXiv 1905.02494), and Zhou et al., "Transferable Graph Optimizers for ML
Compilers", NeurIPS 2020 (arXiv 2010.12438), with an analytical machine or measured op seconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast, get_args

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from egx.errors import DecisionError, GraphError, HardwareError, ProblemError
from egx.graph.features import node_features
from egx.graph.graph import Graph, Model, real_sizes
from egx.hardware.spec import Hardware
from egx.host import HostOnly
from egx.problems.base import (
    AbstractOutcome,
    AbstractProblem,
    Decisions,
    GivenDecisions,
    Head,
    check_decisions,
    squared_speedup_reward,
)
from egx.problems.execution_plans.heuristics import HeuristicPlans, plan_options
from egx.simulate.execution import ExecutionRun, execute
from egx.simulate.execution_bound import makespan_bound, peak_bound
from egx.simulate.execution_table import ExecutionTable, Transfers, execution_table
from egx.simulate.host_case import HostCase, case_arrays, host_case
from egx.simulate.timeline import Timeline, timeline
from egx.zoo.common import layer_numbers

DECISIONS = ("fusion", "device", "priority", "transfer_priority")
OPTIONS = {
    "objective": ("makespan", "peak_memory"),
    "order": ("static", "runtime"),
    "transfers": get_args(Transfers),
}
_LARGEST = float(np.finfo(np.float32).max)


class ExecutionOutcome(AbstractOutcome):
    """The value of one plan; `peak_units` [D] is exact, weights included."""

    cost: Float[Array, ""]
    feasible: Bool[Array, ""]
    reward: Float[Array, ""]
    makespan_s: Float[Array, ""]
    peak_units: Int[Array, " D"]
    unit_bytes: Int[Array, ""]

    @property
    def peak_bytes(self) -> np.ndarray:
        """Peak of each device in bytes, int64, on the host."""
        units = np.asarray(self.peak_units, np.int64)
        return units * np.asarray(self.unit_bytes, np.int64)[..., None]


class Execution(AbstractProblem):
    """Makespan under memory limits, or peak memory, of a graph on D devices.

    Decisions, each decided (a head), given without being decided, or left at its default:
    `device` int [N] (device 0), `priority` float [N], higher first (all equal; run-time order:
    first come, first served), `transfer_priority` float [U] (transfers go with their producer),
    `fusion` int [N], 0 for none (0).
    """

    graph: Graph
    hardware: Hardware
    table: ExecutionTable
    capacity_units: Int[Array, " D"]
    layer: Int[Array, " N"]
    longest_s: Float[Array, ""]
    reference: Decisions
    reference_cost: Float[Array, ""]
    decide: tuple[str, ...] = eqx.field(static=True)
    objective: str = eqx.field(static=True)
    order: str = eqx.field(static=True)
    transfers: Transfers = eqx.field(static=True)
    fusion_levels: int = eqx.field(static=True)
    is_measured: bool = eqx.field(static=True)
    model: HostOnly[Model | None] = eqx.field(static=True)

    def __init__(
        self,
        model: Model | Graph,
        hardware: Hardware,
        *,
        decide: Sequence[str] = ("device", "priority"),
        objective: str = "makespan",
        order: str = "static",
        transfers: str = "async",
        op_seconds: Any = None,
        fusion_levels: int = 4,
    ):
        """Args:
            decide: any of fusion, device, priority, transfer_priority: the heads.
            objective: "makespan" under the devices' memory limits, or "peak_memory".
            order: "static", or "runtime" (event driven; refuses blocking transfers and transfer
                priorities).
            transfers: "async" (a transfer holds its link), "ports" (a device sends one tensor at
                a time and receives one at a time, as over one slot for all its links; in run-time
                order an op that starts claims the ways of what it will send) or "blocking" (a
                transfer holds both devices).
            op_seconds: measured seconds [ops, devices], a row per real op, in place of the
                roofline; refuses fusion.
            fusion_levels: choices of the fusion decision, 0 included.

        Raises:
            ProblemError: naming the option, its value and what was expected.
        """
        if isinstance(model, Model):
            graph, host = model.graph, model
        elif isinstance(model, Graph):
            graph, host = model, None
        else:
            raise GraphError(f"expected a Model or a Graph, got {type(model).__name__}")
        if not isinstance(hardware, Hardware):
            raise HardwareError(f"expected a Hardware, got {type(hardware).__name__}")
        for option, value in (("objective", objective), ("order", order), ("transfers", transfers)):
            if not isinstance(value, str) or value not in OPTIONS[option]:
                allowed = " or ".join(repr(x) for x in OPTIONS[option])
                raise ProblemError(f"{option} must be {allowed}, got {value!r}")
        if not isinstance(fusion_levels, int) or isinstance(fusion_levels, bool):
            raise ProblemError(f"fusion_levels must be a whole number, got {fusion_levels!r}")
        if fusion_levels < 1:
            raise ProblemError(f"fusion_levels must be 1 or more, got {fusion_levels}")
        if order == "runtime" and transfers == "blocking":
            raise ProblemError(
                "order='runtime' has eager transfers; transfers='blocking' is refused"
            )
        self.graph = graph
        self.hardware = hardware
        self.objective = objective
        self.order = order
        self.transfers = cast(Transfers, transfers)
        self.fusion_levels = fusion_levels
        self.is_measured = op_seconds is not None
        self.decide = self._checked_decide(decide)
        self.model = HostOnly(host)
        seconds = None if op_seconds is None else _checked_seconds(graph, hardware, op_seconds)
        self.table = _table(graph, hardware, seconds)
        self.capacity_units = hardware.capacity_units(graph.unit_bytes)[:, 0]
        # An array, not the names: what a program depends on must not hide in a label.
        numbers = np.full(graph.num_ops, -1, np.int32) if host is None else layer_numbers(host)
        self.layer = jax.device_put(numbers)
        self.longest_s = _longest_s(graph, hardware, self.table)
        # The reference is given by its absence; heads get arrays that stand for the same plan.
        run = self._run({}, trace=order == "runtime")
        self.reference = self._as_heads(run)
        self.reference_cost = self._value(run)[0]

    @property
    def heads(self) -> dict[str, Head]:
        return {name: self._head(name) for name in self.decide}

    @property
    def features(self) -> Float[Array, "N F"]:
        """The node features, then each op's mean seconds over the devices as a share of the
        longest op's, and its least seconds as a share of its mean."""
        seconds = self.table.op_seconds[: self.graph.num_ops]
        mean = jnp.mean(seconds, 1)
        longest = jnp.max(mean)
        share = mean / jnp.where(longest > 0, longest, 1.0)
        spread = jnp.min(seconds, 1) / jnp.where(mean > 0, mean, 1.0)
        return jnp.concatenate([node_features(self.graph), share[:, None], spread[:, None]], 1)

    @property
    def op_seconds(self) -> Float[np.ndarray, "ops D"] | None:
        """The measured seconds, a row per real op; None where the roofline holds. On the host."""
        if not self.is_measured:
            return None
        return np.asarray(self.table.op_seconds)[: real_sizes(self.graph)[0]]

    def evaluate(self, decisions: GivenDecisions) -> ExecutionOutcome:
        run = self._run(self._checked(decisions))
        cost, feasible, excess = self._value(run)
        reward = jnp.where(
            feasible,
            squared_speedup_reward(self.reference_cost, cost),
            -(1.0 + excess / (1.0 + excess)),
        )
        return ExecutionOutcome(
            cost=cost,
            feasible=feasible,
            reward=jnp.minimum(reward, _LARGEST),
            makespan_s=jnp.minimum(run.makespan_s, _LARGEST),
            peak_units=run.peak_units,
            unit_bytes=self.graph.unit_bytes,
        )

    def heuristics(self) -> Mapping[str, Decisions]:
        """Plans that need no search, each made on the host when it is looked at: "heft" (list
        scheduling by critical path), "memory_greedy" (one device, always the op that frees most),
        "memory_spread" (the same order, spread by least peak) and "expert" (layers to devices in
        turn where the model's names have layers, blocks by depth elsewhere). None of them fuses.

        Where fusion is decided also, with everything fused: "tensorflow" (one device, first come,
        first served), "heft_fused", "expert_fused" and "blocks_fused" (blocks of whole layers).

        There and in run-time order also "heft_readers": list scheduling that counts what it takes
        to bring together what an op makes and what its readers already have on other devices.

        Under `jit` and `vmap` a look becomes a callback to the host, once a problem of a batch.
        """
        ops, uses = self.graph.num_ops, self.graph.num_uses
        shapes = {
            name: jax.ShapeDtypeStruct(
                (self.length(head),), jnp.float32 if head.choices == "real" else jnp.int32
            )
            for name, head in self.heads.items()
        }
        options = plan_options(
            self.decide,
            ops=ops,
            uses=uses,
            transfers=self.transfers,
            by_bytes=self.objective == "peak_memory",
            runtime=self.order == "runtime",
            fusion_levels=self.fusion_levels,
        )
        arrays = case_arrays(self.graph, self.table, self.capacity_units, self.layer)
        return HeuristicPlans(self.reference, arrays, shapes, options)

    def lower_bound(self) -> float:
        """Seconds, or bytes, that no plan undercuts whose undecided decisions say nothing of
        fusion; cheap and proven, also beside the simulator's rounding. On the host."""
        fuses = "fusion" in self.decide
        case = self.host_case()
        if self.objective == "peak_memory":
            return float(np.float32(peak_bound(case, fuses=fuses))) * case.unit_bytes
        return makespan_bound(case, fuses=fuses)

    def host_case(self) -> HostCase:
        """The numbers of a concrete problem without padding, for algorithms on the host."""
        return host_case(case_arrays(self.graph, self.table, self.capacity_units, self.layer))

    def timeline(self, decisions: GivenDecisions) -> Timeline:
        """When and where every op and transfer runs, and live memory along items and along time:
        the second curve may be higher than the peak that counts. On the host."""
        checked = self._checked(decisions)
        run = self._run(checked, trace=True)
        assert run.trace is not None
        device = checked.get("device", np.zeros(self.graph.num_ops, np.int32))
        return timeline(
            self.graph,
            run.trace,
            np.asarray(device),
            None if run.root is None else np.asarray(run.root),
            self.hardware.num_devices,
        )

    def measured(self, cost: Float[Array, ""]) -> ExecutionOutcome:
        cost = jnp.asarray(cost, jnp.float32)
        return ExecutionOutcome(
            cost=cost,
            feasible=jnp.ones_like(cost, bool),
            reward=jnp.minimum(squared_speedup_reward(self.reference_cost, cost), _LARGEST),
            makespan_s=cost,
            peak_units=jnp.zeros((*cost.shape, self.hardware.num_devices), jnp.int32),
            unit_bytes=jnp.broadcast_to(self.graph.unit_bytes, cost.shape),
        )

    def failed(self) -> ExecutionOutcome:
        """Worse than any plan: everything on the device that can hold the least."""
        units = jnp.sum(self.graph.weight_units) + jnp.sum(self.graph.tensor_units)
        everywhere = jnp.broadcast_to(units, (self.hardware.num_devices,))
        if self.objective == "makespan":
            cost = self._penalty_s(self._excess(everywhere))
        else:
            cost = self._bytes(units)
        return ExecutionOutcome(
            cost=jnp.maximum(cost, self.reference_cost),
            feasible=jnp.zeros((), bool),
            reward=jnp.full((), -2.0, jnp.float32),
            makespan_s=self.longest_s,
            peak_units=everywhere,
            unit_bytes=self.graph.unit_bytes,
        )

    # Decisions.

    def _head(self, name: str) -> Head:
        if name == "fusion":
            return Head("op", self.fusion_levels)
        if name == "device":
            return Head("op", self.hardware.num_devices)
        return Head("op" if name == "priority" else "use", "real")

    def _refused(self) -> dict[str, str]:
        refused = {}
        if self.order == "runtime":
            refused["transfer_priority"] = "order='runtime' sends eagerly, in use order"
        if self.is_measured:
            refused["fusion"] = "op_seconds are of single ops and say nothing about fused ones"
        return refused

    def _checked_decide(self, decide: Sequence[str]) -> tuple[str, ...]:
        if isinstance(decide, str):
            raise ProblemError(f"decide must be a sequence of names, got the string {decide!r}")
        if not isinstance(decide, Iterable):
            raise ProblemError(f"decide must be a sequence of names, got {decide!r}")
        names = list(decide)
        unknown = [name for name in names if name not in DECISIONS]
        if unknown:
            raise ProblemError(f"decide names {unknown}; possible are {', '.join(DECISIONS)}")
        if len(set(names)) != len(names):
            raise ProblemError(f"decide names a decision twice: {names}")
        for name, why in self._refused().items():
            if name in names:
                raise ProblemError(f"{name!r} cannot be decided: {why}")
        return tuple(name for name in DECISIONS if name in names)

    def _checked(self, decisions: GivenDecisions) -> Decisions:
        refused = self._refused()
        for name, why in refused.items():
            if name in decisions:
                raise DecisionError(f"decision {name!r} is refused: {why}")
        optional = {name: self._head(name) for name in DECISIONS if name not in refused}
        return check_decisions(self, decisions, optional=optional)

    def _as_heads(self, run: ExecutionRun) -> Decisions:
        """The reference as decisions: first come, first served becomes the priorities that give
        the same order on device 0."""
        n, uses = self.graph.num_ops, self.graph.num_uses
        priority = jnp.zeros(n, jnp.float32)
        if self.order == "runtime" and run.trace is not None:
            place = jnp.where(self.graph.op_mask, run.trace.place, n)
            priority = 1.0 - place.astype(jnp.float32) / n
        every = {
            "fusion": jnp.zeros(n, jnp.int32),
            "device": jnp.zeros(n, jnp.int32),
            "priority": priority,
            "transfer_priority": jnp.zeros(uses, jnp.float32),
        }
        return {name: every[name] for name in self.decide}

    # Value.

    def _run(self, decisions: Decisions, *, trace: bool = False) -> ExecutionRun:
        return _execute(
            self.graph,
            self.table,
            decisions,
            runtime=self.order == "runtime",
            transfers=self.transfers,
            trace=trace,
        )

    def _value(self, run: ExecutionRun) -> tuple[Array, Array, Array]:
        """(cost, feasible, excess as a fraction of capacity)."""
        if self.objective == "peak_memory":
            none = jnp.zeros((), jnp.float32)
            return self._bytes(jnp.max(run.peak_units)), jnp.ones((), bool), none
        feasible = jnp.all(run.peak_units <= self.capacity_units)
        excess = self._excess(run.peak_units)
        cost = jnp.where(feasible, run.makespan_s, self._penalty_s(excess))
        return jnp.minimum(cost, _LARGEST), feasible, excess

    def _excess(self, peak_units: Int[Array, " D"]) -> Float[Array, ""]:
        over = jnp.maximum(peak_units - self.capacity_units, 0).astype(jnp.float32)
        return jnp.max(over / jnp.maximum(self.capacity_units, 1).astype(jnp.float32))

    def _penalty_s(self, excess: Float[Array, ""]) -> Float[Array, ""]:
        """Above every feasible makespan, and ordered by excess."""
        return jnp.minimum((self.longest_s + 1e-9) * (2.0 + excess), _LARGEST)

    def _bytes(self, units: Int[Array, ""]) -> Float[Array, ""]:
        return units.astype(jnp.float32) * self.graph.unit_bytes.astype(jnp.float32)


def _checked_seconds(graph: Graph, hardware: Hardware, op_seconds: Any) -> Float[Array, "N D"]:
    ops = real_sizes(graph)[0]
    expected = (ops, hardware.num_devices)
    try:
        seconds = np.asarray(op_seconds, np.float64)
    except (TypeError, ValueError):
        raise ProblemError(
            f"op_seconds must be numbers [ops, devices], got {op_seconds!r}"
        ) from None
    if seconds.shape != expected:
        raise ProblemError(
            f"op_seconds must have shape {expected} (a row per real op, a column per device), "
            f"got {seconds.shape}"
        )
    wrong = np.argwhere(~np.isfinite(seconds) | (seconds < 0))
    if wrong.size:
        op, device = wrong[0]
        raise ProblemError(
            f"op_seconds[{op}, {device}] must be finite and not negative, got {seconds[op, device]}"
        )
    padded = np.zeros((graph.num_ops, hardware.num_devices), np.float32)
    padded[:ops] = seconds
    return jnp.asarray(padded)


def _longest_s(graph: Graph, hardware: Hardware, table: ExecutionTable) -> Float[Array, ""]:
    """U of the semantics: every op on its slowest device, every use over the slowest link. Added
    up in double precision on the host: it must stand above sums that were rounded."""
    devices = hardware.num_devices
    ops, _, uses = real_sizes(graph)
    total = np.asarray(table.op_seconds, np.float64)[:ops].max(1).sum()
    if devices > 1:
        off = ~np.eye(devices, dtype=bool)
        rate = np.asarray(hardware.link_bytes_per_s, np.float64)[off]
        latency = np.asarray(hardware.link_latency_s, np.float64)[off]
        moved = np.asarray(table.use_bytes, np.float64)[:uses]
        for start in range(0, uses, 65536):
            part = moved[start : start + 65536, None]
            total += (latency + part / rate).max(1).sum()
    return jnp.asarray(min(total, _LARGEST), jnp.float32)


@eqx.filter_jit
def _table(graph: Graph, hardware: Hardware, op_seconds: Array | None) -> ExecutionTable:
    return execution_table(graph, hardware, op_seconds)


@eqx.filter_jit
def _execute(
    graph: Graph,
    table: ExecutionTable,
    decisions: Decisions,
    *,
    runtime: bool,
    transfers: Transfers,
    trace: bool,
) -> ExecutionRun:
    return execute(graph, table, decisions, runtime=runtime, transfers=transfers, trace=trace)
