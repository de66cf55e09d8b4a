"""Small functions to trace, and what XLA says that they cost."""

from __future__ import annotations

import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax


class Block(eqx.Module):
    """A pre-norm transformer block."""

    attention: eqx.nn.MultiheadAttention
    first: eqx.nn.Linear
    second: eqx.nn.Linear
    norm: eqx.nn.LayerNorm

    def __init__(self, width, *, key):
        keys = jax.random.split(key, 3)
        self.attention = eqx.nn.MultiheadAttention(2, width, key=keys[0])
        self.first = eqx.nn.Linear(width, 4 * width, key=keys[1])
        self.second = eqx.nn.Linear(4 * width, width, key=keys[2])
        self.norm = eqx.nn.LayerNorm(width)

    def __call__(self, x):
        y = jax.vmap(self.norm)(x)
        mask = jnp.tril(jnp.ones((len(x), len(x)), bool))
        x = x + self.attention(y, y, y, mask=mask)
        return x + jax.vmap(self.second)(jax.nn.gelu(jax.vmap(self.first)(x)))


class Transformer(eqx.Module):
    """A language model of a few blocks."""

    embed: eqx.nn.Embedding
    blocks: list[Block]
    head: eqx.nn.Linear

    def __init__(self, width, layers, *, key):
        keys = jax.random.split(key, layers + 2)
        self.embed = eqx.nn.Embedding(32, width, key=keys[0])
        self.head = eqx.nn.Linear(width, 32, key=keys[1])
        self.blocks = [Block(width, key=k) for k in keys[2:]]

    def __call__(self, tokens):
        x = jax.vmap(self.embed)(tokens)
        for block in self.blocks:
            x = block(x)
        return jax.vmap(self.head)(x)


OPTIMIZER = optax.sgd(1e-2, momentum=0.9)


@eqx.filter_jit
def training_step(net, state, tokens):
    """(net, state, loss) after one step of gradient descent with momentum."""

    def loss(net):
        logits = jax.vmap(net)(tokens)[:, :-1]
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    value, gradient = eqx.filter_value_and_grad(loss)(net)
    update, state = OPTIMIZER.update(gradient, state, net)
    return eqx.apply_updates(net, update), state, value


def training_case(width=32, layers=1, batch=4, length=16):
    """The arguments of `training_step`."""
    net = Transformer(width, layers, key=jax.random.key(0))
    state = OPTIMIZER.init(eqx.filter(net, eqx.is_array))
    return net, state, jax.random.randint(jax.random.key(1), (batch, length), 0, 32)


def mlp(parameters, x):
    """Layers of matmul, bias and relu."""
    for weight, bias in parameters:
        x = jax.nn.relu(x @ weight + bias)
    return x


def mlp_case():
    """The arguments of `mlp`."""
    sizes = (64, 128, 64)
    layers = [
        (np.full(pair, 0.1, np.float32), np.ones(pair[1], np.float32))
        for pair in itertools.pairwise(sizes)
    ]
    return layers, np.ones((32, 64), np.float32)


def conv_step(kernels, x):
    """(loss, kernels) after a step of gradient descent on a strided convolution net."""

    def loss(kernels):
        y = x
        for k, kernel in enumerate(kernels):
            y = jax.lax.conv_general_dilated(
                y, kernel, (1 + k % 2,) * 2, "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
            y = jax.nn.relu(y)
        window = (1, 2, 2, 1)
        y = jax.lax.reduce_window(y, -jnp.inf, jax.lax.max, window, window, "VALID")
        return jnp.mean(y * y)

    value, gradient = jax.value_and_grad(loss)(kernels)
    return value, [k - 0.1 * g for k, g in zip(kernels, gradient, strict=True)]


def conv_case():
    """The arguments of `conv_step`."""
    shapes = [(3, 3, 3, 8), (3, 3, 8, 16), (3, 3, 16, 16)]
    kernels = [np.full(shape, 0.1, np.float32) for shape in shapes]
    return kernels, np.ones((2, 16, 16, 3), np.float32)
