"""Changes along a graph, what the network sees of them, and the search that it steers."""

from __future__ import annotations

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import egx
from egx.errors import SearchError
from egx.policies.move_net import (
    INPUTS,
    MovePolicy,
    move_context,
    move_features,
    plan_view,
)
from egx.search.changes import Change, Moves, Neighbours, applied, first_change, next_change
from egx.search.genome import Genome, decode
from egx.search.regal_plus import RegalPlus, _judged
from egx.search.registry import make_search
from tests.runs import chain, machine
from tests.search import toys
from tests.search.test_on_execution import diamond, joint
from tests.search.tiny import options

TINY = options((("device", "op", 2), ("priority", "op", 1)))["regal_plus"]


def test_neighbours_are_those_of_the_graph():
    """Against sets made by hand of the diamond: 0 to 1 and 2, these to 3 and 4, these to 5."""
    graph = diamond().graph
    near = Neighbours(graph)
    uniform = jnp.linspace(0.0, 0.999, 8)
    draw = jax.jit(jax.vmap(jax.vmap(near.draw, (None, 0)), (0, None)))
    other, forward, found = draw(jnp.arange(6), uniform)
    assert bool(found.all())
    drawn = [
        set(zip(np.asarray(other[i]).tolist(), np.asarray(forward[i]).tolist(), strict=True))
        for i in range(6)
    ]
    assert drawn == [
        {(1, True), (2, True)},
        {(0, False), (3, True)},
        {(0, False), (4, True)},
        {(1, False), (5, True)},
        {(2, False), (5, True)},
        {(3, False), (4, False)},
    ]


def test_an_op_without_neighbours_has_none():
    graph = egx.MemoryPlacement(chain(1), machine()).graph
    other, _, found = Neighbours(graph).draw(jnp.asarray(0), jnp.asarray(0.5))
    assert (int(other), bool(found)) == (0, False)


def test_changes_by_hand():
    """A choice takes its neighbour's value; an op goes behind its producer and before its consumer,
    or is shifted, or drawn anew; a further change goes on along the graph or to the same op."""
    problem = diamond()
    graph, genome, ops = problem.graph, Genome(problem), problem.graph.num_ops
    near = Neighbours(graph)
    genes = jnp.zeros(2 * ops).at[jnp.asarray([0, 4])].set(1.0)
    genes = genes.at[ops + jnp.arange(6)].set(jnp.asarray([0.9, 0.8, 0.7, 0.5, 0.4, 0.1]))

    def moves(**changed):
        given = {"near": 0.0, "far": 0.0, "shift": 0.0, "walk": 0.0, "couple": 0.0, **changed}
        return Moves(**{name: jnp.asarray(value) for name, value in given.items()})

    def numbers(length, **at):
        uniform = np.full(length, 0.5, np.float32)
        for place, value in at.items():
            uniform[int(place[1:])] = value
        return jnp.asarray(uniform)

    first = jax.jit(lambda moves, u: first_change(moves, problem, genome, near, genes, u))
    # Of twelve active entries the second and the tenth: the device of op 1, the priority of op 3.
    device, priority = 1.5 / 12, 9.5 / 12
    change = first(moves(near=1.0), numbers(8, u0=device, u1=0.0))
    assert (int(change.entry), float(change.value)) == (1, 1.0)
    apart = 0.25 / ops
    change = first(moves(near=1.0), numbers(8, u0=priority, u1=0.0))
    assert int(change.entry) == ops + 3
    assert float(change.value) == pytest.approx(0.8 - apart)
    change = first(moves(near=1.0), numbers(8, u0=priority, u1=0.9))
    assert float(change.value) == pytest.approx(0.1 + apart)
    normal = {"u5": float(np.exp(-0.5)), "u6": 0.0}
    change = first(moves(shift=0.05), numbers(8, u0=priority, **normal))
    assert float(change.value) == pytest.approx(0.55)
    change = first(moves(far=1.0), numbers(8, u0=priority, u3=0.25))
    assert float(change.value) == 0.25

    further = jax.jit(
        lambda moves, last, u: next_change(moves, problem, genome, near, genes, last, u)
    )
    last = Change(jnp.asarray(3), jnp.asarray(1.0))
    # On to op 3's producer, which takes the same device; or to the priority of op 3.
    change = further(moves(walk=1.0), last, numbers(12, u8=0.0))
    assert (int(change.entry), float(change.value)) == (1, 1.0)
    change = further(moves(walk=1.0, couple=1.0, far=1.0), last, numbers(12, u3=0.25))
    assert (int(change.entry), float(change.value)) == (ops + 3, 0.25)
    never = applied(genome, genes, change, jnp.zeros((), bool))
    np.testing.assert_array_equal(never, genes)
    np.testing.assert_array_equal(
        applied(genome, genes, change, jnp.ones((), bool)), genes.at[ops + 3].set(0.25)
    )


