"""What the README of experiments/regal says of rows: it must follow from them."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "experiments" / "regal"
NAMES = ("settings", "readme", "tables")


@pytest.fixture(scope="module")
def said():
    """A verdict on made-up costs: (costs by method, objective) to words."""
    before = {name: sys.modules.get(name) for name in NAMES}
    sys.path.insert(0, str(FOLDER))
    settings, readme, tables = (importlib.import_module(name) for name in NAMES)

    def say(tmp_path, costs, objective="makespan", **more):
        setting = settings.Setting("synthetic", 2, "free", objective, 9, 0)
        path = tmp_path / "rows.jsonl"
        with open(path, "w") as file:
            for method, values in costs.items():
                for graph, cost in enumerate(values):
                    row = {
                        "graph": f"{graph}", "family": "x", "ops": 9, "method": method,
                        "budget": {"bound": 0, "heft": 1}.get(method, 5000), "cost": cost,
                        "feasible": cost < 1e9, "second": 2 * cost, "second_feasible": True,
                        "seconds": 1.0, "heuristic": method == "heft", **more,
                    }  # fmt: skip
                    file.write(json.dumps(row) + "\n")
        found = tables.read(path)
        return readme.verdict(setting, tables.compared(found, [5000]), 5000)

    yield say
    sys.path.remove(str(FOLDER))
    for name, module in before.items():
        sys.modules.pop(name)
        if module is not None:
            sys.modules[name] = module


def test_who_is_ahead_and_of_what_it_is_sure(said, tmp_path):
    costs = {
        "brkga": [100.0, 100.0, 100.0, 100.0],
        "brkga_seeded": [90.0, 91.0, 90.0, 91.0],
        "regal": [101.0, 104.0, 103.0, 102.0],
        "regal_plus": [90.0, 90.0, 91.0, 91.0],
        "heft": [95.0, 95.0, 95.0, 95.0],
        "bound": [89.0, 89.0, 89.0, 89.0],
    }
    text = said(tmp_path, costs)
    assert "(4 graphs): in the mean first" in text
    # Better on one graph and worse on another is no lead.
    assert "`regal_plus` is level with seeded BRKGA" in text
    assert "`regal` is 2.50 % higher than plain BRKGA (the paper's aim of 7.1 % is missed)" in text
    assert "no plan is more than 11.00 % lower." in text
    assert "`regal` loses to seeded BRKGA" in text
    assert "HEFT alone is 5.00 % lower than plain BRKGA. `regal` loses to HEFT" in text
    assert "`regal_plus` beats HEFT" in text
    assert "under the second cost model: " in text
    assert "along time" not in text


def test_an_aim_that_the_bound_forbids_and_a_single_graph(said, tmp_path):
    costs = {"brkga": [100.0], "brkga_seeded": [99.0], "regal": [98.5], "regal_plus": [98.0],
             "heft": [99.5], "bound": [98.0]}  # fmt: skip
    text = said(tmp_path, costs)
    assert "(1 graph)" in text
    assert "no plan is more than 2.00 % lower: the aim is out of reach on these graphs." in text
    # Of one graph nothing follows.
    assert "`regal_plus` is 1.01 % lower than seeded BRKGA, on one graph." in text
    assert "beats" not in text
    assert "level" not in text


def test_what_does_not_fit_is_behind_and_peaks_are_counted_twice(said, tmp_path):
    costs = {"brkga": [100.0, 100.0], "regal_plus": [99.0, 99.0], "regal": [1e9, 50.0],
             "heft": [120.0, 120.0], "bound": [40.0, 40.0]}  # fmt: skip
    text = said(tmp_path, costs, "peak_memory", peak_along_time=7)
    assert text.index("regal plus +1.00 %") < text.index("regal +50.00 % (fits on 50 %)")
    assert "Their peaks counted along time: regal plus +0.00 %" in text


def test_what_ran_on_few_graphs_is_not_ranked(said, tmp_path):
    costs = {
        "brkga": [100.0] * 4,
        "brkga_seeded": [90.0, 91.0, 92.0, 91.0],
        "local": [50.0],
        "regal": [50.0],
        "heft": [95.0] * 4,
        "bound": [40.0] * 4,
    }
    text = said(tmp_path, costs)
    assert "(4 graphs): in the mean first brkga seeded +9.00 %" in text
    assert "local" not in text
    assert "`regal`" not in text
