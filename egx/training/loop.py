"""The driver: a jitted chunk of generations inside a host loop.

One generation is ask, evaluate, tell, with keys derived from the generation's index, so that
results depend neither on how generations are cut into chunks nor on where a run was resumed.
Budget, bounds and keys are traced: only another searcher or another padded shape compiles.

Shapes: S seeds, B candidates per generation, K rows of a chunk, G generations so far.
"""

from __future__ import annotations

import dataclasses
import datetime
import time
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from egx.problems.base import AbstractOutcome, AbstractProblem
from egx.search.base import AbstractSearch, State
from egx.training.identity import problem_identity, search_identity, versions
from egx.training.result import History, Result

CHUNK_ROWS = 512
CHUNK_SECONDS = 0.5
WORST_REWARD = -2.0


class Row(eqx.Module):
    """What is kept of a generation; fields are [] for one, [K, S] for a chunk, [G, S] for a run."""

    best_cost: Float[Array, "*rows"]
    best_feasible: Bool[Array, "*rows"]
    metrics: dict[str, Float[Array, "*rows"]]


@dataclasses.dataclass
class RunState:
    """A run between two chunks: searcher states with a leading axis S, and the rows so far."""

    states: State
    rows: list[Row]
    generation: int


def concrete(tree: Any) -> Any:
    """The same tree with NumPy arrays as JAX arrays, which `eqx.filter_jit` traces."""
    return jax.tree.map(lambda x: jnp.asarray(x) if isinstance(x, np.ndarray) else x, tree)


def mask_beyond(outcomes: AbstractOutcome, counted: Bool[Array, " B"]) -> AbstractOutcome:
    """Replaces outcomes that do not count by ones that cannot become the incumbent."""
    worst = jnp.finfo(jnp.float32).max
    return eqx.tree_at(
        lambda o: (o.cost, o.feasible, o.reward),
        outcomes,
        (
            jnp.where(counted, outcomes.cost, worst),
            outcomes.feasible & counted,
            jnp.where(counted, outcomes.reward, WORST_REWARD),
        ),
    )


def generation_keys(key: PRNGKeyArray, generation: Int[Array, ""]) -> PRNGKeyArray:
    """The keys of ask and tell."""
    return jax.random.split(jax.random.fold_in(key, generation + 1))


def one_generation(
    search: AbstractSearch,
    problem: AbstractProblem,
    state: State,
    key: PRNGKeyArray,
    generation: Int[Array, ""],
    budget: Int[Array, ""],
) -> tuple[State, Row]:
    """Ask, evaluate, tell; candidates beyond the budget do not count."""
    ask_key, tell_key = generation_keys(key, generation)
    candidates, state = search.ask(problem, state, key=ask_key)
    outcomes = jax.vmap(problem.evaluate)(candidates)
    index = generation * search.batch_size + jnp.arange(search.batch_size)
    outcomes = mask_beyond(outcomes, index < budget)
    state, metrics = search.tell(problem, state, candidates, outcomes, key=tell_key)
    return state, Row(state.best.cost, state.best.feasible, metrics)


@eqx.filter_jit
def start(search: AbstractSearch, problem: AbstractProblem, keys: PRNGKeyArray) -> State:
    """States before the first generation, [S, ...]."""
    return jax.vmap(lambda key: search.init(problem, key=jax.random.fold_in(key, 0)))(keys)


@eqx.filter_jit
def chunk(
    search: AbstractSearch,
    problem: AbstractProblem,
    states: State,
    keys: PRNGKeyArray,
    first: Int[Array, ""],
    count: Int[Array, ""],
    budget: Int[Array, ""],
) -> tuple[State, Row]:
    """Runs `count` <= K generations of all seeds; rows [K, S], of which the first `count` hold."""
    dynamic, static = eqx.partition(states, eqx.is_array)

    def generation(dynamic, index):
        def single(dynamic, key):
            state = eqx.combine(dynamic, static)
            state, row = one_generation(search, problem, state, key, index, budget)
            return eqx.filter(state, eqx.is_array), row

        return jax.vmap(single)(dynamic, keys)

    _, shapes = jax.eval_shape(generation, dynamic, first)
    rows = jax.tree.map(lambda x: jnp.zeros((CHUNK_ROWS, *x.shape), x.dtype), shapes)

    def body(step, carry):
        dynamic, rows = carry
        dynamic, row = generation(dynamic, first + step)
        rows = jax.tree.map(lambda all_, new: all_.at[step].set(new), rows, row)
        return dynamic, rows

    dynamic, rows = jax.lax.fori_loop(0, count, body, (dynamic, rows))
    return eqx.combine(dynamic, static), rows


def make_keys(seeds: Sequence[int]) -> PRNGKeyArray:
    """One key a seed, [S]."""
    return jax.vmap(jax.random.key)(jnp.asarray(np.asarray(seeds, np.uint32)))


@dataclasses.dataclass(frozen=True)
class Progress:
    """Where a run stands; `best_cost` is the best over seeds, infinite before the first chunk."""

    algorithm: str
    evaluations: int
    budget: int
    best_cost: float
    feasible: bool
    reference_cost: float
    seconds: float
    compile_seconds: float


