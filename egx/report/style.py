"""One look for all pictures: quiet axes, a colour-blind-safe palette, a colour per memory level."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

NOTEBOOK_DPI = 130

INK = "#2B2F36"
MUTED = "#767D88"
FAINT = "#DDE1E6"
EMPTY = "#F4F5F7"

# Okabe and Ito's palette without black and yellow, which read badly as lines on white, and without
# the green of bounds.
SERIES = ("#0072B2", "#D55E00", "#CC79A7", "#E69F00", "#56B4E9", "#7A5195", "#8C6D31", "#7F7F7F")
LINE_STYLES = ("-", "--", "-.", ":")

_BACKING = "#A9B1BC"
_LEVELS = ("#E69F00", "#0072B2", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")

FOUND = "#0072B2"
NATIVE = INK
BOUND = "#009E73"
# Apart from the levels' colours: these say what an op waits for.
PARTS = {"compute": "#009E73", "memory": "#7A5195", "wait": "#D55E00", "launch": "#CBD0D8"}

_RC: dict[str, Any] = {
    "figure.dpi": 110,
    "savefig.dpi": 160,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9,
    "text.color": INK,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelcolor": INK,
    "axes.edgecolor": MUTED,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": False,
    "grid.color": FAINT,
    "grid.linewidth": 0.7,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "svg.fonttype": "none",
    # Names of files may hold dollars; they are never formulas.
    "text.parse_math": False,
}


@contextlib.contextmanager
def look() -> Iterator[None]:
    """The style of egx's pictures while it is open; the caller's own settings come back after."""
    with mpl.rc_context(_RC):  # type: ignore[arg-type]
        yield


class Picture(Figure):
    """A figure that notebooks show by themselves, whatever their matplotlib is set to."""

    def _repr_png_(self) -> tuple[bytes, dict[str, int]]:
        """PNG with more pixels than it is shown with, to be sharp on any screen."""
        content = io.BytesIO()
        self.savefig(content, format="png", dpi=NOTEBOOK_DPI)
        width, height = (int(inches * NOTEBOOK_DPI * 0.7) for inches in self.get_size_inches())
        return content.getvalue(), {"width": width, "height": height}


def new_figure(width: float, height: float) -> Figure:
    """A figure in inches that belongs to no window, so that pictures need no display."""
    figure = Picture(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def heading(figure: Figure, title: str) -> None:
    """The title of a whole figure, at its upper left."""
    figure.suptitle(title, x=0.012, ha="left", fontsize=10.5, fontweight="bold")


def level_colors(levels: int) -> list[str]:
    """A colour per memory level, grey for the backing memory; the same in every picture."""
    if levels - 1 <= len(_LEVELS):
        return [_BACKING, *_LEVELS[: levels - 1]]
    ramp = mpl.colormaps["viridis"].resampled(levels - 1)
    return [_BACKING, *(mpl.colors.to_hex(ramp(m)) for m in range(levels - 1))]


def text_on(color: str) -> str:
    """Black or white, whichever is read better on `color`."""
    red, green, blue = mpl.colors.to_rgb(color)
    return INK if 0.299 * red + 0.587 * green + 0.114 * blue > 0.55 else "white"


def series_style(index: int) -> tuple[str, str]:
    """(colour, line style) of the index-th curve; no two of the first 32 are alike."""
    return SERIES[index % len(SERIES)], LINE_STYLES[index // len(SERIES) % len(LINE_STYLES)]


def spread(spots: list[float], gap: float) -> list[float]:
    """Rising positions from 0 to 1, moved as little as possible (least squares) until they are
    `gap` apart, and no further than 0 and 1 where there is room for all.

    Isotonic regression of the positions less their share of gaps, by pooling adjacent violators.
    """
    pools: list[tuple[float, int]] = []
    for k, spot in enumerate(spots):
        mean, count = spot - k * gap, 1
        while pools and pools[-1][0] > mean:
            other, size = pools.pop()
            mean, count = (mean * count + other * size) / (count + size), count + size
        pools.append((mean, count))
    last = max(1.0 - (len(spots) - 1) * gap, 0.0)
    flat = [min(max(mean, 0.0), last) for mean, count in pools for _ in range(count)]
    return [spot + k * gap for k, spot in enumerate(flat)]


def end_labels(axes: Axes, labels: list[tuple[float, str, str]]) -> None:
    """Writes (y, text, colour) labels beside the right edge, apart, each with a line to its y.

    Call it when the limits of the axes are final.
    """
    figure = axes.get_figure(root=True)
    assert figure is not None
    height = figure.get_figheight() * 0.8
    gap = min(8.5 * 1.35 / 72 / height, 1 / max(len(labels), 1))
    transform = axes.transData + axes.transAxes.inverted()
    placed = sorted((float(transform.transform((0, y))[1]), text, c) for y, text, c in labels)
    spots = spread([min(max(spot, 0.0), 1.0) for spot, _, _ in placed], gap)
    for (spot, text, color), moved in zip(placed, spots, strict=True):
        axes.plot(
            [1.0, 1.02, 1.03],
            [spot, moved, moved],
            transform=axes.transAxes,
            color=color,
            lw=0.8,
            alpha=0.7,
            clip_on=False,
        )
        axes.annotate(
            text,
            (1.035, moved),
            xycoords="axes fraction",
            va="center",
            ha="left",
            color=color,
            fontsize=8.5,
            annotation_clip=False,
        )
