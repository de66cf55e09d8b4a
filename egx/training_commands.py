"""`egx train`; `egx.cli` has its options."""

from __future__ import annotations

import dataclasses
import itertools
from argparse import Namespace
from pathlib import Path

import numpy as np

from egx import api
from egx.errors import EgxError, FormatError
from egx.execution_commands import DEFAULT_HARDWARE, REGAL, make_execution, make_machine
from egx.formats.workload import Workload
from egx.graph.corpus import perturb, perturb_seconds
from egx.graph.graph import Model, real_sizes
from egx.graph.padding import bucket_sizes, pad_graph
from egx.loading import is_workload, load, load_workload
from egx.policies.loading import POLICY_FILE, load_policy
from egx.problems.execution import Execution
from egx.report.console import console, error_console, watch
from egx.report.units import format_bytes
from egx.training.loop import whole_number
from egx.training.synthetic import synthetic_models

SYNTHETIC = "synthetic"
# What the validation of a training is relative to.
PLAIN = "plain BRKGA's cost"
_SCORES = {"go": "the best heuristic's cost"}
MODEL_FILES = (".onnx", ".onnx.gz", ".json", ".pbtxt", ".prototxt", ".stg")


def train(options: Namespace) -> int:
    """Trains a policy on a corpus and writes it with how it came about."""
    out, log = console(), error_console()
    # Before the problems, which take long to make and whose noise is drawn by the seed.
    whole_number("steps", options.steps, 0, 2**30)
    whole_number("seed", options.seed, 0, 2**32 - 1)
    folder = Path(options.out)
    if folder.exists() and not folder.is_dir():
        raise FormatError(f"{folder}: is a file; expected a folder to write to")
    target = folder / POLICY_FILE
    if target.exists() and not (options.overwrite or options.resume):
        raise FormatError(
            f"{folder}: holds a policy; choose another --out, or add --resume or --overwrite"
        )
    problems = training_problems(options)
    sizes = [real_sizes(problem.graph)[0] for problem in problems]
    out.print(
        f"{len(problems)} problems of {min(sizes):,} to {max(sizes):,} ops on "
        f"{problems[0].hardware.name}, {problems[0].objective.replace('_', ' ')}",
        style="bold",
    )
    start = None
    if options.policy is not None:
        start = load_policy(options.policy)
    score = _SCORES.get(options.algorithm, PLAIN)
    with watch(
        log, quiet=options.quiet, best=lambda p: f"{p.best_cost:.4f} of {score}", what="steps"
    ) as progress:
        policy = api.train(
            problems,
            options.algorithm,
            steps=options.steps,
            seed=options.seed,
            options=dict(options.option),
            policy=start,
            checkpoint_dir=folder / "checkpoint",
            resume=options.resume,
            progress=progress,
        )
    policy.save(target)
    out.print(f"wrote {target} ({format_bytes(target.stat().st_size)})")
    out.print(f"use it with: egx optimize SOURCE --problem execution --policy {folder}")
    return 0


def training_problems(options: Namespace) -> list[Execution]:
    """The problems that `egx train` was told to train on; also for programs of one's own."""
    if options.data == SYNTHETIC:
        default, models = REGAL, synthetic_models(seed=options.seed)
        sources: list[Workload | Model] = list(itertools.islice(models, options.graphs))
    else:
        default, sources = DEFAULT_HARDWARE, _sources(Path(options.data))
    if options.hardware is None:
        options.hardware = default
    machine = make_machine(options)
    # Of one size, so that making the problems compiles once.
    sizes = bucket_sizes(*(_model(source).graph for source in sources))
    problems = []
    for index, source in enumerate(sources):
        for variant in range(options.variants):
            rng = np.random.default_rng((options.seed, index, variant))
            noisy = source if variant == 0 else _noisy(rng, source)
            problems.append(make_execution(_padded(noisy, sizes), machine, options))
    return problems


def _model(source: Workload | Model) -> Model:
    return source.model if isinstance(source, Workload) else source


def _padded(source: Workload | Model, sizes: tuple[int, int, int]) -> Workload | Model:
    model = _model(source)
    padded = dataclasses.replace(model, graph=pad_graph(model.graph, sizes))
    return padded if isinstance(source, Model) else dataclasses.replace(source, model=padded)


def _noisy(rng: np.random.Generator, source: Workload | Model) -> Workload | Model:
    if isinstance(source, Model):
        return perturb(rng, source)
    return dataclasses.replace(
        source,
        model=perturb(rng, source.model),
        op_seconds=perturb_seconds(rng, source.op_seconds),
    )


def _sources(folder: Path) -> list[Workload | Model]:
    """All models in a folder and below; one that cannot be read is an error that names it."""
    if not folder.is_dir():
        raise FormatError(f"--data: expected {SYNTHETIC!r} or a folder, got {str(folder)!r}")
    found: list[Workload | Model] = []
    for path in sorted(folder.rglob("*")):
        if not path.is_file() or not path.name.endswith(MODEL_FILES):
            continue
        try:
            found.append(load_workload(path) if is_workload(path) else load(path))
        except EgxError as error:
            raise type(error)(f"--data: {error}") from error
    if not found:
        raise FormatError(f"--data: {folder} holds no {', '.join(MODEL_FILES)}")
    return found
