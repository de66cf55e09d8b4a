"""Tables of what run.py found: markdown and JSON.

Ratio and reduction stand apart: a step of half the human's time has ratio 2.00 and reduction 50 %.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from egx.files import write_whole
from egx.report.tables import Table

Row = dict[str, Any]
Found = dict[str, list[Row]]  # by method

# What each is measured against.
HUMAN, DEFAULT, PREDECESSOR, BOUND = "human", "tensorflow", "hdp", "bound"


def read(folder: Path) -> Found:
    """All runs of a workload and task, by method, seeds in order."""
    found: Found = {}
    for path in sorted(folder.glob("*.json")):
        row = json.loads(path.read_text())
        found.setdefault(row["method"], []).append(row)
    for rows in found.values():
        rows.sort(key=lambda row: row["seed"] or 0)
    return found


def mean_cost(rows: Sequence[Row] | None) -> float:
    """Of all seeds; inf when one of them found nothing that fits, NaN without any."""
    if not rows or any(row["cost"] is None for row in rows):
        return math.nan
    return float(np.mean([row["cost"] if row["feasible"] else math.inf for row in rows]))


def reached(row: Row, cost: float) -> tuple[float, float]:
    """(evaluations, seconds) until a cost, inf if never; seconds in proportion to evaluations."""
    if row["cost"] is None or not math.isfinite(cost):
        return math.nan, math.nan
    for at, best in row.get("history", ()):
        if best <= cost:
            return float(at), row["seconds"] * at / max(row["evaluations"], 1)
    return math.inf, math.inf


def finer(rows: Sequence[Row], name: str) -> float:
    """The mean makespan under one setting of the finer model; inf where a plan does not fit."""
    if any(row["cost"] is None for row in rows):
        return math.nan
    fine = [row["fine"][name] for row in rows]
    return float(np.mean([one["makespan_s"] if one["fits"] else math.inf for one in fine]))


def statistics(found: Found, method: str) -> Row:
    """What the tables say of one method."""
    rows = found[method]
    cost = mean_cost(rows)
    hdp, bound = mean_cost(found.get(PREDECESSOR)), mean_cost(found.get(BOUND))
    out: Row = {
        "method": method,
        "seeds": len(rows),
        "step_s": cost,
        "best_s": min((r["cost"] for r in rows if r["feasible"]), default=math.nan),
        "above_bound": cost / bound - 1.0 if bound > 0 else math.nan,
        "seconds": float(np.mean([row.get("seconds", math.nan) for row in rows])),
        "evaluations": rows[0].get("evaluations"),
        "status": rows[0].get("status", ""),
    }
    for name in (HUMAN, DEFAULT, PREDECESSOR):
        other = mean_cost(found.get(name))
        fits = math.isfinite(cost) and math.isfinite(other)
        out[f"ratio_{name}"] = other / cost if fits else math.nan
        out[f"reduction_{name}"] = 1.0 - cost / other if fits else math.nan
    to_hdp = [reached(row, hdp) for row in rows if "history" in row]
    out["evaluations_to_hdp"] = float(np.median([a for a, _ in to_hdp])) if to_hdp else math.nan
    out["seconds_to_hdp"] = float(np.median([s for _, s in to_hdp])) if to_hdp else math.nan
    if "fine" in rows[0]:
        for name in rows[0]["fine"]:
            out[f"fine_{name}_s"] = finer(rows, name)
            human = finer(found[HUMAN], name) if HUMAN in found else math.nan
            fits = math.isfinite(out[f"fine_{name}_s"]) and math.isfinite(human)
            out[f"fine_{name}_reduction_human"] = (
                1.0 - out[f"fine_{name}_s"] / human if fits else math.nan
            )
    return out


def _ms(value: float) -> str:
    if math.isnan(value):
        return ""
    return "does not fit" if math.isinf(value) else f"{value * 1e3:.2f}"


def _percent(value: float) -> str:
    return f"{100 * value:+.1f} %" if math.isfinite(value) else ""


def _plain(value: float, digits: int = 0) -> str:
    if value is None or math.isnan(value):
        return ""
    return "never" if math.isinf(value) else f"{value:,.{digits}f}"


HEADER = (
    "method", "seeds", "step, ms", "best, ms", "human / step", "less than human",
    "HDP / step", "less than HDP", "less than TensorFlow's", "above bound",
    "evaluations to HDP's best", "seconds to it", "seconds",
)  # fmt: skip


def table(stats: Sequence[Row], title: str, bound: float) -> Table:
    """A row a method, the fastest first; methods that cannot run stand at the end."""
    ordered = sorted(stats, key=lambda s: (math.isnan(s["step_s"]), s["step_s"]))
    fine = [key for key in (ordered[0] if ordered else {}) if key.endswith("_reduction_human")]
    cells = [
        (
            s["method"], str(s["seeds"]), _ms(s["step_s"]) or "cannot run", _ms(s["best_s"]),
            _plain(s[f"ratio_{HUMAN}"], 2), _percent(s[f"reduction_{HUMAN}"]),
            _plain(s[f"ratio_{PREDECESSOR}"], 2), _percent(s[f"reduction_{PREDECESSOR}"]),
            _percent(s[f"reduction_{DEFAULT}"]), _percent(s["above_bound"]),
            _plain(s["evaluations_to_hdp"]), _plain(s["seconds_to_hdp"], 1),
            _plain(s["seconds"], 1),
            *(_percent(s.get(f"fine_{k}_reduction_human", math.nan)) for k in _settings(fine)),
        )
        for s in ordered
    ]  # fmt: skip
    more = tuple(f"less than human, {k.replace('_', ' ')}" for k in _settings(fine))
    note = f"Proven: no plan takes less than {_ms(bound)} ms." if bound > 0 else ""
    return Table((*HEADER, *more), tuple(cells), title=title, note=note)


def _settings(keys: Sequence[str]) -> list[str]:
    return [
        key.removeprefix("fine_").removesuffix("_reduction_human")
        for key in keys
        if key.startswith("fine_")
    ]


def geometric_mean(values: Sequence[float]) -> float:
    """Of what is there."""
    there = [value for value in values if math.isfinite(value) and value > 0]
    return math.exp(float(np.mean(np.log(there)))) if there else math.nan


def summary(task: str, by_workload: dict[str, list[Row]]) -> Table:
    """Over workloads: geometric means of ratios, and the reductions that they are."""
    methods: dict[str, list[Row]] = {}
    for stats in by_workload.values():
        for s in stats:
            methods.setdefault(s["method"], []).append(s)
    cells = []
    every = [key for stats in methods.values() for s in stats for key in s]
    fine = [key for key in dict.fromkeys(every) if key.endswith("_reduction_human")]
    for method, stats in methods.items():
        finer_ratios = [
            geometric_mean([1.0 / (1.0 - s.get(key, math.nan)) for s in stats]) for key in fine
        ]
        ratios = [geometric_mean([s[f"ratio_{o}"] for s in stats])
                  for o in (HUMAN, PREDECESSOR, DEFAULT)]  # fmt: skip
        counted = sum(math.isfinite(s[f"ratio_{HUMAN}"]) for s in stats)
        fits = sum(math.isfinite(s["step_s"]) for s in stats)
        quicker = [
            s["evaluations"] / s["evaluations_to_hdp"]
            for s in stats
            if s["evaluations"] and math.isfinite(s["evaluations_to_hdp"])
        ]
        cells.append((ratios[0], (
            method, f"{fits} of {len(stats)}", str(counted), _plain(ratios[0], 3),
            _percent(1 - 1 / ratios[0]), _plain(ratios[1], 3), _percent(1 - 1 / ratios[1]),
            _plain(ratios[2], 3), _percent(1 - 1 / ratios[2]),
            f"{len(quicker)}", _plain(geometric_mean(quicker), 1),
            _plain(geometric_mean([s["seconds"] for s in stats]), 1),
            *(_percent(1 - 1 / ratio) for ratio in finer_ratios),
        )))  # fmt: skip
    cells.sort(key=lambda entry: -np.nan_to_num(entry[0], nan=0.0))
    header = (
        "method", "fits", "beside human", "human / step", "less", "HDP / step", "less",
        "TensorFlow / step", "less", "reaches HDP's best on", "budget / evaluations to it",
        "seconds",
        *(f"less than human, {name.replace('_', ' ')}" for name in _settings(fine)),
    )  # fmt: skip
    title = f"{task}: geometric means over {len(by_workload)} workloads"
    note = (
        "Means of a method are over the workloads on which it ran and fits, and compare with those "
        "of another only where both ran on the same: see the tables below."
    )
    return Table(header, tuple(row for _, row in cells), title=title, note=note)


def write_tables(runs: Path, out: Path, order: Sequence[str]) -> None:
    """`tables.md` and `results.json` of all that is there."""
    tasks: dict[str, dict[str, list[Row]]] = {}
    bounds: dict[tuple[str, str], float] = {}
    for folder in sorted(path for path in runs.glob("*/*") if path.is_dir()):
        found = read(folder)
        if not found:
            continue
        title = next(iter(found.values()))[0]["workload"]
        stats = [statistics(found, method) for method in found if method != BOUND]
        tasks.setdefault(folder.name, {})[title] = stats
        bounds[folder.name, title] = mean_cost(found.get(BOUND))
    parts, data = [], {}
    for task, by_workload in tasks.items():
        titles = sorted(by_workload, key=lambda t: order.index(t) if t in order else len(order))
        ordered = {title: by_workload[title] for title in titles}
        parts.append(summary(task, ordered).to_markdown())
        for title, stats in ordered.items():
            parts.append(table(stats, f"{title}: {task}", bounds[task, title]).to_markdown())
        data[task] = {
            title: {"bound_s": bounds[task, title], "methods": stats}
            for title, stats in ordered.items()
        }
    if parts:
        out.mkdir(parents=True, exist_ok=True)
        write_whole(out / "tables.md", "\n".join(parts))
        plain = json.loads(json.dumps(data), parse_constant=lambda _: None)
        write_whole(out / "results.json", json.dumps(plain, indent=1) + "\n")
