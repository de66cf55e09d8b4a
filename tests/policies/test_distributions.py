"""Categorical decisions against sums over all of them."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np

from egx.policies.distributions import entropy, greedy, probabilities, sample, to_decisions
from egx.problems.base import Head


def logits(seed=0, ops=3):
    rng = np.random.default_rng(seed)
    return {
        "weights": jnp.asarray(rng.normal(size=(ops, 3)) * 2, jnp.float32),
        "activations": jnp.asarray(rng.normal(size=(ops, 2)), jnp.float32),
    }


def test_entropy_is_that_of_the_joint_distribution():
    given = logits()
    p = {name: np.asarray(value, np.float64) for name, value in given.items()}
    p = {k: np.exp(v) / np.exp(v).sum(1, keepdims=True) for k, v in p.items()}
    joint = 0.0
    for w in itertools.product(range(3), repeat=3):
        for a in itertools.product(range(2), repeat=3):
            chance = np.prod([p["weights"][i, w[i]] * p["activations"][i, a[i]] for i in range(3)])
            joint -= chance * np.log(chance)
    np.testing.assert_allclose(entropy(given, jnp.ones(3, bool)), joint / 3, rtol=1e-5)


def test_padding_has_no_entropy():
    given = logits()
    padded = {k: jnp.concatenate([v, jnp.ones((2, v.shape[1]))]) for k, v in given.items()}
    mask = jnp.arange(5) < 3
    np.testing.assert_allclose(entropy(padded, mask), entropy(given, jnp.ones(3, bool)), rtol=1e-6)


def test_certain_decisions_have_no_entropy_and_finite_gradients():
    given = {"weights": jnp.asarray([[200.0, 0.0, -200.0]])}
    value, gradient = jax.value_and_grad(lambda x: entropy(x, jnp.ones(1, bool)))(given)
    assert value == 0.0
    assert np.isfinite(gradient["weights"]).all()


def test_greedy_takes_the_most_likely_and_the_lower_of_a_tie():
    given = {"weights": jnp.asarray([[0.0, 3.0, 1.0], [2.0, 1.0, 2.0]])}
    np.testing.assert_array_equal(greedy(given)["weights"], [1, 0])


def test_samples_follow_the_softmax():
    given = logits(1)
    keys = jax.random.split(jax.random.key(0), 4000)
    drawn = jax.jit(jax.vmap(lambda key: sample(given, key=key)))(keys)
    for name, p in probabilities(given).items():
        counts = np.stack(
            [np.mean(np.asarray(drawn[name]) == k, axis=0) for k in range(p.shape[1])]
        )
        np.testing.assert_allclose(counts.T, p, atol=0.035)
    # The heads draw independently of each other.
    both = np.mean((np.asarray(drawn["weights"]) == 0) & (np.asarray(drawn["activations"]) == 0), 0)
    p = probabilities(given)
    np.testing.assert_allclose(both, p["weights"][:, 0] * p["activations"][:, 0], atol=0.035)


def test_levels_of_a_real_head_span_zero_to_one():
    heads = {"device": Head("op", 2), "priority": Head("op", "real")}
    levels = {"device": jnp.asarray([1, 0]), "priority": jnp.asarray([0, 3])}
    decisions = to_decisions(heads, levels, {"device": 2, "priority": 4})
    np.testing.assert_array_equal(decisions["device"], [1, 0])
    np.testing.assert_array_equal(decisions["priority"], [0.0, 1.0])
    assert decisions["priority"].dtype == jnp.float32
