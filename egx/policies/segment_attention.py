"""Attention over ops in topological order, segment by segment, at a cost linear in ops.

Dai et al., "Transformer-XL: Attentive Language Models beyond a Fixed-Length Context", ACL 2019,
arXiv 1901.02860, without positions, as GO uses it (arXiv 2010.12438): an op attends to its own
segment and to the one before, whose keys and values are kept and pass no gradient. What the
attention and the dense layers after it read is gated by the graph ("parameter superposition":
Cheung et al., NeurIPS 2019, arXiv 1902.05522).

Shapes: S ops of a segment, H width, A attention heads, D width of a head, W = 4 H gates.
"""

from __future__ import annotations

import math

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from egx.policies.layers import Dense, Draws, standardised

# Far below any score, and its exponential is 0, but no infinity.
_NEVER = -1e30
_EXPANSION = 2
GATES = 2 + _EXPANSION


class Past(eqx.Module):
    """What a layer keeps of a segment."""

    keys: Float[Array, "*B S A D"]
    values: Float[Array, "*B S A D"]
    mask: Bool[Array, "*B S"]


class Attention(eqx.Module):
    """The four maps of multi-head attention."""

    query: Dense
    key: Dense
    value: Dense
    out: Dense

    def __init__(self, width: int, draws: Draws):
        self.query, self.key = Dense(width, width, draws), Dense(width, width, draws)
        self.value, self.out = Dense(width, width, draws), Dense(width, width, draws)

    def __call__(
        self, x: Float[Array, "S H"], mask: Bool[Array, " S"], past: Past
    ) -> tuple[Float[Array, "S H"], Past]:
        shape = past.keys.shape
        query, key, value = (m(x).reshape(shape) for m in (self.query, self.key, self.value))
        keys = jnp.concatenate([past.keys, key])
        values = jnp.concatenate([past.values, value])
        seen = jnp.concatenate([past.mask, mask])
        score = jnp.einsum("qad,kad->aqk", query, keys) / math.sqrt(shape[-1])
        weight = jax.nn.softmax(jnp.where(seen, score, _NEVER), axis=-1)
        mixed = jnp.einsum("aqk,kad->qad", weight, values).reshape(x.shape)
        kept = jax.lax.stop_gradient(Past(key, value, mask))
        return self.out(mixed), kept


class SegmentLayer(eqx.Module):
    """Attention, then two dense layers op by op, each added to what comes in.

    Without attention the dense layers remain; without superposition all gates are 1.
    """

    attention: Attention | None
    up: Dense
    down: Dense
    gate: Dense | None
    heads: int = eqx.field(static=True)

    def __init__(
        self, width: int, heads: int, draws: Draws, *, attention: bool, superposition: bool
    ):
        self.attention = Attention(width, draws) if attention else None
        self.up = Dense(width, _EXPANSION * width, draws)
        self.down = Dense(_EXPANSION * width, width, draws)
        self.gate = Dense(width, GATES * width, draws) if superposition else None
        self.heads = heads

    def gates(self, summary: Float[Array, " H"]) -> Float[Array, " W"]:
        """Factors of the layers' inputs, from the mean over the graph's ops."""
        return gates_of(self.gate, summary, GATES * summary.shape[0])

    def no_past(self, segment: int, width: int) -> Past:
        """What stands before the first segment."""
        shape = (segment, self.heads, width // self.heads)
        zeros = jnp.zeros(shape, jnp.float32)
        return Past(zeros, zeros, jnp.zeros(segment, bool))

    def __call__(
        self,
        x: Float[Array, "S H"],
        mask: Bool[Array, " S"],
        past: Past,
        gates: Float[Array, " W"],
    ) -> tuple[Float[Array, "S H"], Past]:
        width = x.shape[1]
        if self.attention is not None:
            mixed, past = self.attention(standardised(x) * gates[:width], mask, past)
            x = x + mixed
        hidden = jax.nn.relu(self.up(standardised(x) * gates[width : 2 * width]))
        return x + self.down(hidden * gates[2 * width :]), past


def gates_of(gate: Dense | None, summary: Float[Array, " H"], width: int) -> Float[Array, " W"]:
    """Gates between 0 and 2, near 1 before any training."""
    if gate is None:
        return jnp.ones(width, jnp.float32)
    return 2.0 * jax.nn.sigmoid(gate(summary))
