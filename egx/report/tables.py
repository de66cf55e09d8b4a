"""Tables: one description of what they say, printed by rich or written as markdown."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np
from rich import box
from rich.table import Table as RichTable
from rich.text import Text

from egx.graph.graph import OP_CLASSES, Model, real_sizes
from egx.hardware.spec import Hardware
from egx.problems.base import AbstractProblem
from egx.report.placement import Placement, host_decisions, layout, occupancy
from egx.report.units import (
    format_bytes,
    format_count,
    format_duration,
    format_percent,
    format_seconds,
    format_speedup,
)
from egx.training.result import Result


@dataclasses.dataclass(frozen=True)
class Table:
    """Cells as text. `strong` is the row to look at, `note` a line below; the first column is
    aligned to the left, the others to the right unless `left` names them."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    title: str = ""
    note: str = ""
    strong: int | None = None
    left: tuple[int, ...] = (0,)

    def to_markdown(self) -> str:
        """The table as GitHub markdown, with a newline at its end."""
        rule = [":--" if k in self.left else "--:" for k in range(len(self.header))]
        rows = [list(row) for row in self.rows]
        if self.strong is not None:
            rows[self.strong] = [f"**{cell}**" if cell else cell for cell in rows[self.strong]]
        cells = [self.header, rule, *rows]
        lines = ["| " + " | ".join(c.replace("|", "\\|") for c in row) + " |" for row in cells]
        if self.title:
            lines = [f"**{self.title}**", "", *lines]
        if self.note:
            lines += ["", self.note]
        return "\n".join(lines) + "\n"

    def __str__(self) -> str:
        return self.to_markdown()

    def _repr_markdown_(self) -> str:
        """How notebooks show it."""
        return self.to_markdown()

    def to_rich(self) -> RichTable:
        """The table for a console."""
        table = RichTable(
            title=self.title or None,
            title_justify="left",
            title_style="bold",
            caption=self.note or None,
            caption_justify="left",
            caption_style="dim",
            box=box.SIMPLE_HEAD,
            padding=(0, 1, 0, 0),
            pad_edge=False,
        )
        for k, name in enumerate(self.header):
            # Only what is long anyway may be folded, so that figures stay whole.
            widest = max((len(row[k]) for row in self.rows), default=0)
            table.add_column(
                name,
                justify="left" if k in self.left else "right",
                no_wrap=widest <= 26,
                overflow="fold",
            )
        for index, row in enumerate(self.rows):
            # Text, not str: names of ops may hold brackets, which rich reads as markup.
            table.add_row(
                *(Text(cell) for cell in row), style="bold" if index == self.strong else None
            )
        return table


def bound_name(status: str | None) -> str:
    """What a bound may be called: only where a plan was proved to reach it is it the optimum."""
    return "optimum (proved)" if status == "proved" else "lower bound"


def latency_table(
    plans: Sequence[tuple[str, float, bool]],
    *,
    reference_s: float,
    bound_s: float | None = None,
    bound_status: str | None = None,
    best: str | None = None,
    title: str = "",
    note: str = "",
) -> Table:
    """Plans by (name, seconds, whether it fits), and the bound as the last row."""
    known = bound_s is not None and bound_s > 0
    header = ("plan", "latency", "speed-up", *(("above bound",) if known else ()))
    rows: list[tuple[str, ...]] = []
    strong = None
    for name, seconds, fits in plans:
        speedup = format_speedup(reference_s, seconds) if fits else "does not fit"
        row = [name, format_seconds(seconds), speedup]
        if known:
            assert bound_s is not None
            row.append(format_percent(max(seconds / bound_s - 1, 0.0)) if fits else "")
        if name == best:
            strong = len(rows)
        rows.append(tuple(row))
    if known:
        assert bound_s is not None
        rows.append(
            (
                bound_name(bound_status),
                format_seconds(bound_s),
                format_speedup(reference_s, bound_s),
                "",
            )
        )
    return Table(header, tuple(rows), title=title, note=note, strong=strong)


