"""Values and slopes at zeros, infinities, NaN, ties, tiny and huge numbers, beside PyTorch's."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import treadle as td

NAN, INF = float("nan"), float("inf")
ORDINARY = [-2.5, -1.0, -0.25, 0.5, 1.0, 3.0]
EXTREMES = [0.0, -0.0, 1e-30, -1e-30, 1e30, -1e30, INF, -INF, NAN]
POINTS = [*ORDINARY, *EXTREMES]
FINITE = [p for p in POINTS if np.isfinite(p)]


class Case(NamedTuple):
    name: str
    ours: Any
    theirs: Any
    arrays: tuple[np.ndarray, ...]
    has_slope: bool = True
    ulps: int = 4


def pairs(*lines: list[float]) -> tuple[np.ndarray, ...]:
    return tuple(np.array(c) for c in zip(*itertools.product(*lines), strict=True))


def both(name: str) -> tuple[Any, Any]:
    return getattr(td, name), getattr(torch, name, None) or getattr(torch.special, name)


def exact_fmod(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """C's. PyTorch's is NaN where the quotient overflows."""
    with np.errstate(invalid="ignore"):
        return torch.tensor(np.fmod(x.numpy(), y.numpy()))


CASES = [
    *(Case(n, *both(n), pairs(POINTS, POINTS)) for n in ("fmax", "fmin")),
    Case("copysign", *both("copysign"), pairs(POINTS, POINTS), has_slope=False),
    Case("copysign of finite ones", *both("copysign"), pairs(FINITE, POINTS)),
    Case("fmod", *both("fmod"), pairs(FINITE, [*ORDINARY, INF, -INF, 1e30])),
    Case("fmod of all", td.fmod, exact_fmod, pairs([*POINTS, 5.5, -5.5, 1e9, 123456.7], POINTS), has_slope=False),
    *(Case(n, *both(n), (np.array(POINTS),), ulps=64) for n in ("erfc", "ndtr")),
    Case("log_ndtr", *both("log_ndtr"), (np.array(POINTS),), has_slope=False, ulps=64),
    Case("slopes of log_ndtr", *both("log_ndtr"), (np.array([*ORDINARY, 0.0, -30.0, INF, NAN]),), ulps=64),
    *(Case(n, *both(n), (np.array([*POINTS[:7], *POINTS[8:], 1 - 2**-24]),), ulps=64) for n in ("erfinv", "logit")),
    Case("entr", *both("entr"), (np.array([p for p in POINTS if p != INF and not (p == 0 and np.signbit(p))]),), ulps=64),
    Case("logit with eps", lambda x: td.logit(x, 0.25), lambda x: torch.logit(x, 0.25), (np.array([*ORDINARY, 0.25, 0.75, 0.9, 0.1, INF]),), ulps=64),
    Case("xlogy", *both("xlogy"), pairs(POINTS, POINTS), has_slope=False, ulps=64),
    Case("xlogy of positive ones", *both("xlogy"), pairs([-1.0, 0.0, 2.0], [0.5, 1.0, 3.0]), ulps=64),
    Case("signbit", *both("signbit"), (np.array(EXTREMES[:-1]),), has_slope=False),
    Case("nanmean of none", lambda x: td.nanmean(x, 1), lambda x: torch.nanmean(x, 1), (np.array([[NAN, NAN]]),), has_slope=False),
    Case("nanmean", lambda x: td.nanmean(x, 1), lambda x: torch.nanmean(x, 1), (np.array([[1.0, NAN], [INF, 1.0]]),)),
    Case("nansum", lambda x: td.nansum(x, 1), lambda x: torch.nansum(x, 1), (np.array([[NAN, NAN], [1.0, NAN], [INF, -INF]]),)),
    Case("count_nonzero", *both("count_nonzero"), (np.array(POINTS),), has_slope=False),
    Case("cov of one", *both("cov"), (np.array([[1.0], [2.0]]),), has_slope=False),
    Case("corrcoef of constants", *both("corrcoef"), (np.array([[1.0, 1.0, 1.0], [2.0, 1.0, 3.0]]),), has_slope=False),
    Case("corrcoef of a vector", *both("corrcoef"), (np.array([1.0, 2.0, 5.0]),)),
    Case("isin", lambda x: td.isin(x, x), lambda x: torch.isin(x, x), (np.array(POINTS),), has_slope=False),
    Case("trapezoid of one", *both("trapezoid"), (np.array([3.0]),)),
    Case("nothing", lambda x: td.nansum(x, 0), lambda x: torch.nansum(x, 0), (np.zeros((0, 2)),)),
]  # fmt: skip
IDS = [c.name for c in CASES]
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::treadle.UnreachedWarning")


def same(found: Any, expected: torch.Tensor, ulps: int, what: str) -> None:
    """Equal signs of zeros too, NaN where NaN is."""
    ours, theirs = np.asarray(found), expected.detach().numpy()
    if theirs.dtype.kind != "f":
        np.testing.assert_array_equal(ours, theirs, what)
        return
    unit = np.finfo(ours.dtype).eps * ulps
    np.testing.assert_allclose(ours, theirs, rtol=unit, atol=0, err_msg=what)
    zeros = (theirs == 0) & (ours == 0) & (ulps <= 16)  # of exact functions
    np.testing.assert_array_equal(np.signbit(ours[zeros]), np.signbit(theirs[zeros]), what)


def slopes(c: Case, dtype: Any) -> tuple[torch.Tensor, ...]:
    leaves = [torch.tensor(a.astype(dtype), requires_grad=True) for a in c.arrays]
    return torch.autograd.grad(c.theirs(*leaves).sum(), leaves)


@pytest.mark.parametrize("c", CASES, ids=IDS)
def test_values(c: Case) -> None:
    expected = c.theirs(*map(torch.tensor, c.arrays))
    same(c.ours(*map(td.tensor, c.arrays)).numpy(), expected, c.ulps, c.name)


@pytest.mark.parametrize("c", [c for c in CASES if c.has_slope], ids=lambda c: c.name)
def test_slopes(c: Case) -> None:
    places = tuple(range(len(c.arrays)))
    found = td.grad(lambda *xs: c.ours(*xs).sum(), places)(*map(td.tensor, c.arrays))
    for ours, theirs in zip(found, slopes(c, np.float64), strict=True):
        np.testing.assert_allclose(ours.numpy(), theirs.numpy(), rtol=1e-12, err_msg=c.name)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_natively(dtype: Any) -> None:
    """All functions in one program."""
    arrays = [[a.astype(dtype) for a in c.arrays] for c in CASES]

    def every(given: list[Any]) -> list[Any]:
        return [c.ours(*xs) for c, xs in zip(CASES, given, strict=True)]

    specs = [[td.Spec(a.shape, a.dtype) for a in xs] for xs in arrays]
    found = td.compile(every, specs, device="cpu")(arrays)
    for c, xs, ours in zip(CASES, arrays, found, strict=True):
        same(ours, c.theirs(*map(torch.tensor, xs)), 4 * c.ulps, c.name)


def test_slopes_natively() -> None:
    given = [c for c in CASES if c.has_slope]
    arrays = [[a.astype(np.float32) for a in c.arrays] for c in given]

    def every(given_arrays: list[Any]) -> list[Any]:
        return [
            list(td.grad(lambda *ys, c=c: c.ours(*ys).sum(), tuple(range(len(xs))))(*xs))
            for c, xs in zip(given, given_arrays, strict=True)
        ]

    specs = [[td.Spec(a.shape, a.dtype) for a in xs] for xs in arrays]
    found = td.compile(every, specs, device="cpu")(arrays)
    for c, ours in zip(given, found, strict=True):
        for mine, theirs in zip(ours, slopes(c, np.float32), strict=True):
            np.testing.assert_allclose(
                mine, theirs.numpy(), rtol=1e-5 * c.ulps, atol=1e-30, err_msg=c.name
            )
