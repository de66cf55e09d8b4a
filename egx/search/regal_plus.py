"""Two populations from the plans of all heuristics: a genetic algorithm that looks far, and changes
of the best plans that a trained network chooses.

Not of a paper: what REGAL (Paliwal et al., ICLR 2020, arXiv 1905.02494) does, a learned proposal
for a genetic algorithm, done around plans that are known. One half of every batch is BRKGA with
all heuristics' plans in its first population. The other half changes a few decisions of the best
plans of either half. Of several changes that are drawn for a candidate, a network chooses one: it
sees the plan, and was trained to tell which changes make a plan better. The best plan of the
changes enters the genetic algorithm whenever it is better than all there.

The heuristics' plans are the first candidates, so that no result is worse than the best of them.

Shapes: B candidates of an ask, A of them of the genetic algorithm, C changed ones, E kept plans, M
changes drawn for each, L entries of a candidate, F features of a change.
"""

from __future__ import annotations

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from egx.errors import SearchError
from egx.policies.loading import PRETRAINED, load_shipped
from egx.policies.move_net import (
    INPUTS,
    MoveContext,
    MovePolicy,
    PlanView,
    move_context,
    move_features,
    plan_view,
    scores,
)
from egx.problems.base import AbstractOutcome, AbstractProblem, Decisions
from egx.problems.execution import Execution, ExecutionOutcome
from egx.search.base import AbstractSearch, Metrics, Scalar, check_numbers, check_whole, scalar
from egx.search.brkga import BRKGA, EVERY, Population, seed_count
from egx.search.changes import Change, Moves, Neighbours, applied, first_change, next_change
from egx.search.genome import Genes, Genome, decode, encode
from egx.search.keys import decode_flat, flatten
from egx.search.keys import encode as encode_keys
from egx.search.moves import is_better

# Of all problems: its name tells neither objective nor devices, as those of `regal` do.
SHIPPED = PRETRAINED / "regal-plus.npz"


class Kept(eqx.Module):
    """The best plans, best first; `peak` [E, D] is what the
    network sees of their memory, ones [E, 1] on problems that it does not see."""

    genes: Float[Array, "E L"]
    cost: Float[Array, " E"]
    feasible: Bool[Array, " E"]
    peak: Float[Array, "E D"]


class Changed(eqx.Module):
    """Candidates that wait for their evaluation: what they come from, and what the network saw of
    their first change, to learn from; [C, 0] without a network."""

    genes: Float[Array, "C L"]
    parent_cost: Float[Array, " C"]
    parent_feasible: Bool[Array, " C"]
    seen: Float[Array, "C F"]


class Both(eqx.Module):
    """Both populations, and what is the same for all plans of a problem."""

    genetic: Population
    kept: Kept
    changed: Changed
    genome: Genome
    near: Neighbours
    context: MoveContext | None


