"""The elementary functions of vectors, compiled: errors in ulps, edges, and widths alike."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import mpmath
import numpy as np
import pytest

import treadle as td
from treadle.base.dtypes import float32, float64
from treadle.codegen.llvm import coefficients, mathematics
from treadle.codegen.llvm.mathematics import NAMES, SIN_END
from treadle.ir import ops
from treadle.runtime.cpu.native import processor
from vector_functions import Compiled, compiled, exact, ulps

TOOLS = Path(__file__).resolve().parent.parent / "tools"
WIDTHS = (1, 4, 8, 16)
SAMPLES = 1_000_000  # of each interval, of which every function has at least two
REFERENCE_ERROR = 0.001  # ulp: the float64 functions of other machines differ in their last bits
UNARY = tuple(name for name in NAMES if mathematics.arity(name) == 1)
LARGEST = float(np.finfo(np.float32).max)
TINIEST = 2.0**-149


def _tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, TOOLS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module


errors = _tool("math_errors")


def contract(name: str) -> float:
    return 8.0 if name == "pow" else 4.0


def neighbours(centres: np.ndarray, distance: int = 3) -> np.ndarray:
    """The float32s at and around some numbers, of both signs."""
    bits = np.abs(centres).astype(np.float32).view(np.int32)
    steps = np.arange(-distance, distance + 1, dtype=np.int32)
    around = np.maximum(bits[:, None] + steps, 0).ravel().view(np.float32)
    return np.concatenate([around, -around])


def special_values() -> np.ndarray:
    powers = np.exp2(np.arange(-149, 128, dtype=np.float64))
    thirds = powers * 1.3333334
    ends = np.array([0.0, TINIEST, 2.0**-126 - TINIEST, 2.0**-126, LARGEST])
    wholes = np.arange(1.0, 20.0)
    found = neighbours(np.concatenate([powers, thirds, ends, wholes, wholes / 2]))
    return np.append(found, np.array([np.inf, -np.inf, np.nan], np.float32))


def all_pairs(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    x, y = np.meshgrid(values, values)
    return x.ravel(), y.ravel()


def operands_of(name: str, x: np.ndarray) -> tuple[np.ndarray, ...]:
    if mathematics.arity(name) == 1:
        return (x,)
    return x, np.random.default_rng(1).permutation(x)


def random_bits(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 2**32, count, np.uint32).view(np.float32)


def same_value(got: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Equal, the signs of zeros included; any NaN equals any."""
    both_nan = np.isnan(got) & np.isnan(expected)
    return both_nan | ((got == expected) & (np.signbit(got) == np.signbit(expected)))


# Errors


def test_contracts_are_those_of_the_op_table() -> None:
    for name in NAMES:
        assert getattr(ops.elementwise, name.upper()).contract.error.count == contract(name)


@pytest.mark.parametrize("region", errors.REGIONS, ids=lambda r: f"{r.function}: {r.text}")
def test_error_is_within_the_documented_one(region) -> None:  # type: ignore[no-untyped-def]
    documented = errors.documented()[region.function, region.text]
    assert errors.sampled_error(region, SAMPLES) <= documented + REFERENCE_ERROR
    assert documented <= contract(region.function)


def test_the_page_documents_every_region() -> None:
    assert [*errors.documented()] == [(r.function, r.text) for r in errors.REGIONS]
    assert {r.function for r in errors.REGIONS} == set(NAMES)


@pytest.mark.parametrize("name", UNARY)
def test_special_values(name: str) -> None:
    x = special_values()
    got, expected = compiled(name, 8)(x), exact(name, x)
    assert ulps(got, expected).max() <= contract(name)
    is_zero = got == 0
    assert np.array_equal(np.signbit(got[is_zero]), np.signbit(expected[is_zero]))


@pytest.mark.parametrize("name", ["pow", "atan2"])
def test_special_pairs(name: str) -> None:
    x, y = all_pairs(special_values()[::5])
    got, expected = compiled(name, 8)(x, y), exact(name, x, y)
    assert ulps(got, expected).max() <= contract(name)
    is_zero = got == 0
    assert np.array_equal(np.signbit(got[is_zero]), np.signbit(expected[is_zero]))


def boundaries(name: str) -> np.ndarray:
    """Where the reduction of the range, or the formula, changes."""
    halves = np.arange(-160, 160) + 0.5
    if name == "exp":
        return np.append(halves * np.log(2), [87.33655, 88.72284, 103.27893, 103.97208, 104, 89])
    if name == "tanh":
        return np.append(halves * np.log(2) / 2, [9.01, 9.1, 1e-4, TINIEST])
    if name == "log":
        powers = np.exp2(np.arange(-149, 128, dtype=np.float64))
        return np.concatenate([powers, powers * np.sqrt(2), [2.0**-126, 1.0]])
    return np.array([3.83, 3.92, 3.93, 1e-4, TINIEST])


