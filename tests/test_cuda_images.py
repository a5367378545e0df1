"""Convolutions on a GPU without one: which are a library's, how images lie, what it all means."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import treadle as td
from backend import assert_within, draw
from cuda_backend import needs_compiler, scheduled
from cuda_on_host import no_host_compiler, run_on_host
from test_kernels import MEANINGS, run
from treadle import losses, nn, optim
from treadle.base import dtypes
from treadle.base.dtypes import DType
from treadle.base.records import from_json, to_json
from treadle.codegen.cuda.driver import render_kernel, render_program
from treadle.domains.float64 import evaluate_float64
from treadle.frontend.scopes import bind1
from treadle.ir import composites as c
from treadle.ir.composites import definition_graph
from treadle.ir.graph import Graph
from treadle.ir.op import Op, infer_types
from treadle.ir.types import TensorType
from treadle.kernel.geometry import Combine
from treadle.kernel.launch import Launch, call_of, matmul_call_of
from treadle.kernel.mapped import blocks_of, geometry_of, grid_of
from treadle.kernel.nodes import (
    For,
    Kernel,
    standalone_matmul,
)
from treadle.kernel.program import Program, calls_in
from treadle.memory.assemble import assemble
from treadle.memory.plan import plan_buffers
from treadle.runtime.cuda.compiler import compile_source, is_cubin
from treadle.schedule.schedule import GPU, schedule
from treadle.schedule.templates import LibraryCallKey, conv_call_key
from treadle.step.programs import UNWATCHED
from treadle.verify.kernels import check_kernels

needs_host = pytest.mark.skipif(no_host_compiler() is not None, reason=f"{no_host_compiler()}")
WITH_CONV = dataclasses.replace(GPU, has_conv=True)
# x, w, stride, padding, dilation, groups
SHAPES = [
    ((2, 4, 6, 5), (8, 4, 3, 3), 1, 1, 1, 1),
    ((2, 4, 7, 8), (8, 4, 3, 3), 2, 1, 1, 1),
    ((1, 3, 9, 9), (4, 3, 5, 3), 2, 2, 1, 1),
    ((2, 4, 7, 6), (8, 2, 3, 2), 1, 2, 2, 2),
    ((2, 4, 5, 5), (4, 1, 3, 3), 1, 1, 1, 4),
    ((2, 4, 5, 6), (6, 4, 1, 1), 1, 0, 1, 1),
    ((3, 1, 6, 6), (2, 1, 2, 2), 2, 0, 1, 1),
    ((2, 4, 11), (8, 4, 3), 1, 1, 1, 1),
    ((2, 6, 13), (6, 1, 5), 2, 4, 2, 6),
    ((2, 4, 3, 6, 5), (8, 4, 3, 3, 3), 1, 1, 1, 1),
    ((1, 4, 5, 4, 7), (6, 2, 2, 1, 3), 2, 1, 1, 2),
]


def meaning(op: Op):
    """A routine as the definition of the composite that it is."""

    def of(numbers, shapes, *operands):
        strides, low, high, dilations = (
            tuple(int(numbers[f"{n}{i}"]) for i in range(len(shapes[0]) - 2))
            for n in ("stride", "low", "high", "dilation")
        )
        x = operands[0].shape if op is c.CONV else shapes[0]
        w = operands[1].shape
        if op is c.CONV_GRAD_W:
            x, w = operands[1].shape, shapes[0]
        padding = tuple(zip(low, high, strict=True))
        conv = c.Conv(strides, padding, dilations, x[1] // w[1])
        attributes = conv if op is c.CONV else c.ConvGrad(conv, shapes[0])
        names = {d.numpy: d for d in dtypes.FLOATS}
        types = tuple(TensorType(o.shape, names[o.dtype]) for o in operands)
        given = {str(i): o for i, o in enumerate(operands)}
        return evaluate_float64(definition_graph(op, attributes, types), given)

    return of


ROUTINES = {op.name: meaning(op) for op in (c.CONV, c.CONV_GRAD_X, c.CONV_GRAD_W)}


@pytest.fixture(autouse=True)
def routines(monkeypatch) -> None:
    """The interpreter knows what the library computes."""
    for name, of in ROUTINES.items():
        monkeypatch.setitem(MEANINGS, name, of)


def three(shape, dtype: DType) -> Graph:
    """A convolution and both gradients, between elementwise work and sums."""
    xs, ws, s, p, d, g = shape
    dims = len(xs) - 2
    conv = c.Conv((s,) * dims, ((p, p),) * dims, (d,) * dims, g)
    space = tuple(range(2, 2 + dims))

    def program(x, w):
        y = td.relu(bind1(c.CONV, conv, td.tanh(x), w))
        dx = bind1(c.CONV_GRAD_X, c.ConvGrad(conv, xs), y, w)
        dw = bind1(c.CONV_GRAD_W, c.ConvGrad(conv, ws), y, x)
        return [dx + 1, dw * 2, y.sum((0, *space)), td.max(dx, space), y]

    return td.trace(program, TensorType(xs, dtype), TensorType(ws, dtype))


def names_of(program: Program) -> list[str]:
    return [call.name for k in program.distinct() if (call := call_of(k)) is not None]


@pytest.mark.parametrize("dtype", [dtypes.bfloat16, dtypes.float16, dtypes.float32], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_library_s_convolutions_mean_what_they_say(shape, dtype: DType) -> None:
    graph = three(shape, dtype)
    program = scheduled(graph, target=WITH_CONV)
    assert sorted(names_of(program)) == ["conv", "conv_grad_w", "conv_grad_x"]
    arrays = draw(graph, 3)
    assert_within(graph, arrays, run(program, arrays))


@pytest.mark.parametrize("dtype", [dtypes.bfloat16, dtypes.float32], ids=str)
def test_convolutions_of_single_places_are_products(dtype: DType) -> None:
    graph = three(((2, 8, 5, 6), (16, 8, 1, 1), 1, 0, 1, 1), dtype)
    program = scheduled(graph, target=WITH_CONV)
    assert names_of(program) == []
    found = [matmul_call_of(k) for k in program.distinct() if standalone_matmul(k) is not None]
    assert sorted((p.m, p.n, p.k) for p in found) == [(16, 8, 60), (60, 8, 16), (60, 16, 8)]
    arrays = draw(graph, 3)
    assert_within(graph, arrays, run(program, arrays))


@pytest.mark.parametrize("dtype", [dtypes.bfloat16, dtypes.float32], ids=str)
@pytest.mark.parametrize(("height", "calls"), [(8, []), (9, ["conv_grad_x"])])
def test_convolutions_of_patches_are_products(dtype: DType, height: int, calls: list[str]) -> None:
    """Where a row of pixels is left out, its gradient is zero: the library's to write."""
    graph = three(((2, 4, height, 6), (16, 4, 2, 2), 2, 0, 1, 1), dtype)
    program = scheduled(graph, target=WITH_CONV)
    assert names_of(program) == calls
    found = [matmul_call_of(k) for k in program.distinct() if standalone_matmul(k) is not None]
    wanted = [(16, 16, 24), (24, 16, 16), *([] if calls else [(24, 16, 16)])]
    assert sorted((p.m, p.n, p.k) for p in found) == wanted
    arrays = draw(graph, 3)
    assert_within(graph, arrays, run(program, arrays))


