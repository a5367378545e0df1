"""Matmuls whose warps do what follows each element: the same numbers, fewer passes over memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

import treadle as td
from backend import assert_within, draw, same_bits
from checked_programs import graphs_of, record_of
from cuda_backend import ALONE, needs_gpu, on_gpu, scheduled
from test_kernels import run
from treadle.base import dtypes
from treadle.codegen.cuda.driver import render_program
from treadle.ir.graph import Graph
from treadle.ir.types import TensorType
from treadle.kernel.geometry import Warpgroups
from treadle.kernel.program import Program
from treadle.kernel.target import Target
from treadle.kernel.warpgroups import maps_of, template_of
from treadle_checker.kernel_checks import check_program
from treadle_checker.program import read_program


def with_finished(**limits: int) -> Target:
    """A target that finishes every product that can be, however small."""
    every = {"finished_blocks": 1, "finished_work": 0, "finished_depth": 1 << 20} | limits
    matmuls = replace(ALONE.matmuls, finishes=True, flops_for_library=0, **every)
    return replace(ALONE, matmuls=matmuls, reductions=replace(ALONE.reductions, most_parts=8))


FINISHING = with_finished()


def templates(program: Program) -> list[Warpgroups]:
    found = (template_of(call.kernel) for call, _ in program.counted_calls())
    return [t for t in found if t is not None]


def traced(
    function: Callable[..., object], *shapes: tuple[int, ...], dtype=dtypes.bfloat16
) -> Graph:
    return td.trace(function, *(TensorType(shape, dtype) for shape in shapes))


def biased(x, w, b):
    return td.gelu(x @ w + b)


def turned(x, w, b):
    """Lines of both operands lie the other way."""
    return td.relu(x.transpose(0, 1) @ w.transpose(0, 1) + b)


def kept(x, w, b):
    """The product is a result too."""
    product = x @ w
    return product, td.tanh(product) * b


def joined(x, w, y):
    """Another tensor of the result's size is read."""
    return (x @ w) * y + y


def summed(x, w, y):
    """Columns are summed beside the elements, as a gradient of a bias is."""
    found = (x @ w) * td.sigmoid(y)
    return found, td.cast(found, td.float32).sum(0)


