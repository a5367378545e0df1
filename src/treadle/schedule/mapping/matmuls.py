"""Standalone matmuls as loops, where no library computes them."""

from __future__ import annotations

from dataclasses import replace

from treadle.base import dtypes
from treadle.base.dtypes import DType
from treadle.kernel.index import Index, Var, variable
from treadle.kernel.nodes import (
    Accumulate,
    Apply,
    Convert,
    Kernel,
    Let,
    Literal,
    Load,
    Local,
    Matrix,
    Role,
    Store,
    Value,
    standalone_matmul,
)
from treadle.schedule.mapping.groups import nest


def as_loops(kernel: Kernel) -> Kernel:
    """The kernel of a matmul with its sums written out, in the dtype that it sums in."""
    found = standalone_matmul(kernel)
    assert found is not None, f"{kernel.name} is no matmul"
    batch, matmul = found
    types = {b.name: b.dtype for b in kernel.buffers}
    into = types[matmul.target.buffer]
    wide = dtypes.float32 if into.is_narrow else into
    row = Var("row", matmul.target.rows.count)
    column = Var("column", matmul.target.columns.count)
    depth = Var("depth", matmul.left.columns.count)

    def read(buffer: str, index: Index) -> Value:
        return _as(Load(buffer, index, types[buffer]), wide)

    left = read(matmul.left.buffer, _index(matmul.left, row, depth))
    right = read(matmul.right.buffer, _index(matmul.right, depth, column))
    step = Accumulate("sum", "add", Apply("mul", (left, right), wide))
    at = _index(matmul.target, row, column)
    total: Value = Local("sum", wide)
    if matmul.bias is not None:
        total = Apply("add", (total, read(matmul.bias, variable(column))), wide)
    if matmul.adds:
        total = Apply("add", (read(matmul.target.buffer, at), total), wide)
    body = [
        Let("sum", Literal(0, wide)),
        *nest([depth], Role.SEQUENTIAL, [step]),
        Store(matmul.target.buffer, at, _as(total, into)),
    ]
    loops = nest([*batch, row, column], Role.PARALLEL, body)
    return replace(kernel, body=loops, is_standalone=False)


def _as(value: Value, dtype: DType) -> Value:
    return value if value.dtype is dtype else Convert(value, dtype)


def _index(matrix: Matrix, row: Var, column: Var) -> Index:
    assert not matrix.rows.listed + matrix.columns.listed, "a GPU's matrices have strides"
    return (
        matrix.index + variable(row) * matrix.rows.stride + variable(column) * matrix.columns.stride
    )
