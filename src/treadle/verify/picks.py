"""Which iterations of a loop are looked at: first, last, those at guards, and some others."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from treadle.kernel.nodes import For, Store, Within
from treadle.kernel.traverse import subvalues, values_of, walk

OTHERS = 2  # iterations beside those at the ends and at guards
MORE = 10  # the same, of loops that run as one array
AT_GUARDS = 4


class Picks:
    """The same iterations of a loop whenever it runs; stated in what a check records."""

    def __init__(self, seed: int = 0):
        self.seed, self.fewest = seed, 4
        self.ran: dict[int, tuple[For, set[int]]] = {}
        self.found: dict[int, tuple[For, tuple[int, ...]]] = {}

    def of(self, loop: For, is_vector: bool = False) -> tuple[int, ...]:
        if id(loop) not in self.found:
            near = sorted(set(_at_guards(loop)))[:AT_GUARDS]
            others = MORE if is_vector else OTHERS
            chosen = self._chosen(loop.var.extent, loop.var.name, near, others)
            self.found[id(loop)] = loop, chosen
        return self.found[id(loop)][1]

    def note(self, loop: For, iteration: int) -> None:
        """An iteration of a loop of which some that were chosen may be left out."""
        loop, ran = self.ran.setdefault(id(loop), (loop, set()))
        ran.add(iteration)

    def along(self, count: int) -> tuple[int, ...]:
        """Rows or columns of a matrix."""
        return self._chosen(count, "matrix", [], OTHERS)

    def _chosen(self, count: int, name: str, near: list[int], other: int) -> tuple[int, ...]:
        rng = np.random.default_rng([self.seed, count, *name.encode()])
        others = rng.integers(0, count, other).tolist() if count else []
        return tuple(sorted(i for i in {0, count - 1, *near, *others} if 0 <= i < count))

    @property
    def record(self) -> dict[str, list[int]]:
        """As JSON has it: iterations by the name of the loop's variable."""
        every = self.found | {key: (loop, tuple(ran)) for key, (loop, ran) in self.ran.items()}
        return {loop.var.name: sorted(chosen) for loop, chosen in every.values()}


def _at_guards(loop: For) -> Iterator[int]:
    """Iterations on both sides of where a guard begins or ends to hold."""
    for guard in _guards(loop):
        step = guard.index.factor_of(loop.var)
        if not step:
            continue
        low, high = guard.index.range
        span = abs(step) * (loop.var.extent - 1)
        for edge in (guard.low, guard.high):
            for rest in (low if step > 0 else low + span, (high - span) if step > 0 else high):
                at = (edge - rest) // step
                yield from (i for i in (at - 1, at, at + 1) if 0 <= i < loop.var.extent)


def _guards(loop: For) -> Iterator[Within]:
    for s in walk(loop.body):
        if isinstance(s, Store) and s.guard is not None:
            yield s.guard
        for value in values_of(s):
            yield from (v for v in subvalues(value) if isinstance(v, Within))
