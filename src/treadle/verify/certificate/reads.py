"""Ops that move, sum or order elements, in the few forms of them that a certificate has.

An element of a move is the first operand's that is read there, or else a value; one of a reduction
is a sum (a product, a maximum, a minimum), over further variables, of products of what is read.
What is read is said by the flat index into the operand, an affine function of variables: "0", "1",
… are the result's axes, then those summed over, and "flat" is the result's own flat index. Trailing
operands are indices: what they hold, clamped, is data in the addresses of others. What orders
elements gives the first ones of lines and their places.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from numbers import Integral
from typing import Any, NamedTuple

from treadle.base.shapes import Shape
from treadle.ir.literal import Number
from treadle.ir.op import Attributes, Op
from treadle.ir.ops import indexing, linear, reductions, shaping
from treadle.ir.types import TensorType

Index = list[Any]  # the offset, then pairs of a factor and a variable or an atom
Guard = tuple[Index, int, int]
Read = tuple[Sequence[Guard], Index]
Types = tuple[TensorType, ...]


class Reads(NamedTuple):
    """What every operand of a use is read at, and under which bounds; operands by position."""

    shape: Shape
    reads: tuple[Read, ...]
    over: Shape = ()
    value: Number = 0
    operands: tuple[int, ...] = (0,)
    indices: int = 0  # how many operands at the end are
    op: str = "move"

    def record(self, name: str, dtype: str, value: Any) -> dict[str, Any]:
        reads = [[[list(g) for g in guards], address] for guards, address in self.reads]
        return {
            "name": name, "shape": plain(list(self.shape)), "over": plain(list(self.over)),
            "reads": plain(reads), "indices": self.indices, "value": value, "dtype": dtype,
        }  # fmt: skip


def plain(record: Any) -> Any:
    """Lists with integers as a file has them: attributes may have NumPy's, or a tensor's size."""
    if isinstance(record, list):
        return [plain(part) for part in record]
    is_integer = isinstance(record, Integral) and not isinstance(record, bool)
    return int(record) if is_integer else record


def var(axis: int, factor: int = 1, offset: int = 0) -> Index:
    return [offset, [factor, str(axis)]]


def plus(*indices: Index) -> Index:
    return [sum(i[0] for i in indices), *(term for i in indices for term in i[1:])]


def times(index: Index, factor: int) -> Index:
    return [index[0] * factor, *([f * factor, atom] for f, atom in index[1:])]


def address(shape: Shape, index: Sequence[Index]) -> Index:
    """The flat index; an axis of one element says nothing."""
    steps = (math.prod(shape[i + 1 :]) for i in range(len(shape)))
    parts = zip(index, steps, shape, strict=True)
    return plus([0], *(times(i, step) for i, step, n in parts if n != 1))


def data(operand: int, size: int) -> Index:
    """What an operand holds, between 0 and size − 1."""
    return [0, [1, ["data", str(operand), size]]] if size > 1 else [0]


def _reshape(a: shaping.Reshape, x: TensorType) -> Reads:
    return Reads(a.shape, (([], [0, [1, "flat"]]),))


def _permute(a: shaping.Permute, x: TensorType) -> Reads:
    index = [var(a.axes.index(i)) for i in range(x.rank)]
    return Reads(tuple(x.shape[i] for i in a.axes), (([], address(x.shape, index)),))


def _broadcast(a: shaping.Broadcast, x: TensorType) -> Reads:
    return Reads(a.shape, (([], address(x.shape, [var(i) for i in a.axes])),))


def _slice(a: shaping.Slice, x: TensorType) -> Reads:
    parts = list(zip(a.starts, a.stops, a.strides, strict=True))
    index = [var(i, step, start) for i, (start, _, step) in enumerate(parts)]
    shape = tuple(-(-(stop - start) // step) for start, stop, step in parts)
    return Reads(shape, (([], address(x.shape, index)),))


def _flip(a: shaping.Flip, x: TensorType) -> Reads:
    index = [var(i, -1, n - 1) if i in a.axes else var(i) for i, n in enumerate(x.shape)]
    return Reads(x.shape, (([], address(x.shape, index)),))


def _window(a: linear.Window, x: TensorType) -> Reads:
    index = [var(i) for i in range(x.rank)]
    for k, (axis, stride, apart) in enumerate(zip(a.axes, a.strides, a.dilations, strict=True)):
        index[axis] = plus(var(axis, stride), var(x.rank + k, apart))
    return Reads(a.windowed_shape(x.shape), (([], address(x.shape, index)),))


def _pad(a: shaping.Pad, x: TensorType) -> Reads:
    index, guards, shape = list[Index](), list[Guard](), list[int]()
    for i, (n, low, high, gap) in enumerate(zip(x.shape, a.low, a.high, a.interior, strict=True)):
        place = var(i, 1, -low)
        shape.append(low + n + max(n - 1, 0) * gap + high)
        if gap:
            guards.append(([0, [1, ["remainder", place, gap + 1]]], 0, 1))
            place = [0, [1, ["quotient", place, gap + 1]]]
        if low or high or not n:
            guards.append((place, 0, n))
        index.append(place)
    return Reads(tuple(shape), ((guards, address(x.shape, index)),), value=a.value)


def _concat(a: shaping.Concat, *xs: TensorType) -> Reads:
    reads, first = list[Read](), 0
    for x in xs:
        index = [var(i, 1, -first if i == a.axis else 0) for i in range(x.rank)]
        reads.append(([(index[a.axis], 0, x.shape[a.axis])], address(x.shape, index)))
        first += x.shape[a.axis]
    shape = tuple(first if i == a.axis else n for i, n in enumerate(xs[0].shape))
    return Reads(shape, tuple(reads), operands=tuple(range(len(xs))))


def _starts(first: int, shape: Shape, sizes: Shape) -> list[Index]:
    """Where a window of some sizes begins: operands from `first` on, one for each axis."""
    return [data(first + i, n - k + 1) for i, (n, k) in enumerate(zip(shape, sizes, strict=True))]


def _dynamic_slice(a: shaping.DynamicSlice, x: TensorType, at: TensorType) -> Reads:
    starts = _starts(1, x.shape, a.sizes)
    index = [plus(var(i), start) for i, start in enumerate(starts)]
    reads: list[Read] = [([], address(x.shape, index)), *(([], [i]) for i in range(x.rank))]
    return Reads(a.sizes, tuple(reads), operands=(0, *[1] * x.rank), indices=x.rank)


def _dynamic_update(a: shaping.DynamicUpdate, x: TensorType, new: TensorType, _: Any) -> Reads:
    starts = _starts(2, x.shape, new.shape)
    index = [plus(var(i), times(start, -1)) for i, start in enumerate(starts)]
    guards = [(i, 0, n) for i, n in zip(index, new.shape, strict=True)]
    own = [0, [1, "flat"]]
    reads = (guards, address(new.shape, index)), ([], own), *(([], [i]) for i in range(x.rank))
    return Reads(x.shape, reads, operands=(1, 0, *[2] * x.rank), indices=x.rank)


def _gather(a: indexing.Gather, x: TensorType, chosen: TensorType) -> Reads:
    count = chosen.rank - a.batch
    before, after = [var(i) for i in range(a.axis)], range(a.axis + 1, x.rank)
    index = [*before, data(1, x.shape[a.axis]), *(var(i + count - 1) for i in after)]
    by = [*before[: a.batch], *(var(a.axis + i) for i in range(count))]
    shape = x.shape[: a.axis] + chosen.shape[a.batch :] + x.shape[a.axis + 1 :]
    reads: list[Read] = [([], address(x.shape, index)), ([], address(chosen.shape, by))]
    return Reads(shape, tuple(reads), operands=(0, 1), indices=1)


# Sums


def _reduce(op: str) -> Callable[..., Reads]:
    def reads(a: reductions.Reduce, x: TensorType) -> Reads:
        kept = [i for i in range(x.rank) if i not in a.axes]
        order = [*kept, *a.axes]
        flat = address(x.shape, [var(order.index(i)) for i in range(x.rank)])
        shape, over = (tuple(x.shape[i] for i in axes) for axes in (kept, a.axes))
        return Reads(shape, (([], flat),), over, op=op)

    return reads


def _cumsum(a: reductions.Cumulate, x: TensorType) -> Reads:
    index = [var(x.rank) if i == a.axis else var(i) for i in range(x.rank)]
    sign = -1 if a.reverse else 1
    behind = plus(var(a.axis, sign), var(x.rank, -sign)), 0, x.shape[a.axis]
    reads = (([behind], address(x.shape, index)),)
    return Reads(x.shape, reads, (x.shape[a.axis],), op="reduce_sum")


def _contract(a: linear.Contraction, x: TensorType, y: TensorType) -> Reads:
    lx, ly, result = a.labels
    order = result + "".join(c for c in lx if c not in result)
    sizes = dict(zip(lx + ly, x.shape + y.shape, strict=True))
    sides = ((lx, x.shape), (ly, y.shape))
    flat = (address(shape, [var(order.index(c)) for c in labels]) for labels, shape in sides)
    over = tuple(sizes[c] for c in order[len(result) :])
    shape = tuple(sizes[c] for c in result)
    return Reads(shape, tuple(([], at) for at in flat), over, operands=(0, 1), op="reduce_sum")


def _unwindow(a: linear.Unwindow, x: TensorType) -> Reads:
    """Each element is the sum of those of the windows that it lies in."""
    window, rank, guards = a.window, len(a.shape), list[Guard]()
    index = [var(i) for i in range(x.rank)]
    counts = zip(window.starts(a.shape), window.strides, window.dilations, strict=True)
    for k, (axis, (count, stride, apart)) in enumerate(zip(window.axes, counts, strict=True)):
        place = plus(var(axis), var(rank + k, -apart))
        if stride > 1:
            guards.append(([0, [1, ["remainder", place, stride]]], 0, 1))
            place = [0, [1, ["quotient", place, stride]]]
        guards.append((place, 0, count))
        index[axis] = place
    return Reads(a.shape, ((guards, address(x.shape, index)),), window.sizes, op="reduce_sum")


_FORMS: dict[Op, Callable[..., Reads]] = {
    shaping.RESHAPE: _reshape, shaping.PERMUTE: _permute, shaping.BROADCAST: _broadcast,
    shaping.SLICE: _slice, shaping.FLIP: _flip, linear.WINDOW: _window, shaping.PAD: _pad,
    shaping.CONCAT: _concat, shaping.DYNAMIC_SLICE: _dynamic_slice, indexing.GATHER: _gather,
    shaping.DYNAMIC_UPDATE: _dynamic_update, reductions.CUMSUM: _cumsum,
    linear.CONTRACT: _contract, linear.UNWINDOW: _unwindow,
    **{op: _reduce(op.name) for op in (reductions.REDUCE_SUM, reductions.REDUCE_PROD,
                                       reductions.REDUCE_MAX, reductions.REDUCE_MIN)},
}  # fmt: skip


def is_read(op: Op) -> bool:
    """Whether an op is recorded by what it reads."""
    return op in _FORMS


def reads_of(op: Op, attributes: Attributes, operands: Types) -> Reads:
    """Requires `is_read`."""
    return _FORMS[op](attributes, *operands)


ORDERS = frozenset([reductions.ARGMAX, reductions.ARGMIN, reductions.SORT, reductions.TOP_K])


def order_record(op: Op, a: Any, x: TensorType) -> dict[str, Any]:
    """An op that orders: the first of each line, of elements a step apart, or all of them."""
    length, step = x.shape[a.axis], math.prod(x.shape[a.axis + 1 :])
    is_arg = isinstance(a, reductions.ArgReduce)
    asked = 1 if is_arg else getattr(a, "k", length)
    kept = [] if is_arg else [asked]
    is_down = getattr(a, "descending", getattr(a, "largest", op is reductions.ARGMAX))
    return {
        "name": op.name, "shape": plain([*x.shape[: a.axis], *kept, *x.shape[a.axis + 1 :]]),
        "step": int(step), "length": int(length), "asked": int(asked), "descending": is_down,
        "places": [True] if is_arg else [False, True],
    }  # fmt: skip
