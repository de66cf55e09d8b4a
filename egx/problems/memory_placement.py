"""Which memory level holds each op's weights and outputs, on one accelerator.

Semantics after Khadka et al., "Optimizing Memory Placement using Evolutionary Graph Reinforcement
Learning", ICLR 2021 (arXiv 2007.07298), with an analytical machine in place of the chip.
"""

from __future__ import annotations

from collections.abc import Mapping

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from egx.errors import DecisionError, GraphError, HardwareError
from egx.graph.features import node_features
from egx.graph.graph import Graph, Model
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
from egx.simulate.bound import latency_bound
from egx.simulate.breakdown import Breakdown, breakdown, lifetimes
from egx.simulate.memory import MemoryRun, MemoryTable, memory_table, run
from egx.simulate.relaxed import relaxed_latency


class MemoryOutcome(AbstractOutcome):
    """The value of one map; `moved_fraction` is the share of bytes that rectification moves."""

    cost: Float[Array, ""]
    feasible: Bool[Array, ""]
    reward: Float[Array, ""]
    latency_s: Float[Array, ""]
    moved_fraction: Float[Array, ""]


class MemoryPlacement(AbstractProblem):
    """Latency of one inference as a function of `weights` and `activations`, levels [N] each."""

    graph: Graph
    hardware: Hardware
    table: MemoryTable
    reference: Decisions
    reference_cost: Float[Array, ""]
    prefetch: int = eqx.field(static=True)
    model: HostOnly[Model | None] = eqx.field(static=True)

    def __init__(self, model: Model | Graph, hardware: Hardware, *, prefetch: int = 0):
        if isinstance(model, Model):
            graph, host = model.graph, model
        elif isinstance(model, Graph):
            graph, host = model, None
        else:
            raise GraphError(f"expected a Model or a Graph, got {type(model).__name__}")
        if not isinstance(hardware, Hardware):
            raise HardwareError(f"expected a Hardware, got {type(hardware).__name__}")
        if not isinstance(prefetch, int) or isinstance(prefetch, bool) or prefetch < 0:
            raise HardwareError(
                f"prefetch must be a whole number of ops, 0 or more, got {prefetch!r}"
            )
        self.graph = graph
        self.hardware = hardware
        self.prefetch = prefetch
        self.model = HostOnly(host)
        self.table = _table(graph, hardware, hardware.capacity_units(graph.unit_bytes)[0])
        fast = hardware.num_levels - 1
        native = self._uniform(max(fast - 1, 0), fast)
        result = _run(self.table, native["weights"], native["activations"], prefetch)
        self.reference = {"weights": result.weights, "activations": result.activations}
        self.reference_cost = result.latency_s

    @property
    def heads(self) -> dict[str, Head]:
        levels = self.hardware.num_levels
        return {"weights": Head("op", levels), "activations": Head("op", levels)}

    @property
    def features(self) -> Float[Array, "N F"]:
        return node_features(self.graph)

    def evaluate(self, decisions: GivenDecisions) -> MemoryOutcome:
        result = self._simulate(decisions)
        feasible = result.moved_units == 0
        # -(1 + moved / total) as a sum times a factor: a compiler may turn a quotient and a sum
        # into other roundings, and the bits would depend on the program.
        moved = result.moved_units.astype(jnp.float32)
        share = jnp.minimum(moved * self.table.share_per_unit, 1.0)
        total = self.table.total_units.astype(jnp.float32)
        worse = jnp.clip((total + moved) * self.table.share_per_unit, 1.0, 2.0)
        return MemoryOutcome(
            cost=result.latency_s,
            feasible=feasible,
            reward=jnp.where(
                feasible, squared_speedup_reward(self.reference_cost, result.latency_s), -worse
            ),
            latency_s=result.latency_s,
            moved_fraction=share,
        )

    def rectify(self, decisions: GivenDecisions) -> Decisions:
        """The valid map nearest to `decisions` by the compiler's rule (semantics 4.1)."""
        result = self._simulate(decisions)
        return {"weights": result.weights, "activations": result.activations}

    def first_fit(self) -> Decisions:
        """The rectification of everything on the fastest level."""
        fast = self.hardware.num_levels - 1
        return self.rectify(self._uniform(fast, fast))

    def repair(self, decisions: GivenDecisions) -> Decisions:
        return self.rectify(decisions)

    def heuristics(self) -> dict[str, Decisions]:
        return {"reference": self.reference, "first_fit": self.first_fit()}

    def active(self) -> dict[str, Bool[Array, " N"]]:
        return {
            "weights": self.graph.weight_units > 0,
            "activations": self.graph.output_units() > 0,
        }

    @property
    def has_relaxation(self) -> bool:
        return True

    def relaxed_terms(
        self, probabilities: Mapping[str, Array], temperature: Float[Array, ""]
    ) -> tuple[Float[Array, ""], Float[Array, " C"]]:
        """Expected latency, and by how much each level above 0 is overfull at each step, as a
        fraction of its capacity (of the largest item, if that is more)."""
        latency_s, overfull = self._relaxed(probabilities, temperature)
        return latency_s, overfull.reshape(-1)

    def relaxed(
        self, probabilities: Mapping[str, Array], temperature: Float[Array, ""] | float
    ) -> tuple[Float[Array, ""], Float[Array, ""]]:
        """(latency_s, penalty) of `weights` and `activations` given as probabilities [N, M].

        The penalty is the mean over steps of the squared shares by which levels are overfull,
        summed over levels: 0 where every level holds what is expected on it. `temperature` as in
        `relaxed_terms`.

        Raises:
            DecisionError: for a missing or unknown decision, or a wrong shape.
        """
        latency_s, overfull = self._relaxed(probabilities, jnp.asarray(temperature, jnp.float32))
        steps = jnp.sum(self.graph.op_mask).astype(jnp.float32)
        return latency_s, jnp.sum(jnp.square(jnp.maximum(overfull, 0.0))) / steps

    def breakdown(self, decisions: GivenDecisions) -> Breakdown:
        """Where the latency of a map goes, op by op; the map is rectified first, as `evaluate`
        does. For concrete decisions."""
        settled = self.rectify(decisions)
        return breakdown(
            self.graph,
            self.hardware,
            np.asarray(settled["weights"]),
            np.asarray(settled["activations"]),
            prefetch=self.prefetch,
        )

    def lifetimes(self) -> tuple[Int[np.ndarray, " T"], Int[np.ndarray, " T"]]:
        """(first step, last step) of each tensor, both included, padding dropped."""
        return lifetimes(self.graph)

    def lower_bound(self) -> float:
        """Seconds that no map undercuts; cheap, proven, and usually far from tight."""
        return latency_bound(self.graph, self.hardware, prefetch=self.prefetch)

    def measured(self, cost: Float[Array, ""]) -> MemoryOutcome:
        cost = jnp.asarray(cost, jnp.float32)
        return MemoryOutcome(
            cost=cost,
            feasible=jnp.ones_like(cost, bool),
            reward=squared_speedup_reward(self.reference_cost, cost),
            latency_s=cost,
            moved_fraction=jnp.zeros_like(cost),
        )

    def failed(self) -> MemoryOutcome:
        slowest = self._uniform(0, 0)
        cost = run(
            self.table, slowest["weights"], slowest["activations"], prefetch=self.prefetch
        ).latency_s
        return MemoryOutcome(
            cost=jnp.maximum(cost, self.reference_cost),
            feasible=jnp.zeros((), bool),
            reward=jnp.full((), -2.0, jnp.float32),
            latency_s=jnp.maximum(cost, self.reference_cost),
            moved_fraction=jnp.ones((), jnp.float32),
        )

    def _relaxed(
        self, probabilities: Mapping[str, Array], temperature: Float[Array, ""]
    ) -> tuple[Float[Array, ""], Float[Array, "N fast"]]:
        if set(probabilities) != set(self.heads):
            raise DecisionError(
                f"expected probabilities of {sorted(self.heads)}, got {sorted(probabilities)}"
            )
        shape = (self.graph.num_ops, self.hardware.num_levels)
        for name, value in probabilities.items():
            if np.shape(value) != shape:
                raise DecisionError(
                    f"probabilities of {name!r} must have shape {shape} (ops, levels), "
                    f"got {np.shape(value)}"
                )
        ops = jnp.sum(self.graph.op_mask).astype(jnp.float32)
        return relaxed_latency(
            self.graph,
            self.hardware,
            self.table.capacity_units,
            jnp.asarray(probabilities["weights"], jnp.float32),
            jnp.asarray(probabilities["activations"], jnp.float32),
            temperature_s=temperature * self.reference_cost / ops,
            prefetch=self.prefetch,
        )

    def _simulate(self, decisions: GivenDecisions) -> MemoryRun:
        checked = check_decisions(self, decisions)
        return run(self.table, checked["weights"], checked["activations"], prefetch=self.prefetch)

    def _uniform(self, weights: int, activations: int) -> Decisions:
        n = self.graph.num_ops
        return {
            "weights": jnp.full(n, weights, jnp.int32),
            "activations": jnp.full(n, activations, jnp.int32),
        }


@eqx.filter_jit
def _table(graph: Graph, hardware: Hardware, capacity: Array) -> MemoryTable:
    return memory_table(graph, hardware, capacity)


@eqx.filter_jit
def _run(table: MemoryTable, weights: Array, activations: Array, prefetch: int) -> MemoryRun:
    return run(table, weights, activations, prefetch=prefetch)
