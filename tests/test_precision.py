"""The precision pass: casts where the op table says, the interface unchanged."""

from __future__ import annotations

import numpy as np
import pytest

import treadle as td
from models import gpt_loss, gpt_specs
from treadle.autodiff.backward import differentiate
from treadle.base import dtypes, trees
from treadle.base.dtypes import DType
from treadle.domains.field import equal_graphs
from treadle.domains.float64 import evaluate_float64
from treadle.frontend.scopes import isolated_tracing
from treadle.ir.graph import Graph
from treadle.ir.op import Precision
from treadle.ir.ops.elementwise import CAST
from treadle.ir.ops.leaves import PARAMETER
from treadle.ir.types import TensorType
from treadle.ir.verify import verify
from treadle.precision.narrow import apply_precision

NARROW = [dtypes.bfloat16, dtypes.float16]
Spec = td.Spec


def gpt_graph() -> Graph:
    """A small GPT whose parameters are parameter leaves."""
    params, tokens, targets = gpt_specs(2, 8, 4, 2, 11)
    leaves, structure = trees.flatten(params)
    with isolated_tracing("gpt") as trace:
        names = trees.paths(params)
        bound = structure.rebuild(
            trace.leaf(PARAMETER, n, t) for n, t in zip(names, leaves, strict=True)
        )
        inputs = trace.input("tokens", tokens), trace.input("targets", targets)
        return trace.finish([gpt_loss(bound, *inputs, heads=2)])


def operand_dtypes(graph: Graph, name: str) -> set[DType]:
    return {
        t.dtype
        for n in graph.nodes
        if n.op.name == name
        for v in n.operands
        if (t := graph.type_of(v)).is_float
    }


@pytest.mark.parametrize("narrow", NARROW, ids=str)
def test_ops_compute_as_the_table_says(narrow: DType) -> None:
    graph = verify(apply_precision(gpt_graph(), narrow))
    for node in graph.nodes:
        found = {t.dtype for v in node.operands if (t := graph.type_of(v)).is_float}
        if node.op is CAST or not found:
            continue
        if node.op.precision is Precision.NARROW:
            assert found == {narrow}, node
        elif node.op.precision is Precision.WIDEN:
            assert found == {dtypes.float32}, node
    assert operand_dtypes(graph, "contract") == {narrow}
    assert operand_dtypes(graph, "layer_norm") == {dtypes.float32}
    assert operand_dtypes(graph, "cross_entropy") == {dtypes.float32}
    # The residual stream follows: the embedding is narrow, and so are the sums.
    assert operand_dtypes(graph, "add") == {narrow}


@pytest.mark.parametrize("narrow", NARROW, ids=str)
def test_the_interface_keeps_its_types(narrow: DType) -> None:
    before, after = gpt_graph(), apply_precision(gpt_graph(), narrow)
    assert after.output_types == before.output_types
    for name, position in before.leaves.items():
        assert after.nodes[after.leaves[name]].types == before.nodes[position].types


def test_a_parameter_is_cast_once_however_often_it_is_read() -> None:
    with isolated_tracing("twice") as trace:
        w, x = trace.leaf(PARAMETER, "w", Spec((3, 3))), trace.input("x", Spec((2, 3)))
        graph = trace.finish([(x @ w) @ w])
    narrow = apply_precision(graph, dtypes.bfloat16)
    w_at = narrow.leaves["w"]
    casts = [n for n in narrow.nodes if n.op is CAST and n.operands[0].node == w_at]
    assert len(casts) == 1


def test_gradients_of_masters_are_float32_and_close() -> None:
    graph = gpt_graph()
    wrt = [n for n in graph.leaves if n not in ("tokens", "targets")]
    rng = np.random.default_rng(0)
    arrays = {
        n: rng.normal(0, 0.3, graph.nodes[i].types[0].shape)
        for n, i in graph.leaves.items()
        if n in wrt
    }
    arrays |= {n: rng.integers(0, 11, (2, 4)) for n in ("tokens", "targets")}
    exact = evaluate_float64(differentiate(graph, wrt).graph, arrays)
    for narrow, tolerance in ((dtypes.bfloat16, 0.05), (dtypes.float16, 0.01)):
        both = verify(differentiate(apply_precision(graph, narrow), wrt).graph)
        assert all(t.dtype is dtypes.float32 for t in both.output_types)
        rounded = evaluate_float64(both, arrays, frozenset([narrow]))
        norm = np.sqrt(sum((g**2).sum() for g in exact[1:]))
        error = np.sqrt(
            sum(((a - b) ** 2).sum() for a, b in zip(exact[1:], rounded[1:], strict=True))
        )
        assert 0 < error < tolerance * norm
        # Without rounding a cast is the identity: the narrow graph means the same.
        unrounded = evaluate_float64(both, arrays)
        np.testing.assert_allclose(unrounded[0], exact[0], rtol=1e-12)


def test_narrowing_does_not_change_the_meaning() -> None:
    graph = td.trace(lambda x, w: td.softmax(td.relu(x @ w) * 0.1 + 1), Spec((3, 4)), Spec((4, 5)))
    assert equal_graphs(graph, apply_precision(graph, dtypes.bfloat16))


def test_float16_overflow_shows_when_rounded() -> None:
    graph = apply_precision(td.trace(lambda x: x @ x, Spec((1, 1))), dtypes.float16)
    (exact,) = evaluate_float64(graph, {"x": [[300.0]]})
    (rounded,) = evaluate_float64(graph, {"x": [[300.0]]}, frozenset([dtypes.float16]))
    assert exact == 90000.0
    assert np.isinf(rounded)


def test_float32_and_float64_change_nothing() -> None:
    graph = gpt_graph()
    assert apply_precision(graph, dtypes.float32) is graph
    with pytest.raises(td.ArgumentError, match="int32 is not a float"):
        apply_precision(graph, dtypes.int32)


def test_integers_and_chosen_dtypes_are_left_alone() -> None:
    def function(x, i):
        wide = x.astype(td.float64) * 2.0
        return wide, i + 1, (x @ x).astype(td.float32)

    graph = td.trace(function, Spec((2, 2)), Spec((3,), td.int32))
    narrow = verify(apply_precision(graph, dtypes.bfloat16))
    assert narrow.output_types == graph.output_types
    assert operand_dtypes(narrow, "mul") == {dtypes.float64}


def test_bodies_are_narrowed_inside() -> None:
    def function(x, w):
        y = td.checkpoint(lambda a: td.tanh(a @ w))(x)
        return td.scan(lambda c, r: (td.tanh(c @ w + r), c), y[0], y)[1]

    graph = td.trace(function, Spec((2, 2)), Spec((2, 2)))
    narrow = verify(apply_precision(graph, dtypes.bfloat16))
    assert narrow.output_types == graph.output_types
    bodies = [n.attributes.body for n in narrow.nodes if n.op.name in ("call", "scan")]
    assert all(operand_dtypes(b, "contract") == {dtypes.bfloat16} for b in bodies)
    verify(narrow)
    arrays = {"x": np.eye(2), "w": np.full((2, 2), 0.3)}
    exact, found = (evaluate_float64(g, arrays)[0] for g in (graph, narrow))
    np.testing.assert_allclose(exact, found)


def test_spec_of_bfloat16_arrays() -> None:
    assert TensorType((2,), dtypes.bfloat16).nbytes == 4
