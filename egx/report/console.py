"""What a run says while it works: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

from egx.report.tables import Table
from egx.report.units import format_duration, format_seconds, format_speedup
from egx.training.progress import Progress, ProgressCallback

LINE_EVERY_S = 10.0


def console() -> Console:
    """Where results go: stdout, its numbers not coloured, its lines not cut."""
    return Console(highlight=False, soft_wrap=True)


def error_console() -> Console:
    """Where progress and errors go."""
    return Console(stderr=True, highlight=False, soft_wrap=True)


def print_table(out: Console, table: Table) -> None:
    """Prints a table, as wide as the console allows."""
    out.print(table.to_rich(), soft_wrap=False)


def best_so_far(progress: Progress, seconds: bool = True) -> str:
    """Such as "343.9 µs, 1.088 x native"."""
    if not progress.feasible:
        return "nothing that fits yet"
    cost = progress.best_cost
    shown = format_seconds(cost) if seconds else f"{cost:.6g}"
    speedup = format_speedup(progress.reference_cost, cost)
    failed = progress.failed_measurements
    return f"{shown}, {speedup} native" + (f", {failed:,} failed" if failed else "")


@contextmanager
def watch(
    console: Console,
    *,
    quiet: bool = False,
    best: Callable[[Progress], str] = best_so_far,
    what: str = "evaluations",
) -> Iterator[ProgressCallback]:
    """A callback for the driver: draws a bar, or prints lines where `console` is no terminal.

    `best` says in words how good the best so far is, and `what` is counted.
    """
    if quiet:
        yield lambda _: None
    elif console.is_terminal:
        with _bar(console, best) as callback:
            yield callback
    else:
        yield _Lines(console, best, what)


@contextmanager
def _bar(console: Console, best: Callable[[Progress], str]) -> Iterator[ProgressCallback]:
    bar = RichProgress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=32),
        MofNCompleteColumn(),
        TextColumn("{task.fields[best]}"),
        TimeRemainingColumn(compact=True),
        console=console,
        transient=True,
    )
    with bar:
        # A bar without a total pulses: compiling takes a while and tells nothing.
        task = bar.add_task("compiling", total=None, best="")

        def show(progress: Progress) -> None:
            bar.update(
                task,
                description=progress.algorithm,
                total=progress.budget,
                completed=progress.evaluations,
                best=best(progress),
            )

        yield show


class _Lines:
    """Prints the first and the last report and one every `LINE_EVERY_S` seconds between."""

    def __init__(self, console: Console, best: Callable[[Progress], str], what: str):
        self.console, self.best, self.what = console, best, what
        self.due = 0.0

    def __call__(self, progress: Progress) -> None:
        now = time.monotonic()
        if now < self.due and progress.evaluations < progress.budget:
            return
        self.due = now + LINE_EVERY_S
        self.console.print(
            f"{progress.algorithm}: {progress.evaluations:,} of {progress.budget:,} {self.what}, "
            f"{self.best(progress)}, {format_duration(progress.seconds)}",
            highlight=False,
            soft_wrap=True,
        )
