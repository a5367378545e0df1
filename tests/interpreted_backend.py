"""The smallest backend: kernels of a schedule run through the interpreter of the loop IR.

Nothing is compiled. It shows what a device must give, and that a step asks for nothing else.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np

from test_kernels import MEANINGS
from treadle.backends import compiled
from treadle.backends.protocol import Built
from treadle.backends.scheduling import scheduled
from treadle.compile_report import CompileOptions, CompileReport, Profile
from treadle.ir.graph import Graph, OutputKind
from treadle.kernel import target as targets
from treadle.kernel.choices import Chosen, with_choices
from treadle.kernel.interpret import interpret
from treadle.kernel.nodes import Kernel
from treadle.kernel.plan import Plan
from treadle.kernel.program import Call, Program, Repeat, Step
from treadle.kernel.target import Target
from treadle.kernel.text import to_text
from treadle.runtime.executable import Ceilings, Executable, Timing
from treadle.runtime.memory import HostMemory

NAME = "interpreter"
Arrays = Mapping[str, np.ndarray]


class InterpretedProgram:
    """A program on arrays of the host; leaves that it updates are written where they are."""

    is_in_place = True
    shares_arena = False
    can_repeat = True
    workspace = 0

    def __init__(self, graph: Graph, plan: Plan, program: Program):
        self.graph, self.plan, self.program, self.runs = graph, plan, program, 0
        wanted = [i for i, o in enumerate(plan.outputs) if o.kind is not OutputKind.UPDATE]
        names = [f"{plan.outputs[i].kind.value}:{plan.outputs[i].name}" for i in wanted]
        self.results = names, wanted
        self.prints = [o.name for o in plan.outputs if o.kind is OutputKind.PRINT]
        self.taken: Counter[int] = Counter()  # nanoseconds by kernel

    def run(self, values: Arrays) -> tuple[np.ndarray, ...]:
        copies = {name: np.array(values[name], t.dtype.numpy) for name, t in self.program.leaves}
        return self._outputs(copies, range(len(self.plan.outputs)))

    def run_on(
        self,
        owner: object,
        version: int,
        values: Arrays,
        inputs: Arrays,
        wanted: Sequence[int],
        stays: bool = False,
    ) -> tuple[np.ndarray, ...]:
        leaves = {n: inputs[n] if n in inputs else values[n] for n, _ in self.program.leaves}
        found = self._outputs(leaves, wanted)
        self.runs += 1
        return found

    def run_several_on(
        self,
        owner: object,
        version: int,
        values: Arrays,
        rows: Sequence[Arrays],
        wanted: Sequence[int],
    ) -> list[tuple[np.ndarray, ...]]:
        return [self.run_on(owner, version, values, row, wanted) for row in rows]

    def seconds(self, values: Arrays, least: float) -> float:
        start = time.perf_counter()
        self.run(values)
        return time.perf_counter() - start

    def profile(self, values: Arrays) -> list[Timing]:
        self.taken.clear()
        self.run(values)
        counts = [facts.calls for facts in self.plan.kernels]
        return [Timing(((i, n),), self.taken[i] / 1e9) for i, n in enumerate(counts)]

    def _outputs(self, leaves: Arrays, wanted: Sequence[int]) -> tuple[np.ndarray, ...]:
        memory = {b.name: np.zeros(b.size, b.dtype.numpy) for b in self.program.buffers}
        for name, type_ in self.program.leaves:
            memory[name] = np.ascontiguousarray(leaves[name], type_.dtype.numpy).reshape(-1)
        memory |= {name: array.reshape(-1) for name, array in self.program.constants}
        self._steps(self.program.steps, memory, 0)
        outputs = [self.program.outputs[i] for i in wanted]
        return tuple(memory[name][: t.size].reshape(t.shape).copy() for _, name, t in outputs)

    def _steps(self, steps: Sequence[Step], memory: Arrays, iteration: int) -> None:
        for step in steps:
            if isinstance(step, Repeat):
                iterations = range(step.length)
                for i in reversed(iterations) if step.reverse else iterations:
                    self._steps(step.steps, memory, i)
            else:
                for call in step.calls:
                    self._call(call, memory, iteration)

    def _call(self, call: Call, memory: Arrays, iteration: int) -> None:
        views = {}
        for buffer, argument in zip(call.kernel.buffers, call.arguments, strict=True):
            start = argument.row * iteration
            views[buffer.name] = memory[argument.buffer][start : start + buffer.size]
        start_time = time.perf_counter_ns()
        interpret(call.kernel, views, MEANINGS, width=4)
        entry = next(i for i, k in enumerate(self.program.distinct()) if k is call.kernel)
        self.taken[entry] += time.perf_counter_ns() - start_time


@dataclass(frozen=True)
class InterpretedToolchain:
    """The source is the program, and so is the code; nothing is worth storing."""

    title: str = "the loop IR"
    machine: str = NAME
    target: Target = targets.CPU
    versions: tuple[str, ...] = ()
    damage: tuple[type[Exception], ...] = ()
    languages: tuple[str, ...] = ("loops",)

    def schedule(self, graph: Graph, options: CompileOptions) -> Program:
        return scheduled(graph, options, self.target)

    def render(self, program: Program) -> Program:
        return program

    def compile(self, source: Program) -> Program:
        return source

    def load(self, graph: Graph, built: Built[Program]) -> InterpretedProgram:
        return InterpretedProgram(graph, built.plan, built.code)

    def pack(self, code: Program, program: Any) -> dict[str, bytes]:
        return {}

    def unpack(self, parts: Mapping[str, bytes], plan: Plan) -> None:
        return None

    def tuned(self, chosen: Chosen) -> InterpretedToolchain:
        return replace(self, target=with_choices(self.target, chosen))

    def beside(self, nbytes: int) -> InterpretedToolchain:
        return self

    def as_for(self, program: Any) -> InterpretedToolchain:
        return self

    def text(self, kernel: Kernel, language: str) -> str:
        return to_text(kernel)

    def ceilings(self) -> Ceilings:
        return Ceilings(1e9, 1e9)


@final
class InterpretedBackend:
    """A device of the tests alone."""

    name = NAME
    memory = HostMemory(NAME)
    target = targets.CPU
    chaining = None

    def why_not(self) -> None:
        """It is always there."""

    def require(self) -> None:
        """It is always there."""

    def toolchain(self, options: CompileOptions) -> InterpretedToolchain:
        return InterpretedToolchain()

    def load(
        self, graph: Graph, report: CompileReport, options: CompileOptions, name: str
    ) -> Executable:
        return compiled.load(self.toolchain(options), graph, report, options, name)

    def profile(self, program: Executable, values: Arrays, options: CompileOptions) -> Profile:
        return compiled.profile(self.toolchain(options), program, values, options)
