"""Categorical decisions: one softmax an op and head, factorised over ops and heads."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from egx.problems.base import Decisions, Head

# Heads differ in their number of choices, so that it has no name to be checked by.
Logits = dict[str, Float[Array, "N _K"]]
Levels = dict[str, Int[Array, "*B N"]]


def probabilities(logits: Mapping[str, Array]) -> dict[str, Float[Array, "*B N _K"]]:
    """The softmax of each head."""
    return {name: jax.nn.softmax(value, axis=-1) for name, value in logits.items()}


def greedy(logits: Mapping[str, Array]) -> Levels:
    """The most likely choice of each entry; the lower one of a tie."""
    return {name: jnp.argmax(value, axis=-1).astype(jnp.int32) for name, value in logits.items()}


def sample(logits: Mapping[str, Array], *, key: PRNGKeyArray) -> Levels:
    """One choice an entry, drawn from the softmax; heads draw in alphabetical order."""
    return {
        name: jax.random.categorical(jax.random.fold_in(key, index), value, axis=-1).astype(
            jnp.int32
        )
        for index, (name, value) in enumerate(sorted(logits.items()))
    }


def log_probabilities(
    logits: Mapping[str, Array], levels: Mapping[str, Array]
) -> dict[str, Float[Array, "*B N"]]:
    """The log of each choice's probability, [..., N] of each head; `levels` may be a batch."""

    def chosen(value: Array, level: Array) -> Array:
        log_p = jnp.broadcast_to(
            jax.nn.log_softmax(value, axis=-1), (*level.shape, value.shape[-1])
        )
        return jnp.take_along_axis(log_p, level[..., None], axis=-1)[..., 0]

    return {name: chosen(value, levels[name]) for name, value in logits.items()}


def entropy(logits: Mapping[str, Array], mask: Bool[Array, " N"]) -> Float[Array, ""]:
    """The exact entropy in nats: the mean over real entries, summed over heads.

    The entropy of the joint distribution is this times the number of entries; the mean keeps
    its weight against the reward the same for graphs of every size.
    """
    count = jnp.maximum(jnp.sum(mask), 1).astype(jnp.float32)
    total = jnp.zeros((), jnp.float32)
    for value in logits.values():
        log_p = jax.nn.log_softmax(value, axis=-1)
        each = -jnp.sum(jnp.exp(log_p) * log_p, axis=-1)
        total = total + jnp.sum(jnp.where(mask, each, 0.0)) / count
    return total


def to_decisions(
    heads: Mapping[str, Head], levels: Mapping[str, Array], choices: Mapping[str, int]
) -> Decisions:
    """Decisions from the chosen levels; level c of a real head's K stands for c / (K - 1)."""
    decisions = {}
    for name, head in heads.items():
        if head.choices == "real":
            top = max(choices[name] - 1, 1)
            decisions[name] = levels[name].astype(jnp.float32) / top
        else:
            decisions[name] = levels[name]
    return decisions


def to_levels(
    heads: Mapping[str, Head], decisions: Mapping[str, Array], choices: Mapping[str, int]
) -> Levels:
    """The levels that come nearest to decisions: what `to_decisions` undoes."""
    levels = {}
    for name, head in heads.items():
        value = jnp.asarray(decisions[name])
        if head.choices == "real":
            nearest = jnp.round(jnp.clip(value, 0.0, 1.0) * (choices[name] - 1))
            value = nearest.astype(jnp.int32)
        levels[name] = value
    return levels
