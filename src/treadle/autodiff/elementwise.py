"""The vjp of each elementwise op. Edges follow PyTorch's subgradients."""

from __future__ import annotations

import math

from treadle.autodiff.backward import VJP, Cotangent, no_gradient
from treadle.frontend.coerce import cast
from treadle.frontend.functions.arithmetic import (
    cos,
    eq,
    exp,
    floor_divide,
    ge,
    log,
    logical_and,
    lt,
    sign,
    sin,
    where,
)
from treadle.frontend.functions.arithmetic import pow as power
from treadle.frontend.scopes import bind
from treadle.frontend.tensor import Tensor
from treadle.ir.op import NONE
from treadle.ir.ops import elementwise as e
from treadle.ir.ops import indexing, reductions
from treadle.ir.ops.leaves import CONSTANT, INPUT, IOTA, PARAMETER, STATE

vjp = VJP
Cts = tuple[Cotangent, ...]

vjp(
    INPUT,
    PARAMETER,
    STATE,
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
)(no_gradient)


@vjp(reductions.SHARD_SUM)
def shard_sum_vjp(ct: Tensor, out: Tensor, x: Tensor) -> Cts:
    """Every shard's loss depends on each shard's x: dx = Σ ct over shards"""
    return bind(reductions.SHARD_SUM, NONE, ct)


@vjp(e.NEG)
def neg_vjp(ct: Tensor, out: Tensor, x: Tensor) -> Cts:
    return (-ct,)


@vjp(e.ABS)
def abs_vjp(ct: Tensor, out: Tensor, x: Tensor) -> Cts:
    """dx = ct · sign x, 0 at 0"""
    return (ct * sign(x),)


@vjp(e.EXP)
def exp_vjp(ct: Tensor, out: Tensor, x: Tensor) -> Cts:
    """dx = ct · eˣ"""
    return (ct * out,)


@vjp(e.LOG)
def log_vjp(ct: Tensor, out: Tensor, x: Tensor) -> Cts:
    """dx = ct / x"""
    return (ct / x,)


@vjp(e.SQRT)
def sqrt_vjp(ct: Tensor, out: Tensor, x: Tensor) -> Cts:
    """dx = ct / 2√x"""
    return (ct / (out * 2),)


@vjp(e.RSQRT)
def rsqrt_vjp(ct: Tensor, out: Tensor, x: Tensor) -> Cts:
    """dx = −½ ct · x^(−3/2)"""
    return (ct * (out * out * out * -0.5),)


@vjp(e.SIN)
def sin_vjp(ct: Tensor, out: Tensor, x: Tensor) -> Cts:
    return (ct * cos(x),)


@vjp(e.COS)
def cos_vjp(ct: Tensor, out: Tensor, x: Tensor) -> Cts:
    return (-(ct * sin(x)),)


@vjp(e.TANH)
def tanh_vjp(ct: Tensor, out: Tensor, x: Tensor) -> Cts:
    """dx = ct · (1 − tanh²x)"""
    return (ct * (1 - out * out),)


@vjp(e.ERF)
def erf_vjp(ct: Tensor, out: Tensor, x: Tensor) -> Cts:
    """dx = ct · 2/√π · e^(−x²)"""
    return (ct * (exp(-(x * x)) * (2 / math.sqrt(math.pi))),)


@vjp(e.ADD)
def add_vjp(ct: Tensor, out: Tensor, x: Tensor, y: Tensor) -> Cts:
    return ct, ct


@vjp(e.SUB)
def sub_vjp(ct: Tensor, out: Tensor, x: Tensor, y: Tensor) -> Cts:
    return ct, -ct


@vjp(e.MUL)
def mul_vjp(ct: Tensor, out: Tensor, x: Tensor, y: Tensor) -> Cts:
    return ct * y, ct * x


@vjp(e.DIV)
def div_vjp(ct: Tensor, out: Tensor, x: Tensor, y: Tensor) -> Cts:
    """dx = ct / y, dy = −ct · (x / y) / y"""
    dx = ct / y
    return dx, -(dx * out)


@vjp(e.MOD)
def mod_vjp(ct: Tensor, out: Tensor, x: Tensor, y: Tensor) -> Cts:
    """x mod y = x − y ⌊x / y⌋"""
    return ct, -(ct * floor_divide(x, y))


@vjp(e.MAX)
def max_vjp(ct: Tensor, out: Tensor, x: Tensor, y: Tensor) -> Cts:
    """All to the larger, half to each at a tie."""
    shared = where(eq(x, y), ct * 0.5, ct)
    return where(lt(x, y), 0, shared), where(lt(y, x), 0, shared)


@vjp(e.MIN)
def min_vjp(ct: Tensor, out: Tensor, x: Tensor, y: Tensor) -> Cts:
    """All to the smaller, half to each at a tie."""
    shared = where(eq(x, y), ct * 0.5, ct)
    return where(lt(y, x), 0, shared), where(lt(x, y), 0, shared)


@vjp(e.POW)
def pow_vjp(ct: Tensor, out: Tensor, x: Tensor, y: Tensor) -> Cts:
    """dx = ct · y xʸ⁻¹, 0 where y = 0; dy = ct · xʸ log x, 0 where x = 0 and y ≥ 0"""
    slope = y * power(x, y - 1)
    growth = where(logical_and(eq(x, 0), ge(y, 0)), 0, out * log(x))
    return ct * where(eq(y, 0), 0, slope), ct * growth


@vjp(e.ATAN2)
def atan2_vjp(ct: Tensor, out: Tensor, y: Tensor, x: Tensor) -> Cts:
    """dy = ct · x / (x² + y²), dx = −ct · y / (x² + y²), 0 at the origin"""
    square = x * x + y * y
    share = ct / where(eq(square, 0), 1, square)
    return share * x, -(share * y)


@vjp(e.WHERE)
def where_vjp(ct: Tensor, out: Tensor, condition: Tensor, x: Tensor, y: Tensor) -> Cts:
    return None, where(condition, ct, 0), where(condition, 0, ct)


@vjp(e.CAST)
def cast_vjp(attributes: e.Cast, ct: Tensor, out: Tensor, x: Tensor) -> Cts:
    return (cast(ct, x.dtype),)
