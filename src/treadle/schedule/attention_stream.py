"""Attention by groups of threads: blocks of queries and keys in shared memory, no stored scores.

A group has a block of queries and goes through blocks of keys. For each query it knows the greatest
score so far and the sum of exponentials; when a greater score comes, what was summed is scaled
down (Milakov and Gimelshein, 2018). Gradients recompute probabilities from the stored logarithms of
sums: one kernel for the queries', one for the keys' and values', whose groups have blocks of keys,
and one for a bias. Nothing is added by two groups, so that results have the same bits every time.

Blocks have one size, lengths need not be multiples of it: beyond the end zeros are read and nothing
is stored.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from treadle.ir import composites as c
from treadle.ir.graph import Node
from treadle.ir.graph import Value as TensorValue
from treadle.kernel.index import Index, Var, bounded, constant, divide, flatten, unflatten, variable
from treadle.kernel.nodes import (
    Accumulate,
    Buffer,
    For,
    Guarded,
    Kernel,
    Let,
    Literal,
    Load,
    Position,
    Role,
    Statement,
    Store,
    Value,
    Within,
)
from treadle.kernel.traverse import substituted
from treadle.schedule.lower import Lowering, attributes_of
from treadle.schedule.nests import (
    Body,
    accumulated,
    along,
    apply,
    as_dtype,
    axis_vars,
    compare,
    flat_index,
    in_order,
    parallel,
)
from treadle.schedule.operands import Site, is_read, load_of
from treadle.schedule.softmax import F32, I32, add, choose, equals, finite, local, mul, power, sub
from treadle.schedule.stream_tiles import Numbers, Product, Tile, products
from treadle.schedule.templates import streamed_block

START = Index()
# Below every score: what is scaled down from it is nothing yet, and becomes 0 without a condition.
LEAST = float(np.finfo(np.float32).min)
LOWEST = -3.4e38  # what masked scores are taken for in the maximum, as in the definition


def stream_kernels(lowering: Lowering, position: int, node: Node) -> list[Kernel]:
    made = _Forward if node.op is c.ATTENTION else _Backward
    return made(lowering, position, node).kernels()


@dataclass(frozen=True, slots=True)
class _Block:
    """The blocks at hand: row of the batch, head of queries, first query and first key."""

    batch: Index
    head: Index
    query: Index = START
    key: Index = START


class _Streams:
    """Sizes, operands where they lie, and the memory of one kernel after the other."""

    def __init__(self, lowering: Lowering, position: int, node: Node):
        self.lowering, self.position, self.node = lowering, position, node
        self.site = Site(lowering, position)
        attributes: c.Attention = attributes_of(node)
        self.scale, self.causal = float(attributes.scale), attributes.causal
        self.plain = 3 if node.op is c.ATTENTION else 6
        self.types = [lowering.graph.type_of(x) for x in node.operands]
        q, k, v = (t.shape for t in self.types[self.plain - 3 : self.plain])
        (self.batch, self.heads, self.length, self.depth), (_, self.groups, self.count, _) = q, k
        self.width = v[3]
        self.bias_shape = self.types[self.plain].shape if len(self.types) > self.plain else ()
        self.block = streamed_block(node, self.types, lowering.target)
        mapping = lowering.target.mapping
        assert mapping is not None
        assert self.block, "shared memory has no room for a block"
        self.threads = mapping.threads
        blocks = (-(-n // self.block) for n in (self.length, self.count))
        self.query_blocks, self.key_blocks = blocks
        self.sources = [self._source(i) for i in range(len(node.operands))]
        self.begin()

    def _source(self, operand: int) -> tuple[Value, tuple[Var, ...], dict[str, Buffer]]:
        """An element by its axes, and what it is read from; a copy where it does not lie plain.

        A bias may be computed where it is read.
        """
        value = self.node.operands[operand]
        axes = axis_vars("axis~", self.types[operand].shape)
        reader = self.lowering.reader()
        found = reader.at(value, along(axes))
        is_plain = load_of(self.lowering.reader(), value, axes) is not None
        if is_plain or (operand == self.plain and not reader.lets):
            return found, axes, dict(reader.used)
        name = f"rows{value.node}.{value.output}"
        buffer, kernel = self.site.copied(value, name, axes, axes, f"_rows{operand}")
        self.site.copies.append(kernel)
        return Load(buffer.name, flat_index(axes), buffer.dtype), axes, {buffer.name: buffer}

    # One kernel

    def begin(self) -> None:
        self.reader, self.scratch = self.lowering.reader(), list[Buffer]()

    def tile(self, name: str, width: int, is_transposed: bool = False) -> Tile:
        """A block of rows; transposed, with a gap so that threads read other banks."""
        stride, rows = (self.block + 1, width) if is_transposed else (width, self.block)
        return Tile(self._own(name, rows * stride), stride, is_transposed)

    def scores(self, name: str) -> Tile:
        return Tile(self._own(name, self.block * (self.block + 1)), self.block + 1)

    def numbers(self, name: str) -> Numbers:
        return Numbers(self._own(name, self.block))

    def _own(self, name: str, size: int) -> Buffer:
        self.scratch.append(Buffer(name, F32, size))
        return self.scratch[-1]

    def kernel(
        self, body: Body, results: Sequence[int], suffix: str = "", also: Sequence[Buffer] = ()
    ) -> list[Kernel]:
        """The kernel that makes some results, after copies of operands."""
        made = [TensorValue(self.position, i) for i in results]
        kernel = self.lowering.kernel(self.position, self.reader, made, body, suffix, tuple(also))
        copies, scratch = list(self.site.copies), tuple(self.scratch)
        self.site.copies.clear()
        self.begin()
        return [*copies, replace(kernel, scratch=scratch, is_standalone=True)]

    # Elements, in float32

    def element(self, operand: int, indices: Sequence[Index], other: float = 0.0) -> Value:
        """An element of an operand; another number beyond its end."""
        found, axes, used = self.sources[operand]
        self.reader.used |= used
        pairs = list(zip(axes, indices, strict=True))
        inside = {v: bounded(i, v.extent) for v, i in pairs}
        (named,) = substituted([Let("element", as_dtype(found, F32))], inside)
        assert isinstance(named, Let)
        value = named.value
        for v, i in pairs:
            if i.range[1] >= v.extent:
                value = Guarded(Within(i, 0, v.extent), value, Literal(other, F32), F32)
        return value

    def of_keys(self, at: _Block) -> tuple[Index, Index]:
        """The row of the batch and the head of keys that a head of queries reads."""
        return at.batch, divide(at.head, self.heads // self.groups)[0]

    def copied(self, tile: Tile, operand: int, heads: tuple[Index, Index], first: Index) -> Body:
        """A block of an operand's rows to shared memory."""
        i, d = Var("i", self.block), Var("d", self.types[operand].shape[3])
        value = self.element(operand, [*heads, first + variable(i), variable(d)])
        return parallel([i, d], [tile.store(value, variable(i), variable(d))])

    def score(self, total: Value, at: _Block, query: Index, key: Index) -> Value:
        """A score from the product of a query and a key."""
        found = mul(total, self.scale)
        if not self.bias_shape:
            return found
        every = (at.batch, at.head, at.query + query, at.key + key)
        pairs = zip(every, self.bias_shape, strict=True)
        indices = [i if n > 1 else constant(0) for i, n in pairs]
        return add(found, self.element(self.plain, indices, float("-inf")))

    def seen(
        self, at: _Block, query: Index, key: Index, value: Value, masked: float, beyond: float
    ) -> Value:
        """A value; other numbers for keys that are masked, and where there are none."""
        query, key = at.query + query, at.key + key
        if self.causal:
            is_seen = compare("le", Position(key, I32), Position(query, I32))
            value = choose(is_seen, value, masked)
        if key.range[1] >= self.count:
            value = choose(Within(key, 0, self.count), value, beyond)
        return value

    def _put(
        self, value: TensorValue, indices: Sequence[Index], element: Value, guard: Within | None
    ) -> Store:
        dtype = self.lowering.buffer(value).dtype
        return self.lowering.store(value, indices, as_dtype(element, dtype), guard)

    def through(self, name: str, blocks: int) -> Var:
        """A loop over blocks of queries or keys.

        Causal ones are told by their numbers which of the others they see: it goes on beyond the
        end where the others have more.
        """
        return Var(name, max(self.query_blocks, self.key_blocks) if self.causal else blocks)

    def grid(self, blocks: int, heads: int) -> tuple[Var, tuple[Index, Index, Index]]:
        """Groups of a launch: their row of the batch, head and block."""
        group = Var("group", self.batch * heads * blocks)
        b, h, block = unflatten(variable(group), (self.batch, heads, blocks))
        return group, (b, h, block)

    def pair(self, queries: Tile, keys: Tile, width: int, name: str) -> Product:
        """Products of queries and keys, or of cotangents and values."""
        return Product(name, width, queries.load, lambda d, s: keys.load(s, d))


