"""A chain on the GPU: one captured graph where NCCL exchanges, and otherwise several.

Without NCCL what is exchanged goes through pinned memory of the host. A graph then ends with the
copies out, the host exchanges, and the next graph begins with the copies in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np

from treadle.runtime.chain import (
    RESULTS,
    Chain,
    Copy,
    Exchange,
    Gather,
    Link,
    Place,
    Run,
    Staged,
    Swap,
    aligned,
    input_name,
)
from treadle.runtime.cuda.arena import shared_arena
from treadle.runtime.cuda.captures import captured
from treadle.runtime.cuda.device import Block, Pinned, checked, device
from treadle.runtime.cuda.launches import ChainedGraph
from treadle.runtime.cuda.nccl import NcclCommunicator
from treadle.runtime.cuda.program import CudaProgram
from treadle.runtime.cuda.transfers import Captured, Later, Slot, Sources, Traffic
from treadle.runtime.cuda.values import DeviceValues
from treadle.runtime.memory import Values


class Staging:
    """Pinned memory of one exchange, what is given and what is taken one part after the other."""

    def __init__(self, exchange: Exchange, ranks: int):
        self.exchange, self.ranks = exchange, ranks
        sizes = [(self._given(p), ranks * p.nbytes) for p in exchange.parts]
        self._given_memory = Pinned(sum(aligned(g) for g, _ in sizes))
        self._taken_memory = Pinned(sum(aligned(t) for _, t in sizes))
        self.parts: list[tuple[Gather | Swap, int, int]] = []  # and where they are
        self.arrays: list[tuple[bool, np.ndarray, np.ndarray]] = []
        given = taken = 0
        for part, (out, into) in zip(exchange.parts, sizes, strict=True):
            self.parts.append(
                (part, self._given_memory.address + given, self._taken_memory.address + taken)
            )
            arrays = (
                self._given_memory.array[given : given + out],
                self._taken_memory.array[taken : taken + into],
            )
            self.arrays.append((isinstance(part, Gather), *arrays))
            given, taken = given + aligned(out), taken + aligned(into)

    def _given(self, part: Gather | Swap) -> int:
        return part.nbytes if isinstance(part, Gather) else self.ranks * part.nbytes


@dataclass(frozen=True, slots=True)
class Segment:
    """Links that are one launch: what comes in from the host before, and goes out after."""

    links: tuple[Link, ...]
    before: Staging | None
    after: Staging | None


class CudaChain:
    """A chain with its memory; `direct` exchanges on the device, `staged` through the host."""

    def __init__(
        self, chain: Chain, ranks: int, direct: NcclCommunicator | None, staged: Staged | None
    ):
        self.chain, self._direct, self._staged = chain, direct, staged
        self._device = device()
        self._device.enter()
        self._segments = self._cut(ranks)
        each = aligned(-(-chain.buffers[RESULTS] // max(1, chain.rows)))
        self._traffic = Traffic(chain.inputs, chain.rows, each)
        assert self._traffic.comes_back, "results of a chain are numbers"
        self._own = {n: Block(max(1, size)) for n, size in chain.buffers.items() if n != RESULTS}
        for block in self._own.values():
            block.write(np.zeros(block.nbytes, np.uint8))
        self._programs = {id(k.program): k.program for k in chain.links if isinstance(k, Run)}
        self._arena = shared_arena()
        self._bound: tuple[object, ...] = ()
        self.launches, self.calls_made = 0, 0  # launches of a call

    def _cut(self, ranks: int) -> list[Segment]:
        """One segment, or one more for every exchange that goes through the host."""
        if self._direct is not None:
            return [Segment(self.chain.links, None, None)]
        found: list[Segment] = []
        links: list[Link] = []
        before: Staging | None = None
        for link in self.chain.links:
            if isinstance(link, Exchange):
                after = Staging(link, ranks)
                found.append(Segment(tuple(links), before, after))
                links, before = [], after
            else:
                links.append(link)
        return [*found, Segment(tuple(links), before, None)]

    def run(
        self, values: Values, version: int, rows: Sequence[Mapping[str, Any]]
    ) -> dict[str, Any]:
        """One call; results are waited for when they are looked at."""
        assert isinstance(values, DeviceValues)
        self._device.enter()
        room = self._arena.block()  # held until the last launch
        self._rebind(values, room)
        slot = self._traffic.next()
        sources = self._traffic.fill(slot, rows)
        graphs = slot.graphs.get(sources)
        if graphs is None:
            graphs = self._captured(values, slot, sources, room)
            slot.add(sources, graphs, _drop)
        self.launches = 0
        for segment, graph in zip(self._segments, graphs.handle, strict=True):
            self._launch(segment, graph)
        self.calls_made += 1
        pending = slot.done()
        return {n: Later(pending, at, t) for n, (at, t) in self.chain.results.items()}

    def _launch(self, segment: Segment, graph: ChainedGraph) -> None:
        launched = self._device.driver.cuGraphLaunch(graph.handle, self._device.stream)
        checked(launched, "step")
        self.launches += 1
        if segment.after is not None:
            assert self._staged is not None
            self._device.wait()
            self._staged.exchange(segment.after.exchange.name, segment.after.arrays)

    def _rebind(self, values: DeviceValues, room: Block) -> None:
        """Graphs are captured anew if the values or the arena have moved."""
        bound = (values, values.layout, room.address)
        if bound != self._bound:
            self._traffic.forget(_drop)
            self._bound = bound

    def _captured(
        self, values: DeviceValues, slot: Slot, sources: Sources, room: Block
    ) -> Captured:
        """The graphs of one slot, from the copy of the inputs to that of the results."""
        places = self._places(values, sources)
        programs = [p for p in self._programs.values() if isinstance(p, CudaProgram)]
        for link in self.chain.links:
            if isinstance(link, Run) and isinstance(link.program, CudaProgram):
                link.program.prepare(link.results)
        found = []
        for number, segment in enumerate(self._segments):

            def enqueue(stream: Any, number: int = number, segment: Segment = segment) -> None:
                if number == 0:
                    self._traffic.copy_in(slot, sources, stream)
                self._enqueue(segment, places, values, room.address, stream)
                if number == len(self._segments) - 1:
                    self._traffic.copy_out(slot, stream)

            with ExitStack() as stack:
                for program in programs:
                    stack.enter_context(program.in_turn())
                graph = captured(enqueue)
            found.append(ChainedGraph(graph, [p.code for p in programs]))
        return Captured(found, [])

    def _places(self, values: DeviceValues, sources: Sources) -> dict[str, int]:
        """Addresses of all buffers; the session's come first, then inputs, then our own."""
        found = {n: values.place(n).address for n in values}
        for row in range(self.chain.rows):
            own = self._traffic.addresses(row, sources)
            found |= {input_name(row, leaf): address for leaf, address in own.items()}
        found |= {n: b.address for n, b in self._own.items()}
        return found | {RESULTS: self._traffic.results.address}

    def _enqueue(
        self,
        segment: Segment,
        places: Mapping[str, int],
        values: DeviceValues,
        room: int,
        stream: Any,
    ) -> None:
        def at(place: Place) -> int:
            return places[place.buffer] + place.offset

        driver = self._device.driver
        if segment.before is not None:
            for part, _, taken in segment.before.parts:
                nbytes = segment.before.ranks * part.nbytes
                checked(driver.cuMemcpyHtoDAsync(at(part.taken), taken, nbytes, stream), "exchange")
        for link in segment.links:
            match link:
                case Run(program, leaves, results):
                    assert isinstance(program, CudaProgram)
                    given = {n: at(leaves.get(n, Place(n))) for n in program.leaf_names}
                    program.enqueue(given, {n: at(p) for n, p in results.items()}, room, stream)
                case Copy(target, source, nbytes):
                    copied = driver.cuMemcpyDtoDAsync(at(target), at(source), nbytes, stream)
                    checked(copied, "copy")
                case Exchange(parts=parts):
                    self._exchange([(p, at(p.given), at(p.taken)) for p in parts], stream)
        if segment.after is not None:
            for part, given_at, _ in segment.after.parts:
                nbytes = segment.after._given(part)
                copied = driver.cuMemcpyDtoHAsync(given_at, at(part.given), nbytes, stream)
                checked(copied, "exchange")

    def _exchange(self, parts: Sequence[tuple[Gather | Swap, int, int]], stream: Any) -> None:
        assert self._direct is not None
        with self._direct.group():
            for part, given, taken in parts:
                call = (
                    self._direct.all_gather if isinstance(part, Gather) else self._direct.all_to_all
                )
                call(given, taken, part.nbytes, stream)


def _drop(graphs: Sequence[ChainedGraph]) -> None:
    for graph in graphs:
        graph.drop()
