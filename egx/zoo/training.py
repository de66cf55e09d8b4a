"""From a forward pass to a training step: a tape of ops that know how they are differentiated.

A builder of the zoo records forward ops on a `Tape`; `Tape.build` emits them, and for training the
backward pass and the updates after them, in the order in which an automatic differentiator that
walks the tape backwards would run them:

- Backward: each op's `Gradient` rules say which gradient ops it needs, what these cost and which
  forward tensors they read. Those tensors are kept until then. Only what leads from a parameter to
  the loss is differentiated. Gradients that meet are added up two at a time, as they come.
- Parameters: in training every one is an op of its own, without FLOPs and inputs, that hands out
  the weights to all who read them: the steps of an unrolled recurrence, the backward pass, and the
  update. So weights that many ops share count once, and a device that reads another's weights pays
  for their transfer. Such an op is opaque, so that it is never fused away. It costs a launch and
  one write of the weights, which a real machine does not: less than the update's own traffic.
  For inference the same holds for parameters with several readers; one with a single reader is the
  `weight_bytes` of that reader.
- Updates: one op a parameter, emitted when its gradient is complete. It reads gradient, weights and
  the optimizer's state (its `weight_bytes`: resident throughout), and writes both. The new weights
  are outputs of the graph, held to the end; the old ones are let go. While an update runs, old and
  new count beside each other, although frameworks work in place.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from egx.errors import GraphError
from egx.graph.builder import GraphBuilder, Tensor
from egx.graph.graph import Model
from egx.zoo.common import LAYER_SEPARATOR, check_positive, geometry, precision_widths

Shape = tuple[int, int, int]
"""(x, y, z) of one sample: two axes of positions, and channels or features."""


class Optimizer(NamedTuple):
    """What an update keeps and does for each element of a parameter.

    Operations count as in the published update rule: a square root and a quotient as one.
    """

    slots: int
    flops: int


OPTIMIZERS = {
    "sgd": Optimizer(0, 2),  # w -= rate g
    "momentum": Optimizer(1, 4),  # m = mu m + g; w -= rate m
    # v = rho v + (1 - rho) g^2; m = mu m + rate g / sqrt(v + eps); w -= m
    "rmsprop": Optimizer(2, 10),
    # m = b1 m + (1 - b1) g; v = b2 v + (1 - b2) g^2; w -= rate m / (sqrt(v) + eps)
    "adam": Optimizer(2, 12),
}
STATE_WIDTH = 4  # bytes: state is kept in 32 bits whatever the weights have


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Value:
    """A tensor on a tape: `samples` times (x, y, z) elements of `width` bytes."""

    index: int
    name: str
    shape: Shape
    samples: int
    width: int
    learned: bool  # a parameter, or made from one: it has a gradient
    is_parameter: bool = False

    @property
    def elements(self) -> int:
        return self.samples * math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.elements * self.width


@dataclasses.dataclass(frozen=True, slots=True)
class Gradient:
    """A gradient op of the backward pass.

    Args:
        of: positions of the inputs whose gradients it makes, an output for each.
        kind, op_type, flops: of the op; `kind` None hands the output's gradient on as it is.
        reads, keeps: positions of the inputs and of the outputs that it reads beside gradients.
        after: positions of the outputs whose gradients it reads; none for a loss.
        label: what its name ends in.
    """

    of: tuple[int, ...]
    kind: str | None = None
    op_type: str = ""
    flops: float = 0.0
    reads: tuple[int, ...] = ()
    keeps: tuple[int, ...] = ()
    after: tuple[int, ...] = (0,)
    label: str = "grad"


class _Record(NamedTuple):
    name: str
    kind: str
    op_type: str
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    flops: float
    window: Mapping[str, int]
    gradients: tuple[Gradient, ...]


class Tape:
    """Records a forward pass.

    Args:
        name: of the model.
        batch: samples that activations have.
        precision: widths by `PRECISIONS`; training takes floating-point ones.
        training: emit backward pass and updates.
        optimizer: one of `OPTIMIZERS`.

    Raises:
        GraphError: naming the argument and its value.
    """

    def __init__(self, name: str, *, batch: int, precision: str, training: bool, optimizer: str):
        check_positive(name, batch=batch)
        self.name = name
        self.batch = batch
        self.widths = precision_widths(name, precision)
        self.training = training
        if optimizer not in OPTIMIZERS:
            allowed = ", ".join(OPTIMIZERS)
            raise GraphError(f"{name}: optimizer {optimizer!r} is not one of {allowed}")
        if training and precision == "int8":
            raise GraphError(f"{name}: precision 'int8' cannot be trained; take fp32, fp16 or bf16")
        self.optimizer = optimizer
        self._settings = {
            "batch": batch,
            "precision": precision,
            "training": training,
            "optimizer": optimizer,
        }
        self._records: list[_Record] = []
        self._values = 0
        self._parameters: list[Value] = []
        self._outputs: list[Value] = []

    def parameter(self, name: str, elements: int, *, vector: bool = False) -> Value:
        """Weights to be learned; `vector` for biases and scales, which may be wider."""
        width = self.widths.vector if vector else self.widths.weight
        value = self._value(name, (1, 1, elements), 1, width, learned=True, is_parameter=True)
        self._parameters.append(value)
        return value

    def source(
        self, name: str, shape: Shape, *, op_type: str = "input", samples: int | None = None
    ) -> Value:
        """What comes from outside, such as an image: an op that hands it out."""
        return self.op(name, "opaque", op_type, [], [shape], samples=samples)[0]

    def op(
        self,
        name: str,
        kind: str,
        op_type: str,
        inputs: Sequence[Value],
        outputs: Sequence[Shape],
        *,
        flops: float = 0.0,
        gradients: Sequence[Gradient] = (),
        samples: int | None = None,
        width: int | None = None,
        window: Mapping[str, int] | None = None,
    ) -> tuple[Value, ...]:
        """Records an op; returns a value for each shape of `outputs`.

        Without a gradient rule for an input, nothing flows back into it through this op.
        """
        learned = any(inputs[k].learned for rule in gradients for k in rule.of)
        made = tuple(
            self._value(
                name if len(outputs) == 1 else f"{name}:{k}",
                shape,
                self.batch if samples is None else samples,
                self.widths.activation if width is None else width,
                learned=learned,
            )
            for k, shape in enumerate(outputs)
        )
        self._records.append(
            _Record(name, kind, op_type, tuple(inputs), made, flops, window or {}, tuple(gradients))
        )
        return made

    def output(self, value: Value) -> None:
        """Marks an output of the model, held to the end of the run."""
        self._outputs.append(value)

    def _value(
        self,
        name: str,
        shape: Shape,
        samples: int,
        width: int,
        *,
        learned: bool,
        is_parameter: bool = False,
    ) -> Value:
        self._values += 1
        return Value(self._values - 1, name, shape, samples, width, learned, is_parameter)

    def build(self, options: Mapping[str, Any]) -> Model:
        """The model; `options` are the builder's own arguments, for the notes.

        Raises:
            GraphError: in training, for a parameter that the loss does not depend on.
        """
        emission = _Emission(self, self._records, self._parameters)
        emission.forward()
        if self.training:
            emission.backward()
        for value in self._outputs:
            emission.builder.output(emission.handle(value))
        counted = sum(math.prod(value.shape) for value in self._parameters)
        return emission.builder.build_model(
            source=f"zoo/{self.name}",
            notes={
                "options": {**options, **self._settings},
                "parameters": counted,
                "layer_separator": LAYER_SEPARATOR,
            },
        )


class _Emission:
    """Turns the records of a tape into ops of a builder."""

    def __init__(self, tape: Tape, records: Sequence[_Record], parameters: Sequence[Value]):
        self.builder = GraphBuilder(tape.name)
        self.training = tape.training
        self.rule = OPTIMIZERS[tape.optimizer]
        self.optimizer = tape.optimizer
        self.records = records
        self.parameters = parameters
        self.handles: dict[int, Tensor] = {}
        self.gradients: dict[int, Tensor] = {}
        self.sums: dict[int, int] = {}
        self.readers: dict[int, int] = {value.index: 0 for value in parameters}
        for record in records:
            for index in {v.index for v in record.inputs if v.is_parameter}:
                self.readers[index] += 1

    def handle(self, value: Value) -> Tensor:
        """The tensor of a value; a parameter's op is emitted when it is first needed."""
        if value.index not in self.handles:
            assert value.is_parameter
            self.handles[value.index] = self.builder.op(
                value.name,
                kind="opaque",
                op_type="parameter",
                inputs=[],
                output_bytes=[value.bytes],
                flops=0.0,
                attributes=geometry((0, 0, 0), value.shape),
            )[0]
        return self.handles[value.index]

    def is_owned(self, value: Value) -> bool:
        """Whether the only reader holds the parameter itself."""
        return value.is_parameter and not self.training and self.readers[value.index] == 1

    def forward(self) -> None:
        for record in self.records:
            inputs = [self.handle(v) for v in record.inputs if not self.is_owned(v)]
            made = self.builder.op(
                record.name,
                kind=record.kind,
                op_type=record.op_type,
                inputs=inputs,
                output_bytes=[value.bytes for value in record.outputs],
                flops=record.flops,
                weight_bytes=sum(v.bytes for v in record.inputs if self.is_owned(v)),
                attributes=self.attributes(record),
            )
            for value, tensor in zip(record.outputs, made, strict=True):
                self.handles[value.index] = tensor

    def attributes(self, record: _Record, *, back: Value | None = None) -> dict[str, float]:
        """Shapes of the op, or of the gradient op that makes the gradient of `back`."""
        data = [value for value in record.inputs if not value.is_parameter]
        source = data[0].shape if data else (0, 0, 0)
        target = record.outputs[0].shape
        if back is not None:
            source, target = target, back.shape
        return geometry(source, target, batch=record.outputs[0].samples, **record.window)

    def backward(self) -> None:
        for record in reversed(self.records):
            for rule in record.gradients:
                self.differentiate(record, rule)
            for value in {v.index: v for v in record.inputs if v.is_parameter}.values():
                self.readers[value.index] -= 1
                if self.readers[value.index] == 0:
                    self.update(value)
        for value in self.parameters:
            if value.index not in self.gradients:
                raise GraphError(
                    f"{self.builder.name}: the loss does not depend on parameter {value.name!r}"
                )

    def differentiate(self, record: _Record, rule: Gradient) -> None:
        wanted = [record.inputs[k] for k in rule.of if record.inputs[k].learned]
        above = [record.outputs[k].index for k in rule.after]
        incoming = [self.gradients[index] for index in above if index in self.gradients]
        if not wanted or (above and not incoming):
            return
        if rule.kind is None:
            for value in wanted:
                self.accumulate(value, incoming[0])
            return
        kept = [record.inputs[k] for k in rule.reads] + [record.outputs[k] for k in rule.keeps]
        made = self.builder.op(
            f"{record.name}.{rule.label}",
            kind=rule.kind,
            op_type=rule.op_type,
            inputs=[*incoming, *map(self.handle, kept)],
            output_bytes=[value.bytes for value in wanted],
            flops=rule.flops,
            attributes=self.attributes(record, back=wanted[0]),
        )
        for value, tensor in zip(wanted, made, strict=True):
            self.accumulate(value, tensor)

    def accumulate(self, value: Value, gradient: Tensor) -> None:
        """Adds a gradient to what has come for the value so far."""
        before = self.gradients.get(value.index)
        if before is not None:
            count = self.sums[value.index] = self.sums.get(value.index, 0) + 1
            (gradient,) = self.builder.op(
                f"{value.name}.grad_sum{count}",
                kind="elementwise",
                op_type="add",
                inputs=[before, gradient],
                output_bytes=[value.bytes],
                flops=value.elements,
                attributes=geometry(value.shape, value.shape, batch=value.samples),
            )
        self.gradients[value.index] = gradient

    def update(self, value: Value) -> None:
        if value.index not in self.gradients:
            return
        # Weights of 16 bits have a copy of 32 in the state (Micikevicius et al., ICLR 2018).
        slots = self.rule.slots + (value.width < STATE_WIDTH)
        state = slots * value.elements * STATE_WIDTH
        weights, *_ = self.builder.op(
            f"{value.name}.update",
            kind="elementwise",
            op_type=self.optimizer,
            inputs=[self.gradients[value.index], self.handle(value)],
            output_bytes=[value.bytes, state] if state else [value.bytes],
            flops=self.rule.flops * value.elements,
            weight_bytes=state,
            attributes=geometry(value.shape, value.shape),
        )
        self.builder.output(weights)
