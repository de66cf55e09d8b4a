"""Machines of several devices made from few numbers: copies of a device, and REGAL's."""

from __future__ import annotations

import numpy as np

from egx.errors import HardwareError
from egx.graph.graph import OP_CLASSES
from egx.hardware.spec import MOST_DEVICES, Hardware

# PCI Express 4.0 x16, one direction: 16 lanes x 16 GT/s x 128/130 / 8 bits (PCI-SIG, PCIe 4.0).
LINK_BYTES_PER_S = 31.5e9
# Estimate: what a copy between two devices of one host takes to start.
LINK_LATENCY_S = 5e-6

# One FLOP of a synthetic graph is a microsecond, as is one unit of a CostGraphDef's compute_cost.
REGAL_FLOPS_PER_S = 1e6
# A synthetic op costs about a microsecond per byte that it reads or writes: so does a transfer.
COSTLY_BYTES_PER_S = 1e6


def with_devices(
    hardware: Hardware,
    devices: int,
    *,
    link_bytes_per_s: float | None = None,
    link_latency_s: float | None = None,
) -> Hardware:
    """The machine with that many devices: its first ones, or more copies of the only kind it has.

    Copies are linked as the devices of the machine are, or, where it has only one, by PCI Express
    4.0 x16 (31.5 GB/s, 5 us). The two keywords replace bandwidth and latency of every link.

    Raises:
        HardwareError: for fewer than one device, or more than there are when they differ.
    """
    have = hardware.num_devices
    if isinstance(devices, bool) or not isinstance(devices, int) or devices < 1:
        raise HardwareError(f"devices must be a whole number of 1 or more, got {devices!r}")
    if devices > MOST_DEVICES:
        raise HardwareError(f"devices must be {MOST_DEVICES} at most, got {devices}")
    chosen = np.arange(devices) if devices <= have else np.zeros(devices, int)
    rate, latency = _links(hardware, chosen)
    if devices > have:
        _check_alike(hardware, rate, latency)
    between = ~np.eye(devices, dtype=bool)
    if link_bytes_per_s is not None:
        rate = np.where(between, link_bytes_per_s, 0.0)
    if link_latency_s is not None:
        latency = np.where(between, link_latency_s, 0.0)
    names = [hardware.device_names[k] for k in chosen]
    if devices > have:
        # "chip0" of a file that says `count`, or a name of its own, which may end in a number.
        first = hardware.device_names[0]
        stem = first[:-1] if have > 1 and first.endswith("0") else f"{first}-"
        names = [f"{stem}{k}" for k in range(devices)]
    return Hardware(
        flops_per_s=np.asarray(hardware.flops_per_s)[chosen],
        level_bytes=np.asarray(hardware.level_bytes)[chosen],
        read_bytes_per_s=np.asarray(hardware.read_bytes_per_s)[chosen],
        write_bytes_per_s=np.asarray(hardware.write_bytes_per_s)[chosen],
        link_bytes_per_s=rate,
        link_latency_s=latency,
        launch_s=np.asarray(hardware.launch_s)[chosen],
        name=hardware.name if devices == have else f"{devices} x {hardware.name}",
        level_names=hardware.level_names,
        device_names=names,
    )


def _links(hardware: Hardware, chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(bandwidth, latency) between the chosen devices; those of the first two between copies."""
    rate = np.asarray(hardware.link_bytes_per_s, np.float64)
    latency = np.asarray(hardware.link_latency_s, np.float64)
    if len(chosen) <= hardware.num_devices:
        pairs = np.ix_(chosen, chosen)
        return rate[pairs], latency[pairs]
    between = ~np.eye(len(chosen), dtype=bool)
    one = hardware.num_devices == 1
    return (
        np.where(between, LINK_BYTES_PER_S if one else rate[0, 1], 0.0),
        np.where(between, LINK_LATENCY_S if one else latency[0, 1], 0.0),
    )


def _check_alike(hardware: Hardware, rate: np.ndarray, latency: np.ndarray) -> None:
    """Refuses to copy devices or links that differ."""
    have = hardware.num_devices
    between = ~np.eye(have, dtype=bool)
    same = all(
        (values == values[:1]).all()
        for values in (
            np.asarray(hardware.flops_per_s),
            np.asarray(hardware.level_bytes),
            np.asarray(hardware.read_bytes_per_s),
            np.asarray(hardware.write_bytes_per_s),
            np.asarray(hardware.launch_s),
        )
    )
    if have > 1:
        same &= bool((np.asarray(hardware.link_bytes_per_s)[between] == rate[0, 1]).all())
        same &= bool((np.asarray(hardware.link_latency_s)[between] == latency[0, 1]).all())
    if not same:
        raise HardwareError(
            f"{hardware.name} has {have} devices that differ in themselves or their links, so "
            f"that there are no more of them; expected 1 to {have} devices, got {len(rate)}"
        )


def regal_hardware(
    devices: int = 2,
    *,
    transfers: str = "free",
    memory_bytes: float = 16 * 2**30,
    link_bytes_per_s: float | None = None,
    link_latency_s: float | None = None,
) -> Hardware:
    """The machine of Paliwal et al. (ICLR 2020, arXiv 1905.02494): equal devices, run times given.

    An op takes a microsecond a FLOP, which is how synthetic graphs and CostGraphDefs count; its
    memory traffic is in that number, so memory itself takes no time.

    Args:
        devices: two in the paper.
        transfers: "free" as in the paper, or "costly": a microsecond a byte, which is about what
            a synthetic op takes per byte that it reads or writes.
        memory_bytes: what each device holds; 16 GiB in the paper.
        link_bytes_per_s, link_latency_s: instead of what `transfers` stands for.

    Raises:
        HardwareError: naming the argument.
    """
    rates = {"free": np.inf, "costly": COSTLY_BYTES_PER_S}
    if transfers not in rates:
        raise HardwareError(f"transfers must be 'free' or 'costly', got {transfers!r}")
    if isinstance(devices, bool) or not isinstance(devices, int) or devices < 1:
        raise HardwareError(f"devices must be a whole number of 1 or more, got {devices!r}")
    rate = rates[transfers] if link_bytes_per_s is None else link_bytes_per_s
    between = ~np.eye(devices, dtype=bool)
    free = np.full((devices, 1), np.inf)
    return Hardware(
        flops_per_s=np.full((devices, len(OP_CLASSES)), REGAL_FLOPS_PER_S),
        level_bytes=np.full((devices, 1), memory_bytes),
        read_bytes_per_s=free,
        write_bytes_per_s=free,
        link_bytes_per_s=np.where(between, rate, 0.0),
        link_latency_s=np.where(between, link_latency_s or 0.0, 0.0),
        launch_s=np.zeros(devices),
        name=f"regal, {devices} devices, {transfers} transfers",
        level_names=["memory"],
        device_names=[f"device{k}" for k in range(devices)],
    )
