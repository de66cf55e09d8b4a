"""The decisions of a plan, in any of its forms, checked against the function that it is to run."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from egx.errors import DecisionError
from egx.formats.jaxpr import Traced
from egx.problems.execution import DECISIONS, Execution
from egx.report.execution_plan import ExecutionPlan
from egx.report.execution_plan_file import read_execution_plan
from egx.training.result import Result

AnyPlan = Result | ExecutionPlan | Mapping[str, Any] | str | os.PathLike[str]


class Chosen(NamedTuple):
    """Decisions by name, an entry per real op, and the ops in the order in which they start where
    the plan says it."""

    decisions: dict[str, np.ndarray]
    order: list[int] | None


def chosen(traced: Traced, plan: AnyPlan, problem: Execution | None = None) -> Chosen:
    """What a plan decides.

    Args:
        traced: the function to run.
        plan: a result, a plan or its file, or decisions.
        problem: what it was made for: says the order of a plan that run-time order makes.

    Raises:
        DecisionError: for a plan of another graph, or decisions of a wrong shape or value.
        FormatError: for a file that is no plan.
    """
    name, ops = traced.model.source, len(traced.ops)
    if isinstance(plan, str | os.PathLike):
        plan = read_execution_plan(Path(plan))
    if problem is not None:
        check_problem(traced, problem)
    if isinstance(plan, ExecutionPlan):
        _check_digest(traced, plan.model.digest, plan.model.ops, f"the plan {plan.name!r}")
        given: dict[str, Any] = {
            "device": [record.device_index for record in plan.ops],
            "fusion": [record.fusion for record in plan.ops],
            "priority": [record.priority for record in plan.ops],
        }
        place = np.array([record.place for record in plan.ops])
        return Chosen(_checked(given, {ops}, ops, name), np.argsort(place, kind="stable").tolist())
    if isinstance(plan, Result):
        made_for = plan.provenance.get("problem", {})
        if made_for.get("kind") != "Execution":
            raise DecisionError(
                f"the result is of {made_for.get('kind', 'an unknown problem')}; expected one of "
                "Execution, which says where each op runs"
            )
        count = int(made_for.get("ops with padding", ops))
        _check_digest(traced, made_for.get("graph"), count, "the result")
        decisions = _checked(plan.decisions, {count}, ops, name)
    elif isinstance(plan, Mapping):
        sizes = {ops} if problem is None else {ops, problem.graph.num_ops}
        decisions = _checked(plan, sizes, ops, name)
    else:
        raise DecisionError(
            f"expected a Result, decisions or the path of a plan.json, got {type(plan).__name__}"
        )
    order = None
    if problem is not None and problem.order == "runtime":
        order = _simulated_order(problem, decisions)
    return Chosen(decisions, order)


def check_problem(traced: Traced, problem: Execution) -> None:
    """Refuses a problem of another graph."""
    if not isinstance(problem, Execution):
        raise DecisionError(f"expected an Execution problem, got {type(problem).__name__}")
    model = problem.model.value
    digest = None if model is None else model.digest
    _check_digest(traced, digest, problem.graph.num_ops, "the problem")


def _check_digest(traced: Traced, digest: str | None, ops: int, what: str) -> None:
    if digest != traced.model.digest:
        raise DecisionError(
            f"{what} is of another graph ({ops} ops, digest {str(digest)[:12]}) than "
            f"{traced.model.source} as it is traced here ({len(traced.ops)} ops, digest "
            f"{traced.model.digest[:12]}): give the same function, shapes and options of trace"
        )


def _checked(
    given: Mapping[str, Any], sizes: set[int], ops: int, name: str
) -> dict[str, np.ndarray]:
    unknown = sorted(set(given) - set(DECISIONS))
    if unknown:
        raise DecisionError(f"unknown decisions {unknown}; a plan has {', '.join(DECISIONS)}")
    found = {}
    for key, value in given.items():
        if key == "transfer_priority":
            continue
        try:
            array = np.asarray(value)
        except ValueError as error:
            raise DecisionError(f"decision {key!r} is no array: {error}") from None
        if array.ndim != 1 or len(array) not in sizes:
            raise DecisionError(
                f"decision {key!r} has shape {array.shape}, but {name} has {ops} ops: the plan "
                "is of another graph, or traced with other options"
            )
        array = array[:ops]
        kinds, what = ("iuf", "numbers") if key == "priority" else ("iu", "integers")
        if array.dtype.kind not in kinds:
            raise DecisionError(f"decision {key!r} must hold {what}, got {array.dtype}")
        wrong = ~np.isfinite(array) if key == "priority" else array < 0
        if wrong.any():
            at = int(np.argmax(wrong))
            raise DecisionError(f"decision {key!r} at op {at} is {array[at]}")
        found[key] = array
    return found


def _simulated_order(problem: Execution, decisions: Mapping[str, np.ndarray]) -> list[int]:
    """Ops as the simulator starts them."""
    padded = {}
    for key, value in decisions.items():
        padded[key] = np.zeros(problem.graph.num_ops, value.dtype)
        padded[key][: len(value)] = value
    line = problem.timeline(padded)
    return [int(op) for op in line.op[~line.is_transfer]]


__all__: Sequence[str] = ["AnyPlan", "Chosen", "check_problem", "chosen"]
