"""Phases of small kernels as one launch: blocks share out a phase, and meet before the next.

A launch costs more than what a small kernel does. Where all of a program is small, its kernels are
parts of one function: every block takes blocks of the phase's kernels in turn, then waits until all
have arrived. Such a wait is shorter than a launch, and kernels of one phase run side by side.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from treadle.codegen.cuda.contractions import contraction_of
from treadle.codegen.cuda.functions import part, shared_bytes
from treadle.codegen.cuda.products import THREADS, product_lines
from treadle.codegen.cuda.render import written
from treadle.codegen.cuda.rows import rows_of
from treadle.codegen.cuda.scatter import SCATTER_THREADS, scatter_lines
from treadle.codegen.cuda.tiles import BLOCKS, share_of, tiled
from treadle.codegen.cuda.tiles import THREADS as TILE_THREADS
from treadle.kernel import cost
from treadle.kernel.calls import call_of
from treadle.kernel.launch import Bundle
from treadle.kernel.nodes import Kernel, whole_product
from treadle.kernel.program import Phase, Program, Step
from treadle.kernel.scatter import is_scatter

TOGETHER = 256  # threads of a block
LIGHT = 1 << 27  # operations of a phase that still takes about as long as a launch
MOST_POINTERS = 480  # of a launch, which takes 4 KB
MOST_PARTS = 48  # functions in one


@dataclass(frozen=True, slots=True)
class Written:
    """A kernel's lines for one of its blocks, and how it is launched by itself."""

    lines: list[str]
    grid: int
    block: int
    shared: int
    fewest: int = 1  # blocks that a multiprocessor should have room for


def lines_of(
    kernel: Kernel, is_aligned: bool, is_loose: bool, block: int = 0, beside: int = BLOCKS
) -> Written:
    """A kernel as lines, by what it is: sums at places that are data, products, anything else.

    Blocks have a size of their own, or one that is asked for; `beside` others it has some blocks.
    """
    if is_scatter(kernel):
        lines, grid, shared = scatter_lines(kernel)
        return Written(lines, grid, SCATTER_THREADS, shared)
    if whole_product(kernel) is not None:
        lines, grid = product_lines(kernel)
        return Written(lines, grid, THREADS, 0)
    found = contraction_of(kernel)
    if found is not None:
        lines, shape, shared = tiled(kernel, found, is_aligned, is_loose, beside)
        return Written(lines, shape.grid, TILE_THREADS, shared)
    lines, shape, stages = written(kernel, is_aligned, is_loose, block)
    if is_aligned and not block and rows_of(kernel) is not None:
        return Written(lines, shape.grid, shape.block, 0, 2)  # rows are in registers
    shared = shared_bytes(kernel, shape, stages)
    return Written(lines, shape.grid, shape.block, shared, 2 if stages.shared else 1)


def bundles(program: Program) -> tuple[Bundle, ...]:
    """Runs of phases that are launched together; none where some phase is not small."""
    if not all(map(_is_light, _phases(program.steps))):
        return ()
    numbers = {id(k): i for i, k in enumerate(program.distinct())}
    return tuple(
        replace(b, symbol=f"bundle_{i}") for i, b in enumerate(_runs(program.steps, (), numbers))
    )


def _phases(steps: Sequence[Step]) -> Iterator[Phase]:
    for step in steps:
        if isinstance(step, Phase):
            yield step
        else:
            yield from _phases(step.steps)


def _is_light(phase: Phase) -> bool:
    own = (call.kernel for call in phase.calls)
    if any(call_of(k) is not None or whole_product(k) is not None for k in own):
        return False
    return sum(cost.work(call.kernel) for call in phase.calls) <= LIGHT


def _runs(
    steps: Sequence[Step], path: tuple[int, ...], numbers: Mapping[int, int]
) -> Iterator[Bundle]:
    run: list[tuple[tuple[int, int], ...]] = []
    first, pointers = 0, 0

    def done() -> Iterator[Bundle]:
        if sum(map(len, run)) > 1:
            yield Bundle("", path, first, tuple(run))

    for i, step in enumerate(steps):
        if not isinstance(step, Phase):
            yield from done()
            run, first, pointers = [], i + 1, 0
            yield from _runs(step.steps, (*path, i), numbers)
            continue
        calls: dict[int, int] = {}
        # The longest first: what is left at the end is short.
        for call in sorted(step.calls, key=lambda c: -cost.work(c.kernel)):
            calls[numbers[id(call.kernel)]] = calls.get(numbers[id(call.kernel)], 0) + 1
        wanted = sum(len(call.arguments) for call in step.calls)
        if any(is_scatter(call.kernel) for call in step.calls):  # whose blocks are larger
            wanted = MOST_POINTERS + 1
        is_full = pointers + wanted > MOST_POINTERS
        if is_full or sum(map(len, run)) + len(calls) > MOST_PARTS:
            yield from done()
            run, first, pointers = [], i, 0
        if wanted > MOST_POINTERS:
            first = i + 1
            continue
        run.append(tuple(calls.items()))
        pointers += wanted
    yield from done()


def shares(found: Sequence[Bundle], kernels: Sequence[Kernel]) -> dict[int, int]:
    """Blocks that each kernel gets beside the others of its phase."""
    given: dict[int, int] = {}
    for phase in (p for b in found for p in b.phases):
        work = {i: n * cost.work(kernels[i]) for i, n in phase}
        for i, own in work.items():
            given[i] = min(given.get(i, BLOCKS), share_of(own, sum(work.values())))
    return given


def sized(bundle: Bundle, parts: Mapping[int, Written]) -> Bundle:
    """The bundle with the blocks that its largest phase can use, and its shared memory."""
    grid = max(sum(parts[i].grid * n for i, n in phase) for phase in bundle.phases)
    shared = max(parts[i].shared for phase in bundle.phases for i, _ in phase)
    return replace(bundle, grid=max(1, grid), block=TOGETHER, shared=shared)


def bundle_text(bundle: Bundle, kernels: Sequence[Kernel], parts: Mapping[int, Written]) -> str:
    symbol = bundle.symbol
    entries = dict.fromkeys(i for phase in bundle.phases for i, _ in phase)
    texts = [part(kernels[i], f"{symbol}_{i}", parts[i].lines) for i in entries]
    body: list[str] = []
    at = 0
    for number, phase in enumerate(bundle.phases):
        if number:
            body.append(f"  meet(&{symbol}_met, until);")
        total = sum(parts[i].grid * n for i, n in phase)
        body.append(f"  for (int at = blockIdx.x; at < {total}; at += gridDim.x) {{")
        start, held = 0, ""
        for i, n in phase:
            count, grid = len(kernels[i].buffers), parts[i].grid
            if not grid:
                at += n * count
                continue
            here = "at" if not start else f"(at - {start})"
            body.append(f"    {held}if (at < {start + n * grid})")
            where = f"a.p + {at}" if n == 1 else f"a.p + {at} + {here} / {grid} * {count}"
            block = here if n == 1 else f"{here} % {grid}"
            body.append(f"      {symbol}_{i}({block}, {where});")
            start, held = start + n * grid, "else "
            at += n * count
        body += ["    __syncthreads();", "  }"]
    head = [
        f"struct {symbol}_args {{ void *p[{max(1, at)}]; }};",
        f"__device__ u64 {symbol}_met;",
        f'extern "C" __global__ void __launch_bounds__({TOGETHER}) '
        f"{symbol}(const __grid_constant__ {symbol}_args a) {{",
        "  begin();",
        f"  u64 until = first_meeting(&{symbol}_met);",
    ]
    return "\n".join([*texts, *head, *body, "}"])
