"""Training of GO's policy on many graphs at once (GO-batch), judged without fine-tuning.

Zhou et al., "Transferable Graph Optimizers for ML Compilers", NeurIPS 2020, arXiv 2010.12438. A
step draws plans for some of the graphs, values them and takes a few steps of PPO, in one program;
validation takes the likeliest plan for each held-out graph (zero-shot).

Shapes: G training problems, V validation problems, B problems of a step, K plans of each.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from egx.errors import ProblemError, SearchError
from egx.policies.base import AbstractPolicy, head_choices
from egx.policies.distributions import Levels, Logits, greedy, sample, to_decisions, to_levels
from egx.policies.go_inputs import GoContext
from egx.policies.go_net import GoPolicy, tasks_of
from egx.problems.base import AbstractOutcome, AbstractProblem, Decisions
from egx.problems.padded import pad_problem, stack_problems
from egx.search.base import Metrics
from egx.search.ppo import (
    PPO,
    Baseline,
    Learner,
    advantages,
    imitate,
    learn,
    new_baseline,
    new_learner,
)
from egx.training.bandit import relative
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

KIND = "go"


@dataclasses.dataclass(frozen=True)
class GoBatch:
    """The size of a step.

    Args:
        problems: a step (B).
        samples: plans of each (K).
        imitation_steps: the first steps, which imitate the best plan that each problem's
            heuristics know instead of drawing plans: not of the paper, see
            `egx.search.ppo.imitate`.
        teachers: names of the heuristics among which the best is imitated; all if none are named.
    """

    problems: int = 8
    samples: int = 8
    imitation_steps: int = 0
    teachers: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class GoValidation:
    """How a policy is judged while it is trained.

    Args:
        every: steps between two validations.
        worst_ratio: costs above this multiple of the best heuristic's count as this multiple.
    """

    every: int = 20
    worst_ratio: float = 4.0


def train_go(
    problems: Sequence[AbstractProblem],
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
) -> Trained[GoPolicy]:
    """Trains a policy that decides everything about an op by one network.

    Args:
        problems: what to train on, of one kind: the same decisions, options and sizes of hardware.
        steps: batches; each is `ppo.epochs` steps of Adam.
        seed: 0 to 2^32 - 1.
        validation: held-out problems of the same kind; by default every fifth one of `problems`,
            which is then not trained on, and with fewer than ten problems all of them.
        options: fields of `GoBatch`; of `PPO` as "ppo.clip", of `GoValidation` as
            "validation.every", and of `GoPolicy` as "network.width".
        policy: where to start; by default a fresh network.
        progress: True for a bar, or a callable. It shows steps as evaluations, and the best
            validation score beside 1, the best heuristic.
        checkpoint_dir: a folder for checkpoints.
        checkpoint_every_s: seconds between two checkpoints.
        resume: go on from the checkpoint in that folder, if there is one.

    Returns:
        The policy of the best validation, its score the cost of the likeliest plans over that of
        the best heuristic, geometric mean over the validation problems; after Ctrl-C the best so
        far, flagged.

    Raises:
        SearchError: for an impossible argument, or problems that the policy does not fit.
        ProblemError: for problems of different kinds.
        CheckpointError: for a checkpoint that cannot be written, or is of another training.
    """
    steps = whole_number("steps", steps, 0, 2**30)
    seed = whole_number("seed", seed, 0, 2**32 - 1)
    ppo, batch, judge, network = _settings(options or {})
    chosen, judged = held_out(problems, validation)
    key = jax.random.key(seed)
    start = _start(policy, chosen[0], network, key)
    for problem in (*chosen, *judged):
        start.check(problem)
    return run_training(
        _Training(concrete(ppo), batch, judge, chosen, judged, steps, key),
        start,
        {"ppo": ppo, "batch": batch, "validation": judge},
        chosen,
        judged,
        seed=seed,
        progress=progress,
        checkpoint_dir=checkpoint_dir,
        checkpoint_every_s=checkpoint_every_s,
        resume=resume,
    )


def _settings(
    options: Mapping[str, Any],
) -> tuple[PPO, GoBatch, GoValidation, dict[str, Any]]:
    parts = split_options(
        options, {"": GoBatch, "ppo": PPO, "validation": GoValidation, "network": None}
    )
    names = parts[""].get("teachers", ())
    if isinstance(names, str):
        # As the command line gives them.
        names = names.split(",")
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise SearchError(f"teachers must be names of heuristics, got {names!r}")
    batch = GoBatch(**{**parts[""], "teachers": tuple(names)})
    judge = GoValidation(**parts["validation"])
    for name, number in (
        ("problems", batch.problems),
        ("samples", batch.samples),
        ("validation.every", judge.every),
    ):
        whole_number(name, number, 1, 2**30)
    whole_number("imitation_steps", batch.imitation_steps, 0, 2**30)
    worst = judge.worst_ratio
    if isinstance(worst, bool) or not isinstance(worst, int | float) or not worst > 0:
        raise SearchError(f"validation.worst_ratio must be a number above 0, got {worst!r}")
    return make_part(PPO, parts["ppo"]), batch, judge, parts["network"]


def _start(
    policy: AbstractPolicy | None,
    problem: AbstractProblem,
    network: Mapping[str, Any],
    key: jax.Array,
) -> GoPolicy:
    if isinstance(policy, GoPolicy):
        if network:
            raise SearchError(
                f"network.{next(iter(network))} is of a fresh network; the policy to start from "
                "has its own"
            )
        return policy
    if policy is not None:
        raise SearchError(f"{KIND} cannot start from a {type(policy).__name__}")
    try:
        return GoPolicy(
            **{"tasks": tasks_of(problem), **network}, key=jax.random.fold_in(key, 0xBEE)
        )
    except TypeError as error:
        raise SearchError(f"the {KIND} network cannot be made with {network}: {error}") from error


class _Learner(eqx.Module):
    """PPO's learner and the running means of all training problems."""

    learner: Learner
    baseline: Baseline

    @property
    def policy(self) -> GoPolicy:
        return self.learner.policy


