import json
import os
import shutil
import signal
import subprocess
import sys

import pytest

import egx
from egx import commands
from egx.cli import main
from egx.formats.native import save_json
from egx.graph.builder import GraphBuilder
from egx.training.result import Result

KIB = 1024
MACHINE = """
name = "tiny"
[[device]]
name = "core"
launch = "1 us"
[[device.level]]
name = "DRAM"
capacity = "1 GiB"
bandwidth = "1 GB/s"
[[device.level]]
name = "SRAM"
capacity = "4 KiB"
bandwidth = "100 GB/s"
[device.rates]
other = { rate = "1 TOPS" }
"""


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """A folder with a model, tiny.json, and a machine, tiny.toml."""
    folder = tmp_path_factory.mktemp("tiny")
    builder = GraphBuilder("tiny")
    inputs = []
    for k in range(4):
        inputs = builder.op(
            f"op{k}", kind="contraction", op_type="conv", inputs=inputs, output_bytes=[KIB],
            flops=1e6, weight_bytes=2 * KIB,
        )  # fmt: skip
    builder.output(inputs[0])
    save_json(builder.build_model(), folder / "tiny.json")
    (folder / "tiny.toml").write_text(MACHINE)
    return folder


@pytest.fixture
def here(tiny, tmp_path, monkeypatch):
    """The working folder of a test, with both files in it."""
    for name in ("tiny.json", "tiny.toml"):
        shutil.copy(tiny / name, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


RUN = [
    *("optimize", "tiny.json", "--hardware", "tiny.toml", "--algorithm", "random"),
    *("--budget", "64", "--pictures", "none", "--bound-seconds", "0"),
]


def failed(capsys, *arguments: str) -> str:
    """The one line on stderr of a command that must end with 2 and print nothing else."""
    assert main(arguments) == 2
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert line.startswith("egx: ")
    return line


@pytest.fixture(scope="session")
def finished(tiny, tmp_path_factory):
    """A whole run with pictures and bound: (folder, stdout)."""
    folder = tmp_path_factory.mktemp("run") / "out"
    arguments = ["optimize", str(tiny / "tiny.json"), "--hardware", str(tiny / "tiny.toml")]
    arguments += ["--algorithm", "random", "--budget", "64", "--bound-seconds", "10"]
    with pytest.MonkeyPatch.context() as patch:
        lines = []
        patch.setattr("sys.stdout.write", lines.append, raising=False)
        assert main([*arguments, "--out", str(folder)]) == 0
    return folder, "".join(lines)


def test_optimize_writes_what_the_readme_promises(finished):
    folder, _ = finished
    pictures = {"convergence", "levels", "transition", "occupancy", "latency"}
    expected = {"plan.json", "result.json", "report.md", *(f"{name}.png" for name in pictures)}
    assert {path.name for path in folder.iterdir()} == expected
    for name in pictures:
        assert (folder / f"{name}.png").read_bytes()[:4] == b"\x89PNG"
        assert f"({name}.png)" in (folder / "report.md").read_text()
    result = Result.load(folder / "result.json")
    assert result.evaluations == 64
    assert result.bound_status == "proved"


def test_optimize_prints_every_plan_beside_the_optimum(finished):
    _, text = finished
    for word in ("native", "first fit", "found", "optimum (proved)", "speed-up", "moved in"):
        assert word in text, word


def test_check_of_what_optimize_wrote(finished, capsys):
    folder, _ = finished
    assert main(["check", str(folder / "plan.json")]) == 0
    assert "valid" in capsys.readouterr().out


def test_check_finds_a_wrong_claim(finished, tmp_path, capsys):
    folder, _ = finished
    data = json.loads((folder / "plan.json").read_text())
    data["latency_s"] /= 2
    (tmp_path / "plan.json").write_text(json.dumps(data))
    assert main(["check", str(tmp_path / "plan.json")]) == 1
    assert "latency_s: the plan claims" in capsys.readouterr().out


def test_check_against_another_model(finished, capsys):
    folder, _ = finished
    assert main(["check", str(folder / "plan.json"), "--source", "resnet50"]) == 1
    assert "made for digest" in capsys.readouterr().out


def test_check_says_when_the_model_is_gone(finished, tmp_path, capsys):
    folder, _ = finished
    data = json.loads((folder / "plan.json").read_text())
    data["model"]["source"] = "gone.json"
    (tmp_path / "plan.json").write_text(json.dumps(data))
    line = failed(capsys, "check", str(tmp_path / "plan.json"))
    assert "gone.json" in line
    assert "--source" in line
    (tmp_path / "gone.json").write_bytes(b"")
    assert "gone.json" in failed(capsys, "check", str(tmp_path / "plan.json"))


def test_check_finds_the_model_beside_the_plan(here, capsys):
    assert main([*RUN, "--quiet", "--out", "out"]) == 0
    data = json.loads((here / "out" / "plan.json").read_text())
    assert data["model"]["source"] == "tiny.json"
    (here / "elsewhere").mkdir()
    shutil.move(here / "tiny.json", here / "elsewhere" / "tiny.json")
    shutil.move(here / "out" / "plan.json", here / "elsewhere" / "plan.json")
    assert main(["check", "elsewhere/plan.json"]) == 0


def test_quiet_runs_say_nothing_on_stderr(here, capsys):
    assert main([*RUN, "--quiet"]) == 0
    assert capsys.readouterr().err == ""


def test_progress_is_lines_without_a_terminal(here, capsys):
    assert main(RUN) == 0
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1].startswith("random: 64 of 64 evaluations, ")


