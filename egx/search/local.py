"""Local search: best-improvement over single moves, then pairs, then a restart nearby.

Iterated local search after Lourenço, Martin and Stützle, "Iterated Local Search", Handbook of
Metaheuristics, 2003. Neighbours come in batches and the best of a batch is taken when it improves.
A pass over all single changes that brings nothing is followed by pair moves (exchanges of two
decisions, and changes that make room for themselves); when these bring nothing either, the search
goes on from its best plan with some decisions drawn anew.
"""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from egx.problems.base import AbstractOutcome, AbstractProblem, Decisions
from egx.search.base import (
    AbstractSearch,
    Metrics,
    Scalar,
    best_index,
    check_numbers,
    check_whole,
    scalar,
)
from egx.search.genome import Genes, Genome, decode, encode
from egx.search.moves import (
    check_start,
    exchange,
    is_better,
    kick,
    make_room,
    neighbour_counts,
    single_move,
    start_genes,
)

SINGLES, PAIRS = 0, 1
FEWEST_KICKED = 3.0


class Place(eqx.Module):
    """Where the search stands, its best plan, and how much of the neighbourhood is done.

    `fruitless` counts neighbours of the current kind since the last improvement.
    """

    genes: Float[Array, " L"]
    cost: Float[Array, ""]
    feasible: Bool[Array, ""]
    best_genes: Float[Array, " L"]
    best_cost: Float[Array, ""]
    best_feasible: Bool[Array, ""]
    kind: Int[Array, ""]
    next_single: Int[Array, ""]
    fruitless: Int[Array, ""]
    restarts: Int[Array, ""]
    order: Int[Array, " L"]
    below: Int[Array, " L"]
    genome: Genome


