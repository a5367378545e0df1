"""Rows that a team walks several times stay on the chip: in registers, or in shared memory.

Loops of one turn that walk the same places in the same way give each thread the same places again.
What it loaded or stored there the first time it need not load from memory again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from treadle.codegen.cuda.shape import WARP, Shape, is_sum, lane_step, lanes_for, nested
from treadle.kernel.access import accesses, loads_of, map_loads
from treadle.kernel.index import Index, Var, data_locals, substitute, variable
from treadle.kernel.nodes import (
    Accumulate,
    For,
    Guarded,
    Kernel,
    Let,
    Load,
    Role,
    Set,
    Statement,
    Store,
    Update,
    Value,
)

MOST_TURNS = 4  # of a loop that is written out, its rows in registers
MOST_REGISTERS = 40
MOST_SHARED = 110 << 10  # bytes: two blocks fit a multiprocessor
LEAST_SHARED = 4 << 10

Key = tuple[str, Index]


@dataclass
class Stage:
    """Places of a buffer that loops of a turn walk, and where their values stay."""

    name: str
    buffer: str
    nbytes: int  # of a row
    in_registers: bool
    offset: int = 0  # in shared memory
    is_there: bool = False


@dataclass(frozen=True)
class Walk:
    """A loop that a team shares: its variable, its lanes, and its statements."""

    loop: For
    var: Var
    lanes: int
    body: tuple[Statement, ...]


@dataclass
class Stages:
    """What is kept in each loop, by the buffer and the place as of one common variable."""

    turns: int = 0  # of each loop
    lanes: int = 1
    in_registers: bool = False
    loops: dict[int, dict[Key, Stage]] = field(default_factory=dict)  # by the loop's identity
    last: set[tuple[int, Key]] = field(default_factory=set)  # where nothing reads it afterwards
    every: list[Stage] = field(default_factory=list)

    @property
    def shared(self) -> int:
        """Bytes of shared memory of a team."""
        return sum(s.nbytes for s in self.every if not s.in_registers)


def lanes_of(kernel: Kernel, loop: For, team: int) -> tuple[list[Var], tuple[Statement, ...], int]:
    """The loops that a team shares as one, what is inside, and how many turns are a thread's."""
    loops, body = nested(loop, loop.role)
    lanes = lanes_for(kernel, loops[-1], body)
    count = 1
    for v in loops:
        count *= v.extent
    while lanes > 1 and count // lanes < team:
        lanes //= 2
    return loops, body, lanes


