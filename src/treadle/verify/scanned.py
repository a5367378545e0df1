"""Scans on demand: the body once for each row, on the elements of the carries that are needed.

Which they are is found first: an element of a carry may need others of the row before, and those
others again. A carry whose elements need nothing of each other is evaluated where it is asked for;
one that a matmul goes through, as a whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from treadle.domains.domain import input_names
from treadle.domains.float64 import Array
from treadle.ir.control import SCAN, Scan
from treadle.ir.graph import Graph, Node, Value
from treadle.verify.extended import Extended, ExtendedField
from treadle.verify.indices import ravel
from treadle.verify.keyed import keyed
from treadle.verify.machine import NotEstablishedError
from treadle.verify.on_demand import MOST, Grid, OnDemand, along, as_axis, by_output, lengths, whole

AT_ONCE = 2**19  # elements of all rows up to which a scan is evaluated as a whole, and kept
ROUNDS = 8  # until a set of elements needs no others
WORK = 2**28  # elements that may be computed

Grids = dict[int, Grid]  # of carries
Leaf = Callable[[str, Grid], Extended]


@dataclass
class _Body:
    """A scan's node where it stands."""

    on: OnDemand
    node: Node
    given: Scan
    names: list[str] = field(init=False)

    def __post_init__(self) -> None:
        self.names = input_names(self.given.body)

    @property
    def graph(self) -> Graph:
        return self.given.body

    @property
    def first_slice(self) -> int:
        return self.given.constants + self.given.carries

    def carry(self, name: str) -> int | None:
        """Which carry an input is; None for constants and slices."""
        at = self.names.index(name) - self.given.constants
        return at if 0 <= at < self.given.carries else None

    def needed(self, asked: Grids, stacked: dict[int, Grid]) -> Grids:
        """All elements of carries that some need, of any row before."""
        found = dict(asked)
        wanted = stacked | asked
        for _ in range(ROUNDS):
            seen = self._asked(wanted)
            union = {k: _union(found.get(k), g) for k, g in seen.items()}
            grown = {k: g for k, g in union.items() if g != found.get(k)}
            if not grown:
                return found
            found |= grown
            wanted = grown
        shapes = [t.shape for t in self.graph.output_types[: self.given.carries]]
        return {k: whole(shape) for k, shape in enumerate(shapes)}

    def _asked(self, wanted: dict[int, Grid]) -> Grids:
        """Elements of carries that outputs of one row ask for."""
        found: Grids = {}
        types = {n: self.graph.nodes[i].types[0] for n, i in self.graph.leaves.items()}
        field = ExtendedField(self.on.field.field.trial, self.on.field.ordered)

        def leaf(name: str, grid: Grid) -> Extended:
            k = self.carry(name)
            if k is not None:
                found[k] = _union(found.get(k), grid)
            mesh = np.ix_(*map(along, grid)) if grid else ()
            at = np.asarray(ravel(mesh, types[name].shape))
            return keyed(field, name, types[name].dtype)(at)

        body = OnDemand(self.graph, field, lambda _: None, leaf)
        for output, grid in wanted.items():
            body.at_output(output, grid)
        return found

    def run(self, carries: Grids, stacked: dict[int, Grid], rows: set[int]) -> _Found:
        """Every row in order; what is stacked, of some rows."""
        size = sum(math.prod(lengths(g)) for g in (*carries.values(), *stacked.values()))
        if size * self.given.length > WORK:
            raise NotEstablishedError(f"scan of {self.given.length} rows is too large")
        state = {
            k: self.on.full(self.node, self.given.constants + k, g) for k, g in carries.items()
        }
        found = _Found(carries, state, {output: {} for output in stacked})
        steps = range(self.given.length)
        for t in reversed(steps) if self.given.reverse else steps:
            body = self._row(t, found.state, carries)
            if t in rows:
                for output, grid in stacked.items():
                    made = body.at_output(output, grid)
                    found.rows[output][t] = _full(made, grid)
            found.state = {k: _full(body.at_output(k, g), g) for k, g in carries.items()}
        return found

    def _row(self, t: int, state: dict[int, Extended], carries: Grids) -> OnDemand:
        def leaf(name: str, grid: Grid) -> Extended:
            k, at = self.carry(name), self.names.index(name)
            if k is not None:
                return _taken(state[k], carries[k], grid)
            if at < self.given.constants:
                return self.on.operand(self.node, at, grid)
            return self._slice(at, t, grid)

        return OnDemand(self.graph, self.on.field, lambda _: None, leaf)

    def _slice(self, operand: int, t: int, grid: Grid) -> Extended:
        """A row's part; of all rows at once if they are not too many."""
        if self.given.length * math.prod(lengths(grid)) <= MOST // 8:
            every = self.on.full(self.node, operand, (range(self.given.length), *grid))
            return every.map(lambda a: a[t])
        found = self.on.full(self.node, operand, ((t,), *grid))
        return found.map(lambda a: a[0])


