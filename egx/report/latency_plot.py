"""Where the time goes: the latency of two maps, in all and op by op."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from egx.problems.base import AbstractProblem
from egx.report.columns import MAX_COLUMNS, column_edges, step_label
from egx.report.placement import Placement, host_decisions, require_memory_placement
from egx.report.style import PARTS, heading, look, new_figure, text_on
from egx.report.units import second_unit, significant
from egx.simulate.breakdown import breakdown


def latency_parts(
    problem: AbstractProblem, decisions: Placement
) -> dict[str, Float[np.ndarray, " N"]]:
    """Seconds of each op by what they are spent on; all parts of all ops add up to the latency.

    The time of an op's body counts whole as "compute" or "memory", whichever bounds it; "wait"
    is how long an op waits for its weights with prefetch; "launch" is fixed.
    """
    problem = require_memory_placement(problem)
    host = host_decisions(problem, decisions)
    run = breakdown(
        problem.graph,
        problem.hardware,
        host["weights"],
        host["activations"],
        prefetch=problem.prefetch,
    )
    # With prefetch, weights stream on their own and only what an op waits for them counts.
    memory = run.read_s + run.write_s + (run.weight_s if problem.prefetch == 0 else 0.0)
    compute_bound = run.compute_s >= memory
    return {
        "compute": np.where(compute_bound, run.compute_s, 0.0),
        "memory": np.where(compute_bound, 0.0, memory),
        "wait": run.stall_s,
        "launch": np.full(len(memory), run.launch_s),
    }


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
        figure = new_figure(9.0, 5.4)
        bars, *panels = figure.subplots(3, 1, gridspec_kw={"height_ratios": [1.1, 2, 2]})
        _totals(bars, columns, parts, names)
        summed = [[np.add.reduceat(c, edges[:-1]) for c in column] for column in columns]
        top = max(float(np.sum(column, axis=0).max()) for column in summed) if parts else 1.0
        scale, unit = second_unit(top)
        for axes, column, name in zip(panels, summed, names, strict=True):
            base = np.zeros(len(edges) - 1)
            for part, values in zip(parts, column, strict=True):
                above = base + values / scale
                axes.stairs(above, edges, baseline=base, fill=True, color=PARTS[part], lw=0)
                base = above
            axes.set(xlim=(0, max(steps, 1)), ylim=(0, 1.05 * top / scale))
            axes.grid(axis="y")
            axes.set_title(name, fontsize=9, fontweight="normal", pad=3)
            axes.set_ylabel(f"{unit} per {'op' if steps <= MAX_COLUMNS else 'column'}")
        panels[0].tick_params(labelbottom=False)
        panels[1].set_xlabel(step_label(steps, edges))
        handles = [Patch(color=PARTS[part], lw=0, label=PART_LABELS[part]) for part in parts]
        if handles:
            figure.legend(handles=handles, loc="outside upper right", ncols=len(parts), fontsize=8)
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
