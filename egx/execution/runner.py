"""Segments of a traced function on real devices: placed, compiled once each, run, timed."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import Literal

from egx.errors import DecisionError, GraphError
from egx.execution.devices import checked_devices
from egx.execution.segments import Segment, segments_of
from egx.formats.jaxpr import Traced
from egx.formats.jaxpr_flat import run as run_equations


@dataclasses.dataclass(frozen=True)
class Executed:
    """What a run on real devices gave; unpacks to (outputs, seconds).

    `seconds` is the median of `runs_s`. `first_s` is the first run, which compiles; programs that
    an earlier plan of the same runner needed are compiled already. `transfers` are between
    devices, in one run.
    """

    outputs: Any
    seconds: float
    runs_s: tuple[float, ...]
    first_s: float
    segments: int
    transfers: int
    devices: tuple[Any, ...]

    def __iter__(self) -> Iterator[Any]:
        return iter((self.outputs, self.seconds))


class _Step(NamedTuple):
    """A segment by slots: what to call, what it reads and makes, what is sent and dropped then."""

    call: Callable[..., Any]
    device: Any
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    sends: tuple[tuple[int, int, Any], ...]
    drops: tuple[int, ...]


class Runner:
    """A traced function with its arguments, ready for any number of plans.

    Arguments and constants lie on every device that reads them before a run starts. A step of
    the host starts a segment, or a transfer, without waiting for it: devices run what they were
    given in that order, beside each other.
    """

    def __init__(self, traced: Traced, args: Sequence[Any], devices: Sequence[Any] | None = None):
        """Args:
            traced: of the function and arguments of these types.
            args: arrays.
            devices: device k of a plan is the k-th of these; by default of `jax.devices()`.

        Raises:
            GraphError: for other arguments than those traced, or descriptions without values.
            DecisionError: for devices that are none.
        """
        self.traced = traced
        self.devices = checked_devices(devices, DecisionError)
        program = traced.program
        leaves = program.leaves(args)
        for leaf, path in zip(leaves, program.paths, strict=True):
            if isinstance(leaf, jax.ShapeDtypeStruct):
                raise GraphError(f"{program.name}: {path} has no values; expected an array to run")
        self._given = dict(zip(program.arguments, leaves, strict=True)) | program.constants
        self._placed: dict[tuple[int, int], Any] = {}
        self._programs: dict[Any, Callable[..., Any]] = {}

    def run(
        self,
        decisions: Mapping[str, np.ndarray],
        *,
        order: Sequence[int] | None = None,
        repeats: int = 5,
        warmup: int = 1,
    ) -> Executed:
        """Runs a plan `warmup` and then `repeats` times.

        Args:
            decisions, order: as in `segments_of`.
            repeats: runs that are timed; the median counts.
            warmup: runs before them, at least one: it compiles.

        Raises:
            DecisionError: for a device that is not there.
        """
        for name, value, least in (("repeats", repeats, 1), ("warmup", warmup, 1)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise DecisionError(f"{name} must be a whole number of {least} or more: {value!r}")
        self._check_devices(decisions)
        segments = segments_of(self.traced, decisions, order)
        steps, slots, outputs = self._steps(segments)
        made: list[Any]
        first, made = _timed(steps, slots, outputs)
        for _ in range(warmup - 1):
            _timed(steps, slots, outputs)
        runs = []
        for _ in range(repeats):
            made = []  # frees the outputs of the run before
            seconds, made = _timed(steps, slots, outputs)
            runs.append(seconds)
        used = sorted({segment.device for segment in segments})
        return Executed(
            outputs=self._result(made),
            seconds=statistics.median(runs),
            runs_s=tuple(runs),
            first_s=first,
            segments=len(steps),
            transfers=sum(len(step.sends) for step in steps),
            devices=tuple(self.devices[d] for d in used),
        )

    def _check_devices(self, decisions: Mapping[str, np.ndarray]) -> None:
        device = np.asarray(decisions.get("device", [0]))
        highest = int(device.max(initial=0))
        if highest >= len(self.devices):
            names = ", ".join(map(str, self.devices))
            raise DecisionError(
                f"the plan runs op {int(np.argmax(device))} on device {highest}, but there are "
                f"{len(self.devices)} devices here: {names}"
            )

    def _result(self, made: Sequence[Any]) -> Any:
        """What the function returns, on one device."""
        program, home = self.traced.program, self.devices[0]
        from_runs = iter(made)
        found = []
        for atom in program.outputs:
            if isinstance(atom, Literal):
                aval: Any = atom.aval
                array = np.asarray(atom.val, aval.dtype)
            else:
                array = self._given[atom] if atom in self._given else next(from_runs)
            found.append(jax.device_put(array, home))
        return program.result(found)

    def _argument(self, value: int, device: int) -> Any:
        """An argument or constant on a device; it is sent there once, for all plans."""
        if (value, device) not in self._placed:
            array = jax.device_put(self._given[value], self.devices[device])
            self._placed[value, device] = jax.block_until_ready(array)
        return self._placed[value, device]

    def _program(self, segment: Segment) -> Callable[..., Any]:
        key = segment.key(self.traced.program.avals)
        if key not in self._programs:
            self._programs[key] = _compiled(segment)
        return self._programs[key]

    def _steps(self, segments: Sequence[Segment]) -> tuple[list[_Step], list[Any], list[int]]:
        """The steps, what lies in the slots before a run, and the slots of the outputs."""
        slots: list[Any] = []
        slot: dict[tuple[int, int], int] = {}  # by (value, device)

        def at(value: int, device: int, array: Any = None) -> int:
            if (value, device) not in slot:
                slot[value, device] = len(slots)
                slots.append(array)
            return slot[value, device]

        readers: dict[int, set[int]] = {}
        for segment in segments:
            for value in segment.reads:
                readers.setdefault(value, set()).add(segment.device)
        made_on = {v: segment.device for segment in segments for v in segment.writes}
        outputs = [
            at(value, made_on[value])
            for value in self.traced.program.outputs
            if not isinstance(value, Literal) and value not in self._given
        ]
        steps = []
        for segment in segments:
            d = segment.device
            reads = tuple(
                at(v, d, self._argument(v, d) if v in self._given else None) for v in segment.reads
            )
            writes = tuple(at(v, d) for v in segment.writes)
            sends = tuple(
                (at(v, d), at(v, other), self.devices[other])
                for v in segment.writes
                for other in sorted(readers.get(v, set()) - {d})
            )
            call = self._program(segment)
            steps.append(_Step(call, self.devices[d], reads, writes, sends, ()))
        kept = {slot[key] for key in slot if key[0] in self._given} | set(outputs)
        last: dict[int, int] = {}
        for k, step in enumerate(steps):
            for index in (*step.reads, *step.writes, *(s for s, _, _ in step.sends)):
                last[index] = k
        drops: dict[int, list[int]] = {}
        for index, k in last.items():
            if index not in kept:
                drops.setdefault(k, []).append(index)
        steps = [step._replace(drops=tuple(drops.get(k, ()))) for k, step in enumerate(steps)]
        return steps, slots, outputs


def _compiled(segment: Segment) -> Callable[..., Any]:
    def program(*arrays: Any) -> tuple[Any, ...]:
        values = run_equations(segment.equations, dict(zip(segment.reads, arrays, strict=True)))
        return tuple(values[value] for value in segment.writes)

    return jax.jit(program)


def _timed(
    steps: Sequence[_Step], initial: Sequence[Any], outputs: Sequence[int]
) -> tuple[float, list[Any]]:
    """(seconds, outputs) of one run, from the first start to the last output."""
    slots = list(initial)
    send = jax.device_put
    start = time.perf_counter()
    for call, device, reads, writes, sends, drops in steps:
        if reads:
            made = call(*[slots[k] for k in reads])
        else:
            # Nothing says where a program without arguments is to run.
            with jax.default_device(device):
                made = jax.device_put(call(), device)
        for k, array in zip(writes, made, strict=True):
            slots[k] = array
        for source, target, to in sends:
            slots[target] = send(slots[source], to)
        for k in drops:
            slots[k] = None
    made = jax.block_until_ready([slots[k] for k in outputs])
    return time.perf_counter() - start, made
