"""Elements that ops move, and sums of them, on demand: what each asks of its operands."""

from __future__ import annotations

from functools import reduce
from itertools import product
from typing import Any

import numpy as np

from treadle.domains.float64 import Array
from treadle.domains.meaning import contract_with
from treadle.domains.philox import philox4x32
from treadle.ir.graph import Node
from treadle.ir.ops.linear import Window
from treadle.verify.extended import Extended, chosen
from treadle.verify.indices import ravel, unravel
from treadle.verify.machine import NotEstablishedError
from treadle.verify.on_demand import (
    Grid,
    OnDemand,
    along,
    as_axis,
    lengths,
    rule,
)

SPLIT = 2**21  # elements of a sum's terms at a time


def _attributes(node: Node) -> Any:
    return node.attributes


@rule("iota")
def _iota(on: OnDemand, node: Node, grid: Grid) -> Extended:
    axis = _attributes(node).axis
    at = along(grid[axis]).reshape([-1 if i == axis else 1 for i in range(len(grid))])
    return on.field.integers(at, node.types[0].dtype)


@rule("permute")
def _permute(on: OnDemand, node: Node, grid: Grid) -> Extended:
    axes = _attributes(node).axes
    inner = tuple(grid[axes.index(i)] for i in range(len(axes)))
    return on.operand(node, 0, inner).map(lambda a: a.transpose(axes))


@rule("broadcast")
def _broadcast(on: OnDemand, node: Node, grid: Grid) -> Extended:
    axes = _attributes(node).axes
    found = on.operand(node, 0, tuple(grid[i] for i in axes))

    def placed(a: Array) -> Array:
        shape = [1] * len(grid)
        for n, i in zip(a.shape, axes, strict=True):
            shape[i] = n
        return a.reshape(shape)

    return found.map(placed)


def _groups(old: tuple[int, ...], new: tuple[int, ...]) -> list[tuple[list[int], list[int]]]:
    """Axes before and after a reshape that have the same elements."""
    found: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(old) or j < len(new):
        before, after = [i] if i < len(old) else [], [j] if j < len(new) else []
        a, b = (old[i] if before else 1), (new[j] if after else 1)
        i, j = i + len(before), j + len(after)
        while a != b:
            if a < b and i < len(old):
                a, before, i = a * old[i], [*before, i], i + 1
            elif j < len(new):
                b, after, j = b * new[j], [*after, j], j + 1
            else:
                break
        found.append((before, after))
    return found


@rule("reshape")
def _reshape(on: OnDemand, node: Node, grid: Grid) -> Extended:
    old, new = on.type_of(node, 0).shape, node.types[0].shape
    inner: dict[int, Any] = {}
    taken: list[Array | None] = []
    groups = _groups(old, new)
    for before, after in groups:
        if len(before) == len(after) == 1:
            inner[before[0]] = grid[after[0]]
            taken.append(None)
            continue
        mesh = np.ix_(*(along(grid[j]) for j in after)) if after else ()
        flat = np.asarray(ravel(mesh, tuple(new[j] for j in after))).reshape(-1)
        at = unravel(flat, tuple(old[i] for i in before))
        unique = [np.unique(a, return_inverse=True) for a in at]
        for i, (u, _) in zip(before, unique, strict=True):
            inner[i] = as_axis(u)
        counts = tuple(len(u) for u, _ in unique)
        places = np.asarray(ravel(tuple(p.reshape(-1) for _, p in unique), counts))
        taken.append(np.broadcast_to(places, flat.shape))
    wanted = tuple(inner[i] for i in range(len(old)))
    found = on.full(node, 0, wanted)
    shape = lengths(wanted)

    def moved(a: Array) -> Array:
        sizes = [int(np.prod([shape[i] for i in before], dtype=int)) for before, _ in groups]
        a = a.reshape(sizes)
        for axis, places in enumerate(taken):
            a = a if places is None else np.take(a, places, axis=axis)
        return a.reshape(lengths(grid))

    return found.map(moved)


