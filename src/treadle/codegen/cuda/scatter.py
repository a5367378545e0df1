"""Sums whose places are data, in a fixed order and without waiting for each other.

A block owns some rows of the result: its warps look through the indices, note in order which are
its own, and add what belongs to its rows in shared memory, a thread for every column. The sums have
the bits that one thread would give them.
"""

from __future__ import annotations

from collections.abc import Callable

from treadle.codegen.cuda import scalars
from treadle.codegen.cuda.lanes import Lanes
from treadle.codegen.cuda.render import function
from treadle.kernel.access import locals_in
from treadle.kernel.index import Index
from treadle.kernel.nodes import Kernel, Let
from treadle.kernel.scatter import Scatter, scatter_of

SCATTER_THREADS = 512
WARPS = SCATTER_THREADS // 32
ROOM = 384  # numbers that a warp can note at a time, and that all have together
EACH = 8  # indices that a thread looks at in one go
MOST_TERMS = 8  # numbers that a thread loads before it adds the first


def render_scatter(kernel: Kernel, symbol: str, calls: int) -> tuple[str, int, int]:
    """The function, how many blocks it takes, and the bytes of shared memory of each."""
    found = scatter_of(kernel)
    assert found is not None
    dtype = next(b.dtype for b in kernel.buffers if b.name == found.update.buffer)
    rows, width = found.rows(dtype.itemsize), found.width
    w = Lanes(kernel, found.count + SCATTER_THREADS * EACH * 32 >= 1 << 31)
    wide, size = scalars.register(dtype), rows * width * dtype.itemsize
    size += -size % 16
    place, target = w.places[found.update.buffer], found.update.index
    w.add("extern __shared__ __align__(16) unsigned char shared[];")
    w.add(f"{wide} *sums = ({wide} *)shared;")
    w.add(f"int *turns = (int *)(shared + {size});")
    lists = (WARPS + 1) * ROOM  # of each warp, and of all together
    w.add(f"unsigned char *owners = shared + {size + 4 * lists};")
    w.add(f"__shared__ int totals[{WARPS + 1}], resumed[{WARPS}];")
    w.add("const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;")
    w.add(f"const i64 first = (i64)blockIdx.x * {rows};")
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

    over_rows("sums[q] = 0;" if found.is_filled else f"sums[q] = get({place}[{{at}}]);")
    part = -(-found.count // (WARPS * 32 * EACH)) * 32 * EACH  # indices that a warp looks at
    w.add("int from = 0, owner = 0;")
    w.add("bool is_mine = true;")
    with w.block("while (true)"):
        with w.block("if (is_mine)"):
            _look(w, found, rows, part)
        w.add("__syncthreads();")
        _put_together(w, part)
        with w.block("while (true)"):
            _add_up(w, found, wide)
            w.add(f"if (owner == {WARPS} || resumed[owner] < {part}) break;")
            w.add(f"if (++owner == {WARPS}) break;")
        w.add("__syncthreads();")
        w.add(f"if (owner == {WARPS}) break;")
        w.add("is_mine = warp == owner;")
    over_rows(f"put({place}[{{at}}], sums[q]);")
    grid = -(-found.place.extent // rows)
    text = function(kernel, symbol, calls, SCATTER_THREADS, w.lines)
    return text, grid, size + 5 * lists


def _look(w: Lanes, found: Scatter, rows: int, part: int) -> None:
    """Which of a warp's indices are this block's: their numbers and rows, in order, while there is
    room to note them."""
    lets = _needed(found, {found.place.local})
    w.add("int count = 0;")
    head = f"for (; from < {part} && count <= {ROOM - 32 * EACH}; from += {32 * EACH})"
    with w.block(head):
        w.add(f"int near[{EACH}];")
        w.add("#pragma unroll")
        with w.block(f"for (int j = 0; j < {EACH}; ++j)"):
            w.add(f"{w.index_type} turn = warp * ({w.index_type}){part} + from + j * 32 + lane;")
            w.add("near[j] = -1;")
            with w.block(f"if (turn < {found.count})"):
                w.decode("turn", found.updates)
                for let in lets:
                    w.let(let.local, let.value)
                w.add(f"const i64 at = (i64)({w.index(Index(((found.place, 1),)))}) - first;")
                held = "" if found.held is None else f" && {w.value(found.held)}"
                w.add(f"if (at >= 0 && at < {rows}{held}) near[j] = (int)at;")
        w.add("#pragma unroll")
        with w.block(f"for (int j = 0; j < {EACH}; ++j)"):
            w.add("const unsigned every = __ballot_sync(0xffffffffu, near[j] >= 0);")
            w.add(f"const int spot = warp * {ROOM} + count + __popc(every & ((1u << lane) - 1u));")
            turn = f"warp * {part} + from + j * 32 + lane"
            w.add(f"if (near[j] >= 0) {{ turns[spot] = {turn}; owners[spot] = near[j]; }}")
            w.add("count += __popc(every);")
    w.add("if (lane == 0) { totals[warp] = count; resumed[warp] = from; }")


def _put_together(w: Lanes, part: int) -> None:
    """What all warps noted as one list, where it has room: as a rule few updates are a block's."""
    w.add("bool is_whole = is_mine && owner == 0;")
    w.add("int sum = 0, before = 0;")
    w.add("#pragma unroll")
    with w.block(f"for (int i = 0; i < {WARPS}; ++i)"):
        w.add("if (i == warp) before = sum;")
        w.add("sum += totals[i];")
        w.add(f"is_whole = is_whole && resumed[i] >= {part};")
    with w.block(f"if (__syncthreads_and(is_whole && sum <= {ROOM}))"):
        with w.block("for (int i = lane; i < totals[warp]; i += 32)"):
            w.add(f"turns[{WARPS * ROOM} + before + i] = turns[warp * {ROOM} + i];")
            w.add(f"owners[{WARPS * ROOM} + before + i] = owners[warp * {ROOM} + i];")
        w.add(f"if (threadIdx.x == 0) totals[{WARPS}] = sum;")
        w.add(f"owner = {WARPS};")
        w.add("__syncthreads();")


def _add_up(w: Lanes, found: Scatter, wide: str) -> None:
    """What one warp noted, added in order by the threads that have the columns."""
    width, each = found.width, -(-found.width // SCATTER_THREADS)
    lets = _needed(found, locals_in(found.value))
    together = max(1, MOST_TERMS // each)

    def every(line: Callable[[], None]) -> None:
        """For some updates at once, and all columns of a thread."""
        w.add("#pragma unroll")
        with w.block(f"for (int k = 0; k < {together}; ++k)"):
            w.add("#pragma unroll")
            with w.block(f"for (int v = 0; v < {each}; ++v)"):
                w.add(f"const int c = threadIdx.x + v * {SCATTER_THREADS};")
                if width % SCATTER_THREADS:
                    with w.block(f"if (c < {width})"):
                        line()
                else:
                    line()

    def load() -> None:
        near = f"owner * {ROOM} + t_min(h + k, total - 1)"
        w.add(f"const {w.index_type} turn = turns[{near}];")
        w.decode("turn", found.updates)
        w.decode("c", found.columns)
        for let in lets:
            w.let(let.local, let.value)
        w.add(f"terms[k][v] = {w.value(found.value)};")

    def add() -> None:
        own = f"owners[owner * {ROOM} + h + k] * {width} + c"
        w.add(f"if (h + k < total) sums[{own}] += terms[k][v];")

    w.add("const int total = totals[owner];")
    with w.block(f"for (int h = 0; h < total; h += {together})"):
        w.add(f"{wide} terms[{together}][{each}];")
        every(load)
        every(add)


def _needed(found: Scatter, locals_: set[str]) -> list[Let]:
    """The values that some locals depend on, in order."""
    needed, lets = set(locals_), list[Let]()
    for let in reversed(found.lets):
        if let.local in needed:
            needed |= locals_in(let.value)
            lets.insert(0, let)
    return lets
