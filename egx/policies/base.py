"""What a policy is: a network from a problem to the logits of its decisions."""

from __future__ import annotations

import abc
import os
from collections.abc import Mapping
from typing import Any

import equinox as eqx
from jaxtyping import PRNGKeyArray

from egx.errors import SearchError
from egx.policies.distributions import Logits, greedy, sample, to_decisions
from egx.policies.files import save_policy
from egx.problems.base import AbstractProblem, Decisions

Choices = tuple[tuple[str, int], ...]

REAL_LEVELS = 16


class AbstractPolicy(eqx.Module):
    """A network whose size never depends on the graph, so that one trained policy runs on all.

    Its leaves are arrays; everything else is in `config`, from which, with the leaves, a
    checkpoint rebuilds it.
    """

    @abc.abstractmethod
    def __call__(self, problem: AbstractProblem) -> Any:
        """What the network says of the decisions: `Logits` [N, choices] of each head, rows of
        padding 0; a policy that says something else brings its own `decide`."""

    @abc.abstractmethod
    def config(self) -> dict[str, Any]:
        """What `from_config` needs to build a policy of the same shape; JSON types only."""

    @classmethod
    @abc.abstractmethod
    def from_config(cls, config: Mapping[str, Any], key: PRNGKeyArray) -> AbstractPolicy:
        """A policy of the shape that `config` describes, freshly initialised."""

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes this policy to one file, for `egx.load_policy`.

        Raises:
            CheckpointError: if the file cannot be written.
        """
        save_policy(self, path)

    def decide(self, problem: AbstractProblem, *, key: PRNGKeyArray | None = None) -> Decisions:
        """Decisions for `problem`: the most likely ones, or with a key a sample."""
        logits: Logits = self(problem)
        levels = greedy(logits) if key is None else sample(logits, key=key)
        choices = {name: value.shape[-1] for name, value in logits.items()}
        return to_decisions(problem.heads, levels, choices)


def head_choices(problem: AbstractProblem, real_levels: int = REAL_LEVELS) -> Choices:
    """(name, number of choices) of each head; a real head is cut into `real_levels` levels.

    Raises:
        SearchError: naming a head that is not decided op by op.
    """
    choices = []
    for name, head in problem.heads.items():
        if head.axis != "op":
            raise SearchError(
                f"decision {name!r} is made per {head.axis}; this policy decides per op"
            )
        choices.append((name, real_levels if head.choices == "real" else head.choices))
    return tuple(choices)


def check_choices(policy: str, have: Choices, want: Choices) -> None:
    """Raises SearchError when a policy for `have` is asked to decide `want`."""
    if dict(have) != dict(want):
        raise SearchError(
            f"the {policy} policy decides {dict(have)}, but the problem asks for {dict(want)}"
        )
