"""A matmul's operands as its template reads them: the depth as loops, right operands in panels."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from treadle.base.dtypes import DType
from treadle.ir.graph import Value as TensorValue
from treadle.kernel.bindings import Elements, Partial
from treadle.kernel.contraction import Contraction, Operand, named, size
from treadle.kernel.cost import LINE
from treadle.kernel.index import (
    Index,
    Var,
    bounded,
    constant,
    flatten,
    substitute,
    unflatten,
    variable,
)
from treadle.kernel.nodes import (
    Buffer,
    Literal,
    Load,
    Statement,
    Store,
    StridedAxis,
    Value,
    Within,
    strided_axis,
)
from treadle.kernel.target import Matmuls
from treadle.schedule.inline import Reader
from treadle.schedule.nests import as_dtype, best_divisor, divisors, flat_index, parallel


@dataclass(frozen=True, slots=True)
class Digit:
    """A loop of the depth: its iterations, and how far each moves the left and right operand."""

    count: int
    left: int
    right: int


def merged(digits: Sequence[Digit]) -> list[Digit]:
    """Neighbours that are one strided loop in both operands become one."""
    found: list[Digit] = []
    for d in digits:
        last = found[-1] if found else None
        if last and last.left == d.left * d.count and last.right == d.right * d.count:
            found[-1] = Digit(last.count * d.count, d.left, d.right)
        elif d.count > 1:
            found.append(d)
    return found


def cut_depth(digits: Sequence[Digit], most: int) -> tuple[list[Digit], list[Digit]]:
    """Loops around the template, and those inside it: about `most` elements at a time."""
    outer, inner, size = list(digits), list[Digit](), 1
    while outer:
        d = outer.pop()
        if size * d.count <= most:
            inner.insert(0, d)
            size *= d.count
            continue
        part = best_divisor(d.count, most // size, max(1, most // (4 * size)))
        if part > 1:
            inner.insert(0, Digit(part, d.left, d.right))
        if part < d.count:
            outer.append(Digit(d.count // part, d.left * part, d.right * part))
        break
    return outer, inner


@dataclass(frozen=True, slots=True)
class Depth:
    """Loops around the template, how they move both operands, and what the template sums."""

    part: Var  # of sums that are added at the end
    loops: list[Var]
    moves: tuple[Index, Index]
    summed: tuple[StridedAxis, StridedAxis]
    inner: list[Digit]  # what the template sums, as loops

    @property
    def variables(self) -> list[Var]:
        """Loops over what the template sums."""
        return [Var(f"k{i}", d.count) for i, d in enumerate(self.inner)]


def depth_of(digits: Sequence[Digit], parts: int, most: int) -> Depth:
    """The depth in equal parts, each in loops around about `most` elements."""
    part, first = Var("part", parts), digits[0]
    share = replace(first, count=first.count // parts)
    outer, inner = cut_depth(merged([share, *digits[1:]]), most)
    loops = [Var(f"d{i}", d.count) for i, d in enumerate(outer)]
    left, right = (variable(part) * (share.count * step) for step in (first.left, first.right))
    for var, d in zip(loops, outer, strict=True):
        left, right = left + variable(var) * d.left, right + variable(var) * d.right
    by_left = strided_by(tuple((d.left, d.count) for d in inner))
    by_right = strided_by(tuple((d.right, d.count) for d in inner))
    return Depth(part, loops, (left, right), (by_left, by_right), inner)


@functools.lru_cache(maxsize=256)
def strided_by(digits: tuple[tuple[int, int], ...]) -> StridedAxis:
    """Where loops take an operand, by their strides and counts."""
    places = [0]
    for stride, count in digits:
        places = [p + i * stride for p in places for i in range(count)]
    return strided_axis(places)


@dataclass(frozen=True, slots=True)
class Panels:
    """Outer axes, panel, depth, the panel's columns: in memory order, and in loop order."""

    loops: list[Var]
    order: list[Var]
    element: Value
    elements: Elements  # of the operand, where they lie


