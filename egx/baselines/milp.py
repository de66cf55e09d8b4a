"""Memory placement as a mixed-integer program.

One binary a choice: x[v, l] says that variable v (the weights of an op, or its outputs) lies on
level l. Three things make the program tight:

- A step costs max(compute, traffic), and the traffic of an op depends on a handful of variables.
  The convex hull of each such function is written out: one column z a combination of levels, with
  the x as its marginals (the local polytope of graphical models; on a chain of ops it is exact up
  to the capacities). Ops that read too many producers get a plain epigraph row.
- Capacities are stated at maximal live sets only, each row divided by its capacity.
- The prefetch recurrences need no big-M. With free[l, j] the time when the channel of level l is
  done with op j, `free[l, j] >= max(free[l, j-1], start[j-k]) + seconds[l] x[j, l]` and
  `start[j] >= free[l, j]` may be asked of every level, used or not: for a level that op j does
  not use they only repeat what other rows imply, because starts never decrease. One more row an
  op is what makes the relaxation tight: an op waits for its load and for the bodies of the k ops
  before it, whichever takes longer, and that maximum is taken level by level.

Seconds are divided by `scale_s`, so that tolerances of solvers are relative to the latency.
"""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import scipy.sparse as sp

from egx.baselines.instance import Instance, maximal_steps

HULL_COMBINATIONS = 256
SHARED_RESIDENTS = 200_000
ROUNDING = 1e-12
SCALED_LATENCY = 1000.0

TIME, LOGIC = -1, 0

