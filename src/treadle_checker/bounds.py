"""Every access lies in its buffer, for all iterations; names and dtypes are what they must be.

An index is bounded by the extents of the loops around it, and by guards: what is "bounded" must
stand under a guard that says so. What is data is clamped wherever it is used.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from treadle_checker import program as ir
from treadle_checker.index import Atom, Index
from treadle_checker.program import Assign, For, Kernel, Library, Matmul, Statement, Value
from treadle_checker.reading import Rejected

COMPARISONS = ("eq", "lt", "le")


@dataclass(frozen=True, slots=True)
class Access:
    buffer: str
    index: Index
    writes: bool


def accesses_of(s: Statement) -> Iterator[Access]:
    """What a statement that is no loop touches by itself; blocks run over a matrix's elements."""
    yield from (Access(v.name, v.index, False) for v in ir.values_of(s) if v.kind == "load")
    if isinstance(s, ir.Store):
        yield Access(s.buffer, s.index, True)
    elif isinstance(s, (Matmul, Library)):
        written, read = blocks_of(s)
        yield from (Access(b.buffer, _every(b), True) for b in written)
        yield from (Access(b.buffer, _every(b), False) for b in read)


def blocks_of(s: Matmul | Library) -> tuple[tuple[ir.Block, ...], tuple[ir.Block, ...]]:
    """What is written and what is read."""
    if isinstance(s, Library):
        return s.results, s.operands
    bias = () if s.bias is None else (s.bias,)
    return (s.target,), (s.left, s.right, *bias, *s.scales)


def _every(block: ir.Block) -> Index:
    """All elements: an index with a number below each axis's count."""
    offset, terms = block.index.offset, list(block.index.terms)
    for i, axis in enumerate(block.axes):
        low, high = min(axis.listed, default=0), max(axis.listed, default=0)
        step, count = (1, high - low + 1) if axis.listed else (axis.stride, axis.count)
        offset += low
        terms.append((step, Atom("block", f"axis {i}", count)))
    return Index(offset, tuple(terms))


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


@dataclass(frozen=True, slots=True)
class Scope:
    """What is known at a point: loops around it, locals by dtype, guards that hold. With
    `only_ranges` names and guards are taken as checked."""

    loops: tuple[For, ...] = ()
    locals: tuple[tuple[str, str], ...] = ()
    guards: tuple[Value, ...] = ()
    only_ranges: bool = False

    def local(self, name: str) -> str:
        found = next((dtype for local, dtype in reversed(self.locals) if local == name), None)
        if found is None:
            raise Rejected(f"{name} is used before it is named")
        return found

    def under(self, guard: Value | None) -> Scope:
        return self if guard is None else replace(self, guards=self.guards + tuple(_held(guard)))

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
        if isinstance(atom.of, str) or (self.only_ranges and atom.kind == "bounded"):
            is_data = atom.kind == "data" and not self.only_ranges
            if is_data and "int" not in self.local(str(atom.of)):
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


def _held(guard: Value) -> Iterator[Value]:
    """The bounds that a guard makes sure of."""
    if guard.kind == "within":
        yield guard
    elif guard.kind == "apply" and guard.name == "and":
        for operand in guard.operands:
            yield from _held(operand)


def check_bounds(kernel: ir.Kernel) -> None:
    """Rejected, with what is wrong, where an access may leave its buffer."""
    every = (*kernel.buffers, *kernel.scratch)
    if len({b.name for b in every}) != len(every):
        raise Rejected("two buffers have one name")
    written = {b.name for b in (*kernel.outputs, *kernel.scratch)}
    _Checker({b.name: b for b in every}, written).body(kernel.body, Scope())


