"""What the bodies of If, Loop and Scan cost: once, times the trips that are known."""

from __future__ import annotations

from collections import ChainMap, Counter
from collections.abc import MutableMapping
from typing import NamedTuple

import onnx

from egx.formats.onnx_contrib import equivalent
from egx.formats.onnx_flops import call_of
from egx.formats.onnx_ops import CONTROL_FLOW, cost, rule
from egx.formats.onnx_read import subgraphs
from egx.formats.onnx_shapes import Tensors
from egx.formats.onnx_types import STANDARD, TensorInfo, known_info, size_bytes


class BodyCost(NamedTuple):
    """Operations over all trips, the bytes of the bodies' own constants, unknown op types."""

    flops: float
    macs: float
    weight_bytes: int
    unknown: Counter[str]


def body_cost(node: onnx.NodeProto, tensors: Tensors) -> BodyCost:
    """The cost of a node's bodies; of the branches of an If, the dearer (or the known) one.

    Ops whose shapes are not known inside a body count no operations.
    """
    bodies = list(subgraphs(node))
    if node.op_type == "If" and node.input[0] in tensors.constant:
        taken = tensors.value(node.input[0])
        if taken is not None:
            wanted = "then_branch" if taken.any() else "else_branch"
            bodies = [a.g for a in node.attribute if a.name == wanted]
    costs = [_graph(body, ChainMap({}, tensors.info)) for body in bodies]
    if not costs:
        return BodyCost(0, 0, 0, Counter())
    trips = _trips(node, tensors)
    unknown: Counter[str] = Counter()
    for body in costs:
        unknown.update(body.unknown)
    return BodyCost(
        trips * max(body.flops for body in costs),
        trips * max(body.macs for body in costs),
        sum(body.weight_bytes for body in costs),
        unknown,
    )


def _trips(node: onnx.NodeProto, tensors: Tensors) -> int:
    """How often the body runs, 1 where the graph does not say."""
    if node.op_type == "Loop" and node.input[0] in tensors.constant:
        count = tensors.value(node.input[0])
        return 1 if count is None else max(int(count.reshape(-1)[0]), 0)
    if node.op_type == "Scan":
        attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        scanned = attributes["num_scan_inputs"]
        shape = tensors.info[node.input[-scanned]].shape
        axis = (attributes.get("scan_input_axes") or [0])[0]
        if tensors.version < 9:  # the first version had a batch axis before the scanned one
            return shape[0] * shape[1] if len(shape) > 1 else 1
        return shape[axis] if shape else 1
    return 1


def _graph(body: onnx.GraphProto, info: MutableMapping[str, TensorInfo]) -> BodyCost:
    weights = 0
    for tensor in body.initializer:
        shape = tuple(tensor.dims)
        stored = size_bytes(shape, tensor.data_type)
        info[tensor.name] = TensorInfo(shape, tensor.data_type, stored)
        weights += stored
    for value in (*body.input, *body.value_info, *body.output):
        known = known_info(value.type)
        if known is not None:
            info[value.name] = known
    flops: float = 0
    macs: float = 0
    unknown: Counter[str] = Counter()
    for node in body.node:
        if node.op_type == "Constant":
            made = info.get(node.output[0])
            weights += 0 if made is None else made.bytes
            continue
        inner = [_graph(g, ChainMap({}, info)) for g in subgraphs(node)]
        if inner:
            flops += max(cost.flops for cost in inner)
            macs += max(cost.macs for cost in inner)
            weights += sum(cost.weight_bytes for cost in inner)
            for each in inner:
                unknown.update(each.unknown)
        found = rule(node)
        if found is None:
            if node.op_type not in CONTROL_FLOW or node.domain not in STANDARD:
                unknown[node.op_type] += 1
        elif all(name in info for name in (*node.input, *node.output) if name):
            price = cost(found, call_of(node, equivalent(node), info))
            flops += price.flops
            macs += price.macs
    return BodyCost(flops, macs, weights, unknown)
