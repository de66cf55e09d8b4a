"""The memory-placement problem against the plain oracle, and what it refuses."""

from __future__ import annotations

import functools

import chex
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from egx.errors import DecisionError, GraphError, HardwareError
from egx.graph.builder import GraphBuilder
from egx.problems.memory_placement import MemoryPlacement
from tests.oracles import memory_oracle as oracle
from tests.simulate import cases

OPS, PADDED = 14, (18, 40, 60)
GIB = 2.0**30


@functools.cache
def problem(seed, *, levels=3, prefetch=0):
    rng = np.random.default_rng(seed)
    graph = cases.random_graph(rng, OPS, pad_to=PADDED)
    return MemoryPlacement(graph, cases.random_machine(rng, levels), prefetch=prefetch)


@eqx.filter_jit
def evaluate(problem, weights, activations):
    def one(weights, activations):
        return problem.evaluate({"weights": weights, "activations": activations})

    return jax.vmap(one)(weights, activations)


def uniform(problem, level):
    return {k: jnp.full(problem.graph.num_ops, level, jnp.int32) for k in problem.heads}


@pytest.mark.parametrize("prefetch", [0, 2])
def test_outcomes_and_references_agree_with_oracle(prefetch):
    verdicts = []
    for seed in range(5):
        chosen = problem(seed, prefetch=prefetch)
        case = oracle.Case.of(chosen.graph, chosen.hardware)
        native = oracle.native(case)
        reference_cost = oracle.latency(case, *native, prefetch)
        assert chosen.reference["weights"][:OPS].tolist() == native[0]
        assert chosen.reference["activations"][:OPS].tolist() == native[1]
        np.testing.assert_allclose(chosen.reference_cost, reference_cost, rtol=1e-6)
        first = chosen.first_fit()
        expected = oracle.first_fit(case)
        assert first["weights"][:OPS].tolist() == expected[0]
        assert first["activations"][:OPS].tolist() == expected[1]

        rng = np.random.default_rng(seed)
        weights, activations = cases.random_maps(rng, PADDED[0], 3, 12)
        outcome = evaluate(chosen, weights, activations)
        assert np.isfinite(outcome.cost).all()
        chex.assert_trees_all_equal(outcome.cost, outcome.latency_s)
        for p in range(len(weights)):
            value = oracle.evaluate(
                case,
                weights[p, :OPS].tolist(),
                activations[p, :OPS].tolist(),
                prefetch=prefetch,
                reference_cost=reference_cost,
            )
            assert bool(outcome.feasible[p]) == value.feasible
            verdicts.append(value.feasible)
            np.testing.assert_allclose(outcome.cost[p], value.cost, rtol=1e-6)
            np.testing.assert_allclose(outcome.reward[p], value.reward, rtol=2e-6, atol=1e-6)
            np.testing.assert_allclose(outcome.moved_fraction[p], value.moved_fraction, rtol=1e-6)
    assert True in verdicts
    assert False in verdicts


def test_outcome_bits_do_not_depend_on_batch_or_jit():
    chosen = problem(0)
    weights, activations = cases.random_maps(np.random.default_rng(1), PADDED[0], 3, 7)
    outcome = evaluate(chosen, weights, activations)
    for p in range(7):
        alone = chosen.evaluate({"weights": weights[p], "activations": activations[p]})
        chex.assert_trees_all_equal(alone, jax.tree.map(lambda x: x[p], outcome))  # noqa: B023


def test_problems_of_one_shape_stack():
    chosen = [problem(seed) for seed in (0, 1, 2)]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *chosen)
    weights, activations = cases.random_maps(np.random.default_rng(1), PADDED[0], 3, 4)
    outcome = eqx.filter_jit(eqx.filter_vmap(evaluate, in_axes=(eqx.if_array(0), None, None)))(
        stacked, weights, activations
    )
    for g, one in enumerate(chosen):
        alone = evaluate(one, weights, activations)
        chex.assert_trees_all_equal(jax.tree.map(lambda x: x[g], outcome), alone)  # noqa: B023


