"""What the CUDA text computes, run on the processor; and heads whose logits come by chunks."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings

import treadle as td
from backend import assert_within, draw
from cuda_backend import ALONE, IN_ORDER, JOINT, needs_compiler, ptx_of, scheduled
from cuda_on_host import no_host_compiler, run_on_host
from test_backend_ops import shaped
from test_backend_programs import SEEDS, SETTINGS
from test_backend_programs import prepared as random_program
from test_kernels import run as interpreted
from treadle import losses, nn, optim
from treadle.base import dtypes
from treadle.base.dtypes import DType
from treadle.codegen.c_like.scalars import unrounded
from treadle.codegen.cuda.driver import lines_of, render_program
from treadle.domains.float64 import evaluate_float64
from treadle.frontend.scopes import bind, bind1
from treadle.ir import composites as c
from treadle.ir.graph import Graph
from treadle.ir.ops.indexing import SCATTER_ADD, ScatterAdd
from treadle.ir.types import TensorType
from treadle.kernel.geometry import Combine, Scattered
from treadle.kernel.launch import matmul_call_of
from treadle.kernel.mapped import (
    column_bytes,
    geometry_of,
    grid_of,
    group_rows,
    is_of_warps,
    shared_bytes,
)
from treadle.kernel.nodes import (
    For,
    Kernel,
    Literal,
)
from treadle.kernel.program import Program, Repeat
from treadle.memory.plan import plan_buffers
from treadle.nn.tracing import Inputs
from treadle.pipeline import CompileReport, StepRecipe, build_evaluation
from treadle.rules.heads import recognise_heads
from treadle.schedule.cross_entropy import chunk_sizes
from treadle.schedule.schedule import GPU, Target, schedule
from treadle.step.programs import UNWATCHED

BF16, F32, I32 = dtypes.bfloat16, dtypes.float32, dtypes.int32
BY_CHUNKS = dataclasses.replace(ALONE, least_logits=1)
needs_host = pytest.mark.skipif(no_host_compiler() is not None, reason=f"{no_host_compiler()}")


def traced(function, *types: TensorType) -> tuple[Graph, dict[str, np.ndarray]]:
    """A graph, and values that its dtypes hold."""
    graph = td.trace(function, *types)
    return graph, drawn(graph)


def drawn(graph: Graph) -> dict[str, np.ndarray]:
    known = {n: graph.nodes[i].types[0].dtype.numpy for n, i in graph.leaves.items()}
    return {n: np.asarray(a).astype(known[n]) for n, a in draw(graph, 5).items()}


def apart(graph: Graph, arrays: dict[str, np.ndarray], found: list[np.ndarray]) -> float:
    """The largest error, of an output's elements and their size together; NaN is the largest."""
    worst = [0.0]
    for ours, exact in zip(found, evaluate_float64(graph, arrays), strict=True):
        exact = np.asarray(exact, np.float64)
        size = np.abs(exact) + np.sqrt(np.mean(exact**2)) + 1e-30
        error = np.abs(ours.astype(np.float64) - exact) / size
        worst.append(float(np.max(np.nan_to_num(error, nan=np.inf))))
    return max(worst)


def limit(dtype: DType) -> float:
    return 0.015 if dtype.is_narrow else 1e-5


# Text on the processor


def rows(x, y):
    return [td.layer_norm(x + y, y[0], y[1]), x + y, td.softmax(x)]


def columns(x, y):
    return [x * y, (x * y).sum(0), td.max(x, 0)]


def norm_gradients(x, y):
    def loss(x, weight, bias):
        return (td.layer_norm(x, weight, bias) * y).sum()

    return list(td.grad(loss, (0, 1, 2))(x, y[0], y[1]))


@needs_host
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize(
    ("function", "shape"),
    [(rows, (514, 96)), (columns, (1024, 96)), (norm_gradients, (1024, 256))],
)
def test_rows_and_columns(function, shape: tuple[int, int], dtype: DType) -> None:
    graph, arrays = traced(function, TensorType(shape, dtype), TensorType(shape, dtype))
    assert apart(graph, arrays, run_on_host(scheduled(graph), arrays)) < limit(dtype)


