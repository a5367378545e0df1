"""Gradients of attention by groups of threads, which store no scores either.

Probabilities are computed once more from the logarithms of sums that the forward pass stored. One
kernel has the gradients of queries, one those of keys and values, whose groups have blocks of keys
and go through blocks of queries, and one that of a bias.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from treadle.ir.graph import Value as TensorValue
from treadle.ir.ops.reductions import REDUCE_SUM
from treadle.kernel.bindings import Whole
from treadle.kernel.index import Index, Var, bounded, constant, flatten, unflatten, variable
from treadle.kernel.nodes import (
    Buffer,
    For,
    Guarded,
    Kernel,
    Let,
    Literal,
    Load,
    Role,
    Statement,
    Store,
    Value,
    Within,
)
from treadle.schedule.attention_stream import BlockPair, Streams
from treadle.schedule.nests import (
    Body,
    accumulated,
    along,
    as_dtype,
    axis_vars,
    flat_index,
    in_order,
    parallel,
)
from treadle.schedule.operands import is_read
from treadle.schedule.softmax import F32, add, finite, local, mul, power, sub
from treadle.schedule.stream_tiles import Product, Tile, products


class Backward(Streams):
    """Gradients of queries, of keys and values, and of a bias."""

    CT, OUT, LSE, Q, K, V = range(6)

    def kernels(self) -> list[Kernel]:
        found = [*self._row_sums(), *self._of_queries(), *self._of_keys()]
        if self.bias_shape and is_read(self.lowering, TensorValue(self.position, 3)):
            found += self._of_bias()
        return found

    def _row_sums(self) -> list[Kernel]:
        """Σ ct · out of each query."""
        axes, e = axis_vars("i", (self.batch, self.heads, self.length)), Var("e", self.width)
        shape = (self.batch, self.heads, self.length)
        self.rows = self.lowering.room_inside(self.position, "row_sums", F32, math.prod(shape))
        nodes = enumerate(self.lowering.definition(self.position).nodes)
        is_one = (i for i, n in nodes if n.op is REDUCE_SUM and n.types[0].shape == shape)
        self.lowering.bind_inside(self.position, self.rows, TensorValue(next(is_one)), Whole())
        ct, out = (self.element(x, along([*axes, e])) for x in (self.CT, self.OUT))
        total = accumulated("add", F32, [e], [], mul(ct, out), "row")
        body = parallel(axes, [*total, Store(self.rows.name, flat_index(axes), local("row"))])
        return self.kernel(body, (), "_row_sums", (self.rows,))

    def _begin(self) -> None:
        """Tiles of a block of queries and of keys, and numbers of each query."""
        self.queries, self.ct = self.tile("queries", self.depth), self.tile("ct", self.width)
        self.keys = self.tile("keys", self.depth, is_transposed=True)
        self.values = self.tile("values", self.width, is_transposed=True)
        self.logs, self.row_sums = self.numbers("logs"), self.numbers("row_sums")
        self.gradients = self.weights("gradients")

    def _read_queries(self, at: BlockPair) -> Body:
        """A block of queries with their cotangents, logarithms and row sums."""
        i, heads = Var("i", self.block), (at.batch, at.head)
        query = at.query + variable(i)
        log = finite(local("log"))
        sums = self._row_sum([*heads, query])
        body: list[Statement] = [
            Let("log", self.element(self.LSE, [*heads, query])),
            self.logs.store(log, variable(i)),
            self.row_sums.store(sums, variable(i)),
        ]
        return (
            *self.copied(self.queries, self.Q, heads, at.query),
            *self.copied(self.ct, self.CT, heads, at.query),
            *parallel([i], body),
        )

    def _row_sum(self, indices: Sequence[Index]) -> Value:
        self.reader.used[self.rows.name] = self.rows
        b, h, query = indices
        inside = (b * self.heads + h) * self.length + bounded(query, self.length)
        value: Value = Load(self.rows.name, inside, F32)
        if query.range[1] < self.length:
            return value
        return Guarded(Within(query, 0, self.length), value, Literal(0, F32), F32)

    def _read_keys(self, at: BlockPair) -> Body:
        heads = self.of_keys(at)
        return (
            *self.copied(self.keys, self.K, heads, at.key),
            *self.copied(self.values, self.V, heads, at.key),
        )

    def _differentiated(self, at: BlockPair, weights: Tile | None, scale: float) -> Body:
        """Gradients of the scores of a block, and the probabilities where they are wanted."""

        def store(i: Index, s: Index, sums: Sequence[Value]) -> list[Statement]:
            score, by_value = sums
            weight = power(self.score(score, at, i, s), self.logs.load(i))
            gradient = mul(local("weight"), sub(by_value, self.row_sums.load(i)))
            found: list[Statement] = [
                Let("weight", self.seen(at, i, s, weight, 0.0, 0.0)),
                self.gradients.store(gradient if scale == 1 else mul(gradient, scale), i, s),
            ]
            return found if weights is None else [*found, weights.store(local("weight"), i, s)]

        pairs = [
            self.pair(self.queries, self.keys, self.depth, "score"),
            self.pair(self.ct, self.values, self.width, "value"),
        ]
        return products(self.block, self.block, pairs, store, self.threads)

    def _added(self, into: Tile, width: int, left: Tile, right: Tile, by_keys: bool) -> Body:
        """into ← into + left · right, or leftᵀ · right."""

        def store(i: Index, j: Index, sums: Sequence[Value]) -> list[Statement]:
            return [into.store(add(into.load(i, j), sums[0]), i, j)]

        def of_left(i: Index, k: Index) -> Value:
            return left.load(k, i) if by_keys else left.load(i, k)

        product = Product("sum", self.block, of_left, right.load)
        return products(self.block, width, [product], store, self.threads)

    def _result(self, output: int, heads: Sequence[Index], first: Index, tile: Tile) -> Body:
        """A tile of sums to a result, as far as it reaches."""
        value, (_, _, length, width) = (
            TensorValue(self.position, output),
            self.node.types[output].shape,
        )
        i, d = Var("i", self.block), Var("d", width)
        row = first + variable(i)
        guard = Within(row, 0, length) if row.range[1] >= length else None
        element = as_dtype(tile.load(variable(i), variable(d)), self.lowering.buffer(value).dtype)
        indices = (*heads, bounded(row, length), variable(d))
        return parallel([i, d], [self.lowering.store(value, indices, element, guard)])

    def _of_queries(self) -> list[Kernel]:
        group, (b, h, block) = self.grid(self.query_blocks, self.heads)
        at, var = BlockPair(b, h, block * self.block), self.through("kb", self.key_blocks)
        inner = replace(at, key=variable(var) * self.block)
        self._begin()
        d_q = self.sums("sums", self.depth)
        step = (
            *self._read_keys(inner),
            *self._differentiated(inner, None, self.scale),
            *self._added(d_q, self.depth, self.gradients, self.keys, by_keys=False),
        )
        body = (
            *self._read_queries(at),
            *d_q.cleared(self.block, self.depth),
            For(var, Role.SEQUENTIAL, step, block + 1 if self.causal else None),
            *self._result(0, (b, h), at.query, d_q),
        )
        return self.kernel(parallel([group], body), (0,), "_queries")

    def _of_keys(self) -> list[Kernel]:
        """All queries that see a block of keys, of every head that reads it."""
        group, (b, g, block) = self.grid(self.key_blocks, self.groups)
        r, var = Var("r", self.heads // self.groups), self.through("qb", self.query_blocks)
        head = g * r.extent + variable(r)
        after = block if self.causal else constant(0)  # the first block that sees it
        at = BlockPair(b, head, (after + variable(var)) * self.block, block * self.block)
        self._begin()
        weights = self.weights("weights")
        d_k, d_v = self.sums("key_sums", self.depth), self.sums("value_sums", self.width)
        step = (
            *self._read_queries(at),
            *self._differentiated(at, weights, self.scale),
            *self._added(d_v, self.width, weights, self.ct, by_keys=True),
            *self._added(d_k, self.depth, self.gradients, self.queries, by_keys=True),
        )
        stop = constant(var.extent) - block if self.causal else None
        body = (
            *self._read_keys(BlockPair(b, g * r.extent, key=at.key)),
            *d_k.cleared(self.block, self.depth),
            *d_v.cleared(self.block, self.width),
            *in_order([r], [For(var, Role.SEQUENTIAL, step, stop)]),
            *self._result(1, (b, g), at.key, d_k),
            *self._result(2, (b, g), at.key, d_v),
        )
        return self.kernel(parallel([group], body), (1, 2), "_keys")

    def _of_bias(self) -> list[Kernel]:
        """Gradients of scores summed to the shape of the bias.

        Every group has some of its elements, and goes through whatever the bias is the same for.
        """
        sizes = (self.batch, self.heads, self.query_blocks, self.key_blocks)
        own = [n if m > 1 else 1 for n, m in zip(sizes, self.bias_shape, strict=True)]
        group = Var("group", own[0] * own[1] * own[2] * own[3])
        inner = [Var(f"all{i}", n // m) for i, (n, m) in enumerate(zip(sizes, own, strict=True))]
        b, h, query, key = (
            mine + variable(more)
            for mine, more in zip(unflatten(variable(group), own), inner, strict=True)
        )
        at = BlockPair(b, h, query * self.block, key * self.block)
        self._begin()
        total = self.scores("sums")
        i, s = Var("i", self.block), Var("s", self.block)
        row, column = variable(i), variable(s)
        added = total.store(
            add(total.load(row, column), self.gradients.load(row, column)), row, column
        )
        step = (
            *self._read_queries(at),
            *self._read_keys(at),
            *self._differentiated(at, None, 1.0),
            *parallel([i, s], [added]),
        )
        loops = [v for v in inner if v.extent > 1]
        padded = self._padded()
        body = (
            *total.cleared(self.block, self.block),
            *in_order(loops, step),
            *self._bias_result(at, total, i, s, padded),
        )
        if padded is None:
            return self.kernel(parallel([group], body), (3,), "_bias")
        made = self.kernel(parallel([group], body), (), "_bias", (padded,))
        axes = axis_vars("x", self.bias_shape)
        self.reader.used[padded.name] = padded
        element = Load(padded.name, self._in_padded(along(axes)), F32)
        store = self._put(TensorValue(self.position, 3), along(axes), element, None)
        return [*made, *self.kernel(parallel(axes, [store]), (3,), "_bias_moved")]

    def _padded_shape(self) -> tuple[int, int, int, int]:
        batch, heads, length, count = self.bias_shape
        return (
            batch,
            heads,
            self.query_blocks * self.block if length > 1 else 1,
            self.key_blocks * self.block if count > 1 else 1,
        )

    def _padded(self) -> Buffer | None:
        """Memory for whole blocks of the bias, where neither its rows nor its columns end with one:
        a store has one guard."""
        shape = self._padded_shape()
        if any(n == m for n, m in zip(shape[2:], self.bias_shape[2:], strict=True)):
            return None
        return self.site.memory("bias_blocks", F32, math.prod(shape))

    def _in_padded(self, indices: Sequence[Index]) -> Index:
        return flatten(indices, self._padded_shape())

    def _bias_result(
        self, at: BlockPair, total: Tile, i: Var, s: Var, padded: Buffer | None
    ) -> Body:
        """Elements of the bias, summed along the axes that it has not."""
        axes = list(zip((i, s), self.bias_shape[2:], strict=True))
        apart, summed = ([v for v, n in axes if (n > 1) is has] for has in (True, False))
        element = total.load(variable(i), variable(s))
        sums = accumulated("add", F32, summed, [], element, "whole") if summed else ()
        found = local("whole") if summed else element
        places = (at.batch, at.head, at.query + variable(i), at.key + variable(s))
        pairs = [(x, n) if n > 1 else (constant(0), 1) for x, n in zip(places, self.bias_shape)]
        if padded is not None:
            whole = self._in_padded([x for x, _ in pairs])
            return parallel(apart, [*sums, Store(padded.name, whole, found)])
        indices = [bounded(x, n) for x, n in pairs]
        guards = [Within(x, 0, n) for x, n in pairs if x.range[1] >= n]
        value, guard = TensorValue(self.position, 3), guards[0] if guards else None
        return parallel(apart, [*sums, self._put(value, indices, found, guard)])
