"""How long a whole run of EGRL takes, from starting the program to its pictures.

    python experiments/egrl/speed.py                      # both; nothing else should run
    python experiments/egrl/speed.py --workloads resnet50

Times `egx optimize WORKLOAD --algorithm egrl` with 4,000 evaluations in a process of its own:
importing, compiling, searching, proving the bound and drawing. The load is that of the machine
when it began (0 on an idle one). Results go to `results/speed.md`, a workload at a time.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from egx.files import write_whole
from egx.report.tables import Table
from egx.report.units import format_duration

RESULTS = Path(__file__).parent / "results"
GOAL_S = {"resnet50": 180.0, "bert": 900.0}
BUDGET = 4000


def measure(workload: str) -> dict[str, float | str]:
    """Seconds of a whole run: on the clock, of all cores, and the searcher's own."""
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable, "-m", "egx", "optimize", workload, "--algorithm", "egrl",
            "--budget", str(BUDGET), "--out", folder,
        ]  # fmt: skip
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        began = time.perf_counter()
        subprocess.run(command, check=True)
        wall = time.perf_counter() - began
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        result = json.loads((Path(folder) / "result.json").read_text())
    return {
        "workload": workload,
        "wall_s": wall,
        "cpu_s": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        "search_s": result["seconds"],
        "compile_s": result["compile_seconds"],
        "peak_gib": after.ru_maxrss / 2**20,
        "load": load,
        "cores": os.cpu_count() or 0,
    }


def markdown(rows: dict[str, dict[str, float | str]]) -> str:
    cells = tuple(
        (
            name, format_duration(row["wall_s"]), format_duration(GOAL_S[name]),
            format_duration(row["search_s"]), format_duration(row["compile_s"]),
            format_duration(row["cpu_s"]), f"{row['peak_gib']:.1f}", str(row["cores"]),
            f"{row['load']:.1f}",
        )
        for name, row in rows.items()
    )  # fmt: skip
    header = (
        "workload", "whole run", "goal", "search", "compiling", "CPU", "peak, GiB", "cores",
        "load before",
    )  # fmt: skip
    title = f"EGRL, {BUDGET:,} evaluations, one seed"
    return Table(header, cells, title=title).to_markdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workloads", nargs="+", choices=list(GOAL_S), default=list(GOAL_S))
    path = RESULTS / "speed.json"
    rows = json.loads(path.read_text()) if path.exists() else {}
    for workload in parser.parse_args().workloads:
        rows[workload] = measure(workload)
        write_whole(path, json.dumps(rows, indent=1) + "\n")
        write_whole(RESULTS / "speed.md", markdown(rows))
        print(markdown(rows), flush=True)


if __name__ == "__main__":
    main()
