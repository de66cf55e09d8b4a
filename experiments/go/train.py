"""Trains a policy on many graphs; one of `go` says how good it is without fine-tuning.

    python experiments/go/train.py                     # train.toml: the policy that comes with egx
    python experiments/go/train.py --config my.toml --out runs/mine
    python experiments/go/train.py --config experiments/go/train_regal_2.toml   # REGAL's

Goes on from its checkpoint when it is called again. Writes after each validation: `policy.npz`,
the best policy so far, and `history.json`, a row a step. At the end it prints what the policy
finds at once for each held-out graph, beside the best plan that needs no search.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from pathlib import Path
from typing import Any

import jax
from settings import TASKS, evaluate, read_config

import egx
from egx.files import write_whole
from egx.training.go_trainer import train_go
from egx.training.progress import Progress
from egx.training.regal_trainer import train_proposals

HERE = Path(__file__).parent
TRAINERS = {"go": train_go, "regal": train_proposals}
YARDSTICKS = {"go": "the best plan without search", "regal": "plain BRKGA"}


def problems(config: dict[str, Any], part: str) -> dict[str, egx.Execution]:
    """The joint problem on every graph of a part of the configuration, by title."""
    machine = egx.hardware.load(config["machine"])
    made = {}
    for entry in config[part]:
        swept = entry.get("options", {})
        for values in itertools.product(*swept.values()):
            options = dict(zip(swept, values, strict=True))
            title = " ".join([entry["model"], *(f"{k}={v}" for k, v in options.items())])
            model = egx.load(entry["model"], **options)
            made[title] = egx.Execution(
                model, machine, decide=TASKS[config["task"]], order="runtime"
            )
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", type=Path, default=HERE / "train.toml")
    parser.add_argument("--out", type=Path, help="a folder (default: runs/CONFIG)")
    args = parser.parse_args()
    config = read_config(args.config)
    algorithm = config.get("algorithm", "go")
    out = args.out or HERE / "runs" / args.config.stem
    train, validation = problems(config, "train"), problems(config, "validation")
    print(f"{len(train)} graphs to train on, {len(validation)} held out", flush=True)
    steps, every = config["steps"], config["options"]["validation.every"]
    began = time.perf_counter()

    def tell(progress: Progress) -> None:
        if progress.evaluations % 10 == 0:
            print(
                f"step {progress.evaluations} of {steps}, {time.perf_counter() - began:.0f} s, "
                f"best validation {progress.best_cost:.4f} of {YARDSTICKS[algorithm]}",
                flush=True,
            )

    for until in range(every, steps + every, every):
        trained = TRAINERS[algorithm](
            list(train.values()),
            steps=min(until, steps),
            validation=list(validation.values()),
            options=config["options"],
            progress=tell,
            checkpoint_dir=out / "checkpoint",
            resume=True,
        )
        policy = trained.policy
        policy.save(out / "policy.npz")
        write_whole(out / "history.json", json.dumps(trained.history, indent=0) + "\n")
        if trained.interrupted:
            break
    print(f"best {trained.score:.4f}, {trained.policy.config()}")
    for title, problem in validation.items() if algorithm == "go" else ():
        plans = {name: dict(plan) for name, plan in problem.heuristics().items()}
        costs = {name: evaluate(problem, plan) for name, plan in plans.items()}
        fits = {name: float(o.cost) for name, o in costs.items() if bool(o.feasible)}
        best = min(fits, key=lambda name: fits[name])
        found = egx.optimize(
            problem, "go", budget=1, policy=trained.policy, options={"finetune": False}
        )
        print(
            f"{title}: zero-shot {found.cost * 1e3:.2f} ms, best without search ({best}) "
            f"{fits[best] * 1e3:.2f} ms"
        )
        jax.clear_caches()


if __name__ == "__main__":
    main()
