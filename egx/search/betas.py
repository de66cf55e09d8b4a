"""Beta distributions of random keys, drawn from by their quantiles.

The same uniform numbers give keys of any of these distributions, so that two proposals are
compared on common random numbers, and Beta(1, 1) costs nothing but the uniforms.

Shapes: L entries of a decision, G keys an entry, W keys of a candidate, K knots of a quantile
function; M mean and F fraction bins.
"""

from __future__ import annotations

from collections.abc import Mapping

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from egx.policies.proposal import FRACTIONS, MEANS, UNIFORM_FRACTION, UNIFORM_MEAN
from egx.problems.base import AbstractProblem
from egx.search.keys import Keys, flatten, gene_shapes

_KNOTS = np.arange(-8.0, 8.5, 0.5, dtype=np.float32)
_GRID = 128


class Betas(eqx.Module):
    """A Beta distribution for every key: `alpha` and `beta` as `Keys` [L, G], above 0."""

    alpha: Keys
    beta: Keys


def uniform_betas(problem: AbstractProblem) -> Betas:
    """Beta(1, 1) for every key."""
    ones = {name: jnp.ones(shape, jnp.float32) for name, shape in gene_shapes(problem).items()}
    return Betas(ones, ones)


def betas_of_moments(mean: Mapping[str, Array], fraction: Mapping[str, Array]) -> Betas:
    """From means in (0, 1), and variances as fractions in (0, 1) of mean (1 - mean)."""
    strength = {name: 1.0 / value - 1.0 for name, value in fraction.items()}
    return Betas(
        {name: value * strength[name] for name, value in mean.items()},
        {name: (1.0 - value) * strength[name] for name, value in mean.items()},
    )


def betas_of_bins(
    mean: Mapping[str, Int[Array, "_L _G"]], fraction: Mapping[str, Int[Array, "_L _G"]]
) -> Betas:
    """From indices into `MEANS` and `FRACTIONS`."""
    means, fractions = jnp.asarray(MEANS, jnp.float32), jnp.asarray(FRACTIONS, jnp.float32)
    betas = betas_of_moments(
        {name: means[index] for name, index in mean.items()},
        {name: fractions[index] for name, index in fraction.items()},
    )
    plain = {
        name: (mean[name] == UNIFORM_MEAN) & (fraction[name] == UNIFORM_FRACTION) for name in mean
    }
    # The uniform pair exactly, whatever the rounding of its fraction.
    return Betas(
        {name: jnp.where(plain[name], 1.0, value) for name, value in betas.alpha.items()},
        {name: jnp.where(plain[name], 1.0, value) for name, value in betas.beta.items()},
    )


def quantile_knots(problem: AbstractProblem, betas: Betas) -> Float[Array, "W K"]:
    """What `draw` needs of each key's distribution; made once, before many draws."""
    alpha, beta = flatten(problem, betas.alpha), flatten(problem, betas.beta)
    return jax.vmap(_knots)(alpha, beta)


def bin_knots() -> Float[Array, "M F K"]:
    """The quantile functions of every pair of `MEANS` and `FRACTIONS`."""
    mean, fraction = (
        jnp.asarray(grid, jnp.int32)
        for grid in np.meshgrid(np.arange(len(MEANS)), np.arange(len(FRACTIONS)), indexing="ij")
    )
    betas = betas_of_bins({"": mean}, {"": fraction})
    return jax.vmap(jax.vmap(_knots))(betas.alpha[""], betas.beta[""])


def draw(
    knots: Float[Array, "R K"],
    uniform: Float[Array, "... W"],
    rows: Int[Array, " W"] | None = None,
) -> Float[Array, "... W"]:
    """Keys at the quantiles `uniform` of their distributions: a row of `knots` for each key, or
    those of `rows`.

    Between knots the logit of a key is linear in the logit of its quantile. In the tails it is so
    exactly, since there the distribution function is a power.
    """
    tiny = jnp.float32(2.0**-24)
    inside = jnp.clip(uniform, tiny, 1.0 - tiny)
    position = (jnp.log(inside) - jnp.log1p(-inside) - _KNOTS[0]) * 2.0
    below = jnp.clip(jnp.floor(position), 0.0, len(_KNOTS) - 2.0)
    gene = jnp.arange(knots.shape[0]) if rows is None else rows
    index = below.astype(jnp.int32)
    low, high = knots[gene, index], knots[gene, index + 1]
    drawn = jax.nn.sigmoid(low + (position - below) * (high - low))
    # To the last bit the same as without a proposal.
    plain = (knots[:, 0] == _KNOTS[0]) & (knots[:, -1] == _KNOTS[-1])
    return jnp.where(plain[gene], uniform, drawn)


def _knots(alpha: Float[Array, ""], beta: Float[Array, ""]) -> Float[Array, " K"]:
    """The logit of Beta's quantile at logit `_KNOTS`.

    The density of a key's logit t, proportional to sigmoid(t)^alpha sigmoid(-t)^beta, is smooth
    and falls as exp(alpha t) and exp(-beta t) at its ends, so that a sum over even steps is its
    integral.
    """
    a = jnp.clip(alpha, 1e-3, 1e4)
    b = jnp.clip(beta, 1e-3, 1e4)
    mode, spread = jnp.log(a) - jnp.log(b), jnp.sqrt(1.0 / a + 1.0 / b)
    left, right = mode - 4.5 * spread - 9.0 / a, mode + 4.5 * spread + 9.0 / b
    # Half of the steps on each side of the mode, shorter near it, where the density bends: one
    # side may be a hundred times as long as the other.
    even = np.linspace(0.0, 1.0, _GRID // 2 + 1, dtype=np.float32)
    share = jnp.asarray(even * even)
    t = jnp.concatenate([mode + (left - mode) * share[::-1], mode + (right - mode) * share[1:]])

    def log_density(t: Float[Array, "..."]) -> Float[Array, "..."]:
        return a * jax.nn.log_sigmoid(t) + b * jax.nn.log_sigmoid(-t)

    density = jnp.exp(log_density(t) - log_density(mode))
    step = 0.5 * (density[1:] + density[:-1]) * (t[1:] - t[:-1])
    lower = jnp.cumsum(jnp.append(density[0] / a, step))
    upper = jnp.cumsum(jnp.append(density[-1] / b, step[::-1]))[::-1]
    odds = jnp.log(lower) - jnp.log(upper)
    level = jnp.asarray(_KNOTS)
    return jnp.where((alpha == 1.0) & (beta == 1.0), level, jnp.interp(level, odds, t))
