"""What lies where in a buffer: elements of a value by address, and the parts of sums."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from treadle_checker.elements import Shape, ravel, unravel
from treadle_checker.field import Array
from treadle_checker.index import Guard, Index, within
from treadle_checker.program import Layout, Whole
from treadle_checker.reading import NotEstablished
from treadle_checker.types import Node, Type

MOST = 2**22  # addresses that are listed


@dataclass(frozen=True, slots=True)
class Places:
    """What is at addresses: an element by its flat index, a zero, or nothing that is known."""

    flat: Array
    is_zero: Array
    is_there: Array


def layout_of(content: Whole | Layout, type_: Type) -> Layout:
    """Of a whole value: a variable for every axis that is longer than 1."""
    if isinstance(content, Layout):
        return content
    names, terms, step = {i: f"axis {i}" for i, n in enumerate(type_.shape) if n != 1}, [], 1
    for i in reversed(names):
        terms.append((step, names[i]))
        step *= type_.shape[i]
    variables = tuple((name, type_.shape[i]) for i, name in names.items())
    index = [Index(0, ((1, names[i]),) if i in names else ()) for i in range(len(type_.shape))]
    return Layout(variables, Index(0, tuple(terms)), tuple(index), ())


def is_all(layout: Layout, node: Node) -> bool:
    """Whether parts of a sum are all of it: one for each element in order, of all its terms."""
    if not layout.op or not node.op.startswith("reduce_"):
        return False
    whole, summed = layout_of(Whole(), node.types[0]), layout.summed
    depth = tuple(Index(0, ((1, name),)) for name, _ in summed)
    is_whole = (layout.variables, layout.element) == (whole.variables, whole.element + depth)
    terms = (sorted(of.address.terms, key=str) for of in (layout, whole))
    is_whole &= next(terms) == next(terms) and not layout.address.offset
    over = tuple(extent for _, extent in summed) == node.attributes["over"]
    # Guards are bounds of sums: they hold everywhere if they do at all corners.
    every = (*layout.variables, *summed)
    corners = np.indices((2,) * len(every)).reshape(len(every), -1)
    ends = {name: at * (n - 1) for at, (name, n) in zip(corners, every, strict=True)}
    return is_whole and over and bool(held_by(layout.guards, ends, corners.shape[1:]).all())


def places(layout: Layout, type_: Type, at: Array) -> Places:
    variables, there = variables_at(layout, at)
    held = held_by(layout.guards, variables, at.shape)
    index = [numbers(i, variables, at.shape) for i in layout.element]
    inside = [np.clip(i, 0, max(0, n - 1)) for i, n in zip(index, type_.shape, strict=True)]
    return Places(ravel(inside, type_.shape, len(at)), there & ~held, there)


def variables_at(layout: Layout, at: Array) -> tuple[dict[str, Array], Array]:
    """The variables at addresses, by division, and whether there are any."""
    known, factors = dict(layout.variables), list[tuple[int, str]]()
    for factor, atom in layout.address.terms:
        if not isinstance(atom, str) or atom not in known or factor <= 0:
            raise NotEstablished("addresses are no sums of variables")
        factors.append((factor, atom))
    factors.sort(reverse=True)
    rest, there = at - layout.address.offset, at >= layout.address.offset
    found = {name: np.zeros(at.shape, np.int64) for name in known}
    for i, (factor, name) in enumerate(factors):
        if i + 1 < len(factors) and factor < factors[i + 1][0] * known[factors[i + 1][1]]:
            raise NotEstablished("addresses of different elements overlap")
        found[name] = rest // factor
        there = there & (found[name] < known[name])
        rest = rest % factor
    return found, there & (rest == 0)


def numbers(index: Index, variables: dict[str, Array], shape: Shape) -> Array:
    return np.broadcast_to(index.at(variables), shape)


def held_by(guards: tuple[Guard, ...], variables: dict[str, Array], shape: Shape) -> Array:
    return np.broadcast_to(within(guards, lambda index: index.at(variables)), shape)


def last_addresses(layout: Layout) -> list[int]:
    """Where the last element is, and the last zero beside a copy's elements: gaps end a row."""
    ends = {name: np.array([extent - 1]) for name, extent in layout.variables}
    if ends:
        name, extent = layout.variables[-1]
        ends[name] = np.arange(extent)
    shape = np.broadcast_shapes((1,), *(a.shape for a in ends.values()))
    at = numbers(layout.address, ends, shape)
    held = held_by(() if layout.op else layout.guards, ends, shape)
    return [int(some[-1]) for some in (at, at[held]) if len(some)]


def part_addresses(node: Node, layout: Layout) -> Array:
    """Where the parts of each element of a sum are, elements by parts."""
    type_, extents = node.types[0], tuple(extent for _, extent in layout.variables)
    count = math.prod(extents)
    if count > MOST:
        raise NotEstablished("too many parts to list")
    grid = unravel(np.arange(count), extents)
    names = dict(zip((name for name, _ in layout.variables), grid, strict=True))
    names |= {name: np.zeros(count, np.int64) for name, _ in layout.summed}
    if not node.op.startswith("reduce_"):
        raise NotEstablished(f"parts of {node.op}")
    index = layout.element[: len(type_.shape)]
    flat = ravel([numbers(i, names, (count,)) for i in index], type_.shape, count)
    order = np.argsort(flat, kind="stable")
    if not np.array_equal(flat[order], np.arange(count) * type_.size // max(1, count)):
        raise NotEstablished("elements have different numbers of parts")
    return numbers(layout.address, names, (count,))[order].reshape(type_.size, -1)
