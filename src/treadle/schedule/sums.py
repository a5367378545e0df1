"""Reductions: in one go, or by parts that the shape fixes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from treadle.base.dtypes import DType, accumulator
from treadle.ir.graph import Node
from treadle.ir.graph import Value as TensorValue
from treadle.ir.ops import reductions
from treadle.kernel.contraction import size
from treadle.kernel.index import Index, Var, constant, substitute, variable
from treadle.kernel.nodes import Accumulate, Buffer, Kernel, Let, Literal, Load, Local, Store
from treadle.kernel.target import Matmuls, Reductions
from treadle.schedule.inline import Reader
from treadle.schedule.keep import ROOTS
from treadle.schedule.lower import Lowering, attributes_of
from treadle.schedule.nests import (
    Body,
    accumulated,
    apply,
    as_dtype,
    axis_vars,
    best_divisor,
    flat_index,
    in_order,
    parallel,
)
from treadle.schedule.operands import Site
from treadle.schedule.patterns import spread_sums, spreads

_COMBINE = {
    reductions.REDUCE_SUM: "add",
    reductions.REDUCE_PROD: "mul",
    reductions.REDUCE_MAX: "max",
    reductions.REDUCE_MIN: "min",
}


@dataclass(frozen=True, slots=True)
class _Loops:
    """Loops of a reduction: over parts of what is summed, inside a part, and over the rest."""

    every: tuple[Var, ...]  # the axes of the source
    indices: dict[Var, Index]  # of the source, by axis
    parts: list[Var]
    inner: list[Var]
    others: list[Var]

    @property
    def source(self) -> tuple[Index, ...]:
        return tuple(self.indices[v] for v in self.every)

    @property
    def result(self) -> tuple[Index, ...]:
        return tuple(variable(v) for v in self.every if v in self.others)

    @property
    def stored(self) -> list[Var]:
        """Loops over what the parts give."""
        return [*self.parts, *self.others]

    @property
    def at(self) -> Index:
        """Where a part's result is."""
        return flat_index(self.stored)


@ROOTS(*_COMBINE)
def _reduce(lowering: Lowering, position: int, node: Node) -> list[Kernel]:
    """In one go, or by parts that the shape fixes: any number of threads gives the same bits."""
    axes, source = attributes_of(node).axes, lowering.graph.type_of(node.operands[0])
    every = axis_vars("i", source.shape)
    order = lowering.in_memory_order(node.operands[0], every)
    reduced = {every[i] for i in axes}
    summed, others = [v for v in order if v in reduced], [v for v in order if v not in reduced]
    loops = _Loops(every, {v: variable(v) for v in every}, [], summed, others)
    reduction = _Reduction(lowering, position, node, source.dtype)
    target, is_by_columns = lowering.target, bool(others) and others[-1] == order[-1]
    if not size(others) or size(summed) < 2 or size(every) < target.parts:
        return [reduction.at_once(loops)]
    if target.is_spmd:
        is_image = node.operands[0] in lowering.images
        split = _for_threads(loops, is_by_columns, is_image, target.reductions)
    else:
        split = _for_cores(loops, target.reductions, target.matmuls)
    if size(split.parts) < target.reductions.fewest_parts:
        return [reduction.at_once(loops)]
    has_moments = target.is_spmd and is_by_columns and reduction.op == "add"
    found = reduction.moments(split) if has_moments else None
    return found or reduction.in_two(split)


