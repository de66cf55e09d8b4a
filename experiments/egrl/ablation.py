"""A searcher with each of its parts switched off in turn, beside the proven bound.

    python experiments/egrl/ablation.py                              # EGRL
    python experiments/egrl/ablation.py --config ablation_plus.toml  # EGRL+

Finished runs are kept under `runs/`; the table is written to `results/` after each variant. A
variant that is a searcher of run.py's grid takes the grid's runs of the same seeds.
"""

from __future__ import annotations

import argparse
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import numpy as np

import egx
from egx.training.result import Result

HERE = Path(__file__).parent


def variant_runs(
    problem: egx.MemoryPlacement,
    config: dict[str, Any],
    options: dict[str, Any],
    folder: Path,
    grid: Path | None,
) -> list[Result]:
    """The results of one variant, from disk where they are there, of the grid or its own."""
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"seed_{seed}.json" for seed in range(config["seeds"])]
    files = [grid / n if grid and (grid / n).exists() else folder / n for n in names]
    missing = [seed for seed, file in enumerate(files) if not file.exists()]
    if missing:
        results = egx.optimize_seeds(
            problem, config["algorithm"], seeds=missing, budget=config["budget"], options=options
        )
        for result in results:
            result.save(files[result.seed])
    return [Result.load(file) for file in files]


def markdown(table: dict[str, dict[str, Any]], workloads: list[str], config: dict[str, Any]) -> str:
    """Speed-up over native (mean and standard deviation over seeds) and gap to the bound."""
    head = "| variant | " + " | ".join(f"{w}: speed-up | gap to bound" for w in workloads) + " |"
    lines = [head, "|---|" + "---:|" * (2 * len(workloads))]
    for name, row in table.items():
        cells = []
        for workload in workloads:
            if workload not in row:
                cells.append("- | -")
                continue
            x = row[workload]
            cells.append(f"{x['speedup']:.3f} ± {x['spread']:.3f} | {100 * x['gap']:.2f} %")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    lines.append("")
    lines.append(
        f"{config['algorithm']}, {config['seeds']} seeds, {config['budget']} evaluations, "
        "roofline. An infeasible result counts as speed-up 0 and has no gap."
    )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default="ablation.toml", help="a file beside this script")
    parser.add_argument("--workloads", nargs="+", help="only these; the table is theirs alone")
    args = parser.parse_args()
    config = tomllib.loads((HERE / args.config).read_text())
    config["workloads"] = args.workloads or config["workloads"]
    name = Path(args.config).stem
    hardware = egx.hardware.load(config["hardware"])
    table: dict[str, dict[str, Any]] = {variant: {} for variant in config["variants"]}
    for workload in config["workloads"]:
        problem = egx.MemoryPlacement(egx.load(workload), hardware)
        bound = egx.exact(problem, time_limit_s=60).bound
        for variant, options in config["variants"].items():
            folder = HERE / "runs" / name / workload / re.sub(r"\W+", "_", variant)
            searcher = config["grid"].get(variant)
            grid = HERE / "runs" / f"{workload}_prefetch0" / searcher if searcher else None
            results = variant_runs(problem, config, options, folder, grid)
            speedups = np.array([r.speedup for r in results])
            gaps = [r.cost / bound - 1 for r in results if r.feasible]
            table[variant][workload] = {
                "speedup": float(speedups.mean()),
                "spread": float(speedups.std(ddof=1)) if len(speedups) > 1 else 0.0,
                "gap": float(np.mean(gaps)) if gaps else float("nan"),
                "speedups": speedups.tolist(),
            }
            text = markdown(table, config["workloads"], config)
            (HERE / "results").mkdir(exist_ok=True)
            (HERE / "results" / f"{name}.md").write_text(text)
            (HERE / "results" / f"{name}.json").write_text(json.dumps(table, indent=1) + "\n")
            print(f"{workload:10s} {variant:32s} {speedups.mean():.3f}", flush=True)


if __name__ == "__main__":
    main()
