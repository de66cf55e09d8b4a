# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Quickstart
#
# Where should each tensor of a network lie? An accelerator has a large slow memory and small fast
# ones, and the compiler's rule of thumb leaves time on the table. egx searches for a better
# placement and says how far from the best possible it is.
#
# On the command line this whole page is `egx optimize resnet101`.

# %%
import os

import egx
from egx import report

BUDGET = int(os.environ.get("EGX_NOTEBOOK_BUDGET", "4000"))

model = egx.load("resnet101")  # a zoo name, or the path of an .onnx file
machine = egx.hardware.load("nnpi")  # a preset, or the path of a .toml file
problem = egx.MemoryPlacement(model, machine)

# %% [markdown]
# The model in figures, and the machine it is for:

# %%
report.model_table(model)

# %%
report.hardware_table(machine)

# %% [markdown]
# ## Search
#
# `native` is the compiler's heuristic: outputs on the fastest level, weights on the next, and what
# does not fit moves down. Every algorithm gets the same budget of simulated inferences.

# %%
result = egx.optimize(problem, "egrl_plus", budget=BUDGET, seed=0)
print(result)

# %% [markdown]
# Is that good? An exact solver bounds what any placement can reach, and often proves the optimum.

# %%
solution = egx.exact(problem, time_limit_s=min(20.0, BUDGET / 100))  # less for quick runs
verdict = report.judge(problem, result, solution)
verdict.table()

# %% [markdown]
# The search starts near its end: `egrl_plus` takes its first plans from a relaxation of the
# problem, and spends the budget on the last percent.

# %%
history = result.history
report.convergence(
    {"egrl_plus": [(history.evaluations, history.best_cost)]},
    {
        "native": result.reference_cost,
        "first fit": verdict.plan("first fit").latency_s,
        "optimum" if solution.status == "proved" else "bound": solution.bound,
    },
    title="resnet101 on nnpi",
)

# %% [markdown]
# ## What changed
#
# Native fills the cache (LLC) with the weights of the first layers, which happen to come first. The
# last layers are the large ones, and they are left in DRAM. The found plan keeps those in the cache
# and lets the small early weights stream from DRAM, where they hide behind the compute.

# %%
report.level_strips(problem, result.reference, result.decisions)

# %%
report.latency_by_op(
    report.latency_parts(problem, result.reference),
    report.latency_parts(problem, result.decisions),
    title="resnet101 on nnpi",
)

# %% [markdown]
# ## Take it with you
#
# A plan is a JSON file with a record for every tensor: its level, its bytes, its first and last
# step. It carries the machine's numbers, so anyone can check it: `egx check plan.json`.

# %%
plan = report.make_plan(problem, verdict.best.decisions, name=verdict.best.name, result=result)
report.write_plan(plan, "plan.json")
check = report.check_plan(report.read_plan("plan.json"), model)
print("valid:", check.ok, f"  latency: {1e6 * check.latency_s:.1f} µs")
plan.tensors[0]
