"""Imports every ONNX file of the shared collections at both granularities and tables the result.

    python experiments/onnx_import/run.py [--data FOLDER] [--again] [MORE.onnx ...]

A row is measured, printed and saved at a time; files that are already in results.json, unchanged,
are skipped unless `--again` is given. A file that fails becomes a row with its error.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import runpy
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from egx.errors import EgxError
from egx.formats.onnx import load_onnx
from egx.graph.graph import real_sizes

HERE = Path(__file__).parent
DATA: Path = runpy.run_path(str(HERE.parent / "data.py"))["DATA"]
FOLDERS = ("onnx_light", "zigzag_stream_onnx", "onnx_corpus/graphs")
HEADINGS = (
    ("file", "file"),
    ("nodes", "nodes"),
    ("ops", "ops"),
    ("layers", "layers"),
    ("op_uses", "uses of ops"),
    ("layer_uses", "uses of layers"),
    ("gflops", "GFLOP"),
    ("gmac", "GMAC"),
    ("million_parameters", "M parameters"),
    ("weight_mb", "weights MB"),
    ("op_activation_mb", "activations MB, ops"),
    ("layer_activation_mb", "activations MB, layers"),
    ("op_seconds", "CPU s, ops"),
    ("layer_seconds", "CPU s, layers"),
)


def measure(path: Path) -> dict[str, Any]:
    """One row: sizes and totals at both granularities, and the CPU seconds of each import."""
    row: dict[str, Any] = {}
    noted: list[str] = []
    for granularity, word in (("op", "op"), ("layer", "layer")):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            start = time.process_time()
            model = load_onnx(path, granularity=granularity)
            row[f"{word}_seconds"] = round(time.process_time() - start, 3)
        noted = [str(w.message) for w in caught]
        ops, _, uses = real_sizes(model.graph)
        producer = np.asarray(model.graph.use_producer())
        if not (producer < np.asarray(model.graph.use_consumer)).all():
            raise AssertionError(f"{path}: ops are in no topological order")
        row["ops" if word == "op" else "layers"] = ops
        row[f"{word}_uses"] = uses
        row[f"{word}_activation_mb"] = round(model.notes["activation_bytes"] / 1e6, 3)
    notes = model.notes
    row |= {
        "nodes": notes["nodes"],
        "gflops": round(notes["flops"] / 1e9, 4),
        "gmac": round(notes["macs"] / 1e9, 4),
        "million_parameters": round(notes["parameters"] / 1e6, 3),
        "weight_mb": round(notes["weight_bytes"] / 1e6, 3),
        "warnings": noted,
    }
    return row


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as Markdown."""
    lines = [
        "| " + " | ".join(title for _, title in HEADINGS) + " |",
        "|" + "---|" * len(HEADINGS),
    ]
    for row in rows:
        if "error" in row:
            lines.append(f"| {row['file']} | {row['error']} |")
        else:
            lines.append("| " + " | ".join(str(row[key]) for key, _ in HEADINGS) + " |")
    return "\n".join(lines) + "\n"


def save(rows: dict[str, dict[str, Any]]) -> None:
    """Writes both forms; a stop in between loses nothing."""
    ordered = [rows[name] for name in sorted(rows)]
    text = json.dumps(ordered, indent=1) + "\n"
    for name, contents in (("results.json", text), ("results.md", table(ordered))):
        temporary = HERE / f".{name}"
        temporary.write_text(contents)
        temporary.replace(HERE / name)


def main() -> None:
    """Runs what is not there yet."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, default=DATA, help="folder of the collections")
    parser.add_argument("--again", action="store_true", help="measure all files anew")
    parser.add_argument("more", nargs="*", type=Path, help="further ONNX files")
    options = parser.parse_args()
    files = {
        str(path.relative_to(options.data)): path
        for folder in FOLDERS
        for path in sorted((options.data / folder).glob("*.onnx*"))
    }
    files |= {path.name: path for path in options.more}
    if not files:
        raise SystemExit(f"no ONNX files under {options.data} (set EGX_DATA or --data)")
    stored = HERE / "results.json"
    rows = {row["file"]: row for row in json.loads(stored.read_text())} if stored.exists() else {}
    for name, path in files.items():
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        if not options.again and rows.get(name, {}).get("sha256") == digest:
            continue
        row: dict[str, Any] = {"file": name, "sha256": digest}
        try:
            row |= measure(path)
        except EgxError as error:
            row["error"] = str(error).replace(str(path), name)
        rows[name] = row
        save(rows)
        print(table([row]).splitlines()[-1], flush=True)
    done = [row for row in rows.values() if "error" not in row]
    failed = len(rows) - len(done)
    print(table([rows[name] for name in sorted(rows)]))
    seconds = [row["op_seconds"] + row["layer_seconds"] for row in done]
    print(f"{len(done)} files imported, {failed} failed; {sum(seconds):.1f} CPU s in all, ", end="")
    print(f"slowest {max(seconds):.2f} s for both granularities")


if __name__ == "__main__":
    main()
