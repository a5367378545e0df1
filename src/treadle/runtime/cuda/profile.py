"""What each launch of a program takes, by events between them.

The launches and their events are captured as one graph: launched one by one, small kernels would
wait for the host, and the wait would count as theirs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from treadle.base.errors import DeviceError
from treadle.kernel.launch import MatmulCall, MatrixFacts
from treadle.runtime.cuda.blas import Matmul, noise, timed
from treadle.runtime.cuda.device import Block, Event, checked, device
from treadle.runtime.cuda.launches import Calls, Runner
from treadle.runtime.executable import Ceilings, Timing

REPEATS = 3
COPIED = 256 << 20  # bytes: several times what a GPU's cache holds
LARGE = 8192  # rows and columns of a matmul that reaches what a GPU can do

Key = tuple[tuple[int, ...], str]  # entries of a launch, and its name


class _Recorder:
    """Events between the launches of a run, and what each launch calls."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.launches: list[tuple[Calls, str]] = []
        self._stream: Any = None

    def start(self, stream: Any) -> None:
        self.events, self.launches, self._stream = [], [], stream
        self._record()

    def note(self, calls: Calls, name: str) -> None:
        self.launches.append((calls, name))
        self._record()

    def _record(self) -> None:
        event = Event(timed=True)
        event.record_in_graph(self._stream)
        self.events.append(event)

    def calls(self) -> dict[Key, dict[int, int]]:
        """How often each entry was called, by launch."""
        found: dict[Key, dict[int, int]] = {}
        for calls, name in self.launches:
            counts = found.setdefault(_key(calls, name), {})
            for entry, count in calls:
                counts[entry] = counts.get(entry, 0) + count
        return found

    def seconds(self) -> dict[Key, float]:
        """What launches took in the last run, added up by their entries."""
        self.events[-1].wait()
        found: dict[Key, float] = {}
        spans = zip(self.launches, self.events, self.events[1:], strict=False)
        for (calls, name), start, end in spans:
            key = _key(calls, name)
            found[key] = found.get(key, 0.0) + end.milliseconds_since(start) / 1e3
        return found


def _key(calls: Calls, name: str) -> Key:
    return tuple(entry for entry, _ in calls), name


def timed_launches(runner: Runner, table: Sequence[int]) -> list[Timing]:
    """What each kernel takes in a run on some addresses, the best of a few runs."""
    recorder = _Recorder()

    def enqueue(stream: Any) -> None:
        recorder.start(stream)
        runner.enqueue(table, stream, recorder.note)

    here, graph = device(), runner.code.captured(enqueue)
    best: dict[Key, float] = {}
    try:
        for _ in range(REPEATS):
            checked(here.driver.cuGraphLaunch(graph, here.stream), "profile")
            for key, taken in recorder.seconds().items():
                best[key] = min(best.get(key, math.inf), taken)
    finally:
        runner.code.drop(graph)
    calls = recorder.calls()
    return [Timing(tuple(calls[key].items()), taken, key[1]) for key, taken in best.items()]


def timed_runs(runner: Runner, table: Sequence[int], least: float, together: int = 1) -> float:
    """What a run takes, so many `together` one graph: the mean of as many as take some time."""

    def enqueue(stream: Any) -> None:
        for _ in range(together):
            runner.enqueue(table, stream)

    here, graph = device(), runner.code.captured(enqueue)
    start, end, count = Event(timed=True), Event(timed=True), 1
    try:
        while True:
            start.record()
            for _ in range(count):
                checked(here.driver.cuGraphLaunch(graph, here.stream), "search")
            end.record()
            end.wait()
            taken = end.milliseconds_since(start) / 1e3
            if taken >= least:
                return taken / (count * together)
            count *= 4
    finally:
        runner.code.drop(graph)


def ceilings() -> Ceilings:
    """The rate of a large matmul in bfloat16, and the memory's by a copy on the device."""
    device().enter()
    try:
        flops = _matmul_rate()
    except DeviceError:  # no cuBLASLt: nothing to compare arithmetic with
        flops = math.inf
    return Ceilings(flops, _copy_rate())


def _matmul_rate() -> float:
    n = LARGE
    matrix = MatrixFacts("bfloat16", n, 1, 0, 0)
    matmul = Matmul(MatmulCall(n, n, n, 1, matrix, matrix, matrix))
    blocks = [Block(2 * n * n) for _ in range(3)]
    for block in blocks:
        block.fill(noise())
    target, left, right = (b.address for b in blocks)
    matmul.choose(target, left, right, 0)
    (milliseconds,) = timed([(matmul, (target, left, right, 0))])
    return 2 * n**3 / milliseconds * 1e3


def _copy_rate() -> float:
    size = min(COPIED, device().memory()[0] // 4)
    source, target = Block(size), Block(size)
    start, end = Event(timed=True), Event(timed=True)
    best = math.inf
    for _ in range(REPEATS):
        start.record()
        target.fill(source)
        end.record()
        end.wait()
        best = min(best, end.milliseconds_since(start) / 1e3)
    return 2 * size / best
