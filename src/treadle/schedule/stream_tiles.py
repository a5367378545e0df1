"""Blocks of rows in the shared memory of a group, and products of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from treadle.kernel.index import Index, Var, variable
from treadle.kernel.nodes import (
    Accumulate,
    Buffer,
    Let,
    Literal,
    Load,
    Matrix,
    Statement,
    Store,
    StridedAxis,
    Value,
)
from treadle.schedule.nests import Body, as_dtype, in_order, parallel
from treadle.schedule.softmax import F32, local, mul

FIRST = Index()
MOST = 4  # rows and columns of a thread: sixteen sums, and eight numbers that are multiplied


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows of a block in shared memory."""

    buffer: Buffer
    stride: int
    is_transposed: bool = False  # elements of a row lie apart

    def at(self, row: Index, column: Index) -> Index:
        if self.is_transposed:
            row, column = column, row
        return row * self.stride + column

    def load(self, row: Index, column: Index) -> Value:
        return as_dtype(Load(self.buffer.name, self.at(row, column), self.buffer.dtype), F32)

    def store(self, value: Value, row: Index, column: Index) -> Store:
        return Store(self.buffer.name, self.at(row, column), as_dtype(value, self.buffer.dtype))

    def matrix(self, rows: int, columns: int, first: Index = FIRST) -> Matrix:
        """So many rows from one on."""
        steps = (1, self.stride) if self.is_transposed else (self.stride, 1)
        sides = (StridedAxis(n, x) for n, x in zip((rows, columns), steps, strict=True))
        return Matrix(self.buffer.name, self.at(first, FIRST), *sides)

    @property
    def transposed(self) -> Tile:
        return replace(self, is_transposed=not self.is_transposed)

    def cleared(self, rows: int, columns: int) -> Body:
        i, j = Var("i", rows), Var("j", columns)
        return parallel([i, j], [self.store(Literal(0, F32), variable(i), variable(j))])


@dataclass(frozen=True, slots=True)
class Numbers:
    """A number for each row of a block."""

    buffer: Buffer

    def load(self, row: Index) -> Value:
        return Load(self.buffer.name, row, F32)

    def store(self, value: Value, row: Index) -> Store:
        return Store(self.buffer.name, row, value)


@dataclass(frozen=True, slots=True)
class Product:
    """A sum of products along some depth, for each row and column."""

    name: str
    depth: int
    left: Callable[[Index, Index], Value]  # by row and depth
    right: Callable[[Index, Index], Value]  # by depth and column


def products(
    rows: int,
    columns: int,
    every: Sequence[Product],
    store: Callable[[Index, Index, Sequence[Value]], list[Statement]],
    threads: int,
) -> Body:
    """Products of all rows and columns, and what is done with the sums of each.

    A thread has several of both where there are enough for all threads: it reads less for each
    multiplication. They lie at a distance, so that its neighbours read and store beside it.
    """
    down, across = _of_thread(rows, columns, threads)
    i, j = Var("i", rows // down), Var("j", columns // across)
    own_rows = [variable(i) + u * i.extent for u in range(down)]
    own_columns = [variable(j) + v * j.extent for v in range(across)]
    pairs = [(u, v) for u in range(down) for v in range(across)]
    body: list[Statement] = []
    for product in every:
        name, k = product.name, Var(f"{product.name}_k", product.depth)
        body += [Let(f"{name}{u}_{v}", Literal(0, F32)) for u, v in pairs]
        step: list[Statement] = []
        step += [
            Let(f"{name}_a{u}", product.left(row, variable(k))) for u, row in enumerate(own_rows)
        ]
        step += [
            Let(f"{name}_b{v}", product.right(variable(k), column))
            for v, column in enumerate(own_columns)
        ]
        step += [
            Accumulate(f"{name}{u}_{v}", "add", mul(local(f"{name}_a{u}"), local(f"{name}_b{v}")))
            for u, v in pairs
        ]
        body += in_order([k], step)
    for u, v in pairs:
        sums = [local(f"{product.name}{u}_{v}") for product in every]
        body += store(own_rows[u], own_columns[v], sums)
    return parallel([i, j], body)


def _of_thread(rows: int, columns: int, threads: int) -> tuple[int, int]:
    """Rows and columns of a thread: powers of two that divide, while all threads have some."""
    down = across = 1
    while rows * columns // (down * across) >= 2 * threads:
        if across <= down and 2 * across <= MOST and columns % (2 * across) == 0:
            across *= 2
        elif 2 * down <= MOST and rows % (2 * down) == 0:
            down *= 2
        else:
            break
    return down, across
