"""A JAX function as a flat list of equations, kept on the host.

Calls are inlined, scans unrolled where that is asked for, identities and dead equations dropped.
Values are numbered; a literal stands as itself. `run` evaluates equations again, so that parts of
the list can be compiled on their own.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from egx.errors import GraphError

# Calls are made of their body; how they are differentiated no longer matters.
CALLS = {
    *("jit", "pjit", "closed_call", "core_call", "remat", "remat2", "checkpoint"),
    *("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"),
}
_BODIES = ("call_jaxpr", "fun_jaxpr", "jaxpr")
# What computes nothing and moves nothing: each output is the input beside it.
_IDENTITIES = {
    *("stop_gradient", "copy", "copy_p", "name", "optimization_barrier", "sharding_constraint"),
    *("layout_constraint", "pvary", "device_put"),
}
_LIBRARIES = tuple(os.path.dirname(module.__file__ or "") for module in (jax, eqx))

Atom = int | Literal
"""A value by its number, or a literal scalar."""


@dataclasses.dataclass(frozen=True, eq=False)
class Equation:
    """A primitive applied to values; `path` is what people call the place it comes from."""

    primitive: Any
    params: Mapping[str, Any]
    inputs: tuple[Atom, ...]
    outputs: tuple[int, ...]
    path: str
    has_effects: bool

    @property
    def name(self) -> str:
        return self.primitive.name


@dataclasses.dataclass(frozen=True, eq=False)
class FlatProgram:
    """Equations in a topological order; `avals` has the type of each value.

    `arguments` are the values of the array leaves of the arguments, `paths` what those are called,
    `constants` the arrays that the function closes over.
    """

    name: str
    equations: tuple[Equation, ...]
    avals: tuple[Any, ...]
    arguments: tuple[int, ...]
    paths: tuple[str, ...]
    constants: dict[int, Any]
    outputs: tuple[Atom, ...]
    output_tree: Any
    static_outputs: Any
    removed: dict[str, int]

    def aval(self, atom: Atom) -> Any:
        return atom.aval if isinstance(atom, Literal) else self.avals[atom]

    def leaves(self, args: Sequence[Any]) -> list[Any]:
        """The array leaves of arguments like those that were traced.

        Raises:
            GraphError: naming the leaf that is absent, or has another shape or type.
        """
        arrays, _ = eqx.partition(tuple(args), is_array)
        found = jax.tree_util.tree_leaves_with_path(arrays)
        names = tuple(leaf_name(path) for path, _ in found)
        if names != self.paths:
            raise GraphError(
                f"{self.name}: was traced with arrays {_listed(self.paths)}; got {_listed(names)}"
            )
        for (_, leaf), value, name in zip(found, self.arguments, names, strict=True):
            aval = self.avals[value]
            if tuple(leaf.shape) != tuple(aval.shape) or _dtype(leaf) != aval.dtype:
                raise GraphError(
                    f"{self.name}: {name} was traced as {aval.str_short()}, "
                    f"got {leaf.dtype}{list(leaf.shape)}"
                )
        return [leaf for _, leaf in found]

    def result(self, outputs: Sequence[Any]) -> Any:
        """What the function returns, given the arrays among it."""
        return eqx.combine(jax.tree.unflatten(self.output_tree, outputs), self.static_outputs)


def run(equations: Iterable[Equation], values: dict[int, Any]) -> dict[int, Any]:
    """Evaluates equations; `values` holds what they read and gets what they make."""
    for equation in equations:
        read = [atom.val if isinstance(atom, Literal) else values[atom] for atom in equation.inputs]
        params = equation.primitive.get_bind_params(equation.params)
        made = equation.primitive.bind(*read, **params)
        if not equation.primitive.multiple_results:
            made = [made]
        values.update(zip(equation.outputs, made, strict=True))
    return values


def is_array(leaf: Any) -> bool:
    """Whether a leaf of the arguments is traced: arrays are, and their descriptions; Python's own
    numbers are static, as all else is."""
    return isinstance(leaf, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct)


def _dtype(leaf: Any) -> Any:
    """The type that JAX gives an array: NumPy's of 64 bits become narrower unless x64 is on."""
    if isinstance(leaf, np.ndarray | np.generic):
        return jax.dtypes.canonicalize_dtype(leaf.dtype)
    return leaf.dtype


