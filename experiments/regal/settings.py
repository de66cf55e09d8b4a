"""What is compared on: settings, the graphs of their corpora, and the problems made of both."""

from __future__ import annotations

import csv
import dataclasses
import functools
import itertools
import runpy
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

import egx
from egx.formats.dnn_partitioning import load_dnn_partitioning
from egx.graph.corpus import perturb, perturb_seconds, topology_digest
from egx.graph.graph import Model, real_sizes
from egx.graph.padding import pad_graph
from egx.hardware.machines import regal_hardware, with_devices
from egx.hardware.spec import Hardware
from egx.problems.base import Decisions
from egx.training.synthetic import synthetic_models

DATA: Path = runpy.run_path(str(Path(__file__).parents[1] / "data.py"))["DATA"]


@dataclasses.dataclass(frozen=True)
class Setting:
    """One corpus on one kind of machine with one objective; `exact` graphs go to the solver."""

    corpus: str
    devices: int
    transfers: str
    objective: str
    graphs: int
    exact: int
    capped: bool = False

    @property
    def name(self) -> str:
        parts = [self.corpus, str(self.devices), self.transfers, self.objective]
        return "_".join([*parts, "capped"] if self.capped else parts)


@dataclasses.dataclass(frozen=True, eq=False)
class Source:
    """A graph of a corpus; measured seconds [N, D] and a machine where its file has them."""

    name: str
    family: str
    model: Model
    seconds: np.ndarray | None = None
    machine: Hardware | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """A graph in a setting: the problem that is searched, and the one that plans are valued on
    again."""

    source: Source
    shape: tuple[int, int, int]
    problem: egx.Execution
    second: egx.Execution

    @property
    def name(self) -> str:
        return self.source.name


def _shape(model: Model, config: dict[str, Any]) -> tuple[int, int, int] | None:
    """The first padded size that holds the graph."""
    for sizes in config["padded_to"]:
        if all(have <= room for have, room in zip(real_sizes(model.graph), sizes, strict=True)):
            return sizes[0], sizes[1], sizes[2]
    return None


def sources(corpus: str, config: dict[str, Any], devices: int) -> Iterator[Source]:
    """The graphs of a corpus, always the same and in the same order."""
    kinds = {"synthetic": _synthetic, "dnn_partitioning": _dnn_partitioning, "onnx": _onnx}
    for source in kinds[corpus](config, devices):
        if _shape(source.model, config) is not None:
            yield source


@functools.cache
def _training_topologies(seeds: tuple[tuple[int, int], ...]) -> frozenset[str]:
    models = [list(itertools.islice(synthetic_models(seed=seed), count)) for seed, count in seeds]
    return frozenset(topology_digest(model) for some in models for model in some)


def _synthetic(config: dict[str, Any], devices: int) -> Iterator[Source]:
    del devices
    seen = _training_topologies(tuple((seed, count) for seed, count in config["training_seeds"]))
    taken: set[str] = set()
    for number, model in enumerate(synthetic_models(seed=config["seed"])):
        digest = topology_digest(model)
        if digest not in seen and digest not in taken:
            taken.add(digest)
            family = str(model.source).split("regal-")[-1].rsplit("-", 1)[0]
            yield Source(f"{number:04d}-{family}-{real_sizes(model.graph)[0]}", family, model)


def _dnn_partitioning(config: dict[str, Any], devices: int) -> Iterator[Source]:
    taken: set[str] = set()
    for folder in config["folders"]:
        for path in sorted((DATA / "dnn_partitioning" / folder).glob("*.json")):
            work = load_dnn_partitioning(path, accelerators=devices, cpus=0)
            if topology_digest(work.model) in taken:
                continue
            taken.add(topology_digest(work.model))
            assert work.hardware is not None
            name = f"{folder.split('/')[0]}-{path.stem}"
            seconds = work.seconds_on(work.hardware)
            yield Source(name, "training" if "training" in name else "inference", work.model,
                         seconds, work.hardware)  # fmt: skip


