"""What the builders of the zoo share: number widths, shapes and the checks of their arguments."""

from __future__ import annotations

from typing import NamedTuple

from egx.errors import GraphError


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
