"""The source of a program: a function for each distinct kernel, and how each is launched."""

from __future__ import annotations

from dataclasses import dataclass

from treadle.codegen.cuda.functions import cooperative, function
from treadle.codegen.cuda.prelude import PRELUDE
from treadle.codegen.cuda.render import Writer
from treadle.codegen.cuda.scatter import scatter_lines
from treadle.codegen.cuda.tiles import tiled_lines
from treadle.kernel.calls import call_of, matmul_call_of
from treadle.kernel.geometry import Scattered, Tiled
from treadle.kernel.launch import CooperativeLaunch, Launch
from treadle.kernel.mapped import blocks_of, geometry_of, shared_bytes
from treadle.kernel.nodes import (
    Kernel,
)
from treadle.kernel.program import Program


@dataclass(frozen=True)
class CudaSource:
    """Text for the compiler, in parts that can be compiled apart; launches by entry."""

    parts: tuple[str, ...]
    launches: tuple[Launch, ...]
    cooperative: tuple[CooperativeLaunch, ...] = ()


def render_program(program: Program, per_part: int = 24) -> CudaSource:
    """Kernels numbered as `Program.distinct` numbers them."""
    kernels = program.distinct()
    lines = dict[int, list[str]]()
    launches = list[Launch]()
    texts: list[str] = []
    for i, kernel in enumerate(kernels):
        symbol, matmul, called = f"kernel_{i}", matmul_call_of(kernel), call_of(kernel)
        if called is not None:
            launches.append(Launch(symbol, 0, 0, called=called))
        elif matmul is not None:
            launches.append(Launch(symbol, 0, 0, matmul=matmul))
        elif geometry_of(kernel).is_cooperative:
            lines[i] = lines_of(kernel)
            launches.append(Launch(symbol, 0, 0))
        else:
            threads, calls = geometry_of(kernel).threads, geometry_of(kernel).calls
            shared = shared_bytes(kernel)
            launches.append(Launch(symbol, blocks_of(kernel), threads, shared, calls))
            texts.append(function(kernel, symbol, lines_of(kernel)))
    texts += [cooperative(run, kernels, lines) for run in program.cooperative]
    groups = [texts[i : i + per_part] for i in range(0, len(texts), per_part)]
    sources = tuple("\n".join([PRELUDE, *p]) for p in groups)
    return CudaSource(sources, tuple(launches), program.cooperative)


def lines_of(kernel: Kernel) -> list[str]:
    """A mapped kernel as lines for one of its blocks."""
    match geometry_of(kernel).template:
        case Tiled() as tiled:
            return tiled_lines(kernel, tiled)
        case Scattered() as scattered:
            return scatter_lines(kernel, scattered)
        case None:
            return Writer(kernel).written()


def render_kernel(kernel: Kernel) -> str:
    """One kernel's source, with what it calls."""
    if call_of(kernel) is not None or matmul_call_of(kernel) is not None:
        return f"// {kernel.name} is a library's"
    return "\n".join([PRELUDE, function(kernel, kernel.name, lines_of(kernel))])
