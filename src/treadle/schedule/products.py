"""Products as loops around the template: blocks of rows, panels of columns, parts of the depth.

A block of rows belongs to one thread at a time: what follows row by row is fused behind it, and
what comes before it row by row in front of it. The right operand is copied into panels that lie in
memory as tiles read them, unless it is read too seldom to pay or lies that way already; views
(windows too) are read where they are. Where there are few rows for many weights, threads share
panels instead, and each copies its own.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace

from treadle.base import dtypes
from treadle.base.dtypes import DType, accumulator
from treadle.ir.graph import Node
from treadle.ir.graph import Value as TensorValue
from treadle.ir.ops.linear import CONTRACT
from treadle.kernel.index import (
    Index,
    Var,
    constant,
    flatten,
    variable,
)
from treadle.kernel.nodes import (
    Accumulate,
    Buffer,
    Kernel,
    Let,
    Literal,
    Load,
    Local,
    Matrix,
    Multiply,
    Role,
    Statement,
    Store,
    Value,
    Walk,
    walk,
)
from treadle.schedule.divisors import best_divisor
from treadle.schedule.inline import Reader
from treadle.schedule.keep import ROOTS
from treadle.schedule.labels import (
    Digit,
    Labels,
    block_rows,
    cut_depth,
    labels_of,
    merged,
    offsets,
    plain_load,
)
from treadle.schedule.lower import Lowering
from treadle.schedule.nests import nest
from treadle.schedule.packing import into_panels
from treadle.schedule.whole import as_dtype, plain_product, whole_product

DEPTH = 1024  # of a product: the panel of the right operand stays in the second-level cache
FEW_ROWS = 128  # for so few it does not pay to copy the right operand
FEW_TASKS = 4
OWN_PANEL = "panel.copy"
LEAST_SHARED = 1 << 19  # operations from which threads share a product of few rows
SPARED = 4  # times less must go between threads that share panels: nothing is fused behind them


@ROOTS(CONTRACT)
def contract_kernels(lowering: Lowering, position: int, node: Node) -> list[Kernel]:
    labels = labels_of(lowering, node)
    if lowering.target.is_gpu:
        return whole_product(lowering, position, node) or [
            plain_product(lowering, position, node, labels)
        ]
    dtype = accumulator(node.types[0].dtype)
    is_float = dtype in (dtypes.float32, dtypes.float64)
    if not is_float or not labels.columns or not labels.depth or labels.extent(labels.depth) == 0:
        return [plain_product(lowering, position, node, labels)]
    return _Product(lowering, position, node, labels, dtype).kernels()


@dataclass
class _Rows:
    """The rows of a product: loops over blocks, and the rows of one block."""

    outer: list[Var]
    inner: list[Var]
    indices: dict[str, Index]

    @property
    def count(self) -> int:
        return _count(self.inner)


def _count(variables: list[Var]) -> int:
    found = 1
    for v in variables:
        found *= v.extent
    return found


def _blocks(labels: Labels, takes_all: bool) -> _Rows:
    """Whole last labels, and part of one before, as the rows of a block."""
    count = labels.extent(labels.rows)
    target = count if takes_all else block_rows(count)
    rows, size, last = _Rows([], [], {}), 1, ""
    for label in reversed(labels.rows):
        n = labels.sizes[label]
        is_next = not rows.inner or labels.result.index(label) + 1 == labels.result.index(last)
        part = n if size * n <= target and not rows.outer and is_next else 1
        if part < n and size < target and not rows.outer and is_next:
            part = best_divisor(n, target // size, max(1, 8 // size))
        last = label
        inner, outer = Var(f"r{label}", part), Var(f"b{label}", n // part)
        rows.indices[label] = variable(outer) * part + variable(inner)
        rows.inner = [inner, *rows.inner] if part > 1 else rows.inner
        rows.outer = [outer, *rows.outer] if outer.extent > 1 else rows.outer
        size *= part
    return rows


class _Product:
    """One contraction: the kernels of its operands' copies, of itself, and of its result."""

    def __init__(self, lowering: Lowering, position: int, node: Node, labels: Labels, dtype: DType):
        self.lowering, self.position, self.node, self.dtype = lowering, position, node, dtype
        self.value = TensorValue(position)
        self.panel = lowering.panel * 4 // dtype.itemsize
        self.is_swapped = False
        self.labels = labels
        self.right = self._direct_right()
        if self.right is None and self._expands(labels, "right"):
            self._swap()
        self.copies_panels = self._copies_panels()
        self.rows = _blocks(self.labels, self.copies_panels)
        self.outer = {c: Var(f"o{c}", self.labels.sizes[c]) for c in self.labels.outer}
        self.depth_vars = {c: Var(f"k{c}", self.labels.sizes[c]) for c in self.labels.depth}

    # How the operands are read

    def _swap(self) -> None:
        """Columns along the other operand: a window is read in place as the left one."""
        other = self.labels.swapped
        if other is None or self._expands(other, "right") or other.extent(other.columns) < 8:
            return
        if self._at(other, "left") is None:
            return
        self.labels, self.is_swapped = other, True
        self.right = self._direct_right()

    def _expands(self, labels: Labels, side: str) -> bool:
        """Whether an operand has more elements than the memory it is read from: a window."""
        load = self._at(labels, side)
        size = 0 if load is None else self.lowering.buffers[load.buffer].size
        return load is not None and labels.extent(labels.of(side)) > size

    def _at(self, labels: Labels, side: str) -> Load | None:
        """The load that an element of an operand is, labels as variables x…"""
        reader = self._reader(side)
        places = tuple(variable(Var(f"x{c}", labels.sizes[c])) for c in labels.of(side))
        operand = labels.left if side == "left" else labels.right
        found = plain_load(reader, reader.at(operand, places))
        return found if found is not None and found.dtype is self.dtype else None

    def _reader(self, side: str) -> Reader:
        """Reads an operand; the right one may be computed anew rather than have been kept."""
        again = self.lowering.again.get(self.position) if side == "right" else None
        return self.lowering.reader(again)

    def _direct_right(self) -> Load | None:
        """The right operand where it is, if its columns lie together and copying does not pay."""
        labels = self.labels
        load = self._at(labels, "right")
        if load is None:
            return None
        columns = ""
        for label in reversed(labels.columns):
            found = offsets(load.index, [Var(f"x{c}", labels.sizes[c]) for c in label + columns])
            if found is None or found.listed or found.stride != 1:
                break
            columns = label + columns
        is_short = labels.extent(columns) < min(8, labels.extent(labels.columns))
        expands = labels.extent(labels.of_right) > self.lowering.buffers[load.buffer].size
        rows = labels.extent(labels.rows)
        pays = rows > FEW_ROWS and labels.extent(labels.columns) > self.panel and not expands
        if is_short or pays:
            return None
        self.labels = replace(labels, columns=columns)
        return load

    def _copies_panels(self) -> bool:
        """Whether a thread copies a panel of weights for itself, and takes all rows through it.

        Threads that share rows must each see all that the others have copied. Where there are few
        rows, less goes from one to another if they share columns: the result, and the left operand
        unless it was given.
        """
        labels, lowering = self.labels, self.lowering
        left, right = self._at(labels, "left"), self._at(labels, "right")
        if self.right is not None or left is None or right is None or lowering.repeats:
            return False
        is_plain = len(labels.rows) == 1 and not labels.outer and not self.is_swapped
        is_plain = is_plain and self.node.types[0].dtype is self.dtype and not self.copies_left
        leaves = lowering.graph.leaves
        if not is_plain or right.buffer not in leaves:
            return False
        rows, columns = labels.extent(labels.rows), labels.extent(labels.columns)
        depth = labels.extent(labels.depth)
        is_even = columns % self.panel == 0 and columns >= FEW_TASKS * self.panel
        is_worth = 2 * math.prod(labels.sizes.values()) >= LEAST_SHARED
        moved = rows * (columns + (0 if left.buffer in leaves else depth))
        return is_even and is_worth and depth <= DEPTH and SPARED * moved <= depth * columns

    # Kernels

    def kernels(self) -> list[Kernel]:
        found: list[Kernel] = []
        if self.right is None and not self.copies_panels:
            found.append(self._pack())
        is_final = not self.is_swapped and self.node.types[0].dtype is self.dtype
        digits = self._digits()
        parts = self._parts(digits)
        if is_final and parts == 1:
            target = self.lowering.buffer(self.value)
        else:
            size = self.node.types[0].size * parts
            target = self._temporary("sums", size)
        found += self._multiply(target, digits, parts)
        if not (is_final and parts == 1):
            found.append(self._finish(target, parts))
        return found

    def _temporary(self, name: str, size: int) -> Buffer:
        full = f"{self.lowering.prefix}b{self.position}.{name}"
        return self.lowering.buffers.setdefault(full, Buffer(full, self.dtype, size))

    def _pack(self) -> Kernel:
        """The right operand in panels, in memory for all threads."""
        reader, labels = self._reader("right"), self.labels
        lies = self._at(labels, "right")
        found = into_panels(reader, labels, self.panel, self.dtype, lies, is_one=False)
        buffer = self._temporary("packed", _count(found.loops))
        at = flatten([variable(v) for v in found.loops], [v.extent for v in found.loops])
        store = Store(buffer.name, at, found.element)
        body = nest(found.order, Role.PARALLEL, [*reader.lets, store])
        kernel = self.lowering.kernel(self.position, reader, [], body, "_pack", (buffer,))
        # What is computed again, or is there from the start, waits by itself until it is needed.
        leaves = self.lowering.graph.leaves
        waits = self.position in self.lowering.again or all(b.name in leaves for b in kernel.inputs)
        return replace(kernel, is_whole=waits)

    def _copied_panel(self, reader: Reader) -> tuple[Buffer, list[Statement]]:
        """One panel of the right operand in memory of the thread."""
        lies = self._at(self.labels, "right")
        found = into_panels(reader, self.labels, self.panel, self.dtype, lies, is_one=True)
        inner = found.loops[1:]
        buffer = Buffer(OWN_PANEL, self.dtype, _count(inner))
        at = flatten([variable(v) for v in inner], [v.extent for v in inner])
        return buffer, list(nest(inner, Role.PARALLEL, [Store(OWN_PANEL, at, found.element)]))

    def _digits(self) -> list[Digit]:
        """The depth as loops, with how far each moves the operands; () where left is copied."""
        labels = self.labels
        left, right = self._at(labels, "left"), self.right
        inner = labels.extent(labels.depth)
        found = []
        for label in labels.depth:
            n = labels.sizes[label]
            inner //= n
            var = Var(f"x{label}", n)
            to_left = left.index.factor_of(var) if left is not None else None
            to_right = right.index.factor_of(var) if right is not None else inner * self.panel
            found.append(Digit(n, _known(to_left, inner * self.rows.count), _known(to_right, 0)))
        return found

    @property
    def copies_left(self) -> bool:
        """Whether a block of the left operand is copied first: what is computed, or far apart."""
        labels, load = self.labels, self._at(self.labels, "left")
        if load is None:
            return True
        last = labels.depth[-1]
        is_far = load.index.factor_of(Var(f"x{last}", labels.sizes[last])) != 1
        is_long = labels.extent(labels.depth) > 256
        panels = labels.extent(labels.columns) // self.panel
        return is_far and is_long and panels >= 4 and not self._expands(labels, "left")

    def _parts(self, digits: list[Digit]) -> int:
        """Sums of parts of the depth, added at the end, where there are too few rows to share."""
        tasks = self.labels.extent(self.labels.outer) * _count(self.rows.outer)
        depth = self.labels.extent(self.labels.depth)
        if tasks >= FEW_TASKS or depth <= 8 * DEPTH or self._by_panels():
            return 1
        return best_divisor(digits[0].count, 16)

    def _by_panels(self) -> bool:
        """Whether threads share panels of columns instead of blocks of rows."""
        columns = self.labels.extent(self.labels.columns)
        tasks = self.labels.extent(self.labels.outer) * _count(self.rows.outer)
        is_wide = columns % self.panel == 0 and columns >= 4 * self.panel
        is_worth = 2 * math.prod(self.labels.sizes.values()) >= LEAST_SHARED
        return tasks < FEW_TASKS and is_wide and is_worth

    def _multiply(self, target: Buffer, digits: list[Digit], parts: int) -> list[Kernel]:
        labels, reader = self.labels, self.lowering.reader()
        part = Var("part", parts)
        copied = self._copied_left(reader) if self.copies_left else None
        if copied is not None:
            inner = labels.extent(labels.depth)
            moved = []
            for d in digits:
                inner //= d.count
                moved.append(Digit(d.count, inner * self.rows.count, d.right))
            digits = moved
        start = [0, 0]
        if parts > 1:
            first = digits[0]
            share = first.count // parts
            digits = [Digit(share, first.left, first.right), *digits[1:]]
            start = [share * first.left, share * first.right]
        loops, inner_digits = cut_depth(merged(digits), DEPTH)
        around = [Var(f"d{i}", d.count) for i, d in enumerate(loops)]
        moves = [
            sum(
                (variable(v) * getattr(d, side) for v, d in zip(around, loops, strict=True)),
                variable(part) * start[i],
            )
            for i, side in enumerate(("left", "right"))
        ]
        walks = [_walk(inner_digits, side) for side in ("left", "right")]
        body: list[Statement] = [] if copied is None else [*copied[1]]
        if around:
            body += self._cleared(target, part)
        own = self._copied_panel(reader) if self.copies_panels else None
        body += own[1] if own else []
        left = self._left(reader, copied[0] if copied else None, walks[0], moves[0])
        products = self._panels(reader, target, part, left, walks[1], moves[1], bool(around))
        body += nest(around, Role.SEQUENTIAL, products)
        scratch = tuple(c[0] for c in (copied, own) if c)
        panel = [self._panel_var()] if self._by_panels() else []
        order = [part, *self.outer.values(), *panel, *self.rows.outer]
        loops_ = nest(order, Role.PARALLEL, body)
        is_result = target == self.lowering.buffer(self.value)
        made, also = ([self.value], ()) if is_result else ([], (target,))
        kernel = self.lowering.kernel(self.position, reader, made, loops_, "", also)
        return [replace(kernel, scratch=scratch, is_whole=self.copies_panels)]

    def _indices(self) -> dict[str, Index]:
        """Outer labels and rows as indices; columns and depth are 0."""
        found = {c: constant(0) for c in self.labels.sizes}
        found |= {c: variable(v) for c, v in self.outer.items()}
        return found | self.rows.indices

    def _copied_left(self, reader: Reader) -> tuple[Buffer, list[Statement]]:
        """A block of the left operand in memory of the thread: depth by depth, rows together."""
        labels, rows = self.labels, self.rows
        depth = list(self.depth_vars.values())
        places = {**self._indices(), **{c: variable(v) for c, v in self.depth_vars.items()}}
        element = reader.at(labels.left, tuple(places[c] for c in labels.of_left))
        buffer = Buffer("left.copy", self.dtype, labels.extent(labels.depth) * rows.count)
        order = [*depth, *rows.inner]
        at = flatten([variable(v) for v in order], [v.extent for v in order])
        lets, reader.lets = list(reader.lets), []
        store = Store(buffer.name, at, as_dtype(element, self.dtype))
        return buffer, list(nest(order, Role.PARALLEL, [*lets, store]))

    def _left(self, reader: Reader, copied: Buffer | None, depth: Walk, move: Index) -> Matrix:
        if copied is not None:
            return Matrix(copied.name, move, Walk(self.rows.count), depth)
        labels = self.labels
        places = self._indices()
        load = plain_load(reader, reader.at(labels.left, tuple(places[c] for c in labels.of_left)))
        assert load is not None
        rows = offsets(load.index, self.rows.inner)
        assert rows is not None
        return Matrix(load.buffer, _without(load.index, self.rows.inner) + move, rows, depth)

    def _cleared(self, target: Buffer, part: Var) -> list[Statement]:
        columns = self.labels.extent(self.labels.columns)
        lanes = Var("z", self.panel if self._by_panels() else columns)
        at = self._place(part) + variable(lanes)
        if self._by_panels():
            at = at + variable(self._panel_var()) * self.panel
        zero = Store(target.name, at, Literal(0, self.dtype))
        return list(nest([*self.rows.inner, lanes], Role.PARALLEL, [zero]))

    def _panel_var(self) -> Var:
        return Var("panel", self.labels.extent(self.labels.columns) // self.panel)

    def _place(self, part: Var) -> Index:
        """Where a row of the target starts: labels in the order of the (swapped) result."""
        labels, indices = self.labels, self._indices()
        shape = labels.shape(labels.result)
        at = flatten([indices[c] for c in labels.result], shape)
        return at + variable(part) * self.node.types[0].size

    def _panels(
        self,
        reader: Reader,
        target: Buffer,
        part: Var,
        left: Matrix,
        depth: Walk,
        move: Index,
        adds: bool,
    ) -> list[Statement]:
        """Whole panels in a loop, then the columns that are left."""
        labels, panel = self.labels, self.panel
        columns = labels.extent(labels.columns)
        place = self._place(part)
        rows = offsets(place, self.rows.inner)
        assert rows is not None
        assert not rows.listed
        base = _without(place, self.rows.inner)
        right, step = self._right_base(reader)
        whole, rest = divmod(columns, panel)

        def product(number: Index, count: int) -> Multiply:
            into = Matrix(target.name, base + number * panel, rows, Walk(count))
            source = Matrix(right.buffer, right.index + number * step + move, depth, Walk(count))
            return Multiply(into, left, source, adds)

        if self._by_panels():
            return [product(variable(self._panel_var()), panel)]
        var = Var("p", whole)
        found: list[Statement] = []
        if whole:
            found += nest([var], Role.SEQUENTIAL, [product(variable(var), panel)])
        if rest:
            found.append(product(constant(whole), rest))
        return found

    def _right_base(self, reader: Reader) -> tuple[Load, int]:
        """Where the right matrix starts, and how far the next panel is."""
        labels = self.labels
        if self.right is not None:
            places = {**self._indices(), **{c: constant(0) for c in labels.columns}}
            load = reader.at(labels.right, tuple(places[c] for c in labels.of_right))
            assert isinstance(load, Load)
            return load, self.panel
        if self.copies_panels:
            return Load(OWN_PANEL, constant(0), self.dtype), 0
        step = labels.extent(labels.depth) * self.panel
        count = -(-labels.extent(labels.columns) // self.panel)
        buffer = self._temporary("packed", 0)
        reader.used[buffer.name] = self.lowering.as_type(buffer)
        indices = [variable(v) for v in self.outer.values()]
        at = flatten(indices, labels.shape(labels.outer)) * (count * step)
        return Load(buffer.name, at, self.dtype), step

    def _finish(self, sums: Buffer, parts: int) -> Kernel:
        """The result from sums: parts added, labels in the result's order, in its dtype."""
        labels, reader = self.labels, self.lowering.reader()
        result = labels_of(self.lowering, self.node).result
        axes = {c: Var(f"i{k}", labels.sizes[c]) for k, c in enumerate(result)}
        part = Var("part", parts)
        reader.used[sums.name] = self.lowering.as_type(sums)
        source = flatten([variable(axes[c]) for c in labels.result], labels.shape(labels.result))
        load = Load(sums.name, source + variable(part) * self.node.types[0].size, self.dtype)
        place = flatten([variable(axes[c]) for c in result], labels.shape(result))
        name, body = self.lowering.names[self.value], list[Statement]()
        found: Value = load
        if parts > 1:
            body = [Let("acc", Literal(0, self.dtype))]
            body += nest([part], Role.SEQUENTIAL, [Accumulate("acc", "add", load)])
            found = Local("acc", self.dtype)
        body.append(Store(name, place, as_dtype(found, self.node.types[0].dtype)))
        loops = nest([axes[c] for c in result], Role.PARALLEL, body)
        return self.lowering.kernel(self.position, reader, [self.value], loops, "_finish")


def _known(factor: int | None, otherwise: int) -> int:
    return otherwise if factor is None else factor


def _walk(digits: list[Digit], side: str) -> Walk:
    """Where the inner digits take an operand."""
    return _walked(tuple((getattr(d, side), d.count) for d in digits))


@functools.lru_cache(maxsize=256)
def _walked(digits: tuple[tuple[int, int], ...]) -> Walk:
    """By strides and counts."""
    places = [0]
    for stride, count in digits:
        places = [p + i * stride for p in places for i in range(count)]
    return walk(places)


def _without(index: Index, variables: list[Var]) -> Index:
    """The index where some variables are 0."""
    return Index(tuple((a, f) for a, f in index.terms if a not in variables), index.offset)
