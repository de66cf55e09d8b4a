"""BRKGA in the protocol of evosax, to stand beside the library's own strategies.

R. T. Lange, "evosax: JAX-based Evolution Strategies", 2022 (arXiv 2212.04180). The class derives
from evosax's and is made when it is first wanted, since importing evosax starts a device.

Shapes: P candidates of an ask, E elites, W numbers of a solution.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import jax
import jax.numpy as jnp

from egx.search.brkga import breed, rank

ELITES, MUTANTS = 0.25, 0.1875
"""Elites and mutants as shares of what is asked: 20 and 15 of 80, as in REGAL."""


@functools.lru_cache(maxsize=1)
def brkga_strategy() -> type:
    """The strategy's class, of `evosax.algorithms.population_based`.

    `BRKGA(population_size, solution, elites=None, mutants=None)`: `population_size` solutions are
    asked and told a generation, `elites` more live on beside them and are not asked again. A
    solution holds the logits of random keys, so that numbers are unbounded, as the library's are;
    `sigmoid` gives the keys. Its parameter is `rho`.
    """
    base = importlib.import_module("evosax.algorithms.population_based.base")
    struct = importlib.import_module("flax.struct")

    @struct.dataclass
    class State(base.State):  # type: ignore[misc, name-defined]
        # Any, for JAX rebuilds states from what is no array too.
        best_fitness: Any
        fitness: Any
        generation_counter: Any
        elites: Any
        elite_fitness: Any

    @struct.dataclass
    class Params(base.Params):  # type: ignore[misc, name-defined]
        rho: Any

    class BRKGA(base.PopulationBasedAlgorithm):  # type: ignore[misc, name-defined]
        """The biased random-key genetic algorithm (Gonçalves and Resende, 2011)."""

        def __init__(
            self,
            population_size: int,
            solution: Any,
            elites: int | None = None,
            mutants: int | None = None,
            **shaping: Any,
        ):
            super().__init__(population_size, solution, **shaping)
            self.elites = max(round(ELITES * population_size), 1) if elites is None else elites
            self.mutants = round(MUTANTS * population_size) if mutants is None else mutants
            if self.elites < 1:
                raise ValueError(f"elites must be 1 or more, got {self.elites}")
            if not 0 <= self.mutants <= population_size:
                raise ValueError(
                    f"mutants must be 0 to population_size ({population_size}), got {self.mutants}"
                )

        @property
        def num_elites(self) -> int:
            return self.elites

        @property
        def _default_params(self) -> Any:
            return Params(rho=0.7)

        def _init(self, key: jax.Array, params: Any) -> Any:
            # Members that nobody evaluated, worse than any: parents like the worst of a population.
            unknown = self._fresh(jax.random.uniform(key, (self.elites, self.num_dims)))
            return State(
                population=jnp.zeros((self.population_size, self.num_dims)),
                fitness=jnp.full(self.population_size, jnp.inf),
                best_solution=jnp.zeros(self.num_dims),
                best_fitness=jnp.inf,
                generation_counter=0,
                elites=unknown,
                elite_fitness=jnp.full(self.elites, jnp.inf),
            )

        def _ask(self, key: jax.Array, state: Any, params: Any) -> tuple[jax.Array, Any]:
            members, _, order = self._members(state)
            bred = breed(
                members,
                order,
                jax.random.uniform(key, (self.population_size, self.num_dims + 2)),
                elites=self.elites,
                mutants=self.mutants,
                rho=jnp.asarray(params.rho, jnp.float32),
            )
            children = self.population_size - self.mutants
            return jnp.concatenate([bred[:children], self._fresh(bred[children:])]), state

        def _tell(
            self, key: jax.Array, population: jax.Array, fitness: jax.Array, state: Any, params: Any
        ) -> Any:
            members, known, order = self._members(state)
            elites = order[: self.elites]
            return state.replace(
                population=population,
                fitness=fitness,
                elites=members[elites],
                elite_fitness=known[elites],
            )

        def _members(self, state: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
            """Elites and the last population, their fitness, and their order from the best."""
            members = jnp.concatenate([state.elites, state.population])
            fitness = jnp.concatenate([state.elite_fitness, state.fitness])
            fitness = jnp.where(jnp.isnan(fitness), jnp.inf, fitness)
            return members, fitness, rank(fitness, fitness < jnp.inf)

        @staticmethod
        def _fresh(uniform: jax.Array) -> jax.Array:
            tiny = 2.0**-24
            return jax.scipy.special.logit(jnp.clip(uniform, tiny, 1.0 - tiny))

        def get_best_solution(self, state: Any) -> Any:
            return self._unravel_solution(state.best_solution)

    return BRKGA
