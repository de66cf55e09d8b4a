"""The functions that people call to run a plan for real: once, or as what a search measures."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from egx.errors import DecisionError, ProblemError
from egx.execution.plans import AnyPlan, check_problem, chosen
from egx.execution.runner import Executed, Runner
from egx.formats.jaxpr import trace_ops
from egx.problems.execution import Execution


def execute(
    fn: Callable[..., Any],
    args: Sequence[Any],
    plan: AnyPlan,
    *,
    devices: Sequence[Any] | None = None,
    repeats: int = 5,
    warmup: int = 1,
    problem: Execution | None = None,
    **trace_options: Any,
) -> Executed:
    """Runs a JAX function on real devices as a plan says: devices, order, fusion.

    Each cluster of fused ops is compiled on its own (an op alone, where nothing is fused) and
    runs on its root's device; a tensor is sent to each other device that reads it as soon as it
    is made. Segments are started in the plan's order without waiting for one another: by
    priority as in the static order, or as a plan file, or `problem` with its run-time order,
    says. Transfer priorities are not obeyed: the runtime sends eagerly.

    Args:
        fn: the function that was traced.
        args: its arguments, a tuple or list; arrays of the shapes that were traced.
        plan: a `Result`, decisions (device, priority, fusion; an absent one is its default), or
            the path of a plan.json, of an `Execution` problem whose model is `egx.trace` of this
            function with the same options.
        devices: device k of the plan is the k-th of these; by default of `jax.devices()`.
        repeats: timed runs; their median is the measured time.
        warmup: runs before them, which compile.
        problem: the problem that a result or decisions belong to: only needed for the order that
            its run-time order gives.
        trace_options: of `egx.trace` (`weights`, `unroll_scans`, `while_iterations`, `name`).

    Returns:
        (outputs, seconds), and more by name: outputs equal to those of `fn` up to rounding, the
        arrays among them on the first device. The seconds of a run go from the start of the first
        segment to the last output: kernels, transfers between devices and the host's work to
        start them. Not in them: compiling, sending arguments and constants to the devices that
        read them, bringing outputs together.

    Raises:
        DecisionError: for a plan of another graph, or with more devices than there are.
        GraphError: for arguments of other shapes, or a function that cannot be traced.
    """
    runner = _runner(fn, args, devices, trace_options)
    plan_of = chosen(runner.traced, plan, problem)
    return runner.run(plan_of.decisions, order=plan_of.order, repeats=repeats, warmup=warmup)


def measured_evaluator(
    fn: Callable[..., Any],
    args: Sequence[Any],
    problem: Execution,
    *,
    devices: Sequence[Any] | None = None,
    repeats: int = 3,
    warmup: int = 1,
    **trace_options: Any,
) -> Callable[[Mapping[str, np.ndarray]], float]:
    """What `egx.optimize(problem, evaluator=...)` calls to measure a candidate on real devices.

    The function is traced once, and a program that several candidates need is compiled once.
    Whether a candidate fits the simulated memory is not asked: one that does not fit the real
    one fails.

    Args:
        problem: of `egx.trace(fn, *args, **trace_options)`, with objective "makespan".
        fn, args, devices, repeats, warmup, trace_options: as in `execute`.

    Raises:
        DecisionError: for a problem of another graph, or with more devices than there are.
        ProblemError: for another objective.
    """
    runner = _runner(fn, args, devices, trace_options)
    check_problem(runner.traced, problem)
    if problem.objective != "makespan":
        raise ProblemError(f"seconds are measured; the problem's objective is {problem.objective}")
    if problem.hardware.num_devices > len(runner.devices):
        raise DecisionError(
            f"the problem has {problem.hardware.num_devices} devices, and there are "
            f"{len(runner.devices)} here: {', '.join(map(str, runner.devices))}"
        )

    def evaluate(decisions: Mapping[str, np.ndarray]) -> float:
        plan = chosen(runner.traced, decisions, problem)
        done = runner.run(plan.decisions, order=plan.order, repeats=repeats, warmup=warmup)
        return done.seconds

    return evaluate


TRACE_OPTIONS = tuple(
    name
    for name, parameter in inspect.signature(trace_ops).parameters.items()
    if parameter.kind is parameter.KEYWORD_ONLY
)


def _runner(
    fn: Callable[..., Any],
    args: Sequence[Any],
    devices: Sequence[Any] | None,
    trace_options: Mapping[str, Any],
) -> Runner:
    if not isinstance(args, tuple | list):
        raise DecisionError(
            f"args must be a tuple or list with an entry per argument, got {type(args).__name__}"
        )
    unknown = [name for name in trace_options if name not in TRACE_OPTIONS]
    if unknown:
        takes = ", ".join(TRACE_OPTIONS)
        raise DecisionError(f"no option {unknown[0]!r} of tracing (it takes {takes})")
    return Runner(trace_ops(fn, args, **trace_options), args, devices)
