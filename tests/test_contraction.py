"""The one description of a contraction: what its axes do, and how operands lie."""

from __future__ import annotations

import pytest

import treadle as td
from treadle.frontend.scopes import bind1
from treadle.ir.graph import Value
from treadle.ir.ops import linear
from treadle.ir.types import TensorType
from treadle.kernel.contraction import (
    Contraction,
    Operand,
    contraction_of,
    oriented,
    size,
    stride_of,
    strided_axis_of,
)
from treadle.kernel.index import Var, flatten, variable
from treadle.kernel.nodes import Load, StridedAxis
from treadle.kernel.target import CPU, GPU, Matmuls

EXTENTS = {"a": 2, "b": 3, "c": 5, "d": 7, "e": 11}


def contraction(spec: str) -> Contraction[Value]:
    inputs = spec.split("->")[0].split(",")
    types = [TensorType(tuple(EXTENTS[c] for c in labels), td.float32) for labels in inputs]
    attributes = linear.Contraction(spec, td.float32)
    graph = td.trace(lambda x, y: [bind1(linear.CONTRACT, attributes, x, y)], *types)
    return contraction_of(graph, next(n for n in graph.nodes if n.op is linear.CONTRACT))


def letters(axes: tuple[Var, ...]) -> str:
    assert all(v.extent == EXTENTS[v.name[1:]] for v in axes)
    return "".join(v.name[1:] for v in axes)


@pytest.mark.parametrize(
    ("spec", "batch", "rows", "columns", "depth", "tiled", "outer"),
    [
        ("ab,bc->ac", "", "a", "c", "b", "c", ""),
        ("ab,cb->ca", "", "a", "c", "b", "", "c"),
        ("abc,acd->abd", "a", "b", "d", "c", "d", "a"),
        ("abc,adce->abde", "a", "b", "de", "c", "de", "a"),
        ("abc,dce->dabe", "", "ab", "de", "c", "e", "d"),
        ("ab,ab->", "", "", "", "ab", "", ""),
    ],
)
def test_axes_by_what_they_do(
    spec: str, batch: str, rows: str, columns: str, depth: str, tiled: str, outer: str
) -> None:
    c = contraction(spec)
    found = [letters(v) for v in (c.batch, c.rows, c.columns, c.depth, c.tiled, c.outer)]
    assert found == [batch, rows, columns, depth, tiled, outer]
    assert c.flops == 2 * size(tuple(dict.fromkeys(c.left.axes + c.right.axes)))


def test_columns_come_last() -> None:
    given = contraction("ab,cb->ca")
    other = given.columns_last
    assert (other.left, other.right) == (given.right, given.left)
    assert letters(other.tiled) == "a"
    assert other.columns_last == other


def test_rows_become_columns() -> None:
    other = contraction("abc,cd->abd").transposed
    assert other is not None
    assert (letters(other.result), letters(other.tiled)) == ("dab", "ab")
    assert letters(other.rows) == "d"
    assert contraction("ab,ab->").transposed is None


def test_loops_of_a_kernel() -> None:
    """Values in place of tensors; a loop that neither operand varies along is of the batch."""
    i, j, k, b = (Var(n, extent) for n, extent in (("i", 4), ("j", 6), ("k", 8), ("b", 2)))
    left = Load("x", flatten([variable(i), variable(k)], [4, 8]), td.float32)
    right = Load("y", flatten([variable(k), variable(j)], [8, 6]), td.float32)
    factors = Operand(left, (i, k), left), Operand(right, (k, j), right)
    c = oriented(*factors, (b, i, j))
    assert (c.batch, c.rows, c.columns, c.depth, c.tiled) == ((b,), (i,), (j,), (k,), (j,))
    assert (c.left.stride(i), c.left.stride(k), c.right.stride(k)) == (8, 1, 6)


def test_a_library_takes_large_ones() -> None:
    c = contraction("ab,bc->ac")
    assert not c.is_for_library(GPU.matmuls)
    assert c.is_for_library(Matmuls(flops_for_library=2 * 2 * 3 * 5, depth_for_library=3))
    assert not c.is_for_library(Matmuls(flops_for_library=1, depth_for_library=4))


def test_strides_of_axes_together() -> None:
    a, b, one = Var("xa", 2), Var("xb", 3), Var("xo", 1)
    rows = flatten([variable(a), variable(b)], [2, 3]) * 5
    assert stride_of(rows, (a, b)) == 5
    assert stride_of(rows, (b, a)) is None
    assert stride_of(rows, (a, one)) == 15
    assert strided_axis_of(rows, (a, b)) == StridedAxis(6, 5)
    assert strided_axis_of(rows, (b, a)) == StridedAxis(6, 0, (0, 15, 5, 20, 10, 25))


def test_blocks_of_rows_grow_with_the_rows() -> None:
    sizes = [CPU.matmuls.block_rows(n) for n in (1, 127, 128, 256, 511, 512)]
    assert sizes == [8, 8, 16, 32, 32, 64]
