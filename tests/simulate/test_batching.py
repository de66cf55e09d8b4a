"""The batching rule: one run for any nest of vmap, the same values as without it."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from egx.simulate import execution
from egx.simulate.batching import over_population


def make(pieces=None):
    """A function of (shared, {x, y}) with a note of what each of its runs was given."""
    runs = []

    def run(shared, common, each):
        runs.append((sorted(common), {name: value.shape for name, value in each.items()}))
        size = next(iter(each.values())).shape[0]
        rows = {
            name: jnp.broadcast_to(value, (size, *value.shape)) for name, value in common.items()
        }
        rows |= each
        return shared * rows["x"] + rows["y"]

    return over_population(run, pieces=pieces), runs


X, Y = np.arange(12.0, dtype=np.float32).reshape(3, 4), np.float32([1.0, 5.0, 7.0, 9.0])


def call(function):
    return lambda shared, x, y: function(shared, {"x": x, "y": y})


def test_unbatched():
    function, _ = make()
    np.testing.assert_array_equal(call(function)(2.0, X[0], Y), 2 * X[0] + Y)


def test_what_all_have_in_common_stays_so():
    function, runs = make()
    got = jax.vmap(call(function), in_axes=(None, 0, None))(2.0, X, Y)
    np.testing.assert_array_equal(got, 2 * X + Y)
    assert runs[-1] == (["y"], {"x": (3, 4)})


@pytest.mark.parametrize(("pieces", "size"), [(1, 15), (2, 8), (100, 1)])
def test_nested_batches_are_one_run(pieces, size):
    function, runs = make(lambda each: pieces)
    x = np.stack([X, X + 1, X + 2, X + 3, X + 4])
    y = np.stack([Y, Y + 1, Y + 2])
    inner = jax.vmap(call(function), in_axes=(None, 0, 0))
    got = jax.vmap(inner, in_axes=(None, 0, None))(2.0, x, y)
    np.testing.assert_array_equal(got, 2 * x + y)
    assert runs[-1][1]["x"] == (size, 4)


def test_common_of_the_inner_batch_may_differ_in_the_outer():
    function, runs = make()
    y = np.stack([Y, Y + 1])
    inner = jax.vmap(call(function), in_axes=(None, 0, None))
    got = jax.vmap(inner, in_axes=(None, None, 0))(2.0, X, y)
    np.testing.assert_array_equal(got, 2 * X + y[:, None])
    assert runs[-1] == ([], {"x": (6, 4), "y": (6, 4)})


def test_batched_shared_values_keep_their_own_runs():
    function, runs = make()
    shared, y = np.float32([2.0, 3.0]), np.stack([Y, Y + 1])
    inner = jax.vmap(call(function), in_axes=(None, 0, None))
    got = jax.vmap(inner, in_axes=(0, None, None))(shared, X, Y)
    np.testing.assert_array_equal(got, shared[:, None, None] * X + Y)
    assert runs[-1] == (["y"], {"x": (3, 4)})
    got = jax.vmap(inner, in_axes=(0, None, 0))(shared, X, y)
    np.testing.assert_array_equal(got, shared[:, None, None] * X + y[:, None])
    got = jax.vmap(call(function), in_axes=(0, None, 0))(shared, X[0], y)
    np.testing.assert_array_equal(got, shared[:, None] * X[0] + y)


@pytest.mark.usefixtures("unchecked")
def test_flat_indices_fit_into_32_bits_on_every_device(monkeypatch):
    """80,000 ops on eight devices: seven entries a tensor, for each of 16,384 candidates."""
    table = SimpleNamespace(num_ops=80_000, num_tensors=100_000, num_uses=200_000, num_devices=8)
    each = {"device": jax.ShapeDtypeStruct((16_384, 80_000), jnp.int32)}
    for backend in ("cpu", "gpu"):
        monkeypatch.setattr(jax, "default_backend", lambda backend=backend: backend)
        lanes = -(-16_384 // execution._pieces(table, each))
        assert lanes * (100_000 + 1) * 7 < 2**31
    few = {"device": each["device"].update(shape=(256, 80_000))}
    assert execution._pieces(table, few) == 1
