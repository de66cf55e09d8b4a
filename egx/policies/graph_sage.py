"""GraphSAGE with max pooling over predecessors and successors together.

Hamilton, Ying and Leskovec, "Inductive Representation Learning on Large Graphs", NeurIPS 2017,
arXiv 1706.02216, as GO uses it (arXiv 2010.12438): h_N(v) = max over neighbours u of
sigmoid(W h_u + b), h_v = FC(concat(h_v, h_N(v))).

Shapes: N ops, U uses, H width.
"""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from egx.policies.layers import Dense, Draws
from egx.policies.messages import MessageContext

# A message and its sender in one int32: comparing both at once is what chooses a sender.
_SENDER_BITS = 18
_STEPS = 2.0 ** (31 - _SENDER_BITS) - 1.0
MOST_OPS = 2**_SENDER_BITS


class GraphSage(eqx.Module):
    """One layer."""

    message: Dense
    update: Dense

    def __init__(self, width: int, draws: Draws):
        self.message = Dense(width, width, draws)
        self.update = Dense(2 * width, width, draws)

    def __call__(self, x: Float[Array, "N H"], context: MessageContext) -> Float[Array, "N H"]:
        pooled = pool_neighbours(jax.nn.sigmoid(self.message(x)), context)
        return jax.nn.relu(self.update(jnp.concatenate([x, pooled], 1)))


def pool_neighbours(message: Float[Array, "N H"], context: MessageContext) -> Float[Array, "N H"]:
    """The largest message in (0, 1) among each op's neighbours, column by column; 0 without any.

    The sender is chosen in whole numbers, to 1/8192, and its message then looked up: the gradient
    of a maximum would compare messages with their maximum, and a compiler that computes them twice,
    rounded differently, finds none that equals it.
    """
    sender = _largest_sender(jax.lax.stop_gradient(message), context)
    chosen = jnp.take_along_axis(message, jnp.maximum(sender, 0), axis=0)
    return jnp.where(sender >= 0, chosen, 0.0)


def _largest_sender(message: Float[Array, "N H"], context: MessageContext) -> Int[Array, "N H"]:
    """The neighbour that sends most, the later one of a tie; -1 for none."""
    count = message.shape[0]
    ops = jnp.arange(count, dtype=jnp.int32)[:, None]
    packed = (jnp.round(message * _STEPS).astype(jnp.int32) << _SENDER_BITS) | ops

    def largest(senders: Int[Array, " U"], receivers: Int[Array, " U"], real: Array) -> Array:
        rows = jnp.where(real[:, None], packed[senders], -1)
        return jax.ops.segment_max(rows, receivers, count, indices_are_sorted=True)

    back = context.by_producer
    along = largest(context.producer, context.consumer, context.use_mask)
    against = largest(context.consumer[back], context.producer[back], context.use_mask[back])
    both = jnp.maximum(along, against)
    return jnp.where(both >= 0, both & (MOST_OPS - 1), -1)
