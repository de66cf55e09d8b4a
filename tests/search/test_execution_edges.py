"""Problems at the edge, from the known plans to the answer: right, or said to have none."""

from __future__ import annotations

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import pytest

import egx
from egx.problems.execution import Execution
from tests.simulate import cases
from tests.simulate import execution_cases as several

SMALL = {"population": 30, "elites": 6, "mutants": 6}
DIAMOND = [[], [0], [0], [1], [2], [3, 4]]
APART = [[]] * 6


def problem(inputs, capacity, *, size=4, devices=3, **machine):
    """Ops of 3 s, on devices that hold `capacity` bytes each."""
    ops = [{"inputs": i, "sizes": [size], "flops": 3.0, "weight": 0} for i in inputs]
    graph = cases.build(ops, [], unit_bytes=1, pad_to=(6, 6, 6))
    hardware = several.devices(devices, **machine)
    limits = jnp.broadcast_to(jnp.asarray(capacity, jnp.float32), (devices,))[:, None]
    return Execution(graph, eqx.tree_at(lambda h: h.level_bytes, hardware, limits))


def solve(one):
    result = egx.optimize(one, "brkga_seeded", budget=96, options=SMALL)
    again = one.evaluate(result.decisions)
    assert np.isfinite(result.cost)
    assert float(again.cost) == result.cost
    assert result.bound <= result.cost
    return result


# Inputs, capacity, the machine, and the best cost.
CASES = {
    # Everything on the only device that holds anything.
    "devices that hold nothing": (DIAMOND, [1e3, 0.0, 0.0], {}, 18.0),
    "no edges at all": (APART, 1e3, {}, 6.0),
    "more devices than ops": (APART[:2], 1e3, {}, 3.0),
    "all ops free": (DIAMOND, 1e3, {"flops": np.inf}, 0.0),
    # Two ways beside each other; half a second to the second one, and half to the end of it.
    "uses of no bytes": (DIAMOND, 1e3, {"size": 0, "latency_s": 0.5, "link": 1.0}, 12.5),
    "infinite links": (DIAMOND, 1e3, {}, 12.0),
}


@pytest.mark.parametrize("case", CASES)
def test_the_answer_is_right(case):
    inputs, capacity, machine, cost = CASES[case]
    result = solve(problem(inputs, capacity, **machine))
    assert result.feasible
    assert result.cost == pytest.approx(cost, rel=1e-6)
