"""Matmuls of kernels as loops over tiles: rows split evenly, columns in vectors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from treadle.codegen.llvm.emitter import Function, Reg, number
from treadle.codegen.llvm.module import Module
from treadle.codegen.llvm.multiply import Tile
from treadle.kernel.cost import LINE
from treadle.kernel.nodes import Matmul, StridedAxis


def even_tiles(rows: int, most: int) -> list[tuple[int, int, int]]:
    """Rows in tiles of almost one size, at most two sizes: (first row, tiles, rows of each)."""
    if not rows:
        return []
    tiles = -(-rows // most)
    small, larger = divmod(rows, tiles)
    found = [(0, larger, small + 1), (larger * (small + 1), tiles - larger, small)]
    return [part for part in found if part[1]]


@dataclass(frozen=True, slots=True)
class Panel:
    """Some columns: where they start, how many panels of them, vectors and lanes in the last."""

    start: int
    count: int
    vectors: int
    lanes: int


def panels(columns: int, width: int, most: int) -> list[Panel]:
    """Columns as whole panels of so many vectors, then what is left as one of fewer."""
    whole, rest = divmod(columns, most * width)
    found = [Panel(0, whole, most, width)] if whole else []
    if rest:
        vectors = -(-rest // width)
        start = whole * most * width
        found.append(Panel(start, 1, vectors, rest - (vectors - 1) * width))
    return found


Starts = tuple[Reg, Reg, Reg]  # of the target, the left and the right matrix
Ahead = tuple[int, Reg]  # lines to fetch at a time, and from where on
NOTHING: Ahead = (0, Reg("ptr", "null"))


class MatmulWriter:
    """Writes one matmul into a function, given where its matrices start."""

    def __init__(self, function: Function, module: Module, element: str):
        self.f, self.module, self.element = function, module, element
        self.machine = module.machine
        self.bytes = 8 if element == "double" else 4
        self.width = max(1, module.width * 4 // self.bytes)

    def write(self, matmul: Matmul, starts: Sequence[Reg], apart: int = 0, count: int = 1) -> None:
        """`count` such matmuls follow each other, with right matrices `apart` elements apart."""
        target, left, right = starts
        step = apart * self.bytes
        self.next = step if step * count > self.machine.cached_bytes else 0
        columns, vectors = matmul.target.columns.count, self.machine.tile_vectors
        if not matmul.left.columns.count:
            raise AssertionError("a matmul without depth is a fill")
        width = vectors * self.width * self.bytes
        for panel in panels(columns, self.width, vectors):
            offset = panel.start * self.bytes
            for i in self._each(panel.count):
                into, factor = (self._at(p, i, width, offset) for p in (target, right))
                self._rows(matmul, panel, into, left, factor)

    def _rows(self, matmul: Matmul, panel: Panel, target: Reg, left: Reg, right: Reg) -> None:
        rows = matmul.left.rows
        step, stride = matmul.target.rows.stride * self.bytes, rows.stride * self.bytes
        for first, tiles, height in even_tiles(rows.count, self.machine.tile_rows):
            if rows.listed:
                for start in range(first, first + tiles * height, height):
                    source = self._moved(left, rows.listed[start] * self.bytes)
                    into = self._moved(target, start * step)
                    part = rows.part(start, height)
                    self._call(matmul, part, panel, (into, source, right), NOTHING)
                continue
            part = rows.part(first, height)
            for i in self._each(tiles):
                source = self._at(left, i, height * stride, first * stride)
                into = self._at(target, i, height * step, first * step)
                ahead = self._ahead(matmul, first // height, i, right)
                self._call(matmul, part, panel, (into, source, right), ahead)

    def _ahead(self, matmul: Matmul, first: int, tile: Reg | None, right: Reg) -> Ahead:
        """How many lines of the next right matrix a tile fetches at a time, and from where on.

        The tiles of a matrix fetch all of the next one: its first tile would wait for memory.
        """
        axis = matmul.right.rows
        steps = axis.count // self.machine.unroll
        if not self.next or axis.listed or not steps:
            return NOTHING
        tiles = -(-matmul.left.rows.count // self.machine.tile_rows)
        lines = -(-axis.count * axis.stride * self.bytes // (LINE * tiles * steps))
        if lines > self.machine.most_ahead:
            return NOTHING
        size = lines * steps * LINE
        return lines, self._at(self._moved(right, self.next), tile, size, first * size)

    def _call(
        self, matmul: Matmul, rows: StridedAxis, panel: Panel, starts: Starts, ahead: Ahead
    ) -> None:
        """One tile of the target, from where it starts and its factors do."""
        target, left, right = starts
        axes = matmul.left.columns, matmul.right.rows
        tile = Tile(
            self.element,
            tuple(rows.at(i) for i in range(rows.count)),
            panel.vectors,
            self.width,
            bool(axes[0].listed),
            bool(axes[1].listed),
            panel.lanes < self.width,
            matmul.adds,
            self.machine.has_fma,
            ahead[0],
            self.machine.unroll,
            axes[0].count % self.machine.unroll == 0,
        )
        name = self.module.tile(tile)
        row = number(matmul.target.rows.stride * self.bytes, "i64")
        steps = [self._step(w) for w in axes]
        depth, lanes = number(axes[0].count, "i64"), number(panel.lanes, "i64")
        arguments = ", ".join(map(str, (left, right, target, row, *steps, depth, lanes, ahead[1])))
        self.f.do(f"call void @{name}({arguments})")

    def _step(self, axis: StridedAxis) -> Reg:
        if axis.listed:
            offsets = tuple(p * self.bytes for p in axis.listed)
            return Reg("ptr", f"@{self.module.table(offsets)}")
        return number(axis.stride * self.bytes, "i64")

    def _each(self, count: int) -> Iterator[Reg | None]:
        """The number of an iteration whose instructions follow; None where there is only one."""
        if count == 1:
            yield None
            return
        with self.f.loop(0, count, 1) as state:
            yield state.counter

    def _at(self, base: Reg, iteration: Reg | None, step: int, offset: int) -> Reg:
        if iteration is not None:
            base = self.f.offset(base, self.f.binary("mul", iteration, step))
        return self._moved(base, offset)

    def _moved(self, base: Reg, offset: int) -> Reg:
        return self.f.offset(base, offset) if offset else base
