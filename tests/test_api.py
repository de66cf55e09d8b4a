"""The public functions: load, optimize, compare, train, and what they refuse."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from runs import Climber, Toy, chain, machine, same_search, small_problem

import egx
from egx.errors import CheckpointError, FormatError, GraphError, ProblemError, SearchError
from egx.problems.execution import Execution
from egx.problems.memory_placement import MemoryPlacement
from egx.search.random import RandomSearch
from egx.training.trainer import mean_reward


def memory(**more):
    return MemoryPlacement(chain(5), machine(), **more)


# load


def test_load_takes_zoo_names_with_their_options():
    assert egx.load("resnet50").name == "resnet50"
    small = egx.load("bert", layers=2)
    assert small.graph.num_ops < egx.load("bert").graph.num_ops
    # What files need is accepted as long as it asks for nothing.
    assert (
        egx.load("resnet50", granularity="layer", dims=None).digest == egx.load("resnet50").digest
    )


def test_load_names_what_it_knows():
    with pytest.raises(GraphError, match=r"'resnet5' is neither .*did you mean resnet50"):
        egx.load("resnet5")
    with pytest.raises(GraphError, match="the zoo has amoebanet, bert, "):
        egx.load("no such thing")
    with pytest.raises(GraphError, match="takes no option 'granularity'"):
        egx.load("resnet50", granularity="op")


def test_load_reads_files_by_their_ending(tmp_path):
    from egx.formats.native import save_json

    model = chain(4)
    save_json(model, tmp_path / "chain.json")
    assert egx.load(tmp_path / "chain.json").digest == model.digest
    (tmp_path / "chain.txt").write_text("x")
    with pytest.raises(FormatError, match=r"chain\.txt: expected a file that ends in"):
        egx.load(tmp_path / "chain.txt")
    with pytest.raises(FormatError, match=r"absent\.onnx"):
        egx.load(tmp_path / "absent.onnx")
    with pytest.raises(FormatError, match="a JSON file takes no option 'dims'"):
        egx.load(tmp_path / "chain.json", dims={"n": 1})
    (tmp_path / "noise.onnx").write_bytes(np.random.default_rng(0).bytes(999))
    with pytest.raises(FormatError, match=r"noise\.onnx"):
        egx.load(tmp_path / "noise.onnx")


# optimize


def test_optimize_by_name_and_by_searcher_agree():
    by_name = egx.optimize(memory(), "random", budget=40, options={"batch": 8})
    by_search = egx.optimize(memory(), RandomSearch(batch=8), budget=40)
    same_search(by_name, by_search)
    assert by_name.algorithm == "random"
    assert by_search.algorithm == "RandomSearch"
    assert by_name.config["batch"] == 8


def test_results_carry_the_cheap_bound_unless_measured():
    result = egx.optimize(memory(), "random", budget=40)
    assert result.bound_status == "bound only"
    assert 0 < result.bound <= result.cost
    assert result.gap >= 0
    measured = egx.optimize(memory(), "random", budget=4, evaluator=lambda d: 1e-9)
    assert measured.bound is None
    assert egx.optimize(small_problem(), "random", budget=4).bound is None


def test_a_cheap_bound_that_is_met_is_a_proof():
    """On one device a chain has one peak: all weights, and the largest op's tensors."""
    only = Execution(chain(5), machine(), objective="peak_memory")
    result = egx.optimize(only, "random", budget=4)
    assert (result.bound, result.bound_status) == (result.cost, "proved")


def test_result_decisions_go_back_into_the_problem():
    result = egx.optimize(memory(), "random", budget=40)
    assert float(memory().evaluate(result.decisions).cost) == pytest.approx(result.cost, rel=1e-6)


def test_exact_counts_no_evaluations_and_takes_any_budget():
    for budget in (0, 4000):
        result = egx.optimize(memory(), "exact", budget=budget, time_limit_s=20)
        assert result.evaluations == 0
        assert result.bound_status == "proved"
        assert result.feasible
        assert result.gap == pytest.approx(0.0, abs=1e-5)
    found = egx.optimize(memory(), Climber(), budget=400)
    assert found.cost >= result.bound * (1 - 1e-6)
    solution = egx.exact(memory(), time_limit_s=20)
    assert found.with_bound(solution.bound, solution.status).gap == pytest.approx(
        found.cost / result.bound - 1, rel=1e-4
    )


def test_exact_refuses_what_it_cannot_use():
    with pytest.raises(SearchError, match="exact takes no evaluator"):
        egx.optimize(memory(), "exact", evaluator=lambda d: 1.0)
    with pytest.raises(SearchError, match="exact has no option 'batch'"):
        egx.optimize(memory(), "exact", options={"batch": 3})
    with pytest.raises(SearchError, match="MemoryPlacement and Execution"):
        egx.optimize(small_problem(), "exact")
    with pytest.raises(SearchError, match="no seeds"):
        egx.optimize_seeds(memory(), "exact", seeds=[1])


