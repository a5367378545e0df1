"""Iterations that run side by side never meet in memory, and a barrier stands where threads do.

Two iterations of a loop meet where the difference of two addresses can be 0. A sum of terms that is
0 is taken apart: if all but multiples of m come to less than m, they come to 0 by themselves. What
is left of a single term is then equal in both iterations; if that is the loop's variable, they are
one iteration.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from treadle_checker import program as ir
from treadle_checker.bounds import Access, Scope, accesses_in, accesses_of
from treadle_checker.index import Atom, Index, summed
from treadle_checker.program import Assign, Barrier, For, Kernel, Library, Statement
from treadle_checker.reading import Rejected

AnyAtom = str | Atom


@dataclass(frozen=True, slots=True)
class _Term:
    """factor · x, x between low and high; with an atom: the difference of its two values."""

    factor: int
    low: int
    high: int
    atom: AnyAtom | None = None

    @property
    def ends(self) -> tuple[int, int]:
        found = self.low * self.factor, self.high * self.factor
        return min(found), max(found)


class _Never(Exception):  # noqa: N818
    """A sum cannot be 0."""


def _equal(terms: list[_Term], constant: int) -> set[AnyAtom]:
    """Atoms whose two values are equal if terms and a constant come to 0."""
    low, high = (constant + sum(t.ends[i] for t in terms) for i in (0, 1))
    if low > 0 or high < 0:
        raise _Never
    fixed = {t.atom for t in terms if t.ends == (0, 0) and t.atom is not None}
    terms = [t for t in terms if t.ends != (0, 0)]
    if len(terms) == 1 and constant == 0:
        return fixed | ({terms[0].atom} if terms[0].atom is not None else set())
    for modulus in sorted({abs(t.factor) for t in terms} - {0, 1}):
        small = [t for t in terms if t.factor % modulus]
        large = [t for t in terms if t.factor % modulus == 0]
        for rest in {constant % modulus, constant % modulus - modulus}:
            ends = [rest + sum(t.ends[i] for t in small) for i in (0, 1)]
            is_apart = ends[0] > -modulus and ends[1] < modulus
            if is_apart and (small or rest) and (large or constant - rest):
                return fixed | _equal(small, rest) | _equal(large, constant - rest)
    return fixed


def conflicts(loop: For, around: tuple[For, ...], exempt: frozenset[str]) -> set[str]:
    """Buffers in which two iterations of a loop may meet."""
    every = [a for a in accesses_in(loop.body) if a.buffer not in exempt]
    written = {a.buffer for a in every if a.writes}
    inside = _Inside(loop, around, written)
    found: set[str] = set()
    for name in written:
        touched = dict.fromkeys(a for a in every if a.buffer == name)
        pairs = ((a, b) for a, b in product(touched, touched) if a.writes)
        if not all(inside.are_apart(a.index, b.index) for a, b in pairs):
            found.add(name)
    return found


class _Inside:
    """What may differ between two iterations of a loop: its variable, loops and locals inside."""

    def __init__(self, loop: For, around: tuple[For, ...], written: set[str]):
        self.var, self.scope = loop.var, Scope((*around, loop), only_ranges=True)
        self.variables = {loop.var} | {s.var for s in ir.walk(loop.body) if isinstance(s, For)}
        assigned = [s for s in ir.walk(loop.body) if isinstance(s, Assign)]
        names = [s.local for s in assigned]
        self.locals = set(names)
        for s in assigned:  # those that are named once, from nothing that differs, do not
            parts = list(ir.values_of(s))
            read = {v.name for v in parts if v.kind == "local"} & self.locals
            loads = {v.name for v in parts if v.kind == "load"} & written
            moves = any(self.differs(atom) for v in parts for _, atom in v.index.terms)
            if s.kind == "let" and names.count(s.local) == 1 and not (read or loads or moves):
                self.locals.discard(s.local)

    def differs(self, atom: AnyAtom) -> bool:
        if isinstance(atom, str):
            return atom in self.variables
        if isinstance(atom.of, str):
            return atom.kind == "block" or atom.of in self.locals
        return any(self.differs(inner) for _, inner in atom.of.terms)

    def are_apart(self, first: Index, second: Index) -> bool:
        """Whether equal addresses belong to one iteration, with bounds as one number or opened."""
        sides = (first, second), (_opened(first), _opened(second))
        return any(self._are_apart(a, b) for a, b in sides)

    def _are_apart(self, first: Index, second: Index) -> bool:
        try:
            equal = _equal(list(self.difference(first, second)), first.offset - second.offset)
            return self.var in self._known(equal)
        except _Never:
            return True

    def difference(self, first: Index, second: Index) -> Iterator[_Term]:
        both = (summed(0, index.terms) for index in (first, second))
        mine, other = ({atom: f for f, atom in index.terms} for index in both)
        for atom in dict.fromkeys([*mine, *other]):
            a, b = mine.get(atom, 0), other.get(atom, 0)
            low, high = self.scope.atom(atom)
            if not self.differs(atom):
                yield from [_Term(a - b, low, high)] if a != b else []
            elif a == b:
                yield _Term(a, low - high, high - low, atom)
            else:
                yield from [_Term(f, low, high) for f in (a, -b) if f]

    def _known(self, equal: set[AnyAtom]) -> set[AnyAtom]:
        """What equal atoms make equal: quotient and remainder give what was divided."""
        found, pending = set(equal), list(equal)
        while pending:
            atom = pending.pop()
            if isinstance(atom, str) or isinstance(atom.of, str):
                continue
            both = {Atom(kind, atom.of, atom.size) for kind in ("quotient", "remainder")}
            if atom.kind == "bounded" or both <= found:
                terms = [t for t in self.difference(atom.of, atom.of) if t.atom not in found]
                more = _equal(terms, 0) - found
                found, pending = found | more, pending + list(more)
        return found


def _opened(index: Index) -> Index:
    """With bounded sums written out."""
    terms, offset = list[tuple[int, AnyAtom]](), index.offset
    for factor, atom in index.terms:
        inner = Index(0, ((1, atom),))
        if isinstance(atom, Atom) and atom.kind == "bounded" and isinstance(atom.of, Index):
            inner = atom.of
        offset += factor * inner.offset
        terms += [(factor * f, a) for f, a in inner.terms]
    return summed(offset, terms)


def check_races(kernel: Kernel) -> None:
    """Rejected where iterations, lanes or threads may meet."""
    _Races(kernel).body(kernel.body, ())
    if kernel.geometry is None:
        for s in ir.walk(kernel.body):
            is_mapped = isinstance(s, For) and s.role in (*ir.SHARED_OUT, "grid")
            if is_mapped or isinstance(s, Barrier):
                raise Rejected("threads share loops, and nothing says how many there are")
    elif not any(isinstance(s, Library) for s in kernel.body):
        _Threads(kernel).check()


def shared_sums(body: tuple[Statement, ...]) -> frozenset[str]:
    """Buffers that statements do nothing to but add, where iterations may meet."""
    stores = [s for s in ir.walk(body) if isinstance(s, ir.Store)]
    added = Counter(s.buffer for s in stores if s.how == "add together")
    touched = Counter(a.buffer for a in accesses_in(body)) if added else added
    return frozenset(name for name, count in added.items() if touched[name] == count)


def is_of_warps(loop: For) -> bool:
    """Whether each iteration of a shared-out loop is a warp's."""
    inner = (s for s in ir.walk(loop.body) if isinstance(s, For))
    return loop.role == "group" and any(s.role == "subgroup" for s in inner)