Variable = tuple[str, int]  # ("weights" or "activations", op)
Terms = list[tuple[int, float]]  # (column, coefficient)


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """Scaled seconds of one op's body: max(compute, sum of what its variables' levels cost).

    As columns: `constant` plus `terms`. Hull columns stand one for each of `combinations`.
    """

    compute: float
    variables: tuple[Variable, ...]
    seconds: tuple[np.ndarray, ...]  # [M] for each variable
    constant: float
    terms: Terms
    hull: np.ndarray
    combinations: np.ndarray  # [C, variables]
    excess: int  # epigraph column, -1 if there is none


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """min objective @ v + constant over row_lower <= rows @ v <= row_upper, lower <= v <= upper.

    All bounds of columns are finite; columns with `integral` are binaries.
    """

    instance: Instance
    scale_s: float
    objective: np.ndarray
    constant: float
    rows: sp.csr_matrix
    row_lower: np.ndarray
    row_upper: np.ndarray
    row_kind: np.ndarray  # TIME, LOGIC, or the capacity in units by which the row was divided
    lower: np.ndarray
    upper: np.ndarray
    integral: np.ndarray
    choice: dict[Variable, np.ndarray]  # columns [M]
    steps: list[Step]
    residents: dict[int, int]  # level -> column: its share taken by weights
    start: np.ndarray  # prefetch: columns [N + 1], the last is the latency
    free: np.ndarray  # prefetch: columns [M, ops with weights]

    def seconds(self, value: float) -> float:
        """A value of the objective, without its constant, as a latency in seconds."""
        return (value + self.constant) * self.scale_s

    def scaled(self, seconds: float) -> float:
        """The inverse of `seconds`."""
        return seconds / self.scale_s - self.constant

    def decode(self, columns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The levels (weights, activations) [N] nearest to a solution; not always a valid map."""
        n = self.instance.num_ops
        levels = {"weights": np.zeros(n, np.int64), "activations": np.zeros(n, np.int64)}
        for (kind, op), indices in self.choice.items():
            levels[kind][op] = int(np.argmax(columns[indices]))
        return levels["weights"], levels["activations"]

    def lift(self, weights: np.ndarray, activations: np.ndarray) -> np.ndarray:
        """The cheapest solution that stands for a map."""
        levels = {"weights": weights, "activations": activations}
        columns = np.zeros(len(self.objective))
        for (kind, op), indices in self.choice.items():
            columns[indices[levels[kind][op]]] = 1.0
        for level, column in self.residents.items():
            held = int(self.instance.weight_units[weights == level].sum())
            columns[column] = held / int(self.instance.capacity[level])
        for step in self.steps:
            picked = np.array([levels[kind][op] for kind, op in step.variables])
            if step.hull.size:
                columns[step.hull[np.all(step.combinations == picked, axis=1)]] = 1.0
            if step.excess >= 0:
                total = sum(s[m] for s, m in zip(step.seconds, picked, strict=True))
                columns[step.excess] = max(0.0, total - step.compute)
        if self.start.size:
            self._lift_clocks(columns, weights)
        return columns

    def _lift_clocks(self, columns: np.ndarray, weights: np.ndarray) -> None:
        instance = self.instance
        channel = np.zeros(instance.num_levels)
        clock, j = 0.0, 0
        for op in range(instance.num_ops):
            if instance.weight_units[op]:
                before = op - instance.prefetch
                channel = np.maximum(channel, columns[self.start[before]] if before >= 0 else 0.0)
                level = weights[op]
                channel[level] += instance.weight_units[op] * instance.read_s[level] / self.scale_s
                columns[self.free[:, j]] = channel
                clock = max(clock, float(channel.max()))
                j += 1
            columns[self.start[op]] = clock
            step = self.steps[op]
            clock += step.constant + sum(columns[c] * value for c, value in step.terms)
        columns[self.start[instance.num_ops]] = clock


class _Builder:
    """Columns and rows as they are added."""

    def __init__(self) -> None:
        self.upper: list[float] = []
        self.integral: list[bool] = []
        self.entries: list[tuple[int, int, float]] = []
        self.row_lower: list[float] = []
        self.row_upper: list[float] = []
        self.row_kind: list[int] = []

    def columns(self, count: int, *, upper: float, integral: bool = False) -> np.ndarray:
        first = len(self.upper)
        self.upper.extend([upper] * count)
        self.integral.extend([integral] * count)
        return np.arange(first, first + count)

    def row(self, terms: Terms, lower: float, upper: float, kind: int) -> None:
        index = len(self.row_lower)
        self.entries.extend((index, column, value) for column, value in terms)
        self.row_lower.append(lower)
        self.row_upper.append(upper)
        self.row_kind.append(kind)

    def matrix(self) -> sp.csr_matrix:
        shape = (len(self.row_lower), len(self.upper))
        if not self.entries:
            return sp.csr_matrix(shape)
        i, j, v = zip(*self.entries, strict=True)
        return sp.csr_matrix((v, (i, j)), shape=shape)


def build_program(
    instance: Instance, *, scale_s: float, hull_combinations: int | None = None
) -> Program:
    """The program of `instance`; ops with more combinations than allowed get epigraph rows.

    `scale_s` should make a good plan's latency about `SCALED_LATENCY`.
    """
    n, levels = instance.num_ops, instance.num_levels
    if hull_combinations is None:
        hull_combinations = HULL_COMBINATIONS
    builder = _Builder()

    choice: dict[Variable, np.ndarray] = {}
    for kind, units in (
        ("weights", instance.weight_units),
        ("activations", instance.output_units),
    ):
        for op in np.flatnonzero(units).tolist():
            choice[kind, op] = builder.columns(levels, upper=1.0, integral=True)
    residents = _capacities(builder, instance, choice)
    for indices in choice.values():
        builder.row([(c, 1.0) for c in indices.tolist()], 1.0, 1.0, LOGIC)

    steps = [_step(builder, instance, choice, op, scale_s, hull_combinations) for op in range(n)]
    launch = instance.launch_s / scale_s
    start = free = np.zeros(0, np.int64)
    objective_terms: Terms = []
    constant = 0.0
    if instance.prefetch == 0:
        for step in steps:
            objective_terms += step.terms
            constant += step.constant + launch
    else:
        steps = [dataclasses.replace(s, constant=s.constant + launch) for s in steps]
        start, free = _clocks(builder, instance, choice, steps, scale_s)
        objective_terms = [(int(start[-1]), 1.0)]

    objective = np.zeros(len(builder.upper))
    for column, value in objective_terms:
        objective[column] += value
    return Program(
        instance=instance,
        scale_s=scale_s,
        objective=objective,
        constant=constant,
        rows=builder.matrix(),
        row_lower=np.asarray(builder.row_lower),
        row_upper=np.asarray(builder.row_upper),
        row_kind=np.asarray(builder.row_kind, np.int64),
        lower=np.zeros(len(builder.upper)),
        upper=np.asarray(builder.upper),
        integral=np.asarray(builder.integral, bool),
        choice=choice,
        steps=steps,
        residents=residents,
        start=start,
        free=free,
    )


def _capacities(
    builder: _Builder, instance: Instance, choice: dict[Variable, np.ndarray]
) -> dict[int, int]:
    """Forbids levels too small for one item, and bounds every maximal live set.

    Returns the columns that stand for all weights of a level, where there are any.
    """
    residents: dict[int, int] = {}
    for level in range(1, instance.num_levels):
        capacity = int(instance.capacity[level])
        allowed: dict[str, list[int]] = {"weights": [], "activations": []}
        for (kind, op), indices in choice.items():
            units = instance.weight_units if kind == "weights" else instance.output_units
            if units[op] > capacity:
                builder.upper[indices[level]] = 0.0
            else:
                allowed[kind].append(op)
        outputs = np.zeros(instance.num_ops, bool)
        outputs[allowed["activations"]] = True
        sets = _live_sets(instance, outputs)
        weights = {
            int(choice["weights", op][level]): int(instance.weight_units[op])
            for op in allowed["weights"]
        }
        live = [
            {int(choice["activations", op][level]): units for op, units in held.items()}
            for held in sets
        ]
        total = sum(weights.values())
        binding = [held for held in live if total + sum(held.values()) > capacity]
        if len(weights) * len(binding) > SHARED_RESIDENTS:
            # One column stands for all weights of the level, so that rows stay short.
            resident = int(builder.columns(1, upper=1.0)[0])
            row = [(column, units / capacity) for column, units in weights.items()]
            builder.row([*row, (resident, -1.0)], -np.inf, 0.0, capacity)
            weights = {resident: capacity}
            residents[level] = resident
        for held in binding:
            items = [*weights.items(), *held.items()]
            builder.row([(c, units / capacity) for c, units in items], -np.inf, 1.0, capacity)
    return residents


def _live_sets(instance: Instance, outputs: np.ndarray) -> list[dict[int, int]]:
    """Units by producer in each maximal live set, of the ops in `outputs` [N]."""
    counts = outputs[instance.tensor_producer] & (instance.tensor_units > 0)
    steps = set(maximal_steps(instance, outputs).tolist())
    dying: dict[int, list[int]] = {}
    for tensor in np.flatnonzero(counts).tolist():
        dying.setdefault(int(instance.tensor_last[tensor]), []).append(tensor)
    born = np.zeros(instance.num_ops, np.int64)
    np.add.at(born, instance.tensor_producer[counts], instance.tensor_units[counts])
    live: dict[int, int] = {}
    sets = []
    for step in range(instance.num_ops):
        if born[step]:
            live[step] = int(born[step])
        if step in steps:
            sets.append(dict(live))
        for tensor in dying.get(step, ()):
            op = int(instance.tensor_producer[tensor])
            live[op] -= int(instance.tensor_units[tensor])
            if not live[op]:
                del live[op]
    return sets


def _step(
    builder: _Builder,
    instance: Instance,
    choice: dict[Variable, np.ndarray],
    op: int,
    scale_s: float,
    hull_combinations: int,
) -> Step:
    """The body of one op in the cheapest form that is exact on 0/1 choices."""
    traffic: dict[Variable, np.ndarray] = {}
    if instance.output_units[op]:
        traffic["activations", op] = instance.output_units[op] * instance.write_s / scale_s
    for source, units in instance.reads[op].items():
        traffic["activations", source] = units * instance.read_s / scale_s
    if instance.prefetch == 0 and instance.weight_units[op]:
        traffic["weights", op] = instance.weight_units[op] * instance.read_s / scale_s
    variables, seconds = tuple(traffic), tuple(traffic.values())
    compute = float(instance.compute_s[op] / scale_s)
    columns = [choice[v] for v in variables]
    levels = [[m for m, c in enumerate(cs.tolist()) if builder.upper[c]] for cs in columns]
    least = sum(float(s[m].min()) for s, m in zip(seconds, levels, strict=True))
    most = sum(float(s[m].max()) for s, m in zip(seconds, levels, strict=True))

    constant, terms, excess = compute, [], -1
    hull, combinations = np.zeros(0, np.int64), np.zeros((0, len(variables)), np.int64)
    if most <= compute:
        pass
    elif least >= compute:
        constant = 0.0
        terms = [
            (int(c), float(value))
            for cs, s in zip(columns, seconds, strict=True)
            for c, value in zip(cs, s, strict=True)
        ]
    elif np.prod([float(len(m)) for m in levels]) <= hull_combinations:
        combinations = np.asarray(list(itertools.product(*levels)), np.int64)
        total = sum(
            (s[combinations[:, k]] for k, s in enumerate(seconds)), np.zeros(len(combinations))
        )
        hull = builder.columns(len(combinations), upper=1.0)
        over = np.maximum(total - compute, 0.0)
        terms = [(int(c), float(v)) for c, v in zip(hull, over, strict=True) if v > 0]
        for k, cs in enumerate(columns):
            for m in levels[k]:
                marginal = [(int(c), 1.0) for c in hull[combinations[:, k] == m]]
                builder.row([*marginal, (int(cs[m]), -1.0)], 0.0, 0.0, LOGIC)
    else:
        excess = int(builder.columns(1, upper=most - compute)[0])
        terms = [(excess, 1.0)]
        linear = [
            (int(c), -float(value))
            for cs, s in zip(columns, seconds, strict=True)
            for c, value in zip(cs, s, strict=True)
        ]
        builder.row([(excess, 1.0), *linear], -compute, np.inf, TIME)
    return Step(compute, variables, seconds, constant, terms, hull, combinations, excess)


def _clocks(
    builder: _Builder,
    instance: Instance,
    choice: dict[Variable, np.ndarray],
    steps: list[Step],
    scale_s: float,
) -> tuple[np.ndarray, np.ndarray]:
    """Start times and the clocks of the weight channels."""
    n, levels = instance.num_ops, instance.num_levels
    loads = instance.weight_units[:, None] * instance.read_s[None, :] / scale_s
    # No map takes longer than every body and every load, each at its slowest, one by one.
    launch = instance.launch_s / scale_s
    slowest = [launch + max(s.compute, sum(float(v.max()) for v in s.seconds)) for s in steps]
    horizon = 1.0 + float(np.sum(slowest) + loads.max(axis=1).sum())
    streams = np.flatnonzero(instance.weight_units)
    start = builder.columns(n + 1, upper=horizon)
    free = builder.columns(levels * len(streams), upper=horizon).reshape(levels, len(streams))
    for op, step in enumerate(steps):
        body = [(c, -value) for c, value in step.terms]
        after, before = int(start[op + 1]), int(start[op])
        builder.row([(after, 1.0), (before, -1.0), *body], step.constant, np.inf, TIME)
    # Bodies at their best: how much later an op starts than the one `prefetch` before it at least.
    best = [launch + max(s.compute, sum(float(v.min()) for v in s.seconds)) for s in steps]
    elapsed = np.concatenate([[0.0], np.cumsum(best)])
    for op in streams.tolist():
        before = max(op - instance.prefetch, 0)
        window = (elapsed[op] - elapsed[before]) * (1.0 - ROUNDING)
        wait = [
            (int(choice["weights", op][m]), -max(float(loads[op, m]), window))
            for m in range(levels)
        ]
        since = [(int(start[before]), -1.0)] if op >= instance.prefetch else []
        builder.row([(int(start[op]), 1.0), *since, *wait], 0.0, np.inf, TIME)
    for j, op in enumerate(streams.tolist()):
        for m in range(levels):
            here = int(free[m, j])
            load = (int(choice["weights", op][m]), -float(loads[op, m]))
            builder.row([(int(start[op]), 1.0), (here, -1.0)], 0.0, np.inf, TIME)
            earlier = [int(free[m, j - 1])] if j else []
            if op >= instance.prefetch:
                earlier.append(int(start[op - instance.prefetch]))
            for column in earlier:
                builder.row([(here, 1.0), (column, -1.0), load], 0.0, np.inf, TIME)
            if not earlier:
                builder.row([(here, 1.0), load], 0.0, np.inf, TIME)
    return start, free
