"""Proposals from a problem's relaxation, by putting a price on each of its capacities.

One gradient says what every choice of every entry costs to first order, and what it takes of each
capacity. With prices on the capacities each entry answers for itself, and the answers of all are
one candidate. Prices follow the violations by multiplicative weights (Plotkin, Shmoys and Tardos,
Mathematics of Operations Research 20, 1995), the point of linearisation is the running average of
the answers (Frank and Wolfe, Naval Research Logistics 3, 1956), and before an answer is used all
prices are scaled until it fits. Nothing here evaluates a candidate.

Shapes: C capacities, N entries of a head, M its choices.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from egx.problems.base import AbstractProblem, Decisions

Table = dict[str, Float[Array, "N M"]]

# All capacities filled cost this share of the reference at the first prices.
FIRST_PRICE = 0.1
# A violation moves a log price by no more than this before the rate: early answers overshoot.
LARGEST_MOVE = 0.5
# Scales of all prices among which a fitting one is sought, in so many halvings.
SCALES = (0.1, 30.0)
HALVINGS = 8


class Market(eqx.Module):
    """The average answer so far, the log price of each capacity, and the steps taken."""

    average: Table
    log_price: Float[Array, " C"]
    steps: Float[Array, ""]


def one_hot(problem: AbstractProblem, decisions: Decisions) -> Table:
    """Decisions as probabilities."""
    return {
        name: jax.nn.one_hot(decisions[name], int(head.choices), dtype=jnp.float32)
        for name, head in problem.heads.items()
    }


def violations(problem: AbstractProblem, decisions: Decisions) -> Float[Array, " C"]:
    """How far each capacity is exceeded, as a fraction of it."""
    return problem.relaxed_terms(one_hot(problem, decisions), jnp.ones(()))[1]


def open_market(problem: AbstractProblem) -> Market:
    """Even odds, and the same price for all capacities."""
    average = {}
    for name, head in problem.heads.items():
        shape = (problem.length(head), int(head.choices))
        average[name] = jnp.full(shape, 1.0 / int(head.choices), jnp.float32)
    count = jax.eval_shape(lambda: problem.relaxed_terms(average, jnp.ones(()))[1]).shape[0]
    log_price = jnp.full(count, jnp.log(FIRST_PRICE / count), jnp.float32)
    return Market(average, log_price, jnp.zeros((), jnp.float32))


def quotes(
    problem: AbstractProblem,
    probabilities: Table,
    prices: Float[Array, " C"],
    temperature: Float[Array, ""],
) -> tuple[Table, Table]:
    """What each choice costs to first order, in units of the reference cost, and what the
    capacity that it takes costs at the given prices."""
    _, pull = jax.vjp(lambda p: problem.relaxed_terms(p, temperature), probabilities)
    (cost,) = pull((1.0 / problem.reference_cost, jnp.zeros_like(prices)))
    (room,) = pull((jnp.zeros(()), prices))
    return cost, room


def answers(cost: Table, room: Table, scale: Float[Array, ""]) -> Decisions:
    """The cheapest choice of each entry."""
    return {
        name: jnp.argmin(cost[name] + scale * room[name], axis=-1).astype(jnp.int32)
        for name in cost
    }


def fitting_scale(
    problem: AbstractProblem, propose: Callable[[Float[Array, ""]], Decisions]
) -> Float[Array, ""]:
    """The least scale of all prices (to within the halvings) at which `propose(scale)` fits."""

    def halve(bounds: tuple[Array, Array], _: None) -> tuple[Any, None]:
        low, high = bounds
        middle = jnp.sqrt(low * high)
        fits = jnp.max(violations(problem, propose(middle)), initial=-1.0) <= 0.0
        return (jnp.where(fits, low, middle), jnp.where(fits, middle, high)), None

    start = (jnp.asarray(SCALES[0], jnp.float32), jnp.asarray(SCALES[1], jnp.float32))
    (_, high), _ = jax.lax.scan(halve, start, None, length=HALVINGS)
    return high


def trade(
    problem: AbstractProblem,
    market: Market,
    *,
    rate: Float[Array, ""],
    memory: Float[Array, ""],
    temperature: Float[Array, ""],
) -> tuple[Market, Decisions]:
    """One gradient: the market after it, and a candidate that fits.

    `rate` is that of the prices; the average gives the newest answer the weight
    memory / (steps + memory).
    """
    prices = jnp.exp(market.log_price)
    cost, room = quotes(problem, market.average, prices, temperature)
    answer = answers(cost, room, jnp.ones(()))
    excess = violations(problem, answer)
    weight = memory / (market.steps + memory)
    average = jax.tree.map(
        lambda old, new: (1.0 - weight) * old + weight * new,
        market.average,
        one_hot(problem, answer),
    )
    move = jnp.clip(excess, -LARGEST_MOVE, LARGEST_MOVE)
    candidate = answers(
        cost, room, fitting_scale(problem, lambda scale: answers(cost, room, scale))
    )
    return Market(average, market.log_price + rate * move, market.steps + 1.0), candidate
