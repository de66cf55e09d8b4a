"""Corpora of graphs for training: noisy variants, and splits in which no topology is twice.

After Paliwal et al., ICLR 2020 (arXiv 1905.02494): variants by multiplicative noise on sizes and
times; 60 % of the topologies to train on, 20 % to validate with, 20 % to test on.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Float, Int

from egx.errors import GraphError
from egx.graph.graph import MAX_UNITS, Model, graph_digest, real_sizes

SHARES = (0.6, 0.2, 0.2)


class Split(NamedTuple):
    """Indices of models, ascending."""

    train: tuple[int, ...]
    validation: tuple[int, ...]
    test: tuple[int, ...]


def topology_digest(model: Model) -> str:
    """SHA-256 of who feeds whom: the same for variants that differ in sizes, times and kinds."""
    graph = model.graph
    ops, _, uses = real_sizes(graph)
    producer = np.asarray(graph.tensor_producer, np.int64)[np.asarray(graph.use_tensor)[:uses]]
    consumer = np.asarray(graph.use_consumer, np.int64)[:uses]
    # Two tensors between the same ops, or one read twice, make no other topology.
    edges = np.unique(np.stack([producer, consumer], 1), axis=0)
    return hashlib.sha256(np.int64(ops).tobytes() + edges.tobytes()).hexdigest()


def split_by_topology(
    models: Sequence[Model], shares: tuple[float, float, float] = SHARES
) -> Split:
    """Training, validation and test models, by the digests of their topologies.

    All models of one topology come into the same split. Topologies are taken in the order of
    their digests, which has nothing to do with what they are, and whatever the order of `models`;
    each goes to the split that misses most of its share of the models.

    Raises:
        GraphError: for shares that are negative or do not add up to 1.
    """
    if min(shares) < 0 or not np.isclose(sum(shares), 1.0):
        raise GraphError(f"shares must be 0 or more and add up to 1, got {shares!r}")
    groups: dict[str, list[int]] = {}
    for index, model in enumerate(models):
        groups.setdefault(topology_digest(model), []).append(index)
    wanted = np.array(shares) * len(models)
    chosen: list[list[int]] = [[], [], []]
    for digest in sorted(groups):
        missing = wanted - [len(part) for part in chosen]
        chosen[int(np.argmax(missing))] += groups[digest]
    return Split(*(tuple(sorted(part)) for part in chosen))


def perturb(rng: np.random.Generator, model: Model, spread: float = 0.1) -> Model:
    """The same topology with every size and every op's FLOPs times a factor of its own.

    Factors are log-normal with median 1; `spread` is the standard deviation of their logarithm.
    What is zero stays zero, and nothing else becomes it.

    Raises:
        GraphError: for a negative spread.
    """
    graph = model.graph
    ops, tensors, _ = real_sizes(graph)
    flops = np.array(graph.flops)
    flops[:ops] *= _factors(rng, (ops,), spread).astype(np.float32)
    weights = _scaled(np.asarray(graph.weight_units), _factors(rng, (ops,), spread))
    sizes = _scaled(np.asarray(graph.tensor_units), _factors(rng, (tensors,), spread))
    unit = int(graph.unit_bytes)
    while int(weights.sum() + sizes.sum()) > MAX_UNITS:
        unit, weights, sizes = 2 * unit, -(-weights // 2), -(-sizes // 2)
    put = jax.device_put
    changed = dataclasses.replace(
        graph,
        flops=put(flops),
        weight_units=put(weights.astype(np.int32)),
        tensor_units=put(sizes.astype(np.int32)),
        unit_bytes=put(np.int32(unit)),
    )
    return dataclasses.replace(model, graph=changed, digest=graph_digest(changed))


def perturb_seconds(
    rng: np.random.Generator, op_seconds: Float[np.ndarray, "N D"], spread: float = 0.1
) -> Float[np.ndarray, "N D"]:
    """Measured seconds with the noise of `perturb`: a factor an op, the same on every device."""
    return op_seconds * _factors(rng, (len(op_seconds), 1), spread)


def _factors(rng: np.random.Generator, shape: tuple[int, ...], spread: float) -> np.ndarray:
    if not spread >= 0:
        raise GraphError(f"spread must be 0 or more, got {spread!r}")
    return rng.lognormal(sigma=spread, size=shape)


def _scaled(units: Int[np.ndarray, " N"], factors: Float[np.ndarray, " M"]) -> np.ndarray:
    """Counts times factors, padding left alone."""
    scaled = units.astype(np.int64)
    real = len(factors)
    noisy = np.maximum(np.round(scaled[:real] * factors), 1).astype(np.int64)
    scaled[:real] = np.where(scaled[:real] > 0, noisy, 0)
    return scaled
