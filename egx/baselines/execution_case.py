"""From an execution problem to the host's view of it, and from constructed plans back."""

from __future__ import annotations

import jax.numpy as jnp

from egx.errors import SearchError
from egx.problems.base import AbstractProblem, Decisions
from egx.problems.execution import Execution
from egx.problems.execution_plans.plan import Plan, decisions_of
from egx.simulate.host_case import HostCase


def execution_problem(problem: AbstractProblem, what: str) -> Execution:
    """The problem itself, for `what` that plans several devices.

    Raises:
        SearchError: when it is another problem.
    """
    if not isinstance(problem, Execution):
        raise SearchError(f"{what} plans Execution only, got {type(problem).__name__}")
    return problem


def to_decisions(problem: Execution, case: HostCase, plan: Plan) -> Decisions:
    """A plan as the problem's own decisions, padded; what it does not decide is left out."""
    arrays = decisions_of(case, plan, problem.decide, problem.graph.num_ops, problem.graph.num_uses)
    return {name: jnp.asarray(arrays[name]) for name in problem.decide}
