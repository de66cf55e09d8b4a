"""Every searcher of the registry keeps the promises of the protocol, on two kinds of problem."""

from __future__ import annotations

import jax
import pytest
from runs import chain, machine

import egx
from egx.policies.regal_net import RegalPolicy
from egx.policies.sequence_net import SequencePolicy
from egx.problems.memory_placement import MemoryPlacement
from egx.search.registry import make_search, searches
from egx.testing import check_search


def tiny_policy(kind, **size):
    """A fresh policy for memory placement: none for it comes with egx."""
    genes = (("weights", "op", 3), ("activations", "op", 3))
    return kind(genes, width=4, **size, key=jax.random.key(0))


# Small enough to compile fast; networks and large sums may differ in their last bits when they
# run without jit or beside other seeds.
TINY_NETWORK = {"width": 4, "depth": 1, "attention_heads": 1, "graph_network": False}
TINY_POPULATION = {"evolution.size": 5, "evolution.elites": 1}
OPTIONS = {
    "ea": {**TINY_NETWORK, **TINY_POPULATION},
    "egrl": {**TINY_NETWORK, **TINY_POPULATION},
    "pg": TINY_NETWORK,
    "regal": {"policy": tiny_policy(RegalPolicy, rounds=1)},
    "gas": {"policy": tiny_policy(SequencePolicy, depth=1)},
    "evosax:SNES": {"population": 6},
    "evosax:SimpleGA": {"population": 6},
}
NETWORKS = ("ea", "egrl", "pg")
SLOW_EAGER = (*NETWORKS, "egrl_plus", "gradient")
NAMES = (*searches(), "evosax:SNES", "evosax:SimpleGA")


@pytest.mark.parametrize("name", NAMES)
def test_conforms(name):
    problem = MemoryPlacement(chain(5), machine(), prefetch=1)
    search = make_search(name, OPTIONS.get(name), budget=4 * 8)
    check_search(search, problem, eager=name not in SLOW_EAGER, seeds_together=name not in NETWORKS)


@pytest.mark.parametrize("name", NAMES)
def test_beats_nothing_or_says_so(name):
    problem = MemoryPlacement(chain(5), machine())
    result = egx.optimize(problem, name, budget=200, options=OPTIONS.get(name))
    assert result.evaluations == 200
    assert result.algorithm == name
    if result.feasible:
        assert result.bound <= result.cost * (1 + 1e-6)
