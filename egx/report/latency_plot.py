"""Where the time goes: the latency of two maps, in all and op by op."""

from __future__ import annotations

from collections.abc import Mapping

import matplotlib as mpl
import numpy as np
from jaxtyping import Float
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.patheffects import withStroke

from egx.report.columns import MAX_COLUMNS, column_edges, step_label
from egx.report.style import INK, PARTS, heading, look, new_figure, text_on
from egx.report.units import second_unit, significant


def latency_by_op(
    before: Mapping[str, Float[np.ndarray, " N"]],
    after: Mapping[str, Float[np.ndarray, " N"]],
    *,
    title: str = "",
    names: tuple[str, str] = ("native", "found"),
) -> Figure:
    """Seconds of each op in two maps, split by what they are spent on.

    `before` and `after` hold an array of seconds per part; parts are "compute" and "memory" (an
    op's time counts whole for the one that bounds it), "wait" (for weights) and "launch".
    """
    parts = [part for part in PARTS if any(np.any(d.get(part, 0)) for d in (before, after))]
    columns = [[np.asarray(d[part], float) for part in parts] for d in (before, after)]
    steps = len(columns[0][0]) if parts else 0
    edges = column_edges(max(steps, 1))
    with look():
        figure = new_figure(9.0, 4.4)
        bars, ops = figure.subplots(2, 1, gridspec_kw={"height_ratios": [1, 2.6]})
        _totals(bars, columns, parts, names)
        summed = [[np.add.reduceat(c, edges[:-1]) for c in column] for column in columns]
        totals = [np.sum(column, axis=0) for column in summed]
        top = max(float(t.max()) for t in totals)
        scale, unit = second_unit(top)
        base = np.zeros(len(edges) - 1)
        for part, column in zip(parts, summed[1], strict=True):
            ops.stairs(
                (base + column) / scale,
                edges,
                baseline=base / scale,
                fill=True,
                color=PARTS[part],
                lw=0,
            )
            base = base + column
        thin = 1.0 if steps <= 120 else 0.7
        line = ops.stairs(totals[0] / scale, edges, color=INK, lw=thin, baseline=None)
        line.set_path_effects([withStroke(linewidth=2.2, foreground="white", alpha=0.8)])
        ops.set(xlim=(0, max(steps, 1)), ylim=(0, 1.05 * top / scale))
        ops.set_ylabel(f"{unit} per {'op' if steps <= MAX_COLUMNS else 'column'}")
        ops.set_xlabel(step_label(steps, edges))
        handles: list[Artist] = [
            Patch(color=PARTS[part], lw=0, label=PART_LABELS[part]) for part in parts
        ]
        label = f"{names[0]}, whole op"
        handles.append(mpl.lines.Line2D([], [], color=INK, lw=1.0, label=label))
        figure.legend(handles=handles, loc="outside upper right", ncols=len(handles), fontsize=8)
        heading(figure, title)
    return figure


PART_LABELS = {
    "compute": "compute-bound",
    "memory": "memory-bound",
    "wait": "waits for weights",
    "launch": "launch",
}


def _totals(
    axes: Axes,
    columns: list[list[np.ndarray]],
    parts: list[str],
    names: tuple[str, str],
) -> None:
    """One bar for each map: its whole latency, stacked by part."""
    sums = [[float(c.sum()) for c in column] for column in columns]
    longest = max(sum(column) for column in sums)
    scale, unit = second_unit(longest)
    for y, column in enumerate(sums):
        left = 0.0
        for part, seconds in zip(parts, column, strict=True):
            color = PARTS[part]
            axes.barh(y, seconds / scale, left=left / scale, height=0.72, color=color, lw=0)
            if seconds > 0.06 * longest:
                middle = (left + seconds / 2) / scale
                text = significant(seconds / scale)
                axes.text(
                    middle, y, text, ha="center", va="center", fontsize=8, color=text_on(color)
                )
            left += seconds
        axes.text(
            left / scale, y, f"  {significant(left / scale, 4)} {unit}", va="center", fontsize=8.5
        )
    axes.set_yticks([0, 1], names)
    axes.set(xlim=(0, 1.12 * longest / scale), ylim=(1.5, -0.5))
    axes.tick_params(length=0, labelbottom=False)
    for side in axes.spines.values():
        side.set_visible(False)
