"""What a run writes while it runs: JSON lines, TensorBoard or Weights & Biases."""

from __future__ import annotations

import json
import math
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, TextIO, runtime_checkable

import numpy as np

from egx.errors import FormatError, MissingExtraError, SearchError
from egx.training.generation import Row

Record = dict[str, Any]


@runtime_checkable
class Sink(Protocol):
    """Takes a header once, then a record per generation and seed."""

    def begin(self, header: Record, generation: int) -> None:
        """Starts a run, or continues one: what was written at or after `generation` is stale."""

    def write(self, records: Sequence[Record]) -> None:
        """Takes the records of one chunk, oldest first."""

    def close(self) -> None:
        """Flushes; nothing follows."""


class JsonLines:
    """One JSON object a line: first the run, then each generation of each seed.

    A record is {"generation", "seed", "evaluations", "best_cost", "best_feasible", "seconds",
    "metrics": {...}}; numbers that JSON lacks are null.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        self._file: TextIO | None = None

    def begin(self, header: Record, generation: int) -> None:
        kept = []
        if generation > 0 and self.path.exists():
            kept = [r for r in read_records(self.path)[1] if r["generation"] < generation]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("w", encoding="utf-8")
        self._lines([{"run": header}, *kept])

    def write(self, records: Sequence[Record]) -> None:
        self._lines(records)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _lines(self, records: Sequence[Record]) -> None:
        if self._file is not None:
            self._file.writelines(json.dumps(r, allow_nan=False) + "\n" for r in records)
            self._file.flush()


def read_records(path: str | os.PathLike[str]) -> tuple[Record, list[Record]]:
    """The header and the records of a JSON-lines file; a last line cut short is dropped.

    Raises:
        FormatError: if the file is not one, or is damaged before its last line.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise FormatError(f"{path}: cannot be read: {error}") from error
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as error:
            # A run that was killed may have left half a line.
            if number < len(lines):
                raise FormatError(f"{path}, line {number}: not JSON: {error}") from error
    if not rows or not isinstance(rows[0], dict) or "run" not in rows[0]:
        raise FormatError(f"{path}: the first line must describe the run")
    for number, row in enumerate(rows[1:], 2):
        if not isinstance(row, dict) or not isinstance(row.get("generation"), int):
            raise FormatError(f"{path}, line {number}: not a record of a generation")
    return rows[0]["run"], rows[1:]


class TensorBoard:
    """Scalars by evaluations, one run a seed; needs tensorboardX."""

    def __init__(self, directory: str | os.PathLike[str]):
        try:
            from tensorboardX import SummaryWriter
        except ImportError as error:
            raise MissingExtraError(
                "TensorBoard records need tensorboardX: pip install 'egx[log]'"
            ) from error
        self.directory = Path(directory)
        self._make = SummaryWriter
        self._writers: dict[int, Any] = {}

    def begin(self, header: Record, generation: int) -> None:
        for seed in header["seeds"]:
            writer = self._make(str(self.directory / f"seed_{seed}"))
            writer.add_text("run", f"```json\n{json.dumps(header, indent=1)}\n```")
            self._writers[seed] = writer

    def write(self, records: Sequence[Record]) -> None:
        for record in records:
            writer = self._writers[record["seed"]]
            for name, value in _scalars(record).items():
                writer.add_scalar(name, value, record["evaluations"])

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()
        self._writers = {}


class WeightsAndBiases:
    """Scalars by evaluations, names prefixed by the seed; needs wandb.

    `options` go to `wandb.init`, such as `project="placements"` or `mode="offline"`.
    """

    def __init__(self, **options: Any):
        try:
            import wandb
        except ImportError as error:
            raise MissingExtraError(
                "Weights & Biases records need wandb: pip install 'egx[log]'"
            ) from error
        self._wandb, self._options, self._run = wandb, options, None

    def begin(self, header: Record, generation: int) -> None:
        self._run = self._wandb.init(config=header, **self._options)

    def write(self, records: Sequence[Record]) -> None:
        if self._run is None:
            return
        for record in records:
            prefix = f"seed_{record['seed']}"
            values = {f"{prefix}/{name}": value for name, value in _scalars(record).items()}
            self._run.log({f"{prefix}/evaluations": record["evaluations"], **values})

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()
            self._run = None


def _scalars(record: Record) -> dict[str, float]:
    values = {"best_cost": record["best_cost"], **record["metrics"]}
    return {name: value for name, value in values.items() if value is not None}


class Records:
    """All sinks of a run. One that fails is dropped with a warning: a search outlives its log.

    Only before the first generation is what others' packages refuse an error: nothing is lost then.
    """

    def __init__(self, sinks: Sequence[Sink]):
        self._sinks = list(sinks)

    def begin(self, header: Record, generation: int) -> None:
        self._each(lambda sink: sink.begin(header, generation), OSError)

    def write(self, rows: Row, seeds: Sequence[int], generation: int, seconds: float) -> None:
        """Takes the rows of one chunk, [k, S], the last of which is generation - 1."""
        if not self._sinks:
            return
        count = len(np.asarray(rows.evaluations))
        records = [
            {
                "generation": generation - count + k,
                "seed": int(seed),
                "evaluations": int(rows.evaluations[k, s]),
                "best_cost": _finite(rows.best_cost[k, s]),
                "best_feasible": bool(rows.best_feasible[k, s]),
                "seconds": round(seconds, 4),
                "metrics": {name: _finite(value[k, s]) for name, value in rows.metrics.items()},
            }
            for k in range(count)
            for s, seed in enumerate(seeds)
        ]
        self._each(lambda sink: sink.write(records))

    def close(self) -> None:
        self._each(lambda sink: sink.close())

    def _each(self, action: Any, forgiven: type[Exception] = Exception) -> None:
        for sink in list(self._sinks):
            try:
                action(sink)
            except forgiven as error:
                self._sinks.remove(sink)
                warnings.warn(f"records stop here: {type(sink).__name__}: {error}", stacklevel=2)


def _finite(value: Any) -> float | None:
    number = float(value)
    return number if math.isfinite(number) else None


SinkLike = str | os.PathLike[str] | Sink


@contextmanager
def open_records(records: SinkLike | Sequence[SinkLike]) -> Iterator[Records]:
    """Sinks from paths (JSON lines) or sinks, closed at the end."""
    given = list(records) if isinstance(records, list | tuple) else [records]
    for one in given:
        if not isinstance(one, str | os.PathLike) and not hasattr(one, "begin"):
            raise SearchError(
                f"records must be paths or sinks of egx.training.records, got {one!r}"
            )
    sinks = [JsonLines(r) if isinstance(r, str | os.PathLike) else r for r in given]
    opened = Records(sinks)  # type: ignore[arg-type]
    try:
        yield opened
    finally:
        opened.close()
