"""NVIDIA GPUs as a backend: kernels as CUDA C++, compiled by NVRTC for the device at hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import final

import numpy as np

from treadle.backends import compiled
from treadle.backends.cuda.attested import with_attested
from treadle.backends.cuda.stored import packed_code, unpacked_code
from treadle.backends.protocol import Built, RescheduleError
from treadle.backends.scheduling import scheduled
from treadle.codegen.cuda.driver import CudaSource, render_kernel, render_program
from treadle.compile_report import CompileOptions, CompileReport, Profile
from treadle.ir.graph import Graph
from treadle.kernel import target as targets
from treadle.kernel.choices import KEEP_ALL, Chosen, with_choices
from treadle.kernel.launch import FLOAT8, FLOAT8_EPILOGUE
from treadle.kernel.nodes import Kernel
from treadle.kernel.plan import Plan
from treadle.kernel.program import Program
from treadle.kernel.target import Target
from treadle.runtime.chain import Chain, Staged
from treadle.runtime.cuda import nccl
from treadle.runtime.cuda.arrays import found as found_on_device
from treadle.runtime.cuda.blas import blas_version
from treadle.runtime.cuda.calls import LibraryCalls
from treadle.runtime.cuda.chain import CudaChain
from treadle.runtime.cuda.code import CudaCode
from treadle.runtime.cuda.compiler import Compiling, compiler_version
from treadle.runtime.cuda.conv import NoLibraryCallError
from treadle.runtime.cuda.device import FLOAT8_CHIP, WARPGROUP_CHIP, device, why_not
from treadle.runtime.cuda.dnn import dnn_version, has_dnn
from treadle.runtime.cuda.profile import ceilings
from treadle.runtime.cuda.program import CudaProgram
from treadle.runtime.cuda.ready import begin_dnn, begin_libraries
from treadle.runtime.cuda.values import DeviceValues
from treadle.runtime.cuda.workers import begin_workers
from treadle.runtime.executable import Ceilings, Executable
from treadle.runtime.memory import DeviceMemory
from treadle.schedule.templates import CONVOLUTIONS, LibraryCallKey, conv_of


@dataclass(frozen=True, slots=True)
class CudaToolchain:
    """NVRTC and the libraries that are installed, for the device of this process.

    `without` are library calls that turned out not to exist: they are computed as defined.
    """

    is_deterministic: bool = False
    without: frozenset[LibraryCallKey] = frozenset()
    chosen: Chosen = ()
    held: int = 0  # bytes beside a program, of which a memory budget is too
    contracts: bool = True  # whether the compiler may round a product and a sum once
    is_for_loading: bool = True  # what it schedules is loaded afterwards
    title: str = ""
    damage: tuple[type[Exception], ...] = (LookupError, ValueError, TypeError, RescheduleError)
    languages: tuple[str, ...] = ("cuda",)

    @property
    def target(self) -> Target:
        """What the device and the libraries that are installed can do."""
        has, mapping = has_dnn(), targets.GPU.mapping
        assert mapping is not None
        matmuls = targets.GPU.matmuls
        if why_not() is None:  # devices differ: 99 KB a block on 8.6 and 8.9, 227 on 9.0
            mapping = mapping.within(device().most_shared)
            refused = {name for name, *_ in self.without}
            matmuls = replace(
                matmuls,
                has_float8=device().chip >= FLOAT8_CHIP and FLOAT8 not in refused,
                scales_float8=FLOAT8_EPILOGUE not in refused,
                finishes=device().chip == WARPGROUP_CHIP,
            )
        found = replace(
            targets.GPU,
            has_attention=has,
            has_conv=has,
            without=self.without,
            mapping=mapping,
            matmuls=matmuls,
        )
        return with_choices(found.in_order() if self.is_deterministic else found, self.chosen)

    @property
    def machine(self) -> str:
        return f"cuda {device().name}"

    @property
    def versions(self) -> tuple[str, ...]:
        here = device()
        libraries = f"{compiler_version()} {blas_version()} {dnn_version()}"
        return here.name, here.architecture, str(here.most_shared), libraries, str(self.held)

    def schedule(self, graph: Graph, options: CompileOptions) -> Program:
        target = self.target if options.recompute else with_choices(self.target, KEEP_ALL)
        if self.is_for_loading and target.has_conv and _calls_dnn(graph):
            begin_dnn()
            begin_workers(_workers_for(graph))
        return scheduled(graph, options, target, held=self.held)

    def render(self, program: Program) -> CudaSource:
        return render_program(program)

    def compile(self, source: CudaSource) -> CudaCode:
        """Begun: the compiler and cuDNN work while memory is planned and matmuls are chosen."""
        cubins = Compiling(source.parts, device().architecture, self.contracts)
        device().enter()
        calls = LibraryCalls(source.launches, {}, self.is_deterministic)
        without = self.without
        return CudaCode(source.launches, source.cooperative, cubins, without=without, calls=calls)

    def load(self, graph: Graph, built: Built[CudaCode]) -> CudaProgram:
        try:
            return CudaProgram(
                graph,
                built.plan,
                built.constants,
                built.code,
                self.is_deterministic,
                self.chosen,
            )
        except NoLibraryCallError as missing:
            raise self._after(missing) from missing

    def _after(self, missing: NoLibraryCallError) -> Exception:
        """The toolchain that knows of the calls which a library has not."""
        causes = dict[LibraryCallKey, str]()
        for call, said in missing.causes:
            operands = tuple((t.shape, t.dtype) for t in call.operands)
            shapes = ", ".join(f"{t.dtype}{list(t.shape)}" for t in call.operands)
            told = said.partition("\n")[0]
            causes.setdefault((call.name, operands, call.numbers), f"{told}, of {shapes}")
        if causes.keys() <= self.without:
            return missing  # they were scheduled all the same: once more would not end
        without = replace(self, without=self.without | causes.keys())
        return RescheduleError(without, *causes.values())

    def pack(self, code: CudaCode, program: CudaProgram) -> dict[str, bytes]:
        """With the algorithms that loading chose."""
        chosen = replace(code, algorithms=program.algorithms, call_plans=program.call_plans)
        return packed_code(chosen)

    def unpack(self, parts: Mapping[str, bytes], plan: Plan) -> CudaCode | None:
        return unpacked_code(parts, plan)

    def tuned(self, chosen: Chosen) -> CudaToolchain:
        return replace(self, chosen=chosen)

    def as_for(self, program: CudaProgram) -> CudaToolchain:
        made = replace(self, without=program.without, chosen=program.chosen)
        return replace(made, held=program.plan.held, is_for_loading=False)

    def beside(self, nbytes: int) -> CudaToolchain:
        return replace(self, held=nbytes)

    def text(self, kernel: Kernel, language: str) -> str:
        return render_kernel(kernel)

    def ceilings(self) -> Ceilings:
        """Of the device's memory."""
        return ceilings()


