"""The learner: smooth actions, exact entropy, finite gradients, and that it learns."""

from __future__ import annotations

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from egx.graph.builder import GraphBuilder
from egx.policies.context import GraphContext, neighbour_edges
from egx.policies.distributions import entropy, greedy
from egx.policies.graph_unet import GraphUNetCritic, GraphUNetPolicy
from egx.search.replay import add, empty_replay
from egx.search.sac import SAC, critic_loss_of, one_hot

CHOICES = (("weights", 3), ("activations", 2))
OPS, PADDED, FEATURES = 4, 6, 5
SIZES = {"width": 16, "depth": 1, "attention_heads": 2}


@functools.cache
def context():
    builder, last = GraphBuilder("chain"), ()
    for k in range(OPS):
        last = builder.op(
            str(k), kind="elementwise", op_type="any", inputs=last, output_bytes=[1], flops=1.0
        )
    graph = builder.build(pad_to=(PADDED, 8, 8))
    edges = neighbour_edges(graph)
    near = np.zeros((PADDED, PADDED), np.float32)
    near[np.asarray(edges.receivers), np.asarray(edges.senders)] = np.asarray(edges.mask)
    near[OPS:] = 0.0
    features = jax.random.uniform(jax.random.key(0), (PADDED, FEATURES))
    return GraphContext(
        features=jnp.where(graph.op_mask[:, None], features, 0.0),
        mask=graph.op_mask,
        edges=edges,
        two_hops=jnp.asarray(near @ near > 0),
    )


@functools.cache
def networks():
    keys = jax.random.split(jax.random.key(0))
    actor = GraphUNetPolicy(FEATURES, CHOICES, key=keys[0], **SIZES)
    return actor, GraphUNetCritic(FEATURES, 5, key=keys[1], **SIZES)


def filled(reward, count=200):
    rng = np.random.default_rng(0)
    levels = {
        name: jnp.asarray(rng.integers(0, top, (count, PADDED)), jnp.int32) for name, top in CHOICES
    }
    return add(empty_replay(CHOICES, PADDED, count), levels, reward(levels))


def share_of_zeros(levels):
    """The share of real ops whose weights are on level 0 and activations on level 1."""
    weights, activations = levels["weights"][:, :OPS] == 0, levels["activations"][:, :OPS] == 1
    return jnp.mean(weights, axis=1) + jnp.mean(activations, axis=1) - 1.0


def test_one_hot_vectors_stand_in_the_order_of_the_choices():
    levels = {"activations": jnp.asarray([1, 0]), "weights": jnp.asarray([2, 0])}
    np.testing.assert_array_equal(one_hot(levels, CHOICES), [[0, 0, 1, 0, 1], [1, 0, 0, 1, 0]])


def test_smoothed_actions_stay_in_the_unit_cube_and_off_padding():
    actions = jnp.zeros((50, PADDED, 5)).at[:, :, 1].set(1.0)
    got = np.asarray(SAC().smoothed(actions, context(), key=jax.random.key(0)))
    assert got.min() >= 0.0
    assert got.max() <= 1.0
    assert (got[:, OPS:] == 0).all()
    ones, zeros = got[:, :OPS, 1], got[:, :OPS, 0]
    # Half of the noise is cut off at each vertex; the rest is half of N(0, 0.2).
    for off in (1.0 - ones, zeros):
        np.testing.assert_allclose((off > 0).mean(), 0.5, atol=0.1)
        np.testing.assert_allclose(np.sqrt((off**2).mean()), 0.2 / np.sqrt(2), rtol=0.15)


def test_losses_and_gradients_are_finite_and_reach_every_weight():
    actions = jax.random.uniform(jax.random.key(1), (7, PADDED, 5))
    targets = jnp.linspace(0.0, 10.0, 7)
    sac = SAC(alpha=0.5)

    @jax.jit
    def both(actor, critic, context):
        of_critic = jax.value_and_grad(critic_loss_of)(critic, context, actions, targets)
        of_actor = jax.value_and_grad(sac.actor_loss, has_aux=True)(actor, critic, context)
        values = jax.vmap(critic, in_axes=(None, 0))(context, actions)
        logits = actor.logits(context)
        joined = jnp.concatenate([jax.nn.softmax(logits[name]) for name, _ in CHOICES], axis=1)
        own = critic(context, jnp.where(context.mask[:, None], joined, 0.0))
        return of_critic, of_actor, values, own, entropy(logits, context.mask)

    (loss, gradient), ((to_improve, spread), to_actor), values, own, want = both(
        *networks(), context()
    )
    np.testing.assert_allclose(loss, sum(np.mean((v - targets) ** 2) for v in values), rtol=1e-5)
    np.testing.assert_allclose(spread, want, rtol=1e-6)
    np.testing.assert_allclose(to_improve, -min(own) - 0.5 * spread, rtol=1e-5)
    for leaf in jax.tree.leaves((gradient, to_actor)):
        assert np.isfinite(leaf).all()
        assert np.abs(leaf).max() > 0


