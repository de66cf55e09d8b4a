"""Recurrent networks, unrolled over their steps: RNNLM and GNMT.

An LSTM step is 13 ops: concatenation of input and state, matmul, bias, split into four gates,
three sigmoids and a tanh, and c = f c + i j, h = o tanh(c) in five. All steps of a layer read the
same weights (Hochreiter and Schmidhuber 1997, gates as in Zaremba et al. 2014; no peepholes).

RNNLM: Zaremba, Sutskever and Vinyals, "Recurrent Neural Network Regularization", 2014 (arXiv
1409.2329), its "large" network: 2 layers of 1500 units, 35 steps, a vocabulary of 10,000, 66 M
parameters. Dropout is left out. Published are batches of 20; our default of 64 is a choice.

GNMT: Wu et al., "Google's Neural Machine Translation System", 2016 (arXiv 1609.08144): layers of
1024 units, the first of the encoder in both directions, residual connections from the third layer
on, additive attention with one hidden layer that is asked by the bottom layer of the decoder as of
the step before, its context read by all layers of the decoder; vocabularies of 32,000 word pieces.
Published are 8 layers and batches of 128. Our choices: batches of 64, 24 words in and out
(`steps`), and an output layer without bias.

Layers, as a person would place them: the layers of the stack, the embedding with the first, the
attention with the bottom one of the decoder, the softmax with the last.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from egx.graph.graph import Model
from egx.zoo.common import check_positive
from egx.zoo.layers import Layers
from egx.zoo.registry import register
from egx.zoo.training import Value


class _Cell(NamedTuple):
    """The parameters of an LSTM layer and its state before the first step."""

    name: str
    hidden: int
    weights: Value
    shift: Value
    c: Value
    h: Value


def _cell(net: Layers, name: str, fan_in: int, hidden: int) -> _Cell:
    return _Cell(
        name,
        hidden,
        net.parameter(f"{name}/weights", (fan_in + hidden) * 4 * hidden),
        net.parameter(f"{name}/shift", 4 * hidden, vector=True),
        net.source(f"{name}/state_c", (1, 1, hidden), op_type="state"),
        net.source(f"{name}/state_h", (1, 1, hidden), op_type="state"),
    )


def _lstm(net: Layers, cell: _Cell, step: str, inputs: Sequence[Value]) -> tuple[_Cell, Value]:
    """One step: (the layer with its new state, the output)."""
    name = f"{cell.name}/{step}"
    x = net.concat(f"{name}/concat", [*inputs, cell.h])
    y = net.dense(f"{name}/matmul", x, cell.weights, 4 * cell.hidden)
    y = net.bias(f"{name}/bias", y, cell.shift)
    gate_i, gate_j, gate_f, gate_o = net.split(f"{name}/gates", y, 4)
    new = net.multiply(
        f"{name}/input",
        net.activate(f"{name}/sigmoid_i", "sigmoid", gate_i),
        net.activate(f"{name}/tanh_j", "tanh", gate_j),
    )
    old = net.multiply(
        f"{name}/forget", net.activate(f"{name}/sigmoid_f", "sigmoid", gate_f), cell.c
    )
    c = net.add(f"{name}/c", old, new)
    h = net.multiply(
        f"{name}/h",
        net.activate(f"{name}/sigmoid_o", "sigmoid", gate_o),
        net.activate(f"{name}/tanh_c", "tanh", c),
    )
    return cell._replace(c=c, h=h), h


def _unrolled(net: Layers, name: str, inputs: Sequence[Value], hidden: int) -> list[Value]:
    """A layer over all its inputs, one a step, in their order."""
    cell = _cell(net, name, inputs[0].shape[2], hidden)
    outputs = []
    for k, x in enumerate(inputs):
        cell, h = _lstm(net, cell, f"step{k}", [x])
        outputs.append(h)
    return outputs


def _embedded(
    net: Layers, name: str, vocabulary: int, steps: int, features: int
) -> tuple[Value, ...]:
    """The rows of an embedding of its own, one a step."""
    table = net.parameter(f"{name}/table", vocabulary * features)
    rows = net.embedding(f"{name}/lookup", table, steps, features)
    return net.split(f"{name}/steps", rows, steps, axis=0)


@register
def rnnlm(
    layers: int = 2,
    steps: int = 35,
    hidden: int = 1500,
    vocabulary: int = 10000,
    batch: int = 64,
    precision: str = "fp32",
    training: bool = True,
    optimizer: str = "sgd",
) -> Model:
    """A language model of LSTM layers: 66.0 M parameters by default.

    Trained by gradient descent without momentum, as published.
    """
    sizes = {"layers": layers, "steps": steps, "hidden": hidden, "vocabulary": vocabulary}
    check_positive("rnnlm", **sizes)
    net = Layers("rnnlm", batch=batch, precision=precision, training=training, optimizer=optimizer)
    xs: Sequence[Value] = _embedded(net, "layer0/embedding", vocabulary, steps, hidden)
    for k in range(layers):
        xs = _unrolled(net, f"layer{k}", xs, hidden)
    top = f"layer{layers - 1}"
    x = net.concat(f"{top}/outputs", xs, axis=0)
    net.finish(top, net.linear(f"{top}/softmax", x, vocabulary))
    return net.build(sizes)


def _encoder(net: Layers, xs: Sequence[Value], layers: int, hidden: int) -> list[Value]:
    """The outputs of the topmost layer of the encoder, one a step."""
    ahead = _unrolled(net, "encoder0/ahead", xs, hidden)
    back = _unrolled(net, "encoder0/back", xs[::-1], hidden)[::-1]
    outputs = [
        net.concat(f"encoder0/both{k}", pair)
        for k, pair in enumerate(zip(ahead, back, strict=True))
    ]
    for layer in range(1, layers):
        inputs, outputs = outputs, _unrolled(net, f"encoder{layer}", outputs, hidden)
        if layer >= 2:
            outputs = [
                net.add(f"encoder{layer}/step{k}/residual", *pair)
                for k, pair in enumerate(zip(outputs, inputs, strict=True))
            ]
    return outputs


class _Attention:
    """Additive attention over the outputs of the encoder (Bahdanau et al. 2015)."""

    def __init__(self, net: Layers, name: str, outputs: Sequence[Value], hidden: int):
        self.net, self.name, self.hidden = net, name, hidden
        self.memory = net.concat(f"{name}/memory", outputs, axis=0)
        self.steps, _, features = self.memory.shape
        by_key = net.parameter(f"{name}/keys.weights", features * hidden)
        self.keys = net.dense(f"{name}/keys", self.memory, by_key, hidden)
        self.by_query = net.parameter(f"{name}/query.weights", hidden * hidden)
        self.by_score = net.parameter(f"{name}/score.weights", hidden)

    def context(self, step: str, query: Value) -> Value:
        """What the decoder reads at a step: the encoder's outputs by weight."""
        net, name = self.net, f"{self.name}/{step}"
        asked = net.dense(f"{name}/query", query, self.by_query, self.hidden)
        y = net.add(f"{name}/sum", self.keys, asked)
        y = net.activate(f"{name}/tanh", "tanh", y)
        y = net.dense(f"{name}/score", y, self.by_score, 1)
        weights = net.softmax(f"{name}/softmax", y)
        shape = (1, 1, self.memory.shape[2])
        return net.contract(
            f"{name}/context", weights, self.memory, shape, 2 * self.memory.elements
        )


