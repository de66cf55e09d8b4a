"""The functions that people call: load a model, optimize a problem, compare searchers."""

from __future__ import annotations

import os
from typing import Any

from egx import zoo
from egx.graph.graph import Model
from egx.search.base import AbstractSearch
from egx.search.registry import make_search
from egx.training.loop import run


def load(source: str | os.PathLike[str], **options: Any) -> Model:
    """The model called `source` in the zoo."""
    return zoo.load(os.fspath(source), **options)


def optimize(problem, algorithm="random", *, budget=4000, seed=0, options=None, **kw):
    if isinstance(algorithm, AbstractSearch):
        search, name = algorithm, type(algorithm).__name__
    else:
        search, name = make_search(algorithm, options), algorithm
    return run(search, problem, budget=budget, seeds=[seed], name=name, **kw)[0]
