"""A batching rule for functions that are written for a whole population at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def over_population(run: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Lets `vmap` reach a population function in one piece.

    `run(shared, candidates)` takes candidates whose every leaf leads with P and returns leaves
    that lead with P. The function returned is unbatched; any nest of `vmap` over candidates calls
    `run` once with all of them. Where `shared` is batched too, each of its entries gets its own
    call, one after the other.
    """

    def many_rule(size: int, batched: Any, shared: Any, candidates: Any) -> Any:
        shared_batched, candidates_batched = batched
        spread = jax.tree.map(
            lambda x, b: x if b else jnp.broadcast_to(x, (size, *x.shape)),
            candidates,
            candidates_batched,
        )
        if any(jax.tree.leaves(shared_batched)):
            whole = jax.tree.map(
                lambda x, b: x if b else jnp.broadcast_to(x, (size, *jnp.shape(x))),
                shared,
                shared_batched,
            )
            out = jax.lax.map(lambda pair: many(*pair), (whole, spread))
        else:
            population = jax.tree.leaves(spread)[0].shape[1]
            flat = jax.tree.map(lambda x: x.reshape(size * population, *x.shape[2:]), spread)
            out = many(shared, flat)
            out = jax.tree.map(lambda x: x.reshape(size, population, *x.shape[1:]), out)
        return out, jax.tree.map(lambda _: True, out)

    @jax.custom_batching.custom_vmap
    def many(shared: Any, candidates: Any) -> Any:
        return run(shared, candidates)

    many.def_vmap(many_rule)

    @jax.custom_batching.custom_vmap
    def one(shared: Any, candidate: Any) -> Any:
        return jax.tree.map(lambda x: x[0], run(shared, jax.tree.map(lambda x: x[None], candidate)))

    @one.def_vmap
    def _(size: int, batched: Any, shared: Any, candidate: Any) -> Any:
        shared_batched, _ = batched
        spread = jax.tree.map(
            lambda x, b: x if b else jnp.broadcast_to(x, (size, *x.shape)), candidate, batched[1]
        )
        if any(jax.tree.leaves(shared_batched)):
            single = jax.tree.map(lambda x: x[:, None], spread)
            out, _ = many_rule(size, (shared_batched, True_like(single)), shared, single)
            out = jax.tree.map(lambda x: x[:, 0], out)
        else:
            out = many(shared, spread)
        return out, jax.tree.map(lambda _: True, out)

    return one


def True_like(tree: Any) -> Any:
    return jax.tree.map(lambda _: True, tree)