class Simulated:
    """Advances a run by evaluating on the simulator, inside the compiled chunk."""

    def __init__(self, search: AbstractSearch, problem: AbstractProblem, seeds: Sequence[int]):
        self.search = concrete(search)
        self.problem = concrete(problem)
        self.keys = make_keys(seeds)
        self.failed = np.zeros(len(seeds), np.int64)

    def begin(self) -> RunState:
        """Compiles, and returns the run before its first generation."""
        states = start(self.search, self.problem, self.keys)
        none = self._chunk(states, 0, 0, 0)
        rows = jax.tree.map(lambda x: np.asarray(x)[:0], none[1])
        return RunState(states, [rows], 0)

    def advance(self, run: RunState, count: int, budget: int) -> RunState:
        """`run`, `count` generations later."""
        states, rows = self._chunk(run.states, run.generation, count, budget)
        rows = jax.tree.map(lambda x: np.asarray(x)[:count], rows)
        return RunState(states, [*run.rows, rows], run.generation + count)

    def _chunk(self, states: State, first: int, count: int, budget: int) -> tuple[State, Row]:
        bounds = (np.int32(first), np.int32(count), np.int32(budget))
        return jax.block_until_ready(
            chunk(self.search, self.problem, states, self.keys, *map(jnp.asarray, bounds))
        )


def run(
    search: AbstractSearch,
    problem: AbstractProblem,
    *,
    budget: int,
    seeds: Sequence[int],
    name: str | None = None,
    time_limit_s: float | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> list[Result]:
    """Spends exactly `budget` evaluations per seed; one result per seed, in order."""
    search.check(problem)
    batch = search.batch_size
    generations = -(-budget // batch)
    name = name or type(search).__name__
    began = time.perf_counter()
    stepper = Simulated(search, problem, seeds)
    state = stepper.begin()
    compiled = time.perf_counter()
    size, per_generation, reason = 1, 0.0, None
    while state.generation < generations:
        count = min(size, generations - state.generation, CHUNK_ROWS)
        before = time.perf_counter()
        state = stepper.advance(state, count, budget)
        now = time.perf_counter()
        per_generation = (now - before) / count
        size = max(1, min(8 * count, int(CHUNK_SECONDS / max(per_generation, 1e-9))))
        if progress is not None:
            progress(
                _progress(name, state, problem, batch, budget, now - compiled, compiled - began)
            )
        if time_limit_s is not None and now - began >= time_limit_s:
            reason = "time limit" if state.generation < generations else None
            break
    seconds = time.perf_counter() - compiled
    return _results(
        search, problem, state, stepper, name, budget, seeds, seconds, compiled - began, reason
    )


def joined(rows: Sequence[Row]) -> Row:
    """The rows of all chunks as one, [G, S]."""
    return jax.tree.map(lambda *parts: np.concatenate(parts), *rows)


def _progress(
    name: str,
    state: RunState,
    problem: AbstractProblem,
    batch: int,
    budget: int,
    seconds: float,
    compile_seconds: float,
) -> Progress:
    last = state.rows[-1]
    cost, feasible = np.asarray(last.best_cost)[-1], np.asarray(last.best_feasible)[-1]
    best = np.where(feasible == feasible.any(), cost, np.inf).min()
    return Progress(
        algorithm=name,
        evaluations=min(state.generation * batch, budget),
        budget=budget,
        best_cost=float(best),
        feasible=bool(feasible.any()),
        reference_cost=float(problem.reference_cost),
        seconds=seconds,
        compile_seconds=compile_seconds,
    )


def _results(
    search: AbstractSearch,
    problem: AbstractProblem,
    state: RunState,
    stepper: Simulated,
    name: str,
    budget: int,
    seeds: Sequence[int],
    seconds: float,
    compile_seconds: float,
    reason: str | None,
) -> list[Result]:
    rows = joined(state.rows)
    done = np.minimum((np.arange(state.generation) + 1) * search.batch_size, budget)
    reference = {k: np.asarray(v) for k, v in problem.reference.items()}
    provenance = {
        "versions": versions(),
        "device": jax.devices()[0].device_kind,
        "problem": problem_identity(problem),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
    best = jax.tree.map(np.asarray, state.states.best)
    results = []
    for s, seed in enumerate(seeds):
        results.append(
            Result(
                decisions={k: v[s] for k, v in best.decisions.items()},
                cost=float(best.cost[s]),
                feasible=bool(best.feasible[s]),
                found_at=int(best.found_at[s]),
                reference=reference,
                reference_cost=float(problem.reference_cost),
                bound=None,
                bound_status=None,
                algorithm=name,
                config=search_identity(search),
                budget=budget,
                evaluations=int(done[-1]) if len(done) else 0,
                failed_measurements=int(stepper.failed[s]),
                seed=int(seed),
                seconds=seconds,
                compile_seconds=compile_seconds,
                history=History(
                    evaluations=done,
                    best_cost=rows.best_cost[:, s],
                    best_feasible=rows.best_feasible[:, s],
                    metrics={k: v[:, s] for k, v in rows.metrics.items()},
                ),
                interrupted=reason,
                provenance=provenance,
            )
        )
    return results
