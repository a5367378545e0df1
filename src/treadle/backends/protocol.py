"""What a device must give: `Backend`, and `Toolchain` for devices that kernels are compiled for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from treadle.compile_report import CompileOptions, CompileReport, Profile
from treadle.ir.graph import Graph
from treadle.kernel.choices import Chosen
from treadle.kernel.nodes import Kernel
from treadle.kernel.plan import Plan
from treadle.kernel.program import Program
from treadle.kernel.target import Target
from treadle.runtime.chain import Chain, RunningChain, Staged
from treadle.runtime.executable import Ceilings, Executable, InPlaceProgram
from treadle.runtime.memory import Memory

Source = TypeVar("Source")  # what `render` gives and `compile` takes
Code = TypeVar("Code")  # what `compile` gives: machine code and how it is launched


@dataclass(frozen=True, slots=True)
class Built(Generic[Code]):
    """Everything that a compiled program is made of; the plan cache keeps it."""

    plan: Plan
    constants: Mapping[str, np.ndarray]
    code: Code
    record: Callable[[], bytes] = bytes  # what its certificate says of it; nothing if it has none


class RescheduleError(Exception):
    """A target turned out to lack something that a program was scheduled for.

    `toolchain` knows that it is missing; `causes` are the calls and what their library said.
    """

    def __init__(self, toolchain: Toolchain[Any, Any], *causes: str):
        told = "; ".join(causes)
        super().__init__(f"the program must be scheduled without a library call: {told}")
        self.toolchain, self.causes = toolchain, causes


class Toolchain(Protocol[Source, Code]):
    """From a graph to a program on one target: schedule → render → compile → load.

    `backends/compiled.py` strings the stages together, with the plan cache around them.
    """

    @property
    def title(self) -> str:
        """What the report calls the target; nothing where there is no choice."""
        ...

    @property
    def target(self) -> Target:
        """What the schedule knows of the device."""
        ...

    @property
    def machine(self) -> str:
        """What measured rates are rates of."""
        ...

    @property
    def versions(self) -> Sequence[str]:
        """What code depends on beside the graph, the options, the target and Treadle itself.

        Compilers, libraries, and the device: the plan cache has other entries for others.
        """
        ...

    @property
    def damage(self) -> tuple[type[Exception], ...]:
        """What `load` may raise for an entry of the plan cache that is not what was stored."""
        ...

    @property
    def languages(self) -> Sequence[str]:
        """The texts of a kernel that there are to look at."""
        ...

    def schedule(self, graph: Graph, options: CompileOptions) -> Program:
        """The kernels of a graph, for the target."""
        ...

    def render(self, program: Program) -> Source:
        """Its source."""
        ...

    def compile(self, source: Source) -> Code:
        """Machine code."""
        ...

    def load(self, graph: Graph, built: Built[Code]) -> InPlaceProgram:
        """The program on the device; RescheduleError if a library lacks one of its calls."""
        ...

    def pack(self, code: Code, program: Any) -> dict[str, bytes]:
        """The code by name, with what loading has chosen, for the plan cache."""
        ...

    def unpack(self, parts: Mapping[str, bytes], plan: Plan) -> Code | None:
        """What was packed; None for anything else."""
        ...

    def as_for(self, program: Any) -> Toolchain[Source, Code]:
        """The toolchain as it was when it made a program."""
        ...

    def beside(self, nbytes: int) -> Toolchain[Source, Code]:
        """The toolchain for a program beside whose own memory a step holds so many bytes.

        A memory budget is one of both.
        """
        ...

    def tuned(self, chosen: Chosen) -> Toolchain[Source, Code]:
        """The toolchain with some fields of its target as a search chose them."""
        ...

    def text(self, kernel: Kernel, language: str) -> str:
        """One kernel in one of `languages`."""
        ...

    def ceilings(self) -> Ceilings:
        """What the device can do at most, which a profile is compared with."""
        ...


class Backend(Protocol):
    """A device: what the pipeline, steps and sessions ask of it."""

    @property
    def name(self) -> str: ...

    @property
    def memory(self) -> Memory:
        """What arrays it takes."""
        ...

    @property
    def target(self) -> Target:
        """What graphs and kernels are shaped for, whatever is installed here."""
        ...

    @property
    def chaining(self) -> Chaining | None:
        """How it makes steps that are chains; None if the host runs one program after another."""
        ...

    def why_not(self) -> str | None:
        """Why it cannot be used in this process; None if it can."""
        ...

    def require(self) -> None:
        """A DeviceError with a remedy if it cannot be used."""
        ...

    def toolchain(self, options: CompileOptions) -> Toolchain[Any, Any] | None:
        """What compiles for it; None for an interpreter."""
        ...

    def load(
        self, graph: Graph, report: CompileReport, options: CompileOptions, name: str
    ) -> Executable:
        """A graph ready to run."""
        ...

    def profile(
        self, program: Executable, values: Mapping[str, np.ndarray], options: CompileOptions
    ) -> Profile:
        """What each kernel of a program takes on some values, which stay as they are."""
        ...


class Connecting(Protocol):
    """How devices of several processes exchange by themselves, where there is what they need."""

    def where(self) -> str:
        """Which device of all hosts it is, for those who must not share one."""
        ...

    def why_not_direct(self) -> str | None:
        """Why it cannot exchange with other devices by itself; None if it can."""
        ...

    def direct_name(self) -> str:
        """What it exchanges with."""
        ...

    def new_identity(self) -> bytes:
        """What one rank makes, and all ranks need for `direct`."""
        ...

    def direct(self, identity: bytes, rank: int, size: int) -> Any:
        """What connects all ranks' devices. It waits for all of them."""
        ...


class Chaining(Protocol):
    """Whole steps of several programs on a device."""

    @property
    def connecting(self) -> Connecting | None:
        """How it exchanges with others by itself; None where the host does that."""
        ...

    def chained(self, chain: Chain, ranks: int, direct: Any, staged: Staged | None) -> RunningChain:
        """A chain ready to run, whose exchanges are direct, or staged on the host."""
        ...
