"""Every op and composite compiled: in every dtype it takes, on any number of threads, fused or not."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import treadle as td
from backend import (
    THREADS,
    assert_within,
    build,
    draw,
    rounded_inputs,
    same_bits,
)
from op_samples import COMPUTED, agreement, prepared, samples_in
from treadle.base import dtypes
from treadle.base.dtypes import DType
from treadle.frontend.functions.activations import cross_entropy_rows
from treadle.ir.control import CALL, SCAN
from treadle.ir.op import Op
from treadle.ir.ops import elementwise as e
from treadle.ir.types import TensorType
from treadle.kernel import cost
from treadle.schedule.schedule import schedule
from treadle.verify.samples import samples_of


def cases() -> Iterator[object]:
    for op in COMPUTED:
        for dtype in dtypes.ALL:
            if dtype is not dtypes.int32 and samples_in(op, dtype):
                yield pytest.param(op, dtype, id=f"{op.name}-{dtype}")


CASES = list(cases())


@pytest.mark.parametrize(("op", "dtype"), CASES)
def test_every_op_in_every_dtype_on_any_number_of_threads(op: Op, dtype: DType) -> None:
    graph, arrays = prepared(op, dtype, seed=4)
    built = build(graph, shared=True)
    found = built.on(1).run(arrays)
    assert_within(graph, arrays, found, agreement(op))
    is_usual = dtype in (dtypes.float32, dtypes.int32)  # other dtypes have the same loops
    for threads in (2, 8) if is_usual else (3,):
        assert same_bits(built.on(threads).run(arrays), found), threads


@pytest.mark.parametrize("op", COMPUTED, ids=lambda op: op.name)
def test_every_op_kept_in_memory(op: Op) -> None:
    graph, arrays = prepared(op, dtypes.float32, seed=5)
    assert_within(graph, arrays, build(graph, fuse=False).on(1).run(arrays), agreement(op))


def test_floats_and_integers_are_all_covered() -> None:
    """The cases above are as many as the op table's type rules allow."""
    covered = {(p.values[0], p.values[1]) for p in CASES}
    every_float = set(dtypes.FLOATS)
    for op in COMPUTED:
        taken = {d for o, d in covered if o is op}
        has_floats = any(d.type.is_float for s in samples_of(op) for d in s.operands)
        if has_floats and op is not e.CAST:
            assert every_float <= taken, op
    assert {(e.ADD, d) for d in dtypes.INTEGERS if d is not dtypes.int32} <= covered
    assert (CALL, dtypes.bfloat16) in covered
    assert (SCAN, dtypes.float16) in covered


# Conversions between all dtypes


@pytest.mark.parametrize("source", dtypes.ALL, ids=str)
def test_every_conversion(source: DType) -> None:
    values = np.array([0, 1, -1, 2.5, -2.5, 3.5, 100, 127, 0.1, -0.0, 1e-3])
    if not source.is_float:
        values = np.trunc(values[np.isfinite(values)])
    if source.kind == "uint":
        values = np.abs(values)
    type_ = TensorType(values.shape, source)

    def convert(x):
        signed = [d for d in dtypes.ALL if d.kind != "uint"]
        # A negative number has no meaning in an unsigned dtype.
        unsigned = [d for d in dtypes.ALL if d.kind == "uint"]
        return [td.cast(x, d) for d in signed] + [td.cast(td.abs(x), d) for d in unsigned]

    def of_bool(x):
        return [td.cast(x, d) for d in dtypes.ALL]

    graph = td.trace(of_bool if source is dtypes.bool_ else convert, type_)
    arrays = rounded_inputs(graph, {"x": values})
    assert_within(graph, arrays, build(graph).on(1).run(arrays), 1.0)


