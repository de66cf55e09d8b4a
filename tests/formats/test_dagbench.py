"""DAGBench: tasks, dependencies and networks become the related-machines model."""

from __future__ import annotations

import json

import numpy as np
import pytest

import egx
from egx.errors import FormatError
from egx.formats.dagbench import load_dagbench
from tests.data import data_dir


def document():
    return {
        "name": "toy",
        "task_graph": {
            # Out of order: "b" waits for "a".
            "tasks": [
                {"name": "b", "cost": 6},
                {"name": "a", "cost": 2.0},
                {"name": "c", "cost": 0},
            ],
            "dependencies": [
                {"source": "a", "target": "b", "size": 10},
                {"source": "a", "target": "c", "size": 4},
            ],
        },
        "network": {
            "nodes": [{"name": "slow", "speed": 1}, {"name": "fast", "speed": 4}],
            "edges": [
                {"source": "slow", "target": "fast", "speed": 2},
                {"source": "slow", "target": "slow", "speed": 1e9},
            ],
        },
    }


def write(tmp_path, content):
    (tmp_path / "graph.json").write_text(json.dumps(content))
    return tmp_path


def test_costs_sizes_and_speeds(tmp_path):
    workload = load_dagbench(write(tmp_path, document()))
    model = workload.model
    assert model.op_names == ("a", "b", "c")
    assert model.tensor_names == ("a > b", "a > c")
    assert workload.op_seconds.tolist() == [[2.0, 0.5], [6.0, 1.5], [0.0, 0.0]]
    assert workload.hardware is not None
    assert workload.hardware.device_names == ("slow", "fast")
    problem = egx.execution_problem(workload)
    plan = {"device": np.array([0, 1, 0]), "priority": np.zeros(3)}
    # 2 s on the slow one, 10 bytes at 2 bytes a second, 6 FLOPs at 4 a second.
    assert float(problem.evaluate(plan).makespan_s) == 2 + 5 + 1.5
    # The roofline of the machine says the same as the table.
    assert float(egx.Execution(model, workload.hardware).evaluate(plan).makespan_s) == 8.5
    # The other way round the same edge serves.
    other = {"device": np.array([1, 0, 1]), "priority": np.zeros(3)}
    assert float(problem.evaluate(other).makespan_s) == 0.5 + 5 + 6
    assert egx.load(tmp_path).digest == egx.load(tmp_path / "graph.json").digest == model.digest


def test_broken_sizes_keep_their_transfer_times(tmp_path):
    content = document()
    content["task_graph"]["dependencies"][0]["size"] = 0.3
    workload = load_dagbench(write(tmp_path, content))
    graph, hardware = workload.model.graph, workload.hardware
    assert hardware is not None
    seconds = float(graph.tensor_units[0]) * int(graph.unit_bytes)
    seconds /= float(hardware.link_bytes_per_s[0, 1])
    assert seconds == pytest.approx(0.15, rel=1e-5)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda d: d["task_graph"]["tasks"][1].pop("cost"), "tasks[1].cost is missing; expected"),
        (lambda d: d["task_graph"]["tasks"][1].update(cost="x"), "cost is 'x'; expected a number"),
        (
            lambda d: d["task_graph"]["tasks"][1].update(name="b"),
            "tasks[1].name is 'b'; expected a name",
        ),
        (
            lambda d: d["task_graph"]["dependencies"][1].update(target="z"),
            "task_graph.dependencies[1].target is 'z'; expected the name",
        ),
        (
            lambda d: d["task_graph"]["dependencies"].append(
                {"source": "b", "target": "a", "size": 0}
            ),
            "expected no cycles",
        ),
        (lambda d: d["task_graph"].update(tasks=[]), "task_graph.tasks: expected at least one"),
        (lambda d: d.pop("network"), "network is missing; expected an object"),
        (
            lambda d: d["network"]["nodes"][0].update(speed=0),
            "nodes[0].speed is 0; expected a number ab",
        ),
        (lambda d: d["network"].update(edges=[]), "network.edges: expected one from 'slow'"),
        (lambda d: d["network"].update(edges=3), "network.edges is 3; expected a list"),
        (lambda d: d["network"].update(edges=[3]), "network.edges[0] must be an object, got 3"),
    ],
)
def test_broken_files_are_named_with_record_and_field(tmp_path, change, said):
    content = document()
    change(content)
    with pytest.raises(FormatError) as caught:
        load_dagbench(write(tmp_path, content))
    assert str(caught.value).startswith(f"{tmp_path / 'graph.json'}: ")
    assert said in str(caught.value)


def test_a_file_that_is_not_json_is_named_with_its_line(tmp_path):
    (tmp_path / "graph.json").write_text('{"task_graph":\n {"tasks": [}')
    with pytest.raises(FormatError, match=r"graph\.json:2: not JSON"):
        load_dagbench(tmp_path)


def test_the_benchmark_is_read():
    folder = data_dir("dagbench")
    sizes = {}
    for name in (
        "ml.gpt2_tensor_sh12_prefill",
        "synthetic.one_task",
        "synthetic.random_medium_comm",
    ):
        workload = load_dagbench(folder / name)
        whole = json.loads((folder / name / "graph.json").read_text())
        costs = {task["name"]: task["cost"] for task in whole["task_graph"]["tasks"]}
        speed = whole["network"]["nodes"][0]["speed"]
        expected = [costs[op] / speed for op in workload.model.op_names]
        np.testing.assert_allclose(workload.op_seconds[:, 0], expected, rtol=1e-6)
        sizes[name] = len(expected)
    assert sizes["ml.gpt2_tensor_sh12_prefill"] == 327
