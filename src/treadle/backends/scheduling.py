"""A graph to a program, within a memory budget where one is asked for."""

from __future__ import annotations

from dataclasses import replace

from treadle.base.errors import OutOfMemoryError
from treadle.base.memory import shown
from treadle.compile_report import CompileOptions
from treadle.ir.graph import Graph
from treadle.kernel.program import Program
from treadle.kernel.target import CPU, Target
from treadle.memory.budget import reduced
from treadle.memory.plan import plan_buffers
from treadle.schedule.lower import lower
from treadle.schedule.schedule import mapped, schedule


def scheduled(
    graph: Graph, options: CompileOptions, target: Target, panel: int = CPU.panel
) -> Program:
    """The program of a graph as the options ask for it.

    A budget is one of the arena. What runs again comes from a forecast of what lives at one time;
    an arena with gaps is a little larger, so that less is asked for until it fits.
    """
    in_place, budget = not options.debug, options.memory_budget
    if budget is None:
        return schedule(graph, options.optimize, panel, in_place, target)
    # A GPU's kernels round less inside than between them: only whole ones give the same bits.
    with_parts = target.mapping is None
    lowered = lower(graph, options.optimize, panel, in_place, target, with_parts)
    whole = mapped(lowered, options.optimize, target)
    arena = plan_buffers(whole, target).size
    most = budget if isinstance(budget, int) else int(budget * arena)
    if arena <= most:
        return whole
    margin, sizes = most // target.recomputation.part, [arena]
    wanted = most - margin
    for left in reversed(range(target.recomputation.attempts)):
        found = mapped(reduced(lowered, wanted, target), options.optimize, target, wanted)
        sizes.append(plan_buffers(found, target).size)
        if sizes[-1] <= most:
            return replace(found, uncut=arena)
        # The last attempt is all that can be had: choices for less may be better or worse.
        wanted = max(1, wanted - max(sizes[-1] - most, margin)) if left > 1 else 1
    least = min(sizes)
    raise OutOfMemoryError(
        "compile",
        f"memory_budget = {budget!r} is {shown(most)} of {shown(arena)} that the program's "
        f"temporary values take; with all recomputation that helps they take {shown(least)}",
        f"Give it at least {least:,} bytes or {least / arena:.3f}, a smaller batch, or "
        "accumulate micro-batches.",
    )