def by_parts(x, w, y):
    """A row of another tensor is read for all rows of a part."""
    product = (x @ w).reshape(8, x.shape[0] // 8, w.shape[1])
    found = product * y[:, None, :]
    return found, td.cast(found, td.float32).sum((0, 1))


# Rows, columns and depth: whole tiles, less than one, remainders of each, an odd number of tiles.
SIZES = [(256, 256, 64), (128, 8, 8), (200, 264, 72), (384, 520, 40), (640, 256, 200)]
FUNCTIONS = [biased, turned, kept, joined]


def shapes_of(function: Callable[..., object], m: int, n: int, k: int) -> Sequence[tuple[int, ...]]:
    if function is turned:
        return (k, m), (n, k), (n,)
    return (m, k), (k, n), (m, n) if function in (joined, summed) else (n,)


def fits(function: Callable[..., object], m: int) -> bool:
    return function is not turned or m % Warpgroups.LANES == 0


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("sizes", [(24, 16, 8), (8, 40, 24)])
def test_an_elementwise_kernel_follows_its_matmul(function, sizes) -> None:
    graph = traced(function, *shapes_of(function, *sizes))
    program = scheduled(graph, target=FINISHING)
    (found,) = templates(program)
    assert found.sizes == sizes
    assert sum(n for _, n in program.counted_calls()) == 1
    arrays = draw(graph, 3)
    assert_within(graph, arrays, run(program, arrays))


def test_columns_are_summed_by_parts() -> None:
    graph = traced(summed, *shapes_of(summed, 4096, 16, 8))
    program = scheduled(graph, target=FINISHING)
    (found,) = templates(program)
    assert found.inner is not None
    assert found.sums == 1
    assert found.inner.extent % Warpgroups.ROWS == 0
    arrays = draw(graph, 4)
    assert_within(graph, arrays, run(program, arrays))


def test_what_is_read_once_for_a_part() -> None:
    graph = traced(by_parts, (1024, 8), (8, 136), (8, 136))
    program = scheduled(graph, target=FINISHING)
    (found,) = templates(program)
    assert found.inner is not None
    arrays = draw(graph, 8)
    assert_within(graph, arrays, run(program, arrays))
    assert "first.row / 128" in "\n".join(render_program(program).parts)


def test_equal_layers_have_one_kernel() -> None:
    def layers(x, v, w):
        return td.relu(td.relu(x @ v) @ w)

    program = scheduled(traced(layers, (128, 64), (64, 64), (64, 64)), target=FINISHING)
    assert len(templates(program)) == 2
    assert len({id(call.kernel) for call, _ in program.counted_calls()}) == 1


def test_what_is_rounded_is_rounded_once_and_as_before() -> None:
    graph = traced(biased, *shapes_of(biased, 24, 16, 8))
    arrays = draw(graph, 5)
    apart = run(scheduled(graph, target=ALONE), arrays)
    assert same_bits(run(scheduled(graph, target=FINISHING), arrays), apart)


def wide(x, w, b):
    return td.relu(x @ w + b)


def odd_lines(x, w, b):
    return td.relu(x @ w + b)


def of_rows(x, w, b):
    return td.softmax(x @ w + b, -1)


def twice(x, w, b):
    """Two kernels of the next phase read it: the other way round."""
    product = x @ w
    return td.relu(product + b), (product * product).sum(0)


@pytest.mark.parametrize(
    ("function", "sizes", "dtype", "target"),
    [
        (wide, (24, 16, 8), dtypes.float32, FINISHING),
        (odd_lines, (24, 12, 8), dtypes.bfloat16, FINISHING),
        (of_rows, (24, 16, 8), dtypes.bfloat16, FINISHING),
        (biased, (24, 16, 8), dtypes.bfloat16, ALONE),
        (biased, (24, 16, 8), dtypes.bfloat16, with_finished(finished_blocks=2)),
        (biased, (24, 16, 24), dtypes.bfloat16, with_finished(finished_depth=8)),
        (biased, (24, 16, 8), dtypes.bfloat16, with_finished(finished_work=20)),
    ],
)
def test_what_is_left_to_the_library(function, sizes, dtype, target) -> None:
    graph = traced(function, *shapes_of(function, *sizes), dtype=dtype)
    program = scheduled(graph, target=target)
    assert not templates(program)
    arrays = draw(graph, 6)
    assert_within(graph, arrays, run(program, arrays))


def test_operands_are_copied_by_boxes_and_for_both_blocks_of_a_cluster() -> None:
    sizes = 512, 512, 64
    for function in (biased, turned):
        graph = traced(function, *shapes_of(function, *sizes))
        program = scheduled(graph, target=FINISHING)
        (call,) = (c for c, _ in program.counted_calls())
        left, right = maps_of(call.kernel)
        along = function is biased
        depth, across = Warpgroups.DEPTH, Warpgroups.ACROSS
        assert left.box == ((depth, 128) if along else (across, depth))
        assert right.box == ((across, depth) if along else (depth, 128))
        assert (left.inner, left.outer) == ((64, 512) if along else (512, 64))
        text = "\n".join(render_program(program).parts)
        assert "__cluster_dims__(2, 1, 1)" in text
        assert "ask_for_both(" in text
    graph = traced(biased, *shapes_of(biased, 384, 512, 64))  # three tiles: no pairs
    text = "\n".join(render_program(scheduled(graph, target=FINISHING)).parts)
    assert "__cluster_dims__" not in text


@needs_gpu
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("dtype", [dtypes.bfloat16, dtypes.float16], ids=str)
def test_on_a_gpu(function, sizes, dtype) -> None:
    _check_on_a_gpu(traced(function, *shapes_of(function, *sizes), dtype=dtype))


@needs_gpu
@pytest.mark.parametrize("sizes", [(4096, 16, 8), (8192, 264, 136), (33792, 520, 64)])
def test_sums_on_a_gpu(sizes) -> None:
    _check_on_a_gpu(traced(summed, *shapes_of(summed, *sizes)))


@needs_gpu
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_more_tiles_than_blocks_on_a_gpu(function) -> None:
    """Blocks take several in turn: phases of barriers have both names."""
    _check_on_a_gpu(traced(function, *shapes_of(function, 128 * 41, 256 * 9, 264)))


def _check_on_a_gpu(graph: Graph) -> None:
    arrays = draw(graph, 7)
    program = on_gpu(graph, target=FINISHING)
    found = program.run(arrays)
    assert templates(scheduled(graph, target=FINISHING))
    apart = on_gpu(graph).run(arrays)
    for output, ours, theirs in zip(graph.outputs, found, apart, strict=True):
        ours, theirs = (np.asarray(a, np.float64) for a in (ours, theirs))
        assert np.isfinite(ours).all(), output.name
        size = np.abs(theirs).max() or 1.0
        assert np.abs(ours - theirs).max() <= 0.02 * size, output.name
    assert same_bits(program.run(arrays), found)
    if max(a.size for a in arrays.values()) < 1 << 18:
        assert_within(graph, arrays, found)


@pytest.mark.parametrize("function", [*FUNCTIONS, summed], ids=lambda f: f.__name__)
def test_the_checker_establishes_what_is_fused(function) -> None:
    sizes = (8192, 264, 136) if function is summed else (200, 264, 72)
    program = scheduled(traced(function, *shapes_of(function, *sizes)), target=FINISHING)
    assert templates(program)
    record = read_program(record_of(program, FINISHING))
    claims = check_program(record, graphs_of(program))
    assert all(c.is_established for c in claims), [c.reason for c in claims]
