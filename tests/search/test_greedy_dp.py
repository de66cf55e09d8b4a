"""Greedy-DP on two ops, trial by trial, and what it cannot do."""

from __future__ import annotations

import numpy as np
import pytest

from egx.errors import SearchError
from egx.problems.memory_placement import MemoryPlacement
from egx.search.greedy_dp import GreedyDP
from tests.search import toys
from tests.simulate import cases


def two_ops() -> MemoryPlacement:
    """Level 1 is ten times as fast and holds 12 bytes.

    Op 0: weights 10, output 2. Op 1: weights 8, output 4. No compute, so a step takes what it
    moves: everything on level 0 takes 10 + 2 + (8 + 2 + 4) = 26 s.
    """
    ops = [
        {"inputs": [], "sizes": [2], "flops": 0.0, "weight": 10},
        {"inputs": [0], "sizes": [4], "flops": 0.0, "weight": 8},
    ]
    return MemoryPlacement(cases.build(ops, []), cases.machine([100.0, 12.0], read=[1.0, 10.0]))


def trace(search, problem, generations):
    state, proposed = toys.search_for(search, problem, generations=generations)
    rows = [
        tuple(int(x) for x in (*batch["weights"][b], *batch["activations"][b]))
        for batch in proposed
        for b in range(search.batch_size)
    ]
    return state, rows


@pytest.mark.parametrize("batch", [1, 2, 4])
def test_two_ops_by_hand(batch):
    state, rows = trace(GreedyDP(batch=batch), two_ops(), 16 // batch)
    # (w0, w1, a0, a1). Op 0: both of its weights and output on level 1 fit (12 bytes): 13.4 s.
    assert rows[0:4] == [(0, 0, 0, 0), (0, 0, 1, 0), (1, 0, 0, 0), (1, 0, 1, 0)]
    # Op 1: nothing more fits beside them, so that it stays where it is.
    assert rows[4:8] == [(1, 0, 1, 0), (1, 0, 1, 1), (1, 1, 1, 0), (1, 1, 1, 1)]
    # A second pass: op 0 alone cannot give way to anything better; the pass brings nothing.
    assert rows[8:12] == rows[0:4]
    assert rows[12:16] == rows[4:8]
    assert float(state.best.cost) == pytest.approx(13.4)
    assert bool(state.best.feasible)
    assert int(state.best.found_at) == 4
    assert int(state.evaluations) == 16


def test_misses_what_needs_two_ops_to_move():
    problem = two_ops()
    # Weights of op 1 and both outputs on level 1 need 8 + 2 + 4 = 14 bytes; 8 + 4 fit. 10 + 2
    # gained 10.8 s, whereas 8 + 4 would gain 10.8 s as well; 10 + 2 with another 0 is as far as
    # one op at a time goes.
    state, _ = toys.search_for(GreedyDP(), problem, generations=24)
    assert float(state.best.cost) >= toys.optimum(problem)


def test_a_pass_costs_nine_times_the_ops():
    problem = toys.chain(4)
    search = GreedyDP(batch=9)
    assert search.combinations(problem) == 9
    state, rows = trace(search, problem, 2 * 4)
    assert all(row[1:4] + row[5:8] == (0,) * 6 for row in rows[:9])
    # In the generation of op i the others do not change.
    for generation in range(8):
        block = np.asarray(rows[9 * generation : 9 * generation + 9])
        op = generation % 4
        fixed = np.delete(block, [op, op + 4], axis=1)
        assert (fixed == fixed[0]).all()
        assert len({tuple(row) for row in block.tolist()}) == 9
    assert float(state.best.cost) < float(problem.evaluate(toys_zero(problem)).cost)


def toys_zero(problem):
    return {name: value * 0 for name, value in problem.reference.items()}


def test_seeds_agree():
    problem = toys.chain(3)
    first, _ = toys.search_for(GreedyDP(), problem, generations=12, seed=1)
    second, _ = toys.search_for(GreedyDP(), problem, generations=12, seed=2)
    assert float(first.best.cost) == float(second.best.cost)


def test_padding_changes_nothing():
    rng = np.random.default_rng(5)
    plain = cases.random_graph(rng, 4)
    padded = cases.random_graph(np.random.default_rng(5), 4, pad_to=(7, 16, 20))
    hardware = cases.random_machine(np.random.default_rng(6), 2, tight=3.0)
    costs = [
        float(
            toys.search_for(GreedyDP(batch=4), MemoryPlacement(graph, hardware), generations=8)[
                0
            ].best.cost
        )
        for graph in (plain, padded)
    ]
    assert costs[0] == costs[1]


def test_refuses_a_batch_that_does_not_divide():
    with pytest.raises(SearchError, match="batch must divide the 9 combinations"):
        GreedyDP(batch=4).check(toys.chain(3))
