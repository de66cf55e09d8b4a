"""REGAL: a genetic algorithm on random keys whose proposals a trained network chooses.

Paliwal et al., "Reinforced Genetic Algorithm Learning for Optimizing Computation Graphs", ICLR
2020, arXiv 1905.02494. The network sees the graph once; mutants and the first population are then
drawn from the Beta distributions that it chose, and everything else is BRKGA. `gas` is the same
with a recurrent network over the ops.

Shapes: W keys of a candidate, K knots of a quantile function.
"""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from egx.errors import SearchError
from egx.policies.loading import PRETRAINED, load_shipped
from egx.policies.proposal import (
    FRACTIONS,
    AbstractProposalPolicy,
    ProposalBins,
    ProposalLogits,
    likeliest_bins,
    marginal_moments,
    sample_bins,
)
from egx.problems.base import AbstractOutcome, AbstractProblem, Decisions
from egx.problems.execution import Execution
from egx.search.base import AbstractSearch, Metrics
from egx.search.betas import betas_of_moments, bin_knots, quantile_knots
from egx.search.brkga import BRKGA, Population
from egx.search.keys import flatten

ACTIONS = ("sample", "mode", "marginal")


class Regal(AbstractSearch):
    """BRKGA with proposals from a policy.

    With the same seed a policy that chooses Beta(1, 1) everywhere gives BRKGA's own result.

    Args:
        brkga: the genetic algorithm.
        policy: what `egx.train(problems, "regal")` gave; None is the policy that comes with egx
            for the problem's decisions and objective.
        action: "sample" draws the bins of each key's distribution, as in training; "mode" takes
            the likeliest; "marginal" takes distributions with the moments that keys have over all
            draws of their bins.
        kind: which of the policies that come with egx: "regal" or "gas".
    """

    brkga: BRKGA = eqx.field(default_factory=BRKGA)
    policy: AbstractProposalPolicy | None = None
    action: str = eqx.field(static=True, default="sample")
    kind: str = eqx.field(static=True, default="regal")

    def __check_init__(self) -> None:
        if self.action not in ACTIONS:
            raise SearchError(f"action must be {', '.join(ACTIONS)}, got {self.action!r}")
        if self.policy is not None and not isinstance(self.policy, AbstractProposalPolicy):
            raise SearchError(
                f"{self.kind} takes a policy that egx.train(problems, {self.kind!r}) gave, "
                f"got a {type(self.policy).__name__}"
            )

    @property
    def batch_size(self) -> int:
        return self.brkga.batch_size

    def check(self, problem: AbstractProblem) -> None:
        self.brkga.check(problem)
        if self.brkga.proposal is not None:
            raise SearchError(f"{self.kind} proposes by its policy; brkga.proposal must be None")
        self._policy(problem).check(problem)

    def _policy(self, problem: AbstractProblem) -> AbstractProposalPolicy:
        return shipped_policy(problem, self.kind) if self.policy is None else self.policy

    def initial(self, problem: AbstractProblem, *, key: PRNGKeyArray) -> Population:
        # BRKGA's own keys, so that both see the same random numbers.
        action_key = jax.random.fold_in(key, 1)
        knots = proposal_knots(problem, self._policy(problem)(problem), self.action, key=action_key)
        return self.brkga.begin(problem, key=key, proposal=knots)

    def propose(
        self, problem: AbstractProblem, inner: Population, *, key: PRNGKeyArray
    ) -> tuple[Decisions, Population]:
        return self.brkga.propose(problem, inner, key=key)

    def update(
        self,
        problem: AbstractProblem,
        inner: Population,
        candidates: Decisions,
        outcomes: AbstractOutcome,
        *,
        key: PRNGKeyArray,
    ) -> tuple[Population, Metrics]:
        return self.brkga.update(problem, inner, candidates, outcomes, key=key)


def gas(**options: object) -> Regal:
    """REGAL with a recurrent network over the ops ("graph as a sequence")."""
    return Regal(**{**options, "kind": "gas"})  # type: ignore[arg-type]


def proposal_knots(
    problem: AbstractProblem, logits: ProposalLogits, action: str, *, key: PRNGKeyArray
) -> Float[Array, "W K"]:
    """The quantile functions that a policy chooses for a problem's keys."""
    if action == "marginal":
        moments = marginal_moments(logits)
        return quantile_knots(problem, betas_of_moments(moments.mean, moments.fraction))
    bins = likeliest_bins(logits) if action == "mode" else sample_bins(logits, key=key)
    return knots_of_bins(problem, bins, bin_knots())


def knots_of_bins(
    problem: AbstractProblem, bins: ProposalBins, knots: Float[Array, "M F K"]
) -> Float[Array, "W K"]:
    """The quantile functions of chosen bins, looked up in `bin_knots()`."""
    return knots.reshape(-1, knots.shape[-1])[rows_of_bins(problem, bins)]


def rows_of_bins(problem: AbstractProblem, bins: ProposalBins) -> Int[Array, " W"]:
    """The rows of chosen bins in `bin_knots()`, one for each pair of a mean and a variance."""
    rows = {
        name: (mean * len(FRACTIONS) + bins.fraction[name]).astype(jnp.float32)
        for name, mean in bins.mean.items()
    }
    return flatten(problem, rows).astype(jnp.int32)


def shipped_policy(problem: AbstractProblem, kind: str = "regal") -> AbstractProposalPolicy:
    """The trained policy that comes with egx for problems like this one.

    Raises:
        SearchError: if there is none.
    """
    name = _shipped_name(problem, kind)
    if name is None or not (PRETRAINED / f"{name}.npz").is_file():
        known = sorted(path.stem for path in PRETRAINED.glob(f"{kind}_*.npz"))
        raise SearchError(
            f"no trained policy for {_description(problem)} comes with egx (there are: "
            f"{', '.join(known) or 'none'}); train one with egx.train(problems, {kind!r})"
            f"{_command(problem, kind)} and give it as policy"
        )
    policy = load_shipped(name)
    assert isinstance(policy, AbstractProposalPolicy)
    return policy


def _shipped_name(problem: AbstractProblem, kind: str) -> str | None:
    decided = ("device", "priority")
    if not isinstance(problem, Execution) or tuple(problem.heads) != decided:
        return None
    return f"{kind}_{problem.objective}_{problem.hardware.num_devices}"


def _command(problem: AbstractProblem, kind: str) -> str:
    """The same on the command line, where that makes such problems."""
    if not isinstance(problem, Execution):
        return ""
    return (
        f" or `egx train --algorithm {kind} --devices {problem.hardware.num_devices} "
        f"--objective {problem.objective} --decide {','.join(problem.heads)} --out policy`"
    )


def _description(problem: AbstractProblem) -> str:
    if not isinstance(problem, Execution):
        return type(problem).__name__
    decided = " and ".join(problem.heads)
    return (
        f"{problem.objective} on {problem.hardware.num_devices} devices, where {decided} are "
        f"decided,"
    )
