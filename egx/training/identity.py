"""What a run depends on, as plain data: for provenance, and to tell two runs apart."""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import inspect
import platform
from importlib import metadata
from typing import Any

import jax
import numpy as np

from egx.graph.graph import Graph, graph_digest
from egx.host import HostOnly
from egx.problems.base import AbstractProblem
from egx.search.base import AbstractSearch

Plain = dict[str, Any]


def package_version() -> str:
    """The installed version of egx; "0+unknown" when it runs from a bare checkout."""
    return _version("egx")


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "0+unknown"


def versions() -> dict[str, str]:
    """The versions of what results may depend on."""
    packages = ("egx", "jax", "jaxlib", "equinox", "numpy")
    return {"python": platform.python_version(), **{name: _version(name) for name in packages}}


def provenance(problem: AbstractProblem) -> Plain:
    """Where, when and on what a result was made."""
    return {
        "versions": versions(),
        "device": jax.devices()[0].device_kind,
        "problem": problem_identity(problem),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def arrays_digest(tree: Any) -> str:
    """SHA-256 over paths, types, shapes and values of all array leaves; keys by their data."""
    digest = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        if isinstance(leaf, jax.Array | np.ndarray | np.generic):
            array = np.asarray(leaf)
            digest.update(f"{jax.tree_util.keystr(path)} {array.dtype} {array.shape}".encode())
            digest.update(np.ascontiguousarray(array).tobytes())
        else:
            digest.update(f"{jax.tree_util.keystr(path)} {leaf!r}".encode())
    return digest.hexdigest()


def plain(value: Any) -> Any:
    """`value` as JSON data: scalars and text as they are, anything with arrays by its digest."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, jax.Array | np.ndarray | np.generic) and not value.shape:
        key = jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key)
        return arrays_digest(value) if key else np.asarray(value).item()
    if isinstance(value, tuple | list):
        return [plain(entry) for entry in value]
    if isinstance(value, dict):
        return {str(key): plain(entry) for key, entry in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {"type": type(value).__name__, **fields(value)}
    if callable(value):
        return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', repr(value))}"
    return f"arrays {arrays_digest(value)[:16]}"


def fields(module: Any) -> Plain:
    """The fields of a dataclass as JSON data, host-side labels left out."""
    values = {f.name: getattr(module, f.name) for f in dataclasses.fields(module)}
    return {k: plain(v) for k, v in values.items() if not isinstance(v, HostOnly)}


def search_identity(search: AbstractSearch) -> Plain:
    """Name and configuration of a searcher."""
    return {"algorithm": type(search).__name__, **fields(search)}


def problem_identity(problem: AbstractProblem) -> Plain:
    """What the problem was made from: its kind and the arguments of its constructor.

    Derived fields are left out: their last bits may differ between machines.
    """
    names = [
        name for name in inspect.signature(type(problem).__init__).parameters if name != "self"
    ]
    identity: Plain = {
        "kind": type(problem).__name__,
        "graph": graph_digest(problem.graph),
        "ops with padding": problem.graph.num_ops,
        "uses with padding": problem.graph.num_uses,
    }
    for name in names:
        if name == "model" or not hasattr(problem, name):
            continue
        value = getattr(problem, name)
        if not isinstance(value, HostOnly | Graph):
            identity[name] = value if isinstance(value, bool | int | float | str) else _short(value)
    return identity


def _short(value: Any) -> Any:
    if isinstance(value, tuple | list) or value is None:
        return plain(value)
    return arrays_digest(value)


def differences(saved: Plain, current: Plain) -> list[str]:
    """One line for each entry that differs, with both values."""
    lines = []
    for key in [*saved, *(k for k in current if k not in saved)]:
        old, new = saved.get(key, "nothing"), current.get(key, "nothing")
        if old != new:
            lines.append(f"{key}: saved {_cut(old)}, now {_cut(new)}")
    return lines


def _cut(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 40 else text[:16] + "..."
