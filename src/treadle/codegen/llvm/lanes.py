"""Arithmetic on vectors, lane by lane: formulas that read as formulas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from treadle.codegen.llvm.emitter import Function, Reg, element_of, like, number, vector, width_of

# What looks numbers up, by how many a register has.
PERMUTATIONS = {16: "llvm.x86.avx512.permvar.sf.512", 8: "llvm.x86.avx2.permps"}
_INTEGER = {"float": "i32", "double": "i64"}
_FLOAT = {"i32": "float", "i64": "double"}


@dataclass(frozen=True, slots=True)
class Lanes:
    """Appends to a function. A Python number is a constant of the type of the first operand."""

    function: Function
    permutes: int = 0  # numbers of a register in which the processor looks others up, if it does
    has_fma: bool = True

    def add(self, a: Reg, b: Reg | float) -> Reg:
        return self.function.binary("fadd", a, b)

    def sub(self, a: Reg, b: Reg | float) -> Reg:
        return self.function.binary("fsub", a, b)

    def mul(self, a: Reg, b: Reg | float) -> Reg:
        return self.function.binary("fmul", a, b)

    def div(self, a: Reg, b: Reg | float) -> Reg:
        return self.function.binary("fdiv", a, b)

    def integer(self, op: str, a: Reg, b: Reg | int) -> Reg:
        """`op` is LLVM's name: add, sub, shl, ashr, and, or, xor."""
        return self.function.binary(op, a, b)

    def fma(self, a: Reg, b: Reg | float, c: Reg | float) -> Reg:
        """a · b + c, rounded once.

        Without an instruction, float32 goes through float64, where the product is exact: reductions
        of arguments depend on that. LLVM would call libm for each lane.
        """
        factor, term = like(a, b), like(a, c)
        if self.has_fma:
            return self.function.intrinsic("fma", a, factor, term)
        if element_of(a.type) == "double":
            return self.add(self.mul(a, factor), term)
        exact = self.mul(self.widened(a), self.widened(factor))
        return self.narrowed(self.add(exact, self.widened(term)))

    def polynomial(self, coefficients: Sequence[float], x: Reg) -> Reg:
        """Horner's rule; coefficients from the constant up."""
        value = like(x, coefficients[-1])
        for coefficient in reversed(coefficients[:-1]):
            value = self.fma(value, x, coefficient)
        return value

    def looked_up(self, table: Sequence[float], index: Reg) -> Reg:
        """For each lane the number that its lowest bits count to, of a table as long as a register.

        Fewer lanes are filled up, more are taken in parts: a lane's bits depend on no width.
        """
        f, width, count = self.function, width_of(index.type), len(table)
        numbers = ", ".join(str(number(x, "float")) for x in table)
        all_, name = Reg(vector("float", count), f"<{numbers}>"), PERMUTATIONS[count]
        f.declarations.add(f"declare {all_.type} @{name}({all_.type}, {vector('i32', count)})")
        found = []
        for start in range(0, width, count):
            places = f.lanes_from(index, start, count)
            found.append(f.call(name, all_.type, all_, places))
        return f.lanes_of(found, width)

    def negative(self, x: Reg) -> Reg:
        return self.function.value(x.type, f"fneg {x}")

    def absolute(self, x: Reg) -> Reg:
        return self.function.intrinsic("fabs", x)

    def floor(self, x: Reg) -> Reg:
        return self.function.intrinsic("floor", x)

    def sqrt(self, x: Reg) -> Reg:
        return self.function.intrinsic("sqrt", x)

    def with_sign_of(self, magnitude: Reg, sign: Reg) -> Reg:
        return self.function.intrinsic("copysign", magnitude, sign)

    def compare(self, op: str, a: Reg, b: Reg | float) -> Reg:
        """`op` is like "icmp slt" or "fcmp olt"."""
        return self.function.compare(op, a, b)

    def select(self, condition: Reg, a: Reg, b: Reg) -> Reg:
        return self.function.select(condition, a, b)

    def at_most(self, x: Reg, limit: float) -> Reg:
        """The smaller; NaN stays, which llvm.minnum would lose."""
        bound = like(x, limit)
        return self.select(self.compare("fcmp olt", bound, x), bound, x)

    def at_least(self, x: Reg, limit: float) -> Reg:
        """The larger; NaN stays."""
        bound = like(x, limit)
        return self.select(self.compare("fcmp ogt", bound, x), bound, x)

    def any(self, condition: Reg) -> Reg:
        """One i1: is any lane true?"""
        width = width_of(condition.type)
        if width == 1:
            return condition
        lanes = self.function.convert("bitcast", condition, f"i{width}")
        return self.compare("icmp ne", lanes, 0)

    def bits(self, x: Reg) -> Reg:
        """The same bits as integers."""
        return self._as("bitcast", x, _INTEGER[element_of(x.type)])

    def floats(self, x: Reg) -> Reg:
        """The same bits as floats."""
        return self._as("bitcast", x, _FLOAT[element_of(x.type)])

    def widened(self, x: Reg) -> Reg:
        return self._as("fpext", x, "double")

    def narrowed(self, x: Reg) -> Reg:
        return self._as("fptrunc", x, "float")

    def float_of(self, x: Reg) -> Reg:
        """The float32 next to an integer."""
        return self._as("sitofp", x, "float")

    def constant(self, value: float, like: Reg) -> Reg:
        return number(value, like.type)

    def _as(self, conversion: str, x: Reg, element: str) -> Reg:
        return self.function.convert(conversion, x, vector(element, width_of(x.type)))
