"""Functions with PyTorch's names beside PyTorch: values, derivatives, batches, machine code."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import treadle as td
from function_rows import Row, problem
from pytorch_rows import ROWS
from refusals import refused
from sizes import check, check_exactly

NAMES = sorted({r.name for r in ROWS})

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def rows_of(name: str) -> list[Row]:
    return [r for r in ROWS if r.name == name]


@pytest.mark.parametrize("name", NAMES)
def test_values_and_gradients(name: str) -> None:
    check_exactly({f"{name} {i}": problem(r) for i, r in enumerate(rows_of(name))})


@pytest.mark.parametrize("name", NAMES)
def test_dtypes_and_shapes(name: str) -> None:
    """Floats are float32 on both sides; integers may have other widths."""
    for r in rows_of(name):
        if not r.arrays or name.endswith("stft"):  # whose window has a dtype of its own
            continue
        arrays = [a.astype(np.float32) if a.dtype.kind == "f" else a for a in r.arrays]
        ours = parts(r.ours(*map(td.tensor, arrays)))
        theirs = parts(r.theirs(*map(torch.tensor, arrays)))
        for found, expected in zip(ours, theirs, strict=True):
            assert found.shape == tuple(expected.shape)
            assert kind(found.dtype) == kind(expected.dtype)


def kind(dtype: Any) -> str:
    name = str(dtype).removeprefix("torch.")
    return name if name in ("float32", "float64", "bool") else "integer"


def parts(found: Any) -> list[Any]:
    return list(found) if isinstance(found, (tuple, list)) else [found]


SMOOTH = [
    r for r in ROWS if r.has_gradient and r.arrays and all(a.dtype.kind == "f" for a in r.arrays)
]


def one_each(rows: list[Row]) -> list[Any]:
    """The last row of each function."""
    return [pytest.param(r, id=n) for n, r in {r.name: r for r in rows}.items()]


@pytest.mark.parametrize("r", one_each(SMOOTH))
def test_second_derivatives(r: Row) -> None:
    """The gradient of a gradient's product with numbers; zero where PyTorch has no graph."""
    rng = np.random.default_rng(3)

    def weighted(values: list[Any], lib: Any) -> Any:
        draw = np.random.default_rng(4)
        floats = [v for v in values if "float" in str(v.dtype)]
        return sum((v * lib.tensor(draw.standard_normal(tuple(v.shape)))).sum() for v in floats)

    moves = [rng.standard_normal(a.shape) for a in r.arrays]
    places = tuple(range(len(r.arrays)))

    def slope(*xs: Any) -> Any:
        found = td.grad(lambda *ys: weighted(parts(r.ours(*ys)), td), places)(*xs)
        return sum((g * m).sum() for g, m in zip(found, moves, strict=True))

    leaves = [torch.tensor(a, requires_grad=True) for a in r.arrays]
    total = weighted(parts(r.theirs(*leaves)), torch)
    if not isinstance(total, torch.Tensor) or not total.requires_grad:
        return
    first = torch.autograd.grad(total, leaves, create_graph=True, allow_unused=True)
    used = [(g * torch.tensor(m)).sum() for g, m in zip(first, moves, strict=True) if g is not None]
    again = [g for g in used if g.requires_grad]
    second = (
        torch.autograd.grad(sum(again), leaves, allow_unused=True)
        if again
        else [None] * len(leaves)
    )
    found = td.grad(slope, places)(*map(td.tensor, r.arrays))
    for ours, theirs in zip(found, second, strict=True):
        expected = np.zeros(ours.shape) if theirs is None else theirs.numpy()
        scale = max(1.0, float(np.abs(expected).max(initial=0)))
        np.testing.assert_allclose(ours.numpy(), expected, rtol=0, atol=1e-8 * scale)


@pytest.mark.parametrize("r", one_each(ROWS))
def test_a_batch_is_a_stack(r: Row) -> None:
    if not r.arrays:
        return
    arrays = [np.stack([a, a[::-1] if a.dtype.kind == "f" and a.ndim else a]) for a in r.arrays]
    ours = td.vmap(lambda *x: parts(r.ours(*x)))(*map(td.tensor, arrays))
    each = [parts(r.ours(*(td.tensor(a[i]) for a in arrays))) for i in range(2)]
    for found, *expected in zip(ours, *each, strict=True):
        stacked = np.stack([e.numpy() for e in expected])
        np.testing.assert_allclose(found.numpy(), stacked, rtol=1e-12, atol=1e-13)


def natively(names: list[str]) -> None:
    check({f"{n} {i}": problem(r) for n in names for i, r in enumerate(rows_of(n))})


GROUPS = 8  # programs that all rows are in


@pytest.mark.parametrize("group", range(GROUPS))
def test_natively(group: int) -> None:
    """Rows of several functions in one program: values alone, and with their gradients."""
    natively(NAMES[group::GROUPS])


# What is written


def test_the_last_of_several_written_to_one_place_stays() -> None:
    """As PyTorch's on one thread; each program has the same result each time."""
    x, new, index = np.zeros((3, 2)), np.arange(10.0).reshape(5, 2) - 3, np.array([1, 0, 1, 1, 0])
    expected = np.array([[5.0, 6.0], [3.0, 4.0], [0.0, 0.0]])
    place = td.tensor(index)
    for found in (
        td.index_copy(x, 0, place, new),
        td.index_put(x, (place,), new),
        td.compile(lambda *a: td.index_put(a[0], (a[1],), a[2]), x, index, new)(x, index, new),
    ):
        np.testing.assert_array_equal(np.asarray(found), expected)


