"""Two ways to advance a run: on the simulator, or by measuring each candidate on the host."""

from __future__ import annotations

import dataclasses
import numbers
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from egx.errors import SearchError
from egx.graph.graph import real_sizes
from egx.problems.base import AbstractProblem
from egx.search.base import AbstractSearch, State
from egx.training.generation import (
    WORST_COST,
    Row,
    ask_all,
    chunk,
    concrete,
    make_keys,
    replicate,
    start,
    tell_all,
)

Evaluator = Callable[[dict[str, np.ndarray]], float]
REFERENCE_TRIES = 3


@dataclasses.dataclass(frozen=True)
class RunState:
    """A run between two chunks: searcher states [S, ...], rows of all chunks, [k, S] each.

    `whole` is False when the last generation was cut short; such a state is never resumed.
    """

    states: State
    rows: tuple[Row, ...]
    generation: int
    failed: np.ndarray
    whole: bool = True


@runtime_checkable
class Stepper(Protocol):
    """What the host loop needs from either way."""

    problem: AbstractProblem

    def begin(self) -> RunState:
        """Compiles, and returns the run before its first generation."""

    def advance(self, run: RunState, count: int, budget: int, deadline: float | None) -> RunState:
        """`run` after up to `count` more generations, at least one."""

    def adopt(self, reference_cost: float) -> None:
        """Takes over the reference cost of a run that is resumed."""


class Simulated:
    """Evaluates on the simulator, inside the compiled chunk."""

    def __init__(
        self,
        search: AbstractSearch,
        problem: AbstractProblem,
        seeds: Sequence[int],
        mesh: Mesh | None = None,
    ):
        self.mesh = mesh if mesh is not None and mesh.size > 1 else None
        self.search = replicate(concrete(search), self.mesh)
        self.problem = replicate(concrete(problem), self.mesh)
        self.keys = replicate(make_keys(seeds), self.mesh)

    def begin(self) -> RunState:
        states = replicate(start(self.search, self.problem, self.keys), self.mesh)
        # No generation: this compiles the chunk and shows the shapes of its rows.
        states, rows = self._chunk(states, 0, 0, 0)
        none = jax.tree.map(lambda x: np.asarray(x)[:0], rows)
        return RunState(states, (none,), 0, np.zeros(len(self.keys), np.int64))

    def advance(self, run: RunState, count: int, budget: int, deadline: float | None) -> RunState:
        states, rows = self._chunk(run.states, run.generation, count, budget)
        rows = jax.tree.map(lambda x: np.asarray(x)[:count], rows)
        return RunState(states, (*run.rows, rows), run.generation + count, run.failed)

    def adopt(self, reference_cost: float) -> None:
        pass

    def _chunk(self, states: State, first: int, count: int, budget: int) -> tuple[State, Row]:
        states = replicate(states, self.mesh)
        bounds = (_scalar(first), _scalar(count), _scalar(budget))
        return jax.block_until_ready(
            chunk(self.search, self.problem, states, self.keys, bounds, self.mesh)
        )


