"""EGRL+: what serves a user best under EGRL's budget. Ours; not a published method.

Islands of elites start from different places (known plans, everything on level 0, the relaxed
simulator's optimum); children come from window crossover and local moves, are repaired by the
problem's own rule before they are evaluated, and the budget is concentrated on the best islands
by successive halving. Every proposal counts, gradient steps included.

Shapes: I islands, K elites of each, B children a generation, L entries of a candidate.
"""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from egx.errors import SearchError
from egx.problems.base import AbstractOutcome, AbstractProblem, Decisions, check_decisions
from egx.search.base import AbstractSearch, Metrics, Scalar, check_numbers, check_whole, scalar
from egx.search.genome import (
    Genes,
    Genome,
    change_one,
    decode,
    encode,
    hash_genes,
    random_value,
    set_block,
    swap_two,
    window_crossover,
)
from egx.search.pricing import Market, answers, fitting_scale, one_hot, open_market, quotes, trade

PRICED_ISLAND = 1  # also the island that starts from a random candidate
MAX_STARTS = 3  # starts of each island that are evaluated as they are
# The market's rates, and the temperature of its first and last gradient.
PRICE_RATES = (1.0, 0.2)
MEMORIES = (2.0, 10.0)
TEMPERATURES = (0.5, 0.02)
_WORST = float(np.finfo(np.float32).max)


class Elites(eqx.Module):
    """The best different candidates of one island, best first; of all islands with an axis I."""

    genes: Float[Array, "*I K L"]
    cost: Float[Array, "*I K"]
    feasible: Bool[Array, "*I K"]


class Islands(eqx.Module):
    """What evolves: the elites [I, K, ...], where each pending child belongs, evaluations told."""

    elites: Elites
    child_island: Int[Array, " B"]
    told: Int[Array, ""]
    genome: Genome
    markets: Market | None


