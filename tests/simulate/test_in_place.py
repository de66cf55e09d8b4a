"""Loops write in place: a copy of what they carry in each step makes their cost quadratic."""

from __future__ import annotations

import math
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import egx

LAYERS, STEPS = 1, 3
PROBLEMS = {
    "static": {},
    "in turn": {"decide": ("device", "priority", "transfer_priority")},
    "blocking": {"transfers": "blocking"},
    "run time": {"order": "runtime"},
    "ports": {"order": "runtime", "transfers": "ports"},
    "fused": {"order": "runtime", "decide": ("fusion", "device", "priority")},
}


def copies(text: str, entries: int) -> list[str]:
    """The copies of so many entries and more that stand in the bodies of a program's loops."""
    bodies = set(re.findall(r"while\(.*?body=%?([\w.\-]+)", text))
    where, found = "", []
    for line in text.splitlines():
        begins = re.match(r"(?:ENTRY )?%?([\w.\-]+) \(", line)
        where = begins.group(1) if begins else where
        copy = re.search(r"= \w+\[([\d,]+)\]\S* copy\(", line)
        if copy and where in bodies and math.prod(map(int, copy.group(1).split(","))) >= entries:
            found.append(f"{where}: {line.strip()[:100]}")
    return found


def compiled(problem, population, shared=()):
    plan = {name: jnp.asarray(value) for name, value in problem.reference.items()}
    arrays, rest = eqx.partition(problem, eqx.is_array)

    def cost(arrays, plan):
        return eqx.combine(arrays, rest).evaluate(plan).cost

    if population > 1:
        axes = {name: None if name in shared else 0 for name in plan}
        for name in plan.keys() - set(shared):
            plan[name] = jnp.broadcast_to(plan[name], (population, *plan[name].shape))
        cost = jax.vmap(cost, in_axes=(None, axes))
    return jax.jit(cost).lower(arrays, plan).compile().as_text()


@pytest.mark.parametrize("population", [1, 3])
@pytest.mark.parametrize("kind", PROBLEMS)
def test_of_several_devices(kind, population):
    model = egx.load("rnnlm", layers=LAYERS, steps=STEPS)
    problem = egx.Execution(model, egx.hardware.load("p100x2"), **PROBLEMS[kind])
    text = compiled(problem, population)
    assert "while(" in text
    assert copies(text, problem.graph.num_ops) == []


def test_of_one_order_for_all():
    model = egx.load("rnnlm", layers=LAYERS, steps=STEPS)
    problem = egx.Execution(model, egx.hardware.load("p100x2"))
    text = compiled(problem, 3, shared=("priority",))
    assert "while(" in text
    assert copies(text, problem.graph.num_ops) == []


@pytest.mark.parametrize("prefetch", [0, 2])
def test_of_memory(prefetch):
    problem = egx.MemoryPlacement(
        egx.load("resnet50"), egx.hardware.load("nnpi"), prefetch=prefetch
    )
    text = compiled(problem, 1)
    assert "while(" in text
    assert copies(text, problem.graph.num_ops) == []


def test_a_copy_is_seen():
    """Of a loop over one candidate, which reads and writes at places that it computes."""

    def step(k, x):
        read = x[(7 * k) % 100]
        return x.at[k].set(read).at[(3 * k) % 100].add(x[(5 * k) % 100])

    text = jax.jit(lambda x: jax.lax.fori_loop(0, 100, step, x)).lower(jnp.zeros(100)).compile()
    assert copies(text.as_text(), 100)
