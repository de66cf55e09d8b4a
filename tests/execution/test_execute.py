"""Plans on real devices: outputs equal the plain function's, whatever the plan; what is refused."""

from __future__ import annotations

import dataclasses
import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import egx
from egx.errors import DecisionError, GraphError, ProblemError
from egx.execution.plans import chosen
from egx.execution.runner import Runner
from egx.execution.segments import cluster_roots, segments_of
from egx.formats.jaxpr import trace_ops
from egx.hardware.machines import with_devices
from egx.report.execution_plan import make_execution_plan
from egx.report.execution_plan_file import write_execution_plan
from egx.simulate.fusion import clusters

OPTIMIZER = optax.sgd(1e-2)


@eqx.filter_jit
def step(net, state, key, x):
    """(net, state, loss, note): a training step with a random mask, and an output that is no
    array, one that is an argument, and a view."""

    def loss(net):
        kept = jax.random.bernoulli(key, 0.5, x.shape)
        return jnp.mean(jnp.square(jax.vmap(net)(jnp.where(kept, x, 0.0))))

    value, gradient = eqx.filter_value_and_grad(loss)(net)
    update, state = OPTIMIZER.update(gradient, state, net)
    return eqx.apply_updates(net, update), state, value, ("note", x, x.sum(0).reshape(2, 3))


@functools.cache
def case():
    """(arguments, traced, problem on two devices)."""
    net = eqx.nn.MLP(6, 6, 8, 1, key=jax.random.key(0))
    state = OPTIMIZER.init(eqx.filter(net, eqx.is_array))
    args = (net, state, jax.random.key(1), jnp.arange(24.0).reshape(4, 6))
    traced = trace_ops(step, args)
    machine = with_devices(egx.hardware.load("a100"), 2)
    decide = ("fusion", "device", "priority")
    return args, traced, egx.Execution(traced.model, machine, decide=decide, order="runtime")


@functools.cache
def runner():
    args, traced, _ = case()
    return Runner(traced, args)


def random_plan(seed, ops):
    rng = np.random.default_rng(seed)
    return {
        "device": rng.integers(0, 2, ops),
        "fusion": rng.integers(0, 4, ops),
        "priority": rng.random(ops).astype(np.float32),
    }


def same(got, args):
    expected = step(*args)
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        if not eqx.is_array(b):
            assert a == b
            continue
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)
        assert a.devices() == {jax.devices()[0]}


def test_outputs_are_those_of_the_function_whatever_the_plan():
    args, traced, _ = case()
    ops = len(traced.ops)
    unfused = runner().run({}, repeats=1)
    assert (unfused.segments, unfused.transfers) == (ops, 0)
    assert unfused.devices == (jax.devices()[0],)
    same(unfused.outputs, args)
    for seed in range(2):
        done = runner().run(random_plan(seed, ops), repeats=2)
        outputs, seconds = done
        same(outputs, args)
        assert 0 < seconds == np.median(done.runs_s)
        assert done.segments < ops
        assert done.transfers > 0
        assert done.devices == tuple(jax.devices()[:2])
    # Equal layers share programs, and so do plans.
    count = len(runner()._programs)
    assert count < ops + sum(len(segments_of(traced, random_plan(s, ops))) for s in range(2))
    runner()._steps(segments_of(traced, random_plan(0, ops)))
    assert len(runner()._programs) == count


def test_fusion_levels_may_be_as_high_as_integers_go():
    """Only their order counts; once, as many loops as the highest level made it hang."""
    _, traced, _ = case()
    levels = random_plan(1, len(traced.ops))["fusion"]
    roots = cluster_roots(traced, levels)
    assert len(set(roots)) < len(roots)
    assert cluster_roots(traced, levels * 2**40) == roots
    assert cluster_roots(traced, np.where(levels > 0, levels * 3 + 2_000_000_000, 0)) == roots
    assert roots == np.asarray(clusters(traced.model.graph, jnp.asarray(levels))).tolist()


def test_segments_follow_priority_and_need():
    _, traced, _ = case()
    ops = len(traced.ops)
    plan = random_plan(1, ops) | {"fusion": np.zeros(ops, int)}
    segments = segments_of(traced, plan)
    place = {v: k for k, s in enumerate(segments) for v in s.writes}
    op_of = {op.writes: k for k, op in enumerate(traced.ops)}
    for k, segment in enumerate(segments):
        assert all(place[v] < k for v in segment.reads if v in place)
        op = op_of[segment.equations[-1].outputs]
        assert segment.device == plan["device"][op]
        # Nothing that was ready before it and comes later is of higher priority.
        for other in segments[k + 1 :]:
            if all(place.get(v, -1) < k for v in other.reads):
                rival = op_of[other.equations[-1].outputs]
                assert plan["priority"][rival] <= plan["priority"][op]


@functools.cache
def measured():
    """What a search found that measured a few plans."""
    args, _, problem = case()
    evaluator = egx.measured_evaluator(step, args, problem, repeats=1)
    return egx.optimize(problem, "random", budget=2, evaluator=evaluator)


def test_a_search_measures_real_runs():
    result = measured()
    assert result.feasible
    assert result.failed_measurements == 0
    assert result.evaluations == 2
    assert result.cost > 1e-4
    assert result.reference_cost > 1e-4


