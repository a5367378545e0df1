"""Long axes in order, and sums by segment, as a GPU's threads compute them: interpreted here."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import treadle as td
from cuda_backend import ALONE
from cuda_on_host import no_host_compiler, run_on_host
from test_kernels import run as interpreted
from treadle.base.dtypes import DType
from treadle.domains.float64 import evaluate_float64
from treadle.ir.types import TensorType
from treadle.kernel.geometry import Scattered
from treadle.kernel.mapped import geometry_of
from treadle.kernel.nodes import For, Role
from treadle.kernel.target import GPU, Target
from treadle.kernel.target_webgpu import BASE, target_of
from treadle.kernel.traverse import walk
from treadle.schedule.schedule import schedule

assert GPU.mapping is not None
GROUPED = dataclasses.replace(GPU, reductions=dataclasses.replace(GPU.reductions, counted=2))
MERGING = dataclasses.replace(GROUPED, mapping=dataclasses.replace(GPU.mapping, sorted_row=0))
needs_host = pytest.mark.skipif(no_host_compiler() is not None, reason=f"{no_host_compiler()}")
SHAPES = [((3,), 0), ((8,), 0), ((70,), 0), ((3, 37), 1), ((33, 2), 0), ((2, 9, 3), 1)]


def ordered(axis: int) -> dict[str, Callable[[Any], list[Any]]]:
    return {
        "sort": lambda x: [td.sort(x, axis=axis), td.argsort(x, axis)],
        "descending": lambda x: [td.sort(x, axis=axis, descending=True)],
        "largest": lambda x: list(td.topk(x, 3, axis)),
    }


@pytest.mark.parametrize("name", list(ordered(0)))
@pytest.mark.parametrize("dtype", [td.float32, td.int32], ids=str)
@pytest.mark.parametrize(("shape", "axis"), SHAPES)
def test_threads_merge_runs(shape: tuple[int, ...], axis: int, dtype: DType, name: str) -> None:
    """Equal elements stay in order, and NaN is the greatest."""
    graph = td.trace(ordered(axis)[name], TensorType(shape, dtype))
    given = np.random.default_rng(0).integers(0, 5, shape).astype(dtype.numpy)
    if dtype.is_float:
        given.flat[2] = np.nan
    arrays = dict.fromkeys(graph.leaves, given)
    for target in (MERGING, GROUPED):
        found = interpreted(schedule(graph, target=target), arrays)
        for ours, theirs in zip(found, evaluate_float64(graph, arrays), strict=True):
            np.testing.assert_array_equal(np.asarray(ours, np.float64), theirs)


def test_no_thread_sorts_alone() -> None:
    graph = td.trace(lambda x: [td.argsort(x, 0)], TensorType((850_000,), td.int32))
    program = schedule(graph, target=GPU)
    loops = [s for k in program.distinct() for s in walk(k.body) if isinstance(s, For)]
    assert all(loop.role is Role.GRID for loop in loops)
    assert len(program.distinct()) == 21, "a copy, and 20 times twice as long"


def segments(x: Any, index: Any) -> list[Any]:
    return [
        td.segment_sum(x, index, 300),
        td.bincount(index, 300),
    ]


@needs_host
def test_sums_without_columns_are_shared() -> None:
    graph = td.trace(segments, TensorType((5000,), td.float32), TensorType((5000,), td.int32))
    program = schedule(graph, target=GPU.in_order())
    scattered = [k for k in program.distinct() if isinstance(geometry_of(k).template, Scattered)]
    assert len(scattered) == 2
    rng = np.random.default_rng(0)
    x = rng.standard_normal(5000).astype(np.float32)
    arrays = {"x": x, "index": rng.integers(0, 290, 5000).astype(np.int32)}
    pairs = zip(run_on_host(program, arrays), evaluate_float64(graph, arrays), strict=True)
    for ours, theirs in pairs:
        np.testing.assert_allclose(np.asarray(ours, np.float64), theirs, atol=1e-4)


SORTING = dataclasses.replace(
    GPU.in_order(), rewriting=dataclasses.replace(GPU.rewriting, least_sorted=1)
)


@pytest.mark.parametrize("dtype", [td.float32, td.bfloat16, td.int32], ids=str)
@pytest.mark.parametrize("shape", [(70,), (70, 8), (33, 2, 5), (2, 3)], ids=str)
def test_sums_of_runs(shape: tuple[int, ...], dtype: DType) -> None:
    """Rows without an update, with one, and with many."""
    types = TensorType(shape, dtype), TensorType(shape[:1], td.int32)
    graph = td.trace(lambda x, index: [td.segment_sum(x * 2, index, 20)], *types)
    program = schedule(graph, target=SORTING)
    assert any(k.name.endswith("_starts") for k in program.distinct())
    rng = np.random.default_rng(0)
    x = rng.integers(-9, 9, shape).astype(dtype.numpy)
    arrays = {"x": x, "index": (rng.integers(0, 20, shape[:1]) ** 2 // 20).astype(np.int32)}
    (ours,), (theirs,) = interpreted(program, arrays), evaluate_float64(graph, arrays)
    np.testing.assert_array_equal(np.asarray(ours, np.float64), theirs)


@needs_host
@pytest.mark.parametrize("shape", [(500,), (500, 8), (500, 2, 16)], ids=str)
def test_runs_of_different_lengths_on_threads(shape: tuple[int, ...]) -> None:
    types = TensorType(shape, td.float32), TensorType((500,), td.int32)
    graph = td.trace(lambda x, index: [td.segment_sum(x, index, 90)], *types)
    rng = np.random.default_rng(0)
    skewed = (rng.integers(0, 90, 500) ** 3 // 8100).astype(np.int32)
    arrays = {"x": rng.standard_normal(shape).astype(np.float32), "index": skewed}
    program = schedule(graph, target=SORTING)
    (ours,), (theirs,) = run_on_host(program, arrays), evaluate_float64(graph, arrays)
    np.testing.assert_allclose(np.asarray(ours, np.float64), theirs, atol=1e-4)


def test_rows_that_are_taken_again_are_not_stored() -> None:
    """Messages along edges are read from the nodes, by the kernels that sum them."""

    def messages(x: Any, index: Any) -> list[Any]:
        taken = td.tanh(x)[index]  # (edges, 8)
        return [(taken * taken).sum(1), td.segment_sum(taken * 2, index, 60)]

    types = TensorType((60, 8), td.float32), TensorType((6000,), td.int32)
    program = schedule(td.trace(messages, *types), target=GPU)
    assert max(b.size for b in program.buffers if b.dtype.is_float) == 6000
    assert {b.size for b in program.buffers if b.dtype.is_float} == {480, 6000}


LINES = {
    "last": ((5, 70), 1),
    "middle": ((3, 33, 2), 1),
    "first": ((50, 3), 0),
    "one line": ((129,), 0),
    "powers": ((2, 64), 1),
}


@pytest.mark.parametrize("target", [GPU, ALONE, target_of(BASE)], ids=["small", "alone", "webgpu"])
@pytest.mark.parametrize("name", LINES)
def test_short_lines_are_sorted_in_a_group(name: str, target: Target) -> None:
    """One kernel for all lines, whose merges stay in the group's own memory."""
    shape, axis = LINES[name]
    rng = np.random.default_rng(0)
    x = rng.integers(-5, 5, shape).astype(np.float32)
    x.reshape(-1)[::17] = np.nan
    for descending in (False, True):
        graph = td.trace(lambda x: td.sort(x, axis, descending=descending), TensorType(shape))  # noqa: B023
        program = schedule(graph, target=target)
        assert len(program.distinct()) == 1
        found = interpreted(program, {"x": x})
        for ours, theirs in zip(found, evaluate_float64(graph, {"x": x}), strict=True):
            np.testing.assert_array_equal(ours, theirs)


@needs_host
@pytest.mark.parametrize("name", LINES)
def test_short_lines_on_threads(name: str) -> None:
    shape, axis = LINES[name]
    x = np.random.default_rng(0).integers(-5, 5, shape).astype(np.float32)
    graph = td.trace(lambda x: td.topk(x, 4, axis), TensorType(shape))
    for target in (GPU, ALONE):
        found = run_on_host(schedule(graph, target=target), {"x": x})
        for ours, theirs in zip(found, evaluate_float64(graph, {"x": x}), strict=True):
            np.testing.assert_array_equal(ours, theirs)
