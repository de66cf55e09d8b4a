"""REGAL's networks: against plain ones in NumPy, under padding and relabelling, and rebuilt."""

from __future__ import annotations

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from egx.errors import CheckpointError, SearchError
from egx.graph.builder import GraphBuilder
from egx.graph.generators import random_graph
from egx.graph.padding import pad_graph
from egx.hardware.spec import Hardware
from egx.policies.layers import initialised
from egx.policies.loading import load_policy
from egx.policies.messages import message_context, run_times
from egx.policies.proposal import (
    FRACTIONS,
    MEANS,
    UNIFORM_FRACTION,
    UNIFORM_MEAN,
    ProposalBins,
    ProposalLogits,
    bin_moments,
    draw_keys,
    likeliest_bins,
    log_probability,
    marginal_moments,
    mean_entropy,
    problem_genes,
    sample_bins,
)
from egx.policies.regal_net import RegalPolicy, Round
from egx.policies.sequence_net import Gated, SequencePolicy
from egx.problems.execution import Execution

KINDS = [RegalPolicy, SequencePolicy]
ROOM = (14, 20, 24)


def machine(devices=2):
    return Hardware(
        flops_per_s=np.full((devices, 5), 1e9),
        level_bytes=np.full((devices, 1), 1e9),
        read_bytes_per_s=np.full((devices, 1), 1e9),
        write_bytes_per_s=np.full((devices, 1), 1e9),
        link_bytes_per_s=np.full((devices, devices), 1e9),
        link_latency_s=np.zeros((devices, devices)),
        launch_s=np.zeros(devices),
    )


def problem(graph=None, decide=("device", "priority", "transfer_priority")):
    graph = random_graph(np.random.default_rng(0), "layered", 9).graph if graph is None else graph
    return Execution(graph, machine(), decide=decide)


@functools.cache
def small_problem():
    return problem()


@functools.cache
def policy(kind, genes=None):
    genes = problem_genes(small_problem()) if genes is None else genes
    size = {"rounds": 3} if kind is RegalPolicy else {"depth": 1}
    return eqx.filter_jit(lambda key: kind(genes, width=8, key=key, **size))(jax.random.key(0))


@eqx.filter_jit
def ask(policy, problem):
    return policy.logits_and_value(problem)


def outspoken(policy):
    """A policy whose last layers were not started near 0."""
    return eqx.tree_at(
        lambda p: [p.heads[name].final.weight for name in sorted(p.heads)],
        policy,
        [policy.heads[name].final.weight * 100.0 for name in sorted(policy.heads)],
    )


def dense(layer, x):
    return x @ np.asarray(layer.weight) + np.asarray(layer.bias)


