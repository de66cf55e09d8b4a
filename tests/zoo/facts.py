"""What every training graph must be, whatever the network, and how tests look into a model."""

from __future__ import annotations

import numpy as np

from egx.graph.graph import CONTRACTION, Model


class Facts:
    """A model without padding as plain NumPy and dictionaries."""

    def __init__(self, model: Model):
        graph = model.graph
        self.model = model
        self.names = model.op_names
        self.at = {name: k for k, name in enumerate(model.op_names)}
        self.kind = np.asarray(graph.op_class)
        self.flops = np.asarray(graph.flops, np.float64)
        self.unit = int(graph.unit_bytes)
        self.bytes = np.asarray(graph.tensor_units, np.int64) * self.unit
        self.weights = np.asarray(graph.weight_units, np.int64) * self.unit
        self.producer = np.asarray(graph.tensor_producer)
        self.is_output = np.asarray(graph.tensor_is_output)
        self.use_tensor = np.asarray(graph.use_tensor)
        self.use_consumer = np.asarray(graph.use_consumer)
        self.last = np.asarray(graph.last_step())

    def inputs(self, name: str) -> list[str]:
        uses = self.use_consumer == self.at[name]
        return [self.model.tensor_names[t] for t in self.use_tensor[uses]]

    def outputs(self, name: str) -> list[int]:
        return np.flatnonzero(self.producer == self.at[name]).tolist()

    def sizes(self, name: str) -> list[int]:
        return self.bytes[self.outputs(name)].tolist()

    def contraction_flops(self) -> float:
        return float(self.flops[self.kind == CONTRACTION].sum())

    def of_type(self, op_type: str) -> list[str]:
        return [n for n, t in zip(self.names, self.model.op_types, strict=True) if t == op_type]


def check_training_graph(model: Model, updates: str) -> Facts:
    """Topological, nothing dead, one update a parameter, and activations kept until they are
    needed; `updates` is the op type of updates."""
    facts = Facts(model)
    assert len(facts.at) == len(facts.names)
    assert np.all(facts.producer[facts.use_tensor] < facts.use_consumer)
    assert np.all(np.diff(facts.producer) >= 0)
    assert np.all(np.diff(facts.use_consumer) >= 0)

    read = np.bincount(facts.use_tensor, minlength=len(facts.producer)) > 0
    needed = np.zeros(len(facts.names), bool)
    needed[facts.producer[read | facts.is_output]] = True
    assert [facts.names[k] for k in np.flatnonzero(~needed)] == []

    parameters = facts.of_type("parameter")
    assert sorted(facts.of_type(updates)) == sorted(f"{name}.update" for name in parameters)
    layers = {name.split("/")[0] for name in facts.names}
    assert "" not in layers
    for name in parameters:
        op, update = facts.at[name], facts.at[f"{name}.update"]
        (tensor,) = facts.outputs(name)
        new = facts.outputs(f"{name}.update")[0]
        assert facts.flops[op] == 0
        assert facts.inputs(f"{name}.update")[1] == name
        assert facts.inputs(f"{name}.update")[0] != name
        assert facts.bytes[new] == facts.bytes[tensor]
        assert facts.is_output[new]
        assert not facts.is_output[tensor]
        # Resident from the first reader to the update, the last one.
        assert facts.last[tensor] == update
        assert op + 1 <= facts.use_consumer[facts.use_tensor == tensor].min()
    stated = model.notes["parameters"]
    held = sum(facts.sizes(name)[0] for name in parameters)
    width = 4 if model.notes["options"]["precision"] == "fp32" else 2
    assert 0 <= held - stated * width < len(parameters) * facts.unit

    for name in facts.names:
        for label, other in (("grad_w", 0), ("grad_x", 1)):
            gradient = f"{name}.{label}"
            if gradient in facts.at and facts.kind[facts.at[name]] == CONTRACTION:
                # The gradient of either operand reads the other, which lives until then.
                kept = facts.inputs(name)[other]
                assert kept in facts.inputs(gradient)
                assert facts.flops[facts.at[gradient]] == facts.flops[facts.at[name]]
    return facts
