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
# # Memory placement
#
# The problem behind `egx optimize`, after Khadka et al., "Optimizing Memory Placement using
# Evolutionary Graph Reinforcement Learning" (ICLR 2021): what a candidate is, what it costs, how
# searchers compare on it, and what a proof is worth.

# %%
import dataclasses
import os

import jax
import jax.numpy as jnp
import numpy as np

import egx
from egx import report
from egx.report.style import look, new_figure

BUDGET = int(os.environ.get("EGX_NOTEBOOK_BUDGET", "4000"))

SOLVER_S = min(20.0, BUDGET / 100)  # less for quick runs

model = egx.load("resnet101")
machine = egx.hardware.load("nnpi")
problem = egx.MemoryPlacement(model, machine)

# %% [markdown]
# ## Candidates and their cost
#
# A candidate has two decisions for each op: the level of its weights and the level of its outputs.
# Level 0 is the backing memory, the last level is the fastest. `evaluate` is a pure JAX function of
# one candidate, so a thousand of them are one `vmap`.

# %%
ops = problem.graph.num_ops
keys = jax.random.split(jax.random.key(0), 2)
population = {
    "weights": jax.random.randint(keys[0], (1000, ops), 0, 3, jnp.int32),
    "activations": jax.random.randint(keys[1], (1000, ops), 0, 3, jnp.int32),
}
outcomes = jax.jit(jax.vmap(problem.evaluate))(population)
print(f"native: {1e6 * float(problem.reference_cost):.1f} µs")
print(f"fit: {int(outcomes.feasible.sum())} of 1000")
print(f"best at random: {1e6 * float(outcomes.latency_s.min()):.1f} µs")

# %% [markdown]
# Hardly any fits. What does not fit is rectified, as a compiler would do it, and valued so, but it
# counts as infeasible; `moved_fraction` says how far it is from fitting.


# %%
@look()
def histogram(outcomes):
    """The latencies of many candidates, those that fit apart from those that do not."""
    figure = new_figure(7, 2.8)
    axes = figure.subplots()
    fits = np.asarray(outcomes.feasible)
    latency = 1e6 * np.asarray(outcomes.latency_s)
    bins = np.linspace(latency.min(), np.quantile(latency, 0.995), 50)
    axes.hist([latency[fits], latency[~fits]], bins, stacked=True, color=["#0072B2", "#CBD0D8"])
    axes.axvline(1e6 * float(problem.reference_cost), color="#2B2F36", ls="--")
    axes.legend(["native", "fits", "rectified first"])
    axes.set(xlabel="latency (µs)", ylabel="placements", title="1000 placements at random")
    return figure


histogram(outcomes)

# %% [markdown]
# ## Searchers
#
# All under one budget, three seeds each. The band reaches from the best to the worst seed.

# %%
solution = egx.exact(problem, time_limit_s=SOLVER_S)
comparison = egx.compare(
    problem, ["egrl_plus", "annealing", "local", "random"], budget=BUDGET, seeds=3, bound=solution
)
comparison.table()

# %%
lines = {
    "native": comparison.reference_cost,
    "optimum" if solution.status == "proved" else "bound": solution.bound,
}
report.convergence(comparison.curves(), lines, title="resnet101 on nnpi")

# %% [markdown]
# ## What moves
#
# The best plan of all, against native. Rows are native levels, columns those of the plan.

# %%
best = comparison.best
report.transition(problem, best.reference, best.decisions, names=("native", best.algorithm))

# %%
report.occupancy_over_steps(
    problem, best.reference, best.decisions, names=("native", best.algorithm)
)

# %% [markdown]
# ## Prefetch
#
# With `prefetch=k`, the weights of an op may stream in while up to k ops before it run, and an op
# waits until all of its weights are there. Where the time goes changes with it:

# %%
ahead = egx.MemoryPlacement(model, machine, prefetch=2)
planned = egx.exact(ahead, time_limit_s=SOLVER_S)
print(f"native {1e6 * float(ahead.reference_cost):.1f} µs, solver {1e6 * planned.cost:.1f} µs")
print(f"{planned.status}: no plan is faster than {1e6 * planned.bound:.1f} µs")
report.latency_by_op(
    report.latency_parts(ahead, ahead.reference),
    report.latency_parts(ahead, planned.decisions),
    title="resnet101 on nnpi, prefetch 2",
    names=("native", "solver"),
)

# %% [markdown]
# ## How much fast memory does this model need?
#
# Hardware numbers are data, so a sweep is a loop over machines. Native needs more than twice the
# cache of the best plan for the same latency: a better plan is worth silicon.

# %%
numbers = {
    field.name: getattr(machine, field.name)
    for field in dataclasses.fields(machine)
    if field.name != "labels"
}


def with_cache(mib):
    """The same problem on a machine with another cache."""
    levels = np.array(machine.level_bytes)
    levels[0, 1] = mib * 2**20
    return egx.MemoryPlacement(model, egx.Hardware(**{**numbers, "level_bytes": levels}))


sizes = [8, 16, 24, 32, 40, 48]
problems = [with_cache(mib) for mib in sizes]
answers = [egx.exact(one, time_limit_s=SOLVER_S / 4) for one in problems]


@look()
def sweep():
    """Latency against the size of the cache; hollow dots are not proved to be optimal."""
    figure = new_figure(7, 3.4)
    axes = figure.subplots()
    native = [1e6 * float(one.reference_cost) for one in problems]
    best = [1e6 * answer.cost for answer in answers]
    proved = ["#0072B2" if answer.status == "proved" else "white" for answer in answers]
    axes.plot(sizes, native, "--o", color="#2B2F36", label="native", ms=4)
    axes.plot(sizes, best, "-", color="#0072B2", label="best known plan")
    axes.scatter(sizes, best, c=proved, edgecolors="#0072B2", s=22, zorder=3)
    axes.set(xlabel="cache (MiB)", ylabel="latency (µs)", ylim=(0.8 * min(best), None))
    axes.set_title("resnet101: latency by size of the cache")
    axes.grid(axis="y")
    axes.legend()
    return figure


sweep()
