"""Which dtype a result has: PyTorch's choice where PyTorch has the dtypes."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import treadle as td
from treadle.base import dtypes
from treadle.base.dtypes import DType, promote
from treadle.domains.float64 import evaluate_float64

TORCH = {
    d: getattr(torch, "bool" if d is td.bool_ else d.name) for d in dtypes.ALL if d is not td.uint32
}
FROM_TORCH = {t: d for d, t in TORCH.items()}
# PyTorch has int16, which it chooses here.
OWN = {frozenset((td.uint8, td.int8)): td.int32}
UINT32 = {
    td.bool_: td.uint32,
    td.uint8: td.uint32,
    td.int8: td.int64,
    td.int32: td.int64,
    td.int64: td.int64,
    td.uint32: td.uint32,
    **{d: d for d in dtypes.FLOATS},
}


def expected_dtype(a: DType, b: DType) -> DType:
    if td.uint32 in (a, b):
        return UINT32[b if a is td.uint32 else a]
    own = OWN.get(frozenset((a, b)))
    return own or FROM_TORCH[torch.promote_types(TORCH[a], TORCH[b])]


PAIRS = list(product(dtypes.ALL, dtypes.ALL))


@pytest.mark.parametrize(("a", "b"), PAIRS, ids=str)
def test_pairs(a: DType, b: DType) -> None:
    expected = expected_dtype(a, b)
    assert promote(a, b) is expected
    x, y = td.ones((2,), a), td.ones((2,), b)
    assert td.where(td.ones((2,), td.bool_), x, y).dtype is expected
    assert td.concat([x, y]).dtype is expected
    numeric = td.int32 if expected is td.bool_ else expected
    for function in (td.add, td.mul, td.remainder, td.floor_divide, td.matmul):
        assert function(x, y).dtype is numeric, function
    real = expected if expected.is_float else td.float32
    assert td.div(x, y).dtype is real
    assert td.eq(x, y).dtype is td.bool_
    assert td.lt(x, y).dtype is td.bool_


def test_bfloat16_with_float32_gives_float32() -> None:
    x, y = td.ones((3,), td.bfloat16), td.ones((3,), td.float32)
    assert (x + y).dtype is td.float32
    assert (x @ y).dtype is td.float32
    assert (x + td.ones((3,), td.float16)).dtype is td.float32
    assert (x + x).dtype is td.bfloat16


# A Python or NumPy scalar counts only by its class: bool, integer, float.
WEAK: list[tuple[Any, int]] = [
    (True, 0),
    (3, 1),
    (2.5, 2),
    (np.bool_(True), 0),
    (np.int64(3), 1),
    (np.uint8(3), 1),
    (np.float64(2.5), 2),
    (np.float16(2.5), 2),
    (ml_dtypes.bfloat16(2.5), 2),
]


def weak_result(dtype: DType, rank: int) -> DType:
    own = 2 if dtype.is_float else 1 if dtype.is_integer else 0
    return dtype if own >= rank else [td.bool_, td.int32, td.float32][rank]


@pytest.mark.parametrize("dtype", dtypes.ALL, ids=str)
@pytest.mark.parametrize(("scalar", "rank"), WEAK, ids=lambda v: f"{type(v).__name__}({v})")
def test_weak_scalars(dtype: DType, scalar: Any, rank: int) -> None:
    expected = weak_result(dtype, rank)
    if dtype in TORCH and isinstance(scalar, (bool, int, float)):
        theirs = FROM_TORCH[torch.result_type(torch.ones(2, dtype=TORCH[dtype]), scalar)]
        if dtype is td.bool_ and rank == 1:
            assert theirs is td.int64  # PyTorch's default integer; ours is int32
        else:
            assert theirs is expected
    numeric = td.int32 if expected is td.bool_ else expected
    x = td.ones((2,), dtype)
    for result in (x + scalar, scalar + x, scalar * x):
        assert result.dtype is numeric
    assert td.maximum(x, scalar).dtype is expected
    assert td.where(True, x, scalar).dtype is expected
    assert (x + scalar).shape == (2,)


@pytest.mark.parametrize(
    ("x", "y", "expected"),
    [(1, 2, td.int32), (1, 2.0, td.float32), (True, True, td.int32), (True, 1, td.int32)],
)
def test_only_weak_scalars(x: Any, y: Any, expected: DType) -> None:
    assert td.add(x, y).dtype is expected


@pytest.mark.parametrize("dtype", dtypes.INTEGERS, ids=str)
def test_integer_division_gives_float32(dtype: DType) -> None:
    x = td.full((2,), 7, dtype)
    assert (x / 2).dtype is td.float32
    assert (x / x).dtype is td.float32
    np.testing.assert_array_equal((x / 2).numpy(), np.float32([3.5, 3.5]))
    assert (x // 2).dtype is dtype
    assert (x % 2).dtype is dtype


# (exponent, dtype of int32 to that power)
POWERS: list[tuple[Any, DType]] = [
    (2, td.int32),
    (0, td.int32),
    (np.int64(3), td.int32),
    (True, td.int32),
    (2.0, td.float32),
    (0.0, td.float32),
    (1.0, td.float32),
    (np.float64(2), td.float32),
    (0.5, td.float32),
    (-1, td.float32),
]


@pytest.mark.parametrize(("exponent", "expected"), POWERS, ids=repr)
def test_powers(exponent: Any, expected: DType) -> None:
    x = td.tensor([3, 1])
    found = x**exponent
    assert found.dtype is expected
    np.testing.assert_allclose(found.numpy(), np.array([3.0, 1.0]) ** float(exponent), rtol=1e-7)
    for dtype in dtypes.FLOATS:
        assert (td.ones((2,), dtype) ** exponent).dtype is dtype


FLOAT_FUNCTIONS = [td.exp, td.log, td.sqrt, td.sin, td.tanh, td.log1p]
ROUNDING = [td.floor, td.ceil, td.round, td.trunc, td.nan_to_num]


@pytest.mark.parametrize("function", FLOAT_FUNCTIONS)
@pytest.mark.parametrize("dtype", dtypes.ALL, ids=str)
def test_float_functions(function: Callable[..., td.Tensor], dtype: DType) -> None:
    expected = dtype if dtype.is_float else td.float32
    assert function(td.ones((2,), dtype)).dtype is expected


@pytest.mark.parametrize("function", ROUNDING, ids=lambda f: f.__name__)
@pytest.mark.parametrize("dtype", dtypes.INTEGERS, ids=str)
def test_rounding_leaves_integers_as_they_are(
    function: Callable[..., td.Tensor], dtype: DType
) -> None:
    """Not by way of float32, which does not hold 16777217."""
    extreme = [*dtype.range(), min(16777217, dtype.range()[1])]
    x = np.array(extreme, dtype.numpy)
    for found in (function(td.tensor(x)).numpy(), td.compile(function, td.Spec((3,), dtype))(x)):
        assert found.dtype == dtype.numpy
        np.testing.assert_array_equal(found, x)


@pytest.mark.parametrize("dtype", dtypes.ALL, ids=str)
def test_sums(dtype: DType) -> None:
    """Integers and bool are added up as int64, as in PyTorch; floats keep their dtype."""
    x = td.ones((300,), dtype)
    expected = dtype if dtype.is_float else td.int64
    assert td.sum(x).dtype is expected
    assert td.prod(x).dtype is expected
    assert td.cumsum(x, 0).dtype is expected
    assert td.sum(x).item() == 300


def test_bool_counts_as_int32_in_products() -> None:
    flags = td.ones((4, 4), td.bool_)
    np.testing.assert_array_equal((flags @ flags).numpy(), np.full((4, 4), 4, np.int32))
    np.testing.assert_array_equal(td.einsum("ij,jk->", flags, flags).numpy(), 64)
    assert td.linear(flags, flags).dtype is td.int32


LEFT: dict[str, Callable[[Any, Any], Any]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: a / b,
    "//": lambda a, b: a // b,
    "%": lambda a, b: a % b,
    "**": lambda a, b: a**b,
    "@": lambda a, b: a @ b,
    "==": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
    "<": lambda a, b: a < b,
    ">=": lambda a, b: a >= b,
}


@pytest.mark.parametrize("symbol", LEFT)
def test_numpy_arrays_on_the_left(symbol: str) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.uniform(0.5, 2, (3, 3)), rng.uniform(0.5, 2, (3, 3))
    operate = LEFT[symbol]
    found = operate(x, td.tensor(y))
    assert isinstance(found, td.Tensor)
    np.testing.assert_allclose(found.numpy(), operate(x, y), rtol=1e-14)
    graph = td.trace(lambda y: operate(x, y), y)
    np.testing.assert_array_equal(evaluate_float64(graph, {"y": y})[0], found.numpy())


def test_numpy_scalars_on_the_left() -> None:
    x = td.ones((2,), td.float32)
    assert (np.float64(2) * x).dtype is td.float32
    assert (np.int32(2) - x).dtype is td.float32
    assert (np.array([1.0, 2.0]) * x).dtype is td.float64  # an array is not weak


DATA: list[tuple[Any, DType]] = [
    (1.5, td.float32),
    (1, td.int32),
    (True, td.bool_),
    ([1, 2.5], td.float32),
    ([[1, 2]], td.int32),
    ([], td.float32),
    (np.float64(1.5), td.float64),
    (np.array([1, 2]), td.int64),
    (np.array([1.0], np.float16), td.float16),
    (np.array([1.0], ml_dtypes.bfloat16), td.bfloat16),
    (np.array([1], ">i4"), td.int32),
]


@pytest.mark.parametrize(("data", "dtype"), DATA, ids=repr)
def test_tensor_takes_the_dtype_of_its_data(data: Any, dtype: DType) -> None:
    x = td.tensor(data)
    assert x.dtype is dtype
    assert x.numpy().dtype == dtype.numpy
    np.testing.assert_array_equal(x.numpy(), np.asarray(data))


@pytest.mark.parametrize(
    "dtype", [td.float16, "float16", np.float16, np.dtype("float16")], ids=repr
)
def test_names_of_a_dtype(dtype: Any) -> None:
    assert td.tensor([1.0], dtype).dtype is td.float16
    assert td.zeros((2,), dtype).dtype is td.float16
    assert td.tensor([1.0]).astype(dtype).dtype is td.float16


def test_data_is_rounded_to_the_dtype_once() -> None:
    assert td.tensor(0.1, td.float32).item() == float(np.float32(0.1))
    assert td.tensor(0.1, td.bfloat16).item() == float(ml_dtypes.bfloat16(0.1))
