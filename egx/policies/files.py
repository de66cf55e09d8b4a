"""A policy as one file: its arrays, its class and its configuration, in NumPy's npz."""

from __future__ import annotations

import io
import json
import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from egx.errors import CheckpointError, EgxError
from egx.files import write_whole

FORMAT = "egx policy"
VERSION = 1


def save_policy(policy: Any, path: str | os.PathLike[str]) -> None:
    """Writes `policy` to one file, which is there whole or as it was before.

    Raises:
        CheckpointError: if the file cannot be written.
    """
    header = {
        "format": FORMAT,
        "version": VERSION,
        "kind": type(policy).__name__,
        "config": policy.config(),
    }
    leaves = jax.tree.leaves(eqx.filter(policy, eqx.is_array))
    content = io.BytesIO()
    arrays = {f"{index:05d}": np.asarray(leaf) for index, leaf in enumerate(leaves)}
    np.savez(content, header=np.asarray(json.dumps(header)), **arrays)  # type: ignore[arg-type]
    try:
        write_whole(path, content.getvalue())
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be written: {error.strerror or error}") from error


def read_policy(path: str | os.PathLike[str], kinds: Mapping[str, Any]) -> Any:
    """The policy in a file; `kinds` are the classes it may be of, by name.

    Raises:
        CheckpointError: if the file is missing, damaged, of another version or of no known class.
    """
    try:
        # Through memory: given a path, np.load leaves a damaged file open.
        with np.load(io.BytesIO(Path(path).read_bytes()), allow_pickle=False) as stored:
            arrays = {name: stored[name] for name in stored.files}
        header = json.loads(str(arrays.pop("header")))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, KeyError, EOFError, zipfile.BadZipFile, TypeError) as error:
        raise CheckpointError(f"{path}: damaged, or not a policy: {error}") from error
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise CheckpointError(f"{path}: not a policy")
    if header.get("version") != VERSION:
        raise CheckpointError(
            f"{path}: policy version {header.get('version')!r}, this egx reads {VERSION}"
        )
    kind = kinds.get(header.get("kind", ""))
    if kind is None:
        raise CheckpointError(
            f"{path}: a policy of class {header.get('kind')!r}; known are {', '.join(kinds)}"
        )
    return _fill(str(path), kind, header.get("config"), arrays)


def _fill(where: str, kind: Any, config: Any, arrays: dict[str, np.ndarray]) -> Any:
    try:
        # Shapes are enough: initialising a network only to overwrite it takes a while.
        template = eqx.filter_eval_shape(lambda key: kind.from_config(config, key), _any_key())
    except (EgxError, TypeError, ValueError, KeyError, AttributeError) as error:
        raise CheckpointError(
            f"{where}: its configuration {config} is not usable: {error}"
        ) from error
    shapes, static = eqx.partition(template, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))
    leaves, structure = jax.tree.flatten(shapes)
    if len(leaves) != len(arrays):
        raise CheckpointError(f"{where}: {len(arrays)} arrays, expected {len(leaves)}")
    filled = []
    for index, leaf in enumerate(leaves):
        array = arrays.get(f"{index:05d}")
        if array is None or array.shape != leaf.shape or array.dtype != leaf.dtype:
            got = "missing" if array is None else f"{array.dtype}{list(array.shape)}"
            raise CheckpointError(
                f"{where}: array {index} is {got}, expected {leaf.dtype}{list(leaf.shape)}"
            )
        filled.append(jnp.asarray(array))
    return eqx.combine(jax.tree.unflatten(structure, filled), static)


def _any_key() -> jax.Array:
    return jax.random.key(0)
