"""GO+: no known plan is better than its result, and its network imitates the best plans."""

from __future__ import annotations

import equinox as eqx
import jax.numpy as jnp
import pytest

from egx.errors import SearchError
from egx.policies.distributions import greedy
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


def search(**options):
    return GoPlus(
        search=EGRLPlus(batch=BATCH, elites=4, repair=False), go=NETWORK, guided=4, **options
    )


def test_all_known_plans_are_evaluated_and_then_imitated():
    problem = Known(chain(), 1000)
    result, state = run_one(search(), problem, budget=BATCH * 40)
    # The last of six plans, among the first evaluations.
    assert result.cost == 8.0
    assert result.found_at == 6
    policy = state.inner.learner.policy
    likeliest = greedy(eqx.filter_jit(policy)(problem))
    assert (likeliest["activations"] == 3).mean() > 0.8


def test_impossible_settings_are_named():
    problem = Known(chain(), 1000)
    with pytest.raises(SearchError, match=r"7 plans to start from, but search\.batch is 5"):
        GoPlus(search=EGRLPlus(batch=5, guided=0), go=NETWORK).check(problem)
    with pytest.raises(SearchError, match=r"guided must be 0 to 8 \(search\.batch\), got 9"):
        GoPlus(search=EGRLPlus(batch=8), go=NETWORK, guided=9).check(problem)


@pytest.mark.usefixtures("unchecked")
def test_half_a_guided_child_is_refused():
    with pytest.raises(SearchError, match=r"guided must be 0 to 8 \(search\.batch\), got 1\.5"):
        GoPlus(search=EGRLPlus(batch=8), go=NETWORK, guided=1.5).check(Known(chain(), 1000))
