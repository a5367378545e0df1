"""The source of a program: a function for each distinct kernel, and how each is launched."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from treadle.codegen.cuda.prelude import PRELUDE
from treadle.codegen.cuda.products import THREADS, render_product
from treadle.codegen.cuda.render import render
from treadle.codegen.cuda.rounding import may_be_loose
from treadle.codegen.cuda.scatter import SCATTER_THREADS, render_scatter
from treadle.kernel.calls import call_of, product_of
from treadle.kernel.launch import Launch
from treadle.kernel.nodes import Kernel, whole_product
from treadle.kernel.program import Phase, Program, Step
from treadle.kernel.scatter import is_scatter

PACK = 16  # bytes of the widest access
MOST_ARGUMENTS = 3840  # bytes: a launch takes 4 KB


@dataclass(frozen=True)
class CudaSource:
    """Text for the compiler, in parts that can be compiled apart; launches by entry."""

    parts: tuple[str, ...]
    launches: tuple[Launch, ...]


def render_program(program: Program, library: bool = True, per_part: int = 24) -> CudaSource:
    """Kernels numbered as `Program.distinct` numbers them; whole products are a library's."""
    kernels = program.distinct()
    odd = _unaligned(program.steps, {b.name: b.dtype.itemsize for b in program.buffers})
    most, is_loose = _most_calls(program.steps), may_be_loose(kernels)
    texts: list[str] = []
    launches: list[Launch] = []
    for i, kernel in enumerate(kernels):
        symbol = f"kernel_{i}"
        count = max(1, len(kernel.buffers))
        calls = max(1, min(most[id(kernel)], MOST_ARGUMENTS // (8 * count)))
        product = product_of(kernel)
        called = call_of(kernel)
        if called is not None:
            launches.append(Launch(symbol, 0, 0, routine=called))
            continue
        if product is not None and library:
            launches.append(Launch(symbol, 0, 0, product=product))
            continue
        if is_scatter(kernel):
            text, grid, shared = render_scatter(kernel, symbol, calls)
            launches.append(Launch(symbol, grid, SCATTER_THREADS, shared, calls))
        elif whole_product(kernel) is not None:
            text, grid = render_product(kernel, symbol, calls)
            launches.append(Launch(symbol, grid, THREADS, 0, calls, product))
        else:
            text, launch = render(kernel, symbol, calls, id(kernel) not in odd, is_loose)
            launches.append(launch)
        texts.append(text)
    parts = [texts[i : i + per_part] for i in range(0, len(texts), per_part)]
    return CudaSource(tuple("\n".join([PRELUDE, *p]) for p in parts), tuple(launches))


def render_kernel(kernel: Kernel) -> str:
    """One kernel's source, with what it calls."""
    if call_of(kernel) is not None:
        return f"// {kernel.name} is a library's"
    if is_scatter(kernel):
        return "\n".join([PRELUDE, render_scatter(kernel, kernel.name, 1)[0]])
    if whole_product(kernel) is not None:
        return "\n".join([PRELUDE, render_product(kernel, kernel.name, 1)[0]])
    return "\n".join([PRELUDE, render(kernel, kernel.name, 1)[0]])


def _most_calls(steps: Sequence[Step]) -> Counter[int]:
    """How often a phase calls each kernel at most: such calls are one launch."""
    found: Counter[int] = Counter()
    for step in steps:
        here = (
            Counter(id(c.kernel) for c in step.calls)
            if isinstance(step, Phase)
            else _most_calls(step.steps)
        )
        found |= here
    return found


def _unaligned(steps: Sequence[Step], itemsize: dict[str, int]) -> set[int]:
    """Kernels that are called on rows which do not start at whole packs."""
    found: set[int] = set()
    for step in steps:
        if not isinstance(step, Phase):
            found |= _unaligned(step.steps, itemsize)
            continue
        for call in step.calls:
            if any(a.row * itemsize[a.buffer] % PACK for a in call.arguments):
                found.add(id(call.kernel))
    return found
