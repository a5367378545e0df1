"""Reductions: in one go, or by parts that the shape fixes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from treadle.base.dtypes import DType, accumulator
from treadle.ir.graph import Node
from treadle.ir.graph import Value as TensorValue
from treadle.ir.ops import reductions
from treadle.kernel.access import loads_of
from treadle.kernel.arithmetic import identity
from treadle.kernel.bindings import SURE_SPREAD, Elements, Partial
from treadle.kernel.contraction import size
from treadle.kernel.geometry import Warpgroups
from treadle.kernel.index import Index, Var, constant, substitute
from treadle.kernel.nodes import (
    Accumulate,
    Buffer,
    Kernel,
    Let,
    Literal,
    Load,
    Local,
    Statement,
    Store,
    Value,
)
from treadle.schedule.cuts import Loops, Walk, as_it_lies, for_cores, for_threads
from treadle.schedule.inline import Reader
from treadle.schedule.keep import ROOTS
from treadle.schedule.lower import Lowering, attributes_of
from treadle.schedule.nests import (
    Body,
    accumulated,
    along,
    apply,
    as_dtype,
    axis_vars,
    in_order,
    parallel,
)
from treadle.schedule.operands import Site

_COMBINE = {
    reductions.REDUCE_SUM: "add",
    reductions.REDUCE_PROD: "mul",
    reductions.REDUCE_MAX: "max",
    reductions.REDUCE_MIN: "min",
}


@ROOTS(*_COMBINE)
def _reduce(lowering: Lowering, position: int, node: Node) -> list[Kernel]:
    """In one go, or by parts that the shape fixes: any number of threads gives the same bits."""
    axes, source = frozenset(attributes_of(node).axes), lowering.graph.type_of(node.operands[0])
    every, target = axis_vars("i", source.shape), lowering.target
    order = tuple(lowering.in_memory_order(node.operands[0], every))
    walk = Walk(along(every), order, frozenset(every[i] for i in axes))
    reduction, loops = _Reduction(lowering, position, node, source.dtype), walk.whole(axes)
    if not source.size or size(loops.inner) < 2 or source.size < target.parts:
        return [reduction.at_once(loops)]
    if target.is_spmd:
        return reduction.for_threads(walk, axes)
    is_last = every[len(every) - len(loops.others) :] == tuple(loops.others)
    split = for_cores(loops, is_last, target.reductions, target.matmuls)
    has_parts = size(split.parts) >= target.reductions.fewest_parts
    return reduction.in_two(split) if has_parts else [reduction.at_once(loops)]


@dataclass(frozen=True, slots=True)
class _Reduction:
    """Writes the kernels of one reduction."""

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

    def for_threads(self, walk: Walk, axes: frozenset[int]) -> list[Kernel]:
        """Parts as many as fill a device, where the rest does not fill it alone."""
        graph, sizes = self.lowering.graph, self.lowering.target.reductions
        value, x = TensorValue(self.position), self.node.operands[0]
        pair = self.lowering.spreads.get(value) if self.op == "add" else None
        x = x if pair is None else graph.nodes[pair[0].node].operands[0]  # both go the same way
        walk = as_it_lies(walk, self._indices(x, walk))
        loops = walk.whole(axes)
        has_moments = walk.is_by_columns and self.op == "add"
        has_moments = has_moments and (pair is not None or value in self.lowering.spread_sums)
        wanted = self._parts(walk, size(loops.others), x in self.lowering.images)
        wanted = min(wanted, size(loops.inner) // self._least_part(walk, size(loops.others)))
        wanted = min(wanted, sizes.most_parts)
        split = for_threads(loops, wanted, has_moments, 1 if walk.is_by_columns else sizes.pack)
        if has_moments:
            return [self._spread(split, *pair)] if pair else self._sums_and_spreads(split)
        has_parts = size(split.parts) >= sizes.fewest_parts
        return self.in_two(split) if has_parts else [self.at_once(loops)]

    def _indices(self, x: TensorValue, walk: Walk) -> list[Index]:
        """Where an element's computation loads: the largest tensor first, best one that lies so."""
        reader = self.lowering.reader()
        element = reader.at(x, walk.source)
        loads = [load for s in (*reader.lets, Let("", element)) for load in loads_of(s)]
        sizes = {b.name: b.nbytes for b in reader.used.values()}
        loads.sort(key=lambda x: (-sizes[x.buffer], not walk.is_in_order(x.index)))
        return [x.index for x in loads]

    def _parts(self, walk: Walk, columns: int, is_image: bool) -> int:
        """How many parts fill a device beside as many columns."""
        sizes = self.lowering.target.reductions
        if not walk.is_by_columns:
            return sizes.blocks // columns
        if is_image:
            return sizes.image_threads // columns
        return sizes.threads // columns // (2 if columns <= sizes.few_columns else 1)

    def _least_part(self, walk: Walk, columns: int) -> int:
        """Elements of a part: rows of a tile, where sums may follow a matmul's elements."""
        target = self.lowering.target
        is_finished = target.matmuls.finishes and walk.is_by_columns
        if is_finished and columns > target.reductions.few_columns:
            return Warpgroups.ROWS
        return target.reductions.least_part

    def at_once(self, loops: Loops) -> Kernel:
        return self._result(loops, *self._accumulated(loops))

    def _accumulated(self, loops: Loops) -> tuple[Reader, Body]:
        """All of the source, or a part of it."""
        reader, x = self.lowering.reader(), self.node.operands[0]
        nothing = Literal(identity(self.op, self.dtype), self.dtype)
        element = reader.under(loops.guards, lambda: reader.at(x, loops.source), nothing)
        return reader, accumulated(self.op, self.wide, loops.inner, reader.lets, element)

    def in_two(self, loops: Loops) -> list[Kernel]:
        """Parts in memory, then the parts together."""
        buffer = self._buffer(self.position, "parts", loops, self.op)
        reader, body = self._accumulated(loops)
        store = Store(buffer.name, loops.at, Local("acc", self.wide))
        nested = parallel(loops.stored, [*body, store])
        first = self.lowering.kernel(self.position, reader, [], nested, "_parts", (buffer,))
        return [first, self._combined(loops, buffer)]

    def _combined(self, loops: Loops, buffer: Buffer) -> Kernel:
        """The result from its parts."""
        reader = self.lowering.reader()
        reader.used[buffer.name] = buffer
        element = Load(buffer.name, loops.at, self.wide)
        return self._result(loops, reader, self._together(loops, [], element))

    def _together(self, loops: Loops, lets: Sequence[Statement], element: Value) -> Body:
        """What the parts give as one; a single part is all."""
        if not loops.parts:
            return (*lets, Let("acc", element))
        return accumulated(self.op, self.wide, loops.parts, lets, element)

    def _result(self, loops: Loops, reader: Reader, body: Body) -> Kernel:
        """The kernel that stores what was accumulated."""
        lowering, value = self.lowering, TensorValue(self.position)
        result = as_dtype(Local("acc", self.wide), self.dtype)
        store = lowering.store(value, loops.result, result)
        nested = parallel(loops.others, [*body, store])
        return lowering.kernel(self.position, reader, [value], nested)

    def _buffer(self, position: int, name: str, loops: Loops, op: str) -> Buffer:
        """Where a number of each part is."""
        elements = Elements(tuple(loops.stored), loops.at, loops.source, loops.guards)
        content = Partial(elements, tuple(loops.inner), op)
        return Site(self.lowering, position).memory(name, self.wide, size(loops.stored), content)

    def _moments(self, position: int, loops: Loops) -> tuple[Buffer, Buffer]:
        """Where sums of parts are, and their spreads around their own means."""
        sums = self._buffer(position, "parts", loops, "add")
        return sums, self._buffer(position, "spreads", loops, "spread")

    def _sums_and_spreads(self, loops: Loops) -> list[Kernel]:
        """Sums of parts and their spreads in memory, then the sums together."""
        lowering, wide = self.lowering, self.wide
        sums, spread = self._moments(self.position, loops)
        reader, x = lowering.reader(), self.node.operands[0]
        zeros: dict[Var, Index] = {v: constant(0) for v in loops.inner}
        first = reader.at(x, tuple(substitute(i, zeros) for i in loops.source))
        before = [*reader.lets, Let("first", as_dtype(first, wide))]
        reader.lets.clear()
        element = as_dtype(reader.at(x, loops.source), wide)
        gap, acc, squares = (Local(n, wide) for n in ("gap", "acc", "squares"))
        count = Literal(size(loops.inner), wide)
        inner = [
            *reader.lets,
            Let("gap", apply("sub", element, Local("first", wide))),
            Accumulate("acc", "add", gap),
            Accumulate("squares", "add", apply("mul", gap, gap)),
        ]
        whole = apply("mul", count, Local("first", wide))
        mean_square = apply("div", apply("mul", acc, acc), count)
        rest = apply("sub", squares, mean_square)
        if size(loops.inner) > SURE_SPREAD:
            rest = apply("max", rest, Literal(0, wide))
        body = [
            *before,
            Let("acc", Literal(0, wide)),
            Let("squares", Literal(0, wide)),
            *in_order(loops.inner, inner),
            Store(sums.name, loops.at, apply("add", acc, whole)),
            Store(spread.name, loops.at, rest),
        ]
        nested = parallel(loops.stored, body)
        made = lowering.kernel(self.position, reader, [], nested, "_parts", (sums, spread))
        return [made, self._combined(loops, sums)]

    def _spread(self, loops: Loops, total: TensorValue, mean: TensorValue) -> Kernel:
        """Spreads of parts, and those of their means around the mean of all."""
        lowering, wide = self.lowering, self.wide
        sums, spread = self._moments(total.node, loops)
        reader = lowering.reader()
        centre = as_dtype(reader.at(mean, loops.result), wide)
        reader.used |= {b.name: b for b in (sums, spread)}
        count = Literal(size(loops.inner), wide)
        own = apply("div", Load(sums.name, loops.at, wide), count)
        gap = Local("gap", wide)
        moved = apply("mul", apply("mul", gap, gap), count)
        element = apply("add", Load(spread.name, loops.at, wide), moved)
        lets = [Let("gap", apply("sub", own, Local("mean", wide)))]
        summed = self._together(loops, lets, element)
        return self._result(loops, reader, (*reader.lets, Let("mean", centre), *summed))
