"""Every searcher of the registry plans several devices, or says why it cannot."""

from __future__ import annotations

import functools

import pytest

import egx
from egx.errors import SearchError
from egx.problems.execution import Execution
from egx.search.registry import searches
from tests.search.tiny import options
from tests.simulate import cases
from tests.simulate import execution_cases as several

OPTIONS = options((("device", "op", 2), ("priority", "op", 1)))


@functools.cache
def diamond():
    """Six ops, two ways through them, two devices."""
    inputs = [[], [0], [0], [1], [2], [3, 4]]
    ops = [{"inputs": i, "sizes": [4], "flops": 3.0, "weight": 2} for i in inputs]
    return Execution(cases.build(ops, [5]), several.devices(2, link=4.0, level_bytes=1e3))


@pytest.mark.parametrize("name", [*searches(), "evosax:SimpleGA"])
def test_runs(name):
    problem = diamond()
    if name == "gradient":
        with pytest.raises(SearchError, match="Execution has none"):
            egx.optimize(problem, name, budget=12)
        return
    result = egx.optimize(problem, name, budget=24, options=OPTIONS.get(name))
    assert result.evaluations == 24
    assert result.feasible
    assert result.bound <= result.cost
    assert set(result.decisions) == {"device", "priority"}
