"""The transpose of what reads: where an operand's elements were read, and what goes back to them.

A result is Σ Π operand[address(variables)]. Where every element of an operand is read at exactly
one value of the variables in its address, its cotangent is a sum of the same form, over the other
variables. Otherwise it is an "adjoint", whose elements are found by solving for the variables.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from treadle_checker.building import Building, flat_index, variable
from treadle_checker.field import Array, Element
from treadle_checker.index import Atom, Index, within
from treadle_checker.types import Node, Read, Shape, Type, Value


def pulled_read(made: Building, node: Node, out: Value, k: int, ct: Value) -> Value:
    """The cotangent of operand k of a move or a sum."""
    operand = made.type_of(node.operands[k])
    found = _one_to_one(node, k, operand)
    if found is None:
        return made.add("adjoint", {"of": node, "which": k}, [ct, *node.operands])
    a, result = node.attributes, node.types[0].shape
    solved, over = found
    count = len(node.operands) - a["indices"]
    own = Read((), flat_index(result, [solved[str(i)] for i in range(len(result))]))
    others = [j for j in range(len(node.operands)) if j != k]
    if node.op == "move":  # what is behind the first operand is never read
        others = [j for j in others if j >= count]
    places = {str(j): str(1 + i) for i, j in enumerate(others)}
    reads = own, *(_replaced(a["reads"][j], solved, places) for j in others)
    operands = [ct, *(node.operands[j] for j in others)]
    is_moved = not over and sum(j < count for j in others) == 0
    parts = {
        "reads": reads, "over": over, "indices": a["indices"], "value": a["value"],
        "dtype": operand.dtype,
    }  # fmt: skip
    if is_moved:
        ct = made.cast(ct, operand.dtype)
        return made.read("move", operand.shape, [ct, *operands[1:]], **parts)
    return made.read("reduce_sum", operand.shape, operands, **parts)


def _replaced(read: Read, solved: Mapping[str, Index], places: Mapping[str, str]) -> Read:
    def index(given: Index) -> Index:
        return _renamed(given.replaced(solved), places)

    guards = tuple((index(i), low, high) for i, low, high in read.guards)
    return Read(guards, index(read.address))


def _renamed(index: Index, places: Mapping[str, str]) -> Index:
    """With other names for what is data."""

    def atom(given: Any) -> Any:
        if not isinstance(given, Atom):
            return given
        inner = given.of
        of = places[inner] if isinstance(inner, str) else _renamed(inner, places)
        return Atom(given.kind, of, given.size)

    return Index(index.offset, tuple((factor, atom(a)) for factor, a in index.terms))


def _one_to_one(node: Node, k: int, operand: Type) -> tuple[dict[str, Index], Shape] | None:
    """The variables as indices of the operand's own elements, and the extents of those that are
    summed over, if its address takes every value once."""
    a, result = node.attributes, node.types[0].shape
    extents = {str(i): n for i, n in enumerate((*result, *a["over"]))}
    address = a["reads"][k].address.replaced({"flat": _flat_of(result)})
    is_first = node.op != "move" or k == 0
    if a["reads"][k].guards or not is_first or any(isinstance(x, Atom) for _, x in address.terms):
        return None
    solved: dict[str, Index] = {name: Index(0) for name, n in extents.items() if n == 1}
    offset, step, rank = address.offset, 1, len(operand.shape)
    linear = [(f, str(x)) for f, x in address.terms if extents[str(x)] != 1]
    for factor, name in sorted(linear, key=lambda term: abs(term[0])):
        n = extents[name]
        if abs(factor) != step:
            return None
        at = _digit(operand.shape, step, n)
        solved[name] = at
        if factor < 0:
            offset += factor * (n - 1)
            solved[name] = Index(n - 1, tuple((-f, x) for f, x in at.terms))
        step *= n
    if offset or step != operand.size or operand.size == 0:
        return None
    over: list[int] = []
    for name, n in extents.items():
        if name not in solved:
            solved[name] = variable(rank + len(over))
            over.append(n)
    solved["flat"] = flat_index(result, [solved[str(i)] for i in range(len(result))])
    return solved, tuple(over)


def _digit(shape: Shape, step: int, n: int) -> Index:
    """flat // step mod n, of an element of a shape: one of its axes, if it is one."""
    for i, own in enumerate(shape):
        if own == n and math.prod(shape[i + 1 :]) == step:
            return variable(i)
    above = variable("flat")
    if step != 1:
        above = Index(0, ((1, Atom("quotient", above, step)),))
    is_last = math.prod(shape) == step * n
    return above if is_last else Index(0, ((1, Atom("remainder", above, n)),))