def test_padding_changes_nothing():
    plain = cases.random_graph(np.random.default_rng(4), OPS)
    padded = cases.random_graph(np.random.default_rng(4), OPS, pad_to=PADDED)
    hardware = cases.random_machine(np.random.default_rng(5), 3)
    first, second = (MemoryPlacement(g, hardware, prefetch=2) for g in (plain, padded))
    assert first.reference_cost == second.reference_cost
    weights, activations = cases.random_maps(np.random.default_rng(6), PADDED[0], 3, 8)
    chex.assert_trees_all_equal(
        evaluate(first, weights[:, :OPS], activations[:, :OPS]),
        evaluate(second, weights, activations),
    )


def test_failed_is_finite_and_worse_than_the_slowest_map():
    chosen = problem(0)
    failed = chosen.failed()
    slowest = chosen.evaluate(uniform(chosen, 0))
    assert np.isfinite(failed.cost)
    assert not failed.feasible
    assert failed.cost >= slowest.cost
    assert failed.reward <= -2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weights": None}, "'weights' is missing"),
        ({"device": np.zeros(18, np.int32)}, "unknown decisions"),
        ({"weights": np.zeros(17, np.int32)}, r"must have shape \(18,\)"),
        ({"weights": np.zeros((18, 1), np.int32)}, r"must have shape \(18,\)"),
        ({"activations": np.zeros(18, np.float32)}, "must hold integers"),
        ({"activations": np.full(18, 3, np.int32)}, "at op 0 is 3, expected 0 to 2"),
        ({"weights": np.full(18, -1, np.int32)}, "at op 0 is -1, expected 0 to 2"),
    ],
)
def test_refuses_bad_decisions(change, message):
    chosen = problem(0)
    decisions = {**uniform(chosen, 0), **change}
    decisions = {k: v for k, v in decisions.items() if v is not None}
    with pytest.raises(DecisionError, match=message):
        chosen.evaluate(decisions)


def test_refuses_bad_arguments(unchecked):
    chosen = problem(0)
    for prefetch in (-1, 1.5, True):
        with pytest.raises(HardwareError, match="prefetch must be a whole number"):
            MemoryPlacement(chosen.graph, chosen.hardware, prefetch=prefetch)
    with pytest.raises(GraphError, match="Model or a Graph"):
        MemoryPlacement("resnet50", chosen.hardware)
    with pytest.raises(HardwareError, match="expected a Hardware"):
        MemoryPlacement(chosen.graph, "nnpi")


@pytest.mark.parametrize("field", ["level_bytes", "read", "write", "flops"])
def test_refuses_nan_in_hardware(field):
    arguments = {
        "level_bytes": [1.0, 1.0],
        "read": [1.0, 1.0],
        "write": [1.0, 1.0],
        "flops": [1.0] * 5,
    }
    arguments[field][1] = float("nan")
    with pytest.raises(HardwareError, match="NaN"):
        cases.machine(**arguments)


def single(*, size=0, weight=0, flops=0.0, level_bytes=(0.0, 1e9), **machine):
    graph = cases.build([{"inputs": [], "sizes": [size], "flops": flops, "weight": weight}], [])
    return MemoryPlacement(graph, cases.machine(list(level_bytes), **machine))


def test_one_op():
    chosen = single(size=30, weight=20, flops=1.0)
    outcome = chosen.evaluate(uniform(chosen, 1))
    assert bool(outcome.feasible)
    assert float(outcome.cost) == 5.0
    # Native keeps the weights on the second fastest level.
    assert float(chosen.reference_cost) == 23.0
    assert float(outcome.reward) == pytest.approx((23 / 5) ** 2 - 1)


def test_nothing_to_do_costs_nothing():
    chosen = single()
    outcome = chosen.evaluate(uniform(chosen, 1))
    chex.assert_trees_all_equal(
        [float(x) for x in jax.tree.leaves(outcome)], [0.0, 1.0, 0.0, 0.0, 0.0]
    )
    assert chosen.lower_bound() == 0.0


