"""IDRS: random search over the proposal distributions of the genetic algorithm, for one instance.

The baseline of REGAL (Paliwal et al., ICLR 2020, arXiv 1905.02494) that shows what its policy
learns: the same choices, drawn at random for the graph at hand.

Shapes: W keys of a candidate, K knots of a quantile function, M mean and F fraction bins.
"""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from egx.errors import SearchError
from egx.problems.base import AbstractOutcome, AbstractProblem, Decisions
from egx.search.base import AbstractSearch, Metrics, Scalar, check_numbers, scalar
from egx.search.betas import FRACTIONS, MEANS, bin_knots
from egx.search.brkga import BRKGA, Population
from egx.search.keys import width


class Rounds(eqx.Module):
    """The run of the genetic algorithm at hand, the asks told so far, and all bins' quantiles."""

    population: Population
    told: Int[Array, ""]
    bins: Float[Array, "M F K"]


class IDRS(AbstractSearch):
    """Runs of BRKGA one after the other, each with distributions drawn at random.

    Every key of every entry draws its own mean and variance bin. The budget is split evenly over
    the runs, in whole asks; the best plan of all runs counts.

    Args:
        brkga: the genetic algorithm that is run.
        budget: evaluations of all runs together.
        rounds: runs.
    """

    brkga: BRKGA = eqx.field(default_factory=BRKGA)
    budget: Scalar = eqx.field(converter=scalar, default=5000.0)
    rounds: Scalar = eqx.field(converter=scalar, default=5.0)

    def __check_init__(self) -> None:
        check_numbers(self, budget="above 0", rounds="1 or more")

    @property
    def batch_size(self) -> int:
        return self.brkga.batch_size

    def check(self, problem: AbstractProblem) -> None:
        self.brkga.check(problem)
        if self.brkga.proposal is not None:
            raise SearchError("idrs draws its proposals; brkga.proposal must be None")

    def initial(self, problem: AbstractProblem, *, key: PRNGKeyArray) -> Rounds:
        bins = bin_knots()
        return Rounds(self._begin(problem, bins, key=key), jnp.zeros((), jnp.int32), bins)

    def _begin(
        self, problem: AbstractProblem, bins: Float[Array, "M F K"], *, key: PRNGKeyArray
    ) -> Population:
        bin_key, first_key = jax.random.split(key)
        count = len(MEANS) * len(FRACTIONS)
        drawn = jax.random.randint(bin_key, (width(problem),), 0, count, jnp.int32)
        knots = bins.reshape(count, -1)[drawn]
        return self.brkga.begin(problem, key=first_key, proposal=knots)

    def propose(
        self, problem: AbstractProblem, inner: Rounds, *, key: PRNGKeyArray
    ) -> tuple[Decisions, Rounds]:
        candidates, population = self.brkga.propose(problem, inner.population, key=key)
        return candidates, Rounds(population, inner.told, inner.bins)

    def update(
        self,
        problem: AbstractProblem,
        inner: Rounds,
        candidates: Decisions,
        outcomes: AbstractOutcome,
        *,
        key: PRNGKeyArray,
    ) -> tuple[Rounds, Metrics]:
        step_key, begin_key = jax.random.split(key)
        population, metrics = self.brkga.update(
            problem, inner.population, candidates, outcomes, key=step_key
        )
        told = inner.told + 1
        over = jnp.mod(told, self.asks_per_round) == 0
        begun = self._begin(problem, inner.bins, key=begin_key)
        population = jax.tree.map(lambda new, old: jnp.where(over, new, old), begun, population)
        return Rounds(population, told, inner.bins), metrics

    @property
    def asks_per_round(self) -> Int[Array, ""]:
        """Rounded up, so that no run is left over for a few asks."""
        asks = jnp.ceil(self.budget / jnp.float32(self.batch_size) / self.rounds)
        return jnp.maximum(asks, 1.0).astype(jnp.int32)
