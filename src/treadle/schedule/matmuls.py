"""Contractions as loops around the matmul template: blocks of rows, panels of columns, cut depth.

A block of rows belongs to one thread at a time: what follows row by row is fused behind it, and
what comes before it row by row in front of it. The right operand is copied into panels that lie in
memory as tiles read them, unless it is read too seldom to pay or lies that way already; views
(windows too) are read where they are. Where there are few rows for many weights, and where windows
lie in short runs, threads share columns instead, and each copies its own.
"""

from __future__ import annotations

import copy
from dataclasses import replace

from treadle.base import dtypes
from treadle.base.dtypes import accumulator
from treadle.ir.graph import Node
from treadle.ir.graph import Value as TensorValue
from treadle.ir.ops.linear import CONTRACT
from treadle.kernel.bindings import Copy
from treadle.kernel.contraction import (
    Axes,
    Contraction,
    Operand,
    contraction_of,
    named,
    size,
    stride_of,
    strided_axis_of,
)
from treadle.kernel.cost import LINE
from treadle.kernel.index import Index, Var, constant, flatten, substitute, variable
from treadle.kernel.nodes import (
    Buffer,
    Kernel,
    Literal,
    Load,
    Matmul,
    Matrix,
    Statement,
    Store,
    StridedAxis,
    Value,
)
from treadle.schedule.calls import by_elements, standalone_matmul
from treadle.schedule.inline import Reader
from treadle.schedule.keep import ROOTS
from treadle.schedule.lower import Lowering
from treadle.schedule.nests import as_dtype, best_divisor, flat_index, in_order, parallel
from treadle.schedule.operands import Site, load_of
from treadle.schedule.panels import (
    OWN,
    Depth,
    Digit,
    Group,
    copied_columns,
    depth_of,
    even_group,
    into_panels,
    partial_sums,
    row_blocks,
    window_group,
)

OWN_LEFT = "left.copy"  # a thread's memory


@ROOTS(CONTRACT)
def contract_kernels(lowering: Lowering, position: int, node: Node) -> list[Kernel]:
    if lowering.target.matmuls.by_library:
        return standalone_matmul(lowering, position, node)
    given = contraction_of(lowering.graph, node)
    c = given.for_tiles(lowering.target.matmuls)
    is_float = accumulator(node.types[0].dtype) in (dtypes.float32, dtypes.float64)
    if not is_float or not (c.tiled and c.depth and size(c.depth)):
        return [by_elements(lowering, position, node)]
    matmul = _Matmul(lowering, position, given)
    if matmul.is_depthwise or matmul.copies_for_few_rows:
        return [by_elements(lowering, position, node)]
    return matmul.kernels()


