"""Critical-path list scheduling (HEFT) and its peak-memory counterpart, as plans of a problem.

The algorithms and their sources are in `egx.problems.execution_plans`, from where the problem
takes its own `heuristics()`. Here they take options and say what they reckon with.
"""

from __future__ import annotations

from egx.baselines.execution_case import execution_problem, to_decisions
from egx.errors import SearchError
from egx.problems.base import AbstractProblem, Decisions
from egx.problems.execution_plans import blocks, list_scheduling
from egx.problems.execution_plans.list_scheduling import ListSchedule
from egx.problems.execution_plans.orders import memory_order

__all__ = [
    "ListSchedule",
    "heft",
    "heft_fused",
    "heft_readers",
    "heft_schedule",
    "memory_greedy",
    "memory_spread",
]


def heft_schedule(
    problem: AbstractProblem,
    *,
    insertion: bool = False,
    mind_memory: bool = True,
    mind_readers: bool = False,
) -> ListSchedule:
    """The schedule that HEFT has in mind (see `egx.problems.execution_plans.list_scheduling`);
    ops may go to any device and in any order, whatever the problem decides.

    Args:
        insertion: ops may go into gaps before ops that were placed earlier.
        mind_memory: pass over a device whose capacity the op would overfill, where there is
            another; not with `insertion`.
        mind_readers: count what it takes to bring together what an op makes and what its readers
            already have on other devices.

    Raises:
        SearchError: for another problem than `Execution`.
    """
    checked = execution_problem(problem, "heft")
    return list_scheduling.heft(
        checked.host_case(),
        queued="transfer_priority" in checked.decide,
        transfers=checked.transfers,
        insertion=insertion,
        mind_memory=mind_memory,
        mind_readers=mind_readers,
    )


def heft(
    problem: AbstractProblem,
    *,
    insertion: bool = False,
    mind_memory: bool = True,
    mind_readers: bool = False,
) -> Decisions:
    """Each op, by falling length of its longest path to the end, on the device where it ends
    first. Arguments and errors as in `heft_schedule`."""
    checked = execution_problem(problem, "heft")
    schedule = heft_schedule(
        checked, insertion=insertion, mind_memory=mind_memory, mind_readers=mind_readers
    )
    return to_decisions(checked, checked.host_case(), schedule.plan)


def heft_fused(problem: AbstractProblem) -> Decisions:
    """HEFT on the graph with everything fused that may be, a cluster an op.

    Raises:
        SearchError: for another problem than `Execution`, or one that does not decide fusion.
    """
    checked = execution_problem(problem, "heft_fused")
    if "fusion" not in checked.decide:
        raise SearchError(
            f"heft_fused has nothing to fuse: the problem decides {', '.join(checked.decide)}"
        )
    return checked.heuristics()["heft_fused"]


def heft_readers(problem: AbstractProblem) -> Decisions:
    """HEFT that minds readers (see `heft_schedule`), with everything fused that may be where
    fusion is decided, a cluster an op.

    Raises:
        SearchError: for another problem than `Execution`.
    """
    checked = execution_problem(problem, "heft_readers")
    known = checked.heuristics()
    return known["heft_readers"] if "heft_readers" in known else heft(checked, mind_readers=True)


def memory_greedy(problem: AbstractProblem) -> Decisions:
    """All ops on one device, in the order that is greedy by memory released.

    Raises:
        SearchError: for another problem than `Execution`.
    """
    checked = execution_problem(problem, "memory_greedy")
    case = checked.host_case()
    return to_decisions(checked, case, blocks.one_device(case, memory_order(case)))


def memory_spread(problem: AbstractProblem) -> Decisions:
    """The order of `memory_greedy`, each op on the device where the peaks grow least.

    Raises:
        SearchError: for another problem than `Execution`.
    """
    checked = execution_problem(problem, "memory_spread")
    case = checked.host_case()
    plan = list_scheduling.spread_by_memory(case, memory_order(case))
    return to_decisions(checked, case, plan)
