"""Several devices from the command line: a run's folder, its check, and mistakes in the input."""

from __future__ import annotations

import importlib.util
import json
import shutil

import jax
import numpy as np
import pytest

import egx
from egx import api
from egx.cli import main
from egx.comparison import Comparison
from egx.errors import SearchError
from egx.formats.costgraph import load_costgraph, save_costgraph
from egx.formats.native import save_json
from egx.graph.generators import regal_synthetic
from egx.hardware.machines import regal_hardware
from egx.lookups import RUN_BY
from egx.policies import POLICIES
from egx.policies.distributions import greedy, to_decisions
from egx.policies.loading import PRETRAINED
from egx.policies.regal_net import RegalPolicy
from egx.report.units import format_bytes, format_seconds
from egx.training.identity import problem_identity
from egx.training.result import Result
from tests.report.execution_toys import fork

RUN = [
    *("optimize", "small.pbtxt", "--problem", "execution", "--hardware", "regal"),
    *("--devices", "3", "--budget", "160", "--quiet", "--bound-seconds", "0"),
]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A whole run: (folder in which it ran, stdout)."""
    folder = tmp_path_factory.mktemp("run")
    model = regal_synthetic(np.random.default_rng(0), "barabasi_albert", 12)
    save_costgraph(model, folder / "small.pbtxt")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("COLUMNS", "200")
        assert main([*RUN, "--out", "out"]) == 0
    return folder


@pytest.fixture
def here(finished, tmp_path, monkeypatch):
    """A copy of the run's folder to work in."""
    shutil.copytree(finished, tmp_path / "copy")
    monkeypatch.chdir(tmp_path / "copy")
    monkeypatch.setenv("COLUMNS", "200")
    return tmp_path / "copy"


def failed(capsys, *arguments: str) -> str:
    """The one line on stderr of a command that must end with 2."""
    assert main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("egx: ")
    return line


def test_a_run_writes_its_folder(here):
    files = {path.name for path in (here / "out").iterdir()}
    expected = {"plan.json", "result.json", "report.md", "trace.json", "gantt.png"}
    assert files == expected | {"convergence.png"}
    result = Result.load(here / "out" / "result.json")
    assert result.evaluations == 160
    assert result.bound is not None
    plan = json.loads((here / "out" / "plan.json").read_text())
    assert plan["problem"] == "execution"
    assert plan["measured"] is True
    assert len(plan["ops"]) == 12
    assert plan["bound"] <= plan["cost"] <= plan["reference_cost"]
    assert len(plan["peak_bytes"]) == 3
    trace = json.loads((here / "out" / "trace.json").read_text())
    assert sum(event["ph"] == "X" for event in trace["traceEvents"]) == 12 + len(plan["transfers"])
    report = (here / "out" / "report.md").read_text()
    for word in ("reference", "heft", "found", "lower bound", "device2", "![gantt](gantt.png)"):
        assert word in report