@pytest.mark.parametrize(("inputs", "outputs"), [(3, 8), (8, 5), (3, 21)])
def test_channels_are_filled_up_to_whole_packs(inputs: int, outputs: int) -> None:
    shape = (2, inputs, 6, 7), (outputs, inputs, 3, 3), 2, 1, 1, 1
    graph = three(shape, dtypes.bfloat16)
    program = scheduled(graph, target=WITH_CONV)
    calls = [call for k in program.distinct() if (call := call_of(k)) is not None]
    channels = {t.shape[1] for call in calls for t in (*call.operands, *call.results)}
    assert all(n % 8 == 0 for n in channels)
    arrays = draw(graph, 3)
    assert_within(graph, arrays, run(program, arrays))
    wide = [
        call_of(k) for k in scheduled(three(shape, dtypes.float32), target=WITH_CONV).distinct()
    ]
    assert {t.shape[1] for call in wide if call for t in call.operands} == {inputs, outputs}


@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[7], SHAPES[9]], ids=str)
def test_channels_of_a_library_s_images_lie_together(shape) -> None:
    program = scheduled(three(shape, dtypes.bfloat16), target=WITH_CONV)
    for kernel in program.distinct():
        call = call_of(kernel)
        for tensor in () if call is None else (*call.results, *call.operands):
            first, channels, *space = tensor.shape
            lying = np.empty((first, *space, channels), np.int8).strides
            assert tensor.strides == (lying[0], lying[-1], *lying[1:-1])


