"""GO+: what serves a user best under GO's budget. Ours; not a published method.

The islands of EGRL+ start from all heuristic plans and from the policy's likeliest one, each of
which is evaluated, so that none of them is better than the result. A network imitates the best
plans so far, and some children take part of their decisions from it: what good plans agree on, and
what a trained policy knew before, is tried where they differ. Beside them small graph networks
evolve as EGRL's do: what one of them decides is coherent over the whole graph, which changes of
single decisions hardly ever are, and the islands refine what it finds.

Shapes: B children of an ask, Q guided ones, E of evolved networks, K elites of an island, L entries
of a candidate, N ops.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from egx.errors import SearchError
from egx.policies.base import head_choices
from egx.policies.distributions import Levels, Logits, greedy, sample, to_decisions, to_levels
from egx.policies.go_inputs import GoContext
from egx.policies.go_net import GoPolicy
from egx.problems.base import AbstractOutcome, AbstractProblem, Decisions
from egx.search.base import AbstractSearch, Metrics, Scalar, check_numbers, check_whole, scalar
from egx.search.egrl import EGRL, EGRLState
from egx.search.egrl_plus import EGRLPlus, Islands
from egx.search.genome import decode, encode
from egx.search.go import Go
from egx.search.ppo import Learner, imitate, new_learner

# The island of known plans: see `EGRLPlus`.
HOME = 2
# After this share of the budget networks must be within this factor of the best plan.
PROBATION, NEAR = 0.25, 1.25


class GoPlusState(eqx.Module):
    """The islands, the network that imitates their best, the networks that evolve, and the least
    cost that one of these came to (infinite where none fits)."""

    islands: Islands
    context: GoContext
    learner: Learner
    evolved: EGRLState | None
    network_cost: Float[Array, ""]


def _networks() -> EGRL:
    """Networks alone, small enough that eight of them cost less than valuing their plans."""
    return EGRL(policy_gradient=False, boltzmann_share=0.0, width=64, depth=3)


class GoPlus(AbstractSearch):
    """Islands of plans, and a network that learns what the best have in common.

    Args:
        search: the islands; their budget is given by this searcher. Their `plans` are plans to
            start from besides the problem's own, such as a partitioner's or those of another run.
        go: the network, and how fast it learns (`go.ppo`'s learning rate and largest gradient).
        budget: evaluations that the run will spend; sets the halving times of the islands.
        policy: a trained policy to start from.
        networks: how networks evolve; `evolved` is the size of their population.
        guided: children of an ask that take a part of their decisions from the network.
        evolved: children of an ask that are plans of evolved networks, until these fall behind;
            0 for none.
    """

    search: EGRLPlus = eqx.field(default_factory=EGRLPlus)
    go: Go = eqx.field(default_factory=Go)
    budget: Scalar = eqx.field(converter=scalar, default=4000.0)
    policy: GoPolicy | None = None
    networks: EGRL = eqx.field(default_factory=_networks)
    guided: int = eqx.field(static=True, default=4)
    evolved: int = eqx.field(static=True, default=8)

    def __check_init__(self) -> None:
        check_whole(self, guided=0, evolved=0)
        check_numbers(self, budget="above 0")
        if self.evolved == 1:
            raise SearchError("evolved must be 0, or 2 or more networks that compete, got 1")
        networks = self.networks
        if not isinstance(networks, EGRL) or networks.policy_gradient or networks.boltzmann_share:
            raise SearchError("networks must be an EGRL without policy_gradient and chromosomes")

    @property
    def batch_size(self) -> int:
        return self.search.batch_size

    def _engine(self, problem: AbstractProblem) -> EGRLPlus:
        """The islands, each with room for all known plans."""
        elites = max(self.search.elites, self._known(problem))
        return dataclasses.replace(self.search, budget=self.budget, elites=elites)

    def _known(self, problem: AbstractProblem) -> int:
        """Plans to start from: the problem's, those given and the policy's."""
        plans = self.search.plans
        given = 0 if plans is None else next(iter(plans.values())).shape[0]
        return len(problem.heuristics()) + given + 1

    @property
    def _go(self) -> Go:
        return self.go if self.policy is None else dataclasses.replace(self.go, policy=self.policy)

    @property
    def _evolver(self) -> EGRL:
        evolution = self.networks.evolution
        elites = min(evolution.elites, self.evolved - 1)
        evolution = dataclasses.replace(evolution, size=self.evolved, elites=elites)
        return dataclasses.replace(self.networks, evolution=evolution)

    def check(self, problem: AbstractProblem) -> None:
        if self.guided + self.evolved > self.batch_size:
            raise SearchError(
                f"go_plus: guided and evolved must be at most {self.batch_size} (search.batch) "
                f"together, got {self.guided} and {self.evolved}"
            )
        if not self.search.heuristic_seeds:
            raise SearchError("go_plus starts from the problem's plans: heuristic_seeds must be on")
        self.search.check(problem)
        plans = self._known(problem)
        if plans > self.batch_size:
            raise SearchError(
                f"go_plus: {plans} plans to start from, but search.batch is {self.batch_size}"
            )
        self._go.check(problem)
        if self.evolved:
            self._evolver.check(problem)

    def initial(self, problem: AbstractProblem, *, key: PRNGKeyArray) -> GoPlusState:
        islands_key, policy_key, network_key = jax.random.split(key, 3)
        policy = self._go.start_policy(problem, key=policy_key)
        context = policy.context(problem)
        logits = policy.logits(context)
        likeliest = _decisions(problem, logits, greedy(logits))
        plans = jax.tree.map(lambda x: x[None], likeliest)
        if self.search.plans is not None:
            plans = jax.tree.map(lambda *x: jnp.concatenate(x), dict(self.search.plans), plans)
        engine = dataclasses.replace(self._engine(problem), plans=plans)
        islands = engine.initial(problem, key=islands_key)
        evolved = self._evolver.initial(problem, key=network_key) if self.evolved else None
        nothing = jnp.asarray(jnp.inf, jnp.float32)
        return GoPlusState(islands, context, new_learner(policy), evolved, nothing)

    def propose(
        self, problem: AbstractProblem, inner: GoPlusState, *, key: PRNGKeyArray
    ) -> tuple[Decisions, GoPlusState]:
        children_key, guided_key, network_key = jax.random.split(key, 3)
        children, islands = self._engine(problem).propose(problem, inner.islands, key=children_key)
        first, evolves = islands.told == 0, self._evolves(inner)
        island = islands.child_island
        # All known plans as they are; the rest of the first batch is what the islands make of it.
        known = self._known(problem)
        slot = jnp.arange(self.batch_size)
        starts = islands.elites.genes[HOME, jnp.minimum(slot, known - 1)]
        start = jax.vmap(lambda genes: decode(problem, genes))(starts)
        guided = self._guided(problem, inner, islands, key=guided_key)
        is_start = first & (slot < known)
        evolved, plans = inner.evolved, jax.tree.map(lambda x: x[:0], guided)
        if evolved is not None:
            plans, evolved = self._evolver.propose(problem, evolved, key=network_key)

        def pick(child: Array, start: Array, guided: Array, plan: Array) -> Array:
            """[B, ...]; where networks fell behind, their slots stay with the islands."""
            others = child[: self.batch_size - self.guided - self.evolved]
            own = child[self.batch_size - self.evolved :]
            taught = jnp.concatenate([others, guided, jnp.where(evolves, plan, own)])
            return jnp.where(is_start[:, None], start, jnp.where(first, child, taught))

        candidates = jax.tree.map(pick, children, start, guided, plans)
        island = jnp.where(is_start, HOME, island).astype(jnp.int32)
        islands = eqx.tree_at(lambda i: i.child_island, islands, island)
        return candidates, GoPlusState(
            islands, inner.context, inner.learner, evolved, inner.network_cost
        )

    def _evolves(self, inner: GoPlusState) -> Array:
        """Whether networks have their share of the next ask: not of the first, which is for known
        plans, and after a time only where they keep up."""
        elites, told = inner.islands.elites, inner.islands.told
        best = jnp.min(jnp.where(elites.feasible, elites.cost, jnp.inf))
        early = told.astype(jnp.float32) < PROBATION * self.budget
        return (told > 0) & (early | (inner.network_cost <= NEAR * best))

    def _guided(
        self, problem: AbstractProblem, inner: GoPlusState, islands: Islands, *, key: PRNGKeyArray
    ) -> Decisions:
        """[Q, ...]; a good plan of the child's island, of which a random share of the entries
        takes what the network draws."""
        logits = inner.learner.policy.logits(inner.context)

        def child(island: Array, key: PRNGKeyArray) -> Decisions:
            rank_key, share_key, flip_key, draw_key, near_key = jax.random.split(key, 5)
            count = islands.elites.cost.shape[1]
            rank = jnp.floor(jax.random.exponential(rank_key) * (count / 3.0))
            rank = jnp.minimum(rank, count - 1).astype(jnp.int32)
            elite = islands.elites.genes[island, rank]
            drawn = encode(problem, _decisions(problem, logits, sample(logits, key=draw_key)))
            # A level stands for the reals around it.
            step = 1.0 / (inner.learner.policy.real_levels - 1)
            near = step * (jax.random.uniform(near_key, drawn.shape) - 0.5)
            real = islands.genome.choices == 0
            drawn = jnp.where(real, jnp.clip(drawn + near, 0.0, 1.0), drawn)
            share = 10.0 ** jax.random.uniform(share_key, minval=-2.0, maxval=0.0)
            flip = jax.random.bernoulli(flip_key, share, elite.shape) & islands.genome.active
            decisions = decode(problem, jnp.where(flip, drawn, elite))
            return problem.repair(decisions) if self.search.repair else decisions

        slots = jnp.arange(self.guided) + self.batch_size - self.guided - self.evolved
        keys = jax.vmap(lambda b: jax.random.fold_in(key, b))(slots)
        return jax.vmap(child)(islands.child_island[slots], keys)

    def update(
        self,
        problem: AbstractProblem,
        inner: GoPlusState,
        candidates: Decisions,
        outcomes: AbstractOutcome,
        *,
        key: PRNGKeyArray,
    ) -> tuple[GoPlusState, Metrics]:
        islands_key, network_key = jax.random.split(key)
        islands, metrics = self._engine(problem).update(
            problem, inner.islands, candidates, outcomes, key=islands_key
        )
        evolved, cost = inner.evolved, inner.network_cost
        if evolved is not None:
            theirs = jax.tree.map(lambda x: x[-self.evolved :], (candidates, outcomes))
            after, _ = self._evolver.update(problem, evolved, *theirs, key=network_key)
            evolves = self._evolves(inner)
            evolved = jax.tree.map(lambda a, b: jnp.where(evolves, b, a), evolved, after)
            costs = jnp.where(theirs[1].feasible & evolves, theirs[1].cost, jnp.inf)
            cost = jnp.minimum(cost, jnp.min(costs))
        elites = islands.elites
        best = jnp.lexsort((elites.cost[:, 0], ~elites.feasible[:, 0]))[0]
        told = elites.cost[best] < jnp.finfo(jnp.float32).max
        learner, loss = self._imitate(
            problem, inner.learner, inner.context, elites.genes[best], told
        )
        state = GoPlusState(islands, inner.context, learner, evolved, cost)
        return state, {**metrics, "imitation": loss}

    def _imitate(
        self,
        problem: AbstractProblem,
        learner: Learner,
        context: GoContext,
        genes: Float[Array, "K L"],
        told: Array,
    ) -> tuple[Learner, Float[Array, ""]]:
        """A step towards the elites that were evaluated."""
        choices = dict(head_choices(problem, learner.policy.real_levels))
        levels = jax.vmap(lambda one: to_levels(problem.heads, decode(problem, one), choices))(
            genes
        )
        alone = jax.tree.map(lambda x: x[None], (context, levels, told[:, None] & context.mask))
        return imitate(self.go.ppo, learner, *alone)


def go_plus(**options: Any) -> GoPlus:
    """GO+ with a network that two cores can train beside the search."""
    return GoPlus(**{"go": Go(width=64, layers=1, passes=1), **options})


def _decisions(problem: AbstractProblem, logits: Logits, levels: Levels) -> Decisions:
    return to_decisions(
        problem.heads, levels, {name: value.shape[-1] for name, value in logits.items()}
    )
