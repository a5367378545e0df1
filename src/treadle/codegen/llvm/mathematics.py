"""Elementary functions of vectors: float32 from our own polynomials, float64 from libm.

On one processor every function is the same arithmetic for every width, so that a lane's result
depends on neither its place nor its neighbours. Errors and methods are in docs/mathematics.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from treadle.base.dtypes import DType, float32
from treadle.codegen.llvm.coefficients import (
    ATAN,
    COS,
    ERF,
    ERF_LONG_PIECES,
    ERF_PIECES,
    ERF_SLOPE,
    EXP,
    EXP2,
    HALF_PI,
    LN2,
    LOG,
    LOG2,
    SIN,
)
from treadle.codegen.llvm.emitter import (
    Function,
    Reg,
    element_of,
    element_type,
    suffix,
    vector,
    width_of,
)
from treadle.codegen.llvm.lanes import Lanes
from treadle.kernel.machine import Machine

PLAIN = Machine(1)  # what functions use where nothing else is said; their width is their own

# Adding 1.5 · 2²³ rounds a float32 to an integer and leaves that integer in the lowest bits: no
# conversion, which would be undefined for NaN.
ROUND32, ROUND64 = 1.5 * 2.0**23, 1.5 * 2.0**52
ONE32, ONE64 = 127 << 23, 1023 << 52  # the bits of 1.0
SQRT_HALF = 0x3F3504F3  # the bits of √½
SIGN32 = -(1 << 31)
SMALLEST_NORMAL = 2.0**-126

EXP_RANGE = (-104.0, 89.0)  # beyond it exp is 0 and ∞
TANH_END = 9.1  # from here on tanh rounds to 1
ERF_END = 3.93  # from here on erf rounds to 1
Rows = tuple[tuple[float, ...], ...]
# Polynomials and the step between them, by how many numbers a register has. The last piece reaches
# beyond ERF_END, where it rounds to 1.
PIECES = {16: (ERF_PIECES, 0.25390625), 8: (ERF_LONG_PIECES, 0.53125)}
POW_RANGE = (-200.0, 200.0)  # powers of two beyond it are 0 and ∞ in float32
SIN_END = 2.0**15  # from here on n · HALF_PI needs more parts


def apply(function: Function, name: str, *operands: Reg, machine: Machine = PLAIN) -> Reg:
    """Append the instructions of a function: within a loop, its constants stay in registers."""
    assert len(operands) == arity(name), f"{name} of {len(operands)} operands"
    lanes = Lanes(function, machine.permutes, machine.has_fma)
    if element_of(operands[0].type) == "double" and name != "rsqrt":
        return _each_lane(lanes, name, *operands)
    return _BODIES[name](lanes, *operands)


def define(name: str, width: int, dtype: DType = float32, machine: Machine = PLAIN) -> Function:
    """An internal function of `arity(name)` vectors of a width; 1 is the element itself."""
    type_ = vector(element_type(dtype), width)
    parameters = [Reg(type_, f"%x{i}") for i in range(arity(name))]
    function = Function(function_name(name, width, dtype), parameters, type_)
    result = apply(function, name, *parameters, machine=machine)
    function.do(f"ret {result}")
    return function


def function_name(name: str, width: int, dtype: DType = float32) -> str:
    """treadle.exp.v8f32, treadle.exp.f64."""
    return f"treadle.{name}.{suffix(vector(element_type(dtype), width))}"


def arity(name: str) -> int:
    return 2 if name in ("pow", "atan2") else 1


def _exp(lanes: Lanes, x: Reg) -> Reg:
    low, high = EXP_RANGE
    shifted, expm1 = _reduced_exp(lanes, lanes.at_least(lanes.at_most(x, high), low))
    # 2ⁿ need not be a float32 where the result is one, or is denormal: half of n at a time.
    half = lanes.integer("ashr", shifted, 1)
    other = lanes.integer("sub", shifted, half)
    scale = _power_of_two(lanes, half)
    return lanes.mul(lanes.fma(expm1, scale, scale), _power_of_two(lanes, other))


def _reduced_exp(lanes: Lanes, x: Reg) -> tuple[Reg, Reg]:
    """x = n ln 2 + r: bits with n at their lower end, and eʳ − 1."""
    shifted = lanes.fma(x, 1 / math.log(2), ROUND32)
    n = lanes.sub(shifted, ROUND32)
    r = lanes.fma(n, -LN2[1], lanes.fma(n, -LN2[0], x))
    rest = lanes.polynomial(EXP, r)
    return lanes.bits(shifted), lanes.fma(lanes.mul(r, r), rest, r)


def _power_of_two(lanes: Lanes, n: Reg) -> Reg:
    """2ⁿ; only the lowest bits of n count."""
    exponent = lanes.integer("shl", n, 23)
    return lanes.floats(lanes.integer("add", exponent, ONE32))


def _expm1(lanes: Lanes, x: Reg) -> Reg:
    """eˣ − 1 = 2ⁿ (eʳ − 1) + (2ⁿ − 1), for n that float32 has room for."""
    shifted, expm1 = _reduced_exp(lanes, x)
    scale = _power_of_two(lanes, shifted)
    return lanes.fma(expm1, scale, lanes.sub(scale, 1.0))


def _tanh(lanes: Lanes, x: Reg) -> Reg:
    """e / (e + 2) with e = exp(2 |x|) − 1: nothing cancels, even near 0."""
    magnitude = lanes.at_most(lanes.absolute(x), TANH_END)
    e = _expm1(lanes, lanes.add(magnitude, magnitude))
    return lanes.with_sign_of(lanes.div(e, lanes.add(e, 2.0)), x)


def _erf(lanes: Lanes, x: Reg) -> Reg:
    """1 − exp(−t) with t = −log(erfc |x|), which is nearly a polynomial and 0 at 0."""
    if lanes.permutes:
        return _erf_in_pieces(lanes, x, *PIECES[lanes.permutes])
    magnitude = lanes.at_most(lanes.absolute(x), ERF_END)
    rest = lanes.mul(magnitude, lanes.polynomial(ERF, magnitude))
    t = lanes.fma(magnitude, ERF_SLOPE, rest)
    return lanes.with_sign_of(_expm1(lanes, lanes.negative(t)), x)


def _erf_in_pieces(lanes: Lanes, x: Reg, pieces: Rows, step: float) -> Reg:
    """A polynomial about the nearest multiple of a step, whose coefficients lanes look up."""
    magnitude = lanes.at_most(lanes.absolute(x), ERF_END)
    shifted = lanes.fma(magnitude, 1 / step, ROUND32)
    piece = lanes.bits(shifted)
    rest = lanes.fma(lanes.sub(shifted, ROUND32), -step, magnitude)
    *lower, value = (lanes.looked_up(table, piece) for table in zip(*pieces, strict=True))
    for coefficient in reversed(lower):
        value = lanes.fma(value, rest, coefficient)
    return lanes.with_sign_of(value, x)


def _split(lanes: Lanes, x: Reg) -> tuple[Reg, Reg]:
    """x = 2ᵉ (1 + f) with √½ ≤ 1 + f < √2, for positive x: the integer e, and f without error."""
    is_tiny = lanes.compare("fcmp olt", x, SMALLEST_NORMAL)
    normal = lanes.select(is_tiny, lanes.mul(x, 2.0**23), x)
    bits = lanes.bits(normal)
    exponent = lanes.integer("ashr", lanes.integer("sub", bits, SQRT_HALF), 23)
    mantissa = lanes.integer("sub", bits, lanes.integer("shl", exponent, 23))
    shift = lanes.select(is_tiny, lanes.constant(-23, bits), lanes.constant(0, bits))
    return lanes.integer("add", exponent, shift), lanes.sub(lanes.floats(mantissa), 1.0)


def _log(lanes: Lanes, x: Reg) -> Reg:
    exponent, f = _split(lanes, x)
    e = lanes.float_of(exponent)
    square = lanes.mul(f, f)
    cube_part = lanes.mul(lanes.mul(square, f), lanes.polynomial(LOG, f))
    rest = lanes.fma(square, -0.5, lanes.fma(e, LN2[1], cube_part))
    value = lanes.fma(e, LN2[0], lanes.add(f, rest))
    return _log_edges(lanes, x, value)


def _log_edges(lanes: Lanes, x: Reg, value: Reg) -> Reg:
    is_finite = lanes.compare("fcmp olt", x, math.inf)
    is_negative = lanes.compare("fcmp olt", x, 0.0)
    is_zero = lanes.compare("fcmp oeq", x, 0.0)
    value = lanes.select(is_finite, value, x)  # ∞ and NaN
    value = lanes.select(is_negative, lanes.constant(math.nan, x), value)
    return lanes.select(is_zero, lanes.constant(-math.inf, x), value)


def _rsqrt(lanes: Lanes, x: Reg) -> Reg:
    """Two correctly rounded operations; reciprocal estimates differ between processors."""
    return lanes.div(lanes.constant(1.0, x), lanes.sqrt(x))


def _sin(lanes: Lanes, x: Reg) -> Reg:
    quarters, r = _reduced_angle(lanes, x)
    # The odd half turns change the sign, and so does x.
    sign = lanes.integer("xor", lanes.bits(x), lanes.integer("shl", quarters, 30))
    return _far_angles(lanes, "sin", x, _circle(lanes, quarters, r, sign))


def _cos(lanes: Lanes, x: Reg) -> Reg:
    """cos x = sin(|x| + π/2): one quarter turn further."""
    quarters, r = _reduced_angle(lanes, x)
    further = lanes.integer("add", quarters, 1)
    sign = lanes.integer("shl", further, 30)
    return _far_angles(lanes, "cos", x, _circle(lanes, further, r, sign))


def _reduced_angle(lanes: Lanes, x: Reg) -> tuple[Reg, Reg]:
    """|x| = n π/2 + r with |r| ≤ π/4: bits with n at their lower end, and r; NaN at ∞."""
    magnitude = lanes.absolute(x)
    shifted = lanes.fma(magnitude, 2 / math.pi, ROUND32)
    n = lanes.sub(shifted, ROUND32)
    r = magnitude
    for part in HALF_PI:
        r = lanes.fma(n, -part, r)
    return lanes.bits(shifted), r


def _circle(lanes: Lanes, quarters: Reg, r: Reg, sign: Reg) -> Reg:
    """The sine of r and some quarter turns; the sign is the top bit of `sign`."""
    square = lanes.mul(r, r)
    sine = lanes.fma(lanes.mul(square, r), lanes.polynomial(SIN, square), r)
    fourth_part = lanes.mul(lanes.mul(square, square), lanes.polynomial(COS, square))
    cosine = lanes.add(lanes.fma(square, -0.5, fourth_part), 1.0)
    is_odd = lanes.compare("icmp ne", lanes.integer("and", quarters, 1), 0)
    magnitude = lanes.bits(lanes.select(is_odd, cosine, sine))
    return lanes.floats(lanes.integer("xor", magnitude, lanes.integer("and", sign, SIGN32)))


def _far_angles(lanes: Lanes, name: str, x: Reg, near: Reg) -> Reg:
    """Replaces the lanes beyond SIN_END, if there are any, by what libm says in float64."""
    function = lanes.function
    far = lanes.compare("fcmp ogt", lanes.absolute(x), SIN_END)
    slow, done, before = function.fresh("slow"), function.fresh("done"), function.block
    function.branch(lanes.any(far), slow, done)
    function.label(slow)
    exact = lanes.narrowed(_each_lane(lanes, name, lanes.widened(x)))
    mixed = lanes.select(far, exact, near)
    slow_end = function.block
    function.jump(done)
    function.label(done)
    sources = f"[ {near.text}, %{before} ], [ {mixed.text}, %{slow_end} ]"
    return function.value(x.type, f"phi {x.type} {sources}")


def _pow(lanes: Lanes, x: Reg, y: Reg) -> Reg:
    """|x|ʸ in float64, then the sign and the cases that have no logarithm, as C's pow."""
    magnitude = lanes.absolute(x)
    power = _exp2(lanes, lanes.mul(_log2(lanes, magnitude), lanes.widened(y)))
    return _pow_edges(lanes, x, y, lanes.narrowed(power))


