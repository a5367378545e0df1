"""Values and two derivatives where random samples never are: 0, −0, ties, ±tiny, ±huge, ±∞, NaN."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

import public_names
import treadle as td
from axis_points import AXIS, LINES, first
from axis_points import EXCUSES as AXIS_EXCUSES
from loss_points import LOSSES, LossRow
from point_coverage import ELSEWHERE
from point_rows import (
    BINARY,
    BINARY_EXCUSES,
    PAIRS,
    POINTS,
    SIGNED,
    UNARY,
    UNARY_EXCUSES,
    Array,
    Excuse,
    Function,
    Smooth,
    in_digits,
)
from test_special_points import CASES as SPECIAL
from treadle import losses, nn
from treadle.nn import activations, normalisation
from treadle.runtime.cpu.native import processor

WHAT = ("value", "first", "second", "forward")
# Relative errors of compositions, and how much of a number of size 1 the derivatives may miss.
RELATIVE = {"float64": 1e-12, "float32": 4e-6}
ABSOLUTE = {"float64": 1e-14, "float32": 4e-6}
AVX2 = "x86-64-v3"

pytestmark = pytest.mark.filterwarnings("ignore::treadle.UnreachedWarning")


def derivatives(function: Function, count: int = 1) -> Function:
    """Value, first derivatives, second derivatives and a forward one, of elementwise functions."""

    def call(*x: td.Tensor) -> list[td.Tensor]:
        every = tuple(range(count))

        def total(*x: td.Tensor) -> td.Tensor:
            return function(*x).sum()

        def slopes(i: int) -> Function:
            return lambda *x: td.grad(total, i)(*x).sum()

        value = function(*x)
        if not value.dtype.is_float:
            return [value]
        ones = tuple(td.ones(t.shape, t.dtype) for t in x)
        first = [td.grad(total, i)(*x) for i in every]
        second = [td.grad(slopes(i), i)(*x) for i in every]
        return [value, *first, *second, td.jvp(function, x, ones)[1]]

    return call


def expected(function: Function | Smooth, x: Sequence[Array]) -> list[Array]:
    """The reference's value, and its first and second derivatives."""
    if isinstance(function, Smooth):
        found = expected(function.beyond, x)
        inside = np.abs(x[0]) <= function.limit
        for values, formula in zip(found, function[:3], strict=True):
            digits = in_digits(formula, x[0][inside])
            # PyTorch's at poles, and for the signs of zeros.
            keeps = np.isnan(digits) | (digits == 0) & (values[inside] == 0)
            values[inside] = np.where(keeps, values[inside], digits)
        return found
    leaves = [torch.tensor(a, dtype=torch.float64, requires_grad=True) for a in x]
    value = function(*leaves)
    found = [value.detach().numpy().copy()]
    if not value.is_floating_point():
        return found
    first = [_slope(value, t) for t in leaves]
    second = [None if g is None else _slope(g, t) for g, t in zip(first, leaves, strict=True)]
    both = [*first, *second]
    return [
        *found,
        *(0 * value.detach().numpy() if g is None else g.numpy(force=True) for g in both),
    ]


def _slope(value: torch.Tensor, leaf: torch.Tensor) -> torch.Tensor | None:
    if not value.requires_grad:
        return None
    try:
        return torch.autograd.grad(value.sum(), leaf, create_graph=True, allow_unused=True)[0]
    except RuntimeError as error:
        if "not implemented" not in str(error):
            raise
        return None


def numbers(points: Array, dtype: str) -> Array:
    """Distinct points of a dtype, zeros of both signs and NaN."""
    with np.errstate(over="ignore"):
        x = np.unique(points.astype(dtype))
    parts = [x[x < 0], [-0.0, 0.0], x[x > 0], [np.nan]]
    return np.concatenate(parts).astype(dtype)


