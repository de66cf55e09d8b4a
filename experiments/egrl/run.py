"""Every searcher on every workload under one budget, beside the proven bound.

    python experiments/egrl/run.py                          # the grid that two CPU cores can do
    python experiments/egrl/run.py --config full.toml       # the whole grid, for an accelerator
    python experiments/egrl/run.py --workloads bert --algorithms egrl

Each finished run is kept under `runs/`; a run that was stopped goes on from there. Tables and
curves are written to `results/` after each cell. Runs with a learner leave their best network
behind, for zero_shot.py.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
import tomllib
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import numpy as np

import egx
from egx.comparison import Comparison
from egx.policies.files import save_policy
from egx.report.curves import convergence
from egx.search.registry import find_search
from egx.training.loop import run_one
from egx.training.result import Result

HERE = Path(__file__).parent
TRAINS_A_POLICY = ("egrl", "pg")


@dataclasses.dataclass(frozen=True)
class Cell:
    """One searcher on one workload at one prefetch depth."""

    workload: str
    prefetch: int
    algorithm: str
    seeds: int

    @property
    def folder(self) -> str:
        return f"{self.workload}_prefetch{self.prefetch}"


def cells(config: dict[str, Any]) -> list[Cell]:
    """The grid, the cheap searchers of every workload before the dear ones."""
    grid = []
    for algorithm in config["algorithms"]:
        for workload in config["workloads"]:
            for prefetch in config["prefetch"]:
                seeds = config["seeds"]
                for rule in config.get("fewer", []):
                    if rule["workload"] == workload and algorithm in rule["algorithms"]:
                        seeds = rule["seeds"] if prefetch in rule["prefetch"] else 0
                if seeds:
                    grid.append(Cell(workload, prefetch, algorithm, seeds))
    dear = {"ea": 1, "pg": 2, "egrl": 3}
    return sorted(grid, key=lambda c: (dear.get(c.algorithm, 0), c.prefetch))


def solved(problem: egx.MemoryPlacement, folder: Path, seconds: float) -> dict[str, Any]:
    """The exact solver's answer, computed once."""
    path = folder / "exact.json"
    if not path.exists():
        solution = egx.exact(problem, time_limit_s=seconds)
        answer = {
            "cost_s": solution.cost,
            "bound_s": solution.bound,
            "status": solution.status,
            "seconds": solution.seconds,
        }
        path.write_text(json.dumps(answer, indent=1) + "\n")
    return json.loads(path.read_text())


def run_cell(
    problem: egx.MemoryPlacement, cell: Cell, runs: Path, budget: int, together: bool
) -> None:
    """Runs what is missing of one cell."""
    folder = runs / cell.folder / cell.algorithm.replace(":", "_")
    folder.mkdir(parents=True, exist_ok=True)
    missing = [s for s in range(cell.seeds) if not (folder / f"seed_{s}.json").exists()]
    if not missing:
        return
    began = time.perf_counter()
    if cell.algorithm in TRAINS_A_POLICY:
        for seed in missing:
            search, name = find_search(cell.algorithm, None, budget=budget)
            result, state = run_one(search, problem, budget=budget, seed=seed, name=name)
            check_finite(state.inner.learner, cell, seed)
            save_policy(search.best_policy(state), folder / f"policy_{seed}")
            result.save(folder / f"seed_{seed}.json")
    else:
        groups = [missing] if together else [[seed] for seed in missing]
        for group in groups:
            results = egx.optimize_seeds(problem, cell.algorithm, seeds=group, budget=budget)
            for result in results:
                result.save(folder / f"seed_{result.seed}.json")
    seconds = time.perf_counter() - began
    print(
        f"{cell.folder:24s} {cell.algorithm:20s} {len(missing)} seeds in {seconds:.0f} s",
        flush=True,
    )


def check_finite(learner: Any, cell: Cell, seed: int) -> None:
    """A learner that broke would leave a run of evolution alone, under the wrong name."""
    leaves = jax.tree.leaves(eqx.filter(learner, eqx.is_inexact_array))
    if not all(np.isfinite(leaf).all() for leaf in leaves):
        raise FloatingPointError(f"{cell}, seed {seed}: the learner's weights are not finite")


