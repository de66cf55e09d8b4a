"""Proximal policy optimization for one-step episodes in which every op is decided at once.

Schulman et al., "Proximal Policy Optimization Algorithms", arXiv 1707.06347, with the rewards of
GO (Zhou et al., NeurIPS 2020, arXiv 2010.12438): -sqrt(time / reference time), -10 for a plan that
is not valid, compared with the running mean of the graph's own rewards.

The ratio of probabilities is clipped op by op: over hundreds of ops the ratio of whole plans would
leave the clip's range at the first step.

Shapes: G graphs of a batch, K plans of each, N ops.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from egx.errors import SearchError
from egx.policies.distributions import entropy, log_probabilities
from egx.policies.go_inputs import GoContext
from egx.policies.go_net import GoPolicy
from egx.search.adam import descend, no_moments
from egx.search.base import Metrics, Scalar, check_numbers, check_whole, scalar
from egx.search.brkga import rank

ADVANTAGES = ("running", "rank")


class PPO(eqx.Module):
    """How a policy learns from the plans that it drew.

    Args:
        learning_rate: of Adam.
        clip: how far an op's probability may move within a batch and still be rewarded for it.
        entropy_bonus: of the mean entropy of an op's decisions, in units of the reward.
        invalid: the reward of a plan that is not valid.
        baseline_rate: the least weight of a batch in a graph's running mean; until 1 / batches
            falls below it, the mean is over all.
        gradient_clip: the largest norm of the gradient.
        epochs: steps of Adam on each batch.
        advantage: "running", reward minus running mean, as in the paper; or "rank", which is not
            of the paper: from 1 for the best plan of a graph in its batch evenly down to -1,
            whatever rewards differ by.
    """

    learning_rate: Scalar = eqx.field(converter=scalar, default=1e-3)
    clip: Scalar = eqx.field(converter=scalar, default=0.2)
    entropy_bonus: Scalar = eqx.field(converter=scalar, default=1e-3)
    invalid: Scalar = eqx.field(converter=scalar, default=-10.0)
    baseline_rate: Scalar = eqx.field(converter=scalar, default=0.1)
    gradient_clip: Scalar = eqx.field(converter=scalar, default=1.0)
    epochs: int = eqx.field(static=True, default=4)
    advantage: str = eqx.field(static=True, default="running")

    def __check_init__(self) -> None:
        check_whole(self, epochs=1)
        check_numbers(
            self,
            learning_rate="0 or more",
            clip="above 0",
            entropy_bonus="0 or more",
            invalid="finite",
            baseline_rate="0 to 1",
            gradient_clip="above 0",
        )
        if self.advantage not in ADVANTAGES:
            raise SearchError(
                f"advantage must be {' or '.join(ADVANTAGES)}, got {self.advantage!r}"
            )


class Baseline(eqx.Module):
    """The running mean of a graph's rewards."""

    mean: Float[Array, "*G"]
    batches: Float[Array, "*G"]


class Learner(eqx.Module):
    """The policy and Adam's moments."""

    policy: GoPolicy
    moments: Any


def new_baseline(shape: tuple[int, ...] = ()) -> Baseline:
    return Baseline(jnp.zeros(shape, jnp.float32), jnp.zeros(shape, jnp.float32))


def new_learner(policy: GoPolicy) -> Learner:
    return Learner(policy, no_moments(policy))


def plan_rewards(
    ppo: PPO, cost: Float[Array, "*B"], feasible: Bool[Array, "*B"], reference: Float[Array, "*B"]
) -> Float[Array, "*B"]:
    """-sqrt(cost / reference), never less than what an invalid plan gets; 0 for both at no cost."""
    ratio = cost / jnp.where(reference > 0, reference, 1.0)
    # A reference that costs nothing leaves only costs of 0 without regret.
    reward = -jnp.sqrt(jnp.maximum(ratio, 0.0))
    return jnp.where(feasible, jnp.maximum(reward, ppo.invalid), ppo.invalid)


def advantages(
    ppo: PPO,
    cost: Float[Array, " K"],
    feasible: Bool[Array, " K"],
    reference: Float[Array, ""],
    baseline: Baseline,
) -> tuple[Float[Array, " K"], Float[Array, " K"], Baseline]:
    """(advantages, rewards, the baseline after them) of one graph."""
    reward = plan_rewards(ppo, cost, feasible, jnp.broadcast_to(reference, cost.shape))
    batches = baseline.batches + 1.0
    rate = jnp.maximum(1.0 / batches, ppo.baseline_rate)
    mean = baseline.mean + rate * (jnp.mean(reward) - baseline.mean)
    count = cost.shape[0]
    if ppo.advantage == "running" or count == 1:
        advantage = reward - mean
    else:
        step = 2.0 / (count - 1)
        values = 1.0 - step * jnp.arange(count, dtype=jnp.float32)
        advantage = jnp.zeros(count, jnp.float32).at[rank(cost, feasible)].set(values)
        # Plans of one value are no better than each other.
        same = (cost[:, None] == cost) & (feasible[:, None] == feasible)
        share = same.astype(jnp.float32)
        advantage = share @ advantage / jnp.sum(share, 1)
    return advantage, reward, Baseline(mean, batches)


