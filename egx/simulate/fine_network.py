"""Transfers that share links, ports and a bridge, for the finer cost model.

Rates are max-min fair (Bertsekas and Gallager, "Data Networks", 2nd edition, 1992, section 6.5.2):
all transfers are raised together until something they cross is full; what crosses it stays there,
the others are raised further. Transfers on one directed link are alike, so that a link's state is
one count and one clock of bytes served to each.

Shapes: D devices.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Hashable, Iterable, Mapping

import numpy as np

Link = tuple[int, int]
At = Callable[..., None]  # at(time, function, *arguments)


def fair_rates(
    counts: Mapping[Link, int], resources: Iterable[tuple[float, Iterable[Link]]]
) -> dict[Link, float]:
    """Bytes per second of each transfer on each link.

    Args:
        counts: transfers on each link.
        resources: (capacity in bytes per second, the links that share it).
    """
    left: list[float] = []
    shared: list[set[Link]] = []
    for capacity, links in resources:
        left.append(capacity)
        shared.append(set(links))
    rates: dict[Link, float] = {}
    rising = {link for link, count in counts.items() if count}
    while rising:
        share, full = math.inf, -1
        for k, links_of in enumerate(shared):
            count = sum(counts[link] for link in links_of & rising)
            if count and left[k] / count < share:
                share, full = left[k] / count, k
        fixed = rising if full < 0 else shared[full] & rising
        rates.update(dict.fromkeys(fixed, share))
        rising = rising - fixed
        if full >= 0:
            for k, links_of in enumerate(shared):
                taken = share * sum(counts[link] for link in links_of & fixed)
                left[k] = max(left[k] - taken, 0.0)
    return rates


class _Flows:
    """What is on one link: each transfer ends when `served` reaches its mark."""

    def __init__(self) -> None:
        self.marks: list[tuple[float, int, Hashable]] = []
        self.served = self.since = self.rate = 0.0
        self.version = 0

    def advance(self, now: float) -> None:
        # An infinite rate serves all there is at once, in `_finish`.
        if self.marks and math.isfinite(self.rate):
            self.served += self.rate * (now - self.since)
        self.since = now


class Network:
    """Transfers in flight.

    Args:
        link_bytes_per_s, link_latency_s: [D, D].
        port_bytes_per_s: [2, D] out of a device and into it, over all its links; inf for no limit.
        bridge_bytes_per_s: of all links together; inf for no limit.
        at: schedules a call.
        arrived: is called with each transfer that has ended.
    """

    def __init__(
        self,
        link_bytes_per_s: np.ndarray,
        link_latency_s: np.ndarray,
        *,
        port_bytes_per_s: np.ndarray,
        bridge_bytes_per_s: float,
        at: At,
        arrived: Callable[[float, Link, Hashable], None],
    ):
        self.rate, self.latency = link_bytes_per_s.tolist(), link_latency_s.tolist()
        self.ports, self.bridge = port_bytes_per_s.tolist(), bridge_bytes_per_s
        ports_limit = bool(np.isfinite(port_bytes_per_s).any())
        self.coupled = ports_limit or math.isfinite(bridge_bytes_per_s)
        self.at, self.arrived = at, arrived
        self.flows: dict[Link, _Flows] = {}
        self.count: dict[Link, int] = {}  # in flight, those that wait for their latency included
        self.busy_since: dict[Link, float] = {}
        self.busy_s = np.zeros(link_bytes_per_s.shape)
        self.made = 0

    def send(self, now: float, link: Link, size: float, what: Hashable) -> None:
        """Starts a transfer: its latency passes first, and takes no bandwidth."""
        if not self.count.get(link):
            self.busy_since[link] = now
        self.count[link] = self.count.get(link, 0) + 1
        self.at(now + self.latency[link[0]][link[1]], self._begin, link, size, what)

    def _begin(self, now: float, link: Link, size: float, what: Hashable) -> None:
        flows = self.flows.setdefault(link, _Flows())
        flows.advance(now)
        if not flows.marks:
            flows.served = 0.0
        self.made += 1
        heapq.heappush(flows.marks, (flows.served + size, self.made, what))
        self._share(now, link)

    def _finish(self, now: float, link: Link, version: int) -> None:
        flows = self.flows[link]
        if version != flows.version:
            return
        flows.advance(now)
        ended = []
        # The one that was waited for has ended, whatever rounding says, and its equals with it.
        flows.served = max(flows.served, flows.marks[0][0])
        while flows.marks and (flows.marks[0][0] <= flows.served or math.isinf(flows.rate)):
            ended.append(heapq.heappop(flows.marks)[2])
        self.count[link] -= len(ended)
        if not self.count[link]:
            self.busy_s[link] += now - self.busy_since[link]
        self._share(now, link)
        for what in ended:
            self.arrived(now, link, what)

    def _share(self, now: float, changed: Link) -> None:
        """New rates after a change on one link."""
        counts = {link: len(f.marks) for link, f in self.flows.items() if f.marks}
        if self.coupled:
            rates = fair_rates(counts, self._resources(counts))
        else:
            rates = {changed: self._own(changed) / counts[changed]} if changed in counts else {}
        for link, rate in rates.items():
            flows = self.flows[link]
            if rate == flows.rate and link != changed:
                continue
            flows.advance(now)
            flows.rate = rate
            flows.version += 1
            left = flows.marks[0][0] - flows.served
            took = 0.0 if math.isinf(rate) else left / rate
            self.at(now + max(took, 0.0), self._finish, link, flows.version)

    def _own(self, link: Link) -> float:
        return float(self.rate[link[0]][link[1]])

    def _resources(self, counts: Mapping[Link, int]) -> list[tuple[float, list[Link]]]:
        resources = [(self._own(link), [link]) for link in counts]
        for side in (0, 1):
            for device in {link[side] for link in counts}:
                links = [link for link in counts if link[side] == device]
                resources.append((self.ports[side][device], links))
        resources.append((self.bridge, list(counts)))
        return [entry for entry in resources if math.isfinite(entry[0])]
