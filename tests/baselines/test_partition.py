"""Graph partitioning as a baseline of execution."""

from __future__ import annotations

import dataclasses
import sys

import numpy as np
import pytest

from egx.baselines import partition as module
from egx.baselines.partition import metis_parts, partition
from egx.errors import MissingExtraError, SearchError
from egx.problems.execution import Execution
from egx.problems.execution_plans.fused import full_clusters
from egx.simulate.fine import FineOptions, check_plan
from tests import runs
from tests.baselines.host_cases import host
from tests.simulate import cases
from tests.simulate import execution_cases as several


def two_clusters(size=20):
    """Two chains whose ops read one another closely, with one small tensor between them."""
    entries = []
    for cluster in range(2):
        base = cluster * size
        for i in range(size):
            inputs = [base + j for j in (i - 2, i - 1) if j >= 0]
            if cluster and i == 0:
                inputs = [size - 1]
            units = 1 if base + i == size - 1 else 50
            entries.append({"inputs": inputs, "sizes": [units], "flops": 2.0, "weight": 3})
    return entries


@pytest.fixture
def pymetis():
    return pytest.importorskip("pymetis")


@pytest.mark.parametrize("by_bytes", [False, True])
def test_cuts_where_little_is_sent(pymetis, by_bytes):
    device = metis_parts(host(two_clusters(), 2), by_bytes=by_bytes)
    assert len(set(device[:20].tolist())) == len(set(device[20:].tolist())) == 1
    assert device[0] != device[-1]


def test_balances_what_it_is_asked_to_balance(pymetis):
    rng = np.random.default_rng(0)
    entries = [
        {
            "inputs": rng.integers(0, i, min(i, 2)).tolist(),
            "sizes": [int(rng.integers(1, 20))],
            "flops": float(rng.integers(1, 30)),
            "weight": int(rng.integers(0, 30)),
        }
        for i in range(200)
    ]
    case = host(entries, 4)
    seconds = np.bincount(metis_parts(case, by_bytes=False), case.seconds[:, 0], 4)
    assert seconds.max() < 1.1 * seconds.mean()
    size = case.weight_units + case.output_units
    held = np.bincount(metis_parts(case, by_bytes=True), size, 4)
    assert held.max() < 1.1 * held.mean()
    # One device three times as fast as the others gets about three times as much.
    fast = dataclasses.replace(case, seconds=case.seconds / np.array([3.0, 1.0, 1.0, 1.0]))
    given = np.bincount(metis_parts(fast, by_bytes=False), case.seconds[:, 0], 4)
    assert 2.5 < given[0] / given[1:].mean() < 3.5


def test_edges_of_the_input(pymetis):
    nothing = [{"inputs": [], "sizes": [], "flops": 0.0, "weight": 0}] * 5
    for by_bytes in (False, True):
        assert set(metis_parts(host(nothing, 3), by_bytes=by_bytes)) <= {0, 1, 2}
        assert metis_parts(host(nothing[:1], 3), by_bytes=by_bytes).tolist() == [0]
        assert metis_parts(host(nothing, 1), by_bytes=by_bytes).tolist() == [0] * 5
        assert max(metis_parts(host(nothing, 9), by_bytes=by_bytes)) < 9


def test_is_a_plan_of_the_problem(pymetis):
    graph = cases.build(two_clusters(6), [11], pad_to=(16, 16, 32))
    problem = Execution(graph, several.devices(2, link=4.0))
    with pytest.raises(SearchError, match="order must be"):
        partition(problem, order="breadth_first")
    plan = partition(problem)
    outcome = problem.evaluate(plan)
    assert bool(outcome.feasible)
    assert set(plan["device"][:12].tolist()) == {0, 1}
    again = partition(problem, order="memory")
    np.testing.assert_array_equal(again["device"], plan["device"])


def test_partitions_clusters_where_fusion_is_decided(pymetis):
    kinds = ("contraction", "elementwise")
    entries = [{**op, "kind": kinds[i % 2]} for i, op in enumerate(two_clusters())]
    graph = cases.build(entries, [39], pad_to=(42, 42, 80))
    problem = Execution(
        graph, several.devices(2, link=4.0), decide=("fusion", "device", "priority"),
        order="runtime",
    )  # fmt: skip
    plan = partition(problem, fused=True, order="first_come")
    assert set(plan) == {"fusion", "device", "priority"}
    case = problem.host_case()
    root = full_clusters(case)
    assert 4 < len(set(root.tolist())) < 40
    device = np.asarray(plan["device"])[:40]
    np.testing.assert_array_equal(device, device[root])
    assert set(device.tolist()) == {0, 1}
    assert (np.asarray(plan["fusion"])[:40] == problem.fusion_levels - 1).all()
    outcome = check_plan(problem, plan, options=FineOptions.plain())
    ran = np.flatnonzero(~np.isnan(outcome.start_s))
    np.testing.assert_array_equal(ran, sorted(set(root.tolist())))
    unfused = partition(problem)
    assert not np.asarray(unfused["fusion"]).any()
    with pytest.raises(SearchError, match="nothing to fuse: the problem decides device"):
        partition(Execution(graph, several.devices(2), decide=("device",)), fused=True)


def test_without_pymetis_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "pymetis", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'egx\[partition\]'"):
        module.metis()


def test_other_problems_are_refused():
    with pytest.raises(SearchError, match="plans Execution only, got Toy"):
        partition(runs.small_problem())
