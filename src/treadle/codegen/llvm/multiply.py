"""The template of matmuls: a register tile of rows by vectors, summed along the depth.

A tile's accumulators stay in registers while the depth runs: each iteration loads the vectors of
the right matrix once and spreads one element of the left for every row. Tiles are functions shared
by all matmuls of a program that have the same shape of tile; strides that cost nothing at run time
are their arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from treadle.codegen.llvm.emitter import Function, Reg, fetch, listed, multiply_add, number, vector
from treadle.kernel.cost import LINE


@dataclass(frozen=True, slots=True)
class Tile:
    """What distinguishes one tile function from another."""

    element: str
    rows: tuple[int, ...]  # where each row of the left matrix starts, in elements
    vectors: int
    width: int
    left_is_listed: bool  # whether the depth goes by a table instead of a stride
    right_is_listed: bool
    is_partial: bool  # whether the last vector has fewer lanes than its width
    adds: bool
    has_fma: bool = True
    ahead: int = 0  # lines of the next right matrix that are fetched in `unroll` iterations
    unroll: int = 4  # iterations of the depth written out
    is_whole: bool = False  # whether the depth is a multiple of them

    @property
    def vector(self) -> str:
        return vector(self.element, self.width)

    @property
    def bytes(self) -> int:
        return 8 if self.element == "double" else 4


def tile_function(tile: Tile, name: str) -> Function:
    """The function of a tile.

    Its parameters: left, right, target, bytes between rows of the target, bytes (or the table)
    between iterations of the depth in left and right, the depth, the lanes of the last vector, and
    what to fetch ahead.
    """
    pointers = [Reg("ptr noalias", f"%{matrix}") for matrix in ("left", "right", "target")]
    sides = ("left", tile.left_is_listed), ("right", tile.right_is_listed)
    steps = [Reg("ptr" if by_table else "i64", f"%{s}_step") for s, by_table in sides]
    numbers = Reg("i64", "%depth"), Reg("i64", "%lanes"), Reg("ptr", "%ahead")
    parameters = [*pointers, Reg("i64", "%row"), *steps, *numbers]
    f = Function(name, parameters, attributes="nounwind noinline")
    _TileWriter(f, tile).write(steps)
    f.do("ret void")
    return f


class _TileWriter:
    def __init__(self, function: Function, tile: Tile):
        self.f, self.tile = function, tile
        if tile.is_partial:
            self.mask = self._mask()

    def _mask(self) -> Reg:
        """Lanes of the last vector that exist."""
        f, width = self.f, self.tile.width
        count = f.splat(f.convert("trunc", Reg("i64", "%lanes"), "i32"), width)
        return f.compare("icmp slt", listed(range(width), "i32"), count)

    def write(self, steps: Sequence[Reg]) -> None:
        f, tile = self.f, self.tile
        depth, later = Reg("i64", "%depth"), Reg("ptr", "%ahead")
        sums: Sequence[Reg] = [number(0.0, tile.vector)] * len(tile.rows) * tile.vectors
        start, sides = number(0, "i64"), [Reg("ptr", "%left"), Reg("ptr", "%right")]
        whole = depth if tile.is_whole else f.binary("and", depth, -tile.unroll)
        for stop, unroll in ((whole, tile.unroll), (depth, 1))[: 1 if tile.is_whole else 2]:
            with f.loop(start, stop, unroll, [*sides, later, *sums]) as state:
                *sides, later = state.carried[:3]
                inner = list(state.carried[3:])
                later = self._fetched(later) if unroll > 1 else later
                for k in range(unroll):
                    both = zip(sides, steps, strict=True)
                    here = [self._listed(b, s, state.counter, k) for b, s in both]
                    inner = self._step(here[0], here[1], inner)
                    both = zip(sides, steps, strict=True)
                    sides = [b if s.type == "ptr" else f.offset(b, s) for b, s in both]
                state.next = (*sides, later, *inner)
            *sides, later = state.results[:3]
            sums, start = state.results[3:], stop
        self._store(sums)

    def _fetched(self, address: Reg) -> Reg:
        """Lines asked for into the second-level cache; where the next ones are."""
        f = self.f
        for _ in range(self.tile.ahead):
            fetch(f, address, 2)
            address = f.value("ptr", f"getelementptr i8, {address}, i64 {LINE}")
        return address

    def _listed(self, base: Reg, step: Reg, iteration: Reg, k: int) -> Reg:
        """Where a matrix is at this iteration of the depth, if a table says so."""
        if step.type != "ptr":
            return base
        f = self.f
        entry = f.binary("add", iteration, k) if k else iteration
        return f.offset(base, f.load("i64", f.offset(step, entry, "i64"), 8))

    def _step(self, left: Reg, right: Reg, sums: Sequence[Reg]) -> list[Reg]:
        f, tile = self.f, self.tile
        columns = [self._load(self._vector_at(right, j), j) for j in range(tile.vectors)]
        found = list(sums)
        for i, offset in enumerate(tile.rows):
            address = f.offset(left, offset, tile.element)
            spread = f.splat(f.load(tile.element, address, tile.bytes), tile.width)
            for j, column in enumerate(columns):
                at = i * tile.vectors + j
                found[at] = multiply_add(f, spread, column, found[at], tile.has_fma)
        return found

    def _vector_at(self, base: Reg, j: int) -> Reg:
        return self.f.offset(base, j * self.tile.width, self.tile.element)

    def _is_whole(self, j: int) -> bool:
        return not self.tile.is_partial or j < self.tile.vectors - 1

    def _load(self, address: Reg, j: int) -> Reg:
        f, tile = self.f, self.tile
        if self._is_whole(j):
            return f.load(tile.vector, address, tile.bytes)
        return f.masked_load(address, self.mask, number(0.0, tile.vector), tile.bytes)

    def _store(self, sums: Sequence[Reg]) -> None:
        f, tile = self.f, self.tile
        row = Reg("ptr", "%target")
        for i in range(len(tile.rows)):
            for j in range(tile.vectors):
                address = self._vector_at(row, j)
                value = sums[i * tile.vectors + j]
                if tile.adds:
                    value = f.binary("fadd", self._load(address, j), value)
                if self._is_whole(j):
                    f.store(value, address, tile.bytes)
                else:
                    f.masked_store(value, address, self.mask, tile.bytes)
            row = f.offset(row, Reg("i64", "%row"))