@rule("slice")
def _slice(on: OnDemand, node: Node, grid: Grid) -> Extended:
    given = _attributes(node)
    moved = (along(g) * s + b for g, s, b in zip(grid, given.strides, given.starts, strict=True))
    return on.operand(node, 0, tuple(map(as_axis, moved)))


@rule("flip")
def _flip(on: OnDemand, node: Node, grid: Grid) -> Extended:
    shape, axes = on.type_of(node, 0).shape, _attributes(node).axes
    turned = [shape[i] - 1 - along(g) if i in axes else along(g) for i, g in enumerate(grid)]
    return on.operand(node, 0, tuple(map(as_axis, turned)))


@rule("pad")
def _pad(on: OnDemand, node: Node, grid: Grid) -> Extended:
    given, type_ = _attributes(node), on.type_of(node, 0)
    held: Array = np.ones((1,) * len(grid), bool)
    inner: list[Array] = []
    for i, (g, n) in enumerate(zip(grid, type_.shape, strict=True)):
        at, step = along(g) - given.low[i], given.interior[i] + 1
        inside = (at >= 0) & (at % step == 0) & (at // step < n)
        held = held & inside.reshape([-1 if j == i else 1 for j in range(len(grid))])
        inner.append(np.clip(at // step, 0, max(0, n - 1)))
    other = on.field.literal(given.value, type_.dtype)
    if not type_.size:
        return other.map(lambda a: a.reshape((1,) * len(grid)))
    return chosen(held, _at(on, node, 0, inner), other)


def _at(on: OnDemand, node: Node, operand: int, at: list[Array]) -> Extended:
    """An operand at indices along each axis, which may repeat."""
    unique = [np.unique(a, return_inverse=True) for a in at]
    grid = tuple(as_axis(u) for u, _ in unique)
    mesh = np.ix_(*(places.reshape(-1) for _, places in unique)) if at else ()
    return on.full(node, operand, grid).map(lambda a: a[mesh])


@rule("concat")
def _concat(on: OnDemand, node: Node, grid: Grid) -> Extended:
    axis, first = _attributes(node).axis, 0
    wanted, found = along(grid[axis]), None
    for i in range(len(node.operands)):
        n = on.type_of(node, i).shape[axis]
        inside = (wanted >= first) & (wanted < first + n)
        if inside.any():
            at = [along(g) for g in grid]
            at[axis] = np.clip(wanted - first, 0, n - 1)
            part = _at(on, node, i, at)
            held = inside.reshape([-1 if j == axis else 1 for j in range(len(grid))])
            found = part if found is None else chosen(held, part, found)
        first += n
    assert found is not None
    return found


def _reduces(name: str, op: str) -> None:
    @rule(name)
    def entry(on: OnDemand, node: Node, grid: Grid) -> Extended:
        axes, type_ = _attributes(node).axes, on.type_of(node, 0)
        outer = iter(grid)
        inner = [range(n) if i in axes else next(outer) for i, n in enumerate(type_.shape)]
        dtype = node.types[0].dtype
        found = None
        for part in _parts(tuple(inner), axes):
            terms = on.full(node, 0, part)
            total = on.field.reduced(op, terms, tuple(axes), dtype)
            found = total if found is None else on.field.combined(op, found, total, dtype)
        assert found is not None
        return found


def _parts(grid: Grid, axes: tuple[int, ...]) -> list[Grid]:
    """A grid cut along its longest summed axis, so that parts are of a size."""
    total = int(np.prod(lengths(grid), dtype=np.int64))
    if total <= SPLIT or not axes:
        return [grid]
    longest = max(axes, key=lambda i: len(grid[i]))
    count = min(len(grid[longest]), -(-total // SPLIT))
    cuts = np.array_split(along(grid[longest]), count)
    return [(*grid[:longest], as_axis(c), *grid[longest + 1 :]) for c in cuts]


for _name, _op in (("sum", "add"), ("max", "max"), ("min", "min"), ("prod", "mul")):
    _reduces(f"reduce_{_name}", _op)


@rule("contract")
def _contract(on: OnDemand, node: Node, grid: Grid) -> Extended:
    given = _attributes(node)
    lx, ly, lr = given.labels
    axes: dict[str, Any] = dict(zip(lx, map(range, on.type_of(node, 0).shape), strict=True))
    axes |= dict(zip(ly, map(range, on.type_of(node, 1).shape), strict=True))
    axes |= dict(zip(lr, grid, strict=True))
    return _contracted(on, node, axes)


def _contracted(on: OnDemand, node: Node, axes: dict[str, Any]) -> Extended:
    """By the indices of each label; an operand that is too large at once in parts of an axis."""
    given, dtype = _attributes(node), node.types[0].dtype
    lx, ly, lr = given.labels
    for labels in (lx, ly):
        size = int(np.prod([len(axes[c]) for c in labels], dtype=np.int64))
        if size > SPLIT:
            longest = max(labels, key=lambda c: len(axes[c]))
            cuts = np.array_split(along(axes[longest]), -(-size // SPLIT))
            parts = [_contracted(on, node, axes | {longest: as_axis(cut)}) for cut in cuts]
            if longest in lr:
                at = lr.index(longest)
                q, p = (np.concatenate([getattr(x, n) for x in parts], at) for n in "qp")
                return Extended(q, p)
            return reduce(lambda x, y: on.field.combined("add", x, y, dtype), parts)
    x = on.full(node, 0, tuple(axes[c] for c in lx))
    y = on.full(node, 1, tuple(axes[c] for c in ly))
    if not dtype.is_float:
        plain = contract_with(np.matmul, given, x.p, y.p)
        return on.field.integers(plain, dtype)
    lanes = zip(on.field.field.lanes, (x.q, x.p), (y.q, y.p), strict=True)
    return Extended(*(contract_with(lane.matmul, given, a, b) for lane, a, b in lanes))


@rule("argmax", "argmin")
def _positions(on: OnDemand, node: Node, grid: Grid) -> Extended:
    axis, type_ = _attributes(node).axis, on.type_of(node, 0)
    order = on.field.order(
        on.full(node, 0, (*grid[:axis], range(type_.shape[axis]), *grid[axis:])), type_.dtype
    )
    found = order.argmax(axis) if node.op.name == "argmax" else order.argmin(axis)
    return on.field.integers(found, node.types[0].dtype)


@rule("gather")
def _gather(on: OnDemand, node: Node, grid: Grid) -> Extended:
    axis, batch = _attributes(node).axis, _attributes(node).batch
    shape, chosen_axes = on.type_of(node, 0).shape, on.type_of(node, 1).rank - batch
    places = (*grid[:batch], *grid[axis : axis + chosen_axes])
    indices = np.clip(on.full(node, 1, places).p.astype(np.int64), 0, max(0, shape[axis] - 1))
    mesh = list(np.ix_(*map(along, grid))) if grid else []
    middle = indices.reshape(
        *lengths(grid[:batch]), *[1] * (axis - batch), *lengths(grid[axis : axis + chosen_axes]),
        *[1] * (len(grid) - axis - chosen_axes),
    )  # fmt: skip
    at = [*mesh[:axis], middle, *mesh[axis + chosen_axes :]]
    return on.points(node.operands[0], [np.asarray(a) for a in at])


@rule("scatter_add")
def _scatter_add(on: OnDemand, node: Node, grid: Grid) -> Extended:
    """All updates of the grid's other axes, where their index is one that is asked for."""
    given, updates = _attributes(node), on.type_of(node, 0)
    chosen_axes = on.type_of(node, 1).rank - given.batch
    first, last = given.axis, given.axis + chosen_axes
    inner = (*grid[:first], *map(range, updates.shape[first:last]), *grid[first + 1 :])
    indices = on.full(node, 1, (*grid[: given.batch], *map(range, updates.shape[first:last])))
    terms = on.full(node, 0, inner)
    shape = (
        *lengths(grid[: given.batch]), *[1] * (first - given.batch), *updates.shape[first:last],
        *[1] * (len(grid) - first - 1),
    )  # fmt: skip
    where = indices.p.reshape(shape)
    zero, rows = on.field.zero(updates.dtype), []
    for i in along(grid[first]):
        held = chosen(where == i, terms, zero).map(lambda a: np.broadcast_to(a, terms.p.shape))
        axes = tuple(range(first, last))
        rows.append(on.field.reduced("add", held, axes, updates.dtype))
    return _stacked(rows, first)


def _stacked(rows: list[Extended], axis: int) -> Extended:
    q, p = (np.stack([getattr(r, n) for r in rows], axis=axis) for n in "qp")
    return Extended(q, p)


def _window_places(window: Window, grid: Grid, rank: int) -> list[Array]:
    """Where the elements of windows are along each axis: by position and offset."""
    found: list[Array] = []
    for i in range(rank):
        at = along(grid[i]).reshape([-1 if j == i else 1 for j in range(len(grid))])
        if i in window.axes:
            k = window.axes.index(i)
            offsets = along(grid[rank + k]) * window.dilations[k]
            shape = [-1 if j == rank + k else 1 for j in range(len(grid))]
            at = at * window.strides[k] + offsets.reshape(shape)
        found.append(at)
    return found


@rule("window")
def _window(on: OnDemand, node: Node, grid: Grid) -> Extended:
    rank = on.type_of(node, 0).rank
    return on.points(node.operands[0], _window_places(_attributes(node), grid, rank))


@rule("unwindow")
def _unwindow(on: OnDemand, node: Node, grid: Grid) -> Extended:
    given, dtype = _attributes(node), node.types[0].dtype
    window, counts = given.window, given.window.starts(given.shape)
    total = on.field.zero(dtype).map(lambda a: a.reshape((1,) * len(grid)))
    for offset in product(*map(range, window.sizes)):
        at, held = [along(g) for g in grid], np.ones((1,) * len(grid), bool)
        for k, axis in enumerate(window.axes):
            left = at[axis] - offset[k] * window.dilations[k]
            place, step = left // window.strides[k], window.strides[k]
            inside = (left >= 0) & (left % step == 0) & (place < counts[k])
            held = held & inside.reshape([-1 if j == axis else 1 for j in range(len(grid))])
            at[axis] = np.clip(place, 0, max(0, counts[k] - 1))
        if held.any():
            fixed = [np.array([o]) for o in offset]
            part = _at(on, node, 0, [*at, *fixed])
            part = part.map(lambda a: a.reshape(a.shape[: len(grid)]))
            term = chosen(held, part, on.field.zero(dtype))
            total = on.field.combined("add", total, term, dtype)
    return total


@rule("cumsum")
def _cumsum(on: OnDemand, node: Node, grid: Grid) -> Extended:
    given, type_ = _attributes(node), on.type_of(node, 0)
    every = tuple(range(type_.shape[i]) if i == given.axis else g for i, g in enumerate(grid))
    terms, wanted = on.full(node, 0, every), along(grid[given.axis])
    if not type_.is_float:
        raise NotEstablishedError("running sums of integers")

    def running(a: Array, modulus: int) -> Array:
        a = np.flip(a, given.axis) if given.reverse else a
        a = np.cumsum(a, axis=given.axis) % modulus
        return np.take(np.flip(a, given.axis) if given.reverse else a, wanted, axis=given.axis)

    q, p = on.field.field.lanes
    return Extended(running(terms.q, q.modulus), running(terms.p, p.modulus))


@rule("random_bits")
def _random_bits(on: OnDemand, node: Node, grid: Grid) -> Extended:
    given, type_ = _attributes(node), on.type_of(node, 0)
    words = [int(w) for w in on.full(node, 0, (range(type_.size),)).p]
    seed0, seed1, step, micro, scan, first = words
    mesh = np.ix_(*map(along, grid)) if grid else ()
    flat = np.asarray(ravel(mesh, node.types[0].shape)).astype(np.uint64)
    last = ((micro << 16) + ((given.site + first) & 0xFFFF)) & 0xFFFFFFFF
    blocks = flat // np.uint64(4)
    counter = (blocks, *(np.full_like(blocks, w) for w in (scan, step, last)))
    found = np.stack(philox4x32(counter, (seed0, seed1)), -1)  # type: ignore[arg-type]
    bits = np.take_along_axis(found, (flat % np.uint64(4)).astype(np.int64)[..., None], -1)
    return on.field.integers(bits[..., 0], node.types[0].dtype)
