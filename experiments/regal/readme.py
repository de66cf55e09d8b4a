"""The part of the README that says what was found, written from the same numbers as results/."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from settings import Setting

from egx.files import write_whole
from egx.report.tables import Table

FIRST, LAST = "<!-- results -->", "<!-- end of results -->"
AIMS = {"makespan": 7.1, "peak_memory": 3.6}
# The searchers of the main comparison, if a setting has them.
MAIN = ("brkga", "brkga_seeded", "regal", "regal_plus")

Stats = Mapping[tuple[str, int], Mapping[str, Any]]


def words(setting: Setting) -> str:
    """A setting for people."""
    capped = ", capped" if setting.capped else ""
    objective = setting.objective.replace("_", " ")
    return (
        f"{setting.corpus}, {setting.devices} devices, {setting.transfers} transfers, "
        f"{objective}{capped}"
    )


def _signed(value: float | None) -> str:
    return "" if value is None or np.isnan(value) else f"{100 * value:+.2f}"


def _pair(stats: Mapping[str, Any], name: str) -> str:
    mean, error = stats.get(name, np.nan), stats.get(f"{name}_error", np.nan)
    if np.isnan(mean):
        return ""
    return f"{100 * mean:+.2f}" + ("" if np.isnan(error) else f" ± {100 * error:.2f}")


def _share(stats: Mapping[str, Any] | None, name: str) -> str:
    value = np.nan if stats is None else stats.get(name, np.nan)
    return "" if np.isnan(value) else f"{100 * value:.0f} %"


def main_table(found: Mapping[str, tuple[Setting, Stats]], budget: int) -> Table:
    """A row a setting, at one budget, on the graphs that all methods of the row have."""
    rows = []
    for setting, stats in found.values():
        heuristic = next(s for (name, _), s in stats.items() if name == "best heuristic")
        seeded = stats.get(("brkga_seeded", budget))
        plain, learned = stats.get(("brkga", budget)), stats.get(("regal", budget))
        plus = stats.get(("regal_plus", budget))
        if plain is None or seeded is None:
            continue
        rows.append((
            words(setting), str(plain["graphs"]), _signed(heuristic["gain"]),
            _signed(plain["gain"]), _signed(seeded["gain"]),
            "" if learned is None else _pair(learned, "gain"),
            "" if learned is None else _pair(learned, "gain_on_plain"),
            "" if learned is None else _pair(learned, "gain_on_seeded"),
            "" if learned is None else _signed(learned["gain_on_heuristic"]),
            "" if plus is None else _pair(plus, "gain"),
            "" if plus is None else _pair(plus, "gain_on_seeded"),
            _share(plus, "equal_or_better_than_seeded"),
            _share(plus, "equal_or_better_than_heuristic"),
            _signed(plain["best_known_gain"]), _signed(plain["bound_gain"]),
        ))  # fmt: skip
    header = (
        "setting", "graphs", "best heuristic", "brkga", "brkga seeded", "regal",
        "regal on brkga", "regal on seeded", "regal on best heuristic", "regal plus",
        "regal plus on seeded", "regal plus no worse than seeded",
        "regal plus no worse than best heuristic", "best known", "proven bound",
    )  # fmt: skip
    return Table(
        header,
        tuple(rows),
        title=f"{budget:,} evaluations: lower than plain BRKGA with 5,000, % "
        '("on": lower than that one)',
    )


def _lower(value: float) -> str:
    """A share by which something is lower, or higher, in words."""
    # Adding zero makes one zero of two.
    return f"{100 * abs(value) + 0.0:.2f} % {'lower' if value >= 0 else 'higher'}"


def _graphs(count: int) -> str:
    return f"{count} graph" if count == 1 else f"{count} graphs"


def verdict(setting: Setting, stats: Stats, budget: int) -> str:
    """Who is ahead at a budget, and of what it is sure."""
    at = {name: s for (name, b), s in stats.items() if b == budget}
    searched = {name: s for name, s in at.items() if not np.isnan(s["gain"])}
    best = next(s for (name, _), s in stats.items() if name == "best heuristic")
    # What fits more often is ahead, whatever it costs where it fits.
    ranked = sorted([*searched.values(), best], key=lambda s: (-s["fits"], -s["gain"]))
    order = ", ".join(
        f"{s['method'].replace('_', ' ')} {_signed(s['gain'])} %"
        + ("" if s["fits"] == 1 else f" (fits on {100 * s['fits']:.0f} %)")
        for s in ranked[:4]
    )
    text = f"- {words(setting)} ({_graphs(ranked[0]['graphs'])}): in the mean first {order}."
    plus, learned = searched.get("regal_plus"), searched.get("regal")
    text += _against(plus, "`regal_plus`", "seeded", "seeded BRKGA")
    text += _paper(setting, learned)
    text += _against(learned, "`regal`", "seeded", "seeded BRKGA")
    heft = stats.get(("heft", 1))
    if heft is not None and not np.isnan(heft["gain"]):
        where = "" if heft["fits"] == 1 else f", where it fits ({100 * heft['fits']:.0f} %)"
        text += f" HEFT alone is {_lower(heft['gain'])} than plain BRKGA{where}."
        text += _against(learned, "`regal`", "heft", "HEFT")
        text += _against(plus, "`regal_plus`", "heft", "HEFT")
    others = [s for s in ranked[:4] if not np.isnan(s["second_gain"])]
    if others:
        text += " The same plans under the second cost model: " + _gains(others, "second_gain")
    others = [s for s in ranked[:4] if not np.isnan(s.get("along_time_gain", np.nan))]
    if others:
        text += " Their peaks counted along time: " + _gains(others, "along_time_gain")
    return text


def _gains(stats: Sequence[Mapping[str, Any]], name: str) -> str:
    return ", ".join(f"{s['method'].replace('_', ' ')} {_signed(s[name])} %" for s in stats) + "."


def _paper(setting: Setting, learned: Mapping[str, Any] | None) -> str:
    """The paper's own comparison."""
    if learned is None:
        return ""
    aim = AIMS[setting.objective]
    reached = "reached" if 100 * learned["gain"] >= aim else "missed"
    text = (
        f" `regal` is {_lower(learned['gain'])} than plain BRKGA (the paper's aim of {aim} % is "
        f"{reached}) and better or equal on {100 * learned['equal_or_better']:.0f} % of graphs"
    )
    if not np.isnan(learned["head_room"]):
        text += f"; {100 * learned['head_room']:.0f} % of the head-room"
    text += (
        f". The best plans known are {_lower(learned['best_known_gain'])}, and no plan is more "
        f"than {100 * learned['bound_gain']:.2f} % lower"
    )
    if 100 * learned["bound_gain"] < aim:
        text += ": the aim is out of reach on these graphs"
    return text + "."