def _log2(lanes: Lanes, x: Reg) -> Reg:
    """In float64, of positive float32s: 2 artanh(s) with s = f / (f + 2)."""
    exponent, fraction = _split(lanes, x)
    is_finite = lanes.compare("fcmp olt", x, math.inf)
    is_zero = lanes.compare("fcmp oeq", x, 0.0)
    e = lanes.select(is_finite, lanes.float_of(exponent), x)  # ∞ and NaN
    e = lanes.select(is_zero, lanes.constant(-math.inf, x), e)
    f = lanes.widened(fraction)
    s = lanes.div(f, lanes.add(f, 2.0))
    return lanes.fma(s, lanes.polynomial(LOG2, lanes.mul(s, s)), lanes.widened(e))


def _exp2(lanes: Lanes, x: Reg) -> Reg:
    """In float64; far beyond the range of float32 it stays there."""
    low, high = POW_RANGE
    x = lanes.at_least(lanes.at_most(x, high), low)
    shifted = lanes.add(x, ROUND64)
    r = lanes.sub(x, lanes.sub(shifted, ROUND64))
    exponent = lanes.integer("shl", lanes.bits(shifted), 52)
    scale = lanes.floats(lanes.integer("add", exponent, ONE64))
    return lanes.mul(lanes.fma(r, lanes.polynomial(EXP2, r), 1.0), scale)


