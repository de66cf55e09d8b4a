"""GO's claims, measured: every method on every workload at equal evaluations.

    python experiments/go/run.py                                   # run.toml, all workloads
    python experiments/go/run.py --workloads rnnlm_2 --tasks joint # only these
    python experiments/go/run.py --seeds 1                         # one seed first, then the rest
    python experiments/go/run.py --config experiments/go/real.toml # real graphs
    python experiments/go/run.py --config experiments/go/full.toml # a GPU's configuration
    python experiments/go/run.py --tables                          # only what runs/ holds

"go_plus+metis" among the methods is `go_plus` that begins with METIS's plans beside those it knows.

A run is one JSON file under `runs/CONFIG/WORKLOAD/TASK/`; what is there is not run again, so that
the whole can be killed at any time. Delete a file to have it made anew. Each plan is valued again
by the finer cost model, under every setting of `[fine]`. Tables go to `results/CONFIG` after each
workload. Workloads whose file is not there are left out.

"Each task alone" starts from TensorFlow's default and decides one thing; "one after the other"
gives placement, fusion and order a third of the budget each, on what was found before. Both are
done by the searchers of `alone`; the plan that each starts from is its first evaluation, so that
none ends worse than it began.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from settings import TASKS, Rest, Workload, evaluate, make_problem, read_config
from tables import write_tables

import egx
from egx.baselines.expert import human, human_blocks, tensorflow
from egx.baselines.list_scheduling import heft, heft_fused, heft_readers
from egx.baselines.partition import partition
from egx.errors import SearchError
from egx.files import write_whole
from egx.graph.graph import real_sizes
from egx.problems.base import AbstractProblem, Decisions
from egx.search.registry import searches
from egx.simulate.fine import FineOptions, check_plan

HERE = Path(__file__).parent
ONE_AFTER_THE_OTHER = ("device", "fusion", "priority")

Row = dict[str, Any]
_Plan = Callable[[egx.Execution], Decisions]

# Plans that need no search; those that fuse, where fusion is decided.
PLANS: dict[str, _Plan] = {
    "tensorflow": tensorflow,
    "human": human,
    "human_blocks": human_blocks,
    "heft": heft,
    "heft_readers": heft_readers,
    "metis": lambda problem: partition(problem, order="first_come"),
}
FUSED: dict[str, _Plan] = {
    "heft_fused": heft_fused,
    "metis_fused": lambda problem: partition(problem, order="first_come", fused=True),
}


def further_plans(problem: egx.Execution, algorithm: str, name: str) -> dict[str, Any]:
    """The options of a searcher that begins with these plans too, fused ones where it fuses."""
    known = {**PLANS, **(FUSED if "fusion" in problem.decide else {})}
    made = [make(problem) for key, make in known.items() if key in (name, f"{name}_fused")]
    if not made:
        raise SystemExit(f"no plan {name!r}; known are {', '.join(known)}")
    if algorithm == "brkga_seeded":
        return {"seeds": ("all", *made)}
    return {"search.plans": jax.tree.map(lambda *x: np.stack(x), *made)}


class Compared:
    """One workload and task: what was found so far, and what finds more."""

    def __init__(self, workload: Workload, task: str, config: dict[str, Any], runs: Path):
        self.workload, self.task, self.config = workload, task, config
        self.folder = runs / workload.name / task
        self.folder.mkdir(parents=True, exist_ok=True)
        self.problems: dict[tuple[str, ...], egx.Execution] = {}

    def made(self, decide: tuple[str, ...] | None = None) -> egx.Execution:
        """The problem with these decisions, or the task's. It takes long to make: only where
        something is missing."""
        decide = TASKS[self.task] if decide is None else decide
        if decide not in self.problems:
            transfers = self.config.get("transfers", "async")
            self.problems[decide] = make_problem(self.workload, decide, transfers)
        return self.problems[decide]

    def path(self, method: str, seed: int | None = None) -> Path:
        return self.folder / f"{method}{'' if seed is None else f'_{seed}'}.json"

    def save(self, method: str, row: Row, seed: int | None = None) -> None:
        ops, _, uses = real_sizes(self.made().graph)
        row = {
            "workload": self.workload.title, "machine": self.workload.machine, "task": self.task,
            "method": method, "seed": seed, "ops": ops, "uses": uses, **row,
        }  # fmt: skip
        write_whole(self.path(method, seed), json.dumps(row, indent=1) + "\n")
        cost = row.get("cost")
        shown = f"{row.get('status', '')}" if cost is None else f"{cost * 1e3:.3f} ms"
        if "seconds" in row:
            shown += f", {row['seconds']:.1f} s and {row.get('compile_seconds', 0.0):.1f} s before"
        print(f"{self.workload.title}, {self.task}: {method} {seed or 0}: {shown}", flush=True)

    def run(self, methods: list[str]) -> None:
        """All that is missing."""
        self.plans()
        for method in methods:
            for seed in self.config["seeds"]:
                self.search(method, seed)
        if self.task == "joint":
            for method in self.config["alone"]:
                for seed in self.config["seeds"]:
                    self.alone(method, seed)
                    self.in_turn(method, seed)

    def plans(self) -> None:
        fuses = "fusion" in TASKS[self.task]
        for name, make in {**PLANS, **(FUSED if fuses else {})}.items():
            if not self.path(name).exists():
                problem = self.made()
                before = time.perf_counter()
                plan = make(problem)
                seconds = time.perf_counter() - before
                self.save(name, {**self.value(plan), "seconds": seconds, "evaluations": 1})
        if not self.path("bound").exists():
            self.save("bound", {"cost": self.made().lower_bound(), "feasible": True})

    def search(self, method: str, seed: int) -> None:
        """A run that is missing, or was made with other options than those of now."""
        settings = self.settings(method)
        if not self.is_there(method, seed, settings):
            row = self.found(self.made(), method, seed, self.config["budget"])
            self.save(method, {"settings": settings, **row}, seed)

    def settings(self, method: str) -> Row:
        algorithm = method.split("+")[0]
        return {
            "budget": self.config["budget"],
            "options": self.config.get("options", {}).get(algorithm, {}),
            "policies": self.config.get("policies", {}).get(algorithm, {}),
        }

    def is_there(self, label: str, seed: int, settings: Row) -> bool:
        path = self.path(label, seed)
        return path.exists() and json.loads(path.read_text()).get("settings") == settings

    def alone(self, method: str, seed: int) -> None:
        """Each decision by itself, the others as TensorFlow's default has them."""
        settings, default = self.settings(method), None
        for name in ONE_AFTER_THE_OTHER:
            label = f"only_{name}_{method}"
            if self.is_there(label, seed, settings):
                continue
            default = tensorflow(self.made()) if default is None else default
            row = self.found(self.rest(default, name), method, seed, self.config["budget"])
            self.save(label, {"settings": settings, **row}, seed)

    def rest(self, plan: Decisions, name: str) -> Rest:
        """What is left of a plan where one decision is to be taken: an order is not kept beside
        other devices or clusters, where it would be another one; first come, first served is."""
        decide = TASKS[self.task]
        if name != "priority":
            decide = tuple(one for one in decide if one != "priority")
        return Rest(self.made(decide), {one: plan[one] for one in decide}, (name,))

    def in_turn(self, method: str, seed: int) -> None:
        """One decision after the other, each on what was found before."""
        label, settings = f"in_turn_{method}", self.settings(method)
        if self.is_there(label, seed, settings):
            return
        plan, history, spent, seconds = dict(tensorflow(self.made())), [], 0, 0.0
        third = self.config["budget"] // len(ONE_AFTER_THE_OTHER)
        best: Row = {}
        for name in ONE_AFTER_THE_OTHER:
            row = self.found(self.rest(plan, name), method, seed, third, keep=True)
            if "decisions" not in row:
                best = row
                break
            plan |= row.pop("decisions")
            history += [[spent + at, cost] for at, cost in row["history"]]
            spent, seconds = spent + row["evaluations"], seconds + row["seconds"]
            # The order that the last search begins with may be worse than the one it replaces.
            if not best or (not row["feasible"], row["cost"]) < (
                not best["feasible"], best["cost"]
            ):  # fmt: skip
                best = row
        if best.get("cost") is not None:
            best = {**best, "history": history, "evaluations": spent, "seconds": seconds}
        self.save(label, {"settings": settings, **best}, seed)

    def found(
        self, problem: AbstractProblem, method: str, seed: int, budget: int, *, keep: bool = False
    ) -> Row:
        """What a searcher found; where it cannot run, why. Of a `Rest`, its start counts too."""
        algorithm, *further = method.split("+")
        options = dict(self.config.get("options", {}).get(algorithm, {}))
        for name in further:
            options |= further_plans(self.made(), algorithm, name)
        devices = str(self.made().hardware.num_devices)
        policy = self.config.get("policies", {}).get(algorithm, {}).get(devices)
        known = int(isinstance(problem, Rest))
        try:
            result = egx.optimize(
                problem,
                algorithm,
                budget=budget - known,
                seed=seed,
                options=options,
                policy=None if policy is None else egx.load_policy(HERE / policy),
            )
        except SearchError as error:
            return {"cost": None, "feasible": False, "status": str(error)}
        decisions = result.decisions
        value = self.value(decisions if not known else problem.whole(decisions))
        if value["feasible"] != result.feasible or not math.isclose(
            value["cost"], result.cost, rel_tol=1e-6
        ):
            raise AssertionError(f"{method}, seed {seed}: {result.cost} is {value}")
        evaluations = result.history.evaluations
        best = np.where(result.history.best_feasible, result.history.best_cost, np.inf)
        if known:
            start = self.value(problem.whole(problem.reference))
            first = start["cost"] if start["feasible"] else np.inf
            evaluations = np.concatenate([[1], evaluations + 1])
            best = np.minimum.accumulate(np.concatenate([[first], best]))
            if (not start["feasible"], start["cost"]) <= (not value["feasible"], value["cost"]):
                decisions, value = problem.reference, start
        improves = np.flatnonzero(np.diff(best, prepend=np.inf) < 0)
        row = {
            **value,
            "budget": budget,
            "evaluations": result.evaluations + known,
            "seconds": result.seconds,
            "compile_seconds": result.compile_seconds,
            "history": [[int(evaluations[k]), float(best[k])] for k in improves.tolist()],
        }
        return {**row, "decisions": decisions} if keep else row

    def value(self, plan: Decisions) -> Row:
        """What a plan costs in the problem of its decisions and under the finer cost model."""
        problem = self.made(tuple(name for name in TASKS[self.task] if name in plan))
        plan = {name: jax.numpy.asarray(value) for name, value in plan.items()}
        outcome = evaluate(problem, plan)
        fine = {}
        for name, options in self.config["fine"].items():
            one = check_plan(problem, plan, options=FineOptions(**options))
            fine[name] = {"makespan_s": one.makespan_s, "fits": one.fits,
                          "peak_bytes": int(one.peak_bytes.max())}  # fmt: skip
        return {
            "cost": float(outcome.cost),
            "feasible": bool(outcome.feasible),
            "makespan_s": float(outcome.makespan_s),
            "peak_bytes": int(np.max(outcome.peak_bytes)),
            "fine": fine,
        }


