"""The source of a program: a function for each distinct kernel, and how each is launched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from treadle.codegen.cuda import scalars
from treadle.codegen.cuda.float8 import FLOAT8
from treadle.codegen.cuda.prelude import PRELUDE, SCANS
from treadle.codegen.cuda.render import Writer
from treadle.codegen.cuda.scatter import scatter_lines
from treadle.codegen.cuda.tiles import tiled_lines
from treadle.codegen.cuda.warpgroups import WARPGROUPS, warpgroup_lines
from treadle.kernel.geometry import Scattered, Tiled, Warpgroups
from treadle.kernel.launch import CooperativeLaunch, Launch, call_of, matmul_call_of
from treadle.kernel.mapped import blocks_of, geometry_of, shared_bytes
from treadle.kernel.nodes import Kernel
from treadle.kernel.program import Program
from treadle.kernel.target import GPU
from treadle.kernel.warpgroups import maps_of, template_of


@dataclass(frozen=True)
class CudaSource:
    """Text for the compiler, in parts that can be compiled apart; launches by entry."""

    parts: tuple[str, ...]
    launches: tuple[Launch, ...]
    cooperative: tuple[CooperativeLaunch, ...] = ()


def render_program(program: Program) -> CudaSource:
    """Kernels numbered as `Program.distinct` numbers them."""
    kernels = program.distinct()
    launches, texts = list[Launch](), list[str]()
    for i, kernel in enumerate(kernels):
        symbol, matmul, called = f"kernel_{i}", matmul_call_of(kernel), call_of(kernel)
        if called is not None or matmul is not None:
            launches.append(Launch(symbol, 0, 0, matmul=matmul, called=called))
        elif geometry_of(kernel).is_cooperative:
            launches.append(Launch(symbol, 0, 0))
        else:
            threads, calls = geometry_of(kernel).threads, geometry_of(kernel).calls
            shared = shared_bytes(kernel)
            maps, blocks = maps_of(kernel), blocks_of(kernel)
            launches.append(Launch(symbol, blocks, threads, shared, calls, maps=maps))
            texts.append(function(kernel, symbol))
    runs = {run.symbol: run for run in program.cooperative}  # equal ones are one function
    texts += [cooperative(run, kernels) for run in runs.values()]
    sources = tuple(_with_prelude(part) for part in _parts(texts))
    return CudaSource(sources, tuple(launches), program.cooperative)


def _parts(texts: Sequence[str]) -> list[list[str]]:
    """Texts that are compiled together: few, and not long together."""
    sizes, found, length = GPU.launching, list[list[str]](), 0
    for text in texts:
        length += len(text)
        if not found or len(found[-1]) == sizes.part_kernels or length > sizes.part_text:
            found.append([])
            length = len(text)
        found[-1].append(text)
    return found


def lines_of(kernel: Kernel) -> list[str]:
    """A mapped kernel as lines for one of its blocks."""
    match geometry_of(kernel).template:
        case Tiled() as tiled:
            return tiled_lines(kernel, tiled)
        case Scattered() as scattered:
            return scatter_lines(kernel, scattered)
        case Warpgroups() as warpgroups:
            return warpgroup_lines(kernel, warpgroups)
        case None:
            return Writer(kernel).written()


def render_kernel(kernel: Kernel) -> str:
    """One kernel's source, with what it calls."""
    if call_of(kernel) is not None or matmul_call_of(kernel) is not None:
        return f"// {kernel.name} is a library's"
    return _with_prelude([function(kernel, kernel.name)])


def _with_prelude(texts: Sequence[str]) -> str:
    """Functions behind what they call."""
    has_float8 = any("e4m3" in text or "e5m2" in text for text in texts)
    has_maps = any(MAPS in text for text in texts)
    has_scans = any("before_in_" in text for text in texts)
    before = [*([FLOAT8] if has_float8 else []), *([WARPGROUPS] if has_maps else [])]
    before += [SCANS] if has_scans else []
    return "\n".join([PRELUDE, *before, *texts])