def test_the_best_of_both_halves_is_known_to_both():
    problem, seen = diamond(), []
    search = make_search("regal_plus", TINY)
    key = jax.random.key(3)
    state = toys.begin(search, problem, key)
    for index in range(4):
        _, state = toys.generation(search, problem, state, jax.random.fold_in(key, index))
        kept, genetic = state.inner.kept, state.inner.genetic
        best = float(state.best.cost)
        assert float(kept.cost[0]) == best == float(genetic.cost.min())
        order = np.lexsort((kept.cost, ~np.asarray(kept.feasible)))
        np.testing.assert_array_equal(kept.cost, kept.cost[order])
        plans = jax.vmap(lambda genes: decode(problem, genes))(kept.genes)
        np.testing.assert_array_equal(jax.vmap(problem.evaluate)(plans).cost, kept.cost)
        seen.append(best)
    assert seen == sorted(seen, reverse=True)


def test_the_network_sees_the_plan():
    """By hand: all ops take the same time and all tensors are of one size."""
    problem = diamond()
    context = move_context(problem)
    device = jnp.asarray([0, 0, 0, 1, 1, 1], jnp.int32)
    rank = jnp.asarray([0.9, 0.8, 0.7, 0.5, 0.4, 0.1])
    view = plan_view(context, device, rank, jnp.asarray([30.0, 15.0]))
    # Op 1 to device 1, and op 4 from 0.4 to 0.6 in the order.
    features = move_features(
        context, view, jnp.asarray([1, 4]), jnp.asarray([True, False]), jnp.asarray([1.0, 0.6])
    )
    first, second = ({k: float(x) for k, x in zip(INPUTS, row, strict=True)} for row in features)
    log2 = pytest.approx(np.log(2.0), rel=1e-5)
    assert first == {
        "changes_device": 1.0, "changes_priority": 0.0,
        # Its producer 0 runs here, its consumer 3 there.
        "producers_there": -1.0, "consumers_there": 1.0,
        "load_here": pytest.approx(0.0, abs=1e-6), "load_there": pytest.approx(0.0, abs=1e-6),
        "peak_here": 1.0, "peak_there": 0.5, "step": 0.0, "distance": 0.0,
        "run_time": log2, "output_bytes": log2,
        # One input, of a mean of one (op 0 has none, op 5 two).
        "input_bytes": log2, "rank": pytest.approx(0.8),
        "below_producers": pytest.approx(0.1), "above_consumers": pytest.approx(0.3),
        "peak_memory": 0.0, "devices": 0.5, "transfer_time": first["transfer_time"],
    }  # fmt: skip
    assert second["changes_priority"] == 1.0
    assert second["step"] == pytest.approx(0.4)
    assert second["distance"] == pytest.approx(np.log1p(6 * 0.2) / 3)
    assert (second["producers_there"], second["peak_here"]) == (0.0, 0.5)
    # A tensor of 4 bytes over a link of 4 bytes/s, against the seconds of an op.
    mean = float(jnp.mean(problem.table.op_seconds[:6]))
    assert first["transfer_time"] == pytest.approx(np.log1p(1.0 / mean), rel=1e-5)


