"""Greedy-DP: op by op, the best combination of the op's own decisions with the rest fixed.

The baseline of Khadka et al., "Optimizing Memory Placement using Evolutionary Graph Reinforcement
Learning", ICLR 2021 (arXiv 2007.07298): from everything at level 0, in op order, all combinations
of an op are evaluated and the best is kept; passes over the ops repeat. A pass costs N times the
combinations (9 for three levels of weights and activations). It is deterministic: seeds agree.
"""

from __future__ import annotations

import math

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from egx.errors import SearchError
from egx.problems.base import AbstractOutcome, AbstractProblem, Decisions
from egx.search.base import AbstractSearch, Metrics, check_whole


class Pass(eqx.Module):
    """The plan so far, its reward, the best trial of the op at hand, and the trials done."""

    decisions: Decisions
    reward: Float[Array, ""]
    best: Decisions
    trial: Int[Array, ""]


class GreedyDP(AbstractSearch):
    """The greedy baseline of EGRL.

    Trials are ranked by reward, so that every valid plan goes before every invalid one; a tie
    keeps the earlier. A real decision is tried at `real_levels` evenly spaced values from 0 to 1.

    Args:
        real_levels: values tried for a decision that is a real.
        batch: trials per `ask`; must divide the number of combinations of an op.
    """

    real_levels: int = eqx.field(static=True, default=4)
    batch: int = eqx.field(static=True, default=1)

    def __check_init__(self) -> None:
        check_whole(self, real_levels=2, batch=1)

    @property
    def batch_size(self) -> int:
        return self.batch

    def check(self, problem: AbstractProblem) -> None:
        for name, head in problem.heads.items():
            if head.axis != "op":
                raise SearchError(f"greedy_dp goes op by op; decision {name!r} is made per use")
        if self.combinations(problem) % self.batch:
            raise SearchError(
                f"greedy_dp: batch must divide the {self.combinations(problem)} combinations of "
                f"an op, got {self.batch}"
            )

    def combinations(self, problem: AbstractProblem) -> int:
        """Trials for one op: the product of the choices of its decisions."""
        return math.prod(self._sizes(problem))

    def _sizes(self, problem: AbstractProblem) -> list[int]:
        return [
            self.real_levels if head.choices == "real" else head.choices
            for head in problem.heads.values()
        ]

    def initial(self, problem: AbstractProblem, *, key: PRNGKeyArray) -> Pass:
        zeros = jax.tree.map(jnp.zeros_like, problem.reference)
        return Pass(zeros, jnp.asarray(-jnp.inf, jnp.float32), zeros, jnp.zeros((), jnp.int32))

    def propose(
        self, problem: AbstractProblem, inner: Pass, *, key: PRNGKeyArray
    ) -> tuple[Decisions, Pass]:
        trials = inner.trial + jnp.arange(self.batch, dtype=jnp.int32)
        return jax.vmap(lambda trial: self._candidate(problem, inner.decisions, trial))(
            trials
        ), inner

    def _candidate(
        self, problem: AbstractProblem, decisions: Decisions, trial: Int[Array, ""]
    ) -> Decisions:
        sizes = self._sizes(problem)
        ops = jnp.maximum(jnp.sum(problem.graph.op_mask.astype(jnp.int32)), 1)
        op = jnp.mod(trial // math.prod(sizes), ops)
        rest = jnp.mod(trial, math.prod(sizes))
        candidate = {}
        # The last head varies fastest.
        for (name, head), size in reversed(list(zip(problem.heads.items(), sizes, strict=True))):
            level = jnp.mod(rest, size)
            rest = rest // size
            if head.choices == "real":
                value = level.astype(jnp.float32) / max(size - 1, 1)
            else:
                value = level
            candidate[name] = decisions[name].at[op].set(value)
        return candidate

    def update(
        self,
        problem: AbstractProblem,
        inner: Pass,
        candidates: Decisions,
        outcomes: AbstractOutcome,
        *,
        key: PRNGKeyArray,
    ) -> tuple[Pass, Metrics]:
        index = jnp.argmax(outcomes.reward)
        improves = outcomes.reward[index] > inner.reward
        reward = jnp.where(improves, outcomes.reward[index], inner.reward)
        best = jax.tree.map(
            lambda new, old: jnp.where(improves, new[index], old), candidates, inner.best
        )
        trial = inner.trial + self.batch
        settled = jnp.mod(trial, self.combinations(problem)) == 0
        decisions = jax.tree.map(
            lambda new, old: jnp.where(settled, new, old), best, inner.decisions
        )
        return Pass(decisions, reward, best, trial), {"reward": reward}
