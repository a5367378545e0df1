"""Samples of every op: attributes and operands that exercise it, for the tests of every backend.

Values are chosen where the op is smooth, so that finite differences apply; edges have tests of
their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import numpy as np

from treadle.base import dtypes
from treadle.frontend.functions.arithmetic import tanh
from treadle.frontend.tensor import Tensor
from treadle.frontend.tracing import trace
from treadle.ir import composites as c
from treadle.ir.control import CALL, SCAN, Call, Scan
from treadle.ir.literal import ArrayLiteral
from treadle.ir.op import NONE, Op, infer_types
from treadle.ir.ops import elementwise as e
from treadle.ir.ops import indexing, leaves, linear, reductions, shaping
from treadle.ir.types import TensorType
from treadle.verify.sampling import SAMPLES, SHAPES, Draw, Sample, Samples, flag, integer, real


def samples_of(op: Op) -> list[Sample]:
    return list(SAMPLES[op]())


def _elementwise(
    arity: int, low: float = -2.0, high: float = 2.0, integers: bool = False, reals: bool = True
) -> Callable[[], Samples]:
    def make() -> Samples:
        for shape in SHAPES if reals else ():
            yield Sample(NONE, (real(*shape, low=low, high=high),) * arity)
        if integers:
            yield Sample(NONE, (integer(3, 4),) * arity)

    return make


SAMPLES(e.NEG, e.ABS, e.SIGN)(_elementwise(1, integers=True))
SAMPLES(e.FLOOR, e.EXP, e.SIN, e.COS, e.TANH, e.ERF, e.STOP_GRADIENT)(_elementwise(1))
SAMPLES(reductions.SHARD_SUM)(_elementwise(1))
SAMPLES(e.LOG, e.SQRT, e.RSQRT)(_elementwise(1, 0.2, 3.0))
SAMPLES(e.ADD, e.SUB, e.MUL, e.MAX, e.MIN, e.EQ, e.LT, e.LE)(_elementwise(2, integers=True))
SAMPLES(e.DIV)(_elementwise(2, 0.3, 3.0))
SAMPLES(e.ATAN2)(_elementwise(2))
SAMPLES(e.POW)(_elementwise(2, 0.3, 3.0))


@SAMPLES(e.FLOORDIV, e.MOD)
def _division() -> Samples:
    for shape in SHAPES:
        # Quotients stay between whole numbers, where the derivative exists.
        yield Sample(NONE, (real(*shape, low=4.1, high=4.7), real(*shape, low=1.1, high=1.3)))
        yield Sample(NONE, (real(*shape, low=-4.7, high=-4.1), real(*shape, low=1.1, high=1.3)))
    yield Sample(NONE, (integer(3, 4), integer(3, 4, low=1, high=5)))
    yield Sample(NONE, (integer(3, 4), integer(3, 4, low=-5, high=-1)))


@SAMPLES(e.NOT)
def _not() -> Samples:
    yield Sample(NONE, (flag(3, 4),))
    yield Sample(NONE, (integer(5),))


@SAMPLES(e.AND, e.OR, e.XOR)
def _logic() -> Samples:
    yield Sample(NONE, (flag(3, 4), flag(3, 4)))
    yield Sample(NONE, (integer(5), integer(5)))


@SAMPLES(e.WHERE)
def _where() -> Samples:
    for shape in SHAPES:
        yield Sample(NONE, (flag(*shape), real(*shape), real(*shape)))
    yield Sample(NONE, (flag(4), integer(4), integer(4)))


@SAMPLES(e.CAST)
def _cast() -> Samples:
    yield Sample(e.Cast(dtypes.float64), (real(3, 4),))
    yield Sample(e.Cast(dtypes.bfloat16), (real(3, 4),))
    yield Sample(e.Cast(dtypes.int32), (real(5, low=-9.0, high=9.0),))
    yield Sample(e.Cast(dtypes.bool_), (integer(6, low=-1, high=1),))
    yield Sample(e.Cast(dtypes.float32), (integer(6),))
    yield Sample(e.Cast(dtypes.float32), (flag(6),))
    yield Sample(e.Cast(dtypes.uint8), (integer(6),))


@SAMPLES(leaves.INPUT, leaves.PARAMETER, leaves.STATE)
def _leaf() -> Samples:
    yield Sample(leaves.Leaf("x", TensorType((2, 3))), ())


@SAMPLES(leaves.CONSTANT)
def _constant() -> Samples:
    for value in (0, 1.5, -3, math.pi, 1e-30):
        yield Sample(leaves.Constant(value, TensorType((2, 3))), ())
    yield Sample(leaves.Constant(7, TensorType((), dtypes.int32)), ())
    yield Sample(leaves.Constant(True, TensorType((2,), dtypes.bool_)), ())
    array = ArrayLiteral(np.array([[1.5, -2.0], [0.1, 3e7]], np.float32))
    yield Sample(leaves.Constant(array, TensorType((2, 2))), ())


@SAMPLES(leaves.IOTA)
def _iota() -> Samples:
    yield Sample(leaves.Iota(0, (4, 3), dtypes.int32), ())
    yield Sample(leaves.Iota(1, (4, 3), dtypes.float32), ())
    yield Sample(leaves.Iota(0, (0,), dtypes.int64), ())


@SAMPLES(reductions.REDUCE_SUM, reductions.REDUCE_PROD)
def _reduce() -> Samples:
    for axes in ((), (0,), (1,), (2,), (0, 2), (0, 1, 2)):
        yield Sample(reductions.Reduce(axes), (real(2, 3, 5, low=0.3),))
    yield Sample(reductions.Reduce((0,)), (real(0, 3),))
    yield Sample(reductions.Reduce((1,)), (real(0, 3),))
    yield Sample(reductions.Reduce(()), (real(),))
    yield Sample(reductions.Reduce((0,)), (integer(6, low=-3, high=3),))


@SAMPLES(reductions.REDUCE_MAX, reductions.REDUCE_MIN)
def _extreme() -> Samples:
    for axes in ((), (0,), (2,), (0, 2), (0, 1, 2)):
        yield Sample(reductions.Reduce(axes), (real(2, 3, 5),))
    yield Sample(reductions.Reduce((1,)), (real(0, 3),))
    yield Sample(reductions.Reduce((0,)), (integer(6),))


@SAMPLES(reductions.ARGMAX, reductions.ARGMIN)
def _arg() -> Samples:
    for axis in (0, 1, 2):
        yield Sample(reductions.ArgReduce(axis), (real(2, 3, 5),))
    yield Sample(reductions.ArgReduce(0), (integer(6),))


@SAMPLES(reductions.CUMSUM)
def _cumsum() -> Samples:
    for axis in (0, 1):
        for reverse in (False, True):
            yield Sample(reductions.Cumulate(axis, reverse), (real(3, 5),))
    yield Sample(reductions.Cumulate(0), (real(0, 3),))
    yield Sample(reductions.Cumulate(0), (integer(6),))


@SAMPLES(reductions.SORT)
def _sort() -> Samples:
    for axis in (0, 1):
        for descending in (False, True):
            yield Sample(reductions.Sort(axis, descending), (real(3, 5),))
    yield Sample(reductions.Sort(0), (integer(8, low=-2, high=2),))


@SAMPLES(reductions.TOP_K)
def _top_k() -> Samples:
    for axis in (0, 1):
        for largest in (False, True):
            yield Sample(reductions.TopK(2, axis, largest), (real(3, 5),))
    yield Sample(reductions.TopK(0, 0), (real(4),))
    yield Sample(reductions.TopK(3, 0), (integer(8, low=-2, high=2),))


@SAMPLES(shaping.RESHAPE)
def _reshape() -> Samples:
    yield Sample(shaping.Reshape((4, 3)), (real(3, 4),))
    yield Sample(shaping.Reshape((2, 1, 6)), (real(3, 4),))
    yield Sample(shaping.Reshape(()), (real(1, 1),))
    yield Sample(shaping.Reshape((0, 7)), (real(3, 0),))


@SAMPLES(shaping.PERMUTE)
def _permute() -> Samples:
    yield Sample(shaping.Permute((1, 0)), (real(3, 4),))
    yield Sample(shaping.Permute((2, 0, 1)), (real(2, 3, 5),))
    yield Sample(shaping.Permute(()), (real(),))


@SAMPLES(shaping.BROADCAST)
def _broadcast() -> Samples:
    yield Sample(shaping.Broadcast((3, 4), (1,)), (real(4),))
    yield Sample(shaping.Broadcast((3, 4), (0,)), (real(3),))
    yield Sample(shaping.Broadcast((2, 3, 5), (0, 2)), (real(2, 5),))
    yield Sample(shaping.Broadcast((3,), ()), (real(),))
    yield Sample(shaping.Broadcast((0, 3), (1,)), (real(3),))


@SAMPLES(shaping.SLICE)
def _slice() -> Samples:
    yield Sample(shaping.Slice((1, 0), (3, 4), (1, 1)), (real(3, 4),))
    yield Sample(shaping.Slice((0, 1), (6, 5), (2, 3)), (real(6, 5),))
    yield Sample(shaping.Slice((2,), (2,), (1,)), (real(4),))


@SAMPLES(shaping.PAD)
def _pad() -> Samples:
    yield Sample(shaping.Pad((1, 0), (2, 1), (0, 0), 0), (real(3, 4),))
    yield Sample(shaping.Pad((0, 1), (1, 0), (2, 1), -1.5), (real(3, 4),))
    yield Sample(shaping.Pad((1,), (2,), (1,), 0), (real(0),))
    yield Sample(shaping.Pad((1,), (1,), (0,), 7), (integer(3),))


@SAMPLES(shaping.CONCAT)
def _concat() -> Samples:
    yield Sample(shaping.Concat(0), (real(2, 3), real(1, 3)))
    yield Sample(shaping.Concat(1), (real(2, 3), real(2, 0), real(2, 4)))
    yield Sample(shaping.Concat(0), (integer(2), integer(3)))


@SAMPLES(shaping.FLIP)
def _flip() -> Samples:
    yield Sample(shaping.Flip((0,)), (real(3, 4),))
    yield Sample(shaping.Flip((0, 1)), (real(3, 4),))


@SAMPLES(shaping.DYNAMIC_SLICE)
def _dynamic_slice() -> Samples:
    yield Sample(shaping.DynamicSlice((2, 3)), (real(4, 5), integer(2, low=0, high=2)))
    yield Sample(shaping.DynamicSlice((2, 3)), (real(4, 5), integer(2, low=-4, high=9)))


@SAMPLES(shaping.DYNAMIC_UPDATE)
def _dynamic_update() -> Samples:
    for low, high in ((0, 2), (-4, 9)):
        starts = integer(2, low=low, high=high)
        yield Sample(shaping.DynamicUpdate(), (real(4, 5), real(2, 3), starts))


@SAMPLES(linear.CONTRACT)
def _contract() -> Samples:
    f32 = dtypes.float32
    for spec, x, y in (
        ("ab,bc->ac", (3, 4), (4, 5)),
        ("abc,dc->abd", (2, 3, 4), (5, 4)),
        ("abcd,abed->abce", (2, 2, 3, 4), (2, 2, 5, 4)),
        ("a,a->", (6,), (6,)),
        ("a,b->ba", (3,), (4,)),
        ("abc,cbd->dba", (2, 3, 4), (4, 3, 5)),
        ("ab,ab->ba", (2, 3), (2, 3)),
        ("ab,bc->ac", (3, 0), (0, 5)),
    ):
        yield Sample(linear.Contraction(spec, f32), (real(*x), real(*y)))
    narrow = Draw(TensorType((3, 4), dtypes.bfloat16)), Draw(TensorType((4, 2), dtypes.bfloat16))
    yield Sample(linear.Contraction("ab,bc->ac", f32), narrow)
    yield Sample(linear.Contraction("ab,bc->ac", dtypes.int32), (integer(2, 3), integer(3, 2)))


_WINDOWS = (
    ((2, 7), linear.Window((1,), (3,), (1,), (1,))),
    ((2, 9), linear.Window((1,), (2,), (3,), (2,))),
    ((1, 5, 6), linear.Window((1, 2), (3, 2), (2, 1), (1, 2))),
    ((4, 4, 4), linear.Window((0, 1, 2), (2, 2, 3), (1, 2, 1), (1, 1, 1))),
)


@SAMPLES(linear.WINDOW)
def _window() -> Samples:
    for shape, window in _WINDOWS:
        yield Sample(window, (real(*shape),))


@SAMPLES(linear.UNWINDOW)
def _unwindow() -> Samples:
    for shape, window in _WINDOWS:
        yield Sample(linear.Unwindow(window, shape), (real(*window.windowed_shape(shape)),))


@SAMPLES(indexing.GATHER)
def _gather() -> Samples:
    index = integer(2, 3, low=0, high=3)
    yield Sample(indexing.Gather(0), (real(4, 5), index))
    yield Sample(indexing.Gather(1), (real(5, 4, 2), index))
    yield Sample(indexing.Gather(1, 1), (real(2, 4, 3), index))
    yield Sample(indexing.Gather(2, 1), (real(2, 5, 4), index))
    yield Sample(indexing.Gather(0), (real(4), integer(low=0, high=3)))
    yield Sample(indexing.Gather(0), (real(4, 3), integer(0, low=0, high=3)))


@SAMPLES(indexing.SCATTER_ADD)
def _scatter_add() -> Samples:
    index = integer(2, 3, low=0, high=3)
    yield Sample(indexing.ScatterAdd(0, 4), (real(2, 3, 5), index))
    yield Sample(indexing.ScatterAdd(1, 4), (real(5, 2, 3, 2), index))
    yield Sample(indexing.ScatterAdd(1, 4, 1), (real(2, 3, 3), index))
    yield Sample(indexing.ScatterAdd(2, 4, 1), (real(2, 5, 3), index))
    yield Sample(indexing.ScatterAdd(0, 4), (real(), integer(low=0, high=3)))


@SAMPLES(indexing.RANDOM_BITS)
def _random_bits() -> Samples:
    for call in ((0, (3, 5)), (7, ()), (65535, (4,)), (1, (0,)), (3, (2, 6), 3)):
        yield Sample(indexing.RandomBits(*call), (Draw(indexing.KEY_TYPE),))


def call_body(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return tanh(x) * y, x + y


@SAMPLES(CALL)
def _call() -> Samples:
    body = trace(call_body, TensorType((3,)), TensorType((3,)))
    yield Sample(Call(body), (real(3), real(3)))
    yield Sample(Call(body, recompute=True), (real(3), real(3)))


def scan_body(w: Tensor, h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    new = tanh(h * w + x)
    return new, new * h


@SAMPLES(SCAN)
def _scan() -> Samples:
    vector = TensorType((3,))
    body = trace(scan_body, vector, vector, vector)
    for reverse in (False, True):
        for recompute in (False, True):
            attributes = Scan(body, 1, 1, 4, reverse, recompute)
            yield Sample(attributes, (real(3), real(3), real(4, 3)))


SAMPLES(c.SIGMOID, c.SILU, c.RELU)(_elementwise(1))


@SAMPLES(c.GELU)
def _gelu() -> Samples:
    for shape in SHAPES:
        yield Sample(c.Gelu("none"), (real(*shape),))
        yield Sample(c.Gelu("tanh"), (real(*shape),))


@SAMPLES(c.SOFTPLUS)
def _softplus() -> Samples:
    for shape in SHAPES:
        yield Sample(c.Softplus(), (real(*shape),))
    yield Sample(c.Softplus(2.0, 1.1), (real(9),))


@SAMPLES(c.MEAN)
def _mean() -> Samples:
    for axes in ((0,), (1,), (0, 2), (0, 1, 2)):
        yield Sample(c.Axes(axes), (real(2, 3, 5),))


@SAMPLES(c.LOGSUMEXP)
def _logsumexp() -> Samples:
    yield from _mean()
    yield Sample(c.Axes((0,)), (real(6, low=-60.0, high=60.0),))


@SAMPLES(c.VAR)
def _var() -> Samples:
    for axes, correction in (((0,), 1), ((1,), 0), ((0, 2), 1), ((0, 1, 2), 2)):
        yield Sample(c.Variance(axes, correction), (real(2, 3, 5),))


@SAMPLES(c.SOFTMAX, c.LOG_SOFTMAX)
def _softmax() -> Samples:
    for axis in (0, 1, 2):
        yield Sample(c.Axis(axis), (real(2, 3, 5),))
    yield Sample(c.Axis(0), (real(6, low=-60.0, high=60.0),))


@SAMPLES(c.LAYER_NORM)
def _layer_norm() -> Samples:
    yield Sample(c.Norm(1, 1e-5), (real(3, 6),))
    yield Sample(c.Norm(1, 1e-5), (real(3, 6), real(6)))
    yield Sample(c.Norm(1, 1e-3), (real(2, 3, 6), real(6), real(6)))
    yield Sample(c.Norm(2, 1e-5), (real(2, 3, 4), real(3, 4), real(3, 4)))


@SAMPLES(c.RMS_NORM)
def _rms_norm() -> Samples:
    yield Sample(c.Norm(1, 1e-6), (real(3, 6),))
    yield Sample(c.Norm(1, 1e-3), (real(2, 3, 6), real(6)))
    yield Sample(c.Norm(2, 1e-6), (real(2, 3, 4), real(3, 4)))


_ATTENTION = (
    # batch, heads, groups, queries, keys, width, value width, causal, the bias's shape
    (1, 2, 2, 3, 3, 4, 4, False, ()),
    (2, 2, 1, 4, 4, 2, 3, True, ()),
    (1, 4, 2, 3, 5, 2, 2, False, (1, 4, 3, 5)),
    (1, 2, 2, 4, 4, 3, 3, True, (1, 2, 4, 4)),
    (2, 2, 1, 3, 4, 2, 2, False, (2, 1, 1, 4)),
    (2, 2, 2, 3, 2, 2, 1, True, (1, 2, 3, 1)),
    (2, 4, 2, 2, 3, 1, 2, False, (1, 1, 2, 3)),
)


def _attention_draws() -> Iterable[tuple[c.Attention, tuple[Draw, ...], tuple[Draw, ...]]]:
    for b, h, g, t, s, d, dv, causal, bias_shape in _ATTENTION:
        operands = (real(b, h, t, d), real(b, g, s, d), real(b, g, s, dv))
        bias = (real(*bias_shape),) if bias_shape else ()
        results = (real(b, h, t, dv), real(b, h, t, dv), real(b, h, t))
        yield c.Attention(d**-0.5, causal), (*operands, *bias), results


@SAMPLES(c.BATCH_NORM)
def _batch_norm() -> Samples:
    yield Sample(c.BatchNorm(1e-3), (real(4, 3),))
    yield Sample(c.BatchNorm(1e-3), (real(3, 2, 4), real(2), real(2)))
    yield Sample(c.BatchNorm(1e-5), (real(2, 3, 2, 3), real(3), real(3)))


@SAMPLES(c.GROUP_NORM)
def _group_norm() -> Samples:
    yield Sample(c.GroupNorm(2, 1e-3), (real(3, 4),))
    yield Sample(c.GroupNorm(1, 1e-3), (real(2, 3, 4), real(3), real(3)))
    yield Sample(c.GroupNorm(3, 1e-5), (real(2, 6, 2, 3), real(6), real(6)))
    yield Sample(c.GroupNorm(3, 1e-5), (real(2, 3, 5),))


@SAMPLES(c.ATTENTION)
def _attention() -> Samples:
    for attributes, operands, _ in _attention_draws():
        yield Sample(attributes, operands)


@SAMPLES(c.ATTENTION_GRAD)
def _attention_grad() -> Samples:
    for attributes, operands, results in _attention_draws():
        yield Sample(attributes, (*results, *operands))


@SAMPLES(c.CROSS_ENTROPY)
def _cross_entropy() -> Samples:
    for smoothing in (0.0, 0.1):
        yield Sample(c.CrossEntropy(smoothing), (real(4, 5), integer(4, low=0, high=4)))
        yield Sample(c.CrossEntropy(smoothing), (real(2, 3, 5), integer(2, 3, low=0, high=4)))


def _head_draws() -> Iterable[tuple[c.HeadCrossEntropy, tuple[Draw, ...]]]:
    for n, d, classes, smoothing, has_bias in ((4, 3, 5, 0.0, False), (3, 2, 6, 0.1, True)):
        operands = (real(n, d), real(classes, d), integer(n, low=0, high=classes - 1))
        yield c.HeadCrossEntropy(smoothing), (*operands, *([real(classes)] if has_bias else []))
    operands = (real(4, 3), real(5, 3), integer(4, low=0, high=4))
    yield c.HeadCrossEntropy(rounded=True), operands


@SAMPLES(c.LINEAR_CROSS_ENTROPY)
def _linear_cross_entropy() -> Samples:
    for attributes, operands in _head_draws():
        yield Sample(attributes, operands)


@SAMPLES(c.LINEAR_CROSS_ENTROPY_GRAD)
def _linear_cross_entropy_grad() -> Samples:
    for attributes, operands in _head_draws():
        rows = operands[0].type.shape[:1]
        yield Sample(attributes, (real(*rows), *operands))


def _conv_draws() -> Iterable[tuple[c.Conv, Draw, Draw]]:
    yield c.Conv((1,), ((0, 0),), (1,)), real(2, 3, 6), real(4, 3, 3)
    yield c.Conv((2,), ((1, 2),), (2,), 2), real(1, 4, 7), real(2, 2, 2)
    two = c.Conv((1, 2), ((1, 1), (0, 1)), (1, 1))
    yield two, real(2, 2, 4, 5), real(3, 2, 3, 2)
    depthwise = c.Conv((1, 1), ((1, 1), (1, 1)), (1, 2), 3)
    yield depthwise, real(1, 3, 4, 6), real(3, 1, 2, 3)
    three = c.Conv((1, 1, 2), ((0, 0), (1, 1), (0, 0)), (1, 1, 1))
    yield three, real(1, 2, 3, 2, 4), real(2, 2, 2, 2, 2)


@SAMPLES(c.CONV)
def _conv() -> Samples:
    for attributes, x, w in _conv_draws():
        yield Sample(attributes, (x, w))


def _conv_gradients(of: int) -> Samples:
    for attributes, *given in _conv_draws():
        (out,) = infer_types(c.CONV, attributes, tuple(g.type for g in given))
        yield Sample(
            c.ConvGrad(attributes, given[of].type.shape), (real(*out.shape), given[1 - of])
        )


SAMPLES(c.CONV_GRAD_X)(lambda: _conv_gradients(0))
SAMPLES(c.CONV_GRAD_W)(lambda: _conv_gradients(1))


@SAMPLES(c.MAX_POOL, c.AVG_POOL)
def _pool() -> Samples:
    yield Sample(c.Pool((2,), (2,), (0,), (1,)), (real(2, 3, 6),))
    yield Sample(c.Pool((3, 2), (1, 2), (1, 1), (1, 1)), (real(1, 2, 4, 5),))
    yield Sample(c.Pool((3, 2), (2, 2), (1, 0), (1, 1), False), (real(1, 2, 5, 4),))


@SAMPLES(c.ONE_HOT)
def _one_hot() -> Samples:
    yield Sample(c.OneHot(5), (integer(2, 3, low=0, high=4),))
    yield Sample(c.OneHot(3, dtypes.int32), (integer(4, low=-1, high=4),))


@SAMPLES(c.EMBEDDING)
def _embedding() -> Samples:
    yield Sample(NONE, (real(4, 3), integer(2, 3, low=0, high=3)))
