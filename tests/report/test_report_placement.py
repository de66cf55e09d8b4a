import numpy as np
import pytest
from report_toys import KIB, maps, toy_model, toy_problem

from egx.errors import SearchError
from egx.problems.memory_placement import MemoryPlacement
from egx.report.placement import (
    host_decisions,
    layout,
    occupancy,
    occupancy_bytes,
    require_memory_placement,
    transition_bytes,
)


@pytest.mark.parametrize("pad_to", [None, (9, 8, 12)])
def test_layout_has_no_padding(pad_to):
    where = layout(toy_problem(pad_to=pad_to))
    assert where.title == "toy on toy machine"
    assert where.op_names == ("a", "b", "c[1]", "d")
    assert where.level_names == ("DRAM", "LLC", "SRAM")
    np.testing.assert_array_equal(where.weight_bytes, [4 * KIB, 0, 2 * KIB, 3 * KIB])
    np.testing.assert_array_equal(where.output_bytes, [2 * KIB, KIB, KIB, KIB])
    np.testing.assert_array_equal(where.tensor_producer, [0, 1, 2, 3])
    np.testing.assert_array_equal(where.tensor_last, [2, 2, 3, 3])
    assert where.total_bytes == 14 * KIB


def test_a_bare_graph_is_named_by_index():
    problem = toy_problem()
    where = layout(MemoryPlacement(problem.graph, problem.hardware))
    assert where.op_names[3] == "op 3"
    assert where.tensor_names[0] == "tensor 0"
    assert where.title == "graph of 4 ops on toy machine"


@pytest.mark.parametrize("pad_to", [None, (9, 8, 12)])
def test_occupancy_by_hand(pad_to):
    problem = toy_problem(pad_to=pad_to)
    held = occupancy(layout(problem), host_decisions(problem, maps(problem)))
    np.testing.assert_array_equal(held.weights, [5 * KIB, 4 * KIB, 0])
    np.testing.assert_array_equal(held.activations[:, 2], np.array([2, 3, 4, 2]) * KIB)
    np.testing.assert_array_equal(held.peak, [5 * KIB, 4 * KIB, 4 * KIB])


def test_occupancy_agrees_with_a_loop():
    rng = np.random.default_rng(0)
    steps, levels, items = 13, 4, 40
    level, size = rng.integers(0, levels, items), rng.integers(0, 2**40, items)
    first = rng.integers(0, steps, items)
    last = rng.integers(first, steps)
    expected = np.zeros((steps, levels), np.int64)
    for k in range(items):
        expected[first[k] : last[k] + 1, level[k]] += size[k]
    actual = occupancy_bytes(level, size, first, last, steps=steps, levels=levels)
    np.testing.assert_array_equal(actual, expected)


def test_transitions_keep_every_byte():
    before, after = np.array([0, 1, 2, 2]), np.array([0, 2, 2, 0])
    moved = transition_bytes(before, after, np.array([10, 20, 30, 40]), 3)
    np.testing.assert_array_equal(moved, [[10, 0, 0], [0, 0, 20], [40, 0, 30]])


def test_other_problems_are_refused(unchecked):
    with pytest.raises(SearchError, match="MemoryPlacement, not of Model"):
        require_memory_placement(toy_model())
