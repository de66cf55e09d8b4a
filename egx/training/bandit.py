"""One step of REGAL's training: a contextual bandit, solved by REINFORCE with a baseline.

Paliwal et al., "Reinforced Genetic Algorithm Learning for Optimizing Computation Graphs", ICLR
2020, arXiv 1905.02494. A graph is the context, the bins of all keys' distributions are the action,
and the reward is the negative cost that the genetic algorithm reaches with them, relative to what
it reaches by itself; both see the same random numbers.

Shapes: G problems, B of them at once, K actions or runs a problem, R plain runs a problem, W keys
of a candidate, Q knots of a quantile function.
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
    FRACTIONS,
    MEANS,
    UNIFORM_FRACTION,
    UNIFORM_MEAN,
    AbstractProposalPolicy,
    ProposalBins,
    log_probability,
    mean_entropy,
    sample_bins,
)
from egx.problems.base import AbstractProblem
from egx.search.base import Scalar, check_numbers, check_whole, scalar
from egx.search.betas import bin_knots, draw
from egx.search.brkga import BRKGA, evolve, rank
from egx.search.keys import decode_flat, gene_shapes, uniform_keys
from egx.search.regal import proposal_knots, rows_of_bins

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
        warm_steps: steps at the start that value single candidates in place of runs: each action
            is one candidate drawn from its distributions, and is rewarded when it is among the
            best of its problem. Not in the paper: a run tells one number of thousands of choices
            for the price of hundreds of candidates, each of which tells one too.
        warm_actions: candidates a problem in such a step.
        warm_share: the share of them that is rewarded.
    """

    brkga: BRKGA = eqx.field(default_factory=BRKGA)
    learning_rate: Scalar = eqx.field(converter=scalar, default=1e-3)
    value_weight: Scalar = eqx.field(converter=scalar, default=0.5)
    entropy_bonus: Scalar = eqx.field(converter=scalar, default=0.0)
    worst_ratio: Scalar = eqx.field(converter=scalar, default=2.0)
    warm_share: Scalar = eqx.field(converter=scalar, default=0.1)
    budget: int = eqx.field(static=True, default=480)
    problems: int = eqx.field(static=True, default=8)
    actions: int = eqx.field(static=True, default=8)
    seeds: int = eqx.field(static=True, default=8)
    baseline: str = eqx.field(static=True, default="learned")
    warm_steps: int = eqx.field(static=True, default=0)
    warm_actions: int = eqx.field(static=True, default=256)

    def __check_init__(self) -> None:
        check_whole(self, budget=1, problems=1, actions=1, seeds=1, warm_steps=0, warm_actions=1)
        check_numbers(
            self,
            learning_rate="0 or more",
            value_weight="0 or more",
            entropy_bonus="0 or more",
            worst_ratio="above 0",
            warm_share="0 to 1",
        )
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
    gain: Float[Array, "B K"] | None = None,
) -> Float[Array, ""]:
    """REINFORCE's loss, whose gradient is an unbiased estimate of the mean reward's (negative);
    `gain`, if it is given, stands for reward minus baseline."""
    if gain is not None:
        advantage = gain
    elif bandit.baseline == "others":
        count = reward.shape[1]
        # Reward minus the mean of the others' is this much of reward minus the mean of all.
        advantage = (reward - jnp.mean(reward, 1, keepdims=True)) * (count / (count - 1))
    else:
        advantage = reward - jax.lax.stop_gradient(value)[:, None]
    policy = -jnp.mean(advantage * log_p)
    error = jnp.mean((value[:, None] - reward) ** 2)
    return policy + bandit.value_weight * error - bandit.entropy_bonus * jnp.mean(entropy)


def adam(bandit: Bandit) -> optax.GradientTransformation:
    return optax.chain(optax.scale_by_adam(), optax.scale_by_learning_rate(bandit.learning_rate))


def take_problems(problems: AbstractProblem, index: Int[Array, " B"]) -> AbstractProblem:
    """Some of the problems of a stack."""
    return jax.tree.map(lambda x: x[index], problems)


@eqx.filter_jit
def run_costs(
    brkga: BRKGA,
    problems: AbstractProblem,
    index: Int[Array, " B"],
    keys: Key[Array, "B K"],
    knots: Float[Array, "B K W Q"],
    budget: Int[Array, ""],
) -> Float[Array, "B K"]:
    """What K runs of the genetic algorithm reach on each of the problems `index` of a stack.

    This is what takes long to compile and to run; plain runs, training and validation share it.
    """

    def single(problem: AbstractProblem, keys: Array, knots: Array) -> Array:
        def run(key: PRNGKeyArray, knots: Array) -> Array:
            return evolve(brkga, problem, budget=budget, key=key, proposal=knots).cost

        return jax.vmap(run)(keys, knots)

    return jax.vmap(single)(take_problems(problems, index), keys, knots)


@eqx.filter_jit
def run_keys(
    key: PRNGKeyArray, index: Int[Array, " B"], seeds: Int[Array, "B K"]
) -> Key[Array, "B K"]:
    """The keys of runs: one for each problem and seed, plain or with a policy."""

    def single(number: Array, seeds: Array) -> Array:
        return jax.vmap(lambda s: jax.random.fold_in(jax.random.fold_in(key, number), s))(seeds)

    return jax.vmap(single)(index, seeds)


@eqx.filter_jit
def plain_knots(problems: AbstractProblem, shape: tuple[int, int]) -> Float[Array, "B K W Q"]:
    """Proposals that leave the genetic algorithm as it is."""
    one = bin_knots()[UNIFORM_MEAN, UNIFORM_FRACTION]
    keys = sum(
        length * count
        for length, count in gene_shapes(jax.tree.map(lambda x: x[0], problems)).values()
    )
    return jnp.broadcast_to(one, (*shape, keys, len(one)))


