"""Checks a kernel: names, types, every access in bounds, and that iterations do not race.

Bounds hold by the ranges of indices, or by a guard that the access stands under. Two iterations of
a parallel or vector loop never meet in memory (`races`). Scratch belongs to a thread, which runs
its iterations of a parallel loop one after another, but lanes of a vector loop run in lockstep: in
scratch they may not meet either, unless it is private to each of them. Kernels that are mapped to a
GPU must also have a barrier wherever threads meet, and fit its memory (`verify_mapping`).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import assert_never

from treadle.base import dtypes
from treadle.base.dtypes import DType, accumulator
from treadle.base.errors import GraphError
from treadle.kernel.access import accesses, changed_in, locals_in, names_in
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
from treadle.kernel.mapped import SHARED_OUT, group_rows, is_of_warps, sums_of
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
    standalone_matmul,
)
from treadle.kernel.races import conflicts_in
from treadle.kernel.target import Mapping
from treadle.kernel.traverse import subvalues, under_guards, values_of, walk
from treadle.kernel.verify_mapping import verify_mapping

INDEPENDENT = (Role.PARALLEL, Role.GRID, Role.GROUP, Role.SUBGROUP, Role.VECTOR)
ACCUMULATORS = ("add", "mul", "max", "min")


@dataclass(frozen=True)
class _Scope:
    """What is known at a point: loops around it, locals, and guards that hold."""

    loops: tuple[For, ...]
    locals: dict[str, tuple[DType, int]]  # dtype, and how many loops were open when it was named
    guards: tuple[Within, ...] = ()


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
        self.private = {b.name for b in kernel.scratch if b.lanes > 1}
        self.lane_loops: dict[str, For] = {}  # the vector loops that private memory is of
        if len(self.buffers) != len(kernel.buffers) + len(kernel.scratch):
            raise self.wrong("two buffers have one name")

    def wrong(self, cause: str) -> GraphError:
        return GraphError("verify", f"kernel {self.kernel.name}: {cause}")

    def check(self) -> None:
        if any(b.lanes > 1 for b in self.kernel.buffers):
            raise self.wrong("memory that others see is private to lanes")
        self.statements(self.kernel.body, _Scope((), {}))

    def statements(self, body: tuple[Statement, ...], scope: _Scope) -> None:
        inner = replace(scope, locals=dict(scope.locals))
        for statement in body:
            self.bounds(statement, inner)
            self.names(statement, inner)

    def bounds(self, statement: Statement, scope: _Scope) -> None:
        """Whatever a statement touches by itself lies in a buffer, and may be written if it is."""
        is_reached = all(loop.var.extent > 0 for loop in scope.loops)
        for access in accesses([statement]) if not isinstance(statement, For) else ():
            target = self.buffers.get(access.buffer)
            if target is None:
                raise self.wrong(f"{access.buffer} is not a buffer of the kernel")
            low, high = access.index.range
            low, high = low + access.low, high + access.high
            if is_reached and not (low >= 0 and high < target.size):
                where = f"{access.buffer}[{access.index}]"
                raise self.wrong(f"{where} may be {low} to {high}, outside {target}")
            if access.writes and access.buffer not in self.written:
                raise self.wrong(f"{access.buffer} is written but is not an output")
            if access.buffer in self.private:
                self.in_lanes(access.buffer, scope)

    def in_lanes(self, private: str, scope: _Scope) -> None:
        """Private memory is that of one vector loop's lanes: nothing else touches it."""
        loop = next((loop for loop in scope.loops if loop.role is Role.VECTOR), None)
        if loop is None or self.lane_loops.setdefault(private, loop) is not loop:
            raise self.wrong(f"{private} is private to lanes of more than one loop")

    def names(self, statement: Statement, scope: _Scope) -> None:
        """What a statement names and uses is there, and has the dtypes that it says."""
        match statement:
            case For():
                self.iterations(statement, scope)
            case Let(local, value):
                scope.locals[local] = (self.dtype_of(value, scope), len(scope.loops))
            case Accumulate() | Set():
                self.change(statement, scope)
            case Store(buffer, index, value) | Update(buffer, index, value):
                guard = statement.guard if isinstance(statement, Store) else None
                held = () if guard is None else _conjuncts(guard)
                scope = replace(scope, guards=scope.guards + held)
                self.index(index, scope)
                dtype = self.buffers[buffer].dtype
                self.same(dtype, self.dtype_of(value, scope), f"a store to {buffer}")
            case Barrier():
                pass  # where it stands is the mapping's
            case Matmul():
                self.multiply(statement, scope)
            case LibraryCall(name, results, operands):
                shared = {v.buffer for v in results} & {v.buffer for v in operands}
                if scope.loops or shared:
                    raise self.wrong(f"{name} is inside a loop, or writes what it reads")
            case _:
                assert_never(statement)

    def iterations(self, loop: For, scope: _Scope) -> None:
        var, stop = loop.var, loop.stop
        if any(var.name == outer.var.name for outer in scope.loops):
            raise self.wrong(f"the loop variable {var.name} is used twice")
        if stop is not None:
            self.index(stop, scope)
            if stop.range[1] > var.extent:
                raise self.wrong(f"the loop over {var.name} may pass {var.extent}")
        self.statements(loop.body, replace(scope, loops=(*scope.loops, loop)))
        self.races(loop)
        if loop.role is Role.VECTOR or loop.lanes > 1:
            self.lockstep(loop)
        elif loop.role in SHARED_OUT:
            self.sums(loop)

    def change(self, statement: Accumulate | Set, scope: _Scope) -> None:
        """A local is changed by iterations in order; lanes and threads may accumulate too."""
        local, is_sum = statement.local, isinstance(statement, Accumulate)
        if local not in scope.locals:
            raise self.wrong(f"{local} is changed before it is named")
        if isinstance(statement, Accumulate) and statement.op not in ACCUMULATORS:
            raise self.wrong(f"{statement.op} does not accumulate")
        dtype, depth = scope.locals[local]
        self.same(dtype, self.dtype_of(statement.value, scope), f"a change of {local}")
        apart: tuple[Role, ...] = (Role.PARALLEL, Role.GRID) if is_sum else INDEPENDENT
        if isinstance(statement, Accumulate) and statement.scanned:
            apart = (Role.PARALLEL, Role.GRID, Role.VECTOR)
            shared = [loop for loop in scope.loops[depth:] if loop.role in SHARED_OUT]
            if shared and (len(scope.loops) - depth > 1 or statement not in shared[0].body):
                raise self.wrong(f"{local} is scanned by more than one loop")
        if any(loop.role in apart for loop in scope.loops[depth:]):
            raise self.wrong(f"independent iterations set or accumulate into {local}")

    def multiply(self, statement: Matmul, scope: _Scope) -> None:
        target, left, right = statement.matrices
        shapes = [(m.rows.count, m.columns.count) for m in statement.matrices]
        if shapes[0] != (shapes[1][0], shapes[2][1]) or shapes[1][1] != shapes[2][0]:
            raise self.wrong(f"a product of {shapes[1]} and {shapes[2]} gives no {shapes[0]}")
        is_whole = standalone_matmul(self.kernel) is not None
        if statement.bias is not None and not is_whole:
            raise self.wrong(f"{statement.bias} is no bias of this product")
        factors = {self.buffers[name].dtype for name, _ in statement.scales}
        if factors - {dtypes.float32} or len(statement.scales) > 2:
            raise self.wrong(f"{statement.scales} are no scales of a product")
        into, *found = (self.buffers[m.buffer].dtype for m in statement.matrices)
        own = {b.name for b in self.kernel.scratch}
        # Warps of a group multiply matrices of float16 in its memory, which may lie either way.
        is_of_group = all(m.buffer in own for m in statement.matrices)
        is_of_group = is_of_group and found[0] is dtypes.float16 and into is dtypes.float32
        apart = (target.columns.stride, right.columns.stride) != (1, 1)
        if apart and not (is_whole or is_of_group):
            raise self.wrong("columns of a product are not next to each other")
        is_plain = into is found[0] and into in (dtypes.float32, dtypes.float64)
        is_narrow = is_whole and into.is_float and into in (found[0], accumulator(found[0]))
        is_narrow = is_narrow or is_of_group
        is_float8 = is_whole and into in (dtypes.bfloat16, dtypes.float32)
        is_float8 = is_float8 and all(d in dtypes.FLOAT8 for d in found)
        if not is_float8 and (found[0] is not found[1] or not (is_plain or is_narrow)):
            raise self.wrong(f"a product of {found[0]} and {found[1]} into {into}")
        if target.buffer in (left.buffer, right.buffer):
            raise self.wrong(f"a product is written to {target.buffer}, which it may not be")
        for matrix in statement.matrices:
            self.index(matrix.index, scope)

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
        ops = {local: s.op for local, s in sums_of(loop).items()}
        every = list(walk(loop.body))
        for s in every:
            if isinstance(s, Accumulate) and ops.get(s.local, s.op) != s.op:
                raise self.wrong(f"lanes accumulate {s.local} by {ops[s.local]} and {s.op}")
        for at, s in enumerate(loop.body):
            if isinstance(s, Accumulate) and s.scanned and s.local in ops:
                # What comes after it in an iteration reads what the iterations so far gave.
                before = (x for inner in loop.body[:at] for x in walk([inner]))
                if any(s.local in _read_by(x) for x in before) or s.local in _read_by(s):
                    raise self.wrong(f"{s.local} is read before it is scanned")
                twice = [x for x in every if isinstance(x, Accumulate) and x.local == s.local]
                if len(twice) > 1:
                    raise self.wrong(f"{s.local} is accumulated beside its scan")
                del ops[s.local]
        for statement in every if ops else ():
            if not ops.keys().isdisjoint(_read_by(statement)):
                raise self.wrong(f"lanes of {loop.var.name} read what they accumulate")

    def same(self, expected: DType, found: DType, where: str) -> None:
        if expected is not found:
            raise self.wrong(f"{where} has {found}, not {expected}")

    def dtype_of(self, value: Value, scope: _Scope) -> DType:
        """The dtype of a value, all parts of which hold what they say."""
        for part, guards in under_guards(value):
            held = [w for guard, holds in guards if holds for w in _conjuncts(guard)]
            inner = replace(scope, guards=(*scope.guards, *held)) if held else scope
            self.part(part, inner)
        return value.dtype

    def part(self, value: Value, scope: _Scope) -> None:
        """A value by itself, whatever it is computed from."""
        match value:
            case Literal() | Apply() | Convert():
                pass
            case Position(index) | Within(index):
                self.index(index, scope)
            case Load(buffer, index, dtype):
                self.index(index, scope)
                self.same(self.buffers[buffer].dtype, dtype, f"a load of {buffer}")
            case Local(name, dtype):
                if name not in scope.locals:
                    raise self.wrong(f"the local {name} is read before it is named")
                self.same(scope.locals[name][0], dtype, f"the local {name}")
            case Guarded(guard, inner, other, dtype):
                self.same(dtypes.bool_, guard.dtype, "a guard")
                self.same(dtype, inner.dtype, "a guarded value")
                self.same(dtype, other.dtype, "the other of a guarded value")
            case _:
                assert_never(value)

    def index(self, index: Index, scope: _Scope) -> None:
        open_ = {loop.var for loop in scope.loops}
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
