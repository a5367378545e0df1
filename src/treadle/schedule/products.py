"""Products as loops: rows in tiles, columns in lanes, the right operand laid out for them.

A tile of rows shares each vector of the right operand, which is copied first where its columns do
not lie next to each other. The left operand is read one element at a time, in any layout.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from treadle.base.dtypes import DType, accumulator
from treadle.ir.graph import Node
from treadle.ir.graph import Value as TensorValue
from treadle.ir.ops.linear import CONTRACT, Contraction
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
    Role,
    Statement,
    Store,
    Value,
)
from treadle.schedule.inline import Reader
from treadle.schedule.lower import ROOTS, Lowering, attributes_of
from treadle.schedule.nests import nest

ROW_TILES = (6, 5, 4, 3, 2)  # the largest that divides the rows
LEAST_LANES = 32  # shorter last axes are passed over for longer ones
CACHE_ELEMENTS = 1 << 16  # 256 KiB of float32: half of a small second-level cache


@dataclass(frozen=True, slots=True)
class _Shape:
    """The labels of a product by what they do, the operand with the lanes on the right."""

    left: TensorValue
    right: TensorValue
    left_labels: str
    right_labels: str
    result: str
    lanes: (
        str  # labels next to each other in the result, the right operand's: what vectors run along
    )
    sizes: dict[str, int]

    @property
    def summed(self) -> str:
        return "".join(c for c in self.left_labels if c not in self.result)

    @property
    def columns(self) -> str:
        """The right operand's own, the lanes last."""
        own = "".join(c for c in self.result if c not in self.left_labels)
        return "".join(c for c in own if c not in self.lanes) + self.lanes

    @property
    def rows(self) -> str:
        return "".join(c for c in self.result if c not in self.right_labels)

    @property
    def batch(self) -> str:
        return "".join(c for c in self.result if c in self.left_labels and c in self.right_labels)


def _shape_of(lowering: Lowering, node: Node) -> _Shape:
    """Lanes run along the last axes of the result that are one operand's, or longer ones before."""
    attributes: Contraction = attributes_of(node)
    lx, ly, lr = attributes.labels
    x, y = node.operands
    sizes: dict[str, int] = {}
    for operand, labels in ((x, lx), (y, ly)):
        sizes |= dict(zip(labels, lowering.graph.type_of(operand).shape, strict=True))
    runs = _runs(lx, ly, lr)
    lanes = runs[-1] if runs else ""
    if runs and _extent(lanes, sizes) < LEAST_LANES:
        lanes = max(runs, key=lambda run: _extent(run, sizes))
    if lanes and lanes[0] in lx:
        return _Shape(y, x, ly, lx, lr, lanes, sizes)
    return _Shape(x, y, lx, ly, lr, lanes, sizes)


def _extent(labels: str, sizes: dict[str, int]) -> int:
    return math.prod(sizes[c] for c in labels)


def _runs(x: str, y: str, result: str) -> list[str]:
    """Longest runs of labels of the result that belong to one operand alone."""
    found: list[str] = []
    owner = ""
    for label in result:
        now = "x" if label not in y else "y" if label not in x else ""
        if now and now == owner:
            found[-1] += label
        elif now:
            found.append(label)
        owner = now
    return found


@ROOTS(CONTRACT)
def contract_kernels(lowering: Lowering, position: int, node: Node) -> list[Kernel]:
    """A copy of the right operand if it needs one, then the product."""
    shape = _shape_of(lowering, node)
    if not shape.columns or not all(shape.sizes.values()):
        return [_product(lowering, position, node, shape, None)]
    if shape.right_labels.endswith(shape.lanes) and shape.right in lowering.names:
        return [_product(lowering, position, node, shape, None)]
    packed = shape.batch + shape.summed + shape.columns
    return [
        _pack(lowering, position, shape, packed),
        _product(lowering, position, node, shape, packed),
    ]


def _packed_buffer(lowering: Lowering, position: int, shape: _Shape) -> Buffer:
    type_ = lowering.graph.type_of(shape.right)
    name = f"{lowering.prefix}b{position}.packed"
    return lowering.buffers.setdefault(name, Buffer(name, type_.dtype, type_.size))


