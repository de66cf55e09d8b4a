"""What every searcher sees: decision heads, features, a pure evaluation and a reference."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from egx.errors import DecisionError, ProblemError
from egx.graph.graph import Graph, Model
from egx.host import HostOnly

Decisions = dict[str, Array]

# Decisions as callers give them: JAX or NumPy arrays, or lists; checked before use.
GivenDecisions = Mapping[str, Any]


class Head(NamedTuple):
    """One kind of decision: an entry per op or per use, each one of `choices` or a real."""

    axis: Literal["op", "use"]
    choices: int | Literal["real"]


class AbstractOutcome(eqx.Module):
    """The value of one candidate. `cost` is finite and lower is better; `reward` ranks every
    feasible candidate above every infeasible one."""

    cost: eqx.AbstractVar[Float[Array, ""]]
    feasible: eqx.AbstractVar[Bool[Array, ""]]
    reward: eqx.AbstractVar[Float[Array, ""]]


class AbstractProblem(eqx.Module):
    """A graph, a machine and a question about them.

    Everything is unbatched: `jax.vmap(problem.evaluate)` values a population, and problems whose
    graphs share a padded shape stack with `jax.tree.map`.
    """

    graph: eqx.AbstractVar[Graph]
    reference: eqx.AbstractVar[Decisions]
    reference_cost: eqx.AbstractVar[Float[Array, ""]]
    model: eqx.AbstractVar[HostOnly[Model | None]]

    @property
    @abc.abstractmethod
    def heads(self) -> dict[str, Head]:
        """The decisions of this problem, in a fixed order."""

    @property
    @abc.abstractmethod
    def features(self) -> Float[Array, "N F"]:
        """Node features for policies, scaled so that a policy transfers between graphs."""

    @abc.abstractmethod
    def evaluate(self, decisions: GivenDecisions) -> AbstractOutcome:
        """Values one candidate.

        Raises:
            DecisionError: for a missing or unknown decision, a wrong shape or type, and, as far
                as values are concrete, an entry out of range.
        """

    @abc.abstractmethod
    def failed(self) -> AbstractOutcome:
        """The outcome of a candidate whose measurement failed: infeasible, finite, the worst."""

    @abc.abstractmethod
    def measured(self, cost: Float[Array, ""]) -> AbstractOutcome:
        """The outcome of a candidate whose cost was measured outside the simulator."""

    def active(self) -> dict[str, Bool[Array, " N"]]:
        """The entries of each decision that can change the cost; by default all real ones."""
        return {name: self.mask(head) for name, head in self.heads.items()}

    def repair(self, decisions: GivenDecisions) -> Decisions:
        """A candidate near `decisions` that more often fits, by a rule that needs no evaluation;
        by default `decisions` themselves."""
        return dict(decisions)

    def lower_bound(self) -> float | None:
        """A cost that no decisions undercut, cheap and proven; None where none is known."""
        return None

    def heuristics(self) -> Mapping[str, Decisions]:
        """Plans that are known before any search, by name; "reference" among them. Listing the
        names must cost nothing, for a plan may be made when it is looked at."""
        return {"reference": self.reference}

    @property
    def has_relaxation(self) -> bool:
        """Whether `relaxed_terms` exists for this problem."""
        return False

    def relaxed_terms(
        self, probabilities: Mapping[str, Array], temperature: Float[Array, ""]
    ) -> tuple[Float[Array, ""], Float[Array, " C"]]:
        """The expected cost under independent choices, and how far each constraint is violated
        (as a fraction of its limit; 0 or less is kept). Differentiable; `temperature` smooths the
        maxima, in units of the reference's mean seconds per op, and 0 is exact."""
        raise DecisionError(f"{type(self).__name__} has no differentiable relaxation")

    def length(self, head: Head) -> int:
        """Entries of a decision, padding included."""
        return self.graph.num_ops if head.axis == "op" else self.graph.num_uses

    def mask(self, head: Head) -> Bool[Array, " N"]:
        """The entries of a decision that stand for something real."""
        return self.graph.op_mask if head.axis == "op" else self.graph.use_mask


def expect_problem(value: Any) -> None:
    """Raises ProblemError for what is no problem: a model, say, of which nothing is asked yet."""
    if not isinstance(value, AbstractProblem):
        raise ProblemError(
            "expected a problem, such as egx.Execution(model, hardware), got a "
            f"{type(value).__name__}"
        )


def check_decisions(
    problem: AbstractProblem,
    decisions: GivenDecisions,
    *,
    optional: Mapping[str, Head] | None = None,
) -> Decisions:
    """Returns the decisions as arrays of the right type, or says what is wrong with them.

    `optional` are decisions that are checked where they are given and may be left out.
    """
    heads = problem.heads
    known = {**(optional or {}), **heads}
    unknown = sorted(set(decisions) - set(known))
    if unknown:
        raise DecisionError(f"unknown decisions {unknown}; this problem takes {sorted(known)}")
    checked = {}
    for name, head in known.items():
        if name in decisions:
            checked[name] = check_decision(name, head, problem.length(head), decisions[name])
        elif name in heads:
            raise DecisionError(f"decision {name!r} is missing; this problem takes {sorted(heads)}")
    return checked


def check_decision(name: str, head: Head, length: int, value: Any) -> Array:
    """Checks one decision: shape and type always, values where they are concrete."""
    if not isinstance(value, jax.Array):
        try:
            value = np.asarray(value)
        except ValueError as error:
            raise DecisionError(f"decision {name!r} is not an array: {error}") from error
    shape = value.shape
    if shape != (length,):
        raise DecisionError(
            f"decision {name!r} must have shape ({length},), one entry per {head.axis} "
            f"(padding included), got {shape}"
        )
    dtype = np.dtype(value.dtype)
    if head.choices == "real":
        if not np.issubdtype(dtype, np.number) or np.issubdtype(dtype, np.complexfloating):
            raise DecisionError(f"decision {name!r} must hold numbers, got {dtype}")
        array = jnp.asarray(value, jnp.float32)
        if not isinstance(array, jax.core.Tracer) and not np.isfinite(np.asarray(array)).all():
            raise DecisionError(f"decision {name!r} must be finite")
        return array
    if not np.issubdtype(dtype, np.integer):
        raise DecisionError(f"decision {name!r} must hold integers, got {dtype}")
    if not isinstance(value, jax.core.Tracer):
        concrete = np.asarray(value)
        wrong = np.flatnonzero((concrete < 0) | (concrete >= head.choices))
        if wrong.size:
            raise DecisionError(
                f"decision {name!r} at {head.axis} {wrong[0]} is {concrete[wrong[0]]}, "
                f"expected 0 to {head.choices - 1}"
            )
    return jnp.asarray(value, jnp.int32)


def squared_speedup_reward(
    reference_cost: Float[Array, ""], cost: Float[Array, ""]
) -> Float[Array, ""]:
    """(reference / cost)^2 - 1, and 0 where the cost is 0."""
    ratio = reference_cost / jnp.where(cost > 0, cost, 1.0)
    # As a product of sums: a compiler may round ratio * ratio - 1 once or twice, as it likes.
    return jnp.where(cost > 0, (ratio - 1.0) * (ratio + 1.0), 0.0)
