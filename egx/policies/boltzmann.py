"""Boltzmann chromosomes: per op and head a prior over the choices and a temperature.

Khadka et al., ICLR 2021, arXiv 2007.07298. Unlike a network, a chromosome belongs to one graph;
it explores placements directly, and takes over what a network knows by `seeded`.
"""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, PRNGKeyArray

from egx.policies.base import Choices
from egx.policies.distributions import Logits

COLDEST, HOTTEST = 0.1, 10.0
PRIOR_SPREAD = 0.1
COOLING, TEMPERATURE_SPREAD = 0.95, 0.1


class BoltzmannChromosome(eqx.Module):
    """Choices are drawn from softmax(prior / temperature)."""

    prior: dict[str, Float[Array, "N _K"]]
    temperature: dict[str, Float[Array, " N"]]

    def logits(self) -> Logits:
        return {name: prior / self.temperature[name][:, None] for name, prior in self.prior.items()}


def random_chromosome(choices: Choices, length: int, *, key: PRNGKeyArray) -> BoltzmannChromosome:
    """Priors U(0, 1), normalised, and temperatures U(0.1, 10)."""
    widths = [count + 1 for _, count in choices]
    uniform = jax.random.uniform(key, (length, sum(widths)), minval=1e-6)
    prior, temperature = {}, {}
    for end, (name, count) in zip(np.cumsum(widths), choices, strict=True):
        weight = uniform[:, end - count - 1 : end - 1]
        prior[name] = weight / jnp.sum(weight, axis=-1, keepdims=True)
        temperature[name] = COLDEST + (HOTTEST - COLDEST) * uniform[:, end - 1]
    return BoltzmannChromosome(prior, temperature)


def seeded(chromosome: BoltzmannChromosome, probabilities: Logits) -> BoltzmannChromosome:
    """The chromosome with a network's output probabilities as its prior; temperatures stay."""
    return BoltzmannChromosome(dict(probabilities), chromosome.temperature)


def mutate(chromosome: BoltzmannChromosome, *, key: PRNGKeyArray) -> BoltzmannChromosome:
    """Priors times N(1, 0.1), temperatures times N(0.95, 0.1), clipped to [0.1, 10]."""
    flat, unravel = ravel_pytree(chromosome)
    normal = unravel(jax.random.normal(key, flat.shape))
    return BoltzmannChromosome(
        prior=jax.tree.map(
            lambda old, z: old * (1.0 + PRIOR_SPREAD * z), chromosome.prior, normal.prior
        ),
        temperature=jax.tree.map(
            lambda old, z: jnp.clip(old * (COOLING + TEMPERATURE_SPREAD * z), COLDEST, HOTTEST),
            chromosome.temperature,
            normal.temperature,
        ),
    )


def crossover(
    first: BoltzmannChromosome, second: BoltzmannChromosome, *, key: PRNGKeyArray
) -> BoltzmannChromosome:
    """Each op's priors and temperatures from one parent or the other, at even odds."""
    length = next(iter(first.temperature.values())).shape[0]
    take = jax.random.bernoulli(key, 0.5, (length,))
    return jax.tree.map(
        lambda a, b: jnp.where(take.reshape(-1, *[1] * (a.ndim - 1)), a, b), first, second
    )
