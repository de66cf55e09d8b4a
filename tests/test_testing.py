"""The conformance checks pass what conforms, and name what does not."""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from runs import Climber, Toy, chain, machine, small_problem

from egx.errors import EgxError, SearchError
from egx.problems.base import Head
from egx.problems.memory_placement import MemoryPlacement
from egx.search.base import AbstractSearch
from egx.search.random import RandomSearch
from egx.testing import Nonconforming, check_problem, check_search


@pytest.mark.parametrize("prefetch", [0, 2])
def test_memory_placement_conforms(prefetch):
    check_problem(MemoryPlacement(chain(9), machine(), prefetch=prefetch))


def test_a_problem_of_ones_own_conforms():
    check_problem(small_problem(), batch=20)
    check_problem(Toy(chain(1)))


class NoHeads(Toy):
    @property
    def heads(self):
        return {}


class OddAxis(Toy):
    @property
    def heads(self):
        return {"weights": Head("tensor", 3), "activations": Head("op", 4)}  # type: ignore[arg-type]


class NumberLeaf(Toy):
    scale: float

    def __init__(self, model):
        super().__init__(model)
        self.scale = 2.0


class NaNFeatures(Toy):
    @property
    def features(self):
        return jnp.full((self.graph.num_ops, 2), jnp.nan)


class FlatFeatures(Toy):
    @property
    def features(self):
        return jnp.zeros(self.graph.num_ops)


class BadReference(Toy):
    def __init__(self, model):
        super().__init__(model)
        self.reference = {**self.reference, "weights": self.reference["weights"] + 9}


class WrongReferenceCost(Toy):
    def __init__(self, model):
        super().__init__(model)
        self.reference_cost = self.reference_cost * 1.01


def changed(outcome, **fields):
    names = list(fields)
    return eqx.tree_at(lambda o: [getattr(o, n) for n in names], outcome, list(fields.values()))


class Infinite(Toy):
    def evaluate(self, decisions):
        outcome = super().evaluate(decisions)
        return changed(outcome, cost=jnp.where(outcome.feasible, outcome.cost, jnp.inf))


class KindToInfeasible(Toy):
    def evaluate(self, decisions):
        outcome = super().evaluate(decisions)
        return changed(outcome, reward=outcome.reward + jnp.where(outcome.feasible, 0.0, 100.0))


class RewardsCost(Toy):
    def evaluate(self, decisions):
        outcome = super().evaluate(decisions)
        return changed(outcome, reward=jnp.where(outcome.feasible, outcome.cost, -1.0))


class WholeCost(Toy):
    def evaluate(self, decisions):
        outcome = super().evaluate(decisions)
        return changed(outcome, cost=outcome.cost.astype(jnp.int32))


class EagerIsDifferent(Toy):
    def evaluate(self, decisions):
        outcome = super().evaluate(decisions)
        plain = not isinstance(outcome.cost, jax.core.Tracer)
        return changed(outcome, cost=outcome.cost * (1.1 if plain else 1.0))


class TakesAnything(Toy):
    def evaluate(self, decisions):
        zeros = self.reference["weights"]
        decisions = {name: jnp.clip(decisions.get(name, zeros), 0, 2) for name in self.heads}
        return super().evaluate(
            {k: v.astype(jnp.int32)[: len(zeros)] for k, v in decisions.items()}
        )


class KeyErrors(Toy):
    def evaluate(self, decisions):
        return super().evaluate({name: decisions[name] for name in self.heads})


class FailureIsFeasible(Toy):
    def failed(self):
        return changed(super().failed(), feasible=jnp.ones((), bool))


class FailureIsMild(Toy):
    def failed(self):
        return changed(super().failed(), reward=jnp.asarray(-1.5, jnp.float32))


class MeasuresBackwards(Toy):
    def measured(self, cost):
        return changed(super().measured(cost), reward=cost)


