"""What is known after a search on several devices, in tables."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import egx
from egx.comparison import Comparison
from egx.report.execution_verdict import device_table, judge_execution
from egx.report.units import TIMES
from egx.training.result import Result
from tests.report.execution_toys import PLAN, fork_problem


@pytest.fixture(scope="module")
def result() -> Result:
    """A search that found `PLAN`, which is worse than the reference."""
    found = egx.optimize(fork_problem(), "random", budget=16)
    outcome = fork_problem().evaluate(PLAN)
    return dataclasses.replace(found, decisions=dict(PLAN), cost=float(outcome.cost))


def test_the_best_plan_is_the_best_of_all_known(result):
    verdict = judge_execution(fork_problem(), result)
    names = [plan.name for plan in verdict.plans]
    assert names[0] == "reference"
    assert names[-1] == "found"
    assert "heft" in names
    # b on the other device: sent for 2 s, run for 3 s, back for 1 s while c runs.
    assert (verdict.best.name, verdict.best.cost) == ("heft", 8.5)
    found = verdict.plan("found")
    assert (found.cost, found.moved, found.peak_bytes.tolist()) == (10.5, 2, [14, 7])
    remark = verdict.remark()
    assert remark is not None
    assert remark.startswith("The found plan costs 23.53 % more than heft; ")
    table = verdict.table()
    assert table.header[:4] == ("plan", "makespan", "speed-up", "above bound")
    assert table.rows[0][:3] == ("reference", "10.00 s", f"1.000{TIMES}")
    assert table.rows[len(names) - 1][:3] == ("found", "10.50 s", f"0.952{TIMES}")
    assert table.rows[-1][0] == "lower bound"
    assert table.strong == names.index(verdict.best.name)


def test_the_found_plan_is_written_when_nothing_beats_it(result):
    problem = fork_problem()
    same = {name: np.asarray(value) for name, value in problem.heuristics()["heft"].items()}
    tied = dataclasses.replace(result, decisions=same, cost=8.5)
    verdict = judge_execution(problem, tied)
    assert verdict.best.name == "found"
    assert verdict.remark() is None


def test_devices_in_figures():
    line = fork_problem().timeline(PLAN)
    table = device_table(fork_problem(), line)
    assert table.header == (
        "device",
        "ops",
        "busy",
        "weights",
        "peak",
        "over time",
        "holds",
        "sent",
    )
    assert table.rows == (
        ("left", "3", "57 %", "8 B", "14 B", "14 B", "24 B", "4 B"),
        ("right", "1", "38 %", "0 B", "7 B", "7 B", "24 B", "3 B"),
    )


def test_comparisons_speak_of_the_reference_and_in_the_unit_of_the_objective(result):
    by_time = Comparison({"random": [result]}, 16).table()
    assert by_time.rows[0][1] == "10.50 s"
    assert by_time.rows[1][:2] == ("reference", "10.00 s")
    provenance = {**result.provenance, "problem": {**result.provenance["problem"]}}
    provenance["problem"]["objective"] = "peak_memory"
    smaller = dataclasses.replace(result, provenance=provenance, cost=2048.0)
    assert Comparison({"random": [smaller]}, 16).table().rows[0][1] == "2 KiB"
