# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Devices and order
#
# Which device runs each op, and in which order: the problem of Paliwal et al., "Reinforced Genetic
# Algorithm Learning for Optimizing Computation Graphs" (ICLR 2020). A plan is valued by the
# simulator: an op waits for its device and its inputs, a tensor that is read elsewhere is sent over
# a link, and each device holds only so much.

# %%
import os

import numpy as np

import egx
from egx.graph.generators import regal_synthetic
from egx.graph.padding import bucket_sizes, pad_graph
from egx.report.execution_verdict import device_table, judge_execution
from egx.report.gantt import gantt
from egx.report.trace import write_trace

BUDGET = int(os.environ.get("EGX_NOTEBOOK_BUDGET", "5000"))

model = egx.load("bert")
machine = egx.hardware.with_devices(egx.hardware.load("nnpi"), 2, link_bytes_per_s=64e9)
problem = egx.Execution(model, machine)
print(model)
print({name: (head.axis, head.choices) for name, head in problem.heads.items()})

# %% [markdown]
# ## Known before any search
#
# Heuristics give plans at once: list scheduling by critical path (`heft`), the order that frees
# most memory (`memory_greedy`), and blocks of layers (`expert`). The genetic algorithm may begin
# with them. The bound is one that no plan undercuts: the longest path, or the load of all devices.

# %%
result = egx.optimize(problem, "brkga", budget=BUDGET, options={"seeds": "all"})
verdict = judge_execution(problem, result)
verdict.table()

# %% [markdown]
# A transformer is nearly a chain: a second device can run the branches beside each other, and each
# branch has to be fetched. What the best plan does, and what memory it holds meanwhile:

# %%
line = problem.timeline(verdict.best.decisions)
gantt(problem, verdict.best.decisions, timeline=line)

# %%
device_table(problem, line)

# %% [markdown]
# `write_trace` writes the same for Perfetto (ui.perfetto.dev) or chrome://tracing.

# %%
write_trace(problem, line, "trace.json")
print(f"{os.path.getsize('trace.json') / 1024:.0f} KiB")

# %% [markdown]
# ## Less memory
#
# The same graph with another objective: the least peak over both devices. The peak is counted along
# the order of items; over time, where the devices' work overlaps, it may be higher, and the table
# shows both.

# %%
small = egx.Execution(model, machine, objective="peak_memory")
spread = egx.optimize(small, "brkga", budget=BUDGET, options={"seeds": "all"})
best = judge_execution(small, spread)
best.table()

# %%
gantt(small, best.best.decisions)

# %% [markdown]
# ## Searchers on a random graph
#
# A graph of the kind that the paper trains on, two devices and transfers that take no time. All
# searchers have one budget, and three seeds each.

# %%
free = egx.hardware.regal_hardware(2)
unseen = regal_synthetic(np.random.default_rng(2026), "watts_strogatz", 100)
puzzle = egx.Execution(unseen, free)
comparison = egx.compare(puzzle, ["regal", "brkga", "annealing", "random"], budget=BUDGET, seeds=3)
comparison.table()

# %% [markdown]
# `regal` is `brkga` with proposals of a trained network, which comes with egx and has not seen this
# graph. Side by side on more of them, with the same seed and budget, padded to one size so that one
# program serves all. On these four the two end within about half a percent of each other at 5,000
# evaluations; which is ahead differs from graph to graph.

# %%
rngs = [np.random.default_rng((7, seed)) for seed in range(4)]
graphs = [regal_synthetic(rng, "barabasi_albert", 100).graph for rng in rngs]
sizes = bucket_sizes(*graphs)
print("brkga      regal      gain")
for graph in graphs:
    task = egx.Execution(pad_graph(graph, sizes), free)
    runs = [egx.optimize(task, name, budget=BUDGET) for name in ("brkga", "regal")]
    plain, learned = (1e3 * run.cost for run in runs)
    print(f"{plain:6.3f} ms  {learned:6.3f} ms  {100 * (1 - learned / plain):+.1f} %")

# %% [markdown]
# From the command line: `egx optimize bert --problem execution --hardware nnpi --devices 2`, and to
# train a policy on graphs of your own `egx train --data DIR --out policy`.
