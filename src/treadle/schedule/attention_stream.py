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

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from treadle.base.dtypes import DType
from treadle.ir import composites as c
from treadle.ir.graph import Node
from treadle.ir.graph import Value as TensorValue
from treadle.kernel.index import Index, Var, bounded, constant, divide, unflatten, variable
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
from treadle.schedule.operands import Site, load_of
from treadle.schedule.softmax import F32, I32, add, choose, equals, finite, local, mul, power
from treadle.schedule.stream_tiles import Numbers, Product, Tile, products
from treadle.schedule.templates import streamed_block

START = Index()
# Below every score: what is scaled down from it is nothing yet, and becomes 0 without a condition.
LEAST = float(np.finfo(np.float32).min)
LOWEST = -3.4e38  # what masked scores are taken for in the maximum, as in the definition


@dataclass(frozen=True, slots=True)
class BlockPair:
    """The blocks at hand: row of the batch, head of queries, first query and first key."""

    batch: Index
    head: Index
    query: Index = START
    key: Index = START
    is_masked: bool = True  # causal ones, where a query may come before a key


class Streams:
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
        return Tile(self.own(name, rows * stride), stride, is_transposed)

    def sums(self, name: str, width: int) -> Tile:
        """Sums for a block of rows."""
        return self.tile(name, width)

    def scores(self, name: str) -> Tile:
        return Tile(self.own(name, self.block * (self.block + 1)), self.block + 1)

    def weights(self, name: str) -> Tile:
        """Probabilities, or gradients of scores, that rows are multiplied by."""
        return self.scores(name)

    def numbers(self, name: str, rows: int = 0) -> Numbers:
        return Numbers(self.own(name, rows or self.block))

    def own(self, name: str, size: int, dtype: DType = F32) -> Buffer:
        self.scratch.append(Buffer(name, dtype, size))
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

    def element(
        self, operand: int, indices: Sequence[Index], other: float = 0.0, dtype: DType = F32
    ) -> Value:
        """An element of an operand; another number beyond its end."""
        found, axes, used = self.sources[operand]
        self.reader.used |= used
        pairs = list(zip(axes, indices, strict=True))
        inside = {v: bounded(i, v.extent) for v, i in pairs}
        (named,) = substituted([Let("element", as_dtype(found, dtype))], inside)
        assert isinstance(named, Let)
        value = named.value
        for v, i in pairs:
            if i.range[1] >= v.extent:
                value = Guarded(Within(i, 0, v.extent), value, Literal(other, dtype), dtype)
        return value

    def of_keys(self, at: BlockPair) -> tuple[Index, Index]:
        """The row of the batch and the head of keys that a head of queries reads."""
        return at.batch, divide(at.head, self.heads // self.groups)[0]

    def copied(
        self, tile: Tile, operand: int, heads: tuple[Index, Index], first: Index, rows: int = 0
    ) -> Body:
        """A block of an operand's rows to shared memory."""
        i, d = Var("i", rows or self.block), Var("d", self.types[operand].shape[3])
        indices = [*heads, first + variable(i), variable(d)]
        value = self.element(operand, indices, dtype=tile.buffer.dtype)
        return parallel([i, d], [tile.store(value, variable(i), variable(d))])

    def score(self, total: Value, at: BlockPair, query: Index, key: Index) -> Value:
        """A score from the product of a query and a key."""
        found = mul(total, self.scale)
        if not self.bias_shape:
            return found
        every = (at.batch, at.head, at.query + query, at.key + key)
        pairs = zip(every, self.bias_shape, strict=True)
        indices = [i if n > 1 else constant(0) for i, n in pairs]
        return add(found, self.element(self.plain, indices, float("-inf")))

    def seen(
        self, at: BlockPair, query: Index, key: Index, value: Value, masked: float, beyond: float
    ) -> Value:
        """A value; other numbers for keys that are masked, and where there are none."""
        query, key = at.query + query, at.key + key
        if self.causal and at.is_masked:
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


class Forward(Streams):
    def kernels(self) -> list[Kernel]:
        group, (b, h, block) = self.grid(self.query_blocks, self.heads)
        at = BlockPair(b, h, block * self.block)
        queries, held = self.tile("queries", self.depth), self.scores("scores")
        most = max(self.depth, self.width)
        shared = Tile(self.own("keys", most * (self.block + 1)), self.block + 1, True)
        values = replace(shared, stride=self.width, is_transposed=False)  # after the keys
        out = self.sums("sums", self.width)
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

    def _scored(self, at: BlockPair, queries: Tile, keys: Tile, held: Tile) -> Body:
        def store(i: Index, s: Index, sums: Sequence[Value]) -> list[Statement]:
            score = self.seen(at, i, s, self.score(sums[0], at, i, s), LOWEST, float("-inf"))
            return [held.store(score, i, s)]

        pair = self.pair(queries, keys, self.depth, "score")
        return products(self.block, self.block, [pair], store, self.threads)

    def _rescaled(self, at: BlockPair, held: Tile) -> Body:
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

    def _finished(self, at: BlockPair, out: Tile) -> Body:
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
