"""Streamed attention whose blocks of float16 are multiplied as matrices by the warps of a group.

Blocks of queries, keys and values lie in shared memory as they are, sums in float32. Scores of a
block are a product; threads make probabilities of them, of which several share a row, and round
them to float16 for the next product. Rows are padded so that those of a matrix lie in other banks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from treadle.base import dtypes
from treadle.kernel.index import Index, Var, variable
from treadle.kernel.nodes import (
    Accumulate,
    Buffer,
    For,
    Kernel,
    Let,
    Literal,
    Load,
    Matmul,
    Role,
    Statement,
    Store,
    Value,
)
from treadle.schedule import attention_stream, attention_stream_grad
from treadle.schedule.attention_stream import LEAST, LOWEST, BlockPair, Streams
from treadle.schedule.nests import Body, in_order, parallel
from treadle.schedule.softmax import F32, add, finite, local, mul, power, sub
from treadle.schedule.stream_tiles import Tile

F16 = dtypes.float16
SIDES = 4  # threads that share a row of scores: of 32 rows, those of four warps
Streamed = attention_stream.Forward | attention_stream_grad.Backward


def _multiplied(
    target: Tile, left: Tile, right: Tile, sizes: tuple[int, int, int], adds: bool = False
) -> Matmul:
    """target ← left · right, or added to it: rows, columns and depth."""
    rows, columns, depth = sizes
    return Matmul(
        target.matrix(rows, columns), left.matrix(rows, depth), right.matrix(depth, columns), adds
    )


class _Matrices(Streams):
    """Blocks in shared memory as matrices are read from there."""

    def tile(self, name: str, width: int, is_transposed: bool = False) -> Tile:
        return Tile(self.own(name, self.block * (width + 8), F16), width + 8)

    def sums(self, name: str, width: int) -> Tile:
        return Tile(self.own(name, self.block * (width + 4)), width + 4)

    def scores(self, name: str) -> Tile:
        return self.sums(name, self.block)

    def weights(self, name: str) -> Tile:
        return self.tile(name, self.block)

    def scored(self, held: Tile, left: Tile, right: Tile, depth: int) -> Matmul:
        """Products of rows on both sides: queries and keys, or cotangents and values."""
        return _multiplied(held, left, right.transposed, (self.block, self.block, depth))


@dataclass(frozen=True, slots=True)
class _Parts:
    """Numbers of the threads that share a row."""

    buffer: Buffer

    def load(self, row: Index, part: int) -> Value:
        return Load(self.buffer.name, row * SIDES + part, F32)

    def store(self, value: Value, row: Index, part: Var) -> Store:
        return Store(self.buffer.name, row * SIDES + variable(part), value)


class Forward(_Matrices, attention_stream.Forward):
    def kernels(self) -> list[Kernel]:
        group, (b, h, block) = self.grid(self.query_blocks, self.heads)
        at, i = BlockPair(b, h, block * self.block), Var("i", self.block)
        self.queries, self.keys = (self.tile(n, self.depth) for n in ("queries", "keys"))
        self.values, self.held = self.tile("values", self.width), self.scores("scores")
        self.probabilities, self.out = self.weights("weights"), self.sums("sums", self.width)
        self.shift, self.total, self.factor = map(self.numbers, ("shift", "total", "factor"))
        self.greatest, self.added = (
            _Parts(self.own(n, self.block * SIDES)) for n in ("greatest", "added")
        )
        first = [
            self.shift.store(Literal(LEAST, F32), variable(i)),
            self.total.store(Literal(0, F32), variable(i)),
        ]
        var = self.through("kb", self.key_blocks)
        step = self._step(replace(at, key=variable(var) * self.block))
        body = (
            *self.copied(self.queries, 0, (b, h), at.query),
            *parallel([i], first),
            *self.out.cleared(self.block, self.width),
            For(var, Role.SEQUENTIAL, step, block + 1 if self.causal else None),
            *self._finished(at, self.out),
        )
        return self.kernel(parallel([group], body), (0, 1))

    def _step(self, at: BlockPair) -> Body:
        """A block of keys and values, onto the sums of the queries at hand."""
        i, e, heads = Var("i", self.block), Var("e", self.width), self.of_keys(at)
        row, column = variable(i), variable(e)
        scaled = self.out.store(mul(self.out.load(row, column), self.factor.load(row)), row, column)
        mixed = (self.block, self.width, self.block)
        return (
            *self.copied(self.keys, 1, heads, at.key),
            *self.copied(self.values, 2, heads, at.key),
            self.scored(self.held, self.queries, self.keys, self.depth),
            *self._greatest(at),
            *self._weighed(at),
            *parallel([i, e], [scaled]),
            _multiplied(self.out, self.probabilities, self.values, mixed, adds=True),
            *self._totalled(),
        )

    def _score(self, at: BlockPair, row: Index, key: Index) -> Value:
        score = self.score(self.held.load(row, key), at, row, key)
        return self.seen(at, row, key, score, LOWEST, float("-inf"))

    def _sides(self) -> tuple[Var, Var, Var, Index]:
        """A row, the threads that share it, and the keys of each, beside those of the others."""
        i, p, s = Var("i", self.block), Var("p", SIDES), Var("s", self.block // SIDES)
        return i, p, s, variable(s) * SIDES + variable(p)

    def _greatest(self, at: BlockPair) -> Body:
        """The greatest score of each row so far, and what sums are multiplied by therefore."""
        i, p, s, key = self._sides()
        row = variable(i)
        own: list[Statement] = [
            Let("most", Literal(float("-inf"), F32)),
            *in_order([s], [Accumulate("most", "max", self._score(at, row, key))]),
            self.greatest.store(local("most"), row, p),
        ]
        found: list[Statement] = [
            Let("old", self.shift.load(row)),
            Let("greatest", local("old")),
            *(Accumulate("greatest", "max", self.greatest.load(row, n)) for n in range(SIDES)),
            Let("shift", finite(local("greatest"))),
            Let("kept", power(local("old"), local("shift"))),
            self.shift.store(local("shift"), row),
            self.factor.store(local("kept"), row),
            self.total.store(mul(self.total.load(row), local("kept")), row),
        ]
        return (*parallel([i, p], own), *parallel([i], found))

    def _weighed(self, at: BlockPair) -> Body:
        """Probabilities, not yet divided by their sum, and each thread's part of that."""
        i, p, s, key = self._sides()
        row = variable(i)
        score = self.score(self.held.load(row, key), at, row, key)
        weight = self.seen(at, row, key, power(score, local("shift")), 0.0, 0.0)
        step: list[Statement] = [
            Let("weight", weight),
            self.probabilities.store(local("weight"), row, key),
            Accumulate("sum", "add", local("weight")),
        ]
        body: list[Statement] = [
            Let("shift", self.shift.load(row)),
            Let("sum", Literal(0, F32)),
            *in_order([s], step),
            self.added.store(local("sum"), row, p),
        ]
        return parallel([i, p], body)

    def _totalled(self) -> Body:
        i = Var("i", self.block)
        total = self.total.load(variable(i))
        for n in range(SIDES):
            total = add(total, self.added.load(variable(i), n))
        return parallel([i], [self.total.store(total, variable(i))])


