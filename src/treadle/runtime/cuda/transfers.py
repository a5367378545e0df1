"""Inputs in and results out, as part of the graph that is launched.

Slots are used one after the other: each has pinned memory for the inputs and for the results of
one launch, and graphs that copy the one in and the other out. So a launch is a copy in the host's
memory, one call that launches and one that marks the end.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from treadle.ir.types import TensorType
from treadle.kernel.target import GPU
from treadle.runtime.cuda.arrays import DeviceArray, Found
from treadle.runtime.cuda.device import Block, Event, Pinned, checked, device, padded

AHEAD, GRAPHS = GPU.launching.ahead, GPU.launching.graphs
COPIED = -1  # as an address: an array on the device whose elements are copied

Sources = tuple[int, ...]  # of each input of each step: 0 for the host's, or an address


class Pending:
    """Results of one launch on their way back."""

    def __init__(self, event: Event, memory: Pinned):
        self._event, self._memory = event, memory  # held: the program may be gone before
        self._kept: np.ndarray | None = None
        self._lock = threading.Lock()

    def bytes(self) -> np.ndarray:
        with self._lock:
            if self._kept is None:
                device().enter()
                self._event.wait()
                self._kept = self._memory.array.copy()
            return self._kept


class Later:
    """An output that is waited for when it is looked at."""

    __slots__ = ("_offset", "_pending", "_type")

    def __init__(self, pending: Pending, offset: int, type_: TensorType):
        self._pending, self._offset, self._type = pending, offset, type_

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        type_ = self._type
        part = self._pending.bytes()[self._offset : self._offset + type_.nbytes]
        array = part.view(type_.dtype.numpy).reshape(type_.shape).copy()
        return array if dtype is None else array.astype(dtype)

    def __float__(self) -> float:
        return float(self.__array__())

    def __bool__(self) -> bool:
        return bool(self.__array__())


class Captured(NamedTuple):
    """A graph that can be launched, and where its (last) step has each buffer."""

    handle: Any
    table: list[int]


class Slot:
    """Pinned memory and graphs of one launch."""

    def __init__(self, traffic: Traffic):
        self.inputs = Pinned(traffic.size)
        self.results = Pinned(traffic.results_size if traffic.comes_back else 0)
        self.event = Event()
        self.is_used = False
        self.graphs: dict[Sources, Captured] = {}
        self.holders: list[object] = []  # arrays of others that the launch reads
        self.pending: weakref.ref[Pending] | None = None
        self.views = [
            {
                n: self.inputs.array[start : start + t.nbytes].view(t.dtype.numpy).reshape(t.shape)
                for n, t, start in traffic.inputs_of(step)
            }
            for step in range(traffic.count)
        ]

    def wait(self) -> None:
        """Until its last launch is done; results that are still waited for are copied."""
        if not self.is_used:
            return
        self.event.wait()
        pending = None if self.pending is None else self.pending()
        if pending is not None:
            pending.bytes()
        self.holders.clear()

    def done(self) -> Pending:
        self.event.record()
        self.is_used = True
        pending = Pending(self.event, self.results)
        self.pending = weakref.ref(pending)
        return pending

    def add(self, key: Sources, graph: Captured, drop: Callable[[Any], None]) -> None:
        """One more graph; of too many the oldest goes."""
        while len(self.graphs) > GRAPHS:
            drop(self.graphs.pop(next(iter(self.graphs))).handle)
        self.graphs[key] = graph

    def forget(self, drop: Callable[[Any], None]) -> None:
        """Graphs are of addresses that are no longer so."""
        for graph in self.graphs.values():
            drop(graph.handle)
        self.graphs.clear()


class Traffic:
    """Inputs and results of some steps that are one launch."""

    def __init__(self, types: Mapping[str, TensorType], count: int, results_size: int):
        self.types, self.count = dict(types), count
        self.offsets: dict[str, int] = {}
        size = 0
        for name, type_ in types.items():
            self.offsets[name] = size
            size += padded(max(1, type_.nbytes))
        self.each, self.size = size, size * count
        self.results_size = results_size * count
        self.comes_back = results_size <= GPU.launching.small_results
        self.block = Block(self.size)
        self._results: Block | None = None
        self.slots = [Slot(self) for _ in range(AHEAD)]
        self.current = 0
        self.seen: dict[Sources, None] = {}  # addresses that came before

    @property
    def results(self) -> Block:
        """Where results are that are not lent; made when it is first needed."""
        if self._results is None:
            self._results = Block(self.results_size)
        return self._results

    def inputs_of(self, step: int) -> list[tuple[str, TensorType, int]]:
        return [(n, self.types[n], step * self.each + o) for n, o in self.offsets.items()]

    def next(self) -> Slot:
        slot = self.slots[self.current]
        self.current = (self.current + 1) % len(self.slots)
        slot.wait()
        return slot

    def fill(self, slot: Slot, rows: Sequence[Mapping[str, Any]], results: Sources = ()) -> Sources:
        """Copies of the host's arrays in pinned memory, and where those on the device are.

        Graphs are known by these, and by where results are lent.
        """
        sources: list[int] = []
        holders: list[object] = []
        for views, row in zip(slot.views, rows, strict=True):
            for name, view in views.items():
                given = row[name]
                if type(given) is np.ndarray:
                    view[...] = given
                    sources.append(0)
                    continue
                if type(given) is Found:
                    if not isinstance(given.holder, DeviceArray):  # ours follow our own stream
                        holders.append(given.holder)
                    sources.append(given.address)
                else:
                    view[...] = given
                    sources.append(0)
        slot.holders = holders
        wanted = tuple(sources)
        return self._direct(slot, wanted, results) if any(wanted) else wanted

    def _direct(self, slot: Slot, wanted: Sources, results: Sources) -> Sources:
        """Arrays on the device are read where they are if they came before, or else copied."""
        if wanted + results in slot.graphs:
            return wanted
        if wanted in self.seen and len(slot.graphs) < GRAPHS:
            return wanted
        if len(self.seen) < 64 * GRAPHS:
            self.seen[wanted] = None
        driver, stream = device().driver, device().stream
        steps = (p for i in range(self.count) for p in self.inputs_of(i))
        for (_, type_, start), source in zip(steps, wanted, strict=True):
            if source:
                target = self.block.address + start
                checked(driver.cuMemcpyDtoDAsync(target, source, type_.nbytes, stream), "inputs")
        return tuple(COPIED if source else 0 for source in wanted)

    def addresses(self, step: int, sources: Sources) -> dict[str, int]:
        """Of one step's inputs: those of the device's arrays, or of our own copies."""
        here = sources[step * len(self.types) : (step + 1) * len(self.types)]
        return {
            n: source if source > 0 else self.block.address + start
            for (n, _, start), source in zip(self.inputs_of(step), here, strict=True)
        }

    def copy_in(self, slot: Slot, sources: Sources, stream: Any) -> None:
        """Into the graph that is being captured: what the host gives."""
        driver = device().driver
        every = [p for i in range(self.count) for p in self.inputs_of(i)]
        parts = [
            (start, t.nbytes)
            for (_, t, start), source in zip(every, sources, strict=True)
            if not source and t.nbytes
        ]
        if parts and not any(sources):  # all of it is contiguous
            parts = [(parts[0][0], parts[-1][0] + parts[-1][1] - parts[0][0])]
        for start, nbytes in parts:
            copied = driver.cuMemcpyHtoDAsync(
                self.block.address + start, slot.inputs.address + start, nbytes, stream
            )
            checked(copied, "inputs")

    def copy_out(self, slot: Slot, stream: Any) -> None:
        driver = device().driver
        if self.results_size:
            copied = driver.cuMemcpyDtoHAsync(
                slot.results.address, self.results.address, self.results_size, stream
            )
            checked(copied, "results")

    def forget(self, drop: Callable[[Any], None]) -> None:
        for slot in self.slots:
            slot.wait()
            slot.forget(drop)
