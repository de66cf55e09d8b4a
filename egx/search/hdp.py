"""HDP: ops are grouped, groups are placed, and both networks learn by policy gradient.

Mirhoseini et al., "A Hierarchical Model for Device Placement", ICLR 2018 (OpenReview Hkc-TeZ0W).
As published: 256 groups, four placements of a grouping, reward -sqrt(time), a moving average of
rewards as baseline, Adam with rate 0.1, gradients clipped to norm 1, logits 5 tanh(x / 10). Ours:
four groupings an update, not one (with one, half of the seeds settled on the first plans they met
on two chains and two devices); the time is relative to the problem's reference, so that rewards
mean the same for every graph; a plan that does not fit gets `penalty`; networks are narrower.

The paper decides devices. Our extension: every decision an op makes is made for its group as well,
by a head of its own on the same decoder. A group's priority goes before its ops' priorities in the
reference, which order the ops of a group.

Shapes: N ops, G groups, M groupings, P placements of each.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from egx.errors import SearchError
from egx.policies.base import Choices
from egx.policies.hdp_net import (
    HDPContext,
    HDPNet,
    Sharpness,
    draw_groups,
    hdp_context,
)
from egx.problems.base import AbstractOutcome, AbstractProblem, Decisions
from egx.search.adam import descend, no_moments
from egx.search.base import AbstractSearch, Metrics, Scalar, check_numbers, check_whole, scalar

Names = tuple[str, ...]


def _names(value: Any) -> Names | None:
    if value is None:
        return None
    return (value,) if isinstance(value, str) else tuple(value)


class Learner(eqx.Module):
    """The networks, Adam's moments, the baseline, and what was drawn last."""

    net: HDPNet
    moments: Any
    baseline: Float[Array, ""]
    updates: Int[Array, ""]
    groups: Int[Array, "M N"]
    chosen: dict[str, Int[Array, "M P G"]]


