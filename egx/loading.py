"""Models by one word: a name of the zoo, or a file."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from egx import zoo
from egx.errors import FormatError, GraphError
from egx.formats.costgraph import load_costgraph
from egx.formats.dagbench import load_dagbench
from egx.formats.dnn_partitioning import load_dnn_partitioning
from egx.formats.native import FORMAT as NATIVE
from egx.formats.native import load_json
from egx.formats.onnx import load_onnx
from egx.formats.stg import load_stg
from egx.formats.workload import Workload, read_object
from egx.graph.graph import Model

# What a caller may always pass: for a zoo model it asks for nothing.
_ZOO_DEFAULTS: tuple[tuple[str, Any], ...] = (
    ("granularity", "layer"),
    ("granularity", None),
    ("dims", None),
    ("dims", {}),
)


def load(source: str | os.PathLike[str], **options: Any) -> Model:
    """The model called `source`: a name of the zoo, or the path of a file.

    Files are .onnx, .onnx.gz, .json (egx's own), and measured workloads (see `load_workload`), of
    which this is the graph alone.

    Args:
        source: what to load. A path wins over a name only when it has one of those endings.
        options: for the zoo, the arguments of its builder (`batch`, `precision`, ...); for ONNX,
            `granularity` ("layer" or "op") and `dims` (sizes of free dimensions by name); for
            measured workloads those of their readers.

    Raises:
        GraphError: for a name that the zoo does not know, with the closest known ones.
        FormatError: for a file that cannot be read as what it claims to be.
    """
    name = os.fspath(source)
    if name.endswith((".onnx", ".onnx.gz")):
        return load_onnx(name, **_allowed("an ONNX file", options, ("granularity", "dims")))
    if _workload_reader(name) is not None:
        return load_workload(name, **options).model
    if name.endswith(".json"):
        _allowed("a JSON file", options, ())
        return load_json(name)
    if name in zoo.names():
        given = {k: v for k, v in options.items() if (k, v) not in _ZOO_DEFAULTS}
        return zoo.load(name, **given)
    if Path(name).exists():
        raise FormatError(
            f"{name}: expected a file that ends in .onnx, .onnx.gz, .json, .pbtxt or .stg"
        )
    known = zoo.names()
    close = difflib.get_close_matches(name.lower(), known, n=3, cutoff=0.4)
    hint = f"; did you mean {' or '.join(close)}?" if close else ""
    raise GraphError(
        f"{name!r} is neither a model of the zoo nor a file{hint} (the zoo has {', '.join(known)})"
    )


def load_workload(source: str | os.PathLike[str], **options: Any) -> Workload:
    """A model with measured seconds per op, and often a machine, from a file made by others.

    Args:
        source: a CostGraphDef (.pbtxt), a task graph of STG (.stg), a DAGBench folder or its
            graph.json, or a JSON file of dnn-partitioning.
        options: of the format's reader: `processors` of STG, `accelerators` and `cpus` of
            dnn-partitioning.

    Raises:
        FormatError: naming the file, and where in it something is wrong.
    """
    name = os.fspath(source)
    found = _workload_reader(name)
    if found is None:
        raise FormatError(
            f"{name}: expected a measured workload: .pbtxt (CostGraphDef), .stg, a DAGBench "
            "folder or graph.json, or a JSON file of dnn-partitioning"
        )
    what, reader, takes = found
    return reader(name, **_allowed(what, options, takes))


def is_workload(source: str | os.PathLike[str]) -> bool:
    """Whether `load_workload` is for this source."""
    return _workload_reader(os.fspath(source)) is not None


def _workload_reader(name: str) -> tuple[str, Callable[..., Workload], tuple[str, ...]] | None:
    """What the file is, its reader, and the options that it takes."""
    path = Path(name)
    if name.endswith((".pbtxt", ".prototxt")):
        return "a CostGraphDef", load_costgraph, ()
    if name.endswith(".stg"):
        return "a task graph of STG", load_stg, ("processors",)
    if path.is_dir() and (path / "graph.json").is_file():
        return "a DAGBench folder", load_dagbench, ()
    if name.endswith(".json") and path.is_file():
        with path.open(errors="replace") as file:
            # Spares egx's own files a second reading.
            if NATIVE in file.read(100):
                return None
        try:
            content = read_object(name).data
        except FormatError:
            return None
        if "task_graph" in content:
            return "a DAGBench file", load_dagbench, ()
        if "maxFPGAs" in content:
            takes = ("accelerators", "cpus")
            return "a file of dnn-partitioning", load_dnn_partitioning, takes
    return None


def _allowed(what: str, given: Mapping[str, Any], takes: Sequence[str]) -> dict[str, Any]:
    for name in given:
        if name not in takes:
            raise FormatError(
                f"{what} takes no option {name!r}; it takes {', '.join(takes) or 'none'}"
            )
    return {name: value for name, value in given.items() if value is not None}
