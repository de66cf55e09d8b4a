"""REGAL's claim, measured: every method on unseen graphs at equal evaluations.

    python experiments/regal/run.py                                # all settings, one by one
    python experiments/regal/run.py --settings synthetic_2_free_makespan --graphs 60
    python experiments/regal/run.py --tables                       # only what results/ says
    python experiments/regal/run.py --config my.toml --out mine    # nothing beside this script

A row a (setting, graph, method, budget) is appended to `runs/compare/SETTING.jsonl` as it is
found; what is there already is not run again, so that a run can be killed at any time. A run of
20,000 evaluations passes through the smaller budgets: its best plan after exactly that many
evaluations is what a run with that budget gives, bit for bit. Searchers that plan with their
budget run once for each. Tables and pictures are written to `results/`.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import hashlib
import json
import time
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
from settings import Case, Setting, make_case, sources
from tables import write_tables

import egx
from egx.baselines.cp_sat_execution import exact_execution
from egx.baselines.expert import round_robin
from egx.baselines.partition import partition
from egx.errors import SearchError
from egx.graph.graph import real_sizes
from egx.problems.base import Decisions
from egx.search.base import AbstractSearch
from egx.search.brkga import BRKGA
from egx.search.regal import PRETRAINED
from egx.search.regal_plus import SHIPPED
from egx.search.registry import make_search, search_options
from egx.search.tuning import tune
from egx.training.generation import CHUNK_ROWS
from egx.training.steppers import Simulated

HERE = Path(__file__).parent
NO_LIMIT = 2**30
# Methods that begin with the plans of all heuristics, and the option that takes them.
SEEDED = {"brkga_seeded": "seeds", "regal_plus": "genetic.seeds"}

Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Found:
    """The best plan of a run after `budget` evaluations; seconds without compilation."""

    budget: int
    decisions: Decisions
    cost: float
    feasible: bool
    seconds: float
    cpu_seconds: float


def passing(
    search: AbstractSearch, problem: egx.Execution, budgets: list[int], seed: int
) -> Iterator[Found]:
    """One run, and its best plan after exactly each of the rising budgets."""
    search.check(problem)
    wall, cpu = time.perf_counter(), time.process_time()
    stepper = Simulated(search, problem, [seed])
    run, batch = stepper.begin(), search.batch_size
    for budget in budgets:
        while run.generation < budget // batch:
            count = min(budget // batch - run.generation, CHUNK_ROWS)
            run = dataclasses.replace(stepper.advance(run, count, NO_LIMIT, None), rows=())
        # What is left of the budget, aside: the run itself goes on with whole generations.
        at = run if budget % batch == 0 else stepper.advance(run, 1, budget, None)
        best = jax.tree.map(lambda x: x[0], at.states.best)
        yield Found(
            budget,
            best.decisions,
            float(best.cost),
            bool(best.feasible),
            time.perf_counter() - wall,
            time.process_time() - cpu,
        )


@eqx.filter_jit
def _evaluate(problem: egx.Execution, plan: Decisions) -> Any:
    return problem.evaluate(plan)


class Compared:
    """One setting: what was found so far, and what finds more."""

    def __init__(self, setting: Setting, config: dict[str, Any], runs: Path):
        self.setting, self.config = setting, config
        runs.mkdir(parents=True, exist_ok=True)
        self.path = runs / f"{setting.name}.jsonl"
        self.tuned_path = runs / "tuned.json"
        self.rows: list[Row] = []
        if self.path.exists():
            # A last line that a kill cut short is dropped.
            lines = self.path.read_text().splitlines()
            self.rows = [json.loads(line) for line in lines if line.endswith("}")]
        self.done = {self._key(row) for row in self.rows}
        self.warm: set[Any] = set()

    @staticmethod
    def _key(row: Mapping[str, Any]) -> tuple[Any, ...]:
        return row["graph"], row["method"], row["budget"], row.get("version", "")

    def _append(self, case: Case, method: str, budget: int, **more: Any) -> None:
        ops, _, uses = real_sizes(case.source.model.graph)
        row = {
            "graph": case.name, "family": case.source.family, "ops": ops, "uses": uses,
            "method": method, "budget": budget, **more,
        }  # fmt: skip
        self._write(row)

    def _write(self, row: Row) -> None:
        self.rows.append(row)
        self.done.add(self._key(row))
        with open(self.path, "a") as file:
            file.write(json.dumps(row) + "\n")

    def _missing(self, graph: str, method: str, budget: int) -> bool:
        return (graph, method, budget, self._version(method)) not in self.done

    def _version(self, method: str) -> str:
        """Which policy a row was found with: another one is run anew."""
        if method == "regal_plus":
            return _digest(SHIPPED)
        if method not in ("regal", "gas"):
            return ""
        name = f"{method}_{self.setting.objective}_{self.setting.devices}"
        return _digest(PRETRAINED / f"{name}.npz")

    def _budgets(self, method: str) -> list[int]:
        low = [self.config["low_budget"]] if method == "brkga" else []
        return low + list(self.config["budgets"])

    def run(self, methods: list[str], graphs: int, exact: bool) -> None:
        """Runs what is missing on the first `graphs` of the corpus."""
        setting, config = self.setting, self.config
        corpus = sources(setting.corpus, config["corpora"][setting.corpus], setting.devices)
        began, taken = time.perf_counter(), 0
        # Graphs that the cap leaves out do not count.
        for number, source in enumerate(corpus):
            if taken == graphs:
                break
            solves = exact and taken < setting.exact
            if self._complete(source.name, methods, solves):
                taken += source.name not in self._left_out()
                continue
            case = make_case(setting, source, number, config)
            if case is None:
                self._skip(source.name)
                continue
            taken += 1
            self.run_case(case, methods, solves)
            minutes = (time.perf_counter() - began) / 60
            print(
                f"{setting.name}: {taken} of {graphs}, {case.name}, {minutes:.1f} min", flush=True
            )

    def _left_out(self) -> set[str]:
        return {row["graph"] for row in self.rows if row["method"] == "left out"}

    def _skip(self, graph: str) -> None:
        self._write({"graph": graph, "method": "left out", "budget": 0})

    def _complete(self, graph: str, methods: list[str], solves: bool) -> bool:
        if graph in self._left_out():
            return True
        wanted = [(m, b) for m in methods for b in self._budgets(m) if self._possible(m)]
        wanted += [("bound", 0), *([("cp_sat", 0)] if solves else [])]
        return not any(self._missing(graph, m, b) for m, b in wanted)

    def _possible(self, method: str) -> bool:
        """Whether there is a policy, or a tuned setting, for it."""
        if method in ("regal", "gas"):
            return self._version(method) != ""
        return method != "tuned" or self.setting.name in _read(self.tuned_path)

    def run_case(self, case: Case, methods: list[str], solves: bool) -> None:
        """All that is missing on one graph."""
        began = time.perf_counter()
        plans = dict(case.problem.heuristics())
        took = time.perf_counter() - began
        if self._missing(case.name, "bound", 0):
            self._heuristics(case, plans, took)
        for method in methods:
            if self._possible(method):
                self._search(case, method, plans, took)
        if solves and self._missing(case.name, "cp_sat", 0):
            self._solve(case)

    def _value(self, case: Case, plan: Decisions) -> Row:
        """What a plan costs in the problem and under the second cost model."""
        one, two = _evaluate(case.problem, plan), _evaluate(case.second, plan)
        by_time = self.setting.objective == "makespan"
        row: Row = {
            "cost": float(one.cost),
            "feasible": bool(one.feasible),
            "second": float(two.makespan_s if by_time else two.cost),
            "second_feasible": bool(two.feasible),
        }
        if not by_time:
            row["peak_along_time"] = int(case.problem.timeline(plan).event_live_bytes.max())
        return row

    def _heuristics(self, case: Case, plans: dict[str, Decisions], took: float) -> None:
        more = {f"partition_{o}": partition(case.problem, order=o)
                for o in self.config["partition_orders"]}  # fmt: skip
        more["round_robin"] = round_robin(case.problem)
        for name, plan in {**plans, **more}.items():
            if self._missing(case.name, name, 1):
                self._append(case, name, 1, **self._value(case, plan), seconds=took, heuristic=True)
        self._append(case, "bound", 0, cost=case.problem.lower_bound())

    def _search(
        self, case: Case, method: str, plans: dict[str, Decisions], heuristics_s: float
    ) -> None:
        budgets = self._budgets(method)
        missing = [b for b in budgets if self._missing(case.name, method, b)]
        if not missing:
            return
        plans_ahead = method != "tuned" and "budget" in search_options(method)
        for part in [[b] for b in missing] if plans_ahead else [budgets]:
            search = self._make(method, part[-1], plans)
            warm = (method, case.shape) in self.warm
            seeds_s = heuristics_s if method in SEEDED else 0.0
            try:
                found = list(passing(search, case.problem, part, self.config["seed"]))
            except SearchError as error:
                print(f"{self.setting.name}: {method} is left out: {error}", flush=True)
                return
            self.warm.add((method, case.shape))
            for one in found:
                if one.budget not in missing:
                    continue
                value = self._value(case, one.decisions)
                if value["cost"] != one.cost or value["feasible"] != one.feasible:
                    raise AssertionError(f"{case.name}, {method}: {one.cost} is {value}")
                self._append(
                    case, method, one.budget, **value, version=self._version(method),
                    seconds=one.seconds + seeds_s, cpu_seconds=one.cpu_seconds + seeds_s,
                    warm=warm,
                )  # fmt: skip

    def _make(self, method: str, budget: int, plans: dict[str, Decisions]) -> AbstractSearch:
        options = dict(self.config["options"].get(method, {}))
        if method == "tuned":
            return BRKGA(**_read(self.tuned_path)[self.setting.name]["options"])
        if method in SEEDED:
            # The plans that it would make itself; they are made once a graph here.
            options[SEEDED[method]] = tuple(plans.values())
        return make_search(method, options, budget=budget)

    def _solve(self, case: Case) -> None:
        try:
            solution = exact_execution(case.problem, time_limit_s=self.config["exact"]["seconds"])
        except SearchError as error:
            self._append(case, "cp_sat", 0, cost=None, feasible=False, status=str(error))
            return
        found = {"cost": None, "feasible": False}
        if solution.decisions is not None:
            found = self._value(case, solution.decisions)
        self._append(
            case, "cp_sat", 0, **found, bound=solution.bound, status=solution.status,
            seconds=solution.seconds,
        )  # fmt: skip

    def tune(self) -> None:
        """The best point of BRKGA's grid on training graphs, kept beside the rows."""
        setting, config = self.setting, self.config
        tuned = _read(self.tuned_path)
        if setting.name in tuned or setting.corpus != "synthetic":
            return
        corpus = dict(config["corpora"]["synthetic"])
        corpus |= {"seed": corpus["training_seeds"][0][0], "training_seeds": []}
        # How many graphs, then what `tune` takes.
        chosen = dict(config["tune"])
        count = chosen.pop("graphs")
        problems = []
        for number, source in enumerate(sources("synthetic", corpus, setting.devices)):
            case = make_case(setting, source, number, config)
            # One padded size, so that each combination of sizes compiles once.
            if case is not None and case.shape == tuple(corpus["padded_to"][1]):
                problems.append(case.problem)
            if len(problems) == count:
                break
        grid = tune(problems, **chosen, progress=lambda point: print(point, flush=True))
        best = grid[0]
        options = {
            "population": best.population,
            "elites": max(round(best.elites * best.population), 1),
            "mutants": round(best.mutants * best.population),
            "rho": best.rho,
        }
        tuned[setting.name] = {"options": options, "score": best.score}
        self.tuned_path.write_text(json.dumps(tuned, indent=1) + "\n")


