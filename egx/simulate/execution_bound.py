"""Lower bounds on the makespan and the peak memory of every plan on several devices.

Shapes: N real ops, D devices.

The proofs are for exact arithmetic; what the simulator reports in float32 is covered as follows.
It adds numbers that are not negative, each addition losing at most a factor of 1 - 2^-24, and the
op seconds below are the ones that it adds: a sum of k terms is lowered by (k + 4) 2^-24. Transfers
only delay, and are rounded four times each: on a path they and their op count as six terms. Peaks
are exact integers that the simulator turns to float32 by rounding to nearest, which keeps their
order.
"""

from __future__ import annotations

import numpy as np

from egx.simulate.host_case import HostCase

ROUNDS = 60
WINDOWS = 128
_LEAST = 2.0**-126  # what is smaller may be flushed to 0
_LARGEST = float(np.finfo(np.float32).max)


def makespan_bound(case: HostCase, *, fuses: bool = False) -> float:
    """Seconds that no plan undercuts, with any capacities and either order.

    The longest path: an op on device d ends no sooner than its seconds there after the latest of
    its inputs, and an input comes from the device from which it could be there first; by induction
    over ops. The load: for any weights y over devices that sum to 1, the most loaded device has at
    least the weighted mean load, which is at least the sum over ops of min over d of y_d seconds_d.
    The window: of ops that all have `head` seconds of others before them and `tail` seconds after
    them, some device runs at least the mean (Carlier and Pinson, Management Science 35, 1989):
    nothing runs beside a graph's only source or sink.

    With fusion (`fuses`) a cluster takes at least the sum of its ops' compute, on one device, and
    its ops on a path follow one another inside it, without transfers. An opaque op is never fused;
    an op without consumers, with a graph output, or a reduction ends a cluster, which is launched
    once.
    """
    seconds = _fused_seconds(case) if fuses else case.seconds
    if not case.num_ops:
        return 0.0
    # A fused op's compute is added up within its cluster first.
    terms = case.num_ops * (2 if fuses else 1)
    path, hops = _longest_path(case, seconds, transfers=not fuses)
    path *= 1.0 - (6 * hops + terms * fuses + 4) * 2.0**-24
    load = _load(seconds) * (1.0 - (terms + 4) * 2.0**-24)
    window = _window(case, seconds.min(1)) * (1.0 - (6 * hops + terms + 8) * 2.0**-24)
    bound = max(path, load, window) * (1.0 - 2.0**-40) - 4 * terms * _LEAST
    return min(max(bound, 0.0), _LARGEST)


