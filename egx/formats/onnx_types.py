"""Sizes of ONNX element types, and what is known of a tensor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import onnx
from onnx import TensorProto as T

STANDARD = ("", "ai.onnx")
MICROSOFT = "com.microsoft"

BITS: dict[int, int] = {
    **dict.fromkeys((T.UINT4, T.INT4), 4),
    **dict.fromkeys((T.BOOL, T.UINT8, T.INT8), 8),
    **dict.fromkeys((T.FLOAT8E4M3FN, T.FLOAT8E4M3FNUZ, T.FLOAT8E5M2, T.FLOAT8E5M2FNUZ), 8),
    **dict.fromkeys((T.FLOAT16, T.BFLOAT16, T.UINT16, T.INT16), 16),
    **dict.fromkeys((T.FLOAT, T.UINT32, T.INT32), 32),
    **dict.fromkeys((T.DOUBLE, T.UINT64, T.INT64, T.COMPLEX64), 64),
    T.COMPLEX128: 128,
    # A string counts as a pointer: its characters are not known to the graph.
    T.STRING: 64,
}
# Narrow types that older releases of onnx lack, by the width in their names.
_NARROW = {"FLOAT4": 4, "FLOAT6": 6, "FLOAT8": 8, "UINT2": 2, "INT2": 2}
for _name, _number in T.DataType.items():
    for _prefix, _bits in _NARROW.items():
        if _name == _prefix or (_name.startswith(_prefix + "E") and _prefix.startswith("FLOAT")):
            BITS.setdefault(_number, _bits)


class TensorInfo(NamedTuple):
    """A tensor's shape, ONNX element type and bytes."""

    shape: tuple[int, ...]
    dtype: int
    bytes: int

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


def size_bytes(shape: Sequence[int], dtype: int) -> int:
    """Bytes of a dense tensor; elements narrower than a byte are packed."""
    return -(-math.prod(shape) * BITS.get(dtype, 32) // 8)


def known_info(kind: onnx.TypeProto) -> TensorInfo | None:
    """The info of a tensor type whose element type and sizes are all known, else None."""
    if not kind.HasField("tensor_type") or not kind.tensor_type.HasField("shape"):
        return None
    if not kind.tensor_type.elem_type:
        return None
    dims = kind.tensor_type.shape.dim
    if not all(dim.HasField("dim_value") and dim.dim_value >= 0 for dim in dims):
        return None
    shape = tuple(dim.dim_value for dim in dims)
    dtype = kind.tensor_type.elem_type
    return TensorInfo(shape, dtype, size_bytes(shape, dtype))


def type_proto(info: TensorInfo) -> onnx.TypeProto:
    """The ONNX type of a tensor."""
    return onnx.helper.make_tensor_type_proto(info.dtype, info.shape)
