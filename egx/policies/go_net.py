"""GO's network: one policy for fusion, placement and scheduling on graphs of any size.

Zhou et al., "Transferable Graph Optimizers for ML Compilers", NeurIPS 2020, arXiv 2010.12438: ops
are embedded by GraphSAGE, go through segment-recurrent attention in topological order, and then
through one more such layer once for each task, which starts from what it left of the task before;
what these layers and the tasks' heads read is gated by the graph; the whole is done again with the
decisions as inputs.

An op's logits are its products with an embedding of each choice, made from what the choice is (a
device's speeds, a level's place among the levels), and not rows of a matrix: so one network serves
any number of devices, fusion levels or memory levels, without a largest one, and knows unequal
devices apart.

Shapes: N ops, H width, C choices of a decision, K columns of a choice, S ops of a segment.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from egx.errors import SearchError
from egx.policies.base import REAL_LEVELS, AbstractPolicy, head_choices
from egx.policies.distributions import Logits
from egx.policies.go_inputs import CHOICE_INPUTS, OP_INPUTS, GoContext, go_context
from egx.policies.graph_sage import MOST_OPS, GraphSage
from egx.policies.layers import Dense, Draws, initialised, standardised
from egx.policies.segment_attention import Past, SegmentLayer, gates_of
from egx.problems.base import AbstractProblem

# The order in which tasks are decided; a problem's own kinds of decisions come last.
TASKS = ("fusion", "device", "weights", "activations", "priority")

# What a network is made from, beside its tasks.
NETWORK_OPTIONS = (
    "width",
    "rounds",
    "layers",
    "attention_heads",
    "segment",
    "passes",
    "real_levels",
    "attention",
    "superposition",
    "joint",
)

# Of each decision: embeddings of its choices, and what is added to the logit of each.
_Choices = dict[str, tuple[Array, Array]]


class ChoiceHead(eqx.Module):
    """One task: what tells the shared layer of it, its logits, and what others see of them."""

    task: Float[Array, " H"]
    first: Dense
    second: Dense
    bias: Dense
    query: Dense
    feedback: Dense
    gate: Dense | None

    def __init__(self, width: int, superposition: bool, draws: Draws):
        self.task = draws((width,), 1.0 / math.sqrt(width))
        self.first, self.second = Dense(CHOICE_INPUTS, width, draws), Dense(width, width, draws)
        self.bias = Dense(width, 1, draws)
        self.query, self.feedback = Dense(width, width, draws), Dense(width, width, draws)
        self.gate = Dense(width, width, draws) if superposition else None

    def choices(self, columns: Float[Array, "C K"]) -> tuple[Array, Array]:
        """Embeddings [C, H] and biases [C]."""
        hidden = jax.nn.relu(self.first(columns))
        return self.second(hidden), self.bias(hidden)[:, 0]

    def logits(self, x: Float[Array, "S H"], choices: tuple[Array, Array]) -> Float[Array, "S C"]:
        """`x` is gated already."""
        embedded, bias = choices
        return self.query(x) @ embedded.T / math.sqrt(x.shape[1]) + bias

    def seen(
        self, logits: Float[Array, "S C"], choices: tuple[Array, Array]
    ) -> Float[Array, "S H"]:
        """The expected decision as an input of what comes after it."""
        return self.feedback(jax.nn.softmax(logits, -1) @ choices[0])


class GoPolicy(AbstractPolicy):
    """The network; every part that is GO's own can be switched off."""

    encoder: Dense
    sage: GraphSage | None
    trunk: SegmentLayer | None
    shared: SegmentLayer
    heads: dict[str, ChoiceHead]
    tasks: tuple[str, ...] = eqx.field(static=True)
    width: int = eqx.field(static=True)
    rounds: int = eqx.field(static=True)
    layers: int = eqx.field(static=True)
    attention_heads: int = eqx.field(static=True)
    segment: int = eqx.field(static=True)
    passes: int = eqx.field(static=True)
    real_levels: int = eqx.field(static=True)
    attention: bool = eqx.field(static=True)
    superposition: bool = eqx.field(static=True)
    joint: bool = eqx.field(static=True)

    def __init__(
        self,
        tasks: Sequence[str] = TASKS,
        *,
        width: int = 128,
        rounds: int = 3,
        layers: int = 3,
        attention_heads: int = 8,
        segment: int = 256,
        passes: int = 3,
        real_levels: int = REAL_LEVELS,
        attention: bool = True,
        superposition: bool = True,
        joint: bool = True,
        key: PRNGKeyArray,
    ):
        """
        Args:
            tasks: names of decisions, in the order in which they are taken; a problem may have
                any of them.
            width: of every layer, a multiple of `attention_heads`.
            rounds: of GraphSAGE.
            layers: of segment attention, before the one that the tasks share.
            segment: ops of a segment.
            passes: how often the network runs, each time with its last decisions as inputs.
            real_levels: levels that stand for the values of a real decision.
            attention: False leaves each op alone with what GraphSAGE brought.
            superposition: False for the same weights for every graph.
            joint: False lets each task start from the ops alone, and not from the task before.
        """
        _check(tasks, width, rounds, layers, attention_heads, segment, passes, real_levels)

        def build(draws: Draws) -> tuple[Any, ...]:
            def layer() -> SegmentLayer:
                return SegmentLayer(
                    width, attention_heads, draws, attention=attention, superposition=superposition
                )

            return (
                Dense(OP_INPUTS, width, draws),
                _stacked([GraphSage(width, draws) for _ in range(rounds)]),
                _stacked([layer() for _ in range(layers)]),
                layer(),
                {name: ChoiceHead(width, superposition, draws) for name in tasks},
            )

        self.encoder, self.sage, self.trunk, self.shared, self.heads = initialised(build, key)
        self.tasks, self.width, self.rounds, self.layers = tuple(tasks), width, rounds, layers
        self.attention_heads, self.segment, self.passes = attention_heads, segment, passes
        self.real_levels, self.attention = real_levels, attention
        self.superposition, self.joint = superposition, joint

    def check(self, problem: AbstractProblem) -> None:
        """Raises SearchError when this policy cannot decide `problem`; host-side."""
        _check_heads(problem)
        unknown = [n for n, _ in head_choices(problem, self.real_levels) if n not in self.tasks]
        if unknown:
            raise SearchError(
                f"the GO policy decides {', '.join(self.tasks)}, but the problem asks for "
                f"{', '.join(unknown)}"
            )
        if problem.graph.num_ops > MOST_OPS:
            raise SearchError(
                f"the GO policy takes at most {MOST_OPS:,} ops, got {problem.graph.num_ops:,}"
            )

    def context(self, problem: AbstractProblem) -> GoContext:
        """What `logits` needs to know of a problem, whatever the weights."""
        self.check(problem)
        return go_context(problem, self.real_levels)

    def __call__(self, problem: AbstractProblem) -> Logits:
        return self.logits(self.context(problem))

    def logits(self, context: GoContext) -> Logits:
        """The logits of a problem whose context is at hand."""
        tasks = [name for name in self.tasks if name in context.choices]
        choices = {name: self.heads[name].choices(context.choices[name]) for name in tasks}
        count = context.ops.shape[0]
        ops = self.encoder(context.ops)

        def refine(before: tuple[Array, Logits], _: None) -> tuple[tuple[Array, Logits], None]:
            return self._once(ops + before[0], context, choices), None

        nothing = {name: jnp.zeros((count, len(choices[name][1])), jnp.float32) for name in tasks}
        start = (jnp.zeros((count, self.width), jnp.float32), nothing)
        found = _steps(refine, start, None, self.passes)[0][1]
        return {name: jnp.where(context.mask[:, None], found[name], 0.0) for name in tasks}

    def _once(
        self, x: Float[Array, "N H"], context: GoContext, choices: _Choices
    ) -> tuple[Float[Array, "N H"], Logits]:
        """One pass: what the next one sees of the decisions, and their logits."""
        embedded = self.embed(jax.nn.relu(x), context)
        summary = masked_mean(embedded, context.mask)
        gates = {
            **_each_gate(self.trunk, summary),
            "shared": self.shared.gates(summary),
            **{name: gates_of(self.heads[name].gate, summary, self.width) for name in choices},
        }
        count, size = x.shape[0], min(self.segment, x.shape[0])
        segments = -(-count // size)
        room = segments * size - count
        cut = jnp.pad(embedded, ((0, room), (0, 0))).reshape(segments, size, self.width)
        mask = jnp.pad(context.mask, (0, room)).reshape(segments, size)
        past = self.shared.no_past(size, self.width)
        kept = _repeated(past, self.layers), _repeated(past, len(choices))

        def step(kept: Any, segment: tuple[Array, Array]) -> tuple[Any, Any]:
            return self._segment(*segment, kept, gates, choices)

        # Of many segments only the inputs are kept for the gradient.
        _, rows = _steps(
            step if segments == 1 else jax.checkpoint(step), kept, (cut, mask), segments
        )
        seen, logits = jax.tree.map(lambda r: r.reshape(-1, r.shape[-1])[:count], rows)
        return seen, logits

    def embed(self, x: Float[Array, "N H"], context: GoContext) -> Float[Array, "N H"]:
        """GraphSAGE's rounds."""
        if self.sage is None:
            return x

        def layer(x: Array, sage: GraphSage) -> tuple[Array, None]:
            return sage(x, context.messages), None

        return _steps(jax.checkpoint(layer), x, self.sage, self.rounds)[0]

    def _segment(
        self,
        x: Float[Array, "S H"],
        mask: Bool[Array, " S"],
        kept: tuple[Past, Past],
        gates: Mapping[str, Array],
        choices: _Choices,
    ) -> tuple[tuple[Past, Past], tuple[Float[Array, "S H"], Logits]]:
        """All layers and tasks on one segment."""

        def layer(x: Array, part: tuple[SegmentLayer, Past, Array]) -> tuple[Array, Past]:
            module, past, gate = part
            return module(x, mask, past, gate)

        if self.trunk is not None:
            x, first = _steps(layer, x, (self.trunk, kept[0], gates["trunk"]), self.layers)
        else:
            first = kept[0]
        logits, pasts, everything = {}, [], jnp.zeros_like(x)
        state = x
        for index, name in enumerate(choices):
            head = self.heads[name]
            past = jax.tree.map(lambda p, index=index: p[index], kept[1])
            given = (state if self.joint else x) + head.task
            result, past = self.shared(given, mask, past, gates["shared"])
            logits[name] = head.logits(standardised(result) * gates[name], choices[name])
            seen = head.seen(logits[name], choices[name])
            everything = everything + seen
            state = result + seen
            pasts.append(past)
        second = jax.tree.map(lambda *parts: jnp.stack(parts), *pasts) if pasts else kept[1]
        return (first, second), (everything, logits)

    def config(self) -> dict[str, Any]:
        return {
            "tasks": list(self.tasks),
            **{name: getattr(self, name) for name in NETWORK_OPTIONS},
        }

    @classmethod
    def from_config(cls, config: Mapping[str, Any], key: PRNGKeyArray) -> GoPolicy:
        options = {name: config[name] for name in NETWORK_OPTIONS}
        return cls(tuple(str(name) for name in config["tasks"]), **options, key=key)


def tasks_of(problem: AbstractProblem) -> tuple[str, ...]:
    """The names of a problem's decisions in the order in which GO takes them.

    Raises:
        SearchError: for a problem that leaves nothing to decide.
    """
    _check_heads(problem)
    names = tuple(problem.heads)
    return (*(n for n in TASKS if n in names), *(n for n in names if n not in TASKS))


def _check_heads(problem: AbstractProblem) -> None:
    if not problem.heads:
        raise SearchError("go: there is nothing to decide, the problem decides nothing")


def masked_mean(x: Float[Array, "N H"], mask: Bool[Array, " N"]) -> Float[Array, " H"]:
    """The mean over real ops."""
    count = jnp.maximum(jnp.sum(mask), 1).astype(jnp.float32)
    return jnp.sum(jnp.where(mask[:, None], x, 0.0), 0) / count


def _steps(function: Any, carry: Any, inputs: Any, length: int) -> tuple[Any, Any]:
    """`lax.scan`, but for one step no loop, which compiles and runs for longer."""
    if length > 1:
        return jax.lax.scan(function, carry, inputs, length=length)
    carry, output = function(carry, jax.tree.map(lambda x: x[0], inputs))
    return carry, jax.tree.map(lambda x: x[None], output)


def _stacked(modules: list[Any]) -> Any:
    """Modules of one shape as one with a leading axis; of none, None."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *modules) if modules else None


def _each_gate(trunk: SegmentLayer | None, summary: Float[Array, " H"]) -> dict[str, Array]:
    if trunk is None:
        return {}
    return {"trunk": jax.vmap(lambda layer: layer.gates(summary))(trunk)}


def _repeated(past: Past, count: int) -> Past:
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (count, *x.shape)), past)


def _check(
    tasks: Sequence[str],
    width: int,
    rounds: int,
    layers: int,
    attention_heads: int,
    segment: int,
    passes: int,
    real_levels: int,
) -> None:
    if isinstance(tasks, str) or not tasks or len(set(tasks)) != len(tasks):
        raise SearchError(f"tasks must be different names of decisions, got {tasks!r}")
    least = (
        ("width", width, 1),
        ("rounds", rounds, 0),
        ("layers", layers, 0),
        ("attention_heads", attention_heads, 1),
        ("segment", segment, 1),
        ("passes", passes, 1),
        ("real_levels", real_levels, 2),
    )
    for name, number, low in least:
        if not isinstance(number, int) or isinstance(number, bool) or number < low:
            raise SearchError(f"{name} must be a whole number of {low} or more, got {number!r}")
    if width % attention_heads:
        raise SearchError(
            f"width must be a multiple of attention_heads ({attention_heads}), got {width}"
        )
