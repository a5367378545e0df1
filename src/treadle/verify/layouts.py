"""What bindings say, as functions: which element is at an address, and where a sum's parts are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from treadle.domains.float64 import Array
from treadle.ir.graph import Node
from treadle.ir.ops.linear import Contraction
from treadle.ir.ops.reductions import Reduce
from treadle.ir.types import TensorType
from treadle.kernel.bindings import Content, Copy, Elements, Partial, Whole
from treadle.kernel.index import Index, Var
from treadle.kernel.nodes import (
    For,
    Kernel,
    Let,
    Literal,
    Local,
    Store,
    Within,
)
from treadle.kernel.traverse import walk
from treadle.verify.extended import Extended, ExtendedField, chosen
from treadle.verify.indices import evaluate_index, ravel, unravel
from treadle.verify.keyed import Source
from treadle.verify.machine import NotEstablishedError

MOST = 2**22  # addresses that are listed


@dataclass(frozen=True, slots=True)
class Places:
    """What lies at some addresses: indices along axes; zeros; and where there is anything."""

    indices: tuple[Array, ...]
    is_zero: Array
    is_there: Array


Layout = Callable[[Array], Places]


def layout_of(content: Content, type_: TensorType) -> Layout:
    match content:
        case Whole(order, pitch):
            return _whole(type_.shape, order, pitch)
        case Copy(elements) | Partial(elements):
            return _elements(elements)
        case _:
            raise NotEstablishedError("it holds numbers of an algorithm")


def _whole(shape: tuple[int, ...], order: tuple[int, ...], pitch: int) -> Layout:
    held = (*shape[:-1], pitch) if pitch else shape
    axes = order or tuple(range(len(shape)))

    def layout(at: Array) -> Places:
        found = dict(zip(axes, unravel(at, tuple(held[i] for i in axes)), strict=True))
        indices = tuple(found[i] for i in range(len(shape)))
        there = np.ones(at.shape, bool)
        for index, n in zip(indices, shape, strict=True):
            there &= index < n
        return Places(indices, np.zeros(at.shape, bool), there)

    return layout


def variables_at(elements: Elements) -> Callable[[Array], tuple[dict[str, Array], Array]]:
    """The variables at an address, and whether there are any: by division, as addresses count."""
    factors: list[tuple[Var, int]] = []
    for atom, factor in elements.address.terms:
        if not isinstance(atom, Var):
            raise NotEstablishedError("its addresses are no sums of variables")
        factors.append((atom, factor))
    factors.sort(key=lambda f: -f[1])
    least = [f * v.extent for v, f in factors[1:]]
    if any(f < m for (_, f), m in zip(factors, least, strict=False)):
        raise NotEstablishedError("its addresses overlap")

    def variables(at: Array) -> tuple[dict[str, Array], Array]:
        rest, there = at - elements.address.offset, at >= elements.address.offset
        found: dict[str, Array] = {v.name: np.zeros(at.shape, np.int64) for v in elements.variables}
        for var, factor in factors:
            found[var.name] = rest // factor
            there = there & (found[var.name] < var.extent)
            rest = rest % factor
        return found, there & (rest == 0)

    return variables


def _elements(elements: Elements) -> Layout:
    variables = variables_at(elements)

    def layout(at: Array) -> Places:
        found, there = variables(at)
        held = _held(elements.guards, found, at.shape)
        indices = tuple(_numbers(i, found, at.shape) for i in elements.element)
        return Places(indices, there & ~held, there)

    return layout


def _held(guards: tuple[Within, ...], found: dict[str, Array], shape: tuple[int, ...]) -> Array:
    held = np.ones(shape, bool)
    for guard in guards:
        at = _numbers(guard.index, found, shape)
        held &= (at >= guard.low) & (at < guard.high)
    return held


def _numbers(index: Index, found: dict[str, Array], shape: tuple[int, ...]) -> Array:
    return np.broadcast_to(np.asarray(evaluate_index(index, dict(found)), np.int64), shape)


def filled_with(kernel: Kernel) -> Literal | None:
    """The number that a kernel fills its only buffer with; None where it does something else."""
    loops = [s for s in walk(kernel.body) if isinstance(s, For)]
    only = [s for s in walk(kernel.body) if not isinstance(s, For)]
    match only:
        case [Let(name, Literal() as number), Store(_, _, Local(stored)) as last] if stored == name:
            only = [replace(last, value=number)]
    match only, kernel.buffers:
        case [Store(_, index, Literal() as value, None)], [buffer]:
            variables = tuple(loop.var for loop in loops)
            variables_at(Elements(variables, index, ()))  # each address once
            count = int(np.prod([v.extent for v in variables], dtype=np.int64))
            is_all = count == buffer.size and all(loop.stop is None for loop in loops)
            return value if is_all else None
        case _:
            return None


def last_address(content: Whole | Copy | Partial, type_: TensorType, is_full: bool) -> int:
    """Where the last element is, or, if it is full, the last zero beside a copy's elements."""
    if isinstance(content, (Copy, Partial)):
        last = _last_held(content.elements, isinstance(content, Partial) or is_full)
        return int(evaluate_index(content.elements.address, dict(last)))
    shape = (*type_.shape[:-1], content.pitch) if content.pitch else type_.shape
    axes = content.order or tuple(range(type_.rank))
    at = tuple(np.array(max(0, type_.shape[i] - 1)) for i in axes)
    return int(ravel(at, tuple(shape[i] for i in axes)))


