"""Clusters against the plain oracle, then fused graphs in both orders."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from egx.simulate.execution import execute
from egx.simulate.execution_table import execution_table
from egx.simulate.fusion import clusters
from tests.oracles import fusion_oracle
from tests.simulate import cases
from tests.simulate import execution_cases as several

find = jax.jit(jax.vmap(clusters, in_axes=(None, 0)))


@functools.partial(jax.jit, static_argnames=("runtime",))
def simulate(graph, hardware, plans, *, runtime):
    table = execution_table(graph, hardware)
    return jax.vmap(functools.partial(execute, graph, table, runtime=runtime))(plans)


def fusible(rng, ops, *, pad_to=None):
    """A graph in which much can be fused: mostly one reader, few outputs, few barriers."""
    entries, made = [], 0
    for _ in range(ops):
        count = int(rng.choice([1, 1, 1, 2])) if made else 0
        sizes = rng.integers(0, 9, rng.choice([0, 1, 1, 1, 1, 1, 2])).tolist()
        kinds = ["elementwise"] * 6 + ["shape", "reduction", "contraction", "contraction", "opaque"]
        entries.append(
            {
                "kind": str(rng.choice(kinds)),
                "inputs": rng.integers(max(0, made - 2), made, count).tolist() if count else [],
                "sizes": sizes,
                "flops": float(rng.integers(0, 5)),
                "weight": int(rng.integers(0, 3)),
            }
        )
        made += len(sizes)
    outputs = rng.integers(0, made, 1).tolist() if made and rng.random() < 0.5 else []
    return cases.build(entries, outputs, pad_to=pad_to)


def chain(kinds, outputs=()):
    ops = [
        {"kind": kind, "inputs": [i - 1] if i else [], "sizes": [4], "flops": 1.0, "weight": 0}
        for i, kind in enumerate(kinds)
    ]
    return cases.build(ops, list(outputs))


def roots(graph, fusion):
    return jax.jit(clusters)(graph, jnp.asarray(fusion, jnp.int32)).tolist()


def test_agrees_with_oracle_on_any_graph():
    @settings(max_examples=25, deadline=None)
    @given(several.seeds())
    def check(drawn):
        rng, graph, _ = several.case(drawn, 1)
        plans = several.random_plans(rng, graph, 1)
        got = find(graph, jnp.asarray(plans["fusion"]))
        for p in range(several.PLANS):
            assert got[p].tolist() == fusion_oracle.clusters(graph, plans["fusion"][p])

    check()


def test_agrees_with_oracle_where_much_is_fused():
    joined = 0
    for seed in range(25):
        rng = np.random.default_rng(seed)
        graph = fusible(rng, 18, pad_to=(20, 40, 40))
        fusion = rng.integers(0, 4, (several.PLANS, 20)).astype(np.int32)
        got = find(graph, jnp.asarray(fusion))
        for p in range(several.PLANS):
            want = fusion_oracle.clusters(graph, fusion[p])
            assert got[p].tolist() == want
            joined += sum(r != i for i, r in enumerate(want))
    assert joined > 300


@pytest.mark.parametrize("order", ["static", "queued", "runtime"])
def test_fused_plans_agree_with_oracle(order):
    names = ["device", "fusion", "priority"] + ["transfer_priority"] * (order == "queued")
    joined = 0
    for seed in range(12):
        rng = np.random.default_rng(seed)
        graph = fusible(rng, 14, pad_to=(16, 32, 32))
        hardware = several.random_devices(rng, 2)
        plans = several.only(several.random_plans(rng, graph, 2), *names)
        got = simulate(graph, hardware, several.arrays(plans), runtime=order == "runtime")
        for p in range(several.PLANS):
            root = fusion_oracle.clusters(graph, plans["fusion"][p])
            assert got.root[p].tolist() == root
            joined += sum(r != i for i, r in enumerate(root))
            oracle = several.oracle(graph, hardware, plans, p, root=root)
            want = oracle.run_runtime() if order == "runtime" else oracle.run_static()
            assert got.peak_units[p].tolist() == want.peak_units
            assert float(got.makespan_s[p]) == want.makespan_s
    assert joined > 50


def test_a_chain_joins_its_end():
    assert roots(chain(["elementwise"] * 4), [1, 1, 1, 0]) == [3, 3, 3, 3]
    # The last op has no consumers: its own level changes nothing.
    assert roots(chain(["elementwise"] * 4), [1, 1, 1, 1]) == [3, 3, 3, 3]
    assert roots(chain(["elementwise"] * 4), [0, 0, 0, 0]) == [0, 1, 2, 3]
    assert roots(chain(["elementwise"] * 4), [1, 0, 1, 0]) == [1, 1, 3, 3]
    # On a higher level the first op joins before the second one does; it comes along.
    assert roots(chain(["elementwise"] * 4), [3, 1, 1, 0]) == [3, 3, 3, 3]


def test_barriers():
    assert roots(chain(["elementwise", "reduction", "elementwise"]), [1, 1, 0]) == [1, 1, 2]
    assert roots(chain(["elementwise", "opaque", "elementwise"]), [1, 1, 0]) == [0, 1, 2]
    two = ["contraction", "elementwise", "contraction"]
    assert roots(chain(two), [1, 1, 0]) == [0, 2, 2]
    # The first contraction takes the op between them when that op is asked later.
    assert roots(chain(two), [2, 1, 0]) == [1, 1, 2]
    assert roots(chain(["elementwise"] * 3, outputs=[0]), [1, 1, 0]) == [0, 2, 2]


def test_at_most_64_ops():
    got = roots(chain(["elementwise"] * 70), [1] * 70)
    assert got == [5] * 6 + [69] * 64


def test_readers_in_two_clusters_keep_an_op_out():
    ops = [
        {"kind": "elementwise", "inputs": [], "sizes": [1], "flops": 0.0, "weight": 0},
        {"kind": "elementwise", "inputs": [0], "sizes": [1], "flops": 0.0, "weight": 0},
        {"kind": "elementwise", "inputs": [0], "sizes": [1], "flops": 0.0, "weight": 0},
        {"kind": "elementwise", "inputs": [1, 2], "sizes": [1], "flops": 0.0, "weight": 0},
    ]
    graph = cases.build(ops, [])
    assert roots(graph, [1, 0, 0, 0]) == [0, 1, 2, 3]
    assert roots(graph, [1, 1, 1, 0]) == [3, 3, 3, 3]
    # The first op is asked before its readers have joined.
    assert roots(graph, [2, 1, 1, 0]) == [0, 3, 3, 3]


def test_a_cluster_pays_one_launch_and_no_inner_traffic():
    graph, hardware = chain(["elementwise"] * 3), several.devices(1, memory=1.0, launch_s=0.5)
    table = execution_table(graph, hardware)
    plan = {"device": jnp.zeros(3, jnp.int32), "fusion": jnp.array([1, 1, 0], jnp.int32)}
    # Apart: 4, 8 and 8 units of traffic; fused: the last output.
    run = jax.jit(execute)
    assert float(run(graph, table, {"device": plan["device"]}).makespan_s) == 20 + 1.5
    got = run(graph, table, plan)
    assert float(got.makespan_s) == 4 + 0.5
    assert got.peak_units.tolist() == [4]
