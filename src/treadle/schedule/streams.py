"""Cross-entropy through a head by chunks of rows: the logits of a chunk at a time, never all.

A chunk's logits are computed with classes as rows and tokens as columns, as attention's scores are:
every product then reads the head's weight where it is, and what follows runs along lanes of tokens.
Blocks of classes keep their own maximum and sum; a chunk's logarithms come of these. With gradients
the exponentials stay in memory until the logarithms are known, become the gradient of the logits in
place, and are multiplied twice: the weight's gradient is added up chunk by chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from treadle.base import dtypes
from treadle.ir import composites as c
from treadle.ir.graph import Node
from treadle.ir.graph import Value as TensorValue
from treadle.kernel.index import Index, Var, constant, flatten, variable
from treadle.kernel.nodes import (
    Accumulate,
    Apply,
    Buffer,
    Convert,
    For,
    Kernel,
    Let,
    Literal,
    Load,
    Local,
    Matrix,
    Multiply,
    Position,
    Role,
    Statement,
    Store,
    Update,
    Value,
    Walk,
)
from treadle.kernel.program import Argument
from treadle.schedule.keep import STREAMS
from treadle.schedule.labels import plain_load
from treadle.schedule.lower import Draft, Lowering, RepeatDraft, attributes_of
from treadle.schedule.nests import axis_vars, nest
from treadle.schedule.order import Order

F32, I32 = dtypes.float32, dtypes.int32
BLOCK = 96  # classes of a block
TILES = 24  # classes whose gradients are computed together: a weight's rows are read in order
DEPTH = 384  # classes summed at a time into the gradient of a chunk
GROUPS = 8  # of columns of that gradient, for threads to share
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
    name: str

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


@STREAMS(c.LINEAR_CROSS_ENTROPY)
def linear_cross_entropy_drafts(lowering: Lowering, position: int, node: Node) -> list[Draft]:
    return _Stream(lowering, position, node, None, node.operands).drafts()


@STREAMS(c.LINEAR_CROSS_ENTROPY_GRAD)
def linear_cross_entropy_grad_drafts(lowering: Lowering, position: int, node: Node) -> list[Draft]:
    return _Stream(lowering, position, node, node.operands[0], node.operands[1:]).drafts()


class _Stream:
    """The phases of one loss: what comes before, a repeat over chunks, and the rows left over."""

    def __init__(
        self,
        lowering: Lowering,
        position: int,
        node: Node,
        ct: TensorValue | None,
        operands: Sequence[TensorValue],
    ):
        self.lowering, self.position, self.node = lowering, position, node
        attributes: c.CrossEntropy = attributes_of(node)
        self.smoothing = attributes.label_smoothing
        x, weight, targets, *bias = operands
        self.rows, self.width = lowering.graph.type_of(x).shape
        self.classes = lowering.graph.type_of(weight).shape[0]
        self.bands = [
            Band(first, count, size, f"{lowering.prefix}b{position}.band{first}.")
            for first, count, size in cut(self.classes, BLOCK)
        ]
        self.before = Order(lowering.fuse, lowering.memo)
        self.x, self.weight = self._flat(x), self._flat(weight)
        self.targets = self._targets(targets)
        self.bias = self._flat(bias[0]) if bias else None
        self.ct = None if ct is None else self._flat(ct)

    # Operands and buffers

    def _flat(self, operand: TensorValue) -> Buffer:
        """An operand in memory in its own order: where it is, or copied."""
        lowering, type_ = self.lowering, self.lowering.graph.type_of(operand)
        axes = axis_vars("i", type_.shape)
        place = flatten(tuple(map(variable, axes)), type_.shape)
        reader = lowering.reader()
        element = reader.at(operand, tuple(map(variable, axes)))
        found = plain_load(reader, element)
        if found is not None and found.index == place:
            known = lowering.buffers[found.buffer]
            if known.size == type_.size:
                return known
        buffer = self.buffer(f"flat{operand.node}.{operand.output}", type_.size)
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

    # Phases

    def drafts(self) -> list[Draft]:
        if self.ct is not None:
            for output in range(2, len(self.node.types)):
                self.before.add(self._cleared(self.result(output)))
        size = chunk_rows(self.rows)
        turns, rest = divmod(self.rows, size)
        found: list[Draft] = [*self.before.phases()]
        if turns > 1:
            phases = self._phases(_Chunk(self, size, None))
            found.append(RepeatDraft(turns, False, [*phases]))
        else:
            found += self._phases(_Chunk(self, size, 0))
        if rest:
            found += self._phases(_Chunk(self, rest, turns * size))
        return found

    def _phases(self, chunk: _Chunk) -> list[Draft]:
        order = Order(self.lowering.fuse, self.lowering.memo)
        for kernel in chunk.kernels():
            order.add(kernel)
        return [*order.phases()]

    def _cleared(self, buffer: Buffer) -> Kernel:
        i = Var("i", buffer.size)
        body = nest([i], Role.PARALLEL, [Store(buffer.name, variable(i), Literal(0, F32))])
        return self.kernel("clear", (), (buffer,), body)


class _Chunk:
    """The kernels of one chunk: of each turn of the repeat, or of the rows from `start` on."""

    def __init__(self, stream: _Stream, size: int, start: int | None):
        self.stream, self.size, self.start = stream, size, start
        self.i = Var("i", size)
        self.x = self._part(stream.x, stream.width)
        self.targets = self._part(stream.targets, 1)
        self.rows = self._part(stream.result(0), 1)
        self.turned = stream.buffer("turned", stream.width * chunk_rows(stream.rows))
        self.logs = stream.buffer("logs", chunk_rows(stream.rows))

    def _part(self, buffer: Buffer, width: int) -> Place:
        if self.start is not None:
            return Place(buffer, self.start * width)
        size = self.size * width
        alias = f"{buffer.name}@{self.stream.position}"
        self.stream.lowering.rows[alias] = Argument(buffer.name, size)
        return Place(Buffer(alias, buffer.dtype, size))

    def kept(self, band: Band, what: str, size: int = 1) -> Buffer:
        """Numbers of each block for each token: as many as this chunk needs of their memory."""
        most = self.stream.buffer(
            f"band{band.first}.{what}", band.count * size * chunk_rows(self.stream.rows)
        )
        return replace(most, size=band.count * size * self.size)

    def kernels(self) -> list[Kernel]:
        bands = self.stream.bands
        found = [self._turn(), *map(self._exponentials, bands), self._logarithms()]
        if self.stream.ct is not None:
            ct = self._part(self.stream.ct, 1)
            found += [self._weight_gradient(band, ct) for band in bands]
            found += self._input_gradient()
        return found

    def _turn(self) -> Kernel:
        """The tokens as columns."""
        stream, i, d = self.stream, self.i, Var("d", self.stream.width)
        load = self.x.load(variable(i) * stream.width + variable(d))
        store = Store(self.turned.name, variable(d) * self.size + variable(i), load)
        body = nest([d, i], Role.PARALLEL, [store])
        return stream.kernel("turn", (self.x.buffer,), (self.turned,), body)

    # Exponentials of a block's logits, their sum, and the target's logit

    def _scores(self, band: Band) -> tuple[Buffer, Index, bool]:
        """Where a block's numbers are: kept for the gradients, or a thread's own."""
        if self.stream.ct is None:
            return Buffer("scores", F32, band.size * self.size), Index(), False
        start = variable(band.block) * (band.size * self.size)
        return self.kept(band, "scores", band.size), start, True

    def _exponentials(self, band: Band) -> Kernel:
        stream, width, size = self.stream, self.stream.width, self.size
        scores, at, is_kept = self._scores(band)
        weight = Matrix(
            stream.weight.name, band.start * width, Walk(band.size, width), Walk(width)
        )
        product = Multiply(
            Matrix(scores.name, at, Walk(band.size, size), Walk(size)),
            weight,
            Matrix(self.turned.name, Index(), Walk(width, size), Walk(size)),
        )
        lanes = For(self.i, Role.PARALLEL, tuple(self._block_sums(band, scores, at)))
        reads = [stream.weight, self.turned, self.targets.buffer]
        reads += [] if stream.bias is None else [stream.bias]
        writes = [self.kept(band, what) for what in self._sums]
        body = nest([band.block], Role.PARALLEL, [product, lanes])
        if is_kept:
            return stream.kernel("exp", reads, [*writes, scores], body)
        return stream.kernel("exp", reads, writes, body, (scores,))

    @property
    def _sums(self) -> tuple[str, ...]:
        """What is kept of a block: the shift, Σ exp, the target's logit, and Σ logits."""
        return ("shift", "sum", "own", "every")[: 4 if self.stream.smoothing else 3]

    def _block_sums(self, band: Band, scores: Buffer, at: Index) -> list[Statement]:
        stream, i, s = self.stream, self.i, band.inner
        place = at + variable(s) * self.size + variable(i)
        which = band.start + variable(s)
        logit: Value = Load(scores.name, place, F32)
        if stream.bias is not None:
            logit = _add(logit, Load(stream.bias.name, which, F32))
        value = Local("value", F32)
        is_own = Apply("eq", (Position(which, I32), Local("target", I32)), dtypes.bool_)
        second: list[Statement] = [
            Let("value", logit),
            Let("power", Apply("exp", (_sub(value, Local("shift", F32)),), F32)),
            Store(scores.name, place, Local("power", F32)),
            Accumulate("sum", "add", Local("power", F32)),
            Accumulate("own", "add", _where(is_own, value, 0.0)),
        ]
        if stream.smoothing:
            second.append(Accumulate("every", "add", value))
        if stream.ct is None:
            del second[2]
        stat = variable(band.block) * self.size + variable(i)
        return [
            Let("target", self.targets.load(variable(i))),
            Let("top", Literal(float("-inf"), F32)),
            *nest([s], Role.SEQUENTIAL, [Accumulate("top", "max", logit)]),
            Let("shift", _finite(Local("top", F32))),
            *(Let(name, Literal(0, F32)) for name in self._sums[1:]),
            *nest([s], Role.SEQUENTIAL, second),
            *(Store(self.kept(band, n).name, stat, Local(n, F32)) for n in self._sums),
        ]

    # Logarithms of a chunk's rows

    def _logarithms(self) -> Kernel:
        stream, size = self.stream, self.size
        top, total = Local("top", F32), Local("total", F32)
        body: list[Statement] = [Let("top", Literal(float("-inf"), F32))]
        reads: list[Buffer] = []
        for band in stream.bands:
            reads += [self.kept(band, n) for n in self._sums]
            shift = _where(_is(self._stat(band, "sum"), 0.0), float("-inf"), self._stat(band))
            body += nest([band.block], Role.SEQUENTIAL, [Accumulate("top", "max", shift)])
        body += [Let("around", _finite(top))]
        names = ("total", *self._sums[2:])
        body += [Let(name, Literal(0, F32)) for name in names]
        for band in stream.bands:
            sums = self._stat(band, "sum")
            power = Apply("exp", (_sub(self._stat(band), Local("around", F32)),), F32)
            # A block of −∞ counts for nothing, whatever its shift.
            terms = [_where(_is(sums, 0.0), 0.0, _mul(sums, power))]
            terms += [self._stat(band, n) for n in self._sums[2:]]
            added = [Accumulate(n, "add", t) for n, t in zip(names, terms, strict=True)]
            body += nest([band.block], Role.SEQUENTIAL, added)
        log = _add(Apply("log", (total,), F32), Local("around", F32))
        own = Local("own", F32)
        body.append(Let("log", log))
        row = _sub(Local("log", F32), own)
        if stream.smoothing:
            own = _mul(own, Literal(1 - stream.smoothing, F32))
            share = Literal(stream.smoothing / stream.classes, F32)
            row = _sub(_sub(Local("log", F32), own), _mul(Local("every", F32), share))
        body.append(self.rows.store(variable(self.i), row))
        writes = [self.rows.buffer]
        if stream.ct is not None:
            body.append(Store(self.logs.name, variable(self.i), _finite(Local("log", F32))))
            writes.append(self.logs)
        return stream.kernel("log", reads, writes, nest([self.i], Role.PARALLEL, body))

    def _stat(self, band: Band, name: str = "shift") -> Value:
        at = variable(band.block) * self.size + variable(self.i)
        return Load(self.kept(band, name).name, at, F32)

    # Gradients

    def _weight_gradient(self, band: Band, ct: Place) -> Kernel:
        """The gradient of a block's logits in place of exponentials; what it adds to the head's."""
        stream, width, size = self.stream, self.stream.width, self.size
        scores, at, _ = self._scores(band)
        target = stream.result(2)
        writes = [scores, target]
        body: list[Statement] = [self._slopes(band, scores, at, ct)]
        for first, count, tiles in cut(band.size, TILES):
            tile = Var("tile", count)
            row = variable(tile) * tiles + first
            product = Multiply(
                Matrix(
                    target.name, (band.start + row) * width, Walk(tiles, width), Walk(width)
                ),
                Matrix(scores.name, at + row * size, Walk(tiles, size), Walk(size)),
                self.x.matrix(Index(), Walk(size, width), Walk(width)),
                True,
            )
            body += nest([tile], Role.SEQUENTIAL, [product])
        if stream.bias is not None:
            of_bias = stream.result(3)
            writes.append(of_bias)
            place = at + variable(band.inner) * size + variable(self.i)
            load = Load(scores.name, place, F32)
            summed: list[Statement] = [
                Let("total", Literal(0, F32)),
                *nest([self.i], Role.SEQUENTIAL, [Accumulate("total", "add", load)]),
                Update(of_bias.name, band.start + variable(band.inner), Local("total", F32)),
            ]
            body += nest([band.inner], Role.SEQUENTIAL, summed)
        reads = [self.x.buffer, self.targets.buffer, ct.buffer, self.logs]
        reads.append(self.kept(band, "shift"))
        loops = nest([band.block], Role.PARALLEL, body)
        return stream.kernel("d_weight", reads, writes, loops)

    def _slopes(self, band: Band, scores: Buffer, at: Index, ct: Place) -> Statement:
        """ct (p − target): the exponentials by one factor for each token and block."""
        stream, i, s = self.stream, self.i, band.inner
        place = at + variable(s) * self.size + variable(i)
        log = Load(self.logs.name, variable(i), F32)
        power = Apply("exp", (_sub(self._stat(band), log),), F32)
        score = Load(scores.name, place, F32)
        which = Position(band.start + variable(s), I32)
        is_own = Apply("eq", (which, Local("target", I32)), dtypes.bool_)
        # Where all exponentials are 0 the factor may be infinite.
        share = _where(_is(score, 0.0), 0.0, _mul(score, Local("factor", F32)))
        taken: Value = _where(is_own, Local("whole", F32), 0.0)
        if stream.smoothing:
            taken = _add(taken, Local("part", F32))
        ct_row = Local("ct", F32)
        return For(
            i,
            Role.PARALLEL,
            (
                Let("target", self.targets.load(variable(i))),
                Let("ct", ct.load(variable(i))),
                Let("factor", _mul(power, ct_row)),
                Let("whole", _mul(ct_row, Literal(1 - stream.smoothing, F32))),
                Let("part", _mul(ct_row, Literal(stream.smoothing / stream.classes, F32))),
                *nest([s], Role.SEQUENTIAL, [Store(scores.name, place, _sub(share, taken))]),
            ),
        )

    def _input_gradient(self) -> list[Kernel]:
        """Groups of columns, each summed over all classes."""
        stream, width = self.stream, self.stream.width
        target = self._part(stream.result(1), width)
        panel = stream.lowering.panel
        columns = min(width, -(-width // (GROUPS * panel)) * panel)
        scores = [self._scores(band)[0] for band in stream.bands]
        found: list[Kernel] = []
        for first, count, size in cut(width, columns):
            column = variable(Var("g", count)) * size + first
            z = variable(Var("z", size))
            zero = target.store(variable(self.i) * width + column + z, Literal(0, F32))
            body = [*nest([self.i, Var("z", size)], Role.PARALLEL, [zero])]
            for band, buffer in zip(stream.bands, scores, strict=True):
                body += self._sum_over(band, buffer, target, column, size)
            loops = nest([Var("g", count)], Role.PARALLEL, body)
            found.append(
                stream.kernel("d_input", [*scores, stream.weight], [target.buffer], loops)
            )
        return found

    def _sum_over(
        self, band: Band, scores: Buffer, target: Place, column: Index, size: int
    ) -> list[Statement]:
        """A band's classes, some at a time, added to a group of columns."""
        width = self.stream.width
        found: list[Statement] = []
        for first, count, depth in cut(band.count * band.size, DEPTH):
            step = Var("step", count)
            at = variable(step) * depth + first
            product = Multiply(
                target.matrix(column, Walk(self.size, width), Walk(size)),
                Matrix(scores.name, at * self.size, Walk(self.size), Walk(depth, self.size)),
                Matrix(
                    self.stream.weight.name,
                    (at + band.first) * width + column,
                    Walk(depth, width),
                    Walk(size),
                ),
                True,
            )
            found += nest([step], Role.SEQUENTIAL, [product])
        return found


def _add(a: Value, b: Value) -> Value:
    return Apply("add", (a, b), F32)


def _sub(a: Value, b: Value) -> Value:
    return Apply("sub", (a, b), F32)


def _mul(a: Value, b: Value) -> Value:
    return Apply("mul", (a, b), F32)


def _is(value: Value, number: float) -> Value:
    return Apply("eq", (value, Literal(number, F32)), dtypes.bool_)


def _where(condition: Value, value: Value | float, other: Value | float) -> Value:
    a, b = (Literal(v, F32) if isinstance(v, float) else v for v in (value, other))
    return Apply("where", (condition, a, b), F32)


def _finite(value: Value) -> Value:
    """Zero in place of infinities, as the definition shifts by."""
    inner = _where(_is(value, float("inf")), 0.0, value)
    return _where(_is(value, float("-inf")), 0.0, inner)
