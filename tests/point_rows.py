"""Functions beside references at points that random samples miss: tables for test_points.

A row is our function and a reference: PyTorch's function in float64, or `Smooth`, a formula and its
two derivatives in 50 digits. A point where we differ on purpose is an `Excuse`, with its reason.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import mpmath
import numpy as np
import torch
import torch.nn.functional as F
from mpmath import mp, mpf

import treadle as td

INF, NAN = np.inf, np.nan
LARGEST = float(np.finfo(np.float64).max)
# Functions that keep the sign of a zero, as C's do.
SIGNED = frozenset("abs asin atan erf floor neg sin sqrt tan tanh trunc".split())
Array = np.ndarray
Function = Callable[..., Any]


class Smooth(NamedTuple):
    """A function and its first and second derivative, in mpmath, up to a size; PyTorch's beyond."""

    value: Function
    first: Function
    second: Function
    beyond: Function
    limit: float


class Row(NamedTuple):
    ours: Function
    theirs: Function | Smooth
    rounding: float = 0  # how much of 1 may be lost where near numbers are subtracted, in ε


class Excuse(NamedTuple):
    """Where a row differs from its reference, and why."""

    row: str
    what: str  # some of "value first second"
    where: Function  # of the operands: a condition for each point
    reason: str
    dtypes: str = "float64 float32"


def everywhere(*x: Array) -> Array:
    return np.ones(x[0].shape, bool)


def at(*points: float) -> Function:
    return lambda *x: np.isin(x[0], points)


def beyond(limit: float) -> Function:
    return lambda *x: np.abs(x[0]) > limit


# --- functions of one number ------------------------------------------------------------------

SIZES = [0.0, 5e-324, 1e-310, 1e-300, 1e-40, 1e-30, 1e-20, 1e-12, 1e-8, 1e-6, 1e-4, 1e-3, 0.1]
SIZES += [0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 9.0, 10.0, 17.0, 20.0, 20.5, 21.0, 30.0]
SIZES += [50.0, 80.0, 88.0, 100.0, 200.0, 700.0, 1e3, 1e4, 65504.0, 1e6, 1e10, 1e18, 1e20, 1e30]
SIZES += [1e38, 3.4e38, 1e150, 1e300, 1.7976931348623157e308, INF]
POINTS = np.array([*SIZES, *(-s for s in SIZES), NAN])


def same(names: str, module: Any = torch) -> dict[str, Row]:
    """Functions of one name in both libraries."""
    return {n: Row(getattr(td, n), getattr(module, n)) for n in names.split()}


# A sum that is near 0 has lost what its terms have: around 1 and 2, and between the poles.
ROUNDING = {"lgamma": 32, "digamma": 32}

FORMULAS = {
    "expm1": (mp.expm1, mp.exp, mp.exp),
    "sinh": (mp.sinh, mp.cosh, mp.sinh),
    "cosh": (mp.cosh, mp.sinh, mp.cosh),
    "tanh": (mp.tanh, lambda x: mp.sech(x) ** 2, lambda x: -2 * mp.tanh(x) * mp.sech(x) ** 2),
    "asinh": (mp.asinh, lambda x: 1 / mp.sqrt(x * x + 1), lambda x: -x / mp.sqrt(x * x + 1) ** 3),
    "acosh": (mp.acosh, lambda x: 1 / mp.sqrt(x * x - 1), lambda x: -x / mp.sqrt(x * x - 1) ** 3),
    "atanh": (mp.atanh, lambda x: 1 / (1 - x * x), lambda x: 2 * x / (1 - x * x) ** 2),
    "asin": (mp.asin, lambda x: 1 / mp.sqrt(1 - x * x), lambda x: x / mp.sqrt(1 - x * x) ** 3),
    "acos": (mp.acos, lambda x: -1 / mp.sqrt(1 - x * x), lambda x: -x / mp.sqrt(1 - x * x) ** 3),
    "atan": (mp.atan, lambda x: 1 / (1 + x * x), lambda x: -2 * x / (1 + x * x) ** 2),
    "erf": (
        mp.erf,
        lambda x: 2 / mp.sqrt(mp.pi) * mp.exp(-x * x),
        lambda x: -4 * x / mp.sqrt(mp.pi) * mp.exp(-x * x),
    ),
    "log1p": (mp.log1p, lambda x: 1 / (1 + x), lambda x: -1 / (1 + x) ** 2),
    "mish": (
        lambda x: x * mp.tanh(_softplus(x)),
        lambda x: mp.tanh(_softplus(x)) + x * _gate(x),
        lambda x: _gate(x) * (2 + x * (_logistic(-x) - 2 * mp.tanh(_softplus(x)) * _logistic(x))),
    ),
    "softsign": (
        lambda x: x / (1 + abs(x)),
        lambda x: 1 / (1 + abs(x)) ** 2,
        lambda x: -2 * mp.sign(x) / (1 + abs(x)) ** 3,
    ),
    "lgamma": (lambda x: mp.loggamma(x).real, lambda x: mp.psi(0, x), lambda x: mp.psi(1, x)),
    "digamma": (lambda x: mp.psi(0, x), lambda x: mp.psi(1, x), lambda x: mp.psi(2, x)),
    "log_sigmoid": (
        lambda x: -_softplus(-x),
        lambda x: _logistic(-x),
        lambda x: -_logistic(x) * _logistic(-x),
    ),
}


