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
    sign = f.binary("and", f.binary("lshr", bits, number(16, ints)), number(_SIGN, ints))
    size = f.binary("and", bits, number(0x7FFFFFFF, ints))
    fine = f.select(
        f.compare("icmp ult", size, number(_LEAST_NORMAL, ints)),
        _denormal_bits(f, size, x.type),
        _normal_bits(f, size),
    )
    is_large = f.compare("icmp uge", size, number(_TOO_LARGE, ints))
    found = f.select(is_large, _endless_bits(f, size), fine)
    return f.convert("trunc", f.binary("or", found, sign), vector("i16", width))


def _normal_bits(f: Function, size: Reg) -> Reg:
    """To the nearest, ties to even; what rounds up beyond the largest becomes ∞ by itself."""
    ints = size.type
    odd = f.binary("and", f.binary("lshr", size, number(13, ints)), number(1, ints))
    moved = f.binary("add", size, number(0xFFF - (_BIAS << 23), ints))
    return f.binary("lshr", f.binary("add", moved, odd), number(13, ints))


def _denormal_bits(f: Function, size: Reg, floats: str) -> Reg:
    shift = f.convert("bitcast", number(_HALF, size.type), floats)
    rounded = f.binary("fadd", f.convert("bitcast", size, floats), shift)
    return f.binary("sub", f.convert("bitcast", rounded, size.type), number(_HALF, size.type))


def _endless_bits(f: Function, size: Reg) -> Reg:
    """∞, or a quiet NaN."""
    ints = size.type
    payload = f.binary("and", f.binary("lshr", size, number(13, ints)), number(0x3FF, ints))
    nan = f.binary("or", payload, number(_INFINITY | _QUIET, ints))
    is_nan = f.compare("icmp ugt", size, number(0x7F800000, ints))
    return f.select(is_nan, nan, number(_INFINITY, ints))


def half_value(f: Function, bits: Reg, has_half: bool) -> Reg:
    """float16's bits as floats, which hold all of its values."""
    width = width_of(bits.type)
    floats, ints = vector("float", width), vector("i32", width)
    if has_half:
        half = f.convert("bitcast", bits, vector("half", width))
        return f.convert("fpext", half, floats)
    wide = f.convert("zext", bits, ints)
    sign = f.binary("shl", f.binary("and", wide, number(_SIGN, ints)), number(16, ints))
    size = f.binary("shl", f.binary("and", wide, number(0x7FFF, ints)), number(13, ints))
    normal = f.binary("add", size, number(_BIAS << 23, ints))
    # ∞ and NaN have the largest exponent there too.
    endless = f.binary("add", normal, number(_BIAS << 23, ints))
    is_nan = f.compare("icmp ugt", size, number(_INFINITY << 13, ints))
    quiet = f.binary("or", endless, number(_QUIET << 13, ints))
    is_endless = f.compare("icmp uge", size, number(_INFINITY << 13, ints))
    is_denormal = f.compare("icmp ult", size, number(1 << 23, ints))
    small = f.select(is_denormal, _denormal_value(f, size, floats), normal)
    found = f.select(is_endless, f.select(is_nan, quiet, endless), small)
    return f.convert("bitcast", f.binary("or", found, sign), floats)


def _denormal_value(f: Function, size: Reg, floats: str) -> Reg:
    """The fraction behind 2⁻¹⁴, less 2⁻¹⁴: exact, and nothing is denormal as a float."""
    start = number(_LEAST_NORMAL, size.type)
    behind = f.convert("bitcast", f.binary("or", size, start), floats)
    exact = f.binary("fsub", behind, f.convert("bitcast", start, floats))
    return f.convert("bitcast", exact, size.type)
