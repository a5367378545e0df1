"""The oracle as a backend: nothing is compiled, a graph is evaluated in float64 node by node."""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

import numpy as np

from treadle.base.memory import refuse_beyond
from treadle.compile_report import CompileOptions, CompileReport, KernelTime, Profile
from treadle.ir.graph import Graph
from treadle.kernel import target as targets
from treadle.kernel.plan import KernelFacts
from treadle.runtime.cpu.ceilings import ceilings
from treadle.runtime.executable import Executable
from treadle.runtime.oracle import OracleProgram, WideMemory


@final
class OracleBackend:
    """The float64 interpreter."""

    name = "oracle"
    memory = WideMemory("oracle")
    target = targets.CPU
    chaining = None

    def why_not(self) -> None:
        """It is always there."""

    def require(self) -> None:
        """It is always there."""

    def toolchain(self, options: CompileOptions) -> None:
        """It interprets."""

    def load(
        self, graph: Graph, report: CompileReport, options: CompileOptions, name: str
    ) -> Executable:
        """Every value of a graph is held while it is needed, so the largest one must fit."""
        for node in graph.nodes:
            for type_ in node.types:
                origin = f" of {node.origin}" if node.origin else ""
                refuse_beyond("compile", f"{node.op} {type_}{origin}", type_.nbytes)
        return OracleProgram(graph)

    def profile(
        self, program: Executable, values: Mapping[str, np.ndarray], options: CompileOptions
    ) -> Profile:
        """What each op takes, added up over its nodes; operations are not counted."""
        best, rows = ceilings(), list[KernelTime]()
        for op, taken in OracleProgram(program.graph).profile(values).items():
            facts = KernelFacts(op, taken.calls, 0, taken.nbytes // taken.calls)
            share = best.share(0, taken.nbytes, taken.seconds)
            rows.append(KernelTime(facts, taken.seconds, share))
        return Profile(tuple(sorted(rows, key=lambda row: -row.seconds)))


ORACLE = OracleBackend()
