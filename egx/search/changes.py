"""Changes of single decisions along a graph: to a neighbour's value, beside it in the order, or
on from op to op.

Shapes: L entries of a candidate (see `egx.search.genome`), N ops, U uses, H decisions.
"""

from __future__ import annotations

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from egx.graph.graph import Graph
from egx.problems.base import AbstractProblem
from egx.search.genome import Genes, Genome


class Neighbours(eqx.Module):
    """The uses that touch each op: those it reads are `reads` from `first_read` on, and those
    that read it are `reads` places of `by_producer` from `first_made` on."""

    producer: Int[Array, " U"]
    consumer: Int[Array, " U"]
    by_producer: Int[Array, " U"]
    first_read: Int[Array, " N"]
    reads: Int[Array, " N"]
    first_made: Int[Array, " N"]
    made: Int[Array, " N"]

    def __init__(self, graph: Graph):
        count = graph.num_ops
        ops = jnp.arange(count, dtype=jnp.int32)
        # Padding sorts behind the ops, where nobody looks.
        producer = jnp.where(graph.use_mask, graph.use_producer(), count)
        consumer = jnp.where(graph.use_mask, graph.use_consumer, count)
        self.producer, self.consumer = producer, consumer
        self.by_producer = jnp.argsort(producer, stable=True).astype(jnp.int32)
        self.first_read, self.reads = _segments(consumer, ops)
        self.first_made, self.made = _segments(producer[self.by_producer], ops)

    def draw(
        self, op: Int[Array, ""], uniform: Float[Array, ""]
    ) -> tuple[Int[Array, ""], Bool[Array, ""], Bool[Array, ""]]:
        """(a neighbour of an op, whether it is a consumer, whether there is any)."""
        reads, total = self.reads[op], self.reads[op] + self.made[op]
        most = self.by_producer.shape[0] - 1
        if most < 0:
            return op, jnp.zeros((), bool), jnp.zeros((), bool)
        ticket = jnp.floor(uniform * total.astype(jnp.float32)).astype(jnp.int32)
        ticket = jnp.minimum(ticket, total - 1)
        forward = ticket >= reads
        read = jnp.clip(self.first_read[op] + ticket, 0, most)
        made = self.by_producer[jnp.clip(self.first_made[op] + ticket - reads, 0, most)]
        other = jnp.where(forward, self.consumer[made], self.producer[read])
        return jnp.where(total > 0, other, op).astype(jnp.int32), forward, total > 0


def _segments(of: Int[Array, " U"], ops: Int[Array, " N"]) -> tuple[Array, Array]:
    first = jnp.searchsorted(of, ops, side="left")
    last = jnp.searchsorted(of, ops, side="right")
    return first.astype(jnp.int32), (last - first).astype(jnp.int32)


class Change(eqx.Module):
    """One entry and its new value."""

    entry: Int[Array, ""]
    value: Float[Array, ""]


class Moves(eqx.Module):
    """How entries change.

    Args:
        near: probability that a choice takes its neighbour's value, and a real goes beside it.
        far: probability that another real is drawn anew rather than shifted.
        shift: standard deviation of such a shift.
        walk: probability that a further change is of a neighbour of the last op and, where it
            chooses, takes the same value.
        couple: probability that it is of another decision of the last op.
    """

    near: Array
    far: Array
    shift: Array
    walk: Array
    couple: Array


def first_change(
    moves: Moves,
    problem: AbstractProblem,
    genome: Genome,
    near: Neighbours,
    genes: Genes,
    uniform: Float[Array, " 8"],
) -> Change:
    """A change of any active entry."""
    entry = _any_entry(genome, uniform[0])
    return Change(entry, _new_value(moves, problem, genome, near, genes, entry, uniform))


def next_change(
    moves: Moves,
    problem: AbstractProblem,
    genome: Genome,
    near: Neighbours,
    genes: Genes,
    last: Change,
    uniform: Float[Array, " 12"],
) -> Change:
    """A change that goes on from the last one."""
    starts, by_op = _layout(problem)
    head, position = genome.head[last.entry], genome.position[last.entry]
    fresh = _any_entry(genome, uniform[0])
    op = jnp.where(by_op[head], position, 0)
    neighbour, _, found = near.draw(op, uniform[8])
    walks = by_op[head] & found & (uniform[9] < moves.walk)
    other = jnp.mod(head + 1, len(starts))
    couples = by_op[head] & by_op[other] & (other != head) & (uniform[10] < moves.couple)
    entry = jnp.where(walks, starts[head] + neighbour, fresh)
    entry = jnp.where(couples, starts[other] + position, entry)
    value = _new_value(moves, problem, genome, near, genes, entry, uniform)
    follows = walks & ~couples & (genome.choices[entry] > 0) & (genes[entry] != last.value)
    return Change(entry, jnp.where(follows, last.value, value))


def applied(genome: Genome, genes: Genes, change: Change, wanted: Bool[Array, ""]) -> Genes:
    """The plan after a change, if it is wanted and its entry active."""
    happens = wanted & genome.active[change.entry]
    return genes.at[change.entry].set(jnp.where(happens, change.value, genes[change.entry]))


def _any_entry(genome: Genome, uniform: Float[Array, ""]) -> Int[Array, ""]:
    count = genome.active_count
    index = jnp.floor(uniform * count.astype(jnp.float32)).astype(jnp.int32)
    return genome.active_index[jnp.clip(index, 0, jnp.maximum(count - 1, 0))]


def _layout(problem: AbstractProblem) -> tuple[Int[Array, " H"], Bool[Array, " H"]]:
    """Where each decision's entries begin, and whether they are made op by op."""
    lengths = [problem.length(head) for head in problem.heads.values()]
    starts = np.cumsum([0, *lengths])[:-1]
    by_op = [head.axis == "op" for head in problem.heads.values()]
    return jnp.asarray(starts, jnp.int32), jnp.asarray(by_op)


def _new_value(
    moves: Moves,
    problem: AbstractProblem,
    genome: Genome,
    near: Neighbours,
    genes: Genes,
    entry: Int[Array, ""],
    uniform: Float[Array, " _"],
) -> Float[Array, ""]:
    starts, by_op = _layout(problem)
    head, choices, old = genome.head[entry], genome.choices[entry], genes[entry]
    op = jnp.where(by_op[head], genome.position[entry], 0)
    neighbour, forward, found = near.draw(op, uniform[1])
    theirs = genes[jnp.minimum(starts[head] + neighbour, genes.shape[0] - 1)]
    follows = by_op[head] & found & (uniform[2] < moves.near)
    others = choices - 1.0
    another = jnp.mod(old + 1.0 + jnp.minimum(jnp.floor(uniform[3] * others), others - 1.0),
                      jnp.maximum(choices, 1.0))  # fmt: skip
    choice = jnp.where(follows & (theirs != old), theirs, another)
    # Between two neighbours in the order; a higher priority comes first.
    apart = 0.5 * uniform[4] / problem.graph.num_ops
    beside = theirs + jnp.where(forward, apart, -apart)
    radius = jnp.sqrt(-2.0 * jnp.log(jnp.maximum(uniform[5], 1e-7)))
    shifted = old + moves.shift * radius * jnp.cos(2.0 * jnp.pi * uniform[6])
    real = jnp.where(uniform[7] < moves.far, uniform[3], shifted)
    real = jnp.clip(jnp.where(follows, beside, real), 0.0, 1.0)
    return jnp.where(choices == 0, real, choice)
