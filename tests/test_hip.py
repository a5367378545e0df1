"""HIP C++ from the kernels that CUDA text is printed from, for warps of 32 and of 64 threads."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

import treadle as td
from backend import assert_within, draw
from test_kernels import run as interpreted
from test_mapping import columns, contraction, norm_gradients, rows, scattered
from treadle.base import dtypes
from treadle.codegen.hip.driver import render_kernel, render_program
from treadle.ir.types import TensorType
from treadle.kernel.mapped import geometry_of
from treadle.kernel.target import AMD, Target
from treadle.kernel.verify import verify
from treadle.schedule.schedule import schedule

NARROW = replace(AMD, mapping=replace(AMD.mapping, warp=32))
TARGETS = {64: AMD, 32: NARROW}
CASES = [(rows, (16, 128)), (columns, (256, 64)), (contraction, (24, 40)), (scattered, (96, 64))]
LARGE = [*CASES, (norm_gradients, (1024, 256))]
# What only NVIDIA's compiler reads.
FOREIGN = (
    r"\basm\b",
    r"__\w+_sync\(",
    r"__grid_constant__",
    r"__CUDA_ARCH__",
    r"__isGlobal",
    r"& 31\b",
)


def alone(target: Target) -> Target:
    return replace(target, mapping=replace(target.mapping, is_cooperative=False))


@pytest.mark.parametrize("warp", TARGETS)
@pytest.mark.parametrize(("function", "shape"), LARGE)
@pytest.mark.parametrize("dtype", [dtypes.float32, dtypes.bfloat16], ids=str)
def test_text(function, shape: tuple[int, int], dtype, warp: int) -> None:
    graph = td.trace(function, *[TensorType(shape, dtype)] * 2)
    for target in (TARGETS[warp], alone(TARGETS[warp])):
        program = schedule(graph, target=target)
        source = render_program(program)
        for part in source.parts:
            assert part.count("{") == part.count("}")
            assert f"#define WARP {warp}" in part
            for pattern in FOREIGN:
                assert not re.search(pattern, part), pattern
        for kernel in program.distinct():
            verify(kernel, target.mapping)
            if kernel.geometry is not None:
                assert "__global__" in render_kernel(kernel)
                assert geometry_of(kernel).warp == warp


@pytest.mark.parametrize(("function", "shape"), CASES)
def test_warps_of_64_threads_compute_the_same(function, shape: tuple[int, int]) -> None:
    graph = td.trace(function, *[TensorType(shape, dtypes.float32)] * 2)
    arrays = draw(graph, 3)
    program = schedule(graph, target=alone(AMD))
    assert_within(graph, arrays, interpreted(program, arrays), 8.0)


@pytest.mark.skipif(shutil.which("hipcc") is None, reason="hipcc is not installed")
@pytest.mark.parametrize(("function", "shape"), LARGE)
def test_text_compiles(function, shape: tuple[int, int], tmp_path: Path) -> None:
    graph = td.trace(function, *[TensorType(shape, dtypes.float32)] * 2)
    for i, part in enumerate(render_program(schedule(graph, target=AMD)).parts):
        path = tmp_path / f"part{i}.hip"
        path.write_text(part)
        command = ["hipcc", "--offload-arch=gfx90a", "-c", "-o", str(path.with_suffix(".o"))]
        done = subprocess.run([*command, str(path)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[:2000]