class RegalPlus(AbstractSearch):
    """A genetic algorithm and learned changes of the best plans, side by side.

    Args:
        genetic: the genetic algorithm; by default with all heuristics' plans.
        policy: what chooses changes; None is the one that comes with egx, or, on problems where
            device and priority are not decided, none: all changes are then equally likely.
        trust: of the network: a change is drawn with odds to this power; 0 ignores it.
        near, far, shift, walk, couple: how decisions change, see `egx.search.changes.Moves`.
        more: probability of each further change of a candidate.
        pressure: the kept plan that is changed is the floor(E u^pressure)-th best, u uniform.
        lean: above 0, of plans of equal peak memory those with the least over all devices count as
            better; 0 takes the newer ones.
        kept: plans (E).
        changed: candidates of an ask that are changes of them (C).
        tried: changes among which the network chooses (M).
        steps: changes of a candidate, at most.
    """

    genetic: BRKGA = eqx.field(default_factory=BRKGA)
    policy: MovePolicy | None = None
    trust: Scalar = eqx.field(converter=scalar, default=1.0)
    near: Scalar = eqx.field(converter=scalar, default=0.5)
    far: Scalar = eqx.field(converter=scalar, default=0.3)
    shift: Scalar = eqx.field(converter=scalar, default=0.05)
    walk: Scalar = eqx.field(converter=scalar, default=0.5)
    couple: Scalar = eqx.field(converter=scalar, default=0.3)
    more: Scalar = eqx.field(converter=scalar, default=0.5)
    pressure: Scalar = eqx.field(converter=scalar, default=2.0)
    lean: Scalar = eqx.field(converter=scalar, default=1.0)
    kept: int = eqx.field(static=True, default=20)
    changed: int = eqx.field(static=True, default=40)
    tried: int = eqx.field(static=True, default=8)
    steps: int = eqx.field(static=True, default=4)

    def __check_init__(self) -> None:
        check_whole(self, kept=1, changed=1, tried=1, steps=1)
        check_numbers(
            self,
            trust="0 or more",
            near="0 to 1",
            far="0 to 1",
            shift="0 or more",
            walk="0 to 1",
            couple="0 to 1",
            more="0 to 1",
            pressure="0 or more",
            lean="0 or more",
        )
        if self.policy is not None and not isinstance(self.policy, MovePolicy):
            raise SearchError(f"regal_plus takes a MovePolicy, got a {type(self.policy).__name__}")

    @property
    def batch_size(self) -> int:
        return self.genetic.batch_size + self.changed

    def check(self, problem: AbstractProblem) -> None:
        self.genetic.check(problem)
        if self.genetic.batch is not None:
            raise SearchError("regal_plus needs whole generations; genetic.batch must be None")
        if self.policy is not None and not scores(problem):
            self.policy(problem)

    def _policy(self, problem: AbstractProblem) -> MovePolicy | None:
        if not scores(problem):
            return None
        return shipped_move_policy() if self.policy is None else self.policy

    def initial(self, problem: AbstractProblem, *, key: PRNGKeyArray) -> Both:
        genetic = self.genetic.begin(problem, key=key)
        first = self.genetic.first
        known = max(seed_count(problem, self.genetic.seeds), 1)
        plans = jax.vmap(lambda keys: encode(problem, decode_flat(problem, keys)))(
            genetic.keys[first : first + known]
        )
        devices = problem.hardware.num_devices if isinstance(problem, Execution) else 1
        # Nothing is known of them yet: infinite cost, and all devices alike.
        kept = Kept(
            plans[jnp.arange(self.kept) % known],
            jnp.full(self.kept, jnp.inf, jnp.float32),
            jnp.zeros(self.kept, bool),
            jnp.ones((self.kept, devices), jnp.float32),
        )
        # Those of the first ask take their place before anybody looks.
        inputs = 0 if self._policy(problem) is None else len(INPUTS)
        changed = Changed(
            jnp.zeros((self.changed, plans.shape[1]), jnp.float32),
            jnp.zeros(self.changed, jnp.float32),
            jnp.zeros(self.changed, bool),
            jnp.zeros((self.changed, inputs), jnp.float32),
        )
        context = move_context(problem) if isinstance(problem, Execution) else None
        return Both(genetic, kept, changed, Genome(problem), Neighbours(problem.graph), context)

    def propose(
        self, problem: AbstractProblem, inner: Both, *, key: PRNGKeyArray
    ) -> tuple[Decisions, Both]:
        genetic_key, change_key = jax.random.split(key)
        bred, genetic = self.genetic.propose(problem, inner.genetic, key=genetic_key)
        changed = self._change(problem, inner, key=change_key)
        plans = jax.vmap(lambda genes: decode(problem, genes))(changed.genes)
        both = {name: jnp.concatenate([bred[name], plans[name]]) for name in problem.heads}
        return both, eqx.tree_at(lambda b: (b.genetic, b.changed), inner, (genetic, changed))

    def update(
        self,
        problem: AbstractProblem,
        inner: Both,
        candidates: Decisions,
        outcomes: AbstractOutcome,
        *,
        key: PRNGKeyArray,
    ) -> tuple[Both, Metrics]:
        bred = self.genetic.batch_size
        genetic, metrics = self.genetic.update(
            problem,
            inner.genetic,
            jax.tree.map(lambda x: x[:bred], candidates),
            jax.tree.map(lambda x: x[:bred], outcomes),
            key=key,
        )
        kept = self._keep(problem, inner.kept, candidates, outcomes)
        genetic = self._immigrate(problem, genetic, kept)
        better = is_better(
            outcomes.cost[bred:],
            outcomes.feasible[bred:],
            inner.changed.parent_cost,
            inner.changed.parent_feasible,
        )
        metrics = {**metrics, "better_share": jnp.mean(better.astype(jnp.float32))}
        return eqx.tree_at(lambda b: (b.genetic, b.kept), inner, (genetic, kept)), metrics

    def _keep(
        self,
        problem: AbstractProblem,
        kept: Kept,
        candidates: Decisions,
        outcomes: AbstractOutcome,
    ) -> Kept:
        """The best of the kept plans and the new ones."""
        peak = jnp.ones((self.batch_size, kept.peak.shape[1]), jnp.float32)
        if isinstance(outcomes, ExecutionOutcome):
            peak = outcomes.peak_units.astype(jnp.float32)
        new = Kept(
            jax.vmap(lambda plan: encode(problem, plan))(candidates),
            outcomes.cost,
            outcomes.feasible,
            peak,
        )
        joined = jax.tree.map(lambda a, b: jnp.concatenate([a, b]), new, kept)
        index = jnp.arange(joined.cost.shape[0], dtype=jnp.int32)
        infeasible = (~joined.feasible).astype(jnp.int32)
        total = jnp.zeros_like(joined.cost)
        if isinstance(problem, Execution) and problem.objective == "peak_memory":
            # Room that no device's highest peak shows yet.
            total = jnp.sum(joined.peak, 1) * jnp.asarray(self.lean)
        keys = infeasible, joined.cost, total, index
        order = jax.lax.sort(keys, num_keys=3, is_stable=True)[3]
        return jax.tree.map(lambda x: x[order[: self.kept]], joined)

    def _immigrate(self, problem: AbstractProblem, genetic: Population, kept: Kept) -> Population:
        """The best kept plan in place of the worst elite, if it is better than all elites."""
        better = is_better(kept.cost[0], kept.feasible[0], genetic.cost[0], genetic.feasible[0])
        keys = flatten(problem, encode_keys(problem, decode(problem, kept.genes[0])))
        last = self.genetic.elites - 1

        def put(into: Array, value: Array) -> Array:
            return into.at[last].set(jnp.where(better, value, into[last]))

        return eqx.tree_at(
            lambda p: (p.keys, p.cost, p.feasible),
            genetic,
            (
                put(genetic.keys, keys),
                put(genetic.cost, kept.cost[0]),
                put(genetic.feasible, kept.feasible[0]),
            ),
        )

    def _change(self, problem: AbstractProblem, inner: Both, *, key: PRNGKeyArray) -> Changed:
        """Changes of kept plans, better ones more often."""
        kept, genome, near, context = inner.kept, inner.genome, inner.near, inner.context
        known = jnp.sum(jnp.isfinite(kept.cost))
        # Before the first outcomes all of them are heuristics' plans.
        known = jnp.where(known > 0, known, self.kept).astype(jnp.float32)
        pick_key, key = jax.random.split(key)
        uniform = jax.random.uniform(pick_key, (self.changed,))
        pick = jnp.floor(known * uniform**self.pressure)
        parents = jnp.minimum(pick, known - 1.0).astype(jnp.int32)
        policy = self._policy(problem)
        views = None
        if policy is not None:
            assert context is not None
            views = jax.vmap(functools.partial(_view, problem, context))(kept.genes, kept.peak)
        moves = Moves(*map(jnp.asarray, (self.near, self.far, self.shift, self.walk, self.couple)))

        def one(parent: Int[Array, ""], key: PRNGKeyArray) -> tuple[Genes, Array]:
            genes = kept.genes[parent]
            first_key, choose_key, next_key = jax.random.split(key, 3)
            uniform = jax.random.uniform(first_key, (self.tried, 8))
            tried = jax.vmap(lambda u: first_change(moves, problem, genome, near, genes, u))(
                uniform
            )
            index, seen = jnp.zeros((), jnp.int32), jnp.zeros((self.tried, 0), jnp.float32)
            if policy is not None:
                assert context is not None
                view = jax.tree.map(lambda x: x[parent], views)
                odds, seen = _judged(problem, policy, context, genome, view, tried)
                noise = jax.random.gumbel(choose_key, odds.shape)
                index = jnp.argmax(self.trust * odds + noise).astype(jnp.int32)
            change = jax.tree.map(lambda x: x[index], tried)
            genes = applied(genome, genes, change, jnp.ones((), bool))

            def further(carry: Any, uniform: Array) -> tuple[Any, None]:
                genes, last, goes = carry
                goes = goes & (uniform[11] < self.more)
                change = next_change(moves, problem, genome, near, genes, last, uniform)
                genes = applied(genome, genes, change, goes)
                return (genes, change, goes), None

            uniform = jax.random.uniform(next_key, (self.steps - 1, 12))
            start = (genes, change, jnp.ones((), bool))
            (genes, _, _), _ = jax.lax.scan(further, start, uniform)
            return genes, seen[index]

        keys = jax.random.split(key, self.changed)
        genes, seen = jax.vmap(one)(parents, keys)
        return Changed(genes, kept.cost[parents], kept.feasible[parents], seen)


