"""Compiled programs to look at: kernels with the lines of the model they compute, and memory.

A plan from the cache has no kernels, and may have been made for another script's lines: the graph
at hand is scheduled when somebody looks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from treadle.backends.compiled import compiled_part
from treadle.backends.protocol import Toolchain
from treadle.backends.registry import backend
from treadle.base.errors import DeviceError
from treadle.compile_report import CompileOptions
from treadle.kernel.nodes import Kernel
from treadle.kernel.plan import KernelFacts
from treadle.kernel.text import to_text
from treadle.memory.peak import MemoryView as MemoryView
from treadle.memory.peak import memory_view
from treadle.memory.plan import plan_buffers
from treadle.runtime.executable import Executable


@dataclass(frozen=True)
class KernelView:
    """One compiled kernel, to look at: what it is called, computes and costs.

    `text` is its loops, `llvm` its LLVM IR, `assembly` the machine's instructions, `cuda` its CUDA
    C++, `wgsl` its WGSL, whatever device it was compiled for; `lines` are the lines of the model it
    computes, `calls` is how often a step calls it.
    """

    facts: KernelFacts
    _kernel: Callable[[], Kernel]
    _lines: Callable[[], tuple[str, ...]]
    _toolchain: Toolchain[Any, Any]

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
        return to_text(self._kernel())

    @property
    def llvm(self) -> str:
        return self._in("llvm")

    @property
    def assembly(self) -> str:
        return self._in("assembly")

    @property
    def cuda(self) -> str:
        return self._in("cuda")

    @property
    def wgsl(self) -> str:
        return self._in("wgsl")

    def _in(self, language: str) -> str:
        """The kernel as its own toolchain writes it."""
        own = self._toolchain
        if language not in own.languages:
            raise DeviceError(
                f"kernel.{language}",
                f"{self.name} was made for another device, and has {', '.join(own.languages)}",
                "Compile the step for the device whose source you want to see.",
            )
        return own.text(self._kernel(), language)

    def __repr__(self) -> str:
        return f"Kernel({self.name}, {self.calls} calls, {self.facts.flops:,} flops)"


def kernels_of(device: str, program: Executable, options: CompileOptions) -> tuple[KernelView, ...]:
    """The distinct kernels of a program; none where it is interpreted."""
    toolchain, found = backend(device).toolchain(options), compiled_part(program)
    if toolchain is None or found is None:
        return ()
    own, plan = toolchain.as_for(found), found.plan
    scheduled = functools.cache(functools.partial(own.schedule, found.graph, options))

    def kernel(i: int) -> Kernel:
        return replace(scheduled().distinct()[i], name=plan.kernels[i].name)

    def lines(i: int) -> tuple[str, ...]:
        return scheduled().lines()[i]

    return tuple(
        KernelView(facts, functools.partial(kernel, i), functools.partial(lines, i), own)
        for i, facts in enumerate(plan.kernels)
    )


def memory_of(device: str, program: Executable, options: CompileOptions) -> MemoryView | None:
    """A program's temporary memory at its peak; None where it is interpreted."""
    toolchain, found = backend(device).toolchain(options), compiled_part(program)
    if toolchain is None or found is None:
        return None
    own = toolchain.as_for(found)
    scheduled = own.schedule(found.graph, options)
    return memory_view(scheduled, plan_buffers(scheduled, own.target))