def leaf_name(path: Any) -> str:
    """A leaf of the tuple of arguments, such as "args[0].layers[1].weight"."""
    return f"args{jax.tree_util.keystr(path)}"


def _listed(names: Sequence[str]) -> str:
    more = f", ... ({len(names)} in all)" if len(names) > 4 else ""
    return (", ".join(names[:4]) or "none") + more


def flatten(
    fn: Callable[..., Any], args: Sequence[Any], *, name: str, unroll_scans: bool | int = False
) -> FlatProgram:
    """Traces `fn` and flattens what it does.

    Args:
        fn: any function that JAX can trace.
        args: arrays, `ShapeDtypeStruct`s and pytrees of them; other leaves are static.
        name: what to call the function in errors.
        unroll_scans: True for all, or the longest scan to unroll.

    Raises:
        GraphError: for a function that cannot be traced, or returns no arrays.
    """
    arrays, static = eqx.partition(tuple(args), is_array)
    found = jax.tree_util.tree_leaves_with_path(arrays)
    paths = tuple(leaf_name(path) for path, _ in found)
    for (_, leaf), path in zip(found, paths, strict=True):
        # The types of random keys are JAX's own and have no `kind`.
        if getattr(leaf.dtype, "kind", "f") in "OUSMm":
            raise GraphError(f"{name}: {path} holds {leaf.dtype}, which JAX cannot trace")
    treedef = jax.tree.structure(arrays)
    static_outputs: list[Any] = []

    def flat(*leaves: Any) -> Any:
        out = fn(*eqx.combine(jax.tree.unflatten(treedef, leaves), static))
        made, others = eqx.partition(out, eqx.is_array)
        static_outputs[:] = [others]
        return made

    try:
        closed, shape = jax.make_jaxpr(flat, return_shape=True)(*(leaf for _, leaf in found))
    except GraphError:
        raise
    except Exception as error:
        first = (str(error).strip().splitlines() or [""])[0]
        raise GraphError(
            f"{name} cannot be traced with {len(args)} arguments (arrays: {_listed(paths)}): "
            f"{type(error).__name__}: {first}"
        ) from error
    leaves, output_tree = jax.tree.flatten(shape)
    if not leaves:
        raise GraphError(f"{name} returns no arrays, so that there is nothing to compute")
    return _Flattening(name, unroll_scans).program(
        closed, paths, output_tree, static_outputs[0] if static_outputs else None
    )


