"""Native programs on the CPU: memory, and one call that runs everything."""

from __future__ import annotations

import ctypes
import itertools
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from treadle.ir.graph import Graph, OutputKind
from treadle.ir.types import TensorType
from treadle.kernel.choices import Chosen
from treadle.kernel.plan import Plan, PlannedRepeat, PlannedStep
from treadle.runtime.cpu.native import LibraryCall, host
from treadle.runtime.cpu.script import (
    LINE,
    RUNS,
    WORDS,
    Script,
    planned_calls,
    script_words,
)
from treadle.runtime.cpu.targets import Target
from treadle.runtime.cpu.threads import pool
from treadle.runtime.executable import Timing
from treadle.runtime.held import aligned, aligned_copy


def _new(type_: TensorType) -> np.ndarray:
    return aligned(type_.nbytes).view(type_.dtype.numpy).reshape(type_.shape)


class BoundScript(NamedTuple):
    """A program's script on a table of addresses; where arguments are of each slot."""

    script: Script
    table: np.ndarray
    uses: Mapping[int, np.ndarray]
    own: frozenset[int]  # slots of outputs that are nothing else

    def bind(self, slot: int, address: int) -> None:
        self.table[slot] = address
        if slot in self.uses:
            self.script.arguments[self.uses[slot], 0] = address


