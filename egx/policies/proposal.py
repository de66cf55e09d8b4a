"""Distributions of random keys chosen by a network: a Beta for every key of a problem.

Paliwal et al., "Reinforced Genetic Algorithm Learning for Optimizing Computation Graphs", ICLR
2020, arXiv 1905.02494. The network sees a graph and chooses, for each key, a mean and a variance
from a few bins; the choices are independent and categorical. A searcher draws candidates from the
distributions that were chosen.

Shapes: N ops, U uses, L entries of a decision (ops or uses, padding included), G keys an entry
(the choices of a decision, 1 for a real), H width, M bins of the mean, V bins of the variance.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from egx.errors import SearchError
from egx.policies.base import AbstractPolicy
from egx.policies.layers import Dense, Draws
from egx.policies.messages import MessageContext, message_context
from egx.problems.base import AbstractProblem, Decisions

Genes = tuple[tuple[str, str, int], ...]
"""(name, axis, G) of each decision."""

MEANS = (0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 0.97)
FRACTIONS = (0.01, 0.03, 0.08, 0.18, 1 / 3, 0.5, 0.7, 0.9)
"""The bins: a mean m, and a variance as a fraction of m (1 - m), which is 1/3 when uniform."""

UNIFORM_MEAN, UNIFORM_FRACTION = MEANS.index(0.5), FRACTIONS.index(1 / 3)
"""The bins that together are Beta(1, 1)."""

_HEAD_START = 2.0
_FINAL_SCALE = 0.01

PerKey = dict[str, Float[Array, "*B _L _G"]]
BinLogits = dict[str, Float[Array, "_L _G _K"]]
Bins = dict[str, Int[Array, "*B _L _G"]]


class ProposalLogits(eqx.Module):
    """Logits of the bins of each key; those of padding are 0."""

    mean: BinLogits
    fraction: BinLogits


class ProposalBins(eqx.Module):
    """A bin of the mean and one of the variance for each key: what a policy does."""

    mean: Bins
    fraction: Bins


class Moments(eqx.Module):
    """Mean, and variance as a fraction of mean (1 - mean), of each key's distribution."""

    mean: PerKey
    fraction: PerKey


def problem_genes(problem: AbstractProblem) -> Genes:
    """The decisions of a problem as random keys."""
    return tuple(
        (name, head.axis, 1 if head.choices == "real" else head.choices)
        for name, head in problem.heads.items()
    )


class GeneHead(eqx.Module):
    """From the states of entries to the logits of their keys: a hidden layer, and a linear one
    that starts near 0, so that a fresh policy says nearly the same of all keys."""

    hidden: Dense
    final: Dense

    def __init__(self, inputs: int, width: int, keys: int, bins: tuple[int, int], draws: Draws):
        self.hidden = Dense(inputs, width, draws)
        final = Dense(width, keys * sum(bins), draws)
        start = np.zeros((keys, sum(bins)), np.float32)
        start[:, UNIFORM_MEAN] = start[:, bins[0] + UNIFORM_FRACTION] = _HEAD_START
        self.final = eqx.tree_at(
            lambda d: (d.weight, d.bias),
            final,
            (_FINAL_SCALE * final.weight, jnp.asarray(start.reshape(-1))),
        )

    def __call__(self, states: Float[Array, "L I"]) -> Float[Array, "L O"]:
        return self.final(jax.nn.relu(self.hidden(states)))


