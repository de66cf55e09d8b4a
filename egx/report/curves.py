"""Convergence: the best cost so far against the evaluations used, with what it is measured by."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from egx.report.style import (
    BOUND,
    FAINT,
    FOUND,
    MUTED,
    NATIVE,
    end_labels,
    look,
    new_figure,
    series_style,
)
from egx.report.units import TIMES, second_unit

# (evaluations, best cost so far), arrays or lists of one length, rising in evaluations.
Curve = tuple[Any, Any]

REFERENCE_LOOK = {
    "native": (NATIVE, "--"),
    "reference": (NATIVE, "--"),
    "first fit": (MUTED, ":"),
    "bound": (BOUND, "-"),
    "optimum": (BOUND, "-"),
}


def convergence(
    curves: Mapping[str, Sequence[Curve]],
    references: Mapping[str, float] | None = None,
    *,
    title: str = "",
    seconds: bool = True,
    quantity: str = "latency",
    unit_of: Callable[[float], tuple[float, str]] = second_unit,
    reference: str = "native",
) -> Figure:
    """Best cost so far of one run, or of several searchers with a band over their seeds.

    Args:
        curves: a curve per seed by the name of the searcher; the line is the mean over seeds and
            the band reaches from the best to the worst seed. Costs that are not finite are left
            out.
        references: lines to compare with: native, first fit, and bound (or optimum, once that is
            proved); missing values (NaN) are left out.
        title: such as "resnet50 on nnpi".
        seconds: costs are seconds, and shown in the unit that suits them.
        quantity: what costs are, in words.
        unit_of: (size, name) of the unit in which costs read best.
        reference: the line that speed-ups are against.
    """
    runs = {name: _finite(value) for name, value in curves.items()}
    lines = {k: float(v) for k, v in (references or {}).items() if math.isfinite(v)}
    with look():
        figure = new_figure(7.2, 3.9)
        axes = figure.subplots()
        top = _ceiling(runs, lines)
        scale, unit = unit_of(top) if seconds else (1.0, "")
        labels: list[tuple[float, str, str]] = []
        native = lines.get(reference, math.nan)
        finals: dict[str, float] = {}
        without: list[str] = []
        for index, (name, seeds) in enumerate(runs.items()):
            color, dashes = series_style(index) if len(runs) > 1 else (FOUND, "-")
            grid, low, mean, high = _band(seeds)
            if not grid.size:
                without.append(name)
                continue
            if len(seeds) > 1:
                axes.fill_between(
                    grid, low / scale, high / scale, step="post", color=color, alpha=0.16, lw=0
                )
            axes.step(grid, mean / scale, where="post", color=color, ls=dashes, zorder=3)
            finals[name] = float(mean[-1])
            labels.append((finals[name] / scale, _label(name, finals[name], native), color))
        for name, value in lines.items():
            color, dashes = REFERENCE_LOOK.get(name, (MUTED, "-."))
            axes.axhline(value / scale, color=color, ls=dashes, lw=1.1, zorder=2)
            own = math.nan if name == reference else native
            labels.append((value / scale, _label(name, value, own), color))
        _limits(axes, runs, lines, top, scale)
        axes.grid(axis="y")
        axes.set_xlabel("evaluations")
        axes.set_ylabel(f"best {quantity} so far ({unit})" if seconds else "best cost so far")
        axes.set_title(title, pad=10)
        axes.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
        end_labels(axes, labels)
        if without:
            axes.set_xlabel(f"evaluations (no plan that fits: {', '.join(without)})")
        _note_seeds(axes, runs)
    return figure


def _finite(curves: Sequence[Curve]) -> list[tuple[np.ndarray, np.ndarray]]:
    # Before the first plan that fits there is nothing to draw.
    runs = [(np.asarray(x, np.float64), np.asarray(y, np.float64)) for x, y in curves]
    return [(x[np.isfinite(y)], y[np.isfinite(y)]) for x, y in runs]


def _band(
    seeds: list[tuple[np.ndarray, np.ndarray]],
) -> tuple[Float[np.ndarray, " G"], ...]:
    """(evaluations, best, mean, worst) over seeds, from where every seed has a value."""
    seeds = [(x, y) for x, y in seeds if len(x)]
    if not seeds:
        return (np.zeros(0),) * 4
    grid = np.unique(np.concatenate([x for x, _ in seeds]))
    grid = grid[grid >= max(x[0] for x, _ in seeds)]
    values = np.stack([y[np.searchsorted(x, grid, side="right") - 1] for x, y in seeds])
    return grid, values.min(axis=0), values.mean(axis=0), values.max(axis=0)


def _ceiling(runs: dict, lines: dict[str, float]) -> float:
    """The largest cost that the picture shows: the start of a search may be far above the rest."""
    finals = [float(y[-1]) for seeds in runs.values() for _, y in seeds if len(y)]
    starts = [float(y[0]) for seeds in runs.values() for _, y in seeds if len(y)]
    known = [*finals, *lines.values()]
    if not known:
        return 1.0
    return min(max([*starts, *known]), max(known) + 0.6 * max(max(known) - min(known), 1e-12))


def _limits(axes: Axes, runs: dict, lines: dict[str, float], top: float, scale: float) -> None:
    finals = [float(y[-1]) for seeds in runs.values() for _, y in seeds if len(y)]
    low = min([*finals, *lines.values()], default=0.0)
    margin = 0.07 * (top - low) if top > low else 0.05 * max(abs(top), 1e-12)
    axes.set_ylim((low - margin) / scale, (top + margin) / scale)
    end = max((float(x[-1]) for seeds in runs.values() for x, _ in seeds if len(x)), default=1.0)
    axes.set_xlim(0, max(end, 1.0))
    # No plan can lie below a proven bound.
    bound = lines.get("optimum", lines.get("bound"))
    if bound is not None:
        bottom = (low - margin) / scale
        axes.axhspan(bottom, bound / scale, color=FAINT, alpha=0.55, lw=0, zorder=0)


def _label(name: str, value: float, native: float) -> str:
    if not math.isfinite(native) or value <= 0:
        return name
    return f"{name}  {native / value:.3f}{TIMES}"


def _note_seeds(axes: Axes, runs: dict) -> None:
    counts = {len(seeds) for seeds in runs.values()}
    if max(counts, default=1) > 1:
        many = f"{min(counts)}-{max(counts)}" if len(counts) > 1 else str(max(counts))
        axes.set_title(
            f"mean of {many} seeds, band: best to worst",
            loc="right",
            fontsize=8,
            color=MUTED,
            fontweight="normal",
            pad=10,
        )
