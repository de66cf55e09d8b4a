"""Training proposal policies: the gradient by hand, a toy whose answer is known, resume, Ctrl-C."""

from __future__ import annotations

import functools
import os
import shutil
import signal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import egx
from egx.errors import CheckpointError, ProblemError, SearchError
from egx.policies.proposal import marginal_moments
from egx.policies.regal_net import RegalPolicy
from egx.problems.padded import pad_problem, stack_problems
from egx.training import bandit as bandits
from egx.training.bandit import Bandit, bandit_loss, relative
from egx.training.regal_trainer import train_proposals
from tests.runs import Toy, chain

ROOM = (16, 16, 16)
OPTIONS = {
    "network.width": 4,
    "network.rounds": 1,
    "brkga.population": 8,
    "brkga.elites": 2,
    "brkga.mutants": 2,
    "budget": 12,
    "problems": 2,
    "actions": 32,
    "seeds": 32,
    "baseline": "others",
    "learning_rate": 0.1,
    "warm_actions": 64,
    "validation.every": 20,
    "validation.seeds": 32,
    "validation.budget": 12,
}


@functools.cache
def toys():
    return tuple(Toy(chain(ops), 1000) for ops in (5, 6, 8))


def small(steps, **more):
    options = OPTIONS | more.pop("options", {})
    return train_proposals(toys(), steps=steps, validation=toys()[:2], options=options, **more)


def stop_at(step):
    """Progress that presses Ctrl-C."""

    def tell(progress):
        if progress.evaluations == step:
            os.kill(os.getpid(), signal.SIGINT)

    return tell


def same(one, other):
    assert eqx.tree_equal(one.policy, other.policy)
    assert one.history == other.history
    assert one.score == other.score


# The loss.


def test_gradient_of_the_loss_by_hand():
    log_p, reward = np.array([[-1.0, -2.0]]), np.array([[-0.8, -1.1]])
    value, entropy = np.array([-0.9]), np.array([0.5])

    def gradient(bandit, gain=None):
        def loss(log_p, value, entropy):
            given = None if gain is None else jnp.asarray(gain, jnp.float32)
            return bandit_loss(
                log_p, jnp.asarray(reward, jnp.float32), value, entropy, bandit, given
            )

        arguments = (jnp.asarray(x, jnp.float32) for x in (log_p, value, entropy))
        return jax.grad(loss, argnums=(0, 1, 2))(*arguments)

    learned = gradient(Bandit(value_weight=0.5, entropy_bonus=0.25))
    # Minus advantage over the number of actions: rewards stand 0.1 above and 0.2 below the value.
    np.testing.assert_allclose(learned[0], [[-0.1 / 2, 0.2 / 2]], rtol=1e-5)
    # Half of twice the mean error, the policy's own loss leaving the value alone.
    np.testing.assert_allclose(learned[1], [0.5 * ((-0.1 + 0.2) / 2) * 2], rtol=1e-4)
    np.testing.assert_allclose(learned[2], [-0.25], rtol=1e-6)
    # Beside the other one, each is 0.3 better or worse.
    others = gradient(Bandit(baseline="others"))
    np.testing.assert_allclose(others[0], [[-0.3 / 2, 0.3 / 2]], rtol=1e-5)
    given = gradient(Bandit(), gain=[[3.0, -1.0]])
    np.testing.assert_allclose(given[0], [[-3.0 / 2, 1.0 / 2]], rtol=1e-6)


def test_costs_relative_to_plain_ones():
    cost, plain = jnp.asarray([[3.0, 6.0], [0.0, 2.0]]), jnp.asarray([[2.0, 4.0], [0.0, 0.0]])
    np.testing.assert_allclose(relative(cost, plain), [[1.0, 2.0], [1.0, 3.0]])


def test_gains_of_candidates_are_for_the_best_and_sum_to_nothing():
    problems, policy = stack_problems(toys(), ROOM), train(0).policy
    keys = jax.random.split(jax.random.key(0), (2, 64))
    index, share = jnp.asarray([0, 2], jnp.int32), jnp.asarray(0.25, jnp.float32)
    bins, costs, gains = bandits.try_candidates(policy, problems, index, keys, share)
    assert bins.mean["weights"].shape == (2, 64, 16, 3)
    for cost, gain in zip(np.asarray(costs), np.asarray(gains), strict=True):
        assert sorted(gain) == [-1.0] * 48 + [3.0] * 16
        assert cost[gain > 0].max() <= cost[gain < 0].min()


