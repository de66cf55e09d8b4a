"""GO+: no known plan is better than its result, and its network imitates the best plans."""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from egx.errors import DecisionError, SearchError
from egx.policies.distributions import greedy
from egx.search.egrl import EGRL
from egx.search.egrl_plus import EGRLPlus
from egx.search.go import Go
from egx.search.go_plus import GoPlus
from egx.search.ppo import PPO
from egx.training.loop import run_one
from tests.runs import Toy, chain

BATCH = 8
NETWORK = Go(
    width=4, rounds=1, layers=0, attention_heads=1, segment=8, passes=1, ppo=PPO(learning_rate=0.05)
)


class Known(Toy):
    """The toy with more known plans than fit into the islands' first children."""

    def heuristics(self):
        more = {f"plan {k}": self._plan(k) for k in range(4)}
        return {"reference": self.reference, **more, "optimum": self._plan(3, self.target)}

    def _plan(self, activation, weights=None):
        activations = jnp.full(self.graph.num_ops, activation, jnp.int32)
        weights = self.reference["weights"] if weights is None else weights
        return {"weights": weights, "activations": activations}


EVOLVING = EGRL(policy_gradient=False, boltzmann_share=0.0, width=4, depth=1, attention_heads=1)


def search(**options):
    islands = EGRLPlus(batch=BATCH, elites=4, repair=False)
    defaults = {"search": islands, "networks": EVOLVING, "guided": 4, "evolved": 2}
    return GoPlus(go=NETWORK, **{**defaults, **options})


def test_all_known_plans_are_evaluated_and_then_imitated():
    problem = Known(chain(), 1000)
    result, state = run_one(search(), problem, budget=BATCH * 40)
    # The last of six plans, among the first evaluations.
    assert result.cost == 8.0
    assert result.found_at == 6
    policy = state.inner.learner.policy
    likeliest = greedy(eqx.filter_jit(policy)(problem))
    assert (likeliest["activations"] == 3).mean() > 0.8


def test_plans_that_the_user_has_are_evaluated_too():
    problem = Toy(chain(), 1000)
    mine = Known(chain(), 1000).heuristics()["optimum"]
    worse = problem.reference
    plans = {name: jnp.stack([worse[name], mine[name]]) for name in mine}
    islands = EGRLPlus(batch=BATCH, elites=2, repair=False, plans=plans)
    result, _ = run_one(search(search=islands), problem, budget=BATCH * 2)
    assert result.cost == 8.0
    # After the problem's only plan and the first of these two.
    assert result.found_at == 3


def test_networks_evolve_once_the_known_plans_were_told():
    problem = Known(chain(), 1000)
    _, early = run_one(search(), problem, budget=BATCH)
    assert np.isinf(early.inner.network_cost)
    _, state = run_one(search(), problem, budget=BATCH * 6)
    before, after = (x.inner.evolved.population.networks for x in (early, state))
    assert before.shape[0] == 2
    # The better of two stays as it is.
    changed = np.any(np.asarray(before) != np.asarray(after), axis=1)
    assert changed.any()
    # The toy's own cost of what a network decides, at least the optimum.
    assert 8.0 <= float(state.inner.network_cost) < np.inf
    _, without = run_one(search(evolved=0), problem, budget=BATCH * 6)
    assert without.inner.evolved is None


@pytest.mark.parametrize(
    ("told", "cost", "evolves"),
    [
        (0, np.inf, False),
        (BATCH, np.inf, True),
        (8 * BATCH, np.inf, False),
        (8 * BATCH, 8.0 * 1.2, True),
        (8 * BATCH, 8.0 * 1.3, False),
    ],
)
def test_networks_that_fall_behind_lose_their_share(told, cost, evolves):
    problem = Known(chain(), 1000)
    search_ = search(budget=20.0 * BATCH, guided=0)
    _, state = run_one(search_, problem, budget=BATCH)
    inner = eqx.tree_at(
        lambda s: (s.islands.told, s.network_cost),
        state.inner,
        (jnp.int32(told), jnp.float32(cost)),
    )
    assert bool(search_._evolves(inner)) == evolves
    # Then all children are the islands' own.
    key = jax.random.key(0)
    plans, _ = search_.propose(problem, inner, key=key)
    alone = eqx.tree_at(lambda s: s.evolved, inner, None)
    others, _ = search(budget=20.0 * BATCH, guided=0, evolved=0).propose(problem, alone, key=key)
    same = np.all(np.asarray(plans["activations"]) == np.asarray(others["activations"]), axis=1)
    assert same[-2:].all() == (not evolves)


def test_impossible_settings_are_named():
    problem = Known(chain(), 1000)
    with pytest.raises(SearchError, match=r"7 plans to start from, but search\.batch is 5"):
        search(search=EGRLPlus(batch=5, guided=0), guided=1).check(problem)
    with pytest.raises(SearchError, match=r"at most 8 \(search\.batch\) together, got 7 and 2"):
        search(guided=7).check(problem)
    with pytest.raises(SearchError, match="evolved must be 0, or 2 or more"):
        search(evolved=1)
    with pytest.raises(SearchError, match="networks must be an EGRL without policy_gradient"):
        search(networks=EGRL())
    plans = {name: value[None] for name, value in problem.reference.items()}
    with pytest.raises(SearchError, match=r"8 plans to start from, but search\.batch is 7"):
        search(search=EGRLPlus(batch=7, plans=plans)).check(problem)
    short = {**plans, "weights": plans["weights"][:, :1]}
    with pytest.raises(DecisionError, match="'weights' must have shape"):
        search(search=EGRLPlus(batch=BATCH, plans=short)).check(problem)
    with pytest.raises(SearchError, match="plans must hold as many plans of each decision"):
        search(search=EGRLPlus(batch=BATCH, plans={})).check(problem)
    uneven = {**plans, "weights": plans["weights"][:0]}
    with pytest.raises(SearchError, match="plans must hold as many plans of each decision"):
        search(search=EGRLPlus(batch=BATCH, plans=uneven)).check(problem)


@pytest.mark.usefixtures("unchecked")
def test_half_a_guided_child_is_refused():
    with pytest.raises(SearchError, match=r"guided must be a whole number of 0 or more, got 1\.5"):
        search(guided=1.5)