class Local(AbstractSearch):
    """Iterated local search over single and pair moves.

    With `repair`, neighbours first pass the problem's own repair rule, which for memory placement
    runs the simulator once more for each of them.

    Args:
        kick_rate: share of decisions drawn anew at a restart; three on average at least.
        rooms: share of pair moves that give one decision a value and take it from a few others;
            the rest exchange two.
        leaving: how many others lose the value, on average, beyond the first.
        pairs: pair moves tried before a restart, as a multiple of the number of single moves.
        batch: neighbours evaluated together.
        sideways: also move to a neighbour of equal cost when none of a batch is better.
        start: "random", "zeros" or one of the problem's heuristics.
        repair: pass neighbours through `problem.repair`.
    """

    kick_rate: Scalar = eqx.field(converter=scalar, default=0.05)
    pairs: Scalar = eqx.field(converter=scalar, default=1.0)
    rooms: Scalar = eqx.field(converter=scalar, default=0.7)
    leaving: Scalar = eqx.field(converter=scalar, default=3.0)
    batch: int = eqx.field(static=True, default=16)
    sideways: bool = eqx.field(static=True, default=True)
    start: str = eqx.field(static=True, default="reference")
    repair: bool = eqx.field(static=True, default=False)

    def __check_init__(self) -> None:
        check_whole(self, batch=1)
        check_numbers(
            self, kick_rate="0 to 1", pairs="0 or more", rooms="0 to 1", leaving="0 or more"
        )

    @property
    def batch_size(self) -> int:
        return self.batch

    def check(self, problem: AbstractProblem) -> None:
        check_start(problem, self.start)

    def initial(self, problem: AbstractProblem, *, key: PRNGKeyArray) -> Place:
        start_key, order_key = jax.random.split(key)
        genes = start_genes(problem, self.start, key=start_key, batch=1)[0]
        genome = Genome(problem)
        order, below = _new_order(genome, key=order_key)
        zero = jnp.zeros((), jnp.int32)
        # The first batch evaluates the start itself.
        unknown = jnp.asarray(jnp.inf, jnp.float32)
        no = jnp.zeros((), bool)
        return Place(
            genes, unknown, no, genes, unknown, no, zero, zero, zero, zero, order, below, genome
        )

    def propose(
        self, problem: AbstractProblem, inner: Place, *, key: PRNGKeyArray
    ) -> tuple[Decisions, Place]:
        slots = jnp.arange(self.batch, dtype=jnp.int32)
        keys = jax.vmap(lambda b: jax.random.fold_in(key, b))(slots)

        def neighbour(slot: Int[Array, ""], key: PRNGKeyArray) -> Genes:
            genes = self._neighbour(problem, inner, slot, key=key)
            return jnp.where(jnp.isinf(inner.cost) & (slot == 0), inner.genes, genes)

        genes = jax.vmap(neighbour)(slots, keys)
        return jax.vmap(lambda one: decode(problem, one))(genes), inner

    def _neighbour(
        self, problem: AbstractProblem, inner: Place, slot: Int[Array, ""], *, key: PRNGKeyArray
    ) -> Genes:
        kind_key, move_key, uniform_key = jax.random.split(key, 3)
        genome, genes = inner.genome, inner.genes
        index = jnp.mod(inner.next_single + slot, jnp.maximum(inner.below[-1], 1))
        single = single_move(
            genome, genes, inner.below, inner.order, index, jax.random.uniform(uniform_key)
        )
        swapped = exchange(genome, genes, key=move_key)
        room = make_room(genome, genes, key=move_key, mean=self.leaving)
        pair = jnp.where(jax.random.bernoulli(kind_key, self.rooms), room, swapped)
        genes = jnp.where(inner.kind == SINGLES, single, pair)
        if self.repair:
            genes = encode(problem, problem.repair(decode(problem, genes)))
        return genes

    def update(
        self,
        problem: AbstractProblem,
        inner: Place,
        candidates: Decisions,
        outcomes: AbstractOutcome,
        *,
        key: PRNGKeyArray,
    ) -> tuple[Place, Metrics]:
        index = best_index(outcomes)
        cost, feasible = outcomes.cost[index], outcomes.feasible[index]
        genes = encode(problem, jax.tree.map(lambda x: x[index], candidates))
        improves = is_better(cost, feasible, inner.cost, inner.feasible)
        moves = improves
        if self.sideways:
            moves = moves | ((feasible == inner.feasible) & (cost == inner.cost))
        record = is_better(cost, feasible, inner.best_cost, inner.best_feasible)
        place = eqx.tree_at(
            lambda p: (p.genes, p.cost, p.feasible, p.best_genes, p.best_cost, p.best_feasible),
            inner,
            (
                jnp.where(moves, genes, inner.genes),
                jnp.where(moves, cost, inner.cost),
                jnp.where(moves, feasible, inner.feasible),
                jnp.where(record, genes, inner.best_genes),
                jnp.where(record, cost, inner.best_cost),
                jnp.where(record, feasible, inner.best_feasible),
            ),
        )
        place = self._next_kind(place, improves, key=key)
        return place, {
            "current_cost": place.cost,
            "restarts": place.restarts.astype(jnp.float32),
        }

    def _next_kind(self, place: Place, improves: Bool[Array, ""], *, key: PRNGKeyArray) -> Place:
        """Single moves while they help, then pairs, then a restart; after any improvement,
        single moves again."""
        kick_key, order_key = jax.random.split(key)
        singles = jnp.maximum(place.below[-1], 1)
        fruitless = jnp.where(improves, 0, place.fruitless + self.batch)
        limit = jnp.where(
            place.kind == SINGLES,
            singles,
            jnp.maximum(self.pairs * singles.astype(jnp.float32), 1.0).astype(jnp.int32),
        )
        exhausted = fruitless >= limit
        restart = exhausted & (place.kind == PAIRS)
        kind = jnp.where(improves | restart, SINGLES, jnp.where(exhausted, PAIRS, place.kind))
        order, below = _new_order(place.genome, key=order_key)
        active = jnp.maximum(place.genome.active_count, 1).astype(jnp.float32)
        rate = jnp.maximum(self.kick_rate, FEWEST_KICKED / active)
        kicked = kick(place.genome, place.best_genes, key=kick_key, rate=rate)
        return eqx.tree_at(
            lambda p: (
                p.genes, p.cost, p.feasible, p.kind, p.next_single, p.fruitless, p.restarts,
                p.order, p.below,
            ),
            place,
            (
                jnp.where(restart, kicked, place.genes),
                jnp.where(restart, jnp.inf, place.cost),
                jnp.where(restart, False, place.feasible),
                kind.astype(jnp.int32),
                jnp.where(restart, 0, jnp.mod(place.next_single + self.batch, singles)),
                jnp.where(exhausted, 0, fruitless),
                place.restarts + restart.astype(jnp.int32),
                jnp.where(restart, order, place.order),
                jnp.where(restart, below, place.below),
            ),
        )  # fmt: skip


def _new_order(genome: Genome, *, key: PRNGKeyArray) -> tuple[Int[Array, " L"], Int[Array, " L"]]:
    """A random order of the entries, and the running sum of their single moves in it."""
    order = jnp.argsort(jax.random.uniform(key, genome.head.shape)).astype(jnp.int32)
    below = jnp.cumsum(neighbour_counts(genome).astype(jnp.int32)[order])
    return order, below
