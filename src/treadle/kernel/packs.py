"""Accesses of neighbouring iterations that lie together: packs that one instruction moves."""

from __future__ import annotations

from collections.abc import Sequence

from treadle.base.dtypes import float16
from treadle.kernel.access import accesses, locals_in
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
from treadle.kernel.nodes import (
    Accumulate,
    For,
    Kernel,
    Let,
    Load,
    Local,
    Position,
    Statement,
    Store,
    Within,
)
from treadle.kernel.target import Mapping
from treadle.kernel.traverse import subvalues, values_of, walk


def lanes_for(kernel: Kernel, var: Var, body: Sequence[Statement], mapping: Mapping) -> int:
    """How many neighbours a thread should take at once along a loop: accesses of a whole pack."""
    sizes = {b.name: b.dtype.itemsize for b in (*kernel.buffers, *kernel.scratch)}
    near = [
        sizes[a.buffer]
        for a in accesses(list(body))
        if a.low == a.high == 0 and lane_step(a.index, var, 1)[0] == 1
    ]
    if not near or not _end_alike(var, body):
        return 1
    if any(isinstance(s, For) and s.unroll == 0 for s in walk(body)):
        return 1  # what is long is written once
    lanes = min(mapping.lanes, mapping.pack // min(near))
    if max(near) == 8:
        lanes = min(lanes, mapping.pack // 8)
    while lanes > 1 and var.extent % lanes:
        lanes //= 2
    return lanes


def _end_alike(var: Var, body: Sequence[Statement]) -> bool:
    """Whether neighbours make as many iterations of every loop that ends where data says."""
    lets = {s.local: s.value for s in walk(body) if isinstance(s, Let)}
    stops = [s.stop for s in walk(body) if isinstance(s, For) and s.stop is not None]
    pending = {local for stop in stops for local in data_locals(stop)}
    seen: set[str] = set()
    while pending - seen:
        local = (pending - seen).pop()
        seen.add(local)
        value = lets.get(local)
        if value is None:
            continue
        pending |= locals_in(value)
        indices = [v.index for v in subvalues(value) if isinstance(v, Load | Position | Within)]
        pending |= {name for index in indices for name in data_locals(index)}
        if any(uses(atom, var) for index in indices for atom, _ in index.terms):
            return False
    return True


def lane_step(index: Index, var: Var, lanes: int) -> tuple[int | None, bool]:
    """How far a lane moves an index (None: not evenly), and whether the first is a whole pack.

    The first lane's variable is a multiple of the number of lanes.
    """
    step, aligned = 0, index.offset % lanes == 0
    for atom, factor in index.terms:
        if not uses(atom, var):
            aligned = aligned and factor % lanes == 0
            continue
        match atom:
            case Var():
                step += factor
            case Bounded(inner, _):
                own, even = lane_step(inner, var, lanes)
                if own is None:
                    return None, False
                step += factor * own
                aligned = aligned and (even or factor % lanes == 0)
            case Quotient(inner, divisor) | Remainder(inner, divisor):
                own, even = lane_step(inner, var, lanes)
                if own == 0:
                    aligned = aligned and factor % lanes == 0
                elif own == 1 and even and divisor % lanes == 0:
                    if isinstance(atom, Remainder):
                        step += factor
                    else:
                        aligned = aligned and factor % lanes == 0
                else:
                    return None, False
            case Data():
                return None, False
    return step, aligned


def is_pack(index: Index, var: Var, lanes: int) -> bool:
    """Whether elements of neighbouring iterations lie together, the first at a whole pack."""
    return lane_step(index, var, lanes) == (1, True)


def copy_of(body: Sequence[Statement]) -> tuple[Store, Load] | None:
    """What a loop copies from one place to another, element by element; None for other loops."""
    match body:
        case (Store(guard=None, value=Load() as load) as store,):
            return store, load
        case (Let(local, Load() as load), Store(guard=None, value=Local(name)) as store):
            return (store, load) if name == local else None
        case _:
            return None


def copied_lanes(kernel: Kernel, var: Var, body: Sequence[Statement], lanes: int) -> int:
    """Elements that a group copies to its memory at a time: whole packs of one narrow float."""
    found, types = copy_of(body), {b.name: b.dtype for b in (*kernel.buffers, *kernel.scratch)}
    if found is None or found[0].buffer not in {b.name for b in kernel.scratch}:
        return 1
    store, load = found
    is_narrow = types[store.buffer] is types[load.buffer] is float16
    is_whole = all(is_pack(x.index, var, lanes) for x in found) and var.extent % lanes == 0
    return lanes if is_narrow and is_whole else 1


def packed_stores(body: Sequence[Statement], size: int) -> list[tuple[Store, ...]]:
    """Stores of a thread that fill whole packs, of which it names the elements one by one."""
    if not all(isinstance(s, Let | Store | Accumulate) for s in body):
        return []
    stores = [s for s in body if isinstance(s, Store)]
    found: list[tuple[Store, ...]] = []
    for first in stores:
        is_whole = all(f % size == 0 for _, f in first.index.terms)
        if not is_whole or first.index.offset % size:
            continue
        wanted = [first.index + u for u in range(size)]
        beside = [s for s in stores if (s.buffer, s.guard) == (first.buffer, first.guard)]
        pack = tuple(s for at in wanted for s in beside if s.index == at)
        if len(pack) == size and not _reads_back(body, pack):
            found.append(pack)
    return found


def _reads_back(body: Sequence[Statement], pack: Sequence[Store]) -> bool:
    """Whether something may read what a store of a pack wrote before."""
    written: list[Index] = []
    for s in body:
        loads = [v for value in values_of(s) for v in subvalues(value) if isinstance(v, Load)]
        for load in (x for x in loads if x.buffer == pack[0].buffer):
            if any(load.index.terms != i.terms or load.index == i for i in written):
                return True
        if isinstance(s, Store) and s in pack:
            written.append(s.index)
    return False
