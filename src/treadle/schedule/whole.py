"""Products as a library computes them: whole matrices, batches at one stride, nothing fused in.

An operand that does not lie in memory as a batch of matrices is copied so first; a result that
would not is moved into place afterwards.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from treadle.base.dtypes import DType, accumulator
from treadle.ir.graph import Node
from treadle.ir.graph import Value as TensorValue
from treadle.kernel.index import Index, Var, flatten, variable
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
    Matrix,
    Multiply,
    Role,
    Statement,
    Store,
    Value,
    Walk,
)
from treadle.schedule.groups import Groups, groups_of
from treadle.schedule.labels import Labels, plain_load
from treadle.schedule.lower import Lowering, attributes_of
from treadle.schedule.nests import nest


def whole_product(lowering: Lowering, position: int, node: Node) -> list[Kernel] | None:
    """A product of matrices and what moves its operands and result; None where it is none."""
    groups = groups_of(lowering.graph, node)
    if groups is None or not groups.is_large or lowering.target.is_small:
        return None
    return _Whole(lowering, position, node, groups).kernels()


@dataclass(frozen=True)
class _Place:
    """A batch of matrices in a buffer: where it starts, and steps of batch, rows and columns."""

    buffer: str
    start: int
    batch: int
    rows: int
    columns: int


class _Whole:
    def __init__(self, lowering: Lowering, position: int, node: Node, groups: Groups):
        self.lowering, self.position, self.node, self.groups = lowering, position, node, groups
        self.vars = {c: Var(f"x{c}", n) for c, n in groups.sizes.items()}
        self.used: dict[str, Buffer] = {}
        self.copies: list[Kernel] = []

    def count(self, labels: str) -> int:
        return math.prod(self.groups.sizes[c] for c in labels)

    def kernels(self) -> list[Kernel]:
        g = self.groups
        lx, ly, lr = attributes_of(self.node).labels
        dtype = self.lowering.graph.type_of(self.node.operands[0]).dtype
        other = self.lowering.graph.type_of(self.node.operands[1]).dtype
        dtype = dtype if dtype is other else accumulator(self.node.types[0].dtype)
        left = self.operand(0, lx, g.rows, g.depth, dtype)
        right = self.operand(1, ly, g.depth, g.columns, dtype)
        value, bias = TensorValue(self.position), None
        joined = self.lowering.biased.get(value)
        if joined is not None:
            value, bias = joined.sum, self.lowering.names[joined.bias]
        target = self.place(self.result_index(lr), self.lowering.names[value], g.rows, g.columns)
        made, finish = [value], list[Kernel]()
        if target is None:
            buffer, target = self.temporary("sums", self.node.types[0].dtype, g.rows + g.columns)
            finish = [self.moved(buffer, lr)]
            made = []
        batch = Var("batch", self.count(g.batch))
        shapes = (g.rows, g.columns), (g.rows, g.depth), (g.depth, g.columns)
        into, a, b = (
            self.matrix(place, batch, *shape)
            for place, shape in zip((target, left, right), shapes, strict=True)
        )
        body = nest([batch], Role.PARALLEL, [Multiply(into, a, b, bias=bias)])
        reader = self.lowering.reader()
        for name in (left.buffer, right.buffer, *([] if bias is None else [bias])):
            reader.used[name] = self.lowering.as_type(self.lowering.buffers[name])
        also = () if made else (self.lowering.buffers[target.buffer],)
        kernel = self.lowering.kernel(self.position, reader, made, body, "", also)
        return [*self.copies, replace(kernel, is_whole=True), *finish]

    def matrix(self, place: _Place, batch: Var, rows: str, columns: str) -> Matrix:
        return Matrix(
            place.buffer,
            variable(batch) * place.batch + place.start,
            Walk(self.count(rows), place.rows),
            Walk(self.count(columns), place.columns),
        )

    def result_index(self, labels: str) -> Index:
        shape = [self.groups.sizes[c] for c in labels]
        return flatten([variable(self.vars[c]) for c in labels], shape)

    def operand(self, i: int, labels: str, rows: str, columns: str, dtype: DType) -> _Place:
        """Where an operand is, as matrices; a copy of it where it is not."""
        reader = self.lowering.reader()
        value = self.node.operands[i]
        load = plain_load(reader, reader.at(value, tuple(variable(self.vars[c]) for c in labels)))
        if load is not None and load.dtype is dtype:
            found = self.place(load.index, load.buffer, rows, columns)
            if found is not None:
                return found
        buffer, place = self.temporary(f"matrix{i}", dtype, rows + columns)
        order = [self.vars[c] for c in self.groups.batch + rows + columns]
        reader = self.lowering.reader()
        element = reader.at(value, tuple(variable(self.vars[c]) for c in labels))
        at = flatten([variable(v) for v in order], [v.extent for v in order])
        store = Store(buffer.name, at, as_dtype(element, dtype))
        body = nest(order, Role.PARALLEL, [*reader.lets, store])
        self.copies.append(
            self.lowering.kernel(self.position, reader, [], body, f"_matrix{i}", (buffer,))
        )
        return place

    def temporary(self, name: str, dtype: DType, labels: str) -> tuple[Buffer, _Place]:
        """Memory for matrices that lie one after the other, rows of columns."""
        full = f"{self.lowering.prefix}b{self.position}.{name}"
        size = self.count(self.groups.batch + labels)
        buffer = self.lowering.buffers[full] = Buffer(full, dtype, size)
        depth_first = name == "matrix1"
        rows = self.groups.depth if depth_first else self.groups.rows
        columns = self.count("".join(c for c in labels if c not in rows))
        return buffer, _Place(full, 0, self.count(labels), columns, 1)

    def place(self, index: Index, buffer: str, rows: str, columns: str) -> _Place | None:
        """An affine index as a batch of matrices of which one axis lies together."""
        steps = [self.step(index, labels) for labels in (self.groups.batch, rows, columns)]
        if any(s is None for s in steps):
            return None
        batch, down, across = (s or 0 for s in steps)
        m, n = self.count(rows), self.count(columns)
        is_rowwise = (across == 1 or n == 1) and (down >= n or m == 1)
        is_columnwise = (down == 1 or m == 1) and (across >= m or n == 1)
        if not (is_rowwise or is_columnwise):
            return None
        down, across = _filled(down, across, m, n)
        return _Place(buffer, index.offset, batch, down, across)

    def step(self, index: Index, labels: str) -> int | None:
        """The one step at which some labels together walk an index; None if there is none."""
        found, reach = 0, 1
        for label in reversed(labels):
            var = self.vars[label]
            if var.extent == 1:
                continue
            factor = index.factor_of(var)
            if factor is None:
                return None
            if reach == 1:
                found = factor
            elif factor != found * reach:
                return None
            reach *= var.extent
        return found

    def moved(self, sums: Buffer, labels: str) -> Kernel:
        """The result from matrices, its axes in their order."""
        reader, g = self.lowering.reader(), self.groups
        reader.used[sums.name] = self.lowering.as_type(sums)
        order = [self.vars[c] for c in g.batch + g.rows + g.columns]
        source = flatten([variable(v) for v in order], [v.extent for v in order])
        value = TensorValue(self.position)
        store = Store(
            self.lowering.names[value],
            self.result_index(labels),
            Load(sums.name, source, sums.dtype),
        )
        body = nest([self.vars[c] for c in labels], Role.PARALLEL, [store])
        return self.lowering.kernel(self.position, reader, [value], body, "_moved")


def _filled(down: int, across: int, m: int, n: int) -> tuple[int, int]:
    """Steps of axes of one element, which no index shows, as of a matrix without gaps."""
    if n == 1 and across == 0:
        across = 1 if down != 1 or m == 1 else m
    if m == 1 and down == 0:
        down = 1 if across != 1 else n
    return max(down, 1), max(across, 1)


def plain_product(lowering: Lowering, position: int, node: Node, labels: Labels) -> Kernel:
    """Any product, one element after the other."""
    value, of_operands = TensorValue(position), lowering.graph.type_of(labels.left).dtype
    # Floats are summed as wide as the result; integers wrap as their operands do.
    wide = accumulator(node.types[0].dtype) if of_operands.is_float else of_operands
    variables = {c: Var(f"i{k}", n) for k, (c, n) in enumerate(labels.sizes.items())}
    reader = lowering.reader()
    operands = [
        as_dtype(reader.at(v, tuple(variable(variables[c]) for c in of)), wide)
        for v, of in ((labels.left, labels.of_left), (labels.right, labels.of_right))
    ]
    step = Accumulate("acc", "add", Apply("mul", (operands[0], operands[1]), wide))
    body: list[Statement] = [Let("acc", Literal(0, wide))]
    body += nest([variables[c] for c in labels.depth], Role.SEQUENTIAL, [*reader.lets, step])
    at = lowering.place(value, [variable(variables[c]) for c in labels.result])
    result = as_dtype(Local("acc", wide), node.types[0].dtype)
    body.append(Store(lowering.names[value], at, result))
    loops = nest([variables[c] for c in labels.result], Role.PARALLEL, body)
    return lowering.kernel(position, reader, [value], loops)


def as_dtype(value: Value, dtype: DType) -> Value:
    return value if value.dtype is dtype else Convert(value, dtype)
