"""Running sums along any axis of any length, by blocks and shared by groups of threads."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import treadle as td
from cuda_backend import ALONE
from cuda_on_host import no_host_compiler, run_on_host
from test_kernels import run as interpreted
from treadle.base.dtypes import DType
from treadle.domains.float64 import evaluate_float64
from treadle.frontend.scopes import bind1
from treadle.ir.graph import Graph
from treadle.ir.ops.reductions import CUMSUM, Cumulate
from treadle.kernel.nodes import For, Role
from treadle.kernel.target import GPU, Target
from treadle.kernel.target_webgpu import BASE, target_of
from treadle.kernel.traverse import walk
from treadle.kernel.verify import verify
from treadle.schedule.schedule import schedule

needs_host = pytest.mark.skipif(no_host_compiler() is not None, reason=f"{no_host_compiler()}")
CASES = {
    "one row": ((1000,), 0),
    "rows": ((7, 300), 1),
    "short rows": ((70, 12), 1),
    "columns": ((130, 9), 0),
    "between": ((3, 65, 5), 1),
    "one": ((1,), 0),
    "none": ((3, 0, 2), 1),
    "long columns": ((1200, 3), 0),
}


def small_blocks(target: Target, row: int = 64) -> Target:
    row = row if target.rewriting.scanned_row else 0
    rewriting = replace(target.rewriting, scan_parts=32, least_scan_block=4, scanned_row=row)
    return replace(target, rewriting=rewriting)


TARGETS = {
    "small": GPU,
    "launches": ALONE,
    "blocks": small_blocks(GPU),
    "blocks, launches": small_blocks(ALONE),
    "webgpu": small_blocks(target_of(BASE)),
}


def graph_of(name: str, reverse: bool = False, dtype: DType = td.float32) -> Graph:
    shape, axis = CASES[name]

    def f(x: td.Tensor) -> td.Tensor:
        return bind1(CUMSUM, Cumulate(axis, reverse), x + 1) * 2

    return td.trace(f, td.Spec(shape, dtype))


def given(name: str, dtype: DType = td.float32) -> dict[str, np.ndarray]:
    x = np.random.default_rng(3).integers(-4, 5, CASES[name][0])
    return {"x": x.astype(dtype.numpy)}


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
@pytest.mark.parametrize("name", CASES)
def test_every_axis(name: str, target: Target, reverse: bool) -> None:
    graph = graph_of(name, reverse)
    program = schedule(graph, target=target)
    for kernel in program.distinct():
        verify(kernel, target.mapping)
    (found,), (expected,) = interpreted(program, given(name)), evaluate_float64(graph, given(name))
    np.testing.assert_array_equal(found, expected)


@needs_host
@pytest.mark.parametrize("target", ["launches", "blocks", "blocks, launches"])
@pytest.mark.parametrize("name", CASES)
def test_the_text(name: str, target: str) -> None:
    for reverse in (False, True):
        graph = graph_of(name, reverse)
        (found,) = run_on_host(schedule(graph, target=TARGETS[target]), given(name))
        np.testing.assert_array_equal(found, evaluate_float64(graph, given(name))[0])


@pytest.mark.parametrize("dtype", [td.bfloat16, td.int32, td.int8, td.float64], ids=str)
@pytest.mark.parametrize("name", ["one row", "columns"])
def test_every_kind_of_number(name: str, dtype: DType) -> None:
    graph, arrays = graph_of(name, False, dtype), given(name, dtype)
    (found,) = interpreted(schedule(graph, target=TARGETS["blocks, launches"]), arrays)
    (expected,) = interpreted(schedule(graph), arrays)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    "shape", [(1 << 20,), (1 << 24,), (16384, 8), (1024, 1024, 16), (64, 65536)]
)
def test_no_thread_goes_far(shape: tuple[int, ...]) -> None:
    """The longest loop in order of any thread is short, however long the axis is."""
    axis = 1 if len(shape) > 2 or shape[0] == 64 else 0
    graph = td.trace(lambda x: bind1(CUMSUM, Cumulate(axis), x), td.Spec(shape))
    for kernel in schedule(graph, target=GPU).distinct():
        loops = [s for s in walk(kernel.body) if isinstance(s, For)]
        assert all(s.var.extent <= 256 for s in loops if s.role is Role.SEQUENTIAL)
