"""Batches of problems: few sizes, little padding, the same costs."""

from __future__ import annotations

import itertools

import jax
import numpy as np
import pytest

from egx.errors import ProblemError
from egx.graph.padding import bucket
from egx.problems.batches import _cuts, batched_problems
from tests.runs import Toy, chain


def test_cuts_waste_least():
    rng = np.random.default_rng(0)
    for _ in range(20):
        work = sorted(rng.integers(1, 9, 9).tolist())

        def padded(cuts, work=work):
            ends = [0, *cuts, len(work)]
            return sum(work[b - 1] * (b - a) for a, b in itertools.pairwise(ends))

        for most in (1, 2, 3):
            best = min(
                padded(cuts)
                for count in range(most)
                for cuts in itertools.combinations(range(1, len(work)), count)
            )
            chosen = _cuts(work, most)
            assert len(chosen) < most
            assert padded(chosen) == best


def test_batches_hold_every_problem_once_at_its_own_cost():
    sizes = (8, 9, 30, 10)
    problems = [Toy(chain(n).graph, limit=n) for n in sizes]
    batches = batched_problems(problems, most=2)
    assert [batch.members for batch in batches] == [(0, 1, 3), (2,)]
    for batch in batches:
        ops = max(sizes[k] for k in batch.members)
        assert batch.problem.graph.op_mask.shape == (len(batch.members), bucket(ops))
        plans = jax.vmap(lambda problem: problem.reference)(batch.problem)
        outcomes = jax.vmap(lambda problem, plan: problem.evaluate(plan))(batch.problem, plans)
        expected = [float(problems[k].reference_cost) for k in batch.members]
        np.testing.assert_array_equal(outcomes.cost, np.float32(expected))


def test_impossible_batches_are_named():
    with pytest.raises(ProblemError, match="needs a problem and a batch, got 0 and 4"):
        batched_problems([])
    with pytest.raises(ProblemError, match="needs a problem and a batch, got 1 and 0"):
        batched_problems([Toy(chain().graph)], most=0)
