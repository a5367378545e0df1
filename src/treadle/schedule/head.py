"""A classifier's head as streams read it: operands, blocks of classes, chunks of rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from treadle.base import dtypes
from treadle.ir import composites as c
from treadle.ir.graph import Node
from treadle.ir.graph import Value as TensorValue
from treadle.kernel.index import Index, Var, flatten, variable
from treadle.kernel.nodes import (
    Apply,
    Buffer,
    Convert,
    Kernel,
    Literal,
    Load,
    Local,
    Matrix,
    Role,
    Statement,
    Store,
    Value,
    Walk,
)
from treadle.schedule.lower import Lowering, attributes_of
from treadle.schedule.nests import axis_vars, nest
from treadle.schedule.operands import plain_load
from treadle.schedule.order import Order

F32, I32 = dtypes.float32, dtypes.int32
BLOCK = 96  # classes of a block
LEAST_ROWS, MOST_ROWS = 64, 256
SHARE = 0.047  # of all rows: with what is kept beside the logits a twentieth of their memory


def chunk_rows(rows: int) -> int:
    """Rows of a chunk: each reads and writes all of the weight's gradient, so not too few."""
    wanted = int(rows * SHARE) // 32 * 32
    return min(rows, max(LEAST_ROWS, min(MOST_ROWS, wanted)))


def cut(extent: int, size: int) -> list[tuple[int, int, int]]:
    """An extent as equal parts and what is left: (start, parts, size of each)."""
    count, rest = divmod(extent, size)
    found = [(0, count, size), (count * size, 1, rest)]
    return [part for part in found if part[1] and part[2]]


@dataclass(frozen=True, slots=True)
class Band:
    """Blocks of classes of one size, and what is kept of each for the tokens of a chunk."""

    first: int
    count: int
    size: int

    @property
    def block(self) -> Var:
        return Var("k", self.count)

    @property
    def inner(self) -> Var:
        return Var("s", self.size)

    @property
    def start(self) -> Index:
        """The first class of a block."""
        return variable(self.block) * self.size + self.first


@dataclass(frozen=True, slots=True)
class Place:
    """A tensor's part that belongs to a chunk: a buffer, and where in it the part starts."""

    buffer: Buffer
    start: int = 0

    def load(self, index: Index) -> Value:
        return Load(self.buffer.name, index + self.start, self.buffer.dtype)

    def store(self, index: Index, value: Value) -> Store:
        return Store(self.buffer.name, index + self.start, value)

    def matrix(self, index: Index, rows: Walk, columns: Walk) -> Matrix:
        return Matrix(self.buffer.name, index + self.start, rows, columns)


