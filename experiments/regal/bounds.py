"""A bound on the makespan that sees what must run before and after the work that can be shared.

The energetic bound of cumulative scheduling (Carlier and Pinson, Management Science 35, 1989): of
ops that all have `head` seconds of others before them and `tail` seconds after them, D devices
need at least head + their seconds / D + tail. Synthetic graphs have one source and one sink, which
nothing runs beside.

Shapes: N ops.
"""

from __future__ import annotations

import numpy as np

import egx

MOST = 256


def window_bound(problem: egx.Execution) -> float:
    """Seconds that no plan undercuts, beside the simulator's rounding; on the host."""
    case = problem.host_case()
    n, seconds = case.num_ops, case.seconds.min(1)
    head, tail = np.zeros(n), np.zeros(n)
    for op in range(n):
        for tensor in case.inputs[op]:
            source = int(case.producer[tensor])
            head[op] = max(head[op], head[source] + seconds[source])
    for op in range(n - 1, -1, -1):
        for tensor in case.inputs[op]:
            source = int(case.producer[tensor])
            tail[source] = max(tail[source], tail[op] + seconds[op])
    best = 0.0
    for a in _some(head):
        late = head >= a
        # Falling tails: the seconds of all ops whose tail is at least each of them.
        order = np.argsort(-tail[late], kind="stable")
        tails, load = tail[late][order], np.cumsum(seconds[late][order])
        best = max(best, a + float((load / case.num_devices + tails).max()))
    return best * (1.0 - (2 * n + 16) * 2.0**-24)


def _some(values: np.ndarray) -> np.ndarray:
    """All values, or about MOST of them."""
    values = np.unique(values)
    return values[:: max(len(values) // MOST, 1)]
