"""Every access lies in its buffer, for all iterations; names and dtypes are what they must be.

An index is bounded by the extents of the loops around it, and by guards: what is "bounded" must
stand under a guard that says so. What is data is clamped wherever it is used.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from treadle_checker.program import (
    Assign,
    Atom,
    Barrier,
    Buffer,
    For,
    Index,
    Kernel,
    Library,
    Matmul,
    Matrix,
    Statement,
    Store,
    Value,
    View,
    subvalues,
    values_of,
)
from treadle_checker.reading import Rejected

COMPARISONS = ("eq", "lt", "le")


@dataclass(frozen=True, slots=True)
class Access:
    buffer: str
    index: Index
    writes: bool


def accesses_of(s: Statement) -> Iterator[Access]:
    """What a statement that is no loop touches by itself; blocks run over a matrix's elements."""
    for value in values_of(s):
        yield from (Access(v.name, v.index, False) for v in subvalues(value) if v.kind == "load")
    if isinstance(s, Store):
        yield Access(s.buffer, s.index, True)
    elif isinstance(s, Matmul):
        for m, writes in ((s.target, True), (s.left, False), (s.right, False)):
            yield Access(m.buffer, _matrix(m), writes)
        if s.bias is not None:
            columns = Index(0, ((1, Atom("block", "column", s.target.columns.count)),))
            yield Access(s.bias, columns, False)
        yield from (Access(buffer, Index(at), False) for buffer, at in s.scales)
    elif isinstance(s, Library):
        yield from (Access(v.buffer, _view(v), True) for v in s.results)
        yield from (Access(v.buffer, _view(v), False) for v in s.operands)


def accesses_in(body: tuple[Statement, ...]) -> Iterator[Access]:
    """Those of all statements, loops inside included: their variables are blocks too."""
    for s in body:
        if not isinstance(s, For):
            yield from accesses_of(s)
            continue
        for a in accesses_in(s.body) if s.extent else ():
            yield Access(a.buffer, _with_block(a.index, s), a.writes)


def _with_block(index: Index, loop: For) -> Index:
    terms: list[tuple[int, str | Atom]] = []
    for factor, atom in index.terms:
        if isinstance(atom, Atom) and isinstance(atom.of, Index):
            atom = replace(atom, of=_with_block(atom.of, loop))
        terms.append((factor, Atom("block", atom, loop.extent) if atom == loop.var else atom))
    return Index(index.offset, tuple(terms))


def _matrix(m: Matrix) -> Index:
    terms, offset = list(m.index.terms), m.index.offset
    for name, axis in (("row", m.rows), ("column", m.columns)):
        low, high = axis.ends
        step, count = (1, high - low + 1) if axis.listed else (axis.stride, axis.count)
        terms.append((step, Atom("block", name, count)))
        offset += low if axis.listed else 0
    return Index(offset, tuple(terms))


def _view(v: View) -> Index:
    axes = enumerate(zip(v.strides, v.shape, strict=True))
    return Index(v.start, tuple((step, Atom("block", f"axis {i}", n)) for i, (step, n) in axes))


@dataclass(frozen=True, slots=True)
class Scope:
    """What is known at a point: loops around it, locals by dtype and depth, guards that hold."""

    loops: tuple[For, ...] = ()
    locals: tuple[tuple[str, tuple[str, int]], ...] = ()
    guards: tuple[Value, ...] = ()

    def local(self, name: str) -> tuple[str, int]:
        found = next((known for local, known in reversed(self.locals) if local == name), None)
        if found is None:
            raise Rejected(f"{name} is used before it is named")
        return found

    def ends(self, index: Index) -> tuple[int, int]:
        """The lowest and the highest value of an index."""
        low = high = index.offset
        for factor, atom in index.terms:
            first, last = self.atom(atom)
            low += min(first * factor, last * factor)
            high += max(first * factor, last * factor)
        return low, high

    def atom(self, atom: str | Atom) -> tuple[int, int]:
        if isinstance(atom, str):
            loop = next((loop for loop in self.loops if loop.var == atom), None)
            if loop is None:
                raise Rejected(f"{atom} is the variable of no loop around")
            return 0, loop.extent - 1
        if isinstance(atom.of, str):
            if atom.kind == "data" and "int" not in self.local(atom.of)[0]:
                raise Rejected(f"the index {atom.of} is no integer")
            return 0, max(0, atom.size - 1)
        low, high = self.ends(atom.of)
        if atom.kind == "bounded":
            held = (g for g in self.guards if g.index == atom.of)
            if not any(g.low >= 0 and g.high <= atom.size for g in held):
                raise Rejected(f"no guard holds {atom.of} below {atom.size}")
            return max(0, low), min(atom.size - 1, high)
        if low < 0:
            raise Rejected(f"{atom.of} may be negative, and is divided")
        if atom.kind == "quotient":
            return low // atom.size, high // atom.size
        return 0, min(atom.size - 1, high)


