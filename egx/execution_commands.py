"""`egx optimize --problem execution` and `egx train`; `egx.cli` has their options."""

from __future__ import annotations

import dataclasses
import itertools
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import equinox as eqx
import numpy as np
from rich.console import Console

from egx import api, lookups
from egx import hardware as machines
from egx.baselines.exact import ExactSolution
from egx.commands import (
    bound_by_solver,
    checkpoint_folder,
    choose_folder,
    same_run,
    solver_line,
    use_devices,
)
from egx.errors import (
    EgxError,
    FormatError,
    HardwareError,
    MissingExtraError,
    ProblemError,
    SearchError,
)
from egx.formats.workload import Workload
from egx.graph.corpus import perturb, perturb_seconds
from egx.graph.graph import Model, real_sizes
from egx.graph.padding import bucket_sizes, pad_graph
from egx.hardware.spec import Hardware
from egx.hardware.units import EXAMPLES, parse_quantity
from egx.loading import is_workload, load, load_workload
from egx.lookups import load_options
from egx.policies.loading import POLICY_FILE, load_policy
from egx.problems.execution import Execution
from egx.problems.workloads import execution_problem
from egx.report.console import console, error_console, print_table, watch
from egx.report.execution_folder import write_execution_folder
from egx.report.execution_verdict import REFERENCE, device_table, judge_execution
from egx.report.tables import effort_line
from egx.report.units import format_bytes, format_count, format_seconds, format_speedup
from egx.training.progress import Progress
from egx.training.result import Result
from egx.training.solved import EXACT
from egx.training.synthetic import synthetic_models

INTERRUPTED = 130
REGAL = "regal"
DEFAULT_HARDWARE = "a100"
DEFAULT_DEVICES = 2
MODEL_FILES = (".onnx", ".onnx.gz", ".json", ".pbtxt", ".prototxt", ".stg")
SYNTHETIC = "synthetic"

# Options that only an Execution problem has, by their names in the parser.
ONLY_EXECUTION = {
    "objective": "--objective",
    "order": "--order",
    "transfers": "--transfers",
    "decide": "--decide",
    "memory": "--memory",
    "link_bandwidth": "--link-bandwidth",
    "link_latency": "--link-latency",
}


def optimize(options: Namespace) -> int:
    """Searches, prints the tables and writes the folder."""
    out, log = console(), error_console()
    use_devices(options.spread)
    problem, loaded_with = _problem(options)
    given: dict[str, Any] = {"options": dict(options.option)}
    if options.policy is not None:
        given["policy"] = load_policy(options.policy)
    folder = choose_folder(options, problem, same_run(problem, options, given))
    title = _title(problem)
    out.print(headline(problem), style="bold")
    with watch(log, quiet=options.quiet, best=_best(problem)) as progress:
        # The solver has nothing to go on from.
        keep = None if options.algorithm == EXACT else checkpoint_folder(options, folder)
        result = api.optimize(
            problem,
            options.algorithm,
            budget=options.budget,
            seed=options.seed,
            time_limit_s=options.time_limit,
            checkpoint_dir=keep,
            resume=options.resume,
            devices=options.spread,
            progress=progress,
            **given,
        )
    solution = _solution(problem, result, options, log)
    if solution is not None:
        result = result.with_bound(solution.bound, solution.status)
    verdict = judge_execution(problem, result, solution)
    try:
        # First, for a reader of our output such as `head` may close it and end us.
        files = write_execution_folder(
            folder,
            result,
            verdict,
            title=title,
            source=options.source,
            options=loaded_with,
            pictures=options.pictures,
        )
    finally:
        print_table(out, verdict.table())
        remark = verdict.remark()
        if remark:
            out.print(remark, style="bold")
        out.print(effort_line(result) + solver_line(solution) + "\n")
        print_table(out, device_table(problem, problem.timeline(verdict.best.decisions)))
    out.print(f"wrote {folder}/: {', '.join(files)}")
    return INTERRUPTED if result.interrupted == "ctrl-c" else 0


def _solution(
    problem: Execution, result: Result, options: Namespace, log: Console
) -> ExactSolution | None:
    """The solver's answer, where there is a solver, the graph is small enough, and the cheap
    bound leaves something to prove."""
    proved = result.bound is not None and result.feasible and result.cost <= result.bound
    if proved or options.algorithm == EXACT:
        return None
    try:
        return bound_by_solver(problem, result, options, log)
    except (SearchError, MissingExtraError):
        return None


def headline(problem: Execution) -> str:
    """The problem in one line."""
    hardware, graph = problem.hardware, problem.graph
    ops, tensors, _ = real_sizes(graph)
    unit = int(graph.unit_bytes)
    holds = " / ".join(dict.fromkeys(map(format_bytes, hardware.level_bytes[:, 0].tolist())))
    parts = [f"{_title(problem)} ({hardware.num_devices} devices of {holds}"]
    if hardware.num_devices > 1:
        between = ~np.eye(hardware.num_devices, dtype=bool)
        rates = np.unique(np.asarray(hardware.link_bytes_per_s)[between])
        shown = "free" if np.isinf(rates[0]) else format_count(float(rates[0]), "B/s")
        parts[0] += f", links {shown}" + (" and more" if len(rates) > 1 else "")
    parts[0] += ")"
    weights = int(np.asarray(graph.weight_units, np.int64).sum()) * unit
    sizes = int(np.asarray(graph.tensor_units, np.int64).sum()) * unit
    seconds = "measured op seconds, " if problem.is_measured else ""
    return (
        f"{parts[0]}, {problem.objective.replace('_', ' ')}, {problem.order} order: {seconds}"
        f"{ops:,} ops, {format_bytes(weights)} of weights, {format_bytes(sizes)} in "
        f"{tensors:,} tensors"
    )


