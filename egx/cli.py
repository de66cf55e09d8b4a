"""The command line: `egx optimize SOURCE` and its siblings."""

from __future__ import annotations

import argparse
import contextlib
import math
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence

from rich.console import Console

import egx
from egx import (
    calibration_commands,
    commands,
    execution_commands,
    lookups,
    training_commands,
)
from egx.errors import EgxError
from egx.problems.execution import DECISIONS, OPTIONS
from egx.training.identity import package_version

INTERRUPTED = 130
SOURCE = "a name of the zoo, or a file (.onnx, .onnx.gz, .json, .pbtxt, .stg)"
MACHINE = "a preset, or the path of a .toml file"
_EXECUTION_MACHINE = "; for execution the file's own, or a100"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit code.

    0 is success, 1 a plan that failed its check, 2 a mistake in the input (one line on stderr),
    130 a run stopped by Ctrl-C or SIGTERM, whose best plan is written all the same.
    """
    options = parser().parse_args(arguments)
    errors = Console(stderr=True, highlight=False, soft_wrap=True)

    def warn(message, category, *_, **__) -> None:
        errors.print(f"egx: warning: {message}", markup=False)

    with warnings.catch_warnings(), _terminated_as_interrupted():
        if not sys.warnoptions:
            warnings.simplefilter("default")
            warnings.simplefilter("ignore", DeprecationWarning)
            warnings.showwarning = warn
        try:
            return options.run(options)
        except EgxError as error:
            errors.print(f"egx: {_one_line(error)}", markup=False)
            return 2
        except OSError as error:
            errors.print(f"egx: {_one_line(error)}", markup=False)
            return 2
        except KeyboardInterrupt:
            errors.print("egx: stopped", markup=False)
            return INTERRUPTED


@contextlib.contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """What batch systems send when time is up ends a run as Ctrl-C does, its best plan written."""
    default = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    ours = default and threading.current_thread() is threading.main_thread()
    if ours:
        signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        yield
    finally:
        if ours:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def parser() -> argparse.ArgumentParser:
    """All commands with their options."""
    top = argparse.ArgumentParser(prog="egx", description=egx.__doc__)
    top.add_argument("--version", action="version", version=f"egx {package_version()}")
    sub = top.add_subparsers(title="commands", metavar="COMMAND", required=True)

    optimize = sub.add_parser("optimize", help="search for a plan and write a folder")
    _problem_arguments(optimize, more=_EXECUTION_MACHINE)
    _kind_argument(optimize)
    _execution_arguments(optimize)
    optimize.add_argument(
        "--algorithm",
        metavar="NAME",
        help=f"see `egx algorithms` (default: {lookups.default_algorithm()}; for execution "
        f"{lookups.default_execution_algorithm()}, which begins with the plans of all heuristics)",
    )
    _search_arguments(optimize)
    optimize.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    optimize.add_argument(
        "--option",
        action="append",
        default=[],
        type=_assignment,
        metavar="NAME=VALUE",
        help="a setting of the algorithm; may be repeated",
    )
    optimize.add_argument(
        "--policy",
        metavar="PATH",
        help="start from a policy that was trained before; without --algorithm the one that it "
        "was trained for runs",
    )
    optimize.add_argument(
        "--checkpoint",
        nargs="?",
        const="",
        metavar="DIR",
        help="save checkpoints (default: in a folder of OUT)",
    )
    optimize.add_argument(
        "--resume", action="store_true", help="go on from the checkpoint, if there is one"
    )
    optimize.add_argument(
        "--spread", type=int, metavar="N", help="spread candidates over N devices of this computer"
    )
    optimize.set_defaults(run=_optimize)

    train = sub.add_parser("train", help="train a policy for several devices")
    _train_arguments(train)
    train.set_defaults(run=training_commands.train)

    compare = sub.add_parser("compare", help="run several algorithms with several seeds each")
    _problem_arguments(compare, more=_EXECUTION_MACHINE)
    _kind_argument(compare)
    _execution_arguments(compare)
    compare.add_argument(
        "--algorithms",
        type=_names,
        metavar="A,B,C",
        help=f"(default: {','.join(lookups.default_comparison())}; for execution "
        f"{','.join(lookups.default_comparison(execution=True))})",
    )
    compare.add_argument("--seeds", type=int, default=5, help="(default: %(default)s)")
    _search_arguments(compare)
    compare.add_argument(
        "--resume",
        action="store_true",
        help="keep each finished run in OUT, and go on from those that are there",
    )
    compare.set_defaults(run=_compare)

    check = sub.add_parser("check", help="check a plan: is it valid, and as fast as it claims?")
    check.add_argument("plan", metavar="PLAN", help="a plan.json")
    check.add_argument("--source", help="the model, if it is not where the plan says")
    check.add_argument(
        "--fine",
        action="store_true",
        help="of a plan on several devices, also what the finer cost model says: links that "
        "transfers share, a host that issues kernels, memory over time",
    )
    _load_arguments(check)
    check.set_defaults(run=lookups.check)

    show = sub.add_parser("show", help="describe a model")
    show.add_argument("source", metavar="SOURCE", help=SOURCE)
    _load_arguments(show)
    show.set_defaults(run=lookups.show)

    hardware = sub.add_parser("hardware", help="list the machines, or describe one")
    hardware.add_argument("name", metavar="NAME", nargs="?", help=MACHINE)
    hardware.set_defaults(run=lookups.hardware)

    calibrate = sub.add_parser(
        "calibrate", help="measure this computer's JAX devices and links into a machine file"
    )
    calibrate.add_argument(
        "--out", type=_path, metavar="FILE", required=True, help="the .toml file to write"
    )
    calibrate.add_argument("--name", help="of the machine (default: the file's)")
    calibrate.add_argument("--overwrite", action="store_true", help="replace FILE")
    calibrate.set_defaults(run=calibration_commands.calibrate)

    models = sub.add_parser("models", help="list the models of the zoo")
    models.set_defaults(run=lookups.models)
    algorithms = sub.add_parser("algorithms", help="list the search algorithms")
    algorithms.set_defaults(run=lookups.algorithms)
    return top


def _optimize(options: argparse.Namespace) -> int:
    execution_commands.settle(options)
    if options.problem == "execution":
        return execution_commands.optimize(options)
    return commands.optimize(options)


def _compare(options: argparse.Namespace) -> int:
    execution_commands.settle_comparison(options)
    if options.problem == "execution":
        return execution_commands.compare(options)
    return commands.compare(options)


def _kind_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--problem",
        choices=("memory_placement", "execution"),
        default="memory_placement",
        help="which memory each tensor lies in, or which device runs each op and in which order "
        "(default: %(default)s)",
    )


def _execution_arguments(parser: argparse.ArgumentParser) -> None:
    """Of the problem of several devices, and of its machine."""
    group = parser.add_argument_group("several devices (--problem execution)")
    group.add_argument(
        "--devices",
        type=int,
        metavar="N",
        help="devices of the machine: its first N, or N copies of its only kind (default: those of "
        "the file, or 2 or more of the machine). `optimize` takes it for memory placement too, as "
        "--spread",
    )
    group.add_argument(
        "--objective",
        choices=OPTIONS["objective"],
        help="makespan under the devices' memory limits, or peak memory (default: makespan)",
    )
    group.add_argument(
        "--order",
        choices=OPTIONS["order"],
        help="fixed before the run, or event driven (default: static)",
    )
    group.add_argument(
        "--transfers",
        choices=OPTIONS["transfers"],
        help="a transfer holds its link; or a way out of its device and a way into the other; or "
        "both devices (default: async)",
    )
    group.add_argument(
        "--decide",
        type=_names,
        metavar="A,B",
        help=f"any of {', '.join(DECISIONS)} (default: device,priority)",
    )
    group.add_argument("--memory", metavar="SIZE", help="what each device holds, such as '16 GiB'")
    group.add_argument(
        "--link-bandwidth",
        metavar="RATE",
        help="of every link, such as '300 GB/s' or 'inf B/s' (default: the machine's; copies of a "
        "device without links: 31.5 GB/s, PCI Express 4.0 x16)",
    )
    group.add_argument(
        "--link-latency",
        metavar="TIME",
        help="of every link, such as '5 us' (default: the machine's; for such copies 5 us)",
    )


def _train_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--algorithm",
        choices=("regal", "gas", "go"),
        default="regal",
        help="(default: %(default)s)",
    )
    parser.add_argument(
        "--data",
        default=training_commands.SYNTHETIC,
        metavar="DIR",
        help="'synthetic', or a folder of models (default: %(default)s)",
    )
    parser.add_argument(
        "--graphs", type=_count, default=100, metavar="N", help="synthetic graphs (default: 100)"
    )
    parser.add_argument(
        "--variants",
        type=_count,
        default=1,
        metavar="N",
        help="of each graph, all but the first with noise on sizes and times (default: 1)",
    )
    parser.add_argument("--steps", type=int, default=1000, help="(default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    parser.add_argument(
        "--hardware",
        metavar="NAME",
        help=f"regal, {MACHINE} (default: regal for synthetic graphs, else a100)",
    )
    _execution_arguments(parser)
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        type=_assignment,
        metavar="NAME=VALUE",
        help="a setting of the training, such as validation.every=100; may be repeated",
    )
    parser.add_argument("--policy", metavar="PATH", help="go on from a policy")
    parser.add_argument(
        "--out", type=_path, metavar="DIR", required=True, help="where to write the policy"
    )
    parser.add_argument(
        "--resume", action="store_true", help="go on from the checkpoint in OUT, if there is one"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace a policy in OUT")
    parser.add_argument("--quiet", action="store_true", help="no progress, only the result")


def _problem_arguments(parser: argparse.ArgumentParser, *, more: str) -> None:
    parser.add_argument("source", metavar="SOURCE", help=SOURCE)
    _load_arguments(parser)
    parser.add_argument(
        "--hardware",
        metavar="NAME",
        help=f"{MACHINE} (default: nnpi{more})",
    )
    parser.add_argument(
        "--prefetch",
        type=int,
        default=0,
        metavar="K",
        help="ops by which weights may stream ahead; 0 overlaps an op with its own (default: 0)",
    )


def _load_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--granularity",
        choices=("layer", "op"),
        help="of an ONNX file: fuse bias, activation and the like into layers, or keep every op",
    )
    parser.add_argument(
        "--dim",
        action="append",
        default=[],
        type=_dimension,
        metavar="NAME=VALUE",
        help="the size of a free dimension of an ONNX file; may be repeated",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        type=_assignment,
        metavar="NAME=VALUE",
        help="an argument of a zoo model, such as batch=8; may be repeated",
    )


def _search_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--budget", type=int, default=4000, metavar="N", help="evaluations (default: %(default)s)"
    )
    parser.add_argument(
        "--time-limit", type=_seconds, metavar="SECONDS", help="stop the search after this long"
    )
    parser.add_argument(
        "--bound-seconds",
        type=_seconds,
        default=commands.BOUND_SECONDS,
        metavar="SECONDS",
        help="time for the exact solver to bound the optimum; 0 skips it (default: %(default)s)",
    )
    parser.add_argument(
        "--out", type=_path, metavar="DIR", help="(default: egx-out/MODEL-HARDWARE)"
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="replace another run that lies in OUT"
    )
    parser.add_argument(
        "--pictures", choices=("png", "svg", "none"), default="png", help="(default: %(default)s)"
    )
    parser.add_argument("--quiet", action="store_true", help="no progress, only the result")


def _assignment(text: str) -> tuple[str, object]:
    """A name and a value: a whole number, a number, true or false, or text."""
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"expected NAME=VALUE, got {text!r}")
    if value.lower() in ("true", "false"):
        return name, value.lower() == "true"
    for kind in (int, float):
        try:
            return name, kind(value)
        except ValueError:
            continue
    return name, value


def _path(text: str) -> str:
    # An empty one, of a shell's variable that is not set, would be the current folder.
    if not text or "\0" in text:
        raise argparse.ArgumentTypeError(f"expected a path, got {text!r}")
    return text


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"expected seconds, 0 or more, got {text!r}")
    return value


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of 1 or more, got {text!r}")
    return int(text)


def _dimension(text: str) -> tuple[str, int]:
    name, value = _assignment(text)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise argparse.ArgumentTypeError(f"expected NAME=SIZE with a size of 1 or more: {text!r}")
    return name, value


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise argparse.ArgumentTypeError("expected names separated by commas")
    return names


if __name__ == "__main__":
    sys.exit(main())
