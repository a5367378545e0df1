"""What an element is of ops that move, reduce, contract or index."""

from __future__ import annotations

from treadle.ir.graph import Node
from treadle.ir.ops import shaping as s
from treadle.ir.ops.indexing import GATHER, SCATTER_ADD, Gather, ScatterAdd
from treadle.ir.ops.linear import CONTRACT, UNWINDOW, WINDOW, Contraction, Unwindow, Window
from treadle.ir.ops.reductions import (
    CUMSUM,
    REDUCE_MAX,
    REDUCE_MIN,
    REDUCE_SUM,
    ArgReduce,
    Cumulate,
    Reduce,
)
from treadle.verify.normal_form import functions as fn
from treadle.verify.normal_form import index as ix
from treadle.verify.normal_form import ranges
from treadle.verify.normal_form.algebra import (
    ONE,
    add,
    multiply,
    negate,
    subtract,
)
from treadle.verify.normal_form.form import BudgetError, Form, Kind, bound_atom
from treadle.verify.normal_form.graphs import ELEMENT, At, Reader
from treadle.verify.normal_form.index import Index, Variable
from treadle.verify.normal_form.numbers import of_number
from treadle.verify.normal_form.sums import element, largest, total

# Moves


@ELEMENT(s.RESHAPE)
def _reshape(reader: Reader, node: Node, at: At) -> Form:
    (x,) = node.operands
    flat = ix.ZERO
    for i, n in zip(at, (reader.size(n) for n in node.types[0].shape), strict=True):
        flat = flat * n + i
    indices: list[Index] = []
    shape = reader.shape(x)
    for n in reversed(shape[1:]):
        flat, low = ranges.divided(flat, n)
        indices.append(low)
    if shape:
        indices.append(flat)
    return reader.at(x, indices[::-1])


@ELEMENT(s.PERMUTE)
def _permute(reader: Reader, node: Node, at: At) -> Form:
    assert isinstance(node.attributes, s.Permute)
    places = dict(zip(node.attributes.axes, at, strict=True))
    return reader.at(node.operands[0], [places[a] for a in range(len(at))])


@ELEMENT(s.BROADCAST)
def _broadcast(reader: Reader, node: Node, at: At) -> Form:
    assert isinstance(node.attributes, s.Broadcast)
    return reader.at(node.operands[0], [at[a] for a in node.attributes.axes])


@ELEMENT(s.SLICE)
def _slice(reader: Reader, node: Node, at: At) -> Form:
    a = node.attributes
    assert isinstance(a, s.Slice)
    moved = zip(at, a.starts, a.strides, strict=True)
    return reader.at(
        node.operands[0], [i.times(stride) + reader.size(start) for i, start, stride in moved]
    )


@ELEMENT(s.PAD)
def _pad(reader: Reader, node: Node, at: At) -> Form:
    a, (x,) = node.attributes, node.operands
    assert isinstance(a, s.Pad)
    inside, indices = ONE, []
    for axis, (i, n) in enumerate(zip(at, reader.shape(x), strict=True)):
        place = i - reader.size(a.low[axis])
        if a.interior[axis]:
            place, gap = ranges.divided(place, ix.number(a.interior[axis] + 1))
            inside = multiply(inside, fn.meets(gap))
        inside = multiply(inside, multiply(fn.step(place), fn.step(n - ix.ONE - place)))
        indices.append(place)
    outside = of_number(reader.work, a.value, node.types[0].dtype)
    return add(multiply(inside, reader.at(x, indices)), multiply(subtract(ONE, inside), outside))


@ELEMENT(s.CONCAT)
def _concat(reader: Reader, node: Node, at: At) -> Form:
    assert isinstance(node.attributes, s.Concat)
    axis, start, parts = node.attributes.axis, ix.ZERO, []
    for x in node.operands:
        place = at[axis] - start
        inside = multiply(fn.step(place), fn.step(reader.shape(x)[axis] - ix.ONE - place))
        if inside.terms:
            parts.append(multiply(inside, reader.at(x, (*at[:axis], place, *at[axis + 1 :]))))
        start = start + reader.shape(x)[axis]
    return add(*parts)


@ELEMENT(s.FLIP)
def _flip(reader: Reader, node: Node, at: At) -> Form:
    assert isinstance(node.attributes, s.Flip)
    (x,) = node.operands
    shape = reader.shape(x)
    flipped = [shape[k] - ix.ONE - i if k in node.attributes.axes else i for k, i in enumerate(at)]
    return reader.at(x, flipped)


# Reductions


def _along(reader: Reader, node: Node, at: At, axes: tuple[int, ...]) -> tuple[list[Variable], At]:
    """Variables for the axes of the operand that disappear, and its indices."""
    left = iter(at)
    names: list[Variable] = []
    indices: list[Index] = []
    for axis, n in enumerate(reader.shape(node.operands[0])):
        if axis in axes:
            names.append(reader.work.fresh(n))
            indices.append(ix.of_letter(names[-1]))
        else:
            indices.append(next(left))
    return names, tuple(indices)


@ELEMENT(REDUCE_SUM)
def _reduce_sum(reader: Reader, node: Node, at: At) -> Form:
    assert isinstance(node.attributes, Reduce)
    names, indices = _along(reader, node, at, node.attributes.axes)
    found = reader.at(node.operands[0], indices)
    for v in reversed(names):
        found = total(reader.work, v, found)
    return found


