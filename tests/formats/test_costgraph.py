"""CostGraphDef text: what becomes of each field, the way back, and what broken files say."""

from __future__ import annotations

import numpy as np
import pytest

import egx
from egx.errors import FormatError
from egx.formats.costgraph import load_costgraph, save_costgraph
from egx.formats.textproto import Word, read_fields
from egx.graph.generators import regal_synthetic
from egx.graph.graph import real_sizes

# As TensorFlow prints it: absent numbers are 0, fields unknown here stand between.
FILE = """\
# a comment
node {
  name: "read/source"
  device: "/device:CPU:0"
  output_info {
    size: 40
    alias_input_port: -1
    shape { dim { size: 10 } }
    dtype: DT_FLOAT
  }
  output_info { size: 7 alias_input_port: -1 }
  persistent_memory_size: 100
  compute_cost: 12
}
node {
  name: "view"  id: 1
  input_info { }
  output_info { size: 40 }
  compute_cost: 1
}
node {
  name: "sum"; id: 2,
  input_info { preceding_node: 1 }
  input_info { preceding_port: 1 }
  input_info { preceding_node: 4 }
  output_info < size: 8, alias_input_port: -1 >
  control_input: [0, 1]
  is_final: true
  compute_cost: 2500000
  temporary_memory_size: 3
}
node { name: "late" id: 4 output_info { size: 5 alias_input_port: -1 } }
cost { cost: 1.5e3 dimension: "time" }
"""


def write(tmp_path, text):
    path = tmp_path / "graph.pbtxt"
    path.write_text(text)
    return path


def uses(model):
    """(tensor, consumer) by name, in order."""
    graph = model.graph
    return [
        (model.tensor_names[t], model.op_names[c])
        for t, c in zip(
            np.asarray(graph.use_tensor).tolist(),
            np.asarray(graph.use_consumer).tolist(),
            strict=True,
        )
    ]


def test_every_field_becomes_what_the_reader_promises(tmp_path):
    workload = load_costgraph(write(tmp_path, FILE))
    model = workload.model
    # "late" is read by "sum", which stands before it in the file.
    assert model.op_names == ("read/source", "view", "late", "sum")
    np.testing.assert_allclose(workload.op_seconds[:, 0], [12e-6, 1e-6, 0, 2.5])
    unit = int(model.graph.unit_bytes)
    assert dict(
        zip(model.tensor_names, (np.asarray(model.graph.tensor_units) * unit).tolist(), strict=True)
    ) == {
        "read/source": 40,
        "read/source:1": 7,
        "^read/source": 0,
        "^view": 0,
        "late": 5,
        "sum": 8,
        "sum:temporary": 3,
    }
    # "view" is its input under another name: "sum" reads the bytes of "read/source", and waits.
    assert uses(model) == [
        ("read/source", "view"),
        ("read/source", "sum"),
        ("read/source:1", "sum"),
        ("late", "sum"),
        ("^view", "sum"),
        ("^read/source", "sum"),
        ("^view", "sum"),
    ]
    final = np.asarray(model.graph.tensor_is_output)
    assert [model.tensor_names[t] for t in np.flatnonzero(final)] == ["sum"]
    assert (np.asarray(model.graph.weight_units) * unit).tolist() == [100, 0, 0, 0]


def test_nothing_is_an_alias_where_aliases_are_never_mentioned(tmp_path):
    text = "node { output_info { size: 4 } } node { id: 1 input_info {} output_info { size: 9 } }"
    model = load_costgraph(write(tmp_path, text)).model
    assert np.asarray(model.graph.tensor_units).tolist() == [4, 9]
    assert model.op_names == ("#0", "#1")


def test_an_alias_that_is_final_keeps_the_tensor_it_stands_for(tmp_path):
    text = """node { name: "a" output_info { size: 4 alias_input_port: -1 } }
    node { name: "b" id: 1 input_info { } output_info { size: 4 } is_final: true }"""
    model = load_costgraph(write(tmp_path, text)).model
    assert model.tensor_names == ("a",)
    assert np.asarray(model.graph.tensor_is_output).tolist() == [True]


def test_a_file_and_a_synthetic_graph_survive_the_way_there_and_back(tmp_path):
    first = load_costgraph(write(tmp_path, FILE))
    save_costgraph(first, tmp_path / "again.pbtxt")
    again = load_costgraph(tmp_path / "again.pbtxt")
    assert again.model.digest == first.model.digest
    np.testing.assert_allclose(again.op_seconds, first.op_seconds)

    model = regal_synthetic(np.random.default_rng(3), "barabasi_albert", 60)
    save_costgraph(model, tmp_path / "synthetic.pbtxt")
    read = load_costgraph(tmp_path / "synthetic.pbtxt")
    assert read.model.op_names == model.op_names
    assert real_sizes(read.model.graph)[2] == real_sizes(model.graph)[2]
    for of in ("input_units", "output_units"):
        np.testing.assert_array_equal(getattr(read.model.graph, of)(), getattr(model.graph, of)())
    microseconds = np.round(np.asarray(model.graph.flops, np.float64))
    np.testing.assert_allclose(read.op_seconds[:, 0], microseconds * 1e-6)


