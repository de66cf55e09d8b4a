"""A lower bound on the latency of every map, valid or not, in one pass over the ops."""

from __future__ import annotations

import numpy as np

from egx.graph.graph import Graph, real_sizes
from egx.hardware.spec import Hardware


def latency_bound(graph: Graph, hardware: Hardware, *, prefetch: int = 0) -> float:
    """Seconds that no map on device 0 undercuts: each op on its best levels, without capacities.

    Proof. Let r and w be the least seconds to read and to write a unit on any level. Whatever the
    map, an op's inputs and outputs take at least act = r * units read + w * units written, and its
    weights at least load = r * weight units.

    Roofline: latency is the sum over ops of max(compute, act + load) + launch, which grows with
    act and load, so these least values bound it from below.

    Prefetch k: claim that start[i] >= s[i] and finish[i] >= f[i] with
        s[i] = max(f[i-1], s[i-k] + load[i] if op i has weights)
        f[i] = s[i] + max(compute, act) + launch,
    where terms before op 0 are 0. By induction: start[i] >= finish[i-1] >= f[i-1]; with weights,
    start[i] >= free[l] >= start[i-k] + load[i]; the body is at least its least value. Besides,
    the latency is at least the sum of loads of every channel, whose last op starts after all of
    them; of M channels that share all loads, one has at least the mean.

    The simulator rounds to float32: a cost that it reports may fall below exact arithmetic by a
    few units in the last place for each term of an op. The bound is lowered by that much.
    """
    n, t, u = real_sizes(graph)
    unit = float(graph.unit_bytes)
    read = unit / np.asarray(hardware.read_bytes_per_s, np.float64)[0].max()
    write = unit / np.asarray(hardware.write_bytes_per_s, np.float64)[0].max()
    rates = np.asarray(hardware.flops_per_s, np.float64)[0]
    compute = np.asarray(graph.flops, np.float64)[:n] / rates[np.asarray(graph.op_class)[:n]]
    units = np.asarray(graph.tensor_units, np.float64)[:t]
    written = np.bincount(np.asarray(graph.tensor_producer)[:t], units, n)
    consumer = np.asarray(graph.use_consumer)[:u]
    taken = np.bincount(consumer, units[np.asarray(graph.use_tensor)[:u]], n)
    act = read * taken + write * written
    load = read * np.asarray(graph.weight_units, np.float64)[:n]
    launch = float(np.asarray(hardware.launch_s)[0])

    if prefetch == 0:
        bound = float(np.sum(np.maximum(compute, act + load) + launch))
    else:
        body = np.maximum(compute, act) + launch
        start = [0.0] * n
        finish = 0.0
        for i in range(n):
            start[i] = finish
            if load[i]:
                behind = start[i - prefetch] if i >= prefetch else 0.0
                start[i] = max(finish, behind + load[i])
            finish = start[i] + body[i]
        bound = max(finish, float(np.sum(load)) / hardware.num_levels)
    most_uses = int(np.bincount(consumer, minlength=n).max(initial=0))
    return bound * (1.0 - (most_uses + 12) * 2.0**-24)
