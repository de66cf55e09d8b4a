"""What people and frameworks do: layers in turn or in blocks, one device, devices in turn."""

from __future__ import annotations

import numpy as np

from egx.baselines.execution_case import execution_problem, to_decisions
from egx.problems.base import AbstractProblem, Decisions
from egx.problems.execution_plans import blocks
from egx.problems.execution_plans.orders import first_come_order
from egx.problems.execution_plans.plan import Plan

__all__ = [
    "human",
    "human_blocks",
    "layer_blocks",
    "round_robin",
    "single_device",
    "tensorflow",
]


def tensorflow(problem: AbstractProblem) -> Decisions:
    """What TensorFlow does by itself (Zhou et al. 2020): everything on device 0, first come, first
    served, every legal producer fused. Without fusion to decide, the problem's reference.

    Raises:
        SearchError: for another problem than `Execution`, as all of these.
    """
    checked = execution_problem(problem, "tensorflow")
    return checked.heuristics()["tensorflow" if "fusion" in checked.decide else "reference"]


def human(problem: AbstractProblem) -> Decisions:
    """What an expert does (Zhou et al. 2020): a layer to a device in turn, by the names of layers
    (see `egx.zoo.common.LAYER_SEPARATOR`), or blocks by depth where names have none or fewer than
    there are devices; everything fused where fusion is decided."""
    checked = execution_problem(problem, "human")
    return checked.heuristics()["expert_fused" if "fusion" in checked.decide else "expert"]


def human_blocks(problem: AbstractProblem) -> Decisions:
    """What another expert does: whole layers in one block a device, balanced by seconds, or by
    bytes for peak memory. Where names have no layers, as `human`."""
    checked = execution_problem(problem, "human_blocks")
    if "fusion" in checked.decide:
        return checked.heuristics()["blocks_fused"]
    case = checked.host_case()
    device = blocks.layers_in_blocks(case, by_bytes=checked.objective == "peak_memory")
    if device is None:
        return human(checked)
    runtime = checked.order == "runtime"
    order = np.arange(case.num_ops)
    if runtime:
        order = first_come_order(case, device, checked.transfers)
    return to_decisions(checked, case, Plan(device, order))


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