@eqx.filter_jit
def act(
    policy: AbstractProposalPolicy,
    problems: AbstractProblem,
    index: Int[Array, " B"],
    keys: Key[Array, "B K"],
    action: str,
) -> tuple[ProposalBins, Float[Array, "B K W Q"]]:
    """K sampled actions on each problem, and the proposals that `action` makes of the policy:
    those of the actions ("sample"), or the same for all."""

    def single(problem: AbstractProblem, keys: Array) -> tuple[ProposalBins, Array]:
        logits = policy(problem)
        return (
            jax.vmap(lambda key: sample_bins(logits, key=key))(keys),
            jax.vmap(lambda key: proposal_knots(problem, logits, action, key=key))(keys),
        )

    return jax.vmap(single)(take_problems(problems, index), keys)


@eqx.filter_jit
def try_candidates(
    policy: AbstractProposalPolicy,
    problems: AbstractProblem,
    index: Int[Array, " B"],
    keys: Key[Array, "B K"],
    share: Float[Array, ""],
) -> tuple[ProposalBins, Float[Array, "B K"], Float[Array, "B K"]]:
    """K sampled actions, the cost of one candidate drawn from each, and the gains of the actions:
    equal for the best share of a problem's candidates, equal for the others, and 0 on average."""
    knots = bin_knots().reshape(len(MEANS) * len(FRACTIONS), -1)

    def single(problem: AbstractProblem, keys: Array) -> tuple[ProposalBins, Array, Array]:
        logits, count = policy(problem), keys.shape[0]

        def candidate(key: PRNGKeyArray) -> tuple[ProposalBins, Array, Array]:
            bins_key, draw_key = jax.random.split(key)
            bins = sample_bins(logits, key=bins_key)
            uniform = uniform_keys(problem, key=draw_key, batch=1)[0]
            drawn = draw(knots, uniform, rows_of_bins(problem, bins))
            outcome = problem.evaluate(decode_flat(problem, drawn))
            return bins, outcome.cost, outcome.feasible

        bins, cost, feasible = jax.vmap(candidate)(keys)
        best = jnp.maximum(jnp.round(share * count), 1.0)
        place = jnp.zeros(count, jnp.float32)
        place = place.at[rank(cost, feasible)].set(jnp.arange(count, dtype=jnp.float32))
        return bins, cost, (place < best).astype(jnp.float32) * count / best - 1.0

    return jax.vmap(single)(take_problems(problems, index), keys)


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


@eqx.filter_jit
def learn(
    bandit: Bandit,
    learner: Learner,
    problems: AbstractProblem,
    index: Int[Array, " B"],
    bins: ProposalBins,
    reward: Float[Array, "B K"],
    gain: Float[Array, "B K"] | None = None,
) -> tuple[Learner, dict[str, Array]]:
    """One step of Adam, and what to watch; `gain` is as in `bandit_loss`."""
    batch = take_problems(problems, index)

    def loss(policy: AbstractProposalPolicy) -> tuple[Array, Any]:
        def single(problem: AbstractProblem, bins: ProposalBins) -> tuple[Array, Array, Array]:
            logits, value = policy.logits_and_value(problem)
            log_p = jax.vmap(lambda one: log_probability(logits, one, problem))(bins)
            return log_p, value, mean_entropy(logits, problem)

        log_p, value, entropy = jax.vmap(single)(batch, bins)
        return bandit_loss(log_p, reward, value, entropy, bandit, gain), (value, entropy)

    gradient, (value, entropy) = eqx.filter_grad(loss, has_aux=True)(learner.policy)
    with jax.numpy_dtype_promotion("standard"):
        updates, moments = adam(bandit).update(gradient, learner.moments)
    metrics = {
        "reward": jnp.mean(reward),
        "reward_spread": jnp.mean(jnp.std(reward, 1)),
        "value_error": jnp.sqrt(jnp.mean((value[:, None] - reward) ** 2)),
        "entropy": jnp.mean(entropy),
        "gradient": jnp.sqrt(sum(jnp.sum(leaf * leaf) for leaf in jax.tree.leaves(gradient))),
    }
    return Learner(eqx.apply_updates(learner.policy, updates), moments), metrics


def bandit_step(
    bandit: Bandit,
    learner: Learner,
    problems: AbstractProblem,
    plain: Float[Array, "G R"],
    index: Int[Array, " B"],
    key: PRNGKeyArray,
    step: int,
) -> tuple[Learner, dict[str, Array]]:
    """One step on the problems `index`; what is random follows from key and step."""
    step_key = jax.random.fold_in(jax.random.fold_in(key, 0x5EED), step)
    seed_key, action_key = jax.random.split(step_key)
    shape = (len(index), bandit.actions)
    policy, gain = learner.policy, None
    if step < bandit.warm_steps:
        keys = jax.random.split(action_key, (len(index), bandit.warm_actions))
        share = jnp.asarray(bandit.warm_share)
        bins, cost, gain = try_candidates(policy, problems, index, keys, share)
    else:
        keys = jax.random.split(action_key, shape)
        bins, knots = act(policy, problems, index, keys, "sample")
        # One seed a problem: its actions meet the same random numbers.
        seeds = jax.random.randint(seed_key, (len(index), 1), 0, bandit.seeds, jnp.int32)
        runs = run_keys(key, index, jnp.broadcast_to(seeds, shape))
        budget = jnp.asarray(bandit.budget, jnp.int32)
        cost = run_costs(bandit.brkga, problems, index, runs, knots, budget)
    reward = -jnp.minimum(relative(cost, plain[index]), bandit.worst_ratio)
    return learn(bandit, learner, problems, index, bins, reward, gain)
