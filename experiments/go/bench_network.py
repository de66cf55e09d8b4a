"""Seconds and memory of GO's network at its full size, and of a step of PPO.

    taskset -c 1 python experiments/go/bench_network.py             # a table
    taskset -c 1 python experiments/go/bench_network.py --out FILE  # the same as JSON too

Each size runs in a process of its own, so that the peak of its resident memory is its own; CPU
seconds of the process are a fair measure on a machine that others use too. The graphs are random
layered ones on 8 devices, all three tasks are decided, and the network has its default sizes.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from egx.graph.builder import GraphBuilder
from egx.graph.graph import OP_CLASSES, Graph
from egx.graph.padding import bucket_sizes, pad_graph
from egx.hardware.spec import Hardware
from egx.policies.distributions import Logits, greedy, sample
from egx.policies.go_inputs import GoContext
from egx.policies.go_net import GoPolicy
from egx.problems.execution import Execution
from egx.problems.padded import stack_problems
from egx.search.ppo import PPO, learn, new_learner

ZERO_SHOT = (1_000, 10_000, 80_000)
PPO_GRAPHS, PPO_OPS, PPO_SAMPLES = 8, 500, 8
DEVICES = 8
TASKS = ("fusion", "device", "priority")


def layered(ops: int, seed: int = 0) -> Graph:
    """Ops that read from one to three of the 40 before them."""
    rng = np.random.default_rng(seed)
    builder, made = GraphBuilder("layered"), []
    for index in range(ops):
        near = made[-40:]
        count = min(len(near), int(rng.integers(1, 4)))
        read = [near[i] for i in rng.choice(len(near), count, replace=False)] if near else []
        made += builder.op(
            f"op{index}",
            kind=OP_CLASSES[int(rng.integers(4))],
            op_type="any",
            inputs=read,
            output_bytes=[int(rng.integers(1_000, 1_000_000))],
            flops=float(rng.integers(1_000_000, 1_000_000_000)),
        )
    builder.output(made[-1])
    return builder.build()


def machine() -> Hardware:
    square = (DEVICES, DEVICES)
    return Hardware(
        flops_per_s=np.full((DEVICES, len(OP_CLASSES)), 1e13),
        level_bytes=np.full((DEVICES, 1), 16e9),
        read_bytes_per_s=np.full((DEVICES, 1), 7e11),
        write_bytes_per_s=np.full((DEVICES, 1), 7e11),
        link_bytes_per_s=np.full(square, 1e10),
        link_latency_s=np.full(square, 1e-5),
        launch_s=np.full(DEVICES, 1e-6),
    )


def measure(function: Any, *arguments: Any, runs: int = 2) -> dict[str, float]:
    """Seconds to compile, then the least CPU and wall-clock seconds of some runs; MiB that the
    compiler set aside for what lies between inputs and outputs."""
    began = time.process_time()
    compiled = eqx.filter_jit(function).lower(*arguments).compile()
    compile_s = time.process_time() - began
    aside = compiled.compiled.memory_analysis().temp_size_in_bytes // 2**20
    took = []
    for _ in range(runs):
        cpu, wall = time.process_time(), time.perf_counter()
        jax.block_until_ready(compiled(*arguments))
        took.append((time.process_time() - cpu, time.perf_counter() - wall))
    return {
        "compile_cpu_s": round(compile_s, 2),
        "temporary_mib": aside,
        "cpu_s": round(min(cpu for cpu, _ in took), 3),
        "wall_s": round(min(wall for _, wall in took), 3),
    }


def policy() -> GoPolicy:
    made = eqx.filter_jit(lambda key: GoPolicy(TASKS, key=key))
    return made(jax.random.key(0))


def zero_shot(ops: int) -> dict[str, Any]:
    """Inputs and one inference, to decisions."""
    problem = Execution(layered(ops), machine(), decide=TASKS)
    before = peak_mib()
    found = measure(lambda policy, problem: greedy(policy(problem)), policy(), problem)
    return {"what": "zero-shot", "ops": ops, **found, "peak_mib": peak_mib(), "before_mib": before}


def gradient(ops: int) -> dict[str, Any]:
    """One gradient of the network on one graph."""
    problem = Execution(layered(ops), machine(), decide=TASKS)
    context = eqx.filter_jit(lambda policy, problem: policy.context(problem))(policy(), problem)
    before = peak_mib()

    def slope(policy: GoPolicy, context: GoContext) -> Any:
        def loss(policy: GoPolicy) -> Any:
            logits = policy.logits(context)
            return sum(jnp.mean(jax.nn.log_softmax(x)[:, 0]) for x in logits.values())

        return eqx.filter_grad(loss)(policy)

    found = measure(slope, policy(), context, runs=1)
    return {"what": "gradient", "ops": ops, **found, "peak_mib": peak_mib(), "before_mib": before}


def ppo_step() -> dict[str, Any]:
    """Drawing plans and all epochs on them, without the simulator."""
    graphs = [layered(PPO_OPS, seed) for seed in range(PPO_GRAPHS)]
    sizes = bucket_sizes(*graphs)
    problems = stack_problems(
        [Execution(pad_graph(graph, sizes), machine(), decide=TASKS) for graph in graphs], sizes
    )
    net, ppo = policy(), jax.tree.map(jnp.asarray, PPO())
    inputs = eqx.filter_jit(lambda net, many: jax.vmap(net.context)(many))(net, problems)
    before = peak_mib()

    def step(learner: Any, contexts: GoContext, key: Any) -> Any:
        def draw(context: GoContext, key: Any) -> tuple[Logits, Any]:
            logits = learner.policy.logits(context)
            keys = jax.random.split(key, PPO_SAMPLES)
            return logits, jax.vmap(lambda key: sample(logits, key=key))(keys)

        logits, levels = jax.vmap(draw)(contexts, jax.random.split(key, PPO_GRAPHS))
        advantage = jnp.broadcast_to(
            jnp.linspace(-1.0, 1.0, PPO_SAMPLES), (PPO_GRAPHS, PPO_SAMPLES)
        )
        return learn(ppo, learner, contexts, logits, levels, advantage)

    found = measure(step, new_learner(net), inputs, jax.random.key(1))
    return {
        "what": f"PPO step: {PPO_GRAPHS} graphs, {ppo.epochs} epochs",
        "ops": PPO_OPS,
        **found,
        "peak_mib": peak_mib(),
        "before_mib": before,
    }


def peak_mib() -> int:
    """The most resident memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--case", help="run one case here and print it as JSON")
    options = parser.parse_args()
    cases = {f"zero-shot {ops}": (zero_shot, ops) for ops in ZERO_SHOT}
    cases |= {"ppo": (ppo_step,), "gradient 80000": (gradient, 80_000)}
    if options.case is not None:
        function, *arguments = cases[options.case]
        print(json.dumps(function(*arguments)))
        return
    rows = []
    for case in cases:
        command = [sys.executable, __file__, "--case", case]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        rows.append(json.loads(done.stdout.splitlines()[-1]))
        print(rows[-1], flush=True)
    if options.out is not None:
        about = {
            "processor": platform.processor() or platform.machine(),
            "cores": len(os.sched_getaffinity(0)),
            "jax": jax.__version__,
        }
        options.out.write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
