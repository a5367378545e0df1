"""What an element is of leaves and elementwise ops."""

from __future__ import annotations

import hashlib
from fractions import Fraction

from treadle.base import dtypes
from treadle.ir.graph import Node
from treadle.ir.literal import ArrayLiteral
from treadle.ir.ops import elementwise as e
from treadle.ir.ops.leaves import CONSTANT, IOTA, Constant, Iota
from treadle.verify.normal_form import functions as fn
from treadle.verify.normal_form.algebra import (
    ONE,
    ZERO,
    add,
    constant,
    multiply,
    negate,
    of_atom,
    of_index,
    power,
    subtract,
)
from treadle.verify.normal_form.form import Atom, Form, Kind
from treadle.verify.normal_form.graphs import ELEMENT, At, Reader
from treadle.verify.normal_form.numbers import of_number

_HALF = Fraction(1, 2)
_MOST_EXPONENT = 8


# Leaves


@ELEMENT(CONSTANT)
def _constant(reader: Reader, node: Node, at: At) -> Form:
    attributes = node.attributes
    assert isinstance(attributes, Constant)
    value, dtype = attributes.value, attributes.type.dtype
    if isinstance(value, ArrayLiteral):
        is_flag = dtype is dtypes.bool_
        return of_atom(Atom(Kind.LEAF, _array_name(value), at, is_flag=is_flag))
    whole = Fraction(value) if value == value and abs(value) != float("inf") else None
    if whole is not None and reader.sizes.values:
        over, under = (reader.size(n) for n in (whole.numerator, whole.denominator))
        if over.number is None or under.number is None:
            return multiply(of_index(over), power(of_index(under), -1))
    return of_number(reader.work, value, dtype)


def _array_name(value: ArrayLiteral) -> str:
    """A name that no other array and no leaf has."""
    digest = hashlib.blake2b(value.array.tobytes(), digest_size=16).hexdigest()
    return f"{value!r} {digest}"


@ELEMENT(IOTA)
def _iota(reader: Reader, node: Node, at: At) -> Form:
    assert isinstance(node.attributes, Iota)
    return of_index(at[node.attributes.axis])


# Elementwise


@ELEMENT(e.ADD)
def _add(reader: Reader, node: Node, at: At) -> Form:
    return add(*reader.operands(node, at))


@ELEMENT(e.SUB)
def _sub(reader: Reader, node: Node, at: At) -> Form:
    x, y = reader.operands(node, at)
    return subtract(x, y)


@ELEMENT(e.MUL, e.AND)
def _mul(reader: Reader, node: Node, at: At) -> Form:
    if node.op is e.AND and node.types[0].dtype is not dtypes.bool_:
        return fn.apply("and", *reader.operands(node, at))
    x, y = reader.operands(node, at)
    return multiply(x, y)


@ELEMENT(e.DIV)
def _div(reader: Reader, node: Node, at: At) -> Form:
    x, y = reader.operands(node, at)
    return multiply(x, fn.reciprocal(y))


@ELEMENT(e.NEG)
def _neg(reader: Reader, node: Node, at: At) -> Form:
    return negate(*reader.operands(node, at))


@ELEMENT(e.STOP_GRADIENT)
def _same(reader: Reader, node: Node, at: At) -> Form:
    return reader.at(node.operands[0], at)


@ELEMENT(e.CAST)
def _cast(reader: Reader, node: Node, at: At) -> Form:
    """Between floats, and to what holds every value, nothing happens."""
    (x,) = reader.operands(node, at)
    old, new = reader.graph.type_of(node.operands[0]).dtype, node.types[0].dtype
    if new is dtypes.bool_:
        return x if old is dtypes.bool_ else subtract(ONE, fn.vanishes_flag(reader.work, x))
    if new.is_float or old is dtypes.bool_ or _holds(new, old):
        return x
    return fn.apply(f"cast to {new}", x)


def _holds(new: dtypes.DType, old: dtypes.DType) -> bool:
    if old.is_float:
        return False
    (low, high), (least, most) = old.range(), new.range()
    return least <= low and high <= most


@ELEMENT(e.EXP)
def _exp(reader: Reader, node: Node, at: At) -> Form:
    return fn.exp(reader.work, *reader.operands(node, at))


@ELEMENT(e.LOG)
def _log(reader: Reader, node: Node, at: At) -> Form:
    return fn.log(*reader.operands(node, at))


