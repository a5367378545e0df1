"""Graphs: invariants, text, rebuilding, provenance, and depth without recursion."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import treadle as td
from graphs import random_graph
from treadle.autodiff.backward import differentiate
from treadle.base import dtypes
from treadle.domains.domain import evaluate
from treadle.domains.dual import Dual, DualNumber
from treadle.domains.field import FiniteField
from treadle.domains.float64 import Float64, evaluate_float64
from treadle.ir.graph import Graph, GraphBuilder, Node, Output, OutputKind, Value
from treadle.ir.op import NONE, Op
from treadle.ir.ops import elementwise as e
from treadle.ir.ops.leaves import CONSTANT, INPUT, Constant, Leaf
from treadle.ir.ops.reductions import REDUCE_SUM, Reduce
from treadle.ir.parse import parse
from treadle.ir.rewrite import cut, remove_dead_code, replace_values
from treadle.ir.text import to_text
from treadle.ir.types import TensorType
from treadle.ir.verify import verify
from treadle.precision.narrow import apply_precision

Spec = td.Spec


def small_graph() -> Graph:
    def function(x, y):
        td.capture("sum", x + y)
        return td.tanh(x) * y

    return td.trace(function, Spec((2, 3)), Spec((3,)))


def test_equal_nodes_are_one_node() -> None:
    graph = td.trace(lambda x: td.exp(x) * td.exp(x) + (x + 1.0) * (x + 1.0), Spec((3,)))
    names = [n.op.name for n in graph.nodes]
    assert names.count("exp") == 1
    assert names.count("constant") == 1


def test_negative_zero_and_nan_are_constants_of_their_own() -> None:
    builder = GraphBuilder()

    def add(value: float) -> Value:
        return builder.add(CONSTANT, Constant(value, TensorType(())), ())[0]

    assert add(0.0) != add(-0.0)
    assert add(math.nan) == add(float("nan"))
    assert add(1.5) == add(1.5)
    graph = builder.build([Output(OutputKind.RESULT, "0", add(-0.0))])
    assert parse(to_text(graph)) == graph
    assert math.copysign(1, evaluate_float64(graph, {})[0]) == -1


def test_text_reads_well_and_parses_back() -> None:
    graph = small_graph()
    assert to_text(graph) == "\n".join(
        [
            "graph function {",
            '  %0 = input(name="x", type=float32[2,3]) : float32[2,3]',
            '  %1 = input(name="y", type=float32[3]) : float32[3]',
            "  %2 = broadcast(%1; shape=(2, 3), axes=(1,)) : float32[2,3]",
            "  %3 = add(%0, %2) : float32[2,3]",
            "  %4 = tanh(%0) : float32[2,3]",
            "  %5 = mul(%4, %2) : float32[2,3]",
            '  result "0" = %5',
            '  capture "sum" = %3',
            "}",
        ]
    )
    assert parse(to_text(graph)) == graph


@given(st.integers(0, 2**32), st.integers(1, 12))
@settings(max_examples=60, deadline=None)
def test_random_graphs_round_trip_with_their_gradients(seed: int, steps: int) -> None:
    graph = random_graph(seed, steps)
    loss = td.trace(lambda a, b, v: sum(r.sum() for r in _outputs(graph, a, b, v)), *_types(graph))
    both = verify(differentiate(loss, ["a"]).graph)
    assert parse(to_text(both)) == both
    assert parse(to_text(both, origins=True)) == both


def _types(graph: Graph) -> list[TensorType]:
    return [graph.nodes[i].types[0] for i in graph.inputs]


def _outputs(graph: Graph, *tensors: td.Tensor) -> list[td.Tensor]:
    from treadle.frontend.tracing import emit

    return emit(graph, dict(zip("abv", tensors, strict=True)))


@pytest.mark.parametrize("name", ["plain", 'with "quotes"', "a  # hash", "back\\slash", "línea"])
def test_any_name_round_trips(name: str) -> None:
    def function(x):
        td.capture(name, x + 1.0)
        return x

    graph = td.trace(function, Spec(()))
    assert parse(to_text(graph, origins=True)) == graph


def test_parsed_origins_are_kept() -> None:
    graph = parse(to_text(small_graph(), origins=True))
    assert graph.nodes[4].origin is not None
    assert graph.nodes[4].origin.file == Path(__file__).name


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("", "no graph"),
        ("graph g {\n  %0 = input(", "no closing brace"),
        ("hello", "expected 'graph NAME {'"),
        ("graph g {\n  %0 = frobnicate() : float32[]\n}", "unknown op"),
        ("graph g {\n  %1 = iota(axis=0, shape=(2,), dtype=int32) : int32[2]\n}", "expected node %0"),
        ("graph g {\n  %0 = iota(axis=0, shape=(2,), dtype=int32) : int32[3]\n}", "the rule says"),
        ("graph g {\n  %0 = iota(axis=0, size=(2,)) : int32[3]\n}", "Iota"),
        ("graph g {\n  %0 = neg(%3) : float32[]\n}", "does not come before"),
        ('graph g {\n  %0 = constant(value=array(float32[2], "AAAA"), type=float32[2]) : float32[2]\n}', "bytes"),
        ("graph g {\n  %0 = neg(%0 ? ) : float32[]\n}", "unreadable at column"),
        ("graph g {\n  result \"0\" = %4\n}", "not there"),
        ("graph g {\n  nonsense \"0\" = %4\n}", "expected a node or an output"),
        ("graph g {\n  %0 = call(; body=@3, name=\"f\", recompute=False, backward=None) : int32[]\n}", "@3 is not defined"),
    ],
)  # fmt: skip
def test_bad_text_is_refused_with_its_line(text: str, cause: str) -> None:
    with pytest.raises(
        (td.ParseError, td.GraphError), match=cause.replace("(", r"\(").replace("{", r"\{")
    ):
        parse(text)


def broken(graph: Graph, position: int, **changes: object) -> Graph:
    nodes = list(graph.nodes)
    nodes[position] = dataclasses.replace(nodes[position], **changes)
    return Graph(tuple(nodes), graph.outputs, graph.name)


BREAKAGES = {
    "types": (lambda g: broken(g, 4, types=(TensorType((9,)),)), "%4 = tanh: its types are"),
    "operand": (
        lambda g: broken(g, 4, operands=(Value(7),)),
        "%4 = tanh: operand .* does not come before",
    ),
    "output": (lambda g: broken(g, 5, operands=(Value(4, 1), Value(2))), "does not come before"),
    "attributes": (
        lambda g: broken(g, 4, attributes=Leaf("x", TensorType(()))),
        "attributes are Leaf",
    ),
    "rule": (
        lambda g: broken(g, 5, operands=(Value(4), Value(1))),
        "its type rule rejects it: mul",
    ),
    "leaf": (lambda g: broken(g, 1, attributes=Leaf("x", TensorType((3,)))), "'x' is used twice"),
}


@pytest.mark.parametrize("name", BREAKAGES)
def test_verify_names_the_node_and_the_users_line(name: str) -> None:
    change, cause = BREAKAGES[name]
    with pytest.raises(td.GraphError, match=cause) as caught:
        verify(change(small_graph()))
    assert Path(__file__).name in str(caught.value)


def test_verify_refuses_foreign_ops_and_outputs() -> None:
    graph = small_graph()
    foreign = Op("tanh", e.TANH.attributes, e.TANH.infer, e.TANH.precision, e.TANH.contract)
    with pytest.raises(td.GraphError, match="not in the table"):
        verify(broken(graph, 4, op=foreign))
    with pytest.raises(td.GraphError, match="not there"):
        verify(Graph(graph.nodes, (Output(OutputKind.RESULT, "0", Value(99)),)))
    twice = (graph.outputs[1], graph.outputs[1])
    with pytest.raises(td.GraphError, match="'sum' of .* is given twice"):
        verify(Graph(graph.nodes, twice))


def test_verify_looks_into_bodies() -> None:
    graph = td.trace(lambda x: td.checkpoint(lambda a: td.tanh(a))(x), Spec((2,)))
    call = graph.nodes[1].attributes
    body = broken(call.body, 1, types=(TensorType((5,)),))
    inner = dataclasses.replace(call, body=body)
    with pytest.raises(td.GraphError, match="tanh: its types are"):
        verify(Graph((graph.nodes[0], dataclasses.replace(graph.nodes[1], attributes=inner,
                      types=(TensorType((5,)),))), graph.outputs))  # fmt: skip


def test_dead_code_goes_and_inputs_stay() -> None:
    graph = td.trace(lambda x, y: (td.exp(x), x + 1.0)[1], Spec((2,)), Spec((2,)))
    assert [n.op.name for n in graph.nodes] == ["input", "input", "constant", "add"]
    assert remove_dead_code(graph) == graph


def test_replace_values_sorts_again() -> None:
    builder = GraphBuilder()
    (x,) = builder.add(INPUT, Leaf("x", TensorType((2,))), ())
    (a,) = builder.add(e.EXP, NONE, (x,))
    (b,) = builder.add(e.NEG, NONE, (a,))
    (c,) = builder.add(e.SIN, NONE, (x,))
    graph = builder.build([Output(OutputKind.RESULT, "0", b)])
    replaced = verify(replace_values(graph, {a: c}))
    assert [n.op.name for n in replaced.nodes] == ["input", "sin", "neg"]


def test_cut_makes_inputs_of_inner_values() -> None:
    graph = td.trace(lambda x: td.sin(td.exp(x) * 2.0), Spec((2,)))
    product = next(i for i, n in enumerate(graph.nodes) if n.op is e.MUL)
    part = verify(cut(graph, [("h", Value(product))], graph.outputs))
    assert [n.op.name for n in part.nodes] == ["input", "sin"]
    np.testing.assert_allclose(evaluate_float64(part, {"h": [1.0, 2.0]})[0], np.sin([1.0, 2.0]))


def test_every_node_knows_the_users_line() -> None:
    def model(x):
        h = td.exp(x)  # line A
        return h.sum()

    graph = td.trace(td.grad(model), Spec((3,)))
    lines = {n.op.name: n.origin for n in graph.nodes}
    start = model.__code__.co_firstlineno
    assert all(o is not None and o.file == __file__ for o in lines.values())
    assert lines["exp"].line == start + 1
    assert lines["exp"].function == "model"
    # The backward of a line belongs to that line.
    assert lines["mul"].line == start + 1


CHAIN = 6_000  # beyond any recursion


def chain() -> Graph:
    builder = GraphBuilder()
    type_ = TensorType((2,))
    (x,) = builder.add(INPUT, Leaf("x", type_), ())
    (c,) = builder.add(CONSTANT, Constant(0.9999, type_), ())
    for i in range(CHAIN):
        (x,) = builder.add(e.MUL if i % 2 else e.SIN, NONE, (x, c) if i % 2 else (x,))
    (total,) = builder.add(REDUCE_SUM, Reduce((0,)), (x,))
    return builder.build([Output(OutputKind.RESULT, "0", total)])


def test_a_long_chain_goes_through_every_pass() -> None:
    graph = verify(chain())
    assert len(graph.nodes) > CHAIN
    both = verify(differentiate(graph, ["x"]).graph)
    assert parse(to_text(both)) == both
    narrow = verify(apply_precision(graph, dtypes.bfloat16))
    assert len(narrow.nodes) > CHAIN
    assert replace_values(graph, {}) == graph
    inputs = {"x": np.array([0.5, 1.0])}
    assert np.isfinite(evaluate_float64(both, inputs)[1]).all()
    field = FiniteField()
    evaluate(graph, {"x": field.lift(inputs["x"], TensorType((2,)))}, field)
    dual = {"x": DualNumber(inputs["x"], np.ones(2))}
    evaluate(graph, dual, Dual(Float64()))
    hash(graph)


def test_a_missing_leaf_is_named() -> None:
    with pytest.raises(td.ArgumentError, match="no value for y"):
        evaluate_float64(small_graph(), {"x": np.zeros((2, 3))})


def test_nodes_are_frozen() -> None:
    node: Node = small_graph().nodes[0]
    with pytest.raises(dataclasses.FrozenInstanceError):
        node.op = e.ADD  # type: ignore[misc]
