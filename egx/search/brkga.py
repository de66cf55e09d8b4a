"""BRKGA: a genetic algorithm on random keys whose children take after an elite parent.

J. F. Gonçalves and M. G. C. Resende, "Biased random-key genetic algorithms for combinatorial
optimization", Journal of Heuristics 17, 2011; with the parameters, the proposal distributions and
the ranking of REGAL (Paliwal et al., ICLR 2020, arXiv 1905.02494).

Shapes: P population, E elites, B candidates of an ask, W keys of a candidate, K knots of a
proposal's quantile functions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from egx.errors import SearchError
from egx.problems.base import AbstractOutcome, AbstractProblem, Decisions, check_decisions
from egx.search.base import AbstractSearch, Incumbent, Metrics, State, check_numbers, scalar
from egx.search.betas import Betas, draw, quantile_knots
from egx.search.keys import decode_flat, encode, flatten, gene_shapes, uniform_keys

EVERY = "all"

# Names of heuristics, or decisions.
Seeds = tuple[Any, ...]

# Distributions of keys, or their quantile functions: `quantile_knots` of them, [W, K].
Proposal = Betas | Array


def _seeds(value: Any) -> Seeds:
    if isinstance(value, str):
        return (value,)
    return (dict(value),) if isinstance(value, Mapping) else tuple(value or ())


def _rho(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: jnp.asarray(entry, jnp.float32) for name, entry in value.items()}
    return scalar(value)


def rank(cost: Float[Array, " P"], feasible: Bool[Array, " P"]) -> Int[Array, " P"]:
    """Members from best to worst: feasible first, then by cost, then the earlier one."""
    index = jnp.arange(cost.shape[0], dtype=jnp.int32)
    infeasible = (~feasible).astype(jnp.int32)
    return jax.lax.sort((infeasible, cost, index), num_keys=2, is_stable=True)[2]


def breed(
    keys: Float[Array, "P W"],
    order: Int[Array, " P"],
    uniform: Float[Array, "B W+2"],
    *,
    elites: int,
    mutants: int,
    rho: Float[Array, "..."],
    knots: Float[Array, "W K"] | None = None,
) -> Float[Array, "B W"]:
    """B - `mutants` children, then the mutants, from one uniform number in [0, 1) a key.

    A child has one elite parent and one of the others, which the last two numbers of its row
    choose; it takes each key from the elite one where the key's number is below `rho`.
    """
    size = keys.shape[1]
    others, children = keys.shape[0] - elites, uniform.shape[0] - mutants
    pick = uniform[:children, size:] * jnp.asarray([elites, others], jnp.float32)
    # A number just below 1 may round up to the count itself.
    which = jnp.minimum(pick.astype(jnp.int32), jnp.asarray([elites - 1, others - 1], jnp.int32))
    above, below = keys[order[which[:, 0]]], keys[order[elites + which[:, 1]]]
    bred = jnp.where(uniform[:children, :size] < rho, above, below)
    fresh = uniform[children:, :size]
    return jnp.concatenate([bred, fresh if knots is None else draw(knots, fresh)])


class Population(eqx.Module):
    """The members, elites first once there are any, and what is known of them.

    Members from `next` on wait for their evaluation. `rho` and `knots` are the problem's:
    inheritance, and the proposal's quantiles.
    """

    keys: Float[Array, "P W"]
    cost: Float[Array, " P"]
    feasible: Bool[Array, " P"]
    next: Int[Array, ""]
    rho: Float[Array, "..."]
    knots: Float[Array, "W K"] | None


class BRKGA(AbstractSearch):
    """The biased random-key genetic algorithm, on any problem.

    Elites are not evaluated again: a generation costs `population - elites` evaluations, which is
    the batch. The first population is no multiple of that, so what is left over of it takes part
    unevaluated, as if it were the worst. With a smaller `batch` that divides the population too,
    such as 20, the whole first population is evaluated over several asks.

    Args:
        rho: probability that a child's key comes from its elite parent; a number, or `Keys`.
        proposal: distributions of mutants and of the first population; None is uniform.
        seeds: plans that the first population starts with: names of the problem's heuristics,
            "all" for all of them, or decisions.
        population: members.
        elites: members that live on.
        mutants: fresh members of a generation.
        batch: candidates per `ask`, a divisor of `population - elites`; None for all of them.
    """

    rho: Any = eqx.field(converter=_rho, default=0.7)
    proposal: Betas | None = None
    seeds: Any = eqx.field(converter=_seeds, default=())
    population: int = eqx.field(static=True, default=100)
    elites: int = eqx.field(static=True, default=20)
    mutants: int = eqx.field(static=True, default=15)
    batch: int | None = eqx.field(static=True, default=None)

    @property
    def batch_size(self) -> int:
        return self.population - self.elites if self.batch is None else self.batch

    @property
    def first(self) -> int:
        """The first member of the first population that is evaluated."""
        if self.batch_size == self.population - self.elites:
            return self.elites
        return self.population % self.batch_size

    def check(self, problem: AbstractProblem) -> None:
        for name in ("population", "elites", "mutants"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise SearchError(f"brkga: {name} must be a whole number, got {value!r}")
        if not 1 <= self.elites < self.population:
            raise SearchError(
                f"brkga: elites must be 1 to {self.population - 1} (population - 1), "
                f"got {self.elites}"
            )
        fresh = self.population - self.elites
        if not 0 <= self.mutants <= fresh:
            raise SearchError(
                f"brkga: mutants must be 0 to {fresh} (population - elites), got {self.mutants}"
            )
        if self.batch is not None and (self.batch < 1 or fresh % self.batch):
            raise SearchError(
                f"brkga: batch must divide the {fresh} evaluations of a generation "
                f"(population - elites), got {self.batch}"
            )
        self._check_shapes(problem)
        count, room = seed_count(problem, self.seeds), self.population - self.first
        if count > room:
            raise SearchError(
                f"brkga: {count} seeds, but only {room} of the first population are evaluated"
            )

    def _check_shapes(self, problem: AbstractProblem) -> None:
        shapes = gene_shapes(problem)
        given: dict[str, Mapping[str, Array]] = {}
        if self.proposal is not None:
            given |= {"proposal.alpha": self.proposal.alpha, "proposal.beta": self.proposal.beta}
        if isinstance(self.rho, Mapping):
            given["rho"] = self.rho
        else:
            check_numbers(self, rho="0 to 1")
        for name, keys in given.items():
            found = {head: np.shape(value) for head, value in keys.items()}
            if found != shapes:
                raise SearchError(f"brkga: {name} must have keys of shapes {shapes}, got {found}")

    def initial(self, problem: AbstractProblem, *, key: PRNGKeyArray) -> Population:
        return self.begin(problem, key=key)

    def begin(
        self,
        problem: AbstractProblem,
        *,
        key: PRNGKeyArray,
        proposal: Proposal | None = None,
        rho: Any = None,
    ) -> Population:
        """The first population; `proposal` and `rho` stand in for the searcher's own, for
        policies that choose them for a problem."""
        proposal = self.proposal if proposal is None else proposal
        rho = self.rho if rho is None else _rho(rho)
        keys = uniform_keys(problem, key=key, batch=self.population)
        knots = quantile_knots(problem, proposal) if isinstance(proposal, Betas) else proposal
        if knots is not None:
            keys = draw(knots, keys)
        for row, plan in enumerate(seed_plans(problem, self.seeds), self.first):
            keys = keys.at[row].set(flatten(problem, encode(problem, plan)))
        return Population(
            keys,
            jnp.full(self.population, jnp.inf, jnp.float32),
            jnp.zeros(self.population, bool),
            jnp.asarray(self.first, jnp.int32),
            flatten(problem, rho) if isinstance(rho, Mapping) else jnp.asarray(rho, jnp.float32),
            knots,
        )

    def propose(
        self, problem: AbstractProblem, inner: Population, *, key: PRNGKeyArray
    ) -> tuple[Decisions, Population]:
        if self.batch_size == self.population - self.elites:
            waiting = inner.keys[self.elites :]
        else:
            waiting = jax.lax.dynamic_slice_in_dim(inner.keys, inner.next, self.batch_size)
        return jax.vmap(lambda keys: decode_flat(problem, keys))(waiting), inner

    def update(
        self,
        problem: AbstractProblem,
        inner: Population,
        candidates: Decisions,
        outcomes: AbstractOutcome,
        *,
        key: PRNGKeyArray,
    ) -> tuple[Population, Metrics]:
        size = self.batch_size
        told = eqx.tree_at(
            lambda p: (p.cost, p.feasible, p.next),
            inner,
            (
                jax.lax.dynamic_update_slice_in_dim(inner.cost, outcomes.cost, inner.next, 0),
                jax.lax.dynamic_update_slice_in_dim(
                    inner.feasible, outcomes.feasible, inner.next, 0
                ),
                inner.next + size,
            ),
        )
        order = rank(told.cost, told.feasible)
        after = self._next_generation(told, order, key=key)
        if size < self.population - self.elites:
            complete = told.next >= self.population
            after = jax.tree.map(lambda new, old: jnp.where(complete, new, old), after, told)
        worst = jnp.minimum(told.cost[order[self.elites - 1]], jnp.finfo(jnp.float32).max)
        return after, {
            "worst_elite_cost": worst,
            "feasible_share": jnp.mean(outcomes.feasible.astype(jnp.float32)),
        }

    def _next_generation(
        self, told: Population, order: Int[Array, " P"], *, key: PRNGKeyArray
    ) -> Population:
        fresh, size = self.population - self.elites, told.keys.shape[1]
        uniform = jax.random.uniform(key, (fresh, size + 2), jnp.float32)
        bred = breed(
            told.keys,
            order,
            uniform,
            elites=self.elites,
            mutants=self.mutants,
            rho=told.rho,
            knots=told.knots,
        )
        elite = order[: self.elites]
        return Population(
            jnp.concatenate([told.keys[elite], bred]),
            jnp.concatenate([told.cost[elite], jnp.full(fresh, jnp.inf, jnp.float32)]),
            jnp.concatenate([told.feasible[elite], jnp.zeros(fresh, bool)]),
            jnp.asarray(self.elites, jnp.int32),
            told.rho,
            told.knots,
        )


def seed_plans(problem: AbstractProblem, seeds: Seeds) -> list[Decisions]:
    """The plans that `seeds` name or are.

    Raises:
        SearchError: for a name that is no heuristic of the problem.
        DecisionError: for a plan that is none of this problem.
    """
    named = _named_seeds(problem, seeds)
    known = problem.heuristics() if named else {}
    return [known[seed] if isinstance(seed, str) else seed for seed in named]


def seed_count(problem: AbstractProblem, seeds: Seeds) -> int:
    """How many plans `seeds` name or are; makes none of them."""
    return len(_named_seeds(problem, seeds))


def _named_seeds(problem: AbstractProblem, seeds: Seeds) -> list[Any]:
    """`seeds` with all names in the place of "all"; makes no plan."""
    if not seeds:
        return []
    known = tuple(problem.heuristics())
    named: list[Any] = []
    for seed in seeds:
        if isinstance(seed, str):
            if seed != EVERY and seed not in known:
                raise SearchError(f"seeds must be among {', '.join((*known, EVERY))}, got {seed!r}")
            named += known if seed == EVERY else (seed,)
        else:
            named.append(check_decisions(problem, seed))
    return named


def brkga_seeded(**options: Any) -> BRKGA:
    """BRKGA whose first population holds all heuristic plans of the problem."""
    return BRKGA(**{"seeds": EVERY, **options})


def evolve(
    search: BRKGA,
    problem: AbstractProblem,
    *,
    budget: int | Int[Array, ""],
    key: PRNGKeyArray,
    proposal: Proposal | None = None,
    rho: Any = None,
) -> Incumbent:
    """The best of exactly `budget` evaluations on the simulator, as one pure function to vmap and
    to train with; `proposal` and `rho` are as in `BRKGA.begin`."""
    init_key, run_key = jax.random.split(key)
    inner = search.begin(problem, key=init_key, proposal=proposal, rho=rho)
    start = search.init(problem, key=init_key)
    state = State(inner, start.best, start.evaluations)
    budget, batch = jnp.asarray(budget, jnp.int32), search.batch_size

    def generation(index: Int[Array, ""], state: State) -> State:
        key = jax.random.fold_in(run_key, index)
        candidates, state = search.ask(problem, state, key=key)
        outcomes = jax.vmap(problem.evaluate)(candidates)
        counted = index * batch + jnp.arange(batch, dtype=jnp.int32) < budget
        outcomes = eqx.tree_at(
            lambda o: (o.cost, o.feasible),
            outcomes,
            (
                jnp.where(counted, outcomes.cost, jnp.finfo(jnp.float32).max),
                outcomes.feasible & counted,
            ),
        )
        return search.tell(problem, state, candidates, outcomes, key=key)[0]

    generations = (budget + batch - 1) // batch
    return search.incumbent(jax.lax.fori_loop(0, generations, generation, state))