class WrongBound(Toy):
    def lower_bound(self):
        return 1e5


class IdleEntriesCount(Toy):
    def active(self):
        return {**super().active(), "weights": jnp.zeros(self.graph.num_ops, bool)}


class RepairsOutOfRange(Toy):
    def repair(self, decisions):
        return {**decisions, "weights": decisions["weights"] + 3}


class RealEntries(Toy):
    """Counts padding: the graph's own mask is ignored."""

    def evaluate(self, decisions):
        outcome = super().evaluate(decisions)
        total = jnp.sum(jnp.ones_like(decisions["weights"])).astype(jnp.float32)
        extra = total - jnp.sum(self.graph.op_mask).astype(jnp.float32)
        return changed(
            outcome,
            cost=outcome.cost + extra,
            feasible=jnp.ones((), bool),
            reward=-(outcome.cost + extra),
        )


BROKEN_PROBLEMS = [
    (NoHeads, "heads must be a dict with entries"),
    (OddAxis, "has axis 'tensor'"),
    (NumberLeaf, "every leaf must be an array"),
    (NaNFeatures, "features must be finite"),
    (FlatFeatures, r"features must be \[6, F\]"),
    (BadReference, r"heuristics\(\)\['reference'\], weights must be 0 to 2"),
    (WrongReferenceCost, "reference_cost is"),
    (Infinite, "cost must be finite"),
    (KindToInfeasible, "every feasible candidate above every infeasible"),
    (RewardsCost, "must not rise with cost"),
    (WholeCost, "cost must be float32, got int32"),
    (EagerIsDifferent, "without jit a candidate costs"),
    (TakesAnything, "must refuse .* and accepted it"),
    (KeyErrors, "a missing decision by a DecisionError, got KeyError"),
    (FailureIsFeasible, r"failed\(\) must be infeasible"),
    (FailureIsMild, r"failed\(\) must have the lowest reward"),
    (MeasuresBackwards, "reward a lower cost more"),
    (WrongBound, r"lower_bound\(\) is 100000.0, but a candidate costs"),
    (IdleEntriesCount, "idle, or padding, change the outcome"),
    (RepairsOutOfRange, r"repair\(decisions\), weights must be 0 to 2"),
    (RealEntries, "padding changes outcomes"),
]


@pytest.mark.parametrize(
    ("kind", "message"), BROKEN_PROBLEMS, ids=lambda p: getattr(p, "__name__", "")
)
def test_broken_promises_of_problems_are_named(kind, message):
    with pytest.raises(Nonconforming, match=message):
        check_problem(kind(chain()), batch=20)


def test_nonconforming_fails_a_test_and_is_an_error_of_egx():
    assert issubclass(Nonconforming, AssertionError)
    assert issubclass(Nonconforming, EgxError)


@pytest.mark.parametrize("search", [RandomSearch(batch=6), RandomSearch(batch=1), Climber()])
def test_searchers_conform(search):
    check_search(search, small_problem())


def test_a_searcher_conforms_on_memory_placement():
    check_search(Climber(), MemoryPlacement(chain(7), machine(), prefetch=1))


class NeverRuns(Climber):
    def check(self, problem):
        raise SearchError("not on this")


class NoBatch(Climber):
    @property
    def batch_size(self):
        return 0


class OutOfRange(Climber):
    def propose(self, problem, inner, *, key):
        candidates, inner = super().propose(problem, inner, key=key)
        return {**candidates, "weights": candidates["weights"] + 1}, inner


class ForgetsADecision(Climber):
    def propose(self, problem, inner, *, key):
        candidates, inner = super().propose(problem, inner, key=key)
        return {"weights": candidates["weights"]}, inner


class SmallerBatch(Climber):
    def propose(self, problem, inner, *, key):
        candidates, inner = super().propose(problem, inner, key=key)
        return {name: value[:-1] for name, value in candidates.items()}, inner


