"""Where the time goes: the latency of two maps, in all and op by op."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from jaxtyping import Float, Int
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from egx.graph.graph import real_sizes
from egx.problems.base import AbstractProblem
from egx.report.columns import MAX_COLUMNS, column_edges, step_label
from egx.report.placement import Placement, host_decisions, layout, require_memory_placement
from egx.report.style import PARTS, heading, look, new_figure, text_on
from egx.report.units import second_unit, significant


def latency_parts(
    problem: AbstractProblem, decisions: Placement
) -> dict[str, Float[np.ndarray, " N"]]:
    """Seconds of each op by what they are spent on; all parts of all ops add up to the latency.

    The time of an op's body counts whole as "compute" or "memory", whichever bounds it; "wait"
    is how long an op waits for its weights with prefetch; "launch" is fixed.
    """
    problem = require_memory_placement(problem)
    graph, hardware = problem.graph, problem.hardware
    ops, _, uses = real_sizes(graph)
    where, host = layout(problem), host_decisions(problem, decisions)
    read, write = (
        np.asarray(rates[0], np.float64)
        for rates in (hardware.read_bytes_per_s, hardware.write_bytes_per_s)
    )
    rate = np.asarray(hardware.flops_per_s[0], np.float64)[np.asarray(graph.op_class)[:ops]]
    compute = np.asarray(graph.flops, np.float64)[:ops] / rate
    tensor = np.asarray(graph.use_tensor)[:uses]
    consumer = np.asarray(graph.use_consumer)[:uses]
    source = host["activations"][where.tensor_producer[tensor]]
    memory = where.output_bytes / write[host["activations"]]
    np.add.at(memory, consumer, where.tensor_bytes[tensor] / read[source])
    weights = where.weight_bytes / read[host["weights"]]
    launch = np.full(ops, float(hardware.launch_s[0]))
    wait = np.zeros(ops)
    if problem.prefetch == 0:
        memory = memory + weights
    else:
        body = np.maximum(compute, memory) + launch
        wait = _waits(problem.prefetch, host["weights"], weights, body)
    bound = compute >= memory
    return {
        "compute": np.where(bound, compute, 0.0),
        "memory": np.where(bound, 0.0, memory),
        "wait": wait,
        "launch": launch,
    }


def _waits(
    prefetch: int,
    level: Int[np.ndarray, " N"],
    weights_s: Float[np.ndarray, " N"],
    body_s: Float[np.ndarray, " N"],
) -> Float[np.ndarray, " N"]:
    """Seconds between the end of an op and the start of the next one, which waits for weights."""
    free: dict[int, float] = {}
    starts, waits, clock = np.zeros(len(body_s)), np.zeros(len(body_s)), 0.0
    for i, seconds in enumerate(weights_s):
        start = clock
        if seconds > 0:
            earliest = starts[i - prefetch] if i >= prefetch else 0.0
            free[int(level[i])] = max(free.get(int(level[i]), 0.0), earliest) + seconds
            start = max(clock, free[int(level[i])])
        starts[i], waits[i] = start, start - clock
        clock = start + body_s[i]
    return waits


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
