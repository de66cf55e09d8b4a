"""What a run tells while it runs, and how it is stopped by hand."""

from __future__ import annotations

import dataclasses
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as RichProgress


@dataclasses.dataclass(frozen=True)
class Progress:
    """Where a run stands after a chunk: evaluations per seed, the best over seeds, and times.

    `seconds` counts from the end of compilation, over this session of a resumed run.
    """

    algorithm: str
    evaluations: int
    budget: int
    best_cost: float
    feasible: bool
    reference_cost: float
    failed_measurements: int
    evaluations_per_s: float
    seconds: float
    compile_seconds: float


ProgressCallback = Callable[[Progress], None]


class Bar:
    """A progress bar on stderr: evaluations, best so far beside the reference, and speed."""

    def __init__(self, console: Console | None = None):
        self._bar = RichProgress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[best]}"),
            TextColumn("{task.fields[speed]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console or Console(stderr=True),
        )
        self._task: TaskID | None = None

    def __enter__(self) -> Bar:
        self._bar.start()
        return self

    def __exit__(self, *details: Any) -> None:
        self._bar.stop()

    def __call__(self, progress: Progress) -> None:
        if self._task is None or self._bar.tasks[0].total != progress.budget:
            for task in self._bar.task_ids:
                self._bar.remove_task(task)
            self._task = self._bar.add_task(
                progress.algorithm, total=progress.budget, best="", speed=""
            )
        self._bar.update(
            self._task,
            description=progress.algorithm,
            completed=progress.evaluations,
            best=best_text(progress),
            speed=f"{progress.evaluations_per_s:,.0f}/s",
        )


def best_text(progress: Progress) -> str:
    """The best so far beside the reference, in words."""
    if progress.evaluations == 0:
        return f"reference {progress.reference_cost:.4g}"
    text = f"best {progress.best_cost:.4g}"
    if not progress.feasible:
        text += " (infeasible)"
    elif progress.best_cost > 0:
        text += f" ({progress.reference_cost / progress.best_cost:.3f}x)"
    if progress.failed_measurements:
        text += f", {progress.failed_measurements} failed"
    return f"{text}, reference {progress.reference_cost:.4g}"


@contextmanager
def listener(progress: bool | ProgressCallback) -> Iterator[ProgressCallback]:
    """The callback that `progress` asks for: a bar, the caller's own, or one that does nothing."""
    if callable(progress):
        yield progress
    elif progress:
        with Bar() as bar:
            yield bar
    else:
        yield lambda _: None


class StopFlag:
    """Turns the first Ctrl-C into a flag, so that a chunk ends whole; the second one raises.

    Outside the main thread, where the caller has a handler of their own, and when it is not
    `wanted`, it does nothing.
    """

    def __init__(self, *, wanted: bool = True) -> None:
        self.raised = False
        self._wanted = wanted
        self._installed = False

    def __enter__(self) -> StopFlag:
        in_main = threading.current_thread() is threading.main_thread()
        default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if self._wanted and in_main and default:
            signal.signal(signal.SIGINT, self._handle)
            self._installed = True
        return self

    def __exit__(self, *details: Any) -> None:
        if self._installed:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            self._installed = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.raised:
            raise KeyboardInterrupt
        self.raised = True
