"""Any strategy of evosax, on logits of the decisions or on the weights of a policy.

R. T. Lange, "evosax: JAX-based Evolution Strategies", 2022 (arXiv 2212.04180); tested with 0.3.2.
evosax minimises and some of its strategies break on values that are not finite: the fitness is
the negative reward, which is finite. Its methods compile once for each strategy object, so
objects are kept and shared by all runs with the same sizes.

Shapes: P population, W numbers that a strategy optimises.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, Int, PRNGKeyArray

from egx.errors import SearchError
from egx.policies.base import AbstractPolicy
from egx.problems.base import AbstractOutcome, AbstractProblem, Decisions
from egx.search.base import AbstractSearch, Metrics, Scalar, check_numbers, check_whole, scalar
from egx.search.brkga_strategy import brkga_strategy

FULL_MATRIX = ("CMA_ES", "MA_ES", "SV_CMA_ES", "iAMaLGaM_Full", "xNES")
MOST_FULL_MATRIX = 500
POPULATIONS = 4  # of strategies that run several at once

Options = tuple[tuple[str, Any], ...]


def _options(value: Mapping[str, Any] | Options) -> Options:
    return tuple(sorted(dict(value).items()))


@functools.lru_cache(maxsize=1)
def strategies() -> dict[str, Any]:
    """The strategies of evosax by name, and BRKGA among them. Importing evosax starts a device:
    not before one is wanted."""
    return {**importlib.import_module("evosax.algorithms").algorithms, "BRKGA": brkga_strategy()}


def _population_based() -> dict[str, Any]:
    module = importlib.import_module("evosax.algorithms.population_based")
    return {**module.population_based_algorithms, "BRKGA": brkga_strategy()}


@functools.lru_cache(maxsize=64)
def _strategy(
    name: str, population: int, size: int, learning_rate: float | None, options: Options
) -> Any:
    """The strategy object for `size` numbers; built outside of any trace, since it holds arrays.

    `population` counts all that it asks, of several populations together.
    """
    arguments = dict(options)
    make = strategies()[name]
    takes = inspect.signature(make).parameters
    if "num_populations" in takes:
        several = arguments.setdefault("num_populations", POPULATIONS)
        if several < 1 or population % several:
            raise SearchError(
                f"evosax: {name} runs {several} populations, which must divide the population of "
                f"{population}"
            )
        population //= several
    if "sampling_fn" in takes:
        arguments.setdefault("sampling_fn", functools.partial(jax.random.normal, shape=(size,)))
    if learning_rate is not None:
        if "optimizer" not in takes:
            raise SearchError(f"evosax: {name} has no optimizer that takes a learning_rate")
        arguments["optimizer"] = optax.adam(learning_rate)
    with jax.ensure_compile_time_eval(), jax.numpy_dtype_promotion("standard"):
        try:
            return make(population_size=population, solution=jnp.zeros(size), **arguments)
        except (AssertionError, TypeError, ValueError) as error:
            raise SearchError(f"evosax: {name} cannot be made: {error}") from error


class Strategy(eqx.Module):
    """evosax's own state, the first population, and whether that was told."""

    inner: Any
    first: Float[Array, "P W"]
    generation: Int[Array, ""]