def stages_of(kernel: Kernel, shape: Shape, is_aligned: bool) -> Stages:
    """What a team keeps of the rows it walks; nothing where a turn is one thread's."""
    if shape.team == 1 or not is_aligned:
        return Stages()
    walks = _walks(kernel, shape)
    sizes = {(w.var.extent, w.lanes) for w in walks}
    if len(sizes) != 1:
        extents = [w.var.extent * w.lanes for w in walks]
        walks = [w for w in walks if w.var.extent * w.lanes == max(extents, default=0)]
    if len(walks) < 2 or walks[0].lanes == 1:
        return Stages()
    extent, lanes = walks[0].var.extent, walks[0].lanes
    found = Stages(-(-extent // (shape.team * lanes)), lanes)
    found.in_registers = found.turns <= MOST_TURNS
    if not found.in_registers and shape.team == WARP:
        return Stages()
    itemsizes = {b.name: b.dtype.itemsize for b in kernel.buffers}
    room = MOST_REGISTERS * 4 if found.in_registers else MOST_SHARED
    for key, places in _kept(shape.body, walks).items():
        if key[0] not in itemsizes:
            continue  # the team's own memory is near already
        size = extent * itemsizes[key[0]]
        own = found.turns * lanes * itemsizes[key[0]] if found.in_registers else size
        if own > room or (not found.in_registers and size < LEAST_SHARED):
            continue
        room -= own
        size += -size % 16
        name = f"kept{len(found.every)}"
        stage = Stage(name, key[0], size, found.in_registers, found.shared)
        found.every.append(stage)
        for place in places:
            found.loops.setdefault(id(walks[place].loop), {})[key] = stage
        found.last.add((id(walks[places[-1]].loop), key))
    return found


def _walks(kernel: Kernel, shape: Shape) -> list[Walk]:
    """The loops right inside a turn that its team shares, of one variable each."""
    found: list[Walk] = []
    for s in shape.body:
        if not isinstance(s, For) or (s.role is Role.SEQUENTIAL and not is_sum(s)):
            continue
        loops, body, lanes = lanes_of(kernel, s, shape.team)
        if len(loops) == 1 and all(isinstance(t, (Let, Accumulate, Store, Update)) for t in body):
            found.append(Walk(s, loops[0], lanes, body))
    return found


COMMON = "walked"  # the variable of every loop


def key_of(buffer: str, index: Index, var: Var) -> Key:
    return buffer, ordered(substitute(index, {var: variable(Var(COMMON, var.extent))}))


def ordered(index: Index) -> Index:
    """The index with its terms in one order, so that equal ones are equal."""
    return Index(tuple(sorted(index.terms, key=lambda t: (t[1], str(t[0])))), index.offset)


def _kept(body: Sequence[Statement], walks: Sequence[Walk]) -> dict[Key, list[int]]:
    """Places that a later loop reads after an earlier one touched them, and those loops."""
    numbers = {id(w.loop): i for i, w in enumerate(walks)}
    known: dict[Key, list[int]] = {}
    done: dict[Key, list[int]] = {}
    for s in body:
        number = numbers.get(id(s))
        if number is None:
            written = {a.buffer for a in accesses([s]) if a.writes}
            _forget(known, done, written)
            continue
        walk = walks[number]
        stored, loaded = _touched(walk)
        for key in loaded:
            known.setdefault(key, []).append(number)
        written = {a.buffer for a in accesses([s]) if a.writes}
        _forget(known, done, written, keep=set(stored))
        for key in stored:
            if known.setdefault(key, [])[-1:] != [number]:
                known[key].append(number)
    _forget(known, done, {k[0] for k in known})
    return {k: v for k, v in done.items() if len(v) > 1}


def _forget(
    known: dict[Key, list[int]],
    done: dict[Key, list[int]],
    written: set[str],
    keep: set[Key] | None = None,
) -> None:
    """What was written otherwise is not kept any longer."""
    for key in [k for k in known if k[0] in written and k not in (keep or ())]:
        places = known.pop(key)
        if len(places) > len(done.get(key, [])):
            done[key] = places


def _touched(walk: Walk) -> tuple[list[Key], list[Key]]:
    """Places that a loop's statements store to and load from, whole packs without a guard."""
    stored: list[Key] = []
    loaded: list[Key] = []

    def is_pack(index: Index) -> bool:
        return not data_locals(index) and lane_step(index, walk.var, walk.lanes) == (1, True)

    def note(load: Load) -> Load:
        if is_pack(load.index):
            loaded.append(key_of(load.buffer, load.index, walk.var))
        return load

    for s in walk.body:
        if isinstance(s, (Let, Accumulate, Set, Store, Update)):
            for value in _unguarded(s.value):
                map_loads(value, note)
        if isinstance(s, Store) and s.guard is None and is_pack(s.index):
            stored.append(key_of(s.buffer, s.index, walk.var))
    return stored, loaded


def _unguarded(value: Value) -> list[Value]:
    """The value, unless parts of it stand under a guard: those are not always loaded."""
    return [] if _has_guard(value) else [value]


def _has_guard(value: Value) -> bool:
    parts = [getattr(value, n) for n in ("value", "guard", "other") if hasattr(value, n)]
    parts += list(getattr(value, "operands", ()))
    return isinstance(value, Guarded) or any(
        _has_guard(p) for p in parts if not isinstance(p, (int, float, bool, str))
    )


def own_numbers(shape: Shape) -> set[str]:
    """Buffers of which a team sets one number, outside loops, and reads nothing but that after it.

    Every thread knows the number: none has to read it.
    """
    found: dict[str, Index] = {}
    other: set[str] = set()
    for s in shape.body if shape.team > 1 else ():
        read = {x.buffer for x in loads_of(s)}
        for a in accesses([s]):
            is_set = isinstance(s, Store) and s.guard is None and a.writes
            is_set = is_set and a.buffer not in read
            if is_set and a.buffer not in found:
                found[a.buffer] = ordered(a.index)
            elif a.writes or ordered(a.index) != found.get(a.buffer):
                other.add(a.buffer)
    return found.keys() - other
