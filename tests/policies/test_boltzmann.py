"""Boltzmann chromosomes against the formulas in NumPy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from egx.policies import boltzmann
from egx.policies.boltzmann import BoltzmannChromosome
from egx.policies.distributions import probabilities, sample

CHOICES = (("weights", 3), ("activations", 2))
OPS = 400


def chromosome(seed=0, ops=OPS):
    return boltzmann.random_chromosome(CHOICES, ops, key=jax.random.key(seed))


def test_it_starts_with_normalised_priors_and_temperatures_of_all_sizes():
    made = chromosome()
    for name, count in CHOICES:
        prior, heat = np.asarray(made.prior[name]), np.asarray(made.temperature[name])
        assert prior.shape == (OPS, count)
        np.testing.assert_allclose(prior.sum(1), 1.0, rtol=1e-5)
        assert (prior > 0).all()
        assert heat.min() >= 0.1
        assert heat.max() <= 10.0
        np.testing.assert_allclose(heat.mean(), 5.05, atol=0.5)
    assert not np.array_equal(made.temperature["weights"], made.temperature["activations"])


def test_choices_follow_softmax_of_prior_over_temperature():
    made = BoltzmannChromosome(
        prior={"weights": jnp.asarray([[0.2, 0.5, 0.3], [0.6, 0.3, 0.1]])},
        temperature={"weights": jnp.asarray([0.1, 2.0])},
    )
    raw = np.exp(
        np.asarray(made.prior["weights"]) / np.asarray(made.temperature["weights"])[:, None]
    )
    want = raw / raw.sum(1, keepdims=True)
    np.testing.assert_allclose(probabilities(made.logits())["weights"], want, rtol=1e-5)
    keys = jax.random.split(jax.random.key(0), 4000)
    drawn = np.asarray(jax.vmap(lambda key: sample(made.logits(), key=key))(keys)["weights"])
    got = np.stack([(drawn == k).mean(0) for k in range(3)], axis=1)
    np.testing.assert_allclose(got, want, atol=0.035)


def test_mutation_scales_priors_by_one_and_cools_temperatures():
    old = chromosome()
    new = boltzmann.mutate(old, key=jax.random.key(5))
    for name, _ in CHOICES:
        ratio = np.asarray(new.prior[name] / old.prior[name])
        np.testing.assert_allclose(ratio.mean(), 1.0, atol=0.02)
        np.testing.assert_allclose(ratio.std(), 0.1, atol=0.02)
        before, after = np.asarray(old.temperature[name]), np.asarray(new.temperature[name])
        inside = (after > 0.1) & (after < 10.0)
        ratio = (after / before)[inside]
        np.testing.assert_allclose(ratio.mean(), 0.95, atol=0.02)
        np.testing.assert_allclose(ratio.std(), 0.1, atol=0.02)


def test_temperatures_stay_within_their_bounds():
    made = chromosome()
    for heat in (0.1, 10.0):
        extreme = BoltzmannChromosome(
            made.prior, {name: jnp.full(OPS, heat) for name, _ in CHOICES}
        )
        for seed in range(3):
            extreme = boltzmann.mutate(extreme, key=jax.random.key(seed))
            for value in extreme.temperature.values():
                assert np.asarray(value).min() >= np.float32(0.1)
                assert np.asarray(value).max() <= 10.0


def test_crossover_takes_each_op_whole_from_one_parent():
    a, b = chromosome(0), chromosome(1)
    child = boltzmann.crossover(a, b, key=jax.random.key(2))
    heats = [np.asarray(one.temperature["weights"]) for one in (a, b, child)]
    from_a = heats[2] == heats[0]
    assert 0.4 < from_a.mean() < 0.6
    for name, _ in CHOICES:
        for part in ("prior", "temperature"):
            one, two, got = (np.asarray(getattr(x, part)[name]) for x in (a, b, child))
            np.testing.assert_array_equal(got[from_a], one[from_a])
            np.testing.assert_array_equal(got[~from_a], two[~from_a])


def test_a_network_seeds_the_prior_and_leaves_the_temperature():
    made = chromosome()
    p = probabilities({name: jnp.ones((OPS, count)) for name, count in CHOICES})
    seeded = boltzmann.seeded(made, p)
    for name, _ in CHOICES:
        np.testing.assert_array_equal(seeded.prior[name], p[name])
        np.testing.assert_array_equal(seeded.temperature[name], made.temperature[name])
