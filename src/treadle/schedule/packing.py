"""Copies of a matmul's right operand: panels of columns, each contiguous as tiles read it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from treadle.base.dtypes import DType
from treadle.ir.graph import Value as TensorValue
from treadle.kernel.contraction import Contraction, named, size
from treadle.kernel.index import Var, bounded, substitute, unflatten, variable
from treadle.kernel.nodes import Literal, Load, Value, Within
from treadle.kernel.target import Matmuls
from treadle.schedule.inline import Reader
from treadle.schedule.nests import as_dtype, best_divisor, divisors


@dataclass(frozen=True, slots=True)
class Panels:
    """Outer axes, panel, depth, the panel's columns: in memory order, and in loop order."""

    loops: list[Var]
    order: list[Var]
    element: Value


def into_panels(
    reader: Reader,
    contraction: Contraction[TensorValue],
    panel: int,
    dtype: DType,
    limits: Matmuls,
    is_one: bool,
) -> Panels:
    """All panels; or one of them, whose number is the first loop, where others copy theirs."""
    right, columns = contraction.right, size(contraction.tiled)
    count = -(-columns // panel)
    outer = {v: named("o", v) for v in contraction.outer}
    depth = {v: named("k", v) for v in contraction.depth}
    number, lane = Var("panel", count), Var("lane", panel)
    column = variable(number) * panel + variable(lane)
    guards = [] if columns % panel == 0 else [Within(column, 0, columns)]
    split = unflatten(bounded(column, columns), [v.extent for v in contraction.tiled])
    indices = dict(zip(contraction.tiled, split, strict=True))
    indices |= {axis: variable(v) for axis, v in (outer | depth).items()}
    loops = order = [*outer.values(), number, *depth.values(), lane]
    last = contraction.depth[-1]
    # A transposed view is contiguous along the depth, whatever the order of its axes.
    is_transposed = right.stride(last) == 1
    is_by_rows = right.axes[-1] in contraction.tiled and count > 1
    if is_by_rows and not is_transposed and not is_one:  # some rows at a time, in memory order
        rows = best_divisor(last.extent, limits.packed_rows)
        row = replace(depth.pop(last), extent=rows)
        block = Var(f"{row.name}_block", last.extent // rows)
        indices[last] = variable(block) * rows + variable(row)
        loops = [*outer.values(), number, *depth.values(), block, row, lane]
        order = [*outer.values(), *depth.values(), block, number, row, lane]
    element = reader.under(
        guards,
        lambda: as_dtype(reader.at(right.value, tuple(indices[v] for v in right.axes)), dtype),
        Literal(0, dtype),
    )
    if order is loops and isinstance(element, Load) and _is_transposed(element, loops):
        loops, element = _in_blocks(loops, element, limits)
        order = loops
    return Panels(loops, order, element)


def _is_transposed(load: Load, loops: Sequence[Var]) -> bool:
    """Whether a copy reads along the depth: it is transposed in squares."""
    return load.index.factor_of(loops[-2]) == 1 and loops[-2].extent % 8 == 0


def _in_blocks(loops: Sequence[Var], load: Load, limits: Matmuls) -> tuple[list[Var], Load]:
    """The depth of a copy in blocks of squares: enough of them for many threads."""
    depth, others = loops[-2], size(loops[:-2])
    square = 16 if depth.extent % 16 == 0 else 8
    squares = depth.extent // square
    enough = [
        n
        for n in divisors(squares)
        if n * square <= limits.copied_depth and others * squares // n >= limits.copy_tasks
    ]
    length = square * max(enough, default=1)
    block, inner = Var(f"{depth.name}_block", depth.extent // length), Var(depth.name, length)
    index = substitute(load.index, {depth: variable(block) * length + variable(inner)})
    return [*loops[:-2], block, inner, loops[-1]], replace(load, index=index)
