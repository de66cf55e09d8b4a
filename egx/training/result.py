"""What a search found, with everything needed to judge it and to repeat it."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from typing import Any, Literal

import numpy as np

from egx.errors import FormatError
from egx.files import read_json, write_whole

FORMAT = "egx result"
VERSION = 1

BoundStatus = Literal["proved", "feasible", "bound only"]
BOUND_STATUSES = ("proved", "feasible", "bound only")


@dataclasses.dataclass(frozen=True)
class History:
    """One entry per generation: evaluations so far, and the best so far after them [G]."""

    evaluations: np.ndarray
    best_cost: np.ndarray
    best_feasible: np.ndarray
    metrics: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.evaluations)

    def evaluations_to(self, cost: float) -> int | None:
        """Evaluations until a feasible candidate of at most `cost` was known; None if never."""
        reached = np.flatnonzero(self.best_feasible & (self.best_cost <= cost))
        return int(self.evaluations[reached[0]]) if reached.size else None


@dataclasses.dataclass(frozen=True)
class Result:
    """The best decisions of one run, beside the reference and, where known, a lower bound.

    `decisions` are padded arrays as `problem.evaluate` takes them. `cost` is in the unit of the
    problem (seconds for latency and makespan, bytes for peak memory). `seconds` excludes
    `compile_seconds`. `failed_measurements` counts candidates whose measurement on real hardware
    failed. `interrupted` says that the run stopped before its budget and why.
    """

    decisions: dict[str, np.ndarray]
    cost: float
    feasible: bool
    found_at: int
    reference: dict[str, np.ndarray]
    reference_cost: float
    bound: float | None
    bound_status: BoundStatus | None
    algorithm: str
    config: dict[str, Any]
    budget: int
    evaluations: int
    failed_measurements: int
    seed: int
    seconds: float
    compile_seconds: float
    history: History
    interrupted: Literal["ctrl-c", "time limit"] | None
    provenance: dict[str, Any]

    @property
    def speedup(self) -> float | None:
        """Reference cost over cost; 0 for an infeasible result, None where it is undefined."""
        if not self.feasible:
            return 0.0
        return self.reference_cost / self.cost if self.cost > 0 else None

    @property
    def gap(self) -> float | None:
        """How far above the lower bound: cost / bound - 1; None without a bound or a plan."""
        if self.bound is None or not self.feasible or self.bound <= 0:
            return None
        return max(self.cost / self.bound - 1.0, 0.0)

    @property
    def runs_together(self) -> int:
        """Seeds that ran in one program with this one, so that `seconds` is of all of them."""
        return int(self.provenance.get("seeds_together", 1))

    def with_bound(self, bound: float | None, status: BoundStatus | None) -> Result:
        """The same result beside a lower bound that was found elsewhere."""
        if (bound is None) != (status is None) or status not in (*BOUND_STATUSES, None):
            raise FormatError(f"a bound needs a status among {BOUND_STATUSES}, got {status!r}")
        return dataclasses.replace(self, bound=bound, bound_status=status)

    def to_json(self) -> dict[str, Any]:
        """Plain data for `json.dumps`; numbers that JSON lacks become null."""
        data = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        data["history"] = dataclasses.asdict(self.history)
        derived = {"speedup": self.speedup, "gap": self.gap}
        return {"format": FORMAT, "version": VERSION, **_plain(data), **_plain(derived)}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes JSON; the file appears whole or not at all."""
        write_whole(path, json.dumps(self.to_json(), indent=1, allow_nan=False) + "\n")

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Result:
        """Reads what `save` wrote.

        Raises:
            FormatError: if the file is missing, damaged or something else.
        """
        return Result.from_json(read_json(path, FORMAT, VERSION), str(path))

    @staticmethod
    def from_json(data: dict[str, Any], where: str = "result") -> Result:
        """The result that `to_json` describes; `where` names it in errors."""
        try:
            return _from_json(data)
        except FormatError as error:
            raise FormatError(f"{where}: {error}") from None
        except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
            detail = f"{error} is missing" if isinstance(error, KeyError) else str(error)
            raise FormatError(f"{where}: damaged result: {detail}") from error

    def __str__(self) -> str:
        parts = [f"{self.algorithm}: cost {self.cost:.6g}"]
        if not self.feasible:
            parts.append("infeasible")
        parts.append(f"reference {self.reference_cost:.6g}")
        if self.speedup:
            parts.append(f"speed-up {self.speedup:.3f}x")
        if self.bound is not None:
            gap = "" if self.gap is None else f", gap {100 * self.gap:.2f} %"
            parts.append(f"bound {self.bound:.6g} ({self.bound_status}{gap})")
        parts.append(f"{self.evaluations} of {self.budget} evaluations in {self.seconds:.1f} s")
        if self.interrupted:
            parts.append(f"stopped early ({self.interrupted})")
        return "; ".join(parts)

    __repr__ = __str__


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return _plain(value.tolist())
    if isinstance(value, np.generic):
        return _plain(value.item())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return value