class GrowingState(Climber):
    def update(self, problem, inner, candidates, outcomes, *, key):
        inner, metrics = super().update(problem, inner, candidates, outcomes, key=key)
        return {**inner, "told": inner["told"].astype(jnp.float32)}, metrics


class NaNState(Climber):
    def update(self, problem, inner, candidates, outcomes, *, key):
        inner, metrics = super().update(problem, inner, candidates, outcomes, key=key)
        worse = jnp.all(~outcomes.feasible)
        return {**inner, "cost": jnp.where(worse, jnp.nan, inner["cost"])}, metrics


class VectorMetric(Climber):
    def update(self, problem, inner, candidates, outcomes, *, key):
        inner, _ = super().update(problem, inner, candidates, outcomes, key=key)
        return inner, {"costs": outcomes.cost}


class FromTheHost(Climber):
    """Draws from a generator of NumPy while it is traced."""

    def propose(self, problem, inner, *, key):
        key = jax.random.fold_in(key, int(np.random.default_rng().integers(2**31)))
        return super().propose(problem, inner, key=key)


class ForgetsTheBest(Climber):
    def tell(self, problem, state, candidates, outcomes, *, key):
        state, metrics = super().tell(problem, state, candidates, outcomes, key=key)
        latest = jnp.argmin(outcomes.cost)
        return eqx.tree_at(
            lambda s: (s.best.cost, s.best.feasible),
            state,
            (outcomes.cost[latest], outcomes.feasible[latest]),
        ), metrics


class OtherDecisions(Climber):
    def tell(self, problem, state, candidates, outcomes, *, key):
        state, metrics = super().tell(problem, state, candidates, outcomes, key=key)
        first = jax.tree.map(lambda x: x[0], candidates)
        return eqx.tree_at(lambda s: s.best.decisions, state, first), metrics


@jax.custom_batching.custom_vmap
def _in_company(value):
    return value


@_in_company.def_vmap
def _in_company_of_seeds(axis_size, in_batched, value):
    return value + (1 if axis_size > 1 else 0), in_batched[0]


class MindsCompany(Climber):
    """Proposes something else when it runs beside another seed."""

    def propose(self, problem, inner, *, key):
        candidates, inner = super().propose(problem, inner, key=key)
        shift = _in_company(inner["told"] * 0)
        return {**candidates, "weights": (candidates["weights"] + shift) % 3}, inner


class Raises(Climber):
    def initial(self, problem, *, key):
        raise KeyError("lost")


BROKEN_SEARCHES = [
    (NeverRuns, r"check\(problem\) raised SearchError: not on this"),
    (NoBatch, "batch_size must be 1 or more"),
    (OutOfRange, "candidate . of ask, weights must be 0 to 2"),
    (ForgetsADecision, "decides .'weights'., heads are"),
    (SmallerBatch, r"expected \[4, length\]"),
    (GrowingState, r"changes from int32\[\] to float32\[\]"),
    (NaNState, "holds NaN"),
    # The run-time type checker of these tests may see it first.
    (VectorMetric, "metric 'costs' must be a float32 scalar|tell raised TypeCheckError"),
    (FromTheHost, "without jit|best of what was told|second time"),
    (ForgetsTheBest, "best of what was told"),
    (OtherDecisions, "not those of the best candidate"),
    (MindsCompany, "a seed gives another result beside a second one"),
    (Raises, "init raised KeyError: 'lost'"),
]


@pytest.mark.parametrize(
    ("kind", "message"), BROKEN_SEARCHES, ids=lambda p: getattr(p, "__name__", "")
)
def test_broken_promises_of_searchers_are_named(kind, message):
    # A tight limit, so that some generations hold nothing feasible.
    with pytest.raises(Nonconforming, match=message):
        check_search(kind(), Toy(chain(), limit=3), generations=6)


def test_checks_take_any_searcher():
    assert issubclass(Climber, AbstractSearch)