def bounds_held(guard: Value) -> list[Value]:
    """The bounds that a guard makes sure of."""
    if guard.kind == "apply" and guard.name == "and":
        return [bound for operand in guard.operands for bound in bounds_held(operand)]
    return [guard] if guard.kind == "within" else []


def check_bounds(kernel: Kernel) -> None:
    """Rejected, with what is wrong, where an access may leave its buffer."""
    every = (*kernel.buffers, *kernel.scratch)
    buffers = {b.name: b for b in every}
    if len(buffers) != len(every):
        raise Rejected("two buffers have one name")
    _Checker(buffers, {b.name for b in (*kernel.outputs, *kernel.scratch)}).body(
        kernel.body, Scope()
    )


class _Checker:
    def __init__(self, buffers: dict[str, Buffer], written: set[str]):
        self.buffers, self.written = buffers, written

    def body(self, body: tuple[Statement, ...], scope: Scope) -> None:
        for s in body:
            if isinstance(s, For):
                self.loop(s, scope)
                continue
            inner = scope
            if isinstance(s, Store) and s.guard is not None:
                self.value(s.guard, scope)
                inner = replace(scope, guards=(*scope.guards, *bounds_held(s.guard)))
            self.statement(s, inner)
            if isinstance(s, Assign) and s.kind == "let":
                named = s.local, (s.value.dtype, len(scope.loops))
                scope = replace(scope, locals=(*scope.locals, named))

    def loop(self, s: For, scope: Scope) -> None:
        if any(s.var == loop.var for loop in scope.loops):
            raise Rejected(f"two loops inside each other are over {s.var}")
        if s.stop is not None and scope.ends(s.stop)[1] > s.extent:
            raise Rejected(f"the loop over {s.var} may pass {s.extent}")
        if s.extent:  # else it is never reached
            self.body(s.body, replace(scope, loops=(*scope.loops, s)))

    def statement(self, s: Statement, scope: Scope) -> None:
        match s:
            case Assign():
                self.value(s.value, scope)
                if s.kind != "let":
                    self.same(scope.local(s.local)[0], s.value.dtype, s.local)
            case Store(buffer, index, value):
                self.value(value, scope)
                self.inside(Access(buffer, index, True), scope)
                self.same(self.buffers[buffer].dtype, value.dtype, buffer)
            case Matmul(target, left, right):
                m, k, n = target.rows.count, left.columns.count, target.columns.count
                if (left.rows.count, right.rows.count, right.columns.count) != (m, k, n):
                    raise Rejected("the matrices of a product do not fit")
                if target.buffer in (left.buffer, right.buffer):
                    raise Rejected(f"a product is written to its operand {target.buffer}")
            case Library(name, results, operands):
                if scope.loops or {v.buffer for v in results} & {v.buffer for v in operands}:
                    raise Rejected(f"{name} is in a loop, or writes what it reads")
            case Barrier():
                pass
        if isinstance(s, (Matmul, Library)):
            for access in accesses_of(s):
                self.inside(access, scope)

    def value(self, value: Value, scope: Scope) -> None:
        match value.kind:
            case "load":
                self.inside(Access(value.name, value.index, False), scope)
                self.same(self.buffers[value.name].dtype, value.dtype, value.name)
            case "local":
                self.same(scope.local(value.name)[0], value.dtype, value.name)
            case "position" | "within":
                scope.ends(value.index)
            case "guarded":
                guard, inner, other = value.operands
                self.value(guard, scope)
                self.value(inner, replace(scope, guards=(*scope.guards, *bounds_held(guard))))
                self.value(other, scope)
                self.same(inner.dtype, value.dtype, "a guarded value")
                self.same(other.dtype, value.dtype, "a guarded value")
            case "apply":
                self.operands(value)
                for operand in value.operands:
                    self.value(operand, scope)
            case "convert":
                self.value(value.operands[0], scope)

    def operands(self, value: Value) -> None:
        """Operands have one dtype, the result's if it does not compare or choose."""
        first = value.operands[1:] if value.name == "where" else value.operands
        kinds = {v.dtype for v in first}
        if len(kinds) != 1 or (value.name not in COMPARISONS and kinds != {value.dtype}):
            raise Rejected(f"{value.name} of {sorted(kinds)} gives {value.dtype}")

    def inside(self, access: Access, scope: Scope) -> None:
        buffer = self.buffers.get(access.buffer)
        if buffer is None:
            raise Rejected(f"{access.buffer} is no buffer")
        low, high = scope.ends(access.index)
        if low < 0 or high >= buffer.size:
            raise Rejected(f"{buffer.name} of {buffer.size} may be accessed at {low} … {high}")
        if access.writes and access.buffer not in self.written:
            raise Rejected(f"{access.buffer} is written and no output")

    def same(self, expected: str, found: str, what: str) -> None:
        if expected != found:
            raise Rejected(f"{what} is {expected}, not {found}")
