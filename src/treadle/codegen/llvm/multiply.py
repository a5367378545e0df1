"""The template of matmuls: a register tile of rows by vectors, summed along the depth.

A tile's accumulators stay in registers while the depth runs: each iteration loads the vectors of
the right matrix once and spreads one element of the left for every row. Tiles are functions shared
by all matmuls of a program that have the same shape of tile; strides that cost nothing at run time
are their arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from treadle.codegen.llvm.emitter import Function, Reg, listed, multiply_add, number, vector
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

    @property
    def vector(self) -> str:
        return vector(self.element, self.width)

    @property
    def bytes(self) -> int:
        return 8 if self.element == "double" else 4


# left, right, target, bytes between rows of the target, bytes (or the table) between iterations of
# the depth in left and right, the depth, the lanes of the last vector, and what to fetch ahead.
_PARAMETERS = (
    "ptr noalias %left",
    "ptr noalias %right",
    "ptr noalias %target",
    "i64 %row",
)


def tile_function(tile: Tile, name: str) -> Function:
    """The function of a tile."""
    steps = [
        Reg("ptr" if is_listed else "i64", f"%{side}_step")
        for side, is_listed in (("left", tile.left_is_listed), ("right", tile.right_is_listed))
    ]
    parameters = [Reg(*p.rsplit(" ", 1)) for p in _PARAMETERS]
    parameters += [*steps, Reg("i64", "%depth"), Reg("i64", "%lanes"), Reg("ptr", "%ahead")]
    f = Function(name, parameters, attributes="nounwind noinline")
    writer = _TileWriter(f, tile)
    writer.write(steps[0], steps[1])
    f.do("ret void")
    return f


class _TileWriter:
    def __init__(self, function: Function, tile: Tile):
        self.f, self.tile = function, tile
        self.mask = self._mask() if tile.is_partial else None

    def _mask(self) -> Reg:
        """Lanes of the last vector that exist."""
        f, width = self.f, self.tile.width
        count = f.splat(f.convert("trunc", Reg("i64", "%lanes"), "i32"), width)
        return f.compare("icmp slt", listed(range(width), "i32"), count)

    def write(self, left_step: Reg, right_step: Reg) -> None:
        f, tile = self.f, self.tile
        count = len(tile.rows) * tile.vectors
        sums: Sequence[Reg] = [number(0.0, tile.vector)] * count
        whole = f.binary("and", Reg("i64", "%depth"), number(-tile.unroll, "i64"))
        start, left, right = number(0, "i64"), Reg("ptr", "%left"), Reg("ptr", "%right")
        later = Reg("ptr", "%ahead")
        for stop, unroll in ((whole, tile.unroll), (Reg("i64", "%depth"), 1)):
            carried = [left, right, later, *sums]
            with f.loop(start, stop, number(unroll, "i64"), carried) as state:
                left, right, later, *inner = state.carried
                later = self._fetched(later) if unroll > 1 else later
                for k in range(unroll):
                    at = (
                        self._address(left, left_step, state.counter, k, tile.left_is_listed),
                        self._address(right, right_step, state.counter, k, tile.right_is_listed),
                    )
                    inner = self._step(*at, inner)
                    if not tile.left_is_listed:
                        left = self._moved(left, left_step)
                    if not tile.right_is_listed:
                        right = self._moved(right, right_step)
                state.next = (left, right, later, *inner)
            left, right, later, *sums = state.results
            start = stop
        self._store(sums)

    def _fetched(self, address: Reg) -> Reg:
        """Lines asked for into the second-level cache; where the next ones are."""
        f = self.f
        for _ in range(self.tile.ahead):
            f.declarations.add("declare void @llvm.prefetch.p0(ptr, i32, i32, i32)")
            f.do(f"call void @llvm.prefetch.p0({address}, i32 0, i32 2, i32 1)")
            address = f.value("ptr", f"getelementptr i8, {address}, i64 {LINE}")
        return address

    def _moved(self, address: Reg, step: Reg) -> Reg:
        return self.f.value("ptr", f"getelementptr inbounds i8, {address}, {step}")

    def _address(self, base: Reg, step: Reg, iteration: Reg, k: int, is_listed: bool) -> Reg:
        """Where a matrix is at this iteration of the depth."""
        if not is_listed:
            return base
        f = self.f
        entry = f.binary("add", iteration, number(k, "i64")) if k else iteration
        address = f.value("ptr", f"getelementptr inbounds i64, {step}, {entry}")
        return self._moved(base, f.value("i64", f"load i64, {address}, align 8"))

    def _step(self, left: Reg, right: Reg, sums: Sequence[Reg]) -> list[Reg]:
        f, tile = self.f, self.tile
        columns = [self._right(right, j) for j in range(tile.vectors)]
        found = list(sums)
        for i, offset in enumerate(tile.rows):
            address = f.value("ptr", f"getelementptr inbounds {tile.element}, {left}, i64 {offset}")
            scalar = f.value(tile.element, f"load {tile.element}, {address}, align {tile.bytes}")
            spread = f.splat(scalar, tile.width)
            for j, column in enumerate(columns):
                at = i * tile.vectors + j
                found[at] = multiply_add(f, spread, column, found[at], tile.has_fma)
        return found

    def _right(self, base: Reg, j: int) -> Reg:
        return self._load(self._vector_at(base, j), j)

    def _vector_at(self, base: Reg, j: int) -> Reg:
        tile = self.tile
        return self.f.value(
            "ptr", f"getelementptr inbounds {tile.element}, {base}, i64 {j * tile.width}"
        )

    def _load(self, address: Reg, j: int) -> Reg:
        f, tile = self.f, self.tile
        if self.mask is None or j < tile.vectors - 1:
            return f.value(tile.vector, f"load {tile.vector}, {address}, align {tile.bytes}")
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
                self._put(value, address, j)
            row = self._moved(row, Reg("i64", "%row"))

    def _put(self, value: Reg, address: Reg, j: int) -> None:
        f, tile = self.f, self.tile
        if self.mask is None or j < tile.vectors - 1:
            f.do(f"store {value}, {address}, align {tile.bytes}")
        else:
            f.masked_store(value, address, self.mask, tile.bytes)
