"""Layers of graph networks: dense maps, and graph attention along edges or within a matrix.

Graph attention after Veličković et al., "Graph Attention Networks", ICLR 2018, arXiv 1710.10903:
the weight of neighbour j for node i is softmax_j(LeakyReLU(s_i + t_j)).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from egx.policies.context import Edges

_Built = TypeVar("_Built")

_SLOPE = 0.2
_SPREAD = 40.0
# Far below any score, and its exponential is 0, but no infinity: rows of padding have no neighbour.
_NEVER = -1e30


class Draws:
    """Hands out initial weights from one random draw: a draw a tensor would compile for longer
    than a whole network runs."""

    def __init__(self, flat: Array | None):
        self._flat, self.used = flat, 0

    def __call__(self, shape: tuple[int, ...], bound: float) -> Array:
        """Weights from U(-bound, bound)."""
        start, self.used = self.used, self.used + math.prod(shape)
        if self._flat is None:
            return jnp.zeros(shape, jnp.float32)
        return bound * self._flat[start : self.used].reshape(shape)


def initialised(build: Callable[[Draws], _Built], key: PRNGKeyArray) -> _Built:
    """What `build` makes of as many random weights as it asks for."""
    counter = Draws(None)
    jax.eval_shape(lambda: build(counter))
    return build(Draws(jax.random.uniform(key, (counter.used,), minval=-1.0, maxval=1.0)))


class Dense(eqx.Module):
    """x W + b along the last axis."""

    weight: Float[Array, "I O"]
    bias: Float[Array, " O"]

    def __init__(self, inputs: int, outputs: int, draws: Draws):
        bound = 1.0 / math.sqrt(max(inputs, 1))
        self.weight = draws((inputs, outputs), bound)
        self.bias = draws((outputs,), bound)

    def __call__(self, x: Float[Array, "... I"]) -> Float[Array, "... O"]:
        return x @ self.weight + self.bias


def standardised(x: Float[Array, "N H"]) -> Float[Array, "N H"]:
    """Each row with mean 0 and variance 1."""
    x = x - jnp.mean(x, -1, keepdims=True)
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


class GraphAttention(eqx.Module):
    """Graph attention with H heads whose outputs are joined: [N, I] to [N, H * D]."""

    weight: Float[Array, "I HD"]
    source: Float[Array, "H D"]
    target: Float[Array, "H D"]
    bias: Float[Array, " HD"]

    def __init__(self, inputs: int, outputs: int, heads: int, draws: Draws):
        each = outputs // heads
        self.weight = draws((inputs, outputs), math.sqrt(6.0 / (inputs + outputs)))
        self.source = draws((heads, each), math.sqrt(6.0 / (heads + each)))
        self.target = draws((heads, each), math.sqrt(6.0 / (heads + each)))
        self.bias = jnp.zeros(outputs, jnp.float32)

    def project(self, x: Float[Array, "N I"]) -> Float[Array, "N HD"]:
        """The linear map in front of the attention."""
        return x @ self.weight

    def __call__(
        self,
        projected: Float[Array, "N HD"],
        neighbours: Edges | Bool[Array, "N N"],
        mask: Bool[Array, " N"],
    ) -> Float[Array, "N HD"]:
        """Attends over neighbours: along edges, or where a matrix is True."""
        values = projected.reshape(-1, *self.source.shape)
        vectors = jnp.stack([self.source, self.target])
        source, target = jnp.einsum("nhd,khd->knh", values, vectors)
        if isinstance(neighbours, Edges):
            mixed = attend_along_edges(source, target, values, neighbours, mask)
        else:
            mixed = attend_in_matrix(source, target, values, neighbours)
        return mixed.reshape(projected.shape) + self.bias


def attend_along_edges(
    source: Float[Array, "N H"],
    target: Float[Array, "N H"],
    values: Float[Array, "N H D"],
    edges: Edges,
    mask: Bool[Array, " N"],
) -> Float[Array, "N H D"]:
    """Graph attention along edges, by sums over segments."""
    target, top = _bounded(target, mask)
    highest = jax.lax.stop_gradient(_leaky(source + top))
    score = _leaky(source[edges.receivers] + target[edges.senders])
    weight = jnp.exp(score - highest[edges.receivers])
    weight = jnp.where(edges.mask[:, None], weight, 0.0)

    def total(message: Array) -> Array:
        count = mask.shape[0]
        return jax.ops.segment_sum(message, edges.receivers, count, indices_are_sorted=True)

    mixed = total(weight[:, :, None] * values[edges.senders])
    return mixed / jnp.where(mask[:, None], total(weight), 1.0)[:, :, None]


def attend_in_matrix(
    source: Float[Array, "N H"],
    target: Float[Array, "N H"],
    values: Float[Array, "N H D"],
    adjacency: Bool[Array, "N N"],
) -> Float[Array, "N H D"]:
    """Graph attention over the True entries of each row; a row without any sees all alike."""
    score = _leaky(source.T[:, :, None] + target.T[:, None, :])
    weight = jax.nn.softmax(jnp.where(adjacency, score, _NEVER), axis=-1)
    return jnp.swapaxes(weight @ jnp.swapaxes(values, 0, 1), 0, 1)


def _bounded(target: Array, mask: Array) -> tuple[Array, Array]:
    """Targets within `_SPREAD` of the highest real one, padding set to that; the highest, [H].

    Scores are taken relative to the highest that a node could see, LeakyReLU(s_i + max t), which
    costs no maximum over neighbours. The bound keeps each denominator, and its square in the
    gradient, inside the range of float32, whatever the weights; an op is its own neighbour, so
    that only padding has none.
    """
    top = jax.lax.stop_gradient(jnp.max(jnp.where(mask[:, None], target, -jnp.inf), axis=0))
    return jnp.where(mask[:, None], jnp.maximum(target, top - _SPREAD), top), top


def _leaky(x: Array) -> Array:
    return jnp.maximum(x, _SLOPE * x)
