"""The functions that people call: load a model, optimize a problem, compare searchers."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from egx import zoo
from egx.errors import GraphError, SearchError
from egx.graph.graph import Model
from egx.problems.base import AbstractProblem
from egx.search.base import AbstractSearch
from egx.search.registry import make_search
from egx.training.loop import Progress, run
from egx.training.result import Result


def load(source: str | os.PathLike[str], **options: Any) -> Model:
    """The model called `source` in the zoo."""
    return zoo.load(os.fspath(source), **options)


def optimize(
    problem: AbstractProblem,
    algorithm: str | AbstractSearch = "random",
    *,
    budget: int = 4000,
    seed: int = 0,
    options: Mapping[str, Any] | None = None,
    time_limit_s: float | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> Result:
    """Searches for the decisions of least cost with exactly `budget` evaluations."""
    if isinstance(algorithm, AbstractSearch):
        search, name = algorithm, type(algorithm).__name__
    else:
        search, name = make_search(algorithm, options), algorithm
    return run(
        search,
        problem,
        budget=budget,
        seeds=[seed],
        name=name,
        time_limit_s=time_limit_s,
        progress=progress,
    )[0]
