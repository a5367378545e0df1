"""Kernels as CUDA functions: a turn is a thread's or a team's, loops inside it are shared out.

In a team every thread names the same values; stores outside loops are the first thread's; a barrier
stands wherever one thread may read what another wrote.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import assert_never

from treadle.codegen.cuda import scalars
from treadle.codegen.cuda.columns import identity
from treadle.codegen.cuda.functions import counts_far
from treadle.codegen.cuda.rows import rows_of, sums_of
from treadle.codegen.cuda.shape import (
    WARP,
    Shape,
    is_sum,
    nested,
    shape_of,
)
from treadle.codegen.cuda.stages import COMMON, Stages, lanes_of, own_numbers, stages_of
from treadle.codegen.cuda.tall import OPS, Tall, chosen_shape
from treadle.kernel.access import accesses
from treadle.kernel.cost import padded
from treadle.kernel.index import Index, Var
from treadle.kernel.nodes import (
    Accumulate,
    Apply,
    Buffer,
    For,
    Kernel,
    Let,
    Library,
    Literal,
    Multiply,
    Role,
    Set,
    Statement,
    Store,
    Update,
    Value,
)
from treadle.kernel.rowsums import RowSums


def written(
    kernel: Kernel, is_aligned: bool, is_loose: bool, block: int = 0
) -> tuple[list[str], Shape, Stages]:
    """A kernel's lines for one of its blocks, its shape, and what its teams keep on the chip.

    Blocks are as large as asked for, beside others in one launch: what these wrote a moment ago is
    not read as if it had been there from the start.
    """
    if is_aligned and not block and (parts := rows_of(kernel)) is not None:
        rows, shape, stages = parts
        writer = Writer(kernel, shape, stages, is_aligned, is_loose)
        writer.by_parts(rows)
        return writer.lines, shape, stages
    if block:
        shape, stages = shape_of(kernel, is_aligned, block), Stages()
    else:
        shape = chosen_shape(kernel, is_aligned)
        stages = stages_of(kernel, shape, is_aligned)
    writer = Writer(kernel, shape, stages, is_aligned, is_loose)
    writer.hoists = bool(block)
    writer.constant = set() if block else writer.constant
    writer.begin()
    writer.whole()
    return writer.lines, shape, stages


class Writer(Tall):
    """Writes a kernel's statements, a team's or a thread's."""

    def __init__(
        self, kernel: Kernel, shape: Shape, stages: Stages, is_aligned: bool, is_loose: bool
    ):
        super().__init__(kernel, shape, counts_far(kernel, shape), is_loose)
        self.stages, self.is_aligned = stages, is_aligned
        self.own, self.tid = own_numbers(shape), "tid"
        self.is_held = False  # whether the loop at hand has columns that threads hold
        self.hoists = False  # whether loads come before stores that do not concern them
        self.fresh, self.touched = set[str](), set[str]()  # written and read since the barrier

    def begin(self) -> None:
        """Which turn this is, and where its own memory lies."""
        shape, type_ = self.shape, self.index_type
        if shape.tall > 1:
            self.begin_tall()
        elif shape.team == 1:
            for i, b in enumerate(self.kernel.scratch):
                self.add(f"{scalars.memory(b.dtype)} {self._own(b, i)}[{max(1, b.size)}];")
            count = shape.count // shape.lanes
            if shape.rows > 1:
                self._begin_columns(count)
                return
            self.add(f"{type_} turn = ({type_})block * {shape.block} + threadIdx.x;")
            self.add(f"if (turn >= {count}) return;")
            if shape.lanes > 1:
                self.add(f"turn *= {shape.lanes};")
        else:
            self.add(f"const int tid = threadIdx.x % {shape.team};")
            self.add(
                f"const {type_} turn = ({type_})block * {shape.teams} + threadIdx.x / {shape.team};"
            )
            if shape.count % shape.teams:
                self.add(f"if (turn >= {shape.count}) return;")
            self._scratch()
        self.decode("turn", shape.turns)

    def _begin_columns(self, count: int) -> None:
        """Which columns are this thread's, and which rows; too many threads have no rows."""
        type_, shape = self.index_type, self.shape
        self.add(f"const int row = threadIdx.x / {WARP}, lane = threadIdx.x % {WARP};")
        self.add(f"{type_} turn = ({type_})block * {WARP} + lane;")
        self.add(f"const bool is_in = {f'turn < {count}' if count % WARP else 'true'};")
        self.add(f"turn = is_in ? turn * {shape.lanes} : 0;")
        self.decode("turn", shape.turns)

    def _own(self, buffer: Buffer, i: int) -> str:
        self.places[buffer.name] = f"s{i}"
        return f"s{i}"

    def _scratch(self) -> None:
        scratch = [b for b in self.kernel.scratch if b.name not in self.own]
        scratch = [] if self.shape.rows > 1 else scratch
        each = sum(padded(b.nbytes) for b in scratch) + self.stages.shared
        if each:
            self.add("extern __shared__ __align__(16) unsigned char shared[];")
        offset = 0
        team = f"threadIdx.x / {self.shape.team} * {each}"
        for i, b in enumerate(scratch):
            type_ = scalars.memory(b.dtype)
            self.add(f"{type_} *{self._own(b, i)} = ({type_} *)(shared + {offset} + {team});")
            offset += padded(b.nbytes)
        for stage in self.stages.every:
            type_ = f"Pack<{scalars.memory(self.types[stage.buffer])}, {self.stages.lanes}>"
            if stage.in_registers:
                self.add(f"{type_} {stage.name}[{self.stages.turns}];")
            else:
                at = f"shared + {offset + stage.offset} + {team}"
                self.add(f"{type_} *{stage.name} = ({type_} *)({at});")

    def whole(self) -> None:
        for s in self.shape.lets:
            self.thread(s)
        if self.shape.tall > 1:
            self.whole_tall()
            return
        if self.shape.rows > 1:
            with self.in_lanes(self.shape.turns[-1], self.shape.lanes, self.shape.body):
                self._columns()
            return
        if self.shape.team == 1:
            if self.shape.lanes > 1:
                with self.in_lanes(self.shape.turns[-1], self.shape.lanes, self.shape.body):
                    self.thread_all(self.shape.body)
            else:
                self.thread_all(self.shape.body)
            return
        self.team_all(self.shape.body)

    def _columns(self) -> None:
        """Each warp's rows, then the warps' sums in order; the first warp has what follows."""
        at = next(i for i, s in enumerate(self.shape.body) if isinstance(s, For))
        loop = self.shape.body[at]
        assert isinstance(loop, For)
        self.thread_all(self.shape.body[:at])
        loops, inner = nested(loop, Role.SEQUENTIAL)
        count = math.prod(v.extent for v in loops)
        r = self.new("r")
        self.add("#pragma unroll 4")
        head = f"for (int {r} = is_in ? row : {count}; {r} < {count}; {r} += {self.shape.rows})"
        with self.decoded_block(head, r, loops):
            self.thread_all(inner)
        sums = {s.local: s for s in inner if isinstance(s, Accumulate)}
        lanes, rows, shared = self.shape.lanes, self.shape.rows, dict[str, str]()
        for local, s in sums.items():
            shared[local] = self.new("columns")
            type_ = scalars.register(s.value.dtype)
            self.add(f"__shared__ {type_} {shared[local]}[{rows - 1}][{lanes}][{WARP}];")
            self.unrolled(
                f"if (row) {shared[local]}[row - 1][u][lane] = {self.name(local)}[u];", lanes
            )
        self.add("__syncthreads();")
        self.add("if (row || !is_in) return;")
        for local, s in sums.items():
            name, op = self.name(local), OPS[s.op]
            self.add("#pragma unroll")
            with self.block(f"for (int y = 0; y < {rows - 1}; ++y)"):
                self.unrolled(f"{name}[u] = {op}::of({name}[u], {shared[local]}[y][u][lane]);")
        self.thread_all(self.shape.body[at + 1 :])

    def by_parts(self, rows: RowSums) -> None:
        """Rows of a part, each a warp's, with sums of columns; the first warp has what follows."""
        width, turns, lanes = self.shape.rows, self.stages.turns, self.stages.lanes
        self.add(f"const int tid = threadIdx.x % {WARP}, warp = threadIdx.x / {WARP};")
        self.add(f"const {self.index_type} turn = blockIdx.x;")
        self._scratch()
        self.decode("turn", self.shape.turns)
        for i, b in enumerate(sums_of(self.kernel)):
            self.held[b.name] = f"sums{i}"
            self.add(f"{scalars.register(b.dtype)} sums{i}[{turns}][{lanes}];")
        self.team_all(rows.before)
        r = self.vars[rows.row] = self.new("row")
        head = f"for (int {r} = warp; {r} < {rows.row.extent}; {r} += {width})"
        with self.block(head):
            self._load_ahead()
            self.team_all(rows.body)
            if self.fresh or self.touched:
                self.barrier()
        self.add(f"__shared__ f32 others[{width - 1}][{turns * lanes}][{WARP}];")
        for own in self.held.values():
            for who, line in (
                ("if (warp)", f"others[warp - 1][k * {lanes} + u][tid] = {own}[k][u];"),
                (
                    f"if (!warp) for (int y = 0; y < {width - 1}; ++y)",
                    f"{own}[k][u] += others[y][k * {lanes} + u][tid];",
                ),
            ):
                self.add("__syncthreads();")
                with self.block(who):
                    self.add("#pragma unroll")
                    with self.block(f"for (int k = 0; k < {turns}; ++k)"):
                        self.unrolled(line, lanes)
        self.add("if (warp) return;")
        self.team_all(rows.after)

    def _load_ahead(self) -> None:
        """All of a row that is kept, before anything waits for it."""
        lanes, turns = self.stages.lanes, self.stages.turns
        every = {s.name: (k, s) for found in self.stages.loops.values() for k, s in found.items()}
        for (buffer, index), stage in every.values():
            if buffer not in self.constant:
                continue
            var = next(a for a, _ in index.terms if isinstance(a, Var) and a.name == COMMON)
            self.add("#pragma unroll")
            with self.block(f"for (int k = 0; k < {turns}; ++k)"):
                q = self.vars[var] = self.new("q")
                self.add(f"const int {q} = (k * {WARP} + tid) * {lanes};")
                held = f"if ({q} < {var.extent}) " if var.extent % (WARP * lanes) else ""
                place = f"{self.places[buffer]} + {self.index(index)}"
                self.add(f"{held}{stage.name}[k] = fetched<{lanes}>({place});")
            stage.is_there = True

    # A team's statements

    def team_all(self, body: Sequence[Statement]) -> None:
        for s in body:
            self.team(s)

    def team(self, statement: Statement) -> None:
        match statement:
            case For(_, Role.SEQUENTIAL, _) if not is_sum(statement):
                self._ordered(statement)
            case For():
                self._meet(statement)
                if statement.role is Role.SEQUENTIAL:
                    self._sum(statement)
                else:
                    self._spread(statement)
            case Store(buffer, index, value, None) if buffer in self.own:
                self._named(buffer, index, value)
            case Store() | Update():
                self._meet(statement)
                with self.block("if (tid == 0)"):
                    self.thread(statement)
            case Let() | Set() | Accumulate():
                self._meet(statement)
                self.thread(statement)
            case Multiply() | Library():
                raise AssertionError("products are kernels of their own")
            case _:
                assert_never(statement)

    def _named(self, buffer: str, index: Index, value: Value) -> None:
        """A number that every thread knows: only what is read after the kernel is stored."""
        name, type_ = self.new("known"), scalars.register(value.dtype)
        self.add(f"const {type_} {name} = {self.value(value)};")
        if buffer in self.places:
            with self.block("if (tid == 0)"):
                self.add(f"put({self.places[buffer]}[{self.index(index)}], {name});")
        self.numbers[buffer] = name

    def _meet(self, statement: Statement) -> None:
        """A barrier, if the statement touches what others wrote, or writes what they read."""
        every = [a for a in accesses([statement]) if a.buffer not in self.own]
        read = {a.buffer for a in every}
        written = {a.buffer for a in every if a.writes}
        if read & self.fresh or written & self.touched:
            self.barrier()
        self.touched |= read
        self.fresh |= written

    def barrier(self) -> None:
        self.add("__syncwarp();" if self.shape.team == WARP else "__syncthreads();")
        self.fresh, self.touched = set(), set()

    def _ordered(self, loop: For) -> None:
        """Turns one after the other, each the whole team's."""
        if self.fresh or self.touched:
            self.barrier()
        with self.loop(loop):
            self.team_all(loop.body)
            if self.fresh or self.touched:
                self.barrier()

    def _inner(self, loop: For) -> tuple[list[Var], tuple[Statement, ...], int]:
        if not self.is_aligned:
            return *nested(loop, loop.role), 1
        if self._has_held(loop):
            return *nested(loop, loop.role), self.stages.lanes
        return lanes_of(self.kernel, loop, self.shape.team)

    def _spread(self, loop: For) -> None:
        """Independent turns, some of them each thread's; each warp's if they are few and long."""
        loops, body, lanes = self._inner(loop)
        if self.hoists and self._is_for_warps(loops, body):
            self._by_warps(loops, body)
            return
        with self._strided(loop, loops, lanes):
            if lanes > 1:
                with self.in_lanes(loops[-1], lanes, body):
                    self.thread_all(body)
            else:
                self.thread_all(body)

    def _is_for_warps(self, loops: Sequence[Var], body: Sequence[Statement]) -> bool:
        """Whether turns are fewer than threads, and all each does is one sum worth sharing."""
        inner = [s for s in body if isinstance(s, For)]
        if self.shape.team == WARP or len(inner) != 1 or not is_sum(inner[0]):
            return False
        if any(isinstance(s, (Update, Accumulate)) for s in body):
            return False
        count = math.prod(v.extent for v in loops)
        depth = math.prod(v.extent for v in nested(inner[0], Role.SEQUENTIAL)[0])
        return 2 * count <= self.shape.team and depth >= WARP

    def _by_warps(self, loops: Sequence[Var], body: Sequence[Statement]) -> None:
        count = math.prod(v.extent for v in loops)
        warps, q, type_ = self.shape.team // WARP, self.new("q"), self.index_type
        head = f"for ({type_} {q} = tid / {WARP}; {q} < {count}; {q} += {warps})"
        with self.decoded_block(head, q, loops):
            own, self.shape = self.shape, replace(self.shape, team=WARP)
            self.add(f"const int lane = tid % {WARP};")
            before, self.tid = self.tid, "lane"
            for s in body:
                if isinstance(s, For):
                    self._sum(s)
                elif isinstance(s, Store):
                    with self.block("if (lane == 0)"):
                        self.thread(s)
                else:
                    self.thread(s)
            self.shape, self.tid = own, before

    @contextmanager
    def _strided(self, loop: For, loops: Sequence[Var], lanes: int) -> Iterator[None]:
        """Every turn of some loops, the team's threads side by side."""
        self.staged = self.stages.loops.get(id(loop), {})
        self.unread = {k for k in self.staged if (id(loop), k) in self.stages.last}
        self.is_held = self._has_held(loop)
        with self._walked(loops, lanes):
            yield
        self.staged, self.unread, self.is_held = {}, set(), False

    def _has_held(self, loop: For) -> bool:
        """Whether a loop touches sums that threads have in registers."""
        return bool(self.held) and any(a.buffer in self.held for a in accesses([loop]))

    def _walked(self, loops: Sequence[Var], lanes: int) -> AbstractContextManager[None]:
        count = 1
        for v in loops:
            count *= v.extent
        q, team, type_ = self.new("q"), self.shape.team, self.index_type
        start = self.tid if lanes == 1 else f"{self.tid} * {lanes}"
        head = f"for ({type_} {q} = {start}; {q} < {count}; {q} += {team * lanes})"
        if self.is_held or (self.staged and self.stages.in_registers):
            self.stage_place = self.new("k")
            return self._written_out(q, start, count, team * lanes, loops)
        if self.staged:
            self.stage_place = f"{q} / {lanes}"
            self.add("#pragma unroll 4")
        return self.decoded_block(head, q, loops)

    @contextmanager
    def _written_out(
        self, q: str, start: str, count: int, step: int, loops: Sequence[Var]
    ) -> Iterator[None]:
        """The few turns of a thread one after the other, so that registers have their numbers."""
        k, turns = self.stage_place, -(-count // step)
        self.add("#pragma unroll")
        with self.block(f"for (int {k} = 0; {k} < {turns}; ++{k})"):
            self.add(f"const int {q} = {start} + {k} * {step};")
            if count % step:
                with self.decoded_block(f"if ({q} < {count})", q, loops):
                    yield
            else:
                self.decode(q, loops)
                yield

    def _sum(self, loop: For) -> None:
        """Each thread sums some of the turns, then the team adds up: always in the same order."""
        loops, body, lanes = self._inner(loop)
        count = math.prod(v.extent for v in loops)
        if self.hoists and self.shape.team > WARP and count <= 2 * WARP:
            # So few that each warp sums all of them: nobody waits for the others.
            own, tid = self.shape, self.tid
            self.shape, self.tid = replace(own, team=WARP), f"({tid} % {WARP})"
            self._sum(loop)
            self.shape, self.tid = own, tid
            return
        sums = {s.local: s for s in body if isinstance(s, Accumulate)}
        before = dict(self.names)
        parts: dict[str, str] = {}
        for local, s in sums.items():
            type_ = scalars.register(s.value.dtype)
            part = parts[local] = self.new("part")
            none = scalars.literal(Literal(identity(s), s.value.dtype))
            if lanes > 1:
                self.add(f"{type_} {part}[{lanes}];")
                self.unrolled(f"{part}[u] = {none};", lanes)
            else:
                self.add(f"{type_} {part} = {none};")
            self.names[local] = part
        with self._strided(loop, loops, lanes):
            if lanes > 1:
                with self.in_lanes(loops[-1], lanes, body, set(sums)):
                    self.thread_all(body)
            else:
                self.thread_all(body)
        self.names = before
        for local, s in sums.items():
            self._combine(self.name(local), parts[local], s, lanes)

    def _combine(self, local: str, part: str, s: Accumulate, lanes: int) -> None:
        dtype = s.value.dtype
        type_, op = scalars.register(dtype), OPS[s.op]
        found = part
        if lanes > 1:
            found = self.new("lane")
            self.add(f"{type_} {found} = {part}[0];")
            self.unrolled(f"{found} = {op}::of({found}, {part}[u]);", lanes, 1)
        if self.shape.team == WARP:
            whole = f"in_warp<{op}>({found})"
        else:
            none = scalars.literal(Literal(identity(s), dtype))
            whole = f"in_block<{op}, {self.shape.team // WARP}, {type_}>({found}, {none})"
        self.add(f"{local} = {op}::of({local}, {whole});")

    # A thread's statements

    def thread_all(self, body: Sequence[Statement]) -> None:
        before = dict(self.packs), dict(self.loaded)
        if self.hoists:
            self.early(body)
        for s in body:
            self.thread(s)
        self.packs, self.loaded = before

    def thread(self, statement: Statement) -> None:
        match statement:
            case For():
                with self.loop(statement):
                    self.thread_all(statement.body)
            case Let(local, value):
                self.let(local, value)
            case Set(local, value):
                self.assign(local, value)
            case Accumulate(local, op, value):
                self.accumulate(local, op, value)
            case Store(buffer, index, value, guard):
                self.store(buffer, index, value, guard)
            case Update(buffer, index, value):
                self.update(buffer, index, value)
            case Multiply() | Library():
                raise AssertionError("products are kernels of their own")
            case _:
                assert_never(statement)

    def accumulate(self, local: str, op: str, value: Value) -> None:
        """A product that is added is rounded once."""
        name, dtype = self.name(local), value.dtype
        is_fused = op == "add" and isinstance(value, Apply) and value.op == "mul"
        if is_fused and isinstance(value, Apply) and dtype.is_float and not dtype.is_narrow:
            a, b = value.operands

            def fused(at: str) -> str:
                return f"t_fma({self.value(a)}, {self.value(b)}, {at})"

            self.change(local, name, value, fused)
            return
        self.change(
            local, name, value, lambda at: scalars.apply(op, [at, self.value(value)], dtype, dtype)
        )
