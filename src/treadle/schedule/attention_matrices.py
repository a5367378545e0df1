"""Streamed attention whose blocks of float16 are multiplied as matrices by the warps of a group.

A group keeps a block of rows, of queries or of keys, and goes through blocks of the others, which
lie in its memory. Each of its warps has a strip of the block: it holds the strip's rows and the
sums of its results as matrices from the first block to the last, and multiplies, weighs and adds
by itself. Warps wait for each other only where a block of the others comes and goes.

Scores of a strip are a product in memory, of which threads make probabilities by packs of four,
rounded to float16 for the next product. The forward pass shifts scores by what was the greatest one
of their row when it was last set. It is set anew where a score exceeds it by far, which is seldom:
then the sums go through memory, are scaled down, and the scores are multiplied once more.

Blocks in which no query comes before a key need no mask: those on the diagonal are steps of their
own. Rows are padded so that those of a matrix lie in other banks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from treadle.base import dtypes
from treadle.ir.graph import Value as TensorValue
from treadle.kernel.index import Data, Index, Var, bounded, constant, unflatten, variable
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
    Within,
)
from treadle.schedule import attention_stream
from treadle.schedule.attention_stream import LEAST, LOWEST, BlockPair, Streams
from treadle.schedule.nests import (
    Body,
    apply,
    compare,
    in_order,
    parallel,
)
from treadle.schedule.softmax import F32, I32, add, choose, equals, local, mul, power, sub
from treadle.schedule.stream_tiles import Tile
from treadle.schedule.templates import matrix_sizes

F16 = dtypes.float16
PACK = 4  # elements of a row that a thread has at a time
SIDES = 2  # threads that share a row of scores: of 16 rows, those of a warp
# Powers of two. The greatest probability of a row, when its shift is set: small ones are not
# denormal. And what a later one may be: float16 ends at 2^16.
RAISED, HIGHEST = 4, 14
Grid = tuple[Var, tuple[Index, Index, Index]]


def multiplied(
    target: Tile, left: Tile, right: Tile, sizes: tuple[int, int, int], strip: Index,
    adds: bool = False,
) -> Matmul:  # fmt: skip
    """target ← left · right, or added to it: rows of a strip, columns and depth."""
    rows, columns, depth = sizes
    return Matmul(
        target.matrix(rows, columns, strip),
        left.matrix(rows, depth, strip),
        right.matrix(depth, columns),
        adds,
    )


@dataclass(frozen=True, slots=True)
class _Parts:
    """Numbers of the threads that share a row."""

    buffer: Buffer

    def load(self, row: Index, part: Index) -> Value:
        return Load(self.buffer.name, row * SIDES + part, F32)

    def store(self, value: Value, row: Index, part: Index) -> Store:
        return Store(self.buffer.name, row * SIDES + part, value)


class Strips(Streams):
    """Blocks in shared memory as matrices are read from there, and strips of warps."""

    def begin(self) -> None:
        super().begin()
        mapping = self.lowering.target.mapping
        assert mapping is not None
        self.strip = mapping.strip
        _, self.others = matrix_sizes(self.node, self.types, self.lowering.target)

    @property
    def ratio(self) -> int:
        return self.block // self.others

    def by_strips(self, make: Callable[[Index], Sequence[Statement]]) -> Body:
        """What each warp does with the strip that starts at some row."""
        strip = Var("strip", self.block // self.strip)
        return (For(strip, Role.PARALLEL, tuple(make(variable(strip) * self.strip))),)

    def each(self, columns: int, make: Callable[[Index, Index, int], list[Statement]]) -> Body:
        """What is done with elements of a strip, a thread having four of a row."""
        i, c = Var("i", self.strip), Var("c", columns // PACK)
        body: list[Statement] = []
        for u in range(PACK):
            body += make(variable(i), variable(c) * PACK + u, u)
        return parallel([i, c], body)

    def passing(self, name: str, width: int) -> Tile:
        """A block that a group goes through."""
        return Tile(self.own(name, self.others * (width + 8), F16), width + 8)

    def kept(
        self, name: str, operand: int, heads: tuple[Index, Index], first: Index, by_way: Tile
    ) -> tuple[Tile, Body]:
        """An operand's rows that warps hold as matrices, some columns after the other."""
        width = self.types[operand].shape[3]
        tile = Tile(self.own(name, self.block * (width + 8), F16), width + 8)
        body: list[Statement] = []
        for start, wide in self.chunks(width):
            i, d = Var("i", self.block), Var("d", wide)
            indices = [*heads, first + variable(i), variable(d) + start]
            value = self.element(operand, indices, dtype=F16)
            body += parallel([i, d], [by_way.store(value, variable(i), variable(d))])
            at = (start, 0)
            body += self.by_strips(lambda s: self.moved(tile, by_way, s, wide, at))  # noqa: B023
        return tile, tuple(body)

    def sums(self, name: str, width: int) -> Tile:
        """Sums that warps hold as matrices."""
        return Tile(self.own(name, self.block * (width + 4)), width + 4)

    def scores_of_strips(self, pad: int) -> tuple[Tile, Tile]:
        """Scores, also sums on their way to results, and what is made of them in float16."""
        n = self.others
        held = Tile(self.own("scores", self.block * (n + pad)), n + pad)
        return held, Tile(self.own("weights", self.block * (n + 8), F16), n + 8)

    def moved(
        self, into: Tile, out_of: Tile, strip: Index, width: int, at: tuple[int, int] = (0, 0)
    ) -> Body:
        """Columns of a strip between a warp and memory: where they start in both."""
        i, j = Var("i", self.strip), Var("j", width)
        row, (there, here) = strip + variable(i), (variable(j) + first for first in at)
        value = Load(out_of.buffer.name, out_of.at(row, here), out_of.buffer.dtype)
        return parallel([i, j], [Store(into.buffer.name, into.at(row, there), value)])

    def cleared(self, *sums: tuple[Tile, int]) -> Body:
        def clear(strip: Index) -> list[Statement]:
            found: list[Statement] = []
            for tile, width in sums:
                i, j = Var("i", self.strip), Var("j", width)
                zero = tile.store(Literal(0, F32), strip + variable(i), variable(j))
                found += parallel([i, j], [zero])
            return found

        return self.by_strips(clear)

    def chunks(self, width: int) -> list[tuple[int, int]]:
        """Columns that pass through the memory of scores at once: the first, and how many."""
        n = self.others
        return [(first, min(n, width - first)) for first in range(0, width, n)]

    def results(
        self, held: Tile, sums: Tile, width: int, store: Callable[[Index, Index, Value], Store]
    ) -> Body:
        """Sums that warps hold to results, by packs."""

        def put(strip: Index) -> list[Statement]:
            found: list[Statement] = []
            for first, wide in self.chunks(width):

                def of(row: Index, column: Index, u: int) -> list[Statement]:
                    value = held.load(strip + row, column)
                    return [store(strip + row, column + first, value)]  # noqa: B023

                found += self.moved(held, sums, strip, wide, (0, first))
                found += self.each(wide, of)
            return found

        return self.by_strips(put)

    def blocks_in_order(self, blocks: int, heads: int, last_first: bool) -> Grid:
        """Groups of a launch: those that see the most first, so that none is late."""
        group = Var("group", self.batch * heads * blocks)
        block, b, h = unflatten(variable(group), (blocks, self.batch, heads))
        if last_first and self.causal:
            block = constant(blocks - 1) - block
        return group, (b, h, block)

    def by_keys(self, at: BlockPair, block: Index, step: Callable[[BlockPair], Body]) -> Body:
        """Steps of a block of queries through all keys that it sees, masked ones the last."""
        n, count = self.others, -(-self.count // self.others)
        if not self.causal:
            var = Var("kb", count)
            return in_order([var], step(replace(at, key=variable(var) * n)))
        var, own = Var("kb", self.query_blocks * self.ratio), Var("db", self.ratio)
        before = replace(at, key=variable(var) * n, is_masked=False)
        same = replace(at, key=at.query + variable(own) * n)
        return (
            For(var, Role.SEQUENTIAL, step(before), block * self.ratio),
            *in_order([own], step(same)),
        )


class Forward(Strips, attention_stream.Forward):
    def kernels(self) -> list[Kernel]:
        group, (b, h, block) = self.blocks_in_order(self.query_blocks, self.heads, True)
        at = BlockPair(b, h, block * self.block)
        self.keys, self.values = (
            self.passing("keys", self.depth),
            self.passing("values", self.width),
        )
        self.held, self.probabilities = self.scores_of_strips(4)
        self.queries, taken = self.kept("queries", 0, (b, h), at.query, self.probabilities)
        self.out = self.sums("sums", self.width)
        self.shift, self.factor = self.numbers("shift"), self.numbers("factor")
        self.greatest, self.added = (
            _Parts(self.own(name, self.block * SIDES)) for name in ("greatest", "added")
        )
        i, p = Var("i", self.block), Var("p", SIDES)
        row, part = variable(i), variable(p)
        body = (
            *taken,
            *parallel([i], [self.shift.store(Literal(LEAST, F32), row)]),
            *parallel([i, p], [self.added.store(Literal(0, F32), row, part)]),
            *self.cleared((self.out, self.width)),
            *self.by_keys(at, block, self._step),
            *self._shares(at),
            *self.results(self.held, self.out, self.width, self._stored(at)),
        )
        return self.kernel(parallel([group], body), (0, 1))

    def _step(self, at: BlockPair) -> Body:
        """A block of keys and values, onto the sums of the queries at hand."""
        sizes = (self.strip, self.width, self.others)

        def step(strip: Index) -> list[Statement]:
            product = multiplied(self.out, self.probabilities, self.values, sizes, strip, True)
            return [
                self._scores_of(strip),
                *self._greatest(at, strip),
                *self._shifts(strip),
                *self._scaled_down(strip),
                *self._weighed(at, strip),
                product,
            ]

        return (
            *self.copied(self.keys, 1, self.of_keys(at), at.key, self.others),
            *self.copied(self.values, 2, self.of_keys(at), at.key, self.others),
            *self.by_strips(step),
        )

    def _scores_of(self, strip: Index) -> Matmul:
        sizes = (self.strip, self.others, self.depth)
        return multiplied(self.held, self.queries, self.keys.transposed, sizes, strip)

    def _score(self, at: BlockPair, row: Index, key: Index) -> Value:
        return self.score(self.held.load(row, key), at, row, key)

    def _along(self, part: Index, make: Callable[[Index, int], list[Statement]]) -> Body:
        """What a thread does with its keys of a row, by four: threads read other banks."""
        beside = min(4 * PACK, self.others // SIDES)
        far, near = Var("far", self.others // (SIDES * beside)), Var("near", beside // PACK)
        first = variable(far) * (SIDES * beside) + part * beside + variable(near) * PACK
        return in_order([far, near], [s for u in range(PACK) for s in make(first + u, u)])

    def _greatest(self, at: BlockPair, strip: Index) -> Body:
        i, p = Var("i", self.strip), Var("p", SIDES)
        row, part = strip + variable(i), variable(p)

        def seen(key: Index, u: int) -> list[Statement]:
            score = self._score(at, row, key)
            found = self.seen(at, row, key, score, LOWEST, float("-inf"))
            return [Accumulate("most", "max", found)]

        body = [
            Let("most", Literal(LEAST, F32)),
            *self._along(part, seen),
            self.greatest.store(local("most"), row, part),
        ]
        return parallel([i, p], body)

    def _shifts(self, strip: Index) -> Body:
        """What scores are shifted by: the same as before, unless one is far above it."""
        i = Var("i", self.strip)
        row = strip + variable(i)
        most = apply("max", *(self.greatest.load(row, constant(p)) for p in range(SIDES)))
        limit = add(local("old"), Literal(HIGHEST * math.log(2.0), F32))
        lowered = sub(local("most"), Literal(RAISED * math.log(2.0), F32))
        is_above = compare("lt", limit, local("most"))
        # Before the first score there is nothing to scale.
        scaled = choose(equals(local("old"), LEAST), 1.0, power(local("old"), local("new")))
        body: list[Statement] = [
            Let("old", self.shift.load(row)),
            Let("most", most),
            Let("new", choose(is_above, lowered, local("old"))),
            self.factor.store(scaled, row),
            self.shift.store(local("new"), row),
        ]
        return parallel([i], body)

    def _scaled_down(self, strip: Index) -> Body:
        """Sums scaled down by way of the memory of scores, if one of them has to be."""
        i, again = Var("i", self.strip), Var("again", 1)
        is_scaled = apply(
            "where",
            equals(self.factor.load(strip + variable(i)), 1.0),
            Literal(0, I32),
            Literal(1, I32),
        )

        def scale(row: Index, column: Index, u: int) -> list[Statement]:
            scaled = mul(self.held.load(strip + row, column), self.factor.load(strip + row))
            return [self.held.store(scaled, strip + row, column)]

        body: list[Statement] = []
        for first, wide in self.chunks(self.width):
            body += self.moved(self.held, self.out, strip, wide, (0, first))
            body += self.each(wide, scale)
            body += self.moved(self.out, self.held, strip, wide, (first, 0))
        body.append(self._scores_of(strip))
        return (
            Let("scaled", Literal(0, I32)),
            *in_order([i], [Accumulate("scaled", "max", is_scaled)]),
            For(again, Role.SEQUENTIAL, tuple(body), Index(((Data("scaled", 2), 1),))),
        )

    def _weighed(self, at: BlockPair, strip: Index) -> Body:
        """Probabilities of a strip, and the sums of its rows."""
        i, p = Var("i", self.strip), Var("p", SIDES)
        row, part = strip + variable(i), variable(p)

        def weigh(key: Index, u: int) -> list[Statement]:
            weight = power(self._score(at, row, key), local("shift"))
            return [
                Let(f"weight{u}", self.seen(at, row, key, weight, 0.0, 0.0)),
                self.probabilities.store(local(f"weight{u}"), row, key),
                Accumulate("sum", "add", local(f"weight{u}")),
            ]

        body = [
            Let("shift", self.shift.load(row)),
            Let("sum", mul(self.added.load(row, part), self.factor.load(row))),
            *self._along(part, weigh),
            self.added.store(local("sum"), row, part),
        ]
        return parallel([i, p], body)

    def _shares(self, at: BlockPair) -> Body:
        """Logarithms of each row's sum, as a result, and what its probabilities are divided by."""
        i = Var("i", self.block)
        row = variable(i)
        query = at.query + row
        guard = Within(query, 0, self.length) if query.range[1] >= self.length else None
        indices = (at.batch, at.head, bounded(query, self.length))
        total = add(*(self.added.load(row, constant(p)) for p in range(SIDES)))
        share = apply("div", Literal(1, F32), local("total"))
        if self.bias_shape:  # it may hide all keys from a query
            share = choose(equals(local("total"), 0.0), 0.0, share)
        body: list[Statement] = [
            Let("total", total),
            Let("log", add(apply("log", local("total")), self.shift.load(row))),
            self.factor.store(share, row),
            self._put(TensorValue(self.position, 1), indices, local("log"), guard),
        ]
        return parallel([i], body)

    def _stored(self, at: BlockPair) -> Callable[[Index, Index, Value], Store]:
        def store(row: Index, column: Index, value: Value) -> Store:
            query = at.query + row
            guard = Within(query, 0, self.length) if query.range[1] >= self.length else None
            indices = (at.batch, at.head, bounded(query, self.length), column)
            whole = mul(value, self.factor.load(row))
            return self._put(TensorValue(self.position, 0), indices, whole, guard)

        return store
