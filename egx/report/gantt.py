"""Gantt charts: what each device and link does when, over the memory that is live.

Memory is drawn twice: over time, below the chart and with its axis, and along the order of items,
which is how the peak of a plan is counted (see `egx.simulate.timeline`). Shapes: I items, E events,
D devices, B columns of a picture.
"""

from __future__ import annotations

import re

import matplotlib as mpl
import numpy as np
from jaxtyping import Float, Int
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from egx.graph.graph import OP_CLASSES
from egx.problems.base import GivenDecisions
from egx.problems.execution import Execution
from egx.report.style import EMPTY, FAINT, INK, MUTED, heading, look, new_figure, series_style
from egx.report.units import (
    byte_unit,
    format_bytes,
    format_percent,
    format_seconds,
    second_unit,
    shorten,
)
from egx.simulate.timeline import Timeline

CLASS_COLORS = {
    "elementwise": "#E69F00",
    "shape": "#CC79A7",
    "reduction": "#009E73",
    "contraction": "#0072B2",
    "opaque": "#8A93A0",
}
TRANSFER = "#D55E00"
CAPACITY = "#B3261E"

# A row with more bars than this shows shares of time in columns instead.
_MOST_BARS = 150
_COLUMNS = 360
_MOST_LINES = 16
_SEPARATORS = re.compile(r"[/.:]")
_OPS, _SENT = (0.30, 0.90), (0.09, 0.25)
_ALONE = (0.09, 0.90)


def gantt(
    problem: Execution,
    decisions: GivenDecisions,
    *,
    timeline: Timeline | None = None,
    title: str = "",
) -> Figure:
    """The chart of one plan; below it live memory over time, and along the order of items.

    Each device has a row of its ops, and under it a thin one of the transfers that it sends. Rows
    of many ops are drawn in columns, as high as the share of time that is busy.

    Args:
        problem: an Execution.
        decisions: the plan.
        timeline: what `problem.timeline(decisions)` gives, if it is at hand.
        title: by default the model's and the machine's names.
    """
    line = problem.timeline(decisions) if timeline is None else timeline
    devices = problem.hardware.num_devices
    with look():
        rows = 0.42 * min(devices, 24) + 0.5
        figure = new_figure(9.6, 1.0 + rows + 1.75 + 1.9)
        chart, over_time, along = figure.subplots(
            3, 1, gridspec_kw={"height_ratios": [rows, 1.75, 1.75]}
        )
        scale, unit = second_unit(line.makespan_s)
        handles = _chart(chart, problem, line, scale)
        chart.set_xlim(0, max(line.makespan_s / scale, 1e-9))
        over_time.sharex(chart)
        chart.tick_params(axis="x", labelbottom=False)
        over_time.set_xlabel(f"time ({unit})")
        if _memory(over_time, along, problem, line, scale):
            handles.append(mpl.lines.Line2D([], [], color=CAPACITY, lw=1.1, label="capacity"))
        model = problem.model.value
        name = model.name if model is not None else f"graph of {len(line.root):,} ops"
        heading(figure, title or f"{name} on {problem.hardware.name}")
        chart.set_title(_summary(line), fontsize=9, fontweight="normal", pad=6)
        figure.legend(handles=handles, loc="outside upper right", ncols=len(handles), fontsize=8)
    return figure


def _aside(axes: Axes, text: str) -> None:
    """A remark at the upper right of a panel."""
    axes.set_title(text, loc="right", fontsize=8, color=MUTED, fontweight="normal", pad=4)


def _summary(line: Timeline) -> str:
    moves = int(line.is_transfer.sum())
    peak = int(line.peak_bytes.max(initial=0))
    over_time = int(line.peak_bytes_over_time.max(initial=0))
    parts = [f"makespan {format_seconds(line.makespan_s)}", f"peak {format_bytes(peak)}"]
    if over_time != peak:
        parts[-1] += f" ({format_bytes(over_time)} over time)"
    if moves:
        parts.append(f"{moves:,} transfer{'s' if moves > 1 else ''}")
    return ", ".join(parts)