MAPS = "Map maps["  # matrices that are copied box by box, before a function's pointers


# What is around the lines of a kernel: its function, or its part of a cooperative one.


def function(kernel: Kernel, symbol: str) -> str:
    """A kernel as a function: pointers from its one argument, by the call's number."""
    geometry, count = geometry_of(kernel), max(1, len(kernel.buffers))
    warpgroups = template_of(kernel)
    room = f", {geometry.room}" if geometry.room > 1 or warpgroups is not None else ""
    maps, cluster = "", ""
    if warpgroups is not None:
        maps = f"{MAPS}{len(maps_of(kernel))}]; "
        cluster = f"__cluster_dims__({warpgroups.cluster}, 1, 1) " if warpgroups.cluster > 1 else ""
    head = [
        f"struct {symbol}_args {{ {maps}void *p[{geometry.calls}][{count}]; }};",
        f'extern "C" __global__ void {cluster}__launch_bounds__({geometry.threads}{room}) '
        f"{symbol}(const __grid_constant__ {symbol}_args a) {{",
    ]
    head += ["  begin();", "  const int block = blockIdx.x;"]
    head += [
        f"  {qualifier}{scalars.memory(b.dtype)} *__restrict__ p{i} = "
        f"({qualifier}{scalars.memory(b.dtype)} *)now(a.p[blockIdx.y][{i}]);"
        for i, b in enumerate(kernel.buffers)
        for qualifier in ("const " if i < len(kernel.inputs) else "",)
    ]
    return "\n".join([*head, *lines_of(kernel), "}"])


def part(kernel: Kernel, symbol: str) -> str:
    """A kernel as part of another function, which says what block it is and where the pointers are.

    What it reads may have been written a moment ago: pointers promise nothing.
    """
    head = [f"DEV void {symbol}(const int block, void *const *p) {{"]
    for i, b in enumerate(kernel.buffers):
        type_ = scalars.memory(b.dtype)
        head.append(f"  {type_} *p{i} = ({type_} *)now(p[{i}]);")
    return "\n".join([*head, *lines_of(kernel), "}"])


def cooperative(run: CooperativeLaunch, kernels: Sequence[Kernel]) -> str:
    """Phases as one function: every block takes blocks of a phase in turn, then all synchronize."""
    symbol = run.symbol
    entries = dict.fromkeys(i for phase in run.phases for i, _ in phase)
    texts = [part(kernels[i], f"{symbol}_{i}") for i in entries]
    body: list[str] = []
    at = 0
    for number, phase in enumerate(run.phases):
        if number:
            body.append(f"  grid_sync(&{symbol}_arrived, until);")
        total = sum(blocks_of(kernels[i]) * n for i, n in phase)
        body.append(f"  for (int at = blockIdx.x; at < {total}; at += gridDim.x) {{")
        start = 0
        for i, n in phase:
            count, grid = len(kernels[i].buffers), blocks_of(kernels[i])
            here = "at" if not start else f"(at - {start})"
            where = f"a.p + {at}" if n == 1 else f"a.p + {at} + {here} / {grid} * {count}"
            block = here if n == 1 else f"{here} % {grid}"
            at += n * count
            if grid:
                start, otherwise = start + n * grid, "else " if start else ""
                body.append(f"    {otherwise}if (at < {start})")
                body.append(f"      {symbol}_{i}({block}, {where});")
        body += ["    __syncthreads();", "  }"]
    head = [
        f"struct {symbol}_args {{ void *p[{max(1, at)}]; }};",
        f"__device__ u64 {symbol}_arrived;",
        f'extern "C" __global__ void __launch_bounds__({run.block}) '
        f"{symbol}(const __grid_constant__ {symbol}_args a) {{",
        "  begin();",
        f"  u64 until = first_sync(&{symbol}_arrived);",
    ]
    return "\n".join([*texts, *head, *body, "}"])
