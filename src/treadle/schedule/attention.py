"""Attention by blocks of queries and keys: the scores of a block at a time, never all of them.

Scores are computed with keys as rows and queries as columns: what follows (the maximum, the
exponentials, the sums) then runs along lanes of queries, and every product reads keys and values
where they are. Only a block of queries is copied, turned around.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from treadle.base import dtypes
from treadle.ir import composites as c
from treadle.ir.graph import Node
from treadle.ir.graph import Value as TensorValue
from treadle.ir.types import TensorType
from treadle.kernel.index import Index, Var, constant, flatten, variable
from treadle.kernel.nodes import (
    Accumulate,
    Apply,
    Buffer,
    For,
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
    Value,
    Walk,
)
from treadle.schedule.expand import attention_block
from treadle.schedule.inline import Reader
from treadle.schedule.keep import ROOTS
from treadle.schedule.library_attention import library_attention
from treadle.schedule.lower import Lowering, attributes_of
from treadle.schedule.nests import nest
from treadle.schedule.operands import plain_load

F32 = dtypes.float32
# What masked scores are taken for in the maximum, as in the definition.
LOWEST = -3.4e38


@dataclass
class _Heads:
    """The loops over batch, groups of heads, and heads of a group; sizes and blocks."""

    queries: TensorType
    keys: TensorType
    width: int  # of the values
    causal: bool
    scale: float

    def __post_init__(self) -> None:
        batch, heads, self.length, self.depth = self.queries.shape
        self.count = self.keys.shape[2]
        groups = self.keys.shape[1]
        self.b, self.g, self.r = Var("b", batch), Var("g", groups), Var("r", heads // groups)
        self.block = attention_block(self.length, self.causal)
        self.key_block = self.block if self.causal else attention_block(self.count)
        self.q = Var("qb", self.length // self.block)
        self.k = Var("kb", self.count // self.key_block)
        self.i, self.s = Var("i", self.block), Var("s", self.count)

    @property
    def head(self) -> Index:
        return variable(self.g) * self.r.extent + variable(self.r)

    @property
    def first_query(self) -> Index:
        return variable(self.q) * self.block

    def keys_seen(self, unit: int) -> Index | None:
        """How many keys (in units) the queries of this block see; None for all."""
        if not self.causal:
            return None
        return (variable(self.q) + 1) * (self.block // unit)

    def seen(self, key: Index, value: Value, other: float) -> Value:
        """A value where the query of this lane sees a key."""
        if not self.causal:
            return value
        query = Position(self.first_query + variable(self.i), dtypes.int32)
        can = Apply("le", (Position(key, dtypes.int32), query), dtypes.bool_)
        return Apply("where", (can, value, Literal(other, F32)), F32)


@dataclass
class _Rows:
    """An operand (B, heads, positions, width) whose rows lie in memory as they are."""

    buffer: str
    index: Index  # of the first element of a row, in b, head and position variables
    stride: int  # between positions


class _Writer:
    def __init__(self, lowering: Lowering, position: int, node: Node):
        self.lowering, self.position, self.node = lowering, position, node
        self.reader: Reader = lowering.reader()
        self.copies: list[Kernel] = []

    def rows(self, operand: TensorValue, head: Index, b: Var, at: Index) -> _Rows:
        """Where rows of an operand start; it is copied first where they do not lie together."""
        type_ = self.lowering.graph.type_of(operand)
        t, d = Var("t~", type_.shape[2]), Var("d~", type_.shape[3])
        places = (variable(b), head, variable(t), variable(d))
        found = plain_load(self.reader, self.reader.at(operand, places))
        step = None if found is None else found.index.factor_of(d)
        stride = None if found is None else found.index.factor_of(t)
        if found is None or stride is None or (step != 1 and d.extent > 1):
            return self._copied(operand, head, b, at)
        base = Index(
            tuple((a, f) for a, f in found.index.terms if a not in (t, d)), found.index.offset
        )
        return _Rows(found.buffer, base + at * stride, stride)

    def _copied(self, operand: TensorValue, head: Index, b: Var, at: Index) -> _Rows:
        lowering, type_ = self.lowering, self.lowering.graph.type_of(operand)
        self.reader.lets.clear()
        name = f"{lowering.prefix}b{self.position}.rows{operand.node}.{operand.output}"
        if name not in lowering.buffers:
            buffer = lowering.buffers[name] = Buffer(name, F32, type_.size)
            axes = [Var(f"i{i}", n) for i, n in enumerate(type_.shape)]
            reader = lowering.reader()
            element = reader.at(operand, tuple(map(variable, axes)))
            place = flatten([variable(v) for v in axes], type_.shape)
            body = nest(axes, Role.PARALLEL, [*reader.lets, Store(name, place, element)])
            kernel = lowering.kernel(self.position, reader, [], body, "_rows", (buffer,))
            self.copies.append(kernel)
        self.reader.used[name] = lowering.as_type(lowering.buffers[name])
        places = [variable(b), head, at, constant(0)]
        return _Rows(name, flatten(places, type_.shape), type_.shape[3])

    def result(self, output: int, b: Var, head: Index, at: Index) -> _Rows:
        """Where rows of a result start."""
        value = TensorValue(self.position, output)
        shape = self.node.types[output].shape
        place = flatten([variable(b), head, at, constant(0)], shape)
        return _Rows(self.lowering.names[value], place, shape[3])

    def kernel(self, outputs: int, body: Sequence[Statement], scratch: Sequence[Buffer]) -> Kernel:
        made = [TensorValue(self.position, i) for i in range(outputs)]
        kernel = self.lowering.kernel(self.position, self.reader, made, body)
        return replace(kernel, scratch=tuple(scratch), is_whole=True)


def _turned(h: _Heads, rows: _Rows, width: int, into: Buffer) -> Statement:
    """A block of rows with its columns as rows: into[d, i] = rows[i, d]."""
    d = Var("d", width)
    load = Load(rows.buffer, rows.index + variable(h.i) * rows.stride + variable(d), F32)
    store = Store(into.name, variable(d) * h.block + variable(h.i), load)
    return nest([d, h.i], Role.PARALLEL, [store])[0]


def _matrix(rows: _Rows, count: int, width: int) -> Matrix:
    return Matrix(rows.buffer, rows.index, Walk(count, rows.stride), Walk(width))


def _load(buffer: Buffer, index: Index) -> Value:
    return Load(buffer.name, index, F32)


def _mul(a: Value, b: Value) -> Value:
    return Apply("mul", (a, b), F32)


@ROOTS(c.ATTENTION)
def attention_kernels(lowering: Lowering, position: int, node: Node) -> list[Kernel]:
    if lowering.target.has_attention:
        return library_attention(lowering, position, node)
    attributes: c.Attention = attributes_of(node)
    w = _Writer(lowering, position, node)
    q, k, v = node.operands
    types = [lowering.graph.type_of(x) for x in (q, k, v)]
    h = _Heads(types[0], types[1], types[2].shape[3], attributes.causal, attributes.scale)
    block, keys = h.block, h.key_block
    queries = w.rows(q, h.head, h.b, h.first_query)
    of_keys = w.rows(k, variable(h.g), h.b, variable(h.k) * keys)
    turned = Buffer("turned", F32, h.depth * block)
    scores = Buffer("scores", F32, h.count * block)
    shares = Buffer("shares", F32, block)
    rows = variable(h.k) * (keys * block)
    dot = Multiply(
        Matrix(scores.name, rows, Walk(keys, block), Walk(block)),
        _matrix(of_keys, keys, h.depth),
        Matrix(turned.name, Index(), Walk(h.depth, block), Walk(block)),
    )
    out = w.result(0, h.b, h.head, h.first_query)
    body: list[Statement] = [
        _turned(h, queries, h.depth, turned),
        For(h.k, Role.SEQUENTIAL, (dot,), h.keys_seen(keys)),
        _softmax(h, w, scores, shares),
        *_mixed(h, w, scores, out),
        _scaled(h, out, shares),
    ]
    loops = nest([h.b, h.g, h.r, h.q], Role.PARALLEL, body)
    return [*w.copies, w.kernel(2, loops, (turned, scores, shares))]


def _softmax(h: _Heads, w: _Writer, scores: Buffer, shares: Buffer) -> Statement:
    """Lanes of queries: the greatest score, exponentials in place of scores, and their sum."""
    at = variable(h.s) * h.block + variable(h.i)
    score = _mul(_load(scores, at), Literal(h.scale, F32))
    top, total = Local("top", F32), Local("total", F32)
    shift = Local("shift", F32)
    finite = Apply("where", (_is(top, float("-inf")), Literal(0.0, F32), top), F32)
    finite = Apply("where", (_is(top, float("inf")), Literal(0.0, F32), finite), F32)
    power = Apply("exp", (Apply("sub", (score, shift), F32),), F32)
    lse = TensorValue(w.position, 1)
    place = flatten([variable(h.b), h.head, h.first_query + variable(h.i)], w.node.types[1].shape)
    seen = h.keys_seen(1)
    body: list[Statement] = [
        Let("top", Literal(float("-inf"), F32)),
        For(
            h.s,
            Role.SEQUENTIAL,
            (Accumulate("top", "max", h.seen(variable(h.s), score, LOWEST)),),
            seen,
        ),
        Let("shift", finite),
        Let("total", Literal(0, F32)),
        For(
            h.s,
            Role.SEQUENTIAL,
            (
                Let("weight", h.seen(variable(h.s), power, 0.0)),
                Store(scores.name, at, Local("weight", F32)),
                Accumulate("total", "add", Local("weight", F32)),
            ),
            seen,
        ),
        Store(
            w.lowering.names[lse],
            place,
            Apply("add", (Apply("log", (total,), F32), shift), F32),
        ),
        Store(shares.name, variable(h.i), Apply("div", (Literal(1, F32), total), F32)),
    ]
    return For(h.i, Role.PARALLEL, tuple(body))


def _is(value: Value, number: float) -> Value:
    return Apply("eq", (value, Literal(number, F32)), dtypes.bool_)


def _mixed(h: _Heads, w: _Writer, scores: Buffer, out: _Rows) -> list[Statement]:
    """Values by their weights: the first block of keys, then the others added."""
    found: list[Statement] = []
    more = Var("more", h.k.extent - 1)
    for at, adds in ((constant(0), False), (variable(more) + 1, True)):
        values = w.rows(w.node.operands[2], variable(h.g), h.b, at * h.key_block)
        product = Multiply(
            _matrix(out, h.block, h.width),
            Matrix(
                scores.name,
                at * (h.key_block * h.block),
                Walk(h.block),
                Walk(h.key_block, h.block),
            ),
            _matrix(values, h.key_block, h.width),
            adds,
        )
        if not adds:
            found.append(product)
        elif more.extent:
            seen = h.keys_seen(h.key_block)
            stop = None if seen is None else seen - 1
            found.append(For(more, Role.SEQUENTIAL, (product,), stop))
    return found


def _scaled(h: _Heads, out: _Rows, shares: Buffer) -> Statement:
    """Each row by its share; a row that sees nothing stays 0."""
    d = Var("e", h.width)
    place = out.index + variable(h.i) * out.stride + variable(d)
    value = _mul(Load(out.buffer, place, F32), _load(shares, variable(h.i)))
    return nest([h.i, d], Role.PARALLEL, [Store(out.buffer, place, value)])[0]


@ROOTS(c.ATTENTION_GRAD)
def attention_grad_kernels(lowering: Lowering, position: int, node: Node) -> list[Kernel]:
    if lowering.target.has_attention:
        return library_attention(lowering, position, node)
    attributes: c.Attention = attributes_of(node)
    ct, out, lse, q, k, v = node.operands
    types = [lowering.graph.type_of(x) for x in (q, k, v)]
    h = _Heads(types[0], types[1], types[2].shape[3], attributes.causal, attributes.scale)
    return _Backward(_Writer(lowering, position, node), h, (ct, out, lse, q, k, v)).kernels()


class _Backward:
    """Gradients of one group of heads: for each block of queries, over the keys it sees."""

    def __init__(self, w: _Writer, h: _Heads, operands: Sequence[Any]):
        self.w, self.h = w, h
        ct, out, self.lse, q, k, v = operands
        at, keys = h.first_query, variable(h.k) * h.key_block
        self.ct, self.out = w.rows(ct, h.head, h.b, at), w.rows(out, h.head, h.b, at)
        self.q = w.rows(q, h.head, h.b, at)
        self.k, self.v = w.rows(k, variable(h.g), h.b, keys), w.rows(v, variable(h.g), h.b, keys)
        self.d_q = w.result(0, h.b, h.head, at)
        self.d_k = w.result(1, h.b, variable(h.g), keys)
        self.d_v = w.result(2, h.b, variable(h.g), keys)
        size = h.key_block * h.block
        self.turned = Buffer("turned", F32, h.depth * h.block)
        self.turned_ct = Buffer("turned_ct", F32, h.width * h.block)
        self.p, self.ds = Buffer("weights", F32, size), Buffer("scores", F32, size)
        self.rows, self.logs = Buffer("rows", F32, h.block), Buffer("logs", F32, h.block)

    def kernels(self) -> list[Kernel]:
        h, w = self.h, self.w
        per_block: list[Statement] = [
            _turned(h, self.q, h.depth, self.turned),
            _turned(h, self.ct, h.width, self.turned_ct),
            self._row_sums(),
            _cleared(self.d_q, h.block, h.depth),
            For(h.k, Role.SEQUENTIAL, tuple(self._key_block()), h.keys_seen(h.key_block)),
        ]
        blocks = nest([h.r, h.q], Role.SEQUENTIAL, per_block)
        zero_k = w.result(1, h.b, variable(h.g), constant(0))
        zero_v = w.result(2, h.b, variable(h.g), constant(0))
        body = [
            _cleared(zero_k, h.count, h.depth),
            _cleared(zero_v, h.count, h.width),
            *blocks,
        ]
        scratch = (self.turned, self.turned_ct, self.p, self.ds, self.rows, self.logs)
        return [*w.copies, w.kernel(3, nest([h.b, h.g], Role.PARALLEL, body), scratch)]

    def _row_sums(self) -> Statement:
        """Σ ct · out of each query, and its logsumexp, finite."""
        h, w = self.h, self.w
        d = Var("e", h.width)
        pair = [
            Load(r.buffer, r.index + variable(h.i) * r.stride + variable(d), F32)
            for r in (self.ct, self.out)
        ]
        place = (variable(h.b), h.head, h.first_query + variable(h.i))
        log = w.reader.at(self.lse, place)
        lets, w.reader.lets = list(w.reader.lets), []
        known = Local("log", F32)
        finite = Apply("where", (_is(known, float("-inf")), Literal(0.0, F32), known), F32)
        finite = Apply("where", (_is(known, float("inf")), Literal(0.0, F32), finite), F32)
        body: list[Statement] = [
            Let("row", Literal(0, F32)),
            *nest([d], Role.SEQUENTIAL, [Accumulate("row", "add", _mul(pair[0], pair[1]))]),
            Store(self.rows.name, variable(h.i), Local("row", F32)),
            *lets,
            Let("log", log),
            Store(self.logs.name, variable(h.i), finite),
        ]
        return For(h.i, Role.PARALLEL, tuple(body))

    def _key_block(self) -> list[Statement]:
        """Scores again, their gradient, and what they add to the gradients of k, v and q."""
        h, block, keys = self.h, self.h.block, self.h.key_block
        square = [
            Matrix(b.name, Index(), Walk(keys, block), Walk(block)) for b in (self.p, self.ds)
        ]
        across = Matrix(self.ds.name, Index(), Walk(block), Walk(keys, block))
        turned = Matrix(self.turned.name, Index(), Walk(h.depth, block), Walk(block))
        turned_ct = Matrix(self.turned_ct.name, Index(), Walk(h.width, block), Walk(block))
        of_keys, of_values = _matrix(self.k, keys, h.depth), _matrix(self.v, keys, h.width)
        return [
            Multiply(square[0], of_keys, turned),
            Multiply(square[1], of_values, turned_ct),
            *self._scores(),
            Multiply(
                _matrix(self.d_v, keys, h.width), square[0], _matrix(self.ct, block, h.width), True
            ),
            Multiply(
                _matrix(self.d_k, keys, h.depth), square[1], _matrix(self.q, block, h.depth), True
            ),
            Multiply(_matrix(self.d_q, block, h.depth), across, of_keys, True),
        ]

    def _scores(self) -> tuple[Statement, ...]:
        h = self.h
        s = Var("s", h.key_block)
        at = variable(s) * h.block + variable(h.i)
        key = variable(h.k) * h.key_block + variable(s)
        scale = Literal(h.scale, F32)
        score = _mul(_load(self.p, at), scale)
        power = Apply("exp", (Apply("sub", (score, _load(self.logs, variable(h.i))), F32),), F32)
        change = Apply("sub", (_load(self.ds, at), _load(self.rows, variable(h.i))), F32)
        body: list[Statement] = [
            Let("weight", h.seen(key, power, 0.0)),
            Store(self.ds.name, at, _mul(_mul(Local("weight", F32), change), scale)),
            Store(self.p.name, at, Local("weight", F32)),
        ]
        return nest([s, h.i], Role.PARALLEL, body)


def _cleared(rows: _Rows, count: int, width: int) -> Statement:
    t, d = Var("z", count), Var("e", width)
    place = rows.index + variable(t) * rows.stride + variable(d)
    return nest([t, d], Role.PARALLEL, [Store(rows.buffer, place, Literal(0, F32))])[0]
