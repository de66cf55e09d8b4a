"""The code of the README runs, in its order and in one namespace, on a smaller budget."""

import re
from pathlib import Path

import pytest

import egx
from egx import zoo
from egx.cli import parser
from egx.testing import check_problem, check_search

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.S | re.M)


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """The namespace after all Python blocks."""
    folder = tmp_path_factory.mktemp("readme")
    space: dict = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for code in blocks("python"):
            small = re.sub(r"budget=\d+", "budget=64", code).replace('"egrl_plus"', '"local"')
            exec(compile(small, "README.md", "exec"), space)
    space["folder"] = folder
    return space


def test_python(ran):
    assert ran["result"].evaluations == 64
    assert (ran["folder"] / "levels.png").stat().st_size > 10_000
    plan = egx.report.read_plan(ran["folder"] / "plan.json")
    assert egx.report.check_plan(plan, ran["model"]).ok


def test_its_searcher_and_its_problem_keep_their_promises(ran):
    check_problem(ran["WeightsOnly"](ran["problem"]))
    check_search(ran["HillClimb"](), ran["problem"])


def test_its_machine():
    (text,) = blocks("toml")
    machine, _ = egx.hardware.parse(text)
    assert machine.level_names == ("DRAM", "SRAM")
    assert float(machine.level_bytes[0, 1]) == 2**20


def test_its_commands_parse():
    lines = [line for block in blocks("sh") for line in re.findall(r"egx .*", block)]
    assert len(lines) >= 3
    for line in lines:
        parser().parse_args(line.split()[1:])


def test_what_it_lists_exists():
    for name in (*egx.searches(), *egx.hardware.presets(), *zoo.names()):
        assert f"`{name}`" in README, name
    for link in re.findall(r"\]\(((?:notebooks|experiments)/[^)]+)\)", README):
        assert (Path(__file__).parents[1] / link).exists(), link