def _onnx(config: dict[str, Any], devices: int) -> Iterator[Source]:
    machine = with_devices(egx.hardware.load(config["machine"]), devices)
    taken: set[str] = set()
    with open(DATA / "onnx_corpus" / "manifest.csv", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["tier"] in config["tiers"]]
    largest = max(sizes[0] for sizes in config["padded_to"])
    for row in sorted(rows, key=lambda row: row["name"]):
        # Reading is what takes long; nodes are ops, or some more.
        if int(row["nodes"]) > largest or row["topology_sha256"] in taken:
            continue
        taken.add(row["topology_sha256"])
        paths = sorted((DATA / "onnx_corpus" / "graphs").rglob(row["file"] + "*"))
        if paths:
            model = egx.load(paths[0], granularity="op")
            yield Source(row["name"], row["family"], model, None, machine)


def _hardware(setting: Setting, source: Source) -> Hardware:
    """The machine of a setting, without memory limits."""
    if source.machine is None:
        return regal_hardware(setting.devices, transfers=setting.transfers)
    unlimited = jnp.full_like(source.machine.level_bytes, jnp.inf)
    hardware = eqx.tree_at(lambda h: h.level_bytes, source.machine, unlimited)
    return _links(hardware, jnp.inf, 0.0) if setting.transfers == "free" else hardware


def _links(hardware: Hardware, share: float, latency_s: float) -> Hardware:
    """Links of a share of their bandwidth, and of that latency."""
    between = ~np.eye(hardware.num_devices, dtype=bool)
    # A device has no link to itself: nothing, which no share of infinity may become.
    own = np.asarray(hardware.link_bytes_per_s, np.float64)
    rate = np.where(between, np.where(between, own, 1.0) * share, 0.0)
    delay = np.where(between, latency_s, 0.0)
    return eqx.tree_at(
        lambda h: (h.link_bytes_per_s, h.link_latency_s),
        hardware,
        (jnp.asarray(rate, jnp.float32), jnp.asarray(delay, jnp.float32)),
    )


def _second_hardware(setting: Setting, source: Source, config: dict[str, Any]) -> Hardware:
    real = source.machine is not None
    rule = config["second"]["real" if real else "synthetic"][setting.transfers]
    if source.machine is None:
        return regal_hardware(setting.devices, **rule)
    hardware = eqx.tree_at(
        lambda h: h.level_bytes,
        source.machine,
        jnp.full_like(source.machine.level_bytes, jnp.inf),
    )
    return _links(hardware, rule["share_of_bandwidth"], rule["link_latency_s"])


def memory_limit(peaks: Mapping[str, float]) -> float:
    """What capped devices hold: the geometric mean of what the reference needs and of the least
    that any heuristic needs; `peaks` are bytes by name of the heuristic."""
    return float(np.sqrt(peaks["reference"] * min(peaks.values())))


def limited(hardware: Hardware, limit_bytes: float) -> Hardware:
    """The machine with that capacity on every device."""
    limits = jnp.full_like(hardware.level_bytes, limit_bytes)
    return eqx.tree_at(lambda h: h.level_bytes, hardware, limits)


@eqx.filter_jit
def _cost(problem: egx.Execution, plan: Decisions) -> Array:
    return problem.evaluate(plan).cost


def heuristic_costs(problem: egx.Execution) -> dict[str, float]:
    """What the problem's heuristics cost."""
    return {name: float(_cost(problem, plan)) for name, plan in problem.heuristics().items()}


def make_case(setting: Setting, source: Source, number: int, config: dict[str, Any]) -> Case | None:
    """The problems of one graph; None where no limit stops the reference and nothing else."""
    shape = _shape(source.model, config["corpora"][setting.corpus])
    assert shape is not None

    def problem(model: Model, hardware: Hardware, seconds: Any, objective: str) -> egx.Execution:
        padded = dataclasses.replace(model, graph=pad_graph(model.graph, shape))
        return egx.Execution(padded, hardware, objective=objective, op_seconds=seconds)

    hardware = _hardware(setting, source)
    second = _second_hardware(setting, source, config)
    if setting.capped:
        free = problem(source.model, hardware, source.seconds, "peak_memory")
        peaks = heuristic_costs(free)
        if min(peaks.values()) >= peaks["reference"]:
            return None
        limit = memory_limit(peaks)
        hardware, second = limited(hardware, limit), limited(second, limit)
    rng = np.random.default_rng((number, 7))
    noise = config["second"]["noise"]
    noisy = perturb(rng, source.model, noise)
    times = None if source.seconds is None else perturb_seconds(rng, source.seconds, noise)
    return Case(
        source,
        shape,
        problem(source.model, hardware, source.seconds, setting.objective),
        problem(noisy, second, times, setting.objective),
    )
