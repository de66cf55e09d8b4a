"""Conformance checks to run on problems and searchers of your own, from any test.

    from egx.testing import check_problem, check_search

    def test_my_problem():
        check_problem(MyProblem(model, hardware))

    def test_my_search():
        check_search(MySearch(), MyProblem(model, hardware))

Each check raises `Nonconforming`, an AssertionError, that says which promise is broken and where.
"""

from egx.testing.common import Nonconforming
from egx.testing.problems import check_problem
from egx.testing.searches import check_search

__all__ = ["Nonconforming", "check_problem", "check_search"]