def ppo_loss(
    ppo: PPO,
    log_p: Mapping[str, Float[Array, "K N"]],
    old_log_p: Mapping[str, Float[Array, "K N"]],
    advantage: Float[Array, " K"],
    entropy: Float[Array, ""],
    mask: Bool[Array, " N"],
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """The clipped loss of one graph, and the share of choices that the clip holds back.

    A mean over plans and real ops, summed over the kinds of decisions.
    """
    count = jnp.maximum(jnp.sum(mask), 1).astype(jnp.float32) * advantage.shape[0]
    gain, held = jnp.zeros((), jnp.float32), jnp.zeros((), jnp.float32)
    for name in sorted(log_p):
        ratio = jnp.exp(log_p[name] - old_log_p[name])
        clipped = jnp.clip(ratio, 1.0 - ppo.clip, 1.0 + ppo.clip)
        free, bound = ratio * advantage[:, None], clipped * advantage[:, None]
        gain = gain + jnp.sum(jnp.where(mask, jnp.minimum(free, bound), 0.0)) / count
        held = held + jnp.sum((mask & (bound < free)).astype(jnp.float32)) / count
    return -gain - ppo.entropy_bonus * entropy, held / len(log_p)


def learn(
    ppo: PPO,
    learner: Learner,
    contexts: GoContext,
    logits: Mapping[str, Float[Array, "G N _C"]],
    levels: Mapping[str, Int[Array, "G K N"]],
    advantage: Float[Array, "G K"],
) -> tuple[Learner, Metrics]:
    """The epochs on a batch of G graphs, K plans of each, drawn from `logits` [G, N, choices]."""
    old_log_p = jax.vmap(log_probabilities)(logits, levels)

    def loss(policy: GoPolicy) -> tuple[Array, tuple[Array, Array]]:
        def single(
            context: GoContext, levels: Mapping[str, Array], old: Any, advantage: Array
        ) -> tuple[Array, Array, Array]:
            new = policy.logits(context)
            spread = entropy(new, context.mask)
            log_p = log_probabilities(new, levels)
            value, held = ppo_loss(ppo, log_p, old, advantage, spread, context.mask)
            return value, spread, held

        value, spread, held = jax.vmap(single)(contexts, levels, old_log_p, advantage)
        return jnp.mean(value), (jnp.mean(spread), jnp.mean(held))

    def epoch(learner: Learner, _: None) -> tuple[Learner, Metrics]:
        gradient, (spread, held) = eqx.filter_grad(loss, has_aux=True)(learner.policy)
        policy, moments, norm = descend(
            learner.policy,
            gradient,
            learner.moments,
            learning_rate=ppo.learning_rate,
            clip=ppo.gradient_clip,
        )
        metrics = {"entropy": spread, "clipped": held, "gradient": norm}
        return Learner(policy, moments), metrics

    learner, metrics = jax.lax.scan(epoch, learner, None, length=ppo.epochs)
    return learner, {name: value[-1] for name, value in metrics.items()}


def imitate(
    ppo: PPO,
    learner: Learner,
    contexts: GoContext,
    levels: Mapping[str, Int[Array, "G K N"]],
    weight: Bool[Array, "G K N"],
) -> tuple[Learner, Float[Array, ""]]:
    """A step towards plans that are known: minus the mean log-probability of those of their
    decisions that `weight` counts, summed over the kinds.

    Not of the paper. Of equal devices any plan has copies with the devices exchanged, between
    which plans that are drawn op by op cannot choose; what is imitated has chosen already.
    """
    count = jnp.maximum(jnp.sum(weight.astype(jnp.float32)), 1.0)

    def loss(policy: GoPolicy) -> Array:
        def single(context: GoContext, levels: Mapping[str, Array], weight: Array) -> Array:
            log_p = log_probabilities(policy.logits(context), levels)
            parts = [jnp.sum(jnp.where(weight, log_p[name], 0.0)) for name in sorted(log_p)]
            return sum(parts, jnp.zeros((), jnp.float32))

        return -jnp.sum(jax.vmap(single)(contexts, levels, weight)) / count

    value, gradient = eqx.filter_value_and_grad(loss)(learner.policy)
    policy, moments, _ = descend(
        learner.policy,
        gradient,
        learner.moments,
        learning_rate=ppo.learning_rate,
        clip=ppo.gradient_clip,
    )
    return Learner(policy, moments), value
