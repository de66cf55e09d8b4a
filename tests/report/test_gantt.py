"""Gantt charts and traces of a timeline that is known by hand."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest

import egx
from egx.graph.generators import random_graph
from egx.report.gantt import _curve, _shares, gantt
from egx.report.trace import trace, write_trace
from egx.simulate.timeline import Timeline
from tests.report.execution_toys import MAKESPAN_S, PLAN, fork_problem


@pytest.fixture(scope="module")
def line() -> Timeline:
    return fork_problem().timeline(PLAN)


def test_the_trace_holds_every_item_with_its_times(line, tmp_path):
    write_trace(fork_problem(), line, tmp_path / "trace.json")
    content = json.loads((tmp_path / "trace.json").read_text())
    assert content == json.loads(json.dumps(trace(fork_problem(), line)))
    events = content["traceEvents"]
    threads = {
        (e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"
    }
    spans = {
        e["name"]: (threads[e["pid"], e["tid"]], e["ts"] / 1e6, (e["ts"] + e["dur"]) / 1e6)
        for e in events
        if e["ph"] == "X" and e["cat"] != "transfer"
    }
    assert spans == {
        "net/a": ("left", 0, 2),
        "net/b": ("left", 2, 5),
        "net/c": ("right", 4, 8),
        "net/d": ("left", 9.5, 10.5),
    }
    transfers = [e for e in events if e.get("cat") == "transfer"]
    assert [
        (threads[e["pid"], e["tid"]], e["ts"] / 1e6, e["dur"] / 1e6, e["args"]["bytes"])
        for e in transfers
    ] == [("left to right", 2, 2, 4), ("right to left", 8, 1.5, 3)]
    assert content["otherData"]["makespan_s"] == MAKESPAN_S
    assert content["otherData"]["peak_bytes"] == {"left": 14, "right": 7}


def test_counters_follow_live_memory_over_time(line):
    events = trace(fork_problem(), line)["traceEvents"]
    left = [
        (e["ts"] / 1e6, e["args"]["live bytes"])
        for e in events
        if e["ph"] == "C" and e["name"] == "left"
    ]
    # 8 of weights throughout; a (4) until it was sent and read, b (2), c's copy (3), d (1).
    assert left[0] == (0, 8)
    assert (0, 12) in left
    assert left[-1][1] == 8 + 1
    assert max(value for _, value in left) == line.peak_bytes_over_time[0]
    last = {}
    for time, value in left:
        last[time] = value
    assert last == {0: 12, 2: 14, 5: 10, 8: 13, 9.5: 14, 10.5: 9}


def test_the_chart_says_what_the_plan_is(line):
    figure = gantt(fork_problem(), PLAN, timeline=line)
    chart, over_time, along = figure.axes
    assert figure.get_suptitle() == "fork on pair"
    assert chart.get_title(loc="left") == "makespan 10.50 s, peak 14 B, 2 transfers"
    names = [label.get_text() for label in chart.get_yticklabels()]
    assert names == ["left", "right"]
    assert {"net/a", "net/c"} <= {text.get_text() for text in chart.texts}
    assert over_time.get_xlim() == chart.get_xlim() == (0, 10.5)
    assert along.get_xlim() == (0, 6)
    assert along.get_title(loc="right") == "peak 14 B on left, 58 % of its 24 B"
    for axes in (over_time, along):
        heights = [float(np.asarray(curve.get_ydata()).max()) for curve in axes.lines]
        # Both devices, and the capacity.
        assert heights == [14, 7, 24]


def test_many_ops_are_drawn_in_columns():
    rng = np.random.default_rng(0)
    model = random_graph(rng, "layered", 400)
    problem = egx.Execution(model, egx.hardware.regal_hardware(1))
    figure = gantt(problem, {"device": np.zeros(400, int), "priority": np.zeros(400)})
    chart = figure.axes[0]
    assert chart.get_title(loc="right").endswith("as high as they are busy")
    # One device without transfers is busy all the time: the columns stand as high as the row.
    tops = [patch.get_data() for patch in chart.patches if hasattr(patch, "get_data")]
    np.testing.assert_allclose(tops[-1].values, 0.90, rtol=1e-4)


def test_shares_of_columns_add_up_to_the_busy_time():
    rng = np.random.default_rng(0)
    start = rng.random(50)
    finish = start + rng.random(50) / 10
    edges = np.linspace(0, 1.2, 24)
    expected = [
        np.clip(np.minimum(finish, b) - np.maximum(start, a), 0, None).sum() / (b - a)
        for a, b in itertools.pairwise(edges)
    ]
    np.testing.assert_allclose(_shares(start, finish, edges), expected, atol=1e-12)


def test_the_curve_keeps_peaks_and_draws_no_dips(line):
    times, held = _curve(line)
    assert times[0] == 0
    assert times[-1] == MAKESPAN_S
    assert held.max(0).tolist() == line.peak_bytes_over_time.tolist()
    left = held[:, 0]
    assert left[-1] == 9
    # What is dropped when something else is made never shows as less than what stays.
    assert ((left[1:-1] >= left[:-2]) | (left[1:-1] >= left[2:])).all()
