"""HDP: its gradient against NumPy, padding, decisions by group, and a toy with a known optimum."""

from __future__ import annotations

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from egx.errors import SearchError
from egx.policies.hdp_net import HDPNet, Sharpness, draw_groups, hdp_context
from egx.problems.execution import Execution
from egx.search.hdp import HDP, policy_loss
from tests.oracles.hdp_oracle import Oracle
from tests.search import toys
from tests.simulate import cases
from tests.simulate import execution_cases as several

SHARP = Sharpness(jnp.asarray(5.0), jnp.asarray(10.0))


@functools.cache
def two_chains(decide=("device",), pad=False):
    """Two chains of three ops that never meet: apart on two devices they take 9 s, not 18 s."""
    inputs = [[], [], [0], [1], [2], [3]]
    ops = [{"inputs": i, "sizes": [4], "flops": 3.0, "weight": 2} for i in inputs]
    graph = cases.build(ops, [4, 5], pad_to=(9, 10, 8) if pad else None)
    return Execution(graph, several.devices(2, link=0.5), decide=decide)


def tiny_net(problem, groups=3):
    inputs = hdp_context(problem).inputs.shape[1]
    choices = (("device", 2), ("fusion", 3))
    net = HDPNet(inputs, choices, groups=groups, width=4, key=jax.random.key(0))
    # Larger weights, so that nothing is nearly linear.
    return jax.tree.map(lambda x: 3.0 * x, net)


def named(net):
    def dense(layer):
        return np.asarray(layer.weight, np.float64), np.asarray(layer.bias, np.float64)

    out = {f"grouper.{k}": dense(layer) for k, layer in enumerate(net.grouper)}
    out |= {f"attention.{k}": dense(layer) for k, layer in enumerate(net.attention)}
    out["embedding"] = dense(net.embedding)
    for name in ("encoder", "decoder"):
        out[f"{name}.inputs"] = dense(getattr(net, name).inputs)
        out[f"{name}.states"] = dense(getattr(net, name).states)
    out |= {f"heads.{name}": dense(layer) for name, layer in net.heads.items()}
    return out | {f"last.{name}": np.asarray(x, np.float64) for name, x in net.last.items()}


GROUPS = np.array([[0, 2, 0, 2, 2, 0], [1, 1, 0, 2, 1, 0]], np.int32)
CHOSEN = {
    "device": np.array([[[0, 0, 1], [1, 1, 1]], [[0, 1, 1], [1, 0, 0]]], np.int32),
    "fusion": np.array([[[2, 0, 0], [1, 1, 2]], [[0, 2, 1], [1, 0, 2]]], np.int32),
}
ADVANTAGE = np.array([[0.5, -1.0], [0.25, 2.0]], np.float32)


def oracle_loss(weights, context):
    oracle = Oracle(weights, context, 5.0, 10.0)
    total = 0.0
    for m, p in np.ndindex(2, 2):
        groups = GROUPS[m].tolist()
        chosen = {name: value[m, p].tolist() for name, value in CHOSEN.items()}
        log_p = oracle.grouping(groups) + oracle.placement(groups, chosen, 3)
        total -= float(ADVANTAGE[m, p]) * log_p / 4
    return total


@eqx.filter_jit
def loss_and_gradient(net, context, groups, chosen):
    return jax.value_and_grad(policy_loss)(
        net, context, groups, chosen, jnp.asarray(ADVANTAGE), SHARP
    )


