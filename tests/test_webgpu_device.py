"""The WebGPU backend on an adapter (Mesa's lavapipe will do): every op within its contract.

An adapter of the processor compiles each shader in a fifth of a second, so that most of it is slow.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import treadle as td
from backend import assert_within, draw, merged, merged_arrays, rounded_inputs, same_bits
from op_samples import agreement, prepared, samples_in
from test_backend_ops import CASES, SIZES, SORTED, in_order, shaped, to_sort
from test_backend_programs import SEEDS, SETTINGS
from test_backend_programs import prepared as random_program
from trajectories import TRAJECTORIES
from treadle.base import dtypes
from treadle.base.dtypes import DType
from treadle.base.errors import DTypeError
from treadle.ir.graph import Graph
from treadle.ir.op import Op
from treadle.ir.types import TensorType
from treadle.kernel.target_webgpu import BASE
from treadle.verify.sampling import sample_graph
from webgpu_backend import device, needs_adapter, no_adapter, on_adapter, rendered

pytestmark = needs_adapter

WIDE = (dtypes.float64, dtypes.int64)
CLAIMED = [c for c in CASES if c.values[1] not in WIDE]
CLAIMED_DTYPES = [d for d in dtypes.ALL if d not in WIDE]
NARROW_FLOATS = [d for d in dtypes.FLOATS if d not in WIDE]
# Invocations that exchange values: as many as lavapipe's vectors have lanes.
HALVES = replace(BASE, name="halves", has_f16=True)
EXCHANGING = replace(BASE, name="exchanging", subgroup=8)


def is_wide(graph: Graph) -> bool:
    return any(t.dtype in WIDE for node in graph.nodes for t in node.types)


def claimed(op: Op, dtype: DType, seed: int) -> tuple[Graph, dict[str, np.ndarray]]:
    """The samples of an op in a dtype, without those that are 64 bits wide somewhere."""
    graph, arrays = prepared(op, dtype, seed)
    if not is_wide(graph):
        return graph, arrays
    samples = [s for s in samples_in(op, dtype) if not is_wide(sample_graph(op, s))]
    graph = merged([sample_graph(op, s) for s in samples])
    return graph, rounded_inputs(graph, merged_arrays([s.arrays(seed) for s in samples]))


@pytest.mark.slow
@pytest.mark.parametrize(("op", "dtype"), CLAIMED)
def test_every_op_in_every_dtype(op: Op, dtype: DType) -> None:
    graph, arrays = claimed(op, dtype, seed=4)
    program = on_adapter(graph)
    found = program.run(arrays)
    assert_within(graph, arrays, found, agreement(op))
    assert same_bits(program.run(arrays), found)


@pytest.mark.slow
@pytest.mark.parametrize(("op", "dtype"), [c for c in CLAIMED if c.values[1] is dtypes.float16])
def test_every_op_in_float16_of_two_bytes(op: Op, dtype: DType) -> None:
    graph, arrays = claimed(op, dtype, seed=7)
    program = on_adapter(graph, limits=HALVES)
    found = program.run(arrays)
    assert_within(graph, arrays, found, agreement(op))
    words = on_adapter(graph).run(arrays)
    assert same_bits(found, words)


@pytest.mark.parametrize(("op", "dtype"), CLAIMED[3::48])
def test_some_ops(op: Op, dtype: DType) -> None:
    graph, arrays = claimed(op, dtype, seed=5)
    assert_within(graph, arrays, on_adapter(graph).run(arrays), agreement(op))


@pytest.mark.slow
@pytest.mark.parametrize(("op", "dtype"), [c for c in CLAIMED if c.values[1] is dtypes.float32])
def test_every_op_where_invocations_exchange_values(op: Op, dtype: DType) -> None:
    graph, arrays = claimed(op, dtype, seed=6)
    found = on_adapter(graph, limits=EXCHANGING).run(arrays)
    assert_within(graph, arrays, found, agreement(op))


@pytest.mark.slow
@pytest.mark.parametrize("source", CLAIMED_DTYPES, ids=str)
def test_every_conversion(source: DType) -> None:
    values = np.array([0, 1, -1, 2.5, -2.5, 3.5, 100, 127, 0.1, -0.0, 1e-3])
    if not source.is_float:
        values = np.trunc(values)
    if source.kind == "uint":
        values = np.abs(values)
    type_ = TensorType(values.shape, source)
    signed = [d for d in CLAIMED_DTYPES if d.kind != "uint"]
    unsigned = [d for d in CLAIMED_DTYPES if d.kind == "uint"]

    def convert(x):
        if source is dtypes.bool_:
            return [td.cast(x, d) for d in CLAIMED_DTYPES]
        return [td.cast(x, d) for d in signed] + [td.cast(td.abs(x), d) for d in unsigned]

    graph = td.trace(convert, type_)
    arrays = rounded_inputs(graph, {"x": values})
    assert_within(graph, arrays, on_adapter(graph).run(arrays), 1.0)


@pytest.mark.parametrize(
    "dtype",
    [
        pytest.param(d, marks=[] if d is dtypes.int32 else pytest.mark.slow, id=str(d))
        for d in dtypes.INTEGERS
        if d not in WIDE
    ],
)
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
    assert_within(graph, arrays, on_adapter(graph).run(arrays))


@pytest.mark.parametrize(
    "dtype",
    [
        pytest.param(d, marks=[] if d is dtypes.float32 else pytest.mark.slow, id=str(d))
        for d in NARROW_FLOATS
    ],
)
def test_nan_infinities_and_signs_of_zero(dtype: DType) -> None:
    edges = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, -1.5, 65504.0])
    x, y = (a.reshape(-1).astype(dtype.numpy) for a in np.meshgrid(edges, edges))
    type_ = TensorType(x.shape, dtype)

    def all_of_them(x, y):
        found = [td.maximum(x, y), td.minimum(x, y), x < y, x <= y, td.eq(x, y)]
        found += [td.where(x > 0, x, y), td.abs(x), -x, td.sign(x), td.floor(x), td.relu(x)]
        found += [td.isnan(x), td.isfinite(x), td.exp(x), td.log(x), td.sqrt(x), td.tanh(x)]
        found += [td.sin(x), td.cast(x, dtypes.int32), td.cast(x, dtypes.uint8)]
        if dtype is dtypes.float32:  # nothing overflows
            found += [x + y, x * y, x / y, x**y, td.remainder(x, y), td.floor_divide(x, y)]
        square = x.reshape(8, 8)
        return [*found, td.max(square, 1), td.min(square, 0), td.argmax(square, 1)]

    graph = td.trace(all_of_them, type_, type_)
    arrays = {"x": x, "y": y}
    found = on_adapter(graph).run(arrays)
    assert_within(graph, arrays, found, 1.0)
    numbers = ~np.isnan(x)  # the sign of a NaN is not claimed
    flipped = np.signbit(found[7]) != np.signbit(x)
    assert flipped[numbers].all(), "zeros keep their sign"


@pytest.mark.parametrize(("shape", "axis"), [((3, 700), 1), ((700, 3), 0), ((3, 20000), None)])
def test_extremes_of_groups_know_nan_infinities_and_zeros(
    shape: tuple[int, int], axis: int | None
) -> None:
    type_ = TensorType(shape)
    graph = td.trace(lambda x: [x.max(axis), x.min(axis)], type_)
    program, rng = on_adapter(graph, limits=EXCHANGING), np.random.default_rng(3)
    some = rng.normal(size=shape).astype(np.float32)
    with_nan, zeros = some.copy(), np.full(shape, -0.0, np.float32)
    with_nan[1, 1], with_nan[2, 2] = np.nan, -np.nan
    zeros[1, 1] = 0.0
    ends = np.where(some > 0, np.inf, -np.inf).astype(np.float32)
    for x in (some, with_nan, zeros, ends, -np.abs(some), np.full_like(some, -np.inf)):
        found = program.run({"x": x})
        for got, wanted in zip(found, (x.max(axis), x.min(axis)), strict=True):
            np.testing.assert_array_equal(np.asarray(got), wanted)
    most, least = program.run({"x": zeros})
    np.testing.assert_array_equal(np.signbit(most), np.signbit(zeros).all(axis))
    np.testing.assert_array_equal(np.signbit(least), np.signbit(zeros).any(axis))


MATHEMATICS = {
    "exp": (td.exp, [(-87, 88), (-1, 1)]),
    "log": (td.log, [(0.5, 2), (1e-37, 1e38)]),
    "sqrt": (td.sqrt, [(0, 1e30)]),
    "rsqrt": (td.rsqrt, [(1e-30, 1e30)]),
    "sin": (td.sin, [(-4, 4), (-3e4, 3e4), (-1e9, 1e9), (1e20, 3e38)]),
    "cos": (td.cos, [(-4, 4), (-3e4, 3e4), (-1e9, 1e9), (1e20, 3e38)]),
    "tanh": (td.tanh, [(-10, 10), (-0.01, 0.01)]),
    "erf": (td.erf, [(-4, 4), (-0.01, 0.01)]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MATHEMATICS)
def test_elementary_functions_are_within_their_contracts(name: str) -> None:
    function, regions = MATHEMATICS[name]
    rng = np.random.default_rng(0)
    x = np.concatenate([rng.uniform(*map(np.float64, r), 4096) for r in regions])
    graph = td.trace(lambda x: [function(x)], TensorType(x.shape, dtypes.float32))
    arrays = rounded_inputs(graph, {"x": x})
    assert_within(graph, arrays, on_adapter(graph).run(arrays), 1.0)


@pytest.mark.slow
def test_exponentials_below_the_least_normal_number_are_small() -> None:
    """Devices may take denormal numbers for zero."""
    x = np.linspace(-200, -87.4, 999).astype(np.float32)
    graph = td.trace(lambda x: [td.exp(x)], TensorType(x.shape, dtypes.float32))
    (found,) = on_adapter(graph).run({"x": x})
    near = np.exp(x.astype(np.float64))
    assert ((found == 0) | (abs(found - near) <= 6e-45)).all()


@pytest.mark.slow
def test_functions_of_two_numbers_are_within_their_contracts() -> None:
    rng = np.random.default_rng(1)
    x, y = rng.uniform(-50, 50, 8192), rng.uniform(-50, 50, 8192)
    x[:4096] = np.exp(rng.uniform(-60, 60, 4096))
    y[:4096] = rng.uniform(-1.4, 1.4, 4096)
    y[4096:] = np.round(y[4096:] / 4)

    def both(x, y):
        near, by = x[4096:], y[4096:]  # whose quotients float32 has
        found = [td.abs(x) ** y, td.atan2(y, x), x / y]
        return [*found, td.remainder(near, by), td.floor_divide(near, by)]

    graph = td.trace(both, *[TensorType(x.shape, dtypes.float32)] * 2)
    arrays = rounded_inputs(graph, {"x": x, "y": y})
    assert_within(graph, arrays, on_adapter(graph).run(arrays), 1.0)


@pytest.mark.slow
@given(SIZES, SIZES, st.sampled_from(NARROW_FLOATS))
@settings(max_examples=8, deadline=None)
def test_odd_and_empty_sizes(rows: int, columns: int, dtype: DType) -> None:
    type_ = TensorType((rows, columns), dtype)
    graph = td.trace(shaped, type_, type_)
    arrays = draw(graph, rows * 100 + columns)
    assert_within(graph, arrays, on_adapter(graph).run(arrays))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [dtypes.float32, dtypes.uint8], ids=str)
@pytest.mark.parametrize("shape", SORTED[1:6:2], ids=str)
def test_long_axes_are_sorted(shape: tuple[int, ...], dtype: DType) -> None:
    axis = int(np.argmax(shape))
    graph = td.trace(lambda x: [*td.sort(x, axis), *td.topk(x, 5, axis)], TensorType(shape, dtype))
    x = to_sort(shape, dtype, 3)
    (name,) = graph.leaves
    found = on_adapter(graph).run({name: x})
    places = in_order(x, axis, False)
    values = np.take_along_axis(x.astype(np.float64), places, axis)
    np.testing.assert_array_equal(found[0].astype(np.float64), values)
    np.testing.assert_array_equal(found[1], places)


PRODUCTS = [(96, 160, 96), (300, 260, 132), (33, 47, 65), (40, 12, 900), (1, 70, 70), (129, 5, 31)]


@pytest.mark.slow
@pytest.mark.parametrize("limits", [BASE, EXCHANGING], ids=lambda limits: limits.name)
@pytest.mark.parametrize("sizes", PRODUCTS, ids=str)
def test_products_of_all_layouts(sizes: tuple[int, int, int], limits) -> None:
    m, n, k = sizes

    def products(x, y):
        found = [x @ y.T, td.relu(x @ y.T + 1.0), td.softmax(x @ y.T), (x @ x.T).sum(0)]
        return [*found, x.T @ x, td.einsum("ij,kj->ki", x, y)]

    types = TensorType((m, k), dtypes.float32), TensorType((n, k), dtypes.float32)
    graph = td.trace(products, *types)
    arrays = draw(graph, m * n + k)
    program = on_adapter(graph, limits=limits)
    found = program.run(arrays)
    assert_within(graph, arrays, found)
    assert same_bits(program.run(arrays), found)


@pytest.mark.slow
@pytest.mark.skipif(
    no_adapter() is not None or not device().limits.has_matrices,
    reason="the adapter multiplies no matrices",
)
@pytest.mark.parametrize("sizes", [*PRODUCTS, (512, 384, 1000), (2048, 2048, 96)], ids=str)
def test_products_by_cooperative_matrices(sizes: tuple[int, int, int]) -> None:
    m, n, k = sizes

    def products(x, y):
        return [x @ y.T, td.relu(x @ y.T + 1.0), x.T @ x, td.einsum("ij,kj->ki", x, y)]

    graph = td.trace(
        products, TensorType((m, k), dtypes.float16), TensorType((n, k), dtypes.float16)
    )
    arrays = draw(graph, m * n + k, 0.1)
    assert any("coop_mat" in s.text for s in rendered(graph, device().limits)) == (min(m, k) >= 16)
    found = on_adapter(graph, limits=device().limits).run(arrays)
    assert_within(graph, arrays, found)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [3, 40, 700])
def test_scattered_sums_are_in_order(rows: int) -> None:
    def scatter(x, at):
        return [td.scatter_add(td.zeros((rows, 24)), at, x, 0), td.embedding(at, x[:3])]

    graph = td.trace(scatter, TensorType((600, 24)), TensorType((600,), dtypes.int32))
    rng = np.random.default_rng(3)
    x = rng.normal(size=(600, 24)).astype(np.float32)
    at = rng.integers(0, min(rows, 3), 600).astype(np.int32)
    arrays = dict(zip(graph.leaves, (x, at), strict=True))
    program = on_adapter(graph)
    found = program.run(arrays)
    assert_within(graph, arrays, found)
    expected = np.zeros((rows, 24), np.float32)
    for row, i in zip(x, at, strict=True):
        expected[i] += row
    assert same_bits([found[0]], [expected]), "the bits of one thread's sum"


@pytest.mark.slow
@given(SEEDS)
@settings(max_examples=12, **SETTINGS)
def test_random_training_programs(seed: int) -> None:
    training, values, bounds = random_program(seed)
    if is_wide(training.graph):
        return
    program = on_adapter(training.graph, in_place=True)
    assert_within(training.graph, values, program.run(values), bounds=bounds)


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[] if n == "mlp-adamw" else pytest.mark.slow) for n in TRAJECTORIES],
)
def test_training_follows_the_oracle(name: str) -> None:
    trajectory = TRAJECTORIES[name]
    batches = list(trajectory.batches(20))
    here, there = (trajectory.compiled(d) for d in ("webgpu", "oracle"))
    there.load_params(here.params)
    for batch in batches:
        loss, expected = float(here(batch).loss), float(there(batch).loss)
        assert abs(loss - expected) <= 1e-4 * (1 + abs(expected))
    # The bias of keys has no gradient but rounding, which Adam makes large.
    for n, value in there.params.items() if "gpt" not in name else ():
        np.testing.assert_allclose(here.params[n], value, rtol=2e-3, atol=2e-4, err_msg=n)


def test_random_bits_are_those_of_the_oracle() -> None:
    graph = td.trace(lambda x: [td.dropout(x, 0.5)], TensorType((1000,)))
    arrays = draw(graph, 3)
    from treadle.domains.float64 import evaluate_float64

    found, expected = on_adapter(graph).run(arrays)[0], evaluate_float64(graph, arrays)[0]
    assert ((found == 0) == (expected == 0)).all()


def test_what_is_64_bits_wide_is_refused_by_name() -> None:
    with pytest.raises(DTypeError, match="cast gives float64"):
        on_adapter(td.trace(lambda x: [td.cast(x, td.float64)], TensorType((3,))))
