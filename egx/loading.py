"""Models by one word: a name of the zoo, or a file."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from egx import zoo
from egx.errors import FormatError, GraphError
from egx.formats.native import load_json
from egx.formats.onnx import load_onnx
from egx.graph.graph import Model

# What a caller may always pass: for a zoo model it asks for nothing.
_ZOO_DEFAULTS: tuple[tuple[str, Any], ...] = (
    ("granularity", "layer"),
    ("granularity", None),
    ("dims", None),
    ("dims", {}),
)


def load(source: str | os.PathLike[str], **options: Any) -> Model:
    """The model called `source`: a name of the zoo, or a path to .onnx, .onnx.gz or .json.

    Args:
        source: what to load. A path wins over a name only when it has one of those endings.
        options: for the zoo, the arguments of its builder (`batch`, `precision`, ...); for ONNX,
            `granularity` ("layer" or "op") and `dims` (sizes of free dimensions by name).

    Raises:
        GraphError: for a name that the zoo does not know, with the closest known ones.
        FormatError: for a file that cannot be read as what it claims to be.
    """
    name = os.fspath(source)
    if name.endswith((".onnx", ".onnx.gz")):
        return load_onnx(name, **_allowed("an ONNX file", options, ("granularity", "dims")))
    if name.endswith(".json"):
        _allowed("a JSON file", options, ())
        return load_json(name)
    if name in zoo.names():
        given = {k: v for k, v in options.items() if (k, v) not in _ZOO_DEFAULTS}
        return zoo.load(name, **given)
    if Path(name).exists():
        raise FormatError(f"{name}: expected a file that ends in .onnx, .onnx.gz or .json")
    known = zoo.names()
    close = difflib.get_close_matches(name.lower(), known, n=3, cutoff=0.4)
    hint = f"; did you mean {' or '.join(close)}?" if close else ""
    raise GraphError(
        f"{name!r} is neither a model of the zoo nor a file{hint} (the zoo has {', '.join(known)})"
    )


def _allowed(what: str, given: Mapping[str, Any], takes: Sequence[str]) -> dict[str, Any]:
    for name in given:
        if name not in takes:
            raise FormatError(
                f"{what} takes no option {name!r}; it takes {', '.join(takes) or 'none'}"
            )
    return {name: value for name, value in given.items() if value is not None}