def test_gradient_is_that_of_numpy_and_padding_is_ignored():
    problem = two_chains()
    net, context = tiny_net(problem), hdp_context(problem)
    chosen = jax.tree.map(jnp.asarray, CHOSEN)
    loss, gradient = loss_and_gradient(net, context, jnp.asarray(GROUPS), chosen)
    host = {
        name: np.asarray(getattr(context, name), np.float64)
        for name in ("inputs", "sizes", "bytes")
    }
    host |= {name: np.asarray(getattr(context, name)) for name in ("producer", "consumer")}
    weights = named(net)
    assert float(loss) == pytest.approx(oracle_loss(weights, host), rel=1e-5)
    rng = np.random.default_rng(0)
    for name, got in named(gradient).items():
        for part, (value, slope) in enumerate(
            zip(*(x if isinstance(x, tuple) else (x,) for x in (weights[name], got)), strict=True)
        ):
            del part
            at = tuple(rng.integers(0, size) for size in value.shape)
            before = value[at]
            value[at] = before + 1e-5
            above = oracle_loss(weights, host)
            value[at] = before - 1e-5
            below = oracle_loss(weights, host)
            value[at] = before
            assert slope[at] == pytest.approx((above - below) / 2e-5, rel=1e-3, abs=1e-5), name
    # Three more ops and two more uses of padding, in whichever group.
    padded = np.concatenate([GROUPS, np.array([[0, 1, 1], [2, 2, 0]], np.int32)], 1)
    same, slopes = loss_and_gradient(
        net, hdp_context(two_chains(pad=True)), jnp.asarray(padded), chosen
    )
    assert float(same) == pytest.approx(float(loss), rel=1e-6)
    for a, b in zip(jax.tree.leaves(gradient), jax.tree.leaves(slopes), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_groups_are_drawn_by_their_probabilities():
    p = np.array([[0.2, 0.0, 0.5, 0.3], [1.0, 0.0, 0.0, 0.0]])
    log_p = jnp.log(jnp.asarray(np.repeat(p, 4000, 0), jnp.float32))
    drawn = np.asarray(draw_groups(log_p, key=jax.random.key(1))).reshape(2, -1)
    shares = [np.bincount(row, minlength=4) / row.size for row in drawn]
    np.testing.assert_allclose(shares, p, atol=0.03)


def test_finds_the_known_optimum():
    """The chains one after the other, and of unlike ops: the grouper can tell them apart."""
    inputs = [[], [0], [1], [], [3], [4]]
    kinds = ["contraction"] * 3 + ["elementwise"] * 3
    ops = [
        {"inputs": i, "sizes": [4], "flops": 3.0, "weight": 2, "kind": kind}
        for i, kind in zip(inputs, kinds, strict=True)
    ]
    graph = cases.build(ops, [2, 5])
    problem = Execution(graph, several.devices(2, link=4.0), decide=("device",))
    search = HDP(width=8, groups=4, learning_rate=0.03, temperature=1.0)
    apart = np.array([0, 0, 0, 1, 1, 1])
    state, proposed = toys.search_for(search, problem, generations=120)
    assert float(state.best.cost) == 9.0
    assert int(state.evaluations) == 120 * 16
    # What it has learned, not only what it met.
    last = np.concatenate([plans["device"] for plans in proposed[-10:]])
    best = (last == apart).all(1) | (last == 1 - apart).all(1)
    assert best.mean() > 0.9
    # The optimum's reward is -sqrt(9 / 18).
    assert float(state.inner.baseline) == pytest.approx(-(0.5**0.5), abs=0.03)


@eqx.filter_jit
def first_plans(search, problem, key):
    inner = search.initial(problem, key=key)
    return search.propose(problem, inner, key=key)


def test_decides_by_group():
    problem = two_chains(("fusion", "device", "priority"))
    search = HDP(
        width=4, groups=2, groupings=2, placements=2, levels=3, decides=("device", "priority")
    )
    search.check(problem)
    plans, inner = first_plans(search, problem, jax.random.key(3))
    groups, chosen = inner.groups, inner.chosen
    assert set(plans) == {"fusion", "device", "priority"}
    np.testing.assert_array_equal(plans["fusion"], 0)
    for b in range(4):
        m, p = divmod(b, 2)
        np.testing.assert_array_equal(plans["device"][b], chosen["device"][m, p][groups[m]])
        level = np.asarray(chosen["priority"][m, p][groups[m]], np.float32)
        want = (level + np.asarray(problem.reference["priority"])) / 3
        np.testing.assert_allclose(plans["priority"][b], want, rtol=1e-6)


def test_says_what_it_cannot_do():
    with pytest.raises(SearchError, match="'transfer_priority' is made per use"):
        HDP().check(two_chains(("device", "transfer_priority")))
    with pytest.raises(SearchError, match="decides device, not 'fusion'"):
        HDP(decides="fusion").check(two_chains())
    with pytest.raises(SearchError, match="width must be a whole number of 1 or more, got 0"):
        HDP(width=0)


@pytest.mark.usefixtures("unchecked")
def test_half_a_group_is_refused():
    with pytest.raises(SearchError, match=r"groups must be a whole number of 1 or more, got 2\.5"):
        HDP(groups=2.5)