def test_a_plan_is_checked_against_its_file(here, capsys):
    assert main(["check", "out/plan.json"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("out/plan.json: valid, makespan ")
    assert "device2: at most" in printed
    plan = json.loads((here / "out" / "plan.json").read_text())
    plan["makespan_s"] *= 0.5
    (here / "out" / "plan.json").write_text(json.dumps(plan))
    assert main(["check", "out/plan.json"]) == 1
    assert "makespan_s: the plan claims" in capsys.readouterr().out


def test_a_plan_is_checked_by_the_finer_model(here, capsys):
    plan = json.loads((here / "out" / "plan.json").read_text())
    assert main(["check", "out/plan.json", "--fine"]) == 0
    lines = capsys.readouterr().out.splitlines()
    # Transfers and launches take no time here: there is nothing that a finer model could add.
    takes = format_seconds(plan["makespan_s"])
    assert lines[4] == f"by the finer cost model: fits, makespan {takes} (above: {takes})"
    for line, peak in zip(lines[5:], plan["peak_bytes_over_time"], strict=True):
        assert line.endswith(f": at most {format_bytes(peak)} over time")
    other = {"format": plan["format"], "version": plan["version"]}
    (here / "memory.json").write_text(json.dumps(other))
    line = failed(capsys, "check", "memory.json", "--fine")
    assert line == "egx: memory.json: --fine is of plans on several devices"


def test_a_second_run_is_the_same_and_another_is_refused(here, capsys):
    before = (here / "out" / "plan.json").read_text()
    assert main([*RUN, "--out", "out", "--pictures", "none"]) == 0
    capsys.readouterr()
    assert (here / "out" / "plan.json").read_text() == before
    line = failed(capsys, *RUN, "--out", "out", "--objective", "peak_memory")
    assert "out: holds another run" in line
    line = failed(capsys, *RUN, "--out", "out", "--link-bandwidth", "1 MB/s")
    assert "out: holds another run" in line


def test_compare_shows_searchers_on_several_devices(here, monkeypatch, capsys):
    arguments = ["compare", *RUN[1:], "--algorithms", "random,brkga_seeded", "--seeds", "2"]
    arguments += ["--objective", "peak_memory", "--out", "side"]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    headline, *table = printed.splitlines()
    assert "regal, 3 devices" in headline
    assert "peak memory, static order" in headline
    for word in ("brkga_seeded", "random", "reference", "319 B"):
        assert any(word in line for line in table), word
    assert {path.name for path in (here / "side").iterdir()} == {
        "comparison.json",
        "report.md",
        "convergence.png",
    }
    kept = Comparison.load(here / "side" / "comparison.json")
    assert {name: len(group) for name, group in kept.results.items()} == {
        "random": 2,
        "brkga_seeded": 2,
    }
    first = kept.results["random"][0]
    assert first.evaluations == 160
    assert first.provenance["problem"]["objective"] == "peak_memory"
    assert kept.bound <= kept.best.cost <= kept.reference_cost
    assert min(result.cost for result in kept.results["brkga_seeded"]) == kept.best.cost

    line = failed(capsys, *arguments, "--link-bandwidth", "1 MB/s")
    assert "side: holds another run" in line
    line = failed(capsys, "compare", "small.pbtxt", "--objective", "makespan")
    assert line == "egx: --objective is of --problem execution"
    line = failed(capsys, "compare", "small.pbtxt", "--devices", "2")
    assert line == "egx: --devices is of --problem execution"

    # Without a list: searchers that suit several devices, and a solver if there is time for one.
    seen = []
    monkeypatch.setattr(api, "compare", lambda problem, names, **given: seen.append(names) or kept)
    assert main(["compare", *RUN[1:], "--out", "other", "--pictures", "none"]) == 0
    assert seen == [["regal_plus", "brkga_seeded", "brkga", "local", "annealing", "random"]]
    assert {path.name for path in (here / "other").iterdir()} == {"comparison.json", "report.md"}


def test_options_reach_the_problem(here, monkeypatch, capsys):
    """What `optimize` gets to search, without searching."""
    seen = []

    class Stop(Exception):
        pass

    def stop(problem, algorithm, **given):
        seen.append((problem, algorithm, given))
        raise Stop

    monkeypatch.setattr(api, "optimize", stop)
    save_json(fork(), here / "fork.json")
    arguments = [
        *("optimize", "fork.json", "--problem", "execution", "--hardware", "nnpi"),
        *("--devices", "4", "--objective", "peak_memory", "--order", "runtime"),
        *("--decide", "priority,device", "--memory", "1 KiB", "--link-bandwidth", "7 GB/s"),
        *("--link-latency", "3 us", "--algorithm", "random"),
    ]
    with pytest.raises(Stop):
        main(arguments)
    problem, algorithm, given = seen.pop()
    assert algorithm == "random"
    assert (problem.objective, problem.order) == ("peak_memory", "runtime")
    assert problem.decide == ("device", "priority")
    assert problem.hardware.level_bytes[:, 0].tolist() == [1024.0] * 4
    assert float(problem.hardware.link_bytes_per_s[0, 3]) == pytest.approx(7e9)
    assert float(problem.hardware.link_latency_s[3, 0]) == pytest.approx(3e-6)
    assert given["options"] == {}
    headline = capsys.readouterr().out
    assert "fork on 4 x nnpi (4 devices of 1 KiB, links 7 GB/s), peak memory, runtime" in headline
    # Without a machine or an algorithm: two A100, and the search that knows the heuristics.
    with pytest.raises(Stop):
        main(["optimize", "fork.json", "--problem", "execution", "--devices", "2"])
    problem, algorithm, given = seen.pop()
    assert problem.hardware.name == "2 x a100"
    assert (algorithm, given["options"]) == ("regal_plus", {})
    # A policy is run by the searcher that it was trained for, whatever the default.
    RegalPolicy((("device", "op", 2), ("priority", "op", 1)), width=4, rounds=1,
                key=jax.random.key(0)).save(here / "trained" / "policy.npz")  # fmt: skip
    with pytest.raises(Stop):
        main(["optimize", "fork.json", "--problem", "execution", "--policy", "trained"])
    _, algorithm, given = seen.pop()
    assert algorithm == "regal"
    assert isinstance(given["policy"], RegalPolicy)
    assert set(RUN_BY) == set(POLICIES.values())
    assert set(RUN_BY.values()) <= set(egx.searches())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--decide", "device,colour"), "decide names ['colour']; possible are"),
        (("--devices", "0"), "devices must be a whole number of 1 or more, got 0"),
        (("--memory", "much"), "--memory: expected a capacity such as '24 MiB', got 'much'"),
        (("--memory", "0 B"), "--memory: expected a capacity above 0, got '0 B'"),
        (("--link-latency", "-1 us"), "--link-latency: expected a time of 0 or more"),
        (("--link-bandwidth", "0 B/s"), "--link-bandwidth: expected a bandwidth above 0"),
        (("--order", "runtime", "--transfers", "blocking"), "transfers='blocking' is refused"),
        (("--prefetch", "2"), "--prefetch is of --problem memory_placement"),
        (("--algorithm", "brgka"), "no searcher is named 'brgka'; did you mean brkga"),
        (("--policy", "nowhere.npz"), "nowhere.npz: cannot be read"),
    ],
)
def test_mistakes_are_one_line(here, capsys, arguments, said):
    line = failed(capsys, *RUN, "--out", "other", *arguments)
    assert said in line
    assert not (here / "other").exists()


