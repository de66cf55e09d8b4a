"""Training of the policies of `regal` and `gas`: steps of the bandit, validation, checkpoints.

All problems are padded to one size, so that one compiled step serves them all. What is random
follows from the seed and a step's number: a run that was killed and resumed gives the same bits.

Shapes: G training problems, V validation problems, R seeds.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from egx.errors import CheckpointError, SearchError
from egx.graph.graph import Graph
from egx.graph.padding import bucket_sizes
from egx.policies.base import AbstractPolicy
from egx.policies.proposal import AbstractProposalPolicy, Genes, problem_genes
from egx.policies.regal_net import RegalPolicy
from egx.policies.sequence_net import SequencePolicy
from egx.problems.base import AbstractProblem
from egx.problems.padded import stack_problems
from egx.search.brkga import BRKGA
from egx.training.bandit import (
    Bandit,
    Learner,
    act,
    bandit_step,
    new_learner,
    plain_knots,
    relative,
    run_costs,
    run_keys,
)
from egx.training.checkpoint import Folder, from_arrays, to_arrays
from egx.training.generation import concrete
from egx.training.identity import Plain, differences, package_version, plain, problem_identity
from egx.training.loop import whole_number
from egx.training.progress import Progress, ProgressCallback, StopFlag, listener

FORMAT = 1
KINDS: dict[str, Callable[..., AbstractProposalPolicy]] = {
    "regal": RegalPolicy,
    "gas": SequencePolicy,
}


@dataclasses.dataclass(frozen=True)
class Validation:
    """How a policy is judged while it is trained.

    Args:
        every: steps between two validations.
        budget: evaluations of a run, more than in training.
        seeds: runs a problem, of the policy and of plain BRKGA.
        action: as in `regal`.
    """

    every: int = 50
    budget: int = 1920
    seeds: int = 8
    action: str = "sample"


@dataclasses.dataclass(frozen=True)
class Trained:
    """The best policy by validation, and how it came about.

    `score` is its cost over that of plain BRKGA, mean over the validation problems; `history` has
    an entry a step, of those of validation with a `score` too.
    """

    policy: AbstractProposalPolicy
    score: float
    history: list[dict[str, float]]
    interrupted: bool


def train_proposals(
    problems: Sequence[AbstractProblem],
    kind: str = "regal",
    *,
    steps: int,
    seed: int = 0,
    validation: Sequence[AbstractProblem] | None = None,
    options: Mapping[str, Any] | None = None,
    policy: AbstractPolicy | None = None,
    progress: bool | ProgressCallback = False,
    checkpoint_dir: str | os.PathLike[str] | None = None,
    checkpoint_every_s: float = 60.0,
    resume: bool = False,
) -> Trained:
    """Trains a policy that chooses the proposals of the genetic algorithm.

    Args:
        problems: what to train on, of one kind: the same decisions, options and sizes of hardware.
        kind: "regal" (graph network) or "gas" (recurrent network).
        steps: of Adam.
        seed: 0 to 2^32 - 1.
        validation: held-out problems of the same kind; by default every fifth one of `problems`,
            which is then not trained on, and with fewer than ten problems all of them.
        options: fields of `egx.training.bandit.Bandit`; of its genetic algorithm as
            "brkga.population", of `Validation` as "validation.every", and of the network as
            "network.rounds".
        policy: where to start; by default a fresh network, which is close to plain BRKGA.
        progress: True for a bar, or a callable. It shows steps as evaluations, and the best
            validation score beside 1, plain BRKGA.
        checkpoint_dir: a folder for checkpoints.
        checkpoint_every_s: seconds between two checkpoints.
        resume: go on from the checkpoint in that folder, if there is one.

    Returns:
        The policy of the best validation; after Ctrl-C the best so far, flagged.

    Raises:
        SearchError: for an impossible argument, or problems that the policy does not fit.
        ProblemError: for problems of different kinds.
        CheckpointError: for a checkpoint that cannot be written, or is of another training.
    """
    if kind not in KINDS:
        raise SearchError(f"kind must be {' or '.join(KINDS)}, got {kind!r}")
    steps = whole_number("steps", steps, 0, 2**30)
    seed = whole_number("seed", seed, 0, 2**32 - 1)
    bandit, judge, network = split_options(options or {})
    chosen, held_out = _held_out(list(problems), validation)
    for problem in (*chosen, *held_out):
        bandit.brkga.check(problem)
    key = jax.random.key(seed)
    start = _start(policy, kind, problem_genes(chosen[0]), network, key)
    start.check(chosen[0])
    start.check(held_out[0])
    identity = {
        "egx": package_version(),
        "policy": plain(start),
        "bandit": plain(bandit),
        "validation": plain(judge),
        "seed": seed,
        "problems": _digest(chosen),
        "validation problems": _digest(held_out),
    }
    checkpoints = _Checkpoints(checkpoint_dir, identity, resume=resume, every_s=checkpoint_every_s)
    with checkpoints, listener(progress) as show:
        session = _Session(kind, concrete(bandit), judge, chosen, held_out, steps, key)
        return session.run(concrete(start), checkpoints, show)


def split_options(options: Mapping[str, Any]) -> tuple[Bandit, Validation, dict[str, Any]]:
    """The options of `train_proposals` as what they set."""
    parts: dict[str, dict[str, Any]] = {"": {}, "brkga": {}, "validation": {}, "network": {}}
    for option, value in options.items():
        part, _, field = option.rpartition(".")
        if part not in parts:
            raise SearchError(f"training has no option {option!r}")
        parts[part][field] = value
    for part, kind in (("", Bandit), ("brkga", BRKGA), ("validation", Validation)):
        known = [field.name for field in dataclasses.fields(kind)]
        for field in parts[part]:
            if field not in known:
                name = f"{part}.{field}" if part else field
                raise SearchError(
                    f"training has no option {name!r} (it takes {', '.join(sorted(known))})"
                )
    brkga = dataclasses.replace(parts[""].pop("brkga", BRKGA()), **parts["brkga"])
    judge = Validation(**parts["validation"])
    for name in ("every", "budget", "seeds"):
        whole_number(f"validation.{name}", getattr(judge, name), 1, 2**30)
    return Bandit(brkga=brkga, **parts[""]), judge, parts["network"]


def _start(
    policy: AbstractPolicy | None,
    kind: str,
    genes: Genes,
    network: Mapping[str, Any],
    key: jax.Array,
) -> AbstractProposalPolicy:
    if isinstance(policy, AbstractProposalPolicy):
        return policy
    if policy is not None:
        raise SearchError(f"{kind} cannot start from a {type(policy).__name__}")
    try:
        return KINDS[kind](genes, **network, key=jax.random.fold_in(key, 0xBEE))
    except TypeError as error:
        raise SearchError(f"the {kind} network cannot be made with {network}: {error}") from error


def _held_out(
    problems: list[AbstractProblem], validation: Sequence[AbstractProblem] | None
) -> tuple[list[AbstractProblem], list[AbstractProblem]]:
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


def _digest(problems: Sequence[AbstractProblem]) -> str:
    text = json.dumps([problem_identity(problem) for problem in problems])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _common_sizes(graphs: Sequence[Graph]) -> tuple[int, int, int]:
    """The sizes that all graphs have, or else the smallest buckets that hold them."""
    held = {(graph.num_ops, graph.num_tensors, graph.num_uses) for graph in graphs}
    return held.pop() if len(held) == 1 else bucket_sizes(*graphs)


class _Run(eqx.Module):
    """What evolves, and what was computed once: a checkpoint holds all of it."""

    learner: Learner
    best: AbstractProposalPolicy
    score: jax.Array
    plain: jax.Array
    held_out_plain: jax.Array


class _Session:
    """One call of `train_proposals`."""

    def __init__(
        self,
        kind: str,
        bandit: Bandit,
        judge: Validation,
        problems: Sequence[AbstractProblem],
        held_out: Sequence[AbstractProblem],
        steps: int,
        key: jax.Array,
    ):
        self.kind, self.bandit, self.judge, self.steps = kind, bandit, judge, steps
        # All of one size: what runs them is compiled once.
        sizes = _common_sizes([problem.graph for problem in (*problems, *held_out)])
        self.problems, self.held_out = (
            stack_problems(problems, sizes),
            stack_problems(held_out, sizes),
        )
        self.count, self.held_out_count = len(problems), len(held_out)
        self.key, self.judge_key = key, jax.random.fold_in(key, 0xCAFE)
        self.began = time.perf_counter()

    def run(
        self, policy: AbstractProposalPolicy, checkpoints: _Checkpoints, show: ProgressCallback
    ) -> Trained:
        template = self._template(policy)
        done, run, history = checkpoints.restore(template)
        if run is None:
            run = self._begin(policy)
            history = [{"step": 0.0, "score": float(run.score)}]
        first = done
        with StopFlag() as stop:
            while done < self.steps and not stop.raised:
                run, row = self._step(run, done)
                done += 1
                if done % self.judge.every == 0 or done == self.steps:
                    score = self._score(run.learner.policy, run.held_out_plain)
                    row["score"] = score
                    if score < float(run.score):
                        run = _replace(run, run.learner.policy, score)
                history.append({"step": float(done), **row})
                self._report(run, done, first, show)
                checkpoints.save(done, run, history, force=False)
        checkpoints.save(done, run, history, force=True)
        return Trained(run.best, float(run.score), history, interrupted=done < self.steps)

    def _template(self, policy: AbstractProposalPolicy) -> _Run:
        """A run before its first step, without what takes long to compute."""
        return _Run(
            new_learner(policy, self.bandit),
            policy,
            jnp.zeros((), jnp.float32),
            jnp.zeros((self.count, self.bandit.seeds), jnp.float32),
            jnp.zeros((self.held_out_count, self.judge.seeds), jnp.float32),
        )

    def _begin(self, policy: AbstractProposalPolicy) -> _Run:
        run = self._template(policy)
        brkga, budget = self.bandit.brkga, self.bandit.budget
        train = self._costs(brkga, self.problems, self.key, self.bandit.seeds, budget, None)
        judge = self._judge(None)
        run = eqx.tree_at(lambda r: (r.plain, r.held_out_plain), run, (train, judge))
        return _replace(run, policy, self._score(policy, judge))

    def _judge(self, policy: AbstractProposalPolicy | None) -> jax.Array:
        judge, brkga = self.judge, self.bandit.brkga
        return self._costs(brkga, self.held_out, self.judge_key, judge.seeds, judge.budget, policy)

    def _score(self, policy: AbstractProposalPolicy, plain: jax.Array) -> float:
        ratio = np.asarray(relative(self._judge(policy), plain))
        return float(np.mean(np.minimum(ratio, float(self.bandit.worst_ratio)), dtype=np.float64))

    def _costs(
        self,
        brkga: BRKGA,
        problems: AbstractProblem,
        key: jax.Array,
        seeds: int,
        budget: int,
        policy: AbstractProposalPolicy | None,
    ) -> jax.Array:
        """What runs with a policy, or plain ones, reach on all problems, [G, R]. Some problems at
        once; the last piece reaches back to be as long."""
        count = jax.tree.leaves(problems)[0].shape[0]
        size = min(self.bandit.problems, count)
        rows = np.zeros((count, seeds), np.float32)
        for start in [min(start, count - size) for start in range(0, count, size)]:
            index = jnp.arange(start, start + size, dtype=jnp.int32)
            numbers = np.broadcast_to(np.arange(seeds, dtype=np.int32), (size, seeds))
            keys = run_keys(key, index, jnp.asarray(numbers))
            if policy is None:
                knots = plain_knots(problems, (size, seeds))
            else:
                # Not the runs' own numbers: an action must not know what it will meet.
                draws = run_keys(jax.random.fold_in(key, 0xAC7), index, jnp.asarray(numbers))
                knots = act(policy, problems, index, draws, self.judge.action)[1]
            limit = jnp.asarray(budget, jnp.int32)
            part = run_costs(brkga, problems, index, keys, knots, limit)
            rows[start : start + size] = np.asarray(part)
        return jnp.asarray(rows)

    def _step(self, run: _Run, number: int) -> tuple[_Run, dict[str, float]]:
        index = self._choose(number)
        learner, metrics = bandit_step(
            self.bandit,
            run.learner,
            self.problems,
            run.plain,
            index,
            self.key,
            number,
        )
        run = eqx.tree_at(lambda r: r.learner, run, learner)
        return run, {name: float(value) for name, value in metrics.items()}

    def _choose(self, number: int) -> jax.Array:
        """The problems of a step: passes over all of them, each in a new order."""
        size = self.bandit.problems
        chosen = []
        for place in range(number * size, (number + 1) * size):
            turn, at = divmod(place, self.count)
            data = np.asarray(jax.random.key_data(self.key), np.uint32).tolist()
            order = np.random.default_rng([*data, turn]).permutation(self.count)
            chosen.append(int(order[at]))
        return jnp.asarray(chosen, jnp.int32)

    def _report(self, run: _Run, done: int, first: int, show: ProgressCallback) -> None:
        seconds = time.perf_counter() - self.began
        show(
            Progress(
                algorithm=f"training {self.kind}",
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


def _replace(run: _Run, best: AbstractProposalPolicy, score: float) -> _Run:
    return eqx.tree_at(lambda r: (r.best, r.score), run, (best, jnp.asarray(score, jnp.float32)))


class _Checkpoints:
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
                f"{self._folder.path} holds a checkpoint already; pass resume=True to go on "
                f"from it, or another directory"
            )

    def restore(self, template: _Run) -> tuple[int, _Run | None, list[dict[str, float]]]:
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

    def save(self, step: int, run: _Run, history: Sequence[Any], *, force: bool) -> None:
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

    def __enter__(self) -> _Checkpoints:
        return self

    def __exit__(self, *details: Any) -> None:
        if self._folder is not None:
            self._folder.close()
