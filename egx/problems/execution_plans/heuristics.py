"""The plans of `Execution` that are known before any search, computed when they are looked at.

They are made on the host, in NumPy. Where the problem's arrays are traced (under `jit` or `vmap`),
looking at one puts a callback into the program that makes it when the program runs, once for each
problem of a batch; the bits are the same. What nobody looks at costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from egx.problems.execution_plans import blocks
from egx.problems.execution_plans.fused import with_all_fused
from egx.problems.execution_plans.list_scheduling import heft, spread_by_memory
from egx.problems.execution_plans.orders import first_come_order, memory_order
from egx.problems.execution_plans.plan import Plan, decisions_of
from egx.simulate.host_case import HostCase, host_case


def _heft(case: HostCase, options: Mapping[str, Any], *, mind_readers: bool = False) -> Plan:
    order = None if options["orders"] else np.arange(case.num_ops)
    return heft(
        case, order=order, queued=options["queued"], transfers=options["transfers"],
        devices=options["devices"], mind_readers=mind_readers,
    ).plan  # fmt: skip


def _heft_readers(case: HostCase, options: Mapping[str, Any]) -> Plan:
    return _heft(case, options, mind_readers=True)


def _memory_order(case: HostCase, options: Mapping[str, Any]) -> np.ndarray:
    return memory_order(case) if options["orders"] else np.arange(case.num_ops)


def _memory_greedy(case: HostCase, options: Mapping[str, Any]) -> Plan:
    order = _memory_order(case, options)
    if options["devices"] is not None:
        return Plan(np.zeros(case.num_ops, np.int64), order)
    return blocks.one_device(case, order)


def _memory_spread(case: HostCase, options: Mapping[str, Any]) -> Plan:
    return spread_by_memory(case, _memory_order(case, options), devices=options["devices"])


def _expert(case: HostCase, options: Mapping[str, Any]) -> Plan:
    if options["devices"] is not None:
        return Plan(np.zeros(case.num_ops, np.int64), np.arange(case.num_ops))
    device = blocks.layers_in_turn(case)
    if device is None:
        return blocks.layer_blocks(case, by_bytes=options["by_bytes"])
    return _first_come(case, device, options)


def _blocks(case: HostCase, options: Mapping[str, Any]) -> Plan:
    device = None
    if options["devices"] is None:
        device = blocks.layers_in_blocks(case, by_bytes=options["by_bytes"])
    return _expert(case, options) if device is None else _first_come(case, device, options)


def _default(case: HostCase, options: Mapping[str, Any]) -> Plan:
    return _first_come(case, np.zeros(case.num_ops, np.int64), options)


def _first_come(case: HostCase, device: np.ndarray, options: Mapping[str, Any]) -> Plan:
    """A placement in the order of a framework that knows no priorities: at run time the op that
    arrived first, in a static order that of the index."""
    if not options["runtime"]:
        return Plan(device, np.arange(case.num_ops))
    return Plan(device, first_come_order(case, device, options["transfers"]))


_Maker = Callable[[HostCase, Mapping[str, Any]], Plan]

PLANS: dict[str, _Maker] = {
    "heft": _heft,
    "memory_greedy": _memory_greedy,
    "memory_spread": _memory_spread,
    "expert": _expert,
}


def _fused(maker: _Maker) -> _Maker:
    """The plan that a maker has for the graph with everything fused."""

    def make(case: HostCase, options: Mapping[str, Any]) -> Plan:
        return with_all_fused(case, options["fusion_levels"], lambda cut: maker(cut, options))

    return make


FUSED_PLANS: dict[str, _Maker] = {
    "tensorflow": _fused(_default),
    "heft_fused": _fused(_heft),
    "expert_fused": _fused(_expert),
    "blocks_fused": _fused(_blocks),
}


class HeuristicPlans(Mapping[str, dict[str, Array]]):
    """Plans by name, each made at its first look: the reference, those of `PLANS`, those of
    `FUSED_PLANS` where fusion is decided, and there and in run-time order "heft_readers".

    Args:
        reference: the problem's own.
        arrays: of `case_arrays`, traced or not.
        shapes: the shape and type of each decided decision.
        options: what the makers need to know of the problem, static.
    """

    def __init__(
        self,
        reference: Mapping[str, Array],
        arrays: Mapping[str, Any],
        shapes: Mapping[str, jax.ShapeDtypeStruct],
        options: Mapping[str, Any],
    ):
        self._made: dict[str, dict[str, Array]] = {"reference": dict(reference)}
        self._arrays, self._shapes, self._options = dict(arrays), dict(shapes), dict(options)
        self._case: HostCase | None = None
        # Which plans there are must not depend on numbers or names: programs have one each.
        fuses = "fusion" in self._shapes
        self._makers = PLANS | (FUSED_PLANS if fuses else {})
        # Often the best of all for training steps; not measured where there are no such decisions.
        if fuses or options["runtime"]:
            self._makers["heft_readers"] = _fused(_heft_readers) if fuses else _heft_readers

    def __iter__(self) -> Iterator[str]:
        yield "reference"
        yield from self._makers

    def __len__(self) -> int:
        return 1 + len(self._makers)

    def __getitem__(self, name: str) -> dict[str, Array]:
        if name not in self._made:
            self._made[name] = self._make(name)
        return self._made[name]

    def _make(self, name: str) -> dict[str, Array]:
        maker, shapes, options = self._makers[name], self._shapes, self._options

        def decisions(case: HostCase) -> dict[str, np.ndarray]:
            return decisions_of(
                case, maker(case, options), tuple(shapes), options["ops"], options["uses"]
            )

        if any(isinstance(value, jax.core.Tracer) for value in self._arrays.values()):
            made = jax.pure_callback(
                lambda arrays: decisions(host_case(arrays)),
                shapes,
                self._arrays,
                vmap_method="sequential",
            )
            return dict(made)
        if self._case is None:
            self._case = host_case(self._arrays)
        return {head: jnp.asarray(value) for head, value in decisions(self._case).items()}


def plan_options(decide: Sequence[str], **more: Any) -> dict[str, Any]:
    """What the makers need to know: which decisions are theirs, and `more`."""
    return {
        "orders": "priority" in decide,
        "devices": None if "device" in decide else (0,),
        "queued": "transfer_priority" in decide and "priority" in decide,
        **more,
    }
