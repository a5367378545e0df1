"""How a kernel is spread over threads: which loops become the grid, and who walks the rest.

A kernel is a number of turns, the parallel loops around everything. A turn is one thread's, or a
team's: a warp or a block, whose threads share the loops inside it. The choice depends on the kernel
alone, so that results do not depend on the device.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from treadle.kernel.access import accesses, loads_of, locals_in
from treadle.kernel.cost import flops
from treadle.kernel.index import Bounded, Data, Index, Quotient, Remainder, Var, uses
from treadle.kernel.nodes import (
    Accumulate,
    For,
    Kernel,
    Let,
    Role,
    Set,
    Statement,
    Update,
)

WARP = 32
FLAT_THREADS = 256
FILLS = 1 << 15  # threads that keep a device busy
MOST_LANES = 8
ROW = 512  # operations of a turn that is a warp's where all blocks are of one size
OWN_BYTES = 512  # scratch that a thread may have by itself


@dataclass(frozen=True)
class Shape:
    """A kernel's turns, how many threads share one, and how wide accesses are."""

    lets: tuple[Statement, ...]  # before everything
    turns: tuple[Var, ...]
    body: tuple[Statement, ...]
    team: int  # threads of a turn: 1, a warp, or more
    block: int  # threads of a block
    lanes: int = 1  # turns that one thread takes at once, along the last variable
    rows: int = 1  # threads that share the sum of a turn, one in each warp of the block
    tall: int = 1  # threads of a block that share a sum, their neighbours take other sums

    @property
    def count(self) -> int:
        return math.prod(v.extent for v in self.turns)

    @property
    def teams(self) -> int:
        """Turns that a block has at a time."""
        return self.block // self.team // self.rows // self.tall

    @property
    def grid(self) -> int:
        return -(-(self.count // self.lanes) // self.teams)


def shape_of(kernel: Kernel, is_aligned: bool = True, block: int = 0) -> Shape:
    """How a kernel is spread; over blocks of as many threads as asked for, if that is said."""
    lets, turns, body = peeled(kernel)
    inner = [s for s in body if isinstance(s, For)]
    count = math.prod(v.extent for v in turns)
    if any(is_serial(s) for s in inner) or not any(is_shared(s) for s in inner):
        is_small = sum(b.nbytes for b in kernel.scratch) <= OWN_BYTES
        if is_small or any(is_serial(s) for s in inner):
            return _flat(kernel, lets, turns, body, is_aligned)
    if not kernel.scratch and _is_better_flat(turns, body, inner, count):
        return _flat(kernel, lets, turns, body, is_aligned)
    longest = max((extent_of(s) for s in _shared(body)), default=1)
    team = _team(longest, count)
    if block:
        team = WARP if flops(kernel) <= ROW * count else block
        return Shape(lets, turns, body, team, block)
    return Shape(lets, turns, body, team, max(team, 4 * WARP) if team == WARP else team)


def _team(longest: int, count: int) -> int:
    """A warp for short rows where there are many; otherwise a block that fits the row."""
    if longest <= 2 * WARP or (longest <= 2048 and count >= 1024):
        return WARP
    wanted = longest // (4 if count >= 256 else 2)
    return min(1024 if count < 256 else 512, max(2 * WARP, 1 << (wanted - 1).bit_length()))


def peeled(kernel: Kernel) -> tuple[tuple[Statement, ...], tuple[Var, ...], tuple[Statement, ...]]:
    """Values named first, the parallel loops around everything else, and what is inside.

    With scratch only the outermost loop: scratch is a turn's of that one.
    """
    body, turns = kernel.body, list[Var]()
    count = 0
    while count < len(body) - 1 and isinstance(body[count], Let):
        count += 1
    lets, rest = body[:count], body[count:]
    if not (len(rest) == 1 and _is_parallel(rest[0])):
        return (), (), body
    body = rest
    while len(body) == 1 and _is_parallel(body[0]) and not (turns and kernel.scratch):
        (loop,) = body
        assert isinstance(loop, For)
        turns.append(loop.var)
        body = loop.body
    return lets, tuple(turns), body


def _is_parallel(statement: Statement) -> bool:
    return (
        isinstance(statement, For)
        and statement.role in (Role.PARALLEL, Role.VECTOR)
        and statement.stop is None
    )


def is_sum(statement: Statement) -> bool:
    """Whether a loop in order only accumulates: its turns can be shared out."""
    if not isinstance(statement, For) or statement.role is not Role.SEQUENTIAL:
        return False
    loops, body = nested(statement, Role.SEQUENTIAL)
    if not loops or not any(isinstance(s, Accumulate) for s in body):
        return False
    own = {s.local for s in body if isinstance(s, Let)}
    summed = {s.local for s in body if isinstance(s, Accumulate)}
    if any(not isinstance(s, (Let, Accumulate)) for s in body) or own & summed:
        return False
    return not any(summed & locals_in(s.value) for s in body if isinstance(s, (Let, Accumulate)))


def nested(loop: For, role: Role) -> tuple[list[Var], tuple[Statement, ...]]:
    """Loops of one role, each right inside the other, and what they contain."""
    loops, body = [loop.var], loop.body
    while len(body) == 1 and isinstance(body[0], For) and body[0].role is role:
        if body[0].stop is not None:
            break
        loops.append(body[0].var)
        body = body[0].body
    return loops, body


def is_shared(statement: Statement) -> bool:
    """Whether a team's threads can share a loop, or loops inside it."""
    if not isinstance(statement, For):
        return False
    if _is_parallel(statement) or is_sum(statement):
        return True
    return any(is_shared(s) for s in statement.body)


def is_serial(statement: Statement) -> bool:
    """Whether a loop must be walked in order, and nothing in it can be shared."""
    if not isinstance(statement, For) or _is_parallel(statement) or is_sum(statement):
        return False
    return not any(is_shared(s) for s in statement.body) or any(
        isinstance(s, (Set, Update)) or is_serial(s) for s in statement.body
    )


def _shared(body: Sequence[Statement]) -> Iterator[For]:
    for s in body:
        if isinstance(s, For):
            if _is_parallel(s) or is_sum(s):
                yield s
            else:
                yield from _shared(s.body)


def extent_of(loop: For) -> int:
    return math.prod(v.extent for v in nested(loop, loop.role)[0])


def _is_better_flat(
    turns: Sequence[Var], body: Sequence[Statement], inner: Sequence[For], count: int
) -> bool:
    """Whether threads that sum by themselves do better: few terms, or neighbours read together."""
    if not inner or not all(is_sum(s) for s in inner):
        return bool(inner) and count >= FILLS and max(map(extent_of, inner)) <= 8
    if count >= FILLS and max(map(extent_of, inner)) <= 16:
        return True
    if not turns or count < 4096:
        return False
    return lies_across(turns, inner) and turns[-1].extent >= WARP


def lies_across(turns: Sequence[Var], inner: Sequence[For]) -> bool:
    """Whether neighbours of what is summed belong to other sums."""
    last = turns[-1]
    loads = [x for s in inner for t in nested(s, Role.SEQUENTIAL)[1] for x in loads_of(t)]
    summed = [nested(s, Role.SEQUENTIAL)[0][-1] for s in inner]
    both = [x.index for x in loads if x.index.factor_of(last) != 0]
    both = [i for i in both if any(i.factor_of(v) != 0 for v in summed)]  # what is large
    across = sum(lane_step(i, last, 1)[0] == 1 for i in both)
    along = sum(lane_step(i, v, 1)[0] == 1 for i in both for v in summed)
    return across > along


def _flat(
    kernel: Kernel,
    lets: tuple[Statement, ...],
    turns: tuple[Var, ...],
    body: tuple[Statement, ...],
    is_aligned: bool,
) -> Shape:
    lanes = 1
    if turns and is_aligned and not kernel.scratch:
        lanes = lanes_for(kernel, turns[-1], body)
        count = math.prod(v.extent for v in turns)
        while lanes > 1 and count // lanes < FILLS // 2:
            lanes //= 2
    return Shape(lets, turns, body, 1, FLAT_THREADS, lanes)


def lanes_for(kernel: Kernel, var: Var, body: Sequence[Statement]) -> int:
    """How many neighbours a thread should take at once along a loop: accesses of 16 bytes."""
    sizes = {b.name: b.dtype.itemsize for b in (*kernel.buffers, *kernel.scratch)}
    near = [
        sizes[a.buffer]
        for a in accesses(list(body))
        if a.low == a.high == 0 and lane_step(a.index, var, 1)[0] == 1
    ]
    if not near:
        return 1
    lanes = min(MOST_LANES, 16 // min(near))
    if max(near) == 8:
        lanes = min(lanes, 2)
    while lanes > 1 and var.extent % lanes:
        lanes //= 2
    return lanes


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
