"""Matmuls and attention in kernels of their own, where a library has them.

An operand that does not lie in memory as a library wants it is copied first; a result that would
not is moved into place afterwards. A matmul too small for a library is loops that sum one element
after the other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from treadle.base.dtypes import FLOAT8, accumulator
from treadle.ir.composites import ATTENTION, Attention
from treadle.ir.graph import Node
from treadle.ir.graph import Value as TensorValue
from treadle.kernel.bindings import Copy, Elements
from treadle.kernel.contraction import Axes, Contraction, Operand, contraction_of, size, stride_of
from treadle.kernel.index import Index, Var, constant, variable
from treadle.kernel.nodes import (
    Buffer,
    Kernel,
    LibraryCall,
    Load,
    Local,
    Matmul,
    Matrix,
    StridedAxis,
    View,
)
from treadle.schedule.lower import Lowering, attributes_of
from treadle.schedule.nests import (
    Buffers,
    accumulated,
    along,
    apply,
    as_dtype,
    axis_vars,
    flat_index,
    parallel,
)
from treadle.schedule.operands import Site, is_read, load_of, reading, transposed
from treadle.schedule.patterns import Epilogue
from treadle.schedule.templates import attention_numbers


def standalone_matmul(lowering: Lowering, position: int, node: Node) -> list[Kernel]:
    """A library's matmul where it is worth a launch; else threads that sum an element each."""
    contraction = contraction_of(lowering.graph, node)
    is_large = node.types[0].is_float and contraction.is_for_library(lowering.target.matmuls)
    is_summed = lowering.target.is_small or contraction.is_of_few_rows(lowering.target.matmuls)
    if is_large and not is_summed:
        return _Standalone(lowering, position, contraction).kernels()
    return [by_elements(lowering, position, node)]


class _Standalone:
    def __init__(self, lowering: Lowering, position: int, contraction: Contraction[TensorValue]):
        self.lowering, self.position = lowering, position
        self.contraction, self.site = contraction, Site(lowering, position)
        self.batch = Var("batch", size(contraction.batch))

    def kernels(self) -> list[Kernel]:
        c, lowering, value = self.contraction, self.lowering, TensorValue(self.position)
        left = self.operand(0, c.left, c.rows, c.depth)
        right = self.operand(1, c.right, c.depth, c.columns)
        epilogue = lowering.epilogues.get(value, Epilogue(value))
        bias = None if epilogue.bias is None else lowering.names[epilogue.bias]
        scales = tuple((lowering.names[s.vector], s.element) for s in epilogue.scales)
        made = [epilogue.sum]
        at = lowering.address(made[0], along(c.result))
        target = self.matrix(lowering.names[made[0]], at, c.rows, c.columns)
        also, finish = Buffers(), list[Kernel]()
        if target is None:
            order = c.batch + c.rows + c.columns
            moved = Copy(Elements(order, flat_index(order), along(c.result)))
            dtype = lowering.graph.type_of(value).dtype
            sums = self.site.memory("sums", dtype, size(order), moved)
            target = self.in_rows(sums, c.rows, c.columns)
            finish = [self.site.moved(sums, c.result, order)]
            made, also = [], (sums,)
        body = parallel([self.batch], [Matmul(target, left, right, bias=bias, scales=scales)])
        also_read = [] if bias is None else [bias]
        read = (left.buffer, right.buffer, *also_read, *(name for name, _ in scales))
        return [*self.site.standalone(body, read, made, also), *finish]

    def operand(self, i: int, operand: Operand[TensorValue], rows: Axes, columns: Axes) -> Matrix:
        """An operand as a batch of matrices; a copy of it where it does not lie so."""
        if self.lowering.graph.type_of(operand.value).dtype in FLOAT8:
            by_rows = self.in_depth(i, operand, columns if i else rows)
            return transposed(by_rows) if i else by_rows
        load = load_of(self.lowering.reader(), operand.value, operand.axes)
        if load is not None:
            found = self.matrix(load.buffer, load.index, rows, columns)
            if found is not None:
                return found
        order, n = self.contraction.batch + rows, size(columns)
        is_narrow = self.lowering.graph.type_of(operand.value).dtype.is_narrow
        gap = -n % self.lowering.target.matmuls.pack if is_narrow else 0
        given = operand.value, f"matrix{i}", operand.axes, order
        buffer, kernel = self.site.copied(*given, f"_matrix{i}", columns, gap)
        self.site.copies.append(kernel)
        return self.in_rows(buffer, rows, columns, gap)

    def in_depth(self, i: int, operand: Operand[TensorValue], rows: Axes) -> Matrix:
        """A float8 operand as rows along the depth, the one order in which they are multiplied."""
        depth, pack = self.contraction.depth, self.lowering.target.matmuls.float8_pack
        load = load_of(self.lowering.reader(), operand.value, operand.axes)
        found = None if load is None else self.matrix(load.buffer, load.index, rows, depth)
        if load is not None and found is not None:
            steps = found.rows.stride, load.index.offset
            if found.columns.stride == 1 and not any(n % pack for n in steps):
                return found
        given = operand.value, f"depth{i}", operand.axes, rows
        buffer, kernel = self.site.copied(*given, f"_depth{i}", depth)
        self.site.copies.append(kernel)
        return self.in_rows(buffer, rows, depth)

    def in_rows(self, buffer: Buffer, rows: Axes, columns: Axes, gap: int = 0) -> Matrix:
        """Matrices that lie one after the other, rows of columns with a gap behind each."""
        m, n = size(rows), size(columns)
        start = variable(self.batch) * (m * (n + gap))
        return Matrix(buffer.name, start, StridedAxis(m, n + gap), StridedAxis(n))

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
    depth = [variables[v] for v in c.depth]
    body = accumulated("add", wide, depth, reader.lets, apply("mul", *factors))
    order = [variables[v] for v in c.result]
    store = lowering.store(value, along(order), as_dtype(Local("acc", wide), dtype))
    return lowering.kernel(position, reader, [value], parallel(order, [*body, store]))