class EGRLPlus(AbstractSearch):
    """Islands, local moves, repair, gradient proposals and successive halving.

    Args:
        budget: evaluations that the run will spend; sets the halving times.
        crossover: probability that a child takes a window from a mate.
        migration: probability that the mate is of another island.
        priced_share: share of the budget during which half of each batch are gradient proposals.
        plans: further starting points, decisions [X, length], such as a trained policy's.
        batch: children a generation.
        elites: candidates kept per island.
        max_moves: local moves per child, at most.
        guided: gradient-guided children a generation, after that share.
        gradients: use the problem's relaxation, where it has one.
        heuristic_seeds: start an island from the problem's known plans.
        swaps: exchanges among the moves; without them single and block changes alone.
        repair: apply the problem's repair rule to children.
        halving: drop the worse islands at a quarter and at a half of the budget.
    """

    budget: Scalar = eqx.field(converter=scalar, default=4000.0)
    crossover: Scalar = eqx.field(converter=scalar, default=0.2)
    migration: Scalar = eqx.field(converter=scalar, default=0.2)
    priced_share: Scalar = eqx.field(converter=scalar, default=0.06)
    plans: Decisions | None = None
    batch: int = eqx.field(static=True, default=20)
    elites: int = eqx.field(static=True, default=10)
    max_moves: int = eqx.field(static=True, default=4)
    guided: int = eqx.field(static=True, default=6)
    gradients: bool = eqx.field(static=True, default=True)
    heuristic_seeds: bool = eqx.field(static=True, default=True)
    swaps: bool = eqx.field(static=True, default=True)
    repair: bool = eqx.field(static=True, default=True)
    halving: bool = eqx.field(static=True, default=True)

    def __check_init__(self) -> None:
        check_whole(self, batch=1, elites=1, max_moves=1, guided=0)
        check_numbers(
            self, budget="above 0", crossover="0 to 1", migration="0 to 1", priced_share="0 to 1"
        )
        if self.guided > self.batch:
            raise SearchError(f"guided must be 0 to {self.batch} (batch), got {self.guided}")

    @property
    def batch_size(self) -> int:
        return self.batch

    def check(self, problem: AbstractProblem) -> None:
        if self.plans is None:
            return
        counts = {name: len(value) if np.ndim(value) else 0 for name, value in self.plans.items()}
        if not counts or len(set(counts.values())) != 1 or 0 in counts.values():
            raise SearchError(
                f"plans must hold as many plans of each decision, 1 or more, got {counts}"
            )
        for k in range(next(iter(counts.values()))):
            check_decisions(problem, {name: value[k] for name, value in self.plans.items()})

    def initial(self, problem: AbstractProblem, *, key: PRNGKeyArray) -> Islands:
        genome = Genome(problem)
        starts = self._starts(problem, genome, key=key)
        shape = starts.shape[:2]
        elites = Elites(
            genes=starts,
            cost=jnp.full(shape, _WORST, jnp.float32),
            feasible=jnp.zeros(shape, bool),
        )
        markets = None
        if self._prices(problem):
            markets = jax.tree.map(
                lambda x: jnp.broadcast_to(x, (len(PRICE_RATES), *x.shape)), open_market(problem)
            )
        zero = jnp.zeros((), jnp.int32)
        return Islands(elites, jnp.zeros(self.batch, jnp.int32), zero, genome, markets)

    def _prices(self, problem: AbstractProblem) -> bool:
        return problem.has_relaxation and self.gradients

    def _starts(
        self, problem: AbstractProblem, genome: Genome, *, key: PRNGKeyArray
    ) -> Float[Array, "I K L"]:
        zeros = jnp.zeros(genome.head.shape, jnp.float32)
        uniform = random_value(genome.choices, jax.random.uniform(key, zeros.shape))
        starts = [zeros[None], uniform[None]]
        known = list(problem.heuristics().values()) if self.heuristic_seeds else []
        plans = [encode(problem, plan)[None] for plan in known]
        if self.plans is not None:
            given = jax.vmap(lambda plan: encode(problem, plan))(self.plans)
            # What was given has room before known plans do.
            plans = [*plans[: max(self.elites - given.shape[0], 0)], given]
        if plans:
            starts.append(jnp.concatenate(plans)[: self.elites])
        rows = [start[jnp.arange(self.elites) % start.shape[0]] for start in starts]
        return jnp.stack(rows)

    def propose(
        self, problem: AbstractProblem, inner: Islands, *, key: PRNGKeyArray
    ) -> tuple[Decisions, Islands]:
        elites, genome = inner.elites, inner.genome
        count = elites.cost.shape[0]
        child_island = self._allot(inner)
        keys = jax.vmap(lambda b: jax.random.fold_in(key, b))(jnp.arange(self.batch))
        children = jax.vmap(lambda island, key: self._child(genome, elites, island, key=key))(
            child_island, keys
        )
        # The first children of all are the starts themselves.
        turn = jnp.arange(self.batch) // count
        starts = elites.genes[child_island, turn % self.elites]
        first = (inner.told == 0) & (turn < min(self.elites, MAX_STARTS))
        children = jnp.where(first[:, None], starts, children)
        markets = inner.markets
        if markets is not None:
            spent = inner.told.astype(jnp.float32) / self.budget / self.priced_share
            markets, proposals = self._trade(problem, markets, spent)
            # Each gradient is an evaluation: its proposal takes the place of one child.
            early = spent < 1.0
            children, child_island = self._place(
                children, child_island, proposals, jnp.asarray(PRICED_ISLAND), early
            )
            island = child_island[0]
            guided = self._guided(
                problem,
                genome,
                jax.tree.map(lambda x: x[island], elites),
                markets,
                key=jax.random.fold_in(key, self.batch),
            )
            children, child_island = self._place(children, child_island, guided, island, ~early)

        def finish(genes: Genes) -> Decisions:
            decisions = decode(problem, genes)
            return problem.repair(decisions) if self.repair else decisions

        candidates = jax.vmap(finish)(children)
        return candidates, Islands(elites, child_island, inner.told, genome, markets)

    def _place(
        self,
        children: Float[Array, "B L"],
        child_island: Int[Array, " B"],
        proposals: Float[Array, "Q L"],
        island: Int[Array, ""],
        now: Bool[Array, ""],
    ) -> tuple[Float[Array, "B L"], Int[Array, " B"]]:
        """Puts proposals in the place of the last children."""
        first = self.batch - proposals.shape[0]
        slot = (jnp.arange(self.batch) >= first) & now
        padded = jnp.concatenate([children[:first], proposals])
        return (
            jnp.where(slot[:, None], padded, children),
            jnp.where(slot, island, child_island).astype(jnp.int32),
        )

    def _trade(
        self, problem: AbstractProblem, markets: Market, spent: Float[Array, ""]
    ) -> tuple[Market, Float[Array, "Q L"]]:
        """Some gradients of every market, and the candidate of each."""
        steps = max(self.batch // (2 * len(PRICE_RATES)), 1)
        first, last = TEMPERATURES
        progress = jnp.clip(spent, 0.0, 1.0)
        temperature = first * (last / first) ** progress

        def one(market: Market, rate: Array, memory: Array) -> tuple[Market, Array]:
            def step(market: Market, _: None) -> tuple[Market, Genes]:
                moved, candidate = trade(
                    problem,
                    market,
                    rate=rate * (1.0 - 0.9 * progress),
                    memory=memory,
                    temperature=temperature,
                )
                # After its share of the budget a market stands still.
                moved = jax.tree.map(lambda a, b: jnp.where(spent < 1.0, a, b), moved, market)
                return moved, encode(problem, candidate)

            return jax.lax.scan(step, market, None, length=steps)

        markets, proposals = jax.vmap(one)(
            markets, jnp.asarray(PRICE_RATES, jnp.float32), jnp.asarray(MEMORIES, jnp.float32)
        )
        return markets, proposals.reshape(-1, proposals.shape[-1])

    def _guided(
        self,
        problem: AbstractProblem,
        genome: Genome,
        elites: Elites,
        markets: Market,
        *,
        key: PRNGKeyArray,
    ) -> Float[Array, "Q L"]:
        """An elite, whose evaluation stands for the gradient, and children in which a random
        share of the entries takes its best answer to it at noisy prices."""
        rank_key, blend_key, temperature_key, market_key, key = jax.random.split(key, 5)
        rank = jnp.floor(jax.random.exponential(rank_key) * (self.elites / 3.0))
        elite = elites.genes[jnp.minimum(rank, self.elites - 1).astype(jnp.int32)]
        which = jax.random.randint(market_key, (), 0, len(PRICE_RATES))
        market = jax.tree.map(lambda x: x[which], markets)
        # Between the elite and the average a gradient sees past the nearest corner.
        blend = jax.random.uniform(blend_key) * 0.5
        point = jax.tree.map(
            lambda a, b: (1.0 - blend) * a + blend * b,
            one_hot(problem, decode(problem, elite)),
            market.average,
        )
        temperature = 10.0 ** jax.random.uniform(temperature_key, minval=-2.0, maxval=0.0)
        cost, room = quotes(problem, point, jnp.exp(market.log_price), temperature)

        def child(key: PRNGKeyArray) -> Genes:
            share_key, noise_key, flip_key = jax.random.split(key, 3)
            share = 10.0 ** jax.random.uniform(share_key, minval=-2.0, maxval=0.0)
            flip = jax.random.bernoulli(flip_key, share, elite.shape) & genome.active
            noisy = {
                name: table
                * jnp.exp(
                    0.3 * jax.random.normal(jax.random.fold_in(noise_key, index), table.shape)
                )
                for index, (name, table) in enumerate(room.items())
            }

            def propose(scale: Float[Array, ""]) -> Genes:
                answer = encode(problem, answers(cost, noisy, scale))
                return jnp.where(flip, answer, elite)

            scale = fitting_scale(problem, lambda s: decode(problem, propose(s)))
            return propose(scale)

        guided = jax.vmap(child)(jax.random.split(key, self.guided))
        return jnp.concatenate([elite[None], guided])

    def _allot(self, inner: Islands) -> Int[Array, " B"]:
        """Which island each child belongs to: in turn over the best ones still in the race."""
        elites = inner.elites
        count = elites.cost.shape[0]
        spent = inner.told.astype(jnp.float32) / self.budget
        # Infeasible bests rank behind feasible ones; both costs are finite.
        order = jnp.lexsort((elites.cost[:, 0], ~elites.feasible[:, 0]))
        alive = jnp.asarray(count, jnp.int32)
        if self.halving:
            half = max((count + 1) // 2, 1)
            alive = jnp.where(spent < 0.25, count, jnp.where(spent < 0.5, half, 1))
        return order[jnp.arange(self.batch) % alive].astype(jnp.int32)

    def _child(
        self, genome: Genome, elites: Elites, island: Int[Array, ""], *, key: PRNGKeyArray
    ) -> Genes:
        keys = jax.random.split(key, 7)
        parent_key, mate_key, pick_key, cross_key, window_key, moves_key, away_key = keys
        count = elites.cost.shape[0]
        away = jax.random.bernoulli(away_key, self.migration)
        other = (island + jax.random.randint(mate_key, (), 1, max(count, 2))) % count
        length = jnp.max(genome.position).astype(jnp.float32) + 1.0
        rank = jnp.floor(jax.random.exponential(parent_key) * (self.elites / 3.0))
        genes = elites.genes[island, jnp.minimum(rank, self.elites - 1).astype(jnp.int32)]
        mates = elites.genes[jnp.where(away, other, island)]
        mate = mates[jax.random.randint(pick_key, (), 0, self.elites)]
        cross, then_move = jax.random.bernoulli(
            cross_key, jnp.stack([jnp.asarray(self.crossover, jnp.float32), jnp.asarray(0.5)])
        )
        crossed = window_crossover(genome, genes, mate, key=window_key, mean=length / 4.0)
        genes = jnp.where(cross, crossed, genes)
        moved = self._moves(genome, genes, key=moves_key)
        return jnp.where(cross & ~then_move, genes, moved)

    def _moves(self, genome: Genome, genes: Genes, *, key: PRNGKeyArray) -> Genes:
        """One or more local moves, their number geometric."""
        count_key, key = jax.random.split(key)
        coin = jax.random.uniform(count_key)
        count = 2 + jnp.floor(-jnp.log2(jnp.maximum(coin, 1e-6))).astype(jnp.int32)
        shares = [0.4, 0.4, 0.2] if self.swaps else [0.7, 0.0, 0.3]

        def move(genes: Genes, step: Int[Array, ""]) -> tuple[Genes, None]:
            kind_key, move_key = jax.random.split(jax.random.fold_in(key, step))
            kind = jax.random.choice(kind_key, 3, p=jnp.asarray(shares, jnp.float32))
            options = jnp.stack(
                [
                    change_one(genome, genes, key=move_key),
                    swap_two(genome, genes, key=move_key),
                    set_block(genome, genes, key=move_key, mean=jnp.asarray(4.0)),
                ]
            )
            return jnp.where(step < count, options[kind], genes), None

        genes, _ = jax.lax.scan(move, genes, jnp.arange(self.max_moves))
        return genes

    def update(
        self,
        problem: AbstractProblem,
        inner: Islands,
        candidates: Decisions,
        outcomes: AbstractOutcome,
        *,
        key: PRNGKeyArray,
    ) -> tuple[Islands, Metrics]:
        genes = jax.vmap(lambda decisions: encode(problem, decisions))(candidates)
        count = inner.elites.cost.shape[0]
        elites = jax.vmap(
            lambda island, elites: self._select(
                inner.genome, elites, genes, outcomes, inner.child_island == island
            )
        )(jnp.arange(count), inner.elites)
        told = inner.told + self.batch
        inner = Islands(elites, inner.child_island, told, inner.genome, inner.markets)
        metrics = {"feasible_share": jnp.mean(outcomes.feasible.astype(jnp.float32))}
        return inner, metrics

    def _select(
        self,
        genome: Genome,
        elites: Elites,
        genes: Float[Array, "B L"],
        outcomes: AbstractOutcome,
        ours: Bool[Array, " B"],
    ) -> Elites:
        """The K best different ones among the elites and the children of this island."""
        # Newcomers stand first: on a plateau of equal costs they replace their elders.
        genes = jnp.concatenate([genes, elites.genes])
        cost = jnp.concatenate([jnp.where(ours, outcomes.cost, _WORST), elites.cost])
        feasible = jnp.concatenate([outcomes.feasible & ours, elites.feasible])
        used = jnp.sum(jnp.where(genome.active, genes, 0.0), axis=1)
        order = jnp.lexsort((used, cost, ~feasible))
        hashes = jax.vmap(lambda g: hash_genes(genome, g))(genes)[order]
        size = hashes.shape[0]
        earlier = jnp.arange(size)[:, None] > jnp.arange(size)[None, :]
        repeated = jnp.any((hashes[:, None] == hashes[None, :]) & earlier, axis=1)
        # Repeats go to the end and lose their value, so that they cannot pose as elites.
        cost = jnp.where(repeated, _WORST, cost[order])
        feasible = feasible[order] & ~repeated
        keep = jnp.argsort(repeated, stable=True)[: elites.cost.shape[0]]
        return Elites(genes[order][keep], cost[keep], feasible[keep])