class _Forward(_Streams):
    def kernels(self) -> list[Kernel]:
        group, (b, h, block) = self.grid(self.query_blocks, self.heads)
        at = _Block(b, h, block * self.block)
        queries, held = self.tile("queries", self.depth), self.scores("scores")
        most = max(self.depth, self.width)
        shared = Tile(self._own("keys", most * (self.block + 1)), self.block + 1, True)
        values = replace(shared, stride=self.width, is_transposed=False)  # after the keys
        out = self.tile("sums", self.width)
        self.shift, self.total, self.factor = map(self.numbers, ("shift", "total", "factor"))
        i = Var("i", self.block)
        first = [
            self.shift.store(Literal(LEAST, F32), variable(i)),
            self.total.store(Literal(0, F32), variable(i)),
        ]
        var = self.through("kb", self.key_blocks)
        inner = replace(at, key=variable(var) * self.block)
        step = (
            *self.copied(shared, 1, self.of_keys(at), inner.key),
            *self._scored(inner, queries, shared, held),
            *self._rescaled(inner, held),
            *self.copied(values, 2, self.of_keys(at), inner.key),
            *self._summed(held, values, out),
        )
        stop = block + 1 if self.causal else None
        body = (
            *self.copied(queries, 0, (b, h), at.query),
            *parallel([i], first),
            *out.cleared(self.block, self.width),
            For(var, Role.SEQUENTIAL, step, stop),
            *self._finished(at, out),
        )
        return self.kernel(parallel([group], body), (0, 1))

    def _scored(self, at: _Block, queries: Tile, keys: Tile, held: Tile) -> Body:
        def store(i: Index, s: Index, sums: Sequence[Value]) -> list[Statement]:
            score = self.seen(at, i, s, self.score(sums[0], at, i, s), LOWEST, float("-inf"))
            return [held.store(score, i, s)]

        pair = self.pair(queries, keys, self.depth, "score")
        return products(self.block, self.block, [pair], store, self.threads)

    def _rescaled(self, at: _Block, held: Tile) -> Body:
        """Probabilities in place of scores, and what sums so far are multiplied by."""
        i, s = Var("i", self.block), Var("s", self.block)
        row, key = variable(i), variable(s)
        greatest: list[Statement] = [
            Let("old", self.shift.load(row)),
            Let("greatest", local("old")),
            *in_order([s], [Accumulate("greatest", "max", held.load(row, key))]),
            Let("shift", finite(local("greatest"))),
            Let("kept", power(local("old"), local("shift"))),
            self.shift.store(local("shift"), row),
            self.factor.store(local("kept"), row),
            self.total.store(mul(self.total.load(row), local("kept")), row),
        ]
        weight = power(held.load(row, key), self.shift.load(row))
        weights = held.store(self.seen(at, row, key, weight, 0.0, 0.0), row, key)
        total = [
            *accumulated("add", F32, [s], [], held.load(row, key), "sum"),
            self.total.store(add(self.total.load(row), local("sum")), row),
        ]
        return (*parallel([i], greatest), *parallel([i, s], [weights]), *parallel([i], total))

    def _summed(self, held: Tile, values: Tile, out: Tile) -> Body:
        def store(i: Index, e: Index, sums: Sequence[Value]) -> list[Statement]:
            return [out.store(add(mul(out.load(i, e), self.factor.load(i)), sums[0]), i, e)]

        product = Product("mixed", self.block, held.load, values.load)
        return products(self.block, self.width, [product], store, self.threads)

    def _finished(self, at: _Block, out: Tile) -> Body:
        i, e = Var("i", self.block), Var("e", self.width)
        query, row, total = at.query + variable(i), variable(i), self.total.load(variable(i))
        guard = Within(query, 0, self.length) if query.range[1] >= self.length else None
        inside = bounded(query, self.length)
        share = apply("div", Literal(1, F32), local("total"))
        if self.bias_shape:  # it may hide all keys from a query
            share = choose(equals(local("total"), 0.0), 0.0, share)
        log = add(apply("log", local("total")), self.shift.load(row))
        rows = (TensorValue(self.position, 0), TensorValue(self.position, 1))
        value = mul(out.load(row, variable(e)), self.factor.load(row))
        indices = (at.batch, at.head, inside)
        return (
            *parallel(
                [i],
                [
                    Let("total", total),
                    self.factor.store(share, row),
                    self._put(rows[1], indices, log, guard),
                ],
            ),
            *parallel([i, e], [self._put(rows[0], (*indices, variable(e)), value, guard)]),
        )


