"""A policy's file: it comes back bit for bit, and what is damaged or foreign is refused."""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest

from egx.errors import CheckpointError
from egx.policies import files
from egx.policies.files import read_policy, save_policy
from egx.policies.graph_unet import GraphUNetPolicy
from egx.policies.loading import POLICY_FILE, load_policy

CHOICES = (("weights", 3), ("activations", 3))


def policy(**more):
    sizes = {"width": 4, "depth": 1, "attention_heads": 1} | more
    return GraphUNetPolicy(5, CHOICES, key=jax.random.key(0), **sizes)


def rewrite(path, change):
    """Changes the header or the arrays of a file."""
    with np.load(path) as stored:
        parts = {name: stored[name] for name in stored.files}
    header = json.loads(str(parts.pop("header")))
    change(header, parts)
    with path.open("wb") as file:
        np.savez(file, header=np.asarray(json.dumps(header)), **parts)


def test_it_comes_back_bit_for_bit(tmp_path):
    path = tmp_path / "some" / "policy"
    save_policy(policy(), path)
    loaded = load_policy(path)
    assert isinstance(loaded, GraphUNetPolicy)
    assert loaded.config() == policy().config()
    assert jax.tree.structure(loaded) == jax.tree.structure(policy())
    for a, b in zip(jax.tree.leaves(loaded), jax.tree.leaves(policy()), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)
    assert [p.name for p in path.parent.iterdir()] == ["policy"]


def test_classes_of_ones_own_are_given(tmp_path):
    class Mine(GraphUNetPolicy):
        pass

    save_policy(Mine(5, CHOICES, width=4, depth=1, key=jax.random.key(0)), tmp_path / "p")
    with pytest.raises(CheckpointError, match=r"of class 'Mine'; known are .*GraphUNetPolicy"):
        load_policy(tmp_path / "p")
    assert isinstance(load_policy(tmp_path / "p", kinds=[Mine]), Mine)


CHANGES = [
    (lambda header, parts: header.update(version=2), "version 2, this egx reads 1"),
    (lambda header, parts: header.update(format="egx result"), "not a policy"),
    (lambda header, parts: header.update(kind="Other"), "of class 'Other'"),
    (lambda header, parts: header["config"].update(width=8), "array 0 is float32"),
    (lambda header, parts: header["config"].update(depth=2), "arrays, expected"),
    (lambda header, parts: header["config"].update(width=-1), "is not usable"),
    (lambda header, parts: header.update(config=None), "is not usable"),
    (lambda header, parts: parts.pop("00001"), "arrays, expected"),
    (lambda header, parts: parts.update({"00000": np.zeros(1)}), r"array 0 is float64\[1\]"),
]


@pytest.mark.parametrize(("change", "message"), CHANGES)
def test_what_does_not_fit_is_refused(tmp_path, change, message):
    save_policy(policy(), tmp_path / "p")
    rewrite(tmp_path / "p", change)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_policy(tmp_path / "p")
    assert str(tmp_path / "p") in str(caught.value)


@pytest.mark.parametrize("keep", [0, 10, 500, -1])
def test_truncated_files_are_refused(tmp_path, keep):
    save_policy(policy(), tmp_path / "p")
    (tmp_path / "p").write_bytes((tmp_path / "p").read_bytes()[:keep])
    with pytest.raises(CheckpointError, match="damaged, or not a policy"):
        load_policy(tmp_path / "p")


def test_other_files_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_policy(tmp_path / "absent")
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_policy(tmp_path)
    np.save(tmp_path / "array.npy", np.zeros(3))
    (tmp_path / "text").write_text("hello")
    np.savez(tmp_path / "archive.npz", a=np.zeros(2))
    for name in ("array.npy", "text", "archive.npz"):
        with pytest.raises(CheckpointError, match="not a policy"):
            read_policy(tmp_path / name, {})


def test_a_full_disk_keeps_the_old_file(tmp_path, monkeypatch):
    save_policy(policy(), tmp_path / "p")
    before = (tmp_path / "p").read_bytes()

    def full(path, content):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "write_whole", full)
    with pytest.raises(CheckpointError, match="cannot be written: No space left"):
        save_policy(policy(width=8), tmp_path / "p")
    assert (tmp_path / "p").read_bytes() == before


def test_a_folder_stands_for_the_policy_in_it(tmp_path):
    save_policy(policy(), tmp_path / POLICY_FILE)
    assert load_policy(tmp_path).config() == policy().config()
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"empty.policy\.npz: cannot be read: No such file"):
        load_policy(tmp_path / "empty")
