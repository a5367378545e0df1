"""Indexing, gathering and scattering."""

from __future__ import annotations

from types import EllipsisType
from typing import Any

import numpy as np

from treadle.base import dtypes
from treadle.base.errors import ArgumentError, DTypeError, IndexRangeError, ShapeError
from treadle.base.shapes import Shape, inverse_permutation, size_of
from treadle.frontend.coerce import align, as_tensor
from treadle.frontend.coerce import cast as cast_to
from treadle.frontend.functions.arithmetic import ne, stop_gradient, where
from treadle.frontend.functions.shaping import (
    axis_of,
    fitted,
    flip,
    integer_of,
    permute,
    reshape,
    slice_along,
    unsqueeze,
)
from treadle.frontend.scopes import bind1
from treadle.frontend.spelling import takes_dim
from treadle.frontend.tensor import Operand, Placeholder, Tensor
from treadle.ir import composites as c
from treadle.ir.op import NONE
from treadle.ir.ops import indexing as i
from treadle.ir.types import as_dtype


def _indices(name: str, indices: Operand, size: int, what: str) -> Tensor:
    """Integer indices; constants are checked against the axis now."""
    if not isinstance(indices, (Tensor, Placeholder)):
        array = np.asarray(indices)
        if array.size == 0:
            array = array.astype(np.int32)
        if array.dtype.kind not in "iu":
            raise DTypeError(
                name, f"the indices have the dtype {array.dtype}", "Indices are integers."
            )
        if array.size and not (-size <= array.min() and array.max() < size):
            worst = array.min() if array.min() < -size else array.max()
            raise IndexRangeError(
                name,
                f"index {worst} is outside {what} of {size} elements",
                f"Indices lie between {-size} and {size - 1}." if size else "It has no elements.",
            )
        indices = np.where(array < 0, array + size, array).astype(np.int32)
    tensor = as_tensor(indices)
    if not tensor.dtype.is_integer:
        raise DTypeError(
            name,
            f"the indices are {tensor.type}, not integers",
            "Cast them with .astype(td.int32).",
        )
    return tensor


@takes_dim
def take(x: Operand, indices: Operand, axis: int = 0) -> Tensor:
    """Entries along an axis, the indices' axes in its place: (A, C), (n, m) → (n, m, C).

    torch.take counts flattened elements: it is `take(x.reshape(-1), indices)`.
    """
    x = as_tensor(x)
    at = axis_of("take", axis, x)
    return bind1(i.GATHER, i.Gather(at), x, _indices("take", indices, x.shape[at], f"axis {axis}"))


@takes_dim
def take_along_axis(x: Operand, indices: Operand, axis: int) -> Tensor:
    """One entry along `axis` for each index, as torch.gather: → the indices' shape."""
    x = as_tensor(x)
    at = axis_of("take_along_axis", axis, x)
    index = _indices("take_along_axis", indices, x.shape[at], f"axis {axis}")
    others = [n for a, n in enumerate(x.shape) if a != at]
    if index.ndim != x.ndim or [n for a, n in enumerate(index.shape) if a != at] != others:
        raise ShapeError(
            "take_along_axis",
            f"indices {index.type} for {x.type}",
            f"All axes but {axis} must have equal sizes.",
        )
    order = (*(a for a in range(x.ndim) if a != at), at)
    last = x.ndim - 1
    taken = bind1(i.GATHER, i.Gather(last, last), permute(x, order), permute(index, order))
    return permute(taken, inverse_permutation(order))


@takes_dim
def scatter_add(x: Operand, indices: Operand, updates: Operand, axis: int = 0) -> Tensor:
    """x with updates added at indices along an axis: the counterpart of `take`. Repeats add up.

    x (A, C), indices (n,), updates (n, C) → (A, C) for axis 0.
    """
    x = as_tensor(x)
    at = axis_of("scatter_add", axis, x)
    index = _indices("scatter_add", indices, x.shape[at], f"axis {axis}")
    given = fitted("scatter_add", updates, x)
    expected = x.shape[:at] + index.shape + x.shape[at + 1 :]
    if given.shape != expected:
        raise ShapeError(
            "scatter_add",
            f"updates {given.type} into {x.type} at indices {index.type}",
            f"They must be {expected}.",
        )
    return x + bind1(i.SCATTER_ADD, i.ScatterAdd(at, x.shape[at]), given, index)