def _pow_edges(lanes: Lanes, x: Reg, y: Reg, power: Reg) -> Reg:
    both = lanes.function.binary
    is_whole = lanes.compare("fcmp oeq", y, lanes.floor(y))  # ∞ too
    half = lanes.mul(y, 0.5)
    is_odd = both("and", is_whole, lanes.compare("fcmp une", half, lanes.floor(half)))
    sign = lanes.select(is_odd, x, lanes.constant(1.0, x))
    signed = lanes.with_sign_of(power, sign)
    below_zero = lanes.compare("fcmp olt", x, 0.0)
    is_finite = lanes.compare("fcmp ogt", x, -math.inf)
    is_root = both("xor", is_whole, lanes.constant(True, is_whole))
    is_imaginary = both("and", both("and", below_zero, is_finite), is_root)
    # Of two NaNs, arithmetic would give on either, depending on the width.
    has_nan = lanes.compare("fcmp uno", x, y)
    is_invalid = both("or", is_imaginary, has_nan)
    value = lanes.select(is_invalid, lanes.constant(math.nan, x), signed)
    return _pow_ones(lanes, x, y, value)


def _pow_ones(lanes: Lanes, x: Reg, y: Reg, value: Reg) -> Reg:
    """1ʸ = x⁰ = 1 even for NaN, and (−1)^±∞ = 1."""
    either = lanes.function.binary
    is_one = lanes.compare("fcmp oeq", x, 1.0)
    is_power_zero = lanes.compare("fcmp oeq", y, 0.0)
    is_minus_one = lanes.compare("fcmp oeq", x, -1.0)
    is_endless = lanes.compare("fcmp oeq", lanes.absolute(y), math.inf)
    alternates = either("and", is_minus_one, is_endless)
    gives_one = either("or", either("or", is_one, is_power_zero), alternates)
    return lanes.select(gives_one, lanes.constant(1.0, x), value)


