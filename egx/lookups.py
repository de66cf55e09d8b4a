"""The commands that look something up: a plan, a model, a machine, or what there is of them."""

from __future__ import annotations

import inspect
from argparse import Namespace
from pathlib import Path
from typing import Any

from egx import hardware as machines
from egx import zoo
from egx.errors import EgxError, SearchError
from egx.formats.workload import Workload
from egx.graph.graph import Model
from egx.loading import is_workload, load, load_workload
from egx.policies.base import AbstractPolicy
from egx.policies.go_net import GoPolicy
from egx.policies.graph_unet import GraphUNetPolicy
from egx.policies.move_net import MovePolicy
from egx.policies.regal_net import RegalPolicy
from egx.policies.sequence_net import SequencePolicy
from egx.report.check import check_plan
from egx.report.console import console, print_table
from egx.report.execution_check import check_execution_plan, check_finer
from egx.report.execution_plan_file import is_execution_plan, read_execution_plan
from egx.report.plan import ModelId
from egx.report.plan_file import read_plan
from egx.report.tables import Table, hardware_table, model_table
from egx.report.units import format_bytes, format_seconds, format_speedup
from egx.search.evosax import strategies
from egx.search.registry import EVOSAX, SEARCHES, searches
from egx.training.solved import EXACT

PREFERRED = ("egrl_plus", "local", "annealing", "random")
PREFERRED_EXECUTION = ("regal_plus", "brkga_seeded", "local", "annealing", "random")
RUN_BY: dict[type[AbstractPolicy], str] = {
    GraphUNetPolicy: "egrl",
    RegalPolicy: "regal",
    SequencePolicy: "gas",
    GoPolicy: "go",
    MovePolicy: "regal_plus",
}


def default_algorithm() -> str:
    """The one that serves a user best among those there are."""
    return next(name for name in PREFERRED if name in searches())


def default_execution_algorithm() -> str:
    """The one that serves best for several devices."""
    return next(name for name in PREFERRED_EXECUTION if name in searches())


def algorithm_of(policy: AbstractPolicy) -> str:
    """The one that runs a trained policy."""
    return RUN_BY[type(policy)]


def default_comparison(*, execution: bool = False) -> list[str]:
    """A few algorithms that are quick to run."""
    placement = ("egrl_plus", "local", "annealing", "greedy_dp", "random")
    several = ("regal_plus", "brkga_seeded", "brkga", "local", "annealing", "random")
    return [name for name in (several if execution else placement) if name in searches()]


def check(options: Namespace) -> int:
    """Checks a plan; prints what is wrong."""
    out = console()
    if is_execution_plan(options.plan):
        return _check_execution(options)
    if options.fine:
        raise SearchError(f"{options.plan}: --fine is of plans on several devices")
    plan = read_plan(options.plan)
    model, _ = _model_of(plan.model, options)
    outcome = check_plan(plan, model)
    if outcome.ok:
        assert outcome.latency_s is not None
        assert outcome.peak_bytes is not None
        speedup = format_speedup(plan.reference_s, outcome.latency_s)
        out.print(f"{options.plan}: valid, {format_seconds(outcome.latency_s)}, {speedup} native")
        for m, name in reversed(list(enumerate(plan.hardware.level_names))):
            holds = format_bytes(float(plan.hardware.level_bytes[0, m]))
            out.print(f"  {name}: at most {format_bytes(int(outcome.peak_bytes[m]))} of {holds}")
        return 0
    for fault in outcome.faults:
        out.print(f"{options.plan}: {fault}", markup=False)
    return 1