def test_optimize_names_what_it_does_not_know(unchecked):
    with pytest.raises(SearchError, match=r"no searcher is named 'randon'.*did you mean random"):
        egx.optimize(memory(), "randon")
    with pytest.raises(SearchError, match=r"random has no option 'batches'.*did you mean batch"):
        egx.optimize(memory(), "random", options={"batches": 3})
    with pytest.raises(SearchError, match="give them to Climber itself"):
        egx.optimize(memory(), Climber(), options={"batch": 3})
    graph = memory().graph
    for call in (egx.optimize, lambda g, name: egx.compare(g, [name]), egx.train):
        with pytest.raises(ProblemError, match=r"expected a problem, .* got a Graph"):
            call(graph, "go")


def test_optimize_seeds_gives_a_result_per_seed():
    results = egx.optimize_seeds(small_problem(), Climber(), seeds=[5, 2], budget=20)
    assert [r.seed for r in results] == [5, 2]
    same_search(results[1], egx.optimize(small_problem(), Climber(), budget=20, seed=2))
    with pytest.raises(SearchError, match="got 5 more than once"):
        egx.optimize_seeds(small_problem(), Climber(), seeds=[5, 5], budget=20)


# compare


def test_comparison_sums_up_its_results():
    table = egx.compare(memory(), ["random", "exact"], budget=64, seeds=3)
    assert list(table.results) == ["random", "exact"]
    assert [r.seed for r in table.results["random"]] == [0, 1, 2]
    random, exactly = table.rows
    costs = np.array([r.cost for r in table.results["random"] if r.feasible], np.float64)
    assert random.mean == pytest.approx(costs.mean())
    assert random.best == costs.min()
    assert random.std == pytest.approx(costs.std(ddof=1))
    assert random.feasible_share == len(costs) / 3
    assert table.bound_status == "proved"
    assert table.bound == table.results["exact"][0].bound
    assert all(r.bound == table.bound for group in table.results.values() for r in group)
    assert exactly.gap == pytest.approx(0.0, abs=1e-5)
    assert random.gap == pytest.approx(random.mean / table.bound - 1)
    assert table.best.cost == min(exactly.best, random.best)
    text = str(table)
    for part in ("random", "exact", "native", "proved"):
        assert part in text


def test_near_counts_evaluations_to_within_one_percent():
    table = egx.compare(
        small_problem(), {"short": Climber(), "long": Climber(rate=0.3)}, budget=200, seeds=[1, 2]
    )
    best = min(r.cost for group in table.results.values() for r in group if r.feasible)
    for row, results in zip(table.rows, table.results.values(), strict=True):
        expected = []
        for result in results:
            near = result.history.best_feasible & (result.history.best_cost <= 1.01 * best)
            expected += result.history.evaluations[near][:1].tolist()
        assert row.near_share == len(expected) / 2
        if expected:
            assert row.evaluations_to_near == np.median(expected)
    assert max(row.near_share for row in table.rows) > 0


def test_seeds_alone_and_together_agree():
    together = egx.compare(small_problem(), [Climber()], budget=20, seeds=2)
    alone = egx.compare(small_problem(), [Climber()], budget=20, seeds=2, seeds_together=False)
    for a, b in zip(together.results["Climber"], alone.results["Climber"], strict=True):
        same_search(a, b)
        assert (a.runs_together, b.runs_together) == (2, 1)


def test_comparison_goes_on_where_it_was_stopped(tmp_path):
    algorithms = {"a": Climber(), "evosax:b": Climber(rate=0.3)}
    straight = egx.compare(small_problem(), algorithms, budget=40, seeds=2)

    def press(progress):
        if progress.algorithm == "evosax:b":
            raise KeyboardInterrupt

    arguments = {"budget": 40, "directory": tmp_path}
    cut = egx.compare(small_problem(), algorithms, seeds=1, progress=press, **arguments)
    assert cut.interrupted
    assert list(cut.results) == ["a"]
    assert "interrupted" in str(cut)
    ran = []
    whole = egx.compare(
        small_problem(),
        algorithms,
        seeds=2,
        progress=lambda p: ran.append((p.algorithm, p.evaluations)),
        **arguments,
    )
    assert not whole.interrupted
    assert {name for name, _ in ran} == {"a", "evosax:b"}
    for name in algorithms:
        for a, b in zip(straight.results[name], whole.results[name], strict=True):
            same_search(a, b)
    # Seed 0 of "a" was kept from the first call.
    assert [r.runs_together for r in whole.results["a"]] == [1, 1]
    ran.clear()
    egx.compare(small_problem(), algorithms, seeds=2, progress=lambda p: ran.append(p), **arguments)
    assert ran == []


def test_kept_results_of_another_comparison_are_refused(tmp_path):
    egx.compare(small_problem(), {"a": Climber()}, budget=8, seeds=1, directory=tmp_path)
    for more, message in [
        ({"budget": 12}, "budget: saved 8, now 12"),
        ({"algorithms": {"a": Climber(rate=0.9)}}, "config, rate: saved 0.2, now 0.9"),
        ({"problem": Toy(chain(), limit=3)}, "problem, limit"),
        ({"problem": memory()}, "problem, kind: saved Toy, now MemoryPlacement"),
    ]:
        arguments = {"problem": small_problem(), "algorithms": {"a": Climber()}, "budget": 8}
        with pytest.raises(CheckpointError, match=f"another run: .*{message}"):
            egx.compare(**(arguments | more), seeds=1, directory=tmp_path)


