"""The contract of the problem: heads, defaults, cost, feasibility, reward, what it refuses; facts
that others found about orders and makespans."""

from __future__ import annotations

import csv
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from egx.errors import DecisionError, GraphError, HardwareError, ProblemError
from egx.graph.builder import GraphBuilder
from egx.problems.base import Head
from egx.problems.execution import Execution
from tests.data import data_dir
from tests.oracles import execution_oracle, fusion_oracle
from tests.simulate import cases
from tests.simulate import execution_cases as several

PAD = (12, 32, 32)


def problem(seed=0, devices=2, *, level_bytes=None, **options):
    rng = np.random.default_rng(seed)
    graph = cases.random_graph(rng, 10, most_inputs=3, most_bytes=9, unit_bytes=4, pad_to=PAD)
    hardware = several.random_devices(rng, devices)
    if level_bytes is not None:
        hardware = several.devices(devices, level_bytes=level_bytes, memory=2.0, link=4.0)
    return Execution(graph, hardware, **options), rng


@jax.jit
def _evaluate(problem, plans):
    return jax.vmap(problem.evaluate)(plans)


def evaluate(problem, plans):
    """The problem is an argument: problems of one shape and kind share a program."""
    return _evaluate(problem, several.arrays(plans))


OPTIONS = {
    "makespan": {},
    "peak": {"objective": "peak_memory"},
    "runtime": {"order": "runtime"},
    "ports": {"transfers": "ports"},
    "fused": {"decide": ("fusion",), "transfers": "blocking"},
}


