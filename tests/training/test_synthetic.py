"""The synthetic corpus and its filter."""

from __future__ import annotations

import itertools

import pytest

import egx
from egx.errors import SearchError
from egx.training.synthetic import brkga_search, has_headroom, synthetic_models
from tests.runs import small_problem


def found(costs):
    """A search with a cost and a fit by budget, and what it was asked."""
    asked = []

    def search(problem, budget):
        asked.append(budget)
        return costs[budget]

    return search, asked


@pytest.mark.parametrize(
    ("low", "high", "kept"),
    [
        ((1.2, True), (1.0, True), True),
        ((1.19, True), (1.0, True), False),
        ((1.0, True), (1.0, True), False),
        # It fits where the shorter search did not, whatever it costs.
        ((1.0, False), (9.0, True), True),
        ((9.0, False), (1.0, False), False),
        ((9.0, True), (1.0, False), False),
    ],
)
def test_a_graph_is_kept_where_a_longer_search_pays(low, high, kept):
    search, asked = found({10: low, 500: high})
    assert has_headroom(small_problem(), search, low=10, high=500) is kept
    assert asked == [10, 500]


def test_budgets_in_the_wrong_order_are_named():
    search, _ = found({})
    with pytest.raises(SearchError, match="0 < low < high, got low=5, high=5"):
        has_headroom(small_problem(), search, low=5, high=5)


def test_the_row_depends_on_the_seed_and_on_nothing_else():
    first = [m.digest for m in itertools.islice(synthetic_models(seed=3, ops=20), 6)]
    assert len(set(first)) == 6
    kept = synthetic_models(seed=3, ops=20, keep=lambda m: m.digest in first[1::2])
    assert [m.digest for m in itertools.islice(kept, 3)] == first[1::2]
    assert next(synthetic_models(seed=4, ops=20)).digest not in first
    with pytest.raises(SearchError, match="refused 5 synthetic graphs in a row"):
        next(synthetic_models(keep=lambda m: False, most_tries=5, ops=10))


def test_brkga_serves_as_the_search():
    model = next(synthetic_models(seed=0, ops=12))
    problem = egx.Execution(model, egx.hardware.regal_hardware(2))
    cost, fits = brkga_search(elites=10)(problem, 100)
    assert fits
    assert float(problem.lower_bound() or 0) <= cost < float(problem.reference_cost)
