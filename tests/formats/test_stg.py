"""The Standard Task Graph Set: what its files hold, on how many processors, with which optima."""

from __future__ import annotations

import numpy as np
import pytest

import egx
from egx.errors import FormatError
from egx.formats.stg import load_stg
from tests.data import data_dir

FILE = """\
  2
  0  0  0
  1  5  1  0   # a comment
  2  7  1  0
  3  0  2  1  2
# the end
"""


def write(tmp_path, text, name="50/toy.stg"):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return path


def test_tasks_edges_and_processors(tmp_path):
    (tmp_path / "optimal_50.csv").write_text(
        "file,processors,lower,upper,source\n50/toy.stg,2,6,7,listed\n50/toy.stg,4,7,7,listed\n"
    )
    path = write(tmp_path, FILE)
    workload = load_stg(path, processors=2)
    assert workload.model.op_names == ("task 0", "task 1", "task 2", "task 3")
    assert workload.op_seconds.tolist() == [[0.0], [5.0], [7.0], [0.0]]
    assert np.asarray(workload.model.graph.use_tensor).tolist() == [0, 0, 1, 2]
    assert np.asarray(workload.model.graph.use_consumer).tolist() == [1, 2, 3, 3]
    assert (workload.lower_s, workload.best_s) == (6.0, 7.0)
    assert load_stg(path, processors=8).best_s is None
    problem = egx.execution_problem(workload)
    together = problem.evaluate({"device": np.zeros(4, int), "priority": np.zeros(4)})
    apart = problem.evaluate({"device": np.array([0, 0, 1, 1]), "priority": np.zeros(4)})
    assert (float(together.makespan_s), float(apart.makespan_s)) == (12.0, 7.0)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("  2\n", "  3\n", ":5: expected 5 tasks"),
        ("  2\n", "", ":4: expected 2 tasks"),
        ("1  5  1", "1  5.5  1", ":3: task 1: time: expected a whole number"),
        ("1  5  1", "4  5  1", ":3: id: expected 1, got 4"),
        ("3  0  2  1  2", "3  0  2  1", ":5: task 3: expected 2 predecessors, got 1"),
        ("3  0  2  1  2", "3  0", ":5: task 3: expected id, time, number"),
        ("2  7  1  0", "2  7  1  3", ":4: task 2: predecessor: expected an earlier task, got 3"),
        (FILE, "# nothing", ": is empty"),
    ],
)
def test_broken_files_are_named_with_line_and_field(tmp_path, old, new, said):
    path = write(tmp_path, FILE.replace(old, new, 1))
    with pytest.raises(FormatError) as caught:
        load_stg(path)
    assert str(caught.value).startswith(f"{path}{said}")


def test_impossible_arguments_and_lists_are_named(tmp_path):
    path = write(tmp_path, FILE)
    with pytest.raises(FormatError, match="processors: expected 1 or more, got 0"):
        load_stg(path, processors=0)
    (tmp_path / "optimal_50.csv").write_text("file,processors,lower,upper\n50/toy.stg,2,six,7\n")
    with pytest.raises(FormatError, match=r"optimal_50\.csv:2: lower, upper: expected two numbers"):
        load_stg(path)


def test_the_whole_set_is_read_with_its_optima():
    folder = data_dir("stg")
    for path in sorted(folder.glob("50/*.stg"))[:20]:
        workload = load_stg(path, processors=4)
        seconds = workload.op_seconds[:, 0]
        assert len(seconds) == 52
        assert seconds[0] == seconds[-1] == 0
        assert workload.lower_s is not None
        assert workload.best_s is not None
        # No schedule beats the load of all processors, nor the listed bound the best.
        assert max(seconds.max(), seconds.sum() / 4) <= workload.best_s
        assert workload.lower_s <= workload.best_s <= seconds.sum()
