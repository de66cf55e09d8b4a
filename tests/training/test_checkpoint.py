"""Checkpoints: bit-equal resume, even after SIGKILL; what is refused; a full disk."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from runs import Climber, Toy, chain, machine, same_search, small_problem

from egx.errors import CheckpointError
from egx.problems.memory_placement import MemoryPlacement
from egx.training import checkpoint, loop
from egx.training.checkpoint import Folder, from_arrays, to_arrays
from egx.training.loop import run


def one(folder=None, *, search=None, problem=None, budget=60, seed=0, **more):
    return run(
        search or Climber(),
        problem or small_problem(),
        budget=budget,
        seeds=[seed],
        checkpoint_dir=folder,
        checkpoint_every_s=0.0,
        **more,
    )[0]


def stop_after(evaluations):
    def press(progress):
        if progress.evaluations >= evaluations:
            raise KeyboardInterrupt

    return press


def test_trees_come_back_as_they_were():
    tree = {
        "key": jax.random.key(3),
        "old": jax.random.PRNGKey(4),
        "floats": [jnp.arange(3.0), jnp.zeros((0, 2)), np.ones(2, bool)],
        "numbers": (1, 2.5, True),
        "text": "kept as it is",
        "none": None,
    }
    arrays = to_arrays(tree)
    assert all(isinstance(a, np.ndarray) and a.size for a in arrays.values())
    blank = {
        "key": jax.random.key(0),
        "old": jax.random.PRNGKey(0),
        "floats": [jnp.zeros(3), jnp.zeros((0, 2)), np.zeros(2, bool)],
        "numbers": (0, 0.0, False),
        "text": "kept as it is",
        "none": None,
    }
    back = from_arrays(blank, arrays)
    assert jax.tree.structure(back) == jax.tree.structure(tree)
    for a, b in zip(jax.tree.leaves(back), jax.tree.leaves(tree), strict=True):
        assert type(a) is type(b)
        if isinstance(a, jax.Array):
            assert a.dtype == b.dtype
            if jax.dtypes.issubdtype(a.dtype, jax.dtypes.prng_key):
                a, b = jax.random.key_data(a), jax.random.key_data(b)
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("stop", [1, 20, 56])
def test_resume_is_bit_equal(tmp_path, stop, monkeypatch):
    monkeypatch.setattr(loop, "CHUNK_SECONDS", 0.0)
    straight = one()
    cut = one(tmp_path, progress=stop_after(stop))
    assert cut.interrupted == "ctrl-c"
    assert cut.evaluations < 60
    resumed = one(tmp_path, resume=True)
    assert resumed.interrupted is None
    same_search(straight, resumed)


def test_resume_of_a_finished_run_is_that_run(tmp_path):
    first = one(tmp_path)
    again = one(tmp_path, resume=True)
    same_search(first, again)


def test_resume_without_a_checkpoint_starts_afresh(tmp_path):
    same_search(one(), one(tmp_path / "new", resume=True))


def test_a_longer_budget_goes_on(tmp_path):
    one(tmp_path, budget=40)
    same_search(one(budget=100), one(tmp_path, budget=100, resume=True))


def test_a_generation_that_was_cut_cannot_go_on(tmp_path):
    one(tmp_path, budget=42)
    with pytest.raises(CheckpointError, match=r"spent 42 of a budget of 42 .* budget of 100"):
        one(tmp_path, budget=100, resume=True)
    same_search(one(budget=42), one(tmp_path, budget=42, resume=True))


def test_less_than_was_spent_is_refused(tmp_path):
    one(tmp_path, budget=40)
    with pytest.raises(CheckpointError, match=r"spent 40 .* budget of 20"):
        one(tmp_path, budget=20, resume=True)


def test_measured_runs_resume(tmp_path):
    calls = []

    def evaluator(decisions):
        calls.append(1)
        if calls_allowed and len(calls) > calls_allowed:
            raise KeyboardInterrupt
        if len(calls) % 5 == 0:
            raise RuntimeError
        return 1.0 + float(decisions["weights"].sum())

    calls_allowed = 0
    straight = one(evaluator=evaluator, budget=24)
    calls, calls_allowed = [], 15
    cut = one(tmp_path, evaluator=evaluator, budget=24)
    # 14 candidates were measured, but the checkpoint is of whole generations: 12.
    assert cut.evaluations == 14
    calls, calls_allowed = [1] * 13, 0
    resumed = one(tmp_path, evaluator=evaluator, budget=24, resume=True)
    assert len(calls) == 13 + 12
    same_search(straight, resumed)
    assert resumed.failed_measurements == straight.failed_measurements
    assert resumed.reference_cost == straight.reference_cost


def test_seeds_and_devices_may_share_a_checkpoint(tmp_path):
    arguments = {"budget": 40, "seeds": [1, 2], "checkpoint_every_s": 0.0}
    straight = run(Climber(), small_problem(), **arguments)
    run(
        Climber(),
        small_problem(),
        checkpoint_dir=tmp_path,
        progress=stop_after(8),
        devices=4,
        **arguments,
    )
    resumed = run(Climber(), small_problem(), checkpoint_dir=tmp_path, resume=True, **arguments)
    for a, b in zip(straight, resumed, strict=True):
        same_search(a, b)


def test_a_folder_in_use_needs_resume(tmp_path):
    one(tmp_path)
    with pytest.raises(CheckpointError, match="resume=True"):
        one(tmp_path)
    with pytest.raises(CheckpointError, match="needs a checkpoint_dir"):
        one(resume=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 1}, r"seeds: saved \[0\], now \[1\]"),
        ({"search": Climber(rate=0.3)}, "search, rate: saved 0.2, now 0.3"),
        ({"search": Climber(batch=5)}, "search, batch: saved 4, now 5"),
        ({"problem": MemoryPlacement(chain(scale=2), machine())}, "problem, graph"),
        ({"problem": MemoryPlacement(chain(), machine(30.0))}, "problem, hardware"),
        (
            {"problem": MemoryPlacement(chain(), machine(), prefetch=2)},
            "problem, prefetch: saved 0, now 2",
        ),
        ({"problem": small_problem()}, "problem, kind: saved MemoryPlacement, now Toy"),
        ({"evaluator": lambda _: 1.0}, "evaluator: saved simulator, now on the host"),
    ],
)
def test_another_run_is_refused_by_what_differs(tmp_path, change, message):
    memory = MemoryPlacement(chain(), machine())
    one(tmp_path, problem=memory, budget=8)
    with pytest.raises(CheckpointError, match="another run.*" + message) as caught:
        one(tmp_path, budget=8, resume=True, **{"problem": memory, **change})
    assert str(tmp_path) in str(caught.value)


def test_names_do_not_make_another_problem(tmp_path):
    one(tmp_path, budget=8)
    renamed = Toy(chain(name="other"))
    same_search(one(budget=8), one(tmp_path, problem=renamed, budget=8, resume=True))


def test_another_version_is_refused(tmp_path, monkeypatch):
    one(tmp_path, budget=8)
    monkeypatch.setattr(checkpoint, "package_version", lambda: "99.0")
    with pytest.raises(CheckpointError, match=r"egx: saved .*, now 99\.0"):
        one(tmp_path, budget=8, resume=True)
    monkeypatch.setattr(checkpoint, "FORMAT", 2)
    with pytest.raises(CheckpointError, match="format 1, this egx reads 2"):
        one(tmp_path, budget=8, resume=True)


# When one array cannot be read, orbax closes its loop while reads of the others still come in.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("part", ["arrays/manifest.ocdbt", "arrays/_METADATA", "data/metadata"])
def test_a_damaged_checkpoint_is_named(tmp_path, part):
    one(tmp_path, budget=8)
    step = max(int(path.name) for path in tmp_path.iterdir() if path.name.isdigit())
    damaged = tmp_path / str(step) / part
    damaged.write_bytes(damaged.read_bytes()[:10])
    with pytest.raises(CheckpointError, match=f"checkpoint {step} is damaged"):
        one(tmp_path, budget=8, resume=True)
    time.sleep(0.3)


def test_a_file_is_no_folder(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="not a directory"):
        one(tmp_path / "file")


def test_old_checkpoints_are_deleted(tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "CHUNK_SECONDS", 0.0)
    one(tmp_path, budget=60)
    steps = sorted(int(path.name) for path in tmp_path.iterdir() if path.name.isdigit())
    assert steps[-2:] == [14, 15]
    assert len(steps) <= 3


def test_a_full_disk_keeps_the_old_checkpoint(tmp_path):
    folder = Folder(tmp_path, create=True)
    rng = np.random.default_rng(0)
    small = {"00000": rng.random(10).astype(np.float32)}
    folder.save(1, small, {"format": 1}, 1.0)
    # Random bits do not compress: this needs more than the limit allows for one file.
    large = {"00000": rng.random(200_000).astype(np.float32)}
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limit[1]))
    try:
        with pytest.raises(CheckpointError, match=r"checkpoint 2 could not be written .*stays"):
            folder.save(2, large, {"format": 1}, 0.5)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    folder.close()
    again = Folder(tmp_path, create=True)
    assert again.latest() == 1
    np.testing.assert_array_equal(again.arrays(1, small)["00000"], small["00000"])
    again.save(2, large, {"format": 1}, 0.5)
    assert again.latest() == 2
    again.close()


SCRIPT = """
import sys
sys.path[:0] = [{root!r}, {tests!r}]
from runs import Climber, small_problem
from egx.training import loop
from egx.training.loop import run

loop.CHUNK_SECONDS = 0.0  # a checkpoint after each generation
run(Climber(), small_problem(), budget=4000, seeds=[7], checkpoint_dir={folder!r},
    checkpoint_every_s=0.0, progress=lambda p: print(p.evaluations, flush=True))
"""


def test_killed_and_resumed_is_bit_equal(tmp_path):
    tests = Path(__file__).parents[1]
    script = SCRIPT.format(root=str(tests.parent), tests=str(tests), folder=str(tmp_path))
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=dict(os.environ)
    )
    assert process.stdout is not None
    with process.stdout:
        for line in process.stdout:
            if int(line) >= 40:
                break
        # Somewhere in a generation or in a checkpoint.
        time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    resumed = one(tmp_path, budget=4000, seed=7, resume=True)
    same_search(one(budget=4000, seed=7), resumed)
