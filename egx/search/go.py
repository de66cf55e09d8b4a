"""GO: plans drawn from one network for all decisions, which learns from them by PPO.

Zhou et al., "Transferable Graph Optimizers for ML Compilers", NeurIPS 2020, arXiv 2010.12438.
With a fresh network this is GO-one; with a trained one and no fine-tuning it is zero-shot, first
the most likely plan and then samples.

Shapes: B candidates of an ask, N ops.
"""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, PRNGKeyArray

from egx.errors import SearchError
from egx.policies.base import REAL_LEVELS
from egx.policies.distributions import Levels, Logits, greedy, sample, to_decisions
from egx.policies.go_inputs import GoContext
from egx.policies.go_net import NETWORK_OPTIONS, GoPolicy, tasks_of
from egx.policies.loading import load_shipped
from egx.problems.base import AbstractOutcome, AbstractProblem, Decisions
from egx.search.base import AbstractSearch, Metrics, check_whole
from egx.search.ppo import PPO, Baseline, Learner, advantages, learn, new_baseline, new_learner

SHIPPED = "go"


class GoState(eqx.Module):
    """What evolves; `logits` are those that the last candidates, `levels`, were drawn from."""

    context: GoContext
    learner: Learner
    baseline: Baseline
    logits: Logits
    levels: Levels
    batches: Int[Array, ""]


class Go(AbstractSearch):
    """The network and its training on one problem.

    Args:
        ppo: how it learns.
        policy: a trained policy to start from, as `egx.train(problems, "go")` gives it.
        finetune: learn from every batch; otherwise the policy stays as it is.
        pretrained: without a policy, start from the one that comes with egx; without fine-tuning
            that is the default, as a fresh network knows nothing.
        batch: plans drawn between two updates.
        width, rounds, layers, attention_heads, segment, passes, real_levels, attention,
        superposition, joint: of a fresh network; see `GoPolicy`.
    """

    ppo: PPO = eqx.field(default_factory=PPO)
    policy: GoPolicy | None = None
    finetune: bool = eqx.field(static=True, default=True)
    pretrained: bool = eqx.field(static=True, default=False)
    batch: int = eqx.field(static=True, default=16)
    width: int = eqx.field(static=True, default=128)
    rounds: int = eqx.field(static=True, default=3)
    layers: int = eqx.field(static=True, default=3)
    attention_heads: int = eqx.field(static=True, default=8)
    segment: int = eqx.field(static=True, default=256)
    passes: int = eqx.field(static=True, default=3)
    real_levels: int = eqx.field(static=True, default=REAL_LEVELS)
    attention: bool = eqx.field(static=True, default=True)
    superposition: bool = eqx.field(static=True, default=True)
    joint: bool = eqx.field(static=True, default=True)

    def __check_init__(self) -> None:
        check_whole(self, batch=1)
        if self.policy is not None and not isinstance(self.policy, GoPolicy):
            raise SearchError(
                f"go takes a policy that egx.train(problems, 'go') gave, "
                f"got a {type(self.policy).__name__}"
            )

    @property
    def batch_size(self) -> int:
        return self.batch

    def check(self, problem: AbstractProblem) -> None:
        # Shapes are enough to find what a network cannot be made with or cannot decide.
        policy = eqx.filter_eval_shape(
            lambda key: self.start_policy(problem, key=key), jax.random.key(0)
        )
        policy.check(problem)

    @property
    def _shipped(self) -> bool:
        return self.policy is None and (self.pretrained or not self.finetune)

    def start_policy(self, problem: AbstractProblem, *, key: PRNGKeyArray) -> GoPolicy:
        """The policy before anything was learned from `problem`."""
        if self.policy is not None:
            return jax.tree.map(jnp.asarray, self.policy)
        if self._shipped:
            policy = load_shipped(SHIPPED)
            assert isinstance(policy, GoPolicy)
            return policy
        return GoPolicy(tasks_of(problem), **network_options(self), key=key)

    def initial(self, problem: AbstractProblem, *, key: PRNGKeyArray) -> GoState:
        policy = self.start_policy(problem, key=key)
        context = policy.context(problem)
        if self.finetune:
            shapes = eqx.filter_eval_shape(lambda: policy.logits(context))
            logits = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        else:
            logits = policy.logits(context)
        levels = {
            name: jnp.zeros((self.batch, value.shape[0]), jnp.int32)
            for name, value in logits.items()
        }
        zero = jnp.zeros((), jnp.int32)
        return GoState(context, new_learner(policy), new_baseline(), logits, levels, zero)

    def propose(
        self, problem: AbstractProblem, inner: GoState, *, key: PRNGKeyArray
    ) -> tuple[Decisions, GoState]:
        logits = inner.logits
        if self.finetune:
            logits = inner.learner.policy.logits(inner.context)
        keys = jax.vmap(lambda b: jax.random.fold_in(key, b))(jnp.arange(self.batch))
        levels = jax.vmap(lambda key: sample(logits, key=key))(keys)
        first = inner.batches == 0
        likely = greedy(logits)
        levels = {
            name: value.at[0].set(jnp.where(first, likely[name], value[0]))
            for name, value in levels.items()
        }
        choices = {name: value.shape[-1] for name, value in logits.items()}
        candidates = jax.vmap(lambda one: to_decisions(problem.heads, one, choices))(levels)
        asked = GoState(inner.context, inner.learner, inner.baseline, logits, levels, inner.batches)
        return candidates, asked

    def update(
        self,
        problem: AbstractProblem,
        inner: GoState,
        candidates: Decisions,
        outcomes: AbstractOutcome,
        *,
        key: PRNGKeyArray,
    ) -> tuple[GoState, Metrics]:
        advantage, reward, baseline = advantages(
            self.ppo, outcomes.cost, outcomes.feasible, problem.reference_cost, inner.baseline
        )
        learner = inner.learner
        metrics: Metrics = {}
        if self.finetune:
            one = jax.tree.map(
                lambda x: x[None], (inner.context, inner.logits, inner.levels, advantage)
            )
            learner, metrics = learn(self.ppo, inner.learner, *one)
        metrics = {
            "reward": jnp.mean(reward),
            "feasible_share": jnp.mean(outcomes.feasible.astype(jnp.float32)),
            **metrics,
        }
        state = GoState(
            inner.context, learner, baseline, inner.logits, inner.levels, inner.batches + 1
        )
        return state, metrics

    def best_policy(self, state: Any) -> GoPolicy:
        """The network as it is now."""
        return state.inner.learner.policy


def network_options(search: Any) -> dict[str, Any]:
    """The fields of a searcher that `GoPolicy` takes, beside the tasks."""
    return {name: getattr(search, name) for name in NETWORK_OPTIONS}
