"""The command line: `egx optimize SOURCE`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import egx
from egx.errors import EgxError


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="egx", description=egx.__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    optimize = commands.add_parser("optimize", help="search for a memory placement")
    optimize.add_argument("source", help="a zoo name")
    optimize.add_argument("--hardware", default="nnpi", help="a preset or a TOML file")
    optimize.add_argument("--algorithm", default="random", help=", ".join(egx.searches()))
    optimize.add_argument("--budget", type=int, default=4000, help="evaluations")
    optimize.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    try:
        model = egx.load(options.source)
        problem = egx.MemoryPlacement(model, egx.hardware.load(options.hardware))
        result = egx.optimize(problem, options.algorithm, budget=options.budget, seed=options.seed)
    except EgxError as error:
        print(f"egx: {error}", file=sys.stderr)
        return 1
    print(f"native {1e6 * result.reference_cost:.2f} us")
    print(f"found  {1e6 * result.cost:.2f} us{'' if result.feasible else ' (infeasible)'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
