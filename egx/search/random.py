"""Uniform random decisions: the floor that every searcher must beat."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import PRNGKeyArray

from egx.problems.base import AbstractOutcome, AbstractProblem, Decisions
from egx.search.base import AbstractSearch, Metrics, check_whole


def random_decisions(problem: AbstractProblem, *, key: PRNGKeyArray, batch: int) -> Decisions:
    """`batch` candidates drawn uniformly; reals from U(0, 1)."""
    decisions = {}
    for index, (name, head) in enumerate(problem.heads.items()):
        head_key = jax.random.fold_in(key, index)
        shape = (batch, problem.length(head))
        if head.choices == "real":
            decisions[name] = jax.random.uniform(head_key, shape)
        else:
            decisions[name] = jax.random.randint(head_key, shape, 0, head.choices, jnp.int32)
    return decisions


class RandomSearch(AbstractSearch):
    """Independent uniform candidates."""

    batch: int = 32

    def __check_init__(self) -> None:
        check_whole(self, batch=1)

    @property
    def batch_size(self) -> int:
        return self.batch

    def initial(self, problem: AbstractProblem, *, key: PRNGKeyArray) -> None:
        return None

    def propose(
        self, problem: AbstractProblem, inner: None, *, key: PRNGKeyArray
    ) -> tuple[Decisions, None]:
        return random_decisions(problem, key=key, batch=self.batch), None

    def update(
        self,
        problem: AbstractProblem,
        inner: None,
        candidates: Decisions,
        outcomes: AbstractOutcome,
        *,
        key: PRNGKeyArray,
    ) -> tuple[None, Metrics]:
        feasible = outcomes.feasible.astype(jnp.float32)
        return None, {"feasible_share": jnp.mean(feasible)}
