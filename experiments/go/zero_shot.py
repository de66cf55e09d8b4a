"""The policy of `go` that comes with egx on GO's workloads: its likeliest plan at once.

    python experiments/go/zero_shot.py
    python experiments/go/zero_shot.py --workloads trxl_8 --policy runs/train/policy.npz

The graphs are those of run.toml. Transformer-XL with four layers on four devices is one of those
it was trained on (train.toml); Inception and AmoebaNet are families that training had none of.
Beside the plan stand those that need no search.
Rows are kept in `results/zero_shot.json`; what is there is not made again for the same policy.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import time
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
from run import workloads
from settings import TASKS, Workload, evaluate, make_problem, read_config

import egx
from egx.files import write_whole
from egx.graph.graph import real_sizes
from egx.policies.loading import PRETRAINED
from egx.report.tables import Table
from egx.simulate.fine import FineOptions, check_plan

HERE = Path(__file__).parent
OUT = HERE / "results" / "zero_shot"
HUMAN, DEFAULT = "expert_fused", "tensorflow"


@eqx.filter_jit
def decide(policy: Any, problem: egx.Execution) -> Any:
    return policy.decide(problem)


def row(policy: Any, workload: Workload, fine: dict[str, Any]) -> dict[str, Any]:
    problem = make_problem(workload, TASKS["joint"])
    jax.block_until_ready(decide(policy, problem))
    began = time.perf_counter()
    plan = jax.block_until_ready(decide(policy, problem))
    seconds = time.perf_counter() - began
    outcome = evaluate(problem, plan)
    costs, shared = {}, {}
    for name, known in problem.heuristics().items():
        one = evaluate(problem, dict(known))
        costs[name] = float(one.cost) if bool(one.feasible) else math.inf
        if name in (HUMAN, DEFAULT):
            shared[name] = check_plan(problem, dict(known), options=FineOptions(**fine)).makespan_s
    found = float(outcome.cost) if bool(outcome.feasible) else math.inf
    return {
        "workload": workload.title,
        "machine": workload.machine,
        "ops": real_sizes(problem.graph)[0],
        "cost": found,
        "seconds": seconds,
        "known": costs,
        "fine": check_plan(problem, plan, options=FineOptions(**fine)).makespan_s,
        "known_fine": shared,
        "bound": problem.lower_bound(),
    }


def less(value: float, other: float) -> str:
    if not math.isfinite(other):
        return "that does not fit"
    return f"{100 * (1 - value / other):+.1f} %" if math.isfinite(value) else "does not fit"


def ms(value: float) -> str:
    return f"{1e3 * value:.1f}" if math.isfinite(value) else "does not fit"


def table(rows: list[dict[str, Any]]) -> Table:
    header = (
        "workload", "machine", "ops", "go at once, ms", "TensorFlow's default, ms", "human, ms",
        "best without search, ms", "less than the default", "less than human", "less than the best",
        "less than human, finer model", "bound, ms", "seconds",
    )  # fmt: skip
    cells = []
    for r in rows:
        name = min(r["known"], key=lambda n: r["known"][n])
        best = r["known"][name]
        cells.append((
            r["workload"], r["machine"], f"{r['ops']:,}", ms(r["cost"]), ms(r["known"][DEFAULT]),
            ms(r["known"][HUMAN]), f"{ms(best)} ({name})", less(r["cost"], r["known"][DEFAULT]),
            less(r["cost"], r["known"][HUMAN]), less(r["cost"], best),
            less(r["fine"], r["known_fine"][HUMAN]), ms(r["bound"]), f"{r['seconds']:.1f}",
        ))  # fmt: skip
    note = "human: layers to devices in turn, fused. Seconds: the network alone, after compilation."
    return Table(header, tuple(cells), title="joint, zero-shot", note=note)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", type=Path, default=HERE / "run.toml")
    parser.add_argument("--workloads", nargs="+", help="only these, in this order")
    parser.add_argument("--policy", type=Path, default=PRETRAINED / "go.npz")
    args = parser.parse_args()
    config = read_config(args.config)
    known = {workload.name: workload for workload in workloads(config)}
    policy = egx.load_policy(args.policy)
    digest = hashlib.sha256(args.policy.read_bytes()).hexdigest()[:16]
    path = OUT.with_suffix(".json")
    kept = json.loads(path.read_text()) if path.exists() else {}
    rows = kept["rows"] if kept.get("policy") == digest else {}
    for name in args.workloads or known:
        if known[name].title not in rows:
            made = row(policy, known[name], config["fine"]["port"])
            rows[made["workload"]] = made
            write_whole(path, json.dumps({"policy": digest, "rows": rows}, indent=1) + "\n")
            print(f"{made['workload']}: {ms(made['cost'])} ms", flush=True)
            jax.clear_caches()
    ordered = [rows[w.title] for w in known.values() if w.title in rows]
    write_whole(OUT.with_suffix(".md"), table(ordered).to_markdown() + "\n")


if __name__ == "__main__":
    main()
