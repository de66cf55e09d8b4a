import jax
import matplotlib as mpl
import numpy as np
import pytest
from report_toys import maps, toy_hardware, toy_problem

from egx.graph.builder import GraphBuilder
from egx.problems.memory_placement import MemoryPlacement
from egx.report.columns import MAX_COLUMNS, column_edges, column_max, level_shares, step_label
from egx.report.curves import convergence
from egx.report.latency_plot import latency_by_op, latency_parts
from egx.report.placement import simulate
from egx.report.plots import level_strips, occupancy_over_steps, transition
from egx.report.style import level_colors, series_style, spread


def texts(figure) -> list[str]:
    """Everything written on a figure, once it is drawn."""
    figure.canvas.draw()
    found = figure.findobj(lambda a: isinstance(a, mpl.text.Text))
    return [text.get_text() for text in found if text.get_text() and text.get_visible()]


def inside(figure) -> bool:
    """Whether everything that is drawn lies within the figure, up to a pixel."""
    figure.canvas.draw()
    box, slack = figure.get_tightbbox(figure.canvas.get_renderer()), 1 / figure.dpi
    low, high = np.array([0, 0]) - slack, figure.get_size_inches() + slack
    return bool(np.all(box.min >= low) and np.all(box.max <= high))


def chain(ops: int) -> MemoryPlacement:
    """A chain of ops, all with weights."""
    builder = GraphBuilder("chain")
    inputs = []
    for k in range(ops):
        inputs = builder.op(
            f"op{k}", kind="contraction", op_type="conv", inputs=inputs, output_bytes=[64],
            flops=1e3, weight_bytes=1 + k % 3,
        )  # fmt: skip
    return MemoryPlacement(builder.build_model(), toy_hardware())


PLACEMENTS = [level_strips, transition, occupancy_over_steps]


@pytest.mark.parametrize("draw", PLACEMENTS)
def test_placements_say_what_they_show(draw):
    problem = toy_problem()
    figure = draw(problem, problem.reference, maps(problem), names=("native", "best"))
    written = " ".join(texts(figure))
    for word in ("toy on toy machine", "native", "best", "DRAM", "LLC", "SRAM"):
        assert word in written, word
    assert inside(figure)


@pytest.mark.parametrize("draw", PLACEMENTS)
def test_placements_of_thousands_of_ops(draw, tmp_path):
    problem = chain(3000)
    figure = draw(problem, problem.reference, problem.reference)
    figure.savefig(tmp_path / "picture.png", dpi=50)
    if draw is not transition:
        assert f"3,000 ops in {MAX_COLUMNS} columns" in " ".join(texts(figure))


@pytest.mark.parametrize("draw", PLACEMENTS)
def test_a_graph_of_one_op_without_bytes(draw):
    builder = GraphBuilder("one")
    builder.op("only", kind="opaque", op_type="x", inputs=[], output_bytes=[], flops=0)
    problem = MemoryPlacement(builder.build_model(), toy_hardware())
    draw(problem, problem.reference, problem.reference).canvas.draw()


def test_the_matrix_counts_bytes():
    problem = toy_problem()
    slow = jax.tree.map(lambda x: x * 0, problem.reference)
    figure = transition(problem, slow, maps(problem))
    written = texts(figure)
    assert "weights: 4 KiB of 9 KiB moved" in written
    assert "activations: 5 KiB of 5 KiB moved" in written
    assert "4 KiB\n44 %" in written
    assert "5 KiB\n100 %" in written


def test_pictures_leave_the_callers_style_alone():
    before = dict(mpl.rcParams)
    problem = toy_problem()
    level_strips(problem, problem.reference, maps(problem))
    assert dict(mpl.rcParams) == before


@pytest.mark.parametrize("prefetch", [0, 1, 3])
@pytest.mark.parametrize("pad_to", [None, (9, 8, 12)])
def test_parts_add_up_to_the_simulated_latency(prefetch, pad_to):
    problem = toy_problem(prefetch, pad_to)
    for decisions in (problem.reference, maps(problem)):
        parts = latency_parts(problem, decisions)
        assert all(values.shape == (4,) for values in parts.values())
        assert not np.any((parts["compute"] > 0) & (parts["memory"] > 0))
        latency_s, _ = simulate(problem, decisions)
        assert sum(v.sum() for v in parts.values()) == pytest.approx(latency_s, rel=1e-5)
    assert np.any(parts["wait"]) == (prefetch > 0)


