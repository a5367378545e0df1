"""Matmuls in kernels of their own: a library's, or loops that sum one element after the other.

An operand that does not lie in memory as a batch of matrices is copied so first; a result that
would not is moved into place afterwards.
"""

from __future__ import annotations

from treadle.base.dtypes import accumulator
from treadle.ir.graph import Node
from treadle.ir.graph import Value as TensorValue
from treadle.kernel.contraction import Axes, Contraction, Operand, contraction_of, size, stride_of
from treadle.kernel.index import Index, Var, variable
from treadle.kernel.nodes import (
    Accumulate,
    Buffer,
    Kernel,
    Let,
    Literal,
    Local,
    Matmul,
    Matrix,
    Role,
    Statement,
    Store,
    StridedAxis,
)
from treadle.schedule.lower import Lowering
from treadle.schedule.nests import along, apply, as_dtype, flat_index, nest
from treadle.schedule.operands import Site, load_of


def standalone_matmul(lowering: Lowering, position: int, node: Node) -> list[Kernel]:
    """A library's matmul where it is worth a launch; else threads that sum an element each."""
    contraction = contraction_of(lowering.graph, node)
    is_large = node.types[0].is_float and contraction.is_for_library(lowering.target.matmuls)
    if is_large and not lowering.target.is_small:
        return _Standalone(lowering, position, node, contraction).kernels()
    return [by_elements(lowering, position, node)]


class _Standalone:
    def __init__(
        self, lowering: Lowering, position: int, node: Node, contraction: Contraction[TensorValue]
    ):
        self.lowering, self.position, self.node = lowering, position, node
        self.contraction, self.site = contraction, Site(lowering, position)
        self.batch = Var("batch", size(contraction.batch))

    def kernels(self) -> list[Kernel]:
        c, lowering, value = self.contraction, self.lowering, TensorValue(self.position)
        left = self.operand(0, c.left, c.rows, c.depth)
        right = self.operand(1, c.right, c.depth, c.columns)
        biased = lowering.biased.get(value)
        bias = None if biased is None else lowering.names[biased.bias]
        made = [value if biased is None else biased.sum]
        target = self.matrix(lowering.names[made[0]], flat_index(c.result), c.rows, c.columns)
        also, finish = tuple[Buffer, ...](), list[Kernel]()
        if target is None:
            order = c.batch + c.rows + c.columns
            sums = self.site.memory("sums", self.node.types[0].dtype, size(order))
            target = self.in_rows(sums, c.rows, c.columns)
            finish = [self.site.moved(sums, c.result, order)]
            made, also = [], (sums,)
        body = nest([self.batch], Role.PARALLEL, [Matmul(target, left, right, bias=bias)])
        read = (left.buffer, right.buffer, *([] if bias is None else [bias]))
        return [*self.site.standalone(body, read, made, also), *finish]

    def operand(self, i: int, operand: Operand[TensorValue], rows: Axes, columns: Axes) -> Matrix:
        """An operand as a batch of matrices; a copy of it where it does not lie so."""
        load = load_of(self.lowering.reader(), operand.value, operand.axes)
        if load is not None:
            found = self.matrix(load.buffer, load.index, rows, columns)
            if found is not None:
                return found
        order = self.contraction.batch + rows + columns
        given = operand.value, f"matrix{i}", operand.axes, order
        buffer, kernel = self.site.copied(*given, f"_matrix{i}")
        self.site.copies.append(kernel)
        return self.in_rows(buffer, rows, columns)

    def in_rows(self, buffer: Buffer, rows: Axes, columns: Axes) -> Matrix:
        """Matrices that lie one after the other, rows of columns."""
        m, n = size(rows), size(columns)
        return Matrix(
            buffer.name, variable(self.batch) * (m * n), StridedAxis(m, n), StridedAxis(n)
        )

    def matrix(self, buffer: str, index: Index, rows: Axes, columns: Axes) -> Matrix | None:
        """An affine index as a batch of matrices of which one axis is contiguous."""
        strides = [stride_of(index, axes) for axes in (self.contraction.batch, rows, columns)]
        if any(s is None for s in strides):
            return None
        batch, down, across = (s or 0 for s in strides)
        m, n = size(rows), size(columns)
        is_by_rows = (across == 1 or n == 1) and (down >= n or m == 1)
        is_by_columns = (down == 1 or m == 1) and (across >= m or n == 1)
        if not (is_by_rows or is_by_columns):
            return None
        down, across = _filled(down, across, m, n)
        start = variable(self.batch) * batch + index.offset
        return Matrix(buffer, start, StridedAxis(m, down), StridedAxis(n, across))


def _filled(down: int, across: int, m: int, n: int) -> tuple[int, int]:
    """Strides of axes of one element, which no index shows, as of a matrix without gaps."""
    if n == 1 and across == 0:
        across = 1 if down != 1 or m == 1 else m
    if m == 1 and down == 0:
        down = 1 if across != 1 else n
    return max(down, 1), max(across, 1)


def by_elements(lowering: Lowering, position: int, node: Node) -> Kernel:
    """Any contraction, one element after the other."""
    given = contraction_of(lowering.graph, node)
    loops = dict.fromkeys(given.left.axes + given.right.axes)
    variables = {axis: Var(f"i{k}", axis.extent) for k, axis in enumerate(loops)}
    c, value, dtype = given.columns_last, TensorValue(position), node.types[0].dtype
    of_operands = lowering.graph.type_of(c.left.value).dtype
    # Floats are summed as wide as the result; integers wrap as their operands do.
    wide = accumulator(dtype) if of_operands.is_float else of_operands
    reader = lowering.reader()
    factors = tuple(
        as_dtype(reader.at(o.value, along(variables[v] for v in o.axes)), wide)
        for o in (c.left, c.right)
    )
    step = Accumulate("acc", "add", apply("mul", *factors))
    body: list[Statement] = [Let("acc", Literal(0, wide))]
    body += nest([variables[v] for v in c.depth], Role.SEQUENTIAL, [*reader.lets, step])
    order = [variables[v] for v in c.result]
    at = lowering.address(value, along(order))
    body.append(Store(lowering.names[value], at, as_dtype(Local("acc", wide), dtype)))
    return lowering.kernel(position, reader, [value], nest(order, Role.PARALLEL, body))
