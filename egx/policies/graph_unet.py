"""The Graph U-Net policy of EGRL and the critic on the same trunk.

Gao and Ji, "Graph U-Nets", ICML 2019, arXiv 1905.05178, with graph attention; as used by Khadka
et al., "Optimizing Memory Placement using Evolutionary Graph Reinforcement Learning", ICLR 2021,
arXiv 2007.07298.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from egx.errors import SearchError
from egx.policies.base import AbstractPolicy, Choices, check_choices, head_choices
from egx.policies.context import Edges, GraphContext, graph_context
from egx.policies.distributions import Logits
from egx.policies.layers import Dense, Draws, GraphAttention, initialised
from egx.problems.base import AbstractProblem


class AbstractTrunk(eqx.Module):
    """From node inputs to node embeddings; the first layer's linear map is left to the caller."""

    @property
    @abc.abstractmethod
    def weight(self) -> Float[Array, "I W"]:
        """The first layer's linear map."""

    @abc.abstractmethod
    def __call__(
        self, projected: Float[Array, "N W"], context: GraphContext
    ) -> Float[Array, "N W"]:
        """Node embeddings from inputs already multiplied by `weight`."""


class GraphUNet(AbstractTrunk):
    """Down through `depth` poolings that each keep half of the nodes, and up again with skips.

    Neighbourhoods are squared before each pooling, so that nodes whose link was dropped stay
    connected; skips are summed.
    """

    first: GraphAttention
    down: tuple[GraphAttention, ...]
    scores: tuple[Float[Array, " W"], ...]
    up: tuple[GraphAttention, ...]

    def __init__(self, inputs: int, width: int, depth: int, attention_heads: int, draws: Draws):
        def layers() -> tuple[GraphAttention, ...]:
            return tuple(GraphAttention(width, width, attention_heads, draws) for _ in range(depth))

        self.first = GraphAttention(inputs, width, attention_heads, draws)
        self.down, self.up = layers(), layers()
        self.scores = tuple(draws((width,), 1.0) for _ in range(depth))

    @property
    def weight(self) -> Float[Array, "I W"]:
        return self.first.weight

    def __call__(
        self, projected: Float[Array, "N W"], context: GraphContext
    ) -> Float[Array, "N W"]:
        neighbours: Edges | Bool[Array, "N N"] = context.edges
        mask, square = context.mask, context.two_hops
        x = self.first(projected, neighbours, mask)
        levels = []
        for layer, score in zip(self.down, self.scores, strict=True):
            skip, outer, inner = jax.nn.relu(x), neighbours, mask
            x, index, mask = _pool(skip, score, mask)
            levels.append((skip, outer, inner, index))
            keep = mask[:, None] & mask[None, :]
            neighbours = square[index[:, None], index[None, :]] & keep
            x = layer(layer.project(x), neighbours, mask)
            reach = neighbours.astype(jnp.float32)
            square = reach @ reach > 0
        for layer, (skip, outer, inner, index) in zip(self.up, reversed(levels), strict=True):
            x = jax.nn.relu(jnp.where(mask[:, None], x, 0.0))
            x = skip + jnp.zeros_like(skip).at[index].set(x, unique_indices=True)
            mask = inner
            x = layer(layer.project(x), outer, mask)
        return x


class NodeNetwork(AbstractTrunk):
    """As many layers of the same width that see each node alone: the U-Net without messages."""

    first: Dense
    rest: tuple[Dense, ...]

    def __init__(self, inputs: int, width: int, depth: int, draws: Draws):
        self.first = Dense(inputs, width, draws)
        self.rest = tuple(Dense(width, width, draws) for _ in range(2 * depth))

    @property
    def weight(self) -> Float[Array, "I W"]:
        return self.first.weight

    def __call__(
        self, projected: Float[Array, "N W"], context: GraphContext
    ) -> Float[Array, "N W"]:
        x = projected + self.first.bias
        for layer in self.rest:
            x = layer(jax.nn.relu(x))
        return x


def _trunk(
    inputs: int,
    width: int,
    depth: int,
    attention_heads: int,
    messages: bool,
    draws: Draws,
) -> AbstractTrunk:
    if width < 1 or attention_heads < 1 or width % attention_heads:
        raise SearchError(
            f"width must be a positive multiple of attention_heads ({attention_heads}), got {width}"
        )
    if depth < 0:
        raise SearchError(f"depth must be 0 or more, got {depth}")
    if messages:
        return GraphUNet(inputs, width, depth, attention_heads, draws)
    return NodeNetwork(inputs, width, depth, draws)


def _pool(
    x: Float[Array, "N W"], score: Float[Array, " W"], mask: Bool[Array, " N"]
) -> tuple[Float[Array, "K W"], Array, Bool[Array, " K"]]:
    """The better half of the real nodes (rounded up) by a learned score, gated by it.

    K is half of N rounded up: a size of the padded graph, while the nodes kept are counted on
    the real one, so that padding changes nothing.
    """
    value = (x @ score) / jnp.maximum(jnp.linalg.norm(score), 1e-6)
    size = (mask.shape[0] + 1) // 2
    _, index = jax.lax.top_k(jax.lax.stop_gradient(jnp.where(mask, value, -jnp.inf)), size)
    kept = (jnp.sum(mask, dtype=jnp.int32) + 1) // 2
    return x[index] * jax.nn.sigmoid(value[index])[:, None], index, jnp.arange(size) < kept


