"""AmoebaNet-D.

Real et al., "Regularized Evolution for Image Classifier Architecture Search", AAAI 2019 (arXiv
1802.01548), and the network of that name in Huang et al., "GPipe", NeurIPS 2019 (arXiv 1811.06965),
whose Table 1 has 82 M parameters for 18 cells and 208 filters, our default (batches of 32 are a
choice). The cells are those of the TensorFlow reference (tensorflow/tpu, models/official/
amoeba_net), in which a normal cell hands out its states 0, 3, 4 and 6: only so are the parameters
those of GPipe, as the authors of torchgpipe found. RMSProp, as published; dropped paths and the
auxiliary head are left out.

A cell has two inputs, the outputs of the two cells before it, brought to its width (states 0 and
1), and five pairs of ops whose sums are states 2 to 6.

Layers, as a person would place them: the stem and each cell.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from egx.errors import GraphError
from egx.graph.graph import Model
from egx.zoo.common import check_positive
from egx.zoo.layers import Layers, Pair
from egx.zoo.registry import register
from egx.zoo.training import Value


def _conv(
    net: Layers,
    name: str,
    x: Value,
    channels: int,
    kernel: int | Pair = 1,
    *,
    stride: int = 1,
    pad: int | Pair = 0,
) -> Value:
    """ReLU, convolution, batch normalisation."""
    y = net.activate(f"{name}.relu", "relu", x)
    y = net.conv(f"{name}.conv", y, channels, kernel, stride=stride, pad=pad)
    return net.batch_norm(f"{name}.norm", y)


def _identity(net: Layers, name: str, x: Value, stride: int) -> Value:
    return x


def _conv_1x1(net: Layers, name: str, x: Value, stride: int) -> Value:
    return _conv(net, name, x, x.shape[2], stride=stride)


def _conv_3x3(net: Layers, name: str, x: Value, stride: int) -> Value:
    """At a quarter of the width, as is the 7x7."""
    y = _conv(net, f"{name}.0", x, x.shape[2] // 4)
    y = _conv(net, f"{name}.1", y, x.shape[2] // 4, 3, stride=stride, pad=1)
    return _conv(net, f"{name}.2", y, x.shape[2])


def _conv_7x7(net: Layers, name: str, x: Value, stride: int) -> Value:
    y = _conv(net, f"{name}.0", x, x.shape[2] // 4)
    y = _conv(net, f"{name}.1", y, x.shape[2] // 4, (1, 7), pad=(0, 3))
    y = _conv(net, f"{name}.2", y, x.shape[2] // 4, (7, 1), pad=(3, 0))
    return _conv(net, f"{name}.3", y, x.shape[2])


def _average_3x3(net: Layers, name: str, x: Value, stride: int) -> Value:
    return net.pool(name, "average", x, 3, stride=stride, pad=1)


def _max_3x3(net: Layers, name: str, x: Value, stride: int) -> Value:
    return net.pool(name, "max", x, 3, stride=stride, pad=1)


def _max_2x2(net: Layers, name: str, x: Value, stride: int) -> Value:
    return net.pool(name, "max", x, 2, stride=stride)


_Op = Callable[[Layers, str, Value, int], Value]


class _Genotype(NamedTuple):
    """Pairs of (state that is read, op), and the states that are handed out."""

    pairs: Sequence[tuple[tuple[int, _Op], tuple[int, _Op]]]
    outputs: Sequence[int]


NORMAL = _Genotype(
    (
        ((1, _conv_1x1), (1, _max_3x3)),
        ((1, _identity), (0, _conv_7x7)),
        ((0, _conv_1x1), (0, _conv_7x7)),
        ((2, _max_3x3), (2, _identity)),
        ((1, _average_3x3), (5, _conv_1x1)),
    ),
    (0, 3, 4, 6),
)
REDUCTION = _Genotype(
    (
        ((0, _max_2x2), (0, _max_3x3)),
        ((2, _identity), (1, _conv_3x3)),
        ((2, _conv_7x7), (2, _max_3x3)),
        ((3, _identity), (1, _max_2x2)),
        ((2, _average_3x3), (3, _conv_1x1)),
    ),
    (4, 5, 6),
)


def _halve(net: Layers, name: str, x: Value, channels: int) -> Value:
    """Half the size by two 1x1 convolutions of stride 2, the second on the image shifted by one."""
    x = net.activate(f"{name}.relu", "relu", x)
    moved = net.rearrange(f"{name}.shift", x, x.shape, "shift")
    halves = [
        net.conv(f"{name}.conv{k}", y, channels // 2, stride=2) for k, y in enumerate((x, moved))
    ]
    return net.batch_norm(f"{name}.norm", net.concat(f"{name}.concat", halves))


def _cell(
    net: Layers, name: str, genotype: _Genotype, before: Value, last: Value, channels: int
) -> Value:
    """A cell on the outputs of the cell before the last, and of the last."""
    states = [_conv(net, f"{name}/last", last, channels)]
    if before.shape[0] != last.shape[0]:
        states.append(_halve(net, f"{name}/before", before, channels))
    elif before.shape[2] != channels:
        states.append(_conv(net, f"{name}/before", before, channels))
    else:
        states.append(before)
    for k, pair in enumerate(genotype.pairs):
        parts = []
        for side, (state, op) in zip("ab", pair, strict=True):
            stride = 2 if genotype is REDUCTION and state < 2 else 1
            parts.append(op(net, f"{name}/pair{k}{side}", states[state], stride))
        states.append(net.add(f"{name}/sum{k}", *parts))
    return net.concat(f"{name}/concat", [states[k] for k in genotype.outputs])


@register
def amoebanet(
    layers: int = 18,
    filters: int = 208,
    batch: int = 32,
    resolution: int = 224,
    classes: int = 1000,
    precision: str = "fp32",
    training: bool = True,
    optimizer: str = "rmsprop",
) -> Model:
    """AmoebaNet-D of `layers` normal cells, a multiple of three, and four reduction cells."""
    sizes = {"layers": layers, "filters": filters, "resolution": resolution, "classes": classes}
    check_positive("amoebanet", **sizes)
    for option, value, step in (
        ("layers", layers, 3),
        ("filters", filters, 16),
        ("resolution", resolution, 32),
    ):
        if value % step:
            raise GraphError(f"amoebanet: {option} must be a multiple of {step}, got {value}")
    net = Layers(
        "amoebanet", batch=batch, precision=precision, training=training, optimizer=optimizer
    )
    channels = filters // 4
    x = net.source("stem/image", (resolution, resolution, 3))
    # As in GPipe's network, a ReLU stands before the first convolution, too.
    before = last = _conv(net, "stem/conv", x, channels, 3, stride=2, pad=1)
    cells = [("stem1", REDUCTION), ("stem2", REDUCTION)]
    for stage in range(3):
        cells += [(f"cell{stage}.{k}", NORMAL) for k in range(layers // 3)]
        cells += [(f"reduction{stage}", REDUCTION)] if stage < 2 else []
    for name, genotype in cells:
        channels *= 2 if genotype is REDUCTION else 1
        before, last = last, _cell(net, name, genotype, before, last, channels)
    top = cells[-1][0]
    x = net.pool(f"{top}/average", "average", last, last.shape[0])
    net.finish(top, net.linear(f"{top}/classes", x, classes))
    return net.build(sizes)
