"""Attention by blocks of queries and keys: the scores of a block at a time, never all of them.

A bias is read along the axes that it has and added to a block's scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from treadle.ir import composites as c
from treadle.ir.graph import Node
from treadle.ir.graph import Value as TensorValue
from treadle.kernel.index import Index, Var, constant, flatten, variable
from treadle.kernel.nodes import (
    Accumulate,
    Buffer,
    For,
    Kernel,
    Let,
    Literal,
    Load,
    Matrix,
    Role,
    Statement,
    Store,
)
from treadle.schedule import (
    attention_matrices,
    attention_matrices_grad,
    attention_stream,
    attention_stream_grad,
    softmax,
)
from treadle.schedule.attention_blocks import Keys, Queries, queries_of
from treadle.schedule.calls import library_attention
from treadle.schedule.keep import ROOTS
from treadle.schedule.lower import Lowering, attributes_of
from treadle.schedule.nests import (
    Body,
    Buffers,
    accumulated,
    apply,
    axis_vars,
    in_order,
    parallel,
)
from treadle.schedule.operands import Site, is_read, plain_load
from treadle.schedule.softmax import (
    F32,
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
from treadle.schedule.templates import is_by_matrices, is_of_library

# What masked scores are taken for in the maximum, as in the definition.
LOWEST = -3.4e38


@ROOTS(c.ATTENTION, c.ATTENTION_GRAD)
def attention_kernels(lowering: Lowering, position: int, node: Node) -> list[Kernel]:
    if is_of_library(lowering.graph, node, lowering.target):
        return library_attention(lowering, position, node)
    if lowering.target.rewriting.least_scores:
        types = tuple(map(lowering.graph.type_of, node.operands))
        made = _STREAMS[is_by_matrices(node, types, lowering.target), node.op is c.ATTENTION]
        return made(lowering, position, node).kernels()
    blocks = _Forward if node.op is c.ATTENTION else _Backward
    return blocks(lowering, position, node).kernels()


Streamed = attention_stream.Forward | attention_stream_grad.Backward
# By whether warps multiply matrices, and whether it is the forward pass.
_STREAMS: dict[tuple[bool, bool], type[Streamed]] = {
    (False, True): attention_stream.Forward,
    (False, False): attention_stream_grad.Backward,
    (True, True): attention_matrices.Forward,
    (True, False): attention_matrices_grad.Backward,
}


class _Attention:
    """Loops over batch, groups of heads, heads of a group and blocks; where operands lie."""

    def __init__(self, lowering: Lowering, position: int, node: Node):
        self.lowering, self.position, self.node = lowering, position, node
        self.reader = lowering.reader()
        self.copies: dict[TensorValue, tuple[Buffer, Kernel]] = {}
        attributes: c.Attention = attributes_of(node)
        self.scale = float(attributes.scale)
        plain = 3 if node.op is c.ATTENTION else 6
        self.operands, biases = node.operands[:plain], node.operands[plain:]
        self.bias = biases[0] if biases else None
        self.bias_shape = lowering.graph.type_of(biases[0]).shape if biases else ()
        q, k, v = (lowering.graph.type_of(x).shape for x in self.operands[-3:])
        (batch, heads, length, self.depth), (_, groups, self.count, _) = q, k
        self.width = v[3]
        limits = lowering.target.rewriting
        self.queries = queries_of(length, self.count, attributes.causal, limits)
        self.block = max(queries.blocks.size for queries in self.queries)
        self.b, self.g, self.r = Var("b", batch), Var("g", groups), Var("r", heads // groups)
        self.head = variable(self.g) * self.r.extent + variable(self.r)

    # A thread's memory, for blocks of any size

    def scores(self, name: str, keys: int) -> Buffer:
        return Buffer(name, F32, keys * self.block)

    def transposed(self, name: str, width: int) -> Buffer:
        return Buffer(name, F32, width * self.block)

    def per_query(self, name: str) -> Rows:
        """A number of each query."""
        return Rows(Buffer(name, F32, self.block), Index(), 1)

    def scored(
        self, queries: Queries, keys: Keys, scores: Scores, matrices: tuple[Matrix, Matrix]
    ) -> list[Statement]:
        """The scores of a block of keys: products of keys and scaled queries, added to the bias."""
        if self.bias is None:
            return [scores.computed(*matrices)]
        s, i = Var("s", keys.blocks.size), queries.lane
        at = self.of_bias(queries.first + variable(i), keys.first + variable(s))
        value = self.reader.at(self.bias, at)
        lets, self.reader.lets = list(self.reader.lets), []
        has_both = min(self.bias_shape[2:]) > 1  # its keys are contiguous
        loops = parallel([i, s] if has_both else [s, i], [*lets, scores.store(value, s, i)])
        return [*loops, scores.computed(*matrices, adds=True)]

    def of_bias(self, query: Index, key: Index) -> tuple[Index, ...]:
        """Indices along the axes that the bias has."""
        every = variable(self.b), self.head, query, key
        pairs = zip(every, self.bias_shape, strict=True)
        return tuple(i if n > 1 else constant(0) for i, n in pairs)

    # Rows of operands and results

    def of_queries(self, operand: TensorValue) -> Rows:
        return self._rows(operand, self.head)

    def of_keys(self, operand: TensorValue) -> Rows:
        return self._rows(operand, variable(self.g))

    def _rows(self, operand: TensorValue, head: Index) -> Rows:
        """The rows of a head; the operand is copied first where rows are not contiguous."""
        shape = self.lowering.graph.type_of(operand).shape
        t, d = Var("t~", shape[2]), Var("d~", shape[3])
        indices = (variable(self.b), head, variable(t), variable(d))
        found = plain_load(self.reader, self.reader.at(operand, indices))
        step, stride = (None if found is None else found.index.factor_of(v) for v in (d, t))
        if found is None or stride is None or (step != 1 and d.extent > 1):
            return self._in_order(self._copied(operand), shape, head)
        terms = tuple((a, f) for a, f in found.index.terms if a not in (t, d))
        buffer = self.lowering.buffers[found.buffer]
        return Rows(buffer, Index(terms, found.index.offset), stride)

    def _copied(self, operand: TensorValue) -> Buffer:
        lowering, name = self.lowering, f"rows{operand.node}.{operand.output}"
        self.reader.lets.clear()
        if operand not in self.copies:  # which another operand may be too
            axes = axis_vars("i", lowering.graph.type_of(operand).shape)
            site = Site(lowering, self.position)
            self.copies[operand] = site.copied(operand, name, axes, axes, "_rows")
        buffer = self.copies[operand][0]
        self.reader.used[buffer.name] = buffer
        return buffer

    def result(self, output: int, head: Index) -> Rows:
        value = TensorValue(self.position, output)
        return self._in_order(self.lowering.buffer(value), self.node.types[output].shape, head)

    def _in_order(self, buffer: Buffer, shape: Sequence[int], head: Index) -> Rows:
        indices = [variable(self.b), head, constant(0), constant(0)]
        return Rows(buffer, flatten(indices, shape), shape[3])

    def with_copies(
        self, body: Sequence[Statement], scratch: Sequence[Buffer], results: int, also: Buffers = ()
    ) -> list[Kernel]:
        """The kernel that makes the first results, after copies of operands."""
        made = [TensorValue(self.position, i) for i in range(results)]
        kernel = self.lowering.kernel(self.position, self.reader, made, body, "", also)
        copies = [copy for _, copy in self.copies.values()]
        return [*copies, replace(kernel, scratch=tuple(scratch), is_standalone=True)]


class _Forward(_Attention):
    def __init__(self, lowering: Lowering, position: int, node: Node):
        super().__init__(lowering, position, node)
        q, k, v = self.operands
        self.rows, self.keys, self.values = self.of_queries(q), self.of_keys(k), self.of_keys(v)
        self.copy = self.transposed("transposed", self.depth)
        self.held, self.shares = self.scores("scores", self.count), self.per_query("shares")
        self.out = self.result(0, self.head)

    def kernels(self) -> list[Kernel]:
        outer, scratch = [self.b, self.g, self.r], (self.copy, self.held, self.shares.buffer)
        if len(self.queries) == 1:
            (only,) = self.queries
            return self.with_copies(parallel([*outer, only.var], self._block(only)), scratch, 2)
        body = [s for q in self.queries for s in in_order([q.var], self._block(q))]
        return self.with_copies(parallel(outer, body), scratch, 2)

    def _block(self, queries: Queries) -> list[Statement]:
        """A block of queries, with all keys that it sees."""
        size = queries.blocks.size
        copy = softmax.Queries(self.copy, size, self.depth)
        scores = Scores(Rows(self.held, Index(), size), queries.count, size)
        out = self.out.shifted(queries.first)
        rows = self.rows.shifted(queries.first)
        found: list[Statement] = [*copy.copied(rows, queries.lane, self.scale)]
        for keys in queries.keys:
            count = keys.blocks.size
            of_keys = self.keys.shifted(keys.first).matrix(count, self.depth)
            part = scores.part(keys.first, count)
            found += keys.each(self.scored(queries, keys, part, (of_keys, copy.matrix)))
        found.append(self._softmax(queries, scores))
        return [*found, *self._mixed(queries, scores, out), *self._scaled(queries, out)]

    def _softmax(self, queries: Queries, scores: Scores) -> Statement:
        """Lanes of queries: exponentials in place of scores, and what they are divided by."""
        s, i, weight = Var("s", queries.count), queries.lane, local("weight")
        score, total = scores.load(s, i), apply("div", Literal(1, F32), local("total"))
        if self.bias is not None:  # it may hide all keys from a query
            total = choose(equals(local("total"), 0.0), 0.0, total)
        terms: list[Statement] = [
            Let("weight", queries.masked(variable(s), power(score, local("shift")), 0.0)),
            scores.store(weight, s, i),
            Accumulate("total", "add", weight),
        ]
        greatest = queries.masked(variable(s), score, LOWEST)
        logs = TensorValue(self.position, 1)
        query = [variable(self.b), self.head, queries.first + variable(i)]
        body: list[Statement] = [
            *statistics(s, greatest, terms, ("total",), queries.seen),
            self.lowering.store(logs, query, log_sum("total", "shift")),
            self.shares.store(total, i),
        ]
        return For(i, Role.PARALLEL, tuple(body))

    def _mixed(self, queries: Queries, scores: Scores, out: Rows) -> list[Statement]:
        """Values by their weights: the first block of keys, then the others added."""
        found: list[Statement] = []
        into = out.matrix(queries.blocks.size, self.width)

        def matmul(first: Index, count: int, adds: bool) -> Statement:
            of_values = self.values.shifted(first).matrix(count, self.width)
            return scores.part(first, count).onto_queries(into, of_values, adds)

        for keys in queries.keys:
            blocks, adds = keys.blocks, bool(found)
            if not adds:
                found.append(matmul(constant(blocks.first), blocks.size, False))
            more = Var("more", blocks.count - (not adds))
            first = (variable(more) + (not adds)) * blocks.size + blocks.first
            stop = None if keys.seen is None else keys.seen - (not adds)
            body = (matmul(first, blocks.size, True),)
            if more.extent and stop is None:
                found += in_order([more], body)
            elif more.extent:
                found.append(For(more, Role.SEQUENTIAL, body, stop))
        return found

    def _scaled(self, queries: Queries, out: Rows) -> Body:
        """Each row by its share; a row that sees nothing stays 0."""
        e, i = Var("e", self.width), queries.lane
        value = mul(out.load(i, e), self.shares.load(i))
        return parallel([i, e], [out.store(value, i, e)])


class _Backward(_Attention):
    """Gradients of one group of heads: for each block of queries, over the keys it sees."""

    def __init__(self, lowering: Lowering, position: int, node: Node):
        super().__init__(lowering, position, node)
        ct, out, self.lse, q, k, v = self.operands
        self.ct, self.out, self.rows = map(self.of_queries, (ct, out, q))
        self.keys, self.values = self.of_keys(k), self.of_keys(v)
        self.d_q = self.result(0, self.head)
        self.d_k, self.d_v = (self.result(i, variable(self.g)) for i in (1, 2))
        most = max(keys.blocks.size for queries in self.queries for keys in queries.keys)
        self.queries_t = self.transposed("transposed", self.depth)
        self.ct_t = self.transposed("transposed_ct", self.width)
        self.p, self.ds = (self.scores(name, most) for name in ("weights", "scores"))
        self.sums, self.logs = self.per_query("rows"), self.per_query("logs")
        is_wanted = self.bias is not None and is_read(lowering, TensorValue(position, 3))
        self.d_bias = _BiasGradient(self) if is_wanted else None

    def kernels(self) -> list[Kernel]:
        blocks = [s for q in self.queries for s in in_order([q.var], self._block(q))]
        body: Body = (
            *self.d_k.cleared(Var("z", self.count), Var("e", self.depth)),
            *self.d_v.cleared(Var("z", self.count), Var("e", self.width)),
            *in_order([self.r], blocks),
        )
        scratch = (self.queries_t, self.ct_t, self.p, self.ds, self.sums.buffer, self.logs.buffer)
        if self.d_bias is None:
            return self.with_copies(parallel([self.b, self.g], body), scratch, 3)
        loops, also = self.d_bias.around(body), (self.d_bias.buffer,)
        return [*self.with_copies(loops, scratch, 3, also), *self.d_bias.finish()]

    def _block(self, queries: Queries) -> list[Statement]:
        size, first = queries.blocks.size, queries.first
        rows, ct, d_q = (r.shifted(first) for r in (self.rows, self.ct, self.d_q))
        return [
            *softmax.Queries(self.queries_t, size, self.depth).copied(
                rows, queries.lane, self.scale
            ),
            *softmax.Queries(self.ct_t, size, self.width).copied(ct, queries.lane),
            self._row_sums(queries),
            *d_q.cleared(Var("z", size), Var("e", self.depth)),
            *(s for keys in queries.keys for s in keys.each(self._key_block(queries, keys))),
        ]

    def _row_sums(self, queries: Queries) -> Statement:
        """Σ ct · out of each query, and its logsumexp, finite."""
        e, i = Var("e", self.width), queries.lane
        ct, out = (r.shifted(queries.first) for r in (self.ct, self.out))
        pair = mul(ct.load(i, e), out.load(i, e))
        indices = (variable(self.b), self.head, queries.first + variable(i))
        log = self.reader.at(self.lse, indices)
        lets, self.reader.lets = list(self.reader.lets), []
        body: list[Statement] = [
            *accumulated("add", F32, [e], [], pair, "row"),
            self.sums.store(local("row"), i),
            *lets,
            Let("log", log),
            self.logs.store(finite(local("log")), i),
        ]
        return For(i, Role.PARALLEL, tuple(body))

    def _key_block(self, queries: Queries, keys: Keys) -> list[Statement]:
        """Scores recomputed, their gradient, and what they add to the gradients of k, v and q."""
        size, count = queries.blocks.size, keys.blocks.size
        queries_t = softmax.Queries(self.queries_t, size, self.depth)
        ct_t = softmax.Queries(self.ct_t, size, self.width)
        p, ds = (Scores(Rows(held, Index(), size), count, size) for held in (self.p, self.ds))

        def of_block(rows: Rows, width: int) -> Matrix:
            return rows.shifted(queries.first).matrix(size, width)

        def of_keys(rows: Rows, width: int) -> Matrix:
            return rows.shifted(keys.first).matrix(count, width)

        rows, values = of_keys(self.keys, self.depth), of_keys(self.values, self.width)
        return [
            *self.scored(queries, keys, p, (rows, queries_t.matrix)),
            ds.computed(values, ct_t.matrix),
            *self._score_gradients(queries, keys, p, ds),
            p.onto_keys(of_keys(self.d_v, self.width), of_block(self.ct, self.width)),
            ds.onto_keys(of_keys(self.d_k, self.depth), of_block(self.rows, self.depth)),
            ds.onto_queries(of_block(self.d_q, self.depth), rows),
        ]

    def _score_gradients(self, queries: Queries, keys: Keys, p: Scores, ds: Scores) -> Body:
        """Probabilities in place of scores, and the gradients of scores beside them."""
        s, i, weight = Var("s", keys.blocks.size), queries.lane, local("weight")
        key = keys.first + variable(s)
        gradient = mul(weight, sub(ds.load(s, i), self.sums.load(i)))
        is_summed = self.d_bias is not None  # before it is scaled
        body: list[Statement] = [
            Let("weight", queries.masked(key, power(p.load(s, i), self.logs.load(i)), 0.0)),
            ds.store(gradient if is_summed else mul(gradient, self.scale), s, i),
            p.store(weight, s, i),
        ]
        if self.d_bias is None:
            return parallel([s, i], body)
        scaled = ds.store(mul(ds.load(s, i), self.scale), s, i)
        summed = self.d_bias.added(queries, keys, ds)
        return (*parallel([s, i], body), *summed, *parallel([s, i], [scaled]))


class _BiasGradient:
    """Gradients of scores summed to the shape of the bias: where, and in which loops.

    Iterations that run side by side have elements of their own. Where neither rows of the batch
    nor heads do, each row of the batch has a part, and parts are added up at the end.
    """

    def __init__(self, attention: _Attention):
        assert attention.bias is not None
        self.of, lowering = attention, attention.lowering
        self.value = TensorValue(attention.position, 3)
        self.shape = attention.bias_shape
        self.has_batch = self.shape[0] == attention.b.extent
        self.has_heads = self.shape[1] == attention.g.extent * attention.r.extent
        self.has_parts = not (self.has_batch or self.has_heads)
        self.site, self.buffer = Site(lowering, attention.position), lowering.buffer(self.value)
        if self.has_parts:
            size = attention.b.extent * self.buffer.size
            self.buffer = self.site.memory("bias_parts", F32, size)

    def around(self, body: Sequence[Statement]) -> Body:
        """Loops over batch and groups; what side by side iterations own is cleared first."""
        b, g = self.of.b, self.of.g
        apart = [
            *([b] if self.has_batch or self.has_parts else []),
            *([g] if self.has_heads else []),
        ]
        others = [v for v in (b, g) if v not in apart]
        return parallel(apart, [*self._cleared(), *in_order(others, body)])

    def _cleared(self) -> Body:
        r = replace(self.of.r, extent=self.of.r.extent if self.has_heads else 1)
        t, s = Var("t", self.shape[2]), Var("s", self.shape[3])
        zero = Store(self.buffer.name, self._at(variable(t), variable(s)), Literal(0, F32))
        return parallel([r, t, s], [zero])

    def _at(self, query: Index, key: Index) -> Index:
        own = self.of.lowering.address(self.value, self.of.of_bias(query, key))
        size = self.buffer.size // self.of.b.extent
        return own + variable(self.of.b) * size if self.has_parts else own

    def added(self, queries: Queries, keys: Keys, gradients: Scores) -> Body:
        """The gradients of a block's scores onto those of their elements of the bias."""
        s, i = Var("s", keys.blocks.size), queries.lane
        axes = ((i, self.shape[2]), (s, self.shape[3]))
        own, summed = ([v for v, n in axes if (n > 1) is has] for has in (True, False))
        at, name = self._at(queries.first + variable(i), keys.first + variable(s)), self.buffer.name
        total = accumulated("add", F32, summed, [], gradients.load(s, i))
        return parallel(own, [*total, Store(name, at, add(Load(name, at, F32), local("acc")))])

    def finish(self) -> list[Kernel]:
        if not self.has_parts:
            return []
        axes = axis_vars("x", self.shape)
        return [self.site.moved(self.buffer, axes, axes, output=3)]