@pytest.mark.parametrize("reduce", ["amax", "amin"])
def test_ties_share_the_gradient_and_nan_stays(reduce: str) -> None:
    x, index = np.array([2.0, 1.0, np.nan, 5.0]), np.array([0, 0, 1, 1, 1, 2, 3, 3])
    src = np.array([2.0, 2.0, 1.0, 3.0, 3.0, 0.0, np.nan, 1.0])
    ours, theirs = (
        td.scatter_reduce(x, 0, index, src, reduce).numpy(),
        torch.tensor(x).scatter_reduce(0, torch.tensor(index), torch.tensor(src), reduce).numpy(),
    )
    np.testing.assert_array_equal(ours, theirs)
    leaves = [torch.tensor(a[:n], requires_grad=True) for a, n in ((x, 2), (src, 5))]
    total = leaves[0].scatter_reduce(0, torch.tensor(index[:5]), leaves[1], reduce)
    expected = torch.autograd.grad((total * torch.tensor([3.0, 5.0])).sum(), leaves)
    call = lambda a, b: (td.scatter_reduce(a, 0, index[:5], b, reduce) * np.array([3.0, 5.0])).sum()  # noqa: E731
    for mine, other in zip(td.grad(call, (0, 1))(x[:2], src[:5]), expected, strict=True):
        np.testing.assert_allclose(mine.numpy(), other.numpy())


@pytest.mark.parametrize("reduce", ["sum", "prod", "mean", "amax", "amin"])
@pytest.mark.parametrize("include_self", [True, False])
def test_integers_are_reduced(reduce: str, include_self: bool) -> None:
    x, index = np.array([[7, -3, 2], [4, 1, 9]], np.int64), np.array([[0, 0, 2, 2], [1, 1, 1, 2]])
    src = np.array([[2, -5, 3, 8], [1, -6, 4, 2]], np.int64)
    given = {"reduce": reduce, "include_self": include_self}
    expected = torch.tensor(x).scatter_reduce(1, torch.tensor(index), torch.tensor(src), **given)
    found = td.compile(lambda *a: td.scatter_reduce(a[0], 1, *a[1:], **given), x, index, src)
    np.testing.assert_array_equal(found(x, index, src), expected.numpy())


def test_a_larger_src_is_cut_to_the_indices() -> None:
    x, index, src = np.zeros((3, 4)), np.array([[0, 2], [1, 1]]), np.arange(12.0).reshape(3, 4)
    expected = torch.tensor(x).scatter_reduce(0, torch.tensor(index), torch.tensor(src), "sum")
    np.testing.assert_array_equal(td.scatter_reduce(x, 0, index, src, "sum").numpy(), expected)


def test_what_cannot_be_written_is_refused() -> None:
    x, index = np.zeros((3, 4)), np.array([[0, 3]])
    refused(lambda: td.scatter_reduce(x, 0, index, x, "max"), td.ArgumentError, "scatter_reduce")
    refused(lambda: td.scatter_reduce(x, 0, index[0], x, "sum"), td.ShapeError, "scatter_reduce")
    refused(lambda: td.scatter_reduce(x, 0, index * 1.0, x, "sum"), td.DTypeError, "scatter_reduce")
    refused(lambda: td.index_copy(x, 0, [0, 1], x), td.ShapeError, "index_copy", "(2, 4)")
    refused(lambda: td.index_copy(x, 0, [0, 3], x[:2]), td.IndexRangeError, "index_copy", "3")
    refused(lambda: td.index_fill(x, 0, [0], x), td.ShapeError, "index_fill")
    refused(lambda: td.index_put(x, ([0], [0], [0]), 1.0), td.ArgumentError, "index_put")
    refused(lambda: td.index_put(x, ([0, 1],), x), td.ShapeError, "index_put")
    refused(lambda: td.masked_scatter(x, x, x), td.DTypeError, "masked_scatter", "x > 0")
    with pytest.raises(td.IndexRangeError, match="outside"):
        td.scatter_reduce(x, 0, td.tensor(index), x, "sum")


WINDOWS = ["hann_window", "hamming_window", "blackman_window", "bartlett_window", "kaiser_window"]


@pytest.mark.parametrize("name", WINDOWS)
@pytest.mark.parametrize("length", [0, 1, 2, 7, 32])
@pytest.mark.parametrize("periodic", [True, False])
def test_windows(name: str, length: int, periodic: bool) -> None:
    wide = getattr(torch, name)(length, periodic=periodic, dtype=torch.float64).numpy()
    found = getattr(td, name)(length, periodic, dtype=td.float64).numpy()
    np.testing.assert_allclose(found, wide, rtol=1e-12, atol=1e-15)
    compiled = td.compile(lambda: getattr(td, name)(length, periodic), device="cpu")()
    assert compiled.dtype == np.float32
    np.testing.assert_array_equal(compiled, found.astype(np.float32))


def test_spectra_that_cannot_be_are_refused() -> None:
    x = np.zeros(20)
    refused(lambda: td.stft(x, 64, center=False), td.ShapeError, "stft", "64")
    refused(lambda: td.stft(x, 8, window=np.ones(7)), td.ShapeError, "stft", "8 elements")
    refused(lambda: td.stft(x, 8, win_length=9), td.ArgumentError, "stft")
    z = td.stft(x, 8)
    refused(lambda: td.istft(z, 10), td.ShapeError, "istft", "frequencies")
    gaps = lambda: td.istft(z, 8, window=np.zeros(8))  # noqa: E731
    refused(gaps, td.ArgumentError, "istft", "overlap")
    refused(lambda: td.fft.fftshift(x, 1), td.AxisError, "fftshift")
    refused(lambda: td.hann_window(-1), td.ArgumentError, "hann_window")
