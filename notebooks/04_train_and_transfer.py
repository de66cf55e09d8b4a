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
# # Train and transfer
#
# Fusion, placement and order decided at once, by one network that is trained on some graphs and
# used on others: Zhou et al., "Transferable Graph Optimizers for ML Compilers" (GO, NeurIPS 2020).
# The last part runs a plan for real. This process needs two devices for it: on a CPU, XLA makes
# them if it is told so before JAX is imported, and one kernel is to use one thread.

# %%
import os

os.environ["XLA_FLAGS"] = (
    "--xla_force_host_platform_device_count=2 --xla_cpu_multi_thread_eigen=false "
    + os.environ.get("XLA_FLAGS", "")
)

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import egx
from egx import report
from egx.execution.calibration import Sizes
from egx.report.gantt import gantt
from egx.report.tables import Table
from egx.report.units import format_bytes, format_seconds
from egx.simulate.fine import FineOptions, check_plan

BUDGET = int(os.environ.get("EGX_NOTEBOOK_BUDGET", "1000"))

# %% [markdown]
# ## Training steps as graphs
#
# The zoo builds the forward pass, the backward pass and the updates. Here they have so few layers
# and steps that one core is enough. What is decided: which producers are fused into their
# consumers, which of two GPUs runs each kernel, and which kernel goes first when several could
# (`order="runtime"`: a device takes, of what has arrived, what has the highest priority).

# %%
machine = egx.hardware.load("p100x2")


def joint(name, **sizes):
    decide = ("fusion", "device", "priority")
    return egx.Execution(egx.load(name, **sizes), machine, decide=decide, order="runtime")


seen = [
    joint("rnnlm", layers=1, steps=2, vocabulary=4000),
    joint("rnnlm", layers=2, steps=2, vocabulary=4000),
    joint("transformer_xl", layers=1),
    joint("wavenet", stacks=1, layers=2),
]
unseen = joint("gnmt", layers=1, steps=2, vocabulary=4000)
for problem in (*seen, unseen):
    print(problem.model.value)

# %% [markdown]
# ## Train, keep, load
#
# A step of PPO draws eight plans for each graph and values them, in one program. Now and then the
# likeliest plan of each graph is judged against the best heuristic, and the best network so far is
# what `train` returns. With `checkpoint_dir`, a training that was stopped goes on with
# `resume=True`. The network is a small one: one round of GraphSAGE, one layer of attention and the
# layer that the three tasks share, one pass.

