"""The plans that every table of the joint problem shows, against cases computed by hand."""

from __future__ import annotations

import dataclasses
import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from egx.baselines import expert, list_scheduling
from egx.errors import SearchError
from egx.graph.builder import GraphBuilder
from egx.problems.execution import Execution
from egx.problems.execution_plans import blocks
from egx.problems.execution_plans.fused import full_clusters, fuse
from egx.problems.execution_plans.list_scheduling import heft
from egx.problems.execution_plans.orders import first_come_order
from egx.problems.execution_plans.plan import replay
from egx.problems.padded import pad_problem
from tests import runs
from tests.baselines.host_cases import host
from tests.oracles import fusion_oracle
from tests.simulate import execution_cases as several
from tests.simulate.test_fusion import fusible

IN_TURN = [0, 0, 1, 1, 0, 0, 1, 1]
JOINT = ("fusion", "device", "priority")
PAD = (12, 24, 24)


@eqx.filter_jit
def evaluate(problem, plan):
    return problem.evaluate(plan)


def layered(names, *, separator="/", pad_to=None):
    """A chain of elementwise ops of a FLOP and 4 bytes each, whose last tensor is an output."""
    builder = GraphBuilder("chain")
    inputs = []
    for name in names:
        inputs = builder.op(
            name, kind="elementwise", op_type="x", inputs=inputs, output_bytes=[4], flops=1.0
        )
    builder.output(inputs[0])
    notes = {"layer_separator": separator} if separator else {}
    return builder.build_model(notes=notes, pad_to=pad_to)


def entry(layer, flops=1.0, inputs=(), sizes=(4,)):
    return {"inputs": inputs, "sizes": sizes, "flops": flops, "weight": 0, "layer": layer}


def test_layers_go_to_devices_in_turn_or_in_blocks():
    # Five layers of 6, 1, 1, 1 and 3 seconds; layer 0 has two ops that stand apart.
    case = host([entry(k, s) for k, s in ((0, 2), (1, 1), (2, 1), (0, 4), (3, 1), (4, 3))], 2)
    assert blocks.layers_in_turn(case).tolist() == [0, 1, 0, 0, 1, 0]
    assert blocks.layers_in_blocks(case).tolist() == [0, 1, 1, 0, 1, 1]
    # By bytes the ops are alike: layers 0 and 1 are three of the six.
    assert blocks.layers_in_blocks(case, by_bytes=True).tolist() == [0, 0, 1, 0, 1, 1]
    # Two layers do not go round three devices, and a graph without names has none.
    for few in (host([entry(0), entry(1)], 3), host([entry(-1), entry(-1)], 2)):
        assert blocks.layers_in_turn(few) is None
        assert blocks.layers_in_blocks(few) is None


def test_first_come_first_served_by_hand():
    """Device 0: op 0 (3 s), then op 2, which arrives at 3, before op 4, which comes from the other
    device at 1 + 4 = 5 although it was ready first there; device 1: op 1 (1 s), then op 3 at 7."""
    ops = [
        entry(0, 3.0),
        entry(0, 1.0),
        entry(0, 3.0, [0]),
        entry(0, 1.0, [0]),
        entry(0, 1.0, [1]),
    ]
    case = host(ops, 2, link=1.0)
    device = np.array([0, 1, 0, 1, 0])
    # Starts: 0 and 1 at 0, 2 at 3, 4 at 6, 3 at 7 (its tensor leaves at 3 and takes 4 s).
    assert first_come_order(case, device, "async").tolist() == [0, 1, 2, 4, 3]
    # On one device those that arrived at the same time go by index.
    assert first_come_order(case, np.zeros(5, int), "async").tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("transfers", ["async", "ports"])
def test_first_come_order_brings_about_the_run_without_priorities(transfers):
    for seed in range(8):
        rng = np.random.default_rng(seed)
        graph = fusible(rng, 12, pad_to=PAD)
        problem = Execution(
            graph,
            several.random_devices(rng, 3),
            decide=("device",),
            order="runtime",
            transfers=transfers,
        )
        case = problem.host_case()
        device = rng.integers(0, 3, 12).astype(np.int32)
        order = first_come_order(case, device.astype(np.int64), transfers)
        priority = np.zeros(12, np.float32)
        priority[order] = np.linspace(1, 0.1, 12)
        given = evaluate(problem, {"device": device})
        made = evaluate(problem, {"device": device, "priority": priority})
        assert float(made.makespan_s) == float(given.makespan_s)
        np.testing.assert_array_equal(made.peak_units, given.peak_units)


