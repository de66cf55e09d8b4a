"""The same problem on a padded graph, so that many problems share one compiled program."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, TypeVar

import equinox as eqx
import jax
import numpy as np

from egx.errors import ProblemError
from egx.graph.graph import real_sizes
from egx.graph.padding import bucket_sizes, pad_graph
from egx.problems.base import AbstractProblem
from egx.problems.execution import Execution

_Problem = TypeVar("_Problem", bound=AbstractProblem)


def pad_problem(problem: _Problem, sizes: tuple[int, int, int]) -> _Problem:
    """`problem` on its graph padded to (ops, tensors, uses); host-side.

    Raises:
        ProblemError: if the problem keeps not all arguments of its constructor, the graph first,
            as fields of the same names.
        GraphError: if the graph is larger than `sizes`.
    """
    graph = problem.graph
    if (graph.num_ops, graph.num_tensors, graph.num_uses) == sizes:
        return problem
    _, *names = inspect.signature(type(problem)).parameters
    arguments: dict[str, Any] = {}
    for name in names:
        if name == "op_seconds" and isinstance(problem, Execution):
            if problem.is_measured:
                arguments[name] = np.asarray(problem.table.op_seconds)[: real_sizes(graph)[0]]
        elif hasattr(problem, name):
            arguments[name] = getattr(problem, name)
        else:
            raise ProblemError(
                f"{type(problem).__name__} cannot be padded: it keeps no field {name!r}"
            )
    padded = type(problem)(pad_graph(graph, sizes), **arguments)
    if isinstance(problem, Execution):
        # From the names of the model, which the padded graph has none of.
        layer = np.full(sizes[0], -1, np.int32)
        layer[: real_sizes(graph)[0]] = np.asarray(problem.layer)[: real_sizes(graph)[0]]
        padded = eqx.tree_at(lambda p: p.layer, padded, jax.device_put(layer))
    return padded


def stack_problems(
    problems: Sequence[_Problem], sizes: tuple[int, int, int] | None = None
) -> _Problem:
    """One problem with a leading batch axis, for `vmap`, padded to (ops, tensors, uses), by default
    to their common buckets.

    Raises:
        ProblemError: if there are no problems, or they differ in more than numbers and sizes.
    """
    if not problems:
        raise ProblemError("stack_problems needs at least one problem, got none")
    if sizes is None:
        sizes = bucket_sizes(*(problem.graph for problem in problems))
    padded = [pad_problem(problem, sizes) for problem in problems]
    structures: list[Any] = [jax.tree.structure(problem) for problem in padded]
    for index, structure in enumerate(structures):
        if structure != structures[0]:
            raise ProblemError(
                f"problem {index} is of another kind than problem 0: kind, decisions, options and "
                f"numbers of devices must be the same"
            )
    shapes = [[np.shape(leaf) for leaf in jax.tree.leaves(problem)] for problem in padded]
    for index, shape in enumerate(shapes):
        if shape != shapes[0]:
            raise ProblemError(
                f"problem {index} has arrays of other shapes than problem 0: the numbers of "
                f"devices and memory levels must be the same"
            )
    return jax.tree.map(lambda *leaves: jax.device_put(np.stack(leaves)), *padded)