@pytest.mark.parametrize("dtype", dtypes.INTEGERS, ids=str)
def test_integers_wrap_and_divide_as_the_oracle(dtype: DType) -> None:
    low, high = dtype.range()
    edges = [low, low + 1, 0, 1, 2, 3, high - 1, high] + ([-1, -2, -3] if low else [])
    x, y = (a.reshape(-1) for a in np.meshgrid(edges, edges))
    type_ = TensorType(x.shape, dtype)

    def all_of_them(x, y):
        found = [x + y, x - y, x * y, td.floor_divide(x, y), td.remainder(x, y), -x, td.abs(x)]
        found += [td.maximum(x, y), td.minimum(x, y), x < y, td.eq(x, y), td.sign(x)]
        return [*found, td.bitwise_and(x, y), td.bitwise_xor(x, y), td.bitwise_not(x)]

    graph = td.trace(all_of_them, type_, type_)
    arrays = {"x": x.astype(dtype.numpy), "y": y.astype(dtype.numpy)}
    assert_within(graph, arrays, build(graph).on(1).run(arrays))


@pytest.mark.parametrize("dtype", dtypes.FLOATS, ids=str)
def test_floats_flow_as_ieee(dtype: DType) -> None:
    """NaN, infinities, zeros of both signs and denormals through what is exact."""
    least = 2.0 ** -{"float64": 1074, "float32": 149, "bfloat16": 133, "float16": 24}[dtype.name]
    edges = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, least, -least, 1.0, -1.5, 65504.0])
    x, y = (a.reshape(-1).astype(dtype.numpy) for a in np.meshgrid(edges, edges))
    type_ = TensorType(x.shape, dtype)

    def all_of_them(x, y):
        found = [
            td.maximum(x, y),
            td.minimum(x, y),
            x < y,
            x <= y,
            td.eq(x, y),
            td.where(x > 0, x, y),
        ]
        found += [td.abs(x), -x, td.sign(x), td.floor(x), td.relu(x), td.isnan(x), td.isfinite(x)]
        square = x.reshape(10, 10)
        found += [td.max(square, 1), td.min(square, 0), td.argmax(square, 1), td.argmin(square, 0)]
        return [
            *found,
            *td.sort(square, 1),
            *td.sort(square, 0, descending=True),
            *td.topk(square, 3),
        ]

    graph = td.trace(all_of_them, type_, type_)
    arrays = {"x": x, "y": y}
    found = build(graph).on(1).run(arrays)
    assert_within(graph, arrays, found, 1.0)
    negated = found[7]
    assert np.signbit(negated).tolist() == (~np.signbit(x)).tolist(), "zeros keep their sign"


# Sizes that fill no vector, and empty ones


SIZES = st.sampled_from([0, 1, 2, 3, 5, 7, 8, 13, 15, 16, 17, 31, 33, 64, 67])


def shaped(x, y):
    """Reductions, norms, order and moves over both axes of a matrix."""
    found = [td.tanh(x) * y + 1, x.sum(0), x.sum(1), (x * y).sum(), td.mean(x + 1, (0,))]
    found += [td.cumsum(x, 0), td.cumsum(x, 1, reverse=True), x.T.reshape(-1), td.flip(x, (0, 1))]
    found += [td.concat([x, y], 0), td.pad(x, [(1, 2), (0, 1)], interior=[1, 0]), x @ y.T, x.T @ y]
    if x.shape[1]:
        found += [td.softmax(x), td.layer_norm(x, y[0] if x.shape[0] else None), td.max(x, 1)]
        found += [*td.sort(x, 1), td.argmax(x, 1), td.logsumexp(x, 1), *td.topk(x, 1)]
    if x.shape[0]:
        found += [td.softmax(x, 0), td.var(x, 0, correction=0), *td.sort(x, 0), td.min(x, 0)]
    if 0 not in x.shape:
        rows = td.cast(td.argmax(x, 1), td.int32)
        found += [
            cross_entropy_rows(x, rows),
            td.embedding(rows, y.T),
            td.max_pool(x[None], (1, 1)),
        ]
        square = td.expand(y[:, 0], x.shape[0], x.shape[0])
        found += [
            td.scatter_add(x.T, rows, square, 0),
            td.conv(x[None, None], y[:1, :1][None, None]),
        ]
    return found