@ELEMENT(REDUCE_MAX, REDUCE_MIN)
def _reduce_max(reader: Reader, node: Node, at: At) -> Form:
    assert isinstance(node.attributes, Reduce)
    names, indices = _along(reader, node, at, node.attributes.axes)
    found = reader.at(node.operands[0], indices)
    if node.op is REDUCE_MAX:
        return largest(reader.work, names, found)
    return negate(largest(reader.work, names, negate(found)))


@ELEMENT(CUMSUM)
def _cumsum(reader: Reader, node: Node, at: At) -> Form:
    """Σ [k ≤ i] x[k]"""
    a = node.attributes
    assert isinstance(a, Cumulate)
    rest = (*at[: a.axis], *at[a.axis + 1 :])
    (k,), indices = _along(reader, node, rest, (a.axis,))
    gap = at[a.axis] - ix.of_letter(k)
    seen = fn.step(gap.times(-1) if a.reverse else gap)
    return total(reader.work, k, multiply(seen, reader.at(node.operands[0], indices)))


@ELEMENT(CONTRACT)
def _contract(reader: Reader, node: Node, at: At) -> Form:
    a, (x, y) = node.attributes, node.operands
    assert isinstance(a, Contraction)
    of_x, of_y, of_result = a.labels
    places = dict(zip(of_result, at, strict=True))
    names: list[Variable] = []
    for label, n in zip(of_x + of_y, (*reader.shape(x), *reader.shape(y)), strict=True):
        if label not in places:
            names.append(reader.work.fresh(n))
            places[label] = ix.of_letter(names[-1])
    left = reader.at(x, [places[c] for c in of_x])
    found = multiply(left, reader.at(y, [places[c] for c in of_y]))
    for v in reversed(names):
        found = total(reader.work, v, found)
    return found


# Windows and indices


@ELEMENT(WINDOW)
def _window(reader: Reader, node: Node, at: At) -> Form:
    a, (x,) = node.attributes, node.operands
    assert isinstance(a, Window)
    rank = len(reader.shape(x))
    indices = list(at[:rank])
    for k, axis in enumerate(a.axes):
        offset = at[rank + k].times(a.dilations[k])
        indices[axis] = indices[axis].times(a.strides[k]) + offset
    return reader.at(x, indices)


@ELEMENT(UNWINDOW)
def _unwindow(reader: Reader, node: Node, at: At) -> Form:
    """Σ over windows and their elements, where these are the element of the result."""
    a, (x,) = node.attributes, node.operands
    assert isinstance(a, Unwindow)
    window, rank = a.window, len(at)
    shape, indices = reader.shape(x), list(at)
    names: list[Variable] = []
    flags = ONE
    for k, axis in enumerate(window.axes):
        start, offset = reader.work.fresh(shape[axis]), reader.work.fresh(shape[rank + k])
        names += [offset, start]
        reached = ix.of_letter(start).times(window.strides[k])
        reached = reached + ix.of_letter(offset).times(window.dilations[k])
        flags = multiply(flags, fn.meets(reached - at[axis]))
        indices[axis] = ix.of_letter(start)
        indices.append(ix.of_letter(offset))
    found = multiply(flags, reader.at(x, indices))
    for v in reversed(names):
        found = total(reader.work, v, found)
    return found


@ELEMENT(GATHER)
def _gather(reader: Reader, node: Node, at: At) -> Form:
    a, (x, indices) = node.attributes, node.operands
    assert isinstance(a, Gather)
    chosen = len(reader.shape(indices)) - a.batch
    end = a.axis + chosen
    form = reader.at(indices, (*at[: a.batch], *at[a.axis : end]))
    place = element(reader.work, form)
    if place is None:
        greatest = _greatest(reader, node, form, at[: a.axis])
        if greatest is None:
            raise BudgetError("an index that is computed")
        return greatest
    reader.work.assume(fn.Assumption.INDICES_IN_RANGE)
    return reader.at(x, (*at[: a.axis], place, *at[end:]))


def _greatest(reader: Reader, node: Node, index: Form, at: At) -> Form | None:
    """The element of x where x is greatest along its last axis, if that is the index."""
    x, atom = node.operands[0], index.atom
    axis = len(at)
    if atom is None or not atom.label.startswith(f"argmax.0 {ArgReduce(axis)!r}"):
        return None
    own = [reader.work.fresh(n) for n in reader.shape(x)]
    every = reader.at(x, [ix.of_letter(v) for v in own])
    if atom != bound_atom(Kind.WHOLE, own, (every,), atom.label, at):
        return None
    last = reader.work.fresh(reader.shape(x)[axis])
    return largest(reader.work, [last], reader.at(x, (*at, ix.of_letter(last))))


@ELEMENT(SCATTER_ADD)
def _scatter_add(reader: Reader, node: Node, at: At) -> Form:
    """Σ [index[u] = i] update[u]"""
    a, (x, indices) = node.attributes, node.operands
    assert isinstance(a, ScatterAdd)
    shape = reader.shape(indices)
    names = [reader.work.fresh(n) for n in shape[a.batch :]]
    inner = tuple(ix.of_letter(v) for v in names)
    place = element(reader.work, reader.at(indices, (*at[: a.batch], *inner)))
    if place is None:
        raise BudgetError("an index that is computed")
    flag = fn.meets(place - at[a.axis])
    found = multiply(flag, reader.at(x, (*at[: a.axis], *inner, *at[a.axis + 1 :])))
    for v in reversed(names):
        found = total(reader.work, v, found)
    return found