def _chart(axes: Axes, problem: Execution, line: Timeline, scale: float) -> list[Artist]:
    """Draws the rows; returns what the legend shows."""
    devices = problem.hardware.num_devices
    classes = np.asarray(problem.graph.op_class)[line.op]
    present = [c for c in range(len(OP_CLASSES)) if (classes[~line.is_transfer] == c).any()]
    start, finish = line.start_s / scale, line.finish_s / scale
    end = max(float(finish.max(initial=0.0)), 1e-9)
    labels = []
    band = _OPS if line.is_transfer.any() else _ALONE
    in_columns = False
    for d in range(devices):
        y = devices - 1 - d
        axes.add_patch(mpl.patches.Rectangle((0, y + 0.06), end, 0.86, fc=EMPTY, lw=0))
        own = np.flatnonzero(~line.is_transfer & (line.device == d))
        sent = np.flatnonzero(line.is_transfer & (line.source == d))
        groups = [(CLASS_COLORS[OP_CLASSES[c]], own[classes[own] == c]) for c in present]
        in_columns |= max(len(own), len(sent)) > _MOST_BARS
        _row(axes, groups, start, finish, end, (y + band[0], y + band[1]), 1)
        links = max(devices - 1, 1)
        _row(axes, [(TRANSFER, sent)], start, finish, end, (y + _SENT[0], y + _SENT[1]), links)
        if len(own) <= _MOST_BARS:
            _names(axes, problem, line, own, start, finish, end, y + sum(band) / 2)
        busy = float((finish[own] - start[own]).sum()) / end
        labels.append(f"{len(own):,} op{'s' if len(own) != 1 else ''}\n{100 * busy:.0f} % busy")
    axes.set_ylim(0, devices)
    spots = np.arange(devices)[::-1] + 0.5
    names = [shorten(name, 16) for name in problem.hardware.device_names]
    axes.set_yticks(spots, names)
    for d, tick in enumerate(axes.get_yticklabels()):
        tick.set_color(series_style(d)[0] if devices > 1 else INK)
    axes.tick_params(axis="y", length=0)
    for spot, label in zip(spots, labels, strict=True):
        axes.annotate(
            label,
            (1.008, spot),
            xycoords=("axes fraction", "data"),
            va="center",
            fontsize=7,
            color=MUTED,
            annotation_clip=False,
        )
    axes.spines["left"].set_visible(False)
    if in_columns:
        _aside(axes, f"{_COLUMNS} columns of time, as high as they are busy")
    handles: list[Artist] = [
        Patch(color=CLASS_COLORS[OP_CLASSES[c]], lw=0, label=OP_CLASSES[c]) for c in present
    ]
    if line.is_transfer.any():
        handles.append(Patch(color=TRANSFER, lw=0, label="transfers sent"))
    return handles


def _row(
    axes: Axes,
    groups: list[tuple[str, np.ndarray]],
    start: Float[np.ndarray, " I"],
    finish: Float[np.ndarray, " I"],
    end: float,
    span: tuple[float, float],
    lanes: int,
) -> None:
    """Bars, or busy shares in columns where there are many; `lanes` can be busy at once."""
    low, high = span
    count = sum(len(items) for _, items in groups)
    if count <= _MOST_BARS:
        for color, items in groups:
            # What takes no time would not be seen at all.
            width = np.maximum(finish[items] - start[items], end / 2000)
            bars = list(zip(start[items], width, strict=True))
            axes.broken_barh(bars, (low, high - low), fc=color, ec="white", lw=0.4)
        return
    edges = np.linspace(0, end, _COLUMNS + 1)
    base = np.full(_COLUMNS, low)
    for color, items in groups:
        share = _shares(start[items], finish[items], edges) / lanes
        top = np.minimum(base + (high - low) * share, high)
        axes.stairs(top, edges, baseline=base, fill=True, color=color, lw=0, antialiased=False)
        base = top


def _shares(
    start: Float[np.ndarray, " I"], finish: Float[np.ndarray, " I"], edges: Float[np.ndarray, " E"]
) -> Float[np.ndarray, " B"]:
    """The time in each column that items take, over its width."""
    # Busy time up to a moment is the sum over items of how much of each lies before it.
    starts, ends = np.sort(start), np.sort(finish)

    def before(moments: np.ndarray, sorted_times: np.ndarray) -> np.ndarray:
        count = np.searchsorted(sorted_times, moments)
        total = np.concatenate([[0.0], np.cumsum(sorted_times)])
        return moments * count - total[count]

    busy = before(edges, starts) - before(edges, ends)
    return np.clip(np.diff(busy) / np.diff(edges), 0.0, None)


