"""A second, finer cost model, to check the plans that a search found by the first.

An event simulation in plain Python and double precision that shares no code with the simulator of
the search but fusion's clusters. Finer are:

- links: transfers on one link share its bandwidth instead of waiting for each other, and all links
  may share a device's port and a bridge (the PCIe root of a host); where transfers hold ports, all
  links of a device share one in each direction that is as fast as the fastest of them;
- launches: a host issues kernels one by one and each device's queue of issued kernels is bounded,
  so that many tiny ops are bound by the host;
- memory along time: an op's outputs exist from its start, a copy from the start of its transfer,
  until the last that needs them has ended.

Decisions mean what they mean in the semantics. With `FineOptions.plain()` times are those of the
static order (4.2) and the run-time order (4.3) exactly.

In static order each device runs its items in the order of items; the host issues, of the devices
whose queue has room, the op that stands earliest in that order. In run-time order the host issues,
for the device with the fewest kernels in its queue, the op of highest priority among those whose
inputs are there (on its own device: were issued, where the queue holds more than one kernel).

Shapes: N real ops, T real tensors, D devices.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections import deque
from collections.abc import Mapping
from typing import Any, Literal, Protocol, runtime_checkable

import equinox as eqx
import jax.numpy as jnp
import numpy as np

from egx.errors import DecisionError, ProblemError
from egx.graph.graph import Graph
from egx.hardware.spec import Hardware
from egx.simulate.execution_table import Transfers, ways_of
from egx.simulate.fine_case import FineCase, fine_case
from egx.simulate.fine_network import Link, Network
from egx.simulate.fusion import clusters

Transfer = tuple[int, int]  # (tensor, target)
Item = tuple[str, Any]  # ("op", root) or ("transfer", Transfer)


@dataclasses.dataclass(frozen=True)
class FineOptions:
    """What is finer.

    Args:
        share_links: transfers share links; else they take turns, as in the semantics.
        port_bytes_per_s: of each device, in each direction, over all its links together.
        bridge_bytes_per_s: of all links together.
        issue_s: of the host for each kernel, on top of what a launch costs the device; None is
            the device's `launch_s`, which the device then does not spend.
        queue_length: kernels that a device has issued and not finished, at most; 1 issues nothing
            ahead. (A CUDA stream was seen to take some 1,000 before the host waits: NVIDIA
            developer forums, topic 68937, 2019.)
        hosts: "one" thread issues for all devices, or one "each".
    """

    share_links: bool = True
    port_bytes_per_s: float = math.inf
    bridge_bytes_per_s: float = math.inf
    issue_s: float | None = None
    queue_length: int = 2
    hosts: Literal["one", "each"] = "one"

    def __post_init__(self) -> None:
        for name in ("port_bytes_per_s", "bridge_bytes_per_s"):
            if not getattr(self, name) > 0:
                raise ProblemError(f"{name} must be above 0, got {getattr(self, name)!r}")
        if self.issue_s is not None and not 0 <= self.issue_s < math.inf:
            raise ProblemError(f"issue_s must be finite and 0 or more, got {self.issue_s!r}")
        if self.queue_length < 1:
            raise ProblemError(f"queue_length must be 1 or more, got {self.queue_length!r}")
        if self.hosts not in ("one", "each"):
            raise ProblemError(f"hosts must be 'one' or 'each', got {self.hosts!r}")

    @staticmethod
    def plain() -> FineOptions:
        """Nothing finer than the semantics, but memory along time."""
        return FineOptions(share_links=False, issue_s=0.0, queue_length=1)


@dataclasses.dataclass(frozen=True, eq=False)
class FineOutcome:
    """What a plan does under the finer model; seconds, and exact bytes.

    `peak_bytes` is along time, weights included. `link_busy_s` says how long anything was on a
    link. `start_s` and `finish_s` are NaN for ops that are fused into another.
    """

    makespan_s: float
    fits: bool
    peak_bytes: np.ndarray  # [D] int64
    device_busy_s: np.ndarray  # [D]
    link_busy_s: np.ndarray  # [D, D]
    host_busy_s: float
    start_s: np.ndarray  # [N]
    finish_s: np.ndarray  # [N]


@runtime_checkable
class SeveralDevices(Protocol):
    """What is read of a problem: an `Execution`, which stands above this module."""

    graph: Graph
    hardware: Hardware
    order: str
    transfers: Transfers

    @property
    def op_seconds(self) -> np.ndarray | None: ...


def check_plan(
    problem: SeveralDevices, decisions: Mapping[str, Any], *, options: FineOptions | None = None
) -> FineOutcome:
    """What a plan of an `Execution` problem does under the finer model.

    Raises:
        DecisionError: for a decision that is unknown, of a wrong length, or out of range.
    """
    graph, hardware = problem.graph, problem.hardware
    given = _checked(decisions, graph, hardware.num_devices)
    root = None
    if "fusion" in given:
        root = np.asarray(_clusters(graph, jnp.asarray(given["fusion"], jnp.int32)))
    case = fine_case(
        graph, hardware, given.get("device"), root, problem.op_seconds,
        launch_on_device=options is not None and options.issue_s is not None,
    )  # fmt: skip
    return run_case(
        case,
        priority=given.get("priority"),
        transfer_priority=given.get("transfer_priority"),
        runtime=problem.order == "runtime",
        transfers=problem.transfers,
        options=options or FineOptions(),
    )


_clusters = eqx.filter_jit(clusters)


def _checked(decisions: Mapping[str, Any], graph: Graph, devices: int) -> dict[str, np.ndarray]:
    lengths = {"device": graph.num_ops, "fusion": graph.num_ops, "priority": graph.num_ops,
               "transfer_priority": graph.num_uses}  # fmt: skip
    out = {}
    for name, value in decisions.items():
        if name not in lengths:
            raise DecisionError(f"unknown decision {name!r}; known are {sorted(lengths)}")
        array = np.asarray(value)
        if array.shape != (lengths[name],):
            raise DecisionError(
                f"decision {name!r} must have shape ({lengths[name]},), got {array.shape}"
            )
        if name == "device" and ((array < 0) | (array >= devices)).any():
            raise DecisionError(f"decision 'device' must be 0 to {devices - 1}")
        out[name] = array
    return out


def run_case(
    case: FineCase,
    *,
    priority: np.ndarray | None = None,
    transfer_priority: np.ndarray | None = None,
    runtime: bool = False,
    transfers: Transfers = "async",
    options: FineOptions,
) -> FineOutcome:
    """Runs one plan; `priority` [N] and `transfer_priority` [U] may be longer."""
    run = _Run(case, priority, runtime=runtime, transfers=transfers, options=options)
    if not runtime:
        run.take_in_order(_static_order(case, priority, transfer_priority))
    return run.outcome()


def _ports(case: FineCase, options: FineOptions, *, as_links: bool) -> np.ndarray:
    """Bytes per second [2, D] out of each device and into it; `as_links`: of its fastest link."""
    limit = np.full((2, case.num_devices), options.port_bytes_per_s)
    if not as_links or case.num_devices == 1:
        return limit
    rate = case.link_bytes_per_s.copy()
    np.fill_diagonal(rate, 0.0)
    return np.minimum(limit, [rate.max(1), rate.max(0)])


def _static_order(
    case: FineCase, priority: np.ndarray | None, transfer_priority: np.ndarray | None
) -> list[Item]:
    """The order of items of 4.2."""
    urgent = [0.0] * case.num_ops if priority is None else priority.astype(float).tolist()
    queued = transfer_priority is not None
    named = [] if transfer_priority is None else transfer_priority.astype(float).tolist()
    missing = [len(tensors) for tensors in case.inputs]
    heap: list[tuple[float, int, int, Item]] = []

    def push_op(op: int) -> None:
        heapq.heappush(heap, (-urgent[op], 0, op, ("op", op)))

    for op in case.roots:
        if missing[op] == 0:
            push_op(op)
    order: list[Item] = []

    def there(tensor: int, device: int) -> None:
        for op in case.readers.get((tensor, device), ()):
            missing[op] -= 1
            if missing[op] == 0:
                push_op(op)

    while heap:
        item = heapq.heappop(heap)[3]
        order.append(item)
        if item[0] == "transfer":
            there(*item[1])
            continue
        op = item[1]
        for tensor in case.outputs[op]:
            there(tensor, case.device[op])
        for use, transfer in case.sends[op]:
            if queued:
                heapq.heappush(heap, (-named[use], 1, use, ("transfer", transfer)))
            else:
                order.append(("transfer", transfer))
                there(*transfer)
    return order


class _Run:
    """The state of a run, moved on by events."""

    def __init__(
        self, case: FineCase, priority: np.ndarray | None, *, runtime: bool, transfers: Transfers,
        options: FineOptions,
    ):  # fmt: skip
        self.case, self.options, self.runtime = case, options, runtime
        self.blocking = transfers == "blocking"
        # Shared ports are a limit of the network; where turns are taken they are waited for.
        takes_turns = not options.share_links
        self.waits_for: Transfers = transfers if takes_turns else "async"
        shares_ports = transfers == "ports" and options.share_links
        devices = case.num_devices
        self.now, self.made = 0.0, 0
        self.events: list[tuple[float, int, Any, tuple[Any, ...]]] = []
        self.network = Network(
            case.link_bytes_per_s, case.link_latency_s,
            port_bytes_per_s=_ports(case, options, as_links=shares_ports),
            bridge_bytes_per_s=options.bridge_bytes_per_s,
            at=self.at, arrived=self.arrived,
        )  # fmt: skip
        # Devices: what they will run in which order, what runs, what was issued.
        self.stream: list[deque[Item]] = [deque() for _ in range(devices)]
        self.running = [False] * devices
        self.in_queue = [0] * devices
        self.issued = [False] * case.num_ops
        self.missing = [len(tensors) for tensors in case.inputs]
        self.device_busy = [0.0] * devices
        self.start, self.finish = [math.nan] * case.num_ops, [math.nan] * case.num_ops
        # Links or ports: what goes next, what may go, what is taken (where turns are taken).
        self.waiting: dict[Link, deque[Transfer]] = {}
        self.requested: set[Transfer] = set()
        self.taken: set[Link] = set()
        # Hosts, and what they may issue: (place in the order, op), or by priority.
        self.hosts = [range(devices)] if options.hosts == "one" else [[d] for d in range(devices)]
        self.host_busy = [False] * len(self.hosts)
        self.host_busy_s = 0.0
        self.ahead = options.queue_length > 1
        self.to_issue: list[list[tuple[Any, int]]] = [[] for _ in range(devices)]
        self.urgent = None if priority is None else (-priority.astype(float)).tolist()
        self.unissued = list(self.missing)  # inputs that are not there for the host's choice
        # Memory.
        self.live = case.weight_units.tolist()
        self.peak = list(self.live)
        self.needs = dict(case.needs)
        if runtime:
            for op in case.roots:
                if self.unissued[op] == 0:
                    self.may_issue(op)

    def at(self, time: float, call: Any, *arguments: Any) -> None:
        self.made += 1
        heapq.heappush(self.events, (time, self.made, call, arguments))

    def take_in_order(self, order: list[Item]) -> None:
        """Static order: every device, link and host takes its items in this order."""
        for place, (kind, what) in enumerate(order):
            if kind == "op":
                on = self.case.device[what]
                self.stream[on].append((kind, what))
                # A sorted list is a heap.
                self.to_issue[on].append((place, what))
            else:
                if self.blocking:
                    for device in self.case.link_of(what):
                        self.stream[device].append((kind, what))
                else:
                    self.queue(what)

    def outcome(self) -> FineOutcome:
        while True:
            while self.events and self.events[0][0] <= self.now:
                _, _, call, arguments = heapq.heappop(self.events)
                call(self.now, *arguments)
            # One decision at a time: what takes no time is done before the next.
            if self.start_one() or self.issue_one():
                continue
            if not self.events:
                break
            self.now = self.events[0][0]
        case = self.case
        finish = np.asarray(self.finish)
        peak = np.asarray(self.peak, np.int64)
        return FineOutcome(
            makespan_s=float(np.nanmax(finish)) if case.roots else 0.0,
            fits=bool((peak <= case.capacity_units).all()),
            peak_bytes=peak * case.unit_bytes,
            device_busy_s=np.asarray(self.device_busy),
            link_busy_s=self.network.busy_s,
            host_busy_s=self.host_busy_s,
            start_s=np.asarray(self.start),
            finish_s=finish,
        )

    # Devices.

    def start_one(self) -> bool:
        for device, stream in enumerate(self.stream):
            if not stream or self.running[device]:
                continue
            kind, what = stream[0]
            if kind == "op":
                if self.issued[what] and self.missing[what] == 0:
                    self.start_op(device, what)
                    return True
            elif self.start_blocking(what):
                return True
        return False

    def start_op(self, device: int, op: int) -> None:
        case = self.case
        self.stream[device].popleft()
        self.running[device] = True
        self.hold(device, case.output_units[op])
        seconds = case.seconds[op]
        self.start[op] = self.now
        self.device_busy[device] += seconds
        if self.runtime:
            # As in the semantics, where an op that starts claims the ways of what it will send.
            for _, transfer in case.sends[op]:
                self.queue(transfer)
        self.at(self.now + seconds, self.end_op, device, op)

    def end_op(self, now: float, device: int, op: int) -> None:
        case = self.case
        self.finish[op] = now
        self.running[device] = False
        self.in_queue[device] -= 1
        for tensor in case.outputs[op]:
            self.there(tensor, device)
            self.release(tensor, device)  # its producer needed it until now
        for tensor in case.inputs[op]:
            self.release(tensor, device)
        for _, transfer in case.sends[op]:
            self.request(transfer)

    def there(self, tensor: int, device: int) -> None:
        """A tensor has come to be on a device."""
        at_home = self.case.home(tensor) == device
        for op in self.case.readers.get((tensor, device), ()):
            self.missing[op] -= 1
            if self.runtime and not (at_home and self.ahead):
                self.has_input(op)

    # Hosts.

    def has_input(self, op: int) -> None:
        self.unissued[op] -= 1
        if self.unissued[op] == 0:
            self.may_issue(op)

    def may_issue(self, op: int) -> None:
        key = self.now if self.urgent is None else self.urgent[op]
        heapq.heappush(self.to_issue[self.case.device[op]], (key, op))

    def issue_one(self) -> bool:
        for host, devices in enumerate(self.hosts):
            if self.host_busy[host]:
                continue
            free = [d for d in devices if self.to_issue[d] and self.in_queue[d] < self.room]
            if not free:
                continue
            if self.runtime:
                device = min(free, key=lambda d: (self.in_queue[d], d))
            else:
                device = min(free, key=lambda d: self.to_issue[d][0])
            op = heapq.heappop(self.to_issue[device])[1]
            self.in_queue[device] += 1
            if self.runtime:
                self.stream[device].append(("op", op))
            took = self.case.launch_s[device] if self.options.issue_s is None else (
                self.options.issue_s
            )  # fmt: skip
            self.host_busy[host] = True
            self.host_busy_s += took
            self.at(self.now + took, self.end_issue, host, op)
            return True
        return False

    @property
    def room(self) -> int:
        return self.options.queue_length

    def end_issue(self, now: float, host: int, op: int) -> None:
        del now
        self.host_busy[host] = False
        self.issued[op] = True
        if self.runtime and self.ahead:
            on = self.case.device[op]
            for tensor in self.case.outputs[op]:
                for reader in self.case.readers.get((tensor, on), ()):
                    self.has_input(reader)

    # Links.

    def request(self, transfer: Transfer) -> None:
        if self.blocking:
            return
        self.requested.add(transfer)
        self.send_next(self.case.link_of(transfer))

    def ways(self, link: Link) -> tuple[Link, ...]:
        return ways_of(self.waits_for, *link)

    def queue(self, transfer: Transfer) -> None:
        for way in self.ways(self.case.link_of(transfer)):
            self.waiting.setdefault(way, deque()).append(transfer)

    def send_next(self, link: Link) -> None:
        """What is first in all its queues, of those in which a transfer of `link` stood."""
        for way in self.ways(link):
            while (first := self.first(way)) is not None:
                one = self.case.link_of(first)
                for mine in self.ways(one):
                    self.waiting[mine].popleft()
                    if not self.options.share_links:
                        self.taken.add(mine)
                self.send(one, first)

    def first(self, way: Link) -> Transfer | None:
        """The transfer that stands first there, if it may go."""
        transfer = self.waiting[way][0] if self.waiting[way] else None
        if transfer is None or transfer not in self.requested:
            return None
        ways = self.ways(self.case.link_of(transfer))
        goes = all(w not in self.taken and self.waiting[w][0] == transfer for w in ways)
        return transfer if goes else None

    def start_blocking(self, transfer: Transfer) -> bool:
        link = self.case.link_of(transfer)
        heads = [self.stream[d] and self.stream[d][0] for d in link]
        if any(self.running[d] for d in link) or heads != [("transfer", transfer)] * 2:
            return False
        for device in link:
            self.stream[device].popleft()
            self.running[device] = True
        self.send(link, transfer)
        return True

    def send(self, link: Link, transfer: Transfer) -> None:
        units = self.case.units[transfer[0]]
        self.hold(link[1], units)
        self.network.send(self.now, link, units * self.case.unit_bytes, transfer)

    def arrived(self, now: float, link: Link, what: Any) -> None:
        tensor, target = what
        if self.blocking:
            for device in link:
                self.running[device] = False
        self.there(tensor, target)
        self.release(tensor, link[0])
        if not self.blocking:
            self.taken.difference_update(self.ways(link))
            self.send_next(link)
        del now

    # Memory.

    def hold(self, device: int, units: int) -> None:
        self.live[device] += units
        self.peak[device] = max(self.peak[device], self.live[device])

    def release(self, tensor: int, device: int) -> None:
        """One that needed a tensor on a device has ended."""
        self.needs[tensor, device] -= 1
        if self.needs[tensor, device] == 0:
            self.live[device] -= self.case.units[tensor]
