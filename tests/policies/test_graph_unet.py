"""The Graph U-Net: against a plain one in NumPy, under padding and relabelling, and rebuilt."""

from __future__ import annotations

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from egx.errors import SearchError
from egx.graph.generators import random_graph
from egx.graph.padding import pad_graph
from egx.hardware.spec import Hardware
from egx.policies import POLICIES
from egx.policies.context import Edges, GraphContext, graph_context
from egx.policies.graph_unet import GraphUNetCritic, GraphUNetPolicy
from egx.problems.memory_placement import MemoryPlacement

CHOICES = (("weights", 3), ("activations", 3))
SIZES = {"width": 16, "depth": 2, "attention_heads": 4}


ROOM = (32, 64, 96)


@functools.cache
def problem(ops=21, pad_to=None):
    graph = random_graph(np.random.default_rng(0), "layered", ops).graph
    graph = graph if pad_to is None else pad_graph(graph, pad_to)
    one = np.ones((1, 1))
    return MemoryPlacement(
        graph,
        Hardware(
            flops_per_s=np.full((1, 5), 1e9),
            level_bytes=[[1e12, 1e6, 1e5]],
            read_bytes_per_s=[[1e9, 1e10, 1e11]],
            write_bytes_per_s=[[1e9, 1e10, 1e11]],
            link_bytes_per_s=one,
            link_latency_s=one,
            launch_s=[1e-6],
        ),
    )


@functools.cache
def policy(**more):
    make = eqx.filter_jit(lambda key: GraphUNetPolicy(19, CHOICES, key=key, **(SIZES | more)))
    return make(jax.random.key(0))


@functools.cache
def critic(**more):
    make = eqx.filter_jit(lambda key: GraphUNetCritic(19, 6, key=key, **SIZES, **more))
    return make(jax.random.key(1))


@eqx.filter_jit
def ask(policy, problem):
    logits = policy(problem)
    # Here, for jit puts names in alphabetical order.
    assert list(logits) == ["weights", "activations"]
    return logits


@eqx.filter_jit
def ask_of(policy, context):
    return policy.logits(context)


@eqx.filter_jit
def worth(critic, context, actions):
    return critic(context, actions)


def context(features, adjacency):
    """A context from a boolean matrix with a diagonal of True."""
    receivers, senders = (jnp.asarray(x, jnp.int32) for x in np.nonzero(np.asarray(adjacency)))
    reach = np.asarray(adjacency, np.float32)
    return GraphContext(
        features=jnp.asarray(features),
        mask=jnp.ones(len(adjacency), bool),
        edges=Edges(senders, receivers, jnp.ones(len(receivers), bool)),
        two_hops=jnp.asarray(reach @ reach > 0),
    )


def matrix(graph):
    """The neighbours of each op, by Python loops."""
    n = int(np.asarray(graph.op_mask).sum())
    found = np.eye(n, dtype=bool)
    producer = np.asarray(graph.use_producer())
    for use in np.flatnonzero(np.asarray(graph.use_mask)):
        i, j = int(producer[use]), int(graph.use_consumer[use])
        found[i, j] = found[j, i] = True
    return found


