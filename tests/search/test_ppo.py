"""PPO on whole graphs: rewards, advantages and the loss by hand."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from egx.errors import SearchError
from egx.policies.distributions import log_probabilities
from egx.search.ppo import PPO, Baseline, advantages, new_baseline, plan_rewards, ppo_loss

COST = jnp.asarray([4.0, 1.0, 9.0, 0.25], jnp.float32)
FITS = jnp.asarray([True, True, False, True])
ONE = jnp.ones((), jnp.float32)


def test_rewards_are_roots_of_relative_times():
    found = plan_rewards(PPO(), COST, FITS, jnp.full(4, 4.0))
    np.testing.assert_allclose(found, [-1.0, -0.5, -10.0, -0.25])
    free = plan_rewards(PPO(), jnp.zeros(2), jnp.ones(2, bool), jnp.zeros(2))
    np.testing.assert_allclose(free, [0.0, 0.0])
    # However slow it is, a plan that runs is no worse than one that does not.
    slow = plan_rewards(PPO(), jnp.asarray([400.0, 1.0]), jnp.asarray([True, False]), jnp.ones(2))
    np.testing.assert_allclose(slow, [-10.0, -10.0])


def test_advantages_against_the_running_mean():
    ppo = PPO(advantage="running", baseline_rate=0.4)
    mean, means = 0.0, []
    baseline = new_baseline()
    for batch, rate in enumerate((1.0, 0.5, 0.4)):
        cost = COST * (batch + 1)
        advantage, reward, baseline = advantages(ppo, cost, FITS, ONE, baseline)
        by_hand = np.where(FITS, -np.sqrt(cost), -10.0)
        mean += rate * (by_hand.mean() - mean)
        means.append(float(baseline.mean))
        np.testing.assert_allclose(reward, by_hand, rtol=1e-6)
        np.testing.assert_allclose(advantage, by_hand - mean, rtol=1e-5)
        np.testing.assert_allclose(means[-1], mean, rtol=1e-6)
    assert float(baseline.batches) == 3


def test_advantages_by_rank_put_what_is_not_valid_last():
    ppo = PPO(advantage="rank")
    advantage, _, _ = advantages(ppo, COST, FITS, ONE, Baseline(ONE, ONE))
    np.testing.assert_allclose(advantage, [-1 / 3, 1 / 3, -1.0, 1.0], rtol=1e-6)
    # Equal plans share what their places are worth.
    cost = jnp.asarray([2.0, 2.0, 1.0])
    advantage, _, _ = advantages(ppo, cost, jnp.ones(3, bool), ONE, new_baseline())
    np.testing.assert_allclose(advantage, [-0.5, -0.5, 1.0], rtol=1e-6)


def test_loss_against_plain_loops():
    rng = np.random.default_rng(0)
    mask = np.array([True, True, True, False])
    logits = {"device": rng.normal(size=(4, 3)), "priority": rng.normal(size=(4, 2))}
    older = {name: value + 0.3 * rng.normal(size=value.shape) for name, value in logits.items()}
    levels = {"device": rng.integers(0, 3, (2, 4)), "priority": rng.integers(0, 2, (2, 4))}
    advantage = np.array([0.7, -0.4])

    def log_softmax(x):
        return x - np.log(np.exp(x).sum(-1, keepdims=True))

    gain, held = 0.0, 0
    for name in logits:
        for plan in range(2):
            for op in np.flatnonzero(mask):
                level = levels[name][plan, op]
                new, old = (log_softmax(x[name][op])[level] for x in (logits, older))
                ratio = np.exp(new - old)
                parts = ratio * advantage[plan], np.clip(ratio, 0.8, 1.2) * advantage[plan]
                gain += min(parts) / (2 * mask.sum())
                held += parts[1] < parts[0]
    assert 0 < held < 12

    def single(tree):
        return {name: jnp.asarray(value, jnp.float32) for name, value in tree.items()}

    @jax.jit
    def loss(logits, older):
        chosen = {name: jnp.asarray(value, jnp.int32) for name, value in levels.items()}
        return ppo_loss(
            PPO(entropy_bonus=0.5),
            log_probabilities(logits, chosen),
            log_probabilities(older, chosen),
            jnp.asarray(advantage, jnp.float32),
            jnp.asarray(0.9, jnp.float32),
            jnp.asarray(mask),
        )

    value, share = loss(single(logits), single(older))
    np.testing.assert_allclose(value, -gain - 0.5 * 0.9, rtol=1e-5)
    np.testing.assert_allclose(share, held / 12, rtol=1e-5)


def test_impossible_settings_are_named():
    with pytest.raises(SearchError, match="epochs must be a whole number of 1 or more, got 0"):
        PPO(epochs=0)
    with pytest.raises(SearchError, match="advantage must be running or rank, got 'none'"):
        PPO(advantage="none")
