"""Standard Task Graph Set: task graphs for identical processors and free communication.

Format of Tobita and Kasahara, "A standard task graph set for fair evaluation of multiprocessor
scheduling algorithms", Journal of Scheduling 5 (2002): the number of tasks n, then n + 2 lines
`id time #predecessors predecessor...`, whose first and last task take no time; `#` starts a
comment. Times are taken as seconds; an edge is a use of an empty tensor.
"""

from __future__ import annotations

import csv
import os
from pathlib import Path

import numpy as np

from egx.errors import FormatError
from egx.formats.workload import Workload, read_text
from egx.graph.builder import GraphBuilder, Tensor
from egx.graph.graph import OP_CLASSES
from egx.hardware.spec import Hardware
from egx.json_fields import short


def load_stg(path: str | os.PathLike[str], *, processors: int = 2) -> Workload:
    """The task graph in a file on that many processors; op i is task i, dummies included.

    `lower_s` and `best_s` are those of the lists of optima (`optimal_*.csv` in the folder above
    the file's), where they lie there and have this case.

    Raises:
        FormatError: naming the file, the line and the field.
    """
    if processors < 1:
        raise FormatError(f"{path}: processors: expected 1 or more, got {processors}")
    rows = _rows(Path(path))
    builder = GraphBuilder(Path(path).name)
    made: list[Tensor] = []
    for task, (_, time, before) in enumerate(rows):
        made += builder.op(
            f"task {task}",
            kind="opaque",
            op_type="task",
            inputs=[made[k] for k in before],
            output_bytes=[0],
            flops=time,
            output_names=[f"^task {task}"],
        )
    model = builder.build_model(source=os.fspath(path), notes={"format": "STG"})
    seconds = np.array([[time] for _, time, _ in rows])
    lower, upper = _known(Path(path), processors)
    return Workload(model, seconds, _machine(processors), lower_s=lower, best_s=upper)


def _machine(processors: int) -> Hardware:
    """Identical processors, one FLOP a second, on which nothing else takes time or space."""
    free = np.full((processors, 1), np.inf)
    return Hardware(
        flops_per_s=np.ones((processors, len(OP_CLASSES))),
        level_bytes=free,
        read_bytes_per_s=free,
        write_bytes_per_s=free,
        link_bytes_per_s=np.full((processors, processors), np.inf),
        link_latency_s=np.zeros((processors, processors)),
        launch_s=np.zeros(processors),
        name=f"{processors} processors",
        device_names=[f"processor {k}" for k in range(processors)],
    )


def _rows(path: Path) -> list[tuple[int, float, list[int]]]:
    """(line, time, predecessors) of each task."""
    lines = [
        (number, words)
        for number, text in enumerate(read_text(path).splitlines(), 1)
        if (words := text.split("#")[0].split())
    ]
    if not lines:
        raise FormatError(f"{path}: is empty; expected the number of tasks")
    first, words = lines[0]
    count = _whole(path, first, "number of tasks", words[0]) + 2
    if len(lines) - 1 != count:
        line = lines[-1][0]
        raise FormatError(
            f"{path}:{line}: expected {count} tasks (two dummies included), got {len(lines) - 1}"
        )
    rows: list[tuple[int, float, list[int]]] = []
    for task, (line, words) in enumerate(lines[1:]):
        if len(words) < 3:
            raise FormatError(
                f"{path}:{line}: task {task}: expected id, time, number of predecessors, got "
                f"{short(' '.join(words))}"
            )
        if _whole(path, line, f"task {task}: id", words[0]) != task:
            raise FormatError(f"{path}:{line}: id: expected {task}, got {words[0]}")
        time = _whole(path, line, f"task {task}: time", words[1])
        number = _whole(path, line, f"task {task}: number of predecessors", words[2])
        if len(words) - 3 != number:
            raise FormatError(
                f"{path}:{line}: task {task}: expected {number} predecessors, got {len(words) - 3}"
            )
        before = [_whole(path, line, f"task {task}: predecessor", word) for word in words[3:]]
        late = [k for k in before if k >= task]
        if late:
            raise FormatError(
                f"{path}:{line}: task {task}: predecessor: expected an earlier task, got {late[0]}"
            )
        rows.append((line, float(time), before))
    return rows


def _whole(path: Path, line: int, field: str, word: str) -> int:
    if not word.isdecimal():
        raise FormatError(
            f"{path}:{line}: {field}: expected a whole number of 0 or more, got {short(word)}"
        )
    return int(word)


def _known(path: Path, processors: int) -> tuple[float | None, float | None]:
    """(lower bound, best known) makespan from the lists above the file's folder."""
    case = f"{path.parent.name}/{path.name}"
    for table in sorted(path.absolute().parent.parent.glob("optimal_*.csv")):
        for line, row in enumerate(csv.DictReader(read_text(table).splitlines()), 2):
            if row.get("file") != case or row.get("processors") != str(processors):
                continue
            try:
                return float(row["lower"]), float(row["upper"])
            except (KeyError, TypeError, ValueError):
                raise FormatError(
                    f"{table}:{line}: lower, upper: expected two numbers, got {short(row)}"
                ) from None
    return None, None
