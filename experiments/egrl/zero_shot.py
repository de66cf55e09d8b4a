"""Networks that EGRL trained on one workload, used as they are on others.

    python experiments/egrl/zero_shot.py

Reads the policies that run.py left under `runs/`. The unseen models are the other workloads and,
where ../shared/data (or EGX_DATA) is there, six ONNX files. A map that does not fit counts as
speed-up 0, as in the paper; beside it stands the speed-up after the compiler's rectification.
"""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import equinox as eqx
import numpy as np

import egx

HERE = Path(__file__).parent
DATA: Path = runpy.run_path(str(HERE.parent / "data.py"))["DATA"]
WORKLOADS = ("resnet50", "resnet101", "bert")
UNSEEN = (
    "onnx_light/light_inception_v1.onnx",
    "onnx_light/light_densenet121.onnx",
    "onnx_light/light_squeezenet.onnx",
    "onnx_corpus/graphs/tv_efficientnet_b0.onnx",
    "onnx_corpus/graphs/hf_electra_small.onnx",
    "onnx_corpus/graphs/timm_deit_tiny_distilled_patch16_224.onnx",
)


@eqx.filter_jit
def value(policy: Any, problem: egx.MemoryPlacement) -> tuple[Any, Any]:
    """The outcome of the policy's most likely map, and of its rectification."""
    decisions = policy.decide(problem)
    return problem.evaluate(decisions), problem.evaluate(problem.rectify(decisions))


def main() -> None:
    hardware = egx.hardware.load("nnpi")
    models = {name: egx.load(name) for name in WORKLOADS}
    for file in UNSEEN:
        if (DATA / file).exists():
            model = egx.load(str(DATA / file))
            models[Path(file).stem.removeprefix("light_")] = model
    table: dict[str, dict[str, Any]] = {}
    for target, model in models.items():
        problem = egx.MemoryPlacement(model, hardware)
        first_fit = float(problem.evaluate(problem.first_fit()).cost)
        solved = egx.exact(problem, time_limit_s=60)
        reference = float(problem.reference_cost)
        row: dict[str, Any] = {
            "ops": problem.graph.num_ops,
            "first_fit": reference / first_fit,
            "bound": reference / solved.bound,
        }
        for source in WORKLOADS:
            folder = HERE / "runs" / f"{source}_prefetch0" / "egrl"
            raw, fitted = [], []
            for path in sorted(folder.glob("policy_*")):
                outcome, rectified = value(egx.load_policy(path), problem)
                raw.append(reference / float(outcome.cost) if bool(outcome.feasible) else 0.0)
                fitted.append(reference / float(rectified.cost))
            if raw:
                row[source] = {
                    "valid": float(np.mean(np.array(raw) > 0)),
                    "speedup": float(np.mean(raw)),
                    "rectified": float(np.mean(fitted)),
                    "rectified_spread": float(np.std(fitted, ddof=1)) if len(raw) > 1 else 0.0,
                    "seeds": len(raw),
                }
        table[target] = row
        print(target, json.dumps(row), flush=True)
    (HERE / "results").mkdir(exist_ok=True)
    (HERE / "results" / "zero_shot.json").write_text(json.dumps(table, indent=1) + "\n")
    (HERE / "results" / "zero_shot.md").write_text(markdown(table))


def markdown(table: dict[str, dict[str, Any]]) -> str:
    """A row a model: speed-up of the raw map (mean over seeds), and after rectification."""
    sources = [s for s in WORKLOADS if any(s in row for row in table.values())]
    head = "| model | ops | first fit | best possible | "
    head += " | ".join(f"trained on {s}: as is (valid) | rectified" for s in sources) + " |"
    lines = [head, "|---|" + "---:|" * (3 + 2 * len(sources))]
    for target, row in table.items():
        cells = []
        for source in sources:
            x = row.get(source)
            if x is None:
                cells.append("- | -")
                continue
            own = " (trained here)" if source == target else ""
            cells.append(
                f"{x['speedup']:.3f} ({100 * x['valid']:.0f} %){own} | "
                f"{x['rectified']:.3f} ± {x['rectified_spread']:.3f}"
            )
        lines.append(
            f"| {target} | {row['ops']} | {row['first_fit']:.3f} | {row['bound']:.3f} | "
            + " | ".join(cells)
            + " |"
        )
    lines.append("")
    lines.append("Speed-ups over native; a map that does not fit counts as 0 before rectification.")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