def test_the_default_folder_gives_way_to_another_run(here, capsys):
    assert main([*RUN, "--quiet"]) == 0
    assert main([*RUN, "--quiet"]) == 0
    assert [p.name for p in (here / "egx-out").iterdir()] == ["tiny-tiny"]
    assert main([*RUN, "--quiet", "--seed", "1"]) == 0
    assert main([*RUN, "--quiet", "--prefetch", "1"]) == 0
    names = sorted(p.name for p in (here / "egx-out").iterdir())
    assert names == ["tiny-tiny", "tiny-tiny-2", "tiny-tiny-3"]
    assert Result.load(here / "egx-out/tiny-tiny/result.json").seed == 0
    assert Result.load(here / "egx-out/tiny-tiny-2/result.json").seed == 1


def test_a_named_folder_is_not_taken_from_another_run(here, capsys):
    assert main([*RUN, "--quiet", "--out", "out"]) == 0
    line = failed(capsys, *RUN, "--out", "out", "--seed", "1")
    assert "holds another run" in line
    assert Result.load(here / "out/result.json").seed == 0
    assert main([*RUN, "--quiet", "--out", "out", "--seed", "1", "--overwrite"]) == 0
    assert Result.load(here / "out/result.json").seed == 1


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"algorithm": 5}'])
def test_a_folder_with_a_damaged_result_is_left_alone(here, capsys, content):
    (here / "out").mkdir()
    (here / "out/result.json").write_text(content)
    assert "holds another run" in failed(capsys, *RUN, "--out", "out")
    assert (here / "out/result.json").read_text() == content


def test_output_that_is_a_file(here, capsys):
    (here / "out").write_text("mine")
    assert "out: is a file" in failed(capsys, *RUN, "--out", "out")
    assert (here / "out").read_text() == "mine"


def test_no_place_to_write_to_is_found_before_the_search(here, capsys, monkeypatch):
    monkeypatch.setattr(commands.api, "optimize", None)
    assert "Errno" in failed(capsys, *RUN, "--out", "tiny.json/out")
    monkeypatch.setattr(commands.os, "access", lambda path, mode: False)
    assert "out: cannot be written to" in failed(capsys, *RUN, "--out", "out")


