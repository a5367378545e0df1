"""How a GPU runs the entries of a plan: the shape of each launch, and products that a library has.

Plain data that can be stored beside a plan.
"""

from __future__ import annotations

from dataclasses import dataclass

from treadle.kernel.nodes import Kernel, Matrix, View, library_call_of, standalone_matmul

FLOAT8, FLOAT8_EPILOGUE = "float8", "float8 epilogue"  # calls that a library may not have


@dataclass(frozen=True, slots=True)
class MatrixFacts:
    """A matrix of a batch: elements between rows, columns and matrices, and the first's place."""

    dtype: str
    rows: int
    columns: int
    batch: int
    start: int


@dataclass(frozen=True, slots=True)
class MatmulCall:
    """target (m, n) ← left (m, k) · right (k, n), for each of a batch."""

    m: int
    n: int
    k: int
    batch: int
    target: MatrixFacts
    left: MatrixFacts
    right: MatrixFacts
    bias: int = -1  # the argument that has it
    adds: bool = False  # to what the target has
    second: int = 1  # the argument that has the right operand
    scales: tuple[tuple[int, int], ...] = ()  # arguments with factors, and which element each is

    @property
    def of_float8(self) -> str:
        """What kind of product of 8-bit floats it is, by the name of such calls; "" for others."""
        if "float8" not in self.left.dtype:
            return ""
        return FLOAT8_EPILOGUE if self.scales or self.bias >= 0 else FLOAT8


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor that a library reads or writes, in the buffer of a call by its number."""

    argument: int
    dtype: str
    start: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LibraryLaunch:
    """What a library computes, by name."""

    name: str
    results: tuple[Tensor, ...]
    operands: tuple[Tensor, ...]
    numbers: tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True)
class TensorMap:
    """A matrix in an argument of a call that is copied to shared memory box by box."""

    argument: int
    dtype: str
    start: int  # its first element
    inner: int  # elements of a line, and lines
    outer: int
    pitch: int  # elements from one line to the next
    box: tuple[int, int]  # elements of a line and lines that are copied at once


@dataclass(frozen=True, slots=True)
class Launch:
    """An entry's grid and block; `calls` is how many calls one launch takes at most."""

    symbol: str
    grid: int
    block: int
    shared: int = 0
    calls: int = 1
    matmul: MatmulCall | None = None
    called: LibraryLaunch | None = None
    maps: tuple[TensorMap, ...] = ()  # before the pointers; blocks then take their work in turn


@dataclass(frozen=True, slots=True)
class CooperativeLaunch:
    """Phases that are one launch: where they start among the steps of a plan, and their entries.

    The path names the repeats around them. A phase lists its entries and how often it calls each.
    """

    symbol: str
    path: tuple[int, ...]
    first: int
    phases: tuple[tuple[tuple[int, int], ...], ...]
    grid: int = 0
    block: int = 0
    shared: int = 0


def call_of(kernel: Kernel) -> LibraryLaunch | None:
    """A kernel that is a library's, with its tensors by argument; None for any other."""
    found = library_call_of(kernel)
    if found is None:
        return None
    positions = {b.name: i for i, b in enumerate(kernel.buffers)}

    def tensor(view: View) -> Tensor:
        at = positions[view.buffer]
        dtype = kernel.buffers[at].dtype.name
        return Tensor(at, dtype, view.start, view.shape, view.strides)

    made, given = (tuple(map(tensor, v)) for v in (found.results, found.operands))
    return LibraryLaunch(found.name, made, given, found.numbers)


def matmul_call_of(kernel: Kernel) -> MatmulCall | None:
    """A kernel that is a batch of matmuls at one stride; None for any other."""
    found = standalone_matmul(kernel)
    if found is None or len(found[0]) > 1:
        return None
    loops, statement = found
    if any(m.rows.listed or m.columns.listed for m in statement.matrices):
        return None
    names = [b.name for b in kernel.buffers]

    def facts(matrix: Matrix) -> MatrixFacts:
        step = matrix.index.factor_of(loops[0]) if loops else 0
        assert step is not None
        dtype = kernel.buffers[names.index(matrix.buffer)].dtype.name
        rows, columns = matrix.rows.stride, matrix.columns.stride
        return MatrixFacts(dtype, rows, columns, step, matrix.index.offset)

    m, n = statement.target.rows.count, statement.target.columns.count
    k, batch = statement.left.columns.count, loops[0].extent if loops else 1
    target, left, right = map(facts, statement.matrices)
    bias = -1 if statement.bias is None else names.index(statement.bias)
    second = names.index(statement.right.buffer)
    scales = tuple((names.index(name), at) for name, at in statement.scales)
    return MatmulCall(m, n, k, batch, target, left, right, bias, statement.adds, second, scales)
