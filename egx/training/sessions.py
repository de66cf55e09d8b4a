"""What trainings of policies by steps share: the loop, validation, checkpoints and their resuming.

All problems are padded to one size, so that one compiled step serves them all. What is random
follows from the seed and a step's number: a run that was killed and resumed gives the same bits.
"""

from __future__ import annotations

import abc
import dataclasses
import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from egx.errors import CheckpointError, SearchError
from egx.graph.graph import Graph
from egx.graph.padding import bucket_sizes
from egx.policies.base import AbstractPolicy
from egx.problems.base import AbstractProblem
from egx.training.checkpoint import Folder, from_arrays, to_arrays
from egx.training.generation import concrete
from egx.training.identity import Plain, differences, package_version, plain, problem_identity
from egx.training.loop import not_negative_s
from egx.training.progress import Progress, ProgressCallback, StopFlag, listener

FORMAT = 1

_Policy = TypeVar("_Policy", bound=AbstractPolicy)
_Part = TypeVar("_Part")


@dataclasses.dataclass(frozen=True)
class Trained(Generic[_Policy]):
    """The best policy by validation, and how it came about.

    `score` is what the training calls so, less is better; `history` has an entry a step, of those
    of validation with a `score` too.
    """

    policy: _Policy
    score: float
    history: list[dict[str, float]]
    interrupted: bool


class TrainingRun(eqx.Module):
    """What evolves, and what was computed once (`facts`): a checkpoint holds all of it. The
    learner keeps its policy as `policy`."""

    learner: Any
    best: AbstractPolicy
    score: jax.Array
    facts: Any


class AbstractTraining(abc.ABC, Generic[_Policy]):
    """One training: `run` is its loop.

    Args:
        name: to show.
        steps: of the optimiser.
        every: steps between two validations.
        key: of all that is random.
    """

    def __init__(self, name: str, steps: int, every: int, key: jax.Array):
        self.name, self.steps, self.every, self.key = name, steps, every, key
        self.began = time.perf_counter()

    @abc.abstractmethod
    def template(self, policy: _Policy) -> TrainingRun:
        """A run before its first step, its facts of the right shapes but not computed."""

    @abc.abstractmethod
    def facts(self) -> Any:
        """What is computed once, before the first step."""

    @abc.abstractmethod
    def step(self, run: TrainingRun, number: int) -> tuple[Any, dict[str, float]]:
        """The learner after step `number`, and what to keep of the step."""

    @abc.abstractmethod
    def score(self, policy: _Policy, facts: Any) -> float:
        """What validation makes of a policy; less is better."""

    def run(
        self, policy: _Policy, checkpoints: TrainingCheckpoints, show: ProgressCallback
    ) -> Trained[_Policy]:
        """All steps, or those that a checkpoint leaves; Ctrl-C ends it after the step at hand."""
        template = self.template(policy)
        done, run, history = checkpoints.restore(template)
        if run is None:
            run = eqx.tree_at(lambda r: r.facts, template, self.facts())
            run = _replaced(run, policy, self.score(policy, run.facts))
            history = [{"step": 0.0, "score": float(run.score)}]
        first = done
        with StopFlag() as stop:
            while done < self.steps and not stop.raised:
                learner, row = self.step(run, done)
                run = eqx.tree_at(lambda r: r.learner, run, learner)
                done += 1
                if done % self.every == 0 or done == self.steps:
                    score = self.score(run.learner.policy, run.facts)
                    row["score"] = score
                    if score < float(run.score):
                        run = _replaced(run, run.learner.policy, score)
                history.append({"step": float(done), **row})
                self._report(run, done, first, show)
                checkpoints.save(done, run, history, force=False)
        checkpoints.save(done, run, history, force=True)
        best: Any = run.best
        return Trained(best, float(run.score), history, interrupted=done < self.steps)

    def _report(self, run: TrainingRun, done: int, first: int, show: ProgressCallback) -> None:
        seconds = time.perf_counter() - self.began
        show(
            Progress(
                algorithm=f"training {self.name}",
                evaluations=done,
                budget=self.steps,
                best_cost=float(run.score),
                feasible=True,
                reference_cost=1.0,
                failed_measurements=0,
                evaluations_per_s=(done - first) / max(seconds, 1e-9),
                seconds=seconds,
                compile_seconds=0.0,
            )
        )


def _replaced(run: TrainingRun, best: AbstractPolicy, score: float) -> TrainingRun:
    return eqx.tree_at(lambda r: (r.best, r.score), run, (best, jnp.asarray(score, jnp.float32)))


def run_training(
    training: AbstractTraining[_Policy],
    start: _Policy,
    settings: Mapping[str, Any],
    problems: Sequence[AbstractProblem],
    judged: Sequence[AbstractProblem],
    *,
    seed: int,
    progress: bool | ProgressCallback,
    checkpoint_dir: str | os.PathLike[str] | None,
    checkpoint_every_s: float,
    resume: bool,
) -> Trained[_Policy]:
    """A training from `start`, or from its checkpoint; one with other `settings`, by name, or of
    other problems is refused."""
    every_s = not_negative_s("checkpoint_every_s", checkpoint_every_s)
    identity = {
        "egx": package_version(),
        "policy": plain(start),
        **{name: plain(setting) for name, setting in settings.items()},
        "seed": seed,
        "problems": problems_digest(problems),
        "validation problems": problems_digest(judged),
    }
    checkpoints = TrainingCheckpoints(checkpoint_dir, identity, resume=resume, every_s=every_s)
    with checkpoints, listener(progress) as show:
        return training.run(concrete(start), checkpoints, show)


