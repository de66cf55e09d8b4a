"""Ops that networks are made of, each with what its gradients cost and keep.

A multiply-add counts two operations; a transcendental function, a square root and a quotient one.
The gradient of a contraction costs as much as the contraction, once for each of its two operands.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from egx.zoo.training import Gradient, Shape, Tape, Value

# Operations an element, forward and backward. The gradients use the output: y' = y (1 - y),
# 1 - y^2, and y > 0.
ACTIVATIONS = {"sigmoid": (4, 3), "tanh": (1, 3), "relu": (1, 1)}
SOFTMAX_FLOPS = 5  # maximum, difference, exponential, sum, quotient
SOFTMAX_GRAD_FLOPS = 4  # (dy - sum(dy y)) y
STATISTICS_FLOPS = 3  # sum, and sum of squares
NORMALISE_FLOPS = 4  # subtract the mean, times the deviation, times the scale, plus the shift
# Two sums over dy and dy x', then scale (dy - mean(dy) - x' mean(dy x')), x' made once more.
NORMALISE_GRAD_FLOPS = 11
SCALE_GRAD_FLOPS = 5  # x' made once more, and the sums of dy x' and dy

Pair = tuple[int, int]


class Layers(Tape):
    """A tape with the ops of common networks."""

    def contract(
        self,
        name: str,
        a: Value,
        b: Value,
        shape: Shape,
        flops: float,
        *,
        op_type: str = "matmul",
        samples: int | None = None,
    ) -> Value:
        """A product of two tensors, either of which may be a parameter; `flops` of all samples."""
        labels = ("grad_x", "grad_w") if b.is_parameter else ("grad_a", "grad_b")
        return self.op(
            name,
            "contraction",
            op_type,
            [a, b],
            [shape],
            flops=flops,
            samples=samples,
            gradients=[
                Gradient((k,), "contraction", f"{op_type}_grad", flops, reads=(1 - k,), label=label)
                for k, label in enumerate(labels)
            ],
        )[0]

    def dense(self, name: str, x: Value, weights: Value, fan_out: int) -> Value:
        """Each row of x times a matrix, a parameter of `fan_in x fan_out` elements."""
        columns, rows, fan_in = x.shape
        flops = 2 * x.elements * fan_out
        assert weights.elements == fan_in * fan_out, (name, weights.elements, fan_in, fan_out)
        return self.contract(name, x, weights, (columns, rows, fan_out), flops, samples=x.samples)

    def bias(self, name: str, x: Value, vector: Value) -> Value:
        """Adds a vector to every position."""
        return self.add(name, x, vector)

    def linear(self, name: str, x: Value, fan_out: int, *, bias: bool = True) -> Value:
        """A matrix product with parameters of its own, and its bias: one or two ops."""
        weights = self.parameter(f"{name}.weights", x.shape[2] * fan_out)
        y = self.dense(f"{name}.matmul", x, weights, fan_out)
        if not bias:
            return y
        return self.bias(f"{name}.bias", y, self.parameter(f"{name}.shift", fan_out, vector=True))

    def add(self, name: str, a: Value, b: Value) -> Value:
        """The sum; an operand with fewer elements is repeated, and its gradient is a sum."""
        return self.op(
            name,
            "elementwise",
            "add",
            [a, b],
            [_larger(a, b).shape],
            flops=_larger(a, b).elements,
            samples=_larger(a, b).samples,
            gradients=[
                Gradient((k,))
                if each.elements == _larger(a, b).elements
                else Gradient((k,), "reduction", "sum", _larger(a, b).elements, label=label)
                for k, (each, label) in enumerate(((a, "grad_a"), (b, "grad_b")))
            ],
        )[0]

    def multiply(self, name: str, a: Value, b: Value) -> Value:
        """The product of tensors of one shape, element by element."""
        return self.op(
            name,
            "elementwise",
            "mul",
            [a, b],
            [a.shape],
            flops=a.elements,
            samples=a.samples,
            gradients=[
                Gradient((k,), "elementwise", "mul", a.elements, reads=(1 - k,), label=label)
                for k, label in enumerate(("grad_a", "grad_b"))
            ],
        )[0]

    def scale(self, name: str, x: Value, op_type: str = "mul") -> Value:
        """Every element times a constant (or masked, which costs the same)."""
        rule = Gradient((0,), "elementwise", op_type, x.elements)
        return self.op(
            name, "elementwise", op_type, [x], [x.shape], flops=x.elements, gradients=[rule]
        )[0]

    def activate(self, name: str, function: str, x: Value) -> Value:
        """One of `ACTIVATIONS`; the output is kept for its gradient."""
        forward, backward = ACTIVATIONS[function]
        rule = Gradient((0,), "elementwise", f"{function}_grad", backward * x.elements, keeps=(0,))
        return self.op(
            name,
            "elementwise",
            function,
            [x],
            [x.shape],
            flops=forward * x.elements,
            samples=x.samples,
            gradients=[rule],
        )[0]

    def concat(self, name: str, values: Sequence[Value], *, axis: int = 2) -> Value:
        """Values one after another along an axis; the gradient is cut apart by one op."""
        shape = list(values[0].shape)
        shape[axis] = sum(value.shape[axis] for value in values)
        rule = Gradient(tuple(range(len(values))), "shape", "split")
        return self.op(
            name,
            "shape",
            "concat",
            values,
            [(shape[0], shape[1], shape[2])],
            samples=values[0].samples,
            gradients=[rule],
        )[0]

    def split(self, name: str, x: Value, parts: int, *, axis: int = 2) -> tuple[Value, ...]:
        """Equal parts along an axis, by one op."""
        shape = list(x.shape)
        shape[axis] //= parts
        rule = Gradient((0,), "shape", "concat", after=tuple(range(parts)))
        return self.op(
            name,
            "shape",
            "split",
            [x],
            [(shape[0], shape[1], shape[2])] * parts,
            samples=x.samples,
            gradients=[rule],
        )

    def rearrange(self, name: str, x: Value, shape: Shape, op_type: str = "transpose") -> Value:
        """The same elements, or a part of them, in another layout."""
        rule = Gradient((0,), "shape", op_type)
        return self.op(name, "shape", op_type, [x], [shape], samples=x.samples, gradients=[rule])[0]

    def softmax(self, name: str, x: Value) -> Value:
        """Softmax as one kernel."""
        rule = Gradient(
            (0,), "reduction", "softmax_grad", SOFTMAX_GRAD_FLOPS * x.elements, keeps=(0,)
        )
        return self.op(
            name,
            "reduction",
            "softmax",
            [x],
            [x.shape],
            flops=SOFTMAX_FLOPS * x.elements,
            gradients=[rule],
        )[0]

    def normalise(self, name: str, x: Value, statistics: Shape | None, *, samples: int) -> Value:
        """Layer or batch normalisation in two ops: statistics, and their use with a learned scale
        and shift for each channel.

        Args:
            statistics: their shape (two numbers a group); None where they are constants, as in
                the inference of a batch normalisation: then there is one op.
            samples: of the statistics; 1 where they are taken over the batch.
        """
        parameters = self.parameter(f"{name}.scale", 2 * x.shape[2], vector=True)
        inputs = [x, parameters]
        if statistics is not None:
            # No rule of its own: the gradient of the whole is one op, in `apply`.
            inputs += self.op(
                f"{name}.statistics",
                "reduction",
                "moments",
                [x],
                [statistics],
                flops=STATISTICS_FLOPS * x.elements,
                samples=samples,
                width=self.widths.vector,
            )
        back, scale = NORMALISE_GRAD_FLOPS * x.elements, SCALE_GRAD_FLOPS * x.elements
        rules = [
            Gradient((0,), "reduction", "normalize_grad", back, reads=(0, 1, 2), label="grad_x"),
            Gradient((1,), "reduction", "scale_grad", scale, reads=(0, 2), label="grad_scale"),
        ]
        return self.op(
            f"{name}.apply",
            "elementwise",
            "normalize",
            inputs,
            [x.shape],
            flops=NORMALISE_FLOPS * x.elements,
            gradients=[] if statistics is None else rules,
        )[0]

    def layer_norm(self, name: str, x: Value) -> Value:
        """Over the features of each position."""
        return self.normalise(name, x, (x.shape[0], x.shape[1], 2), samples=x.samples)

    def batch_norm(self, name: str, x: Value) -> Value:
        """Over the batch in training. For inference the statistics are constants folded into scale
        and shift; their running averages are not kept up in training."""
        statistics = (1, 1, 2 * x.shape[2]) if self.training else None
        return self.normalise(name, x, statistics, samples=1)

    def embedding(self, name: str, table: Value, rows: int, features: int) -> Value:
        """Rows of a table, a token a position; the token ids are the caller's, no tensors here.

        Reading counts the whole table, though a run touches a few of its rows, and the gradient
        is as large as the table, as in frameworks that keep it dense.
        """
        rule = Gradient((0,), "opaque", "embedding_grad", self.batch * rows * features)
        return self.op(
            name, "opaque", "embedding", [table], [(rows, 1, features)], gradients=[rule]
        )[0]

    def conv(
        self,
        name: str,
        x: Value,
        channels: int,
        kernel: int | Pair = 1,
        *,
        stride: int = 1,
        pad: int | Pair = 0,
        dilation: int = 1,
        causal: bool = False,
    ) -> Value:
        """A convolution without bias; `kernel` and `pad` along (x, y), `causal` keeps x long."""
        (kernel_x, kernel_y), (pad_x, pad_y) = _pair(kernel), _pair(pad)
        x_size = x.shape[0] if causal else _windows(x.shape[0], kernel_x, stride, pad_x)
        y_size = 1 if causal else _windows(x.shape[1], kernel_y, stride, pad_y)
        shape = (x_size, y_size, channels)
        weights = self.parameter(f"{name}.weights", kernel_x * kernel_y * x.shape[2] * channels)
        flops = 2 * x.samples * x_size * y_size * weights.elements
        window = {
            "kernel_x": kernel_x,
            "kernel_y": kernel_y,
            "stride": stride,
            "pad": max(pad_x, pad_y),
            "dilation": dilation,
        }
        return self.op(
            name,
            "contraction",
            "conv",
            [x, weights],
            [shape],
            flops=flops,
            window=window,
            gradients=[
                Gradient((0,), "contraction", "conv_grad_x", flops, reads=(1,), label="grad_x"),
                Gradient((1,), "contraction", "conv_grad_w", flops, reads=(0,), label="grad_w"),
            ],
        )[0]

    def pool(
        self, name: str, kind: str, x: Value, kernel: int, *, stride: int = 1, pad: int = 0
    ) -> Value:
        """A "max" or "average" pooling over square windows."""
        size = (
            _windows(x.shape[0], kernel, stride, pad),
            _windows(x.shape[1], kernel, stride, pad),
        )
        flops = self.batch * math.prod(size) * x.shape[2] * kernel * kernel
        # The gradient of a maximum looks for it once more.
        seen = (0,) if kind == "max" else ()
        rule = Gradient((0,), "reduction", f"{kind}pool_grad", flops, reads=seen, keeps=seen)
        window = {"kernel_x": kernel, "kernel_y": kernel, "stride": stride, "pad": pad}
        return self.op(
            name,
            "reduction",
            f"{kind}pool",
            [x],
            [(*size, x.shape[2])],
            flops=flops,
            window=window,
            gradients=[rule],
        )[0]

    def finish(self, name: str, logits: Value) -> None:
        """The end of a classifier, a row a position: softmax and output, or in training the mean
        cross-entropy. The labels are the caller's.

        In training the first op also hands out the probabilities, which is all that its gradient
        reads: the gradient of a mean is a constant.
        """
        if not self.training:
            self.output(self.softmax(f"{name}/softmax", logits))
            return
        losses, _ = self.op(
            f"{name}/cross_entropy",
            "reduction",
            "cross_entropy",
            [logits],
            [(logits.shape[0], logits.shape[1], 1), logits.shape],
            flops=(SOFTMAX_FLOPS + 1) * logits.elements,
            gradients=[
                Gradient(
                    (0,),
                    "elementwise",
                    "cross_entropy_grad",
                    2 * logits.elements,
                    keeps=(1,),
                    after=(),
                )
            ],
        )
        (loss,) = self.op(
            f"{name}/loss",
            "reduction",
            "mean",
            [losses],
            [(1, 1, 1)],
            flops=losses.elements,
            samples=1,
        )
        self.output(loss)


def _larger(a: Value, b: Value) -> Value:
    return a if a.elements >= b.elements else b


def _pair(value: int | Pair) -> Pair:
    return (value, value) if isinstance(value, int) else value


def _windows(size: int, kernel: int, stride: int, pad: int) -> int:
    return (size + 2 * pad - kernel) // stride + 1
