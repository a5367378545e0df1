"""The tangent rule of each primitive, over any domain."""

from __future__ import annotations

import math
from typing import Any

from treadle.domains.algebra import Num
from treadle.domains.dual import TANGENT, Push, Tangents
from treadle.ir.composites import SIGMOID, SILU
from treadle.ir.literal import Number
from treadle.ir.op import NONE
from treadle.ir.ops import elementwise as e
from treadle.ir.ops import indexing, linear, reductions, shaping
from treadle.ir.ops.leaves import CONSTANT, IOTA

P = Push[Any]
N = Num[Any]
tangent = TANGENT


@tangent(
    CONSTANT,
    IOTA,
    e.SIGN,
    e.FLOOR,
    e.NOT,
    e.STOP_GRADIENT,
    e.FLOORDIV,
    e.EQ,
    e.LT,
    e.LE,
    e.AND,
    e.OR,
    e.XOR,
    reductions.ARGMAX,
    reductions.ARGMIN,
    indexing.RANDOM_BITS,
)
def _constant(p: P) -> Tangents:
    return (None,) * len(p.results)


@tangent(
    e.NEG,
    reductions.REDUCE_SUM,
    reductions.SHARD_SUM,
    reductions.CUMSUM,
    shaping.RESHAPE,
    shaping.PERMUTE,
    shaping.BROADCAST,
    shaping.SLICE,
    shaping.FLIP,
    linear.WINDOW,
    linear.UNWINDOW,
    shaping.DYNAMIC_SLICE,
    indexing.GATHER,
    indexing.SCATTER_ADD,
)
def _linear_in_first(p: P) -> Tangents:
    (t, *_) = p.tangents
    return (None if t is None else p.again(t, *p.primals[1:]),)


@tangent(shaping.CONCAT)
def _linear_in_all(p: P) -> Tangents:
    return (p.again(*map(_tangent_or_zero, p.primals, p.tangents)),)


@tangent(shaping.PAD)
def _pad(p: P) -> Tangents:
    (t,) = p.tangents
    a: shaping.Pad = p.attributes
    assert t is not None
    return (t.apply(shaping.PAD, shaping.Pad(a.low, a.high, a.interior, 0)),)


@tangent(shaping.DYNAMIC_UPDATE)
def _dynamic_update(p: P) -> Tangents:
    x, update, starts = p.primals
    return (
        p.again(
            _tangent_or_zero(x, p.tangents[0]), _tangent_or_zero(update, p.tangents[1]), starts
        ),
    )


@tangent(e.WHERE)
def _where(p: P) -> Tangents:
    condition, x, y = p.primals
    if p.tangents[1] is None and p.tangents[2] is None:
        return (None,)
    return (
        condition.where(_tangent_or_zero(x, p.tangents[1]), _tangent_or_zero(y, p.tangents[2])),
    )


@tangent(e.CAST)
def _cast(p: P) -> Tangents:
    (t,) = p.tangents
    if t is None or not (p.out.type.is_float and t.type.is_float):
        return (None,)
    return (p.again(t),)


@tangent(e.ADD)
def _add(p: P) -> Tangents:
    return (_sum(*p.tangents),)


@tangent(e.SUB)
def _sub(p: P) -> Tangents:
    a, b = p.tangents
    return (_sum(a, None if b is None else -b),)


@tangent(e.MUL, linear.CONTRACT)
def _bilinear(p: P) -> Tangents:
    (x, y), (a, b) = p.primals, p.tangents
    left = None if a is None else p.again(a, y)
    return (_sum(left, None if b is None else p.again(x, b)),)


@tangent(e.DIV)
def _div(p: P) -> Tangents:
    (_, y), (a, b) = p.primals, p.tangents
    return (_sum(None if a is None else a / y, None if b is None else -(b * p.out / y)),)


@tangent(e.MOD)
def _mod(p: P) -> Tangents:
    (x, y), (a, b) = p.primals, p.tangents
    quotient = x.apply(e.FLOORDIV, NONE, y)
    return (_sum(a, None if b is None else -(b * quotient)),)


@tangent(e.POW)
def _pow(p: P) -> Tangents:
    (x, y), (a, b) = p.primals, p.tangents
    base = exponent = None
    if a is not None:
        slope = y * x.apply(e.POW, NONE, y - 1)
        base = a * y.equals(0).where(y.like(0), slope)
    if b is not None:
        flat = x.equals(0).apply(e.AND, NONE, y.less(0).apply(e.NOT, NONE))
        exponent = b * flat.where(x.like(0), p.out * x.apply(e.LOG, NONE))
    return (_sum(base, exponent),)