@needs_host
@pytest.mark.parametrize(("width", "dtype", "share"), [(40, BF16, 4), (13, F32, 8)])
def test_short_rows_share_a_warp(width: int, dtype: DType, share: int) -> None:
    """Rows that several groups of a warp walk, and sums whose terms lie along a row."""
    mapping = ALONE.mapping
    assert mapping is not None
    few = dataclasses.replace(mapping, busy=64)
    target = dataclasses.replace(ALONE, mapping=few)  # so few rows count as many
    type_ = TensorType((72, width), dtype)
    graph, arrays = traced(lambda x, y: [*rows(x, y), (x * y).sum(1)], type_, type_)
    program = scheduled(graph, target=target)
    assert {k.geometry.share for k in program.distinct() if k.geometry is not None} == {share}
    assert apart(graph, arrays, run_on_host(program, arrays)) < limit(dtype)
    assert_within(graph, arrays, interpreted(program, arrays), 8.0)


def small(x, y):
    hidden = td.relu(x @ y)
    return [td.softmax(hidden @ y.T), hidden.sum(0), (hidden * hidden).sum(), x - x.mean()]


@needs_host
def test_small_programs_as_one_launch() -> None:
    """Tiles with what follows them, phases that meet, loads before stores: all of it as text."""
    types = TensorType((24, 40), dtypes.float32), TensorType((40, 20), dtypes.float32)
    graph, arrays = traced(small, *types)
    program = scheduled(graph, target=GPU)
    assert program.cooperative
    found = run_on_host(program, arrays)
    assert apart(graph, arrays, found) < limit(dtypes.float32)


def of_columns(x, y):
    """Sums of columns, in phases of two kernels."""
    centred = [t - t.mean(0) for t in (x, y)]
    return [x.sum(0), (y * y).sum(0), *(t * td.rsqrt((t * t).mean(0) + 1e-3) for t in centred)]


@needs_host
@pytest.mark.parametrize("busy", [64, 1 << 15])  # few threads: warps that sum in order; trees
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("sizes", [((64, 256), (96, 128)), ((200, 50), (100, 30))], ids=str)
def test_kernels_of_a_phase_are_one_launch(sizes, dtype: DType, busy: int) -> None:
    """The blocks of the second kernel begin where those of the first end."""
    graph, arrays = traced(of_columns, *(TensorType(s, dtype) for s in sizes))
    target = dataclasses.replace(JOINT, mapping=dataclasses.replace(JOINT.mapping, busy=busy))
    program = scheduled(graph, target=target)
    assert program.cooperative
    for kernel in program.distinct():
        assert "blockIdx" not in "\n".join(lines_of(kernel)), "it is another kernel's number too"
    assert apart(graph, arrays, run_on_host(program, arrays)) < limit(dtype)


@needs_host
def test_gradients_of_attention_are_one_launch() -> None:
    """Rows that no library's matmul reads are loops: gradients of queries and of keys by trees."""
    shapes = (2, 3, 64, 64), (2, 3, 50, 64), (2, 3, 50, 64), (1, 3, 64, 50)

    def both(*given):
        gradients = td.grad(lambda *xs: (td.attention(*xs) ** 2).sum(), argnums=(0, 1, 2, 3))
        return [td.attention(*given), *gradients(*given)]

    graph, arrays = traced(both, *(TensorType(s, BF16) for s in shapes))
    program = scheduled(graph, target=dataclasses.replace(JOINT, has_attention=True))
    assert program.cooperative
    assert apart(graph, arrays, run_on_host(program, arrays)) < 0.1


def test_a_launch_has_room_for_the_kernels_of_its_phase() -> None:
    """For their pointers, and for what sums of columns keep: a block has 48 KiB for it."""
    types = [TensorType((64, 256 + 64 * i), F32) for i in range(24)]
    graph = td.trace(lambda *xs: [(x * x).sum(0) for x in xs], *types)
    most = JOINT.mapping.column_bytes
    for busy in (64, 1 << 15):
        target = dataclasses.replace(JOINT, mapping=dataclasses.replace(JOINT.mapping, busy=busy))
        program = scheduled(graph, target=target)
        kernels = program.distinct()
        assert sum(column_bytes(k) for k in kernels) > most
        for run in program.cooperative:
            for phase in run.phases:
                assert sum(column_bytes(kernels[i]) for i, _ in phase) <= most


@needs_host
def test_a_place_that_two_branches_read_is_loaded_for_both() -> None:
    def stacked(v, w):
        same = td.expand(v, (8, 8))
        found = td.concat([same[:1], same[:7]], 0) * 0.1
        return [found.sum(), w + found]

    graph, arrays = traced(stacked, TensorType((8,), F32), TensorType((8, 8), F32))
    assert apart(graph, arrays, run_on_host(scheduled(graph), arrays)) < limit(F32)


DOUBLE = pytest.param(dtypes.float64, marks=pytest.mark.slow)