def test_full_clusters_are_those_of_the_semantics():
    joined = 0
    for seed in range(30):
        rng = np.random.default_rng(seed)
        graph = fusible(rng, 18)
        case = host_view(graph)
        expected = fusion_oracle.clusters(graph, np.full(18, 3))
        assert full_clusters(case).tolist() == expected
        joined += sum(root != op for op, root in enumerate(expected))
    assert joined > 100


def host_view(graph):
    """The host's view of a graph, times and machine left out."""
    kinds = np.asarray(graph.op_class)
    entries = [{"inputs": [], "sizes": [], "flops": 0.0, "weight": 0} for _ in kinds]
    for t, op in enumerate(np.asarray(graph.tensor_producer).tolist()):
        entries[op]["sizes"].append(int(graph.tensor_units[t]))
    for t, op in zip(
        np.asarray(graph.use_tensor).tolist(), np.asarray(graph.use_consumer).tolist(), strict=True
    ):
        entries[op]["inputs"].append(t)
    case = host(entries, 1, outputs=np.flatnonzero(np.asarray(graph.tensor_is_output)))
    return dataclasses.replace(
        case, opaque=kinds == 4, reduction=kinds == 2, contraction=kinds == 3
    )


def test_a_cluster_costs_what_the_semantics_say():
    """Three ops become one: 3 FLOPs, 5 + 2 bytes of weights and a tensor of 8 from outside, which
    two of them read, at 2 bytes a second, 4 bytes written at 4, and one launch."""
    ops = [
        {"inputs": [], "sizes": [8], "flops": 1.0, "weight": 0},
        {"inputs": [0], "sizes": [6], "flops": 1.0, "weight": 5},
        {"inputs": [0, 1], "sizes": [3], "flops": 1.0, "weight": 2},
        {"inputs": [2, 1], "sizes": [4], "flops": 1.0, "weight": 0},
        {"inputs": [3], "sizes": [1], "flops": 1.0, "weight": 0},
    ]
    case = dataclasses.replace(
        host(ops, 1, outputs=[3]),
        reduction=np.array([True, False, False, False, False]),
        read_bytes_per_s=np.array([2.0]),
        write_bytes_per_s=np.array([4.0]),
        launch_s=np.array([0.5]),
    )
    root = full_clusters(case)
    # The first is a reduction, and the fourth makes an output: both keep to themselves.
    assert root.tolist() == [0, 3, 3, 3, 4]
    fused = fuse(case, root)
    assert fused.case.seconds[:, 0].tolist() == [
        8 / 4 + 0.5,
        (5 + 2 + 8) / 2 + 4 / 4 + 0.5,
        # The last one computes longer than it reads.
        max(1.0, 4 / 2 + 1 / 4) + 0.5,
    ]
    assert [m.tolist() for m in fused.members] == [[0], [1, 2, 3], [4]]
    assert fused.case.weight_units.tolist() == [0, 7, 0]
    assert fused.tensors.tolist() == [0, 3, 4]
    # Both uses of the first tensor are left, and none inside.
    assert fused.case.use_tensor.tolist() == [0, 0, 1]
    assert fused.case.use_consumer.tolist() == [1, 1, 2]
    assert fused.case.is_output.tolist() == [False, True, False]


@functools.cache
def joint(order):
    """A model of four layers of two ops on two devices that need time for everything."""
    names = [f"layer{k}/{op}" for k in range(4) for op in "ab"]
    machine = several.devices(2, memory=4.0, link=8.0, launch_s=1.0, level_bytes=1e6)
    return Execution(layered(names, pad_to=PAD), machine, decide=JOINT, order=order)


