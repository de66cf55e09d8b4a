"""What one network knows of graphs of a family that it never saw.

    python experiments/go/transfer.py                           # transfer.toml, all families
    python experiments/go/transfer.py --seeds 1 --families wavenet
    python experiments/go/transfer.py --config experiments/go/transfer_full.toml   # for a GPU
    python experiments/go/transfer.py --tables                  # only what runs/ holds

For each family a policy is trained on the other families (imitation of their best heuristic plans,
then PPO, as the policy that comes with egx). Then, on graphs of the family itself:

- **zero-shot**: the policy's likeliest plan;
- **fine-tuned**: `go` from that policy, `finetune_steps` steps of PPO;
- **scratch**: `go` from a fresh network of the same size, after as many evaluations and after
  `longer` times as many (one run, read off twice);
- **brkga_seeded**: at the evaluations that fine-tuning used;

beside the plans that need no search. A training and a run are files under `runs/`; what is there is
not made again. Tables go to `results/CONFIG`.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from learning import (
    Row,
    cost,
    decide,
    digest,
    geometric_mean,
    learned,
    models,
    problem,
    training,
)
from settings import read_config

import egx
from egx.files import write_whole
from egx.graph.graph import real_sizes
from egx.graph.padding import bucket_sizes
from egx.policies.go_net import GoPolicy, tasks_of
from egx.problems.padded import pad_problem
from egx.report.tables import Table
from egx.search.go import Go
from egx.training.result import Result

HERE = Path(__file__).parent
DEFAULT, HUMAN, READERS = "tensorflow", "expert_fused", "heft_readers"
FOUND = ("zero-shot", "fine-tuned", "scratch", "scratch, longer", "brkga_seeded")
LEARNED = ("zero-shot", "fine-tuned")


class Family:
    """One family left out: its policy and what was found for its graphs."""

    def __init__(self, entry: Mapping[str, Any], config: dict[str, Any], runs: Path):
        self.entry, self.config, self.runs = entry, config, runs
        self.folder = runs / entry["name"]
        self.folder.mkdir(parents=True, exist_ok=True)

    def others(self, part: str) -> list[Mapping[str, Any]]:
        """What all other families bring to a part of the training."""
        return [
            one
            for family in self.config["families"]
            if family["name"] != self.entry["name"]
            for one in family.get(part, [])
        ]

    def training(self, seed: int) -> Mapping[str, Any]:
        return training(
            self.others("train"), self.others("validation"), self.config["options"], self.config,
            seed=seed,
        )  # fmt: skip

    def run(self, seeds: Sequence[int], *, scratch: bool) -> None:
        unseen = models(self.entry["unseen"])
        kinds = [kind for kind in FOUND if scratch or not kind.startswith("scratch")]
        if self.finished(list(unseen), kinds, seeds):
            return
        policies = {seed: learned(self.training(seed), self.config, self.runs) for seed in seeds}
        for seed, (_, about) in policies.items():
            self.save("training", seed, {"family": self.entry["name"], **about})
        # All of one size: what runs one of them runs them all.
        problems = {title: problem(model, self.config) for title, model in unseen.items()}
        sizes = bucket_sizes(*(one.graph for one in problems.values()))
        for title, one in problems.items():
            self.plans(title, one)
            padded = pad_problem(one, sizes)
            for seed in seeds:
                policy = policies[seed][0]
                self.zero_shot(title, one, policy, seed)
                self.tuned(title, padded, policy, seed)
                self.seeded(title, padded, seed)
        for title, one in problems.items() if scratch else ():
            for seed in seeds:
                self.scratch(title, pad_problem(one, sizes), seed)
        jax.clear_caches()

    def finished(self, titles: Sequence[str], kinds: Sequence[str], seeds: Sequence[int]) -> bool:
        wanted = [(kind, seed) for kind in kinds for seed in seeds] + [("plans", None)]
        return all(self.is_there(title, *one) for title in titles for one in wanted)

    def is_there(self, title: str, kind: str, seed: int | None) -> bool:
        """Whether a row exists and, where it is of a trained policy, of that of this training."""
        path = self.path(title, kind, seed)
        if not path.exists() or kind not in LEARNED or seed is None:
            return path.exists()
        return json.loads(path.read_text()).get("training") == digest(self.training(seed))

    def path(self, title: str, kind: str, seed: int | None) -> Path:
        words = "".join(c if c.isalnum() else "_" for c in f"{title} {kind}")
        return self.folder / f"{words}{'' if seed is None else f'_{seed}'}.json"

    def save(self, kind: str, seed: int | None, row: Row, title: str = "") -> None:
        name = self.path(title, kind, seed)
        row = {"family": self.entry["name"], "graph": title, "kind": kind, "seed": seed, **row}
        if kind in LEARNED and seed is not None:
            row["training"] = digest(self.training(seed))
        write_whole(name, json.dumps(row, indent=1) + "\n")
        shown = f"{1e3 * row['cost']:.3f} ms" if "cost" in row else ""
        print(f"{self.entry['name']}, {title}: {kind} {seed or 0} {shown}", flush=True)

    def plans(self, title: str, one: egx.Execution) -> None:
        if self.path(title, "plans", None).exists():
            return
        known = {name: cost(one, plan) for name, plan in one.heuristics().items()}
        ops = real_sizes(one.graph)[0]
        bound = one.lower_bound()
        self.save("plans", None, {"ops": ops, "known": known, "bound": bound}, title)

    def zero_shot(self, title: str, one: egx.Execution, policy: GoPolicy, seed: int) -> None:
        if not self.is_there(title, "zero-shot", seed):
            found = cost(one, decide(policy, one))
            self.save("zero-shot", seed, {"cost": found, "evaluations": 1}, title)

    @property
    def evaluations(self) -> int:
        """That fine-tuning takes."""
        return self.config["finetune_steps"] * self.config["finetune"].get("batch", Go().batch)

    def tuned(self, title: str, one: egx.Execution, policy: GoPolicy, seed: int) -> None:
        if not self.is_there(title, "fine-tuned", seed):
            result = self.go(one, policy, seed, self.evaluations)
            self.save("fine-tuned", seed, _row(result, self.evaluations), title)

    def scratch(self, title: str, one: egx.Execution, seed: int) -> None:
        if self.path(title, "scratch, longer", seed).exists():
            return
        network = {
            name.removeprefix("network."): value
            for name, value in self.config["options"].items()
            if name.startswith("network.")
        }
        # As `go` makes it, but given: so it shares the program of fine-tuning.
        fresh = GoPolicy(tasks_of(one), **network, key=jax.random.key(seed + 1000))
        result = self.go(one, fresh, seed, self.evaluations * self.config["longer"])
        self.save("scratch", seed, _row(result, self.evaluations), title)
        self.save("scratch, longer", seed, _row(result, result.evaluations), title)

    def go(self, one: egx.Execution, policy: GoPolicy, seed: int, budget: int) -> Result:
        return egx.optimize(
            one, "go", budget=budget, seed=seed, policy=policy,
            options={**self.config["finetune"], "finetune": True},
        )  # fmt: skip

    def seeded(self, title: str, one: egx.Execution, seed: int) -> None:
        if not self.path(title, "brkga_seeded", seed).exists():
            result = egx.optimize(one, "brkga_seeded", budget=self.evaluations, seed=seed)
            self.save("brkga_seeded", seed, _row(result, self.evaluations), title)


def _row(result: Result, evaluations: int) -> Row:
    """The best after so many evaluations of a run."""
    history = result.history
    there = np.flatnonzero(history.evaluations <= evaluations)[-1]
    best = float(history.best_cost[there]) if history.best_feasible[there] else math.inf
    return {
        "cost": best,
        "evaluations": int(history.evaluations[there]),
        "seconds": result.seconds * evaluations / max(result.evaluations, 1),
        "compile_seconds": result.compile_seconds,
    }


def read(folder: Path) -> dict[str, dict[str, list[Row]]]:
    """Rows by graph and kind."""
    found: dict[str, dict[str, list[Row]]] = {}
    for path in sorted(folder.glob("*.json")):
        row = json.loads(path.read_text())
        if row["graph"]:
            found.setdefault(row["graph"], {}).setdefault(row["kind"], []).append(row)
    return found


def _ms(rows: Sequence[Row] | None) -> str:
    """The mean over seeds, and how far they spread."""
    costs = [row["cost"] for row in rows or ()]
    if not costs:
        return ""
    if not all(map(math.isfinite, costs)):
        return "does not fit"
    middle = f"{1e3 * sum(costs) / len(costs):.1f}"
    spread = 1e3 * (max(costs) - min(costs)) / 2
    return f"{middle} ± {spread:.1f}" if len(costs) > 1 else middle


def tables(config: Mapping[str, Any], runs: Path, out: Path) -> None:
    """`tables.md` and `results.json` of all that is there."""
    cells: list[tuple[str, ...]] = []
    ratios: dict[str, dict[str, list[float]]] = {}
    data: dict[str, Any] = {}
    for family in config["families"]:
        found = read(runs / family["name"])
        for title, kinds in found.items():
            if "plans" not in kinds:
                continue
            plans = kinds["plans"][0]
            known = plans["known"]
            best = min(known, key=lambda name: known[name])
            cells.append((
                family["name"], title, f"{plans['ops']:,}",
                *(f"{1e3 * plans['known'][name]:.1f}" for name in (DEFAULT, HUMAN)),
                f"{1e3 * known[best]:.1f} ({best})", f"{1e3 * plans['known'][READERS]:.1f}",
                *(_ms(kinds.get(kind)) for kind in FOUND), f"{1e3 * plans['bound']:.1f}",
            ))  # fmt: skip
            kept = ratios.setdefault(family["name"], {})
            for name in (DEFAULT, HUMAN, READERS):
                kept.setdefault(name, []).append(plans["known"][name] / known[best])
            for kind in FOUND:
                mean = [row["cost"] for row in kinds.get(kind, ())]
                if mean:
                    kept.setdefault(kind, []).append(sum(mean) / len(mean) / known[best])
            data.setdefault(family["name"], {})[title] = {
                "ops": plans["ops"], "known_s": plans["known"], "bound_s": plans["bound"],
                **{kind: kinds[kind] for kind in FOUND if kind in kinds},
            }  # fmt: skip
    if not cells:
        return
    columns = (DEFAULT, HUMAN, READERS, *FOUND)
    means = [
        (name, *(_ratio(kept.get(column), len(kept[DEFAULT])) for column in columns))
        for name, kept in ratios.items()
    ]
    evaluations = config["finetune_steps"] * config["finetune"].get("batch", Go().batch)
    note = (
        f"fine-tuned: {config['finetune_steps']} steps, {evaluations} evaluations, as scratch and "
        f"brkga_seeded; longer: {config['longer']} times as many. Beside the best plan that needs "
        "no search."
    )
    spread = "Mean over seeds ± half of what lies between the least and the most."
    parts = [
        Table(
            ("family left out", *columns), tuple(means), note=note,
            title="Step time over the best heuristic's, geometric mean over the family's graphs",
        ).to_markdown(),
        Table(
            ("family left out", "graph", "ops", DEFAULT, "human", "best heuristic", READERS,
             *FOUND, "bound"),
            tuple(cells), title="Milliseconds a step", note=spread, left=(0, 1),
        ).to_markdown(),
    ]  # fmt: skip
    out.mkdir(parents=True, exist_ok=True)
    write_whole(out / "tables.md", "\n".join(parts))
    trainings = {
        f"{family['name']} {path.stem.split('_')[-1]}": json.loads(path.read_text())
        for family in config["families"]
        for path in sorted((runs / family["name"]).glob("*training_*.json"))
    }
    plain = json.dumps({"graphs": data, "trainings": trainings}, indent=1)
    write_whole(out / "results.json", plain.replace("Infinity", "null") + "\n")


def _ratio(values: Sequence[float] | None, graphs: int) -> str:
    """The mean over all graphs; nothing before each of them has been tried."""
    if not values or len(values) < graphs:
        return ""
    return f"{geometric_mean(values):.3f}" if all(map(math.isfinite, values)) else "does not fit"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", type=Path, default=HERE / "transfer.toml")
    parser.add_argument("--families", nargs="+", help="only these, in this order")
    parser.add_argument("--seeds", type=int, help="no more than so many now; the rest later")
    parser.add_argument("--no-scratch", action="store_true", help="leave these runs for later")
    parser.add_argument("--tables", action="store_true", help="run nothing")
    args = parser.parse_args()
    config = read_config(args.config)
    known = {family["name"]: family for family in config["families"]}
    runs, out = HERE / "runs" / args.config.stem, HERE / "results" / args.config.stem
    for name in () if args.tables else args.families or known:
        began = time.perf_counter()
        family = Family(known[name], config, runs)
        family.run(config["seeds"][: args.seeds], scratch=not args.no_scratch)
        tables(config, runs, out)
        print(f"{name}: {time.perf_counter() - began:.0f} s", flush=True)
    tables(config, runs, out)


if __name__ == "__main__":
    main()