def _for_cores(loops: _Loops, sizes: Reductions, matmuls: Matmuls) -> _Loops:
    """Along whole rows where nothing stays, by blocks of rows where columns do."""
    summed, others = loops.inner, loops.others
    if others:
        is_last = loops.every[-len(others) :] == tuple(others)
        if not is_last or size(others) < sizes.fewest_parts:
            return loops
    elif len(summed) > 1:
        count = 1
        while count < len(summed) - 1 and size(summed[:count]) < sizes.fewest_parts:
            count += 1
        return replace(loops, parts=summed[:count], inner=summed[count:])
    var = summed[-1]
    length = matmuls.block_rows(size(summed)) if others else max(1, var.extent // sizes.least_part)
    part = best_divisor(var.extent, min(var.extent, length))
    return _cut(loops, summed[:-1], var, var.extent // part, [])


def _for_threads(loops: _Loops, is_by_columns: bool, is_image: bool, sizes: Reductions) -> _Loops:
    """Parts as many as fill a device, where the rest does not fill it alone."""
    summed, columns = loops.inner, size(loops.others)
    wanted = (sizes.threads if is_by_columns else sizes.blocks) // columns
    if is_by_columns and is_image:
        wanted = sizes.image_threads // columns
    elif is_by_columns and columns <= sizes.few_columns:
        wanted //= 2
    wanted = min(wanted, size(summed) // sizes.least_part)
    parts: list[Var] = []
    for i, var in enumerate(summed):
        if wanted <= 1:
            return replace(loops, parts=parts, inner=summed[i:])
        if var.extent > wanted:
            count = best_divisor(var.extent, wanted)
            count = count if count <= 2 * wanted else 1
            return _cut(loops, parts, var, count, summed[i + 1 :])
        parts.append(var)
        wanted //= var.extent
    return replace(loops, parts=parts, inner=[])


def _cut(loops: _Loops, parts: list[Var], var: Var, count: int, inner: list[Var]) -> _Loops:
    """Some axes as parts, one cut into a number of them, and others inside a part."""
    outer, rest = Var(f"{var.name}b", count), Var(f"{var.name}r", var.extent // count)
    indices = loops.indices | {var: variable(outer) * rest.extent + variable(rest)}
    return _Loops(loops.every, indices, [*parts, outer], [rest, *inner], loops.others)


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

    def at_once(self, loops: _Loops) -> Kernel:
        return self._result(loops, *self._accumulated(loops))

    def _accumulated(self, loops: _Loops) -> tuple[Reader, Body]:
        """All of the source, or a part of it."""
        reader = self.lowering.reader()
        element = reader.at(self.node.operands[0], loops.source)
        return reader, accumulated(self.op, self.wide, loops.inner, reader.lets, element)

    def in_two(self, loops: _Loops) -> list[Kernel]:
        """Parts in memory, then the parts together."""
        buffer = self._buffer(self.position, "parts", loops)
        reader, body = self._accumulated(loops)
        store = Store(buffer.name, loops.at, Local("acc", self.wide))
        nested = parallel(loops.stored, [*body, store])
        first = self.lowering.kernel(self.position, reader, [], nested, "_parts", (buffer,))
        return [first, self._combined(loops, buffer)]

    def _combined(self, loops: _Loops, buffer: Buffer) -> Kernel:
        """The result from its parts."""
        reader = self.lowering.reader()
        reader.used[buffer.name] = buffer
        element = Load(buffer.name, loops.at, self.wide)
        body = accumulated(self.op, self.wide, loops.parts, [], element)
        return self._result(loops, reader, body)

    def _result(self, loops: _Loops, reader: Reader, body: Body) -> Kernel:
        """The kernel that stores what was accumulated."""
        lowering, value = self.lowering, TensorValue(self.position)
        result = as_dtype(Local("acc", self.wide), self.dtype)
        store = lowering.store(value, loops.result, result)
        nested = parallel(loops.others, [*body, store])
        return lowering.kernel(self.position, reader, [value], nested)

    def _buffer(self, position: int, name: str, loops: _Loops) -> Buffer:
        """Where a number of each part is."""
        return Site(self.lowering, position).memory(name, self.wide, size(loops.stored))

    def moments(self, loops: _Loops) -> list[Kernel] | None:
        """The sum or the spread of a pair that is read once; None for any other sum."""
        graph, value = self.lowering.graph, TensorValue(self.position)
        if value in spread_sums(graph):
            return self._sums_and_spreads(loops)
        pair = spreads(graph).get(value)
        return None if pair is None else [self._spread(loops, *pair)]

    def _sums_and_spreads(self, loops: _Loops) -> list[Kernel]:
        """Sums of parts and their spreads in memory, then the sums together."""
        lowering, wide = self.lowering, self.wide
        sums, spread = (self._buffer(self.position, n, loops) for n in ("parts", "spreads"))
        reader, x = lowering.reader(), self.node.operands[0]
        zeros: dict[Var, Index] = {v: constant(0) for v in loops.inner}
        first = reader.at(x, tuple(substitute(i, zeros) for i in loops.source))
        before = [*reader.lets, Let("first", first)]
        reader.lets.clear()
        element = reader.at(x, loops.source)
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
        body = [
            *before,
            Let("acc", Literal(0, wide)),
            Let("squares", Literal(0, wide)),
            *in_order(loops.inner, inner),
            Store(sums.name, loops.at, apply("add", acc, whole)),
            Store(spread.name, loops.at, apply("max", rest, Literal(0, wide))),
        ]
        nested = parallel(loops.stored, body)
        made = lowering.kernel(self.position, reader, [], nested, "_parts", (sums, spread))
        return [made, self._combined(loops, sums)]

    def _spread(self, loops: _Loops, total: TensorValue, mean: TensorValue) -> Kernel:
        """Spreads of parts, and those of their means around the mean of all."""
        lowering, wide = self.lowering, self.wide
        sums, spread = (self._buffer(total.node, n, loops) for n in ("parts", "spreads"))
        reader = lowering.reader()
        centre = reader.at(mean, loops.result)
        reader.used |= {b.name: b for b in (sums, spread)}
        count = Literal(size(loops.inner), wide)
        own = apply("div", Load(sums.name, loops.at, wide), count)
        gap = Local("gap", wide)
        moved = apply("mul", apply("mul", gap, gap), count)
        element = apply("add", Load(spread.name, loops.at, wide), moved)
        lets = [Let("gap", apply("sub", own, Local("mean", wide)))]
        summed = accumulated("add", wide, loops.parts, lets, element)
        return self._result(loops, reader, (*reader.lets, Let("mean", centre), *summed))