def _title(problem: Execution) -> str:
    model = problem.model.value
    name = model.name if model is not None else f"graph of {real_sizes(problem.graph)[0]} ops"
    return f"{name} on {problem.hardware.name}"


def _best(problem: Execution) -> Callable[[Progress], str]:
    show = format_seconds if problem.objective == "makespan" else format_bytes

    def best(progress: Progress) -> str:
        if not progress.feasible:
            return "nothing that fits yet"
        gain = format_speedup(progress.reference_cost, progress.best_cost)
        return f"{show(progress.best_cost)}, {gain} {REFERENCE}"

    return best


def _problem(options: Namespace) -> tuple[Execution, dict[str, Any]]:
    """The problem, and the options that its model was loaded with."""
    loaded_with = load_options(options)
    source: Workload | Model
    if is_workload(options.source):
        source = load_workload(options.source, **loaded_with)
    else:
        source = load(options.source, **loaded_with)
    own = source.hardware if isinstance(source, Workload) else None
    return _execution(source, _machine(options, own), options), loaded_with


def _execution(source: Workload | Model, machine: Hardware, options: Namespace) -> Execution:
    chosen = {
        name: value
        for name in ("objective", "order", "transfers", "decide")
        if (value := getattr(options, name)) is not None
    }
    if isinstance(source, Workload):
        return execution_problem(source, machine, **chosen)
    return Execution(source, machine, **chosen)


def _machine(options: Namespace, own: Hardware | None = None) -> Hardware:
    """The devices: of the file, of REGAL, or as many of a machine as are asked for."""
    count = options.devices
    rate = _quantity("--link-bandwidth", options.link_bandwidth, "bandwidth")
    latency = _quantity("--link-latency", options.link_latency, "time")
    if options.hardware is None and own is not None:
        machine = own
        count = own.num_devices if count is None else count
    elif options.hardware == REGAL:
        # Not copied from one device, whose links would be those of a PC.
        count = DEFAULT_DEVICES if count is None else count
        machine = machines.regal_hardware(count)
    else:
        machine = machines.load(options.hardware or DEFAULT_HARDWARE)
        if count is None:
            count = max(DEFAULT_DEVICES, machine.num_devices)
    machine = machines.with_devices(machine, count, link_bytes_per_s=rate, link_latency_s=latency)
    memory = _quantity("--memory", options.memory, "capacity")
    return machine if memory is None else _holding(machine, memory)


def _holding(machine: Hardware, level_0_bytes: float) -> Hardware:
    """The machine with another capacity of level 0 on every device."""
    levels = np.array(machine.level_bytes)
    levels[:, 0] = level_0_bytes
    return eqx.tree_at(lambda hardware: hardware.level_bytes, machine, levels)


def _quantity(option: str, text: str | None, kind: str) -> float | None:
    if text is None:
        return None
    try:
        value = parse_quantity(text, kind)
    except ValueError as error:
        raise HardwareError(
            f"{option}: expected a {kind} such as {EXAMPLES[kind]!r}, got {text!r} ({error})"
        ) from None
    if value < 0 or (value == 0 and kind == "bandwidth"):
        raise HardwareError(f"{option}: expected a {kind} above 0, got {text!r}")
    return value


# Training.


def train(options: Namespace) -> int:
    """Trains a policy on a corpus and writes it with how it came about."""
    out, log = console(), error_console()
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
    with watch(log, quiet=options.quiet, best=_score, what="steps") as progress:
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


def _score(progress: Progress) -> str:
    return f"{progress.best_cost:.4f} of plain BRKGA's cost"


def training_problems(options: Namespace) -> list[Execution]:
    """The problems that `egx train` was told to train on; also for programs of one's own."""
    if options.data == SYNTHETIC:
        default, models = REGAL, synthetic_models(seed=options.seed)
        sources: list[Workload | Model] = list(itertools.islice(models, options.graphs))
    else:
        default, sources = DEFAULT_HARDWARE, _sources(Path(options.data))
    if options.hardware is None:
        options.hardware = default
    machine = _machine(options)
    # Of one size, so that making the problems compiles once.
    sizes = bucket_sizes(*(_model(source).graph for source in sources))
    problems = []
    for index, source in enumerate(sources):
        for variant in range(options.variants):
            rng = np.random.default_rng((options.seed, index, variant))
            noisy = source if variant == 0 else _noisy(rng, source)
            problems.append(_execution(_padded(noisy, sizes), machine, options))
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


def settle(options: Namespace) -> None:
    """Fills in what depends on the kind of problem, and refuses what is not of it.

    Raises:
        ProblemError: naming the option.
    """
    if options.problem == "execution":
        if options.prefetch:
            raise ProblemError("--prefetch is of --problem memory_placement")
        if options.algorithm is None:
            options.algorithm = lookups.default_execution_algorithm()
            # What is known for nothing is where the search should start.
            if options.algorithm == "brkga" and "seeds" not in dict(options.option):
                options.option = [*options.option, ("seeds", "all")]
        return
    for name, option in ONLY_EXECUTION.items():
        if getattr(options, name) is not None:
            raise ProblemError(f"{option} is of --problem execution")
    # As it was before there were machines of several devices.
    options.spread = options.devices if options.spread is None else options.spread
    if options.hardware is None:
        options.hardware = "nnpi"
    if options.algorithm is None:
        options.algorithm = lookups.default_algorithm()
