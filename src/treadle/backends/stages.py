"""The stages between a graph and machine code, which need no device to have run anything."""

from __future__ import annotations

from typing import Any, TypeVar

from treadle.backends.protocol import Built, Toolchain
from treadle.compile_report import CompileOptions, CompileReport
from treadle.ir.graph import Graph
from treadle.kernel.program import Program
from treadle.memory.assemble import assemble
from treadle.memory.plan import plan_buffers

Code = TypeVar("Code")


def build(
    toolchain: Toolchain[Any, Code], graph: Graph, report: CompileReport, options: CompileOptions
) -> Built[Code]:
    """A graph's plan, constants and machine code."""
    with report.stage("schedule"):
        program = toolchain.schedule(graph, options)
    if options.verify == "full":
        from treadle.verify.kernels import check_kernels

        with report.stage("verify"):
            report.claims += check_kernels(program)
    return built_of(toolchain, program, report)


def built_of(
    toolchain: Toolchain[Any, Code], program: Program, report: CompileReport
) -> Built[Code]:
    """The stages after the schedule."""
    with report.stage("plan_buffers"):
        target = toolchain.target
        plan = assemble(program, plan_buffers(program, target), target)
    with report.stage("render"):
        source = toolchain.render(program)
    with report.stage("compile"):
        code = toolchain.compile(source)
    return Built(plan, dict(program.constants), code)
