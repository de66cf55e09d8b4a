"""What each part of GO's network brings.

    python experiments/go/ablation.py                                  # ablation.toml
    python experiments/go/ablation.py --seeds 1 --variants "one pass"
    python experiments/go/ablation.py --config experiments/go/ablation_full.toml   # for a GPU
    python experiments/go/ablation.py --tables                         # only what runs/ holds

Each variant is trained on the graphs of all families for the same steps, and so on the same
evaluations. What its likeliest plans cost beside the best heuristic's, geometric mean: on the
graphs that chose its checkpoint, and on graphs that nothing saw, of the same families and of
families that none of them is of. A training is a file under `runs/`; what is there is not made
again, and the whole network's is that of transfer.py where no family brings graphs to train on.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from learning import Row, cost, decide, geometric_mean, learned, models, problem, training
from settings import read_config

import egx
from egx.files import write_whole
from egx.report.tables import Table

HERE = Path(__file__).parent
PARTS = ("known families", "other families")
NAMED = {"TensorFlow's default": "tensorflow", "human": "expert_fused"}


def gathered(config: Mapping[str, Any], part: str) -> list[Mapping[str, Any]]:
    return [one for family in config["families"] for one in family.get(part, [])]


def unseen(config: Mapping[str, Any], *, known: bool) -> dict[str, egx.Execution]:
    """Graphs that no training has: of families that it has others of, or has none of."""
    taken = {*models(gathered(config, "train")), *models(gathered(config, "validation"))}
    entries = [
        one
        for family in config["families"]
        if bool(family.get("train")) == known
        for one in family["unseen"]
    ]
    return {
        title: problem(model, config)
        for title, model in models(entries).items()
        if title not in taken
    }


class Tests:
    """Graphs to try a policy on, and the best heuristic of each."""

    def __init__(self, config: Mapping[str, Any]):
        self.graphs = {
            "known families": unseen(config, known=True),
            "other families": unseen(config, known=False),
        }
        known = {
            title: {name: cost(one, plan) for name, plan in one.heuristics().items()}
            for graphs in self.graphs.values()
            for title, one in graphs.items()
        }
        self.best = {title: min(costs.values()) for title, costs in known.items()}
        # What frameworks and people do, on the same graphs.
        self.named = {
            name: {
                part: {title: known[title][plan] / self.best[title] for title in graphs}
                for part, graphs in self.graphs.items()
            }
            for name, plan in NAMED.items()
        }

    def ratios(self, policy: Any) -> dict[str, dict[str, float]]:
        found = {
            part: {
                title: cost(one, decide(policy, one)) / self.best[title]
                for title, one in graphs.items()
            }
            for part, graphs in self.graphs.items()
        }
        jax.clear_caches()
        return found


def _named(folder: Path) -> Path:
    """Where ratios of the named plans are kept."""
    return folder.parent / f"{folder.name}_named.json"


def tables(config: Mapping[str, Any], folder: Path, out: Path) -> None:
    rows: dict[str, list[Row]] = {}
    for path in sorted(folder.glob("*.json")):
        row = json.loads(path.read_text())
        rows.setdefault(row["variant"], []).append(row)
    ordered = {name: rows[name] for name in config["variants"] if name in rows}
    if not ordered:
        return

    def shown(values: list[float | None]) -> str:
        # None was not measured; NaN is the mean over no graphs.
        numbers = [value for value in values if value is not None and not math.isnan(value)]
        if not numbers:
            return ""
        if not all(map(math.isfinite, numbers)):
            return "does not fit"
        middle = f"{np.mean(numbers):.3f}"
        return f"{middle} ± {np.ptp(numbers) / 2:.3f}" if len(numbers) > 1 else middle

    cells = tuple(
        (
            name, str(len(some)),
            shown([row["imitation_loss"] for row in some]),
            shown([row["validation"] for row in some]),
            *(
                shown([geometric_mean(list(row["zero_shot"][part].values())) for row in some])
                for part in PARTS
            ),
            shown([row["drawn_over_reference"] for row in some]),
            f"{np.mean([row['cpu_seconds'] for row in some]):.0f}",
        )
        for name, some in ordered.items()
    )  # fmt: skip
    named = _named(folder)
    plans = json.loads(named.read_text()) if named.exists() else {}
    cells += tuple(
        (name, "", "", "",
         *(shown([geometric_mean(list(ratios[part].values()))]) for part in PARTS), "", "")
        for name, ratios in plans.items()
    )  # fmt: skip
    header = (
        "variant", "seeds", "loss of imitation", "at once, chose the checkpoint",
        "at once, unseen graphs", "at once, unseen families", "best drawn over the reference",
        "CPU seconds",
    )  # fmt: skip
    note = (
        f"{config['steps']} steps, {config['options']['imitation_steps']} of them imitation. "
        "At once: the likeliest plan's time over the best heuristic's, geometric mean. Loss: "
        "nats an op over the three tasks, last ten steps. Drawn: the best of a batch in the last "
        "ten steps over one device without fusion. Mean over seeds ± half of what lies between "
        "the least and the most."
    )
    table = Table(header, cells, title="Parts of GO's network", note=note)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_whole(out.with_suffix(".md"), table.to_markdown())
    plain = json.dumps(ordered, indent=1).replace("Infinity", "null")
    write_whole(out.with_suffix(".json"), plain + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", type=Path, default=HERE / "ablation.toml")
    parser.add_argument("--variants", nargs="+", help="only these, in this order")
    parser.add_argument("--seeds", type=int, help="no more than so many now; the rest later")
    parser.add_argument("--tables", action="store_true", help="run nothing")
    args = parser.parse_args()
    config = read_config(args.config)
    # Trainings are those of transfer.py: one folder for both.
    runs = HERE / "runs" / args.config.stem.replace("ablation", "transfer")
    folder = HERE / "runs" / args.config.stem
    folder.mkdir(parents=True, exist_ok=True)
    out = HERE / "results" / args.config.stem
    tests: Tests | None = None
    for seed in () if args.tables else config["seeds"][: args.seeds]:
        for name in args.variants or config["variants"]:
            path = folder / f"{name.replace(' ', '_')}_{seed}.json"
            if path.exists():
                continue
            options = {**config["options"], **config["variants"][name]}
            what = training(
                gathered(config, "train"), gathered(config, "validation"), options, config,
                seed=seed,
            )  # fmt: skip
            policy, about = learned(what, config, runs)
            if tests is None:
                tests = Tests(config)
                write_whole(_named(folder), json.dumps(tests.named, indent=1) + "\n")
            row = {"variant": name, **about, "zero_shot": tests.ratios(policy)}
            write_whole(path, json.dumps(row, indent=1) + "\n")
            print(f"{name}, seed {seed}: {row['validation']:.4f}, {row['zero_shot']}", flush=True)
            tables(config, folder, out)
    tables(config, folder, out)


if __name__ == "__main__":
    main()
