"""Attention by blocks of queries and keys: the scores of a block at a time, never all of them."""

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
    Matrix,
    Position,
    Role,
    Statement,
    Value,
)
from treadle.schedule.calls import library_attention
from treadle.schedule.keep import ROOTS
from treadle.schedule.lower import Lowering, attributes_of
from treadle.schedule.nests import Body, accumulated, apply, axis_vars, compare, in_order, parallel
from treadle.schedule.operands import Site, plain_load
from treadle.schedule.softmax import (
    F32,
    I32,
    Queries,
    Rows,
    Scores,
    choose,
    finite,
    local,
    log_sum,
    mul,
    power,
    statistics,
    sub,
)
from treadle.schedule.templates import attention_block

# What masked scores are taken for in the maximum, as in the definition.
LOWEST = -3.4e38


@ROOTS(c.ATTENTION, c.ATTENTION_GRAD)
def attention_kernels(lowering: Lowering, position: int, node: Node) -> list[Kernel]:
    if lowering.target.has_attention:
        return library_attention(lowering, position, node)
    made = _Forward if node.op is c.ATTENTION else _Backward
    return made(lowering, position, node).kernels()


class _Attention:
    """Loops over batch, groups of heads, heads of a group and blocks; where operands lie."""

    def __init__(self, lowering: Lowering, position: int, node: Node):
        self.lowering, self.position, self.node = lowering, position, node
        self.reader = lowering.reader()
        self.copies: dict[TensorValue, tuple[Buffer, Kernel]] = {}
        attributes: c.Attention = attributes_of(node)
        self.causal, self.scale = attributes.causal, float(attributes.scale)
        q, k, v = (lowering.graph.type_of(x).shape for x in node.operands[-3:])
        (batch, heads, length, self.depth), (_, groups, self.count, _) = q, k
        self.width = v[3]
        self.block = attention_block(length, self.causal)
        self.key_block = self.block if self.causal else attention_block(self.count)
        self.b, self.g, self.r = Var("b", batch), Var("g", groups), Var("r", heads // groups)
        self.q, self.k = Var("qb", length // self.block), Var("kb", self.count // self.key_block)
        self.i = Var("i", self.block)
        self.head = variable(self.g) * self.r.extent + variable(self.r)
        self.first_query = variable(self.q) * self.block

    def seen(self, unit: int) -> Index | None:
        """How many keys (in units) the queries of this block see; None for all."""
        return (variable(self.q) + 1) * (self.block // unit) if self.causal else None

    def masked(self, key: Index, value: Value, other: float) -> Value:
        """A value where the query of this lane sees a key."""
        if not self.causal:
            return value
        query = Position(self.first_query + variable(self.i), I32)
        can = compare("le", Position(key, I32), query)
        return choose(can, value, other)

    def scores(self, name: str, keys: int) -> Scores:
        """A thread's memory for scores: keys as rows, queries as lanes."""
        buffer = Buffer(name, F32, keys * self.block)
        return Scores(Rows(buffer, Index(), self.block), keys, self.block)

    def queries(self, name: str, width: int) -> Queries:
        return Queries(Buffer(name, F32, width * self.block), self.block, width)

    def per_query(self, name: str) -> Rows:
        """A thread's memory for a number of each query."""
        return Rows(Buffer(name, F32, self.block), Index(), 1)

    # Rows of operands and results

    def of_queries(self, operand: TensorValue) -> Rows:
        return self._rows(operand, self.head).shifted(self.first_query)

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

    def with_copies(self, body: Sequence[Statement], scratch: Sequence[Buffer]) -> list[Kernel]:
        made = [TensorValue(self.position, i) for i in range(len(self.node.types))]
        kernel = self.lowering.kernel(self.position, self.reader, made, body)
        copies = [copy for _, copy in self.copies.values()]
        return [*copies, replace(kernel, scratch=tuple(scratch), is_standalone=True)]


class _Forward(_Attention):
    def kernels(self) -> list[Kernel]:
        q, k, v = self.node.operands
        rows, keys, values = self.of_queries(q), self.of_keys(k), self.of_keys(v)
        queries = self.queries("transposed", self.depth)
        scores, shares = self.scores("scores", self.count), self.per_query("shares")
        first, block = variable(self.k) * self.key_block, self.key_block
        of_keys = keys.shifted(first).matrix(block, self.depth)
        dot = scores.part(first, block).computed(of_keys, queries.matrix)
        out = self.result(0, self.head).shifted(self.first_query)
        body = [
            *queries.copied(rows, self.i),
            For(self.k, Role.SEQUENTIAL, (dot,), self.seen(block)),
            self._softmax(scores, shares),
            *self._mixed(scores, values, out),
            *self._scaled(out, shares),
        ]
        loops = parallel([self.b, self.g, self.r, self.q], body)
        return self.with_copies(loops, (queries.copy, scores.buffer, shares.buffer))

    def _softmax(self, scores: Scores, shares: Rows) -> Statement:
        """Lanes of queries: exponentials in place of scores, and what they are divided by."""
        s, i, weight = Var("s", self.count), self.i, local("weight")
        score = mul(scores.load(s, i), self.scale)
        terms: list[Statement] = [
            Let("weight", self.masked(variable(s), power(score, local("shift")), 0.0)),
            scores.store(weight, s, i),
            Accumulate("total", "add", weight),
        ]
        greatest = self.masked(variable(s), score, LOWEST)
        logs = TensorValue(self.position, 1)
        query = [variable(self.b), self.head, self.first_query + variable(i)]
        body: list[Statement] = [
            *statistics(s, greatest, terms, ("total",), self.seen(1)),
            self.lowering.store(logs, query, log_sum("total", "shift")),
            shares.store(apply("div", Literal(1, F32), local("total")), i),
        ]
        return For(self.i, Role.PARALLEL, tuple(body))

    def _mixed(self, scores: Scores, values: Rows, out: Rows) -> list[Statement]:
        """Values by their weights: the first block of keys, then the others added."""
        found: list[Statement] = []
        block, more = self.key_block, Var("more", self.k.extent - 1)
        for at, adds in ((constant(0), False), (variable(more) + 1, True)):
            of_values = values.shifted(at * block).matrix(block, self.width)
            into = out.matrix(self.block, self.width)
            matmul = scores.part(at * block, block).onto_queries(into, of_values, adds)
            if not adds:
                found.append(matmul)
            elif more.extent:
                seen = self.seen(block)
                stop = None if seen is None else seen - 1
                found.append(For(more, Role.SEQUENTIAL, (matmul,), stop))
        return found

    def _scaled(self, out: Rows, shares: Rows) -> Body:
        """Each row by its share; a row that sees nothing stays 0."""
        e, i = Var("e", self.width), self.i
        value = mul(out.load(i, e), shares.load(i))
        return parallel([i, e], [out.store(value, i, e)])


class _Backward(_Attention):
    """Gradients of one group of heads: for each block of queries, over the keys it sees."""

    def __init__(self, lowering: Lowering, position: int, node: Node):
        super().__init__(lowering, position, node)
        ct, out, self.lse, q, k, v = node.operands
        self.ct, self.out, self.rows = map(self.of_queries, (ct, out, q))
        self.keys, self.values = self.of_keys(k), self.of_keys(v)
        self.d_q = self.result(0, self.head).shifted(self.first_query)
        self.d_k, self.d_v = (self.result(i, variable(self.g)) for i in (1, 2))
        self.queries_t = self.queries("transposed", self.depth)
        self.ct_t = self.queries("transposed_ct", self.width)
        self.p, self.ds = (self.scores(name, self.key_block) for name in ("weights", "scores"))
        self.sums, self.logs = self.per_query("rows"), self.per_query("logs")

    def kernels(self) -> list[Kernel]:
        per_block: list[Statement] = [
            *self.queries_t.copied(self.rows, self.i),
            *self.ct_t.copied(self.ct, self.i),
            self._row_sums(),
            *self.d_q.cleared(Var("z", self.block), Var("e", self.depth)),
            For(self.k, Role.SEQUENTIAL, tuple(self._key_block()), self.seen(self.key_block)),
        ]
        body = [
            *self.d_k.cleared(Var("z", self.count), Var("e", self.depth)),
            *self.d_v.cleared(Var("z", self.count), Var("e", self.width)),
            *in_order([self.r, self.q], per_block),
        ]
        held = (self.p, self.ds, self.sums, self.logs)
        scratch = [self.queries_t.copy, self.ct_t.copy, *(h.buffer for h in held)]
        return self.with_copies(parallel([self.b, self.g], body), scratch)

    def _row_sums(self) -> Statement:
        """Σ ct · out of each query, and its logsumexp, finite."""
        e, i = Var("e", self.width), self.i
        pair = mul(self.ct.load(i, e), self.out.load(i, e))
        indices = (variable(self.b), self.head, self.first_query + variable(i))
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

    def _key_block(self) -> list[Statement]:
        """Scores recomputed, their gradient, and what they add to the gradients of k, v and q."""
        block, keys, first = self.block, self.key_block, variable(self.k) * self.key_block

        def part(rows: Rows, width: int) -> Matrix:
            return rows.shifted(first).matrix(keys, width)

        of_keys, of_values = part(self.keys, self.depth), part(self.values, self.width)
        d_k, d_v = part(self.d_k, self.depth), part(self.d_v, self.width)
        return [
            self.p.computed(of_keys, self.queries_t.matrix),
            self.ds.computed(of_values, self.ct_t.matrix),
            *self._score_gradients(first),
            self.p.onto_keys(d_v, self.ct.matrix(block, self.width)),
            self.ds.onto_keys(d_k, self.rows.matrix(block, self.depth)),
            self.ds.onto_queries(self.d_q.matrix(block, self.depth), of_keys),
        ]

    def _score_gradients(self, first: Index) -> Body:
        """Probabilities in place of scores, and the gradients of scores beside them."""
        s, i, weight = Var("s", self.key_block), self.i, local("weight")
        score = mul(self.p.load(s, i), self.scale)
        change = sub(self.ds.load(s, i), self.sums.load(i))
        probability = power(score, self.logs.load(i))
        body: list[Statement] = [
            Let("weight", self.masked(first + variable(s), probability, 0.0)),
            self.ds.store(mul(mul(weight, change), self.scale), s, i),
            self.p.store(weight, s, i),
        ]
        return parallel([s, i], body)
