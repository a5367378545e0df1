"""Forward mode: the derivatives of elementwise ops along a direction, as formulas."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

SHARDS = 1_000_003  # the factor that stands for a sum over shards: linear, and not the identity
_LARGER = "(1 - lt({0}, {1})) * (1 - eq({0}, {1}) * 0.5)"  # half of it where they are equal
_X_WINS, _Y_WINS = _LARGER.format("x", "y"), _LARGER.format("y", "x")
_LENGTH = "(x*x + y*y + eq(x*x + y*y, 0) * (1 - (x*x + y*y)))"  # squared, 1 at the origin

# ∂o/∂x of each operand, where o is the result, and x, y and z are the operands. Ops that are not
# here have no derivative: comparisons, signs, whole numbers, stop_gradient.
PARTIALS: dict[str, tuple[str, ...]] = {
    "cast": ("1",),
    "neg": ("-1",),
    "shard_sum": (str(SHARDS),),
    "add": ("1", "1"),
    "sub": ("1", "-1"),
    "mul": ("y", "x"),
    "div": ("1 / y", "-o / y"),
    "mod": ("1", "-floordiv(x, y)"),
    "where": ("0", "x", "1 - x"),  # x is the condition
    "max": (_X_WINS, _Y_WINS),
    "min": (_Y_WINS, _X_WINS),
    "pow": ("(1 - eq(y, 0)) * y * pow(x, y - 1)", "(1 - eq(x, 0) * (1 - lt(y, 0))) * o * log(x)"),
    "atan2": (f"y / {_LENGTH}", f"-x / {_LENGTH}"),
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
_OPS = {ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "div"}


@lru_cache(maxsize=256)
def _parsed(formula: str) -> ast.expr:
    return ast.parse(formula, mode="eval").body


def slope_of(
    field: Any, op: str, out: Any, xs: Sequence[Any], slopes: Sequence[Any], dtype: str
) -> Any:
    """Σ slope · ∂o/∂x, where None is zero."""
    names = dict(zip("oxyz", (out, *xs), strict=False))

    def apply(op: str, *operands: Any) -> Any:
        result = "bool" if op in ("lt", "eq") else dtype
        return field.apply(op, operands, [dtype] * len(operands), result)

    def value(e: Any) -> Any:
        match e:
            case ast.Constant(number):
                return field.number(number, dtype)
            case ast.Name(name):
                return names[name]
            case ast.UnaryOp(_, x):
                return apply("neg", value(x))
            case ast.BinOp(x, operator, y):
                return apply(_OPS[type(operator)], value(x), value(y))
        return apply(e.func.id, *map(value, e.args))

    total = None
    for slope, formula in zip(slopes, PARTIALS[op], strict=True):
        if slope is not None:
            term = slope if formula == "1" else apply("mul", slope, value(_parsed(formula)))
            total = term if total is None else apply("add", total, term)
    return total