class HDP(AbstractSearch):
    """Hierarchical device placement.

    Args:
        learning_rate: of Adam.
        clip: the largest norm of a gradient.
        decay: of the baseline: what it keeps of itself in an update.
        limit, temperature: logits are limit * tanh(x / temperature).
        penalty: reward of a plan that does not fit.
        groups: the most there are; never more than ops.
        width: of both LSTMs and of the grouper's hidden layer (512 and 64 in the paper).
        groupings, placements: of an update; all placements are evaluated.
        levels: choices of a group where a decision is a real.
        decides: the decisions that are learned, the others stay at the reference; None for all.
    """

    learning_rate: Scalar = eqx.field(converter=scalar, default=0.1)
    clip: Scalar = eqx.field(converter=scalar, default=1.0)
    decay: Scalar = eqx.field(converter=scalar, default=0.9)
    limit: Scalar = eqx.field(converter=scalar, default=5.0)
    temperature: Scalar = eqx.field(converter=scalar, default=10.0)
    penalty: Scalar = eqx.field(converter=scalar, default=-10.0)
    groups: int = eqx.field(static=True, default=256)
    width: int = eqx.field(static=True, default=64)
    groupings: int = eqx.field(static=True, default=4)
    placements: int = eqx.field(static=True, default=4)
    levels: int = eqx.field(static=True, default=16)
    decides: Names | None = eqx.field(static=True, converter=_names, default=None)

    def __check_init__(self) -> None:
        check_whole(self, groups=1, width=1, groupings=1, placements=1, levels=2)
        check_numbers(
            self,
            learning_rate="0 or more",
            clip="above 0",
            decay="0 to 1",
            limit="above 0",
            temperature="above 0",
            penalty="finite",
        )

    @property
    def batch_size(self) -> int:
        return self.groupings * self.placements

    def check(self, problem: AbstractProblem) -> None:
        heads = problem.heads
        wanted = tuple(heads) if self.decides is None else self.decides
        for name in wanted:
            if name not in heads:
                raise SearchError(f"hdp: the problem decides {', '.join(heads)}, not {name!r}")
            if heads[name].axis != "op":
                raise SearchError(f"hdp decides for groups of ops, and {name!r} is made per use")
        if not wanted:
            raise SearchError("hdp: there is nothing to decide")

    def _choices(self, problem: AbstractProblem) -> Choices:
        return tuple(
            (name, self.levels if head.choices == "real" else head.choices)
            for name, head in problem.heads.items()
            if self.decides is None or name in self.decides
        )

    def initial(self, problem: AbstractProblem, *, key: PRNGKeyArray) -> Learner:
        context, choices = hdp_context(problem), self._choices(problem)
        ops = problem.graph.num_ops
        groups = min(self.groups, ops)
        net = HDPNet(context.inputs.shape[1], choices, groups=groups, width=self.width, key=key)
        none = jnp.zeros((self.groupings, self.placements, groups), jnp.int32)
        return Learner(
            net=net,
            moments=no_moments(net),
            baseline=jnp.zeros((), jnp.float32),
            updates=jnp.zeros((), jnp.int32),
            groups=jnp.zeros((self.groupings, ops), jnp.int32),
            chosen={name: none for name, _ in choices},
        )

    @property
    def _sharpness(self) -> Sharpness:
        return Sharpness(jnp.asarray(self.limit), jnp.asarray(self.temperature))

    def propose(
        self, problem: AbstractProblem, inner: Learner, *, key: PRNGKeyArray
    ) -> tuple[Decisions, Learner]:
        context, net, sharpness = hdp_context(problem), inner.net, self._sharpness
        log_p = net.group_log_p(context, sharpness)

        def grouping(key: PRNGKeyArray) -> tuple[Array, dict[str, Array]]:
            groups = draw_groups(log_p, key=jax.random.fold_in(key, 0))
            states, present = net.encoded(context, groups)

            def placement(key: PRNGKeyArray) -> dict[str, Array]:
                return net.place(states, present, sharpness, key=key)[0]

            return groups, jax.vmap(placement)(_keys(jax.random.fold_in(key, 1), self.placements))

        groups, chosen = jax.vmap(grouping)(_keys(key, self.groupings))

        def by_op(groups: Array, chosen: dict[str, Array]) -> Decisions:
            return jax.vmap(lambda one: self._of_ops(problem, groups, one))(chosen)

        decisions = jax.tree.map(
            lambda x: x.reshape(self.batch_size, -1), jax.vmap(by_op)(groups, chosen)
        )
        return decisions, Learner(
            net, inner.moments, inner.baseline, inner.updates, groups, chosen
        )  # fmt: skip

    def _of_ops(
        self, problem: AbstractProblem, groups: Int[Array, " N"], chosen: Mapping[str, Array]
    ) -> Decisions:
        """What the groups chose, op by op; what is not learned is the reference's."""
        out = {}
        for name, head in problem.heads.items():
            reference = problem.reference[name]
            if name not in chosen:
                out[name] = reference
                continue
            value = jnp.where(problem.mask(head), chosen[name][groups], 0)
            if head.choices == "real":
                # Levels first, then the reference, whose reals lie in [0, 1].
                out[name] = (value.astype(jnp.float32) + reference) / self.levels
            else:
                out[name] = value
        return out

    def update(
        self,
        problem: AbstractProblem,
        inner: Learner,
        candidates: Decisions,
        outcomes: AbstractOutcome,
        *,
        key: PRNGKeyArray,
    ) -> tuple[Learner, Metrics]:
        reference = problem.reference_cost
        relative = outcomes.cost / jnp.where(reference > 0, reference, 1.0)
        reward = jnp.where(outcomes.feasible, -jnp.sqrt(relative), self.penalty)
        reward = jnp.maximum(reward, self.penalty)
        mean = jnp.mean(reward)
        # The first batch is its own baseline.
        baseline = jnp.where(inner.updates == 0, mean, inner.baseline)
        advantage = (reward - baseline).reshape(self.groupings, self.placements)
        gradient = jax.grad(policy_loss)(
            inner.net, hdp_context(problem), inner.groups, inner.chosen, advantage, self._sharpness
        )
        net, moments, norm = descend(
            inner.net, gradient, inner.moments, learning_rate=self.learning_rate, clip=self.clip
        )
        moved = jnp.asarray(self.decay * baseline + (1.0 - self.decay) * mean)
        learner = Learner(
            net, moments, moved, inner.updates + 1, inner.groups, inner.chosen
        )  # fmt: skip
        return learner, {"mean_reward": mean, "baseline": moved, "gradient_norm": norm}


def policy_loss(
    net: HDPNet,
    context: HDPContext,
    groups: Int[Array, "M N"],
    chosen: Mapping[str, Array],
    advantage: Float[Array, "M P"],
    sharpness: Sharpness,
) -> Float[Array, ""]:
    """Minus the mean of advantage times log-probability (REINFORCE: Williams, "Simple statistical
    gradient-following algorithms for connectionist reinforcement learning", 1992)."""
    log_p = net.group_log_p(context, sharpness)

    def grouping(groups: Array, chosen: dict[str, Array]) -> Array:
        each = jnp.take_along_axis(log_p, groups[:, None], 1)[:, 0]
        of_groups = jnp.sum(jnp.where(context.mask, each, 0.0))
        states, present = net.encoded(context, groups)
        placed = jax.vmap(lambda one: net.place(states, present, sharpness, chosen=one)[1])
        return of_groups + placed(chosen)

    return -jnp.mean(advantage * jax.vmap(grouping)(groups, dict(chosen)))


def _keys(key: PRNGKeyArray, count: int) -> Array:
    return jax.vmap(lambda k: jax.random.fold_in(key, k))(jnp.arange(count))
