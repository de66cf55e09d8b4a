"""Transformer-XL: attention over a segment and the one before it, by relative positions.

Dai et al., "Transformer-XL: Attentive Language Models Beyond a Fixed-Length Context", ACL 2019
(arXiv 1901.02860), with the published settings for enwik8: width 512, 8 heads, inner width 2048,
segments and memories of 512 characters, batches of 22, 204 characters (those of the authors' data
preparation), Adam. Published are 12 layers, 41 M parameters. Dropout is left out.

A layer reads its hidden states of the segment before (its memory: an input of the graph, without
gradient) and hands out those of this one (an output). Scores are q k for content, with a learned
bias u, and q r for position, with a bias v, each row shifted to its own origin; the biases belong
to all layers, as do the sinusoids r, which every layer projects by itself. The embedding and the
output layer share their table. Only positions of this segment ask: the projection of the memory to
queries, which the authors' code makes and throws away, is left out.

Layers, as a person would place them: those of the stack, the embedding with the first, the output
layer with the last.
"""

from __future__ import annotations

from typing import NamedTuple

from egx.errors import GraphError
from egx.graph.graph import Model
from egx.zoo.common import check_positive
from egx.zoo.layers import Layers
from egx.zoo.registry import register
from egx.zoo.training import Value


class _Shared(NamedTuple):
    """What all layers read: the sinusoids of relative positions and the two biases."""

    positions: Value
    content_bias: Value
    position_bias: Value


def _attention(net: Layers, name: str, h: Value, shared: _Shared, heads: int, memory: int) -> Value:
    """Attention up to and with its residual addition."""
    rows, _, width = h.shape
    keys, size = rows + memory, width // heads
    past = net.source(f"{name}/memory", (memory, 1, width), op_type="state")
    both = net.concat(f"{name}/concat", [past, h], axis=0)
    query = net.linear(f"{name}/query", h, width, bias=False)
    key_value = net.linear(f"{name}/key_value", both, 2 * width, bias=False)
    key, value = net.split(f"{name}/key_value.split", key_value, 2)
    place = net.linear(f"{name}/position", shared.positions, width, bias=False)
    by_content = net.add(f"{name}/content_bias", query, shared.content_bias)
    by_place = net.add(f"{name}/position_bias", query, shared.position_bias)
    square, flops = (rows, keys, heads), 2 * net.batch * rows * keys * width
    content = net.contract(f"{name}/content", by_content, key, square, flops)
    position = net.contract(f"{name}/place", by_place, place, square, flops)
    position = net.rearrange(f"{name}/shift", position, square, "relative_shift")
    y = net.add(f"{name}/scores", content, position)
    y = net.scale(f"{name}/scale", y)
    y = net.scale(f"{name}/mask", y, "mask")
    y = net.softmax(f"{name}/softmax", y)
    y = net.contract(f"{name}/context", y, value, (rows, heads, size), flops)
    y = net.rearrange(f"{name}/merge", y, (rows, 1, width))
    y = net.linear(f"{name}/output", y, width, bias=False)
    return net.add(f"{name}/residual", y, h)


def _feed_forward(net: Layers, name: str, x: Value, inner: int) -> Value:
    y = net.linear(f"{name}/up", x, inner)
    y = net.activate(f"{name}/relu", "relu", y)
    y = net.linear(f"{name}/down", y, x.shape[2])
    return net.add(f"{name}/residual", y, x)


@register
def transformer_xl(
    layers: int = 2,
    hidden: int = 512,
    heads: int = 8,
    intermediate: int = 2048,
    vocabulary: int = 204,
    sequence: int = 512,
    memory: int = 512,
    batch: int = 22,
    precision: str = "fp32",
    training: bool = True,
    optimizer: str = "adam",
) -> Model:
    """Transformer-XL on a segment of `sequence` positions and `memory` positions before it."""
    sizes = {
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "intermediate": intermediate,
        "vocabulary": vocabulary,
        "sequence": sequence,
        "memory": memory,
    }
    check_positive("transformer_xl", **sizes)
    if hidden % heads:
        raise GraphError(f"transformer_xl: hidden {hidden} is not a multiple of heads {heads}")
    net = Layers(
        "transformer_xl", batch=batch, precision=precision, training=training, optimizer=optimizer
    )
    table = net.parameter("layer0/embedding/table", vocabulary * hidden)
    x = net.embedding("layer0/embedding/lookup", table, sequence, hidden)
    x = net.scale("layer0/embedding/scale", x)
    shared = _Shared(
        # The same for every sample.
        net.source("layer0/positions", (sequence + memory, 1, hidden), samples=1),
        net.parameter("layer0/content_bias", hidden, vector=True),
        net.parameter("layer0/position_bias", hidden, vector=True),
    )
    for k in range(layers):
        net.output(x)  # the memory of the next segment
        y = _attention(net, f"layer{k}/attention", x, shared, heads, memory)
        y = net.layer_norm(f"layer{k}/attention/norm", y)
        y = _feed_forward(net, f"layer{k}/ffn", y, intermediate)
        x = net.layer_norm(f"layer{k}/ffn/norm", y)
    top = f"layer{layers - 1}/softmax"
    logits = net.dense(f"{top}/matmul", x, table, vocabulary)
    shift = net.parameter(f"{top}/shift", vocabulary, vector=True)
    net.finish(f"layer{layers - 1}", net.bias(f"{top}/bias", logits, shift))
    return net.build(sizes)
