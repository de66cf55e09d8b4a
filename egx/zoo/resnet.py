"""ResNet-50 and ResNet-101 at the granularity of deployed layers.

He et al., "Deep Residual Learning for Image Recognition", CVPR 2016, in the common "v1.5" form
(the stride of a block stands in its 3x3 convolution), which has the published 4.1 and 7.8 GMAC.

Batch normalisation is folded into the convolution before it, whose bias is its only trace; ReLU
and the residual addition are fused too, so that the last convolution of a block reads a second
tensor. What is fused adds no FLOPs. The image is the caller's, no tensor of the graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from egx.graph.builder import GraphBuilder, Tensor
from egx.graph.graph import Model
from egx.zoo.common import Precision, check_positive, geometry, precision_widths
from egx.zoo.registry import register

WIDTHS = (64, 128, 256, 512)
EXPANSION = 4
CLASSES = 1000


class Feature(NamedTuple):
    """An image inside the network: `size` x `size` x `channels`; no tensor for the input."""

    tensor: Tensor | None
    size: int
    channels: int


class _Net:
    """A builder together with what each of its ops needs to know."""

    def __init__(self, name: str, batch: int, widths: Precision):
        self.builder = GraphBuilder(name)
        self.batch = batch
        self.widths = widths
        self.parameters = 0

    def window(
        self,
        name: str,
        op_type: str,
        image: Feature,
        *,
        channels: int,
        kernel: int,
        stride: int = 1,
        pad: int = 0,
        extra: Sequence[Tensor] = (),
    ) -> Feature:
        """A convolution, or a pooling, over square windows, with `extra` tensors fused in."""
        size = (image.size + 2 * pad - kernel) // stride + 1
        elements = self.batch * size * size * channels
        weight_bytes = 0
        if op_type == "conv":
            weights = kernel * kernel * image.channels * channels
            self.parameters += weights + channels
            weight_bytes = weights * self.widths.weight + channels * self.widths.vector
            flops = 2 * elements * kernel * kernel * image.channels
        else:
            flops = elements * kernel * kernel
        (tensor,) = self.builder.op(
            name,
            kind="contraction" if op_type == "conv" else "reduction",
            op_type=op_type,
            inputs=[*([image.tensor] if image.tensor else []), *extra],
            output_bytes=[elements * self.widths.activation],
            flops=flops,
            weight_bytes=weight_bytes,
            attributes=geometry(
                (image.size, image.size, image.channels),
                (size, size, channels),
                kernel_x=kernel,
                kernel_y=kernel,
                stride=stride,
                pad=pad,
                dilation=1,
                batch=self.batch,
            ),
        )
        return Feature(tensor, size, channels)

    def block(self, name: str, image: Feature, width: int, stride: int) -> Feature:
        """A bottleneck block: 1x1, 3x3, 1x1, and a projection where the shape changes."""
        channels = EXPANSION * width
        inner = self.window(f"{name}.conv1", "conv", image, channels=width, kernel=1)
        inner = self.window(
            f"{name}.conv2", "conv", inner, channels=width, kernel=3, stride=stride, pad=1
        )
        shortcut = image
        if stride != 1 or image.channels != channels:
            shortcut = self.window(
                f"{name}.downsample", "conv", image, channels=channels, kernel=1, stride=stride
            )
        assert shortcut.tensor is not None
        return self.window(
            f"{name}.conv3", "conv", inner, channels=channels, kernel=1, extra=[shortcut.tensor]
        )

    def head(self, image: Feature) -> Tensor:
        """The fully connected layer and the softmax over the classes."""
        assert image.tensor is not None
        flat = (1, 1, CLASSES)
        weights = image.channels * CLASSES
        self.parameters += weights + CLASSES
        out_bytes = [self.batch * CLASSES * self.widths.activation]
        (logits,) = self.builder.op(
            "fc",
            kind="contraction",
            op_type="matmul",
            inputs=[image.tensor],
            output_bytes=out_bytes,
            flops=2 * self.batch * weights,
            weight_bytes=weights * self.widths.weight + CLASSES * self.widths.vector,
            attributes=geometry((1, 1, image.channels), flat, batch=self.batch),
        )
        # Five operations an element: maximum, difference, exponential, sum, quotient.
        (probabilities,) = self.builder.op(
            "softmax",
            kind="reduction",
            op_type="softmax",
            inputs=[logits],
            output_bytes=out_bytes,
            flops=5 * self.batch * CLASSES,
            attributes=geometry(flat, flat, batch=self.batch),
        )
        return probabilities


def _resnet(name: str, depths: Sequence[int], batch: int, precision: str, resolution: int) -> Model:
    check_positive(name, batch=batch, resolution=resolution)
    net = _Net(name, batch, precision_widths(name, precision))
    image = net.window(
        "conv1", "conv", Feature(None, resolution, 3), channels=64, kernel=7, stride=2, pad=3
    )
    image = net.window("maxpool", "maxpool", image, channels=64, kernel=3, stride=2, pad=1)
    for stage, (depth, width) in enumerate(zip(depths, WIDTHS, strict=True), start=1):
        for k in range(depth):
            stride = 2 if k == 0 and stage > 1 else 1
            image = net.block(f"layer{stage}.{k}", image, width, stride)
    image = net.window("avgpool", "averagepool", image, channels=image.channels, kernel=image.size)
    net.builder.output(net.head(image))
    return net.builder.build_model(
        source=f"zoo/{name}",
        notes={
            "options": {"batch": batch, "precision": precision, "resolution": resolution},
            "parameters": net.parameters,
        },
    )


@register
def resnet50(batch: int = 1, precision: str = "int8", resolution: int = 224) -> Model:
    """ResNet-50: 57 ops, 25.5 M parameters, 4.1 GMAC an image of 224 x 224."""
    return _resnet("resnet50", (3, 4, 6, 3), batch, precision, resolution)


@register
def resnet101(batch: int = 1, precision: str = "int8", resolution: int = 224) -> Model:
    """ResNet-101: 108 ops, 44.5 M parameters, 7.8 GMAC an image of 224 x 224."""
    return _resnet("resnet101", (3, 4, 23, 3), batch, precision, resolution)
