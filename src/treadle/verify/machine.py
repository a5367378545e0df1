"""Runs a kernel over the finite field: at full size, some iterations of its loops.

Loops whose iterations are independent are axes of NumPy arrays, the innermost first, so that values
of outer loops broadcast. What iterations of the grid, or of the outermost loop, have for themselves
is memory that nothing was written to: they run one after another, and what they read too early is
no number that anything equals. Threads of a block run in lockstep; that barriers stand where
threads meet is the verifier's to see (`kernel/verify_mapping.py`). Some iterations are left out
where nobody else touches what they write: the first, the last, those at guards and a few others
stay.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import assert_never

import numpy as np

from treadle.base import dtypes
from treadle.domains.float64 import Array
from treadle.ir.op import NONE, OPS
from treadle.ir.ops import elementwise as e
from treadle.kernel.access import accesses, changed_in, locals_in, names_in
from treadle.kernel.cost import outermost
from treadle.kernel.index import Data, Index, Var
from treadle.kernel.nodes import (
    Accumulate,
    Apply,
    Barrier,
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
    StridedAxis,
    Update,
    Value,
    Within,
)
from treadle.kernel.races import conflicts_in, shared_sums
from treadle.kernel.traverse import values_of, walk
from treadle.verify.extended import Extended, ExtendedField, chosen, is_residue
from treadle.verify.indices import Numbers, evaluate_index
from treadle.verify.keyed import Memory, keyed
from treadle.verify.picks import Picks

INDEPENDENT = (Role.PARALLEL, Role.GRID, Role.GROUP, Role.SUBGROUP, Role.VECTOR)
CHUNK = 2**20  # elements of an array at a time
MOST = 2**27  # elements that a kernel may compute
DEAR = 2**22  # elements after which no more iterations of a loop are looked at


class NotEstablishedError(Exception):
    """A part of a program that this machine cannot judge, and why."""


class WrongKernelError(Exception):
    """A kernel does what it may not: the statement, and the values."""


class Machine:
    """One kernel on memories by the names of its buffers."""

    def __init__(
        self, kernel: Kernel, memory: Mapping[str, Memory], field: ExtendedField, picks: Picks
    ):
        self.kernel, self.field, self.picks = kernel, field, picks
        self.memory = dict(memory)
        self.lanes = _lane_loops(kernel)  # vector loops that private memory is of
        self.runs = 0  # of which each has memory of its own
        for b in kernel.scratch:
            extent = self.lanes[b.name].extent if b.name in self.lanes else 1
            self.memory[b.name] = Memory(b.dtype, b.size * extent, keyed(field, b.name, b.dtype))
        self.own = {b.name: b for b in kernel.scratch}
        self.touched = Counter(a.buffer for a in accesses(kernel.body))
        self.outer = outermost(kernel)
        self.loops: list[For] = []  # around, that run one iteration after another
        self.nest: list[int] = []  # those of them of which some are left out
        self.turns: Counter[str] = Counter()
        self.sampled: dict[int, bool] = {}
        self.vectors: dict[int, bool] = {}
        self.is_product = sum(not isinstance(s, For) for s in walk(kernel.body)) == 1
        self.axes: list[int] = []  # of loops that run as one, the newest first
        self.variables: dict[str, Numbers] = {}
        self.locals: dict[str, tuple[Extended, int]] = {}  # and how many axes there were
        self.mask: Array | None = None  # where statements are executed
        self.count = 0

    def run(self) -> None:
        self._forget()
        for statement in self.kernel.body:
            self.statement(statement)

    def _forget(self) -> None:
        """Memory of an iteration's own, undefined."""
        self.runs += 1
        for name, buffer in self.own.items():
            self.memory[name].forget(keyed(self.field, f"{name} {self.runs}", buffer.dtype))

    # Statements

    def statement(self, s: Statement) -> None:
        self.count += 1  # it takes time however few its elements are
        match s:
            case For():
                self.loop(s)
            case Let(local, value):
                self.locals[local] = self.value(value), len(self.axes)
            case Set(local, value):
                old, depth = self.locals[local]
                new = self.value(value)
                self.locals[local] = (
                    new if self.mask is None else chosen(self.mask, new, old),
                    depth,
                )
            case Accumulate():
                self.accumulate(s)
            case Store(buffer, index, value, guard):
                mask = self._held(guard)
                outer, self.mask = self.mask, mask
                self.store(buffer, self.index(index), self.value(value), mask)
                self.mask = outer
            case Update():
                self.update(s)
            case Barrier():
                pass
            case Matmul():
                self.multiply(s)
            case LibraryCall(name):
                raise NotEstablishedError(f"{name} is a library's")
            case _:
                assert_never(s)

    def _held(self, guard: Value | None) -> Array | None:
        if guard is None:
            return self.mask
        held = self.value(guard).p == 1
        return held if self.mask is None else held & self.mask

    def accumulate(self, s: Accumulate) -> None:
        old, depth = self.locals[s.local]
        value, dtype, new = self.value(s.value), s.value.dtype, len(self.axes) - depth
        if new:
            shape = tuple(self.axes)
            value = value.map(lambda a: np.broadcast_to(a, shape))
            if self.mask is not None:
                held = np.broadcast_to(self.mask, shape)
                value = chosen(held, value, self._nothing(s))
            value = self.field.reduced(s.op, value, tuple(range(new)), dtype)
            self.locals[s.local] = self.field.combined(s.op, old, value, dtype), depth
            return
        found = self.field.combined(s.op, old, value, dtype)
        self.locals[s.local] = (
            (found if self.mask is None else chosen(self.mask, found, old)),
            depth,
        )

    def _nothing(self, s: Accumulate) -> Extended:
        """What an accumulation by an op starts from."""
        dtype = s.value.dtype
        if s.op in ("add", "mul"):
            return self.field.literal(0 if s.op == "add" else 1, dtype)
        if dtype.is_float:
            return self.field.literal(float("-inf" if s.op == "max" else "inf"), dtype)
        return self.field.literal(dtype.range()[0 if s.op == "max" else 1], dtype)

    # Loops

    def loop(self, s: For) -> None:
        stop = None if s.stop is None else np.asarray(self.index(s.stop))
        count = s.var.extent if stop is None else min(s.var.extent, int(stop.max(initial=0)))
        every = np.arange(count)
        is_apart = (s.role is Role.GRID or s is self.outer) and bool(self.own)
        is_vector = not is_apart and self._is_vector(s)
        if self._is_sampled(s):
            every = np.array([i for i in self.picks.of(s, is_vector) if i < count], np.int64)
        saved, mask = dict(self.locals), self.mask
        if len(every) and is_vector:
            for part in self._chunks(every):
                self._together(s, part, stop, mask)
        else:
            self._one_by_one(s, every, stop, mask, is_apart)
        self.mask = mask
        self.variables.pop(s.var.name, None)
        self.locals = {n: self.locals[n] for n in saved}

    def _one_by_one(
        self, s: For, every: Array, stop: Array | None, mask: Array | None, is_apart: bool
    ) -> None:
        """In order. Where some can be left out the last comes first: of dear ones few are run."""
        if not self._is_sampled(s):
            self.loops.append(s)
            for i in every:
                self._one(s, int(i), stop, mask, is_apart)
            self.loops.pop()
            return
        order, before = [int(i) for i in (*every[-1:], *every[:-1])], self.count
        if self.nest and self.nest[-1] == len(self.loops) - 1:  # other ones in each iteration
            first = self.turns[s.var.name] % len(order)  # the last at first
            order = (order[first:] + order[:first])[:2]
            self.turns[s.var.name] += 1
        self.nest.append(len(self.loops))
        self.loops.append(s)
        for i in order:
            self._one(s, i, stop, mask, is_apart)
            self.picks.note(s, i)
            if self.count - before > DEAR:
                break
        self.nest.pop()
        self.loops.pop()

    def _chunks(self, every: Array) -> list[Array]:
        around = int(np.prod(self.axes, dtype=np.int64))
        return np.array_split(every, max(1, -(-len(every) * around // CHUNK)))

    def _together(self, s: For, every: Array, stop: Array | None, mask: Array | None) -> None:
        """Iterations as one axis more."""
        places = every.reshape(-1, *[1] * len(self.axes))
        self.axes.insert(0, len(every))
        self.variables[s.var.name] = places
        self.mask = mask
        if stop is not None and stop.ndim:
            inside = places < stop
            self.mask = inside if mask is None else inside & mask
        for inner in s.body:
            self.statement(inner)
        self.axes.pop(0)

    def _one(self, s: For, i: int, stop: Array | None, mask: Array | None, is_apart: bool) -> None:
        self.variables[s.var.name] = i
        self.mask = mask
        if stop is not None and stop.ndim:
            self.mask = i < stop if mask is None else (i < stop) & mask
        if is_apart:
            self._forget()
        for inner in s.body:
            self.statement(inner)

    def _is_sampled(self, s: For) -> bool:
        """Whether iterations can be left out: nothing else touches what they write."""
        if id(s) not in self.sampled:
            self.sampled[id(s)] = self._is_free(s)
        return self.sampled[id(s)]

    def _is_free(self, s: For) -> bool:
        if s.role not in INDEPENDENT or s.var.extent <= self.picks.fewest:
            return False
        if changed_in(s.body) - names_in(s.body):
            return False
        if conflicts_in(s, (), with_sums=True) & shared_sums(s.body):
            return False  # every iteration may add to every element
        inside = Counter(a.buffer for a in accesses(s.body))
        written = {a.buffer for a in accesses(s.body) if a.writes}
        return all(self.touched[b] == inside[b] for b in written)

    def _is_vector(self, s: For) -> bool:
        """Whether iterations can run in lockstep."""
        if id(s) not in self.vectors:
            own = {b for b in self.lanes if self.lanes[b] == s.var}
            is_apart = s.role in INDEPENDENT
            can_be = not conflicts_in(s, own) if is_apart else _is_plain_sum(s)
            self.vectors[id(s)] = can_be and not _scans(s)
        return self.vectors[id(s)]

    # Values

    def index(self, index: Index) -> Numbers:
        return evaluate_index(index, self.variables, self._data)

    def _data(self, atom: Data) -> Array:
        found, _ = self.locals[atom.local]
        return np.clip(found.p.astype(np.int64), 0, max(0, atom.extent - 1))

    def value(self, value: Value) -> Extended:
        match value:
            case Literal(number, dtype):
                return self.field.literal(number, dtype)
            case Load(buffer, index):
                return self.load(buffer, self.index(index))
            case Local(name):
                return self.locals[name][0]
            case Position(index, dtype):
                return self.field.integers(np.asarray(self.index(index)), dtype)
            case Apply(op, operands, dtype):
                return self.apply(op, operands, value)
            case Convert(inner, dtype):
                return self.field.cast(self.value(inner), inner.dtype, dtype)
            case Within(index, low, high):
                at = np.asarray(self.index(index))
                return self.field.integers((at >= low) & (at < high), dtypes.bool_)
            case Guarded(guard, inner, other, dtype):
                return self.guarded(guard, inner, other)
            case _:
                assert_never(value)

    def guarded(self, guard: Value, inner: Value, other: Value) -> Extended:
        """What is behind a guard is not read where it does not hold."""
        condition, outer = self.value(guard), self.mask
        held = condition.p != 0
        self.mask = held if outer is None else held & outer
        first = self.value(inner)
        self.mask = outer
        given = [dtypes.bool_, inner.dtype, inner.dtype]
        return self.field.apply(
            e.WHERE, NONE, [condition, first, self.value(other)], given, inner.dtype
        )

    def apply(self, op: str, operands: Sequence[Value], value: Apply) -> Extended:
        xs = [self.value(v) for v in operands]
        self.count += max((x.p.size for x in xs), default=1)
        if self.count > MOST:
            raise NotEstablishedError("an iteration is too large")
        if op == "mulhi":
            wide = xs[0].p.astype(np.uint64) * xs[1].p.astype(np.uint64)
            return self.field.integers(wide >> np.uint64(32), value.dtype)
        if op not in OPS:
            raise NotEstablishedError(f"{op} has no meaning in the field")
        return self.field.apply(OPS[op], NONE, xs, [v.dtype for v in operands], value.dtype)

    # Memory

    def _address(self, buffer: str, at: Numbers) -> Array:
        """Where an element is; lanes have memory of their own."""
        if buffer in self.lanes:
            at = at + self.own[buffer].size * self.variables[self.lanes[buffer].name]
        return np.asarray(at, np.int64)

    def load(self, buffer: str, at: Numbers) -> Extended:
        found, memory = self._address(buffer, at), self.memory[buffer]
        inside = (found >= 0) & (found < memory.size)
        if not inside.all():
            self._outside(buffer, found, inside)
            found = np.clip(found, 0, memory.size - 1)
        return memory.load(found)

    def _outside(self, buffer: str, at: Array, inside: Array) -> None:
        wrong = ~inside if self.mask is None else ~inside & self.mask
        if wrong.any():
            where = int(np.broadcast_to(at, wrong.shape)[wrong].flat[0])
            raise WrongKernelError(f"{buffer}[{where}] is outside its {self.memory[buffer].size}")

    def store(self, buffer: str, at: Numbers, value: Extended, mask: Array | None) -> None:
        found = self._address(buffer, at)
        shapes = [found.shape, value.p.shape, *([] if mask is None else [mask.shape])]
        shape = np.broadcast_shapes(*shapes)
        found = np.broadcast_to(found, shape)
        value = value.map(lambda a: np.broadcast_to(a, shape))
        if mask is not None:
            held = np.broadcast_to(mask, shape)
            found, value = found[held], value.map(lambda a: a[held])
        inside = (found >= 0) & (found < self.memory[buffer].size)
        if not inside.all():
            raise WrongKernelError(f"{buffer}[{int(found[~inside].flat[0])}] is outside of it")
        self.memory[buffer].store(found, value)

    def update(self, s: Update) -> None:
        """Sums at elements, of which several may be one."""
        shape, dtype = tuple(self.axes), s.value.dtype
        found = np.broadcast_to(self._address(s.buffer, self.index(s.index)), shape)
        value = self.value(s.value).map(lambda a: np.broadcast_to(a, shape))
        if self.mask is not None:
            held = np.broadcast_to(self.mask, shape)
            found, value = found[held], value.map(lambda a: a[held])
        at, places = np.unique(found.reshape(-1), return_inverse=True)
        if len(at) and (at[0] < 0 or at[-1] >= self.memory[s.buffer].size):
            raise WrongKernelError(f"{s.buffer}[{int(at[-1])}] is outside of it")
        old = self.load(s.buffer, at)
        sums = []
        for a, first in ((value.q, old.q), (value.p, old.p)):
            total = first.copy()
            np.add.at(total, places, a.reshape(-1))
            sums.append(total)
        if is_residue(dtype):
            sums = [lane.reduce(a) for lane, a in zip(self.field.field.lanes, sums, strict=True)]
        self.memory[s.buffer].store(at, Extended(*sums))

    def multiply(self, s: Matmul) -> None:
        target, left, right = s.matrices
        rows, columns = target.rows, target.columns
        picked: tuple[Sequence[int], Sequence[int]] = range(rows.count), range(columns.count)
        if self.is_product:  # a library's, which has all of them
            picked = self.picks.along(rows.count), self.picks.along(columns.count)
        into = self._matrix(target, *picked)
        deep = range(left.columns.count)
        x = self.load(left.buffer, self._matrix(left, picked[0], deep))
        y = self.load(right.buffer, self._matrix(right, deep, picked[1]))
        self.count += x.p.size + y.p.size
        if self.count > MOST:
            raise NotEstablishedError("an iteration is too large")
        found = self.field.matmul(x, y)
        dtype = self.memory[target.buffer].dtype
        if s.bias is not None:
            bias = self.load(s.bias, np.array(picked[1]))
            found = self.field.combined("add", found, bias, dtype)
        if s.adds:
            found = self.field.combined("add", self.load(target.buffer, into), found, dtype)
        mask = None if self.mask is None else np.asarray(self.mask)[..., None, None]
        self.store(target.buffer, into, found, mask)

    def _matrix(self, m: Matrix, rows: Sequence[int], columns: Sequence[int]) -> Array:
        first = np.asarray(self.index(m.index))[..., None, None]
        return first + _along(m.rows, rows)[:, None] + _along(m.columns, columns)


def _along(axis: StridedAxis, picked: Sequence[int]) -> Array:
    at = np.asarray(picked, np.int64)
    return np.asarray(axis.listed, np.int64)[at] if axis.listed else at * axis.stride


def _lane_loops(kernel: Kernel) -> dict[str, Var]:
    """The variables of the vector loops that private memory is of."""
    private = {b.name for b in kernel.scratch if b.lanes > 1}
    loops = (s for s in walk(kernel.body) if isinstance(s, For) and s.role is Role.VECTOR)
    return {a.buffer: s.var for s in loops for a in accesses(s.body) if a.buffer in private}


def _scans(loop: For) -> bool:
    """Whether statements of an iteration read what earlier iterations accumulated."""
    every = (s for s in walk(loop.body) if isinstance(s, Accumulate) and s.scanned)
    return bool({s.local for s in every} - names_in(loop.body))


def _is_plain_sum(loop: For) -> bool:
    """Whether iterations in order only add to what none of them reads."""
    every = list(walk(loop.body))
    is_plain = all(
        isinstance(s, (Let, Accumulate)) or (isinstance(s, For) and s.stop is None) for s in every
    )
    if not is_plain:
        return False
    sums = {s.local for s in every if isinstance(s, Accumulate)} - names_in(loop.body)
    ops = {(s.local, s.op) for s in every if isinstance(s, Accumulate) and s.local in sums}
    read = set().union(*(locals_in(v) for s in every for v in values_of(s)))
    return not sums & read and len(ops) == len(sums)
