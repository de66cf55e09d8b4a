"""WaveNet: stacks of dilated causal convolutions over raw audio.

Van den Oord et al., "WaveNet: A Generative Model for Raw Audio", 2016 (arXiv 1609.03499): samples
of 256 levels, convolutions of two taps, dilations 1 to 512 over and over, gates tanh x sigmoid,
residual and skip connections, two ReLU and 1x1 convolutions at the end. The paper gives no widths:
our choices are 128 residual and 256 skip channels, and batches of 4 x 8192 samples; filter and gate
are one convolution. Samples come as rows of a table; nothing is conditioned on text or speaker.

Layers, as a person would place them: the stacks.
"""

from __future__ import annotations

from egx.graph.graph import Model
from egx.zoo.common import check_positive
from egx.zoo.layers import Layers
from egx.zoo.registry import register
from egx.zoo.training import Value

LEVELS = 256
DILATIONS = 10  # 1, 2, ... 512


def _conv(
    net: Layers, name: str, x: Value, channels: int, taps: int = 1, dilation: int = 1
) -> Value:
    """A causal convolution and its bias."""
    y = net.conv(name, x, channels, (taps, 1), dilation=dilation, causal=True)
    return net.bias(f"{name}.bias", y, net.parameter(f"{name}.shift", channels, vector=True))


@register
def wavenet(
    stacks: int = 2,
    layers: int = 18,
    samples: int = 8192,
    residual: int = 128,
    skip: int = 256,
    batch: int = 4,
    precision: str = "fp32",
    training: bool = True,
    optimizer: str = "adam",
) -> Model:
    """WaveNet of `stacks` stacks of `layers` layers each."""
    sizes = {
        "stacks": stacks,
        "layers": layers,
        "samples": samples,
        "residual": residual,
        "skip": skip,
    }
    check_positive("wavenet", **sizes)
    net = Layers(
        "wavenet", batch=batch, precision=precision, training=training, optimizer=optimizer
    )
    table = net.parameter("stack0/levels/table", LEVELS * residual)
    x = net.embedding("stack0/levels/lookup", table, samples, residual)
    total: Value | None = None
    for stack in range(stacks):
        for layer in range(layers):
            name = f"stack{stack}/layer{layer}"
            dilation = 2 ** (layer % DILATIONS)
            y = _conv(net, f"{name}/dilated", x, 2 * residual, 2, dilation)
            signal, gate = net.split(f"{name}/split", y, 2)
            signal = net.activate(f"{name}/tanh", "tanh", signal)
            gate = net.activate(f"{name}/sigmoid", "sigmoid", gate)
            y = net.multiply(f"{name}/gated", signal, gate)
            part = _conv(net, f"{name}/skip", y, skip)
            total = part if total is None else net.add(f"{name}/skips", total, part)
            if (stack, layer) != (stacks - 1, layers - 1):  # nobody would read the last one
                x = net.add(f"{name}/residual", _conv(net, f"{name}/out", y, residual), x)
    assert total is not None
    top = f"stack{stacks - 1}/top"
    y = _conv(net, f"{top}.0", net.activate(f"{top}.relu0", "relu", total), skip)
    y = _conv(net, f"{top}.1", net.activate(f"{top}.relu1", "relu", y), LEVELS)
    net.finish(f"stack{stacks - 1}", y)
    return net.build(sizes)
