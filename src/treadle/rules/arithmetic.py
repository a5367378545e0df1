"""Neutral elements, double negation, and constants that are folded where the result is exact.

x + 0 stays: it turns −0 into 0.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from fractions import Fraction

from treadle.ir import literal
from treadle.ir.graph import GraphBuilder, Value
from treadle.ir.op import Op
from treadle.ir.ops import elementwise as e
from treadle.ir.ops.leaves import CONSTANT, Constant
from treadle.ir.types import TensorType
from treadle.rules.pattern import Number, apply
from treadle.rules.rule import Match, Rule
from treadle.rules.views import X, has_type_of_x, take_x

CAST_TO_SAME = Rule(
    "cast_to_same",
    "A cast of x to the dtype of x is x.",
    apply(e.CAST, X),
    take_x,
    has_type_of_x,
)


def is_back_from_wider(match: Match) -> bool:
    """x is a float, and so is y, with more bytes: every x is a y"""
    x, wide = match.type_of("x"), match.type_of("wide")
    is_wider = wide.dtype.itemsize > x.dtype.itemsize
    return has_type_of_x(match) and x.is_float and wide.is_float and is_wider


CAST_BACK = Rule(
    "cast_back",
    "A cast of x to a wider float y and back is x.",
    apply(e.CAST, apply(e.CAST, X, name="wide")),
    take_x,
    is_back_from_wider,
)

DOUBLE_NEGATION = Rule(
    "double_negation",
    "− −x = x.",
    apply(e.NEG, apply(e.NEG, X)),
    take_x,
)

TIMES_ONE = Rule(
    "times_one",
    "1 · x = x · 1 = x.",
    apply(e.MUL, Number(1), X, commutes=True),
    take_x,
)

DIVIDED_BY_ONE = Rule(
    "divided_by_one",
    "x / 1 = x.",
    apply(e.DIV, X, Number(1)),
    take_x,
)

MINUS_ZERO = Rule(
    "minus_zero",
    "x − 0 = x; x − (−0) stays.",
    apply(e.SUB, X, Number(0)),
    take_x,
)

_OPERATIONS: dict[Op, Callable[[Fraction, Fraction], Fraction]] = {
    e.ADD: operator.add,
    e.SUB: operator.sub,
    e.MUL: operator.mul,
}


def is_exact(match: Match) -> bool:
    """a, b and the result are finite, not 0, and numbers of the dtype"""
    return _folded(match) is not None


def _folded(match: Match) -> Fraction | None:
    a, b = (_exact(match.number(n), match.type) for n in ("a", "b"))
    if a is None or b is None:
        return None
    result = _OPERATIONS[match.root.op](a, b)
    return _exact(result, match.type)


def _exact(number: literal.Number, type_: TensorType) -> Fraction | None:
    """The number, if the dtype holds it as it is; zeros have a sign and are left alone."""
    if isinstance(number, bool) or not type_.is_float or not number:
        return None
    held = float(literal.to_numpy(number, type_.dtype.numpy))
    if held != held or held in (float("inf"), float("-inf")):
        return None
    return Fraction(held) if Fraction(held) == Fraction(number) else None


def _fold(match: Match, builder: GraphBuilder) -> Value:
    number = _folded(match)
    assert number is not None
    return builder.add(CONSTANT, Constant(number, match.type), (), match.root.origin)[0]


def _folding(name: str, statement: str, op: Op) -> Rule:
    return Rule(name, statement, apply(op, Number(name="a"), Number(name="b")), _fold, is_exact)


FOLD_SUM = _folding("fold_sum", "The sum of two numbers is a number.", e.ADD)
FOLD_DIFFERENCE = _folding("fold_difference", "The difference of two numbers is a number.", e.SUB)
FOLD_PRODUCT = _folding("fold_product", "The product of two numbers is a number.", e.MUL)

RULES = (
    CAST_TO_SAME,
    CAST_BACK,
    DOUBLE_NEGATION,
    TIMES_ONE,
    DIVIDED_BY_ONE,
    MINUS_ZERO,
    FOLD_SUM,
    FOLD_DIFFERENCE,
    FOLD_PRODUCT,
)