def group_rows(kernel: Kernel) -> frozenset[str]:
    """Private rows whose elements are spread over the threads of a group."""
    return frozenset(b.name for b in kernel.scratch if b.space == "private" and b.pack > 1)


def inside_grid(kernel: Kernel) -> tuple[list[For], tuple[Statement, ...]]:
    """Loops of a grid around everything, after locals that are named first, and what is inside."""
    body, loops = kernel.body, list[For]()
    while body and isinstance(body[0], Assign) and body[0].kind == "let":
        body = body[1:]
    while len(body) == 1 and isinstance(body[0], For) and body[0].role == "grid":
        loops.append(body[0])
        body = body[0].body
    return loops, body


class _Races:
    def __init__(self, kernel: Kernel):
        self.kernel = kernel
        self.own = frozenset(b.name for b in kernel.scratch)
        self.lanes = frozenset(b.name for b in kernel.scratch if b.lanes > 1)
        self.lane_loops: dict[str, For] = {}

    def body(self, body: tuple[Statement, ...], loops: tuple[For, ...]) -> None:
        for s in body:
            if isinstance(s, For) and s.extent:
                self.loop(s, loops)
                self.body(s.body, (*loops, s))
            else:
                self.in_lanes(s, loops)

    def loop(self, s: For, loops: tuple[For, ...]) -> None:
        is_shared = s.role in ir.SIDE_BY_SIDE
        exempt = self.exempt(s) | shared_sums(s.body)
        found = conflicts(s, loops, exempt) if is_shared and s.extent > 1 else ()
        if found:
            raise Rejected(f"iterations of {s.var} may meet in {', '.join(sorted(found))}")
        if is_shared:
            self.locals(s)
        if s.role == "vector" or s.lanes > 1:
            self.lockstep(s)

    def exempt(self, loop: For) -> frozenset[str]:
        """Buffers of which every thread that runs iterations has its own."""
        if loop.role == "vector":
            return self.lanes
        if loop.role not in ir.SHARED_OUT:
            return self.own
        return group_rows(self.kernel) if is_of_warps(loop) else frozenset()

    def in_lanes(self, s: Statement, loops: tuple[For, ...]) -> None:
        """Memory of lanes is that of one vector loop."""
        for access in accesses_of(s) if self.lanes else ():
            if access.buffer in self.lanes:
                loop = next((loop for loop in loops if loop.role == "vector"), None)
                if loop is None or self.lane_loops.setdefault(access.buffer, loop) is not loop:
                    raise Rejected(f"{access.buffer} belongs to lanes of more than one loop")

    def locals(self, loop: For) -> None:
        """What iterations accumulate outside of them has one op, and none reads or sets it."""
        changed = ir.assigned_in(loop)[1]
        if any(s.scanned for s in changed):
            self.scan(loop, changed)
            return
        if changed and (loop.role in ("parallel", "grid") or not only_sums(loop)):
            names = sorted({s.local for s in changed})
            raise Rejected(f"iterations of {loop.var} set or read {names}, which is one for all")

    def scan(self, loop: For, changed: list[Assign]) -> None:
        """Threads share a loop whose iterations go on with what those before them gave: each local
        is scanned once, and read behind that."""
        names, read = [s.local for s in changed], set[str]()
        is_plain = all(isinstance(s, (Assign, ir.Store)) for s in loop.body)
        is_plain = is_plain and loop.role in ir.SHARED_OUT and all(s.scanned for s in changed)
        for s in loop.body if is_plain else ():
            read |= _locals_read(s)
            is_plain = is_plain and not (isinstance(s, Assign) and s.scanned and s.local in read)
        if not is_plain or len(set(names)) < len(names):
            raise Rejected(f"iterations of {loop.var} do not scan {sorted(set(names))} in order")

    def lockstep(self, loop: For) -> None:
        """Lanes make the same statements at the same time."""
        inside = _Inside(loop, (), set())
        for s in ir.walk(loop.body):
            if isinstance(s, (ir.Matmul, Library)):
                raise Rejected(f"lanes of {loop.var} share a product")
            if isinstance(s, For) and s.stop is not None:
                ends = [a for _, a in s.stop.terms if not isinstance(a, str) or a == loop.var]
                if any(map(inside.differs, ends)):
                    raise Rejected(f"lanes of {loop.var} end {s.var} at different times")


