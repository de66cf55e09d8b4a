"""List scheduling: ops in a given order, each to the device where it ends first, or where the
least memory is needed.

HEFT after Topcuoglu, Hariri and Wu, "Performance-Effective and Low-Complexity Task Scheduling for
Heterogeneous Computing", IEEE Transactions on Parallel and Distributed Systems 13, 2002.

What HEFT counts and what the semantics say. HEFT sends a tensor when its reader is placed, after
all that its link has to send by then. The static order sends it with its producer. The two agree
(`makespan_s` is the simulator's makespan) where transfers take no time, where there is one device,
and where transfer priorities are decided, since a plan can then say when each transfer is taken.
Elsewhere `makespan_s` is an estimate: a later tensor may get in front on a link.

HEFT looks at no op that comes later. Of a training step it may leave a weight on one device and
its gradient on the other, since each ended a little earlier there, and the update then waits for
megabytes: slower than one device where links are slow. `mind_readers` looks one op ahead.

Shapes: N real ops, D devices.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Sequence

import numpy as np

from egx.problems.execution_plans.live_curve import LiveCurve
from egx.problems.execution_plans.orders import critical_path_order
from egx.problems.execution_plans.plan import Plan
from egx.simulate.execution_table import Transfers, ways_of
from egx.simulate.host_case import HostCase


@dataclasses.dataclass(frozen=True, eq=False)
class ListSchedule:
    """A plan and the schedule that its maker had in mind; `start_s` and `finish_s` are [N]."""

    plan: Plan
    start_s: np.ndarray
    finish_s: np.ndarray

    @property
    def makespan_s(self) -> float:
        return float(self.finish_s.max(initial=0.0))


class _Memory:
    """What each device holds while ops are placed one after another."""

    def __init__(self, case: HostCase, *, queued: bool):
        self.case = case
        self.queued = queued
        self.curves = [LiveCurve(case.num_ops) for _ in range(case.num_devices)]
        self.last: dict[tuple[int, int], int] = {}  # (tensor, device) -> where its life ends
        self.born: list[int] = [0] * case.num_tensors
        self.producer = case.producer.tolist()
        self.units = case.units.tolist()
        self.weights = case.weight_units.tolist()
        self.is_output = case.is_output.tolist()

    def open(self, place: int) -> None:
        for curve in self.curves:
            curve.open(place)

    def ranges(self, op: int, on: int, place: int) -> list[tuple[int, int]]:
        """What the op adds to a device, as (place, units), each from its place to the newest."""
        out = []
        for tensor in self.case.inputs[op]:
            last = self.last.get((tensor, on))
            if last is None:
                # A copy: from where it was sent, with its producer or just before its reader.
                out.append((place if self.queued else self.born[tensor], self.units[tensor]))
            elif last < place:
                out.append((last + 1, self.units[tensor]))
        made = self.case.output_units[op]
        if made:
            out.append((place, int(made)))
        return out

    def peak(self, op: int, on: int, place: int) -> int:
        return self.curves[on].peak_with(self.ranges(op, on, place), self.weights[op])

    def put(self, op: int, on: int, place: int, device: list[int]) -> None:
        curve = self.curves[on]
        for since, units in self.ranges(op, on, place):
            curve.add(since, units)
        curve.weights += self.weights[op]
        end = self.case.num_ops
        for tensor in self.case.inputs[op]:
            home = device[self.producer[tensor]]
            if self.queued and (tensor, on) not in self.last and self.last[tensor, home] < place:
                # The tensor waited at home to be sent.
                self.curves[home].add(self.last[tensor, home] + 1, self.units[tensor])
                self.last[tensor, home] = place
            self.last[tensor, on] = max(self.last.get((tensor, on), -1), place)
        for tensor in self.case.outputs[op]:
            self.born[tensor] = place
            self.last[tensor, on] = end if self.is_output[tensor] else place
            if self.is_output[tensor]:
                curve.held += self.units[tensor]


def heft(
    case: HostCase,
    *,
    order: np.ndarray | None = None,
    devices: Sequence[int] | None = None,
    queued: bool = False,
    transfers: Transfers = "async",
    insertion: bool = False,
    mind_memory: bool = True,
    mind_readers: bool = False,
) -> ListSchedule:
    """Each op on the device where it ends first.

    Args:
        order: of the ops; by falling upward rank if none is given.
        devices: those to use; all by default.
        queued: decide when each transfer is taken (see `Plan.queue`).
        transfers: as the problem has them.
        insertion: an op may go into a gap before ops that were placed earlier. The plan's order is
            then that of the starts, and memory is not minded.
        mind_memory: a device whose capacity the op would overfill is passed over, where another
            is not; else the least overfull is taken.
        mind_readers: where it ends first and what it makes reaches its readers, as far as these
            are known: for each tensor, the slowest transfer that a reader needs whose largest
            input so far is on another device (the smaller of the two is sent).
    """
    n, count = case.num_ops, case.num_devices
    order = critical_path_order(case) if order is None else order
    among = list(range(count)) if devices is None else list(devices)
    seconds, producer = case.seconds.tolist(), case.producer.tolist()
    latency, per_byte = case.link_latency_s.tolist(), case.link_s_per_byte.tolist()
    bytes_of = (case.units * case.unit_bytes).tolist()
    clock = [0.0] * count
    link: dict[tuple[int, int], float] = {}
    arrived: dict[tuple[int, int], float] = {}
    device, start, finish = [0] * n, [0.0] * n, [0.0] * n
    queue: list[tuple[int, int]] = []
    busy: list[list[tuple[float, float]]] = [[] for _ in range(count)]
    largest = [(0.0, -1)] * n  # of each op's inputs that have a device: (bytes, device)
    memory = None
    if mind_memory and not insertion and _may_overflow(case):
        memory = _Memory(case, queued=queued)

    def arrivals(op: int, on: int) -> tuple[float, list[tuple[int, int, float]], list[float]]:
        """(when all inputs are on a device, (tensor, source, end) of new transfers, clocks)."""
        ready, sent = 0.0, []
        clocks = clock
        free: dict[tuple[int, int], float] = {}
        for tensor in case.inputs[op]:
            made, source = finish[producer[tensor]], device[producer[tensor]]
            if source == on:
                since = made
            elif (tensor, on) in arrived:
                since = arrived[tensor, on]
            else:
                took = latency[source][on] + bytes_of[tensor] * per_byte[source][on]
                if transfers == "blocking":
                    if clocks is clock:
                        clocks = list(clock)
                    since = max(made, clocks[source], clocks[on]) + took
                    clocks[source] = clocks[on] = since
                else:
                    ways = ways_of(transfers, source, on)
                    before = max(free.get(way, link.get(way, 0.0)) for way in ways)
                    since = max(made, before) + took
                    free.update(dict.fromkeys(ways, since))
                sent.append((tensor, source, since))
            ready = max(ready, since)
        return ready, sent, clocks

    def apart_s(op: int, on: int) -> float:
        """What it costs the readers of an op that it is on one device, and what else they read
        on another."""
        total = 0.0
        for tensor in case.outputs[op]:
            slowest = 0.0
            for reader in case.consumers[tensor]:
                size, where = largest[reader]
                if where >= 0 and where != on:
                    smaller = min(size, bytes_of[tensor])
                    slowest = max(slowest, latency[on][where] + smaller * per_byte[on][where])
            total += slowest
        return total

    for place, op in enumerate(order.tolist()):
        options = []
        for on in among:
            ready, sent, clocks = arrivals(op, on)
            took = seconds[op][on]
            begin = _gap(busy[on], ready, took) if insertion else max(clocks[on], ready)
            known = begin + took + (apart_s(op, on) if mind_readers else 0.0)
            options.append((known, on, begin, sent, clocks))
        options.sort(key=lambda option: option[:2])
        choice = options[0]
        if memory is not None:
            memory.open(place)
            over = []
            for option in options:
                over.append(memory.peak(op, option[1], place) - case.capacity_units[option[1]])
                if over[-1] <= 0:
                    break
            choice = options[int(np.argmin(np.maximum(over, 0)))]
            memory.put(op, choice[1], place, device)
        _, on, begin, sent, clocks = choice
        end = begin + seconds[op][on]
        clock = clocks
        for tensor, source, since in sent:
            arrived[tensor, on] = since
            for way in ways_of(transfers, source, on):
                link[way] = max(link.get(way, 0.0), since)
            queue.append((tensor, on))
        queue.append((op, -1))
        if mind_readers:
            for tensor in case.outputs[op]:
                for reader in case.consumers[tensor]:
                    largest[reader] = max(largest[reader], (bytes_of[tensor], on))
        device[op], start[op], finish[op] = on, begin, end
        clock[on] = max(clock[on], end)
        if insertion:
            bisect.insort(busy[on], (begin, end))
    starts, ends = np.asarray(start), np.asarray(finish)
    if insertion:
        order = np.lexsort((np.arange(n), ends, starts))
    plan = Plan(np.asarray(device, np.int64), order, queue if queued and not insertion else None)
    return ListSchedule(plan, starts, ends)


def _may_overflow(case: HostCase) -> bool:
    everything = int(case.units.sum() + case.weight_units.sum())
    return everything > int(case.capacity_units.min())


def _gap(busy: list[tuple[float, float]], ready: float, took: float) -> float:
    """The earliest start from `ready` on at which a device is free for so long."""
    begin = ready
    for since, until in busy[max(bisect.bisect_left(busy, (ready, ready)) - 1, 0) :]:
        if begin + took <= since:
            break
        begin = max(begin, until)
    return begin


def spread_by_memory(
    case: HostCase, order: np.ndarray, *, devices: Sequence[int] | None = None
) -> Plan:
    """Each op of an order to the device where the sum of the devices' squared peaks grows least.

    Where none grows, to the one that holds the least for the shortest: copies, and tensors kept
    longer, count. (Squares: the highest peak alone tells nothing while another device is higher.)
    """
    among = list(range(case.num_devices)) if devices is None else list(devices)
    memory = _Memory(case, queued=False)
    device = [0] * case.num_ops
    for place, op in enumerate(order.tolist()):
        memory.open(place)
        options = []
        for on in among:
            curve = memory.curves[on]
            before = curve.highest + curve.weights
            ranges = memory.ranges(op, on, place)
            after = curve.peak_with(ranges, memory.weights[op])
            held = sum(units * (place + 1 - since) for since, units in ranges)
            options.append((after * after - before * before, held, on))
        device[op] = min(options)[2]
        memory.put(op, device[op], place, device)
    return Plan(np.asarray(device, np.int64), order)
