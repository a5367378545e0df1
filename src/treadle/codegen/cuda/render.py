"""Mapped kernels as CUDA text: loops that are shared out, sums that are combined, barriers.

Every thread of a group names the same values; stores outside loops are the first thread's. What is
decided is decided in the kernel: nothing here chooses.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

from treadle.codegen.c_like import statements
from treadle.codegen.c_like.scalars import nothing
from treadle.codegen.cuda import scalars
from treadle.codegen.cuda.lanes import Lanes
from treadle.kernel.access import accesses
from treadle.kernel.geometry import Combine
from treadle.kernel.mapped import (
    Nest,
    geometry_of,
    grid_of,
    group_bytes,
    group_rows,
    is_of_warps,
    nest_of,
    row_loops,
    shared_of,
    sums_of,
    width_of,
)
from treadle.kernel.nodes import (
    Accumulate,
    Buffer,
    For,
    Kernel,
    Matmul,
    Role,
    Space,
    Statement,
    Store,
    Update,
)
from treadle.kernel.traverse import walk

OPS = {"add": "Add", "mul": "Mul", "max": "Max", "min": "Min"}


def counts_far(kernel: Kernel, count: int, lanes: int = 1) -> bool:
    """Whether iterations need 64 bits to count."""
    inner = max((b.size for b in (*kernel.buffers, *kernel.scratch)), default=0)
    inner = inner if count == 1 else 0  # one iteration may walk a whole buffer
    return max(inner, count) + 4 * geometry_of(kernel).threads * lanes >= 1 << 31


class Writer(Lanes):
    """Writes a kernel's statements, a group's or a thread's."""

    def __init__(self, kernel: Kernel, is_wide: bool | None = None):
        self.geometry, self.grid = geometry_of(kernel), grid_of(kernel)
        if is_wide is None:
            is_wide = counts_far(kernel, self.grid.count, self.grid.lanes)
        super().__init__(kernel, is_wide)
        self.tid, self.warp = "tid", self.geometry.warp
        # Beside other kernels in one launch: what these wrote a moment ago is not read as if it had
        # been there from the start, and loads come before stores that do not concern them.
        self.hoists = self.geometry.is_cooperative
        self.constant = set() if self.hoists else self.constant
        updated = {s.buffer for s in walk(kernel.body) if isinstance(s, Update)}
        rows = group_rows(kernel) & updated
        self.sums = [b for b in kernel.scratch if b.name in rows]  # of columns, that each warp has

    def written(self) -> list[str]:
        return statements.written(self)

    def inside_grid(self, body: Sequence[Statement]) -> None:
        with self._in_lanes_of(self.grid):
            if self.geometry.combine is not Combine.EXCHANGE:
                self.thread_all(statements.columns(self, body))
            elif self.geometry.share == 1:
                self.thread_all(body)
            elif self.sums:
                self._row_sums(body)
            else:
                self.group_all(body)

    def begin_thread(self) -> None:
        type_, lanes = self.index_type, self.grid.lanes
        for i, b in enumerate(self.kernel.scratch):
            self.pointers[b.name] = f"s{i}"
            self.add(f"{scalars.memory(b.dtype)} s{i}[{max(1, b.size)}];")
        self.add(f"{type_} iteration = ({type_})block * {self.geometry.threads} + threadIdx.x;")
        self.add(f"if (iteration >= {self.grid.count // lanes}) return;")
        if lanes > 1:
            self.add(f"iteration *= {lanes};")

    def begin_group(self) -> None:
        type_, share, groups = self.index_type, self.geometry.share, self.geometry.groups
        if self.sums:
            self.add(
                f"const int tid = threadIdx.x % {self.warp}, warp = threadIdx.x / {self.warp};"
            )
            self.add(f"const {type_} iteration = block;")
        else:
            self.add(f"const int tid = threadIdx.x % {share};")
            self.add(
                f"const {type_} iteration = ({type_})block * {groups} + threadIdx.x / {share};"
            )
        if self.grid.count % groups:
            self.add(f"if (iteration >= {self.grid.count}) return;")
        self._group_memory()

    def _group_memory(self) -> None:
        each = group_bytes(self.kernel)
        if each:
            self.add("extern __shared__ __align__(16) unsigned char shared[];")
        team = f"threadIdx.x / {self.geometry.share} * {each}"
        for i, (b, offset) in enumerate(shared_of(self.kernel)):
            type_, name = scalars.memory(b.dtype), f"s{i}"
            if b.pack > 1:
                type_, name = f"Pack<{type_}, {b.pack}>", b.name
                self.staged.add(name)
            self.pointers[b.name] = name
            self.add(f"{type_} *{name} = ({type_} *)(shared + {offset} + {team});")
        for b in self.kernel.scratch:
            if b.space is Space.PRIVATE and b not in self.sums:
                self.staged.add(b.name)
                type_ = f"Pack<{scalars.memory(b.dtype)}, {b.pack}>"
                self.add(f"{type_} {b.name}[{self._packs_of(b)}];")

    def _packs_of(self, row: Buffer) -> int:
        """Packs of a row that each thread has."""
        loop = next(row_loops(self.grid.body, row.name))
        return -(-row.size // (width_of(loop.role, self.geometry) * row.pack))

    # Sums of columns: threads beside each other have columns beside each other

    def begin_columns(self) -> None:
        """Which columns are this thread's, and which rows."""
        type_, lanes, groups = self.index_type, self.grid.lanes, self.geometry.groups
        if self.geometry.combine is Combine.TREE:
            self.add(f"const int tx = threadIdx.x % {groups}, ty = threadIdx.x / {groups};")
            scale = "" if lanes == 1 else f" * {lanes}"
            self.add(f"const {type_} iteration = (({type_})block * {groups} + tx){scale};")
            return
        count = self.grid.count // lanes
        self.add(f"const int row = threadIdx.x / {self.warp}, lane = threadIdx.x % {self.warp};")
        self.add(f"{type_} iteration = ({type_})block * {self.warp} + lane;")
        # Too many threads have no rows.
        self.add(f"const bool is_in = {f'iteration < {count}' if count % self.warp else 'true'};")
        self.add(f"iteration = is_in ? iteration * {lanes} : 0;")

    def column(self, loop: For, is_last: bool) -> None:
        if self.geometry.combine is Combine.TREE:
            self._column_tree(loop, is_last)
        else:
            self._column_warps(loop)

    def _column_rows(self, nest: Nest, stem: str, type_: str, start: str) -> None:
        with self._every(nest, f"{type_} {self.new(stem)}", start, self.geometry.share):
            self.thread_all(nest.body)

    def _column_warps(self, loop: For) -> None:
        nest = nest_of(loop)
        self._column_rows(nest, "r", "int", f"is_in ? row : {nest.count}")
        lanes, rows, shared = self.grid.lanes, self.geometry.share, dict[str, str]()
        sums = sums_of(loop)
        for local, s in sums.items():
            shared[local] = self.new("columns")
            type_ = scalars.register(s.value.dtype)
            self.add(f"__shared__ {type_} {shared[local]}[{rows - 1}][{lanes}][{self.warp}];")
            self.unrolled(
                f"if (row) {shared[local]}[row - 1][u][lane] = {self.names[local]}[u];", lanes
            )
        self.add("__syncthreads();")
        self.add("if (row || !is_in) return;")
        for local, s in sums.items():
            name, op = self.names[local], OPS[s.op]
            with self.written_out("y", rows - 1):
                self.unrolled(f"{name}[u] = {op}::of({name}[u], {shared[local]}[y][u][lane]);")

    def _column_tree(self, loop: For, is_last: bool) -> None:
        """One of the sums; all threads of the column have it, unless it is the last."""
        self._column_rows(nest_of(loop), "q", self.index_type, "ty")
        tall, groups = self.geometry.share, self.geometry.groups
        sums = sums_of(loop)
        shared = {local: self.new("tall") for local in sums}
        for local, s in sums.items():
            width = self.width if local in self.spread else 1
            type_, part = scalars.register(s.value.dtype), shared[local]
            self.add(f"__shared__ {type_} {part}[{tall}][{groups * width}];")
            self._per_lane(local, f"{part}[ty][AT] = NAME;")
        self.add("__syncthreads();")
        with self.block(f"for (int h = {tall // 2}; h > 0; h >>= 1)"):
            with self.block("if (ty < h)"):
                for local, s in sums.items():
                    own, other = (f"{shared[local]}[{row}][AT]" for row in ("ty", "ty + h"))
                    self._per_lane(local, f"{own} = {OPS[s.op]}::of({own}, {other});")
            self.add("__syncthreads();")
        if is_last:
            self.add("if (ty != 0) return;")
        for local, part in shared.items():
            self._per_lane(local, f"NAME = {part}[0][AT];")

    def _per_lane(self, local: str, line: str) -> None:
        """A line for the sum of each lane: AT is its index among the block's, NAME its name."""
        name = self.names[local]
        if local not in self.spread:
            self.add(line.replace("AT", "tx").replace("NAME", name))
            return
        at = f"u * {self.geometry.groups} + tx"
        self.unrolled(line.replace("AT", at).replace("NAME", f"{name}[u]"), self.width)

    # Rows of a part, each a warp's, with sums of their columns

    def _row_sums(self, body: Sequence[Statement]) -> None:
        """The warps' sums are added in order; the first warp has what follows."""
        at = next(i for i, s in enumerate(body) if isinstance(s, For) and is_of_warps(s))
        rows, warps = body[at], self.geometry.share // self.warp
        assert isinstance(rows, For)
        packs, lanes = self._packs_of(self.sums[0]), self.sums[0].pack
        for i, b in enumerate(self.sums):
            self.held[b.name] = f"sums{i}"
            self.add(f"{scalars.register(b.dtype)} sums{i}[{packs}][{lanes}];")
        self.group_all(body[:at])
        r = self.vars[rows.var] = self.new("row")
        with self.block(f"for (int {r} = warp; {r} < {rows.var.extent}; {r} += {warps})"):
            self.group_all(rows.body)
        self.add(f"__shared__ f32 others[{warps - 1}][{packs * lanes}][{self.warp}];")
        for own in self.held.values():
            for who, line in (
                ("if (warp)", f"others[warp - 1][k * {lanes} + u][tid] = {own}[k][u];"),
                (
                    f"if (!warp) for (int y = 0; y < {warps - 1}; ++y)",
                    f"{own}[k][u] += others[y][k * {lanes} + u][tid];",
                ),
            ):
                self.add("__syncthreads();")
                with self.block(who), self.written_out("k", packs):
                    self.unrolled(line, lanes)
        self.add("if (warp) return;")
        self.group_all(body[at + 1 :])

    # A group's statements

    def group_all(self, body: Sequence[Statement]) -> None:
        for s in body:
            statements.statement(self, s, is_group=True)

    def shared_out(self, loop: For) -> None:
        """Iterations shared out among threads, or among warps."""
        if is_of_warps(loop):
            self._by_warps(loop)
            return
        is_warp = loop.role is Role.SUBGROUP and self.geometry.share > self.warp
        before = self.tid
        if is_warp and not self.sums and self.tid == "tid":
            self.tid = f"({self.tid} % {self.warp})"
        statements.sum_up(self, loop)
        self.tid = before

    def iterations(self, nest: Nest, role: Role, sums: Collection[str]) -> None:
        """A thread's own iterations."""
        with self._strided(nest, role), self._in_lanes_of(nest, sums):
            self.thread_all(nest.body)

    def _in_lanes_of(self, nest: Nest, sums: Collection[str] = ()) -> AbstractContextManager[None]:
        if nest.lanes == 1:
            return nullcontext()
        return self.in_lanes(nest.variables[-1], nest.lanes, nest.body, sums)

    def _by_warps(self, loop: For) -> None:
        counter, warps = f"{self.index_type} {self.new('q')}", self.geometry.share // self.warp
        with self._every(nest_of(loop), counter, f"tid / {self.warp}", warps):
            self.add(f"const int lane = tid % {self.warp};")
            before, self.tid = self.tid, "lane"
            self.group_all(nest_of(loop).body)
            self.tid = before

    def _every(
        self, nest: Nest, counter: str, start: str, step: int
    ) -> AbstractContextManager[None]:
        """Iterations of some loops at a distance, counted by a variable of some type."""
        if nest.loops[-1].unroll > 1:
            self.add(f"#pragma unroll {nest.loops[-1].unroll}")
        name = counter.split()[-1]
        head = f"for ({counter} = {start}; {name} < {nest.count}; {name} += {step})"
        return self.decoded_block(head, name, nest.variables)

    def _strided(self, nest: Nest, role: Role) -> AbstractContextManager[None]:
        """Every iteration of some loops, the threads that share them side by side."""
        lanes, step = nest.lanes, nest.lanes * width_of(role, self.geometry)
        touched = {a.buffer for a in accesses(nest.body)}
        q = self.new("q")
        start = self.tid if lanes == 1 else f"{self.tid} * {lanes}"
        if touched & group_rows(self.kernel):
            self.at_pack = self.new("k")
            return self._packs(q, start, step, nest)
        self.at_pack = f"{q} / {lanes}"
        return self._every(nest, f"{self.index_type} {q}", start, step)

    @contextmanager
    def _packs(self, q: str, start: str, step: int, nest: Nest) -> Iterator[None]:
        """The few packs of a thread one after the other, so that registers have their numbers."""
        k, count = self.at_pack, nest.count
        with self.written_out(k, -(-count // step)):
            self.add(f"const int {q} = {start} + {k} * {step};")
            held = self.block(f"if ({q} < {count})") if count % step else nullcontext()
            with held:
                self.decode(q, nest.variables)
                yield

    def part(self, s: Accumulate, lanes: int) -> str:
        """What a thread sums by itself, from nothing."""
        name, type_ = self.new("part"), scalars.register(s.value.dtype)
        none = nothing(scalars, s.op, s.value.dtype)
        if lanes > 1:
            self.add(f"{type_} {name}[{lanes}];")
            self.unrolled(f"{name}[u] = {none};", lanes)
        else:
            self.add(f"{type_} {name} = {none};")
        return name

    def combine(self, local: str, part: str, s: Accumulate, loop: For) -> None:
        lanes, role, type_ = nest_of(loop).lanes, loop.role, scalars.register(s.value.dtype)
        op, found = OPS[s.op], part
        if lanes > 1:
            found = self.new("lane")
            self.add(f"{type_} {found} = {part}[0];")
            self.unrolled(f"{found} = {op}::of({found}, {part}[u]);", lanes, 1)
        if role is Role.SUBGROUP:
            width = width_of(role, self.geometry)
            part = "" if width == self.warp else f", {width}"
            whole = f"in_warp<{op}{part}>({found})"
        else:
            none = nothing(scalars, s.op, s.value.dtype)
            whole = f"in_block<{op}, {self.geometry.share // self.warp}, {type_}>({found}, {none})"
        self.add(f"{local} = {op}::of({local}, {whole});")

    def scanned(self, nest: Nest, role: Role) -> None:
        """Iterations in order, so many at a time as threads share them."""
        width = width_of(role, self.geometry)
        step, count, type_ = nest.lanes * width, nest.count, self.index_type
        sums = {s.local: s for s in nest.body if isinstance(s, Accumulate)}
        outside = dict(self.names)
        first, q, held = self.new("q"), self.new("q"), self.new("is_in")
        is_whole = count % step == 0
        with self.block(f"for ({type_} {first} = 0; {first} < {count}; {first} += {step})"):
            own = f"{first} + {self.tid}{f' * {nest.lanes}' if nest.lanes > 1 else ''}"
            self.add(f"const bool {held} = {'true' if is_whole else f'{own} < {count}'};")
            self.add(f"const {type_} {q} = {held} ? {own} : 0;")
            self.decode(q, nest.variables)
            self.at_pack = f"{q} / {nest.lanes}"
            with self._in_lanes_of(nest, sums):
                for s in nest.body:
                    if isinstance(s, Accumulate):
                        self._scan_step(s, outside[s.local], held, width)
                    elif isinstance(s, Store) and not is_whole:
                        with self.block(f"if ({held})"):
                            statements.statement(self, s)
                    else:
                        statements.statement(self, s)
        self.names = outside

    def _scan_step(self, s: Accumulate, carry: str, held: str, width: int) -> None:
        """What the iterations at hand and all before them give; `carry` is of whole steps."""
        type_, op = scalars.register(s.value.dtype), OPS[s.op]
        none, name = nothing(scalars, s.op, s.value.dtype), self.new("so_far")
        last = name
        if self.lane is not None:
            self.add(f"{type_} {name}[{self.width}];")
            self.each(lambda: f"{name}[u] = {held} ? ({self.value(s.value)}) : {none};", s.value)
            self.unrolled(f"{name}[u] = {op}::of({name}[u - 1], {name}[u]);", start=1)
            last = f"{name}[{self.width - 1}]"
        else:
            self.add(f"{type_} {name} = {held} ? ({self.value(s.value)}) : {none};")
        whole, before = self.new("whole"), self.new("before")
        is_block = width > self.warp
        where = f"block<{op}, {width // self.warp}" if is_block else f"warp<{op}, {width}"
        self.add(f"{type_} {whole};")
        found = f"before_in_{where}, {type_}>({last}, {none}, {whole})"
        self.add(f"const {type_} {before} = {op}::of({carry}, {found});")
        if self.lane is not None:
            self.unrolled(f"{name}[u] = {op}::of({before}, {name}[u]);")
        else:
            self.add(f"{name} = {op}::of({before}, {name});")
        self.add(f"{carry} = {op}::of({carry}, {whole});")
        self.names[s.local] = name

    # Statements

    def thread_all(self, body: Sequence[Statement]) -> None:
        before = dict(self.packs), dict(self.loaded)
        if self.hoists:
            self.early(body)
        for s in body:
            statements.statement(self, s)
        self.packs, self.loaded = before

    def all(self, body: Sequence[Statement], is_group: bool = False) -> None:
        if is_group:
            self.group_all(body)
        else:
            self.thread_all(body)

    def stored(self, s: Store, is_group: bool) -> None:
        with self._first(is_group):
            self.store(s.buffer, s.index, s.value, s.guard)

    def updated(self, s: Update, is_group: bool) -> None:
        with self._first(is_group):
            if s.shared:
                self.add_together(s.buffer, s.index, s.value)
            else:
                self.update(s.buffer, s.index, s.value)

    def _first(self, is_group: bool) -> AbstractContextManager[None]:
        return self.block(f"if ({self.tid} == 0)") if is_group else nullcontext()

    def multiplied(self, s: Matmul) -> None:
        raise AssertionError("matmuls are kernels of their own")

    def barrier(self, scope: Role) -> None:
        self.add("__syncwarp();" if scope is Role.SUBGROUP else "__syncthreads();")
