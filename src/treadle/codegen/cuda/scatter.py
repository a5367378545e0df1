"""Sums whose places are data, in a fixed order and without waiting for each other.

A block owns some rows of the result: it looks through all indices in order, and adds what belongs
to its rows in shared memory, a thread for every column. The sums have the bits that one thread
would give them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from treadle.codegen.cuda import scalars
from treadle.codegen.cuda.lanes import Lanes
from treadle.codegen.cuda.shape import nested, peeled
from treadle.kernel.access import locals_in
from treadle.kernel.index import Data, Index, Var, uses
from treadle.kernel.nodes import For, Kernel, Let, Load, Role, Statement, Update, Value

SCATTER_THREADS = 256
EACH = 4  # indices that a thread looks at in one go
MOST_ROWS = 32
MOST_BYTES = 96 << 10
LEAST = 1 << 12  # updates times columns: fewer are one thread's each


@dataclass(frozen=True)
class _Scatter:
    """The parts of such a kernel."""

    columns: tuple[Var, ...]
    updates: list[Var]
    lets: tuple[Let, ...]  # that give the place
    update: Update
    place: Data

    @property
    def width(self) -> int:
        return math.prod(v.extent for v in self.columns)

    @property
    def count(self) -> int:
        return math.prod(v.extent for v in self.updates)

    def rows(self, itemsize: int) -> int:
        fitting = MOST_BYTES // (self.width * itemsize)
        return max(1, min(MOST_ROWS, fitting))


def is_scatter(kernel: Kernel) -> bool:
    return _scatter(kernel) is not None


def _scatter(kernel: Kernel) -> _Scatter | None:
    lets, columns, body = peeled(kernel)
    only = body[0] if len(body) == 1 else None
    if lets or kernel.scratch or not isinstance(only, For) or only.role is not Role.SEQUENTIAL:
        return None
    updates, inner = nested(only, Role.SEQUENTIAL)
    *named, last = inner
    if not isinstance(last, Update) or not all(isinstance(s, Let) for s in named):
        return None
    atoms = [a for a, _ in last.index.terms if isinstance(a, Data)]
    if len(atoms) != 1 or not columns:
        return None
    found = _Scatter(columns, updates, _only_lets(inner), last, atoms[0])
    size = _itemsize(kernel, last.buffer)
    is_small = found.width * size <= MOST_BYTES and found.count * found.width >= LEAST
    return found if is_small and not _by_column(found) else None


def _only_lets(body: tuple[Statement, ...]) -> tuple[Let, ...]:
    return tuple(s for s in body if isinstance(s, Let))


def _itemsize(kernel: Kernel, buffer: str) -> int:
    return next(b.dtype.itemsize for b in kernel.buffers if b.name == buffer)


def _by_column(found: _Scatter) -> bool:
    """Whether the place depends on the column: then no block can own rows."""
    needed, depends = {found.place.local}, False
    for let in reversed(found.lets):
        if let.local in needed:
            needed |= locals_in(let.value)
            depends = depends or any(_uses(let.value, v) for v in found.columns)
    return depends


def _uses(value: Value, var: Var) -> bool:
    if isinstance(value, Load):
        return any(uses(a, var) for a, _ in value.index.terms)
    parts = [getattr(value, n) for n in ("value", "guard", "other") if hasattr(value, n)]
    parts += list(getattr(value, "operands", ()))
    index = getattr(value, "index", None)
    is_here = isinstance(index, Index) and any(uses(a, var) for a, _ in index.terms)
    return is_here or any(_uses(p, var) for p in parts if not isinstance(p, (int, float)))


def scatter_lines(kernel: Kernel) -> tuple[list[str], int, int]:
    """Lines of the function, how many blocks it takes, and the bytes of shared memory of each."""
    found = _scatter(kernel)
    assert found is not None
    dtype = next(b.dtype for b in kernel.buffers if b.name == found.update.buffer)
    rows, width = found.rows(dtype.itemsize), found.width
    w = Lanes(kernel, found.count + SCATTER_THREADS * EACH >= 1 << 31)
    wide, span = scalars.register(dtype), SCATTER_THREADS * EACH
    place, target = w.places[found.update.buffer], found.update.index
    w.add("extern __shared__ __align__(16) unsigned char shared[];")
    w.add(f"{wide} *sums = ({wide} *)shared;")
    w.add(f"__shared__ int hits[{span}], owners[{span}], totals[{SCATTER_THREADS // 32}];")
    w.add(f"const i64 first = (i64)block * {rows};")
    last = f"{found.place.extent} - first"
    w.add(f"const int owned = (int)t_min<i64>({rows}, {last}) * {width};")

    def over_rows(line: str) -> None:
        w.add("#pragma unroll 8")
        head = f"for (int q = threadIdx.x; q < owned; q += {SCATTER_THREADS})"
        with w.block(head):
            w.add(f"const i64 row = first + q / {width};")
            w.add(f"{w.index_type} column = q % {width};")
            w.decode("column", found.columns)
            w.names[found.place.local] = "row"
            w.add(line.format(at=w.index(target)))

    over_rows(f"sums[q] = get({place}[{{at}}]);")
    with w.block(f"for (int start = 0; start < {found.count}; start += {span})"):
        _look(w, found, rows)
        with w.block("for (int h = 0; h < total; ++h)"):
            w.add(f"const {w.index_type} turn = hits[h];")
            w.add("const int own = owners[h];")
            w.decode("turn", found.updates)
            head = f"for (int c = threadIdx.x; c < {width}; c += {SCATTER_THREADS})"
            with w.block(head):
                w.decode("c", found.columns)
                for let in found.lets:
                    w.let(let.local, let.value)
                w.add(f"{wide} &sum = sums[own * {width} + c];")
                w.add(f"sum = sum + {w.value(found.update.value)};")
        w.add("__syncthreads();")
    over_rows(f"put({place}[{{at}}], sums[q]);")
    grid = -(-found.place.extent // rows)
    return w.lines, grid, rows * width * dtype.itemsize


def _look(w: Lanes, found: _Scatter, rows: int) -> None:
    """Which of the next indices are this block's: their numbers in order, and their rows."""
    needed = {found.place.local}
    lets = list[Let]()
    for let in reversed(found.lets):
        if let.local in needed:
            needed |= locals_in(let.value)
            lets.insert(0, let)
    w.add(f"int mine[{EACH}], count = 0;")
    w.add("#pragma unroll")
    with w.block(f"for (int j = 0; j < {EACH}; ++j)"):
        w.add(f"{w.index_type} turn = start + threadIdx.x * {EACH} + j;")
        w.add("mine[j] = -1;")
        with w.block(f"if (turn < {found.count})"):
            w.decode("turn", found.updates)
            for let in lets:
                w.let(let.local, let.value)
            at = w.index(Index(((found.place, 1),)))
            w.add(f"const i64 at = (i64)({at}) - first;")
            w.add(f"if (at >= 0 && at < {rows}) {{ mine[j] = (int)at; ++count; }}")
    w.add("int before = in_warp_before(count);")
    w.add("const int warp = threadIdx.x >> 5;")
    w.add("if ((threadIdx.x & 31) == 31) totals[warp] = before + count;")
    w.add("__syncthreads();")
    w.add("int total = 0;")
    with w.block(f"for (int i = 0; i < {SCATTER_THREADS // 32}; ++i)"):
        w.add("if (i < warp) before += totals[i];")
        w.add("total += totals[i];")
    w.add("#pragma unroll")
    with w.block(f"for (int j = 0; j < {EACH}; ++j)"):
        turn = f"start + threadIdx.x * {EACH} + j"
        w.add(f"if (mine[j] >= 0) {{ hits[before] = {turn}; owners[before++] = mine[j]; }}")
    w.add("__syncthreads();")
