"""What a file with measurements holds: a model, its op seconds, and often a machine."""

from __future__ import annotations

import dataclasses
import heapq
import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from egx.errors import FormatError
from egx.graph.graph import Model, real_sizes
from egx.hardware.spec import Hardware
from egx.json_fields import Fields

MICROSECOND = 1e-6


@dataclasses.dataclass(frozen=True)
class Workload:
    """A model with seconds per op, and what else its file says.

    `op_seconds` has a row per real op and a column per device of `hardware`, or one column that
    holds on any device. Memory limits are the capacities of `hardware`, which is None where the
    file names no machine. `lower_s` and `best_s` bound the least makespan on that machine, where
    somebody published them; `notes` hold the rest.
    """

    model: Model
    op_seconds: Float[np.ndarray, "N K"]
    hardware: Hardware | None = None
    lower_s: float | None = None
    best_s: float | None = None
    notes: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        ops = real_sizes(self.model.graph)[0]
        columns = {1} if self.hardware is None else {1, self.hardware.num_devices}
        shape = np.shape(self.op_seconds)
        if len(shape) != 2 or shape[0] != ops or shape[1] not in columns:
            wanted = " or ".join(map(str, sorted(columns)))
            raise FormatError(
                f"{self.model.source}: op_seconds must be [{ops} ops, {wanted} devices], "
                f"got shape {shape}"
            )

    def seconds_on(self, hardware: Hardware) -> Float[np.ndarray, "N D"]:
        """The seconds of each op on each device of a machine.

        Raises:
            FormatError: when devices differ in the measurements and this machine has another
                number of them: nobody measured it.
        """
        given, devices = self.op_seconds, hardware.num_devices
        if given.shape[1] == devices:
            return given
        if (given == given[:, :1]).all():
            return np.repeat(given[:, :1], devices, 1)
        raise FormatError(
            f"{self.model.source}: seconds were measured on {given.shape[1]} unlike devices, "
            f"and {hardware.name} has {devices}"
        )


def read_text(path: str | os.PathLike[str]) -> str:
    """The text of a file.

    Raises:
        FormatError: naming the file.
    """
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise FormatError(f"{path}: cannot be read ({error.strerror or error})") from None
    except UnicodeDecodeError as error:
        raise FormatError(f"{path}: not a text file ({error})") from None


def read_object(path: str | os.PathLike[str]) -> Fields:
    """The object that a JSON file holds.

    Raises:
        FormatError: naming the file, and line and column where it is not JSON.
    """
    try:
        content = json.loads(read_text(path))
    except json.JSONDecodeError as error:
        where = f"{path}:{error.lineno}"
        raise FormatError(f"{where}: not JSON, or truncated ({error.msg})") from None
    except RecursionError:
        raise FormatError(f"{path}: not JSON: it is nested too deeply") from None
    except ValueError as error:
        raise FormatError(f"{path}: not JSON: {error}") from None
    return Fields(content, os.fspath(path), "")


def topological(
    nodes: int, edges: Iterable[tuple[int, int]], cycle: Callable[[int], FormatError]
) -> list[int]:
    """An order in which every node follows what it waits for, lowest indices first.

    Args:
        nodes: how many there are.
        edges: (waited for, waiting), any number of times.
        cycle: makes the error about a node that waits for itself.

    Raises:
        FormatError: what `cycle` makes, if the edges have a cycle.
    """
    after: list[list[int]] = [[] for _ in range(nodes)]
    waits = [0] * nodes
    for source, target in edges:
        after[source].append(target)
        waits[target] += 1
    ready = [k for k, count in enumerate(waits) if count == 0]
    order: list[int] = []
    while ready:
        k = heapq.heappop(ready)
        order.append(k)
        for target in after[k]:
            waits[target] -= 1
            if waits[target] == 0:
                heapq.heappush(ready, target)
    if len(order) == nodes:
        return order
    # From any node that still waits, backwards: who is met twice is on a cycle.
    before = {t: k for k in range(nodes) if waits[k] > 0 for t in after[k] if waits[t] > 0}
    k = next(iter(before))
    seen: set[int] = set()
    while k not in seen:
        seen.add(k)
        k = before[k]
    raise cycle(k)
