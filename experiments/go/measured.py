"""Do simulated times rank plans as real ones do, and what does a found plan gain in reality?

    python experiments/go/measured.py                       # everything; nothing else should run
    python experiments/go/measured.py --plans 3 --budget 64 --out /tmp/measured   # a look

Two training steps (an MLP-mixer and a convolution net with two branches a block) are traced and
this machine is calibrated. Then random plans (device, priority, fusion) are simulated, by the
simulator of the searches and by the finer model, and run on real devices; so are a few named
plans, and the one that `brkga_seeded` finds on the simulator. On a CPU the devices are shares of
one host, each with a thread of its own for kernels, so that two devices can be faster than one.

Rows are appended to `runs/measured/MODEL.jsonl` as they are measured, and what is there is not
measured again; the machine is measured once. Results are written to `results/measured.json`,
`measured.md` and `measured.toml`.
"""

# ruff: noqa: E402  # flags of XLA must be set before JAX is imported

from __future__ import annotations

import argparse
import json
import os
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

DEVICES = 2
# Before JAX starts. One kernel uses one thread: else a device would use the cores of all.
os.environ["XLA_FLAGS"] = (
    f"--xla_force_host_platform_device_count={DEVICES} --xla_cpu_multi_thread_eigen=false "
    + os.environ.get("XLA_FLAGS", "")
).strip()

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from scipy.stats import spearmanr

import egx
from egx.execution.runner import Runner
from egx.execution.timing import median_seconds
from egx.files import write_whole
from egx.formats.jaxpr import trace_ops
from egx.graph.graph import real_sizes
from egx.report.tables import Table
from egx.report.units import format_seconds
from egx.simulate.fine import check_plan
from egx.training.identity import versions

HERE = Path(__file__).parent
OPTIMIZER = optax.sgd(1e-3, momentum=0.9)
SEARCH = "brkga_seeded"
Row = dict[str, Any]


class MixerBlock(eqx.Module):
    """Tolstikhin et al., "MLP-Mixer", NeurIPS 2021 (arXiv 2105.01601): tokens, then channels."""

    norms: list[eqx.nn.LayerNorm]
    tokens: eqx.nn.MLP
    channels: eqx.nn.MLP

    def __init__(self, tokens: int, width: int, *, key: jax.Array):
        first, second = jax.random.split(key)
        self.norms = [eqx.nn.LayerNorm(width) for _ in range(2)]
        self.tokens = eqx.nn.MLP(tokens, tokens, 2 * tokens, 1, jax.nn.gelu, key=first)
        self.channels = eqx.nn.MLP(width, width, 4 * width, 1, jax.nn.gelu, key=second)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + jax.vmap(self.tokens, 1, 1)(jax.vmap(self.norms[0])(x))
        return x + jax.vmap(self.channels)(jax.vmap(self.norms[1])(x))


class Mixer(eqx.Module):
    """Patches in, a number a class out."""

    embed: eqx.nn.Linear
    blocks: list[MixerBlock]
    head: eqx.nn.Linear

    def __init__(self, *, key: jax.Array):
        keys = jax.random.split(key, 4)
        self.embed = eqx.nn.Linear(48, 64, key=keys[0])
        self.blocks = [MixerBlock(64, 64, key=k) for k in keys[1:3]]
        self.head = eqx.nn.Linear(64, 10, key=keys[3])

    def __call__(self, x: jax.Array) -> jax.Array:
        x = jax.vmap(self.embed)(x)
        for block in self.blocks:
            x = block(x)
        return self.head(jnp.mean(x, 0))


class TwoBranches(eqx.Module):
    """Blocks of a wide and a narrow convolution beside each other, as in Inception."""

    wide: list[eqx.nn.Conv2d]
    narrow: list[eqx.nn.Conv2d]
    head: eqx.nn.Linear

    def __init__(self, *, key: jax.Array):
        keys = iter(jax.random.split(key, 7))
        sizes = [(3, 16, 1), (32, 16, 2), (32, 32, 2)]
        self.wide = [eqx.nn.Conv2d(i, o, 5, s, 2, key=next(keys)) for i, o, s in sizes]
        self.narrow = [eqx.nn.Conv2d(i, o, 3, s, 1, key=next(keys)) for i, o, s in sizes]
        self.head = eqx.nn.Linear(64, 10, key=next(keys))

    def __call__(self, x: jax.Array) -> jax.Array:
        for wide, narrow in zip(self.wide, self.narrow, strict=True):
            x = jnp.concatenate([jax.nn.relu(wide(x)), jax.nn.relu(narrow(x))])
        return self.head(jnp.mean(x, (1, 2)))