# Training.


@functools.cache
def train(steps, **options):
    return small(steps, options=dict(options))


@pytest.mark.parametrize("warm", [0, 60])
def test_it_learns_what_is_known_to_be_best(warm):
    """Activation 3 is best for every op: its key should be the largest."""
    before = train(0)
    after = train(60, warm_steps=warm)
    assert before.score > 0.9

    def lead(trained):
        mean = marginal_moments(trained.policy(toys()[2])).mean["activations"]
        return float(jnp.mean(mean[:, 3] - mean[:, :3].max(1)))

    assert abs(lead(before)) < 0.02
    assert lead(after) > 0.1
    assert after.score < before.score - 0.15


def test_resumed_training_gives_the_same_bits(tmp_path):
    straight = small(7, checkpoint_dir=tmp_path / "straight")
    first = small(7, checkpoint_dir=tmp_path / "parts", progress=stop_at(3))
    assert first.interrupted
    again = small(7, checkpoint_dir=tmp_path / "parts", resume=True)
    same(again, straight)
    same(small(7, checkpoint_dir=tmp_path / "parts", resume=True), straight)
    with pytest.raises(CheckpointError, match=r"holds a checkpoint already; pass resume=True"):
        small(7, checkpoint_dir=tmp_path / "parts")
    with pytest.raises(CheckpointError, match=r"of another training: .*seed: saved 0, now 1"):
        small(7, checkpoint_dir=tmp_path / "parts", resume=True, seed=1)


def test_a_killed_training_goes_on_to_the_same_bits(tmp_path):
    """What a kill leaves: the folder as it was after some step, and nothing said."""

    def copy(progress):
        if progress.evaluations == 4:
            shutil.copytree(tmp_path / "whole", tmp_path / "killed")

    straight = small(7, checkpoint_dir=tmp_path / "whole", checkpoint_every_s=0.0, progress=copy)
    steps = []
    resumed = small(
        7,
        checkpoint_dir=tmp_path / "killed",
        resume=True,
        progress=lambda p: steps.append(p.evaluations),
    )
    assert steps == [4, 5, 6, 7]
    same(resumed, straight)


def test_ctrl_c_keeps_the_best():
    stopped = small(1000, progress=stop_at(2))
    assert stopped.interrupted
    assert stopped.history[-1]["step"] == 2
    assert eqx.tree_equal(stopped.policy, train(0).policy)


def test_train_by_name_holds_problems_out():
    policy = egx.train(toys(), "regal", steps=1, budget=12, options=OPTIONS)
    assert isinstance(policy, RegalPolicy)
    with pytest.raises(SearchError, match="regal trains by steps: it takes no rounds"):
        egx.train(toys(), "regal", steps=1, rounds=2)
    with pytest.raises(SearchError, match="pg does not train by steps: it takes no steps"):
        egx.train(toys(), "pg", steps=1)


def test_impossible_arguments_are_named():
    with pytest.raises(SearchError, match=r"no option 'brkga.size' \(it takes"):
        small(1, options={"brkga.size": 3})
    with pytest.raises(SearchError, match=r"no option 'speed\.rate'"):
        small(1, options={"speed.rate": 3})
    with pytest.raises(SearchError, match="baseline must be learned or others, got 'none'"):
        small(1, options={"baseline": "none"})
    with pytest.raises(SearchError, match="the regal network cannot be made with"):
        small(1, options={"network.depth": 3})
    with pytest.raises(SearchError, match="training needs at least one problem"):
        train_proposals([], steps=1)


# Padded problems.


def test_padded_problems_are_the_same_problems():
    toy = toys()[0]
    padded = pad_problem(toy, ROOM)
    assert padded.graph.num_ops == 16
    assert float(padded.reference_cost) == float(toy.reference_cost)
    stacked = stack_problems(toys())
    assert stacked.limit.shape == (3,)
    other = egx.Execution(chain(5), one_device())
    with pytest.raises(ProblemError, match="problem 1 is of another kind than problem 0"):
        stack_problems([toy, other])


def one_device():
    return egx.Hardware(
        flops_per_s=np.ones((1, 5)),
        level_bytes=[[1e9]],
        read_bytes_per_s=[[1.0]],
        write_bytes_per_s=[[1.0]],
        link_bytes_per_s=[[1.0]],
        link_latency_s=[[0.0]],
        launch_s=[0.0],
    )