class Measured:
    """Evaluates by a callable on the host, one candidate at a time, one generation a chunk.

    A measurement that raises, or returns anything but a finite number of 0 or more, fails: its
    candidate is infeasible. Ctrl-C and the time limit stop between two candidates; what was
    measured until then still counts.
    """

    def __init__(
        self,
        search: AbstractSearch,
        problem: AbstractProblem,
        seeds: Sequence[int],
        evaluator: Evaluator,
        repeats: int = 1,
    ):
        self.search = concrete(search)
        self.problem = concrete(problem)
        self.keys = make_keys(seeds)
        self.evaluator = evaluator
        self.repeats = repeats
        self.complaint: str | None = None
        ops, _, uses = real_sizes(problem.graph)
        self._real = {"op": ops, "use": uses}
        self._measured_reference = False

    def begin(self) -> RunState:
        if not self._measured_reference:
            self.adopt(self._measure_reference())
        states = start(self.search, self.problem, self.keys)
        shape = (len(self.keys), self.search.batch_size)
        # A generation of which nothing counts, thrown away: it compiles both programs.
        asked, asked_states = self._ask(states, 0)
        _, row = self._tell(
            asked_states, asked, np.zeros(shape), np.ones(shape, bool), np.zeros(shape, bool), 0
        )
        none = jax.tree.map(lambda x: np.asarray(x)[None][:0], row)
        return RunState(states, (none,), 0, np.zeros(len(self.keys), np.int64))

    def adopt(self, reference_cost: float) -> None:
        cost = jnp.asarray(reference_cost, jnp.float32)
        self.problem = eqx.tree_at(lambda p: p.reference_cost, self.problem, cost)
        self._measured_reference = True

    def advance(self, run: RunState, count: int, budget: int, deadline: float | None) -> RunState:
        candidates, states = self._ask(run.states, run.generation)
        host = {name: np.asarray(value) for name, value in candidates.items()}
        seeds, batch = len(self.keys), self.search.batch_size
        counts = min(batch, budget - run.generation * batch)
        costs = np.zeros((seeds, batch), np.float32)
        failed = np.ones((seeds, batch), bool)
        counted = np.zeros((seeds, batch), bool)
        whole = True
        try:
            for s, b in np.ndindex(seeds, counts):
                if deadline is not None and time.perf_counter() >= deadline:
                    whole = False
                    break
                cost = self._measure({name: value[s, b] for name, value in host.items()})
                counted[s, b] = True
                if cost is not None:
                    costs[s, b], failed[s, b] = cost, False
        except KeyboardInterrupt:
            whole = False
        states, row = self._tell(states, candidates, costs, failed, counted, run.generation)
        row = jax.tree.map(lambda x: np.asarray(x)[None], row)
        failures = run.failed + (failed & counted).sum(axis=1)
        return RunState(states, (*run.rows, row), run.generation + 1, failures, whole)

    def _ask(self, states: State, index: int) -> tuple[dict[str, Any], State]:
        return ask_all(self.search, self.problem, states, self.keys, _scalar(index))

    def _tell(
        self,
        states: State,
        candidates: Mapping[str, Any],
        costs: np.ndarray,
        failed: np.ndarray,
        counted: np.ndarray,
        index: int,
    ) -> tuple[State, Row]:
        return jax.block_until_ready(
            tell_all(
                self.search,
                self.problem,
                states,
                dict(candidates),
                jnp.asarray(costs, jnp.float32),
                jnp.asarray(failed),
                jnp.asarray(counted),
                self.keys,
                _scalar(index),
            )
        )

    def _measure(self, decisions: Mapping[str, np.ndarray]) -> float | None:
        """The median of the repeats that succeeded; None if none did."""
        heads = self.problem.heads
        costs = []
        for _ in range(self.repeats):
            # A fresh copy each time: an evaluator may write into what it is given.
            given = {
                name: np.array(value[: self._real[heads[name].axis]])
                for name, value in decisions.items()
            }
            try:
                costs.append(sound_cost(self.evaluator(given)))
            except Exception as error:
                self.complaint = f"{type(error).__name__}: {error}"
        return float(np.median(costs)) if costs else None

    def _measure_reference(self) -> float:
        reference = {name: np.asarray(value) for name, value in self.problem.reference.items()}
        for _ in range(REFERENCE_TRIES):
            cost = self._measure(reference)
            if cost is not None:
                return cost
        raise SearchError(
            f"the evaluator failed {REFERENCE_TRIES} times on the reference decisions; "
            f"last: {self.complaint}"
        )


def _scalar(value: int) -> jax.Array:
    return jnp.asarray(np.int32(value))


def sound_cost(value: Any) -> float:
    """`value` as a cost, or ValueError: it must be a finite real number of 0 or more."""
    if isinstance(value, np.ndarray | jax.Array) and value.ndim == 0:
        value = value.item()
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        raise ValueError(f"a measurement must be a number, got {value!r}")
    cost = float(value)
    if not 0 <= cost < WORST_COST:
        raise ValueError(f"a measurement must be finite and 0 or more, got {value!r}")
    return cost