def test_memory_placement_refuses_what_is_not_its_own(here, capsys):
    save_json(fork(), here / "fork.json")
    line = failed(capsys, "optimize", "fork.json", "--objective", "makespan")
    assert line == "egx: --objective is of --problem execution"


def test_a_broken_model_is_named_with_its_line(here, capsys):
    (here / "small.pbtxt").write_text('node {\n  name: "a"\n  compute_cost: fast\n}\n')
    line = failed(capsys, *RUN, "--out", "other")
    assert "small.pbtxt:3: node 'a' (id 0): compute_cost: expected a whole number" in line


def test_training_gets_problems_and_writes_a_policy(here, monkeypatch, capsys):
    seen = []

    class Policy:
        def save(self, path):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"policy")

    def train(problems, algorithm, **given):
        seen.append((problems, algorithm, given))
        return Policy()

    monkeypatch.setattr(api, "train", train)
    common = ["train", "--steps", "7", "--seed", "3", "--quiet"]
    assert (
        main([*common, "--graphs", "2", "--variants", "2", "--out", "policy", "--objective",
              "peak_memory"])
        == 0
    )  # fmt: skip
    problems, algorithm, given = seen.pop()
    assert algorithm == "regal"
    assert (given["steps"], given["seed"], given["resume"]) == (7, 3, False)
    assert len(problems) == 4
    assert {problem.objective for problem in problems} == {"peak_memory"}
    assert {problem.hardware.num_devices for problem in problems} == {2}
    # Of one size, so that one program serves all.
    assert len({problem.graph.num_ops for problem in problems}) == 1
    topologies = [len(problem.model.value.op_names) for problem in problems]
    assert topologies[0] == topologies[1]
    assert len({problem.model.value.digest for problem in problems}) == 4
    assert "use it with: egx optimize SOURCE --problem execution --policy policy" in (
        capsys.readouterr().out
    )
    line = failed(capsys, *common, "--out", "policy")
    assert "policy: holds a policy; choose another --out" in line

    # A folder of models, measured ones with their seconds.
    (here / "data").mkdir()
    shutil.copy("small.pbtxt", here / "data" / "a.pbtxt")
    arguments = ("--data", "data", "--hardware", "regal", "--devices", "3", "--out", "second")
    assert main([*common, *arguments]) == 0
    ((problem,), _, _) = seen.pop()
    assert problem.is_measured
    assert problem.hardware.num_devices == 3
    for option in ("steps", "seed"):
        line = failed(capsys, "train", f"--{option}", "-1", "--out", "third")
        assert f"{option} must be 0 to" in line
    line = failed(capsys, *common, "--data", "nowhere", "--out", "third")
    assert "--data: expected 'synthetic' or a folder, got 'nowhere'" in line
    (here / "data" / "b.pbtxt").write_text("node {")
    line = failed(capsys, *common, "--data", "data", "--out", "third")
    assert "data/b.pbtxt:1: expected '}'" in line