class AbstractProposalPolicy(AbstractPolicy):
    """A network that chooses the distributions of a problem's random keys.

    Its size depends on the decisions and their numbers of choices (so on the number of devices),
    never on the graph. Subclasses bring the states of the ops; heads and the read-out of the
    expected reward are here.
    """

    heads: eqx.AbstractVar[dict[str, GeneHead]]
    value: eqx.AbstractVar[tuple[Dense, Dense]]
    genes: eqx.AbstractVar[Genes]

    @abc.abstractmethod
    def states(self, context: MessageContext) -> Float[Array, "N H"]:
        """A state for each op; those of padding may be anything finite."""

    def __call__(self, problem: AbstractProblem) -> ProposalLogits:
        """The logits of the bins of each key.

        Raises:
            SearchError: if the policy was made for other decisions or numbers of choices.
        """
        return self.logits_and_value(problem)[0]

    def logits_and_value(self, problem: AbstractProblem) -> tuple[ProposalLogits, Float[Array, ""]]:
        """The logits, and the reward that the network expects (the baseline of its training)."""
        self.check(problem)
        context = message_context(problem)
        x = self.states(context)
        mean, fraction = {}, {}
        for name, axis, keys in self.genes:
            if axis == "op":
                entries, mask = x, context.mask
            else:
                parts = [x[context.producer], x[context.consumer], context.edges]
                entries, mask = jnp.concatenate(parts, 1), context.use_mask
            logits = jnp.where(mask[:, None], self.heads[name](entries), 0.0)
            logits = logits.reshape(len(mask), keys, len(MEANS) + len(FRACTIONS))
            mean[name], fraction[name] = jnp.split(logits, [len(MEANS)], -1)
        return ProposalLogits(mean, fraction), self._value(x, context.mask)

    def _value(self, x: Float[Array, "N H"], mask: Bool[Array, " N"]) -> Float[Array, ""]:
        total = jnp.sum(jnp.where(mask[:, None], x, 0.0), 0)
        pooled = total / jnp.maximum(jnp.sum(mask), 1).astype(jnp.float32)
        first, last = self.value
        return last(jax.nn.relu(first(pooled)))[0]

    def decide(self, problem: AbstractProblem, *, key: PRNGKeyArray | None = None) -> Decisions:
        """The plan of the keys' means, or with a key a plan drawn from sampled distributions."""
        logits = self(problem)
        if key is None:
            keys = marginal_moments(logits).mean
        else:
            bins_key, draw_key = jax.random.split(key)
            keys = draw_keys(bin_moments(sample_bins(logits, key=bins_key)), key=draw_key)
        return {
            name: keys[name][:, 0]
            if head.choices == "real"
            else jnp.argmax(keys[name], -1).astype(jnp.int32)
            for name, head in problem.heads.items()
        }

    def check(self, problem: AbstractProblem) -> None:
        """Raises SearchError when this policy was made for other decisions."""
        wanted = problem_genes(problem)
        if self.genes != wanted:
            raise SearchError(
                f"this policy proposes {_words(self.genes)}, but the problem decides "
                f"{_words(wanted)}; a policy is trained for one set of decisions and one number "
                f"of devices"
            )


def proposal_heads(
    genes: Genes, width: int, edge_features: int, draws: Draws
) -> tuple[dict[str, GeneHead], tuple[Dense, Dense]]:
    """The heads of all decisions, and the read-out of the expected reward."""
    bins = len(MEANS), len(FRACTIONS)
    inputs = {"op": width, "use": 2 * width + edge_features}
    heads = {name: GeneHead(inputs[axis], width, keys, bins, draws) for name, axis, keys in genes}
    first, last = Dense(width, width, draws), Dense(width, 1, draws)
    # Before training the policy is plain BRKGA, whose reward is -1 by definition.
    start = (_FINAL_SCALE * last.weight, jnp.full(1, -1.0, jnp.float32))
    last = eqx.tree_at(lambda d: (d.weight, d.bias), last, start)
    return heads, (first, last)


def config_genes(config: Mapping[str, Any]) -> Genes:
    """The genes in a checkpoint's configuration.

    Raises:
        SearchError: if the checkpoint's bins are not those of this egx.
    """
    bins = {"means": MEANS, "fractions": FRACTIONS}
    for name, have in bins.items():
        if tuple(config[name]) != have:
            raise SearchError(f"{name} {config[name]}; this egx has {list(have)}")
    return tuple((str(name), str(axis), int(keys)) for name, axis, keys in config["genes"])


def _words(genes: Genes) -> str:
    return ", ".join(f"{name} ({keys} keys per {axis})" for name, axis, keys in genes)


