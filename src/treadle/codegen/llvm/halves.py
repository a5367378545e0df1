"""float16 as 16 bits and as float: one instruction, or integer arithmetic where there is none.

LLVM would call a function of the compiler's own library, which a process need not have. Both ways
give the same bits: correctly rounded, ties to even, denormals kept, NaN quiet with what fits of its
payload.
"""

from __future__ import annotations

from treadle.codegen.llvm.emitter import Function, Reg, number, vector, width_of

_SIGN = 0x8000
_BIAS = 127 - 15  # between the exponents of float32 and float16
_TOO_LARGE = (127 + 16) << 23  # the bits of 2¹⁶: from here on only ∞ and NaN
_LEAST_NORMAL = (127 - 14) << 23  # the bits of 2⁻¹⁴
_INFINITY, _QUIET = 0x7C00, 0x200
# A float of this exponent has float16's denormals in its lowest bits: adding it rounds to them.
_HALF = 126 << 23


def half_bits(f: Function, x: Reg, has_half: bool) -> Reg:
    """Floats rounded to float16, as its bits."""
    width = width_of(x.type)
    if has_half:
        half = f.convert("fptrunc", x, vector("half", width))
        return f.convert("bitcast", half, vector("i16", width))
    ints = vector("i32", width)
    bits = f.convert("bitcast", x, ints)
    sign = f.binary("and", f.binary("lshr", bits, 16), _SIGN)
    size = f.binary("and", bits, 0x7FFFFFFF)
    fine = f.select(
        f.compare("icmp ult", size, _LEAST_NORMAL),
        _denormal_bits(f, size, x.type),
        _normal_bits(f, size),
    )
    is_large = f.compare("icmp uge", size, _TOO_LARGE)
    found = f.select(is_large, _endless_bits(f, size), fine)
    return f.convert("trunc", f.binary("or", found, sign), vector("i16", width))


def _normal_bits(f: Function, size: Reg) -> Reg:
    """To the nearest, ties to even; what rounds up beyond the largest becomes ∞ by itself."""
    odd = f.binary("and", f.binary("lshr", size, 13), 1)
    moved = f.binary("add", size, 0xFFF - (_BIAS << 23))
    return f.binary("lshr", f.binary("add", moved, odd), 13)


def _denormal_bits(f: Function, size: Reg, floats: str) -> Reg:
    shift = f.convert("bitcast", number(_HALF, size.type), floats)
    rounded = f.binary("fadd", f.convert("bitcast", size, floats), shift)
    return f.binary("sub", f.convert("bitcast", rounded, size.type), _HALF)


def _endless_bits(f: Function, size: Reg) -> Reg:
    """∞, or a quiet NaN."""
    payload = f.binary("and", f.binary("lshr", size, 13), 0x3FF)
    nan = f.binary("or", payload, _INFINITY | _QUIET)
    is_nan = f.compare("icmp ugt", size, 0x7F800000)
    return f.select(is_nan, nan, _INFINITY)


def half_value(f: Function, bits: Reg, has_half: bool) -> Reg:
    """float16's bits as floats, which hold all of its values."""
    width = width_of(bits.type)
    floats, ints = vector("float", width), vector("i32", width)
    if has_half:
        half = f.convert("bitcast", bits, vector("half", width))
        return f.convert("fpext", half, floats)
    wide = f.convert("zext", bits, ints)
    sign = f.binary("shl", f.binary("and", wide, _SIGN), 16)
    size = f.binary("shl", f.binary("and", wide, 0x7FFF), 13)
    normal = f.binary("add", size, _BIAS << 23)
    # ∞ and NaN have the largest exponent there too.
    endless = f.binary("add", normal, _BIAS << 23)
    is_nan = f.compare("icmp ugt", size, _INFINITY << 13)
    quiet = f.binary("or", endless, _QUIET << 13)
    is_endless = f.compare("icmp uge", size, _INFINITY << 13)
    is_denormal = f.compare("icmp ult", size, 1 << 23)
    small = f.select(is_denormal, _denormal_value(f, size, floats), normal)
    found = f.select(is_endless, f.select(is_nan, quiet, endless), small)
    return f.convert("bitcast", f.binary("or", found, sign), floats)


def _denormal_value(f: Function, size: Reg, floats: str) -> Reg:
    """The fraction behind 2⁻¹⁴, less 2⁻¹⁴: exact, and nothing is denormal as a float."""
    start = number(_LEAST_NORMAL, size.type)
    behind = f.convert("bitcast", f.binary("or", size, start), floats)
    exact = f.binary("fsub", behind, f.convert("bitcast", start, floats))
    return f.convert("bitcast", exact, size.type)
