"""Descent on a problem's differentiable relaxation, with a multiplier for each capacity.

The method of multipliers for inequalities (Nocedal and Wright, Numerical Optimization, 2nd ed.,
section 17.4) with Adam as the inner minimiser: one step of both per call.

Shapes: C constraints, N entries of a head, M choices of a head.
"""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, PRNGKeyArray

from egx.problems.base import AbstractProblem, Decisions
from egx.search.base import Scalar, check_numbers, scalar

Logits = dict[str, Float[Array, "N M"]]


class Relaxation(eqx.Module):
    """One descent: logits of every head, Adam's moments, multipliers of the constraints."""

    logits: Logits
    moments: optax.OptState
    multipliers: Float[Array, " C"]


class Descent(eqx.Module):
    """Hyper-parameters of a descent; the temperature falls geometrically from first to last.

    `penalty` weighs squared violations (as fractions of a capacity) against the cost in units
    of the reference cost; `temperature` is in units of the reference's mean seconds per op.
    """

    learning_rate: Scalar = eqx.field(converter=scalar, default=0.3)
    penalty: Scalar = eqx.field(converter=scalar, default=0.003)
    first_temperature: Scalar = eqx.field(converter=scalar, default=0.3)
    last_temperature: Scalar = eqx.field(converter=scalar, default=0.003)

    def __check_init__(self) -> None:
        check_numbers(
            self,
            learning_rate="0 or more",
            penalty="above 0",
            first_temperature="above 0",
            last_temperature="above 0",
        )

    def start(self, problem: AbstractProblem, *, key: PRNGKeyArray) -> Relaxation:
        """Nearly uniform probabilities, and no multiplier."""
        logits = {}
        for index, (name, head) in enumerate(problem.heads.items()):
            shape = (problem.length(head), int(head.choices))
            logits[name] = 0.1 * jax.random.normal(jax.random.fold_in(key, index), shape)
        _, violations = jax.eval_shape(
            lambda: problem.relaxed_terms(_probabilities(logits), jnp.ones(()))
        )
        multipliers = jnp.zeros(violations.shape, jnp.float32)
        return Relaxation(logits, self._adam().init(logits), multipliers)

    def step(
        self, problem: AbstractProblem, relaxation: Relaxation, progress: Float[Array, ""]
    ) -> Relaxation:
        """One step of logits and multipliers; `progress` runs from 0 to 1 over the descent."""
        first = jnp.asarray(self.first_temperature)
        temperature = first * (self.last_temperature / first) ** jnp.clip(progress, 0.0, 1.0)
        multipliers = relaxation.multipliers

        def lagrangian(logits: Logits) -> tuple[Float[Array, ""], Float[Array, " C"]]:
            cost, violations = problem.relaxed_terms(_probabilities(logits), temperature)
            pressed = multipliers + self.penalty * violations
            terms = (jnp.maximum(pressed, 0.0) ** 2 - multipliers**2) / (2.0 * self.penalty)
            return cost / problem.reference_cost + jnp.sum(terms), violations

        gradients, violations = jax.grad(lagrangian, has_aux=True)(relaxation.logits)
        # A flat or overflowing corner must not poison the descent.
        gradients = jax.tree.map(lambda g: jnp.nan_to_num(g, posinf=0.0, neginf=0.0), gradients)
        # Adam's bias correction raises a float to an integer power.
        with jax.numpy_dtype_promotion("standard"):
            updates, moments = self._adam().update(gradients, relaxation.moments)
        return Relaxation(
            optax.apply_updates(relaxation.logits, updates),
            moments,
            jnp.maximum(multipliers + self.penalty * violations, 0.0),
        )

    def _adam(self) -> optax.GradientTransformation:
        return optax.chain(optax.scale_by_adam(), optax.scale_by_learning_rate(self.learning_rate))


def rounded(relaxation: Relaxation) -> Decisions:
    """The likeliest choice of every entry."""
    return {
        name: jnp.argmax(logits, axis=-1).astype(jnp.int32)
        for name, logits in relaxation.logits.items()
    }


def _probabilities(logits: Logits) -> dict[str, Float[Array, "N M"]]:
    return {name: jax.nn.softmax(x, axis=-1) for name, x in logits.items()}
