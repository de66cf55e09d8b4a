"""Shapes of random directed acyclic graphs: who feeds whom, without sizes or kinds.

Each function returns, for every op, the ascending list of its parents, all of lower index. The
random graph models are those of Erdos and Renyi (1959), Holland, Laskey and Leinhardt (stochastic
blocks, 1983), Watts and Strogatz (1998) and Barabasi and Albert (1999); the undirected ones become
acyclic by pointing each edge along a random order of the nodes.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from jaxtyping import Bool

Parents = list[list[int]]


def _oriented(rng: np.random.Generator, adjacency: Bool[np.ndarray, "N N"]) -> Parents:
    """An undirected graph with its edges pointed along a random order of its nodes."""
    order = rng.permutation(len(adjacency))
    shuffled = adjacency[np.ix_(order, order)]
    return [np.flatnonzero(shuffled[i, :i]).tolist() for i in range(len(adjacency))]


def _symmetric(lower: Bool[np.ndarray, "N N"]) -> Bool[np.ndarray, "N N"]:
    lower = np.tril(lower, -1)
    return lower | lower.T


def chain(rng: np.random.Generator, ops: int) -> Parents:
    """One op after another."""
    return [[i - 1] if i else [] for i in range(ops)]


def layered(rng: np.random.Generator, ops: int, width: int = 4, density: float = 0.5) -> Parents:
    """Layers of 1 to `width` ops; each op reads from the layer before, at least once."""
    parents: Parents = []
    before: list[int] = []
    while len(parents) < ops:
        count = min(int(rng.integers(1, width + 1)), ops - len(parents))
        layer = list(range(len(parents), len(parents) + count))
        for _ in layer:
            chosen = [p for p in before if rng.random() < density]
            if before and not chosen:
                chosen = [before[int(rng.integers(len(before)))]]
            parents.append(chosen)
        before = layer
    return parents


def series_parallel(rng: np.random.Generator, ops: int) -> Parents:
    """Grown from one op by putting ops behind others, or beside them with the same neighbours."""
    children: list[set[int]] = [set()]
    above: list[set[int]] = [set()]
    while len(children) < ops:
        node, fresh = int(rng.integers(len(children))), len(children)
        if rng.random() < 0.5:
            # In series: what followed the node now follows the new op.
            children.append(children[node])
            above.append({node})
            for child in children[fresh]:
                above[child] = (above[child] - {node}) | {fresh}
            children[node] = {fresh}
        else:
            children.append(set(children[node]))
            above.append(set(above[node]))
            for child in children[fresh]:
                above[child].add(fresh)
            for parent in above[fresh]:
                children[parent].add(fresh)
    return _sorted_topologically(rng, above, children)


def _sorted_topologically(
    rng: np.random.Generator, above: list[set[int]], children: list[set[int]]
) -> Parents:
    """Relabels a DAG by a random topological order of it."""
    waiting = [len(parents) for parents in above]
    ready = [node for node, count in enumerate(waiting) if count == 0]
    label: dict[int, int] = {}
    parents: Parents = []
    while ready:
        node = ready.pop(int(rng.integers(len(ready))))
        label[node] = len(parents)
        parents.append(sorted(label[parent] for parent in above[node]))
        for child in sorted(children[node]):
            waiting[child] -= 1
            if waiting[child] == 0:
                ready.append(child)
    return parents


def erdos_renyi(rng: np.random.Generator, ops: int, probability: float = 0.05) -> Parents:
    """Each pair of ops is joined with the same probability."""
    return _oriented(rng, _symmetric(rng.random((ops, ops)) < probability))


def stochastic_block(
    rng: np.random.Generator,
    ops: int,
    blocks: int = 4,
    inside: float = 0.3,
    between: float = 0.001,
) -> Parents:
    """Ops in blocks of equal size (to within one), densely joined inside and sparsely between."""
    block = np.arange(ops) * blocks // max(ops, 1)
    probability = np.where(block[:, None] == block[None, :], inside, between)
    return _oriented(rng, _symmetric(rng.random((ops, ops)) < probability))


def watts_strogatz(
    rng: np.random.Generator, ops: int, neighbours: int = 4, rewire: float = 0.3
) -> Parents:
    """A ring in which each op is joined to its nearest `neighbours`, some edges rewired."""
    adjacency = np.zeros((ops, ops), bool)
    reach = min(neighbours // 2, (ops - 1) // 2)
    nodes = np.arange(ops)
    for distance in range(1, reach + 1):
        ahead = (nodes + distance) % ops
        adjacency[nodes, ahead] = adjacency[ahead, nodes] = True
    for distance in range(1, reach + 1):
        for node in range(ops):
            other = (node + distance) % ops
            if rng.random() >= rewire:
                continue
            free = np.flatnonzero(~adjacency[node])
            free = free[free != node]
            if len(free):
                target = int(rng.choice(free))
                adjacency[node, other] = adjacency[other, node] = False
                adjacency[node, target] = adjacency[target, node] = True
    return _oriented(rng, adjacency)


def barabasi_albert(rng: np.random.Generator, ops: int, attach: int = 2) -> Parents:
    """Ops join one by one, each to `attach` earlier ones chosen in proportion to their degree."""
    adjacency = np.zeros((ops, ops), bool)
    attach = min(attach, ops - 1)
    ends: list[int] = []
    for node in range(attach, ops):
        if node == attach:
            targets = list(range(attach))
        else:
            chosen: set[int] = set()
            while len(chosen) < attach:
                chosen.add(ends[int(rng.integers(len(ends)))])
            targets = sorted(chosen)
        for target in targets:
            adjacency[node, target] = adjacency[target, node] = True
            ends += [node, target]
    return _oriented(rng, adjacency)


TOPOLOGIES: dict[str, Callable[..., Parents]] = {
    "chain": chain,
    "layered": layered,
    "series_parallel": series_parallel,
    "erdos_renyi": erdos_renyi,
    "stochastic_block": stochastic_block,
    "watts_strogatz": watts_strogatz,
    "barabasi_albert": barabasi_albert,
}
