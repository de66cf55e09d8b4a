"""Pictures of memory placements: where things lie, what moved, and how full each level is.

Every function takes a problem with decisions of two maps and returns a matplotlib Figure.
Shapes: N ops, M levels, B columns of a picture.
"""

from __future__ import annotations

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.patheffects import withStroke

from egx.problems.base import AbstractProblem
from egx.report.columns import column_edges, column_max, level_shares, step_label
from egx.report.placement import (
    Layout,
    Placement,
    host_decisions,
    layout,
    occupancy,
    transition_bytes,
)
from egx.report.style import (
    EMPTY,
    INK,
    MUTED,
    heading,
    level_colors,
    look,
    new_figure,
    text_on,
)
from egx.report.units import byte_unit, format_bytes, shorten


def level_strips(
    problem: AbstractProblem,
    before: Placement,
    after: Placement,
    *,
    names: tuple[str, str] = ("native", "found"),
) -> Figure:
    """The level of each op's weights and outputs in two maps, under the bytes that lie there."""
    where = layout(problem)
    maps = [host_decisions(problem, before), host_decisions(problem, after)]
    colors = level_colors(where.levels)
    edges = column_edges(where.steps)
    with look():
        figure = new_figure(9.0, 3.9)
        grid = figure.subplots(
            6, 1, sharex=True, gridspec_kw={"height_ratios": [1.5, 1, 1, 1.5, 1, 1], "hspace": 0.0}
        )
        rows = (("weights", where.weight_bytes), ("activations", where.output_bytes))
        for k, (kind, size) in enumerate(rows):
            bars, *strips = grid[3 * k : 3 * k + 3]
            _size_bars(bars, size, edges, kind)
            for axes, decisions, name in zip(strips, maps, names, strict=True):
                shares = level_shares(decisions[kind], size, edges, where.levels)
                _strip(axes, shares, edges, colors)
                axes.set_yticks([0.5], [name])
        grid[-1].set_xlabel(step_label(where.steps, edges))
        grid[-1].set_xlim(0, where.steps)
        heading(figure, where.title)
        _level_legend(figure, where, colors)
    return figure


def transition(
    problem: AbstractProblem,
    before: Placement,
    after: Placement,
    *,
    names: tuple[str, str] = ("native", "found"),
) -> Figure:
    """Bytes by level in one map (rows) and in another (columns), weights and activations apart."""
    where = layout(problem)
    maps = [host_decisions(problem, before), host_decisions(problem, after)]
    with look():
        size = 1.2 + 0.78 * where.levels
        figure = new_figure(2 * size + 1.2, size + 0.75)
        panels = figure.subplots(1, 2)
        rows = (("weights", where.weight_bytes), ("activations", where.output_bytes))
        for axes, (kind, sizes) in zip(panels, rows, strict=True):
            moved = transition_bytes(maps[0][kind], maps[1][kind], sizes, where.levels)
            _matrix(axes, moved, where.level_names, names)
            stayed, total = int(np.trace(moved)), int(moved.sum())
            axes.set_title(
                f"{kind}: {format_bytes(total - stayed)} of {format_bytes(total)} moved",
                fontsize=9,
                fontweight="normal",
                pad=8,
            )
        heading(figure, where.title)
    return figure


def occupancy_over_steps(
    problem: AbstractProblem,
    before: Placement,
    after: Placement,
    *,
    names: tuple[str, str] = ("native", "found"),
) -> Figure:
    """How full each level is at each step, against its capacity."""
    where = layout(problem)
    old, new = (occupancy(where, host_decisions(problem, d)) for d in (before, after))
    colors = level_colors(where.levels)
    edges = column_edges(where.steps)
    with look():
        figure = new_figure(9.0, 0.9 + 1.55 * where.levels)
        panels = np.atleast_1d(figure.subplots(where.levels, 1, sharex=True))
        for axes, m in zip(panels, reversed(range(where.levels)), strict=True):
            totals = [column_max(o.total[:, m], edges) for o in (old, new)]
            weights = np.full(len(edges) - 1, float(new.weights[m]))
            capacity = where.capacity_bytes[m]
            largest = max(float(t.max()) for t in totals)
            # A capacity far above what is used would flatten everything: it is named instead.
            shown = m > 0 and capacity <= 4 * max(largest, 1)
            scale, unit = byte_unit(max(largest, capacity if shown else 0))
            axes.stairs(totals[1] / scale, edges, fill=True, color=colors[m], alpha=0.4, lw=0)
            axes.stairs(weights / scale, edges, fill=True, color=colors[m], alpha=0.75, lw=0)
            line = axes.stairs(totals[0] / scale, edges, color=INK, lw=1.2, baseline=None)
            line.set_path_effects([withStroke(linewidth=3, foreground="white", alpha=0.8)])
            limit = "holds " + format_bytes(capacity) if m else "the backing memory"
            if shown:
                axes.axhline(capacity / scale, color="#B3261E", lw=1.2)
            axes.set_title(
                f"{where.level_names[m]}, {limit}", fontsize=9, fontweight="normal", pad=4
            )
            axes.set_ylabel(unit)
            top = max(largest, capacity if shown else 0.0, 1.0) / scale
            axes.set_ylim(0, 1.08 * top)
        panels[-1].set_xlim(0, where.steps)
        panels[-1].set_xlabel(step_label(where.steps, edges))
        handles = [
            Patch(color=MUTED, alpha=0.75, lw=0, label=f"{names[1]}: weights"),
            Patch(color=MUTED, alpha=0.4, lw=0, label=f"{names[1]}: activations"),
            mpl.lines.Line2D([], [], color=INK, lw=1.2, label=f"{names[0]}: both"),
            mpl.lines.Line2D([], [], color="#B3261E", lw=1.2, label="capacity"),
        ]
        heading(figure, where.title)
        figure.legend(handles=handles, loc="outside upper right", ncols=4, fontsize=8)
    return figure


