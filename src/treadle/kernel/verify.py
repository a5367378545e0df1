"""Checks a kernel: names, types, every access in bounds, and that parallel turns do not collide.

Bounds hold by the ranges of indices, or by a guard that the access stands under. Two turns of a
parallel loop never write one place: the place, as a function of the loop's variables, is a
mixed-radix number in which the parallel variable has a digit of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import assert_never

from treadle.base import dtypes
from treadle.base.dtypes import DType, accumulator
from treadle.base.errors import GraphError
from treadle.kernel.access import accesses, is_local
from treadle.kernel.cost import outermost
from treadle.kernel.index import (
    Atom,
    Bounded,
    Data,
    Index,
    Quotient,
    Remainder,
    Var,
    atom_range,
    opened,
    variable,
)
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
    Within,
    whole_product,
)

INDEPENDENT = (Role.PARALLEL, Role.VECTOR)
ACCUMULATORS = ("add", "mul", "max", "min")


@dataclass(frozen=True)
class _Scope:
    """What is known at a point: loops around it, locals, and guards that hold."""

    loops: tuple[tuple[Var, Role], ...]
    locals: dict[str, tuple[DType, int]]  # dtype, and how many loops were open when it was named
    guards: tuple[Within, ...]


def verify(kernel: Kernel) -> Kernel:
    """The kernel itself if all holds; a GraphError that names the statement otherwise."""
    _Checker(kernel).check()
    return kernel


class _Checker:
    def __init__(self, kernel: Kernel):
        self.kernel = kernel
        self.buffers = {b.name: b for b in (*kernel.buffers, *kernel.scratch)}
        self.own = {b.name for b in kernel.scratch}
        self.written = {b.name for b in kernel.outputs} | self.own
        self.places: dict[tuple[str, tuple[tuple[Var, Role], ...]], list[Index]] = {}
        if len(self.buffers) != len(kernel.buffers) + len(kernel.scratch):
            raise self.wrong("two buffers have one name")

    def wrong(self, cause: str) -> GraphError:
        return GraphError("verify", f"kernel {self.kernel.name}: {cause}")

    def check(self) -> None:
        self.statements(self.kernel.body, _Scope((), {}, ()))
        self.apart()

    def apart(self) -> None:
        """What a turn of the outermost loop reads of an output, no other turn writes."""
        loop = outermost(self.kernel)
        if loop is None or loop.var.extent < 2:
            return
        every = list(accesses(loop.body))
        read = {a.buffer for a in every if not a.writes}
        for buffer in self.kernel.outputs:
            touching = [a for a in every if a.buffer == buffer.name]
            if buffer.name not in read:
                continue
            for a in touching:
                if not is_local(a, variable(loop.var), buffer.size, loop.var.extent):
                    raise self.wrong(f"turns of {loop.var.name} meet in {a.buffer}[{a.index}]")

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
                self.disjoint(buffer, index, scope)
            case Multiply():
                self.multiply(statement, scope)
            case Library():
                self.routine(statement, scope)
            case _:
                assert_never(statement)

    def routine(self, statement: Library, scope: _Scope) -> None:
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

    def multiply(self, statement: Multiply, scope: _Scope) -> None:
        target, left, right = statement.matrices
        shapes = [(m.rows.count, m.columns.count) for m in statement.matrices]
        if shapes[0] != (shapes[1][0], shapes[2][1]) or shapes[1][1] != shapes[2][0]:
            raise self.wrong(f"a product of {shapes[1]} and {shapes[2]} gives no {shapes[0]}")
        is_whole = whole_product(self.kernel) is not None
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
        self.disjoint_matrix(target, scope)

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

    def disjoint_matrix(self, matrix: Matrix, scope: _Scope) -> None:
        """As for one place, with the matrix's own axes as two loops around it."""
        index, loops = matrix.index, scope.loops
        for stem, axis in (("row", matrix.rows), ("column", matrix.columns)):
            if axis.count > 1:
                reach = axis.range[1] - axis.range[0] + 1
                var = Var(f"{stem} of {matrix.buffer}", reach if axis.listed else axis.count)
                index = index + Index(((var, 1 if axis.listed else axis.stride),))
                loops = (*loops, (var, Role.UNROLLED))
        self.disjoint(matrix.buffer, index, _Scope(loops, scope.locals, scope.guards))

    def accumulate(self, local: str, op: str, value: Value, scope: _Scope) -> None:
        if local not in scope.locals or op not in ACCUMULATORS:
            raise self.wrong(f"{local} is not an accumulator, or {op} does not accumulate")
        dtype, depth = scope.locals[local]
        self.same(dtype, self.value(value, scope), f"an accumulation into {local}")
        if any(role is Role.PARALLEL for _, role in scope.loops[depth:]):
            raise self.wrong(f"turns of a parallel loop accumulate into {local}")

    def set(self, local: str, value: Value, scope: _Scope) -> None:
        if local not in scope.locals:
            raise self.wrong(f"{local} is set before it is named")
        dtype, depth = scope.locals[local]
        self.same(dtype, self.value(value, scope), f"{local}")
        if any(role in INDEPENDENT for _, role in scope.loops[depth:]):
            raise self.wrong(f"independent turns set {local}")

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
        has_turns = all(v.extent > 0 for v, _ in scope.loops)
        if has_turns and not (low >= 0 and high < target.size):
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

    def disjoint(self, buffer: str, index: Index, scope: _Scope) -> None:
        """Each independent variable of more than one turn has a digit of its own in the place.

        Several stores to one buffer count as one whose lowest digit chooses among them.
        """
        if buffer in self.own:
            return  # each thread has its own; a parallel loop inside is one thread's
        place = opened(index)
        others = self.places.setdefault((buffer, scope.loops), [])
        others.append(place)
        if any(o.terms != place.terms for o in others):
            raise self.wrong(f"stores to {buffer} walk it differently: {others[0]} and {place}")
        independent = {v for v, role in scope.loops if role in INDEPENDENT and v.extent > 1}
        parts: list[tuple[int, int, Atom | None]] = [_choice(others)]
        for atom, factor in place.terms:
            low, high = atom_range(atom)
            is_data = isinstance(atom, (Data, Bounded))
            parts.append((abs(factor), high - low, None if is_data else atom))
        reach = 0
        digits: set[Atom] = set()
        for factor, steps, digit in sorted(parts, key=lambda part: part[0]):
            if digit is not None and factor > reach:
                digits.add(digit)
            if digit is None and 0 < factor <= reach:
                break  # digits overlap here: nothing above is known to be distinct
            reach += factor * steps
        found = _determined(digits)
        missing = independent - found
        if missing:
            names = ", ".join(sorted(v.name for v in missing))
            raise self.wrong(f"turns of {names} may write one place: {buffer}[{index}]")


def _determined(digits: set[Atom]) -> set[Var]:
    """Variables that some digits make known: quotient and remainder give what was divided."""
    known = set(digits)
    pending = list(digits)
    while pending:
        atom = pending.pop()
        if not isinstance(atom, (Quotient, Remainder)):
            continue
        pair = Quotient(atom.index, atom.divisor), Remainder(atom.index, atom.divisor)
        terms = atom.index.terms
        if known.issuperset(pair) and len(terms) == 1 and terms[0][0] not in known:
            known.add(terms[0][0])
            pending.append(terms[0][0])
    return {a for a in known if isinstance(a, Var)}


def _choice(places: Sequence[Index]) -> tuple[int, int, Atom | None]:
    """Which of several stores, as a digit: the step between their offsets and how many steps."""
    least = min(p.offset for p in places)
    step = math.gcd(*(p.offset - least for p in places))
    span = max(p.offset for p in places) - least
    return step, span // step if step else 0, None


def _conjuncts(guard: Value) -> tuple[Within, ...]:
    """The bounds that a guard makes sure of."""
    match guard:
        case Within():
            return (guard,)
        case Apply("and", operands, _):
            return tuple(w for o in operands for w in _conjuncts(o))
        case _:
            return ()
