"""The registry: names, options, budgets and policies."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from egx.errors import SearchError
from egx.search import registry
from egx.search.base import AbstractSearch
from egx.search.egrl import EGRL
from egx.search.hdp import HDP
from egx.search.random import RandomSearch
from egx.search.registry import find_search, make_search, search_options, searches


class Part(eqx.Module):
    rate: float = 0.5
    size: int = eqx.field(static=True, default=3)


class Planner(RandomSearch):
    """A searcher with a part, a plan for its budget and a policy."""

    part: Part = eqx.field(default_factory=Part)
    budget: Any = 4000.0
    policy: Any = None

    def __check_init__(self):
        if self.batch < 1:
            raise ValueError("batch must be 1 or more")


def without_budget(**options: Any) -> Planner:
    """A variant made by a function."""
    return Planner(**{"batch": 7, **options})


@pytest.fixture(autouse=True)
def _planner(monkeypatch):
    monkeypatch.setitem(registry.SEARCHES, "planner", Planner)
    monkeypatch.setitem(registry.SEARCHES, "variant", without_budget)


def test_every_name_makes_a_searcher():
    assert searches() == tuple(sorted(searches()))
    assert "random" in searches()
    for name in searches():
        search = make_search(name)
        assert isinstance(search, AbstractSearch), name
        assert search.batch_size >= 1
        fields = {f.name for f in dataclasses.fields(search)}
        assert {option.split(".")[0] for option in search_options(name)} <= fields


def test_options_reach_fields_and_parts():
    search = make_search("planner", {"batch": 5, "part.rate": 0.25, "part.size": 9})
    assert isinstance(search, Planner)
    assert (search.batch, search.part.rate, search.part.size) == (5, 0.25, 9)
    assert make_search("variant").batch_size == 7
    assert make_search("variant", {"batch": 2}).batch_size == 2
    assert search_options("planner") == (
        "batch",
        "part",
        "part.rate",
        "part.size",
        "budget",
        "policy",
    )


def test_budget_and_policy_go_to_those_who_plan_with_them():
    assert make_search("planner", budget=50).budget == 50.0
    assert make_search("planner", {"budget": 10.0}, budget=50).budget == 10.0
    assert make_search("random", budget=50) == RandomSearch()
    assert make_search("planner", policy="trained").policy == "trained"
    with pytest.raises(SearchError, match="random has no policy to start from"):
        make_search("random", policy="trained")


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("plannr", {}, "no searcher is named 'plannr'; did you mean planner.*known: "),
        ("", {}, "no searcher is named ''"),
        ("planner", {"part.rat": 1.0}, "no option 'part.rat'; did you mean part.rate"),
        ("planner", {"rate": 1.0}, "no option 'rate'"),
        ("planner", {"batch": 0}, "cannot be made .* batch must be 1 or more"),
        ("variant", {"batches": 1}, "variant has no option 'batches'; did you mean batch"),
    ],
)
def test_what_is_wrong_is_named(name, options, message):
    with pytest.raises(SearchError, match=message):
        make_search(name, options)


@pytest.mark.parametrize(
    ("name", "option", "value", "message"),
    [
        ("go", "ppo.clip", -1, "clip must be above 0, got -1"),
        ("go", "ppo.learning_rate", -1e-3, "learning_rate must be 0 or more"),
        ("go", "ppo.baseline_rate", 1.5, "baseline_rate must be 0 to 1, got 1.5"),
        ("hdp", "temperature", 0, "temperature must be above 0, got 0"),
        ("egrl", "sac.tau", 2, "tau must be 0 to 1, got 2"),
        ("egrl", "evolution.mutation", -0.1, "mutation must be 0 to 1, got -0.1"),
        ("egrl_plus", "crossover", 1.1, "crossover must be 0 to 1"),
        ("annealing", "last_temperature", 0.0, "last_temperature must be above 0"),
        ("local", "rooms", 7, "rooms must be 0 to 1, got 7"),
        ("regal_plus", "near", -1, "near must be 0 to 1, got -1"),
        ("idrs", "rounds", 0, "rounds must be 1 or more, got 0"),
        ("gradient", "descent.first_temperature", 0, "first_temperature must be above 0"),
        ("evosax:SNES", "spread", -2, "spread must be 0 or more, got -2"),
        ("egrl", "evolution.share", 0, "share must be above 0, 1 at most, got 0"),
        ("annealing", "budget", 10**400, "budget must be a number"),
        ("local", "rooms", np.array([0.1, 0.2]), "rooms must be 0 to 1, got array"),
        ("local", "rooms", np.array(1j), "rooms must be 0 to 1, got array"),
    ],
)
def test_numbers_out_of_range_are_named(name, option, value, message):
    with pytest.raises(SearchError, match=message):
        make_search(name, {option: value})


def test_values_of_a_sweep_are_looked_at_where_they_are_known():
    stacked = jnp.array([0.1, 0.3])
    assert make_search("hdp", {"learning_rate": stacked}).learning_rate.shape == (2,)
    with pytest.raises(SearchError, match="learning_rate must be 0 or more"):
        make_search("hdp", {"learning_rate": -stacked})
    # Of what is traced only the shape is known.
    jax.eval_shape(lambda x: HDP(learning_rate=x).learning_rate, jnp.float32(-1))


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("value", ["a", "0.2", [0.1, 0.2], {}, True, None])
def test_what_is_no_number_is_named_by_constructors(value):
    with pytest.raises(SearchError, match="boltzmann_share must be 0 to 1, got "):
        EGRL(boltzmann_share=value)
    with pytest.raises(SearchError, match="decay must be 0 to 1, got "):
        HDP(decay=value)


def test_only_what_comes_out_must_be_possible():
    search = make_search("egrl", {"evolution.elites": 25, "evolution.size": 50})
    assert (search.evolution.elites, search.evolution.size) == (25, 50)
    assert make_search("ea", {"buffer_capacity": 10, "evolution.size": 5}).buffer_capacity == 10
    assert make_search("go_plus", {"networks.width": 8}).networks.width == 8
    with pytest.raises(SearchError, match="networks must be a EGRL"):
        make_search("go_plus", {"networks": 3})


def test_evosax_strategies_have_names():
    search = make_search("evosax:SNES", {"population": 6})
    assert (search.strategy, search.batch_size) == ("SNES", 6)
    assert "population" in search_options("evosax:SNES")
    assert "strategy" not in search_options("evosax:SNES")
    with pytest.raises(SearchError, match=r"no strategy 'snes2'; did you mean .*SNES"):
        make_search("evosax:snes2")
    with pytest.raises(SearchError, match=r"known: .*evosax:STRATEGY"):
        make_search("evosax")


def test_find_takes_names_and_searchers():
    assert find_search("random", {"batch": 3}) == (RandomSearch(batch=3), "random")
    mine = RandomSearch(batch=4)
    assert find_search(mine, budget=9) == (mine, "RandomSearch")
    with pytest.raises(SearchError, match="give them to RandomSearch itself"):
        find_search(mine, {"batch": 3})


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("egrl_plus", {"batch": -3}, "batch must be a whole number of 1 or more, got -3"),
        ("egrl_plus", {"guided": 50}, r"guided must be 0 to 20 \(batch\), got 50"),
        ("egrl_plus", {"repair": "no"}, "repair must be true or false, got 'no'"),
        ("egrl_plus", {"crossover": "often"}, "crossover must be a number, got 'often'"),
        ("egrl_plus", {"budget": float("nan")}, "budget must be a number, got nan"),
        ("egrl", {"sac": 3}, r"sac must be a SAC, got 3; sac\.NAME sets a part of it"),
        ("egrl", {"sac.batch": 0}, "batch must be a whole number of 1 or more, got 0"),
        ("egrl", {"sac.alpha": "x"}, r"sac\.alpha must be a number, got 'x'"),
        ("annealing", {"chains": 0}, "chains must be a whole number of 1 or more, got 0"),
        ("greedy_dp", {"real_levels": 1}, "real_levels must be a whole number of 2 or more, got 1"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_impossible_values_are_named(name, options, message):
    with pytest.raises(SearchError, match=message):
        make_search(name, options)


@pytest.mark.parametrize("name", searches())
@pytest.mark.parametrize("value", ["x", -3, 2.5, [1]])
@pytest.mark.usefixtures("unchecked")
def test_whatever_an_option_is_given_no_other_error_comes_back(name, value):
    for option in search_options(name):
        with contextlib.suppress(SearchError):
            make_search(name, {option: value})
