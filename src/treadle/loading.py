"""The last stages: schedule → plan_buffers → render → load, or at once from the plan cache."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from treadle.base.memory import refuse_beyond, shown
from treadle.base.version import __version__
from treadle.codegen.cuda.driver import render_kernel as render_cuda_kernel
from treadle.codegen.cuda.driver import render_program as render_cuda
from treadle.codegen.llvm.driver import render_kernel, render_program
from treadle.compile_report import (
    CompileOptions,
    CompileReport,
    KernelTime,
    Profile,
    ProgramFacts,
)
from treadle.ir.graph import Graph
from treadle.ir.text import to_text
from treadle.kernel.fitting import fits
from treadle.kernel.launch import (
    Bundle,
    Launch,
    bundles_from_json,
    bundles_to_json,
    launches_from_json,
    launches_to_json,
)
from treadle.kernel.nodes import Kernel
from treadle.kernel.plan import KernelFacts, Plan, plan_from_json
from treadle.kernel.program import Program
from treadle.kernel.text import to_text as kernel_text
from treadle.memory.assemble import assemble
from treadle.memory.plan import plan_buffers
from treadle.runtime.cache import fingerprint, plan_cache
from treadle.runtime.ceilings import ceilings
from treadle.runtime.checked import CheckedProgram
from treadle.runtime.cpu import NativeProgram
from treadle.runtime.cuda.blas import blas_version
from treadle.runtime.cuda.compiler import compile_parts, is_cubin
from treadle.runtime.cuda.compiler import compiler_version as nvrtc_version
from treadle.runtime.cuda.conv import NoRoutineError
from treadle.runtime.cuda.device import device as gpu
from treadle.runtime.cuda.dnn import dnn_version, has_dnn
from treadle.runtime.cuda.program import CudaProgram
from treadle.runtime.executable import Executable
from treadle.runtime.native import (
    assembly,
    chosen_target,
    compile_object,
    compiler_version,
    host,
)
from treadle.runtime.objects import is_object
from treadle.runtime.oracle import OracleProgram
from treadle.runtime.processors import default_threads
from treadle.runtime.targets import Target as Processor
from treadle.schedule.channels import Routine
from treadle.schedule.checks import with_index_checks
from treadle.schedule.schedule import GPU, Target, schedule


def load(
    graph: Graph, report: CompileReport, options: CompileOptions, name: str = "step"
) -> Executable:
    """A graph ready to run on the report's device."""
    if report.device == "oracle":
        _refuse_beyond(graph)
        return OracleProgram(graph)
    build = _on_gpu if report.device == "cuda" else _native
    if options.debug:
        checked, checks = with_index_checks(graph)
        return CheckedProgram(graph, build(checked, report, options, name), checks)
    return build(graph, report, options, name)


def _refuse_beyond(graph: Graph) -> None:
    """The oracle holds every value of a graph while it needs it, the largest at least."""
    for node in graph.nodes:
        for type_ in node.types:
            origin = f" of {node.origin}" if node.origin else ""
            refuse_beyond("compile", f"{node.op} {type_}{origin}", type_.nbytes)


@dataclass(frozen=True, slots=True)
class Built:
    """Everything that a native program is made of."""

    plan: Plan
    objects: tuple[bytes, ...]
    constants: Mapping[str, np.ndarray]


def _native(
    graph: Graph, report: CompileReport, options: CompileOptions, name: str
) -> NativeProgram:
    target = chosen_target(options.target)
    report.target = f"{target.name} ({target.cpu}, {target.width} lanes)"
    cache = plan_cache()
    key = None if cache is None else _key(graph, options, target)
    found, native = None, None
    if cache is not None and key is not None:
        with report.stage("cache"):
            found = _unpacked(cache.get(key), graph)
        native = None if found is None else _loaded_again(graph, found, report, target)
    is_hit = native is not None
    if found is None or native is None:
        found = _build(graph, report, options, target)
        native = _loaded(graph, found, report, target)
        if cache is not None and key is not None:
            with report.stage("cache"):
                cache.put(key, _packed(found))
    report.programs.append(_facts(name, found, native.threads, is_hit))
    return native