class TrainingCheckpoints:
    """The checkpoints of a training; without a directory it does nothing."""

    def __init__(
        self,
        directory: str | os.PathLike[str] | None,
        identity: Plain,
        *,
        resume: bool,
        every_s: float,
    ):
        if directory is None and resume:
            raise CheckpointError("resume needs a checkpoint_dir")
        self._identity = json.loads(json.dumps(identity))
        self._folder = None if directory is None else Folder(directory, create=True)
        self._every_s, self._saved_at = every_s, time.perf_counter()
        self._step = None if self._folder is None else self._folder.latest()
        if self._step is not None and not resume:
            assert self._folder is not None
            self._folder.close()
            raise CheckpointError(
                f"{self._folder.path} holds a checkpoint already; pass resume=True (--resume) to "
                f"go on from it, or another directory"
            )

    def restore(
        self, template: TrainingRun
    ) -> tuple[int, TrainingRun | None, list[dict[str, float]]]:
        """(steps done, run, history); nothing when there is no checkpoint."""
        if self._folder is None or self._step is None:
            return 0, None, []
        data = self._folder.data(self._step)
        if data.get("kind") != "training" or data.get("format") != FORMAT:
            raise CheckpointError(f"{self._folder.path}: not a checkpoint of a training")
        lines = differences(data["identity"], self._identity)
        if lines:
            raise CheckpointError(
                f"{self._folder.path}: a checkpoint of another training: " + "; ".join(lines)
            )
        arrays = self._folder.arrays(self._step, to_arrays(template))
        return self._step, from_arrays(template, arrays), data["history"]

    def save(self, step: int, run: TrainingRun, history: Sequence[Any], *, force: bool) -> None:
        """Saves when it is time to, or when forced; never the same step twice."""
        if self._folder is None or step == self._step or step == 0:
            return
        if not force and time.perf_counter() - self._saved_at < self._every_s:
            return
        data = {
            "format": FORMAT,
            "kind": "training",
            "identity": self._identity,
            "history": list(history),
        }
        self._folder.save(step, to_arrays(run), data, float(run.score))
        self._step, self._saved_at = step, time.perf_counter()

    def __enter__(self) -> TrainingCheckpoints:
        return self

    def __exit__(self, *details: Any) -> None:
        if self._folder is not None:
            self._folder.close()


def split_options(
    options: Mapping[str, Any], parts: Mapping[str, type | None]
) -> dict[str, dict[str, Any]]:
    """Options as "part.field", or "field" of the part "", by their parts; a part is a dataclass
    that knows its fields, or None, which takes any.

    Raises:
        SearchError: naming an option that no part has.
    """
    split: dict[str, dict[str, Any]] = {part: {} for part in parts}
    for option, value in options.items():
        part, _, field = option.rpartition(".")
        if part not in parts:
            raise SearchError(f"training has no option {option!r}")
        kind = parts[part]
        known = [] if kind is None else [f.name for f in dataclasses.fields(kind)]
        if kind is not None and field not in known:
            raise SearchError(
                f"training has no option {option!r} (it takes {', '.join(sorted(known))})"
            )
        split[part][field] = value
    return split


def make_part(kind: Callable[..., _Part], options: Mapping[str, Any]) -> _Part:
    """`kind(**options)`.

    Raises:
        SearchError: naming options that it cannot be made with.
    """
    try:
        return kind(**options)
    except (TypeError, ValueError) as error:
        if isinstance(error, SearchError):
            raise
        raise SearchError(f"training cannot be made with {dict(options)}: {error}") from error


def held_out(
    problems: Sequence[AbstractProblem], validation: Sequence[AbstractProblem] | None
) -> tuple[list[AbstractProblem], list[AbstractProblem]]:
    """(what to train on, what to judge by): without `validation`, every fifth problem is held
    out, and of fewer than ten none is."""
    problems = list(problems)
    if not problems:
        raise SearchError("training needs at least one problem")
    if validation is not None:
        if not validation:
            raise SearchError("validation needs at least one problem")
        return problems, list(validation)
    if len(problems) < 10:
        return problems, problems
    kept = [problem for i, problem in enumerate(problems) if i % 5 != 4]
    return kept, problems[4::5]


def problems_digest(problems: Sequence[AbstractProblem]) -> str:
    text = json.dumps([problem_identity(problem) for problem in problems])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def common_sizes(graphs: Sequence[Graph]) -> tuple[int, int, int]:
    """The sizes that all graphs have, or else the smallest buckets that hold them."""
    held = {(graph.num_ops, graph.num_tensors, graph.num_uses) for graph in graphs}
    return held.pop() if len(held) == 1 else bucket_sizes(*graphs)


def chosen_problems(key: jax.Array, number: int, size: int, count: int) -> jax.Array:
    """The `size` problems of step `number`: passes over all `count`, each in a new order."""
    chosen = []
    for place in range(number * size, (number + 1) * size):
        turn, at = divmod(place, count)
        data = np.asarray(jax.random.key_data(key), np.uint32).tolist()
        order = np.random.default_rng([*data, turn]).permutation(count)
        chosen.append(int(order[at]))
    return jnp.asarray(chosen, jnp.int32)
