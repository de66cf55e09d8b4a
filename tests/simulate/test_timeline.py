"""Timelines against the oracle's items and curves, and the curve over time by hand."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from egx.problems.execution import Execution
from tests.oracles import fusion_oracle
from tests.simulate import cases
from tests.simulate import execution_cases as several

VARIANTS = {
    "inline": ({}, ("device", "priority")),
    "fused": ({}, ("device", "fusion", "transfer_priority")),
    "runtime": ({"order": "runtime"}, ("device", "priority")),
}


def curve_over_time(oracle, run):
    """Peaks when a copy lives from the start of what makes it to the end of what needs it."""
    g, events = oracle.g, []
    for k, item in enumerate(run.items):
        for t in oracle.outputs(item.op) if item.use is None else [item.tensor]:
            home = oracle.device[g.producer[t]]
            users = [k] if item.use is None else []
            for j, other in enumerate(run.items):
                if other.use is not None:
                    users += [j] if other.tensor == t and item.use is None else []
                elif other.device == item.device:
                    users += [j for u in oracle.inputs(other.op) if g.use_tensor[u] == t]
            events.append((item.start, k, 0, item.device, g.size[t]))
            if not (g.is_output[t] and item.device == home):
                end, last = max((run.items[j].finish, j) for j in users)
                events.append((end, last, 1, item.device, -g.size[t]))
    live = [0] * oracle.devices
    for op in oracle.ops:
        live[oracle.device[op]] += sum(g.weight[i] for i in oracle.members[op])
    peak = list(live)
    for *_, d, size in sorted(events):
        live[d] += size
        peak[d] = max(peak[d], live[d])
    return peak


@pytest.mark.parametrize("variant", VARIANTS)
def test_agrees_with_oracle(variant):
    options, names = VARIANTS[variant]
    higher = 0
    for seed in range(8):
        rng = np.random.default_rng(seed)
        graph = cases.random_graph(
            rng, 10, most_inputs=3, most_bytes=9, unit_bytes=4, pad_to=(12, 32, 32)
        )
        problem = Execution(graph, several.random_devices(rng, 3), **options, decide=names)
        plans = several.only(several.random_plans(rng, graph, 3, 1), *names)
        root = fusion_oracle.clusters(graph, plans["fusion"][0]) if "fusion" in names else None
        oracle = several.oracle(graph, problem.hardware, plans, 0, root=root)
        want = oracle.run_runtime() if variant == "runtime" else oracle.run_static()
        plan = {k: v[0] for k, v in several.arrays(plans).items()}
        got = problem.timeline(plan)
        assert got.op.tolist() == [item.op for item in want.items]
        assert got.use.tolist() == [-1 if i.use is None else i.use for i in want.items]
        assert got.tensor.tolist() == [-1 if i.use is None else i.tensor for i in want.items]
        assert got.device.tolist() == [item.device for item in want.items]
        assert got.start_s.tolist() == [item.start for item in want.items]
        assert got.finish_s.tolist() == [item.finish for item in want.items]
        assert got.live_bytes.tolist() == [[4 * x for x in row] for row in want.live_units]
        assert got.peak_bytes.tolist() == [4 * x for x in want.peak_units]
        over_time = curve_over_time(oracle, want)
        assert got.peak_bytes_over_time.tolist() == [4 * x for x in over_time]
        higher += sum(a > b for a, b in zip(over_time, want.peak_units, strict=True))
        outcome = problem.evaluate(plan)
        assert outcome.peak_bytes.tolist() == got.peak_bytes.tolist()
        assert float(outcome.makespan_s) == got.makespan_s
    assert higher > 0


def test_curve_over_time_may_be_higher():
    """In the order of items the second device is done with z before x comes in; in time x comes
    while z is still being read."""
    ops = [
        {"inputs": [], "sizes": [8], "flops": 1.0, "weight": 0},
        {"inputs": [], "sizes": [8], "flops": 4.0, "weight": 0},
        {"inputs": [1], "sizes": [], "flops": 4.0, "weight": 2},
        {"inputs": [0], "sizes": [], "flops": 1.0, "weight": 0},
    ]
    problem = Execution(cases.build(ops, []), several.devices(2))
    plan = {"device": jnp.array([0, 1, 1, 1]), "priority": jnp.array([0.0, 3.0, 2.0, 0.0])}
    got = problem.timeline(plan)
    assert got.weight_bytes.tolist() == [0, 2]
    assert got.op.tolist() == [1, 2, 0, 0, 3]
    assert got.is_transfer.tolist() == [False, False, False, True, False]
    assert got.start_s.tolist() == [0.0, 4.0, 0.0, 1.0, 8.0]
    assert got.peak_bytes.tolist() == [8, 2 + 8]
    assert got.peak_bytes_over_time.tolist() == [8, 2 + 16]
    assert got.makespan_s == 9.0
