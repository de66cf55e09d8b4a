"""Execution problems of measured workloads."""

from __future__ import annotations

from typing import Any

from egx.errors import ProblemError
from egx.formats.workload import Workload
from egx.hardware.spec import Hardware
from egx.problems.execution import Execution


def execution_problem(
    workload: Workload, hardware: Hardware | None = None, **options: Any
) -> Execution:
    """The problem of a workload, on its own machine or on another, with its measured seconds.

    Args:
        workload: from a reader of `egx.formats`, or `egx.load_workload`.
        hardware: for links and memory limits; needed where the workload names no machine.
        options: of `Execution`.

    Raises:
        ProblemError: without any machine.
        FormatError: where the seconds do not say how long an op takes on that machine.
    """
    machine = workload.hardware if hardware is None else hardware
    if machine is None:
        raise ProblemError(f"{workload.model.source} names no machine; give hardware")
    return Execution(workload.model, machine, op_seconds=workload.seconds_on(machine), **options)