def regal_plus(**options: Any) -> RegalPlus:
    """`RegalPlus` with a smaller genetic algorithm that knows all heuristics' plans."""
    genetic = BRKGA(seeds=EVERY, population=60, elites=20, mutants=8)
    return RegalPlus(**{"genetic": genetic, **options})


def _view(
    problem: AbstractProblem, context: MoveContext, genes: Genes, peak: Float[Array, " D"]
) -> PlanView:
    plan = decode(problem, genes)
    return plan_view(context, plan["device"], plan["priority"], peak)


def _judged(
    problem: AbstractProblem,
    policy: MovePolicy,
    context: MoveContext,
    genome: Genome,
    view: PlanView,
    tried: Change,
) -> tuple[Float[Array, " M"], Float[Array, "M F"]]:
    """The log odds of changes, and what the network saw; changes of decisions that it does not
    know have the mean odds of the others."""
    names = list(problem.heads)
    head = genome.head[tried.entry]
    is_device = head == names.index("device")
    known = is_device | (head == names.index("priority"))
    op = jnp.where(known, genome.position[tried.entry], 0)
    value = jnp.where(known, tried.value, 0.0)
    features = move_features(context, view, op, is_device, value)
    odds = policy.odds(features)
    # Changes that help are rare, so that log odds of 0 would beat them all.
    count = jnp.maximum(jnp.sum(known), 1).astype(jnp.float32)
    mean = jnp.sum(jnp.where(known, odds, 0.0)) / count
    return jnp.where(known, odds, mean), features


def shipped_move_policy() -> MovePolicy:
    """The network that comes with egx."""
    policy = load_shipped(SHIPPED.stem)
    assert isinstance(policy, MovePolicy)
    return policy
