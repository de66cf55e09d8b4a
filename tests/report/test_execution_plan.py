"""Plans on several devices: what they say, the way to a file and back, and what a check finds."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from egx.errors import FormatError
from egx.report.execution_check import check_execution_plan
from egx.report.execution_plan import ExecutionPlan, make_execution_plan
from egx.report.execution_plan_file import (
    is_execution_plan,
    read_execution_plan,
    write_execution_plan,
)
from egx.report.plan_file import read_plan
from tests.report.execution_toys import MAKESPAN_S, PLAN, fork, fork_problem


@pytest.fixture(scope="module")
def plan() -> ExecutionPlan:
    return make_execution_plan(fork_problem(), PLAN, source="fork", options={"x": 1})


def test_a_plan_says_what_runs_where_and_when(plan):
    assert [(op.op, op.device, op.start_s, op.finish_s) for op in plan.ops] == [
        ("net/a", "left", 0, 2),
        ("net/b", "left", 2, 5),
        ("net/c", "right", 4, 8),
        ("net/d", "left", 9.5, 10.5),
    ]
    assert [
        (move.tensor, move.source, move.target, move.bytes, move.start_s, move.finish_s)
        for move in plan.transfers
    ] == [("net/a", "left", "right", 4, 2, 4), ("net/c", "right", "left", 3, 8, 9.5)]
    assert (plan.makespan_s, plan.cost, plan.fits) == (MAKESPAN_S, MAKESPAN_S, True)
    assert plan.peak_bytes == (14, 7)
    assert plan.reference_cost == 10.0
    places = sorted([op.place for op in plan.ops] + [move.place for move in plan.transfers])
    assert places == list(range(6))
    decisions = plan.decisions(fork_problem())
    assert set(decisions) == {"device", "priority"}
    for name, value in PLAN.items():
        np.testing.assert_array_equal(decisions[name], value)


def test_a_file_gives_the_plan_back(plan, tmp_path):
    path = tmp_path / "plan.json"
    write_execution_plan(plan, path)
    assert is_execution_plan(path)
    again = read_execution_plan(path)
    for field in dataclasses.fields(plan):
        if field.name != "hardware":
            assert getattr(again, field.name) == getattr(plan, field.name), field.name
    np.testing.assert_array_equal(again.hardware.link_bytes_per_s, plan.hardware.link_bytes_per_s)
    # A line a record, for people and for diff.
    assert sum('"op_index"' in line for line in path.read_text().splitlines()) == 4
    with pytest.raises(FormatError, match="problem is 'execution'; expected 'memory placement'"):
        read_plan(path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda d: d.pop("order"), "order is missing; expected one of static, runtime"),
        (lambda d: d["ops"][1].update(device="right"), "ops[1].device is 'right'; expected 'left'"),
        (lambda d: d["ops"][1].update(device_index=2), "ops[1].device_index is 2"),
        (lambda d: d["ops"][2].update(priority="high"), "ops[2].priority is 'high'"),
        (lambda d: d["ops"][2].update(colour=1), "ops[2].colour is no field of this file"),
        (lambda d: d["transfers"][0].pop("bytes"), "transfers[0].bytes is missing"),
        (lambda d: d.update(peak_bytes=[1]), "peak_bytes is [1]; expected 2 numbers"),
        (lambda d: d.update(given=["device", "device"]), "given is"),
        (lambda d: d.update(given=["transfer_priority"]), "transfer_priority is None"),
        (lambda d: d.update(bound=3.0), "bound is 3.0; expected a number with bound_status"),
        (lambda d: d.update(fits=1), "fits is 1; expected true or false"),
        (lambda d: d.update(decide="device"), "decide is 'device'; expected a list"),
    ],
)
def test_damaged_files_are_named_with_the_field(plan, tmp_path, change, said):
    path = tmp_path / "plan.json"
    write_execution_plan(plan, path)
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    with pytest.raises(FormatError) as caught:
        read_execution_plan(path)
    assert str(caught.value).startswith(f"{path}: {said}")


def changed(plan, *, op=None, transfer=None, **fields):
    """The plan with other fields, or with fields of one op or transfer changed."""
    ops, transfers = list(plan.ops), list(plan.transfers)
    if op is not None:
        index, values = op
        ops[index] = dataclasses.replace(ops[index], **values)
    if transfer is not None:
        index, values = transfer
        transfers[index] = dataclasses.replace(transfers[index], **values)
    fields = {"ops": tuple(ops), "transfers": tuple(transfers), **fields}
    return dataclasses.replace(plan, **fields)


def test_a_true_plan_passes(plan):
    outcome = check_execution_plan(plan, fork())
    assert outcome.ok
    assert outcome.simulated is not None
    assert outcome.simulated.makespan_s == MAKESPAN_S


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"makespan_s": 9.0}, "makespan_s: the plan claims 9.000 s, the simulator says 10.50 s"),
        (
            {"peak_bytes": (13, 7)},
            "peak_bytes: the plan claims (13, 7), the simulator says (14, 7)",
        ),
        ({"fits": False}, "fits: the plan claims False, the simulator says True"),
        ({"bound": 11.0, "bound_status": "bound only"}, "bound: the plan claims that nothing is"),
        ({"op": (3, {"start_s": 9.0})}, "net/d: starts at 9.000 s, before its input 'net/c'"),
        ({"op": (1, {"start_s": 1.0, "finish_s": 4.0})}, "left: 'net/b' starts before 'net/a'"),
        ({"op": (2, {"finish_s": 7.0})}, "net/c: finish_s is 7.000 s, the simulator says 8.000 s"),
        ({"op": (1, {"place": 5})}, "net/b: place is 5, the simulator says"),
        ({"transfer": (0, {"start_s": 1.0})}, "transfer of 'net/a': starts before 'net/a' is done"),
        ({"transfer": (1, {"bytes": 2})}, "transfer of 'net/c' to left: bytes, use or place"),
        ({"transfers": ()}, "net/c: reads 'net/a' on right, where it is never sent"),
        ({"op": (1, {"op": "net/x"})}, "ops[1]: 'net/x' stands where"),
        ({"measured": True}, "measured: the plan rests on measured op seconds, and fork has none"),
    ],
)
def test_a_false_plan_is_told_what_is_wrong(plan, change, said):
    outcome = check_execution_plan(changed(plan, **change), fork())
    assert not outcome.ok
    assert any(fault.startswith(said) for fault in outcome.faults), outcome.faults


def test_a_plan_of_another_model_is_named(plan):
    other = dataclasses.replace(plan.model, digest="0" * 64)
    outcome = check_execution_plan(changed(plan, model=other), fork())
    assert outcome.simulated is None
    assert "the plan was made for digest 0000" in outcome.faults[0]
