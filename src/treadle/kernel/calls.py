"""Kernels that a library computes, as plain facts for a runtime."""

from __future__ import annotations

from treadle.kernel.launch import LibraryLaunch, MatmulCall, MatrixFacts, Tensor
from treadle.kernel.nodes import Kernel, Matrix, View, library_call_of, standalone_matmul


def call_of(kernel: Kernel) -> LibraryLaunch | None:
    """A kernel that is a library's, with its tensors by argument; None for any other."""
    found = library_call_of(kernel)
    if found is None:
        return None
    positions = {b.name: i for i, b in enumerate(kernel.buffers)}

    def tensor(view: View) -> Tensor:
        at = positions[view.buffer]
        dtype = kernel.buffers[at].dtype.name
        return Tensor(at, dtype, view.start, view.shape, view.strides)

    made, given = (tuple(map(tensor, v)) for v in (found.results, found.operands))
    return LibraryLaunch(found.name, made, given, found.numbers)


def matmul_call_of(kernel: Kernel) -> MatmulCall | None:
    """A kernel that is a batch of matmuls at one stride; None for any other."""
    found = standalone_matmul(kernel)
    if found is None or len(found[0]) > 1:
        return None
    loops, statement = found
    dtypes = {b.name: b.dtype.name for b in kernel.buffers}

    def facts(matrix: Matrix) -> MatrixFacts:
        step = matrix.index.factor_of(loops[0]) if loops else 0
        assert step is not None
        return MatrixFacts(
            dtypes[matrix.buffer],
            matrix.rows.stride,
            matrix.columns.stride,
            step,
            matrix.index.offset,
        )

    if any(m.rows.listed or m.columns.listed for m in statement.matrices):
        return None
    target, left, right = map(facts, statement.matrices)
    m, n = statement.target.rows.count, statement.target.columns.count
    batch = loops[0].extent if loops else 1
    names = [b.name for b in kernel.buffers]
    bias = -1 if statement.bias is None else names.index(statement.bias)
    return MatmulCall(
        m, n, statement.left.columns.count, batch, target, left, right, bias, statement.adds
    )
