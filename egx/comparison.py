"""Searchers side by side on one problem: the same budget, the same seeds, the same bound."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from egx.errors import CheckpointError, FormatError
from egx.files import read_json, write_whole
from egx.report.tables import Table, comparison_table, standing
from egx.report.units import format_bytes, format_seconds
from egx.training.identity import differences
from egx.training.result import BOUND_STATUSES, BoundStatus, Result

FORMAT = "egx comparison"
VERSION = 1
NEAR = 1.01


@dataclasses.dataclass(frozen=True)
class ComparisonRow:
    """One searcher over its seeds. Costs are over feasible results only, None without any.

    `gap` and `gap_best` say how far `mean` and `best` are above the bound. `evaluations_to_near`
    is the median number of evaluations until a cost within 1 % of the best over all searchers,
    over the `near_share` of seeds that got there. `seconds` are per seed, without compilation.
    """

    algorithm: str
    seeds: int
    feasible_share: float
    mean: float | None
    std: float | None
    best: float | None
    speedup: float | None
    gap: float | None
    gap_best: float | None
    near_share: float
    evaluations_to_near: float | None
    seconds: float


@dataclasses.dataclass(frozen=True)
class Comparison:
    """All results of a comparison, by searcher and seed; `interrupted` says that some miss."""

    results: dict[str, list[Result]]
    budget: int
    bound: float | None = None
    bound_status: BoundStatus | None = None
    interrupted: bool = False

    @property
    def reference_cost(self) -> float:
        """The cost of the reference plan."""
        return next(iter(self.results.values()))[0].reference_cost

    @property
    def best(self) -> Result | None:
        """The best feasible result of all; ties go to the searcher named first."""
        feasible = [r for results in self.results.values() for r in results if r.feasible]
        return min(feasible, key=lambda result: result.cost) if feasible else None

    @property
    def rows(self) -> list[ComparisonRow]:
        """A row per searcher, in the order in which they were named."""
        best = self.best
        near = None if best is None else NEAR * best.cost
        return [self._row(name, results, near) for name, results in self.results.items()]

    def _row(self, name: str, results: Sequence[Result], near: float | None) -> ComparisonRow:
        costs = np.array([r.cost for r in results if r.feasible], np.float64)
        reached = [] if near is None else [r.history.evaluations_to(near) for r in results]
        evaluations = [n for n in reached if n is not None]
        mean = float(costs.mean()) if costs.size else None
        best = float(costs.min()) if costs.size else None
        return ComparisonRow(
            algorithm=name,
            seeds=len(results),
            feasible_share=costs.size / len(results),
            mean=mean,
            std=float(costs.std(ddof=1)) if costs.size > 1 else None,
            best=best,
            speedup=self.reference_cost / mean if mean else None,
            gap=self._gap(mean),
            gap_best=self._gap(best),
            near_share=len(evaluations) / len(results),
            evaluations_to_near=float(np.median(evaluations)) if evaluations else None,
            seconds=float(np.mean([r.seconds / r.runs_together for r in results])),
        )

    def _gap(self, cost: float | None) -> float | None:
        if cost is None or self.bound is None or self.bound <= 0:
            return None
        return max(cost / self.bound - 1.0, 0.0)

    def with_bound(self, bound: float, status: BoundStatus) -> Comparison:
        """The same comparison, its results too, beside a lower bound found elsewhere."""
        results = {
            name: [result.with_bound(bound, status) for result in group]
            for name, group in self.results.items()
        }
        return dataclasses.replace(self, results=results, bound=bound, bound_status=status)

    def curves(self) -> dict[str, list[tuple[np.ndarray, np.ndarray]]]:
        """(evaluations, best feasible cost so far) per seed, for convergence plots; NaN before
        the first feasible candidate."""
        return {
            name: [
                (
                    r.history.evaluations,
                    np.where(r.history.best_feasible, r.history.best_cost, np.nan),
                )
                for r in results
            ]
            for name, results in self.results.items()
        }

    def table(self) -> Table:
        """The rows as a table for a console or for markdown, from the best mean to the worst."""
        best = self.best
        floor = float("nan") if best is None else best.cost
        return comparison_table(
            [standing(name, results, floor) for name, results in self.results.items()],
            reference=self.reference_cost,
            bound=self.bound,
            bound_status=self.bound_status,
            note="interrupted: some runs are missing" if self.interrupted else "",
            **self._words(),
        )

    def _words(self) -> dict[str, Any]:
        """How costs and the reference are written, by the kind of problem."""
        problem = next(iter(self.results.values()))[0].provenance.get("problem", {})
        if problem.get("kind") != "Execution":
            return {}
        by_time = problem.get("objective") != "peak_memory"
        return {
            "show": format_seconds if by_time else format_bytes,
            "reference_name": "reference",
        }

    def __str__(self) -> str:
        return self.table().to_markdown()

    __repr__ = __str__

    def to_json(self) -> dict[str, Any]:
        """Plain data for `json.dumps`: the rows to read, the results to load."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "budget": self.budget,
            "bound": self.bound,
            "bound_status": self.bound_status,
            "interrupted": self.interrupted,
            "rows": [dataclasses.asdict(row) for row in self.rows],
            "results": {
                name: [result.to_json() for result in results]
                for name, results in self.results.items()
            },
        }

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes JSON; the file appears whole or not at all."""
        write_whole(path, json.dumps(self.to_json(), indent=1, allow_nan=False) + "\n")

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Comparison:
        """Reads what `save` wrote.

        Raises:
            FormatError: if the file is missing, damaged or something else.
        """
        data = read_json(path, FORMAT, VERSION)
        try:
            results = {
                str(name): [
                    Result.from_json(entry, f"{path}: {name}, result {index}")
                    for index, entry in enumerate(group)
                ]
                for name, group in data["results"].items()
            }
            if not results or not all(results.values()):
                raise FormatError(f"{path}: damaged comparison: it holds no results")
            if data["bound_status"] not in (*BOUND_STATUSES, None):
                raise FormatError(f"{path}: bound_status {data['bound_status']!r} is unknown")
            return Comparison(
                results=results,
                budget=int(data["budget"]),
                bound=None if data["bound"] is None else float(data["bound"]),
                bound_status=data["bound_status"],
                interrupted=bool(data["interrupted"]),
            )
        except FormatError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise FormatError(f"{path}: damaged comparison: {error!r}") from error


class ComparisonFolder:
    """Where finished runs are kept: a JSON file for each searcher and seed."""

    def __init__(self, directory: str | os.PathLike[str] | None):
        self.path = None if directory is None else Path(directory)

    def _file(self, name: str, seed: int) -> Path | None:
        if self.path is None:
            return None
        return self.path / re.sub(r"[^\w.+-]", "_", name) / f"seed_{seed}.json"

    def save(self, name: str, result: Result) -> None:
        """Keeps a finished run."""
        path = self._file(name, result.seed)
        if path is not None:
            result.save(path)

    def load(self, name: str, seed: int, expected: Mapping[str, Any]) -> Result | None:
        """A run that was kept, or None.

        Raises:
            CheckpointError: if it is of another problem, configuration, budget or version.
        """
        path = self._file(name, seed)
        if path is None or not path.exists():
            return None
        result = Result.load(path)
        found = {
            "budget": result.budget,
            "egx": result.provenance.get("versions", {}).get("egx"),
            **{f"config, {k}": v for k, v in result.config.items()},
            **{f"problem, {k}": v for k, v in result.provenance.get("problem", {}).items()},
        }
        lines = differences(found, json.loads(json.dumps(dict(expected))))
        if lines:
            raise CheckpointError(f"{path}: a result of another run: " + "; ".join(lines))
        return result
