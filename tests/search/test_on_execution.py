"""Every searcher of the registry plans several devices, or says why it cannot."""

from __future__ import annotations

import functools

import pytest

import egx
from egx.errors import SearchError
from egx.problems.execution import Execution
from egx.search.registry import make_search, searches
from egx.simulate.fine import FineOptions, check_plan
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


JOINT = options((("fusion", "op", 4), ("device", "op", 2), ("priority", "op", 1)))


@functools.cache
def joint():
    """The same ops, cheap enough to be fused, with all decisions of an op, in run-time order."""
    inputs = [[], [0], [0], [1], [2], [3, 4]]
    ops = [
        {"inputs": i, "sizes": [4], "flops": 3.0, "weight": 2, "kind": "elementwise"}
        for i in inputs
    ]
    machine = several.devices(2, link=4.0, level_bytes=1e3, launch_s=1.0)
    decide = ("fusion", "device", "priority")
    return Execution(cases.build(ops, [5]), machine, decide=decide, order="runtime")


def test_who_plans_fusion_placement_and_order_at_once():
    refused = {}
    for name in [*searches(), "evosax:SimpleGA"]:
        try:
            make_search(name, budget=24).check(joint())
        except SearchError as error:
            refused[name] = str(error)
    assert "Execution has none" in refused.pop("gradient")
    for name in ("regal", "gas"):
        assert "no trained policy for makespan on 2 devices" in refused.pop(name)
        make_search(name, JOINT[name], budget=24).check(joint())
    assert not refused


def test_plans_all_at_once():
    problem = joint()
    result = egx.optimize(problem, "brkga_seeded", budget=24)
    assert result.evaluations == 24
    assert result.feasible
    assert result.bound <= result.cost
    assert set(result.decisions) == {"fusion", "device", "priority"}
    # As good as every plan that is known before.
    plans = problem.heuristics()
    ahead = [check_plan(problem, plans[n], options=FineOptions.plain()) for n in plans]
    assert result.cost <= min(plan.makespan_s for plan in ahead) * (1 + 1e-6)