def _softplus(x: mpf) -> mpf:
    return mp.log1p(mp.exp(x)) if x < 1000 else x


def _logistic(x: mpf) -> mpf:
    return 1 / (1 + mp.exp(-x))


def _gate(x: mpf) -> mpf:
    """The derivative of tanh(softplus(x))."""
    return mp.sech(_softplus(x)) ** 2 * _logistic(x)


def in_digits(function: Function, x: Array) -> Array:
    """A formula of mpmath at each point; NaN where it is not real."""
    with mp.workdps(50):
        return np.array([_real(function, mpf(v)) for v in x.tolist()])


def _real(function: Function, x: mpf) -> float:
    try:
        value = function(x)
    except (ValueError, ZeroDivisionError):  # a pole
        return NAN
    if isinstance(value, mpmath.mpc):
        return NAN if value.imag else float(value.real)
    return float(value)


def _smooth(name: str) -> Row:
    theirs = {"mish": F.mish, "softsign": F.softsign, "log_sigmoid": F.logsigmoid}
    beyond = theirs.get(name) or getattr(torch, name)
    limits = {"lgamma": 200.0, "digamma": 200.0}
    return Row(
        getattr(td, name),
        Smooth(*FORMULAS[name], beyond, limits.get(name, LARGEST)),
        ROUNDING.get(name, 0),
    )


UNARY: dict[str, Row] = {
    **same("abs ceil cos exp floor frac log log10 log2 neg reciprocal round rsqrt sign sin"),
    **same("sigmoid sqrt square tan trunc isnan isinf isfinite"),
    **{name: _smooth(name) for name in FORMULAS},
    **same("relu relu6 elu selu celu hardsigmoid hardswish hardtanh leaky_relu silu", F),
    **same("softshrink hardshrink softplus", F),
    "tanhshrink": Row(td.tanhshrink, F.tanhshrink, 1),
    "gelu": Row(td.gelu, F.gelu, 4),
    "nan_to_num": Row(td.nan_to_num, torch.nan_to_num),
    "stop_gradient": Row(td.stop_gradient, torch.detach),
    "gelu tanh": Row(lambda x: td.gelu(x, "tanh"), lambda x: F.gelu(x, approximate="tanh"), 4),
    "elu 2": Row(lambda x: td.elu(x, 2.0), lambda x: F.elu(x, 2.0)),
    "celu 2": Row(lambda x: td.celu(x, 2.0), lambda x: F.celu(x, 2.0)),
    "softplus 2": Row(lambda x: td.softplus(x, 2.0), lambda x: F.softplus(x, 2.0)),
    "threshold": Row(lambda x: td.threshold(x, 0.5, 3.0), lambda x: F.threshold(x, 0.5, 3.0)),
    "clamp": Row(lambda x: td.clamp(x, -1, 2), lambda x: x.clamp(-1, 2)),
    "clamp min": Row(lambda x: td.clamp(x, min=0), lambda x: x.clamp(min=0)),
    "clamp nan": Row(lambda x: td.clamp(x, NAN, 1.0), lambda x: x.clamp(NAN, 1.0)),
    "clamp max nan": Row(lambda x: td.clamp(x, max=NAN), lambda x: x.clamp(max=NAN)),
    "prelu": Row(lambda x: td.prelu(x, [0.5]), lambda x: F.prelu(x, torch.tensor([0.5]).double())),
    **{
        f"pow {p}": Row(lambda x, p=p: td.pow(x, p), lambda x, p=p: x.pow(p))
        for p in (-4, -3, -2, -1.5, -1, -0.5, 0, 0.5, 1, 1.5, 2, 2.5, 3, 4, 5)
    },
    "pow 2 to the": Row(lambda x: td.pow(2.0, x), lambda x: torch.pow(2.0, x)),
}

