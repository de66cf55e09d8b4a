"""The replay buffer: a ring of evaluations."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from egx.search.replay import add, draw, empty_replay

CHOICES = (("weights", 3), ("priority", 500))


def rows(numbers):
    values = jnp.asarray(numbers, jnp.int32)
    levels = {
        "weights": jnp.stack([values % 3] * 4, axis=1),
        "priority": jnp.stack([values] * 4, axis=1),
    }
    return levels, values.astype(jnp.float32)


def test_it_keeps_the_last_ones_when_it_wraps():
    replay = empty_replay(CHOICES, 4, 7)
    assert replay.levels["weights"].dtype == jnp.int8
    assert replay.levels["priority"].dtype == jnp.int32
    put = jax.jit(add)
    for start in (0, 3, 6, 9):
        replay = put(replay, *rows(range(start, start + 3)))
        assert replay.count == min(start + 3, 7)
    assert sorted(np.asarray(replay.rewards).tolist()) == [5.0, 6.0, 7.0, 8.0, 9.0, 10.0, 11.0]
    np.testing.assert_array_equal(replay.levels["priority"][:, 0], replay.rewards)
    np.testing.assert_array_equal(replay.levels["weights"][:, 0], replay.rewards % 3)


def test_it_draws_whole_evaluations_among_those_it_has():
    replay = add(empty_replay(CHOICES, 4, 100), *rows(range(200, 210)))
    levels, rewards = draw(replay, 500, key=jax.random.key(0))
    assert set(np.asarray(rewards).tolist()) == set(map(float, range(200, 210)))
    for k in range(4):
        np.testing.assert_array_equal(levels["priority"][:, k], rewards)
        np.testing.assert_array_equal(levels["weights"][:, k], rewards % 3)
    assert levels["weights"].dtype == jnp.int32
    again = draw(replay, 500, key=jax.random.key(0))[1]
    np.testing.assert_array_equal(rewards, again)
