"""Trains the network of `regal_plus` on what changes of plans did in runs of the search itself.

    python experiments/regal/train_plus.py              # fits, validates, writes runs/regal_plus
    python experiments/regal/train_plus.py --test       # what comes with egx, on other graphs

Each candidate that is one change of a kept plan is an example: what the network sees of the change,
and whether the candidate was better than the plan. Runs are on synthetic graphs in all settings of
train_plus.toml; a network is fitted by logistic regression (Adam) with every setting weighing the
same, then runs again with it add examples from where it leads.

Shapes: G graphs, R seeds, K generations, C changed candidates of one, F inputs, X examples.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array
from settings import heuristic_costs, limited, memory_limit

import egx
from egx.files import write_whole
from egx.graph.graph import real_sizes
from egx.graph.padding import pad_graph
from egx.hardware.machines import regal_hardware
from egx.policies.move_net import INPUTS, MovePolicy
from egx.problems.base import AbstractProblem
from egx.problems.padded import stack_problems
from egx.report.tables import Table
from egx.search.base import AbstractSearch
from egx.search.brkga import BRKGA
from egx.search.moves import is_better
from egx.search.regal_plus import RegalPlus, regal_plus, shipped_move_policy
from egx.training.synthetic import synthetic_models

HERE = Path(__file__).parent
# Graphs of a program, and generations of a run that are learned from.
TOGETHER, SEEN = 8, 63

Plans = tuple[dict[str, Array], ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Setting:
    """The same machine and objective on G graphs, and the plans of each heuristic, stacked."""

    name: str
    problems: egx.Execution
    plans: Plans


def capped_hardware(graph: Any, hardware: Any) -> Any:
    """Devices that hold less than the reference needs."""
    free = egx.Execution(graph, hardware, objective="peak_memory")
    return limited(hardware, memory_limit(heuristic_costs(free)))


def settings(config: dict[str, Any], part: str) -> Iterator[Setting]:
    """All settings on the graphs of a part, those that share a program one after the other."""
    sizes = tuple(config["padded_to"])

    def fits(model: egx.Model) -> bool:
        return all(have <= room for have, room in zip(real_sizes(model.graph), sizes, strict=True))

    models = synthetic_models(seed=config[f"{part}_seed"], keep=fits)
    graphs = [pad_graph(m.graph, sizes) for m in itertools.islice(models, config[f"{part}_graphs"])]
    entries = config["settings"] + (config["only_tested"] if part == "test" else [])
    for entry in entries:
        for transfers, capped in itertools.product(entry["transfers"], entry["capped"]):
            machine = regal_hardware(entry["devices"], transfers=transfers)
            problems = [
                egx.Execution(
                    graph,
                    capped_hardware(graph, machine) if capped else machine,
                    objective=entry["objective"],
                )
                for graph in graphs
            ]
            known = [dict(problem.heuristics()) for problem in problems]
            plans = tuple(
                {head: jnp.stack([k[name][head] for k in known]) for head in known[0][name]}
                for name in known[0]
            )
            parts = [str(entry["devices"]), transfers, entry["objective"]]
            name = "_".join([*parts, "capped"] if capped else parts)
            yield Setting(name, stack_problems(problems, sizes), plans)


def with_plans(search: AbstractSearch, plans: Plans) -> AbstractSearch:
    """The search with these plans of one graph in place of the heuristics' names."""
    if isinstance(search, RegalPlus):
        return eqx.tree_at(lambda s: s.genetic.seeds, search, plans)
    return eqx.tree_at(lambda s: s.seeds, search, plans)


