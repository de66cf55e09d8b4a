"""The two networks of hierarchical device placement: ops to groups, and groups to decisions.

Mirhoseini et al., "A Hierarchical Model for Device Placement", ICLR 2018 (OpenReview Hkc-TeZ0W).
The grouper is a feed-forward network with a softmax over groups for each op. The placer reads the
groups' embeddings with an LSTM, and a second LSTM with content-based attention (Bahdanau, Cho and
Bengio, ICLR 2015, arXiv 1409.0473) decides group by group. All logits are C tanh(x / T).

Groups without ops are skipped by both LSTMs and by the attention: a graph of few ops sees a short
sequence, and padding changes nothing.

Shapes: N ops, U uses, I inputs of an op, G groups, H width, K choices.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from egx.graph.graph import OP_CLASSES
from egx.policies.base import Choices
from egx.policies.layers import Dense, Draws, initialised
from egx.problems.base import AbstractProblem

# Heads differ in their number of choices, and groups in what they chose.
Chosen = dict[str, Int[Array, " G"]]
_NEVER = -1e30


class HDPContext(eqx.Module):
    """What both networks see: rows of ops, and bytes between them."""

    inputs: Float[Array, "N I"]
    sizes: Float[Array, "N 3"]
    mask: Bool[Array, " N"]
    producer: Int[Array, " U"]
    consumer: Int[Array, " U"]
    bytes: Float[Array, " U"]


def hdp_context(problem: AbstractProblem) -> HDPContext:
    """An op's features and class, and their means over its producers and over its consumers (the
    paper gives the neighbours' indices, which mean nothing in another graph)."""
    graph = problem.graph
    own = jnp.concatenate(
        [problem.features, jax.nn.one_hot(graph.op_class, len(OP_CLASSES))], 1
    ) * graph.op_mask[:, None].astype(jnp.float32)
    real = graph.use_mask.astype(jnp.float32)
    producer, consumer = graph.use_producer(), graph.use_consumer

    def mean_over(source: Array, target: Array) -> Array:
        total = jax.ops.segment_sum(own[source] * real[:, None], target, graph.num_ops)
        count = jax.ops.segment_sum(real, target, graph.num_ops)
        return total / jnp.maximum(count, 1.0)[:, None]

    units = [graph.flops, graph.weight_units, graph.output_units()]
    sizes = jnp.stack([x.astype(jnp.float32) for x in units], 1)
    share = sizes / jnp.maximum(jnp.sum(sizes, 0), 1.0)
    around = [mean_over(producer, consumer), mean_over(consumer, producer)]
    return HDPContext(
        inputs=jnp.concatenate([own, *around], 1),
        sizes=jnp.where(graph.op_mask[:, None], share, 0.0),
        mask=graph.op_mask,
        producer=producer,
        consumer=consumer,
        bytes=graph.use_units().astype(jnp.float32),
    )


class Cell(eqx.Module):
    """An LSTM's step (Hochreiter and Schmidhuber, Neural Computation 9, 1997), with 1 added to
    the forget gate."""

    inputs: Dense
    states: Dense

    def __init__(self, inputs: int, width: int, draws: Draws):
        self.inputs, self.states = Dense(inputs, 4 * width, draws), Dense(width, 4 * width, draws)

    def __call__(
        self, state: tuple[Array, Array], given: Float[Array, " _"], is_real: Bool[Array, ""]
    ) -> tuple[Array, Array]:
        """`given` is `inputs` of what is read; the state stays where nothing is."""
        h, c = state
        read, forget, new, show = jnp.split(given + self.states(h), 4)
        c_new = jax.nn.sigmoid(forget + 1.0) * c + jax.nn.sigmoid(read) * jnp.tanh(new)
        h_new = jax.nn.sigmoid(show) * jnp.tanh(c_new)
        return jnp.where(is_real, h_new, h), jnp.where(is_real, c_new, c)


