"""Functions with PyTorch's names beside PyTorch: values, derivatives, batches, machine code."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import treadle as td
from function_rows import Row, problem
from pytorch_rows import ROWS
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
