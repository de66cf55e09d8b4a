"""Constructed plans: what their makers reckon with is what the simulator says."""

from __future__ import annotations

import dataclasses
import time

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from egx.baselines import expert, list_scheduling
from egx.baselines.execution_case import to_decisions
from egx.errors import SearchError
from egx.problems.execution import Execution
from egx.problems.execution_plans import blocks, orders
from egx.problems.execution_plans.list_scheduling import heft, spread_by_memory
from egx.problems.execution_plans.live_curve import LiveCurve
from egx.problems.execution_plans.plan import Plan, peak_units, replay
from tests import runs
from tests.baselines.host_cases import host, wide
from tests.simulate import cases
from tests.simulate import execution_cases as several

PAD = (16, 40, 40)
FEW = settings(max_examples=8, deadline=None)


@eqx.filter_jit
def evaluate(problem, plan):
    return problem.evaluate(plan)


def problem(seed, devices=3, *, ops=14, free=False, **options):
    rng = np.random.default_rng(seed)
    graph = cases.random_graph(rng, ops, most_inputs=2, most_bytes=9, unit_bytes=4, pad_to=PAD)
    hardware = several.random_devices(rng, devices)
    if free:
        hardware = eqx.tree_at(
            lambda h: (h.link_bytes_per_s, h.link_latency_s),
            hardware,
            (jnp.full((devices, devices), jnp.inf), jnp.zeros((devices, devices))),
        )
    return Execution(graph, hardware, **options)


def checked_order(case, order):
    """Every op once, after the producers of its inputs."""
    assert sorted(order.tolist()) == list(range(case.num_ops))
    place = np.argsort(order)
    producer = case.producer[case.use_tensor]
    assert np.all(place[producer] < place[case.use_consumer])


ORDERS = {
    "critical path": orders.critical_path_order,
    "released forwards": orders.released_forwards,
    "released backwards": orders.released_backwards,
    "memory": orders.memory_order,
    "depth first": orders.depth_first_order,
}


@FEW
@given(st.integers(0, 10**6))
def test_orders_are_topological(seed):
    case = problem(seed).host_case()
    for make in ORDERS.values():
        checked_order(case, make(case))


@pytest.mark.parametrize("decide", ["device priority", "device priority transfer_priority"])
def test_heft_reckons_with_what_the_simulator_says(decide):
    """Where transfers are free, or their order is decided; and the plan replays in any case."""
    for seed in range(6):
        for free in (True, False):
            one = problem(seed, free=free, decide=tuple(decide.split()))
            schedule = list_scheduling.heft_schedule(one)
            # An infeasible plan's cost is not its makespan.
            makespan = float(evaluate(one, list_scheduling.heft(one)).makespan_s)
            assert replay(one.host_case(), schedule.plan) == pytest.approx(makespan, rel=1e-5)
            if free or "transfer" in decide:
                assert schedule.makespan_s == pytest.approx(makespan, rel=1e-5)


def test_heft_on_one_device_reckons_right():
    case = wide(0, 30, 1)
    schedule = heft(case)
    assert schedule.makespan_s == replay(case, schedule.plan) == case.seconds.sum()


@pytest.mark.parametrize("transfers", ["blocking", "ports"])
def test_heft_reckons_with_transfers_whose_order_is_decided(transfers):
    for seed in range(6):
        one = problem(seed, decide=("device", "priority", "transfer_priority"), transfers=transfers)
        schedule = list_scheduling.heft_schedule(one)
        makespan = float(evaluate(one, list_scheduling.heft(one)).makespan_s)
        assert schedule.makespan_s == pytest.approx(makespan, rel=1e-5)


@FEW
@given(st.integers(0, 10**6))
def test_the_plan_keeps_its_order_and_its_memory(seed):
    """Priorities bring the items in the order of the plan, so that the peaks are as foreseen."""
    one = problem(seed)
    case = one.host_case()
    rng = np.random.default_rng(seed)
    devices = rng.integers(0, 3, case.num_ops)
    for make in ORDERS.values():
        plan = Plan(devices, make(case))
        got = evaluate(one, to_decisions(one, case, plan))
        np.testing.assert_array_equal(got.peak_units, peak_units(case, plan))
        assert float(got.makespan_s) == pytest.approx(replay(case, plan), rel=1e-5)


