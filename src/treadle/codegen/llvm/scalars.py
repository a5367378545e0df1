"""Elementwise ops and conversions as LLVM instructions, on vectors of any width.

Narrow floats are held as float in registers and rounded after every op, so that each result is
what its dtype can hold. bool is i1.
"""

from __future__ import annotations

from collections.abc import Callable

from treadle.base import dtypes
from treadle.base.dtypes import DType
from treadle.codegen.llvm import mathematics
from treadle.codegen.llvm.emitter import (
    Function,
    Reg,
    element_of,
    element_type,
    number,
    suffix,
    vector,
    width_of,
)
from treadle.codegen.llvm.float8 import float8_rounded
from treadle.codegen.llvm.halves import half_bits, half_value
from treadle.kernel.machine import Machine

ELEMENTARY = ("exp", "log", "tanh", "erf", "sin", "cos", "rsqrt", "pow", "atan2")
# Short enough to be written where they are used: nothing is saved around a call, and constants stay
# in registers.
SHORT = ("exp", "log", "tanh", "erf", "rsqrt")


def register_element(dtype: DType) -> str:
    """The element type that values of a dtype have in registers."""
    return "float" if dtype.is_narrow else element_type(dtype)


Call = Callable[[str, int, str], str]  # (function, width, element) to the name of its definition