def test_relaxation_by_the_largest_probability_hides_the_others():
    actor, _ = networks()
    logits = actor.logits(context())
    whole = SAC().relaxed(logits, CHOICES, context())
    largest = SAC(relaxation="largest").relaxed(logits, CHOICES, context())
    chosen = np.asarray(one_hot(greedy(logits), CHOICES))[:OPS]
    np.testing.assert_allclose(largest[:OPS], np.asarray(whole)[:OPS] * chosen)
    np.testing.assert_allclose(np.asarray(whole)[:OPS].sum(1), 2.0, rtol=1e-6)


@eqx.filter_jit
def _learn(sac, both, context, replay, steps):
    return sac.learn(sac.start(*both), context, replay, steps=steps, key=jax.random.key(1))


def run(steps=250, reward=share_of_zeros, **options):
    """Rates as arrays, so that all of them share one compiled program."""
    sac = jax.tree.map(lambda rate: jnp.asarray(rate, jnp.float32), SAC(**options))
    return _learn(sac, networks(), context(), filled(reward), steps)


def test_it_learns_which_decisions_pay():
    before = networks()[0].logits(context())
    state, metrics = run(learning_rate=5e-3)
    levels = jax.tree.map(lambda x: x[None], greedy(state.actor.logits(context())))
    assert share_of_zeros(levels)[0] == 1.0
    assert share_of_zeros(jax.tree.map(lambda x: x[None], greedy(before)))[0] < 1.0
    assert all(np.isfinite(value) for value in metrics.values())
    # The critic's value of the best decisions: 5 x (1 + 2).
    value = critic_value(state, levels)
    np.testing.assert_allclose(value, 15.0, atol=1.5)


def critic_value(state, levels):
    actions = jnp.where(context().mask[:, None], one_hot(levels, CHOICES)[0], 0.0)
    return min(state.critic(context(), actions))


def test_entropy_is_bought_by_alpha():
    spreads = [
        entropy(run(alpha=alpha, learning_rate=5e-3)[0].actor.logits(context()), context().mask)
        for alpha in (0.0, 50.0)
    ]
    assert spreads[0] < 0.5
    assert spreads[1] > 0.95 * (np.log(3) + np.log(2))


def test_bootstrapping_adds_the_value_of_the_same_graph():
    """With a constant reward r, y = 5 (r + 2) + gamma V rises towards the discounted sum."""
    plain, _ = run(learning_rate=5e-3, reward=lambda x: jnp.zeros(200))
    more, _ = run(
        learning_rate=5e-3,
        bootstrap=True,
        gamma=0.5,
        tau=0.2,
        alpha=0.0,
        reward=lambda x: jnp.zeros(200),
    )
    levels = {name: jnp.zeros((1, PADDED), jnp.int32) for name, _ in CHOICES}
    np.testing.assert_allclose(critic_value(plain, levels), 10.0, atol=1.0)
    np.testing.assert_allclose(critic_value(more, levels), 20.0, atol=2.5)


def test_one_step_clips_gradients_and_moves_the_target_a_little():
    state, _ = run(tau=0.25, clip=0.01, steps=1, reward=lambda x: jnp.full(200, 1e6))
    start = networks()[1]
    for old, new, target in zip(
        *map(jax.tree.leaves, (start, state.critic, state.target)), strict=True
    ):
        np.testing.assert_allclose(target, 0.75 * old + 0.25 * new, atol=1e-6)
    # Adam hides the scale of a gradient, but its first moment is a tenth of the first one.
    np.testing.assert_allclose(jnp.linalg.norm(state.critic_moments.mu), 0.1 * 0.01, rtol=1e-3)
    again, _ = run(tau=0.25, clip=0.01, steps=1, reward=lambda x: jnp.full(200, 1e6))
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(a, b)
