"""Streamed attention whose blocks of float16 are multiplied as matrices by the warps of a group.

A group keeps 64 rows, of queries or of keys, and goes through blocks of the others. Results are
summed in matrices that its warps hold from the first block to the last: nothing is scaled down on
the way, because the logarithms of sums are known first. The forward pass finds them by going
through the keys twice; the second time probabilities are whole ones. Scores of a block are a
product in shared memory, of which threads make probabilities by packs of four, rounded to float16
for the next product. Blocks in which no query comes before a key need no mask: those on the
diagonal are steps of their own. Rows are padded so that those of a matrix lie in other banks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from treadle.base import dtypes
from treadle.ir.graph import Value as TensorValue
from treadle.kernel.index import Index, Var, bounded, constant, variable
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
from treadle.schedule import attention_stream, attention_stream_grad
from treadle.schedule.attention_stream import LEAST, LOWEST, BlockPair, Streams
from treadle.schedule.nests import Body, apply, as_dtype, in_order, parallel
from treadle.schedule.softmax import F32, add, choose, equals, finite, local, mul, power, sub
from treadle.schedule.stream_tiles import Tile
from treadle.schedule.templates import MATRIX_OTHERS

F16 = dtypes.float16
PACK = 4  # elements of a row that a thread has at a time
SIDES = 2  # threads that share a row of scores: of 64 rows, those of four warps
CHUNK = 32  # columns of sums that pass through the memory of scores at once
RAISED = 10  # powers of two that probabilities are raised by: small ones are not denormal
Streamed = attention_stream.Forward | attention_stream_grad.Backward


def _multiplied(
    target: Tile, left: Tile, right: Tile, sizes: tuple[int, int, int], adds: bool = False
) -> Matmul:
    """target ← left · right, or added to it: rows, columns and depth."""
    rows, columns, depth = sizes
    return Matmul(
        target.matrix(rows, columns), left.matrix(rows, depth), right.matrix(depth, columns), adds
    )


def _packs(rows: int, columns: int, make: Callable[[Index, Index, int], list[Statement]]) -> Body:
    """What is done with every element, a thread having four of a row: by row, column and number."""
    i, c = Var("i", rows), Var("c", columns // PACK)
    body: list[Statement] = []
    for u in range(PACK):
        body += make(variable(i), variable(c) * PACK + u, u)
    return parallel([i, c], body)


class _Matrices(Streams):
    """Blocks in shared memory as matrices are read from there."""

    @property
    def others(self) -> int:
        """Rows of a block that a group goes through."""
        return MATRIX_OTHERS[self.node.op]

    @property
    def ratio(self) -> int:
        return self.block // self.others

    def block_of(self, name: str, rows: int, width: int) -> Tile:
        return Tile(self.own(name, rows * (width + 8), F16), width + 8)

    def held_scores(self, rows: int, columns: int) -> Tile:
        """Scores, and sums on their way to results."""
        size = max(rows * (columns + 4), self.block * (CHUNK + 4))
        return Tile(self.own("scores", size), columns + 4)

    def sums(self, name: str, width: int) -> Tile:
        return Tile(self.own(name, self.block * (width + 4)), width + 4)

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

    def results(
        self, held: Tile, sums: Tile, width: int, store: Callable[[Index, Index, Value], Store]
    ) -> Body:
        """Sums that warps hold to results, some columns at a time, by packs."""
        found: list[Statement] = []
        for first in range(0, width, CHUNK):
            wide = min(CHUNK, width - first)
            stage = Tile(held.buffer, CHUNK + 4)
            i, j = Var("i", self.block), Var("j", wide)
            row, column = variable(i), variable(j)
            found += parallel([i, j], [stage.store(sums.load(row, column + first), row, column)])

            def put(row: Index, column: Index, u: int) -> list[Statement]:
                return [store(row, column + first, stage.load(row, column))]  # noqa: B023

            found += _packs(self.block, wide, put)
        return tuple(found)


@dataclass(frozen=True, slots=True)
class _Parts:
    """Numbers of the threads that share a row."""

    buffer: Buffer

    def load(self, row: Index, part: Index) -> Value:
        return Load(self.buffer.name, row * SIDES + part, F32)

    def store(self, value: Value, row: Index, part: Index) -> Store:
        return Store(self.buffer.name, row * SIDES + part, value)


class Forward(_Matrices, attention_stream.Forward):
    def kernels(self) -> list[Kernel]:
        group, (b, h, block) = self.grid(self.query_blocks, self.heads)
        at, n = BlockPair(b, h, block * self.block), self.others
        self.queries = self.block_of("queries", self.block, self.depth)
        # Keys make way for probabilities when their scores are known.
        shared = max(n * (self.depth + 8), self.block * (n + 8))
        memory = self.own("keys", shared, F16)
        self.keys, self.probabilities = Tile(memory, self.depth + 8), Tile(memory, n + 8)
        self.values, self.held = (
            self.block_of("values", n, self.width),
            self.held_scores(self.block, n),
        )
        self.out, self.logs = self.sums("sums", self.width), self.numbers("logs")
        self.greatest, self.added = (
            _Parts(self.own(name, self.block * SIDES)) for name in ("greatest", "added")
        )
        i, p = Var("i", self.block), Var("p", SIDES)
        row, part = variable(i), variable(p)
        first = [
            self.greatest.store(Literal(LEAST, F32), row, part),
            self.added.store(Literal(0, F32), row, part),
        ]
        body = (
            *self.copied(self.queries, 0, (b, h), at.query),
            *parallel([i, p], first),
            *self.out.cleared(self.block, self.width),
            *self.by_keys(at, block, self._counted),
            *self._logarithms(at),
            *self.by_keys(at, block, self._mixed),
            *self.results(self.held, self.out, self.width, self._stored(at)),
        )
        return self.kernel(parallel([group], body), (0, 1))

    def _scores_of(self, at: BlockPair) -> Body:
        sizes = (self.block, self.others, self.depth)
        return (
            *self.copied(self.keys, 1, self.of_keys(at), at.key, self.others),
            _multiplied(self.held, self.queries, self.keys.transposed, sizes),
        )

    def _score(self, at: BlockPair, row: Index, key: Index) -> Value:
        return self.score(self.held.load(row, key), at, row, key)

    def _counted(self, at: BlockPair) -> Body:
        """A block of keys: the greatest score of each part of a row, and its sum."""
        i, p, s = Var("i", self.block), Var("p", SIDES), Var("s", self.others // (SIDES * PACK))
        row, part = variable(i), variable(p)
        keys = [variable(s) * (SIDES * PACK) + part * PACK + u for u in range(PACK)]
        greatest: list[Statement] = []
        summed: list[Statement] = []
        for key in keys:
            score = self._score(at, row, key)
            seen = self.seen(at, row, key, score, LOWEST, float("-inf"))
            weight = self.seen(at, row, key, power(score, local("most")), 0.0, 0.0)
            greatest.append(Accumulate("most", "max", seen))
            summed.append(Accumulate("sum", "add", weight))
        body: list[Statement] = [
            Let("old", self.greatest.load(row, part)),
            Let("most", local("old")),
            *in_order([s], greatest),
            Let("sum", mul(self.added.load(row, part), power(local("old"), local("most")))),
            *in_order([s], summed),
            self.greatest.store(local("most"), row, part),
            self.added.store(local("sum"), row, part),
        ]
        return (*self._scores_of(at), *parallel([i, p], body))

    def _logarithms(self, at: BlockPair) -> Body:
        """Of each row's sum, as a result, and as what raised probabilities are shifted by."""
        i, p = Var("i", self.block), Var("p", SIDES)
        row, part = variable(i), variable(p)
        query = at.query + row
        guard = Within(query, 0, self.length) if query.range[1] >= self.length else None
        indices = (at.batch, at.head, bounded(query, self.length))
        scaled = mul(
            self.added.load(row, part), power(self.greatest.load(row, part), local("most"))
        )
        shift = sub(
            choose(equals(local("log"), float("-inf")), 0.0, local("log")),
            Literal(RAISED * math.log(2.0), F32),
        )
        body: list[Statement] = [
            Let("most", Literal(LEAST, F32)),
            *in_order([p], [Accumulate("most", "max", self.greatest.load(row, part))]),
            Let("total", Literal(0, F32)),
            *in_order([p], [Accumulate("total", "add", scaled)]),
            Let("log", add(apply("log", local("total")), local("most"))),
            self.logs.store(shift, row),
            self._put(TensorValue(self.position, 1), indices, local("log"), guard),
        ]
        return parallel([i], body)

    def _mixed(self, at: BlockPair) -> Body:
        """A block of keys and values, onto the sums of the queries at hand."""

        def weigh(row: Index, key: Index, u: int) -> list[Statement]:
            weight = power(self._score(at, row, key), self.logs.load(row))
            seen = self.seen(at, row, key, weight, 0.0, 0.0)
            return [
                Let(f"weight{u}", seen),
                self.probabilities.store(local(f"weight{u}"), row, key),
            ]

        sizes = (self.block, self.width, self.others)
        return (
            *self.copied(self.values, 2, self.of_keys(at), at.key, self.others),
            *self._scores_of(at),
            *_packs(self.block, self.others, weigh),
            _multiplied(self.out, self.probabilities, self.values, sizes, adds=True),
        )

    def _stored(self, at: BlockPair) -> Callable[[Index, Index, Value], Store]:
        def store(row: Index, column: Index, value: Value) -> Store:
            query = at.query + row
            guard = Within(query, 0, self.length) if query.range[1] >= self.length else None
            indices = (at.batch, at.head, bounded(query, self.length), column)
            lowered = mul(value, 0.5**RAISED)
            return self._put(TensorValue(self.position, 0), indices, lowered, guard)

        return store


