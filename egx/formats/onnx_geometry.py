"""The geometry of an ONNX op: its sizes as `egx.graph.GEOMETRY` names them.

One sample's tensor is (x, y, z), as in the zoo. Images [N, C, ..., H, W]: x = W, y = H (times
depth), z = C. Sequences [N, S, F]: x = S, y = 1, z = F. Matrices [N, F]: x = y = 1, z = F. In
matrix products, einsums and attention [N, heads, S, d]: x = S, y = d, z = heads. Of unequal
strides, pads or dilations the largest stands for all; an automatic pad is the one of equal size.
"""

from __future__ import annotations

import math

from egx.formats.onnx_flops import Call

# Ops whose rank-3 tensors are [N, C, L]: their second axis is always channels.
_CHANNELS_SECOND = {
    "Conv",
    "ConvTranspose",
    "DeformConv",
    "CausalConvWithState",
    "MaxPool",
    "AveragePool",
    "LpPool",
    "GlobalMaxPool",
    "GlobalAveragePool",
    "GlobalLpPool",
    "BatchNormalization",
    "InstanceNormalization",
    "GroupNormalization",
    "LRN",
}
_ROWS_AND_COLUMNS = {"MatMul", "FusedMatMul", "Einsum", "Attention", "MultiHeadAttention"}
_WINDOWS = {"Conv", "ConvTranspose", "DeformConv", "MaxPool", "AveragePool", "LpPool"}
_GLOBAL = {"GlobalMaxPool", "GlobalAveragePool", "GlobalLpPool"}


def sizes(shape: tuple[int, ...], op_type: str) -> tuple[int, int, int, int]:
    """(batch, x, y, z) of a tensor."""
    rank = len(shape)
    if rank == 0:
        return 1, 1, 1, 1
    if rank == 1:
        return 1, 1, 1, shape[0]
    if rank == 2:
        return shape[0], 1, 1, shape[1]
    if op_type in _ROWS_AND_COLUMNS and rank > 3:
        return shape[0], shape[-2], shape[-1], math.prod(shape[1:-2])
    if rank == 3 and op_type not in _CHANNELS_SECOND:
        return shape[0], shape[1], 1, shape[2]
    return shape[0], shape[-1], math.prod(shape[2:-1]), shape[1]


def geometry(call: Call, data: int, name: str) -> dict[str, float]:
    """Attributes for the builder; `data` is the position of the main input, -1 for none."""
    found: dict[str, float] = {"groups": float(call.attributes.get("group", 1))}
    source = call.shape(data) if data >= 0 else ()
    out = next((info.shape for info in call.outputs if info is not None), ())
    batch, x, y, z = sizes(source, call.op_type)
    if name == "embedding":  # indices, not features
        batch, x, y, z = (*source[:1], math.prod(source[1:]), 1, 1) if source else (1, 1, 1, 1)
    found.update(input_x=x, input_y=y, input_z=z, batch=batch)
    _, x, y, z = sizes(out, call.op_type)
    found.update(output_x=x, output_y=y, output_z=z)
    if call.op_type in _WINDOWS:
        found.update(_window(call))
    elif call.op_type in _GLOBAL or name == "averagepool":
        kernel = source[2:]
        found.update(kernel_x=kernel[-1] if kernel else 1, kernel_y=math.prod(kernel[:-1]))
        found.update(stride=1, dilation=1)
    return {key: float(value) for key, value in found.items()}


def _window(call: Call) -> dict[str, float]:
    rank = max(len(call.shape(0)) - 2, 1)
    kernel = list(call.attributes.get("kernel_shape") or call.shape(1)[2:]) or [1]
    strides = call.ints("strides", rank, 1)
    dilations = call.ints("dilations", rank, 1)
    pads = call.ints("pads", 2 * rank, 0)
    pad = max(pads)
    if call.attributes.get("auto_pad", "").startswith("SAME"):
        pad = max(d * (k - 1) // 2 for d, k in zip(dilations, kernel, strict=False))
    return {
        "kernel_x": kernel[-1],
        "kernel_y": math.prod(kernel[:-1]),
        "stride": max(strides),
        "pad": max(pad, 0),
        "dilation": max(dilations),
    }
