"""Profiled workloads for accelerators and CPUs, against what their authors published."""

from __future__ import annotations

import json

import numpy as np
import pytest

import egx
from egx.errors import FormatError
from egx.formats.dnn_partitioning import device_loads, load_dnn_partitioning
from tests.data import data_dir


def document():
    def node(number, accelerator, cpu, size, **more):
        return {"id": number, "fpgaLatency": accelerator, "cpuLatency": cpu, "size": size, **more}

    return {
        "maxFPGAs": 2,
        "maxCPUs": 1,
        "maxSizePerFPGA": 1000.0,
        "nodes": [
            node(7, 2.0, 20.0, 300.0, name="last", isBackwardNode=True),
            node(3, 1.0, 10.0, 150.0, colorClass=5),
            node(5, 4.0, 40.0, 20.0),
        ],
        "edges": [
            {"sourceId": 3, "destId": 7, "cost": 0.5, "size": 100.0},
            {"sourceId": 3, "destId": 5, "cost": 0.5, "size": 100.0},
            {"sourceId": 5, "destId": 7, "cost": 0.1, "size": 20.0},
        ],
    }


def write(tmp_path, content):
    path = tmp_path / "toy.json"
    path.write_text(json.dumps(content))
    return path


def test_times_memory_and_links(tmp_path):
    workload = load_dnn_partitioning(write(tmp_path, document()))
    assert workload.model.op_names == ("node3", "node5", "last")
    np.testing.assert_allclose(
        workload.op_seconds, [[1e-3, 1e-3, 1e-2], [4e-3, 4e-3, 4e-2], [2e-3, 2e-3, 2e-2]]
    )
    graph, hardware = workload.model.graph, workload.hardware
    assert hardware is not None
    assert np.asarray(graph.tensor_units).tolist() == [100, 20]
    assert np.asarray(graph.weight_units).tolist() == [50, 0, 300]
    assert hardware.device_names == ("accelerator 0", "accelerator 1", "CPU 0")
    assert hardware.level_bytes[:, 0].tolist() == [1000.0, 1000.0, np.inf]
    # 100 bytes take 0.5 ms to the host, and twice that to another accelerator.
    rate = np.asarray(hardware.link_bytes_per_s)
    assert rate[0, 1] == pytest.approx(1e5)
    assert rate[0, 2] == pytest.approx(2e5)
    assert workload.notes["color_class"] == [5, None, None]
    assert workload.notes["backward"] == [False, False, True]
    problem = egx.execution_problem(workload)
    plan = {"device": np.array([0, 1, 0]), "priority": np.zeros(3)}
    seconds = float(problem.evaluate(plan).makespan_s)
    assert seconds == pytest.approx(1e-3 + 1e-3 + 4e-3 + 0.2e-3 + 2e-3)
    # In their throughput objective the same plan loads the first with 1 + 2 ms of work, one
    # tensor out and one in.
    np.testing.assert_allclose(
        device_loads(workload, plan["device"]), [1e-3 + 2e-3 + 0.6e-3, 4e-3 + 0.6e-3, 0]
    )


def test_other_numbers_of_devices(tmp_path):
    path = write(tmp_path, document())
    workload = egx.load_workload(path, accelerators=4, cpus=0)
    assert workload.op_seconds.shape == (3, 4)
    # All alike: the seconds hold on any number of devices.
    assert egx.execution_problem(workload, egx.hardware.regal_hardware(3)).heads["device"][1] == 3
    unlike = load_dnn_partitioning(path)
    with pytest.raises(FormatError, match=r"on 3 unlike devices, and .* has 2"):
        unlike.seconds_on(egx.hardware.regal_hardware(2))
    with pytest.raises(FormatError, match="expected 1 to 4096 devices"):
        load_dnn_partitioning(path, accelerators=0, cpus=0)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda d: d.pop("maxCPUs"), "maxCPUs is missing; expected a whole number, 0 or more"),
        (lambda d: d["nodes"][1].update(id=7), "nodes[1].id is 7; expected an id of its own"),
        (
            lambda d: d["nodes"][1].update(cpuLatency=-1),
            "nodes[1].cpuLatency is -1; expected a number",
        ),
        (
            lambda d: d["edges"][2].update(destId=8),
            "edges[2].destId is 8; expected the id of a node",
        ),
        (lambda d: d["edges"][1].update(cost=0.6), "edges[1].cost is 0.6; expected 0.5, as on"),
        (lambda d: d["edges"][2].update(destId=3), "node 3 waits for itself"),
        (lambda d: d.update(nodes=[]), "nodes: expected at least one node"),
        (lambda d: d.update(maxFPGAs=10**30), "expected 1 to 4096 devices, got 1000000000"),
        (
            lambda d: d["nodes"][2].update(supportedOnFpga=0),
            "nodes[2].supportedOnFpga is 0; expected 1, or a load with accelerators=0",
        ),
        (
            lambda d: d["nodes"][2].update(supportedOnFpga="a"),
            "nodes[2].supportedOnFpga is 'a'; expected 0 or 1",
        ),
    ],
)
def test_broken_files_are_named_with_record_and_field(tmp_path, change, said):
    content = document()
    change(content)
    path = write(tmp_path, content)
    with pytest.raises(FormatError) as caught:
        load_dnn_partitioning(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert said in str(caught.value)


def test_ops_that_no_accelerator_runs_need_none(tmp_path):
    content = document()
    content["nodes"][2]["supportedOnFpga"] = 0
    work = load_dnn_partitioning(write(tmp_path, content), accelerators=0, cpus=2)
    np.testing.assert_allclose(sorted(work.op_seconds[:, 0]), [0.01, 0.02, 0.04])


@pytest.mark.parametrize("name", ["bert24_inference", "resnet50_inference"])
def test_loads_are_those_that_the_authors_published(name):
    folder = data_dir("dnn_partitioning")
    workload = load_dnn_partitioning(folder / "throughput" / "LayerGraphs" / f"{name}.json")
    published = workload.notes["published"]
    ops = len(workload.model.op_names)
    alone = device_loads(workload, np.zeros(ops, int))
    assert alone.max() * 1e3 == pytest.approx(published["single_accelerator"], rel=1e-4)
    expert = json.loads((folder / "human_experts" / f"{name}_expert.json").read_text())
    number = {op: k for k, op in enumerate(workload.model.op_names)}
    device = np.full(ops, workload.op_seconds.shape[1] - 1)
    for d, entry in enumerate(expert["fpgas"]):
        for node in entry["nodes"]:
            device[number[f"node{node}"]] = d
    assert device_loads(workload, device).max() * 1e3 == pytest.approx(
        published["human_expert"], rel=1e-4
    )