@pytest.mark.parametrize("name", ["exp", "tanh", "log", "erf"])
def test_boundaries_of_the_reduction(name: str) -> None:
    x = neighbours(boundaries(name), distance=200)
    assert ulps(compiled(name, 8)(x), exact(name, x)).max() <= contract(name)


@pytest.mark.parametrize("name", ["sin", "cos"])
@pytest.mark.parametrize("offset", [0.0, 0.5])
def test_all_multiples_of_a_quarter_turn_in_the_fast_path(name: str, offset: float) -> None:
    """Where the result is nearly 0, and where one polynomial takes over from the other."""
    quarters = np.arange(int(SIN_END * 2 / np.pi) + 2) + offset
    x = neighbours(quarters * (np.pi / 2))
    assert ulps(compiled(name, 8)(x), exact(name, x)).max() <= contract(name)


@pytest.mark.parametrize("name", ["sin", "cos"])
def test_multiples_of_a_quarter_turn_beyond(name: str) -> None:
    rng = np.random.default_rng(2)
    quarters = np.rint(np.exp2(rng.uniform(14, 52, 50_000)))
    x = neighbours(np.append(quarters * (np.pi / 2), [SIN_END, LARGEST]))
    assert ulps(compiled(name, 8)(x), exact(name, x)).max() <= contract(name)


def test_one_far_angle_does_not_change_its_neighbours() -> None:
    near = np.linspace(-4, 4, 8, dtype=np.float32)
    far = np.where(np.arange(8) == 3, np.float32(1e6), near)
    for name in ("sin", "cos"):
        alone, mixed = compiled(name, 8)(near), compiled(name, 8)(far)
        assert mixed[3] == np.float32(exact(name, far[3:4])[0])
        assert np.array_equal(np.delete(mixed, 3), np.delete(alone, 3))


HIGH_PRECISION = {
    "exp": mpmath.exp,
    "log": mpmath.log,
    "tanh": mpmath.tanh,
    "erf": mpmath.erf,
    "sin": mpmath.sin,
    "cos": mpmath.cos,
    "rsqrt": lambda x: 1 / mpmath.sqrt(x),
}


@pytest.mark.parametrize("name", UNARY)
def test_the_references_are_good_enough(name: str) -> None:
    """float64 against 60 decimals, at random numbers and near zeros of the circle functions."""
    x = random_bits(300)
    turns = neighbours(np.arange(1, 20_000, 400) * (np.pi / 2), 1)
    x = np.concatenate([x, turns])
    x = x[np.isfinite(x) & ((x > 0) | (name not in ("log", "rsqrt"))) & (np.abs(x) < 1e30)]
    with mpmath.workdps(60):
        precise = np.array([float(HIGH_PRECISION[name](mpmath.mpf(float(v)))) for v in x])
    with np.errstate(over="ignore"):
        rounded = precise.astype(np.float32)
    assert ulps(rounded, exact(name, x)).max() <= 0.501


@pytest.mark.parametrize("name", ["tanh", "erf", "sin", "cos"])
def test_results_do_not_exceed_one(name: str) -> None:
    assert np.nanmax(np.abs(compiled(name, 8)(random_bits(100_000)))) <= 1


# Edges that are known by heart


@pytest.mark.parametrize(
    ("name", "x", "expected"),
    [
        ("exp", -np.inf, 0.0),
        ("exp", np.inf, np.inf),
        ("exp", -0.0, 1.0),
        ("exp", 88.72283, 3.4027985e38),
        ("exp", 88.72284, np.inf),
        ("exp", -103.97208, TINIEST),
        ("exp", -103.97209, 0.0),
        ("log", 0.0, -np.inf),
        ("log", -0.0, -np.inf),
        ("log", -TINIEST, np.nan),
        ("log", -np.inf, np.nan),
        ("log", np.inf, np.inf),
        ("log", 1.0, 0.0),
        ("log", TINIEST, -103.27893),
        ("tanh", 0.0, 0.0),
        ("tanh", -0.0, -0.0),
        ("tanh", -np.inf, -1.0),
        ("tanh", -TINIEST, -TINIEST),
        ("erf", -0.0, -0.0),
        ("erf", np.inf, 1.0),
        ("erf", -10.0, -1.0),
        ("sin", -0.0, -0.0),
        ("sin", np.inf, np.nan),
        ("sin", -np.inf, np.nan),
        ("sin", TINIEST, TINIEST),
        ("cos", np.inf, np.nan),
        ("cos", -0.0, 1.0),
        ("rsqrt", 0.0, np.inf),
        ("rsqrt", -0.0, -np.inf),
        ("rsqrt", np.inf, 0.0),
        ("rsqrt", -1.0, np.nan),
        ("rsqrt", 2.0**-148, 2.0**74),
    ],
)
def test_edges(name: str, x: float, expected: float) -> None:
    got = compiled(name, 8)(np.full(8, x, np.float32))
    assert same_value(got, np.float32(expected)).all(), got


