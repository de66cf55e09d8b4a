"""What GO is compared on: workloads, their machines, and problems that leave decisions out."""

from __future__ import annotations

import dataclasses
import runpy
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float

import egx
from egx.graph.graph import Graph, Model
from egx.host import HostOnly
from egx.loading import load_workload
from egx.problems.base import (
    AbstractOutcome,
    AbstractProblem,
    Decisions,
    GivenDecisions,
    Head,
)

DATA: Path = runpy.run_path(str(Path(__file__).parents[1] / "data.py"))["DATA"]
MEASURED = ".json"

# The decisions of each comparison. "placement" is what GO's paper measures on machines: nothing
# is fused and each device takes what arrived first. "joint" is all three at once; "ordered" is all
# that can be decided about ops whose seconds were measured one by one.
TASKS = {
    "placement": ("device",),
    "fusion": ("fusion",),
    "schedule": ("priority",),
    "ordered": ("device", "priority"),
    "joint": ("fusion", "device", "priority"),
}


@dataclasses.dataclass(frozen=True)
class Workload:
    """A model of the zoo, or of a file below `DATA`, on a machine.

    Of measured graphs (dnn-partitioning) `machine` is "file" and `options` say how many devices.
    `tasks` are the comparisons that it can be part of; none named, all.
    """

    title: str
    model: str
    machine: str
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    tasks: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return "".join(c if c.isalnum() else "_" for c in self.title.lower())

    @property
    def path(self) -> Path | None:
        return DATA / self.model if "/" in self.model else None

    @property
    def is_there(self) -> bool:
        return self.path is None or self.path.exists()


def make_problem(
    workload: Workload, decide: tuple[str, ...], transfers: str = "async"
) -> egx.Execution:
    """A workload with some of the decisions, in run-time order."""
    path = workload.path
    if path is not None and path.suffix == MEASURED:
        work = load_workload(path, **workload.options)
        assert work.hardware is not None
        seconds = work.seconds_on(work.hardware)
        return egx.Execution(
            work.model,
            work.hardware,
            decide=decide,
            order="runtime",
            transfers=transfers,
            op_seconds=seconds,
        )
    machine = egx.hardware.load(workload.machine)
    model = egx.load(workload.model if path is None else path, **workload.options)
    return egx.Execution(model, machine, decide=decide, order="runtime", transfers=transfers)


class Rest(AbstractProblem):
    """An `Execution` problem with some of its decisions fixed: the rest is to be decided. What
    is undecided in it stands as in any problem: without priorities first come, first served."""

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


def read_config(path: Path) -> dict[str, Any]:
    """A configuration, with what it leaves out from the one beside it that it names as `like`."""
    config = tomllib.loads(path.read_text())
    like = config.pop("like", None)
    return config if like is None else {**read_config(path.parent / like), **config}