class Backward(_Matrices, attention_stream_grad.Backward):
    def _begin(self) -> None:
        super()._begin()
        self.held = self.scores("scores")

    def _differentiated(self, at: BlockPair, weights: Tile | None, scale: float) -> Body:
        """Products one after the other in the same memory, where probabilities are kept too."""
        i, s = Var("i", self.block), Var("s", self.block)
        row, key = variable(i), variable(s)
        second = self.held if weights is not None else self.scores("products")
        score = self.score(self.held.load(row, key), at, row, key)
        weight = self.seen(at, row, key, power(score, self.logs.load(row)), 0.0, 0.0)
        of_scores = self.scored(self.held, self.queries, self.keys, self.depth)
        of_values = self.scored(second, self.ct, self.values, self.width)
        known = weight if weights is None else weights.load(row, key)
        gradient = mul(known, sub(second.load(row, key), self.row_sums.load(row)))
        found = parallel([i, s], [self.gradients.store(mul(gradient, scale), row, key)])
        if weights is None:
            return (of_scores, of_values, *found)
        kept = parallel([i, s], [weights.store(weight, row, key)])
        return (of_scores, *kept, of_values, *found)

    def _added(self, into: Tile, width: int, left: Tile, right: Tile, by_keys: bool) -> Body:
        factor = left.transposed if by_keys else left
        return (_multiplied(into, factor, right, (self.block, width, self.block), adds=True),)
