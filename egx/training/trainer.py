"""Training a policy on problems, by the searchers that have one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import equinox as eqx
import jax
import numpy as np

from egx.errors import SearchError
from egx.policies.base import AbstractPolicy
from egx.problems.base import AbstractProblem, expect_problem
from egx.search.base import State
from egx.search.registry import find_search
from egx.training.generation import concrete
from egx.training.go_trainer import KIND as GO
from egx.training.go_trainer import train_go
from egx.training.loop import MAX_BUDGET, run_one, whole_number
from egx.training.progress import ProgressCallback
from egx.training.regal_trainer import KINDS, train_proposals


@runtime_checkable
class TrainsPolicy(Protocol):
    """A searcher that leaves a trained network behind."""

    def best_policy(self, state: State) -> AbstractPolicy:
        """The network of the run that did best."""


def train(
    problems: AbstractProblem | Sequence[AbstractProblem],
    algorithm: str = "egrl",
    *,
    budget: int | None = None,
    rounds: int | None = None,
    steps: int | None = None,
    seed: int = 0,
    options: Mapping[str, Any] | None = None,
    policy: AbstractPolicy | None = None,
    progress: bool | ProgressCallback = False,
    **more: Any,
) -> AbstractPolicy:
    """Trains a policy on one or several problems, for use on those and on others.

    "regal" and "gas" train on all problems at once, by steps, each of runs of the genetic
    algorithm, and "go" by steps of drawn plans; the policy that did best on held-out problems is
    returned. Other searchers visit
    the problems in turn, each time going on from the policy so far; of all policies met on the
    way, the one whose greedy decisions have the highest mean reward over all problems is returned.
    Neither choice counts as evaluations.

    Args:
        problems: what to train on; their decisions must be of the same kinds.
        algorithm: "regal", "gas", "go", or a searcher that trains a network: "egrl", "pg", ...
        budget: evaluations per problem, 4000 by default; with steps, per run, 480 by default.
        rounds: visits to each problem, which share its budget; 1 for one problem, else 4.
        steps: of "regal", "gas" and "go", 1000 by default.
        seed, options, policy, progress: as in `optimize`; with steps, the options are those of
            `egx.training.regal_trainer.train_proposals` or `egx.training.go_trainer.train_go`.
        more: with steps, `validation`, `checkpoint_dir`, `checkpoint_every_s` and `resume` as
            there.

    Raises:
        SearchError: for a searcher without a network, or an impossible argument.
        ProblemError: for what is no problem.
    """
    visited = list(problems) if isinstance(problems, Iterable) else [problems]
    if not visited:
        raise SearchError("train needs at least one problem")
    for problem in visited:
        expect_problem(problem)
    if algorithm in (*KINDS, GO):
        if rounds is not None:
            raise SearchError(f"{algorithm} trains by steps: it takes no rounds")
        if algorithm == GO and budget is not None:
            raise SearchError(f"{GO} draws a batch of plans a step: it takes no budget")
        given = dict(options or {}) | ({} if budget is None else {"budget": budget})
        steps = 1000 if steps is None else steps
        shared: dict[str, Any] = {"steps": steps, "seed": seed, "options": given, "policy": policy}
        if algorithm == GO:
            return train_go(visited, **shared, progress=progress, **more).policy
        return train_proposals(visited, algorithm, **shared, progress=progress, **more).policy
    if steps is not None or more:
        refused = "steps" if steps is not None else sorted(more)[0]
        raise SearchError(f"{algorithm} does not train by steps: it takes no {refused}")
    budget = whole_number("budget", 4000 if budget is None else budget, 1, MAX_BUDGET)
    if rounds is None:
        rounds = 1 if len(visited) == 1 else 4
    rounds = whole_number("rounds", rounds, 1, budget)
    best, best_reward = policy, -math.inf
    if policy is not None:
        best_reward = mean_reward(policy, visited)
    for turn in range(rounds):
        spend = budget * (turn + 1) // rounds - budget * turn // rounds
        for index, problem in enumerate(visited):
            search, name = find_search(algorithm, options, budget=spend, policy=policy)
            if not isinstance(search, TrainsPolicy):
                raise SearchError(f"{name} trains no policy")
            number = turn * len(visited) + index
            run_seed = int(np.random.SeedSequence((seed, number)).generate_state(1)[0])
            result, state = run_one(
                search,
                problem,
                budget=max(spend, 1),
                seed=seed if number == 0 else run_seed,
                name=f"{name}, round {turn + 1} of {rounds}",
                progress=progress,
            )
            policy = search.best_policy(state)
            reward = mean_reward(policy, visited)
            if best is None or reward > best_reward:
                best, best_reward = policy, reward
            if result.interrupted:
                return best
    assert best is not None  # there was at least one problem and one round
    return best


def mean_reward(policy: AbstractPolicy, problems: Sequence[AbstractProblem]) -> float:
    """The mean reward of a policy's greedy decisions."""
    rewards = [_greedy_reward(concrete(policy), concrete(problem)) for problem in problems]
    return float(np.mean([float(reward) for reward in rewards]))


@eqx.filter_jit
def _greedy_reward(policy: AbstractPolicy, problem: AbstractProblem) -> jax.Array:
    return problem.evaluate(policy.decide(problem)).reward
