"""Records: one line a generation and seed, cut at the right place on resume; sinks that fail."""

from __future__ import annotations

import builtins
import json

import numpy as np
import pytest
from runs import Climber, small_problem

from egx.errors import FormatError, MissingExtraError
from egx.training import loop
from egx.training.loop import run
from egx.training.records import JsonLines, TensorBoard, WeightsAndBiases, read_records


def go(records, *, seeds=(0,), budget=30, **more):
    return run(
        Climber(), small_problem(), budget=budget, seeds=list(seeds), records=records, **more
    )


def test_lines_say_what_the_history_says(tmp_path):
    results = go(tmp_path / "a" / "run.jsonl", seeds=[3, 4])
    header, records = read_records(tmp_path / "a" / "run.jsonl")
    assert header["algorithm"] == "Climber"
    assert header["seeds"] == [3, 4]
    assert header["budget"] == 30
    assert header["reference_cost"] == results[0].reference_cost
    assert len(records) == 2 * 8
    for result in results:
        mine = [r for r in records if r["seed"] == result.seed]
        assert [r["generation"] for r in mine] == list(range(8))
        assert [r["evaluations"] for r in mine] == result.history.evaluations.tolist()
        np.testing.assert_array_equal(
            np.array([r["best_cost"] for r in mine], np.float32), result.history.best_cost
        )
        told = np.array([r["metrics"]["told"] for r in mine], np.float32)
        np.testing.assert_array_equal(told, result.history.metrics["told"])


def test_resume_drops_what_the_checkpoint_does_not_know(tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "CHUNK_SECONDS", 0.0)
    straight, cut = tmp_path / "straight.jsonl", tmp_path / "cut.jsonl"
    go(straight)

    def press(progress):
        if progress.evaluations >= 12:
            raise KeyboardInterrupt

    go(cut, checkpoint_dir=tmp_path / "c", checkpoint_every_s=0.0, progress=press)
    with cut.open("a") as file:
        # A generation after the checkpoint, and half a line, as a killed run leaves them.
        file.write(json.dumps({"generation": 3, "seed": 0, "evaluations": 16}) + '\n{"gen')
    go(cut, checkpoint_dir=tmp_path / "c", resume=True)
    untimed = [
        [{k: v for k, v in record.items() if k != "seconds"} for record in read_records(path)[1]]
        for path in (straight, cut)
    ]
    assert untimed[0] == untimed[1]


def test_a_new_run_starts_a_new_file(tmp_path):
    go(tmp_path / "r.jsonl")
    go(tmp_path / "r.jsonl", budget=8)
    assert len(read_records(tmp_path / "r.jsonl")[1]) == 2


def test_damaged_records_are_refused(tmp_path):
    path = tmp_path / "r.jsonl"
    go(path, budget=8)
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], "{", lines[1]]))
    with pytest.raises(FormatError, match="line 2: not JSON"):
        read_records(path)
    path.write_text("\n".join(lines[1:]))
    with pytest.raises(FormatError, match="first line must describe the run"):
        read_records(path)
    path.write_text("\n".join([lines[0], "[]"]))
    with pytest.raises(FormatError, match="line 2: not a record"):
        read_records(path)
    with pytest.raises(FormatError, match="cannot be read"):
        read_records(tmp_path / "absent")


class Full:
    """A sink whose disk is full, or whose server is gone, when the first records come."""

    def __init__(self, error):
        self.calls = []
        self.error = error

    def begin(self, header, generation):
        self.calls.append("begin")

    def write(self, records):
        self.calls.append("write")
        raise self.error

    def close(self):
        self.calls.append("close")


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), RuntimeError("network is down")], ids=str
)
def test_a_search_outlives_its_log(tmp_path, error):
    full = Full(error)
    with pytest.warns(UserWarning, match=f"records stop here: Full: .*{error.args[-1]}"):
        (result,) = go([full, tmp_path / "kept.jsonl"])
    assert result.evaluations == 30
    assert full.calls == ["begin", "write"]
    assert len(read_records(tmp_path / "kept.jsonl")[1]) == 8


@pytest.mark.parametrize(
    ("make", "package"),
    [(lambda: TensorBoard("x"), "tensorboardX"), (WeightsAndBiases, "wandb")],
)
def test_extras_that_are_missing_say_how_to_get_them(make, package, monkeypatch):
    real = builtins.__import__

    def absent(name, *rest):
        if name == package:
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", absent)
    with pytest.raises(MissingExtraError, match=r"pip install 'egx\[log\]'"):
        make()


def test_tensorboard_gets_a_run_per_seed(tmp_path):
    pytest.importorskip("tensorboardX")
    go(TensorBoard(tmp_path), seeds=[0, 1], budget=8)
    for seed in (0, 1):
        (events,) = (tmp_path / f"seed_{seed}").iterdir()
        assert b"best_cost" in events.read_bytes()


def test_wandb_gets_every_scalar(monkeypatch):
    import sys
    import types

    logged: list = []
    fake = types.SimpleNamespace(log=logged.append, finish=lambda: logged.append("end"))
    module = types.ModuleType("wandb")
    module.init = lambda **options: logged.append(options) or fake  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", module)
    (result,) = go(WeightsAndBiases(project="p"), budget=8)
    assert logged[0]["project"] == "p"
    assert logged[0]["config"]["algorithm"] == "Climber"
    assert logged[-1] == "end"
    assert logged[2]["seed_0/evaluations"] == 8
    assert logged[2]["seed_0/best_cost"] == result.cost


def test_a_sink_may_be_given_alone(tmp_path):
    go(JsonLines(tmp_path / "x.jsonl"), budget=4)
    assert len(read_records(tmp_path / "x.jsonl")[1]) == 1