def test_a_trained_policy_is_carried_to_another_graph(here, capsys):
    (here / "data").mkdir()
    shutil.copy("small.pbtxt", here / "data" / "seen.pbtxt")
    tiny = {
        "warm_steps": 1, "warm_actions": 8, "problems": 1, "actions": 2, "seeds": 1, "budget": 80,
        "network.rounds": 1, "network.width": 4, "validation.seeds": 1, "validation.budget": 80,
    }  # fmt: skip
    options = [word for name, value in tiny.items() for word in ("--option", f"{name}={value}")]
    machine = ("--hardware", "regal", "--devices", "3")
    arguments = ["--data", "data", *machine, "--steps", "1", *options, "--out", "policy"]
    assert main(["train", *arguments, "--quiet"]) == 0
    save_costgraph(regal_synthetic(np.random.default_rng(1), "erdos_renyi", 14), "unseen.pbtxt")
    command = ["optimize", "unseen.pbtxt", "--problem", "execution", *machine, "--budget", "160"]
    command += ["--bound-seconds", "0", "--quiet", "--policy"]
    assert main([*command, "policy", "--out", "found"]) == 0
    assert "regal, seed 0: 160 evaluations" in capsys.readouterr().out
    found = json.loads((here / "found" / "result.json").read_text())
    workload = load_costgraph(here / "unseen.pbtxt")
    problem = egx.Execution(
        workload.model, regal_hardware(3), op_seconds=workload.seconds_on(regal_hardware(3))
    )
    policy = egx.load_policy(here / "policy")
    again = egx.optimize(problem, "regal", budget=160, policy=policy)
    assert found["cost"] == again.cost
    other = str(PRETRAINED / "regal_makespan_2.npz")
    line = failed(capsys, *command, other, "--out", "other")
    assert "proposes device (2 keys per op)" in line
    assert "the problem decides device (3 keys per op)" in line


def test_a_network_of_go_is_carried_to_another_number_of_devices(here, capsys):
    (here / "data").mkdir()
    shutil.copy("small.pbtxt", here / "data" / "seen.pbtxt")
    tiny = {
        "problems": 1, "samples": 2, "network.width": 4, "network.rounds": 1, "network.layers": 0,
        "network.attention_heads": 1, "network.segment": 8, "network.passes": 1,
    }  # fmt: skip
    options = [word for name, value in tiny.items() for word in ("--option", f"{name}={value}")]
    arguments = ["--data", "data", "--hardware", "regal", "--devices", "2", "--steps", "1"]
    arguments += ["--algorithm", "go", "--out", "policy", "--quiet", *options]
    assert main(["train", *arguments]) == 0
    # It knows what it was trained on, and nothing else.
    policy = egx.load_policy(here / "policy")
    assert policy.tasks == ("device", "priority")
    command = ["optimize", "small.pbtxt", "--problem", "execution", "--hardware", "regal"]
    command += ["--devices", "3", "--budget", "8", "--bound-seconds", "0", "--quiet"]
    command += ["--option", "batch=4", "--option", "finetune=false", "--policy", "policy"]
    assert main([*command, "--out", "found"]) == 0
    assert "go, seed 0: 8 evaluations" in capsys.readouterr().out
    found = json.loads((here / "found" / "result.json").read_text())
    machine = regal_hardware(3)
    workload = load_costgraph(here / "small.pbtxt")
    problem = egx.Execution(workload.model, machine, op_seconds=workload.seconds_on(machine))
    logits = policy(problem)
    choices = {name: value.shape[-1] for name, value in logits.items()}
    likeliest = to_decisions(problem.heads, greedy(logits), choices)
    assert found["cost"] <= float(problem.evaluate(likeliest).cost)
    fused = egx.Execution(workload.model, machine, decide=("fusion", "device", "priority"))
    with pytest.raises(SearchError, match="decides device, priority, but the problem asks for fus"):
        egx.optimize(fused, "go", budget=8, policy=policy)


def test_searches_of_measured_seconds_differ_by_them():
    model = fork()
    hardware = egx.hardware.regal_hardware(2)
    one = egx.Execution(model, hardware, op_seconds=np.ones((4, 2)))
    two = egx.Execution(model, hardware, op_seconds=2 * np.ones((4, 2)))
    assert problem_identity(one) != problem_identity(two)
    assert problem_identity(one) == problem_identity(
        egx.Execution(model, hardware, op_seconds=np.ones((4, 2)))
    )


def test_a_solver_that_cannot_is_left_out_and_says_why(here, capsys):
    """More literals than CP-SAT is asked to hold, or no CP-SAT: the cheap bound stands."""
    large = regal_synthetic(np.random.default_rng(1), "barabasi_albert", 150)
    save_costgraph(large, here / "large.pbtxt")
    arguments = ["optimize", "large.pbtxt", "--problem", "execution", "--hardware", "regal"]
    arguments += ["--budget", "80", "--bound-seconds", "5", "--pictures", "none", "--out", "o"]
    assert main([*arguments, "--objective", "peak_memory"]) == 0
    said = capsys.readouterr()
    assert "not bounded by a solver: " in said.err
    missing = importlib.util.find_spec("ortools") is None
    assert ("pip install 'egx[exact]'" if missing else "60000") in said.err
    assert Result.load(here / "o" / "result.json").bound_status == "bound only"