class Backward(_Matrices, attention_stream_grad.Backward):
    def _sides(self, queries: int, keys: int) -> None:
        """Blocks of both sides, so many rows each, and scores of all pairs of them."""
        self.rows_of = (queries, keys)
        self.queries = self.block_of("queries", queries, self.depth)
        self.ct = self.block_of("ct", queries, self.width)
        self.keys = self.block_of("keys", keys, self.depth)
        self.values = self.block_of("values", keys, self.width)
        self.logs, self.row_sums = (self.numbers(n, queries) for n in ("logs", "row_sums"))
        self.held = self.held_scores(queries, keys)
        self.weighed = self.block_of("weights", queries, keys)

    def _queries_read(self, at: BlockPair) -> Body:
        """A block of queries with their cotangents, logarithms and row sums."""
        rows, heads = self.rows_of[0], (at.batch, at.head)
        i = Var("i", rows)
        query = at.query + variable(i)
        body: list[Statement] = [
            Let("log", self.element(self.LSE, [*heads, query])),
            self.logs.store(finite(local("log")), variable(i)),
            self.row_sums.store(self._row_sum([*heads, query]), variable(i)),
        ]
        return (
            *self.copied(self.queries, self.Q, heads, at.query, rows),
            *self.copied(self.ct, self.CT, heads, at.query, rows),
            *parallel([i], body),
        )

    def _keys_read(self, at: BlockPair) -> Body:
        heads, rows = self.of_keys(at), self.rows_of[1]
        return (
            *self.copied(self.keys, self.K, heads, at.key, rows),
            *self.copied(self.values, self.V, heads, at.key, rows),
        )

    def _probabilities(self, at: BlockPair) -> Body:
        """Of a block's scores, rounded to float16."""

        def weigh(row: Index, key: Index, u: int) -> list[Statement]:
            score = self.score(self.held.load(row, key), at, row, key)
            weight = self.seen(at, row, key, power(score, self.logs.load(row)), 0.0, 0.0)
            return [Let(f"weight{u}", weight), self.weighed.store(local(f"weight{u}"), row, key)]

        scores = _multiplied(
            self.held, self.queries, self.keys.transposed, (*self.rows_of, self.depth)
        )
        return (scores, *_packs(*self.rows_of, weigh))

    def _gradients(self) -> Body:
        """Of a block's scores, in the place of their probabilities."""

        def differentiate(row: Index, key: Index, u: int) -> list[Statement]:
            apart = sub(self.held.load(row, key), self.row_sums.load(row))
            gradient = mul(mul(self.weighed.load(row, key), apart), self.scale)
            return [
                Let(f"gradient{u}", gradient),
                self.weighed.store(local(f"gradient{u}"), row, key),
            ]

        products = _multiplied(
            self.held, self.ct, self.values.transposed, (*self.rows_of, self.width)
        )
        return (products, *_packs(*self.rows_of, differentiate))

    def _put_rows(
        self, output: int, heads: Sequence[Index], first: Index
    ) -> Callable[[Index, Index, Value], Store]:
        value, length = TensorValue(self.position, output), self.node.types[output].shape[2]

        def store(row: Index, column: Index, element: Value) -> Store:
            at = first + row
            guard = Within(at, 0, length) if at.range[1] >= length else None
            given = as_dtype(element, self.lowering.buffer(value).dtype)
            return self.lowering.store(value, (*heads, bounded(at, length), column), given, guard)

        return store

    def _of_queries(self) -> list[Kernel]:
        group, (b, h, block) = self.grid(self.query_blocks, self.heads)
        at = BlockPair(b, h, block * self.block)
        self._sides(self.block, self.others)
        d_q = self.sums("sums", self.depth)
        sizes = (self.block, self.depth, self.others)

        def step(at: BlockPair) -> Body:
            return (
                *self._keys_read(at),
                *self._probabilities(at),
                *self._gradients(),
                _multiplied(d_q, self.weighed, self.keys, sizes, adds=True),
            )

        body = (
            *self._queries_read(at),
            *d_q.cleared(self.block, self.depth),
            *self.by_keys(at, block, step),
            *self.results(self.held, d_q, self.depth, self._put_rows(0, (b, h), at.query)),
        )
        return self.kernel(parallel([group], body), (0,), "_queries")

    def _of_keys(self) -> list[Kernel]:
        """All queries that see a block of keys, of every head that reads it."""
        group, (b, g, block) = self.grid(self.key_blocks, self.groups)
        r, n = Var("r", self.heads // self.groups), self.others
        own = BlockPair(b, g * r.extent + variable(r), key=block * self.block)
        self._sides(n, self.block)
        d_k, d_v = self.sums("key_sums", self.depth), self.sums("value_sums", self.width)

        def step(at: BlockPair) -> Body:
            turned = self.weighed.transposed
            return (
                *self._queries_read(at),
                *self._probabilities(at),
                _multiplied(d_v, turned, self.ct, (self.block, self.width, n), adds=True),
                *self._gradients(),
                _multiplied(d_k, turned, self.queries, (self.block, self.depth, n), adds=True),
            )

        body = (
            *self._keys_read(replace(own, head=g * r.extent)),
            *d_k.cleared(self.block, self.depth),
            *d_v.cleared(self.block, self.width),
            *in_order([r], self._by_queries(own, block, step)),
            *self.results(self.held, d_k, self.depth, self._put_rows(1, (b, g), own.key)),
            *self.results(self.held, d_v, self.width, self._put_rows(2, (b, g), own.key)),
        )
        return self.kernel(parallel([group], body), (1, 2), "_keys")

    def _by_queries(self, at: BlockPair, block: Index, step: Callable[[BlockPair], Body]) -> Body:
        """Steps of a block of keys through all queries that see it, from the last one back.

        So counted, blocks are known to be inside.
        """
        n, count = self.others, -(-self.length // self.others)
        if not self.causal:
            var = Var("qb", count)
            return in_order([var], step(replace(at, query=variable(var) * n)))
        count = max(count, self.key_blocks * self.ratio)
        var, own = Var("qb", count), Var("db", self.ratio)
        after = replace(at, query=(constant(count - 1) - variable(var)) * n, is_masked=False)
        same = replace(at, query=at.key + variable(own) * n)
        stop = constant(count - self.ratio) - block * self.ratio
        return (
            *in_order([own], step(same)),
            For(var, Role.SEQUENTIAL, step(after), stop),
        )
