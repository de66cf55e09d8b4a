"""What people do by hand: blocks of layers, one device, devices in turn."""

from __future__ import annotations

from egx.baselines.execution_case import execution_problem, to_decisions
from egx.problems.base import AbstractProblem, Decisions
from egx.problems.execution_plans import blocks

__all__ = ["layer_blocks", "round_robin", "single_device"]


def layer_blocks(problem: AbstractProblem) -> Decisions:
    """Contiguous blocks along the depth of the graph, one a device: balanced by seconds, or for
    peak memory by bytes of weights and outputs.

    Raises:
        SearchError: for another problem than `Execution`, as all of these.
    """
    checked = execution_problem(problem, "layer_blocks")
    case = checked.host_case()
    plan = blocks.layer_blocks(case, by_bytes=checked.objective == "peak_memory")
    return to_decisions(checked, case, plan)


def single_device(problem: AbstractProblem) -> Decisions:
    """Everything on the device that is fastest on its own, in index order."""
    checked = execution_problem(problem, "single_device")
    case = checked.host_case()
    return to_decisions(checked, case, blocks.one_device(case))


def round_robin(problem: AbstractProblem) -> Decisions:
    """Op i on device i mod D, in index order."""
    checked = execution_problem(problem, "round_robin")
    case = checked.host_case()
    return to_decisions(checked, case, blocks.round_robin(case))
