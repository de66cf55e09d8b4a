"""Checkpoints of runs and of policies; the only file that knows orbax.

A checkpoint holds the arrays of a tree as NumPy, by position, and plain data that say what they
belong to. It appears whole or not at all, and an older one is deleted only after that.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jaxtyping import PyTree
from orbax.checkpoint import checkpoint_managers as managers

from egx.errors import CheckpointError
from egx.problems.base import AbstractProblem
from egx.search.base import AbstractSearch
from egx.training.generation import Row
from egx.training.identity import (
    Plain,
    differences,
    package_version,
    problem_identity,
    search_identity,
)
from egx.training.steppers import RunState

FORMAT = 1


def _is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def to_arrays(tree: PyTree) -> dict[str, np.ndarray]:
    """The array leaves by position, keys as their data. Empty ones are left out: orbax refuses
    them, and their shape says all there is to know."""
    leaves = jax.tree.leaves(eqx.filter(tree, eqx.is_array_like))
    arrays = {}
    for index, leaf in enumerate(leaves):
        array = np.asarray(jax.random.key_data(leaf) if _is_key(leaf) else leaf)
        if array.size:
            arrays[f"{index:05d}"] = array
    return arrays


def from_arrays(template: PyTree, arrays: dict[str, np.ndarray]) -> PyTree:
    """The tree like `template` whose array leaves are `arrays`."""
    dynamic, static = eqx.partition(template, eqx.is_array_like)
    leaves, structure = jax.tree.flatten(dynamic)
    filled = []
    for index, leaf in enumerate(leaves):
        saved = arrays.get(f"{index:05d}")
        if saved is None:
            filled.append(leaf)
        elif _is_key(leaf):
            data = jnp.asarray(saved)
            filled.append(jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf)))
        elif isinstance(leaf, np.ndarray):
            filled.append(np.array(saved))
        elif isinstance(leaf, bool | int | float | complex):
            filled.append(saved.item())
        else:
            filled.append(jnp.asarray(saved))
    return eqx.combine(jax.tree.unflatten(structure, filled), static)


class Folder:
    """A folder of numbered checkpoints, the latest two and the best one kept."""

    def __init__(self, directory: str | os.PathLike[str], *, create: bool, keep: int = 2):
        self.path = Path(directory).absolute()
        if not create and not self.path.is_dir():
            raise CheckpointError(f"{self.path}: no such checkpoint")
        if self.path.exists() and not self.path.is_dir():
            raise CheckpointError(f"{self.path}: not a directory")
        best = managers.BestN(get_metric_fn=lambda metrics: -metrics["cost"], n=1)
        options = ocp.CheckpointManagerOptions(
            preservation_policy=managers.AnyPreservationPolicy([managers.LatestN(keep), best]),
            enable_async_checkpointing=False,
            cleanup_tmp_directories=create,
            create=create,
            read_only=not create,
        )
        try:
            self._manager = ocp.CheckpointManager(self.path, options=options)
        except OSError as error:
            raise CheckpointError(f"{self.path}: cannot be used: {error}") from error

    def close(self) -> None:
        self._manager.close()

    def latest(self) -> int | None:
        """The number of the newest checkpoint, None if there is none."""
        return self._manager.latest_step()

    def save(self, step: int, arrays: dict[str, np.ndarray], data: Plain, cost: float) -> None:
        """Writes checkpoint `step`; on failure the older ones stay as they were."""
        try:
            self._manager.save(
                step,
                args=ocp.args.Composite(
                    arrays=ocp.args.StandardSave(arrays), data=ocp.args.JsonSave(data)
                ),
                metrics={"cost": cost},
            )
        except Exception as error:  # tensorstore reports a full disk as ValueError, others vary
            kept = "nothing was saved before" if self.latest() in (None, step) else "the last stays"
            raise CheckpointError(
                f"{self.path}: checkpoint {step} could not be written ({kept}): {error}"
            ) from error

    def data(self, step: int) -> Plain:
        """The plain data of a checkpoint."""
        return self._read(step, data=ocp.args.JsonRestore())["data"]

    def arrays(self, step: int, shapes: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The arrays of a checkpoint, which must have the shapes and types given."""
        found = self._read(step, arrays=ocp.args.StandardRestore(shapes))["arrays"]
        for name, expected in shapes.items():
            array = found.get(name)
            if array is None or array.shape != expected.shape or array.dtype != expected.dtype:
                got = "nothing" if array is None else f"{array.dtype}{list(array.shape)}"
                raise CheckpointError(
                    f"{self.path}: array {name} is {got}, "
                    f"expected {expected.dtype}{list(expected.shape)}"
                )
        return found

    def _read(self, step: int, **parts: Any) -> Any:
        try:
            return self._manager.restore(step, args=ocp.args.Composite(**parts))
        except Exception as error:  # whatever orbax and tensorstore make of a damaged folder
            raise CheckpointError(
                f"{self.path}: checkpoint {step} is damaged or of another layout: {error}"
            ) from error