@ELEMENT(e.SQRT)
def _sqrt(reader: Reader, node: Node, at: At) -> Form:
    (x,) = reader.operands(node, at)
    return fn.root(x, _HALF)


@ELEMENT(e.RSQRT)
def _rsqrt(reader: Reader, node: Node, at: At) -> Form:
    (x,) = reader.operands(node, at)
    return fn.root(x, -_HALF)


@ELEMENT(e.POW)
def _pow(reader: Reader, node: Node, at: At) -> Form:
    x, y = reader.operands(node, at)
    exponent = y.number
    is_known = exponent is not None and -_MOST_EXPONENT <= exponent <= _MOST_EXPONENT
    if exponent is None or not is_known or exponent.denominator > 2:
        return fn.apply("pow", x, y)
    return fn.by_flags(lambda form: power(form, exponent), x)


@ELEMENT(e.SIN, e.COS, e.FLOOR, e.ATAN2, e.FLOORDIV, e.MOD)
def _opaque(reader: Reader, node: Node, at: At) -> Form:
    return fn.apply(node.op.name, *reader.operands(node, at))


@ELEMENT(e.TANH, e.ERF)
def _odd(reader: Reader, node: Node, at: At) -> Form:
    """f(−x) = −f(x)"""

    def of(x: Form) -> Form:
        if not x.terms:
            return ZERO
        if x.terms[0][1] < 0:
            return negate(of(negate(x)))
        return of_atom(Atom(Kind.APPLY, node.op.name, forms=(x,)))

    return fn.by_flags(of, *reader.operands(node, at))


# Comparisons


@ELEMENT(e.LT)
def _lt(reader: Reader, node: Node, at: At) -> Form:
    x, y = reader.operands(node, at)
    return fn.by_flags(lambda d: fn.is_positive_flag(reader.work, d), subtract(y, x))


@ELEMENT(e.LE)
def _le(reader: Reader, node: Node, at: At) -> Form:
    x, y = reader.operands(node, at)
    above = fn.by_flags(lambda d: fn.is_positive_flag(reader.work, d), subtract(x, y))
    return subtract(ONE, above)


@ELEMENT(e.EQ)
def _eq(reader: Reader, node: Node, at: At) -> Form:
    x, y = reader.operands(node, at)
    return fn.by_flags(lambda d: fn.vanishes_flag(reader.work, d), subtract(x, y))


@ELEMENT(e.SIGN)
def _sign(reader: Reader, node: Node, at: At) -> Form:
    def of(x: Form) -> Form:
        above = fn.is_positive_flag(reader.work, x)
        return subtract(above, fn.is_positive_flag(reader.work, negate(x)))

    return fn.by_flags(of, *reader.operands(node, at))


@ELEMENT(e.ABS)
def _abs(reader: Reader, node: Node, at: At) -> Form:
    def of(x: Form) -> Form:
        return fn.maximum(reader.work, x, negate(x))

    return fn.by_flags(of, *reader.operands(node, at))


@ELEMENT(e.MAX)
def _max(reader: Reader, node: Node, at: At) -> Form:
    return fn.maximum(reader.work, *reader.operands(node, at))


@ELEMENT(e.MIN)
def _min(reader: Reader, node: Node, at: At) -> Form:
    return fn.minimum(reader.work, *reader.operands(node, at))


@ELEMENT(e.WHERE)
def _where(reader: Reader, node: Node, at: At) -> Form:
    return fn.choose(*reader.operands(node, at))


@ELEMENT(e.NOT)
def _not(reader: Reader, node: Node, at: At) -> Form:
    (x,) = reader.operands(node, at)
    if node.types[0].dtype is not dtypes.bool_:
        return (
            subtract(constant(-1), x) if node.types[0].dtype.kind == "int" else fn.apply("not", x)
        )
    return subtract(ONE, x)


@ELEMENT(e.OR)
def _or(reader: Reader, node: Node, at: At) -> Form:
    x, y = reader.operands(node, at)
    if node.types[0].dtype is not dtypes.bool_:
        return fn.apply("or", x, y)
    return subtract(add(x, y), multiply(x, y))


@ELEMENT(e.XOR)
def _xor(reader: Reader, node: Node, at: At) -> Form:
    x, y = reader.operands(node, at)
    if node.types[0].dtype is not dtypes.bool_:
        return fn.apply("xor", x, y)
    both = multiply(x, y)
    return subtract(add(x, y), add(both, both))