def test_insertion_fills_a_gap():
    """The short op ranks below the one that waits for its input, and fits before it."""
    ops = [
        {"inputs": [], "sizes": [8], "flops": 4.0, "weight": 0},
        {"inputs": [0], "sizes": [8], "flops": 6.0, "weight": 0},
        {"inputs": [0], "sizes": [8], "flops": 6.0, "weight": 0},
        {"inputs": [], "sizes": [8], "flops": 3.0, "weight": 0},
    ]
    case = host(ops, 2)
    plain, filled = (heft(case, insertion=flag) for flag in (False, True))
    assert (plain.makespan_s, filled.makespan_s) == (13.0, 10.0)
    assert replay(case, filled.plan) == 10.0


def test_minding_readers_keeps_a_weight_beside_its_gradient():
    """A weight of 100 bytes is there sooner on the idle device, at 1 s instead of 16, and then
    needs 100 s to where its gradient is."""
    ops = [
        {"inputs": [], "sizes": [100], "flops": 1.0, "weight": 0},
        {"inputs": [], "sizes": [1], "flops": 10.0, "weight": 0},
        {"inputs": [1], "sizes": [100], "flops": 5.0, "weight": 0},
        {"inputs": [0, 2], "sizes": [1], "flops": 1.0, "weight": 0},
    ]
    case = host(ops, 2, link=1.0)
    plain, minding = (heft(case, mind_readers=flag) for flag in (False, True))
    assert plain.plan.device.tolist() == [1, 0, 0, 0]
    assert (plain.makespan_s, minding.makespan_s) == (102.0, 17.0)
    assert minding.plan.device.tolist() == [0, 0, 0, 0]
    assert replay(case, minding.plan) == 17.0
    # A reader that needs the smaller of two tensors sent, and what it costs: 1 byte is worth it.
    small = host([{**ops[0], "sizes": [1]}, *ops[1:]], 2, link=1.0)
    assert heft(small, mind_readers=True).plan.device.tolist() == [1, 0, 0, 0]
    # It reckons as HEFT does: right where the order of transfers is the plan's.
    links = 1.0 - np.eye(3)
    for seed in range(4):
        many = dataclasses.replace(wide(seed, 40, 3), link_s_per_byte=links / 20)
        schedule = heft(many, queued=True, mind_readers=True)
        assert schedule.makespan_s == pytest.approx(replay(many, schedule.plan))
        assert schedule.plan.device.tolist() != heft(many, queued=True).plan.device.tolist()


def test_insertion_replays_no_later_where_transfers_are_free():
    for seed in range(8):
        case = wide(seed, 40, 3)
        schedule = heft(case, insertion=True)
        checked_order(case, schedule.plan.order)
        assert replay(case, schedule.plan) <= schedule.makespan_s * (1 + 1e-9)
        assert schedule.makespan_s <= case.seconds[:, 0].sum()


def test_heft_minds_memory_where_it_can():
    """The first device holds less than what would be put there; the others hold everything."""
    for seed in range(8):
        case = wide(seed, 40, 3)
        room = peak_units(case, heft(case).plan)[0] * 3 // 4
        small = dataclasses.replace(case, capacity_units=np.array([room, 10**6, 10**6]))
        for queued in (False, True):
            plan = heft(small, queued=queued).plan
            assert peak_units(small, heft(small).plan)[0] <= room
            assert len(set(plan.device.tolist())) == 3
        unminded = heft(small, mind_memory=False).plan
        assert peak_units(small, unminded)[0] > room


@FEW
@given(st.integers(0, 10**6), st.integers(1, 900))
def test_the_live_curve_against_an_array(seed, places):
    rng = np.random.default_rng(seed)
    curve, plain, held = LiveCurve(places), np.zeros(0, np.int64), 0
    for place in range(places):
        curve.open(place)
        plain = np.append(plain, held)
        ranges = [(int(rng.integers(0, place + 1)), int(rng.integers(0, 9))) for _ in range(2)]
        after = plain.copy()
        for since, units in ranges:
            after[since:] += units
        assert curve.peak_with(ranges, 3) == after.max() + 3
        if rng.random() < 0.7:
            for since, units in ranges:
                curve.add(since, units)
            plain = after
        if rng.random() < 0.1:
            curve.held += 5
            held += 5
    assert curve.highest == plain.max()


