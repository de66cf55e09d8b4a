"""Training graphs of 80,000 ops on eight P100: how long the policy takes, and what its plan costs.

    taskset -c 0,1 python experiments/go/large.py               # every case, each in its process
    taskset -c 0,1 python experiments/go/large.py --case rnnlm  # one, printed as JSON

A case builds the graph, compiles the network (as it comes with egx) and asks it for its likeliest
plan; peaks of memory are of the process, from its start to where the plan is there and to the end
of all. Then the plans that need no search, each valued by the simulator; and `go_plus` with few
evaluations, which starts from all known plans and the network's, in a process of its own.
Rows are kept in `results/large.json`, as far as they have come; a whole one is not made again.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
from learning import cost, decide
from settings import TASKS

import egx
from egx.baselines.expert import human, human_blocks, tensorflow
from egx.baselines.list_scheduling import heft, heft_fused, heft_readers
from egx.files import write_whole
from egx.graph.graph import real_sizes
from egx.policies.loading import PRETRAINED, load_policy
from egx.report.tables import Table

HERE = Path(__file__).parent
OUT = HERE / "results" / "large"
MACHINE = "p100x8"
# Of the search: a batch must hold all known plans and the network's.
BUDGET, BATCH, GUIDED = 240, 12, 2

# The others are deep and narrow or short: at their default sizes they would fill more than these
# eight devices.
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "rnnlm": ("RNNLM-8, 303 steps", "rnnlm", {"layers": 8, "steps": 303}),
    "transformer_xl": (
        "TrXL-909, narrow",
        "transformer_xl",
        {
            "layers": 909, "hidden": 256, "heads": 4, "intermediate": 1024, "sequence": 128,
            "memory": 128, "batch": 4,
        },
    ),
    "wavenet": (
        "WaveNet 50x40, short",
        "wavenet",
        {"stacks": 50, "layers": 40, "samples": 512},
    ),
}  # fmt: skip

PLANS: dict[str, Callable[[egx.Execution], Any]] = {
    "tensorflow": tensorflow,
    "human": human,
    "human_blocks": human_blocks,
    "heft": heft,
    "heft_fused": heft_fused,
    "heft_readers": heft_readers,
}


def peak_mib() -> int:
    """The most resident memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


class Watch:
    """Wall-clock and CPU seconds since the last look."""

    def __init__(self) -> None:
        self.wall, self.cpu = time.perf_counter(), time.process_time()

    def __call__(self) -> dict[str, float]:
        before = self.wall, self.cpu
        self.wall, self.cpu = time.perf_counter(), time.process_time()
        return {"s": round(self.wall - before[0], 2), "cpu_s": round(self.cpu - before[1], 2)}


def built(case: str) -> egx.Execution:
    _, model, options = CASES[case]
    graph = egx.load(model, **options)
    return egx.Execution(graph, egx.hardware.load(MACHINE), decide=TASKS["joint"], order="runtime")


def at_once(case: str) -> Iterator[dict[str, Any]]:
    """The network's plan, then the known ones: the row so far after each."""
    title, model, options = CASES[case]
    watch = Watch()
    graph = egx.load(model, **options)
    seconds = {"graph": watch()}
    problem = egx.Execution(
        graph, egx.hardware.load(MACHINE), decide=TASKS["joint"], order="runtime"
    )
    seconds["problem"] = watch()
    policy = load_policy(PRETRAINED / "go.npz")
    asked: Any = decide
    compiled = asked.lower(policy, problem).compile()
    seconds["compile"] = watch()
    plan = jax.block_until_ready(compiled(policy, problem))
    seconds["network"] = watch()
    ops, tensors, uses = real_sizes(problem.graph)
    costs: dict[str, float] = {}
    row: dict[str, Any] = {
        "title": title, "ops": ops, "tensors": tensors, "uses": uses, "machine": MACHINE,
        "costs_s": costs, "seconds": seconds, "peak_mib_at_plan": peak_mib(),
    }  # fmt: skip
    yield row
    watch()
    costs["go at once"] = cost(problem, plan)
    seconds["first evaluation"] = watch()
    cost(problem, plan)
    seconds["evaluation"] = watch()
    yield {**row, "peak_mib": peak_mib()}
    for name, make in PLANS.items():
        watch()
        made = make(problem)
        seconds[name] = watch()
        costs[name] = cost(problem, made)
        yield {**row, "peak_mib": peak_mib()}
    yield {**row, "peak_mib": peak_mib(), "bound_s": problem.lower_bound()}