def test_four_axes_in_space_are_their_definition() -> None:
    graph = three(((1, 2, 3, 2, 3, 2), (2, 2, 2, 1, 2, 1), 1, 1, 1, 1), dtypes.float32)
    program = scheduled(graph, target=WITH_CONV)
    assert names_of(program) == []
    arrays = draw(graph, 3)
    assert_within(graph, arrays, run(program, arrays))


@pytest.mark.parametrize(
    ("x", "w", "products"),
    [
        ((2, 8, 12), (16, 8, 1), [(16, 8, 24), (24, 8, 16), (24, 16, 8)]),
        ((2, 4, 12), (16, 4, 2), [(12, 8, 16), (12, 16, 8), (16, 8, 12)]),
        ((2, 2, 4, 4, 2), (16, 2, 2, 2, 2), [(8, 16, 16), (8, 16, 16), (16, 16, 8)]),
    ],
)
def test_patches_of_sequences_and_volumes_are_products(x, w, products) -> None:
    graph = three((x, w, w[2], 0, 1, 1), dtypes.bfloat16)
    program = scheduled(graph, target=WITH_CONV)
    assert names_of(program) == []
    found = [matmul_call_of(k) for k in program.distinct() if standalone_matmul(k) is not None]
    assert sorted((p.m, p.n, p.k) for p in found) == products
    arrays = draw(graph, 3)
    assert_within(graph, arrays, run(program, arrays))


def test_tokens_are_a_sequence_s_channels_as_they_lie() -> None:
    """(N, T, C) seen as (N, C, T) has its channels last: no copy before or after the call."""

    def program(tokens, w):
        x = td.tanh(tokens).transpose(1, 2)
        return [td.sum(td.conv(x, w, padding=1).transpose(1, 2).tanh())]

    types = TensorType((2, 16, 8), dtypes.bfloat16), TensorType((8, 8, 3), dtypes.bfloat16)
    graph = td.trace(program, *types)
    kernels = scheduled(graph, target=WITH_CONV).distinct()
    assert not [k.name for k in kernels if "last0" in k.name or "moved" in k.name]
    assert [k.name for k in kernels if "last1" in k.name], "the weight is a leaf"


def test_double_precision_is_the_definition_too() -> None:
    assert names_of(scheduled(three(SHAPES[0], dtypes.float64), target=WITH_CONV)) == []


def test_what_a_library_has_not_is_the_definition() -> None:
    graph = three(SHAPES[1], dtypes.bfloat16)
    node = next(n for n in graph.nodes if n.op is c.CONV_GRAD_W)
    called = conv_call_key(node, [graph.type_of(v) for v in node.operands], WITH_CONV)
    target = dataclasses.replace(WITH_CONV, without=frozenset([called]))
    program = scheduled(graph, target=target)
    assert sorted(names_of(program)) == ["conv", "conv_grad_x"]
    arrays = draw(graph, 3)
    assert_within(graph, arrays, run(program, arrays))
    assert from_json(LibraryCallKey, to_json(called)) == called, "the plan cache keeps it"
    facts = [call_of(k) for k in scheduled(graph, target=WITH_CONV).distinct()]
    known = [(f.name, tuple((t.shape, t.dtype) for t in f.operands), f.numbers) for f in facts if f]
    assert called in known, "the runtime tells it by the same facts"


# A whole network


class Residual(nn.Module):
    """A stem, a pool, a block with a shortcut, a head: what residual networks are made of."""

    def __init__(self, channels: int = 16):
        self.stem = nn.Conv2d(3, channels, 3, 2, padding=1, bias=False)
        self.bn, self.pool = nn.BatchNorm2d(channels), nn.MaxPool2d(3, 2, padding=1)
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.head = nn.Linear(channels, 5)

    def forward(self, x):
        x = self.pool(td.relu(self.bn(self.stem(x))))
        y = td.relu(self.bn1(self.conv1(x)))
        return self.head(td.mean(td.relu(self.bn2(self.conv2(y)) + x), (2, 3)))


