"""REGAL's graph network: messages along and against the edges, then a Beta for every key.

Paliwal et al., "Reinforced Genetic Algorithm Learning for Optimizing Computation Graphs", ICLR
2020, arXiv 1905.02494, after Battaglia et al., "Relational inductive biases, deep learning, and
graph networks", 2018, arXiv 1806.01261.

Shapes: N ops, U uses, H width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jraph
from jaxtyping import Array, Float, Int, PRNGKeyArray

from egx.errors import SearchError
from egx.policies.layers import Dense, Draws, initialised, standardised
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


class Messages(eqx.Module):
    """A two-layer network on (sender, receiver, edge) of each edge, summed at its receivers.

    The first layer is split into its three parts, and the second one, which is linear, comes
    after the sum: both change no result, and leave hardly any work to the edges.
    """

    sender: Dense
    receiver: Dense
    edge: Dense
    final: Dense

    def __init__(self, width: int, draws: Draws):
        self.sender, self.receiver = Dense(width, width, draws), Dense(width, width, draws)
        self.edge, self.final = Dense(width, width, draws), Dense(width, width, draws)

    def __call__(
        self,
        x: Float[Array, "N H"],
        edges: Float[Array, "U H"],
        senders: Int[Array, " U"],
        receivers: Int[Array, " U"],
        present: Float[Array, "U 1"],
    ) -> Float[Array, "N H"]:
        """`receivers` are sorted; edges of padding have `present` 0, else 1."""
        hidden = self.sender(x)[senders] + self.receiver(x)[receivers] + self.edge(edges)
        # A column of ones counts the messages, each of which brings the second layer's bias.
        message = jnp.concatenate([jax.nn.relu(hidden) * present, present], 1)
        total = jraph.segment_sum(message, receivers, len(x), indices_are_sorted=True)
        return total[:, :-1] @ self.final.weight + total[:, -1:] * self.final.bias


class Round(eqx.Module):
    """A round of messages both ways, and the update from (state, sum along, sum against)."""

    along: Messages
    against: Messages
    hidden: Dense
    final: Dense

    def __init__(self, width: int, draws: Draws):
        self.along, self.against = Messages(width, draws), Messages(width, draws)
        self.hidden, self.final = Dense(3 * width, width, draws), Dense(width, width, draws)

    def __call__(
        self, x: Float[Array, "N H"], edges: Float[Array, "U H"], context: MessageContext
    ) -> Float[Array, "N H"]:
        present = context.use_mask.astype(jnp.float32)[:, None]
        back = context.by_producer
        along = self.along(x, edges, context.producer, context.consumer, present)
        against = self.against(
            x, edges[back], context.consumer[back], context.producer[back], present[back]
        )
        update = self.final(jax.nn.relu(self.hidden(jnp.concatenate([x, along, against], 1))))
        # Sums grow with the number of neighbours; a state of fixed length bears any number of
        # rounds.
        return standardised(x + update)


class RegalPolicy(AbstractProposalPolicy):
    """Encoders, rounds of messages, and heads."""

    nodes: tuple[Dense, Dense]
    edges: tuple[Dense, Dense]
    round: Round
    heads: dict[str, GeneHead]
    value: tuple[Dense, Dense]
    genes: Genes = eqx.field(static=True)
    width: int = eqx.field(static=True)
    rounds: int = eqx.field(static=True)
    shared: bool = eqx.field(static=True)

    def __init__(
        self,
        genes: Genes,
        *,
        width: int = 32,
        rounds: int = 16,
        shared: bool = False,
        key: PRNGKeyArray,
    ):
        """
        Args:
            genes: the decisions, as `problem_genes` gives them.
            width: of states, messages and hidden layers.
            rounds: of messages; an op hears of others that are at most so many edges away.
            shared: the rounds share their weights.
        """
        for name, number, least in (("width", width, 2), ("rounds", rounds, 0)):
            if number < least:
                raise SearchError(f"{name} must be {least} or more, got {number}")

        def build(draws: Draws) -> tuple[Any, ...]:
            nodes = Dense(len(NODE_INPUTS), width, draws), Dense(width, width, draws)
            edges = Dense(len(EDGE_INPUTS), width, draws), Dense(width, width, draws)
            each = [Round(width, draws) for _ in range(1 if shared else max(rounds, 1))]
            stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *each)
            return nodes, edges, stacked, *proposal_heads(genes, width, len(EDGE_INPUTS), draws)

        self.nodes, self.edges, self.round, self.heads, self.value = initialised(build, key)
        self.genes, self.width, self.rounds, self.shared = genes, width, rounds, shared

    def states(self, context: MessageContext) -> Float[Array, "N H"]:
        edges = _encode(self.edges, context.edges)

        def step(x: Float[Array, "N H"], layer: Round) -> tuple[Float[Array, "N H"], None]:
            return layer(x, edges, context), None

        x = standardised(_encode(self.nodes, context.nodes))
        layers = self.round
        if self.shared:
            layers = jax.tree.map(lambda w: jnp.repeat(w, self.rounds, 0), layers)
        elif self.rounds == 0:
            return x
        return jax.lax.scan(step, x, layers)[0]

    def config(self) -> dict[str, Any]:
        return {
            "genes": [list(gene) for gene in self.genes],
            "means": list(MEANS),
            "fractions": list(FRACTIONS),
            "width": self.width,
            "rounds": self.rounds,
            "shared": self.shared,
        }

    @classmethod
    def from_config(cls, config: Mapping[str, Any], key: PRNGKeyArray) -> RegalPolicy:
        options = {name: config[name] for name in ("width", "rounds", "shared")}
        return cls(config_genes(config), **options, key=key)


def _encode(layers: tuple[Dense, Dense], x: Float[Array, "K I"]) -> Float[Array, "K H"]:
    first, last = layers
    return last(jax.nn.relu(first(x)))
