"""Runs a kernel over the field: at its full size, some iterations of its loops.

Iterations that stay apart are an axis of arrays, the innermost first, so that values of loops
around broadcast; others run one after another. Memory that belongs to an iteration or a lane is
other memory in each of them, so that what is read before it is written equals nothing. Addresses
are not looked at here: that all lie in their buffers is known by then (`bounds.py`), and so is that
barriers stand where threads meet (`races.py`). Iterations of a loop are left out if nothing else
touches what they write: the first, the last, those at guards and some others run.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from treadle_checker import program as ir
from treadle_checker import randomness
from treadle_checker.bounds import Scope, accesses_in
from treadle_checker.budget import CALL
from treadle_checker.field import Array, Element, Field, chosen, is_residue, numpy_of
from treadle_checker.index import Index
from treadle_checker.program import Assign, For, Kernel, Matmul, Statement, Store, Value
from treadle_checker.races import conflicts, inside_grid, only_sums, shared_sums
from treadle_checker.reading import NotEstablished, Rejected

Source = Callable[[Array], Element]  # elements by where they are
PAGE = 32
CHUNK = 2**19  # elements of an array at a time
MOST = 2**27  # elements that one kernel may compute
LONGEST = 2**20  # statements that may run one after another
BUDGET = 2**20  # elements up to which more iterations are looked at
SELDOM = 16  # a loop that ends by data goes on for so small a part of what it might


class Memory:
    """A buffer's elements by address, in pages: what was stored, or what its source says where it
    is first read.

    What is never written (`is_given`) needs none: its source is asked each time. What is undefined
    must be written before it is read.
    """

    def __init__(
        self, dtype: str, source: Source, is_undefined: bool = False, is_given: bool = False
    ):
        self.dtype, self.source = dtype, source
        self.is_undefined, self.is_given = is_undefined, is_given
        self.pages = np.zeros(16, np.int32)  # where each is, from 1 on
        self.numbers, self.count = list[Array](), 0
        kinds = {"q": numpy_of(dtype), "p": numpy_of(dtype), "sign": np.int8, "infinite": np.int8}
        self.parts = {name: np.zeros(0, kind) for name, kind in kinds.items()}
        self.written = self.known = np.zeros(0, bool)

    def _slots(self, at: Array) -> Array:
        numbers = at // PAGE
        last = int(numbers.max(initial=0))
        if last >= len(self.pages):
            self.pages = _grown(self.pages, last + 1)
        found = self.pages[numbers]
        if not found.all():
            self._add(np.unique(numbers[found == 0]))
            found = self.pages[numbers]
        return (found.astype(np.int64) - 1) * PAGE + at % PAGE

    def _add(self, numbers: Array) -> None:
        rows = slice(self.count * PAGE, (self.count + len(numbers)) * PAGE)
        self.pages[numbers] = np.arange(self.count, self.count + len(numbers)) + 1
        self.count += len(numbers)
        self.numbers.append(numbers)
        if rows.stop > len(self.written):
            self.parts = {name: _grown(a, rows.stop) for name, a in self.parts.items()}
            self.written, self.known = (_grown(a, rows.stop) for a in (self.written, self.known))

    def _put(self, where: Array, x: Element) -> None:
        for name, array in self.parts.items():
            part = getattr(x, name)
            array[where] = 0 if part is None else part
        self.known[where] = True

    def load(self, at: Array, held: Array | None = None) -> Element:
        """Elements at addresses; `held` is where they are needed."""
        if self.is_given:
            found = self.source(at.reshape(-1))
            return found.map(lambda a: np.broadcast_to(a, at.size).reshape(at.shape))
        slots = self._slots(at)
        if self.is_undefined:
            missing = ~self.written[slots]
            if (missing if held is None else missing & held).any():
                raise Rejected(f"what nothing has written is read, at {at[missing].flat[0]}")
        unknown = np.unique(at[~self.known[slots]])
        for part in np.array_split(unknown, -(-len(unknown) // CHUNK)) if len(unknown) else ():
            self._put(self._slots(part), self.source(part))
        q, p, sign, infinite = (a[slots] for a in self.parts.values())
        if not is_residue(self.dtype):
            return Element(p, p)
        marks = [a.astype(np.int64) if a.any() else None for a in (sign, infinite)]
        return Element(q, p, marks[0], marks[1])

    def store(self, at: Array, x: Element) -> None:
        slots = self._slots(at)
        self._put(slots, x)
        self.written[slots] = True

    def written_at(self) -> Array:
        """Where something was stored, in order."""
        pages = np.concatenate([*self.numbers, np.zeros(0, np.int64)])
        slots = np.flatnonzero(self.written)
        return np.sort(pages[slots // PAGE] * PAGE + slots % PAGE)


def _grown(old: Array, least: int) -> Array:
    """Zeros, which take no memory where nothing is written, and what was there."""
    new = np.zeros(max(least, 2 * len(old)), old.dtype)
    new[: len(old)] = old
    return new


class Machine:
    """One kernel on memories by the names of its buffers. `picked` is what ran of each loop."""

    def __init__(self, kernel: Kernel, memory: Mapping[str, Memory], field: Field, seed: int = 0):
        self.kernel, self.field, self.seed = kernel, field, seed
        self.memory = dict(memory)
        for b in kernel.scratch:
            self.memory[b.name] = Memory(b.dtype, undefined(field, b.name, b.dtype), True)
        self.sizes = {b.name: b.size for b in (*kernel.buffers, *kernel.scratch)}
        self.own = {b.name for b in kernel.scratch}
        self.of_lanes = {b.name for b in kernel.scratch if b.lanes > 1}
        self.touched = Counter(a.buffer for a in accesses_in(kernel.body))
        self.outer = _owners(kernel)
        self.picked: dict[str, list[int]] = {}
        self.plans: dict[int, tuple[bool, Array]] = {}
        self.axes: list[int] = []  # of loops that run as arrays, the newest first
        self.variables: dict[str, Array] = {}
        self.locals: dict[str, tuple[Element, int]] = {}  # and how many axes there were
        self.mask: Array | None = None
        self.place = self.lane_place = np.zeros((), np.int64)  # whose memory scratch is
        self.places = self.count = self.ran = 0

    def run(self) -> None:
        if self.work(self.kernel.body) > MOST:
            raise NotEstablished("an iteration computes too much")
        for s in self.kernel.body:
            self.statement(s)

    # Which iterations run

    def work(self, body: Sequence[Statement]) -> int:
        """Elements that statements compute, about."""
        total = 0
        for s in body:
            if isinstance(s, For):
                often = SELDOM if s.stop is not None and s.stop.data else 1
                total += -(-len(self.plan(s)[1]) // often) * self.work(s.body)
            elif isinstance(s, Matmul):
                m, k, n = (len(x) for x in self.sides(s))
                total += m * k + k * n + m * k * n // 64
            else:
                total += sum(1 for _ in ir.values_of(s))
        return total

    def plan(self, s: For) -> tuple[bool, Array]:
        """Whether iterations of a loop run as an axis, and which of them."""
        if id(s) not in self.plans:
            is_axis = s in self.outer
            if not is_axis and (s.role != "sequential" or only_sums(s)):
                around, exempt = _around(self.kernel.body, s), self.of_lanes | _only_added(s)
                is_axis = not conflicts(s, around, frozenset(exempt))
            every = np.arange(s.extent)
            is_axis = is_axis and not any(isinstance(x, Assign) and x.scanned for x in s.body)
            if s.role in ir.SIDE_BY_SIDE and self._is_alone(s) and not self._meets(s):
                every = self._picks(s, max(2, min(12, BUDGET // max(1, self.work(s.body)))))
            self.plans[id(s)] = is_axis, every
        return self.plans[id(s)]

    def _meets(self, s: For) -> bool:
        """Whether iterations may add to one element: then all of them are needed."""
        summed = shared_sums(s.body)
        lanes = frozenset(self.of_lanes)
        return bool(summed and conflicts(s, _around(self.kernel.body, s), lanes) & summed)

    def _is_alone(self, s: For) -> bool:
        """Whether nothing outside an iteration touches what it changes."""
        every = list(accesses_in(s.body))
        inside = Counter(a.buffer for a in every)
        is_own = all(self.touched[a.buffer] == inside[a.buffer] for a in every if a.writes)
        return is_own and not ir.assigned_in(s)[1]

    def _picks(self, s: For, most: int) -> Array:
        n = s.extent
        if n <= most:
            return np.arange(n)
        rng = randomness.generator(2, self.seed, n, *s.var.encode())
        near = _at_guards(s, [x for x in ir.walk(self.kernel.body) if isinstance(x, For)])[:6]
        more = rng.integers(0, n, max(0, most - 2 - len(near))).tolist()
        found = np.unique([0, n - 1, *near, *more])
        self.picked[s.var] = found.tolist()
        return found

    # Statements

    def statement(self, s: Statement) -> None:
        self.ran += 1
        if self.ran > LONGEST:
            raise NotEstablished("too many statements run one after another")
        match s:
            case For():
                self.loop(s)
            case Assign("let", local, value):
                self.locals[local] = self.value(value), len(self.axes)
            case Assign("set", local, value):
                old, depth = self.locals[local]
                self.locals[local] = self._held(self.value(value), old), depth
            case Assign():
                self.accumulate(s)
            case Store():
                self.store(s)
            case Matmul():
                self.multiply(s)
            case ir.Library(name):
                raise NotEstablished(f"{name} is a library's")

    def _held(self, new: Element, old: Element) -> Element:
        return new if self.mask is None else chosen(self.mask, new, old)

    def accumulate(self, s: Assign) -> None:
        old, depth = self.locals[s.local]
        value, dtype, new = self.value(s.value), s.value.dtype, len(self.axes) - depth
        if not new:
            both = self._held(self.field.combined(s.op, old, value, dtype), old)
            self.locals[s.local] = both, depth
            return
        shape = tuple(self.axes)
        if self.mask is not None:
            mask = np.broadcast_to(self.mask, shape)
            value = chosen(mask, value.spread(shape), self.field.nothing(s.op, dtype))
        flat = (-1, *shape[new:])
        value = value.spread(shape).map(lambda a: a.reshape(flat))
        value = self.field.reduced(s.op, value, dtype)
        self.locals[s.local] = self.field.combined(s.op, old, value, dtype), depth

    def loop(self, s: For) -> None:
        is_axis, every = self.plan(s)
        stop = None if s.stop is None else self.index(s.stop)
        if stop is not None:
            every = every[every < int(stop.max(initial=0))]
        before = dict(self.locals), self.mask, self.place, self.lane_place
        parts = -(-len(every) * math.prod(self.axes) // CHUNK) if is_axis else len(every)
        for part in np.array_split(every, max(1, min(parts, len(every)))) if len(every) else ():
            if is_axis:
                self.axes.insert(0, len(part))
                part = part.reshape(-1, *[1] * (len(self.axes) - 1))
            else:
                part = part[0]
            self._iterations(s, part, stop)
            if is_axis:
                self.axes.pop(0)
            self.mask, self.place, self.lane_place = before[1:]
        self.variables.pop(s.var, None)
        self.locals = {n: self.locals[n] for n in before[0]}

    def _iterations(self, s: For, at: Array, stop: Array | None) -> None:
        self.variables[s.var] = at
        if stop is not None and stop.ndim:
            self.mask = at < stop if self.mask is None else (at < stop) & self.mask
        is_owner = s in self.outer
        if (is_owner and self.own) or (s.role == "vector" and self.of_lanes):
            count = math.prod(self.axes)
            fresh = self.places + np.arange(count).reshape(self.axes)
            self.places += count
            self.place = fresh if is_owner else self.place
            self.lane_place = fresh
        for inner in s.body:
            self.statement(inner)

    # Memory

    def _address(self, buffer: str, at: Array, axes: int = 0) -> Array:
        """Where an element is; what lies outside is behind a guard that does not hold. Places have
        so many axes less than addresses."""
        at = np.clip(at, 0, max(0, self.sizes[buffer] - 1))
        if buffer not in self.own:
            return at
        place = self.lane_place if buffer in self.of_lanes else self.place
        return at + self.sizes[buffer] * place.reshape(place.shape + (1,) * axes)

    def store(self, s: Store) -> None:
        mask = self.mask
        if s.guard is not None:
            held = self.value(s.guard).p == 1
            self.mask = held if mask is None else held & mask
        at, value = self._address(s.buffer, self.index(s.index)), self.value(s.value)
        self._write(s.buffer, at, value, s.adds)
        self.mask = mask

    def _write(self, buffer: str, at: Array, x: Element, adds: bool) -> None:
        memory = self.memory[buffer]
        masks = [] if self.mask is None else [self.mask.shape]
        axes = [tuple(self.axes)] if adds else []  # each iteration adds once
        shape = np.broadcast_shapes(at.shape, x.p.shape, *masks, *axes)
        at, x = np.broadcast_to(at, shape), x.spread(shape)
        if self.mask is not None:
            held = np.broadcast_to(self.mask, shape)
            at, x = at[held], x.map(lambda a: a[held])
        if adds:
            at, places = np.unique(at.reshape(-1), return_inverse=True)
            x = self.field.scattered(x, places.reshape(-1), memory.load(at), memory.dtype)
        memory.store(at, x)

    def sides(self, s: Matmul) -> tuple[Array, Array, Array]:
        """Rows, depth and columns of a product; some rows and columns if nothing else has them."""
        (m, n), k = (axis.count for axis in s.target.axes), s.left.axes[1].count
        is_small = m * n <= 2**12 and (m + n) * k <= CHUNK
        if self.touched[s.target.buffer] > 1 or is_small:
            if (m + n) * k > 8 * CHUNK:
                raise NotEstablished(f"a product of {m} by {k} by {n} is needed at once")
            return np.arange(m), np.arange(k), np.arange(n)
        rng = randomness.generator(3, self.seed, m, n)
        rows, columns = (np.unique([0, x - 1, *rng.integers(0, x, 3)]) for x in (m, n))
        return rows, np.arange(k), columns

    def multiply(self, s: Matmul) -> None:
        rows, deep, columns = self.sides(s)
        mask, self.mask = self.mask, None if self.mask is None else self.mask[..., None, None]
        dtype, found = self.memory[s.target.buffer].dtype, self.field.number(0, "float32")
        each = (len(rows) + len(columns)) * math.prod(self.axes)
        for some in np.array_split(deep, -(-len(deep) * each // CHUNK)):
            x, y = self._block(s.left, rows, some), self._block(s.right, some, columns)
            if x.infinite is not None or y.infinite is not None:
                raise NotEstablished("a product of infinities")
            found = self.field.combined("add", found, self.field.matmul(x, y), dtype)
        for factor in s.scales:
            found = self.field.combined("mul", found, self._block(factor), dtype)
        if s.bias is not None:
            found = self.field.combined("add", found, self._block(s.bias, columns), dtype)
        if s.adds:
            found = self.field.combined("add", self._block(s.target, rows, columns), found, dtype)
        self._write(s.target.buffer, self._within(s.target, rows, columns), found, False)
        self.mask = mask

    def _block(self, block: ir.Block, *along: Array) -> Element:
        return self.memory[block.buffer].load(self._within(block, *along), self.mask)

    def _within(self, block: ir.Block, *along: Array) -> Array:
        """Addresses of a block's elements: two axes beside the machine's."""
        at = self.index(block.index)[..., None, None]
        for k, (axis, places) in enumerate(zip(block.axes, along, strict=True)):
            steps = np.asarray(axis.listed, np.int64) if axis.listed else None
            moved = places * axis.stride if steps is None else steps[places]
            at = at + (moved if k == len(along) - 1 else moved[:, None])
        return self._address(block.buffer, at, 2)

    # Values

    def index(self, index: Index) -> Array:
        return index.at(self.variables, lambda name: self.locals[name][0].p)

    def value(self, value: Value) -> Element:
        field = self.field
        match value.kind:
            case "literal":
                return field.number(value.number, value.dtype)
            case "load":
                at = self._address(value.name, self.index(value.index))
                return self.memory[value.name].load(at, self.mask)
            case "local":
                return self.locals[value.name][0]
            case "position":
                return field.integers(self.index(value.index), value.dtype)
            case "within":
                at = self.index(value.index)
                return field.integers((at >= value.low) & (at < value.high), "bool")
            case "guarded":
                return self.guarded(*value.operands)
        xs, given = [self.value(v) for v in value.operands], [v.dtype for v in value.operands]
        self.count += max((x.p.size for x in xs), default=1)
        field.budget.spend(CALL // 4)
        if self.count > MOST:
            raise NotEstablished("an iteration computes too much")
        if value.name == "mulhi":
            wide = xs[0].p.astype(np.uint64) * xs[1].p.astype(np.uint64)
            return field.integers(wide >> np.uint64(32), value.dtype)
        op = "cast" if value.kind == "convert" else value.name
        return field.apply(op, xs, given, value.dtype)

    def guarded(self, guard: Value, inner: Value, other: Value) -> Element:
        """What is behind a guard that does not hold is not read."""
        condition, mask = self.value(guard), self.mask
        held = condition.p != 0
        self.mask = held if mask is None else held & mask
        xs = [condition, self.value(inner)]
        self.mask = mask
        xs.append(self.value(other))
        return self.field.apply("where", xs, ["bool", inner.dtype, inner.dtype], inner.dtype)


def undefined(field: Field, name: str, dtype: str) -> Source:
    return lambda at: field.keyed(f"undefined {name}", dtype, at)


def _owners(kernel: Kernel) -> list[For]:
    """Loops whose iterations have scratch of their own: the grid's, or the one threads share."""
    loops, body = inside_grid(kernel)
    if kernel.geometry is not None and loops:
        return loops
    first = loops[:1] or [s for s in body[:1] if isinstance(s, For) and len(body) == 1]
    return [s for s in first if s.role in ("grid", "parallel", "vector") and s.stop is None]