def _loaded(graph: Graph, built: Built, report: CompileReport, target: Processor) -> NativeProgram:
    with report.stage("load"):
        threads = default_threads()
        plan = built.plan
        outside = sum(s.nbytes for s in plan.slots if s.offset < 0)
        inside = plan.arena + plan.scratch * threads
        parts = f"{shown(outside)} of inputs, values and results, {shown(inside)} between them"
        refuse_beyond("compile", f"the program ({parts})", outside + inside)
        return NativeProgram(graph, built.plan, built.objects, built.constants, threads, target)


def _loaded_again(
    graph: Graph, built: Built, report: CompileReport, target: Processor
) -> NativeProgram | None:
    """What the cache gave, loaded; None where it is not what was put there: it is built again."""
    try:
        return _loaded(graph, built, report, target)
    except (RuntimeError, LookupError, ValueError, TypeError):
        return None


def _scheduled(graph: Graph, options: CompileOptions, target: Processor) -> Program:
    return schedule(graph, options.optimize, 2 * target.width, in_place=not options.debug)


def _scheduled_for_gpu(graph: Graph, options: CompileOptions, target: Target) -> Program:
    return schedule(graph, options.optimize, in_place=not options.debug, target=target)


def _build(
    graph: Graph, report: CompileReport, options: CompileOptions, target: Processor
) -> Built:
    with report.stage("schedule"):
        program = _scheduled(graph, options, target)
    with report.stage("plan_buffers"):
        plan = assemble(program, plan_buffers(program))
    with report.stage("render"):
        source = render_program(program, target.machine)
    with report.stage("compile"):
        objects = (compile_object(source, target),)
    return Built(plan, objects, dict(program.constants))


def _facts(name: str, built: Built, threads: int, is_hit: bool) -> ProgramFacts:
    plan = built.plan
    outside = sum(a.nbytes for a in built.constants.values())
    outside += sum(o.type.nbytes for o in plan.outputs if o.name not in plan.updated)
    return ProgramFacts(name, plan.kernels, plan.arena, plan.scratch * threads, outside, is_hit)


# GPUs


@dataclass(frozen=True, slots=True)
class BuiltForGpu:
    """Everything that a GPU's program is made of."""

    plan: Plan
    launches: tuple[Launch, ...]
    cubins: tuple[bytes, ...]
    constants: Mapping[str, np.ndarray]
    algorithms: Mapping[str, list[int]]
    routines: Mapping[int, bytes]  # plans of a library, by entry
    bundles: tuple[Bundle, ...] = ()
    without: frozenset[Routine] = frozenset()  # what the library has not


def _on_gpu(graph: Graph, report: CompileReport, options: CompileOptions, name: str) -> CudaProgram:
    cache = plan_cache()
    key = None if cache is None else _gpu_key(graph, options)
    found, program = None, None
    if cache is not None and key is not None:
        with report.stage("cache"):
            found = _unpacked_for_gpu(cache.get(key), graph)
        if found is not None:
            program = _on_device(graph, found, report, options, again=True)
            if program is not None:
                program.without = found.without
    is_hit = program is not None
    if found is None or program is None:
        found, program = _built_on_device(graph, report, options)
        if cache is not None and key is not None:
            with report.stage("cache"):
                cache.put(key, _packed_for_gpu(found))
    built = Built(found.plan, found.cubins, found.constants)
    facts = replace(_facts(name, built, 0, is_hit), scratch=program.workspace)
    report.programs.append(facts)
    return program


def _built_on_device(
    graph: Graph, report: CompileReport, options: CompileOptions
) -> tuple[BuiltForGpu, CudaProgram]:
    """What a library turns out not to have is scheduled again, as its definition says."""
    without: frozenset[Routine] = frozenset()
    while True:
        built = _build_for_gpu(graph, report, options, without)
        try:
            program = _on_device(graph, built, report, options)
        except NoRoutineError as missing:
            call = missing.call
            operands = tuple((t.shape, t.dtype) for t in call.operands)
            routine = (call.name, operands, call.numbers)
            if routine in without:
                raise  # it was scheduled all the same: once more would not end
            without = without | {routine}
            continue
        assert program is not None
        program.without = without
        chosen = replace(built, algorithms=program.algorithms, routines=program.routines)
        return chosen, program


def _on_device(
    graph: Graph,
    built: BuiltForGpu,
    report: CompileReport,
    options: CompileOptions,
    again: bool = False,
) -> CudaProgram | None:
    """The program on the device; None where what a cache gave cannot be loaded."""
    with report.stage("load"):
        try:
            return CudaProgram(
                graph,
                built.plan,
                built.launches,
                built.cubins,
                built.constants,
                dict(built.algorithms),
                built.routines,
                options.deterministic,
                built.bundles,
            )
        except (LookupError, ValueError, TypeError, NoRoutineError):
            if again:
                return None
            raise