def sample_bins(logits: ProposalLogits, *, key: PRNGKeyArray) -> ProposalBins:
    """A bin for each key, drawn independently."""

    def draw(part: BinLogits, first: int) -> Bins:
        drawn = {}
        for index, (name, value) in enumerate(sorted(part.items())):
            # One number a key, against the cumulative probabilities: random bits are what costs.
            uniform = jax.random.uniform(
                jax.random.fold_in(key, first + 2 * index), value.shape[:2]
            )
            until = jnp.cumsum(jax.nn.softmax(value), -1)[..., :-1]
            drawn[name] = jnp.sum(uniform[..., None] >= until, -1, dtype=jnp.int32)
        return drawn

    return ProposalBins(draw(logits.mean, 0), draw(logits.fraction, 1))


def likeliest_bins(logits: ProposalLogits) -> ProposalBins:
    """The most likely bin of each key; the lower one of a tie."""
    best = jax.tree.map(lambda x: jnp.argmax(x, -1).astype(jnp.int32), logits)
    return ProposalBins(best.mean, best.fraction)


def bin_moments(bins: ProposalBins) -> Moments:
    """The moments that bins stand for."""
    means, fractions = jnp.asarray(MEANS, jnp.float32), jnp.asarray(FRACTIONS, jnp.float32)
    return Moments(
        {name: means[index] for name, index in bins.mean.items()},
        {name: fractions[index] for name, index in bins.fraction.items()},
    )


def marginal_moments(logits: ProposalLogits) -> Moments:
    """The moments of a key over draws of its bins and then of the key: between the bins, and
    without the noise of drawing them."""
    means, fractions = jnp.asarray(MEANS, jnp.float32), jnp.asarray(FRACTIONS, jnp.float32)
    mean, fraction = {}, {}
    for name, logit in logits.mean.items():
        p = jax.nn.softmax(logit)
        middle = p @ means
        within = (p @ (means * (1.0 - means))) * (jax.nn.softmax(logits.fraction[name]) @ fractions)
        between = jnp.sum(p * (means - middle[..., None]) ** 2, -1)
        mean[name] = middle
        fraction[name] = (within + between) / (middle * (1.0 - middle))
    return Moments(mean, fraction)


def draw_keys(moments: Moments, *, key: PRNGKeyArray) -> PerKey:
    """One candidate's keys."""
    drawn = {}
    for index, (name, mean) in enumerate(sorted(moments.mean.items())):
        strength = 1.0 / moments.fraction[name] - 1.0
        alpha, beta = mean * strength, (1.0 - mean) * strength
        drawn[name] = jax.random.beta(jax.random.fold_in(key, index), alpha, beta)
    return drawn


def log_probability(
    logits: ProposalLogits, bins: ProposalBins, problem: AbstractProblem
) -> Float[Array, ""]:
    """The log probability of choosing `bins`, over all real keys."""
    total = jnp.zeros((), jnp.float32)
    for name, head in problem.heads.items():
        mask = problem.mask(head)[:, None]
        for value, index in (
            (logits.mean[name], bins.mean[name]),
            (logits.fraction[name], bins.fraction[name]),
        ):
            log_p = jnp.take_along_axis(jax.nn.log_softmax(value), index[..., None], -1)[..., 0]
            total = total + jnp.sum(jnp.where(mask, log_p, 0.0))
    return total


def mean_entropy(logits: ProposalLogits, problem: AbstractProblem) -> Float[Array, ""]:
    """The entropy in nats, mean and variance together, per real key."""
    total, count = jnp.zeros((), jnp.float32), jnp.zeros((), jnp.float32)
    for name, head in problem.heads.items():
        mask = problem.mask(head)[:, None]
        for value in (logits.mean[name], logits.fraction[name]):
            log_p = jax.nn.log_softmax(value)
            each = -jnp.sum(jnp.exp(log_p) * log_p, -1)
            total = total + jnp.sum(jnp.where(mask, each, 0.0))
        keys = logits.mean[name].shape[1]
        count = count + keys * jnp.sum(mask).astype(jnp.float32)
    return total / jnp.maximum(count, 1.0)