class _Facts(eqx.Module):
    """Costs [G] that rewards are relative to, and [V] that validation is; plans to imitate
    [G, N], of no kind when none are."""

    reference: Float[Array, " G"]
    best_heuristic: Float[Array, " V"]
    known: Levels


class _Training(AbstractTraining[GoPolicy]):
    """One call of `train_go`."""

    def __init__(
        self,
        ppo: PPO,
        batch: GoBatch,
        judge: GoValidation,
        problems: Sequence[AbstractProblem],
        judged: Sequence[AbstractProblem],
        steps: int,
        key: jax.Array,
    ):
        super().__init__(KIND, steps, judge.every, key)
        self.ppo, self.batch, self.judge = ppo, batch, judge
        # All of one size: what runs them is compiled once.
        sizes = common_sizes([problem.graph for problem in (*problems, *judged)])
        self.each = [pad_problem(problem, sizes) for problem in problems]
        self.each_judged = [pad_problem(problem, sizes) for problem in judged]
        self.problems = stack_problems(self.each, sizes)
        self.judged = stack_problems(self.each_judged, sizes)
        self.contexts: tuple[GoContext, GoContext] | None = None
        self.choices: dict[str, int] = {}

    def template(self, policy: GoPolicy) -> TrainingRun:
        count, judged = len(self.each), len(self.each_judged)
        # They depend on the policy's sizes alone, not on its weights.
        self.contexts = _contexts(policy, self.problems), _contexts(policy, self.judged)
        self.choices = dict(head_choices(self.each[0], policy.real_levels))
        shape = (count, self.each[0].graph.num_ops)
        known = {name: jnp.zeros(shape, jnp.int32) for name in self._imitated()}
        zeros = _Facts(jnp.zeros(count, jnp.float32), jnp.zeros(judged, jnp.float32), known)
        learner = _Learner(new_learner(policy), new_baseline((count,)))
        return TrainingRun(learner, policy, jnp.zeros((), jnp.float32), zeros)

    def _imitated(self) -> tuple[str, ...]:
        """The kinds of decisions that are imitated."""
        return tuple(self.each[0].heads) if self.batch.imitation_steps else ()

    def facts(self) -> _Facts:
        best = [_best_heuristic(problem)[0] for problem in self.each_judged]
        plans = []
        if self.batch.imitation_steps:
            for problem in self.each:
                plan = _best_heuristic(problem, self.batch.teachers)[1]
                plans.append(to_levels(problem.heads, plan, self.choices))
        known = {name: jnp.stack([plan[name] for plan in plans]) for name in self._imitated()}
        return _Facts(self.problems.reference_cost, jnp.asarray(best, jnp.float32), known)

    def step(self, run: TrainingRun, number: int) -> tuple[_Learner, dict[str, float]]:
        assert self.contexts is not None
        index = chosen_problems(self.key, number, self.batch.problems, len(self.each))
        if number < self.batch.imitation_steps:
            imitator, loss = imitation_step(
                self.ppo, run.learner.learner, self.contexts[0], run.facts.known, index
            )
            return _Learner(imitator, run.learner.baseline), {"imitation": float(loss)}
        learner, metrics = go_step(
            self.ppo,
            run.learner,
            self.problems,
            self.contexts[0],
            run.facts.reference,
            index,
            jax.random.fold_in(self.key, number),
            self.batch.samples,
        )
        return learner, {name: float(value) for name, value in metrics.items()}

    def score(self, policy: GoPolicy, facts: _Facts) -> float:
        assert self.contexts is not None
        cost, feasible = zero_shot(policy, self.judged, self.contexts[1])
        ratio = np.asarray(relative(cost[:, None], facts.best_heuristic[:, None]), np.float64)
        ratio = np.where(np.asarray(feasible), ratio[:, 0], self.judge.worst_ratio)
        ratio = np.clip(ratio, 1e-9, self.judge.worst_ratio)
        return float(np.exp(np.mean(np.log(ratio))))