class RunCheckpoints:
    """The checkpoints of one run; without a directory it does nothing."""

    def __init__(self, folder: Folder | None, identity: Plain, every_s: float, batch: int):
        self._folder, self._identity = folder, identity
        self._every_s, self._batch = every_s, batch
        self._saved_at = time.perf_counter()
        self._step = folder.latest() if folder is not None else None

    @staticmethod
    def open(
        directory: str | os.PathLike[str] | None,
        *,
        resume: bool,
        every_s: float,
        search: AbstractSearch,
        problem: AbstractProblem,
        seeds: Sequence[int],
        measured: bool,
    ) -> RunCheckpoints:
        """Opens or creates the directory.

        Raises:
            CheckpointError: if it holds a checkpoint that was not asked for, or of another run.
        """
        if directory is None:
            if resume:
                raise CheckpointError("resume needs a checkpoint_dir")
            return RunCheckpoints(None, {}, every_s, search.batch_size)
        identity = {
            "egx": package_version(),
            "problem": problem_identity(problem),
            "search": search_identity(search),
            "seeds": list(seeds),
            "evaluator": "on the host" if measured else "simulator",
        }
        folder = Folder(directory, create=True)
        opened = RunCheckpoints(
            folder, json.loads(json.dumps(identity)), every_s, search.batch_size
        )
        if opened._step is not None:
            try:
                if not resume:
                    raise CheckpointError(
                        f"{folder.path} holds a checkpoint already; pass resume=True (--resume) "
                        f"to go on from it, or another directory"
                    )
                opened._check(folder.data(opened._step))
            except CheckpointError:
                folder.close()
                raise
        return opened

    def _check(self, data: Plain) -> None:
        assert self._folder is not None
        where = self._folder.path
        if data.get("format") != FORMAT:
            raise CheckpointError(
                f"{where}: checkpoint format {data.get('format')!r}, this egx reads {FORMAT}"
            )
        saved = data["identity"]
        lines = []
        for part, current in self._identity.items():
            old = saved.get(part)
            if isinstance(old, dict) and isinstance(current, dict):
                lines += [f"{part}, {line}" for line in differences(old, current)]
            else:
                lines += differences({part: old}, {part: current})
        if lines:
            raise CheckpointError(f"{where}: a checkpoint of another run: " + "; ".join(lines))

    def metadata(self, budget: int) -> Plain | None:
        """Plain data of the checkpoint to go on from; None if the run starts afresh.

        Another budget than before is fine, unless the last generation was already cut to the
        old one, or more is spent than the new one allows.
        """
        if self._folder is None or self._step is None:
            return None
        data = self._folder.data(self._step)
        old, spent = data["budget"], min(self._step * self._batch, data["budget"])
        cut = self._step * self._batch > old
        if budget != old and (cut or spent > budget):
            raise CheckpointError(
                f"{self._folder.path}: the saved run spent {spent} of a budget of {old} "
                f"evaluations and cannot go on with a budget of {budget}"
            )
        return data

    def restore(self, template: RunState) -> RunState:
        """The saved run; `template` is the run before its first generation."""
        assert self._folder is not None
        assert self._step is not None
        seeds = len(template.failed)
        rows = jax.tree.map(
            lambda x: np.zeros((self._step, seeds), np.asarray(x).dtype), template.rows[0]
        )
        tree = (template.states, rows, template.failed)
        states, rows, failed = from_arrays(tree, self._folder.arrays(self._step, to_arrays(tree)))
        return RunState(states, (rows,), self._step, failed)

    def save(self, run: RunState, data: Plain, *, force: bool) -> None:
        """Saves the run when it is time to, or when forced; never the same state twice."""
        if self._folder is None or run.generation in (0, self._step):
            return
        if not force and time.perf_counter() - self._saved_at < self._every_s:
            return
        rows: Row = jax.tree.map(lambda *parts: np.concatenate(parts), *run.rows)
        arrays = to_arrays((run.states, rows, run.failed))
        data = {"format": FORMAT, "identity": self._identity, **data}
        self._folder.save(run.generation, arrays, data, float(rows.best_cost[-1].min()))
        self._step, self._saved_at = run.generation, time.perf_counter()

    def __enter__(self) -> RunCheckpoints:
        return self

    def __exit__(self, *details: Any) -> None:
        if self._folder is not None:
            self._folder.close()
