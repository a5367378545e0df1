"""Matmuls through cuBLASLt: the fastest algorithm is found by timing some, and remembered.

The library is column-major: a matmul of rows is one of the transposes, operands swapped.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from treadle.base.errors import DeviceError
from treadle.kernel.launch import MatmulCall, MatrixFacts
from treadle.kernel.target import GPU
from treadle.runtime.cuda.device import INSTALL, Block, Event, device
from treadle.runtime.cuda.once import once

WORKSPACE, CANDIDATES = GPU.launching.matmul_workspace, GPU.launching.matmul_candidates
FINALISTS, ROUNDS, REPEATS = 4, 3, 4
LONG, FEW = 1.0, 6  # milliseconds of a matmul of which few candidates are run, once
NOISE = 8 << 20  # bytes

_TYPES = {"float32": 0, "float64": 1, "float16": 2, "bfloat16": 14}
_TYPES |= {"float8_e4m3": 28, "float8_e5m2": 29}
_COMPUTE = {"float64": 70}  # otherwise 68: sums of float32
_TRANSPOSE_A, _TRANSPOSE_B = 3, 4  # attributes of a matmul
_EPILOGUE, _BIAS_ADDRESS, _BIAS = 7, 8, 4
_SCALE_ADDRESSES = 17, 18  # of what is multiplied, one for each operand
_FAST_SUMS = 25  # of 8-bit floats: not every partial sum is a float32
_BATCH, _STRIDE = 5, 6  # attributes of a matrix
_MOST_WORKSPACE = 1  # attribute of a preference


class _Heuristic(ctypes.Structure):
    _fields_ = (
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


@once
def library() -> Any:
    """cuBLASLt; a DeviceError where it is not installed."""
    try:
        from cuda.pathfinder import load_nvidia_dynamic_lib

        path = load_nvidia_dynamic_lib("cublasLt").abs_path
    except (ImportError, RuntimeError, OSError) as error:
        raise DeviceError("cuda", "cuBLASLt is not installed", INSTALL) from error
    return ctypes.CDLL(path)


@once
def blas_version() -> str:
    find = library().cublasLtGetVersion
    find.restype = ctypes.c_size_t
    return f"cuBLASLt {find()}"


def _checked(code: int, operation: str) -> None:
    if code:
        raise DeviceError(operation, f"cuBLASLt says {code}")


@once
def blas_handle() -> ctypes.c_void_p:
    """What matmuls are asked for with, one thread at a time."""
    found = ctypes.c_void_p()
    _checked(library().cublasLtCreate(ctypes.byref(found)), "cublasLtCreate")
    return found


@once
def workspace() -> Block:
    """Memory that matmuls use while they run, one after the other."""
    return Block(WORKSPACE)


@once
def noise() -> Block:
    """Numbers to time matmuls on, as narrow floats see them: zeros would be faster."""
    found = Block(NOISE)
    drawn = np.random.default_rng(0).standard_normal(NOISE // 4).astype(np.float32)
    halves = (drawn.view(np.uint32) >> 16).astype(np.uint16)
    found.write(np.stack([halves, halves[::-1]]))
    return found


@dataclass(frozen=True)
class _Side:
    """A matrix as columns: rows and columns in memory, the step between columns."""

    rows: int
    columns: int
    step: int
    is_transposed: bool


def _side(facts: MatrixFacts, m: int, n: int) -> _Side:
    """A matrix (m, n) in column-major order; transposed if its rows are contiguous."""
    if facts.rows == 1 and (n == 1 or facts.columns >= m):
        return _Side(m, n, max(m, facts.columns), False)
    return _Side(n, m, max(n, facts.rows), True)


class _Descriptors:
    """What cuBLASLt allocates on the host for a matmul, destroyed with it."""

    def __init__(self) -> None:
        self._made: list[tuple[Any, ctypes.c_void_p]] = []

    def new(self, kind: str, *facts: Any) -> ctypes.c_void_p:
        lt, found = library(), ctypes.c_void_p()
        create, destroy = (getattr(lt, f"cublasLt{kind}{verb}") for verb in ("Create", "Destroy"))
        _checked(create(ctypes.byref(found), *facts), "matmul")
        self._made.append((destroy, found))
        return found

    def __del__(self) -> None:
        for destroy, found in self._made:
            destroy(found)


class Matmul:
    """One shape of a matmul, ready to be run on any addresses."""

    def __init__(self, matmul: MatmulCall):
        self.matmul, self._descriptors = matmul, _Descriptors()
        workspace()  # as the handle: made now, since the first run may be captured
        blas_handle()
        m, n, k = matmul.m, matmul.n, matmul.k
        target = _side(matmul.target, m, n)
        left, right = _side(matmul.left, m, k), _side(matmul.right, k, n)
        # A target whose rows are contiguous is computed transposed: right before left.
        self.is_swapped = target.is_transposed
        first, second = (right, left) if self.is_swapped else (left, right)
        facts = (matmul.right, matmul.left) if self.is_swapped else (matmul.left, matmul.right)
        transposed = [s.is_transposed != self.is_swapped for s in (first, second)]
        compute = _COMPUTE.get(matmul.left.dtype, 68)
        scale = 1 if matmul.left.dtype == "float64" else 0
        lt, self._handle = library(), self._descriptors.new("MatmulDesc", compute, scale)
        for attribute, flag in zip((_TRANSPOSE_A, _TRANSPOSE_B), transposed, strict=True):
            self._set(
                lt.cublasLtMatmulDescSetAttribute,
                self._handle,
                attribute,
                ctypes.c_int32(int(flag)),
            )
        if matmul.bias >= 0:
            assert self.is_swapped, "a bias is of contiguous columns"
            self._set(
                lt.cublasLtMatmulDescSetAttribute, self._handle, _EPILOGUE, ctypes.c_uint32(_BIAS)
            )
        if {matmul.left.dtype, matmul.right.dtype} == {"float8_e4m3"}:  # none is a gradient
            self._set(lt.cublasLtMatmulDescSetAttribute, self._handle, _FAST_SUMS, ctypes.c_int8(1))
        self._a = self._layout(first, facts[0])
        self._b = self._layout(second, facts[1])
        self._d = self._layout(target, matmul.target)
        number = ctypes.c_double if scale else ctypes.c_float
        self._one, self._kept = number(1.0), number(float(matmul.adds))
        self.algorithm: ctypes.Array[ctypes.c_uint64] | None = None

    def _set(self, setter: Any, target: Any, attribute: int, value: Any) -> None:
        code = setter(target, attribute, ctypes.byref(value), ctypes.sizeof(value))
        _checked(code, "matmul")

    def _layout(self, side: _Side, facts: MatrixFacts) -> ctypes.c_void_p:
        found = self._descriptors.new(
            "MatrixLayout",
            _TYPES[facts.dtype],
            ctypes.c_uint64(side.rows),
            ctypes.c_uint64(side.columns),
            ctypes.c_int64(side.step),
        )
        if self.matmul.batch > 1:
            setter = library().cublasLtMatrixLayoutSetAttribute
            self._set(setter, found, _BATCH, ctypes.c_int32(self.matmul.batch))
            self._set(setter, found, _STRIDE, ctypes.c_int64(facts.batch))
        return found

    def run(
        self,
        target: int,
        left: int,
        right: int,
        bias: int = 0,
        *scales: int,
        algorithm: Any = None,
        stream: Any = None,
    ) -> int:
        """Put the matmul into a stream, or the usual one; addresses are those of the buffers."""
        p = self.matmul
        self._point(bias, *scales)
        addresses = {
            "left": left + p.left.start * itemsize(p.left.dtype),
            "right": right + p.right.start * itemsize(p.right.dtype),
        }
        order = ("right", "left") if self.is_swapped else ("left", "right")
        a, b = (ctypes.c_void_p(addresses[n]) for n in order)
        d = ctypes.c_void_p(target + p.target.start * itemsize(p.target.dtype))
        chosen: Any = self.algorithm if algorithm is None else algorithm
        code: int = library().cublasLtMatmul(
            blas_handle(), self._handle, ctypes.byref(self._one), a, self._a, b, self._b,
            ctypes.byref(self._kept), d, self._d, d, self._d, ctypes.byref(chosen),
            ctypes.c_void_p(workspace().address), ctypes.c_size_t(WORKSPACE),
            ctypes.c_void_p(int(device().stream if stream is None else stream)),
        )  # fmt: skip
        return code

    def _point(self, bias: int = 0, *scales: int) -> None:
        """Where the bias and the scales are: parts of what an algorithm is chosen for."""
        setter = library().cublasLtMatmulDescSetAttribute
        found = dict(zip(_SCALE_ADDRESSES, scales, strict=False))
        found |= {_BIAS_ADDRESS: bias} if self.matmul.bias >= 0 else {}
        for attribute, address in found.items():
            self._set(setter, self._handle, attribute, ctypes.c_void_p(address))

    def candidates(self, *addresses: int) -> list[Any]:
        """Algorithms that the library thinks are fast, its best first."""
        self._point(*addresses[3:])
        lt, preference = library(), ctypes.c_void_p()
        _checked(lt.cublasLtMatmulPreferenceCreate(ctypes.byref(preference)), "matmul")
        self._set(
            lt.cublasLtMatmulPreferenceSetAttribute,
            preference,
            _MOST_WORKSPACE,
            ctypes.c_uint64(WORKSPACE),
        )
        found, count = (_Heuristic * CANDIDATES)(), ctypes.c_int()
        code = lt.cublasLtMatmulAlgoGetHeuristic(
            blas_handle(), self._handle, self._a, self._b, self._d, self._d, preference,
            CANDIDATES, found, ctypes.byref(count),
        )  # fmt: skip
        lt.cublasLtMatmulPreferenceDestroy(preference)
        _checked(code, f"matmul {self.matmul}")
        return [found[i].algorithm for i in range(count.value)]

    def take_first(self, *addresses: int) -> None:
        """The library's best: the same in every process, which what is timed need not be."""
        every = self.candidates(*addresses)
        able = next((a for a in every if not self.run(*addresses, algorithm=a)), None)
        if able is None:
            raise DeviceError("matmul", f"cuBLASLt has no algorithm for {self.matmul}")
        self.use(list(able))

    def choose(self, *addresses: int) -> None:
        """The fastest of the candidates on some memory, in turns: all, then the best."""
        start, end = Event(timed=True), Event(timed=True)

        def timed(algorithm: Any, repeats: int) -> float:
            start.record()
            for _ in range(repeats):
                self.run(*addresses, algorithm=algorithm)
            end.record()
            end.wait()
            return end.milliseconds_since(start)

        every = self.candidates(*addresses)
        able = [a for a in every[:FEW] if not self.run(*addresses, algorithm=a)]
        is_long = bool(able) and timed(able[0], 1) > LONG
        if not is_long:
            able += [a for a in every[FEW:] if not self.run(*addresses, algorithm=a)]
        repeats = 1 if is_long else REPEATS
        if not able:
            raise DeviceError("matmul", f"cuBLASLt has no algorithm for {self.matmul}")

        def in_turns(some: list[Any], rounds: int, repeats: int) -> list[Any]:
            """The fastest first. Another process may hold the device up: the least time counts."""
            times = [[timed(a, repeats) for a in some] for _ in range(rounds)]
            least = [min(t) for t in zip(*times, strict=True)]
            return [some[i] for i in sorted(range(len(some)), key=least.__getitem__)]

        best = in_turns(able, 2, min(2, repeats))[:FINALISTS]
        self.use(list(in_turns(best, ROUNDS, repeats)[0]))

    def use(self, words: Sequence[int]) -> None:
        """An algorithm that was chosen before."""
        self.algorithm = (ctypes.c_uint64 * 8)(*words)

    @property
    def words(self) -> list[int]:
        assert self.algorithm is not None
        return list(self.algorithm)


Placed = tuple["Matmul", tuple[int, ...]]  # and addresses: target, left, right, bias, scales


def timed(*turns: list[Placed]) -> list[float]:
    """Milliseconds of each of some lists of matmuls, which take turns.

    The first list keeps the device busy ahead of them, so that it never waits for Python.
    """
    events = [Event(timed=True) for _ in range(len(turns) + 1)]
    times: list[list[float]] = []
    for _ in range(ROUNDS):
        _run_all(turns[0] * REPEATS)
        events[0].record()
        for matmuls, event in zip(turns, events[1:], strict=True):
            _run_all(matmuls)
            event.record()
        events[-1].wait()
        times.append([b.milliseconds_since(a) for a, b in pairwise(events)])
    return [min(t) for t in zip(*times, strict=True)]


def _run_all(matmuls: Sequence[Placed]) -> None:
    for matmul, addresses in matmuls:
        matmul.run(*addresses)


def itemsize(dtype: str) -> int:
    return {"float64": 8, "float32": 4, "float8_e4m3": 1, "float8_e5m2": 1}.get(dtype, 2)
