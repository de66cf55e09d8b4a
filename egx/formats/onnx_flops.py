"""Formulas: multiply-adds and other operations of ONNX ops from the shapes of their operands.

Conventions, shared with the zoo: a multiply-add counts two operations; an elementary function
(exp, tanh, erf, a division, a square root) counts one; an op that is a short program counts what
its definition in the ONNX operator document counts for each element. Moving data counts none.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import onnx

from egx.formats.onnx_contrib import Equivalent
from egx.formats.onnx_types import TensorInfo


class Call(NamedTuple):
    """A node with what is known of its operands; absent optional ones are None."""

    op_type: str
    attributes: Mapping[str, Any]
    inputs: tuple[TensorInfo | None, ...]
    outputs: tuple[TensorInfo | None, ...]

    def shape(self, k: int) -> tuple[int, ...]:
        """Shape of input k, () if it is absent."""
        info = self.inputs[k] if k < len(self.inputs) else None
        return () if info is None else info.shape

    @property
    def read(self) -> int:
        """Elements of the first input."""
        return math.prod(self.shape(0))

    @property
    def made(self) -> int:
        """Elements of the first output."""
        first = next((info for info in self.outputs if info is not None), None)
        return 0 if first is None else first.elements

    def ints(self, name: str, rank: int, default: int) -> list[int]:
        """A list attribute, or `rank` times the default."""
        return list(self.attributes.get(name) or [default] * rank)


def attributes_of(node: onnx.NodeProto) -> dict[str, Any]:
    """A node's plain attributes; tensors and graphs are left out."""
    kinds = onnx.AttributeProto
    plain = (kinds.FLOAT, kinds.INT, kinds.STRING, kinds.FLOATS, kinds.INTS, kinds.STRINGS)
    found = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute if a.type in plain}
    return {k: v.decode(errors="replace") if isinstance(v, bytes) else v for k, v in found.items()}


def call_of(node: onnx.NodeProto, same: Equivalent | None, info: Mapping[str, TensorInfo]) -> Call:
    """A node's operands, seen as those of the standard op that it amounts to."""
    names = list(node.input)
    if same is not None:
        names = [names[k] for k in same.inputs if k < len(names)]
    return Call(
        op_type=node.op_type if same is None else same.op_type,
        attributes=attributes_of(node),
        inputs=tuple(info[name] if name else None for name in names),
        outputs=tuple(info[name] if name else None for name in node.output),
    )


def macs_matmul(call: Call) -> float:
    """The last axis of the first operand is summed away."""
    return call.made * (call.shape(0)[-1] if call.shape(0) else 1)


def macs_matmul_fused(call: Call) -> float:
    """com.microsoft.FusedMatMul: operands may be transposed."""
    axis = -2 if call.attributes.get("transA") else -1
    return call.made * (call.shape(0)[axis] if len(call.shape(0)) > 1 else call.read)


def macs_gemm(call: Call) -> float:
    """As a matrix product, the first operand perhaps transposed."""
    shape = call.shape(0)
    return call.made * (shape[0] if call.attributes.get("transA") else shape[-1])


def flops_gemm(call: Call) -> float:
    """Scalings other than by one, and the addend."""
    a = call.attributes
    scaled = (a.get("alpha", 1.0) != 1.0) + (a.get("beta", 1.0) != 1.0)
    return call.made * (scaled + bool(call.shape(2) or _given(call, 2)))


def _given(call: Call, k: int) -> bool:
    return k < len(call.inputs) and call.inputs[k] is not None


def macs_conv(call: Call) -> float:
    """Each output meets the channels of its group at every place of the kernel."""
    return call.made * math.prod(call.shape(1)[1:])


def macs_conv_transpose(call: Call) -> float:
    """Each input meets the channels of its group at every place of the kernel."""
    return call.read * math.prod(call.shape(1)[1:])


def bias(k: int) -> Callable[[Call], float]:
    """One addition an output, if operand k is given."""
    return lambda call: call.made if _given(call, k) else 0