@pytest.mark.parametrize("kind", OPTIONS)
def test_outcome_is_that_of_the_semantics(kind):
    options = OPTIONS[kind]
    verdicts = []
    for seed, level_bytes in ((0, 0.0), (1, 40.0), (2, 90.0), (3, 400.0), (4, 1e12)):
        problem_, rng = problem(seed, level_bytes=level_bytes, **options)
        graph, hardware = problem_.graph, problem_.hardware
        names = ["device", "priority"] + ["fusion"] * (kind == "fused")
        plans = several.only(several.random_plans(rng, graph, 2), *names)
        got = evaluate(problem_, plans)

        def run(oracle):
            if kind == "runtime":
                return oracle.run_runtime()
            return oracle.run_static(options.get("transfers", "async"))

        objective = options.get("objective", "makespan")
        # Neither device nor priority: device 0, all equal, or first come, first served.
        base = run(execution_oracle.Oracle(graph, hardware))
        reference = execution_oracle.outcome(base, graph, hardware, objective=objective)["cost"]
        np.testing.assert_allclose(problem_.reference_cost, reference, rtol=1e-5)
        for p in range(several.PLANS):
            root = fusion_oracle.clusters(graph, plans["fusion"][p]) if kind == "fused" else None
            want = run(several.oracle(graph, hardware, plans, p, root=root))
            outcome = execution_oracle.outcome(
                want, graph, hardware, objective=objective, reference_cost=reference
            )
            assert bool(got.feasible[p]) == outcome["feasible"]
            np.testing.assert_allclose(got.cost[p], outcome["cost"], rtol=1e-5)
            np.testing.assert_allclose(got.reward[p], outcome["reward"], rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(got.makespan_s[p], want.makespan_s, rtol=1e-5)
            assert got.peak_bytes[p].tolist() == [4 * x for x in want.peak_units]
            verdicts.append(outcome["feasible"])
    assert any(verdicts)
    assert all(verdicts) == (kind == "peak")


@pytest.mark.parametrize("kind", [*OPTIONS, "all"])
def test_reference_is_what_undecided_plans_are(kind):
    options = {"decide": ("transfer_priority", "priority", "device", "fusion")}
    problem_, _ = problem(1, **OPTIONS.get(kind, options))
    assert set(problem_.reference) == set(problem_.heads)
    at_reference = problem_.evaluate(problem_.reference)
    assert at_reference.cost == problem_.reference_cost
    assert at_reference.reward == 0 or not at_reference.feasible
    none = {name: value for name, value in problem_.reference.items() if name == "fusion"}
    free = problem(1, **{**OPTIONS.get(kind, options), "decide": tuple(none)})[0]
    outcome = free.evaluate(none)
    np.testing.assert_array_equal(outcome.peak_units, at_reference.peak_units)
    np.testing.assert_allclose(outcome.makespan_s, at_reference.makespan_s, rtol=1e-6)


def test_heads_are_what_is_decided_in_a_fixed_order():
    problem_, _ = problem(decide=("transfer_priority", "device", "fusion"), fusion_levels=3)
    assert problem_.heads == {
        "fusion": Head("op", 3),
        "device": Head("op", 2),
        "transfer_priority": Head("use", "real"),
    }
    assert problem()[0].heads == {"device": Head("op", 2), "priority": Head("op", "real")}
    assert problem_.features.shape == (12, 21)
    assert not np.any(problem_.features[10:])


def test_undecided_decisions_may_be_given():
    problem_, rng = problem(decide=("device",))
    plans = several.random_plans(rng, problem_.graph, 2, 1)
    plan = {k: v[0] for k, v in several.arrays(plans).items()}
    both = problem(decide=("device", "priority"))[0]
    given = problem_.evaluate({"device": plan["device"], "priority": plan["priority"]})
    decided = both.evaluate({"device": plan["device"], "priority": plan["priority"]})
    assert given.cost == decided.cost
    equal = problem_.evaluate({"device": plan["device"], "priority": jnp.zeros(12)})
    assert equal.cost == problem_.evaluate({"device": plan["device"]}).cost
    assert problem_.evaluate(plan).peak_units.shape == (2,)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"objective": "speed"}, "objective must be 'makespan' or 'peak_memory', got 'speed'"),
        ({"order": "random"}, "order must be"),
        ({"transfers": "none"}, "transfers must be"),
        ({"decide": ("device", "level")}, r"decide names \['level'\]"),
        ({"decide": "device"}, "sequence of names"),
        ({"decide": ("device", "device")}, "twice"),
        ({"order": "runtime", "transfers": "blocking"}, "blocking"),
        ({"order": "runtime", "decide": ("transfer_priority",)}, "'transfer_priority' cannot be"),
        ({"op_seconds": np.ones((10, 2)), "decide": ("fusion",)}, "'fusion' cannot be decided"),
        ({"op_seconds": np.ones((12, 2))}, r"shape \(10, 2\)"),
        ({"op_seconds": np.full((10, 2), np.nan)}, r"op_seconds\[0, 0\] must be finite"),
        ({"op_seconds": -np.ones((10, 2))}, "not negative"),
        ({"op_seconds": "fast"}, "op_seconds must be numbers"),
        ({"fusion_levels": 0}, "fusion_levels must be 1 or more, got 0"),
        ({"fusion_levels": 2.5}, "fusion_levels must be a whole number"),
    ],
)
def test_refused_options(options, words, unchecked):
    with pytest.raises(ProblemError, match=words):
        problem(**options)


def test_refused_models_and_machines(unchecked):
    with pytest.raises(GraphError, match="expected a Model or a Graph, got str"):
        Execution("resnet50", several.devices(2))
    with pytest.raises(HardwareError, match="expected a Hardware, got str"):
        Execution(problem()[0].graph, "nnpi")


def test_refused_decisions(unchecked):
    runtime, _ = problem(order="runtime")
    measured, _ = problem(op_seconds=np.ones((10, 2)))
    plain, _ = problem()
    plan = plain.reference
    cases_ = [
        (runtime, {**plan, "transfer_priority": jnp.zeros(32)}, "'transfer_priority' is refused"),
        (measured, {**plan, "fusion": jnp.zeros(12, jnp.int32)}, "'fusion' is refused"),
        (plain, {"device": plan["device"]}, "'priority' is missing"),
        (plain, {**plan, "weights": jnp.zeros(12, jnp.int32)}, "unknown decisions"),
        (plain, {**plan, "device": jnp.full(12, 2, jnp.int32)}, "expected 0 to 1"),
        (plain, {**plan, "device": jnp.zeros(12)}, "must hold integers"),
        (plain, {**plan, "device": jnp.zeros(10, jnp.int32)}, r"shape \(12,\)"),
        (plain, {**plan, "priority": jnp.full(12, jnp.inf)}, "must be finite"),
        (plain, {**plan, "fusion": jnp.full(12, 4, jnp.int32)}, "expected 0 to 3"),
    ]
    for problem_, decisions, words in cases_:
        with pytest.raises(DecisionError, match=words):
            problem_.evaluate(decisions)