def _flat_of(shape: Shape) -> Index:
    return flat_index(shape, [variable(i) for i in range(len(shape))])


def adjoint(use: Any) -> Element:
    """Σ over all values of the variables at which an operand's elements are read."""
    of: Node = use.node.attributes["of"]
    k: int = use.node.attributes["which"]
    forward = Node(of.op, of.attributes, use.node.operands[1:], of.types)
    return _Solving(use, type(use)(use.on, forward, np.zeros(0, np.int64)), k).total()


class _Solving:
    """Which values of the variables lead to elements that are asked for."""

    def __init__(self, use: Any, forward: Any, k: int):
        self.use, self.forward, self.k = use, forward, k
        a, result = forward.a, forward.node.types[0].shape
        self.result, self.a = result, a
        self.extents = {str(i): n for i, n in enumerate((*result, *a["over"]))}
        self.flat = _flat_of(result)
        self.address = self._plain(a["reads"][k].address)
        self.atoms = [(f, x) for f, x in self.address.terms if isinstance(x, Atom)]
        self.linear = [(f, x) for f, x in self.address.terms if isinstance(x, str)]
        given: set[str] = set()
        for _, atom in self.atoms:
            given |= self._names(atom)
        self.given = sorted(given)  # variables that are gone through
        self.linear = [(f, x) for f, x in self.linear if x not in given]
        found = {*given, *(x for _, x in self.linear)}
        self.free = [x for x in self.extents if x not in found]

    def _plain(self, index: Index) -> Index:
        return index.replaced({"flat": self.flat})

    def _names(self, atom: Atom) -> set[str]:
        """The variables that a quotient, a remainder or what is data depends on."""
        inner = self.a["reads"][int(atom.of)].address if isinstance(atom.of, str) else atom.of
        names: set[str] = set()
        for _, x in self._plain(inner).terms:
            names |= {x} if isinstance(x, str) else self._names(x)
        return names

    def total(self) -> Element:
        use, asked = self.use, self.use.at
        field, dtype = use.field, use.node.types[0].dtype
        found = use.number(0).spread(asked.shape)
        outer = math.prod(self.extents[x] for x in self.given)
        for first in use.on.blocks(outer, max(1, len(asked))):
            owner, variables = self._solved(asked, first)
            inner = math.prod(self.extents[x] for x in self.free)
            field.budget.need(len(owner) * inner)
            for some in use.on.blocks(inner, max(1, len(owner))) if len(owner) else ():
                rows = np.repeat(np.arange(len(owner)), len(some))
                whole = {x: values[rows] for x, values in variables.items()}
                whole |= self._counted(self.free, np.tile(some, len(owner)))
                own, held = owner[rows], self._held(whole, len(rows))
                if not held.all():
                    own, whole = own[held], {x: v[held] for x, v in whole.items()}
                if len(own):
                    term = self._term(whole, dtype).spread(own.shape)
                    found = field.scattered(term, own, found, dtype)
        return found

    def _counted(self, names: list[str], at: Array) -> dict[str, Array]:
        """Values of some variables by one number."""
        found: dict[str, Array] = {}
        for x in reversed(names):
            found[x] = at % self.extents[x]
            at = at // self.extents[x]
        return found

    def _solved(self, asked: Array, first: Array) -> tuple[Array, dict[str, Array]]:
        """Which element each row is for, and the variables of its address."""
        given = self._counted(self.given, first)
        given = {x: np.broadcast_to(v, first.shape) for x, v in given.items()}
        base, is_inside = self._base(given, len(first))
        owner = np.repeat(np.arange(len(asked)), len(first))
        row = np.tile(np.arange(len(first)), len(asked))
        keep = is_inside[row]
        rest = asked[owner] - base[row]
        variables = {x: v[row] for x, v in given.items()}
        self.use.field.budget.spend(8 * len(owner))
        linear = sorted(self.linear, key=lambda term: -abs(term[0]))
        ends = [sorted((0, f * (self.extents[x] - 1))) for f, x in linear]
        for position in range(len(linear) + 1):
            low = sum(e[0] for e in ends[position:])
            high = sum(e[1] for e in ends[position:])
            keep = keep & (low <= rest) & (rest <= high)
            owner, rest = owner[keep], rest[keep]
            variables = {x: v[keep] for x, v in variables.items()}
            if position == len(linear):
                break
            factor, x = linear[position]
            later = [sum(e[i] for e in ends[position + 1 :]) for i in (0, 1)]
            # factor · value lies between what the others may leave.
            sides = (rest - later[1], rest - later[0])
            if factor < 0:
                sides = (-sides[1], -sides[0])
            start = np.maximum(0, -(-sides[0] // abs(factor)))
            stop = np.minimum(self.extents[x] - 1, sides[1] // abs(factor))
            counts = np.maximum(0, stop - start + 1)
            rows = np.repeat(np.arange(len(owner)), counts)
            self.use.field.budget.spend(8 * len(rows))
            step = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
            value = start[rows] + step
            owner, rest = owner[rows], rest[rows] - factor * value
            variables = {y: v[rows] for y, v in variables.items()} | {x: value}
            keep = np.ones(len(owner), bool)
        return owner, variables

    def _base(self, given: dict[str, Array], count: int) -> tuple[Array, Array]:
        """The part of the address that is known, and where what is data is no index of nothing: an
        element that a gather clamps an index to has no gradient."""
        base = np.full(count, self.address.offset, np.int64)
        is_inside = np.ones(count, bool)
        for factor, x in self.address.terms:
            if isinstance(x, Atom):
                one = Index(0, ((1, x),))
                if isinstance(x.of, str) and self.a["name"] in ("gather", "embedding"):
                    drawn = self.forward.read(int(x.of), self._with_flat(given)).p
                    is_inside &= np.broadcast_to((drawn >= 0) & (drawn < x.size), (count,))
                base = base + factor * self.forward.number_at(one, self._with_flat(given))
            elif x in given:
                base = base + factor * given[x]
        return np.broadcast_to(base, (count,)), is_inside

    def _with_flat(self, variables: dict[str, Array]) -> dict[str, Array]:
        is_whole = all(str(i) in variables for i in range(len(self.result)))
        return {**variables, "flat": self.flat.at(variables)} if is_whole else variables

    def _held(self, variables: dict[str, Array], count: int) -> Array:
        """Where the operand is read: within its guards, and of a move outside those before it."""
        whole = self._with_flat(variables)

        def holds(k: int) -> Array:
            guards = self.a["reads"][k].guards
            at = within(guards, lambda index: self.forward.number_at(index, whole))
            return np.broadcast_to(at, (count,))

        found = holds(self.k)
        for before in range(self.k if self.forward.node.op == "move" else 0):
            found = found & ~holds(before)
        return found

    def _term(self, variables: dict[str, Array], dtype: str) -> Element:
        """The cotangent of the result there, times what the other operands are."""
        use, forward = self.use, self.forward
        whole = self._with_flat(variables)
        flat = np.asarray(self.flat.at(variables), np.int64)
        ct = use.on.table(use.node.operands[0], np.atleast_1d(flat))
        term = use.field.apply("cast", [ct], [forward.node.types[0].dtype], dtype)
        if forward.node.op == "move":
            return term
        nothing = forward.number(self.a["value"])
        for j in range(len(forward.types) - self.a["indices"]):
            if j != self.k:
                x = forward.operand(j, whole, nothing)
                x = use.field.apply("cast", [x], [forward.types[j].dtype], dtype)
                term = use.field.combined("mul", term, x, dtype)
        return term