@takes_dim
def one_hot(indices: Operand, classes: int, dtype: object = dtypes.float32) -> Tensor:
    """A new last axis with 1 at the index and 0 elsewhere: (…) → (…, classes)."""
    index = as_tensor(indices)
    if not index.dtype.is_integer:
        raise DTypeError(
            "one_hot", f"the indices are {index.type}, not integers", "Cast them to int32."
        )
    count = integer_of("one_hot", "the number of classes", classes)
    if count < 0:
        raise ArgumentError("one_hot", f"{count} classes", "Give 0 or more.")
    return bind1(c.ONE_HOT, c.OneHot(count, as_dtype(dtype)), index)


@takes_dim
def embedding(indices: Operand, weight: Operand, padding_idx: int | None = None) -> Tensor:
    """Rows of a table: indices (…), weight (rows, width) → (…, width), as F.embedding.

    The row `padding_idx` gets no gradient.
    """
    table = as_tensor(weight)
    if padding_idx is not None:
        count = table.shape[0] if table.ndim else 0
        at = integer_of("embedding", "padding_idx", padding_idx)
        if not -count <= at < count:
            raise IndexRangeError(
                "embedding",
                f"padding_idx = {at} of {count} rows",
                f"It lies between {-count} and {count - 1}.",
            )
        rows = embedding(indices, table)
        from_table = unsqueeze(ne(indices, at % count), -1)
        return where(from_table, rows, stop_gradient(rows))
    if table.ndim != 2:
        raise ShapeError("embedding", f"the table is {table.type}", "It is (rows, width).")
    if not isinstance(indices, (Tensor, Placeholder)):
        given = np.asarray(indices)
        least = given.min(initial=0) if given.dtype.kind in "iu" else 0
        if least < 0:
            raise IndexRangeError("embedding", f"index {least} is negative", "Rows count from 0.")
    index = _indices("embedding", indices, table.shape[0], "a table")
    return bind1(c.EMBEDDING, NONE, table, index)


def getitem(x: Operand, index: Any) -> Tensor:
    """x[index] with ints, slices, ..., None, integer tensors and masks that are known.

    Where the two differ (x[0, :, [1, 2]]) it is PyTorch: ints are taken before integer tensors.
    """
    x = as_tensor(x)
    x, plan = _basic(x, _without_masks(x, index if isinstance(index, tuple) else (index,)))
    advanced = [(axis, item) for axis, item in plan if item is not None]
    if not advanced:
        return x
    return _advanced(x, advanced)


Plan = list[tuple[int, Any]]


def _basic(x: Tensor, items: tuple[Any, ...]) -> tuple[Tensor, Plan]:
    """Apply ints, slices and None; what is left are (axis, integer tensor) pairs."""
    items = _expand_ellipsis(x, items)
    plan: Plan = []
    shape: list[int] = []
    axis = 0
    for item in items:
        if item is None:
            shape.append(1)
            plan.append((len(shape) - 1, None))
            continue
        if isinstance(item, (int, np.integer)) and not isinstance(item, bool):
            x = _pick(x, axis, int(item))
        elif isinstance(item, slice):
            x = _slice(x, axis, item)
            shape.append(x.shape[axis])
        else:
            shape.append(x.shape[axis])
            plan.append((len(shape) - 1, item))
        axis += 1
    return reshape(x, tuple(shape)), plan


def _mask_shape(item: Any) -> Shape | None:
    """The shape of a bool mask; None for other items of an index."""
    if isinstance(item, Tensor):
        return item.shape if item.dtype is dtypes.bool_ and item.shape else None
    if not isinstance(item, (np.ndarray, list)):
        return None
    array = np.asarray(item)
    return array.shape if array.dtype == bool and array.shape else None


def _without_masks(x: Tensor, items: tuple[Any, ...]) -> tuple[Any, ...]:
    """Masks as the positions where they are True, one list of integers for each of their axes."""
    items = tuple(item.tensor() if isinstance(item, Placeholder) else item for item in items)
    shapes = [_mask_shape(item) for item in items]
    if not any(shapes):
        return items
    taken = [_axes_taken(item, shape) for item, shape in zip(items, shapes, strict=True)]
    dots = [k for k, item in enumerate(items) if isinstance(item, EllipsisType)]
    found: list[Any] = []
    for k, (item, shape) in enumerate(zip(items, shapes, strict=True)):
        if shape is None:
            found.append(item)
            continue
        is_late = any(at < k for at in dots)
        axis = max(0, x.ndim - sum(taken[k:])) if is_late else sum(taken[:k])
        found += _positions(x, axis, item, shape)
    return tuple(found)


def _axes_taken(item: Any, shape: Shape | None) -> int:
    if shape is not None:
        return len(shape)
    return 0 if item is None or isinstance(item, EllipsisType) else 1


