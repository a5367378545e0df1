"""Reductions: in one go, or by parts that the shape fixes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from treadle.base.dtypes import DType, accumulator
from treadle.ir.graph import Node
from treadle.ir.graph import Value as TensorValue
from treadle.ir.literal import Number
from treadle.ir.ops import reductions
from treadle.kernel.index import Index, Var, constant, flatten, substitute, variable
from treadle.kernel.nodes import (
    Accumulate,
    Apply,
    Buffer,
    Convert,
    Kernel,
    Let,
    Literal,
    Load,
    Local,
    Role,
    Statement,
    Store,
    Value,
)
from treadle.schedule.divisors import best_divisor
from treadle.schedule.keep import ROOTS
from treadle.schedule.lower import Lowering, attributes_of
from treadle.schedule.moments import spread_sums, spreads
from treadle.schedule.nests import axis_vars, nest

_COMBINE = {
    reductions.REDUCE_SUM: "add",
    reductions.REDUCE_PROD: "mul",
    reductions.REDUCE_MAX: "max",
    reductions.REDUCE_MIN: "min",
}


def identity(op: str, dtype: DType) -> Number:
    """What accumulating starts from."""
    if op in ("add", "mul"):
        return int(op == "mul")
    if dtype.is_float:
        return float("-inf") if op == "max" else float("inf")
    return dtype.range()[op == "min"]


FEWEST = 8


@ROOTS(*_COMBINE)
def _reduce(lowering: Lowering, position: int, node: Node) -> list[Kernel]:
    """In one go, or by parts that the shape fixes: any number of threads gives the same bits."""
    axes, source = attributes_of(node).axes, lowering.graph.type_of(node.operands[0])
    kept = [i for i in range(source.rank) if i not in axes]
    reduction = _Reduction(lowering, position, node, source.dtype)
    every = axis_vars("i", source.shape)
    summed, others = [every[i] for i in axes], [every[i] for i in kept]
    places = {v: variable(v) for v in every}
    if lowering.target.is_gpu:
        loops = lowering.walked(node.operands[0], every)
        summed, others = ([v for v in loops if v in vs] for vs in (summed, others))
        return _shared_out(reduction, every, loops[-1:], summed, others)
    rows = math.prod(v.extent for v in summed)
    columns = math.prod(v.extent for v in others)
    is_split = rows * columns >= lowering.target.parts and columns and rows > 1
    if is_split and (not kept or (columns >= FEWEST and min(kept) > max(axes))):
        # Along whole rows where nothing is kept, by blocks of rows where columns are.
        split = dict(places)
        block = lowering.target.matmuls.block_rows(rows) if kept else None
        parts, inner = _cut(summed, block, split)
        if math.prod(v.extent for v in parts) >= FEWEST:
            return reduction.in_two(every, split, parts, inner, others)
    return [reduction.at_once(every, places, others, summed)]


SHORT = 1024  # columns up to which sums may be made with the rows, by fewer and larger parts
BLOCKS = 1024  # of a reduction: enough for every multiprocessor
THREADS = 1 << 19  # of a reduction that keeps columns: as many as a device has at a time
COLUMNS = 1 << 16  # the same of images, which have many rows: a block sums many of them


def _shared_out(
    reduction: _Reduction,
    every: Sequence[Var],
    last: Sequence[Var],
    summed: list[Var],
    kept: list[Var],
) -> list[Kernel]:
    """For a GPU: parts as many as fill it, where what is kept does not fill it alone."""
    places = {v: variable(v) for v in every}
    rows, columns = (math.prod(v.extent for v in vs) for vs in (summed, kept))
    if columns and rows * columns >= reduction.lowering.target.parts:
        is_columns = bool(kept) and kept[-1] is last[-1]
        wanted = (THREADS if is_columns else BLOCKS) // columns
        if is_columns and reduction.node.operands[0] in reduction.lowering.images:
            wanted = COLUMNS // columns
        elif is_columns and columns <= SHORT:
            wanted //= 2
        split = dict(places)
        parts, inner = _in_parts(summed, min(wanted, rows // 16), split)
        if math.prod(v.extent for v in parts) >= FEWEST:
            if is_columns and reduction.op == "add":
                found = _moments(reduction, every, split, parts, inner, kept)
                if found is not None:
                    return found
            return reduction.in_two(every, split, parts, inner, kept)
    return [reduction.at_once(every, places, kept, summed)]


def _moments(
    reduction: _Reduction,
    every: Sequence[Var],
    split: dict[Var, Index],
    parts: list[Var],
    inner: list[Var],
    kept: list[Var],
) -> list[Kernel] | None:
    """The sum or the spread of a pair that is read once; None for any other sum."""
    graph, value = reduction.lowering.graph, TensorValue(reduction.position)
    if value in spread_sums(graph):
        return reduction.first_of_two(every, split, parts, inner, kept)
    pair = spreads(graph).get(value)
    if pair is None:
        return None
    return [reduction.second_of_two(every, parts, inner, kept, *pair)]


def _in_parts(
    summed: Sequence[Var], wanted: int, places: dict[Var, Index]
) -> tuple[list[Var], list[Var]]:
    """Loops over about as many parts as wanted, and loops inside a part."""
    parts: list[Var] = []
    inner: list[Var] = []
    for var in summed:
        if wanted <= 1:
            inner.append(var)
        elif var.extent <= wanted:
            parts.append(var)
            wanted //= var.extent
        else:
            count = best_divisor(var.extent, wanted)
            count = count if count <= 2 * wanted else 1
            outer, rest = Var(f"{var.name}b", count), Var(f"{var.name}r", var.extent // count)
            places[var] = variable(outer) * rest.extent + variable(rest)
            parts.append(outer)
            inner.append(rest)
            wanted = 1
    return parts, inner


def _cut(
    summed: Sequence[Var], block: int | None, places: dict[Var, Index]
) -> tuple[list[Var], list[Var]]:
    """Loops over parts of what is summed, and loops inside a part."""
    if block is None and len(summed) > 1:
        count = 1
        while count < len(summed) - 1 and math.prod(v.extent for v in summed[:count]) < FEWEST:
            count += 1
        return list(summed[:count]), list(summed[count:])
    var = summed[-1]
    part = best_divisor(var.extent, min(var.extent, block or max(1, var.extent // 16)))
    outer, inner = Var(f"{var.name}b", var.extent // part), Var(f"{var.name}r", part)
    places[var] = variable(outer) * part + variable(inner)
    return [*summed[:-1], outer], [inner]


@dataclass
class _Reduction:
    """Writes the loops of one reduction."""

    lowering: Lowering
    position: int
    node: Node
    dtype: DType

    @property
    def op(self) -> str:
        return _COMBINE[self.node.op]

    @property
    def wide(self) -> DType:
        return accumulator(self.dtype)

    def at_once(
        self,
        every: Sequence[Var],
        places: dict[Var, Index],
        kept: Sequence[Var],
        summed: Sequence[Var],
    ) -> Kernel:
        lowering, value = self.lowering, TensorValue(self.position)
        reader = lowering.reader()
        element = reader.at(self.node.operands[0], tuple(places[v] for v in every))
        body = accumulated(self.op, self.wide, summed, reader.lets, element)
        result = widened(Local("acc", self.wide), self.dtype)
        at = lowering.place(value, [places[v] for v in every if v in kept])
        body.append(Store(lowering.names[value], at, result))
        loops = nest(kept, Role.PARALLEL, body)
        return lowering.kernel(self.position, reader, [value], loops)

    def first_of_two(
        self,
        every: Sequence[Var],
        places: dict[Var, Index],
        parts: list[Var],
        inner: list[Var],
        kept: Sequence[Var],
    ) -> list[Kernel]:
        """Sums of parts and their spreads in memory, then the sums together."""
        lowering, wide = self.lowering, self.wide
        shape = [v.extent for v in (*parts, *kept)]
        sums, spread = self._buffers(self.position, math.prod(shape))
        at = flatten([variable(v) for v in (*parts, *kept)], shape)
        reader, x = lowering.reader(), self.node.operands[0]
        zeros: dict[Var, Index] = {v: constant(0) for v in inner}
        first = reader.at(x, tuple(substitute(places[v], zeros) for v in every))
        before = [*reader.lets, Let("first", first)]
        reader.lets.clear()
        element = reader.at(x, tuple(places[v] for v in every))
        gap, acc, squares = (Local(n, wide) for n in ("gap", "acc", "squares"))
        count = Literal(math.prod(v.extent for v in inner), wide)
        loop: list[Statement] = [
            *reader.lets,
            Let("gap", Apply("sub", (element, Local("first", wide)), wide)),
            Accumulate("acc", "add", gap),
            Accumulate("squares", "add", Apply("mul", (gap, gap), wide)),
        ]
        whole = Apply("mul", (count, Local("first", wide)), wide)
        mean_square = Apply("div", (Apply("mul", (acc, acc), wide), count), wide)
        rest = Apply("sub", (squares, mean_square), wide)
        body: list[Statement] = [
            *before,
            Let("acc", Literal(0, wide)),
            Let("squares", Literal(0, wide)),
            *nest(inner, Role.SEQUENTIAL, loop),
            Store(sums.name, at, Apply("add", (acc, whole), wide)),
            Store(spread.name, at, Apply("max", (rest, Literal(0, wide)), wide)),
        ]
        loops = nest([*parts, *kept], Role.PARALLEL, body)
        made = lowering.kernel(self.position, reader, [], loops, "_parts", (sums, spread))
        return [made, self._together(every, parts, kept, sums, at)]

    def _buffers(self, position: int, size: int) -> tuple[Buffer, Buffer]:
        """Where the parts of a sum are, and their spreads."""
        names = (f"{self.lowering.prefix}b{position}.{n}" for n in ("parts", "spreads"))
        found = [Buffer(name, self.wide, size) for name in names]
        self.lowering.buffers |= {b.name: b for b in found}
        return found[0], found[1]

    def second_of_two(
        self,
        every: Sequence[Var],
        parts: list[Var],
        inner: list[Var],
        kept: Sequence[Var],
        total: TensorValue,
        mean: TensorValue,
    ) -> Kernel:
        """Spreads of parts, and those of their means around the mean of all."""
        lowering, wide, value = self.lowering, self.wide, TensorValue(self.position)
        shape = [v.extent for v in (*parts, *kept)]
        sums, spread = self._buffers(total.node, math.prod(shape))
        at = flatten([variable(v) for v in (*parts, *kept)], shape)
        reader = lowering.reader()
        places = tuple(variable(v) for v in every if v in kept)
        centre = reader.at(mean, places)
        reader.used |= {b.name: lowering.as_type(b) for b in (sums, spread)}
        count = Literal(math.prod(v.extent for v in inner), wide)
        own = Apply("div", (Load(sums.name, at, wide), count), wide)
        gap = Local("gap", wide)
        moved = Apply("mul", (Apply("mul", (gap, gap), wide), count), wide)
        element = Apply("add", (Load(spread.name, at, wide), moved), wide)
        lets = [Let("gap", Apply("sub", (own, Local("mean", wide)), wide))]
        body: list[Statement] = [*reader.lets, Let("mean", centre)]
        body += accumulated("add", wide, parts, lets, element)
        result = widened(Local("acc", wide), self.dtype)
        body.append(Store(lowering.names[value], lowering.place(value, places), result))
        return lowering.kernel(self.position, reader, [value], nest(kept, Role.PARALLEL, body))

    def in_two(
        self,
        every: Sequence[Var],
        places: dict[Var, Index],
        parts: list[Var],
        inner: list[Var],
        kept: Sequence[Var],
    ) -> list[Kernel]:
        """Parts in memory, then the parts together."""
        lowering = self.lowering
        shape = [v.extent for v in (*parts, *kept)]
        name = f"{lowering.prefix}b{self.position}.parts"
        buffer = Buffer(name, self.wide, math.prod(shape))
        lowering.buffers[name] = buffer
        at = flatten([variable(v) for v in (*parts, *kept)], shape)
        reader = lowering.reader()
        element = reader.at(self.node.operands[0], tuple(places[v] for v in every))
        body = accumulated(self.op, self.wide, inner, reader.lets, element)
        body.append(Store(name, at, Local("acc", self.wide)))
        loops = nest([*parts, *kept], Role.PARALLEL, body)
        first = lowering.kernel(self.position, reader, [], loops, "_parts", (buffer,))
        return [first, self._together(every, parts, kept, buffer, at)]

    def _together(
        self,
        every: Sequence[Var],
        parts: Sequence[Var],
        kept: Sequence[Var],
        buffer: Buffer,
        at: Index,
    ) -> Kernel:
        """The result from its parts."""
        lowering, value = self.lowering, TensorValue(self.position)
        reader = lowering.reader()
        reader.used[buffer.name] = lowering.as_type(buffer)
        body = accumulated(self.op, self.wide, parts, [], Load(buffer.name, at, self.wide))
        result = widened(Local("acc", self.wide), self.dtype)
        place = lowering.place(value, [variable(v) for v in every if v in kept])
        body.append(Store(lowering.names[value], place, result))
        return lowering.kernel(self.position, reader, [value], nest(kept, Role.PARALLEL, body))


def accumulated(
    op: str, wide: DType, summed: Sequence[Var], lets: Sequence[Statement], element: Value
) -> list[Statement]:
    """acc, combined over some loops."""
    value = element if element.dtype is wide else Convert(element, wide)
    inner = nest(summed, Role.SEQUENTIAL, [*lets, Accumulate("acc", op, value)])
    return [Let("acc", Literal(identity(op, wide), wide)), *inner]


def widened(value: Value, dtype: DType) -> Value:
    return value if value.dtype is dtype else Convert(value, dtype)
