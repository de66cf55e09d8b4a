"""Random models, for tests and experiments; the same generator state gives the same model."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Any

import numpy as np

from egx.errors import GraphError
from egx.graph.builder import GraphBuilder, Tensor
from egx.graph.graph import OP_CLASSES, Model
from egx.graph.topologies import TOPOLOGIES, Parents

CLASS_SHARES = (0.35, 0.15, 0.1, 0.35, 0.05)
"""How often each of `OP_CLASSES` occurs in `random_graph`."""


def random_graph(
    rng: np.random.Generator,
    family: str = "layered",
    ops: int = 20,
    *,
    multi_output: float = 0.15,
    repeated_use: float = 0.1,
    dead: float = 0.1,
    zero_size: float = 0.1,
    outputs: float = 0.1,
    median_bytes: float = 65536.0,
    spread: float = 1.5,
    unit_bytes: int | None = None,
    pad_to: tuple[int, int, int] | None = None,
    **shape: Any,
) -> Model:
    """A random model with the topology of a family and sizes without structure.

    Args:
        rng: the source of all randomness.
        family: one of `TOPOLOGIES`; `shape` holds the arguments of that family.
        ops: number of ops.
        multi_output: probability that an op has two or three outputs.
        repeated_use: probability, for an edge, that its consumer reads a tensor twice.
        dead: probability that an op which feeds nothing is no graph output either.
        zero_size: probability that a tensor, or the weights or FLOPs of an op, are zero.
        outputs: probability that a tensor with consumers is a graph output too.
        median_bytes: median size of tensors; weights are four times as large.
        spread: standard deviation of the natural logarithm of sizes and FLOPs.
        unit_bytes: as in `GraphBuilder.build`.
        pad_to: as in `GraphBuilder.build`.

    Raises:
        GraphError: for an unknown family, or `ops` below 1.
    """
    if family not in TOPOLOGIES:
        raise _unknown("family", family, tuple(TOPOLOGIES))
    _check_ops(ops)
    parents = TOPOLOGIES[family](rng, ops, **shape)
    builder = GraphBuilder(f"{family}-{ops}")

    def size(scale: float) -> float:
        if rng.random() < zero_size:
            return 0.0
        return float(np.ceil(scale * rng.lognormal(sigma=spread)))

    made: list[tuple[Tensor, ...]] = []
    used: set[Tensor] = set()
    for i, sources in enumerate(parents):
        kind = OP_CLASSES[int(rng.choice(len(OP_CLASSES), p=CLASS_SHARES))]
        inputs: list[Tensor] = []
        for source in sources:
            tensor = made[source][int(rng.integers(len(made[source])))]
            inputs += [tensor] * (1 + int(rng.random() < repeated_use))
        used.update(inputs)
        count = int(rng.integers(2, 4)) if rng.random() < multi_output else 1
        contraction = kind == "contraction"
        made.append(
            builder.op(
                f"op{i}",
                kind=kind,
                op_type=kind,
                inputs=inputs,
                output_bytes=[size(median_bytes) for _ in range(count)],
                flops=size(median_bytes * (500 if contraction else 2)),
                weight_bytes=size(4 * median_bytes) if contraction else 0,
            )
        )
    for tensors in made:
        sink = not any(tensor in used for tensor in tensors)
        is_output = rng.random() >= dead if sink else False
        for tensor in tensors:
            if is_output or (tensor in used and rng.random() < outputs):
                builder.output(tensor)
    return builder.build_model(
        unit_bytes=unit_bytes, pad_to=pad_to, source=f"random/{builder.name}"
    )


def regal_synthetic(
    rng: np.random.Generator, family: str | None = None, ops: int | None = None
) -> Model:
    """A graph like those of REGAL's synthetic set (Paliwal et al., ICLR 2020, arXiv 1905.02494).

    One of four graph models (a random one by default) on 48 to 198 nodes with edges along a
    random order, then a source before all roots and a sink after all leaves. An op has one tensor
    of N(50, 10) bytes; an edge carries it with probability 0.8, else it only orders its ends (a
    use of an empty tensor). `flops` is an op's cost: the bytes it reads and writes, times
    1 + N(0, 0.1).

    Raises:
        GraphError: for an unknown family, or fewer than three ops.
    """
    families = ("erdos_renyi", "stochastic_block", "watts_strogatz", "barabasi_albert")
    if family is None:
        family = families[int(rng.integers(len(families)))]
    if family not in families:
        raise _unknown("family", family, families)
    if ops is None:
        ops = int(rng.integers(50, 201))
    _check_ops(ops, 3)
    parents = _with_ends(TOPOLOGIES[family](rng, ops - 2))
    fed = {parent for sources in parents for parent in sources}
    builder = GraphBuilder(f"regal-{family}-{ops}")
    made: list[tuple[Tensor, Tensor]] = []
    sizes = np.maximum(np.round(rng.normal(50.0, 10.0, ops)), 1.0)
    for i, sources in enumerate(parents):
        data = rng.random(len(sources)) < 0.8
        read = sum(float(sizes[p]) for p, is_data in zip(sources, data, strict=True) if is_data)
        written = float(sizes[i])
        data_tensor, order_tensor = builder.op(
            f"op{i}",
            kind="elementwise",
            op_type="synthetic",
            inputs=[made[p][0 if is_data else 1] for p, is_data in zip(sources, data, strict=True)],
            output_bytes=[written, 0],
            flops=max((read + written) * (1.0 + rng.normal(0.0, 0.1)), 0.0),
            output_names=[f"op{i}", f"op{i}:order"],
        )
        made.append((data_tensor, order_tensor))
        if i not in fed:
            builder.output(data_tensor)
    return builder.build_model(source=f"random/{builder.name}")


def _with_ends(parents: Parents) -> Parents:
    """The graph between a source that feeds all roots and a sink that reads all leaves."""
    inner = len(parents)
    fed = {parent for sources in parents for parent in sources}
    leaves = [i + 1 for i in range(inner) if i not in fed]
    return [[], *([p + 1 for p in sources] or [0] for sources in parents), leaves]


def cnn_like(rng: np.random.Generator, ops: int = 60) -> Model:
    """A convolutional network of plain, residual, separable and branched blocks, int8.

    Stages halve the image and double the channels, as real networks do. The network ends with the
    first block after which `ops` is reached (by at most six), with pooling, classifier and softmax.

    Raises:
        GraphError: if `ops` is below 1.
    """
    _check_ops(ops)
    net = _ImageNet(rng, f"cnn-{ops}")
    size, channels = int(rng.choice([96, 128, 160, 224])), int(rng.choice([16, 32, 48, 64]))
    image = net.conv(None, (size, 3), channels, kernel=int(rng.choice([3, 5, 7])), stride=2)
    size = -(-size // 2)
    depth = max((ops - 4) // 12, 1)
    blocks: tuple[Callable[..., Tensor], ...] = (net.plain, net.residual, net.separable, net.branch)
    block = blocks[int(rng.integers(len(blocks)))]
    count = 0
    while len(net.builder) < ops - 3:
        if rng.random() < 0.2:
            block = blocks[int(rng.integers(len(blocks)))]
        stride = 2 if count % depth == 0 and size >= 8 else 1
        wider = 2 * channels if stride == 2 and channels < 1024 else channels
        image = block(image, (size, channels), wider, stride)
        size, channels, count = -(-size // stride), wider, count + 1
    net.head(image, size, channels)
    return net.builder.build_model(source=f"random/{net.builder.name}")


class _ImageNet:
    """Blocks of a convolutional network; an image is a tensor and its (size, channels)."""

    def __init__(self, rng: np.random.Generator, name: str):
        self.rng = rng
        self.builder = GraphBuilder(name)

    def _op(
        self, kind: str, op_type: str, inputs: list[Tensor], output: int, flops: float, **more: Any
    ) -> Tensor:
        name = f"{op_type}{len(self.builder)}"
        (tensor,) = self.builder.op(
            name,
            kind=kind,
            op_type=op_type,
            inputs=inputs,
            output_bytes=[output],
            flops=flops,
            **more,
        )
        return tensor

    def conv(
        self,
        image: Tensor | None,
        shape: tuple[int, int],
        channels: int,
        *,
        kernel: int,
        stride: int = 1,
        groups: int = 1,
        extra: list[Tensor] | None = None,
    ) -> Tensor:
        size, depth = shape
        out = -(-size // stride)
        weights = kernel * kernel * depth // groups * channels
        attributes = {"input_x": size, "input_y": size, "input_z": depth}
        attributes |= {"output_x": out, "output_y": out, "output_z": channels}
        attributes |= {"kernel_x": kernel, "kernel_y": kernel, "stride": stride}
        attributes |= {"groups": groups, "pad": kernel // 2, "dilation": 1, "batch": 1}
        return self._op(
            "contraction",
            "conv",
            [*([image] if image else []), *(extra or [])],
            out * out * channels,
            2.0 * out * out * weights,
            weight_bytes=weights + 4 * channels,
            attributes=attributes,
        )

    def plain(self, x: Tensor, shape: tuple[int, int], channels: int, stride: int) -> Tensor:
        return self.conv(x, shape, channels, kernel=3, stride=stride)

    def residual(self, x: Tensor, shape: tuple[int, int], channels: int, stride: int) -> Tensor:
        size, depth = shape
        out = -(-size // stride)
        y = self.conv(x, shape, channels, kernel=3, stride=stride)
        if stride > 1 or depth != channels:
            x = self.conv(x, shape, channels, kernel=1, stride=stride)
        return self.conv(y, (out, channels), channels, kernel=3, extra=[x])

    def separable(self, x: Tensor, shape: tuple[int, int], channels: int, stride: int) -> Tensor:
        size, depth = shape
        y = self.conv(x, shape, depth, kernel=3, stride=stride, groups=depth)
        return self.conv(y, (-(-size // stride), depth), channels, kernel=1)

    def branch(self, x: Tensor, shape: tuple[int, int], channels: int, stride: int) -> Tensor:
        size, depth = shape
        out, quarter = -(-size // stride), channels // 4
        first = self.conv(x, shape, quarter, kernel=1, stride=stride)
        second = self.conv(x, shape, quarter, kernel=1)
        second = self.conv(second, (size, quarter), 2 * quarter, kernel=3, stride=stride)
        third = self._op("reduction", "maxpool", [x], out * out * depth, 9.0 * out * out * depth)
        third = self.conv(third, (out, depth), channels - 3 * quarter, kernel=1)
        return self._op("shape", "concat", [first, second, third], out * out * channels, 0.0)

    def head(self, x: Tensor, size: int, channels: int, classes: int = 1000) -> None:
        y = self._op("reduction", "averagepool", [x], channels, float(size * size * channels))
        weights = channels * classes
        y = self._op(
            "contraction",
            "matmul",
            [y],
            classes,
            2.0 * weights,
            weight_bytes=weights + 4 * classes,
        )
        self.builder.output(self._op("reduction", "softmax", [y], classes, 5.0 * classes))


def transformer_like(rng: np.random.Generator, ops: int = 60) -> Model:
    """A transformer with fused ops (ten a layer) and random width, heads and length, 16 bit.

    The projection of queries, keys and values is one op with three outputs. The network ends with
    the first layer after which `ops` is reached (by at most nine).

    Raises:
        GraphError: if `ops` is below 1.
    """
    _check_ops(ops)
    heads = int(rng.choice([4, 8, 12, 16]))
    hidden = heads * int(rng.choice([32, 64, 128]))
    groups = int(rng.choice([g for g in (1, 2, 4) if heads % g == 0]))
    rows = int(rng.choice([64, 128, 256, 512, 1024]))
    inner = hidden * int(rng.choice([2, 4]))
    vocabulary = int(rng.choice([8000, 32000, 50257]))
    shared, flat = hidden // groups, rows * hidden
    builder = GraphBuilder(f"transformer-{ops}")

    def op(
        name: str,
        kind: str,
        op_type: str,
        inputs: list[Tensor],
        elements: list[int],
        flops: float,
        weights: int = 0,
    ) -> tuple[Tensor, ...]:
        return builder.op(
            name,
            kind=kind,
            op_type=op_type,
            inputs=inputs,
            output_bytes=[2 * n for n in elements],
            flops=flops,
            weight_bytes=2 * weights,
        )

    def matmul(name: str, x: Tensor, fan_in: int, fan_out: int) -> Tensor:
        flops = 2.0 * rows * fan_in * fan_out
        weights = (fan_in + 1) * fan_out
        return op(name, "contraction", "matmul", [x], [rows * fan_out], flops, weights)[0]

    def norm(name: str, inputs: list[Tensor]) -> Tensor:
        return op(name, "reduction", "normalize", inputs, [flat], 8.0 * flat, 2 * hidden)[0]

    (x,) = op("embedding", "shape", "embedding", [], [flat], 0.0, vocabulary * hidden)
    layer = 0
    while len(builder) < ops - 1:
        at = f"layer{layer}"
        y = norm(f"{at}.norm", [x])
        width = hidden + 2 * shared
        query, key, value = op(
            f"{at}.qkv",
            "contraction",
            "matmul",
            [y],
            [flat, rows * shared, rows * shared],
            2.0 * rows * hidden * width,
            (hidden + 1) * width,
        )
        square, attend = rows * rows * heads, 2.0 * rows * rows * hidden
        (y,) = op(f"{at}.scores", "contraction", "matmul", [query, key], [square], attend)
        (y,) = op(f"{at}.softmax", "reduction", "softmax", [y], [square], 5.0 * square)
        (y,) = op(f"{at}.context", "contraction", "matmul", [y, value], [flat], attend)
        y = matmul(f"{at}.projection", y, hidden, hidden)
        (x,) = op(f"{at}.residual", "elementwise", "add", [x, y], [flat], float(flat))
        y = matmul(f"{at}.up", norm(f"{at}.ffn_norm", [x]), hidden, inner)
        # The second residual addition is fused into the projection down.
        flops = 2.0 * rows * inner * hidden
        (x,) = op(
            f"{at}.down", "contraction", "matmul", [y, x], [flat], flops, (inner + 1) * hidden
        )
        layer += 1
    builder.output(matmul("logits", x, hidden, vocabulary))
    return builder.build_model(source=f"random/{builder.name}")


def _check_ops(ops: int, least: int = 1) -> None:
    if isinstance(ops, bool) or not isinstance(ops, (int, np.integer)) or ops < least:
        raise GraphError(f"random graph: ops must be an integer of {least} or more, got {ops!r}")


def _unknown(what: str, name: str, known: tuple[str, ...]) -> GraphError:
    close = difflib.get_close_matches(str(name), known, n=2)
    hint = f"; did you mean {' or '.join(close)}?" if close else ""
    return GraphError(f"random graph: no {what} {name!r}{hint} (known: {', '.join(known)})")
