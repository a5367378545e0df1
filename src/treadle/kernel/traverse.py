"""The one way through the loop IR: statements and values in order, rebuilt, and loops taken off.

`walk` and `subvalues` yield; `nested` and `under_guards` also say what stands around. `tally`
counts, `peel` takes loops off. `replace_value` and `map_value` rebuild values, `map_statements` and
`rewritten` rebuild statements. A value that did not change is the same object afterwards. A pass
that needs more than these is a closed `match` of its own; there are few.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import is_

from treadle.kernel.index import Index, Var, renamed_data, substitute
from treadle.kernel.nodes import (
    Accumulate,
    Apply,
    Convert,
    For,
    Guarded,
    Let,
    LibraryCall,
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
)

# Statements


def _always(part: object) -> bool:
    return True


_COMPUTING = (Let, Store, Accumulate, Set, Update)


def walk(body: Sequence[Statement], into: Callable[[For], bool] = _always) -> Iterator[Statement]:
    """Every statement in order, a loop before what it contains; `into` says which are entered."""
    pending = list(body)[::-1]  # generators inside generators would be slower
    while pending:
        statement = pending.pop()
        yield statement
        if isinstance(statement, For) and into(statement):
            pending += statement.body[::-1]


def nested(body: Sequence[Statement]) -> Iterator[tuple[Statement, tuple[For, ...]]]:
    """Every statement in order, and the loops around it, the outermost first."""
    pending: list[tuple[Statement, tuple[For, ...]]] = [(s, ()) for s in reversed(body)]
    while pending:
        statement, loops = pending.pop()
        yield statement, loops
        if isinstance(statement, For):
            pending += [(s, (*loops, statement)) for s in reversed(statement.body)]


def values_of(statement: Statement) -> tuple[Value, ...]:
    """The values that a statement computes by itself; a loop computes none."""
    if isinstance(statement, Store) and statement.guard is not None:
        return statement.value, statement.guard
    return (statement.value,) if isinstance(statement, _COMPUTING) else ()


def peel(
    body: Sequence[Statement], *roles: Role, most: int | None = None
) -> tuple[list[For], tuple[Statement, ...]]:
    """Loops of some roles, each all that the one around it contains, and what is inside them.

    A loop with an end of its own (`stop`) is not taken off.
    """
    loops: list[For] = []
    inner = tuple(body)
    while len(inner) == 1 and (most is None or len(loops) < most):
        (only,) = inner
        if not isinstance(only, For) or only.role not in roles or only.stop is not None:
            break
        loops.append(only)
        inner = only.body
    return loops, inner


def tally(
    body: Sequence[Statement],
    leaf: Callable[[Statement], int],
    loop: Callable[[For, int], int] = lambda loop, inner: loop.var.extent * inner,
) -> int:
    """A number of each statement, added up; a loop makes its own of the sum inside it."""
    total = 0
    for s in body:
        total += loop(s, tally(s.body, leaf, loop)) if isinstance(s, For) else leaf(s)
    return total


def loop_variables(body: Sequence[Statement]) -> set[Var]:
    """Variables of all loops in some statements."""
    return {s.var for s in walk(body) if isinstance(s, For)}


def loop_names(body: Sequence[Statement]) -> set[str]:
    """Names of all loop variables in some statements."""
    return {s.var.name for s in walk(body) if isinstance(s, For)}


# Values


def operands_of(value: Value) -> tuple[Value, ...]:
    """The values that a value is computed from."""
    # Asked for more than anything else while kernels are made: a `match` takes three times as long.
    if isinstance(value, Apply):
        return value.operands
    if isinstance(value, Convert):
        return (value.value,)
    if isinstance(value, Guarded):
        return value.guard, value.value, value.other
    return ()


def subvalues(value: Value, into: Callable[[Value], bool] = _always) -> Iterator[Value]:
    """The value and everything it is computed from, in order; `into` says what is entered."""
    pending = [value]
    while pending:
        value = pending.pop()
        yield value
        if into is _always or into(value):
            operands = operands_of(value)
            if operands:
                pending += operands[::-1]


Guards = tuple[tuple[Value, bool], ...]


def under_guards(
    value: Value, into: Callable[[Value], bool] = _always
) -> Iterator[tuple[Value, Guards]]:
    """As `subvalues`, each with the guards around it and whether they hold or fail there."""
    pending: list[tuple[Value, Guards]] = [(value, ())]
    while pending:
        value, guards = pending.pop()
        yield value, guards
        if not into(value):
            continue
        if isinstance(value, Guarded):
            held, failed = (*guards, (value.guard, True)), (*guards, (value.guard, False))
            pending += [(value.other, failed), (value.value, held), (value.guard, guards)]
        else:
            pending += [(operand, guards) for operand in reversed(operands_of(value))]


def with_operands(value: Value, operands: tuple[Value, ...]) -> Value:
    """The value computed from others."""
    if all(map(is_, operands, operands_of(value))):
        return value
    if isinstance(value, Apply):
        return Apply(value.op, operands, value.dtype)
    if isinstance(value, Convert):
        return Convert(operands[0], value.dtype)
    if isinstance(value, Guarded):
        guard, inner, other = operands
        return Guarded(guard, inner, other, value.dtype)
    return value


ValueMap = Callable[[Value], Value]


def map_value(value: Value, change: ValueMap) -> Value:
    """The value with everything in it changed, what it is computed from first."""
    operands = operands_of(value)
    if not operands:
        return change(value)
    return change(with_operands(value, tuple([map_value(o, change) for o in operands])))


def map_leaves(value: Value, change: ValueMap) -> Value:
    """The value with everything changed that is not computed from other values."""
    operands = operands_of(value)
    if not operands:
        return change(value)
    return with_operands(value, tuple([map_leaves(o, change) for o in operands]))


def replace_value(value: Value, choose: Callable[[Value], Value | None]) -> Value:
    """The value with some of its parts replaced, the largest first; None leaves a part there."""
    found = choose(value)
    if found is not None:
        return found
    operands = operands_of(value)
    if not operands:
        return value
    return with_operands(value, tuple([replace_value(o, choose) for o in operands]))


# Rebuilding


def map_values(statement: Statement, change: ValueMap) -> Statement:
    """The statement with each of its own values replaced; those inside a loop too."""
    return _Rewriter(_same_index, _same_name, _same_name, change).statement(statement)


def map_statements(
    body: Sequence[Statement], change: Callable[[Statement], Iterable[Statement]]
) -> tuple[Statement, ...]:
    """Each statement replaced by any number of others; a loop after what it contains."""
    found: list[Statement] = []
    for s in body:
        if isinstance(s, For):
            inner = map_statements(s.body, change)
            s = For(s.var, s.role, inner, s.stop, s.lanes, s.unroll)
        found += change(s)
    return tuple(found)


IndexMap = Callable[[str, Index], Index]  # by the buffer that is accessed; "" where none is
NameMap = Callable[[str], str]


def _same_index(buffer: str, index: Index) -> Index:
    return index


def _same_name(name: str) -> str:
    return name


def rewritten(
    body: Iterable[Statement],
    index: IndexMap = _same_index,
    buffer: NameMap = _same_name,
    local: NameMap = _same_name,
) -> tuple[Statement, ...]:
    """The statements with every index, buffer's name and local's name replaced.

    Locals inside indices are the index map's to replace.
    """

    def leaf(value: Value) -> Value:
        if isinstance(value, Load):
            name, new = buffer(value.buffer), index(value.buffer, value.index)
            is_same = new is value.index and name == value.buffer
            return value if is_same else Load(name, new, value.dtype)
        if isinstance(value, Local):
            name = local(value.name)
            return value if name == value.name else Local(name, value.dtype)
        if isinstance(value, Position):
            new = index("", value.index)
            return value if new is value.index else Position(new, value.dtype)
        if isinstance(value, Within):
            new = index("", value.index)
            return value if new is value.index else Within(new, value.low, value.high)
        return value

    rewriter = _Rewriter(index, buffer, local, lambda value: map_leaves(value, leaf))
    return tuple([rewriter.statement(s) for s in body])


@dataclass(frozen=True, slots=True)
class _Rewriter:
    index: IndexMap
    buffer: NameMap
    local: NameMap
    value: ValueMap

    def statement(self, s: Statement) -> Statement:
        # As in `operands_of`, no `match`; what is there most often first.
        if isinstance(s, Let):
            return Let(self.local(s.local), self.value(s.value))
        if isinstance(s, For):
            end = None if s.stop is None else self.index("", s.stop)
            inner = tuple([self.statement(i) for i in s.body])
            return For(s.var, s.role, inner, end, s.lanes, s.unroll)
        if isinstance(s, Store):
            held = None if s.guard is None else self.value(s.guard)
            assert held is None or isinstance(held, Within)
            at = self.index(s.buffer, s.index)
            return Store(self.buffer(s.buffer), at, self.value(s.value), held)
        if isinstance(s, Accumulate):
            return Accumulate(self.local(s.local), s.op, self.value(s.value), s.scanned)
        if isinstance(s, Set):
            return Set(self.local(s.local), self.value(s.value))
        if isinstance(s, Update):
            at = self.index(s.buffer, s.index)
            return Update(self.buffer(s.buffer), at, self.value(s.value), s.shared)
        if isinstance(s, Matmul):
            target, left, right = map(self.matrix, s.matrices)
            bias = None if s.bias is None else self.buffer(s.bias)
            scales = tuple([(self.buffer(name), at) for name, at in s.scales])
            return Matmul(target, left, right, s.adds, bias, scales)
        return self.call(s) if isinstance(s, LibraryCall) else s

    def call(self, call: LibraryCall) -> LibraryCall:
        made, given = (
            tuple([replace(v, buffer=self.buffer(v.buffer)) for v in views])
            for views in (call.results, call.operands)
        )
        return replace(call, results=made, operands=given)

    def matrix(self, m: Matrix) -> Matrix:
        return Matrix(self.buffer(m.buffer), self.index(m.buffer, m.index), m.rows, m.columns)


def substituted(body: Iterable[Statement], values: Mapping[Var, Index]) -> tuple[Statement, ...]:
    """The statements with loop variables replaced in every index."""
    return rewritten(body, lambda _, index: substitute(index, values))


def with_buffers(body: Iterable[Statement], rename: NameMap) -> tuple[Statement, ...]:
    """The statements with every buffer renamed."""
    return rewritten(body, buffer=rename)


def with_locals(body: Iterable[Statement], names: Mapping[str, str]) -> tuple[Statement, ...]:
    """The statements with some locals renamed, those inside indices too."""

    def rename(name: str) -> str:
        return names.get(name, name)

    def renamed(_: str, index: Index) -> Index:
        return renamed_data(index, rename)

    return rewritten(body, renamed, local=rename)


def indices_of(body: Iterable[Statement]) -> list[Index]:
    """Every index in some statements."""
    found: list[Index] = []

    def note(_: str, index: Index) -> Index:
        found.append(index)
        return index

    rewritten(body, note)
    return found
