"""The builder: what it refuses, what it keeps, and its edges."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from egx.errors import GraphError
from egx.graph.builder import GraphBuilder, Tensor
from egx.graph.generators import random_graph
from egx.graph.graph import MAX_UNITS, Graph, real_sizes
from egx.graph.topologies import TOPOLOGIES


def add(builder: GraphBuilder, name: str, inputs=(), sizes=(1,), **more):
    fields = {"kind": "elementwise", "op_type": "add", "flops": 1.0} | more
    return builder.op(name, inputs=inputs, output_bytes=sizes, **fields)


def small() -> GraphBuilder:
    """a -> b, a -> c twice, b -> c; c has two outputs, one an output; d is dead."""
    builder = GraphBuilder("small")
    (a,) = add(builder, "a", (), (5,), weight_bytes=3, flops=2.0)
    (b,) = add(builder, "b", (a,), (7,))
    c0, _ = add(builder, "c", (a, b, a), (1, 2))
    add(builder, "d", (b,), (4,))
    builder.output(c0)
    return builder


def test_order_is_that_of_the_calls():
    model = small().build_model()
    graph = model.graph
    assert model.op_names == ("a", "b", "c", "d")
    assert model.tensor_names == ("a", "b", "c:0", "c:1", "d")
    assert graph.tensor_producer.tolist() == [0, 1, 2, 2, 3]
    assert graph.tensor_units.tolist() == [5, 7, 1, 2, 4]
    assert graph.use_tensor.tolist() == [0, 0, 1, 0, 1]
    assert graph.use_consumer.tolist() == [1, 2, 2, 2, 3]
    assert graph.tensor_is_output.tolist() == [False, False, True, False, False]
    assert graph.input_units().tolist() == [0, 5, 17, 7]
    assert graph.output_units().tolist() == [5, 7, 3, 4]
    # c:0 is an output; c:1 and d die with their op.
    assert graph.last_step().tolist() == [2, 3, 3, 2, 3]
    assert int(graph.unit_bytes) == 1
    assert model.name == "small"
    assert repr(model) == "Model('small', 4 ops, 5 tensors, 5 uses)"


def test_jraph_has_an_edge_for_each_use():
    padded = small().build(pad_to=(6, 7, 7)).to_jraph()
    assert padded.edges["units"].tolist() == [5, 5, 7, 5, 7, 0, 0]
    assert padded.receivers.tolist() == [1, 2, 2, 2, 3, 5, 5]
    graph = small().build().to_jraph()
    assert graph.senders.tolist() == [0, 0, 1, 0, 1]
    assert graph.receivers.tolist() == [1, 2, 2, 2, 3]
    assert graph.edges["units"].tolist() == [5, 5, 7, 5, 7]
    assert graph.n_node.tolist() == [4]
    assert graph.n_edge.tolist() == [5]


def test_a_cycle_cannot_be_written(unchecked):
    """An op takes handles of earlier ops only: those of other graphs and made-up ones fail."""
    builder, other = GraphBuilder("one"), GraphBuilder("two")
    (foreign,) = add(other, "x")
    with pytest.raises(GraphError, match=r"op 'y': input .* is not a tensor of graph 'one'"):
        add(builder, "y", (foreign,))
    with pytest.raises(GraphError, match="is not a tensor"):
        add(builder, "y", ("y",))
    with pytest.raises(GraphError, match="is not a tensor"):
        builder.output(foreign)
    # Refused ops leave nothing behind.
    assert len(builder) == 0


def test_handles_of_a_builder_that_is_gone_are_refused():
    """Also when a new builder lies where the old one lay."""
    for _ in range(50):
        (orphan,) = add(GraphBuilder("gone"), "x")
        builder = GraphBuilder("new")
        add(builder, "x")
        with pytest.raises(GraphError, match="is not a tensor of graph 'new'"):
            add(builder, "y", (orphan,))


def test_an_empty_graph_is_refused():
    with pytest.raises(GraphError, match="graph 'nothing' is empty"):
        GraphBuilder("nothing").build()


@pytest.mark.parametrize("sizes", [(), (0,), (3,), (0, 4)])
def test_one_op(sizes):
    builder = GraphBuilder("one")
    add(builder, "only", (), sizes)
    graph = builder.build()
    assert real_sizes(graph) == (1, len(sizes), 0)
    assert graph.output_units().tolist() == [sum(sizes)]
    assert graph.input_units().tolist() == [0]
    assert graph.last_step().tolist() == [0] * len(sizes)
    assert graph.use_producer().shape == (0,)
    assert graph.to_jraph().senders.shape == (0,)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"name": ""}, ("non-empty string",)),
        ({"name": "a"}, ("'a' is already defined",)),
        ({"kind": "conv"}, ("kind 'conv'", "contraction")),
        ({"output_bytes": 4}, ("output_bytes must be a sequence",)),
        ({"output_bytes": [1, -2]}, ("output_bytes[1]", "-2")),
        ({"output_bytes": [float("nan")]}, ("output_bytes[0]", "nan")),
        ({"flops": float("inf")}, ("flops", "inf")),
        ({"flops": "many"}, ("flops", "'many'")),
        ({"flops": 1e39}, ("flops", "1e+39")),
        ({"output_bytes": [10**400]}, ("output_bytes[0]", "must be a number")),
        ({"weight_bytes": -1}, ("weight_bytes", "-1")),
        ({"attributes": {"kernel": 3}}, ("kernel", "kernel_x")),
        ({"attributes": {"stride": -1}}, ("attributes['stride']", "-1")),
        ({"output_names": ["p", "q"]}, ("2 output_names for 1 outputs",)),
    ],
)
def test_errors_name_the_op_the_field_and_the_value(fields, words, unchecked):
    builder = GraphBuilder("net")
    add(builder, "a")
    call = {"name": "b", "kind": "shape", "op_type": "t", "inputs": (), "output_bytes": [1]}
    call |= {"flops": 0.0} | fields
    with pytest.raises(GraphError) as caught:
        builder.op(call.pop("name"), **call)
    for word in words:
        assert word in str(caught.value)
    assert len(builder) == 1


@pytest.mark.parametrize("unit", [0, 3, -4, 1.5, 2**31])
def test_units_are_powers_of_two(unit, unchecked):
    with pytest.raises(GraphError, match="power of two"):
        small().build(unit_bytes=unit)


def test_sizes_round_up_to_whole_units():
    graph = small().build(unit_bytes=4)
    assert graph.tensor_units.tolist() == [2, 2, 1, 1, 1]
    assert graph.weight_units.tolist() == [1, 0, 0, 0]


@pytest.mark.parametrize(
    ("sizes", "unit"),
    [
        ((MAX_UNITS,), 1),
        ((MAX_UNITS, 1), 2),
        ((2**31,), 2),
        ((3 * 2**40 + 1,), 2048),
        ((2**50 + 1, 2**20 + 1, 1), 2**20),
    ],
)
def test_huge_sizes_are_exact_multiples_of_the_smallest_unit(sizes, unit):
    """Beyond 2 TiB, and beyond what a float64 counts exactly."""
    builder = GraphBuilder("huge")
    add(builder, "a", (), sizes)
    graph = builder.build()
    assert int(graph.unit_bytes) == unit
    assert graph.tensor_units.tolist() == [-(-size // unit) for size in sizes]
    total = sum(graph.tensor_units.tolist())
    assert total <= MAX_UNITS
    assert unit == 1 or sum(-(-size // (unit // 2)) for size in sizes) > MAX_UNITS


def test_integers_beyond_float64_lose_no_byte():
    builder = GraphBuilder("exact")
    add(builder, "a", (), (2**54 + 1,))
    # With units of 2^24 bytes, the one byte beyond 2^54 takes a unit of its own.
    assert builder.build(unit_bytes=2**24).tensor_units.tolist() == [2**30 + 1]


def test_more_bytes_than_can_be_counted_are_refused():
    builder = GraphBuilder("galaxy")
    add(builder, "a", (), (2**61,))
    with pytest.raises(GraphError, match=r"graph 'galaxy': its sizes add up to 2\.30584e\+18"):
        builder.build()


def test_a_unit_that_is_too_small_is_refused():
    builder = GraphBuilder("huge")
    add(builder, "a", (), (2**40,))
    with pytest.raises(GraphError, match="larger unit_bytes"):
        builder.build(unit_bytes=1)


def test_ten_thousand_ops():
    builder = GraphBuilder("long")
    tensors: list[Tensor] = []
    for i in range(10_000):
        tensors += add(builder, f"op{i}", tensors[-2:], (i,))
    builder.output(tensors[-1])
    graph = builder.build()
    assert real_sizes(graph) == (10_000, 10_000, 1 + 2 * 9_998)
    last = np.asarray(graph.last_step())
    assert last[:3].tolist() == [2, 3, 4]
    assert last[-3:].tolist() == [9_999, 9_999, 9_999]
    assert int(np.asarray(graph.input_units())[-1]) == 9_998 + 9_997


def test_padding_smaller_than_the_graph_is_refused():
    with pytest.raises(GraphError, match=r"pad_to 4 uses, but it has 5"):
        small().build(pad_to=(4, 5, 4))


def check_invariants(graph: Graph) -> None:
    """What every graph keeps, padded or not."""
    ops, tensors, uses = real_sizes(graph)
    arrays = {key: np.asarray(value) for key, value in vars(graph).items()}
    for mask, count in (("op_mask", ops), ("tensor_mask", tensors), ("use_mask", uses)):
        assert arrays[mask][:count].all()
        assert not arrays[mask][count:].any()
    assert (np.diff(arrays["tensor_producer"]) >= 0).all()
    assert (np.diff(arrays["use_consumer"]) >= 0).all()
    producer = arrays["tensor_producer"][arrays["use_tensor"][:uses]]
    assert (producer < arrays["use_consumer"][:uses]).all()
    assert not arrays["tensor_units"][tensors:].any()
    assert not arrays["tensor_is_output"][tensors:].any()
    assert not arrays["weight_units"][ops:].any()
    assert not arrays["flops"][ops:].any()
    assert (arrays["tensor_producer"][tensors:] == graph.num_ops - 1).all()
    assert (arrays["use_consumer"][uses:] == graph.num_ops - 1).all()
    assert (arrays["use_tensor"][uses:] == max(graph.num_tensors - 1, 0)).all()
    for key in ("op_class", "op_type", "weight_units", "tensor_producer", "use_tensor"):
        assert arrays[key].dtype == np.int32
    for key in ("flops", "geometry"):
        assert arrays[key].dtype == np.float32


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    family=st.sampled_from(sorted(TOPOLOGIES)),
    ops=st.integers(1, 25),
    slack=st.tuples(*[st.integers(0, 5)] * 3),
    unit=st.sampled_from([None, 1, 64, 4096]),
)
def test_invariants_of_any_graph(seed, family, ops, slack, unit):
    rng = np.random.default_rng(seed)
    plain = random_graph(rng, family, ops, unit_bytes=unit)
    check_invariants(plain.graph)
    sizes = tuple(n + s for n, s in zip(real_sizes(plain.graph), slack, strict=True))
    padded = random_graph(
        np.random.default_rng(seed), family, ops, unit_bytes=unit, pad_to=sizes
    ).graph
    check_invariants(padded)
    assert (padded.num_ops, padded.num_tensors, padded.num_uses) == sizes


def test_structure_is_the_same_for_all_graphs_of_one_shape():
    """Names and digests are not in the arrays: one compiled program serves both."""
    one, two = small(), GraphBuilder("other")
    (x,) = add(two, "x")
    (y,) = add(two, "y", (x,))
    add(two, "z", (y, x, x), (1, 2))
    add(two, "w", (y,))
    assert jax.tree.structure(one.build()) == jax.tree.structure(two.build())
