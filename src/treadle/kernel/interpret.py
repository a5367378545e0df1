"""What a kernel does, one scalar at a time: the judge of every backend's rendering."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, assert_never

import numpy as np

from treadle.base.dtypes import DType
from treadle.ir.literal import to_numpy
from treadle.kernel.index import Index, evaluate
from treadle.kernel.nodes import (
    Accumulate,
    Apply,
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
    Set,
    Statement,
    Store,
    Update,
    Value,
    View,
    Within,
)

Scalar = np.ndarray  # without axes
# What each elementwise op does to scalars of its dtype; given by the caller, who has the oracle's.
# Those of libraries' routines take numbers by name, the shapes of results, and tensors.
Meanings = Mapping[str, Callable[..., object]]


def interpret(kernel: Kernel, memory: Mapping[str, np.ndarray], meanings: Meanings) -> None:
    """Run a kernel on flat arrays by buffer name; outputs are written in place."""
    own = {b.name: np.zeros(b.size, b.dtype.numpy) for b in kernel.scratch}
    machine = _Machine({**memory, **own}, meanings)
    with np.errstate(all="ignore"):
        for statement in kernel.body:
            machine.run(statement)


class _Machine:
    def __init__(self, memory: Mapping[str, np.ndarray], meanings: Meanings):
        self.memory, self.meanings = memory, meanings
        self.variables: dict[str, int] = {}
        self.locals: dict[str, Scalar] = {}

    def run(self, statement: Statement) -> None:
        match statement:
            case For(var, _, body, stop):
                for turn in range(var.extent if stop is None else self._place(stop)):
                    self.variables[var.name] = turn
                    for inner in body:
                        self.run(inner)
            case Let(local, value):
                self.locals[local] = self.value(value)
            case Accumulate(local, op, value):
                old = self.locals[local]
                self.locals[local] = self._apply(op, (old, self.value(value)), value.dtype)
            case Set(local, value):
                self.locals[local] = self.value(value)
            case Store(buffer, index, value, guard):
                if guard is not None and not self.value(guard):
                    return
                self.memory[buffer][self._place(index)] = self.value(value)
            case Update(buffer, index, value):
                place = self._place(index)
                old = self.memory[buffer][place]
                self.memory[buffer][place] = self._apply(
                    "add", (old, self.value(value)), value.dtype
                )
            case Multiply():
                self._multiply(statement)
            case Library():
                self._routine(statement)
            case _:
                assert_never(statement)

    def _routine(self, statement: Library) -> None:
        """What a library computes is given by name too, as a function of whole tensors."""
        if statement.name not in self.meanings:
            raise AssertionError(f"{statement.name} is a library's: look at its definition")
        given = [self.memory[v.buffer][_spots(v)] for v in statement.operands]
        shapes = tuple(v.shape for v in statement.results)
        found: Any = self.meanings[statement.name](dict(statement.numbers), shapes, *given)
        for view, array in zip(statement.results, found, strict=True):
            self.memory[view.buffer][_spots(view)] = array

    def _multiply(self, statement: Multiply) -> None:
        """In the dtype of the target, in NumPy's order: sums may differ in their last bits."""
        target, left, right = (self._places(m) for m in statement.matrices)
        into = self.memory[statement.target.buffer]
        wide = np.result_type(into.dtype, np.float32)  # of narrow floats too
        a, b = self.memory[statement.left.buffer], self.memory[statement.right.buffer]
        found = a[left].astype(wide) @ b[right].astype(wide)
        if statement.bias is not None:
            found = found + self.memory[statement.bias][: found.shape[1]].astype(wide)
        into[target] = into[target] + found if statement.adds else found

    def _places(self, matrix: Matrix) -> np.ndarray:
        rows = np.array([matrix.rows.at(i) for i in range(matrix.rows.count)], np.int64)
        columns = np.array([matrix.columns.at(i) for i in range(matrix.columns.count)], np.int64)
        return self._place(matrix.index) + rows[:, None] + columns[None, :]

    def _place(self, index: Index) -> int:
        numbers = {n: int(v) for n, v in self.locals.items() if v.dtype.kind in "iu"}
        return evaluate(index, self.variables | numbers)

    def value(self, value: Value) -> Scalar:
        match value:
            case Literal(number, dtype):
                return to_numpy(number, dtype.numpy)
            case Load(buffer, index, _):
                return np.asarray(self.memory[buffer][self._place(index)])
            case Local(name, _):
                return self.locals[name]
            case Position(index, dtype):
                return np.array(self._place(index)).astype(dtype.numpy)
            case Apply(op, operands, dtype):
                return self._apply(op, tuple(map(self.value, operands)), dtype)
            case Convert(inner, dtype):
                return np.asarray(self.value(inner)).astype(dtype.numpy)
            case Within(index, low, high, _):
                return np.array(low <= self._place(index) < high)
            case Guarded(guard, inner, other, _):
                return self.value(inner if self.value(guard) else other)
            case _:
                assert_never(value)

    def _apply(self, op: str, operands: tuple[Scalar, ...], dtype: DType) -> Scalar:
        found = self.meanings[op](*map(np.asarray, operands))
        return np.asarray(found).astype(dtype.numpy)


def _spots(view: View) -> np.ndarray:
    """Where the elements of a view are."""
    found = np.full((1,) * len(view.shape), view.start, np.int64)
    for axis, (n, step) in enumerate(zip(view.shape, view.strides, strict=True)):
        shape = [n if i == axis else 1 for i in range(len(view.shape))]
        found = found + (np.arange(n, dtype=np.int64) * step).reshape(shape)
    return found
