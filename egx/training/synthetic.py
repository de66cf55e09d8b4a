"""REGAL's synthetic corpus: random graphs, kept where a longer search pays.

Paliwal et al., ICLR 2020 (arXiv 1905.02494): a graph is kept only if BRKGA with a high budget is
at least 20 % faster than with a low one, or fits the memory limit where the low one does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from egx.errors import SearchError
from egx.graph.generators import regal_synthetic
from egx.graph.graph import Model
from egx.problems.base import AbstractProblem
from egx.problems.padded import pad_problem
from egx.search.registry import make_search
from egx.training.loop import run

# A search as the filter needs it: (cost, whether it fits) of what it finds with a budget.
Search = Callable[[AbstractProblem, int], tuple[float, bool]]

LOW, HIGH, LEAST_GAIN = 200, 5000, 0.2

# What every graph of the corpus fits in (ops, tensors, uses), so that one program serves all;
# denser graphs are padded to buckets of their own.
_SIZES = (208, 416, 1280)


def brkga_search(seed: int = 0, **options: Any) -> Search:
    """BRKGA as the filter takes it; `options` are those of "brkga"."""

    def search(problem: AbstractProblem, budget: int) -> tuple[float, bool]:
        graph = problem.graph
        held = (graph.num_ops, graph.num_tensors, graph.num_uses)
        sizes = (
            max(held[0], _SIZES[0]),
            max(held[1], _SIZES[1]),
            max(held[2], _SIZES[2]),
        )
        searcher = make_search("brkga", options, budget=budget)
        padded = pad_problem(problem, sizes)
        (result,) = run(searcher, padded, budget=budget, seeds=[seed], name="brkga")
        return result.cost, result.feasible

    return search


def has_headroom(
    problem: AbstractProblem,
    search: Search,
    *,
    low: int = LOW,
    high: int = HIGH,
    least_gain: float = LEAST_GAIN,
) -> bool:
    """Whether a longer search pays: it fits where a shorter one does not, or what it finds is
    faster by at least that share (low cost / high cost - 1).

    Raises:
        SearchError: unless 0 < low < high.
    """
    if not 0 < low < high:
        raise SearchError(f"budgets must be 0 < low < high, got low={low}, high={high}")
    low_cost, low_fits = search(problem, low)
    high_cost, high_fits = search(problem, high)
    if not high_fits:
        return False
    return not low_fits or low_cost >= (1 + least_gain) * high_cost


def synthetic_models(
    *,
    seed: int = 0,
    keep: Callable[[Model], bool] | None = None,
    most_tries: int = 1000,
    **shape: Any,
) -> Iterator[Model]:
    """An endless row of graphs like those of the paper's synthetic set.

    Args:
        seed: the n-th graph tried depends on the seed and n alone, not on `keep`.
        keep: leaves out graphs for which it is false, such as
            `lambda model: has_headroom(Execution(model, hardware), brkga_search())`.
        most_tries: how many in a row may be left out.
        shape: `family` and `ops` of `regal_synthetic`; a random family and 50 to 200 ops each.

    Raises:
        SearchError: when `keep` has refused that many graphs in a row.
    """
    refused = number = 0
    while True:
        model = regal_synthetic(np.random.default_rng((seed, number)), **shape)
        number += 1
        if keep is None or keep(model):
            refused = 0
            yield model
            continue
        refused += 1
        if refused >= most_tries:
            raise SearchError(
                f"the filter refused {refused} synthetic graphs in a row: a longer search seems "
                "not to pay on any; choose budgets that are further apart, or a lower least gain"
            )