@eqx.filter_jit
def _contexts(policy: GoPolicy, problems: AbstractProblem) -> GoContext:
    return jax.vmap(policy.context)(problems)


@eqx.filter_jit
def zero_shot(
    policy: GoPolicy, problems: AbstractProblem, contexts: GoContext
) -> tuple[Float[Array, " V"], Bool[Array, " V"]]:
    """Cost and feasibility of the likeliest plan for each problem of a stack."""

    def single(problem: AbstractProblem, context: GoContext) -> tuple[Array, Array]:
        logits = policy.logits(context)
        outcome = problem.evaluate(_decisions(problem, logits, greedy(logits)))
        return outcome.cost, outcome.feasible

    return jax.vmap(single)(problems, contexts)


@eqx.filter_jit
def imitation_step(
    ppo: PPO,
    learner: Learner,
    contexts: GoContext,
    known: Mapping[str, Int[Array, "G N"]],
    index: Int[Array, " B"],
) -> tuple[Learner, Float[Array, ""]]:
    """A step towards the known plans of the problems `index` of a stack."""
    taken, levels = jax.tree.map(lambda x: x[index], (contexts, dict(known)))
    levels = {name: value[:, None] for name, value in levels.items()}
    mask = jax.vmap(lambda context: context.mask)(taken)
    return imitate(ppo, learner, taken, levels, mask[:, None])


@eqx.filter_jit
def go_step(
    ppo: PPO,
    learner: _Learner,
    problems: AbstractProblem,
    contexts: GoContext,
    reference: Float[Array, " G"],
    index: Int[Array, " B"],
    key: PRNGKeyArray,
    samples: int,
) -> tuple[_Learner, Metrics]:
    """One batch: plans of the problems `index` of a stack, their values, and PPO's epochs."""
    taken = jax.tree.map(lambda x: x[index], (problems, contexts, reference))
    keys = jax.random.split(key, (index.shape[0], samples))
    policy = learner.learner.policy

    def draw(
        problem: AbstractProblem, context: GoContext, keys: Array
    ) -> tuple[Logits, Levels, Array, Array]:
        logits = policy.logits(context)
        levels = jax.vmap(lambda key: sample(logits, key=key))(keys)
        plans = jax.vmap(lambda one: _decisions(problem, logits, one))(levels)
        outcomes = jax.vmap(problem.evaluate)(plans)
        return logits, levels, outcomes.cost, outcomes.feasible

    logits, levels, cost, feasible = jax.vmap(draw)(taken[0], taken[1], keys)
    before = jax.tree.map(lambda x: x[index], learner.baseline)
    advantage, reward, after = jax.vmap(
        lambda cost, feasible, reference, one: advantages(ppo, cost, feasible, reference, one)
    )(cost, feasible, taken[2], before)
    baseline = jax.tree.map(lambda old, new: _last_of(old, new, index), learner.baseline, after)
    learned, metrics = learn(ppo, learner.learner, taken[1], logits, levels, advantage)
    ratio = jnp.min(jnp.where(feasible, cost, jnp.inf), 1) / taken[2]
    metrics = {
        "reward": jnp.mean(reward),
        "feasible_share": jnp.mean(feasible.astype(jnp.float32)),
        "best_over_reference": jnp.mean(jnp.where(jnp.isfinite(ratio), ratio, 1.0)),
        **metrics,
    }
    return _Learner(learned, baseline), metrics


def _last_of(
    old: Float[Array, " G"], new: Float[Array, " B"], index: Int[Array, " B"]
) -> Float[Array, " G"]:
    """`old` with `new` at `index`. Where two passes over the problems meet, a batch may have one
    twice: its last entry is kept, on every machine (an assignment would leave that open)."""
    place = jnp.full(old.shape, -1, jnp.int32)
    place = place.at[index].max(jnp.arange(index.shape[0], dtype=jnp.int32))
    return jnp.where(place >= 0, new[place], old)


def _decisions(problem: AbstractProblem, logits: Logits, levels: Levels) -> Decisions:
    return to_decisions(
        problem.heads, levels, {name: value.shape[-1] for name, value in logits.items()}
    )


def _best_heuristic(problem: AbstractProblem, names: Sequence[str] = ()) -> tuple[float, Decisions]:
    """The known plan of least cost, feasible ones first, and its cost; of all, or of `names`."""
    known = []
    plans = problem.heuristics()
    for name in names:
        if name not in plans:
            raise SearchError(f"teachers: the problem knows {', '.join(plans)}, not {name!r}")
    # Each plan is made when it is looked at: once.
    for name in names or plans:
        plan = plans[name]
        outcome = _evaluate(problem, dict(plan))
        known.append((not bool(outcome.feasible), float(outcome.cost), name, plan))
    if not known:
        raise ProblemError("training needs problems with a known plan")
    _, cost, _, plan = min(known, key=lambda entry: entry[:3])
    return cost, dict(plan)


@eqx.filter_jit
def _evaluate(problem: AbstractProblem, plan: Decisions) -> AbstractOutcome:
    """All problems are of one size: one program for all plans."""
    return problem.evaluate(plan)