SINGULAR = "the second derivative at the end of the domain is ±∞, which sums of products make NaN"
UNARY_EXCUSES = [
    Excuse("sign", "value", np.isnan, "NaN stays NaN, as in NumPy"),
    *(Excuse(n, "second", at(-1, 1), SINGULAR) for n in ("asin", "acos", "acosh")),
    *(
        Excuse(name, "second", at(0), "at a kink of the first derivative it is that of one side")
        for name in ("elu", "selu", "celu", "elu 2", "celu 2")
    ),
    Excuse("softplus", "second", at(20), "at the threshold it is that of the side below"),
    Excuse("softplus 2", "second", at(10), "at the threshold it is that of the side below"),
    Excuse("hardswish", "value", at(-INF), "0 as documented: PyTorch multiplies −∞ by 0"),
    Excuse("hardswish", "value", beyond(1e308), "x as documented: PyTorch's product overflows"),
    Excuse("hardsigmoid", "first", everywhere, "PyTorch rounds 1/6 to float32", "float64"),
    Excuse("mish", "second", beyond(1e38), "∞ · 0: a product of x with itself overflows"),
    Excuse("gelu tanh", "first second", beyond(1e17), "∞ · 0, as PyTorch's in float32", "float32"),
    Excuse("gelu tanh", "second", beyond(1e100), "∞ · 0: x⁴ overflows"),
    Excuse("lgamma", "first second", lambda x: (x == np.floor(x)) & (x <= 0), "at a pole"),
    Excuse("lgamma", "first second", at(INF), "∞ − ∞"),
    Excuse("lgamma", "second", lambda x: np.abs(x) < 1e-36, "1 / x overflows"),
    Excuse("lgamma", "value", at(5e-324, -5e-324), "1 / x overflows: ∞ for 744.4"),
    Excuse("digamma", "value first second", lambda x: (x == np.floor(x)) & (x <= 0), "at a pole"),
    Excuse("digamma", "second", lambda x: np.abs(x) < 1e-36, "1 / x overflows"),
    Excuse("nan_to_num", "value", np.isinf, "the largest number of float32", "float32"),
    *(
        Excuse(
            f"pow {p}",
            "value first second",
            lambda x: (x == -INF) | ((x == 0) & np.signbit(x)),
            "roots: −0 counts as 0, and −∞ has none",
        )
        for p in (-1.5, -0.5, 0.5, 1.5, 2.5)
    ),
]

# --- functions of two numbers -----------------------------------------------------------------

SOME = [0.0, 0.5, 1.0, 2.0, 3.0, 5e-324, 1e-310, 1e-12, 1e20, 1e200, 1.7e308, INF]
PAIRS = np.array([*SOME, *(-s for s in SOME), NAN])


def _halved(function: Function) -> Function:
    """A function of two halves of an axis as one of both."""
    return lambda x, y: function(td.stack([x, y], -1)).squeeze(-1)


BINARY: dict[str, Row] = {
    **same("add sub mul div floor_divide remainder pow maximum minimum atan2 hypot logaddexp"),
    **same("eq ne lt le gt ge"),
    "lerp": Row(lambda x, y: td.lerp(x, y, 0.25), lambda x, y: torch.lerp(x, y, 0.25)),
    "addcmul": Row(lambda x, y: td.addcmul(x, x, y), lambda x, y: torch.addcmul(x, x, y)),
    "addcdiv": Row(lambda x, y: td.addcdiv(x, x, y), lambda x, y: torch.addcdiv(x, x, y)),
    "where": Row(lambda x, y: td.where(x > y, x, y), lambda x, y: torch.where(x > y, x, y)),
    "masked_fill": Row(
        lambda x, y: td.masked_fill(x, y > 0, 2.0), lambda x, y: x.masked_fill(y > 0, 2.0)
    ),
    "clamp by a tensor": Row(lambda x, y: td.clamp(x, y), lambda x, y: x.clamp(y)),
    "clamp below one": Row(lambda x, y: td.clamp(x, max=y), lambda x, y: x.clamp(max=y)),
    "prelu by a tensor": Row(
        lambda x, y: td.where(x > 0, x, x * y), lambda x, y: torch.where(x > 0, x, x * y)
    ),
    "swiglu": Row(_halved(td.swiglu), lambda x, y: F.silu(x) * y),
    "geglu": Row(_halved(td.geglu), lambda x, y: F.gelu(x) * y),
    "glu": Row(_halved(td.glu), lambda x, y: F.glu(torch.stack([x, y], -1)).squeeze(-1)),
}


def _far(*x: Array) -> Array:
    """Any operand whose square overflows or is denormal."""
    return np.logical_or.reduce([(np.abs(a) > 1e18) | ((np.abs(a) < 1e-18) & (a != 0)) for a in x])


BINARY_EXCUSES = [
    *(Excuse(n, "second", _far, "its terms overflow or vanish") for n in BINARY),
    Excuse("div", "first", lambda x, y: np.abs(y) < 1e-300, "1 / y overflows"),
    Excuse("addcdiv", "first", _far, "its terms overflow or vanish"),
    Excuse("addcdiv", "second", lambda x, y: y == 0, "1 / 0: PyTorch's is NaN"),
    Excuse("addcmul", "value", lambda x, y: np.abs(x) > 1e308, "x² overflows or not, by the order"),
    Excuse("remainder", "value", _far, "PyTorch's is NaN where x / y overflows"),
    Excuse("hypot", "value", lambda x, y: np.isnan(x) | np.isnan(y), "NaN stays NaN beside ∞"),
    Excuse("hypot", "first", _far, "x / hypot, rounded where that is denormal or overflows"),
    Excuse("pow", "first", lambda x, y: (x == 0) & np.signbit(x), "−0 counts as 0"),
]
