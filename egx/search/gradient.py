"""Gradient descent on the problem's differentiable relaxation.

Decisions become probabilities, the cost an expectation with smooth maxima, the capacities
constraints with multipliers (`egx.search.lagrangian`). Independent descents run side by side from
different starts and with different penalties. Each takes one Adam step per evaluation and proposes
the rounding of where it stands, so that a gradient step and an evaluation cost the budget the same.
The rounding passes the problem's repair rule, which for memory placement runs the simulator once
more for each candidate; the driver then values the candidate exactly.
"""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from egx.errors import SearchError
from egx.problems.base import AbstractOutcome, AbstractProblem, Decisions
from egx.search.base import AbstractSearch, Metrics, Scalar, check_numbers, check_whole, scalar
from egx.search.lagrangian import Descent, Relaxation, rounded


class Descents(eqx.Module):
    """The descents side by side, leaves [B, ...], and the evaluations told."""

    relaxations: Relaxation
    told: Int[Array, ""]


class GradientSearch(AbstractSearch):
    """Adam on logits through the relaxed simulator, with rounding and repair.

    Args:
        budget: evaluations the run will spend, for the temperature.
        descent: hyper-parameters of one descent; its penalty is the middle one.
        penalty_spread: the largest penalty, and the smallest one's inverse, relative to it.
        batch: descents side by side.
        sampling: every second candidate of a descent is sampled instead of the likeliest.
    """

    budget: Scalar = eqx.field(converter=scalar, default=4000.0)
    descent: Descent = eqx.field(default_factory=Descent)
    penalty_spread: Scalar = eqx.field(converter=scalar, default=10.0)
    batch: int = eqx.field(static=True, default=8)
    sampling: bool = eqx.field(static=True, default=True)

    def __check_init__(self) -> None:
        check_whole(self, batch=1)
        check_numbers(self, budget="above 0", penalty_spread="above 0")

    @property
    def batch_size(self) -> int:
        return self.batch

    def check(self, problem: AbstractProblem) -> None:
        if not problem.has_relaxation:
            raise SearchError(
                f"gradient needs a differentiable relaxation; {type(problem).__name__} has none"
            )
        for name, head in problem.heads.items():
            if head.choices == "real":
                raise SearchError(f"gradient relaxes choices; decision {name!r} is a real")

    def initial(self, problem: AbstractProblem, *, key: PRNGKeyArray) -> Descents:
        keys = jax.vmap(lambda b: jax.random.fold_in(key, b))(jnp.arange(self.batch))
        relaxations = jax.vmap(lambda k: self.descent.start(problem, key=k))(keys)
        return Descents(relaxations, jnp.zeros((), jnp.int32))

    def propose(
        self, problem: AbstractProblem, inner: Descents, *, key: PRNGKeyArray
    ) -> tuple[Decisions, Descents]:
        progress = inner.told.astype(jnp.float32) / self.budget
        relaxations = jax.vmap(
            lambda relaxation, penalty: self._with_penalty(penalty).step(
                problem, relaxation, progress
            )
        )(inner.relaxations, self._penalties())
        keys = jax.vmap(lambda b: jax.random.fold_in(key, b))(jnp.arange(self.batch))
        turn = inner.told // self.batch
        candidates = jax.vmap(lambda r, k: self._candidate(problem, r, turn, key=k))(
            relaxations, keys
        )
        return candidates, Descents(relaxations, inner.told)

    def _candidate(
        self,
        problem: AbstractProblem,
        relaxation: Relaxation,
        turn: Int[Array, ""],
        *,
        key: PRNGKeyArray,
    ) -> Decisions:
        decisions = rounded(relaxation)
        if self.sampling:
            sampled = {
                name: jax.random.categorical(jax.random.fold_in(key, index), logits)
                for index, (name, logits) in enumerate(relaxation.logits.items())
            }
            odd = jnp.mod(turn, 2) == 1
            decisions = {
                name: jnp.where(odd, sampled[name].astype(jnp.int32), likeliest)
                for name, likeliest in decisions.items()
            }
        return problem.repair(decisions)

    def _penalties(self) -> Float[Array, " B"]:
        spread = jnp.linspace(-1.0, 1.0, self.batch) if self.batch > 1 else jnp.zeros(1)
        return jnp.asarray(self.descent.penalty) * self.penalty_spread**spread

    def _with_penalty(self, penalty: Float[Array, ""]) -> Descent:
        return eqx.tree_at(lambda d: d.penalty, self.descent, penalty)

    def update(
        self,
        problem: AbstractProblem,
        inner: Descents,
        candidates: Decisions,
        outcomes: AbstractOutcome,
        *,
        key: PRNGKeyArray,
    ) -> tuple[Descents, Metrics]:
        feasible = outcomes.feasible.astype(jnp.float32)
        pressure = jnp.mean(jnp.sum(inner.relaxations.multipliers, axis=-1))
        return Descents(inner.relaxations, inner.told + self.batch), {
            "feasible_share": jnp.mean(feasible),
            "multipliers": pressure,
        }