def _build_for_gpu(
    graph: Graph, report: CompileReport, options: CompileOptions, without: frozenset[Routine]
) -> BuiltForGpu:
    with report.stage("schedule"):
        program = _scheduled_for_gpu(graph, options, _gpu_target(without))
    with report.stage("plan_buffers"):
        plan = assemble(program, plan_buffers(program))
    with report.stage("render"):
        source = render_cuda(program)
    with report.stage("compile"):
        cubins = compile_parts(source.parts, gpu().architecture)
    constants = dict(program.constants)
    return BuiltForGpu(plan, source.launches, cubins, constants, {}, {}, source.bundles, without)


def _gpu_target(without: frozenset[Routine] = frozenset()) -> Target:
    """What the device and the libraries that are installed can do."""
    return replace(GPU, has_attention=has_dnn(), has_conv=has_dnn(), without=without)


def _gpu_key(graph: Graph, options: CompileOptions) -> str:
    """A hash of all that the code and the choice of algorithms depend on."""
    target = gpu()
    how = f"optimize={options.optimize} debug={options.debug} exact={options.deterministic}"
    versions = f"{__version__} {nvrtc_version()} {blas_version()} {dnn_version()} {_own_sources()}"
    return fingerprint([to_text(graph), how, target.name, target.architecture, versions])


def _packed_for_gpu(built: BuiltForGpu) -> dict[str, bytes]:
    parts = _packed(Built(built.plan, built.cubins, built.constants))
    parts["launches"] = launches_to_json(built.launches).encode()
    parts["bundles"] = bundles_to_json(built.bundles).encode()
    parts |= {f"routine {i}": plan for i, plan in built.routines.items()}
    parts["algorithms"] = json.dumps(built.algorithms).encode()
    parts["without"] = json.dumps(sorted(built.without)).encode()
    return parts


def _unpacked_for_gpu(parts: Mapping[str, bytes] | None, graph: Graph) -> BuiltForGpu | None:
    found = _unpacked(parts, graph, is_cubin)
    if found is None or parts is None:
        return None
    try:
        launches = launches_from_json(parts["launches"].decode())
        bundles = bundles_from_json(parts["bundles"].decode())
        algorithms = {
            str(k): [int(w) for w in v] for k, v in json.loads(parts["algorithms"]).items()
        }
        routines = {
            int(n.removeprefix("routine ")): data
            for n, data in parts.items()
            if n.startswith("routine ")
        }
        without = frozenset(_routine(r) for r in json.loads(parts["without"]))
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError):
        return None
    is_whole = len(launches) == len(found.plan.entries) and all(
        len(words) == 8 for words in algorithms.values()
    )
    if not is_whole:
        return None
    return BuiltForGpu(
        found.plan,
        launches,
        found.objects,
        found.constants,
        algorithms,
        routines,
        bundles,
        without,
    )


def _routine(found: Any) -> Routine:
    name, operands, numbers = found
    shapes = tuple((tuple(int(n) for n in shape), str(dtype)) for shape, dtype in operands)
    return str(name), shapes, tuple((str(n), float(x)) for n, x in numbers)


# The cache


def _key(graph: Graph, options: CompileOptions, target: Processor) -> str:
    """A hash of all that the code depends on."""
    how = f"optimize={options.optimize} debug={options.debug}"
    versions = f"{__version__} {compiler_version()} {_own_sources()}"
    return fingerprint(
        [to_text(graph), how, target.cpu, target.features, str(target.machine), versions]
    )


@functools.cache
def _own_sources() -> str:
    """The compiler's own files by size and time, so that a changed compiler has its own plans."""
    root = Path(__file__).parent
    folders = ("ir", "kernel", "rules", "schedule", "memory", "codegen", "runtime", "frontend")
    files = sorted(p for folder in folders for p in (root / folder).rglob("*.py"))
    stats = ((p.relative_to(root), p.stat()) for p in files)
    return fingerprint(f"{p} {s.st_size} {s.st_mtime_ns}" for p, s in stats)