@pytest.mark.parametrize("order", ["static", "runtime"])
def test_named_plans_of_the_joint_problem(order):
    problem = joint(order)
    plans = problem.heuristics()
    assert list(plans) == [
        *("reference", "heft", "memory_greedy", "memory_spread", "expert"),
        *("tensorflow", "heft_fused", "expert_fused", "blocks_fused", "heft_readers"),
    ]
    cost = {name: float(evaluate(problem, plan).cost) for name, plan in plans.items()}
    # Alone: the first op writes 4 bytes at 4 a second; the others read as much besides.
    assert cost["reference"] == 8 * 1 + 8 * 1 + 7 * 1
    # Fused: seven join the last. It computes 8 s and writes within them; one launch.
    assert cost["tensorflow"] == 8 + 1
    assert cost["heft_fused"] == 9
    # In turn: the layers alternate, and half a second is needed to send a tensor three times.
    assert plans["expert"]["device"][:8].tolist() == IN_TURN
    assert plans["expert"]["fusion"][:8].tolist() == [0] * 8
    assert cost["expert"] == cost["reference"] + 3 * 0.5
    # All are one cluster of the last layer: alone it is the first block.
    for name, device in (("expert_fused", 1), ("blocks_fused", 0)):
        assert plans[name]["device"][:8].tolist() == [device] * 8
        assert plans[name]["fusion"][:8].tolist() == [3] * 8
        assert cost[name] == 9
    for name, make in (
        ("tensorflow", expert.tensorflow),
        ("expert_fused", expert.human),
        ("blocks_fused", expert.human_blocks),
        ("heft_fused", list_scheduling.heft_fused),
    ):
        for head, value in make(problem).items():
            np.testing.assert_array_equal(value, plans[name][head])
    # A chain: there is nothing that a reader has elsewhere.
    minding = list_scheduling.heft_readers(problem)
    for head, value in plans["heft_fused"].items():
        np.testing.assert_array_equal(minding[head], value)


def test_layers_survive_padding_and_traces():
    problem = joint("static")
    bare = Execution(problem.graph, problem.hardware, decide=JOINT)
    assert bare.layer.tolist() == [-1] * 12
    # By depth in blocks: the first half, the second half.
    assert bare.heuristics()["expert"]["device"][:8].tolist() == [0] * 4 + [1] * 4
    padded = pad_problem(problem, (13, 24, 24))
    assert padded.layer.tolist() == [0, 0, 1, 1, 2, 2, 3, 3] + [-1] * 5
    assert padded.heuristics()["expert"]["device"].tolist() == IN_TURN + [0] * 5
    # Names never reach a program: the same one serves both, and finds the layers of each.
    traced = []

    @eqx.filter_jit
    def look(one):
        traced.append(one)
        return one.heuristics()["expert"]["device"]

    assert look(problem)[:8].tolist() == IN_TURN
    assert look(bare)[:8].tolist() == [0] * 4 + [1] * 4
    assert len(traced) == 1
    both = jax.tree.map(lambda *x: jnp.stack(x), problem, bare)
    mapped = jax.vmap(lambda p: p.heuristics()["blocks_fused"])(both)
    assert mapped["fusion"].shape == (2, 12)


def test_without_fusion_the_names_stay_and_plans_do_not_fuse():
    names = [f"layer{k}/{op}" for k in range(4) for op in "ab"]
    machine = several.devices(2, memory=4.0, link=8.0)
    problem = Execution(layered(names, pad_to=PAD), machine, decide=("device",), order="runtime")
    assert list(problem.heuristics()) == [
        *("reference", "heft", "memory_greedy", "memory_spread", "expert", "heft_readers")
    ]
    assert expert.human(problem)["device"][:8].tolist() == IN_TURN
    assert expert.human_blocks(problem)["device"][:8].tolist() == [0] * 4 + [1] * 4
    assert expert.tensorflow(problem)["device"].tolist() == [0] * 12
    for given in (problem.heuristics()["heft_readers"], list_scheduling.heft_readers(problem)):
        assert list(given) == ["device"]
    # Names that merely look so are not taken for layers.
    plain = Execution(layered(names, separator=None, pad_to=PAD), machine)
    assert plain.layer.tolist() == [-1] * 12
    assert expert.human_blocks(plain)["device"][:8].tolist() == [0] * 4 + [1] * 4
    with pytest.raises(SearchError, match="nothing to fuse"):
        list_scheduling.heft_fused(problem)


def test_heft_reckons_with_clusters_as_the_simulator_does():
    """Where transfers are free HEFT's own makespan is that of the plan; one op a cluster."""
    machine = several.devices(2, memory=4.0, launch_s=0.25, level_bytes=1e6)
    for seed in range(3):
        graph = fusible(np.random.default_rng(seed), 12, pad_to=PAD)
        problem = Execution(graph, machine, decide=JOINT)
        plan = problem.heuristics()["heft_fused"]
        case = problem.host_case()
        fused = fuse(case, full_clusters(case))
        assert fused.case.num_ops < case.num_ops
        schedule = heft(fused.case)
        made = evaluate(problem, plan)
        assert float(made.makespan_s) == pytest.approx(schedule.makespan_s, rel=1e-6)
        assert replay(fused.case, schedule.plan) == pytest.approx(schedule.makespan_s)


def test_other_problems_are_refused():
    for make in (expert.tensorflow, expert.human, expert.human_blocks):
        with pytest.raises(SearchError, match="plans Execution only, got Toy"):
            make(runs.small_problem())
