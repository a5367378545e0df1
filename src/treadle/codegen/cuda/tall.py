"""Sums of columns that rows of a block's threads share: each sums some rows, then all add up.

A kernel may have several such sums, one after the other; what is stored between them waits for the
end, as other threads may still read what it changes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext

from treadle.codegen.cuda import scalars
from treadle.codegen.cuda.columns import columns_of, identity
from treadle.codegen.cuda.lanes import Lanes
from treadle.codegen.cuda.shape import (
    FILLS,
    FLAT_THREADS,
    Shape,
    extent_of,
    is_sum,
    lanes_for,
    lies_across,
    nested,
    peeled,
    shape_of,
)
from treadle.kernel.access import accesses, loads_of, locals_in
from treadle.kernel.index import uses
from treadle.kernel.nodes import Accumulate, For, Kernel, Let, Literal, Role, Statement, Store

AHEAD = 4  # packs of one tensor that a thread asks for before it adds up
OPS = {"add": "Add", "mul": "Mul", "max": "Max", "min": "Min"}
TALLEST = 32
FULL = 1 << 18  # threads beyond which a sum is not shared out
SHARED = 32 << 10  # bytes of shared memory for sums of threads


def tall_of(kernel: Kernel, is_aligned: bool = True) -> Shape | None:
    """Sums of columns: neighbouring threads take neighbouring columns, others more of the rows."""
    lets, turns, body = peeled(kernel)
    loops = [s for s in body if isinstance(s, For)]
    if not loops or not turns or kernel.scratch or not are_sums_of_columns(body):
        return None
    if not lies_across(turns, loops):
        return None
    rows, count = min(map(extent_of, loops)), math.prod(v.extent for v in turns)
    inner = [s for loop in loops for s in nested(loop, Role.SEQUENTIAL)[1]]
    room = sum(s.value.dtype.itemsize for s in inner if isinstance(s, Accumulate)) * FLAT_THREADS
    lanes = lanes_for(kernel, turns[-1], body) if is_aligned else 1
    while lanes > 1 and (count // lanes * TALLEST < FILLS // 4 or room * lanes > SHARED):
        lanes //= 2
    tall = TALLEST
    while tall > 1:
        is_even = count // lanes % (FLAT_THREADS // tall) == 0
        if is_even and 4 * tall <= rows and count // lanes * tall <= FULL:
            return Shape(lets, turns, body, 1, FLAT_THREADS, lanes, tall=tall)
        tall //= 2
    return None


def are_sums_of_columns(body: Sequence[Statement]) -> bool:
    """Whether all loops accumulate, and what is stored between them is not read afterwards.

    Such stores can wait for the end.
    """
    loops = [i for i, s in enumerate(body) if isinstance(s, For)]
    if any(not isinstance(s, (For, Let, Store)) for s in body):
        return False
    for i, s in enumerate(body[: loops[-1]]):
        rest = accesses(body[i + 1 :])
        if isinstance(s, Store) and any(a.buffer == s.buffer and not a.writes for a in rest):
            return False
    return all(_is_sum_of_columns(body[:i], body[i]) for i in loops)


def _is_sum_of_columns(before: Sequence[Statement], loop: Statement) -> bool:
    """Whether a loop only accumulates from nothing, and perhaps keeps what it adds."""
    assert isinstance(loop, For)
    inner = nested(loop, Role.SEQUENTIAL)[1]
    if loop.role is not Role.SEQUENTIAL or loop.stop is not None:
        return False
    kept = [s for s in inner if isinstance(s, Store)]
    plain = tuple(s for s in inner if not isinstance(s, Store))
    sums = {s.local: s for s in plain if isinstance(s, Accumulate)}
    first = {s.local: s.value for s in before if isinstance(s, Let)}
    for name, s in sums.items():
        start = first.get(name)
        if not isinstance(start, Literal) or start.value != identity(s):
            return False
    is_plain = is_sum(For(loop.var, Role.SEQUENTIAL, plain))
    is_free = not any(s.guard or set(sums) & locals_in(s.value) for s in kept)
    return is_plain and is_free


def chosen_shape(kernel: Kernel, is_aligned: bool = True) -> Shape:
    """How a kernel is spread; of two ways to share sums of columns the one with more threads."""
    tall, columns = tall_of(kernel, is_aligned), columns_of(kernel) if is_aligned else None
    if tall is not None and columns is not None:
        return tall if tall.grid * tall.block > columns.grid * columns.block else columns
    return tall or columns or shape_of(kernel, is_aligned)


class Tall(Lanes):
    """Writes such kernels; what a thread does with a statement is the writer's."""

    def __init__(self, kernel: Kernel, shape: Shape, is_wide: bool, is_loose: bool):
        super().__init__(kernel, is_wide, is_loose)
        self.shape = shape

    def thread(self, statement: Statement) -> None:
        raise NotImplementedError

    def thread_all(self, body: Sequence[Statement]) -> None:
        for s in body:
            self.thread(s)

    def begin_tall(self) -> None:
        """Which turn this is, and which row of threads."""
        type_, teams, lanes = self.index_type, self.shape.teams, self.shape.lanes
        self.add(f"const int tx = threadIdx.x % {teams}, ty = threadIdx.x / {teams};")
        scale = "" if lanes == 1 else f" * {lanes}"
        self.add(f"const {type_} turn = (({type_})blockIdx.x * {teams} + tx){scale};")

    def whole_tall(self) -> None:
        lanes, last = self.shape.lanes, self.shape.turns[-1]
        with self.in_lanes(last, lanes, self.shape.body) if lanes > 1 else nullcontext():
            self._tall()

    def _tall(self) -> None:
        """Sums of columns: rows of threads each sum some of the rows, then the first adds up."""
        body = self.shape.body
        last = max(i for i, s in enumerate(body) if isinstance(s, For))
        early = [s for s in body[:last] if isinstance(s, Store)]
        for i, s in enumerate(body[: last + 1]):
            if isinstance(s, For):
                self._tall_sum(s, i == last)
            elif isinstance(s, Let):
                self.thread(s)
        self.thread_all([*early, *body[last + 1 :]])

    def _tall_sum(self, loop: For, is_last: bool) -> None:
        """One of the sums; all threads have it, unless it is the last."""
        tall, type_ = self.shape.tall, self.index_type
        loops, inner = nested(loop, Role.SEQUENTIAL)
        count, q = math.prod(v.extent for v in loops), self.new("q")
        head = f"for ({type_} {q} = ty; {q} < {count}; {q} += {tall})"
        read = {x for s in inner for x in loads_of(s)}
        read = {x for x in read if any(uses(a, v) for a, _ in x.index.terms for v in loops)}
        if len(read) == 1:
            self.add(f"#pragma unroll {AHEAD}")
        with self.decoded_block(head, q, loops):
            self.thread_all(inner)
        sums = {s.local: s for s in inner if isinstance(s, Accumulate)}
        places = {local: self.new("tall") for local in sums}
        for local, s in sums.items():
            width = self.width if local in self.spread else 1
            type_, place = scalars.register(s.value.dtype), places[local]
            self.add(f"__shared__ {type_} {place}[{tall}][{self.shape.teams * width}];")
            self._column(local, f"{place}[ty][AT] = NAME;")
        self.add("__syncthreads();")
        with self.block(f"for (int h = {tall // 2}; h > 0; h >>= 1)"):
            with self.block("if (ty < h)"):
                for local, s in sums.items():
                    own, other = (f"{places[local]}[{row}][AT]" for row in ("ty", "ty + h"))
                    self._column(local, f"{own} = {OPS[s.op]}::of({own}, {other});")
            self.add("__syncthreads();")
        if is_last:
            self.add("if (ty != 0) return;")
        for local, place in places.items():
            self._column(local, f"NAME = {place}[0][AT];")

    def _column(self, local: str, line: str) -> None:
        """A line for the sum of each lane: AT is its place among the block's, NAME its name."""
        name = self.name(local)
        if local not in self.spread:
            self.add(line.replace("AT", "tx").replace("NAME", name))
            return
        line = line.replace("AT", f"u * {self.shape.teams} + tx").replace("NAME", f"{name}[u]")
        self.unrolled(line, self.width)
