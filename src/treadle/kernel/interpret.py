"""What a kernel does: the judge of every backend's rendering.

Lanes of a vector loop run in lockstep: each statement is executed for all lanes of a vector before
the next one, at any width that the caller asks for. What lanes accumulate they accumulate apart;
at the end their parts are combined in pairs. Iterations that do not fill a vector run one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, assert_never

import numpy as np

from treadle.base.dtypes import DType
from treadle.ir.literal import to_numpy
from treadle.kernel.access import accesses, names_in
from treadle.kernel.accumulate import identity
from treadle.kernel.cost import outermost
from treadle.kernel.index import Bounded, Data, Index, Quotient, Remainder, Var
from treadle.kernel.nodes import (
    Accumulate,
    Apply,
    Buffer,
    Convert,
    For,
    Guarded,
    Kernel,
    Let,
    Library,
    Literal,
    Load,
    Local,
    Matrix,
    Multiply,
    Position,
    Role,
    Set,
    Statement,
    Store,
    Update,
    Value,
    View,
    Within,
)

Lanes = np.ndarray  # one axis, of all lanes; none where there is one value for them all
# What each elementwise op does to values of its dtype; given by the caller, who has the oracle's.
# Those of libraries' routines take numbers by name, the shapes of results, and tensors.
Meanings = Mapping[str, Callable[..., object]]


def interpret(
    kernel: Kernel, memory: Mapping[str, np.ndarray], meanings: Meanings, width: int = 1
) -> None:
    """Run a kernel on flat arrays by buffer name; outputs are written in place.

    `width` is how many lanes vector loops have.
    """
    machine = _Machine(kernel, memory, meanings, width)
    with np.errstate(all="ignore"):
        for statement in kernel.body:
            machine.run(statement)


def _undefined(buffer: Buffer) -> np.ndarray:
    """Scratch as it may be at first: NaN for floats, far out for integers."""
    kind = buffer.dtype
    shape = (buffer.size, buffer.lanes)
    if kind.is_float:
        return np.full(shape, np.nan, kind.numpy)
    return np.full(shape, kind.range()[1] if kind.is_integer else 1, kind.numpy)


class _Machine:
    def __init__(
        self, kernel: Kernel, memory: Mapping[str, np.ndarray], meanings: Meanings, width: int
    ):
        # Elements by lanes, one lane for all but private memory.
        self.memory = {n: a.reshape(-1, 1) for n, a in memory.items()}
        self.memory |= {b.name: _undefined(b) for b in kernel.scratch}
        self.most = {b.name: b.lanes for b in kernel.scratch if b.lanes > 1}
        self.meanings, self.width = meanings, width
        self.lanes: np.ndarray = np.zeros((), np.int64)  # which run: one, or an axis of all
        self.scratch, self.shared_out = kernel.scratch, outermost(kernel)
        self.variables: dict[str, Any] = {}  # numbers, or lanes
        self.locals: dict[str, Lanes] = {}

    def run(self, statement: Statement) -> None:
        match statement:
            case For(_, role):
                if role is Role.VECTOR and self.width > 1 and not self.lanes.ndim:
                    self._vector(statement)
                else:
                    self._iterations(statement, 0)
            case Let(local, value) | Set(local, value):
                self.locals[local] = self.value(value)
            case Accumulate(local, op, value):
                old = self.locals[local]
                self.locals[local] = self._apply(op, (old, self.value(value)), value.dtype)
            case Store(buffer, index, value, guard):
                held = True if guard is None else self.value(guard)
                self._store(buffer, self._place(index), self.value(value), held)
            case Update(buffer, index, value):
                self._update(buffer, self._place(index), self.value(value), value.dtype)
            case Multiply():
                self._multiply(statement)
            case Library():
                self._routine(statement)
            case _:
                assert_never(statement)

    # Loops

    def _count(self, loop: For) -> int:
        if loop.stop is None:
            return loop.var.extent
        return int(np.broadcast_to(self._place(loop.stop), self.lanes.shape).flat[0])

    def _iterations(self, loop: For, first: int) -> None:
        """One iteration after the other."""
        for i in range(first, self._count(loop)):
            self.variables[loop.var.name] = i
            if loop is self.shared_out:  # any thread may have this one: scratch tells nothing
                self.memory |= {b.name: _undefined(b) for b in self.scratch}
            for inner in loop.body:
                self.run(inner)

    def _vector(self, loop: For) -> None:
        """Whole vectors of iterations, then the rest one by one."""
        used = {a.buffer for a in accesses(loop.body)}
        width = min([self.width, *(n for b, n in self.most.items() if b in used)])
        whole = self._count(loop) // width * width
        sums = _sums(loop.body, names_in(loop.body))
        before = {n: self.locals[n] for n in sums}
        if whole:
            self.locals |= {n: self._identity(op, dtype, width) for n, (op, dtype) in sums.items()}
        self.lanes = np.arange(width)
        for first in range(0, whole, width):
            self.variables[loop.var.name] = first + self.lanes
            for inner in loop.body:
                self.run(inner)
        self.lanes = np.zeros((), np.int64)
        for name, (op, dtype) in sums.items() if whole else ():
            parts = self._folded(self.locals[name], op, dtype)
            self.locals[name] = self._apply(op, (before[name], parts), dtype)
        self._iterations(loop, whole)

    def _identity(self, op: str, dtype: DType, width: int) -> Lanes:
        return np.full(width, identity(op, dtype), dtype.numpy)

    def _folded(self, lanes: Lanes, op: str, dtype: DType) -> Lanes:
        """Lanes combined in pairs, halves with each other."""
        while lanes.size > 1:
            half = lanes.size // 2
            lanes = self._apply(op, (lanes[:half], lanes[half:]), dtype)
        return lanes.reshape(())

    # Memory

    def _cells(self, buffer: str, place: Lanes) -> tuple[np.ndarray, np.ndarray]:
        """Elements and lanes, one pair for each lane that runs."""
        lanes = self.lanes if buffer in self.most else np.zeros((), np.int64)
        return np.broadcast_arrays(place, lanes)  # type: ignore[return-value]

    def _lane(self, buffer: str) -> int:
        """The lane that runs alone, as memory counts it."""
        return int(self.lanes) if buffer in self.most else 0

    def _load(self, buffer: str, place: Lanes) -> Lanes:
        if not self.lanes.ndim:
            return np.asarray(self.memory[buffer][place, self._lane(buffer)])
        return np.asarray(self.memory[buffer][self._cells(buffer, place)])

    def _store(self, buffer: str, place: Lanes, value: Lanes, held: Any) -> None:
        """In the order of lanes: of several at one element the last stays."""
        if not self.lanes.ndim:
            if held:
                self.memory[buffer][place, self._lane(buffer)] = value
            return
        for cell, new, holds in self._one_by_one(buffer, place, value, held):
            if holds:
                self.memory[buffer][cell] = new

    def _update(self, buffer: str, place: Lanes, value: Lanes, dtype: DType) -> None:
        memory = self.memory[buffer]
        for cell, new, _ in self._one_by_one(buffer, place, value, True):
            memory[cell] = self._apply("add", (memory[cell], new), dtype)

    def _one_by_one(
        self, buffer: str, place: Lanes, value: Lanes, held: Any
    ) -> Iterator[tuple[tuple[int, int], Any, Any]]:
        elements, lanes = self._cells(buffer, place)
        every = np.broadcast_arrays(elements, lanes, value, held, self.lanes)[:4]
        for element, lane, new, holds in zip(*(a.reshape(-1) for a in every), strict=True):
            yield (int(element), int(lane)), new, holds

    def _routine(self, statement: Library) -> None:
        """What a library computes is given by name too, as a function of whole tensors."""
        if statement.name not in self.meanings:
            raise AssertionError(f"{statement.name} is a library's: look at its definition")
        given = [self.memory[v.buffer][_spots(v), 0] for v in statement.operands]
        shapes = tuple(v.shape for v in statement.results)
        found: Any = self.meanings[statement.name](dict(statement.numbers), shapes, *given)
        for view, array in zip(statement.results, found, strict=True):
            self.memory[view.buffer][_spots(view), 0] = array

    def _multiply(self, statement: Multiply) -> None:
        """In the dtype of the target, in NumPy's order: sums may differ in their last bits."""
        target, left, right = (self._places(m) for m in statement.matrices)
        into = self.memory[statement.target.buffer][:, 0]
        wide = np.result_type(into.dtype, np.float32)  # of narrow floats too
        a, b = (self.memory[m.buffer][:, 0] for m in (statement.left, statement.right))
        found = a[left].astype(wide) @ b[right].astype(wide)
        if statement.bias is not None:
            found = found + self.memory[statement.bias][: found.shape[1], 0].astype(wide)
        into[target] = into[target] + found if statement.adds else found

    def _places(self, matrix: Matrix) -> np.ndarray:
        rows = np.array([matrix.rows.at(i) for i in range(matrix.rows.count)], np.int64)
        columns = np.array([matrix.columns.at(i) for i in range(matrix.columns.count)], np.int64)
        return self._place(matrix.index) + rows[:, None] + columns[None, :]

    def _place(self, index: Index) -> Any:
        """The number that an index stands for, or those of all lanes."""
        total: Any = index.offset
        for atom, factor in index.terms:
            match atom:
                case Var(name, _):
                    value = self.variables[name]
                case Data(local, extent):
                    given = self.locals[local]
                    if given.ndim:
                        value = np.clip(given.astype(np.int64), 0, extent - 1)
                    else:
                        value = min(max(int(given), 0), extent - 1)
                case Quotient(inner, divisor):
                    value = self._place(inner) // divisor
                case Remainder(inner, divisor):
                    value = self._place(inner) % divisor
                case Bounded(inner, _):
                    value = self._place(inner)
            total = total + factor * value
        return total

    # Values

    def value(self, value: Value) -> Lanes:
        match value:
            case Literal(number, dtype):
                return to_numpy(number, dtype.numpy)
            case Load(buffer, index, _):
                return self._load(buffer, self._place(index))
            case Local(name, _):
                return self.locals[name]
            case Position(index, dtype):
                return np.asarray(self._place(index)).astype(dtype.numpy)
            case Apply(op, operands, dtype):
                return self._apply(op, tuple(map(self.value, operands)), dtype)
            case Convert(inner, dtype):
                return np.asarray(self.value(inner)).astype(dtype.numpy)
            case Within(index, low, high, _):
                place = self._place(index)
                return np.asarray((low <= place) & (place < high))
            case Guarded(guard, inner, other, dtype):
                return self._guarded(self.value(guard), inner, other, dtype)
            case _:
                assert_never(value)

    def _guarded(self, held: Lanes, inner: Value, other: Value, dtype: DType) -> Lanes:
        """What a guard holds back is not computed: lanes that differ go one by one."""
        if held.all() or not held.any():
            return self.value(inner if held.all() else other)
        found = np.empty(self.lanes.shape, dtype.numpy)
        for lane in self.lanes:
            with self._alone(lane):
                found[lane] = self.value(inner if held[lane] else other)
        return found

    @contextmanager
    def _alone(self, lane: int) -> Iterator[None]:
        """One lane of those that run, its own values in place of all."""
        lanes, variables, locals_ = self.lanes, self.variables, self.locals
        self.lanes = np.asarray(lane)
        self.variables = {n: v if isinstance(v, int) else v[lane] for n, v in variables.items()}
        self.locals = {n: v[lane] if v.ndim else v for n, v in locals_.items()}
        yield
        self.lanes, self.variables, self.locals = lanes, variables, locals_

    def _apply(self, op: str, operands: tuple[Lanes, ...], dtype: DType) -> Lanes:
        if self.lanes.ndim:
            operands = tuple(np.broadcast_arrays(*operands))
        found = self.meanings[op](*operands)
        return np.asarray(found).astype(dtype.numpy)


def _sums(body: Sequence[Statement], own: set[str]) -> dict[str, tuple[str, DType]]:
    """What a loop accumulates into locals of outside: by which op, and in which dtype."""
    found: dict[str, tuple[str, DType]] = {}
    for s in body:
        match s:
            case For(_, _, inner):
                found |= _sums(inner, own)
            case Accumulate(local, op, value) if local not in own:
                found[local] = op, value.dtype
            case _:
                pass
    return found


def _spots(view: View) -> np.ndarray:
    """Where the elements of a view are."""
    found = np.full((1,) * len(view.shape), view.start, np.int64)
    for axis, (n, step) in enumerate(zip(view.shape, view.strides, strict=True)):
        shape = [n if i == axis else 1 for i in range(len(view.shape))]
        found = found + (np.arange(n, dtype=np.int64) * step).reshape(shape)
    return found