def test_memory_plans_beat_what_is_drawn_at_random():
    """The best of 200 random placements in a random order of priority is worse."""
    ratios = []
    for seed in range(4):
        for devices in (1, 2):
            case = wide(seed, 60, devices)
            rng = np.random.default_rng(seed)
            drawn = []
            for _ in range(200):
                order = orders.critical_path_order(
                    dataclasses.replace(case, seconds=rng.exponential(1.0, (60, devices)))
                )
                drawn.append(max(peak_units(case, Plan(rng.integers(0, devices, 60), order))))
            found = max(peak_units(case, spread_by_memory(case, orders.memory_order(case))))
            ratios.append(found / min(drawn))
    assert np.mean(ratios) < 0.95


def test_experts_balance_their_blocks():
    load = np.array([[1.0, 2.0]] * 6)
    # The second device is half as fast: four ops against two.
    assert blocks.contiguous_blocks(load).tolist() == [0, 0, 0, 0, 1, 1]
    assert blocks.contiguous_blocks(np.zeros((3, 2))).max() <= 1
    assert blocks.contiguous_blocks(np.array([[5.0] * 3, [1.0] * 3, [1.0] * 3])).tolist() == [
        0,
        1,
        1,
    ]
    one = problem(0)
    case = one.host_case()
    turns = expert.round_robin(one)["device"][: case.num_ops]
    assert turns.tolist() == [i % 3 for i in range(case.num_ops)]
    alone = np.unique(expert.single_device(one)["device"][: case.num_ops])
    assert alone.size == 1
    fits = case.capacity_units >= case.weight_units.sum()
    assert fits[alone[0]] or not fits.any()
    by_depth = blocks.layer_blocks(case)
    assert np.all(np.diff(by_depth.device[by_depth.order]) >= 0)
    largest = [case.seconds[by_depth.device == d, d].sum() for d in range(3)]
    assert max(largest) <= case.seconds.sum(0).max()


def test_heuristics_are_the_same_with_and_without_jit():
    one = problem(1)
    plans = one.heuristics()
    assert list(plans) == ["reference", "heft", "memory_greedy", "memory_spread", "expert"]
    jitted = eqx.filter_jit(lambda p: dict(p.heuristics()))(one)
    both = jax.tree.map(lambda *x: jnp.stack(x), one, problem(2))
    mapped = eqx.filter_jit(jax.vmap(lambda p: p.heuristics()["heft"]))(both)
    for name, plan in plans.items():
        for head, value in plan.items():
            np.testing.assert_array_equal(jitted[name][head], value)
            assert jitted[name][head].dtype == value.dtype
    for index, each in enumerate((one, problem(2))):
        for head, value in each.heuristics()["heft"].items():
            np.testing.assert_array_equal(mapped[head][index], value)


@pytest.mark.parametrize(
    "decide", [("device",), ("priority",), ("fusion", "transfer_priority", "device")]
)
@pytest.mark.parametrize("order", ["static", "runtime"])
def test_heuristics_decide_what_the_problem_decides(decide, order):
    if order == "runtime":
        decide = tuple(name for name in decide if name != "transfer_priority")
    one = problem(3, decide=decide, order=order)
    for plan in one.heuristics().values():
        assert tuple(plan) == one.decide
        for value in plan.values():
            assert np.min(np.asarray(value, np.float32)) >= 0


def test_large_graphs_take_seconds():
    """10,000 ops: what takes the square of it would take a minute."""
    rng = np.random.default_rng(0)
    entries = [
        {
            "inputs": sorted({max(i - int(k), 0) for k in rng.integers(1, 500, 2)} - {i}),
            "sizes": [4],
            "flops": 1.0,
            "weight": 1,
        }
        for i in range(10_000)
    ]
    case = host(entries, 2, link=8.0)
    before = time.process_time()
    spread_by_memory(case, orders.memory_order(case))
    heft(dataclasses.replace(case, capacity_units=np.full(2, int(case.weight_units.sum()))))
    assert time.process_time() - before < 15.0


def test_other_problems_are_refused():
    for make in (
        list_scheduling.heft,
        list_scheduling.heft_readers,
        list_scheduling.memory_spread,
        expert.round_robin,
    ):
        with pytest.raises(SearchError, match="plans Execution only, got Toy"):
            make(runs.small_problem())