def searched(case: str) -> Iterator[dict[str, Any]]:
    """What few evaluations of `go_plus` make of it."""
    problem = built(case)
    policy = load_policy(PRETRAINED / "go.npz")
    # Networks that evolve beside it, eight of them, would take longer than all else together.
    options = {"search.batch": BATCH, "guided": GUIDED, "evolved": 0}
    found = egx.optimize(problem, "go_plus", budget=BUDGET, policy=policy, options=options)
    history = found.history
    best = [float(c) if ok else math.inf
            for c, ok in zip(history.best_cost, history.best_feasible, strict=True)]  # fmt: skip
    yield {
        "cost": found.cost if found.feasible else math.inf,
        "evaluations": found.evaluations,
        "seconds": found.seconds,
        "compile_seconds": found.compile_seconds,
        "first_batch_s": best[0],
        "history": [[int(at), one] for at, one in zip(history.evaluations, best, strict=True)],
        "peak_mib": peak_mib(),
    }


TIMES = ("graph", "problem", "compile", "network", "evaluation", "heft_fused", "heft_readers")


def _ms(value: float | None) -> str:
    if value is None or not math.isfinite(value):
        return "does not fit"
    return f"{1e3 * value:,.1f}"


def tables(rows: dict[str, dict[str, Any]]) -> str:
    times, costs = [], []
    for row in rows.values():
        took, known, search = row["seconds"], row["costs_s"], row.get("search")
        peaks = (row["peak_mib_at_plan"], row.get("peak_mib"))
        times.append((
            row["title"], f"{row['ops']:,}", f"{row['uses']:,}", str(row["cores"]),
            *(f"{took[name]['s']:.1f} ({took[name]['cpu_s']:.1f})" if name in took else ""
              for name in TIMES),
            *(f"{peak / 1024:.2f}" if peak else "" for peak in peaks),
        ))  # fmt: skip
        costs.append((
            row["title"],
            *(_ms(known[name]) if name in known else "" for name in ("go at once", *PLANS)),
            *((_ms(search["cost"]), f"{search['seconds']:,.0f}") if search else ("", "")),
            _ms(row["bound_s"]) if "bound_s" in row else "",
        ))  # fmt: skip
    first = Table(
        ("graph", "ops", "uses", "cores", *TIMES, "peak at the plan, GiB", "peak, GiB"),
        tuple(times), title=f"80,000 ops on {MACHINE}: seconds (of CPU) and memory",
        note="network: from the problem to the plan, compiled. evaluation: of one plan, compiled.",
    )  # fmt: skip
    second = Table(
        ("graph", "go at once", *PLANS, f"go_plus, {BUDGET} evaluations", "seconds of it", "bound"),
        tuple(costs), title="Milliseconds a step",
    )  # fmt: skip
    return first.to_markdown() + "\n" + second.to_markdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", choices=tuple(CASES), help="run one here and print it as JSON")
    parser.add_argument("--search", action="store_true", help="its search instead")
    parser.add_argument("--cases", nargs="+", choices=tuple(CASES), default=list(CASES))
    parser.add_argument("--no-search", action="store_true", help="leave the searches for later")
    args = parser.parse_args()
    if args.case is not None:
        for row in (searched if args.search else at_once)(args.case):
            print(json.dumps(row), flush=True)
        return
    path = OUT.with_suffix(".json")
    rows = json.loads(path.read_text())["rows"] if path.exists() else {}

    def run(*more: str) -> Iterator[dict[str, Any]]:
        command = [sys.executable, __file__, *more]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                # Cores as this process has them, which the other inherits.
                yield {**json.loads(line), "cores": len(os.sched_getaffinity(0))}
        if process.returncode:
            raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")

    def write() -> None:
        about = {"processor": platform.processor() or platform.machine(), "jax": jax.__version__}
        text = json.dumps({"about": about, "rows": rows}, indent=1).replace("Infinity", "null")
        ordered = {name: rows[name] for name in CASES if name in rows}
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text + "\n")
        write_whole(OUT.with_suffix(".md"), tables(ordered))

    for case in args.cases:
        # Its last part.
        if "bound_s" not in rows.get(case, {}):
            for row in run("--case", case):
                rows[case] = row
                print(f"{case}: {list(row['seconds'])[-1]} done", flush=True)
                write()
        if not args.no_search and "search" not in rows[case]:
            for row in run("--case", case, "--search"):
                rows[case]["search"] = row
                write()


if __name__ == "__main__":
    main()
