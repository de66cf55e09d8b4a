"""BERT as a compiler sees it before it fuses.

Devlin et al., "BERT: Pre-training of Deep Bidirectional Transformers", NAACL 2019. A layer is 31
ops: one for each primitive of the framework's graph, with softmax and layer normalisation split
at their reductions, where kernels end.

    query, key, value: matmul, bias, split heads                             9
    scores, scale, mask, softmax (maximum, exponential, sum, quotient)       7
    context, merge heads, projection matmul, bias, residual                  5
    normalisation: statistics, apply                                         2
    feed-forward: matmul, bias, gelu, matmul, bias, residual                 6
    normalisation: statistics, apply                                         2

Four more ops: the embedding (three look-ups, summed), its normalisation (two), and the pooler
(slice, matmul, bias and tanh as one). The token ids and the mask are the caller's, no tensors of
the graph. The embedding op owns the whole tables, though a run touches a few of their rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from egx.errors import GraphError
from egx.graph.builder import GraphBuilder, Tensor
from egx.graph.graph import Model
from egx.zoo.common import Precision, check_positive, geometry, precision_widths
from egx.zoo.registry import register

TOKEN_TYPES = 2
POSITIONS = 512

Shape = tuple[int, int, int]
"""(x, y, z) of one sample: positions, a second axis of positions or 1, features or heads."""

# Operations an element; a transcendental function, a square root and a quotient count as one.
GELU_FLOPS = 8  # tanh form: 0.5 x (1 + tanh(c (x + k x^3)))
STATISTICS_FLOPS = 3  # sum, and sum of squares
NORMALISE_FLOPS = 4  # subtract the mean, times the deviation, times the scale, plus the shift


class _Net:
    def __init__(self, batch: int, widths: Precision):
        self.builder = GraphBuilder("bert")
        self.batch = batch
        self.widths = widths
        self.parameters = 0

    def op(
        self,
        name: str,
        kind: str,
        op_type: str,
        inputs: Sequence[Tensor],
        shape: tuple[Shape, Shape],
        *,
        per_element: float = 0,
        flops: float | None = None,
        weights: int = 0,
        vectors: int = 0,
        width: int | None = None,
    ) -> Tensor:
        """One op from input shape to output shape; `per_element` FLOPs for each input element."""
        source, target = shape
        self.parameters += weights + vectors
        (tensor,) = self.builder.op(
            name,
            kind=kind,
            op_type=op_type,
            inputs=inputs,
            output_bytes=[self.batch * math.prod(target) * (width or self.widths.activation)],
            flops=per_element * self.batch * math.prod(source) if flops is None else flops,
            weight_bytes=weights * self.widths.weight + vectors * self.widths.vector,
            attributes=geometry(source, target, batch=self.batch),
        )
        return tensor

    def linear(self, name: str, x: Tensor, rows: int, fan_in: int, fan_out: int) -> Tensor:
        """A matrix product with weights, then its bias: two ops."""
        out = (rows, 1, fan_out)
        y = self.op(
            f"{name}.matmul",
            "contraction",
            "matmul",
            [x],
            ((rows, 1, fan_in), out),
            flops=2 * self.batch * rows * fan_in * fan_out,
            weights=fan_in * fan_out,
        )
        return self.op(
            f"{name}.bias", "elementwise", "add", [y], (out, out), per_element=1, vectors=fan_out
        )

    def normalise(self, name: str, x: Tensor, rows: int, hidden: int) -> Tensor:
        """Layer normalisation: mean and deviation of each row, then their use: two ops."""
        full, row = (rows, 1, hidden), (rows, 1, 2)
        statistics = self.op(
            f"{name}.statistics",
            "reduction",
            "moments",
            [x],
            (full, row),
            per_element=STATISTICS_FLOPS,
            width=self.widths.vector,
        )
        return self.op(
            f"{name}.apply",
            "elementwise",
            "normalize",
            [x, statistics],
            (full, full),
            per_element=NORMALISE_FLOPS,
            vectors=2 * hidden,
        )

    def softmax(self, name: str, x: Tensor, rows: int, columns: int, heads: int) -> Tensor:
        """Softmax over columns in four ops, split at its two reductions."""
        full, row = (rows, columns, heads), (rows, 1, heads)
        vector = self.widths.vector
        top = self.op(
            f"{name}.max", "reduction", "max", [x], (full, row), per_element=1, width=vector
        )
        power = self.op(f"{name}.exp", "elementwise", "exp", [x, top], (full, full), per_element=2)
        total = self.op(
            f"{name}.sum", "reduction", "sum", [power], (full, row), per_element=1, width=vector
        )
        return self.op(
            f"{name}.div", "elementwise", "div", [power, total], (full, full), per_element=1
        )

    def attention(self, name: str, x: Tensor, rows: int, hidden: int, heads: int) -> Tensor:
        """Self-attention up to and with its residual addition: 21 ops."""
        flat, square, size = (rows, 1, hidden), (rows, rows, heads), hidden // heads
        split = (rows, size, heads)
        projected = []
        for part in ("query", "key", "value"):
            y = self.linear(f"{name}.{part}", x, rows, hidden, hidden)
            y = self.op(f"{name}.{part}.heads", "shape", "transpose", [y], (flat, split))
            projected.append(y)
        query, key, value = projected
        flops = 2 * self.batch * rows * rows * hidden
        y = self.op(
            f"{name}.scores", "contraction", "matmul", [query, key], (split, square), flops=flops
        )
        y = self.op(f"{name}.scale", "elementwise", "mul", [y], (square, square), per_element=1)
        y = self.op(f"{name}.mask", "elementwise", "add", [y], (square, square), per_element=1)
        y = self.softmax(f"{name}.softmax", y, rows, rows, heads)
        y = self.op(
            f"{name}.context", "contraction", "matmul", [y, value], (square, split), flops=flops
        )
        y = self.op(f"{name}.merge", "shape", "transpose", [y], (split, flat))
        y = self.linear(f"{name}.output", y, rows, hidden, hidden)
        return self.op(
            f"{name}.residual", "elementwise", "add", [y, x], (flat, flat), per_element=1
        )

    def feed_forward(self, name: str, x: Tensor, rows: int, hidden: int, inner: int) -> Tensor:
        """Two linear maps with a GELU between, and the residual addition: six ops."""
        flat, wide = (rows, 1, hidden), (rows, 1, inner)
        y = self.linear(f"{name}.up", x, rows, hidden, inner)
        y = self.op(
            f"{name}.gelu", "elementwise", "gelu", [y], (wide, wide), per_element=GELU_FLOPS
        )
        y = self.linear(f"{name}.down", y, rows, inner, hidden)
        return self.op(
            f"{name}.residual", "elementwise", "add", [y, x], (flat, flat), per_element=1
        )


@register
def bert(
    layers: int = 12,
    hidden: int = 768,
    heads: int = 12,
    intermediate: int = 3072,
    vocabulary: int = 30522,
    sequence: int = 128,
    batch: int = 1,
    precision: str = "int8",
) -> Model:
    """BERT: 31 ops a layer and four more; by default BERT-base, 376 ops, 109.5 M parameters.

    Both the last hidden state and the pooled vector are outputs. The table of positions has 512
    rows, or `sequence` if that is more.
    """
    options = {
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "intermediate": intermediate,
        "vocabulary": vocabulary,
        "sequence": sequence,
        "batch": batch,
    }
    check_positive("bert", **options)
    if hidden % heads:
        raise GraphError(f"bert: hidden {hidden} is not a multiple of heads {heads}")
    net = _Net(batch, precision_widths("bert", precision))
    flat = (sequence, 1, hidden)
    table = (vocabulary + max(POSITIONS, sequence) + TOKEN_TYPES) * hidden
    # Three rows are added up for each position: two additions an element.
    x = net.op(
        "embeddings",
        "elementwise",
        "embedding",
        [],
        ((sequence, 1, 1), flat),
        flops=2 * batch * sequence * hidden,
        weights=table,
    )
    x = net.normalise("embeddings.norm", x, sequence, hidden)
    for k in range(layers):
        name = f"layer{k}"
        y = net.attention(f"{name}.attention", x, sequence, hidden, heads)
        x = net.normalise(f"{name}.attention.norm", y, sequence, hidden)
        y = net.feed_forward(f"{name}.ffn", x, sequence, hidden, intermediate)
        x = net.normalise(f"{name}.ffn.norm", y, sequence, hidden)
    pooled = net.op(
        "pooler",
        "contraction",
        "matmul",
        [x],
        (flat, (1, 1, hidden)),
        flops=2 * batch * hidden * hidden,
        weights=hidden * hidden,
        vectors=hidden,
    )
    net.builder.output(x)
    net.builder.output(pooled)
    return net.builder.build_model(
        source="zoo/bert",
        notes={"options": {**options, "precision": precision}, "parameters": net.parameters},
    )