@tangent(e.ATAN2)
def _atan2(p: P) -> Tangents:
    """The part of (b, a) that is at right angles to (x, y), over its length; 0 at the origin."""
    (y, x), (a, b) = p.primals, p.tangents
    square = x * x + y * y
    length = square.equals(0).where(x.like(1), square)
    turn = _sum(None if a is None else a * x, None if b is None else -(b * y))
    return (None if turn is None else turn / length,)


@tangent(e.MAX, e.MIN)
def _extreme(p: P) -> Tangents:
    """The larger (or smaller) side's, or half of each at a tie."""
    x, y = p.primals
    below, above = (x.less(y), y.less(x)) if p.op is e.MAX else (y.less(x), x.less(y))
    share = x.equals(y).where(x.like(0.5), x.like(1))
    a, b = (_tangent_or_zero(v, t) * share for v, t in zip(p.primals, p.tangents, strict=True))
    return (below.where(x.like(0), a) + above.where(y.like(0), b),)


def _slope(p: P, slope: N) -> Tangents:
    (t,) = p.tangents
    assert t is not None
    return (t * slope,)


@tangent(e.ABS)
def _abs(p: P) -> Tangents:
    return _slope(p, p.primals[0].apply(e.SIGN, NONE))


@tangent(e.EXP)
def _exp(p: P) -> Tangents:
    return _slope(p, p.out)


@tangent(e.LOG)
def _log(p: P) -> Tangents:
    return _slope(p, 1 / p.primals[0])


@tangent(e.SQRT)
def _sqrt(p: P) -> Tangents:
    return _slope(p, 1 / (p.out * 2))


@tangent(e.RSQRT)
def _rsqrt(p: P) -> Tangents:
    return _slope(p, p.out * p.out * p.out * -0.5)


@tangent(SIGMOID)
def _sigmoid(p: P) -> Tangents:
    return _slope(p, p.out * (1 - p.out))


@tangent(SILU)
def _silu(p: P) -> Tangents:
    (x,) = p.primals
    s = x.apply(SIGMOID, NONE)
    return _slope(p, s * (x * (1 - s) + 1))


@tangent(e.SIN)
def _sin(p: P) -> Tangents:
    return _slope(p, p.primals[0].apply(e.COS, NONE))


@tangent(e.COS)
def _cos(p: P) -> Tangents:
    return _slope(p, -p.primals[0].apply(e.SIN, NONE))


@tangent(e.TANH)
def _tanh(p: P) -> Tangents:
    return _slope(p, 1 - p.out * p.out)


TWO_OVER_ROOT_PI: Number = 2 / math.sqrt(math.pi)


@tangent(e.ERF)
def _erf(p: P) -> Tangents:
    x = p.primals[0]
    return _slope(p, (-(x * x)).apply(e.EXP, NONE) * TWO_OVER_ROOT_PI)


@tangent(reductions.REDUCE_MAX, reductions.REDUCE_MIN)
def _reduce_extreme(p: P) -> Tangents:
    (x,), (t,) = p.primals, p.tangents
    assert t is not None
    axes = p.attributes.axes
    hit = x.equals(p.out.spread(x.type, axes)).cast(x.type.dtype)
    return ((t * hit).sum(axes) / hit.sum(axes),)


@tangent(reductions.REDUCE_PROD)
def _reduce_prod(p: P) -> Tangents:
    """Pairs are multiplied as dual numbers, level by level."""
    (x,), (t,) = p.primals, p.tangents
    assert t is not None
    axes = p.attributes.axes
    kept = [i for i in range(x.type.rank) if i not in axes]
    shape = (*p.out.type.shape, math.prod(x.type.shape[i] for i in axes))
    x, t = (v.permute([*kept, *axes]).reshape(shape) for v in (x, t))
    last = len(shape) - 1
    n = shape[-1]
    if n == 0:
        return (None,)
    while n > 1:
        even, odd = ((v.range(last, 0, n - n % 2, 2), v.range(last, 1, n, 2)) for v in (x, t))
        pair = even[0] * even[1], odd[0] * even[1] + even[0] * odd[1]
        rest = (x.range(last, n - 1, n), t.range(last, n - 1, n)) if n % 2 else None
        x, t = (
            pair if rest is None else (_join(a, b, last) for a, b in zip(pair, rest, strict=True))
        )
        n = (n + 1) // 2
    return (t.reshape(p.out.type.shape),)


@tangent(reductions.SORT, reductions.TOP_K)
def _ordered(p: P) -> Tangents:
    (t,) = p.tangents
    assert t is not None
    return t.take_along(p.results[1], p.attributes.axis), None


def _join(a: N, b: N, axis: int) -> N:
    return a.apply(shaping.CONCAT, shaping.Concat(axis), b)


def _sum(a: N | None, b: N | None) -> N | None:
    if a is None or b is None:
        return b if a is None else a
    return a + b


def _tangent_or_zero(primal: N, t: N | None) -> N:
    return primal.like(0) if t is None else t
