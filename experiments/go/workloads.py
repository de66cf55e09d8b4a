"""What GO's workloads are made of, as a table.

    python experiments/go/workloads.py [--out FILE]      # about two minutes on one core

Columns: parameters in millions; contractions of the forward pass and all FLOPs of the step in
GFLOP; activations: what is held where the backward pass begins, parameters apart, in MB; peak: the
most that one device holds in index order, parameters and optimizer state included, in GB; alone:
milliseconds of all ops one after another on one P100 by the roofline; hand-out: the share of these
that parameter ops take, which real machines do not spend; CPU seconds to build the graph.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np

import egx
from egx.graph.graph import CONTRACTION, Model, real_sizes
from egx.hardware.spec import Hardware

HERE = Path(__file__).parent

# The sizes of GO's paper, then its largest number of ops.
WORKLOADS: list[tuple[str, str, dict[str, int]]] = [
    *(
        (f"{title}-{layers}", name, {"layers": layers})
        for title, name in (("RNNLM", "rnnlm"), ("GNMT", "gnmt"), ("TrXL", "transformer_xl"))
        for layers in (2, 4, 8)
    ),
    ("Inception b32", "inception_v3", {"batch": 32}),
    ("Inception b64", "inception_v3", {"batch": 64}),
    ("AmoebaNet", "amoebanet", {}),
    ("WaveNet 2x18", "wavenet", {"stacks": 2, "layers": 18}),
    ("WaveNet 4x36", "wavenet", {"stacks": 4, "layers": 36}),
    ("RNNLM-8, 303 steps", "rnnlm", {"layers": 8, "steps": 303}),
]

COLUMNS = (
    *("workload", "ops", "tensors", "uses", "parameters", "forward", "step", "activations"),
    *("peak", "alone", "hand-out", "build"),
)


def row(title: str, name: str, options: dict[str, Any], machine: Hardware) -> list[str]:
    """A line of the table."""
    before = time.process_time()
    model = egx.load(name, **options)
    seconds = time.process_time() - before
    inferred = egx.load(name, training=False, **options).graph
    contracts = np.asarray(inferred.op_class) == CONTRACTION
    forward = float(np.asarray(inferred.flops, np.float64)[contracts].sum())
    step = float(np.asarray(model.graph.flops, np.float64).sum())
    activations, peak = memory_bytes(model)
    alone, handed = seconds_alone(model, machine)
    ops, tensors, uses = real_sizes(model.graph)
    return [
        *(title, f"{ops:,}", f"{tensors:,}", f"{uses:,}"),
        *(f"{model.notes['parameters'] / 1e6:.1f}", f"{forward / 1e9:,.0f}", f"{step / 1e9:,.0f}"),
        *(f"{activations / 1e6:,.0f}", f"{peak / 1e9:.2f}", f"{alone * 1e3:,.1f}"),
        *(f"{handed / alone:.1%}", f"{seconds:.2f}"),
    ]


def memory_bytes(model: Model) -> tuple[float, float]:
    """(activations where the backward pass begins, peak) of everything on one device in index
    order."""
    graph = model.graph
    unit = float(graph.unit_bytes)
    size = np.asarray(graph.tensor_units, np.float64) * unit
    born, last = np.asarray(graph.tensor_producer), np.asarray(graph.last_step())
    change = np.zeros(graph.num_ops + 1)
    np.add.at(change, born, size)
    np.subtract.at(change, last + 1, size)
    resident = float(np.asarray(graph.weight_units, np.float64).sum()) * unit
    begins = next(k for k, name in enumerate(model.op_names) if name.endswith("entropy.grad"))
    is_parameter = np.array([kind == "parameter" for kind in model.op_types])[born]
    held = (born < begins) & (last >= begins) & ~is_parameter
    return float(size[held].sum()), float(np.cumsum(change).max()) + resident


def seconds_alone(model: Model, machine: Hardware) -> tuple[float, float]:
    """(seconds of all ops, of parameter ops) on the machine's first device, by the roofline."""
    graph = model.graph
    unit = float(graph.unit_bytes)
    pairs = np.unique(np.stack([graph.use_consumer, graph.use_tensor]), axis=1)
    read = np.asarray(graph.weight_units, np.float64)
    np.add.at(read, pairs[0], np.asarray(graph.tensor_units, np.float64)[pairs[1]])
    written = np.asarray(graph.output_units(), np.float64)
    rates = np.asarray(machine.flops_per_s, np.float64)[0, np.asarray(graph.op_class)]
    seconds = np.maximum(
        np.asarray(graph.flops, np.float64) / rates,
        read * unit / float(machine.read_bytes_per_s[0, 0])
        + written * unit / float(machine.write_bytes_per_s[0, 0]),
    ) + float(machine.launch_s[0])
    handed = seconds[[kind == "parameter" for kind in model.op_types]]
    return float(seconds.sum()), float(handed.sum())


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--out", type=Path, default=HERE / "results" / "workloads.md")
    options = parser.parse_args()
    machine = egx.hardware.load("p100x2")
    lines = [
        "# GO's workloads as training steps",
        "",
        "Made by `experiments/go/workloads.py`. " + " ".join(__doc__.split("\n\n")[-1].split()),
        "",
        "| " + " | ".join(COLUMNS) + " |",
        "|---" + "|---:" * (len(COLUMNS) - 1) + "|",
    ]
    for title, name, sizes in WORKLOADS:
        lines.append("| " + " | ".join(row(title, name, sizes, machine)) + " |")
        print(lines[-1], flush=True)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