def test_op_seconds_replace_the_roofline_and_its_launch():
    rng = np.random.default_rng(2)
    table = rng.integers(0, 9, (10, 2)) / 4.0
    problem_, rng = problem(2, op_seconds=table)
    plans = several.only(several.random_plans(rng, problem_.graph, 2), "device", "priority")
    got = evaluate(problem_, plans)
    for p in range(several.PLANS):
        want = several.oracle(problem_.graph, problem_.hardware, plans, p, op_seconds=table)
        assert float(got.makespan_s[p]) == want.run_static().makespan_s
    bound = execution_oracle.upper_bound_s(problem_.graph, problem_.hardware, table)
    np.testing.assert_allclose(problem_.longest_s, bound, rtol=1e-6)


def test_a_device_that_can_hold_nothing():
    """Whatever runs there is infeasible; leaving it empty is not."""
    ops = [{"inputs": [], "sizes": [8], "flops": 1.0, "weight": 4}] * 2
    graph = cases.build(ops, [])
    hardware = several.devices(2)
    limited = jax.tree.map(lambda x: x, hardware)
    object.__setattr__(limited, "level_bytes", np.array([[100.0], [0.0]]))
    problem_ = Execution(graph, limited, decide=("device",))
    away = problem_.evaluate({"device": jnp.array([0, 0], jnp.int32)})
    there = problem_.evaluate({"device": jnp.array([0, 1], jnp.int32)})
    assert bool(away.feasible)
    assert not bool(there.feasible)
    # Two ops of a second each; 12 units beyond a capacity of none.
    np.testing.assert_allclose(there.cost, 2.0 * (2 + 12), rtol=1e-6)
    np.testing.assert_allclose(there.reward, -(1 + 12 / 13), rtol=1e-6)
    assert there.cost > away.cost


def test_units_beyond_float32_are_counted():
    size = 2**24 + 1
    ops = [
        {"inputs": [], "sizes": [size], "flops": 1.0, "weight": size},
        {"inputs": [0], "sizes": [size], "flops": 1.0, "weight": 0},
    ]
    graph = cases.build(ops, [1], unit_bytes=1)
    for spare, feasible in ((0, True), (-1, False)):
        hardware = several.devices(1, level_bytes=3 * size + spare)
        problem_ = Execution(graph, hardware, decide=("device",))
        outcome = problem_.evaluate(problem_.reference)
        assert outcome.peak_bytes.tolist() == [3 * size]
        assert bool(outcome.feasible) == feasible


def test_control_edges_take_the_latency_and_no_memory():
    ops = [
        {"inputs": [], "sizes": [0], "flops": 1.0, "weight": 0},
        {"inputs": [0], "sizes": [0], "flops": 1.0, "weight": 0},
    ]
    problem_ = Execution(cases.build(ops, []), several.devices(2, latency_s=0.5, link=1.0))
    outcome = problem_.evaluate({"device": jnp.array([0, 1]), "priority": jnp.zeros(2)})
    assert float(outcome.makespan_s) == 2.5
    assert outcome.peak_units.tolist() == [0, 0]


def test_all_free_costs_nothing():
    problem_ = Execution(problem()[0].graph, several.devices(2, flops=np.inf))
    assert float(problem_.reference_cost) == 0.0
    outcome = problem_.evaluate(problem_.reference)
    assert float(outcome.reward) == 0.0