def into_panels(
    reader: Reader,
    contraction: Contraction[TensorValue],
    panel: int,
    dtype: DType,
    limits: Matmuls,
) -> Panels:
    """All panels of a right operand."""
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
    if is_by_rows and not is_transposed:  # some rows at a time, in memory order
        rows = best_divisor(last.extent, limits.packed_rows)
        row = replace(depth.pop(last), extent=rows)
        block = Var(f"{row.name}_block", last.extent // rows)
        indices[last] = variable(block) * rows + variable(row)
        loops = [*outer.values(), number, *depth.values(), block, row, lane]
        order = [*outer.values(), *depth.values(), block, number, row, lane]
    at = tuple(indices[v] for v in right.axes)
    elements = Elements(tuple(loops), flat_index(loops), at, tuple(guards))
    element = reader.under(
        guards, lambda: as_dtype(reader.at(right.value, at), dtype), Literal(0, dtype)
    )
    if order is loops and isinstance(element, Load) and _is_transposed(element, loops):
        loops, element = _in_blocks(loops, element, limits)
        order = loops
    return Panels(loops, order, element, elements)


def partial_sums(
    given: Contraction[TensorValue], contraction: Contraction[TensorValue], part: Var
) -> Partial:
    """What sums of parts of the depth hold: the first axis is cut, the result's are in order."""
    first, result = contraction.depth[0], contraction.result
    inner = Var(f"{first.name}_part", first.extent // part.extent)
    cut = variable(part) * inner.extent + variable(inner)
    depth = tuple(cut if v == first else variable(v) for v in given.depth)
    at = flatten([variable(v) for v in result], [v.extent for v in result])
    element = (*map(variable, given.result), *depth)
    elements = Elements((part, *result), at + variable(part) * size(result), element)
    return Partial(elements, (inner, *(v for v in given.depth if v != first)))


OWN = "panel.copy"  # a thread's memory


@dataclass(frozen=True, slots=True)
class Group:
    """Columns that a task copies and multiplies: part of an axis, and all of those after it."""

    axis: Var
    part: int
    after: tuple[Var, ...]
    panel: int = 0  # columns of a panel, where the copy is by panels
    first: int = 0  # of the axis: what is before it belongs to other groups

    @property
    def columns(self) -> int:
        return self.part * size(self.after)

    @property
    def loop(self) -> Var:
        return replace(named("g", self.axis), extent=(self.axis.extent - self.first) // self.part)

    @property
    def start(self) -> Index:
        if self.loop.extent == 1:
            return constant(self.first)
        return variable(self.loop) * self.part + self.first

    @property
    def rest(self) -> Group | None:
        """What whole groups leave of the axis."""
        left = (self.axis.extent - self.first) % self.part
        if not left:
            return None
        return replace(self, part=left, first=self.axis.extent - left)

    @property
    def stride(self) -> int:
        """Elements from one row of the copy to the next: an odd number of lines.

        Columns of an even number would lie in few sets of a cache.
        """
        return (-(-self.columns // _LINE) | 1) * _LINE


_LINE = LINE // 4  # elements


def window_group(c: Contraction[TensorValue], lanes: int, limits: Matmuls) -> Group | None:
    """The columns of a task that copies its windows, where they lie in short or strided runs.

    A copy is used by all rows, so that it pays if there are some; what is around the rows is
    what threads share.
    """
    left, right = c.left.load, c.right.load
    is_batched = any(v.extent > 1 and v not in c.left.axes for v in c.outer)
    if left is None or right is None or not is_batched:
        return None
    last = c.tiled[-1].extent
    run = last if right.index.factor_of(c.tiled[-1]) == 1 else 1
    fills = run > lanes and run * limits.full_lanes >= -(-run // lanes) * lanes
    is_few = size(c.rows) < limits.copied_rows or size(c.tiled) < lanes
    return None if fills or is_few else full_group(c.tiled, lanes, limits.group_columns)


def full_group(tiled: Sequence[Var], lanes: int, most: int) -> Group:
    """The group that fills most lanes, of those the largest.

    Groups are equal parts of an axis, unless those are small or leave many lanes empty, as the
    divisors of a prime do: then the last one is shorter, and one task takes all of an axis.
    """
    equal, unequal = list[tuple[float, int, Group]](), list[tuple[float, int, Group]]()
    for i, axis in enumerate(tiled):
        after = tuple(tiled[i + 1 :])
        for part in range(1, min(axis.extent, most // size(after)) + 1):
            group = Group(axis, part, after)
            entry = (_filled(group, lanes), group.columns, group)
            (unequal if group.rest else equal).append(entry)
    best = max(equal, key=lambda entry: entry[:2])
    if unequal and (best[0] < WELL_FILLED or best[1] < lanes):
        best = max(best, max(unequal, key=lambda e: e[:2]), key=lambda entry: entry[:2])
    return best[2]


WELL_FILLED = 0.75  # of the lanes, from which equal groups for threads to share pay


def _filled(group: Group, lanes: int) -> float:
    """The part of the lanes that hold a column, over all groups of an axis."""
    rest = group.rest
    used = group.loop.extent * -(-group.columns // lanes)
    used += -(-rest.columns // lanes) if rest else 0
    return group.axis.extent * size(group.after) / (used * lanes)


def even_group(tiled: Sequence[Var], panel: int, limits: Matmuls) -> Group | None:
    """Whole panels along the last axis, if there are enough groups for threads to share."""
    last = tiled[-1]
    if len(tiled) > 1 or last.extent % panel or last.extent < limits.few_tasks * panel:
        return None
    parts = [
        d
        for d in divisors(last.extent)
        if d % panel == 0 and d <= limits.group_columns and last.extent // d >= limits.group_tasks
    ]
    return Group(last, max(parts, default=panel), (), panel)


def copied_columns(
    load: Load, right: Operand[TensorValue], group: Group, depth: Depth, stride: int
) -> tuple[list[Statement], Buffer]:
    """A group's columns of the right operand in memory of the thread, for a part of the depth."""
    deep = depth.variables
    across = [replace(named("c", v), extent=v.extent) for v in (group.axis, *group.after)]
    across[0] = replace(across[0], extent=group.part)
    at = load.index + depth.moves[1]
    for var, digit in zip(deep, depth.inner, strict=True):
        at = at + variable(var) * digit.right
    for var, axis in zip(across, (group.axis, *group.after), strict=True):
        at = at + variable(var) * (right.stride(axis) or 0)
    rows = size(deep)
    to = flat_index(deep) * stride + flat_index(across)
    order = [*deep, *across]
    if group.panel and depth.inner and depth.inner[-1].right == 1:  # transposed, by panels
        number, lane = Var("p", group.part // group.panel), Var("lane", group.panel)
        column = {across[0]: variable(number) * group.panel + variable(lane)}
        at, to, order = substitute(at, column), substitute(to, column), [number, *deep, lane]
    store = Store(OWN, to, Load(load.buffer, at, load.dtype))
    return list(parallel(order, [store])), Buffer(OWN, load.dtype, rows * stride)


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


@dataclass(slots=True)
class BlockRows:
    """The rows of a matmul: loops over blocks, and the rows of one block."""

    outer: list[Var]
    inner: list[Var]
    indices: dict[Var, Index]

    @property
    def count(self) -> int:
        return size(self.inner)


def row_blocks(contraction: Contraction[TensorValue], wanted: int, least: int) -> BlockRows:
    """The last axes, and part of one before, as the rows of a block."""
    rows, count, after = BlockRows([], [], {}), 1, 0
    for axis in reversed(contraction.rows):
        n, at = axis.extent, contraction.result.index(axis)
        is_next = not rows.inner or at + 1 == after
        part = n if count * n <= wanted and not rows.outer and is_next else 1
        if part < n and count < wanted and not rows.outer and is_next:
            part = best_divisor(n, wanted // count, max(1, least // count))
        after = at
        inner, outer = (
            replace(named("r", axis), extent=part),
            replace(named("b", axis), extent=n // part),
        )
        rows.indices[axis] = variable(outer) * part + variable(inner)
        rows.inner = [inner, *rows.inner] if part > 1 else rows.inner
        rows.outer = [outer, *rows.outer] if outer.extent > 1 else rows.outer
        count *= part
    return rows
