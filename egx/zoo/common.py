"""What the builders of the zoo share: number widths, shapes, names of layers, and the checks of
their arguments."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from egx.errors import GraphError
from egx.graph.graph import Model

# "layer3/attention/query": what stands before the first separator is the op's layer, the unit that
# a person would give to one device. Gradient and update ops have the layer of what they belong to,
# the embedding that of the first layer and the output layer that of the last. A model of which
# this is true says so by `notes["layer_separator"]`: names of other origin are not guessed at.
LAYER_SEPARATOR = "/"


class Precision(NamedTuple):
    """Bytes an element takes.

    Under int8 weights and activations take one byte, while vectors (biases, scales and shifts of
    normalisations) and row statistics stay 32 bits wide, as deployed quantised models have them.
    """

    weight: int
    activation: int
    vector: int


PRECISIONS = {
    "fp32": Precision(4, 4, 4),
    "fp16": Precision(2, 2, 2),
    "bf16": Precision(2, 2, 2),
    "int8": Precision(1, 1, 4),
}


def precision_widths(model: str, precision: str) -> Precision:
    """The widths of a named precision.

    Raises:
        GraphError: for an unknown name.
    """
    if precision not in PRECISIONS:
        raise GraphError(f"{model}: precision {precision!r} is not one of {', '.join(PRECISIONS)}")
    return PRECISIONS[precision]


def check_positive(model: str, **values: int) -> None:
    """Refuses anything but integers from 1 up, naming the argument.

    Raises:
        GraphError: naming the model, the argument and its value.
    """
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise GraphError(f"{model}: {name} must be an integer of 1 or more, got {value!r}")


def geometry(
    source: tuple[int, int, int], target: tuple[int, int, int], **more: int
) -> dict[str, float]:
    """Attributes of an op from an input (x, y, z) to an output (x, y, z) of one sample."""
    axes = ("x", "y", "z")
    sizes = {f"input_{axis}": float(n) for axis, n in zip(axes, source, strict=True)}
    sizes |= {f"output_{axis}": float(n) for axis, n in zip(axes, target, strict=True)}
    return {"groups": 1.0, **sizes, **{key: float(n) for key, n in more.items()}}


def layer_numbers(model: Model) -> np.ndarray:
    """The layer [N] of each op of the padded graph, int32, numbered as they first appear; -1 for
    padding, and everywhere where the model does not say that its names have layers."""
    numbers = np.full(model.graph.num_ops, -1, np.int32)
    separator = model.notes.get("layer_separator")
    if separator:
        seen: dict[str, int] = {}
        for op, name in enumerate(model.op_names):
            numbers[op] = seen.setdefault(name.split(separator, 1)[0], len(seen))
    return numbers
