import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest
from report_toys import KIB, maps, toy_hardware, toy_model, toy_problem

from egx.errors import FormatError
from egx.graph.builder import GraphBuilder
from egx.problems.memory_placement import MemoryPlacement
from egx.report.check import MAX_FAULTS, check_plan
from egx.report.plan import make_plan
from egx.report.plan_file import NUMBERS, read_plan, write_plan


@pytest.fixture
def written(tmp_path):
    """(path, its JSON, the plan) of a valid plan."""
    problem = toy_problem()
    plan = make_plan(problem, maps(problem), source="toy", options={"dims": {"batch": 1}})
    path = tmp_path / "plan.json"
    write_plan(plan, path)
    return path, json.loads(path.read_text()), plan


def edit(path, data, where, value):
    """Writes `data` with the entry at the path `where` replaced (or removed, for `...`)."""
    target = data
    for key in where[:-1]:
        target = target[key]
    if value is ...:
        del target[where[-1]]
    else:
        target[where[-1]] = value
    path.write_text(json.dumps(data))


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("pad_to", [None, (9, 8, 12)])
def test_round_trip(tmp_path, prefetch, pad_to):
    problem = toy_problem(prefetch, pad_to)
    plan = make_plan(problem, maps(problem))
    write_plan(plan, tmp_path / "plan.json")
    again = read_plan(tmp_path / "plan.json")
    for field in dataclasses.fields(plan):
        if field.name != "hardware":
            assert getattr(again, field.name) == getattr(plan, field.name), field.name
    for name in NUMBERS:
        np.testing.assert_array_equal(
            np.asarray(getattr(again.hardware, name)), np.asarray(getattr(plan.hardware, name))
        )
    assert again.hardware.level_names == ("DRAM", "LLC", "SRAM")
    decisions = again.decisions(problem.graph)
    outcome = problem.evaluate(decisions)
    assert bool(outcome.feasible)
    assert float(outcome.latency_s) == plan.latency_s == again.latency_s
    # A padded graph has the same digest: the plan holds for it as well.
    assert check_plan(again, toy_model()).ok
    assert check_plan(again, toy_model((16, 16, 16))).ok


def test_records_say_what_lies_where(written):
    _, data, _ = written
    assert [r["op"] for r in data["weights"]] == ["a", "c[1]", "d"]
    assert data["weights"][0] == {
        "op": "a", "op_index": 0, "op_type": "conv", "level": "LLC", "level_index": 1,
        "bytes": 4 * KIB, "first_step": 0, "last_step": 3,
    }  # fmt: skip
    assert data["tensors"][1] == {
        "op": "b", "op_index": 1, "op_type": "pool", "tensor": "b", "level": "SRAM",
        "level_index": 2, "bytes": KIB, "first_step": 1, "last_step": 2,
    }  # fmt: skip
    assert data["hardware"]["level_bytes"] == [["inf", 8192.0, 4096.0]]
    assert data["hardware"]["read_bytes_per_s"] == [[1e9, 1e10, 1e11]]
    assert data["model"]["options"] == {"dims": {"batch": 1}}


def test_a_record_stands_on_one_line(written):
    path, data, _ = written
    lines = path.read_text().splitlines()
    assert sum('"first_step"' in line for line in lines) == len(data["weights"] + data["tensors"])


def test_a_valid_plan_passes(written):
    _, _, plan = written
    outcome = check_plan(plan, toy_model())
    assert outcome.faults == ()
    assert outcome.latency_s == plan.latency_s
    np.testing.assert_array_equal(outcome.peak_bytes, [5 * KIB, 4 * KIB, 4 * KIB])


def test_an_invalid_map_is_not_written():
    problem = toy_problem()
    everything = jnp.full(4, 2, jnp.int32)
    with pytest.raises(FormatError, match="does not fit"):
        make_plan(problem, {"weights": everything, "activations": everything})


def test_outputs_of_one_op_share_a_level():
    builder = GraphBuilder("split")
    first, second = builder.op(
        "split", kind="shape", op_type="split", inputs=[], output_bytes=[64, 64], flops=0
    )
    builder.output(first)
    builder.output(second)
    model = builder.build_model()
    problem = MemoryPlacement(model, toy_hardware())
    plan = make_plan(problem, problem.reference)
    assert [t.tensor for t in plan.tensors] == ["split:0", "split:1"]
    assert check_plan(plan, model).ok
    moved = dataclasses.replace(plan.tensors[1], level="DRAM", level_index=0)
    torn = dataclasses.replace(plan, tensors=(plan.tensors[0], moved))
    assert any("one level" in fault for fault in check_plan(torn, model).faults)


