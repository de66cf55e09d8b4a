"""One generation, and a compiled chunk of them: ask, evaluate, tell.

Keys derive from the generation's index, so that results depend neither on how generations are cut
into chunks nor on where a run was resumed. Budget, bounds and keys are traced: only another
searcher or another padded shape compiles.

Shapes: S seeds, B candidates per generation, K rows of a chunk, G generations of a run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int, Key, PRNGKeyArray

from egx.problems.base import AbstractOutcome, AbstractProblem, Decisions
from egx.search.base import AbstractSearch, State
from egx.training.devices import population_map

CHUNK_ROWS = 512
WORST_COST = float(np.finfo(np.float32).max)
WORST_REWARD = -2.0


class Row(eqx.Module):
    """What is kept of a generation; leading axes are [S] for one, [K, S] or [G, S] for many."""

    evaluations: Int[Array | np.ndarray, "*rows"]
    best_cost: Float[Array | np.ndarray, "*rows"]
    best_feasible: Bool[Array | np.ndarray, "*rows"]
    metrics: Mapping[str, Float[Array | np.ndarray, "*rows"]]


def concrete(tree: Any) -> Any:
    """The same tree with NumPy arrays and float leaves as JAX arrays, which `eqx.filter_jit`
    traces: a swept hyper-parameter compiles nothing. Whole numbers stay, for they may be sizes."""

    def convert(leaf: Any) -> Any:
        if isinstance(leaf, float):
            return jnp.asarray(leaf, jnp.float32)
        return jnp.asarray(leaf) if isinstance(leaf, np.ndarray | np.generic) else leaf

    return jax.tree.map(convert, tree)


def make_keys(seeds: Sequence[int]) -> Key[Array, " S"]:
    """One key a seed, [S]."""
    return jax.vmap(jax.random.key)(jnp.asarray(np.asarray(seeds, np.uint32)))


def init_key(key: PRNGKeyArray) -> PRNGKeyArray:
    """The key of `search.init`."""
    return jax.random.fold_in(key, 0)


def generation_keys(key: PRNGKeyArray, generation: Int[Array, ""]) -> Key[Array, " 2"]:
    """The keys of ask and tell, [2]."""
    return jax.random.split(jax.random.fold_in(key, generation + 1))


def settle(outcomes: AbstractOutcome, counted: Bool[Array, " B"]) -> AbstractOutcome:
    """Outcomes as searchers may see them: those that do not count, and costs that are not finite
    (a problem that breaks its promise), are infeasible and can never become the incumbent."""
    sound = counted & jnp.isfinite(outcomes.cost)
    return eqx.tree_at(
        lambda o: (o.cost, o.feasible, o.reward),
        outcomes,
        (
            jnp.where(sound, outcomes.cost, WORST_COST),
            outcomes.feasible & sound,
            jnp.where(sound & jnp.isfinite(outcomes.reward), outcomes.reward, WORST_REWARD),
        ),
    )


def evaluate_population(
    problem: AbstractProblem, candidates: Decisions, mesh: Mesh | None = None
) -> AbstractOutcome:
    """Values B candidates, spread over the mesh if there is one."""
    return population_map(lambda problem, one: problem.evaluate(one), mesh)(problem, candidates)


def tell(
    search: AbstractSearch,
    problem: AbstractProblem,
    state: State,
    candidates: Decisions,
    outcomes: AbstractOutcome,
    counted: Bool[Array, " B"],
    key: PRNGKeyArray,
) -> tuple[State, Row]:
    """Hands outcomes to the searcher; the state counts exactly the evaluations that count."""
    before = state.evaluations
    state, metrics = search.tell(problem, state, candidates, settle(outcomes, counted), key=key)
    evaluations = before + jnp.sum(counted.astype(jnp.int32))
    state = eqx.tree_at(lambda s: s.evaluations, state, evaluations)
    return state, Row(evaluations, state.best.cost, state.best.feasible, metrics)


def _strong(leaf: Any) -> Any:
    # A weakly typed leaf would become strong in the first chunk and make the second one compile.
    if eqx.is_array(leaf) and not jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.lax.convert_element_type(leaf, leaf.dtype)
    return leaf


def replicate(tree: Any, mesh: Mesh | None) -> Any:
    """The same tree on every device of the mesh, so that all chunks see one placement."""
    if mesh is None:
        return tree
    everywhere = NamedSharding(mesh, PartitionSpec())
    return jax.tree.map(lambda x: jax.device_put(x, everywhere) if eqx.is_array(x) else x, tree)


@eqx.filter_jit
def start(search: AbstractSearch, problem: AbstractProblem, keys: Key[Array, " S"]) -> State:
    """States before the first generation, [S, ...]."""
    states = eqx.filter_vmap(lambda key: search.init(problem, key=init_key(key)))(keys)
    return jax.tree.map(_strong, states)


@eqx.filter_jit
def chunk(
    search: AbstractSearch,
    problem: AbstractProblem,
    states: State,
    keys: Key[Array, " S"],
    bounds: tuple[Int[Array, ""], Int[Array, ""], Int[Array, ""]],
    mesh: Mesh | None,
) -> tuple[State, Row]:
    """Runs all seeds for a while; `bounds` are the first generation, how many (at most K), and
    the budget. Rows [K, S], of which only those of generations that ran hold anything."""
    first, count, budget = bounds
    dynamic, static = eqx.partition(states, eqx.is_array)
    batch = search.batch_size

    def single(dynamic: Any, key: PRNGKeyArray, index: Int[Array, ""]) -> tuple[Any, Row]:
        ask_key, tell_key = generation_keys(key, index)
        state = eqx.combine(dynamic, static)
        candidates, state = search.ask(problem, state, key=ask_key)
        outcomes = evaluate_population(problem, candidates, mesh)
        counted = index * batch + jnp.arange(batch) < budget
        state, row = tell(search, problem, state, candidates, outcomes, counted, tell_key)
        return eqx.filter(state, eqx.is_array), row

    def generation(dynamic: Any, index: Int[Array, ""]) -> tuple[Any, Row]:
        return jax.vmap(single, in_axes=(0, 0, None))(dynamic, keys, index)

    _, shapes = jax.eval_shape(generation, dynamic, first)
    rows = jax.tree.map(lambda x: jnp.zeros((CHUNK_ROWS, *x.shape), x.dtype), shapes)

    def body(step: Int[Array, ""], carry: tuple[Any, Row]) -> tuple[Any, Row]:
        dynamic, rows = carry
        dynamic, row = generation(dynamic, first + step)
        return dynamic, jax.tree.map(lambda every, new: every.at[step].set(new), rows, row)

    dynamic, rows = replicate(jax.lax.fori_loop(0, count, body, (dynamic, rows)), mesh)
    return eqx.combine(dynamic, static), rows


@eqx.filter_jit
def ask_all(
    search: AbstractSearch,
    problem: AbstractProblem,
    states: State,
    keys: Key[Array, " S"],
    index: Int[Array, ""],
) -> tuple[Decisions, State]:
    """Candidates [S, B, ...] of one generation, for an evaluation outside the program."""

    def single(state: State, key: PRNGKeyArray) -> tuple[Decisions, State]:
        return search.ask(problem, state, key=generation_keys(key, index)[0])

    return eqx.filter_vmap(single)(states, keys)


@eqx.filter_jit
def tell_all(
    search: AbstractSearch,
    problem: AbstractProblem,
    states: State,
    candidates: Decisions,
    costs: Float[Array, "S B"],
    failed: Bool[Array, "S B"],
    counted: Bool[Array, "S B"],
    keys: Key[Array, " S"],
    index: Int[Array, ""],
) -> tuple[State, Row]:
    """Hands measured costs to the searchers; row [S]."""
    worst = problem.failed()

    def outcome(cost: Float[Array, ""], failed: Bool[Array, ""]) -> AbstractOutcome:
        return jax.tree.map(
            lambda bad, good: jnp.where(failed, bad, good), worst, problem.measured(cost)
        )

    def single(state, candidates, costs, failed, counted, key):  # type: ignore[no-untyped-def]
        outcomes = jax.vmap(outcome)(costs, failed)
        tell_key = generation_keys(key, index)[1]
        return tell(search, problem, state, candidates, outcomes, counted, tell_key)

    return eqx.filter_vmap(single)(states, candidates, costs, failed, counted, keys)