def test_a_checkpoint_goes_on(here, capsys):
    assert main([*RUN, "--quiet", "--out", "out", "--checkpoint"]) == 0
    assert (here / "out/checkpoint").is_dir()
    more = [*RUN, "--quiet", "--out", "out", "--resume", "--budget", "128"]
    assert main(more) == 0
    assert main([*RUN, "--quiet", "--out", "whole", "--budget", "128"]) == 0
    resumed, whole = (Result.load(here / name / "result.json") for name in ("out", "whole"))
    assert resumed.evaluations == whole.evaluations == 128
    assert resumed.cost == whole.cost


def test_ctrl_c_keeps_the_best_and_writes_it(here, capsys, monkeypatch):
    plain = commands.api.optimize

    def stopped(problem, algorithm, *, progress, **more):
        def stop(report):
            raise KeyboardInterrupt

        return plain(problem, algorithm, progress=stop, **more)

    monkeypatch.setattr(commands.api, "optimize", stopped)
    assert main([*RUN, "--out", "out", "--budget", "100000"]) == 130
    result = Result.load(here / "out/result.json")
    assert result.interrupted == "ctrl-c"
    assert 0 < result.evaluations < 100000
    assert "stopped early" in capsys.readouterr().out
    monkeypatch.undo()
    assert main(["check", str(here / "out/plan.json"), "--source", str(here / "tiny.json")]) == 0


def test_what_batch_systems_send_ends_a_run_as_ctrl_c_does(here, monkeypatch):
    plain = commands.api.optimize

    def terminated(problem, algorithm, *, progress, **more):
        def stop(report):
            os.kill(os.getpid(), signal.SIGTERM)

        return plain(problem, algorithm, progress=stop, **more)

    monkeypatch.setattr(commands.api, "optimize", terminated)
    assert main([*RUN, "--out", "out", "--budget", "100000"]) == 130
    assert Result.load(here / "out/result.json").interrupted == "ctrl-c"
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_ctrl_c_while_bounding_keeps_the_result(here, capsys, monkeypatch):
    def slow(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(commands.threading.Thread, "join", slow)
    bounded = [word if word != "0" else "30" for word in RUN]
    assert main([*bounded, "--out", "out"]) == 130
    assert Result.load(here / "out/result.json").evaluations == 64
    assert (here / "out/plan.json").exists()


def test_a_bad_search_is_not_handed_out(here, capsys):
    # One candidate at random is nearly always slower than native.
    assert main([*RUN, "--quiet", "--budget", "1", "--out", "out"]) == 0
    result = Result.load(here / "out/result.json")
    plan = json.loads((here / "out/plan.json").read_text())
    assert plan["latency_s"] <= result.reference_cost
    assert plan["name"] != "found"
    assert f"plan.json holds the {plan['name'].replace(' ', '-')} plan" in capsys.readouterr().out


def test_exact_is_an_algorithm(here, capsys):
    assert main([*RUN, "--quiet", "--algorithm", "exact", "--out", "out"]) == 0
    assert "exact: proved in" in capsys.readouterr().out
    assert json.loads((here / "out/plan.json").read_text())["bound_status"] == "proved"


def test_compare(here, capsys):
    arguments = ["compare", "tiny.json", "--hardware", "tiny.toml", "--algorithms", "random,exact"]
    arguments += ["--seeds", "2", "--budget", "32", "--quiet", "--bound-seconds", "0"]
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert "optimum (proved)" in text
    folder = here / "egx-out/tiny-tiny-compare"
    names = {path.name for path in folder.iterdir()}
    assert names == {"comparison.json", "report.md", "convergence.png"}
    assert len(egx.Comparison.load(folder / "comparison.json").results["random"]) == 2
    assert main(arguments) == 0
    assert main([*arguments, "--budget", "64"]) == 0
    assert (here / "egx-out/tiny-tiny-compare-2").is_dir()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["optimize", "resnet51"], ["resnet51", "resnet50"]),
        (["optimize", "absent.onnx"], ["absent.onnx"]),
        (["optimize", "tiny.toml"], ["tiny.toml", ".onnx"]),
        (["optimize", "tiny.json", "--hardware", "nnpy"], ["nnpy", "nnpi"]),
        (["optimize", "tiny.json", "--hardware", "absent.toml"], ["absent.toml"]),
        (["optimize", "tiny.json", "--algorithm", "randon"], ["randon", "random"]),
        (
            ["optimize", "tiny.json", "--algorithm", "random", "--option", "bach=3"],
            ["bach", "batch"],
        ),
        (["optimize", "tiny.json", "--algorithm", "random", "--budget", "0"], ["budget"]),
        (["optimize", "tiny.json", "--algorithm", "random", "--seed", "-1"], ["seed"]),
        (["optimize", "tiny.json", "--prefetch", "-1"], ["prefetch"]),
        (["optimize", "tiny.json", "--dim", "batch=2"], ["dims"]),
        (["optimize", "tiny.json", "--policy", "absent.eqx"], ["absent.eqx"]),
        (["optimize", "resnet50", "--set", "bathc=2"], ["bathc"]),
        (["show", "long.json"], ["long.json", "not JSON"]),
        (["compare", "tiny.json", "--algorithms", "random,random"], ["random"]),
        (["compare", "tiny.json", "--algorithms", "random", "--seeds", "0"], ["seeds"]),
        (["check", "absent/plan.json"], ["absent/plan.json"]),
        (["check", "tiny.json"], ["tiny.json", "egx plan"]),
        (["show", "absent.json"], ["absent.json"]),
        (["hardware", "nnpy"], ["nnpy", "nnpi"]),
    ],
)
def test_mistakes_are_one_line(here, capsys, arguments, words):
    (here / "long.json").write_text('{"size": ' + "9" * 6000 + "}")
    line = failed(capsys, *arguments)
    assert all(word in line for word in words), line


