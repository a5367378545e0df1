"""Checks a kernel: names, types, every access in bounds, and that iterations do not race.

Bounds hold by the ranges of indices, or by a guard that the access stands under. Two iterations of
a parallel or vector loop never meet in memory (`races`). Scratch belongs to a thread, which runs
its iterations of a parallel loop one after another, but lanes of a vector loop run in lockstep: in
scratch they may not meet either, unless it is private to each of them. Kernels that are mapped to a
GPU must also have a barrier wherever threads meet, and fit its memory (`verify_mapping`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import assert_never

from treadle.base import dtypes
from treadle.base.dtypes import DType, accumulator
from treadle.base.errors import GraphError
from treadle.kernel.access import Access, accesses, changed_in, locals_in, names_in
from treadle.kernel.index import (
    Bounded,
    Data,
    Index,
    Quotient,
    Remainder,
    Var,
    data_locals,
    uses,
)
from treadle.kernel.mapped import SHARED_OUT, group_rows, is_of_warps
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
    Within,
    standalone_matmul,
)
from treadle.kernel.races import conflicts_in
from treadle.kernel.target import Mapping
from treadle.kernel.traverse import subvalues, values_of, walk
from treadle.kernel.verify_mapping import verify_mapping

INDEPENDENT = (Role.PARALLEL, Role.GRID, Role.GROUP, Role.SUBGROUP, Role.VECTOR)
ACCUMULATORS = ("add", "mul", "max", "min")


@dataclass(frozen=True)
class _Scope:
    """What is known at a point: loops around it, locals, and guards that hold."""

    loops: tuple[tuple[Var, Role], ...]
    locals: dict[str, tuple[DType, int]]  # dtype, and how many loops were open when it was named
    guards: tuple[Within, ...]


def verify(kernel: Kernel, mapping: Mapping | None = None) -> Kernel:
    """The kernel itself if all holds; a GraphError that names the statement otherwise.

    A kernel that is mapped to a GPU is held to the limits of the mapping, where it is given.
    """
    _Checker(kernel).check()
    verify_mapping(kernel, mapping)
    return kernel


class _Checker:
    def __init__(self, kernel: Kernel):
        self.kernel = kernel
        self.buffers = {b.name: b for b in (*kernel.buffers, *kernel.scratch)}
        self.own = {b.name for b in kernel.scratch}
        self.written = {b.name for b in kernel.outputs} | self.own
        self.private = {b.name: b.lanes for b in kernel.scratch if b.lanes > 1}
        if len(self.buffers) != len(kernel.buffers) + len(kernel.scratch):
            raise self.wrong("two buffers have one name")

    def wrong(self, cause: str) -> GraphError:
        return GraphError("verify", f"kernel {self.kernel.name}: {cause}")

    def check(self) -> None:
        if any(b.lanes > 1 for b in self.kernel.buffers):
            raise self.wrong("memory that others see is private to lanes")
        self.statements(self.kernel.body, _Scope((), {}, ()))
        self.only_in_lanes(self.kernel.body)

    def only_in_lanes(self, body: tuple[Statement, ...]) -> None:
        """Private memory is that of one vector loop's lanes: nothing else touches it."""
        loops: dict[str, int] = {}
        for loop, found in _by_vector_loop(body):
            for name in {a.buffer for a in found} & self.private.keys():
                if loop is None or loops.setdefault(name, id(loop)) != id(loop):
                    raise self.wrong(f"{name} is private to lanes of more than one loop")

    def statements(self, body: tuple[Statement, ...], scope: _Scope) -> None:
        known = dict(scope.locals)
        inner = _Scope(scope.loops, known, scope.guards)
        for statement in body:
            self.statement(statement, inner)

    def statement(self, statement: Statement, scope: _Scope) -> None:
        match statement:
            case For(var, role, body, stop):
                if any(var.name == v.name for v, _ in scope.loops):
                    raise self.wrong(f"the loop variable {var.name} is used twice")
                if stop is not None:
                    self.index(stop, scope)
                    if stop.range[1] > var.extent:
                        raise self.wrong(f"the loop over {var.name} may pass {var.extent}")
                self.statements(
                    body, _Scope((*scope.loops, (var, role)), scope.locals, scope.guards)
                )
                self.races(statement)
                if role is Role.VECTOR or statement.lanes > 1:
                    self.lockstep(statement)
                elif role in SHARED_OUT:
                    self.sums(statement)
            case Let(local, value):
                scope.locals[local] = (self.value(value, scope), len(scope.loops))
            case Accumulate(local, op, value):
                self.accumulate(local, op, value, scope)
            case Set(local, value):
                self.set(local, value, scope)
            case Store(buffer, index, value) | Update(buffer, index, value):
                guard = statement.guard if isinstance(statement, Store) else None
                held = () if guard is None else _conjuncts(guard)
                scope = _Scope(scope.loops, scope.locals, scope.guards + held)
                target = self.access(buffer, index, scope)
                if buffer not in self.written:
                    raise self.wrong(f"{buffer} is written but is not an output")
                self.same(target.dtype, self.value(value, scope), f"a store to {buffer}")
            case Barrier():
                pass  # where it stands is the mapping's
            case Matmul():
                self.multiply(statement, scope)
            case LibraryCall():
                self.called(statement, scope)
            case _:
                assert_never(statement)

    def called(self, statement: LibraryCall, scope: _Scope) -> None:
        """Every view inside its buffer, results apart from operands, and nothing around it."""
        if scope.loops:
            raise self.wrong(f"{statement.name} is inside a loop")
        given = {v.buffer for v in statement.operands}
        for view in (*statement.results, *statement.operands):
            target = self.buffers.get(view.buffer)
            low, high = view.range
            if target is None or low < 0 or high >= target.size:
                raise self.wrong(f"{statement.name} may touch {view.buffer} from {low} to {high}")
        for view in statement.results:
            if view.buffer not in self.written or view.buffer in given:
                raise self.wrong(f"{statement.name} may not write {view.buffer}")

    def multiply(self, statement: Matmul, scope: _Scope) -> None:
        target, left, right = statement.matrices
        shapes = [(m.rows.count, m.columns.count) for m in statement.matrices]
        if shapes[0] != (shapes[1][0], shapes[2][1]) or shapes[1][1] != shapes[2][0]:
            raise self.wrong(f"a product of {shapes[1]} and {shapes[2]} gives no {shapes[0]}")
        is_whole = standalone_matmul(self.kernel) is not None
        if statement.bias is not None:
            bias = self.buffers.get(statement.bias)
            if not is_whole or bias is None or bias.size < target.columns.count:
                raise self.wrong(f"{statement.bias} is no bias of this product")
        if not is_whole and (target.columns.stride, right.columns.stride) != (1, 1):
            raise self.wrong("columns of a product are not next to each other")
        into, *found = (self.matrix(m, scope).dtype for m in statement.matrices)
        is_plain = into is found[0] and into in (dtypes.float32, dtypes.float64)
        is_narrow = is_whole and into.is_float and into in (found[0], accumulator(found[0]))
        if found[0] is not found[1] or not (is_plain or is_narrow):
            raise self.wrong(f"a product of {found[0]} and {found[1]} into {into}")
        if target.buffer not in self.written or target.buffer in (left.buffer, right.buffer):
            raise self.wrong(f"a product is written to {target.buffer}, which it may not be")

    def matrix(self, matrix: Matrix, scope: _Scope) -> Buffer:
        """A matrix whose every element lies inside its buffer."""
        target = self.buffers.get(matrix.buffer)
        if target is None:
            raise self.wrong(f"{matrix.buffer} is not a buffer of the kernel")
        self.index(matrix.index, scope)
        low, high = matrix.range
        if not (low >= 0 and high < target.size):
            raise self.wrong(f"{matrix.buffer}[{matrix.index}] may be {low} to {high}")
        return target

    def races(self, loop: For) -> None:
        """Iterations that run side by side meet in no buffer."""
        if loop.role not in INDEPENDENT:
            return
        found = conflicts_in(loop, self.exempt(loop))
        if found:
            kind = "lanes" if loop.role is Role.VECTOR else "iterations"
            raise self.wrong(f"{kind} of {loop.var.name} may meet in {', '.join(sorted(found))}")

    def exempt(self, loop: For) -> Collection[str]:
        """Buffers of which every thread that runs iterations of a loop has its own."""
        if loop.role is Role.VECTOR:
            return self.private
        if loop.role not in SHARED_OUT:
            return self.own
        return group_rows(self.kernel) if is_of_warps(loop) else ()

    def lockstep(self, loop: For) -> None:
        """Lanes make the same statements at the same time; what they sum, they sum apart."""
        named = names_in(loop.body) | changed_in(loop.body)
        for s in walk(loop.body):
            match s:
                case Matmul() | LibraryCall():
                    raise self.wrong(f"lanes of {loop.var.name} share a product or a library call")
                case For(var, _, _, stop) if stop is not None:
                    lanes = any(uses(a, loop.var) for a, _ in stop.terms)
                    if lanes or not named.isdisjoint(data_locals(stop)):
                        raise self.wrong(f"lanes of {loop.var.name} end {var.name} at other times")
        self.sums(loop)

    def sums(self, loop: For) -> None:
        """A local of outside that lanes accumulate has one op, and is read by none of them."""
        own = names_in(loop.body)
        every = list(walk(loop.body))
        outer = [s for s in every if isinstance(s, Accumulate) and s.local not in own]
        ops = {s.local: s.op for s in outer}
        for s in outer:
            if ops[s.local] != s.op:
                raise self.wrong(f"lanes accumulate {s.local} by {ops[s.local]} and {s.op}")
        for statement in every if ops else ():
            if not ops.keys().isdisjoint(_read_by(statement)):
                raise self.wrong(f"lanes of {loop.var.name} read what they accumulate")

    def accumulate(self, local: str, op: str, value: Value, scope: _Scope) -> None:
        if local not in scope.locals or op not in ACCUMULATORS:
            raise self.wrong(f"{local} is not an accumulator, or {op} does not accumulate")
        dtype, depth = scope.locals[local]
        self.same(dtype, self.value(value, scope), f"an accumulation into {local}")
        if any(role in (Role.PARALLEL, Role.GRID) for _, role in scope.loops[depth:]):
            raise self.wrong(f"iterations of a parallel loop accumulate into {local}")

    def set(self, local: str, value: Value, scope: _Scope) -> None:
        if local not in scope.locals:
            raise self.wrong(f"{local} is set before it is named")
        dtype, depth = scope.locals[local]
        self.same(dtype, self.value(value, scope), f"{local}")
        if any(role in INDEPENDENT for _, role in scope.loops[depth:]):
            raise self.wrong(f"independent iterations set {local}")

    def same(self, expected: DType, found: DType, where: str) -> None:
        if expected is not found:
            raise self.wrong(f"{where} has {found}, not {expected}")

    def value(self, value: Value, scope: _Scope) -> DType:
        match value:
            case Literal():
                pass
            case Position(index, _):
                self.index(index, scope)
            case Load(buffer, index, dtype):
                self.same(self.access(buffer, index, scope).dtype, dtype, f"a load of {buffer}")
            case Local(name, dtype):
                if name not in scope.locals:
                    raise self.wrong(f"the local {name} is read before it is named")
                self.same(scope.locals[name][0], dtype, f"the local {name}")
            case Apply(_, operands, _):
                for operand in operands:
                    self.value(operand, scope)
            case Convert(inner, _):
                self.value(inner, scope)
            case Within(index, _, _, _):
                self.index(index, scope)
            case Guarded(guard, inner, other, dtype):
                self.guarded(guard, inner, other, dtype, scope)
            case _:
                assert_never(value)
        return value.dtype

    def guarded(
        self, guard: Value, inner: Value, other: Value, dtype: DType, scope: _Scope
    ) -> None:
        self.same(dtypes.bool_, self.value(guard, scope), "a guard")
        held = _conjuncts(guard)
        under = _Scope(scope.loops, scope.locals, scope.guards + held)
        self.same(dtype, self.value(inner, under), "a guarded value")
        self.same(dtype, self.value(other, scope), "the other of a guarded value")

    def access(self, buffer: str, index: Index, scope: _Scope) -> Buffer:
        if buffer not in self.buffers:
            raise self.wrong(f"{buffer} is not a buffer of the kernel")
        target = self.buffers[buffer]
        self.index(index, scope)
        low, high = index.range
        has_iterations = all(v.extent > 0 for v, _ in scope.loops)
        if has_iterations and not (low >= 0 and high < target.size):
            raise self.wrong(f"{buffer}[{index}] may be {low} to {high}, outside {target}")
        return target

    def index(self, index: Index, scope: _Scope) -> None:
        open_ = {v for v, _ in scope.loops}
        for atom, _ in index.terms:
            match atom:
                case Var():
                    if atom not in open_:
                        raise self.wrong(f"the variable {atom} is used outside its loop")
                case Data(local, _):
                    if local not in scope.locals or not scope.locals[local][0].is_integer:
                        raise self.wrong(f"the index {local} is not an integer local")
                case Bounded(inner, extent):
                    if Within(inner, 0, extent) not in scope.guards:
                        raise self.wrong(f"no guard holds {inner} between 0 and {extent - 1}")
                    self.index(inner, scope)
                case Quotient(inner, _) | Remainder(inner, _):
                    if inner.range[0] < 0:
                        raise self.wrong(f"{atom} divides what may be negative")
                    self.index(inner, scope)


def _by_vector_loop(body: tuple[Statement, ...]) -> Iterator[tuple[For | None, list[Access]]]:
    """Accesses by the outermost vector loop around them; None for those under none."""
    for s in walk(body, lambda loop: loop.role is not Role.VECTOR):
        if not isinstance(s, For):
            yield None, list(accesses([s]))
        elif s.role is Role.VECTOR:
            yield s, list(accesses(s.body))


def _read_by(statement: Statement) -> set[str]:
    """Locals that a statement reads, beside the one that it accumulates."""
    found = set().union(*map(locals_in, values_of(statement)))
    return found | set(
        data_locals(statement.index) if isinstance(statement, (Store, Update)) else ()
    )


def _conjuncts(guard: Value) -> tuple[Within, ...]:
    """The bounds that a guard makes sure of."""
    every = subvalues(guard, lambda v: isinstance(v, Apply) and v.op == "and")
    return tuple(v for v in every if isinstance(v, Within))
