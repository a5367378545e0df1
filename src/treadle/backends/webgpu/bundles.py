"""Graphs compiled for WebGPU as one record, without a device: what a page runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from treadle.backends.stages import build
from treadle.backends.webgpu.backend import WebGpuToolchain
from treadle.codegen.wgsl.bundle import Compiled, bundle
from treadle.compile_report import CompileOptions, CompileReport
from treadle.ir.graph import Graph
from treadle.kernel.target_webgpu import BASE, WebGpuLimits


def bundle_of(
    graphs: Mapping[str, Graph],
    options: CompileOptions | None = None,
    limits: WebGpuLimits = BASE,
) -> dict[str, Any]:
    """The record that `codegen/wgsl/bundle.py` describes, of programs by name."""
    toolchain, options = WebGpuToolchain(limits), options or CompileOptions()
    programs: dict[str, Compiled] = {}
    for name, graph in graphs.items():
        built = build(toolchain, graph, CompileReport("webgpu", "float32"), options)
        programs[name] = Compiled(graph, built.plan, built.constants, built.code)
    return bundle(programs, limits)
