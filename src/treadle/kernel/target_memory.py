"""The part of a target that the plan of memory asks for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Arena:
    """How much larger the arena may be so that the operands of a batch lie evenly (memory/plan)."""

    part: int = 32  # of the arena, one of so many parts: chosen, 3 %
    nbytes: int = 32 << 20  # in any case: chosen, little beside a GPU's memory


@dataclass(frozen=True, slots=True)
class Recomputation:
    """What kernels are run once more for, under a memory budget (memory/budget)."""

    # Bytes of a buffer that is worth a thought: chosen, a thousandth of what small steps hold.
    least_bytes: int = 1 << 14
    # Of a call's price, one of so many parts is that of running it later, and not beside others.
    moved_share: int = 16  # chosen
    trials: int = 256  # choices that are looked at, each a few milliseconds: chosen
    # An arena has gaps: how often less is asked for, and how much less at least, of the budget.
    attempts: int = 5  # chosen
    part: int = 64  # chosen


ARENA, RECOMPUTATION = Arena(), Recomputation()
