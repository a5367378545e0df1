"""Pieces at given places, quarter turns, diagonals of blocks and common shapes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from treadle.base import dtypes
from treadle.base.errors import ArgumentError, AxisError, ShapeError
from treadle.frontend.coerce import as_tensor, broadcast_to, common_dtype, common_shape
from treadle.frontend.coerce import cast as cast_to
from treadle.frontend.functions.arithmetic import eq, where
from treadle.frontend.functions.reductions import any as any_of
from treadle.frontend.functions.shaping import (
    axis_of,
    concat,
    flip,
    integer_of,
    pad,
    reshape,
    slice_along,
    transpose,
    unsqueeze,
)
from treadle.frontend.spelling import takes_dim
from treadle.frontend.tensor import Operand, Tensor


def broadcast_tensors(*tensors: Operand) -> tuple[Tensor, ...]:
    """Tensors expanded to the shape that they broadcast to: (A, 1), (B,) → two of (A, B)."""
    given = tuple(as_tensor(t) for t in tensors)
    if not given:
        raise ArgumentError("broadcast_tensors", "there are no tensors", "Pass at least one.")
    shape = common_shape("broadcast_tensors", given)
    return tuple(broadcast_to(t, shape) for t in given)


@takes_dim
def tensor_split(
    x: Operand, indices_or_sections: int | Sequence[int], axis: int = 0
) -> tuple[Tensor, ...]:
    """Pieces of nearly equal size along an axis, or cut at indices: (5,) → (3,), (2,) for 2."""
    x = as_tensor(x)
    at = axis_of("tensor_split", axis, x)
    n = x.shape[at]
    if isinstance(indices_or_sections, (Sequence, np.ndarray)):
        cuts = [integer_of("tensor_split", "an index", i) for i in indices_or_sections]
        bounds = [slice(a, b).indices(n)[:2] for a, b in pairwise([0, *cuts, n])]
        return tuple(slice_along(x, at, a, max(a, b)) for a, b in bounds)
    count = integer_of("tensor_split", "the number of sections", indices_or_sections)
    if count < 1:
        raise ArgumentError("tensor_split", f"{count} sections", "Give at least 1.")
    size, longer = divmod(n, count)
    ends = [i * size + min(i, longer) for i in range(count + 1)]
    return tuple(slice_along(x, at, a, b) for a, b in pairwise(ends))


def rot90(x: Operand, k: int = 1, dims: Sequence[int] = (0, 1)) -> Tensor:
    """Turned by k quarters from the first axis towards the second: (A, B) → (B, A) for odd k."""
    x = as_tensor(x)
    axes = tuple(dims) if isinstance(dims, Sequence) else ()
    if len(axes) != 2:
        raise AxisError("rot90", f"dims = {dims!r}", "Give two axes.")
    first, second = (axis_of("rot90", a, x) for a in axes)
    if first == second:
        raise AxisError("rot90", f"dims {axes} of {x.type} name one axis twice", "Give two axes.")
    turns = integer_of("rot90", "k", k) % 4
    if turns == 0:
        return x
    if turns == 2:
        return flip(x, (first, second))
    return transpose(flip(x, second if turns == 1 else first), first, second)


def block_diag(*tensors: Operand) -> Tensor:
    """Matrices along the diagonal of one, zeros elsewhere: (A, B), (C, D) → (A + C, B + D).

    Vectors count as rows, numbers as matrices of one element.
    """
    if not tensors:
        raise ArgumentError("block_diag", "there are no tensors", "Pass at least one.")
    dtype = common_dtype(tensors)
    parts = [cast_to(as_tensor(t), dtype) for t in tensors]
    for part in parts:
        if part.ndim > 2:
            raise ShapeError("block_diag", f"{part.type}", "Give matrices, vectors or numbers.")
    blocks = [reshape(p, (1, -1)) if p.ndim < 2 else p for p in parts]
    width, before, rows = sum(b.shape[1] for b in blocks), 0, []
    for block in blocks:
        own = block.shape[1]
        rows.append(pad(block, [(0, 0), (before, width - before - own)]))
        before += own
    return concat(rows, 0)


def isin(elements: Operand, test_elements: Operand, invert: bool = False) -> Tensor:
    """Whether each element is among the test elements, or is not if `invert`: → elements' shape."""
    dtype = common_dtype((elements, test_elements))
    each = cast_to(as_tensor(elements), dtype)
    tests = reshape(cast_to(as_tensor(test_elements), dtype), (-1,))
    found = any_of(eq(unsqueeze(each, -1), tests), -1)
    return where(found, False, True) if invert else cast_to(found, dtypes.bool_)