@dataclass
class _Found:
    """What rows gave: elements of the carries at the end, and of what is stacked."""

    carries: Grids
    state: dict[int, Extended]
    rows: dict[int, dict[int, Extended]]  # by output and row


@by_output(SCAN)
def _scan(on: OnDemand, value: Value, node: Node, grid: Grid) -> Extended:
    assert isinstance(node.attributes, Scan)
    body, output = _Body(on, node, node.attributes), value.output
    total = sum(t.size for t in node.types)
    if total <= AT_ONCE:
        found = _all(on, value.node, body)
        if output < body.given.carries:
            return _taken(found.state[output], found.carries[output], grid)
        every = whole(node.types[output].shape[1:])
        rows = [_taken(found.rows[output][t], every, grid[1:]) for t in along(grid[0])]
        return _stacked(rows)
    if output < body.given.carries:
        needed = body.needed({output: grid}, {})
        done = body.run(needed, {}, set())
        return _taken(done.state[output], needed[output], grid)
    stacked = {output: grid[1:]}
    needed, wanted = body.needed({}, stacked), along(grid[0])
    done = body.run(needed, stacked, set(wanted.tolist()))
    return _stacked([done.rows[output][t] for t in wanted])


def _all(on: OnDemand, position: int, body: _Body) -> _Found:
    """Everything that a scan gives, kept for those who ask again."""
    if position not in on.scans:
        types, count = body.graph.output_types, body.given.carries
        every = {i: whole(t.shape) for i, t in enumerate(types)}
        carries = {i: every[i] for i in range(count)}
        stacked = {i: every[i] for i in range(count, len(types))}
        on.scans[position] = body.run(carries, stacked, set(range(body.given.length)))
    found = on.scans[position]
    assert isinstance(found, _Found)
    return found


def _union(one: Grid | None, other: Grid) -> Grid:
    if one is None or one == other:
        return other
    joined = (np.union1d(along(a), along(b)) for a, b in zip(one, other, strict=True))
    return tuple(map(as_axis, joined))


def _full(x: Extended, grid: Grid) -> Extended:
    shape = lengths(grid)
    return x.map(lambda a: np.broadcast_to(a, shape))


def _taken(x: Extended, held: Grid, grid: Grid) -> Extended:
    """Of elements that are held, some."""
    if held == grid:
        return x
    pairs = zip(held, grid, strict=True)
    places: list[Array] = [np.searchsorted(along(h), along(g)) for h, g in pairs]
    return x.map(lambda a: a[np.ix_(*places)] if places else a)


def _stacked(rows: list[Extended]) -> Extended:
    """Rows along a new first axis."""

    def part(name: str) -> Array | None:
        arrays = [getattr(r, name) for r in rows]
        if all(a is None for a in arrays):
            return None
        return np.stack([np.zeros(r.p.shape, np.int64) if a is None else a
                         for a, r in zip(arrays, rows, strict=True)])  # fmt: skip

    pieces = any(r.is_piecewise for r in rows)
    q, p = np.stack([r.q for r in rows]), np.stack([r.p for r in rows])
    return Extended(q, p, part("sign"), part("infinite"), is_piecewise=pieces)