def macs_recurrent(gates: int) -> Callable[[Call], float]:
    """Input and hidden state times the weights of all gates, each step and direction."""

    def macs(call: Call) -> float:
        if len(call.shape(0)) != 3 or len(call.shape(1)) != 3:
            return 0
        steps = call.shape(0)[0] * call.shape(0)[1]  # sequence x batch, in either layout
        directions, rows, width = call.shape(1)
        return steps * directions * rows * (width + rows // gates)

    return macs


def flops_recurrent(gates: int, per_unit: int) -> Callable[[Call], float]:
    """Two biases and two sums a gate, then the cell's own arithmetic a unit."""

    def flops(call: Call) -> float:
        if len(call.shape(0)) != 3 or len(call.shape(1)) != 3:
            return 0
        steps = call.shape(0)[0] * call.shape(0)[1]
        directions, rows, _ = call.shape(1)
        return steps * directions * (2 * rows + per_unit * (rows // gates))

    return flops


class _Heads(NamedTuple):
    batch: int
    heads: int
    rows: int
    columns: int
    size: int
    value_size: int


def _heads(call: Call) -> _Heads | None:
    """Sizes of an attention whose inputs start with query, key and value."""
    q, k, v = call.shape(0), call.shape(1), call.shape(2)
    count = call.attributes.get("q_num_heads") or call.attributes.get("num_heads") or 1
    if len(q) == 4 and len(k) == 4 and len(v) == 4:
        sizes = _Heads(q[0], q[1], q[2], k[2], q[3], v[3])
    elif len(q) == 3 and len(k) == 3 and len(v) == 3:
        kv = call.attributes.get("kv_num_heads") or count
        sizes = _Heads(q[0], count, q[1], k[1], q[2] // count, v[2] // max(kv, 1))
    else:
        return None
    for past in (4, 5) if call.op_type == "Attention" else (6, 3):
        shape = call.shape(past)
        if len(shape) == 4:  # cached keys stand before the new ones
            return sizes._replace(columns=sizes.columns + shape[2])
    return sizes


def macs_attention(call: Call) -> float:
    """Scores and context; a causal mask saves nothing."""
    h = _heads(call)
    if h is None:
        return 0
    return h.batch * h.heads * h.rows * h.columns * (h.size + h.value_size)


def flops_attention(call: Call) -> float:
    """Scale, then the softmax's five, a score."""
    h = _heads(call)
    return 0 if h is None else 6 * h.batch * h.heads * h.rows * h.columns


def macs_packed_attention(call: Call) -> float:
    """com.microsoft.Attention: one projection for query, key and value, then the attention."""
    if len(call.shape(0)) != 3 or len(call.shape(1)) != 2:
        return 0
    batch, rows, width = call.shape(0)
    return batch * rows * (width * call.shape(1)[1] + 2 * rows * (call.shape(1)[1] // 3))


def flops_packed_attention(call: Call) -> float:
    """Six a score, as for the others."""
    if len(call.shape(0)) != 3:
        return 0
    return 6 * call.shape(0)[0] * call.attributes.get("num_heads", 1) * call.shape(0)[1] ** 2


def einsum_sizes(
    equation: str, shapes: list[tuple[int, ...]]
) -> tuple[list[list[str]], list[str], dict[str, int]]:
    """Labels of each operand and of the result, and the size of each label."""
    equation = equation.replace(" ", "")
    left, _, right = equation.partition("->")
    terms = left.split(",")
    sizes: dict[str, int] = {}
    operands = []
    for term, shape in zip(terms, shapes, strict=True):
        before, dots, after = term.partition("...")
        inner = len(shape) - len(before) - len(after) if dots else 0
        # Ellipsis axes align at the right, as in broadcasting.
        labels = [*before, *(f"...{k}" for k in range(inner, 0, -1)), *after]
        for mark, size in zip(labels, shape, strict=True):
            sizes[mark] = max(sizes.get(mark, 1), size)
        operands.append(labels)
    dotted = sorted((m for m in sizes if m.startswith("...")), key=lambda m: -int(m[3:]))
    if "->" in equation:
        before, dots, after = right.partition("...")
        return operands, [*before, *(dotted if dots else []), *after], sizes
    letters = re.sub(r"[^a-zA-Z]", "", left)
    once = sorted(c for c in set(letters) if letters.count(c) == 1)
    return operands, [*dotted, *once], sizes


def _einsum(call: Call) -> tuple[float, float]:
    """(multiply-adds, other operations), operands contracted from left to right."""
    equation = call.attributes.get("equation", "")
    shapes = [info.shape for info in call.inputs if info is not None]
    operands, result, sizes = einsum_sizes(equation, shapes)

    def count(labels: set[str]) -> int:
        return math.prod(sizes[mark] for mark in labels)

    if len(operands) == 1:
        whole = set(operands[0])
        return 0, count(whole) if whole != set(result) else 0
    macs, other = 0, 0
    held = set(operands[0])
    for k, labels in enumerate(operands[1:], start=1):
        joint = held | set(labels)
        later = set(result).union(*operands[k + 1 :])
        held = joint & later
        if held == joint:
            other += count(joint)
        else:
            macs += count(joint)
    return macs, other


def macs_einsum(call: Call) -> float:
    """Products of labels of which some are summed away."""
    return _einsum(call)[0]


def flops_einsum(call: Call) -> float:
    """Products that keep every label, and sums within one operand."""
    return _einsum(call)[1]


def pool(call: Call) -> float:
    """One operation an element of the window."""
    return call.made * math.prod(call.ints("kernel_shape", 1, 1))


def resize(call: Call) -> float:
    """A multiply-add a tap, along the axes that change size; nearest only moves."""
    mode = call.attributes.get("mode", "nearest")
    out = call.outputs[0].shape if call.outputs[0] is not None else ()
    scaled = sum(a != b for a, b in zip(call.shape(0), out, strict=False))
    taps = {"linear": 2, "bilinear": 2, "cubic": 4}.get(mode, 0)
    return 2 * call.made * taps**scaled if taps else 0


def grid_sample(call: Call) -> float:
    """A multiply-add a tap; nearest only moves."""
    mode = call.attributes.get("mode", "linear")
    rank = max(len(call.shape(0)) - 2, 1)
    taps = {"nearest": 0, "bicubic": 4, "cubic": 4}.get(mode, 2)
    return 2 * call.made * taps**rank if taps else 0


def roi_align(call: Call) -> float:
    """Four taps a sample."""
    ratio = max(call.attributes.get("sampling_ratio", 0), 1)
    return call.made * ratio * ratio * 8


def sort(call: Call) -> float:
    """A heap of k: log2 k comparisons an element."""
    axis = call.attributes.get("axis", -1)
    out = call.outputs[0].shape if call.outputs[0] is not None else ()
    return call.read * max(1, math.ceil(math.log2(max(out[axis] if out else 1, 2))))


def fourier(call: Call) -> float:
    """The usual 5 n log2 n."""
    return 5 * call.made * max(1, math.ceil(math.log2(max(call.made, 2))))


def overlap(call: Call) -> float:
    """Every box against every other of its class, about ten operations a pair."""
    boxes = call.shape(0)[1] if len(call.shape(0)) > 1 else 0
    return 10 * math.prod(call.shape(1)[:2]) * boxes * boxes if call.shape(1) else 0


def lrn(call: Call) -> float:
    """Squares and sums over the window; scale, shift, power and quotient."""
    return call.made * (2 * call.attributes.get("size", 1) + 4)


def layernorm(call: Call) -> float:
    """Mean, difference, square, mean, quotient, scale and, if given, shift."""
    return call.made * (7 if _given(call, 2) else 6)


def gelu(call: Call) -> float:
    """By the error function, or the longer form with tanh."""
    return call.made * (8 if call.attributes.get("approximate") == "tanh" else 5)


def clip(call: Call) -> float:
    """One comparison a limit."""
    a = call.attributes
    low, high = "min" in a or _given(call, 1), "max" in a or _given(call, 2)
    return call.made * max(low + high, 1)


def many(call: Call) -> float:
    """Sum, Max, Min, Mean of n tensors."""
    return call.made * max(len(call.inputs) - (call.op_type != "Mean"), 1)


def scatter(call: Call) -> float:
    """One operation an update, if updates are reduced and not just written."""
    plain = call.attributes.get("reduction", "none") == "none"
    return 0 if plain else math.prod(call.shape(2))


def each_made(count: float) -> Callable[[Call], float]:
    """So many operations an element of the first output."""
    return lambda call: count * call.made


def each_read(count: float) -> Callable[[Call], float]:
    """So many operations an element of the first input."""
    return lambda call: count * call.read


def none(call: Call) -> float:
    """Moves data only."""
    return 0
