"""Results: files that come back whole, files that are refused, and the numbers derived."""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest
from runs import same_search

from egx.errors import FormatError
from egx.files import write_whole
from egx.training.result import History, Result


def make(**more):
    fields = {
        "decisions": {
            "weights": np.array([0, 2, 1], np.int32),
            "priority": np.array([0.0, 1.0, 0.1], np.float32),
            "fusion": np.zeros(0, np.int32),
        },
        "cost": float(np.float32(0.1)),
        "feasible": True,
        "found_at": 5,
        "reference": {"weights": np.array([1, 1, 1], np.int32)},
        "reference_cost": 0.4,
        "bound": 0.08,
        "bound_status": "proved",
        "algorithm": "climber",
        "config": {"batch": 4, "parts": {"rate": 0.5}},
        "budget": 10,
        "evaluations": 8,
        "failed_measurements": 1,
        "seed": 3,
        "seconds": 1.5,
        "compile_seconds": 0.25,
        "history": History(
            evaluations=np.array([4, 8]),
            best_cost=np.array([np.float32(0.3), np.float32(0.1)]),
            best_feasible=np.array([False, True]),
            metrics={"loss": np.array([np.nan, 2.0], np.float32)},
        ),
        "interrupted": "ctrl-c",
        "provenance": {"versions": {"egx": "1"}},
    }
    return Result(**(fields | more))


def test_save_and_load(tmp_path):
    result = make()
    result.save(tmp_path / "deep" / "result.json")
    loaded = Result.load(tmp_path / "deep" / "result.json")
    same_search(result, loaded)
    for field in dataclasses.fields(Result):
        if field.name not in ("history", "decisions", "reference"):
            assert getattr(loaded, field.name) == getattr(result, field.name), field.name
    for name, value in result.decisions.items():
        assert loaded.decisions[name].dtype == value.dtype
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["result.json"]


def test_json_is_strict_and_says_what_is_derived():
    data = json.loads(json.dumps(make().to_json(), allow_nan=False))
    assert data["speedup"] == pytest.approx(4.0)
    assert data["gap"] == pytest.approx(0.25)
    assert data["history"]["metrics"]["loss"] == [None, 2.0]


def test_derived_numbers():
    assert make(feasible=False).speedup == 0.0
    assert make(feasible=False).gap is None
    assert make(cost=0.0).speedup is None
    assert make(bound=None, bound_status=None).gap is None
    assert make(bound=0.0).gap is None
    # A float32 cost may lie a rounding below a float64 bound; that is no negative gap.
    assert make(bound=0.1 + 1e-8).gap == 0.0
    assert make().with_bound(0.05, "bound only").gap == pytest.approx(1.0)
    with pytest.raises(FormatError, match="status"):
        make().with_bound(0.05, None)


def test_text_names_what_matters():
    text = str(make())
    for part in ("climber", "0.1", "0.4", "4.000x", "proved", "8 of 10", "ctrl-c", "25.00 %"):
        assert part in text
    assert "infeasible" in str(make(feasible=False))


def test_evaluations_to():
    history = make().history
    assert history.evaluations_to(0.35) == 8  # the first entry is cheap enough but infeasible
    assert history.evaluations_to(0.05) is None
    assert len(history) == 2


def damage(data, path, value):
    *parents, last = path.split(".")
    target = data
    for part in parents:
        target = target[part]
    if value is KeyError:
        del target[last]
    else:
        target[last] = value


DAMAGES = [
    ("cost", KeyError, "'cost' is missing"),
    ("cost", "0.1", "cost must be int or float"),
    ("cost", True, "cost must be int or float"),
    ("budget", 1.5, "budget must be int"),
    ("feasible", 1, "feasible must be bool"),
    ("decisions.weights", [[1]], "list of numbers"),
    ("decisions.weights", ["a"], "list of numbers"),
    ("decisions", [], "decisions must be dict"),
    ("bound_status", "maybe", "bound_status"),
    ("bound", "x", "bound must be"),
    ("interrupted", "yes", "interrupted"),
    ("history.best_cost", [1.0], "list of 2 values"),
    ("history.best_feasible", [0, 1], "history.best_feasible must be"),
    ("history.evaluations", [1.5, 2.5], "history.evaluations must be"),
    ("history.metrics.loss", [1.0, "x"], "loss"),
    ("history", None, "history must be dict"),
    ("version", 99, "version 99; this egx reads version 1"),
    ("format", "egx plan", "not an egx result"),
]


@pytest.mark.parametrize(("path", "value", "message"), DAMAGES)
def test_damaged_files_are_refused_by_name(tmp_path, path, value, message):
    data = make().to_json()
    damage(data, path, value)
    file = tmp_path / "result.json"
    file.write_text(json.dumps(data))
    with pytest.raises(FormatError, match=message) as caught:
        Result.load(file)
    assert str(file) in str(caught.value)


@pytest.mark.parametrize("keep", [0, 1, 100, -2])
def test_truncated_files_are_refused(tmp_path, keep):
    file = tmp_path / "result.json"
    make().save(file)
    file.write_text(file.read_text()[:keep])
    with pytest.raises(FormatError, match="damaged, or not JSON"):
        Result.load(file)


def test_other_files_are_refused(tmp_path):
    with pytest.raises(FormatError, match="cannot be read"):
        Result.load(tmp_path / "absent.json")
    with pytest.raises(FormatError, match="cannot be read"):
        Result.load(tmp_path)
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(FormatError, match="damaged"):
        Result.load(tmp_path / "bytes")
    for name, content in (("deep", "[" * 100_000), ("long", "9" * 6000)):
        (tmp_path / name).write_text(content)
        with pytest.raises(FormatError, match=f"{name}: damaged, or not JSON"):
            Result.load(tmp_path / name)
    (tmp_path / "list").write_text("[1]")
    with pytest.raises(FormatError, match="not an egx result"):
        Result.load(tmp_path / "list")


def test_a_failed_write_keeps_the_old_file(tmp_path, monkeypatch):
    file = tmp_path / "file"
    write_whole(file, "old")

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_whole(file, "new")
    assert file.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_infinite_numbers_stay_out_of_files(tmp_path):
    make(seconds=math.inf).save(tmp_path / "r.json")
    with pytest.raises(FormatError, match="seconds must be"):
        Result.load(tmp_path / "r.json")
