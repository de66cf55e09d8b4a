"""A problem small enough for many runs, and a searcher whose state shows what it was told."""

from __future__ import annotations

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import egx
from egx.graph.builder import GraphBuilder
from egx.graph.graph import Model
from egx.hardware.spec import Hardware
from egx.problems.memory_placement import MemoryPlacement
from egx.search.base import AbstractSearch
from egx.search.random import random_decisions


def machine(fast_bytes: float = 24.0) -> Hardware:
    one = np.ones((1, 1))
    return Hardware(
        flops_per_s=np.full((1, 5), 10.0),
        level_bytes=[[1e9, 60.0, fast_bytes]],
        read_bytes_per_s=[[1.0, 4.0, 16.0]],
        write_bytes_per_s=[[1.0, 4.0, 16.0]],
        link_bytes_per_s=one,
        link_latency_s=0 * one,
        launch_s=[0.1],
    )


def chain(ops: int = 6, scale: int = 1, name: str = "chain") -> Model:
    builder, previous = GraphBuilder(name), ()
    for index in range(ops):
        previous = builder.op(
            f"op{index}",
            kind="contraction",
            op_type="matmul",
            inputs=previous,
            output_bytes=[scale * (3 + index)],
            flops=float(index),
            weight_bytes=scale * (5 + 2 * index),
        )
    builder.output(previous[0])
    return builder.build_model()


@functools.cache
def small_problem() -> MemoryPlacement:
    return MemoryPlacement(chain(), machine())


class Climber(AbstractSearch):
    """Changes one entry of the best so far; keeps every key, cost and count that it was told."""

    batch: int = eqx.field(static=True, default=4)
    rate: float = 0.2

    @property
    def batch_size(self) -> int:
        return self.batch

    def initial(self, problem: Any, *, key: Any) -> Any:
        parent = jax.tree.map(lambda x: x[0], random_decisions(problem, key=key, batch=1))
        return {
            "key": key,
            "parent": parent,
            "cost": jnp.asarray(3e38, jnp.float32),
            "told": jnp.zeros((), jnp.int32),
        }

    def propose(self, problem: Any, inner: Any, *, key: Any) -> Any:
        fresh = random_decisions(problem, key=key, batch=self.batch)
        candidates = {}
        for index, (name, value) in enumerate(fresh.items()):
            change = jax.random.bernoulli(
                jax.random.fold_in(key, 10 + index), self.rate, value.shape
            )
            candidates[name] = jnp.where(change, value, inner["parent"][name])
        return candidates, {**inner, "key": key}

    def update(self, problem: Any, inner: Any, candidates: Any, outcomes: Any, *, key: Any) -> Any:
        cost = jnp.where(outcomes.feasible, outcomes.cost, 3e38)
        best = jnp.argmin(cost)
        improves = cost[best] < inner["cost"]
        inner = {
            "key": key,
            "parent": {
                name: jnp.where(improves, value[best], inner["parent"][name])
                for name, value in candidates.items()
            },
            "cost": jnp.minimum(cost[best], inner["cost"]),
            "told": inner["told"] + jnp.sum((outcomes.cost < 3e38).astype(jnp.int32)),
        }
        return inner, {"told": inner["told"].astype(jnp.float32), "batch_best": cost[best]}


def same_search(a: egx.Result, b: egx.Result) -> None:
    """Asserts that two results are the same bits, times and dates aside."""
    for name in a.decisions:
        np.testing.assert_array_equal(a.decisions[name], b.decisions[name])
    assert (a.cost, a.feasible, a.found_at, a.evaluations) == (
        b.cost,
        b.feasible,
        b.found_at,
        b.evaluations,
    )
    np.testing.assert_array_equal(a.history.evaluations, b.history.evaluations)
    np.testing.assert_array_equal(a.history.best_cost, b.history.best_cost)
    np.testing.assert_array_equal(a.history.best_feasible, b.history.best_feasible)
    for name in a.history.metrics:
        np.testing.assert_array_equal(a.history.metrics[name], b.history.metrics[name])
