"""A model from any JAX function, through its jaxpr.

    model = trace(fn, *example_args, weights=0)

An op an equation, after inlining every call (jit, custom derivatives, checkpoint). What an
optimizer of placement and fusion should not see is folded away:

- Views (reshape, squeeze, expand_dims, broadcast_in_dim, bitcasts of equal width, transpositions
  that move axes of size 1 only) move no data once they are compiled with their reader: the reader
  reads what the view is of. Identities (stop_gradient, copy, optimization_barrier, a conversion
  to the same type) vanish.
- What depends on literals alone (iota, filled arrays, masks made of them) is made in place by
  each reader and costs nothing.
- A view that is an output of the function stays, as a `shape` op. So do transpositions, slices,
  gathers, concatenations; a conversion to another type is `elementwise`.

Arguments have no producer, hence no tensor and no use, as everywhere in egx. Those that are
parameters count as `weight_bytes` of each op that reads them: each op's traffic is right then,
and the memory of a device is an upper bound, since two readers on one device count twice, and a
new value of a parameter is a tensor beside the old one (JAX updates nothing in place). A slice
counts what it cuts out.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import equinox as eqx
import jax
from jax.extend.core import Literal

from egx.errors import GraphError
from egx.formats.jaxpr_flat import Equation, FlatProgram, flatten, is_array
from egx.formats.jaxpr_flops import Cost, Use, aval_bytes, cost_of
from egx.formats.jaxpr_geometry import geometry
from egx.graph.builder import GraphBuilder, Tensor
from egx.graph.graph import Model

_VIEWS = {
    *("reshape", "squeeze", "expand_dims", "broadcast_in_dim", "random_wrap", "random_unwrap"),
}
# The words of the zoo and of the ONNX importer for the same work.
_OP_TYPES = {
    "dot_general": "matmul",
    "conv_general_dilated": "conv",
    "logistic": "sigmoid",
    "select_n": "where",
    "convert_element_type": "cast",
    "concatenate": "concat",
    "integer_pow": "pow",
    "add_any": "add",
    "reduce_window_max": "maxpool",
    "cumsum": "cum_sum",
}


class TraceWarning(UserWarning):
    """Something of a traced function was taken on assumption."""


@dataclasses.dataclass(frozen=True, eq=False)
class TracedOp:
    """An op: the equations that run for it, views and filled arrays of its operands first and its
    own last. `reads` are the values from other ops, arguments and constants that they need."""

    equations: tuple[Equation, ...]
    reads: tuple[int, ...]

    @property
    def writes(self) -> tuple[int, ...]:
        """Its values, in the order of its tensors."""
        return self.equations[-1].outputs


@dataclasses.dataclass(frozen=True, eq=False)
class Traced:
    """A model and, on the host, what runs each of its ops; ops in the order of the model."""

    model: Model
    program: FlatProgram
    ops: tuple[TracedOp, ...]


def trace(
    fn: Callable[..., Any],
    *example_args: Any,
    weights: int | Sequence[int] | None = None,
    unroll_scans: bool | int = False,
    while_iterations: int = 1,
    name: str | None = None,
) -> Model:
    """The model of a JAX function.

    Args:
        fn: any function that JAX can trace, jitted or not, or a callable equinox module.
        example_args: arrays, `jax.ShapeDtypeStruct`s, or pytrees of them such as equinox modules;
            leaves that are no arrays (Python's numbers too) are static.
        weights: numbers of the arguments whose arrays are parameters. By default, the arrays of
            equinox modules, wherever in the arguments they are (so the moments of an optimizer
            that was initialised with one). What the function closes over always is.
        unroll_scans: True, or the longest scan to unroll; the others are one opaque op each,
            with the FLOPs of all iterations. A graph has no place for the traffic of all
            iterations (an op reads its operands once): `notes["loops"]` has it by op.
        while_iterations: how often a while loop is taken to run.
        name: what to call the model; by default the name of the function.

    Returns:
        The model. `notes` has totals (`flops`, `parameter_bytes` with each parameter counted
        once, `weight_bytes` at each reader, `argument_bytes` of the other arguments,
        `activation_bytes`), `removed` equations by reason, `loops`, the `parameters` that ops
        read by op, and the options of this call (`trace`).

    Raises:
        GraphError: for arguments that cannot be traced, a function that fails in it, returns no
            arrays or computes nothing.
    """
    return trace_ops(
        fn,
        example_args,
        weights=weights,
        unroll_scans=unroll_scans,
        while_iterations=while_iterations,
        name=name,
    ).model


def trace_ops(
    fn: Callable[..., Any],
    args: Sequence[Any],
    *,
    weights: int | Sequence[int] | None = None,
    unroll_scans: bool | int = False,
    while_iterations: int = 1,
    name: str | None = None,
) -> Traced:
    """As `trace`, with what runs each op."""
    if not callable(fn):
        raise GraphError(f"expected a function to trace, got {type(fn).__name__} {fn!r:.60}")
    name = name or getattr(fn, "__name__", None) or type(fn).__name__
    for option, value in (("unroll_scans", unroll_scans), ("while_iterations", while_iterations)):
        if not isinstance(value, int) or value < 0:
            raise GraphError(f"{name}: {option} must be a whole number, got {value!r}")
    is_parameter = _parameters(name, args, weights)
    program = flatten(fn, args, name=name, unroll_scans=unroll_scans)
    options = {
        "weights": None if weights is None else _numbers(weights),
        "unroll_scans": unroll_scans,
        "while_iterations": while_iterations,
    }
    return _Building(program, is_parameter, while_iterations).traced(options)


def _numbers(weights: int | Sequence[int]) -> list[int]:
    return list(weights) if isinstance(weights, Iterable) else [weights]


def _parameters(name: str, args: Sequence[Any], weights: int | Sequence[int] | None) -> list[bool]:
    """Whether each array leaf of the arguments is a parameter."""
    if weights is None:
        found = []
        modules = jax.tree.leaves(tuple(args), is_leaf=lambda x: isinstance(x, eqx.Module))
        for part in modules:
            leaves = [leaf for leaf in jax.tree.leaves(part) if is_array(leaf)]
            found.extend([isinstance(part, eqx.Module)] * len(leaves))
        return found
    numbers = _numbers(weights)
    for number in numbers:
        if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < len(args):
            raise GraphError(
                f"{name}: weights names argument {number!r}; expected 0 to {len(args) - 1}"
            )
        if not any(is_array(leaf) for leaf in jax.tree.leaves(args[number])):
            raise GraphError(f"{name}: weights names argument {number}, which holds no arrays")
    counts = [sum(map(is_array, jax.tree.leaves(arg))) for arg in args]
    return [k in numbers for k, count in enumerate(counts) for _ in range(count)]


class _Building:
    """Turns a flat program into a graph."""

    def __init__(self, program: FlatProgram, is_parameter: Sequence[bool], while_iterations: int):
        self.program = program
        self.while_iterations = while_iterations
        self.maker = {v: equation for equation in program.equations for v in equation.outputs}
        self.outputs = {atom for atom in program.outputs if not isinstance(atom, Literal)}
        self.parameter_names = {
            value: path
            for value, path, counts in zip(
                program.arguments, program.paths, is_parameter, strict=True
            )
            if counts
        }
        for k, value in enumerate(program.constants):
            self.parameter_names[value] = f"constant {k}"
        self.arguments = set(program.arguments)
        self.folded: set[int] = set()  # by value: made by its readers
        self.generated: set[int] = set()  # of these, what reads no array
        self.removed = Counter(program.removed)

    def traced(self, options: dict[str, Any]) -> Traced:
        program = self.program
        kept = [equation for equation in program.equations if not self._folds(equation)]
        # Views whose only reader was folded away too have nobody to run them.
        if not kept:
            raise GraphError(
                f"{program.name}: nothing is computed: its outputs are constants or arguments"
            )
        builder = GraphBuilder(program.name)
        names, ops = _Names(), []
        handles: dict[int, Tensor] = {}
        loops: dict[str, Any] = {}
        parameters: dict[str, list[str]] = {}
        unknown: Counter[str] = Counter()
        weight_bytes, flops = 0, 0.0
        for equation in kept:
            op, cost = self._op(equation), self._cost(equation)
            name = names.take(f"{equation.path}/{equation.name}".lstrip("/"))
            weight, read = self._weights(equation, op)
            made = builder.op(
                name,
                kind=cost.kind,
                op_type=_OP_TYPES.get(equation.name, equation.name),
                inputs=[handles[value] for value in op.reads if value in handles],
                output_bytes=[aval_bytes(program.avals[value]) for value in op.writes],
                flops=cost.flops,
                weight_bytes=weight,
                attributes=geometry(self._use(equation)),
            )
            handles.update(zip(op.writes, made, strict=True))
            ops.append(op)
            flops, weight_bytes = flops + cost.flops, weight_bytes + weight
            unknown.update(cost.unknown)
            if read:
                parameters[name] = read
            if cost.iterations is not None:
                loops[name] = {"iterations": cost.iterations, "bytes": cost.bytes}
        for value in program.outputs:
            if not isinstance(value, Literal) and value in handles:
                builder.output(handles[value])
        self._warn(unknown)
        avals = program.avals
        inputs = self.arguments - set(self.parameter_names)
        model = builder.build_model(
            source=program.name,
            notes={
                "flops": flops,
                "parameter_bytes": sum(aval_bytes(avals[v]) for v in self.parameter_names),
                "weight_bytes": weight_bytes,
                "argument_bytes": sum(aval_bytes(avals[v]) for v in inputs),
                "activation_bytes": sum(aval_bytes(avals[v]) for op in ops for v in op.writes),
                "removed": dict(self.removed),
                "loops": loops,
                "parameters": parameters,
                "trace": options,
            },
        )
        return Traced(model, program, tuple(ops))

    def _use(self, equation: Equation) -> Use:
        avals = [self.program.aval(atom) for atom in equation.inputs]
        made = [self.program.avals[value] for value in equation.outputs]
        return Use(equation.name, equation.params, avals, made)

    def _cost(self, equation: Equation) -> Cost:
        return cost_of(self._use(equation), while_iterations=self.while_iterations)

    def _folds(self, equation: Equation) -> bool:
        """Whether readers make the value themselves."""
        if equation.has_effects or not self.outputs.isdisjoint(equation.outputs):
            return False
        read = [atom for atom in equation.inputs if not isinstance(atom, Literal)]
        if all(atom in self.generated for atom in read):
            kind = self._cost(equation).kind
            # A random number from a literal seed is work like any other.
            if kind == "shape" or (kind == "elementwise" and not _is_random(equation)):
                self.generated.update(equation.outputs)
                self.folded.update(equation.outputs)
                self.removed["made in place"] += 1
                return True
        if len(read) == 1 and self._is_view(equation):
            self.folded.update(equation.outputs)
            self.removed["view"] += 1
            return True
        return False

    def _is_view(self, equation: Equation) -> bool:
        if equation.name in _VIEWS:
            return True
        source = self.program.aval(equation.inputs[0])
        made = self.program.avals[equation.outputs[0]]
        if equation.name == "bitcast_convert_type":
            return source.shape == made.shape
        if equation.name == "transpose":
            moved = [a for a in equation.params["permutation"] if source.shape[a] != 1]
            return moved == sorted(moved)
        return False

    def _op(self, equation: Equation) -> TracedOp:
        """The equation behind the folded ones that it needs, each once, in their order."""
        needed: dict[int, Equation] = {}
        reads: list[int] = []

        def visit(atom: Any, seen: set[int]) -> None:
            if isinstance(atom, Literal):
                return
            if atom not in self.folded:
                if atom not in seen:
                    seen.add(atom)
                    reads.append(atom)
                return
            maker = self.maker[atom]
            for inner in maker.inputs:
                visit(inner, seen)
            needed.setdefault(id(maker), maker)

        # An operand that is read twice is two uses, as in `mul x x`.
        for atom in equation.inputs:
            visit(atom, set())
        return TracedOp((*needed.values(), equation), tuple(reads))

    def _weights(self, equation: Equation, op: TracedOp) -> tuple[int, list[str]]:
        """Bytes of the parameters that an op reads, and what they are called."""
        read = [value for value in dict.fromkeys(op.reads) if value in self.parameter_names]
        sizes = [aval_bytes(self.program.avals[value]) for value in read]
        if equation.name in ("slice", "dynamic_slice") and sizes:
            made = aval_bytes(self.program.avals[equation.outputs[0]])
            sizes = [min(size, made) for size in sizes]
        return sum(sizes), [self.parameter_names[value] for value in read]

    def _warn(self, unknown: Counter[str]) -> None:
        if unknown:
            listed = ", ".join(f"{kind} x{count}" for kind, count in unknown.most_common())
            warnings.warn(
                f"{self.program.name}: {unknown.total()} equations of unknown primitives, taken "
                f"as opaque with no FLOPs: {listed}",
                TraceWarning,
                stacklevel=5,
            )


def _is_random(equation: Equation) -> bool:
    return equation.name.startswith(("random_", "rng_", "threefry"))


class _Names:
    """Hands out op names, each once."""

    def __init__(self) -> None:
        self._taken: Counter[str] = Counter()

    def take(self, base: str) -> str:
        wanted = base
        while wanted in self._taken:
            self._taken[base] += 1
            wanted = f"{base}.{self._taken[base] - 1}"
        self._taken[wanted] += 1
        return wanted


__all__ = ["TraceWarning", "Traced", "TracedOp", "trace", "trace_ops"]
