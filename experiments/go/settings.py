"""What GO is compared on: workloads, their machines, and problems that leave decisions out."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float

import egx
from egx.graph.graph import Graph, Model
from egx.host import HostOnly
from egx.problems.base import (
    AbstractOutcome,
    AbstractProblem,
    Decisions,
    GivenDecisions,
    Head,
)

# The decisions of each comparison. "placement" is what GO's paper measures on machines: nothing
# is fused and each device takes what arrived first. "joint" is all three at once.
TASKS = {
    "placement": ("device",),
    "fusion": ("fusion",),
    "schedule": ("priority",),
    "joint": ("fusion", "device", "priority"),
}


@dataclasses.dataclass(frozen=True)
class Workload:
    """A model of the zoo on a machine; `human` and others are plans, not part of it."""

    title: str
    model: str
    machine: str
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def name(self) -> str:
        return "".join(c if c.isalnum() else "_" for c in self.title.lower())

    def load(self) -> Model:
        return egx.load(self.model, **self.options)


def make_problem(workload: Workload, model: Model, task: str) -> egx.Execution:
    """A workload with some of the decisions, in run-time order."""
    machine = egx.hardware.load(workload.machine)
    return egx.Execution(model, machine, decide=TASKS[task], order="runtime")


class Rest(AbstractProblem):
    """An `Execution` problem with some of its decisions fixed: the rest is to be decided."""

    inner: egx.Execution
    fixed: Decisions
    reference: Decisions
    reference_cost: Float[Array, ""]
    decide: tuple[str, ...] = eqx.field(static=True)

    def __init__(self, inner: egx.Execution, plan: Decisions, decide: tuple[str, ...]):
        """`plan` holds every decision; what `decide` does not name stays as it says."""
        self.inner, self.decide = inner, decide
        every = {name: jnp.asarray(value) for name, value in plan.items()}
        self.fixed = {name: value for name, value in every.items() if name not in decide}
        self.reference = {name: every[name] for name in inner.heads if name in decide}
        self.reference_cost = _cost(inner, every)

    @property
    def graph(self) -> Graph:  # type: ignore[override]
        return self.inner.graph

    @property
    def model(self) -> HostOnly[Model | None]:  # type: ignore[override]
        return self.inner.model

    @property
    def heads(self) -> dict[str, Head]:
        return {name: head for name, head in self.inner.heads.items() if name in self.decide}

    @property
    def features(self) -> Float[Array, "N F"]:
        return self.inner.features

    def evaluate(self, decisions: GivenDecisions) -> AbstractOutcome:
        return self.inner.evaluate({**self.fixed, **decisions})

    def failed(self) -> AbstractOutcome:
        return self.inner.failed()

    def measured(self, cost: Float[Array, ""]) -> AbstractOutcome:
        return self.inner.measured(cost)

    def whole(self, decisions: Mapping[str, Any]) -> Decisions:
        """All decisions of a plan."""
        given = {**self.fixed, **{name: jnp.asarray(value) for name, value in decisions.items()}}
        return {name: given[name] for name in self.inner.heads}


@eqx.filter_jit
def evaluate(problem: egx.Execution, plan: Decisions) -> Any:
    """One compiled program for all plans of a problem."""
    return problem.evaluate(plan)


def _cost(problem: egx.Execution, plan: Decisions) -> Float[Array, ""]:
    return evaluate(problem, plan).cost