@functools.cache
def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:12] if path.exists() else ""


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default=str(HERE / "run.toml"))
    parser.add_argument("--settings", nargs="+", help="only these, in this order")
    parser.add_argument("--methods", nargs="+", help="only these")
    parser.add_argument("--graphs", type=int, help="no more than so many now; the rest later")
    parser.add_argument("--no-exact", action="store_true", help="leave the solver for later")
    parser.add_argument("--tune", action="store_true", help="tune BRKGA for the settings first")
    parser.add_argument("--out", type=Path, default=HERE, help="where runs/ and results/ are")
    parser.add_argument("--tables", action="store_true", help="run nothing")
    args = parser.parse_args()
    config = tomllib.loads(Path(args.config).read_text())
    known = {setting.name: setting for setting in (Setting(**s) for s in config["settings"])}
    runs = args.out / "runs" / "compare"
    for name in args.settings or known if not args.tables else ():
        compared = Compared(known[name], config, runs)
        if args.tune:
            compared.tune()
        graphs = min(args.graphs or NO_LIMIT, known[name].graphs)
        compared.run(args.methods or config["methods"], graphs, not args.no_exact)
        # The next setting compiles all anew.
        jax.clear_caches()
    write_tables(
        runs,
        args.out / "results",
        list(known.values()),
        budgets=config["budgets"],
        methods=config["methods"],
        low=config["low_budget"],
    )


if __name__ == "__main__":
    main()