class HDPNet(eqx.Module):
    """Grouper and placer, of one problem: its decisions and machine set their sizes."""

    grouper: tuple[Dense, Dense]
    embedding: Dense
    encoder: Cell
    decoder: Cell
    attention: tuple[Dense, Dense, Dense]  # of encoder states, of the decoder's, to a score
    last: dict[str, Float[Array, "K1 H"]]  # the decision before; the last row is none
    heads: dict[str, Dense]
    choices: Choices = eqx.field(static=True)
    groups: int = eqx.field(static=True)

    def __init__(
        self, inputs: int, choices: Choices, *, groups: int, width: int, key: PRNGKeyArray
    ):
        def build(draws: Draws) -> tuple[Any, ...]:
            grouper = Dense(inputs, width, draws), Dense(width, groups, draws)
            embedding = Dense(inputs + 4 + 2 * groups, width, draws)
            encoder, decoder = Cell(width, width, draws), Cell(2 * width, width, draws)
            attention = (
                Dense(width, width, draws), Dense(width, width, draws), Dense(width, 1, draws)
            )  # fmt: skip
            last = {name: draws((count + 1, width), 0.1) for name, count in choices}
            heads = {name: Dense(2 * width, count, draws) for name, count in choices}
            return grouper, embedding, encoder, decoder, attention, last, heads

        (
            self.grouper, self.embedding, self.encoder, self.decoder, self.attention, self.last,
            self.heads,
        ) = initialised(build, key)  # fmt: skip
        self.choices, self.groups = choices, groups

    def group_log_p(self, context: HDPContext, sharpness: Sharpness) -> Float[Array, "N G"]:
        """Log-probabilities of each op's group."""
        first, final = self.grouper
        return sharpness.log_p(final(jax.nn.relu(first(context.inputs))))

    def encoded(
        self, context: HDPContext, groups: Int[Array, " N"]
    ) -> tuple[Float[Array, "G H"], Bool[Array, " G"]]:
        """The encoder's states, and which groups have ops.

        A group's embedding: the mean of its ops' inputs, its shares of the graph's FLOPs, weights,
        outputs and ops, and the shares of what it sends to and reads from each group.
        """
        count = self.groups
        real = context.mask.astype(jnp.float32)

        def total(rows: Array) -> Array:
            return jax.ops.segment_sum(rows * real[:, None], groups, count)

        ops = jax.ops.segment_sum(real, groups, count)
        mean = total(context.inputs) / jnp.maximum(ops, 1.0)[:, None]
        shares = jnp.concatenate([total(context.sizes), (ops / jnp.sum(ops))[:, None]], 1)
        pair = groups[context.producer] * count + groups[context.consumer]
        sent = jax.ops.segment_sum(context.bytes, pair, count * count).reshape(count, count)

        def of_rows(x: Array) -> Array:
            return x / jnp.maximum(jnp.sum(x, 1), 1.0)[:, None]

        rows = jnp.concatenate([mean, shares, of_rows(sent), of_rows(sent.T)], 1)
        given = self.encoder.inputs(jax.nn.relu(self.embedding(rows)))
        present = ops > 0

        def step(state: Any, row: Any) -> Any:
            state = self.encoder(state, *row)
            return state, state[0]

        return jax.lax.scan(step, self._start(), (given, present))[1], present

    def place(
        self,
        states: Float[Array, "G H"],
        present: Bool[Array, " G"],
        sharpness: Sharpness,
        *,
        chosen: Mapping[str, Array] | None = None,
        key: PRNGKeyArray | None = None,
    ) -> tuple[Chosen, Float[Array, ""]]:
        """Decisions of the groups and their log-probability: those that are given, or drawn."""
        of_states, of_decoder, score = self.attention
        keyed = of_states(states)
        index = jnp.arange(self.groups, dtype=jnp.int32)

        def step(carry: Any, row: Any) -> Any:
            state, before = carry
            k, encoder_state, is_real, given = row
            last = sum((self.last[name][before[name]] for name, _ in self.choices), jnp.zeros(()))
            state = self.decoder(
                state, self.decoder.inputs(jnp.concatenate([encoder_state, last])), is_real
            )
            scores = score(jnp.tanh(keyed + of_decoder(state[0])))[:, 0]
            weight = jax.nn.softmax(jnp.where(present, scores, _NEVER))
            seen = jnp.concatenate([state[0], weight @ states])
            log_p, now = jnp.zeros(()), {}
            for number, (name, _) in enumerate(self.choices):
                each = sharpness.log_p(self.heads[name](seen))
                if given is None:
                    assert key is not None
                    drawn = jax.random.fold_in(jax.random.fold_in(key, k), number)
                    now[name] = jax.random.categorical(drawn, each).astype(jnp.int32)
                else:
                    now[name] = given[name]
                log_p = log_p + each[now[name]]
            after = {name: jnp.where(is_real, now[name], before[name]) for name in now}
            return (state, after), (now, jnp.where(is_real, log_p, 0.0))

        none = {name: jnp.asarray(count, jnp.int32) for name, count in self.choices}
        rows = (index, states, present, None if chosen is None else dict(chosen))
        _, (made, log_p) = jax.lax.scan(step, (self._start(), none), rows)
        return made, jnp.sum(log_p)

    def _start(self) -> tuple[Array, Array]:
        zeros = jnp.zeros(self.encoder.states.weight.shape[0], jnp.float32)
        return zeros, zeros


class Sharpness(eqx.Module):
    """Logits C tanh(x / T) keep probabilities away from 0 (Bello et al., "Neural Combinatorial
    Optimization with Reinforcement Learning", 2016, arXiv 1611.09940)."""

    limit: Float[Array, ""]
    temperature: Float[Array, ""]

    def log_p(self, x: Float[Array, "... K"]) -> Float[Array, "... K"]:
        return jax.nn.log_softmax(self.limit * jnp.tanh(x / self.temperature), -1)


def draw_groups(log_p: Float[Array, "N G"], *, key: PRNGKeyArray) -> Int[Array, " N"]:
    """A group for each op, by one uniform number an op: memory of a batch stays N."""
    below = jnp.cumsum(jnp.exp(log_p), 1)
    uniform = jax.random.uniform(key, (log_p.shape[0],))
    group = jax.vmap(lambda row, u: jnp.searchsorted(row, u, side="right"))(below, uniform)
    return jnp.minimum(group, log_p.shape[1] - 1).astype(jnp.int32)
