"""Products by warpgroups: tensor cores multiply tiles while other warps finish the one before.

One warp asks for parts of the depth of both operands, which come to shared memory by themselves.
Two groups of four warps multiply them, half of a tile's rows each, and put the tile, rounded, into
shared memory. Seven warps take its rows from there and do what follows each element. Barriers in
shared memory count who is through: `full` and `empty` for parts of the depth, `ready` and `taken`
for halves of the tile. Two blocks may form a cluster: they have the same columns, each copies half
of the right operand for both, and parts are empty when both have multiplied them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from treadle.codegen.c_like import statements
from treadle.codegen.cuda import scalars
from treadle.codegen.cuda.render import Writer, counts_far
from treadle.kernel.access import plain_loads
from treadle.kernel.geometry import Warpgroups
from treadle.kernel.index import Var, uses
from treadle.kernel.nodes import Accumulate, Kernel, Load
from treadle.kernel.warpgroups import Side, finished_of

MULTIPLIED = 128  # columns of one instruction: more would need more registers than threads have
GROUP = 8  # tiles below each other that are computed around the same time: they share columns
REGISTERS = 160, 96  # of threads that multiply, and of others; together a multiprocessor's

# What the template's functions start with. Waiting is for barriers' phases, which have two names.
_FUNCTIONS = r"""
struct __align__(64) Map { u64 w[16]; };
DEV u32 in_shared(const void *p) { return (u32)__cvta_generic_to_shared(p); }
DEV void count_to(u32 b, int n) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(b), "r"(n)); }
DEV void wait_for(u32 b, u32 phase) {
  asm volatile("{.reg .pred p; AGAIN: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;"
    " @p bra DONE; bra AGAIN; DONE: }" :: "r"(b), "r"(phase) : "memory"); }
DEV void arrive(u32 b) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(b) : "memory"); }
DEV void arrive_in(u32 b, u32 rank) {  // at the same barrier of a block of the cluster
  asm volatile("{.reg .b32 at; mapa.shared::cluster.u32 at, %0, %1;"
    " mbarrier.arrive.shared::cluster.b64 _, [at]; }"
    :: "r"(b), "r"(rank) : "memory"); }
DEV void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }
DEV void expect(u32 b, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
    :: "r"(b), "r"(bytes) : "memory"); }
DEV void ask_for(u32 into, const Map *m, u32 b, int x, int y) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
    " [%0], [%1, {%3, %4}], [%2];" :: "r"(into), "l"(m), "r"(b), "r"(x), "r"(y) : "memory"); }
struct Tile { int row, column; };  // where it begins
DEV void ask_for_both(u32 into, const Map *m, u32 b, int x, int y) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
    ".multicast::cluster [%0], [%1, {%3, %4}], [%2], %5;"
    :: "r"(into), "l"(m), "r"(b), "r"(x), "r"(y), "h"((short)3) : "memory"); }
// Lines of 64 or 128 bytes, packs exchanged: from one matrix of as many elements as a line has to
// the next, and from eight lines to the next eight.
DEV u64 matrix_at(u32 at, u32 matrices, u32 lines) {
  return (u64)((at & 0x3ffff) >> 4) | (u64)(matrices >> 4) << 16 | (u64)(lines >> 4) << 32
    | (lines == 1024 ? 1ull : 2ull) << 62; }
DEV void put_four(u32 at, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
    :: "r"(at), "r"(a), "r"(b), "r"(c), "r"(d) : "memory"); }
DEV u32 two_f16(f32 high, f32 low) {
  u32 r; asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low)); return r; }