def step_graph(batch: int, size: int, channels: int, precision: str) -> Graph:
    specs = {"x": td.Spec((batch, 3, size, size)), "y": td.Spec((batch,), td.int32)}

    def loss(m, b):
        return losses.cross_entropy(m(b["x"]), b["y"])

    step = td.compile_step(
        Residual(channels), loss, optim.sgd(0.1), specs, device="oracle", precision=precision
    )
    return step._programs.built(step._inputs).step(step._mode(), UNWATCHED).graph


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_residual_network_s_step(precision: str) -> None:
    graph = step_graph(2, 12, 8, precision)
    program = schedule(graph, in_place=True, target=WITH_CONV)
    assert names_of(program).count("conv_grad_x") == 1, "the first image has no gradient"
    values = draw(graph, 5)
    values |= {n: np.abs(a) for n, a in values.items() if "running_var" in n}
    values |= {n: a % 5 for n, a in values.items() if n.endswith("y") and a.dtype.kind == "i"}
    found = run(program, values)
    assert_within(graph, values, found, 4.0)


@pytest.fixture(scope="module")
def large() -> Program:
    graph = step_graph(32, 64, 64, "bfloat16")
    return schedule(graph, in_place=True, target=WITH_CONV)


def is_own(kernel: Kernel) -> bool:
    return call_of(kernel) is None and standalone_matmul(kernel) is None


def touching(program: Program, size: int) -> list[Kernel]:
    """Kernels of our own that touch tensors of a size."""
    found = filter(is_own, program.distinct())
    return [k for k in found if any(b.size == size for b in k.buffers)]


def test_images_are_not_copied_between_convolutions(large: Program) -> None:
    copies = [
        k.name
        for k in large.distinct()
        if k.name.split("_")[-1].startswith("last") or k.name.endswith("_moved")
    ]
    # Weights and images are cast to where they are wanted, with eight channels instead of three.
    assert [name.split("_2")[0] for name in copies] == ["conv_grad_w"], "of the first weight alone"


def test_a_batch_norm_is_read_three_times_forward_and_back_twice(large: Program) -> None:
    """Mean, spread, result; the two sums of the gradient together, then the gradient."""
    counts = [k for s in large.steps for call in calls_in(s) for k in (call.kernel,)]
    size = 32 * 64 * 16 * 16  # of the block's images
    own = [k for k in counts if is_own(k) and any(b.size == size for b in k.buffers)]
    # Two norms of five kernels each, and what the pool and its gradient do.
    assert len(own) <= 2 * 5 + 4


def test_kernels_on_images_take_packs_of_channels(large: Program) -> None:
    size = 32 * 64 * 16 * 16
    kernels = [k for k in touching(large, size) if "argmax" not in k.name]
    assert all(geometry_of(k).share == 1 or is_columns(k) for k in kernels), "neighbours: channels"
    assert all(grid_of(k).lanes >= 2 for k in kernels)


def is_columns(kernel: Kernel) -> bool:
    return geometry_of(kernel).combine is not Combine.EXCHANGE


def test_rows_of_threads_share_sums_of_columns(large: Program) -> None:
    size = 32 * 64 * 16 * 16
    sums = [k for k in touching(large, size) if any(b.dtype is dtypes.float32 for b in k.outputs)]
    assert sums
    for kernel in sums:
        assert is_columns(kernel), "either way, whichever has more threads"
        assert blocks_of(kernel) * geometry_of(kernel).threads >= 1 << 14
        assert "__syncthreads();" in render_kernel(kernel)


def test_both_moments_of_a_norm_are_finished_in_one_kernel(large: Program) -> None:
    """Stores between the sums wait for the end: another thread may still read what they change."""
    own = filter(is_own, large.distinct())
    found = [k for k in own if is_tree(k) and len(loops_of(k)) == 2]
    assert found, "mean, spread and both running statistics"
    for kernel in found:
        text = render_kernel(kernel)
        assert text.index("if (ty != 0) return;") < text.index("put(p")


