"""Many steps without returning to Python between them: batches that one native call can take."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from treadle.base.errors import TreadleError
from treadle.base.trees import Tree
from treadle.frontend.scopes import RANDOM_STATE
from treadle.optim.append import Mode
from treadle.runtime.executable import updates_in_place
from treadle.runtime.session import Session
from treadle.step.batches import ByShape
from treadle.step.index_guard import Unlooked
from treadle.step.programs import UNWATCHED, Variants

MOST_IN_A_CALL = 64  # steps
LONGEST_CALL = 0.1  # seconds
Told = tuple[Mapping[str, Any], Mode]


@dataclass(frozen=True, slots=True)
class NativeRuns:
    """Steps on several batches, of a step whose counts and random keys are asked for."""

    session: Session
    programs: ByShape[Any]
    unlooked: Unlooked
    key: Callable[[int], np.ndarray]  # of the step that comes so many steps later
    advance: Callable[[int], None]  # so many steps were made

    @property
    def _on_device(self) -> bool:
        return not self.session.memory.is_host

    def outputs(
        self, batches: Iterable[Tree], once: Callable[[Tree], Told], stays_native: bool
    ) -> Iterator[Told]:
        """Of a step for each batch; `once` makes those that no native call can take."""
        done = 0
        if isinstance(batches, (list, tuple)) and stays_native:
            # A device's calls return at once: their time says nothing of the steps.
            size = MOST_IN_A_CALL if self._on_device else 1
            while done < len(batches):
                start = time.perf_counter()
                found = self._in_one_call(batches[done : done + size])
                if not found:
                    break
                yield from found
                done += len(found)
                each = (time.perf_counter() - start) / len(found)
                if not self._on_device:  # so many that Ctrl-C is not kept waiting
                    size = max(1, min(MOST_IN_A_CALL, int(LONGEST_CALL / each)))
        for batch in batches[done:] if isinstance(batches, (list, tuple)) else batches:
            yield once(batch)

    def _in_one_call(self, batches: Sequence[Tree]) -> list[Told]:
        """Steps on the first of some batches, those that fit one program; none if that cannot."""
        with self.session.lock:
            if self._on_device:
                self.unlooked.look(MOST_IN_A_CALL)
            variants, first = self.programs.get("run", batches[0])
            is_guarded = self._on_device and variants.indices.are_there(first)
            program = variants.step(Mode.UPDATE, UNWATCHED)
            if not updates_in_place(program) or not program.can_repeat:
                return []
            rows = [self._with_key(variants, first, 0)]
            for i, batch in enumerate(batches[1:], 1):
                try:
                    others, arrays = self.programs.get("run", batch)
                except TreadleError:
                    break  # it is refused when its turn comes
                is_there = self._on_device and variants.indices.are_there(arrays)
                if others is not variants or is_there != is_guarded:
                    break
                rows.append(self._with_key(variants, arrays, i))
            before = program.runs
            try:
                found: list[Any] = self.session.run_several(program, rows)
            finally:
                self.advance(program.runs - before)
            if is_guarded:
                pairs = zip(rows, found, strict=True)
                found = [self.unlooked.add("run", variants, r, outputs) for r, outputs in pairs]
            return [(outputs, Mode.UPDATE) for outputs in found]

    def _with_key(
        self, variants: Variants, arrays: dict[str, np.ndarray], later: int
    ) -> dict[str, np.ndarray]:
        return arrays | {RANDOM_STATE: self.key(later)} if variants.is_random else arrays
