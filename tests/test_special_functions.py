"""Special functions beside 50 digits (mpmath): values, first and second derivatives."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import mpmath
import numpy as np
import pytest
import torch

import treadle as td
from treadle.frontend.functions import special_coefficients

mp = mpmath.mp.clone()
mp.dps = 50
rng = np.random.default_rng(17)


def tenth(low: float, high: float, n: int) -> np.ndarray:
    return 10.0 ** rng.uniform(low, high, n)


class Function(NamedTuple):
    """Points, exact derivatives of order 0, 1 and 2, and the units allowed beside each."""

    points: np.ndarray
    exact: tuple[Callable[[Any], Any], ...]
    units: tuple[float, float, float]
    floor: float = 0.0  # errors of derivatives are relative to this at least


def normal_chance(x: Any) -> Any:
    return mp.erfc(-x / mp.sqrt(2)) / 2


def hazard(x: Any) -> Any:
    return mp.npdf(x) / normal_chance(x)


def inverse_slope(y: Any) -> Any:
    return mp.sqrt(mp.pi) / 2 * mp.exp(y * y)


# Slopes of tails are e^(−x²) as it is: their relative error grows with x².
FUNCTIONS = {
    "erfc": Function(
        np.r_[rng.uniform(-6, 26, 60), tenth(-20, 0, 20)],
        (
            mp.erfc,
            lambda x: -2 / mp.sqrt(mp.pi) * mp.exp(-x * x),
            lambda x: 4 * x / mp.sqrt(mp.pi) * mp.exp(-x * x),
        ),
        (6, 800, 800),
    ),
    "ndtr": Function(
        np.r_[rng.uniform(-37, 9, 60), rng.normal(size=20) * 1e-3],
        (normal_chance, mp.npdf, lambda x: -x * mp.npdf(x)),
        (6, 1600, 1600),
    ),
    "log_ndtr": Function(
        np.r_[rng.uniform(-90, 7, 60), -tenth(-3, 6, 30)],
        (
            lambda x: mp.log(normal_chance(x)),
            hazard,
            lambda x: -hazard(x) * (x + hazard(x)),
        ),
        (8, 100, 4000),
    ),
    "erfinv": Function(
        np.r_[rng.uniform(-1, 1, 40), 1 - tenth(-15.8, -1, 40), -tenth(-30, -1, 20)],
        (
            mp.erfinv,
            lambda x: inverse_slope(mp.erfinv(x)),
            lambda x: 2 * mp.erfinv(x) * inverse_slope(mp.erfinv(x)) ** 2,
        ),
        (8, 60, 400),
        floor=1.0,
    ),
    "logit": Function(
        np.r_[rng.uniform(0, 1, 40), 0.5 + tenth(-15, -1, 30), tenth(-30, -1, 20)],
        (
            lambda x: mp.log(x / (1 - x)),
            lambda x: 1 / (x * (1 - x)),
            lambda x: (2 * x - 1) / (x * (1 - x)) ** 2,
        ),
        (8, 20, 40),
        floor=1.0,
    ),
    "entr": Function(
        tenth(-18, 3, 60),
        (lambda x: -x * mp.log(x), lambda x: -mp.log(x) - 1, lambda x: -1 / x),
        (8, 20, 20),
    ),
}


def derivatives(name: str) -> Callable[[Any], tuple[Any, ...]]:
    function = getattr(td, name)

    def first(x: Any) -> Any:
        return td.grad(lambda y: function(y).sum())(x)

    def every(x: Any) -> tuple[Any, ...]:
        return function(x), first(x), td.grad(lambda y: first(y).sum())(x)

    return every


def compare(name: str, points: np.ndarray, found: tuple[Any, ...], slack: float = 1.0) -> None:
    """Relative errors in units of the dtype; results below its normal numbers are left out."""
    units, floats = FUNCTIONS[name].units, np.finfo(points.dtype)
    for order, (exact, values) in enumerate(zip(FUNCTIONS[name].exact, found, strict=True)):
        for x, value in zip(points, np.asarray(values), strict=True):
            expected = exact(mp.mpf(float(x)))
            if not floats.tiny * 1e3 < abs(expected) < floats.max:
                continue
            scale = max(abs(expected), FUNCTIONS[name].floor if order else 0)
            error = abs((mp.mpf(float(value)) - expected) / scale) / floats.eps
            message = (
                f"{name}, derivative {order} at {x!r}: {value!r} is {float(error):.3g} units off"
            )
            assert error <= units[order] * slack, message


def points_of(name: str, dtype: Any) -> np.ndarray:
    points = FUNCTIONS[name].points.astype(dtype)
    return points[abs(points) != 1] if name in ("erfinv", "logit") else points


@pytest.mark.parametrize("name", FUNCTIONS)
def test_eager(name: str) -> None:
    points = points_of(name, np.float64)
    found = derivatives(name)(td.tensor(points))
    compare(name, points, tuple(t.numpy() for t in found))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_natively(name: str, dtype: Any) -> None:
    points = points_of(name, dtype)
    compare(name, points, td.compile(derivatives(name), points, device="cpu")(points), slack=2.0)


@pytest.mark.parametrize("n", [1, 2, 3, 8])
def test_polygamma(n: int) -> None:
    """At positive and negative points, poles and ends."""
    every = np.r_[rng.uniform(0.01, 30, 30), tenth(-3, 4, 10), -rng.uniform(0, 6, 30)]
    for dtype in (np.float64, np.float32):
        points = every.astype(dtype)
        found = td.compile(lambda x: td.polygamma(n, x), points, device="cpu")(points)
        for x, value in zip(points, found, strict=True):
            expected = mp.polygamma(n, mp.mpf(float(x)))
            if abs(expected) < np.finfo(dtype).max:
                error = abs((mp.mpf(float(value)) - expected) / expected) / np.finfo(dtype).eps
                assert error <= 100, f"{n} at {x}: {value}, not {expected}"
    edges = td.polygamma(n, np.array([0.0, -1.0, -2.0, np.inf, np.nan])).numpy()
    np.testing.assert_array_equal(edges, [*[np.inf * (-1) ** (n + 1)] * 3, 0.0, np.nan])
    slope = td.grad(lambda x: td.polygamma(n, x).sum())(td.tensor(every))
    exact = [float(mp.polygamma(n + 1, mp.mpf(x))) for x in every]
    np.testing.assert_allclose(slope.numpy(), exact, rtol=1e-10)


# Small and large a, x far below, far above and near a.
SHAPES = np.r_[tenth(-3, 3, 40), tenth(-1, 2, 20)]
PLACES = np.r_[SHAPES[:20] * tenth(-2, 1, 20), SHAPES[20:40] * 1.02, tenth(-3, 2, 20)]


def lower_part(a: Any, x: Any) -> Any:
    return mp.gammainc(a, 0, x, regularized=True)


def test_incomplete_gamma() -> None:
    """Both parts, in float64 and float32; PyTorch's own are 2·10⁻⁹ off here."""
    below = np.array([float(lower_part(mp.mpf(a), mp.mpf(x))) for a, x in zip(SHAPES, PLACES)])
    above = np.array([float(1 - lower_part(mp.mpf(a), mp.mpf(x))) for a, x in zip(SHAPES, PLACES)])
    given = td.tensor(SHAPES), td.tensor(PLACES)
    for found, exact in ((td.igamma(*given), below), (td.igammac(*given), above)):
        np.testing.assert_allclose(found.numpy(), exact, rtol=1e-10, atol=1e-14)
    narrow = SHAPES.astype(np.float32), PLACES.astype(np.float32)
    program = td.compile(lambda *g: (td.igamma(*g), td.igammac(*g)), *narrow, device="cpu")
    for found, exact in zip(program(*narrow), (below, above), strict=True):
        np.testing.assert_allclose(found, exact, rtol=0, atol=3e-6)