class _Backward(_Streams):
    """Gradients of queries, of keys and values, and of a bias."""

    CT, OUT, LSE, Q, K, V = range(6)

    def kernels(self) -> list[Kernel]:
        found = [*self._row_sums(), *self._of_queries(), *self._of_keys()]
        if self.bias_shape and is_read(self.lowering, TensorValue(self.position, 3)):
            found += self._of_bias()
        return found

    def _row_sums(self) -> list[Kernel]:
        """Σ ct · out of each query."""
        axes = axis_vars("i", (self.batch, self.heads, self.length))
        e = Var("e", self.width)
        self.rows = self.site.memory("row_sums", F32, self.batch * self.heads * self.length)
        ct, out = (self.element(x, along([*axes, e])) for x in (self.CT, self.OUT))
        total = accumulated("add", F32, [e], [], mul(ct, out), "row")
        body = parallel(axes, [*total, Store(self.rows.name, flat_index(axes), local("row"))])
        return self.kernel(body, (), "_row_sums", (self.rows,))

    def _begin(self) -> None:
        """Tiles of a block of queries and of keys, and numbers of each query."""
        self.queries, self.ct = self.tile("queries", self.depth), self.tile("ct", self.width)
        self.keys = self.tile("keys", self.depth, is_transposed=True)
        self.values = self.tile("values", self.width, is_transposed=True)
        self.logs, self.sums = self.numbers("logs"), self.numbers("row_sums")
        self.gradients = self.scores("gradients")

    def _read_queries(self, at: _Block) -> Body:
        """A block of queries with their cotangents, logarithms and row sums."""
        i, heads = Var("i", self.block), (at.batch, at.head)
        query = at.query + variable(i)
        log = finite(local("log"))
        sums = self._row_sum([*heads, query])
        body: list[Statement] = [
            Let("log", self.element(self.LSE, [*heads, query])),
            self.logs.store(log, variable(i)),
            self.sums.store(sums, variable(i)),
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

    def _read_keys(self, at: _Block) -> Body:
        heads = self.of_keys(at)
        return (
            *self.copied(self.keys, self.K, heads, at.key),
            *self.copied(self.values, self.V, heads, at.key),
        )

    def _differentiated(self, at: _Block, weights: Tile | None, scale: float) -> Body:
        """Gradients of the scores of a block, and the probabilities where they are wanted."""

        def store(i: Index, s: Index, sums: Sequence[Value]) -> list[Statement]:
            score, by_value = sums
            weight = power(self.score(score, at, i, s), self.logs.load(i))
            gradient = mul(local("weight"), sub(by_value, self.sums.load(i)))
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
        at, var = _Block(b, h, block * self.block), self.through("kb", self.key_blocks)
        inner = replace(at, key=variable(var) * self.block)
        self._begin()
        d_q = self.tile("sums", self.depth)
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
        at = _Block(b, head, (after + variable(var)) * self.block, block * self.block)
        self._begin()
        weights = self.scores("weights")
        d_k, d_v = self.tile("key_sums", self.depth), self.tile("value_sums", self.width)
        step = (
            *self._read_queries(at),
            *self._differentiated(at, weights, self.scale),
            *self._added(d_v, self.width, weights, self.ct, by_keys=True),
            *self._added(d_k, self.depth, self.gradients, self.queries, by_keys=True),
        )
        stop = constant(var.extent) - block if self.causal else None
        body = (
            *self._read_keys(_Block(b, g * r.extent, key=at.key)),
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
        at = _Block(b, h, query * self.block, key * self.block)
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

    def _bias_result(self, at: _Block, total: Tile, i: Var, s: Var, padded: Buffer | None) -> Body:
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
