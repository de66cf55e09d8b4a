"""No plan undercuts the bound: not by a bit, whatever it decides, and it is met where it can be."""

from __future__ import annotations

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from egx.problems.execution import Execution
from egx.simulate.execution_bound import makespan_bound, peak_bound
from tests.baselines.host_cases import host
from tests.simulate import cases
from tests.simulate import execution_cases as several

PAD = (12, 32, 32)
PLANS = 64


@eqx.filter_jit
def costs(problem, plans):
    return jax.vmap(problem.evaluate)(plans).cost


def drawn(seed, decide, **options):
    """A problem with numbers that float32 rounds, and random plans."""
    rng = np.random.default_rng(seed)
    graph = cases.random_graph(rng, 10, most_inputs=3, most_bytes=9, unit_bytes=4, pad_to=PAD)
    hardware = several.random_devices(rng, 2)
    odd = jnp.asarray(rng.uniform(0.5, 3.0, hardware.flops_per_s.shape), jnp.float32)
    hardware = eqx.tree_at(lambda h: h.flops_per_s, hardware, odd)
    plans = several.random_plans(rng, graph, 2, PLANS)
    return Execution(graph, hardware, decide=decide, **options), several.arrays(
        several.only(plans, *decide)
    )


@pytest.mark.parametrize("objective", ["makespan", "peak_memory"])
@pytest.mark.parametrize("decide", [("device", "priority"), ("fusion", "device")])
def test_no_plan_undercuts_it(objective, decide):
    positive = 0
    for seed in range(25):
        problem, plans = drawn(seed, decide, objective=objective)
        bound = problem.lower_bound()
        assert float(jnp.min(costs(problem, plans))) >= bound
        positive += bound > 0
    assert positive >= 20


def test_no_plan_undercuts_it_in_run_time_order():
    for seed in range(10):
        problem, plans = drawn(seed, ("device", "priority"), order="runtime")
        assert float(jnp.min(costs(problem, plans))) >= problem.lower_bound()


def test_it_is_met_by_hand():
    chain = [
        {"inputs": [i - 1] if i else [], "sizes": [8], "flops": 2.0, "weight": 4} for i in range(6)
    ]
    # A chain is its own longest path; its fattest op holds 8 + 8 + 4 bytes.
    assert makespan_bound(host(chain, 3)) == pytest.approx(12.0, rel=1e-5)
    assert peak_bound(host(chain, 3)) == 20
    # On one device all weights are beside it.
    assert peak_bound(host(chain, 1)) == 6 * 4 + 16
    apart = [{"inputs": [], "sizes": [8], "flops": 2.0, "weight": 9} for _ in range(6)]
    assert makespan_bound(host(apart, 3)) == pytest.approx(4.0, rel=1e-5)
    assert peak_bound(host(apart, 3, outputs=range(6))) == -(-(6 * 9 + 6 * 8) // 3)
    assert makespan_bound(host(apart, 3)) <= 4.0


def test_nothing_runs_beside_an_only_source_or_sink():
    """2 s, then eight ops of 2 s on two devices, then 2 s: neither the path (6 s) nor the load
    (10 s) but 12 s."""
    ops = [{"inputs": [], "sizes": [1], "flops": 2.0, "weight": 0}]
    ops += [{"inputs": [0], "sizes": [1], "flops": 2.0, "weight": 0} for _ in range(8)]
    ops += [{"inputs": list(range(1, 9)), "sizes": [1], "flops": 2.0, "weight": 0}]
    assert makespan_bound(host(ops, 2)) == pytest.approx(12.0, rel=1e-5)
    assert makespan_bound(host(ops, 2)) <= 12.0


def test_unequal_devices_share_the_load_as_they_can():
    """A device twice as fast takes two thirds: 12 seconds of work end after 4."""
    ops = [{"inputs": [], "sizes": [], "flops": 1.0, "weight": 0} for _ in range(12)]
    case = host(ops, 2)
    uneven = dataclasses.replace(case, seconds=case.seconds / np.array([2.0, 1.0]))
    assert makespan_bound(uneven) == pytest.approx(4.0, rel=1e-3)
    assert makespan_bound(uneven) <= 4.0
    # Ops that only one device does quickly.
    halves = np.where(np.arange(12)[:, None] % 2 == np.arange(2), 1.0, 50.0)
    apart = dataclasses.replace(case, seconds=halves)
    assert makespan_bound(apart) == pytest.approx(6.0, rel=1e-2)


def test_costly_transfers_keep_a_path_on_one_device():
    """Each op is fast on another device, and going there costs more than staying."""
    chain = [{"inputs": [0] if i else [], "sizes": [4] * (1 - i), "flops": 1.0, "weight": 0}
             for i in range(2)]  # fmt: skip
    case = host(chain, 2, latency_s=3.0)
    split = dataclasses.replace(case, seconds=np.array([[1.0, 9.0], [9.0, 1.0]]))
    assert makespan_bound(split) == pytest.approx(5.0, rel=1e-5)
    free = dataclasses.replace(split, link_latency_s=np.zeros((2, 2)))
    assert makespan_bound(free) == pytest.approx(2.0, rel=1e-5)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6))
def test_rounding_never_lifts_it_above_a_float32_sum(seed):
    """Seconds in float32, added up in float32 in a random order on one device."""
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 400))
    seconds = rng.exponential(10.0 ** rng.integers(-9, 6), count).astype(np.float32)
    ops = [{"inputs": [], "sizes": [], "flops": float(s), "weight": 0} for s in seconds]
    total = np.float32(0)
    for s in rng.permutation(seconds):
        total = np.float32(total + s)
    assert makespan_bound(host(ops, 1)) <= float(total)
