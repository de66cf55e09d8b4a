"""Layers of graph networks: dense maps, and graph attention along edges or within a matrix.

Graph attention after Veličković et al., "Graph Attention Networks", ICLR 2018, arXiv 1710.10903:
the weight of neighbour j for node i is softmax_j(LeakyReLU(s_i + t_j)).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from egx.policies.context import Edges

_Built = TypeVar("_Built")

_SLOPE = 0.2
_SPREAD = 40.0


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
        """Attends over neighbours: along edges, or where a symmetric matrix is True."""
        values = projected.reshape(-1, *self.source.shape)
        vectors = jnp.stack([self.source, self.target])
        source, target = jnp.einsum("nhd,khd->knh", values, vectors)
        if isinstance(neighbours, Edges):
            mixed = attend_along_edges(source, target, values, neighbours, mask)
        else:
            mixed = attend_in_matrix(source, target, values, neighbours, mask)
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
    mask: Bool[Array, " N"],
) -> Float[Array, "N H D"]:
    """The same where a symmetric matrix is True, without an exponential an entry.

    exp(LeakyReLU(s + t)) is exp(s) exp(t) where s + t > 0 and exp(0.2 s) exp(0.2 t) elsewhere, so
    the sum over neighbours has two halves, each a product of a 0/1 matrix with scaled values.
    """
    target, top = _bounded(target, mask)
    highest = jax.lax.stop_gradient(_leaky(source + top))
    # A column of ones carries the softmax's denominator through the same products.
    values = jnp.concatenate([values, jnp.ones_like(values[..., :1])], axis=-1)
    above, below = (jnp.exp(k * (target - top))[..., None] * values for k in (1.0, _SLOPE))
    above, below = sum_by_sign(source, target, above, below, adjacency)
    left = [jnp.exp(k * (source + top) - highest)[..., None] for k in (1.0, _SLOPE)]
    mixed = left[0] * above + left[1] * below
    return mixed[..., :-1] / jnp.where(mask[:, None, None], mixed[..., -1:], 1.0)


@jax.custom_vjp
def sum_by_sign(
    source: Float[Array, "N H"],
    target: Float[Array, "N H"],
    above: Float[Array, "N H D"],
    below: Float[Array, "N H D"],
    adjacency: Bool[Array, "N N"],
) -> tuple[Float[Array, "N H D"], Float[Array, "N H D"]]:
    """For each i and head, the sum of above[j] over neighbours with s_i + t_j > 0, and of below[j]
    over the others; `adjacency` is symmetric.

    Linear in `above` and `below` and, almost everywhere, constant in `source` and `target`; its
    transpose is itself with these two exchanged, which costs no transposed matrix.
    """
    positive = source.T[:, :, None] > -target.T[:, None, :]
    first = (adjacency & positive).astype(jnp.float32) @ jnp.swapaxes(above, 0, 1)
    second = (adjacency & ~positive).astype(jnp.float32) @ jnp.swapaxes(below, 0, 1)
    return jnp.swapaxes(first, 0, 1), jnp.swapaxes(second, 0, 1)


def _sum_by_sign_forward(
    source: Array, target: Array, above: Array, below: Array, adjacency: Array
) -> tuple[Any, Any]:
    return sum_by_sign(source, target, above, below, adjacency), (source, target, adjacency)


def _sum_by_sign_backward(saved: Any, gradient: Any) -> tuple[Any, ...]:
    source, target, adjacency = saved
    return None, None, *sum_by_sign(target, source, *gradient, adjacency), None


sum_by_sign.defvjp(_sum_by_sign_forward, _sum_by_sign_backward)


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