def test_problems_of_one_shape_stack():
    both = [problem(seed)[0] for seed in (0, 1)]
    rng = np.random.default_rng(0)
    plans = several.only(several.random_plans(rng, both[0].graph, 2, 3), "device", "priority")
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *both)
    got = jax.jit(jax.vmap(lambda p, d: jax.vmap(p.evaluate)(d), in_axes=(0, None)))(
        stacked, several.arrays(plans)
    )
    for k, one in enumerate(both):
        want = evaluate(one, plans)
        np.testing.assert_array_equal(got.cost[k], want.cost)
        np.testing.assert_array_equal(got.peak_units[k], want.peak_units)


def test_measured_and_failed():
    problem_, rng = problem(3, level_bytes=40.0)
    measured = problem_.measured(jnp.float32(2.0))
    assert bool(measured.feasible)
    assert float(measured.cost) == 2.0
    failed = problem_.failed()
    assert not bool(failed.feasible)
    plans = several.only(several.random_plans(rng, problem_.graph, 2, 32), "device", "priority")
    got = evaluate(problem_, plans)
    assert np.all(np.asarray(failed.cost) >= got.cost)
    assert np.all(np.asarray(failed.reward) < got.reward)


def order_peak_facts():
    facts = json.loads(data_dir("planner_oracles", "order_peak.json").read_text())
    return facts.items()


def test_least_peak_over_all_orders():
    """Operator orders on one device, brute force, against the facts of another planner's tests."""
    for name, fact in order_peak_facts():
        builder = GraphBuilder(name)
        handles = {}
        for node in fact["nodes"]:
            inputs = [h for h, dst in handles.values() if node in dst]
            made = [t for t in fact["tensors"] if t["src"] == node]
            out = builder.op(
                node, kind="opaque", op_type="any", inputs=inputs, flops=1.0,
                output_bytes=[t["size"] for t in made],
            )  # fmt: skip
            for handle, tensor in zip(out, made, strict=True):
                handles[handle] = (handle, tensor["dst"])
        problem_ = Execution(
            builder.build(), several.devices(1), objective="peak_memory", decide=("priority",)
        )
        orders = list(itertools.permutations(range(len(fact["nodes"]))))
        costs = evaluate(problem_, {"priority": np.array(orders, np.float32)}).cost
        assert float(np.min(costs)) == fact["optimal_peak"]
        assert float(np.max(costs)) > fact["optimal_peak"]


def stg_graph(path, pad):
    """Tasks as ops whose FLOPs are their seconds, arcs as tensors of no bytes."""
    builder, handles = GraphBuilder(path.stem), {}
    for line in path.read_text().splitlines()[1:]:
        words = [int(w) for w in line.split("#")[0].split()]
        if not words:
            continue
        task, seconds, count = words[:3]
        (handles[task],) = builder.op(
            f"task{task}", kind="opaque", op_type="task", flops=seconds, output_bytes=[0],
            inputs=[handles[p] for p in words[3 : 3 + count]],
        )  # fmt: skip
    return builder.build(pad_to=pad)


@pytest.mark.parametrize("order", ["static", "runtime"])
def test_standard_task_graphs_never_beat_their_lower_bound(order):
    with data_dir("stg", "optimal_50.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["processors"] == "4"]
    folder = data_dir("stg", "50")
    ratios = []
    for row in rows[::45]:
        graph = stg_graph(folder.parent / row["file"], (52, 52, 1024))
        problem_ = Execution(graph, several.devices(4), order=order)
        rng = np.random.default_rng(0)
        plans = several.only(several.random_plans(rng, graph, 4, 64), "device", "priority")
        # Some of the plans by the longest path to the end, the classic rule.
        consumers = [[] for _ in range(52)]
        for t, c, real in zip(graph.use_tensor, graph.use_consumer, graph.use_mask, strict=True):
            if real:
                consumers[int(graph.tensor_producer[t])].append(int(c))
        level = np.zeros(52, np.float32)
        for op in reversed(range(52)):
            below = max((level[c] for c in consumers[op]), default=0.0)
            level[op] = below + float(graph.flops[op])
        plans["priority"][32:] = level
        cost = np.asarray(evaluate(problem_, plans).cost)
        assert np.all(cost >= float(row["lower"]))
        ratios.append(cost.min() / float(row["upper"]))
    assert max(ratios) < 2.0