def test_a_round_is_two_layer_networks_summed_over_edges():
    context = message_context(small_problem())
    layer = initialised(lambda draws: Round(5, draws), jax.random.key(1))
    rng = np.random.default_rng(2)
    x = rng.normal(size=(len(context.mask), 5)).astype(np.float32)
    edges = rng.normal(size=(len(context.use_mask), 5)).astype(np.float32)

    def gather(messages, senders, receivers):
        total = np.zeros_like(x)
        for u in np.flatnonzero(np.asarray(context.use_mask)):
            s, r = int(senders[u]), int(receivers[u])
            hidden = dense(messages.sender, x[s]) + dense(messages.receiver, x[r])
            total[r] += dense(
                messages.final, np.maximum(hidden + dense(messages.edge, edges[u]), 0)
            )
        return total

    along = gather(layer.along, context.producer, context.consumer)
    against = gather(layer.against, context.consumer, context.producer)
    hidden = np.maximum(dense(layer.hidden, np.concatenate([x, along, against], 1)), 0)
    expected = x + dense(layer.final, hidden)
    expected -= expected.mean(1, keepdims=True)
    expected /= np.sqrt((expected**2).mean(1, keepdims=True) + 1e-6)
    got = eqx.filter_jit(layer)(jnp.asarray(x), jnp.asarray(edges), context)
    np.testing.assert_allclose(got, expected, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("reverse", [False, True])
def test_gated_units_against_a_loop(reverse):
    layer = initialised(lambda draws: Gated(3, 4, draws), jax.random.key(0))
    x = np.random.default_rng(0).normal(size=(6, 3)).astype(np.float32)
    mask = np.array([1, 1, 1, 1, 0, 0], bool)
    h, expected = np.zeros(4, np.float32), np.zeros((6, 4), np.float32)
    for i in range(6)[:: -1 if reverse else 1]:
        if mask[i]:
            (u, r, n), (hu, hr, hn) = (
                np.split(part, 3) for part in (dense(layer.inputs, x[i]), dense(layer.states, h))
            )
            keep, reset = 1 / (1 + np.exp(-(u + hu))), 1 / (1 + np.exp(-(r + hr)))
            h = keep * h + (1 - keep) * np.tanh(n + reset * hn)
        expected[i] = h
    got = layer(jnp.asarray(x), jnp.asarray(mask), reverse=reverse)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_padding_changes_nothing(kind):
    plain = small_problem()
    padded = problem(pad_graph(plain.graph, ROOM))
    net = outspoken(policy(kind))
    (logits, value), (wide, wide_value) = ask(net, plain), ask(net, padded)
    np.testing.assert_allclose(value, wide_value, rtol=1e-5, atol=1e-6)
    for part in ("mean", "fraction"):
        for name, expected in getattr(logits, part).items():
            got = np.asarray(getattr(wide, part)[name])
            assert float(np.std(expected)) > 1e-2
            np.testing.assert_allclose(got[: len(expected)], expected, rtol=1e-4, atol=1e-5)
            assert (got[len(expected) :] == 0).all()
    bins, wide_bins = (sample_bins(x, key=jax.random.key(3)) for x in (logits, wide))
    np.testing.assert_array_equal(
        bins.mean["device"], wide_bins.mean["device"][: plain.graph.num_ops]
    )
    np.testing.assert_allclose(
        log_probability(logits, bins, plain), log_probability(wide, wide_bins, padded), rtol=1e-4
    )
    np.testing.assert_allclose(mean_entropy(logits, plain), mean_entropy(wide, padded), rtol=1e-4)


def diamond(order):
    """A source, three branches of different sizes in the given order, and a sink."""
    builder = GraphBuilder("diamond")

    def op(name, inputs, size):
        return builder.op(
            name, kind="elementwise", op_type="x", inputs=inputs, output_bytes=[size], flops=size
        )[0]

    source = op("source", [], 8)
    branches = {k: op(f"branch{k}", [source], 16 * (k + 1)) for k in order}
    builder.output(op("sink", [branches[k] for k in sorted(order)], 4))
    return problem(builder.build(), decide=("device", "priority"))


def test_the_graph_network_does_not_see_the_order_of_ops():
    one, other = diamond((0, 1, 2)), diamond((2, 0, 1))
    net = outspoken(policy(RegalPolicy, problem_genes(one)))
    (first, value), (second, other_value) = ask(net, one), ask(net, other)
    place = np.array([0, 2, 3, 1, 4])
    np.testing.assert_allclose(value, other_value, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(
        first.mean["priority"], second.mean["priority"][place], rtol=1e-4, atol=1e-5
    )
    assert float(jnp.ptp(first.mean["priority"][1:4, 0, 0])) > 1e-3


def test_messages_reach_as_far_as_there_are_rounds():
    builder, previous = GraphBuilder("chain"), ()
    for i in range(7):
        previous = builder.op(
            f"op{i}",
            kind="elementwise",
            op_type="x",
            inputs=previous,
            output_bytes=[64],
            flops=1.0 if i else 50.0,
        )
    builder.output(previous[0])
    one = problem(builder.build(), decide=("priority",))
    context = message_context(one)
    changed = eqx.tree_at(lambda c: c.nodes, context, context.nodes.at[0, 3].mul(2.0))
    states = eqx.filter_jit(policy(RegalPolicy).states)
    moved = np.abs(np.asarray(states(context) - states(changed))).max(1) > 1e-7
    assert moved.tolist() == [True] * 4 + [False] * 3


@pytest.mark.parametrize("kind", KINDS)
def test_a_fresh_policy_is_close_to_plain(kind):
    one = small_problem()
    logits, value = ask(policy(kind), one)
    bins = likeliest_bins(logits)
    for name in one.heads:
        assert (bins.mean[name] == UNIFORM_MEAN).all()
        assert (bins.fraction[name] == UNIFORM_FRACTION).all()
        p = jax.nn.softmax(logits.mean[name])
        assert float(p[..., UNIFORM_MEAN].min()) > 0.4
        assert float(jnp.ptp(jnp.delete(p, UNIFORM_MEAN, axis=-1))) < 0.02
    np.testing.assert_allclose(value, -1.0, atol=0.02)


@pytest.mark.parametrize("kind", KINDS)
def test_a_policy_is_rebuilt_from_its_file(kind, tmp_path):
    one = small_problem()
    net = policy(kind)
    net.save(tmp_path / "policy.npz")
    again, key = load_policy(tmp_path / "policy.npz"), jax.random.key(0)
    assert type(again) is kind
    assert eqx.tree_equal(net, again)
    plan, sampled = eqx.filter_jit(lambda: (again.decide(one), again.decide(one, key=key)))()
    costs = jax.vmap(one.evaluate)(jax.tree.map(lambda a, b: jnp.stack([a, b]), plan, sampled)).cost
    assert np.isfinite(costs).all()
    assert not np.array_equal(sampled["priority"], plan["priority"])


def test_other_bins_than_those_of_this_version_are_refused(tmp_path, monkeypatch):
    net = policy(RegalPolicy)
    config = net.config() | {"means": [0.5]}
    monkeypatch.setattr(RegalPolicy, "config", lambda self: config)
    net.save(tmp_path / "policy.npz")
    with pytest.raises(CheckpointError, match=r"means \[0.5\]; this egx has"):
        load_policy(tmp_path / "policy.npz")


def test_other_decisions_are_refused():
    net = policy(RegalPolicy)
    three = Execution(small_problem().graph, machine(3), decide=("device",))
    with pytest.raises(SearchError, match=r"device \(2 keys per op\).*decides device \(3 keys"):
        net(three)
    with pytest.raises(SearchError, match="width must be an even number of 2 or more, got 7"):
        SequencePolicy((("device", "op", 2),), width=7, key=jax.random.key(0))
    with pytest.raises(SearchError, match="rounds must be 0 or more, got -1"):
        RegalPolicy((("device", "op", 2),), rounds=-1, key=jax.random.key(0))


def test_run_times_are_the_mean_over_devices():
    graph = small_problem().graph
    seconds = np.random.default_rng(0).uniform(1, 2, (graph.num_ops, 2))
    measured = Execution(graph, machine(), op_seconds=seconds)
    np.testing.assert_allclose(run_times(measured), seconds.mean(1), rtol=1e-6)


def logits_of_one_key():
    rng = np.random.default_rng(0)

    def draw(count):
        return {"priority": jnp.asarray(rng.normal(size=(1, 1, count)), jnp.float32)}

    return ProposalLogits(draw(len(MEANS)), draw(len(FRACTIONS)))


def test_bins_are_drawn_with_their_probabilities():
    logits = logits_of_one_key()
    keys = jax.random.split(jax.random.key(0), 20_000)
    bins = jax.vmap(lambda key: sample_bins(logits, key=key))(keys)
    for part in ("mean", "fraction"):
        drawn = np.asarray(getattr(bins, part)["priority"]).ravel()
        share = np.bincount(drawn, minlength=8) / len(drawn)
        expected = jax.nn.softmax(getattr(logits, part)["priority"][0, 0])
        np.testing.assert_allclose(share, expected, atol=0.012)
    moments = jax.vmap(bin_moments)(bins)
    drawn = jax.vmap(lambda m, key: draw_keys(m, key=key)["priority"][0, 0])(moments, keys)
    marginal = marginal_moments(logits)
    mean, fraction = (float(x["priority"][0, 0]) for x in (marginal.mean, marginal.fraction))
    np.testing.assert_allclose(np.mean(drawn), mean, atol=0.01)
    np.testing.assert_allclose(np.var(drawn), fraction * mean * (1 - mean), atol=0.005)


def test_log_probability_by_hand():
    one = Execution(small_problem().graph, machine(), decide=("device",))
    n = one.graph.num_ops
    logits = ProposalLogits({"device": jnp.zeros((n, 2, 8))}, {"device": jnp.zeros((n, 2, 8))})
    bins = ProposalBins(
        {"device": jnp.ones((n, 2), jnp.int32)}, {"device": jnp.zeros((n, 2), jnp.int32)}
    )
    np.testing.assert_allclose(log_probability(logits, bins, one), -4 * n * np.log(8), rtol=1e-5)
    np.testing.assert_allclose(mean_entropy(logits, one), 2 * np.log(8), rtol=1e-5)
