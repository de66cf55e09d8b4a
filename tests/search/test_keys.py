"""Random keys stand for the plans they should, and proposals have the moments they should."""

from __future__ import annotations

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from egx.graph.generators import regal_synthetic
from egx.graph.padding import pad_graph
from egx.problems.execution import Execution
from egx.search import betas as betas_module
from egx.search.betas import (
    FRACTIONS,
    MEANS,
    UNIFORM_FRACTION,
    UNIFORM_MEAN,
    Betas,
    betas_of_bins,
    betas_of_moments,
    bin_knots,
    draw,
    quantile_knots,
    uniform_betas,
)
from egx.search.keys import (
    decode,
    decode_flat,
    encode,
    first_largest,
    flatten,
    gene_shapes,
    unflatten,
    width,
)
from tests.search import toys
from tests.simulate import execution_cases

EVERY = ("device", "priority", "transfer_priority")


@functools.cache
def execution(decide=EVERY, devices=3, order="static"):
    """A padded graph with costly transfers, so that every decision matters."""
    graph = regal_synthetic(np.random.default_rng(3), "watts_strogatz", 14).graph
    sizes = (graph.num_ops + 2, graph.num_tensors + 3, graph.num_uses + 4)
    hardware = execution_cases.devices(devices, flops=20.0, link=10.0, latency_s=0.5)
    return Execution(pad_graph(graph, sizes), hardware, decide=decide, order=order)


draw_all = jax.jit(draw)
knots_of = eqx.filter_jit(quantile_knots)


def test_shapes():
    problem = execution()
    ops, uses = problem.graph.num_ops, problem.graph.num_uses
    expected = {"device": (ops, 3), "priority": (ops, 1), "transfer_priority": (uses, 1)}
    assert gene_shapes(problem) == expected
    assert width(problem) == 4 * ops + uses
    assert gene_shapes(toys.chain(4, 2)) == {"weights": (4, 2), "activations": (4, 2)}


def test_flat_and_back():
    problem = execution()
    rng = np.random.default_rng(0)
    keys = {
        name: jnp.asarray(rng.random(shape), jnp.float32)
        for name, shape in gene_shapes(problem).items()
    }
    flat = flatten(problem, keys)
    assert flat.shape == (width(problem),)
    back = unflatten(problem, flat)
    for name, value in keys.items():
        np.testing.assert_array_equal(back[name], value)
    # The order of names in a dict does not matter.
    np.testing.assert_array_equal(flatten(problem, dict(reversed(keys.items()))), flat)
    decisions = decode(problem, keys)
    np.testing.assert_array_equal(decisions["device"], np.argmax(keys["device"], 1))
    assert decisions["device"].dtype == jnp.int32
    np.testing.assert_array_equal(decisions["priority"], keys["priority"][:, 0])
    np.testing.assert_array_equal(decode_flat(problem, flat)["device"], decisions["device"])


@pytest.mark.parametrize("count", [1, 2, 8, 9])
def test_the_first_of_equal_keys_wins(count):
    keys = np.random.default_rng(count).integers(0, 3, (count, 200)).astype(np.float32)
    np.testing.assert_array_equal(first_largest(jnp.asarray(keys)), keys.argmax(0))


@eqx.filter_jit
def values(problem, plans):
    return jax.vmap(problem.evaluate)(plans)


@eqx.filter_jit
def there_and_back(problem, plans):
    keys = jax.vmap(lambda plan: encode(problem, plan))(plans)
    return keys, jax.vmap(lambda one: decode(problem, one))(keys)


@pytest.mark.parametrize("order", ["static", "runtime"])
def test_encoded_plans_are_the_same_plans(order):
    decide = EVERY if order == "static" else EVERY[:2]
    problem = execution(decide, order=order)
    rng = np.random.default_rng(1)
    # Few levels, so that priorities tie within ops and between ops and transfers; any scale.
    plans = {
        "device": jnp.asarray(rng.integers(0, 3, (12, problem.graph.num_ops)), jnp.int32),
        "priority": jnp.asarray(rng.integers(-3, 3, (12, problem.graph.num_ops)) * 7.5),
        "transfer_priority": jnp.asarray(rng.integers(-3, 3, (12, problem.graph.num_uses)) * 7.5),
    }
    plans = {name: plans[name].astype(problem.reference[name].dtype) for name in decide}
    keys, back = there_and_back(problem, plans)
    for name in decide:
        assert (keys[name] > 0).all()
        assert (keys[name] < 1).all()
    before, after = values(problem, plans), values(problem, back)
    np.testing.assert_array_equal(before.cost, after.cost)
    np.testing.assert_array_equal(before.peak_units, after.peak_units)
    assert len(np.unique(before.cost)) > 6
    # Ties stay ties, and distinct values distinct: all reals are ranked together.
    real = np.asarray(problem.graph.op_mask)
    priority, ranked = np.asarray(plans["priority"])[:, real], np.asarray(back["priority"])[:, real]
    for a, b in zip(priority, ranked, strict=True):
        np.testing.assert_array_equal(np.sign(a[:, None] - a), np.sign(b[:, None] - b))


