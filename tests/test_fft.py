"""Fourier transforms beside PyTorch's, values and gradients, natively; complex numbers as pairs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import treadle as td
from refusals import refused
from sizes import Problem, check, check_exactly, rounded
from treadle.fft import factors

rng = np.random.default_rng(5)


def normal(*shape: int) -> np.ndarray:
    return rounded(rng.standard_normal(shape))


def as_complex(z: torch.Tensor) -> torch.Tensor:
    return torch.view_as_complex(z.contiguous())


def as_pairs(z: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(z.resolve_conj()) if z.is_complex() else z


def beside_torch(name: str, x: np.ndarray, **options: Any) -> Problem:
    is_real = name.startswith("rfft")

    def theirs(given: Any, _: Any) -> torch.Tensor:
        z = given["x"] if is_real else as_complex(given["x"])
        return as_pairs(getattr(torch.fft, name)(z, **options))

    return Problem(lambda given, _: getattr(td.fft, name)(given["x"], **options), theirs, {"x": x})


# Lengths by one matrix, by two, by three, and without factors; along rows, columns and others.
LENGTHS = [((3, 7), {}), ((5, 16, 3), {"dim": 1}), ((2, 33), {"norm": "ortho"}), ((1,), {})]
LENGTHS += [((2, 300), {"norm": "forward"}), ((1, 274, 2), {"dim": -2}), ((1, 257), {})]
LENGTHS += [((3, 12), {"n": 17}), ((3, 12), {"n": 5}), ((2, 4, 3, 8), {"norm": "backward"})]
LONG = [
    ((1, 1009), {}),
    ((1, 331, 2), {"dim": 1}),
    ((1, 1536), {}),
    ((2, 514), {}),
    ((1, 2187), {}),
]


def along_one(name: str, cases: list[Any]) -> dict[str, Problem]:
    last = () if name.startswith("rfft") else (2,)
    return {f"{name} {s} {o}": beside_torch(name, normal(*s, *last), **o) for s, o in cases}


def inverse_of_real(cases: list[Any]) -> dict[str, Problem]:
    """To even lengths, to odd ones, and of fewer frequencies than there could be."""
    lengths = [(s, {**o, "n": n}) for s, o in cases for n in _lengths(s[o.get("dim", -1)])]
    return along_one("irfft", lengths)


def _lengths(m: int) -> list[int]:
    return [n for n in (2 * m - 2, 2 * m - 1, 3 * m) if n]


HALVES = [((3, 7), {}), ((2, 9, 3), {"dim": 1}), ((2, 17), {"norm": "ortho"}), ((1,), {})]
SEVERAL = [((3, 6, 5), {}), ((2, 8, 7), {"norm": "ortho"}), ((4, 5, 3), {"dim": (0, 2)})]
SEVERAL += [((2, 6, 5), {"s": (4, 8)}), ((5, 9), {"norm": "forward", "dim": (1, 0)})]
ALL = [((3, 6, 5), {}), ((8,), {}), ((2, 3, 4, 5), {"dim": (1, 3)}), ((4, 4), {"s": (6,)})]
ALL += [((2, 3, 4), {"norm": "ortho"})]
NAMES = [f"{kind}{end}" for end in ("", "2", "n") for kind in ("rfft", "fft", "ifft", "irfft")]


def every_case(name: str) -> dict[str, Problem]:
    if name == "irfft":
        return {**inverse_of_real(HALVES), **along_one(name, [((2, 5), {}), ((2, 151), {})])}
    return along_one(name, {"2": SEVERAL, "n": ALL}.get(name[-1], LENGTHS))


@pytest.mark.parametrize("name", NAMES)
def test_beside_torch(name: str) -> None:
    check_exactly(every_case(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES[:4])
def test_long_ones(name: str) -> None:
    check_exactly(inverse_of_real(LONG) if name == "irfft" else along_one(name, LONG))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_natively(name: str) -> None:
    check(every_case(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES[:4])
def test_long_ones_natively(name: str) -> None:
    check(inverse_of_real(LONG[:2]) if name == "irfft" else along_one(name, LONG))


def test_some_natively() -> None:
    """By one matrix along rows and along columns, and by two."""
    x, z = normal(2, 300), normal(3, 17, 5, 2)
    check(
        {
            "rfft": beside_torch("rfft", x),
            "fft": beside_torch("fft", z, dim=1),
            "irfft": beside_torch("irfft", z, dim=0, n=5, norm="ortho"),
        }
    )


@pytest.mark.parametrize("n", [1, 2, 9, 16, 300, 331])
def test_the_lowest_frequencies_alone(n: int) -> None:
    z = normal(2, n, 3, 2)
    every = np.fft.fft(z[..., 0] + 1j * z[..., 1], axis=1)
    for modes in {1, max(1, n // 3), n}:
        used = factors.lowest(n, modes)
        sizes = np.abs(np.fft.fftfreq(n))
        assert sorted(sizes[used]) == sorted(sizes)[:modes]
        found = td.fft.fft(z, dim=1, modes=modes).numpy()
        np.testing.assert_allclose(found[..., 0], every[:, used].real, atol=1e-10)
        np.testing.assert_allclose(found[..., 1], every[:, used].imag, atol=1e-10)
        others = np.zeros_like(every)
        others[:, used] = every[:, used]
        back = td.fft.ifft(found, n=n, dim=1, modes=modes).numpy()
        np.testing.assert_allclose(back[..., 0], np.fft.ifft(others, axis=1).real, atol=1e-10)
        positive = min(modes, n // 2 + 1)
        half = td.fft.rfft(z[..., 0], dim=1, modes=positive).numpy()
        expected = np.fft.rfft(z[..., 0], axis=1)[:, :positive]
        np.testing.assert_allclose(half[..., 1], expected.imag, atol=1e-10)


# A layer of a Fourier neural operator


def spectral_2d(x: Any, w: Any) -> Any:
    """As it is usually written: two corners of the frequencies, zeros between."""
    m, n = w.shape[2] // 2, x.shape[2]
    z = td.fft.rfft2(x)
    upper = td.fft.einsum("bixy,ioxy->boxy", z[:, :, :m, :m], w[:, :, :m])
    lower = td.fft.einsum("bixy,ioxy->boxy", z[:, :, -m:, :m], w[:, :, m:])
    between = td.zeros((*upper.shape[:2], n - 2 * m, m, 2))
    return td.fft.irfft2(td.concat([upper, between, lower], 2), s=x.shape[2:])


def spectral_2d_of_modes(x: Any, w: Any) -> Any:
    modes = w.shape[2:4]
    z = td.fft.rfft2(x, modes=modes)
    return td.fft.irfft2(td.fft.einsum("bixy,ioxy->boxy", z, w), s=x.shape[2:], modes=modes)


def their_spectral_2d(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    m, z = w.shape[2] // 2, torch.fft.rfft2(x)
    w = as_complex(w)
    out = torch.zeros(x.shape[0], w.shape[1], *z.shape[2:], dtype=z.dtype)
    out[:, :, :m, :m] = torch.einsum("bixy,ioxy->boxy", z[:, :, :m, :m], w[:, :, :m])
    out[:, :, -m:, :m] = torch.einsum("bixy,ioxy->boxy", z[:, :, -m:, :m], w[:, :, m:])
    return torch.fft.irfft2(out, s=x.shape[2:])


def spectral_1d(x: Any, w: Any) -> Any:
    z = td.fft.rfft(x, modes=w.shape[2])
    return td.fft.irfft(td.fft.einsum("bix,iox->box", z, w), n=x.shape[2])


def their_spectral_1d(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    z = torch.fft.rfft(x)[:, :, : w.shape[2]]
    return torch.fft.irfft(torch.einsum("bix,iox->box", z, as_complex(w)), n=x.shape[2])


def test_a_spectral_convolution() -> None:
    def layer(ours: Any, theirs: Any, x: np.ndarray, w: np.ndarray) -> Problem:
        given = {"x": x, "w": w}
        return Problem(
            lambda f, _: ours(f["x"], f["w"]), lambda f, _: theirs(f["x"], f["w"]), given
        )

    flat, weight = normal(3, 5, 16, 12), normal(5, 4, 6, 3, 2)
    line, weights = normal(2, 3, 33), normal(3, 7, 9, 2)
    check(
        {
            "corners": layer(spectral_2d, their_spectral_2d, flat, weight),
            "modes": layer(spectral_2d_of_modes, their_spectral_2d, flat, weight),
            "line": layer(spectral_1d, their_spectral_1d, line, weights),
        }
    )


# Complex numbers


def test_complex_numbers() -> None:
    a, b = normal(3, 5, 2), normal(5, 2)

    def theirs(given: Any, _: Any) -> Any:
        x, y = as_complex(given["a"]), as_complex(given["b"])
        product = torch.einsum("ij,j->i", x, y)
        found = [x * y, x.conj(), x.real, x.imag, x.abs(), x.angle(), torch.complex(x.imag, x.real)]
        return [as_pairs(r) for r in (*found, product)]

    def ours(given: Any, _: Any) -> Any:
        x, y = given["a"], given["b"]
        f = td.fft
        parts = [f.real(x), f.imag(x), f.abs(x), f.angle(x), f.complex(f.imag(x), f.real(x))]
        return [f.multiply(x, y), f.conj(x), *parts, f.einsum("ij,j->i", x, y)]

    check({"pairs": Problem(ours, theirs, {"a": a, "b": b})})


def test_narrow_floats_are_transformed_in_float32() -> None:
    x = td.tensor(normal(2, 64)).astype(td.bfloat16)
    found = td.compile(lambda x: td.fft.rfft(x), td.Spec((2, 64), td.bfloat16), device="cpu")(
        x.numpy()
    )
    assert found.dtype.name == "bfloat16"
    expected = np.fft.rfft(x.numpy().astype(np.float64))
    np.testing.assert_allclose(
        found[..., 0].astype(np.float64), expected.real, rtol=5e-3, atol=0.02
    )


X, Z = td.zeros((3, 4)), td.zeros((3, 4, 2))
REFUSALS = [
    (lambda: td.fft.fft(X), td.ShapeError, "fft", "float32[3,4]", "td.fft.complex"),
    (lambda: td.fft.rfft(X, norm="other"), td.ArgumentError, "rfft", "norm = 'other'", "ortho"),
    (lambda: td.fft.rfft(X, modes=4), td.ArgumentError, "rfft", "modes = 4", "1 to 3"),
    (lambda: td.fft.fft(Z, dim=2), td.AxisError, "fft", "axis 2", "counted without"),
    (lambda: td.fft.irfft(Z, n=0), td.ArgumentError, "irfft", "of 0 elements", "from 1 on"),
    (lambda: td.fft.ifft(Z, n=9, modes=3), td.ShapeError, "ifft", "modes = 3", "4 frequencies"),
    (lambda: td.fft.fft2(Z, dim=(0, 0)), td.ArgumentError, "fftn", "(0, 0)", "each axis once"),
    (lambda: td.fft.einsum("ij,j", Z, Z), td.ArgumentError, "einsum", "'ij,j'", "ab,bc->ac"),
]


@pytest.mark.parametrize("row", REFUSALS, ids=lambda row: row[2])
def test_refusals(row: Any) -> None:
    refused(*row)
