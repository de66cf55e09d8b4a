"""Trains the policies of `regal` that come with egx, and says how good they are.

    python experiments/regal/train.py makespan
    python experiments/regal/train.py peak_memory --kind gas
    python experiments/regal/train.py makespan --config train_4.toml --out runs/makespan
    python experiments/regal/train.py makespan --test             # what is shipped, measured

Goes on from its checkpoint when it is called again. Writes after each validation: `policy.npz`,
the best policy so far, and `history.json`, a row a step. A policy that egx is to come with goes to
`egx/policies/pretrained/KIND_OBJECTIVE_DEVICES.npz`: `regal` and `gas` find it there by its name.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from run import passing

import egx
from egx.files import write_whole
from egx.graph.corpus import topology_digest
from egx.graph.graph import real_sizes
from egx.graph.padding import pad_graph
from egx.hardware.machines import regal_hardware
from egx.policies.loading import PRETRAINED
from egx.search.brkga import BRKGA
from egx.search.regal import Regal
from egx.training.progress import Progress
from egx.training.regal_trainer import train_proposals
from egx.training.synthetic import synthetic_models

HERE = Path(__file__).parent


def problems(config: dict[str, Any], objective: str, part: str) -> list[egx.Execution]:
    """Problems on synthetic graphs that fit the padded sizes."""
    sizes = tuple(config["padded_to"])
    hardware = regal_hardware(config["devices"], transfers=config["transfers"])

    def fits(model: egx.Model) -> bool:
        return all(have <= room for have, room in zip(real_sizes(model.graph), sizes, strict=True))

    def graphs(part: str, keep: Callable[[egx.Model], bool]) -> Iterator[egx.Model]:
        models = synthetic_models(seed=config[f"{part}_seed"], keep=keep)
        return itertools.islice(models, config[f"{part}_graphs"])

    seen: set[str] = set()
    if part == "test":
        used = itertools.chain(graphs("train", fits), graphs("validation", fits))
        seen = {topology_digest(model) for model in used}
    models = graphs(part, lambda model: fits(model) and topology_digest(model) not in seen)
    return [
        egx.Execution(pad_graph(model.graph, sizes), hardware, objective=objective)
        for model in models
    ]


def test(name: str, config: dict[str, Any], objective: str) -> None:
    """Prints what the shipped policy of that name costs beside plain BRKGA, on graphs that neither
    trained nor chose it."""
    policy = egx.load_policy(PRETRAINED / f"{name}.npz")
    budgets, seeds = config["test_budgets"], range(config["test_runs"])
    searches = (Regal(policy=policy), BRKGA())
    ratios = []
    for problem in problems(config, objective, "test"):
        costs = [
            np.mean([[one.cost for one in passing(search, problem, budgets, seed)]
                     for seed in seeds], axis=0)
            for search in searches
        ]  # fmt: skip
        ratios.append(costs[0] / costs[1])
    found = np.array(ratios)
    for budget, ratio in zip(budgets, found.T, strict=True):
        error = ratio.std(ddof=1) / len(ratio) ** 0.5
        print(f"{name}, {budget:,} evaluations: {ratio.mean():.3f} +- {error:.3f} of plain BRKGA, "
              f"{(ratio < 1).sum()} of {len(ratio)} graphs better")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("objective", choices=["makespan", "peak_memory"])
    parser.add_argument("--kind", default="regal", choices=["regal", "gas"])
    parser.add_argument("--config", default="train.toml", help="a file here, or a path")
    parser.add_argument(
        "--out", help="a folder (default: runs/KIND_OBJECTIVE_DEVICES beside this script)"
    )
    parser.add_argument("--from", dest="start", help="a policy to start from")
    parser.add_argument(
        "--test", action="store_true", help="measure what is shipped, train nothing"
    )
    args = parser.parse_args()
    config = tomllib.loads((HERE / args.config).read_text())
    name = f"{args.kind}_{args.objective}_{config['devices']}"
    if args.test:
        test(name, config, args.objective)
        return
    out = Path(args.out or HERE / "runs" / name)
    options = config["options"] | config[args.objective] | config.get(args.kind, {})
    steps = options.pop("steps")
    began = time.perf_counter()

    def tell(progress: Progress) -> None:
        if progress.evaluations % 20 == 0:
            print(
                f"step {progress.evaluations} of {steps}, {time.perf_counter() - began:.0f} s, "
                f"best validation cost {progress.best_cost:.4f} of plain BRKGA",
                flush=True,
            )

    train, validation = (problems(config, args.objective, x) for x in ("train", "validation"))
    every = options["validation.every"]
    for until in range(every, steps + every, every):
        trained = train_proposals(
            train,
            args.kind,
            steps=min(until, steps),
            validation=validation,
            options=options,
            policy=egx.load_policy(args.start) if args.start else None,
            progress=tell,
            checkpoint_dir=out / "checkpoint",
            resume=True,
        )
        trained.policy.save(out / "policy.npz")
        write_whole(out / "history.json", json.dumps(trained.history, indent=0) + "\n")
        if trained.interrupted:
            break
    scores = [(int(row["step"]), row["score"]) for row in trained.history if "score" in row]
    for step, score in scores:
        print(f"step {step}: {score:.4f}")
    print(f"best {trained.score:.4f}, {trained.policy.config()}")


if __name__ == "__main__":
    main()
