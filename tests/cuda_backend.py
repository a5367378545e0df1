"""What the tests of the CUDA backend share: graphs compiled for a GPU, and why they cannot be."""

from __future__ import annotations

import functools
import importlib.util
from dataclasses import replace

import pytest

from treadle.base.errors import DeviceError
from treadle.codegen.cuda.driver import CudaSource, render_program
from treadle.ir.graph import Graph
from treadle.kernel.program import Program
from treadle.memory.assemble import assemble
from treadle.memory.plan import plan_buffers
from treadle.runtime.cuda.code import CudaCode
from treadle.runtime.cuda.compiler import Compiling, compiler_version
from treadle.runtime.cuda.device import device, why_not
from treadle.runtime.cuda.program import CudaProgram
from treadle.schedule.schedule import GPU, Target, schedule


@functools.cache
def no_compiler() -> str | None:
    """Why NVRTC cannot be used; None where it can."""
    if importlib.util.find_spec("cuda") is None:
        return "cuda-bindings is not installed"
    try:
        compiler_version()
    except DeviceError as error:
        return error.cause
    return None


# Every kernel is a launch of its own, however small the program is.
assert GPU.mapping is not None
ALONE = replace(GPU, mapping=replace(GPU.mapping, is_cooperative=False))

IN_ORDER = ALONE.in_order()  # and sums have one order

needs_gpu = pytest.mark.skipif(why_not() is not None, reason=f"no GPU: {why_not()}")
needs_compiler = pytest.mark.skipif(no_compiler() is not None, reason=f"{no_compiler()}")


# Programs of kernels that are too much for a cooperative launch: their phases are one launch each.
JOINT = replace(GPU, mapping=replace(GPU.mapping, light=0))


def scheduled(
    graph: Graph, fuse: bool = True, in_place: bool = False, target: Target = ALONE
) -> Program:
    return schedule(graph, fuse, in_place=in_place, target=target)


def with_matmuls(target: Target, library: bool) -> Target:
    """The target with standalone matmuls from a library, or as kernels of our own."""
    assert target.mapping is not None
    return replace(target, mapping=replace(target.mapping, has_matmul=library))


def rendered(graph: Graph, fuse: bool = True, library: bool = True) -> CudaSource:
    return render_program(scheduled(graph, fuse, target=with_matmuls(ALONE, library)))


def on_gpu(
    graph: Graph,
    fuse: bool = True,
    in_place: bool = False,
    library: bool = True,
    target: Target = GPU,
) -> CudaProgram:
    """A graph on the device; `library=False` has generated kernels for products too."""
    program = scheduled(graph, fuse, in_place, with_matmuls(target, library))
    source = render_program(program)
    cubins = Compiling(source.parts, device().architecture)
    plan = assemble(program, plan_buffers(program))
    code = CudaCode(source.launches, source.cooperative, cubins)
    return CudaProgram(graph, plan, dict(program.constants), code)


def ptx_of(text: str) -> str:
    """The instructions of a source, before they are a chip's."""
    from cuda.bindings import nvrtc

    _, program = nvrtc.nvrtcCreateProgram(text.encode(), b"treadle.cu", 0, [], [])
    options = [b"-arch=compute_90a", b"-std=c++17", b"-w"]
    assert not int(nvrtc.nvrtcCompileProgram(program, len(options), options)[0])
    _, size = nvrtc.nvrtcGetPTXSize(program)
    found = bytearray(size)
    nvrtc.nvrtcGetPTX(program, found)
    return bytes(found).decode()