def chosen(config: dict[str, Any], names: Sequence[str] | None) -> list[Workload]:
    """The workloads of a configuration that are named, in that order; all of them by default."""
    known = {workload.name: workload for workload in workloads(config)}
    unknown = [name for name in names or () if name not in known]
    if unknown:
        raise SystemExit(f"no workload {unknown[0]!r}; known are {', '.join(known)}")
    return [known[name] for name in names or known]


def workloads(config: dict[str, Any]) -> list[Workload]:
    known = [Workload(**entry) for entry in config["workloads"]]
    names = [workload.name for workload in known]
    if len(set(names)) != len(names):
        raise SystemExit(f"two workloads have one name: {names}")
    return known


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", type=Path, default=HERE / "run.toml")
    parser.add_argument("--workloads", nargs="+", help="only these, in this order")
    parser.add_argument("--tasks", nargs="+", choices=tuple(TASKS), help="only these")
    parser.add_argument("--methods", nargs="+", help="only these")
    parser.add_argument("--seeds", type=int, help="no more than so many now; the rest later")
    parser.add_argument("--no-alone", action="store_true", help="only the joint searches now")
    parser.add_argument("--runs", type=Path, default=HERE / "runs")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("--tables", action="store_true", help="run nothing")
    args = parser.parse_args()
    config = read_config(args.config)
    config["seeds"] = config["seeds"][: args.seeds]
    if args.no_alone:
        config["alone"] = []
    asked = chosen(config, args.workloads)
    wanted = args.methods or config["methods"]
    missing = [m for m in wanted if m.split("+")[0] not in searches()]
    if missing:
        print(f"left out, for egx has none of them: {', '.join(missing)}", flush=True)
    methods = [m for m in wanted if m not in missing]
    runs, results = args.runs / args.config.stem, args.results / args.config.stem
    order = [workload.title for workload in workloads(config)]
    for workload in () if args.tables else asked:
        if not workload.is_there:
            print(f"{workload.title}: left out, for {workload.path} is absent", flush=True)
            continue
        for task in args.tasks or config["tasks"]:
            if workload.tasks and task not in workload.tasks:
                continue
            Compared(workload, task, config, runs).run(methods)
            write_tables(runs, results, order)
            # The next one compiles all anew.
            jax.clear_caches()
    write_tables(runs, results, order)


if __name__ == "__main__":
    main()
