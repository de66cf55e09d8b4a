"""Every searcher of the registry keeps the promises of the protocol, on two kinds of problem."""

from __future__ import annotations

import pytest
from runs import chain, machine

import egx
from egx.problems.memory_placement import MemoryPlacement
from egx.search.registry import make_search, searches
from egx.testing import check_search
from tests.search.tiny import options

# No policy for memory placement comes with egx.
OPTIONS = options((("weights", "op", 3), ("activations", "op", 3)))
# Large sums may differ in their last bits when they run without jit or beside other seeds.
NETWORKS = ("ea", "egrl", "go", "go_plus", "pg")
SLOW_EAGER = (*NETWORKS, "egrl_plus", "gradient", "hdp")
NAMES = (*searches(), "evosax:SNES", "evosax:SimpleGA")


@pytest.mark.parametrize("name", NAMES)
def test_conforms(name):
    problem = MemoryPlacement(chain(5), machine(), prefetch=1)
    search = make_search(name, OPTIONS.get(name), budget=4 * 8)
    together = name not in NETWORKS
    check_search(search, problem, eager=name not in SLOW_EAGER, seeds_together=together)

    # By its name, with the program that is compiled by now.
    seeds = [1, 0] if together else [0]
    found = egx.optimize_seeds(problem, name, budget=200, seeds=seeds, options=OPTIONS.get(name))
    for result in found:
        assert result.evaluations == 200
        assert result.algorithm == name
        assert not result.feasible or result.bound <= result.cost * (1 + 1e-6)
