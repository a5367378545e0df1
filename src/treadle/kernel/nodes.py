"""Kernels: loops, loads, scalar arithmetic and stores. Vectors are a loop's role, not a type."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import pairwise

from treadle.base import dtypes
from treadle.base.dtypes import DType
from treadle.base.origin import Origin
from treadle.base.quick import quick
from treadle.ir.literal import Number, number_key
from treadle.kernel.geometry import Geometry
from treadle.kernel.index import Index, Range, Var


class Space(Enum):
    """Who sees a buffer. Scratch that is not mapped yet is said to be global."""

    GLOBAL = "global"  # all threads, and whatever runs afterwards
    SHARED = "shared"  # the threads that share one iteration of the grid
    PRIVATE = "private"  # one thread, of each element that its iterations touch


@quick
@dataclass(frozen=True, slots=True)
class Buffer:
    """Memory of a number of elements of one dtype, by name.

    `lanes` above 1: private memory of the lanes of the one vector loop that uses the buffer, of at
    most that many at a time. Every lane has all of the elements for itself.
    `pack` above 1: a row that loops of one shape walk, so that each thread touches packs of
    elements of its own alone; in private memory it holds no others.
    """

    name: str
    dtype: DType
    size: int
    lanes: int = 1
    space: Space = Space.GLOBAL
    pack: int = 1

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize * self.lanes

    def held(self, word: int) -> int:
        """Bytes in memory where every element takes at least a word."""
        return max(self.nbytes, self.size * word)

    def __str__(self) -> str:
        private = f" for each of {self.lanes} lanes" if self.lanes > 1 else ""
        where = "" if self.space is Space.GLOBAL else f" {self.space.value}"
        packs = f" in packs of {self.pack}" if self.pack > 1 else ""
        return f"{self.name}: {self.dtype}[{self.size}]{private}{where}{packs}"


# Values: scalar expressions.


@quick
@dataclass(frozen=True, slots=True, eq=False)
class Literal:
    """A number, rounded to the dtype when it is rendered. 0 and −0 differ, NaN equals itself."""

    value: Number
    dtype: DType

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Literal) or self.dtype is not other.dtype:
            return False
        return number_key(self.value) == number_key(other.value)

    def __hash__(self) -> int:
        return hash((number_key(self.value), self.dtype))

    def __str__(self) -> str:
        return f"{self.value}:{self.dtype}"


@quick
@dataclass(frozen=True, slots=True)
class Load:
    """An element of a buffer."""

    buffer: str
    index: Index
    dtype: DType

    def __str__(self) -> str:
        return f"{self.buffer}[{self.index}]"


@quick
@dataclass(frozen=True, slots=True)
class Local:
    """A named scalar of the kernel: a `Let`, or an accumulator."""

    name: str
    dtype: DType

    def __str__(self) -> str:
        return self.name


@quick
@dataclass(frozen=True, slots=True)
class Position:
    """An index as a number."""

    index: Index
    dtype: DType

    def __str__(self) -> str:
        return f"({self.index}):{self.dtype}"


@quick
@dataclass(frozen=True, slots=True)
class Apply:
    """An elementwise op of the tensor IR, by name, on scalars."""

    op: str
    operands: tuple[Value, ...]
    dtype: DType

    def __str__(self) -> str:
        return f"{self.op}({', '.join(map(str, self.operands))})"


@quick
@dataclass(frozen=True, slots=True)
class Convert:
    """Another dtype, as the tensor op `cast`."""

    value: Value
    dtype: DType

    def __str__(self) -> str:
        return f"{self.dtype}({self.value})"


@quick
@dataclass(frozen=True, slots=True)
class Within:
    """Whether low ≤ index < high, as a bool: a guard, and the condition of padding."""

    index: Index
    low: int
    high: int
    dtype: DType = dtypes.bool_

    def __str__(self) -> str:
        return f"{self.low} <= {self.index} < {self.high}"


@quick
@dataclass(frozen=True, slots=True)
class Guarded:
    """The value where the guard holds, else the other; the value is not computed outside it."""

    guard: Value
    value: Value
    other: Value
    dtype: DType

    def __str__(self) -> str:
        return f"({self.value} if {self.guard} else {self.other})"


Value = Literal | Load | Local | Position | Apply | Convert | Within | Guarded


# Statements.


class Role(Enum):
    """How a loop's iterations relate, and who runs them.

    A GPU's kernel has GRID loops around everything. Each of their iterations belongs to a group of
    threads: one thread, a part of a warp, a warp or a block (`Geometry.share`). What stands inside
    GRID loops alone is executed once for the group: every thread computes values, one stores. GROUP
    and SUBGROUP loops share their iterations out; loops of one role, each all that the other
    contains, count as one loop. A GROUP loop that contains SUBGROUP loops gives each iteration to a
    warp. A SUBGROUP loop outside such a loop is run by every warp of the group. What shared-out
    iterations accumulate or update of the group's own is summed by each thread apart and then
    combined, in an order that `Geometry.combine` fixes.
    """

    PARALLEL = "parallel"  # independent, not mapped yet: any thread, any order
    GRID = "grid"  # independent: each a group's of threads
    GROUP = "group"  # independent: shared out among the threads, or warps, of a group
    SUBGROUP = "subgroup"  # independent: shared out among the threads of a warp, or a part of it
    VECTOR = "vector"  # independent: lanes of a vector
    SEQUENTIAL = "sequential"  # in order


@quick
@dataclass(frozen=True, slots=True)
class For:
    """The body for each value of a variable: all of them, or those below `stop`.

    A thread takes `lanes` neighbouring iterations at a time, in lockstep as a vector's, and writes
    out `unroll` of its own iterations one after another; 0 of them: the compiler does not, either.
    """

    var: Var
    role: Role
    body: tuple[Statement, ...]
    stop: Index | None = None  # never above the variable's extent
    lanes: int = 1
    unroll: int = 1

    def __str__(self) -> str:
        end = self.var.extent if self.stop is None else f"{self.stop} of {self.var.extent}"
        lanes = f", lanes {self.lanes}" if self.lanes > 1 else ""
        return f"for {self.var} in {end} {self.role.value}{lanes}:"


@dataclass(frozen=True, slots=True)
class Barrier:
    """Threads of a group, or of each warp, wait for each other, and see what all have written."""

    scope: Role = Role.GROUP

    def __str__(self) -> str:
        return f"barrier of the {self.scope.value}"


@quick
@dataclass(frozen=True, slots=True)
class Let:
    """Name a value. An accumulator is named so before the loop that adds to it."""

    local: str
    value: Value

    def __str__(self) -> str:
        return f"{self.local} = {self.value}"


@quick
@dataclass(frozen=True, slots=True)
class Accumulate:
    """local ← op(local, value), op one of add, mul, max, min.

    A `scanned` one is what iterations up to this one gave, which statements after it read: its loop
    is an axis of a scan. Threads that share the loop see what the iterations before theirs gave.
    """

    local: str
    op: str
    value: Value
    scanned: bool = False

    def __str__(self) -> str:
        so_far = " so far" if self.scanned else ""
        return f"{self.local} = {self.op}({self.local}, {self.value}){so_far}"


@quick
@dataclass(frozen=True, slots=True)
class Set:
    """local ← value, which may use the local: for what is no plain accumulation."""

    local: str
    value: Value

    def __str__(self) -> str:
        return f"{self.local} := {self.value}"


@quick
@dataclass(frozen=True, slots=True)
class Store:
    """Write an element, where the guard holds if there is one."""

    buffer: str
    index: Index
    value: Value
    guard: Within | None = None

    def __str__(self) -> str:
        condition = "" if self.guard is None else f" if {self.guard}"
        return f"{self.buffer}[{self.index}] = {self.value}{condition}"


@quick
@dataclass(frozen=True, slots=True)
class Update:
    """buffer[index] ← buffer[index] + value: for sums whose indices are data.

    A `shared` one may add to an element that other iterations of independent loops add to: each
    addition is one step, and their order is open. Nothing else of the kernel touches the buffer.
    """

    buffer: str
    index: Index
    value: Value
    shared: bool = False

    def __str__(self) -> str:
        order = " in any order" if self.shared else ""
        return f"{self.buffer}[{self.index}] += {self.value}{order}"


@functools.lru_cache(maxsize=256)
def _ends(listed: tuple[int, ...]) -> Range:
    return min(listed), max(listed)


@quick
@dataclass(frozen=True, slots=True)
class StridedAxis:
    """Elements along one axis of a matrix: a number of them at a stride, or listed."""

    count: int
    stride: int = 1
    listed: tuple[int, ...] = ()  # in place of the stride

    def __str__(self) -> str:
        if self.listed:
            return f"{self.count} at {self.listed[0]}…{self.listed[-1]}"
        return f"{self.count}" if self.stride == 1 else f"{self.count} step {self.stride}"

    def at(self, i: int) -> int:
        return self.listed[i] if self.listed else i * self.stride

    @property
    def range(self) -> Range:
        if not self.count:
            return 0, 0
        if self.listed:
            return _ends(self.listed)
        last = (self.count - 1) * self.stride
        return min(0, last), max(0, last)

    def part(self, start: int, count: int) -> StridedAxis:
        """Some of the elements, counted from the first of them; `at(start)` is added elsewhere."""
        if not self.listed:
            return StridedAxis(count, self.stride)
        return strided_axis([p - self.listed[start] for p in self.listed[start : start + count]])


def strided_axis(elements: Sequence[int]) -> StridedAxis:
    """A walk over elements, by stride where they have one. The first is 0."""
    steps = {b - a for a, b in pairwise(elements)}
    if len(steps) <= 1:
        return StridedAxis(len(elements), steps.pop() if steps else 1)
    return StridedAxis(len(elements), 0, tuple(elements))


@quick
@dataclass(frozen=True, slots=True)
class Matrix:
    """A matrix inside a buffer: element (i, j) is at index + rows.at(i) + columns.at(j)."""

    buffer: str
    index: Index
    rows: StridedAxis
    columns: StridedAxis

    def __str__(self) -> str:
        return f"{self.buffer}[{self.index}: {self.rows} by {self.columns}]"

    @property
    def range(self) -> Range:
        """Lowest and highest element."""
        ranges = self.index.range, self.rows.range, self.columns.range
        return sum(r[0] for r in ranges), sum(r[1] for r in ranges)


@quick
@dataclass(frozen=True, slots=True)
class Matmul:
    """target ← left · right, or target + left · right: the template of every matrix product.

    Columns of target and right lie next to each other, unless the product is a kernel of its own.
    There operands may be narrow: they are summed as floats of 32 bits, rounded once at the end.
    Each element is summed along the depth in order, every product and addition rounded once
    together; a library that computes a whole product may sum in another order.
    """

    target: Matrix
    left: Matrix
    right: Matrix
    adds: bool = False
    bias: str | None = None  # a buffer with what is added to each column, of a whole product
    # Numbers by which a whole product of 8-bit floats is multiplied first: buffers and elements.
    scales: tuple[tuple[str, int], ...] = ()

    def __str__(self) -> str:
        sign, more = "+=" if self.adds else "=", "" if self.bias is None else f" + {self.bias}"
        more = "".join(f" * {buffer}[{at}]" for buffer, at in self.scales) + more
        return f"{self.target} {sign} {self.left} · {self.right}{more}"

    @property
    def matrices(self) -> tuple[Matrix, Matrix, Matrix]:
        return self.target, self.left, self.right

    @property
    def flops(self) -> int:
        return 2 * self.target.rows.count * self.target.columns.count * self.left.columns.count


@quick
@dataclass(frozen=True, slots=True)
class View:
    """A tensor inside a buffer: where its first element is, and steps along its axes."""

    buffer: str
    start: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def __str__(self) -> str:
        axes = zip(self.shape, self.strides, strict=True)
        return f"{self.buffer}[{self.start}: {', '.join(f'{n} step {s}' for n, s in axes)}]"

    @property
    def range(self) -> Range:
        steps = [(n - 1) * s for n, s in zip(self.shape, self.strides, strict=True) if n > 1]
        low, high = sum(min(0, s) for s in steps), sum(max(0, s) for s in steps)
        return self.start + low, self.start + high


@dataclass(frozen=True, slots=True)
class LibraryCall:
    """What a library computes on whole tensors, by the name of the composite that it is."""

    name: str
    results: tuple[View, ...]
    operands: tuple[View, ...]
    numbers: tuple[tuple[str, float], ...]
    flops: int

    def __str__(self) -> str:
        made, given = (", ".join(map(str, views)) for views in (self.results, self.operands))
        return f"{made} = {self.name}({given})"


Statement = For | Let | Accumulate | Set | Store | Update | Matmul | LibraryCall | Barrier


@quick
@dataclass(frozen=True, slots=True)
class Kernel:
    """Loops over buffers. Equality ignores names and origins."""

    name: str = field(compare=False)
    inputs: tuple[Buffer, ...]
    outputs: tuple[Buffer, ...]
    body: tuple[Statement, ...]
    origins: tuple[Origin, ...] = field(default=(), compare=False)
    scratch: tuple[Buffer, ...] = ()  # a thread's own memory, undefined at first
    is_standalone: bool = field(default=False, compare=False)  # a template that stays by itself
    geometry: Geometry | None = None  # of a kernel that is mapped to a GPU

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        return self.inputs + self.outputs


def standalone_matmul(kernel: Kernel) -> tuple[tuple[Var, ...], Matmul] | None:
    """The product that a kernel is, and the loops over batches around it; None for any other."""
    loops: list[Var] = []
    body = kernel.body if kernel.is_standalone else ()
    while True:
        match body:
            case (Matmul() as only,):
                return tuple(loops), only
            case (For(var, Role.PARALLEL | Role.GRID, body, None),):
                loops.append(var)
            case _:
                return None


def library_call_of(kernel: Kernel) -> LibraryCall | None:
    """What a kernel asks of a library; None where it is code of our own."""
    only = kernel.body[0] if len(kernel.body) == 1 else None
    return only if isinstance(only, LibraryCall) else None