def peak_bound(case: HostCase, *, fuses: bool = False) -> int:
    """Units that the highest peak over devices of no plan undercuts.

    While an op runs, its weights, inputs and outputs are on its device. All weights are somewhere
    all the time, and so are, while an op runs, its inputs and outputs, and at the end all graph
    outputs: of D devices one has at least the mean. With fusion, only tensors between clusters
    exist: those that an op makes which surely ends its cluster. Whoever reads one is in another
    cluster, which reads it when it runs.
    """
    if not case.num_ops:
        return 0
    made, read = case.output_units, case.input_units
    if fuses:
        ends = _ends_cluster(case)
        made = np.where(ends, made, 0)
        pairs = np.unique(np.stack([case.use_consumer, case.use_tensor]), axis=1)
        visible = case.units * ends[case.producer]
        read = np.zeros(case.num_ops, np.int64)
        np.add.at(read, pairs[0], visible[pairs[1]])
    tensors = made + read
    weights = int(case.weight_units.sum())
    outputs = int(case.units[case.is_output].sum())
    everywhere = weights + max(int(tensors.max()), outputs)
    one_op = int((tensors + case.weight_units).max())
    return max(one_op, -(-everywhere // case.num_devices))


def _ends_cluster(case: HostCase) -> np.ndarray:
    """Ops [N] that no fusion decision joins to their consumers."""
    ends = case.opaque | case.reduction
    used = np.zeros(case.num_ops, bool)
    used[case.producer[case.use_tensor]] = True
    ends |= ~used
    ends[case.producer[case.is_output]] = True
    return ends


def _fused_seconds(case: HostCase) -> np.ndarray:
    launched = case.compute_s + case.launch_s
    least = np.where(_ends_cluster(case)[:, None], launched, case.compute_s)
    return np.where(case.opaque[:, None], case.seconds, least)


def _longest_path(case: HostCase, seconds: np.ndarray, *, transfers: bool) -> tuple[float, int]:
    """(seconds, most ops on any path)."""
    depth = [1] * case.num_ops
    producer = case.producer.tolist()
    uniform = bool((seconds == seconds[:, :1]).all())
    if uniform or not transfers:
        least = seconds.min(1).tolist()
        end = [0.0] * case.num_ops
        for op, tensors in enumerate(case.inputs):
            begin = 0.0
            for tensor in tensors:
                begin = max(begin, end[producer[tensor]])
                depth[op] = max(depth[op], depth[producer[tensor]] + 1)
            end[op] = begin + least[op]
        return max(end), max(depth)
    ends = np.zeros_like(seconds)
    for op, tensors in enumerate(case.inputs):
        begins = np.zeros(case.num_devices)
        for tensor in tensors:
            source = producer[tensor]
            there = (ends[source][:, None] + case.transfer_s(tensor)).min(0)
            begins = np.maximum(begins, there)
            depth[op] = max(depth[op], depth[source] + 1)
        ends[op] = begins + seconds[op]
    return float(ends.min(1).max()), max(depth)


def _window(case: HostCase, seconds: np.ndarray) -> float:
    """The most that head + seconds / devices + tail comes to, over some of the possible heads."""
    producer = case.producer.tolist()
    head, tail = [0.0] * case.num_ops, [0.0] * case.num_ops
    took = seconds.tolist()
    for op, tensors in enumerate(case.inputs):
        for tensor in tensors:
            source = producer[tensor]
            head[op] = max(head[op], head[source] + took[source])
    for op in range(case.num_ops - 1, -1, -1):
        for tensor in case.inputs[op]:
            source = producer[tensor]
            tail[source] = max(tail[source], tail[op] + took[op])
    heads, tails = np.asarray(head), np.asarray(tail)
    by_tail = np.argsort(-tails, kind="stable")
    heads, tails, seconds = heads[by_tail], tails[by_tail], seconds[by_tail]
    values = np.unique(heads)
    best = 0.0
    for value in values[:: max(len(values) // WINDOWS, 1)]:
        late = heads >= value
        # The ops whose tail is at least each of the falling tails.
        load = np.cumsum(seconds[late]) / case.num_devices
        best = max(best, float(value + (load + tails[late]).max()))
    return best


def _load(seconds: np.ndarray) -> float:
    """The best found of the bounds by weights over devices: mirror ascent, any step is valid."""
    devices = seconds.shape[1]
    total = seconds.sum(0)
    if devices == 1:
        return float(total[0])
    scale = float(total.max())
    if scale <= 0:
        return 0.0
    rates = np.where(total > 0, scale / np.maximum(total, scale * 1e-9), 1e9)
    weights = rates / rates.sum()
    uniform = np.full(devices, 1.0 / devices)
    best = max(_weighted(seconds, uniform)[0], _weighted(seconds, weights)[0])
    if bool((seconds == seconds[:, :1]).all()):
        return best
    for k in range(ROUNDS):
        value, loads = _weighted(seconds, weights)
        best = max(best, value)
        if value <= 0:
            break
        step = np.exp(np.clip((loads / value - 1.0) / np.sqrt(1.0 + k), -3.0, 3.0))
        weights = weights * step
        weights = np.maximum(weights / weights.sum(), 1e-12)
        weights /= weights.sum()
    return best


def _weighted(seconds: np.ndarray, weights: np.ndarray) -> tuple[float, np.ndarray]:
    """(the bound by `weights`, the load [D] when each op goes where it is cheapest by them)."""
    # Weights that sum to a little more than 1 would prove too much.
    weighted = seconds * (weights / (weights.sum() * (1.0 + 2.0**-45)))
    on = weighted.argmin(1)
    loads = np.bincount(on, seconds[np.arange(len(on)), on], minlength=seconds.shape[1])
    return float(weighted.min(1).sum()), loads
