"""The memory simulator against the plain oracle, on random cases and on toys counted by hand."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from egx.simulate.memory import memory_table, run
from tests.oracles import memory_oracle as oracle
from tests.simulate import cases

MAPS = 6
# (levels, prefetch); the graphs of the first test have at most 10 ops.
VARIANTS = ((2, 0), (4, 0), (2, 1), (3, 2), (1, 11))


@functools.partial(jax.jit, static_argnames=("prefetch", "rectify"))
def simulate(graph, hardware, capacity, weights, activations, *, prefetch, rectify=True):
    table = memory_table(graph, hardware, capacity)
    one = functools.partial(run, table, prefetch=prefetch, rectify=rectify)
    return jax.vmap(one)(weights, activations), table.total_units


def compare(graph, hardware, weights, activations, prefetch):
    """Runs [P, N] maps both ways; N may include padding."""
    case = oracle.Case.of(graph, hardware)
    capacity = hardware.capacity_units(graph.unit_bytes)[0]
    arguments = (graph, hardware, capacity, weights, activations)
    settled, total = simulate(*arguments, prefetch=prefetch)
    raw, _ = simulate(*arguments, prefetch=prefetch, rectify=False)
    assert int(total) == sum(case.weight_units) + sum(case.tensor_units)
    verdicts = []
    for p in range(len(weights)):
        w, a = weights[p][: case.ops].tolist(), activations[p][: case.ops].tolist()
        valid = oracle.is_valid(case, w, a)
        new_w, new_a, moved = oracle.rectify(case, w, a)
        assert (int(settled.moved_units[p]) == 0) == valid
        assert (int(raw.moved_units[p]) == 0) == valid
        assert int(settled.moved_units[p]) == moved
        assert settled.weights[p][: case.ops].tolist() == new_w
        assert settled.activations[p][: case.ops].tolist() == new_a
        assert raw.weights[p].tolist() == weights[p].tolist()
        np.testing.assert_allclose(
            settled.latency_s[p], oracle.latency(case, new_w, new_a, prefetch), rtol=2e-6
        )
        np.testing.assert_allclose(
            raw.latency_s[p], oracle.latency(case, w, a, prefetch), rtol=2e-6
        )
        verdicts.append(valid)
    return verdicts


@pytest.mark.parametrize(("levels", "prefetch"), VARIANTS)
def test_agrees_with_oracle_on_padded_graphs(levels, prefetch):
    seen = []

    @settings(max_examples=30, deadline=None)
    @given(data=st.data())
    def check(data):
        unit = data.draw(st.sampled_from([1, 1, 4]))
        spec = data.draw(cases.graphs())
        graph = cases.build(*spec, unit_bytes=unit, pad_to=cases.PADDED)
        hardware = cases.machine(**data.draw(cases.machines(levels)))
        level = st.integers(0, levels - 1)
        maps = st.lists(
            st.lists(level, min_size=cases.PADDED[0], max_size=cases.PADDED[0]),
            min_size=MAPS,
            max_size=MAPS,
        )
        weights = np.asarray(data.draw(maps), np.int32)
        activations = np.asarray(data.draw(maps), np.int32)
        seen.extend(compare(graph, hardware, weights, activations, prefetch))

    check()
    assert any(seen)
    assert levels == 1 or not all(seen)


@pytest.mark.parametrize("levels", [2, 3])
def test_counts_bytes_exactly_above_16_mib(levels):
    """float32 cannot tell 2^24 from 2^24 + 1; a capacity at such a boundary can."""
    seen = []

    @settings(max_examples=60, deadline=None)
    @given(data=st.data())
    def check(data):
        base = data.draw(st.sampled_from([16 * cases.MIB, 17 * cases.MIB + 1]))
        spec = data.draw(cases.graphs(base=base))
        graph = cases.build(*spec, unit_bytes=1, pad_to=cases.PADDED)
        hardware = cases.machine(**data.draw(cases.machines(levels, base=base)))
        rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
        maps = cases.random_maps(rng, cases.PADDED[0], levels, MAPS)
        seen.extend(compare(graph, hardware, *maps, 0))

    check()
    assert any(seen)
    assert not all(seen)


def test_one_byte_decides_at_17_mib():
    size = 17 * cases.MIB + 1
    graph = cases.build([{"inputs": [], "sizes": [size], "flops": 0.0, "weight": size}], [])
    one = np.ones((1, 1), np.int32)
    for capacity, valid in ((2 * size, True), (2 * size - 1, False)):
        hardware = cases.machine([1e12, float(capacity)])
        assert compare(graph, hardware, one, one, 0) == [valid]


@pytest.mark.parametrize("seed", range(6))
def test_agrees_with_oracle_on_unpadded_graphs(seed):
    rng = np.random.default_rng(seed)
    levels = (3, 1, 2, 4, 3, 2)[seed]
    ops = (1, 2, 5, 9, 17, 30)[seed]
    most_inputs = (0, 1, 3, 8)[seed % 4]
    graph = cases.random_graph(rng, ops, most_inputs=most_inputs)
    hardware = cases.random_machine(rng, levels)
    prefetch = int(rng.choice([0, 1, 2, ops - 1, ops, ops + 1]))
    maps = cases.random_maps(rng, ops, levels, 8)
    compare(graph, hardware, *maps, max(prefetch, 0))


def test_large_graph_agrees_with_oracle():
    rng = np.random.default_rng(0)
    graph = cases.random_graph(rng, 120, most_inputs=3)
    hardware = cases.random_machine(rng, 3, tight=8)
    verdicts = compare(graph, hardware, *cases.random_maps(rng, 120, 3, 12), 2)
    assert True in verdicts
    assert False in verdicts


def chain():
    """Three ops; 8 units of output from each, weights of 4, 0 and 6; the last is the output.

    Level 1 reads and writes ten bytes a second, level 0 one.
    """
    graph = cases.build(
        [
            {"inputs": [], "sizes": [8], "flops": 2.0, "weight": 4},
            {"inputs": [0], "sizes": [8], "flops": 30.0, "weight": 0},
            {"inputs": [1, 0], "sizes": [8], "flops": 1.0, "weight": 6},
        ],
        [2],
    )
    return graph


def outcome(graph, hardware, weights, activations, prefetch=0):
    capacity = hardware.capacity_units(graph.unit_bytes)[0]
    settled, _ = simulate(
        graph,
        hardware,
        capacity,
        np.asarray([weights], np.int32),
        np.asarray([activations], np.int32),
        prefetch=prefetch,
    )
    return jax.tree.map(lambda x: np.asarray(x[0]).tolist(), settled)


def test_toy_roofline():
    hardware = cases.machine([1e9, 100.0], launch_s=1.0)
    slow = outcome(chain(), hardware, [0, 0, 0], [0, 0, 0])
    # 12 + 1, max(30, 16) + 1, 8 + 8 + 8 + 6 + 1
    assert slow.latency_s == pytest.approx(13 + 31 + 31)
    fast = outcome(chain(), hardware, [1, 1, 1], [1, 1, 1])
    # max(2, 1.2) + 1, 30 + 1, max(1, 3) + 1
    assert fast.latency_s == pytest.approx(3 + 31 + 4)
    assert fast.moved_units == 0


def test_toy_capacity_and_rectification():
    # Peak of everything on level 1: weights 10, and three tensors of 8 at step 2.
    everything = ([1, 1, 1], [1, 1, 1])
    assert outcome(chain(), cases.machine([1e9, 34.0]), *everything).moved_units == 0
    tight = outcome(chain(), cases.machine([1e9, 33.0]), *everything)
    # The last item placed, the output of op 2, is the one that moves.
    assert (tight.weights, tight.activations) == ([1, 1, 1], [1, 1, 0])
    assert tight.moved_units == 8
    # Weights of op 2 come before its output and must fit beside the peak of 4 + 16.
    tighter = outcome(chain(), cases.machine([1e9, 25.0]), *everything)
    assert (tighter.weights, tighter.activations) == ([1, 1, 0], [1, 1, 0])
    assert tighter.moved_units == 14


def test_toy_prefetch():
    hardware = cases.machine([1e9, 1e3])
    slow = ([0, 0, 0], [0, 0, 0])
    # Bodies: 8, max(30, 16), 24. Weights take 4, none, 6.
    # k = 1: start 4 to 12, 12 to 42; weights of op 2 may begin at start[1] = 12: no stall.
    assert outcome(chain(), hardware, *slow, prefetch=1).latency_s == pytest.approx(66)
    # Channels are one for each level: on level 1 the weights of op 0 take 0.4.
    mixed = ([1, 0, 0], [0, 0, 0])
    assert outcome(chain(), hardware, *mixed, prefetch=1).latency_s == pytest.approx(62.4)


def test_toy_prefetch_can_lose_to_roofline():
    graph = cases.build([{"inputs": [], "sizes": [0], "flops": 5.0, "weight": 4}], [])
    hardware = cases.machine([1e9])
    assert outcome(graph, hardware, [0], [0]).latency_s == 5
    assert outcome(graph, hardware, [0], [0], prefetch=1).latency_s == 9


def test_toy_prefetch_waits_for_the_window():
    """With k = 1 the weights of op 1 stream only once op 0 has started."""
    ops = [{"inputs": [], "sizes": [], "flops": 1.0, "weight": 10} for _ in range(3)]
    graph = cases.build(ops, [])
    # start 10, 20, 30 whatever k is: the channel is the bottleneck.
    assert outcome(graph, cases.machine([1e9]), [0] * 3, [0] * 3, 3).latency_s == 31
    # Two channels: op 1 on level 1 (1 s). k = 1: free[1] = start[0] + 1 = 11 = op 0's finish.
    hardware = cases.machine([1e9, 1e9])
    assert outcome(graph, hardware, [0, 1, 0], [0] * 3, 1).latency_s == pytest.approx(22)
    # k = 2: op 2's weights follow op 0's on level 0: ready at 20, before op 1 ends at 12.
    assert outcome(graph, hardware, [0, 1, 0], [0] * 3, 2).latency_s == pytest.approx(21)
