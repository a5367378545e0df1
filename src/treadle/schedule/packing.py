"""Copies of a product's right operand: panels of columns, each of which lies as tiles read it."""

from __future__ import annotations

from dataclasses import dataclass

from treadle.base.dtypes import DType
from treadle.kernel.index import Var, bounded, unflatten, variable
from treadle.kernel.nodes import Literal, Load, Value, Within
from treadle.schedule.divisors import best_divisor
from treadle.schedule.inline import Reader
from treadle.schedule.labels import Labels, in_blocks, is_turned
from treadle.schedule.whole import as_dtype

PACKED_ROWS = 16  # of a right operand that are copied together


@dataclass(frozen=True, slots=True)
class Panels:
    """Outer labels, panel, depth, the panel's columns: as they lie, and as they are walked."""

    loops: list[Var]
    order: list[Var]
    element: Value


def into_panels(
    reader: Reader, labels: Labels, panel: int, dtype: DType, lies: Load | None, is_one: bool
) -> Panels:
    """All panels; or one of them, whose number is the first loop, where others copy theirs.

    `lies` is where an element of the operand is, if it is in memory.
    """
    columns = labels.extent(labels.columns)
    count = -(-columns // panel)
    outer = {c: Var(f"o{c}", labels.sizes[c]) for c in labels.outer}
    depth = {c: Var(f"k{c}", labels.sizes[c]) for c in labels.depth}
    number, lane = Var("panel", count), Var("lane", panel)
    column = variable(number) * panel + variable(lane)
    guards = [] if columns % panel == 0 else [Within(column, 0, columns)]
    split = unflatten(bounded(column, columns), labels.shape(labels.columns))
    places = dict(zip(labels.columns, split, strict=True))
    places |= {c: variable(v) for c, v in (outer | depth).items()}
    loops = order = [*outer.values(), number, *depth.values(), lane]
    last = labels.depth[-1]
    # A transposed view lies along the depth, whatever the order of its axes.
    turns = lies is not None and lies.index.factor_of(Var(f"x{last}", labels.sizes[last])) == 1
    is_by_rows = labels.of_right[-1] in labels.columns and count > 1 and not turns and not is_one
    if is_by_rows:  # some rows of the operand at a time, whole: as they lie in memory
        rows = best_divisor(labels.sizes[last], PACKED_ROWS)
        block, row = Var(f"k{last}_block", labels.sizes[last] // rows), Var(f"k{last}", rows)
        places[last] = variable(block) * rows + variable(row)
        loops = [*outer.values(), number, *list(depth.values())[:-1], block, row, lane]
        order = [*outer.values(), *list(depth.values())[:-1], block, number, row, lane]
    element = reader.under(
        guards,
        lambda: as_dtype(reader.at(labels.right, tuple(places[c] for c in labels.of_right)), dtype),
        Literal(0, dtype),
    )
    if not is_by_rows and isinstance(element, Load) and is_turned(element, loops):
        loops, element = in_blocks(loops, element)
        order = loops
    return Panels(loops, order, element)