def collect(
    problem: egx.MemoryPlacement, folder: Path, algorithms: list[str], budget: int
) -> Comparison | None:
    """All finished runs of one workload as a comparison."""
    results: dict[str, list[Result]] = {}
    for algorithm in algorithms:
        files = sorted((folder / algorithm.replace(":", "_")).glob("seed_*.json"))
        if files:
            results[algorithm] = [Result.load(path) for path in files]
    if not results:
        return None
    comparison = Comparison(results, budget)
    if (folder / "exact.json").exists():
        answer = json.loads((folder / "exact.json").read_text())
        comparison = comparison.with_bound(answer["bound_s"], answer["status"])
    return comparison


def write(
    problem: egx.MemoryPlacement, comparison: Comparison, runs: Path, out: Path, name: str
) -> None:
    """The rows, thinned curves, a table and a picture of one workload."""
    exact = json.loads((runs / name / "exact.json").read_text())
    first_fit = problem.evaluate(problem.first_fit())
    data = {
        "reference_s": comparison.reference_cost,
        "first_fit_s": float(first_fit.cost),
        "exact": exact,
        "budget": comparison.budget,
        "rows": [dataclasses.asdict(row) for row in comparison.rows],
        "costs_s": {k: [r.cost for r in v] for k, v in comparison.results.items()},
        "curves_s": {
            name: {
                "evaluations": evaluations[:: max(len(evaluations) // 50, 1)].tolist(),
                "seeds": [
                    [None if np.isnan(x) else float(x) for x in c[:: max(len(c) // 50, 1)]]
                    for _, c in runs_
                ],
            }
            for name, runs_ in comparison.curves().items()
            for evaluations in [runs_[0][0]]
        },
    }
    out.mkdir(exist_ok=True)
    (out / f"{name}.json").write_text(json.dumps(data, indent=None) + "\n")
    (out / f"{name}.md").write_text(comparison.table().to_markdown() + "\n")
    references = {"native": comparison.reference_cost, "first fit": float(first_fit.cost)}
    references["optimum" if exact["status"] == "proved" else "bound"] = exact["bound_s"]
    title = name.replace("_prefetch", ", prefetch ")
    figure = convergence(comparison.curves(), references, title=title)
    figure.savefig(out / f"{name}.png", dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default="cpu.toml", help="a file beside this script")
    parser.add_argument("--workloads", nargs="+", help="only these")
    parser.add_argument("--algorithms", nargs="+", help="only these")
    parser.add_argument("--prefetch", nargs="+", type=int, help="only these")
    parser.add_argument("--seeds", type=int, help="no more than so many now; the rest later")
    parser.add_argument("--tables", action="store_true", help="run nothing, write what there is")
    args = parser.parse_args()
    config = tomllib.loads((HERE / args.config).read_text())
    runs, out = HERE / "runs", HERE / "results"
    hardware = egx.hardware.load(config["hardware"])
    problems: dict[str, egx.MemoryPlacement] = {}

    def problem_of(cell: Cell) -> egx.MemoryPlacement:
        if cell.folder not in problems:
            model = egx.load(cell.workload)
            problems[cell.folder] = egx.MemoryPlacement(model, hardware, prefetch=cell.prefetch)
            (runs / cell.folder).mkdir(parents=True, exist_ok=True)
            solved(problems[cell.folder], runs / cell.folder, config["bound_seconds"])
        return problems[cell.folder]

    for cell in cells(config):
        if args.workloads and cell.workload not in args.workloads:
            continue
        if args.algorithms and cell.algorithm not in args.algorithms:
            continue
        if args.prefetch is not None and cell.prefetch not in args.prefetch:
            continue
        if args.seeds is not None:
            cell = dataclasses.replace(cell, seeds=min(cell.seeds, args.seeds))
        problem = problem_of(cell)
        if not args.tables:
            run_cell(problem, cell, runs, config["budget"], config["seeds_together"])
        folder = runs / cell.folder
        comparison = collect(problem, folder, config["algorithms"], config["budget"])
        if comparison is not None:
            write(problem, comparison, runs, out, cell.folder)


if __name__ == "__main__":
    main()
