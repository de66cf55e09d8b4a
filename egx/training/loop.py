"""The host loop: it spends the budget in chunks, and shows, records and saves between them."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Sequence
from typing import Any, Literal

import equinox as eqx
import jax
import numpy as np

from egx.errors import SearchError
from egx.problems.base import AbstractProblem, expect_problem
from egx.search.base import AbstractSearch, State
from egx.training.checkpoint import RunCheckpoints
from egx.training.devices import make_mesh
from egx.training.generation import CHUNK_ROWS, WORST_COST, Row
from egx.training.identity import Plain, provenance, search_identity
from egx.training.progress import Progress, ProgressCallback, StopFlag, listener
from egx.training.records import Records, SinkLike, open_records
from egx.training.result import History, Result
from egx.training.steppers import Evaluator, Measured, RunState, Simulated, Stepper

CHUNK_SECONDS = 0.5
MAX_BUDGET = 2**30

Reason = Literal["ctrl-c", "time limit"]


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a run was asked to do, checked."""

    search: AbstractSearch
    problem: AbstractProblem
    name: str
    budget: int
    seeds: tuple[int, ...]
    time_limit_s: float | None

    @property
    def generations(self) -> int:
        return -(-self.budget // self.search.batch_size)


def whole_number(name: str, value: Any, low: int, high: int) -> int:
    """`value` as an int, or a SearchError that names it."""
    if not isinstance(value, int | np.integer) or isinstance(value, bool):
        raise SearchError(f"{name} must be a whole number, got {value!r}")
    if not low <= value <= high:
        raise SearchError(f"{name} must be {low} to {high}, got {value}")
    return int(value)


def not_negative_s(name: str, value: Any) -> float:
    """`value` as seconds, or a SearchError that names it."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
        raise SearchError(f"{name} must be a number of seconds, 0 or more, got {value!r}")
    return float(value)


def check_seeds(seeds: Sequence[int]) -> tuple[int, ...]:
    """The seeds as ints: at least one, none twice, each 0 to 2^32 - 1."""
    checked = tuple(whole_number("seed", seed, 0, 2**32 - 1) for seed in seeds)
    if not checked:
        raise SearchError("seeds must name at least one seed")
    twice = sorted({seed for seed in checked if checked.count(seed) > 1})
    if twice:
        raise SearchError(f"seeds must differ, got {twice[0]} more than once")
    return checked


def run(
    search: AbstractSearch, problem: AbstractProblem, *, seeds: Sequence[int], **arguments: Any
) -> list[Result]:
    """Spends exactly the budget for each seed, all seeds in one program; a result per seed.

    The arguments are those of `run_session`.
    """
    return run_session(search, problem, seeds=seeds, **arguments)[0]


def run_one(
    search: AbstractSearch, problem: AbstractProblem, *, seed: int = 0, **arguments: Any
) -> tuple[Result, State]:
    """One seed, and the searcher's state at the end."""
    results, states = run_session(search, problem, seeds=[seed], **arguments)
    return results[0], jax.tree.map(lambda x: x[0] if eqx.is_array(x) else x, states)


def run_session(
    search: AbstractSearch,
    problem: AbstractProblem,
    *,
    budget: int,
    seeds: Sequence[int],
    name: str | None = None,
    evaluator: Evaluator | None = None,
    repeats: int = 1,
    time_limit_s: float | None = None,
    progress: bool | ProgressCallback = False,
    records: SinkLike | Sequence[SinkLike] = (),
    checkpoint_dir: str | os.PathLike[str] | None = None,
    checkpoint_every_s: float = 30.0,
    resume: bool = False,
    devices: int | Sequence[jax.Device] | None = None,
) -> tuple[list[Result], State]:
    """The results, and the searcher's states with a leading axis for the seeds.

    `egx.optimize` documents the arguments.

    Raises:
        SearchError: for an impossible argument, or a searcher that cannot run on the problem.
        CheckpointError: for a checkpoint that cannot be written, or is of another run.
    """
    plan = Plan(
        search,
        problem,
        name or type(search).__name__,
        whole_number("budget", budget, 1, MAX_BUDGET),
        check_seeds(seeds),
        _check_time_limit(time_limit_s),
    )
    expect_problem(problem)
    search.check(problem)
    stepper = _stepper(plan, evaluator, repeats, devices)
    checkpoints = RunCheckpoints.open(
        checkpoint_dir,
        resume=resume,
        every_s=not_negative_s("checkpoint_every_s", checkpoint_every_s),
        search=search,
        problem=problem,
        seeds=plan.seeds,
        measured=evaluator is not None,
    )
    with checkpoints, open_records(records) as sink, listener(progress) as show:
        return _Session(plan, stepper, checkpoints, sink, show).run()


def _stepper(
    plan: Plan,
    evaluator: Evaluator | None,
    repeats: int,
    devices: int | Sequence[jax.Device] | None,
) -> Stepper:
    repeats = whole_number("repeats", repeats, 1, 10**6)
    if evaluator is None:
        if repeats > 1:
            raise SearchError("repeats needs an evaluator: the simulator gives the same cost again")
        mesh = None if devices is None else make_mesh(devices)
        return Simulated(plan.search, plan.problem, plan.seeds, mesh)
    if not callable(evaluator):
        raise SearchError(f"evaluator must be callable, got {evaluator!r}")
    if devices is not None:
        raise SearchError("devices spread the simulator; with an evaluator there is none to spread")
    return Measured(plan.search, plan.problem, plan.seeds, evaluator, repeats)


def _check_time_limit(time_limit_s: float | None) -> float | None:
    if time_limit_s is None:
        return None
    if isinstance(time_limit_s, bool) or not isinstance(time_limit_s, int | float):
        raise SearchError(f"time_limit_s must be a number of seconds, got {time_limit_s!r}")
    if not time_limit_s > 0:
        raise SearchError(f"time_limit_s must be greater than 0, got {time_limit_s}")
    return float(time_limit_s)


class _Session:
    """One call of `run`: from compiling, or a checkpoint, to the results."""

    def __init__(
        self,
        plan: Plan,
        stepper: Stepper,
        checkpoints: RunCheckpoints,
        records: Records,
        show: ProgressCallback,
    ):
        self.plan, self.stepper, self.checkpoints = plan, stepper, checkpoints
        self.records, self.show = records, show
        self.earlier_s = 0.0
        self.resumed_at = 0
        self.compile_s = 0.0
        self.began = time.perf_counter()

    def run(self) -> tuple[list[Result], State]:
        plan = self.plan
        saved = self.checkpoints.metadata(plan.budget)
        if saved is not None:
            self.stepper.adopt(saved["reference_cost"])
        state = self.stepper.begin()
        if saved is not None:
            state = self.checkpoints.restore(state)
            self.earlier_s = saved["seconds"]
            self.resumed_at = min(state.generation * plan.search.batch_size, plan.budget)
        self.compile_s = time.perf_counter() - self.began
        self.records.begin(self._header(), state.generation)
        try:
            state, reason = self._advance(state)
        finally:
            self.records.close()
        return self._results(state, reason), state.states

    def _advance(self, state: RunState) -> tuple[RunState, Reason | None]:
        plan, size = self.plan, 1
        limit = plan.time_limit_s
        deadline = None if limit is None else self.began + limit
        whole, reason = state, None
        # A measurement may take minutes, so there Ctrl-C must not wait for the chunk to end.
        with StopFlag(wanted=not isinstance(self.stepper, Measured)) as stop:
            try:
                while state.generation < plan.generations and reason is None:
                    before, done = time.perf_counter(), state.generation
                    count = min(size, plan.generations - state.generation, CHUNK_ROWS)
                    state = self.stepper.advance(state, count, plan.budget, deadline)
                    whole = state if state.whole else whole
                    now = time.perf_counter()
                    each = max((now - before) / (state.generation - done), 1e-9)
                    size = max(1, min(8 * count, int(CHUNK_SECONDS / each)))
                    reason = self._stop_reason(state, stop, deadline)
                    if deadline is not None:
                        size = max(1, min(size, int((deadline - now) / each)))
                    self._report(state)
                    self.checkpoints.save(whole, self._metadata(), force=False)
            except KeyboardInterrupt:
                reason = "ctrl-c" if self._unfinished(state) else None
        self.checkpoints.save(whole, self._metadata(), force=True)
        return state, reason

    def _unfinished(self, state: RunState) -> bool:
        return not state.whole or state.generation < self.plan.generations

    def _stop_reason(
        self, state: RunState, stop: StopFlag, deadline: float | None
    ) -> Reason | None:
        if not self._unfinished(state):
            return None
        if deadline is not None and time.perf_counter() >= deadline:
            return "time limit"
        return "ctrl-c" if stop.raised or not state.whole else None

    def _seconds(self) -> float:
        return time.perf_counter() - self.began - self.compile_s

    def _report(self, state: RunState) -> None:
        rows = state.rows[-1]
        self.records.write(rows, self.plan.seeds, state.generation, self._seconds())
        cost, feasible = np.asarray(rows.best_cost)[-1], np.asarray(rows.best_feasible)[-1]
        seconds, done = self._seconds(), int(np.asarray(rows.evaluations)[-1].max())
        here = len(self.plan.seeds) * (done - self.resumed_at)
        self.show(
            Progress(
                algorithm=self.plan.name,
                evaluations=done,
                budget=self.plan.budget,
                best_cost=float(np.where(feasible == feasible.any(), cost, np.inf).min()),
                feasible=bool(feasible.any()),
                reference_cost=float(self.stepper.problem.reference_cost),
                failed_measurements=int(state.failed.sum()),
                evaluations_per_s=here / max(seconds, 1e-9),
                seconds=seconds,
                compile_seconds=self.compile_s,
            )
        )

    def _provenance(self) -> Plain:
        return {
            **provenance(self.plan.problem),
            "measured": isinstance(self.stepper, Measured),
            "seeds_together": len(self.plan.seeds),
        }

    def _header(self) -> Plain:
        plan = self.plan
        return {
            "algorithm": plan.name,
            "config": search_identity(plan.search),
            "budget": plan.budget,
            "seeds": list(plan.seeds),
            "reference_cost": float(self.stepper.problem.reference_cost),
            **self._provenance(),
        }

    def _metadata(self) -> Plain:
        return {
            "budget": self.plan.budget,
            "seconds": self.earlier_s + self._seconds(),
            "reference_cost": float(self.stepper.problem.reference_cost),
        }

    def _results(self, state: RunState, reason: Reason | None) -> list[Result]:
        plan, problem = self.plan, self.stepper.problem
        rows: Row = jax.tree.map(lambda *parts: np.concatenate(parts), *state.rows)
        best = jax.tree.map(np.asarray, state.states.best)
        origin = self._provenance()
        if isinstance(self.stepper, Measured) and self.stepper.complaint:
            origin["last_failure"] = self.stepper.complaint
        reference = {name: np.asarray(value) for name, value in problem.reference.items()}
        reference_cost = float(problem.reference_cost)
        results = []
        for s, seed in enumerate(plan.seeds):
            decisions = {name: value[s] for name, value in best.decisions.items()}
            cost, feasible = float(best.cost[s]), bool(best.feasible[s])
            if cost >= WORST_COST:
                # Nothing was evaluated: the reference stands in, judged by the simulator.
                decisions, cost = reference, reference_cost
                feasible = bool(eqx.filter_jit(problem.evaluate)(problem.reference).feasible)
            history = History(
                evaluations=np.asarray(rows.evaluations[:, s], np.int64),
                best_cost=np.asarray(rows.best_cost[:, s]),
                best_feasible=np.asarray(rows.best_feasible[:, s]),
                metrics={name: np.asarray(v[:, s]) for name, v in rows.metrics.items()},
            )
            result = Result(
                decisions=decisions,
                cost=cost,
                feasible=feasible,
                found_at=int(best.found_at[s]),
                reference=reference,
                reference_cost=reference_cost,
                bound=None,
                bound_status=None,
                algorithm=plan.name,
                config=search_identity(plan.search),
                budget=plan.budget,
                evaluations=int(history.evaluations[-1]) if len(history) else 0,
                failed_measurements=int(state.failed[s]),
                seed=seed,
                seconds=self.earlier_s + self._seconds(),
                compile_seconds=self.compile_s,
                history=history,
                interrupted=reason,
                provenance=origin,
            )
            results.append(result)
        return results