class Scalars:
    """Writes ops into a function; `elementary` names functions to be defined beside it."""

    def __init__(self, function: Function, elementary: Call, machine: Machine):
        self.f, self.machine = function, machine
        self.elementary = elementary

    def apply(self, op: str, operands: list[Reg], operand_dtype: DType, dtype: DType) -> Reg:
        """One elementwise op; `operand_dtype` is that of the last operand (where: a branch)."""
        if operand_dtype.is_float:
            result = self._float(op, operands)
        elif operand_dtype is dtypes.bool_:
            result = self._bool(op, operands)
        else:
            result = self._integer(op, operands, operand_dtype)
        return self.rounded(result, dtype) if dtype.is_narrow else result

    def _float(self, op: str, x: list[Reg]) -> Reg:
        f = self.f
        simple = {"add": "fadd", "sub": "fsub", "mul": "fmul", "div": "fdiv"}
        compare = {"eq": "fcmp oeq", "lt": "fcmp olt", "le": "fcmp ole"}
        intrinsics = {
            "abs": "fabs",
            "floor": "floor",
            "sqrt": "sqrt",
            "max": "maximum",
            "min": "minimum",
        }
        if op in simple:
            return f.binary(simple[op], *x)
        if op in compare:
            return f.compare(compare[op], *x)
        if op in intrinsics:
            return f.intrinsic(intrinsics[op], *x)
        if op in ELEMENTARY:
            type_ = x[0].type
            if op in SHORT and element_of(type_) == "float" and width_of(type_) > 1:
                return mathematics.apply(f, op, *x, machine=self.machine)
            name = self.elementary(op, width_of(type_), element_of(type_))
            return f.call(name, type_, *x)
        if op == "neg":
            return f.value(x[0].type, f"fneg {x[0]}")
        if op == "where":
            return f.select(*x)
        if op == "sign":
            return self._float_sign(x[0])
        assert op in ("floordiv", "mod"), op
        quotient, rest = self._float_divmod(*x)
        return quotient if op == "floordiv" else rest

    def _float_sign(self, x: Reg) -> Reg:
        """±1, and x itself where it is 0 or NaN."""
        f, zero = self.f, number(0.0, x.type)
        one = f.intrinsic("copysign", number(1.0, x.type), x)
        return f.select(f.compare("fcmp one", x, zero), one, x)

    def _float_divmod(self, x: Reg, y: Reg) -> tuple[Reg, Reg]:
        """⌊x / y⌋ and the rest, of the sign of y, from the exact rest of C's fmod; as NumPy's."""
        f, zero, one = self.f, number(0.0, x.type), number(1.0, x.type)
        exact = f.binary("frem", x, y)
        is_rest = f.compare("fcmp une", exact, zero)
        is_negative = f.compare("fcmp olt", exact, zero)
        differs = f.binary("xor", is_negative, f.compare("fcmp olt", y, zero))
        crosses = f.binary("and", is_rest, differs)
        moved = f.select(crosses, f.binary("fadd", exact, y), exact)
        rest = f.select(is_rest, moved, f.intrinsic("copysign", zero, y))
        whole = f.binary("fdiv", f.binary("fsub", x, exact), y)
        lower = f.select(crosses, f.binary("fsub", whole, one), whole)
        # The quotient is whole but for rounding: the nearest whole number is it.
        down = f.intrinsic("floor", lower)
        is_half = f.compare("fcmp ogt", f.binary("fsub", lower, down), number(0.5, x.type))
        quotient = f.select(is_half, f.binary("fadd", down, one), down)
        by_zero = f.compare("fcmp oeq", y, zero)
        return f.select(by_zero, f.binary("fdiv", x, y), quotient), rest

    def _bool(self, op: str, x: list[Reg]) -> Reg:
        f = self.f
        true = number(True, x[-1].type)
        if op in ("and", "or", "xor"):
            return f.binary(op, *x)
        if op == "not":
            return f.binary("xor", x[0], true)
        if op == "eq":
            return f.binary("xor", f.binary("xor", *x), true)
        assert op == "where", op
        return f.select(*x)

    def _integer(self, op: str, x: list[Reg], dtype: DType) -> Reg:
        f = self.f
        sign = "s" if dtype.kind == "int" else "u"
        if op in ("add", "sub", "mul", "and", "or", "xor"):
            return f.binary(op, *x)
        if op in ("lt", "le", "eq"):
            name = "icmp eq" if op == "eq" else f"icmp {sign}{op}"
            return f.compare(name, *x)
        if op in ("max", "min"):
            return f.intrinsic(f"{sign}{op}", *x)
        zero = number(0, x[-1].type)
        match op:
            case "neg":
                return f.binary("sub", zero, x[0])
            case "not":
                return f.binary("xor", x[0], number(-1, x[0].type))
            case "where":
                return f.select(*x)
            case "abs":
                return self._integer_abs(x[0]) if sign == "s" else x[0]
            case "sign":
                return self._integer_sign(x[0], sign)
            case "mulhi":
                return self._high_half(*x)
            case "floordiv":
                return self._integer_divmod(x[0], x[1], sign)[0]
            case "mod":
                return self._integer_divmod(x[0], x[1], sign)[1]
        raise AssertionError(op)

    def _integer_abs(self, x: Reg) -> Reg:
        negative = self.f.binary("sub", number(0, x.type), x)
        return self.f.select(self.f.compare("icmp slt", x, number(0, x.type)), negative, x)

    def _integer_sign(self, x: Reg, sign: str) -> Reg:
        f, zero, one = self.f, number(0, x.type), number(1, x.type)
        positive = f.select(f.compare("icmp ne", x, zero), one, zero)
        if sign == "u":
            return positive
        return f.select(f.compare("icmp slt", x, zero), number(-1, x.type), positive)

    def _high_half(self, x: Reg, y: Reg) -> Reg:
        """The upper 32 bits of a product of 32-bit words."""
        f, wide = self.f, vector("i64", width_of(x.type))
        product = f.binary("mul", f.convert("zext", x, wide), f.convert("zext", y, wide))
        return f.convert("trunc", f.binary("lshr", product, number(32, wide)), x.type)

    def _integer_divmod(self, x: Reg, y: Reg, sign: str) -> tuple[Reg, Reg]:
        """Rounded down; 0 for a divisor of 0, and wrapped where the quotient does not fit."""
        f, zero, one = self.f, number(0, x.type), number(1, x.type)
        is_zero = f.compare("icmp eq", y, zero)
        minus = f.compare("icmp eq", y, number(-1, y.type))
        # Division by 0 and of the least number by −1 are undefined in LLVM: 1 stands in for both.
        unsafe = f.binary("or", is_zero, minus) if sign == "s" else is_zero
        divisor = f.select(unsafe, one, y)
        quotient, rest = f.binary(f"{sign}div", x, divisor), f.binary(f"{sign}rem", x, divisor)
        if sign == "s":
            differs = f.compare("icmp slt", f.binary("xor", rest, divisor), zero)
            goes_down = f.binary("and", f.compare("icmp ne", rest, zero), differs)
            quotient = f.select(goes_down, f.binary("sub", quotient, one), quotient)
            rest = f.select(goes_down, f.binary("add", rest, divisor), rest)
            quotient = f.select(minus, f.binary("sub", zero, x), quotient)
        return f.select(is_zero, zero, quotient), f.select(is_zero, zero, rest)

    def convert(self, x: Reg, source: DType, target: DType) -> Reg:
        """Another dtype: floats round, float to integer truncates, to bool asks ≠ 0."""
        f, to = self.f, vector(register_element(target), width_of(x.type))
        if target is dtypes.bool_:
            return self._not_zero(x, source)
        if source.is_float and target.is_float:
            return self._between_floats(x, to, target)
        if source.is_float:
            name = "fptosi.sat" if target.kind == "int" else "fptoui.sat"
            return self._saturated(name, x, to)
        if target.is_float:
            signed = source.kind == "int"
            converted = f.convert("sitofp" if signed else "uitofp", x, to)
            return self.rounded(converted, target) if target.is_narrow else converted
        return self._between_integers(x, source, to)

    def _not_zero(self, x: Reg, source: DType) -> Reg:
        if source is dtypes.bool_:
            return x
        name = "fcmp une" if source.is_float else "icmp ne"
        return self.f.compare(name, x, number(0, x.type))

    def _between_floats(self, x: Reg, to: str, target: DType) -> Reg:
        if target.is_narrow:
            if element_of(x.type) == "double":
                return self.rounded(self.f.convert("fptrunc", x, to), target)
            return self.rounded(x, target)
        if x.type == to:
            return x
        return self.f.convert("fpext" if element_of(to) == "double" else "fptrunc", x, to)

    def _saturated(self, name: str, x: Reg, to: str) -> Reg:
        f = self.f
        full = f"llvm.{name}.{suffix(to)}.{suffix(x.type)}"
        f.declarations.add(f"declare {to} @{full}({x.type})")
        return f.call(full, to, x)

    def _between_integers(self, x: Reg, source: DType, to: str) -> Reg:
        old, new = (int(element_of(t)[1:]) for t in (x.type, to))
        if old == new:
            return x
        if old > new:
            return self.f.convert("trunc", x, to)
        return self.f.convert("sext" if source.kind == "int" else "zext", x, to)

    def rounded(self, x: Reg, dtype: DType) -> Reg:
        """A float rounded to what a narrow dtype holds, still as a float."""
        if dtype in dtypes.FLOAT8:
            return float8_rounded(self.f, x, dtype)
        if dtype is dtypes.float16:
            has_half = self.machine.has_half
            return half_value(self.f, half_bits(self.f, x, has_half), has_half)
        return self.f.convert("bitcast", self._rounded_bits(x), x.type)

    def _rounded_bits(self, x: Reg) -> Reg:
        """The bits of a float with the lower half rounded away, to nearest even; NaN stays NaN."""
        f, ints = self.f, vector("i32", width_of(x.type))
        bits = f.convert("bitcast", x, ints)
        odd = f.binary("and", f.binary("lshr", bits, number(16, ints)), number(1, ints))
        moved = f.binary("add", f.binary("add", bits, odd), number(0x7FFF, ints))
        is_nan = f.compare("fcmp uno", x, x)
        quiet = f.binary("or", bits, number(0x400000, ints))
        return f.binary("and", f.select(is_nan, quiet, moved), number(-65536, ints))
