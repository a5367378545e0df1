"""Statements of a group of threads: loops shared out, barriers, and rows that stay on the chip.

A barrier stands where threads meet in memory. Loops of one iteration of the grid that walk the same
elements in the same way give each thread the same elements again. What it loaded or stored there
the first time is staged, in registers or in shared memory: copied to a row that later loops read in
place of memory. Numbers that every thread of a group knows are locals.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from treadle.kernel.access import accesses, loads_of, locals_in, map_loads, names_in, written_in
from treadle.kernel.contraction import size
from treadle.kernel.cost import padded
from treadle.kernel.index import Index, Var, data_locals, substitute, variable
from treadle.kernel.nodes import (
    Accumulate,
    Barrier,
    Buffer,
    For,
    Guarded,
    Kernel,
    Let,
    Load,
    Local,
    Role,
    Space,
    Statement,
    Store,
    Update,
    Value,
)
from treadle.kernel.packs import copied_lanes, is_pack, lanes_for
from treadle.kernel.target import Mapping
from treadle.kernel.traverse import (
    indices_of,
    map_statements,
    map_values,
    substituted,
    subvalues,
    values_of,
)
from treadle.schedule.mapping.shapes import is_parallel
from treadle.schedule.nests import Body, is_scan, is_sum, nested

PACKED = 4  # elements of float16 that are copied at once: a vector of a shader


def in_order(body: Sequence[Statement]) -> Body:
    """Statements of one thread, which runs every loop in order."""
    return map_statements(
        body, lambda s: [replace(s, role=Role.SEQUENTIAL) if isinstance(s, For) else s]
    )


def nest(
    loops: Sequence[Var], role: Role, body: Sequence[Statement], lanes: int = 1, unroll: int = 1
) -> Body:
    """Loops of one role around statements; a thread takes lanes of the innermost."""
    inner = tuple(body)
    for i, var in enumerate(reversed(loops)):
        inner = (For(var, role, inner, None, 1 if i else lanes, 1 if i else unroll),)
    return inner


@dataclass
class Group:
    """What the threads of a group do with statements of theirs, one after the other.

    A barrier stands before a statement that touches what other threads may have written since the
    last one, or writes what they may have read.
    """

    kernel: Kernel
    mapping: Mapping
    share: int  # threads
    is_aligned: bool
    is_cooperative: bool = False
    ignored: frozenset[str] = frozenset()  # buffers of which nothing is read back
    held: dict[str, int] = field(default_factory=dict)  # rows of sums, and their lanes
    in_shared: frozenset[str] = frozenset()  # rows that are staged in shared memory
    matrices: frozenset[str] = frozenset()  # that warps hold
    written: set[str] = field(default_factory=set)  # since the last barrier
    touched: set[str] = field(default_factory=set)

    @property
    def role(self) -> Role:
        return Role.SUBGROUP if self.share <= self.mapping.exchanging else Role.GROUP

    def statements(self, body: Body, staged: Body | None = None) -> list[Statement]:
        """The statements mapped; `staged` are the same, with rows where they are staged."""
        found: list[Statement] = []
        for s, moved in zip(body, body if staged is None else staged, strict=True):
            if isinstance(s, For) and not (is_parallel(s) or is_sum(s) or is_scan(s)):
                found += self._in_sequence(s)
                continue
            found += self._barrier_before(s)
            if isinstance(s, For) and isinstance(moved, For):
                found += self._shared(s, moved)
            else:
                found.append(moved)
        return found

    def barrier(self) -> list[Statement]:
        """A barrier, if anything was touched since the last."""
        if not self.written and not self.touched:
            return []
        self.written, self.touched = set(), set()
        return [Barrier(self.role)]

    def _barrier_before(self, statement: Statement) -> list[Statement]:
        every = [a for a in accesses([statement]) if a.buffer not in self.ignored]
        touched = {a.buffer for a in every}
        written = {a.buffer for a in every if a.writes}
        meets = touched & self.written or written & self.touched
        found = self.barrier() if meets else []
        self.touched |= touched
        self.written |= written
        return found

    def _in_sequence(self, loop: For) -> list[Statement]:
        """Iterations one after the other, each the whole group's."""
        before = self.barrier()
        body = self.statements(loop.body)
        body += self.barrier()
        return [*before, replace(loop, role=Role.SEQUENTIAL, body=tuple(body))]

    def _lanes(self, loop: For, share: int) -> int:
        if not self.is_aligned:
            return 1
        held = {self.held[a.buffer] for a in accesses([loop]) if a.buffer in self.held}
        if held:
            return held.pop()
        if self.mapping.matrices and share > self.mapping.warp:
            loops, body = nested(loop)
            packed = copied_lanes(self.kernel, loops[-1], body, PACKED)
            if packed > 1:
                return packed
        return lanes_of(self.kernel, loop, share, self.mapping)

    def _shared(self, loop: For, moved: For) -> Body:
        """Iterations of a loop shared out among threads; among warps if they are few and long."""
        loops, _ = nested(loop)
        body = nested(moved)[1]
        role, share = self.role, self.share
        if role is Role.GROUP and _touches(loop, self.matrices):
            return self._by_strips(moved)
        if self.is_cooperative and role is Role.GROUP:
            if is_parallel(loop) and self._is_for_warps(loops, body):
                return self._by_warps(loops, body)
            if is_sum(loop) and size(loops) <= 2 * self.mapping.warp:
                # So few that each warp sums all of them: nobody waits for the others.
                role, share = Role.SUBGROUP, self.mapping.warp
        unroll = self.mapping.ahead if _touches(moved, self.in_shared) else 1
        return nest(loops, role, in_order(body), self._lanes(loop, share), unroll)

    def _is_for_warps(self, loops: Sequence[Var], body: Body) -> bool:
        """Whether iterations are fewer than threads, and each is one sum worth sharing."""
        inner = [s for s in body if isinstance(s, For)]
        if len(inner) != 1 or not is_sum(inner[0]):
            return False
        if any(isinstance(s, (Update, Accumulate)) for s in body):
            return False
        depth = size(nested(inner[0])[0])
        return 2 * size(loops) <= self.share and depth >= self.mapping.warp

    def _by_warps(self, loops: Sequence[Var], body: Body) -> Body:
        """Each iteration a warp's: one thread stores what all of the warp may have read."""
        warp = replace(
            self, share=self.mapping.warp, is_cooperative=False, written=set(), touched=set()
        )
        return nest(loops, Role.GROUP, warp.statements(body))

    def _by_strips(self, loop: For) -> Body:
        """A strip for each warp, which is an iteration, or as many of them."""
        strips, var = self.share // self.mapping.warp, loop.var
        each, rest = divmod(var.extent, strips)
        assert not rest, "rows of matrices that warps hold are theirs alone"
        if each == 1:
            return self._by_warps([var], loop.body)
        strip, row = Var(f"{var.name}_strip", strips), Var(f"{var.name}_row", each)
        inside = {var: variable(strip) * each + variable(row)}
        (inner,) = nest([row], loop.role, substituted(loop.body, inside))
        return self._by_warps([strip], (inner,))