def _around(body: Sequence[Statement], wanted: For) -> tuple[For, ...]:
    """The loops around a loop, the outermost first."""
    for s in body:
        if isinstance(s, For) and s is not wanted and any(x is wanted for x in ir.walk(s.body)):
            return (s, *_around(s.body, wanted))
    return ()


def _only_added(loop: For) -> set[str]:
    """Buffers that iterations only add to, in any order."""
    touched = Counter(a.buffer for a in accesses_in(loop.body))
    added = Counter(s.buffer for s in ir.walk(loop.body) if isinstance(s, Store) and s.adds)
    return {name for name, count in added.items() if touched[name] == count}


def _at_guards(loop: For, loops: Sequence[For]) -> list[int]:
    """Iterations on both sides of where a guard begins or ends to hold, of loops at their ends."""
    scope, found = Scope(tuple(loops), only_ranges=True), list[int]()
    for v in (v for s in ir.walk(loop.body) for v in ir.values_of(s) if v.kind == "within"):
        step = sum(f for f, atom in v.index.terms if atom == loop.var)
        if step:
            rest = tuple(t for t in v.index.terms if t[1] != loop.var)
            for end in scope.ends(Index(v.index.offset, rest))[::-1]:
                edges = ((edge - end) // step for edge in (v.high, v.low))
                found += [edge + i for edge in edges for i in (-1, 0, 1)]
    return [i for i in dict.fromkeys(found) if 0 <= i < loop.extent]