def differences(
    name: str,
    found: Sequence[Any],
    theirs: Sequence[Array],
    x: Sequence[Array],
    excuses: Sequence[Excuse],
    rounding: float = 0,
) -> Iterator[str]:
    """Points at which a row is not its reference, but for those that are excused."""
    dtype, count = str(x[0].dtype), len(x)
    mine = [e for e in excuses if e.row == name and dtype in e.dtypes.split()]
    labels = ["value", *("first",) * count, *("second",) * count]
    with np.errstate(all="ignore"):
        rounded = [t.astype(dtype).astype(np.float64) for t in theirs]
    # Where there is no value there is no derivative.
    has_none = np.isnan(rounded[0]) | np.isnan(np.asarray(found[0], np.float64))
    for ours, other, label in zip(found, rounded, labels, strict=False):
        ours = np.asarray(ours, np.float64)
        allowed = _excused(mine, label, x)
        is_value = label == "value"
        # Compositions may lose results that are denormal.
        slack = float(np.finfo(dtype).tiny) + rounding * np.finfo(dtype).eps
        wrong = _differ(ours, other, dtype, slack if is_value else ABSOLUTE[dtype]) & ~allowed
        if not is_value:  # nor is a NaN of PyTorch's a reference for one
            wrong &= ~has_none & ~(np.isnan(other) & np.isfinite(ours))
        yield from _complaints(f"{name}: {label}", wrong, ours, other, x)
        if label == "value":
            is_zero = (ours == 0) & (other == 0) & (np.signbit(ours) != np.signbit(other))
            signs = is_zero & (name in SIGNED)
            yield from _complaints(f"{name}: sign of zero", signs, ours, other, x)


def _excused(excuses: Sequence[Excuse], label: str, x: Sequence[Array]) -> Array:
    found = np.zeros(x[0].shape, bool)
    wide = [a.astype(np.float64) for a in x]
    for excuse in excuses:
        if label in excuse.what.split():
            found |= excuse.where(*wide)
    return found


def _differ(ours: Array, other: Array, dtype: str, absolute: float) -> Array:
    with np.errstate(all="ignore"):
        is_near = np.abs(ours - other) <= RELATIVE[dtype] * np.abs(other) + absolute
    both_nan = np.isnan(ours) & np.isnan(other)
    return ~((ours == other) | both_nan | (is_near & np.isfinite(other)))


def _complaints(
    label: str, wrong: Array, ours: Array, other: Array, x: Sequence[Array]
) -> Iterator[str]:
    for i in np.flatnonzero(wrong)[:8]:
        point = ", ".join(f"{a[i]:.6g}" for a in x)
        yield f"{label} at {point} is {ours[i]:.9g}, not {other[i]:.9g}"


def check_forward(name: str, found: Sequence[Array], x: Array) -> None:
    """Forward mode beside reverse mode, where that has a number."""
    has_number = np.isfinite(found[0]) & np.isfinite(found[1])
    wrong = _differ(found[-1], found[1], "float64", ABSOLUTE["float64"]) & has_number
    assert not list(_complaints(f"{name}: forward mode", wrong, found[-1], found[1], [x]))


# Functions of one number


