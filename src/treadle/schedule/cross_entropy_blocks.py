"""Cross-entropy where loops multiply: a chunk's logits by blocks of classes.

Classes are rows and tokens lanes. Blocks of classes have their own maximum and sum; a chunk's
logarithms come of these. With gradients the exponentials stay in memory until the logarithms are
known, become the gradients of the logits in place, and are multiplied twice: the weight's gradient
is added up chunk by chunk.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from treadle.ir import composites as c
from treadle.ir.graph import Node
from treadle.kernel.index import Index, Var, variable
from treadle.kernel.nodes import (
    Accumulate,
    Buffer,
    For,
    Kernel,
    Let,
    Literal,
    Local,
    Position,
    Role,
    Statement,
    Update,
    Value,
)
from treadle.kernel.target import Streaming
from treadle.schedule.cross_entropy import Chunk, Head, chunk_drafts, row_drafts
from treadle.schedule.drafts import Draft
from treadle.schedule.keep import CHUNKED
from treadle.schedule.lower import Lowering
from treadle.schedule.nests import accumulated, compare, in_order, parallel
from treadle.schedule.softmax import (
    F32,
    I32,
    Queries,
    Rows,
    Scores,
    add,
    choose,
    equals,
    finite,
    local,
    log_sum,
    mul,
    power,
    statistics,
    sub,
)


@CHUNKED(c.LINEAR_CROSS_ENTROPY, c.LINEAR_CROSS_ENTROPY_GRAD)
def linear_cross_entropy_drafts(lowering: Lowering, position: int, node: Node) -> list[Draft]:
    """Full rows of logits where a library multiplies, blocks of classes where loops do."""
    head = Head(lowering, position, node)
    return row_drafts(head) if lowering.target.matmuls.by_library else block_drafts(head)


def chunk_sizes(rows: int, limits: Streaming) -> list[int]:
    """Rows of each chunk: each reads and writes all of the weight's gradient, so not too few."""
    wanted = int(rows * limits.share) // limits.rows_multiple * limits.rows_multiple
    size = min(rows, max(limits.least_rows, min(limits.most_rows, wanted)))
    count, rest = divmod(rows, size)
    return [size] * count + ([rest] if rest else [])


def block_drafts(head: Head) -> list[Draft]:
    """Gradients that chunks add to are cleared first."""
    for output in sorted(head.gradients - {1}):
        head.before.add(_cleared(head, head.result(output)))
    sizes = chunk_sizes(head.rows, head.lowering.target.streaming)
    return chunk_drafts(
        head, sizes, 0, lambda n, start: _BlockChunk(head, sizes[0], n, start).kernels()
    )


def _cleared(head: Head, buffer: Buffer) -> Kernel:
    i = Var("i", buffer.size)
    body = parallel([i], [Rows(buffer, Index(), 1).store(Literal(0, F32), i)])
    return head.kernel("clear", (), (buffer,), body)


@dataclass(frozen=True, slots=True)
class _Band:
    """Parts of one size of some classes or columns, by the name of the loop over them."""

    name: str
    first: int
    count: int
    size: int

    @property
    def block(self) -> Var:
        return Var(self.name, self.count)

    @property
    def inner(self) -> Var:
        return Var("s", self.size)

    @property
    def start(self) -> Index:
        """Where a part starts."""
        return variable(self.block) * self.size + self.first


def _bands(name: str, extent: int, size: int) -> list[_Band]:
    """An extent as equal parts and what is left."""
    count, rest = divmod(extent, size)
    found = [_Band(name, 0, count, size), _Band(name, count * size, 1, rest)]
    return [band for band in found if band.count and band.size]


def _is_own(which: Index, target: Value) -> Value:
    return compare("eq", Position(which, I32), target)


