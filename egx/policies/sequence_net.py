"""GAS, "graph as a sequence": a recurrent network over the ops in place of the graph network.

A baseline of Paliwal et al., "Reinforced Genetic Algorithm Learning for Optimizing Computation
Graphs", ICLR 2020, arXiv 1905.02494. The cells are those of Cho et al., "Learning Phrase
Representations using RNN Encoder-Decoder", EMNLP 2014, arXiv 1406.1078 (GRU).

Shapes: N ops, H width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from egx.errors import SearchError
from egx.policies.layers import Dense, Draws, initialised
from egx.policies.messages import EDGE_INPUTS, NODE_INPUTS, MessageContext
from egx.policies.proposal import (
    FRACTIONS,
    MEANS,
    AbstractProposalPolicy,
    GeneHead,
    Genes,
    config_genes,
    proposal_heads,
)


class Gated(eqx.Module):
    """Gated recurrent units over a sequence; padding leaves the state as it is."""

    inputs: Dense
    states: Dense

    def __init__(self, inputs: int, width: int, draws: Draws):
        self.inputs, self.states = Dense(inputs, 3 * width, draws), Dense(width, 3 * width, draws)

    def __call__(
        self, x: Float[Array, "N I"], mask: Bool[Array, " N"], *, reverse: bool
    ) -> Float[Array, "N H"]:
        def step(h: Array, row: tuple[Array, Array]) -> tuple[Array, Array]:
            given, is_real = row
            update, reset, new = jnp.split(given, 3)
            old_update, old_reset, old_new = jnp.split(self.states(h), 3)
            keep = jax.nn.sigmoid(update + old_update)
            candidate = jnp.tanh(new + jax.nn.sigmoid(reset + old_reset) * old_new)
            h = jnp.where(is_real, keep * h + (1.0 - keep) * candidate, h)
            return h, h

        first = jnp.zeros(self.states.weight.shape[0], jnp.float32)
        return jax.lax.scan(step, first, (self.inputs(x), mask), reverse=reverse)[1]


class SequencePolicy(AbstractProposalPolicy):
    """Layers of gated units over the ops in index order, each half of them in either direction."""

    encoder: Dense
    layers: tuple[tuple[Gated, Gated], ...]
    heads: dict[str, GeneHead]
    value: tuple[Dense, Dense]
    genes: Genes = eqx.field(static=True)
    width: int = eqx.field(static=True)
    depth: int = eqx.field(static=True)

    def __init__(self, genes: Genes, *, width: int = 64, depth: int = 2, key: PRNGKeyArray):
        """
        Args:
            genes: the decisions, as `problem_genes` gives them.
            width: of states, an even number: half of it for each direction.
            depth: layers.
        """
        if width < 2 or width % 2:
            raise SearchError(f"width must be an even number of 2 or more, got {width}")
        if depth < 1:
            raise SearchError(f"depth must be 1 or more, got {depth}")

        def build(draws: Draws) -> tuple[Any, ...]:
            encoder = Dense(len(NODE_INPUTS), width, draws)

            def gated() -> Gated:
                return Gated(width, width // 2, draws)

            layers = tuple((gated(), gated()) for _ in range(depth))
            return encoder, layers, *proposal_heads(genes, width, len(EDGE_INPUTS), draws)

        self.encoder, self.layers, self.heads, self.value = initialised(build, key)
        self.genes, self.width, self.depth = genes, width, depth

    def states(self, context: MessageContext) -> Float[Array, "N H"]:
        x = jax.nn.relu(self.encoder(context.nodes))
        for forward, backward in self.layers:
            both = [
                forward(x, context.mask, reverse=False),
                backward(x, context.mask, reverse=True),
            ]
            x = jnp.concatenate(both, 1)
        return x

    def config(self) -> dict[str, Any]:
        return {
            "genes": [list(gene) for gene in self.genes],
            "means": list(MEANS),
            "fractions": list(FRACTIONS),
            "width": self.width,
            "depth": self.depth,
        }

    @classmethod
    def from_config(cls, config: Mapping[str, Any], key: PRNGKeyArray) -> SequencePolicy:
        options = {name: config[name] for name in ("width", "depth")}
        return cls(config_genes(config), **options, key=key)