class GraphUNetPolicy(AbstractPolicy):
    """Graph U-Net, two linear layers with tanh, and a linear map a head."""

    trunk: AbstractTrunk
    hidden: tuple[Dense, Dense]
    heads: dict[str, Dense]
    features: int = eqx.field(static=True)
    choices: Choices = eqx.field(static=True)
    width: int = eqx.field(static=True)
    depth: int = eqx.field(static=True)
    attention_heads: int = eqx.field(static=True)
    messages: bool = eqx.field(static=True)
    real_levels: int = eqx.field(static=True)

    def __init__(
        self,
        features: int,
        choices: Choices,
        *,
        width: int = 128,
        depth: int = 4,
        attention_heads: int = 4,
        messages: bool = True,
        real_levels: int = 16,
        key: PRNGKeyArray,
    ):
        """
        Args:
            features: columns of the problem's features.
            choices: (name, number of choices) of each head.
            width: of every layer, a multiple of `attention_heads`.
            depth: poolings.
            messages: False for a network that sees each op alone.
            real_levels: levels that stand for the values of a real head.
        """

        def build(draws: Draws) -> tuple[AbstractTrunk, tuple[Dense, Dense], dict[str, Dense]]:
            trunk = _trunk(features, width, depth, attention_heads, messages, draws)
            hidden = Dense(width, width, draws), Dense(width, width, draws)
            return trunk, hidden, {name: Dense(width, count, draws) for name, count in choices}

        self.trunk, self.hidden, self.heads = initialised(build, key)
        self.features, self.choices = features, tuple((name, count) for name, count in choices)
        self.width, self.depth, self.attention_heads = width, depth, attention_heads
        self.messages, self.real_levels = messages, real_levels

    def __call__(self, problem: AbstractProblem) -> Logits:
        check_choices("Graph U-Net", self.choices, head_choices(problem, self.real_levels))
        return self.logits(graph_context(problem))

    def logits(self, context: GraphContext) -> Logits:
        """The logits for a graph whose context is at hand."""
        if context.features.shape[-1] != self.features:
            raise SearchError(
                f"the Graph U-Net policy takes {self.features} features an op, "
                f"but the problem has {context.features.shape[-1]}"
            )
        x = self.trunk(context.features @ self.trunk.weight, context)
        for layer in self.hidden:
            x = jnp.tanh(layer(x))
        return {
            name: jnp.where(context.mask[:, None], self.heads[name](x), 0.0)
            for name, _ in self.choices
        }

    def config(self) -> dict[str, Any]:
        return {
            "features": self.features,
            "choices": [list(choice) for choice in self.choices],
            "width": self.width,
            "depth": self.depth,
            "attention_heads": self.attention_heads,
            "messages": self.messages,
            "real_levels": self.real_levels,
        }

    @classmethod
    def from_config(cls, config: Mapping[str, Any], key: PRNGKeyArray) -> GraphUNetPolicy:
        options = dict(config)
        choices = tuple((str(name), int(count)) for name, count in options.pop("choices"))
        return cls(options.pop("features"), choices, **options, key=key)


class GraphUNetCritic(eqx.Module):
    """Twin values of all decisions together: trunk, maximum over nodes, two small networks."""

    trunk: AbstractTrunk
    first: tuple[Dense, ...]
    second: tuple[Dense, ...]
    features: int = eqx.field(static=True)

    def __init__(
        self,
        features: int,
        actions: int,
        *,
        width: int = 128,
        depth: int = 4,
        attention_heads: int = 4,
        messages: bool = True,
        key: PRNGKeyArray,
    ):
        """`actions` counts the choices of all heads together."""

        def build(draws: Draws) -> tuple[AbstractTrunk, tuple[Dense, ...], tuple[Dense, ...]]:
            def tower() -> tuple[Dense, ...]:
                return *(Dense(width, width, draws) for _ in range(2)), Dense(width, 1, draws)

            inputs = features + actions
            trunk = _trunk(inputs, width, depth, attention_heads, messages, draws)
            return trunk, tower(), tower()

        self.trunk, self.first, self.second = initialised(build, key)
        self.features = features

    def __call__(
        self, context: GraphContext, actions: Float[Array, "N A"]
    ) -> tuple[Float[Array, ""], Float[Array, ""]]:
        """Both values of `actions`, the heads' one-hot (or relaxed) vectors side by side."""
        weight = self.trunk.weight
        # Split, so that under vmap over actions the features' part is computed once.
        shared = context.features @ weight[: self.features]
        x = self.trunk(shared + actions @ weight[self.features :], context)
        x = _highest(x, context.mask)
        return _tower(self.first, x), _tower(self.second, x)


def _highest(x: Float[Array, "N W"], mask: Bool[Array, " N"]) -> Float[Array, " W"]:
    """The maximum over real nodes, as a choice of nodes.

    The gradient of a maximum divides by how many entries equal it; a compiler that computes the
    entries twice, rounded differently, finds none.
    """
    at = jnp.argmax(jax.lax.stop_gradient(jnp.where(mask[:, None], x, -jnp.inf)), axis=0)
    return jnp.take_along_axis(x, at[None], axis=0)[0]


def _tower(layers: tuple[Dense, ...], x: Float[Array, " W"]) -> Float[Array, ""]:
    for layer in layers[:-1]:
        x = jax.nn.relu(layer(x))
    return layers[-1](x)[0]
