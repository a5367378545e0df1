"""Rows of matrices that a library multiplies start at whole packs; planes read across lie apart."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

import treadle as td
from backend import assert_within
from test_kernels import run as interpreted
from treadle.base.dtypes import DType
from treadle.frontend.scopes import bind1
from treadle.ir.graph import Graph
from treadle.ir.ops.shaping import PERMUTE, Permute
from treadle.ir.types import TensorType
from treadle.kernel.launch import matmul_call_of
from treadle.kernel.target import CPU, GPU, Target
from treadle.schedule.schedule import schedule

LIBRARY = dataclasses.replace(
    GPU.matmuls, flops_for_library=1, least_pitched=4, launch_flops=0, launch_flops_of_graph=0
)
TARGET = dataclasses.replace(GPU, matmuls=LIBRARY)


def mixed(x: Any, first: Any, second: Any) -> list[Any]:
    """Tokens mixed, as an MLP-Mixer does: (B, T, D) by (H, T) and (T, H)."""
    y = td.tanh(x * 2).transpose(1, 2)  # (B, D, T)
    hidden = td.relu(y @ first.T + 1) @ second.T
    return [hidden * 2 + y, hidden.sum((0, 1))]


def graph_of(dtype: DType, tokens: int) -> Graph:
    shapes = (3, tokens, 8), (16, tokens), (tokens, 16)
    types = [TensorType(shape, td.float32) for shape in shapes]

    def results(*given: Any) -> list[Any]:
        return [r.astype(td.float32) for r in mixed(*(g.astype(dtype) for g in given))]

    def gradients(*given: Any) -> list[Any]:
        def loss(*inner: Any) -> Any:
            return sum((r * r).sum() for r in results(*inner))

        return [*results(*given), *td.grad(loss, (0, 1, 2))(*given)]

    return td.trace(gradients, *types)


@pytest.mark.parametrize("tokens", [5, 8])
@pytest.mark.parametrize("dtype", [td.bfloat16, td.float32], ids=str)
def test_rows_of_matmuls_start_at_packs(dtype: DType, tokens: int) -> None:
    graph = graph_of(dtype, tokens)
    program = schedule(graph, target=TARGET)
    calls = [m for k in program.distinct() if (m := matmul_call_of(k)) is not None]
    assert len(calls) >= 5
    sides = [m for call in calls for m in (call.target, call.left, call.right)]
    pitches = {max(side.rows, side.columns) for side in sides}
    if dtype.is_narrow:
        assert all(p % 8 == 0 for p in pitches)
    else:
        assert tokens in pitches, "wide numbers lie one after the other"
    rng = np.random.default_rng(0)
    arrays = {
        n: rng.standard_normal(graph.nodes[i].types[0].shape).astype(np.float32)
        for n, i in graph.leaves.items()
    }
    assert_within(graph, arrays, interpreted(program, arrays), 4.0)


def sizes_of(graph: Graph, target: Target) -> set[int]:
    """Of all that kernels read and write in memory."""
    return {b.size for k in schedule(graph, target=target).distinct() for b in k.buffers}


def tokens_of(x, y, z):
    """Planes of 4 KiB, which tokens read across."""
    planes = x * y + z
    tokens = planes.reshape(*planes.shape[:2], -1).permute(0, 2, 1)
    return td.exp(tokens), td.cos(tokens)


def test_planes_that_are_read_across_do_not_share_a_place_in_the_cache() -> None:
    shapes = [td.Spec((2, 64, 32, 32))] * 3
    graph = td.trace(tokens_of, *shapes)
    assert 2 * 64 * 32 * 33 in sizes_of(graph, CPU)
    assert 2 * 64 * 32 * 33 not in sizes_of(graph, dataclasses.replace(CPU, way=0))
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=s.shape).astype(np.float32) for s in shapes]
    found, expected = (
        td.compile(tokens_of, *shapes, device=device)(*arrays) for device in ("cpu", "oracle")
    )
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-3)


def test_what_rows_are_taken_of_lies_row_by_row() -> None:
    """A matmul reads the same planes as they lie."""

    def both(x, m):
        planes = td.tanh(x) + 1.0
        return td.exp(planes.permute(0, 2, 1)), planes @ m

    shapes = [td.Spec((2, 64, 1024)), td.Spec((1024, 16))]
    graph = td.trace(both, *shapes)
    assert 2 * 64 * 1040 not in sizes_of(graph, CPU)


@pytest.mark.parametrize("shape", [(), (0, 64, 1024), (2, 0, 32, 32), (2, 64, 0), (1, 64, 1024)])
def test_permutations_of_nothing_and_of_numbers(shape: tuple[int, ...]) -> None:
    x = np.random.default_rng(1).normal(size=shape).astype(np.float32)
    axes = tuple(reversed(range(len(shape))))

    def turned(x: Any) -> list[Any]:
        planes = td.tanh(x) + 1.0
        moved = bind1(PERMUTE, Permute(axes), planes)  # of a number `td.permute` gives x
        return [td.exp(moved), planes.sum(), moved * 2.0]

    graph = td.trace(turned, td.Spec(shape))
    arrays = {"x": x}
    found = interpreted(schedule(graph, True, target=CPU), arrays)  # as it was traced
    assert_within(graph, arrays, found)