@pytest.mark.parametrize(
    "arguments",
    [[], ["dance"], ["optimize"], ["optimize", "x", "--dim", "batch"],
     ["optimize", "x", "--dim", "batch=none"], ["optimize", "x", "--option", "=3"],
     ["optimize", "x", "--budget", "many"], ["optimize", "x", "--bound-seconds", "nan"],
     ["optimize", "x", "--time-limit", "inf"], ["compare", "x", "--algorithms", ","],
     ["optimize", "x", "--out", ""], ["train", "--out", ""], ["calibrate", "--out", ""]],
)  # fmt: skip
def test_usage_errors_are_argparses(arguments, capsys):
    with pytest.raises(SystemExit) as error:
        main(arguments)
    assert error.value.code == 2
    assert "usage: egx" in capsys.readouterr().err


def test_show(here, capsys):
    assert main(["show", "tiny.json"]) == 0
    text = capsys.readouterr().out
    assert "contraction" in text
    assert "8 KiB" in text


def test_listings(capsys):
    for command, words in {
        "hardware": ["nnpi", "DRAM 32 GiB"],
        "models": ["resnet50", "bert", "sequence=128"],
        "algorithms": ["random", "exact", "(default)"],
    }.items():
        assert main([command]) == 0
        text = capsys.readouterr().out
        assert all(word in text for word in words), text


def test_a_machine_with_its_sources(capsys):
    assert main(["hardware", "nnpi"]) == 0
    text = capsys.readouterr().out
    assert "67.2 GB/s" in text
    assert "WikiChip" in text


def test_version(capsys):
    with pytest.raises(SystemExit) as done:
        main(["--version"])
    assert done.value.code == 0
    assert capsys.readouterr().out.startswith("egx ")


def test_python_runs_it_too():
    done = subprocess.run(
        [sys.executable, "-m", "egx", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("egx ")


def test_values_of_options_keep_their_type():
    from egx.cli import _assignment

    assert _assignment("a=3") == ("a", 3)
    assert _assignment("a=0.5") == ("a", 0.5)
    assert _assignment("a=true") == ("a", True)
    assert _assignment("a=int8") == ("a", "int8")
    assert _assignment("a=x=y") == ("a", "x=y")