def test_plans_of_every_form(tmp_path):
    args, traced, problem = case()
    result, file = measured(), tmp_path / "plan.json"
    plan = make_execution_plan(problem, result.decisions, result=result)
    write_execution_plan(plan, file)
    for form in (plan, file, str(file)):
        decisions, order = chosen(traced, form)
        again = segments_of(traced, decisions)
        expected = segments_of(traced, chosen(traced, result).decisions)
        assert [(s.device, s.equations) for s in again] == [
            (s.device, s.equations) for s in expected
        ]
        # The run-time order is the simulator's: of the file, or of the problem.
        roots = {s.equations[-1].outputs for s in again}
        assert [k for k in order if traced.ops[k].writes in roots] == chosen(
            traced, result, problem
        ).order
    assert chosen(traced, result).order is None
    same(egx.execute(step, args, file, repeats=1).outputs, args)


def test_loops_literals_and_ops_without_inputs():
    def fn(x):
        noise = jax.random.normal(jax.random.key(7), (3,))
        out = lax.fori_loop(0, 3, lambda _, v: jnp.sin(v) @ v, x)
        return {"x": lax.cond(x[0, 0] > 0, jnp.cos, jnp.exp, out), "n": noise, "one": 1.0}

    x = jnp.ones((3, 3))
    ops = len(trace_ops(fn, (x,)).ops)
    plan = {"device": np.arange(ops) % 2, "fusion": np.ones(ops, int)}
    done = egx.execute(fn, [x], plan, repeats=1)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), done.outputs, fn(x))


def test_arrays_of_numpy_are_as_wide_as_jax_makes_them():
    """NumPy's own type is float64, which JAX narrows when it traces."""
    given = [np.linspace(0.0, 1.0, 4), np.int64(3)]
    done = egx.execute(lambda x, n: jnp.sin(x) * n.astype(x.dtype), given, {}, repeats=1)
    assert done.outputs.dtype == jnp.sin(given[0]).dtype
    np.testing.assert_allclose(done.outputs, 3 * np.sin(given[0]), rtol=1e-6)


def test_mistakes_name_what_is_wrong(unchecked, tmp_path):
    args, traced, problem = case()
    ops = len(traced.ops)

    def run(plan, args=args, **more):
        return egx.execute(step, args, plan, repeats=1, **more)

    with pytest.raises(DecisionError, match=f"shape .3,., but step has {ops} ops"):
        run({"device": np.zeros(3, int)})
    with pytest.raises(DecisionError, match="on device 9, but there are 4 devices here: cpu:0"):
        run({"device": np.full(ops, 9)})
    with pytest.raises(DecisionError, match="on device 1, but there are 1 devices"):
        run({"device": np.ones(ops, int)}, devices=jax.devices()[:1])
    with pytest.raises(DecisionError, match="'device' at op 0 is -1"):
        run({"device": np.full(ops, -1)})
    with pytest.raises(DecisionError, match="'device' is no array"):
        run({"device": [[0], [1, 2]]})
    with pytest.raises(DecisionError, match="'priority' must hold numbers, got complex128"):
        run({"priority": np.full(ops, 1j)})
    with pytest.raises(DecisionError, match=r"devices must hold JAX devices, .* got 'cpu'"):
        run({}, devices=["cpu"])
    with pytest.raises(DecisionError, match=r"unknown decisions .'weights'."):
        run({"weights": np.zeros(ops, int)})
    with pytest.raises(DecisionError, match="'fusion' must hold integers, got float64"):
        run({"fusion": np.zeros(ops)})
    with pytest.raises(DecisionError, match="expected a Result, decisions or the path"):
        run(3)
    with pytest.raises(DecisionError, match="args must be a tuple or list"):
        run({}, args=args[0])
    with pytest.raises(DecisionError, match="no option 'unrol' of tracing"):
        run({}, unrol=True)
    with pytest.raises(DecisionError, match="repeats must be a whole number"):
        egx.execute(step, args, {}, repeats=0)
    other = (*args[:3], jnp.ones((5, 6)))
    with pytest.raises(GraphError, match=r"args\[3\] was traced as float32\[4,6\]"):
        Runner(traced, other)
    shapes = (*args[:3], jax.ShapeDtypeStruct((4, 6), jnp.float32))
    with pytest.raises(GraphError, match=r"args\[3\] has no values"):
        run({}, args=shapes)
    # A plan of another graph: of other shapes, here.
    plan = make_execution_plan(problem, problem.reference)
    write_execution_plan(plan, tmp_path / "plan.json")
    with pytest.raises(DecisionError, match=r"'found' is of another graph .* same function"):
        run(tmp_path / "plan.json", args=other)
    with pytest.raises(DecisionError, match="the problem is of another graph"):
        egx.measured_evaluator(step, other, problem)
    with pytest.raises(DecisionError, match="problem has 2 devices, and there are 1"):
        egx.measured_evaluator(step, args, problem, devices=jax.devices()[:1])
    peak = egx.Execution(traced.model, problem.hardware, objective="peak_memory")
    with pytest.raises(ProblemError, match=r"seconds are measured; .* is peak_memory"):
        egx.measured_evaluator(step, args, peak)
    result = measured()
    wrong = {**result.provenance["problem"], "kind": "MemoryPlacement"}
    placed = dataclasses.replace(result, provenance={"problem": wrong})
    with pytest.raises(DecisionError, match="the result is of MemoryPlacement"):
        run(placed)
