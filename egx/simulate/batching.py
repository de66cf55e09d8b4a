"""A batching rule for functions that are written for a whole population at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

Arrays = dict[str, Any]


def over_population(
    run: Callable[[Any, Arrays, Arrays], Any], *, pieces: Callable[[Arrays], int] | None = None
) -> Callable[[Any, Arrays], Any]:
    """Lets `vmap` reach a population function in one piece.

    `run(shared, common, each)` takes arrays that all candidates have in common and arrays that
    lead with P; its result leads with P. The function returned, of (shared, arrays), is unbatched;
    any nest of `vmap` over arrays calls `run` once with all candidates. Where `shared` is batched
    too, each of its entries gets its own call, one after the other.

    `pieces(each)` may ask for several runs of fewer candidates, one after the other.
    """

    def whole(shared: Any, common: Arrays, each: Arrays) -> Any:
        population = jax.tree.leaves(each)[0].shape[0]
        count = 1 if pieces is None else min(pieces(each), population)
        if population == 1:
            return jax.tree.map(lambda x: x[:1], run(shared, common, jax.tree.map(_twice, each)))
        if count == 1:
            return run(shared, common, each)
        size = -(-population // count)
        missing = size * count - population

        def cut(x: Any) -> Any:
            x = jnp.concatenate([x, x[:missing]]) if missing else x
            return x.reshape(count, size, *x.shape[1:])

        out = jax.lax.map(lambda piece: run(shared, common, piece), jax.tree.map(cut, each))
        return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:population], out)

    @jax.custom_batching.custom_vmap
    def many(shared: Any, common: Arrays, each: Arrays) -> Any:
        return whole(shared, common, each)

    @many.def_vmap
    def many_rule(size: int, batched: Any, shared: Any, common: Arrays, each: Arrays) -> Any:
        shared_batched, common_batched, each_batched = batched
        population = jax.tree.leaves(each)[0].shape[1 if any(jax.tree.leaves(each_batched)) else 0]
        each = _spread(each, each_batched, size)
        # What differs between batches is not common any more, unless each batch has its own run.
        if any(jax.tree.leaves(shared_batched)):
            arguments = (_spread(shared, shared_batched, size), each)
            if any(jax.tree.leaves(common_batched)):
                spread = _spread(common, common_batched, size)
                out = jax.lax.map(lambda x: many(x[0], x[2], x[1]), (*arguments, spread))
            else:
                out = jax.lax.map(lambda x: many(x[0], common, x[1]), arguments)
        else:
            for name in [name for name, is_batched in common_batched.items() if is_batched]:
                value = common[name][:, None]
                each[name] = jnp.broadcast_to(value, (size, population, *value.shape[2:]))
            common = {name: x for name, x in common.items() if not common_batched[name]}
            flat = jax.tree.map(lambda x: x.reshape(size * population, *x.shape[2:]), each)
            out = many(shared, common, flat)
            out = jax.tree.map(lambda x: x.reshape(size, population, *x.shape[1:]), out)
        return out, jax.tree.map(lambda _: True, out)

    @jax.custom_batching.custom_vmap
    def one(shared: Any, arrays: Arrays) -> Any:
        each = {name: _twice(x[None]) for name, x in arrays.items()}
        return jax.tree.map(lambda x: x[0], run(shared, {}, each))

    @one.def_vmap
    def one_rule(size: int, batched: Any, shared: Any, arrays: Arrays) -> Any:
        shared_batched, arrays_batched = batched
        if any(jax.tree.leaves(shared_batched)):
            spread = (_spread(shared, shared_batched, size), _spread(arrays, arrays_batched, size))
            out = jax.lax.map(lambda x: one(*x), spread)
        else:
            each = {name: x for name, x in arrays.items() if arrays_batched[name]}
            common = {name: x for name, x in arrays.items() if not arrays_batched[name]}
            out = many(shared, common, each)
        return out, jax.tree.map(lambda _: True, out)

    return one


def _twice(x: Any) -> Any:
    """One candidate as two. Of a loop over one, XLA's CPU compiler copies all arrays in each step,
    which makes its cost quadratic in the size of the graph; over two it writes in place."""
    return jnp.concatenate([x, x])


def _spread(tree: Any, batched: Any, size: int) -> Any:
    """`tree` with a leading batch axis on every leaf."""
    return jax.tree.map(
        lambda x, is_batched: x if is_batched else jnp.broadcast_to(x, (size, *jnp.shape(x))),
        tree,
        batched,
    )