@functools.cache
def devices_only():
    """A network for which nothing but a change of device is worth anything."""
    policy = MovePolicy(width=1, key=jax.random.key(0))
    wants = np.zeros((len(INPUTS), 1), np.float32)
    wants[INPUTS.index("changes_device")] = 5.0
    return eqx.tree_at(
        lambda p: (p.hidden.weight, p.hidden.bias, p.final.weight, p.final.bias),
        policy,
        (jnp.asarray(wants), jnp.zeros(1), jnp.full((1, 1), 50.0), jnp.zeros(1)),
    )


def test_the_network_chooses_the_first_change():
    problem = diamond()
    chosen = TINY | {"tried": 12, "steps": 1, "changed": 16}
    search = make_search("regal_plus", chosen, policy=devices_only())
    ignores = eqx.tree_at(lambda s: s.trust, search, np.asarray(0.0, np.float32))

    @eqx.filter_jit
    def first(search, key):
        plans, state = search.ask(problem, search.init(problem, key=key), key=key)
        return plans, state.inner.changed.seen[:, INPUTS.index("changes_device")]

    plans, seen = first(search, jax.random.key(0))
    known = np.stack([np.asarray(plan["device"]) for plan in problem.heuristics().values()])
    apart = (np.asarray(plans["device"])[-16:, None] != known).sum(2).min(1)
    # Twelve changes that are all of priorities are rarer than one in a thousand.
    assert (np.asarray(seen) == 1).all()
    assert apart.max() <= 1
    seen = first(ignores, jax.random.key(0))[1]
    assert 0 < float(seen.mean()) < 1


def test_changes_that_the_network_does_not_know_are_neither_favoured_nor_refused():
    """Of fusion it knows nothing, and whatever it thinks of the others counts for that too."""
    problem = joint()
    genome, context = Genome(problem), move_context(problem)
    plan = problem.reference
    view = plan_view(context, plan["device"], plan["priority"], jnp.ones(2))
    policy = devices_only()
    shy = eqx.tree_at(lambda p: p.final.bias, policy, jnp.asarray([-60.0]))
    # Entries 0 to 5 are of fusion, then device, then priority.
    entries, values = jnp.asarray([0, 6, 12, 3]), jnp.asarray([1.0, 1.0, 0.5, 2.0])
    tried = jax.vmap(Change)(entries, values)
    odds, _ = _judged(problem, shy, context, genome, view, tried)
    np.testing.assert_allclose(odds, [-35.0, -10.0, -60.0, -35.0], atol=0.1)
    of_fusion = jax.vmap(Change)(entries[::3], values[::3])
    odds, _ = _judged(problem, shy, context, genome, view, of_fusion)
    np.testing.assert_array_equal(odds, [0.0, 0.0])


def test_no_result_is_worse_than_the_best_heuristic():
    problem = diamond()
    costs = [float(problem.evaluate(plan).cost) for plan in problem.heuristics().values()]
    result = egx.optimize(problem, "regal_plus", budget=len(costs), options=TINY)
    assert result.cost <= min(costs)
    longer = egx.optimize(problem, "regal_plus", budget=120, options=TINY)
    assert longer.cost <= result.cost
    assert longer.feasible


def test_impossible_settings_are_refused(tmp_path):
    with pytest.raises(SearchError, match="kept must be a whole number of 1 or more, got 0"):
        make_search("regal_plus", {"kept": 0})
    with pytest.raises(SearchError, match=r"genetic\.batch must be None"):
        make_search("regal_plus", {"genetic.batch": 20}).check(diamond())
    placement = egx.MemoryPlacement(chain(3), machine())
    with pytest.raises(SearchError, match="judges changes of device and priority"):
        make_search("regal_plus", policy=devices_only()).check(placement)
    with pytest.raises(SearchError, match="judges changes of plans"):
        devices_only().decide(diamond())
    devices_only().save(tmp_path / "policy.npz")
    again = egx.load_policy(tmp_path / "policy.npz")
    assert isinstance(again, MovePolicy)
    np.testing.assert_array_equal(again.hidden.weight, devices_only().hidden.weight)
    assert isinstance(make_search("regal_plus", policy=again), RegalPlus)
