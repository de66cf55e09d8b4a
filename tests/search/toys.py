"""Tiny memory placements whose best plan is known by trying all, and a loop without a driver."""

from __future__ import annotations

import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PRNGKeyArray

from egx.problems.base import Decisions
from egx.problems.memory_placement import MemoryPlacement
from egx.search.base import AbstractSearch, State
from egx.training.loop import run
from tests.simulate import cases


def chain(ops: int, levels: int = 3, *, prefetch: int = 0, seed: int = 0) -> MemoryPlacement:
    """A chain of ops with weights, on levels that hold less than half of them."""
    rng = np.random.default_rng(seed)
    entries = [
        {
            "inputs": [i - 1] if i else [],
            "sizes": [int(rng.integers(20, 100))],
            "flops": float(rng.integers(0, 30)),
            "weight": int(rng.integers(20, 100)),
        }
        for i in range(ops)
    ]
    total = sum(entry["weight"] for entry in entries)
    capacity = [1e9] + [total * 0.3] * (levels - 1)
    hardware = cases.machine(capacity, read=[1.0, 4.0, 16.0, 64.0][:levels], launch_s=1.0)
    return MemoryPlacement(cases.build(entries, [ops - 1]), hardware, prefetch=prefetch)


@eqx.filter_jit
def _costs(problem: MemoryPlacement, weights: jax.Array, activations: jax.Array) -> jax.Array:
    outcomes = jax.vmap(problem.evaluate)({"weights": weights, "activations": activations})
    return jnp.where(outcomes.feasible, outcomes.cost, jnp.inf)


def optimum(problem: MemoryPlacement) -> float:
    """The least cost of all valid maps."""
    ops, levels = problem.graph.num_ops, problem.hardware.num_levels
    maps = np.asarray(list(itertools.product(range(levels), repeat=2 * ops)), np.int32)
    maps = maps.reshape(-1, 2, ops)
    return float(jnp.min(_costs(problem, jnp.asarray(maps[:, 0]), jnp.asarray(maps[:, 1]))))


def costs(search: AbstractSearch, problem: MemoryPlacement, *, budget: int) -> np.ndarray:
    """The costs [3] that three seeds found, all of them valid plans."""
    results = run(search, problem, budget=budget, seeds=[0, 1, 2])
    assert all(result.feasible and result.evaluations == budget for result in results)
    return np.asarray([result.cost for result in results])


# At the top, so that seeds and problems of one shape share a compiled program.
@eqx.filter_jit
def begin(search: AbstractSearch, problem: MemoryPlacement, key: PRNGKeyArray) -> State:
    return search.init(problem, key=key)


@eqx.filter_jit
def generation(
    search: AbstractSearch, problem: MemoryPlacement, state: State, key: PRNGKeyArray
) -> tuple[Decisions, State]:
    ask_key, tell_key = jax.random.split(key)
    candidates, state = search.ask(problem, state, key=ask_key)
    outcomes = jax.vmap(problem.evaluate)(candidates)
    state, _ = search.tell(problem, state, candidates, outcomes, key=tell_key)
    return candidates, state


def search_for(
    search: AbstractSearch, problem: MemoryPlacement, *, generations: int, seed: int = 0
) -> tuple[State, list[dict[str, np.ndarray]]]:
    """The state after some generations, and all that was proposed, a dict a generation."""
    search.check(problem)
    key = jax.random.key(seed)
    state = begin(search, problem, jax.random.fold_in(key, 0))
    proposed = []
    for index in range(generations):
        candidates, state = generation(search, problem, state, jax.random.fold_in(key, index + 1))
        proposed.append({name: np.asarray(value) for name, value in candidates.items()})
    return state, proposed
