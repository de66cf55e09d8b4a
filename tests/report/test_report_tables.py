import dataclasses
import io

import numpy as np
import pytest
from report_toys import maps, toy_hardware, toy_model, toy_problem
from rich.console import Console

from egx.report.tables import (
    Table,
    comparison_table,
    effort_line,
    hardware_table,
    latency_table,
    level_table,
    model_table,
    standing,
)
from egx.training.result import History, Result


def made_result(**changes) -> Result:
    """A result with round figures."""
    result = Result(
        decisions={},
        cost=2e-4,
        feasible=True,
        found_at=60,
        reference={},
        reference_cost=3e-4,
        bound=None,
        bound_status=None,
        algorithm="local",
        config={},
        budget=100,
        evaluations=100,
        failed_measurements=0,
        seed=3,
        seconds=2.0,
        compile_seconds=1.5,
        history=History(
            evaluations=np.array([20, 60, 100]),
            best_cost=np.array([4e-4, 2e-4, 2e-4], np.float32),
            best_feasible=np.array([False, True, True]),
        ),
        interrupted=None,
        provenance={},
    )
    return dataclasses.replace(result, **changes)


def printed(table: Table, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    console.print(table.to_rich())
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())


LATENCY = latency_table(
    [("native", 3e-4, True), ("first fit", 2.5e-4, True), ("found", 2e-4, True),
     ("wild", 1e-4, False)],
    reference_s=3e-4, bound_s=1.6e-4, bound_status="feasible", best="found",
)  # fmt: skip


def test_latencies_as_markdown():
    assert LATENCY.to_markdown() == (
        "| plan | latency | speed-up | above bound |\n"
        "| :-- | --: | --: | --: |\n"
        "| native | 300.0 µs | 1.000\N{MULTIPLICATION SIGN} | 87.50 % |\n"
        "| first fit | 250.0 µs | 1.200\N{MULTIPLICATION SIGN} | 56.25 % |\n"
        "| **found** | **200.0 µs** | **1.500\N{MULTIPLICATION SIGN}** | **25.00 %** |\n"
        "| wild | 100.0 µs | does not fit |  |\n"
        "| lower bound | 160.0 µs | 1.875\N{MULTIPLICATION SIGN} |  |\n"
    )


def test_latencies_on_a_console():
    assert printed(LATENCY) == (
        "\n plan          latency      speed-up  above bound"
        "\n ────────────────────────────────────────────────"
        "\n native       300.0 µs        1.000\N{MULTIPLICATION SIGN}      87.50 %"
        "\n first fit    250.0 µs        1.200\N{MULTIPLICATION SIGN}      56.25 %"
        "\n found        200.0 µs        1.500\N{MULTIPLICATION SIGN}      25.00 %"
        "\n wild         100.0 µs  does not fit"
        "\n lower bound  160.0 µs        1.875\N{MULTIPLICATION SIGN}\n"
    )


def test_only_a_proved_bound_is_called_the_optimum():
    words = {}
    for status in ("proved", "feasible", "bound only"):
        table = latency_table([], reference_s=1.0, bound_s=0.5, bound_status=status)
        words[status] = table.rows[-1][0]
    assert words == {
        "proved": "optimum (proved)",
        "feasible": "lower bound",
        "bound only": "lower bound",
    }


def test_no_bound_no_column():
    table = latency_table([("native", 1.0, True)], reference_s=1.0)
    assert table.header == ("plan", "latency", "speed-up")
    assert table.rows == (("native", "1.000 s", "1.000\N{MULTIPLICATION SIGN}"),)


def test_levels_say_what_moved():
    problem = toy_problem()
    slow = {"weights": np.zeros(4, np.int32), "activations": np.zeros(4, np.int32)}
    table = level_table(problem, slow, maps(problem))
    assert table.to_markdown() == (
        "| level | holds | native | found | moved in | moved out |\n"
        "| :-- | --: | --: | --: | --: | --: |\n"
        "| SRAM | 4 KiB | 0 B + 0 B | 0 B + 4 KiB | 5 KiB | 0 B |\n"
        "| LLC | 8 KiB | 0 B + 0 B | 4 KiB + 0 B | 4 KiB | 0 B |\n"
        "| DRAM | unbounded | 9 KiB + 4 KiB | 5 KiB + 0 B | 0 B | 9 KiB |\n"
        "\n"
        "weights + activations, these at their peak\n"
    )