@needs_host
@pytest.mark.parametrize("dtype", [F32, DOUBLE, BF16], ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (1, 3), (5, 1), (0, 2), (3, 17)], ids=str)
def test_odd_and_empty_sizes(shape: tuple[int, int], dtype: DType) -> None:
    """Also one element: what an axis of it chooses is compared after its loop."""
    type_ = TensorType(shape, dtype)
    graph = td.trace(shaped, type_, type_)
    arrays = draw(graph, 7)
    assert_within(graph, arrays, run_on_host(scheduled(graph), arrays))


@needs_host
@pytest.mark.parametrize("shape", [(8, 8), (40, 64)], ids=str)
def test_sums_so_far_are_not_sums_of_columns(shape: tuple[int, int]) -> None:
    graph, arrays = traced(lambda x: [td.cumsum(x, 0)], TensorType(shape, F32))
    assert apart(graph, arrays, run_on_host(scheduled(graph), arrays)) < limit(F32)


@needs_host
@pytest.mark.parametrize("target", [ALONE, JOINT], ids=["alone", "joint"])
@given(SEEDS)
@settings(max_examples=3, **SETTINGS)
def test_random_training_programs(target: Target, seed: int) -> None:
    training, values, bounds = random_program(seed)
    program = scheduled(training.graph, in_place=True, target=target)
    every = {n: np.zeros(t.shape) for n, t in program.leaves}
    found = run_on_host(program, {**every, **values})
    assert_within(training.graph, values, found, bounds=bounds)


PLACES = {
    "even": lambda rng, n, v: rng.integers(0, v, n),
    "one": lambda rng, n, v: np.full(n, 7),
    "few": lambda rng, n, v: np.minimum(rng.geometric(0.2, n) - 1, v - 1),
    "outside": lambda rng, n, v: rng.integers(-3, v + 3, n),
}


WIDE_ROWS = pytest.param(70, 60, 768, marks=pytest.mark.slow)


@needs_host
@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize(("classes", "count", "width"), [(300, 1500, 8), WIDE_ROWS])
def test_scattered_sums(classes: int, count: int, width: int, where: str) -> None:
    def scattered(x, index):
        return [bind1(SCATTER_ADD, ScatterAdd(0, classes), x, index)]

    graph, arrays = traced(scattered, TensorType((count, width), F32), TensorType((count,), I32))
    name = next(n for n, a in arrays.items() if a.dtype.kind == "i")
    arrays[name] = PLACES[where](np.random.default_rng(1), count, classes).astype(np.int32)
    program = scheduled(graph, target=IN_ORDER)
    assert any(isinstance(geometry_of(k).template, Scattered) for k in program.distinct())
    found = run_on_host(program, arrays)
    # In order, one after the other: the bits that one thread would give.
    expected = interpreted(program, arrays)
    np.testing.assert_array_equal(found[0], expected[0])


# Shapes


def test_columns_are_shared_by_warps_and_rows_are_not() -> None:
    type_ = TensorType((4096, 768), BF16)
    by_columns = scheduled(td.trace(lambda x: [x.sum(0)], type_)).distinct()
    combined = [geometry_of(k).combine is not Combine.EXCHANGE for k in by_columns]
    assert combined == [True, True], "parts, then all"
    by_rows = scheduled(td.trace(lambda x: [x.sum(1)], type_)).distinct()
    assert all(geometry_of(k).combine is Combine.EXCHANGE for k in by_rows)


def test_rows_in_order_are_not_scattered() -> None:
    def scattered(x):
        return [bind1(SCATTER_ADD, ScatterAdd(0, 64), x, td.arange(64)) * 2]

    graph, arrays = traced(scattered, TensorType((64, 96), BF16))
    program = scheduled(graph, target=IN_ORDER)
    assert not any(isinstance(geometry_of(k).template, Scattered) for k in program.distinct())
    assert_within(graph, arrays, interpreted(program, arrays))


# Heads


def head_gradients(rounded: bool, smoothing: float = 0.0):
    attributes = c.HeadCrossEntropy(smoothing, rounded)
    return lambda *operands: list(bind(c.LINEAR_CROSS_ENTROPY_GRAD, attributes, *operands))


def head_types(n: int, classes: int, dtype: DType, has_bias: bool) -> list[TensorType]:
    found = [TensorType((n,), F32), TensorType((n, 6), dtype), TensorType((classes, 6), dtype)]
    bias = [TensorType((classes,), dtype)] if has_bias else []
    return [*found, TensorType((n,), I32), *bias]


def by_chunks(graph: Graph, most: int, least: int) -> Program:
    return schedule(graph, target=chunks_of(most, least))