def numpy_logits(policy, features, adjacency):
    """The same network, one node and one neighbour at a time."""

    def attend(layer, x, adjacency):
        heads, each = layer.source.shape
        v = (x @ np.asarray(layer.weight)).reshape(len(x), heads, each)
        s = (v * np.asarray(layer.source)).sum(-1)
        t = (v * np.asarray(layer.target)).sum(-1)
        out = np.zeros_like(v)
        for i in range(len(x)):
            near = np.flatnonzero(adjacency[i])
            for h in range(heads):
                score = s[i, h] + t[near, h]
                weight = np.exp(np.where(score > 0, score, 0.2 * score))
                out[i, h] = (weight / weight.sum()) @ v[near, h]
        return out.reshape(len(x), -1) + np.asarray(layer.bias)

    relu = lambda x: np.maximum(x, 0.0)  # noqa: E731
    trunk, skips = policy.trunk, []
    x = attend(trunk.first, np.asarray(features, np.float64), adjacency)
    for layer, score in zip(trunk.down, trunk.scores, strict=True):
        x, score = relu(x), np.asarray(score)
        value = x @ score / np.linalg.norm(score)
        kept = np.argsort(-value, kind="stable")[: (len(x) + 1) // 2]
        skips.append((x, adjacency, kept))
        squared = (adjacency.astype(int) @ adjacency.astype(int)) > 0
        adjacency = squared[np.ix_(kept, kept)]
        x = attend(layer, x[kept] / (1 + np.exp(-value[kept]))[:, None], adjacency)
    for layer, (skip, adjacency, kept) in zip(trunk.up, reversed(skips), strict=True):
        up = skip.copy()
        up[kept] += relu(x)
        x = attend(layer, up, adjacency)
    for layer in policy.hidden:
        x = np.tanh(x @ np.asarray(layer.weight) + np.asarray(layer.bias))
    return {
        name: x @ np.asarray(head.weight) + np.asarray(head.bias)
        for name, head in policy.heads.items()
    }


@pytest.mark.parametrize("ops", [1, 2, 21])
def test_it_is_the_network_it_says(ops):
    made, one = problem(ops), policy()
    got = ask(one, made)
    want = numpy_logits(one, made.features, matrix(made.graph))
    for name, _ in CHOICES:
        np.testing.assert_allclose(got[name], want[name], atol=2e-5)
    # Ops of different sizes are told apart.
    if ops > 2:
        assert np.asarray(got["weights"]).std(axis=0).max() > 1e-3


def test_two_hops_are_the_square_of_the_neighbours():
    made = problem(pad_to=ROOM)
    near = matrix(made.graph).astype(int)
    got = np.asarray(graph_context(made).two_hops)
    np.testing.assert_array_equal(got[:21, :21], near @ near > 0)
    assert not got[21:].any()


@pytest.mark.parametrize("messages", [True, False])
def test_padding_changes_nothing(messages):
    plain, padded = problem(), problem(pad_to=ROOM)
    one, two = policy(messages=messages), critic(messages=messages)
    actions = jax.random.uniform(jax.random.key(2), (21, 6))
    expected = ask(one, plain)
    for name, value in ask(one, padded).items():
        np.testing.assert_allclose(value[:21], expected[name], atol=2e-5)
        assert (np.asarray(value[21:]) == 0).all()
    got = worth(two, graph_context(padded), jnp.concatenate([actions, jnp.zeros((11, 6))]))
    np.testing.assert_allclose(got, worth(two, graph_context(plain), actions), rtol=1e-4)


def test_relabelled_ops_get_the_same_logits():
    made, one = problem(), policy()
    features, near = np.asarray(made.features), matrix(made.graph)
    order = np.random.default_rng(1).permutation(len(near))
    want = ask_of(one, context(features, near))
    got = ask_of(one, context(features[order], near[np.ix_(order, order)]))
    for name, value in want.items():
        np.testing.assert_allclose(got[name], value[order], atol=2e-5)


@pytest.mark.parametrize("messages", [True, False])
def test_messages_run_both_ways_and_only_with_messages(messages):
    near = np.eye(5, dtype=bool) | np.eye(5, k=1, dtype=bool) | np.eye(5, k=-1, dtype=bool)
    features = np.random.default_rng(0).uniform(size=(5, 19)).astype(np.float32)
    changed = features.copy()
    changed[2] += 0.5
    one = policy(messages=messages, depth=1)
    difference = np.abs(
        ask_of(one, context(changed, near))["weights"]
        - ask_of(one, context(features, near))["weights"]
    ).max(axis=1)
    assert difference[2] > 1e-4
    assert ((difference[[1, 3]] > 1e-6) == messages).all()


def test_a_batch_of_actions_is_valued_one_by_one():
    shared, two = graph_context(problem()), critic(messages=True)
    actions = jax.random.uniform(jax.random.key(2), (3, 21, 6))
    every = eqx.filter_jit(lambda critic, *given: jax.vmap(critic, in_axes=(None, 0))(*given))
    together = every(two, shared, actions)
    alone = jnp.stack([jnp.stack(worth(two, shared, one)) for one in actions])
    np.testing.assert_allclose(jnp.stack(together, 1), alone, rtol=1e-4)
    assert not np.allclose(alone[:, 0], alone[:, 1])


def test_it_is_rebuilt_from_its_configuration():
    one = policy(real_levels=5)
    kind = POLICIES["graph_unet"]
    rebuild = eqx.filter_jit(lambda key: kind.from_config(one.config(), key))
    other = rebuild(jax.random.key(7))
    assert other.config() == one.config()
    assert jax.tree.structure(other) == jax.tree.structure(one)
    assert not np.array_equal(other.hidden[0].weight, one.hidden[0].weight)
    same = rebuild(jax.random.key(0))
    for a, b in zip(jax.tree.leaves(same), jax.tree.leaves(one), strict=True):
        np.testing.assert_array_equal(a, b)


def test_its_size_does_not_depend_on_the_graph():
    one = policy()
    for ops in (3, 30):
        assert ask(one, problem(ops))["weights"].shape == (ops, 3)


def test_decisions_are_greedy_or_sampled():
    made, one = problem(), policy()
    decide = eqx.filter_jit(lambda policy, problem, key: policy.decide(problem, key=key))
    greedy = decide(one, made, None)
    np.testing.assert_array_equal(greedy["weights"], jnp.argmax(ask(one, made)["weights"], axis=1))
    first = decide(one, made, jax.random.key(0))
    assert not np.array_equal(first["weights"], greedy["weights"])
    assert np.isfinite(made.evaluate(first).cost)


def test_what_does_not_fit_is_refused():
    made = problem()
    with pytest.raises(SearchError, match=r"decides .*'weights': 2.* asks for .*'weights': 3"):
        GraphUNetPolicy(19, (("weights", 2), ("activations", 3)), key=jax.random.key(0), **SIZES)(
            made
        )
    with pytest.raises(SearchError, match="takes 18 features an op, but the problem has 19"):
        GraphUNetPolicy(18, CHOICES, key=jax.random.key(0), **SIZES)(made)
    with pytest.raises(SearchError, match=r"multiple of attention_heads \(4\), got 18"):
        policy(width=18)
    with pytest.raises(SearchError, match="depth must be 0 or more, got -1"):
        policy(depth=-1)