@register
def gnmt(
    layers: int = 2,
    steps: int = 24,
    hidden: int = 1024,
    vocabulary: int = 32000,
    batch: int = 64,
    precision: str = "fp32",
    training: bool = True,
    optimizer: str = "adam",
) -> Model:
    """A translator of `layers` LSTM layers in the encoder and as many in the decoder.

    `steps` words in and out. Published training begins with Adam and goes on without state.
    """
    sizes = {"layers": layers, "steps": steps, "hidden": hidden, "vocabulary": vocabulary}
    check_positive("gnmt", **sizes)
    net = Layers("gnmt", batch=batch, precision=precision, training=training, optimizer=optimizer)
    words = _embedded(net, "encoder0/embedding", vocabulary, steps, hidden)
    encoded = _encoder(net, words, layers, hidden)
    words = _embedded(net, "decoder0/embedding", vocabulary, steps, hidden)
    attention = _Attention(net, "decoder0/attention", encoded, hidden)
    features = encoded[0].shape[2]
    cells = [_cell(net, f"decoder{k}", hidden + features, hidden) for k in range(layers)]
    outputs = []
    for k, word in enumerate(words):
        step = f"step{k}"
        context = attention.context(step, cells[0].h)
        x = word
        for layer, cell in enumerate(cells):
            cells[layer], h = _lstm(net, cell, step, [x, context])
            x = net.add(f"decoder{layer}/{step}/residual", h, x) if layer >= 2 else h
        outputs.append(x)
    top = f"decoder{layers - 1}"
    x = net.concat(f"{top}/outputs", outputs, axis=0)
    net.finish(top, net.linear(f"{top}/softmax", x, vocabulary, bias=False))
    return net.build(sizes)
