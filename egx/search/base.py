"""The protocol of every searcher, and the work that all of them share.

A searcher proposes candidates and learns from their outcomes; it never evaluates. The driver in
`egx.training.loop` stands between `ask` and `tell`, with the jitted simulator or with a callable
that measures real hardware.
"""

from __future__ import annotations

import abc
import math
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from egx.errors import SearchError
from egx.problems.base import AbstractOutcome, AbstractProblem, Decisions

Metrics = dict[str, Float[Array, ""]]
Scalar = Float[Array | np.ndarray, ""]


def scalar(value: Any) -> Any:
    """A hyper-parameter as a float32 leaf, so that sweeping it compiles nothing again.

    NumPy's unless it is traced or on a device already: a field's default is converted when its
    class is made, and importing must not start a device.
    """
    if isinstance(value, jax.Array):
        return value
    # What is no real number stays as it is, for `check_numbers` to name.
    array = np.asarray(value)
    return array.astype(np.float32) if array.dtype.kind in "iuf" else value


def check_whole(part: Any, **least: int) -> None:
    """Raises SearchError for a field of `part` that is no whole number of at least what is named
    for it."""
    for name, low in least.items():
        number = getattr(part, name)
        if not isinstance(number, int) or isinstance(number, bool) or number < low:
            raise SearchError(f"{name} must be a whole number of {low} or more, got {number!r}")


Range = Literal["0 to 1", "above 0, 1 at most", "0 or more", "above 0", "1 or more", "finite"]
_LEAST = float(np.finfo(np.float32).tiny)
# Ends included.
_ENDS: dict[Range, tuple[float, float]] = {
    "0 to 1": (0.0, 1.0),
    "above 0, 1 at most": (_LEAST, 1.0),
    "0 or more": (0.0, math.inf),
    "above 0": (_LEAST, math.inf),
    "1 or more": (1.0, math.inf),
    "finite": (-math.inf, math.inf),
}


def check_numbers(part: Any, **ranges: Range) -> None:
    """Raises SearchError for a field of `part` that is no finite real number in the range named
    for it. A sweep may stack them on a device; what it traces cannot be looked at."""
    for name, expected in ranges.items():
        number = getattr(part, name)
        if isinstance(number, jax.core.Tracer):
            continue
        low, high = _ENDS[expected]
        values = np.asarray(number)
        is_real = values.dtype.kind in "iuf" and (not values.shape or isinstance(number, jax.Array))
        if not is_real or not np.all(np.isfinite(values) & (low <= values) & (values <= high)):
            shown = f"{values:g}" if is_real and not values.shape else repr(number)
            raise SearchError(f"{name} must be {expected}, got {shown}")


class Incumbent(eqx.Module):
    """The best candidate so far: feasible before infeasible, then lower cost, then earlier."""

    decisions: Decisions
    cost: Float[Array, ""]
    feasible: Bool[Array, ""]
    found_at: Int[Array, ""]


class State(eqx.Module):
    """What evolves: the searcher's own state, the best so far, and the evaluations told."""

    inner: Any
    best: Incumbent
    evaluations: Int[Array, ""]


class AbstractSearch(eqx.Module):
    """A searcher: hyper-parameters on the module, all that evolves in a `State`.

    Subclasses implement `initial`, `propose` and `update`; the best so far is kept here. All
    three are pure and unbatched, and each key is used once.
    """

    @property
    @abc.abstractmethod
    def batch_size(self) -> int:
        """Candidates per `ask`, static."""

    @abc.abstractmethod
    def initial(self, problem: AbstractProblem, *, key: PRNGKeyArray) -> Any:
        """The searcher's own state before its first proposal."""

    @abc.abstractmethod
    def propose(
        self, problem: AbstractProblem, inner: Any, *, key: PRNGKeyArray
    ) -> tuple[Decisions, Any]:
        """`batch_size` candidates, each decision [B, length]."""

    @abc.abstractmethod
    def update(
        self,
        problem: AbstractProblem,
        inner: Any,
        candidates: Decisions,
        outcomes: AbstractOutcome,
        *,
        key: PRNGKeyArray,
    ) -> tuple[Any, Metrics]:
        """Learns from a batch of outcomes."""

    def check(self, problem: AbstractProblem) -> None:
        """Raises SearchError when this searcher cannot run on `problem`; host-side."""

    def init(self, problem: AbstractProblem, *, key: PRNGKeyArray) -> State:
        best = Incumbent(
            decisions=problem.reference,
            cost=jnp.asarray(jnp.finfo(jnp.float32).max, jnp.float32),
            feasible=jnp.zeros((), bool),
            found_at=jnp.zeros((), jnp.int32),
        )
        return State(self.initial(problem, key=key), best, jnp.zeros((), jnp.int32))

    def ask(
        self, problem: AbstractProblem, state: State, *, key: PRNGKeyArray
    ) -> tuple[Decisions, State]:
        candidates, inner = self.propose(problem, state.inner, key=key)
        return candidates, State(inner, state.best, state.evaluations)

    def tell(
        self,
        problem: AbstractProblem,
        state: State,
        candidates: Decisions,
        outcomes: AbstractOutcome,
        *,
        key: PRNGKeyArray,
    ) -> tuple[State, Metrics]:
        inner, metrics = self.update(problem, state.inner, candidates, outcomes, key=key)
        best = better(state.best, candidates, outcomes, state.evaluations)
        evaluations = state.evaluations + outcomes.cost.shape[0]
        return State(inner, best, evaluations), metrics

    def incumbent(self, state: State) -> Incumbent:
        return state.best


def rank_key(outcomes: AbstractOutcome) -> tuple[Array, Array]:
    """Keys for `jnp.lexsort`-like ranking, most significant first: infeasible, cost."""
    return (~outcomes.feasible).astype(jnp.int32), outcomes.cost


def best_index(outcomes: AbstractOutcome) -> Int[Array, ""]:
    """The first best candidate of a batch: feasible first, then by cost."""
    any_feasible = jnp.any(outcomes.feasible)
    eligible = outcomes.feasible | ~any_feasible
    return jnp.argmin(jnp.where(eligible, outcomes.cost, jnp.inf)).astype(jnp.int32)


def better(
    best: Incumbent, candidates: Decisions, outcomes: AbstractOutcome, evaluations: Int[Array, ""]
) -> Incumbent:
    """The incumbent after a batch; ties keep the earlier one."""
    index = best_index(outcomes)
    cost, feasible = outcomes.cost[index], outcomes.feasible[index]
    improves = jnp.where(feasible == best.feasible, cost < best.cost, feasible)
    new = Incumbent(
        jax.tree.map(lambda x: x[index], candidates), cost, feasible, evaluations + index + 1
    )
    return jax.tree.map(lambda a, b: jnp.where(improves, a, b), new, best)