@pytest.mark.parametrize("name", UNARY)
def test_nan_gives_nan(name: str) -> None:
    assert np.isnan(compiled(name, 8)(np.full(8, np.nan, np.float32))).all()


@pytest.mark.parametrize(
    ("x", "y", "expected"),
    [
        (0.0, 0.0, 1.0),
        (np.nan, 0.0, 1.0),
        (np.inf, -0.0, 1.0),
        (1.0, np.nan, 1.0),
        (1.0, np.inf, 1.0),
        (-1.0, np.inf, 1.0),
        (-1.0, -np.inf, 1.0),
        (-1.0, np.nan, np.nan),
        (2.0, np.nan, np.nan),
        (np.nan, 1.0, np.nan),
        (-8.0, 1 / 3, np.nan),
        (-TINIEST, 0.5, np.nan),
        (-2.0, 3.0, -8.0),
        (-2.0, 4.0, 16.0),
        (-2.0, -1.0, -0.5),
        (-1.0, 16777215.0, -1.0),
        (-1.0, 16777216.0, 1.0),
        (-1.0, LARGEST, 1.0),
        (0.0, 3.0, 0.0),
        (-0.0, 3.0, -0.0),
        (-0.0, 2.0, 0.0),
        (-0.0, 0.5, 0.0),
        (0.0, -3.0, np.inf),
        (-0.0, -3.0, -np.inf),
        (-0.0, -2.0, np.inf),
        (-0.0, -np.inf, np.inf),
        (0.5, np.inf, 0.0),
        (0.5, -np.inf, np.inf),
        (-0.5, np.inf, 0.0),
        (2.0, np.inf, np.inf),
        (-2.0, -np.inf, 0.0),
        (-2.0, np.inf, np.inf),
        (np.inf, 0.5, np.inf),
        (np.inf, -0.5, 0.0),
        (-np.inf, 3.0, -np.inf),
        (-np.inf, 2.0, np.inf),
        (-np.inf, 0.5, np.inf),
        (-np.inf, -3.0, -0.0),
        (-np.inf, -2.0, 0.0),
        (2.0, 128.0, np.inf),
        (2.0, -149.0, TINIEST),
        (2.0, -150.0, 0.0),
        (-2.0, -151.0, -0.0),
        (TINIEST, 1.0, TINIEST),
        (TINIEST, -1.0, np.inf),
        (3.0, 2.0, 9.0),
    ],
)
def test_edges_of_pow(x: float, y: float, expected: float) -> None:
    got = compiled("pow", 8)(np.full(8, x, np.float32), np.full(8, y, np.float32))
    assert same_value(got, np.float32(expected)).all(), got


PI = np.float32(np.pi)


@pytest.mark.parametrize(
    ("y", "x", "expected"),
    [
        (0.0, 0.0, 0.0),
        (-0.0, 0.0, -0.0),
        (0.0, -0.0, PI),
        (-0.0, -0.0, -PI),
        (-0.0, 3.0, -0.0),
        (-0.0, -3.0, -PI),
        (TINIEST, 1.0, TINIEST),
        (2.0, -0.0, PI / 2),
        (-2.0, 0.0, -PI / 2),
        (3.0, np.inf, 0.0),
        (-3.0, np.inf, -0.0),
        (3.0, -np.inf, PI),
        (-3.0, -np.inf, -PI),
        (np.inf, 3.0, PI / 2),
        (-np.inf, -3.0, -PI / 2),
        (np.inf, np.inf, PI / 4),
        (-np.inf, np.inf, -PI / 4),
        (np.inf, -np.inf, 3 * np.pi / 4),
        (-np.inf, -np.inf, -3 * np.pi / 4),
        (np.nan, 1.0, np.nan),
        (0.0, np.nan, np.nan),
    ],
)
def test_edges_of_atan2(y: float, x: float, expected: float) -> None:
    """As C's annex F has them."""
    got = compiled("atan2", 8)(np.full(8, y, np.float32), np.full(8, x, np.float32))
    assert same_value(got, np.float32(expected)).all(), got


def test_inverse_sines_are_as_exact_near_one_as_at_zero() -> None:
    inner = np.concatenate([np.linspace(0, 1, 5000), 1 - np.geomspace(2.0**-24, 0.1, 5000)])
    x = np.concatenate([inner, -inner, inner * 1e-6]).astype(np.float32)
    functions = [td.asin, td.acos]
    found = td.compile(lambda x: [f(x) for f in functions], td.Spec(x.shape), device="cpu")(x)
    for got, reference in zip(found, (np.arcsin, np.arccos), strict=True):
        assert ulps(got, reference(x.astype(np.float64))).max() <= 3.5