# For a report: nothing else would tell why a step is several times slower than it could be.
NO_DNN = (
    "attention, convolutions: cuDNN or its frontend cannot be loaded; install treadle[cuda], or "
    "nvidia-cudnn-cu13 and nvidia-cudnn-frontend"
)


def _calls_dnn(graph: Graph) -> bool:
    return any(node.op in CONVOLUTIONS or "attention" in node.op.name for node in graph.nodes)


def _workers_for(graph: Graph) -> int:
    """How many processes pay that plan its grouped convolutions."""
    sizes, grouped = targets.GPU.launching, set[object]()
    for node in graph.nodes:
        if node.op in CONVOLUTIONS and conv_of(node).groups > 1:
            types = tuple(graph.type_of(v) for v in node.operands)
            grouped.add((node.op, node.attributes, types))
    return min(sizes.plan_workers, len(grouped) // sizes.worker_plans)


class NcclConnecting:
    """GPUs that exchange by NCCL."""

    def where(self) -> str:
        return device().place

    def why_not_direct(self) -> str | None:
        return nccl.why_not()

    def direct_name(self) -> str:
        return f"NCCL {nccl.shown_version()}"

    def new_identity(self) -> bytes:
        return nccl.new_id()

    def direct(self, identity: bytes, rank: int, size: int) -> nccl.NcclCommunicator:
        return nccl.NcclCommunicator(identity, rank, size)


class CudaChaining:
    """Steps as one captured graph, exchanges by NCCL in it or staged on the host."""

    connecting = NcclConnecting()

    def chained(
        self,
        chain: Chain,
        ranks: int,
        direct: nccl.NcclCommunicator | None,
        staged: Staged | None,
    ) -> CudaChain:
        return CudaChain(chain, ranks, direct, staged)


@final
class CudaBackend:
    """The NVIDIA GPU of this process: the first, or a launcher's processes take them in turn."""

    name = "cuda"
    memory = DeviceMemory("cuda", DeviceValues, found_on_device)
    chaining = CudaChaining()
    target = targets.GPU

    def why_not(self) -> str | None:
        return why_not()

    def require(self) -> None:
        device()
        begin_libraries()

    def toolchain(self, options: CompileOptions) -> CudaToolchain:
        return CudaToolchain(options.deterministic, contracts=options.numerics != "strict")

    def load(
        self, graph: Graph, report: CompileReport, options: CompileOptions, name: str
    ) -> Executable:
        if _calls_dnn(graph) and not has_dnn() and NO_DNN not in report.refused:
            report.refused.append(NO_DNN)
        program = compiled.load(self.toolchain(options), graph, report, options, name)
        if options.verify == "full":
            found = compiled.compiled_part(program)
            assert isinstance(found, CudaProgram)
            with report.stage("verify"):
                report.claims[:] = with_attested(report.claims, found)
        return program

    def profile(
        self, program: Executable, values: Mapping[str, np.ndarray], options: CompileOptions
    ) -> Profile:
        """Time on the device, between events around each launch."""
        return compiled.profile(self.toolchain(options), program, values, options)


CUDA = CudaBackend()