def _check_execution(options: Namespace) -> int:
    """The same for a plan on several devices."""
    out = console()
    plan = read_execution_plan(options.plan)
    model, workload = _model_of(plan.model, options)
    measured = plan.measured and workload is not None
    seconds = workload.seconds_on(plan.hardware) if measured and workload is not None else None
    outcome = check_execution_plan(plan, model, seconds)
    for fault in outcome.faults:
        out.print(f"{options.plan}: {fault}", markup=False)
    if not outcome.ok:
        return 1
    again = outcome.simulated
    assert again is not None
    gain = format_speedup(again.reference_cost, again.cost)
    fits = "valid" if again.fits else "valid, but does not fit the devices' memory"
    out.print(
        f"{options.plan}: {fits}, makespan {format_seconds(again.makespan_s)}, peak "
        f"{format_bytes(max(again.peak_bytes))}, {gain} reference"
    )
    for d, name in enumerate(plan.hardware.device_names):
        holds = format_bytes(float(plan.hardware.level_bytes[d, 0]))
        out.print(
            f"  {name}: at most {format_bytes(again.peak_bytes[d])} of {holds} along the order of "
            f"items, {format_bytes(again.peak_bytes_over_time[d])} over time"
        )
    if options.fine:
        finer = check_finer(plan, model, seconds)
        fits = "fits" if finer.fits else "does not fit the devices' memory"
        out.print(
            f"by the finer cost model: {fits}, makespan {format_seconds(finer.makespan_s)} "
            f"(above: {format_seconds(again.makespan_s)})"
        )
        for d, name in enumerate(plan.hardware.device_names):
            out.print(f"  {name}: at most {format_bytes(int(finer.peak_bytes[d]))} over time")
    return 0


def _model_of(named: ModelId, options: Namespace) -> tuple[Model, Workload | None]:
    """The model that a plan names, or the one that the user says it is."""
    given = {**named.options, **load_options(options)}
    if options.source is None and not named.source:
        raise SearchError(f"{options.plan}: names no model; say which with --source")
    source = options.source or _beside(Path(options.plan), named.source)
    try:
        if is_workload(source):
            workload = load_workload(source, **given)
            return workload.model, workload
        return load(source, **given), None
    except EgxError as error:
        if options.source is not None:
            raise
        raise type(error)(f"{error} (if the model lies elsewhere, add --source)") from error


def show(options: Namespace) -> int:
    """Describes a model."""
    out = console()
    print_table(out, model_table(load(options.source, **load_options(options))))
    return 0


def hardware(options: Namespace) -> int:
    """Lists the machines, or describes one with the source of each number."""
    out = console()
    if options.name is None:
        rows = []
        for name in machines.presets():
            machine = machines.load(name)
            levels = ", ".join(
                f"{level} {format_bytes(float(size))}"
                for level, size in zip(machine.level_names, machine.level_bytes[0], strict=True)
            )
            rows.append((name, levels))
        print_table(out, Table(("machine", "memory levels"), tuple(rows), left=(0, 1)))
        return 0
    machine = machines.load(options.name)
    for device in range(machine.num_devices):
        print_table(out, hardware_table(machine, device))
    numbers = tuple(
        (where, number.text, number.source or "")
        for where, number in machines.sources(options.name).items()
    )
    print_table(out, Table(("number", "value", "source"), numbers, left=(0, 1, 2)))
    return 0


def models(options: Namespace) -> int:
    """Lists the zoo."""
    rows = []
    for name in zoo.names():
        builder = getattr(zoo, name)
        arguments = ", ".join(
            f"{p.name}={p.default}" for p in inspect.signature(builder).parameters.values()
        )
        rows.append((name, _first_line(builder), arguments))
    out = console()
    print_table(out, Table(("model", "", "arguments for --set"), tuple(rows), left=(0, 1, 2)))
    return 0


def algorithms(options: Namespace) -> int:
    """Lists the searchers."""
    rows = []
    for name in searches():
        mark = " (default)" if name == default_algorithm() else ""
        rows.append((name, _first_line(SEARCHES[name]) + mark))
    rows.append(
        (f"{EVOSAX}STRATEGY", f"Any strategy of evosax: {', '.join(sorted(strategies()))}.")
    )
    solver = "The exact solver: proves the optimum or bounds it; counts no evaluations."
    rows.append((EXACT, solver))
    out = console()
    print_table(out, Table(("algorithm", ""), tuple(rows), left=(0, 1)))
    return 0


def load_options(options: Namespace) -> dict[str, Any]:
    """What was said about the model, as keywords of `egx.load`."""
    given = dict(options.set)
    if options.granularity is not None:
        given["granularity"] = options.granularity
    if options.dim:
        given["dims"] = dict(options.dim)
    return given


def _beside(plan: Path, source: str) -> str:
    """A model's path as the plan has it, or from the plan's own folder."""
    near = plan.parent / source
    return str(near) if not Path(source).exists() and near.is_file() else source


def _first_line(thing: Any) -> str:
    return (inspect.getdoc(thing) or "").split("\n\n")[0].replace("\n", " ")
