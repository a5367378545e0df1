"""Sums whose indices are data, in a fixed order and without waiting for each other.

A block owns some rows of the result: its warps look through the indices, note in order which are
its own, and add what belongs to its rows in shared memory, a thread for every column. The sums have
the bits that one thread would give them.
"""

from __future__ import annotations

from collections.abc import Callable

from treadle.codegen.cuda import scalars
from treadle.codegen.cuda.lanes import Lanes
from treadle.kernel.access import locals_in
from treadle.kernel.geometry import Scattered
from treadle.kernel.index import Index
from treadle.kernel.mapped import geometry_of
from treadle.kernel.nodes import Kernel
from treadle.kernel.scatter import scatter_of, sums_bytes


def scatter_lines(kernel: Kernel, template: Scattered) -> list[str]:
    """Lines of the function of a scattered sum."""
    return _Scatter(kernel, template).written()


class _Scatter(Lanes):
    """Writes such a kernel for one of its blocks."""

    def __init__(self, kernel: Kernel, template: Scattered):
        found = scatter_of(kernel)
        assert found is not None
        self.found, self.rows, self.room = found, template.rows, template.noted
        self.looked, self.terms = template.looked, template.terms
        self.threads, self.warp = geometry_of(kernel).threads, geometry_of(kernel).warp
        self.warps = self.threads // self.warp
        self.stride = self.warp * template.looked  # indices that a warp looks at in one go
        self.part = -(-found.count // (self.warps * self.stride)) * self.stride  # that a warp has
        super().__init__(kernel, found.count + self.threads * self.stride >= 1 << 31)
        self.exceeds = False
        self.wide = scalars.register(self.types[found.update.buffer])
        self.size = sums_bytes(kernel, template)

    def written(self) -> list[str]:
        warps, pointer = self.warps, self.pointers[self.found.update.buffer]
        self._begin()
        is_filled = self.found.is_filled
        self._over_rows("sums[q] = 0;" if is_filled else f"sums[q] = get({pointer}[{{at}}]);")
        self.add("int from = 0, owner = 0;")
        self.add("bool is_mine = true;")
        with self.block("while (true)"):
            with self.block("if (is_mine)"):
                self._look()
            self.add("__syncthreads();")
            self._put_together()
            with self.block("while (true)"):
                self._add_up()
                self.add(f"if (owner == {warps} || resumed[owner] < {self.part}) break;")
                self.add(f"if (++owner == {warps}) break;")
            self.add("__syncthreads();")
            self.add(f"if (owner == {warps}) break;")
            self.add("is_mine = warp == owner;")
        self._over_rows(f"put({pointer}[{{at}}], sums[q]);")
        return self.lines

    def _begin(self) -> None:
        self.add("extern __shared__ __align__(16) unsigned char shared[];")
        self.add(f"{self.wide} *sums = ({self.wide} *)shared;")
        self.add(f"int *updates_noted = (int *)(shared + {self.size});")
        lists = (self.warps + 1) * self.room  # of each warp, and of all together
        self.add(f"unsigned char *owners = shared + {self.size + 4 * lists};")
        self.add(f"__shared__ int totals[{self.warps + 1}], resumed[{self.warps}];")
        self.add(f"const int warp = threadIdx.x / {self.warp}, lane = threadIdx.x % {self.warp};")
        self.add(f"const i64 first = (i64)block * {self.rows};")
        last = f"{self.found.row.extent} - first"
        self.add(f"const int owned = (int)t_min<i64>({self.rows}, {last}) * {self.found.width};")

    def _over_rows(self, line: str) -> None:
        found, width = self.found, self.found.width
        self.add(f"#pragma unroll {self.terms}")
        with self.block(f"for (int q = threadIdx.x; q < owned; q += {self.threads})"):
            self.add(f"const i64 row = first + q / {width};")
            self.add(f"{self.index_type} column = q % {width};")
            self.decode("column", found.columns)
            self.names[found.row.local] = "row"
            self.add(line.format(at=self.index(found.update.index)))

    def _look(self) -> None:
        """Which of a warp's indices are this block's: their numbers and rows, in order, while
        there is room to note them."""
        found, part = self.found, self.part
        self.add("int count = 0;")
        room = self.room - self.stride
        with self.block(f"for (; from < {part} && count <= {room}; from += {self.stride})"):
            self.add(f"int near[{self.looked}];")
            with self.written_out("j", self.looked):
                start = f"warp * ({self.index_type}){part}"
                self.add(f"{self.index_type} iteration = {start} + from + j * {self.warp} + lane;")
                self.add("near[j] = -1;")
                with self.block(f"if (iteration < {found.count})"):
                    self.decode("iteration", found.updates)
                    for let in found.needed({found.row.local}):
                        self.let(let.local, let.value)
                    row = self.index(Index(((found.row, 1),)))
                    self.add(f"const i64 at = (i64)({row}) - first;")
                    held = "" if found.held is None else f" && {self.value(found.held)}"
                    self.add(f"if (at >= 0 && at < {self.rows}{held}) near[j] = (int)at;")
            with self.written_out("j", self.looked):
                self._note()
        self.add("if (lane == 0) { totals[warp] = count; resumed[warp] = from; }")

    def _note(self) -> None:
        self.add("const unsigned every = __ballot_sync(0xffffffffu, near[j] >= 0);")
        before = "__popc(every & ((1u << lane) - 1u))"
        self.add(f"const int spot = warp * {self.room} + count + {before};")
        iteration = f"warp * {self.part} + from + j * {self.warp} + lane"
        self.add(
            f"if (near[j] >= 0) {{ updates_noted[spot] = {iteration}; owners[spot] = near[j]; }}"
        )
        self.add("count += __popc(every);")

    def _put_together(self) -> None:
        """What all warps noted as one list, where it has room: mostly, few are a block's."""
        warps, room = self.warps, self.room
        self.add("bool is_whole = is_mine && owner == 0;")
        self.add("int sum = 0, before = 0;")
        with self.written_out("i", warps):
            self.add("if (i == warp) before = sum;")
            self.add("sum += totals[i];")
            self.add(f"is_whole = is_whole && resumed[i] >= {self.part};")
        with self.block(f"if (__syncthreads_and(is_whole && sum <= {room}))"):
            with self.block(f"for (int i = lane; i < totals[warp]; i += {self.warp})"):
                for name in ("updates_noted", "owners"):
                    source = f"{name}[warp * {room} + i]"
                    self.add(f"{name}[{warps * room} + before + i] = {source};")
            self.add(f"if (threadIdx.x == 0) totals[{warps}] = sum;")
            self.add(f"owner = {warps};")
            self.add("__syncthreads();")

    def _add_up(self) -> None:
        """What one warp noted, added in order by the threads that have the columns."""
        found = self.found
        each = -(-found.width // self.threads)
        together = max(1, self.terms // each)
        lets = found.needed(locals_in(found.added))

        def load() -> None:
            near = f"owner * {self.room} + t_min(h + k, total - 1)"
            self.add(f"const {self.index_type} iteration = updates_noted[{near}];")
            self.decode("iteration", found.updates)
            self.decode("c", found.columns)
            for let in lets:
                self.let(let.local, let.value)
            self.add(f"terms[k][v] = {self.value(found.added)};")

        def add() -> None:
            own = f"owners[owner * {self.room} + h + k] * {found.width} + c"
            self.add(f"if (h + k < total) sums[{own}] += terms[k][v];")

        self.add("const int total = totals[owner];")
        with self.block(f"for (int h = 0; h < total; h += {together})"):
            self.add(f"{self.wide} terms[{together}][{each}];")
            for line in (load, add):
                self._each_term(together, each, line)

    def _each_term(self, together: int, each: int, line: Callable[[], None]) -> None:
        """For some updates at once, and all columns of a thread."""
        with self.written_out("k", together), self.written_out("v", each):
            self.add(f"const int c = threadIdx.x + v * {self.threads};")
            if self.found.width % self.threads:
                with self.block(f"if (c < {self.found.width})"):
                    line()
            else:
                line()
