"""What cuDNN computes in a program: each call with its plan, from before or made now."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from treadle.kernel.launch import Launch, LibraryLaunch
from treadle.runtime.cuda.attention import planned_attention
from treadle.runtime.cuda.conv import (
    ConvCall,
    PlannedConvolutions,
    every_planned,
    unpacked_convolution,
)
from treadle.runtime.cuda.dnn import DnnCall, unpacked
from treadle.runtime.cuda.workers import begun_workers, close_workers

Called = DnnCall | ConvCall


class LibraryCalls:
    """Calls by entry, with plans of before; those that have none are being planned."""

    def __init__(
        self, launches: Sequence[Launch], plans: Mapping[int, bytes], is_deterministic: bool
    ):
        calls = {i: launch.called for i, launch in enumerate(launches) if launch.called is not None}
        unpacked = {i: _unpacked(call, plans[i]) for i, call in calls.items() if i in plans}
        self._known: dict[int, Called] = {i: made for i, made in unpacked.items() if made}
        new = {i: call for i, call in calls.items() if i not in self._known}
        convolutions = {i: call for i, call in new.items() if "conv" in call.name}
        self._attention = {i: call for i, call in new.items() if i not in convolutions}
        self._is_deterministic, self._workers = is_deterministic, begun_workers()
        self._convolutions: PlannedConvolutions | None = None
        if convolutions:
            workers = self._workers
            self._convolutions = PlannedConvolutions(convolutions, is_deterministic, workers)

    def chosen(
        self, plans: dict[int, bytes], memory: Callable[[int], list[int]]
    ) -> dict[int, Called]:
        """All of them; what was planned, on memory for an entry, is added to the plans."""
        try:
            found: dict[int, Called] = {
                **every_planned(
                    self._attention, lambda _, call: planned_attention(call, self._is_deterministic)
                )
            }
            if self._convolutions is not None:
                found |= self._convolutions.fastest(memory)
        finally:
            self.close()
        for i, made in found.items():
            plan = made.packed()
            plans |= {i: plan} if plan else {}
        return self._known | found

    def close(self, waits: bool = False) -> None:
        """Processes that plan end; `waits` until they are gone. What is left is planned here."""
        close_workers(self._workers, waits)


def _unpacked(call: LibraryLaunch, plan: bytes) -> Called | None:
    return unpacked_convolution(call, plan) if "conv" in call.name else unpacked(call, plan)
