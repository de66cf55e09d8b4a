"""Many problems as a few batches, each padded to one size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from egx.errors import ProblemError
from egx.graph.graph import real_sizes
from egx.graph.padding import bucket
from egx.problems.base import AbstractProblem
from egx.problems.padded import stack_problems


class Batch(NamedTuple):
    """Problems stacked for `vmap`, with a leading axis, and which of all they are."""

    members: tuple[int, ...]
    problem: AbstractProblem


def batched_problems(problems: Sequence[AbstractProblem], *, most: int = 4) -> list[Batch]:
    """The problems in at most `most` batches of similar sizes, each padded to its largest.

    Work grows with ops and uses: they are cut where the padded work of all is least, so that a
    corpus compiles `most` times and wastes little.

    Raises:
        ProblemError: without problems, for problems that differ in more than numbers and sizes,
            or for `most` below 1.
    """
    if not problems or most < 1:
        raise ProblemError(
            f"batched_problems needs a problem and a batch, got {len(problems)} and {most}"
        )
    work = []
    for problem in problems:
        ops, _, uses = real_sizes(problem.graph)
        work.append(bucket(ops) + bucket(uses))
    order = np.argsort(np.array(work), kind="stable")
    batches = []
    for group in np.split(order, _cuts([work[k] for k in order], most)):
        members = tuple(sorted(group.tolist()))
        batches.append(Batch(members, stack_problems([problems[k] for k in members])))
    return batches


def _cuts(work: list[int], most: int) -> list[int]:
    """Where to cut the sorted sizes into at most `most` runs of least padded work.

    Dynamic programming over the ends of runs of equal size: there are few of those.
    """
    ends = [k + 1 for k in range(len(work)) if k + 1 == len(work) or work[k + 1] != work[k]]
    # best[j]: the least work of all up to the j-th end, and the cuts that reach it.
    best: list[tuple[int, list[int]]] = [(work[end - 1] * end, []) for end in ends]
    for _ in range(most - 1):
        further = list(best)
        for j, end in enumerate(ends):
            for i in range(j):
                total = best[i][0] + work[end - 1] * (end - ends[i])
                if total < further[j][0]:
                    further[j] = (total, [*best[i][1], ends[i]])
        best = further
    return best[-1][1]
