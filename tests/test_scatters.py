"""Scatter-adds along any axes, by any indices, in any order and in one order."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import treadle as td
from cuda_backend import ALONE, IN_ORDER
from cuda_on_host import no_host_compiler, run_on_host
from test_kernels import run as interpreted
from treadle.base import dtypes
from treadle.base.dtypes import DType
from treadle.base.errors import GraphError
from treadle.codegen.cuda.driver import render_program
from treadle.domains.float64 import evaluate_float64
from treadle.frontend.scopes import bind1
from treadle.ir.graph import Graph
from treadle.ir.ops.indexing import SCATTER_ADD, ScatterAdd
from treadle.ir.ops.reductions import SORT
from treadle.ir.types import TensorType
from treadle.kernel.index import Data, Index, Var, variable
from treadle.kernel.nodes import (
    Buffer,
    For,
    Kernel,
    Let,
    Load,
    Role,
    Store,
    Update,
)
from treadle.kernel.target import GPU, Target
from treadle.kernel.target_webgpu import BASE, target_of
from treadle.kernel.text import to_text
from treadle.kernel.traverse import walk
from treadle.kernel.verify import verify
from treadle.rules.expansion import expand
from treadle.schedule.schedule import schedule

needs_host = pytest.mark.skipif(no_host_compiler() is not None, reason=f"{no_host_compiler()}")
F32, I32, I64 = dtypes.float32, dtypes.int32, dtypes.int64
SORTED = replace(GPU.in_order(), rewriting=replace(GPU.rewriting, least_sorted=1))
TARGETS = {
    "in any order": GPU,
    "launches": ALONE,
    "in order": IN_ORDER,
    "sorted": SORTED,
    "webgpu": target_of(BASE),
}
# Updates, indices, axis, size, batch.
CASES = {
    "rank 1": ((40, 3), (40,), 0, 7, 0),
    "rank 2": ((10, 4, 3), (10, 4), 0, 7, 0),
    "rank 3, no columns": ((3, 4, 5), (3, 4, 5), 0, 11, 0),
    "last axis": ((6, 5, 20), (20,), 2, 9, 0),
    "middle, rank 2": ((3, 4, 5, 6), (4, 5), 1, 8, 0),
    "a batch": ((5, 12, 4), (5, 12), 1, 7, 1),
    "a batch and a middle axis": ((2, 3, 6, 2), (2, 6), 2, 4, 1),
    "a batch of two axes": ((2, 3, 4, 5, 2), (2, 3, 4, 5), 2, 6, 2),
    "one row": ((30, 2), (30,), 0, 1, 0),
    "none": ((0, 2), (0,), 0, 3, 0),
}


def graph_of(name: str, dtype: DType = F32) -> Graph:
    updates, indices, axis, size, batch = CASES[name]

    def f(x: td.Tensor, at: td.Tensor) -> td.Tensor:
        return bind1(SCATTER_ADD, ScatterAdd(axis, size, batch), x * 2, at)

    return td.trace(f, TensorType(updates, dtype), TensorType(indices, I32))


def given(name: str, dtype: DType = F32, hot: bool = False) -> dict[str, np.ndarray]:
    updates, indices, _, size, _ = CASES[name]
    rng = np.random.default_rng(7)
    at = rng.integers(0, 1 if hot else size, indices)
    return {"x": rng.integers(-9, 9, updates).astype(dtype.numpy), "at": at.astype(np.int32)}


def check(graph: Graph, arrays: dict[str, Any], found: list[np.ndarray]) -> None:
    (expected,) = evaluate_float64(graph, arrays)
    np.testing.assert_array_equal(np.asarray(found[0], np.float64), expected)


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
@pytest.mark.parametrize("name", CASES)
def test_every_axis_and_rank(name: str, target: Target) -> None:
    graph = graph_of(name)
    program = schedule(graph, target=target)
    for kernel in program.distinct():
        verify(kernel, target.mapping)
    for hot in (False, True):
        check(graph, given(name, hot=hot), interpreted(program, given(name, hot=hot)))


@pytest.mark.parametrize("dtype", [td.bfloat16, td.int32, td.uint8, td.int64, td.float64], ids=str)
def test_every_kind_of_number(dtype: DType) -> None:
    graph, arrays = graph_of("rank 2", dtype), given("rank 2", td.int32)
    arrays["x"] = np.abs(arrays["x"]).astype(dtype.numpy)
    check(graph, arrays, interpreted(schedule(graph, target=GPU), arrays))


@needs_host
@pytest.mark.parametrize("target", [GPU, ALONE, IN_ORDER, SORTED], ids=list(TARGETS)[:4])
@pytest.mark.parametrize("name", list(CASES)[:7])
def test_the_text(name: str, target: Target) -> None:
    graph, arrays = graph_of(name), given(name)
    check(graph, arrays, run_on_host(schedule(graph, target=target), arrays))


@needs_host
def test_what_is_outside_is_left_out() -> None:
    graph, arrays = graph_of("a batch"), given("a batch")
    arrays["at"][:, ::3] = [[7], [-1], [8], [-7], [100]]
    kept = arrays | {
        "x": np.where(((arrays["at"] >= 0) & (arrays["at"] < 7))[..., None], arrays["x"], 0)
    }
    kept["at"] = np.clip(arrays["at"], 0, 6)
    (expected,) = evaluate_float64(graph, kept)
    for target in (ALONE, IN_ORDER, SORTED):
        (found,) = run_on_host(schedule(graph, target=target), arrays)
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("name", ["rank 2", "last axis", "a batch", "middle, rank 2"])
def test_threads_share_the_updates(name: str) -> None:
    """No loop over updates is one thread's, whatever the axes are."""
    program = schedule(graph_of(name), target=GPU)
    adding = [k for k in program.distinct() if any(isinstance(s, Update) for s in walk(k.body))]
    assert adding
    for kernel in adding:
        assert not [
            s for s in walk(kernel.body) if isinstance(s, For) and s.role is Role.SEQUENTIAL
        ]
        assert all(s.shared for s in walk(kernel.body) if isinstance(s, Update))