def test_encoded_choices():
    problem = toys.chain(5)
    plan = {
        "weights": jnp.asarray([0, 1, 2, 1, 0], jnp.int32),
        "activations": jnp.asarray([2, 2, 0, 0, 1], jnp.int32),
    }
    keys = encode(problem, plan, low=0.1, high=0.9)
    np.testing.assert_allclose(keys["weights"][1], [0.1, 0.9, 0.1])
    back = decode(problem, keys)
    np.testing.assert_array_equal(back["weights"], plan["weights"])
    np.testing.assert_array_equal(back["activations"], plan["activations"])


def test_zeros_tie_whatever_their_sign():
    problem = execution()
    values = np.linspace(-1, 1, problem.graph.num_ops, dtype=np.float32)
    values[3], values[5] = 0.0, -0.0
    plan = {**problem.reference, "priority": jnp.asarray(values)}
    ranks = encode(problem, plan)["priority"][:, 0]
    assert ranks[3] == ranks[5]


def test_bins_hold_the_uniform_pair():
    assert MEANS[UNIFORM_MEAN] == 0.5
    assert len(MEANS) == len(FRACTIONS) == 8
    mean = {"x": jnp.full((2, 1), UNIFORM_MEAN, jnp.int32)}
    fraction = {"x": jnp.asarray([[UNIFORM_FRACTION], [0]], jnp.int32)}
    betas = betas_of_bins(mean, fraction)
    np.testing.assert_array_equal(betas.alpha["x"][0], 1.0)
    np.testing.assert_array_equal(betas.beta["x"][0], 1.0)
    np.testing.assert_allclose(betas.alpha["x"][1], 0.5 * (1 / FRACTIONS[0] - 1), rtol=1e-5)


def test_moments_give_their_distributions():
    mean, fraction = np.meshgrid(MEANS, FRACTIONS)
    betas = betas_of_moments(
        {"x": jnp.asarray(mean, jnp.float32)}, {"x": jnp.asarray(fraction, jnp.float32)}
    )
    law = scipy.stats.beta(np.asarray(betas.alpha["x"]), np.asarray(betas.beta["x"]))
    np.testing.assert_allclose(law.mean(), mean, rtol=1e-4)
    np.testing.assert_allclose(law.var(), fraction * mean * (1 - mean), rtol=1e-4)


def test_draws_are_the_quantiles_of_every_bin():
    knots = jax.jit(bin_knots)().reshape(len(MEANS) * len(FRACTIONS), -1)
    levels = (np.arange(2000) + 0.5) / 2000
    uniform = jnp.asarray(np.tile(levels[:, None], (1, len(knots))), jnp.float32)
    drawn = np.asarray(draw_all(knots, uniform))
    mean, fraction = (x.reshape(-1) for x in np.meshgrid(MEANS, FRACTIONS, indexing="ij"))
    strength = 1 / fraction - 1
    law = scipy.stats.beta(mean * strength, (1 - mean) * strength)
    exact = law.ppf(levels[:, None])
    assert (np.diff(drawn, axis=0) >= 0).all()
    assert np.abs(drawn - exact).max() < 0.05
    np.testing.assert_allclose(drawn.mean(0), mean, atol=2e-3)
    # Of what these levels can show: the rarest bins hold most of their variance in their tails.
    np.testing.assert_allclose(drawn.var(0), exact.var(0), rtol=2e-2)
    uniform_bin = UNIFORM_MEAN * len(FRACTIONS) + UNIFORM_FRACTION
    np.testing.assert_array_equal(drawn[:, uniform_bin], uniform[:, uniform_bin])


def test_a_proposal_of_a_problem():
    problem = toys.chain(4)
    shapes = gene_shapes(problem)
    plain = uniform_betas(problem)
    alpha = {name: value.at[1, 2].set(9.0) for name, value in plain.alpha.items()}
    knots = knots_of(problem, Betas(alpha, plain.beta))
    uniform = jax.random.uniform(jax.random.key(0), (4000, width(problem)))
    drawn = jax.vmap(lambda flat: unflatten(problem, flat))(draw_all(knots, uniform))
    same = jax.vmap(lambda flat: unflatten(problem, flat))(uniform)
    for name, (length, count) in shapes.items():
        changed = np.zeros((length, count), bool)
        changed[1, 2] = True
        np.testing.assert_array_equal(drawn[name][:, ~changed], same[name][:, ~changed])
        law = scipy.stats.beta(9.0, 1.0)
        sample = np.asarray(drawn[name][:, 1, 2])
        assert abs(sample.mean() - law.mean()) < 5 * law.std() / np.sqrt(4000)
        assert scipy.stats.kstest(sample, law.cdf).pvalue > 1e-3


def test_the_ends_of_the_interval():
    alpha, beta = (jnp.asarray(x, jnp.float32) for x in ([1e-3, 1.0, 1e4], [1e-3, 50.0, 1e4]))
    knots = jax.jit(jax.vmap(betas_module._knots))(alpha, beta)
    drawn = draw_all(knots, jnp.asarray([[0.0] * 3, [0.5] * 3, [1.0] * 3], jnp.float32))
    assert np.isfinite(drawn).all()
    assert (drawn >= 0).all()
    assert (drawn <= 1).all()
    assert (np.diff(drawn, axis=0) > 0).all()
