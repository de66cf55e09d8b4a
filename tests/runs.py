"""A problem small enough for many runs, and a searcher whose state shows what it was told."""

from __future__ import annotations

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

import egx
from egx.graph.builder import GraphBuilder
from egx.graph.graph import Graph, Model
from egx.hardware.spec import Hardware
from egx.host import HostOnly
from egx.problems.base import (
    AbstractOutcome,
    AbstractProblem,
    Decisions,
    Head,
    check_decisions,
    squared_speedup_reward,
)
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


class ToyOutcome(AbstractOutcome):
    cost: Float[Array, ""]
    feasible: Bool[Array, ""]
    reward: Float[Array, ""]


class Toy(AbstractProblem):
    """Guess two numbers an op; the weights may not sum above a limit. Compiles in no time."""

    graph: Graph
    target: Int[Array, " N"]
    limit: Int[Array, ""]
    reference: Decisions
    reference_cost: Float[Array, ""]
    model: HostOnly[Model | None] = eqx.field(static=True)

    def __init__(self, model: Model | Graph, limit: Any = 7):
        named = isinstance(model, Model)
        self.graph, self.model = model.graph if named else model, HostOnly(model if named else None)
        ops = self.graph.num_ops
        self.target = jnp.arange(ops, dtype=jnp.int32) % 3
        self.limit = jnp.asarray(limit, jnp.int32)
        zeros = jnp.zeros(ops, jnp.int32)
        self.reference = {"weights": zeros, "activations": zeros}
        self.reference_cost = self._cost(zeros, zeros)

    @property
    def heads(self) -> dict[str, Head]:
        return {"weights": Head("op", 3), "activations": Head("op", 4)}

    @property
    def features(self) -> Float[Array, "N F"]:
        return jnp.stack([self.target, self.graph.op_class], -1).astype(jnp.float32)

    def _cost(self, weights: Array, activations: Array) -> Array:
        wrong = jnp.abs(weights - self.target) * 4 + jnp.abs(activations - 3)
        # Whole numbers: exact, however a compiler fuses the sum.
        return 8.0 + jnp.sum(jnp.where(self.graph.op_mask, wrong, 0)).astype(jnp.float32)

    def evaluate(self, decisions: Any) -> ToyOutcome:
        checked = check_decisions(self, decisions)
        cost = self._cost(checked["weights"], checked["activations"])
        weights = jnp.where(self.graph.op_mask, checked["weights"], 0)
        excess = jnp.maximum(jnp.sum(weights) - self.limit, 0).astype(jnp.float32)
        good = squared_speedup_reward(self.reference_cost, cost)
        return ToyOutcome(cost, excess == 0, jnp.where(excess == 0, good, -1.0 - excess))

    def failed(self) -> ToyOutcome:
        worst = jnp.asarray(1e6, jnp.float32)
        return ToyOutcome(worst, jnp.zeros((), bool), -worst)

    def measured(self, cost: Array) -> ToyOutcome:
        reward = squared_speedup_reward(self.reference_cost, cost)
        return ToyOutcome(cost, jnp.ones((), bool), reward)


@functools.cache
def small_problem() -> Toy:
    return Toy(chain())


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
