"""Training of GO's policy: it learns what is known to be best, and resumes bit by bit."""

from __future__ import annotations

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import egx
from egx.errors import CheckpointError, SearchError
from egx.policies.go_net import GoPolicy, tasks_of
from egx.training.go_trainer import _last_of, train_go
from tests.runs import Toy, chain
from tests.training.test_regal_trainer import same, stop_at

OPTIONS = {
    "network.width": 4,
    "network.rounds": 1,
    "network.layers": 0,
    "network.attention_heads": 1,
    "network.segment": 8,
    "network.passes": 1,
    "problems": 2,
    "samples": 32,
    "ppo.learning_rate": 0.01,
    "ppo.entropy_bonus": 0.05,
    "validation.every": 20,
}


@functools.cache
def toys():
    """The costs of one move and of another differ; every plan is valid."""
    return tuple(Toy(chain(ops), 1000) for ops in (5, 6, 8))


def small(steps, **more):
    options = OPTIONS | more.pop("options", {})
    return train_go(toys(), steps=steps, validation=toys()[:2], options=options, **more)


@functools.cache
def straight():
    return small(40)


def test_it_learns_what_is_known_to_be_best():
    """Activation 3 is best for every op."""
    trained = straight()
    before = trained.history[0]["score"]
    best = min(row.get("score", 9.0) for row in trained.history)
    assert trained.score == pytest.approx(best, rel=1e-6)
    # With every weight at 0, as in the reference, it would be 0.63.
    assert trained.score < min(0.65, before)
    plan = eqx.filter_jit(lambda policy, toy: policy.decide(toy))(trained.policy, toys()[2])
    assert (plan["activations"] == 3).mean() > 0.9
    entropies = [row["entropy"] for row in trained.history[1:]]
    assert entropies[-1] < entropies[0]


def test_resumed_training_gives_the_same_bits(tmp_path):
    first = small(40, checkpoint_dir=tmp_path, progress=stop_at(7))
    assert first.interrupted
    again = small(40, checkpoint_dir=tmp_path, resume=True)
    assert not again.interrupted
    same(again, straight())
    with pytest.raises(CheckpointError, match=r"holds a checkpoint already; pass resume=True"):
        small(40, checkpoint_dir=tmp_path)
    with pytest.raises(CheckpointError, match=r"of another training: .*seed: saved 0, now 1"):
        small(40, checkpoint_dir=tmp_path, resume=True, seed=1)


def test_it_imitates_the_best_known_plan():
    """The toys know their reference alone: in the end validation finds its cost, though others are
    better."""
    trained = small(60, options={"imitation_steps": 60})
    losses = [row["imitation"] for row in trained.history[1:]]
    assert losses[-1] < 0.1 * losses[0]
    assert trained.history[-1]["score"] == pytest.approx(1.0, rel=1e-6)


class Free(Toy):
    """No plan costs anything; counts how often each known plan is made."""

    def _cost(self, weights, activations):
        return jnp.zeros((), jnp.float32)

    def heuristics(self):
        return Made({"reference": self.reference, "again": self.reference})


class Made(dict):
    looks = 0

    def __getitem__(self, name):
        Made.looks += 1
        return super().__getitem__(name)

    def items(self):
        return [(name, self[name]) for name in self]


def test_where_nothing_costs_anything_no_policy_is_better_and_known_plans_are_made_once():
    problems = [Free(chain(5), 1000)]
    options = OPTIONS | {"problems": 1, "imitation_steps": 1}
    trained = train_go(problems, steps=0, validation=problems, options=options)
    assert trained.score == 1.0
    # Two plans of the problem that is imitated, and two of the same one as it is judged.
    assert Made.looks == 4
    Made.looks = 0
    train_go(problems, steps=0, validation=problems, options={**options, "teachers": ["again"]})
    assert Made.looks == 3


def test_of_a_problem_that_a_batch_has_twice_the_last_entry_is_kept():
    new = jnp.asarray([1.0, 2.0, 3.0, 4.0])
    kept = _last_of(jnp.full(4, 9.0), new, jnp.asarray([2, 0, 2, 3]))
    np.testing.assert_array_equal(kept, [2.0, 9.0, 3.0, 4.0])


def test_train_by_name():
    policy = egx.train(toys(), "go", steps=1, options=OPTIONS)
    assert isinstance(policy, GoPolicy)
    more = egx.train(toys(), "go", steps=0, policy=policy)
    assert eqx.tree_equal(more, policy)
    with pytest.raises(SearchError, match="go trains by steps: it takes no rounds"):
        egx.train(toys(), "go", steps=1, rounds=2)
    with pytest.raises(SearchError, match="it takes no budget"):
        egx.train(toys(), "go", steps=1, budget=20)


def test_impossible_arguments_are_named():
    for options, message in (
        ({"ppo.size": 3}, r"no option 'ppo.size' \(it takes"),
        (
            {"size": 3},
            r"no option 'size' \(it takes .*, problems, samples, teachers\)",
        ),
        ({"teachers": 3}, "teachers must be names of heuristics, got 3"),
        (
            {"teachers": "heft", "imitation_steps": 1},
            "teachers: the problem knows reference, not 'heft'",
        ),
        ({"samples": 0}, "samples must be 1 to"),
        ({"network.depth": 3}, "the go network cannot be made with"),
        ({"ppo.clip": "wide"}, "clip must be above 0, got 'wide'"),
        ({"validation.worst_ratio": 0}, "validation.worst_ratio must be a number above 0, got 0"),
    ):
        with pytest.raises(SearchError, match=message):
            small(1, options=options)
    network = {name.removeprefix("network."): v for name, v in OPTIONS.items() if "network" in name}
    start = GoPolicy(tasks_of(toys()[0]), **network, key=jax.random.key(0))
    with pytest.raises(SearchError, match=r"network\.width is of a fresh network; the policy"):
        small(1, policy=start)
