"""WebGPU as a backend: kernels as WGSL, run by the adapter that wgpu finds."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import final

import numpy as np

from treadle.backends import compiled
from treadle.backends.protocol import Built
from treadle.backends.scheduling import scheduled
from treadle.backends.webgpu.wide import refuse_wide
from treadle.base import dtypes
from treadle.base.errors import DeviceError
from treadle.base.words import WORD, as_words
from treadle.codegen.wgsl.driver import render_kernel, render_program
from treadle.compile_report import CompileOptions, CompileReport, Profile
from treadle.ir.graph import Graph
from treadle.kernel.choices import KEEP_ALL, Chosen, with_choices
from treadle.kernel.nodes import Kernel
from treadle.kernel.plan import Plan
from treadle.kernel.program import Program
from treadle.kernel.shaders import Shader
from treadle.kernel.target import Target
from treadle.kernel.target_webgpu import BASE, WebGpuLimits, asked_of, target_of
from treadle.runtime.executable import Ceilings, Executable
from treadle.runtime.memory import DeviceMemory
from treadle.runtime.webgpu.device import device, why_not
from treadle.runtime.webgpu.program import WebGpuProgram
from treadle.runtime.webgpu.rates import ceilings
from treadle.runtime.webgpu.values import DeviceValues

Shaders = tuple[Shader, ...]


def in_words(program: Program, halves: bool = False) -> Program:
    """The program with every element of its buffers in a word of four bytes, or float16 in two."""
    buffers = tuple(
        # As large as the type says, where that is more: plans are checked for it.
        b
        if halves and b.dtype is dtypes.float16
        else replace(b, dtype=dtypes.uint32, size=b.held(WORD) // WORD)
        for b in program.buffers
    )
    constants = tuple((name, as_words(array, halves)) for name, array in program.constants)
    return replace(program, buffers=buffers, constants=constants)


@dataclass(frozen=True, slots=True)
class WebGpuToolchain:
    """Shaders for what an adapter allows."""

    limits: WebGpuLimits = BASE
    chosen: Chosen = ()
    held: int = 0  # bytes beside a program, of which a memory budget is too
    damage: tuple[type[Exception], ...] = (LookupError, ValueError, TypeError)
    languages: tuple[str, ...] = ("wgsl",)

    @property
    def target(self) -> Target:
        return with_choices(target_of(self.limits), self.chosen)

    @property
    def title(self) -> str:
        return self.limits.name

    @property
    def machine(self) -> str:
        return f"webgpu {device().name}"

    @property
    def versions(self) -> tuple[str, ...]:
        return repr(self.limits), str(self.held)

    def schedule(self, graph: Graph, options: CompileOptions) -> Program:
        refuse_wide(graph)
        target = self.target if options.recompute else with_choices(self.target, KEEP_ALL)
        return in_words(scheduled(graph, options, target, held=self.held), self.limits.has_f16)

    def render(self, program: Program) -> Shaders:
        return render_program(program, self.limits.has_f16)

    def compile(self, source: Shaders) -> Shaders:
        """The device's driver compiles when the program is bound to memory."""
        return source

    def load(self, graph: Graph, built: Built[Shaders]) -> WebGpuProgram:
        code, halves = built.code, self.limits.has_f16
        return WebGpuProgram(graph, built.plan, built.constants, code, self.chosen, halves)

    def pack(self, code: Shaders, program: WebGpuProgram) -> dict[str, bytes]:
        rows = [[s.text, s.blocks, s.buffers, s.calls, s.elements] for s in code]
        return {"shaders": json.dumps(rows).encode()}

    def unpack(self, parts: Mapping[str, bytes], plan: Plan) -> Shaders | None:
        found = tuple(
            Shader(str(text), int(blocks), int(buffers), int(calls), tuple(map(str, elements)))
            for text, blocks, buffers, calls, elements in json.loads(parts["shaders"])
        )
        return found if len(found) == len(plan.entries) else None

    def tuned(self, chosen: Chosen) -> WebGpuToolchain:
        return replace(self, chosen=chosen)

    def as_for(self, program: WebGpuProgram) -> WebGpuToolchain:
        return replace(self, chosen=program.chosen, held=program.plan.held)

    def beside(self, nbytes: int) -> WebGpuToolchain:
        return replace(self, held=nbytes)

    def text(self, kernel: Kernel, language: str) -> str:
        return render_kernel(kernel)

    def ceilings(self) -> Ceilings:
        return ceilings()


@final
class WebGpuBackend:
    """The best adapter of this machine."""

    name = "webgpu"
    memory = DeviceMemory("webgpu", DeviceValues)
    target = target_of(BASE)
    chaining = None

    def why_not(self) -> str | None:
        return why_not()

    def require(self) -> None:
        cause = why_not()
        if cause is not None:
            raise DeviceError("device", f"webgpu: {cause}", 'Use device="cpu".')

    def toolchain(self, options: CompileOptions) -> WebGpuToolchain:
        """For the adapter that is there; for every one where there is none."""
        limits = device().limits if why_not() is None else BASE
        return WebGpuToolchain(asked_of(limits, options.target))

    def load(
        self, graph: Graph, report: CompileReport, options: CompileOptions, name: str
    ) -> Executable:
        return compiled.load(self.toolchain(options), graph, report, options, name)

    def profile(
        self, program: Executable, values: Mapping[str, np.ndarray], options: CompileOptions
    ) -> Profile:
        """By timestamps of the device."""
        return compiled.profile(self.toolchain(options), program, values, options)


WEBGPU = WebGpuBackend()
