"""Adam on all weights of a network as one vector: an update a tensor would compile for seconds.

Kingma and Ba, "Adam: A Method for Stochastic Optimization", ICLR 2015, arXiv 1412.6980.
"""

from __future__ import annotations

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import optax
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float

from egx.search.base import Scalar

_Network = TypeVar("_Network")


def no_moments(network: Any) -> Any:
    """The optimiser's state before its first step."""
    return optax.scale_by_adam().init(ravel_pytree(network)[0])


def descend(
    network: _Network,
    gradient: Any,
    moments: Any,
    *,
    learning_rate: Scalar | float,
    clip: Scalar | float,
) -> tuple[_Network, Any, Float[Array, ""]]:
    """One step against the gradient, whose norm is cut to `clip`; its norm before that."""
    flat, unravel = ravel_pytree(network)
    gradient = ravel_pytree(gradient)[0]
    norm = jnp.sqrt(jnp.sum(gradient * gradient))
    gradient = gradient * jnp.minimum(1.0, clip / jnp.maximum(norm, 1e-12))
    # Adam's bias correction raises a float to an integer power.
    with jax.numpy_dtype_promotion("standard"):
        updates, moments = optax.scale_by_adam().update(gradient, moments)
    return unravel(flat - learning_rate * updates), moments, norm