class _Checker:
    def __init__(self, buffers: dict[str, ir.Buffer], written: set[str]):
        self.buffers, self.written = buffers, written

    def body(self, body: tuple[Statement, ...], scope: Scope) -> None:
        for s in body:
            match s:
                case For():
                    self.loop(s, scope)
                case Assign():
                    self.value(s.value, scope)
                    if s.kind == "let":
                        named = s.local, s.value.dtype
                        scope = replace(scope, locals=(*scope.locals, named))
                    self.same(scope.local(s.local), s.value.dtype, s.local)
                case ir.Store():
                    if s.guard is not None:
                        self.value(s.guard, scope)
                    self.value(s.value, scope.under(s.guard))
                    dtype = self.inside(Access(s.buffer, s.index, True), scope.under(s.guard))
                    self.same(dtype, s.value.dtype, s.buffer)
                case Matmul() | Library():
                    self.fits(s, scope)
                    for access in accesses_of(s):
                        self.inside(access, scope)

    def loop(self, s: For, scope: Scope) -> None:
        if any(s.var == loop.var for loop in scope.loops):
            raise Rejected(f"two loops inside each other are over {s.var}")
        if s.stop is not None and scope.ends(s.stop)[1] > s.extent:
            raise Rejected(f"the loop over {s.var} may pass {s.extent}")
        if s.extent:  # else it is never reached
            self.body(s.body, replace(scope, loops=(*scope.loops, s)))

    def fits(self, s: Matmul | Library, scope: Scope) -> None:
        written, read = ({b.buffer for b in blocks} for blocks in blocks_of(s))
        if written & read:
            raise Rejected(f"{sorted(written & read)} is written by a product or a call, and read")
        if isinstance(s, Library):
            if scope.loops:
                raise Rejected(f"{s.name} is in a loop")
            return
        (m, n), (rows, k), (depth, columns) = (
            [axis.count for axis in block.axes] for block in (s.target, s.left, s.right)
        )
        if (rows, depth, columns) != (m, k, n) or any(b.axes for b in s.scales):
            raise Rejected("the matrices of a product do not fit")
        if s.bias is not None and [a.count for a in s.bias.axes] != [n]:
            raise Rejected("the bias of a product does not fit")

    def value(self, value: Value, scope: Scope) -> None:
        kinds = [v.dtype for v in value.operands]
        match value.kind:
            case "load":
                dtype = self.inside(Access(value.name, value.index, False), scope)
                self.same(dtype, value.dtype, value.name)
            case "local":
                self.same(scope.local(value.name), value.dtype, value.name)
            case "position" | "within":
                scope.ends(value.index)
            case "guarded":
                self.value(value.operands[1], scope.under(value.operands[0]))
                if kinds[1:] != [value.dtype] * 2:
                    raise Rejected(f"a guarded {value.dtype} of {kinds}")
            case "apply":  # operands have one dtype, the result's unless it compares or chooses
                given = set(kinds[1:] if value.name == "where" else kinds)
                if len(given) != 1 or (value.name not in COMPARISONS and given != {value.dtype}):
                    raise Rejected(f"{value.name} of {sorted(given)} gives {value.dtype}")
        for k, operand in enumerate(value.operands):
            if (value.kind, k) != ("guarded", 1):
                self.value(operand, scope)

    def inside(self, access: Access, scope: Scope) -> str:
        """The dtype of what is accessed."""
        buffer = self.buffers.get(access.buffer)
        if buffer is None:
            raise Rejected(f"{access.buffer} is no buffer")
        low, high = scope.ends(access.index)
        if low < 0 or high >= buffer.size:
            raise Rejected(f"{buffer.name} of {buffer.size} may be accessed at {low} … {high}")
        if access.writes and access.buffer not in self.written:
            raise Rejected(f"{access.buffer} is written and no output")
        return buffer.dtype

    def same(self, expected: str, found: str, what: str) -> None:
        if expected != found:
            raise Rejected(f"{what} is {expected}, not {found}")


def stored_elements(kernel: Kernel) -> Counter[str]:
    """How often each buffer is stored to, at most."""
    found: Counter[str] = Counter()

    def count(body: tuple[object, ...], times: int) -> None:
        for s in body:
            if isinstance(s, For):
                end = s.extent
                if s.stop is not None and not s.stop.terms:
                    end = max(0, min(end, s.stop.offset))
                count(s.body, times * end)
            elif isinstance(s, ir.Store):
                found[s.buffer] += times
            elif isinstance(s, (Matmul, Library)):
                for block in blocks_of(s)[0]:
                    found[block.buffer] += times * math.prod(axis.count for axis in block.axes)

    count(kernel.body, 1)
    return found


def reads_what_it_writes(kernel: Kernel, output: str) -> bool:
    """Whether a kernel goes on with what one of its outputs holds."""
    adding = (s for s in ir.walk(kernel.body) if isinstance(s, (ir.Store, Matmul)) and s.adds)
    targets = {s.buffer if isinstance(s, ir.Store) else s.target.buffer for s in adding}
    loaded = {a.buffer for a in accesses_in(kernel.body) if not a.writes}
    return output in targets | loaded


def written_span(kernel: Kernel, output: str) -> tuple[int, int]:
    """The first and the last element of a buffer that a kernel may store."""
    every = [a.index for a in accesses_in(kernel.body) if a.writes and a.buffer == output]
    ends = [Scope(only_ranges=True).ends(index) for index in every] or [(0, -1)]
    return min(low for low, _ in ends), max(high for _, high in ends)