def _names(
    axes: Axes,
    problem: Execution,
    line: Timeline,
    items: np.ndarray,
    start: np.ndarray,
    finish: np.ndarray,
    end: float,
    y: float,
) -> None:
    """Names of ops in the bars that are wide enough."""
    model = problem.model.value
    for k in items.tolist():
        # About how many letters of this size fit: the chart is some 130 wide.
        room = int(130 * (finish[k] - start[k]) / end) - 1
        name = model.op_names[line.op[k]] if model is not None else str(line.op[k])
        # Names of layers in each other differ in their last part.
        name = name if len(name) <= room else _SEPARATORS.split(name)[-1]
        if room >= min(len(name), 4) > 0:
            axes.text(
                (start[k] + finish[k]) / 2,
                y,
                shorten(name, room),
                ha="center",
                va="center",
                fontsize=6.5,
                color="white",
                clip_on=True,
            )


def _memory(over_time: Axes, along: Axes, problem: Execution, line: Timeline, scale: float) -> bool:
    """Draws both curves; whether a capacity is among them."""
    devices = problem.hardware.num_devices
    capacity = np.asarray(problem.hardware.level_bytes, np.float64)[:, 0]
    peaks = np.concatenate([line.peak_bytes, line.peak_bytes_over_time])
    largest = max(float(peaks.max(initial=0)), 1.0)
    # A capacity far above what is used would flatten everything: it is named instead.
    top = max(largest, float(capacity[capacity <= 3 * largest].max(initial=0)))
    bytes_scale, unit = byte_unit(top)
    zero, held = _curve(line)
    zero = zero / scale
    items = len(line.op)
    order = np.argsort(-line.peak_bytes, kind="stable")[:_MOST_LINES]
    steps = np.arange(items + 1)
    counted = np.concatenate([line.live_bytes, line.live_bytes[-1:]]) if items else held[:1]
    for d in range(devices):
        color, dashes = series_style(d) if devices > 1 else ("#0072B2", "-")
        width = 1.2
        if d not in order:
            color, dashes, width = MUTED, "-", 0.5
        for axes, x, curve in ((over_time, zero, held), (along, steps, counted)):
            axes.step(x, curve[:, d] / bytes_scale, where="post", c=color, ls=dashes, lw=width)
    titles = ("live memory over time", "live memory along the order of items, as the peak counts")
    for axes, title, peak in zip(
        (over_time, along), titles, (line.peak_bytes_over_time, line.peak_bytes), strict=True
    ):
        for value in dict.fromkeys(capacity[capacity <= 3 * largest].tolist()):
            axes.axhline(value / bytes_scale, color=CAPACITY, lw=1.1)
        axes.set_ylim(0, 1.08 * top / bytes_scale)
        axes.set_ylabel(unit)
        axes.grid(axis="y", color=FAINT)
        axes.set_title(title, fontsize=9, fontweight="normal", pad=4)
        _aside(axes, _fullest(peak, capacity, problem.hardware.device_names))
    along.set_xlim(0, max(items, 1))
    along.set_xlabel("item, in the order in which they are taken (ops and transfers)")
    along.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
    return bool((capacity <= 3 * largest).any())


def _curve(line: Timeline) -> tuple[Float[np.ndarray, " K"], Int[np.ndarray, "K D"]]:
    """Live bytes over time as steps: at each moment the most that is live, then what stays.

    What is dropped and made at one moment would else be drawn as a dip.
    """
    start = np.zeros((1, len(line.weight_bytes)), np.int64) + line.weight_bytes
    moments, first = np.unique(line.event_s, return_index=True)
    if not len(moments):
        return np.array([0.0, line.makespan_s]), np.concatenate([start, start])
    most = np.maximum.reduceat(line.event_live_bytes, first, axis=0)
    last = line.event_live_bytes[np.append(first[1:], len(line.event_s)) - 1]
    times = np.concatenate([[0.0], np.repeat(moments, 2), [line.makespan_s]])
    pairs = np.stack([most, last], 1).reshape(-1, start.shape[1])
    return times, np.concatenate([start, pairs, last[-1:]])


def _fullest(
    peak: Int[np.ndarray, " D"], capacity: Float[np.ndarray, " D"], names: tuple[str, ...]
) -> str:
    """The largest peak, and what its device holds."""
    at = int(np.argmax(peak))
    limit = float(capacity[at])
    note = f"peak {format_bytes(int(peak[at]))} on {names[at]}"
    if not 0 < limit < np.inf:
        return f"{note}, which holds {'nothing' if limit == 0 else 'any amount'}"
    share = float(peak[at]) / limit
    shown = "< 1 %" if 0 < share < 0.01 else format_percent(share, 0)
    return f"{note}, {shown} of its {format_bytes(limit)}"