def _last_held(elements: Elements, is_full: bool) -> dict[str, Array]:
    """The last values of all variables; of one of them the last at which guards hold."""
    last = {v.name: np.array(v.extent - 1) for v in elements.variables}
    if is_full or _held(elements.guards, last, ()).all():
        return last
    for v in reversed(elements.variables):  # gaps end a row, or come after the last row
        for at in range(v.extent - 2, -1, -1):
            found = last | {v.name: np.array(at)}
            if _held(elements.guards, found, ()).all():
                return found
    return last


def source_of(
    content: Whole | Copy, type_: TensorType, value: Source, otherwise: Source, field: ExtendedField
) -> Source:
    """A buffer's elements by address, of a value's by flat index; gaps have something else."""
    if content == Whole():
        return value
    layout = layout_of(content, type_)

    def source(at: Array) -> Extended:
        places = layout(at)
        inside = tuple(
            np.clip(i, 0, max(0, n - 1)) for i, n in zip(places.indices, type_.shape, strict=True)
        )
        flat = np.broadcast_to(np.asarray(ravel(inside, type_.shape)), at.shape)
        found = chosen(places.is_zero, field.zero(type_.dtype), value(flat))
        return chosen(places.is_there, found, otherwise(at))

    return source


def result_indices(node: Node, element: tuple[Index, ...]) -> tuple[Index, ...]:
    """Of the indices of a term, those of the result that it is a part of."""
    match node.attributes:
        case Contraction():
            return element[: node.types[0].rank]
        case Reduce(axes):
            return tuple(index for i, index in enumerate(element) if i not in axes)
        case _:
            raise NotEstablishedError(f"parts of {node.op.name}")


class Parts:
    """Where the parts of each element of a sum are."""

    def __init__(self, node: Node, partial: Partial):
        every = partial.elements
        count = int(np.prod([v.extent for v in every.variables], dtype=np.int64))
        if count > MOST:
            raise NotEstablishedError("too many parts to list")
        grid = unravel(np.arange(count), tuple(v.extent for v in every.variables))
        names = dict(zip((v.name for v in every.variables), grid, strict=True))
        zeros = {v.name: np.zeros(count, np.int64) for v in partial.summed}
        at = tuple(
            _numbers(i, names | zeros, (count,)) for i in result_indices(node, every.element)
        )
        shape = node.types[0].shape
        flat = np.broadcast_to(np.asarray(ravel(at, shape)), (count,))
        order = np.argsort(flat, kind="stable")
        self.each = count // max(1, node.types[0].size)  # parts of an element
        self.addresses = _numbers(every.address, names, (count,))[order].reshape(-1, self.each)
        if not np.array_equal(flat[order], np.repeat(np.arange(node.types[0].size), self.each)):
            raise NotEstablishedError("elements have different numbers of parts")

    def of(self, flat: Array) -> Array:
        """Addresses of the parts of some elements, along a new last axis."""
        return np.asarray(self.addresses[flat])
