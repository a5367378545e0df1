"""Floats of 8 bits as their bits and as float, by integer arithmetic, as processors have none.

Casts round to nearest even and saturate: what is larger than the largest becomes that, infinities
too; NaN stays NaN. GPUs convert so too (`cvt.rn.satfinite`).
"""

from __future__ import annotations

from treadle.base.dtypes import DType, float8_e5m2
from treadle.codegen.llvm.emitter import Function, Reg, number, vector, width_of

_QUIET_NAN = 0x7FC00000


def _bias(dtype: DType) -> int:
    """What exponents are stored with: half of their range."""
    return 15 if dtype is float8_e5m2 else 7


def _quantum(dtype: DType) -> float:
    """The least denormal: all are multiples of it."""
    return 2.0 ** (1 - _bias(dtype) - dtype.fraction_bits)


def _shift(dtype: DType) -> int:
    """Bits of a float's fraction that are rounded away."""
    return 23 - dtype.fraction_bits


def float8_rounded(f: Function, x: Reg, dtype: DType) -> Reg:
    """Floats rounded to what a dtype of 8 bits holds, still as floats."""
    ints, shift = vector("i32", width_of(x.type)), _shift(dtype)
    size = f.intrinsic("minnum", f.intrinsic("fabs", x), dtype.largest)
    bits = f.convert("bitcast", size, ints)
    odd = f.binary("and", f.binary("lshr", bits, shift), 1)
    moved = f.binary("add", f.binary("add", bits, odd), (1 << (shift - 1)) - 1)
    normal = f.convert("bitcast", f.binary("and", moved, -(1 << shift)), x.type)
    # A float of this size has denormals in its lowest bits: adding it rounds to them.
    large = number(_quantum(dtype) * 2.0**23, x.type)
    denormal = f.binary("fsub", f.binary("fadd", size, large), large)
    is_denormal = f.compare("fcmp olt", size, number(2.0 ** (1 - _bias(dtype)), x.type))
    found = f.intrinsic("copysign", f.select(is_denormal, denormal, normal), x)
    return f.select(f.compare("fcmp uno", x, x), x, found)


def float8_bits(f: Function, x: Reg, dtype: DType) -> Reg:
    """The bits of floats that a dtype of 8 bits holds."""
    width, shift = width_of(x.type), _shift(dtype)
    ints = vector("i32", width)
    bits = f.convert("bitcast", x, ints)
    sign = f.binary("and", f.binary("lshr", bits, 24), 0x80)
    size = f.binary("and", bits, 0x7FFFFFFF)
    normal = f.binary("sub", f.binary("lshr", size, shift), (127 - _bias(dtype)) << (23 - shift))
    count = f.binary("fmul", f.intrinsic("fabs", x), 1 / _quantum(dtype))
    is_denormal = f.compare("fcmp olt", count, float(1 << dtype.fraction_bits))
    whole = f.convert("fptoui", f.select(is_denormal, count, number(0.0, x.type)), ints)
    found = f.select(is_denormal, whole, normal)
    found = f.select(f.compare("fcmp uno", x, x), number(0x7F, ints), found)
    return f.convert("trunc", f.binary("or", found, sign), vector("i8", width))


def float8_value(f: Function, bits: Reg, dtype: DType) -> Reg:
    """The floats that are stored as some bits."""
    width = width_of(bits.type)
    floats, ints = vector("float", width), vector("i32", width)
    wide = f.convert("zext", bits, ints)
    sign = f.binary("shl", f.binary("and", wide, 0x80), 24)
    size = f.binary("and", wide, 0x7F)
    raised = f.binary("shl", size, _shift(dtype))
    normal = f.binary("add", raised, (127 - _bias(dtype)) << 23)
    denormal = f.binary("fmul", f.convert("uitofp", size, floats), _quantum(dtype))
    is_denormal = f.compare("icmp ult", size, 1 << dtype.fraction_bits)
    found = f.select(is_denormal, f.convert("bitcast", denormal, ints), normal)
    if dtype is float8_e5m2:
        found = f.select(f.compare("icmp eq", size, 0x7C), number(0x7F800000, ints), found)
        is_nan = f.compare("icmp ugt", size, 0x7C)
    else:
        is_nan = f.compare("icmp eq", size, 0x7F)
    found = f.select(is_nan, number(_QUIET_NAN, ints), found)
    return f.convert("bitcast", f.binary("or", found, sign), floats)