def comparison(count: int = 2) -> Table:
    local = [made_result(seed=s, cost=c) for s, c in ((0, 2e-4), (1, 2.2e-4))][:count]
    late = History(
        evaluations=np.array([50, 100]),
        best_cost=np.array([5e-4, 2.005e-4], np.float32),
        best_feasible=np.array([True, True]),
    )
    never = History(
        evaluations=np.array([50, 100]),
        best_cost=np.array([5e-4, 4e-4], np.float32),
        best_feasible=np.array([True, True]),
    )
    other = [
        made_result(seed=0, cost=2.01e-4, history=late),
        made_result(seed=1, cost=4e-4, history=never),
    ][:count]
    empty = History(np.zeros(0, np.int64), np.zeros(0, np.float32), np.zeros(0, bool))
    solved = [made_result(cost=1.99e-4, history=empty)]
    groups = {"random": other, "local": local, "exact": solved}
    return comparison_table(
        [standing(name, results, 1.99e-4) for name, results in groups.items()],
        reference=3e-4,
        bound=1.99e-4,
        bound_status="proved",
    )


def test_comparison_from_best_to_worst():
    assert comparison().to_markdown() == (
        "| algorithm | mean | spread | best | gap | to 1 % | seconds |\n"
        "| :-- | --: | --: | --: | --: | --: | --: |\n"
        "| **exact** | **199.0 µs** |  | **199.0 µs** | **0.00 %** |  | **2.0 s** |\n"
        "| local | 210.0 µs | 6.73 % | 200.0 µs | 5.53 % | 60 | 2.0 s |\n"
        "| random | 300.5 µs | 46.83 % | 201.0 µs | 51.01 % | 100 (1/2) | 2.0 s |\n"
        "| native | 300.0 µs |  |  |  |  |  |\n"
        "| optimum (proved) | 199.0 µs |  |  |  |  |  |\n"
    )


def test_one_seed_has_no_spread():
    assert [row[2] for row in comparison(1).rows] == [""] * 5


def test_runs_without_a_plan_come_last():
    table = comparison_table(
        [
            standing("bad", [made_result(feasible=False)], 2e-4),
            standing("good", [made_result()], 2e-4),
        ],
        reference=3e-4,
    )
    assert [row[0] for row in table.rows] == ["good", "bad", "native"]
    assert table.rows[1][1:4] == ("does not fit", "", "")


def test_tables_fit_eighty_columns():
    problem = toy_problem()
    level = level_table(problem, problem.reference, maps(problem))
    for table in (LATENCY, comparison(), level, model_table(toy_model())):
        text = printed(table, 80)
        assert "…" not in text
        assert all(cell in text for row in table.rows for cell in row)


def test_names_are_not_markup():
    text = printed(Table(("a", "b"), (("[bold]x[/bold]", "c[1]"),)))
    assert "[bold]x[/bold]" in text
    assert "c[1]" in text
    assert "\\|" in Table(("a",), (("x|y",),)).to_markdown()


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({}, "local, seed 3: 100 evaluations in 2.0 s, after 1.5 s of compiling, best at "
             "evaluation 60"),
        ({"interrupted": "ctrl-c", "compile_seconds": 0.0, "failed_measurements": 2},
         "local, seed 3: 100 evaluations in 2.0 s, best at evaluation 60, 2 measurements failed, "
         "stopped early (ctrl-c)"),
        ({"history": History(np.zeros(0, np.int64), np.zeros(0, np.float32), np.zeros(0, bool)),
          "algorithm": "exact", "bound": 1.0, "bound_status": "proved"},
         "exact: proved in 2.0 s"),
    ],
)  # fmt: skip
def test_effort(changes, line):
    assert effort_line(made_result(**changes)) == line


def test_models_are_summed_up_by_class():
    table = model_table(toy_model())
    assert table.rows == (
        ("reduction", "1", "10 kFLOP", "0 B", "1 KiB"),
        ("contraction", "3", "3 MFLOP", "9 KiB", "4 KiB"),
        ("all", "4", "3.01 MFLOP", "9 KiB", "5 KiB"),
    )
    assert table.note.startswith("4 tensors, 4 uses; sizes are multiples of 1 B; digest ")


def test_machines():
    table = hardware_table(toy_hardware())
    assert table.rows == (
        ("SRAM", "4 KiB", "100 GB/s", "100 GB/s"),
        ("LLC", "8 KiB", "10 GB/s", "10 GB/s"),
        ("DRAM", "unbounded", "1 GB/s", "1 GB/s"),
    )
    assert "launch 1.000 µs" in table.note