class _BlockChunk(Chunk):
    def __init__(self, head: Head, most: int, size: int, start: int | None):
        super().__init__(head, size, start)
        self.most, self.limits = most, head.lowering.target.streaming
        self.bands = _bands("k", head.classes, self.limits.block)
        self.x = self.part(head.x, head.width)
        self.targets = self.part(head.targets, 1)
        self.rows = self.part(head.result(0), 1)
        self.queries = Queries(head.buffer("transposed", head.width * most), size, head.width)
        self.logs = Rows(head.buffer("logs", most), Index(), 1)
        # Of each block: the shift, Σ exp, the target's logit, and Σ logits.
        self.sums = ("shift", "sum", "own", "every")[: 4 if head.smoothing else 3]

    def kernels(self) -> list[Kernel]:
        """A matmul for each block of classes, logarithms of rows, and gradients."""
        gradients = [] if self.head.ct is None else self._gradients(self.part(self.head.ct, 1))
        blocks = [self._exponentials(band) for band in self.bands]
        return [self._transposed(), *blocks, self._logarithms(), *gradients]

    def _transposed(self) -> Kernel:
        """The tokens as lanes."""
        body = self.queries.copied(self.x, self.i)
        return self.head.kernel("transpose", (self.x.buffer,), (self.queries.copy,), body)

    def _memory(self, band: _Band, name: str, size: int = 1) -> Buffer:
        """Numbers of each block for each token: as many as this chunk needs of their memory."""
        each = band.count * size
        most = self.head.buffer(f"band{band.first}.{name}", each * self.most)
        return replace(most, size=each * self.size)

    def _statistic(self, band: _Band, name: str = "shift") -> Rows:
        """One of the numbers of a block, by token."""
        start = variable(band.block) * self.size
        return Rows(self._memory(band, name), start, 1)

    def _scores(self, band: _Band) -> Scores:
        """A block's numbers: in memory for the gradients, or a thread's own."""
        if self.head.ct is None:
            buffer, start = Buffer("scores", F32, band.size * self.size), Index()
        else:
            buffer = self._memory(band, "scores", band.size)
            start = variable(band.block) * (band.size * self.size)
        return Scores(Rows(buffer, start, self.size), band.size, self.size)

    # Exponentials of a block's logits, their sum, and the target's logit

    def _exponentials(self, band: _Band) -> Kernel:
        head, scores = self.head, self._scores(band)
        weight = head.weight.shifted(band.start).matrix(band.size, head.width)
        matmul = scores.computed(weight, self.queries.matrix)
        lanes = For(self.i, Role.PARALLEL, tuple(self._block_sums(band, scores)))
        reads = [head.weight.buffer, self.queries.copy, self.targets.buffer]
        reads += [] if head.bias is None else [head.bias.buffer]
        writes = [self._memory(band, name) for name in self.sums]
        body = parallel([band.block], [matmul, lanes])
        if head.ct is None:
            return head.kernel("exp", reads, writes, body, (scores.buffer,))
        return head.kernel("exp", reads, [*writes, scores.buffer], body)

    def _block_sums(self, band: _Band, scores: Scores) -> list[Statement]:
        head, i, s = self.head, self.i, band.inner
        which, value, exponential = band.start + variable(s), local("value"), local("power")
        logit = self.logit(scores, s, which)
        own = choose(_is_own(which, Local("target", I32)), value, 0.0)
        terms: list[Statement] = [
            Let("value", logit),
            Let("power", power(value, local("shift"))),
            *([] if head.ct is None else [scores.store(exponential, s, i)]),
            Accumulate("sum", "add", exponential),
            Accumulate("own", "add", own),
            *([Accumulate("every", "add", value)] if head.smoothing else []),
        ]
        return [
            Let("target", self.targets.load(i)),
            *statistics(s, logit, terms, self.sums[1:]),
            *(self._statistic(band, n).store(local(n), i) for n in self.sums),
        ]

    # Logarithms of a chunk's rows

    def _logarithms(self) -> Kernel:
        """The logsumexp of each row from its blocks', and the loss."""
        head, i = self.head, self.i
        names = ("total", *self.sums[2:])
        tops: list[Statement] = []
        totals: list[Statement] = []
        for band in self.bands:
            shift, total, *others = (self._statistic(band, n).load(i) for n in self.sums)
            # A block of −∞ counts for nothing, whatever its shift.
            is_none = equals(total, 0.0)
            greatest = Accumulate("top", "max", choose(is_none, float("-inf"), shift))
            tops += in_order([band.block], [greatest])
            scaled = mul(total, power(shift, local("around")))
            terms = [choose(is_none, 0.0, scaled), *others]
            added = [Accumulate(n, "add", t) for n, t in zip(names, terms, strict=True)]
            totals += in_order([band.block], added)
        body: list[Statement] = [
            Let("top", Literal(float("-inf"), F32)),
            *tops,
            Let("around", finite(local("top"))),
            *(Let(name, Literal(0, F32)) for name in names),
            *totals,
            Let("log", log_sum("total", "around")),
            self.rows.store(head.loss(), i),
        ]
        writes = [self.rows.buffer]
        if head.ct is not None:
            body.append(self.logs.store(finite(local("log")), i))
            writes.append(self.logs.buffer)
        reads = [self._memory(band, n) for band in self.bands for n in self.sums]
        return head.kernel("log", reads, writes, parallel([i], body))

    # Gradients

    def _gradients(self, ct: Rows) -> list[Kernel]:
        found = [self._weight_gradient(band, ct) for band in self.bands]
        return found + (self._input_gradients() if 1 in self.head.wanted else [])

    def _weight_gradient(self, band: _Band, ct: Rows) -> Kernel:
        """Gradients of a block's logits in place of exponentials; what they add to the head's."""
        head, scores = self.head, self._scores(band)
        factors = Rows(Buffer("factors", F32, self.size), Index(), 1)
        body, writes = self._logit_gradients(band, scores, ct, factors), [scores.buffer]
        if 2 in head.wanted:
            writes.append(head.result(2))
            body += self._onto_weight(band, scores)
        if 3 in head.wanted:
            writes.append(head.result(3))
            body += self._onto_bias(band, scores)
        reads = [self.x.buffer, self.targets.buffer, ct.buffer, self.logs.buffer]
        reads.append(self._memory(band, "shift"))
        loops = parallel([band.block], body)
        return head.kernel("d_weight", reads, writes, loops, (factors.buffer,))

    def _logit_gradients(
        self, band: _Band, scores: Scores, ct: Rows, factors: Rows
    ) -> list[Statement]:
        """ct (p − target): the exponentials by one factor for each token and block."""
        head, i, s = self.head, self.i, band.inner
        upstream, score = ct.load(i), scores.load(s, i)
        scale = power(self._statistic(band).load(i), self.logs.load(i))
        factor = factors.store(mul(scale, upstream), i)
        # Where all exponentials are 0 the factor may be infinite.
        share = choose(equals(score, 0.0), 0.0, mul(score, factors.load(i)))
        is_own = _is_own(band.start + variable(s), self.targets.load(i))
        taken = choose(is_own, head.own_share(upstream), 0.0)
        if head.smoothing:
            taken = add(taken, head.every_share(upstream))
        gradient = scores.store(sub(share, taken), s, i)
        return [
            *parallel([i], [factor]),
            *parallel([s, i], [gradient]),
        ]

    def _onto_weight(self, band: _Band, scores: Scores) -> list[Statement]:
        """A tile of classes at a time, so that rows of the gradient are read in order."""
        width, limits = self.head.width, self.limits
        target = Rows(self.head.result(2), Index(), width)
        has_wide_tiles = self.head.lowering.panel >= limits.wide_panel
        rows = limits.wide_tile_classes if has_wide_tiles else limits.tile_classes
        found: list[Statement] = []
        for tile in _bands("tile", band.size, rows):
            into = target.shifted(band.start + tile.start).matrix(tile.size, width)
            tokens = self.x.matrix(self.size, width)
            matmul = scores.part(tile.start, tile.size).onto_keys(into, tokens)
            found += in_order([tile.block], [matmul])
        return found

    def _onto_bias(self, band: _Band, scores: Scores) -> list[Statement]:
        s = band.inner
        summed = [
            *accumulated("add", F32, [self.i], [], scores.load(s, self.i), "total"),
            Update(self.head.result(3).name, band.start + variable(s), local("total")),
        ]
        return [*in_order([s], summed)]

    def _input_gradients(self) -> list[Kernel]:
        """Groups of columns, each summed over all classes."""
        head, width, panel = self.head, self.head.width, self.head.lowering.panel
        target = self.part(head.result(1), width)
        columns = min(width, -(-width // (self.limits.column_groups * panel)) * panel)
        reads = [*(self._scores(band).buffer for band in self.bands), head.weight.buffer]
        found: list[Kernel] = []
        for group in _bands("g", width, columns):
            body = [*target.cleared(self.i, Var("z", group.size), group.start)]
            for band in self.bands:
                body += self._onto_input(band, target, group.start, group.size)
            loops = parallel([group.block], body)
            found.append(head.kernel("d_input", reads, [target.buffer], loops))
        return found

    def _onto_input(self, band: _Band, target: Rows, column: Index, width: int) -> list[Statement]:
        """A band's classes, some at a time, added to a group of columns."""
        buffer = self._scores(band).buffer
        scores = Scores(Rows(buffer, Index(), self.size), band.size, self.size)
        found: list[Statement] = []
        for step in _bands("step", band.count * band.size, self.limits.depth):
            at = step.start + band.first
            weight = self.head.weight.shifted(at).matrix(step.size, width, column)
            into = target.matrix(self.size, width, column)
            matmul = scores.part(step.start, step.size).onto_queries(into, weight)
            found += in_order([step.block], [matmul])
        return found
