"""A graph to a program, within a memory budget where one is asked for."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from treadle.base.errors import OutOfMemoryError
from treadle.base.memory import shown
from treadle.compile_report import CompileOptions
from treadle.ir.graph import Graph
from treadle.kernel import cost
from treadle.kernel.nodes import Kernel
from treadle.kernel.program import Program
from treadle.kernel.target import CPU, Target
from treadle.memory.budget import reduced
from treadle.memory.plan import plan_buffers
from treadle.schedule.lower import lower
from treadle.schedule.schedule import mapped, schedule

DEEP = (0.5, 0.4, 0.3)  # of an arena: what is asked for at last, where nothing else helped: chosen


def scheduled(
    graph: Graph,
    options: CompileOptions,
    target: Target,
    panel: int = CPU.panel,
    held: int = 0,
    threads: int = 0,
) -> Program:
    """The program of a graph as the options ask for it.

    A budget in bytes is one of all that a step takes: the arena, constants and results, scratch of
    so many threads, and what is held beside the program. A part is one of the arena, as nothing
    else can be cut. What runs again comes from a forecast of what lives at one time; an arena with
    gaps is a little larger, so that less is asked for until it fits.
    """
    in_place, budget = not options.debug, options.memory_budget
    if budget is None:
        return schedule(graph, options.optimize, panel, in_place, target)
    # A GPU's kernels round less inside than between them: only whole ones give the same bits.
    with_parts = target.mapping is None
    lowered = lower(graph, options.optimize, panel, in_place, target, with_parts)
    whole = mapped(lowered, options.optimize, target)
    arena = plan_buffers(whole, target).size
    beside = _outside(whole, threads) + held
    all_bytes, is_part = arena + beside, isinstance(budget, float)
    most = int(budget * arena) + beside if is_part else int(budget)
    # What libraries work in is known later, and is no part of an arena.
    limit = 0 if is_part else most
    if all_bytes <= most:
        return replace(whole, most=limit, held=held)
    sizes = [all_bytes]
    for wanted in _wanted(arena, most - beside, target, sizes):
        found = mapped(reduced(lowered, wanted, target), options.optimize, target, wanted)
        sizes.append(plan_buffers(found, target).size + _outside(found, threads) + held)
        if sizes[-1] <= most:
            return replace(found, uncut=arena, most=limit, held=held)
    least = min(sizes)
    part = math.ceil(1000 * (least - beside) / arena) / 1000
    raise OutOfMemoryError(
        "compile",
        f"memory_budget = {budget!r} lets the step take {shown(most)} of {shown(all_bytes)}; "
        f"with all recomputation that helps it takes {shown(least)}, of which {shown(held)} are "
        "parameters and other values that stay",
        f"Give it at least {least:,} bytes, or {part:.3f} of what is temporary, a smaller batch, "
        "or accumulate micro-batches.",
    )


def _wanted(arena: int, room: int, target: Target, sizes: Sequence[int]) -> Iterator[int]:
    """Bytes alive at one time to ask for, one after the other, until an arena has room.

    `sizes` are what a step took with those before, and without any. Choices for less may be better
    or worse: at last some are tried for parts of the arena.
    """
    margin = max(0, room) // target.recomputation.part
    wanted = max(1, room - margin)
    for _ in range(target.recomputation.attempts):
        yield wanted
        too_much = sizes[-1] - (sizes[0] - arena) - room
        wanted = max(1, wanted - max(too_much, margin))
    yield from (int(part * arena) for part in DEEP)


def is_leaner(graph: Graph, other: Graph, options: CompileOptions, target: Target) -> bool:
    """Whether a graph's program makes no more calls and moves no more bytes than another one's, or
    takes clearly less by the target's costs.

    What fuses with what is known of programs alone: graphs whose nodes cost less may have kernels
    that move more.
    """
    plain = replace(options, memory_budget=None)
    programs = [scheduled(g, plain, target) for g in (graph, other)]
    ours, theirs = ([(c.kernel, n) for c, n in p.counted_calls()] for p in programs)
    seconds, before = (sum(n * _cost(k, target) for k, n in calls) for calls in (ours, theirs))
    if seconds < (1 - target.costs.clear_gain) * before:
        return True
    moved, moved_before = (sum(n * cost.traffic(k) for k, n in calls) for calls in (ours, theirs))
    return sum(n for _, n in ours) <= sum(n for _, n in theirs) and moved <= moved_before


def _cost(kernel: Kernel, target: Target) -> float:
    """Picoseconds of a call: what it computes or moves, whichever takes longer."""
    costs = target.costs
    is_narrow = any(b.dtype.is_float and b.dtype.itemsize < 4 for b in kernel.inputs)
    flops = cost.flops(kernel) * (costs.narrow_flop if is_narrow else costs.flop)
    return costs.launch + max(flops, cost.traffic(kernel) * costs.byte)


def _outside(program: Program, threads: int) -> int:
    """Bytes of a program beside its arena: constants, results, scratch of threads."""
    scratch = max((cost.scratch_bytes(k) for k in program.distinct()), default=0)
    results = sum(t.nbytes for o, _, t in program.outputs if o.name not in program.updated)
    return sum(a.nbytes for _, a in program.constants) + results + threads * scratch