@cache
def references(name: str, dtype: str) -> tuple[Array, ...]:
    x = numbers(POINTS, dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = expected(UNARY[name].theirs, [x.astype(np.float64)])
    return (*found, x)


@pytest.mark.parametrize("name", UNARY)
def test_one_number_eagerly(name: str) -> None:
    *theirs, x = references(name, "float64")
    found = [t.numpy() for t in derivatives(UNARY[name].ours)(td.tensor(x))]
    found[1:], forward = found[1:3], found[3:]
    wrong = list(differences(name, found, theirs, [x], UNARY_EXCUSES, UNARY[name].rounding))
    assert not wrong, "\n".join(wrong)
    if forward:
        check_forward(name, [*found, *forward], x)


@pytest.mark.parametrize(
    ("dtype", "target"),
    [
        ("float32", "native"),
        pytest.param("float32", AVX2, marks=pytest.mark.slow),
        pytest.param("float64", "native", marks=pytest.mark.slow),
    ],
)
def test_one_number_compiled(dtype: str, target: str) -> None:
    """All functions and their derivatives in one program."""
    if target == AVX2 and not processor().has("avx2"):
        pytest.skip("the processor has no AVX2")
    *_, x = references("exp", dtype)

    def every(x: td.Tensor) -> dict[str, list[td.Tensor]]:
        return {name: derivatives(row.ours)(x)[:3] for name, row in UNARY.items()}

    options = td.CompileOptions(target=target)
    found = td.compile(every, td.Spec(x.shape, dtype), device="cpu", options=options)(x)
    wrong = []
    for name in UNARY:
        *theirs, _ = references(name, dtype)
        wrong += differences(name, found[name], theirs, [x], UNARY_EXCUSES, UNARY[name].rounding)
    assert not wrong, "\n".join(wrong)


# Functions of two numbers


@cache
def pair_references(name: str, dtype: str) -> tuple[Array, ...]:
    x, y = (a.ravel() for a in np.meshgrid(*[numbers(PAIRS, dtype)] * 2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = expected(BINARY[name].theirs, [x.astype(np.float64), y.astype(np.float64)])
    return (*found, x, y)


@pytest.mark.parametrize("name", BINARY)
def test_two_numbers_eagerly(name: str) -> None:
    *theirs, x, y = pair_references(name, "float64")
    found = derivatives(BINARY[name].ours, 2)(td.tensor(x), td.tensor(y))
    found = [t.numpy() for t in found][: len(theirs)]
    wrong = list(differences(name, found, theirs, [x, y], BINARY_EXCUSES))
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("target", ["native", pytest.param(AVX2, marks=pytest.mark.slow)])
def test_two_numbers_compiled(target: str) -> None:
    if target == AVX2 and not processor().has("avx2"):
        pytest.skip("the processor has no AVX2")
    *_, x, y = pair_references("add", "float32")

    def every(x: td.Tensor, y: td.Tensor) -> dict[str, list[td.Tensor]]:
        return {name: derivatives(row.ours, 2)(x, y)[:3] for name, row in BINARY.items()}

    options = td.CompileOptions(target=target)
    specs = [td.Spec(x.shape, "float32")] * 2
    found = td.compile(every, *specs, device="cpu", options=options)(x, y)
    wrong = []
    for name in BINARY:
        *theirs, _, _ = pair_references(name, "float32")
        wrong += differences(name, found[name], theirs, [x, y], BINARY_EXCUSES)
    assert not wrong, "\n".join(wrong)


# Functions of rows


def lines(name: str, label: str) -> Array:
    """Which lines of a row are compared."""
    skipped, what, _ = AXIS_EXCUSES.get(name, ("", "", ""))
    names = [n.replace("_", " ") for n in skipped.split()] if what == label else []
    assert set(names) <= set(LINES)
    return np.array([n not in names for n in LINES])


def unlike_lines(
    label: str, ours: Array, other: Array, chosen: Array, relative: float, absolute: float
) -> list[str]:
    ours = np.asarray(ours, np.float64).reshape(len(LINES), -1)
    other = np.asarray(other, np.float64).reshape(len(LINES), -1)
    with np.errstate(all="ignore"):
        is_near = np.abs(ours - other) <= relative * np.abs(other) + absolute
    both_nan = np.isnan(ours) & np.isnan(other)
    is_same = (ours == other) | both_nan | (is_near & np.isfinite(other))
    if label != "value":
        is_same |= np.isnan(other) & np.isfinite(ours)
    wrong = ~is_same.all(1) & chosen
    return [f"{label} of {n}: {a}, not {b}" for n, a, b, w in zip(LINES, ours, other, wrong) if w]


def weighted_sum(found: td.Tensor) -> td.Tensor:
    """Elements of a line count differently, so that none stands for another."""
    weights = np.arange(1.0, found.size / len(LINES) + 1).reshape(found.shape[1:])
    return (found * weights).sum()


def of_pytorch(name: str, x: Array) -> tuple[Array, Array | None, list[Array]]:
    """The value, the gradient and columns of the Hessian, as far as there are any."""
    leaf = torch.tensor(x, requires_grad=True)
    value = AXIS[name].theirs(leaf)
    if not value.requires_grad:
        return value.numpy(), None, []
    weights = np.arange(1.0, value.numel() / len(LINES) + 1).reshape(tuple(value.shape[1:]))
    total = (value * torch.tensor(weights)).sum()
    (gradient,) = torch.autograd.grad(total, leaf, create_graph=True)
    columns = []
    for i in range(3 if gradient.requires_grad else 0):
        found = _column(gradient, leaf, i)
        columns += [] if found is None else [found]
    return value.detach().numpy(), gradient.detach().numpy(), columns


def _column(gradient: torch.Tensor, leaf: torch.Tensor, i: int) -> Array | None:
    try:
        (found,) = torch.autograd.grad(
            gradient[:, i].sum(), leaf, retain_graph=True, allow_unused=True
        )
    except RuntimeError:  # PyTorch has no second derivative
        return None
    return np.zeros(leaf.shape) if found is None else found.numpy(force=True)


@pytest.mark.parametrize("name", AXIS)
def test_rows_eagerly(name: str) -> None:
    ours, x = AXIS[name].ours, np.array([*LINES.values()])
    value, gradient, columns = of_pytorch(name, x)
    found = ours(td.tensor(x)).numpy()
    wrong = unlike_lines("value", found, value, lines(name, "value"), 1e-11, 1e-12)

    def slope(x: td.Tensor) -> td.Tensor:
        return td.grad(lambda x: weighted_sum(ours(x)))(x)

    has_value = ~np.isnan(found.astype(np.float64)).reshape(len(x), -1).any(1)
    if gradient is not None:
        chosen = has_value & lines(name, "gradient")
        wrong += unlike_lines(
            "gradient", slope(td.tensor(x)).numpy(), gradient, chosen, 1e-9, 1e-12
        )
    for i, column in enumerate(columns):
        second = td.grad(lambda x, i=i: slope(x)[:, i].sum())(td.tensor(x)).numpy()
        chosen = has_value & lines(name, "Hessian") & lines(name, "gradient")
        wrong += unlike_lines("Hessian", second, column, chosen, 1e-9, 1e-11)
    assert not wrong, "\n".join(wrong)


SHORT = (
    "sum prod max min mean median var std logsumexp softmax log_softmax cumsum cumprod cummax cummin "
    "logcumsumexp sort argmax argmin any all argsort norm quantile diff layer_norm rms_norm"
).split()
REFUSED = {("logsumexp", 0): "the logarithm of no terms, which PyTorch has as −∞, is refused"}


@pytest.mark.parametrize("length", [0, 1])
@pytest.mark.parametrize("name", SHORT)
def test_rows_of_one_element_or_none(name: str, length: int) -> None:
    """As PyTorch's, or refused where that refuses it."""
    row, x = AXIS[name], np.full((2, length), -3.0)
    leaf = torch.tensor(x, requires_grad=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            value = row.theirs(leaf)
    except (IndexError, RuntimeError):
        value = None
    if value is None or (name, length) in REFUSED:
        with pytest.raises(td.TreadleError):
            row.ours(td.tensor(x))
        return
    value_held = value.numpy(force=True)
    np.testing.assert_allclose(row.ours(td.tensor(x)).numpy(), value_held, rtol=1e-12)
    if value.requires_grad and value.numel():
        (slope,) = torch.autograd.grad(value.sum(), leaf)
        found = td.grad(lambda x: row.ours(x).sum())(td.tensor(x)).numpy()
        if np.isfinite(value_held).all():
            np.testing.assert_allclose(found, slope.numpy(), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("target", ["native", pytest.param(AVX2, marks=pytest.mark.slow)])
def test_rows_compiled(target: str) -> None:
    """Values and gradients of all rows in float32, in one program."""
    if target == AVX2 and not processor().has("avx2"):
        pytest.skip("the processor has no AVX2")
    with np.errstate(over="ignore"):
        x = np.array([*LINES.values()]).astype(np.float32)

    def both(name: str, x: td.Tensor) -> list[td.Tensor]:
        value = AXIS[name].ours(x)
        if not value.dtype.is_float:
            return [value]
        return [value, td.grad(lambda x: weighted_sum(AXIS[name].ours(x)))(x)]

    def every(x: td.Tensor) -> dict[str, list[td.Tensor]]:
        return {name: both(name, x) for name in AXIS}

    options = td.CompileOptions(target=target)
    found = td.compile(every, td.Spec(x.shape), device="cpu", options=options)(x)
    wrong = []
    for name, (value, *gradient) in found.items():
        wide, slopes, _ = of_pytorch(name, x.astype(np.float64))
        with np.errstate(over="ignore"):
            wide, slopes = (None if t is None else t.astype(np.float32) for t in (wide, slopes))
        chosen = lines(name, "value") & ~np.isin([*LINES], COMPILED_EXCUSES.get(name, [[]])[0])
        wrong += [f"{name}: {t}" for t in unlike_lines("value", value, wide, chosen, 1e-5, 1e-5)]
        chosen &= ~np.isnan(np.asarray(value, np.float64)).reshape(len(x), -1).any(1)
        chosen &= lines(name, "gradient")
        for mine in gradient if slopes is not None else []:
            texts = unlike_lines("gradient", mine, slopes, chosen, 1e-4, 1e-5)
            wrong += [f"{name}: {text}" for text in texts]
    assert not wrong, "\n".join(wrong)


# Lines that a compiled program in float32 has otherwise, and why.
COMPILED_EXCUSES: dict[str, tuple[list[str], str]] = {
    "logsumexp": (["large", "∞", "two ∞", "±∞"], "all NaN, where eagerly the term of ∞ is: ∞ / ∞"),
    "logcumsumexp": (["far"], "1e6 and 1e6 + 1 are 16 ulp apart: gradients have 3 digits"),
    "squared_distances": (["large"], "1e200 is ∞ in float32, and one matmul has ∞ − ∞"),
    **{f"segment_{n}": (["denormal"], "1e-310 is 0 in float32: a tie") for n in ("max", "min")},
    "max_unpool": (["large"], "1e200 is ∞ in float32: 0 for infinite values"),
    "scatter_max": (["denormal"], "1e-310 is 0 in float32: a tie"),
}


# Integers

INTEGER_DTYPES = ("int8", "uint8", "int32", "int64")
INTEGER_UNARY = "abs neg sign square bitwise_not logical_not"
INTEGER_BINARY = (
    "add sub mul maximum minimum floor_divide remainder eq ne lt le gt ge bitwise_and bitwise_or "
    "bitwise_xor logical_and logical_or logical_xor"
)
INTEGER_ROWS = "max min argmax argmin sort argsort cummax cummin"


def extremes(dtype: str) -> Array:
    """The ends, their neighbours, 0 and the numbers about it, two of each."""
    range_ = np.iinfo(dtype)
    near = [n for n in (-2, -1, 0, 1, 2, 3) if n >= range_.min]
    ends = [range_.min, range_.min + 1, range_.max // 2, range_.max - 1, range_.max]
    return np.array([*ends, *near, *ends], dtype)


def integer_cases(dtype: str) -> tuple[dict[str, Function], list[Array]]:
    """Ours and PyTorch's of the same operands by name; a divisor is not 0, nor −1 for the least."""
    x, y = (a.ravel() for a in np.meshgrid(extremes(dtype), extremes(dtype)))
    divisor = np.where((y == 0) | ((y == -1) & (x == np.iinfo(dtype).min)), 3, y).astype(dtype)
    operands = [x, y, divisor]

    def call(module: Any, name: str) -> Function:
        function = getattr(module, name)
        if name in INTEGER_UNARY.split():
            return lambda x, y, d: function(x)
        if name in ("floor_divide", "remainder"):
            return lambda x, y, d: function(x, d)
        if name in INTEGER_ROWS.split():
            n = len(extremes(dtype))
            rest = {"stable": True} if module is torch and "sort" in name else {}
            return lambda x, y, d: first(function(x.reshape(n, n), dim=-1, **rest))
        return lambda x, y, d: function(x, y)

    names = f"{INTEGER_UNARY} {INTEGER_BINARY} {INTEGER_ROWS}".split()
    return {n: (call(td, n), call(torch, n)) for n in names}, operands


@pytest.mark.parametrize("dtype", INTEGER_DTYPES)
def test_integers(dtype: str) -> None:
    """Eagerly and in one compiled program: all of them wrap as PyTorch's do."""
    cases, operands = integer_cases(dtype)

    def every(*operands: td.Tensor) -> dict[str, td.Tensor]:
        return {name: ours(*operands) for name, (ours, _) in cases.items()}

    eager = every(*map(td.tensor, operands))
    specs = [td.Spec(a.shape, dtype) for a in operands]
    compiled = td.compile(every, *specs, device="cpu")(*operands)
    for name, (_, theirs) in cases.items():
        other = theirs(*map(torch.tensor, operands)).numpy()
        np.testing.assert_array_equal(eager[name].numpy(), other, f"{name} of {dtype}")
        np.testing.assert_array_equal(compiled[name], other, f"{name} of {dtype}, compiled")


# Layers

ACTIVATIONS = {
    "CELU": "celu", "ELU": "elu", "GELU": "gelu", "Hardshrink": "hardshrink",
    "Hardsigmoid": "hardsigmoid", "Hardswish": "hardswish", "Hardtanh": "hardtanh",
    "LeakyReLU": "leaky_relu", "LogSigmoid": "log_sigmoid", "Mish": "mish", "ReLU": "relu",
    "ReLU6": "relu6", "SELU": "selu", "SiLU": "silu", "Sigmoid": "sigmoid",
    "Softplus": "softplus", "Softshrink": "softshrink", "Softsign": "softsign", "Tanh": "tanh",
    "Tanhshrink": "tanhshrink",
}  # fmt: skip
NORM_LAYERS = {
    "LayerNorm": (lambda m: m.LayerNorm(4), (3, 4)),
    "RMSNorm": (lambda m: m.RMSNorm(4, eps=1e-6), (3, 4)),
    "BatchNorm1d": (lambda m: m.BatchNorm1d(4), (3, 4)),
    "BatchNorm2d": (lambda m: m.BatchNorm2d(2), (2, 2, 2, 2)),
    "BatchNorm3d": (lambda m: m.BatchNorm3d(2), (2, 2, 1, 2, 2)),
    "GroupNorm": (lambda m: m.GroupNorm(2, 4), (2, 4, 3)),
    "InstanceNorm1d": (lambda m: m.InstanceNorm1d(2), (2, 2, 4)),
    "InstanceNorm2d": (lambda m: m.InstanceNorm2d(2), (2, 2, 2, 2)),
    "InstanceNorm3d": (lambda m: m.InstanceNorm3d(2), (2, 2, 1, 2, 2)),
    "LocalResponseNorm": (lambda m: m.LocalResponseNorm(2), (2, 3, 4)),
}
FILLS = {
    "zeros": lambda n: np.zeros(n),
    "equal": lambda n: np.full(n, 3.0),
    "far": lambda n: 1e6 + np.arange(n) % 3,
    "small": lambda n: 1e-12 * (np.arange(n) % 3 - 1.0),
    "NaN": lambda n: np.where(np.arange(n) == 1, np.nan, np.arange(n) * 1.0),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_an_activation_is_its_function(name: str) -> None:
    x = td.tensor(numbers(POINTS, "float64"))
    ours = getattr(nn, name)()(x).numpy()
    np.testing.assert_array_equal(ours, getattr(td, ACTIVATIONS[name])(x).numpy())


@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("name", NORM_LAYERS)
def test_a_norm_layer(name: str, fill: str) -> None:
    """In training: values and gradients of rows with hardly a variance, or none."""
    make, shape = NORM_LAYERS[name]
    x = FILLS[fill](int(np.prod(shape))).reshape(shape)
    weights = np.arange(x.size).reshape(shape) / x.size
    theirs = make(torch.nn).double()
    leaf = torch.tensor(x, requires_grad=True)
    value = theirs(leaf)
    total = (value * torch.tensor(weights)).sum()
    (gradient,) = torch.autograd.grad(total, leaf, create_graph=True)

    ours = make(nn)
    values = {n: v.astype(np.float64) for n, v in ours.init().items()}

    def call(x: td.Tensor) -> td.Tensor:
        return ours.apply(values, x, training=True)

    found = call(td.tensor(x)).numpy()
    np.testing.assert_allclose(found, value.detach().numpy(), rtol=1e-6, atol=1e-9)
    if fill != "NaN":
        scale = max(1.0, gradient.abs().max().item())
        found = td.grad(lambda x: (call(x) * weights).sum())(td.tensor(x)).numpy()
        np.testing.assert_allclose(found, gradient.detach().numpy(), rtol=1e-6, atol=1e-8 * scale)


# Losses

# Where PyTorch has no number that could be a reference, and where it has another, with the reason.
LOSS_EXCUSES = {
    ("kl_div", "other"): "PyTorch's slope for a target of 0 is NaN",
    ("poisson_nll of rates", "other"): "PyTorch's slope for a target of 0 is NaN",
    ("bce", "other"): "PyTorch holds logarithms above −100 in the value and not in the slope",
}


# Points that are ties in float32 and, with the same inputs, none in float64.
ROUNDED_TIES = {"satisfaction", "margin_ranking 1.0 1.0", "margin_ranking -1.0 1.0"}


def loss_arrays(name: str) -> tuple[td.Tensor, ...]:
    return tuple(td.tensor(np.asarray(a, np.float64)) for a in LOSSES[name].arrays)


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss(name: str) -> None:
    """The value, the gradients of both arrays, and the whole Hessian of the first, in two modes."""
    row = LOSSES[name]
    ours = loss_arrays(name)
    theirs = [torch.tensor(t.numpy(), requires_grad=True) for t in ours]
    value, gradients = _of_pytorch(row, theirs)
    wrong = list(_unlike(row, "value", row.ours(*ours).numpy(), value))
    found = td.grad(row.ours, (0, 1))(*ours)
    for label, mine, other in zip(("input", "other"), found, gradients, strict=True):
        if other is not None and (name, label) not in LOSS_EXCUSES:
            wrong += _unlike(row, label, mine.numpy(), other.detach().numpy())
    if row.has_second:
        wrong += _hessians(row, ours, theirs[0], gradients[0])
    assert not wrong, "\n".join(wrong)


def _of_pytorch(
    row: LossRow, leaves: list[torch.Tensor]
) -> tuple[Array, list[torch.Tensor | None]]:
    """The value and gradients; None for what PyTorch takes no gradient of."""
    try:
        value = row.theirs(*leaves)
    except RuntimeError:  # a target that takes none
        leaves[1] = leaves[1].detach()
        value = row.theirs(*leaves)
    found = [
        torch.autograd.grad(value, t, create_graph=row.has_second, retain_graph=True,
                            allow_unused=True)[0] if t.requires_grad else None
        for t in leaves
    ]  # fmt: skip
    return value.detach().numpy(), found


def _hessians(
    row: LossRow, ours: tuple[td.Tensor, ...], leaf: torch.Tensor, gradient: torch.Tensor | None
) -> Iterator[str]:
    """Column by column; where elements have a loss each, all columns at once."""
    x, y = ours
    assert gradient is not None
    size = int(np.prod(x.shape))
    directions = np.eye(size).reshape(size, *x.shape)
    for e in directions if size <= 32 else np.ones((1, *x.shape)):
        second = None
        if gradient.requires_grad:
            second = torch.autograd.grad(
                (gradient * torch.tensor(e)).sum(), leaf, retain_graph=True, allow_unused=True
            )[0]
        other = np.zeros(x.shape) if second is None else second.numpy(force=True)

        def slope(x: td.Tensor) -> td.Tensor:
            return td.grad(row.ours)(x, y)

        def along(x: td.Tensor, e: Array = e) -> td.Tensor:
            return (slope(x) * e).sum()

        yield from _unlike(row, "Hessian", td.grad(along)(x).numpy(), other)
        forward = td.jvp(slope, (x,), (td.tensor(e),))[1].numpy()
        yield from _unlike(row, "Hessian in forward mode", forward, other)


def _unlike(row: LossRow, label: str, ours: Array, other: Array) -> Iterator[str]:
    ours, other = np.broadcast_arrays(np.asarray(ours), np.asarray(other))
    with np.errstate(all="ignore"):
        is_near = np.abs(ours - other) <= row.relative * np.abs(other) + row.absolute
    wrong = ~((ours == other) | is_near | (np.isnan(other) & np.isfinite(ours)))
    points = [np.broadcast_to(a, ours.shape) if np.ndim(a) <= ours.ndim else a for a in row.arrays]
    for place in list(np.argwhere(wrong))[:6]:
        at = tuple(place)
        where = ", ".join(f"{a[at]:.6g}" for a in points) if ours.ndim else ""
        yield f"{label} at {at} ({where}) is {ours[at]:.9g}, not {other[at]:.9g}"


@pytest.mark.slow
def test_losses_compiled() -> None:
    """Losses and gradients in float32, in one program, beside the same in float64."""
    arrays = {name: loss_arrays(name) for name in LOSSES}

    def every(arrays: dict[str, list[td.Tensor]]) -> dict[str, td.Tensor]:
        return {name: td.grad(LOSSES[name].ours)(*of) for name, of in arrays.items()}

    narrow = {n: [t.numpy().astype(np.float32) for t in of] for n, of in arrays.items()}
    found = td.compile(every, narrow, device="cpu")(narrow)
    wrong = []
    for name in narrow.keys() - ROUNDED_TIES:
        of = narrow[name]
        wide = td.grad(LOSSES[name].ours)(*(td.tensor(a.astype(np.float64)) for a in of)).numpy()
        with np.errstate(over="ignore"):
            other = wide.astype(np.float32).astype(np.float64)
        scale = np.abs(other[np.isfinite(other)]).max(initial=1.0)
        row = LOSSES[name]._replace(relative=2e-4, absolute=2e-6 * min(scale, 1e3))
        wrong += [f"{name}: {text}" for text in _unlike(row, "input", found[name], other)]
    assert not wrong, "\n".join(wrong)


def test_every_loss_has_a_row() -> None:
    names = {n for n in dir(losses) if callable(getattr(losses, n)) and not n.startswith("_")}
    assert names == {name.split()[0] for name in LOSSES}


def test_every_function_has_points() -> None:
    """Each public function has a row, or a reason to have none; no name is left that is gone."""
    rows = [*UNARY, *BINARY, *AXIS, *(c.name for c in SPECIAL)]
    covered = {name.split()[0] for name in rows}
    reasons = [name for names in ELSEWHERE.values() for name in names.split()]
    assert len(set(reasons)) == len(reasons)
    functions = set(public_names.functions())
    assert functions - covered - set(reasons) == set()
    assert set(reasons) - functions == set()
    assert covered & set(reasons) == set()


def test_every_excuse_has_a_row() -> None:
    assert {e.row for e in UNARY_EXCUSES} <= set(UNARY)
    assert {e.row for e in BINARY_EXCUSES} <= set(BINARY)
    assert set(AXIS_EXCUSES) | set(COMPILED_EXCUSES) <= set(AXIS)
    assert {name for name, _ in LOSS_EXCUSES} | ROUNDED_TIES <= set(LOSSES)


def test_every_activation_and_norm_is_here() -> None:
    """Modules of the two files, but for those with arguments, which are functions' rows."""
    with_arguments = {"GLU", "LogSoftmax", "PReLU", "RReLU", "Softmax", "Softmin", "Threshold"}
    assert set(public_names.offered(activations)) == set(ACTIVATIONS) | with_arguments
    norms = {n for n, m in public_names.offered(normalisation).items() if inspect.isclass(m)}
    assert norms <= set(NORM_LAYERS)


def test_a_bool_is_no_axis_but_in_variances() -> None:
    x = td.tensor([1.0, 2.0, 4.0])
    assert x.var(False).item() == pytest.approx(np.var([1.0, 2.0, 4.0]))
    for function in (td.sum, td.max, td.softmax, td.cumsum):
        with pytest.raises(td.AxisError, match="axis False"):
            function(x, False)
