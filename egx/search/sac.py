"""Soft actor-critic for one-step episodes with many discrete decisions at once.

Haarnoja et al., ICML 2018, arXiv 1801.01290, as EGRL uses it (Khadka et al., ICLR 2021, arXiv
2007.07298): the critic values all decisions of a graph together, on one-hot vectors with noise,
so that it is smooth between them and its gradient at the policy's probabilities tells how to
change them; the entropy is exact.

An episode is one step and its state is the graph, the same in every sample: the actor runs once
a gradient step, and only the critic sees a batch.
"""

from __future__ import annotations

from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from egx.policies.base import Choices
from egx.policies.context import GraphContext
from egx.policies.distributions import Logits, entropy, probabilities
from egx.policies.graph_unet import GraphUNetCritic, GraphUNetPolicy
from egx.search.adam import descend, no_moments
from egx.search.base import check_numbers, check_whole
from egx.search.replay import Replay, draw

Metrics = dict[str, Float[Array, ""]]


class SACState(eqx.Module):
    """What is learned, and the optimisers' moments."""

    actor: GraphUNetPolicy
    critic: GraphUNetCritic
    target: GraphUNetCritic
    actor_moments: Any
    critic_moments: Any


class SAC(eqx.Module):
    """The learner's hyper-parameters; numbers are traced, sizes and switches static.

    Args:
        learning_rate: of Adam, for actor and critic.
        alpha: the weight of the entropy (per op, summed over heads).
        gamma: the discount; only `bootstrap` uses it.
        tau: the share of the critic that flows into the target at each step.
        noise: standard deviation of the noise on one-hot vectors, clipped to [0, 1] after.
        clip: the largest norm of each network's gradient.
        reward_shift, reward_scale: the learner sees scale * (reward + shift).
        batch: samples a gradient step.
        bootstrap: add the discounted value of the same graph, as the authors' code does,
            though an episode ends after one step.
        relaxation: the vectors at which the actor asks the critic: its probabilities, or, as in
            the authors' code, the largest one of each op alone.
    """

    learning_rate: Any = 1e-3
    alpha: Any = 0.05
    gamma: Any = 0.99
    tau: Any = 1e-3
    noise: Any = 0.2
    clip: Any = 5.0
    reward_shift: Any = 2.0
    reward_scale: Any = 5.0
    batch: int = eqx.field(static=True, default=24)
    bootstrap: bool = eqx.field(static=True, default=False)
    relaxation: Literal["probabilities", "largest"] = eqx.field(
        static=True, default="probabilities"
    )

    def __check_init__(self) -> None:
        check_whole(self, batch=1)
        check_numbers(
            self,
            learning_rate="0 or more",
            alpha="0 or more",
            gamma="0 to 1",
            tau="0 to 1",
            noise="0 or more",
            clip="above 0",
            reward_shift="finite",
            reward_scale="finite",
        )

    def start(self, actor: GraphUNetPolicy, critic: GraphUNetCritic) -> SACState:
        """The state before the first step."""
        return SACState(actor, critic, critic, no_moments(actor), no_moments(critic))

    def learn(
        self,
        state: SACState,
        context: GraphContext,
        replay: Replay,
        *,
        steps: int,
        key: PRNGKeyArray,
    ) -> tuple[SACState, Metrics]:
        """`steps` gradient steps on samples of `replay`; metrics are means over them."""

        def step(state: SACState, index: Array) -> tuple[SACState, Metrics]:
            return self.step(state, context, replay, key=jax.random.fold_in(key, index))

        state, metrics = jax.lax.scan(step, state, jnp.arange(steps))
        return state, jax.tree.map(jnp.mean, metrics)

    def step(
        self, state: SACState, context: GraphContext, replay: Replay, *, key: PRNGKeyArray
    ) -> tuple[SACState, Metrics]:
        """One gradient step of the critic, then of the actor, then of the target."""
        draw_key, noise_key = jax.random.split(key)
        levels, rewards = draw(replay, self.batch, key=draw_key)
        actions = self.smoothed(one_hot(levels, state.actor.choices), context, key=noise_key)
        targets = self.reward_scale * (rewards + self.reward_shift)
        if self.bootstrap:
            targets = targets + self.gamma * self._next_value(state, context)
        critic_loss, gradient = jax.value_and_grad(critic_loss_of)(
            state.critic, context, actions, targets
        )
        critic, critic_moments = self._descend(state.critic, gradient, state.critic_moments)
        (actor_loss, spread), gradient = jax.value_and_grad(self.actor_loss, has_aux=True)(
            state.actor, critic, context
        )
        actor, actor_moments = self._descend(state.actor, gradient, state.actor_moments)
        target = jax.tree.map(lambda old, new: old + self.tau * (new - old), state.target, critic)
        metrics = {"critic_loss": critic_loss, "actor_loss": actor_loss, "entropy": spread}
        return SACState(actor, critic, target, actor_moments, critic_moments), metrics

    def smoothed(
        self, actions: Float[Array, "B N A"], context: GraphContext, *, key: PRNGKeyArray
    ) -> Float[Array, "B N A"]:
        """One-hot vectors plus noise, clipped to [0, 1]; padding stays 0."""
        noisy = jnp.clip(actions + self.noise * jax.random.normal(key, actions.shape), 0.0, 1.0)
        return jnp.where(context.mask[:, None], noisy, 0.0)

    def actor_loss(
        self, actor: GraphUNetPolicy, critic: GraphUNetCritic, context: GraphContext
    ) -> tuple[Float[Array, ""], Float[Array, ""]]:
        """Minus the lower value of the actor's relaxed decisions and its entropy; the entropy."""
        logits = actor.logits(context)
        spread = entropy(logits, context.mask)
        value = jnp.minimum(*critic(context, self.relaxed(logits, actor.choices, context)))
        return -value - self.alpha * spread, spread

    def relaxed(
        self, logits: Logits, choices: Choices, context: GraphContext
    ) -> Float[Array, "N A"]:
        """The vectors that stand for the actor's decisions before the critic."""
        parts = []
        for name, p in probabilities(logits).items():
            if self.relaxation == "largest":
                p = p * jax.nn.one_hot(jnp.argmax(p, axis=-1), p.shape[-1])
            parts.append((name, p))
        by_name = dict(parts)
        joined = jnp.concatenate([by_name[name] for name, _ in choices], axis=-1)
        return jnp.where(context.mask[:, None], joined, 0.0)

    def _next_value(self, state: SACState, context: GraphContext) -> Float[Array, ""]:
        logits = state.actor.logits(context)
        actions = self.relaxed(logits, state.actor.choices, context)
        value = jnp.minimum(*state.target(context, actions))
        return jax.lax.stop_gradient(value + self.alpha * entropy(logits, context.mask))

    def _descend(self, network: Any, gradient: Any, moments: Any) -> tuple[Any, Any]:
        return descend(
            network, gradient, moments, learning_rate=self.learning_rate, clip=self.clip
        )[:2]


def critic_loss_of(
    critic: GraphUNetCritic,
    context: GraphContext,
    actions: Float[Array, "B N A"],
    targets: Float[Array, " B"],
) -> Float[Array, ""]:
    """The squared errors of both values, each a mean over the batch, summed."""
    first, second = jax.vmap(critic, in_axes=(None, 0))(context, actions)
    return jnp.mean((first - targets) ** 2) + jnp.mean((second - targets) ** 2)


def one_hot(levels: dict[str, Array], choices: Choices) -> Float[Array, "*B N A"]:
    """The heads' one-hot vectors side by side, in the order of `choices`."""
    return jnp.concatenate(
        [jax.nn.one_hot(levels[name], count) for name, count in choices], axis=-1
    )
