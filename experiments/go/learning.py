"""Policies of `go` as files: what transfer.py and ablation.py share.

A training is known by what it is trained on and how, so that none is made twice. One that was
stopped goes on from its checkpoint.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
from settings import TASKS, evaluate

import egx
from egx.files import write_whole
from egx.graph.graph import Model
from egx.policies.go_net import GoPolicy
from egx.training.go_trainer import train_go
from egx.training.progress import Progress

Row = dict[str, Any]


def models(entries: Sequence[Mapping[str, Any]]) -> dict[str, Model]:
    """Graphs of the zoo by title: every combination of each entry's options."""
    made = {}
    for entry in entries:
        swept = entry.get("options", {})
        for values in itertools.product(*swept.values()):
            options = dict(zip(swept, values, strict=True))
            title = " ".join([entry["model"], *(f"{k}={v}" for k, v in options.items())])
            made[title] = egx.load(entry["model"], **options)
    return made


def problem(model: Model, config: Mapping[str, Any]) -> egx.Execution:
    machine = egx.hardware.load(config["machine"])
    return egx.Execution(model, machine, decide=TASKS[config["task"]], order="runtime")


def training(
    train: Sequence[Mapping[str, Any]],
    validation: Sequence[Mapping[str, Any]],
    options: Mapping[str, Any],
    config: Mapping[str, Any],
    *,
    seed: int,
) -> Mapping[str, Any]:
    """All that decides what a training gives."""
    return {
        "machine": config["machine"], "task": config["task"], "steps": config["steps"],
        "options": dict(options), "train": list(train), "validation": list(validation),
        "seed": seed,
    }  # fmt: skip


def digest(what: Mapping[str, Any]) -> str:
    """The name of a training."""
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:12]


def learned(what: Mapping[str, Any], config: Mapping[str, Any], runs: Path) -> tuple[GoPolicy, Row]:
    """The best policy by validation of a training, and what to say of it."""
    out = runs / "trained" / digest(what)
    if not (out / "training.json").exists():
        _learn(what, config, out)
    policy = egx.load_policy(out / "policy.npz")
    assert isinstance(policy, GoPolicy)
    return policy, json.loads((out / "training.json").read_text())


def _learn(what: Mapping[str, Any], config: Mapping[str, Any], out: Path) -> None:
    parts = [
        [problem(model, config) for model in models(what[part]).values()]
        for part in ("train", "validation")
    ]
    out.mkdir(parents=True, exist_ok=True)
    write_whole(out / "what.json", json.dumps(what, indent=1) + "\n")
    began, cpu = time.perf_counter(), time.process_time()

    def tell(progress: Progress) -> None:
        if progress.evaluations % 25 == 0:
            print(
                f"training {out.name}: step {progress.evaluations} of {progress.budget}, "
                f"{time.perf_counter() - began:.0f} s, best {progress.best_cost:.4f}",
                flush=True,
            )

    trained = train_go(
        parts[0],
        steps=what["steps"],
        seed=what["seed"],
        validation=parts[1],
        options=what["options"],
        progress=tell,
        checkpoint_dir=out / "checkpoint",
        resume=True,
    )
    if trained.interrupted:
        raise SystemExit("stopped; call again to go on")
    trained.policy.save(out / "policy.npz")
    scores = [[row["step"], row["score"]] for row in trained.history if "score" in row]
    last = [row["best_over_reference"] for row in trained.history[-10:] if "clipped" in row]
    imitation = [row["imitation"] for row in trained.history if "imitation" in row][-10:]
    row = {
        "seed": what["seed"],
        "steps": what["steps"],
        "graphs": [len(part) for part in parts],
        "validation": trained.score,
        "scores": scores,
        "imitation_loss": sum(imitation) / len(imitation) if imitation else None,
        "drawn_over_reference": sum(last) / len(last) if last else None,
        # Of this call alone: a training that was stopped took longer.
        "seconds": time.perf_counter() - began,
        "cpu_seconds": time.process_time() - cpu,
    }
    write_whole(out / "training.json", json.dumps(row, indent=1) + "\n")
    jax.clear_caches()


@eqx.filter_jit
def decide(policy: GoPolicy, problem: egx.Execution) -> Any:
    """The likeliest plan."""
    return policy.decide(problem)


def cost(problem: egx.Execution, plan: Mapping[str, Any]) -> float:
    """Seconds of a plan; inf where it does not fit."""
    outcome = evaluate(problem, dict(plan))
    return float(outcome.cost) if bool(outcome.feasible) else math.inf


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values)) if values else math.nan