class _Matmul:
    """One contraction: the kernels of its operands' copies, of itself, and of its result."""

    def __init__(self, lowering: Lowering, position: int, given: Contraction[TensorValue]):
        self.lowering, self.position, self.value = lowering, position, TensorValue(position)
        self.site, self.limits = Site(lowering, position), lowering.target.matmuls
        self.type = lowering.graph.type_of(self.value)
        self.dtype = accumulator(self.type.dtype)
        self.panel = lowering.panel * 4 // self.dtype.itemsize
        self.given, self.contraction = given, self._placed(given.for_tiles(self.limits))
        self.group = self._windows()  # columns that a thread copies for itself, if it does
        self.reads_right = self.group is None and self._reads_right()
        self.is_transposed = self.group is None and self._transposes()
        self.copies_left = self.group is None and self._copies_left()
        self.shares_columns = self.group is None and self._shares_columns()
        if self.shares_columns and not self.reads_right:
            self.group = even_group(self.contraction.tiled, self.panel, self.limits)
        self.rows = row_blocks(self.contraction, self._block_rows(), self.limits.block_rows(0))
        self.outer = {v: named("o", v) for v in self.contraction.outer}
        self.columns = self.group.columns if self.group else size(self.contraction.tiled)
        self.pitch = self.group.stride if self.group else 0  # of the rows of a thread's copy
        self.is_by_panels = self._is_by_panels()
        self.left_copy = self._ordered_left()

    # How the operands are read

    def _placed(self, contraction: Contraction[TensorValue]) -> Contraction[TensorValue]:
        """The contraction with where its operands lie, if they are as wide as sums are."""

        def placed(operand: Operand[TensorValue], reader: Reader) -> Operand[TensorValue]:
            load = load_of(reader, operand.value, operand.axes)
            is_wide = load is not None and load.dtype is self.dtype
            return replace(operand, load=load if is_wide else None)

        left = placed(contraction.left, self.lowering.reader())
        return replace(contraction, left=left, right=placed(contraction.right, self._right()))

    def _right(self) -> Reader:
        """Reads the right operand, which may be recomputed rather than materialized."""
        return self.lowering.reader(self.lowering.recomputed.get(self.position))

    def _transposes(self) -> bool:
        """Columns along the other operand, so that windows are read in place as the left one.

        Where they could be read as the right one, it pays if half of a vector would be empty.
        """
        other, own = self.contraction.transposed, size(self.contraction.tiled)
        if other is None or not self._expands(self.contraction.right):
            return False
        if self.reads_right and 2 * own > self.panel // 2:
            return False
        other, least = self._placed(other), self.limits.least_columns
        is_narrow = size(other.tiled) < (2 * own if self.reads_right else least)
        if self._expands(other.right) or is_narrow or other.left.load is None:
            return False
        self.contraction = other
        self.reads_right = self._reads_right()
        return True

    def _expands(self, operand: Operand[TensorValue]) -> bool:
        """Whether an operand has more elements than the memory it is read from: windows."""
        load = operand.load
        return load is not None and operand.size > self.lowering.buffers[load.buffer].size

    def _reads_right(self) -> bool:
        """Whether the right operand is read where it lies; tiles then run as far as it does."""
        c, right = self.contraction, self.contraction.right
        if right.load is None:
            return False
        tiled: Axes = ()
        for axis in reversed(c.tiled):
            if stride_of(right.load.index, (axis, *tiled)) != 1:
                break
            tiled = (axis, *tiled)
        is_short = size(tiled) < min(self.limits.least_columns, size(c.tiled))
        is_fixed = right.load.buffer in self.lowering.fixed  # panels of it are made once
        few = self.limits.rows_of_panel(self.panel, self.dtype.itemsize, size(c.depth))
        is_read_often = is_fixed or size(c.rows) > few or not self._is_near(right)
        is_read_often = is_read_often and size(c.tiled) > self.panel
        if is_short or (is_read_often and not self._expands(right)):
            return False  # panels pay
        self.contraction = replace(c, tiled=tiled)
        return True

    def _is_near(self, right: Operand[TensorValue]) -> bool:
        """Whether rows of the right operand, a panel's part of each, are soon there where it lies.

        Parts of one line ask for twice as many rows: they wait if each is in a page of its own.
        """
        c, limits, each = self.contraction, self.limits, self.dtype.itemsize
        depth, row = size(c.depth), (right.stride(c.depth[-1]) or 0) * each
        nbytes = depth * size(c.tiled) * each
        if size(c.rows) <= limits.summed_rows:
            return True  # a copy would be most of the work, and of the memory
        if self.panel * each > LINE:
            return nbytes <= limits.near_bytes
        return nbytes <= limits.near_lines and row < limits.near_row and depth < limits.depth

    def _copies_left(self) -> bool:
        """Whether a block of the left operand is copied first: if it is computed, or scattered."""
        c, limits = self.contraction, self.limits
        if c.left.load is None:
            return True
        is_long = size(c.depth) > limits.long_depth
        is_used_often = size(c.tiled) // self.panel >= limits.reused_panels
        is_scattered = c.left.stride(c.depth[-1]) != 1
        return is_scattered and is_long and is_used_often and not self._expands(c.left)

    def _windows(self) -> Group | None:
        """The columns of a task that copies its windows; those before their axis are loops."""
        c = self.contraction
        if not self._expands(c.right):
            return None
        group = window_group(c, self.panel // 2, self.limits)
        if group:
            self.contraction = replace(c, tiled=(group.axis, *group.after))
        return group

    def _shares_columns(self) -> bool:
        """Whether threads share columns of weights, and each takes all rows through its own.

        Threads that share rows must each see all that the others have copied, and read all weights.
        Where there are few rows, less goes from one to another if they share columns: the result,
        and the left operand unless it was given.
        """
        c, lowering, limits = self.contraction, self.lowering, self.limits
        left, right, leaves = c.left.load, c.right.load, lowering.graph.leaves
        if left is None or right is None or lowering.repeats or right.buffer not in leaves:
            return False
        is_plain = len(c.rows) == 1 and not c.outer and not self.is_transposed
        if not is_plain or self.type.dtype is not self.dtype or self.copies_left:
            return False
        rows, columns, depth = (size(axes) for axes in (c.rows, c.tiled, c.depth))
        is_worth = c.flops >= limits.shared_flops and depth <= limits.depth
        exchanged = rows * (columns + (0 if left.buffer in leaves else depth))
        return is_worth and limits.exchange_gain * exchanged <= depth * columns

    def _block_rows(self) -> int:
        """Rows of a block: large ones where the axes around are enough for threads to share."""
        count, limits = size(self.contraction.rows), self.limits
        if self.group and count <= limits.most_block_rows:
            return count
        if self.shares_columns and self.reads_right and count <= limits.few_rows * self.panel:
            return count
        has_many = self.group or size(self.contraction.outer) >= limits.many_tasks
        return limits.block_rows(limits.most_block_rows if has_many else count)

    def _is_by_panels(self) -> bool:
        """Whether threads share panels of columns instead of blocks of rows."""
        is_wide = self.columns >= self.limits.few_tasks * self.panel
        is_worth = self.contraction.flops >= self.limits.shared_flops
        is_worth = is_worth and self.group is None
        return self._has_few_tasks and self.columns % self.panel == 0 and is_wide and is_worth

    @property
    def _has_few_tasks(self) -> bool:
        return size(self.contraction.outer) * size(self.rows.outer) < self.limits.few_tasks

    @property
    def is_depthwise(self) -> bool:
        """Whether windows are multiplied by one row: loops along them need no tiles."""
        return self._expands(self.contraction.right) and size(self.contraction.rows) == 1

    @property
    def copies_for_few_rows(self) -> bool:
        """Whether the right operand, summed along its rows, would be copied for a few rows."""
        c = self.contraction
        if self.reads_right:
            return False
        if self._expands(c.right):  # a copy would gather windows whose columns lie apart
            last = c.depth[-1]
            is_along = c.left.stride(last) == c.right.stride(last) == 1
            return self.group is None and is_along and size(c.rows) < self.limits.least_columns
        runs_along_depth = c.right.load is None or c.right.stride(c.depth[-1]) == 1
        return runs_along_depth and size(c.rows) <= self.limits.most_summed(size(c.batch))

    # Kernels

    def kernels(self) -> list[Kernel]:
        found = [] if self.reads_right or self.group else [self._pack()]
        found += self.site.copies
        digits = self._digits()
        parts = self._parts(digits)
        across = self.pitch or (self.rows.count if self.copies_left else 1)
        most = min(self.limits.depth, max(1, self.limits.copied_elements // across))
        depth = depth_of(digits, parts, most)
        is_ordered = self.contraction.result == self.given.result
        is_final = is_ordered and self.type.dtype is self.dtype
        if is_final and parts == 1:
            return [*found, self._multiply(self.lowering.buffer(self.value), depth)]
        partial = partial_sums(self.given, self.contraction, depth.part)
        sums = self.site.memory("sums", self.dtype, self.type.size * parts, partial)
        return [*found, self._multiply(sums, depth), self._finish(sums)]

    def _pack(self) -> Kernel:
        """The right operand in panels, in memory for all threads."""
        reader = self._right()
        found = into_panels(reader, self.contraction, self.panel, self.dtype, self.limits)
        copied = Copy(found.elements), self.contraction.right.value
        buffer = self.site.memory("packed", self.dtype, size(found.loops), *copied)
        store = Store(buffer.name, flat_index(found.loops), found.element)
        body = parallel(found.order, [*reader.lets, store])
        kernel = self.lowering.kernel(self.position, reader, [], body, "_pack", (buffer,))
        # What is recomputed, or is there from the start, waits by itself until it is needed.
        leaves = self.lowering.graph.leaves
        waits = self.position in self.lowering.recomputed or all(
            b.name in leaves for b in kernel.inputs
        )
        return replace(kernel, is_standalone=waits)

    def _ordered_left(self) -> Buffer | None:
        """A left operand in order of the depth in memory, for threads that share columns."""
        c = self.contraction
        if self.group is None or c.left.stride(c.depth[-1]) == 1:
            return None
        order = (*(v for v in c.left.axes if v not in c.depth), *c.depth)
        buffer, kernel = self.site.copied(c.left.value, "left", c.left.axes, order, "_left")
        waits = all(b.name in self.lowering.graph.leaves for b in kernel.inputs)
        self.site.copies.append(replace(kernel, is_standalone=waits))
        load = Load(buffer.name, flat_index(order), self.dtype)
        self.contraction = replace(c, left=replace(c.left, load=load))
        return buffer

    def _digits(self) -> list[Digit]:
        """The depth as loops, with how far each moves the operands or their copies."""
        c, found = self.contraction, list[Digit]()
        inner = size(c.depth)
        for axis in c.depth:
            inner //= axis.extent
            left = c.left.stride(axis) if c.left.load else inner * self.rows.count
            is_source = self.reads_right or self.group
            right = c.right.stride(axis) if is_source else inner * self.panel
            found.append(Digit(axis.extent, left or 0, right or 0))
        return found

    def _parts(self, digits: list[Digit]) -> int:
        """Sums of parts of the depth, added at the end, where there are too few rows to share."""
        depth, limits = size(self.contraction.depth), self.limits
        is_shared = self.is_by_panels or self.group
        if not self._has_few_tasks or depth <= limits.split_depth or is_shared:
            return 1
        return best_divisor(digits[0].count, limits.most_parts)

    def _multiply(self, target: Buffer, depth: Depth) -> Kernel:
        """Tasks in their loops, and before them a block of the left operand if it is computed."""
        reader, body, scratch = self.lowering.reader(), list[Statement](), list[Buffer]()
        if self.contraction.left.load is None:
            scratch.append(self._computed_left(reader, body))
        task = self._task(reader, target, depth, scratch)
        order, rest = [depth.part, *self.outer.values()], self.group.rest if self.group else None
        if self.group and rest:
            body += in_order([self.group.loop], task)
            other = copy.copy(self)  # the columns that whole groups leave, in the same memory
            other.group, other.columns = rest, rest.columns
            body += other._task(reader, target, depth, [])
        elif self.group:
            body += task
            order += [self.group.loop]
        else:
            body += task
            order += [*([self._panel_var] if self.is_by_panels else []), *self.rows.outer]
        is_result = target == self.lowering.buffer(self.value)
        made, also = ([self.value], ()) if is_result else ([], (target,))
        loops = parallel(order, body)
        kernel = self.lowering.kernel(self.position, reader, made, loops, "", also)
        return replace(kernel, scratch=tuple(scratch), is_standalone=self._is_standalone)

    def _task(
        self, reader: Reader, target: Buffer, depth: Depth, scratch: list[Buffer]
    ) -> list[Statement]:
        """Copies of blocks in the thread's memory, sums cleared, and the template in its loops."""
        body = self._cleared(target, depth.part) if depth.loops else []
        left, start = self._left(reader, depth), self._address(depth.part)
        into = self._matrix(target.name, start, StridedAxis(self.columns))
        assert not into.rows.listed
        inner = self._panels(reader, into, left, depth)
        if self.copies_left and self.contraction.left.load:
            copied, own = self._copied_left(reader, depth)
            scratch.append(own)
            inner = [*copied, *inner]
        if self.group:
            load = self._element(reader, self.contraction.right, depth=False)
            assert isinstance(load, Load)
            copied, own = copied_columns(
                load, self.contraction.right, self.group, depth, self.pitch
            )
            scratch.append(own)
            inner = [*copied, *in_order(self.rows.outer, inner)]
        return [*body, *in_order(depth.loops, inner)]

    @property
    def _is_standalone(self) -> bool:
        """Whether nothing is fused around: threads share columns of one matrix."""
        return self.group is not None and not self.outer

    def _element(self, reader: Reader, operand: Operand[TensorValue], depth: bool) -> Value:
        """An operand at this block's rows; columns are 0, and so is the depth unless asked for."""
        indices = self._indices()
        if depth:
            indices |= {v: variable(named("k", v)) for v in self.contraction.depth}
        return reader.at(operand.value, tuple(indices[v] for v in operand.axes))

    def _indices(self) -> dict[Var, Index]:
        """Outer axes and rows as indices; columns and depth are 0."""
        c = self.contraction
        found = {v: constant(0) for v in c.result + c.depth}
        found |= {axis: variable(v) for axis, v in self.outer.items()}
        found |= {self.group.axis: self.group.start} if self.group else {}
        return found | self.rows.indices

    def _copied_left(self, reader: Reader, depth: Depth) -> tuple[list[Statement], Buffer]:
        """A part of the depth of a block of the left operand in memory of the thread."""
        load, deep = self._element(reader, self.contraction.left, depth=False), depth.variables
        assert isinstance(load, Load)
        at = load.index + depth.moves[0]
        for var, digit in zip(deep, depth.inner, strict=True):
            at = at + variable(var) * digit.left
        order = [*deep, *self.rows.inner]
        store = Store(OWN_LEFT, flat_index(order), Load(load.buffer, at, load.dtype))
        return list(parallel(order, [store])), Buffer(OWN_LEFT, self.dtype, size(order))

    def _computed_left(self, reader: Reader, body: list[Statement]) -> Buffer:
        """A block of the left operand in memory of the thread: depth by depth, rows contiguous."""
        c = self.contraction
        element = self._element(reader, c.left, depth=True)
        order = [*(named("k", v) for v in c.depth), *self.rows.inner]
        lets, reader.lets = list(reader.lets), []
        store = Store(OWN_LEFT, flat_index(order), as_dtype(element, self.dtype))
        body += parallel(order, [*lets, store])
        return Buffer(OWN_LEFT, self.dtype, size(order))

    def _left(self, reader: Reader, depth: Depth) -> Matrix:
        move, summed = depth.moves[0], depth.summed[0]
        if self.copies_left:
            rows, is_part = StridedAxis(self.rows.count), self.contraction.left.load is not None
            of_copy = StridedAxis(summed.count, rows.count)
            return Matrix(OWN_LEFT, constant(0) if is_part else move, rows, of_copy)
        if self.left_copy:
            reader.used[self.left_copy.name] = self.left_copy
            assert self.contraction.left.load is not None
            index = substitute(self.contraction.left.load.index, self._indices())
            return self._matrix(self.left_copy.name, index + move, summed)
        load = self._element(reader, self.contraction.left, depth=False)
        assert isinstance(load, Load)
        return self._matrix(load.buffer, load.index + move, summed)

    def _matrix(self, buffer: str, index: Index, columns: StridedAxis) -> Matrix:
        """The rows of a block, given where one of them starts."""
        inner = self.rows.inner
        rows = strided_axis_of(index, inner)
        assert rows is not None
        first = Index(tuple((a, f) for a, f in index.terms if a not in inner), index.offset)
        return Matrix(buffer, first, rows, columns)

    def _cleared(self, target: Buffer, part: Var) -> list[Statement]:
        lanes = Var("z", self.panel if self.is_by_panels else self.columns)
        at = self._address(part) + variable(lanes)
        if self.is_by_panels:
            at = at + variable(self._panel_var) * self.panel
        zero = Store(target.name, at, Literal(0, self.dtype))
        rows = [*(self.rows.outer if self.group else []), *self.rows.inner]
        return list(parallel([*rows, lanes], [zero]))

    @property
    def _panel_var(self) -> Var:
        return Var("panel", self.columns // self.panel)

    def _address(self, part: Var) -> Index:
        """Where a row of the target starts: axes in the order of the (transposed) result."""
        result, indices = self.contraction.result, self._indices()
        at = flatten([indices[v] for v in result], [v.extent for v in result])
        return at + variable(part) * self.type.size

    def _panels(self, reader: Reader, into: Matrix, left: Matrix, depth: Depth) -> list[Statement]:
        """Full panels in a loop, then the columns that are left."""
        right, step = self._right_base(reader)
        summed, move = depth.summed[1], depth.moves[1]
        if self.group:
            summed, move = StridedAxis(summed.count, self.pitch), constant(0)
        full, rest = divmod(self.columns, self.panel)

        def matmul(number: Index, count: int) -> Matmul:
            columns = StridedAxis(count)
            target = replace(into, index=into.index + number * self.panel, columns=columns)
            index = right.index + number * step + move
            source = Matrix(right.buffer, index, summed, columns)
            return Matmul(target, left, source, bool(depth.loops))

        if self.is_by_panels:
            return [matmul(variable(self._panel_var), self.panel)]
        found: list[Statement] = []
        if full:
            var = Var("p", full)
            found += in_order([var], [matmul(variable(var), self.panel)])
        if rest:
            found.append(matmul(constant(full), rest))
        return found

    def _right_base(self, reader: Reader) -> tuple[Load, int]:
        """Where the right matrix starts, and how far the next panel is."""
        if self.reads_right:
            load = self._element(reader, self.contraction.right, depth=False)
            assert isinstance(load, Load)
            return load, self.panel
        if self.group:
            return Load(OWN, constant(0), self.dtype), self.panel
        step = size(self.contraction.depth) * self.panel
        count = -(-self.columns // self.panel)
        buffer = self.site.memory("packed", self.dtype, 0)
        reader.used[buffer.name] = buffer
        at = flat_index(list(self.outer.values())) * (count * step)
        return Load(buffer.name, at, self.dtype), step

    def _finish(self, sums: Buffer) -> Kernel:
        """The result from sums: parts added, axes in the result's order, in its dtype."""
        axes = {v: Var(f"i{k}", v.extent) for k, v in enumerate(self.given.result)}
        order = tuple(axes[v] for v in self.contraction.result)
        return self.site.moved(sums, tuple(axes.values()), order, "_finish")