class EvosaxSearch(AbstractSearch):
    """An evosax strategy as a searcher.

    On logits, each entry of a decision has one number a choice and takes the choice of the
    largest; a real decision is the sigmoid of one number. On weights, the numbers are the weights
    of `policy`, which decides greedily.

    Args:
        strategy: the name of an evosax strategy, such as "Sep_CMA_ES", "SNES" or "SimpleGA".
        on: "logits" or "weights"; by default weights when there is a policy.
        policy: whose weights to evolve, and where to start, for `on="weights"`.
        spread: standard deviation of the first population around its centre.
        parameters: further entries of the strategy's parameters, such as {"crossover_rate": 0.5}.
        population: candidates a generation; several strategies need an even number.
        learning_rate: of Adam, for strategies with an optimizer; None keeps their own.
        arguments: further arguments of the strategy, such as {"use_antithetic_sampling": False}.
    """

    policy: AbstractPolicy | None = None
    spread: Scalar = eqx.field(converter=scalar, default=1.0)
    parameters: dict[str, Any] = eqx.field(default_factory=dict)
    strategy: str = eqx.field(static=True, default="Sep_CMA_ES")
    on: str | None = eqx.field(static=True, default=None)
    population: int = eqx.field(static=True, default=32)
    learning_rate: float | None = eqx.field(static=True, default=None)
    arguments: Options = eqx.field(static=True, converter=_options, default=())

    def __check_init__(self) -> None:
        check_whole(self, population=1)
        check_numbers(self, spread="0 or more")

    @property
    def batch_size(self) -> int:
        return self.population

    def check(self, problem: AbstractProblem) -> None:
        if self.strategy not in strategies():
            known = ", ".join(sorted(strategies()))
            raise SearchError(f"evosax has no strategy {self.strategy!r} (known: {known})")
        if self.on not in (None, "logits", "weights"):
            raise SearchError(f"on must be 'logits' or 'weights', got {self.on!r}")
        if self.on == "weights" and self.policy is None:
            raise SearchError("on='weights' needs a policy whose weights to evolve")
        if self.on == "logits" and self.policy is not None:
            raise SearchError("on='logits' has no use for a policy")
        size = self._centre(problem).shape[0]
        if self.strategy in FULL_MATRIX and size > MOST_FULL_MATRIX:
            raise SearchError(
                f"{self.strategy} keeps a matrix of {size} x {size} numbers, which is hopeless "
                f"above {MOST_FULL_MATRIX}; Sep_CMA_ES keeps its diagonal"
            )
        fields = self._parameters(size)
        unknown = sorted(set(self.parameters) - set(fields))
        if unknown:
            raise SearchError(
                f"evosax: {self.strategy} has no parameter {unknown[0]!r} "
                f"(it has {', '.join(sorted(fields))})"
            )

    def initial(self, problem: AbstractProblem, *, key: PRNGKeyArray) -> Strategy:
        draw_key, init_key = jax.random.split(key)
        centre = self._centre(problem)
        noise = jax.random.normal(draw_key, (self.population, centre.shape[0]))
        first = centre + self.spread * noise
        fitness = jnp.zeros(self.population, jnp.float32)
        state = self._begin(centre, first, fitness, key=init_key)
        return Strategy(state, first, jnp.zeros((), jnp.int32))

    def propose(
        self, problem: AbstractProblem, inner: Strategy, *, key: PRNGKeyArray
    ) -> tuple[Decisions, Strategy]:
        strategy, parameters = self._made(inner.first.shape[1])
        with jax.numpy_dtype_promotion("standard"):
            asked, state = strategy.ask(key, inner.inner, parameters)
        if self._by_population():
            asked = jnp.where(inner.generation == 0, inner.first, asked)
        # A strategy that broke down must not take the run with it.
        asked = jnp.nan_to_num(asked)
        candidates = jax.vmap(lambda numbers: self._decide(problem, numbers))(asked)
        return candidates, Strategy(_like(state, inner.inner), asked, inner.generation)

    def update(
        self,
        problem: AbstractProblem,
        inner: Strategy,
        candidates: Decisions,
        outcomes: AbstractOutcome,
        *,
        key: PRNGKeyArray,
    ) -> tuple[Strategy, Metrics]:
        asked, fitness = inner.first, -outcomes.reward
        strategy, parameters = self._made(asked.shape[1])
        with jax.numpy_dtype_promotion("standard"):
            state, _ = strategy.tell(key, asked, fitness, inner.inner, parameters)
        state = _like(state, inner.inner)
        if self._by_population():
            begun = self._begin(asked[0], asked, fitness, key=key)
            begun = _like(begun, inner.inner)
            state = jax.tree.map(
                lambda new, old: jnp.where(inner.generation == 0, new, old), begun, state
            )
        return Strategy(state, asked, inner.generation + 1), {
            "mean_reward": jnp.mean(outcomes.reward),
            "best_reward": jnp.max(outcomes.reward),
        }

    # The strategy.

    def _by_population(self) -> bool:
        return self.strategy in _population_based()

    def _begin(
        self,
        centre: Float[Array, " W"],
        first: Float[Array, "P W"],
        fitness: Float[Array, " P"],
        *,
        key: PRNGKeyArray,
    ) -> Any:
        strategy, parameters = self._made(centre.shape[0])
        with jax.numpy_dtype_promotion("standard"):
            if self._by_population():
                return strategy.init(key, first, fitness, parameters)
            # Several populations start apart from each other.
            several = getattr(strategy, "num_populations", None)
            means = centre if several is None else first[:several]
            return strategy.init(key, means, parameters)

    def _made(self, size: int) -> tuple[Any, Any]:
        """The strategy and its parameters with this searcher's in their place."""
        strategy = _strategy(
            self.strategy, self.population, size, self.learning_rate, self.arguments
        )
        fields = self._parameters(size)
        changes = dict(self.parameters)
        if "std_init" in fields:
            changes.setdefault("std_init", self.spread)
        # Some count by their parameters, which must be numbers then.
        with jax.ensure_compile_time_eval(), jax.numpy_dtype_promotion("standard"):
            defaults = strategy.default_params
        return strategy, defaults.replace(**changes)

    def _parameters(self, size: int) -> tuple[str, ...]:
        strategy = _strategy(
            self.strategy, self.population, size, self.learning_rate, self.arguments
        )
        with jax.ensure_compile_time_eval(), jax.numpy_dtype_promotion("standard"):
            return tuple(vars(strategy.default_params))

    # The numbers.

    def _centre(self, problem: AbstractProblem) -> Float[Array, " W"]:
        """Where the first population is centred: level logits all equal, or the policy."""
        if self.policy is not None:
            return ravel_pytree(eqx.filter(self.policy, eqx.is_inexact_array))[0]
        width = sum(
            problem.length(head) * (1 if head.choices == "real" else head.choices)
            for head in problem.heads.values()
        )
        return jnp.zeros(width, jnp.float32)

    def _decide(self, problem: AbstractProblem, numbers: Float[Array, " W"]) -> Decisions:
        if self.policy is not None:
            weights, rest = eqx.partition(self.policy, eqx.is_inexact_array)
            policy = eqx.combine(ravel_pytree(weights)[1](numbers), rest)
            return policy.decide(problem)
        decisions, start = {}, 0
        for name, head in problem.heads.items():
            length = problem.length(head)
            count = 1 if head.choices == "real" else head.choices
            part = numbers[start : start + length * count].reshape(length, count)
            start += length * count
            if head.choices == "real":
                decisions[name] = jax.nn.sigmoid(part[:, 0])
            else:
                decisions[name] = jnp.argmax(part, axis=1).astype(jnp.int32)
        return decisions


def _like(new: Any, old: Any) -> Any:
    """The same values in the types of `old`: evosax's states change theirs from call to call."""
    return jax.tree.map(
        lambda a, b: (
            jnp.broadcast_to(jnp.asarray(a), b.shape).astype(b.dtype) if hasattr(b, "dtype") else a
        ),
        new,
        jax.tree.map(jnp.asarray, old),
    )
