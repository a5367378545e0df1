"""Rows of ops that move elements: views, slices, joins, padding."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from treadle.frontend.coerce import cast, literal
from treadle.frontend.functions import images, padding, sequences
from treadle.frontend.functions import shaping as s
from treadle.frontend.functions.arithmetic import where
from treadle.frontend.functions.indexing import getitem, take
from treadle.frontend.scopes import bind1
from treadle.frontend.tensor import Tensor
from treadle.interop.torch.rows.table import aten, declare_all
from treadle.ir.ops.linear import WINDOW, Window

declare_all(
    {
        "permute": s.permute,
        "transpose.int": s.transpose,
        "swapaxes": s.transpose,
        "unsqueeze": s.unsqueeze,
        "squeeze": s.squeeze,
        "flatten.using_ints": s.flatten,
        "stack": s.stack,
        "chunk": s.chunk,
        "repeat": s.repeat,
        "tril": s.tril,
        "triu": s.triu,
        "pixel_shuffle": images.pixel_shuffle,
        "pixel_unshuffle": images.pixel_unshuffle,
        "channel_shuffle": images.channel_shuffle,
        "native_channel_shuffle": images.channel_shuffle,
        "diagonal": sequences.diagonal,
    }
)


@aten("view", "reshape", "_unsafe_view", "view_copy", "_reshape_alias")
def _view(x: Tensor, size: Sequence[int], *stride: Any) -> Tensor:
    return s.reshape(x, tuple(size))


@aten("view_as", "reshape_as")
def _view_as(x: Tensor, other: Tensor) -> Tensor:
    return s.reshape(x, other.shape)


@aten("cat", "concat", "concatenate")
def _cat(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Vectors without elements fit everything, as in PyTorch."""
    parts = [t for t in tensors if t.shape != (0,)]
    return s.concat(parts or tensors, dim)


