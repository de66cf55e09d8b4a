"""Features of ops: the 19 of EGRL, scaled so that a policy transfers between models.

Khadka et al., "Optimizing Memory Placement using Evolutionary Graph Reinforcement Learning",
ICLR 2021, arXiv 2007.07298. Their features are raw numbers; here sizes are logarithms over a
fixed range, so that a column means the same for every model, and positions are fractions of the
real ops, so that padding changes nothing.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from egx.graph.graph import GEOMETRY, Graph

NODE_FEATURES = (
    "op_id",
    "weight_bytes",
    "input_x",
    "input_y",
    "input_z",
    "output_x",
    "output_y",
    "output_z",
    "input_bytes",
    "output_bytes",
    "ops_left",
    "weights_left",
    "groups",
    "kernel_x",
    "kernel_y",
    "stride",
    "pad",
    "dilation",
    "batch",
)

# log2(1 + value) / range is 1 at 2^range - 1: 4 GiB, 65,535 ops or positions, windows of 15.
_BYTES_RANGE = 32.0
_SIZE_RANGE = 16.0
_WINDOW_RANGE = 4.0
_RANGES = {
    **{f"{side}_{axis}": _SIZE_RANGE for side in ("input", "output") for axis in "xyz"},
    "groups": _SIZE_RANGE,
    "batch": _SIZE_RANGE,
    **{key: _WINDOW_RANGE for key in ("kernel_x", "kernel_y", "stride", "pad", "dilation")},
}


def node_features(graph: Graph) -> Float[Array, "N 19"]:
    """The columns `NODE_FEATURES` for each op, about in [0, 1]; rows of padding are 0.

    - op_id: the op's index over that of the last op, in [0, 1]; 0 in a graph of one op.
    - weight_bytes, input_bytes (once a use), output_bytes: log2(1 + bytes) / 32.
    - input_x to output_z, groups, batch: log2(1 + value) / 16.
    - kernel_x, kernel_y, stride, pad, dilation: log2(1 + value) / 4.
    - ops_left: log2(1 + ops after this one) / 16, so that a policy sees how large a graph is.
    - weights_left: the share of all weight units that belongs to the ops after this one.
    """
    index = jnp.arange(graph.num_ops, dtype=jnp.int32)
    last = jnp.sum(graph.op_mask, dtype=jnp.int32) - 1
    unit = graph.unit_bytes.astype(jnp.float32)
    weights_until = jnp.cumsum(graph.weight_units)
    weights = weights_until[-1]

    def ratio(part: Array, whole: Array) -> Array:
        return part.astype(jnp.float32) / jnp.maximum(whole, 1).astype(jnp.float32)

    def logarithm(value: Array, bits: Array | float) -> Array:
        return jnp.log2(1.0 + value) / bits

    def size(units: Array) -> Array:
        return logarithm(units.astype(jnp.float32) * unit, _BYTES_RANGE)

    ranges = jnp.asarray(np.array([_RANGES[key] for key in GEOMETRY], np.float32))
    geometry = logarithm(graph.geometry, ranges)
    columns = {key: geometry[:, k] for k, key in enumerate(GEOMETRY)}
    columns |= {
        "op_id": ratio(index, last),
        "weight_bytes": size(graph.weight_units),
        "input_bytes": size(graph.input_units()),
        "output_bytes": size(graph.output_units()),
        "ops_left": logarithm(jnp.maximum(last - index, 0).astype(jnp.float32), _SIZE_RANGE),
        "weights_left": ratio(weights - weights_until, weights),
    }
    features = jnp.stack([columns[key] for key in NODE_FEATURES], axis=1)
    return jnp.where(graph.op_mask[:, None], features, 0.0)
