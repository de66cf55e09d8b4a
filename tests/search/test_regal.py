"""REGAL's searcher: plain BRKGA without a policy's word, better with a good one."""

from __future__ import annotations

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import egx
from egx.errors import SearchError
from egx.graph.generators import regal_synthetic
from egx.hardware.machines import regal_hardware
from egx.policies.graph_unet import GraphUNetPolicy
from egx.policies.proposal import (
    FRACTIONS,
    MEANS,
    UNIFORM_FRACTION,
    UNIFORM_MEAN,
    ProposalLogits,
    problem_genes,
)
from egx.policies.regal_net import RegalPolicy
from egx.search.betas import bin_knots, quantile_knots, uniform_betas
from egx.search.brkga import BRKGA
from egx.search.keys import width
from egx.search.regal import PRETRAINED, Regal, proposal_knots
from egx.search.registry import make_search
from tests.runs import chain, machine, same_search, small_problem

SMALL = {"brkga.population": 12, "brkga.elites": 4, "brkga.mutants": 4}
BUDGET = 40


def policy(biases):
    """A policy that says the same of all ops: the bins (mean, fraction) of each key of a head."""
    net = RegalPolicy(problem_genes(small_problem()), width=4, rounds=0, key=jax.random.key(0))
    for name, bins in biases.items():
        final = net.heads[name].final
        bias = np.full((len(bins), len(MEANS) + len(FRACTIONS)), -50.0, np.float32)
        for key, (mean, fraction) in enumerate(bins):
            bias[key, mean] = bias[key, len(MEANS) + fraction] = 50.0
        net = eqx.tree_at(
            lambda p, name=name: (p.heads[name].final.weight, p.heads[name].final.bias),
            net,
            (0 * final.weight, jnp.asarray(bias.reshape(-1))),
        )
    return net


UNIFORM = (UNIFORM_MEAN, UNIFORM_FRACTION)


@functools.cache
def plain_policy():
    return policy({"weights": [UNIFORM] * 3, "activations": [UNIFORM] * 4})


@functools.cache
def plain_result():
    return egx.optimize(small_problem(), "brkga", budget=BUDGET, seed=3, options=plain_options())


def plain_options():
    return {name.split(".")[1]: value for name, value in SMALL.items()}


@pytest.mark.parametrize("action", ["sample", "mode"])
def test_uniform_proposals_give_brkga_itself(action):
    options = SMALL | {"action": action}
    result = egx.optimize(
        small_problem(), "regal", budget=BUDGET, seed=3, options=options, policy=plain_policy()
    )
    same_search(result, plain_result())


def test_a_policy_that_knows_activations_finds_them_at_once():
    # Activation 3 costs least: its key is drawn high, the others low.
    low, high = (0, 0), (len(MEANS) - 1, 0)
    net = policy({"weights": [UNIFORM] * 3, "activations": [low] * 3 + [high]})
    result = egx.optimize(small_problem(), "regal", budget=12, seed=3, options=SMALL, policy=net)
    assert (result.decisions["activations"] == 3).all()
    assert result.cost < plain_result().cost


def test_marginal_proposals_have_the_moments_of_the_policy():
    problem = small_problem()
    logits = plain_policy()(problem)
    flat = ProposalLogits(
        {name: jnp.zeros_like(x) for name, x in logits.mean.items()}, logits.fraction
    )
    knots = proposal_knots(problem, flat, "marginal", key=jax.random.key(0))
    # All means alike: wider than uniform, and as many keys above the mean as below.
    uniform = quantile_knots(problem, uniform_betas(problem))
    middle = knots.shape[1] // 2
    assert knots.shape == (width(problem), bin_knots().shape[-1])
    assert (knots[:, middle + 4] > uniform[:, middle + 4] + 0.1).all()


def test_without_a_policy_for_the_problem_it_says_so():
    with pytest.raises(SearchError, match=r"no trained policy for Toy comes with egx .*egx.train"):
        egx.optimize(small_problem(), "regal", budget=BUDGET)
    one = egx.MemoryPlacement(chain(), machine())
    with pytest.raises(SearchError, match=r"no trained policy for MemoryPlacement"):
        egx.optimize(one, "gas", budget=BUDGET)


def test_impossible_settings_are_refused(unchecked):
    with pytest.raises(SearchError, match="action must be sample, mode, marginal, got 'best'"):
        make_search("regal", {"action": "best"})
    choices = (("weights", 3), ("activations", 4))
    other = GraphUNetPolicy(2, choices, width=4, depth=0, key=jax.random.key(0))
    with pytest.raises(SearchError, match=r"regal takes a policy .* got a GraphUNetPolicy"):
        make_search("regal", policy=other)
    twice = Regal(policy=plain_policy(), brkga=BRKGA(proposal=uniform_betas(small_problem())))
    with pytest.raises(SearchError, match=r"brkga\.proposal must be None"):
        twice.check(small_problem())
    with pytest.raises(SearchError, match="egrl starts from a GraphUNetPolicy, got a RegalPolicy"):
        make_search("egrl", policy=plain_policy()).check(small_problem())


@functools.cache
def unseen(objective="makespan", devices=2):
    model = regal_synthetic(np.random.default_rng(123), "watts_strogatz", 60)
    return egx.Execution(model, regal_hardware(devices), objective=objective)


def test_the_shipped_policies_are_small_and_fit():
    files = sorted(PRETRAINED.glob("*.npz"))
    assert sum(file.stat().st_size for file in files) < 5e6
    assert "regal_makespan_2" in {file.stem for file in files}
    # Those for one objective and number of devices.
    for file in (file for file in files if "_" in file.stem):
        kind, *objective, devices = file.stem.split("_")
        problem = unseen("_".join(objective), int(devices))
        make_search(kind).check(problem)
    words = (
        r"makespan on 3 devices, where device and priority are decided, .* or `egx train "
        r"--algorithm gas --devices 3 --objective makespan --decide device,priority --out policy`"
    )
    with pytest.raises(SearchError, match=words):
        make_search("gas").check(unseen(devices=3))


def test_the_shipped_policy_beats_brkga_on_an_unseen_graph():
    runs = {
        name: egx.optimize_seeds(unseen(), name, seeds=range(6), budget=400)
        for name in ("regal", "brkga")
    }
    regal, brkga = (np.array([r.cost for r in results]) for results in runs.values())
    assert np.mean(regal) < 0.98 * np.mean(brkga)