def _atan2(lanes: Lanes, y: Reg, x: Reg) -> Reg:
    """The arc tangent of the smaller of |x| and |y| over the larger, then the octant."""
    along, across = lanes.absolute(x), lanes.absolute(y)
    is_steep = lanes.compare("fcmp ogt", across, along)
    small, large = lanes.select(is_steep, along, across), lanes.select(is_steep, across, along)
    ratio = lanes.div(small, large)
    ratio = lanes.select(lanes.compare("fcmp oeq", large, 0.0), small, ratio)  # 0 / 0 is 0
    is_diagonal = lanes.compare("fcmp oeq", small, math.inf)  # ∞ / ∞ is 1
    ratio = lanes.select(is_diagonal, lanes.constant(1.0, x), ratio)
    square = lanes.mul(ratio, ratio)
    angle = lanes.fma(lanes.mul(square, ratio), lanes.polynomial(ATAN, square), ratio)
    is_behind = lanes.compare("icmp slt", lanes.bits(x), 0)  # −0 too
    turned = _turned(lanes, is_steep, is_behind, angle)
    has_nan = lanes.compare("fcmp uno", x, y)
    signed = lanes.with_sign_of(turned, y)
    return lanes.select(has_nan, lanes.constant(math.nan, x), signed)


def _turned(lanes: Lanes, is_steep: Reg, is_behind: Reg, angle: Reg) -> Reg:
    """π/2 ± angle if steep, else π − angle if behind: π in two parts, for one rounding is left."""
    is_less = lanes.function.binary("xor", is_steep, is_behind)
    value = lanes.select(is_less, lanes.negative(angle), angle)
    for part in HALF_PI[1::-1]:
        none, one, two = (lanes.constant(quarters * part, angle) for quarters in (0, 1, 2))
        quarter = lanes.select(is_steep, one, lanes.select(is_behind, two, none))
        value = lanes.add(value, quarter)
    return value


def _each_lane(lanes: Lanes, name: str, *operands: Reg) -> Reg:
    """libm's function of float64, called for one lane after the other."""
    function, width = lanes.function, width_of(operands[0].type)
    parameters = ", ".join("double" for _ in operands)
    function.declarations.add(f"declare double @{name}({parameters})")
    if width == 1:
        return function.call(name, "double", *operands)
    result = Reg(operands[0].type, "poison")
    for lane in range(width):
        scalars = [function.extract(x, lane) for x in operands]
        result = function.insert(result, function.call(name, "double", *scalars), lane)
    return result


_BODIES: dict[str, Callable[..., Reg]] = {
    "exp": _exp,
    "log": _log,
    "tanh": _tanh,
    "erf": _erf,
    "sin": _sin,
    "cos": _cos,
    "rsqrt": _rsqrt,
    "pow": _pow,
    "atan2": _atan2,
}
NAMES = tuple(_BODIES)