# Widths, targets, float64


@pytest.mark.parametrize("name", NAMES)
def test_widths_give_the_same_bits(name: str) -> None:
    operands = operands_of(name, np.concatenate([random_bits(200_003), special_values()]))
    one = compiled(name, 1)(*operands).view(np.uint32)
    for width in WIDTHS[1:]:
        other = compiled(name, width)(*operands).view(np.uint32)
        assert np.array_equal(one, other), width
    inlined = Compiled(name, 8, inline=True)(*operands).view(np.uint32)
    assert np.array_equal(one, inlined)


@pytest.mark.parametrize("permutes", [8, 16])
def test_erf_in_pieces(permutes: int) -> None:
    """Where vectors look coefficients up: another formula, as exact, the same for every width."""
    if not processor().has({8: "avx2", 16: "avx512f"}[permutes]):
        pytest.skip("the processor looks nothing up in such registers")
    near = np.geomspace(2.0**-12, 4.5, 400_000).astype(np.float32)
    half = mathematics.PIECES[permutes][1] / 2  # where pieces meet
    edges = np.arange(-32, 33, dtype=np.float32) * np.float32(half)
    edges = np.concatenate([edges, np.nextafter(edges, 9), np.nextafter(edges, -9)])
    x = np.concatenate([near, -near, edges, random_bits(100_003), special_values()])
    one = Compiled("erf", 1, permutes=permutes)(x)
    assert ulps(one, exact("erf", x)).max() <= 2.3
    assert np.array_equal(np.signbit(one[x == 0]), np.signbit(x[x == 0]))
    is_far = np.abs(x) >= mathematics.ERF_END
    assert np.array_equal(one[is_far], np.sign(x[is_far]))
    for width in (4, 8, 16):
        other = Compiled("erf", width, permutes=permutes, inline=width == 8)(x)
        assert np.array_equal(one.view(np.uint32), other.view(np.uint32)), width


@pytest.mark.parametrize("name", NAMES)
def test_a_processor_without_extensions_gives_the_same_bits(name: str) -> None:
    """Neither the instructions LLVM chooses nor a missing fma changes a result."""
    operands = operands_of(name, random_bits(20_000, seed=3))
    plain = Compiled(name, 4, is_plain=True)(*operands)
    assert np.array_equal(plain.view(np.uint32), compiled(name, 4)(*operands).view(np.uint32))


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", NAMES)
def test_float64(name: str, width: int) -> None:
    rng = np.random.default_rng(4)
    edges = [0.0, -0.0, 1.0, np.inf, -np.inf, np.nan, 5e-324, 1e300]
    x = np.concatenate([rng.normal(0, 3, 4000), np.exp(rng.normal(0, 20, 4000)), edges])
    operands = operands_of(name, x)
    got, expected = Compiled(name, width, float64)(*operands), exact(name, *operands)
    assert np.array_equal(np.isnan(got), np.isnan(expected))
    ordinary = np.isfinite(expected)
    assert np.array_equal(got[~ordinary], expected[~ordinary], equal_nan=True)
    np.testing.assert_allclose(got[ordinary], expected[ordinary], rtol=1e-15, atol=1e-323)


# The text


def test_names() -> None:
    assert mathematics.function_name("exp", 8) == "treadle.exp.v8f32"
    assert mathematics.function_name("pow", 1, float32) == "treadle.pow.f32"
    assert mathematics.function_name("sin", 4, float64) == "treadle.sin.v4f64"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [float32, float64], ids=str)
def test_a_definition_says_what_it_needs(name: str, dtype) -> None:  # type: ignore[no-untyped-def]
    definition = mathematics.define(name, 8, dtype)
    text = definition.text()
    assert text.startswith(f"define internal <8 x {'float' if dtype is float32 else 'double'}> @")
    declared = {line.split("@")[1].split("(")[0] for line in definition.declarations}
    called = {part.split("(")[0] for part in text.split("@")[2:]}
    assert called == declared
    assert "fptosi" not in text


@pytest.mark.slow
def test_coefficients_are_those_of_the_tool() -> None:
    tool = _tool("fit_polynomials")
    for fit in tool.FITS:
        found, _ = tool.fitted(fit)
        held = getattr(coefficients, fit.name)
        assert [f"{float(c):.{fit.digits}g}" for c in found] == [
            f"{c:.{fit.digits}g}" for c in held
        ]
    for pieces in tool.PIECES:
        for n, held in enumerate(getattr(coefficients, pieces.name)):
            assert [float(f"{float(c):.9g}") for c in pieces.fitted(n)[0]] == [*held]
    halves = tool.parts(mpmath.pi / 2, 3)
    assert [*coefficients.HALF_PI] == [float(f"{float(p):.9g}") for p in halves]
