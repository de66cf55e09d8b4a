"""A plan as segments: what is compiled together, on which device, in which order.

Shapes: N real ops.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from egx.formats.jaxpr import Traced
from egx.formats.jaxpr_flat import Equation
from egx.problems.execution_plans.plan import list_order
from egx.simulate.fusion import clusters


@dataclasses.dataclass(frozen=True, eq=False)
class Segment:
    """A cluster of ops: the values that it reads from elsewhere, and those that others, or the
    caller, want of it."""

    device: int
    equations: tuple[Equation, ...]
    reads: tuple[int, ...]
    writes: tuple[int, ...]

    def key(self, avals: Sequence[Any]) -> Any:
        """Equal for segments that one compiled program serves."""
        number = {value: k for k, value in enumerate(self.reads)}
        steps = []
        for equation in self.equations:
            atoms = tuple(
                _literal_key(atom) if isinstance(atom, Literal) else number[atom]
                for atom in equation.inputs
            )
            for value in equation.outputs:
                number[value] = len(number)
            params = tuple((name, _hashable(v)) for name, v in sorted(equation.params.items()))
            steps.append((equation.name, id(equation.primitive), params, atoms))
        types = tuple(avals[value].str_short() for value in self.reads)
        return tuple(steps), types, tuple(number[value] for value in self.writes)


def _literal_key(atom: Literal) -> Any:
    return "literal", str(atom.aval), np.asarray(atom.val).tobytes()


def _hashable(value: Any) -> Any:
    """Itself, or what only the very same object has."""
    try:
        hash(value)
    except TypeError:
        return "id", id(value)
    # 1, 1.0 and True are equal, and lead to different programs.
    return type(value), value


def segments_of(
    traced: Traced, decisions: Mapping[str, np.ndarray], order: Sequence[int] | None = None
) -> list[Segment]:
    """The segments in the order in which they are started.

    Args:
        traced: what runs.
        decisions: any of device [N] int, fusion [N] int, priority [N]; an absent one is its
            default: device 0, no fusion, all equal.
        order: ops as they are started, instead of by priority: a cluster's place is its root's.
    """
    ops = len(traced.ops)
    device = np.asarray(decisions.get("device", np.zeros(ops, np.int64)))
    root = cluster_roots(traced, decisions.get("fusion"))
    home = {value: root[k] for k, op in enumerate(traced.ops) for value in op.writes}
    members: dict[int, list[int]] = {}
    for k in range(ops):
        members.setdefault(root[k], []).append(k)
    reads = {
        r: list(
            dict.fromkeys(v for k in inside for v in traced.ops[k].reads if home.get(v, -1) != r)
        )
        for r, inside in members.items()
    }
    wanted = {v for values in reads.values() for v in values}
    wanted |= {v for v in traced.program.outputs if not isinstance(v, Literal)}
    roots = sorted(members)
    if order is None:
        place = {r: k for k, r in enumerate(roots)}
        needs = [{place[home[v]] for v in reads[r] if v in home} for r in roots]
        priority = np.asarray(decisions.get("priority", np.zeros(ops)))[roots]
        sequence = [roots[k] for k in list_order(needs, priority)]
    else:
        sequence = [op for op in order if op in members]
    found = []
    for r in sequence:
        inside = [traced.ops[k] for k in members[r]]
        # A view that several ops of a cluster read is made once.
        equations = {id(e): e for op in inside for e in op.equations}
        writes = tuple(v for op in inside for v in op.writes if v in wanted)
        found.append(Segment(int(device[r]), tuple(equations.values()), tuple(reads[r]), writes))
    return found


def cluster_roots(traced: Traced, fusion: np.ndarray | None) -> list[int]:
    """The root of each op's cluster."""
    fusion = None if fusion is None else np.asarray(fusion)
    if fusion is None or not np.any(fusion):
        return list(range(len(traced.ops)))
    # Only the order of levels counts: numbered from 1 on, none is too high to go through.
    used = np.unique(fusion[fusion > 0])
    levels = np.where(fusion > 0, np.searchsorted(used, fusion) + 1, 0)
    return np.asarray(_clusters(traced.model.graph, jnp.asarray(levels, jnp.int32))).tolist()


_clusters = eqx.filter_jit(clusters)
