"""Derivatives of elementwise ops, as formulas; graphs of them are made by `factor`."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from functools import lru_cache

from treadle_checker.building import Building
from treadle_checker.types import Type, Value

# ∂o/∂x of each operand, where o is the result, and x, y and z are the operands. Ops that are not
# here have no derivative: comparisons, signs, whole numbers, stop_gradient. A choice between two
# operands (where, max, min) passes on what it chose, and is in `CHOICES`.
PARTIALS: dict[str, tuple[str, ...]] = {
    "neg": ("-1",),
    "add": ("1", "1"),
    "sub": ("1", "-1"),
    "mul": ("y", "x"),
    "div": ("1 / y", "-(o / y)"),
    "mod": ("1", "-floordiv(x, y)"),
    "pow": ("where(eq(y, 0), 0, y * pow(x, y - 1))", "where(eq(x, 0) & le(0, y), 0, o * log(x))"),
    "atan2": (
        "y / where(eq(x * x + y * y, 0), 1, x * x + y * y)",
        "-(x / where(eq(x * x + y * y, 0), 1, x * x + y * y))",
    ),
    "abs": ("sign(x)",),
    "exp": ("o",),
    "log": ("1 / x",),
    "sqrt": ("0.5 / o",),
    "rsqrt": ("o * o * o * -0.5",),
    "sin": ("cos(x)",),
    "cos": ("-sin(x)",),
    "tanh": ("1 - o * o",),
    "erf": ("exp(-(x * x)) * 1.1283791670955126",),  # 2 / √π
}
# What each operand gets of a cotangent c; half of it where both are equal.
_TIE = "where(eq(x, y), c * 0.5, c)"
CHOICES: dict[str, tuple[str, ...]] = {
    "cast": ("c",),
    "shard_sum": ("shard_sum(c)",),  # every shard's loss depends on each shard's operand
    "where": ("", "where(x, c, 0)", "where(x, 0, c)"),
    "max": (f"where(lt(x, y), 0, {_TIE})", f"where(lt(y, x), 0, {_TIE})"),
    "min": (f"where(lt(y, x), 0, {_TIE})", f"where(lt(x, y), 0, {_TIE})"),
}
_OPS = {ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "div", ast.BitAnd: "and"}


@lru_cache(maxsize=256)
def _parsed(formula: str) -> ast.expr:
    return ast.parse(formula, mode="eval").body


def has_partials(op: str) -> bool:
    return op in PARTIALS or op in CHOICES


def pulled(
    made: Building, op: str, k: int, ct: Value, out: Value, operands: Sequence[Value]
) -> Value | None:
    """The cotangent of operand k of an elementwise op, from that of its result."""
    if op in PARTIALS:
        formula = PARTIALS[op][k]
        if formula in ("1", "-1"):
            return ct if formula == "1" else made.apply("neg", ct)
        formula = f"c / {formula[4:]}" if formula.startswith("1 / ") else f"c * ({formula})"
    else:
        formula = CHOICES[op][k]
    names = dict(zip("coxyz", (ct, out, *operands), strict=False))
    type_ = made.type_of(operands[k])
    return _made(made, _parsed(formula), names, type_) if formula else None


def _made(made: Building, e: ast.expr, names: dict[str, Value], type_: Type) -> Value:
    """A formula's nodes; its numbers are of one type."""

    def value(e: ast.expr) -> Value:
        match e:
            case ast.Constant(number):
                return made.number(number, type_)
            case ast.Name(name):
                found = names[name]
                is_flag = made.type_of(found).dtype == "bool"
                return found if is_flag else made.cast(found, type_.dtype)
            case ast.UnaryOp(ast.USub(), ast.Constant(number)):
                return made.number(-float(str(number)), type_)
            case ast.UnaryOp(_, x):
                return made.apply("neg", value(x))
            case ast.BinOp(x, operator, y):
                return made.apply(_OPS[type(operator)], value(x), value(y))
            case ast.Call(ast.Name(op), xs):
                return made.apply(op, *map(value, xs))
        raise AssertionError(ast.dump(e))

    return value(e)
