"""What the tests of the WebGPU backend share: graphs on an adapter, and why they cannot be."""

from __future__ import annotations

import functools
import importlib.util

import pytest

from treadle.backends.webgpu.backend import in_words
from treadle.backends.webgpu.wide import refuse_wide
from treadle.base.errors import DeviceError
from treadle.codegen.wgsl.driver import render_program
from treadle.ir.graph import Graph
from treadle.kernel.program import Program
from treadle.kernel.shaders import Shader
from treadle.kernel.target_webgpu import BASE, WebGpuLimits, target_of
from treadle.memory.assemble import assemble
from treadle.memory.plan import plan_buffers
from treadle.runtime.webgpu.device import device, why_not
from treadle.runtime.webgpu.program import WebGpuProgram
from treadle.schedule.schedule import schedule


@functools.cache
def no_adapter() -> str | None:
    """Why no shader can be run; None where one can."""
    if importlib.util.find_spec("wgpu") is None:
        return "wgpu is not installed"
    try:
        return why_not()
    except (DeviceError, RuntimeError) as error:
        return str(error)


needs_adapter = pytest.mark.skipif(no_adapter() is not None, reason=f"no adapter: {no_adapter()}")


def scheduled(
    graph: Graph, fuse: bool = True, in_place: bool = False, limits: WebGpuLimits = BASE
) -> Program:
    refuse_wide(graph)
    program = schedule(graph, fuse, in_place=in_place, target=target_of(limits))
    return in_words(program, limits.has_f16)


def rendered(graph: Graph, limits: WebGpuLimits = BASE) -> tuple[Shader, ...]:
    return render_program(scheduled(graph, limits=limits), limits.has_f16)


def on_adapter(
    graph: Graph, fuse: bool = True, in_place: bool = False, limits: WebGpuLimits | None = None
) -> WebGpuProgram:
    """A graph on the device; with limits that are less than the adapter's."""
    limits = limits or BASE
    program = scheduled(graph, fuse, in_place, limits)
    plan = assemble(program, plan_buffers(program))
    shaders, constants = render_program(program, limits.has_f16), dict(program.constants)
    return WebGpuProgram(graph, plan, constants, shaders, halves=limits.has_f16)


__all__ = ["device", "needs_adapter", "no_adapter", "on_adapter", "rendered", "scheduled"]