class NativeProgram:
    """A plan with its code and its memory.

    Leaves are read where they are; those that the plan updates are written there. Outputs are
    copies, which the next run does not change. One call runs at a time.
    """

    is_in_place, shares_arena = True, False

    def __init__(
        self,
        graph: Graph,
        plan: Plan,
        objects: Sequence[bytes],
        constants: Mapping[str, np.ndarray],
        threads: int,
        target: Target | None = None,
        chosen: Chosen = (),
    ):
        self.graph, self.plan, self.threads = graph, plan, threads
        self.target, self.chosen = target or host(), chosen
        self._library = LibraryCall(list(objects))
        self._lock = threading.Lock()
        self._arena = aligned(plan.arena)
        self._table = np.zeros(max(1, len(plan.slots)), np.int64)
        for i, slot in enumerate(plan.slots):
            if slot.offset >= 0:
                self._table[i] = self._arena.ctypes.data + slot.offset
        self._arrays: dict[int, np.ndarray] = {}  # by slot: constants, leaves, outputs
        for constant in plan.constants:
            self._keep(constant.slot, aligned_copy(constants[constant.name]))
        leaves = {slot for _, slot, _ in plan.leaves}
        self._own: dict[int, TensorType] = {}  # slots that are outputs and nothing else
        for output in plan.outputs:
            if output.slot not in leaves and output.slot not in self._arrays:
                self._own[output.slot] = output.type
                self._keep(output.slot, _new(output.type))
        self._prepare()
        self._held: tuple[object, int] = (None, -1)
        wanted = [i for i, o in enumerate(plan.outputs) if o.kind is not OutputKind.UPDATE]
        names = [f"{plan.outputs[i].kind.value}:{plan.outputs[i].name}" for i in wanted]
        self.results = names, wanted  # what is not an update
        self.prints = [o.name for o in plan.outputs if o.kind is OutputKind.PRINT]

    def _keep(self, slot: int, array: np.ndarray) -> None:
        self._arrays[slot] = array
        self._table[slot] = array.ctypes.data

    def _prepare(self) -> None:
        """The script, with all that it points to."""
        symbols = self._library.addresses([e.symbol for e in self.plan.entries])
        words, self._arguments, calls, _ = script_words(self.plan, self._table, symbols)
        self._scratch = aligned(self.plan.scratch * self.threads)
        counters = (2 * calls + 1) * self.threads * LINE
        self._counters = aligned(counters)
        head = np.zeros(WORDS, np.int64)
        head[:4] = (
            self._scratch.ctypes.data,
            self.plan.scratch,
            self._counters.ctypes.data,
            calls * LINE,
        )
        self._script = np.concatenate([head, words])
        self._address = self._script.ctypes.data
        self._uses: dict[int, np.ndarray] = {}  # by slot: the arguments that point to it
        slots = self._slots_of_arguments()
        for slot in {*self._own, *(s for _, s, _ in self.plan.leaves)}:
            self._uses[slot] = np.flatnonzero(slots == slot)
        self._leaves = {name: (slot, type_) for name, slot, type_ in self.plan.leaves}

    def script(self) -> BoundScript:
        """A script of its own memory, whose arguments others bind."""
        table = self._table.copy()
        symbols = self._library.addresses([e.symbol for e in self.plan.entries])
        words = script_words(self.plan, table, symbols)
        slots = self._slots_of_arguments()
        uses = {int(s): np.flatnonzero(slots == s) for s in set(slots.tolist())}
        return BoundScript(words, table, uses, frozenset(self._own))

    def _slots_of_arguments(self) -> np.ndarray:
        return np.array([s for c in planned_calls(self.plan.steps) for s in c.slots], np.int64)

    @property
    def runs(self) -> int:
        """How often it ran to its end: counted by the machine code itself, whatever interrupts."""
        return int(self._script[RUNS])

    @property
    def workspace(self) -> int:
        """Bytes of scratch, of all threads."""
        return self.plan.scratch * self.threads

    def run(self, values: Mapping[str, np.ndarray]) -> tuple[np.ndarray, ...]:
        """All outputs, in order; the values given stay as they are."""
        with self._lock:
            self._held = (None, -1)
            self._bind_copies(values)
            pool(self.threads).run(self._address)
            return self._outputs(range(len(self.plan.outputs)))

    def seconds(self, values: Mapping[str, np.ndarray], least: float) -> float:
        """What a run takes by the clock, the mean of as many as take some time."""
        with self._lock:
            self._held = (None, -1)
            self._bind_copies(values)
            threads, count = pool(self.threads), 0
            threads.run(self._address)  # memory is touched, caches are warm
            start = time.perf_counter()
            while (taken := time.perf_counter() - start) < least or not count:
                threads.run(self._address)
                count += 1
            return taken / count

    def _bind_copies(self, values: Mapping[str, np.ndarray]) -> None:
        """Leaves as they are given; copies of those that are written, which may be new."""
        read = self.graph.leaves
        for name, _, type_ in self.plan.leaves:
            given = values[name] if name in read else np.zeros(type_.shape)
            array = np.ascontiguousarray(given, type_.dtype.numpy)
            self._bind(name, aligned_copy(array) if name in self.plan.updated else array)

    def run_on(
        self,
        owner: object,
        version: int,
        values: Mapping[str, np.ndarray],
        inputs: Mapping[str, np.ndarray],
        wanted: Sequence[int],
        stays: bool = False,
    ) -> tuple[np.ndarray, ...]:
        """Some outputs; values that the owner holds are updated in place.

        They are bound once for each version of the owner's. With `stays` outputs are the memory
        that they were computed in; the next run has other.
        """
        with self._lock:
            self._hold(owner, version, values, inputs)
            for name, array in inputs.items():
                if name in self._leaves:
                    self._bind(name, self._fitted(name, array))
            pool(self.threads).run(self._address)
            return self._handed_over(wanted) if stays else self._outputs(wanted)

    def _handed_over(self, wanted: Sequence[int]) -> tuple[np.ndarray, ...]:
        """Outputs without a copy, where their memory is theirs alone."""
        found = []
        taken: set[int] = set()
        for i in wanted:
            output = self.plan.outputs[i]
            is_whole = self._own.get(output.slot) == output.type and output.slot not in taken
            found.append(self._result(i) if is_whole else self._result(i).copy())
            taken.update([output.slot] if is_whole else [])
        for slot in taken:
            self._keep(slot, _new(self._own[slot]))
            self._arguments[self._uses[slot], 0] = self._table[slot]
        return tuple(found)

    @property
    def can_repeat(self) -> bool:
        """Whether several runs can go in one call: results are its own, and nothing is printed."""
        leaves = {slot for _, slot, _ in self.plan.leaves}
        own = all(self.plan.outputs[i].slot not in leaves for i in self.results[1])
        return own and not self.prints

    def run_several_on(
        self,
        owner: object,
        version: int,
        values: Mapping[str, np.ndarray],
        rows: Sequence[Mapping[str, np.ndarray]],
        wanted: Sequence[int],
    ) -> list[tuple[np.ndarray, ...]]:
        """`run_on` for each row of inputs, in one native call."""
        with self._lock:
            self._hold(owner, version, values, rows[0])
            names = [n for n in rows[0] if n in self._leaves]
            arrays = [[self._fitted(n, row[n]) for n in names] for row in rows]
            uses = [self._uses[self._leaves[n][0]] for n in names]
            addresses = 16 * np.concatenate([np.zeros(0, np.int64), *uses])
            counts = [len(s) for s in uses]
            starts = [[a.__array_interface__["data"][0] for a in row] for row in arrays]
            words = np.repeat(np.array(starts, np.int64).reshape(len(rows), -1), counts, axis=1)
            types = [self.plan.outputs[i].type for i in wanted]
            ends = [0, *itertools.accumulate(t.nbytes for t in types)]
            found = np.zeros((len(rows), ends[-1]), np.uint8)
            results = np.array(
                [
                    (self._table[self.plan.outputs[i].slot], found.ctypes.data + at, t.nbytes)
                    for i, t, at in zip(wanted, types, ends, strict=False)
                ],
                np.int64,
            ).reshape(-1, 3)
            addresses += self._arguments.ctypes.data
            pool(self.threads).run_several(self._address, addresses, words, results, ends[-1])
            for name, array in zip(names, arrays[-1], strict=True):
                self._arrays[self._leaves[name][0]] = array
            columns = [
                np.ascontiguousarray(found[:, at:end])
                .view(t.dtype.numpy)
                .reshape(len(rows), *t.shape)
                for t, at, end in zip(types, ends, ends[1:], strict=False)
            ]
            return [tuple(c[i, ...] for c in columns) for i in range(len(rows))]

    def _hold(
        self,
        owner: object,
        version: int,
        values: Mapping[str, np.ndarray],
        inputs: Mapping[str, np.ndarray],
    ) -> None:
        """Bind what an owner holds, once for each version."""
        if self._held != (owner, version):
            for name in self._leaves:
                if name not in inputs:
                    self._bind(name, values[name])
            self._held = (owner, version)

    def _fitted(self, name: str, array: np.ndarray) -> np.ndarray:
        dtype = self._leaves[name][1].dtype.numpy
        if array.dtype != dtype or not array.flags.c_contiguous:
            return np.ascontiguousarray(array, dtype)
        return array

    def profile(self, values: Mapping[str, np.ndarray], repeats: int = 3) -> list[Timing]:
        """What the calls of each entry take in a run, one thread, the best of some runs.

        The values stay as they are. Processor time, so that other processes do not count.
        """
        best = [math.inf] * len(self.plan.entries)
        types = ctypes.c_int64, ctypes.c_int64, *[ctypes.c_void_p] * 2, ctypes.c_int64
        symbols = self._library.addresses([e.symbol for e in self.plan.entries])
        functions = [ctypes.CFUNCTYPE(None, *types)(address) for address in symbols]
        with self._lock:
            for _ in range(repeats):
                self._bind_copies(values)
                seconds = [0.0] * len(best)
                self._walk(self.plan.steps, functions, iter(self._call_addresses()), 0, seconds)
                best = [min(pair) for pair in zip(best, seconds, strict=True)]
            self._held = (None, -1)
        calls = (facts.calls for facts in self.plan.kernels)
        pairs = zip(calls, best, strict=True)
        return [Timing(((entry, count),), taken) for entry, (count, taken) in enumerate(pairs)]

    def _call_addresses(self) -> list[int]:
        """The address of the arguments of each call of the plan."""
        counts = [len(c.slots) for c in planned_calls(self.plan.steps)]
        starts = [0, *itertools.accumulate(counts)]
        return [self._arguments.ctypes.data + 16 * start for start in starts]

    def _walk(
        self,
        steps: Sequence[PlannedStep],
        functions: Sequence[Callable[..., None]],
        addresses: Iterator[int],
        iteration: int,
        seconds: list[float],
    ) -> None:
        for step in steps:
            if isinstance(step, PlannedRepeat):
                inner = [next(addresses) for _ in planned_calls(step.steps)]
                iterations = range(step.length)
                for i in reversed(iterations) if step.reverse else iterations:
                    self._walk(step.steps, functions, iter(inner), i, seconds)
                continue
            for call in step.calls:
                length = self.plan.entries[call.entry].iterations
                address = next(addresses)
                start = time.thread_time()
                functions[call.entry](0, length, self._scratch.ctypes.data, address, iteration)
                seconds[call.entry] += time.thread_time() - start

    def _bind(self, name: str, array: np.ndarray) -> None:
        slot = self._leaves[name][0]
        if self._arrays.get(slot) is array:
            return
        self._arrays[slot] = array
        self._arguments[self._uses[slot], 0] = array.__array_interface__["data"][0]

    def _outputs(self, wanted: Sequence[int]) -> tuple[np.ndarray, ...]:
        return tuple([self._result(i).copy() for i in wanted])

    def _result(self, i: int) -> np.ndarray:
        """An output's memory, by the type that the graph gives it."""
        output = self.plan.outputs[i]
        array, type_ = self._arrays[output.slot], output.type
        if array.shape == type_.shape and array.dtype == type_.dtype.numpy:
            return array
        memory = array.reshape(-1).view(np.uint8)[: type_.nbytes]
        return memory.view(type_.dtype.numpy).reshape(type_.shape)
