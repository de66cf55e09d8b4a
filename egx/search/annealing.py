"""Simulated annealing on small moves.

Kirkpatrick, Gelatt and Vecchi, "Optimization by Simulated Annealing", Science 220, 1983. Chains
run side by side and every proposal of every chain counts. The temperature falls geometrically
over the budget, in units of the starting plan's mean cost per active decision, so that one
schedule serves graphs of any size.
"""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from egx.problems.base import AbstractOutcome, AbstractProblem, Decisions
from egx.search.base import AbstractSearch, Metrics, Scalar, check_numbers, check_whole, scalar
from egx.search.genome import Genes, Genome, decode, encode
from egx.search.moves import check_start, exchange, make_room, shift_one, start_genes


class Chains(eqx.Module):
    """Where each chain stands; a chain without an evaluated place has infinite cost."""

    genes: Float[Array, "B L"]
    cost: Float[Array, " B"]
    feasible: Bool[Array, " B"]
    told: Int[Array, ""]
    genome: Genome


class Annealing(AbstractSearch):
    """Metropolis chains on single changes, exchanges, and changes that make room for themselves.

    A chain never moves from a feasible to an infeasible plan; between infeasible ones it moves by
    cost. With `repair`, proposals first pass the problem's own repair rule, which for memory
    placement runs the simulator once more for each proposal.

    Args:
        budget: evaluations the run will spend, for the schedule.
        first_temperature: temperature at the start, in units of mean cost per active decision.
        last_temperature: the same at the end.
        rooms: share of moves that give one decision a value and take it from a few others.
        swaps: share of moves that exchange two decisions; the rest change one.
        leaving: how many others lose the value, on average, beyond the first.
        chains: chains side by side, the batch.
        start: "random", "zeros" or one of the problem's heuristics.
        repair: pass proposals through `problem.repair`.
    """

    budget: Scalar = eqx.field(converter=scalar, default=4000.0)
    first_temperature: Scalar = eqx.field(converter=scalar, default=2.0)
    last_temperature: Scalar = eqx.field(converter=scalar, default=0.03)
    rooms: Scalar = eqx.field(converter=scalar, default=0.6)
    swaps: Scalar = eqx.field(converter=scalar, default=0.2)
    leaving: Scalar = eqx.field(converter=scalar, default=3.0)
    chains: int = eqx.field(static=True, default=1)
    start: str = eqx.field(static=True, default="reference")
    repair: bool = eqx.field(static=True, default=False)

    def __check_init__(self) -> None:
        check_whole(self, chains=1)
        check_numbers(
            self,
            budget="above 0",
            first_temperature="above 0",
            last_temperature="above 0",
            rooms="0 to 1",
            swaps="0 to 1",
            leaving="0 or more",
        )

    @property
    def batch_size(self) -> int:
        return self.chains

    def check(self, problem: AbstractProblem) -> None:
        check_start(problem, self.start)

    def initial(self, problem: AbstractProblem, *, key: PRNGKeyArray) -> Chains:
        genes = start_genes(problem, self.start, key=key, batch=self.chains)
        return Chains(
            genes,
            jnp.full(self.chains, jnp.inf, jnp.float32),
            jnp.zeros(self.chains, bool),
            jnp.zeros((), jnp.int32),
            Genome(problem),
        )

    def propose(
        self, problem: AbstractProblem, inner: Chains, *, key: PRNGKeyArray
    ) -> tuple[Decisions, Chains]:
        keys = jax.vmap(lambda b: jax.random.fold_in(key, b))(jnp.arange(self.chains))
        moved = jax.vmap(lambda genes, key: self._move(problem, inner.genome, genes, key=key))(
            inner.genes, keys
        )
        genes = jnp.where(inner.told > 0, moved, inner.genes)
        return jax.vmap(lambda one: decode(problem, one))(genes), inner

    def _move(
        self, problem: AbstractProblem, genome: Genome, genes: Genes, *, key: PRNGKeyArray
    ) -> Genes:
        kind_key, move_key = jax.random.split(key)
        single = shift_one(genome, genes, key=move_key)
        swap = exchange(genome, genes, key=move_key)
        room = make_room(genome, genes, key=move_key, mean=self.leaving)
        drawn = jax.random.uniform(kind_key)
        moved = jnp.where(drawn < self.rooms + self.swaps, swap, single)
        moved = jnp.where(drawn < self.rooms, room, moved)
        # Without two entries that differ there is nothing to exchange.
        moved = jnp.where(jnp.all(moved == genes), single, moved)
        if self.repair:
            moved = encode(problem, problem.repair(decode(problem, moved)))
        return moved

    def update(
        self,
        problem: AbstractProblem,
        inner: Chains,
        candidates: Decisions,
        outcomes: AbstractOutcome,
        *,
        key: PRNGKeyArray,
    ) -> tuple[Chains, Metrics]:
        temperature = self.temperature(problem, inner)
        rise = outcomes.cost - inner.cost
        chance = jnp.exp(-jnp.maximum(rise, 0.0) / temperature)
        keys = jax.vmap(lambda b: jax.random.fold_in(key, b))(jnp.arange(self.chains))
        drawn = jax.vmap(jax.random.uniform)(keys)
        same = outcomes.feasible == inner.feasible
        accepted = jnp.where(same, drawn < chance, outcomes.feasible) | jnp.isinf(inner.cost)
        genes = jax.vmap(lambda one: encode(problem, one))(candidates)
        chains = Chains(
            jnp.where(accepted[:, None], genes, inner.genes),
            jnp.where(accepted, outcomes.cost, inner.cost),
            jnp.where(accepted, outcomes.feasible, inner.feasible),
            inner.told + self.chains,
            inner.genome,
        )
        return chains, {
            "temperature_s": temperature,
            "accepted": jnp.mean(accepted.astype(jnp.float32)),
        }

    def temperature(self, problem: AbstractProblem, inner: Chains) -> Float[Array, ""]:
        """In units of the cost."""
        progress = jnp.clip(inner.told.astype(jnp.float32) / self.budget, 0.0, 1.0)
        cooling = (self.last_temperature / self.first_temperature) ** progress
        active = jnp.maximum(inner.genome.active_count, 1).astype(jnp.float32)
        scale = problem.reference_cost / active
        return jnp.maximum(self.first_temperature * cooling * scale, jnp.finfo(jnp.float32).tiny)