def test_latency_adds_up():
    before = {"compute": np.array([1e-6, 0.0]), "memory": np.array([0.0, 3e-6])}
    after = {"compute": np.array([1e-6, 0.0]), "memory": np.array([0.0, 1e-6])}
    for parts in (before, after):
        parts["launch"] = np.full(2, 1e-6)
    figure = latency_by_op(before, after, title="toy")
    written = [text.strip() for text in texts(figure)]
    assert "6.000 µs" in written
    assert "4.000 µs" in written
    assert "waits for weights" not in written
    assert inside(figure)


def test_convergence_labels_what_it_compares():
    curve = ([10, 20, 30], [5e-4, 3e-4, 2e-4])
    lines = {"native": 4e-4, "first fit": 3.9e-4, "bound": 1.9e-4, "unknown": float("nan")}
    figure = convergence({"local": [curve]}, lines, title="toy")
    written = texts(figure)
    assert "local  2.000\N{MULTIPLICATION SIGN}" in written
    assert "bound  2.105\N{MULTIPLICATION SIGN}" in written
    assert "native" in written
    assert not any("unknown" in text for text in written)
    assert "best latency so far (µs)" in written
    assert inside(figure)


def test_convergence_draws_mean_and_band_over_seeds():
    curves = {"a": [([10, 20], [4.0, 2.0]), ([10, 30], [6.0, 1.0])], "b": [([10], [3.0])] * 2}
    figure = convergence(curves, seconds=False)
    (axes,) = figure.axes
    line = next(line for line in axes.lines if len(line.get_xdata()) == 3)
    np.testing.assert_allclose(line.get_xdata(), [10, 20, 30])
    np.testing.assert_allclose(line.get_ydata(), [5.0, 4.0, 1.5])
    assert "mean of 2 seeds, band: best to worst" in texts(figure)


def test_what_is_not_finite_is_not_drawn():
    curve = ([10, 20, 30], [np.nan, np.inf, 2e-4])
    (axes,) = convergence({"late": [curve]}, {"native": 1e-4}).axes
    assert any(list(line.get_xdata()) == [30.0] for line in axes.lines)


def test_who_found_nothing_is_named():
    figure = convergence({"good": [([1], [1e-3])], "bad": [([1], [np.nan])]}, {"native": 1e-3})
    assert "evaluations (no plan that fits: bad)" in texts(figure)


@pytest.mark.parametrize("curves", [{}, {"empty": [([], [])]}, {"none": []}])
def test_convergence_of_nothing(curves):
    convergence(curves, {"native": 1e-3}).canvas.draw()
    convergence(curves).canvas.draw()


def test_labels_move_apart_but_keep_their_order():
    spots = [0.1, 0.1, 0.12, 0.8]
    moved = spread(spots, 0.1)
    assert np.all(np.diff(moved) >= 0.1 - 1e-12)
    assert moved[3] == pytest.approx(0.8)
    # The three lower ones keep their mean: they moved as little as they can.
    assert np.mean(moved[:3]) == pytest.approx(np.mean(spots[:3]))
    assert spread([], 0.1) == []
    # Five at the lower end have nowhere to go but up.
    np.testing.assert_allclose(spread([0.0, 0.0, 0.0, 0.01, 0.02], 0.2), [0.0, 0.2, 0.4, 0.6, 0.8])
    np.testing.assert_allclose(spread([0.98, 1.0], 0.2), [0.8, 1.0])


def test_every_level_has_a_colour_of_its_own():
    for levels in (1, 2, 3, 7, 12):
        colors = level_colors(levels)
        assert len(set(colors)) == len(colors) == levels
        assert colors[0] == level_colors(1)[0]
    assert len({series_style(k) for k in range(32)}) == 32


def test_columns():
    np.testing.assert_array_equal(column_edges(3), [0, 1, 2, 3])
    edges = column_edges(1000, 7)
    assert len(edges) == 8
    assert edges[0] == 0
    assert edges[-1] == 1000
    shares = level_shares(np.array([0, 1, 1]), np.array([1, 3, 0]), np.array([0, 2, 3]), 2)
    np.testing.assert_allclose(shares, [[0.25, 0.75], [0.0, 0.0]])
    np.testing.assert_array_equal(column_max(np.array([1, 5, 2]), np.array([0, 2, 3])), [5, 2])
    assert step_label(3, column_edges(3)) == "op, in the order of execution"