def test_slopes_of_incomplete_gamma() -> None:
    """By both arguments; PyTorch has none by the first."""
    given = td.tensor(SHAPES[:40]), td.tensor(PLACES[:40])
    by_a, by_x = td.grad(lambda a, x: td.igamma(a, x).sum(), (0, 1))(*given)
    for a, x, first, second in zip(SHAPES, PLACES, by_a.numpy(), by_x.numpy()):
        exact = mp.diff(lambda s, x=x: lower_part(s, mp.mpf(x)), mp.mpf(a))
        np.testing.assert_allclose(first, float(exact), rtol=1e-9, atol=1e-12)
        density = mp.exp((mp.mpf(a) - 1) * mp.log(mp.mpf(x)) - mp.mpf(x) - mp.loggamma(mp.mpf(a)))
        np.testing.assert_allclose(second, float(density), rtol=1e-10, atol=1e-13)


def test_ends_of_incomplete_gamma() -> None:
    a, x = (
        np.ravel(g)
        for g in np.meshgrid([0.0, 1.0, -1.0, np.inf, 2.5], [0.0, -0.0, 1.0, -1.0, np.inf, 2.5])
    )
    expected = torch.igamma(torch.tensor(a), torch.tensor(x)).numpy()
    np.testing.assert_allclose(td.igamma(a, x).numpy(), expected, rtol=1e-9)
    np.testing.assert_allclose(td.igammac(a, x).numpy(), 1 - expected, rtol=1e-9, atol=1e-15)


def test_names_of_torch_special_are_functions_of_td() -> None:
    other = {"expit": "sigmoid", "gammaln": "lgamma", "psi": "digamma"}
    other |= {"gammainc": "igamma", "gammaincc": "igammac"}
    for name in td.special.__all__:
        assert hasattr(torch.special, name)
        assert getattr(td.special, name) is getattr(td, other.get(name, name))


def test_narrow_floats_are_rounded_once() -> None:
    x = np.linspace(-3, 3, 25).astype(np.float16)
    for name in ("erfc", "ndtr", "log_ndtr"):
        wide = getattr(td, name)(td.tensor(x.astype(np.float32))).numpy().astype(np.float16)
        np.testing.assert_array_equal(getattr(td, name)(td.tensor(x)).numpy(), wide)


@pytest.mark.slow
def test_coefficients_are_those_of_the_tool() -> None:
    path = Path(__file__).parent.parent / "tools" / "fit_special.py"
    spec = importlib.util.spec_from_file_location("fit_special", path)
    assert spec is not None
    assert spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    printed: dict[str, Any] = {}
    exec(tool.module(), printed)
    for name in ("ERFCX", "ERFINV", "MIDDLE"):
        assert printed[name] == getattr(special_coefficients, name)
