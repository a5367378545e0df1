"""The source of a program: a function for each distinct kernel, and how each is launched."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from treadle.codegen.cuda.bundles import (
    TOGETHER,
    Written,
    bundle_text,
    bundles,
    lines_of,
    shares,
    sized,
)
from treadle.codegen.cuda.functions import function
from treadle.codegen.cuda.prelude import PRELUDE
from treadle.codegen.cuda.rounding import may_be_loose
from treadle.kernel.calls import call_of, product_of
from treadle.kernel.launch import Bundle, Launch
from treadle.kernel.nodes import Kernel
from treadle.kernel.program import Phase, Program, Step

PACK = 16  # bytes of the widest access
MOST_ARGUMENTS = 3840  # bytes: a launch takes 4 KB


@dataclass(frozen=True)
class CudaSource:
    """Text for the compiler, in parts that can be compiled apart; launches by entry."""

    parts: tuple[str, ...]
    launches: tuple[Launch, ...]
    bundles: tuple[Bundle, ...] = ()


def render_program(
    program: Program, library: bool = True, per_part: int = 24, together: bool = True
) -> CudaSource:
    """Kernels numbered as `Program.distinct` numbers them; whole products are a library's.

    Phases of small programs are one launch, unless each kernel is to be one.
    """
    kernels = program.distinct()
    odd = _unaligned(program.steps, {b.name: b.dtype.itemsize for b in program.buffers})
    most, is_loose = _most_calls(program.steps), may_be_loose(kernels)
    found = bundles(program) if library and together else ()
    beside = shares(found, kernels)
    every = Counter(id(call.kernel) for call in program.calls())
    bundled = sum((Counter(dict(p)) for b in found for p in b.phases), Counter[int]())
    parts, launches = dict[int, Written](), list[Launch]()
    texts: list[str] = []
    for i, kernel in enumerate(kernels):
        symbol, product, called = f"kernel_{i}", product_of(kernel), call_of(kernel)
        if called is not None:
            launches.append(Launch(symbol, 0, 0, routine=called))
            continue
        if product is not None and library:
            launches.append(Launch(symbol, 0, 0, product=product))
            continue
        if i in beside:
            is_even = id(kernel) not in odd
            parts[i] = lines_of(kernel, is_even, is_loose, TOGETHER, beside[i])
            if every[id(kernel)] == bundled[i]:
                launches.append(Launch(symbol, 0, 0))
                continue
        count = max(1, len(kernel.buffers))
        calls = max(1, min(most[id(kernel)], MOST_ARGUMENTS // (8 * count)))
        own = lines_of(kernel, id(kernel) not in odd, is_loose)
        launches.append(Launch(symbol, own.grid, own.block, own.shared, calls, product))
        texts.append(function(kernel, symbol, calls, own.block, own.lines, own.fewest))
    for bundle in found:
        texts.append(bundle_text(bundle, kernels, parts))
    found = tuple(sized(b, parts) for b in found)
    groups = [texts[i : i + per_part] for i in range(0, len(texts), per_part)]
    sources = tuple("\n".join([PRELUDE, *p]) for p in groups)
    return CudaSource(sources, tuple(launches), found)


def render_kernel(kernel: Kernel) -> str:
    """One kernel's source, with what it calls."""
    if call_of(kernel) is not None:
        return f"// {kernel.name} is a library's"
    own = lines_of(kernel, True, False)
    return "\n".join([PRELUDE, function(kernel, kernel.name, 1, own.block, own.lines)])


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