def _against(stats: Mapping[str, Any] | None, name: str, key: str, other: str) -> str:
    """A sentence on a method beside another; nothing where one of them has not run."""
    gain = np.nan if stats is None else stats.get(f"gain_on_{key}", np.nan)
    if stats is None or np.isnan(gain):
        return ""
    pair, error = _pair(stats, f"gain_on_{key}"), stats[f"gain_on_{key}_error"]
    if np.isnan(error):
        return f" {name} is {_lower(gain)} than {other}, on one graph."
    if not abs(gain) > 2 * error:
        return f" {name} is level with {other} ({pair} %)."
    return f" {name} {'beats' if gain > 0 else 'loses to'} {other} ({pair} %)."


def missing(
    settings: Sequence[Setting], graphs: Mapping[str, Mapping[str, int]], methods: Sequence[str]
) -> str:
    """What run.toml asks for and nobody ran; `graphs` counts those of each method."""
    lines = []
    for setting in settings:
        have = graphs.get(setting.name)
        if not have:
            lines.append(f"- {words(setting)}: nothing.")
            continue
        lacks = [m for m in methods if 2 * have.get(m, 0) < have.get("brkga", 0)]
        note = f"; on none or few of them {', '.join(lacks)}" if lacks else ""
        lines.append(
            f"- {words(setting)}: {have.get('brkga', 0)} of at most {setting.graphs} graphs, "
            f"{have.get('cp_sat', 0)} of {setting.exact} by CP-SAT{note}."
        )
    return "\n".join(lines)


def write_results(
    path: Path,
    found: Mapping[str, tuple[Setting, Stats]],
    graphs: Mapping[str, Mapping[str, int]],
    settings: Sequence[Setting],
    budgets: Sequence[int],
    methods: Sequence[str],
) -> None:
    """Puts tables, verdicts and what is missing between the marks."""
    parts = ["## Who wins at 5,000 evaluations", ""]
    parts += [verdict(setting, stats, 5000) for setting, stats in found.values()]
    parts += ["", "## Main tables", ""]
    parts += [main_table(found, budget).to_markdown() for budget in budgets]
    parts += ["## What is not measured yet", "", missing(settings, graphs, methods), ""]
    text = path.read_text()
    before, rest = text.split(FIRST)
    after = rest.split(LAST)[1]
    write_whole(path, f"{before}{FIRST}\n\n" + "\n".join(parts) + f"\n{LAST}{after}")
