"""The stages between a graph and machine code, which need no device to have run anything."""

from __future__ import annotations

from typing import Any, TypeVar

from treadle.backends.protocol import Built, Toolchain
from treadle.compile_report import CompileOptions, CompileReport
from treadle.ir.graph import Graph
from treadle.ir.marks import marked
from treadle.kernel.program import Program
from treadle.memory.assemble import assemble
from treadle.memory.plan import plan_buffers
from treadle.verify.certificate.stored import program_evidence

Code = TypeVar("Code")


def build(
    toolchain: Toolchain[Any, Code], graph: Graph, report: CompileReport, options: CompileOptions
) -> Built[Code]:
    """A graph's plan, constants and machine code."""
    graph = marked(graph)
    with report.stage("schedule"):
        program = toolchain.schedule(graph, options)
    if options.verify == "full":
        from treadle.verify.certificate.left import judged
        from treadle.verify.kernels import check_kernels

        with report.stage("verify"):
            report.claims += judged(program, check_kernels(program))
    return built_of(toolchain, program, report, graph)


def built_of(
    toolchain: Toolchain[Any, Code],
    program: Program,
    report: CompileReport,
    graph: Graph | None = None,
) -> Built[Code]:
    """The stages after the schedule. Of a marked graph that is given there is a record.

    A compiler may only be begun by `compile`: what needs no code is done while it works.
    """
    with report.stage("render"):
        source = toolchain.render(program)
    with report.stage("compile"):
        code = toolchain.compile(source)
    with report.stage("plan_buffers"):
        target = toolchain.target
        buffers = plan_buffers(program, target)
        plan = assemble(program, buffers, target)
    report.evidence.settle()
    record = bytes if graph is None else program_evidence(graph, program, buffers)
    return Built(plan, dict(program.constants), code, record)