@given(SIZES, SIZES, st.sampled_from(dtypes.FLOATS), st.sampled_from(THREADS[1:]))
@settings(max_examples=12, deadline=None)
def test_odd_and_empty_sizes(rows: int, columns: int, dtype: DType, threads: int) -> None:
    type_ = TensorType((rows, columns), dtype)
    graph = td.trace(shaped, type_, type_)
    arrays = draw(graph, rows * 100 + columns)
    built = build(graph, shared=True)
    found = built.on(1).run(arrays)
    assert_within(graph, arrays, found)
    assert same_bits(built.on(threads).run(arrays), found)


# Long axes are merged, short ones counted


SORTED = [(65,), (3, 100), (100, 3), (2, 257, 3), (1, 129), (7, 1025), (128, 5), (0, 70), (70, 0)]


def to_sort(shape: tuple[int, ...], dtype: DType, seed: int) -> np.ndarray:
    """Many equal ones, and for floats zeros of both signs, infinities and NaN."""
    found = np.round(np.random.default_rng(seed).normal(size=shape) * 3)
    if not dtype.is_float:
        return np.abs(found).astype(dtype.numpy)
    for start, value in enumerate((np.nan, np.inf, -np.inf, -0.0)):
        found.flat[start :: 19 + 2 * start] = value
    return found.astype(dtype.numpy)


def in_order(x: np.ndarray, axis: int, descending: bool) -> np.ndarray:
    """The stable order, by NumPy: reversed twice where the greatest come first."""
    wide = x.astype(np.float64)
    if not descending:
        return np.argsort(wide, axis, kind="stable")
    turned = np.argsort(np.flip(wide, axis), axis, kind="stable")
    return x.shape[axis] - 1 - np.flip(turned, axis)


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("dtype", [dtypes.float32, dtypes.bfloat16, dtypes.float64, dtypes.uint8])
@pytest.mark.parametrize("shape", SORTED, ids=str)
def test_long_axes_are_sorted(shape: tuple[int, ...], dtype: DType, descending: bool) -> None:
    axis = int(np.argmax(shape))
    n = shape[axis]
    counts = sorted({min(k, n) for k in (0, 1, 5, 16, 64, n - 1, n)})

    def ordered(x):
        found = [*td.sort(x, axis, descending), td.argsort(x * 1 + x, axis, descending)]
        for k in counts:
            found += td.topk(x, k, axis, largest=descending)
        return found

    graph = td.trace(ordered, TensorType(shape, dtype))
    x = to_sort(shape, dtype, 3)
    (name,) = graph.leaves
    built = build(graph)
    found = built.on(1).run({name: x})
    assert same_bits(built.on(2).run({name: x}), found)
    places = in_order(x, axis, descending)
    values = np.take_along_axis(x.astype(np.float64), places, axis)
    np.testing.assert_array_equal(found[0].astype(np.float64), values)
    np.testing.assert_array_equal(found[1], places)
    np.testing.assert_array_equal(found[2], places)
    for i, k in enumerate(counts):
        first = tuple(slice(k) if a == axis else slice(None) for a in range(len(shape)))
        np.testing.assert_array_equal(found[3 + 2 * i].astype(np.float64), values[first])
        np.testing.assert_array_equal(found[4 + 2 * i], places[first])


def test_work_of_sorting_grows_with_the_logarithm() -> None:
    def work(n: int) -> int:
        graph = td.trace(td.sort, TensorType((n,), dtypes.float32))
        return sum(cost.work(c.kernel) for c in schedule(graph).calls())

    assert work(1 << 16) < 64 * 2 * work(1 << 10)
