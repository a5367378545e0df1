"""Kernels as LLVM functions.

A kernel becomes `void @name(i64 begin, i64 end, ptr scratch, ptr …)`: the iterations begin …
end − 1 of its outermost parallel loop (any part of them gives the same bits), or everything for a
kernel that has none. A vector loop runs in steps of the machine's width and finishes one by one;
lanes do the same arithmetic at any width. Parts of an outermost vector loop begin at multiples of
`CUT` iterations, and end there or at its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import assert_never

from treadle.base import dtypes
from treadle.codegen.llvm.emitter import (
    Function,
    Loop,
    Reg,
    element_of,
    fetch,
    multiply_add,
    number,
    vector,
    width_of,
)
from treadle.codegen.llvm.lanes import Lanes
from treadle.codegen.llvm.masks import Masks
from treadle.codegen.llvm.matmuls import MatmulWriter
from treadle.codegen.llvm.module import Module
from treadle.codegen.llvm.patterns import ANYWHERE, Start
from treadle.codegen.llvm.scalars import register_element
from treadle.codegen.llvm.transpose import run_of, transposition
from treadle.codegen.llvm.transpose import write as write_transposed
from treadle.ir.literal import to_numpy
from treadle.kernel.access import accesses, loads_in, locals_in
from treadle.kernel.arithmetic import identity
from treadle.kernel.cost import LINE, outermost, padded, statements
from treadle.kernel.index import Index
from treadle.kernel.mapped import sums_of
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
    Position,
    Role,
    Set,
    Statement,
    Store,
    Update,
    Value,
    Within,
)
from treadle.kernel.plan import CUT
from treadle.kernel.traverse import subvalues, walk


def render(kernel: Kernel, name: str, module: Module, linkage: str = "internal") -> None:
    """Add a kernel to a module."""
    given = [Reg("ptr noalias", f"%b{i}") for i, _ in enumerate(kernel.buffers)]
    bounds = [Reg("i64", "%begin"), Reg("i64", "%end"), Reg("ptr noalias", "%scratch")]
    function = Function(name, [*bounds, *given], linkage=linkage)
    pointers = {b.name: Reg("ptr", p.text) for b, p in zip(kernel.buffers, given, strict=True)}
    offset = 0
    for buffer in kernel.scratch:
        pointers[buffer.name] = function.offset(Reg("ptr", "%scratch"), offset)
        offset += padded(buffer.nbytes)
    types = {b.name: b.dtype for b in (*kernel.buffers, *kernel.scratch)}
    writer = _Writer(function, module, pointers, types)
    writer.private = {b.name: b.lanes for b in kernel.scratch if b.lanes > 1}
    writer.outermost(kernel)
    function.do("ret void")
    module.add(function)


_FUSED = (dtypes.float32, dtypes.float64)


class _Writer(Masks):
    """Writes statements. A local is a register; loops carry those that they change."""

    def outermost(self, kernel: Kernel) -> None:
        loop = outermost(kernel)
        begin, end = Reg("i64", "%begin"), Reg("i64", "%end")
        if loop is not None:
            self.statements(kernel.body[:-1])
            if loop.role is Role.VECTOR:
                self.vector_loop(loop, begin, end, CUT)
            else:
                self.scalar_loop(loop, begin, end)
            return
        # One iteration: for the thread that has it.
        then, after = self.f.fresh("then"), self.f.fresh("after")
        self.f.branch(self.f.compare("icmp slt", begin, end), then, after)
        self.f.label(then)
        self.statements(kernel.body)
        self.f.jump(after)
        self.f.label(after)

    def statements(self, body: Sequence[Statement]) -> None:
        for statement in body:
            self.write(statement)

    def write(self, statement: Statement) -> None:
        match statement:
            case For(var, role, _, end):
                start = number(0, "i64")
                stop = number(var.extent, "i64") if end is None else self.index(end)
                move = transposition(statement, self.module.machine) if self.width == 1 else None
                if move is not None:
                    write_transposed(self.f, move, self.variables, self.address)
                elif role is Role.VECTOR and self.width == 1:
                    self.vector_loop(statement, start, stop)
                elif self.width > 1 and self._is_short(statement):
                    self.written_out(statement)
                else:
                    self.scalar_loop(statement, start, stop)
            case Let(local, value):
                self.let(local, value)
            case Set(local, value):
                self.locals[local] = self.value(value)
                self.shared.pop(local, None)
            case Accumulate(local, op, value):
                self.shared.pop(local, None)
                self.locals[local] = self.accumulated(self.locals[local], op, value)
            case Store(buffer, index, value, guard):
                self.store(buffer, index, value, guard)
            case Update(buffer, index, value):
                self.update(buffer, index, value)
            case Matmul():
                self.multiply(statement)
            case Barrier():
                pass  # one thread runs all iterations in order: it waits for nobody
            case LibraryCall(name):
                raise AssertionError(f"there is no library for {name} here")
            case _:
                assert_never(statement)

    def let(self, local: str, value: Value) -> None:
        """What all lanes agree on may be an index: it is one number, too."""
        self.shared.pop(local, None)
        if self.lanes is None or not value.dtype.is_integer or not self._agrees(value):
            self.locals[local] = self.value(value)
            return
        self.shared[local] = self._in_lane(0, value)
        self.locals[local] = self.f.splat(self.shared[local], self.width)

    def _agrees(self, value: Value) -> bool:
        """Whether all lanes have the same value."""
        for part in subvalues(value):
            match part:
                case Load(buffer, index):
                    if buffer in self.private or self.lane_step(buffer, index) != 0:
                        return False
                case Position(index) | Within(index):
                    if not self.is_uniform(index):
                        return False
                case Local(name):
                    if name not in self.shared:
                        return False
                case _:
                    pass
        return True

    def multiply(self, matmul: Matmul) -> None:
        dtype = self.types[matmul.target.buffer]
        starts = [self.address(m.buffer, m.index) for m in matmul.matrices]
        writer = MatmulWriter(self.f, self.module, register_element(dtype))
        inner = next(reversed(self.variables), None)  # the loop around it
        apart = None if inner is None else matmul.right.index.factor_of(inner)
        writer.write(matmul, starts, apart or 0, 1 if inner is None else inner.extent)

    def accumulated(self, old: Reg, op: str, value: Value) -> Reg:
        """A product that is added is rounded once, where the machine has an instruction for it."""
        if op == "add" and isinstance(value, Apply) and value.op == "mul" and value.dtype in _FUSED:
            a, b = (self.value(o) for o in value.operands)
            return multiply_add(self.f, a, b, old, self.module.machine.has_fma)
        return self.scalars.apply(op, [old, self.value(value)], value.dtype, value.dtype)

    # Loops

    def scalar_loop(self, loop: For, start: Reg, stop: Reg) -> None:
        """One iteration after the other; what the body changes is carried."""
        names = self._carried(loop)
        self.shared = {n: r for n, r in self.shared.items() if n not in names}
        with self.f.loop(start, stop, 1, [self.locals[n] for n in names]) as state:
            self.variables[loop.var] = state.counter
            self.locals |= dict(zip(names, state.carried, strict=True))
            self._fetch(loop)
            self.inner(loop.body)
            state.next = tuple(self.locals[n] for n in names)
        self.locals |= dict(zip(names, state.results, strict=True))
        del self.variables[loop.var]

    def _fetch(self, loop: For) -> None:
        """What a later iteration copies, asked for now: short runs that are far from each other.

        Processors fetch ahead by themselves along a run, and not from one page to another.
        """
        copy = run_of(loop)
        if copy is None or self.width > 1:
            return
        load, run = copy
        later = (
            load.index + (load.index.factor_of(loop.var) or 0) * self.module.machine.copied_ahead
        )
        inner = next(s.var for s in loop.body if isinstance(s, For))
        self.variables[inner] = number(0, "i64")
        for start in range(0, run, LINE // load.dtype.itemsize):
            fetch(self.f, self.address(load.buffer, later + start), 3)
        del self.variables[inner]

    def _is_short(self, loop: For) -> bool:
        """Whether a loop inside lanes has few statements in all: the taps of a window.

        Lanes that are loaded one by one are as many statements.
        """
        if any(s.stop is not None for s in walk([loop]) if isinstance(s, For)):
            return False
        most = self.module.machine.written_out
        if statements([loop]) > most:
            return False
        apart = sum(self.is_by_lane(a.buffer, a.index) for a in accesses(loop.body))
        return apart * self.width * loop.var.extent <= most * self.module.width

    def written_out(self, loop: For) -> None:
        """One iteration after the other, without a loop."""
        for i in range(loop.var.extent):
            self.variables[loop.var] = number(i, "i64")
            self.inner(loop.body)
        self.variables.pop(loop.var, None)  # an empty loop has none

    def _carried(self, loop: For) -> list[str]:
        """Locals of outside that a loop changes, in order."""
        changing = (s.local for s in walk(loop.body) if isinstance(s, (Accumulate, Set)))
        return [name for name in dict.fromkeys(changing) if name in self.locals]

    def inner(self, body: Sequence[Statement]) -> None:
        """Statements whose own names end with them."""
        known = set(self.locals)
        self.statements(body)
        for name in set(self.locals) - known:
            del self.locals[name]

    def vector_loop(self, loop: For, start: Reg, stop: Reg, cut: int = 1) -> None:
        """Lanes of iterations, then the rest one by one.

        Where the number of iterations is known, narrower vectors take what wide ones leave. Else it
        is a multiple of `cut`, or as many more as the whole loop has.
        """
        widths = self._widths(loop)
        width, least = self.module.width, self.module.machine.least_width
        narrower = [w for w in (width // 2, width // 4) if w >= least]
        narrower = [w for w in narrower if not widths or w < widths[-1]]
        if not (start.text == "0" and stop.text.isdigit()):
            if any(isinstance(s, For) for s in loop.body):  # what is left is not little
                widths += [w for w in narrower if loop.var.extent % width >= w]
            left = loop.var.extent
            begins_at_0 = start.text == "0"
            for width in widths:
                if left < width:
                    continue
                if begins_at_0 or cut % width == 0:
                    self.start = Start(width)
                start = self.lanes_loop(loop, start, self._whole_vectors(start, stop, width), width)
                self.start = ANYWHERE
                left = left % width if cut % width == 0 else width - 1
            if left:
                self.scalar_loop(loop, start, stop)
            return
        at, end = 0, int(stop.text)
        for width in (*widths, *narrower):
            whole = at + (end - at) // width * width
            step = width if self.is_clearer(loop, at, whole, width) else max(width, whole - at)
            for first in range(at, whole, step):
                last = min(first + step, whole)
                self.start = Start(0, first) if last == first + width else Start(width)
                self.lanes_loop(loop, number(first, "i64"), number(last, "i64"), width)
            at = max(at, whole)
        self.start = ANYWHERE
        if at < end:
            self.scalar_loop(loop, number(at, "i64"), stop)

    def _widths(self, loop: For) -> list[int]:
        """Several vectors at a time where sums would wait for each other."""
        machine, width = self.module.machine, self.module.width
        if width == 1:
            return []
        found = [width]
        if self._carried(loop):
            found = [width * machine.accumulating_vectors, width]
        elif any(isinstance(s, For) for s in loop.body):
            found = [width * machine.summing_vectors, width]
        used = {a.buffer for a in accesses(loop.body)} if self.private else ()
        most = min((n for b, n in self.private.items() if b in used), default=found[0])
        return list(dict.fromkeys(min(w, most) for w in found))

    def lanes_loop(self, loop: For, start: Reg, stop: Reg, width: int) -> Reg:
        """Iterations in whole vectors of a width; where they end."""
        sums = {n: s for n, s in sums_of(loop).items() if n in self.locals}
        names, before = list(sums), {n: self.locals[n] for n in sums}
        spread = [
            number(identity(s.op, s.value.dtype), vector(before[n].type, width))
            for n, s in sums.items()
        ]
        is_once = self.start.multiple == 0
        once = nullcontext(Loop(start, tuple(spread)))
        with once if is_once else self.f.loop(start, stop, width, spread) as state:
            self.lanes, self.width, self.apart = loop.var, width, width
            self.variables[loop.var] = state.counter
            self.locals |= dict(zip(names, state.carried, strict=True))
            outer = self._widened_locals(names)
            self.shared = dict(outer)
            self.inner(loop.body)
            state.next = tuple(self.locals[n] for n in names)
            self.locals |= outer
            self.shared = {}
            self.lanes, self.width, self.apart = None, 1, 1
        results = state.next if is_once else state.results
        for name, lanes in zip(names, results, strict=True):
            self.locals[name] = self._folded(sums[name], before[name], lanes)
        return stop

    def _whole_vectors(self, start: Reg, stop: Reg, width: int) -> Reg:
        """Where the last whole vector ends."""
        f = self.f
        count = f.binary("sub", stop, start)
        steps = f.binary("sdiv", count, width)
        return f.binary("add", start, f.binary("mul", steps, width))

    def _widened_locals(self, carried: Sequence[str]) -> dict[str, Reg]:
        """Locals of outside in all lanes; what they were, to put back."""
        outer = {n: r for n, r in self.locals.items() if n not in carried and width_of(r.type) == 1}
        self.locals |= {n: self.f.splat(r, self.width) for n, r in outer.items()}
        return outer

    def _folded(self, summed: Accumulate, scalar: Reg, lanes: Reg) -> Reg:
        """The lanes combined in pairs, then with what was there: always in the same order."""
        op, dtype, width = summed.op, summed.value.dtype, width_of(lanes.type)
        while width > 1:
            width //= 2
            halves = [
                self.f.shuffle(lanes, lanes, range(start, start + width))
                if width > 1
                else self.f.extract(lanes, start)
                for start in (0, width)
            ]
            lanes = self.scalars.apply(op, halves, dtype, dtype)
        return self.scalars.apply(op, [scalar, lanes], dtype, dtype)

    # Values

    def value(self, value: Value) -> Reg:
        match value:
            case Literal(_, dtype):
                exact = to_numpy(value.value, dtype.numpy).item()
                return number(exact, vector(register_element(dtype), self.width))
            case Load(buffer, index, dtype):
                return self.load(buffer, index, dtype)
            case Local(name, _):
                return self.locals[name]
            case Position(index, dtype):
                lanes = self.index_lanes(index)
                is_short = element_of(lanes.type) == "i32"
                return self.scalars.convert(
                    lanes, dtypes.int32 if is_short else dtypes.int64, dtype
                )
            case Apply(op, operands, dtype):
                given = [self.value(o) for o in operands]
                return self.scalars.apply(op, given, operands[-1].dtype, dtype)
            case Convert(inner, dtype):
                return self.scalars.convert(self.value(inner), inner.dtype, dtype)
            case Within(index, low, high):
                return self.within(self.index_lanes(index), low, high)
            case Guarded(guard, inner, other, _):
                return self.guarded(guard, inner, other)
            case _:
                assert_never(value)

    def within(self, lanes: Reg, low: int, high: int) -> Reg:
        """low ≤ lanes < high as one unsigned comparison."""
        moved = self.f.binary("sub", lanes, low)
        return self.f.compare("icmp ult", moved, max(0, high - low))

    def guarded(self, guard: Value, inner: Value, other: Value) -> Reg:
        """A branch where all lanes agree; a choice of what masked loads give; or lane by lane."""
        if self.width == 1 or self._agrees(guard):
            holds = self.value(guard) if self.width == 1 else self._in_lane(0, guard)
            return self._branch(holds, inner, other)
        mask, otherwise = self.value(guard), self.value(other)
        mask = mask if self.mask is None else self.f.binary("and", mask, self.mask)
        loads = loads_in(inner)
        if all(map(self.is_masked, loads)):
            return self._masked(mask, inner, otherwise)
        if all(self.is_masked(a) or self.is_maskable(a) for a in loads):
            return self._where_any(mask, inner, otherwise)
        result = otherwise
        for lane in range(self.width):
            result = self._guarded_lane(self.f.extract(mask, lane), result, inner, lane)
        return result

    def _masked(self, mask: Reg, inner: Value, otherwise: Reg) -> Reg:
        if isinstance(inner, Load):
            return self.masked_load(mask, inner, otherwise)
        outside, self.mask = self.mask, mask
        found = self.value(inner)  # arithmetic harms nobody where it is not wanted
        self.mask = outside
        return self.f.select(mask, found, otherwise)

    def _where_any(self, mask: Reg, inner: Value, otherwise: Reg) -> Reg:
        """What is read where some lane wants it: one element for all, or lanes that are gathered.

        A gather costs as much where few lanes are wanted, and often none is: at an edge.
        """
        before, some = self.f.block, Lanes(self.f).any(mask)
        with self.f.when(some):
            found, end = self._masked(mask, inner, otherwise), self.f.block
        return self.f.phi((found, end), (otherwise, before))

    def _branch(self, condition: Reg, inner: Value, other: Value) -> Reg:
        f = self.f
        then, otherwise, after = map(f.fresh, ("then", "else", "join"))
        f.branch(condition, then, otherwise)
        f.label(then)
        a, from_then = self.value(inner), f.block
        f.jump(after)
        f.label(otherwise)
        b, from_else = self.value(other), f.block
        f.jump(after)
        f.label(after)
        return f.phi((a, from_then), (b, from_else))

    def _guarded_lane(self, condition: Reg, result: Reg, inner: Value, lane: int) -> Reg:
        f = self.f
        before = f.block
        with f.when(condition):
            value = f.insert(result, self._in_lane(lane, inner), lane)
            end = f.block
        return f.phi((value, end), (result, before))

    def _in_lane(self, lane: int, value: Value) -> Reg:
        """A value for one lane alone."""
        assert self.lanes is not None
        locals_, var, width = self.locals, self.lanes, self.width
        base = self.variables[var]
        used = {n: locals_[n] for n in sorted(locals_in(value))}
        self.locals = {n: self._lane_of(r, lane) for n, r in used.items()}
        self.variables[var] = self.f.binary("add", base, lane) if lane else base
        self.lanes, self.width, self.lane = None, 1, lane
        mask, self.mask = self.mask, None  # the one lane is wanted
        result = self.value(value)
        self.locals, self.lanes, self.width, self.lane = locals_, var, width, 0
        self.variables[var], self.mask = base, mask
        return result

    # Stores

    def store(self, buffer: str, index: Index, value: Value, guard: Within | None) -> None:
        dtype = self.types[buffer]
        if guard is None and (self.lanes is None or self.lane_step(buffer, index) == 1):
            self.stored(self.value(value), self.address(buffer, index), dtype)
            return
        found = self.value(value)
        for lane in range(self.width):
            element = self._lane_of(found, lane)
            with nullcontext() if guard is None else self.f.when(self._held(guard, lane)):
                self.stored(element, self.address(buffer, index, lane), dtype)

    def _lane_of(self, value: Reg, lane: int) -> Reg:
        return value if width_of(value.type) == 1 else self.f.extract(value, lane)

    def _held(self, guard: Within, lane: int) -> Reg:
        """Whether a guard holds in one lane."""
        return self.within(self.index(guard.index, lane), guard.low, guard.high)

    def update(self, buffer: str, index: Index, value: Value) -> None:
        """Lane by lane, unless lanes are neighbours: other indices are not said to be distinct."""
        dtype, found = self.types[buffer], self.value(value)
        if self.lanes is not None and self.lane_step(buffer, index) == 1:
            start = self.address(buffer, index)
            old = self.loaded(start, dtype, self.width)
            self.stored(self.scalars.apply("add", [old, found], dtype, dtype), start, dtype)
            return
        for lane in range(self.width):
            element = self._lane_of(found, lane)
            address = self.address(buffer, index, lane)
            old = self.loaded(address, dtype, 1)
            self.stored(self.scalars.apply("add", [old, element], dtype, dtype), address, dtype)
