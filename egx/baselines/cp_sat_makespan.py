"""The least makespan of an execution problem as a constraint program for CP-SAT.

Shapes: N ops, T tensors, D devices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from egx.baselines.cp_sat import cp_model
from egx.baselines.cp_sat_programs import CpProgram, Placement, check_size, is_symmetric
from egx.problems.execution_plans.blocks import depths
from egx.problems.execution_plans.plan import Plan, finish_times
from egx.simulate.execution_table import Transfers, ways_of
from egx.simulate.host_case import HostCase

EXACT_TICKS = 2.0**42
ROUNDED_TICKS = 2.0**31


def ticks_per_second(values: np.ndarray, horizon_s: float) -> float:
    """A power of two: one that makes whole numbers of all values, if the horizon allows."""
    values = values[values > 0]
    if horizon_s <= 0 or not values.size:
        return 1.0
    most = math.floor(math.log2(EXACT_TICKS / horizon_s))
    for power in range(max(-60, most - 80), most + 1):
        scaled = values * 2.0**power
        if np.all(scaled == np.floor(scaled)):
            return 2.0**power
    return 2.0 ** math.floor(math.log2(ROUNDED_TICKS / horizon_s))


class _Makespan:
    """The program while it is built. A trip is a tensor on its way over a link, if it goes."""

    def __init__(self, case: HostCase, *, decide: Sequence[str], transfers: Transfers):
        self.case, self.decide = case, decide
        n, devices = case.num_ops, case.num_devices
        sends = not case.is_free_of_transfers and "device" in decide
        self.took_s = {t: case.transfer_s(t) for t in range(case.num_tensors) if case.consumers[t]}
        self.took_s = {t: s for t, s in self.took_s.items() if sends and s.any()}
        self.in_order = "transfer_priority" not in decide and transfers == "async"
        count = len(self.took_s)
        pairs = count * (count - 1) // 2 if self.in_order else 0
        links = devices * (devices - 1)
        check_size("the makespan", n * devices + (count + 2 * pairs) * links)
        travel_s = [s.max() * devices for s in self.took_s.values()]
        horizon_s = float(case.seconds.max(1).sum() + sum(travel_s))
        every = [case.seconds.reshape(-1), *(s.reshape(-1) for s in self.took_s.values())]
        self.scale = ticks_per_second(np.concatenate(every), horizon_s)
        self.horizon = math.ceil(horizon_s * self.scale) + 1

        self.model = cp_model().CpModel()
        self.placed = Placement(self.model, case, decide=decide, limited=True)
        self.busy: list[list[Any]] = [[] for _ in range(devices)]
        self.links: dict[tuple[int, int], list[tuple[int, Any, Any, Any]]] = {}
        self.on_link: dict[tuple[int, int], list[Any]] = {}
        self.sent: dict[tuple[int, int], Any] = {}
        self.begin = [self.time() for _ in range(n)]
        self.end = [self.time() for _ in range(n)]
        self.add_ops()
        for tensor in self.took_s:
            for target in range(devices):
                self.add_trips(tensor, target, transfers)
        if self.in_order:
            self.add_order_of_trips()
        for intervals in [*self.busy, *self.on_link.values()]:
            self.model.add_no_overlap(intervals)

    def time(self) -> Any:
        return self.model.new_int_var(0, self.horizon, "")

    def ticks(self, seconds: float) -> int:
        return math.floor(seconds * self.scale)

    def add_ops(self) -> None:
        case, model = self.case, self.model
        alike = is_symmetric(case) and "device" in self.decide
        every = []
        for op in range(case.num_ops):
            begin, end = self.begin[op], self.end[op]
            for d, here in enumerate(self.placed.here[op]):
                length = self.ticks(case.seconds[op, d])
                if not isinstance(here, int):
                    self.busy[d].append(
                        model.new_optional_interval_var(begin, length, end, here, "")
                    )
            if alike:
                length = self.ticks(case.seconds[op, 0])
                every.append(model.new_interval_var(begin, length, end, ""))
            for tensor in case.inputs[op]:
                model.add(begin >= self.end[int(case.producer[tensor])])
        if alike:
            # Implied, and what a solver sees best.
            model.add_cumulative(every, [1] * len(every), case.num_devices)

    def add_trips(self, tensor: int, target: int, transfers: Transfers) -> None:
        case, model, here = self.case, self.model, self.placed.here
        made_by = int(case.producer[tensor])
        readers = {c: here[c][target] for c in case.consumers[tensor]}
        readers = {c: x for c, x in readers.items() if not isinstance(x, int)}
        sources = [d for d, x in enumerate(here[made_by]) if d != target and not isinstance(x, int)]
        if not readers or not sources:
            return
        at = self.sent[tensor, target] = self.time()
        model.add(at >= self.end[made_by])
        for source in sources:
            length = self.ticks(float(self.took_s[tensor][source, target]))
            goes, done, from_here = model.new_bool_var(""), self.time(), here[made_by][source]
            model.add_implication(goes, from_here)
            model.add_bool_or([~goes, *readers.values()])
            for consumer, reads in readers.items():
                model.add_bool_or([~from_here, ~reads, goes])
                model.add(self.begin[consumer] >= at + length).only_enforce_if(from_here, reads)
            interval = model.new_optional_interval_var(at, length, done, goes, "")
            if transfers == "blocking":
                self.busy[source].append(interval)
                self.busy[target].append(interval)
            else:
                for way in ways_of(transfers, source, target):
                    self.on_link.setdefault(way, []).append(interval)
                self.links.setdefault((source, target), []).append((tensor, at, done, goes))

    def add_order_of_trips(self) -> None:
        """Over a link, tensors of different ops go in the order of the ops, which are all on its
        first device."""
        before: dict[tuple[int, int, int], Any] = {}
        model, here = self.model, self.placed.here
        for (source, _), trips in self.links.items():
            for i, (one, one_at, one_done, one_goes) in enumerate(trips):
                for two, two_at, two_done, two_goes in trips[i + 1 :]:
                    a, b = int(self.case.producer[one]), int(self.case.producer[two])
                    if a == b:
                        continue
                    key = (min(a, b), max(a, b), source)
                    if key not in before:
                        first = before[key] = model.new_bool_var("")
                        both = [here[a][source], here[b][source]]
                        model.add(self.end[key[0]] <= self.begin[key[1]]).only_enforce_if(
                            *both, first
                        )
                        model.add(self.end[key[1]] <= self.begin[key[0]]).only_enforce_if(
                            *both, ~first
                        )
                    first = before[key] if a < b else ~before[key]
                    model.add(one_done <= two_at).only_enforce_if(one_goes, two_goes, first)
                    model.add(two_done <= one_at).only_enforce_if(one_goes, two_goes, ~first)

    def hint(self, plan: Plan, transfers: Transfers) -> None:
        self.placed.hint(self.model, plan)
        finish, _ = finish_times(self.case, plan, transfers=transfers)
        for op, done in enumerate(finish):
            begin = done - float(self.case.seconds[op, plan.device[op]])
            self.model.add_hint(self.begin[op], max(self.ticks(begin), 0))

    def to_plan(self, solver: Any) -> Plan:
        """Items by when they start, then end, then as the graph has them."""
        case, depth = self.case, depths(self.case).tolist()
        device = self.placed.device(solver)
        items = [
            (solver.value(self.begin[op]), solver.value(self.end[op]), 2 * depth[op], op, -1)
            for op in range(case.num_ops)
        ]
        ops = [item[3] for item in sorted(items)]
        if "transfer_priority" not in self.decide:
            return Plan(device, np.asarray(ops, np.int64))
        for tensor, target in case.naming_uses(device):
            source_op = int(case.producer[tensor])
            at = solver.value(self.end[source_op])
            if (tensor, target) in self.sent:
                at = solver.value(self.sent[tensor, target])
                seconds = self.took_s[tensor][device[source_op], target]
            else:
                seconds = 0.0
            rank = 2 * depth[source_op] + 1
            items.append((at, at + self.ticks(float(seconds)), rank, tensor, target))
        queue = [item[3:] for item in sorted(items)]
        return Plan(device, np.asarray(ops, np.int64), queue)


def makespan_program(
    case: HostCase,
    *,
    decide: Sequence[str],
    transfers: Transfers,
    start: Plan | None,
    known_cost: float | None,
    bound: float,
) -> CpProgram:
    """The least makespan.

    Transfers hold their link (or both devices, or a way out and a way in); unless their order is
    decided, those over a link go in the order of the ops that made them. What is left free only
    lowers the bound: that order over ways that links share, and the order of ops that the problem
    does not decide.

    Args:
        start: a plan to begin from.
        known_cost: seconds of a plan that is known; what is worse is left out.
        bound: seconds that no plan undercuts.
    """
    built = _Makespan(case, decide=decide, transfers=transfers)
    model, horizon = built.model, built.horizon
    makespan = model.new_int_var(0, horizon, "")
    model.add_max_equality(makespan, built.end)
    model.add(makespan >= min(built.ticks(bound), horizon))
    if known_cost is not None:
        model.add(makespan <= min(built.ticks(known_cost * (1.0 + 1e-6)) + 1, horizon))
    if start is not None:
        built.hint(start, transfers)
    model.minimize(makespan)
    return CpProgram(model, lambda value: value / built.scale, built.to_plan)
