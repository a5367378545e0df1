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
from treadle.kernel.index import Index, Var, flatten, variable
from treadle.kernel.nodes import (
    Accumulate,
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
from treadle.schedule.keep import ROOTS
from treadle.schedule.labels import best_divisor, block_rows
from treadle.schedule.lower import Lowering, attributes_of
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
        return _shared_out(reduction, every, summed, others)
    rows = math.prod(v.extent for v in summed)
    columns = math.prod(v.extent for v in others)
    is_split = rows * columns >= lowering.target.parts and columns and rows > 1
    if is_split and (not kept or (columns >= FEWEST and min(kept) > max(axes))):
        # Along whole rows where nothing is kept, by blocks of rows where columns are.
        split = dict(places)
        parts, inner = _cut(summed, None if not kept else block_rows(rows), split)
        if math.prod(v.extent for v in parts) >= FEWEST:
            return reduction.in_two(every, split, parts, inner, others)
    return [reduction.at_once(every, places, others, summed)]


SHORT = 1024  # columns up to which sums may be made with the rows, by fewer and larger parts
BLOCKS = 1024  # of a reduction: enough for every multiprocessor
THREADS = 1 << 19  # of a reduction that keeps columns: as many as a device has at a time


def _shared_out(
    reduction: _Reduction, every: Sequence[Var], summed: list[Var], kept: list[Var]
) -> list[Kernel]:
    """For a GPU: parts as many as fill it, where what is kept does not fill it alone."""
    places = {v: variable(v) for v in every}
    rows, columns = (math.prod(v.extent for v in vs) for vs in (summed, kept))
    if columns and rows * columns >= reduction.lowering.target.parts:
        is_columns = bool(kept) and kept[-1] is every[-1]
        wanted = (THREADS if is_columns else BLOCKS) // columns
        wanted //= 2 if is_columns and columns <= SHORT else 1
        split = dict(places)
        parts, inner = _in_parts(summed, min(wanted, rows // 16), split)
        if math.prod(v.extent for v in parts) >= FEWEST:
            return reduction.in_two(every, split, parts, inner, kept)
    return [reduction.at_once(every, places, kept, summed)]


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
        at = lowering.place(value, [places[v] for v in kept])
        body.append(Store(lowering.names[value], at, result))
        loops = nest(kept, Role.PARALLEL, body)
        return lowering.kernel(self.position, reader, [value], loops)

    def in_two(
        self,
        every: Sequence[Var],
        places: dict[Var, Index],
        parts: list[Var],
        inner: list[Var],
        kept: Sequence[Var],
    ) -> list[Kernel]:
        """Parts in memory, then the parts together."""
        lowering, value = self.lowering, TensorValue(self.position)
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
        reader = lowering.reader()
        reader.used[name] = lowering.as_type(buffer)
        body = accumulated(self.op, self.wide, parts, [], Load(name, at, self.wide))
        result = widened(Local("acc", self.wide), self.dtype)
        place = lowering.place(value, list(map(variable, kept)))
        body.append(Store(lowering.names[value], place, result))
        second = lowering.kernel(self.position, reader, [value], nest(kept, Role.PARALLEL, body))
        return [first, second]


def accumulated(
    op: str, wide: DType, summed: Sequence[Var], lets: Sequence[Statement], element: Value
) -> list[Statement]:
    """acc, combined over some loops."""
    value = element if element.dtype is wide else Convert(element, wide)
    inner = nest(summed, Role.SEQUENTIAL, [*lets, Accumulate("acc", op, value)])
    return [Let("acc", Literal(identity(op, wide), wide)), *inner]


def widened(value: Value, dtype: DType) -> Value:
    return value if value.dtype is dtype else Convert(value, dtype)
