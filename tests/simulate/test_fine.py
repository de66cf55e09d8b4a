"""The finer cost model: its limit is the semantics; links, hosts and memory by hand."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings

from egx.errors import DecisionError, ProblemError
from egx.problems.execution import Execution
from egx.simulate.fine import FineOptions, check_plan, run_case
from egx.simulate.fine_case import fine_case
from egx.simulate.fine_network import fair_rates
from tests.oracles import execution_oracle, fusion_oracle
from tests.simulate import cases
from tests.simulate import execution_cases as several

PLAIN = FineOptions.plain()


def fine(graph, hardware, plan, *, root=None, options=PLAIN, **how):
    case = fine_case(
        graph,
        hardware,
        plan.get("device"),
        None if root is None else np.asarray(root),
        launch_on_device=options.issue_s is not None,
    )
    return run_case(
        case,
        priority=plan.get("priority"),
        transfer_priority=plan.get("transfer_priority"),
        options=options,
        **how,
    )


def over_time(oracle, run):
    """Peak units [D] along time, from the times of items: what ends frees before what starts
    takes."""
    g, events = oracle.g, []
    needs, made = {}, {}
    for item in run.items:
        if item.use is None:
            for t in oracle.outputs(item.op):
                made[t, item.device] = item.start
                needs.setdefault((t, item.device), []).append(item.finish)
            for t in {g.use_tensor[u] for u in oracle.inputs(item.op)}:
                needs.setdefault((t, item.device), []).append(item.finish)
        else:
            made[item.tensor, item.device] = item.start
            home = oracle.device[g.producer[item.tensor]]
            needs.setdefault((item.tensor, home), []).append(item.finish)
    for (t, d), since in made.items():
        events.append((since, 1, d, g.size[t]))
        if not (g.is_output[t] and d == oracle.device[g.producer[t]]):
            events.append((max(needs[t, d]), 0, d, -g.size[t]))
    live = [0] * oracle.devices
    for op in oracle.ops:
        live[oracle.device[op]] += sum(g.weight[i] for i in oracle.members[op])
    peak = list(live)
    for _, _, d, units in sorted(events):
        live[d] += units
        peak[d] = max(peak[d], live[d])
    return peak


STATIC = [("device",), ("device", "priority"), ("device", "priority", "transfer_priority")]


@settings(max_examples=25, deadline=None)
@given(several.seeds())
def test_its_limit_is_the_semantics(drawn):
    rng, graph, hardware = several.case(drawn, 3)
    plans = several.random_plans(rng, graph, 3, 2)
    for p, fuses in itertools.product(range(2), (False, True)):
        root = fusion_oracle.clusters(graph, plans["fusion"][p]) if fuses else None
        for names in STATIC:
            plan = {name: plans[name][p] for name in names}
            oracle = execution_oracle.Oracle(graph, hardware, root=root, **plan)
            for transfers in ("async", "ports", "blocking"):
                got = fine(graph, hardware, plan, root=root, transfers=transfers)
                assert got.makespan_s == oracle.run_static(transfers).makespan_s
            for transfers in ("async", "ports") if len(names) < 3 else ():
                got = fine(graph, hardware, plan, root=root, runtime=True, transfers=transfers)
                want = oracle.run_runtime(transfers)
                assert got.makespan_s == want.makespan_s
                for item in want.items:
                    if item.use is None:
                        assert got.start_s[item.op] == item.start


@pytest.mark.parametrize("seed", range(6))
def test_memory_along_time(seed):
    """Real times, so that nothing happens at one moment by chance."""
    rng = np.random.default_rng(seed)
    graph = cases.random_graph(rng, 12, unit_bytes=1)
    hardware = several.devices(
        3, flops=rng.uniform(1, 9), memory=rng.uniform(1, 9), link=rng.uniform(1, 9),
        latency_s=rng.uniform(0.1, 1), launch_s=rng.uniform(0.1, 1),
    )  # fmt: skip
    plans = several.random_plans(rng, graph, 3, 1)
    root = fusion_oracle.clusters(graph, plans["fusion"][0]) if seed % 2 else None
    plan = {name: plans[name][0] for name in ("device", "priority")}
    oracle = execution_oracle.Oracle(graph, hardware, root=root, **plan)
    for runtime in (False, True):
        want = oracle.run_runtime() if runtime else oracle.run_static()
        got = fine(graph, hardware, plan, root=root, runtime=runtime)
        assert got.makespan_s == pytest.approx(want.makespan_s, rel=1e-12)
        assert got.peak_bytes.tolist() == over_time(oracle, want)
        assert got.device_busy_s.sum() == pytest.approx(
            sum(i.finish - i.start for i in want.items if i.use is None)
        )


def fan(sizes, flops=1.0):
    """An op that sends a tensor to each of as many others."""
    first = {"inputs": [], "sizes": sizes, "flops": flops, "weight": 0}
    rest = [{"inputs": [t], "sizes": [1], "flops": 0.0, "weight": 0} for t in range(len(sizes))]
    return cases.build([first, *rest], [])


def test_transfers_share_a_link():
    graph, hardware = fan([8, 4]), several.devices(2, link=2.0, latency_s=0.5)
    plan = {"device": np.array([0, 1, 1])}
    turns = fine(graph, hardware, plan)
    # 1 s of work; 0.5 + 4 s for the first, then 0.5 + 2 s for the second.
    assert turns.finish_s.tolist() == [1.0, 5.5, 8.0]
    shared = fine(graph, hardware, plan, options=FineOptions(issue_s=0.0))
    # Both wait 0.5 s, run at 1 B/s until the smaller is there, and the larger has 4 bytes left.
    # Device 1 runs its ops in order: the second waits for the first.
    assert shared.finish_s.tolist() == [1.0, 7.5, 7.5]
    assert shared.link_busy_s[0, 1] == 6.5
    first = fine(graph, hardware, plan, options=FineOptions(issue_s=0.0), runtime=True)
    assert first.finish_s.tolist() == [1.0, 7.5, 5.5]


def test_links_share_a_port_and_a_bridge():
    graph, hardware = fan([4, 12]), several.devices(3, link=4.0)
    plan = {"device": np.array([0, 1, 2])}

    def finish(transfers="async", **options):
        return fine(
            graph,
            hardware,
            plan,
            options=FineOptions(issue_s=0.0, **options),
            transfers=transfers,
        ).finish_s.tolist()

    assert finish() == [1.0, 2.0, 4.0]
    # A port is as fast as the links that share it.
    assert finish("ports") == [1.0, 3.0, 5.0]
    assert finish("ports", port_bytes_per_s=2.0) == finish(port_bytes_per_s=2.0) == [1.0, 5.0, 9.0]
    # 2 B/s each for 2 s, then 4 B/s, which is the link's own.
    assert finish(port_bytes_per_s=4.0) == finish(bridge_bytes_per_s=4.0) == [1.0, 3.0, 5.0]
    assert finish(bridge_bytes_per_s=2.0) == [1.0, 5.0, 9.0]


def test_rates_are_max_min_fair():
    counts = {(0, 1): 2, (0, 2): 1, (3, 2): 1}
    resources = [(10.0, [(0, 1)]), (2.0, [(0, 2)]), (9.0, [(3, 2)]), (8.0, [(0, 1), (0, 2)])]
    assert fair_rates(counts, resources) == {(0, 1): 3.0, (0, 2): 2.0, (3, 2): 9.0}
    assert fair_rates(counts, []) == dict.fromkeys(counts, np.inf)
    bridge = (4.0, list(counts))
    assert fair_rates(counts, [*resources, bridge]) == dict.fromkeys(counts, 1.0)


def independent(count, flops):
    return cases.build(
        [{"inputs": [], "sizes": [], "flops": flops, "weight": 0} for _ in range(count)], []
    )


@pytest.mark.parametrize("runtime", [False, True])
def test_the_host_issues_one_by_one(runtime):
    def seconds(graph, device, launch_s=0.0, **options):
        hardware = several.devices(2, launch_s=launch_s)
        plan = {"device": np.array(device)}
        return fine(graph, hardware, plan, options=FineOptions(**options), runtime=runtime)

    tiny, long = independent(6, 1.0), independent(6, 5.0)
    # Bound by the host: six issues of 3 s, and the last op.
    bound = seconds(tiny, [0] * 6, issue_s=3.0)
    assert (bound.makespan_s, bound.host_busy_s) == (19.0, 18.0)
    # The host is ahead but for the first; with a queue of one it never is.
    assert seconds(long, [0] * 6, issue_s=1.0).makespan_s == 31.0
    assert seconds(long, [0] * 6, issue_s=1.0, queue_length=1).makespan_s == 36.0
    # One host is the bound of two devices as well; one for each is not.
    two = [0, 1] * 3
    assert seconds(tiny, two, issue_s=3.0).makespan_s == 19.0
    assert seconds(tiny, two, issue_s=3.0, hosts="each").makespan_s == 10.0
    # By default the device's launch is the host's, and the device does not spend it.
    assert seconds(long, [0] * 6, launch_s=1.0).makespan_s == 31.0
    assert seconds(long, [0] * 6, launch_s=1.0, issue_s=0.0).makespan_s == 36.0


def test_what_is_issued_ahead_cannot_be_overtaken():
    """Op 1 is issued while op 0 runs; op 3 matters more, but its input comes too late for that."""
    ops = [
        {"inputs": [], "sizes": [1], "flops": 4.0, "weight": 0},
        {"inputs": [0], "sizes": [1], "flops": 2.0, "weight": 0},
        {"inputs": [], "sizes": [1], "flops": 3.0, "weight": 0},
        {"inputs": [2], "sizes": [1], "flops": 1.0, "weight": 0},
    ]
    plan = {"device": np.array([0, 0, 1, 0]), "priority": np.array([0.0, 1.0, 0.0, 2.0])}
    graph, hardware = cases.build(ops, []), several.devices(2)
    late = fine(graph, hardware, plan, runtime=True)
    assert late.start_s.tolist() == [0.0, 5.0, 0.0, 4.0]
    ahead = fine(graph, hardware, plan, options=FineOptions(issue_s=0.0), runtime=True)
    assert ahead.start_s.tolist() == [0.0, 4.0, 0.0, 6.0]


def test_checks_plans_of_a_problem():
    chain = [
        {"inputs": [i - 1] if i else [], "sizes": [4], "flops": 3.0, "weight": 2,
         "kind": "elementwise"} for i in range(5)
    ]  # fmt: skip
    hardware = several.devices(2, memory=2.0, link=4.0, launch_s=1.0, level_bytes=13.0)
    graph = cases.build(chain, [4], pad_to=(6, 8, 8))
    problem = Execution(graph, hardware, decide=("fusion", "device"))
    plan = {
        "fusion": np.array([1, 0, 1, 0, 0, 0]),
        "device": np.array([0, 0, 1, 1, 1, 0]),
    }
    got = check_plan(problem, plan, options=PLAIN)
    # 6 s of compute and a launch, 1 s on the link, the same again, then a launch and 5 s of memory.
    assert got.finish_s[[1, 3, 4]].tolist() == [7.0, 15.0, 21.0]
    assert got.makespan_s == 21.0
    assert np.isnan(got.start_s[[0, 2]]).all()
    assert got.start_s.shape == (5,)
    # Device 1 holds 6 of weights, its copy and both its own outputs at once.
    assert got.peak_bytes.tolist() == [8, 14]
    assert not got.fits
    with pytest.raises(DecisionError, match="unknown decision 'speed'"):
        check_plan(problem, {"speed": plan["fusion"]})
    with pytest.raises(DecisionError, match=r"must have shape \(6,\), got \(5,\)"):
        check_plan(problem, {"device": plan["device"][:5]})
    with pytest.raises(DecisionError, match="must be 0 to 1"):
        check_plan(problem, {"device": plan["device"] + 1})


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("bridge_bytes_per_s", 0.0, "above 0"),
        ("issue_s", -1.0, "finite and 0 or more"),
        ("queue_length", 0, "1 or more"),
        ("hosts", "two", "'one' or 'each'"),
    ],
)
def test_refuses_impossible_options(option, value, says, unchecked):
    with pytest.raises(ProblemError, match=says):
        FineOptions(**{option: value})