class _Flattening:
    """The state of one flattening."""

    def __init__(self, name: str, unroll_scans: bool | int):
        self.name = name
        self.unroll_scans = unroll_scans
        self.avals: list[Any] = []
        self.equations: list[Equation] = []
        self.constants: dict[int, Any] = {}
        self.removed: Counter[str] = Counter()
        self._constant_of: dict[int, int] = {}
        self._pieces: dict[Any, ClosedJaxpr] = {}

    def program(
        self, closed: ClosedJaxpr, paths: tuple[str, ...], output_tree: Any, static_outputs: Any
    ) -> FlatProgram:
        arguments = [self._value(var.aval) for var in closed.jaxpr.invars]
        outputs = self._inline(closed, arguments, "")
        return FlatProgram(
            name=self.name,
            equations=tuple(self._live(outputs)),
            avals=tuple(self.avals),
            arguments=tuple(arguments),
            paths=paths,
            constants=self.constants,
            outputs=tuple(outputs),
            output_tree=output_tree,
            static_outputs=static_outputs,
            removed=dict(self.removed),
        )

    def _value(self, aval: Any) -> int:
        self.avals.append(aval)
        return len(self.avals) - 1

    def _constant(self, array: Any) -> int:
        """The value of a constant; one array is one value, however often it is closed over."""
        if id(array) not in self._constant_of:
            value = self._value(jax.typeof(array))
            self.constants[value] = array
            self._constant_of[id(array)] = value
        return self._constant_of[id(array)]

    def _inline(self, body: ClosedJaxpr | Jaxpr, inputs: Sequence[Atom], path: str) -> list[Atom]:
        """Appends the equations of a body and returns its outputs."""
        jaxpr = body.jaxpr if isinstance(body, ClosedJaxpr) else body
        consts = body.consts if isinstance(body, ClosedJaxpr) else []
        env: dict[Any, Atom] = {}
        for var, array in zip(jaxpr.constvars, consts, strict=True):
            env[var] = self._constant(array)
        env.update(zip(jaxpr.invars, inputs, strict=True))

        def read(atom: Any) -> Atom:
            if not isinstance(atom, Literal):
                return env[atom]
            # A literal array is a constant like any other.
            return atom if not np.shape(atom.val) else self._constant(atom.val)

        for eqn in jaxpr.eqns:
            made = self._equation(eqn, [read(atom) for atom in eqn.invars], path)
            env.update(zip(eqn.outvars, made, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _equation(self, eqn: JaxprEqn, inputs: list[Atom], path: str) -> Sequence[Atom]:
        kind = eqn.primitive.name
        here = _joined(path, _clean(str(eqn.source_info.name_stack)))
        if kind in CALLS:
            called = eqn.params.get("name", "")
            return self._inline(body_of(eqn), inputs, _joined(here, _function(called)))
        if kind == "custom_linear_solve":
            # Its other functions are for its derivatives.
            lengths = eqn.params["const_lengths"]
            first = lengths.matvec + lengths.vecmat
            given = inputs[first : first + lengths.solve] + inputs[sum(lengths) :]
            return self._inline(eqn.params["jaxprs"].solve, given, here)
        if kind in _IDENTITIES and len(inputs) == len(eqn.outvars):
            self.removed["identity"] += 1
            return inputs
        if _changes_nothing(eqn):
            self.removed["identity"] += 1
            return inputs
        if kind == "scan" and self._unrolls(eqn.params["length"]):
            return self._unroll(eqn, inputs, here)
        outputs = [self._value(var.aval) for var in eqn.outvars]
        self.equations.append(
            Equation(
                primitive=eqn.primitive,
                params=eqn.params,
                inputs=tuple(inputs),
                outputs=tuple(outputs),
                path=here or _source_function(eqn, self.name),
                has_effects=bool(eqn.effects),
            )
        )
        return outputs

    def _unrolls(self, length: int) -> bool:
        if isinstance(self.unroll_scans, bool):
            return self.unroll_scans
        return length <= self.unroll_scans

    def _unroll(self, eqn: JaxprEqn, inputs: list[Atom], path: str) -> Sequence[Atom]:
        """Every iteration after the other: inputs are taken apart once, outputs stacked once."""
        length, body = eqn.params["length"], eqn.params["jaxpr"]
        first, last = scan_parts(body, [v.aval for v in eqn.invars], [v.aval for v in eqn.outvars])
        consts, carry, whole = inputs[:first], inputs[first:last], inputs[last:]
        # The carry's type is the body's: a weak one becomes strong on the way in.
        apart = [self._unstacked(atom, length, _joined(path, "scan")) for atom in whole]
        rows: list[Sequence[Atom]] = [()] * length
        order = range(length)
        for step in reversed(order) if eqn.params["reverse"] else order:
            given = [*consts, *carry, *(rows_of[step] for rows_of in apart)]
            made = self._inline(body, given, _joined(path, f"scan[{step}]"))
            carry, rows[step] = made[: len(carry)], made[len(carry) :]
        stacked = []
        avals: list[Any] = [var.aval for var in eqn.outvars[len(carry) :]]
        for k, aval in enumerate(avals):
            if length == 0:
                stacked.append(self._piece(jnp.zeros, (aval.shape, aval.dtype), [], path))
            else:
                parts = [row[k] for row in rows]
                stacked.append(self._stacked(parts, aval, _joined(path, "scan")))
        return [*carry, *(atom for piece in stacked for atom in piece)]

    def _unstacked(self, atom: Atom, length: int, path: str) -> list[Atom]:
        if length == 0:
            return []
        assert not isinstance(atom, Literal)
        return self._piece(_unstack, (), [atom], path)

    def _stacked(self, parts: list[Atom], aval: Any, path: str) -> list[Atom]:
        if any(isinstance(part, Literal) for part in parts):
            # A scalar literal has no type of its own to stack.
            kept = [part for part in parts if not isinstance(part, Literal)]
            given = [part.val if isinstance(part, Literal) else None for part in parts]

            def mixed(*arrays: Any) -> Any:
                left = iter(arrays)
                filled = [next(left) if v is None else jnp.asarray(v, aval.dtype) for v in given]
                return jnp.stack(filled)

            return self._inline(self._traced(mixed, kept), kept, path)
        return self._piece(_stack, (), parts, path)

    def _piece(
        self, fn: Callable[..., Any], static: tuple[Any, ...], inputs: list[Atom], path: str
    ) -> list[Atom]:
        """The equations of a small function of ours."""
        types = tuple((self._aval(a).shape, str(self._aval(a).dtype)) for a in inputs)
        key = (fn, static, types)
        if key not in self._pieces:
            self._pieces[key] = self._traced(lambda *arrays: fn(*static, *arrays), inputs)
        return self._inline(self._pieces[key], inputs, path)

    def _traced(self, fn: Callable[..., Any], inputs: Sequence[Atom]) -> ClosedJaxpr:
        avals: list[Any] = [self._aval(atom) for atom in inputs]
        return jax.make_jaxpr(fn)(*(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals))

    def _aval(self, atom: Atom) -> Any:
        return atom.aval if isinstance(atom, Literal) else self.avals[atom]

    def _live(self, outputs: Sequence[Atom]) -> list[Equation]:
        """The equations that an output or an effect needs."""
        needed = {atom for atom in outputs if not isinstance(atom, Literal)}
        kept = []
        for equation in reversed(self.equations):
            if needed.isdisjoint(equation.outputs) and not equation.has_effects:
                self.removed["dead"] += 1
                continue
            needed.update(atom for atom in equation.inputs if not isinstance(atom, Literal))
            kept.append(equation)
        return kept[::-1]


def _unstack(x: Any) -> Any:
    return list(jnp.unstack(x))


def _stack(*parts: Any) -> Any:
    return jnp.stack(parts)


def body_of(eqn: JaxprEqn | Equation) -> ClosedJaxpr | Jaxpr:
    """The body of a call."""
    return next(eqn.params[key] for key in _BODIES if key in eqn.params)


def scan_parts(body: Any, inputs: Sequence[Any], outputs: Sequence[Any]) -> tuple[int, int]:
    """Where the carry begins and ends among the inputs of a scan: constants stand before it, and
    after it what has a row an iteration. Told by the avals, since JAX renames its parameters."""
    within = getattr(body, "jaxpr", body)
    rows = sum(
        len(whole.shape) != len(var.aval.shape)
        for whole, var in zip(inputs, within.invars, strict=True)
    )
    carried = sum(
        len(whole.shape) == len(var.aval.shape)
        for whole, var in zip(outputs, within.outvars, strict=True)
    )
    last = len(inputs) - rows
    return last - carried, last


def _changes_nothing(eqn: JaxprEqn) -> bool:
    """Whether a conversion is to the same type, or a power the first; literals stay, whose type
    may be the weak one of a Python number."""
    if not eqn.invars or isinstance(eqn.invars[0], Literal):
        return False
    if eqn.primitive.name == "convert_element_type":
        source: Any = eqn.invars[0].aval
        return source.dtype == getattr(eqn.outvars[0].aval, "dtype", None)
    return eqn.primitive.name == "integer_pow" and eqn.params["y"] == 1


def _joined(*parts: str) -> str:
    return "/".join(part for part in parts if part)


def _function(name: str) -> str:
    """What a function is called, if that says anything."""
    return "" if name in ("<lambda>", "<unnamed function>", "flat", "") else name.strip("_")


_WRAPPED = re.compile(r"(\w+)\(([^()]*)\)")


def _clean(stack: str) -> str:
    """JAX's stack of names for people: "transpose(jvp(block))" becomes "block/backward"."""
    is_backward = "transpose(" in stack
    while True:
        plain = _WRAPPED.sub(r"\2", stack)
        if plain == stack:
            break
        stack = plain
    # A transposed call repeats the name of the call that it is of.
    names = list(dict.fromkeys(part for part in stack.split("/") if part))
    return "/".join([*names, "backward"] if is_backward else names)


def _source_function(eqn: JaxprEqn, traced: str) -> str:
    """The innermost function of the user's own that the equation comes from, if it has a name."""
    traceback = eqn.source_info.traceback
    frames: Any = traceback.frames if traceback is not None else ()
    for frame in frames:
        if frame.file_name.startswith(_LIBRARIES) or not os.path.isabs(frame.file_name):
            continue
        name = frame.function_name.rsplit(".", 1)[-1]
        if frame.file_name == __file__ or name == traced or "<" in name:
            return ""
        return name
    return ""