@aten("unflatten.int")
def _unflatten(x: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
    at = dim % x.ndim
    known = math.prod(n for n in sizes if n != -1)
    whole = tuple(x.shape[at] // known if n == -1 else n for n in sizes)
    return s.reshape(x, (*x.shape[:at], *whole, *x.shape[at + 1 :]))


@aten("expand")
def _expand(x: Tensor, size: Sequence[int], implicit: bool = False) -> Tensor:
    return s.expand(x, tuple(size))


@aten("expand_as")
def _expand_as(x: Tensor, other: Tensor) -> Tensor:
    return s.expand(x, other.shape)


@aten("broadcast_to")
def _broadcast_to(x: Tensor, size: Sequence[int]) -> Tensor:
    return s.expand(x, tuple(size))


@aten("broadcast_tensors")
def _broadcast_tensors(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    shape = np.broadcast_shapes(*(t.shape for t in tensors))
    return tuple(s.expand(t, shape) for t in tensors)


@aten("t", "numpy_T", "mT")
def _t(x: Tensor) -> Tensor:
    return s.transpose(x, -1, -2) if x.ndim > 1 else x


@aten("movedim.int", "movedim.intlist", "moveaxis.int", "moveaxis.intlist")
def _movedim(x: Tensor, source: Any, destination: Any) -> Tensor:
    froms = [source] if isinstance(source, int) else source
    tos = [destination] if isinstance(destination, int) else destination
    return s.permute(x, _moved(x.ndim, [a % x.ndim for a in froms], [a % x.ndim for a in tos]))


def _moved(rank: int, froms: Sequence[int], tos: Sequence[int]) -> list[int]:
    order = [a for a in range(rank) if a not in froms]
    for to, source in sorted(zip(tos, froms, strict=True)):
        order.insert(to, source)
    return order


@aten("squeeze.dim", "squeeze.dims")
def _squeeze(x: Tensor, dim: int | Sequence[int]) -> Tensor:
    """Only what has one element, where PyTorch leaves the rest as it is."""
    axes = [dim] if isinstance(dim, int) else list(dim)
    if not x.ndim:
        return x
    gone = {a % x.ndim for a in axes if x.shape[a] == 1}
    return s.reshape(x, tuple(n for i, n in enumerate(x.shape) if i not in gone))


@aten("select.int")
def _select(x: Tensor, dim: int, index: int | Tensor) -> Tensor:
    at = dim % x.ndim
    if isinstance(index, Tensor):
        return take(x, s.reshape(index, ()), at)
    return getitem(x, (*(slice(None),) * at, index))


@aten("slice.Tensor")
def _slice(
    x: Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Tensor:
    return getitem(x, (*(slice(None),) * (dim % x.ndim), slice(start, end, step)))


@aten("narrow")
def _narrow(x: Tensor, dim: int, start: int, length: int) -> Tensor:
    first = start % x.shape[dim] if start < 0 else start
    return _slice(x, dim, first, first + length)


@aten("split.Tensor", "split_with_sizes", "split.sizes", "unsafe_split.Tensor")
def _split(x: Tensor, size: int | Sequence[int], dim: int = 0) -> tuple[Tensor, ...]:
    return s.split(x, size, dim)


@aten("tensor_split.sections")
def _tensor_split(x: Tensor, sections: int, dim: int = 0) -> tuple[Tensor, ...]:
    small, larger = divmod(x.shape[dim], sections)
    return s.split(x, [small + (i < larger) for i in range(sections)], dim)


@aten("tensor_split.indices")
def _tensor_split_at(x: Tensor, indices: Sequence[int], dim: int = 0) -> tuple[Tensor, ...]:
    bounds = [0, *indices, x.shape[dim]]
    return tuple(_slice(x, dim, a, max(a, b)) for a, b in pairwise(bounds))


@aten("unbind.int")
def _unbind(x: Tensor, dim: int = 0) -> tuple[Tensor, ...]:
    return tuple(_select(x, dim, i) for i in range(x.shape[dim]))


@aten("tile")
def _tile(x: Tensor, dims: Sequence[int]) -> Tensor:
    return s.repeat(x, *(1,) * (x.ndim - len(dims)), *dims)


@aten("repeat_interleave.self_int")
def _repeat_interleave(x: Tensor, repeats: int, dim: int | None = None, **others: Any) -> Tensor:
    return sequences.repeat_interleave(x, repeats, dim)


@aten("flip")
def _flip(x: Tensor, dims: Sequence[int]) -> Tensor:
    return s.flip(x, tuple(dims)) if dims else x


@aten("roll")
def _roll(x: Tensor, shifts: Any, dims: Any = ()) -> Tensor:
    if not dims:
        return s.reshape(s.roll(s.reshape(x, -1), shifts[0], 0), x.shape)
    for shift, dim in zip(shifts, dims, strict=True):
        x = s.roll(x, shift, dim)
    return x


@aten("rot90")
def _rot90(x: Tensor, k: int = 1, dims: Sequence[int] = (0, 1)) -> Tensor:
    first, second = dims
    for _ in range(k % 4):
        x = s.transpose(s.flip(x, second), first, second)
    return x


@aten("diag_embed")
def _diag_embed(x: Tensor, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Tensor:
    made = sequences.diag_embed(x, offset)
    rank = made.ndim
    if (dim1 % rank, dim2 % rank) == (rank - 2, rank - 1):
        return made
    return s.permute(made, _moved(rank, [rank - 2, rank - 1], [dim1 % rank, dim2 % rank]))


@aten("meshgrid")
def _meshgrid(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return sequences.meshgrid(*tensors)


@aten("meshgrid.indexing")
def _meshgrid_indexing(tensors: Sequence[Tensor], indexing: str = "ij") -> tuple[Tensor, ...]:
    return sequences.meshgrid(*tensors, indexing=indexing)


def _pairs(x: Tensor, amounts: Sequence[int]) -> list[tuple[int, int]]:
    """(before, after) for each axis, where PyTorch lists the last axis first."""
    given = [(amounts[i], amounts[i + 1]) for i in range(0, len(amounts), 2)]
    return [*((0, 0),) * (x.ndim - len(given)), *reversed(given)]


@aten("constant_pad_nd")
def _constant_pad(x: Tensor, pad: Sequence[int], value: float = 0) -> Tensor:
    return padding.pad(x, _pairs(x, pad), value)


@aten("pad")
def _pad(x: Tensor, pad: Sequence[int], mode: str = "constant", value: Any = None) -> Tensor:
    if mode == "constant":
        return _constant_pad(x, pad, 0 if value is None else value)
    return padding.pad(x, _pairs(x, pad), mode=mode)


@aten("reflection_pad1d", "reflection_pad2d", "reflection_pad3d")
def _reflection_pad(x: Tensor, pad: Sequence[int]) -> Tensor:
    return padding.pad(x, _pairs(x, pad), mode="reflect")


@aten("replication_pad1d", "replication_pad2d", "replication_pad3d")
def _replication_pad(x: Tensor, pad: Sequence[int]) -> Tensor:
    return padding.pad(x, _pairs(x, pad), mode="replicate")


@aten("unfold")
def _unfold(x: Tensor, dimension: int, size: int, step: int) -> Tensor:
    """Windows along one axis, their elements in a new last one."""
    if not x.ndim:
        return s.reshape(x, (1,))
    return bind1(WINDOW, Window((dimension % x.ndim,), (size,), (step,), (1,)), x)


@aten("im2col")
def _im2col(
    x: Tensor, kernel: Sequence[int], dilation: Sequence[int], pad: Any, stride: Any
) -> Tensor:
    return images.unfold(x, kernel, dilation, pad, stride)


@aten("col2im")
def _col2im(x: Tensor, size: Any, kernel: Any, dilation: Any, pad: Any, stride: Any) -> Tensor:
    return images.fold(x, size, kernel, dilation, pad, stride)


@aten("as_strided")
def _as_strided(
    x: Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> Tensor:
    """Elements of x, which has no gaps, picked by their places in memory."""
    places = np.full((), storage_offset or 0, np.int64)
    for n, step in zip(size, stride, strict=True):
        places = places[..., None] + np.arange(n) * step
    return take(s.reshape(x, -1), literal(places.astype(np.int32)), 0)


def _row_mask(x: Tensor, dim: int, chosen: np.ndarray) -> Tensor:
    """True at some indices of an axis, with one element along the others."""
    mask = np.zeros(x.shape[dim], np.bool_)
    mask[chosen] = True
    shape = [1] * x.ndim
    shape[dim] = x.shape[dim]
    return literal(mask.reshape(shape))


@aten("select_scatter")
def _select_scatter(x: Tensor, source: Tensor, dim: int, index: int) -> Tensor:
    at = dim % x.ndim
    mask = _row_mask(x, at, np.array([index]))
    return where(mask, s.unsqueeze(cast(source, x.dtype), at), x)


@aten("slice_scatter")
def _slice_scatter(
    x: Tensor,
    source: Tensor,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> Tensor:
    at = dim % x.ndim
    first, stop, step = slice(start, end, step).indices(x.shape[at])
    chosen = np.arange(first, stop, step)
    if not chosen.size:
        return x
    amounts = [(0, 0)] * x.ndim
    amounts[at] = (first, x.shape[at] - int(chosen[-1]) - 1)
    gaps = [step - 1 if i == at else 0 for i in range(x.ndim)]
    wide = s.pad(cast(s.expand(source, _with(x, at, chosen.size)), x.dtype), amounts, 0, gaps)
    return where(_row_mask(x, at, chosen), wide, x)


def _with(x: Tensor, axis: int, n: int) -> tuple[int, ...]:
    return (*x.shape[:axis], n, *x.shape[axis + 1 :])
