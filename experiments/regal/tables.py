"""Tables and pictures of what run.py found.

Shapes: G graphs of a setting.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from readme import MAIN, words, write_results
from settings import Setting

from egx.files import write_whole
from egx.report.style import heading, look, new_figure
from egx.report.tables import Table

BASE = ("brkga", 5000)
SEEDED = "brkga_seeded"
BEST_HEURISTIC = "best heuristic"
FILTER_GAIN = 0.2

Costs = dict[tuple[str, int], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Found:
    """All rows of a setting as arrays [G], NaN where there is none; infeasible costs are inf.

    `best` is the least feasible cost of any method, `bound` the largest proven bound. `along_time`
    has the same plans' peaks counted along time in place of the order of items; of peak memory.
    """

    graphs: tuple[str, ...]
    families: tuple[str, ...]
    ops: np.ndarray
    cost: Costs
    second: Costs
    along_time: Costs
    seconds: Costs
    cpu_seconds: Costs
    heuristics: tuple[str, ...]
    best: np.ndarray
    bound: np.ndarray
    solved: dict[str, int]

    @property
    def base(self) -> np.ndarray:
        return self.cost[BASE]


def read(path: Path) -> Found | None:
    """The rows of a file; of rows that say the same thing again the last counts."""
    lines = [line for line in path.read_text().splitlines() if line.endswith("}")]
    rows = [json.loads(line) for line in lines]
    rows = [row for row in rows if row["method"] != "left out"]
    # Graphs that have what all is compared with.
    done = {row["graph"] for row in rows if (row["method"], row["budget"]) == BASE}
    graphs = sorted(done)
    if not graphs:
        return None
    index = {name: k for k, name in enumerate(graphs)}
    families, ops = [""] * len(graphs), np.zeros(len(graphs), int)
    cost: Costs = {}
    second: Costs = {}
    along: Costs = {}
    seconds: Costs = {}
    cpu: Costs = {}
    bound = np.zeros(len(graphs))
    heuristics: dict[str, None] = {}
    solved: dict[str, int] = {}

    def put(table: Costs, key: tuple[str, int], k: int, value: float) -> None:
        table.setdefault(key, np.full(len(graphs), np.nan))[k] = value

    for row in rows:
        if row["graph"] not in index:
            continue
        k, key = index[row["graph"]], (row["method"], row["budget"])
        families[k], ops[k] = row["family"], row["ops"]
        if row["method"] == "bound":
            bound[k] = max(bound[k], row["cost"])
            continue
        if row["method"] == "cp_sat":
            solved[row["status"]] = solved.get(row["status"], 0) + 1
            bound[k] = max(bound[k], row.get("bound") or 0.0)
        if row.get("heuristic"):
            heuristics[row["method"]] = None
        if row["cost"] is None:
            continue
        put(cost, key, k, row["cost"] if row["feasible"] else np.inf)
        put(second, key, k, row["second"] if row["second_feasible"] else np.inf)
        if "peak_along_time" in row:
            put(along, key, k, row["peak_along_time"])
        # Programs that were compiled on the way are left out.
        if row.get("warm", True):
            put(seconds, key, k, row["seconds"])
            if "cpu_seconds" in row:
                put(cpu, key, k, row["cpu_seconds"])
    key = (BEST_HEURISTIC, len(heuristics))
    stacked = np.stack([cost[name, 1] for name in heuristics])
    winner = np.argmin(np.where(np.isnan(stacked), np.inf, stacked), 0)
    every = np.arange(len(graphs))
    cost[key] = stacked[winner, every]
    for table in (second, along):
        if table:
            table[key] = np.stack([table[name, 1] for name in heuristics])[winner, every]
    best = np.nanmin(np.stack(list(cost.values())), 0)
    return Found(
        tuple(graphs), tuple(families), ops, cost, second, along, seconds, cpu,
        tuple(heuristics), best, bound, solved,
    )  # fmt: skip


def lower(cost: np.ndarray, than: np.ndarray) -> np.ndarray:
    """By how much one cost is below another, as a share of the other; NaN where either misses or
    is infeasible."""
    fits = np.isfinite(cost) & np.isfinite(than) & (than > 0)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(fits, 1.0 - cost / than, np.nan)


def equal_or_better(cost: np.ndarray, than: np.ndarray) -> float:
    """Share of the graphs that have both; what does not fit is worse than what does."""
    both = ~np.isnan(cost) & ~np.isnan(than)
    return float(np.mean(cost[both] <= than[both])) if both.any() else float("nan")


def mean_and_error(values: np.ndarray) -> tuple[float, float]:
    """Mean, and its standard error."""
    values = values[np.isfinite(values)]
    if not values.size:
        return float("nan"), float("nan")
    error = float(values.std(ddof=1) / np.sqrt(values.size)) if values.size > 1 else float("nan")
    return float(values.mean()), error


def statistics(found: Found, key: tuple[str, int], kept: np.ndarray) -> dict[str, Any]:
    """What the tables say of one method at one budget, on the graphs that are kept."""
    cost, base = found.cost[key][kept], found.base[kept]
    has = ~np.isnan(cost)
    gain = lower(cost, base)
    mean, error = mean_and_error(gain)
    quartiles = np.nanpercentile(gain, [25, 50, 75]) if np.isfinite(gain).any() else [np.nan] * 3
    # Of the same graphs.
    room = lower(found.best[kept], base)[np.isfinite(gain)]
    seeded = found.cost.get((SEEDED, key[1]))
    second, second_base = found.second[key][kept], found.second[BASE][kept]
    out = {
        "method": key[0],
        "evaluations": key[1],
        "graphs": int(has.sum()),
        "fits": float(np.mean(np.isfinite(cost[has]))) if has.any() else float("nan"),
        "gain": mean,
        "gain_error": error,
        "gain_quartiles": [float(q) for q in quartiles],
        "equal_or_better": equal_or_better(cost, base),
        "head_room": float(mean / room.mean()) if room.size and room.mean() > 0 else float("nan"),
        "best_known_gain": mean_and_error(lower(found.best[kept], base))[0],
        "bound_gain": mean_and_error(lower(found.bound[kept], base))[0],
        "above_best": -mean_and_error(lower(cost, found.best[kept]))[0],
        "above_bound": -mean_and_error(lower(cost, found.bound[kept]))[0],
        "second_gain": mean_and_error(lower(second, second_base))[0],
    }
    if key in found.along_time:
        along, along_base = found.along_time[key][kept], found.along_time[BASE][kept]
        out["along_time_gain"] = mean_and_error(lower(along, along_base))[0]
    for name, table in (("seconds", found.seconds), ("cpu_seconds", found.cpu_seconds)):
        values = table.get(key, np.full(len(found.graphs), np.nan))[kept]
        out[name] = float(np.nanmedian(values)) if np.isfinite(values).any() else float("nan")
    heuristic = next(found.cost[k] for k in found.cost if k[0] == BEST_HEURISTIC)[kept]
    plain, heft = found.cost.get((BASE[0], key[1])), found.cost.get(("heft", 1))
    for name, other in (("plain", None if plain is None else plain[kept]),
                        ("seeded", None if seeded is None else seeded[kept]),
                        ("heft", None if heft is None else heft[kept]),
                        ("heuristic", heuristic)):  # fmt: skip
        if other is None:
            continue
        mean, error = mean_and_error(lower(cost, other))
        out |= {
            f"gain_on_{name}": mean,
            f"gain_on_{name}_error": error,
            f"equal_or_better_than_{name}": equal_or_better(cost, other),
        }
    return out


def _percent(value: float, digits: int = 2) -> str:
    # Adding zero makes one zero of two.
    return "" if value is None or np.isnan(value) else f"{100 * value + 0.0:.{digits}f} %"


def _gain(mean: float, error: float) -> str:
    if np.isnan(mean):
        return ""
    return f"{100 * mean:+.2f}" + ("" if np.isnan(error) else f" ± {100 * error:.2f}")


def _seconds(value: float) -> str:
    return "" if np.isnan(value) else f"{value:.2f}"


HEADER = (
    "method", "evaluations", "graphs", "fits", "lower than BRKGA 5K, %", "quartiles, %",
    "equal or better", "head-room", "above best known", "above bound",
    "lower than BRKGA, %",
    "lower than seeded BRKGA, %", "lower than best heuristic, %", "no worse than best heuristic",
    "second model, lower than BRKGA 5K", "along time, lower than BRKGA 5K", "CPU s a graph",
)  # fmt: skip


def table(found: Found, budgets: Sequence[int], kept: np.ndarray, title: str) -> Table:
    """A row a method and budget, heuristics first, then budget by budget, the best first."""
    rows = []
    for budget in (1, len(found.heuristics), *budgets):
        keys = [key for key in found.cost if key[1] == budget and key not in {("cp_sat", 0)}]
        stats = [statistics(found, key, kept) for key in keys]
        stats = [s for s in stats if s["graphs"]]
        rows += sorted(stats, key=lambda s: -np.nan_to_num(s["gain"], nan=-9.0))
    if ("cp_sat", 0) in found.cost:
        rows.append(statistics(found, ("cp_sat", 0), kept))
    cells = []
    for s in rows:
        quartiles = " / ".join(f"{100 * q:+.1f}" for q in s["gain_quartiles"] if np.isfinite(q))
        cells.append((
            s["method"].replace("_", " "), f"{s['evaluations']:,}" if s["evaluations"] else "",
            str(s["graphs"]), _percent(s["fits"], 0), _gain(s["gain"], s["gain_error"]),
            quartiles, _percent(s["equal_or_better"], 0), _percent(s["head_room"], 0),
            _percent(s["above_best"]), _percent(s["above_bound"]),
            _gain(s.get("gain_on_plain", np.nan), s.get("gain_on_plain_error", np.nan)),
            _gain(s.get("gain_on_seeded", np.nan), s.get("gain_on_seeded_error", np.nan)),
            _gain(s["gain_on_heuristic"], s["gain_on_heuristic_error"]),
            _percent(s["equal_or_better_than_heuristic"], 0), _percent(s["second_gain"]),
            _percent(s.get("along_time_gain", np.nan)), _seconds(s["cpu_seconds"]),
        ))  # fmt: skip
    solved = ", ".join(f"{status} {count}" for status, count in sorted(found.solved.items()))
    note = f"CP-SAT: {solved}." if solved else ""
    return Table(HEADER, tuple(cells), title=title, note=note)


def passes_filter(found: Found, low: int) -> np.ndarray:
    """The graphs that the paper's filter keeps: a longer search gains at least 20 %, or fits where
    a shorter one does not."""
    low_cost = found.cost[BASE[0], low]
    with np.errstate(invalid="ignore"):
        return np.isfinite(found.base) & (low_cost >= (1 + FILTER_GAIN) * found.base)


def common_graphs(found: Found, budgets: Sequence[int]) -> np.ndarray:
    """The graphs that all searchers of the main comparison have done, of those that did at least
    half of them."""
    kept = np.ones(len(found.graphs), bool)
    for name in MAIN:
        for budget in budgets:
            if (name, budget) in found.cost:
                has = ~np.isnan(found.cost[name, budget])
                kept &= has | (2 * has.sum() < len(has))
    return kept


def compared(found: Found, budgets: Sequence[int]) -> dict[tuple[str, int], dict[str, Any]]:
    """The statistics of whatever has done all graphs that are common, on these."""
    kept = common_graphs(found, budgets)
    if not kept.any():
        return {}
    return {
        key: statistics(found, key, kept)
        for key, cost in found.cost.items()
        if not np.isnan(cost[kept]).any()
    }


def picture(found: Found, setting: Setting, budget: int, path: Path) -> None:
    """The improvement over BRKGA 5K, graph by graph, of each method that has done at least half."""
    most = {
        key: cost for key, cost in found.cost.items() if 2 * (~np.isnan(cost)).sum() >= len(cost)
    }
    keys = [key for key in most if key[1] == budget or key[0] == BEST_HEURISTIC]
    gains = {key[0]: lower(found.cost[key], found.base) for key in keys}
    gains["best known"] = lower(found.best, found.base)
    gains = {k: v[np.isfinite(v)] for k, v in gains.items() if np.isfinite(v).any()}
    names = sorted(gains, key=lambda name: float(gains[name].mean()))
    with look():
        figure = new_figure(7.0, 0.6 + 0.34 * len(names))
        axes = figure.subplots()
        axes.boxplot(
            [100 * gains[name] for name in names],
            orientation="horizontal",
            showmeans=True,
            flierprops={"markersize": 2},
        )
        axes.set_yticks(range(1, len(names) + 1), [name.replace("_", " ") for name in names])
        axes.axvline(0.0, color="0.5", lw=0.8)
        axes.set_xlabel(
            f"after {budget:,} evaluations, {len(found.graphs)} graphs: lower than BRKGA, %"
        )
        heading(figure, words(setting))
        figure.savefig(path, dpi=110)


def write_tables(
    runs: Path,
    out: Path,
    settings: Sequence[Setting],
    *,
    budgets: Sequence[int],
    methods: Sequence[str],
    low: int,
) -> None:
    """Costs, tables and a picture of each setting that has rows; and the README's results, if there
    is one beside `out`."""
    out.mkdir(exist_ok=True)
    parts: list[str] = []
    summary: dict[str, Any] = {}
    main: dict[str, tuple[Setting, dict[tuple[str, int], dict[str, Any]]]] = {}
    counts: dict[str, dict[str, int]] = {}
    for setting in settings:
        path = runs / f"{setting.name}.jsonl"
        found = read(path) if path.exists() else None
        if found is None:
            continue
        every = np.ones(len(found.graphs), bool)
        title = words(setting)
        kept = {f"{title}: all {len(found.graphs)} graphs": every}
        filtered = passes_filter(found, low)
        if 0 < filtered.sum() < len(every):
            kept[f"{title}: the {filtered.sum()} graphs that the paper's filter keeps"] = filtered
        parts += [table(found, budgets, mask, name).to_markdown() for name, mask in kept.items()]
        summary[setting.name] = {
            "graphs": len(found.graphs),
            "filtered_graphs": int(filtered.sum()),
            "cp_sat": found.solved,
            "all": [statistics(found, key, every) for key in found.cost],
        }
        stats = compared(found, budgets)
        if stats:
            main[setting.name] = setting, stats
        counts[setting.name] = {
            name: int((~np.isnan(cost)).sum()) for (name, _), cost in found.cost.items()
        } | {"cp_sat": sum(found.solved.values())}
        data = {
            "graphs": found.graphs,
            "families": found.families,
            "ops": found.ops.tolist(),
            "bound": [float(f"{x:.7g}") for x in found.bound],
            "costs": {f"{m}@{b}": _plain(v) for (m, b), v in found.cost.items()},
            "second_costs": {f"{m}@{b}": _plain(v) for (m, b), v in found.second.items()},
        }
        write_whole(out / f"{setting.name}.json", json.dumps(data) + "\n")
        picture(found, setting, BASE[1], out / f"{setting.name}.png")
    if parts:
        write_whole(out / "tables.md", "\n".join(parts))
        plain = json.loads(json.dumps(summary), parse_constant=lambda _: None)
        write_whole(out / "summary.json", json.dumps(plain, indent=1) + "\n")
        readme = out.parent / "README.md"
        if readme.exists():
            write_results(readme, main, counts, settings, budgets, methods)


def _plain(values: np.ndarray) -> list[float | str | None]:
    """For JSON: null where there is no row, "infeasible" where the plan does not fit."""
    return [
        None if np.isnan(x) else "infeasible" if np.isinf(x) else float(f"{x:.7g}") for x in values
    ]
