"""The conformance check of problems."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from egx.errors import DecisionError
from egx.graph.graph import Graph
from egx.graph.padding import pad_graph
from egx.problems.base import AbstractOutcome, AbstractProblem, Decisions, Head
from egx.search.random import random_decisions
from egx.testing.common import Nonconforming, doing, equal, require
from egx.training.generation import concrete, evaluate_population

PADDING = 3
RELATIVE = 1e-5


def check_problem(
    problem: AbstractProblem,
    *,
    seed: int = 0,
    batch: int = 8,
    rebuild: Callable[[Graph], AbstractProblem] | None = None,
) -> None:
    """Checks what every searcher and the driver rely on.

    Args:
        problem: a concrete problem, not a traced or stacked one.
        seed: of the random candidates.
        batch: how many of them.
        rebuild: makes the same problem from another graph, to check that padding changes
            nothing. By default the constructor is called with the graph as `model` and with the
            problem's attributes of the names of its other parameters; where it has no such
            parameters, the padding is not checked.

    Raises:
        Nonconforming: naming the promise that is broken.
    """
    _check_static(problem)
    problem = concrete(problem)
    _check_heads(problem)
    _check_features(problem)
    key = jax.random.key(seed)
    candidates = random_decisions(problem, key=key, batch=batch)
    for name, plan in _known_plans(problem).items():
        candidates = {
            head: jnp.concatenate([value, jnp.asarray(plan[head])[None]])
            for head, value in candidates.items()
        }
        check_plan(problem, f"heuristics()[{name!r}]", plan)
    with doing("a jitted, vmapped evaluate"):
        outcomes = eqx.filter_jit(evaluate_population)(problem, candidates)
    _check_outcomes(outcomes, batch + len(_known_plans(problem)))
    _check_reference(problem)
    _check_bound(problem, outcomes)
    _check_batching(problem, candidates, outcomes)
    _check_refusals(problem)
    _check_outside(problem, outcomes)
    _check_idle_entries(problem, candidates, outcomes, key)
    _check_repair(problem, candidates)
    _check_padding(problem, candidates, outcomes, rebuild)


def _check_heads(problem: AbstractProblem) -> None:
    heads = problem.heads
    require(isinstance(heads, dict) and heads, f"heads must be a dict with entries, got {heads!r}")
    for name, head in heads.items():
        require(isinstance(head, Head), f"heads[{name!r}] must be a Head, got {head!r}")
        require(head.axis in ("op", "use"), f"heads[{name!r}] has axis {head.axis!r}")
        whole = isinstance(head.choices, int) and head.choices >= 1
        require(head.choices == "real" or whole, f"heads[{name!r}] has choices {head.choices!r}")


def _check_static(problem: AbstractProblem) -> None:
    for leaf in jax.tree.leaves(problem):
        require(
            isinstance(leaf, jax.Array | np.ndarray),
            f"every leaf must be an array, found {leaf!r}; make it a static field",
        )
    with doing("hashing the problem's static fields"):
        hash(jax.tree.structure(problem))


def _check_features(problem: AbstractProblem) -> None:
    with doing("features"):
        features = problem.features
    ops = problem.graph.num_ops
    shape = features.shape
    require(len(shape) == 2 and shape[0] == ops, f"features must be [{ops}, F], got {list(shape)}")
    require(features.dtype == jnp.float32, f"features must be float32, got {features.dtype}")
    require(np.isfinite(features).all(), "features must be finite, padding included")


def _known_plans(problem: AbstractProblem) -> Mapping[str, Decisions]:
    with doing("heuristics()"):
        plans = problem.heuristics()
    require("reference" in plans, "heuristics() must hold 'reference'")
    return plans


def check_plan(problem: AbstractProblem, what: str, plan: Mapping[str, Any]) -> None:
    heads = problem.heads
    require(set(plan) == set(heads), f"{what} decides {sorted(plan)}, heads are {sorted(heads)}")
    for name, head in heads.items():
        value, length = np.asarray(plan[name]), problem.length(head)
        require(value.shape == (length,), f"{what}, {name} must have shape ({length},)")
        if head.choices == "real":
            require(value.dtype == np.float32, f"{what}, {name} must be float32")
            require(np.isfinite(value).all(), f"{what}, {name} must be finite")
        else:
            require(value.dtype == np.int32, f"{what}, {name} must be int32, got {value.dtype}")
            inside = (value >= 0) & (value < head.choices)
            require(inside.all(), f"{what}, {name} must be 0 to {head.choices - 1}")


def _check_outcomes(outcomes: AbstractOutcome, size: int) -> None:
    for name, dtype in (("cost", "float32"), ("feasible", "bool"), ("reward", "float32")):
        value = getattr(outcomes, name)
        require(value.shape == (size,), f"{name} must be a scalar per candidate")
        require(value.dtype == dtype, f"{name} must be {dtype}, got {value.dtype}")
    cost, reward = np.asarray(outcomes.cost), np.asarray(outcomes.reward)
    feasible = np.asarray(outcomes.feasible)
    require(np.isfinite(cost).all(), f"cost must be finite, got {cost}")
    require(np.isfinite(reward).all(), f"reward must be finite, got {reward}")
    if feasible.any() and not feasible.all():
        require(
            reward[feasible].min() > reward[~feasible].max(),
            "reward must rank every feasible candidate above every infeasible one: "
            f"{reward[feasible].min()} against {reward[~feasible].max()}",
        )
    order = np.argsort(cost[feasible], kind="stable")
    falling = np.diff(reward[feasible][order]) <= 0
    require(falling.all(), "among feasible candidates reward must not rise with cost")


def _check_reference(problem: AbstractProblem) -> None:
    outcome = eqx.filter_jit(lambda p: p.evaluate(p.reference))(problem)
    cost, promised = float(outcome.cost), float(problem.reference_cost)
    require(
        abs(cost - promised) <= RELATIVE * abs(promised),
        f"reference_cost is {promised}, but the reference costs {cost}",
    )


def _check_bound(problem: AbstractProblem, outcomes: AbstractOutcome) -> None:
    with doing("lower_bound()"):
        bound = problem.lower_bound()
    costs = np.asarray(outcomes.cost)[np.asarray(outcomes.feasible)]
    if bound is not None and costs.size:
        require(
            costs.min() >= bound * (1 - RELATIVE),
            f"lower_bound() is {bound}, but a candidate costs {costs.min()}",
        )


def _check_batching(
    problem: AbstractProblem, candidates: Decisions, outcomes: AbstractOutcome
) -> None:
    evaluate = eqx.filter_jit(lambda p, one: p.evaluate(one))
    for index in (0, len(outcomes.cost) - 1):
        one = {name: value[index] for name, value in candidates.items()}
        batched = jax.tree.map(lambda x, index=index: x[index], outcomes)
        require(
            equal(evaluate(problem, one), batched),
            f"candidate {index} has another outcome alone than in a batch",
        )
    with doing("evaluate without jit"):
        eager = problem.evaluate({name: value[0] for name, value in candidates.items()})
    require(
        bool(eager.feasible) == bool(outcomes.feasible[0])
        and np.isclose(eager.cost, outcomes.cost[0], rtol=RELATIVE),
        f"without jit a candidate costs {eager.cost} ({eager.feasible}), "
        f"with it {outcomes.cost[0]} ({outcomes.feasible[0]})",
    )


def _check_refusals(problem: AbstractProblem) -> None:
    good = {name: np.asarray(value) for name, value in problem.reference.items()}
    name, head = next(iter(problem.heads.items()))
    value = good[name]
    longer = np.concatenate([value, value[:1]])
    wrong: dict[str, dict[str, Any]] = {
        "a missing decision": {k: v for k, v in good.items() if k != name},
        "an unknown decision": {**good, "no such decision": value},
        "a wrong shape": {**good, name: longer},
    }
    if head.choices == "real":
        wrong["a NaN"] = {**good, name: np.full_like(value, np.nan)}
    else:
        wrong["floats for integers"] = {**good, name: value.astype(np.float32)}
        wrong["an entry that is too large"] = {**good, name: np.full_like(value, head.choices)}
        wrong["a negative entry"] = {**good, name: np.full_like(value, -1)}
    if not value.size:
        return
    for what, decisions in wrong.items():
        try:
            problem.evaluate(decisions)
        except DecisionError:
            continue
        except Exception as error:
            raise Nonconforming(
                f"evaluate must refuse {what} by a DecisionError, got {type(error).__name__}: "
                f"{error}"
            ) from error
        raise Nonconforming(f"evaluate must refuse {what} by a DecisionError, and accepted it")


def _check_outside(problem: AbstractProblem, outcomes: AbstractOutcome) -> None:
    with doing("failed()"):
        failed = problem.failed()
    require(not bool(failed.feasible), "failed() must be infeasible")
    require(np.isfinite(failed.cost), f"failed() must have a finite cost, got {failed.cost}")
    require(
        float(failed.reward) <= float(jnp.min(outcomes.reward)),
        f"failed() must have the lowest reward, got {failed.reward}",
    )
    reference = jnp.asarray(problem.reference_cost, jnp.float32)
    with doing("measured(cost)"):
        same, better = problem.measured(reference), problem.measured(0.5 * reference)
    require(bool(same.feasible), "measured(cost) must be feasible")
    require(float(same.cost) == float(reference), "measured(cost) must have that cost")
    if float(reference) > 0:
        require(
            float(better.reward) > float(same.reward) > float(failed.reward),
            "measured(cost) must reward a lower cost more, and any cost more than failed()",
        )
    require(
        bool(str(jax.tree.structure(failed)) == str(jax.tree.structure(same))),
        "failed() and measured(cost) must be outcomes of one type",
    )


def _check_idle_entries(
    problem: AbstractProblem, candidates: Decisions, outcomes: AbstractOutcome, key: Any
) -> None:
    size = len(outcomes.cost)
    with doing("active()"):
        active = problem.active()
    require(set(active) == set(problem.heads), "active() must have an entry per decision")
    others = random_decisions(problem, key=jax.random.fold_in(key, 1), batch=size)
    mixed = {}
    for name, head in problem.heads.items():
        expected = (problem.length(head),)
        require(active[name].shape == expected, f"active()[{name!r}] must be {expected}")
        mixed[name] = jnp.where(active[name], candidates[name], others[name])
    changed = eqx.filter_jit(evaluate_population)(problem, mixed)
    require(
        equal(
            (changed.cost, changed.feasible, changed.reward),
            (outcomes.cost, outcomes.feasible, outcomes.reward),
        ),
        "entries that active() calls idle, or padding, change the outcome",
    )


def _check_repair(problem: AbstractProblem, candidates: Decisions) -> None:
    with doing("a jitted, vmapped repair"):
        repaired = eqx.filter_jit(lambda p, c: jax.vmap(p.repair)(c))(problem, candidates)
    for index in range(len(next(iter(repaired.values())))):
        one = {name: value[index] for name, value in repaired.items()}
        check_plan(problem, "repair(decisions)", one)


def _check_padding(
    problem: AbstractProblem,
    candidates: Decisions,
    outcomes: AbstractOutcome,
    rebuild: Callable[[Graph], AbstractProblem] | None,
) -> None:
    rebuild = rebuild or _rebuilder(problem)
    if rebuild is None:
        return
    graph = problem.graph
    sizes = (graph.num_ops + PADDING, graph.num_tensors + PADDING, graph.num_uses + PADDING)
    with doing("rebuilding the problem with a padded graph"):
        padded = concrete(rebuild(pad_graph(graph, sizes)))
    longer = {
        # Whatever stands in the padding must not matter, so it is not 0.
        name: jnp.pad(value, ((0, 0), (0, PADDING)), mode="edge")
        if value.shape[1]
        else jnp.ones((len(value), PADDING), value.dtype)
        for name, value in candidates.items()
    }
    with doing("evaluating with a padded graph"):
        found = eqx.filter_jit(evaluate_population)(padded, longer)
    require(
        equal((found.cost, found.feasible), (outcomes.cost, outcomes.feasible)),
        f"padding changes outcomes: {found.cost} instead of {outcomes.cost}",
    )


def _rebuilder(problem: AbstractProblem) -> Callable[[Graph], AbstractProblem] | None:
    make: Callable[..., AbstractProblem] = type(problem)
    names = set(inspect.signature(make).parameters)
    if "model" not in names or not all(hasattr(problem, name) for name in names):
        return None
    others = {name: getattr(problem, name) for name in names - {"model"}}
    return lambda graph: make(model=graph, **others)
