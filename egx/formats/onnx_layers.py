"""Ops joined to layers: what a compiler runs as one kernel, as EGRL counts nodes.

1. Pure views (reshape, flatten, squeeze, a transposition of unit axes) vanish into the tensor
   that they show. DequantizeLinear does too, and QuantizeLinear on an input of the graph: their
   neighbours work on the quantised tensor; their cost goes to the first reader.
2. Each contraction takes in what follows: element-wise ops (bias, activation, residual add, ...)
   and normalisations, one at a time or, where a tensor forks (x * sigmoid(x), GELU, a
   normalisation in primitive ops), the smallest set that joins again in one tensor of the same
   number of elements. It takes in nothing unless all readers of its output are taken in, and
   stops at outputs of the graph. Contractions choose from last to first, so that an add of two
   branches joins the later one if only the add reads it, and else the earlier.
3. A normalisation without a contraction before it heads a layer of its own, also when it is
   spelled out in primitive ops (mean, difference, ...), and takes in by the same rule.
4. QuantizeLinear joins whatever made its input, if nothing else reads that.

Only the last op of a layer has outside readers, so the order of last ops is a valid order.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Callable, Iterable

NORMALISATIONS = {
    "BatchNormalization",
    "LayerNormalization",
    "InstanceNormalization",
    "GroupNormalization",
    "RMSNormalization",
    "MeanVarianceNormalization",
    "SimplifiedLayerNormalization",
    "SkipLayerNormalization",
    "SkipSimplifiedLayerNormalization",
    "LpNormalization",
    "LRN",
}
# Parts of a normalisation that is spelled out.
_MOMENTS = {"ReduceMean", "ReduceSum", "ReduceL2", "ReduceSumSquare"}
_RESAMPLING = {"Resize", "GridSample", "AffineGrid", "Range"}
MOST_OPS = 32


@dataclasses.dataclass(frozen=True)
class ImportedOp:
    """A node (or a layer of several) by the names of the tensors it reads and writes.

    `view` says what a layer-wise import may see through: "view", "quantize", "dequantize", None.
    """

    name: str
    index: int
    kind: str
    op_type: str
    flops: float
    macs: float
    weight_bytes: int
    reads: list[str]
    writes: list[str]
    geometry: dict[str, float]
    view: str | None
    onnx_type: str


def fuse(
    ops: list[ImportedOp], outputs: Iterable[str], elements: Callable[[str], int]
) -> tuple[list[ImportedOp], list[str]]:
    """Layers in a topological order, and the graph outputs by the names that are left.

    Args:
        ops: in a topological order, none dead.
        outputs: names of tensors that ops make.
        elements: number of elements of a tensor by name.
    """
    ops, outputs = _see_through(ops, list(outputs))
    layers = _Layers(ops, outputs, elements)
    layers.group()
    return layers.merged(), outputs


def _see_through(ops: list[ImportedOp], outputs: list[str]) -> tuple[list[ImportedOp], list[str]]:
    shown = set(outputs)  # outputs, and what they are views of
    for op in reversed(ops):
        if op.view == "view" and op.writes[0] in shown:
            shown.update(op.reads)
    root: dict[str, str | None] = {}
    owed: dict[str, tuple[float, int]] = {}  # cost that waits for its first reader
    kept = []
    for op in ops:
        debts = [owed.pop(name) for name in dict.fromkeys(op.reads) if name in owed]
        reads = [r for r in (root.get(name, name) for name in op.reads) if r is not None]
        flops = op.flops + sum(debt[0] for debt in debts)
        weight_bytes = op.weight_bytes + sum(debt[1] for debt in debts)
        made = op.writes[0]
        hidden = op.view == "view"
        if op.view == "dequantize" or (op.view == "quantize" and not reads):
            hidden = made not in shown
        if hidden:
            root[made] = reads[0] if reads else None
            if flops or weight_bytes:
                owed[made] = (flops, weight_bytes)
            continue
        kept.append(dataclasses.replace(op, reads=reads, flops=flops, weight_bytes=weight_bytes))
    resolved = [root.get(name, name) for name in outputs]
    return kept, list(dict.fromkeys(name for name in resolved if name is not None))


class _Layers:
    """Assigns each op to a layer; a layer is the list of its ops in order, head first."""

    def __init__(self, ops: list[ImportedOp], outputs: list[str], elements: Callable[[str], int]):
        self.ops = ops
        self.outputs = set(outputs)
        self.elements = elements
        self.layer_of: list[int | None] = [None] * len(ops)
        self.layers: dict[int, list[int]] = {}
        self.composite: dict[int, str] = {}
        self.readers: dict[str, list[int]] = {}
        self.maker: dict[str, int] = {}
        for index, op in enumerate(ops):
            for name in dict.fromkeys(op.reads):
                self.readers.setdefault(name, []).append(index)
            self.maker.update(dict.fromkeys(op.writes, index))

    def group(self) -> None:
        """Runs the rules in the order of the module's docstring."""
        for index in reversed(range(len(self.ops))):
            if self.ops[index].kind == "contraction":
                self._claim(index, [index])
                self._grow(index)
        for index, op in enumerate(self.ops):
            if op.onnx_type in _MOMENTS and self.layer_of[index] is None:
                self._spelled_out(index)
        for index in reversed(range(len(self.ops))):
            if self.ops[index].onnx_type in NORMALISATIONS and self.layer_of[index] is None:
                self._claim(index, [index])
                self._grow(index)
        for index, op in enumerate(self.ops):
            if self.layer_of[index] is None:
                source = self.maker.get(op.reads[0]) if op.view == "quantize" else None
                if source is None or not self._only_read_by(source, index):
                    self._claim(index, [index])
                else:
                    layer = self.layer_of[source]
                    assert layer is not None
                    self._claim(layer, [index])

    def _claim(self, layer: int, members: list[int]) -> None:
        self.layers.setdefault(layer, []).extend(members)
        for index in members:
            self.layer_of[index] = layer

    def _live(self, index: int) -> list[str]:
        """The outputs of an op that anyone wants."""
        return [n for n in self.ops[index].writes if n in self.readers or n in self.outputs]

    def _only_read_by(self, source: int, reader: int) -> bool:
        live = self._live(source)
        layer = self.layer_of[source]
        return (
            layer is not None
            and self.layers[layer][-1] == source
            and len(live) == 1
            and live[0] not in self.outputs
            and self.readers[live[0]] == [reader]
        )

    def _grow(self, layer: int) -> None:
        """Takes in what follows the layer's last op, as long as something can be."""
        while True:
            live = self._live(self.layers[layer][-1])
            more = self._closed(live[0]) if len(live) == 1 else None
            if not more:
                return
            self._claim(layer, more)

    def _absorbable(self, index: int) -> bool:
        op = self.ops[index]
        if self.layer_of[index] is not None or len(self._live(index)) != 1:
            return False
        if op.onnx_type in NORMALISATIONS or op.onnx_type in _MOMENTS or op.onnx_type == "Expand":
            return True
        return op.kind == "elementwise" and op.onnx_type not in _RESAMPLING

    def _closed(self, tensor: str) -> list[int] | None:
        """The smallest set of ops that takes in all readers of `tensor` and leaves one tensor of
        its number of elements; None if there is none."""
        readers = self.readers.get(tensor, [])
        if tensor in self.outputs or not readers or len(readers) > MOST_OPS:
            return None

        return self._region(readers, tensor)

    def _region(self, start: list[int], tensor: str, spelled: bool = False) -> list[int] | None:
        """Grows from `start` in the order of the ops until all has joined in one tensor."""
        heap = sorted(start)
        waiting = set(heap)
        members: list[int] = []
        while heap:
            index = heapq.heappop(heap)
            waiting.discard(index)
            if not self._absorbable(index) or len(members) == MOST_OPS:
                return None
            members.append(index)
            (made,) = self._live(index)
            same = self.elements(made) == self.elements(tensor)
            if not waiting and same and self._joins(start, members, tensor, spelled):
                return members
            if made in self.outputs:
                return None
            for reader in self.readers[made]:
                if reader not in waiting:
                    waiting.add(reader)
                    heapq.heappush(heap, reader)
        return None

    def _joins(self, start: list[int], members: list[int], tensor: str, spelled: bool) -> bool:
        """Whether what was reduced is put back onto the tensor itself."""
        if spelled:
            return members[-1] != start[0] and tensor in self.ops[members[-1]].reads
        return len(start) > 1 or self.ops[members[0]].onnx_type not in _MOMENTS

    def _spelled_out(self, index: int) -> None:
        """A layer for a normalisation in primitive ops whose first reduction is `index`."""
        if not self.ops[index].reads or not self._absorbable(index):
            return
        source = self.ops[index].reads[0]
        start = [index]
        before = self.maker.get(source)
        if before is not None and self._absorbable(before):
            inputs = set(self.ops[before].reads)
            # A square or a magnitude on the way to the reduction.
            if self.readers[source] == [index] and len(inputs) == 1 and source not in self.outputs:
                start = [before, index]
                (source,) = inputs
        members = self._region(start, source, spelled=True)
        if members is None:
            return
        self._claim(members[0], members)
        self._grow(members[0])
        moments = sum(self.ops[k].onnx_type in _MOMENTS for k in self.layers[members[0]])
        self.composite[members[0]] = "layernorm" if moments > 1 else "rmsnorm"

    def merged(self) -> list[ImportedOp]:
        """One op a layer, in the order of their last ops."""
        return [
            self._merge(members, self.composite.get(head))
            for head, members in sorted(self.layers.items(), key=lambda item: item[1][-1])
        ]

    def _merge(self, members: list[int], composite: str | None) -> ImportedOp:
        ops = [self.ops[index] for index in members]
        head = ops[0]
        if len(ops) == 1:
            return head
        inner = {name for op in ops for name in op.writes}
        reads = [] if composite else list(head.reads)
        seen = set(reads)
        for op in ops:
            for name in op.reads:
                if name not in inner and name not in seen:
                    seen.add(name)
                    reads.append(name)
        return dataclasses.replace(
            head,
            kind="reduction" if composite else head.kind,
            op_type=composite or head.op_type,
            flops=sum(op.flops for op in ops),
            macs=sum(op.macs for op in ops),
            weight_bytes=sum(op.weight_bytes for op in ops),
            reads=reads,
            writes=self._live(members[-1]),
        )