def chunks_of(most: int, least: int) -> Target:
    streaming = dataclasses.replace(GPU.streaming, most_rows=most, least_rows=least)
    return dataclasses.replace(BY_CHUNKS, streaming=streaming)


HEADS = [
    (dtype, rounded, smoothing, has_bias)
    for dtype in (F32, BF16)
    for rounded in (False, True)
    for smoothing in (0.0, 0.1)
    for has_bias in (False, True)
]


@pytest.mark.parametrize(("dtype", "rounded", "smoothing", "has_bias"), HEADS)
@pytest.mark.parametrize(("n", "most", "least"), [(12, 4, 2), (11, 4, 2), (8, 8, 8), (8, 4, 4)])
def test_heads_by_chunks(
    n: int, most: int, least: int, dtype: DType, rounded: bool, smoothing: float, has_bias: bool
) -> None:
    function = head_gradients(rounded, smoothing)
    graph, arrays = traced(function, *head_types(n, 42, dtype, has_bias))
    program = by_chunks(graph, most, least)
    calls = [m for k in program.distinct() if (m := matmul_call_of(k)) is not None]
    assert {m.target.rows for m in calls if m.n == 42} <= {48}, "rows start at whole packs"
    assert any("linear_cross_entropy" in k.name for k in program.distinct())
    assert_within(graph, arrays, interpreted(program, arrays), 4.0)


def test_chunks_cover_all_rows() -> None:
    assert chunk_sizes(65536, GPU.streaming) == [8192] * 8
    assert chunk_sizes(32768, GPU.streaming) == [8192] * 4
    assert chunk_sizes(16384, GPU.streaming) == [4096] * 4
    assert chunk_sizes(8192, GPU.streaming) == [4096] * 2
    assert chunk_sizes(4096, GPU.streaming) == [2048] * 2
    assert chunk_sizes(100, GPU.streaming) == [100]
    assert sum(chunk_sizes(10001, GPU.streaming)) == 10001


@needs_host
def test_long_rows_are_kept_in_shared_memory() -> None:
    graph, arrays = traced(head_gradients(False), *head_types(64, 17000, F32, False))
    arrays = {n: np.abs(a) % 17000 if a.dtype.kind == "i" else a for n, a in arrays.items()}
    program = by_chunks(graph, 32, 16)
    kernels = [k for k in program.distinct() if k.name.endswith("_rows")]
    assert [shared_bytes(k) for k in kernels] == [68000, 68000]
    assert apart(graph, arrays, run_on_host(program, arrays)) < 1e-4


def test_norms_and_the_sums_of_their_columns_are_one_kernel() -> None:
    types = [TensorType((4096, 768), BF16)] * 2
    program = scheduled(td.trace(norm_gradients, *types))
    ((kernel, rows),) = by_warps(program)
    assert grid_of(kernel).count * rows.var.extent == 4096
    sums = [b for b in kernel.scratch if b.name in group_rows(kernel) and b.dtype is F32]
    assert len(sums) == 2, "of the weight's gradient, and of the bias's"
    wide = scheduled(td.trace(norm_gradients, *[TensorType((4096, 1536), BF16)] * 2))
    assert not by_warps(wide), "a warp has no room for such a row"


def by_warps(program: Program) -> list[tuple[Kernel, For]]:
    """Kernels whose rows are warps', and the loops over them."""
    own = [k for k in program.distinct() if k.geometry is not None]
    loops = [(k, s) for k in own for s in grid_of(k).body if isinstance(s, For)]
    return [(k, s) for k, s in loops if is_of_warps(s)]


@needs_compiler
def test_packs_are_loaded_whole() -> None:
    """Sixteen bytes in one instruction, and before stores that come first."""
    program = scheduled(td.trace(rows, *[TensorType((4096, 768), BF16)] * 2))
    text = "\n".join(render_program(program).parts)
    found = ptx_of(text)
    assert "ld.global.nc.v4.u32" in found
    assert "ld.global.u16" not in found
    assert "ld.global.nc.u16" not in found


def test_constants_are_as_exact_as_the_arithmetic_around_them() -> None:
    """Rounded where values are: to bfloat16, 2/√π would be 1.125. What overflows stays infinite."""
    slope = td.grad(lambda x: td.gelu(x).sum())
    (text,) = render_program(scheduled(td.trace(slope, TensorType((64, 128), BF16)))).parts
    body = text[text.index("__global__") :]
    assert "1.1283792f" in body
    assert "1.125f" not in body
    assert unrounded(Literal(0.1, BF16)) == Literal(0.1, F32)
    assert unrounded(Literal(1e9, dtypes.float16)).dtype is dtypes.float16


