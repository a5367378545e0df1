"""The CPU as a backend: kernels as LLVM IR, machine code in this process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import final

import numpy as np

from treadle.backends import compiled
from treadle.backends.protocol import Built
from treadle.backends.scheduling import scheduled
from treadle.backends.stored import packed_objects, unpacked_objects
from treadle.base.memory import refuse_beyond, shown
from treadle.codegen.llvm.driver import render_kernel, render_parts
from treadle.compile_report import CompileOptions, CompileReport, Profile
from treadle.ir.graph import Graph
from treadle.kernel import target as targets
from treadle.kernel.choices import Chosen, with_choices
from treadle.kernel.nodes import Kernel
from treadle.kernel.plan import Plan
from treadle.kernel.program import Program
from treadle.kernel.target import Target
from treadle.runtime.chain import Chain, Staged
from treadle.runtime.cpu.ceilings import ceilings
from treadle.runtime.cpu.chain import NativeChain
from treadle.runtime.cpu.native import (
    assembly,
    chosen_target,
    compile_objects,
    compiler_version,
    host,
)
from treadle.runtime.cpu.objects import is_object
from treadle.runtime.cpu.processors import default_threads
from treadle.runtime.cpu.program import NativeProgram
from treadle.runtime.cpu.targets import Target as Processor
from treadle.runtime.executable import Ceilings, Executable
from treadle.runtime.memory import HostMemory

Objects = tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class CpuToolchain:
    """LLVM for one processor."""

    processor: Processor
    chosen: Chosen = ()
    held: int = 0  # bytes beside a program, of which a memory budget is too
    damage: tuple[type[Exception], ...] = (RuntimeError, LookupError, ValueError, TypeError)
    languages: tuple[str, ...] = ("llvm", "assembly")

    @property
    def target(self) -> Target:
        return with_choices(targets.CPU, self.chosen)

    @property
    def title(self) -> str:
        processor = self.processor
        return f"{processor.name} ({processor.cpu}, {processor.width} lanes)"

    @property
    def machine(self) -> str:
        return f"cpu {host().cpu} {host().features}"

    @property
    def versions(self) -> tuple[str, ...]:
        processor = self.processor
        # Under a budget every thread's scratch counts.
        held = (f"{self.held} {default_threads()}",) if self.held else ()
        machine = str(processor.machine)
        return processor.cpu, processor.features, machine, compiler_version(), *held

    def schedule(self, graph: Graph, options: CompileOptions) -> Program:
        panel = 2 * self.processor.width  # columns of a matmul's panel: two vectors
        return scheduled(graph, options, self.target, panel, self.held, default_threads())

    def render(self, program: Program) -> list[str]:
        return render_parts(program, self.processor.machine)

    def compile(self, source: list[str]) -> Objects:
        return compile_objects(source, self.processor, default_threads())

    def load(self, graph: Graph, built: Built[Objects]) -> NativeProgram:
        threads, plan = default_threads(), built.plan
        outside = sum(s.nbytes for s in plan.slots if s.offset < 0)
        inside = plan.arena + plan.scratch * threads
        parts = f"{shown(outside)} of inputs, values and results, {shown(inside)} between them"
        refuse_beyond("compile", f"the program ({parts})", outside + inside)
        code, constants = built.code, built.constants
        return NativeProgram(graph, plan, code, constants, threads, self.processor, self.chosen)

    def pack(self, code: Objects, program: NativeProgram) -> dict[str, bytes]:
        return packed_objects(code)

    def unpack(self, parts: Mapping[str, bytes], plan: Plan) -> Objects | None:
        objects = unpacked_objects(parts)
        return objects if all(map(is_object, objects)) else None

    def tuned(self, chosen: Chosen) -> CpuToolchain:
        return replace(self, chosen=chosen)

    def as_for(self, program: NativeProgram) -> CpuToolchain:
        return CpuToolchain(program.target, program.chosen, program.plan.held)

    def beside(self, nbytes: int) -> CpuToolchain:
        return replace(self, held=nbytes)

    def text(self, kernel: Kernel, language: str) -> str:
        source = render_kernel(kernel, self.processor.machine)
        return assembly(source, self.processor) if language == "assembly" else source

    def ceilings(self) -> Ceilings:
        """Of one thread."""
        return ceilings()


class CpuChaining:
    """Steps as one native call, exchanges by MPI in it."""

    connecting = None

    def chained(
        self, chain: Chain, ranks: int, direct: object, staged: Staged | None
    ) -> NativeChain:
        return NativeChain(chain, ranks, staged)


@final
class CpuBackend:
    """The processor that this process runs on."""

    name = "cpu"
    memory = HostMemory("cpu")
    target = targets.CPU
    chaining = CpuChaining()

    def why_not(self) -> None:
        """It is always there."""

    def require(self) -> None:
        """It is always there."""

    def toolchain(self, options: CompileOptions) -> CpuToolchain:
        return CpuToolchain(chosen_target(options.target))

    def load(
        self, graph: Graph, report: CompileReport, options: CompileOptions, name: str
    ) -> Executable:
        return compiled.load(self.toolchain(options), graph, report, options, name)

    def profile(
        self, program: Executable, values: Mapping[str, np.ndarray], options: CompileOptions
    ) -> Profile:
        """One thread, processor time."""
        return compiled.profile(self.toolchain(options), program, values, options)


CPU = CpuBackend()
