"""How fast the simulators and BRKGA are, beside compiled loops that do the same on one core.

    taskset -c 0 python experiments/bench_simulators.py        # all parts; many minutes
    taskset -c 0 python experiments/bench_simulators.py --part execution --no-scaling
    python experiments/bench_simulators.py --part memory --models bert --populations 512
    python experiments/bench_simulators.py --tables            # only the tables of what was found

Parts: `memory`, the simulator of memory placement; `execution`, that of several devices; `brkga`,
a whole genetic algorithm, beside pymoo's too. In each, all contenders take turns in one process and
must agree before they are timed. CPU seconds of the process are a fair measure on a machine that
others use too. What is found is written to `bench_simulators.json`, and its tables into
`bench_simulators.md`; parts that did not run stay as they were.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benches import brkga, execution, memory, timing

from egx.files import write_whole

PARTS: dict[str, Any] = {"memory": memory, "execution": execution, "brkga": brkga}


def write_tables(path: Path, found: dict[str, Any]) -> None:
    """Puts the tables of each part between its marks."""
    text = path.read_text()
    for part, result in found.items():
        first, last = f"<!-- {part} -->", f"<!-- end of {part} -->"
        before, rest = text.split(first)
        after = rest.split(last)[1]
        made = "\n".join(table.to_markdown() for table in PARTS[part].tables(result))
        text = f"{before}{first}\n\n{made}\n{last}{after}"
    write_whole(path, text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS), metavar="NAME")
    parser.add_argument("--tables", action="store_true", help="run nothing")
    parser.add_argument("--repeats", type=int, default=15, help="rounds; each runs all once")
    parser.add_argument(
        "--scaling",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="also graphs of 1,000 to 80,000 ops",
    )
    parser.add_argument("--models", nargs="+", default=["bert", "resnet50"], help="of memory")
    parser.add_argument("--hardware", default="nnpi", help="of memory: a preset or .toml file")
    parser.add_argument("--populations", nargs="+", type=int, default=[22, 128, 512, 4096])
    parser.add_argument(
        "--families", nargs="+", default=brkga.FAMILIES, choices=brkga.FAMILIES, help="of brkga"
    )
    parser.add_argument("--seeds", type=int, default=20, help="of brkga: runs")
    parser.add_argument("--slow-seeds", type=int, default=2, help="of brkga: runs of pymoo")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    options = parser.parse_args()
    found = json.loads(options.out.read_text()) if options.out.exists() else {}
    for part in options.part if not options.tables else ():
        about = timing.about()
        found[part] = {"about": about, **PARTS[part].measure(options)}
        write_whole(options.out, json.dumps(found, indent=1) + "\n")
        for table in PARTS[part].tables(found[part]):
            print(table, flush=True)
    text = options.out.with_suffix(".md")
    if text.exists():
        write_tables(text, found)


if __name__ == "__main__":
    main()