# %%
network = {"width": 64, "rounds": 1, "layers": 1, "passes": 1, "segment": 512}
options = {f"network.{name}": value for name, value in network.items()}
options |= {"problems": 4, "samples": 8, "validation.every": 10}
untrained = egx.train(seen, "go", steps=0, options=options)
policy = egx.train(seen, "go", steps=BUDGET // 8, options=options, checkpoint_dir="training")
policy.save("policy.npz")
policy = egx.load_policy("policy.npz")
print(f"{os.path.getsize('policy.npz') / 2**20:.1f} MiB")

# %% [markdown]
# ## A graph of a family that it has not seen
#
# Zero-shot is the likeliest plan of the network for the new graph: one evaluation and no search.
# Fine-tuned, the network learns from the plans that it draws for it; from scratch, an untrained
# one does. `brkga_seeded` is a genetic algorithm that begins with all known plans.

# %%
decide = eqx.filter_jit(lambda policy, problem: policy.decide(problem))
runs = {
    "fine-tuned": egx.optimize(unseen, "go", budget=BUDGET, policy=policy),
    "from scratch": egx.optimize(unseen, "go", budget=BUDGET, policy=untrained),
    "brkga_seeded": egx.optimize(unseen, "brkga_seeded", budget=BUDGET),
}
known = unseen.heuristics()
plans = {
    "TensorFlow default": (known["tensorflow"], 1),
    "human expert": (known["expert_fused"], 1),
    "HEFT, fused": (known["heft_fused"], 1),
    "HEFT that minds readers": (known["heft_readers"], 1),
    "GO untrained, zero-shot": (decide(untrained, unseen), 1),
    "GO zero-shot": (decide(policy, unseen), 1),
    "GO from scratch": (runs["from scratch"].decisions, BUDGET),
    "GO fine-tuned": (runs["fine-tuned"].decisions, BUDGET),
    "brkga_seeded": (runs["brkga_seeded"].decisions, BUDGET),
}
comparison = egx.Comparison({name: [run] for name, run in runs.items()}, BUDGET)
lines = {"reference": runs["fine-tuned"].reference_cost}
report.convergence(comparison.curves(), lines, quantity="step time", reference="reference")

# %% [markdown]
# Each plan under the model that was searched, and under a finer one that shares no code with it:
# transfers share their link and the one slot that each GPU has, and a host issues the kernels one
# by one, so that many tiny kernels wait for it. Memory is the most that a device holds over time.

# %%
evaluate = eqx.filter_jit(lambda problem, plan: problem.evaluate(plan))
slot = FineOptions(port_bytes_per_s=15.75e9)
base = float(evaluate(unseen, known["expert_fused"]).cost)
rows = []
for name, (plan, evaluations) in plans.items():
    cost = float(evaluate(unseen, plan).cost)
    fine = check_plan(unseen, plan, options=slot)
    gain = f"{100 * (1 - cost / base):+.1f} %"
    peak = format_bytes(int(fine.peak_bytes.max()))
    cells = (format_seconds(cost), gain, format_seconds(fine.makespan_s), peak, f"{evaluations:,}")
    rows.append((name, *cells))
header = ("plan", "step time", "less than human", "finer model", "memory", "evaluations")
Table(header, tuple(rows))

# %% [markdown]
# At this budget (125 steps of training, a small network, one seed) nothing was carried over: the
# trained network's first plan has the step time of the TensorFlow default, and fine-tuned it ends
# where GO ends from scratch, 1.6 % below the default and 1.3 % behind the human expert. List
# scheduling that counts what an op's readers already have elsewhere takes 19.5 % less than the
# human's plan, under both models, and the genetic algorithm that begins with it finds nothing
# better. `experiments/go` measures on the whole workloads, where `go_plus` goes further.
#
# What the best plan does on each GPU:

# %%
gantt(unseen, min(plans.values(), key=lambda one: float(evaluate(unseen, one[0]).cost))[0])

# %% [markdown]
# ## A plan that runs
#
# `egx.trace` makes a graph of any JAX function, here of a training step of two towers.
# `egx.calibrate` measures the devices of this process and writes them as a machine file.


# %%
class Towers(eqx.Module):
    towers: list[eqx.nn.MLP]

    def __init__(self, width, *, key):
        keys = jax.random.split(key)
        self.towers = [eqx.nn.MLP(width, 16, 2 * width, 1, key=k) for k in keys]

    def __call__(self, x):
        return sum(tower(x) for tower in self.towers)


def step(net, x, y):
    def loss(net):
        return jnp.mean(jnp.square(jax.vmap(net)(x) - y))

    value, gradient = eqx.filter_value_and_grad(loss)(net)
    return eqx.apply_updates(net, jax.tree.map(lambda g: -1e-2 * g, gradient)), value


x, y = jax.random.normal(jax.random.key(1), (256, 256)), jnp.zeros((256, 16))
args = (Towers(256, key=jax.random.key(0)), x, y)
model = egx.trace(step, *args)
here = egx.calibrate("here.toml", sizes=Sizes(repeats=3))
real = egx.Execution(model, here, decide=("fusion", "device", "priority"))
found = egx.optimize(real, "brkga_seeded", budget=BUDGET)
print(model)

# %% [markdown]
# `egx.execute` compiles each cluster of fused ops by itself, puts it on its device and starts them
# in the plan's order. Outputs are those of the plain function, up to rounding.
#
# The simulator takes the two devices for separate ones. Here they share two cores, their caches and
# the Python thread that starts the segments. In the outputs kept here fusing pays as simulated, and
# the plan on both devices, which should take a third less, gains nothing. On machines with devices
# of their own the same cell says what such a plan is worth; `experiments/go/measured.py` compares
# simulated with measured seconds over many plans.

# %%
expected = jax.tree.leaves(eqx.filter(eqx.filter_jit(step)(*args), eqx.is_array))
zeros = np.zeros(real.graph.num_ops, np.int32)
alone = {"device": zeros, "priority": zeros.astype(np.float32)}
rows = []
for name, plan in {
    "one device, nothing fused": {**alone, "fusion": zeros},
    "one device, all fused": {**alone, "fusion": zeros + 1},
    "found": found.decisions,
}.items():
    done = egx.execute(step, args, plan, repeats=15)
    got = jax.tree.leaves(eqx.filter(done.outputs, eqx.is_array))
    error = max(float(jnp.max(jnp.abs(a - b))) for a, b in zip(expected, got, strict=True))
    assert error < 1e-4
    cost = float(evaluate(real, plan).cost)
    cells = (format_seconds(cost), format_seconds(done.seconds), f"{error:.0e}")
    rows.append((name, *cells, str(done.segments), str(done.transfers)))
header = ("plan", "simulated", "measured", "largest difference", "segments", "transfers")
cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
Table(header, tuple(rows), note=f"{len(jax.devices())} devices on {cores} processor core(s)")
