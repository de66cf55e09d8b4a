"""EGRL: evolution and policy gradient together, and each of them alone (EA, PG).

Khadka et al., "Optimizing Memory Placement using Evolutionary Graph Reinforcement Learning",
ICLR 2021, arXiv 2007.07298. A generation evaluates the population and two rollouts of the
learner, one sampled and one greedy; all go to the buffer; the population evolves; the learner
takes as many gradient steps as there were evaluations and replaces the weakest member. Networks
of the population act greedily, chromosomes are sampled.

Shapes: P members, G networks and K chromosomes of them, R rollouts, B = P + R candidates.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, Int, PRNGKeyArray

from egx.errors import SearchError
from egx.policies import boltzmann
from egx.policies.base import REAL_LEVELS, check_choices, head_choices
from egx.policies.boltzmann import BoltzmannChromosome
from egx.policies.context import GraphContext, graph_context
from egx.policies.distributions import Levels, greedy, probabilities, sample, to_decisions
from egx.policies.graph_unet import GraphUNetCritic, GraphUNetPolicy
from egx.problems.base import AbstractOutcome, AbstractProblem, Decisions
from egx.search.base import AbstractSearch, Metrics, State, check_numbers, check_whole
from egx.search.evolution import Evolution, Layout, Population, Stacked, slots
from egx.search.replay import Replay, add, empty_replay
from egx.search.sac import SAC, SACState


class Champion(eqx.Module):
    """The network whose greedy decisions had the highest reward so far."""

    policy: GraphUNetPolicy
    reward: Float[Array, ""]


class EGRLState(eqx.Module):
    """What evolves; parts that are switched off are None.

    `levels` and `network_probabilities` are what the last proposal was made of; `weakest` is the
    slot that the learner takes before the next one, -1 for none.
    """

    context: GraphContext
    population: Population | None
    learner: SACState | None
    replay: Replay | None
    champion: Champion | None
    levels: dict[str, Int[Array, "B N"]]
    network_probabilities: Stacked | None
    weakest: Int[Array, ""]


class EGRL(AbstractSearch):
    """The mixed population and the learner; every part can be switched off.

    Args:
        evolution: rates and sizes of the population.
        sac: the learner's hyper-parameters.
        population: False leaves the learner alone (PG).
        policy_gradient: False leaves the population alone (EA).
        boltzmann_share: the share of the population that is Boltzmann chromosomes.
        seeding: networks seed chromosomes; otherwise the two kinds never mix.
        migration: the learner's policy replaces the weakest member after each generation.
        graph_network: False for networks that see each op alone.
        exploring: sampled rollouts of the learner a generation, beside the greedy one.
        width, depth, attention_heads: of the networks.
        buffer_capacity: evaluations that the buffer holds. The method's 100,000 is more than
            any run here spends; only this many are allocated.
        real_levels: levels that stand for the values of a real decision.
        policy: a trained policy from which the learner and the first network start.
    """

    evolution: Evolution = eqx.field(default_factory=Evolution)
    sac: SAC = eqx.field(default_factory=SAC)
    policy: GraphUNetPolicy | None = None
    population: bool = eqx.field(static=True, default=True)
    policy_gradient: bool = eqx.field(static=True, default=True)
    boltzmann_share: float = eqx.field(static=True, default=0.2)
    seeding: bool = eqx.field(static=True, default=True)
    migration: bool = eqx.field(static=True, default=True)
    graph_network: bool = eqx.field(static=True, default=True)
    exploring: int = eqx.field(static=True, default=1)
    width: int = eqx.field(static=True, default=128)
    depth: int = eqx.field(static=True, default=4)
    attention_heads: int = eqx.field(static=True, default=4)
    buffer_capacity: int = eqx.field(static=True, default=16_384)
    real_levels: int = eqx.field(static=True, default=REAL_LEVELS)

    def __check_init__(self) -> None:
        if not (self.population or self.policy_gradient):
            raise SearchError("egrl needs the population, the policy gradient, or both")
        check_whole(
            self, exploring=0, width=1, depth=0, attention_heads=1, buffer_capacity=1, real_levels=2
        )
        check_numbers(self, boltzmann_share="0 to 1")
        evolution = self.evolution
        if not 1 <= evolution.elites < evolution.size:
            raise SearchError(
                f"elites must be 1 to {evolution.size - 1} in a population of {evolution.size}, "
                f"got {evolution.elites}"
            )
        if self.buffer_capacity < self.batch_size:
            raise SearchError(
                f"buffer_capacity must hold a generation ({self.batch_size}), "
                f"got {self.buffer_capacity}"
            )

    @property
    def batch_size(self) -> int:
        members = self.evolution.size if self.population else 0
        return members + (self.exploring + 1 if self.policy_gradient else 0)

    @property
    def counts(self) -> tuple[int, int]:
        """(G, K): networks and chromosomes of the population."""
        return slots(self.evolution.size, self.boltzmann_share) if self.population else (0, 0)

    def check(self, problem: AbstractProblem) -> None:
        choices = head_choices(problem, self.real_levels)
        if self.policy is not None:
            if not isinstance(self.policy, GraphUNetPolicy):
                kind = type(self.policy).__name__
                raise SearchError(f"egrl starts from a GraphUNetPolicy, got a {kind}")
            check_choices("starting", self.policy.choices, choices)

    def new_policy(self, problem: AbstractProblem, *, key: PRNGKeyArray) -> GraphUNetPolicy:
        """A fresh network for `problem`, of the same shape as the policy to start from."""
        if self.policy is not None:
            return GraphUNetPolicy.from_config(self.policy.config(), key)
        return GraphUNetPolicy(
            problem.features.shape[-1],
            head_choices(problem, self.real_levels),
            width=self.width,
            depth=self.depth,
            attention_heads=self.attention_heads,
            messages=self.graph_network,
            real_levels=self.real_levels,
            key=key,
        )

    def initial(self, problem: AbstractProblem, *, key: PRNGKeyArray) -> EGRLState:
        choices, length = head_choices(problem, self.real_levels), problem.graph.num_ops
        networks, chromosomes = self.counts
        keys = jax.random.split(key, 4)
        actor = self.policy if self.policy is not None else self.new_policy(problem, key=keys[0])
        population = None
        if self.population:
            population = Population(
                self._first_networks(problem, networks, key=keys[1]),
                jax.vmap(
                    lambda index: boltzmann.random_chromosome(
                        choices, length, key=jax.random.fold_in(keys[2], index)
                    )
                )(jnp.arange(chromosomes))
                if chromosomes
                else None,
            )
        learner = replay = None
        if self.policy_gradient:
            critic = GraphUNetCritic(
                problem.features.shape[-1],
                sum(count for _, count in choices),
                width=self.width,
                depth=self.depth,
                attention_heads=self.attention_heads,
                messages=self.graph_network,
                key=keys[3],
            )
            learner = self.sac.start(actor, critic)
            replay = empty_replay(choices, length, self.buffer_capacity)
        worst = jnp.asarray(jnp.finfo(jnp.float32).min, jnp.float32)
        return EGRLState(
            context=graph_context(problem),
            population=population,
            learner=learner,
            replay=replay,
            champion=Champion(actor, worst) if networks or self.policy_gradient else None,
            levels={name: jnp.zeros((self.batch_size, length), jnp.int32) for name, _ in choices},
            network_probabilities={
                name: jnp.zeros((networks, length, count), jnp.float32) for name, count in choices
            }
            if networks
            else None,
            weakest=jnp.asarray(-1, jnp.int32),
        )

    def _first_networks(
        self, problem: AbstractProblem, count: int, *, key: PRNGKeyArray
    ) -> Float[Array, "G W"] | None:
        if not count:
            return None

        def genome(index: Array) -> Array:
            return ravel_pytree(self.new_policy(problem, key=jax.random.fold_in(key, index)))[0]

        genomes = jax.vmap(genome)(jnp.arange(count))
        return genomes if self.policy is None else genomes.at[0].set(ravel_pytree(self.policy)[0])

    def propose(
        self, problem: AbstractProblem, inner: EGRLState, *, key: PRNGKeyArray
    ) -> tuple[Decisions, EGRLState]:
        networks, chromosomes = self.counts
        member_key, rollout_key = jax.random.split(key)
        inner = self._migrate(inner)
        logits = self._network_logits(inner)
        parts: list[Levels] = []
        if networks:
            mode = jax.tree.map(lambda x: x[:networks], logits)
            inner = _replace(inner, network_probabilities=probabilities(mode))
            parts.append(greedy(mode))
        if chromosomes:
            inner = self._seed_migrant(inner, logits)
            assert inner.population is not None
            parts.append(
                jax.vmap(
                    lambda one, index: sample(
                        one.logits(), key=jax.random.fold_in(member_key, index)
                    )
                )(inner.population.chromosomes, jnp.arange(chromosomes))
            )
        if self.policy_gradient:
            own = jax.tree.map(lambda x: x[networks], logits)
            parts.append(
                jax.vmap(lambda index: sample(own, key=jax.random.fold_in(rollout_key, index)))(
                    jnp.arange(self.exploring)
                )
            )
            parts.append(jax.tree.map(lambda x: x[None], greedy(own)))
        levels = jax.tree.map(lambda *rows: jnp.concatenate(rows), *parts)
        choices = dict(head_choices(problem, self.real_levels))
        return to_decisions(problem.heads, levels, choices), _replace(inner, levels=levels)

    def _migrate(self, inner: EGRLState) -> EGRLState:
        """The learner's policy in the weakest slot, if that is a network's."""
        networks, _ = self.counts
        population, learner = inner.population, inner.learner
        if population is None or population.networks is None or learner is None:
            return inner
        here = jnp.arange(networks)[:, None] == inner.weakest
        stack = jnp.where(here, ravel_pytree(learner.actor)[0], population.networks)
        return _replace(inner, population=Population(stack, population.chromosomes))

    def _seed_migrant(self, inner: EGRLState, logits: Stacked) -> EGRLState:
        """The learner's probabilities in the weakest slot, if that is a chromosome's."""
        networks, chromosomes = self.counts
        population = inner.population
        if population is None or population.chromosomes is None or inner.learner is None:
            return inner
        prior = probabilities({name: value[networks] for name, value in logits.items()})
        here = jnp.arange(networks, networks + chromosomes) == inner.weakest

        def seed(at: Array, one: BoltzmannChromosome) -> BoltzmannChromosome:
            new = boltzmann.seeded(one, prior)
            return jax.tree.map(lambda a, b: jnp.where(at, a, b), new, one)

        seeded = jax.vmap(seed)(here, population.chromosomes)
        return _replace(inner, population=Population(population.networks, seeded))

    def _network_logits(self, inner: EGRLState) -> Stacked:
        """The logits of all networks, the population's and then the learner's, [G (+ 1), N, K]."""
        genomes = []
        if inner.population is not None and inner.population.networks is not None:
            genomes.append(inner.population.networks)
        if inner.learner is not None:
            genomes.append(ravel_pytree(inner.learner.actor)[0][None])
        if not genomes:
            return {}
        assert inner.champion is not None
        unravel = ravel_pytree(inner.champion.policy)[1]
        return jax.vmap(lambda genome: unravel(genome).logits(inner.context))(
            jnp.concatenate(genomes)
        )

    def update(
        self,
        problem: AbstractProblem,
        inner: EGRLState,
        candidates: Decisions,
        outcomes: AbstractOutcome,
        *,
        key: PRNGKeyArray,
    ) -> tuple[EGRLState, Metrics]:
        evolve_key, learn_key = jax.random.split(key)
        members = self.evolution.size if self.population else 0
        rewards, fitness = outcomes.reward, outcomes.reward[:members]
        metrics = {"feasible_share": jnp.mean(outcomes.feasible.astype(jnp.float32))}
        champion = self._crown(inner, rewards)
        population, learner, replay = inner.population, inner.learner, inner.replay
        if population is not None:
            metrics |= {"fitness_best": jnp.max(fitness), "fitness_mean": jnp.mean(fitness)}
            population = self.evolution.evolve(
                population,
                None if inner.champion is None else Layout(inner.champion.policy),
                fitness,
                inner.network_probabilities if self.seeding else None,
                key=evolve_key,
            )
        if learner is not None:
            assert replay is not None
            metrics["learner_reward"] = rewards[-1]
            replay = add(replay, inner.levels, rewards)
            learner, learned = self.sac.learn(
                learner, inner.context, replay, steps=self.batch_size, key=learn_key
            )
            metrics |= learned
        inner = _replace(
            inner,
            population=population,
            learner=learner,
            replay=replay,
            champion=champion,
            weakest=self._weakest(fitness),
        )
        return inner, metrics

    def _weakest(self, fitness: Float[Array, " P"]) -> Int[Array, ""]:
        """The slot that the learner's policy takes over: the last of the least fit.

        Without seeding it is a network's.
        """
        networks, _ = self.counts
        pool = fitness if self.seeding else fitness[:networks]
        if not (self.migration and self.policy_gradient and pool.shape[0]):
            return jnp.asarray(-1, jnp.int32)
        return (pool.shape[0] - 1 - jnp.argmin(pool[::-1])).astype(jnp.int32)

    def _crown(self, inner: EGRLState, rewards: Float[Array, " B"]) -> Champion | None:
        """The champion after this batch; only greedy rollouts of networks compete."""
        if inner.champion is None:
            return None
        networks = self.counts[0]
        champion = inner.champion
        if networks:
            assert inner.population is not None
            index = jnp.argmax(rewards[:networks])
            assert inner.population.networks is not None
            best = ravel_pytree(champion.policy)[1](inner.population.networks[index])
            champion = _better(champion, Champion(best, rewards[index]))
        if inner.learner is not None:
            champion = _better(champion, Champion(inner.learner.actor, rewards[-1]))
        return champion

    def best_policy(
        self, state: State | EGRLState, problem: AbstractProblem | None = None
    ) -> GraphUNetPolicy:
        """The network of the run whose greedy decisions did best, for use on other graphs.

        Raises:
            SearchError: if the run has no networks, or the policy does not fit `problem`.
        """
        inner = state.inner if isinstance(state, State) else state
        if inner.champion is None:
            raise SearchError("this run has chromosomes only, and no network to keep")
        policy = inner.champion.policy
        if problem is not None:
            check_choices("best", policy.choices, head_choices(problem, self.real_levels))
        return policy


def _better(old: Champion, new: Champion) -> Champion:
    improves = new.reward > old.reward
    return jax.tree.map(lambda a, b: jnp.where(improves, a, b), new, old)


def _replace(state: EGRLState, **parts: Any) -> EGRLState:
    return dataclasses.replace(state, **parts)


def as_in_code(**options: Any) -> EGRL:
    """EGRL with what the authors' training code does differently from their paper: three
    poolings, a bootstrapped target, the actor's largest probabilities before the critic, and a
    mutation probability of 0.85. That their networks also read the current placements is left
    out: in an episode of one step these are all DRAM, the same for every op."""
    return EGRL(
        **{
            "evolution": Evolution(mutation=0.85),
            "sac": SAC(bootstrap=True, relaxation="largest"),
            "depth": 3,
            **options,
        }
    )


def ea(**options: Any) -> EGRL:
    """The evolution alone: 20 evaluations a generation, no learner and no gradients."""
    return EGRL(policy_gradient=False, **options)


def pg(**options: Any) -> EGRL:
    """The learner alone: 3 sampled and 1 greedy evaluation a generation, and as many gradient
    steps, so that the policy which acts is never more than 4 steps old."""
    return EGRL(**{"population": False, "exploring": 3, **options})
