"""GO's searcher: it learns what is better, starts from a policy, and refuses what it cannot do."""

from __future__ import annotations

import functools

import equinox as eqx
import jax
import numpy as np
import pytest

import egx
from egx.errors import SearchError
from egx.policies.distributions import probabilities
from egx.policies.go_net import GoPolicy
from egx.policies.graph_unet import GraphUNetPolicy
from egx.policies.loading import PRETRAINED
from egx.problems.execution import Execution
from egx.search.go import Go
from egx.search.ppo import PPO
from egx.search.registry import make_search
from egx.training.loop import run_one
from tests.runs import small_problem
from tests.simulate import cases
from tests.simulate import execution_cases as several

SMALL = {"width": 4, "rounds": 1, "layers": 0, "attention_heads": 1, "segment": 8, "passes": 1}


@functools.cache
def one_op():
    """The second device is four times as fast."""
    graph = cases.build([{"inputs": [], "sizes": [4], "flops": 8.0, "weight": 0}], [0])
    return Execution(graph, several.devices(2), decide=("device",), op_seconds=[[4.0, 1.0]])


def test_it_learns_the_better_device():
    ppo = PPO(learning_rate=0.02, advantage="running")
    search = Go(ppo=ppo, batch=8, **SMALL)
    result, state = run_one(search, one_op(), budget=20 * 8, seed=1)
    assert result.cost == 1.0
    before = search.start_policy(one_op(), key=jax.random.key(0))
    odds = [
        float(probabilities(eqx.filter_jit(p)(one_op()))["device"][0, 1])
        for p in (before, search.best_policy(state))
    ]
    assert 0.25 < odds[0] < 0.75
    assert odds[1] > 0.95


def test_zero_shot_is_the_likeliest_plan_first_and_stays_as_it_is():
    problem = small_problem()
    policy = eqx.filter_jit(lambda key: GoPolicy(("weights", "activations"), **SMALL, key=key))(
        jax.random.key(3)
    )
    search = make_search("go", {"finetune": False, "batch": 4}, policy=policy)
    result, state = run_one(search, problem, budget=1)
    plan = eqx.filter_jit(lambda policy, problem: policy.decide(problem))(policy, problem)
    assert all((np.asarray(plan[name]) == result.decisions[name]).all() for name in plan)
    assert eqx.tree_equal(state.inner.learner.policy, policy)
    assert result.cost == float(problem.evaluate(plan).cost)


def test_the_policy_that_comes_with_egx_beats_the_default_of_frameworks_at_once():
    """On a graph of another size than those it was trained on."""
    model = egx.load("transformer_xl", layers=1)
    machine = egx.hardware.load("p100x4")
    decide = ("fusion", "device", "priority")
    problem = egx.Execution(model, machine, decide=decide, order="runtime")
    default = problem.evaluate(problem.heuristics()["tensorflow"])
    result = egx.optimize(problem, "go", budget=1, options={"finetune": False, "batch": 1})
    assert result.feasible
    assert result.cost < float(default.cost)
    assert (PRETRAINED / "go.npz").stat().st_size < 1e6


def test_without_a_policy_for_the_problem_it_says_so(unchecked):
    with pytest.raises(SearchError, match="decides fusion, device, priority, but the problem asks"):
        egx.optimize(small_problem(), "go", budget=4, options={"finetune": False})
    other = GoPolicy(("device",), **SMALL, key=jax.random.key(0))
    with pytest.raises(SearchError, match="decides device, but the problem asks for weights"):
        egx.optimize(small_problem(), "go", budget=4, policy=other)
    other = GraphUNetPolicy(2, (("device", 2),), width=4, depth=0, key=jax.random.key(0))
    with pytest.raises(SearchError, match=r"go takes a policy .* got a GraphUNetPolicy"):
        make_search("go", policy=other)
    with pytest.raises(SearchError, match="width must be a multiple of attention_heads"):
        make_search("go", {"width": 5}).check(small_problem())
    with pytest.raises(SearchError, match="batch must be a whole number"):
        make_search("go", {"batch": 0})
    graph = one_op().graph
    nothing = Execution(graph, several.devices(2), decide=())
    trained = GoPolicy(("device",), **SMALL, key=jax.random.key(0))
    for name, policy in (("go", None), ("go", trained), ("go_plus", None)):
        with pytest.raises(SearchError, match="go: there is nothing to decide"):
            make_search(name, policy=policy).check(nothing)