"""


def warpgroup_lines(kernel: Kernel, template: Warpgroups) -> list[str]:
    """Lines of the function of a product that is finished."""
    return _Finishing(kernel, template).written()


def _multiply(narrow: str) -> str:
    """The function of one instruction of the tensor cores; what it adds to are registers."""
    count = MULTIPLIED // 2
    sums = ", ".join(f"%{i}" for i in range(count))
    registers = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    kind = f"m64n{MULTIPLIED}k16.f32.{narrow}.{narrow}"
    a, b, adds, left, right = (f"%{count + i}" for i in range(5))
    return "\n".join(
        [
            "template <int LEFT, int RIGHT>",
            f"DEV void multiply_{narrow}(f32 (&d)[{count}], u64 a, u64 b, int adds) {{",
            f'  asm volatile("{{.reg .pred p; setp.ne.b32 p, {adds}, 0;\\n"',
            f'    "wgmma.mma_async.sync.aligned.{kind} {{{sums}}}, "',
            f'    "{a}, {b}, p, 1, 1, {left}, {right};}}\\n"',
            f'    : {registers} : "l"(a), "l"(b), "r"(adds), "n"(LEFT), "n"(RIGHT)); }}',
        ]
    )


WARPGROUPS = "\n".join([_FUNCTIONS, *map(_multiply, ("bf16", "f16"))])


class _Finishing(Writer):
    """Writes the three parts that warps have in a product and what follows it."""

    def __init__(self, kernel: Kernel, template: Warpgroups):
        super().__init__(kernel, counts_far(kernel, template.blocks))
        self.template, self.found = template, finished_of(kernel)
        narrow = scalars.memory(self.found.left.load.dtype)
        turned = ", ".join(str(int(not s.is_along)) for s in (self.found.left, self.found.right))
        self.pair, self.multiply = f"two_{narrow}", f"multiply_{narrow}<{turned}>"

    def written(self) -> list[str]:
        t = self.template
        self.add("extern __shared__ __align__(1024) unsigned char shared[];")
        self.add("const u32 base = in_shared(shared);")
        self.add(f"const u32 full = base + {t.barriers_at}, empty = full + {8 * t.STAGES};")
        self.add(f"const u32 ready = empty + {8 * t.STAGES}, taken = ready + 16;")
        with self.block("if (threadIdx.x == 0)"):
            counts = [("full", t.STAGES, 1), ("empty", t.STAGES, 2 * t.cluster)]
            counts += [("ready", 2, 128), ("taken", 2, 32 * t.FINISHING)]
            for name, count, arrivals in counts:
                line = f"count_to({name} + 8 * i, {arrivals});"
                self.add(f"for (int i = 0; i < {count}; ++i) {line}")
            self.add('asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");')
        self.add("cluster_sync();" if t.cluster > 1 else "__syncthreads();")
        multiplying, other = REGISTERS
        self.add("const int warpgroup = threadIdx.x / 128, lane = threadIdx.x % 32;")
        self._tiles()
        with self.block("if (warpgroup == 0)"):
            self._registers("dec", other)
            with self.block("if (threadIdx.x == 0)"):
                self._copies()
            with self.block("else if (threadIdx.x >= 32)"):
                self._finish("threadIdx.x / 32 - 1")
        with self.block("else if (warpgroup < 3)"):
            self._registers("inc", multiplying)
            self._multiplies()
        with self.block("else"):
            self._registers("dec", other)
            self._finish("threadIdx.x / 32 - 9")
        if t.cluster > 1:  # the other block still copies into this one's memory
            self.add("cluster_sync();")
        return self.lines

    def _registers(self, change: str, count: int) -> None:
        self.add(f'asm volatile("setmaxnreg.{change}.sync.aligned.u32 {count};");')

    # Tiles

    def _piece(self) -> str:
        """The loop over pieces of work, or those of a cluster: some tiles below each other."""
        share = self._share
        return f"for (int piece = block{share}; piece < {self._count}; piece += gridDim.x{share})"

    @property
    def _share(self) -> str:
        return "" if self.template.cluster == 1 else f" / {self.template.cluster}"

    @property
    def _count(self) -> int:
        return self.template.blocks // self.template.cluster

    def _tiles(self) -> None:
        """The function of a piece's first tile: pieces of around the same time share operands."""
        t = self.template
        (down, across), high = t.pieces, GROUP // t.cluster
        self.add("const auto first_of = [&](int piece) {")
        self.add(f"const int group = piece / {high * across}, left = piece % {high * across};")
        self.add(f"const int below = min({high}, {down // t.cluster} - group * {high});")
        at = f"(group * {high} + left % below)"
        at = at if t.cluster == 1 else f"({at} * {t.cluster} + block % {t.cluster})"
        self.add(f"return Tile{{{at} * {t.together * t.ROWS}, left / below * {t.COLUMNS}}};")
        self.add("};")

    @contextmanager
    def _each_tile(self) -> Iterator[None]:
        """The loop over the tiles of a piece."""
        t = self.template
        with self.block(f"for (int below_it = 0; below_it < {t.together}; ++below_it)"):
            self.add(f"const Tile tile = {{first.row + below_it * {t.ROWS}, first.column}};")
            yield

    def _next_stage(self) -> None:
        self.add(f"if (++stage == {self.template.STAGES}) {{ stage = 0; phase ^= 1; }}")

    def _copies(self) -> None:
        t, (_, _, k) = self.template, self.template.sizes
        self.add("int stage = 0; u32 phase = 0;")
        with self.block(self._piece()):
            self.add("const Tile first = first_of(piece);")
            with self._each_tile(), self.block(f"for (int k = 0; k < {k}; k += {t.DEPTH})"):
                self.add("wait_for(empty + 8 * stage, phase ^ 1);")
                self.add(f"const u32 at = base + stage * {t.STAGE}, done = full + 8 * stage;")
                self.add(f"expect(done, {t.STAGE});")
                self._copy(self.found.left, 0, "tile.row", t.ROWS, "at")
                start = f"at + {t.ROWS * t.DEPTH * 2}"
                self._copy(self.found.right, 1, "tile.column", t.COLUMNS, start)
                self._next_stage()

    def _copy(self, side: Side, number: int, first: str, length: int, into: str) -> None:
        """A part of an operand: at once, or in squares where lines lie across the depth.

        Of the right operand a block of a cluster copies its share, for all of them.
        """
        t, share = self.template, self.template.cluster if number else 1
        ask = "ask_for" if share == 1 else "ask_for_both"
        own, length = "0" if share == 1 else f"block % {share}", length // share
        if side.is_along:
            place, at = f"{into} + {own} * {length * t.DEPTH * 2}", f"{first} + {own} * {length}"
            self.add(f"{ask}({place}, &a.maps[{number}], done, k, {at});")
            return
        for i in range(length // t.ACROSS):
            square = f"({own} * {length // t.ACROSS} + {i})"
            place = f"{into} + {square} * {t.ACROSS * t.DEPTH * 2}"
            at = f"{first} + {square} * {t.ACROSS}"
            self.add(f"{ask}({place}, &a.maps[{number}], done, {at}, k);")

    # Warps that multiply

    def _multiplies(self) -> None:
        t, (_, _, k) = self.template, self.template.sizes
        self.add("const int half = warpgroup - 1, warp = threadIdx.x / 32 % 4;")
        self.add("int stage = 0; u32 phase = 0, turn = 0;")
        with self.block(self._piece()), self.block(f"for (int i = 0; i < {t.together}; ++i)"):
            self.add(f"f32 d[{t.COLUMNS // MULTIPLIED}][{MULTIPLIED // 2}];")
            self.add("int before = 0;")
            with self.block(f"for (int k = 0; k < {k}; k += {t.DEPTH})"):
                self.add("wait_for(full + 8 * stage, phase);")
                self.add('asm volatile("wgmma.fence.sync.aligned;" ::: "memory");')
                self._products()
                self.add('asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");')
                with self.block("if (k > 0)"):
                    self._done(1)
                self.add("before = stage;")
                self._next_stage()
            self._done(0)
            self.add("wait_for(taken + 8 * half, turn ^ 1);")
            self._put_tile()
            self.add("arrive(ready + 8 * half);")
            self.add("turn ^= 1;")

    def _done(self, under_way: int) -> None:
        """All products but some are made: what they read may be overwritten."""
        self.add(f'asm volatile("wgmma.wait_group.sync.aligned {under_way};" ::: "memory");')
        if self.template.cluster == 1:
            self.add("if (threadIdx.x % 128 == 0) arrive(empty + 8 * before);")
            return
        rank = f"if (threadIdx.x % 128 < {self.template.cluster})"
        self.add(f"{rank} arrive_in(empty + 8 * before, threadIdx.x % 128);")

    def _products(self) -> None:
        t, parts = self.template, self.template.COLUMNS // MULTIPLIED
        half = t.ROWS // 2 * t.DEPTH * 2  # bytes of the rows of one group of warps
        self.add(f"const u32 at = base + stage * {t.STAGE}, bt = at + {2 * half};")
        left, right = self.found.left, self.found.right
        with self.written_out("e", t.DEPTH // 16):
            place = f"at + half * {half} + e * {self._step(left)}"
            self.add(f"const u64 a_at = matrix_at({place}, {self._pitches(left)});")
            with self.written_out("part", parts):
                place = f"bt + part * {MULTIPLIED * t.DEPTH * 2} + e * {self._step(right)}"
                self.add(f"const u64 b_at = matrix_at({place}, {self._pitches(right)});")
                self.add(f"{self.multiply}(d[part], a_at, b_at, k + e > 0);")

    def _step(self, side: Side) -> int:
        """Bytes from 16 elements of the depth to the next: along a line, or lines."""
        return 32 if side.is_along else 16 * self.template.ACROSS * 2

    def _pitches(self, side: Side) -> str:
        """Bytes from one matrix to the next, and from eight lines to the next eight."""
        t = self.template
        return f"{t.ACROSS * t.DEPTH * 2}, {8 * 2 * (t.DEPTH if side.is_along else t.ACROSS)}"

    def _put_tile(self) -> None:
        """Rounded, matrices of 8 × 8 as the threads of a warp hold them."""
        t = self.template
        row = f"half * 64 + warp * 16 + lane % 16) * {t.LINE} + lane / 16 * 16"
        self.add(f"const u32 row = base + {t.tile_at} + ({row};")
        each = MULTIPLIED // 8
        with self.written_out("part", t.COLUMNS // MULTIPLIED):
            self.add("#pragma unroll")
            with self.block(f"for (int j = 0; j < {each}; j += 2)"):
                self.add("const f32 *g = d[part] + 4 * j;")
                pairs = ", ".join(f"{self.pair}(g[{i + 1}], g[{i}])" for i in (0, 2, 4, 6))
                self.add(f"put_four(row + (part * {each} + j) * 16, {pairs});")

    # Warps that finish tiles

    def _finish(self, warp: str) -> None:
        t, (_, n, _) = self.template, self.template.sizes
        before = dict(self.names), dict(self.vars), set(self.spread), dict(self.packs)
        for s in self.grid.lets:
            statements.statement(self, s)
        self.add(f"const int warp = {warp};")
        self.add("u32 turn = 0;")
        with self.block(self._piece()):
            self.add("const Tile first = first_of(piece);")
            self.add(f"const int column = first.column + lane * {t.LANES};")
            self.add(f"const bool is_in = {f'column < {n}' if n % t.COLUMNS else 'true'};")
            self.vars[t.column] = "column"
            sums = [s.local for s in self.found.sums]
            for local in sums:
                self.names[local] = self.new("total")
                self.add(f"f32 {self.names[local]}[{t.LANES}] = {{}};")
            with self.in_lanes(t.column, t.LANES, self.found.element, {*sums, t.rounded}):
                self._at_row("first.row", "first")
                moving = self._load_columns()
                with self._each_tile():
                    self._finish_tile(moving)
                    self.add("turn ^= 1;")
                if sums:
                    self._at_row("first.row", "first")
                    self._finish_sums(self.found.sums)
        self.names, self.vars, self.spread, self.packs = before

    def _load_columns(self) -> list[Load]:
        """Packs that are the same for every row are loaded once; those that are not are left."""
        row, moving = self._row_variable(), list[Load]()
        every = dict.fromkeys(x for s in self.found.element for x in plain_loads(s))
        for load in every:
            if load.buffer not in self.constant or not self.is_pack(load.index):
                continue
            if any(uses(atom, row) for atom, _ in load.index.terms):
                moving.append(load)
            else:
                self.packs[load] = self._loaded_pack(load, "if (is_in) ")
        return moving

    def _row_variable(self) -> Var:
        return self.template.outer if self.template.inner is None else self.template.inner

    def _at_row(self, row: str, tile: str = "tile") -> None:
        """From here on, elements are those of a row of the product, in a tile."""
        t = self.template
        self.vars[t.outer] = row
        if t.inner is not None:
            part = self.vars[t.outer] = f"({tile}.row / {t.inner.extent})"
            self.vars[t.inner] = f"({row} - {part} * {t.inner.extent})"

    def _is_inside(self, row: str) -> str:
        m, _, _ = self.template.sizes
        return f"is_in && {row} < {m}" if m % self.template.ROWS else "is_in"

    def _load_rows(self, ahead: dict[Load, str], row: str, condition: str) -> None:
        """A row's packs, on their way while others are computed."""
        self._at_row(row)
        with self.block(f"if ({condition})"):
            for load, name in ahead.items():
                fetched = f"fetched<{self.width}>({self._address(load.buffer, load.index)})"
                self.add(f"{name}[e] = {fetched};")

    def _finish_tile(self, moving: Sequence[Load]) -> None:
        """Some rows at a time; what the next ones load is on its way while these are computed."""
        t, ahead = self.template, dict[Load, str]()
        rows, lanes, warps = t.AT_ONCE, t.LANES, t.FINISHING
        self.add("int half = -1;")
        count, type_ = t.ROWS // rows, scalars.memory(self.found.left.load.dtype)
        for load in moving:
            ahead[load] = self.new("ahead")
            self.add(f"Pack<{scalars.memory(load.dtype)}, {lanes}> {ahead[load]}[{rows}];")
        if ahead:
            with self.written_out("e", rows):
                self.add(f"const int row = tile.row + warp * {rows} + e;")
                self._load_rows(ahead, "row", self._is_inside("row"))
        pack = f"Pack<{type_}, {lanes}>"
        with self.block(f"for (int b = warp; b < {count}; b += {warps})"):
            with self.block(f"if (b / {count // 2} != half)"):
                self.add("if (half == 0) arrive(taken);")
                self.add(f"half = b / {count // 2};")
                self.add("wait_for(ready + 8 * half, turn);")
            self.add(f"{pack} got[{rows}];")
            at = f"{t.tile_at} + (b * {rows} + e) * {t.LINE} + lane * 16"
            with self.written_out("e", rows):
                self.add(f"got[e] = *(const {pack} *)(shared + {at});")
            with self.written_out("e", rows):
                self.add(f"const int row = tile.row + b * {rows} + e;")
                self._finish_row(ahead, f"b + {warps} < {count}", warps * rows)
        self.add("arrive(taken + 8);")

    def _finish_row(self, ahead: dict[Load, str], has_next: str, step: int) -> None:
        t, before = self.template, dict(self.packs)
        for load, name in ahead.items():
            self.packs[load] = self.new("pack")
            self.add(f"{scalars.register(load.dtype)} {self.packs[load]}[{t.LANES}];")
            self.add(f"unpacked<{t.LANES}>({name}[e], {self.packs[load]});")
        if ahead:
            self.add(f"const int later = row + {step};")
            self._load_rows(ahead, "later", f"{has_next} && {self._is_inside('later')}")
        self._at_row("row")
        with self.block(f"if ({self._is_inside('row')})"):
            name = self.names[t.rounded] = self.new("rounded")
            self.add(f"f32 {name}[{t.LANES}];")
            self.add(f"unpacked<{t.LANES}>(got[e], {name});")
            self.narrow.add(t.rounded)
            self.thread_all(self.found.element)
        self.packs = before

    def _finish_sums(self, sums: Sequence[Accumulate]) -> None:
        """The warps' sums are added in order; the first warp has what follows."""
        t = self.template
        together = f'asm volatile("bar.sync 1, {32 * t.FINISHING};" ::: "memory");'
        own, other = (f"({w} * {t.COLUMNS} + lane * {t.LANES} + u)" for w in ("warp", "y"))
        for i, s in enumerate(sums):
            at = t.sums_at + i * t.SUM
            self.unrolled(f"((f32 *)(shared + {at}))[{own}] = {self.names[s.local]}[u];", t.LANES)
        self.add(together)
        with self.block("if (warp == 0 && is_in)"):
            for i, s in enumerate(sums):
                name, at = self.names[s.local], t.sums_at + i * t.SUM
                with self.block(f"for (int y = 1; y < {t.FINISHING}; ++y)"):
                    self.unrolled(f"{name}[u] += ((f32 *)(shared + {at}))[{other}];", t.LANES)
            self.thread_all(self.found.after)
        self.add(together)