def _positions(x: Tensor, axis: int, mask: Any, shape: Shape) -> tuple[np.ndarray, ...]:
    """Where a mask from an axis on is True; its values must be there when the model is traced."""
    if x.shape[axis : axis + len(shape)] != shape:
        raise ShapeError(
            "index",
            f"a mask of shape {shape} for {x.type}, from axis {axis} on",
            "A mask has the sizes of the axes that it selects from.",
        )
    if isinstance(mask, Tensor) and not isinstance(mask.handle, np.ndarray):
        raise DTypeError(
            "index",
            "a bool mask selects a number of elements that is not known before it runs",
            "Use td.where(mask, x, 0), or multiply by the mask.",
        )
    return np.nonzero(np.asarray(mask))


def _expand_ellipsis(x: Tensor, items: tuple[Any, ...]) -> tuple[Any, ...]:
    used = sum(1 for item in items if item is not None and not isinstance(item, EllipsisType))
    dots = sum(1 for item in items if isinstance(item, EllipsisType))
    if used > x.ndim or dots > 1:
        raise IndexRangeError(
            "index", f"{used} indices for {x.type}", "Give at most one per axis, and one '...'."
        )
    rest = (slice(None),) * (x.ndim - used)
    if not dots:
        return (*items, *rest)
    at = next(k for k, item in enumerate(items) if isinstance(item, EllipsisType))
    return (*items[:at], *rest, *items[at + 1 :])


def _pick(x: Tensor, axis: int, index: int) -> Tensor:
    n = x.shape[axis]
    if not -n <= index < n:
        raise IndexRangeError(
            "index",
            f"index {index} is outside axis {axis} of {x.type}",
            f"Indices lie between {-n} and {n - 1}." if n else "It has no elements.",
        )
    at = index % n
    return slice_along(x, axis, at, at + 1)


def _slice(x: Tensor, axis: int, item: slice) -> Tensor:
    for part in (item.start, item.stop, item.step):
        if isinstance(part, Tensor) and part.scope.depth > 0:
            raise ArgumentError(
                "index",
                f"a slice bound is a traced tensor: {part.type}",
                "Use td.dynamic_slice(x, starts, sizes): sizes are static.",
            )
        if part is not None:
            integer_of("index", "a slice bound", part)
    if item.step == 0:
        raise ArgumentError("index", "the step of a slice is 0", "Give a step up or down.")
    start, stop, step = item.indices(x.shape[axis])
    if step > 0:
        return slice_along(x, axis, start, max(start, stop), step)
    count = len(range(start, stop, step))
    first = start + (count - 1) * step if count else 0
    return flip(slice_along(x, axis, first, start + 1 if count else 0, -step), axis)


def _advanced(x: Tensor, chosen: Plan) -> Tensor:
    """Integer tensors on one or more axes; they broadcast together, as in NumPy."""
    axes = [axis for axis, _ in chosen]
    indices = [wrapped(x, axis, item) for axis, item in chosen]
    if len(indices) == 1:
        return bind1(i.GATHER, i.Gather(axes[0]), x, indices[0])
    indices = list(align("index", *indices))
    neighbours = axes == list(range(axes[0], axes[0] + len(axes)))
    place = axes[0] if neighbours else 0
    rest = [a for a in range(x.ndim) if a not in axes]
    order = [*rest[:place], *axes, *rest[place:]]
    sizes = [x.shape[a] for a in axes]
    moved = permute(x, order)
    flat = reshape(moved, (*moved.shape[:place], size_of(sizes), *moved.shape[place + len(axes) :]))
    linear = indices[0]
    for index, n in zip(indices[1:], sizes[1:], strict=True):
        linear = linear * n + index
    return bind1(i.GATHER, i.Gather(place), flat, linear)


def wrapped(x: Tensor, axis: int, item: Any, name: str = "index") -> Tensor:
    """An index tensor in range: negative entries count from the end."""
    if isinstance(item, Placeholder):
        item = item.tensor()
    is_bool = (
        item.dtype is dtypes.bool_ if isinstance(item, Tensor) else np.asarray(item).dtype == bool
    )
    if is_bool:
        raise DTypeError(
            name,
            f"{item!r} is a bool, not a place on an axis",
            "Use td.where(mask, x, 0), or a mask with the sizes of the axes it selects from.",
        )
    if isinstance(item, (str, dict)):
        raise ArgumentError(
            name, f"{item!r} is not an index", "Use ints, slices, ..., None or integer tensors."
        )
    index = _indices(name, item, x.shape[axis], f"axis {axis} of {x.type}")
    if not isinstance(item, Tensor):
        return index
    # At least int32: 8 bits may hold the entries, but not the size of the axis.
    signed = cast_to(index, dtypes.promote(index.dtype, dtypes.int32))
    return where(signed < 0, signed + x.shape[axis], signed)