def loops_of(kernel: Kernel) -> list[For]:
    return [s for s in grid_of(kernel).body if isinstance(s, For)]


def is_tree(kernel: Kernel) -> bool:
    return geometry_of(kernel).combine is Combine.TREE


@needs_compiler
def test_a_network_s_kernels_compile(large: Program) -> None:
    source = render_program(large)
    plan = assemble(large, plan_buffers(large))
    assert len(plan.entries) == len(source.launches)
    assert from_json(tuple[Launch, ...], to_json(source.launches)) == source.launches
    for part in source.parts:
        assert is_cubin(compile_source(part, "sm_90a"))


def test_a_mean_and_a_spread_are_read_once() -> None:
    def both(x):
        return [td.mean(x, 0), td.var(x, 0), x - td.mean(x, 0)]

    graph = td.trace(both, TensorType((8192, 8), dtypes.float32))
    program = scheduled(graph)
    (parts,) = (k for k in program.distinct() if k.name.endswith("_parts"))
    assert len(parts.outputs) == 2
    x = np.random.default_rng(0).normal(size=(8192, 8)).astype(np.float32)
    x[:, 4:] += 100
    x[0] += 50  # a first row far from the others
    (name,) = graph.leaves
    mean, spread, _ = run(program, {name: x})
    np.testing.assert_allclose(mean, x.astype(np.float64).mean(0), rtol=2e-6, atol=2e-6)
    np.testing.assert_allclose(spread, x.astype(np.float64).var(0, ddof=1), rtol=1e-5)


@pytest.mark.parametrize("dtype", [dtypes.float32, dtypes.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(46, 32, 8, 62), (200, 300), (2500, 40)], ids=str)
def test_spreads_that_are_written_out_are_established(shape: tuple[int, ...], dtype: DType) -> None:
    """In one kernel with what uses them, or from parts in memory; sums are wide in any case."""
    axis = len(shape) - 2

    def normal(x):
        gap = x - td.mean(x, axis, keepdims=True)
        return gap / td.sqrt((gap * gap).mean(axis, keepdims=True) + 1e-3)

    program = scheduled(td.trace(normal, TensorType(shape, dtype)))
    assert [claim.reason for claim in check_kernels(program) if claim.reason] == []


def test_batch_norm_is_as_narrow_as_its_images() -> None:
    x, w = TensorType((4, 3, 5, 5), dtypes.bfloat16), TensorType((3,), dtypes.float32)
    (found,) = infer_types(c.BATCH_NORM, c.BatchNorm(1e-5), (x, w, w))
    assert found == x


@needs_host
@pytest.mark.parametrize(
    "dtype", [dtypes.float32, pytest.param(dtypes.bfloat16, marks=pytest.mark.slow)], ids=str
)
def test_the_text_of_a_norm_computes_it(dtype: DType) -> None:
    """Both moments, the gradient's sums and what follows, by the text that a GPU would run."""

    def norm(x, weight, bias):
        y = td.relu(bind1(c.BATCH_NORM, c.BatchNorm(1e-5), x, weight, bias))
        conv = c.Conv((1, 1), ((1, 1), (1, 1)), (1, 1))
        kernel = td.ones((8, 8, 3, 3), dtype)
        return (bind1(c.CONV, conv, y, kernel) * 0.01).sum()

    def both(x, weight, bias):
        return list(td.grad(norm, (0, 1, 2))(x, weight, bias))

    wide = TensorType((8,), dtypes.float32)
    graph = td.trace(both, TensorType((16, 8, 16, 16), dtype), wide, wide)
    program = scheduled(graph, target=WITH_CONV)
    assert any(is_tree(k) for k in program.distinct() if is_own(k))
    arrays = draw(graph, 4)
    expected = evaluate_float64(graph, arrays)
    for ours, exact in zip(run_on_host(program, arrays), expected, strict=True):
        ours, exact = ours.astype(np.float64), exact.astype(np.float64)
        np.testing.assert_allclose(ours, exact, rtol=2e-2, atol=2e-2 * np.abs(exact).max())
