"""`egx optimize` and `egx compare` with `--problem execution`; `egx.cli` has their options."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from typing import Any

import equinox as eqx
import numpy as np
from matplotlib.figure import Figure

from egx import hardware as machines
from egx import lookups
from egx.commands import (
    INTERRUPTED,
    choose_folder,
    run_comparison,
    same_run,
    search,
    solver_line,
    use_devices,
)
from egx.comparison import Comparison
from egx.errors import (
    HardwareError,
    ProblemError,
)
from egx.formats.workload import Workload
from egx.graph.graph import Model, real_sizes
from egx.hardware.spec import Hardware
from egx.hardware.units import EXAMPLES, parse_quantity
from egx.loading import is_workload, load, load_workload
from egx.lookups import load_options
from egx.policies.loading import load_policy
from egx.problems.execution import Execution
from egx.problems.workloads import execution_problem
from egx.report.console import console, error_console, print_table
from egx.report.execution_folder import execution_convergence, write_execution_folder
from egx.report.execution_verdict import (
    REFERENCE,
    device_table,
    fitting_costs,
    judge_execution,
)
from egx.report.tables import effort_line
from egx.report.units import format_bytes, format_count, format_seconds, format_speedup
from egx.training.progress import Progress

REGAL = "regal"
DEFAULT_HARDWARE = "a100"
DEFAULT_DEVICES = 2

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
    result, solution, stopped = search(problem, options, folder, given, log, best=_best(problem))
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
    return INTERRUPTED if stopped else 0


def compare(options: Namespace) -> int:
    """Runs several algorithms, prints their table, and writes it with a picture."""
    problem, _ = _problem(options)
    title = _title(problem)

    def draw(comparison: Comparison) -> Figure:
        known = comparison.bound, comparison.bound_status
        lines = fitting_costs(problem)
        return execution_convergence(problem, comparison.curves(), lines, *known, title=title)

    return run_comparison(
        problem, options, headline=headline(problem), title=title, draw=draw, best=_best(problem)
    )


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
    return make_execution(source, make_machine(options, own), options), loaded_with


def make_execution(source: Workload | Model, machine: Hardware, options: Namespace) -> Execution:
    chosen = {
        name: value
        for name in ("objective", "order", "transfers", "decide")
        if (value := getattr(options, name)) is not None
    }
    if isinstance(source, Workload):
        return execution_problem(source, machine, **chosen)
    return Execution(source, machine, **chosen)


def make_machine(options: Namespace, own: Hardware | None = None) -> Hardware:
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
    if value < 0 or (value == 0 and kind != "time"):
        least = "of 0 or more" if kind == "time" else "above 0"
        raise HardwareError(f"{option}: expected a {kind} {least}, got {text!r}")
    return value


def settle(options: Namespace) -> None:
    """Fills in what depends on the kind of problem, and refuses what is not of it.

    Raises:
        ProblemError: naming the option.
    """
    _refuse_others(options)
    execution = options.problem == "execution"
    if not execution:
        # As it was before there were machines of several devices.
        options.spread = options.devices if options.spread is None else options.spread
    if options.algorithm is not None:
        return
    if options.policy is not None:
        options.algorithm = lookups.algorithm_of(load_policy(options.policy))
    elif execution:
        options.algorithm = lookups.default_execution_algorithm()
    else:
        options.algorithm = lookups.default_algorithm()


def settle_comparison(options: Namespace) -> None:
    """The same for `compare`."""
    _refuse_others(options)
    execution = options.problem == "execution"
    if not execution and options.devices is not None:
        raise ProblemError("--devices is of --problem execution")
    if options.algorithms is None:
        options.algorithms = lookups.default_comparison(execution=execution)


def _refuse_others(options: Namespace) -> None:
    """Refuses options of the other kind of problem; memory placement gets its machine."""
    if options.problem == "execution":
        if options.prefetch:
            raise ProblemError("--prefetch is of --problem memory_placement")
        return
    for name, option in ONLY_EXECUTION.items():
        if getattr(options, name) is not None:
            raise ProblemError(f"{option} is of --problem execution")
    if options.hardware is None:
        options.hardware = "nnpi"