@pytest.mark.parametrize("name", [n for n in CASES if n != "none"])
def test_sums_in_order_are_of_sorted_rows(name: str) -> None:
    """Any indices are one list along the first axis, so that rows are added run by run."""
    graph = expand(graph_of(name), SORTED)
    (scatter,) = [n for n in graph.nodes if n.op is SCATTER_ADD]
    assert scatter.attributes == ScatterAdd(0, scatter.types[0].shape[0])
    assert graph.nodes[scatter.operands[1].node].op is SORT


def test_few_updates_of_a_batch_stay_as_they_are() -> None:
    graph = expand(graph_of("a batch"), IN_ORDER)
    assert not [n for n in graph.nodes if n.op is SORT]


def adding(shared: bool, more: bool = False) -> Kernel:
    """Rows of two numbers added at indices; a read of the sums beside it if there is `more`."""
    i, c = Var("i", 9), Var("c", 2)
    at, row = Buffer("at", I32, 9), Index(((Data("d", 5), 2),)) + variable(c)
    x, y, z = Buffer("x", F32, 18), Buffer("y", F32, 10), Buffer("z", F32, 18)
    flat = variable(i) * 2 + variable(c)
    body: list[Any] = [
        Let("d", Load("at", variable(i), I32)),
        Update("y", row, Load("x", flat, F32), shared),
    ]
    if more:
        body.append(Store("z", flat, Load("y", row, F32)))
    loops = For(i, Role.PARALLEL, (For(c, Role.PARALLEL, tuple(body)),))
    return Kernel("adding", (at, x), (y, z) if more else (y,), (loops,))


def test_who_may_meet() -> None:
    verify(adding(True))
    for kernel in (adding(False), adding(True, more=True)):
        with pytest.raises(GraphError, match=r"iterations of i may meet in y"):
            verify(kernel)


def test_the_text_says_so() -> None:
    assert "+= x[2*i + c] in any order" in to_text(adding(True))


def fused() -> Graph:
    """Sums that a group of threads has in memory of its own, and goes on with."""

    def f(x: td.Tensor, at: td.Tensor) -> td.Tensor:
        sums = bind1(SCATTER_ADD, ScatterAdd(1, 8, 1), x, at)
        return sums / (1 + (sums * sums).sum((1, 2), keepdims=True))

    return td.trace(f, TensorType((700, 40, 8), F32), TensorType((700, 40), I32))


@needs_host
def test_sums_in_the_memory_of_a_group() -> None:
    """Packs are added to in global memory alone: the instruction has no other form."""
    graph, rng = fused(), np.random.default_rng(0)
    x = rng.standard_normal((700, 40, 8)).astype(np.float32)
    arrays = {"x": x, "at": rng.integers(0, 8, (700, 40)).astype(np.int32)}
    program = schedule(graph, target=ALONE)
    near = {b.name for k in program.distinct() for b in k.scratch}
    adds = [s for k in program.distinct() for s in walk(k.body) if isinstance(s, Update)]
    assert any(s.buffer in near and s.shared for s in adds), "the case has such sums"
    text = "\n".join(render_program(program).parts)
    assert not re.search(r"add_pack<\d+>\(s\d", text)
    (found,), (expected,) = run_on_host(program, arrays), evaluate_float64(graph, arrays)
    np.testing.assert_allclose(found, expected, atol=1e-5)