@pytest.mark.parametrize(
    ("where", "value", "message"),
    [
        (["format"], "onnx", "not an egx plan file"),
        (["version"], 99, "version 99"),
        (["problem"], "execution", "problem is 'execution'; expected 'memory placement'"),
        (["latency_s"], ..., "latency_s is missing; expected a number"),
        (["latency_s"], "fast", "latency_s is 'fast'; expected a number"),
        (["latency_s"], float("nan"), "latency_s is nan"),
        (["prefetch"], -1, "prefetch is -1; expected a whole number, 0 or more"),
        (["prefetch"], True, "prefetch is True"),
        (["bound_s"], 1.0, "bound_s is 1.0; expected a number with bound_status"),
        (["bound_status"], "guessed", "bound_status is 'guessed'"),
        (["surprise"], 1, "surprise is no field of this file"),
        (["model"], [], "model is []; expected an object"),
        (["model", "digest"], 5, "model.digest is 5; expected text"),
        (["model", "ops"], 0, "model.ops is 0; expected a whole number, 1 or more"),
        (["hardware", "launch_s"], ..., "hardware.launch_s is missing"),
        (["hardware", "level_bytes"], [[1.0, 2.0], [3.0]], "hardware.level_bytes is"),
        (["hardware", "flops_per_s"], [[1.0]], "hardware: flops_per_s must have shape"),
        (["hardware", "launch_s"], [-1.0], "hardware: launch_s must be 0 or more"),
        (["hardware", "levels"], ["DRAM", "LLC"], "hardware.levels is"),
        (["hardware", "levels"], ["A", "A", "B"], "hardware.levels is"),
        (["hardware", "devices"], [], "hardware.devices is []"),
        (["weights"], {}, "weights is {}; expected a list of records"),
        (["weights", 1], 7, r"weights[1] must be an object, got 7"),
        (["weights", 1, "level"], "SRAM", "weights[1].level is 'SRAM'; expected 'DRAM'"),
        (["weights", 1, "level_index"], 3, "weights[1].level_index is 3; expected"),
        (["weights", 1, "bytes"], 1.5, "weights[1].bytes is 1.5"),
        (["weights", 1, "op_index"], 4, "weights[1].op_index is 4"),
        (["weights", 1, "tensor"], "x", "weights[1].tensor is no field"),
        (["tensors", 0, "tensor"], ..., "tensors[0].tensor is missing"),
        (["tensors", 2, "last_step"], 1, "tensors[2].last_step is 1"),
    ],
)
def test_edits_that_make_no_sense_name_their_field(written, where, value, message):
    path, data, _ = written
    edit(path, data, where, value)
    with pytest.raises(FormatError) as error:
        read_plan(path)
    assert message in str(error.value)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("keep", [0, 1, 40, 700, -3])
def test_truncated_files(written, keep):
    path, _, _ = written
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(FormatError, match=r"plan\.json"):
        read_plan(path)


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"[]", b"null", b"3"])
def test_foreign_files(tmp_path, content):
    (tmp_path / "plan.json").write_bytes(content)
    with pytest.raises(FormatError, match=r"plan\.json"):
        read_plan(tmp_path / "plan.json")


def test_missing_file(tmp_path):
    with pytest.raises(FormatError, match="cannot be read"):
        read_plan(tmp_path / "absent.json")


@pytest.mark.parametrize(
    ("where", "value", "fault"),
    [
        (["latency_s"], 1e-9, "latency_s: the plan claims 1.000 ns, the simulator says"),
        (["reference_s"], 1.0, "reference_s: the plan claims 1.000 s"),
        (["first_fit_s"], 1.0, "first_fit_s: the plan claims 1.000 s"),
        (["prefetch"], 1, "latency_s: the plan claims"),
        (["model", "digest"], "0" * 64, "model: the plan was made for digest 0000000000000000"),
        (["model", "ops"], 5, "model.ops: the plan has 5, the model 4"),
        (["model", "tensors"], 5, "model.tensors: the plan has 5, the model 4"),
        (["tensors"], [], "tensors: the plan has 0, the model 4"),
        (["weights", 0, "bytes"], 1, "weights of 'a': bytes is 1, the model has 4096"),
        (["weights", 0, "op"], "z", "weights of 'z': op is 'z', the model has 'a'"),
        (["weights", 0, "op_type"], "z", "weights of 'a': op_type is 'z'"),
        (["weights", 0, "first_step"], 1, "weights of 'a': first_step is 1, the model has 0"),
        (["weights", 0], ..., "weights of 'a' are missing"),
        (["tensors", 0, "last_step"], 3, "tensor 'a': last_step is 3, the model has 2"),
        (["tensors", 0, "tensor"], "z", "tensor 'z': expected 'a' of op 0 in this place"),
    ],
)
def test_claims_that_do_not_hold(written, where, value, fault):
    path, data, _ = written
    edit(path, data, where, value)
    outcome = check_plan(read_plan(path), toy_model())
    assert not outcome.ok
    assert any(fault in text for text in outcome.faults), outcome.faults


def test_weights_placed_twice(written):
    path, data, _ = written
    edit(path, data, ["weights"], data["weights"] + data["weights"][:1])
    faults = check_plan(read_plan(path), toy_model()).faults
    assert "weights of 'a' are placed twice" in faults


def test_overfull_levels_are_named_with_their_step(written):
    path, data, _ = written
    data["weights"][0].update(level="SRAM", level_index=2)
    path.write_text(json.dumps(data))
    faults = check_plan(read_plan(path), toy_model()).faults
    # 4 KiB of weights beside 2, 3, 4 and 2 KiB of activations in 4 KiB.
    assert faults[0] == (
        "capacity: SRAM holds 4 KiB, but is overfull at 4 of 4 steps, first at step 0, "
        "most at step 2 with 8 KiB"
    )


def test_an_impossible_bound_is_a_fault(written):
    _, _, plan = written
    lying = dataclasses.replace(plan, bound_s=2 * plan.latency_s, bound_status="proved")
    assert any(fault.startswith("bound_s") for fault in check_plan(lying, toy_model()).faults)


def test_the_list_of_faults_stays_readable():
    builder = GraphBuilder("many")
    for k in range(3 * MAX_FAULTS):
        builder.op(f"op{k}", kind="shape", op_type="x", inputs=[], output_bytes=[1], flops=0)
    model = builder.build_model()
    problem = MemoryPlacement(model, toy_hardware())
    plan = make_plan(problem, problem.reference)
    wrong = tuple(dataclasses.replace(t, bytes=5) for t in plan.tensors)
    faults = check_plan(dataclasses.replace(plan, tensors=wrong), model).faults
    assert len(faults) == MAX_FAULTS + 1
    assert faults[-1] == f"and {2 * MAX_FAULTS} more"
