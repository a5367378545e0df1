"""Reductions and norms as a GPU's threads compute them: how they are cut, and what they mean."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import combinations

import numpy as np
import pytest

import treadle as td
from backend import assert_within, draw
from cuda_backend import scheduled
from cuda_on_host import no_host_compiler, run_on_host
from test_cuda_images import ROUTINES
from test_kernels import MEANINGS, run
from treadle import nn
from treadle.base import dtypes
from treadle.codegen.cuda.driver import render_kernel
from treadle.domains.float64 import evaluate_float64
from treadle.frontend.scopes import bind1
from treadle.ir import composites as c
from treadle.ir.graph import Graph
from treadle.ir.types import TensorType
from treadle.kernel.access import accesses
from treadle.kernel.geometry import Combine
from treadle.kernel.index import Var, divide, variable
from treadle.kernel.mapped import blocks_of, geometry_of, grid_of, sums_of
from treadle.kernel.nodes import (
    Accumulate,
    Apply,
    For,
    Kernel,
    Let,
    Literal,
    Load,
    Local,
    Role,
    Statement,
    Store,
    Value,
)
from treadle.kernel.program import Program
from treadle.kernel.traverse import walk
from treadle.schedule.cuts import Walk, as_it_lies, for_threads
from treadle.schedule.mapping.groups import side_by_side
from treadle.schedule.nests import Body
from treadle.schedule.schedule import GPU, schedule

WITH_CONV = dataclasses.replace(GPU, has_conv=True)
# A device so small that little fills it: sums of a few hundred elements are cut.
CUT = dataclasses.replace(GPU.reductions, blocks=24, threads=96, image_threads=64, least_part=2)
SMALL = dataclasses.replace(WITH_CONV, parts=32, reductions=CUT)


@pytest.fixture(autouse=True)
def routines(monkeypatch) -> None:
    """The interpreter knows what the library computes."""
    for name, of in ROUTINES.items():
        monkeypatch.setitem(MEANINGS, name, of)


def traced(function, *shapes, dtype=dtypes.float32) -> Graph:
    return td.trace(function, *(TensorType(s, dtype) for s in shapes))


def assert_same(graph: Graph, target=SMALL, rtol: float = 2e-5) -> Program:
    program, arrays = scheduled(graph, target=target), draw(graph, 3)
    for ours, exact in zip(run(program, arrays), evaluate_float64(graph, arrays), strict=True):
        exact = exact.astype(np.float64)
        most = rtol * np.abs(exact).max(initial=0)
        np.testing.assert_allclose(ours.astype(np.float64), exact, rtol=rtol, atol=most)
    return program


AXES = [axes for n in (1, 2, 3) for axes in combinations(range(3), n)]


@pytest.mark.parametrize("axes", AXES, ids=str)
@pytest.mark.parametrize("shape", [(7, 11, 5), (1, 13, 17), (16, 8, 8), (31, 2, 9)], ids=str)
def test_sums_over_any_axes(shape, axes) -> None:
    def sums(x):
        turned = td.permute(x, (2, 0, 1))
        flat = td.reshape(x * 2, (shape[0] * shape[1], shape[2]))
        return [x.sum(axes), turned.sum(axes), td.max(x, axes), td.min(turned, axes), flat.sum(0)]

    assert_same(traced(sums, shape))


@pytest.mark.parametrize("dtype", [dtypes.bfloat16, dtypes.int32], ids=str)
def test_parts_of_other_dtypes(dtype) -> None:
    """Beyond the end of the last part nothing counts, whatever is combined."""

    def every(x):
        return [op(x, a) for op in (td.sum, td.max, td.min) for a in (0, 1, (0, 1))]

    assert_same(traced(every, (37, 29), dtype=dtype), rtol=1e-2)


NORMS = [
    ((5, 12, 3, 7), 3),
    ((2, 6, 5, 5), 6),
    ((3, 8, 4, 4), 1),
    ((4, 7, 1, 9), 7),
    ((2, 4, 40), 2),
    ((9, 6), 2),
]


@pytest.mark.parametrize(("shape", "groups"), NORMS, ids=str)
def test_group_norms_and_their_gradients(shape, groups) -> None:
    channels = shape[1]

    def norm(x, w, b, ct):
        return td.sum(bind1(c.GROUP_NORM, c.GroupNorm(groups, 1e-3), x, w, b) * ct)

    def both(x, w, b, ct):
        return [norm(x, w, b, ct), *td.grad(norm, (0, 1, 2))(x, w, b, ct)]

    assert_same(traced(both, shape, (channels,), (channels,), shape), rtol=1e-4)


def test_group_norms_between_convolutions() -> None:
    """Images lie with channels last: threads have channels beside each other."""
    conv = c.Conv((1, 1), ((1, 1), (1, 1)), (1, 1))

    def loss(x, k, w, b):
        y = td.relu(bind1(c.GROUP_NORM, c.GroupNorm(2, 1e-3), bind1(c.CONV, conv, x, k), w, b))
        return td.mean(bind1(c.CONV, conv, y, k))

    def both(x, k, w, b):
        return [loss(x, k, w, b), *td.grad(loss, (0, 1, 2, 3))(x, k, w, b)]

    assert_same(traced(both, (3, 8, 5, 6), (8, 8, 3, 3), (8,), (8,)), rtol=1e-4)


# How they are cut


def network(channels: int = 64, groups: int = 8) -> Program:
    model = nn.Sequential(
        nn.Conv2d(8, channels, 3, padding=1), nn.GroupNorm(groups, channels), nn.ReLU(),
        nn.Conv2d(channels, 8, 3, padding=1),
    )  # fmt: skip
    step = td.compile_step(
        model, lambda m, b: td.mean(td.square(m(b["x"]))), td.optim.sgd(0.1),
        {"x": td.Spec((64, 8, 32, 32))}, device="oracle", precision="bfloat16",
    )  # fmt: skip
    from treadle.step.programs import UNWATCHED

    graph = step._programs.built(step._inputs).step(step._mode(), UNWATCHED).graph
    return scheduled(graph, target=WITH_CONV, in_place=True)


def test_a_group_norm_reads_its_images_once_for_both_moments() -> None:
    size = 64 * 64 * 32 * 32
    program = network()
    kernels = [c.kernel for c in program.calls() if c.kernel.geometry is not None]
    touching = [k for k in kernels if any(b.size == size for b in k.buffers)]
    # Moments, result; the gradient's sums with the activation's, and the gradient.
    assert len(touching) <= 5
    for kernel in touching:
        is_columns = geometry_of(kernel).combine is not Combine.EXCHANGE
        assert is_columns or geometry_of(kernel).share == 1, "neighbours are channels"
        assert grid_of(kernel).lanes == 8
    small = [k for k in kernels if max(b.size for b in k.buffers) in (64 * 64, 8 * 64 * 64)]
    assert len(small) <= 4, "statistics of groups are finished in one kernel"


def parts_of(function, *shapes) -> Kernel:
    program = scheduled(traced(function, *shapes))
    return next(k for k in program.distinct() if k.name.endswith("_parts"))


def test_a_sum_of_all_is_many_blocks_whatever_its_factors() -> None:
    for shape in ((30522, 64), (1, 2**20 + 7), (1031, 1033)):
        kernel = parts_of(lambda x: (x * x).sum(), shape)
        assert 256 <= blocks_of(kernel) <= 1024


def test_what_is_permuted_is_walked_as_it_lies() -> None:
    def across(x):  # (64, 512, 196) of (64, 196, 512)
        return td.permute(x, (0, 2, 1)).sum((0, 1))

    (kernel,) = (
        k for k in scheduled(traced(across, (64, 196, 512))).distinct() if "reduce_sum" in k.name
    )
    assert blocks_of(kernel) == 196
    assert geometry_of(kernel).threads == 1024


def test_loops_of_a_reshape_come_apart_and_neighbours_become_one() -> None:
    """The groups of a norm by hand: (N, G, C / G · H · W) of images with channels last."""
    row, inner = Var("row", 6), Var("i", 4 * 5 * 7)
    n, g = divide(variable(row), 2)
    rest, w = divide(variable(inner), 7)
    channel, h = divide(rest, 5)
    index = n * 280 + h * 56 + w * 8 + g * 4 + channel
    walk = as_it_lies(
        Walk((variable(row), variable(inner)), (row, inner), frozenset({inner})), [index]
    )
    assert [v.extent for v in walk.order] == [3, 35, 2, 4]
    assert [v in walk.summed for v in walk.order] == [False, True, False, True]


@pytest.mark.parametrize(
    ("extent", "wanted", "length"), [(64, 8, 8), (197, 10, 20), (12608, 682, 32), (30522, 341, 90)]
)
def test_parts_are_even_where_some_number_divides(extent: int, wanted: int, length: int) -> None:
    rows, columns = Var("r", extent), Var("c", 8)
    walk = Walk((variable(rows), variable(columns)), (rows, columns), frozenset({rows}))
    cut = for_threads(walk.whole(frozenset({0})), wanted, False, 1)
    assert [v.extent for v in cut.inner] == [length]
    assert bool(cut.guards) == (extent % length != 0)


def test_short_rows_have_a_part_of_a_warp_and_their_elements_a_thread() -> None:
    """A warp would be idle for a third of a row of 21; threads alone would read far apart."""
    shape = (40000, 21)
    (sums,) = scheduled(traced(lambda x: td.logsumexp(x, 1), shape)).distinct()
    assert geometry_of(sums).share == 16

    def scaled(x, y):  # each row has a number of its own, which is computed once
        return x * td.exp(y)[:, None]

    (elements,) = scheduled(traced(scaled, shape, shape[:1])).distinct()
    assert geometry_of(elements).share == 1
    assert grid_of(elements).count == 840000


@pytest.mark.skipif(no_host_compiler() is not None, reason=str(no_host_compiler()))
@pytest.mark.parametrize("count", [2051, 2052])
def test_short_rows_of_any_number_in_one_launch(count: int) -> None:
    """Threads beyond the last row leave a part of a launch; nobody may wait for them."""
    graph = traced(lambda x: td.sum(td.softmax(x, 1) * td.exp(x), 0) * 2, (count, 24))
    program = schedule(graph, in_place=True, target=GPU)
    assert program.cooperative
    assert {geometry_of(k).share for k in program.distinct()} == {16 if count % 2 == 0 else 32, 256}
    arrays = draw(graph, 3, 0.5)
    assert_within(graph, arrays, run_on_host(program, arrays), 8.0)


def test_what_a_kernel_does_not_write_is_loaded_once_for_a_loop() -> None:
    """And an exponential of narrow floats is fast, whatever they are the sum of."""

    def rows(x, y, b):
        return [td.exp(td.cast(x + td.cast(b, td.bfloat16), td.float32) - y[:, None]) * y[:, None]]

    specs = (td.Spec((4096, 768), td.bfloat16), td.Spec((4096,)), td.Spec((768,)))
    (kernel,) = scheduled(td.trace(rows, *specs)).distinct()
    text = render_kernel(kernel).split("__global__")[-1]
    assert "fixed(p2" in text
    assert "n_exp(" in text
    assert "t_exp(" not in text


# Tensors that lie along two axes


@pytest.mark.parametrize("shape", [(3, 64, 40), (2, 96, 28), (1, 33, 35), (2, 7, 256)], ids=str)
def test_what_is_transposed_means_the_same(shape) -> None:
    def turned(x, y):
        return [td.permute(x, (0, 2, 1)) * 2 + y, td.permute(y, (0, 2, 1)) - x]

    assert_same(traced(turned, shape, (shape[0], shape[2], shape[1])), GPU)


def test_threads_walk_tiles_where_tensors_lie_along_two_axes() -> None:
    def turned(x, y):
        return td.permute(x, (0, 2, 1)) + y

    (kernel,) = scheduled(
        traced(turned, (64, 512, 196), (64, 196, 512), dtype=dtypes.bfloat16)
    ).distinct()
    *_, across, along = grid_of(kernel).variables
    assert (across.extent, along.extent, grid_of(kernel).lanes) == (49, 16, 8)
    (plain,) = scheduled(traced(lambda x: x * 2, (64, 512, 196))).distinct()
    assert len(grid_of(plain).variables) == 1, "one axis is walked as it is"


# Sums of a group


def sums_by_hand(second_start: Statement, between: Sequence[Statement], inner: Value) -> Body:
    i, j = Var("i", 8), Var("j", 8)
    first = Accumulate("a", "add", Load("x", variable(i), dtypes.float32))
    return (
        Let("a", Literal(0, dtypes.float32)),
        For(i, Role.SEQUENTIAL, (first,)),
        *between,
        second_start,
        For(j, Role.SEQUENTIAL, (Accumulate("b", "add", inner),)),
    )


def test_sums_of_one_length_are_one_loop_unless_one_needs_the_other() -> None:
    zero = Let("b", Literal(0, dtypes.float32))
    at_j = Load("y", variable(Var("j", 8)), dtypes.float32)
    half = Let("half", Local("a", dtypes.float32))
    stored = Store("y", variable(Var("k", 1)), Local("a", dtypes.float32))

    def loops(*given) -> int:
        return sum(isinstance(s, For) for s in side_by_side(sums_by_hand(*given)))

    assert loops(zero, [half], at_j) == 1
    assert loops(zero, [half], Apply("mul", (at_j, Local("half", at_j.dtype)), at_j.dtype)) == 2
    assert loops(zero, [], Apply("mul", (at_j, Local("a", at_j.dtype)), at_j.dtype)) == 2
    assert loops(zero, [stored], at_j) == 2, "what is stored between is read"
    assert loops(Let("b", Local("a", dtypes.float32)), [], at_j) == 2


def test_a_gradient_of_rows_keeps_its_own_rows_in_registers() -> None:
    """Not the weights, which are in the cache: what is written is not read back."""

    def gradient(ct, weight, x, centre, root):
        normal = (td.cast(x, td.float32) - centre) * root
        g = td.cast(ct, td.float32) * weight
        along = td.mean(g * normal, 1, keepdims=True)
        dx = td.cast(root * (g - td.mean(g, 1, keepdims=True) - normal * along), td.bfloat16)
        return [dx, td.sum(td.cast(dx, td.float32), 0)]

    narrow, wide = td.Spec((8192, 768), td.bfloat16), td.Spec((8192, 1))
    program = scheduled(td.trace(gradient, narrow, td.Spec((768,)), narrow, wide, wide))
    (rows,) = (k for k in program.distinct() if k.scratch)
    (row,) = (s for s in walk(rows.body) if isinstance(s, For) and s.var.name == "row")
    assert sum(bool(sums_of(s)) for s in row.body if isinstance(s, For)) == 1, "one for both"
    written = {b.name for b in rows.outputs}
    assert not any(a.buffer in written and not a.writes for a in accesses(row.body))
