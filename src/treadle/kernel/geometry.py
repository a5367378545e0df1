"""How the threads of a GPU's launch run a kernel: blocks, groups of threads, and templates."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

from treadle.kernel.index import Var


class Combine(Enum):
    """How threads that share an iteration of the grid lie in a block, and combine their parts.

    All but the first wait for each other as they combine, and then the first thread alone executes
    what stands after the last sum.
    """

    EXCHANGE = "exchange"  # side by side; a warp's by exchange, then those of warps in order
    IN_ORDER = "in order"  # one in each warp, beside neighbouring iterations; warp after warp
    TREE = "tree"  # beside neighbouring iterations; one half is added to the other, and so on


@dataclass(frozen=True, slots=True)
class Panel:
    """An operand's part of a tile in shared memory: rows of elements, along the depth or across."""

    is_along: bool  # rows lie along the depth
    length: int  # of the tile, across the depth
    step: int  # elements from one row to the next: padded, so that threads read other banks
    lanes: int  # elements of a copy
    batch: int  # copies that each thread has under way at a time
    apart: int = 1  # rows between those that neighbours copy to at once, which lie in other banks

    def copies(self, depth: int, threads: int) -> int:
        """That each of some threads makes of a part of the depth."""
        return -(-self.length * depth // (self.lanes * threads))

    def size(self, depth: int) -> int:
        return self.step * (self.length if self.is_along else depth)


@dataclass(frozen=True, slots=True)
class Tiled:
    """A template: each block computes a tile of a contraction, its operands in shared memory.

    The kernel's loops say what is computed: those of both operands, of each alone, and the depth.
    """

    batch: tuple[Var, ...]
    rows: tuple[Var, ...]
    columns: tuple[Var, ...]
    depth: tuple[Var, ...]
    is_swapped: bool  # the second factor is the left operand
    tile_depth: int  # of the panels
    down: int  # rows of a thread
    across: int  # columns of a thread
    shares: int  # threads that share an element's depth
    left: Panel
    right: Panel
    is_standalone: bool  # copies of both panels are under way at once
    unroll: int  # steps along the depth that are written out
    # Edge of the matrices that a warp multiplies at once, of float16 summed in float32; 0: threads
    # multiply numbers. With it, `down`, `across` and `shares` are a warp's.
    matrices: int = 0
    staged: int = 0  # matrices beside each other of which threads read the elements at a time
    is_ahead: bool = False  # a part of the depth is loaded while the one before is multiplied
    by_fours: bool = False  # threads read panels in packs of four, four steps of the depth at once
    is_by_columns: bool = False  # tiles follow each other down the rows, in place of across

    def __str__(self) -> str:
        tile = f"{self.left.length} by {self.right.length} by {self.tile_depth}"
        return f"tiles of {tile}, {self.down} by {self.across} a thread, depth in {self.shares}"

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        groups = self.batch, self.rows, self.columns, self.depth
        b, m, n, k = (math.prod(v.extent for v in g) for g in groups)
        return b, m, n, k

    @property
    def stage_step(self) -> int:
        """Elements from one row of staged matrices to the next: rows start in other banks."""
        return self.staged * self.matrices + 4

    @property
    def right_start(self) -> int:
        """Where the right panel starts, in elements: after the left, at a whole pack."""
        return -(-self.left.size(self.tile_depth) // 4) * 4

    @property
    def elements(self) -> int:
        """Of both panels."""
        return self.right_start + self.right.size(self.tile_depth)

    @property
    def blocks(self) -> int:
        b, m, n, _ = self.sizes
        return b * -(-m // self.left.length) * -(-n // self.right.length)


@dataclass(frozen=True, slots=True)
class Scattered:
    """A template: each block owns rows of a sum whose indices are data, and adds in order."""

    rows: int
    blocks: int
    noted: int  # updates that a warp can note at a time
    looked: int  # indices that a thread looks at in one go
    terms: int  # numbers that a thread loads before it adds the first

    def __str__(self) -> str:
        return f"blocks own {self.rows} rows of a scattered sum"


@dataclass(frozen=True, slots=True)
class Warpgroups:
    """A template: two groups of four warps multiply tiles of narrow floats, others finish them.

    What follows a product, element by element, is done by other warps while the next tile is
    multiplied. The kernel's loops say what is computed: rows, or parts of rows whose columns are
    summed, and the rows of a part; columns; the depth.
    """

    outer: Var  # rows of the result, or parts of them
    inner: Var | None  # rows of a part
    column: Var
    depth: Var
    rounded: str  # the local that is the product as it would be stored
    sums: int = 0  # of columns

    ROWS: ClassVar[int] = 128  # of a tile
    COLUMNS: ClassVar[int] = 256
    # Elements of the depth that are multiplied at a time, how many such parts are in shared memory,
    # and elements of a line where lines lie across the depth: lines have 64 or 128 bytes.
    DEPTH: ClassVar[int] = 32
    STAGES: ClassVar[int] = 6
    ACROSS: ClassVar[int] = 64
    THREADS: ClassVar[int] = 512
    FINISHING: ClassVar[int] = 7  # warps that finish tiles; one more copies, eight multiply
    AT_ONCE: ClassVar[int] = 4  # rows of a tile that such a warp reads before it computes the first
    LANES: ClassVar[int] = 8  # columns of its threads: a row of the tile is a warp's
    # Bytes of shared memory: of a part of the depth, of a row of the tile with a pad that moves the
    # next one to other banks, and of the sums of columns that all warps have.
    STAGE: ClassVar[int] = (ROWS + COLUMNS) * DEPTH * 2
    LINE: ClassVar[int] = COLUMNS * 2 + 16
    SUM: ClassVar[int] = FINISHING * COLUMNS * 4
    BARRIERS: ClassVar[int] = 8 * (2 * STAGES + 4)

    def __str__(self) -> str:
        return f"tiles of {self.ROWS} by {self.COLUMNS} by warpgroups"

    @property
    def sizes(self) -> tuple[int, int, int]:
        within = 1 if self.inner is None else self.inner.extent
        return self.outer.extent * within, self.column.extent, self.depth.extent

    @property
    def together(self) -> int:
        """Tiles below each other that a block computes one after the other: those of a part."""
        return 1 if self.inner is None else self.inner.extent // self.ROWS

    @property
    def tile_at(self) -> int:
        """Where the rounded tile starts in shared memory, behind parts of the depth."""
        return self.STAGES * self.STAGE

    @property
    def sums_at(self) -> int:
        return self.tile_at + self.ROWS * self.LINE

    @property
    def barriers_at(self) -> int:
        return self.sums_at + self.sums * self.SUM

    @property
    def shared(self) -> int:
        """Bytes of shared memory of a block."""
        return self.barriers_at + self.BARRIERS

    @property
    def pieces(self) -> tuple[int, int]:
        """Pieces of work below and beside each other: tiles, or those of a part."""
        m, n, _ = self.sizes
        return -(-m // (self.ROWS * self.together)), -(-n // self.COLUMNS)

    @property
    def cluster(self) -> int:
        """Blocks that copy the right operand for each other: two have pieces below each other."""
        return 1 if self.pieces[0] % 2 else 2

    @property
    def blocks(self) -> int:
        """Pieces of work; blocks that a device has take them in turn."""
        return math.prod(self.pieces)


Template = Tiled | Scattered | Warpgroups


@dataclass(frozen=True, slots=True)
class Geometry:
    """How the threads of a launch run a mapped kernel."""

    threads: int  # of a block
    share: int = 1  # of them share one iteration of the grid
    warp: int = 32  # threads of a warp
    combine: Combine = Combine.EXCHANGE
    room: int = 1  # blocks for which a multiprocessor should have registers
    calls: int = 1  # of the kernel in one launch, at most
    is_cooperative: bool = False  # part of a launch that synchronizes its grid
    unrounded: frozenset[str] | None = None  # locals of narrow floats in excess precision, if any
    template: Template | None = None
    packs: frozenset[str] = frozenset()  # buffers of float16 that are bound in packs of four

    @property
    def groups(self) -> int:
        """Iterations of the grid that a block has at a time."""
        return self.threads // self.share

    def __str__(self) -> str:
        facts = [f"{self.threads} threads"]
        facts += [f"{self.share} to an iteration"] if self.share > 1 else []
        facts += [f"combined {self.combine.value}"] if self.combine is not Combine.EXCHANGE else []
        facts += ["cooperative"] if self.is_cooperative else []
        facts += ["excess precision"] if self.unrounded is not None else []
        facts += [str(self.template)] if self.template is not None else []
        return ", ".join(facts)
