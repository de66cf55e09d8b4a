"""Populations over devices: any size, the same bits, nothing mixed up."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from runs import chain, machine

from egx.errors import SearchError
from egx.problems.memory_placement import MemoryPlacement
from egx.search.random import random_decisions
from egx.training.devices import make_mesh, population_map
from egx.training.generation import concrete, evaluate_population


@pytest.mark.parametrize("devices", [1, 2, 3, 4])
@pytest.mark.parametrize("size", [1, 4, 7])
def test_every_member_comes_back_in_its_place(devices, size):
    members = {"a": jnp.arange(2.0 * size).reshape(size, 2), "b": jnp.arange(size)}
    shared = {"scale": jnp.asarray(3.0), "name": "static"}

    def function(shared, member):
        assert shared["name"] == "static"
        return {"sum": shared["scale"] * member["a"].sum(), "b": member["b"]}

    mapped = jax.jit(lambda m: population_map(function, make_mesh(devices))(shared, m))
    out = mapped(members)
    np.testing.assert_array_equal(out["sum"], 3.0 * np.asarray(members["a"]).sum(axis=1))
    np.testing.assert_array_equal(out["b"], np.arange(size))


def test_evaluation_has_the_same_bits_and_uses_all_devices():
    problem = concrete(MemoryPlacement(chain(), machine()))
    candidates = random_decisions(problem, key=jax.random.key(0), batch=10)
    alone = jax.jit(evaluate_population)(problem, candidates)
    for devices in (2, 4):
        mesh = make_mesh(devices)
        spread = jax.jit(lambda p, c, mesh=mesh: evaluate_population(p, c, mesh))(
            problem, candidates
        )
        for a, b in zip(jax.tree.leaves(alone), jax.tree.leaves(spread), strict=True):
            np.testing.assert_array_equal(a, b)
    # Nothing may be gathered before the work: each device values its own quarter.
    text = (
        jax.jit(lambda p, c: population_map(lambda p, one: p.evaluate(one), make_mesh(4))(p, c))
        .lower(problem, jax.tree.map(lambda x: x[:8], candidates))
        .as_text()
    )
    assert "2x6xi32" in text


def test_meshes():
    assert make_mesh().size == len(jax.devices()) == 4
    assert make_mesh(jax.devices()[1:3]).devices.tolist() == jax.devices()[1:3]
    for wrong in (0, 5, -1):
        with pytest.raises(SearchError, match=f"devices must be 1 to 4, got {wrong}"):
            make_mesh(wrong)
    with pytest.raises(SearchError, match="must not be empty"):
        make_mesh([])