def _packed(built: Built) -> dict[str, bytes]:
    parts = {"plan": built.plan.to_json().encode()}
    parts |= {f"object {i}": code for i, code in enumerate(built.objects)}
    parts |= {f"constant {name}": array.tobytes() for name, array in built.constants.items()}
    return parts


def _unpacked(
    parts: Mapping[str, bytes] | None, graph: Graph, is_code: Callable[[bytes], bool] = is_object
) -> Built | None:
    """What was packed for a graph; None for anything else. Constants come back as their bytes."""
    if parts is None:
        return None
    try:
        plan = plan_from_json(parts["plan"].decode())
        count = sum(n.startswith("object ") for n in parts)
        objects = tuple(parts[f"object {i}"] for i in range(count))
        constants = {
            n.removeprefix("constant "): np.array(memoryview(data), np.uint8)
            for n, data in parts.items()
            if n.startswith("constant ")
        }
    except (LookupError, TypeError, ValueError, RecursionError):
        return None
    is_whole = all(map(is_code, objects)) and fits(plan, graph, constants)
    return Built(plan, objects, constants) if is_whole else None


# Looking at kernels


def profile(
    program: Executable, values: Mapping[str, np.ndarray], options: CompileOptions
) -> Profile:
    """The time of each kernel of a native program on some values, which stay as they are."""
    native = program.program if isinstance(program, CheckedProgram) else program
    if not isinstance(native, NativeProgram):
        return Profile(())
    best = ceilings()
    found = []
    lines = _scheduled_again(native, options).lines()
    taken = native.profile(values)
    for facts, seconds, own in zip(native.plan.kernels, taken, lines, strict=True):
        time_ = max(seconds, 1e-12)
        rates = facts.calls * facts.flops / time_, facts.calls * facts.nbytes / time_
        share = max(rates[0] / best.flops, rates[1] / best.nbytes)
        found.append(KernelTime(facts, seconds, share, own))
    return Profile(tuple(sorted(found, key=lambda k: -k.seconds)))


@dataclass(frozen=True)
class KernelView:
    """One compiled kernel, to look at: what it is called, computes and costs.

    `text` is its loops, `llvm` its LLVM IR, `assembly` the machine's instructions, `lines` the
    lines of the model it computes, `calls` how often a step calls it; `cuda` its source on a GPU.
    """

    facts: KernelFacts
    _kernel: Callable[[], Kernel]
    _lines: Callable[[], tuple[str, ...]]
    _target: Processor

    @property
    def name(self) -> str:
        return self.facts.name

    @property
    def lines(self) -> tuple[str, ...]:
        return self._lines()

    @property
    def calls(self) -> int:
        return self.facts.calls

    @property
    def text(self) -> str:
        return kernel_text(self._kernel())

    @property
    def llvm(self) -> str:
        return render_kernel(self._kernel(), self._target.machine)

    @property
    def assembly(self) -> str:
        return assembly(self.llvm, self._target)

    @property
    def cuda(self) -> str:
        return render_cuda_kernel(self._kernel())

    def __repr__(self) -> str:
        return f"Kernel({self.name}, {self.calls} calls, {self.facts.flops:,} flops)"


def kernels_of(program: Executable, options: CompileOptions) -> tuple[KernelView, ...]:
    """The distinct kernels of a native program; none for the oracle, which has no kernels."""
    native = program.program if isinstance(program, CheckedProgram) else program
    if not isinstance(native, (NativeProgram, CudaProgram)):
        return ()
    scheduled = functools.cache(functools.partial(_scheduled_again, native, options))

    def kernel(i: int) -> Kernel:
        return replace(scheduled().distinct()[i], name=native.plan.kernels[i].name)

    def lines(i: int) -> tuple[str, ...]:
        return scheduled().lines()[i]

    processor = host() if isinstance(native, CudaProgram) else native.target
    return tuple(
        KernelView(facts, functools.partial(kernel, i), functools.partial(lines, i), processor)
        for i, facts in enumerate(native.plan.kernels)
    )


def _scheduled_again(program: NativeProgram | CudaProgram, options: CompileOptions) -> Program:
    """The program of a graph that was built: the same kernels, and the lines of this graph.

    A plan from the cache has no kernels, and may have been made for another script's lines.
    """
    if isinstance(program, CudaProgram):
        return _scheduled_for_gpu(program.graph, options, _gpu_target(program.without))
    return _scheduled(program.graph, options, program.target)
