"""Matrix products of kernels as loops over tiles: rows split evenly, columns in vectors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from treadle.codegen.llvm.emitter import Function, Reg, number
from treadle.codegen.llvm.module import Module
from treadle.codegen.llvm.multiply import Tile
from treadle.kernel.cost import LINE
from treadle.kernel.nodes import Multiply, Walk


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


class ProductWriter:
    """Writes one product into a function, given where its matrices start."""

    def __init__(self, function: Function, module: Module, element: str):
        self.f, self.module, self.element = function, module, element
        self.machine = module.machine
        self.bytes = 8 if element == "double" else 4
        self.width = max(1, module.width * 4 // self.bytes)

    def write(
        self, product: Multiply, starts: Sequence[Reg], apart: int = 0, count: int = 1
    ) -> None:
        """`count` such products follow each other, with right matrices `apart` elements apart."""
        target, left, right = starts
        step = apart * self.bytes
        self.next = step if step * count > self.machine.near_bytes else 0
        columns, vectors = product.target.columns.count, self.machine.tile_vectors
        if not product.left.columns.count:
            raise AssertionError("a product without depth is a fill, not a product")
        for panel in panels(columns, self.width, vectors):

            def one(number_: Reg | None, panel: Panel = panel) -> None:
                offset = panel.start * self.bytes
                moved = [
                    self._at(p, number_, vectors * self.width * self.bytes, offset)
                    for p in (target, right)
                ]
                self._rows(product, panel, moved[0], left, moved[1])

            self._repeat(panel.count, one)

    def _rows(self, product: Multiply, panel: Panel, target: Reg, left: Reg, right: Reg) -> None:
        rows = product.left.rows
        step = product.target.rows.stride * self.bytes
        for first, tiles, height in even_tiles(rows.count, self.machine.tile_rows):
            if rows.listed:
                for i in range(tiles):
                    start = first + i * height
                    spot = self._moved(left, rows.listed[start] * self.bytes)
                    into = self._moved(target, start * step)
                    self._call(product, rows.part(start, height), panel, into, spot, right)
                continue
            part = rows.part(first, height)

            def one(number_: Reg | None, part: Walk = part, first: int = first) -> None:
                stride = rows.stride * self.bytes
                spot = self._at(left, number_, part.count * stride, first * stride)
                into = self._at(target, number_, part.count * step, first * step)
                ahead = self._ahead(product, first // part.count, number_, right)
                self._call(product, part, panel, into, spot, right, ahead)

            self._repeat(tiles, one)

    def _ahead(
        self, product: Multiply, first: int, tile: Reg | None, right: Reg
    ) -> tuple[int, Reg]:
        """How many lines of the next right matrix a tile fetches at a time, and from where on.

        The tiles of a matrix fetch all of the next one: its first tile would wait for memory.
        """
        walk, none = product.right.rows, (0, Reg("ptr", "null"))
        turns = walk.count // self.machine.unroll
        if not self.next or walk.listed or not turns:
            return none
        tiles = -(-product.left.rows.count // self.machine.tile_rows)
        lines = -(-walk.count * walk.stride * self.bytes // (LINE * tiles * turns))
        if lines > self.machine.most_ahead:
            return none
        size = lines * turns * LINE
        return lines, self._at(self._moved(right, self.next), tile, size, first * size)

    def _call(
        self,
        product: Multiply,
        rows: Walk,
        panel: Panel,
        target: Reg,
        left: Reg,
        right: Reg,
        ahead: tuple[int, Reg] = (0, Reg("ptr", "null")),
    ) -> None:
        walks = product.left.columns, product.right.rows
        tile = Tile(
            self.element,
            tuple(rows.at(i) for i in range(rows.count)),
            panel.vectors,
            self.width,
            bool(walks[0].listed),
            bool(walks[1].listed),
            panel.lanes < self.width,
            product.adds,
            self.machine.has_fma,
            ahead[0],
            self.machine.unroll,
        )
        name = self.module.tile(tile)
        row = number(product.target.rows.stride * self.bytes, "i64")
        steps = [self._step(w) for w in walks]
        depth, lanes = number(walks[0].count, "i64"), number(panel.lanes, "i64")
        arguments = ", ".join(map(str, (left, right, target, row, *steps, depth, lanes, ahead[1])))
        self.f.do(f"call void @{name}({arguments})")

    def _step(self, walk: Walk) -> Reg:
        if walk.listed:
            places = tuple(p * self.bytes for p in walk.listed)
            return Reg("ptr", f"@{self.module.table(places)}")
        return number(walk.stride * self.bytes, "i64")

    def _repeat(self, count: int, body: Callable[[Reg | None], None]) -> None:
        if count == 1:
            body(None)
            return
        with self.f.loop(number(0, "i64"), number(count, "i64"), number(1, "i64")) as turn:
            body(turn.counter)

    def _at(self, base: Reg, turn: Reg | None, step: int, offset: int) -> Reg:
        if turn is not None:
            moved = self.f.binary("mul", turn, number(step, "i64"))
            base = self.f.value("ptr", f"getelementptr inbounds i8, {base}, {moved}")
        return self._moved(base, offset)

    def _moved(self, base: Reg, offset: int) -> Reg:
        if not offset:
            return base
        return self.f.value("ptr", f"getelementptr inbounds i8, {base}, i64 {offset}")