def _pack(lowering: Lowering, position: int, shape: _Shape, order: str) -> Kernel:
    """The right operand with its columns side by side."""
    buffer = _packed_buffer(lowering, position, shape)
    variables = {c: Var(f"i{k}", shape.sizes[c]) for k, c in enumerate(order)}
    reader = lowering.reader()
    element = reader.at(shape.right, tuple(variable(variables[c]) for c in shape.right_labels))
    place = _place(order, variables, shape.sizes)
    body = [*reader.lets, Store(buffer.name, place, element)]
    loops = nest([variables[c] for c in order], Role.PARALLEL, body)
    return lowering.kernel(position, reader, [], loops, "_pack", (buffer,))


def _place(labels: str, variables: dict[str, Var], sizes: dict[str, int]) -> Index:
    return flatten([variable(variables[c]) for c in labels], [sizes[c] for c in labels])


def _product(
    lowering: Lowering, position: int, node: Node, shape: _Shape, packed: str | None
) -> Kernel:
    value, wide = TensorValue(position), accumulator(lowering.graph.type_of(shape.left).dtype)
    tiled = shape.rows[-1] if shape.rows and shape.columns else ""
    tile = next((t for t in ROW_TILES if tiled and shape.sizes[tiled] % t == 0), 1)
    variables = {c: Var(f"i{k}", n) for k, (c, n) in enumerate(shape.sizes.items())}
    indices = {c: variable(v) for c, v in variables.items()}
    if tile > 1:
        outer = Var(f"{variables[tiled].name}t", shape.sizes[tiled] // tile)
        variables[tiled] = outer
        indices[tiled] = variable(outer) * tile
    blocks: list[Var] = []
    if shape.columns and (width := _column_block(shape)) < shape.sizes[shape.columns[-1]]:
        last = shape.columns[-1]
        blocks = [Var("block", shape.sizes[last] // width)]
        variables[last] = Var(variables[last].name, width)
        indices[last] = variable(blocks[0]) * width + variable(variables[last])
    reader = lowering.reader()
    inner: list[Statement] = []
    right = _right(lowering, reader, position, shape, packed, indices)
    inner += [*reader.lets, Let("right", _as(right, wide))]
    reader.lets.clear()
    for row in range(tile):
        place = {**indices, tiled: indices[tiled] + row} if tiled else indices
        left = reader.at(shape.left, tuple(place[c] for c in shape.left_labels))
        inner += reader.lets
        reader.lets.clear()
        product = Apply("mul", (_as(left, wide), Local("right", wide)), wide)
        inner.append(Accumulate(f"acc{row}", "add", product))
    summed = nest([variables[c] for c in shape.summed], Role.SEQUENTIAL, inner)
    body: list[Statement] = [Let(f"acc{row}", Literal(0, wide)) for row in range(tile)]
    body += summed
    for row in range(tile):
        place = {**indices, tiled: indices[tiled] + row} if tiled else indices
        at = lowering.place(value, [place[c] for c in shape.result])
        result = _as(Local(f"acc{row}", wide), node.types[0].dtype)
        body.append(Store(lowering.names[value], at, result))
    batch = [variables[c] for c in shape.batch]
    order = [*batch, *blocks, *(variables[c] for c in shape.rows + shape.columns)]
    return lowering.kernel(position, reader, [value], nest(order, Role.PARALLEL, body))


def _column_block(shape: _Shape) -> int:
    """How many columns are done for all rows before the next: their part of the right operand
    stays in the second-level cache."""
    columns = shape.sizes[shape.columns[-1]]
    depth = math.prod(shape.sizes[c] for c in shape.summed)
    rows = math.prod(shape.sizes[c] for c in shape.rows)
    fitting = CACHE_ELEMENTS // max(1, depth)
    if len(shape.lanes) > 1 or rows < 16 or columns <= max(fitting, 64):
        return columns
    divisors = [n for n in range(32, columns) if columns % n == 0 and n % 32 == 0]
    return max((n for n in divisors if n <= max(fitting, 64)), default=columns)


def _right(
    lowering: Lowering,
    reader: Reader,
    position: int,
    shape: _Shape,
    packed: str | None,
    indices: dict[str, Index],
) -> Value:
    if packed is None:
        return reader.at(shape.right, tuple(indices[c] for c in shape.right_labels))
    buffer = _packed_buffer(lowering, position, shape)
    reader.used[buffer.name] = lowering.graph.type_of(shape.right)
    place = flatten([indices[c] for c in packed], [shape.sizes[c] for c in packed])
    return Load(buffer.name, place, buffer.dtype)


def _as(value: Value, dtype: DType) -> Value:
    return value if value.dtype is dtype else Convert(value, dtype)
