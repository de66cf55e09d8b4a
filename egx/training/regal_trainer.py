"""Training of the policies of `regal` and `gas`: steps of the bandit, and their validation.

Shapes: G training problems, V validation problems, R seeds.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from egx.errors import SearchError
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
from egx.training.generation import concrete
from egx.training.loop import whole_number
from egx.training.progress import ProgressCallback
from egx.training.sessions import (
    AbstractTraining,
    Trained,
    TrainingRun,
    chosen_problems,
    common_sizes,
    held_out,
    make_part,
    run_training,
    split_options,
)

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
) -> Trained[AbstractProposalPolicy]:
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
        The policy of the best validation, its score the cost over that of plain BRKGA, mean over
        the validation problems; after Ctrl-C the best so far, flagged.

    Raises:
        SearchError: for an impossible argument, or problems that the policy does not fit.
        ProblemError: for problems of different kinds.
        CheckpointError: for a checkpoint that cannot be written, or is of another training.
    """
    if kind not in KINDS:
        raise SearchError(f"kind must be {' or '.join(KINDS)}, got {kind!r}")
    steps = whole_number("steps", steps, 0, 2**30)
    seed = whole_number("seed", seed, 0, 2**32 - 1)
    bandit, judge, network = _settings(options or {})
    chosen, judged = held_out(problems, validation)
    for problem in (*chosen, *judged):
        bandit.brkga.check(problem)
    key = jax.random.key(seed)
    start = _start(policy, kind, problem_genes(chosen[0]), network, key)
    start.check(chosen[0])
    start.check(judged[0])
    return run_training(
        _Training(kind, concrete(bandit), judge, chosen, judged, steps, key),
        start,
        {"bandit": bandit, "validation": judge},
        chosen,
        judged,
        seed=seed,
        progress=progress,
        checkpoint_dir=checkpoint_dir,
        checkpoint_every_s=checkpoint_every_s,
        resume=resume,
    )


def _settings(options: Mapping[str, Any]) -> tuple[Bandit, Validation, dict[str, Any]]:
    """The options of `train_proposals` as what they set."""
    parts = split_options(
        options, {"": Bandit, "brkga": BRKGA, "validation": Validation, "network": None}
    )
    brkga = dataclasses.replace(parts[""].pop("brkga", BRKGA()), **parts["brkga"])
    judge = Validation(**parts["validation"])
    for name in ("every", "budget", "seeds"):
        whole_number(f"validation.{name}", getattr(judge, name), 1, 2**30)
    return make_part(Bandit, {"brkga": brkga, **parts[""]}), judge, parts["network"]


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


class _Facts(eqx.Module):
    """What plain BRKGA reaches on each problem."""

    plain: jax.Array
    held_out_plain: jax.Array


class _Training(AbstractTraining[AbstractProposalPolicy]):
    """One call of `train_proposals`."""

    def __init__(
        self,
        kind: str,
        bandit: Bandit,
        judge: Validation,
        problems: Sequence[AbstractProblem],
        judged: Sequence[AbstractProblem],
        steps: int,
        key: jax.Array,
    ):
        super().__init__(kind, steps, judge.every, key)
        self.bandit, self.judge = bandit, judge
        # All of one size: what runs them is compiled once.
        sizes = common_sizes([problem.graph for problem in (*problems, *judged)])
        self.problems, self.judged = stack_problems(problems, sizes), stack_problems(judged, sizes)
        self.count, self.judged_count = len(problems), len(judged)
        self.judge_key = jax.random.fold_in(key, 0xCAFE)

    def template(self, policy: AbstractProposalPolicy) -> TrainingRun:
        facts = _Facts(
            jnp.zeros((self.count, self.bandit.seeds), jnp.float32),
            jnp.zeros((self.judged_count, self.judge.seeds), jnp.float32),
        )
        learner = new_learner(policy, self.bandit)
        return TrainingRun(learner, policy, jnp.zeros((), jnp.float32), facts)

    def facts(self) -> _Facts:
        brkga, budget = self.bandit.brkga, self.bandit.budget
        train = self._costs(brkga, self.problems, self.key, self.bandit.seeds, budget, None)
        return _Facts(train, self._judge(None))

    def step(self, run: TrainingRun, number: int) -> tuple[Learner, dict[str, float]]:
        learner, metrics = bandit_step(
            self.bandit,
            run.learner,
            self.problems,
            run.facts.plain,
            chosen_problems(self.key, number, self.bandit.problems, self.count),
            self.key,
            number,
        )
        return learner, {name: float(value) for name, value in metrics.items()}

    def score(self, policy: AbstractProposalPolicy, facts: _Facts) -> float:
        ratio = np.asarray(relative(self._judge(policy), facts.held_out_plain))
        return float(np.mean(np.minimum(ratio, float(self.bandit.worst_ratio)), dtype=np.float64))

    def _judge(self, policy: AbstractProposalPolicy | None) -> jax.Array:
        judge, brkga = self.judge, self.bandit.brkga
        return self._costs(brkga, self.judged, self.judge_key, judge.seeds, judge.budget, policy)

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
