"""A cyclic buffer of evaluated decisions and their rewards."""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from egx.policies.base import Choices


class Replay(eqx.Module):
    """The last R evaluations; the levels are stored in the smallest integer type that holds them.

    There is nothing else to a transition: an episode is one step, and its state is the graph.
    """

    levels: dict[str, Int[Array, "R N"]]
    rewards: Float[Array, " R"]
    cursor: Int[Array, ""]
    count: Int[Array, ""]


def empty_replay(choices: Choices, length: int, capacity: int) -> Replay:
    """Room for `capacity` evaluations of `length` entries a head."""

    def dtype(count: int) -> type:
        return jnp.int8 if count <= 128 else jnp.int32

    return Replay(
        levels={name: jnp.zeros((capacity, length), dtype(count)) for name, count in choices},
        rewards=jnp.zeros(capacity, jnp.float32),
        cursor=jnp.zeros((), jnp.int32),
        count=jnp.zeros((), jnp.int32),
    )


def add(
    replay: Replay, levels: dict[str, Int[Array, "B N"]], rewards: Float[Array, " B"]
) -> Replay:
    """Appends B evaluations over the oldest ones; B must not exceed the capacity."""
    capacity, batch = replay.rewards.shape[0], rewards.shape[0]
    rows = (replay.cursor + jnp.arange(batch, dtype=jnp.int32)) % capacity
    return Replay(
        levels={
            name: stored.at[rows].set(levels[name].astype(stored.dtype), unique_indices=True)
            for name, stored in replay.levels.items()
        },
        rewards=replay.rewards.at[rows].set(rewards, unique_indices=True),
        cursor=(replay.cursor + batch) % capacity,
        count=jnp.minimum(replay.count + batch, capacity),
    )


def draw(
    replay: Replay, batch: int, *, key: PRNGKeyArray
) -> tuple[dict[str, Int[Array, "B N"]], Float[Array, " B"]]:
    """`batch` stored evaluations, uniformly and with replacement."""
    rows = jax.random.randint(key, (batch,), 0, jnp.maximum(replay.count, 1))
    levels = {name: stored[rows].astype(jnp.int32) for name, stored in replay.levels.items()}
    return levels, replay.rewards[rows]
