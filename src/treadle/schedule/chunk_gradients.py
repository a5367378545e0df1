"""The kernels that turn a chunk's exponentials into gradients of the head and of the chunk."""

from __future__ import annotations

from treadle.base import dtypes
from treadle.kernel.index import Index, Var, variable
from treadle.kernel.nodes import (
    Accumulate,
    Apply,
    Buffer,
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
    Walk,
)
from treadle.schedule.chunks import Chunk
from treadle.schedule.head import F32, I32, Band, Place, add, choose, cut, equals, mul, sub
from treadle.schedule.nests import nest

DEPTH = 96  # classes summed at a time into the gradient of a chunk
GROUPS = (
    4  # of columns of that gradient, for threads to share: wide, so that rows are read in order
)


class Gradients:
    """Exponentials by blocks become slopes in place; two products follow."""

    def __init__(self, chunk: Chunk):
        self.chunk, self.head = chunk, chunk.head

    def kernels(self) -> list[Kernel]:
        assert self.head.ct is not None
        ct = self.chunk.part(self.head.ct, 1)
        found = [self._weight_gradient(band, ct) for band in self.head.bands]
        return [*found, *(self._input_gradient() if 1 in self.head.wanted else [])]

    def _weight_gradient(self, band: Band, ct: Place) -> Kernel:
        """The gradient of a block's logits in place of exponentials; what it adds to the head's."""
        head = self.head
        scores, at, _ = self.chunk.scores(band)
        writes = [scores]
        factors = Buffer("factors", F32, self.chunk.size)
        body = self._slopes(band, scores, at, ct, factors)
        if 2 in head.wanted:
            writes.append(head.result(2))
            body += self._weight_products(band, scores, at)
        if 3 in head.wanted:
            writes.append(head.result(3))
            body += self._bias_sums(band, scores, at)
        reads = [self.chunk.x.buffer, self.chunk.targets.buffer, ct.buffer, self.chunk.logs]
        reads.append(self.chunk.kept(band, "shift"))
        loops = nest([band.block], Role.PARALLEL, body)
        return head.kernel("d_weight", reads, writes, loops, (factors,))

    def _weight_products(self, band: Band, scores: Buffer, at: Index) -> list[Statement]:
        width, size = self.head.width, self.chunk.size
        target = self.head.result(2)
        found: list[Statement] = []
        for first, count, tiles in cut(band.size, self.head.tile):
            tile = Var("tile", count)
            row = variable(tile) * tiles + first
            into = (band.start + row) * width
            product = Multiply(
                Matrix(target.name, into, Walk(tiles, width), Walk(width)),
                Matrix(scores.name, at + row * size, Walk(tiles, size), Walk(size)),
                self.chunk.x.matrix(Index(), Walk(size, width), Walk(width)),
                True,
            )
            found += nest([tile], Role.SEQUENTIAL, [product])
        return found

    def _bias_sums(self, band: Band, scores: Buffer, at: Index) -> list[Statement]:
        place = at + variable(band.inner) * self.chunk.size + variable(self.chunk.i)
        which = band.start + variable(band.inner)
        terms = [Accumulate("total", "add", Load(scores.name, place, F32))]
        summed: list[Statement] = [
            Let("total", Literal(0, F32)),
            *nest([self.chunk.i], Role.SEQUENTIAL, terms),
            Update(self.head.result(3).name, which, Local("total", F32)),
        ]
        return [*nest([band.inner], Role.SEQUENTIAL, summed)]

    def _slopes(
        self, band: Band, scores: Buffer, at: Index, ct: Place, factors: Buffer
    ) -> list[Statement]:
        """ct (p − target): the exponentials by one factor for each token and block."""
        head, chunk, i, s = self.head, self.chunk, self.chunk.i, band.inner
        log = Load(chunk.logs.name, variable(i), F32)
        power = Apply("exp", (sub(chunk.stat(band), log),), F32)
        upstream = ct.load(variable(i))
        factor = Store(factors.name, variable(i), mul(power, upstream))
        place = at + variable(s) * chunk.size + variable(i)
        score = Load(scores.name, place, F32)
        # Where all exponentials are 0 the factor may be infinite.
        share = mul(score, Load(factors.name, variable(i), F32))
        share = choose(equals(score, 0.0), 0.0, share)
        which = Position(band.start + variable(s), I32)
        is_own = Apply("eq", (which, chunk.targets.load(variable(i))), dtypes.bool_)
        whole = mul(upstream, Literal(1 - head.smoothing, F32)) if head.smoothing else upstream
        taken = choose(is_own, whole, 0.0)
        if head.smoothing:
            taken = add(taken, mul(upstream, Literal(head.smoothing / head.classes, F32)))
        slope = Store(scores.name, place, sub(share, taken))
        return [*nest([i], Role.PARALLEL, [factor]), *nest([s, i], Role.PARALLEL, [slope])]

    def _input_gradient(self) -> list[Kernel]:
        """Groups of columns, each summed over all classes."""
        head, width = self.head, self.head.width
        target = self.chunk.part(head.result(1), width)
        panel = head.lowering.panel
        columns = min(width, -(-width // (GROUPS * panel)) * panel)
        scores = [self.chunk.scores(band)[0] for band in head.bands]
        found: list[Kernel] = []
        for first, count, size in cut(width, columns):
            column = variable(Var("g", count)) * size + first
            z = variable(Var("z", size))
            zero = target.store(variable(self.chunk.i) * width + column + z, Literal(0, F32))
            body = [*nest([self.chunk.i, Var("z", size)], Role.PARALLEL, [zero])]
            for band, buffer in zip(head.bands, scores, strict=True):
                body += self._sum_over(band, buffer, target, column, size)
            loops = nest([Var("g", count)], Role.PARALLEL, body)
            found.append(head.kernel("d_input", [*scores, head.weight], [target.buffer], loops))
        return found

    def _sum_over(
        self, band: Band, scores: Buffer, target: Place, column: Index, size: int
    ) -> list[Statement]:
        """A band's classes, some at a time, added to a group of columns."""
        width = self.head.width
        found: list[Statement] = []
        for first, count, depth in cut(band.count * band.size, DEPTH):
            step = Var("step", count)
            at = variable(step) * depth + first
            product = Multiply(
                target.matrix(column, Walk(self.chunk.size, width), Walk(size)),
                Matrix(
                    scores.name,
                    at * self.chunk.size,
                    Walk(self.chunk.size),
                    Walk(depth, self.chunk.size),
                ),
                Matrix(
                    self.head.weight.name,
                    (at + band.first) * width + column,
                    Walk(depth, width),
                    Walk(size),
                ),
                True,
            )
            found += nest([step], Role.SEQUENTIAL, [product])
        return found