class Tied(nn.Module):
    def __init__(self, classes: int, width: int):
        self.table = nn.Embedding(classes, width)

    def forward(self, tokens):
        return td.linear(td.tanh(self.table(tokens)), self.table.weight)


def recognising(least: int) -> Target:
    """A GPU for which heads are recognised where logits are that many."""
    rewriting = dataclasses.replace(GPU.rewriting, least_head_logits=least)
    return dataclasses.replace(GPU, rewriting=rewriting)


def step_graph(least: int, precision: str = "bfloat16") -> Graph:
    """A step with a head of 600 classes, recognised where logits are that many."""
    specs = {"x": td.Spec((8, 64), td.int32), "y": td.Spec((8, 64), td.int32)}

    def loss(m, batch):
        return losses.cross_entropy(m(batch["x"]), batch["y"], axis=-1)

    with mock.patch("treadle.pipeline.target_of", return_value=recognising(least)):
        step = td.compile_step(
            Tied(600, 16), loss, optim.sgd(0.1), specs, device="oracle", precision=precision
        )
        return step._programs.built(step._inputs).step(step._mode(), UNWATCHED).graph


def evaluation_graph(precision: DType) -> Graph:
    """What evaluates a model with a head of 600 classes, recognised."""
    specs = {"x": td.Spec((8, 4), td.int32), "y": td.Spec((8, 4), td.int32)}

    def loss(m, batch):
        return losses.cross_entropy(m(batch["x"]), batch["y"], axis=-1)

    recipe = StepRecipe(
        Tied(600, 16), loss, optim.sgd(0.1), "step0:", 1, None, precision, td.CompileOptions()
    )
    with mock.patch("treadle.pipeline.target_of", return_value=recognising(1)):
        return build_evaluation(
            recipe, Inputs.of(specs), None, CompileReport("cuda", precision.name)
        )


@needs_host
@pytest.mark.parametrize("precision", [F32, BF16], ids=str)
def test_the_head_of_an_evaluation(precision: DType) -> None:
    graph = evaluation_graph(precision)
    assert "linear_cross_entropy" in ops_of(graph)
    arrays = drawn(graph)
    program = by_chunks(graph, 8, 4)
    assert any("linear_cross_entropy" in k.name for k in program.distinct())
    assert apart(graph, arrays, run_on_host(program, arrays)) < limit(precision)


def ops_of(graph: Graph) -> Iterator[str]:
    return (n.op.name for n in graph.nodes)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_product_that_only_a_loss_reads_is_its_head(precision: str) -> None:
    plain, fused = step_graph(1 << 60, precision), step_graph(1, precision)
    assert "linear_cross_entropy_grad" not in ops_of(plain)
    assert "linear_cross_entropy_grad" in ops_of(fused)
    assert "linear_cross_entropy" not in ops_of(fused), "one pass gives the rows too"
    rng = np.random.default_rng(0)
    arrays = {}
    for name, i in plain.leaves.items():
        type_ = plain.nodes[i].types[0]
        drawn = rng.integers(0, 600, type_.shape) if not type_.is_float else rng.random(type_.shape)
        arrays[name] = drawn.astype(type_.dtype.numpy)
    ours, theirs = (evaluate_float64(g, arrays) for g in (fused, plain))
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)


def test_logits_that_something_else_reads_stay() -> None:
    def loss(x, weight, target):
        logits = td.linear(x, weight)
        return losses.cross_entropy(logits, target).tensor() + logits.sum()

    types = TensorType((64, 8), F32), TensorType((600, 8), F32), TensorType((64,), I32)
    graph = td.trace(loss, *types)
    assert "linear_cross_entropy" not in ops_of(recognise_heads(graph, recognising(1)))
    few = td.trace(lambda x, w, t: losses.cross_entropy(td.linear(x, w), t).tensor(), *types)
    assert "linear_cross_entropy" in ops_of(recognise_heads(few, recognising(1)))
    assert "linear_cross_entropy" not in ops_of(recognise_heads(few, GPU)), "few logits are stored"


def test_a_head_s_logits_are_never_whole() -> None:
    graph = step_graph(1)
    program = schedule(graph, in_place=True, target=chunks_of(64, 32))
    assert any(isinstance(s, Repeat) and s.length == 7 for s in program.steps)
    largest = max(b.size for b in program.buffers)
    assert largest < 512 * 600 // 4
    assert plan_buffers(program).size < 512 * 600 * 2
    adding = [p for k in program.distinct() if (p := matmul_call_of(k)) is not None and p.adds]
    assert [(p.m, p.n, p.k) for p in adding] == [(600, 16, 64)]
