"""Samples of every op by shape, for the sizes at which a compiled loop changes its form.

`samples.py` has what finite differences and symbolic domains can afford: a few elements. A loop
whose iterations are lanes of a vector is right for those and may be wrong for more, so a backend is
compared with the oracle on these too: below, at and above the lanes of a vector and the blocks of
the schedule, along every axis.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from treadle.base import dtypes
from treadle.frontend.tracing import trace
from treadle.ir import composites as c
from treadle.ir.control import CALL, SCAN, Call, Scan
from treadle.ir.op import NONE, Attributes, Op, RuleTable, infer_types
from treadle.ir.ops import elementwise as e
from treadle.ir.ops import indexing, leaves, linear, reductions, shaping
from treadle.ir.types import TensorType
from treadle.verify.samples import call_body, scan_body
from treadle.verify.sampling import Draw, Sample, Samples, flag, integer, real

Shape = tuple[int, ...]

# One vector and a rest of 4, 8, 16 and 32 lanes, in rows, in columns and in an axis between.
LANES: tuple[Shape, ...] = ((33,), (17, 3), (3, 17), (2, 33, 4))
# Below, at and above every width, alone, beside few columns and beside few rows.
AROUND: tuple[Shape, ...] = (
    *((n,) for n in (3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 64, 65)),
    *((n, 3) for n in (5, 8, 15, 16, 31, 32, 64, 257)),
    *((3, n) for n in (5, 8, 15, 16, 31, 32, 65)),
    *((33, 2), (33, 5), (64, 7), (7, 64), (5, 33), (9, 5), (16, 16), (17, 18), (32, 33)),
    *((33, 2, 4), (2, 4, 33), (5, 16, 3), (17, 3, 5)),
)
# Above what one kernel, block, panel or partial sum holds.
BLOCKS: tuple[Shape, ...] = ((20_000,), (65, 97), (129, 33), (6000, 3), (3, 6000), (600, 4))
# The most elements of an operand or result: products of both axes of a long shape are left out.
MOST = 1 << 17

WIDE: RuleTable[Callable[[Shape], Samples]] = RuleTable("wide samples")


def wide_samples(op: Op, shapes: Iterable[Shape]) -> list[Sample]:
    """The op at each of the shapes, where it has one of that rank and it is not too large."""
    found = [s for shape in shapes for s in WIDE[op](shape)]
    return [s for s in found if _is_affordable(op, s)]


def _is_affordable(op: Op, sample: Sample) -> bool:
    operands = tuple(d.type for d in sample.operands)
    results = infer_types(op, sample.attributes, operands)
    return all(t.size <= MOST for t in (*operands, *results))


def _elementwise(
    arity: int, low: float = -2.0, high: float = 2.0, integers: bool = False
) -> Callable[[Shape], Samples]:
    def make(shape: Shape) -> Samples:
        yield Sample(NONE, (real(*shape, low=low, high=high),) * arity)
        if integers:
            yield Sample(NONE, (integer(*shape),) * arity)

    return make


WIDE(e.NEG, e.ABS, e.SIGN)(_elementwise(1, integers=True))
WIDE(e.FLOOR, e.EXP, e.SIN, e.COS, e.TANH, e.ERF, e.STOP_GRADIENT)(_elementwise(1))
WIDE(reductions.SHARD_SUM)(_elementwise(1))
WIDE(c.SIGMOID, c.SILU, c.RELU)(_elementwise(1))
WIDE(e.LOG, e.SQRT, e.RSQRT)(_elementwise(1, 0.2, 3.0))
WIDE(e.ADD, e.SUB, e.MUL, e.MAX, e.MIN, e.EQ, e.LT, e.LE)(_elementwise(2, integers=True))
WIDE(e.ATAN2)(_elementwise(2))
WIDE(e.DIV, e.POW)(_elementwise(2, 0.3, 3.0))


@WIDE(e.FLOORDIV, e.MOD)
def _division(shape: Shape) -> Samples:
    yield Sample(NONE, (real(*shape, low=4.1, high=4.7), real(*shape, low=1.4, high=1.6)))
    yield Sample(NONE, (integer(*shape), integer(*shape, low=1, high=5)))


@WIDE(e.NOT)
def _not(shape: Shape) -> Samples:
    yield Sample(NONE, (flag(*shape),))
    yield Sample(NONE, (integer(*shape),))


@WIDE(e.AND, e.OR, e.XOR)
def _logic(shape: Shape) -> Samples:
    yield Sample(NONE, (flag(*shape),) * 2)
    yield Sample(NONE, (integer(*shape),) * 2)


@WIDE(e.WHERE)
def _where(shape: Shape) -> Samples:
    yield Sample(NONE, (flag(*shape), real(*shape), real(*shape)))
    yield Sample(NONE, (flag(*shape), integer(*shape), integer(*shape)))


@WIDE(e.CAST)
def _cast(shape: Shape) -> Samples:
    for dtype in (dtypes.float64, dtypes.bfloat16, dtypes.int32):
        yield Sample(e.Cast(dtype), (real(*shape, low=-9.0, high=9.0),))
    for dtype in (dtypes.float32, dtypes.uint8, dtypes.bool_):
        yield Sample(e.Cast(dtype), (integer(*shape, low=0),))
    yield Sample(e.Cast(dtypes.float32), (flag(*shape),))


@WIDE(leaves.CONSTANT)
def _constant(shape: Shape) -> Samples:
    yield Sample(leaves.Constant(1.5, TensorType(shape)), ())


@WIDE(leaves.IOTA)
def _iota(shape: Shape) -> Samples:
    for axis in range(len(shape)):
        yield Sample(leaves.Iota(axis, shape, dtypes.int32), ())


@WIDE(indexing.RANDOM_BITS)
def _random_bits(shape: Shape) -> Samples:
    yield Sample(indexing.RandomBits(7, shape), (Draw(indexing.KEY_TYPE),))


def _subsets(shape: Shape) -> list[Shape]:
    """Every axis, the first with the last, and all."""
    every = tuple(range(len(shape)))
    return sorted({*((axis,) for axis in every), every[:: max(1, len(shape) - 1)], every})


def _over_axes(
    make: Callable[[Shape], Attributes], integers: bool, low: float = -2.0, high: float = 2.0
) -> Callable[[Shape], Samples]:
    def samples(shape: Shape) -> Samples:
        for axes in _subsets(shape):
            yield Sample(make(axes), (real(*shape, low=low, high=high),))
        if integers:
            yield Sample(make((len(shape) - 1,)), (integer(*shape, low=-1, high=2),))

    return samples


# Factors around 1: products of many others leave the narrow floats.
WIDE(reductions.REDUCE_PROD)(_over_axes(reductions.Reduce, True, 0.9, 1.1))
WIDE(reductions.REDUCE_SUM)(_over_axes(reductions.Reduce, True))
WIDE(reductions.REDUCE_MAX, reductions.REDUCE_MIN)(_over_axes(reductions.Reduce, True))
WIDE(c.MEAN, c.LOGSUMEXP)(_over_axes(c.Axes, False))
WIDE(c.VAR)(_over_axes(c.Variance, False))


def _along_axis(
    make: Callable[[int, int], Attributes], integers: bool
) -> Callable[[Shape], Samples]:
    """`make` takes an axis and its size."""

    def samples(shape: Shape) -> Samples:
        for axis, size in enumerate(shape):
            yield Sample(make(axis, size), (real(*shape),))
            if integers:
                yield Sample(make(axis, size), (integer(*shape, low=-2, high=2),))

    return samples


WIDE(reductions.ARGMAX, reductions.ARGMIN)(_along_axis(lambda a, n: reductions.ArgReduce(a), True))
WIDE(reductions.CUMSUM)(_along_axis(lambda a, n: reductions.Cumulate(a, a % 2 == 1), True))
WIDE(reductions.SORT)(_along_axis(lambda a, n: reductions.Sort(a, a % 2 == 1), True))
WIDE(reductions.TOP_K)(_along_axis(lambda a, n: reductions.TopK((n + 1) // 2, a, a % 2 == 0), True))
WIDE(c.SOFTMAX, c.LOG_SOFTMAX)(_along_axis(lambda a, n: c.Axis(a), False))


@WIDE(shaping.RESHAPE)
def _reshape(shape: Shape) -> Samples:
    for other in ((-1,), (1, *shape), shape[::-1]):
        size = TensorType(shape).size
        yield Sample(shaping.Reshape((size,) if other == (-1,) else other), (real(*shape),))


@WIDE(shaping.PERMUTE)
def _permute(shape: Shape) -> Samples:
    yield Sample(shaping.Permute(tuple(reversed(range(len(shape))))), (real(*shape),))
    if len(shape) == 3:
        yield Sample(shaping.Permute((1, 0, 2)), (real(*shape),))


@WIDE(shaping.BROADCAST)
def _broadcast(shape: Shape) -> Samples:
    for axis, size in enumerate(shape):
        yield Sample(shaping.Broadcast(shape, (axis,)), (real(size),))
    yield Sample(shaping.Broadcast((3, *shape), tuple(range(1, len(shape) + 1))), (real(*shape),))


@WIDE(shaping.SLICE)
def _slice(shape: Shape) -> Samples:
    ones = (1,) * len(shape)
    yield Sample(shaping.Slice(ones, shape, ones), (real(*shape),))
    yield Sample(shaping.Slice((0,) * len(shape), shape, (2,) * len(shape)), (real(*shape),))


@WIDE(shaping.PAD)
def _pad(shape: Shape) -> Samples:
    n = len(shape)
    yield Sample(shaping.Pad((1,) * n, (2,) * n, (0,) * n, -1.5), (real(*shape),))
    yield Sample(shaping.Pad((0,) * n, (1,) * n, (1,) * n, 0), (real(*shape),))


@WIDE(shaping.CONCAT)
def _concat(shape: Shape) -> Samples:
    for axis in range(len(shape)):
        short = tuple(1 if a == axis else n for a, n in enumerate(shape))
        yield Sample(shaping.Concat(axis), (real(*shape), real(*short), real(*shape)))


@WIDE(shaping.FLIP)
def _flip(shape: Shape) -> Samples:
    for axes in _subsets(shape):
        yield Sample(shaping.Flip(axes), (real(*shape),))


@WIDE(shaping.DYNAMIC_SLICE)
def _dynamic_slice(shape: Shape) -> Samples:
    sizes = tuple((n + 1) // 2 for n in shape)
    starts = integer(len(shape), low=0, high=min(shape))
    yield Sample(shaping.DynamicSlice(sizes), (real(*shape), starts))


@WIDE(shaping.DYNAMIC_UPDATE)
def _dynamic_update(shape: Shape) -> Samples:
    part = real(*((n + 1) // 2 for n in shape))
    starts = integer(len(shape), low=0, high=min(shape))
    yield Sample(shaping.DynamicUpdate(), (real(*shape), part, starts))


_CONTRACTIONS = {
    1: ("a,a->", "a,b->ab"),
    2: ("ab,cb->ac", "ab,ac->bc", "ab,ab->b", "ab,ab->a"),
    3: ("abc,adc->abd", "abc,abd->acd", "abc,dbc->ad"),
}


@WIDE(linear.CONTRACT)
def _contract(shape: Shape) -> Samples:
    for spec in _CONTRACTIONS[len(shape)]:
        # Every label of y has the size that its place has, which is that of x's where it is x's.
        attributes = linear.Contraction(spec, dtypes.float32)
        yield Sample(attributes, (real(*shape), real(*shape)))


def _windows(shape: Shape) -> Iterable[linear.Window]:
    for axis, size in enumerate(shape):
        if size >= 3:
            yield linear.Window((axis,), (3,), (1,), (1,))
        if size >= 4:
            yield linear.Window((axis,), (2,), (2,), (3,))


@WIDE(linear.WINDOW)
def _window(shape: Shape) -> Samples:
    for window in _windows(shape):
        yield Sample(window, (real(*shape),))


@WIDE(linear.UNWINDOW)
def _unwindow(shape: Shape) -> Samples:
    for window in _windows(shape):
        yield Sample(linear.Unwindow(window, shape), (real(*window.windowed_shape(shape)),))


@WIDE(indexing.GATHER)
def _gather(shape: Shape) -> Samples:
    for axis, size in enumerate(shape):
        yield Sample(indexing.Gather(axis), (real(*shape), integer(33, low=0, high=size - 1)))
    if len(shape) > 1:
        index = integer(shape[0], 5, low=0, high=shape[1] - 1)
        yield Sample(indexing.Gather(1, 1), (real(*shape), index))


@WIDE(indexing.SCATTER_ADD)
def _scatter_add(shape: Shape) -> Samples:
    for axis, size in enumerate(shape):
        yield Sample(indexing.ScatterAdd(axis, 5), (real(*shape), integer(size, low=0, high=4)))
    if len(shape) > 1:
        index = integer(*shape[:2], low=0, high=16)
        yield Sample(indexing.ScatterAdd(1, 17, 1), (real(*shape), index))


@WIDE(CALL)
def _call(shape: Shape) -> Samples:
    body = trace(call_body, TensorType(shape), TensorType(shape))
    for recompute in (False, True):
        yield Sample(Call(body, recompute=recompute), (real(*shape), real(*shape)))


@WIDE(SCAN)
def _scan(shape: Shape) -> Samples:
    row = real(*shape[1:])
    attributes = Scan(trace(scan_body, row.type, row.type, row.type), 1, 1, shape[0], False, False)
    if shape[0] <= 65:  # the oracle runs one iteration after another
        yield Sample(attributes, (row, row, real(*shape)))


@WIDE(c.GELU)
def _gelu(shape: Shape) -> Samples:
    for approximate in ("none", "tanh"):
        yield Sample(c.Gelu(approximate), (real(*shape),))


@WIDE(c.SOFTPLUS)
def _softplus(shape: Shape) -> Samples:
    yield Sample(c.Softplus(2.0, 1.1), (real(*shape),))


@WIDE(c.LAYER_NORM)
def _layer_norm(shape: Shape) -> Samples:
    for dims in range(1, len(shape) + 1):
        affine = real(*shape[len(shape) - dims :])
        yield Sample(c.Norm(dims, 1e-5), (real(*shape), affine, affine))
    yield Sample(c.Norm(1, 1e-5), (real(*shape),))


@WIDE(c.RMS_NORM)
def _rms_norm(shape: Shape) -> Samples:
    for dims in range(1, len(shape) + 1):
        affine = real(*shape[len(shape) - dims :])
        yield Sample(c.Norm(dims, 1e-6), (real(*shape), affine))


@WIDE(c.BATCH_NORM)
def _batch_norm(shape: Shape) -> Samples:
    if len(shape) > 1:
        affine = real(shape[1])
        yield Sample(c.BatchNorm(1e-5), (real(*shape), affine, affine))
        yield Sample(c.BatchNorm(1e-5), (real(*shape),))


@WIDE(c.GROUP_NORM)
def _group_norm(shape: Shape) -> Samples:
    if len(shape) > 1:
        affine = real(shape[1])
        for groups in {g for g in (1, 2, shape[1]) if g and shape[1] % g == 0}:
            yield Sample(c.GroupNorm(groups, 1e-5), (real(*shape), affine, affine))


def _attention_draws(
    shape: Shape,
) -> Iterable[tuple[c.Attention, tuple[Draw, ...], tuple[Draw, ...]]]:
    """The last axes are rows and columns of queries, keys and values.

    Every row meets every other, so that long shapes are left out.
    """
    if len(shape) == 1 or max(shape) > 1000:
        return
    batch, (t, d) = (shape[0] if len(shape) == 3 else 1), shape[-2:]
    for causal in (False, True):
        x, y = real(batch, 2, t, d), real(batch, 1, t, d)
        yield c.Attention(d**-0.5, causal), (x, y, y), (x, x, real(batch, 2, t))
    x, y = real(batch, 2, t, 4), real(batch, 2, d, 4)
    bias = real(batch, 2, t, d)
    yield c.Attention(0.5, False), (x, y, y, bias), (x, x, real(batch, 2, t))


@WIDE(c.ATTENTION)
def _attention(shape: Shape) -> Samples:
    for attributes, operands, _ in _attention_draws(shape):
        yield Sample(attributes, operands)


@WIDE(c.ATTENTION_GRAD)
def _attention_grad(shape: Shape) -> Samples:
    for attributes, operands, results in _attention_draws(shape):
        yield Sample(attributes, (*results, *operands))


@WIDE(c.CROSS_ENTROPY)
def _cross_entropy(shape: Shape) -> Samples:
    target = integer(*shape[:-1], low=0, high=shape[-1] - 1)
    for smoothing in (0.0, 0.1):
        yield Sample(c.CrossEntropy(smoothing), (real(*shape), target))


def _head_draws(shape: Shape) -> Iterable[tuple[c.HeadCrossEntropy, tuple[Draw, ...]]]:
    """Each axis of a matrix as rows, as columns and as classes."""
    if len(shape) != 2:
        return
    a, b = shape
    for rows, width, classes in ((a, b, 5), (5, a, b), (a, 5, b)):
        operands = real(rows, width), real(classes, width), integer(rows, low=0, high=classes - 1)
        yield c.HeadCrossEntropy(0.1), (*operands, real(classes))


@WIDE(c.LINEAR_CROSS_ENTROPY)
def _linear_cross_entropy(shape: Shape) -> Samples:
    for attributes, operands in _head_draws(shape):
        yield Sample(attributes, operands)


@WIDE(c.LINEAR_CROSS_ENTROPY_GRAD)
def _linear_cross_entropy_grad(shape: Shape) -> Samples:
    for attributes, operands in _head_draws(shape):
        yield Sample(attributes, (real(*operands[0].type.shape[:1]), *operands))


def _conv_draws(shape: Shape) -> Iterable[tuple[c.Conv, Draw, Draw]]:
    """The axes as batch, channels and places of one and two dimensions."""
    one = c.Conv((1,), ((1, 1),), (1,))
    if len(shape) == 1:
        yield one, real(2, 3, *shape), real(4, 3, 3)
    if len(shape) == 2:
        rows, columns = shape
        yield one, real(rows, columns, 5), real(3, columns, 3)
        yield c.Conv((2,), ((0, 1),), (1,)), real(2, rows, columns), real(rows, rows, 2)
    if len(shape) == 3:
        two = c.Conv((1, 1), ((1, 1), (0, 0)), (1, 1))
        yield two, real(2, *shape), real(3, shape[0], 3, 2)


@WIDE(c.CONV)
def _conv(shape: Shape) -> Samples:
    for attributes, x, w in _conv_draws(shape):
        yield Sample(attributes, (x, w))


@WIDE(c.CONV_GRAD_X)
def _conv_grad_x(shape: Shape) -> Samples:
    for attributes, x, w in _conv_draws(shape):
        (out,) = infer_types(c.CONV, attributes, (x.type, w.type))
        yield Sample(c.ConvGrad(attributes, x.type.shape), (real(*out.shape), w))


@WIDE(c.CONV_GRAD_W)
def _conv_grad_w(shape: Shape) -> Samples:
    for attributes, x, w in _conv_draws(shape):
        (out,) = infer_types(c.CONV, attributes, (x.type, w.type))
        yield Sample(c.ConvGrad(attributes, w.type.shape), (real(*out.shape), x))


@WIDE(c.MAX_POOL, c.AVG_POOL)
def _pool(shape: Shape) -> Samples:
    yield Sample(c.Pool((2,), (2,), (0,), (1,)), (real(1, 2, *shape),))
    if len(shape) > 1:
        yield Sample(c.Pool((3, 2), (2, 1), (1, 1), (1, 1)), (real(1, 2, *shape),))


@WIDE(c.ONE_HOT)
def _one_hot(shape: Shape) -> Samples:
    yield Sample(c.OneHot(5), (integer(*shape, low=0, high=4),))
    yield Sample(c.OneHot(shape[-1]), (integer(*shape[:-1], low=0, high=shape[-1] - 1),))


@WIDE(c.EMBEDDING)
def _embedding(shape: Shape) -> Samples:
    table = real(9, 3) if len(shape) == 1 else real(*shape[-2:])
    yield Sample(NONE, (table, integer(*shape[:1], low=0, high=table.type.shape[0] - 1)))