def test_ops_without_weights_or_tensors():
    builder = GraphBuilder("bare")
    for i in range(3):
        builder.op(f"op{i}", kind="opaque", op_type="x", inputs=[], output_bytes=[], flops=2.0 * i)
    chosen = MemoryPlacement(builder.build(), cases.machine([0.0, 0.0], launch_s=1.0), prefetch=1)
    outcome = chosen.evaluate(uniform(chosen, 1))
    assert bool(outcome.feasible)
    assert float(outcome.cost) == 9.0
    first, last = chosen.lifetimes()
    assert first.shape == last.shape == (0,)


def test_zero_bytes_fit_a_full_level():
    chosen = single(level_bytes=(0.0, 0.0))
    assert bool(chosen.evaluate(uniform(chosen, 1)).feasible)


def test_levels_smaller_than_any_tensor():
    chosen = single(size=30, weight=20, level_bytes=(0.0, 19.0, 19.0))
    outcome = chosen.evaluate(uniform(chosen, 2))
    assert not bool(outcome.feasible)
    assert float(outcome.moved_fraction) == 1.0
    assert float(outcome.reward) == -2.0
    assert float(outcome.cost) == 50.0
    chex.assert_trees_all_equal(chosen.rectify(uniform(chosen, 2)), uniform(chosen, 0))
    chex.assert_trees_all_equal(chosen.reference, uniform(chosen, 0))


def test_more_than_two_tebibytes():
    size = 700 * 2**30 + 1
    ops = [{"inputs": [], "sizes": [size], "flops": 0.0, "weight": 0} for _ in range(4)]
    graph = cases.build(ops, [0, 1, 2, 3])
    unit = int(graph.unit_bytes)
    assert unit == 2048
    rounded = -(-size // unit) * unit
    rates = [GIB, 2 * GIB]
    for capacity, fits in ((4 * rounded, True), (4 * rounded - 1, False)):
        hardware = cases.machine([1e15, float(capacity)], read=rates)
        chosen = MemoryPlacement(graph, hardware)
        outcome = chosen.evaluate(uniform(chosen, 1))
        assert bool(outcome.feasible) == fits
        expected = (4 if fits else 5) * rounded / (2 * GIB)
        np.testing.assert_allclose(outcome.cost, expected, rtol=1e-6)


def test_ten_thousand_ops():
    """A chain of equal ops adds up without losing digits."""
    count = 10_000
    ops = [
        {"inputs": [i - 1] if i else [], "sizes": [3], "flops": 1.0, "weight": 1}
        for i in range(count)
    ]
    graph = cases.build(ops, [count - 1])
    hardware = cases.machine([1e9, 1e9], read=[10.0, 30.0], launch_s=0.1)
    for prefetch, op_s in ((0, 1.1), (2, 1.1)):
        chosen = MemoryPlacement(graph, hardware, prefetch=prefetch)
        outcome = chosen.evaluate(uniform(chosen, 1))
        assert bool(outcome.feasible)
        first = 0.0 if prefetch == 0 else 1 / 30
        np.testing.assert_allclose(outcome.cost, count * op_s + first, rtol=2e-7)


def test_wide_fan_in_and_out():
    """One tensor read by 300 ops, whose outputs one op reads."""
    ops = [{"inputs": [], "sizes": [10], "flops": 0.0, "weight": 0}]
    ops += [{"inputs": [0], "sizes": [1], "flops": 0.0, "weight": 0} for _ in range(300)]
    ops += [{"inputs": list(range(1, 301)), "sizes": [5], "flops": 0.0, "weight": 0}]
    graph = cases.build(ops, [])
    for capacity, fits in ((310, True), (309, False)):
        chosen = MemoryPlacement(graph, cases.machine([0.0, float(capacity)]))
        outcome = chosen.evaluate(uniform(chosen, 1))
        # At the last of the 300 ops: the tensor of 10 and 300 outputs.
        assert bool(outcome.feasible) == fits
        if fits:
            np.testing.assert_allclose(outcome.cost, (10 + 300 * 11 + 305) / 10, rtol=1e-6)
