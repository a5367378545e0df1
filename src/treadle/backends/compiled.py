"""The last stages, for every device with a toolchain.

schedule → plan_buffers → render → compile → load, or at once from the plan cache
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from treadle.backends.protocol import Built, RescheduleError, Toolchain
from treadle.backends.rates import rates_of
from treadle.backends.search import searched
from treadle.backends.stages import build
from treadle.backends.stored import key_of, packed, unpacked
from treadle.compile_report import (
    CompileOptions,
    CompileReport,
    KernelTime,
    Profile,
    ProgramFacts,
)
from treadle.ir.graph import Graph
from treadle.ir.ops.leaves import INPUT
from treadle.kernel.evidence import Scheduled
from treadle.kernel.plan import KernelFacts, Plan
from treadle.runtime.cache import PlanCache, plan_cache
from treadle.runtime.checked import CheckedProgram
from treadle.runtime.executable import (
    Ceilings,
    Executable,
    InPlaceProgram,
    Timing,
    updates_in_place,
)
from treadle.schedule.checks import with_index_checks

Code = TypeVar("Code")
Tools = Toolchain[Any, Code]

MANY = 256  # buffers of a program that takes long to write down: 20 ms and more


def load(
    toolchain: Tools[Code],
    graph: Graph,
    report: CompileReport,
    options: CompileOptions,
    name: str,
) -> Executable:
    """A graph ready to run; with `debug` it looks at its indices after each run."""
    if options.debug:
        checked, checks = with_index_checks(graph)
        return CheckedProgram(graph, _loaded(toolchain, checked, report, options, name), checks)
    return _loaded(toolchain, graph, report, options, name)


def _loaded(
    toolchain: Tools[Code],
    graph: Graph,
    report: CompileReport,
    options: CompileOptions,
    name: str,
) -> InPlaceProgram:
    report.target = toolchain.title
    if options.memory_budget is not None:
        toolchain = toolchain.beside(_values(graph, report))
    if options.search == "measured":
        toolchain = searched(toolchain, graph, report, options)
    cache = plan_cache()
    if cache is None:
        built, program = _built(toolchain, graph, report, options)
        report.programs.append(facts(name, built, program, from_cache=False))
        report.evidence.programs.append(Scheduled(name, graph, built.record))
        return program
    key = key_of(graph, options, toolchain)
    # What was stored may have been made without a look at its kernels.
    is_looked_at = options.verify == "full"
    found = None if is_looked_at else _cached(cache, key, toolchain, graph, report)
    built, program = found or _built(toolchain, graph, report, options)
    if found is None:
        with report.stage("cache"):
            parts = packed(toolchain, built, program)
            if len(built.plan.slots) < MANY:
                cache.put(key, parts())
            else:
                cache.put_later(key, parts)
    report.programs.append(facts(name, built, program, from_cache=found is not None))
    report.evidence.programs.append(Scheduled(name, graph, built.record))
    return program


def _cached(
    cache: PlanCache, key: str, toolchain: Tools[Code], graph: Graph, report: CompileReport
) -> tuple[Built[Code], InPlaceProgram] | None:
    """What the cache has, loaded; None if it is not what was put there: it is built anew."""
    with report.stage("cache"):
        built = unpacked(toolchain, cache.get(key), graph)
    if built is None:
        return None
    try:
        with report.stage("load"):
            return built, toolchain.load(graph, built)
    except toolchain.damage:
        return None


def _built(
    toolchain: Tools[Code], graph: Graph, report: CompileReport, options: CompileOptions
) -> tuple[Built[Code], InPlaceProgram]:
    """All stages; once more if a library turns out to lack a call that was scheduled, or to take
    more memory to work in than a budget has left.
    """
    while True:
        built = build(toolchain, graph, report, options)
        try:
            with report.stage("load"):
                program = toolchain.load(graph, built)
        except RescheduleError as missing:
            toolchain = missing.toolchain
            report.refused += missing.causes
            continue
        taken = _values(graph, report) + facts("", built, program, from_cache=False).nbytes
        held = _values(graph, report) + program.workspace
        if not built.plan.most or taken <= built.plan.most or held <= built.plan.held:
            return built, program
        toolchain = toolchain.beside(held)
        del built, program  # they hold memory of the device


def _values(graph: Graph, report: CompileReport) -> int:
    """Bytes that are there between steps: the session's, or those that the graph knows of."""
    leaves = (graph.nodes[i] for i in graph.leaves.values())
    return report.state_bytes or sum(n.types[0].nbytes for n in leaves if n.op is not INPUT)


def facts(name: str, built: Built[Any], program: InPlaceProgram, from_cache: bool) -> ProgramFacts:
    """A program in numbers, for the report."""
    plan = built.plan
    outside = sum(a.nbytes for a in built.constants.values())
    outside += sum(o.type.nbytes for o in plan.outputs if o.name not in plan.updated)
    inside = plan.arena, program.workspace
    shares = program.shares_arena
    cut = plan.again, plan.uncut
    return ProgramFacts(name, plan.kernels, *inside, outside, from_cache, shares, *cut)


def compiled_part(program: Executable) -> InPlaceProgram | None:
    """The program that has kernels, without the checks around it; None if there is none."""
    inner = program.program if isinstance(program, CheckedProgram) else program
    return inner if updates_in_place(inner) else None


def profile(
    toolchain: Tools[Code],
    program: Executable,
    values: Mapping[str, np.ndarray],
    options: CompileOptions,
) -> Profile:
    """What each kernel takes. A plan has no lines of the model: the graph is scheduled for them."""
    found = compiled_part(program)
    assert found is not None
    lines = toolchain.as_for(found).schedule(found.graph, options).lines()
    best = rates_of(toolchain)
    rows = [_row(found.plan, timing, lines, best) for timing in found.profile(values)]
    return Profile(tuple(sorted(rows, key=lambda row: -row.seconds)))


def _row(
    plan: Plan, timing: Timing, lines: Sequence[tuple[str, ...]], best: Ceilings
) -> KernelTime:
    """One line of a profile; kernels that are one launch are one line."""
    parts = [(plan.kernels[entry], count) for entry, count in timing.calls]
    kernel, count = parts[0]
    one = KernelFacts(kernel.name, count, kernel.flops, kernel.nbytes)
    if timing.name:
        flops = sum(k.flops * n for k, n in parts)
        one = KernelFacts(timing.name, 1, flops, sum(k.nbytes * n for k, n in parts))
    own = dict.fromkeys(line for entry, _ in timing.calls for line in lines[entry])
    share = best.share(one.calls * one.flops, one.calls * one.nbytes, timing.seconds)
    return KernelTime(one, timing.seconds, share, tuple(own))
