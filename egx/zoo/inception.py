"""Inception-v3.

Szegedy et al., "Rethinking the Inception Architecture for Computer Vision", CVPR 2016 (arXiv
1512.00567), with the widths of the authors' released network: 23.8 M parameters, 5.7 GMAC an image
of 299 x 299. The auxiliary classifier and dropout are left out. Every convolution is followed by
batch normalisation and ReLU. Training takes RMSProp, as published.

Layers, as a person would place them: the stem, and each module.
"""

from __future__ import annotations

from egx.errors import GraphError
from egx.graph.graph import Model
from egx.zoo.common import check_positive
from egx.zoo.layers import Layers, Pair
from egx.zoo.registry import register
from egx.zoo.training import Value

SMALLEST = 75  # pixels, below which a window no longer fits


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
    """Convolution, batch normalisation, ReLU."""
    y = net.conv(f"{name}.conv", x, channels, kernel, stride=stride, pad=pad)
    return net.activate(f"{name}.relu", "relu", net.batch_norm(f"{name}.norm", y))


def _wide(net: Layers, name: str, x: Value, channels: int) -> Value:
    return _conv(net, name, x, channels, (1, 7), pad=(0, 3))


def _tall(net: Layers, name: str, x: Value, channels: int) -> Value:
    return _conv(net, name, x, channels, (7, 1), pad=(3, 0))


def _pooled(net: Layers, name: str, x: Value, channels: int) -> Value:
    y = net.pool(f"{name}/pool", "average", x, 3, pad=1)
    return _conv(net, f"{name}/pool.project", y, channels)


def _figure5(net: Layers, name: str, x: Value, pool: int) -> Value:
    """5x5 and two 3x3 convolutions beside each other (figure 5 of the paper)."""
    five = _conv(net, f"{name}/five.0", x, 48)
    five = _conv(net, f"{name}/five.1", five, 64, 5, pad=2)
    three = _conv(net, f"{name}/three.0", x, 64)
    three = _conv(net, f"{name}/three.1", three, 96, 3, pad=1)
    three = _conv(net, f"{name}/three.2", three, 96, 3, pad=1)
    one = _conv(net, f"{name}/one", x, 64)
    return net.concat(f"{name}/concat", [one, five, three, _pooled(net, name, x, pool)])


def _shrink_to_17(net: Layers, name: str, x: Value) -> Value:
    """Half the size by strided 3x3 convolutions and a pooling (figure 10)."""
    once = _conv(net, f"{name}/once", x, 384, 3, stride=2)
    twice = _conv(net, f"{name}/twice.0", x, 64)
    twice = _conv(net, f"{name}/twice.1", twice, 96, 3, pad=1)
    twice = _conv(net, f"{name}/twice.2", twice, 96, 3, stride=2)
    pool = net.pool(f"{name}/pool", "max", x, 3, stride=2)
    return net.concat(f"{name}/concat", [once, twice, pool])


def _figure6(net: Layers, name: str, x: Value, inner: int) -> Value:
    """7x7 convolutions as 1x7 and 7x1 (figure 6)."""
    seven = _conv(net, f"{name}/seven.0", x, inner)
    seven = _wide(net, f"{name}/seven.1", seven, inner)
    seven = _tall(net, f"{name}/seven.2", seven, 192)
    twice = _conv(net, f"{name}/twice.0", x, inner)
    twice = _tall(net, f"{name}/twice.1", twice, inner)
    twice = _wide(net, f"{name}/twice.2", twice, inner)
    twice = _tall(net, f"{name}/twice.3", twice, inner)
    twice = _wide(net, f"{name}/twice.4", twice, 192)
    one = _conv(net, f"{name}/one", x, 192)
    return net.concat(f"{name}/concat", [one, seven, twice, _pooled(net, name, x, 192)])


def _shrink_to_8(net: Layers, name: str, x: Value) -> Value:
    three = _conv(net, f"{name}/three.0", x, 192)
    three = _conv(net, f"{name}/three.1", three, 320, 3, stride=2)
    seven = _conv(net, f"{name}/seven.0", x, 192)
    seven = _wide(net, f"{name}/seven.1", seven, 192)
    seven = _tall(net, f"{name}/seven.2", seven, 192)
    seven = _conv(net, f"{name}/seven.3", seven, 192, 3, stride=2)
    pool = net.pool(f"{name}/pool", "max", x, 3, stride=2)
    return net.concat(f"{name}/concat", [three, seven, pool])


def _figure7(net: Layers, name: str, x: Value) -> Value:
    """3x3 convolutions as 1x3 beside 3x1 (figure 7)."""
    three = _conv(net, f"{name}/three.0", x, 384)
    twice = _conv(net, f"{name}/twice.0", x, 448)
    twice = _conv(net, f"{name}/twice.1", twice, 384, 3, pad=1)
    halves = [
        _conv(net, f"{name}/{branch}.{half}", y, 384, kernel, pad=pad)
        for branch, y in (("three", three), ("twice", twice))
        for half, kernel, pad in (("wide", (1, 3), (0, 1)), ("tall", (3, 1), (1, 0)))
    ]
    one = _conv(net, f"{name}/one", x, 320)
    return net.concat(f"{name}/concat", [one, *halves, _pooled(net, name, x, 192)])


@register
def inception_v3(
    batch: int = 32,
    resolution: int = 299,
    classes: int = 1000,
    precision: str = "fp32",
    training: bool = True,
    optimizer: str = "rmsprop",
) -> Model:
    """Inception-v3 without its auxiliary classifier."""
    check_positive("inception_v3", classes=classes, resolution=resolution)
    if resolution < SMALLEST:
        raise GraphError(f"inception_v3: resolution must be {SMALLEST} or more, got {resolution}")
    net = Layers(
        "inception_v3", batch=batch, precision=precision, training=training, optimizer=optimizer
    )
    x = net.source("stem/image", (resolution, resolution, 3))
    x = _conv(net, "stem/1a", x, 32, 3, stride=2)
    x = _conv(net, "stem/2a", x, 32, 3)
    x = _conv(net, "stem/2b", x, 64, 3, pad=1)
    x = net.pool("stem/3a", "max", x, 3, stride=2)
    x = _conv(net, "stem/3b", x, 80)
    x = _conv(net, "stem/4a", x, 192, 3)
    x = net.pool("stem/5a", "max", x, 3, stride=2)
    for name, pool in (("mixed5b", 32), ("mixed5c", 64), ("mixed5d", 64)):
        x = _figure5(net, name, x, pool)
    x = _shrink_to_17(net, "mixed6a", x)
    for name, inner in (("mixed6b", 128), ("mixed6c", 160), ("mixed6d", 160), ("mixed6e", 192)):
        x = _figure6(net, name, x, inner)
    x = _shrink_to_8(net, "mixed7a", x)
    for name in ("mixed7b", "mixed7c"):
        x = _figure7(net, name, x)
    x = net.pool("mixed7c/average", "average", x, x.shape[0])
    net.finish("mixed7c", net.linear("mixed7c/classes", x, classes))
    return net.build({"resolution": resolution, "classes": classes})
