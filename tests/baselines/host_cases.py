"""Cases as the host sees them, made without a simulator: nothing compiles."""

from __future__ import annotations

import numpy as np

from egx.simulate.host_case import HostCase


def host(entries, devices, *, link=np.inf, latency_s=0.0, outputs=()):
    """The host's view of plain entries (as `cases.build` takes them) on equal devices of a FLOP a
    second, without a simulator."""
    sizes = [len(op["sizes"]) for op in entries]
    seconds = np.repeat(np.array([[op["flops"]] for op in entries]), devices, 1)
    off = 1.0 - np.eye(devices)
    count = len(entries)
    return HostCase(
        producer=np.repeat(np.arange(count), sizes),
        units=np.array([s for op in entries for s in op["sizes"]], np.int64),
        is_output=np.isin(np.arange(sum(sizes)), outputs),
        use_tensor=np.array([t for op in entries for t in op["inputs"]], np.int64),
        use_consumer=np.repeat(np.arange(count), [len(op["inputs"]) for op in entries]),
        weight_units=np.array([op["weight"] for op in entries], np.int64),
        opaque=np.zeros(count, bool),
        reduction=np.zeros(count, bool),
        contraction=np.zeros(count, bool),
        layer=np.array([op.get("layer", -1) for op in entries], np.int64),
        seconds=seconds,
        compute_s=seconds,
        launch_s=np.zeros(devices),
        read_bytes_per_s=np.full(devices, np.inf),
        write_bytes_per_s=np.full(devices, np.inf),
        link_s_per_byte=off / link,
        link_latency_s=off * latency_s,
        capacity_units=np.full(devices, 2**31 - 1),
        unit_bytes=1.0,
    )


def wide(seed, ops, devices):
    """A random graph in which many tensors wait long for their last readers."""
    rng = np.random.default_rng(seed)
    entries = [
        {
            "inputs": rng.integers(0, i, min(i, 3)).tolist() if i else [],
            "sizes": [int(rng.integers(30, 70))],
            "flops": float(rng.integers(1, 9)),
            "weight": 0,
        }
        for i in range(ops)
    ]
    return host(entries, devices)
