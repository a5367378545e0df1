"""Kernels: loops, loads, scalar arithmetic and stores. Vectors are a loop's role, not a type."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from treadle.base import dtypes
from treadle.base.dtypes import DType
from treadle.base.origin import Origin
from treadle.ir.literal import Number, number_key
from treadle.kernel.index import Index, Var


@dataclass(frozen=True, slots=True)
class Buffer:
    """Memory of a number of elements of one dtype, by name."""

    name: str
    dtype: DType
    size: int

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.name}: {self.dtype}[{self.size}]"


# Values: scalar expressions.


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


@dataclass(frozen=True, slots=True)
class Load:
    """An element of a buffer."""

    buffer: str
    index: Index
    dtype: DType


@dataclass(frozen=True, slots=True)
class Local:
    """A named scalar of the kernel: a `Let`, or an accumulator."""

    name: str
    dtype: DType


@dataclass(frozen=True, slots=True)
class Position:
    """An index as a number."""

    index: Index
    dtype: DType


@dataclass(frozen=True, slots=True)
class Apply:
    """An elementwise op of the tensor IR, by name, on scalars."""

    op: str
    operands: tuple[Value, ...]
    dtype: DType


@dataclass(frozen=True, slots=True)
class Convert:
    """Another dtype, as the tensor op `cast`."""

    value: Value
    dtype: DType


@dataclass(frozen=True, slots=True)
class Within:
    """Whether low ≤ index < high, as a bool: a guard, and the condition of padding."""

    index: Index
    low: int
    high: int
    dtype: DType = dtypes.bool_


@dataclass(frozen=True, slots=True)
class Guarded:
    """The value where the guard holds, else the other; the value is not computed outside it."""

    guard: Value
    value: Value
    other: Value
    dtype: DType


Value = Literal | Load | Local | Position | Apply | Convert | Within | Guarded


# Statements.


class Role(Enum):
    """How a loop's turns relate."""

    PARALLEL = "parallel"  # independent: any thread, any order
    VECTOR = "vector"  # independent: lanes of a vector
    UNROLLED = "unrolled"  # in order, written out
    SEQUENTIAL = "sequential"  # in order


@dataclass(frozen=True, slots=True)
class For:
    """The body for each value of a variable."""

    var: Var
    role: Role
    body: tuple[Statement, ...]


@dataclass(frozen=True, slots=True)
class Let:
    """Name a value. An accumulator is named so before the loop that adds to it."""

    local: str
    value: Value


@dataclass(frozen=True, slots=True)
class Accumulate:
    """local ← op(local, value), op one of add, mul, max, min."""

    local: str
    op: str
    value: Value


@dataclass(frozen=True, slots=True)
class Set:
    """local ← value, which may use the local: for what is no plain accumulation."""

    local: str
    value: Value


@dataclass(frozen=True, slots=True)
class Store:
    """Write an element, where the guard holds if there is one."""

    buffer: str
    index: Index
    value: Value
    guard: Within | None = None


@dataclass(frozen=True, slots=True)
class Update:
    """buffer[index] ← buffer[index] + value: for sums whose places are data."""

    buffer: str
    index: Index
    value: Value


Statement = For | Let | Accumulate | Set | Store | Update


@dataclass(frozen=True, slots=True)
class Kernel:
    """One loop nest over buffers. Equality ignores names and origins."""

    name: str = field(compare=False)
    inputs: tuple[Buffer, ...]
    outputs: tuple[Buffer, ...]
    body: tuple[Statement, ...]
    origins: tuple[Origin, ...] = field(default=(), compare=False)

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        return self.inputs + self.outputs