def test_it_makes_problems_with_the_seconds_of_the_file(tmp_path):
    path = write(tmp_path, FILE)
    assert egx.load(path).digest == egx.load_workload(path).model.digest
    hardware = egx.hardware.regal_hardware(2)
    problem = egx.execution_problem(egx.load_workload(path), hardware)
    assert float(problem.reference_cost) == pytest.approx(2.500013)


@pytest.mark.parametrize(
    ("old", "new", "where", "said"),
    [
        ("size: 40", "size: many", ":6: node 'read/source' (id 0): output_info.size", "'many'"),
        ("size: 40", "size: -2", ":6: ", "-1 or more"),
        ("size: 40", "size: 4.5", ":6: ", "4.5"),
        ("compute_cost: 1\n", "compute_cost: -1\n", ":19: node 'view' (id 1): compute_cost", "-1"),
        ("preceding_node: 4", "preceding_node: 9", ":25: node 'sum' (id 2): input_info", "got 9"),
        ("preceding_port: 1", "preceding_port: 2", ":24: node 'sum'", "which has 2 outputs, got 2"),
        ("[0, 1]", "[0, 77]", ":27: node 'sum' (id 2): control_input", "77"),
        ("id: 4", "id: 2", ":32: node 'late' (id 2): id", "node 'sum' (id 2) at line 21"),
        ("size: 8, alias_input_port: -1", "alias_input_port: 3", ":21: node 'sum'", "3 inputs"),
        ("  control_input: [0, 1]", "control_input: [0, 2]", ":21: node 'sum' (id 2)", "cycle"),
        ('name: "view"', "name: view", ":16: ", "a string in quotes"),
        ("is_final: true", "is_final: 3", ":28: node 'sum' (id 2): is_final", "true or false"),
        ("compute_cost: 12\n", 'op: "Add"\n', ":13: node 'read/source' (id 0): op", "GraphDef"),
        ("compute_cost: 12\n", "cost: 12\n", ":13: node 'read/source' (id 0): cost", "no field"),
        ("size: 40", "size: " + "9" * 5000, ":6: expected a number", "99999"),
        ('"time" }', '"time"', ":33: expected '}'", "end of the file"),
        ('"time" }', '"time }', ":33: ", "does not end"),
        ("  compute_cost: 12", "  compute_cost 12", ":13: expected ':'", "'12'"),
        ("# a comment", "node: 3", ":1: node: expected a message", "got 3"),
        ("# a comment", "%", ":1: not text protobuf", "%"),
    ],
)
def test_broken_files_are_named_with_line_node_and_field(tmp_path, old, new, where, said):
    assert old in FILE
    path = write(tmp_path, FILE.replace(old, new, 1))
    with pytest.raises(FormatError) as caught:
        load_costgraph(path)
    message = str(caught.value)
    assert message.startswith(f"{path}{where}"), message
    assert said in message


def test_files_that_are_none_are_named(tmp_path):
    (tmp_path / "empty.pbtxt").write_text("# nothing\n")
    (tmp_path / "binary.pbtxt").write_bytes(b"\xff\xfe\x00node")
    with pytest.raises(FormatError, match=r"empty\.pbtxt: holds no node"):
        load_costgraph(tmp_path / "empty.pbtxt")
    with pytest.raises(FormatError, match=r"none\.pbtxt: cannot be read"):
        load_costgraph(tmp_path / "none.pbtxt")
    with pytest.raises(FormatError, match=r"binary\.pbtxt: not a text file"):
        load_costgraph(tmp_path / "binary.pbtxt")


def test_text_protobuf_in_all_its_spellings():
    text = [
        "a: -0x1F b: 017 c: 1.5e-1f, d: -inf;\n",
        "e: 'it\\'s' \"\\n\\303\\274\" f { g: [1, 2] h < i: TRUE > } j: [] # end\n",
        "[some.extension] { k: -.5 }",
    ]
    fields = {field.name: field.value for field in read_fields(text, "text")}
    assert fields["a"] == -31
    assert fields["b"] == 15
    assert fields["c"] == pytest.approx(0.15)
    assert fields["d"] == -np.inf
    assert fields["e"] == "it's\nü"
    inner = fields["f"]
    assert [(field.name, field.value) for field in inner[:2]] == [("g", 1), ("g", 2)]
    word = inner[2].value[0].value
    assert word == "TRUE"
    assert isinstance(word, Word)
    assert "j" not in fields
    assert fields["[some.extension]"][0].value == -0.5
    deep = "a {" * 200
    with pytest.raises(FormatError, match="text:1: expected at most 100 messages"):
        list(read_fields([deep], "text"))