def only_sums(loop: For) -> bool:
    """Whether locals of outside are only accumulated into, each by one op, and not read."""
    ops = {(s.local, s.kind) for s in ir.assigned_in(loop)[1]}
    sums = {local for local, _ in ops}
    is_read = any(sums & _locals_read(s) for s in ir.walk(loop.body)) if sums else False
    return len(sums) == len(ops) and not is_read and all(op != "set" for _, op in ops)


def _locals_read(s: Statement) -> set[str]:
    every = list(ir.values_of(s))
    indices = [v.index for v in every] + ([s.index] if isinstance(s, ir.Store) else [])
    return {v.name for v in every if v.kind == "local"}.union(*(i.data for i in indices))


class _Threads:
    """A kernel of a GPU: grid loops around everything, and barriers where threads meet."""

    def __init__(self, kernel: Kernel):
        assert kernel.geometry is not None
        self.kernel, self.geometry = kernel, kernel.geometry
        self.rows = {b.name for b in kernel.scratch if b.pack > 1}
        grid, self.group = inside_grid(kernel)
        self.grid = {loop.var for loop in grid}

    def check(self) -> None:
        threads, share, warp = self.geometry.threads, self.geometry.share, self.geometry.warp
        exchanges = self.geometry.combine == "exchange" and share < warp
        if threads % share or (exchanges and share & (share - 1)):
            raise Rejected(f"{share} of {threads} threads share an iteration")
        for s in ir.walk(self.group):
            if isinstance(s, For) and s.role in ("grid", "parallel", "vector"):
                raise Rejected(f"the loop over {s.var} is not mapped, or in the wrong place")
            if isinstance(s, For) and s.role in ir.SHARED_OUT and share == 1:
                raise Rejected(f"one thread shares out the loop over {s.var}")
            if isinstance(s, For) and s.extent % s.lanes:
                raise Rejected(f"{s.extent} iterations of {s.var} are no packs of {s.lanes}")
        own = "private" if share == 1 else "shared"
        for b in self.kernel.scratch:
            if b.space != own and b.name not in group_rows(self.kernel):
                raise Rejected(f"{b.name} is {b.space} memory, not {own}")
        for name in self.rows:
            self.row(name)
        if self.geometry.template[:1] == ("tiled",):
            self.tile(*self.geometry.template[1:])
        if not self.geometry.template and share > 1:
            self.barriers(self.group, (), "subgroup" if share <= warp else "group")
            self.meetings(self.group, [])

    def tile(
        self, batch: list[str], rows: list[str], columns: list[str], depth: list[str], *sizes: int
    ) -> None:
        """Threads cover a tile of a product, and its loops are the grid's."""
        height, width, down, across, shares = sizes
        squares = (height // down) * (width // across)
        if squares * shares != self.geometry.threads or height % down or width % across:
            raise Rejected(f"{squares} squares of a tile are no block's threads")
        if self.grid != {*batch, *rows, *columns} or self.grid & {*depth}:
            raise Rejected("the loops of a tile are not those of the grid")

    def row(self, name: str) -> None:
        """A row in packs: each thread touches the elements of its own iterations alone."""
        buffer = next(b for b in self.kernel.scratch if b.name == name)
        pending: list[Statement] = list(self.group)
        while pending:
            s = pending.pop()
            if not any(a.buffer == name for a in accesses_in((s,))):
                continue
            if not isinstance(s, For):
                raise Rejected(f"the row {name} is touched outside the loops that walk it")
            if s.role not in ir.SHARED_OUT or is_of_warps(s):
                pending += s.body
                continue
            at, own = Index(0, ((1, s.var),)), [a for a in accesses_in(s.body) if a.buffer == name]
            is_walked = s.extent == buffer.size and s.lanes == buffer.pack
            if not is_walked or any(a.index != at for a in own):
                raise Rejected(f"the loop over {s.var} does not walk the row {name}")

    def barriers(self, body: Sequence[Statement], loops: tuple[For, ...], group: str) -> None:
        """Barriers stand where all threads that wait come by."""
        for s in body:
            if isinstance(s, For):
                self.barriers(s.body, (*loops, s), group)
            elif isinstance(s, Barrier):
                shared = [loop for loop in loops if loop.role in ir.SHARED_OUT]
                if not all(map(is_of_warps, shared)):
                    raise Rejected("a barrier stands in a loop that threads share out")
                if s.scope != ("subgroup" if shared else group):
                    raise Rejected(f"a barrier is the {s.scope}'s")

    def meetings(self, body: Sequence[Statement], since: list[Access]) -> None:
        """Between statements of which one writes what the other touches stands a barrier; `since`
        is what was touched since the last one."""
        waits = self.geometry.combine != "exchange"
        last = max((i for i, s in enumerate(body) if isinstance(s, For)), default=0)
        for i, s in enumerate(body):
            if isinstance(s, Barrier):
                since.clear()
            elif isinstance(s, For) and s.role == "sequential":
                for _ in range(2):  # an iteration may meet the one before
                    self.meetings(s.body, since)
            elif not waits or i <= last:
                if isinstance(s, For) and is_of_warps(s):
                    self.meetings(s.body, [])
                new = [a for a in accesses_in((s,)) if a.buffer not in self.rows]
                for a, b in product(_by_buffer(new), _by_buffer(since)):
                    if a[0] == b[0] and (a[1] or b[1]):
                        raise Rejected(f"no barrier stands between threads that meet in {a[0]}")
                since += new
                if waits and isinstance(s, For) and ir.assigned_in(s)[1]:
                    since.clear()  # all threads wait as they combine what they summed


def _by_buffer(accesses: list[Access]) -> set[tuple[str, bool]]:
    return {(a.buffer, a.writes) for a in accesses}
