"""Programs on a WebGPU device: a step is one command buffer, and results are read when looked at.

Constants, inputs, results and what is between them lie in memory of the program's own, values in
the session's.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from treadle.base.words import WORD, as_words, from_words, nbytes_of
from treadle.ir.graph import Graph, OutputKind
from treadle.ir.types import TensorType
from treadle.kernel.choices import Chosen
from treadle.kernel.plan import Plan
from treadle.kernel.shaders import Shader, scratch_places
from treadle.runtime.executable import Timing
from treadle.runtime.webgpu.commands import Commands
from treadle.runtime.webgpu.device import device, padded
from treadle.runtime.webgpu.transfers import Later, Pending, Returns
from treadle.runtime.webgpu.values import DeviceValues, Room, rooms

WARM = 5  # runs before one that is timed


class WebGpuProgram:
    """A plan with its shaders and its memory. One call runs at a time."""

    is_in_place, shares_arena, workspace = True, False, 0

    def __init__(
        self,
        graph: Graph,
        plan: Plan,
        constants: Mapping[str, np.ndarray],
        shaders: Sequence[Shader],
        chosen: Chosen = (),
        halves: bool | None = None,
    ):
        """With `halves` float16 takes two bytes, as it does in a session where the device can."""
        self._halves = device().limits.has_f16 if halves is None else halves
        self.graph, self.plan, self.shaders, self.chosen = graph, plan, shaders, chosen
        self._device, self._lock, self.runs = device(), threading.Lock(), 0
        self._leaves = {name: (slot, type_) for name, slot, type_ in plan.leaves}
        wanted = [i for i, o in enumerate(plan.outputs) if o.kind is not OutputKind.UPDATE]
        names = [f"{plan.outputs[i].kind.value}:{plan.outputs[i].name}" for i in wanted]
        self.results = names, wanted  # what is not an update
        self.prints = [o.name for o in plan.outputs if o.kind is OutputKind.PRINT]
        self.can_repeat = not self.prints
        self._own = self._memory(constants)
        self._returns = Returns(self._results_size)
        self._inputs: dict[str, Room] = {}
        self._bound: tuple[object, ...] = ()
        self._commands: Commands | None = None

    def _memory(self, constants: Mapping[str, np.ndarray]) -> dict[int, Room]:
        """Rooms by slot of what is the program's own."""
        plan, what = self.plan, "the program, beside its parameters and state,"
        given = {s for s, _ in self._leaves.values()} | {c.slot for c in plan.constants}
        self._result_offsets: dict[int, int] = {}
        size = 0
        for output in plan.outputs:
            if output.slot not in given | set(self._result_offsets):
                self._result_offsets[output.slot] = size
                size += padded(plan.slots[output.slot].nbytes)
        self._results_size = size
        sizes = {f"constant {c.name}": plan.slots[c.slot].nbytes for c in plan.constants}
        small = rooms(sizes | {"results": size}, what)
        found = {c.slot: small[f"constant {c.name}"] for c in plan.constants}
        for constant in plan.constants:
            room = found[constant.slot]
            self._device.write(room.buffer, room.start, constants[constant.name].view(np.uint32))
        self._results = start = small["results"]
        for slot, offset in self._result_offsets.items():
            nbytes = plan.slots[slot].nbytes
            found[slot] = Room(start.buffer, start.start + offset, nbytes)
        sizes_, places = scratch_places(plan, device().limits.binding_bytes)
        arenas = [device().buffer(n, what) for n in sizes_]
        for i, (arena, offset) in places.items():
            found[i] = Room(arenas[arena], offset, plan.slots[i].nbytes)
        return found

    # Binding

    def _commands_on(self, leaves: Mapping[str, Room]) -> Commands:
        """The launches, with leaves where they are given."""
        own = self._own | {slot: leaves[name] for name, (slot, _) in self._leaves.items()}
        buffers = {id(room.buffer): room.buffer for room in own.values()}
        numbers = {key: i for i, key in enumerate(buffers)}
        places = [
            (numbers[id(own[i].buffer)], own[i].start) if i in own else (0, 0)
            for i in range(len(self.plan.slots))
        ]
        return Commands(self.plan, self.shaders, places, list(buffers.values()))

    def _bind(self, values: DeviceValues, inputs: Mapping[str, Any]) -> Commands:
        """Commands on what the owner holds, made anew if its places have changed."""
        names = [n for n in self._leaves if n in inputs]
        key = (values, values.layout, tuple(names))
        if self._commands is None or self._bound != key:
            missing = [n for n in names if n not in self._inputs]
            sizes = {n: self._nbytes(self._leaves[n][1]) for n in missing}
            self._inputs |= rooms(sizes, "the inputs")
            leaves = {n: self._inputs[n] if n in inputs else values.place(n) for n in self._leaves}
            self._commands, self._bound = self._commands_on(leaves), key
        return self._commands

    def _submit(self, commands: Commands, pending: Pending | None = None) -> None:
        here = self._device
        with here.lock, here.checked("step"):
            encoder = here.device.create_command_encoder()
            commands.encode(encoder)
            if pending is not None and self._results_size:
                start = self._results
                encoder.copy_buffer_to_buffer(
                    start.buffer, start.start, pending.buffer, 0, self._results_size
                )
            here.queue.submit([encoder.finish()])

    # Runs by themselves

    def _copies(self, values: Mapping[str, np.ndarray]) -> dict[str, Room]:
        """Leaves on the device, in memory of their own."""
        sizes = {n: self._nbytes(t) for n, (_, t) in self._leaves.items()}
        found, read = rooms(sizes, "the values"), self.graph.leaves
        for name, (_, type_) in self._leaves.items():
            given = values[name] if name in read else np.zeros(type_.shape)
            words = as_words(np.ascontiguousarray(given, type_.dtype.numpy), self._halves)
            self._device.write(found[name].buffer, found[name].start, words)
        return found

    def run(self, values: Mapping[str, np.ndarray]) -> tuple[np.ndarray, ...]:
        """All outputs, in order; the values given stay as they are."""
        with self._lock:
            leaves = self._copies(values)
            self._submit(self._commands_on(leaves))
            own = self._own | {slot: leaves[n] for n, (slot, _) in self._leaves.items()}
            return tuple(self._read(own[o.slot], o.type) for o in self.plan.outputs)

    def _read(self, room: Room, type_: TensorType) -> np.ndarray:
        words = self._device.read(room.buffer, room.start, self._nbytes(type_))
        return from_words(words, type_.shape, type_.dtype.numpy, self._halves)

    def _nbytes(self, type_: TensorType) -> int:
        return nbytes_of(type_.size, type_.dtype.numpy, self._halves)

    def seconds(self, values: Mapping[str, np.ndarray], least: float) -> float:
        """What a run takes by the clock, the mean of as many as take some time."""
        with self._lock:
            commands = self._commands_on(self._copies(values))
            count, start = 0, 0.0
            while not count or time.perf_counter() - start < least:
                self._submit(commands)
                if not count:  # pipelines are warm
                    self._wait()
                    start = time.perf_counter()
                count += 1
            self._wait()
            return (time.perf_counter() - start) / max(1, count - 1)

    def _wait(self) -> None:
        self._device.read(self._results.buffer, 0, WORD)

    def profile(self, values: Mapping[str, np.ndarray]) -> list[Timing]:
        """What each kernel takes in a run, by timestamps; the values stay as they are."""
        with self._lock:
            commands = self._commands_on(self._copies(values))
            for _ in range(WARM):  # devices slow down while values are copied
                self._submit(commands)
            return commands.timed()

    # Runs on a session's values

    def run_on(
        self,
        owner: object,
        version: int,
        values: Mapping[str, np.ndarray],
        inputs: Mapping[str, Any],
        wanted: Sequence[int],
        stays: bool = False,
    ) -> Sequence[Any]:
        """Some outputs, which are waited for when they are looked at; values stay on the device."""
        assert isinstance(values, DeviceValues)
        with self._lock:
            commands = self._bind(values, inputs)
            for name, array in inputs.items():
                if name in self._leaves:
                    dtype = self._leaves[name][1].dtype.numpy
                    room = self._inputs[name]
                    words = as_words(np.asarray(array).astype(dtype, copy=False), self._halves)
                    self._device.write(room.buffer, room.start, words)
            pending = self._returns.take()
            self._submit(commands, pending)
            self.runs += 1
            return [self._output(i, pending, values, inputs) for i in wanted]

    def _output(
        self, i: int, pending: Pending, values: DeviceValues, inputs: Mapping[str, Any]
    ) -> Any:
        output = self.plan.outputs[i]
        at = self._result_offsets.get(output.slot)
        if at is not None:
            return Later(pending, at, output.type, self._halves)
        leaf = next((n for n, (s, _) in self._leaves.items() if s == output.slot), None)
        room = self._own.get(output.slot)
        if leaf is not None:
            room = self._inputs[leaf] if leaf in inputs else values.place(leaf)
        assert room is not None
        return self._read(room, output.type)

    def run_several_on(
        self,
        owner: object,
        version: int,
        values: Mapping[str, np.ndarray],
        rows: Sequence[Mapping[str, Any]],
        wanted: Sequence[int],
    ) -> list[Sequence[Any]]:
        """`run_on` for each row of inputs; nothing is waited for between them."""
        return [self.run_on(owner, version, values, row, wanted) for row in rows]
