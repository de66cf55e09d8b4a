"""Tuned BRKGA: the parameters that do best on training problems.

A baseline of REGAL (Paliwal et al., ICLR 2020, arXiv 1905.02494).

Shapes: S seeds, R inheritance probabilities.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key

from egx.errors import SearchError
from egx.problems.base import AbstractProblem
from egx.search.brkga import BRKGA, evolve

POPULATIONS = (50, 100, 200)
ELITES = (0.1, 0.2, 0.25)
MUTANTS = (0.1, 0.2, 0.3)
RHOS = (0.6, 0.7, 0.8)


@dataclasses.dataclass(frozen=True)
class Setting:
    """One point of the grid; elites and mutants as shares of the population.

    `score` is the geometric mean over problems of the mean cost, as a ratio to the problem's
    reference.
    """

    population: int
    elites: float
    mutants: float
    rho: float
    score: float

    def search(self) -> BRKGA:
        return _search(self.population, self.elites, self.mutants, self.rho)


def _search(population: int, elites: float, mutants: float, rho: float) -> BRKGA:
    return BRKGA(
        rho=rho,
        population=population,
        elites=max(round(elites * population), 1),
        mutants=round(mutants * population),
    )


def tune(
    problems: Sequence[AbstractProblem],
    *,
    budget: int = 5000,
    seeds: Sequence[int] = (0, 1, 2),
    populations: Sequence[int] = POPULATIONS,
    elites: Sequence[float] = ELITES,
    mutants: Sequence[float] = MUTANTS,
    rhos: Sequence[float] = RHOS,
    progress: Callable[[Setting], None] | None = None,
) -> list[Setting]:
    """Every setting of the grid, best first; `tune(...)[0].search()` is tuned BRKGA.

    Every run spends `budget` evaluations. A combination of sizes compiles once for all problems
    of one padded shape. `progress` is called with each setting when it is done.

    Raises:
        SearchError: without problems, seeds or values, for a problem whose reference costs
            nothing, or for sizes that do not fit together.
    """
    if not all((problems, seeds, populations, elites, mutants, rhos)):
        raise SearchError("tune needs problems, seeds, and values of every parameter")
    for index, problem in enumerate(problems):
        if not float(problem.reference_cost) > 0:
            raise SearchError(f"tune: the reference of problem {index} costs 0; nothing to compare")
    rho = np.asarray(rhos, np.float32)
    keys = jnp.stack([jax.random.key(seed) for seed in seeds])
    settings = []
    for population, elite, mutant in itertools.product(populations, elites, mutants):
        search = _search(population, elite, mutant, rhos[0])
        ratios = np.empty((len(problems), len(rho)))
        for row, problem in zip(ratios, problems, strict=True):
            search.check(problem)
            cost = _costs(search, problem, jnp.asarray(rho), keys, jnp.asarray(budget, jnp.int32))
            row[:] = np.asarray(cost, np.float64).mean(0) / float(problem.reference_cost)
        # A cost of 0 is as good as can be, and has no logarithm.
        scores = np.exp(np.log(np.maximum(ratios, 1e-12)).mean(0))
        for value, score in zip(rhos, scores, strict=True):
            settings.append(Setting(population, elite, mutant, value, float(score)))
            if progress is not None:
                progress(settings[-1])
    return sorted(settings, key=lambda setting: setting.score)


@eqx.filter_jit
def _costs(
    search: BRKGA,
    problem: AbstractProblem,
    rho: Float[Array, " R"],
    keys: Key[Array, " S"],
    budget: Array,
) -> Float[Array, "S R"]:
    def one(rho: Array, key: Array) -> Array:
        return evolve(search, problem, budget=budget, key=key, rho=rho).cost

    return jax.vmap(jax.vmap(one, in_axes=(0, None)), in_axes=(None, 0))(rho, keys)