@eqx.filter_jit
def runs(
    search: AbstractSearch,
    problems: egx.Execution,
    plans: Plans,
    keys: Array,
    marks: Array,
    seen_of: int,
) -> tuple[Array, Array, Array, Array]:
    """Costs [G, R, marks] after so many generations, infinite where nothing fits; and of the first
    `seen_of` generations what was seen of each change [G, R, K, C, F] and whether it helped, -1
    where the plan's own cost was not known yet."""
    count = search.changed if isinstance(search, RegalPlus) else 1

    def one(problem: AbstractProblem, plans: Plans, key: Array) -> Any:
        own = with_plans(search, plans)

        def generation(index: Array, carry: Any) -> Any:
            state, best, seen, helped = carry
            ask_key, tell_key = jax.random.split(jax.random.fold_in(key, index + 1))
            candidates, state = own.ask(problem, state, key=ask_key)
            outcomes = jax.vmap(problem.evaluate)(candidates)
            if isinstance(own, RegalPlus):
                changed, place = state.inner.changed, jnp.minimum(index, seen_of - 1)
                bred = own.genetic.batch_size
                better = is_better(
                    outcomes.cost[bred:], outcomes.feasible[bred:],
                    changed.parent_cost, changed.parent_feasible,
                )  # fmt: skip
                known = jnp.isfinite(changed.parent_cost)
                seen = seen.at[place].set(changed.seen.astype(jnp.float16))
                helped = helped.at[place].set(jnp.where(known, better, -1).astype(jnp.int8))
            state, _ = own.tell(problem, state, candidates, outcomes, key=tell_key)
            now = jnp.where(state.best.feasible, state.best.cost, jnp.inf)
            return state, jnp.where(marks == index + 1, now, best), seen, helped

        start = (
            own.init(problem, key=jax.random.fold_in(key, 0)),
            jnp.full(marks.shape, jnp.inf, jnp.float32),
            jnp.zeros((seen_of, count, len(INPUTS)), jnp.float16),
            jnp.full((seen_of, count), -1, jnp.int8),
        )
        return jax.lax.fori_loop(0, jnp.max(marks), generation, start)[1:]

    each = jax.vmap(one, (None, None, 0))
    return jax.vmap(each, (0, 0, None))(problems, plans, keys)


