"""Elementwise functions, with NumPy's broadcasting and PyTorch's promotion."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from treadle.base import dtypes
from treadle.base.errors import ArgumentError, DTypeError
from treadle.base.numbers import check_choice
from treadle.frontend.coerce import (
    align,
    as_tensor,
    broadcast_to,
    common_dtype,
    common_shape,
    constant,
    is_weak,
    spread,
)
from treadle.frontend.coerce import cast as cast_to
from treadle.frontend.scopes import bind1
from treadle.frontend.spelling import takes_dim
from treadle.frontend.tensor import Operand, Tensor
from treadle.ir.op import NONE, Op
from treadle.ir.ops import elementwise as e
from treadle.ir.types import as_dtype


def _binary(name: str, op: Op, x: Operand, y: Operand, dtype: dtypes.DType | None = None) -> Tensor:
    chosen = dtype or common_dtype((x, y))
    wide = _wide_enough(chosen, x, y)
    result = bind1(op, NONE, *align(name, x, y, dtype=wide))
    return cast_to(result, chosen) if result.dtype is wide else result


def _wide_enough(dtype: dtypes.DType, *values: Operand) -> dtypes.DType:
    """float32 where a number is too large for a narrow float: only the result is rounded to it.

    So x / 1e6 in float16 is no zero, as in PyTorch.
    """
    if not dtype.is_narrow:
        return dtype
    is_large = any(is_weak(v) and _is_beyond(v, dtype.largest) for v in values)
    return dtypes.float32 if is_large else dtype


def _is_beyond(number: Any, largest: float) -> bool:
    exact = number.item() if isinstance(number, np.generic) else number
    return largest < exact < math.inf or -math.inf < exact < -largest


def numeric_dtype(*values: Operand) -> dtypes.DType:
    """bool counts as int32, as a sum of flags should."""
    dtype = common_dtype(values)
    return dtypes.int32 if dtype is dtypes.bool_ else dtype


def _numeric(name: str, op: Op, x: Operand, y: Operand) -> Tensor:
    return _binary(name, op, x, y, numeric_dtype(x, y))


def real_dtype(*values: Operand) -> dtypes.DType:
    dtype = common_dtype(values)
    return dtype if dtype.is_float else dtypes.float32


def as_real(x: Operand) -> Tensor:
    """Integers and bool become float32."""
    return cast_to(as_tensor(x), real_dtype(x))


def _real(op: Op, x: Operand) -> Tensor:
    """A float function; integers become float32 first."""
    return bind1(op, NONE, as_real(x))


@takes_dim
def add(x: Operand, y: Operand, alpha: float = 1) -> Tensor:
    """x + alpha · y."""
    return _numeric("add", e.ADD, x, _scaled("add", x, y, alpha))


@takes_dim
def sub(x: Operand, y: Operand, alpha: float = 1) -> Tensor:
    """x − alpha · y."""
    return _numeric("sub", e.SUB, x, _scaled("sub", x, y, alpha))


def _scaled(name: str, x: Operand, y: Operand, alpha: float) -> Operand:
    if not is_weak(alpha):
        raise ArgumentError(name, f"alpha is {alpha!r}", "It is a number; multiply by a tensor.")
    if alpha == 1:
        return y
    if isinstance(alpha, float) and not common_dtype((x, y)).is_float:
        raise DTypeError(name, f"alpha = {alpha} with integers", "Give a whole number, or cast.")
    return mul(y, alpha)


@takes_dim
def mul(x: Operand, y: Operand) -> Tensor:
    """x · y, elementwise."""
    return _numeric("mul", e.MUL, x, y)


@takes_dim
def div(x: Operand, y: Operand, rounding_mode: str | None = None) -> Tensor:
    """x / y; integers become float32 first.

    `rounding_mode` "floor" is `floor_divide`, "trunc" rounds towards 0: integers stay integers.
    """
    if rounding_mode is None:
        return _binary("div", e.DIV, x, y, real_dtype(x, y))
    check_choice("div", "rounding_mode", rounding_mode, ("floor", "trunc"))
    low = floor_divide(x, y)
    if rounding_mode == "floor":
        return low
    if low.dtype.is_float:
        ratio = div(x, y)
        return where(lt(ratio, 0), ceil(ratio), floor(ratio))
    a, b = align("div", x, y, dtype=low.dtype)
    is_below = logical_xor(lt(a, 0), lt(b, 0))
    is_between = ne(sub(a, mul(low, b)), 0)
    return add(low, cast_to(logical_and(is_below, is_between), low.dtype))


@takes_dim
def floor_divide(x: Operand, y: Operand) -> Tensor:
    """⌊x / y⌋, for floats and integers."""
    return _numeric("floor_divide", e.FLOORDIV, x, y)


@takes_dim
def remainder(x: Operand, y: Operand) -> Tensor:
    """x − y · ⌊x / y⌋: the sign of y, as torch.remainder."""
    return _numeric("remainder", e.MOD, x, y)


def pow(x: Operand, y: Operand) -> Tensor:
    """x to the power y, of floats, or of a number as the exponent. `td.pow` takes integers too."""
    exponent = y.item() if isinstance(y, np.generic) else y
    if isinstance(exponent, (int, float)):
        special = _static_power(cast_to(as_tensor(x), numeric_dtype(x, y)), exponent)
        if special is not None:
            return special
    return _binary("pow", e.POW, x, y, real_dtype(x, y))


def _static_power(x: Tensor, exponent: float) -> Tensor | None:
    if exponent == 0.5:
        return sqrt(x)
    if exponent == -0.5:
        return rsqrt(x)
    if exponent == 0:
        return constant(1, x.shape, x.dtype)
    if exponent not in (-4, -3, -2, -1, 1, 2, 3, 4):
        if x.dtype.is_float or not isinstance(exponent, int):
            return None
        if exponent < 0:
            raise DTypeError("pow", f"{x.type} to the power {exponent}", "Cast to a float first.")
        return _repeated_squares(x, exponent)
    # A product of 1 / x, not 1 over a product: slopes where x is 0 or infinite are no NaN.
    whole = int(exponent)
    return _product_of(div(1.0, x), -whole) if whole < 0 else _product_of(x, whole)


def _repeated_squares(x: Tensor, exponent: int) -> Tensor:
    """x to a whole power of at least 1, by its bits."""
    if exponent == 1:
        return x
    half = _repeated_squares(mul(x, x), exponent // 2)
    return mul(half, x) if exponent % 2 else half


def _product_of(x: Tensor, times: int) -> Tensor:
    """x multiplied with itself, 1 to 4 times."""
    if times == 1:
        return x
    square = mul(x, x)
    if times == 2:
        return square
    return mul(square, x if times == 3 else square)


def neg(x: Operand) -> Tensor:
    """−x."""
    return bind1(e.NEG, NONE, as_tensor(x))


def abs(x: Operand) -> Tensor:
    """|x|; the gradient at 0 is 0."""
    return bind1(e.ABS, NONE, as_tensor(x))


def magnitude(x: Tensor) -> Tensor:
    """|x| with the slope 1 at 0, for functions of it that are smooth there in x.

    The slope 0 of `abs` would be lost to their derivatives of any order.
    """
    return where(lt(x, 0), neg(x), x)


def sign(x: Operand) -> Tensor:
    """−1, 0 or 1."""
    return bind1(e.SIGN, NONE, as_tensor(x))


def is_whole(x: Operand) -> bool:
    """Whether x has a dtype of integers, which rounding leaves as they are."""
    return as_tensor(x).dtype.is_integer


def floor(x: Operand) -> Tensor:
    """The largest whole number that is not above x; integers stay as they are."""
    return as_tensor(x) if is_whole(x) else _real(e.FLOOR, x)


def ceil(x: Operand) -> Tensor:
    """The smallest whole number that is not below x; integers stay as they are."""
    return as_tensor(x) if is_whole(x) else neg(floor(neg(as_real(x))))


@takes_dim
def round(x: Operand, decimals: int = 0) -> Tensor:
    """The nearest whole number; halves go to the even one. Integers stay as they are.

    With `decimals` the nearest number of so many decimal places; −1 are tens, −2 hundreds.
    """
    if is_whole(x) and decimals == 0:
        return as_tensor(x)
    real = as_real(x)
    if decimals:
        return _round_to(real, decimals)
    low = floor(real)
    rest = sub(real, low)
    is_odd = eq(remainder(low, 2.0), 1.0)
    up = logical_or(gt(rest, 0.5), logical_and(eq(rest, 0.5), is_odd))
    return where(up, add(low, 1.0), low)


def _round_to(x: Tensor, decimals: int) -> Tensor:
    if isinstance(decimals, bool) or not isinstance(decimals, (int, np.integer)):
        raise ArgumentError("round", f"decimals is {decimals!r}", "It is a whole number.")
    if decimals > 0:
        factor = 10.0 ** int(decimals)
        return div(round(mul(x, factor)), factor)
    factor = 10.0 ** -int(decimals)
    return mul(round(div(x, factor)), factor)


def exp(x: Operand) -> Tensor:
    """eˣ."""
    return _real(e.EXP, x)


def expm1(x: Operand) -> Tensor:
    """eˣ − 1, exact for small x too."""
    real = as_real(x)
    above = exp(real)
    # The difference loses what tanh(x / 2) · (eˣ + 1), which is the same, keeps.
    exact = mul(tanh(mul(real, 0.5)), add(above, 1))
    return exact_near_0(real, sub(above, 1), exact)


def exact_near_0(x: Tensor, plain: Tensor, exact: Tensor) -> Tensor:
    """A formula whose derivatives are right, with the value of another where |x| < 1."""
    return add(plain, stop_gradient(where(lt(abs(x), 1), sub(exact, plain), 0)))


def log(x: Operand) -> Tensor:
    """The natural logarithm."""
    return _real(e.LOG, x)


def log1p(x: Operand) -> Tensor:
    """log(1 + x), exact for small x too."""
    real = as_real(x)
    # Rounding 1 + x loses what x − ((1 + x) − 1) shows: the first order of it is added back. That
    # also keeps the gradient 1 / (1 + x). From |x| = 1 on nothing is lost.
    small = where(lt(abs(real), 1), real, 0)
    above = add(small, 1)
    lost = sub(small, sub(above, 1))
    return add(log(add(real, 1)), div(lost, above))


def log2(x: Operand) -> Tensor:
    """The logarithm to base 2."""
    return mul(log(x), 1 / math.log(2))


def sqrt(x: Operand) -> Tensor:
    """√x."""
    return _real(e.SQRT, x)


def rsqrt(x: Operand) -> Tensor:
    """1 / √x."""
    return _real(e.RSQRT, x)


def square(x: Operand) -> Tensor:
    """x²."""
    return mul(x, x)


def reciprocal(x: Operand) -> Tensor:
    """1 / x."""
    return div(1.0, x)


def sin(x: Operand) -> Tensor:
    """The sine of x radians."""
    return _real(e.SIN, x)


def cos(x: Operand) -> Tensor:
    """The cosine of x radians."""
    return _real(e.COS, x)


def tanh(x: Operand) -> Tensor:
    """The hyperbolic tangent."""
    return _real(e.TANH, x)


def erf(x: Operand) -> Tensor:
    """The error function."""
    return _real(e.ERF, x)


def atan2(y: Operand, x: Operand) -> Tensor:
    """The angle of the point (x, y) from the x axis, between −π and π; the gradient at 0 is 0."""
    return _binary("atan2", e.ATAN2, y, x, real_dtype(y, x))


@takes_dim
def maximum(x: Operand, y: Operand) -> Tensor:
    """The larger of two, elementwise; at a tie each side gets half the gradient."""
    return cast_to(_numeric("maximum", e.MAX, x, y), common_dtype((x, y)))


@takes_dim
def minimum(x: Operand, y: Operand) -> Tensor:
    """The smaller of two, elementwise; at a tie each side gets half the gradient."""
    return cast_to(_numeric("minimum", e.MIN, x, y), common_dtype((x, y)))


def clamp(x: Operand, min: Operand | None = None, max: Operand | None = None) -> Tensor:
    """x limited to [min, max]. At a bound the gradient is x's, as in PyTorch.

    Numbers are rounded to x's dtype first: what they say of an element is what a device finds.
    """
    result = as_tensor(x)
    min, max = (_held(bound, result.dtype) for bound in (min, max))
    if min is None and max is None:
        raise ArgumentError("clamp", "neither min nor max is given", "Give at least one bound.")
    if min is not None:
        result = where(_or_nan(lt(result, min), min), min, result)
    if max is not None:
        result = where(_or_nan(gt(result, max), max), max, result)
    return result


def _or_nan(is_beyond: Tensor, bound: Operand) -> Tensor:
    """A condition, true also where a bound is NaN: the result is NaN there."""
    if not common_dtype((bound,)).is_float or (isinstance(bound, float) and bound == bound):
        return is_beyond
    return logical_or(is_beyond, isnan(bound))


def _held(bound: Operand | None, dtype: dtypes.DType) -> Operand | None:
    """A plain number as a dtype of floats holds it."""
    if not isinstance(bound, float) or not dtype.is_float:
        return bound
    with np.errstate(over="ignore"):
        return float(np.asarray(bound).astype(dtype.numpy))


def eq(x: Operand, y: Operand) -> Tensor:
    """x = y, elementwise."""
    return _binary("eq", e.EQ, x, y)


def ne(x: Operand, y: Operand) -> Tensor:
    """x ≠ y, elementwise."""
    return logical_not(_binary("ne", e.EQ, x, y))


def lt(x: Operand, y: Operand) -> Tensor:
    """x < y, elementwise."""
    return _numeric("lt", e.LT, x, y)


def le(x: Operand, y: Operand) -> Tensor:
    """x ≤ y, elementwise."""
    return _numeric("le", e.LE, x, y)


def gt(x: Operand, y: Operand) -> Tensor:
    """x > y, elementwise."""
    a, b = align("gt", x, y, dtype=numeric_dtype(x, y))
    return bind1(e.LT, NONE, b, a)


def ge(x: Operand, y: Operand) -> Tensor:
    """x ≥ y, elementwise."""
    a, b = align("ge", x, y, dtype=numeric_dtype(x, y))
    return bind1(e.LE, NONE, b, a)


def isnan(x: Operand) -> Tensor:
    """Whether x is not a number."""
    return ne(x, x)


def isfinite(x: Operand) -> Tensor:
    """Whether x is neither infinite nor NaN."""
    return lt(abs(as_real(x)), math.inf)


def _bool(x: Operand) -> Tensor:
    return cast_to(as_tensor(x), dtypes.bool_)


def logical_not(x: Operand) -> Tensor:
    """Not x; numbers count as true where they are not 0."""
    return bind1(e.NOT, NONE, _bool(x))


def logical_and(x: Operand, y: Operand) -> Tensor:
    """x and y; numbers count as true where they are not 0."""
    return _binary("logical_and", e.AND, _bool(x), _bool(y))


def logical_or(x: Operand, y: Operand) -> Tensor:
    """x or y; numbers count as true where they are not 0."""
    return _binary("logical_or", e.OR, _bool(x), _bool(y))


def logical_xor(x: Operand, y: Operand) -> Tensor:
    """Exactly one of x and y; numbers count as true where they are not 0."""
    return _binary("logical_xor", e.XOR, _bool(x), _bool(y))


def bitwise_not(x: Operand) -> Tensor:
    """Each bit inverted; bool: not."""
    return bind1(e.NOT, NONE, as_tensor(x))


def bitwise_and(x: Operand, y: Operand) -> Tensor:
    """Bit by bit; bool: and."""
    return _binary("bitwise_and", e.AND, x, y)


def bitwise_or(x: Operand, y: Operand) -> Tensor:
    """Bit by bit; bool: or."""
    return _binary("bitwise_or", e.OR, x, y)


def bitwise_xor(x: Operand, y: Operand) -> Tensor:
    """Bit by bit; bool: xor."""
    return _binary("bitwise_xor", e.XOR, x, y)


def where(condition: Operand, x: Operand, y: Operand) -> Tensor:
    """x where the condition is true, else y. The branch not taken gets no gradient."""
    flags = as_tensor(condition)
    if flags.dtype is not dtypes.bool_:
        raise DTypeError(
            "where",
            f"the condition is {flags.type}, not bool",
            "Compare first, for instance x > 0.",
        )
    shape = common_shape("where", (flags, x, y))
    dtype = common_dtype((x, y))
    return bind1(
        e.WHERE, NONE, broadcast_to(flags, shape), spread(x, shape, dtype), spread(y, shape, dtype)
    )


@takes_dim
def cast(x: Operand, dtype: object) -> Tensor:
    """Another dtype. Float to integer truncates; to bool asks ≠ 0."""
    return cast_to(as_tensor(x), as_dtype(dtype))


def stop_gradient(x: Operand) -> Tensor:
    """x, with a gradient of zero."""
    return bind1(e.STOP_GRADIENT, NONE, as_tensor(x))
