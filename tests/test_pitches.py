"""Rows of matrices that a library multiplies start at whole packs."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

import treadle as td
from backend import assert_within
from test_kernels import run as interpreted
from treadle.base.dtypes import DType
from treadle.ir.graph import Graph
from treadle.ir.types import TensorType
from treadle.kernel.launch import matmul_call_of
from treadle.kernel.target import GPU
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
