"""Gradients of streamed attention by matrices: strips of queries, and strips of keys.

Probabilities are computed once more from the logarithms of sums that the forward pass stored. A
kernel for queries goes through blocks of keys, one for keys and values through blocks of queries;
scores have the rows of what a group keeps, so that a warp needs nothing of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from treadle.ir.graph import Value as TensorValue
from treadle.kernel.index import Index, Var, bounded, constant, variable
from treadle.kernel.nodes import (
    Buffer,
    For,
    Kernel,
    Let,
    Load,
    Role,
    Statement,
    Store,
    Value,
    Within,
)
from treadle.schedule import attention_stream_grad
from treadle.schedule.attention_matrices import Strips, multiplied
from treadle.schedule.attention_stream import BlockPair
from treadle.schedule.nests import Body, accumulated, along, as_dtype, axis_vars, in_order, parallel
from treadle.schedule.softmax import F32, local, mul, power, sub


class Backward(Strips, attention_stream_grad.Backward):
    def _begin_strips(self, rows: int) -> None:
        """Blocks that pass, scores, and the numbers of so many queries."""
        self.first, self.second = (
            self.passing("first", self.depth),
            self.passing("second", self.width),
        )
        self.held, self.weights_of = self.scores_of_strips(8)
        self.logs, self.row_sums = (self.numbers(n, rows) for n in ("logs", "row_sums"))

    def _kept_rows(self, operands: tuple[int, int], heads: tuple[Index, Index], at: Index) -> Body:
        """Rows of two operands to the warps that hold them."""
        first, second = operands
        self.own_first, body = self.kept("own_first", first, heads, at, self.weights_of)
        self.own_second, more = self.kept("own_second", second, heads, at, self.weights_of)
        return (*body, *more)

    def _passing_rows(
        self, operands: tuple[int, int], heads: tuple[Index, Index], at: Index
    ) -> Body:
        return (
            *self.copied(self.first, operands[0], heads, at, self.others),
            *self.copied(self.second, operands[1], heads, at, self.others),
        )

    def _numbers_read(self, at: BlockPair, rows: int) -> Body:
        """Logarithms and row sums of a block of queries; without a bias each sees some key."""
        i, j, heads = Var("i", rows), Var("j", rows), (at.batch, at.head)
        log = self.element(self.LSE, [*heads, at.query + variable(i)])
        sums = self._row_sum([*heads, at.query + variable(j)])
        return (
            *parallel([i], [self.logs.store(log, variable(i))]),
            *parallel([j], [self.row_sums.store(sums, variable(j))]),
        )

    def _probabilities(self, at: BlockPair, strip: Index, by_keys: bool) -> Body:
        """Of a strip of scores, rounded to float16; its rows are queries, or keys."""

        def weigh(row: Index, column: Index, u: int) -> list[Statement]:
            row = strip + row
            query, key = (column, row) if by_keys else (row, column)
            score = self.score(self.held.load(row, column), at, query, key)
            weight = self.seen(at, query, key, power(score, self.logs.load(query)), 0.0, 0.0)
            stored = self.weights_of.store(local(f"weight{u}"), row, column)
            return [Let(f"weight{u}", weight), stored]

        sizes = (self.strip, self.others, self.depth)
        scores = multiplied(self.held, self.own_first, self.first.transposed, sizes, strip)
        return (scores, *self.each(self.others, weigh))

    def _gradients(self, strip: Index, by_keys: bool) -> Body:
        """Of a strip of scores, in the place of their probabilities."""

        def differentiate(row: Index, column: Index, u: int) -> list[Statement]:
            row = strip + row
            query = column if by_keys else row
            apart = sub(self.held.load(row, column), self.row_sums.load(query))
            gradient = mul(mul(self.weights_of.load(row, column), apart), self.scale)
            stored = self.weights_of.store(local(f"gradient{u}"), row, column)
            return [Let(f"gradient{u}", gradient), stored]

        sizes = (self.strip, self.others, self.width)
        products = multiplied(self.held, self.own_second, self.second.transposed, sizes, strip)
        return (products, *self.each(self.others, differentiate))

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
        group, (b, h, block) = self.blocks_in_order(self.query_blocks, self.heads, True)
        at = BlockPair(b, h, block * self.block)
        self._begin_strips(self.block)
        d_q = self.sums("sums", self.depth)
        sizes = (self.strip, self.depth, self.others)

        def step(at: BlockPair) -> Body:
            def onto(strip: Index) -> list[Statement]:
                return [
                    *self._probabilities(at, strip, by_keys=False),
                    *self._gradients(strip, by_keys=False),
                    multiplied(d_q, self.weights_of, self.first, sizes, strip, adds=True),
                ]

            passing = self._passing_rows((self.K, self.V), self.of_keys(at), at.key)
            return (*passing, *self.by_strips(onto))

        body = (
            *self._kept_rows((self.Q, self.CT), (b, h), at.query),
            *self._numbers_read(at, self.block),
            *self.cleared((d_q, self.depth)),
            *self.by_keys(at, block, step),
            *self.results(self.held, d_q, self.depth, self._put_rows(0, (b, h), at.query)),
        )
        return self.kernel(parallel([group], body), (0,), "_queries")

    def _of_keys(self) -> list[Kernel]:
        """All queries of a head that see a block of keys.

        Where several heads of queries read one of keys, each makes its part: few groups that go
        through all of them would leave a device idle.
        """
        group, (b, h, block) = self.blocks_in_order(self.key_blocks, self.heads, False)
        own = BlockPair(b, h, key=block * self.block)
        self._begin_strips(self.others)
        d_k, d_v = self.sums("key_sums", self.depth), self.sums("value_sums", self.width)
        by_width, by_depth = ((self.strip, n, self.others) for n in (self.width, self.depth))

        def step(at: BlockPair) -> Body:
            def onto(strip: Index) -> list[Statement]:
                return [
                    *self._probabilities(at, strip, by_keys=True),
                    multiplied(d_v, self.weights_of, self.second, by_width, strip, adds=True),
                    *self._gradients(strip, by_keys=True),
                    multiplied(d_k, self.weights_of, self.first, by_depth, strip, adds=True),
                ]

            passing = self._passing_rows((self.Q, self.CT), (b, h), at.query)
            return (*passing, *self._numbers_read(at, self.others), *self.by_strips(onto))

        parts = [self._parts(n) for n in (1, 2)] if self.heads > self.groups else []
        if parts:
            stores = [self._put_parts(parts[n - 1], n, (b, h), own.key) for n in (1, 2)]
        else:
            stores = [self._put_rows(n, (b, h), own.key) for n in (1, 2)]
        body = (
            *self._kept_rows((self.K, self.V), self.of_keys(own), own.key),
            *self.cleared((d_k, self.depth), (d_v, self.width)),
            *self._by_queries(own, block, step),
            *self.results(self.held, d_k, self.depth, stores[0]),
            *self.results(self.held, d_v, self.width, stores[1]),
        )
        made = self.kernel(parallel([group], body), () if parts else (1, 2), "_keys", parts)
        return [*made, *(k for n, part in enumerate(parts, 1) for k in self._summed(part, n))]

    def _parts(self, output: int) -> Buffer:
        """Gradients of keys or values, of each head of queries by itself."""
        shape = self.node.types[output].shape
        size = self.batch * self.heads * shape[2] * shape[3]
        return self.site.memory(f"parts{output}", F32, size)

    def _put_parts(
        self, part: Buffer, output: int, heads: tuple[Index, Index], first: Index
    ) -> Callable[[Index, Index, Value], Store]:
        _, _, length, width = self.node.types[output].shape

        def store(row: Index, column: Index, element: Value) -> Store:
            at = first + row
            guard = Within(at, 0, length) if at.range[1] >= length else None
            head = heads[0] * self.heads + heads[1]
            place = (head * length + bounded(at, length)) * width + column
            return Store(part.name, place, element, guard)

        return store

    def _summed(self, part: Buffer, output: int) -> list[Kernel]:
        """The sum over all heads of queries that read a head of keys."""
        value, shape = TensorValue(self.position, output), self.node.types[output].shape
        axes, r = axis_vars("x", shape), Var("r", self.heads // self.groups)
        b, g, row, column = along(axes)
        head = b * self.heads + g * r.extent + variable(r)
        place = (head * shape[2] + row) * shape[3] + column
        self.reader.used[part.name] = part
        total = accumulated("add", F32, [r], [], Load(part.name, place, F32), "whole")
        store = self._put(value, along(axes), local("whole"), None)
        return self.kernel(parallel(axes, [*total, store]), (output,), f"_sum{output}")

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
