"""The relaxation equals the oracle at temperature 0, and its gradients equal differences."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from egx.errors import DecisionError
from egx.problems.memory_placement import MemoryPlacement
from egx.simulate.relaxed import relaxed_latency, smooth_maximum
from tests.oracles import memory_oracle as oracle
from tests.simulate import cases

PADDED = (12, 30, 40)
PREFETCHES = (0, 1, 2, 13)


@functools.partial(jax.jit, static_argnames="prefetch")
def relax(graph, hardware, capacity, weights, activations, temperature_s, *, prefetch):
    return relaxed_latency(
        graph,
        hardware,
        capacity,
        weights,
        activations,
        temperature_s=temperature_s,
        prefetch=prefetch,
    )


def instance(seed, ops=10):
    rng = np.random.default_rng(seed)
    graph = cases.random_graph(rng, ops, most_inputs=3, pad_to=PADDED)
    hardware = cases.random_machine(rng, 3)
    return graph, hardware, hardware.capacity_units(graph.unit_bytes)[0], rng


@pytest.mark.parametrize("prefetch", PREFETCHES)
def test_equals_the_oracle_on_maps_of_zeros_and_ones(prefetch):
    verdicts = []
    for seed in range(6):
        graph, hardware, capacity, rng = instance(seed)
        case = oracle.Case.of(graph, hardware)
        for w, a in zip(*cases.random_maps(rng, PADDED[0], 3, 5), strict=True):
            one_hot = [jax.nn.one_hot(x, 3, dtype=jnp.float32) for x in (w, a)]
            latency_s, overfull = relax(
                graph, hardware, capacity, *one_hot, jnp.zeros(()), prefetch=prefetch
            )
            levels_of = w[: case.ops].tolist(), a[: case.ops].tolist()
            expected = oracle.latency(case, *levels_of, prefetch)
            np.testing.assert_allclose(latency_s, expected, rtol=3e-6)
            held = np.array(oracle.occupancy(case, *levels_of), float)[1:].T
            limit = np.array(case.capacity_units[1:], float)
            outputs = [sum(case.tensor_units[t] for t in ts) for ts in case.outputs]
            scale = np.maximum(limit, max([*case.weight_units, *outputs, 1]))
            np.testing.assert_allclose(
                overfull[: case.ops], (held - limit) / scale, rtol=1e-5, atol=1e-5
            )
            assert (np.asarray(overfull[case.ops :]) == -1).all()
            verdicts.append(oracle.is_valid(case, *levels_of))
    assert len(set(verdicts)) == 2


@pytest.mark.parametrize("prefetch", PREFETCHES)
def test_gradients_equal_differences(prefetch):
    for seed in range(3):
        graph, hardware, capacity, rng = instance(seed)
        draws = rng.normal(size=(2, 2, *(PADDED[0], 3)))
        (weights, activations), direction = jnp.asarray(draws, jnp.float32)
        direction = direction / jnp.linalg.norm(direction)

        def loss(at, weights=weights, activations=activations, direction=direction, g=graph):
            latency_s, overfull = relax(
                g,
                hardware,  # noqa: B023
                capacity,  # noqa: B023
                jax.nn.softmax(weights + at * direction[0]),
                jax.nn.softmax(activations + at * direction[1]),
                jnp.asarray(0.5),
                prefetch=prefetch,
            )
            return jnp.log(latency_s) + jnp.sum(jnp.maximum(overfull, 0.0) ** 2)

        at = jnp.zeros(())
        slope = jax.grad(loss)(at)
        step = 0.02
        difference = (loss(at + step) - loss(at - step)) / (2 * step)
        assert abs(float(difference)) > 1e-3
        np.testing.assert_allclose(slope, difference, rtol=5e-3, atol=1e-4)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_gradients_are_finite_at_every_temperature(prefetch):
    graph, hardware, capacity, _ = instance(1)
    half = jnp.full((PADDED[0], 3), 1 / 3)
    for temperature in (0.0, 1e-12, 1e-3, 1.0, 1e6):
        gradient = jax.grad(
            lambda w, t=temperature: relax(
                graph, hardware, capacity, w, half, jnp.asarray(t), prefetch=prefetch
            )[0]
        )(half)
        assert np.isfinite(gradient).all()


def test_smooth_maximum():
    a, b = jnp.asarray([1.0, 2.0, 3.0]), jnp.asarray([2.0, 2.0, -5.0])
    np.testing.assert_array_equal(smooth_maximum(a, b, jnp.zeros(())), jnp.maximum(a, b))
    expected = np.log(np.exp(a) + np.exp(b))
    np.testing.assert_allclose(smooth_maximum(a, b, jnp.ones(())), expected, rtol=1e-6)
    np.testing.assert_allclose(
        smooth_maximum(a, b, jnp.asarray(1e-4)), jnp.maximum(a, b), rtol=1e-4
    )


def test_problem_gives_latency_and_penalty():
    graph, hardware, _, _ = instance(2)
    problem = MemoryPlacement(graph, hardware)
    one_hot = {k: jax.nn.one_hot(v, 3, dtype=jnp.float32) for k, v in problem.reference.items()}
    latency_s, penalty = problem.relaxed(one_hot, 0.0)
    np.testing.assert_allclose(latency_s, problem.reference_cost, rtol=3e-6)
    assert float(penalty) < 1e-9
    terms = problem.relaxed_terms(one_hot, jnp.zeros(()))
    assert terms[1].shape == (2 * PADDED[0],)
    everything = {k: jnp.zeros((PADDED[0], 3)).at[:, 2].set(1.0) for k in one_hot}
    assert float(problem.relaxed(everything, 0.0)[1]) > 0
    # The temperature is in units of the reference's mean seconds per op.
    warm, _ = problem.relaxed(one_hot, 1.0)
    assert latency_s < warm < latency_s * (1 + 1.001 * np.log(2))
    with pytest.raises(DecisionError, match=r"'weights' must have shape \(12, 3\)"):
        problem.relaxed({**one_hot, "weights": jnp.zeros((12, 2))}, 0.0)
    with pytest.raises(DecisionError, match="expected probabilities of"):
        problem.relaxed({"weights": one_hot["weights"]}, 0.0)
