"""The geometry of a JAX primitive: its sizes as `egx.graph.GEOMETRY` names them.

As for ONNX: one sample's tensor is (x, y, z), with images as [N, C, ..., H, W] (convolutions are
brought to it by their dimension numbers), sequences as [N, S, F], matrices as [N, F]. In products
of more than three axes [N, heads, S, d] x = S, y = d, z = heads.
"""

from __future__ import annotations

import math

from egx.formats.jaxpr_flops import Use
from egx.formats.onnx_geometry import sizes


def geometry(use: Use) -> dict[str, float]:
    """Attributes for the builder: of the largest operand and the first result."""
    if not use.outputs or not hasattr(use.outputs[0], "shape"):
        return {}
    if use.name == "conv_general_dilated":
        return _convolution(use)
    kind = "MatMul" if use.name == "dot_general" else ""
    found: dict[str, float] = {"groups": 1.0}
    arrays = [aval for aval in use.inputs if hasattr(aval, "shape")]
    if arrays:
        largest = max(arrays, key=lambda aval: math.prod(aval.shape))
        main = arrays[0] if use.name == "dot_general" else largest
        batch, x, y, z = sizes(tuple(main.shape), kind)
        found.update(batch=batch, input_x=x, input_y=y, input_z=z)
    _, x, y, z = sizes(tuple(use.outputs[0].shape), kind)
    found.update(output_x=x, output_y=y, output_z=z)
    if "window_dimensions" in use.params:
        found.update(_pooling(use))
    return {key: float(value) for key, value in found.items()}


def _convolution(use: Use) -> dict[str, float]:
    p, numbers = use.params, use.params["dimension_numbers"]
    lhs, rhs = use.inputs[0].shape, use.inputs[1].shape
    out = use.outputs[0].shape
    batch, x, y, z = sizes(tuple(lhs[axis] for axis in numbers.lhs_spec), "Conv")
    found: dict[str, float] = {"batch": batch, "input_x": x, "input_y": y, "input_z": z}
    _, x, y, z = sizes(tuple(out[axis] for axis in numbers.out_spec), "Conv")
    found.update(output_x=x, output_y=y, output_z=z)
    kernel = [rhs[axis] for axis in numbers.rhs_spec[2:]]
    pads = [max(pair) for pair in p["padding"]]
    found.update(
        groups=p["feature_group_count"] * p["batch_group_count"],
        kernel_x=kernel[-1] if kernel else 1,
        kernel_y=math.prod(kernel[:-1]),
        stride=max(p["window_strides"], default=1),
        pad=max([0, *pads]),
        dilation=max(p["rhs_dilation"], default=1),
    )
    return {key: float(value) for key, value in found.items()}


def _pooling(use: Use) -> dict[str, float]:
    """The axes of the window that are longer than one are those of the image."""
    window = use.params["window_dimensions"]
    kernel = [size for size in window if size > 1] or [1]
    pads = [max(pair) for pair in use.params.get("padding", ())]
    return {
        "kernel_x": kernel[-1],
        "kernel_y": math.prod(kernel[:-1]),
        "stride": max(use.params.get("window_strides", (1,))),
        "pad": max([0, *pads]),
        "dilation": max(use.params.get("window_dilation", (1,))),
    }