def _touches(loop: For, buffers: frozenset[str]) -> bool:
    return bool(buffers) and any(a.buffer in buffers for a in accesses([loop]))


Key = tuple[str, Index]  # a buffer, and an index as of one common variable
COMMON = "walked"


@dataclass(frozen=True)
class Stage:
    """A row that loops of a group walk, the memory it is staged in, and where the loops stand."""

    memory: Buffer
    key: Key
    loops: tuple[int, ...]


def lanes_of(kernel: Kernel, loop: For, share: int, mapping: Mapping) -> int:
    """How many iterations of the loops that a group shares as one are a thread's at a time."""
    loops, body = nested(loop)
    lanes = lanes_for(kernel, loops[-1], body, mapping)
    while lanes > 1 and size(loops) // lanes < share:
        lanes //= 2
    return lanes


def stages_of(kernel: Kernel, body: Body, share: int, mapping: Mapping) -> list[Stage]:
    """What a group stages of the rows it walks."""
    walks = {i: s for i, s in enumerate(body) if isinstance(s, For) and _is_walk(s)}
    sizes = {i: (s.var.extent, lanes_of(kernel, s, share, mapping)) for i, s in walks.items()}
    extent, lanes = max(sizes.values(), key=math.prod, default=(0, 1))
    walks = {i: s for i, s in walks.items() if sizes[i] == (extent, lanes)}
    if len(walks) < 2 or lanes == 1:
        return []
    packs = -(-extent // (share * lanes))
    in_registers = packs <= mapping.unrolled
    if not in_registers and share <= mapping.warp:
        return []
    dtypes = {b.name: b.dtype for b in kernel.buffers}
    limit = mapping.shared_limit - sum(padded(b.nbytes) for b in kernel.scratch)
    room = mapping.registers if in_registers else min(mapping.staged, limit)
    space = Space.PRIVATE if in_registers else Space.SHARED
    found = list[Stage]()
    # A group's own rows first: what all groups read (a norm's weights) is in the cache anyway.
    wanted = sorted(_repeated(body, walks, lanes).items(), key=lambda x: len(x[0][1].terms) == 1)
    for key, loops in wanted:
        if key[0] not in dtypes:
            continue  # the group's own memory is near already
        memory = Buffer(f"staged{len(found)}", dtypes[key[0]], extent, 1, space, lanes)
        own = packs * lanes * memory.dtype.itemsize if in_registers else memory.nbytes
        if own > room or (not in_registers and own < mapping.least_staged):
            continue
        room -= own
        found.append(Stage(memory, key, tuple(loops)))
    return found


def _is_walk(loop: For) -> bool:
    """Whether a loop is one variable's, and a group shares it."""
    if loop.role is Role.SEQUENTIAL and not is_sum(loop):
        return False
    loops, inner = nested(loop)
    return len(loops) == 1 and all(isinstance(s, (Let, Accumulate, Store, Update)) for s in inner)


def key_of(buffer: str, index: Index, var: Var) -> Key:
    return buffer, ordered(substitute(index, {var: variable(Var(COMMON, var.extent))}))


def ordered(index: Index) -> Index:
    """The index with its terms in one order, so that equal ones are equal."""
    return Index(tuple(sorted(index.terms, key=lambda t: (t[1], str(t[0])))), index.offset)


def _repeated(body: Body, walks: dict[int, For], lanes: int) -> dict[Key, list[int]]:
    """Elements that a later loop reads after an earlier one touched them, and those loops."""
    known: dict[Key, list[int]] = {}
    done: dict[Key, list[int]] = {}
    for i, s in enumerate(body):
        written = written_in([s])
        if i not in walks:
            _forget(known, done, written)
            continue
        stored, loaded = _touched(walks[i], lanes)
        for key in loaded:
            known.setdefault(key, []).append(i)
        _forget(known, done, written, keep=set(stored))
        for key in stored:
            if known.setdefault(key, [])[-1:] != [i]:
                known[key].append(i)
    _forget(known, done, {k[0] for k in known})
    return {k: v for k, v in done.items() if len(v) > 1}


def _forget(
    known: dict[Key, list[int]],
    done: dict[Key, list[int]],
    written: set[str],
    keep: set[Key] | None = None,
) -> None:
    """What was written otherwise is not staged any longer."""
    for key in [k for k in known if k[0] in written and k not in (keep or ())]:
        loops = known.pop(key)
        if len(loops) > len(done.get(key, [])):
            done[key] = loops


def _touched(loop: For, lanes: int) -> tuple[list[Key], list[Key]]:
    """Elements that a loop's statements store to and load from, whole packs without a guard."""
    stored: list[Key] = []
    loaded: list[Key] = []

    def is_row(index: Index) -> bool:
        return not data_locals(index) and is_pack(index, loop.var, lanes)

    for s in loop.body:
        for value in values_of(s):
            parts = list(subvalues(value))
            if not any(isinstance(v, Guarded) for v in parts):
                loads = (v for v in parts if isinstance(v, Load) and is_row(v.index))
                loaded += [key_of(x.buffer, x.index, loop.var) for x in loads]
        if isinstance(s, Store) and s.guard is None and is_row(s.index):
            stored.append(key_of(s.buffer, s.index, loop.var))
    return stored, loaded


# Rewriting


def with_stages(body: Body, stages: Sequence[Stage], there: Sequence[Stage] = ()) -> Body:
    """The statements with rows read from where they are staged, and copied there first.

    Some may be `there` from the start.
    """
    filled = {stage.memory.name for stage in there}
    found: list[Statement] = []
    for i, s in enumerate(body):
        here = {stage.key: stage for stage in stages if i in stage.loops}
        if isinstance(s, For) and here:
            unread = {key for key, stage in here.items() if stage.loops[-1] == i}
            s = replace(s, body=_staged(s, here, unread, filled))
        found.append(s)
    return tuple(found)


def _staged(loop: For, here: dict[Key, Stage], unread: set[Key], filled: set[str]) -> Body:
    at = variable(loop.var)
    found: list[Statement] = []

    def stage_of(load: Load) -> Stage | None:
        return here.get(key_of(load.buffer, load.index, loop.var))

    def read(load: Load) -> Load:
        stage = stage_of(load)
        is_there = stage is not None and stage.memory.name in filled
        return Load(stage.memory.name, at, load.dtype) if stage and is_there else load

    for s in loop.body:
        for load in (x for value in values_of(s) for x in _outside_guards(value)):
            stage = stage_of(load)
            if stage is not None and stage.memory.name not in filled:
                found.append(Store(stage.memory.name, at, load))
                filled.add(stage.memory.name)
        moved = map_values(s, lambda value: map_loads(value, read))
        key = key_of(s.buffer, s.index, loop.var) if isinstance(s, Store) else None
        if isinstance(moved, Store) and moved.guard is None and key in here and key not in unread:
            name, dtype = here[key].memory.name, here[key].memory.dtype
            found.append(Store(name, at, moved.value))
            filled.add(name)
            moved = replace(moved, value=Load(name, at, dtype))
        found.append(moved)
    return tuple(found)


def _outside_guards(value: Value) -> list[Load]:
    """Loads that are made whatever a guard says."""
    every = subvalues(value, lambda v: not isinstance(v, Guarded))
    return [v for v in every if isinstance(v, Load)]


# Sums of a group


def side_by_side(body: Body) -> Body:
    """Sums of as many terms as one loop, where the later one needs nothing that comes between.

    Threads then wait for each other's parts of both at once.
    """
    found = list(body)
    for i, s in enumerate(found):
        if not isinstance(s, For) or not is_sum(s):
            continue
        j = next((k for k in range(i + 1, len(found)) if isinstance(found[k], For)), None)
        both = None if j is None else _as_one(s, found[i + 1 : j], found[j])
        if j is not None and both is not None:
            return side_by_side((*found[:i], *both, *found[j + 1 :]))
    return tuple(found)


def _as_one(first: For, between: Sequence[Statement], second: Statement) -> Body | None:
    """Both sums as one loop before what is between them; None if that changes something."""
    if not isinstance(second, For) or not is_sum(second):
        return None
    (loops, inner), (others, more) = nested(first), nested(second)
    if [v.extent for v in loops] != [v.extent for v in others]:
        return None
    sums = {s.local for s in more if isinstance(s, Accumulate)}
    starts = [s for s in between if isinstance(s, Let) and s.local in sums]
    rest = [s for s in between if s not in starts]
    made = names_in(rest) | {s.local for s in inner if isinstance(s, Accumulate)}
    used = set[str]().union(*(locals_in(v) for s in (*starts, *more) for v in values_of(s)))
    used |= {name for index in indices_of(more) for name in data_locals(index)}
    stored = written_in(rest)
    read = {a.buffer for a in accesses(more)}
    if made & used or stored & read or names_in(inner) & names_in(more) or len(starts) < len(sums):
        return None
    values = {old: variable(new) for old, new in zip(others, loops, strict=True)}
    whole = nest(loops, first.role, (*inner, *substituted(more, values)))
    return (*starts, *whole, *rest)


# Numbers of a group


def with_locals(body: Body, scratch: Sequence[Buffer]) -> tuple[Body, set[str]]:
    """Numbers that a group sets once as locals, and the buffers that they were in."""
    own, taken = _own_numbers(body), names_in(body)
    named: dict[str, Local] = {}
    kept = {b.name for b in scratch}
    found: list[Statement] = []

    def read(load: Load) -> Value:
        return named.get(load.buffer, load)

    for s in body:
        moved = map_values(s, lambda value: map_loads(value, read))
        if isinstance(moved, Store) and moved.buffer in own:
            name = f"known{len(named)}"
            while name in taken:
                name += "_"
            local = named[moved.buffer] = Local(name, moved.value.dtype)
            found.append(Let(name, moved.value))
            if moved.buffer in kept:
                continue
            moved = replace(moved, value=local)
        found.append(moved)
    return tuple(found), own


def _own_numbers(body: Body) -> set[str]:
    """Buffers of which a group sets one number, outside loops, and reads nothing else after it."""
    found: dict[str, Index] = {}
    other: set[str] = set()
    for s in body:
        read = {x.buffer for x in loads_of(s)}
        for a in accesses([s]):
            is_set = isinstance(s, Store) and s.guard is None and a.writes
            is_set = is_set and a.buffer not in read
            if is_set and a.buffer not in found:
                found[a.buffer] = ordered(a.index)
            elif a.writes or ordered(a.index) != found.get(a.buffer):
                other.add(a.buffer)
    return found.keys() - other