def _strip(axes: Axes, shares: np.ndarray, edges: np.ndarray, colors: list[str]) -> None:
    axes.set_facecolor(EMPTY)
    base = np.zeros(len(shares))
    for m, color in enumerate(colors):
        top = base + shares[:, m]
        axes.stairs(top, edges, baseline=base, fill=True, color=color, lw=0, antialiased=False)
        base = top
    if len(shares) <= 120:
        axes.vlines(edges[1:-1], 0, 1, color="white", lw=0.6)
    axes.set_ylim(0, 1)
    axes.tick_params(length=0)
    for side in axes.spines.values():
        side.set_visible(False)


def _size_bars(axes: Axes, size: np.ndarray, edges: np.ndarray, kind: str) -> None:
    column = np.add.reduceat(size, edges[:-1]).astype(float)
    largest = max(float(column.max()), 1.0)
    # One table may be a hundred times larger than the rest: the root keeps both in sight.
    axes.set_yscale("function", functions=(lambda y: np.sqrt(np.maximum(y, 0)), np.square))
    axes.stairs(column, edges, fill=True, color=MUTED, alpha=0.55, lw=0)
    if len(column) <= 120:
        axes.vlines(edges[1:-1], 0, largest, color="white", lw=0.6)
    axes.set_ylim(0, 1.05 * largest)
    axes.set_yticks(
        [largest / 10, largest], [format_bytes(round(b)) for b in (largest / 10, largest)]
    )
    axes.minorticks_off()
    axes.set_title(kind, fontsize=9, fontweight="normal", pad=3)
    axes.tick_params(axis="x", length=0)
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0, labelsize=8, labelcolor=MUTED)


def _matrix(axes: Axes, moved: np.ndarray, levels: tuple[str, ...], names: tuple[str, str]) -> None:
    total = max(int(moved.sum()), 1)
    ramp = mpl.colormaps["Blues"]
    for (row, column), units in np.ndenumerate(moved):
        size = int(units)
        color = mpl.colors.to_hex(ramp(0.85 * (size / total) ** 0.6)) if size else EMPTY
        axes.add_patch(Rectangle((column - 0.5, row - 0.5), 1, 1, fc=color, ec="white", lw=2))
        if size:
            share = f"{100 * size / total:.0f}" if size >= 0.005 * total else "< 1"
            text = f"{format_bytes(size)}\n{share} %"
            axes.text(column, row, text, ha="center", va="center", fontsize=8, color=text_on(color))
        if row == column:
            axes.add_patch(
                Rectangle((column - 0.46, row - 0.46), 0.92, 0.92, fill=False, ec=MUTED, lw=0.8)
            )
    # A swatch beside each name ties rows and columns to the colours of the other pictures.
    for m, color in enumerate(level_colors(len(levels))):
        axes.add_patch(Rectangle((-0.6, m - 0.48), 0.06, 0.96, fc=color, lw=0, clip_on=False))
        bottom = len(levels) - 0.46
        axes.add_patch(Rectangle((m - 0.48, bottom), 0.96, 0.06, fc=color, lw=0, clip_on=False))
    ends = (-0.5, len(levels) - 0.5)
    axes.set(xlim=ends, ylim=ends[::-1], aspect="equal")
    short = [shorten(name, 12) for name in levels]
    axes.set_xticks(range(len(levels)), short)
    axes.set_yticks(range(len(levels)), short, rotation=90, va="center")
    axes.set_xlabel(f"{names[1]} level")
    axes.set_ylabel(f"{names[0]} level")
    axes.tick_params(length=0, pad=9)
    for side in axes.spines.values():
        side.set_visible(False)


def _level_legend(figure: Figure, where: Layout, colors: list[str]) -> None:
    handles = [Patch(color=c, lw=0) for c in colors]
    labels = [
        f"{name} ({format_bytes(capacity)})"
        for name, capacity in zip(where.level_names, where.capacity_bytes, strict=True)
    ]
    figure.legend(handles, labels, loc="outside upper right", ncols=len(labels), fontsize=8)