def level_table(
    problem: AbstractProblem,
    before: Placement,
    after: Placement,
    *,
    names: tuple[str, str] = ("native", "found"),
) -> Table:
    """What lies on each level in two maps, fastest level first, and the bytes that moved.

    Moved bytes are the sum over all weights and tensors, whenever they live.
    """
    where = layout(problem)
    old, new = host_decisions(problem, before), host_decisions(problem, after)
    held = [occupancy(where, d) for d in (old, new)]
    sizes = {"weights": where.weight_bytes, "activations": where.output_bytes}
    rows = []
    for m in reversed(range(where.levels)):
        arrived = left = 0
        for kind, size in sizes.items():
            arrived += int(size[(new[kind] == m) & (old[kind] != m)].sum())
            left += int(size[(new[kind] != m) & (old[kind] == m)].sum())
        cells = [where.level_names[m], format_bytes(where.capacity_bytes[m])]
        for o in held:
            weights, activations = int(o.weights[m]), int(o.activations[:, m].max())
            cells.append(f"{format_bytes(weights)} + {format_bytes(activations)}")
        rows.append((*cells, format_bytes(arrived), format_bytes(left)))
    header = ("level", "holds", *names, "moved in", "moved out")
    note = "weights + activations, these at their peak"
    return Table(header, tuple(rows), note=note)


def effort_line(result: Result) -> str:
    """What it cost to find the plan, in one sentence."""
    if not len(result.history):
        word = "proved" if result.bound_status == "proved" else "stopped"
        return f"{result.algorithm}: {word} in {format_duration(result.seconds)}"
    parts = [
        f"{result.algorithm}, seed {result.seed}: {result.evaluations:,} evaluations in "
        f"{format_duration(result.seconds)}"
    ]
    if result.compile_seconds >= 0.05:
        parts.append(f"after {format_duration(result.compile_seconds)} of compiling")
    if result.found_at:
        parts.append(f"best at evaluation {result.found_at:,}")
    if result.failed_measurements:
        parts.append(f"{result.failed_measurements:,} measurements failed")
    if result.interrupted:
        parts.append(f"stopped early ({result.interrupted})")
    return ", ".join(parts)


@dataclasses.dataclass(frozen=True)
class Standing:
    """How one searcher did over its seeds; `reached` of them came within 1 % of the best known
    cost, and is None for a solver, which counts no evaluations."""

    algorithm: str
    costs: tuple[float, ...]
    evaluations_to_1_percent: float
    reached: int | None
    seconds: float


def standing(algorithm: str, results: Sequence[Result], best_known: float) -> Standing:
    """Sums up the runs of one searcher; runs without a feasible plan count as infinite cost."""
    costs = tuple(r.cost if r.feasible else math.inf for r in results)
    needed = [r.history.evaluations_to(1.01 * best_known) for r in results]
    reached = [n for n in needed if n is not None]
    return Standing(
        algorithm=algorithm,
        costs=costs,
        evaluations_to_1_percent=float(np.median(reached)) if reached else math.nan,
        reached=len(reached) if any(len(r.history) for r in results) else None,
        seconds=float(np.mean([r.seconds / r.runs_together for r in results])),
    )


