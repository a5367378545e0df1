"""The kernels that compute the rows of a chunk: logits by blocks of classes, and logarithms."""

from __future__ import annotations

from dataclasses import replace

from treadle.base import dtypes
from treadle.kernel.index import Index, Var, variable
from treadle.kernel.nodes import (
    Accumulate,
    Apply,
    Buffer,
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
    Value,
    Walk,
)
from treadle.kernel.program import Argument
from treadle.schedule.head import (
    F32,
    I32,
    Band,
    Head,
    Place,
    add,
    choose,
    chunk_rows,
    equals,
    finite,
    mul,
    sub,
)
from treadle.schedule.nests import nest


class Chunk:
    """The kernels of one chunk: of each turn of the repeat, or of the rows from `start` on."""

    def __init__(self, head: Head, size: int, start: int | None):
        self.head, self.size, self.start = head, size, start
        self.i = Var("i", size)
        self.x = self.part(head.x, head.width)
        self.targets = self.part(head.targets, 1)
        self.rows = self.part(head.result(0), 1)
        self.turned = head.buffer("turned", head.width * chunk_rows(head.rows))
        self.logs = head.buffer("logs", chunk_rows(head.rows))

    def part(self, buffer: Buffer, width: int) -> Place:
        if self.start is not None:
            return Place(buffer, self.start * width)
        size = self.size * width
        alias = f"{buffer.name}@{self.head.position}"
        self.head.lowering.rows[alias] = Argument(buffer.name, size)
        return Place(Buffer(alias, buffer.dtype, size))

    def kept(self, band: Band, what: str, size: int = 1) -> Buffer:
        """Numbers of each block for each token: as many as this chunk needs of their memory."""
        most = self.head.buffer(
            f"band{band.first}.{what}", band.count * size * chunk_rows(self.head.rows)
        )
        return replace(most, size=band.count * size * self.size)

    def kernels(self) -> list[Kernel]:
        """The rows: a product for each block of classes, then their logarithms."""
        blocks = [self._exponentials(band) for band in self.head.bands]
        return [self._turn(), *blocks, self._logarithms()]

    def _turn(self) -> Kernel:
        """The tokens as columns."""
        head, i, d = self.head, self.i, Var("d", self.head.width)
        load = self.x.load(variable(i) * head.width + variable(d))
        store = Store(self.turned.name, variable(d) * self.size + variable(i), load)
        body = nest([d, i], Role.PARALLEL, [store])
        return head.kernel("turn", (self.x.buffer,), (self.turned,), body)

    # Exponentials of a block's logits, their sum, and the target's logit

    def scores(self, band: Band) -> tuple[Buffer, Index, bool]:
        """Where a block's numbers are: kept for the gradients, or a thread's own."""
        if self.head.ct is None:
            return Buffer("scores", F32, band.size * self.size), Index(), False
        start = variable(band.block) * (band.size * self.size)
        return self.kept(band, "scores", band.size), start, True

    def _exponentials(self, band: Band) -> Kernel:
        head, width, size = self.head, self.head.width, self.size
        scores, at, is_kept = self.scores(band)
        weight = Matrix(head.weight.name, band.start * width, Walk(band.size, width), Walk(width))
        product = Multiply(
            Matrix(scores.name, at, Walk(band.size, size), Walk(size)),
            weight,
            Matrix(self.turned.name, Index(), Walk(width, size), Walk(size)),
        )
        lanes = For(self.i, Role.PARALLEL, tuple(self._block_sums(band, scores, at)))
        reads = [head.weight, self.turned, self.targets.buffer]
        reads += [] if head.bias is None else [head.bias]
        writes = [self.kept(band, what) for what in self.sums]
        body = nest([band.block], Role.PARALLEL, [product, lanes])
        if is_kept:
            return head.kernel("exp", reads, [*writes, scores], body)
        return head.kernel("exp", reads, writes, body, (scores,))

    @property
    def sums(self) -> tuple[str, ...]:
        """What is kept of a block: the shift, Σ exp, the target's logit, and Σ logits."""
        return ("shift", "sum", "own", "every")[: 4 if self.head.smoothing else 3]

    def _block_sums(self, band: Band, scores: Buffer, at: Index) -> list[Statement]:
        head, i, s = self.head, self.i, band.inner
        place = at + variable(s) * self.size + variable(i)
        which = band.start + variable(s)
        logit: Value = Load(scores.name, place, F32)
        if head.bias is not None:
            logit = add(logit, Load(head.bias.name, which, F32))
        value = Local("value", F32)
        is_own = Apply("eq", (Position(which, I32), Local("target", I32)), dtypes.bool_)
        second: list[Statement] = [
            Let("value", logit),
            Let("power", Apply("exp", (sub(value, Local("shift", F32)),), F32)),
            Store(scores.name, place, Local("power", F32)),
            Accumulate("sum", "add", Local("power", F32)),
            Accumulate("own", "add", choose(is_own, value, 0.0)),
        ]
        if head.smoothing:
            second.append(Accumulate("every", "add", value))
        if head.ct is None:
            del second[2]
        stat = variable(band.block) * self.size + variable(i)
        return [
            Let("target", self.targets.load(variable(i))),
            Let("top", Literal(float("-inf"), F32)),
            *nest([s], Role.SEQUENTIAL, [Accumulate("top", "max", logit)]),
            Let("shift", finite(Local("top", F32))),
            *(Let(name, Literal(0, F32)) for name in self.sums[1:]),
            *nest([s], Role.SEQUENTIAL, second),
            *(Store(self.kept(band, n).name, stat, Local(n, F32)) for n in self.sums),
        ]

    # Logarithms of a chunk's rows

    def _logarithms(self) -> Kernel:
        """The logsumexp of each row from its blocks', and the loss."""
        head = self.head
        names = ("total", *self.sums[2:])
        tops: list[Statement] = []
        totals: list[Statement] = []
        for band in head.bands:
            # A block of −∞ counts for nothing, whatever its shift.
            is_none = equals(self.stat(band, "sum"), 0.0)
            shift = choose(is_none, float("-inf"), self.stat(band))
            tops += nest([band.block], Role.SEQUENTIAL, [Accumulate("top", "max", shift)])
            power = Apply("exp", (sub(self.stat(band), Local("around", F32)),), F32)
            terms = [choose(is_none, 0.0, mul(self.stat(band, "sum"), power))]
            terms += [self.stat(band, n) for n in self.sums[2:]]
            added = [Accumulate(n, "add", t) for n, t in zip(names, terms, strict=True)]
            totals += nest([band.block], Role.SEQUENTIAL, added)
        log = add(Apply("log", (Local("total", F32),), F32), Local("around", F32))
        body: list[Statement] = [
            Let("top", Literal(float("-inf"), F32)),
            *tops,
            Let("around", finite(Local("top", F32))),
            *(Let(name, Literal(0, F32)) for name in names),
            *totals,
            Let("log", log),
            self.rows.store(variable(self.i), self.head.loss()),
        ]
        writes = [self.rows.buffer]
        if head.ct is not None:
            body.append(Store(self.logs.name, variable(self.i), finite(Local("log", F32))))
            writes.append(self.logs)
        reads = [self.kept(band, n) for band in head.bands for n in self.sums]
        return head.kernel("log", reads, writes, nest([self.i], Role.PARALLEL, body))

    def stat(self, band: Band, name: str = "shift") -> Value:
        at = variable(band.block) * self.size + variable(self.i)
        return Load(self.kept(band, name).name, at, F32)