def run(
    search: AbstractSearch, setting: Setting, budgets: list[int], seeds: int, *, first: int = 0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What `runs` gives after whole generations of each budget; all graphs by one program."""
    # Of the right structure; each graph's own plans replace it.
    some = tuple({head: x[0] for head, x in plan.items()} for plan in setting.plans)
    marks = jnp.asarray([budget // search.batch_size for budget in budgets], jnp.int32)
    keys = jax.vmap(jax.random.key)(jnp.arange(first, first + seeds, dtype=jnp.uint32))
    parts = []
    for start in range(0, len(setting.problems.reference_cost), TOGETHER):
        problems, plans = jax.tree.map(
            lambda x, start=start: x[start : start + TOGETHER], (setting.problems, setting.plans)
        )
        found = runs(with_plans(search, some), problems, plans, keys, marks, SEEN)
        parts.append([np.asarray(x) for x in found])
    cost, seen, helped = (np.concatenate(part) for part in zip(*parts, strict=True))
    return cost, seen, helped


def learner(policy: MovePolicy, trust: float) -> RegalPlus:
    """The search; `trust` 0 ignores the network, but it sees all the same."""
    return regal_plus(policy=policy, trust=trust)


@eqx.filter_jit
def step(
    policy: MovePolicy, state: Any, batch: tuple[Any, Any, Any], rate: Array
) -> tuple[MovePolicy, Any, Array]:
    """One step of Adam on (seen, helped, weight) of a batch of examples."""
    seen, helped, weight = (jnp.asarray(x) for x in batch)

    def loss(policy: MovePolicy) -> Array:
        each = optax.sigmoid_binary_cross_entropy(policy.odds(seen), helped)
        return jnp.mean(weight * each)

    value, gradient = eqx.filter_value_and_grad(loss)(policy)
    with jax.numpy_dtype_promotion("standard"):
        updates, state = optax.scale_by_adam().update(gradient, state)
    updates = jax.tree.map(lambda x: -rate * x, updates)
    return eqx.apply_updates(policy, updates), state, value


def fit(config: dict[str, Any], examples: list[tuple[np.ndarray, np.ndarray]]) -> MovePolicy:
    """A network fitted to examples (seen [X, F], helped [X]) of each setting."""
    rng = np.random.default_rng(0)
    seen = np.concatenate([x for x, _ in examples]).astype(np.float32)
    helped = np.concatenate([y for _, y in examples]).astype(np.float32)
    # Settings weigh the same, however many examples each has.
    weight = np.concatenate([np.full(len(y), 1.0 / len(y)) for _, y in examples])
    weight = (weight / weight.mean()).astype(np.float32)
    policy = MovePolicy(width=config["width"], key=jax.random.key(0))
    state = optax.scale_by_adam().init(eqx.filter(policy, eqx.is_array))
    for index in range(config["steps"]):
        rows = rng.integers(0, len(helped), config["batch"])
        rate = config["learning_rate"] * min(1.0, 2.0 * (1.0 - index / config["steps"]))
        batch = seen[rows], helped[rows], weight[rows]
        policy, state, _ = step(policy, state, batch, jnp.asarray(rate, jnp.float32))
    return policy


def ranking(policy: MovePolicy, seen: np.ndarray, helped: np.ndarray) -> float:
    """How often a change that helped has better odds than one that did not (AUC)."""
    odds = np.asarray(policy.odds(jnp.asarray(seen, jnp.float32)))
    place = np.empty(len(odds))
    place[np.argsort(odds)] = np.arange(1, len(odds) + 1)
    good = helped > 0
    count = good.sum()
    if count in (0, len(good)):
        return float("nan")
    rest = len(good) - count
    return float((place[good].sum() - count * (count + 1) / 2) / (count * rest))


def collected(
    config: dict[str, Any], train: list[Setting], policy: MovePolicy, trust: float, first: int
) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Examples of all settings; candidates are single changes here."""
    for setting in train:
        search = dataclasses.replace(learner(policy, trust), more=np.asarray(0.0, np.float32))
        _, seen, helped = run(search, setting, [config["budget"]], 1, first=first)
        known = helped.reshape(-1) >= 0
        flat = seen.reshape(-1, seen.shape[-1])[known], helped.reshape(-1)[known]
        print(f"{setting.name}: {known.sum()} changes, {100 * flat[1].mean():.2f} % helped",
              flush=True)  # fmt: skip
        yield setting.name, *flat


@eqx.filter_jit
def _costs(problems: egx.Execution, plans: dict[str, Array]) -> Array:
    outcomes = jax.vmap(lambda problem, plan: problem.evaluate(plan))(problems, plans)
    return jnp.where(outcomes.feasible, outcomes.cost, jnp.inf)


def compare(
    config: dict[str, Any], policy: MovePolicy, part: str, trusts: list[float]
) -> Iterator[dict[str, Any]]:
    """Beside seeded BRKGA on graphs of a part, with the same seed: a row a setting and trust.
    `gain` is 1 - cost / its cost, the mean over the graphs where both fit."""
    budgets = [1040, config["budget"]]
    for setting in settings(config, part):
        base, _, _ = run(BRKGA(seeds="all"), setting, budgets, 1)
        known = np.min([np.asarray(_costs(setting.problems, plan)) for plan in setting.plans], 0)
        for trust in trusts:
            cost, _, _ = run(learner(policy, trust), setting, budgets, 1)
            row: dict[str, Any] = {"setting": setting.name, "trust": trust, "graphs": len(known)}
            for index, budget in enumerate(budgets):
                mine, its = cost[:, 0, index], base[:, 0, index]
                with np.errstate(invalid="ignore"):
                    gain = np.where(np.isfinite(mine) & np.isfinite(its), 1.0 - mine / its, np.nan)
                    best = np.where(np.isfinite(its), 1.0 - its / known, np.nan)
                row[f"at_{budget}"] = {
                    "gain": float(np.nanmean(gain)),
                    "gain_error": float(np.nanstd(gain) / np.sqrt(np.isfinite(gain).sum())),
                    "better": float(np.mean(mine < its * (1 - 1e-6))),
                    "worse": float(np.mean(mine > its * (1 + 1e-6))),
                    "fits": float(np.mean(np.isfinite(mine))),
                    "seeded_fits": float(np.mean(np.isfinite(its))),
                    "worse_than_heuristics": float(np.mean(mine > known * (1 + 1e-6))),
                    "seeded_on_heuristics": float(np.nanmean(best)),
                    "costs": [float(f"{x:.7g}") if np.isfinite(x) else None for x in mine],
                    "seeded_costs": [float(f"{x:.7g}") if np.isfinite(x) else None for x in its],
                }
            last = row[f"at_{budgets[-1]}"]
            print(
                f"{setting.name}, trust {trust}: "
                + ", ".join(f"{100 * row[f'at_{b}']['gain']:+.2f} % at {b}" for b in budgets)
                + f", better on {100 * last['better']:.0f} %, worse on {100 * last['worse']:.0f} %",
                flush=True,
            )
            yield row


def report(rows: list[dict[str, Any]]) -> Table:
    """What the rows of a test say, a line a setting."""
    budgets = [key.removeprefix("at_") for key in rows[0] if key.startswith("at_")]
    lines = []
    for name in dict.fromkeys(row["setting"] for row in rows):
        ignores, trusts = sorted((r for r in rows if r["setting"] == name), key=_place)
        cells = [name.replace("_", " "), str(trusts["graphs"])]
        for budget in budgets:
            at, without = trusts[f"at_{budget}"], ignores[f"at_{budget}"]
            cells += [
                f"{100 * at['gain']:+.2f} ± {100 * at['gain_error']:.2f}",
                f"{100 * without['gain']:+.2f}",
            ]
        cells += [
            f"{100 * at['better']:.0f} / {100 * at['worse']:.0f}",
            f"{100 * at['worse_than_heuristics']:.0f}",
            f"{100 * at['seeded_on_heuristics']:+.2f}",
        ]
        lines.append(tuple(cells))
    header = ["setting", "graphs"]
    for budget in budgets:
        header += [f"lower at {int(budget):,}, %", "without the network"]
    header += ["graphs better / worse, %", "worse than the best heuristic, %",
               "seeded BRKGA on the best heuristic, %"]  # fmt: skip
    return Table(
        tuple(header),
        tuple(lines),
        title="regal_plus beside seeded BRKGA: cost lower, mean over graphs and its standard error",
    )


def _place(row: dict[str, Any]) -> tuple[str, float]:
    return row["setting"], row["trust"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default=str(HERE / "train_plus.toml"))
    parser.add_argument("--out", default=str(HERE / "runs" / "regal_plus"))
    parser.add_argument("--test", action="store_true", help="train nothing, use what is shipped")
    args = parser.parse_args()
    config, out = tomllib.loads(Path(args.config).read_text()), Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    if args.test:
        path = HERE / "results" / "regal_plus.json"
        for row in compare(config, shipped_move_policy(), "test", [0.0, 1.0]):
            # Settings of another call stay.
            have = json.loads(path.read_text()) if path.exists() else []
            same = (row["setting"], row["trust"])
            rows = [r for r in have if (r["setting"], r["trust"]) != same] + [row]
            rows = sorted(rows, key=_place)
            write_whole(path, json.dumps(rows) + "\n")
        write_whole(path.with_suffix(".md"), report(rows).to_markdown())
        return
    history: dict[str, Any] = {"config": config, "ranking": []}
    began = time.process_time()
    train = list(settings(config, "train"))
    policy = MovePolicy(width=config["width"], key=jax.random.key(0))
    examples: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {}
    for number in range(config["rounds"]):
        trust = 0.0 if number == 0 else 1.0
        fresh = list(collected(config, train, policy, trust, number))
        for name, seen, helped in fresh:
            # Of what the network has not been fitted to.
            if number:
                history["ranking"].append([name, ranking(policy, seen, helped)])
            examples.setdefault(name, []).append((seen, helped))
        joined = [
            (np.concatenate([x for x, _ in group]), np.concatenate([y for _, y in group]))
            for group in examples.values()
        ]
        policy = fit(config, joined)
        policy.save(out / "policy.npz")
    history["cpu_seconds"] = time.process_time() - began
    print(history["ranking"], f"{history['cpu_seconds']:.0f} CPU s", flush=True)
    write_whole(out / "history.json", json.dumps(history, indent=1) + "\n")
    validated = compare(config, policy, "validation", [0.0, *config["trusts"]])
    history["validation"] = list(validated)
    write_whole(out / "history.json", json.dumps(history, indent=1) + "\n")


if __name__ == "__main__":
    main()
