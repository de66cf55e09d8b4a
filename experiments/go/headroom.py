"""How much of a step transfers keep from being saved: long searches with links and with free ones.

    python experiments/go/headroom.py                          # workloads of run.toml
    python experiments/go/headroom.py --workloads trxl_2       # only these

Twice per workload, `brkga_seeded` with 20 times the evaluations of run.toml, all three decisions:
on the machine as it is, and where links take no time. The second plan is none for the machine; it
tells what no plan for it can reach by this searcher. Rows are kept in `results/headroom.json`; what
is there is not made again.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from run import chosen, workloads
from settings import TASKS, Workload, evaluate, make_problem, read_config

import egx
from egx.baselines.expert import tensorflow
from egx.baselines.list_scheduling import heft_fused
from egx.files import write_whole
from egx.report.tables import Table

HERE = Path(__file__).parent
OUT = HERE / "results" / "headroom"
BUDGET = 20_000
LINKS = ("as they are", "free")


def with_free_links(machine: egx.Hardware) -> egx.Hardware:
    free = jnp.full_like(machine.link_bytes_per_s, jnp.inf)
    links = (free, jnp.zeros_like(machine.link_latency_s))
    return eqx.tree_at(lambda m: (m.link_bytes_per_s, m.link_latency_s), machine, links)


def measured(workload: Workload) -> dict[str, Any]:
    problem = make_problem(workload, TASKS["joint"])
    free = egx.Execution(
        egx.load(workload.model, **workload.options),
        with_free_links(problem.hardware),
        decide=TASKS["joint"],
        order="runtime",
    )
    row: dict[str, Any] = {"title": workload.title, "bound_s": problem.lower_bound()}
    for links, one in zip(LINKS, (problem, free), strict=True):
        found = egx.optimize(one, "brkga_seeded", budget=BUDGET, seed=0)
        row[links] = {
            "tensorflow": float(evaluate(one, tensorflow(one)).cost),
            "heft_fused": float(evaluate(one, heft_fused(one)).cost),
            "brkga_seeded": found.cost,
            "seconds": found.seconds,
        }
    return row


def table(rows: list[dict[str, Any]]) -> str:
    body = []
    for row in rows:
        default, cells = row[LINKS[0]]["tensorflow"], []
        for links in LINKS:
            found = row[links]
            less = 1.0 - found["brkga_seeded"] / default
            cells += [f"{found[name] * 1e3:.2f}" for name in ("heft_fused", "brkga_seeded")]
            cells += [f"{less:.1%}"]
        bound = 1.0 - row["bound_s"] / default
        body.append((row["title"], f"{default * 1e3:.2f}", *cells, f"{bound:.1%}"))
    heads = [f"{name}, links {links}" for links in LINKS
             for name in ("heft_fused", "brkga_seeded", "less than TensorFlow's")]  # fmt: skip
    return Table(
        ("workload", "tensorflow", *heads, "less at the bound"),
        tuple(body),
        title=f"Milliseconds a step after {BUDGET:,} evaluations, one seed",
    ).to_markdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", type=Path, default=HERE / "run.toml")
    parser.add_argument("--workloads", nargs="+", help="only these, in this order")
    args = parser.parse_args()
    config = read_config(args.config)
    path = OUT.with_suffix(".json")
    rows = json.loads(path.read_text()) if path.exists() else {}
    for workload in chosen(config, args.workloads):
        name = workload.name
        if name not in rows:
            rows[name] = measured(workload)
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, json.dumps(rows, indent=1) + "\n")
            jax.clear_caches()
        ordered = [rows[one.name] for one in workloads(config) if one.name in rows]
        write_whole(OUT.with_suffix(".md"), table(ordered))
        print(f"{name}: {rows[name]}", flush=True)


if __name__ == "__main__":
    main()