def training_step(net: Any, state: Any, x: jax.Array, y: jax.Array) -> tuple[Any, Any, jax.Array]:
    """(net, state, loss) after one step of gradient descent with momentum."""

    def loss(net: Any) -> jax.Array:
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(jax.vmap(net)(x), y))

    value, gradient = eqx.filter_value_and_grad(loss)(net)
    update, state = OPTIMIZER.update(gradient, state, net)
    return eqx.apply_updates(net, update), state, value


def _case(net: eqx.Module, shape: tuple[int, ...]) -> tuple[Any, ...]:
    state = OPTIMIZER.init(eqx.filter(net, eqx.is_array))
    x = jax.random.normal(jax.random.key(1), shape)
    return net, state, x, jnp.arange(shape[0]) % 10


MODELS: dict[str, Callable[[], tuple[Any, ...]]] = {
    "mixer": lambda: _case(Mixer(key=jax.random.key(0)), (16, 64, 48)),
    "convolutions": lambda: _case(TwoBranches(key=jax.random.key(0)), (8, 3, 32, 32)),
}


def random_plan(rng: np.random.Generator, ops: int, levels: int) -> dict[str, np.ndarray]:
    """Plans from good to bad: how many ops leave device 0, how long neighbours stay together,
    and how many ops fuse is drawn too; else all plans would be alike, and bad."""
    length = int(np.exp(rng.uniform(0, np.log(ops))))
    blocks = rng.random(-(-ops // length)) < rng.random()
    fused = rng.random(ops) < rng.random()
    priority = 1 - np.arange(ops) / ops
    noise = rng.random()
    return {
        "device": np.repeat(blocks, length)[:ops].astype(np.int32),
        "fusion": np.where(fused, rng.integers(1, levels, ops), 0).astype(np.int32),
        "priority": ((1 - noise) * priority + noise * rng.random(ops)).astype(np.float32),
    }


def named_plans(problem: egx.Execution, budget: int, seed: int) -> Iterator[tuple[str, Any]]:
    """One device, unfused and fused wherever legal; the best known heuristic; what is found."""
    ops = problem.graph.num_ops
    alone = {"device": np.zeros(ops, np.int32), "priority": np.zeros(ops, np.float32)}
    yield "one device, unfused", {**alone, "fusion": np.zeros(ops, np.int32)}
    yield "one device, fused", {**alone, "fusion": np.ones(ops, np.int32)}
    heuristics = problem.heuristics()
    costs = {name: float(problem.evaluate(heuristics[name]).cost) for name in heuristics}
    best = min(costs, key=lambda name: costs[name])
    yield f"best heuristic ({best})", heuristics[best]
    result = egx.optimize(problem, SEARCH, budget=budget, seed=seed)
    yield f"found ({SEARCH}, {budget} evaluations)", result.decisions


class Log:
    """Rows in a file, by their name."""

    def __init__(self, path: Path):
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = path.read_text().splitlines() if path.exists() else []
        self.rows: dict[str, Row] = {row["name"]: row for row in map(json.loads, lines)}

    def add(self, row: Row) -> None:
        self.rows[row["name"]] = row
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(json.dumps(row), flush=True)


def measure(name: str, machine: egx.Hardware, options: argparse.Namespace) -> Row:
    """The rows of a model, measured where they are not there yet, and what they say together."""
    args = MODELS[name]()
    traced = trace_ops(training_step, args, name=name)
    problem = egx.Execution(traced.model, machine, decide=("fusion", "device", "priority"))
    runner = Runner(traced, args, jax.devices()[:DEVICES])
    log = Log(options.out / "runs" / "measured" / f"{name}.jsonl")
    ops = real_sizes(problem.graph)[0]

    def row(plan: str, decisions: Mapping[str, Any]) -> Row:
        given = {key: np.asarray(value) for key, value in decisions.items()}
        done = runner.run(given, repeats=options.repeats, warmup=2)
        return {
            "name": plan,
            "simulated_s": float(problem.evaluate(given).cost),
            "fine_s": float(check_plan(problem, given).makespan_s),
            "measured_s": done.seconds,
            "runs_s": list(done.runs_s),
            "segments": done.segments,
            "transfers": done.transfers,
        }

    for k in range(options.plans):
        if f"random {k}" not in log.rows:
            rng = np.random.default_rng((options.seed, zlib.crc32(name.encode()), k))
            log.add(row(f"random {k}", random_plan(rng, ops, problem.fusion_levels)))
    if "plain jit" not in log.rows:
        arrays, static = eqx.partition(args, eqx.is_array)
        whole = jax.jit(lambda a: eqx.filter(training_step(*eqx.combine(a, static)), eqx.is_array))
        seconds = median_seconds(lambda: whole(arrays), repeats=options.repeats, warmup=2)
        log.add({"name": "plain jit", "measured_s": seconds})
    # The last plan is the dearest to find: by its name it is known whether it must be.
    found = f"found ({SEARCH}, {options.budget} evaluations)"
    if found not in log.rows:
        for plan, decisions in named_plans(problem, options.budget, options.seed):
            if plan not in log.rows:
                log.add(row(plan, decisions))
    return summary(name, ops, log.rows, found, options)


def summary(
    name: str, ops: int, rows: Mapping[str, Row], found: str, options: argparse.Namespace
) -> Row:
    """Rank correlations over the random plans, and gains of the found one."""
    plans = [rows[f"random {k}"] for k in range(options.plans)]
    measured = np.array([plan["measured_s"] for plan in plans])
    said: Row = {"model": name, "ops": ops, "plans": len(plans)}
    for model in ("simulated_s", "fine_s"):
        guessed = np.array([plan[model] for plan in plans])
        rank = spearmanr(guessed, measured)
        said[model.replace("_s", "_rank")] = float(rank.statistic)
        said[model.replace("_s", "_p")] = float(rank.pvalue)
        said[model.replace("_s", "_scale")] = float(np.median(measured / guessed))
    alone, best, jit = rows["one device, fused"], rows[found], rows["plain jit"]
    said["gain_simulated"] = alone["simulated_s"] / best["simulated_s"]
    said["gain_measured"] = alone["measured_s"] / best["measured_s"]
    said["gain_on_jit"] = jit["measured_s"] / best["measured_s"]
    names = [n for n in rows if not n.startswith("random ")]
    said["named"] = {n: rows[n] for n in names}
    said["random"] = plans
    return said


def tables(said: list[Row], machine: egx.Hardware) -> str:
    """What was found, for people."""
    ranks = Table(
        ("model", "ops", "plans", "Spearman, simulator", "p", "Spearman, finer model", "p",
         "measured / simulated"),
        tuple(
            (s["model"], str(s["ops"]), str(s["plans"]), f"{s['simulated_rank']:.3f}",
             f"{s['simulated_p']:.1g}", f"{s['fine_rank']:.3f}", f"{s['fine_p']:.1g}",
             f"{s['simulated_scale']:.2f}")
            for s in said
        ),
        title="Random plans: do simulated and measured seconds rank alike?",
        note="The last column is a median; a factor that all plans share changes no rank.",
    )  # fmt: skip
    rows = []
    for s in said:
        for name, row in s["named"].items():
            guessed = row.get("simulated_s")
            rows.append((
                s["model"], name, "" if guessed is None else format_seconds(guessed),
                format_seconds(row["measured_s"]), str(row.get("segments", 1)),
                str(row.get("transfers", 0)),
            ))  # fmt: skip
    header = ("model", "plan", "simulated", "measured", "segments", "transfers")
    plans = Table(header, tuple(rows), title="Named plans", left=(0, 1))
    gains = "".join(
        f"- {s['model']}: the found plan is {s['gain_measured']:.2f}x as fast as one device, fused "
        f"(simulated: {s['gain_simulated']:.2f}x), and {s['gain_on_jit']:.2f}x as fast as plain "
        "`jax.jit` on one device.\n"
        for s in said
    )
    where = f"On {machine.num_devices} devices: {jax.devices()[0].device_kind}."
    return f"# Plans on real devices\n\n{where}\n\n{ranks}\n{gains}\n{plans}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--plans", type=int, default=50, help="random plans (default: 50)")
    parser.add_argument("--budget", type=int, default=2000, help="of the search (default: 2000)")
    parser.add_argument("--repeats", type=int, default=15, help="runs a plan (default: 15)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=HERE, help="(default: beside this file)")
    options = parser.parse_args()
    file = options.out / "results" / "measured.toml"
    if file.exists():
        machine = egx.hardware.load(file)
    else:
        machine = egx.calibrate(file, name="this machine", devices=jax.devices()[:DEVICES])
    said = [measure(name, machine, options) for name in options.models]
    results = options.out / "results"
    content = {
        "versions": versions(),
        "device": jax.devices()[0].device_kind,
        "cpus": os.cpu_count(),
        "options": {k: v for k, v in vars(options).items() if k not in ("out", "models")},
        "models": said,
    }
    write_whole(results / "measured.json", json.dumps(content, indent=1) + "\n")
    text = tables(said, machine)
    write_whole(results / "measured.md", text)
    print(text)


if __name__ == "__main__":
    main()