def comparison_table(
    standings: Sequence[Standing],
    *,
    reference: float,
    bound: float | None = None,
    bound_status: str | None = None,
    seconds: bool = True,
    show: Callable[[float], str] | None = None,
    reference_name: str = "native",
    title: str = "",
    note: str = "",
) -> Table:
    """Searchers from the best mean to the worst, beside reference and bound.

    "spread" is the standard deviation over seeds, "gap" how far the mean is above the bound.
    "to 1 %" is the median number of evaluations until a plan within 1 % of the best that any run
    found, over the seeds that got there; "seconds" are per run, without compilation. `show` writes
    costs, by default as seconds.
    """
    if show is None:
        show = format_seconds if seconds else (lambda value: f"{value:.6g}")
    known = bound is not None and bound > 0
    header = (
        "algorithm",
        "mean",
        "spread",
        "best",
        *(("gap",) if known else ()),
        "to 1 %",
        "seconds",
    )
    rows = []
    for s in sorted(standings, key=lambda s: float(np.mean(s.costs))):
        mean, count = float(np.mean(s.costs)), len(s.costs)
        fits = math.isfinite(mean)
        spread = float(np.std(s.costs, ddof=1)) if count > 1 and fits else math.nan
        best = min(s.costs)
        reached = ""
        if s.reached is not None:
            reached = f"{s.evaluations_to_1_percent:,.0f}" if s.reached else "never"
            reached += f" ({s.reached}/{count})" if 0 < s.reached < count else ""
        row = [
            s.algorithm,
            show(mean) if fits else "does not fit",
            f"{100 * spread / mean:.2f} %" if math.isfinite(spread) and mean > 0 else "",
            show(best) if math.isfinite(best) else "",
        ]
        if known:
            assert bound is not None
            row.append(format_percent(max(mean / bound - 1, 0.0)) if fits else "")
        row.append(reached)
        row.append(format_duration(s.seconds))
        rows.append(tuple(row))
    blank = ("",) * (len(header) - 2)
    rows.append((reference_name, show(reference), *blank))
    if known:
        assert bound is not None
        rows.append((bound_name(bound_status), show(bound), *blank))
    return Table(header, tuple(rows), title=title, note=note, strong=0 if standings else None)


def model_table(model: Model) -> Table:
    """A model in figures: ops by class, FLOPs, bytes."""
    graph = model.graph
    ops, tensors, uses = real_sizes(graph)
    unit = int(graph.unit_bytes)
    classes = np.asarray(graph.op_class)[:ops]
    flops = np.asarray(graph.flops, np.float64)[:ops]
    weights = np.asarray(graph.weight_units, np.int64)[:ops] * unit
    outputs = np.asarray(graph.output_units(), np.int64)[:ops] * unit
    rows = []
    for c, name in enumerate(OP_CLASSES):
        of = classes == c
        if of.any():
            rows.append(
                (
                    name,
                    f"{int(of.sum()):,}",
                    format_count(float(flops[of].sum()), "FLOP"),
                    format_bytes(int(weights[of].sum())),
                    format_bytes(int(outputs[of].sum())),
                )
            )
    rows.append(
        (
            "all",
            f"{ops:,}",
            format_count(float(flops.sum()), "FLOP"),
            format_bytes(int(weights.sum())),
            format_bytes(int(outputs.sum())),
        )
    )
    return Table(
        ("op class", "ops", "work", "weights", "outputs"),
        tuple(rows),
        title=model.source,
        note=f"{tensors:,} tensors, {uses:,} uses; sizes are multiples of {format_bytes(unit)}; "
        f"digest {model.digest[:16]}",
        strong=len(rows) - 1,
    )


def hardware_table(hardware: Hardware, device: int = 0) -> Table:
    """The memory levels of one device, fastest first, with its rates below."""
    levels = reversed(range(hardware.num_levels))
    rows = tuple(
        (
            hardware.level_names[m],
            format_bytes(float(hardware.level_bytes[device, m])),
            format_count(float(hardware.read_bytes_per_s[device, m]), "B/s"),
            format_count(float(hardware.write_bytes_per_s[device, m]), "B/s"),
        )
        for m in levels
    )
    rates = np.asarray(hardware.flops_per_s[device], np.float64)
    by_rate = ", ".join(
        f"{name} {format_count(float(rate), 'FLOP/s')}"
        for name, rate in zip(OP_CLASSES, rates, strict=True)
    )
    launch = format_seconds(float(hardware.launch_s[device]))
    return Table(
        ("level", "holds", "read", "write"),
        rows,
        title=f"{hardware.name}: {hardware.device_names[device]}",
        note=f"rates: {by_rate}; launch {launch}",
    )
