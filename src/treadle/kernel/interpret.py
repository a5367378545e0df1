"""What a kernel does: the judge of every backend's rendering.

Lanes of a vector loop run in lockstep: each statement is executed for all lanes of a vector before
the next one, at any width that the caller asks for. What lanes accumulate they accumulate apart;
at the end their parts are combined in pairs. Iterations that do not fill a vector run one by one.

A kernel that is mapped to a GPU runs one iteration of its grid after another, the last first, with
undefined memory of its own. Threads that share a loop run one after another, the last first: each
its own iterations in order, lanes in lockstep. Wherever one of them touches what another wrote and
no barrier stands between, that is an error, as the order of a GPU's threads is its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import reduce
from typing import Any, assert_never

import numpy as np

from treadle.base.dtypes import DType, narrowed
from treadle.ir.literal import to_numpy
from treadle.kernel.access import accesses
from treadle.kernel.arithmetic import identity
from treadle.kernel.cost import outermost
from treadle.kernel.geometry import Combine
from treadle.kernel.index import Bounded, Data, Index, Quotient, Remainder, Var
from treadle.kernel.mapped import (
    SHARED_OUT,
    Nest,
    group_rows,
    is_of_warps,
    nest_of,
    sums_of,
    width_of,
)
from treadle.kernel.nodes import (
    Accumulate,
    Apply,
    Barrier,
    Buffer,
    Convert,
    For,
    Guarded,
    Kernel,
    Let,
    LibraryCall,
    Literal,
    Load,
    Local,
    Matmul,
    Matrix,
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
from treadle.kernel.sharing import Sharing, Threads
from treadle.kernel.traverse import walk

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
        self.geometry = kernel.geometry
        share = 1 if kernel.geometry is None else kernel.geometry.share
        self.waits = kernel.geometry is not None and kernel.geometry.combine is not Combine.EXCHANGE
        self.threads, self.lane = Threads(0, 1 if self.waits else share), 0
        self.rows = group_rows(kernel)  # of which every thread has its own elements
        self.sharing = Sharing(kernel.name, self.rows) if share > 1 else None
        self.variables: dict[str, Any] = {}  # numbers, or lanes
        self.locals: dict[str, Lanes] = {}
        self.scanning: set[str] = set()  # locals that lanes of a shared loop scan

    def run(self, statement: Statement) -> None:
        match statement:
            case For(_, role):
                if role is Role.GRID:
                    self._grid(statement)
                elif role in SHARED_OUT:
                    self._by_warps(statement) if is_of_warps(statement) else self._shared(statement)
                elif role is Role.VECTOR and self.width > 1 and not self.lanes.ndim:
                    self._vector(statement)
                else:
                    self._iterations(statement, 0)
            case Let(local, value) | Set(local, value):
                self.locals[local] = self.value(value)
            case Accumulate(local, op, value):
                if local in self.scanning and self.lanes.ndim:
                    self.locals[local] = self._so_far(statement)
                else:
                    old = self.locals[local]
                    self.locals[local] = self._apply(op, (old, self.value(value)), value.dtype)
            case Store(buffer, index, value, guard):
                held = True if guard is None else self.value(guard)
                self._store(buffer, self._number(index), self.value(value), held)
            case Update(buffer, index, value, shared):
                self._update(buffer, self._number(index), self.value(value), value.dtype, shared)
            case Barrier():
                if self.sharing is not None:
                    self.sharing.barrier(self.threads)
            case Matmul():
                self._multiply(statement)
            case LibraryCall():
                self._library_call(statement)
            case _:
                assert_never(statement)

    # Loops

    def _count(self, loop: For) -> int:
        if loop.stop is None:
            return loop.var.extent
        return int(np.broadcast_to(self._number(loop.stop), self.lanes.shape).flat[0])

    def _iterations(self, loop: For, first: int) -> None:
        """One iteration after the other."""
        for i in range(first, self._count(loop)):
            self.variables[loop.var.name] = i
            if loop is self.shared_out:  # any thread may have this one: scratch tells nothing
                self.memory |= {b.name: _undefined(b) for b in self.scratch}
            for inner in loop.body:
                self.run(inner)

    # Threads of a GPU

    def _grid(self, loop: For) -> None:
        """Iterations of the grid, of which each has memory of its own."""
        nest = nest_of(loop)
        for first in reversed(range(0, nest.count, nest.lanes)):
            self.memory |= {b.name: _undefined(b) for b in self.scratch}
            if self.sharing is not None:
                self.sharing.start()
            self._pack(nest, first)

    def _pack(self, nest: Nest, flat: int) -> None:
        """One iteration of loops that count as one, or lanes of them in lockstep."""
        for var in reversed(nest.variables):
            flat, self.variables[var.name] = divmod(flat, var.extent)
        if nest.lanes > 1:
            self.lanes = np.arange(nest.lanes)
            self.variables[nest.variables[-1].name] += self.lanes
        for inner in nest.body:
            self.run(inner)
        if nest.lanes > 1:
            self.lanes = np.zeros((), np.int64)

    def _shared(self, loop: For) -> None:
        """Iterations shared out among threads; what they sum is combined at the end."""
        assert self.geometry is not None
        nest, sums = nest_of(loop), sums_of(loop)
        lanes, width = nest.lanes, width_of(loop.role, self.geometry)
        packs = nest.count // lanes
        before, group = {n: self.locals[n] for n in sums}, self.threads
        if any(s.scanned for s in sums.values()):
            self._scanned(nest, sums, width)
            return
        parts: dict[str, list[Lanes]] = {n: [] for n in sums}
        for thread in reversed(range(min(width, packs))):
            every = max(1, group.count - width + 1)  # warps that all do the same
            self.threads, self.lane = Threads(group.first + thread, every), thread
            self.locals |= {n: self._none(s) for n, s in sums.items()}
            for pack in range(thread, packs, width):
                self._pack(nest, pack * lanes)
            for name, s in sums.items():
                part = self.locals[name]  # of a thread, whose lanes come one after the other
                is_spread = lanes > 1 and part.ndim
                parts[name].insert(0, self._in_order(list(part), s) if is_spread else part)
        self.threads = group
        if self.waits and self.sharing is not None:
            self.sharing.start()
        for name, s in sums.items():
            own = [before[name], self._combined(parts[name], s)] if parts[name] else [before[name]]
            self.locals[name] = self._in_order(own, s)

    def _scanned(self, nest: Nest, sums: Mapping[str, Accumulate], width: int) -> None:
        """Iterations in order, each a thread's: what they scan goes from one to the next."""
        group, before = self.threads, self.scanning
        self.scanning = before | sums.keys()
        every = max(1, group.count - width + 1)
        for pack in range(nest.count // nest.lanes):
            thread = pack % width
            self.threads, self.lane = Threads(group.first + thread, every), thread
            self._pack(nest, pack * nest.lanes)
            for name in sums:
                found = self.locals[name]
                self.locals[name] = found[-1] if nest.lanes > 1 and np.ndim(found) else found
        self.threads, self.scanning = group, before

    def _so_far(self, s: Accumulate) -> Lanes:
        """What lanes up to each give, after what came before the first of them."""
        old, found = self.locals[s.local], []
        values = np.broadcast_to(self.value(s.value), self.lanes.shape)
        for value in values:
            old = self._apply(s.op, (old, value), s.value.dtype)
            found.append(old)
        return np.array(found)

    def _by_warps(self, loop: For) -> None:
        """Iterations that are a warp's each. Rows of sums are each warp's, and added in order."""
        assert self.geometry is not None
        nest, group, width = nest_of(loop), self.threads, self.geometry.warp
        warps = self.geometry.share // width
        rows = {s.buffer for s in walk(nest.body) if isinstance(s, Update)} & self.rows
        sums = {name: [self.memory[name]] for name in rows}
        for warp in reversed(range(min(warps, nest.count))):
            self.threads = Threads(group.first + width * warp, width)
            self.memory |= {name: np.zeros_like(sums[name][0]) for name in rows}
            for i in range(warp, nest.count, warps):
                self._pack(nest, i)
            for name in rows:
                sums[name].insert(1, self.memory[name])
        self.threads = group
        if rows and self.sharing is not None:
            self.sharing.barrier(group)
        self.memory |= {name: sum(found[1:], found[0]) for name, found in sums.items()}

    def _none(self, s: Accumulate) -> Lanes:
        return to_numpy(identity(s.op, s.value.dtype), s.value.dtype.numpy)

    def _combined(self, parts: list[Lanes], s: Accumulate) -> Lanes:
        """Parts of threads, in the order that the geometry fixes."""
        assert self.geometry is not None
        if self.geometry.combine is Combine.IN_ORDER:
            return self._in_order(parts, s)
        return self._in_pairs(parts, s)

    def _in_pairs(self, parts: list[Lanes], s: Accumulate) -> Lanes:
        """One half is combined with the other, and so on."""
        while len(parts) > 1:
            half = -(-len(parts) // 2)
            pairs = [self._in_order(list(two), s) for two in zip(parts, parts[half:], strict=False)]
            parts = pairs + parts[len(pairs) : half]
        return parts[0]

    def _in_order(self, parts: list[Lanes], s: Accumulate) -> Lanes:
        return reduce(lambda a, b: self._apply(s.op, (a, b), s.value.dtype), parts)

    # Lanes of a vector

    def _vector(self, loop: For) -> None:
        """Whole vectors of iterations, then the rest one by one."""
        used = {a.buffer for a in accesses(loop.body)}
        width = min([self.width, *(n for b, n in self.most.items() if b in used)])
        whole = self._count(loop) // width * width
        sums = sums_of(loop)
        before = {n: self.locals[n] for n in sums}
        if whole:
            self.locals |= {n: np.full(width, self._none(s)) for n, s in sums.items()}
        self.lanes = np.arange(width)
        for first in range(0, whole, width):
            self.variables[loop.var.name] = first + self.lanes
            for inner in loop.body:
                self.run(inner)
        self.lanes = np.zeros((), np.int64)
        for name, s in sums.items() if whole else ():
            parts = self._in_pairs(list(np.broadcast_to(self.locals[name], width)), s)
            self.locals[name] = self._in_order([before[name], parts], s)
        self._iterations(loop, whole)

    # Memory

    def _cells(self, buffer: str, at: Lanes) -> tuple[np.ndarray, np.ndarray]:
        """Elements and lanes, one pair for each lane that runs."""
        lanes = self.lanes if buffer in self.most else np.zeros((), np.int64)
        return np.broadcast_arrays(at, lanes)  # type: ignore[return-value]

    def _lane(self, buffer: str) -> int:
        """The lane that runs alone, as memory counts it."""
        return int(self.lanes) if buffer in self.most else 0

    def _load(self, buffer: str, at: Lanes) -> Lanes:
        if self.sharing is not None:
            self.sharing.reads(buffer, _numbers(at), self.threads, self.lane)
        if not self.lanes.ndim:
            return np.asarray(self.memory[buffer][at, self._lane(buffer)])
        return np.asarray(self.memory[buffer][self._cells(buffer, at)])

    def _store(self, buffer: str, at: Lanes, value: Lanes, held: Any) -> None:
        """In the order of lanes: of several at one element the last stays."""
        if self.sharing is not None:
            held_at = np.broadcast_to(at, np.shape(held))[held] if np.ndim(held) else at
            touched = _numbers(held_at) if np.any(held) else []
            self.sharing.writes(buffer, touched, self.threads.writer, self.lane)
        if not self.lanes.ndim:
            if held:
                self.memory[buffer][at, self._lane(buffer)] = value
            return
        for cell, new, holds in self._one_by_one(buffer, at, value, held):
            if holds:
                self.memory[buffer][cell] = new

    def _update(self, buffer: str, at: Lanes, value: Lanes, dtype: DType, shared: bool) -> None:
        if self.sharing is not None:
            note = self.sharing.adds if shared else self.sharing.writes
            note(buffer, _numbers(at), self.threads.writer, self.lane)
        memory = self.memory[buffer]
        for cell, new, _ in self._one_by_one(buffer, at, value, True):
            memory[cell] = self._apply("add", (memory[cell], new), dtype)

    def _one_by_one(
        self, buffer: str, at: Lanes, value: Lanes, held: Any
    ) -> Iterator[tuple[tuple[int, int], Any, Any]]:
        elements, lanes = self._cells(buffer, at)
        every = np.broadcast_arrays(elements, lanes, value, held, self.lanes)[:4]
        for element, lane, new, holds in zip(*(a.reshape(-1) for a in every), strict=True):
            yield (int(element), int(lane)), new, holds

    def _library_call(self, statement: LibraryCall) -> None:
        """What a library computes is given by name too, as a function of whole tensors."""
        if statement.name not in self.meanings:
            raise AssertionError(f"{statement.name} is a library's: look at its definition")
        given = [self.memory[v.buffer][_spots(v), 0] for v in statement.operands]
        shapes = tuple(v.shape for v in statement.results)
        found: Any = self.meanings[statement.name](dict(statement.numbers), shapes, *given)
        for view, array in zip(statement.results, found, strict=True):
            self.memory[view.buffer][_spots(view), 0] = array

    def _multiply(self, statement: Matmul) -> None:
        """In the dtype of the target, in NumPy's order: sums may differ in their last bits."""
        target, left, right = (self._elements(m) for m in statement.matrices)
        into = self.memory[statement.target.buffer][:, 0]
        wide = np.result_type(into.dtype, np.float32)  # of narrow floats too
        a, b = (self.memory[m.buffer][:, 0] for m in (statement.left, statement.right))
        found = a[left].astype(wide) @ b[right].astype(wide)
        for name, at in statement.scales:
            found = found * self.memory[name][at, 0]
        if statement.bias is not None:
            found = found + self.memory[statement.bias][: found.shape[1], 0].astype(wide)
        into[target] = into[target] + found if statement.adds else found

    def _elements(self, matrix: Matrix) -> np.ndarray:
        rows = np.array([matrix.rows.at(i) for i in range(matrix.rows.count)], np.int64)
        columns = np.array([matrix.columns.at(i) for i in range(matrix.columns.count)], np.int64)
        return self._number(matrix.index) + rows[:, None] + columns[None, :]

    def _number(self, index: Index) -> Any:
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
                    value = self._number(inner) // divisor
                case Remainder(inner, divisor):
                    value = self._number(inner) % divisor
                case Bounded(inner, _):
                    value = self._number(inner)
            total = total + factor * value
        return total

    # Values

    def value(self, value: Value) -> Lanes:
        match value:
            case Literal(number, dtype):
                return to_numpy(number, dtype.numpy)
            case Load(buffer, index, _):
                return self._load(buffer, self._number(index))
            case Local(name, _):
                return self.locals[name]
            case Position(index, dtype):
                return np.asarray(self._number(index)).astype(dtype.numpy)
            case Apply(op, operands, dtype):
                return self._apply(op, tuple(map(self.value, operands)), dtype)
            case Convert(inner, dtype):
                return narrowed(np.asarray(self.value(inner)), dtype)
            case Within(index, low, high, _):
                at = self._number(index)
                return np.asarray((low <= at) & (at < high))
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


def _numbers(at: Lanes) -> list[int]:
    """Elements that are touched, one of each lane."""
    found: list[int] = np.asarray(at).reshape(-1).tolist()
    return found


def _spots(view: View) -> np.ndarray:
    """Where the elements of a view are."""
    steps = zip(view.shape, view.strides, strict=True)
    axes = np.ix_(*(np.arange(n, dtype=np.int64) * step for n, step in steps))
    return np.asarray(sum(axes, view.start))
