"""One step of REGAL's training: a contextual bandit, solved by REINFORCE with a baseline.

Paliwal et al., "Reinforced Genetic Algorithm Learning for Optimizing Computation Graphs", ICLR
2020, arXiv 1905.02494. A graph is the context, the bins of all keys' distributions are the action,
and the reward is the negative cost that the genetic algorithm reaches with them, relative to what
it reaches by itself; both see the same random numbers.

Shapes: G problems, B problems of a step, K actions a problem, R random seeds a problem.
"""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int, Key, PRNGKeyArray

from egx.errors import SearchError
from egx.policies.proposal import (
    AbstractProposalPolicy,
    ProposalBins,
    log_probability,
    mean_entropy,
    sample_bins,
)
from egx.problems.base import AbstractProblem
from egx.search.base import Scalar, scalar
from egx.search.betas import bin_knots
from egx.search.brkga import BRKGA, evolve
from egx.search.regal import knots_of_bins, proposal_knots

BASELINES = ("learned", "others")
Moments = Any


class Bandit(eqx.Module):
    """How a policy is trained.

    Args:
        brkga: the genetic algorithm whose proposals are learned.
        learning_rate: of Adam.
        value_weight: of the read-out's squared error beside the policy's loss.
        entropy_bonus: of the mean entropy of a key's bins, in units of the reward.
        worst_ratio: costs above this multiple of the plain ones count as this multiple, so that
            the penalty of a plan that does not fit drowns nothing else.
        budget: evaluations of a run of the genetic algorithm.
        problems: problems a step (B).
        actions: actions a problem and step (K).
        seeds: plain runs a problem, whose mean is the denominator of its reward (R).
        baseline: what an action's reward is compared with: "learned", what the network expects,
            as in the paper; or "others", the mean reward of the step's other actions on the same
            problem.
    """

    brkga: BRKGA = eqx.field(default_factory=BRKGA)
    learning_rate: Scalar = eqx.field(converter=scalar, default=1e-3)
    value_weight: Scalar = eqx.field(converter=scalar, default=0.5)
    entropy_bonus: Scalar = eqx.field(converter=scalar, default=0.0)
    worst_ratio: Scalar = eqx.field(converter=scalar, default=2.0)
    budget: int = eqx.field(static=True, default=480)
    problems: int = eqx.field(static=True, default=8)
    actions: int = eqx.field(static=True, default=8)
    seeds: int = eqx.field(static=True, default=4)
    baseline: str = eqx.field(static=True, default="learned")

    def __check_init__(self) -> None:
        for name in ("budget", "problems", "actions", "seeds"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise SearchError(f"{name} must be a whole number of 1 or more, got {value!r}")
        if self.baseline not in BASELINES:
            raise SearchError(f"baseline must be {' or '.join(BASELINES)}, got {self.baseline!r}")
        if self.baseline == "others" and self.actions < 2:
            raise SearchError("baseline='others' compares actions: it needs 2 or more a problem")


def bandit_loss(
    log_p: Float[Array, "B K"],
    reward: Float[Array, "B K"],
    value: Float[Array, " B"],
    entropy: Float[Array, " B"],
    bandit: Bandit,
) -> Float[Array, ""]:
    """REINFORCE's loss, whose gradient is an unbiased estimate of the mean reward's (negative)."""
    if bandit.baseline == "others":
        count = reward.shape[1]
        # Reward minus the mean of the others' is this much of reward minus the mean of all.
        advantage = (reward - jnp.mean(reward, 1, keepdims=True)) * (count / (count - 1))
    else:
        advantage = reward - jax.lax.stop_gradient(value)[:, None]
    policy = -jnp.mean(advantage * log_p)
    error = jnp.mean((value[:, None] - reward) ** 2)
    return policy + bandit.value_weight * error - bandit.entropy_bonus * jnp.mean(entropy)


def run_key(key: PRNGKeyArray, problem: Int[Array, ""], seed: Int[Array, ""]) -> PRNGKeyArray:
    """The key of a run of the genetic algorithm on one problem, plain or with a policy."""
    return jax.random.fold_in(jax.random.fold_in(key, problem), seed)


def adam(bandit: Bandit) -> optax.GradientTransformation:
    return optax.chain(optax.scale_by_adam(), optax.scale_by_learning_rate(bandit.learning_rate))


def take_problems(problems: AbstractProblem, index: Int[Array, " B"]) -> AbstractProblem:
    """Some of the problems of a stack."""
    return jax.tree.map(lambda x: x[index], problems)


@eqx.filter_jit
def plain_costs(
    brkga: BRKGA,
    problems: AbstractProblem,
    key: PRNGKeyArray,
    index: Array,
    seeds: int,
    budget: Any,
) -> Float[Array, "B R"]:
    """What the genetic algorithm reaches by itself on the problems `index` of a stack."""

    def single(problem: AbstractProblem, number: Array) -> Array:
        def run(seed: Array) -> Array:
            return evolve(brkga, problem, budget=budget, key=run_key(key, number, seed)).cost

        return jax.vmap(run)(jnp.arange(seeds))

    return jax.vmap(single)(take_problems(problems, index), index)


@eqx.filter_jit
def policy_costs(
    policy: AbstractProposalPolicy,
    brkga: BRKGA,
    problems: AbstractProblem,
    key: PRNGKeyArray,
    index: Array,
    seeds: int,
    budget: Any,
    action: str,
) -> Float[Array, "B R"]:
    """The same with a policy's proposals; an action is drawn for each seed."""

    def single(problem: AbstractProblem, number: Array) -> Array:
        logits = policy(problem)

        def run(seed: Array) -> Array:
            one = run_key(key, number, seed)
            drawn = proposal_knots(problem, logits, action, key=jax.random.fold_in(one, 1))
            return evolve(brkga, problem, budget=budget, key=one, proposal=drawn).cost

        return jax.vmap(run)(jnp.arange(seeds))

    return jax.vmap(single)(take_problems(problems, index), index)


def relative(cost: Float[Array, "B K"], plain: Float[Array, "B R"]) -> Float[Array, "B K"]:
    """Costs over the mean of plain ones; 1 where both are 0."""
    mean = jnp.mean(plain, 1, keepdims=True)
    ratio = cost / jnp.where(mean > 0, mean, 1.0)
    return jnp.where(mean > 0, ratio, 1.0 + cost)


class Learner(eqx.Module):
    """The policy and Adam's moments."""

    policy: AbstractProposalPolicy
    moments: Moments


def new_learner(policy: AbstractProposalPolicy, bandit: Bandit) -> Learner:
    return Learner(policy, adam(bandit).init(eqx.filter(policy, eqx.is_array)))


def rollout(
    bandit: Bandit,
    policy: AbstractProposalPolicy,
    problem: AbstractProblem,
    key: PRNGKeyArray,
    action_keys: Key[Array, " K"],
) -> tuple[ProposalBins, Float[Array, " K"]]:
    """K actions and the cost that each reaches, all on the same random numbers."""
    logits, knots = policy(problem), bin_knots()

    def run(action_key: PRNGKeyArray) -> tuple[ProposalBins, Array]:
        bins = sample_bins(logits, key=action_key)
        drawn = knots_of_bins(problem, bins, knots)
        found = evolve(bandit.brkga, problem, budget=bandit.budget, key=key, proposal=drawn)
        return bins, found.cost

    return jax.vmap(run)(action_keys)


@eqx.filter_jit
def bandit_step(
    bandit: Bandit,
    learner: Learner,
    problems: AbstractProblem,
    plain: Float[Array, "G R"],
    index: Int[Array, " B"],
    key: PRNGKeyArray,
    step: Int[Array, ""],
) -> tuple[Learner, dict[str, Array]]:
    """One step of Adam on the problems `index`; the random numbers follow from key and step."""
    step_key = jax.random.fold_in(jax.random.fold_in(key, 0x5EED), step)
    seed_key, action_key = jax.random.split(step_key)
    batch, denominators = take_problems(problems, index), plain[index]
    seeds = jax.random.randint(seed_key, index.shape, 0, bandit.seeds, jnp.int32)
    run_keys = jax.vmap(lambda number, seed: run_key(key, number, seed))(index, seeds)
    action_keys = jax.random.split(action_key, (index.shape[0], bandit.actions))
    bins, cost = jax.vmap(lambda *x: rollout(bandit, learner.policy, *x))(
        batch, run_keys, action_keys
    )
    reward = -jnp.minimum(relative(cost, denominators), bandit.worst_ratio)

    def loss(policy: AbstractProposalPolicy) -> tuple[Array, Any]:
        def single(problem: AbstractProblem, bins: ProposalBins) -> tuple[Array, Array, Array]:
            logits, value = policy.logits_and_value(problem)
            log_p = jax.vmap(lambda one: log_probability(logits, one, problem))(bins)
            return log_p, value, mean_entropy(logits, problem)

        log_p, value, entropy = jax.vmap(single)(batch, bins)
        return bandit_loss(log_p, reward, value, entropy, bandit), (value, entropy)

    gradient, (value, entropy) = eqx.filter_grad(loss, has_aux=True)(learner.policy)
    with jax.numpy_dtype_promotion("standard"):
        updates, moments = adam(bandit).update(gradient, learner.moments)
    after = Learner(eqx.apply_updates(learner.policy, updates), moments)
    metrics = {
        "reward": jnp.mean(reward),
        "reward_spread": jnp.mean(jnp.std(reward, 1)),
        "value_error": jnp.sqrt(jnp.mean((value[:, None] - reward) ** 2)),
        "entropy": jnp.mean(entropy),
        "gradient": optax.global_norm(gradient),
    }
    return after, metrics
