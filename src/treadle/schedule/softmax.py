"""Softmax by blocks of scores: what attention, its gradient and the cross-entropy head share.

The scores of some keys for some queries are one matmul; classes are the keys of tokens. A row's
greatest score and its sum of exponentials are its statistics. Probabilities, or the gradients of
scores that take their place, are then multiplied by rows of keys onto queries, and by rows of
queries onto keys. On processors scores lie with keys as rows: statistics run along lanes of
queries, and every matmul reads keys where they are. Only a block of queries is copied, transposed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from treadle.base import dtypes
from treadle.kernel.index import Index, Var, variable
from treadle.kernel.nodes import (
    Accumulate,
    Buffer,
    For,
    Let,
    Literal,
    Load,
    Local,
    Matmul,
    Matrix,
    Role,
    Statement,
    Store,
    StridedAxis,
    Value,
)
from treadle.schedule.nests import Body, apply, compare, in_order, parallel
from treadle.schedule.operands import transposed

F32, I32 = dtypes.float32, dtypes.int32
At = Index | Var
NOWHERE = Index()


def index_of(at: At) -> Index:
    return variable(at) if isinstance(at, Var) else at


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of contiguous elements: where the first starts, and elements between rows."""

    buffer: Buffer
    index: Index
    stride: int

    def at(self, row: At, column: At = NOWHERE) -> Index:
        return self.index + index_of(row) * self.stride + index_of(column)

    def load(self, row: At, column: At = NOWHERE) -> Value:
        return Load(self.buffer.name, self.at(row, column), self.buffer.dtype)

    def store(self, value: Value, row: At, column: At = NOWHERE) -> Store:
        return Store(self.buffer.name, self.at(row, column), value)

    def shifted(self, row: Index) -> Rows:
        """The rows from one of them on."""
        return replace(self, index=self.at(row))

    def matrix(self, count: int, width: int, column: Index = NOWHERE) -> Matrix:
        walks = StridedAxis(count, self.stride), StridedAxis(width)
        return Matrix(self.buffer.name, self.index + column, *walks)

    def cleared(self, row: Var, column: Var, first: Index = NOWHERE) -> Body:
        """Zeros in some columns of some rows."""
        zero = self.store(Literal(0, F32), row, first + variable(column))
        return parallel([row, column], [zero])


@dataclass(frozen=True, slots=True)
class Queries:
    """A block of queries copied with its elements as rows, so that queries are lanes."""

    copy: Buffer
    count: int
    width: int

    def copied(self, rows: Rows, lane: Var, scale: float = 1.0) -> Body:
        """copy[d, i] = rows[i, d] · scale."""
        d = Var("d", self.width)
        address = variable(d) * self.count + variable(lane)
        element = rows.load(lane, d)
        scaled = element if scale == 1 else mul(element, scale)
        store = Store(self.copy.name, address, scaled)
        return parallel([d, lane], [store])

    @property
    def matrix(self) -> Matrix:
        """Queries as rows, whose elements are strided."""
        walks = StridedAxis(self.count), StridedAxis(self.width, self.count)
        return Matrix(self.copy.name, Index(), *walks)


@dataclass(frozen=True, slots=True)
class Scores:
    """Scores, probabilities or gradients of scores: of each key for each query."""

    rows: Rows
    keys: int
    queries: int
    keys_are_rows: bool = True  # and queries contiguous; else the other way around

    @property
    def buffer(self) -> Buffer:
        return self.rows.buffer

    def load(self, key: At, query: At) -> Value:
        return self.rows.load(key, query) if self.keys_are_rows else self.rows.load(query, key)

    def store(self, value: Value, key: At, query: At) -> Store:
        at = (key, query) if self.keys_are_rows else (query, key)
        return self.rows.store(value, *at)

    def part(self, first: Index, count: int) -> Scores:
        """Those of some keys, which are rows."""
        return replace(self, rows=self.rows.shifted(first), keys=count)

    @property
    def by_keys(self) -> Matrix:
        """Keys down and queries across, wherever they lie."""
        if self.keys_are_rows:
            return self.rows.matrix(self.keys, self.queries)
        return transposed(self.rows.matrix(self.queries, self.keys))

    # Matmuls: `keys` and `queries` are matrices of rows

    def computed(self, keys: Matrix, queries: Matrix, adds: bool = False) -> Matmul:
        """scores ← keys · queriesᵀ."""
        if self.keys_are_rows:
            return Matmul(self.by_keys, keys, transposed(queries), adds)
        return Matmul(transposed(self.by_keys), queries, transposed(keys), adds)

    def onto_queries(self, target: Matrix, keys: Matrix, adds: bool = True) -> Matmul:
        """target ← scoresᵀ · keys: values by their weights, or the gradient of queries."""
        return Matmul(target, transposed(self.by_keys), keys, adds)

    def onto_keys(self, target: Matrix, queries: Matrix, adds: bool = True) -> Matmul:
        """target ← scores · queries: the gradient of keys or of values."""
        return Matmul(target, self.by_keys, queries, adds)


def statistics(
    key: Var,
    score: Value,
    terms: Sequence[Statement],
    sums: Sequence[str],
    stop: Index | None = None,
) -> list[Statement]:
    """The greatest score, what to shift by, and sums: `terms` add to them, given the shift."""

    def over_keys(body: Sequence[Statement]) -> Body:
        if stop is None:
            return in_order([key], body)
        return (For(key, Role.SEQUENTIAL, tuple(body), stop),)

    return [
        Let("top", Literal(float("-inf"), F32)),
        *over_keys([Accumulate("top", "max", score)]),
        Let("shift", finite(local("top"))),
        *(Let(name, Literal(0, F32)) for name in sums),
        *over_keys(terms),
    ]


def log_sum(total: str, shift: str) -> Value:
    """The logarithm of a row's sum of exponentials."""
    return add(apply("log", local(total)), local(shift))


def power(score: Value, shift: Value) -> Value:
    """An exponential: a probability, where the shift is the logarithm of the sum."""
    return apply("exp", sub(score, shift))


def local(name: str) -> Local:
    return Local(name, F32)


def add(a: Value, b: Value) -> Value:
    return apply("add", a, b)


def sub(a: Value, b: Value) -> Value:
    return apply("sub", a, b)


def mul(a: Value, b: Value | float) -> Value:
    return apply("mul", a, Literal(b, F32) if isinstance(b, float) else b)


def equals(value: Value, number: float) -> Value:
    return compare("eq", value, Literal(number, F32))


def choose(condition: Value, value: Value | float, other: Value | float) -> Value:
    a, b = (Literal(v, F32) if isinstance(v, float) else v for v in (value, other))
    return apply("where", condition, a, b)


def finite(value: Value) -> Value:
    """Zero in place of infinities, as the definition shifts by."""
    inner = choose(equals(value, float("inf")), 0.0, value)
    return choose(equals(value, float("-inf")), 0.0, inner)