def library_attention(lowering: Lowering, position: int, node: Node) -> list[Kernel]:
    """Forward or backward, and copies of operands whose last axis is not contiguous."""
    site, also, finish = Site(lowering, position), Buffers(), list[Kernel]()
    plain = 3 if node.op is ATTENTION else 6
    packs = [lowering.target.matmuls.pack] * plain + [1]  # rows of a bias may start anywhere
    pairs = zip(node.operands, packs, strict=False)
    operands = tuple(_attention_operand(site, value, pack) for value, pack in pairs)
    q, k, v = operands[plain - 3 : plain]
    made = [TensorValue(position, i) for i in range(len(node.types))]
    if len(made) > 3 and not is_read(lowering, made[3]):
        made.pop()  # the gradient of a bias that is a mask
    results = [_result(lowering, value) for value in made]
    if len(made) > 3 and results[3].shape[2:] != (q.shape[2], k.shape[2]):
        also, finish = _bias_sum(site, made.pop(), (q.shape[2], k.shape[2]))
        shape = (*results[3].shape[:2], q.shape[2], k.shape[2])
        results[3] = _view(
            Load(also[0].name, flat_index(axis_vars("x", shape)), also[0].dtype), shape
        )
    parts = {lowering.parts[value].whole: None for value in made if value in lowering.parts}
    made = [*(value for value in made if value not in lowering.parts), *parts]
    flops = _attention_flops(node, q.shape, k.shape, v.shape)
    call = LibraryCall(node.op.name, tuple(results), operands, attention_numbers(node), flops)
    return [*site.standalone([call], [o.buffer for o in operands], made, also), *finish]


def _attention_flops(node: Node, q: Sequence[int], k: Sequence[int], v: Sequence[int]) -> int:
    """Of matmuls of queries and keys, and of values; a causal one has half of the scores."""
    attributes: Attention = attributes_of(node)
    widths = q[3] + v[3] if node.op is ATTENTION else 3 * q[3] + 2 * v[3]
    return 2 * math.prod(q[:3]) * k[2] * widths // (2 if attributes.causal else 1)


def _bias_sum(
    site: Site, value: TensorValue, scores: tuple[int, int]
) -> tuple[Buffers, list[Kernel]]:
    """Memory for the gradient of a bias for each query and key, and the kernel that sums it.

    A library sums along batch and heads by itself.
    """
    lowering, type_ = site.lowering, site.lowering.graph.type_of(value)
    axes = axis_vars("x", (*type_.shape[:2], *scores))
    memory, wide = site.memory("scores", type_.dtype, size(axes)), accumulator(type_.dtype)
    own = [v if n > 1 else None for v, n in zip(axes, type_.shape, strict=True)]
    summed = [v for v in axes if v not in own]
    term = as_dtype(Load(memory.name, flat_index(axes), memory.dtype), wide)
    at = [constant(0) if v is None else variable(v) for v in own]
    body = accumulated("add", wide, summed, [], term)
    store = lowering.store(value, at, as_dtype(Local("acc", wide), type_.dtype))
    loops = parallel([v for v in own if v is not None], [*body, store])
    reader = reading(lowering, [memory.name])
    return (memory,), [lowering.kernel(site.position, reader, [value], loops, "_bias")]


def _result(lowering: Lowering, value: TensorValue) -> View:
    shape = lowering.graph.type_of(value).shape
    part = lowering.parts.get(value)
    if part is not None:
        length, depth = shape[2:]
        row = lowering.graph.type_of(part.whole).shape[-1]
        strides = (length * row, depth, row, 1)
        return View(lowering.names[part.whole], part.start, shape, strides)
    index = lowering.address(value, along(axis_vars("x", shape)))
    return _view(Load(lowering.names[value], index, lowering.buffer(value).dtype), shape)


def _attention_operand(site: Site, value: TensorValue, pack: int) -> View:
    """Where an operand lies in rows of whole packs; a copy of it where it does not."""
    shape = site.lowering.graph.type_of(value).shape
    axes = axis_vars("x", shape)

    def is_packed(index: Index) -> bool:
        strides = [index.factor_of(v) for v in axes]
        is_even = all(s is not None and s % pack == 0 for s in strides[:-1])
        is_contiguous = strides[-1] == 1 or shape[-1] == 1
        return len(shape) != 4 or (is_contiguous and is_even)

    name = f"copy{value.node}.{value.output}"
    return _view(site.placed(value, name, axes, axes, is_packed), shape)


def _view(load: Load, shape: Sequence[int]) -> View:
    """A tensor by its strides; those of axes of one element are filled in."""
    found = [load.index.factor_of(v) or 0 for v in axis_vars("x", shape)]
    reach = 1
    for i in range(len(shape) - 1, -1, -1):
        if shape[i] == 1:
            found[i] = reach
        reach = max(reach, found[i] * shape[i])
    return View(load.buffer, load.index.offset, tuple(shape), tuple(found))
