"""Stacks of matrices: what the functions take, in one shape and a dtype that is wide enough."""

from __future__ import annotations

import math
from collections.abc import Callable

from treadle.base.dtypes import DType, float32
from treadle.base.errors import ShapeError
from treadle.base.shapes import Shape, broadcast_shapes
from treadle.base.trees import Tree, map_leaves
from treadle.frontend.coerce import broadcast_to, cast
from treadle.frontend.functions.arithmetic import as_real, where
from treadle.frontend.functions.dynamic import dynamic_slice
from treadle.frontend.functions.linear import aligned, matmul
from treadle.frontend.functions.shaping import eye, iota, reshape, squeeze, transpose
from treadle.frontend.tensor import Operand, Tensor


def matrices(name: str, a: Operand, is_square: bool = False) -> Tensor:
    """A tensor of floats whose last two axes are those of matrices."""
    found = as_real(a)
    if found.ndim < 2 or 0 in found.shape[-2:]:
        raise ShapeError(
            name, f"{found.type} is not a stack of matrices", "The last two axes are a matrix."
        )
    if is_square and found.shape[-1] != found.shape[-2]:
        raise ShapeError(
            name,
            f"the matrices of {found.type} are not square",
            "Give as many rows as columns; td.linalg.lstsq and pinv take others.",
        )
    return found


def stacked(a: Tensor) -> Tensor:
    """(batch, rows, columns), narrow floats as float32: rounding adds up over the iterations."""
    wide = cast(a, float32) if a.dtype.is_narrow else a
    return reshape(wide, (math.prod(a.shape[:-2]), *a.shape[-2:]))


def unstacked(x: Tensor, batch: Shape, dtype: DType) -> Tensor:
    """The axes before the matrices again, and the dtype that was given."""
    return cast(reshape(x, (*batch, *x.shape[1:])), dtype)


def mapped(function: Callable[[Tensor], Tree], a: Tensor) -> Tree:
    """A function of (batch, rows, columns), of any stack."""
    batch = a.shape[:-2]
    return map_leaves(lambda x: unstacked(x, batch, a.dtype), function(stacked(a)))


def together(name: str, a: Operand, b: Operand) -> tuple[Tensor, Tensor]:
    """Two stacks in one dtype with one batch: axes of one matrix are repeated."""
    first, second = aligned(matrices(name, a), matrices(name, b))
    batch = broadcast_shapes(first.shape[:-2], second.shape[:-2])
    if batch is None:
        raise ShapeError(
            name,
            f"the batches of {first.type} and {second.type} do not broadcast",
            "Sizes must be equal or 1.",
        )
    both = (broadcast_to(x, (*batch, *x.shape[-2:])) for x in (first, second))
    return next(both), next(both)


def turned(a: Tensor) -> Tensor:
    """Rows as columns."""
    return transpose(a, -2, -1)


def product(*factors: Tensor) -> Tensor:
    """Matrix products, from the left."""
    found = factors[0]
    for factor in factors[1:]:
        found = matmul(found, factor)
    return found


def column(a: Tensor, k: Tensor) -> Tensor:
    """(batch, rows): column k, an index that is data."""
    b, m, _ = a.shape
    return squeeze(dynamic_slice(a, (0, 0, k), (b, m, 1)), 2)


def row(a: Tensor, k: Tensor) -> Tensor:
    """(batch, columns): row k."""
    b, _, n = a.shape
    return squeeze(dynamic_slice(a, (0, k, 0), (b, 1, n)), 1)


def entry(x: Tensor, k: Tensor) -> Tensor:
    """(batch, 1): entry k of each row."""
    return dynamic_slice(x, (0, k), (x.shape[0], 1))


def outer(x: Tensor, y: Tensor) -> Tensor:
    """(batch, m) and (batch, n) to (batch, m, n)."""
    return reshape(x, (*x.shape, 1)) * reshape(y, (y.shape[0], 1, y.shape[1]))


def symmetric(a: Tensor) -> Tensor:
    """The lower triangle, mirrored into the upper one."""
    n = a.shape[-1]
    rows, columns = iota((n, n), 0), iota((n, n), 1)
    return where(rows >= columns, a, turned(a))


def even_part(a: Tensor) -> Tensor:
    """(A + Aᵀ) / 2."""
    return (a + turned(a)) * 0.5


def identity(n: int, like: Tensor) -> Tensor:
    """(batch, n, n) of the identity."""
    return broadcast_to(eye(n, dtype=like.dtype), (like.shape[0], n, n))
