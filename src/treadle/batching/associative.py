"""`associative_scan`: running combinations along an axis, in a depth that is its logarithm."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from treadle.base import trees
from treadle.base.errors import ArgumentError, ShapeError
from treadle.base.trees import Tree
from treadle.batching.vmap import vmap
from treadle.frontend.control import unchanged
from treadle.frontend.functions.shaping import axis_of, concat, flip, moveaxis, reshape, slice_along
from treadle.frontend.functions.shaping import stack as stack_of
from treadle.frontend.tensor import Tensor
from treadle.frontend.tracing import tensors_of

Combine = Callable[[Sequence[Tensor], Sequence[Tensor]], list[Tensor]]


def associative_scan(
    combine_fn: Callable[[Tree, Tree], Tree], xs: Tree, dim: int = 0, reverse: bool = False
) -> Tree:
    """x₀, x₀∘x₁, x₀∘x₁∘x₂, … along an axis, where ∘ is `combine_fn`, which must be associative.

    It is written for two elements, trees as `xs` without the axis, and is applied to many at once
    by `td.vmap`. The depth is the logarithm of the length, the work about twice it. `reverse`
    starts at the end: xₙ, xₙ∘xₙ₋₁, ….

    Shapes: (…, n, …) → the same.
    """
    (given,) = tensors_of([xs])
    leaves, structure = trees.flatten(given)
    axes = [axis_of("associative_scan", dim, x) for x in leaves]
    _check_lengths(leaves, axes)
    rows = [moveaxis(x, axis, 0) for x, axis in zip(leaves, axes, strict=True)]

    def combine(first: Sequence[Tensor], second: Sequence[Tensor]) -> list[Tensor]:
        return trees.flatten(many(structure.rebuild(first), structure.rebuild(second)))[0]

    def checked(first: Tree, second: Tree) -> Tree:
        found = combine_fn(first, second)
        given = trees.flatten(first)[0]
        return structure.rebuild(unchanged("associative_scan", "element", found, given, structure))

    many = vmap(checked)
    rows = [flip(x, 0) for x in rows] if reverse else rows
    found = _running(combine, rows)
    found = [flip(x, 0) for x in found] if reverse else found
    return structure.rebuild(moveaxis(x, 0, axis) for x, axis in zip(found, axes, strict=True))


def _check_lengths(leaves: Sequence[Tensor], axes: Sequence[int]) -> None:
    if not leaves:
        raise ArgumentError("associative_scan", "xs has no tensors", "Give one, or a tree of them.")
    lengths = {x.shape[a] for x, a in zip(leaves, axes, strict=True)}
    if len(lengths) > 1:
        shown = ", ".join(f"{x.type} along {a}" for x, a in zip(leaves, axes, strict=True))
        raise ShapeError("associative_scan", f"lengths differ: {shown}", "They must be equal.")


def _running(combine: Combine, rows: list[Tensor]) -> list[Tensor]:
    """Pairs of neighbours are combined, their running combinations found, and the others from them.

    Those of pairs end at the odd rows; each even row comes after one of them.
    """
    n = rows[0].shape[0]
    if n < 2:
        return rows
    pairs = combine(
        [slice_along(x, 0, 0, n - 1, 2) for x in rows], [slice_along(x, 0, 1, n, 2) for x in rows]
    )
    odd = _running(combine, pairs)
    heads = [slice_along(x, 0, 0, 1) for x in rows]
    if n == 2:
        return [concat([head, x]) for head, x in zip(heads, odd, strict=True)]
    before = [slice_along(x, 0, 0, (n - 1) // 2) for x in odd]
    later = combine(before, [slice_along(x, 0, 2, n, 2) for x in rows])
    even = [concat([head, x]) for head, x in zip(heads, later, strict=True)]
    return [_interleaved(x, y) for x, y in zip(even, odd, strict=True)]


def _interleaved(even: Tensor, odd: Tensor) -> Tensor:
    """Rows in turns, an even one first; there may be one more of them."""
    n = odd.shape[0]
    paired = stack_of([slice_along(even, 0, 0, n), odd], 1)
    whole = reshape(paired, (2 * n, *odd.shape[1:]))
    return concat([whole, slice_along(even, 0, n, n + 1)]) if even.shape[0] > n else whole