def test_comparison_saves_and_loads(tmp_path):
    table = egx.compare(memory(), ["random", "exact"], budget=32, seeds=2)
    table.save(tmp_path / "c.json")
    loaded = egx.Comparison.load(tmp_path / "c.json")
    assert loaded.rows == table.rows
    assert str(loaded) == str(table)
    data = json.loads((tmp_path / "c.json").read_text())
    assert data["rows"][0]["algorithm"] == "random"
    for change, message in [
        ({"results": {}}, "holds no results"),
        ({"results": {"a": [{}]}}, "a, result 0: damaged"),
        ({"bound_status": "sure"}, "bound_status"),
        ({"budget": None}, "damaged comparison"),
        ({"version": 9}, "version 9"),
    ]:
        (tmp_path / "d.json").write_text(json.dumps(data | change))
        with pytest.raises(FormatError, match=message):
            egx.Comparison.load(tmp_path / "d.json")


def test_impossible_comparisons_are_refused_before_anything_runs():
    def never(progress):
        raise AssertionError("something ran")

    for algorithms, message in [
        ([], "at least one"),
        ("random", "must be a list or a dict"),
        (["random", "random"], "'random' is compared twice"),
        (["random", "randon"], "no searcher is named 'randon'"),
    ]:
        with pytest.raises(SearchError, match=message):
            egx.compare(memory(), algorithms, budget=8, seeds=1, progress=never)
    with pytest.raises(SearchError, match="seeds must be 1"):
        egx.compare(memory(), ["random"], budget=8, seeds=0)
    with pytest.raises(SearchError, match="options for 'local', which is not compared"):
        egx.compare(memory(), ["random"], budget=8, seeds=1, options={"local": {}})


def test_a_comparison_stopped_at_once_raises():
    def press(progress):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        egx.compare(small_problem(), [Climber()], budget=400, seeds=1, progress=press)


# train

# Without messages a network compiles in a fraction of the time.
TINY = {"width": 4, "depth": 1, "attention_heads": 1, "graph_network": False}
TINY |= {"evolution.size": 4, "evolution.elites": 1}


def test_training_returns_a_policy_that_decides_elsewhere(tmp_path):
    problems = [memory(), MemoryPlacement(chain(5, scale=2), machine(40.0))]
    start = egx.train(problems[0], "egrl", budget=6, options=TINY)
    policy = egx.train(problems, "egrl", budget=60, rounds=2, options=TINY, policy=start)
    assert mean_reward(policy, problems) >= mean_reward(start, problems)
    other = MemoryPlacement(chain(8), machine())
    decisions = policy.decide(other)
    assert decisions["weights"].shape == (8,)
    policy.save(tmp_path / "policy")
    again = egx.load_policy(tmp_path / "policy").decide(other)
    for name, value in decisions.items():
        np.testing.assert_array_equal(value, again[name])
    result = egx.optimize(other, "egrl", budget=12, options=TINY, policy=policy)
    assert result.evaluations == 12


def test_training_is_repeatable():
    a, b = (egx.train(memory(), "egrl", budget=12, options=TINY, seed=3) for _ in range(2))
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(x, y)


def test_training_refuses_searchers_without_a_network():
    with pytest.raises(SearchError, match="random trains no policy"):
        egx.train(memory(), "random", budget=8)
    with pytest.raises(SearchError, match="at least one problem"):
        egx.train([], "egrl")


# The package


def test_every_public_name_is_there():
    for name in egx.__all__:
        assert getattr(egx, name) is not None
    assert sorted(egx.__all__) == egx.__all__


def test_import_does_not_start_jax_and_is_quick():
    code = (
        "import time; began = time.perf_counter(); import egx, sys; "
        "from jax._src import xla_bridge; "
        "assert not xla_bridge.backends_are_initialized(); "
        "assert 'matplotlib.pyplot' not in sys.modules; "
        "assert 'ortools' not in sys.modules; "
        "print(time.process_time())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[1],
    )
    # Processor time of this process alone: other work on the machine does not count.
    assert float(done.stdout) < 4.0


def test_optimize_finds_something_good():
    # A sanity check of the whole chain: climbing beats random guessing beats nothing.
    problem = small_problem()
    climbed = egx.optimize(problem, Climber(), budget=1000)
    guessed = egx.optimize(problem, "random", budget=1000)
    assert climbed.cost < guessed.cost < float(problem.reference_cost)
    assert climbed.feasible
    assert jnp.isfinite(climbed.cost)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"options": 3}, "options must be a dict"),
        ({"records": 3}, "records must be paths or sinks"),
        ({"checkpoint_every_s": -1}, "checkpoint_every_s must be a number of seconds, 0 or more"),
    ],
)
def test_arguments_of_another_kind_are_named(given, said):
    with pytest.raises(SearchError, match=said):
        egx.optimize(memory(), "random", budget=8, **given)
