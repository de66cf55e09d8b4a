"""Notebooks: paired with their scripts, kept with outputs, and able to run on a small budget.

To run and pair them again:
    python tests/test_notebooks.py notebooks/*.py
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import jupytext
import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted((ROOT / "notebooks").glob("*.py"))


def execute(script: Path, folder: Path, seconds: int = 600) -> nbformat.NotebookNode:
    """The notebook of a script with its outputs, run in `folder`."""
    # A busy machine makes XLA complain of slow compiles, and the kernel would keep that as output.
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    notebook = jupytext.read(script)
    where = {"metadata": {"path": str(folder)}}
    client = NotebookClient(
        notebook, timeout=seconds, kernel_name="python3", resources=where, record_timing=False
    )
    client.execute()
    notebook.metadata.pop("language_info", None)
    for index, cell in enumerate(notebook.cells):
        # Ids are random otherwise, and every run would change every line of the file.
        cell["id"] = f"cell-{index:02d}"
    return notebook


def kept(script: Path) -> nbformat.NotebookNode:
    return nbformat.read(script.with_suffix(".ipynb"), as_version=4)


def sources(notebook: nbformat.NotebookNode) -> list[tuple[str, str]]:
    return [(cell.cell_type, cell.source) for cell in notebook.cells]


def test_there_are_notebooks():
    assert [path.stem for path in SCRIPTS][:3] == [
        "00_quickstart",
        "01_import_a_model",
        "02_memory_placement",
    ]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_pairs_agree(script):
    assert sources(kept(script)) == sources(jupytext.read(script))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_outputs_are_kept(script):
    outputs = [o for cell in kept(script).cells for o in cell.get("outputs", [])]
    assert not [o for o in outputs if o.output_type == "error"]
    assert not [o for o in outputs if o.get("name") == "stderr"]
    assert sum("image/png" in o.get("data", {}) for o in outputs) >= 2
    assert str(ROOT) not in script.with_suffix(".ipynb").read_text(encoding="utf-8")


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_it_runs(script, tmp_path, monkeypatch):
    monkeypatch.setenv("EGX_NOTEBOOK_BUDGET", "64")
    # A compiler in a hurry, as in conftest, but one device, as users have it.
    flags = [flag for flag in os.environ["XLA_FLAGS"].split() if "device_count" not in flag]
    monkeypatch.setenv("XLA_FLAGS", " ".join(flags))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *sys.path]))
    notebook = execute(script, tmp_path)
    produced = [cell for cell in notebook.cells if cell.get("outputs")]
    # What has outputs in the kept file has them here: nothing was skipped.
    assert len(produced) == len([cell for cell in kept(script).cells if cell.get("outputs")])


if __name__ == "__main__":
    import tempfile

    for name in sys.argv[1:]:
        with tempfile.TemporaryDirectory() as scratch:
            done = execute(Path(name), Path(scratch))
        nbformat.write(done, Path(name).with_suffix(".ipynb"))
