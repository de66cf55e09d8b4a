"""HDP's settings, tried on graphs that `run.py` does not report.

    python experiments/go/tune_hdp.py        # resumable; writes results/hdp.md

Every setting of the grid has the budget and the seeds of `run.toml` on each graph. What counts is
the geometric mean, over graphs, of the mean cost over that of the human's plan. The best one goes
into `[options.hdp]` of `run.toml` by hand.
"""

from __future__ import annotations

import json
import math
import time
import tomllib
from pathlib import Path
from typing import Any

import jax
import numpy as np
from settings import TASKS, Workload, evaluate, make_problem

import egx
from egx.baselines.expert import human, tensorflow
from egx.files import write_whole
from egx.report.tables import Table

HERE = Path(__file__).parent
GRAPHS = (
    Workload("TrXL-3", "transformer_xl", "p100x2", {"layers": 3}),
    Workload("RNNLM-3, 5 steps", "rnnlm", "p100x4", {"layers": 3, "steps": 5}),
    Workload("WaveNet-1x18", "wavenet", "p100x2", {"stacks": 1, "layers": 18}),
)
# Groups and learning rate; the first is the paper's.
SETTINGS = ((256, 0.1), (64, 0.1), (64, 0.03), (64, 0.01), (16, 0.1), (16, 0.03))


def _key(graph: Workload, groups: int, rate: float, config: dict[str, Any]) -> str:
    seeds = ", ".join(map(str, config["seeds"]))
    budget = f"{config['budget']} evaluations, seeds {seeds}"
    return f"{graph.title}, {groups} groups, rate {rate}, {budget}"


def main() -> None:
    config = tomllib.loads((HERE / "run.toml").read_text())
    path = HERE / "runs" / "tune_hdp.json"
    path.parent.mkdir(exist_ok=True)
    found = json.loads(path.read_text()) if path.exists() else {}
    for workload in GRAPHS:
        problem = None
        for groups, rate in SETTINGS:
            key = _key(workload, groups, rate, config)
            if key in found:
                continue
            if problem is None:
                problem = make_problem(workload, TASKS["joint"])
            known = {"human": human, "tensorflow": tensorflow}
            costs = {name: float(evaluate(problem, plan(problem)).cost)
                     for name, plan in known.items()}  # fmt: skip
            began = time.perf_counter()
            results = egx.optimize_seeds(
                problem,
                "hdp",
                seeds=config["seeds"],
                budget=config["budget"],
                options={"groups": groups, "learning_rate": rate},
            )
            best = [one.cost if one.feasible else math.inf for one in results]
            found[key] = {"costs": best, **costs}
            write_whole(path, json.dumps(found, indent=1) + "\n")
            seconds = time.perf_counter() - began
            print(f"{key}: {found[key]}, {seconds:.0f} s", flush=True)
        jax.clear_caches()

    rows = []
    for groups, rate in SETTINGS:
        runs = [found[_key(graph, groups, rate, config)] for graph in GRAPHS]
        ratios = [np.mean(run["costs"]) / run["human"] for run in runs]
        mean = float(np.exp(np.mean(np.log(ratios))))
        cells = [f"{groups}", f"{rate}", *(f"{ratio:.3f}" for ratio in ratios), f"{mean:.3f}"]
        rows.append((mean, tuple(cells)))
    rows.sort()
    header = ("groups", "learning rate", *(graph.title for graph in GRAPHS), "geometric mean")
    defaults = [found[_key(graph, *SETTINGS[0], config)] for graph in GRAPHS]
    default = [
        "",
        "TensorFlow",
        *(f"{run['tensorflow'] / run['human']:.3f}" for run in defaults),
        "",
    ]
    table = Table(header, (*(cells for _, cells in rows), tuple(default)))
    text = (
        f"# HDP's settings\n\n`python experiments/go/tune_hdp.py`: cost over the human's plan, "
        f"mean of {len(config['seeds'])} seeds after {config['budget']:,} evaluations, all three "
        "decisions."
        f"\n\n{table.to_markdown()}"
    )
    write_whole(HERE / "results" / "hdp.md", text)
    print(text)


if __name__ == "__main__":
    main()