def _expect(name: str, value: Any, *kinds: type) -> Any:
    # bool is an int to Python, but never a number here.
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        wanted = " or ".join(kind.__name__ for kind in kinds)
        raise FormatError(f"{name} must be {wanted}, got {value!r}")
    return value


def _number(name: str, value: Any) -> float:
    return float(_expect(name, value, int, float))


def _decisions(name: str, value: Any) -> dict[str, np.ndarray]:
    decisions = {}
    for head, entries in _expect(name, value, dict).items():
        array = np.asarray(_expect(f"{name}[{head!r}]", entries, list))
        if array.ndim != 1 or array.dtype.kind not in "if":
            raise FormatError(f"{name}[{head!r}] must be a list of numbers")
        whole = array.dtype.kind == "i" or not array.size
        decisions[head] = array.astype(np.int32 if whole else np.float32)
    return decisions


def _series(name: str, value: Any, kind: type, length: int) -> np.ndarray:
    entries = _expect(name, value, list)
    if kind is np.float32:
        entries = [np.nan if entry is None else entry for entry in entries]
    array = np.asarray(entries)
    wanted = {np.int64: "i", np.float32: "if", np.bool_: "b"}[kind]
    if array.shape != (length,) or (length and array.dtype.kind not in wanted):
        raise FormatError(f"{name} must be a list of {length} values of {kind.__name__}")
    return array.astype(kind)


def _history(data: dict[str, Any]) -> History:
    length = len(_expect("history.evaluations", data["evaluations"], list))
    return History(
        evaluations=_series("history.evaluations", data["evaluations"], np.int64, length),
        best_cost=_series("history.best_cost", data["best_cost"], np.float32, length),
        best_feasible=_series("history.best_feasible", data["best_feasible"], np.bool_, length),
        metrics={
            name: _series(f"history.metrics[{name!r}]", values, np.float32, length)
            for name, values in _expect("history.metrics", data["metrics"], dict).items()
        },
    )


def _from_json(data: dict[str, Any]) -> Result:
    status = data["bound_status"]
    if status not in (*BOUND_STATUSES, None):
        raise FormatError(f"bound_status must be one of {BOUND_STATUSES} or null, got {status!r}")
    reason = data["interrupted"]
    if reason not in ("ctrl-c", "time limit", None):
        raise FormatError(f"interrupted must be 'ctrl-c', 'time limit' or null, got {reason!r}")
    bound = data["bound"]
    counts = {
        name: _expect(name, data[name], int)
        for name in ("found_at", "budget", "evaluations", "failed_measurements", "seed")
    }
    return Result(
        decisions=_decisions("decisions", data["decisions"]),
        feasible=_expect("feasible", data["feasible"], bool),
        reference=_decisions("reference", data["reference"]),
        bound=None if bound is None else _number("bound", bound),
        bound_status=status,
        algorithm=_expect("algorithm", data["algorithm"], str),
        config=_expect("config", data["config"], dict),
        history=_history(_expect("history", data["history"], dict)),
        interrupted=reason,
        provenance=_expect("provenance", data["provenance"], dict),
        cost=_number("cost", data["cost"]),
        reference_cost=_number("reference_cost", data["reference_cost"]),
        seconds=_number("seconds", data["seconds"]),
        compile_seconds=_number("compile_seconds", data["compile_seconds"]),
        **counts,
    )