class Head:
    """One loss: where its operands are, and what its kernels share."""

    def __init__(
        self,
        lowering: Lowering,
        position: int,
        node: Node,
        ct: TensorValue | None,
        operands: Sequence[TensorValue],
    ):
        self.lowering, self.position, self.node = lowering, position, node
        attributes: c.HeadCrossEntropy = attributes_of(node)
        self.smoothing, self.is_rounded = attributes.label_smoothing, attributes.rounded
        x, weight, targets, *bias = operands
        self.rows, self.width = lowering.graph.type_of(x).shape
        self.classes = lowering.graph.type_of(weight).shape[0]
        self.bands = [Band(first, count, size) for first, count, size in cut(self.classes, BLOCK)]
        self.before = Order(lowering.fuse, lowering.memo)
        self.x, self.weight = self._flat(x), self._flat(weight)
        self.targets = self._targets(targets)
        self.bias = self._flat(bias[0]) if bias else None
        self.ct = None if ct is None else self._flat(ct)
        read = {o.value for o in lowering.graph.outputs} | lowering.uses.keys()
        values = (TensorValue(position, i) for i in range(len(node.types)))
        self.wanted = {v.output for v in values if v in read}

    @property
    def tile(self) -> int:
        """Classes whose gradients are computed together: a tile, so that rows are read in order."""
        return 8 if self.lowering.panel >= 32 else 6

    def loss(self) -> Value:
        """The logsumexp less the target's logit, and less the mean logit where it is smoothed."""
        log, own, smoothing = Local("log", F32), Local("own", F32), self.smoothing
        if not smoothing:
            return sub(log, own)
        share = Literal(smoothing / self.classes, F32)
        chosen = mul(own, Literal(1 - smoothing, F32))
        return sub(sub(log, chosen), mul(Local("every", F32), share))

    # Operands and buffers

    def _flat(self, operand: TensorValue) -> Buffer:
        """An operand in memory in its own order: where it is, or copied."""
        lowering, type_ = self.lowering, self.lowering.graph.type_of(operand)
        axes = axis_vars("i", type_.shape)
        place = flatten(tuple(map(variable, axes)), type_.shape)
        reader = lowering.reader()
        element = reader.at(operand, tuple(map(variable, axes)))
        found = plain_load(reader, element)
        if found is not None and found.index - place == Index():
            known = lowering.buffers[found.buffer]
            if known.size == type_.size:
                return known
        buffer = self.buffer(f"flat{operand.node}.{operand.output}", type_.size, type_.dtype)
        body = nest(axes, Role.PARALLEL, [*reader.lets, Store(buffer.name, place, element)])
        kernel = lowering.kernel(self.position, reader, [], body, "_copy", (buffer,))
        self.before.add(kernel)
        return buffer

    def _targets(self, operand: TensorValue) -> Buffer:
        """Class indices as int32, held inside the classes."""
        reader = self.lowering.reader()
        n = Var("n", self.rows)
        found = reader.at(operand, (variable(n),))
        if found.dtype.itemsize < I32.itemsize:
            found = Convert(found, I32)
        least, most = Literal(0, found.dtype), Literal(self.classes - 1, found.dtype)
        held = Apply("min", (Apply("max", (found, least), found.dtype), most), found.dtype)
        buffer = self.buffer("targets", self.rows, I32)
        element = held if held.dtype is I32 else Convert(held, I32)
        body = nest([n], Role.PARALLEL, [*reader.lets, Store(buffer.name, variable(n), element)])
        self.before.add(
            self.lowering.kernel(self.position, reader, [], body, "_targets", (buffer,))
        )
        return buffer

    def buffer(self, name: str, size: int, dtype: dtypes.DType = F32) -> Buffer:
        full = f"{self.lowering.prefix}b{self.position}.{name}"
        return self.lowering.buffers.setdefault(full, Buffer(full, dtype, size))

    def result(self, output: int) -> Buffer:
        return self.lowering.buffer(TensorValue(self.position, output))

    def kernel(
        self,
        suffix: str,
        reads: Sequence[Buffer],
        writes: Sequence[Buffer],
        body: Sequence[Statement],
        scratch: Sequence[Buffer] = (),
    ) -> Kernel:
        origins = (self.node.origin,) if self.node.origin else ()
        name = f"{self.node.op.name}_{self.position}_{suffix}"
        every = tuple(dict.fromkeys(reads))
        return Kernel(name, every, tuple(writes), tuple(body), origins, tuple(scratch), True)


def add(a: Value, b: Value) -> Value:
    return Apply("add", (a, b), F32)


def sub(a: Value, b: Value) -> Value:
    return Apply("sub", (a, b), F32)


def mul(a: Value, b: Value) -> Value:
    return Apply("mul", (a, b), F32)


def equals(value: Value, number: float) -> Value:
    return Apply("eq", (value, Literal(number, F32)), dtypes.bool_)


def choose(condition: Value, value: Value | float, other: Value | float) -> Value:
    a, b = (Literal(v, F32) if isinstance(v, float) else v for v in (value, other))
    return Apply("where", (condition, a, b), F32)


def finite(value: Value) -> Value:
    """Zero in place of infinities, as the definition shifts by."""
    inner = choose(equals(value, float("inf")), 0.0, value)
    return choose(equals(value, float("-inf")), 0.0, inner)
