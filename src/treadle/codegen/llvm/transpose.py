"""Loops that only move elements from columns to rows: squares transposed in registers.

Element by element, each line of the source is read once for every lane; where lines are a power of
two apart they also push each other out of the cache.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from treadle.base import dtypes
from treadle.codegen.llvm.emitter import Function, Reg, vector, width_of
from treadle.kernel.index import Index, Var
from treadle.kernel.machine import Machine
from treadle.kernel.nodes import For, Let, Load, Local, Role, Store

Address = Callable[[str, Index], Reg]  # of an element, loop variables as they stand


@dataclass(frozen=True, slots=True)
class Transposition:
    """Read in order of the outer variable, written in order of the inner one."""

    outer: Var
    inner: Var
    source: Load
    target: Store
    width: int  # of a square


_PAGE = 4096  # bytes
_MOST_RUN = 1024  # bytes: along a longer one processors fetch ahead by themselves


def _moved(loop: For) -> tuple[Var, Var, Load, Store] | None:
    """Two loops, one right inside the other, that load and store elements and do nothing else."""
    match loop:
        case For(outer, _, (For(inner, Role.VECTOR, body, None),), None):
            pass
        case _:
            return None
    match body:
        case (Store(_, _, Load() as load, None) as store,):
            return outer, inner, load, store
        case (Let(name, Load() as load), Store(_, _, Local(used), None) as store) if used == name:
            return outer, inner, load, store
        case _:
            return None


def run_of(loop: For) -> tuple[Load, int] | None:
    """What a loop copies in short runs, each on another page, and their elements."""
    found = _moved(loop)
    if found is None:
        return None
    outer, inner, load, _ = found
    size, far = load.dtype.itemsize, load.index.factor_of(outer)
    is_run = load.index.factor_of(inner) == 1 and inner.extent * size <= _MOST_RUN
    return (load, inner.extent) if is_run and far and abs(far) * size >= _PAGE // 2 else None


def transposition(loop: For, machine: Machine) -> Transposition | None:
    """The move that two loops make in whole squares."""
    found = _moved(loop)
    if found is None:
        return None
    outer, inner, load, store = found
    is_transposed = load.index.factor_of(outer) == 1 and store.index.factor_of(inner) == 1
    steps = load.index.factor_of(inner), store.index.factor_of(outer)
    if not is_transposed or None in steps or load.dtype is not dtypes.float32:
        return None
    # Half a vector's squares take as long for an element as whole ones.
    widths = [w for w in (machine.width, machine.width // 2) if w >= machine.least_width]
    width = next((w for w in widths if not outer.extent % w and not inner.extent % w), None)
    return None if width is None else Transposition(outer, inner, load, store, width)


def write(f: Function, move: Transposition, variables: dict[Var, Reg], at: Address) -> None:
    """Squares in order of the target."""
    with f.loop(0, move.outer.extent, move.width) as outer:
        variables[move.outer] = outer.counter
        with f.loop(0, move.inner.extent, move.width) as inner:
            variables[move.inner] = inner.counter
            _square(f, move, at)
    del variables[move.outer], variables[move.inner]


def _square(f: Function, move: Transposition, at: Address) -> None:
    width, type_ = move.width, vector("float", move.width)
    far = move.source.index.factor_of(move.inner) or 0
    apart = move.target.index.factor_of(move.outer) or 0
    rows: list[Reg] = []
    for i in range(width):
        address = at(move.source.buffer, move.source.index + far * i)
        rows.append(f.load(type_, address, 4))
    for i, row in enumerate(transposed(f, rows)):
        address = at(move.target.buffer, move.target.index + apart * i)
        f.store(row, address, 4)


def transposed(f: Function, rows: list[Reg]) -> list[Reg]:
    """As many vectors as each has lanes, transposed: halves are interleaved until all are."""
    width = len(rows)
    for _ in range(width.bit_length() - 1):
        pairs = zip(rows[: width // 2], rows[width // 2 :], strict=True)
        rows = [_interleaved(f, a, b, half) for a, b in pairs for half in (0, 1)]
    return rows


def _interleaved(f: Function, a: Reg, b: Reg, half: int) -> Reg:
    """Lanes of two vectors in alternation: those of the lower halves, or of the upper ones."""
    width = width_of(a.type)
    first = half * width // 2
    return f.shuffle(a, b, [first + i // 2 + (i % 2) * width for i in range(width)])
